"""
Compares the step times of an idea and the base: those in the logs of runs that took turns (read_times), or,
if several were made at once on a CPU, without whole runs (measure_times).

Both scripts train at the same time, each in a process of its own, but only one of them runs at any
moment: the other is stopped with SIGSTOP. They take turns in bursts of BURST steps. A round is one
burst of each, and gives one ratio. Slow drifts of the machine cancel. Both train the same number of
steps, with the whole schedule, so that both have the same attention windows.

Processes of one script differ, too, for example in where their memory lies. So after ROUNDS rounds, two
new processes start, until there are PROCESSES of each script. The interval comes from the means of the
processes: rounds of the same two aren't independent, and would make it too narrow. More processes with
fewer rounds each also make it narrower: its t is 4.0 with 6 processes, and 5.8 with 4.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

from judge.compare.pairs import Comparison
from judge.runs.make import Pool, last_lines, no_interrupt, runs_a_process, show_line, start
from judge.runs.sources import Variant, set_steps
from judge.compare.answer import step_time
from judge.commands import UserError
from judge.environment import usable_cores
from judge.files import write_file
from judge.processes import has_nvidia_gpu
from judge.text import short

BURST = 20  # steps
ROUNDS = 5  # of two processes
PROCESSES = 6  # of each script
# Of a process. Before a stopped one, there may be a step more than asked for
STEPS = ROUNDS * (BURST + 2)
STEP = re.compile(rb"^step:\d+/\d+ train_time:([\d.]+)ms", re.MULTILINE)


class Trainer:
    """A training script that runs for some steps when it is told to, and is stopped meanwhile."""

    def __init__(self, pool: Pool, variant: Variant, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.name = variant.name
        self.console = folder / "console.txt"
        self.child = start(pool, variant, [0], folder, pool.slots[0], usable_cores())

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def times(self) -> list[float]:
        """The training time after each step so far, in ms."""
        return [float(time) for time in STEP.findall(self.console.read_bytes())]

    def run(self, steps: int) -> bool:
        """Runs until there are this many steps in all, and stops. False if the script ends before."""
        self.send(signal.SIGCONT)
        while len(self.times()) < steps:
            if self.child.poll() is not None:
                return False
            time.sleep(0.01)
        self.send(signal.SIGSTOP)
        return True

    def burst(self) -> float | None:
        """The time of a step in ms; None if too few are left."""
        first = len(self.times())  # the step that ends next began before the script was stopped
        if not self.run(first + BURST + 1):
            return None
        times = self.times()
        return (times[first + BURST] - times[first]) / BURST

    def close(self) -> None:
        self.send(signal.SIGKILL)
        self.child.wait()


def measure_round(trainers: list[Trainer], number: int) -> float | None:
    """log(idea's step time / base's) of a round; None if one of the scripts has too few steps left."""
    order = trainers if number % 2 == 0 else trainers[::-1]  # which one is first alternates
    times = {trainer: trainer.burst() for trainer in order}
    base, idea = [times[trainer] for trainer in trainers]
    return math.log(idea / base) if base and idea else None


def times_file(base: Variant, idea: Variant) -> Path:
    """Where their ratios of times are kept."""
    file = base.project.folder / "step_times" / f"{base.key()}_{idea.key()}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def measure_rounds(pool: Pool, base: Variant, idea: Variant, number: int) -> list[float]:
    """Starts a process of each, and returns log(idea's step time / base's) of each round. Raises UserError."""
    steps = min(base.num_iterations(), idea.num_iterations(), STEPS)
    trainers = []
    ratios = []
    try:
        for i, variant in enumerate([base, idea]):
            folder = pool.settings.working() / f"steps{i}"
            with no_interrupt():
                trainers.append(Trainer(pool, set_steps(variant, steps), folder))
            trainers[i].run(1)
        while len(ratios) < ROUNDS:
            ratio = measure_round(trainers, number + len(ratios))
            if ratio is None:
                break
            ratios.append(ratio)
        if not ratios:
            ended = [trainer for trainer in trainers if trainer.child.poll() is not None][0]
            raise UserError(
                f"{last_lines(ended.console)}\n{ended.name}: the script failed, or has too few steps "
                "to be timed. --no_times skips this measurement"
            )
    finally:
        for trainer in trainers:
            trainer.close()
    return ratios


def ideas_to_time(c: Comparison) -> list[Variant]:
    """Those whose times decide something: a slower idea that helps may be no gain, and an identical one may be
    faster. With --times, all."""
    if c.args.no_times or c.args.gate:
        return []
    worth = {effect.name for effect in c.effects() if effect.verdict in ("helps", "identical")}
    return [idea for idea in c.ideas if c.args.times or idea.name in worth]


def take_turns(c: Comparison) -> bool:
    """Runs that are made one at a time take turns, so their logs have times that can be compared."""
    return len(c.pool.slots) == 1


def can_measure(c: Comparison) -> bool:
    """Whether two runs fit side by side on this machine, and print the times of their steps."""
    elsewhere = c.pool.settings.launcher or has_nvidia_gpu() or c.base.num_iterations() is None
    return not elsewhere and any(step_time(log) > 0 for log in c.base.runs.values())


def steps_to_time(c: Comparison) -> int:
    """By measure_times; 0 if it isn't needed."""
    if take_turns(c) or not can_measure(c):
        return 0
    return len(ideas_to_time(c)) * 2 * PROCESSES * STEPS


