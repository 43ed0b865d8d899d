"""
What compare.py compares: a script with its options. It is read from options, an idea's folder, a
patch, a file, a revision or the working tree, and checked before anything runs. With --command, it is
a command in a folder of any git repository.

A script runs in a copy of the repository's files, so that no later edit changes a run. Copies lie in
one scratch folder. An idea's folder has idea.patch and idea.json, whose commit and options count.
"""

import ast
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

from tools.common import ROOT, UsageError, environment, without_windows

# Options that compare.py gives to the runs itself
OURS = ("--seed", "--log_dir", "--num_runs", "--resume")
# Settings that don't change the final loss
NO_EFFECT_ON_LOSS = ("seed", "val_loss_every", "target_val_loss", "save_checkpoint")
# Settings that the final loss is measured with
VALIDATION = ("track", "val_files", "val_tokens", "val_seq_len")
# A script with these functions can be asked for its settings
CHECKS = (b"\ndef parse_arguments(", b"\ndef check_hyperparameters(")
LOAD = """
import dataclasses, importlib, json, sys
script = importlib.import_module(sys.argv[1])
"""
ASK = """
for options in json.loads(sys.argv[2]):
    try:
        args, hp = script.parse_arguments(options)
        script.check_hyperparameters(hp, int(sys.argv[3]))
        answer = dataclasses.asdict(hp)
        answer["device"] = script.DEVICE.type if hasattr(script, "DEVICE") else args.device
    except (Exception, SystemExit) as e:
        answer = (str(e) or type(e).__name__).splitlines()[0]
    print(json.dumps(answer))
"""
# Prints for each list of options what is wrong with their data, or ""
ASK_DATA = """
for options in json.loads(sys.argv[2]):
    answer = ""
    try:
        script.check_inputs(*script.parse_arguments(options))
    except Exception as e:
        if type(e).__name__ != "InputError":
            raise
        answer = str(e).splitlines()[0]
    print(json.dumps(answer))
"""


@dataclass
class Variant:
    """The base, an idea, or the base with another number of steps."""

    name: str
    folder: Path  # a copy of the repository's files, in which the script runs
    script: str  # its name in the folder
    options: list[str]
    settings: dict | None = None  # the hyperparameters; None for scripts that can't be asked
    code: list[str] | None = None  # hashes of the script and of what it imports from its folder
    command: str = ""  # a shell command that runs instead of the script

    def module(self) -> str:
        """The name of the script for python -m, which finds imports in the folder."""
        return self.script.removesuffix(".py").replace("/", ".")

    def source(self) -> bytes:
        return (self.folder / self.script).read_bytes()

    def digest(self) -> str:
        """Equal for variants with the same losses on the same machine."""
        if self.settings is None:
            settings = self.options
        else:
            settings = {k: v for k, v in self.settings.items() if k not in NO_EFFECT_ON_LOSS}
        facts = [*self.code, settings, self.command or 1]  # 1: as in finished screens
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def num_iterations(self) -> int | None:
        if self.settings is not None:
            return self.settings.get("num_iterations")
        found = re.findall(r"--num_iterations[ =](\d+)", " ".join([self.command, *self.options]))
        return int(found[-1]) if found else None


# -----------------------------------------------------------------------------
# Folders


def git(*arguments: str, cwd: Path | None = None, input: bytes = b"", **variables: str) -> bytes:
    """Returns what git prints. Raises UsageError with the first line of its error, and OSError."""
    command = ["git", *arguments]
    env = os.environ | variables
    done = subprocess.run(command, cwd=cwd or ROOT, input=input, capture_output=True, env=env)
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").splitlines() or ["git failed"]
        raise UsageError(re.sub("^(error|fatal): ", "", lines[0]))
    return done.stdout


def link_data(copy: Path, data: Path | None = None) -> None:
    """Links what the folder `data` has and its copy lacks: data, which git ignores."""
    for entry in (data or ROOT / "data").glob("[!_.]*"):
        link = copy / entry.name
        if entry.is_dir() and link.is_dir() and not link.is_symlink():
            link_data(link, entry)
        elif not link.exists():
            copy.mkdir(exist_ok=True)
            link.symlink_to(entry.resolve())


