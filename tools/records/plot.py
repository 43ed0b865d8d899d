"""
Plots the validation losses of runs.

    ./run.sh plot [LABEL=]LOG_OR_FOLDER... -o curves.png
                         [--x step|time|tokens] [--smooth] [--target 3.28]

The logs of a folder share a label: the name of the folder. Arguments with the same LABEL= share it
too. If a label has several runs, the plot shows their mean and a band of one standard deviation.
--smooth joins the points with a monotone cubic curve instead of straight lines.

Exit status: 0 written, 2 bad input.
"""

import argparse
import io
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.interpolate import PchipInterpolator

from tools.common import LogError, run_command, write_file
from tools.logs import Log, find_logs, parse_log
from tools.common import readable

X_LABELS = dict(step="training step", time="training time (s)", tokens="training tokens (millions)")
# Colors that color-blind people can tell apart
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
LINE_STYLES = ("-", "-.", ":")
plt.rcParams.update(
    {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "axes.titlesize": 11,
        "figure.figsize": (8, 4.2),
        "figure.constrained_layout.use": True,
        "savefig.dpi": 150,
    }
)


def save_figure(figure, path: Path) -> None:
    """Writes a PNG. The same data give the same bytes. Raises FileError."""
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    plt.close(figure)
    write_file(path, image.getvalue())


# -----------------------------------------------------------------------------
# Curves

@dataclass
class Curve:
    """The mean loss of several runs, at the steps that all of them validated.

    The arrays are float64 of shape (points,).
    """

    x: np.ndarray  # steps, seconds, or millions of tokens
    mean: np.ndarray  # nats per token
    spread: np.ndarray  # standard deviation over the runs; 0 for a single run
    runs: int


def tokens_per_step(log: Log) -> int:
    """Raises LogError if the log doesn't say, or if the number varies."""
    tokens = log.step_tokens
    if len(tokens) == 1:
        return tokens[0]
    problem = "uses a varying number of" if tokens else "doesn't say how many"
    raise LogError(f"{log.path}: {problem} tokens per step; use --x step or --x time")


def positions(log: Log, x: str) -> dict[int, float]:
    """Maps the step of each validation to its place on the x axis. Raises LogError."""
    if x == "step":
        return {v.step: v.step for v in log.validations}
    if x == "time":
        return {v.step: v.train_time_ms / 1000 for v in log.validations}
    tokens = tokens_per_step(log)
    return {v.step: v.step * tokens / 1e6 for v in log.validations}


def curve(logs: list[Log], x: str) -> Curve:
    """Averages the runs. Losses that are not finite are left out. Raises LogError."""
    losses = []  # for each run: step -> loss
    for log in logs:
        finite = [v for v in log.validations if math.isfinite(v.val_loss)]
        losses.append({v.step: v.val_loss for v in finite})
    shared = set(losses[0])
    for loss in losses[1:]:
        shared &= set(loss)
    steps = sorted(shared)
    ys = np.empty((len(logs), len(steps)))
    xs = np.empty((len(logs), len(steps)))
    for i, log in enumerate(logs):
        place = positions(log, x)
        ys[i] = [losses[i][step] for step in steps]
        xs[i] = [place[step] for step in steps]
    spread = np.zeros(len(steps))
    if len(logs) > 1:
        spread = ys.std(axis=0, ddof=1)
    return Curve(xs.mean(axis=0), ys.mean(axis=0), spread, len(logs))


# -----------------------------------------------------------------------------
# Axes

def scale_time(panels: tuple, curves: list[Curve]) -> None:
    """Makes the time axis logarithmic if one run took more than ten times as long as another.

    The axis stays linear up to the first validation after step 0, so that it can show time 0.
    """
    timed = [c.x[c.x > 0] for c in curves if c.x[-1] > 0]
    ends = [x[-1] for x in timed]
    if not ends or max(ends) <= 10 * min(ends):
        return
    longest = max(ends)
    first = min(x[0] for x in timed)
    exponents = range(math.ceil(math.log10(first)), math.ceil(math.log10(longest)))
    ticks = [0] + [10.0**n for n in exponents]
    for axes in panels:
        low = max(axes.get_xlim()[0], 0)
        axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.set_xlim(low, 1.3 * longest)


def highest_loss(curves: list[Curve], part: float) -> float:
    """The highest mean loss of any curve after this fraction of its run."""
    losses = []
    for c in curves:
        start = c.x[0] + part * (c.x[-1] - c.x[0])
        losses.append(float(np.interp(start, c.x, c.mean)))
    return max(losses)


def set_loss_limits(axes, lowest: float, highest: float) -> None:
    """With a small margin. If the losses are all the same, matplotlib chooses the limits."""
    if highest > lowest:
        margin = 0.06 * (highest - lowest)
        axes.set_ylim(lowest - margin, highest + margin)


