"""The statistics of the comparison: against scipy, against numerical integration, and by simulation."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from judge.compare.answer import change_in_words, losses_in_words
from judge.screen.design import factorial, find_part_effect
from judge.stats.decide import (
    Slope,
    add_times,
    analyse,
    decide,
    far_from_others,
    interval,
    log_e_values,
    log_evidence,
    look_once,
    measure_slope,
    pairs_for,
    rounding,
)

KEPT = Path(__file__).parent / "kept_residuals.json"
RESIDUALS = json.loads(KEPT.read_text())["residuals"]
SLOPE = Slope(-0.123, 0.03, 6)
WIDTH = 2 * math.log(1.25)  # of the steps that SLOPE is measured with
SD = 0.0049  # of mini's differences at the same seed
STEP = 0.0001  # logs have four digits


# -----------------------------------------------------------------------------
# Formulas


def log_bayes_factor(mean, squares, weight, n, bounds=(0, math.inf)):
    """The density of Student's t, averaged over effects between these bounds with each of the three priors,
    over its density without an effect."""
    t = mean * math.sqrt(weight * (n - 1) / squares)
    density = 0
    for variance, share in [(1 / 8, 0.6), (4, 0.3), (1000, 0.1)]:
        limits = [max(-12, min(12, bound)) for bound in bounds]
        peak = t / math.sqrt(1 + weight * variance)

        def integrand(z):
            shift = z * math.sqrt(weight * variance)
            return stats.nct.pdf(t, n - 1, shift) * stats.norm.pdf(z)

        density += share * integrate.quad(integrand, *limits, limit=400, points=[peak])[0]
    return math.log(density / stats.t.pdf(t, n - 1))


@pytest.mark.parametrize("weight, n", [(8, 16), (24, 40), (1.5, 4), (12, 12), (3, 3)])
def test_evidence_is_a_bayes_factor(weight, n):
    squares = 1.3
    for t in (-1.0, 0.5, 3.5):
        mean = t * math.sqrt(squares / (n - 1) / weight)
        expected = math.log(2) + log_bayes_factor(mean, squares, weight, n)
        assert log_evidence(mean, squares, weight, n) == pytest.approx(expected, abs=2e-3)
    bounds = interval(0.7, squares, weight, n, 20)
    assert bounds.high - 0.7 == pytest.approx(0.7 - bounds.low)
    at_bound = math.log(2) + log_bayes_factor(bounds.high - 0.7, squares, weight, n)
    assert at_bound == pytest.approx(math.log(20), abs=1e-2)
    assert interval(0.7, 1.0, 2, 2, 100).high == math.inf  # two pairs can't reject anything


def test_evidence_after_each_pair():
    """Of the pairs so far; the verdict's p-value is one over the largest e-value."""
    differences = np.array([-1, -1.1, -0.9, -1.2, -1, 3])
    found = log_e_values(-differences, step=1e-9)
    assert found[0] == 0
    for n in range(2, 7):
        prefix = differences[:n]
        expected = log_evidence(-prefix.mean(), n * prefix.var(), n, n)
        assert found[n - 1] == pytest.approx(expected)
    verdict, n, p = decide(differences, 1e-9, None, None, ideas=1000)
    assert (verdict, n) == ("undecided", 6)
    assert p == pytest.approx(math.exp(-found[4]))


def test_rounding_counts_as_noise():
    """Equal differences may be one apart in the last digit: as many pairs as it takes with that noise."""
    assert rounding([3.28, 3.2805, 3.0]) == pytest.approx(STEP)
    noise = np.sqrt(STEP**2 / 6) * np.array([1, -1, 1, -1])  # the variance of two errors of rounding
    for mean in (1e-4, 1e-3):
        shown = log_e_values(np.full(4, mean), STEP)[-1]
        assert shown == pytest.approx(log_e_values(mean + noise, 1e-9)[-1])