def copy_tree(scratch: Path, repository: Path | None = None) -> Path:
    """The working tree's files as they are now, but those that git ignores. Raises UsageError."""
    repository = repository or ROOT
    folder = scratch / "worktree"
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=repository)
    for name in os.fsdecode(names).split("\0"):
        if (repository / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, folder / name)
    return folder


def copy_commit(revision: str, scratch: Path, repository: Path | None = None) -> Path:
    """The files of a commit. Raises UsageError."""
    try:
        name = f"{revision}^{{commit}}"
        commit = git("rev-parse", "--verify", "--end-of-options", name, cwd=repository).decode().strip()
    except UsageError as e:
        hint = "in a shallow clone, run git fetch --unshallow"
        raise UsageError(f"no file or commit is called {revision} ({e}); {hint}") from None
    folder = scratch / commit
    if not folder.exists():
        with tarfile.open(fileobj=io.BytesIO(git("archive", commit, cwd=repository))) as archive:
            archive.extractall(folder)
    return folder


def changed(folder: Path, script: str, files: list[Path]) -> Path:
    """A copy in which patches are applied, and a .py file takes the place of the script. The same
    changes give the same folder. Raises UsageError and OSError."""
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
        try:
            patch = without_windows(file.read_bytes())
            git("apply", cwd=copy, input=patch, GIT_CEILING_DIRECTORIES=ceiling)
        except UsageError as e:
            shutil.rmtree(copy)  # otherwise it would be found as the changed one
            raise UsageError(f"the patch doesn't apply ({e})") from None
    return copy


