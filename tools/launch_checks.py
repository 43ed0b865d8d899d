"""
Checks the machine before a run. run.sh calls it:

    python tools/launch_checks.py --script train_gpt [options of the run]

It prints what the run needs, a line each: log_dir=FOLDER, processes=N, environment variables
(NAME=VALUE), and further options (--NAME=VALUE). Recipes check GPUs and compiler themselves.
"""
import argparse
import contextlib
import dataclasses
import glob
import hashlib
import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import train_gpt  # before torch: it sets variables that torch reads when it is imported
import torch
from machine import environment
from train_gpt import DTYPE, TRACKS, InputError, require

# -----------------------------------------------------------------------------
# GPUs


def find_gpus():
    """Returns the number of GPUs. Raises InputError if PyTorch can't use those of the machine."""
    build = f"PyTorch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    require(
        hidden or torch.cuda.is_available() or not glob.glob("/dev/nvidia[0-9]*"),
        f"{build} finds no GPU that it can use; check the driver with nvidia-smi, install a build for "
        "it (https://pytorch.org/get-started/locally), or use --device cpu",
    )
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_gpus(processes):
    """Raises InputError unless each GPU in use can train."""
    for i in range(processes):
        major, minor = torch.cuda.get_device_capability(i)
        require(
            torch.version.hip or major >= 8,
            f"the GPU {torch.cuda.get_device_name(i)} has compute capability {major}.{minor}, but "
            "bfloat16 and FlexAttention need 8.0 (Ampere) or later; use another GPU or --device cpu",
        )


def most_processes(script, hp, gpus):
    """The most processes that can share the sequences of a step and of a validation equally."""
    for processes in range(gpus, 1, -1):
        with contextlib.suppress(InputError):
            script.check_hyperparameters(hp, processes)
            return processes
    return 1


