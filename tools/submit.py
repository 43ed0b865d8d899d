"""
Files a record: verifies its logs, keeps them with a README, brings the leaderboard up to date.

    python tools/submit.py --track T --name NAME LOG_OR_FOLDER... [--what TEXT] [--date YYYY-MM-DD] [--same-ml]
    python tools/submit.py --regenerate      rewrite the READMEs and plots from the logs that are here

What verify.py refuses is refused here, and so is a log that names people, machines or absolute paths, or that has a
hyperparameters line and fewer than 8 validations after step 0 (records filed before that rule stay). A record must be
faster than the fastest one of its track on the same hardware; on hardware new to the track it is the first.
Exit status: 0 filed, 1 refused (the reasons are listed), 2 input that cannot be used.
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

from record_pages import RECORDS, Record, read_records, record_to_beat, regenerate, write_record
from log_parsing import Log, LogError, read_logs, run_command, write_file
from machine import readable
from replay import diff
from verify import judge, per_run, print_table, summary_lines

ABSOLUTE_PATH = re.compile(
    r"(?:^|[\s\"'=:(,\[])((?:/[\w.+@-]+){2,}/?|/(?:home|root|Users)\b\S*|[A-Za-z]:\\\w\S*)",
    re.MULTILINE,
)
COMMON_NAMES = {"root", "user", "localhost"}  # say nothing about anyone
FEWEST_VALIDATIONS = 8  # of a run, for its curve to be one; they are not timed


# ----------------------------------------------------------------------------------------------------------
def private_words() -> set[str]:
    """This machine's and this user's names, but for those too short or too common to tell anything."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, in a container
        user = ""
    host = socket.gethostname()
    return {w for w in (user, host, host.split(".")[0]) if len(w) > 2} - COMMON_NAMES


def leaks(log: Log) -> list[str]:
    """What below the source of a log must not be published, a line each."""
    found = list(dict.fromkeys(m[1] for m in ABSOLUTE_PATH.finditer(log.run)))
    reasons = [f"{log.name}: names an absolute path: {found[0]}"] if found else []
    reasons += [
        f"{log.name}: names this machine or its user: {word}"
        for word in sorted(private_words())
        if re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w-])", log.run)
    ]
    return reasons


def too_few_validations(log: Log) -> str:
    """Why a log's curve would have too few points; "" if it has enough, and for the logs of other programs."""
    n, fewest = sum(v.step > 0 for v in log.validations), min(FEWEST_VALIDATIONS, log.num_steps)
    if n >= fewest or not log.hyperparameters:
        return ""
    return (
        f"{n} validation{'s' * (n != 1)} after step 0, a record's curve needs {fewest}: run it with "
        f"--val_loss_every {log.num_steps // fewest}, which costs no training time"
    )


def describe_change(logs: list[Log], prior: Record | None, track: str) -> str:
    """What the logs say about it: how much of the source changed, and which hyperparameters."""
    if prior is None:
        return f"The first record of the `{track}` track on this hardware."
    old, new = prior.logs[0], logs[0]
    lines = diff(*(b"\n".join(log.sources) for log in (old, new)), "", "").splitlines()[2:]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    text = f"Against [{prior.name}](../{prior.folder.name}/): {added} lines of source added, {removed} removed."
    keys = [
        k
        for k in {**old.hyperparameters, **new.hyperparameters}
        if k != "seed" and old.hyperparameters.get(k) != new.hyperparameters.get(k)
    ]
    return "\n".join(
        [
            text,
            *([""] if keys else []),
            *(
                f"- `{k}`: {old.hyperparameters.get(k)} to {new.hyperparameters.get(k)}"
                for k in keys
            ),
        ]
    )


