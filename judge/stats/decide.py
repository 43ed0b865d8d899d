"""
The statistics of compare.py: what an idea does to the loss, and what that is worth in steps and in time.

Losses are compared in pairs: the idea's loss minus the base's at the same seed. The test is the
anytime-valid t-test of Lai (1976), as in Wang and Ramdas, "Anytime-valid t-tests and confidence
sequences for Gaussian means with unknown variance" (2024, https://arxiv.org/abs/2310.03722). It gives
an e-value after each pair: how much likelier the differences are if there is an effect. Without an
effect, it ever reaches 100 with a probability of at most 1%. So you may look after every pair, stop
whenever you like, and go on later. With k ideas, an idea needs an e-value of 100 k (Bonferroni).

The base also runs with fewer and more steps. The slope of its loss over the logarithm of the steps
turns a difference in loss into steps. Intervals in steps and in time include the slope's error.
"""

import math
import statistics
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
from scipy import optimize, stats
from scipy.special import logsumexp, stdtr

P_VALUE = 0.01  # of helps, of hurts and of a record
P_WORTHLESS = 0.05  # of not worth it
# The test's prior: effects are normal, in units of the standard deviation of a difference. Their variance
# is one of these, because an idea may do little or much.
VARIANCES = np.array([1 / 8, 4, 1000])
WEIGHTS = np.array([0.6, 0.3, 0.1])
SLOPE_FACTOR = 1.25  # the base also runs with this many times fewer and more steps
FEWEST_SLOPES = 4  # seeds
LARGEST_SLOPE_ERROR = 0.1  # standard error of the slope, as a fraction of it


@dataclass
class Slope:
    """d loss / d log(steps) of the base."""

    value: float  # nats per token; negative
    error: float  # standard error, as a fraction of the value
    n: int  # seeds; 0 if the slope was given

    def bounds(self) -> list[float]:
        """The 99% interval of how much the loss falls."""
        half = self.error and self.error * float(stats.t.ppf(1 - P_VALUE / 2, self.n - 1))
        return [abs(self.value) * (1 - half), abs(self.value) * (1 + half)]


@dataclass
class Estimate:
    """A number, and its interval, which is infinite with too few runs."""

    value: float
    low: float
    high: float


@dataclass
class Effect:
    """What an idea does, compared with the base. None: not known. Losses are in nats per token; steps and
    times are log(the idea's / the base's)."""

    name: str
    n: int  # pairs
    difference: Estimate  # of the losses
    sd: float  # of the differences; nan without pairs
    p: float  # of the losses; not corrected for the number of ideas
    verdict: str  # helps, hurts, not worth it, undecided, or identical
    own_steps: float = 1.0  # num_iterations as a fraction of the base's
    steps: Estimate | None = None  # to the base's loss
    step_time: Estimate | None = None
    time: Estimate | None = None  # to the base's loss


# -----------------------------------------------------------------------------
# The anytime-valid t-test


def rounding(losses) -> float:
    """The step to which all of these losses are rounded, like 0.0001."""
    return 10.0 ** min(Decimal(repr(float(loss))).as_tuple().exponent for loss in losses)


def log_evidence(mean, squares, weight, n):
    """log(e-value) of a mean, against a true mean of at most zero: large if it is higher.

    `squares` is the sum of squared deviations, and n - 1 the number of degrees of freedom. `weight` is the
    variance of a difference over that of the mean: n, but for the contrasts of screen.
    """
    # (..., 1), for an axis of the prior's variances
    mean, squares, weight, n = (np.asarray(x)[..., None] for x in (mean, squares, weight, n))
    ratio = weight * mean**2 / squares
    shrinkage = 1 / (1 + weight * VARIANCES)
    # log(density of the differences with an effect / without one)
    log_factors = (np.log(shrinkage) + n * (np.log1p(ratio) - np.log1p(shrinkage * ratio))) / 2
    # Only effects above zero: twice their share of the posterior, which is Student's t
    shrunk = squares + weight * mean**2 * shrinkage
    t = np.sqrt(n) * weight * mean / np.sqrt((weight + 1 / VARIANCES) * shrunk)
    return logsumexp(log_factors, axis=-1, b=2 * WEIGHTS * stdtr(n, t))


def log_e_values(differences: np.ndarray, step: float) -> np.ndarray:
    """log_evidence after each pair. `differences` has shape (..., n), and so has the result.

    `step` is the rounding of a loss. It may hide how much the differences vary, so its variance counts
    in any case.
    """
    n = np.arange(1, differences.shape[-1] + 1)
    mean = np.cumsum(differences, axis=-1) / n
    squares = np.cumsum(differences**2, axis=-1) - n * mean**2  # sum of squared deviations
    log_e = log_evidence(mean, np.maximum(squares, 0) + n * step**2 / 6, n, n)
    log_e[..., 0] = 0  # one pair tells nothing
    return log_e


