"""The statistics of the comparison: against scipy, against numerical integration, and by simulation."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from judge.stats import (
    Slope,
    add_times,
    analyse,
    decide,
    far_from_others,
    half_width,
    log_e_values,
    look_once,
    measure_slope,
    p_value,
    pairs_for,
    rounding,
    squared_deviations,
)

KEPT = Path(__file__).parent / "kept_residuals.json"
RESIDUALS = json.loads(KEPT.read_text())["residuals"]
SLOPE = Slope(-0.123, 0.03, 6, 5)
WIDTH = 2 * math.log(1.25)  # of the steps that SLOPE is measured with
SD = 0.0049  # of mini's differences at the same seed
STEP = 0.0001  # logs have four digits


# -----------------------------------------------------------------------------
# Formulas


def e_value(differences: list[float]) -> float:
    """The definition: the density of the differences, averaged over effects above zero with each of the three
    priors, over the density without an effect. Both are averaged over all standard deviations."""
    x = np.array(differences)
    scale = math.sqrt((x**2).mean())

    def density(effect, log_sd):
        z = (x / scale - effect * math.exp(log_sd)) / math.exp(log_sd)
        return math.exp(-len(x) * log_sd - (z @ z) / 2)

    def over_sds(effect):
        return integrate.quad(lambda s: density(effect, s), -8, 12, epsabs=0, limit=200)[0]

    total = 0
    for variance, weight in [(1 / 8, 0.6), (4, 0.3), (1000, 0.1)]:
        prior = stats.norm(0, math.sqrt(variance))
        points = [0.3, 1, 3, 10, 30, 100]
        above, _ = integrate.quad(
            lambda effect, prior=prior: 2 * prior.pdf(effect) * over_sds(effect),
            0,
            300,
            epsabs=0,
            limit=200,
            points=points,
        )
        total += weight * above / over_sds(0)
    return total


@pytest.mark.parametrize("effect, n", [(0.7, 12), (-0.7, 5), (3, 3), (0, 2)])
def test_e_values_are_averaged_densities(effect, n):
    """After each pair, of those so far."""
    differences = np.random.default_rng(0).normal(effect, 1, (1, n + 3))
    found = log_e_values(differences, step=1e-9)
    assert found[0, 0] == 0
    assert math.exp(found[0, n - 1]) == pytest.approx(e_value(differences[0, :n]), rel=1e-5)


def test_rounding_counts_as_noise():
    """Equal differences may be one apart in the last digit: as many pairs as it takes with that noise."""
    assert rounding([3.28, 3.2805, 3.0]) == pytest.approx(STEP)
    noise = np.sqrt(STEP**2 / 6) * np.array([1, -1, 1, -1])  # the variance of two errors of rounding
    for mean in (1e-4, 1e-3):
        shown = log_e_values(np.full(4, mean), STEP)[-1]
        assert shown == pytest.approx(log_e_values(mean + noise, 1e-9)[-1])


def test_interval_has_the_means_that_are_not_rejected():
    """Against effects of either sign: the mean of both one-sided e-values."""
    differences = np.random.default_rng(1).normal(0.5, 1, 30)
    for n in (3, 30):
        prefix = differences[:n]
        half = half_width(squared_deviations(prefix, STEP**2 / 6), n, n, 100)
        for side in (-1, 1):
            shifted = prefix - prefix.mean() - side * half
            higher, lower = [np.exp(log_e_values(x, STEP)[-1]) for x in (shifted, -shifted)]
            assert (higher + lower) / 2 == pytest.approx(100)
    assert half_width(1.0, 2, 2, 100) == math.inf  # two pairs can't reject anything


def test_one_look_against_scipy():
    rng = np.random.default_rng(0)
    losses, base = rng.normal(1.49, 0.01, 8), rng.normal(1.5, 0.004, 8)
    for paired, test in [
        (True, stats.ttest_rel(losses, base)),
        (False, stats.ttest_ind(losses, base, equal_var=False)),
    ]:
        effect = look_once("x", losses, base, paired)
        assert effect.p == pytest.approx(test.pvalue)
        interval = test.confidence_interval(0.99)
        assert effect.difference_interval == pytest.approx((interval.low, interval.high))
        assert effect.verdict == ("helps" if test.pvalue < 0.01 else "undecided")
    assert look_once("x", losses - 0.02, base, True).verdict == "helps"
    assert look_once("x", losses - 0.02, base, True, ideas=10**6).verdict == "undecided"
    assert look_once("x", base, base, True).verdict == "identical"
    # Three times the same difference of one digit tells nothing
    same = look_once("x", [1.5001, 1.5002, 1.5003], [1.5, 1.5001, 1.5002], True)
    assert same.verdict == "undecided"


def test_a_run_that_is_far_from_the_others():
    rng = np.random.default_rng(0)
    losses = list(rng.normal(1.5, 0.003, 24))
    assert far_from_others(losses) == []
    losses[7] = losses[20] = 1.7
    assert far_from_others(losses) == [7, 20]
    assert far_from_others(losses[6:9]) == []  # too few


def test_slope_against_scipy():
    rng = np.random.default_rng(2)
    level = rng.normal(1.5, 0.01, 6)
    fewer = level + rng.normal(0.027, 0.002, 6)
    more = level - rng.normal(0.027, 0.002, 6)
    slopes = (more - fewer) / (2 * math.log(1.25))
    expected = stats.ttest_1samp(slopes, 0).confidence_interval(0.99)
    found = measure_slope(fewer, more, WIDTH)
    half = abs(found.value) * found.half_width()
    assert found.value - half == pytest.approx(expected.low)
    assert found.value + half == pytest.approx(expected.high)
    assert found.n == 6


def test_no_slope():
    """Of one seed, of a loss that rises, and of one that doesn't clearly fall."""
    for fewer, more in [
        ([1.5], [1.4]),
        ([1.4, 1.41], [1.5, 1.52]),
        ([1.5, 1.4], [1.4, 1.5]),
    ]:
        assert measure_slope(fewer, more, WIDTH) is None


