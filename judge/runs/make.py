"""
Makes the runs of compare and screen, and keeps their logs.

A run is kept under all that it could read (see same_run.py). Its log is logs/compare/runs/KEY_TIME/seedN.txt,
where KEY is a hash of all that; facts.json beside it says what it was. Later comparisons use the run if
what it read elsewhere hasn't changed. You may delete these folders at any time.

A process of our scripts makes several runs, because only the first one has to compile. A command (see
compare --command) makes one. It runs in a fresh copy of its folder, and its log is the file that it writes
below logs/, or else its output. watch/sitecustomize.py, which each Python of a run imports, writes down what
it reads outside of its copy.
"""

import argparse
import contextlib
import fcntl
import itertools
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

from judge.logs.comparable import (
    SEEDS,
    add_metric,
    by_the_clock,
    check_between,
    check_repeats,
    not_whole,
)
from judge.runs.same_run import (
    OF_A_JOB,
    SYSTEM,
    changes,
    hash_copy,
    hash_file,
    hash_read,
    hash_text,
    load_hashes,
    machine_facts,
    named_paths,
    packages,
    run_environment,
)
from judge.runs.sources import Variant, fill_in, link_data
from judge.logs.read import SUFFIXES, Log, find_logs, parse_log
from judge.commands import UserError, output_file, positive, whole_number
from judge.environment import chosen_threads, matches, usable_cores
from judge.project import ROOT
from judge.files import write_file
from judge.processes import has_nvidia_gpu
from judge.text import as_json, short

Wanted = Iterable[tuple[Variant, Iterable[int]]]  # runs to make, in this order: variants with seeds

FOLDER = ROOT / "logs" / "compare"
MAY_DIFFER = {"hardware", "GPU limits", "compiled", "target_val_loss", "log"}  # between variants
RUNS_A_PROCESS = 2  # a start costs little, and small chunks decide sooner
CHANGES = "changes"  # instead of the hash of what a run reads: no later run is the same
WATCH = Path(__file__).resolve().parent / "watch"


@dataclass
class Worker:
    """A process that makes runs of a variant."""

    variant: Variant
    seeds: list[int]  # without those of finished runs
    child: subprocess.Popen
    folder: Path
    started: float = field(default_factory=time.time)


@dataclass
class Pool:
    """What the runs of a command have in common, and those under way."""

    args: argparse.Namespace  # see add_run_options
    facts: dict  # the software and the machine
    jobs: int  # processes at a time
    lock: int  # file descriptor that runs inherit: the folder stays locked while one is alive
    workers: list[Worker] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)  # all that may have runs
    fixed_time: bool = False  # runs take a time, not a number of steps; see check_clock
    made: int = 0  # runs in this session
    first: Log | None = None  # with which all runs are compared
    started: float = field(default_factory=time.monotonic)

    def minutes(self) -> float:
        """Since the start."""
        return (time.monotonic() - self.started) / 60

    def late(self) -> bool:
        return self.minutes() > 60 * self.args.hours

    def time_left(self, runs: int) -> str:
        """In words, for this many runs to come."""
        if self.made < 2 * self.jobs:
            return "time unknown"
        hours = self.minutes() / 60
        left = min(hours / self.made * runs, self.args.hours - hours)
        return f"{max(0, left):.1f} h left"


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of compare and screen that say how to make runs."""
    add = parser.add_argument
    add("--recipe", metavar="NAME", help="train recipes/NAME.py; default: train_gpt.py")
    add("--command", metavar="COMMAND", help="train with this shell command instead")
    no_seed = "the runs may have no seed, or all the same one"
    add("--no_seed", action="store_true", help=no_seed)
    early = "the runs of --command end before their last step, all at the same one"
    add("--stops_early", action="store_true", help=early)
    add_metric(parser)
    add("--hours", type=float, default=math.inf, metavar="H", help="stop after H hours")
    timeout = "end the command if a run takes longer than this"
    add("--run_timeout", type=positive, default=math.inf, metavar="MINUTES", help=timeout)
    add("--seed", type=int, default=0, metavar="N", help="first seed; default: 0")
    add("--jobs", type=whole_number, metavar="N", help="runs at a time on a CPU; default: one per core")
    processes = "processes per run; default: 1"
    add("--nproc_per_node", type=whole_number, default=1, metavar="N", help=processes)
    add("--json", type=output_file, metavar="FILE", help="write all numbers")


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


def scratch() -> Path:
    """For the files of this process. Without locks, there may be others."""
    return FOLDER / "working" / f"{platform.node()}-{os.getpid()}"


@contextlib.contextmanager
def locked_folder() -> Iterator[int]:
    """Locks FOLDER, so that only one comparison or screen makes runs in this checkout. Gives the lock's
    file descriptor. scratch() is deleted in the end. Raises UserError and OSError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(FOLDER / "working", ignore_errors=True)  # of processes that were killed
        except BlockingIOError:
            raise UserError(
                f"another comparison or screen is running in {FOLDER}; wait for it to finish. If it was "
                f'killed, end the runs that it left: pkill -KILL -f "{FOLDER}/working"'
            ) from None
        except OSError:
            pass  # some network file systems have no locks
        load_hashes(FOLDER / "hashes")
        try:
            yield lock.fileno()
        finally:
            shutil.rmtree(scratch(), ignore_errors=True)
            with contextlib.suppress(OSError):
                scratch().parent.rmdir()


