"""
Gets the sources of a run out of its log, byte for byte. It runs none of them.

    ./run.sh replay LOG                    prints the script
    ./run.sh replay LOG -o FOLDER          writes all sources into a new folder

To see how sources and settings differ from those of another run, diff both logs.

Exit status: 0 written, 2 bad input.
"""

import re
import shlex
import sys
from pathlib import Path

from judge.logs.lines import plain
from judge.logs.read import Log, make_log, read_log_file, split_sources
from judge.commands import UserError, command_parser, run_command
from judge.files import new_folder

NO_OPTIONS = ("world_size", "model", "save_checkpoint")  # settings that can't be given


def read_log(path: Path) -> Log:
    """What stands above the first step. Raises UserError if there are no sources."""
    sources, rest = split_sources(read_log_file(path))
    if not sources:
        raise UserError(f"{path}: no source in this log; it should come first, above a line of = signs")
    header = plain(rest.decode("utf-8", "replace")).partition("\nstep:")[0]
    return make_log(path, sources, header, "", [], "")


def write_sources(log: Log, folder: Path) -> None:
    """Writes each source under its name, into a new folder. Raises UserError.

    The names come out of the log, perhaps a stranger's. So this raises UserError if one leads out of
    the folder, or if two are the same.
    """
    for name, _ in log.sources:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{log.path}: contains a source named {name}, outside of the folder")
    with new_folder(folder) as made:
        for name, text in log.sources:
            try:
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                with open((made / name).resolve(), "xb") as file:
                    file.write(text)
            except (FileExistsError, NotADirectoryError):
                raise UserError(f"{log.path}: contains several sources named {name}") from None


def processes_of(log: Log) -> int:
    """That trained; other programs' logs have only the number of GPUs."""
    found = re.search(r"^(\d+) process", log.run, re.MULTILINE) or re.match(r"(\d+)x ", log.hardware)
    return int(found[1]) if found else 1


def python_command(words: list[str], processes: int) -> str:
    """Runs a script with options."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return shlex.join([*command, *words])


def command_to_run(log: Log, folder: Path) -> str:
    """The command that runs the sources in `folder`, with the settings of the log."""
    words = [f"{folder}/{log.sources[0][0]}"]
    for name, value in log.hyperparameters.items():
        if isinstance(value, list):
            value = ",".join(map(str, value)) or "none"
        if name not in NO_OPTIONS and value is not None:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    command = python_command(words, processes_of(log))
    if len(log.sources) > 1:  # a script in a subfolder imports from the folder
        command = f"PYTHONPATH={shlex.quote(str(folder))} {command}"
    return command


def main(argv: list[str]) -> int:
    parser = command_parser("replay", __doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    into = "write all sources into this folder, which is new"
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help=into)
    args = parser.parse_args(argv)
    log = read_log(args.log)
    if args.output:
        write_sources(log, args.output)
        print(f"To run it, in the folder that contains data/: {command_to_run(log, args.output)}")
    else:
        if len(log.sources) > 1:
            print("this is only the script; -o FOLDER also writes its other sources", file=sys.stderr)
        sys.stdout.buffer.write(log.source)
    return 0


if __name__ == "__main__":
    run_command(main)