def interval(mean: float, squares: float, weight: float, n: int, evidence: float) -> Estimate:
    """A mean, and all true means that are neither too low nor too high: the e-value against each is below
    `evidence`. So zero is outside if "helps" or "hurts" is proved, and only then. Infinite for the first few
    pairs. Arguments as in log_evidence."""

    def excess(log_half: float) -> float:
        return float(log_evidence(math.exp(log_half), squares, weight, n)) - math.log(evidence)

    unit = math.log(squares / weight) / 2
    smallest, largest = unit - 25, unit + 100
    half = math.inf
    if excess(largest) > 0:
        half = math.exp(optimize.brentq(excess, smallest, largest, xtol=1e-12))
    return Estimate(mean, mean - half, mean + half)


def p_value(log_e: np.ndarray) -> float:
    """1 / the largest e-value so far, at most 1. Valid however often one looks."""
    return math.exp(-max(0.0, float(log_e.max())))


def p_if_looked(losses: list[float], target: float) -> float | None:
    """Of a mean below the target, valid even if somebody makes runs until it is small enough. None for a
    single loss."""
    if len(losses) < 2:
        return None
    step = rounding(losses) / math.sqrt(2)  # a difference has one rounded loss here, and not two
    return p_value(log_e_values(target - np.array(losses), step)[-1:])


def far_from_others(losses: list[float]) -> list[int]:
    """The indices of losses that lie far from the others: about 4 standard deviations, more of few. Chance
    makes one in about 1% of comparisons. Such runs have failed, or the losses are so skewed that the test errs.

    Several could hide each other, so the farthest ones are left out one after the other, at most half of all:
    Rosner, "Percentage points for a generalized ESD many-outlier procedure" (1983).
    """
    order = sorted(range(len(losses)), key=lambda i: abs(losses[i] - statistics.median(losses)))
    found = 0
    for left_out in range(1, len(losses) // 2 + 1):
        *near, i = order[: len(losses) - left_out + 1]
        n = len(near)
        others = np.array(losses)[near]
        error = others.std(ddof=1) * math.sqrt(1 + 1 / n) if n > 2 else 0
        p = 2 * (n + 1) * stats.t.sf(abs(losses[i] - others.mean()) / error, n - 1) if error else 1
        if p < P_VALUE / 2:  # several are tried
            found = left_out
    return sorted(order[len(losses) - found :])


# -----------------------------------------------------------------------------
# From loss to steps


def measure_slope(fewer: list[float], more: list[float], width: float) -> Slope | None:
    """The slope from the base's losses with fewer and with more steps, at the same seeds. `width` is the
    logarithm of the ratio of the two numbers of steps.

    Its error comes from the spread of the seeds' slopes. With few seeds, this is a poor estimate. None if
    there are fewer than two seeds, or if the loss doesn't clearly fall.
    """
    n = min(len(fewer), len(more))
    if n < 2:
        return None
    slopes = [(high - low) / width for low, high in zip(fewer, more)]
    value = statistics.fmean(slopes)
    error = statistics.stdev(slopes) / math.sqrt(n)
    slope = Slope(value, error / abs(value) if value else math.inf, n)
    if value >= 0 or slope.bounds()[0] <= 0:
        return None
    return slope


def given_slope(loss_per_100_steps: float, steps: int) -> Slope | None:
    """The slope where the last 100 steps lower the loss by so much. None for logs without steps, which have
    one."""
    return Slope(-loss_per_100_steps / 100 * steps, error=0.0, n=0) if steps > 1 else None


def own_steps_in_loss(slope: Slope | None, own_steps: float) -> tuple[float, float]:
    """What to add to an idea's loss if it trains this fraction of the base's steps: a 99% interval."""
    if slope is None:
        return 0.0, 0.0
    losses = [fall * math.log(own_steps) for fall in slope.bounds()]
    return min(losses), max(losses)


# -----------------------------------------------------------------------------
# Verdicts


def decide(
    differences: np.ndarray,
    step: float,
    slope: Slope | None,
    until: float | None,
    ideas: int,
    own_steps: float = 1.0,
) -> tuple[str, int, float]:
    """Returns the verdict, after how many pairs it stood, and the p-value of the side on which the mean lies.

    `until` is the gain that matters, as a fraction of the steps. "not worth it" is said only if neither
    "helps" nor "hurts" is proved, because those say more.
    """
    n = len(differences)
    low, high = own_steps_in_loss(slope, own_steps)
    if n >= 2 and not (differences + low).any():
        return "identical", n, 1.0
    lower = log_e_values(-differences - high, step)
    higher = log_e_values(differences + low, step)
    found = np.maximum(lower, higher) >= math.log(ideas / P_VALUE)
    worthless = np.zeros(n, dtype=bool)
    if slope is not None and until is not None:
        log_e = log_e_values(differences + low + goal_in_loss(slope, until), step)
        worthless = log_e >= math.log(ideas / P_WORTHLESS)
    verdict = "undecided"
    if found.any():
        n = int(found.argmax()) + 1
        verdict = "helps" if lower[n - 1] > higher[n - 1] else "hurts"
    elif worthless.any():
        n = int(worthless.argmax()) + 1
        verdict = "not worth it"
    log_e = lower if (differences[:n] + low).mean() < 0 else higher
    return verdict, n, p_value(log_e[:n])


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
    step = rounding([*losses, *base_losses])
    verdict, n, p = decide(differences, step, slope, until, ideas, own_steps)
    squares = n * (float(np.var(differences[:n])) + step**2 / 6)
    difference = interval(float(differences[:n].mean()), squares, n, n, ideas / P_VALUE)
    return make_effect(name, losses[:n], base_losses[:n], difference, p, verdict, slope, own_steps)


def look_once(
    name: str,
    losses: list[float],
    base_losses: list[float],
    paired: bool,
    slope: Slope | None = None,
    ideas: int = 1,
    own_steps: float = 1.0,
) -> Effect:
    """The effect in a number of runs that was fixed before, by a t-test: of the pairs, or Welch's. Each side
    needs two losses or more."""
    step = rounding([*losses, *base_losses])
    samples = [np.array(losses), np.array(base_losses)]
    variance = step**2 / 12  # of rounding
    if paired:
        samples = [samples[0] - samples[1]]
        variance *= 2
    errors = []  # the square of each mean's standard error
    for sample in samples:
        spread = max(np.var(sample, ddof=1), variance)
        errors.append(float(spread) / len(sample))
    freedom = sum(errors) ** 2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, samples))
    error = math.sqrt(sum(errors))
    if len(set(losses)) == len(set(base_losses)) == 1:  # perhaps a fixed seed: the noise isn't known
        error = math.inf
    difference = statistics.fmean(losses) - statistics.fmean(base_losses)
    low, high = own_steps_in_loss(slope, own_steps)
    nearest = np.clip(0, difference + low, difference + high)  # to zero, that the slope's error allows
    p = float(2 * stats.t.sf(abs(nearest) / error, freedom))
    verdict = "undecided"
    if paired and not (samples[0] + low).any():
        verdict = "identical"
    elif p < P_VALUE / ideas:
        verdict = "helps" if nearest < 0 else "hurts"
    half = error * float(stats.t.isf(P_VALUE / ideas / 2, freedom))
    estimate = Estimate(difference, difference - half, difference + half)
    return make_effect(name, losses, base_losses, estimate, p, verdict, slope, own_steps)


