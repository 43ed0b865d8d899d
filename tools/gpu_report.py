"""
Checks and times an NVIDIA GPU (Ampere or later). Needs PyTorch 2.11 or later and the data of mini
(python data/shakespeare.py), but no network.

    python tools/gpu_report.py

This writes logs/report/gpu_report.md and gpu_report.json in at most 20 minutes. The stages are:

    machine      the GPU, and the versions of its software
    head         the head, its loss and gradients against float64: in bf16, and in FP8 if supported
    attention    FlexAttention and its gradients against float64
    muon         three steps of Muon against float64
    mini         50 steps of mini against a CPU in float32 (tools/gpu_reference.py)
    speed        the time of a step of fineweb by part, its memory and its slowest kernels
    waits        how often the host waits for the GPU between validations
    memory ...   the peaks in training and validation, by sequence length and kind of head. There are
                 four of these stages. Put their names in quotes: --stage "memory 49152"

gpu_report.md first compares the results with records/HARDWARE.md, then lists the numbers of each
stage. If a stage fails, the page says so, and the other stages still run. If the report is
interrupted, run the same command again to continue: finished stages are kept if the GPU, the source
and PyTorch's version are the same. --stage NAME runs only that stage, even if it has a result.

    python tools/gpu_report.py --change "what changed" --shards DIR
    python tools/gpu_report.py --change "what changed" --shards DIR --stage fp8     only one stage

With --change and --shards, it adds a row to the table in records/fineweb/HOPPER.md instead. That
takes four other stages:

    tests      the GPU tests
    fp8        200 steps on DIR's shards with the FP8 head
    bf16       the same with a bf16 head
    figures    what tools/bench.py measures; bench.py --help explains the columns

The results of the stages are kept in logs/report/. When all four are there, the row is added. So you
can run the stages one by one, and continue an interrupted command with the same command. All four
must have the same source, machine, PyTorch version, hyperparameters and shards. If a stage fails, the
command ends with an error, and the same command runs the stage again.
"""
import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import (InputError, ROOT, add_step_options, add_timing_options, check_packages,
                   check_step_options, describe_run, fail, measure_and_print, read_options,
                   run_benchmark, start, write_json)
from gpu_page import page
from log_parsing import stop_on_signals, write_file
from machine import readable
import train_gpt
import torch

HOPPER = ROOT / "records" / "fineweb" / "HOPPER.md"
PARTS = ROOT / "logs" / "report"
STAGES = ("tests", "fp8", "bf16", "figures")

COLUMNS = ["date", "machine", "PyTorch", "change", "forward ms", "backward ms",
           "forward+backward ms", "optimizer ms", "step ms", "tokens/s", "MFU %", "allocated MiB",
           "first step s", "GPU tests", "val_loss FP8", "val_loss bf16", "run", "command"]

# The 200 steps are short, so that they need only 50 MB of tokens, each read once.
SHORT_RUN = {
    "track": "fineweb",
    "num_iterations": 200,
    "batch_tokens": 98_304,
    "val_tokens": 524_288,
    "val_loss_every": 25,
}
FIRST_LOSS = 10.8258  # ln(50304), because the head starts at zero
# How much higher a validation loss with the FP8 head may be than with a bf16 head. It may be lower: on
# an H100, it was lower by up to 0.07.
MAX_FP8_EXCESS = 0.05

MINUTES = 20
# The stages of the report, in tools/gpu_checks.py, with their limits in seconds in a report of 20 minutes
CHECKS = {
    "machine": 60,
    "head": 120,
    "attention": 180,
    "muon": 90,
    "mini": 240,
    "speed": 360,
    "waits": 180,
    "memory 49152": 180,
    "memory 24576": 180,
    "memory 12288": 180,
    "memory 49152 bf16": 180,
}

# -----------------------------------------------------------------------------
# The report


def end_of(output, lines=15):
    """The last lines of a program's output, without the names of your folders."""
    text = "\n".join(output.strip().splitlines()[-lines:])
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")


