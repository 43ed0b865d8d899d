"""
Measures what each speedup of the baseline gives on this machine.

    python baseline/levers.py [--track T] [--device D] [--steps 20] [--micro_batch N]

Each row of the table adds one speedup to the row above it. It times whole training steps (forward,
backward, clipping, AdamW) on one micro-batch of random tokens and shows the median. A few untimed
steps come first, in which the model is compiled. A speedup that the device doesn't support, or that
fails, is marked and left out of the following rows.

On a GPU, the default is GPT-2 124M. With these speedups, others have reduced the time per step on
one A100 from 1000 ms to 90 ms. On a CPU, the default is the small model of the mini track.
"""
import argparse
import dataclasses
import gc
import os
import shutil
import statistics
import sys
import time

# before torch, because train_gpt2 sets OpenMP's variables
from train_gpt2 import TRACKS, build, cpu_info, has_bf16, keep_freed_memory, train_step

import torch

# (name in the table, field of train_gpt2.Hyperparameters); the first row has all of them off
LEVERS = [
    ("float32", None),
    ("TF32 matmuls", "tf32"),
    ("bf16 autocast", "bf16"),
    ("torch.compile", "compile"),
    ("flash attention", "flash"),
    ("padded vocabulary", "pad_vocab"),
    ("fused AdamW", "fused"),
]


def why_not(lever, device):
    """Returns why the device can't use a speedup, or None if it can."""
    if lever == "tf32":
        if device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 0):
            return "the hardware has no TF32"
    if lever == "bf16" and not has_bf16(device):
        return "the hardware has no bf16"
    if lever == "compile" and device.type == "cpu":
        if not shutil.which(os.environ.get("CXX", "g++")):
            return "needs a C++ compiler"
    return None


def measure(hp, device, steps: int, warmup: int = 3) -> float:
    """Returns the median time of a training step in milliseconds."""
    torch._dynamo.reset()
    _, compiled, optimizer, autocast = build(hp, device)
    generator = torch.Generator().manual_seed(0)
    shape = (2, hp.micro_batch, hp.block_size)
    inputs, targets = torch.randint(hp.vocab_size, shape, generator=generator).to(device)
    times = []
    for _ in range(warmup + steps):
        start = time.perf_counter()
        train_step(compiled, optimizer, autocast, inputs, targets, hp, hp.learning_rate)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[warmup:])


def parse_args():
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description="Measure what each speedup of the baseline gives on this machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", default=default_device, choices=["cpu", "cuda"],
        help="device to measure; default: cuda with a GPU, otherwise cpu")
    add("--track", choices=TRACKS,
        help="which model and settings; default: fineweb on a GPU, mini on a CPU")
    add("--steps", type=int, default=20, metavar="N",
        help="timed steps per row; default: %(default)s")
    add("--micro_batch", type=int, default=16, metavar="N",
        help="sequences per step; default: %(default)s")
    args = parser.parse_args()
    if args.track is None:
        args.track = "fineweb" if args.device == "cuda" else "mini"
    if args.steps < 1 or args.micro_batch < 1:
        sys.exit("error: --steps and --micro_batch must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: PyTorch finds no CUDA GPU here; use --device cpu")
    return args


def print_header(args, hp):
    if args.device == "cuda":
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{cpu_info()[0]}, {torch.get_num_threads()} threads"
    print(f"{machine}, PyTorch {torch.__version__}")
    print(
        f"{args.track}: {hp.n_layer} layers, width {hp.n_embd}, {hp.micro_batch} x {hp.block_size} "
        f"tokens per step, median of {args.steps} steps\n"
    )
    columns = f"{'ms/step':>9} {'tokens/s':>10} {'x previous':>11} {'x first':>8}"
    print(f"{'each row adds':<18} {columns}")


def main():
    args = parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    hp = dataclasses.replace(TRACKS[args.track], micro_batch=args.micro_batch)
    for _, lever in LEVERS[1:]:
        hp = dataclasses.replace(hp, **{lever: False})
    tokens = hp.micro_batch * hp.block_size
    print_header(args, hp)
    first = None     # milliseconds of the first row
    previous = None  # and of the last one that was measured
    for name, lever in LEVERS:
        wanted = hp
        if lever is not None:
            wanted = dataclasses.replace(hp, **{lever: True})
        problem = why_not(lever, device)
        if problem is None:
            try:
                ms = measure(wanted, device, args.steps)
            except (RuntimeError, torch.cuda.OutOfMemoryError) as e:
                message = str(e) or type(e).__name__
                problem = f"failed: {message.splitlines()[0][:50]}"
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if problem is not None:
            print(f"{name:<18} {'-':>9}   {problem}", flush=True)
            continue
        hp = wanted
        if first is None:
            first = ms
            previous = ms
        speed = 1000 * tokens / ms
        print(
            f"{name:<18} {ms:>9.1f} {speed:>10,.0f} {previous / ms:>11.2f} {first / ms:>8.2f}",
            flush=True,
        )
        previous = ms


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
