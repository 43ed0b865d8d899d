"""
Checks the machine before a run, in the Python that will train. launch/launch.py calls it:

    python -m launch.checks FILE train|prepare|record SCRIPT [OPTIONS...]
    python -m launch.checks FILE compare|screen [OPTIONS...]
    python -m launch.checks PROCESSES compile PART

Writes what the run needs into FILE, as JSON: processes, environment variables and more options. compile prints what is wrong
with the compiled code of one part, training or validation.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

try:
    import train_gpt  # before torch: it sets variables that torch reads when it is imported
except ImportError as e:  # of a package that an idea needs
    sys.exit(f"error: train_gpt.py: {type(e).__name__}: {e}")
import torch
from data.datasets import dataset_of, get_data
from judge.commands import did_you_mean, join_values
from gpu.memory import check_gpus, find_gpus, fit_to_memory
from judge.processes import output_of
from launch import terminal
from lib.processes import ROOT, cache_folder, checkpoints, environment, say, start, wait
from train_gpt import DTYPE, TRACKS, InputError

MOST_CPU_PROCESSES = 2  # one per core was measured with two cores

# -----------------------------------------------------------------------------
# Compiled code on a CPU

# the C++ compiler that PyTorch uses
CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
MAX_LOSS_ERROR = 1e-3  # relative; correct builds of mini on bytes stayed below 2e-6
MAX_GRADIENT_ERROR = 0.1  # relative error of the norm; those stayed below 1.4e-2
COMPILE_ADVICE = (
    f"compiling needs a C++ compiler ({CXX}), Python's headers and openssl (Debian, Ubuntu: apt "
    "install g++ python3-dev openssl), free disk space, and a TORCHINDUCTOR_CACHE_DIR that is "
    "writable and not mounted noexec"
)


@torch.no_grad()
def randomize(model):
    """Replaces all weights with random values. With projections initialized to zero, most gradients
    would be zero, and comparing them would show nothing."""
    rng = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            values = 0.5 + 0.5 * torch.rand(p.shape, generator=rng)
        else:
            std = 1.0 if "embed" in name else 0.5 * p.size(-1) ** -0.5
            values = std * torch.randn(p.shape, generator=rng)
        p.copy_(values)


def loss_and_gradients(model, hp, part):
    """Computes the loss of random tokens, and for training the gradients by name. Gradients of scalars are
    left out: they are mostly rounding error."""
    training = part == "training"
    seq_len = hp.train_seq_len if training else hp.val_seq_len
    count = hp.batch_tokens if training else seq_len
    randomize(model)
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(hp.vocab_size, (count + 1,), generator=rng, dtype=torch.int32)
    inputs, targets = train_gpt.to_batch(tokens, seq_len)
    window = train_gpt.get_window_blocks(hp.num_iterations, hp)  # the longest
    model.train(training)
    with torch.set_grad_enabled(training):
        results = {f"{part} loss": model(inputs, targets, window)}
    if training:
        results[f"{part} loss"].backward()
        results |= {
            f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.ndim >= 2
        }
    return results


def wrong_value(results, expected):
    """Returns what differs, or ""."""
    for name, right in expected.items():
        right = right.detach().double()
        error = (results[name] - right).norm() / right.norm().clamp_min(1e-30)  # 0 if both are zero
        limit = MAX_LOSS_ERROR if name.endswith("loss") else MAX_GRADIENT_ERROR
        if not error <= limit:  # or it is NaN
            return f"the {name} is off by {100 * error:.2g}%"
    return ""


def first_error(text):
    """Returns the first line with an error of the compiler, or else the first line of the text."""
    output = text.partition("Output:\n")[2] or text  # PyTorch quotes the compiler after this
    for line in output.splitlines():
        if "error" in line:
            return line.strip()[:200]
    return text.partition("\n")[0].strip()[:200]


def compile_problem(hp, part):
    """Compares compiled code for training or for validation with uncompiled code. Returns why it can't be
    used, or ""."""
    # as train_gpt.init_processes
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    expected = loss_and_gradients(train_gpt.build_model(hp), hp, part)
    model = train_gpt.build_model(hp)
    try:
        model.compile(dynamic=False)
        results = loss_and_gradients(model, hp, part)
    except (OSError, RuntimeError) as e:  # PyTorch's compilation errors are RuntimeErrors
        return f"{first_error(str(e))}; {COMPILE_ADVICE}"
    wrong = wrong_value(results, expected)
    if wrong:
        return f"code compiled by {CXX} is wrong ({wrong}); install GCC 14 or later, or set CXX"
    return ""


def find_problem(processes):
    """Returns compile_problem of mini, as each of `processes` trains it. Two processes compile, one for
    training and one for validation: together they keep two cores busy. The run finds the code in
    PyTorch's cache."""
    command = [sys.executable, "-m", "launch.checks", str(processes), "compile"]
    how = dict(env=os.environ | environment(processes), stdout=subprocess.PIPE, encoding="utf-8")
    parts = ["training", "validation"]
    children = [start([*command, part], cwd=ROOT, **how) for part in parts]
    say("compiling, and comparing with uncompiled code (once)")
    shown = terminal.seconds_shown("run.sh", sys.stderr)
    with shown if sys.stderr.isatty() else contextlib.nullcontext():
        failed, status = wait(children)
    problem = children[failed].stdout.read()
    if status and not problem:
        sys.exit(status)
    return problem


