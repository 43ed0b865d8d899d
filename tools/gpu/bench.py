"""
Times a training step on this machine: each part of it, and how close it comes to the machine's speed.

    ./run.sh bench                                the default track, on a GPU if there is one
    ./run.sh bench --track fineweb                on a CPU: steps of 1,024 tokens, not 393,216
    ./run.sh bench --fp8 false --num_layers 4     with any option of train_gpt.py
    ./run.sh bench --kernels 25                   also list the 25 slowest kernels

It runs on a CPU or on one GPU.

Times are medians of --repeats measurements in milliseconds. Each waits until the device is done. A
micro-step runs --sequences_per_pass sequences of train_seq_len tokens through forward and backward. A
step runs as many micro-steps as make batch_tokens, then the optimizers. The tokens are random, in
documents of about 1,000 tokens. The attention window is the one at the end of training, the longest.
The model trains during the measurements, because GPUs multiply zeros faster than other numbers, and
many weights start at zero. The first step includes compilation, unless its results are cached. Memory
is the peak. On CUDA, "allocated" is tensors and "reserved" is what PyTorch's allocator holds; on a CPU,
both are the memory of the process.

The "matmul peak" is the speed of the best of several large square matrix products in the data type of
the activations. It is measured before and after the steps, and the tables show percentages of the
higher of the two. The GFLOP of a row are those of the model, as tools/gpu/flops.py counts them. For the
optimizers, they are those of Newton-Schulz; for the whole step, the sum of both. The gap to 100% is
element-wise work, masked pairs, memory traffic and small products. The second table has the matrix
products of activations with weights in the forward pass of one micro-step.

MFU (model FLOPs utilization) is the model's FLOP/s divided by the dense bf16 peak in the GPU's
datasheet, even if the head runs in FP8.
"""
import argparse
import dataclasses
import json
import math
import os
import resource
import signal
import statistics
import sys
import time
from pathlib import Path

from tools.common import environment, show_any_text

if __name__ == "__main__" and not environment().items() <= os.environ.items():
    os.execve(sys.executable, sys.orig_argv, os.environ | environment())  # as ./run.sh trains on a CPU

import train_gpt  # before torch, because it sets variables that torch reads when it is loaded
import torch

from tools import launch_checks
from tools.gpu.flops import model_flops, newton_schulz_flops
from tools.common import FileError, write_file
from train_gpt import DEVICE, DTYPE, InputError

# Dense bf16 FLOP/s by the name that the driver reports, from NVIDIA's datasheets of the H100 and H200
# (the 1,979 TFLOP/s of the SXM boards are with sparsity). For other boards, use --peak_tflops.
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}

# -----------------------------------------------------------------------------
# Timing


def ms_of(run):
    """Milliseconds until run() has returned and the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)


def median_ms(run, repeats):
    return statistics.median(ms_of(run) for _ in range(repeats))


def random_product(rows, inputs, outputs):
    """Returns a function that multiplies x (rows, inputs) by w (outputs, inputs), like a linear layer."""
    x = torch.randn(rows, inputs, device=DEVICE).to(DTYPE)
    w = torch.randn(outputs, inputs, device=DEVICE).to(DTYPE)
    return lambda: torch.nn.functional.linear(x, w)


def matmul_peak():
    """GFLOP/s of the best of eight large square products, after one that isn't counted."""
    n = 8192 if DEVICE.type == "cuda" else 2048
    run = random_product(n, n, n)
    run()
    best_ms = min(ms_of(run) for _ in range(8))
    return 2 * n**3 / 1e6 / best_ms


@dataclasses.dataclass
class Training:
    """A model with its optimizers and one batch of tokens."""
    hp: object  # hyperparameters of train_gpt.py
    model: torch.nn.Module  # compiled
    optimizers: list
    buckets: train_gpt.GradientBuckets
    tokens: torch.Tensor  # (batch_tokens + 1,), int32

    def train(self, tokens, step):
        train_gpt.train_step(self.model, self.optimizers, self.buckets, tokens, step, self.hp)

    def step(self):
        """The last step of a run: its window is the longest."""
        self.train(self.tokens, self.hp.num_iterations - 1)


