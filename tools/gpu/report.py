"""
Checks and times an NVIDIA GPU (Ampere or later).

    ./run.sh gpu-report

This writes logs/report/gpu_report.md and gpu_report.json in at most 20 minutes. The stages are:

    machine      the GPU, and the versions of its software
    head         the head, its loss and gradients against float64: in bf16, and in FP8 if supported
    attention    FlexAttention and its gradients against float64
    muon         three steps of Muon against float64
    mini         50 steps of mini against a CPU in float32 (tools/gpu/reference.py)
    speed        the time of a step of fineweb by part, its slowest kernels and its memory
    waits        how often the host waits for the GPU between validations
    memory ...   the peaks in training and validation of shorter sequences, and with the other head.
                 There are three of these stages. Put their names in quotes: --stage "memory 24576"

gpu_report.md first compares the results with records/HARDWARE.md, then lists the numbers of each
stage. If a stage fails, the page says so, and the other stages still run. If the report is
interrupted, run the same command again to continue: finished stages are kept if the GPU, the source
and PyTorch's version are the same. --stage NAME runs only that stage, even if it has a result.
"""
import argparse
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

from tools.common import ROOT
from tools.gpu.bench import InputError, fail, run_benchmark, write_json
from tools.gpu.checks import STAGES
from tools.gpu.page import page
from tools import launch
from tools.common import stop_on_signals, write_file
import train_gpt


def end_of(output, lines=15):
    """The last lines of a program's output, without the names of your folders."""
    text = "\n".join(output.strip().splitlines()[-lines:])
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")


def end_group(process):
    """Ends a process at once, and the processes that it has started, such as those that compile."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_stage(name, seconds):
    """Runs a stage in a process of its own. Returns its result: status, seconds, figures, error."""
    started = time.monotonic()
    result = {"status": "done", "seconds": 0.0, "figures": {}, "error": ""}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "tools.gpu.checks", name, str(file)]
        environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   encoding="utf-8", errors="replace", env=environment,
                                   start_new_session=True)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_group(process)
            output, _ = process.communicate()
            result["status"] = "timed out"
            output += f"\nended after {seconds:.0f} s"
        except BaseException:  # Ctrl-C, SIGTERM or SIGHUP
            end_group(process)
            raise
        if file.exists():
            result["figures"] = json.loads(file.read_text(encoding="utf-8"))
        elif result["status"] == "done":
            result["status"] = "failed"
    if result["status"] != "done":
        result["error"] = end_of(output)
    result["seconds"] = time.monotonic() - started
    return result


def conditions_of(machine_figures):
    """What two runs must have in common so that one can continue the other."""
    return {
        "GPU": machine_figures["GPU"],
        "PyTorch": machine_figures["PyTorch"],
        "source": hashlib.sha256(train_gpt.SOURCE.encode()).hexdigest()[:12],
    }


def read_results(path, conditions):
    """The stages of an earlier run that succeeded under the same conditions."""
    if not path.exists():
        return {}
    old = json.loads(path.read_text(encoding="utf-8"))
    if any(old["conditions"][name] != value for name, value in conditions.items()):
        return {}
    return {name: result for name, result in old["stages"].items() if result["status"] == "done"}


def write_report(folder, conditions, results):
    results = {name: results[name] for name in STAGES if name in results}
    write_json(folder / "gpu_report.json", {"conditions": conditions, "stages": results})
    write_file(folder / "gpu_report.md", page(conditions, results).encode())


def make_report(folder, only, minutes):
    """Runs the stages, or only those named, and writes the report after each of them."""
    deadline = time.monotonic() + 60 * minutes
    print("machine: ", end="", flush=True)
    machine = run_stage("machine", 180)
    print(machine["status"])
    if machine["status"] != "done":
        raise InputError(machine["error"].splitlines()[-1].removeprefix("error: "))
    conditions = conditions_of(machine["figures"])
    folder.mkdir(parents=True, exist_ok=True)
    results = read_results(folder / "gpu_report.json", conditions)
    results["machine"] = machine
    conditions["date"] = time.strftime("%Y-%m-%d")
    write_report(folder, conditions, results)
    for name in only or [name for name in STAGES if name not in results]:
        print(f"{name}: ", end="", flush=True)
        seconds = min(20 * minutes, deadline - time.monotonic())
        if seconds > 1:
            results[name] = run_stage(name, seconds)
        else:
            left_out = f"the {minutes:g} minutes are over; run the command again to continue"
            results[name] = {"status": "was left out", "seconds": 0.0, "figures": {}, "error": left_out}
        print(f"{results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
        write_report(folder, conditions, results)
    print(f"{folder / 'gpu_report.md'}")


def gpu_report(argv):
    parser = argparse.ArgumentParser("./run.sh gpu-report", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--stage", action="append", choices=STAGES, metavar="STAGE",
                        help="run only this stage; can be given several times")
    parser.add_argument("--out", type=Path, default=ROOT / "logs" / "report", metavar="DIR",
                        help="folder of the report (default: logs/report)")
    parser.add_argument("--minutes", type=float, default=20, metavar="N",
                        help="stop after N minutes, a stage after N / 3 minutes (default: 20)")
    args = parser.parse_args(argv)
    launch.get_data(sys.executable, vars(train_gpt.TRACKS["mini"]))
    make_report(args.out, args.stage, args.minutes)


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(run_benchmark(gpu_report, sys.argv[1:]))
