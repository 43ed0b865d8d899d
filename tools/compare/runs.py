"""
Makes the runs of compare.py, and keeps their logs.

A run is kept under everything that its loss depends on: source, settings, data, machine, compiler,
PyTorch, threads and processes. Its log is logs/compare/runs/KEY/seedN.txt, where KEY is a hash of all
that. Later comparisons use it. about.json in the same folder says in words what was run.

A process makes several runs, because only the first one has to compile.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools import launch
from tools.compare.sources import Variant
from tools.common import ROOT, LogError, UsageError, write_file
from tools.logs import Log, parse_log
from tools.common import ROOT, environment, usable_cores

FOLDER = ROOT / "logs" / "compare"
RUNS_A_PROCESS = 8
LARGEST_POOL = 2 * 1024**3  # bytes
# Environment variables that change the compiled code
COMPILER_VARIABLES = ("CXX", "TORCHINDUCTOR_CPP_MARCH", "TORCH_COMPILE_DISABLE", "ATEN_CPU_CAPABILITY")


class RunError(Exception):
    """A run failed. The message has the last lines of its output."""


@dataclass
class Setup:
    """What all runs of a comparison have in common."""

    facts: dict     # what losses depend on, apart from the source and its settings
    threads: int    # per process
    processes: int  # per run; more than one are started with torchrun
    lock: int       # file descriptor that runs inherit: the folder stays locked while one is alive

    def key(self, variant: Variant) -> str:
        text = json.dumps([variant.digest(), 0, self.facts], sort_keys=True)  # 0: as in older kept runs
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def folder(self, variant: Variant) -> Path:
        return FOLDER / "runs" / self.key(variant)

    def launch(self, variant: Variant, options: list[str], stdout, stderr) -> subprocess.Popen:
        """Starts a script with more options than those of the variant."""
        command = [sys.executable]
        if self.processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
        return subprocess.Popen(
            [*command, "-m", variant.module(), *variant.options, *options],
            cwd=variant.folder,
            env=os.environ | environment() | {"OMP_NUM_THREADS": str(self.threads)},
            pass_fds=[self.lock],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


@dataclass
class Task:
    """Runs of one variant for one process to make."""

    variant: Variant
    seeds: range
    second_try: bool = False


@dataclass
class Worker:
    """A process at work on a task."""

    task: Task
    child: subprocess.Popen
    folder: Path
    seen: list[Path] = field(default_factory=list)  # logs, in the order of their runs
    kept: int = 0


# -----------------------------------------------------------------------------
# The lock


@contextlib.contextmanager
def locked_folder() -> Iterator[int]:
    """Locks FOLDER, so that only one comparison or screen makes runs in this checkout. Gives the lock's
    file descriptor. FOLDER/working is empty at first, and deleted in the end. Raises UsageError and
    OSError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another comparison or screen is running in {FOLDER}; wait for it to finish. If it was "
                f'killed, end the runs that it left: pkill -KILL -f "{FOLDER}/working"'
            ) from None
        except OSError:  # some network file systems have no locks
            print(
                f"warning: {FOLDER} can't be locked; don't run two comparisons there at once",
                file=sys.stderr,
            )
        shutil.rmtree(FOLDER / "working", ignore_errors=True)
        try:
            yield lock.fileno()
        finally:
            shutil.rmtree(FOLDER / "working", ignore_errors=True)


# -----------------------------------------------------------------------------
# What a loss depends on


def output_of(*command: str) -> str:
    """What a program prints; "" if it fails or doesn't exist."""
    return (launch.output_of(*command) or "").strip()


def cpu_line(name: str) -> str:
    """The first value of this name in /proc/cpuinfo; "" if there is none."""
    info = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^(?:{name})\s*: (.*)", info, re.MULTILINE)
    return found[1] if found else ""


def activation_dtype(on_gpu: bool) -> str:
    """The dtype of train_gpt.py's activations on this machine."""
    flags = cpu_line("flags|Features").split()
    if on_gpu or {"avx512_bf16", "amx_bf16", "bf16"} & set(flags):
        return "bfloat16"
    return "float32"


def cpu_facts() -> dict[str, str]:
    model = cpu_line("model name") or platform.machine()
    flags = cpu_line("flags|Features")
    flags_digest = hashlib.sha256(flags.encode()).hexdigest()[:16] if flags else ""
    return {
        "machine": f"{model}, {usable_cores()} cores",
        "instruction sets": flags_digest,
    }


