"""
Makes the runs of a record: yours and those of the record to beat take turns.

A run of a copy of your train_gpt.py comes first, then one of the record's source, which its log has.
The next two come in the other order, and so on. Each is a training of its own, started in the same way, and
its log gets a line that says when. If this is interrupted, the same command makes what is missing.
"""

import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from judge.logs.read import parse_log
from leaderboard.pages import Record, record_to_beat
from leaderboard.replay import command_to_run, processes_of, python_command, write_sources
from judge.commands import UserError
from judge.files import write_file
from lib.processes import ROOT, check_machine, environment

RUNS = 10  # of each side


def make_run(command: str, env: dict[str, str], seed: int, file: Path) -> None:
    """Runs a command that trains once, and moves its log to `file`. Raises UserError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    env.pop("PYTHONPATH", None)  # a script must find only its own files
    print(f"{file.parent.name} run {seed + 1} of {RUNS}", flush=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command += f" --seed {seed} --log_dir {os.path.relpath(folder, ROOT)}"
        started = datetime.now(UTC).replace(tzinfo=None).isoformat(" ")
        # not on the terminal: torchrun prints tracebacks after Ctrl-C
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        done = subprocess.run(command, shell=True, cwd=ROOT, env=env, **streams)
        logs = list(Path(folder).glob("*.txt"))
        if done.returncode or len(logs) != 1:
            print(done.stdout[-2000:], file=sys.stderr)
            raise UserError(f"this run failed: {command}")
        write_file(file, logs[0].read_bytes() + f"started: {started}\n".encode())


def make_record_runs(folder: Path, track: str, filed: list[Record]) -> list[Path]:
    """Returns the folders of your runs and of the record's, or only the first if there is no record
    on this hardware. `filed` are the records of the track. Raises UserError."""
    ours, theirs = folder / "new", folder / "record"
    print(f"{RUNS} runs of yours and of the record to beat; if interrupted, the same command goes on")
    usual = dict(os.environ)
    needs = check_machine(sys.executable, "record", "train_gpt", "--track", track)
    script = folder / "train_gpt.py"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_file(script, (ROOT / "train_gpt.py").read_bytes())
    words = [str(script), "--track", track, *needs["options"]]
    # What trains a side, and where. The check has set the variables of ./run.sh
    runs = {ours: (python_command(words, needs["processes"]), dict(os.environ))}
    first = ours / "0.txt"
    if not first.exists():
        make_run(*runs[ours], 0, first)
    record = record_to_beat(filed, parse_log(first).hardware)
    if record is not None:
        sources = folder / "sources"
        if not sources.exists():
            write_sources(record.logs[0], sources)
        threads = environment(processes_of(record.logs[0]))
        runs[theirs] = (command_to_run(record.logs[0], sources), usual | threads)
    for seed in range(RUNS):
        for side in list(runs)[:: -1 if seed % 2 else 1]:
            file = side / f"{seed}.txt"
            if not file.exists():
                make_run(*runs[side], seed, file)
    return list(runs)
