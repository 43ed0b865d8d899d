"""What the tests of several commands use: a command in this process, a git repository, patches."""

import contextlib
import difflib
import io
import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from judge.commands import UserError, run_command
from judge.runs import make, variants
from judge.settings import Settings


def run_main(main, *words) -> tuple[int, str, str]:
    """Runs main(words) as a command in this process. Returns exit status, output and errors."""
    # replay writes bytes, which need not be text
    streams = [
        io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape", "", write_through=True)
        for _ in range(2)
    ]
    out, err = streams
    arguments = [str(word) for word in words]
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # differs from test to test, and may change a run
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as end:
            run_command(lambda argv: main(arguments))
    printed, errors = [
        stream.buffer.getvalue().decode("utf-8", "surrogateescape") for stream in streams
    ]
    return end.value.code, printed, errors


def work_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """compare and screen run in this folder. The machine has no GPU."""
    patch.setenv("CUDA_VISIBLE_DEVICES", "")
    patch.chdir(folder)


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


def answer_of(main, *words) -> tuple[dict, str]:
    """What a command that ends well writes as JSON, and its output as one line."""
    status, out, err = run_main(main, *words, "--json", "o.json")
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 80
    return json.loads(Path("o.json").read_text()), " ".join(out.split())


def check_refused(main, words: list[str], message: str) -> None:
    """Bad input ends with this error, which is one line."""
    status, out, err = run_main(main, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def bounds(estimate: dict) -> tuple[float, float]:
    """Of an estimate in JSON."""
    return estimate["low"], estimate["high"]


def make_runs(settings: Settings, seeds: range, options=()) -> tuple[make.Pool, str]:
    """Of the working tree. Returns the error with which they end, too; "" if all are made."""
    with make.locked_folder(settings):
        idea = variants.first_variant([], settings)
        idea = replace(idea, name="idea", options=list(options))
        pool = make.open_pool([idea], settings, math.inf)
        try:
            make.make_runs(pool, lambda: [(idea, seeds)])
        except UserError as error:
            return pool, str(error)
    return pool, ""
