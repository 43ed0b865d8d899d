"""
The stages of tools/gpu/report.py. Each one runs in a process of its own:

    python -m tools.gpu.checks STAGE FILE     runs a stage on the GPU and writes its figures to FILE

A stage returns a dict of figures. Under "checks" it has a list of measured values with their limits,
as check() makes them. The stages head, attention and muon compare with float64 on the CPU, so that a
GPU that computes nothing can't agree with itself. They also run on a CPU.
"""
import dataclasses
import importlib.metadata
import math
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.gpu.bench import (
    DEVICE,
    PEAKS,
    measure,
    run_benchmark,
    set_up_training,
    slowest_kernels,
    write_json,
)
from tools.common import ROOT, usable_cores
import train_gpt
import torch
import torch.nn.functional as F

from tools.gpu import reference as gpu_reference
from tools import launch_checks
from train_gpt import require

from data.shards import write_shard


def check(name, value, limit):
    """A measured value that should be at most `limit`. A value that isn't finite is not ok."""
    value = float(value)
    finite = math.isfinite(value)
    return {
        "name": name,
        "value": value if finite else str(value),  # JSON has no NaN
        "limit": limit,
        "ok": finite and value <= limit,
    }


def relative_error(got, want):
    """The relative error in the Frobenius norm. `want` is on the CPU."""
    return (got.cpu().double() - want).norm() / want.norm()

# -----------------------------------------------------------------------------
# Machine and versions


def nvidia_smi(query):
    """What nvidia-smi says of the first GPU, or "" without the program."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return done.stdout.strip()


def triton_version():
    """The version of the Triton that PyTorch's CUDA build brings along."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def head_name(hp):
    return "FP8" if train_gpt.uses_fp8(hp) else "bf16"


def machine():
    require(launch_checks.find_gpus() > 0, "this needs an NVIDIA GPU, and PyTorch finds none")
    launch_checks.check_gpus(1)
    gpu = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    hp = train_gpt.TRACKS["fineweb"]
    return {
        "GPU": gpu.name,
        "GPUs": torch.cuda.device_count(),
        "compute capability": f"{gpu.major}.{gpu.minor}",
        "memory MiB": total // 2**20,
        "free MiB": free // 2**20,
        "multiprocessors": gpu.multi_processor_count,
        "shared memory of a block, bytes": getattr(gpu, "shared_memory_per_block_optin", None),
        "driver": nvidia_smi("driver_version"),
        "power limit": nvidia_smi("power.limit"),
        "PyTorch": torch.__version__,
        "CUDA of PyTorch": torch.version.cuda,
        "Triton": triton_version(),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU": f"{train_gpt.CPU_MODEL}, {usable_cores()} cores",
        "head": head_name(hp),
        "train_seq_len": launch_checks.fit_to_memory(hp, 1).train_seq_len,
    }

# -----------------------------------------------------------------------------
# The head, attention and Muon against float64


def head_in_float64(x, w, targets):
    """Returns the loss of the soft-capped logits, summed over tokens, and its gradients."""
    x = x.double().requires_grad_()
    w = w.double().requires_grad_()
    logits = 30 * torch.sigmoid(x @ w.T / (7.5 * w.size(1)**0.5))
    loss = F.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    return loss.detach(), x.grad, w.grad


def bf16_head(x, w, targets):
    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    logits = train_gpt.softcap(F.linear(x, w.bfloat16()), w.size(1))
    loss = F.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    return loss.detach(), x.grad, w.grad


def fp8_head(x, w, targets):
    x = x.clone().requires_grad_()
    w = w.clone().requires_grad_()
    loss = torch.ops.nanogpt.head_loss(x, w, targets)[0]
    loss.backward()
    return loss.detach(), x.grad, w.grad


def head(tokens=512, dim=768, out=50304):
    """The errors of the head, its loss and its gradients. The limits are those of tests/gpu."""
    rng = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(tokens, dim, generator=rng), (dim,)).bfloat16()
    w = torch.randn(out, dim, generator=rng)
    targets = torch.randint(out, (tokens,), generator=rng)
    want_loss, want_x, want_w = head_in_float64(x, w, targets)
    heads = [("bf16", bf16_head, 0.02)]
    if train_gpt.uses_fp8(train_gpt.TRACKS["fineweb"]):
        heads.append(("FP8", fp8_head, 0.09))
    checks = []
    for name, function, limit in heads:
        loss, grad_x, grad_w = function(x.to(DEVICE), w.to(DEVICE), targets.to(DEVICE))
        checks.append(check(f"{name} loss", relative_error(loss, want_loss), limit / 10))
        checks.append(check(f"{name} gradient of the input", relative_error(grad_x, want_x), limit))
        checks.append(check(f"{name} gradient of the weight", relative_error(grad_w, want_w), limit))
    return {"tokens": tokens, "checks": checks}