def add_all_times(c: Comparison) -> None:
    """The times of the ideas for which they matter."""
    if take_turns(c):
        read_times(c)
    elif can_measure(c):
        measure_times(c)
    elif ideas_to_time(c):
        c.notes.append(
            "Step times aren't compared, because the runs didn't take turns; --jobs 1 does that."
        )


def measure_times(c: Comparison) -> None:
    """Measures the step times of ideas. If that fails, the answer is about losses only."""
    for idea in ideas_to_time(c):
        name = short(idea.name, 30)
        file = times_file(c.base, idea)
        processes = json.loads(file.read_bytes()) if file.exists() else []
        try:
            while len(processes) < PROCESSES:
                show_line(f"step times of {name}: {len(processes)} of {PROCESSES} processes")
                processes.append(measure_rounds(c.pool, c.base, idea, len(processes)))
                write_file(file, json.dumps(processes).encode())
            idea.log_ratios = [statistics.fmean(rounds) for rounds in processes]
        except OSError as e:
            show_line()
            print(e, file=sys.stderr)
            c.notes.append(f"The steps of {name} could not be timed; the error is above this answer.")


def read_times(c: Comparison) -> None:
    """The step times from whole runs: log(idea's / base's) of each pair. Only pairs count
    whose runs took turns. A run that is kept from another comparison met the machine at another time.

    Pairs of the same two processes aren't independent, so their mean counts."""
    for idea in [] if c.args.no_times else c.ideas:
        file = times_file(c.base, idea)
        ratios = json.loads(file.read_bytes()) if file.exists() else {}
        for seed in idea.new ^ c.base.new:
            ratios.pop(str(seed), None)  # one of the two was made again
        for seed in sorted(idea.new & c.base.new):
            ours, theirs = step_time(idea.runs[seed]), step_time(c.base.runs[seed])
            if ours > 0 and theirs > 0:
                ratios[str(seed)] = math.log(ours / theirs)
        write_file(file, json.dumps(ratios).encode())
        processes = {}
        for seed, ratio in ratios.items():
            processes.setdefault(int(seed) // runs_a_process(c.base), []).append(ratio)
        idea.log_ratios = [statistics.fmean(pairs) for pairs in processes.values()]
        kept = idea.runs.keys() & c.base.runs.keys()  # some may have been deleted
        idea.timed = [int(seed) for seed in ratios if int(seed) in kept]
