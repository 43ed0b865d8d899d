"""
What compare.py knows so far, and what it runs next.

Runs are planned in chunks, because a process makes several runs. A chunk of the base comes first, then
one of each idea that is still undecided, and so on. If the first pairs decide nothing, the base also runs
with fewer and with more steps, to measure what a loss is worth in steps: only then can an idea be not
worth it. Otherwise these runs come last, for the answer.

A command makes one run, so its chunks have one. Which variant is first alternates from chunk to chunk, so
that slow drifts of the machine cancel in the times.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from judge.runs.make import Pool, rounds, runs_a_process
from judge.runs.variants import Variant
from judge.stats.decide import (
    FEWEST_SLOPES,
    LARGEST_SLOPE_ERROR,
    Effect,
    Slope,
    add_times,
    analyse,
    given_slope,
    goal_in_loss,
    look_once,
    measure_slope,
    pairs_for,
)
from judge.text import duration, plural, short

FIRST_PAIRS = 4  # as many decide whether losses are identical, and whether a slope may be needed
MOST_SLOPES = 24  # seeds
UNLIMITED = 1_000_000  # pairs


def losses(variant: Variant, seeds: list[int]) -> list[float]:
    """Final losses of the runs with these seeds."""
    return [variant.runs[seed].end.val_loss for seed in seeds]


@dataclass
class Comparison:
    """What is compared, and what is known so far."""

    pool: Pool
    base: Variant
    ideas: list[Variant]
    seed: int  # the first one
    runs: int | None  # exactly so many pairs, and one look
    until: float  # the smallest saving of steps that matters
    loss_per_100_steps: float | None
    fewer: Variant | None = None  # the base with fewer steps; None if its runs don't measure the slope
    more: Variant | None = None
    warnings: list[str] = field(default_factory=list)  # before the answer
    notes: list[str] = field(default_factory=list)

    @property
    def variants(self) -> list[Variant]:
        """All, each once."""
        found = [self.base, *self.ideas, self.fewer, self.more]
        return list({variant.name: variant for variant in found if variant}.values())

    @property
    def paired(self) -> bool:
        """Whether the runs of a pair share a seed."""
        return "{seed}" in self.base.command

    def seeds(self, *variants: Variant) -> list[int]:
        """Those from the first one on, up to the first that one of these variants hasn't run."""
        seeds = itertools.count(self.seed)
        return list(itertools.takewhile(lambda seed: all(seed in v.runs for v in variants), seeds))

    def steps(self, variant: Variant) -> int | None:
        """Of each of its runs; None if that isn't known yet, and 1 for runs of a fixed time."""
        if self.pool.fixed_time:
            return 1
        for log in variant.runs.values():
            return log.end.step
        return variant.num_iterations()

    def slopes(self) -> int:
        """Seeds of the runs with fewer and with more steps."""
        return len(self.seeds(self.fewer, self.more))

    def slope(self) -> Slope | None:
        if self.loss_per_100_steps:
            return given_slope(self.loss_per_100_steps, self.steps(self.base) or 1)
        if self.fewer is None or self.slopes() < FEWEST_SLOPES:
            return None
        width = math.log(self.more.num_iterations() / self.fewer.num_iterations())
        seeds = self.seeds(self.fewer, self.more)
        return measure_slope(losses(self.fewer, seeds), losses(self.more, seeds), width)

    def count(self, idea: Variant) -> int:
        """How many pairs of runs, of the idea and of the base at the same seeds."""
        return min(len(self.seeds(idea, self.base)), self.runs or UNLIMITED)

    def effect(self, idea: Variant) -> Effect | None:
        """None if it takes more runs to say anything.

        If the idea had other tests, the pairs of all count, however often somebody has looked. A test of
        --runs may be wrong half as often as allowed, and so may what comes after it.
        """
        n = self.count(idea)
        if n < max(2, self.runs or 0):
            return None
        before = [seed for seed in idea.before if seed in idea.runs and seed in self.base.runs]
        seeds = list(dict.fromkeys([*before, *self.seeds(idea, self.base)[:n]]))
        pairs = losses(idea, seeds), losses(self.base, seeds)
        slope = self.slope()
        own_steps = self.steps(idea) / self.steps(self.base)
        ideas = len(self.ideas)
        if self.runs and not idea.before:
            effect = look_once(idea.name, *pairs, self.paired, slope, ideas, own_steps)
        elif own_steps != 1 and slope is None and slope_runs(self):
            return None
        else:
            tests = 2 if idea.before else 1
            effect = analyse(idea.name, *pairs, slope, self.until, tests * ideas, own_steps)
        if idea.log_ratios:
            add_times(effect, idea.log_ratios, ideas)
        return effect

    def effects(self) -> list[Effect]:
        """The effects of the ideas that have one."""
        return [effect for idea in self.ideas if (effect := self.effect(idea))]