def set_limits(whole, end, curves: list[Curve], targets: list[float]) -> None:
    """Zooms in on the losses after the steep fall at the start. `end` shows the last 15%."""
    lows = [float(np.min(c.mean - c.spread)) for c in curves]
    lowest = min(lows + list(targets))
    second_losses = []  # at the first validation after the start
    for c in curves:
        second = min(1, len(c.mean) - 1)
        second_losses.append(float(c.mean[second]))
    set_loss_limits(whole, lowest, min(highest_loss(curves, 0.1), max(second_losses)))
    set_loss_limits(end, lowest, highest_loss(curves, 0.85))
    start = min(c.x[0] + 0.85 * (c.x[-1] - c.x[0]) for c in curves)
    last = max(c.x[-1] for c in curves)
    if last > start:
        end.set_xlim(start, last + 0.04 * (last - start))


# -----------------------------------------------------------------------------
# The plot

def draw_curve(axes, c: Curve, color: str, style: str, smooth: bool) -> None:
    """Draws points, a line, and a band of one standard deviation."""
    x = c.x
    mean = c.mean
    low = c.mean - c.spread
    high = c.mean + c.spread
    increasing = (np.diff(c.x) > 0).all()  # PchipInterpolator needs it
    if smooth and len(c.x) > 2 and increasing:
        x = np.linspace(c.x[:-1], c.x[1:], 50, axis=1).ravel()
        mean = PchipInterpolator(c.x, mean)(x)
        low = PchipInterpolator(c.x, low)(x)
        high = PchipInterpolator(c.x, high)(x)
    axes.plot(c.x, c.mean, "o", color=color, markersize=3.5)
    axes.plot(x, mean, style, color=color, linewidth=1.6)
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def legend_text(label: str, c: Curve) -> str:
    """The label with the final loss."""
    text = f"{label}: {c.mean[-1]:.4f}"
    if c.runs > 1:
        text += f" ± {c.spread[-1]:.4f}, {c.runs} runs"
    return text


def draw_targets(whole, end, targets: list[float]) -> None:
    """Draws a dashed line for each target, and one entry in the legend."""
    look = {"color": "0.35", "linestyle": "--"}
    for axes in (whole, end):
        for target in targets:
            axes.axhline(target, linewidth=1.2, zorder=1, **look)
    names = ", ".join(f"{target:g}" for target in targets)
    whole.plot([], [], label=f"target: {names}", **look)


def plot_curves(
    groups: dict[str, list[Log]],
    path: Path,
    x: str = "step",
    smooth: bool = False,
    targets: list[float] = (),
) -> None:
    """Draws whole runs on the left and their end on the right.

    `groups` maps labels to their runs. Raises LogError and FileError.
    """
    curves = {label: curve(logs, x) for label, logs in groups.items()}
    for label, c in curves.items():
        if len(c.x) == 0:
            raise LogError(
                f"{label}: its runs have no step with a finite loss in common; give them different labels"
            )
    height = 3.7 + 0.12 * (len(groups) + 1)
    figure, (whole, end) = plt.subplots(1, 2, width_ratios=(3, 2), figsize=(8, height))
    looks = list(itertools.product(LINE_STYLES, COLORS))
    for i, (label, c) in enumerate(curves.items()):
        style, color = looks[i % len(looks)]
        draw_curve(whole, c, color, style, smooth)
        draw_curve(end, c, color, style, smooth)
        text = legend_text(label, c)
        whole.plot([], [], "o" + style, color=color, markersize=3.5, label=text)
    draw_targets(whole, end, targets)
    set_limits(whole, end, list(curves.values()), targets)
    if x == "time":
        scale_time((whole, end), list(curves.values()))
    whole.set_ylabel("validation loss (nats per token)")
    end.set_title("the end of the runs")
    figure.supxlabel(X_LABELS[x], fontsize=11)
    figure.legend(*whole.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    save_figure(figure, path)


# -----------------------------------------------------------------------------
# Command line

def read_groups(arguments: list[str]) -> dict[str, list[Log]]:
    """Reads [LABEL=]LOG_OR_FOLDER arguments. Returns label -> logs.

    Raises LogError for the first file that can't be plotted.
    """
    groups = {}
    for argument in arguments:
        label, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            label = ""
            path = argument
        files, errors = find_logs([path])
        if errors:
            raise LogError(errors[0])
        if not label and Path(path).is_dir():
            label = Path(path).resolve().name
        for file in files:
            log = parse_log(file)
            if not log.validations:
                raise LogError(f"{log.path}: this log has no validation; leave it out")
            groups.setdefault(readable(label or log.name), []).append(log)
    return groups


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./run.sh plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("logs", nargs="+", metavar="[LABEL=]LOG_OR_FOLDER")
    add("-o", "--output", type=Path, required=True, metavar="FILE.png", help="the picture to write")
    add("--x", choices=X_LABELS, default="step", help="the x axis (default: step)")
    add("--smooth", action="store_true", help="join the points with a smooth curve")
    add("--target", type=float, help="draw the target at this loss (default: from the logs)")
    args = parser.parse_args(argv)
    if args.output.suffix != ".png":
        parser.error(f"-o {args.output}: the name must end in .png")
    if args.target is not None and not math.isfinite(args.target):
        parser.error(f"--target {args.target}: must be a finite number")
    groups = read_groups(args.logs)
    targets = [args.target]
    if args.target is None:
        targets = sorted({log.target for logs in groups.values() for log in logs})
    plot_curves(groups, args.output, args.x, args.smooth, targets)
    print(args.output)
    return 0


if __name__ == "__main__":
    run_command(main)
