"""
The statistics of compare.py: what an idea does to the loss, and what that is worth in steps and in time.

Losses are compared in pairs: the idea's loss minus the base's at the same seed. The test is the
anytime-valid t-test of Lai (1976), as in Wang and Ramdas, "Anytime-valid t-tests and confidence
sequences for Gaussian means with unknown variance" (2024, https://arxiv.org/abs/2310.03722). It
gives an e-value after each pair. Without an effect, the e-value ever reaches 100 with a probability
of at most 1%. So you may look after every pair, stop whenever you like, and go on later. With k
ideas, an idea needs an e-value of 100 k (Bonferroni), and its interval has all effects with less.

The base also runs with fewer and more steps. The slope of its loss over the logarithm of the steps
turns a difference in loss into steps. Intervals in steps and in time include the slope's error.
"""

import math
import statistics
from dataclasses import dataclass

import numpy as np
from scipy import stats

P_VALUE = 0.01
# The test's prior: effects are normal with a variance of 1 / PRIOR, in units of the variance of a
# difference. With 2, verdicts come a little sooner, but skewed losses give 1.6% of false positives.
PRIOR = 8.0
SLOPE_FACTOR = 1.25  # the base also runs with this many times fewer and more steps
FEWEST_SLOPES = 4  # seeds
LARGEST_SLOPE_ERROR = 0.1  # standard error of the slope, as a fraction of it

Bounds = tuple[float, float]


@dataclass
class Slope:
    """d loss / d log(steps) of the base."""

    value: float  # nats per token; negative
    error: float  # standard error, as a fraction of the value
    n: int  # seeds
    freedom: int  # degrees of freedom of the error

    def half_width(self) -> float:
        """Half of the 99% interval, as a fraction of the value."""
        return self.error * float(stats.t.ppf(1 - P_VALUE / 2, self.freedom))


@dataclass
class Effect:
    """What an idea does, compared with the base. None: not known. Losses are in nats per token."""

    name: str
    n: int  # pairs
    loss: float
    base_loss: float
    difference: float
    difference_interval: Bounds  # may be infinite
    sd: float  # of the differences
    p: float  # of the losses at equal steps; not corrected for the number of ideas
    verdict: str  # helps, hurts, not worth it, undecided, or identical
    # Steps and time to the base's loss, compared with the base's: -0.04 is 4% less
    steps: float | None = None
    steps_interval: Bounds | None = None
    own_steps: float = 1.0  # num_iterations as a fraction of the base's
    step_time: float | None = None  # as a fraction of the base's
    step_time_interval: Bounds | None = None
    time: float | None = None
    time_interval: Bounds | None = None

    def has_interval(self) -> bool:
        """False for the first few pairs."""
        return math.isfinite(self.difference_interval[0])


# -----------------------------------------------------------------------------
# The anytime-valid t-test


def log_e_value(n, ratio):
    """The logarithm of the e-value against a mean of zero, after n pairs. `ratio` is t^2 / (n - 1)."""
    shrinkage = PRIOR / (PRIOR + n)
    return (np.log(shrinkage) + n * (np.log1p(ratio) - np.log1p(shrinkage * ratio))) / 2


def widest_ratio(evidence: float, weight, freedom):
    """The t^2 / freedom whose e-value is `evidence`; infinite if none is as large.

    `weight` is the variance of the noise over that of the estimate: the number of pairs for a mean."""
    shrinkage = PRIOR / (PRIOR + weight)
    bound = np.exp((2 * math.log(evidence) - np.log(shrinkage)) / (freedom + 1))
    ratio = (bound - 1) / (1 - bound * shrinkage)
    return np.where(bound * shrinkage < 1, ratio, np.inf)


def log_e_values(differences: np.ndarray) -> np.ndarray:
    """log_e_value after each pair.

    `differences` has shape (..., n), and so has the result. The first value is 0: one pair tells
    nothing.
    """
    n = np.arange(1, differences.shape[-1] + 1)
    mean = np.cumsum(differences, axis=-1) / n
    squares = np.cumsum(differences**2, axis=-1) - n * mean**2  # sum of squared deviations
    # Without any spread, the ratio is huge, or 0 if all differences are 0
    log_e = log_e_value(n, n * mean**2 / np.maximum(squares, 1e-200))
    log_e[..., 0] = 0
    return log_e


@np.errstate(invalid="ignore")  # an infinite ratio times no spread
def half_widths(differences: np.ndarray, alpha: float) -> np.ndarray:
    """Half of the confidence interval of the mean after each pair; infinite for the first few.

    `differences` has shape (n,). The interval has all means whose e-value is below 1 / alpha.
    """
    n = np.arange(1, len(differences) + 1)
    mean = np.cumsum(differences) / n
    squares = np.maximum(np.cumsum(differences**2) - n * mean**2, 0)
    ratio = widest_ratio(1 / alpha, n, n - 1)
    return np.where(ratio < np.inf, np.sqrt(ratio * squares / n), np.inf)


