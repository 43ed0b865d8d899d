"""
What is compared: a command in a copy of a folder, with its options. It is read from options, an idea's folder,
a patch, a script, a folder, a revision or the working tree, and checked before anything runs.

An idea's folder has idea.patch; idea.json, in words, is for people.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from judge.runs.copies import changed, copy_commit, copy_tree, link_data
from judge.runs.same_run import hash_copy, hash_text, run_environment
from judge.logs.read import Log
from judge.commands import UserError
from judge.processes import output_of
from judge.settings import Settings

# Settings that don't change the final loss
NO_EFFECT_ON_LOSS = ("seed", "val_loss_every", "target_val_loss", "save_checkpoint")
# Settings that the final loss is measured with
VALIDATION = ("track", "val_files", "val_tokens", "val_seq_len")
# A script whose source has this word prints its settings when it gets this option, and ends
PRINTS = "print_settings"
ENDS = r"\s'\";&|"  # what stands between the words of a command


def unknown(kind: type):
    """A field that isn't copied."""
    return field(default_factory=kind, init=False)


@dataclass
class Variant:
    """The base, an idea, or the base with another number of steps."""

    name: str
    folder: Path  # a copy of the files of origin, in which the command runs
    command: str  # of the shell
    options: list[str]
    project: Settings
    origin: Path
    leave_out: Sequence[Path] = ()  # see copy_tree
    settings: dict = field(default_factory=dict)  # those that the script prints; {} if it doesn't
    # What is known of it
    identity: dict = unknown(dict)  # all that its runs could read in their copy
    read: dict = unknown(dict)  # hashes of what they read elsewhere
    place: Path | None = unknown(type(None))  # where its runs are kept
    runs: dict[int, Log] = unknown(dict)  # those that are there, by seed
    edited: dict[str, str] = unknown(dict)  # see check_edit
    before: list[int] = unknown(list)  # seeds of its other tests
    new: set[int] = unknown(set)  # seeds of the runs of this session
    log_ratios: list[float] = unknown(list)  # of step times; see step_times.py

    def key(self) -> str:
        return hash_text(json.dumps(self.identity, sort_keys=True))

    def files(self) -> dict[str, str]:
        """Hashes of those in the copy."""
        return hash_copy(self.folder, self.project.not_read)

    def script(self) -> str:
        """The Python script of the command, as a path in the folder; "" if there is none."""
        words = re.split(f"[{ENDS}]+", self.command)
        for before, word in zip(["", *words], words):
            path = f"{word.replace('.', '/')}.py" if before == "-m" else word
            if path.endswith(".py") and (self.folder / path).is_file():
                return path
        return ""

    def run(self) -> dict:
        """What runs in the copy. Options that give the same settings make the same run."""
        if not self.settings:
            return {"what": self.command, "settings": self.options}
        settings = {k: v for k, v in self.settings.items() if k not in NO_EFFECT_ON_LOSS}
        return {"what": self.command, "settings": settings}

    def name_of_steps(self) -> str:
        """Among the settings."""
        return self.project.steps_option.strip("-=").replace("-", "_")

    def given_steps(self) -> list[tuple[str, str, str]]:
        """The options that set the number of steps, as they are spelled, with " " or "=", and numbers."""
        option = re.sub(r"(\\-|_)+", "[_-]+", re.escape(self.project.steps_option.rstrip("=")))
        command = fill_in(self.command, self.options, 0)
        return re.findall(rf"({option})([ =])(\d+)\b", command)

    def num_iterations(self) -> int | None:
        """None if it isn't known, or can't be set."""
        if self.name_of_steps() in self.settings:
            return self.settings[self.name_of_steps()]
        if "{options}" not in self.command:
            return None
        given = self.given_steps()
        return int(given[-1][2]) if given else None


# -----------------------------------------------------------------------------
# Sources


def scratch_of(base: Variant, origin: Path) -> Path:
    """Where copies of this folder lie."""
    return base.project.working() / hash_text(str(origin))


def copy_folder(source: Path, base: Variant) -> Variant:
    """A copy of any folder of a git repository. Raises UserError and OSError."""
    folder = scratch_of(base, source) / "worktree"
    if not folder.exists():
        copy_tree(folder, source, base.leave_out)
    if not folder.is_dir():
        raise UserError(f"git knows no file in {source}; it may ignore this folder")
    return replace(base, folder=folder, origin=source)


def script_of(base: Variant) -> str:
    """Raises UserError if there is none."""
    script = base.script()
    if not script:
        raise UserError("the command names no script that another one could take the place of")
    return script


