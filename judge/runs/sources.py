"""
What compare.py compares: a script with its options. It is read from options, an idea's folder, a
patch, a file, a revision or the working tree, and checked before anything runs. With --command, it is
a command in a folder of any git repository.

A script runs in a copy of the repository's files, so that no later edit changes a run. Copies lie in
one scratch folder. An idea's folder has idea.patch; idea.json, in words, is for people.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from judge.runs.same_run import hash_copy, hash_text, run_environment
from judge.logs.read import Log
from judge.commands import UserError
from judge.project import ROOT
from judge.files import without_windows

# Options that compare.py gives to the runs itself
OURS = ("--seed", "--log_dir", "--num_runs", "--resume")
# Settings that don't change the final loss
NO_EFFECT_ON_LOSS = ("seed", "val_loss_every", "target_val_loss", "save_checkpoint")
# Of files that git doesn't know, those with these endings aren't copied
NO_SOURCES = (".diff", ".log", ".out", ".patch", ".png", ".tsv", ".txt")
# Settings that the final loss is measured with
VALIDATION = ("track", "val_files", "val_tokens", "val_seq_len")
# A script with these functions can be asked for its settings
CHECKS = (b"\ndef parse_arguments(", b"\ndef check_hyperparameters(")
# Prints the settings for each list of options, or what is wrong with them or with their data
ASK = """
import dataclasses, importlib, json, sys
name, processes, check_data, *lists = sys.argv[1:]
script = importlib.import_module(name)
for options in map(json.loads, lists):
    try:
        args, hp = script.parse_arguments(options)
        script.check_hyperparameters(hp, int(processes))
        if check_data == "True" and hasattr(script, "check_inputs"):
            script.check_inputs(args, hp)
        answer = dataclasses.asdict(hp)
        answer["device"] = script.DEVICE.type if hasattr(script, "DEVICE") else args.device
    except (Exception, SystemExit) as e:
        answer = (str(e) or type(e).__name__).splitlines()[0]
    print(json.dumps(answer))
