"""The statistics of the comparison: against scipy, against numerical integration, and by simulation."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from tools.compare.stats import (
    Slope,
    add_times,
    analyse,
    decide,
    half_widths,
    log_e_values,
    measure_slope,
    most_pairs,
    p_value,
    pairs_for,
)

KEPT = Path(__file__).parent / "kept_residuals.json"
RESIDUALS = json.loads(KEPT.read_text())["residuals"]
SLOPE = Slope(-0.123, 0.03, 6, 5)
WIDTH = 2 * math.log(1.25)  # of the steps that SLOPE is measured with
SD = 0.0049  # of mini's differences at the same seed


# -----------------------------------------------------------------------------
# Formulas


def bayes_factor(differences: np.ndarray) -> float:
    """The definition: the density of Student's t, averaged over effects of N(0, 1 / 8), over its density
    without an effect."""
    n = len(differences)
    t = stats.ttest_1samp(differences, 0).statistic

    def integrand(effect):
        density = stats.nct.pdf(t, n - 1, effect * math.sqrt(n))
        prior = stats.norm.pdf(effect, 0, 8**-0.5)
        return density * prior

    top, _ = integrate.quad(integrand, -3, 3, limit=200)
    return top / stats.t.pdf(t, n - 1)


def test_e_values_are_bayes_factors():
    """After each pair, of those so far."""
    effects = np.array([[0.7], [0], [-1.5]])
    differences = np.random.default_rng(0).normal(effects, 1, (3, 20))
    found = log_e_values(differences)
    assert (found[:, 0] == 0).all()
    for row in range(3):
        for n in (2, 5, 20):
            expected = bayes_factor(differences[row, :n])
            assert math.exp(found[row, n - 1]) == pytest.approx(expected, rel=1e-4)


def test_interval_has_the_means_that_are_not_rejected():
    differences = np.random.default_rng(1).normal(0.5, 1, 30)
    half = half_widths(differences, 0.01)
    assert np.isinf(half[:11]).all()  # the first verdict comes after 12 pairs
    assert np.isfinite(half[11:]).all()
    for n in (12, 30):
        prefix = differences[:n]
        for side in (-1, 1):
            bound = prefix.mean() + side * half[n - 1]
            log_e = log_e_values(prefix - bound)[-1]
            assert log_e == pytest.approx(math.log(100))


def test_p_value_is_one_over_the_largest_e_value():
    differences = np.array([-1, -1.1, -0.9, -1.2, -1, 3])
    largest = 0
    for n in range(2, 7):
        log_e = log_e_values(differences[:n])
        largest = max(largest, log_e[-1])
    assert p_value(differences) == pytest.approx(math.exp(-largest))
    assert p_value(np.array([1.0, -1.0])) == 1


def test_p_value_of_one_look_agrees_with_its_interval():
    """With --runs, there is one look, at the end. The first 12 differences alone would be significant,
    all 24 are not."""
    rng = np.random.default_rng(0)
    clear = rng.normal(-0.01, 0.003, 12)
    unclear = rng.normal(0.001, 0.008, 12)
    differences = np.concatenate([clear, unclear])
    base = np.full(24, 1.5)
    first = analyse("x", base[:12] + clear, base[:12], None, None)
    assert first.p < 0.01
    effect = analyse("x", base + differences, base, None, None)
    low, high = effect.difference_interval
    assert low < 0 < high
    assert effect.p == pytest.approx(1 / bayes_factor(differences), rel=1e-3)
    assert effect.p > 0.01
    several_looks = analyse("x", base + differences, base, None, 0.02)
    assert several_looks.n < 24
    assert several_looks.p < 0.01


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


def test_slope_with_a_known_spread_is_least_squares():
    """Against the covariance of a fit with a level for each seed and log(steps)."""
    fewer = [1.52, 1.53, 1.51]
    more = [1.47, 1.46, 1.46]
    found = measure_slope(fewer, more, WIDTH, run_sd=0.004, freedom=62)
    levels = np.tile(np.eye(3), (2, 1))
    log_steps = np.repeat([-math.log(1.25), math.log(1.25)], 3)
    matrix = np.column_stack([levels, log_steps])
    losses = np.array(fewer + more)
    solution = np.linalg.lstsq(matrix, losses, rcond=None)[0]
    information = matrix.T @ matrix
    covariance = 0.004**2 * np.linalg.inv(information)
    assert found.value == pytest.approx(solution[3])
    assert abs(found.value) * found.error == pytest.approx(math.sqrt(covariance[3, 3]))
    assert found.half_width() == pytest.approx(found.error * stats.t.ppf(0.995, 62))


def test_no_slope():
    """Of one seed, of a loss that rises, and of one that doesn't clearly fall."""
    for fewer, more in [
        ([1.5], [1.4]),
        ([1.4, 1.41], [1.5, 1.52]),
        ([1.5, 1.4], [1.4, 1.5]),
    ]:
        assert measure_slope(fewer, more, WIDTH) is None
        assert measure_slope(fewer, more, WIDTH, run_sd=0.05, freedom=31) is None


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
    log_ratios = rng.normal(math.log(1.05), 1e-6, 30)
    add_times(effect, log_ratios, SLOPE)
    assert effect.step_time == pytest.approx(1.05, rel=1e-4)
    assert 1 + effect.time == pytest.approx(0.96 * 1.05 / 1.02, rel=1e-3)