# -----------------------------------------------------------------------------
# What a loss depends on


def runs_a_process(variant: Variant) -> int:
    return 1 if variant.command else RUNS_A_PROCESS


def on_gpu(variants: list[Variant]) -> bool:
    """Commands may always use the machine's GPU."""
    return any(has_nvidia_gpu() if v.command else v.settings["device"] == "cuda" for v in variants)


def identity(variant: Variant, facts: dict) -> dict[str, dict]:
    """All that a run could read, but for what it reads outside of its copy (see same_run.py)."""
    is_command = bool(variant.command)
    environment = {}
    for name, value in run_environment(is_command).items():
        if not matches(name, OF_A_JOB):
            environment[name] = hash_text(value)  # it may be a secret
    return {
        "run": variant.run(),
        "files": hash_copy(variant.folder, is_command),
        "environment": environment,
        "software": facts,
    }


def check_unchanged(pool: Pool, variant: Variant) -> None:
    """Raises UserError if what a run could read has changed. A run may write new files, but not into data/,
    where the next run could find them."""
    before = variant.identity
    now = identity(variant, pool.facts | packages())
    known = before["files"]
    now["files"] = {
        name: value for name, value in now["files"].items() if name in known or name.startswith("data/")
    }
    changed = short(", ".join(changes(before, now)), 200)
    if changed:
        raise UserError(
            f"{changed} while {variant.name} trained, so this run isn't kept; run the same "
            "command again (a run may write files, but not change those that it finds)"
        )


def code_of(kept: dict) -> list:
    return [kept["run"], [pair for pair in kept["files"].items() if pair[0].endswith(".py")]]


def why_again(variants: list[Variant]) -> str:
    """What has changed since runs were kept of the same code with the same settings, for the first variant
    that has none now. "" if there are no such runs."""
    facts = [json.loads(file.read_bytes()) for file in FOLDER.glob("runs/*/facts.json")]
    for new in [variant.identity for variant in variants if not variant.runs]:
        same = [changes(kept, new | read_now(kept)) for kept in facts if code_of(kept) == code_of(new)]
        if same:
            return short(", ".join(min(same, key=len)), 200)
    return ""


def check_measured(pool: Pool, log: Log) -> None:
    """Raises UserError if the loss of a run isn't measured like that of the others."""
    pool.first = pool.first or log
    for fault in check_between([[pool.first], [log]], MAY_DIFFER):
        raise UserError(fault)


def add_variants(pool: Pool, variants: list[Variant]) -> None:
    """Links their data, and finds their kept runs. Raises UserError."""
    pool.variants += variants
    for variant in variants:
        link_data(variant.folder / "data", variant.origin / "data")
        variant.identity = identity(variant, pool.facts)
        variant.runs = kept_runs(pool, variant)
        for log in variant.runs.values():
            check_measured(pool, log)
        check_clock(pool, variant)


def check_clock(pool: Pool, variant: Variant) -> None:
    """Runs of a fixed time take turns, and none of another time is used: the machine's speed counts."""
    if not by_the_clock(variant.runs.values()):
        return
    pool.jobs = 1
    pool.fixed_time = True
    for other in pool.variants:
        if other.runs.keys() > other.new:
            show_line()
            print(f"training {other.name} again, because its runs have a fixed time", file=sys.stderr)
        other.runs = {seed: log for seed, log in other.runs.items() if seed in other.new}


