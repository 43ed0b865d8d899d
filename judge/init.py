"""
Finds out how a project trains, by two short runs with different seeds, and writes judge.toml.

    judge init --command "python train.py --seed {seed} {options}"
    judge init --command "make train SEED={seed}" --metric accuracy --higher_is_better

Other options are passed to both runs, to make them short: --max_iters 50. A run is ended after --seconds;
what it has printed until then counts. With a judge.toml that is there already, judge init only shows what
it finds.

Exit status: 0 both runs were read, 2 an error, 130 interrupted.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from judge.commands import UserError, command_parser, join_values, positive
from judge.logs.lines import joined, named_numbers, plain
from judge.logs.read import parse_log
from judge.settings import KEYS, TEXTS, Settings, add_settings, read_settings
from judge.runs.kept import opened
from judge.runs.make import Pool, end_worker, files_of_logs, locked_folder, open_pool, start_worker
from judge.runs.start import Worker, fail, last_lines
from judge.runs.variants import Variant, check_options, check_settings, first_variant, read_variant
from judge.text import duration, plural, short, show_line, wrap

MEASURES = re.compile(r"loss|bpb|acc|ppl|perplexity|error|score|reward|mse|auc|f1(?![a-z0-9])")
HELD_OUT = re.compile(r"val|test|eval|dev")
FEW_RUNS, MANY_RUNS = 6, 70  # of an answer: a large effect; none


@dataclass
class Trial:
    """A short run."""

    numbers: dict[str, list[str]]  # all that have a name, in the order in which they came
    file: str  # that it wrote; "" for its output
    steps: int  # 0 if the log names none
    seconds: float
    ended: bool  # by itself
    outside: list[str]  # files that it read outside of the project


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("init", __doc__)
    limit = "end each run after S seconds; default: 60"
    parser.add_argument("--seconds", type=positive, default=60, metavar="S", help=limit)
    add_settings(parser)
    return parser


def read_trial(pool: Pool, worker: Worker, seconds: float) -> Trial:
    """Raises UserError if the run has failed, or if it names no number that could count."""
    status = worker.child.poll()
    if status:
        fail(worker, f"exit status {status}")
    logs, lines = files_of_logs(worker)
    console = worker.folder / "console.txt"
    file = max(logs or lines, key=lambda path: path.stat().st_mtime, default=console)
    numbers = named_numbers(plain(file.read_text("utf-8", "replace")))
    if not numbers:
        limit = "" if status == 0 else f" in {seconds:.0f} s; give it more --seconds"
        raise UserError(f"{last_lines(console)}\nthe run names no number{limit}")
    metric, _ = choose_metric(pool.settings.metric, list(numbers))
    steps = 0
    with contextlib.suppress(UserError):  # no line has both
        steps = parse_log(file, metric).num_steps
    read = [path for path, kinds in (opened(worker) or {}).items() if kinds[0] == "r"]
    outside = [
        path
        for path in read
        if os.path.isfile(path) and not Path(path).is_relative_to(pool.settings.root)
    ]
    name = str(file.relative_to(worker.folder / "copy")) if "copy" in file.parts else ""
    return Trial(numbers, name, steps, seconds, status == 0, outside)


def make_trial(pool: Pool, variant, seed: int, limit: float) -> Trial:
    """Raises UserError."""
    worker = start_worker(pool, variant, [seed])
    began = time.monotonic()
    show_line(f"a run with seed {seed}, for at most {limit:.0f} s")
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.child.wait(limit)
        return read_trial(pool, worker, time.monotonic() - began)
    finally:
        show_line()
        end_worker(pool, worker)


def choose_metric(wanted: str, names: list[str]) -> tuple[str, list[str]]:
    """The number that counts, and others that could. Raises UserError if there is none."""
    measures = [name for name in names if MEASURES.search(name)]
    measures = [name for name in measures if HELD_OUT.search(name)] or measures
    if wanted:
        measures = [name for name in names if name.endswith(joined(wanted.split()))]
    if not measures:
        raise UserError(
            f"which number counts? give --metric NAME; there are {short(', '.join(names), 200)}"
        )
    return measures[0], measures[1:]


def seed_in_words(command: str, metric: str, trials: list[Trial]) -> str:
    """Whether the seed takes effect."""
    first, second = [trial.numbers.get(metric, []) for trial in trials]
    if "{seed}" not in command:
        return (
            "none: write {seed} where the command sets its seed; a fixed one, such as 1337, is changed in the copy "
            "by: sed -i s/1337/{seed}/ train.py && python train.py"
        )
    if first[: len(second)] == second[: len(first)]:
        return f"HAS NO EFFECT: {metric} is {first[-1] if first else '?'} with both; does the script use it?"
    return f"takes effect: {metric} is {first[-1]} with seed 1, {second[-1]} with seed 2"


def report(base: Variant, metric: str, others: list[str], trials: list[Trial], jobs: int) -> list[str]:
    """Six lines, some of which may be wrapped."""
    first = trials[0]
    steps = first.steps if first.steps > 1 else "unknown"
    option = base.project.steps_option
    can_be_set = base.num_iterations() is not None
    needs = f"to set them, the command needs {{options}} and {option} (or another steps_option)"
    outside = ", ".join(sorted({path for trial in trials for path in trial.outside}))
    longest = max(trial.seconds for trial in trials)
    more = "" if first.ended else "more than "
    few, many = [duration(longest * math.ceil(runs / jobs)) for runs in (FEW_RUNS, MANY_RUNS)]
    no_effect = (
        f", {many} if there is none" if can_be_set else "; only --hours ends it if there is none"
    )
    words = {
        "metric": f"{metric}, of {first.file or 'the output'}"
        + f"; also there: {', '.join(others)}" * bool(others),
        "steps": f"{steps}; {f'{option} sets them' if can_be_set else needs}",
        "seed": seed_in_words(base.command, metric, trials),
        "data": f"outside the project: {short(outside, 150) or 'none'}",
        "a run": f"takes {more}{duration(longest)}; {plural(jobs, 'run')} at a time",
        "an answer": f"takes {few} if the effect is large{no_effect}",
    }
    lines = [wrap(f"{name + ':':11}{text}", later_indent=" " * 11) for name, text in words.items()]
    return list(itertools.chain(*lines))


def write_project(settings: Settings) -> str:
    """Writes judge.toml, unless there is one. Returns what it did."""
    file = settings.root / "judge.toml"
    if file.exists():
        return "judge.toml stays as it is"
    values = {name: getattr(settings, name) for name in KEYS}
    unusual = {name: value for name, value in values.items() if value != KEYS[name].default}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in unusual.items()]
    file.write_text("".join(lines), encoding="utf-8")
    return 'wrote judge.toml; next: judge compare --idea "OPTIONS, a patch or a branch"'


def main(argv: list[str]) -> int:
    args, common = make_parser().parse_known_args(join_values(argv, TEXTS))
    settings = read_settings(args, Path.cwd())
    check_options(settings.command, common)
    with locked_folder(settings):
        first = first_variant([], replace(settings, no_seed=True))  # a missing seed is reported below
        base = read_variant(".", first, common)
        check_settings([base])
        pool = open_pool([base], settings, math.inf)
        trials = [make_trial(pool, base, seed, args.seconds) for seed in (1, 2)]
    metric, others = choose_metric(settings.metric, list(trials[0].numbers))
    print("\n".join(report(base, metric, others, trials, len(pool.slots))))
    print(write_project(replace(settings, metric=settings.metric or metric)))
    return 0
