"""
What are many settings or ideas worth? Measures up to 16 of them at once, in 32 configurations.

    ./run.sh screen SCREEN.toml --blocks 16    make runs until there are 16 blocks in all
    ./run.sh screen SCREEN.toml                show the results so far

SCREEN.toml names the settings or ideas. An example is records/mini/screens/ideas-1/screen.toml;
tools/screen/blocks.py explains the format. A block is one seed in all configurations.
tools/screen/design.py explains the statistics.

Finished blocks are kept beside SCREEN.toml, and single runs in logs/compare/runs/. Press Ctrl-C to
stop. Run the same command again to continue, also on another machine that has the finished blocks.
For more blocks, run it with a larger --blocks. You may look as often as you like: that doesn't make a
wrong answer more likely. Only losses are compared, not the time of a step.

Exit status: 0 done, 1 a run failed, 2 bad input, 130 interrupted.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tools.compare import compare
from tools.compare import runs as compare_runs
from tools.compare.answer import plural, short
from tools.compare.runs import RunError, Setup, Task, Worker
from tools.compare.sources import check_data, log_ratio_of_steps
from tools.compare.stats import measure_slope
from tools.common import UsageError, run_command, stop_on_signals, write_file
from tools.screen.answer import Result, answer, plot_result, result_as_json
from tools.screen.blocks import (
    Block,
    Screen,
    belongs,
    read_blocks,
    read_percent,
    read_screen,
    write_block,
)
from tools.screen.design import add_steps, fit

BLOCKS_AT_ONCE = 2  # a process makes the runs of this many seeds, because only the first one compiles


@dataclass
class Session:
    """The runs of one command."""

    screen: Screen
    setup: Setup
    dtype: str  # of the activations
    jobs: int
    runs: dict[str, dict] = field(default_factory=dict)  # name -> seed -> log
    workers: list[Worker] = field(default_factory=list)
    made: int = 0
    to_make: int = 0
    started: float = 0.0


# -----------------------------------------------------------------------------
# Arguments


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run.sh screen",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def fail(message):
        raise UsageError(f"{message}; --help lists all options")

    parser.error = fail
    add = parser.add_argument
    add("definition", type=Path, metavar="SCREEN.toml", help="defines the screen")
    blocks = "make blocks until there are N with this source, data type and PyTorch version; without it, "
    blocks += "make none"
    add("--blocks", type=compare.parse_count, metavar="N", help=blocks)
    until = "the smallest saving of steps that matters; default: that in SCREEN.toml, or 1%%"
    add("--until", metavar="X%", help=until)
    jobs = "runs at a time on a CPU; default: one per core"
    add("--jobs", type=compare.parse_count, metavar="N", help=jobs)
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--plot", type=Path, metavar="FILE.png", help="draw the effects and their intervals")
    return parser


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError."""
    args = make_parser().parse_args(argv)
    args.nproc_per_node = 1
    if args.until is not None:
        args.until = read_percent(args.until)
    if args.json:
        compare.check_output_file(args.json, "")
    if args.plot:
        compare.check_output_file(args.plot, ".png")
    return args


# -----------------------------------------------------------------------------
# Display


def show_progress(session: Session, seeds: list[int]) -> None:
    """What is done, and when the end is expected. On a pipe, only after every eighth run."""
    if not sys.stderr.isatty() and session.made % 8:
        return
    words = f"{short(session.screen.name, 18)}: seeds {seeds[0]} to {seeds[-1]}, "
    words += f"{session.made} of {session.to_make} runs"
    if session.made >= 2 * session.jobs:
        seconds = (time.monotonic() - session.started) / session.made
        left = seconds * (session.to_make - session.made)
        end = time.strftime("%H:%M", time.localtime(time.time() + left))
        words += f", {left / 60:.0f} min left ({end})"
    compare.show_line(words)


# -----------------------------------------------------------------------------
# Runs


def split_seeds(missing: list[int], most: int) -> list[range]:
    """Seeds that follow each other, at most `most` together."""
    ranges = []
    for seed in missing:
        last = ranges[-1] if ranges else None
        if last and last.stop == seed and len(last) < most:
            ranges[-1] = range(last.start, seed + 1)
        else:
            ranges.append(range(seed, seed + 1))
    return ranges


def missing_tasks(session: Session, seeds: list[int]) -> list[Task]:
    """The runs that these blocks still need."""
    tasks = []
    variants = {variant.name: variant for variant in session.screen.variants()}  # each once
    for variant in variants.values():
        at_once = BLOCKS_AT_ONCE if variant.settings is not None else 1
        missing = [seed for seed in seeds if seed not in session.runs[variant.name]]
        tasks += [Task(variant, part) for part in split_seeds(missing, at_once)]
    return tasks


def make_runs(session: Session, seeds: list[int]) -> None:
    """Makes the missing runs of these blocks. Raises RunError and UsageError."""
    tasks = missing_tasks(session, seeds)
    try:
        while tasks or session.workers:
            while tasks and len(session.workers) < session.jobs:
                session.workers.append(compare_runs.start(session.setup, tasks.pop(0)))
            time.sleep(0.1)
            new, undone = compare_runs.collect_all(session.setup, session.workers, session.runs)
            tasks[:0] = undone
            session.made += new
            if new:
                compare_runs.check_compiled(session.runs)
                show_progress(session, seeds)
    finally:
        for worker in session.workers:
            compare_runs.stop(session.setup, worker)
        session.workers.clear()


