"""
A training step to measure: its times, its slowest kernels, and its number of floating-point
operations (FLOPs). bench.py and report_stages.py use it.

FLOPs are those of the matrix products that the model needs: two for each multiply-add, and twice as
many in the backward pass as in the forward pass. Recomputation, the optimizer and element-wise
operations don't count. This is the convention of PaLM (arXiv:2204.02311, appendix B), except that
attention counts only the pairs of query and key that the mask leaves visible. In total:

    6 T (4 A C H D + 8 L C C + C V) + 12 H D (P(1) + ... + P(L))

T tokens; C = model_dim; H heads of size D; V padded vocabulary; L layers, A of them with attention;
P(l) visible pairs in layer l, which is 0 in a layer without attention.
"""

import math
import statistics
from operator import attrgetter

import train_gpt  # before torch, because it sets variables that torch reads when it is loaded
import torch
from train_gpt import DEVICE, DTYPE, ON_GPU, clock

# Dense bf16 FLOP/s by the name that the driver reports, from NVIDIA's datasheets of the H100 and H200
# (the 1,979 TFLOP/s of the SXM boards are with sparsity). For other boards, use --peak_tflops.
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


# -----------------------------------------------------------------------------
# FLOPs


def visible_pairs(docs, window_blocks):
    """How many (query, key) pairs the attention mask leaves visible.

    docs: (T,) integers, the number of each token's document, never falling.
    window_blocks: the window's length in blocks of 128 tokens.
    """
    position = torch.arange(len(docs), device=docs.device)
    document_start = torch.searchsorted(docs, docs)  # the first position with the same number
    window_start = (position // 128 - window_blocks + 1) * 128
    first_visible = torch.maximum(document_start, window_start)
    return int((position - first_visible + 1).sum())


def model_flops(hp, docs, window_blocks):
    """FLOPs of the forward and backward pass over one batch.

    docs: (T,) integers, as for `visible_pairs`.
    window_blocks: the long window in blocks of 128 tokens; the short window is half of it.
    """
    dim = hp.model_dim
    long_pairs = visible_pairs(docs, window_blocks)
    short_pairs = visible_pairs(docs, max(1, window_blocks // 2))
    weights = hp.num_layers * 8 * dim * dim + dim * train_gpt.pad_vocab(hp.vocab_size)
    pairs = 0
    for layer in set(range(hp.num_layers)) - set(hp.attn_free_layers):
        weights += 4 * dim * dim
        pairs += long_pairs if layer in hp.long_window_layers else short_pairs
    return 6 * len(docs) * weights + 12 * dim * pairs


def newton_schulz_flops(optimizers):
    """FLOPs of the Newton-Schulz iterations of Muon in one step.

    Each iteration on an m x n matrix X (m <= n) computes A = X X^T, A A and B X.
    """
    total = 0
    muons = [optimizer for optimizer in optimizers if isinstance(optimizer, train_gpt.Muon)]
    for muon in muons:
        for group in muon.param_groups:
            for p in group["params"]:
                m, n = sorted(p.shape[-2:])
                matrices = p.numel() // (m * n)
                total += group["ns_steps"] * matrices * 2 * (2 * m * m * n + m**3)
    return total


# -----------------------------------------------------------------------------
# Timing


def device_name():
    """That of the GPU, or of the CPU with its threads."""
    if ON_GPU:
        return torch.cuda.get_device_name()
    return f"{train_gpt.CPU_MODEL}, {torch.get_num_threads()} threads"


def ms_of(run):
    """Milliseconds until run() has returned and the device is done."""
    started = clock()
    run()
    return clock() - started


def median_ms(run, repeats):
    return statistics.median(ms_of(run) for _ in range(repeats))


def matmul_peak(n=8192 if ON_GPU else 2048, repeats=8):
    """GFLOP/s of the best of several products of n x n matrices, after one that isn't counted."""
    x = torch.randn(n, n, device=DEVICE).to(DTYPE)
    x @ x.T
    best_ms = min(ms_of(lambda: x @ x.T) for _ in range(repeats))
    return 2 * n**3 / 1e6 / best_ms


class Training:
    """A compiled model with its optimizers, and one batch of random tokens."""

    def __init__(self, hp):
        self.hp = hp
        self.model = train_gpt.build_model(hp)
        self.model.compile(dynamic=False)
        self.optimizers = train_gpt.build_optimizers(self.model, hp)
        self.tokens = random_batch(hp)

    def train(self, step):
        train_gpt.train_step(self.model, self.optimizers, self.tokens, step, self.hp)

    def last_step(self):
        """Its window is the longest."""
        self.train(self.hp.num_iterations - 1)


def random_batch(hp):
    """Random tokens (batch_tokens + 1,), int32, in documents of about 1,000 tokens."""
    rng = torch.Generator().manual_seed(0)
    count = hp.batch_tokens + 1
    tokens = torch.randint(hp.vocab_size, (count,), dtype=torch.int32, generator=rng)
    ends_document = torch.rand(count, generator=rng) < 1e-3
    return tokens.masked_fill(ends_document, hp.eot_token)


def longest_window(hp):
    """In blocks, on the device: () int32."""
    return train_gpt.get_window_blocks(hp.num_iterations, hp)


def micro_step_tokens(hp):
    return hp.train_seq_len * math.gcd(hp.sequences_per_pass, hp.batch_tokens // hp.train_seq_len)


def ms_of_parts(training):
    """Milliseconds of a micro-step's forward and backward, and of the optimizers."""
    hp = training.hp
    tokens = training.tokens[: micro_step_tokens(hp) + 1]
    inputs, targets = train_gpt.to_batch(tokens, hp.train_seq_len)
    window = longest_window(hp)
    weight = torch.full((), hp.train_seq_len / hp.batch_tokens, device=DEVICE)
    started = clock()
    loss = training.model(inputs, targets, window)
    forward = clock()
    loss.backward(weight)
    backward = clock()
    for optimizer in training.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return forward - started, backward - forward, clock() - backward


def measure(training, repeats, peak_flops):
    """Returns {figure: number}, with the units in the names. Half as many steps as are timed come before.

    peak_flops: the GPU's peak in FLOP/s; None if it is unknown.
    """
    hp = training.hp
    peak_before = matmul_peak()
    first_ms = ms_of(training.last_step)
    for _ in range(repeats // 2):
        training.last_step()
    step_ms = median_ms(training.last_step, repeats)
    times = zip(*(ms_of_parts(training) for _ in range(repeats)))
    forward_ms, backward_ms, optimizer_ms = map(statistics.median, times)

    peak = max(peak_before, matmul_peak())  # GFLOP/s

    sequences = training.tokens[:-1].view(-1, hp.train_seq_len)
    docs = train_gpt.document_ids(sequences, hp.eot_token)
    flops = model_flops(hp, docs, int(longest_window(hp)))
    of_pass = flops * micro_step_tokens(hp) / hp.batch_tokens
    of_muon = newton_schulz_flops(training.optimizers)
    parts = [
        ("forward", forward_ms, of_pass / 3),
        ("backward", backward_ms, of_pass * 2 / 3),
        ("optimizers", optimizer_ms, of_muon),
        ("whole step", step_ms, flops + of_muon),
    ]
    figures = {
        "micro-step tokens": micro_step_tokens(hp),
        "step tokens": hp.batch_tokens,
        "first step s": first_ms / 1000,
        "tokens/s": hp.batch_tokens / (step_ms / 1000),
        "matmul peak GFLOP/s": peak,
    }
    if peak_flops:
        figures["MFU %"] = 100 * flops / (step_ms / 1000) / peak_flops
    for name, ms, part_flops in parts:
        gflop = part_flops / 1e9
        figures[f"{name} ms"] = ms
        figures[f"{name} GFLOP"] = gflop
        figures[f"{name} % of matmul peak"] = 100 * gflop / (ms / 1000) / peak
    return figures


def number(value):
    """A figure as text."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def slowest_kernels(step, count):
    """The `count` kernels (on a CPU: operators) that take longest in a step.

    Returns [(name, calls, ms, % of all)].
    """
    kind, time_of = torch.autograd.DeviceType.CPU, attrgetter("self_cpu_time_total")
    if ON_GPU:
        kind, time_of = torch.autograd.DeviceType.CUDA, attrgetter("self_device_time_total")
    with torch.profiler.profile() as profiler:
        step()
    events = [event for event in profiler.key_averages() if event.device_type == kind]
    events.sort(key=time_of, reverse=True)
    total = sum(map(time_of, events)) or 1  # microseconds
    return [(e.key, e.count, time_of(e) / 1000, 100 * time_of(e) / total) for e in events[:count]]
