"""
Plots validation losses of runs against each other.

    python tools/plot.py [LABEL=]LOG_OR_FOLDER... -o curves.png [--x step|time|tokens] [--smooth] [--target 3.28]

A folder's logs share one label, its name; so do several arguments with the same LABEL=. A label with several runs is
drawn as their mean with a band of one standard deviation. --smooth joins the measured points by a monotone cubic
instead of straight lines; the points stay where they were measured.
"""

import argparse
import itertools
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.interpolate import PchipInterpolator

from log_parsing import Log, LogError, find_logs, parse_log, run_command
from machine import readable

X_LABELS = dict(step="training step", time="training time (s)", tokens="training tokens (millions)")
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#000000",
)  # told apart by the color-blind
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
    """PNG, the same bytes for the same numbers, whole or not at all. Raises LogError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format="png", metadata={"Software": None})
        temporary.replace(path)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise LogError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from None
    finally:
        plt.close(figure)


def positions(log: Log, x: str) -> dict[int, float]:
    """step -> where its validation stands on the x axis. Raises LogError if the log does not say."""
    tokens = log.step_tokens if x == "tokens" else [0]
    if len(tokens) != 1:
        what = "takes a varying number of" if tokens else "does not say how many"
        raise LogError(f"{log.path}: {what} tokens a step; use --x step or --x time")
    return {
        v.step: dict(step=v.step, time=v.train_time_ms / 1000, tokens=v.step * tokens[0] / 1e6)[x]
        for v in log.validations
    }


def curve(logs: list[Log], x: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> x, mean and standard deviation of the loss, over the steps at which all the runs validated, each (points,)"""
    steps = sorted(
        set.intersection(
            *({v.step for v in log.validations if math.isfinite(v.val_loss)} for log in logs)
        )
    )
    losses = [{v.step: v.val_loss for v in log.validations} for log in logs]
    at = [positions(log, x) for log in logs]
    table = np.array([[loss[s] for s in steps] for loss in losses]).reshape(
        len(logs), -1
    )  # (runs, points)
    places = np.array([[p[s] for s in steps] for p in at]).reshape(len(logs), -1)
    spread = table.std(axis=0, ddof=1) if len(logs) > 1 else np.zeros(len(steps))
    return places.mean(axis=0), table.mean(axis=0), spread


def scale_time(panels: tuple, curves: list[np.ndarray]) -> None:
    """A logarithmic axis where the longest run took more than ten times the shortest, which would be a wall at the left
    edge otherwise. Linear up to the first validation after the start, so that the one before it stands at 0."""
    timed = [at[at > 0] for at in curves if at[-1] > 0]
    longest = max((at[-1] for at in timed), default=0)
    if not timed or longest <= 10 * min(at[-1] for at in timed):
        return
    first = min(at[0] for at in timed)
    powers = [10.0**n for n in range(math.ceil(math.log10(first)), math.ceil(math.log10(longest)))]
    for axes in panels:
        low = max(axes.get_xlim()[0], 0)
        axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        axes.set_xticks([0, *powers], [f"{x:g}" for x in (0, *powers)])
        axes.minorticks_off()
        axes.set_xlim(low, 1.3 * longest)