def test_one_look_against_scipy():
    rng = np.random.default_rng(0)
    losses, base = rng.normal(1.49, 0.01, 8), rng.normal(1.5, 0.004, 8)
    for paired, test in [
        (True, stats.ttest_rel(losses, base)),
        (False, stats.ttest_ind(losses, base, equal_var=False)),
    ]:
        effect = look_once("x", losses, base, paired)
        assert effect.p == pytest.approx(test.pvalue)
        found = (effect.difference.low, effect.difference.high)
        assert found == pytest.approx(tuple(test.confidence_interval(0.99)))
        assert effect.verdict == ("helps" if test.pvalue < 0.01 else "undecided")
    assert look_once("x", losses - 0.02, base, True).verdict == "helps"
    assert look_once("x", losses - 0.02, base, True, ideas=10**6).verdict == "undecided"
    assert look_once("x", base, base, True).verdict == "identical"
    # Three times the same difference of one digit tells nothing
    same = look_once("x", [1.5001, 1.5002, 1.5003], [1.5, 1.5001, 1.5002], True)
    assert same.verdict == "undecided"
    # Runs without a spread, perhaps of a fixed seed, tell nothing about noise
    for paired in (True, False):
        fixed = look_once("x", [1.5, 1.5], [1.6, 1.6], paired)
        assert (fixed.verdict, fixed.p, fixed.difference.high) == ("undecided", 1, math.inf)


