"""
Did runs take turns? Only then can their times be compared: the same script is up to 2% slower in another
session, on the same machine.
"""

import itertools
import math
import re
from datetime import datetime

from scipy import stats

from judge.logs import Log

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
    """Pairs of a run and one of the base, made one after the other. [] if one of them has no such partner, or
    no time."""
    if len(logs) != len(base) or None in map(started, [*logs, *base]):
        return []
    pairs = list(zip(sorted(logs, key=started), sorted(base, key=started)))
    times = [time for pair in pairs for time in sorted(map(started, pair))]
    in_turn = all(earlier < later for earlier, later in itertools.pairwise(times))
    return pairs if in_turn else []


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