def fitted(hp, mib, fp8):
    """Halves train_seq_len until a training step fits into `mib` MiB of GPU memory. Stops at 12,288
    tokens, where validation needs more memory than training. The number of tokens per step doesn't
    change.

    The default model with one sequence per pass needs 3,144 MiB plus 0.538 MiB per token of
    train_seq_len with the FP8 head, and 3,209 plus 0.441 with a bf16 head. That was measured on a
    simulated GPU with PyTorch 2.13's allocator (records/HARDWARE.md). The formula adds a margin."""
    per_token = 0.56 if fp8 else 0.46
    while 3700 + per_token * hp.train_seq_len > mib and hp.train_seq_len > 12288:
        hp = dataclasses.replace(hp, train_seq_len=hp.train_seq_len // 2)
    return hp


def fit_to_memory(hp, processes):
    """Fits train_seq_len to the free memory of all GPUs in use."""
    for i in range(processes):
        free, _ = torch.cuda.mem_get_info(i)
        fp8 = hp.fp8 and not torch.version.hip and torch.cuda.get_device_capability(i) >= (8, 9)
        hp = fitted(hp, free / 2**20, fp8)
    return hp


# -----------------------------------------------------------------------------
# Compiled code on a CPU

# the C++ compiler that PyTorch uses
CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
MAX_LOSS_ERROR = 1e-3     # relative; correct builds of mini stay below 2e-6
MAX_GRADIENT_ERROR = 0.1  # relative error of the norm; correct builds of mini stay below 1.4e-2
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


def losses_and_gradients(model, hp):
    """Runs a step without an optimizer and a validation sequence, of random tokens. Returns the losses
    and the gradients by name. Gradients of scalars are left out: they are mostly rounding error."""
    randomize(model)
    rng = torch.Generator().manual_seed(0)
    count = max(hp.batch_tokens, hp.val_seq_len) + 1
    tokens = torch.randint(hp.vocab_size, (count,), generator=rng, dtype=torch.int32)
    batch = tokens[: hp.batch_tokens + 1]
    buckets = train_gpt.GradientBuckets(model.parameters())
    last = hp.num_iterations  # the longest window
    results = {"training loss": train_gpt.train_step(model, [], buckets, batch, last, hp)}
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            results[f"gradient of {name}"] = p.grad
    inputs, targets = train_gpt.to_batch(tokens[: hp.val_seq_len + 1], hp.val_seq_len)
    model.eval()
    with torch.no_grad():
        results["validation loss"] = model(inputs, targets, train_gpt.get_window_blocks(last, hp))
    return results


def relative_error(value, right):
    value, right = value.double(), right.double()
    return (value - right).norm() / right.norm().clamp_min(1e-30)  # 0 if both are zero


def difference(results, expected):
    """Returns what differs, or ""."""
    for name, right in expected.items():
        error = relative_error(results[name], right)
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


def compile_problem(hp):
    """Compares compiled code with uncompiled code. Returns why it can't be used, or ""."""
    expected = losses_and_gradients(train_gpt.build_model(hp), hp)
    model = train_gpt.build_model(hp)
    try:
        model.compile(dynamic=False)
        results = losses_and_gradients(model, hp)
    except (OSError, RuntimeError) as e:  # PyTorch's compilation errors are RuntimeErrors
        return f"{first_error(str(e))}; {COMPILE_ADVICE}"
    wrong = difference(results, expected)
    if wrong:
        return f"code compiled by {CXX} is wrong ({wrong}); install GCC 14 or later, or set CXX"
    return ""


def compiler_stamp():
    """Returns the file that says that compiled code is right: one for each compiler and its flags,
    PyTorch, CPU and dtype."""
    facts = f"{train_gpt.describe_machine()} {CXX} {torch.__version__} {DTYPE}"
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or ROOT / "data" / ".cache"
    return Path(folder) / f"compiled-code-is-right-{digest}"


def check_compiler(script, args, hp):
    """Returns the environment variables of a run: none if compiled code is right."""
    stamp = compiler_stamp()
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or stamp.exists():
        return {}
    script.check_inputs(args, hp)  # a user error comes first, because this takes a minute
    print("comparing compiled code with uncompiled code: a minute or two, once", file=sys.stderr)
    train_gpt.init_processes()  # as the run does, which then finds the compiled code in PyTorch's cache
    problem = compile_problem(TRACKS["mini"])
    if problem:
        print(f"warning: training without torch.compile, at about half the speed: {problem}", file=sys.stderr)
        return {"TORCH_COMPILE_DISABLE": "1", "SPEEDRUN_COMPILE_REASON": f"({problem})"}
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError:
        pass  # the next run compares again
    return {}


# -----------------------------------------------------------------------------
# The command line


def check_machine(script, options):
    """Returns lines that say what the run needs. Raises InputError."""
    args, hp = script.parse_arguments(options)
    checkpoint = train_gpt.load_checkpoint(args, script.SOURCE)
    if checkpoint:
        hp = dataclasses.replace(hp, **checkpoint["settings"])
    script.check_hyperparameters(hp, 1)
    gpus = find_gpus()
    processes = most_processes(script, hp, gpus)
    log_dir = Path(args.resume).parent if checkpoint else args.log_dir
    lines = [f"log_dir={log_dir}", f"processes={processes}"]
    if gpus:
        check_gpus(processes)
        adapts = script is train_gpt and hp.track == "fineweb"
        if adapts and not checkpoint and "train_seq_len" not in args.given:
            lines.append(f"--train_seq_len={fit_to_memory(hp, processes).train_seq_len}")
    if not gpus:
        variables = environment()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        variables |= check_compiler(script, args, hp)
        lines += [f"{name}={value}" for name, value in variables.items()]
    return lines


def main(argv):
    parser = argparse.ArgumentParser(description="Check the machine before a run.", allow_abbrev=False)
    parser.add_argument("--script", required=True, metavar="MODULE", help="train_gpt or a recipe")
    args, options = parser.parse_known_args(argv)
    script = importlib.import_module(args.script)
    try:
        with contextlib.redirect_stdout(None):  # what train_gpt.py says about --resume
            lines = check_machine(script, options)
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
