"""
The repository's folder, child processes, and the check before a run, for the launcher and the commands.
"""

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent import futures
from pathlib import Path

from judge.environment import child_environment

ROOT = Path(__file__).resolve().parent.parent  # the repository


def say(text):
    print(f"run.sh: {text}", file=sys.stderr)


# -----------------------------------------------------------------------------
# Child processes. They ignore Ctrl-C, which a terminal sends to them, too: the launcher ends them.


def set_up_child():
    """Runs in a child process before its program: it ignores Ctrl-C, and on Linux ends with the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def start(command, **options):
    return subprocess.Popen(command, preexec_fn=set_up_child, **options)


def wait(children):
    """Waits until all have ended or one has failed, then ends the others. Returns its number and exit
    status, or (0, 0). A thread waits for each child, which takes no time of a core."""
    with futures.ThreadPoolExecutor(len(children)) as threads:
        codes = [threads.submit(child.wait) for child in children]
        try:
            first = next((code for code in futures.as_completed(codes) if code.result()), codes[0])
            if first.result() == 2:
                # each rank finds the user's error, but only rank 0 prints it, perhaps later
                ended = futures.wait(codes[:1], 10).done
                if any(code.result() == 2 for code in ended):
                    first = codes[0]
        finally:
            for child in children:
                child.terminate()
    failed = codes.index(first)
    status = first.result()
    if status < 0:
        say(f"process {failed} was ended by signal {-status}")
        status = 128 - status
    return failed, status


def show_seconds(text, ended):
    """Says the text and, on a terminal, how many seconds have passed until `ended` is set."""
    for seconds in itertools.count():
        if not sys.stderr.isatty():
            return say(text)
        print(f"\rrun.sh: {text}: {seconds} s ", end="", file=sys.stderr, flush=True)
        if ended.wait(1):
            return print(file=sys.stderr)


def run(command, **options):
    """Runs a command. Returns its exit status."""
    return wait([start(command, **options)])[1]


def clean_environment() -> list[str]:
    """Gives this process the environment of its child processes. Returns the variables of training and
    of pip that it drops: the user may have set them on purpose."""
    variables = child_environment()
    dropped = sorted(os.environ.keys() - variables.keys())
    os.environ.clear()
    os.environ.update(variables)
    return [name for name in dropped if not name.startswith(("GIT_", "PYTHON"))]


@contextlib.contextmanager
def setup_lock():
    """Packages and data are shared by all runs of this checkout. The lock is on its folder."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another ./run.sh to finish its setup in this folder")
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:
        pass  # some network file systems have no locks
    try:
        yield
    finally:
        os.close(folder)


# -----------------------------------------------------------------------------
# The check before a run


def check_machine(python, *words):
    """Runs launch/checks.py, and sets the environment variables that it finds. Returns what a run
    needs, or ends with its exit status."""
    say("checking the machine")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "needs")
        status = run([python, "-m", "launch.checks", file, *words], cwd=ROOT)
        if status:
            sys.exit(status)
        needs = json.loads(file.read_text())
    os.environ.update(needs["environment"])
    return needs
