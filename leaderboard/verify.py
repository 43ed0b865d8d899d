"""
Checks whether the logs of several runs make a valid record.

    ./run.sh verify LOG_OR_FOLDER...
                           [--target 3.28] [--against LOG_OR_FOLDER...]
                           [--rule optimization] [--metric NAME [--higher_is_better]]

A log has one run or several, one after the other. Of a folder, the .txt and .log files are read.

The mean final loss of the runs must be below the target (one-sided one-sample t-test, p < 0.01).
verify also checks those rules of docs/rules.md that can be checked in a log. With --against,
the runs must also be faster than those of another record, in a one-sided t-test of pairs, p < 0.01. A
pair is a run of each that were made one after the other, by the dates in the logs. Without such turns,
times aren't comparable: submit --make makes them.

--rule optimization checks only the rule of modded-nanogpt's optimization track: without --against,
whether these runs reach 3.28, and at which step first; with --against, whether this recipe is better
than the other. The runs may have been stopped before the end of their schedule.

Exit status: 0 valid, 1 not valid, or not faster than the --against record (the reasons are listed),
2 bad input.
"""

import argparse
from pathlib import Path

from judge.logs.comparable import add_metric
from judge.logs.read import read_logs, signed
from leaderboard import optimization
from leaderboard.rules import judge_runs
from leaderboard.tables import print_reasons, print_summary, print_table
from judge.commands import command_parser, positive, run_command


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("verify", __doc__)
    add = parser.add_argument
    paths = "LOG_OR_FOLDER"
    target = "the mean loss must be below this (default: the target in the logs, or 3.28)"
    rule = (
        "record: the rules of a record; optimization: the rule of modded-nanogpt's optimization "
        "track (default: record)"
    )
    add("logs", nargs="+", type=Path, metavar=paths)
    add("--target", type=positive, help=target)
    add("--against", nargs="+", type=Path, default=[], metavar=paths, help="logs of the record to beat")
    add("--rule", choices=("record", "optimization"), default="record", help=rule)
    add_metric(parser)
    args = parser.parse_args(argv)
    if args.rule == "optimization" and args.target is not None:
        parser.error("--rule optimization has its own target; drop --target")
    args.metric = signed(args.metric, args.higher_is_better)
    if args.higher_is_better and args.target:
        args.target = -args.target
    if args.metric and args.rule == "record" and args.target is None:
        parser.error("--metric needs --target")
    return args


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    if args.rule == "optimization":
        return optimization.apply_rule(args.logs, args.against, args.metric)
    logs = read_logs(args.logs, args.metric)
    verdict = judge_runs(logs, args.target, read_logs(args.against, args.metric))
    print_table(logs)
    print()
    print_summary(verdict)
    print("\nNOT VALID" if verdict.reasons else "\nvalid")
    print_reasons(verdict.reasons)
    return 1 if verdict.reasons else 0


if __name__ == "__main__":
    run_command(main)
