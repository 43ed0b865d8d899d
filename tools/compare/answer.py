"""The answer of compare.py: in words, as a table, as JSON and as a plot."""

import math
import textwrap
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tools.compare.stats import P_VALUE, Bounds, Effect, Slope, fewest_pairs, half_widths, log_steps
from tools.common import p_text

WIDTH = 80
STEPS_UNKNOWN = "Steps are unknown: they take more runs of the base with fewer and with more steps."
NEEDS_PAIRS = "an idea needs two pairs of runs"
NO_INTERVAL = f"no interval before {fewest_pairs(1)} pairs"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def percent(x: float | None) -> str:
    """-0.04 as "-4.0%"."""
    if x is None:
        return "-"
    if x > 10:
        return "over +1000%"
    return f"{x:+.1%}"


def percent_interval(bounds: Bounds) -> str:
    return f"{percent(bounds[0])} to {percent(bounds[1])}"


def goal(until: float) -> str:
    """0.02 as "2%"."""
    return f"{100 * until:g}%"


def steps_in_words(steps: float) -> str:
    return f"{abs(steps):.1%} {'fewer' if steps < 0 else 'more'} steps"


def short(name: str, width: int) -> str:
    return name if len(name) <= width else name[: width - 1] + "~"


# -----------------------------------------------------------------------------
# Words


def headline(effect: Effect, until: float | None) -> str:
    """The verdict as a sentence."""
    name = short(effect.name, 30)
    if effect.verdict == "identical":
        return f"{name}: the losses are identical in all {effect.n} pairs."
    known = effect.steps is not None
    needs = f" It needs {steps_in_words(effect.steps)} for the same loss." if known else ""
    if effect.verdict == "helps":
        return f"{name} helps.{needs}"
    if effect.verdict == "hurts":
        return f"{name} hurts.{needs}"
    if effect.verdict == "not worth it":
        return f"{name} is not worth it: it saves less than {goal(until)} of the steps."
    if known and has_interval(effect):
        low, high = effect.steps_interval
        return f"{name}: undecided. It changes the steps by {percent(low)} to {percent(high)}."
    return f"{name}: undecided."


def time_conflict(effect: Effect) -> str:
    """A warning if the loss and the time to the same loss disagree; "" if not."""
    if effect.time_interval is None:
        return ""
    low, high = effect.time_interval
    if effect.verdict == "helps" and low > 0:
        return "But its steps are slower, so the same loss takes more time."
    if effect.verdict != "helps" and high < 0:
        return "But its steps are faster, so the same loss takes less time."
    return ""


def has_interval(effect: Effect) -> bool:
    """False for the first few pairs."""
    return math.isfinite(effect.difference_interval[0])


def numbers(effect: Effect) -> list[str]:
    """A line for each number, with its interval."""
    low, high = effect.difference_interval
    interval = f"{low:+.4f} to {high:+.4f}"
    interval_in_steps = percent_interval(effect.steps_interval or (0, 0))
    if not has_interval(effect):
        interval = interval_in_steps = NO_INTERVAL
    rows = [("loss", f"{effect.difference:+.4f}", interval)]
    if effect.steps is not None:
        rows.append(("steps", percent(effect.steps), interval_in_steps))
    if effect.step_time is not None:
        bounds = (effect.step_time_interval[0] - 1, effect.step_time_interval[1] - 1)
        rows.append(("time of a step", percent(effect.step_time - 1), percent_interval(bounds)))
    if effect.time is not None:
        interval = percent_interval(effect.time_interval) if has_interval(effect) else NO_INTERVAL
        rows.append(("time", percent(effect.time), interval))
    return [f"  {name:<15} {value:>8}   ({interval})" for name, value, interval in rows]


def answer_for_one(effect: Effect, until: float | None, facts: list[str]) -> list[str]:
    """At most 12 lines of 80 columns. `facts` are sentences about the runs."""
    lines = textwrap.wrap(headline(effect, until), WIDTH)
    if effect.verdict == "identical":
        return lines
    conflict = time_conflict(effect)
    if conflict:
        lines.append(conflict)
    lines += numbers(effect)
    about = f"{effect.n} pairs of runs, p = {p_text(effect.p)}. In parentheses: 99% confidence intervals."
    if effect.steps is not None:
        about += f" {what_steps_are(effect.time is not None)}"
    lines += textwrap.wrap(" ".join([about, *facts]), WIDTH)
    return lines


def what_steps_are(timed: bool) -> str:
    steps = "Steps and time are those" if timed else "Steps are those"
    return f"{steps} to reach the base's loss, computed from the difference in loss."


def table(effects: list[Effect]) -> list[str]:
    """One row per idea, about 80 columns wide."""
    rows = [("idea", "n", "loss", "steps", "interval", "time", "verdict")]
    for effect in effects:
        interval = "-"
        if effect.steps_interval is not None and has_interval(effect):
            interval = percent_interval(effect.steps_interval)
        row = (
            short(effect.name, 16),
            str(effect.n),
            f"{effect.difference:+.4f}",
            percent(effect.steps),
            interval,
            percent(effect.time),
            effect.verdict,
        )
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines


