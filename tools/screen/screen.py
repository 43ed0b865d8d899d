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
import itertools
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tools.common import (
    as_json,
    command_parser,
    fraction,
    output_file,
    plural,
    run_command,
    short,
    stop_on_signals,
    whole_number,
    write_file,
)
from tools.compare import runs as compare_runs
from tools.compare.identity import hash_text, packages
from tools.compare.runs import Pool, RunError, make_runs, open_pool, show_line
from tools.compare.sources import check_data, log_ratio_of_steps
from tools.compare.stats import measure_slope
from tools.screen.answer import Result, answer, plot_result, result_as_json
from tools.screen.blocks import (
    Block,
    Screen,
    belongs,
    read_blocks,
    read_screen,
    write_block,
)
from tools.screen.design import add_steps, fit

BLOCKS_AT_ONCE = 2  # a process makes the runs of this many seeds, because only the first one compiles


# -----------------------------------------------------------------------------
# Arguments


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("screen", __doc__)
    add = parser.add_argument
    add("definition", type=Path, metavar="SCREEN.toml", help="defines the screen")
    blocks = (
        "make blocks until there are N with this source, data type and PyTorch version; without it, "
    )
    blocks += "make none"
    add("--blocks", type=whole_number, metavar="N", help=blocks)
    until = "the smallest saving of steps that matters; default: that in SCREEN.toml, or 1%%"
    add("--until", type=fraction, metavar="X%", help=until)
    jobs = "runs at a time on a CPU; default: one per core"
    add("--jobs", type=whole_number, metavar="N", help=jobs)
    add("--json", type=output_file, metavar="FILE", help="write all numbers")
    add("--plot", type=output_file, metavar="FILE.png", help="draw the effects and their intervals")
    return parser


# -----------------------------------------------------------------------------
# Runs


def make_block(screen: Screen, pool: Pool, seed: int) -> Block:
    """The block of a seed whose runs are all there."""
    losses = {name: logs[seed].final.val_loss for name, logs in pool.runs.items()}
    return Block(
        seed=seed,
        losses=[losses[variant.name] for variant in screen.configurations],
        fewer=losses[screen.fewer.name],
        more=losses[screen.more.name],
        factors=[asdict(factor) for factor in screen.factors],
        digest=screen.digest(),
        dtype=compare_runs.activation_dtype(screen.variants()),
        torch=pool.facts["torch"],
        compiled=not pool.runs[screen.fewer.name][seed].uncompiled,
        machine=pool.facts["machine"],
        threads=pool.facts["threads"],
        compiler=" ".join(pool.facts["compiler"]),
        world=hash_world(screen, pool),
    )


def hash_world(screen: Screen, pool: Pool) -> str:
    """Of all that the runs could read, but for the source. Blocks of several machines belong together, so
    variables that name a path or the user don't count."""
    found = pool.identities[screen.fewer.name]
    data = {name: value for name, value in found["files"].items() if name.startswith("data/")}
    versions = {name: pool.facts[name] for name in ("Python", *packages())}
    environment = {
        name: value
        for name, value in found["environment"].items()
        if name not in ("USER", "LOGNAME") and "/" not in os.environ.get(name, "")
    }
    return hash_text(json.dumps([data, versions, environment], sort_keys=True))


def seeds_to_make(screen: Screen, pool: Pool, count: int) -> list[int]:
    """The seeds of the blocks that are missing until there are `count`. Raises UsageError."""
    dtype = compare_runs.activation_dtype(screen.variants())
    ours = (screen.digest(), dtype, pool.facts["torch"], hash_world(screen, pool))
    done = [block.seed for block in read_blocks(screen) if block.group()[:4] == ours]
    free = (seed for seed in itertools.count(screen.seed) if seed not in done)
    return list(itertools.islice(free, max(0, count - len(done))))


def make_blocks(screen: Screen, pool: Pool, count: int) -> None:
    """Makes blocks, a few at a time, until there are `count`. Raises RunError, UsageError and FileError."""
    seeds = seeds_to_make(screen, pool, count)
    total = sum(seed not in logs for logs in pool.runs.values() for seed in seeds)
    show_line(f"{plural(len(seeds), 'block')} to make: {plural(total, 'run')}")
    for start in range(0, len(seeds), BLOCKS_AT_ONCE):
        part = seeds[start : start + BLOCKS_AT_ONCE]
        wanted = [(variant, part) for variant in screen.variants()]
        words = f"{short(screen.name, 18)}: seeds {part[0]} to {part[-1]}"

        def show(new: int) -> bool:
            if new:
                left = pool.time_left(total - pool.made)
                show_line(f"{words}, {pool.made} of {total} runs, {left}")
            return False

        make_runs(pool, lambda: wanted, show)
        for seed in part:
            write_block(screen, make_block(screen, pool, seed))


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
        return
    for number, result in enumerate(found):
        if number:
            print()
        current = result.blocks[0].digest == screen.digest()
        print("\n".join(answer(screen.name, result, current)))
    if args.json:
        write_file(args.json, as_json([result_as_json(result) for result in found]))
    if args.plot:
        plot_result(screen.name, found[0], args.plot)


def screen_command(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    if not args.blocks:
        with tempfile.TemporaryDirectory() as scratch:
            report(args, read_screen(args.definition, Path(scratch)))
        return 0
    status = 0
    with compare_runs.locked_folder() as lock:
        screen = read_screen(args.definition, compare_runs.scratch())
        try:
            pool = open_pool(screen.variants(), lock, args.jobs)
            # `more` needs the most data. Patched scripts aren't asked, because each takes seconds to load
            check_data([v for v in screen.variants() if v.folder == screen.base.folder])
            make_blocks(screen, pool, args.blocks)
        except KeyboardInterrupt:
            status = 130
    show_line()
    report(args, screen)
    if status:
        print("Interrupted; run the same command again to continue.")
    return status


def main(argv: list[str]) -> int:
    try:
        return screen_command(argv)
    except RunError as e:
        print(e, file=sys.stderr)
        return 1


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
