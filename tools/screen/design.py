"""
The design and the statistics of screen.py: up to 16 factors in 32 configurations.

The design is the Hadamard matrix of order 16 above its negative (a fold-over). All columns are
orthogonal, so each factor's effect is the mean loss of 16 configurations minus that of the other 16.
No pair of factors that act together changes it. The pairs themselves can't be told apart: they are
aliased in 15 groups of up to eight, and only each group's sum is measured. See Box, Hunter and Hunter,
"Statistics for Experimenters" (2005), chapter 6.

A block is one seed in all configurations. The fit has an effect for each block, factor and group. What
is left is noise. Intervals are anytime-valid, as in tools/compare/stats.py, for contrasts of a linear model:
Lindon et al., "Anytime-Valid Linear Models and Regression Adjusted Causal Inference in Randomized
Experiments" (2022, https://arxiv.org/abs/2210.08589). So you may look after every block.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from scipy.linalg import hadamard

from tools.compare.stats import (
    P_VALUE,
    Bounds,
    Slope,
    half_width,
    log_steps,
    relative,
    relative_interval,
)

FEWEST_FACTORS = 5  # with fewer, configurations repeat
MOST_FACTORS = 16
CONFIGURATIONS = 2 * MOST_FACTORS
GROUPS = MOST_FACTORS - 1
# The column of the Hadamard matrix for each factor. With this order, five factors already make 32
# different configurations, and pairs of up to six factors are all in different groups.
COLUMNS = (0, 1, 2, 4, 8, 15, 7, 11, 13, 14, 3, 5, 6, 9, 10, 12)


@dataclass
class Contrast:
    """The effect of a factor or of a group of pairs: high minus low, in nats per token."""

    difference: float
    half_width: float  # of the interval; infinite with one block
    steps: float | None = None  # -0.04: with the high side, the same loss takes 4% fewer steps
    steps_interval: Bounds | None = None

    @property
    def found(self) -> bool:
        """Is it larger than chance allows?"""
        return abs(self.difference) > self.half_width


@dataclass
class Fit:
    factors: list[Contrast]
    groups: list[Contrast]  # group k is at index k - 1
    sd: float  # of a run's loss around the fit; nan with one block
    freedom: int  # degrees of freedom of sd; 0 with one block


# -----------------------------------------------------------------------------
# Design


def make_design(factors: int) -> np.ndarray:
    """Returns -1 (low) or +1 (high) for each configuration and factor, shape (32, factors)."""
    columns = hadamard(MOST_FACTORS)[:, COLUMNS[:factors]]
    return np.concatenate([columns, -columns])


def group_columns() -> np.ndarray:
    """Returns the product of the two factors of a pair, shape (32, 15): column k - 1 is group k's."""
    columns = hadamard(MOST_FACTORS)[:, 1:]
    return np.concatenate([columns, columns])


def pairs_of_group(group: int, factors: int) -> list[tuple[int, int]]:
    """The pairs whose product is this group's column: columns a and b of the Hadamard matrix multiply to
    column a XOR b."""
    pairs = itertools.combinations(range(factors), 2)
    return [(i, j) for i, j in pairs if COLUMNS[i] ^ COLUMNS[j] == group]


# -----------------------------------------------------------------------------
# Fit


def interval_half_width(sd: float, freedom: int, runs: int, contrasts: int) -> float:
    """Half of the interval of one of `contrasts` contrasts that are judged together.

    `sd` is the standard deviation of a run's loss, with `freedom` degrees of freedom. A contrast is the
    mean of half of the `runs` minus that of the other half.
    """
    weight = runs / 4  # the variance of a contrast is sd^2 / weight
    return half_width(freedom * sd**2, weight, freedom + 1, contrasts / P_VALUE)


def fit(losses: np.ndarray, factors: int) -> Fit:
    """Fits losses of shape (blocks, 32) by least squares.

    The columns of the model are orthogonal, so each effect is a difference of two means.
    """
    blocks = len(losses)
    means = losses.mean(axis=0)
    differences = means @ make_design(factors) / MOST_FACTORS
    group_differences = means @ group_columns() / MOST_FACTORS
    sd = math.nan
    half = group_half = math.inf
    freedom = (blocks - 1) * (CONFIGURATIONS - 1)
    if blocks > 1:
        noise = losses - losses.mean(axis=1, keepdims=True) - means + means.mean()
        sd = math.sqrt((noise**2).sum() / freedom)
        half = interval_half_width(sd, freedom, losses.size, factors)
        group_half = interval_half_width(sd, freedom, losses.size, GROUPS)
    return Fit(
        factors=[Contrast(float(d), half) for d in differences],
        groups=[Contrast(float(d), group_half) for d in group_differences],
        sd=sd,
        freedom=freedom,
    )


def add_steps(contrast: Contrast, slope: Slope) -> None:
    """Fills in what the contrast is worth in steps to the same loss."""
    center, half = log_steps(contrast.difference, contrast.half_width, slope)
    contrast.steps = relative(center)
    if math.isfinite(half):
        contrast.steps_interval = relative_interval(center, half)


def verdict(contrast: Contrast, until: float, is_switch: bool) -> str:
    """One of "helps", "hurts", "not worth it" and "undecided" for a switch, which is off or on. For other
    factors "high is better", "low is better", "no difference" and "undecided"."""
    if contrast.found:
        if contrast.difference < 0:
            return "helps" if is_switch else "high is better"
        return "hurts" if is_switch else "low is better"
    if contrast.steps_interval is None:
        return "undecided"
    low, high = contrast.steps_interval
    if is_switch and low > -until:
        return "not worth it"
    if not is_switch and -until < low and high < until:
        return "no difference"
    return "undecided"
