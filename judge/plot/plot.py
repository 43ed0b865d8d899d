"""
Plots the validation losses of runs.

    ./run.sh plot [LABEL=]LOG_OR_FOLDER... -o curves.png [--x step|time] [--target 3.28]
                    [--metric NAME [--higher_is_better]]

The logs of a folder share a label: the name of the folder. Arguments with the same LABEL= share it
too. If a label has several runs, the plot shows their mean and a band of one standard deviation. They
must be repetitions of one training that end at the same step.

Exit status: 0 written, 2 bad input.
"""

import os
from pathlib import Path

from judge.logs.comparable import MACHINE, add_metric, check_sides, settle_metric
from judge.plot.curves import X_LABELS, plot_curves
from judge.logs.read import Log, read_logs
from judge.commands import command_parser, output_file, positive, run_command


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
            found.setdefault(label or folder or log.name, []).append(log)
        for name, logs in found.items():
            if name in groups and not label:  # of another argument
                name = path
            groups.setdefault(name, []).extend(logs)
    return groups


def main(argv: list[str]) -> int:
    parser = command_parser("plot", __doc__)
    add = parser.add_argument
    add("logs", nargs="+", metavar="[LABEL=]LOG_OR_FOLDER")
    add(
        "-o",
        "--output",
        type=output_file,
        required=True,
        metavar="FILE.png",
        help="the picture to write",
    )
    add("--x", choices=X_LABELS, default="step", help="the x axis (default: step)")
    add("--target", type=positive, help="draw the target at this loss (default: that of the logs)")
    add_metric(parser)
    args = parser.parse_args(argv)
    settle_metric(args)
    if args.output.suffix != ".png":
        parser.error(f"-o {args.output}: the name must end in .png")
    groups = read_groups(args.logs, args.metric)
    tolerated = {"stops early", "log", "seed"}
    if args.x != "time":
        tolerated |= MACHINE
    if args.target is not None:
        tolerated.add("target_val_loss")
    check_sides(list(groups.values()), tolerated)
    target = args.target
    if target is None:
        target = next(iter(groups.values()))[0].target
    plot_curves(groups, args.output, args.x, target)
    print(args.output)
    return 0


if __name__ == "__main__":
    run_command(main)
