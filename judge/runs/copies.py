"""
Copies of a project's files: of its working tree, of a git revision, and with patches.

Runs are made in them, so that no later edit changes a run. They lie in one scratch folder.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from judge.commands import UserError
from judge.files import without_windows
from judge.runs.same_run import run_environment

# Of files that git doesn't know, those with these endings aren't copied
NO_SOURCES = (".diff", ".log", ".out", ".patch", ".png", ".tsv", ".txt")


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


def link_data(folder: Path, origin: Path, data: Sequence[str]) -> None:
    """Links what git ignores, and the runs need: data, and an environment."""
    for name in [*data, ".venv"]:
        link_missing(folder / name, origin / name)


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


def check_submodule(path: Path) -> None:
    """Raises UserError."""
    if not (path / ".git").exists():
        raise UserError(f"the submodule {path} isn't checked out; run git submodule update --init")


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


def copy_tree(folder: Path, repository: Path, leave_out: Sequence[Path] = ()) -> None:
    """The working tree's files as they are now, but those that git ignores. Of files that git doesn't
    know, patches, logs and the like aren't copied, nor answers of compare, nor those to leave out: they
    come and go, and no run needs them. Raises UserError."""
    if not any((above / ".git").exists() for above in [repository, *repository.parents]):
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
            copy_tree(copy, path, leave_out)


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
    if not folder.exists():
        checkout(commit, folder, root, scratch / "index")
    return folder / repository.relative_to(root)


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
        try:
            git("apply", cwd=copy, input=patch, GIT_CEILING_DIRECTORIES=ceiling)
        except UserError as e:
            shutil.rmtree(copy)  # otherwise it would be found as the changed one
            raise UserError(f"{file.name} doesn't apply ({e})") from None
    return copy