# -----------------------------------------------------------------------------
# Verdicts


def test_verdicts():
    rng = np.random.default_rng(4)
    noise = rng.normal(0, SD, 60)
    noise -= noise.mean()
    assert decide(noise - 0.01, SLOPE, 0.02, 1)[0] == "helps"
    assert decide(noise + 0.01, SLOPE, 0.02, 1)[0] in ("hurts", "not worth it")
    verdict, n = decide(noise, SLOPE, 0.04, 1)
    assert verdict == "not worth it"
    assert n < 60
    # Without a goal, one look after the last pair; without a slope, no gain is excluded
    for differences, slope, until, expected in [
        (noise, SLOPE, 0.001, ("undecided", 60)),
        (noise + 0.01, SLOPE, None, ("hurts", 60)),
        (noise, SLOPE, None, ("undecided", 60)),
        (noise, None, 0.04, ("undecided", 60)),
        (np.zeros(9), SLOPE, 0.02, ("identical", 9)),
    ]:
        assert decide(differences, slope, until, 1) == expected


def test_first_verdict_stands():
    """Pairs after it change nothing, not even the figures."""
    rng = np.random.default_rng(5)
    losses = rng.normal(1.49, 0.004, 40)
    base = rng.normal(1.5, 0.004, 40)

    def after(n):
        return analyse("x", losses[:n], base[:n], SLOPE, 0.02)

    whole = after(40)
    assert 12 <= whole.n < 40
    assert after(whole.n) == whole
    assert after(whole.n - 1).verdict == "undecided"


def test_more_ideas_need_more_evidence():
    rng = np.random.default_rng(6)
    differences = rng.normal(-0.006, SD, 60)
    _, alone = decide(differences, SLOPE, 0.02, 1)
    _, together = decide(differences, SLOPE, 0.02, 20)
    assert together > alone
    base = np.full(60, 1.5)
    effect = analyse("x", base + differences, base, None, None, ideas=20)
    low, high = effect.difference_interval
    half = half_widths(differences, 0.01 / 20)
    assert (high - low) / 2 == pytest.approx(half[-1])


# -----------------------------------------------------------------------------
# Simulations


def upper_bound(count: int, n: int) -> float:
    """The upper end of the 99% interval of a proportion."""
    return stats.binomtest(count, n).proportion_ci(0.99).high


def gaussian(rng, shape):
    return rng.normal(0, 1, shape)