def with_script(base: Variant, path: str) -> Variant:
    """The base with another script of its folder, by its path or by its module's name."""
    if not (base.folder / path).is_file():
        raise UserError(f"there is no file {path}")
    names = [script_of(base), path]
    for old, new in [names, [name[:-3].replace("/", ".") for name in names]]:
        word = rf"(?<![^{ENDS}]){re.escape(old)}(?![^{ENDS}])"
        command, found = re.subn(word, lambda _: new, base.command)
        if found:
            break
    return replace(base, command=command)


def read_script(file: Path, base: Variant) -> Variant:
    """The base with a script of its own folder, or one from elsewhere in the place of its script."""
    path = file.resolve()
    if path.is_relative_to(base.origin) and (base.folder / path.relative_to(base.origin)).is_file():
        return with_script(base, str(path.relative_to(base.origin)))
    return replace(base, folder=changed(base.folder, script_of(base), [file]))


def read_source(kind: str, base: Variant) -> Variant:
    """What a patch, a script, a folder, FOLDER@REVISION, REVISION or REVISION:SCRIPT makes of the base. "."
    is its working tree. Revisions are those of its repository.

    Raises UserError and OSError.
    """
    file = Path(kind)
    if kind == ".":
        return copy_folder(base.origin, base)
    if file.suffix == ".py" and file.is_file():
        return read_script(file, base)
    if file.suffix in (".py", ".patch", ".diff") and ":" not in kind:
        return replace(base, folder=changed(base.folder, "", [file]))
    if file.is_dir():
        return copy_folder(file.resolve(), base)
    origin = base.origin
    path, at, revision = kind.partition("@")
    if at and Path(path).is_dir():
        origin = Path(path).resolve()
    else:
        revision = kind
    revision, _, script = revision.partition(":")
    folder = copy_commit(revision, scratch_of(base, origin), origin)
    found = replace(base, folder=folder, origin=origin)
    return with_script(found, script) if script else found


def default_name(kind: str, options: list[str]) -> str:
    name = "worktree" if kind == "." else kind and Path(kind).resolve().name
    words = [re.sub(r"\.(py|patch|diff)$", "", name)]
    return "_".join(words + [word.lstrip("-") for word in options])


def is_option(word: str) -> bool:
    """Like --lr, or lr=3, but not a file that is called so."""
    return word.startswith("-") or "=" in word and not os.path.exists(word)


def split_source(text: str) -> tuple[str, str, list[str]]:
    """The parts of [NAME=][KIND] [OPTIONS]. NAME=WORD is an option if there is no file, folder or revision WORD.
    Raises UserError."""
    named = re.fullmatch(r"(\w[\w.+-]*)=(.*)", text, re.DOTALL)
    name, what = named.groups() if named else ("", text)
    try:
        words = shlex.split(what)
        if name and words and not words[0].startswith("--") and not is_there(words[0]):
            name, words = "", shlex.split(text)
    except ValueError as e:  # quotes that don't close
        raise UserError(f"{text}: {e}") from None
    if not words:
        return name, ".", []
    if is_option(words[0]):
        return name, "", words
    return name, words[0], words[1:]


def is_there(kind: str) -> bool:
    """Whether a word is a source, and not the value of an option."""
    if Path(kind).suffix in (".patch", ".diff", ".py") or os.path.exists(kind.partition("@")[0]):
        return True
    return bool(
        output_of("git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{kind}^{{commit}}")
    )


def first_variant(texts: list[str], project: Settings) -> Variant:
    """Where read_variant begins: the working tree without the files that these sources name. Raises
    UserError."""
    named = [Path(split_source(text)[1]) for text in texts]
    leave_out = [path.resolve() for path in named if path.is_file()]
    if "{seed}" not in project.command and not project.no_seed:
        raise UserError(
            "write {seed} where the command sets its seed, or give --no_seed: then all runs may start from the "
            "same weights, and the answer may be about these"
        )
    root = project.root
    return copy_folder(root, Variant("worktree", root, project.command, [], project, root, leave_out))


def start_of(texts: list[str]) -> Path:
    """The folder of the first source that names one, or else this one. Raises UserError."""
    for text in texts:
        path = Path(split_source(text)[1].partition("@")[0])
        if path.is_dir() and not (path / "idea.patch").is_file():
            return path
    return Path.cwd()


def read_variant(text: str, base: Variant, common: list[str]) -> Variant:
    """Reads [NAME=][KIND] [OPTIONS]. `common` are options of all variants. Raises UserError and OSError."""
    name, kind, options = split_source(text)
    usual_name = default_name(kind, options)
    if kind and Path(kind, "idea.patch").is_file():
        kind = os.path.join(kind, "idea.patch")
    if not kind or Path(kind).suffix in (".patch", ".diff"):  # it changes the base
        common = base.options or common
    try:
        if kind:
            base = read_source(kind, base)
    except UserError as e:
        raise UserError(f"{text}: {e}") from None
    options = common + options
    check_options(base.command, options)
    name = re.sub(r"[^\w.+-]+", "_", name or usual_name).strip("_.")
    return replace(base, name=name[:60] or "idea", options=options, settings={})