def hash_code(folder: Path, script: str) -> list[str]:
    """The SHA-256 of the script, of the files of its folder that it imports, and of those that they
    import; then their names. Raises UsageError."""
    names = [script]
    hashes = []
    for name in names:
        source = (folder / name).read_bytes()
        hashes.append(hashlib.sha256(source).hexdigest())
        modules = []
        try:
            tree = ast.parse(source, name)
        except (SyntaxError, ValueError) as e:  # ValueError: zero bytes
            raise UsageError(f"{name} isn't Python: {e}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                package = Path(name).parts[: -node.level] if node.level else ()  # of a relative import
                modules += [".".join([*package, node.module or "", alias.name]) for alias in node.names]
        for module in modules:
            for path in itertools.accumulate(module.split("."), os.path.join):
                for file in (f"{path}.py", f"{path}/__init__.py"):
                    if file not in names and (folder / file).is_file():
                        names.append(file)
    return hashes + names[1:]


# -----------------------------------------------------------------------------
# Folders in which a command runs


def copy_folder(kind: str, scratch: Path) -> Path:
    """A copy of PATH or PATH@REVISION, any folder of a git repository, with its data linked. Raises
    UsageError and OSError."""
    path, at, revision = kind.partition("@")
    if Path(kind).is_dir():
        path = kind
        at = ""
    source = Path(path).resolve()
    if not source.is_dir():
        raise UsageError(
            f"there is no folder {path}; with --command, give PATH, PATH@REVISION or options"
        )
    scratch = scratch / hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
    folder = copy_commit(revision, scratch, source) if at else copy_tree(scratch, source)
    if not folder.is_dir():
        raise UsageError(f"git knows no file in {source}; it may ignore this folder")
    link_data(folder / "data", source / "data")
    return folder


def hash_folder(folder: Path) -> str:
    """The SHA-256 of all files. Links, which lead to data, don't count."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink():
            found.update(f"{file.relative_to(folder)}\n{file.stat().st_size}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()


# -----------------------------------------------------------------------------
# Sources


def is_idea(kind: str) -> bool:
    """Whether a source is an idea's folder."""
    return kind != "" and Path(kind, "idea.patch").is_file()


def read_idea(folder: Path) -> dict:
    """The idea.json of an idea's folder. Raises UsageError and OSError."""
    file = folder / "idea.json"
    try:
        idea = json.loads(file.read_bytes())
    except ValueError as e:
        raise UsageError(f"{file}: not JSON ({e})") from None
    if not isinstance(idea, dict) or not isinstance(idea.get("options", ""), str):
        raise UsageError(f'{file}: it must be a JSON object, whose "options" are text')
    return idea


def idea_commit(text: str) -> str:
    """The commit that an idea's folder names; "" for other sources, and for ideas for the current
    train_gpt.py. Raises UsageError."""
    kind = split_source(text)[1]
    if not is_idea(kind):
        return ""
    return str(read_idea(Path(kind)).get("commit", ""))


def read_source(kind: str, base: Variant) -> tuple[Path, str]:
    """The folder and the script that a file, a revision, a revision's file (REVISION:PATH) or "." names;
    with --command, the folder that PATH or PATH@REVISION names. Files change the base's folder.

    Raises UsageError and OSError.
    """
    file = Path(kind)
    script = base.script
    if base.command and file.suffix not in (".patch", ".diff"):
        return copy_folder(kind, base.folder.parent), script
    if kind == ".":
        return base.folder.with_name("worktree"), script
    if file.suffix in (".py", ".patch", ".diff") and (":" not in kind or file.exists()):
        if file.suffix == ".py" and file.resolve().parent == ROOT / "recipes":
            script = f"recipes/{file.name}"
        return changed(base.folder, script, [file]), script
    revision, _, path = kind.partition(":")
    return copy_commit(revision, base.folder.parent), path or script


def default_name(kind: str, options: list[str]) -> str:
    if kind == ".":
        kind = "worktree"
    elif kind and ("@" in kind or Path(kind).exists()):
        kind = Path(kind).resolve().name
    words = [re.sub(r"\.(py|patch|diff)$", "", kind)]
    return "_".join(words + [word.lstrip("-") for word in options])


def split_source(text: str) -> tuple[str, str, list[str]]:
    """The parts of [NAME=][KIND] [OPTIONS]. Raises UsageError."""
    named = re.fullmatch(r"(\w[\w.+-]*)=(.*)", text, re.DOTALL)
    name, what = named.groups() if named else ("", text)
    try:
        words = shlex.split(what)
    except ValueError as e:  # quotes that don't close
        raise UsageError(f"{text}: {e}") from None
    if not words:
        return name, ".", []
    if words[0].startswith("--"):
        return name, "", words
    return name, words[0], words[1:]


def read_variant(text: str, base: Variant, common: list[str]) -> Variant:
    """Reads [NAME=][KIND] [OPTIONS]. `common` are options of all variants. Raises UsageError and OSError."""
    name, kind, options = split_source(text)
    usual_name = default_name(kind, options)
    if is_idea(kind):
        options = read_idea(Path(kind)).get("options", "").split() + options
        kind = os.path.join(kind, "idea.patch")
    if not base.folder.is_dir():
        kind = kind or "."  # options alone, for the base of a command
    folder, script = base.folder, base.script
    try:
        if kind:
            folder, script = read_source(kind, base)
    except UsageError as e:
        raise UsageError(f"{text}: {e}") from None
    for word in common + options:
        option = word.split("=")[0]
        if option in OURS and not base.command:
            raise UsageError(f"{option}: compare sets this option for each run; remove it")
    name = re.sub(r"[^\w.+-]+", "_", name or usual_name).strip("_.")
    return Variant(name[:60] or "idea", folder, script, common + options, command=base.command)


# -----------------------------------------------------------------------------
# Checks


def by_script(variants: list[Variant]) -> list[list[Variant]]:
    """Variants with the same script in the same folder, together."""
    groups = {}
    for variant in variants:
        groups.setdefault((variant.folder, variant.script), []).append(variant)
    return list(groups.values())


def script_environment() -> dict[str, str]:
    """The environment of a script. Without PYTHONPATH, which names this repository, a script finds only
    the files of its own folder."""
    variables = os.environ | environment()
    variables.pop("PYTHONPATH", None)
    return variables


def ask(code: str, variants: list[Variant], *more: str) -> list:
    """What the code prints for each of these variants of one script. Raises UsageError with the last line
    of the script's error."""
    options = json.dumps([variant.options for variant in variants])
    done = subprocess.run(
        [sys.executable, "-c", LOAD + code, variants[0].module(), options, *more],
        cwd=variants[0].folder,
        env=script_environment(),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines() or ["the source doesn't run"]
        raise UsageError(f"{variants[0].name}: {lines[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()[-len(variants) :]]


def check_settings(variants: list[Variant], processes: int) -> None:
    """Lets each script check its options, and fills in the settings and the code. Raises UsageError.

    Commands, and scripts without our functions, can't be asked: their runs show whether they know the
    options."""
    for group in by_script(variants):
        first = group[0]
        if first.command:
            for variant in group:
                variant.code = [hash_folder(first.folder)]
            continue
        if not (first.folder / first.script).is_file():
            raise UsageError(f"{first.name}: there is no file {first.script}")
        if all(check in first.source() for check in CHECKS):
            for variant, answer in zip(group, ask(ASK, group, str(processes))):
                if isinstance(answer, str):
                    raise UsageError(f"{variant.name}: {answer}")
                variant.settings = answer
        elif b"--log_dir" not in first.source():  # it would train, and its log couldn't be found
            raise UsageError(f"{first.name}: this script has no option --log_dir, which compare needs")
        code = hash_code(first.folder, first.script)
        for variant in group:
            variant.code = code


def check_validation(base: Variant, others: list[Variant]) -> None:
    """Raises UsageError if a variant measures its loss in another way than the base."""
    for variant in others:
        if base.settings is None or variant.settings is None:
            continue
        for option in VALIDATION:
            value = variant.settings.get(option)
            expected = base.settings.get(option)
            if value != expected:
                raise UsageError(
                    f"{variant.name}: --{option} is {value}, but {expected} in the base; losses can only "
                    "be compared on the same validation tokens and sequence length, so give both the same"
                )


def check_data(variants: list[Variant]) -> None:
    """Lets each script check that there are enough data for its runs. Raises UsageError.

    Scripts without a function check_inputs aren't asked."""
    for group in by_script(variants):
        if group[0].settings is None or b"\ndef check_inputs(" not in group[0].source():
            continue
        for variant, message in zip(group, ask(ASK_DATA, group)):
            if message:
                raise UsageError(f"{variant.name}: {message}")


def tell_apart(variants: list[Variant]) -> None:
    """Makes names unique. Raises UsageError if two variants are equal."""
    for i, variant in enumerate(variants):
        earlier = variants[:i]
        for other in earlier:
            if variant.digest() == other.digest():
                raise UsageError(
                    f"{variant.name} has the same source and settings as {other.name}, so there is "
                    "nothing to compare; edit the script, or pass an --idea that changes the training"
                )
        while variant.name in [other.name for other in earlier]:
            variant.name += "_2"


def log_ratio_of_steps(fewer: Variant, more: Variant) -> float:
    """The logarithm of the ratio of their numbers of steps. Rounding makes it differ a little from
    2 log(SLOPE_FACTOR)."""
    return math.log(more.num_iterations() / fewer.num_iterations())


def set_steps(variant: Variant, steps: int) -> Variant:
    """The variant with this number of steps."""
    settings = None
    if variant.settings is not None:
        settings = {**variant.settings, "num_iterations": steps}
    return replace(
        variant,
        name=f"{variant.name} with {steps} steps",
        options=[*variant.options, "--num_iterations", str(steps)],
        settings=settings,
    )


def with_steps(base: Variant, factor: float, others: list[Variant] | None = None) -> Variant:
    """The base with another number of steps. If one of the others is the same, returns that one, so
    that both have the same runs. Raises UsageError if the number of steps isn't possible."""
    steps = base.num_iterations()
    if steps is None or round(steps * factor) in (0, steps):
        raise UsageError(
            f"{base.name}: compare also trains the base with more and with fewer steps, so it needs to know "
            "--num_iterations; give --num_iterations 10 or more"
        )
    variant = set_steps(base, round(steps * factor))
    for other in others or []:
        if other.digest() == variant.digest():
            return other
    return variant
