"""
What screen.py knows so far, and what it runs next: blocks, each of them one seed in all combinations.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from judge.runs.make import Pool, rounds, runs_a_process
from judge.runs.variants import Variant
from judge.screen.design import Design, PartEffect, find_part_effect
from judge.screen.parts import Group, Part, Works, choose_design, combine, members


@dataclass
class Screen:
    """What is screened, and the runs so far."""

    pool: Pool
    base: Variant
    parts: list[Part]
    groups: list[Group]
    seed: int  # the first one
    until: float  # the loss below which a part is a barnacle
    blocks: int  # at most
    trial: str  # options of a short run
    design: Design | None = None
    variants: list[Variant] = field(default_factory=list)  # in the order of the design's rows

    def choose(self, works: Works) -> None:
        """Combinations of the groups that work."""
        self.groups, self.design = choose_design(self.groups, works)
        chosen = [members(self.groups, row) for row in self.design.rows]
        self.variants = [combine(self.base, self.parts, some) for some in chosen]

    def losses(self) -> np.ndarray:
        """Of the blocks that are whole, from the first seed on. Shape (blocks, combinations)."""
        runs = [variant.runs for variant in self.variants]
        seeds = itertools.count(self.seed)
        whole = itertools.takewhile(lambda seed: all(seed in logs for logs in runs), seeds)
        losses = [[logs[seed].end.val_loss for logs in runs] for seed in whole]
        return np.array(losses).reshape(-1, len(runs))

    def find(self, names: list[str], contrasts: Sequence[np.ndarray]) -> list[PartEffect]:
        """The effects with these contrasts, the most needed one first."""
        losses = self.losses()
        found = []
        for name, contrast in zip(names, contrasts):
            found.append(find_part_effect(name, losses, contrast, self.until, len(names)))
        return sorted(found, key=lambda effect: -effect.without.value)

    def names(self) -> list[str]:
        """Of the groups."""
        return [" + ".join(self.parts[i].name for i in group) for group in self.groups]

    def effects(self) -> list[PartEffect]:
        return self.find(self.names(), self.design.contrasts)

    def interactions(self) -> list[PartEffect]:
        """Of the pairs that clearly act together."""
        names = self.names()
        groups = self.design.groups
        pairs = [[f"{names[i]} x {names[j]}" for i, j in group.pairs] for group in groups]
        found = self.find(list(map(" or ".join, pairs)), [group.contrast for group in groups])
        return [effect for effect in found if effect.without.low * effect.without.high > 0]

    def undecided(self) -> int:
        """How many parts."""
        return sum(effect.verdict == "undecided" for effect in self.effects())


def wanted_blocks(s: Screen) -> list[tuple[Variant, range]]:
    """Runs of all combinations, until each part is decided."""
    done = len(s.losses())
    if done >= s.blocks or not s.undecided():
        return []
    ahead = rounds(s.pool, s.variants) * runs_a_process(s.base)
    blocks = min(done + ahead, s.blocks)
    seeds = range(s.seed, s.seed + blocks)
    return [(variant, seeds) for variant in s.variants]