def documents(length, mean, rng):
    """Numbers of documents (length,), which have about `mean` tokens each."""
    tokens = torch.zeros(1, length, dtype=torch.int32)
    begins = torch.rand(1, length, generator=rng) < 1 / mean
    return train_gpt.document_ids(tokens.masked_fill(begins, 1), 1)


def dense_attention(q, k, v, visible):
    """Attention with a mask (queries, keys). q, k, v: (1, T, H, D)."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.12
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def with_gradients(function, inputs, grad):
    """Returns function(*inputs) and the gradients of the inputs."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    y.backward(grad.to(y.dtype))
    return [y.detach()] + [t.grad for t in inputs]


# tokens, mean length of a document, window in blocks
ATTENTION_CASES = [(1024, 300, 5), (2048, 100, 16), (2048, 10**9, 3)]


def attention(cases=ATTENTION_CASES, heads=6, dim=128):
    """The errors of attention in bf16, forward and backward, with documents and a window."""

    def attend(q, k, v, docs, window):
        if q.is_cuda:
            mask = train_gpt.flex_block_mask(docs, window)
        else:
            mask = train_gpt.portable_mask(docs, (1 - window) * 128, int(window))
        return train_gpt.attention(q, k, v, mask)

    compiled = torch.compile(attend, dynamic=False)
    checks = []
    for length, mean, blocks in cases:
        rng = torch.Generator().manual_seed(length)
        docs = documents(length, mean, rng)
        q, k, v, grad = torch.randn(4, 1, length, heads, dim, generator=rng).bfloat16().unbind()
        rows = torch.arange(length)[:, None]
        keys = torch.arange(length)
        visible = (keys <= rows) & (docs[:, None] == docs) & (rows // 128 - keys // 128 < blocks)
        exact = (q.double(), k.double(), v.double())
        want = with_gradients(lambda q, k, v: dense_attention(q, k, v, visible), exact, grad)
        docs = docs.to(DEVICE)
        window = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
        inputs = (q.to(DEVICE), k.to(DEVICE), v.to(DEVICE))
        got = with_gradients(lambda q, k, v: compiled(q, k, v, docs, window), inputs, grad.to(DEVICE))
        for name, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v"), got, want):
            title = f"{length} tokens, window {blocks}, {name}"
            checks.append(check(title, relative_error(a, b), 0.02))
    return {"checks": checks}


def newton_schulz_in_float64(G, steps):
    """The iteration of https://kellerjordan.github.io/posts/muon for one matrix."""
    X = G.double()
    if X.size(0) > X.size(1):
        X = X.T
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.size(0) > G.size(1) else X


def muon(width=768, steps=3):
    """The errors of three steps of Muon, on matrices of the official shapes."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(width, width), (4 * width, width), (width, 4 * width), (3, width, width)]
    params = [torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes]
    optimizer = train_gpt.Muon(params, lr=1.0, momentum=0.9)
    buffers = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for _ in range(steps):
        for p, buffer, want in zip(params, buffers, expected):
            grad = torch.randn(p.shape, generator=rng)
            p.grad = grad.to(DEVICE)
            grad = grad.double()
            buffer.mul_(0.9).add_(0.1 * grad)
            nesterov = 0.1 * grad + 0.9 * buffer
            scale = max(1, p.size(-2) / p.size(-1))**0.5
            for matrix, update in zip(nesterov.view(-1, *p.shape[-2:]), want.view(-1, *p.shape[-2:])):
                update -= scale * newton_schulz_in_float64(matrix, 5)
        optimizer.step()
    checks = []
    for shape, p, want in zip(shapes, params, expected):
        text = " x ".join(map(str, shape))
        checks.append(check(f"weights {text}", relative_error(p.detach(), want), 0.05))
    return {"steps": steps, "checks": checks}

# -----------------------------------------------------------------------------
# Training


def mini():
    """50 steps of mini against the losses of a CPU in float32 (tools/gpu/reference.py)."""
    reference = gpu_reference.read_reference()
    train_gpt.init_processes()
    hp = gpu_reference.settings()
    same = gpu_reference.tokens_digest(hp) == reference["tokens_sha256"]
    require(same, "the tokens are not those of the reference; make them with data/shakespeare.py")
    expected = reference["float32"]
    losses = gpu_reference.losses_of_seeds(hp, expected)
    checks = []
    for window in gpu_reference.WINDOWS:
        found = gpu_reference.differences(losses, expected, window)
        limit = gpu_reference.tolerance(reference, window)
        checks.append(check(f"{window}: distance from float32", abs(sum(found) / len(found)), limit))
    return {"losses": losses, "checks": checks}


def fineweb():
    """The hyperparameters of the track, with sequences that fit this GPU."""
    train_gpt.init_processes()
    return launch_checks.fit_to_memory(train_gpt.TRACKS["fineweb"], 1)


def speed():
    """The time of a step by part, as tools/gpu/bench.py measures it, its slowest kernels and its memory."""
    training = set_up_training(fineweb())
    figures = measure(training, warmup=2, repeats=5, peak_flops=PEAKS.get(torch.cuda.get_device_name()))
    figures["kernels"] = slowest_kernels(training.step, 10)
    return figures | peaks(training)


def memory(seq_len, fp8):
    train_gpt.init_processes()
    hp = train_gpt.TRACKS["fineweb"]
    hp = dataclasses.replace(hp, train_seq_len=seq_len, batch_tokens=2 * seq_len, fp8=fp8)
    return peaks(set_up_training(hp))


def peaks(training):
    """Peaks of the allocator in training and in validation, and what a growing window compiles."""
    hp = training.hp
    stats = torch._dynamo.utils.counters["stats"]
    sequence = training.tokens[torch.arange(hp.val_seq_len + 1) % len(training.tokens)]

    def train(step):
        training.train(training.tokens, step)

    @torch.no_grad()
    def validate(step):
        training.model.eval()
        inputs, targets = train_gpt.to_batch(sequence, hp.val_seq_len)
        training.model(inputs, targets, train_gpt.get_window_blocks(step, hp))

    train(0)
    validate(0)
    graphs = stats["unique_graphs"]
    mib = {}
    for name, run in (("training", train), ("validation", validate)):
        torch.cuda.reset_peak_memory_stats()
        run(hp.num_iterations - 1)
        torch.cuda.synchronize()
        mib[name] = torch.cuda.max_memory_allocated() // 2**20
    return {
        "train_seq_len": hp.train_seq_len,
        "head": head_name(hp),
        "training MiB": mib["training"],
        "validation MiB": mib["validation"],
        "graph breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "recompilations": stats["unique_graphs"] - graphs,
    }


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SHORTEST_WAIT = 100  # microseconds; a shorter call found the GPU done and returned at once


def waits(steps=12, before=3):
    """How often, and how long, the host waits for the GPU within 12 steps of training."""
    hp = fineweb()
    hp = dataclasses.replace(hp, batch_tokens=hp.train_seq_len)
    training = set_up_training(hp)
    tokens = torch.randint(hp.vocab_size, ((steps + before) * hp.batch_tokens + 1,))
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "0.bin", tokens.numpy())
        batches = train_gpt.distributed_data_generator(
            f"{folder}/*.bin", hp.batch_tokens, hp.vocab_size, 0, 1)
        for step in range(before):
            training.train(next(batches), step)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            with torch.profiler.record_function("steps"):
                for step in range(before, before + steps):
                    training.train(next(batches), step)
            torch.cuda.synchronize()
    return count_waits(profiler.events(), steps)


def count_waits(events, steps):
    """Counts what the profiler saw of the host's waits and of the copies within "steps".

    Raises InputError if it saw no kernels.
    """
    ranges = [e.time_range for e in events if e.name == "steps" and not e.is_async]
    begin, end = ranges[0].start, ranges[0].end

    def during(event):
        return begin <= event.time_range.start <= end

    kernels = any("LaunchKernel" in event.name and during(event) for event in events)
    require(kernels, "PyTorch's profiler sees no kernels on this machine, so waits can't be counted: CUPTI, "
                     "which is part of PyTorch's CUDA build, is missing or not permitted. Install that build "
                     "again, or run this as root (https://developer.nvidia.com/ERR_NVGPUCTRPERM says more)")
    calls = [event for event in events if event.name in WAITS and during(event)]
    waiting = [call for call in calls if call.time_range.elapsed_us() >= SHORTEST_WAIT]
    copies = [event for event in events if event.name.startswith("Memcpy DtoD")]
    return {
        "steps": steps,
        "waits": len(waiting),
        "waiting ms": sum(event.time_range.elapsed_us() for event in waiting) / 1000,
        "copies within the GPU, a step": len(copies) / steps,
        "ms of these copies, a step": sum(e.device_time_total for e in copies) / 1000 / steps,
    }


STAGES = {
    "machine": machine,
    "head": head,
    "attention": attention,
    "muon": muon,
    "mini": mini,
    "speed": speed,
    "waits": waits,
    "memory 24576": lambda: memory(24576, True),
    "memory 12288": lambda: memory(12288, True),
    "memory 49152 bf16": lambda: memory(49152, False),
}


def run_stage(argv):
    name, file = argv
    write_json(Path(file), STAGES[name]())


if __name__ == "__main__":
    sys.exit(run_benchmark(run_stage, sys.argv[1:]))