def end_group(process):
    """Ends a process at once, and the processes that it has started, such as those that compile."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_check(name, seconds):
    """Runs a stage in a process of its own. Returns its result: status, seconds, figures, error."""
    started = time.monotonic()
    result = {"status": "done", "seconds": 0.0, "figures": {}, "error": ""}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(ROOT / "tools" / "gpu_checks.py"), name, str(file)]
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
    results = {name: results[name] for name in CHECKS if name in results}
    write_json(folder / "gpu_report.json", {"conditions": conditions, "stages": results})
    write_file(folder / "gpu_report.md", page(conditions, results).encode())


def gpu_page_and_json(folder, only, minutes):
    """Runs the stages, or only those named, and writes the report after each of them."""
    deadline = time.monotonic() + 60 * minutes
    print("machine: ", end="", flush=True)
    machine = run_check("machine", CHECKS["machine"])
    print(machine["status"])
    if machine["status"] != "done":
        raise InputError(machine["error"].splitlines()[-1].removeprefix("error: "))
    conditions = conditions_of(machine["figures"])
    folder.mkdir(parents=True, exist_ok=True)
    results = read_results(folder / "gpu_report.json", conditions)
    results["machine"] = machine
    conditions["date"] = time.strftime("%Y-%m-%d")
    for name in only or CHECKS:
        if name == "machine" or (name in results and not only):
            continue
        print(f"{name}: ", end="", flush=True)
        seconds = min(CHECKS[name] * minutes / MINUTES, deadline - time.monotonic())
        if seconds > 1:
            results[name] = run_check(name, seconds)
        else:
            left_out = f"the {minutes:g} minutes are over; run the command again to continue"
            results[name] = {"status": "was left out", "seconds": 0.0, "figures": {}, "error": left_out}
        print(f"{results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
        write_report(folder, conditions, results)
    write_report(folder, conditions, results)
    print(f"{folder / 'gpu_report.md'}")

# -----------------------------------------------------------------------------
# Stages of a row


def run_python(arguments, good_statuses=(0,)):
    """Runs Python in the repository. Shows its output as it comes, and returns it.

    Raises InputError if it ends with another exit status than the good ones.
    """
    print("$ python " + " ".join(arguments), flush=True)
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    lines = []
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                          env=environment, start_new_session=True) as process:
        try:
            for line in process.stdout:
                lines.append(line)
                if not line.startswith("step:") or "val_loss" in line:  # hides steps without validation
                    print("  " + line, end="", flush=True)
            process.wait()
        except BaseException:  # Ctrl-C, SIGTERM or SIGHUP
            end_group(process)
            raise
    if process.returncode not in good_statuses:
        raise InputError(f"the stage failed with exit status {process.returncode}; solve the problem that "
                         "its output above shows, then run the same command again")
    return "".join(lines)


def gpu_tests():
    """Returns the last line that the GPU tests print. It also counts those that failed (status 1)."""
    output = run_python(["-m", "pytest", "-q", "tests/gpu"], good_statuses=(0, 1))
    last_line = output.strip().splitlines()[-1]
    return last_line.strip("= ")


def short_run(shards, fp8):
    """Returns {step: validation loss} of the 200 steps."""
    options = dict(SHORT_RUN)
    options["train_files"] = shards / "*_train_*.bin"
    options["val_files"] = shards / "*_val_*.bin"
    options["fp8"] = fp8
    words = [f"--{name}={value}" for name, value in options.items()]
    output = run_python(["train_gpt.py", *words])
    found = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) ", output, re.M)
    return {int(step): float(loss) for step, loss in found}


def problems_of_run(name, losses, steps):
    """What is wrong with a run's {step: validation loss}: a list of sentences."""
    if sorted(losses) != list(steps):
        return [f"{name}: ended early"]
    problems = []
    if abs(losses[0] - FIRST_LOSS) > 1e-4:
        problems.append(f"{name}: starts at {losses[0]}")
    for before, step in zip(steps, steps[1:]):
        if not losses[step] < losses[before]:  # also true for nan
            problems.append(f"{name}: no fall to step {step}")
            break
    return problems


