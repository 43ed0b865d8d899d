"""
Makes the runs of compare and screen, and keeps their logs.

A run is kept under all that it could read (see same_run.py). Its log is .judge/runs/KEY_TIME/seedN.txt,
where KEY is a hash of all that; facts.json beside it says what it was. Later comparisons use the run if
what it read elsewhere hasn't changed. You may delete these folders at any time.

A command runs in a fresh copy of its folder. With {runs}, it makes several runs, because only the first one
has to compile; otherwise one. Logs are the files that it writes below logs/, or else its newest file of JSON
lines, or else its output.
watch/sitecustomize.py, which each Python of a run imports, writes down what it reads outside of its copy.
"""

import contextlib
import fcntl
import glob
import itertools
import json
import os
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

from judge.logs.comparable import SEEDS, by_the_clock, check_between, check_repeats, not_whole
from judge.runs.same_run import (
    OF_A_JOB,
    SYSTEM,
    ask_python,
    changes,
    hash_file,
    hash_read,
    hash_text,
    load_hashes,
    machine_facts,
    named_paths,
    packages,
    python_of,
    run_environment,
)
from judge.runs.slots import Slot, find_slots
from judge.runs.copies import link_data
from judge.runs.variants import Variant, fill_in
from judge.logs.read import SUFFIXES, Log, find_logs, parse_log
from judge.commands import UserError
from judge.environment import chosen_threads, matches, usable_cores
from judge.files import write_file
from judge.processes import end_with_parent, has_nvidia_gpu
from judge.settings import Settings, make_folder
from judge.text import as_json, short

Wanted = Iterable[tuple[Variant, Iterable[int]]]  # runs to make, in this order: variants with seeds

MAY_DIFFER = {"hardware", "GPU limits", "compiled", "target_val_loss", "log"}  # between variants
RUNS_A_PROCESS = 2  # a start costs little, and small chunks decide sooner
CHANGES = "changes"  # instead of the hash of what a run reads: no later run is the same
WATCH = Path(__file__).resolve().parent / "watch"


# What a slot runs. It says when it began, where it is, and how the command ended: a job that was cancelled
# says nothing. If it is told to end, it ends the command, too
START = """\
cd {copy} || exit
{exports}
{{ uname -n; grep -m 1 "model name" /proc/cpuinfo
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader; }} >{folder}/place.new 2>/dev/null
mv {folder}/place.new {folder}/place
trap 'trap - TERM; kill 0' TERM
bash -o pipefail -c {command} &
wait $!
status=$?
echo $status >{folder}/status
exit $status
"""


@dataclass
class Worker:
    """A process that makes runs of a variant."""

    variant: Variant
    seeds: list[int]  # without those of finished runs
    slot: Slot
    child: subprocess.Popen
    folder: Path
    several: bool  # whether the command was told to make several runs
    began: float = 0.0  # when the run began, in seconds of the monotonic clock; 0: it waits for a place
    date: float = field(default_factory=time.time)  # when it was started


