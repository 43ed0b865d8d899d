"""
Makes the runs of compare and screen: the pool of those under way, and the loop that starts and collects them.

With {runs} in it, a command makes several runs, because only the first one has to compile; otherwise one. Logs are
the files that it writes below logs/, or else its newest file of JSON lines, or else its output.
"""

import contextlib
import fcntl
import glob
import itertools
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from judge.commands import UserError
from judge.environment import chosen_threads, usable_cores
from judge.logs.comparable import SEEDS, by_the_clock, check_between, check_repeats, not_whole
from judge.logs.read import SUFFIXES, Log, find_logs, parse_log
from judge.processes import has_nvidia_gpu
from judge.runs.copies import link_data
from judge.runs.kept import (
    add_reads,
    check_reading,
    complete_log,
    find_facts,
    identity,
    keep_log,
    kept_runs,
)
from judge.runs.same_run import (
    ask_python,
    hash_file,
    load_hashes,
    packages,
    python_of,
    run_environment,
)
from judge.runs.start import LOST, Slot, Worker, end, fail, find_slots, note_place, start
from judge.runs.variants import Variant
from judge.settings import Settings, make_folder
from judge.text import duration, show_line

Wanted = Iterable[tuple[Variant, Iterable[int]]]  # runs to make, in this order: variants with seeds

MAY_DIFFER = {"hardware", "GPU limits", "compiled", "target_val_loss", "log"}  # between variants
RUNS_A_PROCESS = 2  # a start costs little, and small chunks decide sooner

# -----------------------------------------------------------------------------
# The pool


@contextlib.contextmanager
def locked_folder(settings: Settings) -> Iterator[None]:
    """Locks the project's folder, so that only one comparison or screen makes runs in it. Runs inherit the lock.
    Copies are deleted in the end. Raises UserError and OSError."""
    make_folder(settings)
    working = settings.working()
    with open(settings.folder / "lock", "wb") as lock:
        os.set_inheritable(lock.fileno(), True)
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
            yield
        finally:
            shutil.rmtree(working, ignore_errors=True)


@dataclass
class Pool:
    """What the runs of a command have in common, and those under way."""

    settings: Settings
    hours: float  # the time is over after this many
    facts: dict  # the software and the machine
    python_path: list[str]  # where the runs' Python finds its packages
    slots: list[Slot]
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
        return f"{duration(3600 * max(0, left))} left{more}"


