"""
Makes the runs of compare and screen, and keeps their logs.

A run is kept under everything that its loss depends on: source, settings, data, machine, compiler,
PyTorch, threads and processes. Its log is logs/compare/runs/KEY/seedN.txt, where KEY is a hash of all
that. Later comparisons use it. You may delete these folders at any time.

A process of our scripts makes several runs, because only the first one has to compile. A command (see
compare --command) makes one. It runs in a fresh copy of its folder, and its log is the file that it writes
below logs/, or else its output.
"""

import contextlib
import fcntl
import glob
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools import launch
from tools.common import ROOT, LogError, UsageError, chosen_threads, short, usable_cores
from tools.compare.sources import Variant, link_data, script_environment
from tools.logs import SUFFIXES, Log, parse_log

Wanted = Iterable[tuple[Variant, Iterable[int]]]  # runs to make, in this order: variants with seeds

FOLDER = ROOT / "logs" / "compare"
RUNS_A_PROCESS = 2  # a start costs little, and small chunks decide sooner
# Environment variables that change the compiled code
COMPILER_VARIABLES = ("CXX", "TORCHINDUCTOR_CPP_MARCH", "TORCH_COMPILE_DISABLE", "ATEN_CPU_CAPABILITY")


class RunError(Exception):
    """A run failed. The message has the last lines of its output."""


@dataclass
class Task:
    """Runs of one variant for one process to make."""

    variant: Variant
    seeds: list[int]  # without those of finished runs


@dataclass
class Worker:
    """A process at work on a task."""

    task: Task
    child: subprocess.Popen
    folder: Path
    started: float = field(default_factory=time.monotonic)


@dataclass
class Pool:
    """The runs of a command: what they have in common, those that are there, and those under way."""

    facts: dict  # what losses depend on, apart from the source and its settings
    jobs: int  # processes at a time
    lock: int  # file descriptor that runs inherit: the folder stays locked while one is alive
    timeout: float = math.inf  # minutes that a process may take
    runs: dict[str, dict[int, Log]] = field(default_factory=dict)  # name of the variant -> seed -> log
    workers: list[Worker] = field(default_factory=list)
    new: set[tuple[str, int]] = field(default_factory=set)  # runs of this session: variant's name, seed
    started: float = field(default_factory=time.monotonic)

    def key(self, variant: Variant) -> str:
        text = json.dumps([variant.digest(), 0, self.facts], sort_keys=True)  # 0: as in older kept runs
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def folder(self, variant: Variant) -> Path:
        return FOLDER / "runs" / self.key(variant)

    @property
    def made(self) -> int:
        """Runs in this session."""
        return len(self.new)

    def minutes(self) -> float:
        """Since the start."""
        return (time.monotonic() - self.started) / 60

    def time_left(self, runs: int) -> str:
        """In words, for this many runs to come."""
        if self.made < 2 * self.jobs:
            return "time unknown"
        hours, minutes = divmod(round(self.minutes() / self.made * runs), 60)
        return f"{hours}:{minutes:02} h left"


# -----------------------------------------------------------------------------
# Display


def show_line(text: str = "") -> None:
    """Shows at most 79 columns on standard error. On a terminal, the next line replaces them."""
    text = short(text, 79)
    if sys.stderr.isatty():
        print(f"{text:79}\r", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr)


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
        except OSError:
            pass  # some network file systems have no locks
        shutil.rmtree(FOLDER / "working", ignore_errors=True)
        try:
            yield lock.fileno()
        finally:
            shutil.rmtree(FOLDER / "working", ignore_errors=True)


# -----------------------------------------------------------------------------
# What a loss depends on


def runs_a_process(variant: Variant) -> int:
    return 1 if variant.command else RUNS_A_PROCESS


def are_commands(variants: list[Variant]) -> bool:
    return any(variant.command for variant in variants)


