"""
The definition of a screen (a TOML file), its 32 configurations, and its finished blocks (JSON files).

A definition has these keys. All but `factor` may be left out:

    commit = "f8091ed"            the git commit of the files; default: the working tree
    script = "train_gpt.py"       the script to train with; default: train_gpt.py
    switches = "switches.patch"   a patch that adds options to the script
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

import hashlib
import json
import shlex
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.compare import sources as compare_sources
from tools.compare.sources import (
    OURS,
    Variant,
    changed,
    check_settings,
    check_validation,
    copy_commit,
    copy_tree,
    with_steps,
)
from tools.compare.stats import SLOPE_FACTOR
from tools.common import UsageError, write_file
from tools.screen.design import CONFIGURATIONS, FEWEST_FACTORS, MOST_FACTORS, make_design

KEYS = {
    "commit": str,
    "script": str,
    "switches": str,
    "options": str,
    "seed": int,
    "until": str,
    "factor": list,
}
FACTOR_KEYS = {"name": str, "low": str, "high": str, "patch": str}
TYPE_NAMES = {str: "a text in quotes", int: "a whole number", list: "a list of [[factor]] tables"}


@dataclass
class Factor:
    name: str
    low: str = ""   # options
    high: str = ""  # options
    patch: str = ""

    @property
    def is_switch(self) -> bool:
        """Off or on, instead of two values of a setting."""
        return not self.low

    @property
    def patches_source(self) -> bool:
        """Otherwise `high` turns the idea on."""
        return bool(self.patch) and not self.high


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
    fewer: float         # final loss of the base with fewer steps
    more: float
    factors: list[dict]
    digest: str  # of the screen
    dtype: str   # of the activations
    torch: str
    compiled: bool
    machine: str
    threads: int
    compiler: str

    def group(self) -> tuple[str, str, str, bool]:
        """Blocks with another group can't be fitted together."""
        return self.digest, self.dtype, self.torch, self.compiled


# -----------------------------------------------------------------------------
# Definition


def read_keys(table: dict, known: dict, where: str) -> dict:
    """Raises UsageError for a key that isn't known, or whose value has another type."""
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {key}; the keys are {', '.join(known)}")
        if type(value) is not known[key]:
            raise UsageError(f"{where}: {key} must be {TYPE_NAMES[known[key]]}")
    return table


def split_options(text: str, where: str) -> list[str]:
    """Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise UsageError(f"{where}: {text}: {e}") from None
    for word in words:
        if word.split("=")[0] in OURS:
            raise UsageError(f"{where}: {word}: screen sets this option for each run; remove it")
    return words


def option_names(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--")}


def read_factor(table, where: str) -> Factor:
    """Raises UsageError."""
    if not isinstance(table, dict) or not table.get("name"):
        raise UsageError(f"{where}: each [[factor]] needs a name")
    factor = Factor(**read_keys(table, FACTOR_KEYS, f"{where}: {table['name']}"))
    if not factor.high and not factor.patch:
        raise UsageError(f"{where}: {factor.name}: set high = \"OPTIONS\" or patch = \"FILE\"")
    if factor.low and not factor.high:
        raise UsageError(f"{where}: {factor.name}: low is set, but high is not; set both")
    return factor


def check_factors(factors: list[Factor], where: str) -> None:
    """Raises UsageError. A factor may change an option of all runs, but not one of another factor."""
    if not FEWEST_FACTORS <= len(factors) <= MOST_FACTORS:
        raise UsageError(
            f"{where}: {len(factors)} factors; a screen has {FEWEST_FACTORS} to {MOST_FACTORS} of them "
            "(for fewer, use compare)"
        )
    owners = {}
    names = set()
    for factor in factors:
        if factor.name in names:
            raise UsageError(f"{where}: there are two factors {factor.name}; rename one")
        names.add(factor.name)
        words = split_options(factor.low, where) + split_options(factor.high, where)
        for option in option_names(words):
            if option in owners:
                raise UsageError(f"{where}: {option} is set by {owners[option]} and by {factor.name}; remove it "
                    "from one of them")
        owners.update({option: factor.name for option in option_names(words)})


def read_definition(path: Path) -> dict:
    """Returns the keys of a definition, checked. Raises UsageError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror.lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: {e}") from None
    read_keys(table, KEYS, str(path))
    table["factor"] = [read_factor(factor, str(path)) for factor in table.get("factor", [])]
    table["options"] = split_options(table.get("options", ""), str(path))
    check_factors(table["factor"], str(path))
    return table