def open_pool(variants: list[Variant], lock: int, args: argparse.Namespace) -> Pool:
    """Finds the runs that are kept.

    On a CPU, the default is a job per core, because that gives the most runs an hour, and one job for
    commands, which may use all cores. On GPUs, and with several processes per run, there is one run at a
    time. Raises UserError.
    """
    processes = args.nproc_per_node
    jobs = args.jobs or (1 if args.command else usable_cores())
    if on_gpu(variants) or processes > 1:
        jobs = 1
    threads = chosen_threads() or max(1, usable_cores() // (jobs * processes))
    facts = machine_facts(on_gpu(variants), threads, processes)
    pool = Pool(args, facts, jobs, lock)
    add_variants(pool, variants)
    return pool


# -----------------------------------------------------------------------------
# Kept runs


def complete_log(pool: Pool, path: Path, variant: Variant) -> Log | None:
    """None if it isn't whole. The log of a command needs no times and no source."""
    try:
        log = parse_log(path, pool.args.metric)
    except UserError:
        return None
    fault = not_whole(log, pool.args.stops_early) if variant.command else log.incomplete
    return None if fault else log


def read_now(kept: dict) -> dict[str, dict]:
    """What kept runs would read today."""
    return {"read": {name: hash_read(name) for name in kept.get("read", {})}}


def kept_runs(pool: Pool, variant: Variant) -> dict[int, Log]:
    """The runs of a variant that are kept, by seed."""
    for file in FOLDER.glob(f"runs/{variant.key()}_*/facts.json"):
        kept = json.loads(file.read_bytes())
        if kept["read"] == read_now(kept)["read"]:
            variant.read = kept["read"]
            variant.place = file.parent
    found = {}
    for path in variant.place.glob("seed*.txt") if variant.place else []:
        seed = path.stem.removeprefix("seed")
        log = complete_log(pool, path, variant)
        if log is not None and re.fullmatch(r"-?\d+", seed):  # a copy may be called "seed1 (1).txt"
            found[int(seed)] = log
    return found


def keep_log(pool: Pool, variant: Variant, seed: int, log: Log) -> None:
    """Moves the log of a finished run to the kept ones."""
    # runs that read other files with the same code have another folder
    variant.place = variant.place or FOLDER / "runs" / f"{variant.key()}_{time.time_ns()}"
    variant.place.mkdir(parents=True, exist_ok=True)
    write_file(variant.place / "facts.json", as_json(variant.identity | {"read": variant.read}))
    log.path = log.path.replace(variant.place / f"seed{seed}.txt")
    variant.runs[seed] = log
    variant.new.add(seed)
    pool.made += 1
    check_measured(pool, log)
    check_clock(pool, variant)


# -----------------------------------------------------------------------------
# Processes


def start_process(
    pool: Pool, variant: Variant, command: list[str], folder: Path, cwd: Path, env: dict[str, str]
) -> subprocess.Popen:
    """Its output goes into a new file of the folder. So does, by each Python, what it reads elsewhere."""
    watch = [str(folder / "opened"), *known_folders(variant)]
    with open(folder / "console.txt", "wb") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            # unbuffered: otherwise, lines of stderr come between the two halves of one of stdout
            env=env
            | {
                "PYTHONPATH": str(WATCH),
                "PYTHONUNBUFFERED": "1",
                "COMPARE_WATCH": json.dumps(watch),
            },
            pass_fds=[pool.lock],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
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
    if "val_loss_every" in variant.settings:
        command += ["--val_loss_every", "0"]
    env = run_environment(is_command=False) | {"OMP_NUM_THREADS": str(threads)}
    return start_process(pool, variant, command, folder, variant.folder, env)


def start_command(pool: Pool, variant: Variant, seed: int, folder: Path) -> subprocess.Popen:
    """Starts a command in a fresh copy of its folder."""
    copy = folder / "copy"
    shutil.copytree(variant.folder, copy, symlinks=True)
    shutil.rmtree(copy / "logs", ignore_errors=True)  # those that are in the repository
    command = variant.command.replace("PYTHONPATH=", f"PYTHONPATH={shlex.quote(str(WATCH))}:")
    command = fill_in(command, variant.options, seed)
    env = run_environment(is_command=True)
    if pool.jobs > 1:
        env["OMP_NUM_THREADS"] = str(pool.facts["threads"])
    # pipefail: a failure of the script counts, even if its output goes on to tee
    return start_process(pool, variant, ["bash", "-o", "pipefail", "-c", command], folder, copy, env)


@contextlib.contextmanager
def no_interrupt() -> Iterator[None]:
    """Signals wait until the end, for example until a process that was started is in the pool."""
    waiting = []
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(number)):  # not ignored
            before[number] = signal.signal(number, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            before[waiting[0]](waiting[0], None)


def start_worker(pool: Pool, variant: Variant, seeds: list[int]) -> None:
    folder = scratch() / f"{variant.key()}_seed{seeds[0]}"
    folder.mkdir(parents=True)
    with no_interrupt():
        if variant.command:
            child = start_command(pool, variant, seeds[0], folder)
        else:
            child = start_script(pool, variant, seeds, folder, pool.facts["threads"])
        pool.workers.append(Worker(variant, seeds, child, folder))


def end_worker(pool: Pool, worker: Worker) -> None:
    """Ends a process at once. Torchrun's workers have sessions of their own, so it must end them. A compiler
    that a script has started goes on: if it were killed, it could leave half a file in PyTorch's cache, and
    later runs would fail."""
    if pool.facts["processes"] > 1 or worker.variant.command:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(worker.child.pid, signal.SIGTERM)
            worker.child.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.child.pid, signal.SIGKILL)
    worker.child.kill()
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
    raise UserError(
        f"{last_lines(worker.folder / 'console.txt')}\na run failed: {worker.variant.name}, seed "
        f"{worker.seeds[0]} ({reason}). Above are the last lines that it printed"
    )