# -----------------------------------------------------------------------------
# Plans


def undecided(c: Comparison) -> list[Variant]:
    """The ideas that need more runs."""
    waiting = []
    for idea in c.ideas:
        if c.runs:
            needed = c.count(idea) < c.runs
        else:
            effect = c.effect(idea)
            identical = effect and effect.verdict == "identical"
            few = c.count(idea) < FIRST_PAIRS
            needed = effect is None or effect.verdict == "undecided" or (identical and few)
        if needed:
            waiting.append(idea)
    return waiting


def slope_runs(c: Comparison) -> list[tuple[Variant, range]]:
    """The runs of the base with fewer and with more steps that the slope still needs. With --runs, none."""
    if c.fewer is None or c.runs:
        return []
    n = c.slopes()
    slope = c.slope()
    if n >= MOST_SLOPES or (slope is not None and slope.error <= LARGEST_SLOPE_ERROR):
        return []
    wanted = n - n % FEWEST_SLOPES + FEWEST_SLOPES  # some of them may be under way
    seeds = range(c.seed, c.seed + wanted)
    return [(c.fewer, seeds), (c.more, seeds)]


def wanted_runs(c: Comparison) -> Iterator[tuple[Variant, range]]:
    """What to run next to decide, in this order. Some of these runs may be there, or under way."""
    waiting = undecided(c)
    if not waiting:
        return
    first = c.seed
    last = first + (c.runs or UNLIMITED)
    done = min(c.count(idea) for idea in waiting)
    if done >= FIRST_PAIRS or any(c.steps(idea) != c.steps(c.base) for idea in waiting):
        yield from slope_runs(c)
    size = runs_a_process(c.base)
    chunk = (first + done) // size
    variants = [c.base, *waiting]
    # The chunk that isn't complete, and those behind it that keep all slots busy
    for number in range(chunk, chunk + rounds(c.pool, variants) + 1):
        order = variants[:: -1 if number % 2 else 1]  # each variant is as often first as last
        for variant in order:
            yield variant, range(max(first, number * size), min((number + 1) * size, last))


def answer_needs_slope(c: Comparison) -> bool:
    """To say what a difference in loss is worth in steps."""
    return any(effect.verdict in ("helps", "hurts") for effect in c.effects())


# -----------------------------------------------------------------------------
# In words


def pairs_expected(c: Comparison, idea: Variant) -> int | None:
    """About how many pairs it takes in all, if the losses go on like this; None as long as nobody can know."""
    if c.runs:
        return c.runs
    effect = c.effect(idea)
    slope = c.slope()
    if slope is None or effect is None or effect.n < FIRST_PAIRS:
        return None
    goal = goal_in_loss(slope, c.until)
    expected = pairs_for(effect.difference.value, max(effect.sd, 1e-6), goal, len(c.ideas))
    return max(c.count(idea) + 1, expected)


def progress(c: Comparison) -> str:
    """The idea with the fewest pairs of those that are still undecided, and what is left of everything, the runs
    for the slope included."""
    waiting = undecided(c)
    expected = [pairs_expected(c, idea) for idea in waiting]
    left = f"{duration(60 * c.pool.minutes())} so far"
    if None not in expected:
        wanted = [*zip(waiting, expected), (c.base, max(expected, default=0))]
        wanted += [(variant, len(seeds)) for variant, seeds in slope_runs(c)]
        runs = sum(max(0, n - len(c.seeds(variant))) for variant, n in wanted)
        left = f"{c.pool.time_left(runs)}: {plural(runs, 'run')}"
    if not waiting:
        return f"what a step is worth, {left}"
    idea = min(waiting, key=c.count)
    effect = c.effect(idea)
    loss = f"loss {effect.difference.value:+.4f}, " if effect else ""
    about = pairs_expected(c, idea)
    of = f" of about {about}" if about else ""
    return f"{short(idea.name, 14)}: {c.count(idea)}{of} pairs, {loss}{left}"
