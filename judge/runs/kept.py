"""
What a loss depends on, and the runs that are kept.

A run is kept under all that it could read (see same_run.py). Its log is .judge/runs/KEY_TIME/seedN.txt, where KEY
is a hash of all that is known before a run. facts.json beside it says what that was, and what the run read elsewhere:
later comparisons use the run if that hasn't changed. You may delete these folders at any time.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from judge.commands import UserError
from judge.files import write_file
from judge.logs.comparable import not_whole
from judge.logs.read import Log, parse_log
from judge.processes import has_nvidia_gpu
from judge.runs.same_run import (
    changes,
    hash_read,
    hash_text,
    machine_facts,
    named_paths,
    packages,
    run_environment,
    without_job,
)
from judge.runs.start import Worker, fail, known_folders
from judge.runs.variants import Variant
from judge.settings import Settings
from judge.text import as_json, short, show_line

CHANGES = "changes"  # instead of the hash of what a run reads: no later run is the same

# -----------------------------------------------------------------------------
# Before a run


def find_facts(settings: Settings, version: str, path: list[str], threads: int) -> dict:
    """The software and the machine. The Python of the command has this version, and its packages in `path`."""
    facts = packages(path) | {"Python": version} | machine_facts(has_nvidia_gpu())
    if settings.launcher:  # runs are made elsewhere
        facts |= {"machine": settings.launcher, "instruction sets": "", "compiler": []}
    return facts | {"threads": threads}


def identity(variant: Variant, facts: dict) -> dict[str, dict]:
    """All that a run could read, but for what it reads outside of its copy."""
    environment = without_job(run_environment(variant.project.root))
    return {
        "run": variant.run(),
        "files": variant.files(),
        # hashes, because a value may be a secret
        "environment": {name: hash_text(value) for name, value in environment.items()},
        "software": facts,
    }


def read_now(kept: dict) -> dict[str, dict]:
    """What kept runs would read today."""
    return {"read": {name: hash_read(name) for name in kept["read"]}}


def kept_facts(settings: Settings, key: str = "") -> Iterator[tuple[Path, dict]]:
    """The folders of kept runs, and what they say."""
    for file in settings.folder.glob(f"runs/{key}*_*/facts.json"):
        yield file.parent, json.loads(file.read_bytes())


def complete_log(path: Path, settings: Settings) -> Log | None:
    """None if it isn't whole."""
    try:
        log = parse_log(path, settings.name_of_metric)
    except UserError:
        return None
    return None if not_whole(log, settings.stops_early) else log


def kept_runs(variant: Variant) -> dict[int, Log]:
    """The runs of a variant that are kept, by seed."""
    for folder, kept in kept_facts(variant.project, variant.key()):
        if kept["read"] == read_now(kept)["read"]:
            variant.read = kept["read"]
            variant.place = folder
    found = {}
    for path in variant.place.glob("seed*.txt") if variant.place else []:
        if log := complete_log(path, variant.project):
            found[int(path.stem.removeprefix("seed"))] = log
    return found


def why_again(variants: list[Variant]) -> str:
    """What has changed since runs were kept of the same code with the same settings, for the first variant
    that has none now. "" if there are no such runs."""

    def code(facts: dict) -> list:
        return [facts["run"], [pair for pair in facts["files"].items() if pair[0].endswith(".py")]]

    facts = [facts for _, facts in kept_facts(variants[0].project)]
    for new in [variant.identity for variant in variants if not variant.runs]:
        same = [changes(kept, new | read_now(kept)) for kept in facts if code(kept) == code(new)]
        if same:
            return short(", ".join(min(same, key=len)), 200)
    return ""


# -----------------------------------------------------------------------------
# After a run


def opened(worker: Worker) -> dict[str, str] | None:
    """What a run does with files and folders outside of its copy, in order: "rw" if it reads a file, and then
    writes it; "s" for a program that it starts. None if no Python shows it (see watch/sitecustomize.py)."""
    file = worker.folder / "opened"
    if not file.exists():
        return None
    found = {}
    for line in file.read_text(errors="surrogateescape").splitlines():
        kind, name = line.split(" ", 1)
        found[name] = found.get(name, "") + kind
    return found


def check_reading(worker: Worker) -> None:
    """Raises UserError if a run reads a file of which it has a copy."""
    variant = worker.variant
    for path, kinds in (opened(worker) or {}).items():
        copied = variant.identity["files"].get(os.path.relpath(path, variant.origin), "/")
        if kinds[0] == "r" and not os.path.isabs(
            copied
        ):  # links that lead out of the copy are absolute
            fail(worker, f"it read {path}, not its copy: use relative paths, and put data into data/")


def named_in(variant: Variant, started: list[str]) -> set[str]:
    """Files and folders where links of the copy lead, and those that the command and the programs which it started
    name."""
    known = [variant.folder, variant.origin, *map(Path, known_folders(variant))]
    path = run_environment(variant.project.root)["PATH"]
    found = {target for target in variant.identity["files"].values() if os.path.isabs(target)}
    for text in ["\t".join([str(variant.folder), variant.command, *variant.options]), *started]:
        found |= named_paths(text, known, path)
    return found


def add_reads(worker: Worker, installed: dict[str, str]) -> None:
    """Adds what a run has read outside of its copy to what is known of its variant. Raises UserError if that
    has changed since an earlier run, or the installed packages."""
    variant = worker.variant
    software = variant.identity["software"]
    changed = changes({"software": software}, {"software": software | installed})
    files = opened(worker)
    if files is None:
        cannot_keep(variant, "no Python ran that shows what it reads")
        files = {}
    started = [text for text, kinds in files.items() if kinds == "s"]
    files = dict.fromkeys(named_in(variant, started), "n") | files
    written = {os.path.dirname(path) for path, kinds in files.items() if "w" in kinds}
    for path, kinds in files.items():
        new = os.path.exists(path) and os.stat(path).st_ctime > worker.date
        if kinds[0] in "sw" or kinds == "n" and new or path in written:
            continue  # output, or a folder for it
        now = hash_read(path)
        if variant.read.setdefault(path, now) not in (now, CHANGES):
            changed.append(f"{path} changed")
        elif new:
            cannot_keep(variant, f"it reads {path}, which changed meanwhile", path)
    if changed:
        raise UserError(
            f"{short(', '.join(changed), 200)} while {variant.name} trained, so this run isn't kept; run the "
            "same command again"
        )


def cannot_keep(variant: Variant, reason: str, path: str = "what it reads") -> None:
    """No later comparison uses its runs."""
    if variant.read.get(path) != CHANGES:
        variant.read[path] = CHANGES
        show_line()
        print(f"runs of {variant.name} aren't kept, because {reason}", file=sys.stderr)


def keep_log(variant: Variant, seed: int, log: Log) -> None:
    """Moves the log of a finished run to the kept ones."""
    # runs that read other files with the same code have another folder
    usual = variant.project.folder / "runs" / f"{variant.key()}_{time.time_ns()}"
    variant.place = variant.place or usual
    variant.place.mkdir(parents=True, exist_ok=True)
    write_file(variant.place / "facts.json", as_json(variant.identity | {"read": variant.read}))
    log.path = log.path.replace(variant.place / f"seed{seed}.txt")
    variant.runs[seed] = log
    variant.new.add(seed)
