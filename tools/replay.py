"""
Extracts the source of a run from its log.

    python tools/replay.py LOG [-o FILE]          the script of the run, byte for byte
    python tools/replay.py LOG --diff OTHER_LOG   how the source of OTHER_LOG differs from that of LOG

Exit status: 0 written, 2 bad input.
"""

import argparse
import difflib
import sys
from pathlib import Path

from log_parsing import LogError, parse_log, run_command, write_file


def sources_of(path: str | Path) -> list[bytes]:
    """The script, then the files that the log shows after it. Raises LogError if there is none."""
    log = parse_log(path)
    if not log.source:
        raise LogError(
            f"{path}: no source found in this log; it should come first, above a line of = signs"
        )
    return log.sources


def diff(old: bytes, new: bytes, old_name: str, new_name: str) -> str:
    """A unified diff, without the line endings of the sources. "" if the lines are equal."""
    old_lines = old.decode("utf-8", "replace").splitlines()
    new_lines = new.decode("utf-8", "replace").splitlines()
    lines = difflib.unified_diff(old_lines, new_lines, old_name, new_name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def compare_logs(path: Path, other_path: Path) -> bytes:
    """A diff of all sources of two logs. If it is empty, a line on stderr says why."""
    old = b"\n".join(sources_of(path))
    new = b"\n".join(sources_of(other_path))
    text = diff(old, new, path.name, other_path.name)
    if old == new:
        print("the sources are the same", file=sys.stderr)
    elif not text:
        print("the sources differ in line endings only", file=sys.stderr)
    return text.encode()


def script_of(path: Path) -> bytes:
    """The script. If the log contains more files, a line on stderr says so."""
    script, *more = sources_of(path)
    if more:
        files = "other source file" if len(more) == 1 else "other source files"
        lines = " and ".join(str(len(source.splitlines())) for source in more)
        print(
            f"{path}: wrote only the script; the log also contains {len(more)} {files} ({lines} lines)",
            file=sys.stderr,
        )
    return script


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="replay.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write to this file instead of the terminal",
    )
    parser.add_argument(
        "--diff",
        type=Path,
        metavar="OTHER_LOG",
        help="show how the source of OTHER_LOG differs from that of LOG",
    )
    args = parser.parse_args(argv)
    data = compare_logs(args.log, args.diff) if args.diff else script_of(args.log)
    if args.output:
        write_file(args.output, data)
    else:
        sys.stdout.buffer.write(data)
    return 0


if __name__ == "__main__":
    run_command(main)