# -----------------------------------------------------------------------------
# Checks


def ask_settings(variant: Variant) -> dict:
    """Those that its script prints. Raises UserError with what the script says is wrong."""
    command = fill_in(variant.command, [*variant.options, f"--{PRINTS}"], 0)
    env = run_environment(variant.project.root)
    how = dict(cwd=variant.folder, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    done = subprocess.run(["bash", "-c", command], text=True, errors="replace", **how)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        line = (done.stderr.splitlines() or ["the script doesn't run"])[-1]
        raise UserError(f"{variant.name}: {line.removeprefix('error: ')}") from None


def check_settings(variants: list[Variant], again: bool = False) -> None:
    """Lets scripts that can print their settings check their options and their data. Fills in the settings.
    Raises UserError. Others can't be asked: their runs show whether they know the options."""
    asked = []
    for variant in variants:
        script = variant.folder / variant.script()
        if script.is_file() and PRINTS in script.read_text("utf-8", "replace"):
            if again or not variant.settings:
                link_data(variant.folder, variant.origin, variant.project.data)
                asked.append(variant)
    with ThreadPoolExecutor() as threads:
        for variant, settings in zip(asked, threads.map(ask_settings, asked)):
            variant.settings = settings


def check_validation(base: Variant, others: list[Variant]) -> None:
    """Raises UserError if a variant measures its loss in another way than the base."""
    for variant, option in itertools.product(others, VALIDATION):
        expected, value = [side.settings.get(option) for side in (base, variant)]
        if value != expected and base.settings and variant.settings:
            raise UserError(
                f"{variant.name}: --{option} is {value}, but {expected} in the base; losses can only "
                "be compared on the same validation tokens and sequence length, so give both the same"
            )


def tell_apart(variants: list[Variant]) -> None:
    """Makes names unique. Raises UserError if two variants are equal."""
    earlier = {}
    names = set()
    for variant in variants:
        key = json.dumps([variant.files(), variant.run()], sort_keys=True)
        other = earlier.setdefault(key, variant)
        if other is not variant:
            raise UserError(
                f"{variant.name} has the same source and settings as {other.name}, so there is "
                "nothing to compare; edit the script, or pass an --idea that changes the training"
            )
        while variant.name in names:
            variant.name += "_2"
        names.add(variant.name)


def fill_in(command: str, options: list[str], seed: int, runs: int = 1, slot: int = 0) -> str:
    """The command with its options, its seed, how many runs it makes, and the slot in which it runs."""
    text = command.replace("{options}", shlex.join(options)).replace("{seed}", str(seed))
    return text.replace("{runs}", str(runs)).replace("{slot}", str(slot))


def check_options(command: str, options: list[str]) -> None:
    """Raises UserError if a command has no place for them."""
    if options and "{options}" not in command:
        raise UserError(f"write {{options}} where {shlex.join(options)} must stand in the command")
    if shlex.join(options) != " ".join(options) and "{options}" not in shlex.split(command):
        raise UserError(
            f"write {{options}} outside of quotes: the shell would split {shlex.join(options)}"
        )


def set_steps(variant: Variant, steps: int) -> Variant:
    """The variant with this number of steps."""
    option = variant.project.steps_option
    unspelled = (option.rstrip("="), "=" if option.endswith("=") else " ", "")
    spelled, between, _ = [unspelled, *variant.given_steps()][-1]
    words = [f"{spelled}={steps}"] if between == "=" else [spelled, str(steps)]
    settings = {**variant.settings, variant.name_of_steps(): steps} if variant.settings else {}
    name = f"{variant.name} with {steps} steps"
    return replace(variant, name=name, options=[*variant.options, *words], settings=settings)


def with_steps(base: Variant, factor: float, others: list[Variant]) -> Variant:
    """The base with another number of steps. If one of the others is the same, returns that one, so
    that both have the same runs. Raises UserError if the number of steps isn't possible."""
    steps = base.num_iterations()
    if round(steps * factor) in (0, steps):
        raise UserError(
            f"{base.name}: compare also trains the base with more and with fewer steps; give "
            f"{base.project.steps_option} 10 or more"
        )
    variant = set_steps(base, round(steps * factor))
    if variant.num_iterations() == steps:
        raise UserError(f"write {{options}} behind {base.project.steps_option} in the command")
    for other in others:
        if (other.folder, other.run()) == (variant.folder, variant.run()):
            return other
    return variant
