"""
What is compared: a command in a folder, with its options. It is read from options, an idea's folder, a
patch, a script, a folder, a revision or the working tree, and checked before anything runs.

The command runs in a copy of the project's files, so that no later edit changes a run. Copies lie in
one scratch folder. An idea's folder has idea.patch; idea.json, in words, is for people.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from judge.runs.same_run import hash_copy, hash_text, run_environment
from judge.logs.read import Log
from judge.commands import UserError
from judge.processes import output_of
from judge.project import Settings
from judge.files import without_windows

# Settings that don't change the final loss
NO_EFFECT_ON_LOSS = ("seed", "val_loss_every", "target_val_loss", "save_checkpoint")
# Of files that git doesn't know, those with these endings aren't copied
NO_SOURCES = (".diff", ".log", ".out", ".patch", ".png", ".tsv", ".txt")
# Settings that the final loss is measured with
VALIDATION = ("track", "val_files", "val_tokens", "val_seq_len")
# A script whose source has this word prints its settings when it gets this option, and ends
PRINTS = "print_settings"


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
    identity: dict = field(
        default_factory=dict, init=False
    )  # all that its runs could read in their copy
    read: dict = field(default_factory=dict, init=False)  # hashes of what they read elsewhere
    place: Path | None = field(default=None, init=False)  # where its runs are kept
    runs: dict[int, Log] = field(default_factory=dict, init=False)  # those that are there, by seed
    edited: dict[str, str] = field(default_factory=dict, init=False)  # see check_edit
    before: list[int] = field(default_factory=list, init=False)  # seeds of its other tests
    new: set[int] = field(default_factory=set, init=False)  # seeds of the runs of this session
    log_ratios: list[float] = field(default_factory=list, init=False)  # of step times; see add_times
    timed: list[int] = field(default_factory=list, init=False)  # seeds of pairs; see read_times

    def key(self) -> str:
        return hash_text(json.dumps(self.identity, sort_keys=True))

    def script(self) -> str:
        """The Python script of the command, as a path in the folder; "" if there is none."""
        words = re.split(r"[\s'\";&|]+", self.command)
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

    def given_steps(self) -> list[tuple[str, str]]:
        """The options that set the number of steps, as they are spelled, with their numbers."""
        option = re.sub(r"(\\-|_)+", "[_-]+", re.escape(self.project.steps_option.rstrip("=")))
        command = fill_in(self.command, self.options, 0)
        return re.findall(rf"({option})[ =](\d+)\b", command)

    def num_iterations(self) -> int | None:
        """None if it isn't known, or can't be set."""
        if self.name_of_steps() in self.settings:
            return self.settings[self.name_of_steps()]
        if "{options}" not in self.command:
            return None
        given = self.given_steps()
        return int(given[-1][1]) if given else None


# -----------------------------------------------------------------------------
# Folders


def git(*arguments: str, cwd: Path, input: bytes = b"", **variables: str) -> bytes:
    """Returns what git prints. Raises UserError with the first line of its error, and OSError."""
    if not shutil.which("git"):
        raise FileNotFoundError("there is no git in PATH, which copies the files; install git")
    command = ["git", *arguments]
    env = run_environment() | variables  # without GIT_DIR, which a hook of git sets
    done = subprocess.run(command, cwd=cwd, input=input, capture_output=True, env=env)
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").splitlines() or ["git failed"]
        raise UserError(re.sub("^(error|fatal): ", "", lines[0]))
    return done.stdout


def lines_of_git(*arguments: str, **more) -> list[str]:
    """What git prints with its option -z."""
    return os.fsdecode(git(*arguments, **more)).split("\0")[:-1]


def link_data(variant: Variant) -> None:
    """Links what git ignores, and the runs need: data, and an environment."""
    for name in variant.project.data:
        link_missing(variant.folder / name, variant.origin / name)
    environment = variant.folder / ".venv"
    if (variant.origin / ".venv").is_dir() and not environment.exists():
        environment.symlink_to(variant.origin / ".venv")


def link_missing(copy: Path, data: Path) -> None:
    """Links what the folder `data` has and its copy lacks."""
    if data.is_file() and not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(data.resolve())
    for entry in data.glob("[!_.]*"):
        link = copy / entry.name
        if entry.is_dir() and link.is_dir() and not link.is_symlink():
            link_missing(link, entry)
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


def has_git(folder: Path) -> bool:
    return any((above / ".git").exists() for above in [folder, *folder.parents])


def without_git(folder: str, names: list[str]) -> list[str]:
    """What isn't copied of a folder that git doesn't know, such as a ZIP of a repository: hidden folders, and
    folders of data, which are linked."""
    skipped = names if os.path.basename(folder) == "data" else {"logs", "__pycache__"}
    folders = [name for name in names if os.path.isdir(os.path.join(folder, name))]
    return [name for name in folders if name.startswith(".") or name in skipped]


def comes_and_goes(name: str, path: Path) -> bool:
    """A file that git doesn't know, and no run needs: patches, logs and the like, and answers of --json."""
    if name.split("/")[0] == "logs" or path.suffix in NO_SOURCES:
        return True
    return path.suffix == ".json" and b'\n "until": ' in path.read_bytes()


