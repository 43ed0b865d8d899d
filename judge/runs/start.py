"""
Where runs are made, and how one is started and ended.

A slot is a place for one run at a time, with GPUs of its own. A launcher, such as srun, finds a place elsewhere:
then a slot is only a number.
A command runs in a fresh copy of its folder, as the shell script START. watch/sitecustomize.py, which each Python
of a run imports, writes down what it reads outside of its copy.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from judge.commands import UserError
from judge.environment import usable_cores
from judge.processes import end_with_parent, has_nvidia_gpu, output_of
from judge.runs.same_run import SYSTEM, run_environment, without_job
from judge.runs.variants import Variant, fill_in
from judge.settings import Settings
from judge.text import counted, plural

WATCH = Path(__file__).resolve().parent / "watch"

# -----------------------------------------------------------------------------
# Slots


@dataclass(frozen=True)
class Slot:
    number: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them; () leaves the variable as it is


def visible_gpus() -> list[str]:
    """Those of CUDA_VISIBLE_DEVICES, or else all that nvidia-smi shows."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",")]
    lines = (output_of("nvidia-smi", "-L") or "").splitlines()
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in lines))]


def find_slots(settings: Settings) -> list[Slot]:
    """On GPUs, a slot for each set of gpus_per_run GPUs. Raises UserError."""
    if settings.launcher or not has_nvidia_gpu():
        per_core = settings.job_per_core and not settings.launcher
        jobs = settings.jobs or (usable_cores() if per_core else 1)
        return [Slot(number) for number in range(jobs)]
    gpus = visible_gpus()
    each = settings.gpus_per_run or max(1, len(gpus))
    jobs = settings.jobs or max(1, len(gpus) // each)
    if jobs * each > len(gpus):
        raise UserError(
            f"{plural(jobs, 'run')} at a time with {plural(each, 'GPU')} each need more than the "
            f"{plural(len(gpus), 'GPU')} that are visible; change --jobs or --gpus_per_run, or name the GPUs in "
            "CUDA_VISIBLE_DEVICES"
        )
    return [Slot(i, tuple(gpus[i * each : (i + 1) * each])) for i in range(jobs)]


# -----------------------------------------------------------------------------
# The start of a run


# What a slot runs, for the words COPY FOLDER COMMAND. It says when it began, where it is, and how the command
# ended: a job that was cancelled doesn't. If it is told to end, it ends the command, too
START = """
cd "$1" || exit
{ uname -n; grep -m 1 "model name" /proc/cpuinfo
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader; } >"$2/place.new" 2>/dev/null
mv "$2/place.new" "$2/place"
trap 'trap - TERM; kill 0' TERM
bash -o pipefail -c "$3" &
wait $!
status=$?
echo $status >"$2/status.new"
mv "$2/status.new" "$2/status"
exit $status
"""
LOST = 128  # the exit status of a command that didn't say how it ended


@dataclass
class Worker:
    """A process that makes runs of a variant."""

    variant: Variant
    seeds: list[int]  # without those of finished runs
    slot: Slot
    folder: Path  # for its copy, its output and what it reads
    child: subprocess.Popen
    several: bool  # whether the command was told to make several runs
    began: float = 0.0  # when the run began, in seconds of the monotonic clock; 0: it waits for a place
    date: float = field(default_factory=time.time)  # when it was started


def known_folders(variant: Variant) -> list[str]:
    """Where a run reads nothing of its own: its copy, the system and the environment."""
    return [str(variant.project.folder), *SYSTEM]


def variables(variant: Variant, slot: Slot, folder: Path) -> dict[str, str]:
    """The environment of a run, without a job's variables, which its launcher gives."""
    found = without_job(run_environment(variant.project.root)) | {
        "PYTHONPATH": str(WATCH),
        "PYTHONUNBUFFERED": "1",  # otherwise, lines of stderr come between two halves of one of stdout
        "COMPARE_WATCH": json.dumps([str(folder / "opened"), *known_folders(variant)]),
    }
    if threads := variant.identity["software"]["threads"]:
        found["OMP_NUM_THREADS"] = str(threads)
    if slot.gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    return {name: value for name, value in found.items() if name.isidentifier()}  # no functions of bash


def write_script(variant: Variant, seeds: list[int], slot: Slot, folder: Path) -> Path:
    """What the slot runs: the command in a fresh copy."""
    copy = folder / "copy"
    for name in variant.identity["files"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(variant.folder / name, copy / name, follow_symlinks=False)
    command = variant.command.replace("PYTHONPATH=", f"PYTHONPATH={shlex.quote(str(WATCH))}:")
    command = fill_in(command, variant.options, seeds[0], len(seeds), slot.number)
    own = variables(variant, slot, folder)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in own.items()]
    lines.append(f"set -- {shlex.join([str(copy), str(folder), command])}")
    script = folder / "start.sh"
    script.write_text("\n".join(lines) + START)
    return script


def start(variant: Variant, seeds: list[int], slot: Slot) -> Worker:
    """Starts a command. Its output goes into console.txt of a new folder. So does, into `opened` and by each Python,
    what it reads elsewhere."""
    folder = variant.project.working() / f"{variant.key()}_seed{seeds[0]}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was lost
    folder.mkdir(parents=True)
    script = write_script(variant, seeds, slot, folder)
    with open(folder / "console.txt", "wb") as output:
        child = subprocess.Popen(
            [*shlex.split(variant.project.launcher), "bash", str(script)],
            env=run_environment(variant.project.root),
            close_fds=False,  # the folder stays locked while a run is alive
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    return Worker(variant, list(seeds), slot, folder, child, len(seeds) > 1)


def note_place(worker: Worker) -> str:
    """Notes when a run began: in a queue, its time doesn't count. Returns its machine, if a launcher has found it
    now, or else ""."""
    place = worker.folder / "place"
    if worker.began or not place.exists():
        return ""
    worker.began = time.monotonic()
    if not worker.variant.project.launcher:
        return ""
    lines = place.read_text().splitlines()[1:]
    return counted(line.partition(": ")[2] or line for line in lines) or "an unknown machine"


# -----------------------------------------------------------------------------
# The end of a run


def end(worker: Worker) -> None:
    """Ends a process and all that it started. They get time to clean up: a launcher must end its job,
    torchrun its workers, and a compiler that was killed could leave half a file in PyTorch's cache."""
    worker.child.terminate()
    with contextlib.suppress(ProcessLookupError):  # all have ended
        for _ in range(400):
            worker.child.poll()  # otherwise, it would stay in its group
            os.killpg(worker.child.pid, 0)
            time.sleep(0.1)
        os.killpg(worker.child.pid, signal.SIGKILL)
    worker.child.wait()
    shutil.rmtree(worker.folder, ignore_errors=True)


def last_lines(console: Path) -> str:
    """The end of what a process printed, without what torchrun adds."""
    text = console.read_text(encoding="utf-8", errors="replace").strip()
    lines = re.split(r"\n.* failed \(exitcode", text)[0].splitlines()
    # where torch.compile fails, the error comes long before the end
    errors = [line for line in lines[:-12] if re.match(r"[\w.]+Error: ", line)]
    return "\n".join(errors[-1:] + lines[-12:])


def fail(worker: Worker, reason: str):
    raise UserError(
        f"{last_lines(worker.folder / 'console.txt')}\na run failed: {worker.variant.name}, seed "
        f"{worker.seeds[0]} ({reason}). Above are the last lines that it printed"
    )
