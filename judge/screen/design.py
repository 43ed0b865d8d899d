"""
Which combinations of parts a screen trains, and what their losses say about each part.

In the factorial design, each part is in half of the combinations, and each run counts for every part.
It is the Hadamard matrix of the smallest order that has a column for each part, above its negative (a
fold-over). All columns are orthogonal, so the effect of a part is the mean loss of one half minus that
of the other. No pair of parts that act together changes it. Some pairs can't be told apart: only the
sum of such a group is measured. See Box, Hunter and Hunter, "Statistics for Experimenters" (2005),
chapter 6. Where parts can't be combined like this, each of them is left out of the whole once.

A block is one seed in all combinations. The fit has a mean for each block and for each combination;
what is left is noise. Evidence and intervals are those of judge/stats/decide.py, for contrasts of a
linear model: Lindon et al., "Anytime-Valid Linear Models and Regression Adjusted Causal Inference in
Randomized Experiments" (2022, https://arxiv.org/abs/2210.08589). So you may look after every block.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import hadamard

from judge.stats.decide import P_VALUE, P_WORTHLESS, Estimate, interval, rounding

MOST_PARTS = 16
# Columns of the Hadamard matrix, in the order of use
COLUMNS = (0, 1, 2, 4, 8, 15, 7, 11, 13, 14, 3, 5, 6, 9, 10, 12)


@dataclass
class AliasedPairs:
    """Pairs of parts whose interactions can't be told apart."""

    pairs: list[tuple[int, int]]
    contrast: np.ndarray  # as in Design


@dataclass
class Design:
    """C combinations of P parts. The first one has all parts, and the last one none."""

    rows: np.ndarray  # bool (C, P): the parts that a combination has
    contrasts: np.ndarray  # float64 (P, C): times the mean losses, they are the effects of the parts
    groups: list[AliasedPairs] = field(default_factory=list)


def factorial(parts: int) -> Design:
    """At least two combinations, and at most four times as many as parts."""
    order = 1
    while order < parts:
        order *= 2
    columns = [column for column in COLUMNS if column < order][:parts]
    half = hadamard(order)[:, columns]
    signs = np.concatenate([half, -half[::-1]])  # reversed, so that the last one has no part
    groups = {}
    for i, j in itertools.combinations(range(parts), 2):
        column = signs[:, i] * signs[:, j]
        groups.setdefault(tuple(column), AliasedPairs([], column / order)).pairs.append((i, j))
    return Design(signs > 0, signs.T / order, list(groups.values()))


def leave_one_out(parts: int) -> Design:
    """The whole, the whole without each part, and no part at all."""
    whole = np.ones((1, parts))
    rows = np.concatenate([whole, 1 - np.eye(parts), 0 * whole])
    contrasts = np.concatenate([whole.T, -np.eye(parts), 0 * whole.T], axis=1)
    return Design(rows > 0, contrasts)


# -----------------------------------------------------------------------------
# Effects


@dataclass
class PartEffect:
    """Of a part, or of pairs of parts that act together."""

    name: str
    without: Estimate  # the metric without it, minus with it; the intervals hold for all of its kind together
    verdict: str


def fit(losses: np.ndarray, contrast: np.ndarray) -> dict[str, float]:
    """What losses (blocks, C) say about a contrast (C,), by least squares. Returns interval's arguments."""
    blocks, combinations = losses.shape
    means = losses.mean(axis=0)
    noise = losses - losses.mean(axis=1, keepdims=True) - means + means.mean()
    return dict(
        mean=float(contrast @ means),
        squares=float((noise**2).sum()) + losses.size * rounding(losses.flat) ** 2 / 12,
        weight=blocks / float(contrast @ contrast),  # the variance of a run over that of the mean
        n=(blocks - 1) * (combinations - 1) + 1,
    )


def find_part_effect(
    name: str, losses: np.ndarray, contrast: np.ndarray, goal: float, count: int
) -> PartEffect:
    """Of one of `count` parts or groups; `goal` is a loss. If all blocks are equal, the script may have a fixed seed, which says
    nothing about noise."""
    if len(losses) < 2 or not np.ptp(losses, axis=0).any():
        value = -float(contrast @ losses.mean(axis=0)) if len(losses) else math.nan
        return PartEffect(name, Estimate(value, -math.inf, math.inf), "undecided")
    found = fit(losses, -contrast)
    without = interval(**found, evidence=count / P_VALUE)
    less_sure = interval(**found, evidence=count / P_WORTHLESS)
    verdict = "undecided"
    if without.low > 0:
        verdict = "needed"
    elif without.high < 0:
        verdict = "hurts"
    elif -goal < less_sure.low and less_sure.high < goal:
        verdict = "barnacle"
    return PartEffect(name, without, verdict)