def machine_facts(on_gpu: bool, threads: int, processes: int) -> dict:
    """The machine and its software, as far as losses depend on them."""
    facts = cpu_facts()
    if on_gpu:
        gpus = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        facts["machine"] = "; ".join(gpus.splitlines()) or "a GPU"
    compiler = os.environ.get("CXX", "g++")
    facts["torch"] = importlib.metadata.version("torch")
    facts["numpy"] = importlib.metadata.version("numpy")
    facts["compiler"] = output_of(*compiler.split()[:1], "--version").splitlines()[:1]
    facts["environment"] = {name: os.environ.get(name) for name in COMPILER_VARIABLES}
    facts["threads"] = threads
    facts["processes"] = processes
    return facts


def data_facts(variants: list[Variant]) -> dict[str, str]:
    """SHA-256 of each data file that the variants read, by name. Raises UsageError if a variant's
    pattern matches none.

    For scripts that don't tell their settings, all data files count.
    """
    files = {}
    for variant in variants:
        settings = variant.settings or {}
        for option in ("train_files", "val_files"):
            pattern = settings.get(option, "data/*/*.bin")
            matching = glob.glob(pattern, root_dir=variant.folder)
            if option in settings and not matching:
                raise UsageError(
                    f"{variant.name}: --{option}: no file matches {pattern!r}; your own data must lie in a "
                    "folder of data/, or have an absolute path"
                )
            files |= {str(Path(name)): variant.folder / name for name in matching}
    found = {}
    for name in sorted(files):
        with open(files[name], "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


# -----------------------------------------------------------------------------
# Kept runs


def complete_log(path: Path) -> Log | None:
    try:
        log = parse_log(path)
    except LogError:
        return None
    return None if log.incomplete else log


def kept_runs(setup: Setup, variant: Variant) -> dict[int, Log]:
    """The runs of a variant that are kept, by seed."""
    found = {}
    for path in setup.folder(variant).glob("seed*.txt"):
        seed = path.stem.removeprefix("seed")
        log = complete_log(path)
        if seed.isdigit() and log is not None:
            found[int(seed)] = log
    return found


def describe(setup: Setup, variant: Variant) -> None:
    """Writes about.json into the variant's folder."""
    about = {"name": variant.name, "options": variant.options, **setup.facts}
    write_file(setup.folder(variant) / "about.json", json.dumps(about, indent=1).encode())


def check_compiled(runs: dict[str, dict[int, Log]]) -> None:
    """Raises UsageError if some runs were compiled and others were not. `runs` is by name and seed."""
    examples = {}
    folders = {False: set(), True: set()}
    for name, logs in runs.items():
        for seed, log in logs.items():
            examples.setdefault(log.uncompiled, f"{name}, seed {seed} ({log.path})")
            folders[log.uncompiled].add(log.path.parent.name)
    if len(examples) == 2:
        compiled = " ".join(sorted(folders[False]))
        uncompiled = " ".join(sorted(folders[True]))
        raise UsageError(
            f"these runs can't be compared: {examples[False]} was compiled, and {examples[True]} was not "
            f"(its log says why). In {FOLDER / 'runs'}, delete the folders of the compiled runs "
            f"({compiled}) or of the others ({uncompiled}), and run the same command again"
        )


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def last_used(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)


def make_room(used: set[Path]) -> None:
    """Deletes the oldest kept runs while there are more than 2 GB, but none of the folders `used`."""
    folders = [folder for folder in (FOLDER / "runs").glob("*") if folder.is_dir()]
    sizes = {folder: folder_size(folder) for folder in folders}
    for folder in sorted(folders, key=last_used):
        if sum(sizes.values()) <= LARGEST_POOL:
            return
        if folder not in used:
            shutil.rmtree(folder)
            del sizes[folder]


def list_runs() -> list[str]:
    """Lines that say what is kept."""
    lines = []
    for about in sorted((FOLDER / "runs").glob("*/about.json"), key=lambda path: path.stat().st_mtime):
        facts = json.loads(about.read_text(encoding="utf-8"))
        count = len(list(about.parent.glob("seed*.txt")))
        size = folder_size(about.parent) / 1024**2
        lines.append(f"{about.parent.name}  {count:4} runs  {size:7.1f} MiB  {facts['name']}")
        lines.append(f"    {facts['machine']}, {facts['threads']} threads, PyTorch {facts['torch']}")
    return lines or ["no runs are kept"]


def clear_runs() -> None:
    """Deletes all kept runs."""
    shutil.rmtree(FOLDER / "runs", ignore_errors=True)


# -----------------------------------------------------------------------------
# Processes


def start(setup: Setup, task: Task) -> Worker:
    variant = task.variant
    name = f"{setup.key(variant)}_seed{task.seeds[0]}"
    folder = FOLDER / "working" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = ["--log_dir", str(folder / "logs"), "--seed", str(task.seeds[0])]
    if len(task.seeds) > 1:
        options += ["--num_runs", str(len(task.seeds))]
    if "val_loss_every" in (variant.settings or {}):
        options += ["--val_loss_every", "0"]
    with open(folder / "console.txt", "wb") as console:
        child = setup.launch(variant, options, console, console)
    return Worker(task, child, folder)


def stop(setup: Setup, worker: Worker) -> None:
    """Ends a process at once. Torchrun's workers have sessions of their own, so it must end them."""
    if setup.processes > 1:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            worker.child.terminate()
            worker.child.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.child.pid, signal.SIGKILL)
    worker.child.wait()
    shutil.rmtree(worker.folder, ignore_errors=True)


