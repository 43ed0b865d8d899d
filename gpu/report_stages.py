"""
The stages of gpu/gpu_report.py.

A stage returns a dict of figures. Under "checks" it has a list of measured values with their limits,
as check() makes them. The stages head and attention compare with float64 on the CPU, so that a
GPU that computes nothing can't agree with itself. They also run on a CPU.
"""

import dataclasses
import math
import platform

import train_gpt  # before torch, because it sets variables that torch reads when it is loaded
import torch
import torch.nn.functional as F
from judge.environment import usable_cores
from judge.processes import output_of
from gpu.measure import PEAK_FLOPS, Training, measure, slowest_kernels
from gpu.memory import check_gpus, find_gpus, fit_to_memory
from train_gpt import DEVICE, require

FINEWEB = train_gpt.TRACKS["fineweb"]


def check(name, value, limit):
    """A measured value that should be at most `limit`. NaN is not ok."""
    return {"name": name, "value": float(value), "limit": limit, "ok": bool(value <= limit)}


# -----------------------------------------------------------------------------
# Machine and versions


def head_name(hp):
    return "FP8" if train_gpt.uses_fp8(hp) else "bf16"


def machine():
    require(find_gpus() > 0, "this needs an NVIDIA GPU, and PyTorch finds none")
    check_gpus(1)
    import triton  # comes with PyTorch's CUDA build

    gpu = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    query = ["--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0"]
    return {
        "GPU": gpu.name,
        "GPUs": torch.cuda.device_count(),
        "compute capability": f"{gpu.major}.{gpu.minor}",
        "memory MiB": total // 2**20,
        "free MiB": free // 2**20,
        "driver, power limit": (output_of("nvidia-smi", *query) or "").strip(),
        "PyTorch": torch.__version__,
        "CUDA of PyTorch": torch.version.cuda,
        "Triton": triton.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU": f"{train_gpt.CPU_MODEL}, {usable_cores()} cores",
        "head": head_name(FINEWEB),
        "train_seq_len": fitted_fineweb().train_seq_len,
    }


# -----------------------------------------------------------------------------
# The head and attention against float64


