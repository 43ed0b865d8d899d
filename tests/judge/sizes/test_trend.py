"""Trends and forecasts over sizes, and how often a ladder errs."""

import math

import numpy as np
import pytest
from scipy import stats

from judge.sizes.trend import (
    Change,
    enough,
    forecast,
    interval_of,
    measure_change,
    trend,
    verdict_over,
)
from judge.stats.decide import (
    FEWEST_SLOPES,
    LARGEST_SLOPE_ERROR,
    Slope,
    decide,
    goal_in_loss,
    log_e_values,
    measure_slope,
)

FEW = 1e9  # degrees of freedom of a variance that is known


def changes_on(rng: np.random.Generator, sizes: int) -> list[Change]:
    """Of known errors."""
    parameters = np.cumprod(rng.uniform(1.5, 4, sizes)) * 1e4
    variances = rng.uniform(0.001, 0.01, (sizes, 2)) ** 2
    values = 0.01 * rng.normal(size=sizes)
    return [Change(*row, (FEW, FEW)) for row in zip(parameters, values, variances)]


@pytest.mark.parametrize("seed", range(20))
def test_the_line_is_that_of_numpy(seed):
    """With the covariance that it gives for known errors, or, if the sizes scatter more, for errors of the size of
    the scatter."""
    rng = np.random.default_rng(seed)
    sizes = int(rng.integers(3, 7))
    changes = changes_on(rng, sizes)
    x = np.log2([change.parameters for change in changes])
    y = np.array([change.value for change in changes])
    sd = np.array([math.sqrt(change.variance) for change in changes])
    line, known = np.polyfit(x, y, 1, w=1 / sd, cov="unscaled")
    chi2 = (((y - np.polyval(line, x)) / sd) ** 2).sum()
    cov = known * max(1, chi2 / (sizes - 2))
    ahead = x[-1] + rng.uniform(0.5, 3)
    for found, at in [(trend(changes), [1, 0]), (forecast(changes, 2**ahead), [ahead, 1])]:
        half = stats.norm.isf(0.025) * math.sqrt(np.array(at) @ cov @ at)
        want = [np.dot(at, line), np.dot(at, line) - half, np.dot(at, line) + half]
        assert [found.value, found.low, found.high] == pytest.approx(want, rel=1e-4, abs=1e-9)


def test_a_change_is_a_t_interval():
    """Of the differences, as long as the slope is known."""
    rng = np.random.default_rng(0)
    differences = rng.normal(-0.01, 0.003, 8)
    found = interval_of(measure_change(1e6, differences, 1e-9, Slope(-0.2, 0.0, 0), own_steps=0.9))
    low, high = stats.ttest_1samp(differences / 0.2, 0).confidence_interval(0.95)
    want = np.array([differences.mean() / 0.2, low, high]) + math.log(0.9)
    assert [found.value, found.low, found.high] == pytest.approx(want)
    wider = interval_of(measure_change(1e6, differences, 1e-9, Slope(-0.2, 0.1, 4), own_steps=0.9))
    assert wider.high - wider.low > found.high - found.low


def test_too_few_sizes():
    changes = changes_on(np.random.default_rng(0), 3)
    assert trend(changes[:1]) is forecast(changes[:2], 1e9) is None
    assert trend(changes[:2]) and forecast(changes, 1e9)


@pytest.mark.parametrize(
    "verdicts, said",
    [
        (["helps", "helps", "helps"], "helps"),
        (["hurts", "hurts"], "hurts"),
        (["helps", "not worth it", "hurts"], "helps only small"),
        (["hurts", "not worth it", "helps"], "helps only large"),
        (["not worth it", "hurts"], "not worth it"),
        (["helps", "hurts", "helps"], "undecided"),
        (["helps", "helps", "undecided"], "undecided"),
        ([], "undecided"),
    ],
)
def test_the_verdict_over_sizes(verdicts, said):
    assert verdict_over(verdicts) == said