def on_gpu(variants: list[Variant]) -> bool:
    """Commands, and scripts that can't be asked, may always use the machine's GPU."""
    return any(v.settings["device"] == "cuda" if v.settings else launch.gpu_maker() for v in variants)


def cpu_line(name: str) -> str:
    """The first value of this name in /proc/cpuinfo; "" if there is none."""
    info = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^(?:{name})\s*: (.*)", info, re.MULTILINE)
    return found[1] if found else ""


def activation_dtype(variants: list[Variant]) -> str:
    """The dtype of train_gpt.py's activations on this machine."""
    flags = cpu_line("flags|Features").split()
    if on_gpu(variants) or {"avx512_bf16", "amx_bf16", "bf16"} & set(flags):
        return "bfloat16"
    return "float32"


def machine_facts(variants: list[Variant], threads: int, processes: int) -> dict:
    """The machine and its software, as far as losses depend on them."""
    flags = cpu_line("flags|Features")
    machine = f"{cpu_line('model name') or platform.machine()}, {usable_cores()} cores"
    if on_gpu(variants):
        gpus = launch.output_of(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        )
        machine = "; ".join((gpus or "a GPU").strip().splitlines())
    compiler = os.environ.get("CXX", "g++").split()[:1]
    version = launch.output_of(*compiler, "--version") or ""
    names = COMPILER_VARIABLES
    if are_commands(variants):
        names += ("DATA_PATH",)  # where modded-nanogpt's scripts find their data
    return {
        "machine": machine,
        "instruction sets": hashlib.sha256(flags.encode()).hexdigest()[:16] if flags else "",
        "torch": importlib.metadata.version("torch"),
        "numpy": importlib.metadata.version("numpy"),
        "compiler": version.strip().splitlines()[:1],
        "environment": {name: os.environ.get(name) for name in names},
        "threads": threads,
        "processes": processes,
    }


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