def random_batch(hp):
    """Random tokens (batch_tokens + 1,), int32, in documents of about 1,000 tokens."""
    rng = torch.Generator().manual_seed(0)
    count = hp.batch_tokens + 1
    tokens = torch.randint(hp.vocab_size, (count,), dtype=torch.int32, generator=rng)
    ends_document = torch.rand(count, generator=rng) < 1e-3
    tokens[ends_document] = hp.eot_token
    return tokens


def set_up_training(hp):
    model = train_gpt.build_model(hp)
    model.compile(dynamic=False)
    optimizers = train_gpt.build_optimizers(model, hp)
    buckets = train_gpt.GradientBuckets(model.parameters())
    return Training(hp, model, optimizers, buckets, random_batch(hp))


def longest_window(hp):
    """In blocks, on the device: () int32."""
    return train_gpt.get_window_blocks(hp.num_iterations, hp)


def micro_step_tokens(hp):
    return hp.train_seq_len * math.gcd(hp.sequences_per_pass, hp.batch_tokens // hp.train_seq_len)


def ms_of_parts(training):
    """Milliseconds of a micro-step's forward and backward, and of the optimizers."""
    hp = training.hp
    tokens = training.tokens[:micro_step_tokens(hp) + 1]
    inputs, targets = train_gpt.to_batch(tokens, hp.train_seq_len)
    window = longest_window(hp)
    weight = torch.full((), hp.train_seq_len / hp.batch_tokens, device=DEVICE)
    losses = []
    training.buckets.last_micro_step = True

    def forward():
        losses.append(training.model(inputs, targets, window))

    def backward():
        losses.pop().backward(weight)

    def update():
        training.buckets.wait()
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return ms_of(forward), ms_of(backward), ms_of(update)


def step_flops(training):
    """FLOPs of the model in one step."""
    hp = training.hp
    window = int(longest_window(hp))
    total = 0
    for tokens in training.tokens[:-1].split(micro_step_tokens(hp)):
        sequences = tokens.view(-1, hp.train_seq_len)
        docs = train_gpt.document_ids(sequences, hp.eot_token)
        total += model_flops(hp, docs, window)
    return total


def peak_memory():
    """MiB allocated and reserved: by PyTorch's allocator on a GPU, by the process on a CPU."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() // 2**20, torch.cuda.max_memory_reserved() // 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
    return used, used


def measure(training, warmup, repeats, peak_flops):
    """Returns {figure: number}, with the units in the names.

    peak_flops: the GPU's peak in FLOP/s; None if it is unknown.
    """
    hp = training.hp
    peak_before = matmul_peak()
    first_ms = ms_of(training.step)
    for _ in range(warmup):
        training.step()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_ms = median_ms(training.step, repeats)
    allocated, reserved = peak_memory()
    times = [ms_of_parts(training) for _ in range(repeats)]
    forward_ms = statistics.median(forward for forward, _, _ in times)
    backward_ms = statistics.median(backward for _, backward, _ in times)
    optimizer_ms = statistics.median(update for _, _, update in times)

    flops = step_flops(training)
    flops_per_second = flops / (step_ms / 1000)
    _, muon = training.optimizers
    return {
        "micro-step tokens": micro_step_tokens(hp),
        "step tokens": hp.batch_tokens,
        "forward ms": forward_ms,
        "backward ms": backward_ms,
        "forward+backward ms": forward_ms + backward_ms,
        "optimizer ms": optimizer_ms,
        "step ms": step_ms,
        "tokens/s": hp.batch_tokens / (step_ms / 1000),
        "step model TFLOP": flops / 1e12,
        "optimizer TFLOP": newton_schulz_flops(muon) / 1e12,
        "model TFLOP/s": flops_per_second / 1e12,
        "MFU %": 100 * flops_per_second / peak_flops if peak_flops else None,
        "allocated MiB": allocated,
        "reserved MiB": reserved,
        "first step s": first_ms / 1000,
        "matmul peak before GFLOP/s": peak_before,
        "matmul peak after GFLOP/s": matmul_peak(),
    }

# -----------------------------------------------------------------------------
# Tables


def print_table(header, rows):
    """Prints the first column aligned to the left and the others to the right."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print()
    for row in cells:
        line = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:]):
            line.append(cell.rjust(width))
        print("  ".join(line))


