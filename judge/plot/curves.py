"""
Draws the validation losses of runs: whole runs on the left, their end on the right.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from judge.plot.style import COLORS, plt, save_figure
from judge.logs.read import Log
from judge.commands import UserError
from judge.text import short

X_LABELS = {"step": "training step", "time": "training time (s)"}
LINE_STYLES = plt.cycler(linestyle=("-", "-.", ":"))
LOOKS = LINE_STYLES * plt.cycler(color=COLORS)
END = 0.85  # the right panel begins after this fraction of the run


# -----------------------------------------------------------------------------
# Curves


@dataclass
class Curve:
    """The mean loss of several runs, at the steps that all of them validated.

    The arrays are float64 of shape (points,).
    """

    x: np.ndarray  # steps, or seconds
    mean: np.ndarray  # nats per token
    spread: np.ndarray  # standard deviation over the runs; 0 for a single run
    runs: int
    where: str  # the runs end, if that isn't the end of their schedule

    def at(self, fraction: float) -> float:
        """Where this fraction of the run is on the x axis."""
        return self.x[0] + fraction * (self.x[-1] - self.x[0])

    def loss_at(self, fraction: float) -> float:
        """The mean loss after this fraction of the run."""
        return np.interp(self.at(fraction), self.x, self.mean)


def points(log: Log, x: str) -> dict[int, tuple[float, float]]:
    """Maps steps to (place on the x axis, loss), if both are finite."""
    found = {}
    for v in log.validations:
        place = v.train_time_ms / 1000 if x == "time" else v.step
        if math.isfinite(v.val_loss) and math.isfinite(place):
            found[v.step] = (place, v.val_loss)
    return found


def curve(logs: list[Log], x: str) -> Curve:
    """Averages the runs. Raises UserError."""
    runs = [points(log, x) for log in logs]
    steps = sorted(set.intersection(*map(set, runs)))
    if not steps:
        raise UserError(f"{logs[0].path}: no validation, or none in common with its label's other runs")
    table = np.array([[run[step] for step in steps] for run in runs])
    places = table[:, :, 0].mean(axis=0)
    losses = table[:, :, 1]
    mean = np.array([statistics.fmean(column) for column in losses.T])  # rounds like the tables' mean
    spread = losses.std(axis=0, ddof=1 if len(runs) > 1 else 0)
    num_steps = logs[0].num_steps
    where = f" at step {steps[-1]} of {num_steps}" if steps[-1] < num_steps else ""
    return Curve(places, mean, spread, len(runs), where)


# -----------------------------------------------------------------------------
# The plot


def draw_curve(axes, label: str, c: Curve) -> None:
    """Draws points, a line, and a band of one standard deviation. The label gets the final loss."""
    text = f"{short(label, 40)}: {c.mean[-1]:.4f}"
    if c.runs > 1:
        text += f" ± {c.spread[-1]:.4f}, {c.runs} runs"
    text += c.where
    (line,) = axes.plot(c.x, c.mean, marker="o", markersize=3.5, linewidth=1.6, label=text)
    low = c.mean - c.spread
    high = c.mean + c.spread
    axes.fill_between(c.x, low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def set_limits(whole, end, curves: list[Curve], targets: list[float]) -> None:
    """Zooms in on the losses after the steep fall at the start, and on the end."""
    lowest = min([*targets, *(min(c.mean - c.spread) for c in curves)])
    for axes, fraction in ((whole, 0.1), (end, END)):
        highest = max([*targets, *(c.loss_at(fraction) for c in curves)])
        margin = 0.06 * (highest - lowest) or 0.01
        axes.set_ylim(lowest - margin, highest + margin)
    start = min(c.at(END) for c in curves)
    last = max(c.x[-1] for c in curves)
    room = 0.04 * (last - start) or 1
    end.set_xlim(start, last + room)


def plot_curves(groups: dict[str, list[Log]], path: Path, x: str, target: float | None) -> None:
    """`groups` maps labels to their runs. The target is a loss. Raises UserError."""
    curves = {label: curve(logs, x) for label, logs in groups.items()}
    height = 3.7 + 0.12 * (len(groups) + 1)
    figure, (whole, end) = plt.subplots(1, 2, width_ratios=(3, 2), figsize=(8, height))
    for axes in (whole, end):
        axes.set_prop_cycle(LOOKS)
        for label, c in curves.items():
            draw_curve(axes, label, c)
        if target is not None:
            label = f"target: {target:g}"
            axes.axhline(target, color="0.35", linestyle="--", linewidth=1.2, zorder=1, label=label)
    set_limits(whole, end, list(curves.values()), [] if target is None else [target])
    metrics = {logs[0].metric for logs in groups.values()}
    known = {"val_loss": "validation loss (nats per token)", "train_loss": "loss (nats per token)"}
    whole.set_ylabel(known.get(min(metrics), min(metrics)))
    end.set_title("the end of the runs")
    figure.supxlabel(X_LABELS[x], fontsize=11)
    # matplotlib itself leaves out a label that begins with _
    labels = [line.get_label() for line in whole.lines]
    figure.legend(whole.lines, labels, loc="outside upper center", ncols=2)
    save_figure(figure, path)
