"""What other programs say about the machine: what they print, and whether it has a GPU."""

import contextlib
import os
import subprocess
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
