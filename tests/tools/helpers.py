"""What the tests of several commands use: a command in this process, a git repository, patches."""

import contextlib
import difflib
import io
import os
import subprocess

import pytest

from tools.common import run_command


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
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def patch_of(name: str, old: str, new: str) -> str:
    """What diff -u prints for a file of that name."""
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(lines)