def keep_log(setup: Setup, worker: Worker, path: Path) -> Log | None:
    """Moves the log of a finished run to the kept ones. None if it isn't whole."""
    log = complete_log(path)
    if log is None:
        return None
    task = worker.task
    seed = task.seeds[worker.kept]
    home = setup.folder(task.variant)
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "about.json").exists():
        describe(setup, task.variant)
    log.path = home / f"seed{seed}.txt"
    path.replace(log.path)
    worker.kept += 1
    return log


def last_lines(worker: Worker) -> list[str]:
    """The end of what a process printed, without what torchrun adds."""
    text = (worker.folder / "console.txt").read_text(encoding="utf-8", errors="replace").strip()
    return re.split(r"\n.* failed \(exitcode", text)[0].splitlines()[-12:]


def collect(setup: Setup, worker: Worker, runs: dict[int, Log]) -> bool:
    """Keeps the runs that the process has finished, and adds them to `runs`, by seed. Returns whether
    the process has ended.

    Raises RunError if it failed. A process that a signal killed is no failure: its task isn't done.
    """
    status = worker.child.poll()
    logs = (worker.folder / "logs").glob("*.txt")
    new = [path for path in logs if path not in worker.seen]
    worker.seen += sorted(new, key=lambda path: path.stat().st_mtime)
    # The last log may still grow
    finished = len(worker.seen) if status is not None else len(worker.seen) - 1
    while worker.kept < finished:
        seed = worker.task.seeds[worker.kept]
        log = keep_log(setup, worker, worker.seen[worker.kept])
        if log is None:
            break
        runs[seed] = log
    if status is None:
        return False
    task = worker.task
    if status < 0 and not task.second_try:
        return True
    if status != 0 or worker.kept < len(task.seeds):
        seed = task.seeds[min(worker.kept, len(task.seeds) - 1)]
        reason = f"exit status {status}" if status else "its log is incomplete"
        lines = last_lines(worker)
        lines.append(
            f"error: a run failed: {task.variant.name}, seed {seed} ({reason}). Above are the last "
            "lines that it printed"
        )
        raise RunError("\n".join(lines))
    return True


def collect_all(setup: Setup, workers: list[Worker], runs: dict[str, dict]) -> tuple[int, list[Task]]:
    """Keeps the runs that the processes have finished, by name and seed, and removes processes that have
    ended from `workers`. Returns the number of new runs, and the tasks that killed processes left undone.

    Raises RunError."""
    before = sum(map(len, runs.values()))
    undone = []
    for worker in list(workers):
        task = worker.task
        if collect(setup, worker, runs[task.variant.name]):
            workers.remove(worker)
            shutil.rmtree(worker.folder, ignore_errors=True)
            left = task.seeds[worker.kept :]
            if left:
                undone.append(Task(task.variant, left, second_try=True))
    return sum(map(len, runs.values())) - before, undone
