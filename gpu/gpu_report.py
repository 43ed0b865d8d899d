"""
Checks and times an NVIDIA GPU (Ampere or later).

    ./run.sh gpu-report

This writes logs/report/gpu_report.md in at most 20 minutes. The stages are:

    machine      the GPU, and the versions of its software
    head         the head, its loss and gradients against float64: in bf16, and in FP8 if supported
    attention    FlexAttention and its gradients against float64
    muon         three steps of Muon against float64
    speed        the time of a step of fineweb by part, its slowest kernels and its memory
    waits        how often the host waits for the GPU between validations
    memory-...   the peaks in training and validation: memory-24576 and memory-12288 of shorter
                 sequences, memory-49152-bf16 with the other head

gpu_report.md lists the numbers of each stage, with limits for errors and for what docs/hardware.md says.
If a stage fails, the page says so, and the other stages still run. --stage NAME runs only that stage.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib.processes import ROOT
from judge.commands import UserError, command_parser, run_command, stop_on_signals
from judge.files import write_file
from gpu.report_stages import STAGES
from gpu.report_page import page
from train_gpt import InputError

RUN_STAGE = "import sys; from gpu.report_stages import run_stage; run_stage(*sys.argv[1:])"


def end_of(output, lines=15):
    """The last lines of a program's output, without the names of your folders."""
    text = "\n".join(output.strip().splitlines()[-lines:])
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")


def run_in_process(name, seconds):
    """Runs a stage in a process of its own, and in a session: processes that compile end with it."""
    started = time.monotonic()
    result = {"status": "failed", "figures": {}, "error": ""}
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        output = Path(folder, "output.txt")
        command = [sys.executable, "-c", RUN_STAGE, name, figures]
        environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
        with (
            open(output, "wb") as file,
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            ) as process,
        ):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                result["status"] = "timed out"
            finally:  # also after Ctrl-C, SIGTERM or SIGHUP
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if figures.exists():
            result |= {"status": "done", "figures": json.loads(figures.read_bytes())}
        else:
            result["error"] = end_of(output.read_text(errors="replace")) or result["status"]
    result["seconds"] = time.monotonic() - started
    return result


def make_report(folder, names, minutes=20):
    """Runs the stages, and writes the report after each of them."""
    if folder.exists():
        raise UserError(f"{folder} exists; choose another folder with --out, or remove it")
    deadline = time.monotonic() + 60 * minutes
    machine = run_in_process("machine", 180)
    if machine["status"] != "done":
        raise InputError(machine["error"].splitlines()[-1].removeprefix("error: "))
    folder.mkdir(parents=True)
    results = {"machine": machine}
    for name in names:
        seconds = min(20 * minutes, deadline - time.monotonic())
        if seconds < 1:
            print(f"the {minutes:g} minutes are over; --stage runs a stage that is missing")
            break
        print(f"{name}: ", end="", flush=True)
        results[name] = run_in_process(name, seconds)
        print(f"{results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
        write_file(folder / "gpu_report.md", page(results).encode())
    print(folder / "gpu_report.md")


def main(argv):
    parser = command_parser("gpu-report", __doc__)
    add = parser.add_argument
    add(
        "--stage",
        action="append",
        choices=STAGES,
        metavar="NAME",
        help="run only this stage; can be given several times",
    )
    add(
        "--out",
        type=Path,
        default=ROOT / "logs" / "report",
        metavar="DIR",
        help="folder of the report (default: logs/report)",
    )
    args = parser.parse_args(argv)
    make_report(args.out, args.stage or list(STAGES)[1:])  # machine comes first


if __name__ == "__main__":
    stop_on_signals()
    run_command(main, InputError)
