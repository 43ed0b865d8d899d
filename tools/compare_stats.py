"""
The statistics of compare.py, with its table, its sentences and its plot.

n is the number of runs. Intervals have 99% confidence.

- Difference in loss: Welch's two-sided t-test. p-values are corrected over the ideas by Holm's method.
- "One of X or more would have been seen nine times in ten": with a true difference of X, p would be below 0.01
  that often. X includes the uncertainty of the measured noise.
- Step time: the mean logarithm of idea / base within a round, with Student's t-test. Drift cancels.
- Steps to the base's loss: the base also runs with fewer and more steps. A line through its loss over the
  logarithm of steps turns a difference in loss into steps, and with the step time into time. Intervals use
  the delta method. The slope is the one within rounds, so the level of a seed doesn't matter.

Losses are not paired by seed. With five runs, pairs need a correlation of 0.5, and over the 64 changes in
records/mini/ideas the median is 0.32.
"""

import functools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import optimize, stats

from log_parsing import Log
from verify import P_VALUE, p_text

POWER = 0.9  # nine times in ten

Bounds = tuple[float, float]


@dataclass
class Effect:
    """Of an idea, against the base. Losses in nats per token; None: not known."""

    name: str
    n: int
    base_n: int
    loss: float
    difference: float
    difference_interval: Bounds
    p: float | None  # None where neither side has any spread
    detectable: float  # X
    p_corrected: float | None = None
    step_time: float | None = None  # a fraction of the base's
    step_time_interval: Bounds | None = None
    step_time_p: float | None = None
    step_time_p_corrected: float | None = None
    steps: float | None = None  # to the base's loss, more than the base's: -0.04 is 4% fewer
    steps_interval: Bounds | None = None
    time: float | None = None  # likewise
    time_interval: Bounds | None = None

    @property
    def verdict(self) -> str:
        if self.p is None:
            return "no test"
        return (
            "no difference shown"
            if self.p_corrected >= P_VALUE
            else "helps"
            if self.difference < 0
            else "hurts"
        )


# ----------------------------------------------------------------------------------------------------------
# Statistics. A "part" is a variance with its degrees of freedom
def combine(parts: list[Bounds]) -> tuple[float, float]:
    """Standard error and degrees of freedom (Welch, Satterthwaite) of a sum of independent parts."""
    variance = sum(v for v, _ in parts)
    return math.sqrt(variance), variance**2 / sum(v**2 / df for v, df in parts) if variance else 1.0


def interval(center: float, parts: list[Bounds]) -> Bounds:
    error, df = combine(parts)
    half = error * float(stats.t.ppf(1 - P_VALUE / 2, df))
    return center - half, center + half


def exponentials(bounds: Bounds) -> Bounds:
    """Finite ones: an interval from two runs may reach anywhere."""
    return math.exp(min(bounds[0], 700)), math.exp(min(bounds[1], 700))


def p_value(center: float, parts: list[Bounds]) -> float | None:
    """Two-sided, of its being zero. None where nothing varies."""
    error, df = combine(parts)
    return 2 * float(stats.t.sf(abs(center) / error, df)) if error else None


def mean_and_part(values: list[float]) -> tuple[float, Bounds]:
    return statistics.fmean(values), (statistics.variance(values) / len(values), len(values) - 1)


def holm(ps: list[float | None]) -> list[float | None]:
    """Holm's correction of the p-values that are there."""
    left, corrected, largest = sum(p is not None for p in ps), list(ps), 0.0
    for i in sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i]):
        corrected[i] = largest = max(largest, min(1.0, left * ps[i]))
        left -= 1
    return corrected


@functools.lru_cache(100_000)
def detectable_errors(df: float, alpha: float) -> float:
    """How many measured standard errors a true difference needs to be found in POWER of repetitions."""
    critical = stats.t.ppf(1 - alpha / 2, df)
    # Measured standard errors, as fractions of the true one
    measured = np.sqrt(stats.chi2.ppf((np.arange(100) + 0.5) / 100, df) / df)
    found = lambda c: stats.nct.sf(critical, df, c * measured).mean()
    return float(optimize.brentq(lambda c: found(c) - POWER, critical, 1e4 * critical))