def stamp():
    """Returns the file whose existence says that compiled code is right on this CPU, with this compiler
    and this PyTorch."""
    compiler = output_of(*CXX.split(), "--version")
    march = os.environ.get("TORCHINDUCTOR_CPP_MARCH")
    cpu = [train_gpt.CPU_MODEL, sorted(train_gpt.CPU_FLAGS)]
    facts = json.dumps([cpu, CXX, compiler, march, torch.__version__, str(DTYPE)])
    return Path(
        cache_folder(), f"compiled-code-is-right-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    )


def check_compiler(processes):
    """Returns the environment variables of a run on a CPU: none if compiled code is right."""
    right = stamp()
    if not train_gpt.COMPILED or right.exists():
        return {}
    problem = find_problem(processes)
    if problem:
        say(f"warning: training without torch.compile, at about half the speed: {problem}")
        return {"TORCH_COMPILE_DISABLE": "1", "SPEEDRUN_COMPILE_REASON": f"({problem})"}
    with contextlib.suppress(OSError):  # the next run compares again
        right.parent.mkdir(parents=True, exist_ok=True)
        right.touch()
    return {}


# -----------------------------------------------------------------------------
# What a run needs


def most_processes(script, hp, gpus):
    """The most processes that can share the sequences of a step and of a validation equally."""
    for processes in range(gpus, 1, -1):
        with contextlib.suppress(InputError):
            script.check_hyperparameters(hp, processes)
            return processes
    return 1


def latest_checkpoint(folder):
    """Returns that of the newest unfinished run, or None."""
    unfinished = [path for _, path in checkpoints(folder) if not train_gpt.is_finished(path)]
    return unfinished[-1] if unfinished else None


def saved_settings(args):
    """Reads the settings of the checkpoint that --resume names, and not its weights. Returns {} if there is
    none that can be read: the run will say so."""
    try:
        return torch.load(args.resume, map_location="cpu", weights_only=True, mmap=True)["settings"]
    except Exception:  # corrupt files raise many exception types
        return {}


def check_run(mode, script, options):
    """Returns what a run needs, as a dict. Raises InputError."""
    args, hp = script.parse_arguments(options)
    more = []
    if args.resume == "latest":
        args.resume = latest_checkpoint(args.log_dir) or ""  # empty: a new run begins
        more = [f"--resume={args.resume}"]
        if not args.resume:
            say(f"there is no unfinished run in {args.log_dir}, so a new one begins")
    saved = saved_settings(args)
    hp = dataclasses.replace(hp, **saved)
    script.check_hyperparameters(hp, 1)
    gpus = find_gpus()
    cores = int(environment()["OMP_NUM_THREADS"])
    processes = most_processes(script, hp, gpus or min(cores, MOST_CPU_PROCESSES))
    if gpus:
        check_gpus(processes)
        adapts = script is train_gpt and hp.track == "fineweb"
        if adapts and not saved and "train_seq_len" not in args.given:
            hp = fit_to_memory(hp, processes)
            more.append(f"--train_seq_len={hp.train_seq_len}")
    if mode == "record":  # the curve of a record needs eight validations
        more.append(f"--val_loss_every={min(hp.val_loss_every, hp.num_iterations // 8)}")
    get_data(sys.executable, vars(hp))
    script.check_inputs(args, hp)  # before anything slow
    variables = {} if gpus else environment(processes) | check_compiler(processes)
    right = "TORCH_COMPILE_DISABLE" not in variables
    compiled = "compiled" if train_gpt.COMPILED and right else "not compiled"
    where = "GPUs" if gpus else "the CPU"
    shown = [option for option in more if option != "--resume="]
    return dict(
        processes=processes,
        environment=variables,
        right=bool(variables) and right,  # on a CPU: the answer may be remembered
        files=[hp.train_files, hp.val_files],
        options=more,
        log_dir=str(Path(args.resume).parent if saved else args.log_dir),
        text=", ".join([f"{hp.track} on {where}", f"processes: {processes}", compiled, *shown]),
    )


def check_comparison(words):
    """Gets the data that all sides of a comparison read. Of a side that reads other data, compare asks the
    script what is missing. Returns what the runs need. Raises InputError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    for name in ("track", "train_files", "val_files", "num_iterations"):
        parser.add_argument(f"--{name}")
    given = vars(parser.parse_known_args(join_values(words, ("--base", "--idea")))[0])
    recipe = given.pop("recipe")
    module = importlib.import_module(f"recipes.{recipe}" if recipe else "train_gpt")
    _, hp = module.parse_arguments([f"--{name}={value}" for name, value in given.items() if value])
    get_data(sys.executable, vars(hp))
    dataset = dataset_of(vars(hp))
    confirm = []
    if "--confirm" in words and dataset and dataset.unseen:
        # the file has 64,933 tokens: seven sequences of 8,192
        confirm = ["--confirm_options", f"--val_files {dataset.unseen} --val_tokens 57344"]
    if find_gpus():
        check_gpus(1)  # each run uses one
        return dict(environment={}, options=confirm)
    variables = environment() | check_compiler(1)
    del variables["OMP_NUM_THREADS"]  # runs share the cores
    return dict(environment=variables, options=confirm)


def meant_option(message):
    """Returns what the user may have meant by an option that doesn't exist, or ""."""
    unknown = re.search("unrecognized arguments: (--[^ =;]+)", message)
    names = [f"--{setting.name}" for setting in dataclasses.fields(train_gpt.Hyperparameters)]
    return did_you_mean(unknown[1], names) if unknown else ""


def main(argv):
    file, mode, *words = argv
    try:
        if mode == "compile":
            mini = TRACKS["mini"]
            hp = dataclasses.replace(mini, batch_tokens=mini.batch_tokens // int(file))
            problem = compile_problem(hp, *words)
            print(problem, end="")
            return 1 if problem else 0
        if mode in ("compare", "screen"):
            found = check_comparison(words)
        else:
            found = check_run(mode, importlib.import_module(words[0]), words[1:])
        Path(file).write_text(json.dumps(found), encoding="utf-8")
        return 0
    except (InputError, ImportError, OSError) as e:
        print(f"error: {e}{meant_option(str(e))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes that compile, too
    sys.exit(main(sys.argv[1:]))