def test_steps_and_time_by_hand():
    """A loss that falls by 0.123 * log(steps): 0.123 * log(1.02) lower is worth 2% of the steps."""
    rng = np.random.default_rng(3)
    gain = 0.123 * math.log(1.02)
    base = rng.normal(1.5, 0.01, 20)
    noise = rng.normal(0, 1e-5, 20)
    idea = base - gain + noise - noise.mean()
    effect = analyse("x", idea, base, SLOPE, 0.01)
    assert effect.verdict == "helps"
    assert effect.difference == pytest.approx(-gain, abs=1e-5)
    assert 1 / (1 + effect.steps) == pytest.approx(1.02, abs=1e-4)
    effect = analyse("x", idea, base, SLOPE, 0.01, own_steps=0.96)
    assert 1 + effect.steps == pytest.approx(0.96 / 1.02, abs=1e-4)
    log_ratios = rng.normal(math.log(1.05), 1e-6, 6)
    add_times(effect, log_ratios, SLOPE)
    assert effect.step_time == pytest.approx(1.05, rel=1e-4)
    assert 1 + effect.time == pytest.approx(0.96 * 1.05 / 1.02, rel=1e-3)
    interval = stats.ttest_1samp(log_ratios, 0).confidence_interval(0.99)
    assert np.log(effect.step_time_interval) == pytest.approx((interval.low, interval.high))


def test_an_identical_idea_is_as_fast_as_its_steps():
    effect = analyse("x", [1.5, 1.4], [1.5, 1.4], None, 0.02)
    add_times(effect, np.array([-0.05, -0.051, -0.049]), None)
    assert effect.verdict == "identical"
    assert 1 + effect.time == pytest.approx(math.exp(-0.05))
    assert effect.time_interval == pytest.approx(np.subtract(effect.step_time_interval, 1))


# -----------------------------------------------------------------------------
# Verdicts


def test_verdicts():
    rng = np.random.default_rng(4)
    noise = rng.normal(0, SD, 60)
    noise -= noise.mean()
    for shift, slope, until, expected in [
        (-0.01, SLOPE, 0.02, "helps"),
        (0.01, SLOPE, 0.02, "hurts"),
        (0, SLOPE, 0.04, "not worth it"),
        (0, SLOPE, 0.001, "undecided"),
        (0, None, 0.04, "undecided"),  # without a slope, no gain is excluded
        (0, SLOPE, None, "undecided"),
    ]:
        verdict, n, p = decide(noise + shift, STEP, slope, until, 1)
        assert verdict == expected
        assert (n == 60) == (verdict == "undecided")
        assert (p < 0.01) == (verdict in ("helps", "hurts"))
    assert decide(np.zeros(9), STEP, SLOPE, 0.02, 1) == ("identical", 9, 1.0)