def plot_curves(
    groups: dict[str, list[Log]],
    path: Path,
    x: str = "step",
    smooth: bool = False,
    targets: list[float] = (),
) -> None:
    """groups: label -> its runs. The whole run on the left, its end on the right. Raises LogError."""
    figure, (whole, end) = plt.subplots(
        1, 2, width_ratios=(3, 2), figsize=(8, 3.7 + 0.12 * (len(groups) + 1))
    )
    curves = {label: curve(logs, x) for label, logs in groups.items()}
    looks = ((color, style) for style in itertools.cycle(("-", "-.", ":")) for color in COLORS)
    for (color, style), (label, (at, mean, spread)) in zip(looks, curves.items()):
        if len(at) == 0:
            raise LogError(
                f"{label}: no step at which all of its {len(groups[label])} run(s) validated"
            )
        runs = len(groups[label])
        text = f"{label}: {mean[-1]:.4f}" + (
            f" ± {spread[-1]:.4f}, {runs} runs" if runs > 1 else ""
        )
        dense, line, low, high = at, mean, mean - spread, mean + spread
        if smooth and len(at) > 2 and (np.diff(at) > 0).all():
            dense = np.linspace(
                at[:-1], at[1:], 50, axis=1
            ).ravel()  # as fine at the left of a logarithmic axis
            line, low, high = (PchipInterpolator(at, y)(dense) for y in (line, low, high))
        for axes in (whole, end):
            axes.plot(at, mean, "o", color=color, markersize=3.5)
            axes.plot(dense, line, style, color=color, linewidth=1.6)
            axes.fill_between(dense, low, high, color=color, alpha=0.2, linewidth=0)
        whole.plot([], [], "o" + style, color=color, markersize=3.5, label=text)
    for axes in (whole, end):
        for target in targets:
            axes.axhline(target, color="0.35", linestyle="--", linewidth=1.2, zorder=1)
    whole.plot(
        [],
        [],
        color="0.35",
        linestyle="--",
        label=f"target: {', '.join(f'{t:g}' for t in targets)}",
    )

    # the fall from ln(vocabulary) in the first tenth of a run would press all the rest into a flat line
    lowest = min([*targets, *(float(np.min(mean - spread)) for _, mean, spread in curves.values())])
    for axes, part in ((whole, 0.1), (end, 0.85)):
        starts = [at[0] + part * (at[-1] - at[0]) for at, _, _ in curves.values()]
        top = max(
            float(np.interp(start, at, mean))
            for start, (at, mean, _) in zip(starts, curves.values())
        )
        if part == 0.1:
            top = min(
                top, max(float(mean[min(1, len(mean) - 1)]) for _, mean, _ in curves.values())
            )
        else:
            last = max(at[-1] for at, _, _ in curves.values())
            if last > min(starts):
                axes.set_xlim(min(starts), last + 0.04 * (last - min(starts)))
        if top > lowest:
            axes.set_ylim(lowest - 0.06 * (top - lowest), top + 0.06 * (top - lowest))
    if x == "time":
        scale_time((whole, end), [at for at, _, _ in curves.values()])
    whole.set(ylabel="validation loss (nats per token)")
    end.set_title("the end of the runs")
    figure.supxlabel(X_LABELS[x], fontsize=11)
    figure.legend(*whole.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    save_figure(figure, path)


def read_groups(arguments: list[str]) -> dict[str, list[Log]]:
    """[LABEL=]LOG_OR_FOLDER... -> label -> logs. Raises LogError for the first file that cannot be plotted."""
    groups = {}
    for argument in arguments:
        label, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            label, path = "", argument
        files, errors = find_logs([path])
        if errors:
            raise LogError(errors[0])
        for log in map(parse_log, files):
            if not log.validations:
                raise LogError(f"{log.path}: no validation in this log")
            name = label or (Path(path).resolve().name if Path(path).is_dir() else log.name)
            groups.setdefault(readable(name), []).append(log)
    return groups


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__.strip().split("\n")[0])
    parser.add_argument("logs", nargs="+", metavar="[LABEL=]LOG_OR_FOLDER")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.png")
    parser.add_argument("--x", choices=X_LABELS, default="step")
    parser.add_argument(
        "--smooth", action="store_true", help="a smooth line through the measured points"
    )
    parser.add_argument(
        "--target", type=float, help="where the target line stands (default: the logs' target)"
    )
    args = parser.parse_args(argv)
    if args.output.suffix != ".png":
        parser.error(f"-o {args.output}: the name must end in .png")
    groups = read_groups(args.logs)
    targets = [args.target]
    if args.target is None:
        targets = sorted({log.target for logs in groups.values() for log in logs})
    plot_curves(groups, args.output, args.x, args.smooth, targets)
    print(args.output)
    return 0


if __name__ == "__main__":
    run_command(main)