def file_record(
    logs: list[Log],
    folder: Path,
    name: str,
    what: str,
    target: float,
    same_ml: bool,
    prior: Record | None,
) -> None:
    """Makes the record's folder, whole or not at all. Raises LogError."""
    if folder.exists():
        raise LogError(f"{folder} exists already; choose another --name or --date")
    facts = dict(
        name=name,
        what=what,
        target=target,
        same_ml=same_ml,
        against=prior.folder.name if prior else "",
    )
    temporary = None
    try:
        folder.parent.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent.parent, prefix=".submit-"))
        made = temporary / folder.parent.name / folder.name  # the README speaks of these names
        made.mkdir(parents=True)
        for log in logs:
            write_file(made / log.path.name, log.path.read_bytes())
        write_file(
            made / "record.json", (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode()
        )
        kept, _ = read_logs([made])
        write_record(Record(made, kept, **facts), prior)
        os.rename(made, folder)
    except OSError as e:
        raise LogError(f"cannot make {folder}: {(e.strerror or str(e)).lower()}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def parse_date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date like 2026-01-31") from None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="submit.py", description=__doc__.strip().split("\n")[0])
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG_OR_FOLDER")
    parser.add_argument("--track")
    parser.add_argument("--name", type=readable, help="a few words")
    parser.add_argument(
        "--what", type=readable, help="what changed, Markdown (default: what the logs say about it)"
    )
    parser.add_argument(
        "--date",
        type=parse_date,
        default=datetime.date.today().isoformat(),
        help="(default: today)",
    )
    parser.add_argument(
        "--target", type=float, help="for logs that do not state the loss they race to"
    )
    parser.add_argument(
        "--same-ml", action="store_true", help="only the speed changed: waive the p-value"
    )
    parser.add_argument("--regenerate", action="store_true", help="only rewrite what is generated")
    parser.add_argument(
        "--records_dir", type=Path, default=RECORDS, metavar="DIR", help="(default: records/)"
    )
    args = parser.parse_args(argv)
    if args.regenerate:
        regenerate(args.records_dir)
        return 0
    short = "".join(
        word[:1].upper() + word[1:] for word in re.findall(r"[A-Za-z0-9]+", args.name or "")
    )
    if not (args.track and short and args.logs):
        parser.error("a record needs --track, --name (with a letter or digit) and its logs")
    if not re.fullmatch(r"[a-z0-9_]+", args.track):
        parser.error(f"--track {args.track}: lower-case letters, digits and _ only")
    if args.target is not None and not math.isfinite(args.target):
        parser.error(f"--target {args.target}: must be a finite number")

    logs, errors = read_logs(args.logs)
    if errors:
        raise LogError(errors[0] + (f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""))
    others = read_records(args.records_dir).get(args.track, [])
    prior = record_to_beat(others, logs[0].hardware)
    if args.same_ml and prior is None:
        raise LogError(
            f"--same-ml: no record of {args.track} on {logs[0].hardware} whose losses could stand for these"
        )

    stated = {log.target for log in logs if "target_val_loss" in log.hyperparameters}
    verdict = judge(logs, args.target, prior.logs if prior else [], args.same_ml)
    target = verdict.target
    reasons = (
        verdict.reasons
        + per_run(logs, too_few_validations)
        + [reason for log in logs for reason in leaks(log)]
    )
    reasons += [
        f"{log.name}: a log of the track {log.track}"
        for log in logs
        if log.track not in ("", args.track)
    ]
    reasons += [f"a run raced to {t:g}, not to {target:g}" for t in sorted(stated - {target})]
    reasons += [
        f"the track's target is {r.target:g}, not {target:g}"
        for r in others[:1]
        if r.target != target
    ]
    if len({log.path.name for log in logs}) < len(logs):
        reasons.append("two logs have the same file name")
    print_table(logs)
    print()
    for what, value in summary_lines(verdict):
        print(f"{what:<9} {value}")
    if reasons:
        print("\nREFUSED", *(f"- {reason}" for reason in reasons), sep="\n")
        return 1

    folder = args.records_dir / args.track / f"{args.date}_{short}"
    what = args.what or describe_change(logs, prior, args.track)
    file_record(logs, folder, args.name, what, target, args.same_ml, prior)
    regenerate(args.records_dir)
    print(f"\nfiled under {folder}")
    if prior is None and others:
        print(
            f"the first record of {args.track} on {logs[0].hardware}: nothing to compare its time with"
        )
    return 0


if __name__ == "__main__":
    run_command(main)