def test_p_value_is_one_over_the_largest_e_value():
    differences = np.array([-1, -1.1, -0.9, -1.2, -1, 3])
    verdict, n, p = decide(differences, 1e-9, None, None, ideas=1000)
    assert (verdict, n) == ("undecided", 6)
    assert p == pytest.approx(1 / e_value(-differences[:5]), rel=1e-5)
    assert p_value(np.array([0.0, -1.0])) == 1


def test_first_verdict_stands():
    """Pairs after it change nothing, not even the figures."""
    rng = np.random.default_rng(5)
    losses = rng.normal(1.49, 0.004, 40)
    base = rng.normal(1.5, 0.004, 40)

    def after(n):
        return analyse("x", losses[:n], base[:n], SLOPE, 0.02)

    whole = after(40)
    assert 3 <= whole.n < 40 and whole.verdict == "helps"
    assert after(whole.n) == whole
    assert after(whole.n - 1).verdict == "undecided"
    # With more ideas, each needs more evidence
    assert analyse("x", losses, base, SLOPE, 0.02, ideas=20).n > whole.n


# -----------------------------------------------------------------------------
# Simulations


def upper_bound(count: int, n: int) -> float:
    """The upper end of the 99% interval of a proportion."""
    return stats.binomtest(count, n).proportion_ci(0.99).high


def gaussian(rng, shape):
    return rng.normal(0, 1, shape)


def students(rng, shape):
    return rng.standard_t(4, shape)


def skewed(rng, shape):
    """Losses of skewness 1.4. If an idea does nothing, those of both sides are equally skewed."""
    return rng.gamma(2, 1, shape) - rng.gamma(2, 1, shape)


def skewed_differences(rng, shape):
    """Skewness 0.7: an idea that changes the losses, but not their mean."""
    return rng.gamma(8, 1, shape) - 8


def rounded(rng, shape):
    """Most differences are 0, the others 1 in the last digit."""
    losses = np.round(rng.normal(0, 0.4, (2, *shape)))
    return losses[0] - losses[1]


def kept_residuals(rng, shape):
    residuals = np.array(RESIDUALS)
    return rng.choice(residuals - residuals.mean(), shape) / residuals.std()


def wrong_verdicts(draw, trials: int, looks: int) -> list[float]:
    """How many of these comparisons without an effect ever say helps, and hurts; and how many of an idea that
    saves exactly what was asked for say not worth it."""
    rng = np.random.default_rng(7)
    step = 1.0 if draw is rounded else 0.02
    wrong = np.zeros(3, dtype=int)
    for _ in range(0, trials, 1000):
        differences = draw(rng, (1000, looks))
        lower, higher = [log_e_values(x, step).max(axis=1) for x in (-differences, differences)]
        wrong += [
            (lower >= math.log(100)).sum(),
            (higher >= math.log(100)).sum(),
            (higher >= math.log(20)).sum(),
        ]
    return [upper_bound(int(count), trials) for count in wrong]


def test_false_positives_when_looking_after_each_pair():
    helps, hurts, worthless = wrong_verdicts(gaussian, 16_000, looks=60)
    assert helps < 0.01 and hurts < 0.01 and worthless < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw", [gaussian, students, skewed, rounded, kept_residuals, skewed_differences]
)
def test_false_positives_of_other_losses(draw):
    limit = 0.02 if draw is skewed_differences else 0.01
    helps, hurts, worthless = wrong_verdicts(draw, 20_000, looks=200)
    assert helps < limit and hurts < limit and worthless < 0.05