@dataclass
class Pool:
    """What the runs of a command have in common, and those under way."""

    settings: Settings
    hours: float  # the time is over after this many
    facts: dict  # the software and the machine
    environment: dict[str, str]  # of runs
    python_path: list[str]  # where the runs' Python finds its packages
    slots: list[Slot]
    threads: int  # of a run; 0 leaves OMP_NUM_THREADS as it is
    lock: int  # file descriptor that runs inherit: the folder stays locked while one is alive
    workers: list[Worker] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)  # all that may have runs
    fixed_time: bool = False  # runs take a time, not a number of steps; see check_clock
    made: int = 0  # runs in this session
    # (variant's key, seed) -> exit statuses; see is_lost
    lost: dict[tuple, list] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)  # machines where a launcher's runs were made
    first: Log | None = None  # with which all runs are compared
    started: float = field(default_factory=time.monotonic)

    def minutes(self) -> float:
        """Since the start."""
        return (time.monotonic() - self.started) / 60

    def late(self) -> bool:
        return self.minutes() > 60 * self.hours

    def time_left(self, runs: int) -> str:
        """In words, for this many runs to come."""
        waiting = sum(not worker.began for worker in self.workers)
        more = f", {waiting} waiting" if waiting and self.settings.launcher else ""
        if self.made < 2 * len(self.slots):
            return f"time unknown{more}"
        hours = self.minutes() / 60
        left = min(hours / self.made * runs, self.hours - hours)
        return f"{max(0, left):.1f} h left{more}"


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
def locked_folder(settings: Settings) -> Iterator[int]:
    """Locks the project's folder, so that only one comparison or screen makes runs in it. Gives the lock's
    file descriptor. Copies are deleted in the end. Raises UserError and OSError."""
    make_folder(settings)
    working = settings.working()
    with open(settings.folder / "lock", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # locks of network disks may hold on one machine only
            node = working.name.rpartition("-")[0]
            for killed in working.parent.glob(f"{glob.escape(node)}-*"):
                shutil.rmtree(killed, ignore_errors=True)
        except BlockingIOError:
            raise UserError(
                f"another comparison or screen is running in {settings.folder}; wait for it to finish. If it was "
                f'killed, end the runs that it left: pkill -KILL -f "{working.parent}"'
            ) from None
        except OSError:
            pass  # some network file systems have no locks
        load_hashes(settings.folder / "hashes")
        try:
            yield lock.fileno()
        finally:
            shutil.rmtree(working, ignore_errors=True)
            with contextlib.suppress(OSError):
                working.parent.rmdir()


# -----------------------------------------------------------------------------
# What a loss depends on


def runs_a_process(variant: Variant) -> int:
    return RUNS_A_PROCESS if "{runs}" in variant.command else 1


def not_of_a_job(pool: Pool) -> list[str]:
    """The variables that could change a loss."""
    return [name for name in pool.environment if not matches(name, OF_A_JOB)]


def identity(pool: Pool, variant: Variant) -> dict[str, dict]:
    """All that a run could read, but for what it reads outside of its copy (see same_run.py)."""
    # of hashes, because a value may be a secret
    environment = {name: hash_text(pool.environment[name]) for name in not_of_a_job(pool)}
    return {
        "run": variant.run(),
        "files": variant.files(),
        "environment": environment,
        "software": pool.facts,
    }


def why_again(pool: Pool, variants: list[Variant]) -> str:
    """What has changed since runs were kept of the same code with the same settings, for the first variant
    that has none now. "" if there are no such runs."""

    def code(facts: dict) -> list:
        return [facts["run"], [pair for pair in facts["files"].items() if pair[0].endswith(".py")]]

    facts = [json.loads(file.read_bytes()) for file in pool.settings.folder.glob("runs/*/facts.json")]
    for new in [variant.identity for variant in variants if not variant.runs]:
        same = [changes(kept, new | read_now(kept)) for kept in facts if code(kept) == code(new)]
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
        link_data(variant.folder, variant.origin, variant.project.data)
        variant.identity = identity(pool, variant)
        variant.runs = kept_runs(pool, variant)
        for log in variant.runs.values():
            check_measured(pool, log)
        check_clock(pool, variant)


def check_clock(pool: Pool, variant: Variant) -> None:
    """Runs of a fixed time take turns, and none of another time is used: the machine's speed counts."""
    if not by_the_clock(variant.runs.values()):
        return
    pool.slots = pool.slots[:1]
    pool.fixed_time = True
    for other in pool.variants:
        if other.runs.keys() > other.new:
            show_line()
            print(f"training {other.name} again, because its runs have a fixed time", file=sys.stderr)
        other.runs = {seed: log for seed, log in other.runs.items() if seed in other.new}


def open_pool(variants: list[Variant], lock: int, settings: Settings, hours: float) -> Pool:
    """Finds the slots and the runs that are kept. Runs that share the cores of this machine share its
    threads. Raises UserError."""
    slots = find_slots(settings)
    alone = len(slots) == 1 and not settings.job_per_core
    threads = 0
    if not (settings.launcher or alone or has_nvidia_gpu()):
        threads = chosen_threads() or max(1, usable_cores() // len(slots))
    environment = run_environment(settings.root)
    version, path = ask_python(python_of(settings.command, settings.root, environment["PATH"]))
    facts = packages(path) | {"Python": version} | machine_facts(has_nvidia_gpu())
    facts["threads"] = threads or chosen_threads()
    if settings.launcher:  # runs are made elsewhere
        facts |= {"machine": settings.launcher, "instruction sets": "", "compiler": []}
    pool = Pool(settings, hours, facts, environment, path, slots, threads, lock)
    add_variants(pool, variants)
    return pool


# -----------------------------------------------------------------------------
# Kept runs


def complete_log(pool: Pool, path: Path) -> Log | None:
    """None if it isn't whole."""
    try:
        log = parse_log(path, pool.settings.name_of_metric)
    except UserError:
        return None
    return None if not_whole(log, pool.settings.stops_early) else log


def read_now(kept: dict) -> dict[str, dict]:
    """What kept runs would read today."""
    return {"read": {name: hash_read(name) for name in kept.get("read", {})}}


def kept_runs(pool: Pool, variant: Variant) -> dict[int, Log]:
    """The runs of a variant that are kept, by seed."""
    for file in pool.settings.folder.glob(f"runs/{variant.key()}_*/facts.json"):
        kept = json.loads(file.read_bytes())
        if kept["read"] == read_now(kept)["read"]:
            variant.read = kept["read"]
            variant.place = file.parent
    found = {}
    for path in variant.place.glob("seed*.txt") if variant.place else []:
        seed = path.stem.removeprefix("seed")
        log = complete_log(pool, path)
        if log is not None:
            found[int(seed)] = log
    return found


def keep_log(pool: Pool, variant: Variant, seed: int, log: Log) -> None:
    """Moves the log of a finished run to the kept ones."""
    # runs that read other files with the same code have another folder
    variant.place = (
        variant.place or variant.project.folder / "runs" / f"{variant.key()}_{time.time_ns()}"
    )
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


def start(pool: Pool, variant: Variant, seeds: list[int], folder: Path, slot: Slot) -> subprocess.Popen:
    """Starts a command in a fresh copy of its folder. Its output goes into a new file of `folder`. So does, by
    each Python, what it reads elsewhere."""
    copy = folder / "copy"
    for name in variant.identity["files"]:
        if not name.startswith("logs/"):  # those that are in the repository
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(variant.folder / name, copy / name, follow_symlinks=False)
    command = variant.command.replace("PYTHONPATH=", f"PYTHONPATH={shlex.quote(str(WATCH))}:")
    command = fill_in(command, variant.options, seeds[0], len(seeds), slot.number)
    watch = [str(folder / "opened"), *known_folders(variant)]
    own = {
        "PYTHONPATH": str(WATCH),
        "PYTHONUNBUFFERED": "1",  # otherwise, lines of stderr come between two halves of one of stdout
        "COMPARE_WATCH": json.dumps(watch),
    }
    if pool.threads:
        own["OMP_NUM_THREADS"] = str(pool.threads)
    if slot.gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    if pool.settings.launcher:  # a job's variables are those that its launcher gives
        own = {name: pool.environment[name] for name in not_of_a_job(pool)} | own
    exports = [f"export {name}={shlex.quote(value)}" for name, value in own.items()]
    copy, place, command = [shlex.quote(str(value)) for value in (copy, folder, command)]
    script = folder / "start.sh"
    script.write_text(
        START.format(copy=copy, folder=place, command=command, exports="\n".join(exports))
    )
    with open(folder / "console.txt", "wb") as output:
        return subprocess.Popen(
            [*shlex.split(pool.settings.launcher), "bash", str(script)],
            env=pool.environment,
            pass_fds=[pool.lock],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


@contextlib.contextmanager
def no_interrupt() -> Iterator[None]:
    """Signals wait until the end, for example until a process that was started is in the pool."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(pool: Pool, variant: Variant, seeds: list[int]) -> None:
    slot = next(slot for slot in pool.slots if slot not in [worker.slot for worker in pool.workers])
    folder = pool.settings.working() / f"{variant.key()}_seed{seeds[0]}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was lost
    folder.mkdir(parents=True)
    with no_interrupt():
        child = start(pool, variant, seeds, folder, slot)
        pool.workers.append(Worker(variant, list(seeds), slot, child, folder, len(seeds) > 1))


def group_ended(leader: subprocess.Popen) -> bool:
    leader.poll()  # otherwise, it would stay in its group
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return True
    return False


def end_worker(pool: Pool, worker: Worker) -> None:
    """Ends a process and all that it started. They get time to clean up: a launcher must end its job,
    torchrun its workers, and a compiler that was killed could leave half a file in PyTorch's cache."""
    worker.child.terminate()
    for _ in range(400):
        if group_ended(worker.child):
            break
        time.sleep(0.1)
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
    raise UserError(
        f"{last_lines(worker.folder / 'console.txt')}\na run failed: {worker.variant.name}, seed "
        f"{worker.seeds[0]} ({reason}). Above are the last lines that it printed"
    )


def known_folders(variant: Variant) -> list[str]:
    """Where a run reads nothing of its own: its copy, the system and the environment."""
    return [str(variant.project.folder), *SYSTEM]


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
    origin = worker.variant.origin
    for path, kinds in (opened(worker) or {}).items():
        inner = os.path.relpath(path, origin)
        hidden = "/." in f"/{os.path.dirname(inner)}"  # or elsewhere
        copy = os.path.realpath(worker.folder / "copy" / inner)
        if kinds[0] == "r" and not hidden and copy != path and os.path.isfile(path):
            fail(worker, f"it read {path}, not its copy: use relative paths, and put data into data/")


def add_reads(pool: Pool, worker: Worker) -> None:
    """Adds what a run has read outside of its copy to what is known of its variant. Raises UserError if that
    has changed since an earlier run, or the installed packages."""
    variant = worker.variant
    software = pool.facts | packages(pool.python_path)
    changed = changes({"software": pool.facts}, {"software": software})
    files = opened(worker)
    if files is None:
        cannot_keep(variant, "no Python ran that shows what it reads")
        files = {}
    started = ["\t".join([str(variant.folder), variant.command, *variant.options])]
    started += [text for text, kind in files.items() if kind == "s"]
    known = [variant.folder, variant.origin, *map(Path, known_folders(variant))]
    # links that lead out of the copy are absolute
    named = {target for target in variant.identity["files"].values() if os.path.isabs(target)}
    for text in started:
        files.pop(text, None)
        named |= named_paths(text, known, pool.environment["PATH"])
    files = dict.fromkeys(named, "n") | files
    written = {os.path.dirname(path) for path, kinds in files.items() if "w" in kinds}
    for path, kinds in files.items():
        new = os.path.exists(path) and os.stat(path).st_ctime > worker.date
        if kinds[0] == "w" or kinds == "n" and new or path in written:
            continue  # output, or a folder for it
        now = hash_read(path)
        if variant.read.setdefault(path, now) not in (now, CHANGES):
            changed.append(f"{path} changed")
        elif new:
            cannot_keep(variant, f"it reads {path}, which changed meanwhile", path)
    if changed:
        raise UserError(
            f"{short(', '.join(changed), 200)} while {variant.name} trained, so this run isn't kept; run the "
            "same command again"
        )


def cannot_keep(variant: Variant, reason: str, path: str = "what it reads") -> None:
    """No later comparison uses its runs."""
    if variant.read.get(path) != CHANGES:
        variant.read[path] = CHANGES
        show_line()
        print(f"runs of {variant.name} aren't kept, because {reason}", file=sys.stderr)


def check_run(pool: Pool, worker: Worker, log: Log) -> None:
    """Raises UserError if a finished run can't be one of its variant."""
    earlier = list(worker.variant.runs.values())
    for repeat in check_repeats([] if pool.settings.no_seed else [*earlier[:1], log], SEEDS):
        fail(worker, f"{repeat}: does the seed take effect?")
    if earlier and log.scheduled and earlier[0].num_steps != log.num_steps:
        fail(worker, f"it ended at step {log.end.step}, an earlier run at step {earlier[0].end.step}")
    losses = {run.end.val_loss for run in [log, *earlier]}
    if len(earlier) >= 2 and len(losses) == 1:
        fail(worker, "all runs end at the same loss; write {seed} where the command sets its seed")


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


def files_of_logs(worker: Worker) -> tuple[list[Path], list[Path]]:
    """What may be the log of a run, if its output isn't: what it has written below logs/, or else its newest file
    of JSON lines, or with one JSON object."""
    copy = worker.folder / "copy"
    files = [path for path in copy.rglob("*") if path.is_file()]
    known = worker.variant.identity["files"]
    written = [path for path in files if str(path.relative_to(copy)) not in known]
    logs = [path for path in written if path.is_relative_to(copy / "logs") and path.suffix in SUFFIXES]
    lines = [path for path in written if path.suffix in (".json", ".jsonl")]
    lines.sort(key=lambda path: (path.suffix, path.stat().st_mtime))
    return logs, lines[-1:]


def log_of_command(pool: Pool, worker: Worker) -> Log:
    """The log of a command that made one run, and has ended with status 0. Raises UserError."""
    metric = pool.settings.name_of_metric
    try:
        for files in files_of_logs(worker):
            logs, _ = find_logs(files, metric)
            if logs:
                break
        logs = logs or [parse_log(worker.folder / "console.txt", metric)]
    except UserError as e:
        fail(worker, f"no log below logs/, and its output is none: {e}")
    if len(logs) > 1:
        fail(worker, f"it wrote {len(logs)} logs below logs/, but a command must make one run")
    if fault := not_whole(logs[0], pool.settings.stops_early):
        fail(worker, fault)
    check_edit(worker)
    return logs[0]


def complete_logs(pool: Pool, worker: Worker, status: int | None) -> list[Log]:
    """Those that don't grow any more, in the order of their seeds. Raises UserError."""
    if not worker.several:
        return [log_of_command(pool, worker)] if status == 0 else []
    files = (worker.folder / "copy" / "logs").rglob("*")
    paths = [path for path in files if path.suffix in SUFFIXES]
    found = [log for path in paths if (log := complete_log(pool, path))]
    logs = {log.hyperparameters.get("seed"): log for log in found}
    seeds = list(itertools.takewhile(logs.__contains__, worker.seeds))
    if status is None and len(seeds) == len(paths):
        seeds = seeds[:-1]  # no other log is there that could be the one that grows
    return [logs[seed] for seed in seeds]


def note_place(pool: Pool, worker: Worker) -> None:
    """Where a run is made, and when it began. In a queue, its time doesn't count."""
    place = worker.folder / "place"
    if worker.began or not place.exists():
        return
    worker.began = time.monotonic()
    if pool.settings.launcher:
        lines = place.read_text().splitlines()[1:]
        machine = "; ".join(line.partition(": ")[2] or line for line in lines)
        pool.places.add(machine or "an unknown machine")


def is_lost(pool: Pool, worker: Worker) -> bool:
    """Whether a run that has failed is to be made again: its job was cancelled, or lost its machine. A script
    that fails by itself ends with the same status again."""
    file = worker.folder / "status"
    text = file.read_text() if file.exists() else ""
    status = int(text or 128)  # the job couldn't say how it ended, or not to the end
    before = pool.lost.setdefault((worker.variant.key(), worker.seeds[0]), [])
    by_itself = status < 128
    again = len(before) + 1 < pool.settings.tries() and not (by_itself and status in before)
    if again:
        before.append(status)
    return again


def collect(pool: Pool, worker: Worker) -> None:
    """Keeps the runs that a process has finished, and removes the process if it has ended.

    Raises UserError if runs are missing, or take too long.
    """
    status = worker.child.poll()
    if status is not None or time.time() - worker.date < 60:  # later, there is much to read
        check_reading(worker)
    note_place(pool, worker)
    logs = complete_logs(pool, worker, status)
    if logs:
        add_reads(pool, worker)
    for log in logs:
        check_run(pool, worker, log)
        keep_log(pool, worker.variant, worker.seeds.pop(0), log)
        worker.began = time.monotonic()
    if status is None:
        if worker.began and time.monotonic() - worker.began > 60 * pool.settings.run_timeout:
            fail(worker, f"it took more than --run_timeout {pool.settings.run_timeout:g} minutes")
        return
    if worker.seeds and not is_lost(pool, worker):
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


def wait_for_a_run(pool: Pool) -> None:
    """Until a process has ended, or a second has passed."""
    end = time.monotonic() + 1
    while time.monotonic() < end and all(worker.child.poll() is None for worker in pool.workers):
        time.sleep(0.1)


def make_runs(pool: Pool, wanted: Callable[[], Wanted], show=lambda: None) -> None:
    """Makes the runs of wanted() until all are there, nothing is wanted any more, or the time is over.
    After other new runs, it calls show(). Processes that are still at work in the end are stopped. Raises
    UserError."""
    try:
        while not pool.late():
            while len(pool.workers) < len(pool.slots) and (runs := next_runs(pool, wanted())):
                start_worker(pool, *runs)
            if not pool.workers:
                return
            wait_for_a_run(pool)
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
