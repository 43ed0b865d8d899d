"""
The stages of tools/gpu_report.py. Each one runs in a process of its own:

    python tools/gpu_checks.py STAGE FILE     runs a stage on the GPU and writes its figures to FILE

A stage returns a dict of figures. Under "checks" it has a list of measured values with their limits,
as check() makes them. The stages head, attention and muon compare with float64 on the CPU, so that a
GPU that computes nothing can't agree with itself. They can also run on a CPU.
"""
import dataclasses
import importlib.metadata
import math
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import (PEAKS, ROOT, measure, run_benchmark, set_up_training, slowest_kernels, start,
                   write_json)
import train_gpt
import gpu_reference
import torch
import torch.nn.functional as F

sys.path.insert(0, str(ROOT / "data"))
from shards import write_shard

CUDA = torch.device("cuda")


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


def machine():
    train_gpt.check_gpus()
    gpu = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    hp = train_gpt.TRACKS["fineweb"]
    uses_fp8 = train_gpt.uses_fp8(hp)
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
        "CPU": f"{train_gpt.CPU_MODEL}, {train_gpt.CPU_CORES} cores",
        "head": "FP8" if uses_fp8 else "bf16",
        "train_seq_len": train_gpt.fitted(hp, free / 2**20, uses_fp8).train_seq_len,
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


def head(device=CUDA, tokens=512, dim=768, out=50304, fp8=None):
    """The errors of the head, its loss and its gradients. The limits are those of tests/gpu."""
    if fp8 is None:
        fp8 = train_gpt.uses_fp8(train_gpt.TRACKS["fineweb"])
    rng = torch.Generator().manual_seed(0)
    x = F.rms_norm(torch.randn(tokens, dim, generator=rng), (dim,)).bfloat16()
    w = torch.randn(out, dim, generator=rng)
    targets = torch.randint(out, (tokens,), generator=rng)
    want_loss, want_x, want_w = head_in_float64(x, w, targets)
    heads = [("bf16", bf16_head, 0.02)]
    if fp8:
        heads.append(("FP8", fp8_head, 0.09))
    checks = []
    for name, function, limit in heads:
        loss, grad_x, grad_w = function(x.to(device), w.to(device), targets.to(device))
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


def attention(device=CUDA, cases=ATTENTION_CASES, heads=6, dim=128):
    """The errors of attention in bf16, forward and backward, with documents and a window."""

    def attend(q, k, v, docs, window):
        if q.is_cuda:
            mask = train_gpt.flex_block_mask(docs, window)
        else:
            mask = train_gpt.portable_mask(docs, window, int(window))
        return train_gpt.attention(q, k, v, mask, 0.12)

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
        docs = docs.to(device)
        window = torch.tensor(blocks, dtype=torch.int32, device=device)
        inputs = (q.to(device), k.to(device), v.to(device))
        got = with_gradients(lambda q, k, v: compiled(q, k, v, docs, window), inputs, grad.to(device))
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


