"""
What each speed lever of the baseline is worth on this machine, one after another.

    python baseline/levers.py [--track T] [--device D] [--steps 20] [--micro_batch 16]

Every row adds one lever to the row above it and times whole training steps (forward, backward, clipping, AdamW) of
one micro-batch of random tokens: the median, after untimed steps that compile. A lever that means nothing on the
device, or fails there, is marked so and not timed. On CUDA the default is GPT-2 124M with 16 x 1024 tokens, which on
one A100 the field has seen go from 1000 ms to 90 ms; on a CPU it is the small model of the shakespeare track.
"""
import argparse
import dataclasses
import gc
import os
import shutil
import statistics
import sys
import time

from train_gpt2 import TRACKS, build, cpu_info, has_bf16, keep_freed_memory, train_step  # before torch: it sets OpenMP

import torch

LEVERS = [("float32", None), ("TF32 matmuls", "tf32"), ("bf16 autocast", "bf16"), ("torch.compile", "compile"),
          ("flash attention", "flash"), ("padded vocabulary", "pad_vocab"), ("fused AdamW", "fused")]


def meaningless(lever, device):
    """Why a lever cannot be measured on the device, or None."""
    if lever == "tf32" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < (8, 0)):
        return "the hardware has no TF32"
    if lever == "bf16" and not has_bf16(device):
        return "the hardware has no bf16"
    if lever == "compile" and device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        return "needs a C++ compiler"


def measure(hp, device, steps: int, warmup: int = 3) -> float:
    """-> the median time of a training step in milliseconds."""
    torch._dynamo.reset()
    _, compiled, optimizer, autocast = build(hp, device)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(hp.vocab_size, (2, hp.micro_batch, hp.block_size), generator=generator).to(device)
    times = []
    for step in range(warmup + steps):
        start = time.perf_counter()
        train_step(compiled, optimizer, autocast, x, y, hp, hp.learning_rate)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[warmup:])


def main():
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description="The baseline's speed levers, one after another.", allow_abbrev=False)
    parser.add_argument("--device", default=default_device, choices=["cpu", "cuda"])
    parser.add_argument("--track", choices=TRACKS, help="default: fineweb on CUDA, shakespeare on a CPU")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each row; default: %(default)s")
    parser.add_argument("--micro_batch", type=int, default=16, help="sequences in a step; default: %(default)s")
    args = parser.parse_args()
    if args.steps < 1 or args.micro_batch < 1:
        sys.exit("error: --steps and --micro_batch must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda: PyTorch finds no CUDA GPU here; use --device cpu")

    device = torch.device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    track = args.track or ("fineweb" if args.device == "cuda" else "shakespeare")
    off = {lever: False for _, lever in LEVERS if lever}
    hp = dataclasses.replace(TRACKS[track], micro_batch=args.micro_batch, **off)
    tokens = hp.micro_batch * hp.block_size
    machine = torch.cuda.get_device_name() if args.device == "cuda" else \
        f"{cpu_info()[0]}, {torch.get_num_threads()} threads"
    print(f"{machine}, PyTorch {torch.__version__}")
    print(f"{track}: {hp.n_layer} layers, width {hp.n_embd}, {hp.micro_batch} x {hp.block_size} tokens a step, "
          f"median of {args.steps} steps\n")
    print(f"{'each row adds':<18} {'ms/step':>9} {'tokens/s':>10} {'x previous':>11} {'x first':>8}")
    first = previous = None
    for name, lever in LEVERS:
        why = meaningless(lever, device)
        if why is None:
            wanted = dataclasses.replace(hp, **({lever: True} if lever else {}))
            try:
                ms = measure(wanted, device, args.steps)
                hp = wanted
            except (RuntimeError, torch.cuda.OutOfMemoryError) as e:
                why = f"failed: {(str(e).splitlines() or [type(e).__name__])[0][:50]}"
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
        if why is not None:
            print(f"{name:<18} {'-':>9}   {why}", flush=True)
            continue
        first, previous = first or ms, previous or ms
        print(f"{name:<18} {ms:>9.1f} {1000 * tokens / ms:>10,.0f} {previous / ms:>11.2f} {first / ms:>8.2f}",
              flush=True)
        previous = ms


if __name__ == "__main__":
    main()
