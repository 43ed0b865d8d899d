"""
What several commands use: errors, files, signals, cores, and text for the terminal.
"""

import argparse
import codecs
import contextlib
import fnmatch
import json
import math
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent  # the repository


class LogError(Exception):
    """A log, or a file of a record or an idea, can't be read or used. The message is one line."""


class FileError(Exception):
    """A file can't be written. The message is one line."""


class UsageError(Exception):
    """The arguments of a command can't be used. The message is one line that says what to do."""


# --------------------------------------------------------------------------------------------------
# Cores
def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use, at least 1. A cgroup's quota counts, rounded down: a
    container that is limited to 2.5 cores of 8 has 2. `root` is where /sys is found."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, int(min(cores, cgroup_quota(root / "sys/fs/cgroup"))))


def cgroup_quota(folder: Path) -> float:
    """How many cores a container may use; infinity without a limit or without its files."""
    try:
        if (folder / "cpu.max").exists():  # version 2
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu/cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu/cpu.cfs_period_us").read_text(encoding="utf-8")
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max", which is no limit
        return math.inf
    return cores if cores > 0 else math.inf  # -1 is no limit in version 1


def chosen_threads() -> int:
    """OMP_NUM_THREADS; 0 if it isn't one whole number."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else 0


def environment(processes: int = 1) -> dict[str, str]:
    """The environment variables of runs on a CPU, `processes` of them at once. What the user has set
    stays, but processes share the threads of OMP_NUM_THREADS."""
    cores = chosen_threads() or usable_cores()
    variables = {
        # glibc keeps freed memory, because mapping it again is slow
        "MALLOC_TRIM_THRESHOLD_": "-1",  # never returns the top of the heap
        "MALLOC_MMAP_MAX_": "0",  # takes large blocks from the heap, too
    }
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return variables | {"OMP_NUM_THREADS": str(max(1, cores // processes))}


# --------------------------------------------------------------------------------------------------
# The environment of child processes. What could change what they run is dropped, or it is in KEPT
#   - variables of git (in a hook, they name another repository), of Python, and of another job
#   - where pip installs, and what it builds
#   - places for threads, other kernels, switches of PyTorch and its compiler
DROPPED = """
    GIT_* PYTHON* RANK LOCAL_RANK WORLD_SIZE
    PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PYTHON PIP_DRY_RUN PIP_NO_DEPS PIP_NO_BINARY
    OMP_* GOMP_* KMP_* MKL_* ONEDNN_* DNNL_* TORCH* PYTORCH_*
""".split()
# The log of a run names those of the first two lines. The others are folders, whether Python uses the one
# in the user's home, and what is printed
KEPT = """
    OMP_NUM_THREADS OMP_WAIT_POLICY PYTORCH_*ALLOC_CONF
    TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE TORCHINDUCTOR_CPP_MARCH
    TORCHINDUCTOR_CACHE_DIR TORCH_HOME PYTHONNOUSERSITE TORCH_LOGS TORCH_NCCL_*
