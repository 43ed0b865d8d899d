"""The answer of screen.py: as a table, as JSON and as a plot."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from judge.screen.design import Design, PartEffect, find_part_effect
from lib.text import as_json, plural, short, table, wrap


@dataclass
class Result:
    """The blocks of a screen, and what they say."""

    names: list[str]  # of the parts
    design: Design
    losses: np.ndarray  # float64 (blocks, combinations)
    until: float
    facts: str  # about the metric and the machine

    def effects(self) -> list[PartEffect]:
        """Of the parts, if there is a block."""
        contrasts = self.design.contrasts if len(self.losses) else []
        return [find_part_effect(self.losses, c, self.until, len(contrasts)) for c in contrasts]

    def ranking(self) -> list[tuple[PartEffect, str]]:
        """With their names, the most needed part first."""
        return sorted(zip(self.effects(), self.names), key=lambda pair: pair[0].difference)

    def interactions(self) -> list[tuple[list[str], PartEffect]]:
        """The groups of pairs that clearly act together: the names of their pairs, and the effect."""
        found = []
        groups = self.design.groups if len(self.losses) else []
        for group in groups:
            effect = find_part_effect(self.losses, group.contrast, self.until, len(groups))
            if abs(effect.difference) > effect.half_width:
                pairs = [f"{self.names[i]} x {self.names[j]}" for i, j in group.pairs]
                found.append((pairs, effect))
        return found


# -----------------------------------------------------------------------------
# Words


def bounds_in_words(effect: PartEffect) -> str:
    """Of the loss without the part."""
    low = -effect.difference - effect.half_width
    high = -effect.difference + effect.half_width
    return f"({low:+.4f} to {high:+.4f})" if np.isfinite(low) else "(no interval yet)"


def table_of_parts(result: Result) -> list[str]:
    """A line a part, the most needed one first."""
    rows = [("part", "without it", "99% interval", "answer")]
    for effect, name in result.ranking():
        without = f"{-effect.difference:+.4f}"
        rows.append((short(name, 30), without, bounds_in_words(effect), effect.verdict))
    return table(rows, "<><<")


def interaction_in_words(pairs: list[str], effect: PartEffect) -> str:
    better = "more" if effect.difference < 0 else "less"
    if len(pairs) == 1:
        return f"{pairs[0]}: together they do {better} than the sum of both ({effect.difference:+.4f})."
    return f"At least one of these pairs does {better} together than alone: {', '.join(pairs)}."


def facts_in_words(result: Result) -> str:
    blocks, combinations = result.losses.shape
    means = result.losses.mean(axis=0)
    every = f"The loss with all parts is {means[0]:.4f}, with none {means[-1]:.4f}."
    runs = f"{plural(blocks, 'block')} of {combinations} combinations."
    average = (
        "Without it: how much higher the loss is then, a mean over combinations of the other parts."
    )
    if not result.design.groups and len(result.names) > 1:
        average = "Without it: how much higher the loss of the whole is then."
    together = "Intervals hold for all parts together, however often you look."
    barnacle = (
        f"Barnacle: we are 95% sure that the part changes the loss by less than {result.until:g}."
    )
    return " ".join([every, runs, average, together, barnacle, result.facts])


def effects_in_words(result: Result) -> list[str]:
    """Lines of 80 columns."""
    if not len(result.losses):
        return ["Too early for an answer: no block is finished yet."]
    lines = table_of_parts(result)
    for pairs, effect in result.interactions():
        lines += wrap(interaction_in_words(pairs, effect))
    return [*lines, "", *wrap(facts_in_words(result))]


def effects_as_json(result: Result) -> bytes:
    pairs = zip(result.names, result.effects())
    found = {
        "until": result.until,
        "parts": [{"name": name, **asdict(effect)} for name, effect in pairs],
        "interactions": [{"pairs": names, **asdict(effect)} for names, effect in result.interactions()],
        "combinations": result.design.rows.tolist(),
        "losses": result.losses.tolist(),
    }
    return as_json(found)


# -----------------------------------------------------------------------------
# Plot


def plot_effects(result: Result, path: Path) -> None:
    """Draws the loss without each part with its interval, the most needed one at the top. Raises
    UserError."""
    from judge.figures import plt, save_figure  # slow to import, and only needed here

    pairs = result.ranking()
    figure, ax = plt.subplots(figsize=(8, 1.6 + 0.35 * len(pairs)))
    for row, (effect, _) in enumerate(pairs):
        error = effect.half_width if np.isfinite(effect.half_width) else 0
        ax.errorbar(-effect.difference, row, xerr=error, fmt="o", color="tab:blue", linewidth=2)
    ax.set_yticks(range(len(pairs)), [f"{short(name, 40)}: {e.verdict}" for e, name in pairs])
    ax.set_ylim(len(pairs) - 0.5, -0.5)
    ax.axvline(0, color="0.35", linestyle="--", linewidth=1.2, zorder=1)
    ax.axvspan(-result.until, result.until, color="0.9", zorder=0, label=f"less than {result.until:g}")
    ax.set_xlabel("loss without the part, minus with it")
    ax.legend(fontsize=9)
    ax.set_title(f"{plural(len(result.losses), 'block')}, 99% intervals", fontsize=10)
    save_figure(figure, path)