def copy_files(folder: Path, repository: Path, leave_out: Sequence[Path]) -> None:
    """See copy_tree."""
    if not has_git(repository):
        shutil.copytree(repository, folder, symlinks=True, ignore=without_git, dirs_exist_ok=True)
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


def copy_tree(folder: Path, repository: Path, leave_out: Sequence[Path] = ()) -> None:
    """The working tree's files as they are now, but those that git ignores. Of files that git doesn't
    know, patches, logs and the like aren't copied, nor answers of compare, nor those to leave out: they
    come and go, and no run needs them. Raises UserError."""
    copy_files(folder, repository, leave_out)
    mend_links(folder, repository)


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


def copy_commit(revision: str, scratch: Path, repository: Path) -> Path:
    """The files of a commit. Raises UserError."""
    try:
        name = f"{revision}^{{commit}}"
        commit = git("rev-parse", "--verify", "--end-of-options", name, cwd=repository).decode().strip()
    except UserError as e:
        hint = "in a shallow clone, run git fetch --unshallow"
        raise UserError(f"no file, folder or commit is called {revision} ({e}); {hint}") from None
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


def with_script(base: Variant, path: str) -> Variant:
    """The base with another script of its folder."""
    if not (base.folder / path).is_file():
        raise UserError(f"there is no file {path}")
    old = base.script()
    words = [(old, path)] + [tuple(name[:-3].replace("/", ".") for name in (old, path))]
    for before, after in words if old else []:
        found = re.search(rf"(?<![^\s'\"]){re.escape(before)}(?![^\s'\"])", base.command)
        if found:
            command = base.command[: found.start()] + after + base.command[found.end() :]
            return replace(base, command=command)
    raise UserError(f"the command names no script that {path} could take the place of")


def read_script(file: Path, base: Variant) -> Variant:
    """The base with a script of its own folder, or one from elsewhere in the place of its script."""
    path = file.resolve()
    if path.is_relative_to(base.origin) and (base.folder / path.relative_to(base.origin)).is_file():
        return with_script(base, str(path.relative_to(base.origin)))
    if not base.script():
        raise UserError("the command names no script that this file could take the place of")
    return replace(base, folder=changed(base.folder, base.script(), [file]))


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
    for option in re.findall(r"(--\w+)[ =]{(?:seed|runs)}", base.command):
        if option in [word.split("=")[0] for word in options]:
            raise UserError(f"{option}: the command sets this option for each run; remove it")
    check_options(base.command, options)
    name = re.sub(r"[^\w.+-]+", "_", name or usual_name).strip("_.")
    return replace(base, name=name[:60] or "idea", options=options, settings={})


# -----------------------------------------------------------------------------
# Checks


def settings_in(printed: str) -> dict | None:
    """The JSON object in the last line; None if there is none."""
    with contextlib.suppress(ValueError, IndexError):
        found = json.loads(printed.splitlines()[-1])
        if isinstance(found, dict):
            return found
    return None


def check_settings(variants: list[Variant], again: bool = False) -> None:
    """Lets scripts that can print their settings check their options and their data. Fills in the settings.
    Raises UserError with what a script says is wrong.

    Others can't be asked: their runs show whether they know the options."""
    asked = []
    for variant in variants:
        script = variant.script()
        known = variant.settings and not again
        if script and not known and PRINTS in (variant.folder / script).read_text("utf-8", "replace"):
            link_data(variant)
            command = fill_in(variant.command, [*variant.options, f"--{PRINTS}"], 0)
            how = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            env = run_environment(variant.project.root)
            how |= dict(cwd=variant.folder, env=env, text=True, errors="replace")
            child = subprocess.Popen(["bash", "-c", command], **how)
            asked.append((variant, child))
    for variant, child in asked:
        printed, errors = child.communicate()
        found = settings_in(printed)
        if found is None:
            line = (errors.splitlines() or ["the script doesn't run"])[-1]
            raise UserError(f"{variant.name}: {line.removeprefix('error: ')}")
        variant.settings = found


def check_validation(base: Variant, others: list[Variant]) -> None:
    """Raises UserError if a variant measures its loss in another way than the base."""
    for variant in others if base.settings else []:
        for option in VALIDATION if variant.settings else []:
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
        files = hash_copy(variant.folder, variant.project.not_read)
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


def fill_in(command: str, options: list[str], seed: int, runs: int = 1, slot: int = 0) -> str:
    """The command with its options, its seed, how many runs it makes, and the slot in which it runs."""
    text, *parts = command.split("{options}")
    for part in parts:
        words = shlex.join(options)
        quote = open_quote(text)
        if quote == "'":
            words = words.replace("'", "'\\''")
        if quote == '"':
            words = re.sub(r'([\\"$`])', r"\\\1", words)
        text += words + part
    return text.replace("{seed}", str(seed)).replace("{runs}", str(runs)).replace("{slot}", str(slot))


def check_options(command: str, options: list[str]) -> None:
    """Raises UserError if a command has no place for them."""
    if options and "{options}" not in command:
        raise UserError(f"write {{options}} where {shlex.join(options)} must stand in the command")


def set_steps(variant: Variant, steps: int) -> Variant:
    """The variant with this number of steps."""
    option = variant.project.steps_option
    given = variant.given_steps()
    spelled = given[-1][0] if given else option.rstrip("=")
    words = [f"{spelled}={steps}"] if option.endswith("=") else [spelled, str(steps)]
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