""".split()
FIXED = {
    "PYTHONUTF8": "1",  # PyTorch can't read its files in an ASCII locale
    # git works in a folder of another user, too
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}


def matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def child_environment() -> dict[str, str]:
    """The environment of child processes: that of this process, without what could change what runs."""
    variables = {}
    for name, value in os.environ.items():
        if matches(name, KEPT) or not matches(name, DROPPED):
            variables[name] = value
    if os.path.expanduser("~") == "~":  # no HOME, and the user isn't in /etc/passwd
        variables["HOME"] = tempfile.gettempdir()
    return variables | FIXED


def clean_environment() -> list[str]:
    """Gives this process the environment of its child processes. Returns the variables of training and
    of pip that it drops: the user may have set them on purpose."""
    variables = child_environment()
    dropped = sorted(os.environ.keys() - variables.keys())
    os.environ.clear()
    os.environ.update(variables)
    return [name for name in dropped if not name.startswith(("GIT_", "PYTHON"))]


# --------------------------------------------------------------------------------------------------
# For the commands


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a binary file for writing. It is written to a temporary file, fsynced, and then
    renamed to `path`, so `path` is never incomplete. Raises OSError."""
    # The temporary file is in the same folder because a rename is atomic only within a file
    # system. Its name doesn't match *.bin, so no reader takes it for a shard. The name is chosen
    # here and not by tempfile, so that an interrupt can't come between creating and naming it.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(name: str | Path, data: bytes) -> None:
    """Writes a file with atomic_write. Raises FileError.

    If the name is a symbolic link, the file that it points to is replaced. A device or a pipe, such as
    /dev/stdout, can't be replaced, so this writes into it."""
    try:
        if os.path.exists(name) and not os.path.isfile(name):
            with open(name, "wb") as f:
                f.write(data)
            return
        with atomic_write(Path(name).resolve()) as f:
            f.write(data)
    except OSError as e:
        raise FileError(f"cannot write {name}: {(e.strerror or str(e)).lower()}") from None


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, which gets this name when all is written. Raises FileError if
    something has it already."""
    if folder.exists():
        raise FileError(f"{folder} exists already; choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
        made = Path(temporary, folder.name)
        made.mkdir()
        yield made
        os.rename(made, folder)


def without_windows(text: bytes) -> bytes:
    """Text without what Windows adds: a byte-order mark, and its line ends if all are of this kind.
    Otherwise they are those of a file that the text quotes. PowerShell writes UTF-16."""
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = text.decode("utf-16", "replace").encode()
    text = text.removeprefix(codecs.BOM_UTF8)
    if text.count(b"\n") == text.count(b"\r\n"):
        text = text.replace(b"\r\n", b"\n")
    return text


def stop_on_signals() -> None:
    """Makes SIGTERM and SIGHUP (the terminal was closed) raise KeyboardInterrupt, like Ctrl-C.

    SIGHUP may come twice: from the terminal and from the shell. The second one must not interrupt the
    cleanup, so it is ignored. So is the first one under nohup."""

    def hang_up(number, frame):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def run_command(main, *more_errors: type[Exception]) -> None:
    """Runs main(argv) and exits with its status.

    After a LogError, a FileError, a UsageError, an OSError or one of `more_errors`, it prints the message
    and exits with status 2. After Ctrl-C, the status is 130.
    """
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has closed the pipe, so Python's last flush would fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (LogError, FileError, UsageError, OSError, *more_errors) as e:
        print(f"error: {e}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


# -----------------------------------------------------------------------------
# Options, numbers in words, tables, JSON


def command_parser(command: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command of run.sh, whose --help shows the description as it is."""
    return argparse.ArgumentParser(
        prog=f"./run.sh {command}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def join_values(argv: list[str], names: Collection[str]) -> list[str]:
    """Joins these options with their values, because argparse takes a value like "--lr 2" for an option."""
    joined = []
    for word in argv:
        if joined and joined[-1] in names:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def whole_number(text: str) -> int:
    """An option's value that must be at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def positive(text: str) -> float:
    """An option's value above zero. Raises ArgumentTypeError."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be more than zero")
    return value


def fraction(text: str) -> float:
    """A percentage as an option's value: "2%" or "2" as 0.02. Raises ArgumentTypeError."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = 0.0
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text}: must be a percentage of at most 50%, like 2%")
    return value


def output_file(text: str) -> Path:
    """A file that is written in the end, so its folder must be there. Raises ArgumentTypeError."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder doesn't exist; make it first")
    return Path(text)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"


def goal(x: float) -> str:
    """0.02 as "2%"."""
    return f"{100 * x:g}%"


def percent(x: float | None) -> str:
    """-0.04 as "-4.0%"."""
    if x is None:
        return "-"
    return f"{x:+.1%}" if x <= 10 else "over +1000%"


def percent_interval(bounds: tuple[float, float]) -> str:
    return f"{percent(bounds[0])} to {percent(bounds[1])}"


def p_text(p: float | None) -> str:
    """Like "0.0123" or "1.2e-05". "-" for None."""
    if p is None:
        return "-"
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def table(rows: list[tuple[str, ...]], alignment: str) -> list[str]:
    """Lines of text. `alignment` has < (left) or > (right) for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths)]
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown_table(rows: list[dict[str, str]], right: Collection[str] = ()) -> str:
    """The keys are the header. `right` names the columns to align to the right."""
    header = list(rows[0])
    alignment = ["---:" if name in right else "---" for name in header]
    lines = []
    for cells in [header, alignment, *(row.values() for row in rows)]:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def finite(value):
    """Infinite numbers as None, because JSON has none."""
    if isinstance(value, dict):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_json(value) -> bytes:
    """Infinite numbers become null."""
    return json.dumps(finite(value), indent=1, allow_nan=False).encode()