def known_folders(variant: Variant) -> list[str]:
    """Where a run reads nothing that isn't known before: its copy, the data that the copy links, the system
    and the environment."""
    links = [os.readlink(link) for link in (variant.folder / "data").rglob("*") if link.is_symlink()]
    return [str(FOLDER), *links, *SYSTEM]


def opened(worker: Worker) -> dict[str, str] | None:
    """What a run does with files and folders outside of its copy, in order: "rw" if it reads a file, and then
    writes it; "n" if a command only names it. None if no Python shows it (see watch/sitecustomize.py)."""
    file = worker.folder / "opened"
    if not file.exists():
        return None
    found = {}
    for line in file.read_text(errors="surrogateescape").splitlines():
        kind, name = line.split(" ", 1)
        found[name] = found.get(name, "") + kind
    return found


def check_reading(worker: Worker) -> None:
    """Raises UserError if a run reads a file of which it has a copy. Hidden folders hold caches and
    environments."""
    origin = f"{worker.variant.origin}/"
    for path, kinds in (opened(worker) or {}).items():
        inner = path.removeprefix(origin)
        hidden = "/." in f"/{os.path.dirname(inner)}"
        if inner != path and kinds[0] == "r" and not hidden and os.path.isfile(path):
            fail(worker, f"it read {path}, not its copy: use relative paths, and put data into data/")


def add_reads(worker: Worker) -> None:
    """Adds what a run has read outside of its copy to what is known of its variant. Raises UserError if it
    has changed since an earlier run."""
    variant = worker.variant
    files = opened(worker)
    if files is None:
        return cannot_keep(variant, "no Python ran that shows what it reads")
    data = f"{os.environ.get('DATA_PATH', '.')}/data"  # where modded-nanogpt's scripts find theirs
    started = ["\t".join([str(variant.folder), variant.command, *variant.options, data])]
    started += [text for text, kind in files.items() if kind == "s"]
    known = [variant.folder, variant.origin, *map(Path, known_folders(variant))]
    for text in started:
        files.pop(text, None)
        for path in named_paths(text, Path(text.split("\t")[0]), known):
            files.setdefault(path, "n")
    written = {os.path.dirname(path) for path, kinds in files.items() if "w" in kinds}
    for path, kinds in files.items():
        changed = os.path.exists(path) and os.stat(path).st_ctime > worker.started
        if kinds[0] == "w" or kinds == "n" and changed or path in written:
            continue  # output, or a folder for it
        now = hash_read(path)
        if variant.read.setdefault(path, now) not in (now, CHANGES):
            raise UserError(
                f"{path} changed while {variant.name} trained, so this run isn't kept; run the same "
                "command again"
            )
        if changed:
            cannot_keep(variant, f"it reads {path}, which changed meanwhile", path)


def cannot_keep(variant: Variant, reason: str, path: str = "what it reads") -> None:
    """No later comparison uses its runs."""
    if variant.read.get(path) != CHANGES:
        variant.read[path] = CHANGES
        show_line()
        print(f"runs of {variant.name} aren't kept, because {reason}", file=sys.stderr)


