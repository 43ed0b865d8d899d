"""What the tests of several commands use: a command in this process, a git repository, patches."""

import contextlib
import difflib
import io
import os
import subprocess
from pathlib import Path

import pytest

from lib.commands import run_command


def run_main(main, *words) -> tuple[int, str, str]:
    """Runs main(words) as a command in this process. Returns exit status, output and errors."""
    out = io.StringIO()
    err = io.StringIO()
    arguments = [str(word) for word in words]
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # differs from test to test, and may change a run
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as end:
            run_command(lambda argv: main(arguments))
    return end.value.code, out.getvalue(), err.getvalue()


def git(folder, *words):
    settings = ["user.name=t", "user.email=t@t", "init.defaultBranch=main"]
    options = [word for setting in settings for word in ("-c", setting)]
    subprocess.run(["git", *options, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def commit_files(folder: Path, files: dict[str, str], message: str = "one") -> None:
    """Writes and commits these files of a repository, which may be new."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", message)


def patch_of(name: str, old: str, new: str) -> str:
    """What diff -u prints for a file of that name."""
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(lines)
