"""
What an idea does at several sizes of a model: the verdict over them, the trend, and the forecast of another size.

A change is log(the steps of the idea / those of the base) to the same loss. Over the logarithm of the number of
parameters, a line is fitted by least squares, with the inverses of the variances as weights. An effect at the moment of its
verdict is biased, because its comparison stopped when it was large. So a change comes from a number of pairs that
was fixed before, whatever the verdict is.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from judge.stats.decide import Effect, Estimate, Slope

LEVEL = 0.95  # of the intervals of changes, trends and forecasts
FEWEST_SIZES = 3  # of a forecast
WIDER = 1.0  # how much wider forecasts must be than the noise of the runs says: see docs/transfer.md


@dataclass
class Change:
    """log(steps of the idea / of the base), at one size. Its error has two sources: the losses of the pairs, and
    the slope that turns losses into steps."""

    parameters: float
    value: float
    variances: tuple[float, float]
    freedoms: tuple[float, float]  # degrees of freedom of the variances

    @property
    def variance(self) -> float:
        return sum(self.variances)


@dataclass
class Size:
    """One size of the model, and what is known there."""

    name: str
    parameters: float
    options: list[str]
    effect: Effect | None = None  # of the comparison, when it was decided
    change: Change | None = None  # in the pairs that were fixed before
    forecast: Estimate | None = None  # of the change, from the smaller sizes, before this one was run
    minutes: float = 0.0
    losses: dict[str, dict[str, float]] = field(default_factory=dict)  # by variant and seed
    notes: list[str] = field(default_factory=list)  # sentences for the answer


def changes(sizes: list[Size]) -> list[Change]:
    """Those that are known."""
    return [size.change for size in sizes if size.change]


def verdicts(sizes: list[Size]) -> list[str]:
    """Of the sizes that were run."""
    return [size.effect.verdict for size in sizes if size.effect]


def measure_change(
    parameters: float, differences: np.ndarray, step: float, slope: Slope, own_steps: float = 1.0
) -> Change:
    """The differences are the idea's losses minus the base's, of shape (pairs,), rounded to `step`."""
    pairs = len(differences)
    saved = float(differences.mean()) / abs(slope.value)
    spread = max(float(differences.var(ddof=1)), step**2 / 6)  # two losses are rounded
    of_losses = spread / pairs / slope.value**2
    of_slope = (saved * slope.error) ** 2
    value = saved + math.log(own_steps)
    return Change(parameters, value, (of_losses, of_slope), (pairs - 1, max(1, slope.n - 1)))


# -----------------------------------------------------------------------------
# The line


def weighted_sum(changes: list[Change], factors: np.ndarray, wider: float = 1.0) -> Estimate:
    """The sum of factors times changes, with its interval: Student's t, with the degrees of freedom of Welch and
    Satterthwaite."""
    value = float(factors @ [change.value for change in changes])
    parts = (factors**2)[:, None] * [change.variances for change in changes]  # (sizes, 2)
    freedoms = np.array([change.freedoms for change in changes])
    variance = float(parts.sum())
    freedom = variance**2 / float((parts**2 / freedoms).sum())
    half = wider * math.sqrt(variance) * float(stats.t.isf((1 - LEVEL) / 2, freedom))
    return Estimate(value, value - half, value + half)


def interval_of(change: Change) -> Estimate:
    return weighted_sum([change], np.ones(1))


def on_line(changes: list[Change], at: np.ndarray, wider: float = 1.0) -> Estimate:
    """`at`, (2,), times the line's height and slope, over the doublings of the parameters. If the changes scatter
    about the line more than their errors say, the interval is wider in the same proportion (Birge's ratio)."""
    x = np.log2([change.parameters for change in changes])
    y = np.array([change.value for change in changes])
    weights = 1 / np.array([change.variance for change in changes])
    design = np.stack([np.ones(len(x)), x])  # (2, sizes)
    fit = np.linalg.solve(
        (design * weights) @ design.T, design * weights
    )  # (2, sizes): changes to height and slope
    scatter = weights @ (y - fit @ y @ design) ** 2 / max(1, len(x) - 2)
    return weighted_sum(changes, at @ fit, wider * max(1.0, math.sqrt(scatter)))


def trend(changes: list[Change]) -> Estimate | None:
    """By how much the change differs for each doubling of the parameters. None for a single size."""
    return on_line(changes, np.array([0, 1])) if len(changes) > 1 else None


def forecast(changes: list[Change], parameters: float) -> Estimate | None:
    """The change at another size. None with too few sizes."""
    if len(changes) < FEWEST_SIZES:
        return None
    return on_line(changes, np.array([1, math.log2(parameters)]), WIDER)


# -----------------------------------------------------------------------------
# The verdict


def enough(found: list[str]) -> bool:
    """Whether the verdicts of the two smallest sizes already say that the idea doesn't pay."""
    return len(found) == 2 and {*found} <= {"hurts", "not worth it", "identical"}


def verdict_over(found: list[str]) -> str:
    """What the verdicts of the sizes, smallest first, say together. "helps" and "hurts" hold at each size, so they
    need no correction for the number of sizes."""
    if "undecided" in found or not found:
        return "undecided"
    if len(set(found)) == 1:
        return found[0]
    helps = [verdict == "helps" for verdict in found]
    if not any(helps):
        return "not worth it"
    if helps == sorted(helps, reverse=True):
        return "helps only small"
    if helps == sorted(helps):
        return "helps only large"
    return "undecided"
