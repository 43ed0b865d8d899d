"""
Gets the sources of a run out of its log, byte for byte. It runs none of them.

    ./run.sh replay LOG                    prints the script
    ./run.sh replay LOG -o FOLDER          writes all sources into a new folder
    ./run.sh replay LOG --diff OTHER_LOG   how the sources of OTHER_LOG differ from those of LOG

Exit status: 0 written, 2 bad input.
"""

import argparse
import difflib
import re
import shlex
import sys
from pathlib import Path

from tools.common import FileError, LogError, run_command
from tools.logs import Log, parse_log


def read_log(path: str | Path) -> Log:
    """Raises LogError if the log contains no source."""
    log = parse_log(path)
    if not log.source:
        raise LogError(
            f"{path}: no source found in this log; it should come first, above a line of = signs"
        )
    return log


def diff_sources(old: Log, new: Log) -> list[str]:
    """A unified diff for each source that isn't the same, without the line endings of the sources.

    Sources are compared with those of the same name.
    """
    old_sources = dict(old.sources)
    new_sources = dict(new.sources)
    diffs = []
    for name in {**old_sources, **new_sources}:
        old_lines = old_sources.get(name, b"").decode("utf-8", "replace").splitlines()
        new_lines = new_sources.get(name, b"").decode("utf-8", "replace").splitlines()
        titles = (f"{old.path.name}: {name}", f"{new.path.name}: {name}")
        lines = list(difflib.unified_diff(old_lines, new_lines, *titles, lineterm=""))
        if lines:
            diffs.append("".join(f"{line}\n" for line in lines))
    return diffs


def print_diff(old: Log, new: Log) -> None:
    """If there is nothing to show, a line on stderr says why."""
    text = "".join(diff_sources(old, new))
    if old.sources == new.sources:
        print("the sources are the same", file=sys.stderr)
    elif not text:
        print("the sources differ in line endings only", file=sys.stderr)
    sys.stdout.buffer.write(text.encode())


def print_script(log: Log) -> None:
    """If the log contains more sources, a line on stderr names them."""
    script, *others = [name for name, _ in log.sources]
    if others:
        names = ", ".join(others)
        print(f"this is only {script}; -o FOLDER also writes {names}", file=sys.stderr)
    sys.stdout.buffer.write(log.source)


def write_sources(log: Log, folder: Path) -> None:
    """Writes each source under its name, into a new or empty folder.

    The names come out of the log, perhaps a stranger's. So this raises LogError if one leads out of
    the folder, and never writes over a file. Raises FileError if it can't write.
    """
    for name, _ in log.sources:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise LogError(f"{log.path}: contains a source named {name}, outside of the folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileError(f"{folder} isn't empty; choose a new folder")
        for name, text in log.sources:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as f:  # write_file would write over a source of the same name
                f.write(text)
    except OSError as e:
        reason = (e.strerror or str(e)).lower()
        raise FileError(f"cannot write {e.filename or folder}: {reason}") from None


def command_to_run(log: Log, folder: str | Path) -> str:
    """The command that runs the sources in `folder`, with the track and the seed of the log."""
    script = f"{folder}/{log.sources[0][0]}"
    words = ["python", script]
    gpus = re.match(r"(\d+)x ", log.hardware)
    if gpus and gpus[1] != "1":
        words = ["torchrun", "--standalone", f"--nproc_per_node={gpus[1]}", script]
    for name in ("track", "seed"):
        if name in log.hyperparameters:
            words += [f"--{name}", str(log.hyperparameters[name])]
    command = shlex.join(words)
    if len(log.sources) > 1:  # a script in a subfolder imports from the folder
        command = f"PYTHONPATH={shlex.quote(str(folder))} {command}"
    return command


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./run.sh replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    options = parser.add_mutually_exclusive_group()
    options.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write all sources into this folder, which is new or empty",
    )
    options.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER_LOG",
        help="show how the sources of OTHER_LOG differ from those of LOG",
    )
    args = parser.parse_args(argv)
    log = read_log(args.log)
    if args.output:
        write_sources(log, args.output)
        print(f"To run it, in the folder that contains data/: {command_to_run(log, args.output)}")
    elif args.diff:
        print_diff(log, read_log(args.diff))
    else:
        print_script(log)
    return 0


if __name__ == "__main__":
    run_command(main)
