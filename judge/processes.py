"""Other programs: what they print, whether they see a GPU, and when they end."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

DEVICES = Path("/dev")  # where the driver puts its files


def output_of(*command: str | Path) -> str | None:
    """What a command prints; None if it fails or doesn't exist."""
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            return done.stdout
    return None


def has_nvidia_gpu() -> bool:
    """Has the machine a GPU of NVIDIA that isn't hidden?"""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return "GPU " in (output_of("nvidia-smi", "-L") or "") or any(DEVICES.glob("nvidia[0-9]*"))


def end_with_parent() -> None:
    """Runs in a child process before its program. On Linux, it gets SIGTERM when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
