"""
Checks and times an NVIDIA GPU (Ampere or later).

    ./run.sh gpu-report

This writes logs/report/gpu_report.md. The stages are:

    machine      the GPU, and the versions of its software
    head         the head, its loss and gradients against float64: in bf16, and in FP8 if supported
    attention    FlexAttention and its gradients against float64
    speed        the time of a step of fineweb by part, its slowest kernels and its memory
    waits        how often the host waits for the GPU between validations

gpu_report.md lists the numbers of each stage, with limits for errors. If a stage fails, the page says so, and
the other stages still run. --stage NAME runs only that stage.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from lib.processes import ROOT
from judge.commands import UserError, command_parser, run_command, stop_on_signals
from judge.files import write_file
from judge.text import plural
from gpu.measure import number
from gpu.report_stages import STAGES, machine
from train_gpt import InputError, init_processes


def end_of(output, lines=15):
    """The last lines of a traceback, without the names of your folders."""
    text = "\n".join(output.strip().splitlines()[-lines:])
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")


def section(name, figures, error=""):
    """What the page says of a stage: its figures, checks and kernels, or why it failed."""
    yield f"\n## {name}\n"
    if error:
        yield f"This stage failed:\n\n```\n{error}\n```"
    for name, value in figures.items():
        if name not in ("checks", "kernels"):
            yield f"- {name}: {number(value)}"
    for check in figures.get("checks", []):
        verdict = "ok" if check["ok"] else "**too large**"
        yield f"- {check['name']}: {number(check['value'])}, at most {check['limit']}: {verdict}"
    for name, calls, ms, percent in figures.get("kernels", []):
        yield f"- {percent:.1f}%, {ms:.3f} ms, {plural(calls, 'call')}: {name}"


def run_stage(stage):
    init_processes()
    return stage()


def run_in_process(stage):
    """Returns the figures of a stage. In a process of its own, it begins with free memory, and a crash ends
    only this stage."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(run_stage, stage).result()


def make_report(folder, stages):
    """Runs the stages, functions by their names, and writes the page after each of them."""
    if folder.exists():
        raise UserError(f"{folder} exists; choose another folder with --out, or remove it")
    facts = run_in_process(machine)
    page = [
        f"# {facts['GPU']}, PyTorch {facts['PyTorch']}\n",
        f"Measured on {time.strftime('%Y-%m-%d')} with `./run.sh gpu-report`, which explains the stages. Times "
        "are medians in milliseconds.",
        *section("machine", facts),
    ]
    folder.mkdir(parents=True)
    for name, stage in stages.items():
        print(f"{name}: ", end="", flush=True)
        started = time.monotonic()
        figures, error = {}, ""
        try:
            figures = run_in_process(stage)
        except Exception as e:  # of a kernel, of the compiler, of memory, or the process has crashed
            error = end_of(str(e.__cause__ or e))  # the traceback in the other process
        print(f"{'failed' if error else 'done'}, {time.monotonic() - started:.0f} s", flush=True)
        page += section(name, figures, error)
        write_file(folder / "gpu_report.md", "\n".join([*page, ""]).encode())
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
    make_report(args.out, {name: STAGES[name] for name in args.stage or STAGES})


if __name__ == "__main__":
    stop_on_signals()
    run_command(main, InputError)