def loss_slope(groups: list[list[Log]]) -> tuple[float, Bounds] | None:
    """The slope of the loss over the logarithm of steps, and its part; None if the loss doesn't clearly fall.

    Each group has its own number of steps, and one log per round.
    """
    if len({group[0].num_steps for group in groups}) < 3:
        return None
    steps = np.log([[log.num_steps for log in group] for group in groups])  # (groups, rounds)
    losses = np.array([[log.final.val_loss for log in group] for group in groups])
    steps = steps - steps.mean(0)  # one level for each round, one slope for all
    losses = losses - losses.mean(0)
    fit = stats.linregress(steps.ravel(), losses.ravel())
    df = losses.size - losses.shape[1] - 1
    variance = float(fit.stderr) ** 2 * (losses.size - 2) / df  # linregress counts only one level
    part = (variance, df)
    if interval(fit.slope, [part])[1] >= 0:
        return None
    return float(fit.slope), part


def analyse(
    base: list[Log], ideas: dict[str, list[Log]], extras: list[list[Log]] = (), timed: bool = True
) -> list[Effect]:
    """Takes two or more complete logs of each, in the order of the rounds.

    `extras` are those of the base with other numbers of steps.
    """
    slope = loss_slope([base, *extras])
    base_loss, base_part = mean_and_part([log.final.val_loss for log in base])
    effects = []
    for name, logs in ideas.items():
        loss, part = mean_and_part([log.final.val_loss for log in logs])
        difference, parts = loss - base_loss, [part, base_part]
        error, df = combine(parts)
        e = Effect(
            name,
            len(logs),
            len(base),
            loss,
            difference,
            interval(difference, parts),
            p_value(difference, parts),
            error * detectable_errors(round(df, 1), P_VALUE / len(ideas)),
        )
        effects.append(e)
        if timed:
            ratios = [
                math.log(a.final.step_avg_ms / b.final.step_avg_ms) for a, b in zip(logs, base)
            ]
            ratio, ratio_part = mean_and_part(ratios)
            e.step_time, e.step_time_interval = (
                math.exp(ratio),
                exponentials(interval(ratio, [ratio_part])),
            )
            e.step_time_p = p_value(ratio, [ratio_part])
        if slope:
            b, (b_variance, b_df) = slope
            steps = math.log(logs[0].num_steps / base[0].num_steps) - difference / b
            parts = [(v / b**2, k) for v, k in parts] + [(difference**2 * b_variance / b**4, b_df)]
            low, high = exponentials(interval(steps, parts))
            e.steps, e.steps_interval = math.expm1(steps), (low - 1, high - 1)
            if timed:
                low, high = exponentials(interval(steps + ratio, [*parts, ratio_part]))
                e.time, e.time_interval = math.expm1(steps + ratio), (low - 1, high - 1)
    for e, p, time_p in zip(
        effects, holm([e.p for e in effects]), holm([e.step_time_p for e in effects])
    ):
        e.p_corrected, e.step_time_p_corrected = p, time_p
    return effects


# ----------------------------------------------------------------------------------------------------------
# The answer
def short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "~"


def percent(x: float | None, bounds: Bounds | None = None) -> str:
    """Of what is more than the base's."""
    show = lambda x: f"{x:+.1%}" if x < 10 else "over +1000%"
    return (
        "-"
        if x is None
        else show(x) + (f" ({show(bounds[0])} to {show(bounds[1])})" if bounds else "")
    )


