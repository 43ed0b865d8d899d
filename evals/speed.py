"""
What share of the machine's speed a run of train_gpt.py reached. ./run.sh prints it after training.

FLOPs (multiplications and additions) are those of the weights: each one multiplies and adds once
per token in the forward pass, and twice in the backward pass, so 6 per weight and token. Embeddings
are only looked up. Attention's scores and the optimizer don't count (gpu/measure.py counts the
scores, too).
"""

import collections
import re

import train_gpt
from gpu.measure import matmul_peak
from train_gpt import DTYPE, ON_GPU


def count(weights):
    """Returns the number of parameters, and the FLOPs of a token. weights: {name: tensor}."""
    sizes = collections.Counter()
    for name, p in weights.items():
        sizes[train_gpt.parameter_kind(name, p)] += p.numel()
    return sizes.total(), 6 * (sizes["matrix"] + sizes["head"])


def describe(checkpoint):
    """Returns two lines about the run of a RUN.pt."""
    run = checkpoint["run"]
    parameters, flops = count(checkpoint["model"])
    processes = int(re.findall(r'"world_size": (\d+)', run["log"])[-1])
    tokens = checkpoint["settings"]["batch_tokens"] * run["step"]
    reached = 1000 * flops * tokens / run["train_ms"]
    peak = processes * 1e9 * matmul_peak(8192 if ON_GPU else 1024, repeats=3)
    dtype = str(DTYPE).removeprefix("torch.")
    return (
        f"{parameters:,} parameters; {flops:,} floating-point operations (FLOPs) per token\n"
        f"{reached / 1e9:,.0f} GFLOP/s in training: {reached / peak:.0%} of what a large {dtype} matmul reaches here"
    )