def judge(fp8, bf16):
    """Says what is wrong with two runs' {step: validation loss}, or "ok"."""
    steps = range(0, SHORT_RUN["num_iterations"] + 1, SHORT_RUN["val_loss_every"])
    problems = problems_of_run("FP8", fp8, steps) + problems_of_run("bf16", bf16, steps)
    both = [step for step in steps if step in fp8 and step in bf16]
    differences = [fp8[step] - bf16[step] for step in both]
    worst = max(differences, default=0)
    if worst > MAX_FP8_EXCESS:
        problems.append(f"FP8 is {worst:.4f} above bf16")
    if problems:
        return "; ".join(problems)
    return f"ok, FP8 minus bf16: {min(differences):.4f} to {worst:.4f}"

# -----------------------------------------------------------------------------
# The table


def cell_text(value):
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def table_row(cells):
    """{column: value} -> a line of the table. A dash stands for what was not measured."""
    texts = [cell_text(cells.get(column)) for column in COLUMNS]
    return "| " + " | ".join(texts) + " |"


def append_row(path, cells):
    """Appends a row to the table that ends the file. Raises InputError if it has other columns."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    header = table_row({column: column for column in COLUMNS})
    if header not in text:
        raise InputError(f"{path}: the table of results is missing or has other columns; end the file "
                         f"with a table that begins with this line, then run the command again: {header}")
    text = text.rstrip("\n") + "\n" + table_row(cells) + "\n"
    write_file(path, text.encode())


def losses_text(losses):
    return ", ".join(f"{step}: {loss}" for step, loss in losses)


def row_of_parts(parts):
    """{stage: its result} -> {column: value}"""
    fp8, bf16 = parts["fp8"], parts["bf16"]
    row = dict(parts["figures"])
    row["GPU tests"] = parts["tests"]
    row["val_loss FP8"] = losses_text(fp8)
    row["val_loss bf16"] = losses_text(bf16)
    row["run"] = judge(dict(fp8), dict(bf16))
    return row


def run_stage(stage, shards, measure_figures):
    """Returns the stage's result, which can be written as JSON."""
    if stage == "tests":
        return gpu_tests()
    if stage == "figures":
        return measure_figures()
    losses = short_run(shards, fp8=stage == "fp8")
    return sorted(losses.items())


def report(stages, shards, folder, measure_figures):
    """Runs the stages that have no result yet.

    Returns {stage: result}, or the row, {column: value}, once all stages have a result. The row is
    then in HOPPER.md.
    """
    files = {stage: folder / f"{stage}.json" for stage in STAGES}
    for stage in stages:
        if files[stage].exists():
            print(f"{stage}: measured before ({files[stage].relative_to(ROOT)})")
            continue
        result = run_stage(stage, shards, measure_figures)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(files[stage], result)
    parts = {}
    for stage, file in files.items():
        if file.exists():
            parts[stage] = json.loads(file.read_text(encoding="utf-8"))
    missing = [stage for stage in STAGES if stage not in parts]
    if missing:
        print(f"the row needs more stages; still to run: --stage {', --stage '.join(missing)}")
        return parts
    row = row_of_parts(parts)
    append_row(HOPPER, row)
    for file in files.values():
        file.unlink()  # the next report measures everything again
    print(f"added a row to {HOPPER.relative_to(ROOT)}")
    return row

# -----------------------------------------------------------------------------
# Command line

REPORT_OPTIONS = ("out", "minutes")
ROW_OPTIONS = ("change", "shards", "repeats", "warmup", "json", "kernels", "peak_tflops")