def answer_for_many(
    effects: list[Effect], names: list[str], until: float | None, facts: list[str]
) -> list[str]:
    """`names` are those of all ideas; `effects` has the ideas with at least two pairs of runs."""
    lines = [*table(effects), ""]
    for effect in effects:
        lines += textwrap.wrap(" ".join([headline(effect, until), time_conflict(effect)]), WIDTH)
    known = [effect.name for effect in effects]
    for name in names:
        if name not in known:
            lines += textwrap.wrap(f"{name}: too early for an answer; {NEEDS_PAIRS}.", WIDTH)
    timed = any(effect.time is not None for effect in effects)
    about = f"n: pairs of runs. Intervals have 99% confidence for all {len(names)} ideas together. "
    about += what_steps_are(timed)
    return lines + textwrap.wrap(" ".join([about, *facts]), WIDTH)


def progress(effects: list[Effect], wanted: int, time_left: str) -> str:
    """The line that is shown during the runs: the idea with the fewest pairs of those still undecided.
    At most 80 columns."""
    waiting = [effect for effect in effects if effect.verdict == "undecided"]
    if not waiting:
        identical = [effect for effect in effects if effect.verdict == "identical"]
        return f"the losses are identical so far, {time_left}" if identical else "decided"
    effect = min(waiting, key=lambda effect: effect.n)
    words = f"{short(effect.name, 14)}: {effect.n} of about {wanted} pairs"
    if effect.steps is not None and has_interval(effect):
        words += f", steps {percent_interval(effect.steps_interval)}"
    else:
        words += f", loss {effect.difference:+.4f}"
    return f"{words}, {time_left}"


def slope_in_words(slope: Slope | None) -> str:
    if slope is None:
        return ""
    one_percent = abs(slope.value) * -math.log1p(-0.01)
    words = f"If the base trains 1% fewer steps, its loss rises by {one_percent:.5f}"
    return f"{words} (standard error {slope.error:.0%})."


# -----------------------------------------------------------------------------
# JSON


def finite(value):
    """Infinite numbers as None, because JSON has none."""
    if isinstance(value, dict):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def effect_as_json(effect: Effect, until: float | None) -> dict:
    return finite({**asdict(effect), "words": headline(effect, until)})


# -----------------------------------------------------------------------------
# Plot


def draw_narrowing(ax, differences: np.ndarray, name: str, slope: Slope, ideas: int) -> None:
    """The estimate and its interval after each pair, in percent of the steps."""
    n = np.arange(1, len(differences) + 1)
    center = np.cumsum(differences) / n
    center, half = log_steps(center, half_widths(differences, P_VALUE / ideas), slope)
    shown = np.isfinite(half)
    line = ax.plot(n, 100 * np.expm1(center), linewidth=1.5, label=name)[0]
    low = 100 * np.expm1(center - half)
    high = 100 * np.expm1(np.minimum(center + half, 5))
    ax.fill_between(n[shown], low[shown], high[shown], alpha=0.2, color=line.get_color(), linewidth=0)


def draw_effects(ax, effects: list[Effect]) -> None:
    """All effects side by side, with their intervals."""
    for row, effect in enumerate(effects):
        low, high = effect.steps_interval
        color = "0.45"
        if high < 0:
            color = "tab:green"
        if low > 0:
            color = "tab:red"
        ax.plot([100 * low, 100 * min(high, 10)], [row, row], color=color, linewidth=2)
        ax.plot([100 * effect.steps], [row], "o", color=color, markersize=5)
    ax.set_yticks(range(len(effects)), [f"{short(e.name, 20)}, n = {e.n}" for e in effects])
    ax.set_ylim(len(effects) - 0.5, -0.5)
    ax.axvline(0, color="0.35", linestyle="--", linewidth=1.2, zorder=1)


def plot_answer(
    effects: list[Effect],
    differences: dict[str, np.ndarray],
    slope: Slope,
    until: float | None,
    path: Path,
) -> None:
    """Draws the intervals as they narrow, and all effects side by side. Raises FileError."""
    from tools.figures import plt, save_figure  # slow to import, and only needed here

    height = 4.8 + 0.35 * len(effects)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, height), height_ratios=[3.2, 0.4 + 0.35 * len(effects)]
    )
    for effect in effects:
        d = differences[effect.name][: effect.n]
        draw_narrowing(top, d, short(effect.name, 20), slope, len(effects))
    widest = max(abs(bound) for e in effects for bound in e.steps_interval if math.isfinite(bound))
    limit = 100 * min(max(2 * widest, 2 * (until or 0.02)), 0.5)
    top.set_ylim(-limit, limit)
    top.axhline(0, color="0.35", linestyle="--", linewidth=1.2, zorder=1)
    if until is not None:
        label = f"a gain of {goal(until)}"
        top.axhline(100 * -until, color="tab:green", linestyle=":", linewidth=1.2, label=label)
    top.set_xlabel("pairs of runs")
    top.set_ylabel("steps, %")
    top.legend(fontsize=9)
    draw_effects(bottom, effects)
    bottom.set_xlabel("steps to the same loss, %, with 99% intervals (left is better)")
    save_figure(figure, path)
