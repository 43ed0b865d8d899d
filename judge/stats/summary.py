"""
Finished runs together: their losses against a target, and their times against those of other runs.
"""

import statistics
from dataclasses import dataclass

from scipy import stats


@dataclass
class Summary:
    """Statistics of several runs. Losses are in nats per token, times in seconds.

    A number is None if there are too few runs for it.
    """

    n: int
    loss_mean: float | None
    loss_std: float | None  # of the sample (n - 1)
    p_value: float | None  # of the mean being below the target
    time_mean: float | None


def p_below(losses: list[float], target: float | None) -> float | None:
    """One-sided one-sample t-test of mean(losses) < target. None without a target, or if the losses have
    no spread."""
    if target is None or len(set(losses)) < 2:
        return None
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def summarize(losses: list[float], times: list[float], target: float | None) -> Summary:
    """Statistics of runs with these final losses and training times."""
    return Summary(
        n=len(losses),
        loss_mean=statistics.fmean(losses) if losses else None,
        loss_std=statistics.stdev(losses) if len(losses) > 1 else None,
        p_value=p_below(losses, target),
        time_mean=statistics.fmean(times) if times else None,
    )
