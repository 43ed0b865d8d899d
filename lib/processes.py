"""
The repository's folder, child processes, and the check before a run, for the launcher and the commands.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent import futures
from pathlib import Path

from judge.environment import child_environment, chosen_threads, usable_cores
from judge.files import write_file
from judge.processes import end_with_parent, has_nvidia_gpu
from judge.runs.same_run import ask_python, machine_facts

ROOT = Path(__file__).resolve().parent.parent  # the repository


def say(text):
    print(f"run.sh: {text}", file=sys.stderr)


# -----------------------------------------------------------------------------
# Child processes. They ignore Ctrl-C, which a terminal sends to them, too: the launcher ends them.


def set_up_child():
    """Runs in a child process before its program: it ignores Ctrl-C, and on Linux ends with the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


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


def run(command, **options):
    """Runs a command. Returns its exit status."""
    return wait([start(command, **options)])[1]


def environment(processes: int = 1) -> dict[str, str]:
    """The environment variables of runs on a CPU, `processes` of them at once. What the user has set
    stays, but processes share the threads of OMP_NUM_THREADS."""
    cores = chosen_threads() or usable_cores()
    variables = {
        # glibc keeps freed memory, because mapping it again is slow
        "MALLOC_TRIM_THRESHOLD_": "-1",  # never returns the top of the heap
        "MALLOC_MMAP_MAX_": "0",  # takes large blocks from the heap, too
    }
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return variables | {"OMP_NUM_THREADS": str(max(1, cores // processes))}


def clean_environment() -> list[str]:
    """Gives this process the environment of its child processes. Returns the variables of training and
    of pip that it drops: the user may have set them on purpose."""
    variables = child_environment()
    dropped = sorted(os.environ.keys() - variables.keys())
    os.environ.clear()
    os.environ.update(variables)
    return [name for name in dropped if not name.startswith(("GIT_", "PYTHON"))]


def checkpoints(folder):
    """Returns the time and the path of each RUN.pt of a folder, which is beside its log. The newest is last."""
    found = [path for path in Path(folder).glob("*.pt") if path.with_suffix(".txt").exists()]
    return sorted((path.stat().st_mtime_ns, path) for path in found)


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
# The check before a run. It imports PyTorch, which takes seconds, so a training on a CPU remembers the answer.


def version_of(package, path):
    """Returns the version of an installed package, or ""."""
    for found in importlib.metadata.distributions(name=package, path=path):
        return found.version
    return ""


def cache_folder():
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or ROOT / "data" / ".cache")


def facts_of_answer(python, words):
    """Returns the hash of all that the answer depends on: the command, our code, variables, the CPU, its
    compiler, PyTorch. None if files and GPUs decide, which only PyTorch can read."""
    if words[0] != "train" or "--resume" in " ".join(words) or has_nvidia_gpu():
        return None
    sources = []
    for folder in ("", "recipes", "launch", "gpu", "data"):
        sources += sorted(ROOT.joinpath(folder).glob("*.py"))
    changing = ("TORCH", "OMP", "MALLOC", "CXX")
    facts = [
        [str(python), *words],
        [path.read_text(encoding="utf-8") for path in sources],
        sorted(pair for pair in os.environ.items() if pair[0].startswith(changing)),
        machine_facts(gpu=False),
        version_of("torch", ask_python(python)[1]),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def remembered(file, facts):
    """Returns the last answer, if it has these facts, and the data that it found are there; or else None."""
    with contextlib.suppress(OSError, ValueError):
        needs = json.loads(file.read_text())
        if facts and needs["facts"] == facts and all(glob.glob(f"{ROOT}/{p}") for p in needs["files"]):
            return needs
    return None


def check_machine(python, *words):
    """Runs launch/checks.py, and sets the environment variables that it finds. Returns what a run
    needs, or ends with its exit status."""
    say("checking the machine")
    file = cache_folder() / "machine-is-checked.json"
    facts = facts_of_answer(python, words)
    needs = remembered(file, facts)
    if needs is None:
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder, "needs")
            status = run([python, "-m", "launch.checks", answer, *words], cwd=ROOT)
            if status:
                sys.exit(status)
            needs = json.loads(answer.read_text())
        if facts and needs["right"]:
            with contextlib.suppress(OSError):  # the next run checks again
                file.parent.mkdir(parents=True, exist_ok=True)
                write_file(file, json.dumps(needs | {"facts": facts}).encode())
    os.environ.update(needs["environment"])
    return needs
