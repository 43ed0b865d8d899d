"""
Makes the runs of a record: yours and those of the record to beat take turns.

A run of the working tree's train_gpt.py comes first, then one of the record's source, which its log has.
The next two come in the other order, and so on. Each is a process of its own, and its log gets a line that
says when it started. If this is interrupted, the same command makes what is missing.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tools.common import ROOT, UsageError, environment, write_file
from tools.logs import parse_log
from tools.records.pages import Record
from tools.records.replay import command_to_run, write_sources

RUNS = 10  # of each side


def make_run(command: str, seed: int, file: Path) -> None:
    """Runs a command that trains once, and moves its log to `file`. Raises UsageError and FileError."""
    env = os.environ | environment()
    env.pop("PYTHONPATH", None)  # a script must find only its own files
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command += f" --seed {seed} --log_dir {os.path.relpath(folder, ROOT)}"
        started = datetime.now().isoformat(" ")
        done = subprocess.run(command, shell=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
        logs = list(Path(folder).glob("*.txt"))
        if done.returncode or len(logs) != 1:
            raise UsageError(f"this run failed: {command}")
        write_file(file, logs[0].read_bytes() + f"started: {started}\n".encode())


def make_runs(folder: Path, track: str, record_on: Callable[[str], Record | None]) -> list[Path]:
    """Returns the folders of your runs and of the record's, or only the first if there is no record.

    `record_on(hardware)` is the record to beat. Raises UsageError, LogError and FileError.
    """
    ours, theirs = folder / "new", folder / "record"
    commands = {ours: f"./run.sh --track {track}"}
    first = ours / "0.txt"
    if not first.exists():
        make_run(commands[ours], 0, first)
    record = record_on(parse_log(first).hardware)
    if record is not None:
        sources = folder / "sources"
        if not sources.exists():
            write_sources(record.logs[0], sources)
        commands[theirs] = command_to_run(record.logs[0], sources)
    for seed in range(RUNS):
        sides = list(commands)[:: -1 if seed % 2 else 1]
        for side in sides:
            file = side / f"{seed}.txt"
            if not file.exists():
                print(f"{side.name} run {seed + 1} of {RUNS}", flush=True)
                make_run(commands[side], seed, file)
    return list(commands)
