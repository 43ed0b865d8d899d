"""
Did runs take turns? Only then can their times be compared: the same script is up to 2% slower in another
session, on the same machine.
"""

import contextlib
import itertools
import math
import re
from datetime import datetime

from scipy import stats

from judge.logs.read import Log

# The first line of nvidia-smi, like "Thu Oct 10 12:34:56 2024"; and what submit --make adds to a log, in UTC
NVIDIA_SMI = re.compile(r"^\w{3} (\w{3} +\d+ \d\d:\d\d:\d\d \d{4})\s*$", re.MULTILINE)
STARTED = re.compile(r"^started: ([\d-]+ [\d:.]+)$", re.MULTILINE)


def started(log: Log) -> datetime | None:
    """When the run began; None if its log doesn't say."""
    with contextlib.suppress(ValueError):  # of what only looks like a date
        if found := STARTED.search(log.run):
            return datetime.fromisoformat(found[1])
        if found := NVIDIA_SMI.search(log.run):
            return datetime.strptime(found[1], "%b %d %H:%M:%S %Y")
    return None


def ended_before(log: Log, later: Log) -> bool:
    """Two runs at once, on two machines or on two halves of one, don't take turns."""
    between = started(later) - started(log)
    return 1000 * between.total_seconds() > log.end.train_time_ms


def turns(logs: list[Log], base: list[Log]) -> list[tuple[Log, Log]]:
    """Pairs of a run and one of the base, made one after the other. [] if one of them has no such partner, or
    no time."""
    if len(logs) != len(base) or None in map(started, [*logs, *base]):
        return []
    pairs = list(zip(sorted(logs, key=started), sorted(base, key=started)))
    runs = [log for pair in pairs for log in sorted(pair, key=started)]
    in_turn = itertools.starmap(ended_before, itertools.pairwise(runs))
    return pairs if all(in_turn) else []


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
