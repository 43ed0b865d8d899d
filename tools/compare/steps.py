"""
Compares the step times of an idea and the base, without whole runs.

Both scripts train at the same time, each in a process of its own, but only one of them runs at any
moment: the other is stopped with SIGSTOP. They take turns in bursts of BURST steps. A round is one
burst of each, and gives one ratio. Slow drifts of the machine cancel. Both do the same number of steps,
so that both have the same attention windows.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from tools.common import usable_cores, write_file
from tools.compare import runs as compare_runs
from tools.compare.runs import Pool, RunError, last_lines, start_script
from tools.compare.sources import Variant, set_steps

BURST = 20  # steps
ROUNDS = 30
STEP = re.compile(rb"step:\d+/\d+ train_time:([\d.]+)ms")


class Trainer:
    """A training script that runs for some steps when it is told to, and is stopped meanwhile."""

    def __init__(self, pool: Pool, variant: Variant, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.name = variant.name
        self.console = folder / "console.txt"
        options = ["--log_dir", str(folder / "logs"), "--seed", "0"]
        if variant.settings is not None:
            options += ["--val_loss_every", "0"]
        with open(self.console, "wb") as console:
            streams = dict(stdout=subprocess.PIPE, stderr=console)
            self.child = start_script(pool, variant, options, usable_cores(), **streams)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def run(self, steps: int) -> list[float]:
        """Runs for this many steps, then stops. Returns the training time after each, in ms. Raises
        RunError."""
        self.send(signal.SIGCONT)
        times = []
        while len(times) < steps:
            line = self.child.stdout.readline()
            if not line:
                raise RunError(
                    f"{last_lines(self.console)}\nerror: {self.name} stopped while its steps were timed. "
                    "--no_times skips this measurement"
                )
            found = STEP.match(line)
            if found:
                times.append(float(found[1]))
        self.send(signal.SIGSTOP)
        return times

    def burst(self) -> float:
        """Returns the time of a step in ms."""
        # The first step that ends now began before the process was stopped
        times = self.run(BURST + 1)
        return (times[BURST] - times[0]) / BURST

    def close(self) -> None:
        self.send(signal.SIGKILL)
        self.child.wait()
        self.child.stdout.close()


def measure_rounds(pool: Pool, base: Variant, idea: Variant, show) -> list[float]:
    """Returns log(idea's step time / base's) of all rounds, those kept from before included.

    Calls show(ratios) after each round. Raises RunError.
    """
    file = compare_runs.FOLDER / "times" / f"{pool.key(base)}_{pool.key(idea)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    ratios = json.loads(file.read_text()) if file.exists() else []
    steps = min(base.num_iterations(), idea.num_iterations() or base.num_iterations())
    rounds = steps // (BURST + 2)  # of a start
    if rounds == 0:
        raise RunError(f"error: {idea.name}: timing takes runs of {BURST + 2} steps; use --no_times")
    while len(ratios) < ROUNDS:
        trainers = []
        try:
            for i, variant in enumerate([base, idea]):
                folder = compare_runs.FOLDER / "working" / f"steps{i}"
                trainers.append(Trainer(pool, set_steps(variant, steps), folder))
                trainers[i].run(1)
            for i in range(min(rounds, ROUNDS - len(ratios))):
                # Which one is first alternates
                order = trainers if i % 2 == 0 else trainers[::-1]
                ms = {trainer: trainer.burst() for trainer in order}
                ratios.append(math.log(ms[trainers[1]] / ms[trainers[0]]))
                write_file(file, json.dumps(ratios).encode())
                show(ratios)
        finally:
            for trainer in trainers:
                trainer.close()
    return ratios
