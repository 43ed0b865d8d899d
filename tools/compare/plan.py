"""
What compare.py knows so far, and what it runs next.

Runs are planned in chunks of eight seeds, because a process makes eight runs. The first chunk of the
base and of each idea comes first. Then the base runs with fewer and more steps, to measure what a loss
is worth in steps. Then come further chunks of the ideas that are still undecided, and of the base.

A command makes one run, so its chunks have one. Which variant is first alternates from chunk to chunk, so
that slow drifts of the machine cancel in the times.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tools.common import goal, percent_interval, plural, short
from tools.compare.runs import RUNS_A_PROCESS, Pool, runs_a_process
from tools.compare.sources import Variant, log_ratio_of_steps
from tools.compare.stats import (
    FEWEST_SLOPES,
    LARGEST_SLOPE_ERROR,
    Effect,
    Slope,
    add_times,
    analyse,
    given_slope,
    measure_slope,
    most_pairs,
    pairs_for,
)

# Before the first pairs: of mini's losses with two seeds' differences, and what 1% of its steps is worth
USUAL_SD = 0.005
USUAL_SLOPE = -0.123
MOST_SLOPES = 24  # seeds
UNLIMITED = 1_000_000  # pairs


@dataclass
class Comparison:
    """What is compared, and what is known so far."""

    args: argparse.Namespace
    pool: Pool
    base: Variant
    ideas: list[Variant]
    fewer: Variant | None = None  # the base with fewer steps; None if its runs don't measure the slope
    more: Variant | None = None
    log_ratios: dict[str, list[float]] = field(default_factory=dict)  # idea -> rounds, or timed pairs
    timed: dict[str, list[int]] = field(default_factory=dict)  # idea -> seeds of the timed pairs
    notes: list[str] = field(default_factory=list)

    def until(self) -> float | None:
        """The gain that matters. With --runs, there is only one look, which excludes no gain."""
        return None if self.args.runs else self.args.until

    def losses(self, variant: Variant) -> list[float]:
        """Final losses of the seeds from the first one on, up to the first that is missing."""
        logs = self.pool.runs[variant.name]
        seeds = itertools.takewhile(logs.__contains__, itertools.count(self.args.seed))
        return [logs[seed].end.val_loss for seed in seeds]

    def steps(self, variant: Variant) -> int | None:
        """Of each of its runs; None if that isn't known yet."""
        logs = list(self.pool.runs[variant.name].values())
        return logs[0].end.step if logs else variant.num_iterations()

    def slope(self) -> Slope | None:
        if self.args.loss_per_100_steps:
            steps = self.steps(self.base)
            return steps and given_slope(self.args.loss_per_100_steps, steps)
        if self.fewer is None:
            return None
        width = log_ratio_of_steps(self.fewer, self.more)
        return measure_slope(self.losses(self.fewer), self.losses(self.more), width)

    def pairs(self, idea: Variant) -> np.ndarray:
        """Losses of the idea and of the base at the same seeds, shape (2, pairs)."""
        pairs = list(zip(self.losses(idea), self.losses(self.base)))
        return np.array(pairs[: self.args.runs]).reshape(-1, 2).T

    def effects(self) -> list[Effect]:
        """The effects of the ideas that have two pairs or more."""
        slope = self.slope()
        found = []
        for idea in self.ideas:
            pairs = self.pairs(idea)
            if pairs.shape[1] < 2:
                continue
            own_steps = self.steps(idea) / self.steps(self.base)
            effect = analyse(idea.name, *pairs, slope, self.until(), len(self.ideas), own_steps)
            ratios = self.log_ratios.get(idea.name)
            if ratios:
                add_times(effect, np.array(ratios), slope)
            found.append(effect)
        return found


# -----------------------------------------------------------------------------
# Plans


def undecided(c: Comparison) -> list[Variant]:
    """The ideas that need more runs."""
    effects = {effect.name: effect for effect in c.effects()}
    return [
        idea for idea in c.ideas if c.pairs(idea).shape[1] < pairs_at_most(c, effects.get(idea.name))
    ]


def pairs_at_most(c: Comparison, effect: Effect | None) -> int:
    """How many pairs an idea with this effect gets."""
    if c.args.runs:
        return c.args.runs
    if effect is None:
        return 2
    if effect.verdict == "identical":
        return RUNS_A_PROCESS
    if effect.verdict != "undecided":
        return 0
    if not has_goal(c):
        return UNLIMITED
    return most_pairs(goal_in_loss(c), max(effect.sd, 1e-6), len(c.ideas))