def fewest_pairs(ideas: int) -> int:
    """How many pairs it takes at least for an interval, and so for a verdict, with this many ideas."""
    n = 2
    while (n / PRIOR + 1) ** ((n - 1) / 2) <= ideas / P_VALUE:  # the largest possible e-value
        n += 1
    return n


def p_value(differences: np.ndarray, looks_once: bool = False) -> float:
    """1 / the largest e-value so far, at most 1. Valid however often one looks. Or 1 / the e-value after the
    last pair, for a number of pairs that was fixed before."""
    log_e = log_e_values(differences)
    return min(1.0, math.exp(-float(log_e[-1] if looks_once else log_e.max())))


# -----------------------------------------------------------------------------
# From loss to steps


def measure_slope(
    fewer: list[float],
    more: list[float],
    width: float,
    run_sd: float | None = None,
    freedom: int = 0,
) -> Slope | None:
    """The slope from the base's losses with fewer and with more steps, at the same seeds. `width` is the
    logarithm of the ratio of the two numbers of steps.

    Its error comes from the spread of the seeds' slopes. With few seeds, this is a poor estimate. If
    other runs give the standard deviation of a run's loss, `run_sd`, with `freedom` degrees of
    freedom, the error comes from that instead.

    None if there are fewer than two seeds, or if the loss doesn't clearly fall.
    """
    n = min(len(fewer), len(more))
    if n < 2:
        return None
    slopes = [(high - low) / width for low, high in zip(fewer, more)]
    value = statistics.fmean(slopes)
    if run_sd is None:
        slope_sd = statistics.stdev(slopes)
        freedom = n - 1
    else:
        slope_sd = math.sqrt(2) * run_sd / width  # of the difference of two runs
    error = slope_sd / math.sqrt(n)
    slope = Slope(value, error / abs(value) if value else math.inf, n, freedom)
    if value >= 0 or slope.half_width() >= 1:
        return None
    return slope


def given_slope(loss_per_100_steps: float, steps: int) -> Slope:
    """The slope where the last 100 steps lower the loss by so much."""
    return Slope(-loss_per_100_steps / 100 * steps, error=0.0, n=0, freedom=1)


def log_steps(difference, half_width, slope: Slope, own_steps: float = 1.0):
    """A difference in loss and half of its interval, as a change of log(steps to the base's loss).

    `own_steps` are those of the idea, as a fraction of the base's.
    """
    center = difference / abs(slope.value)
    from_loss = half_width / abs(slope.value)
    from_slope = center * slope.half_width()
    return center + math.log(own_steps), np.hypot(from_loss, from_slope)


def at_equal_steps(differences: np.ndarray, slope: Slope | None, own_steps: float) -> np.ndarray:
    """The differences in loss if the idea trained the base's number of steps. Unchanged without a slope."""
    if slope is None:
        return differences
    return differences + abs(slope.value) * math.log(own_steps)


def relative(log_change: float) -> float:
    """-0.02 for a change to 98%. Finite, because two runs may say anything."""
    return math.expm1(min(log_change, 700))


def relative_interval(center: float, half: float) -> Bounds:
    return relative(center - half), relative(center + half)


# -----------------------------------------------------------------------------
# Verdicts


def decide(
    differences: np.ndarray,
    slope: Slope | None,
    until: float | None,
    ideas: int,
    own_steps: float = 1.0,
) -> tuple[str, int]:
    """Returns the first verdict, and after how many pairs it stood.

    `until` is the gain that matters, as a fraction of the steps. None looks only once, after the
    last pair, and excludes no gain.
    """
    alpha = P_VALUE / ideas
    n = len(differences)
    equal = at_equal_steps(differences, slope, own_steps)
    if n >= 2 and not equal.any():
        return "identical", n
    found = log_e_values(equal) >= math.log(1 / alpha)
    worthless = np.zeros(n, dtype=bool)
    if slope is not None:
        mean = np.cumsum(differences) / np.arange(1, n + 1)
        center, half = log_steps(mean, half_widths(differences, alpha), slope, own_steps)
        if own_steps != 1:
            found &= np.abs(center) > half  # because the slope's error is in equal, too
        if until is not None:
            worthless = center - half > math.log1p(-until)
    if until is None:
        found[:-1] = False
    decided = np.flatnonzero(found | worthless)
    if len(decided) == 0:
        return "undecided", n
    first = int(decided[0])
    pairs = first + 1
    if not found[first]:
        return "not worth it", pairs
    return ("helps" if equal[:pairs].mean() < 0 else "hurts"), pairs


