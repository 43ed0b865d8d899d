"""
Judges an idea at several sizes of a model, smallest first: judge compare --sizes.

The sizes are sets of options in judge.toml, named by their numbers of parameters:

    [sizes]
    49k = "--model_dim 32 --num_iterations 180"
    124M = "--model_dim 768 --num_iterations 1770"

Each size is a comparison of its own, with its own slope and its own runs. When it is decided, the pairs are
completed from which trend and forecast come (see trend.py). The forecast of a size is written before it is run.
"""

import re
import shlex
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from judge.commands import UserError
from judge.compare.answer import machine_in_words, warnings_in_words
from judge.compare.ledger import with_answers, write_ledger
from judge.compare.pairs import (
    Comparison,
    losses,
    progress,
    slope_runs,
    undecided,
    wanted_runs,
)
from judge.files import write_file
from judge.runs.make import Wanted, make_runs
from judge.settings import Settings
from judge.sizes.answer import forecast_in_words, ladder_in_words
from judge.sizes.trend import (
    Change,
    Size,
    changes,
    enough,
    forecast,
    measure_change,
    trend,
    verdict_over,
    verdicts,
)
from judge.stats.decide import rounding
from judge.text import as_json, show_line

UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}


def read_sizes(settings: Settings) -> list[Size]:
    """Smallest first. Raises UserError."""
    sizes = []
    for name, options in settings.sizes.items():
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMB])", name)
        if found is None or not isinstance(options, str):
            raise UserError(
                f"judge.toml, [sizes], {name}: name a size by its number of parameters, and put its options in "
                'quotes: 124M = "--model_dim 768"'
            )
        sizes.append(Size(name, float(found[1]) * UNITS[found[2]], shlex.split(options)))
    if len(sizes) < 2:
        raise UserError("--sizes needs a table [sizes] with two sizes or more in judge.toml")
    return sorted(sizes, key=lambda size: size.parameters)


# -----------------------------------------------------------------------------
# A size


def runs_of_size(c: Comparison, pairs: int) -> Wanted:
    """Those that decide, and then those that the change comes from."""
    yield from wanted_runs(c)
    yield from slope_runs(c)
    for variant in [c.base, *c.ideas]:
        yield variant, range(c.seed, c.seed + pairs)


def change_of(c: Comparison, parameters: float, pairs: int) -> Change | None:
    """None if pairs are missing, or if it isn't known what a step is worth."""
    (idea,) = c.ideas
    slope = c.slope()
    seeds = c.seeds(c.base, idea)[:pairs]
    if slope is None or len(seeds) < pairs:
        return None
    sides = losses(idea, seeds), losses(c.base, seeds)
    step = rounding([*sides[0], *sides[1]])
    own_steps = c.steps(idea) / c.steps(c.base)
    return measure_change(parameters, np.subtract(*sides), step, slope, own_steps)


def progress_of_size(c: Comparison, pairs: int) -> str:
    if undecided(c):
        return progress(c)
    return f"decided; {c.count(c.ideas[0])} of {pairs} pairs for the trend"


def judge_size(c: Comparison, size: Size, pairs: int) -> None:
    """Makes its runs, and fills in what they say, also after Ctrl-C. Raises UserError."""
    began = time.monotonic()
    try:
        make_runs(
            c.pool,
            lambda: runs_of_size(c, pairs),
            lambda: show_line(f"{size.name}: {progress_of_size(c, pairs)}"),
        )
    finally:
        show_line()
        size.minutes = (time.monotonic() - began) / 60
        size.effect = c.effect(c.ideas[0])
        size.change = change_of(c, size.parameters, pairs)
        for variant in c.variants:
            ends = {f"seed {seed}": log.end.val_loss for seed, log in sorted(variant.runs.items())}
            size.losses[variant.name] = ends
        judged = [variant.name for variant in [c.base, *c.ideas]]
        size.notes = c.notes + warnings_in_words({name: size.losses[name] for name in judged})


# -----------------------------------------------------------------------------
# All sizes


def write_json(args: Namespace, sizes: list[Size]) -> None:
    """Also before a size is run, with the forecast for it."""
    found = {
        "until": args.until,
        "pairs": args.sizes,
        "verdict": verdict_over(verdicts(sizes)),
        "sizes": [asdict(size) for size in sizes],
    }
    if line := trend(changes(sizes)):
        found["trend"] = asdict(line)
    if args.json:
        write_file(args.json, as_json(found))


def climb(
    args: Namespace, settings: Settings, set_up: Callable[[Namespace, list[str]], Comparison]
) -> int:
    """Judges size after size. set_up(args, options) reads and checks what is compared at a size. Returns the exit
    status. Raises UserError."""
    sizes = read_sizes(settings)
    as_they_are = Namespace(**vars(args) | {"retune": None})
    comparisons = [set_up(as_they_are, size.options) for size in sizes]  # errors come before the runs
    began = time.monotonic()
    facts = list(comparisons[0].warnings)  # the others have the same ones
    status = 0
    for size, c in zip(sizes, comparisons):
        if enough(verdicts(sizes)) and not args.all_sizes:
            facts.append("The two smallest sizes decide; --all_sizes goes on.")
            break
        size.forecast = forecast(changes(sizes), size.parameters)
        if size.forecast:
            print(forecast_in_words(size), flush=True)
            write_json(args, sizes)
        now = time.monotonic()
        try:
            if args.retune:
                c = set_up(args, size.options)
            c.pool.hours = args.hours - (now - began) / 3600
            c.pool.started = now
            judge_size(c, size, args.sizes)
        except KeyboardInterrupt:
            status = 130
            facts.append("Interrupted; run the same command again to continue.")
        if size.effect:
            write_ledger(args.ledger, with_answers(c, args))
        if status or c.pool.late():
            break
    if verdicts(sizes):
        facts.append(machine_in_words(c.pool))
    print("\n".join(ladder_in_words(c.ideas[0].name, sizes, args.sizes, facts)))
    write_json(args, sizes)
    if args.output:
        from judge.sizes.picture import draw_ladder  # takes a second

        draw_ladder(c.ideas[0].name, sizes, args.output)
    return status