def test_a_run_that_is_far_from_the_others():
    rng = np.random.default_rng(0)
    losses = list(rng.normal(1.5, 0.003, 24))
    assert far_from_others(losses) == []
    losses[7] = losses[20] = 1.7
    assert far_from_others(losses) == [7, 20]
    assert far_from_others(losses[6:9]) == []  # too few
    # Several don't hide each other, as long as they are fewer than half
    for n in (5, 8, 24):
        for failed in range((n + 1) // 2):
            some = (
                1.5 + 0.003 * stats.norm.ppf((np.arange(n) + 0.5) / n) + 1.7 * (np.arange(n) < failed)
            )
            assert far_from_others(list(some)) == list(range(failed))


def test_slope_against_scipy():
    rng = np.random.default_rng(2)
    level = rng.normal(1.5, 0.01, 6)
    fewer = level + rng.normal(0.027, 0.002, 6)
    more = level - rng.normal(0.027, 0.002, 6)
    slopes = (more - fewer) / (2 * math.log(1.25))
    expected = stats.ttest_1samp(slopes, 0).confidence_interval(0.99)
    found = measure_slope(fewer, more, WIDTH)
    assert found.bounds() == pytest.approx([-expected.high, -expected.low])
    # Of one seed, of a loss that rises, and of one that doesn't clearly fall
    for losses in [([1.5], [1.4]), ([1.4, 1.41], [1.5, 1.52]), ([1.5, 1.4], [1.4, 1.5])]:
        assert measure_slope(*losses, WIDTH) is None


def test_an_identical_idea_is_as_fast_as_its_steps():
    effect = analyse("x", [1.5, 1.4], [1.5, 1.4], None, 0.02)
    add_times(effect, [-0.05, -0.051, -0.049])
    assert effect.verdict == "identical"
    assert effect.time == effect.step_time
    assert change_in_words(effect) == ["The same loss takes 4.9% less time."]


def test_the_headline_says_nothing_that_may_be_chance():
    """An idea whose steps help, and whose time is unknown; and one that only has times."""
    effect = analyse("x", [1.4, 1.41, 1.42, 1.4], [1.5, 1.511, 1.52, 1.5], SLOPE, 0.02)
    add_times(effect, [0.03, -2.0, 0.14])
    assert effect.verdict == "helps"
    assert change_in_words(effect)[0].endswith("fewer steps.")
    effect = analyse("x", [1.5, 1.4], [1.5, 1.4], SLOPE, 0.02)
    add_times(effect, [0.03, -0.74, 0.14])
    assert change_in_words(effect) == []


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


def says(low: float, high: float) -> str:
    """The verdict that an interval has."""
    return "helps" if high < 0 else "hurts" if low > 0 else ""


@pytest.mark.parametrize("seed", range(60))
def test_the_interval_is_the_verdict(seed):
    """It is below zero if the idea helps, and only then: for compare, --runs, finished logs and screen; for
    differences that are normal, heavy-tailed or rounded, also as they are shown."""
    rng = np.random.default_rng(seed)
    draw = [gaussian, students, rounded, kept_residuals][seed % 4]
    n = int(rng.integers(2, 25))
    digits = 3 if draw is rounded else 6
    base = 1.5 + 0.01 * rng.normal(size=n).round(digits)
    shift = rng.choice([-1, 1]) * 10 ** rng.uniform(-2, 1)
    losses = base + 0.01 * (draw(rng, (n,)) + shift).round(digits)
    ideas = int(rng.choice([1, 2, 7]))
    given = [(None, 1.0), (SLOPE, 1.0), (SLOPE, 0.9), (SLOPE, 1.2)][seed // 4 % 4]
    effects = [analyse("x", losses, base, given[0], 0.02, ideas, own_steps=given[1])]
    effects += [
        look_once("x", losses, base, paired, *(given[0], ideas, given[1])) for paired in (True, False)
    ]
    for effect in effects:
        found = effect.steps or effect.difference
        verdict = effect.verdict if effect.verdict in ("helps", "hurts") else ""
        assert says(found.low, found.high) == verdict
        if given[1] == 1 and verdict:
            shown = losses_in_words(effect.difference).split(" to ")
            assert {bound[0] for bound in shown} == {"-" if verdict == "helps" else "+"}
    design = factorial(3)
    blocks = (base[:2, None] + 0.01 * shift * design.rows[:, 0] + draw(rng, (2, 8)) / 100).round(
        digits + 2
    )
    for contrast in design.contrasts:
        part = find_part_effect("x", blocks, contrast, 0.002, ideas)
        expected = {"needed": "hurts", "hurts": "helps"}.get(part.verdict, "")
        assert says(part.without.low, part.without.high) == expected


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


# -----------------------------------------------------------------------------
# Simulations


def upper_bound(count: int, n: int) -> float:
    """The upper end of the 99% interval of a proportion."""
    return stats.binomtest(count, n).proportion_ci(0.99).high


def gaussian(rng, shape):
    return rng.normal(0, 1, shape)


def students(rng, shape):
    return rng.standard_t(4, shape)


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


OTHERS = [gaussian, students, rounded, kept_residuals, skewed_differences]
CASES = [
    (gaussian, 16_000, 60),
    *[pytest.param(d, 20_000, 200, marks=pytest.mark.slow) for d in OTHERS],
]


@pytest.mark.parametrize("draw, trials, looks", CASES)
def test_false_positives_when_looking_after_each_pair(draw, trials, looks):
    """The interval is the verdict, so its bounds are wrong as rarely, at any look."""
    limit = 0.02 if draw is skewed_differences else 0.01
    helps, hurts, worthless = wrong_verdicts(draw, trials, looks)
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


def test_intervals_hold_the_truth():
    """Loss, steps and time, at the moment when the verdict stands."""
    rng = np.random.default_rng(9)
    wrong = Counter()
    trials = 1500
    gain = 0.123 * math.log1p(-0.03)
    for _ in range(trials):
        level = rng.normal(1.5, 0.003, 60)
        base = rng.normal(level, 0.003)
        idea = rng.normal(level + gain, 0.003)
        slope = some_slope(rng, level)
        effect = analyse("x", idea, base, slope, 0.02, own_steps=0.9)
        log_ratios = rng.normal(math.log(1.01), 0.02, 6)
        add_times(effect, log_ratios)
        steps = math.log(0.97 * 0.9)
        truths = {"difference": gain, "steps": steps, "time": steps + math.log(1.01)}
        for name, truth in truths.items():
            estimate = getattr(effect, name)
            wrong[name, "low"] += estimate.low > truth
            wrong[name, "high"] += estimate.high < truth
    assert max(wrong.values()) <= stats.binom.ppf(0.999, trials, 0.01), wrong
