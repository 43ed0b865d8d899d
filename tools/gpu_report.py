"""
Measures a GPU and adds a row to the table in records/fineweb/HOPPER.md.

    python tools/gpu_report.py --change "what changed" --shards DIR
    python tools/gpu_report.py --change "what changed" --shards DIR --stage fp8     only one stage

There are four stages:

    tests      the GPU tests
    fp8        200 steps on DIR's shards with the FP8 head
    bf16       the same with a bf16 head
    figures    what tools/bench.py measures; its docstring explains the columns

The results of each stage are kept in logs/report/ until all four are there. A report that was
interrupted continues where it stopped, and stages can run one by one. Results are used together if the
source, machine, PyTorch version and hyperparameters are the same. The last stage adds the row.
"""
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from bench import (InputError, ROOT, add_step_options, check_packages, check_step_options,
                   describe_run, make_parser, measure_and_print, read_options, run_benchmark, start,
                   write_json)
from log_parsing import write_file
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
MAX_DIFFERENCE = 0.05  # of the validation losses with FP8 and bf16

# -----------------------------------------------------------------------------
# Stages


def run_python(arguments):
    """Runs Python in the repository. Shows its output as it comes, and returns it."""
    print("$ python " + " ".join(arguments), flush=True)
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    lines = []
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                          env=environment) as process:
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("step:") or "val_loss" in line:  # hides steps without validation
                print("  " + line, end="", flush=True)
    return "".join(lines)


def gpu_tests():
    """Returns the last line that the GPU tests print."""
    output = run_python(["-m", "pytest", "-q", "tests/gpu"])
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
    apart = max((abs(fp8[step] - bf16[step]) for step in both), default=0)
    if apart > MAX_DIFFERENCE:
        problems.append(f"FP8 and bf16 are {apart:.4f} apart")
    if problems:
        return "; ".join(problems)
    return f"ok, FP8 and bf16 at most {apart:.4f} apart"

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
        raise InputError(f"{path}: its last table must have the columns of tools/gpu_report.py")
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
            print(f"{stage}: already measured ({files[stage].relative_to(ROOT)})")
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
        print(f"no row yet; still to run: --stage {', --stage '.join(missing)}")
        return parts
    row = row_of_parts(parts)
    append_row(HOPPER, row)
    for file in files.values():
        file.unlink()  # the next report measures everything again
    print(f"added a row to {HOPPER.relative_to(ROOT)}")
    return row

# -----------------------------------------------------------------------------
# Command line


def check_shards(folder):
    train_shards = list(folder.glob("*_train_*.bin"))
    val_shards = list(folder.glob("*_val_*.bin"))
    if not train_shards or not val_shards:
        raise InputError(f"--shards {folder}: it has no *_train_*.bin and *_val_*.bin; make them "
                         "with data/fineweb.py")


def read_report_options(argv):
    parser = make_parser(__doc__)
    parser.add_argument("--change", type=readable, required=True, metavar="TEXT",
                        help="what has changed since the last row; it becomes a column")
    parser.add_argument("--shards", type=Path, required=True, metavar="DIR",
                        help="a folder of GPT-2 shards, made with data/fineweb.py")
    parser.add_argument("--stage", choices=STAGES, help="run only this stage")
    add_step_options(parser)
    args, options, hp = read_options(parser, argv)
    check_step_options(args)
    check_shards(args.shards)
    if options.device != "cuda" or not torch.cuda.is_available():
        raise InputError("a report needs a CUDA GPU, and this machine has none that can be used; "
                         "tools/bench.py times a step on a CPU")
    return args, options, hp


def command_text(argv, shards):
    """The command that makes the whole row: without --stage, and without the name of your folder."""
    words = " ".join(["python tools/gpu_report.py", *argv])
    words = re.sub(r" --stage[ =]\w+", "", words)
    return words.replace(str(shards), "DIR")


def gpu_report(argv):
    args, options, hp = read_report_options(argv)
    check_packages("pytest")
    world, hp = start(options, hp)
    facts = describe_run(world.device, command_text(argv, args.shards))
    facts["change"] = args.change

    def measure_figures():
        return facts | measure_and_print(args, options.track, hp, world)

    conditions = (train_gpt.SOURCE, facts["machine"], torch.__version__, options.track, hp)
    digest = hashlib.sha256(repr(conditions).encode()).hexdigest()[:12]
    stages = [args.stage] if args.stage else STAGES
    figures = report(stages, args.shards.resolve(), PARTS / digest, measure_figures)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    sys.exit(run_benchmark(gpu_report, sys.argv[1:]))