"""


@dataclass
class Variant:
    """The base, an idea, or the base with another number of steps."""

    name: str
    folder: Path  # a copy of the repository's files, in which the script runs
    script: str  # its name in the folder
    options: list[str]
    settings: dict = field(default_factory=dict)  # the hyperparameters; {} for a command
    command: str = ""  # a shell command that runs instead of the script
    origin: Path = field(default_factory=lambda: ROOT)  # the folder that was copied
    leave_out: Sequence[Path] = ()  # see copy_tree
    # What is known of it
    identity: dict = field(
        default_factory=dict, init=False
    )  # all that its runs could read in their copy
    read: dict = field(default_factory=dict, init=False)  # hashes of what they read elsewhere
    place: Path | None = field(default=None, init=False)  # where its runs are kept
    runs: dict[int, Log] = field(default_factory=dict, init=False)  # those that are there, by seed
    edited: dict[str, str] = field(
        default_factory=dict, init=False
    )  # files of its last run; see check_edit
    before: list[int] = field(
        default_factory=list, init=False
    )  # seeds of its other tests; see ledger.py
    new: set[int] = field(default_factory=set, init=False)  # seeds of the runs of this session
    log_ratios: list[float] = field(default_factory=list, init=False)  # of step times; see add_times
    timed: list[int] = field(default_factory=list, init=False)  # seeds of pairs; see read_times

    def key(self) -> str:
        return hash_text(json.dumps(self.identity, sort_keys=True))

    def module(self) -> str:
        """The name of the script for python -m, which finds imports in the folder."""
        return self.script.removesuffix(".py").replace("/", ".")

    def source(self) -> bytes:
        return (self.folder / self.script).read_bytes()

    def run(self) -> dict:
        """What runs in the copy. Options that give the same settings make the same run."""
        if self.command:
            return {"what": self.command, "settings": self.options}
        settings = {k: v for k, v in self.settings.items() if k not in NO_EFFECT_ON_LOSS}
        return {"what": self.script, "settings": settings}

    def num_iterations(self) -> int | None:
        """None if it isn't known, or can't be set."""
        if not self.command:
            return self.settings["num_iterations"]
        if "{options}" not in self.command:
            return None
        command = fill_in(self.command, self.options, 0)
        found = re.findall(r"--num[_-]iterations[ =](\d+)", command)
        return int(found[-1]) if found else None


# -----------------------------------------------------------------------------
# Folders


def git(*arguments: str, cwd: Path | None = None, input: bytes = b"", **variables: str) -> bytes:
    """Returns what git prints. Raises UserError with the first line of its error, and OSError."""
    if not shutil.which("git"):
        raise FileNotFoundError("there is no git in PATH, which copies the files; install git")
    command = ["git", *arguments]
    env = run_environment(is_command=True) | variables  # without GIT_DIR, which a hook of git sets
    done = subprocess.run(command, cwd=cwd or ROOT, input=input, capture_output=True, env=env)
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").splitlines() or ["git failed"]
        raise UserError(re.sub("^(error|fatal): ", "", lines[0]))
    return done.stdout


def lines_of_git(*arguments: str, **more) -> list[str]:
    """What git prints with its option -z."""
    return os.fsdecode(git(*arguments, **more)).split("\0")[:-1]


def link_data(copy: Path, data: Path) -> None:
    """Links what the folder `data` has and its copy lacks: data, which git ignores."""
    for entry in data.glob("[!_.]*"):
        link = copy / entry.name
        if entry.is_dir() and link.is_dir() and not link.is_symlink():
            link_data(link, entry)
        elif not link.exists():
            copy.mkdir(exist_ok=True)
            link.symlink_to(entry.resolve())


def mend_links(folder: Path, repository: Path) -> None:
    """Links that lead out of the repository still lead there from its copy."""
    for link in folder.rglob("*"):
        if not link.is_symlink():
            continue
        target = os.path.normpath(link.relative_to(folder).parent / os.readlink(link))
        if target.startswith(".."):
            link.unlink()
            link.symlink_to(os.path.normpath(repository / target))


def check_submodule(path: Path) -> None:
    """Raises UserError."""
    if not (path / ".git").exists():
        raise UserError(f"the submodule {path} isn't checked out; run git submodule update --init")


def not_ours(folder: str, names: list[str]) -> set[str]:
    """What a ZIP of the repository, which has no .git, doesn't contain."""
    folders = {name for name in names if os.path.isdir(os.path.join(folder, name))}
    return folders if folder == str(ROOT / "data") else folders & {".venv", "logs", "__pycache__"}


def comes_and_goes(name: str, path: Path) -> bool:
    """A file that git doesn't know, and no run needs: patches, logs and the like, and answers of --json."""
    if name.split("/")[0] == "logs" or path.suffix in NO_SOURCES:
        return True
    return path.suffix == ".json" and b'\n "until": ' in path.read_bytes()


def copy_files(folder: Path, repository: Path, leave_out: Sequence[Path]) -> None:
    """See copy_tree."""
    if repository == ROOT and not (ROOT / ".git").exists():
        shutil.copytree(ROOT, folder, symlinks=True, ignore=not_ours, dirs_exist_ok=True)
        return
    options = ["-t", "-z", "--cached", "--others", "--exclude-standard"]
    for line in lines_of_git("ls-files", *options, cwd=repository):
        tag, name = line.split(" ", 1)
        path = repository / name
        new = tag == "?"  # git doesn't know it
        if new and (path.resolve() in leave_out or comes_and_goes(name, path)):
            continue
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.is_file():
            shutil.copy(path, copy, follow_symlinks=False)
        elif path.is_dir() and not new:
            check_submodule(path)
            copy_files(copy, path, leave_out)


def copy_tree(scratch: Path, repository: Path, leave_out: Sequence[Path] = ()) -> Path:
    """The working tree's files as they are now, but those that git ignores. Of files that git doesn't
    know, patches, logs and the like aren't copied, nor answers of compare, nor those to leave out: they
    come and go, and no run needs them. Raises UserError."""
    folder = scratch / "worktree"
    copy_files(folder, repository, leave_out)
    mend_links(folder, repository)
    return folder


