"""The table of machines. Each case imitates one machine, and helpers judge the outcome."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

# A model whose step takes milliseconds: 8 sequences of 128 tokens a step.
TINY = {
    "num_layers": 4,
    "num_heads": 2,
    "head_dim": 32,
    "model_dim": 64,
    "num_value_embeds": 1,
    "long_window_layers": "0,3",
    "max_window": 256,
    "train_seq_len": 128,
    "batch_tokens": 1024,
    "val_seq_len": 128,
    "val_tokens": 2048,
    "num_iterations": 6,
    "val_loss_every": 2,
    "warmup_steps": 1,
    "sequences_per_pass": 2,
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: words for the table, and the last line that a user sees."""

    ok: bool
    what: str
    last_line: str = ""


def no_reason() -> str:
    return ""


@dataclass(frozen=True)
class Case:
    """A machine. `run` gets an empty folder.

    `cannot` returns the reason why this machine can't be imitated here, or "".
    """

    situation: str
    wanted: str
    run: Callable[[Path], Outcome]
    fast: bool = False  # takes less than 10 s, so the test suite runs it, too
    cannot: Callable[[], str] = no_reason


# -----------------------------------------------------------------------------
# Helpers of the cases


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit status, and all that it wrote to stdout and stderr."""

    code: int
    output: str

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""


def clean_environment(**changes) -> dict:
    """The environment variables of this process, with changes. None removes a variable.

    Variables about ranks, virtual environments and Python are left out.
    """
    unwanted = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHONPATH",
        "PYTHONHOME",
        "CUDA_VISIBLE_DEVICES",
        "TORCH_COMPILE_DISABLE",
        "OMP_NUM_THREADS",
    }
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = str(value)
    return environment


def start(command, folder, env=None) -> subprocess.Popen:
    """Starts a command as the leader of a process group, as a shell does."""
    environment = clean_environment() if env is None else env
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        text=True,
        encoding="utf-8",
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process, timeout=600) -> Done:
    """Waits for a started command. Kills it if it takes too long; its status is then 124."""
    try:
        output, _ = process.communicate(timeout=timeout)
        return Done(process.returncode, output)
    except subprocess.TimeoutExpired:
        kill_group(process, signal.SIGKILL)
        output, _ = process.communicate()
        return Done(124, f"{output}\nstill running after {timeout} s")


def kill_group(process, number) -> None:
    """Sends a signal to all processes of a started command."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def run(command, folder, env=None, timeout=600) -> Done:
    return finish(start(command, folder, env), timeout)


def write_tiny_shards(folder) -> list[str]:
    """Writes small shards into `folder`. Returns options of train_gpt.py for a run of seconds."""
    from util import random_tokens, write_shard  # imports torch

    write_shard(folder / "tiny_train_000000.bin", random_tokens(7 * 1024, seed=1))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(16 * 128 + 1, seed=3))
    options = TINY | dict(
        train_files=folder / "tiny_train_*.bin",
        val_files=folder / "tiny_val_*.bin",
    )
    return ["--track", "mini", *(f"--{name}={value}" for name, value in options.items())]


def trained(done: Done) -> Outcome:
    """The command must have trained: status 0, and a last validation loss below the first."""
    found = re.findall(r"^step:\d+/\d+ val_loss:(\S+)", done.output, re.M)
    losses = [float(loss) for loss in found]
    if done.code != 0:
        return Outcome(False, f"exit {done.code}", done.last_line)
    if len(losses) < 2 or not losses[-1] < losses[0]:
        return Outcome(False, f"losses {losses}", done.last_line)
    return Outcome(True, f"trained: {losses[0]:.2f} to {losses[-1]:.2f}", done.last_line)


def one_line(done: Done, *words: str, code: int | None = None) -> Outcome:
    """The command must have ended with one error line with these words, and no traceback."""
    errors = re.findall(r"^(?:run\.sh: )?error: .*$", done.output, re.M)
    last_line = errors[-1] if errors else done.last_line
    if done.code == 0 or (code is not None and done.code != code):
        return Outcome(False, f"exit {done.code}", last_line)
    if "Traceback" in done.output:
        return Outcome(False, "traceback", last_line)
    if len(errors) != 1:
        return Outcome(False, f"{len(errors)} error lines", last_line)
    missing = [word for word in words if word.lower() not in errors[0].lower()]
    if missing:
        return Outcome(False, f"says nothing of {missing[0]}", last_line)
    return Outcome(True, f"line, exit {done.code}", last_line)


# -----------------------------------------------------------------------------
# What this machine can imitate


def cannot_unshare(*options: str) -> str:
    """The reason why unshare with these options doesn't work here, or ""."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    done = subprocess.run(["unshare", *options, "true"], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return f"unshare {' '.join(options)} isn't allowed here"


# -----------------------------------------------------------------------------
# The table


def run_case(case: Case) -> tuple[str, float, str]:
    """Runs a case in an empty folder.

    Returns "ok: ...", "FAILED: ..." or "not run: ...", then the seconds, and the last line.
    """
    reason = case.cannot()
    if reason:
        return f"not run: {reason}", 0.0, ""
    begun = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    try:
        outcome = case.run(folder)
    except Exception as e:  # a broken case counts as failed, and the next case follows
        outcome = Outcome(False, type(e).__name__, str(e))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    word = "ok" if outcome.ok else "FAILED"
    return f"{word}: {outcome.what}", time.perf_counter() - begun, outcome.last_line


WIDTHS = (34, 10, 28, 4, 40)  # of the columns; 120 characters with the spaces between them


def format_row(*cells: str) -> str:
    """A row of the table. Long cells are wrapped."""
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, WIDTHS)]
    height = max(len(column) for column in columns)
    lines = []
    for i in range(height):
        parts = [column[i] if i < len(column) else "" for column in columns]
        lines.append(" ".join(part.ljust(width) for part, width in zip(parts, WIDTHS)).rstrip())
    return "\n".join(lines)


def print_table(cases: list[Case]) -> int:
    """Runs the cases and prints a row for each. Returns the number of failed cases."""
    print(format_row("situation", "wanted", "outcome", "s", "last line"))
    failed = 0
    not_run = 0
    begun = time.perf_counter()
    for case in cases:
        what, seconds, last_line = run_case(case)
        row = format_row(case.situation, case.wanted, what, f"{seconds:.0f}", last_line)
        print(row, flush=True)
        if what.startswith("FAILED"):
            failed += 1
        if what.startswith("not run"):
            not_run += 1
    passed = len(cases) - failed - not_run
    seconds = time.perf_counter() - begun
    print(f"{passed} ok, {failed} failed, {not_run} not run, in {seconds:.0f} s")
    return failed
