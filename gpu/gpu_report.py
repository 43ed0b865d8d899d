"""
Checks and times an NVIDIA GPU (Ampere or later).

    ./run.sh gpu-report

This writes logs/report/gpu_report.md and gpu_report.json in at most 20 minutes. The stages are:

    machine      the GPU, and the versions of its software
    head         the head, its loss and gradients against float64: in bf16, and in FP8 if supported
    attention    FlexAttention and its gradients against float64
    muon         three steps of Muon against float64
    speed        the time of a step of fineweb by part, its slowest kernels and its memory
    waits        how often the host waits for the GPU between validations
    memory-...   the peaks in training and validation: memory-24576 and memory-12288 of shorter
                 sequences, memory-49152-bf16 with the other head

gpu_report.md lists the numbers of each stage, with limits for errors and for what docs/hardware.md says.
If a stage fails, the page says so, and the other stages still run. If the report is interrupted, run the
same command again to continue with the missing stages. With another GPU, source or version of PyTorch,
give another folder. --stage NAME runs only that stage, even if it has a result.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import train_gpt
from lib.processes import ROOT
from judge.commands import UserError, command_parser, run_command, stop_on_signals
from judge.text import as_json
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


def kept_stages(path, conditions):
    """The stages of an earlier run that succeeded. Raises UserError if it had other conditions."""
    if not path.exists():
        return {}
    old = json.loads(path.read_bytes())
    if old["conditions"] | {"date": conditions["date"]} != conditions:
        raise UserError(
            f"{path} is of another GPU, source or version of PyTorch; choose another folder with --out"
        )
    return {name: result for name, result in old["stages"].items() if result["status"] == "done"}


def write_report(folder, conditions, results):
    results = {name: results[name] for name in STAGES if name in results}
    write_file(folder / "gpu_report.json", as_json({"conditions": conditions, "stages": results}))
    write_file(folder / "gpu_report.md", page(conditions, results).encode())


def make_report(folder, only, minutes=20):
    """Runs the stages, or only those named, and writes the report after each of them."""
    deadline = time.monotonic() + 60 * minutes
    machine = run_in_process("machine", 180)
    if machine["status"] != "done":
        raise InputError(machine["error"].splitlines()[-1].removeprefix("error: "))
    conditions = {
        "GPU": machine["figures"]["GPU"],
        "PyTorch": machine["figures"]["PyTorch"],
        "source": hashlib.sha256(train_gpt.SOURCE.encode()).hexdigest()[:12],
        "date": time.strftime("%Y-%m-%d"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    results = kept_stages(folder / "gpu_report.json", conditions) | {"machine": machine}
    for name in only or [name for name in STAGES if name not in results]:
        seconds = min(20 * minutes, deadline - time.monotonic())
        if seconds < 1:
            print(f"the {minutes:g} minutes are over; run the same command again to continue")
            break
        print(f"{name}: ", end="", flush=True)
        results[name] = run_in_process(name, seconds)
        print(f"{results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
        write_report(folder, conditions, results)
    write_report(folder, conditions, results)
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
    make_report(args.out, args.stage)


if __name__ == "__main__":
    stop_on_signals()
    run_command(main, InputError)