def checkout(commit: str, folder: Path, repository: Path, index: Path) -> None:
    """Writes all files of a commit, those of its submodules too. `index` is a file for git. Raises
    UserError."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(folder)}
    git("read-tree", commit, cwd=repository, **variables)
    git("checkout-index", "--all", cwd=repository, **variables)
    for line in lines_of_git("ls-tree", "-r", "-z", "--full-tree", commit, cwd=repository):
        kind, name = line.split("\t", 1)
        mode, _, submodule = kind.split()
        if mode == "160000":
            check_submodule(repository / name)
            checkout(submodule, folder / name, repository / name, index)


def copy_commit(revision: str, scratch: Path, repository: Path | None = None) -> Path:
    """The files of a commit. Raises UserError."""
    repository = repository or ROOT
    try:
        name = f"{revision}^{{commit}}"
        commit = git("rev-parse", "--verify", "--end-of-options", name, cwd=repository).decode().strip()
    except UserError as e:
        hint = "in a shallow clone, run git fetch --unshallow"
        raise UserError(f"no file or commit is called {revision} ({e}); {hint}") from None
    above = git("rev-parse", "--show-cdup", cwd=repository).decode().strip()
    root = Path(os.path.normpath(repository / above))
    folder = scratch / commit
    inner = folder / repository.relative_to(root)
    if not folder.exists():
        checkout(commit, folder, root, scratch / "index")
        mend_links(folder, root)
        mend_links(inner, inner)
    return inner


def changed(folder: Path, script: str, files: list[Path]) -> Path:
    """A copy in which patches are applied, and a .py file takes the place of the script. The same
    changes give the same folder. Raises UserError and OSError."""
    if not files:
        return folder
    contents = b"".join(file.read_bytes() for file in files)
    copy = folder.with_name(f"{folder.name}_{hashlib.sha256(contents).hexdigest()[:16]}")
    if copy.exists():
        return copy
    # Hard links are fast. A changed file is a new one, here and in git apply
    shutil.copytree(folder, copy, symlinks=True, copy_function=os.link)
    for file in files:
        if file.suffix == ".py":
            (copy / script).unlink(missing_ok=True)
            shutil.copy(file, copy / script)
            continue
        # Otherwise git finds the repository, and looks for the patch's paths from there
        ceiling = str(copy.parent)
        patch = without_windows(file.read_bytes())
        has_prefix = not re.search(rb"^diff --git (.+) \1$", patch, re.MULTILINE)  # see diff.noprefix
        try:
            git("apply", f"-p{has_prefix:d}", cwd=copy, input=patch, GIT_CEILING_DIRECTORIES=ceiling)
        except UserError as e:
            shutil.rmtree(copy)  # otherwise it would be found as the changed one
            raise UserError(f"{file.name} doesn't apply ({e})") from None
    return copy


# -----------------------------------------------------------------------------
# Folders in which a command runs


def copy_folder(kind: str, base: Variant) -> Variant:
    """A copy of PATH or PATH@REVISION, any folder of a git repository. Raises UserError and OSError."""
    path, at, revision = kind.partition("@")
    if Path(kind).is_dir():
        path = kind
        at = ""
    source = Path(path).resolve()
    if not source.is_dir():
        raise UserError(
            f"there is no folder {path}; with --command, give PATH, PATH@REVISION or options"
        )
    scratch = base.folder.parent / hash_text(str(source))
    if at:
        folder = copy_commit(revision, scratch, source)
    else:
        folder = copy_tree(scratch, source, base.leave_out)
    if not folder.is_dir():
        raise UserError(f"git knows no file in {source}; it may ignore this folder")
    return replace(base, folder=folder, origin=source)


# -----------------------------------------------------------------------------
# Sources


def read_source(kind: str, base: Variant) -> Variant:
    """The base with the folder and the script that a file, a revision, a revision's file (REVISION:PATH)
    or "." names; with --command, the folder that PATH or PATH@REVISION names. Files change the base's
    folder.

    Raises UserError and OSError.
    """
    file = Path(kind)
    script = base.script
    if base.command and file.suffix not in (".patch", ".diff"):
        return copy_folder(kind, base)
    if kind == ".":
        return replace(base, folder=base.folder.with_name("worktree"))
    if file.suffix in (".py", ".patch", ".diff") and (":" not in kind or file.exists()):
        if file.suffix == ".py" and file.resolve().parent == ROOT / "recipes":
            script = f"recipes/{file.name}"
        return replace(base, folder=changed(base.folder, script, [file]), script=script)
    revision, _, path = kind.partition(":")
    folder = copy_commit(revision, base.folder.parent)
    return replace(base, folder=folder, script=path or script)


def default_name(kind: str, options: list[str]) -> str:
    name = "worktree" if kind == "." else kind and Path(kind).resolve().name
    words = [re.sub(r"\.(py|patch|diff)$", "", name)]
    return "_".join(words + [word.lstrip("-") for word in options])


def split_source(text: str) -> tuple[str, str, list[str]]:
    """The parts of [NAME=][KIND] [OPTIONS]. Raises UserError."""
    named = re.fullmatch(r"(\w[\w.+-]*)=(.*)", text, re.DOTALL)
    name, what = named.groups() if named else ("", text)
    try:
        words = shlex.split(what)
    except ValueError as e:  # quotes that don't close
        raise UserError(f"{text}: {e}") from None
    if not words:
        return name, ".", []
    if words[0].startswith("--"):
        return name, "", words
    return name, words[0], words[1:]


def first_variant(texts: list[str], args: argparse.Namespace, scratch: Path) -> Variant:
    """Where read_variant begins: the working tree without the files that these sources name, or a command
    without a folder. Raises UserError."""
    named = [Path(split_source(text)[1]) for text in texts]
    leave_out = [path.resolve() for path in named if path.is_file()]
    if args.command and "{seed}" not in args.command and not args.no_seed:
        raise UserError(
            "write {seed} where --command sets its seed, or give --no_seed: then all runs may start from the "
            "same weights, and the answer may be about these"
        )
    if args.command:
        return Variant("none", scratch / "none", "", [], command=args.command, leave_out=leave_out)
    script = f"recipes/{args.recipe}.py" if args.recipe else "train_gpt.py"
    return Variant("worktree", copy_tree(scratch, ROOT, leave_out), script, [])


def read_variant(text: str, base: Variant, common: list[str]) -> Variant:
    """Reads [NAME=][KIND] [OPTIONS]. `common` are options of all variants. Raises UserError and OSError."""
    name, kind, options = split_source(text)
    usual_name = default_name(kind, options)
    if kind and Path(kind, "idea.patch").is_file():
        kind = os.path.join(kind, "idea.patch")
    if not base.folder.is_dir():
        kind = kind or "."  # options alone, for the base of a command
    if not kind or Path(kind).suffix in (".patch", ".diff"):  # it changes the base
        common = base.options or common
    try:
        if kind:
            base = read_source(kind, base)
    except UserError as e:
        raise UserError(f"{text}: {e}") from None
    options = common + options
    for option in [word.split("=")[0] for word in options]:
        if option in OURS and not base.command:
            raise UserError(f"{option}: compare sets this option for each run; remove it")
    check_options(base.command, options)
    name = re.sub(r"[^\w.+-]+", "_", name or usual_name).strip("_.")
    return replace(base, name=name[:60] or "idea", options=options)


# -----------------------------------------------------------------------------
# Checks


def ask(variants: list[Variant], processes: int, check_data: bool) -> None:
    """Fills in the settings of variants of one script. Raises UserError with what the script says is
    wrong."""
    first = variants[0]
    lists = [json.dumps(variant.options) for variant in variants]
    done = subprocess.run(
        [sys.executable, "-c", ASK, first.module(), str(processes), str(check_data), *lists],
        cwd=first.folder,
        env=run_environment(is_command=False),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines() or ["the source doesn't run"]
        raise UserError(f"{first.name}: {lines[-1]}")
    for variant, line in zip(variants, done.stdout.splitlines()[-len(variants) :]):
        answer = json.loads(line)
        if isinstance(answer, str):
            raise UserError(f"{variant.name}: {answer}")
        variant.settings = variant.settings or answer


def check_settings(variants: list[Variant], processes: int, check_data: bool = False) -> None:
    """Lets each script check its options, and whether there are enough data. Fills in the settings. Raises
    UserError.

    Commands can't be asked: their runs show whether they know the options."""
    groups = {}  # variants with the same script in the same folder, which one process can check
    for variant in variants:
        groups.setdefault((variant.folder, variant.script), []).append(variant)
    for group in groups.values():
        first = group[0]
        if first.command:
            continue
        if not (first.folder / first.script).is_file():
            raise UserError(f"{first.name}: there is no file {first.script}")
        if not all(check in first.source() for check in CHECKS):
            raise UserError(
                f"{first.name}: the script has no parse_arguments and check_hyperparameters, as train_gpt.py "
                "has; train it with --command"
            )
        ask(group, processes, check_data)