def in_words(e: Effect) -> str:
    n = f"n = {e.n} and {e.base_n}"
    if e.verdict == "no test":
        text = f"no test: the losses of neither side have any spread ({n})"
    elif e.verdict == "no difference shown":
        text = (
            f"no difference shown; one of {e.detectable:.4f} or more would have been seen nine times in ten "
            f"({n})"
        )
    else:
        low, high = sorted(map(abs, e.difference_interval))
        text = (
            f"{e.verdict}: loss {abs(e.difference):.4f} {'lower' if e.difference < 0 else 'higher'} "
            f"({low:.4f} to {high:.4f}; {n})"
        )
        if e.steps is not None:
            text += f"; to the base's loss: steps {percent(e.steps, e.steps_interval)}"
            text += ", beyond the tenth that was measured" if not 0.9 <= 1 + e.steps <= 1.1 else ""
        if e.time is not None:
            text += f", time {percent(e.time, e.time_interval)}"
            if (
                e.verdict == "helps"
                and e.time_interval[0] > 0
                or e.verdict == "hurts"
                and e.time_interval[1] < 0
            ):
                text += f", so {'later' if e.time > 0 else 'sooner'} there all the same"
    if e.step_time_p_corrected is not None and e.step_time_p_corrected < P_VALUE:
        text += f"; time of a step {percent(e.step_time - 1, tuple(bound - 1 for bound in e.step_time_interval))}"
    return f"{e.name}: {text}"


def table(groups: dict[str, list[Log]], effects: list[Effect]) -> list[str]:
    """Lines of about 80 columns, one for each group of logs, the base's first."""
    rows = [("idea", "n", "loss", "difference", "p", "step time", "steps", "time")]
    found = {e.name: e for e in effects}
    for name, logs in groups.items():
        row = [
            short(name),
            str(len(logs)),
            f"{statistics.fmean(log.final.val_loss for log in logs):.4f}",
        ]
        if e := found.get(name):
            half = lambda bounds, places: (
                f"{h:.{places}f}" if (h := (bounds[1] - bounds[0]) / 2) < 10 else ">10"
            )
            row += [
                f"{e.difference:+.4f}±{half(e.difference_interval, 4)}",
                p_text(e.p_corrected),
                f"{e.step_time:.3f}±{half(e.step_time_interval, 3)}" if e.step_time else "-",
                percent(e.steps),
                percent(e.time),
            ]
        elif len(rows) == 1:
            row += ["", "", f"{statistics.fmean(log.final.step_avg_ms for log in logs):.2f} ms"]
        rows.append(row + [""] * (8 - len(row)))
    widths = [max(len(row[i]) for row in rows) for i in range(8)]
    return [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def plot_effects(effects: list[Effect], path: Path) -> None:
    """A row an idea, with intervals: the loss, and what is known of the times. Raises LogError."""
    from plot import (
        COLORS,
        plt,
        save_figure,
    )  # takes a second, which a comparison without a picture is spared

    panels = [
        ("difference in loss", "difference", 1, 0),
        ("time of a step, %", "step_time", 100, 1),
        ("time to the base's loss, %", "time", 100, 0),
    ]
    panels = [panel for panel in panels if all(getattr(e, panel[1]) is not None for e in effects)]
    figure, axes = plt.subplots(
        1, len(panels), sharey=True, squeeze=False, figsize=(8, 1.5 + 0.4 * len(effects))
    )
    for ax, (title, name, factor, zero) in zip(axes[0], panels):
        for row, e in enumerate(effects):
            bounds = [factor * (bound - zero) for bound in getattr(e, f"{name}_interval")]
            color = "0.45" if bounds[0] <= 0 <= bounds[1] else COLORS[2 if bounds[1] < 0 else 1]
            ax.plot(bounds, [row, row], color=color, linewidth=2)
            ax.plot([factor * (getattr(e, name) - zero)], [row], "o", color=color, markersize=5)
        ax.axvline(0, color="0.35", linestyle="--", linewidth=1.2, zorder=1)
        ax.set_title(title)
        if factor == 100:
            ax.set_xlim(right=min(ax.get_xlim()[1], 500))  # two runs' intervals may reach anywhere
    axes[0, 0].set_yticks(range(len(effects)), [f"{e.name}\nn = {e.n}" for e in effects])
    axes[0, 0].set_ylim(len(effects) - 0.5, -0.5)
    figure.supxlabel(
        "idea against the base, 99% intervals; left of the line is better", fontsize=11
    )
    save_figure(figure, path)