# -----------------------------------------------------------------------------
# Simulated ladders, stopped as real ones are

PARAMETERS = 1e3 * np.array([49, 111, 197, 442])
DOUBLINGS = np.log2(PARAMETERS / PARAMETERS[0])
SDS = 0.25 * np.array([0.045, 0.04, 0.035, 0.03])  # of a pair's difference, in nats
SLOPE = -0.25
PAIRS = 8
MOST = 60  # pairs, as if --hours ended
UNTIL = 0.02


def effects_of(rng: np.random.Generator, number: int) -> np.ndarray:
    """The true changes of an idea at the four sizes: they stay, shrink, or change their sign."""
    start = rng.normal(0, 0.05)
    if number % 3 == 0:
        return np.full(4, start)
    if number % 3 == 1:
        return start * rng.uniform(0.5, 1) ** DOUBLINGS
    return start * (1 - DOUBLINGS / rng.uniform(0.5, 3))


def slope_of(rng: np.random.Generator) -> Slope:
    """As compare measures it: four seeds, and four more as long as its error is large."""
    width = 2 * math.log(1.25)
    falls = []
    slope = None
    while slope is None or slope.error > LARGEST_SLOPE_ERROR:
        falls += list(width * rng.normal(SLOPE, 0.2 * abs(SLOPE), FEWEST_SLOPES))
        slope = measure_slope([0.0] * len(falls), falls, width)
    return slope


def pairs_to_verdict(differences: np.ndarray, slope: Slope) -> int:
    """Where a comparison stops, that looks after each pair."""
    goal = goal_in_loss(slope, UNTIL)
    decided = log_e_values(differences + goal, 1e-4) >= math.log(20)
    for side in (differences, -differences):
        decided |= log_e_values(side, 1e-4) >= math.log(100)
    return int(decided.argmax()) + 1 if decided.any() else MOST


def is_wrong(verdict: str, truth: float) -> bool:
    """Whether what is said of a size is false."""
    false = {"helps": truth >= 0, "hurts": truth <= 0, "not worth it": truth < math.log(1 - UNTIL)}
    return false.get(verdict, False)


def simulate(ladders: int) -> dict[str, float]:
    """The shares of ladders that are wrong, of trends and of forecasts that hold, and of ladders with a verdict."""
    rng = np.random.default_rng(1)
    wrong = decided = 0
    trends = []
    forecasts = []
    for number in range(ladders):
        truth = effects_of(rng, number)
        verdicts = []
        changes = []
        for parameters, effect, sd in zip(PARAMETERS, truth, SDS):
            if enough(verdicts):
                break
            if ahead := forecast(changes, parameters):
                forecasts.append(ahead.low <= effect <= ahead.high)
            slope = slope_of(rng)
            differences = rng.normal(effect * abs(SLOPE), sd, MOST).round(4)
            pairs = max(PAIRS, pairs_to_verdict(differences, slope))
            verdicts.append(decide(differences[:pairs], 1e-4, slope, UNTIL, 1)[0])
            changes.append(measure_change(parameters, differences[:PAIRS], 1e-4, slope))
        k = len(changes)
        line = trend(changes)
        true_line = np.polyfit(DOUBLINGS[:k], truth[:k], 1)[0]
        trends.append(line.low <= true_line <= line.high)
        if verdict_over(verdicts) != "undecided":
            decided += 1
            wrong += any(map(is_wrong, verdicts, truth))
    shares = dict(wrong=wrong / ladders, decided=decided / ladders)
    return shares | dict(
        trends=np.mean(trends), forecasts=np.mean(forecasts), forecasts_made=len(forecasts)
    )


@pytest.mark.slow
def test_how_often_ladders_err():
    """Of 2,000 ideas, whose effect stays, shrinks or changes its sign."""
    found = simulate(2000)
    print(found)
    assert found["wrong"] <= 0.01 and found["decided"] > 0.5
    assert found["trends"] >= 0.93 and found["forecasts"] >= 0.93