def check_validation(base: Variant, others: list[Variant]) -> None:
    """Raises UserError if a variant measures its loss in another way than the base."""
    for variant in others:
        for option in VALIDATION:
            value = variant.settings.get(option)
            expected = base.settings.get(option)
            if value != expected:
                raise UserError(
                    f"{variant.name}: --{option} is {value}, but {expected} in the base; losses can only "
                    "be compared on the same validation tokens and sequence length, so give both the same"
                )


def tell_apart(variants: list[Variant]) -> None:
    """Makes names unique. Raises UserError if two variants are equal."""
    earlier = {}
    names = set()
    for variant in variants:
        files = hash_copy(variant.folder, bool(variant.command))
        other = earlier.setdefault(json.dumps([files, variant.run()], sort_keys=True), variant)
        if other is not variant:
            raise UserError(
                f"{variant.name} has the same source and settings as {other.name}, so there is "
                "nothing to compare; edit the script, or pass an --idea that changes the training"
            )
        while variant.name in names:
            variant.name += "_2"
        names.add(variant.name)


def open_quote(text: str) -> str:
    """The quote that is still open at the end of this part of a shell command, or ""."""
    for quote in ("", "'", '"'):
        with contextlib.suppress(ValueError):
            shlex.split(text + quote)
            return quote
    return ""


