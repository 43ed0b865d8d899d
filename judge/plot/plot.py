"""
Plots the validation losses of runs.

    judge plot [LABEL=]LOG_OR_FOLDER... [-o curves.png] [--x step|time] [--target 3.28]
                    [--metric NAME [--higher_is_better]]

The repetitions of one training in a folder share a label, the name of the folder. Its other runs have their
own. Arguments with the same LABEL= share it, too, and must be repetitions that end at the same step. If a
label has several runs, the plot shows their mean and a band of one standard deviation. If there is one label,
the plot shows the training loss, too.

Without -o, the picture is beside the log: RUN.png for a single run, curves.png for several.

Exit status: 0 written, 2 bad input.
"""

import itertools
import os
import sys
from pathlib import Path

from judge.commands import UserError, command_parser, output_file, positive
from judge.logs.comparable import MACHINE, add_metric, check_sides, difference
from judge.logs.read import Log, parse_log, read_logs, signed
from judge.plot.curves import X_LABELS, plot_curves


def repeats(log: Log, others: list[Log]) -> bool:
    """Whether a run of a folder is a repetition of these runs, with another seed."""
    seed = log.hyperparameters.get("seed")
    seeds = [other.hyperparameters.get("seed") for other in others]
    differs = others and difference(others[0], log, MACHINE)
    return log.end is not None and not differs and (seed is None or seed not in seeds)


def read_groups(arguments: list[str], metric: str = "") -> dict[str, list[Log]]:
    """Reads [LABEL=]LOG_OR_FOLDER arguments. Returns label -> logs. Raises UserError."""
    groups = {}
    for argument in arguments:
        label, _, path = argument.rpartition("=")
        if os.path.exists(argument):  # False if it is too long for a name
            label = ""
            path = argument
        folder = Path(path).resolve().name if Path(path).is_dir() else ""
        found = {}
        for log in read_logs([Path(path)], metric):
            if folder and not log.validations:
                print(f"{log.path}: left out, because it has no validation", file=sys.stderr)
                continue
            own = folder if repeats(log, found.get(folder, [])) else log.name
            found.setdefault(label or own or log.name, []).append(log)
        for name, logs in found.items():
            if name in groups and not label:  # of another argument
                name = path
            groups.setdefault(name, []).extend(logs)
    return groups


def training_losses(label: str, logs: list[Log]) -> dict[str, list[Log]]:
    """The same runs with their training losses, if they have some: means since the validation before."""
    try:
        logs = [parse_log(log.path, "train_loss") for log in logs]
    except UserError:
        return {}
    return {f"{label}, training": logs} if all(log.validations for log in logs) else {}


def main(argv: list[str]) -> int:
    parser = command_parser("plot", __doc__)
    add = parser.add_argument
    add("logs", nargs="*", default=["logs"], metavar="[LABEL=]LOG_OR_FOLDER", help="default: logs")
    add(
        "-o",
        "--output",
        type=output_file,
        metavar="FILE.png",
        help="the picture to write; default: beside the log",
    )
    add("--x", choices=X_LABELS, default="step", help="the x axis (default: step)")
    add("--target", type=positive, help="draw the target at this loss (default: that of the logs)")
    add_metric(parser)
    args = parser.parse_args(argv)
    metric = signed(args.metric, args.higher_is_better)
    if args.output and args.output.suffix != ".png":
        parser.error(f"-o {args.output}: the name must end in .png")
    groups = read_groups(args.logs, metric)
    tolerated = {"stops early", "log", "seed"}
    if args.x != "time":
        tolerated |= MACHINE
    if args.target is not None:
        tolerated.add("target_val_loss")
    check_sides(list(groups.values()), tolerated)
    first, *others = itertools.chain(*groups.values())
    target = first.target
    if args.target:
        target = -args.target if args.higher_is_better else args.target
    output = args.output
    if output is None:
        output = first.path.with_name("curves.png") if others else first.path.with_suffix(".png")
    if len(groups) == 1 and not args.metric:
        groups |= training_losses(*next(iter(groups.items())))
    plot_curves(groups, output, args.x, target)
    print(output)
    return 0
