"""
Gets the source of a run out of its log.

    python tools/replay.py LOG [-o FILE]          the script that made it, byte for byte
    python tools/replay.py LOG --diff OTHER_LOG   what changed from LOG's sources to OTHER_LOG's
"""

import argparse
import difflib
import sys
from pathlib import Path

from log_parsing import LogError, parse_log, run_command, write_file


def sources_of(path: str | Path) -> list[bytes]:
    """The script, then the files that follow it. Raises LogError where the log has none."""
    log = parse_log(path)
    if not log.source:
        raise LogError(f"{path}: no source: nothing stands above a line of =")
    return log.sources


def diff(old: bytes, new: bytes, old_name: str, new_name: str) -> str:
    """A unified diff; "" for equal sources."""
    old_lines, new_lines = (s.decode("utf-8", "replace").splitlines() for s in (old, new))
    lines = difflib.unified_diff(old_lines, new_lines, old_name, new_name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="replay.py", description=__doc__.strip().split("\n")[0])
    parser.add_argument("log", type=Path, metavar="LOG")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write here, not to the terminal"
    )
    parser.add_argument(
        "--diff", type=Path, metavar="OTHER_LOG", help="show what changed from LOG to this one"
    )
    args = parser.parse_args(argv)
    data, *more = sources_of(args.log)
    if args.diff:
        data, other = b"\n".join([data, *more]), b"\n".join(sources_of(args.diff))
        if data == other:
            print("the sources are the same", file=sys.stderr)
        text = diff(data, other, args.log.name, args.diff.name)
        if data != other and not text:
            print("the sources differ in line endings only", file=sys.stderr)
        data = text.encode()
    elif more:
        lines = [len(source.splitlines()) for source in more]
        print(
            f"{args.log}: this is the script; {len(more)} further source{'s' * (len(more) > 1)} "
            f"({' and '.join(map(str, lines))} lines) stand below it in the log",
            file=sys.stderr,
        )
    if args.output:
        write_file(args.output, data)
    else:
        sys.stdout.buffer.write(data)
    return 0


if __name__ == "__main__":
    run_command(main)
