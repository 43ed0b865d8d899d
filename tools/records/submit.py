"""
Files a record: checks its logs, copies them, writes a README, and updates the leaderboard.

    ./run.sh submit --track T --name NAME LOG_OR_FOLDER...
                           [--what TEXT] [--date YYYY-MM-DD] [--same-ml]
    ./run.sh submit --regenerate      write READMEs and plots again from the logs in records/

It refuses logs that verify.py refuses, logs that contain the name of the user or the machine or an
absolute path, and logs of train_gpt.py with fewer than 8 validations after step 0. (Records that were
filed before this rule stay valid.) A name such as "data", which is also a word in the logs of the
records in this repository, may occur. A record must be faster than the fastest record of its track on
the same hardware, in the test of verify.py --against. On hardware that is new to the track, there is
no time to beat.

Exit status: 0 filed, 1 refused (the reasons are listed), 2 bad input.
"""

import argparse
import datetime
import getpass
import json
import math
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from tools.records.pages import (
    RECORDS,
    Record,
    read_records,
    record_to_beat,
    regenerate,
    write_record,
)
from tools.common import FileError, LogError, UsageError, run_command, write_file
from tools.logs import SUFFIXES, Log, read_logs
from tools.common import readable
from tools.records.replay import diff_sources
from tools.records.report import print_reasons, print_summary, print_table, print_wrapped
from tools.records.rules import judge, per_run

ABSOLUTE_PATH = re.compile(
    r"(?:^|[\s\"'=:(,\[])((?:/[\w.+@-]+){2,}/?|/(?:home|root|Users)\b\S*|[A-Za-z]:\\\w\S*)",
    re.MULTILINE,
)
COMMON_NAMES = {"root", "user", "localhost", "cpu", "cuda"}  # don't identify anybody
FEWEST_VALIDATIONS = 8  # in a run, so that its curve can be drawn; validations are not timed


# -----------------------------------------------------------------------------
# What a record may not contain

def private_words() -> set[str]:
    """The names of this machine and its user, unless they are very short or common."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        user = ""
    host = socket.gethostname()
    words = {user, host, host.split(".")[0]}
    return {word for word in words if len(word) > 2} - COMMON_NAMES


def has_word(text: str, word: str) -> bool:
    return bool(re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", text))


def is_public(word: str, log: Log, published: list[Log]) -> bool:
    """Whether a word of a log is public anyway.

    It is if it occurs in a published log, or in the names of the log's track and hardware.
    """
    texts = [log.track, log.hardware, *(other.run for other in published)]
    return any(has_word(text, word) for text in texts)


def leaks(log: Log, published: list[Log] = ()) -> list[str]:
    """What a log must not contain when it is published, one line each.

    Only the run is searched, not the source. `published` are logs of records: a name that is a word
    in one of them is no secret.
    """
    reasons = []
    path = ABSOLUTE_PATH.search(log.run)
    if path:
        reasons.append(f"{log.name}: contains an absolute path: {path[1]}; "
                       "run again with relative paths")
    for word in sorted(private_words()):
        if has_word(log.run, word) and not is_public(word, log, published):
            reasons.append(f"{log.name}: contains the name of this machine or its user: {word}; run "
                           "again with relative paths, and with options that don't contain the name")
    return reasons


def too_few_validations(log: Log) -> str:
    """What to do if a log has too few validations. "" if it has enough.

    Logs of other programs have no hyperparameters and are exempt.
    """
    count = len([v for v in log.validations if v.step > 0])
    fewest = min(FEWEST_VALIDATIONS, log.num_steps)
    if count >= fewest or not log.hyperparameters:
        return ""
    validations = "validation" if count == 1 else "validations"
    return (
        f"{count} {validations} after step 0, but a record needs {fewest}; run it with "
        f"--val_loss_every {log.num_steps // fewest}, which costs no training time"
    )


def reasons_to_refuse(
    logs: list[Log],
    track: str,
    target: float,
    others: list[Record],
    published: list[Log],
) -> list[str]:
    """What is wrong besides the rules that verify.py checks.

    `others` are the track's records, `published` the logs of the repository's records.
    """
    reasons = per_run(logs, too_few_validations)
    for log in logs:
        reasons += leaks(log, published)
    for log in logs:
        if log.track not in ("", track):
            reasons.append(f"{log.name}: this is a log of the track {log.track}, not {track}")
    stated = {log.target for log in logs if "target_val_loss" in log.hyperparameters}
    for other in sorted(stated - {target}):
        reasons.append(f"a run has the target {other:g}, not {target:g}")
    if others and others[0].target != target:
        reasons.append(f"the track's target is {others[0].target:g}, not {target:g}")
    if len({log.path.name for log in logs}) < len(logs):
        reasons.append("two logs have the same file name; rename one")
    return reasons


# -----------------------------------------------------------------------------
# Filing

def describe_change(logs: list[Log], prior: Record | None, track: str) -> str:
    """What changed since the prior record, in Markdown: lines of source and hyperparameters."""
    if prior is None:
        return f"The first record of the `{track}` track on this hardware."
    old = prior.logs[0]
    new = logs[0]
    changes = []
    for diff in diff_sources(old, new):
        changes += diff.splitlines()[2:]
    added = len([line for line in changes if line.startswith("+")])
    removed = len([line for line in changes if line.startswith("-")])
    link = f"[{prior.name}](../{prior.folder.name}/)"
    text = f"Compared with {link}, lines of source: {added} added, {removed} removed."
    settings = []
    for name in {**old.hyperparameters, **new.hyperparameters}:
        before = old.hyperparameters.get(name, "not set")
        now = new.hyperparameters.get(name, "not set")
        if name != "seed" and before != now:
            settings.append(f"- `{name}`: {now} (before: {before})")
    if settings:
        text += "\n\n" + "\n".join(settings)
    return text


def file_record(logs: list[Log], folder: Path, prior: Record | None, facts: dict) -> None:
    """Writes the record's folder under a temporary name, then renames it. Raises FileError.

    `facts` is the content of record.json.
    """
    if folder.exists():
        raise FileError(f"{folder} exists already; choose another --name or --date")
    temporary = None
    try:
        folder.parent.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent.parent, prefix=".submit-"))
        # The README names the folder and its track, so they must have their final names
        made = temporary / folder.parent.name / folder.name
        made.mkdir(parents=True)
        for log in logs:
            write_file(made / log.path.name, log.path.read_bytes())
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        write_file(made / "record.json", text.encode())
        kept, _ = read_logs([made])
        write_record(Record(made, kept, **facts), prior)
        os.rename(made, folder)
    except OSError as e:
        raise FileError(f"cannot write {folder}: {(e.strerror or str(e)).lower()}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def folder_name(name: str) -> str:
    """"What is new" -> "WhatIsNew"."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    return "".join(word[:1].upper() + word[1:] for word in words)


