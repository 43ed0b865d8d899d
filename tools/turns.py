"""
Did runs take turns? Only then can their times be compared: the same script is up to 2% slower in another
session, on the same machine.
"""

import math
import re
from datetime import datetime

from scipy import stats

from tools.logs import Log

# The first line of nvidia-smi, like "Thu Oct 10 12:34:56 2024"; and what submit --make adds to a log
NVIDIA_SMI = re.compile(r"^\w{3} (\w{3} +\d+ \d\d:\d\d:\d\d \d{4})\s*$", re.MULTILINE)
STARTED = re.compile(r"^started: ([\d-]+ [\d:.]+)$", re.MULTILINE)


def started(log: Log) -> datetime | None:
    """When the run began; None if its log doesn't say."""
    if found := STARTED.search(log.run):
        return datetime.fromisoformat(found[1])
    if found := NVIDIA_SMI.search(log.run):
        return datetime.strptime(found[1], "%b %d %H:%M:%S %Y")
    return None


def turns(logs: list[Log], base: list[Log]) -> list[tuple[Log, Log]]:
    """Pairs of a run and one of the base, each made one after the other. [] if a run has no such partner, or
    no time."""
    runs = [(started(log), side, log) for side, group in enumerate([logs, base]) for log in group]
    times = {time for time, side, log in runs}
    if None in times or len(times) < len(runs):  # runs in one file have one header, and so one time
        return []
    runs.sort(key=lambda run: run[0])
    pairs = []
    for first, second in zip(runs[::2], runs[1::2]):
        ours, theirs = sorted([first, second], key=lambda run: run[1])
        if (ours[1], theirs[1]) != (0, 1):
            return []
        pairs.append((ours[2], theirs[2]))
    return pairs if len(pairs) == len(logs) == len(base) else []


def log_ratios(pairs: list[tuple[Log, Log]]) -> list[float]:
    """log(training time / the base's) of each pair; [] if a log has no time."""
    times = [[log.end.train_time_ms for log in pair] for pair in pairs]
    if not all(0 < time < math.inf for pair in times for time in pair):
        return []
    return [math.log(ours / theirs) for ours, theirs in times]


def p_faster(pairs: list[tuple[Log, Log]]) -> float | None:
    """One-sided t-test of a mean log ratio below zero. None if there are too few pairs."""
    ratios = log_ratios(pairs)
    if len(set(ratios)) < 2:
        return None
    return float(stats.ttest_1samp(ratios, 0, alternative="less").pvalue)
