"""
Compares the step times of an idea and the base, without whole runs.

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
import time
from pathlib import Path

from judge.compare import runs as compare_runs
from judge.compare.runs import Pool, last_lines, start_script
from judge.compare.sources import Variant, set_steps
from lib.commands import UserError
from lib.environment import usable_cores
from lib.files import write_file

BURST = 20  # steps
ROUNDS = 5  # of two processes
PROCESSES = 6  # of each script
STEPS = ROUNDS * (
    BURST + 2
)  # of a process. Before a stopped one, there may be a step more than asked for
STEP = re.compile(rb"^step:\d+/\d+ train_time:([\d.]+)ms", re.MULTILINE)


class Trainer:
    """A training script that runs for some steps when it is told to, and is stopped meanwhile."""

    def __init__(self, pool: Pool, variant: Variant, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.name = variant.name
        self.console = folder / "console.txt"
        self.child = start_script(pool, variant, [0], folder, usable_cores())
        self.output = open(self.console, "rb")
        self.found = []  # see times()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def times(self) -> list[float]:
        """The training time after each step so far, in ms. This runs while steps are timed, so it reads only
        the lines that are new."""
        new = self.output.read()
        end = new.rfind(b"\n") + 1  # the last line may still grow
        self.output.seek(end - len(new), os.SEEK_CUR)
        self.found += map(float, STEP.findall(new[:end]))
        return self.found

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
        self.output.close()


def measure_round(trainers: list[Trainer], number: int) -> float | None:
    """log(idea's step time / base's) of a round; None if one of the scripts has too few steps left."""
    order = trainers if number % 2 == 0 else trainers[::-1]  # which one is first alternates
    times = {trainer: trainer.burst() for trainer in order}
    base, idea = [times[trainer] for trainer in trainers]
    return math.log(idea / base) if base and idea else None


def times_file(pool: Pool, base: Variant, idea: Variant) -> Path:
    """Where their ratios of times are kept."""
    file = compare_runs.FOLDER / "step_times" / f"{pool.key(base)}_{pool.key(idea)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def measure_rounds(pool: Pool, base: Variant, idea: Variant, number: int) -> list[float]:
    """Starts a process of each, and returns log(idea's step time / base's) of each round. Raises UserError."""
    steps = min(n for n in (base.num_iterations(), idea.num_iterations(), STEPS) if n)
    trainers = []
    ratios = []
    try:
        for i, variant in enumerate([base, idea]):
            folder = compare_runs.scratch() / f"steps{i}"
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


def measure_processes(pool: Pool, base: Variant, idea: Variant, show) -> list[list[float]]:
    """Returns measure_rounds of all processes, those kept from before included. Calls show(number) before
    each. Raises UserError."""
    file = times_file(pool, base, idea)
    found = json.loads(file.read_bytes()) if file.exists() else []
    while len(found) < PROCESSES:
        show(len(found))
        found.append(measure_rounds(pool, base, idea, len(found)))
        write_file(file, json.dumps(found).encode())
    return found