def log_of_command(pool: Pool, worker: Worker) -> Log:
    """The log of a command that has ended with status 0. Raises UserError."""
    files = sorted((worker.folder / "copy" / "logs").rglob("*"))
    try:
        for suffixes in (SUFFIXES, (".jsonl", ".json")):
            logs, _ = find_logs([file for file in files if file.suffix in suffixes], pool.args.metric)
            if logs:
                break
        logs = logs or [parse_log(worker.folder / "console.txt", pool.args.metric)]
    except UserError as e:
        fail(worker, f"no log below logs/, and its output is none: {e}")
    if len(logs) > 1:
        fail(worker, f"it wrote {len(logs)} logs below logs/, but a command must make one run")
    log = logs[0]
    if fault := not_whole(log, pool.args.stops_early):
        fail(worker, fault)
    earlier = list(worker.variant.runs.values())
    if earlier and log.scheduled and earlier[0].num_steps != log.num_steps:
        fail(worker, f"it ended at step {log.end.step}, an earlier run at step {earlier[0].end.step}")
    losses = {run.end.val_loss for run in [log, *earlier]}
    if len(earlier) >= 2 and len(losses) == 1:
        fail(worker, "all runs end at the same loss; write {seed} where the command sets its seed")
    check_edit(worker)
    return log


def check_edit(worker: Worker) -> None:
    """Raises UserError if the command edits files to set its seed, and they are as after another seed."""
    variant = worker.variant
    if not re.search(r"\bsed\b[^|;&]*{seed}", variant.command):
        return
    copy = worker.folder / "copy"
    names = [name for name in variant.identity["files"] if not name.startswith("data/")]
    edited = {name: hash_file(copy / name) for name in names if (copy / name).is_file()}
    if edited == variant.edited:
        fail(worker, "sed finds nothing to change, so the seed has no effect")
    variant.edited = edited


def complete_logs(pool: Pool, worker: Worker, status: int | None) -> Iterator[Log]:
    """Those that don't grow any more, in the order of their seeds. Raises UserError."""
    if worker.variant.command:
        if status == 0:
            yield log_of_command(pool, worker)
        return
    paths = list((worker.folder / "logs").glob("*.txt"))
    found = [log for path in paths if (log := complete_log(pool, path, worker.variant))]
    logs = {log.hyperparameters.get("seed"): log for log in found}
    seeds = list(itertools.takewhile(logs.__contains__, worker.seeds))
    if status is None and len(seeds) == len(paths):
        seeds = seeds[:-1]  # no other log is there that could be the one that grows
    for seed in seeds:
        yield logs[seed]


def collect(pool: Pool, worker: Worker) -> None:
    """Keeps the runs that a process has finished, and removes the process if it has ended.

    Raises UserError if runs are missing, or take too long.
    """
    status = worker.child.poll()
    if status is not None or time.time() - worker.started < 60:  # later, there is much to read
        check_reading(worker)
    logs = list(complete_logs(pool, worker, status))
    if logs:
        check_unchanged(pool, worker.variant)
        add_reads(worker)
    for log in logs:
        earlier = [] if pool.args.no_seed else list(worker.variant.runs.values())[:1]
        for repeat in check_repeats([*earlier, log], SEEDS):
            fail(worker, f"{repeat}: does the seed take effect?")
        keep_log(pool, worker.variant, worker.seeds.pop(0), log)
        worker.started = time.time()
    if status is None:
        if time.time() - worker.started > 60 * pool.args.run_timeout:
            fail(worker, f"it took more than --run_timeout {pool.args.run_timeout:g} minutes")
        return
    if worker.seeds:
        fail(worker, f"exit status {status}" if status else "its log is incomplete")
    end_worker(pool, worker)


def next_runs(pool: Pool, wanted: Wanted) -> tuple[Variant, list[int]] | None:
    """The first of these runs that are neither there nor under way, for one process; None if there are none."""
    for variant, seeds in wanted:
        taken = set(variant.runs)
        for worker in pool.workers:
            if worker.variant is variant:
                taken.update(worker.seeds)
        missing = [seed for seed in seeds if seed not in taken]
        if missing:
            in_a_row = [seed for i, seed in enumerate(missing) if seed == missing[0] + i]
            return variant, in_a_row[: runs_a_process(variant)]
    return None


def make_runs(pool: Pool, wanted: Callable[[], Wanted], show=lambda: None) -> None:
    """Makes the runs of wanted() until all are there, nothing is wanted any more, or the time is over.
    After other new runs, it calls show(). Processes that are still at work in the end are stopped. Raises
    UserError."""
    try:
        while not pool.late():
            while len(pool.workers) < pool.jobs and (runs := next_runs(pool, wanted())):
                start_worker(pool, *runs)
            if not pool.workers:
                return
            time.sleep(0.1)
            made = pool.made
            for worker in list(pool.workers):
                collect(pool, worker)
            if pool.made > made:
                if not any(wanted()):
                    return
                show()
    finally:
        for worker in list(pool.workers):
            end_worker(pool, worker)
