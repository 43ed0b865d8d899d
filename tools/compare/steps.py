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
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from tools.compare.runs import FOLDER, RunError, Setup
from tools.compare.sources import Variant, check_data, set_steps
from tools.compare.stats import P_VALUE, half_widths
from tools.common import UsageError, write_file

BURST = 20        # steps
ROUNDS = 30
LARGEST_ERROR = 0.05  # half of the 99% interval of log(ratio), with twice as many rounds
START_TIMEOUT = 1800  # seconds; the first start compiles
STEP = re.compile(rb"^step:(\d+)/\d+ train_time:(\d+(?:\.\d+)?)(ms|s)", re.MULTILINE)


class Trainer:
    """A training script that runs for some steps when it is told to, and is stopped meanwhile."""

    def __init__(self, setup: Setup, variant: Variant, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.name = variant.name
        self.console = folder / "console.txt"
        options = ["--log_dir", str(folder / "logs"), "--seed", "0"]
        if variant.settings is not None:
            options += ["--val_loss_every", "0"]
        with open(self.console, "wb") as console:
            self.child = setup.launch(variant, options, subprocess.PIPE, console)
        self.output = self.child.stdout.fileno()
        os.set_blocking(self.output, False)
        self.text = b""

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    def read(self, steps: int, timeout: float) -> list[float]:
        """Waits for this many steps. Returns the training time after each, in ms. Raises RunError."""
        deadline = time.monotonic() + timeout
        times = []
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            while len(times) < steps:
                if not selector.select(max(0, deadline - time.monotonic())):
                    raise RunError(
                        f"error: {self.name}: finished no step within {timeout:.0f} s; the script hangs or "
                        "the machine is too busy. --no_times skips this measurement"
                    )
                data = os.read(self.output, 1 << 16)
                if not data:
                    raise RunError(self.failure())
                *lines, self.text = (self.text + data).split(b"\n")
                for line in lines:
                    found = STEP.match(line)
                    if found and b"val_loss" not in line:
                        milliseconds = float(found[2]) * (1000 if found[3] == b"s" else 1)
                        times.append(milliseconds)
        return times

    def failure(self) -> str:
        printed = self.console.read_text(encoding="utf-8", errors="replace").strip()
        lines = printed.splitlines()[-12:]
        return "\n".join([*lines, f"error: {self.name} stopped while its steps were timed. "
                          "--no_times skips this measurement"])

    def burst(self) -> float:
        """Runs for a burst. Returns the time of a step in ms."""
        self.send(signal.SIGCONT)
        # The first step that ends now began before the process was stopped
        times = self.read(BURST + 1, timeout=600)
        self.send(signal.SIGSTOP)
        return (times[BURST] - times[0]) / BURST

    def close(self) -> None:
        self.send(signal.SIGKILL)
        self.child.wait()
        self.child.stdout.close()


def times_file(setup: Setup, base: Variant, idea: Variant) -> Path:
    return FOLDER / "times" / f"{setup.key(base)}_{setup.key(idea)}.json"


def kept_rounds(setup: Setup, base: Variant, idea: Variant) -> list[float]:
    """log(idea's step time / base's) of the rounds that were measured before."""
    try:
        return json.loads(times_file(setup, base, idea).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []


def half_width(ratios: list[float]) -> float:
    return float(half_widths(np.array(ratios), P_VALUE)[-1]) if ratios else math.inf


def enough(ratios: list[float]) -> bool:
    """Whether no more rounds are needed. A noisy machine gets twice as many."""
    if len(ratios) >= ROUNDS and half_width(ratios) <= LARGEST_ERROR:
        return True
    return len(ratios) >= 2 * ROUNDS


def steps_of_a_start(base: Variant, idea: Variant) -> int:
    """How many steps both scripts can make: those of all rounds. If there are too few data for that,
    those of the runs, which had enough data. Raises RunError."""
    steps = ROUNDS * (BURST + 2)
    try:
        check_data([set_steps(base, steps), set_steps(idea, steps)])
    except UsageError:
        steps = min(steps, base.num_iterations(), idea.num_iterations() or steps)
    if steps < BURST + 2:
        raise RunError(
            f"error: {idea.name}: to time a step, {BURST + 2} steps are needed, and a run has only "
            f"{steps}; add data, or leave out the measurement with --no_times"
        )
    return steps


def measure_rounds(setup: Setup, base: Variant, idea: Variant, threads: int, show) -> list[float]:
    """Returns the log ratios of all rounds, those kept from before included.

    `threads` is per process. Calls show(ratios) after each round. Raises RunError.
    """
    ratios = kept_rounds(setup, base, idea)
    file = times_file(setup, base, idea)
    file.parent.mkdir(parents=True, exist_ok=True)
    steps = 0 if enough(ratios) else steps_of_a_start(base, idea)
    while not enough(ratios):
        rounds = min(steps // (BURST + 2), ROUNDS - len(ratios) % ROUNDS)
        trainers = []
        try:
            for i, variant in enumerate([base, idea]):
                folder = FOLDER / "working" / f"steps{i}"
                timed = set_steps(variant, steps)
                trainer = Trainer(replace(setup, threads=threads), timed, folder)
                trainers.append(trainer)
                trainer.read(1, START_TIMEOUT)
                trainer.send(signal.SIGSTOP)
            for i in range(rounds):
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
