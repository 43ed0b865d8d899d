"""
Finished runs together: their losses against a target, and their times against those of other runs.
"""

import math
import statistics
import warnings
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


@dataclass
class Summary:
    """Statistics of several runs. Losses are in nats per token, times in seconds.

    A number is None if there are too few runs for it.
    """

    n: int
    loss_mean: float | None = None
    loss_std: float | None = None  # of the sample (n - 1)
    p_value: float | None = None  # of the mean being below the target
    time_mean: float | None = None
    time_interval: tuple[float, float] | None = None  # 95% confidence


def p_below(losses: list[float], target: float | None) -> float | None:
    """One-sided one-sample t-test of mean(losses) < target. None without a target, or if the losses have
    no spread."""
    if target is None or len(set(losses)) < 2:
        return None
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def summarize(losses: list[float], times: list[float], target: float | None) -> Summary:
    """Statistics of runs with these final losses and training times."""
    summary = Summary(len(losses))
    if losses:
        summary.loss_mean = statistics.fmean(losses)
    if times:
        summary.time_mean = statistics.fmean(times)
    if len(losses) > 1:
        summary.loss_std = statistics.stdev(losses)
        summary.p_value = p_below(losses, target)
    if len(times) > 1:
        standard_error = statistics.stdev(times) / math.sqrt(len(times))
        half = standard_error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(times) - 1))
        summary.time_interval = (summary.time_mean - half, summary.time_mean + half)
    return summary


def p_lower(ours: list[float], theirs: list[float]) -> tuple[float | None, str]:
    """Tests whether our mean is lower. Returns the p-value, or None, and the name of the test."""
    if len(ours) + len(theirs) < 3:
        return None, "no test: one run on each side"
    if len(set(ours)) == len(set(theirs)) == 1:
        return None, "no test: all runs of a side are equal"
    # A single run has no spread of its own: assume that of the other side
    single = min(len(ours), len(theirs)) == 1
    name = "Student's t-test, because one side has a single run" if single else "Welch's t-test"
    with warnings.catch_warnings(action="ignore"):  # almost equal numbers
        p = stats.ttest_ind(ours, theirs, equal_var=single, alternative="less").pvalue
    return float(p), name
