"""
The project whose runs are compared, and its settings in judge.toml, or in [tool.judge] of pyproject.toml.

Each key is an option of compare and of screen, too, which wins. What the judge keeps lies in .judge/.
"""

import argparse
import difflib
import math
import os
import platform
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from judge.commands import UserError, output_file, positive, whole_number
from judge.environment import usable_cores

IGNORE = "*\n"  # git ignores .judge/


def setting(default, text: str, metavar: str = ""):
    """A field of Settings with its line of --help."""
    made = (
        {"default_factory": lambda: list(default)}
        if isinstance(default, list)
        else {"default": default}
    )
    return field(**made, metadata={"help": text, "metavar": metavar})


@dataclass
class Settings:
    """How to make the runs of a project, and how to read them."""

    command: str = setting(
        "", "the shell command of a run; {seed}, {options}, {runs} and {slot} are filled in"
    )
    metric: str = setting(
        "", "what to judge, by its name in the logs; default: the validation loss", "NAME"
    )
    higher_is_better: bool = setting(False, "judge the negative of the metric, so that lower is better")
    no_seed: bool = setting(False, "the runs may have no seed, or all the same one")
    stops_early: bool = setting(False, "the runs end before their last step, all at the same one")
    steps_option: str = setting(
        "--num_iterations", "the option of the command that sets its steps", "OPTION"
    )
    data: list[str] = setting(["data"], "folders that git ignores, and the runs need; default: data")
    not_read: list[str] = setting([], "patterns of files that no run reads")
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
    root: Path = field(default_factory=Path.cwd, metadata={})

    @property
    def folder(self) -> Path:
        """Where runs, the ledger and copies lie."""
        return self.root / self.scratch

    def working(self) -> Path:
        """For the files of this process. There may be others, on other machines."""
        return self.folder / "working" / f"{platform.node()}-{os.getpid()}"

    @property
    def name_of_metric(self) -> str:
        """For parse_log, which negates "-NAME"."""
        return f"-{self.metric}" if self.higher_is_better else self.metric

    def tries(self) -> int:
        """How often a run may be started."""
        usual = 2 if self.launcher else 0
        return 1 + (usual if self.retries < 0 else self.retries)

    def jobs_on_cpu(self) -> int:
        return self.jobs or (usable_cores() if self.job_per_core and not self.launcher else 1)


KEYS = {entry.name: entry for entry in fields(Settings) if entry.metadata}
WORDS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list[str]: "a list of strings",
}
# What a number must be
CHECKS = {"jobs": whole_number, "gpus_per_run": whole_number, "run_timeout": positive}


TEXTS = tuple(f"--{name}" for name, entry in KEYS.items() if entry.type is str)  # see join_values


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options that stand for the keys of judge.toml."""
    parser.add_argument(
        "--project", type=Path, metavar="FOLDER", help="where judge.toml is; default: found"
    )
    for name, entry in KEYS.items():
        how = {"default": None, "help": entry.metadata["help"].replace("%", "%%")}
        if entry.type is bool:
            how |= {"action": "store_true"}
        elif entry.type == list[str]:
            how |= {"action": "append", "metavar": "PATH"}
        else:
            how |= {"type": CHECKS.get(name, entry.type), "metavar": entry.metadata["metavar"] or None}
        parser.add_argument(f"--{name}", **how)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options of compare and screen that say how to make runs."""
    add = parser.add_argument
    add("--hours", type=float, default=math.inf, metavar="H", help="stop after H hours")
    add("--seed", type=int, default=0, metavar="N", help="first seed; default: 0")
    add("--json", type=output_file, metavar="FILE", help="write all numbers")
    add_settings(parser)


def read_keys(file: Path) -> dict | None:
    """The keys of judge.toml or of [tool.judge] in pyproject.toml; None if there are none. Raises UserError."""
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise UserError(f"{file}: {e}") from None
    if file.name == "pyproject.toml":
        found = found.get("tool", {}).get("judge")
    return found


def check_key(file: Path, name: str, value) -> None:
    """Raises UserError."""
    if name not in KEYS:
        near = difflib.get_close_matches(name, KEYS, 1) or [", ".join(KEYS)]
        raise UserError(f"{file}: there is no key {name}; do you mean {near[0]}?")
    kind = KEYS[name].type
    strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    number = kind is float and type(value) is int
    if not (strings if kind == list[str] else type(value) is kind or number):
        raise UserError(f"{file}: {name} = {value!r} must be {WORDS[kind]}")
    if name in CHECKS:
        try:
            CHECKS[name](str(value))
        except argparse.ArgumentTypeError as e:
            raise UserError(f"{file}: {name}: {e}") from None


def find_project(start: Path) -> tuple[Path, dict]:
    """The first folder with settings from `start` upwards, and its keys; without one, `start` itself. Raises
    UserError."""
    for folder in [start, *start.parents]:
        for file in (folder / "judge.toml", folder / "pyproject.toml"):
            keys = read_keys(file)
            if keys is not None:
                for name, value in keys.items():
                    check_key(file, name, value)
                return folder, keys
    return start, {}


def read_settings(args: argparse.Namespace, start: Path, needs_command: bool = True) -> Settings:
    """The settings of the project around `start`, or in --project, with the options of the command line.
    Raises UserError."""
    root, keys = find_project((args.project or start).resolve())
    given = {name: value for name in KEYS if (value := getattr(args, name)) is not None}
    settings = Settings(root=root, **(keys | given))
    if not settings.command and needs_command:
        raise UserError(
            f"{root} has no judge.toml that says how to train; give --command, or write it by: "
            'judge init --command "python train.py --seed {seed} {options}"'
        )
    if settings.higher_is_better and not settings.metric:
        raise UserError("--higher_is_better needs --metric NAME")
    return settings


def make_folder(settings: Settings) -> None:
    """Makes the folder of the judge, which git ignores."""
    if (settings.root / "logs" / "compare").is_dir() and not settings.folder.exists():
        print(f"runs are kept in {settings.folder} now; those in logs/compare aren't read any more")
    settings.folder.mkdir(parents=True, exist_ok=True)
    if settings.folder.is_relative_to(settings.root) and settings.folder != settings.root:
        (settings.folder / ".gitignore").write_text(IGNORE)