def skewed(rng, shape):
    """Skewness 0.7. Differences of two losses have none if an idea does nothing at all."""
    return rng.gamma(8, 1, shape) - 8


def strongly_skewed(rng, shape):
    """Skewness 1.4."""
    return rng.gamma(2, 1, shape) - 2


def kept_residuals(rng, shape):
    residuals = np.array(RESIDUALS)
    return rng.choice(residuals - residuals.mean(), shape)


@pytest.mark.parametrize(
    "draw, limit",
    [
        (gaussian, 0.015),
        (skewed, 0.015),
        (kept_residuals, 0.015),
        (strongly_skewed, 0.025),
    ],
)
def test_false_positives_when_looking_after_each_pair(draw, limit):
    """20,000 comparisons without an effect, looked at after each of 1,000 pairs."""
    rng = np.random.default_rng(7)
    trials = 20_000
    false = 0
    for _ in range(0, trials, 1000):
        differences = draw(rng, (1000, 1000))
        largest = log_e_values(differences).max(axis=1)
        false += int((largest >= math.log(100)).sum())
    assert upper_bound(false, trials) < limit, false / trials


@pytest.mark.parametrize("ideas, fewest", [(1, 12), (2, 13), (8, 15)])
def test_the_ceiling_without_noise(ideas, fewest):
    """One pair more than it takes for an interval, and so for a verdict."""
    half = half_widths(np.arange(40.0) % 2, 0.01 / ideas)
    assert np.flatnonzero(np.isfinite(half))[0] + 1 == fewest
    assert most_pairs(1.0, 1e-6, ideas) == fewest + 1
    # With noise, half of the other pairs give a two-sided z-test a power of 90%
    pairs = (most_pairs(1.0, 100, ideas) - fewest) / 2
    shift = math.sqrt(pairs) / 100
    limit = stats.norm.isf(0.01 / ideas / 2)
    power = stats.norm.sf(limit - shift) + stats.norm.cdf(-limit - shift)
    assert power == pytest.approx(0.9, abs=1e-4)


@pytest.mark.parametrize("effect", [-0.02, 0.0])
def test_two_percent_are_decided_nine_times_in_ten(effect):
    """With mini's noise: within the limit of pairs, and in about as many as expected."""
    rng = np.random.default_rng(8)
    goal = 0.123 * -math.log1p(-0.02)
    limit = most_pairs(goal, SD)
    expected = pairs_for(goal, SD)
    shift = 0.123 * math.log1p(effect)
    verdicts = []
    pairs = []
    for _ in range(1000):
        differences = rng.normal(shift, SD, limit)
        verdict, n = decide(differences, SLOPE, 0.02, 1)
        verdicts.append(verdict)
        pairs.append(n)
    right = "helps" if effect else "not worth it"
    wrong = "not worth it" if effect else "helps"
    assert verdicts.count(right) > 930
    assert upper_bound(verdicts.count(wrong), 1000) < 0.025
    assert 0.8 * expected < np.mean(pairs) < 1.2 * expected


def some_slope(rng: np.random.Generator, level: np.ndarray) -> Slope:
    """As it is measured with five seeds, where the loss falls by 0.123 * log(steps)."""
    longer = 0.123 * math.log(1.25)
    fewer = rng.normal(level[:5] + longer, 0.003)
    more = rng.normal(level[:5] - longer, 0.003)
    return measure_slope(fewer, more, WIDTH)


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
        log_ratios = rng.normal(math.log(1.01), 0.02, 30)
        add_times(effect, log_ratios, slope)
        truths = {"difference": gain, "steps": 0.97 * 0.9 - 1, "time": 0.97 * 0.9 * 1.01 - 1}
        for name, truth in truths.items():
            low, high = getattr(effect, f"{name}_interval")
            if low <= truth <= high:
                held[name] += 1
    fewest = stats.binom.ppf(0.001, trials, 0.99)
    for name, count in held.items():
        assert count >= fewest, (name, count / trials)
