"""
What the tools ask of the machine they run on: its cores, and what its terminal can show. And the
environment variables of runs on a CPU.
"""
import os
import sys
from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Cores
def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use, at least 1. A cgroup's quota counts, rounded down: a
    container that is limited to 2.5 cores of 8 has 2. `root` is where /proc and /sys are found."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder in cgroup_folders(root):
        cores = min(cores, cgroup_quota(folder))
    return max(1, int(cores))


def cgroup_folders(root: Path) -> list[Path]:
    """The folders of the cgroups that this process is in, those around them included."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    folders = []
    for line in lines:  # "0::/path" in version 2, "4:cpu,cpuacct:/path" in version 1
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
        elif "cpu" in controllers.split(","):
            top = mount / "cpu"
        else:
            continue
        folders.append(top)
        parts = path.strip("/").split("/")
        if ".." in parts:  # a path outside of what is mounted here
            continue
        folders += [top.joinpath(*parts[:i + 1]) for i in range(len(parts))]
    return folders


def cgroup_quota(folder: Path) -> float:
    """How many cores a cgroup may use; infinity without a limit or without its files."""
    try:
        if (folder / "cpu.max").exists():  # version 2
            quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max", which is no limit
        return float("inf")
    if cores <= 0:  # -1 is no limit in version 1
        return float("inf")
    return cores


def environment(processes: int = 1) -> dict[str, str]:
    """The environment variables of runs on a CPU, `processes` of them at once. What the user has set
    stays, but processes share the threads of OMP_NUM_THREADS."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(threads) if threads.isdigit() else usable_cores()
    variables = {
        "PYTHONUTF8": "1",  # PyTorch can't read its files in an ASCII locale
        # glibc keeps freed memory, because mapping it again is slow
        "MALLOC_TRIM_THRESHOLD_": "-1",  # never returns the top of the heap
        "MALLOC_MMAP_MAX_": "0",  # takes large blocks from the heap, too
    }
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return variables | {"OMP_NUM_THREADS": str(max(1, cores // processes))}


# --------------------------------------------------------------------------------------------------
# Text
def show_any_text() -> None:
    """Prints a question mark for a character that the terminal can't show, instead of failing."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def readable(argument: str) -> str:
    """A word of the command line as UTF-8, also in the C locale, where Python reads it as ASCII."""
    try:
        argument.encode()
    except UnicodeEncodeError:  # bytes that the locale could not decode
        return os.fsencode(argument).decode("utf-8", "replace")
    return argument