def read_percent(text: str) -> float:
    """ "1%" as 0.01. Raises UsageError."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = 0.0
    if not 0 < value <= 0.5:
        raise UsageError(f"{text}: must be a percentage of at most 50%, like 1%")
    return value


# -----------------------------------------------------------------------------
# Configurations


def apply_patches(base: Variant, files: list[str], where: str) -> Path:
    """The base's folder with these patches. Raises UsageError."""
    try:
        return changed(base.folder, base.script, [compare_sources.ROOT / file for file in files])
    except UsageError as e:
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
        if side > 0 and factor.patches_source:
            patches.append(factor.patch)
    return replace(base, name=name, folder=apply_patches(base, patches, name), options=options)


def check_sides(factors: list[Factor], sides: list[Variant]) -> None:
    """Raises UsageError if both sides of a factor are equal. `sides` has low and high of each factor."""
    for factor, low, high in zip(factors, sides[::2], sides[1::2]):
        if low.digest() == high.digest():
            if factor.patches_source:
                raise UsageError(f"{factor.name}: {factor.patch} changes nothing; remove the factor")
            low_name = "low" if factor.low else "the default"
            raise UsageError(f"{factor.name}: {low_name} and high have the same settings; change one")


def read_base(table: dict, scratch: Path) -> Variant:
    """The script of the commit or of the working tree, with the patch `switches`. Raises UsageError."""
    if "commit" in table:
        folder = copy_commit(table["commit"], scratch)
    else:
        folder = copy_tree(scratch)
    base = Variant("the base", folder, table.get("script", "train_gpt.py"), table["options"])
    if "switches" in table:
        base.folder = apply_patches(base, [table["switches"]], "switches")
    return base


def read_screen(path: Path, scratch: Path) -> Screen:
    """Reads a definition, and lets the script check all options. Raises UsageError.

    The variants' files are put into folders below `scratch`."""
    table = read_definition(path)
    factors = table["factor"]
    for file in [factor.patch for factor in factors] + [table.get("switches", "")]:
        if file and not (compare_sources.ROOT / file).is_file():
            raise UsageError(f"{path}: there is no file {file} in the repository")
    try:
        base = read_base(table, scratch)
    except UsageError as e:
        hint = "" if "commit" in table else '; if it was made for an older commit, set commit = "COMMIT"'
        raise UsageError(f"{path}: {e}{hint}") from None
    sides = []
    for factor in factors:
        for word, side in (("low", -1), ("high", 1)):
            sides.append(make_variant(f"{factor.name}, {word}", base, [(factor, side)]))
    configurations = []
    for number, row in enumerate(make_design(len(factors))):
        high = ", ".join(factor.name for factor, side in zip(factors, row) if side > 0)
        name = f"configuration {number} (high: {high or 'none'})"
        configurations.append(make_variant(name, base, list(zip(factors, row))))
    check_settings([base, *sides, *configurations], 1)
    check_sides(factors, sides)
    check_validation(base, sides)
    return Screen(
        folder=path.resolve().parent,
        seed=table.get("seed", 0),
        until=read_percent(table.get("until", "1%")),
        factors=factors,
        base=base,
        configurations=configurations,
        fewer=with_steps(base, 1 / SLOPE_FACTOR, configurations),
        more=with_steps(base, SLOPE_FACTOR, configurations),
    )


# -----------------------------------------------------------------------------
# Finished blocks


def block_path(screen: Screen, block: Block) -> Path:
    group = hashlib.sha256(json.dumps(block.group()).encode()).hexdigest()[:8]
    return screen.folder / f"seed{block.seed}_{group}.json"


def write_block(screen: Screen, block: Block) -> None:
    """Raises FileError."""
    write_file(block_path(screen, block), (json.dumps(asdict(block), indent=1) + "\n").encode())


def read_block(path: Path) -> Block:
    """Raises UsageError."""
    try:
        block = Block(**json.loads(path.read_text(encoding="utf-8")))
        whole = len(block.losses) == CONFIGURATIONS
        whole = whole and all(type(x) is float for x in [*block.losses, block.fewer, block.more])
    except (OSError, ValueError, TypeError):
        whole = False
    if not whole:
        raise UsageError(
            f"{path}: this block is damaged; delete the file, and make the block again with --blocks"
        )
    return block


def read_blocks(screen: Screen) -> list[Block]:
    """The finished blocks of a screen, sorted by seed. Raises UsageError."""
    blocks = [read_block(path) for path in screen.folder.glob("seed*.json")]
    return sorted(blocks, key=lambda block: block.seed)


def belongs(screen: Screen, block: Block) -> bool:
    """Whether a block measures the factors of this screen. Either its runs are those of the screen (the
    factors may have got other names since), or its factors are the same, perhaps in another source."""
    if block.digest == screen.digest():
        return True
    return block.factors == [asdict(factor) for factor in screen.factors]