def first_verdicts(effect: float, goal: float | None, pairs: int) -> tuple[float, float]:
    """Mean pairs to a verdict, and the fraction without one after these pairs. In units of the standard
    deviation."""
    rng = np.random.default_rng(8)
    differences = rng.normal(-effect, 1, (3000, pairs))
    decided = np.maximum(log_e_values(differences, 0.02), log_e_values(-differences, 0.02)) >= math.log(
        100
    )
    if goal:
        decided |= log_e_values(differences + goal, 0.02) >= math.log(20)
    found = decided.any(axis=1)
    return float(np.where(found, decided.argmax(axis=1) + 1, pairs).mean()), 1 - found.mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "effect, goal, pairs",
    [
        (0.3, None, 131), (0.5, None, 53), (1, None, 18.5), (2, None, 8.7), (5, None, 5.3), (20, None, 3.6), (90, None, 3),
        (0, 0.27, 106), (0, 0.53, 33), (0, 1.17, 11),
    ],
)  # fmt: skip
def test_mean_pairs(effect, goal, pairs):
    """As many as in the table of docs/compare.md, and about as many as the plan says."""
    mean, undecided = first_verdicts(effect, goal, int(6 * pairs))
    assert mean == pytest.approx(pairs, rel=0.1)
    assert undecided < 0.01
    assert pairs_for(-effect, 1, goal) == pytest.approx(pairs, rel=0.25)


def some_slope(rng: np.random.Generator, level: np.ndarray) -> Slope:
    """As it is measured with four seeds, where the loss falls by 0.123 * log(steps)."""
    longer = 0.123 * math.log(1.25)
    fewer = rng.normal(level[:4] + longer, 0.003)
    more = rng.normal(level[:4] - longer, 0.003)
    return measure_slope(fewer, more, WIDTH)


@pytest.mark.parametrize("effect", [-0.02, 0.0])
def test_two_percent_with_a_measured_slope(effect):
    """With mini's noise: the right answer nine times in ten, and not worth it wrong at most once in twenty."""
    rng = np.random.default_rng(8)
    shift = 0.123 * math.log1p(effect)
    verdicts = []
    trials = 1500
    for _ in range(trials):
        slope = some_slope(rng, np.full(4, 1.5))
        verdicts.append(decide(rng.normal(shift, SD, 200), STEP, slope, 0.02, 1)[0])
    right = "helps" if effect else "not worth it"
    wrong = "not worth it" if effect else "helps"
    assert verdicts.count(right) > 0.9 * trials
    assert upper_bound(verdicts.count(wrong), trials) < (0.05 if effect else 0.015)


def test_fewer_steps_are_no_gain():
    """An idea that only trains 0.9 times the steps. Its loss is clearly higher, but it neither helps nor hurts."""
    rng = np.random.default_rng(4)
    level = np.full(60, 1.5)
    higher = -0.123 * math.log(0.9)
    wrong = 0
    trials = 500
    for _ in range(trials):
        base = rng.normal(level, 0.003)
        idea = rng.normal(level + higher, 0.003)
        slope = some_slope(rng, level)
        alone = analyse("x", idea, base, None, 0.02, own_steps=0.9)
        effect = analyse("x", idea, base, slope, 0.02, own_steps=0.9)
        assert alone.verdict == "hurts"
        wrong += effect.verdict in ("helps", "hurts")
    assert wrong <= stats.binom.ppf(0.999, trials, 0.01)


def test_intervals_hold_the_truth():
    """Loss, steps and time, at the moment when the verdict stands."""
    rng = np.random.default_rng(9)
    held = {"difference": 0, "steps": 0, "time": 0}
    trials = 1500
    gain = 0.123 * math.log1p(-0.03)
    for _ in range(trials):
        level = rng.normal(1.5, 0.003, 60)
        base = rng.normal(level, 0.003)
        idea = rng.normal(level + gain, 0.003)
        slope = some_slope(rng, level)
        effect = analyse("x", idea, base, slope, 0.02, own_steps=0.9)
        log_ratios = rng.normal(math.log(1.01), 0.02, 6)
        add_times(effect, log_ratios, slope)
        truths = {"difference": gain, "steps": 0.97 * 0.9 - 1, "time": 0.97 * 0.9 * 1.01 - 1}
        for name, truth in truths.items():
            low, high = getattr(effect, f"{name}_interval")
            if low <= truth <= high:
                held[name] += 1
    fewest = stats.binom.ppf(0.001, trials, 0.99)
    for name, count in held.items():
        assert count >= fewest, (name, count / trials)