def make_effect(
    name: str,
    losses: list[float],
    base_losses: list[float],
    difference: Estimate,
    p: float,
    verdict: str,
    slope: Slope | None,
    own_steps: float,
) -> Effect:
    """`difference` is that of the mean losses."""
    n = min(len(losses), len(base_losses))
    paired = len(losses) == len(base_losses)
    sd = float(np.std(np.subtract(losses, base_losses), ddof=1)) if paired else math.nan
    steps = None
    if slope is not None:
        own = math.log(own_steps)
        low = min(difference.low / fall for fall in slope.bounds())
        high = max(difference.high / fall for fall in slope.bounds())
        steps = Estimate(difference.value / abs(slope.value) + own, low + own, high + own)
    return Effect(name, n, difference, sd, p, verdict, own_steps, steps)


def add_times(effect: Effect, log_ratios: list[float], ideas: int = 1) -> None:
    """Adds the time of a step, and the time to the base's loss, by a t-test.

    log_ratios: log(idea's time of a step / base's), one for each two processes that took turns.
    """
    n = len(log_ratios)
    mean = statistics.fmean(log_ratios)
    half = math.inf
    if n > 1:
        error = statistics.stdev(log_ratios) / math.sqrt(n)
        half = error * float(stats.t.isf(P_VALUE / ideas / 2, n - 1))
    effect.step_time = Estimate(mean, mean - half, mean + half)
    steps = effect.steps
    if effect.verdict == "identical":
        steps = Estimate(*3 * [math.log(effect.own_steps)])
    if steps is not None:
        value = steps.value + mean
        below = math.hypot(steps.value - steps.low, half)
        above = math.hypot(steps.high - steps.value, half)
        effect.time = Estimate(value, value - below, value + above)


# -----------------------------------------------------------------------------
# Plans


def goal_in_loss(slope: Slope, until: float) -> float:
    """The loss that a saving of this fraction of the steps is worth."""
    return abs(slope.value) * -math.log1p(-until)


def pairs_for(mean: float, sd: float, goal: float | None, ideas: int = 1) -> int:
    """About how many pairs it takes to a verdict, if mean and standard deviation of the differences stay as
    they are."""
    n = np.unique(np.geomspace(3, 100_000, 400).astype(int))
    squares = (n - 1) * sd**2
    decided = log_evidence(abs(mean), squares, n, n) >= math.log(ideas / P_VALUE)
    if goal is not None:
        log_e = log_evidence(mean + goal, squares, n, n)
        decided |= log_e >= math.log(ideas / P_WORTHLESS)
    return int(n[decided.argmax()]) if decided.any() else int(n[-1])
