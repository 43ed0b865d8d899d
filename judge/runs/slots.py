"""
Where runs are made: a slot is a place for one run at a time, with GPUs of its own.

A launcher, such as srun, finds a place elsewhere: then a slot is only a number.
"""

import os
from dataclasses import dataclass

from judge.commands import UserError
from judge.processes import has_nvidia_gpu, output_of
from judge.settings import Settings
from judge.text import plural


@dataclass(frozen=True)
class Slot:
    number: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; () leaves the variable as it is


def visible_gpus() -> list[str]:
    """Those of CUDA_VISIBLE_DEVICES, or else all; [] if there are none, or if nvidia-smi is missing."""
    if not has_nvidia_gpu():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",")]
    lines = (output_of("nvidia-smi", "-L") or "").splitlines()
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in lines))]


def find_slots(settings: Settings) -> list[Slot]:
    """Without a launcher, a slot for each set of gpus_per_run GPUs. Raises UserError."""
    gpus = [] if settings.launcher else visible_gpus()
    if not gpus:
        jobs = 1 if has_nvidia_gpu() and not settings.launcher else settings.jobs_on_cpu()
        return [Slot(number) for number in range(jobs)]
    each = settings.gpus_per_run or len(gpus)
    most = len(gpus) // each
    if most < max(1, settings.jobs):
        raise UserError(
            f"{plural(max(1, settings.jobs), 'run')} at a time with {plural(each, 'GPU')} each need more than "
            f"the {plural(len(gpus), 'GPU')} that are visible; change --jobs or --gpus_per_run"
        )
    slots = [Slot(i, tuple(gpus[i * each : (i + 1) * each])) for i in range(most)]
    return slots[: settings.jobs or most]
