"""The answer of screen.py: as a table, as JSON and as a plot."""

import math
import statistics
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tools.common import goal, percent, percent_interval, plural, short, table
from tools.compare.answer import slope_in_words
from tools.compare.stats import Slope
from tools.screen.blocks import Block, Factor
from tools.screen.design import (
    Contrast,
    Fit,
    make_design,
    pairs_of_group,
    verdict,
)

WIDTH = 80
FAR = 3  # see warning_in_words


@dataclass
class Result:
    """Blocks that belong together, and what they say."""

    factors: list[Factor]
    blocks: list[Block]
    fit: Fit
    slope: Slope | None
    until: float

    def verdict(self, index: int) -> str:
        return verdict(self.fit.factors[index], self.until, self.factors[index].is_switch)

    def by_size(self) -> list[int]:
        """Indices of the factors, the largest effect first."""
        contrasts = self.fit.factors
        return sorted(range(len(contrasts)), key=lambda i: -abs(contrasts[i].difference))

    def mean_loss(self) -> float:
        """Of all configurations."""
        return statistics.mean(loss for block in self.blocks for loss in block.losses)

    def base_loss(self) -> float:
        """Halfway between the base's runs with fewer and with more steps: the loss is close to linear
        in log(steps), and both are the same factor away from the base's steps."""
        return statistics.mean((block.fewer + block.more) / 2 for block in self.blocks)


# -----------------------------------------------------------------------------
# Words


def side(options: str) -> str:
    """The value of the first option. Two dots stand for those of more options."""
    values = [word for word in options.split() if not word.startswith("--")]
    return f"{values[0]}.." if len(values) > 1 else " ".join(values)


def low_and_high(factor: Factor) -> tuple[str, str]:
    """What is compared, without the names of the options."""
    return ("off", "on") if factor.is_switch else (side(factor.low), side(factor.high))


def label(factor: Factor) -> str:
    return factor.name if factor.is_switch else f"{factor.name} ({', '.join(low_and_high(factor))})"


def table_of_factors(result: Result) -> list[str]:
    rows = [("factor", "low, high", "loss", "steps", "interval", "verdict")]
    for index in result.by_size():
        factor = result.factors[index]
        contrast = result.fit.factors[index]
        bounds = contrast.steps_interval
        row = (
            short(factor.name, 20),
            short(", ".join(low_and_high(factor)), 14),
            f"{contrast.difference:+.4f}",
            percent(contrast.steps),
            percent_interval(bounds) if bounds else "-",
            result.verdict(index),
        )
        rows.append(row)
    return table(rows, "<<>>><")


def group_in_words(result: Result, group: int) -> list[str]:
    """What an interaction may be."""
    factors = result.factors
    contrast = result.fit.groups[group - 1]
    pairs = pairs_of_group(group, len(factors))
    if not pairs:
        return []
    names = ", ".join(f"{factors[i].name} x {factors[j].name}" for i, j in pairs)
    words = "Two factors interact" if len(pairs) == 1 else "At least one of these pairs interacts"
    words += f": {names}. The effect is {contrast.difference:+.4f}, too large to be chance."
    if len(pairs) > 1:
        words += " A screen with the factors in another order leaves fewer of them together."
    return textwrap.wrap(words, WIDTH)


def shared_sides(result: Result, configurations: list[int]) -> list[str]:
    """The factors that have the same side in all of these configurations, with that side."""
    shared = []
    for factor, column in zip(result.factors, make_design(len(result.factors)).T):
        found = set(column[configurations])
        if len(found) == 1:
            shared.append(f"{factor.name} {low_and_high(factor)[found == {1}]}")
    return shared


def warning_in_words(result: Result) -> str:
    """Names configurations that hardly learn, and the sides that all of them have. "" if there are none.

    Their loss is more than FAR times as far above the middle, the median, as the best one is below it.
    Effects are differences of means, so one such loss moves all of them."""
    losses = np.mean([block.losses for block in result.blocks], axis=0)
    middle = np.median(losses)
    far = np.flatnonzero(losses > middle + FAR * (middle - losses.min())).tolist()
    if not far:
        return ""
    numbers = ", ".join(f"{number} ({losses[number]:.4f})" for number in far)
    words = f"Warning: {plural(len(far), 'configuration')} of {len(losses)} ended far above the median loss "
    words += f"of {middle:.4f}, and may dominate the table: {numbers}."
    shared = shared_sides(result, far)
    if shared and len(far) > 1:
        words += f" All of them have {', '.join(shared)}."
    return words + " Consider a screen with smaller changes."