def open_pool(variants: list[Variant], lock: int, jobs: int | None = None, processes: int = 1) -> Pool:
    """Gets the data of the variants, and finds the runs that are kept. `processes` are those of a run.

    On a CPU, the default is a job per core, because that gives the most runs an hour, and one job for
    commands, which may use all cores. On GPUs, and with several processes per run, there is one run at a
    time. Raises UsageError.
    """
    for variant in variants:
        if "train_files" in (variant.settings or {}):
            launch.get_data(sys.executable, variant.settings)
        if not variant.command:
            link_data(variant.folder / "data")
    if on_gpu(variants) or processes > 1:
        jobs = 1
    jobs = jobs or (1 if are_commands(variants) else usable_cores())
    threads = chosen_threads() or max(1, usable_cores() // (jobs * processes))
    facts = machine_facts(variants, threads, processes)
    facts["data"] = data_facts(variants)
    pool = Pool(facts, jobs, lock)
    for variant in variants:
        pool.runs[variant.name] = kept_runs(pool, variant)
    check_compiled(pool)
    return pool


# -----------------------------------------------------------------------------
# Kept runs


def is_complete(log: Log, variant: Variant) -> bool:
    """A command may stop before the end of its schedule, and needs no times and no source in its log."""
    if variant.command:
        return log.end is not None and math.isfinite(log.end.val_loss)
    return not log.incomplete


def complete_log(path: Path, variant: Variant) -> Log | None:
    try:
        log = parse_log(path)
    except LogError:
        return None
    return log if is_complete(log, variant) else None


def kept_runs(pool: Pool, variant: Variant) -> dict[int, Log]:
    """The runs of a variant that are kept, by seed."""
    found = {}
    for path in pool.folder(variant).glob("seed*.txt"):
        seed = path.stem.removeprefix("seed")
        log = complete_log(path, variant)
        if log is not None and seed.isdecimal():  # a copy may be called "seed1 (1).txt"
            found[int(seed)] = log
    return found


def keep_log(pool: Pool, task: Task, log: Log) -> None:
    """Moves the log of a finished run to the kept ones."""
    seed = task.seeds.pop(0)
    folder = pool.folder(task.variant)
    folder.mkdir(parents=True, exist_ok=True)
    log.path = log.path.replace(folder / f"seed{seed}.txt")
    pool.runs[task.variant.name][seed] = log
    pool.new.add((task.variant.name, seed))


def check_compiled(pool: Pool) -> None:
    """Raises UsageError if some runs were compiled and others were not."""
    logs = [log for runs in pool.runs.values() for log in runs.values()]
    if len({log.uncompiled for log in logs}) == 2:
        raise UsageError(
            "some of these runs were compiled, and others were not, so they can't be compared (the logs say "
            f"why); move {FOLDER / 'runs'} away, and run the same command again"
        )


# -----------------------------------------------------------------------------
# Processes


def start_process(pool: Pool, command: str | list[str], console: Path, **more) -> subprocess.Popen:
    """Its output goes into a new file. `more` are options of Popen."""
    with open(console, "wb") as output:
        return subprocess.Popen(
            command,
            pass_fds=[pool.lock],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            **more,
        )


def start_script(
    pool: Pool, variant: Variant, seeds: list[int], folder: Path, threads: int
) -> subprocess.Popen:
    """Starts a script that makes the runs of these seeds, one after the other. Its logs and the file
    console.txt lie in the folder."""
    command = [sys.executable]
    processes = pool.facts["processes"]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["-m", variant.module(), *variant.options]
    command += ["--log_dir", str(folder / "logs"), "--seed", str(seeds[0])]
    if len(seeds) > 1:
        command += ["--num_runs", str(len(seeds))]
    if "val_loss_every" in (variant.settings or {}):
        command += ["--val_loss_every", "0"]
    env = script_environment() | {"OMP_NUM_THREADS": str(threads)}
    return start_process(pool, command, folder / "console.txt", cwd=variant.folder, env=env)


def start_command(pool: Pool, variant: Variant, seed: int, folder: Path) -> subprocess.Popen:
    """Starts a command in a fresh copy of its folder. `python` and `torchrun` are those of our environment."""
    copy = folder / "copy"
    shutil.copytree(variant.folder, copy, symlinks=True)
    shutil.rmtree(copy / "logs", ignore_errors=True)  # those that are in the repository
    command = f"{variant.command} {shlex.join(variant.options)}".replace("{seed}", str(seed))
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    env.pop("PYTHONPATH", None)
    if pool.jobs > 1:
        env["OMP_NUM_THREADS"] = str(pool.facts["threads"])
    return start_process(pool, command, folder / "console.txt", shell=True, cwd=copy, env=env)


def start(pool: Pool, task: Task) -> None:
    variant = task.variant
    folder = FOLDER / "working" / f"{pool.key(variant)}_seed{task.seeds[0]}"
    folder.mkdir(parents=True)
    if variant.command:
        child = start_command(pool, variant, task.seeds[0], folder)
    else:
        child = start_script(pool, variant, task.seeds, folder, pool.facts["threads"])
    pool.workers.append(Worker(task, child, folder))


def stop(pool: Pool, worker: Worker) -> None:
    """Ends a process at once. Torchrun's workers have sessions of their own, so it must end them."""
    if pool.facts["processes"] > 1 or worker.task.variant.command:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(worker.child.pid, signal.SIGTERM)
            worker.child.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.child.pid, signal.SIGKILL)
    worker.child.wait()
    pool.workers.remove(worker)
    shutil.rmtree(worker.folder, ignore_errors=True)


def last_lines(console: Path) -> str:
    """The end of what a process printed, without what torchrun adds."""
    text = console.read_text(encoding="utf-8", errors="replace").strip()
    lines = re.split(r"\n.* failed \(exitcode", text)[0].splitlines()
    # where torch.compile fails, the error comes long before the end
    errors = [line for line in lines[:-12] if re.match(r"[\w.]+Error: ", line)]
    return "\n".join(errors[-1:] + lines[-12:])