def open_pool(variants: list[Variant], settings: Settings, hours: float) -> Pool:
    """Finds the slots and the runs that are kept. Runs that share the cores of this machine share its
    threads. Raises UserError."""
    slots = find_slots(settings)
    alone = len(slots) == 1 and not settings.job_per_core
    threads = chosen_threads()
    if not (threads or settings.launcher or alone or has_nvidia_gpu()):
        threads = max(1, usable_cores() // len(slots))
    version, path = ask_python(
        python_of(settings.command, settings.root, run_environment(settings.root)["PATH"])
    )
    pool = Pool(settings, hours, find_facts(settings, version, path, threads), path, slots)
    add_variants(pool, variants)
    return pool


def add_variants(pool: Pool, variants: list[Variant]) -> None:
    """Links their data, and finds their kept runs. Raises UserError."""
    pool.variants += variants
    for variant in variants:
        link_data(variant.folder, variant.origin, variant.project.data)
        variant.identity = identity(variant, pool.facts)
        variant.runs = kept_runs(variant)
        for log in variant.runs.values():
            check_measured(pool, log)
        check_clock(pool, variant)


def check_measured(pool: Pool, log: Log) -> None:
    """Raises UserError if the loss of a run isn't measured like that of the others."""
    pool.first = pool.first or log
    for fault in check_between([[pool.first], [log]], MAY_DIFFER):
        raise UserError(fault)


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


# -----------------------------------------------------------------------------
# The logs of a process


def files_of_logs(worker: Worker) -> tuple[list[Path], list[Path]]:
    """What may be the log of a run, if its output isn't: what it has written below logs/, or else its newest file
    of JSON lines, or with one JSON object."""
    copy = worker.folder / "copy"
    known = worker.variant.identity["files"]
    files = [path for path in copy.rglob("*") if path.is_file()]
    written = [path for path in files if str(path.relative_to(copy)) not in known]
    logs = [path for path in written if path.is_relative_to(copy / "logs") and path.suffix in SUFFIXES]
    lines = [path for path in written if path.suffix in (".json", ".jsonl")]
    lines.sort(key=lambda path: (path.suffix, path.stat().st_mtime))
    return logs, lines[-1:]


def log_of_command(worker: Worker) -> Log:
    """The log of a command that made one run, and has ended with status 0. Raises UserError."""
    settings = worker.variant.project
    try:
        for files in files_of_logs(worker):
            logs, _ = find_logs(files, settings.name_of_metric)
            if logs:
                break
        logs = logs or [parse_log(worker.folder / "console.txt", settings.name_of_metric)]
    except UserError as e:
        fail(worker, f"no log below logs/, and its output is none: {e}")
    if len(logs) > 1:
        fail(worker, f"it wrote {len(logs)} logs below logs/, but a command must make one run")
    if fault := not_whole(logs[0], settings.stops_early):
        fail(worker, fault)
    check_edit(worker)
    return logs[0]


def complete_logs(worker: Worker, status: int | None) -> list[Log]:
    """Those that don't grow any more, in the order of their seeds. Raises UserError."""
    if not worker.several:
        return [log_of_command(worker)] if status == 0 else []
    paths, _ = files_of_logs(worker)
    found = [log for path in paths if (log := complete_log(path, worker.variant.project))]
    logs = {log.hyperparameters.get("seed"): log for log in found}
    seeds = list(itertools.takewhile(logs.__contains__, worker.seeds))
    if status is None and len(seeds) == len(paths):
        seeds = seeds[:-1]  # no other log is there that could be the one that grows
    return [logs[seed] for seed in seeds]


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


def check_run(worker: Worker, log: Log) -> None:
    """Raises UserError if a finished run can't be one of its variant."""
    earlier = list(worker.variant.runs.values())
    no_seed = worker.variant.project.no_seed
    for repeat in check_repeats([] if no_seed else [*earlier[:1], log], SEEDS):
        fail(worker, f"{repeat}: does the seed take effect?")
    if earlier and log.scheduled and earlier[0].num_steps != log.num_steps:
        fail(worker, f"it ended at step {log.end.step}, an earlier run at step {earlier[0].end.step}")
    losses = {run.end.val_loss for run in [log, *earlier]}
    if len(earlier) >= 2 and len(losses) == 1:
        fail(worker, "all runs end at the same loss; write {seed} where the command sets its seed")


# -----------------------------------------------------------------------------
# The loop


def runs_a_process(variant: Variant) -> int:
    return RUNS_A_PROCESS if "{runs}" in variant.command else 1


def rounds(pool: Pool, variants: list[Variant]) -> int:
    """How many processes of each variant keep all slots busy."""
    return math.ceil(len(pool.slots) / len(variants))


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


def start_worker(pool: Pool, variant: Variant, seeds: list[int]) -> Worker:
    """In a slot that is free."""
    taken = [worker.slot for worker in pool.workers]
    slot = next(slot for slot in pool.slots if slot not in taken)
    worker = start(variant, seeds, slot)
    pool.workers.append(worker)
    return worker


def end_worker(pool: Pool, worker: Worker) -> None:
    end(worker)
    pool.workers.remove(worker)


def is_lost(pool: Pool, worker: Worker) -> bool:
    """Whether a run that has failed is to be made again: its job was cancelled, or lost its machine. A script
    that fails by itself ends with the same status again."""
    file = worker.folder / "status"
    status = int(file.read_text()) if file.exists() else LOST
    before = pool.lost.setdefault((worker.variant.key(), worker.seeds[0]), [])
    by_itself = status < LOST and status in before
    again = len(before) + 1 < pool.settings.tries() and not by_itself
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
    if place := note_place(worker):
        pool.places.add(place)
    logs = complete_logs(worker, status)
    if logs:
        add_reads(worker, packages(pool.python_path))
    for log in logs:
        check_run(worker, log)
        keep_log(worker.variant, worker.seeds.pop(0), log)
        pool.made += 1
        check_measured(pool, log)
        check_clock(pool, worker.variant)
        worker.began = time.monotonic()
    if status is None:
        if worker.began and time.monotonic() - worker.began > 60 * pool.settings.run_timeout:
            fail(worker, f"it took more than --run_timeout {pool.settings.run_timeout:g} minutes")
        return
    if worker.seeds and not is_lost(pool, worker):
        fail(worker, f"exit status {status}" if status else "its log is incomplete")
    end_worker(pool, worker)


def wait_for_a_run(pool: Pool) -> None:
    """Until a process has ended, or a second has passed."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and all(worker.child.poll() is None for worker in pool.workers):
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