def has_goal(c: Comparison) -> bool:
    """False if nothing turns --until into a loss. Then there is no maximum number of pairs."""
    return bool(c.args.runs or c.args.loss_per_100_steps or c.fewer)


def goal_in_loss(c: Comparison) -> float:
    """The loss that --until is worth."""
    slope = c.slope()
    return abs(slope.value if slope else USUAL_SLOPE) * -np.log1p(-c.args.until)


def pairs_expected(c: Comparison) -> int:
    """About how many pairs it takes, whether the idea does nothing or is worth --until."""
    sds = [effect.sd for effect in c.effects() if effect.n >= RUNS_A_PROCESS]
    sd = max([*sds, 1e-6]) if sds else USUAL_SD
    return c.args.runs or pairs_for(goal_in_loss(c), sd, len(c.ideas))


def slope_runs(c: Comparison) -> list[tuple[Variant, range]]:
    """The runs of the base with fewer and with more steps that the slope needs."""
    if c.fewer is None:
        return []
    n = min(len(c.losses(c.fewer)), len(c.losses(c.more)))
    slope = c.slope()
    precise = slope is not None and slope.error <= LARGEST_SLOPE_ERROR
    if n >= MOST_SLOPES or (n >= FEWEST_SLOPES and precise):
        return []
    wanted = n - n % FEWEST_SLOPES + FEWEST_SLOPES  # some of them may be under way
    seeds = range(c.args.seed, c.args.seed + wanted)
    return [(c.fewer, seeds), (c.more, seeds)]


def wanted_runs(c: Comparison) -> Iterator[tuple[Variant, range]]:
    """What to run next, in this order. Some of these runs may be there, or under way."""
    waiting = undecided(c)
    if not waiting and not c.args.runs:
        return
    first = c.args.seed
    last = first + (c.args.runs or UNLIMITED)
    done = min((c.pairs(idea).shape[1] for idea in waiting), default=0)
    size = runs_a_process(c.base)
    chunk = first + done - done % size
    # At most one chunk ahead of the one that isn't complete
    for start in (chunk, chunk + size):
        if start >= first + RUNS_A_PROCESS:
            yield from slope_runs(c)
        variants = [c.base, *waiting]
        if size == 1 and start % 2:  # each variant of a command is as often first as last
            variants.reverse()
        for variant in variants:
            yield variant, range(start, min(start + size, last))
    yield from slope_runs(c)


# -----------------------------------------------------------------------------
# In words


def runs_to_make(c: Comparison) -> int:
    """About how many are missing."""
    waiting = undecided(c)
    if not waiting:
        return 0
    expected = pairs_expected(c)
    wanted = [(variant, expected) for variant in [c.base, *waiting]]
    if c.fewer:
        wanted += [(c.fewer, FEWEST_SLOPES), (c.more, FEWEST_SLOPES)]
    return sum(max(0, runs - len(c.losses(variant))) for variant, runs in wanted)


def plan_in_words(c: Comparison) -> str:
    """What is to come, before the first run."""
    expected = pairs_expected(c)
    kept = sum(len(logs) for logs in c.pool.runs.values())
    if not has_goal(c):
        return f"pairs of runs until the loss is clearly lower or higher, or Ctrl-C: {kept} runs kept"
    words = f"about {expected} pairs show a saving of {goal(c.args.until)}"
    if c.args.runs:
        words = f"{expected} pairs"
    return f"{words}: {plural(runs_to_make(c), 'run')} to make, {kept} kept"


def progress(c: Comparison) -> str:
    """The idea with the fewest pairs of those that are still undecided, and the time."""
    left = c.pool.time_left(runs_to_make(c))
    of = f" of about {pairs_expected(c)}"
    if not has_goal(c):
        left = f"{c.pool.minutes() / 60:.1f} h so far"
        of = ""
    effects = [effect for effect in c.effects() if effect.verdict == "undecided"]
    if not effects:
        return f"{plural(c.pool.made, 'run')} made, {left}"
    effect = min(effects, key=lambda effect: effect.n)
    number = f"loss {effect.difference:+.4f}"
    if effect.steps is not None and effect.has_interval():
        number = f"steps {percent_interval(effect.steps_interval)}"
    return f"{short(effect.name, 14)}: {effect.n}{of} pairs, {number}, {left}"
