"""
Files a record: checks its logs, copies them, writes a README, and updates the leaderboard.

    ./run.sh submit --track T --name NAME --make
    ./run.sh submit --track T --name NAME LOG_OR_FOLDER... [--against LOG_OR_FOLDER...]
                           [--what TEXT] [--date YYYY-MM-DD]
    ./run.sh submit --regenerate      write the pages and plots in records/ again

A record must be faster than the fastest record of its track on the same hardware. Another session isn't
comparable, so --make trains both, in turns: your train_gpt.py and the record's source, ten runs each. It
keeps the logs in logs/records/, and files your record. --against names the record's runs if you made them
yourself, in turns. On hardware that is new to the track, there is no time to beat.

submit refuses logs that verify refuses, logs that contain an absolute path, which often has the name of the
user, and logs of train_gpt.py with fewer than 8 validations after step 0. (Records that were filed before
this rule stay valid.)

Exit status: 0 filed, 1 refused (the reasons are listed), 2 bad input.
"""

import argparse
import datetime
import hashlib
import json
import re
import shutil
from pathlib import Path

from judge.logs.read import Log, read_logs
from leaderboard.make_runs import make_record_runs
from leaderboard.pages import BEFORE, RECORDS, read_records, record_to_beat, write_pages
from leaderboard.rules import judge_runs, new_record_reasons
from leaderboard.tables import print_reasons, print_summary, print_table
from judge.commands import UserError, command_parser, run_command
from lib.processes import ROOT
from judge.files import new_folder


# -----------------------------------------------------------------------------
# Filing


def copy_logs(logs: list[Log], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for log in logs:
        shutil.copyfile(log.path, folder / f"{log.path.stem}.txt")


def file_record(logs: list[Log], before: list[Log], folder: Path, facts: dict) -> None:
    """Writes the record's folder. `facts` is the content of record.json. Raises UserError."""
    with new_folder(folder) as made:
        copy_logs(logs, made)
        if before:
            copy_logs(before, made / BEFORE)
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        (made / "record.json").write_text(text, encoding="utf-8")


def folder_name(name: str) -> str:
    """ "What is new" -> "WhatIsNew"."""
    parts = re.findall(r"[A-Za-z0-9]+", name)
    return "".join(part[0].upper() + part[1:] for part in parts)


# -----------------------------------------------------------------------------
# Command line


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("submit", __doc__)
    add = parser.add_argument
    paths = "LOG_OR_FOLDER"
    add("logs", nargs="*", type=Path, metavar=paths)
    against = "runs of the record to beat, which took turns with yours"
    add("--against", nargs="+", type=Path, default=[], metavar=paths, help=against)
    add(
        "--make", action="store_true", help="make ten runs of yours and of the record to beat, in turns"
    )
    add("--track", help="the track of the record: fineweb, mini, or your own")
    add("--name", default="", help="a few words that say what is new")
    add("--what", help="what changed, in Markdown (default: says how to see it)")
    day = datetime.date.fromisoformat
    add("--date", type=day, default=datetime.date.today(), help="YYYY-MM-DD (default: today)")
    add("--regenerate", action="store_true", help="only write the pages and plots again")
    args = parser.parse_args(argv)
    named = args.track and folder_name(args.name)
    if not args.regenerate and not (named and bool(args.logs) != args.make):
        parser.error("give --track, --name (with a letter or a digit), and the logs or --make")
    return args


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    if args.regenerate:
        write_pages(RECORDS)
        return 0

    folder = RECORDS / args.track / f"{args.date}_{folder_name(args.name)}"
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another name")
    filed = read_records(RECORDS).get(args.track, [])
    if args.make:
        source = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()[:8]
        made = ROOT / "logs" / "records" / f"{folder_name(args.name)}_{source}"
        ours, *args.against = make_record_runs(made, args.track, filed)
        args.logs = [ours]
    logs = read_logs(args.logs)
    prior = record_to_beat(filed, logs[0].hardware)
    before = read_logs(args.against)
    record = prior.logs if prior else []
    verdict = judge_runs(logs, prior=before or record)
    reasons = verdict.reasons + new_record_reasons(logs, before, args.track, record)
    print_table(logs)
    print()
    print_summary(verdict)
    if reasons:
        print("\nREFUSED")
        print_reasons(reasons)
        return 1

    what = f"The first record of the `{args.track}` track on this hardware."
    if prior:
        what = (
            f"The last command below shows what changed since [{prior.name}](../{prior.folder.name}/)."
        )
    facts = {
        "name": args.name,
        "what": args.what or what,
        "against": prior.folder.name if prior else "",
    }
    file_record(logs, before, folder, facts)
    write_pages(RECORDS)
    print(f"\nfiled under {folder}")
    return 0


if __name__ == "__main__":
    run_command(main)