# -----------------------------------------------------------------------------
# Command line

def parse_date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date like 2026-01-31") from None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run.sh submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("logs", nargs="*", type=Path, metavar="LOG_OR_FOLDER")
    add("--track", help="the track of the record: fineweb, mini, or your own")
    add("--name", type=readable, default="", help="a few words that say what is new")
    add("--what", type=readable, help="what changed, in Markdown (default: found in the logs)")
    today = datetime.date.today().isoformat()
    add("--date", type=parse_date, default=today, help="YYYY-MM-DD (default: today)")
    add("--target", type=float, help="the target loss, for logs that don't name it")
    same_ml = "only the speed changed, so the losses of the prior record count"
    add("--same-ml", action="store_true", help=same_ml)
    add("--regenerate", action="store_true", help="only write the READMEs and plots again")
    add("--records_dir", type=Path, default=RECORDS, metavar="DIR", help="default: records/")
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.regenerate:
        return args
    if not (args.track and folder_name(args.name) and args.logs):
        parser.error("give --track, --name (with a letter or a digit) and the logs")
    if not re.fullmatch(r"[a-z0-9_]+", args.track):
        parser.error(f"--track {args.track}: use lower-case letters, digits and _ only")
    if args.target is not None and not math.isfinite(args.target):
        parser.error(f"--target {args.target}: must be a finite number")
    return args


def published_logs() -> list[Log]:
    """The logs of all records in the repository. Raises LogError."""
    logs = []
    for records in read_records(RECORDS).values():
        for record in records:
            logs += record.logs
    return logs


def read_all(paths: list[Path]) -> list[Log]:
    """Raises LogError if a file isn't a log, or if the record's folder couldn't be read with it."""
    logs, errors = read_logs(paths)
    for log in logs:
        if log.path.suffix not in SUFFIXES:
            errors.append(f"{log.path}: rename it, so that its name ends in .txt or .log")
    if len(errors) > 1:
        raise LogError(f"{errors[0]} (and {len(errors) - 1} more)")
    if errors:
        raise LogError(errors[0])
    return logs


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    if args.regenerate:
        regenerate(args.records_dir)
        return 0

    logs = read_all(args.logs)
    hardware = logs[0].hardware
    others = read_records(args.records_dir).get(args.track, [])
    prior = record_to_beat(others, hardware)
    if args.same_ml and prior is None:
        raise UsageError(
            f"--same-ml needs an earlier record of {args.track} on {hardware}, but there is none"
        )
    verdict = judge(logs, args.target, prior.logs if prior else [], args.same_ml)
    published = published_logs()
    more_reasons = reasons_to_refuse(logs, args.track, verdict.target, others, published)
    reasons = verdict.reasons + more_reasons
    print_table(logs)
    print()
    print_summary(verdict)
    if reasons:
        print("\nREFUSED")
        print_reasons(reasons)
        return 1

    folder = args.records_dir / args.track / f"{args.date}_{folder_name(args.name)}"
    facts = {
        "name": args.name,
        "what": args.what or describe_change(logs, prior, args.track),
        "target": verdict.target,
        "same_ml": args.same_ml,
        "against": prior.folder.name if prior else "",
    }
    file_record(logs, folder, prior, facts)
    regenerate(args.records_dir)
    print(f"\nfiled under {folder}")
    if prior is None and others:
        print_wrapped(
            f"the first record of {args.track} on {hardware}, so there was no time to beat"
        )
    return 0


if __name__ == "__main__":
    run_command(main)
