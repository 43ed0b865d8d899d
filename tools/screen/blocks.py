"""
The definition of a screen (a TOML file), its 32 configurations, and its finished blocks (JSON files).

A definition has these keys. All but `factor` may be left out:

    commit = "f8091ed"            the git commit of the files; default: the working tree
    script = "train_gpt.py"       the script to train with; default: train_gpt.py
    switches = "switches.patch"   a patch of that commit, which adds options to the script
    options = "--track mini"      options of all runs
    seed = 1000                   the seed of the first block
    until = "1%"                  the gain in steps that matters
    [[factor]]                    5 to 16 of these
    name = "muon_lr"
    low = "--muon_lr 0.04"        options of the low side
    high = "--muon_lr 0.06"       options of the high side
    patch = "idea.patch"          a patch instead of options: off is low, on is high

A factor without `low` is a switch, which is off (the default) or on. If it has both `high` and `patch`,
`high` is the option that turns it on, and `patch` only says which idea it is.
"""

import argparse
import hashlib
import json
import math
import shlex
import tomllib
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from tools.common import UsageError, fraction, write_file
from tools.compare import sources as compare_sources
from tools.compare.sources import (
    Variant,
    changed,
    check_settings,
    check_validation,
    copy_commit,
    copy_tree,
    with_steps,
)
from tools.compare.stats import SLOPE_FACTOR
from tools.screen.design import CONFIGURATIONS, FEWEST_FACTORS, MOST_FACTORS, make_design


@dataclass
class Factor:
    name: str
    low: str = ""  # options
    high: str = ""  # options
    patch: str = ""

    @property
    def is_switch(self) -> bool:
        """Off or on, instead of two values of a setting."""
        return not self.low


@dataclass
class Definition:
    commit: str = ""
    script: str = "train_gpt.py"
    switches: str = ""
    options: str = ""  # a list once it is read
    seed: int = 0
    until: str = "1%"  # a fraction once it is read
    factor: list[Factor] = field(default_factory=list)


@dataclass
class Screen:
    folder: Path  # of the definition and the blocks
    seed: int
    until: float
    factors: list[Factor]
    base: Variant
    configurations: list[Variant]
    fewer: Variant  # the base with fewer steps
    more: Variant

    @property
    def name(self) -> str:
        return self.folder.name

    def variants(self) -> list[Variant]:
        """The parts of a block. A configuration that is also `fewer` or `more` comes twice."""
        return [*self.configurations, self.fewer, self.more]

    def digest(self) -> str:
        """Equal for screens with the same losses on the same machine."""
        text = " ".join(variant.digest() for variant in self.variants())
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Block:
    """One seed in all configurations."""

    seed: int
    losses: list[float]  # final, of the configurations
    fewer: float  # final loss of the base with fewer steps
    more: float
    factors: list[dict]
    digest: str  # of the screen
    dtype: str  # of the activations
    torch: str
    compiled: bool
    machine: str
    threads: int
    compiler: str
    world: str = ""  # a hash of the data, the packages and the environment

    def group(self) -> tuple[str, str, str, str, bool]:
        """Blocks with another group can't be fitted together."""
        return self.digest, self.dtype, self.torch, self.world, self.compiled


def from_file(kind: type, values: dict):
    """An object of a dataclass. Raises TypeError if a value has another type, or no field."""
    made = kind(**values)
    for field in fields(kind):
        wanted = typing.get_origin(field.type) or field.type
        if not isinstance(getattr(made, field.name), wanted):
            raise TypeError(f"{field.name} must be of type {wanted.__name__}")
    return made


# -----------------------------------------------------------------------------
# Definition


def check_factors(factors: list[Factor]) -> None:
    """Raises UsageError. A factor may change an option of all runs, but not one of another factor."""
    if not FEWEST_FACTORS <= len(factors) <= MOST_FACTORS:
        raise UsageError(
            f"{len(factors)} factors; a screen has {FEWEST_FACTORS} to {MOST_FACTORS} of them (for fewer, use "
            "compare)"
        )
    owners = {}
    names = [factor.name for factor in factors]
    for factor in factors:
        if names.count(factor.name) > 1:
            raise UsageError(f"several factors are called {factor.name}; give each its own name")
        for word in shlex.split(f"{factor.low} {factor.high}"):
            option = word.split("=")[0]
            if option.startswith("--") and owners.setdefault(option, factor.name) != factor.name:
                raise UsageError(
                    f"{option} is set by {owners[option]} and by {factor.name}; remove it from one of them"
                )