def welch(
    name: str,
    losses: list[float],
    base_losses: list[float],
    slope: Slope | None = None,
    own_steps: float = 1.0,
) -> Effect:
    """The effect in finished runs, by Welch's t-test at p < 0.01. It looks once, and needs no pairs.

    Each side needs two losses or more, and not all the same. The slope must be a given one."""
    equal = at_equal_steps(np.array(losses), slope, own_steps)
    test = stats.ttest_ind(equal, base_losses, equal_var=False)
    interval = test.confidence_interval(1 - P_VALUE)
    half = float(interval.high - interval.low) / 2
    mean = statistics.fmean(losses) - statistics.fmean(base_losses)
    verdict = "undecided"
    if test.pvalue < P_VALUE:
        verdict = "helps" if test.statistic < 0 else "hurts"
    effect = Effect(
        name=name,
        n=min(len(losses), len(base_losses)),
        loss=statistics.fmean(losses),
        base_loss=statistics.fmean(base_losses),
        difference=mean,
        difference_interval=(mean - half, mean + half),
        sd=math.nan,
        p=float(test.pvalue),
        verdict=verdict,
        own_steps=own_steps,
    )
    add_steps(effect, slope)
    return effect


def add_steps(effect: Effect, slope: Slope | None) -> None:
    if slope is not None:
        half = effect.difference_interval[1] - effect.difference
        center, half_steps = log_steps(effect.difference, half, slope, effect.own_steps)
        effect.steps = relative(center)
        effect.steps_interval = relative_interval(center, half_steps)


def analyse(
    name: str,
    losses: list[float],
    base_losses: list[float],
    slope: Slope | None,
    until: float | None,
    ideas: int = 1,
    own_steps: float = 1.0,
) -> Effect:
    """The effect of one of `ideas` ideas. Losses are of the same seeds, two or more of them.

    Pairs after the one that decided are left out.
    """
    differences = np.subtract(losses, base_losses)
    verdict, n = decide(differences, slope, until, ideas, own_steps)
    differences = differences[:n]
    mean = float(differences.mean())
    half = float(half_widths(differences, P_VALUE / ideas)[-1])
    effect = Effect(
        name=name,
        n=n,
        loss=statistics.fmean(losses[:n]),
        base_loss=statistics.fmean(base_losses[:n]),
        difference=mean,
        difference_interval=(mean - half, mean + half),
        sd=float(differences.std(ddof=1)),
        p=p_value(at_equal_steps(differences, slope, own_steps), looks_once=until is None),
        verdict=verdict,
        own_steps=own_steps,
    )
    add_steps(effect, slope)
    return effect


def add_times(effect: Effect, log_ratios: np.ndarray, slope: Slope | None) -> None:
    """Adds the step time, and the time to the base's loss.

    log_ratios: log(idea's step time / base's), one for each round of alternating bursts.
    """
    half = float(half_widths(log_ratios, P_VALUE)[-1])
    add_time_ratio(effect, float(np.mean(log_ratios)), half, slope)


def add_time_ratio(effect: Effect, center: float, half: float, slope: Slope | None) -> None:
    """Like add_times. The 99% interval of log(idea's step time / base's) is center - half to center + half."""
    effect.step_time = math.exp(center)
    effect.step_time_interval = (math.exp(center - half), math.exp(min(center + half, 700)))
    if slope is None or effect.verdict == "identical":
        return
    half_loss = effect.difference_interval[1] - effect.difference
    steps, half_steps = log_steps(effect.difference, half_loss, slope, effect.own_steps)
    whole = steps + center
    effect.time = relative(whole)
    effect.time_interval = relative_interval(whole, math.hypot(half_steps, half))


# -----------------------------------------------------------------------------
# Plans


def pairs_for(effect: float, sd: float, ideas: int = 1) -> int:
    """About how many pairs show an effect of this size, or exclude it if there is none."""
    n = 2
    needed = math.log(ideas / P_VALUE)
    while n < 1_000_000 and log_e_value(n, n / (n - 1) * (effect / sd) ** 2) < needed:
        n += max(1, n // 100)
    return n


def most_pairs(effect: float, sd: float, ideas: int = 1) -> int:
    """The ceiling: twice the pairs with which a fixed test finds this effect nine times in ten, and
    fewest_pairs more, because our test can't say anything before that."""
    z = stats.norm.ppf(1 - P_VALUE / ideas / 2) + stats.norm.ppf(0.9)
    return fewest_pairs(ideas) + math.ceil(2 * (z * sd / effect) ** 2)
