"""
Checks whether the logs of several runs make a valid record.

    ./run.sh verify LOG_OR_FOLDER...
                           [--target 3.28] [--against LOG_OR_FOLDER...] [--same-ml] [--json]
                           [--rule optimization] [--metric NAME [--higher_is_better]]

A log has one run or several, one after the other. Of a folder, the .txt and .log files are read.

The mean final loss of the runs must be below the target (one-sided one-sample t-test, p < 0.01).
verify also checks those rules of tools/README.md that can be checked in a log. With --against,
the runs must also be faster than those of another record, in a one-sided t-test of pairs, p < 0.01. A
pair is a run of each that were made one after the other, by the dates in the logs. Without such turns,
times aren't comparable: submit --make makes them.

--same-ml is for changes that only make the same training faster. Their own losses need no test,
because the losses of the --against record are taken as proof of the target. So that record must obey the rules,
and its own losses must pass the test. Our runs must have its number of steps and its
hyperparameters, except the seed, checkpoint settings, and some that only affect the speed. Finally,
our losses must not be above those of the record: a one-sided t-test with the standard deviation of
the record's losses must not show it at p < 0.01. With ten runs in the record, a single loss may be
up to three standard deviations above their mean.

--rule optimization checks only the rule of modded-nanogpt's optimization track: without --against,
whether these runs reach 3.28, and at which step first; with --against, whether this recipe is better
than the other. The runs may have been stopped before the end of their schedule.

Exit status: 0 valid, 1 not valid, or not faster than the --against record (the reasons are listed),
2 bad input.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from judge.comparable import add_metric, settle_metric, val_tokens
from judge.logs import Log, read_logs
from judge.records import optimization
from judge.records.rules import Verdict, judge_runs
from judge.records.tables import print_reasons, print_summary, print_table
from lib.commands import command_parser, positive, run_command
from lib.text import as_json


def log_as_json(log: Log) -> dict:
    return {
        "path": str(log.path),
        "trial": log.trial,
        "final": asdict(log.final) if log.final else None,
        "last_step": log.last_step,
        "num_steps": log.num_steps,
        "hardware": log.hardware,
        "resumed_on": log.resumed_on,
        "torch": log.torch,
        "track": log.track,
        "val_tokens": val_tokens(log),
        "peak_memory_mib": log.peak_memory_mib,
        "incomplete": log.incomplete,
    }


def print_json(logs: list[Log], verdict: Verdict) -> None:
    """Everything that the command found. Numbers that are not finite are null."""
    found = {"valid": not verdict.reasons, "logs": [log_as_json(log) for log in logs]}
    print(as_json(found | asdict(verdict)).decode())


def print_verdict(logs: list[Log], verdict: Verdict) -> None:
    print_table(logs)
    print()
    print_summary(verdict)
    print("\nNOT VALID" if verdict.reasons else "\nvalid")
    print_reasons(verdict.reasons)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("verify", __doc__)
    add = parser.add_argument
    paths = "LOG_OR_FOLDER"
    target = "the mean loss must be below this (default: the target in the logs, or 3.28)"
    same_ml = "only the speed changed, so the losses of the --against record count"
    rule = (
        "record: the rules of a record; optimization: the rule of modded-nanogpt's optimization "
        "track (default: record)"
    )
    add("logs", nargs="+", type=Path, metavar=paths)
    add("--target", type=positive, help=target)
    add("--against", nargs="+", type=Path, default=[], metavar=paths, help="logs of the record to beat")
    add("--same-ml", action="store_true", help=same_ml)
    add("--json", action="store_true", help="print everything as JSON")
    add("--rule", choices=("record", "optimization"), default="record", help=rule)
    add_metric(parser)
    args = parser.parse_args(argv)
    if args.rule == "optimization" and (args.same_ml or args.target is not None):
        parser.error("--rule optimization has its own target; drop --target and --same-ml")
    settle_metric(args)
    if args.metric and args.rule == "record" and args.target is None:
        parser.error("--metric needs --target")
    if args.same_ml and not args.against:
        parser.error("--same-ml needs --against, the record whose losses prove the target")
    return args


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    if args.rule == "optimization":
        return optimization.apply_rule(args.logs, args.against, args.json, args.metric)
    logs = read_logs(args.logs, args.metric)
    verdict = judge_runs(logs, args.target, read_logs(args.against, args.metric), args.same_ml)
    show = print_json if args.json else print_verdict
    show(logs, verdict)
    return 1 if verdict.reasons else 0


if __name__ == "__main__":
    run_command(main)