def make_block(session: Session, seed: int) -> Block:
    """The block of a seed whose runs are all there."""
    screen = session.screen
    facts = session.setup.facts
    losses = {name: logs[seed].final.val_loss for name, logs in session.runs.items()}
    return Block(
        seed=seed,
        losses=[losses[variant.name] for variant in screen.configurations],
        fewer=losses[screen.fewer.name],
        more=losses[screen.more.name],
        factors=[asdict(factor) for factor in screen.factors],
        digest=screen.digest(),
        dtype=session.dtype,
        torch=facts["torch"],
        compiled=not session.runs[screen.fewer.name][seed].uncompiled,
        machine=facts["machine"],
        threads=facts["threads"],
        compiler=" ".join(facts["compiler"]),
    )


def seeds_to_make(session: Session, count: int) -> list[int]:
    """The seeds of the blocks that are missing until there are `count`. Raises UsageError."""
    screen = session.screen
    ours = (screen.digest(), session.dtype, session.setup.facts["torch"])
    done = set()
    for block in read_blocks(screen):
        if (block.digest, block.dtype, block.torch) == ours:
            done.add(block.seed)
    seeds = []
    seed = screen.seed
    while len(done) + len(seeds) < count:
        if seed not in done:
            seeds.append(seed)
        seed += 1
    return seeds


def make_blocks(session: Session, seeds: list[int]) -> None:
    """Makes the blocks of these seeds, a few at a time. Raises RunError, UsageError and FileError."""
    session.started = time.monotonic()
    session.to_make = sum(len(task.seeds) for task in missing_tasks(session, seeds))
    compare.show_line(f"{plural(len(seeds), 'block')} to make: {plural(session.to_make, 'run')}")
    for start in range(0, len(seeds), BLOCKS_AT_ONCE):
        part = seeds[start : start + BLOCKS_AT_ONCE]
        make_runs(session, part)
        for seed in part:
            write_block(session.screen, make_block(session, seed))


def make_session(args: argparse.Namespace, screen: Screen, lock: int) -> Session:
    """Raises UsageError."""
    variants = screen.variants()
    compare.get_data(variants)
    gpu = compare.on_gpu(variants)
    jobs = compare.number_of_jobs(args, variants)
    threads = compare.threads_of_a_process(args, jobs)
    facts = compare_runs.machine_facts(gpu, threads, 1)
    facts["data"] = compare_runs.data_facts(variants)
    # `more` needs the most data. Patched scripts aren't asked, because each takes seconds to load
    check_data([variant for variant in variants if variant.folder == screen.base.folder])
    session = Session(screen, Setup(facts, threads, 1, lock), compare_runs.activation_dtype(gpu), jobs)
    compare_runs.make_room({session.setup.folder(variant) for variant in variants})
    for variant in variants:
        session.runs[variant.name] = compare_runs.kept_runs(session.setup, variant)
    return session


# -----------------------------------------------------------------------------
# The answer


def results(screen: Screen, until: float) -> list[Result]:
    """The fit of each group of blocks that belong together, the largest group first. Raises UsageError."""
    groups = {}
    for block in read_blocks(screen):
        if belongs(screen, block):
            groups.setdefault(block.group(), []).append(block)
    width = log_ratio_of_steps(screen.fewer, screen.more)
    found = []
    for blocks in sorted(groups.values(), key=len, reverse=True):
        fitted = fit(np.array([block.losses for block in blocks]), len(screen.factors))
        fewer = [block.fewer for block in blocks]
        more = [block.more for block in blocks]
        slope = measure_slope(fewer, more, width, fitted.sd, fitted.freedom)
        if slope is not None:
            for contrast in [*fitted.factors, *fitted.groups]:
                add_steps(contrast, slope)
        found.append(Result(screen.factors, blocks, fitted, slope, until))
    return found


def report(args: argparse.Namespace, screen: Screen) -> None:
    """Prints the answer, and writes what was asked for. Raises FileError and UsageError."""
    found = results(screen, args.until or screen.until)
    if not found:
        print(f"{screen.name}: no block is finished yet.")
        others = len(read_blocks(screen))
        if others:
            print(f"Its folder has {plural(others, 'block')} of another definition.")
        for file in (args.json, args.plot):
            if file:
                print(f"{file}: not written, because there is no block", file=sys.stderr)
        return
    for number, result in enumerate(found):
        if number:
            print()
        current = result.blocks[0].digest == screen.digest()
        print("\n".join(answer(screen.name, result, current)))
    if args.json:
        answers = [result_as_json(result) for result in found]
        write_file(args.json, json.dumps(answers, indent=1, allow_nan=False).encode())
    if args.plot:
        plot_result(screen.name, found[0], args.plot)


def screen_command(argv: list[str]) -> int:
    args = read_arguments(argv)
    if not args.blocks:
        with tempfile.TemporaryDirectory() as scratch:
            report(args, read_screen(args.definition, Path(scratch)))
        return 0
    status = 0
    with compare_runs.locked_folder() as lock:
        screen = read_screen(args.definition, compare_runs.FOLDER / "working")
        try:
            session = make_session(args, screen, lock)
            make_blocks(session, seeds_to_make(session, args.blocks))
        except KeyboardInterrupt:
            status = 130
    if sys.stderr.isatty():
        print(file=sys.stderr)
    report(args, screen)
    if status:
        print("Interrupted; run the same command again to continue.")
    return status


def main(argv: list[str]) -> int:
    return compare.run_and_report(screen_command, argv, failed=1)


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