def rate_cells(ms, flops, peak):
    """The cells ms, GFLOP, GFLOP/s and % of peak. peak: in GFLOP/s."""
    gflop = flops / 1e9
    rate = gflop / (ms / 1000)
    percent = 100 * rate / peak
    return [f"{ms:,.3f}", f"{gflop:,.3f}", f"{rate:,.0f}", f"{percent:.0f}"]


def higher_peak(figures):
    before = figures["matmul peak before GFLOP/s"]
    after = figures["matmul peak after GFLOP/s"]
    return max(before, after)


def print_summary(hp, figures):
    tokens = figures["micro-step tokens"]
    micro_steps = hp.batch_tokens // tokens
    layers = "1 layer" if hp.num_layers == 1 else f"{hp.num_layers} layers"
    passes = "1 micro-step" if micro_steps == 1 else f"{micro_steps} micro-steps"
    print(f"{hp.track}: {layers}, width {hp.model_dim}; {hp.batch_tokens:,} tokens a step, {passes} "
          f"of {tokens:,}")
    print(f"speed: {figures['tokens/s']:,.0f} tokens/s; first step, with compilation: "
          f"{figures['first step s']:.1f} s")
    print(f"memory: {figures['allocated MiB']:,} MiB allocated, {figures['reserved MiB']:,} MiB "
          "reserved")
    mfu = "- (give --peak_tflops)"
    if figures["MFU %"] is not None:
        mfu = f"{figures['MFU %']:.2f} %"
    print(f"model: {1000 * figures['step model TFLOP']:,.3f} GFLOP a step, "
          f"{1000 * figures['model TFLOP/s']:,.0f} GFLOP/s, MFU {mfu}")
    print(f"matmul peak: {figures['matmul peak before GFLOP/s']:,.0f} GFLOP/s before, "
          f"{figures['matmul peak after GFLOP/s']:,.0f} after the steps")


def print_parts(hp, figures):
    micro_steps = hp.batch_tokens // figures["micro-step tokens"]
    step_model = 1e12 * figures["step model TFLOP"]
    model = step_model / micro_steps
    muon = 1e12 * figures["optimizer TFLOP"]
    peak = higher_peak(figures)
    parts = [
        ("forward", "forward ms", model / 3),
        ("backward", "backward ms", model * 2 / 3),
        ("forward+backward", "forward+backward ms", model),
        ("optimizers", "optimizer ms", muon),
        ("whole step", "step ms", step_model + muon),
    ]
    rows = []
    for part, figure, flops in parts:
        rows.append([part, *rate_cells(figures[figure], flops, peak)])
    print_table(["part", "ms", "GFLOP", "GFLOP/s", "% of peak"], rows)


def print_products(hp, figures, repeats):
    """Measures and prints the matrix products of one micro-step.

    Only one of them has its operands in memory at a time: all of them would fill a small GPU.
    """
    tokens = figures["micro-step tokens"]
    dim = hp.model_dim
    attention_dim = hp.num_heads * hp.head_dim
    rows = []

    def add_row(name, shape, run):
        run()
        ms = median_ms(run, repeats)
        shape_text = " x ".join(f"{n:,}" for n in shape)
        flops = 2 * math.prod(shape)
        rows.append([name, shape_text, *rate_cells(ms, flops, higher_peak(figures))])

    products = [
        ("attention in", dim, 3 * attention_dim),
        ("attention out", attention_dim, dim),
        ("MLP in", dim, 4 * dim),
        ("MLP out", 4 * dim, dim),
        ("head", dim, train_gpt.pad_vocab(hp.vocab_size)),
    ]
    for name, inputs, outputs in products:
        run = random_product(tokens, inputs, outputs)
        add_row(name, (tokens, inputs, outputs), run)
    print_table(["product", "shape", "ms", "GFLOP", "GFLOP/s", "% of peak"], rows)