def fail(worker: Worker, reason: str):
    task = worker.task
    raise RunError(
        f"{last_lines(worker.folder / 'console.txt')}\nerror: a run failed: {task.variant.name}, seed "
        f"{task.seeds[0]} ({reason}). Above are the last lines that it printed"
    )


def log_of_command(pool: Pool, worker: Worker) -> Log:
    """The log of a command that has ended with status 0. Raises RunError."""
    variant = worker.task.variant
    files = (worker.folder / "copy" / "logs").rglob("*")
    logs = [file for file in files if file.suffix in SUFFIXES]
    if len(logs) > 1:
        fail(worker, f"it wrote {len(logs)} logs below logs/, but a command must make one run")
    try:
        log = parse_log(logs[0] if logs else worker.folder / "console.txt")
    except LogError as e:
        fail(worker, f"no log below logs/, and its output is none: {e}")
    if not is_complete(log, variant):
        fail(worker, "its log has no finite val_loss after the last step")
    earlier = list(pool.runs[variant.name].values())
    if earlier and earlier[0].end.step != log.end.step:
        fail(worker, f"it ended at step {log.end.step}, an earlier run at step {earlier[0].end.step}")
    losses = {run.end.val_loss for run in [log, *earlier]}
    if len(earlier) >= 2 and len(losses) == 1:
        fail(worker, "all runs end at the same loss; write {seed} where the command sets its seed")
    return log


def finished_logs(pool: Pool, worker: Worker, status: int | None) -> Iterator[Log]:
    """Those that don't grow any more. Raises RunError."""
    variant = worker.task.variant
    if variant.command:
        if status == 0:
            yield log_of_command(pool, worker)
        return
    paths = sorted((worker.folder / "logs").glob("*.txt"), key=lambda path: path.stat().st_mtime)
    if status is None:
        paths = paths[:-1]
    for path in paths:
        log = complete_log(path, variant)
        if log is None:
            return
        yield log


def collect(pool: Pool, worker: Worker) -> None:
    """Keeps the runs that a process has finished, and removes the process if it has ended.

    Raises RunError if runs are missing, or take too long.
    """
    status = worker.child.poll()
    task = worker.task
    for log in finished_logs(pool, worker, status):
        keep_log(pool, task, log)
        worker.started = time.monotonic()
    if status is None:
        if time.monotonic() - worker.started > 60 * pool.timeout:
            fail(worker, f"it took more than --run_timeout {pool.timeout:g} minutes")
        return
    if task.seeds:
        fail(worker, f"exit status {status}" if status else "its log is incomplete")
    stop(pool, worker)


def next_task(pool: Pool, wanted: Wanted) -> Task | None:
    """The first of these runs that are neither there nor under way; None if there are none."""
    for variant, seeds in wanted:
        taken = set(pool.runs[variant.name])
        for worker in pool.workers:
            if worker.task.variant is variant:
                taken.update(worker.task.seeds)
        missing = [seed for seed in seeds if seed not in taken]
        if missing:
            # Those that follow each other, for one process
            run = [seed for i, seed in enumerate(missing) if seed == missing[0] + i]
            return Task(variant, run[: runs_a_process(variant)])
    return None


def make_runs(pool: Pool, wanted: Callable[[], Wanted], enough: Callable[[int], bool]) -> None:
    """Makes the runs of wanted() until all are there, or until enough(new) is true. Both are asked ten
    times a second; `new` is the number of runs that were finished meanwhile. Processes that are still at
    work in the end are stopped. Raises RunError and UsageError."""
    try:
        while True:
            while len(pool.workers) < pool.jobs and (task := next_task(pool, wanted())):
                start(pool, task)
            if not pool.workers:
                return
            time.sleep(0.1)
            made = pool.made
            for worker in list(pool.workers):
                collect(pool, worker)
            if pool.made > made:
                check_compiled(pool)
            if enough(pool.made - made):
                return
    finally:
        for worker in list(pool.workers):
            stop(pool, worker)