def read_definition(path: Path) -> Definition:
    """Raises UsageError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        definition = from_file(Definition, table)
        definition.factor = [from_file(Factor, factor) for factor in definition.factor]
        definition.until = fraction(definition.until)
        definition.options = shlex.split(definition.options)
        check_factors(definition.factor)
    except (OSError, ValueError, TypeError, argparse.ArgumentTypeError, UsageError) as e:
        raise UsageError(f"{path}: {e}") from None
    return definition


# -----------------------------------------------------------------------------
# Configurations


def apply_patches(base: Variant, files: list[str], where: str) -> Path:
    """The base's folder with these patches. Raises UsageError."""
    try:
        return changed(base.folder, base.script, [compare_sources.ROOT / file for file in files])
    except (OSError, UsageError) as e:
        hint = ""
        if len(files) > 1:
            hint = "; combine the patches by hand in one that adds a switch for each"
        raise UsageError(f"{where}: {', '.join(files)}: {e}{hint}") from None


def make_variant(name: str, base: Variant, sides: list[tuple[Factor, int]]) -> Variant:
    """The base with each of these factors at its low (-1) or high (+1) side. Raises UsageError."""
    options = list(base.options)
    patches = []
    for factor, side in sides:
        options += shlex.split(factor.high if side > 0 else factor.low)
        if side > 0 and factor.patch and not factor.high:  # otherwise `high` turns the idea on
            patches.append(factor.patch)
    return replace(base, name=name, folder=apply_patches(base, patches, name), options=options)


def make_sides(base: Variant, factors: list[Factor]) -> list[tuple[Variant, Variant]]:
    """Low and high of each factor alone. Raises UsageError."""
    sides = []
    for factor in factors:
        low = make_variant(f"{factor.name}, low", base, [(factor, -1)])
        high = make_variant(f"{factor.name}, high", base, [(factor, 1)])
        sides.append((low, high))
    return sides


def make_configurations(base: Variant, factors: list[Factor]) -> list[Variant]:
    """Raises UsageError."""
    configurations = []
    for number, row in enumerate(make_design(len(factors))):
        high = ", ".join(factor.name for factor, side in zip(factors, row) if side > 0)
        name = f"configuration {number} (high: {high or 'none'})"
        configurations.append(make_variant(name, base, list(zip(factors, row))))
    return configurations


def read_base(definition: Definition, scratch: Path) -> Variant:
    """The script of the commit or of the working tree, with the patch `switches`. Raises UsageError."""
    folder = copy_commit(definition.commit, scratch) if definition.commit else copy_tree(scratch)
    base = Variant("the base", folder, definition.script, definition.options)
    if definition.switches:
        base.folder = apply_patches(base, [definition.switches], "switches")
    return base


def read_screen(path: Path, scratch: Path) -> Screen:
    """Reads a definition, and lets the script check all options. Raises UsageError.

    The variants' files are put into folders below `scratch`."""
    definition = read_definition(path)
    factors = definition.factor
    base = read_base(definition, scratch)
    pairs = make_sides(base, factors)
    sides = [variant for pair in pairs for variant in pair]
    configurations = make_configurations(base, factors)
    check_settings([base, *sides, *configurations], 1)
    for factor, (low, high) in zip(factors, pairs):
        if low.digest() == high.digest():
            raise UsageError(f"{path}: {factor.name}: both sides have the same source and settings")
    check_validation(base, sides)
    return Screen(
        folder=path.resolve().parent,
        seed=definition.seed,
        until=definition.until,
        factors=factors,
        base=base,
        configurations=configurations,
        fewer=with_steps(base, 1 / SLOPE_FACTOR, configurations),
        more=with_steps(base, SLOPE_FACTOR, configurations),
    )


# -----------------------------------------------------------------------------
# Finished blocks


def write_block(screen: Screen, block: Block) -> None:
    """Raises FileError."""
    group = hashlib.sha256(json.dumps(block.group()).encode()).hexdigest()[:8]
    file = screen.folder / f"seed{block.seed}_{group}.json"
    write_file(file, (json.dumps(asdict(block), indent=1) + "\n").encode())


def read_block(path: Path) -> Block:
    """Raises UsageError."""
    try:
        block = from_file(Block, json.loads(path.read_bytes()))
        if len(block.losses) != CONFIGURATIONS or not math.isfinite(sum(block.losses)):
            raise ValueError("it doesn't have 32 losses")
    except (ValueError, TypeError) as e:
        raise UsageError(
            f"{path}: no whole block ({e}); move it to another folder, and make it again with --blocks"
        ) from None
    return block


def read_blocks(screen: Screen) -> list[Block]:
    """The finished blocks of a screen, sorted by seed. Raises UsageError."""
    blocks = {path: read_block(path) for path in screen.folder.glob("seed*.json")}
    earlier = {}
    for path, block in blocks.items():
        other = earlier.setdefault((block.seed, block.group()), path)
        if other != path:
            raise UsageError(f"{path} is the same block as {other}; move one to another folder")
    return sorted(blocks.values(), key=lambda block: block.seed)


def belongs(screen: Screen, block: Block) -> bool:
    """Whether a block measures the factors of this screen. Either its runs are those of the screen (the
    factors may have got other names since), or its factors are the same, perhaps in another source."""
    factors = [asdict(factor) for factor in screen.factors]
    return block.digest == screen.digest() or block.factors == factors
