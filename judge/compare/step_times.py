"""
Compares the step times of an idea and the base, from the logs of runs that took turns: log(the idea's time of a
step / the base's) of each pair.

If whole runs were made at once on a CPU, short ones take turns afterwards: one at a time, on all cores, with the
whole schedule, so that both have the same attention windows.

Processes of one script differ, too, for example in where their memory lies. So the interval comes from the means
of the processes: pairs of the same two aren't independent, and would make it too narrow.
"""

import itertools
import json
import math
import statistics
import sys
from dataclasses import replace

from judge.compare.pairs import Comparison
from judge.runs.make import make_runs, open_pool, runs_a_process
from judge.runs.variants import Variant, set_steps
from judge.compare.answer import step_time
from judge.files import write_file
from judge.processes import has_nvidia_gpu
from judge.text import short, show_line

SHORT_SEEDS = range(100_000, 100_006)  # of short runs; no other runs have them
STEPS = 110  # of a short run


def add_all_times(c: Comparison, also_worse: bool) -> None:
    """The times of the ideas for which they matter, if the logs have times. Runs that are made one at a time take
    turns; others need short ones, on this machine. A slower idea that helps may be no gain, and an identical one
    may be faster; after other verdicts, times are measured only if they are asked for."""
    if len(c.pool.slots) == 1:
        for idea in c.ideas:
            idea.log_ratios = by_process(read_ratios(c.base, idea), runs_a_process(c.base))
        return
    worth = {effect.name for effect in c.effects() if effect.verdict in ("helps", "identical")}
    ideas = [idea for idea in c.ideas if also_worse or idea.name in worth]
    elsewhere = c.pool.settings.launcher or has_nvidia_gpu() or c.base.num_iterations() is None
    timed = any(step_time(log) > 0 for log in c.base.runs.values())
    if timed and not elsewhere:
        for idea in ideas:
            measure_times(c, idea)
    elif ideas:
        c.notes.append(
            "Step times aren't compared, because the runs didn't take turns; --jobs 1 does that."
        )


def measure_times(c: Comparison, idea: Variant) -> None:
    """Makes the short runs that are missing. If one fails, the answer is about losses only."""
    name = short(idea.name, 30)
    settings = replace(c.pool.settings, jobs=1, job_per_core=False)
    steps = min(c.base.num_iterations(), idea.num_iterations(), STEPS)
    pair = [set_steps(variant, steps) for variant in (c.base, idea)]
    try:
        pool = open_pool(pair, settings, math.inf)
        for count, seed in enumerate(SHORT_SEEDS):
            if seed not in read_ratios(*pair):
                show_line(f"step times of {name}: {count} of {len(SHORT_SEEDS)} runs")
                for variant in pair:
                    variant.runs.pop(seed, None)  # a run of another time took no turn
                order = pair[:: -1 if seed % 2 else 1]  # which one is first alternates
                make_runs(pool, lambda: [(variant, [seed]) for variant in order])
            idea.log_ratios = by_process(read_ratios(*pair), 1)
    except OSError as e:
        show_line()
        print(e, file=sys.stderr)
        c.notes.append(f"The steps of {name} could not be timed; the error is above this answer.")


def read_ratios(base: Variant, idea: Variant) -> dict[int, float]:
    """log(the idea's time of a step / the base's), by seed, of the pairs whose runs took turns: both were made in
    this session, or in an earlier one, whose ratios are kept."""
    file = base.project.folder / "step_times" / f"{base.key()}_{idea.key()}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(file.read_bytes()) if file.exists() else {}
    ratios = {int(seed): ratio for seed, ratio in kept.items() if int(seed) not in idea.new | base.new}
    for seed in idea.new & base.new:
        ours, theirs = step_time(idea.runs[seed]), step_time(base.runs[seed])
        if ours > 0 and theirs > 0:
            ratios[seed] = math.log(ours / theirs)
    write_file(file, json.dumps(ratios).encode())
    return ratios


def by_process(ratios: dict[int, float], runs: int) -> list[float]:
    """The means of each two processes, which make so many runs."""
    processes = itertools.groupby(sorted(ratios), lambda seed: seed // runs)
    return [statistics.fmean(ratios[seed] for seed in seeds) for _, seeds in processes]
