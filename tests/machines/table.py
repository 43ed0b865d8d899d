"""The table of machines: how a case starts ./run.sh, how it judges the outcome, and how it is printed."""

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
from multiprocessing.pool import ThreadPool
from pathlib import Path
from unittest import SkipTest


# --------------------------------------------------------------------------------------------------
# Commands
@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit status, and all that it wrote to stdout and stderr."""

    code: int
    output: str

    @property
    def last_line(self):
        return (self.output.splitlines() or [""])[-1]


# A user's shell doesn't have these variables, and finds a Python that is in no environment
UNWANTED = (
    "VIRTUAL_ENV CONDA_PREFIX PYTHONPATH CUDA_VISIBLE_DEVICES TORCH_COMPILE_DISABLE OMP_NUM_THREADS"
).split()
PATH = f"{sys.base_prefix}/bin:{os.environ['PATH']}"


def start(command, folder, **variables):
    """Starts a command as the leader of a process group, as a shell does. None removes a variable."""
    environment = os.environ | dict.fromkeys(UNWANTED) | dict(PATH=PATH) | variables
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env={name: str(value) for name, value in environment.items() if value is not None},
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process):
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += "\nstill running after 600 s"
    return Done(process.returncode, output)


def run(command, folder, **variables):
    return finish(start(command, folder, **variables))


def wait_for(path, pattern, process):
    """Waits until there is a file below `path`."""
    while process.poll() is None and not list(path.glob(pattern)):
        time.sleep(0.01)


def need(*command):
    """Raises SkipTest unless a command works here."""
    if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
        raise SkipTest(f"{' '.join(command)} doesn't work here")


# --------------------------------------------------------------------------------------------------
# Outcomes
def trained(done, *words):
    """The command must have trained: status 0, a last validation loss below the first, and these words.
    Returns the last line with one of the words, or the losses."""
    losses = [float(loss) for loss in re.findall(r"^step:\d+/\d+ val_loss:(\S+)", done.output, re.M)]
    assert done.code == 0 and "Traceback" not in done.output, f"exit {done.code}: {done.last_line}"
    assert len(losses) > 1 and losses[-1] < losses[0], f"losses {losses}"
    outcome = f"trained: {losses[0]:.2f} to {losses[-1]:.2f}"
    for word in words:
        found = re.search(f".*{re.escape(word)}.*", done.output)
        assert found, f"says nothing of {word!r}"
        outcome = found[0]
    return outcome


def one_line(done, words):
    """The command must have ended with status 2 and one error line with these words. Returns the line."""
    errors = re.findall(r"^(?:run\.sh: )?error: .*$", done.output, re.M)
    assert done.code == 2 and "Traceback" not in done.output, f"exit {done.code}: {done.last_line}"
    assert len(errors) == 1, f"{len(errors)} error lines: {done.last_line}"
    assert words in errors[0], f"says nothing of {words!r}: {errors[0]}"
    return errors[0]


def stopped(done, number):
    """A signal must have ended the command, with one line. Returns the line."""
    assert done.code == 128 + number, f"exit {done.code}: {done.last_line}"
    assert done.last_line.startswith("run.sh: stopped by"), done.last_line
    for line in done.output.splitlines():
        assert line.startswith("run.sh: "), line
    return done.last_line


# --------------------------------------------------------------------------------------------------
# The table
def run_case(case):
    """Runs a case, a machine's name and its function, in an empty folder. Returns a row."""
    machine, function = case
    begun = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    try:
        outcome = f"ok: {function(folder)[:150]}"
    except SkipTest as e:
        outcome = f"not run: {e}"
    except Exception as e:  # a broken case counts as failed, and the next case follows
        outcome = f"FAILED: {type(e).__name__}: {e}"
    shutil.rmtree(folder, ignore_errors=True)
    return machine, f"{time.perf_counter() - begun:.0f}", outcome


def format_row(machine, seconds, outcome):
    text = f"{machine:38} {seconds:>4}  {outcome}"
    return textwrap.fill(text, 120, subsequent_indent=" " * 45)


def print_table(cases):
    """Runs the cases, two at a time, and prints a row when one ends. Returns the number of failed cases."""
    print(format_row("machine", "s", "outcome"))
    begun = time.perf_counter()
    counts = dict.fromkeys(["ok", "FAILED", "not run"], 0)
    with ThreadPool(2) as pool:
        for row in pool.imap_unordered(run_case, cases.items()):
            print(format_row(*row), flush=True)
            counts[row[-1].split(":")[0]] += 1
    numbers = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{numbers}, in {time.perf_counter() - begun:.0f} s")
    return counts["FAILED"]