def with_gradients(function, inputs, grad):
    """Returns function(*inputs) and the gradients of the inputs."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(grad.to(y))
    return [y.detach(), *[t.grad for t in inputs]]


def relative_error(value, right):
    value, right = value.double(), right.double()
    return (value - right).norm() / right.norm().clamp_min(1e-30)  # 0 if both are zero


def check_against(function, exact, inputs, grad, limits):
    """Checks function(*inputs) on the device, and its gradients, against exact(*inputs) in float64.

    limits: {name: limit} of the result and of each gradient."""
    want = with_gradients(exact, [t.double() for t in inputs], grad)
    got = with_gradients(function, [t.to(DEVICE) for t in inputs], grad)
    errors = [relative_error(t.cpu(), right) for t, right in zip(got, want)]
    return [check(name, error, limit) for error, (name, limit) in zip(errors, limits.items())]


def check_head(tokens=512, dim=768, out=50304):
    """The errors of the head, its loss and its gradients."""
    rng = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(tokens, dim, generator=rng), (dim,)).bfloat16()
    w = torch.randn(out, dim, generator=rng)
    targets = torch.randint(out, (tokens,), generator=rng)

    def exact(x, w):
        logits = 30 * torch.sigmoid(x @ w.T / (7.5 * dim**0.5))
        return F.cross_entropy(logits, targets, reduction="sum")

    def bf16(x, w):
        logits = train_gpt.scale_and_softcap(F.linear(x, w.bfloat16()), dim)
        return F.cross_entropy(logits, targets.to(DEVICE), reduction="sum")

    def fp8(x, w):
        return torch.ops.nanogpt.head_loss(x, w, targets.to(DEVICE))[0]

    heads = [("bf16", bf16, 0.02)]
    if train_gpt.uses_fp8(FINEWEB):
        heads.append(("FP8", fp8, 0.09))
    checks = []
    for name, function, limit in heads:
        limits = {
            f"{name} loss": limit / 10,
            f"{name} gradient of the input": limit,
            f"{name} gradient of the weight": limit,
        }
        checks += check_against(function, exact, (x, w), torch.ones(()), limits)
    return {"tokens": tokens, "checks": checks}


@torch.compile(dynamic=False)
def attend(q, k, v, docs, window):
    """As the model does. docs: (T,) on the device; window: () int32, in blocks."""
    if q.is_cuda:
        mask = train_gpt.flex_block_mask(docs, window)
    else:
        mask = train_gpt.portable_mask(docs, window, int(window))
    return train_gpt.attention(q, k, v, mask)


def attention_case(length, mean, blocks, heads, dim):
    """Checks a sequence with documents of about `mean` tokens, and a window of `blocks` blocks."""
    rng = torch.Generator().manual_seed(length)
    begins = torch.rand(length, generator=rng) < 1 / mean
    docs = 1 + begins.cumsum(0, dtype=torch.int32)
    *qkv, grad = torch.randn(4, 1, length, heads, dim, generator=rng).bfloat16().unbind()
    query = torch.arange(length)[:, None]
    key = torch.arange(length)
    visible = (key <= query) & (docs[:, None] == docs) & (query // 128 - key // 128 < blocks)
    window = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)

    def dense(q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.12
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    limits = {f"{length} tokens, window {blocks}, {name}": 0.02 for name in names}
    return check_against(
        lambda q, k, v: attend(q, k, v, docs.to(DEVICE), window), dense, qkv, grad, limits
    )


# tokens, mean length of a document, window in blocks
ATTENTION_CASES = [(1024, 300, 5), (2048, 100, 16), (2048, 10**9, 3)]


def check_attention(cases=ATTENTION_CASES, heads=6, dim=128):
    """The errors of attention in bf16, forward and backward, with documents and a window."""
    found = [attention_case(*case, heads, dim) for case in cases]
    return {"checks": sum(found, [])}


# -----------------------------------------------------------------------------
# Speed and memory of the track fineweb


def fitted_fineweb():
    """The hyperparameters of the track, with sequences that fit this GPU."""
    return fit_to_memory(FINEWEB, 1)


def measure_speed():
    """The time of a step by part, its slowest kernels and its memory."""
    torch._dynamo.utils.counters.clear()  # those of other stages
    training = Training(fitted_fineweb())
    figures = measure(training, repeats=5, peak_flops=PEAK_FLOPS.get(torch.cuda.get_device_name()))
    figures["kernels"] = slowest_kernels(training.last_step, 10)
    return figures | peaks(training)


def peaks(training):
    """Peaks of the allocator in training and in validation, and what a growing window compiles."""
    hp = training.hp
    counters = torch._dynamo.utils.counters
    sequence = torch.zeros(hp.val_seq_len + 1, dtype=torch.int32)

    @torch.no_grad()
    def validate(step):
        training.model.eval()
        inputs, targets = train_gpt.to_batch(sequence, hp.val_seq_len)
        training.model(inputs, targets, train_gpt.get_window_blocks(step, hp))

    def peak(run):
        torch.cuda.reset_peak_memory_stats()
        run(hp.num_iterations - 1)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() // 2**20

    training.train(0)
    validate(0)
    graphs = counters["stats"]["unique_graphs"]
    return {
        "train_seq_len": hp.train_seq_len,
        "head": head_name(hp),
        "training MiB": peak(training.train),
        "validation MiB": peak(validate),
        "graph breaks": sum(counters["graph_break"].values()),
        "recompilations": counters["stats"]["unique_graphs"] - graphs,
    }


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SHORTEST_WAIT = 100  # microseconds; a shorter call found the GPU done and returned at once


def waits(steps=12):
    """How often, and how long, the host waits for the GPU within 12 steps of training."""
    hp = fitted_fineweb()
    training = Training(dataclasses.replace(hp, batch_tokens=hp.train_seq_len))
    for step in range(3):
        training.train(step)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler, torch.profiler.record_function("steps"):
        for step in range(3, 3 + steps):
            training.train(step)
    return count_waits(profiler.events(), steps)


def count_waits(events, steps):
    """Counts the host's waits within "steps", as the profiler saw them.

    Raises InputError if it saw no kernels.
    """
    span = next(event.time_range for event in events if event.name == "steps" and not event.is_async)
    during = [event for event in events if span.start <= event.time_range.start <= span.end]
    require(
        any("LaunchKernel" in event.name for event in during),
        "PyTorch's profiler sees no kernels on this machine, so waits can't be counted: CUPTI, which is part "
        "of PyTorch's CUDA build, is missing or not permitted. Install that build again, or run this as root "
        "(https://developer.nvidia.com/ERR_NVGPUCTRPERM says more)",
    )
    calls = [event.time_range.elapsed_us() for event in during if event.name in WAITS]
    waiting = [us for us in calls if us >= SHORTEST_WAIT]
    return {
        "steps": steps,
        "waiting ms": sum(waiting) / 1000,
        "checks": [check("waits", len(waiting), 0)],
    }


STAGES = {
    "head": check_head,
    "attention": check_attention,
    "speed": measure_speed,
    "waits": waits,
}
