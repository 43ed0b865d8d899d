"""
The cores of this process, and the environment of child processes.
"""

import fnmatch
import functools
import math
import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path


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
    """How many cores a container may use, by version 2 of cgroups; infinity without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # ValueError: "max", which is no limit
        return math.inf


def chosen_threads() -> int:
    """OMP_NUM_THREADS; 0 if it isn't one whole number."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else 0


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


@functools.cache
def expression(patterns: tuple[str, ...]) -> re.Pattern:
    """One regular expression for all of them, because each run asks for each variable."""
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a name is like one of these patterns of the shell."""
    return bool(expression(tuple(patterns)).match(name))


def child_environment() -> dict[str, str]:
    """The environment of child processes: that of this process, without what could change what runs."""
    variables = {}
    for name, value in os.environ.items():
        if matches(name, KEPT) or not matches(name, DROPPED):
            variables[name] = value
    if os.path.expanduser("~") == "~":  # no HOME, and the user isn't in /etc/passwd
        variables["HOME"] = tempfile.gettempdir()
    return variables | FIXED
