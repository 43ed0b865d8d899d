"""
The project whose runs are compared, and its settings in judge.toml, or in [tool.judge] of pyproject.toml.

Each key is an option of compare and of screen, too, which wins. What the judge keeps lies in .judge/.
"""

import argparse
import math
import os
import platform
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from judge.commands import UserError, command_parser, output_file, positive, whole_number
from judge.logs.read import signed


def setting(default, text: str, metavar: str | None = None):
    """A field of Settings with its line of --help."""
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass
class Settings:
    """How to make the runs of a project, and how to read them."""

    command: str = setting(
        "", "the shell command of a run; {seed}, {options}, {runs} and {slot} are filled in"
    )
    metric: str = setting(
        "", "what to judge, by its name in the logs; default: the validation loss", "NAME"
    )
    higher_is_better: bool = setting(False, "more of the metric is better")
    no_seed: bool = setting(False, "the runs may have no seed, or all the same one")
    stops_early: bool = setting(False, "the runs end before their last step, all at the same one")
    steps_option: str = setting(
        "--num_iterations",
        "the option that sets the steps; default: --num_iterations",
        "OPTION",
    )
    data: tuple[str, ...] = setting(
        ("data",), "folders that git ignores, and the runs need; default: data"
    )
    not_read: tuple[str, ...] = setting((), "patterns of files that no run reads")
    jobs: int = setting(0, "runs at a time; default: one per gpus_per_run, or 1 without a GPU", "N")
    job_per_core: bool = setting(False, "without a GPU, as many runs at a time as cores")
    gpus_per_run: int = setting(0, "GPUs of a run; default: all that are visible", "N")
    launcher: str = setting(
        "", "a command that runs another one elsewhere and waits for it, like srun", "COMMAND"
    )
    retries: int = setting(
        -1, "how often a lost run is made again; default: 2 with a launcher, otherwise 0", "N"
    )
    run_timeout: float = setting(math.inf, "end the command if a run takes longer than this", "MINUTES")
    scratch: str = setting(
        ".judge", "where copies and runs lie; with a launcher, on a shared disk", "FOLDER"
    )
    confirm_options: str = setting(
        "", "options of all runs of --confirm, which name other validation tokens", "OPTIONS"
    )
    sizes: dict[str, str] = field(
        default_factory=dict
    )  # options by the number of parameters, for --sizes
    root: Path = field(default_factory=Path.cwd)

    @property
    def folder(self) -> Path:
        """Where runs, the ledger and copies lie."""
        return self.root / self.scratch

    def working(self) -> Path:
        """For the files of this process. There may be others, on other machines."""
        return self.folder / "working" / f"{platform.node()}-{os.getpid()}"

    @property
    def name_of_metric(self) -> str:
        """For parse_log."""
        return signed(self.metric, self.higher_is_better)

    def tries(self) -> int:
        """How often a run may be started."""
        usual = 2 if self.launcher else 0
        return 1 + (usual if self.retries < 0 else self.retries)


KEYS = {entry.name: entry for entry in fields(Settings) if entry.metadata}
TEXTS = tuple(f"--{name}" for name, entry in KEYS.items() if entry.type is str)  # see join_values
# How numbers and lists are read. Others are what their type says
KINDS = {"jobs": whole_number, "gpus_per_run": whole_number, "run_timeout": positive}
KINDS |= {"data": str, "not_read": str}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options that stand for the keys of judge.toml."""
    parser.add_argument(
        "--project",
        type=Path,
        metavar="FOLDER",
        help="where judge.toml is; default: here or above",
    )
    for name, entry in KEYS.items():
        how = {"default": None, "help": entry.metadata["help"]}
        if entry.type is bool:
            how["action"] = "store_true"
        else:
            how |= {"type": KINDS.get(name, entry.type), "metavar": entry.metadata["metavar"]}
        if isinstance(entry.default, tuple):
            how |= {"action": "append", "metavar": "PATH"}
        parser.add_argument(f"--{name}", **how)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of compare and screen that say how to make runs."""
    add = parser.add_argument
    add("--hours", type=float, default=math.inf, metavar="H", help="stop after H hours")
    add("--seed", type=int, default=0, metavar="N", help="first seed; default: 0")
    add("--json", type=output_file, metavar="FILE", help="write all numbers")
    add_settings(parser)


def given(args: argparse.Namespace) -> dict:
    """The keys that have a value."""
    return {name: value for name in KEYS if (value := getattr(args, name)) is not None}


def read_keys(file: Path) -> dict:
    """The keys of judge.toml or of [tool.judge] in pyproject.toml, read as options are. Raises UserError."""

    def refuse(message: str):
        raise UserError(f"{file}: {message}")

    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        refuse(str(e))
    if file.name == "pyproject.toml":
        found = found.get("tool", {}).get("judge", {})
    words = []
    sizes = found.pop("sizes", {})
    if not isinstance(sizes, dict):
        refuse("sizes must be a table: [sizes]")
    for name, value in found.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not False:
                words.append(f"--{name}" if item is True else f"--{name}={item}")
    parser = command_parser("", "", refuse)
    add_settings(parser)
    keys = given(parser.parse_args(words))
    return keys | {"sizes": sizes} if sizes else keys


def find_project(start: Path) -> tuple[Path, dict]:
    """The first folder with settings from `start` upwards, and its keys; without one, `start` itself. Raises
    UserError."""
    for folder in [start, *start.parents]:
        for file in (folder / "judge.toml", folder / "pyproject.toml"):
            if file.exists() and (keys := read_keys(file)):
                return folder, keys
    return start, {}


def read_settings(args: argparse.Namespace, start: Path, needs_command: bool = True) -> Settings:
    """The settings of the project around `start`, or in --project, with the options of the command line.
    Raises UserError."""
    root, keys = find_project((args.project or start).resolve())
    settings = Settings(root=root, **(keys | given(args)))
    if not settings.command and needs_command:
        raise UserError(
            f"{root} has no judge.toml that says how to train; give --command, or write it by: "
            'judge init --command "python train.py --seed {seed} {options}"'
        )
    signed(settings.metric, settings.higher_is_better)
    return settings


def make_folder(settings: Settings) -> None:
    """Makes the folder of the judge, which git ignores."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    if settings.folder.is_relative_to(settings.root) and settings.folder != settings.root:
        (settings.folder / ".gitignore").write_text("*\n")
