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

It refuses logs that verify refuses, logs that contain an absolute path, which often has the name of the
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

from judge.logs.comparable import MACHINE, difference
from judge.logs.read import Log, read_logs
from leaderboard.make_runs import make_record_runs
from leaderboard.pages import BEFORE, RECORDS, Record, read_records, record_to_beat, write_pages
from leaderboard.rules import judge_runs, per_run
from leaderboard.tables import print_reasons, print_summary, print_table
from judge.commands import UserError, command_parser, positive, run_command
from lib.processes import ROOT
from judge.files import new_folder
from judge.text import plural

ABSOLUTE_PATH = re.compile(
    r"(?:^|[\s\"'=:(,\[])((?:/[\w.+@-]+){2,}/?|/(?:home|root|Users)\b\S*|[A-Za-z]:\\\w\S*)",
    re.MULTILINE,
)
FEWEST_VALIDATIONS = 8  # in a run, so that its curve can be drawn; validations are not timed


# -----------------------------------------------------------------------------
# What a record may not contain


def absolute_path(log: Log) -> str:
    """Only the run is searched, not the sources."""
    found = ABSOLUTE_PATH.search(log.run)
    return f"contains an absolute path: {found[1]}; run again with relative paths" if found else ""


def too_few_validations(log: Log) -> str:
    """What to do if a log has too few validations. "" if it has enough.

    Logs of other programs have no hyperparameters and are exempt.
    """
    count = len([v for v in log.validations if v.step > 0])
    if count >= FEWEST_VALIDATIONS or not log.hyperparameters:
        return ""
    every = log.num_steps // FEWEST_VALIDATIONS
    return (
        f"{plural(count, 'validation')} after step 0, but a record needs {FEWEST_VALIDATIONS}; run it "
        f"with --val_loss_every {every}, which costs no training time"
    )


def reasons_to_refuse(
    logs: list[Log], before: list[Log], track: str, target: float, filed: list[Record]
) -> list[str]:
    """What is wrong besides the rules that verify checks. `before` are the runs of --against, and `filed`
    the track's records so far."""
    reasons = per_run(logs, too_few_validations) + per_run([*logs, *before], absolute_path)
    for log in logs:
        if log.track not in ("", track):
            reasons.append(f"{log.name}: this is a log of the track {log.track}, not {track}")
    targets = {record.target for record in filed}
    targets |= {log.target for log in logs if "target_val_loss" in log.hyperparameters}
    for other in sorted(targets - {target}):
        reasons.append(f"the target is {other:g}, not {target:g}")
    for side in (logs, before):
        files = {log.path for log in side}
        if len({file.stem for file in files}) < len(files):
            reasons.append("two logs have the same file name; rename one")
    return reasons


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
    add("--target", type=positive, help="the target loss, for logs that don't name it")
    add("--regenerate", action="store_true", help="only write the pages and plots again")
    add("--records_dir", type=Path, default=RECORDS, metavar="DIR", help="default: records/")
    args = parser.parse_args(argv)
    named = args.track and folder_name(args.name)
    if not args.regenerate and not (named and bool(args.logs) != args.make):
        parser.error("give --track, --name (with a letter or a digit), and the logs or --make")
    return args


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    if args.regenerate:
        write_pages(args.records_dir)
        return 0

    folder = args.records_dir / args.track / f"{args.date}_{folder_name(args.name)}"
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another name")
    filed = read_records(args.records_dir).get(args.track, [])
    if args.make:
        source = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()[:8]
        made = ROOT / "logs" / "records" / f"{folder_name(args.name)}_{source}"
        ours, *args.against = make_record_runs(made, args.track, filed)
        args.logs = [ours]
    logs = read_logs(args.logs)
    prior = record_to_beat(filed, logs[0].hardware)
    before = read_logs(args.against)
    verdict = judge_runs(logs, args.target, before or (prior.logs if prior else []))
    reasons = verdict.reasons + reasons_to_refuse(logs, before, args.track, verdict.target, filed)
    if before and (prior is None or any(log.sources != prior.logs[0].sources for log in before)):
        name = prior.folder.name if prior else "none on this hardware"
        reasons.append(f"the runs of --against have other sources than the record to beat: {name}")
    elif before:
        reasons += per_run(before, lambda log: difference(prior.logs[0], log, MACHINE))
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
        "target": verdict.target,
        "against": prior.folder.name if prior else "",
    }
    file_record(logs, before, folder, facts)
    write_pages(args.records_dir)
    print(f"\nfiled under {folder}")
    return 0


if __name__ == "__main__":
    run_command(main)