def facts_in_words(result: Result) -> str:
    blocks = result.blocks
    machines = sorted(
        {f"{block.machine}, {plural(block.threads, 'thread')} per run" for block in blocks}
    )
    steps = "Steps: how many more or fewer it takes to reach the same loss"
    words = f"Loss: high minus low. {steps} with high than with low. "
    if all(factor.is_switch for factor in result.factors):
        words = f"Loss: with the idea minus without it. {steps} with the idea than without it. "
    if len(blocks) > 1:
        words += f"Intervals have 99% confidence for all {len(result.factors)} factors together. "
        words += f"Standard deviation of a run: {result.fit.sd:.4f}. "
    else:
        words += "Intervals need two blocks. "
    if not any(factor.is_switch for factor in result.factors):
        words += (
            f"The mean loss of all configurations is {result.mean_loss():.4f}. That of the base is "
        )
        words += (
            f"about {result.base_loss():.4f}, estimated from its runs with fewer and with more steps. "
        )
        words += "If the base's is lower, the best values may lie between low and high. "
    words += slope_in_words(result.slope)
    return f"{words} Runs on {'; '.join(machines)}."


def answer(name: str, result: Result, current: bool) -> list[str]:
    """Lines of 80 columns. `current`: the blocks are of the source and the settings as they are now."""
    blocks = result.blocks
    seeds = ", ".join(str(block.seed) for block in blocks)
    word = "seed" if len(blocks) == 1 else "seeds"
    title = f"{name}: {plural(len(blocks), 'block')} of 32 runs, {word} {seeds}, {blocks[0].dtype}, "
    title += f"PyTorch {blocks[0].torch}"
    if not current:
        title += ", made with another source or other settings than today's"
    lines = [*textwrap.wrap(title, WIDTH), "", *table_of_factors(result), ""]
    for group, contrast in enumerate(result.fit.groups, start=1):
        if contrast.found:
            lines += group_in_words(result, group)
    lines += textwrap.wrap(warning_in_words(result), WIDTH)
    return lines + textwrap.wrap(facts_in_words(result), WIDTH)


# -----------------------------------------------------------------------------
# JSON


def contrast_as_json(contrast: Contrast) -> dict:
    return {**asdict(contrast), "found": contrast.found}


def result_as_json(result: Result) -> dict:
    factors = result.factors
    rows = []
    for index, contrast in enumerate(result.fit.factors):
        row = {**asdict(factors[index]), **contrast_as_json(contrast), "verdict": result.verdict(index)}
        rows.append(row)
    groups = []
    for group, contrast in enumerate(result.fit.groups, start=1):
        pairs = pairs_of_group(group, len(factors))
        names = [[factors[i].name, factors[j].name] for i, j in pairs]
        groups.append({"pairs": names, **contrast_as_json(contrast)})
    blocks = result.blocks
    return {
        "dtype": blocks[0].dtype,
        "torch": blocks[0].torch,
        "machines": sorted({block.machine for block in blocks}),
        "seeds": [block.seed for block in blocks],
        "until": result.until,
        "sd": result.fit.sd,
        "mean_loss": result.mean_loss(),
        "base_loss": result.base_loss(),
        "slope": result.slope and asdict(result.slope),
        "factors": rows,
        "groups": groups,
    }


# -----------------------------------------------------------------------------
# Plot


def draw_effect(ax, row: int, contrast: Contrast, in_steps: bool) -> None:
    """The effect with its interval: in percent of the steps, or in loss."""
    color = "0.45"
    if contrast.found:
        color = "tab:green" if contrast.difference < 0 else "tab:red"
    center = 100 * contrast.steps if in_steps else contrast.difference
    ax.plot([center], [row], "o", color=color, markersize=5)
    if math.isfinite(contrast.half_width):
        bounds = [contrast.difference - contrast.half_width, contrast.difference + contrast.half_width]
        if in_steps:
            bounds = [100 * bound for bound in contrast.steps_interval]
        ax.plot(bounds, [row, row], color=color, linewidth=2)


def plot_result(name: str, result: Result, path: Path) -> None:
    """Draws the factors' effects with their intervals, the largest at the top. Raises FileError."""
    from tools.figures import plt, save_figure  # slow to import, and only needed here

    figure, ax = plt.subplots(figsize=(8, 1.4 + 0.35 * len(result.factors)))
    in_steps = result.slope is not None
    order = result.by_size()
    for row, index in enumerate(order):
        draw_effect(ax, row, result.fit.factors[index], in_steps)
    ax.set_yticks(range(len(order)), [short(label(result.factors[i]), 40) for i in order])
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.axvline(0, color="0.35", linestyle="--", linewidth=1.2, zorder=1)
    low, high = ("off", "on") if all(f.is_switch for f in result.factors) else ("low", "high")
    ax.set_xlabel(f"loss, {high} minus {low}")
    if in_steps:
        worth = 100 * result.until
        ax.axvspan(-worth, worth, color="0.9", zorder=0, label=f"less than {goal(result.until)}")
        ax.legend(fontsize=9)
        ax.set_xlabel(
            f"steps to the same loss, {high} against {low}, %, with 99% intervals\n(left: {high} is better)"
        )
    ax.set_title(f"{name}, {plural(len(result.blocks), 'block')}", fontsize=10)
    save_figure(figure, path)