def slowest_kernels(step, count):
    """The `count` kernels (on a CPU: operators) that take longest in a step.

    Returns [(name, calls, ms, % of all)].
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    kind = torch.autograd.DeviceType.CPU
    if DEVICE.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        kind = torch.autograd.DeviceType.CUDA

    def microseconds(event):
        if DEVICE.type == "cuda":
            return event.self_device_time_total
        return event.self_cpu_time_total

    with torch.profiler.profile(activities=activities) as profiler:
        ms_of(step)
    events = [event for event in profiler.key_averages() if event.device_type == kind]
    events.sort(key=microseconds, reverse=True)
    total = sum(map(microseconds, events)) or 1
    kernels = []
    for event in events[:count]:
        percent = 100 * microseconds(event) / total
        kernels.append((event.key, event.count, microseconds(event) / 1000, percent))
    return kernels


def print_kernels(step, count):
    kernels = slowest_kernels(step, count)
    print("\n      ms      %  calls  kernel")
    for name, calls, ms, percent in kernels:
        print(f"{ms:8.3f} {percent:6.1f} {calls:6}  {name[:55]}")

# -----------------------------------------------------------------------------
# Command line


def positive(text):
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def fail(message):
    raise InputError(f"{message}; --help lists the options")


def read_options(argv):
    """Returns the benchmark's options and the hyperparameters, with sequences that fit the GPU.

    Raises InputError.
    """
    parser = argparse.ArgumentParser("./run.sh bench", description=__doc__, allow_abbrev=False,
                                     epilog="All other options go to train_gpt.py.",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--repeats", type=positive, default=20, metavar="N",
                        help="timed repetitions (default: 20)")
    parser.add_argument("--warmup", type=positive, default=10, metavar="N",
                        help="untimed steps before the timed ones (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file, too")
    parser.add_argument("--kernels", type=positive, metavar="N",
                        help="list the N slowest kernels of a step")
    parser.add_argument("--peak_tflops", type=float, metavar="X",
                        help="the GPU's dense bf16 peak in TFLOP/s, which the MFU needs (default: "
                             "known for the H100 SXM and the H200)")
    args, rest = parser.parse_known_args(argv)
    options, hp = train_gpt.parse_arguments(rest)
    if DEVICE.type == "cpu" and hp.track == "fineweb":  # a step of the track takes an hour
        short_step = ["--batch_tokens=1024", "--train_seq_len=1024", "--val_seq_len=1024"]
        _, hp = train_gpt.parse_arguments([*short_step, *rest])
    if launch_checks.find_gpus():
        launch_checks.check_gpus(1)
        if "train_seq_len" not in options.given:
            hp = launch_checks.fit_to_memory(hp, 1)
    train_gpt.check_hyperparameters(hp, 1)
    return args, hp


def machine_name():
    if DEVICE.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{train_gpt.CPU_MODEL}, {torch.get_num_threads()} threads"


def write_json(path, content):
    """Writes the whole file or nothing."""
    text = json.dumps(content, indent=1) + "\n"
    write_file(path, text.encode())


def bench(argv):
    args, hp = read_options(argv)
    train_gpt.init_processes()
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_name(),
        "PyTorch": torch.__version__,
        "command": " ".join(["./run.sh bench", *argv]),
    }
    print(f"{facts['machine']}, PyTorch {torch.__version__}", flush=True)
    peak_flops = PEAKS.get(facts["machine"])
    if args.peak_tflops:
        peak_flops = args.peak_tflops * 1e12
    training = set_up_training(hp)
    figures = measure(training, args.warmup, args.repeats, peak_flops)
    print_summary(hp, figures)
    print_parts(hp, figures)
    print_products(hp, figures, args.repeats)
    if args.kernels:
        print_kernels(training.step, args.kernels)
    if args.json:
        write_json(args.json, facts | figures)


def run_benchmark(program, argv):
    """Runs program(argv) and returns the exit status: 2 for an error of the user, which is one line."""
    show_any_text()
    try:
        program(argv)
    except (InputError, FileError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(bench, sys.argv[1:]))