def muon(device=CUDA, width=768, steps=3):
    """The errors of three steps of Muon, on matrices of the official shapes."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(width, width), (4 * width, width), (width, 4 * width), (3, width, width)]
    params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
    optimizer = train_gpt.Muon(params, lr=1.0, momentum=0.9)
    buffers = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for _ in range(steps):
        for p, buffer, want in zip(params, buffers, expected):
            grad = torch.randn(p.shape, generator=rng)
            p.grad = grad.to(device)
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
    """50 steps of mini against the losses of a CPU in float32 (tools/gpu_reference.py)."""
    reference = gpu_reference.read_reference()
    world = train_gpt.start_world("cuda")
    hp = gpu_reference.settings()
    if gpu_reference.tokens_digest(hp) != reference["tokens_sha256"]:
        raise train_gpt.InputError("the tokens are not those of the reference; make them with "
                                   "data/shakespeare.py")
    fp8 = train_gpt.uses_fp8(hp)
    expected = reference["float32"]
    losses = gpu_reference.losses_of_seeds(hp, world, expected, torch.bfloat16, fp8)
    checks = []
    for window in gpu_reference.WINDOWS:
        found = gpu_reference.differences(losses, expected, window)
        limit = gpu_reference.tolerance(reference, window)
        checks.append(check(f"{window}: distance from float32", abs(sum(found) / len(found)), limit))
    return {"losses": losses, "checks": checks}


def fineweb(**changes):
    """Returns the world and the hyperparameters of the track, made to fit this GPU."""
    options, hp = train_gpt.parse_arguments(["--track", "fineweb", "--device", "cuda"])
    world, hp = start(options, hp)
    return world, dataclasses.replace(hp, **changes)


def speed():
    """The time of a step by part, as tools/bench.py measures it, and the slowest kernels."""
    world, hp = fineweb()
    training = set_up_training(hp, world)
    figures = measure(training, warmup=2, repeats=5, peak_flops=PEAKS.get(torch.cuda.get_device_name()))
    figures["train_seq_len"] = hp.train_seq_len
    figures["kernels"] = slowest_kernels(training.step, world.device, 10)
    return figures


def memory(seq_len, fp8):
    """Peaks of the allocator in training and in validation, and what a growing window compiles."""
    world, hp = fineweb(train_seq_len=seq_len, batch_tokens=2 * seq_len, fp8=fp8)
    training = set_up_training(hp, world)
    counters = torch._dynamo.utils.counters
    last_window = training.window_blocks
    tokens = torch.randint(hp.vocab_size, (hp.val_seq_len,), device=world.device)
    sequence = (tokens.int(), tokens)

    def validate(window):
        train_gpt.evaluate(training.model, [sequence], window, hp, world)

    training.window_blocks = 1
    training.step()
    validate(1)
    graphs = counters["stats"]["unique_graphs"]
    training.window_blocks = last_window
    peaks = {}
    for name, run in (("training", training.step), ("validation", lambda: validate(last_window))):
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() // 2**20
    return {
        "train_seq_len": seq_len,
        "head": "FP8" if training.model.use_fp8 else "bf16",
        "training MiB": peaks["training"],
        "validation MiB": peaks["validation"],
        "graph breaks": sum(counters["graph_break"].values()),
        "recompilations": counters["stats"]["unique_graphs"] - graphs,
    }


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
SHORTEST_WAIT = 100  # microseconds; a shorter call found the GPU done and returned at once


def waits(steps=12):
    """How often, and how long, the host waits for the GPU within 12 steps of the training loop."""
    world, hp = fineweb()
    hp = dataclasses.replace(hp, batch_tokens=hp.train_seq_len)
    training = set_up_training(hp, world)
    tokens = torch.randint(hp.vocab_size, (4 * hp.batch_tokens + 1,))
    first_bad_step = torch.full((), math.inf, dtype=torch.float64, device=world.device)
    votes = []
    training.step()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(math.ceil((steps + 5) / 4)):
            write_shard(Path(folder) / f"{i}.bin", tokens.numpy())
        batches = train_gpt.distributed_data_generator(
            f"{folder}/*.bin", hp.batch_tokens, 0, 1, hp.vocab_size, world.device)

        def step(number):
            nonlocal first_bad_step
            training.inputs, training.targets = next(batches)
            loss = train_gpt.train_step(training.model, training.optimizers, training.buckets,
                                        training.inputs, training.targets, training.window_blocks,
                                        hp, world)
            first_bad_step = train_gpt.first_bad(first_bad_step, number, loss)
            train_gpt.vote_while_training(votes, number, first_bad_step, world)

        for number in range(1, 6):  # the first vote is started, but not read
            step(number)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            with torch.profiler.record_function("steps"):
                for number in range(6, 6 + steps):
                    step(number)
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

    if not any("LaunchKernel" in event.name and during(event) for event in events):
        raise train_gpt.InputError("PyTorch's profiler sees no kernels on this machine, so waits can't "
                                   "be counted: CUPTI, which is part of PyTorch's CUDA build, is "
                                   "missing or not permitted. Install that build again, or run this as "
                                   "root (https://developer.nvidia.com/ERR_NVGPUCTRPERM says more)")
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
    "memory 49152": lambda: memory(49152, True),
    "memory 24576": lambda: memory(24576, True),
    "memory 12288": lambda: memory(12288, True),
    "memory 49152 bf16": lambda: memory(49152, False),
}


def run_stage(argv):
    name, file = argv
    write_json(Path(file), STAGES[name]())


if __name__ == "__main__":
    sys.exit(run_benchmark(run_stage, sys.argv[1:]))