def fill_in(command: str, options: list[str], seed: int) -> str:
    """The command with its options and its seed."""
    text, *parts = command.split("{options}")
    for part in parts:
        words = shlex.join(options)
        quote = open_quote(text)
        if quote == "'":
            words = words.replace("'", "'\\''")
        if quote == '"':
            words = re.sub(r'([\\"$`])', r"\\\1", words)
        text += words + part
    return text.replace("{seed}", str(seed))


def check_options(command: str, options: list[str]) -> None:
    """Raises UserError if a command has no place for them."""
    if command and options and "{options}" not in command:
        raise UserError(f"write {{options}} where {shlex.join(options)} must stand in --command")


def set_steps(variant: Variant, steps: int) -> Variant:
    """The variant with this number of steps."""
    dash = "--num-iterations" in fill_in(variant.command, variant.options, 0)  # as argparse spells it
    option = "--num-iterations" if dash else "--num_iterations"
    return replace(
        variant,
        name=f"{variant.name} with {steps} steps",
        options=[*variant.options, option, str(steps)],
        settings={**variant.settings, "num_iterations": steps},
    )


def with_steps(base: Variant, factor: float, others: list[Variant]) -> Variant:
    """The base with another number of steps. If one of the others is the same, returns that one, so
    that both have the same runs. Raises UserError if the number of steps isn't possible."""
    steps = base.num_iterations()
    if round(steps * factor) in (0, steps):
        raise UserError(
            f"{base.name}: compare also trains the base with more and with fewer steps, so it needs to know "
            "--num_iterations; give --num_iterations 10 or more"
        )
    variant = set_steps(base, round(steps * factor))
    if variant.num_iterations() == steps:
        raise UserError("write {options} behind --num_iterations in --command")
    for other in others:
        if (other.folder, other.run()) == (variant.folder, variant.run()):
            return other
    return variant