def make_report_parser():
    """A parser with the options of the report and of a row."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--stage", action="append", metavar="STAGE",
                        help="run only this stage; can be given several times. Stages of the report: "
                             f"{', '.join(CHECKS)}. Stages of a row in HOPPER.md: {', '.join(STAGES)}")
    report = parser.add_argument_group("options of the report")
    report.add_argument("--out", type=Path, default=PARTS, metavar="DIR",
                        help="folder of the report (default: logs/report)")
    report.add_argument("--minutes", type=float, default=MINUTES, metavar="N",
                        help="stop after N minutes, divided among the stages (default: 20)")
    row = parser.add_argument_group("options of a row in HOPPER.md, which needs --change and --shards",
                                    "All other options go to train_gpt.py.")
    row.add_argument("--change", type=readable, metavar="TEXT",
                     help="what has changed since the last row; it becomes a column")
    row.add_argument("--shards", type=Path, metavar="DIR",
                     help="a folder of GPT-2 shards, made with data/fineweb.py")
    add_timing_options(row)
    add_step_options(row)
    return parser


def refuse(parser, args, names, advice):
    """Raises InputError if one of these options was given."""
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            fail(f"--{name} {advice}")


def check_stages(args, stages):
    for stage in args.stage or []:
        if stage not in stages:
            fail(f"--stage {stage}: choose from {', '.join(stages)}")


def check_shards(folder):
    train_shards = list(folder.glob("*_train_*.bin"))
    val_shards = list(folder.glob("*_val_*.bin"))
    if not train_shards or not val_shards:
        raise InputError(f"--shards {folder}: it has no *_train_*.bin and *_val_*.bin; make them "
                         "with data/fineweb.py")


def describe_shards(folder):
    """The name, the size and the time of the last change of each shard. Raises InputError."""
    found = []
    for file in sorted(folder.resolve().glob("*.bin")):
        try:
            status = file.stat()
        except OSError as e:  # a link to a missing file
            raise InputError(f"{file}: {e.strerror.lower()}; remove it, or make it with "
                             "data/fineweb.py") from None
        found.append((str(file), status.st_size, status.st_mtime_ns))
    return found


def check_report_options(parser, args, rest):
    """Raises InputError for options that the report doesn't have."""
    refuse(parser, args, ROW_OPTIONS, "is only for adding a row; give --change and --shards, too")
    check_stages(args, CHECKS)
    if rest:
        fail(f"unrecognized arguments: {' '.join(rest)}")


def check_row_options(parser, args):
    """Raises InputError for options that a row lacks or doesn't have."""
    for name in ("change", "shards"):
        if getattr(args, name) is None:
            fail(f"adding a row takes both --change and --shards; give --{name}")
    refuse(parser, args, REPORT_OPTIONS, "is only for the report; leave it out when adding a row")
    check_stages(args, STAGES)
    check_step_options(args)
    check_shards(args.shards)


def read_row_options(parser, argv):
    args, options, hp = read_options(parser, argv)
    if options.device != "cuda" or not torch.cuda.is_available():
        raise InputError("adding a row needs a CUDA GPU, and PyTorch finds none here; tools/bench.py "
                         "times a step on a CPU")
    return args, options, hp


def command_text(argv, shards):
    """The command that makes the whole row: without --stage, and without the name of your folder."""
    words = " ".join(["python tools/gpu_report.py", *argv])
    words = re.sub(r" --stage[ =]\w+", "", words)
    return words.replace(str(shards), "DIR")


def gpu_report(argv):
    parser = make_report_parser()
    args, rest = parser.parse_known_args(argv)
    if args.change is None and args.shards is None:
        check_report_options(parser, args, rest)
        gpu_page_and_json(args.out, args.stage, args.minutes)
        return
    check_row_options(parser, args)
    args, options, hp = read_row_options(parser, argv)
    check_packages("pytest")
    world, hp = start(options, hp)
    facts = describe_run(world.device, command_text(argv, args.shards))
    facts["change"] = args.change

    def measure_figures():
        return facts | measure_and_print(args, options.track, hp, world)

    shards = describe_shards(args.shards)
    conditions = (train_gpt.SOURCE, facts["machine"], torch.__version__, options.track, hp, shards)
    digest = hashlib.sha256(repr(conditions).encode()).hexdigest()[:12]
    figures = report(args.stage or STAGES, args.shards.resolve(), PARTS / digest, measure_figures)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(run_benchmark(gpu_report, sys.argv[1:]))
