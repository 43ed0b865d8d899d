"""
Trains a GPT to a target validation loss in as little time as possible. Everything is in this file.

    ./run.sh                                               installs packages, makes the data, trains
    python train_gpt.py --track mini                       one process, on a CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  the official run: FineWeb to 3.28 on 8 H100s
    python train_gpt.py --help                             every hyperparameter and its default

The recipe is record 23 of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt, May 2025),
a series of ever faster runs. Numbers with a # are its records. Changes to GPT-2 (the code explains them):
- #3, #4, #6   Muon trains the weight matrices of the blocks (@kellerjordan0, @jxbz, @bozavlado)
- #5           ReLU squared, QK norm, projections that start at zero (@Grad62304977, @kellerjordan0)
- #8, #9, #18  untied head, soft-capped logits (@Grad62304977, @kellerjordan0, @KoszarskyB)
- #9, #11      each block mixes in the token embedding; U-net skips (@Grad62304977, @brendanh0gan)
- #12, #13     attention within documents, in a window that grows (@KoszarskyB, @fernbear.bsky.social)
- #14 to #17   value embeddings, sliding windows, RoPE on half of the channels, a layer without
               attention (@KoszarskyB, @leloykun, @YouJiacheng)
- #19, #20     FP8 head; Q, K and V in one matrix; long and short windows (@YouJiacheng, @leloykun)
- #22, #23     gradients are summed in buckets (@KonstantinWilleke and others, @ryanyang0)
The track mini adds four later ideas: NorMuon, XSA and smear (section 5), and a leaky ReLU (section 4).

The batch of a step is the same for any number of processes: apart from rounding, one GPU and eight GPUs
train the same model.

Plan an hour and a half for sections 4 (the model), 3 (Muon, its optimizer), 9 (optimizers and schedules),
11 (a step) and 13 (the loop), in this order. Then read 5, 7 and 8. Skip at first 1, 2, 6, 10 and 12 (setup,
FP8, attention on CPUs, sums over GPUs, logs).

Shapes in comments: B sequences, S tokens per sequence, T = B * S tokens, N = T / 128 blocks of tokens in
the attention mask, H heads, D channels per head, C = model_dim, V = padded vocabulary size. A shape follows
its tensor's name: docs (T,), and () for a scalar tensor.
"""
# -----------------------------------------------------------------------------
# 1. Preamble

from pathlib import Path

SOURCE = Path(__file__).read_bytes().decode()  # for the log, byte for byte; read now, before an edit

import argparse
import collections
import contextlib
import fcntl
import glob
import itertools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import uuid
import zlib
from dataclasses import asdict, dataclass, field, fields, replace

# PyTorch and OpenMP read these variables when torch is imported
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# Waiting OpenMP threads sleep, not spin: much faster when another process keeps the cores busy
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if platform.machine() == "x86_64":
    # The C++ compiler gets "-march=" and this value, so a second flag fits behind a space. GCC 11 to 13 make
    # wrong code of bf16 transposes for CPUs that they don't know (similar to
    # https://gcc.gnu.org/PR113255): -mtune names any that they do.
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# torchrun sets these variables
RANK = int(os.getenv("RANK", 0))
LOCAL_RANK = int(os.getenv("LOCAL_RANK", 0))  # among the processes of this machine
WORLD_SIZE = int(os.getenv("WORLD_SIZE", 1))
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if ON_GPU else "cpu")
BLOCK_SIZE = 128  # tokens per block of the attention mask; divides sequence lengths

CPUINFO = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
MODEL_NAME = re.search(r"model name\s*: (.*)", CPUINFO)
CPU_MODEL = MODEL_NAME[1] if MODEL_NAME else platform.machine()
CPU_FLAGS = set(re.findall(r"\b(?:avx|amx|fma|asimd|sve|bf16|i8mm)\w*", CPUINFO))
# The dtype of activations: bf16 where there are bf16 matmuls (#10, @kellerjordan0)
DTYPE = torch.bfloat16 if ON_GPU or CPU_FLAGS & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32
# Is the model compiled? PyTorch has two switches that turn it off
COMPILED = "1" not in (os.getenv("TORCH_COMPILE_DISABLE"), os.getenv("TORCHDYNAMO_DISABLE"))


class InputError(Exception):
    """A user error. main prints it as one line, without a traceback."""


def require(condition, message):
    if not condition:
        raise InputError(message)


# -----------------------------------------------------------------------------
# 2. FP8 head and loss (#19, @YouJiacheng)
#
# FP8 numbers have 8 bits: e4m3 (3 bits of mantissa, up to 448) for weights and activations, e5m2
# (2 bits, up to 57,344) for gradients. GPUs multiply them twice as fast as bf16. A tensor is divided
# by a scale and rounded to FP8, so that it fits the range; the matmul multiplies by both scales.

# The scales are the record's. Weights were seen to stay below 24, and gradients of the logits are below
# |probability - 1| <= 1 if that of the loss is 1. So after the division, both stay below 448. That is the
# limit of e4m3; in e5m2, which holds far larger numbers, 448 is merely a safe place.
W_SCALE = 24 / 448
GRAD_SCALE = 1 / 448


def as_scale(value, like):
    """torch._scaled_mm takes scales as float32 tensors on the device."""
    return torch.full((), value, device=like.device)


def column_major(t):
    """Copies t (m, n), so that the numbers of a column are neighbours in memory."""
    return t.T.contiguous().T


def fp8_matmul(a, b, a_scale, b_scale, dtype, fast=False):
    """a (m, k) @ b (k, n), both divided by their scales. a must be contiguous, b column-major. `fast` adds
    up less exactly."""
    return torch._scaled_mm(
        a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast
    )


# Compiling the model doesn't look into a custom op, so the op is compiled here.
@torch.library.custom_op("nanogpt::head_loss", mutates_args=())
@torch.compile(dynamic=False)
def head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the cross-entropy of softcap(x @ w.T) in nats, summed over tokens. x (T, C) is
    RMS-normed; w is (V, C), targets (T,). Returns the loss in float32, and for the backward pass
    the logits (T, V) in bf16, their logsumexp (T,) and both FP8 operands. Head and loss are one op,
    so that the backward pass can make the gradient of the logits in FP8 at once."""
    x_s = x.size(1) ** 0.5 / 448  # elements of RMS-normed inputs are at most sqrt(C)
    x_f8 = (x / x_s).to(torch.float8_e4m3fn)
    w_f8 = (w / W_SCALE).to(torch.float8_e4m3fn)
    logits = fp8_matmul(x_f8, w_f8.T, as_scale(x_s, x), as_scale(W_SCALE, x), torch.bfloat16, fast=True)
    # logsumexp without subtracting the maximum: soft-capped logits are at most 30
    lse = scale_and_softcap(logits, w.size(1)).exp().sum(-1).log()
    target_logits = scale_and_softcap(logits.gather(1, targets[:, None]), w.size(1))[:, 0]
    return (lse - target_logits).sum(), logits, lse, x_f8, w_f8


@head_loss_op.register_fake  # torch.compile needs the shapes and dtypes of the results
def _(x, w, targets):
    logits = x.new_empty(len(x), len(w), dtype=torch.bfloat16)
    lse = logits[:, 0].float()
    return lse.sum(), logits, lse, x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)


@torch.library.custom_op("nanogpt::head_loss_backward", mutates_args=())
@torch.compile(dynamic=False)
def head_loss_backward_op(
    grad: Tensor, logits: Tensor, lse: Tensor, x_f8: Tensor, w_f8: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns grad_x (T, C) in bf16 and grad_w (V, C) in float32, given the loss's scalar gradient."""
    model_dim = w_f8.size(1)
    capped = scale_and_softcap(logits, model_dim)
    probabilities = (capped - lse[:, None]).exp()
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets[:, None]
    grad_capped = probabilities - one_hot.float()
    # capped = 30 s for the sigmoid s of scale_and_softcap, whose derivative is s (1 - s)
    grad_logits = grad_capped * capped * (1 - capped / 30) / (7.5 * model_dim**0.5)
    grad_f8 = (grad_logits / GRAD_SCALE).to(torch.float8_e5m2)
    x_s = model_dim**0.5 / 448
    grad_scale = GRAD_SCALE * grad  # multiplies by the gradient of the loss without another pass
    # logits = x @ w.T, so grad_x = grad_logits @ w, and grad_w = grad_logits.T @ x
    w, x = column_major(w_f8), column_major(x_f8)
    grad_x = fp8_matmul(grad_f8, w, grad_scale, as_scale(W_SCALE, grad), torch.bfloat16)
    grad_T = grad_f8.T.contiguous()
    grad_w = fp8_matmul(grad_T, x, grad_scale, as_scale(x_s, grad), torch.float32)
    return grad_x, grad_w


@head_loss_backward_op.register_fake
def _(grad, logits, lse, x_f8, w_f8, targets):
    return x_f8.bfloat16(), w_f8.float()


def save_for_backward(ctx, inputs, output):
    x, w, targets = inputs
    loss, logits, lse, x_f8, w_f8 = output
    ctx.save_for_backward(logits, lse, x_f8, w_f8, targets)
    ctx.set_materialize_grads(False)  # creates no zero gradients for the other outputs


def head_loss_gradients(ctx, grad, *unused):  # grad is that of the loss; the other outputs have none
    grad_x, grad_w = head_loss_backward_op(grad, *ctx.saved_tensors)
    return grad_x, grad_w, None  # targets have no gradient


head_loss_op.register_autograd(head_loss_gradients, setup_context=save_for_backward)


def uses_fp8(hp: "Hyperparameters"):
    """FP8 needs compute capability 8.9. AMD GPUs (torch.version.hip) may have another format."""
    nvidia = ON_GPU and not torch.version.hip
    return hp.fp8 and nvidia and torch.cuda.get_device_capability(DEVICE) >= (8, 9)


# -----------------------------------------------------------------------------
# 3. Muon (Keller Jordan et al., https://kellerjordan.github.io/posts/muon; #3, #4, #6, #20)


def zeropower_via_newtonschulz5(G, steps=5):
    """Orthogonalizes each matrix of G (..., m, n), m <= n: U S V^T becomes about U V^T, in DTYPE.
    Each step turns a singular value s into a s + b s^3 + c s^5.
    The coefficients of the quintic Newton-Schulz iteration maximize its slope at zero. It doesn't
    converge: singular values end between about 0.5 and 1.5, which doesn't hurt the optimizer."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(DTYPE)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # now no singular value is above 1
    X = X.reshape(-1, *G.shape[-2:])  # baddbmm needs exactly one batch dimension
    for _ in range(steps):
        A = X @ X.mT
        # baddbmm(M, P, Q, beta=s, alpha=t) is s M + t P @ Q, in one kernel
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.view(G.shape)


def wide(matrices):
    """Returns a view (..., m, n) of matrices with m <= n: others are transposed, because the products X X^T of
    Muon are then smaller."""
    return matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices


# its name since PyTorch 2.13, or the one before
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def rank_share(items):
    """Returns this rank's share of a list, or of a tensor's first dimension. An all-gather needs shares
    of one length, so the last item may be in it again (5 items, 2 ranks: 0 1 2, 3 4 4)."""
    size = math.ceil(len(items) / WORLD_SIZE)
    mine = range(RANK * size, (RANK + 1) * size)
    return [items[min(i, len(items) - 1)] for i in mine]


def all_gather(share, count):
    """Starts to collect the shares (n, ...) of all ranks. Returns (count, ...), without repeated items, and
    the handle to wait for before reading it: None if there is nothing to wait for."""
    if WORLD_SIZE == 1:
        return share, None
    whole = share.new_empty(WORLD_SIZE * len(share), *share.shape[1:])
    return whole[:count], all_gather_single(whole, share, async_op=True)


def all_gather_now(share, count):
    whole, handle = all_gather(share, count)
    if handle:
        handle.wait()
    return whole


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz: the momentum of a matrix, with singular value decomposition
    U S V^T, becomes about U V^T, so that directions with small gradients move as far as those with
    large ones. Each rank owns a share
    of the parameters (..., rows, cols): it keeps their momentum and computes their updates. These are
    rounded to bf16, which halves what ranks exchange (one rank rounds, too, for the same results). The
    all-gather of one group's updates overlaps with computing the next group's. With beta2 > 0 this is
    NorMuon (section 5)."""

    def __init__(self, params, lr, momentum, ns_steps, beta2):
        groups = collections.defaultdict(list)
        # A group has those whose wide views have one shape, for one batched matmul. Here there are three:
        # qkv_w (3, C, C), attention's c_proj (C, C), and c_fc and c_proj of the MLP (C, 4 C).
        for p in params:
            groups[wide(p).shape].append(p)
        super().__init__(
            [dict(params=group) for group in groups.values()],
            dict(lr=lr, momentum=momentum, ns_steps=ns_steps, beta2=beta2),
        )

    def updates(self, group):
        """Returns the updates of this rank's share, bf16 (share, ..., rows, cols), rows <= cols."""
        gradients = torch.stack([wide(p.grad) for p in rank_share(group["params"])])
        # One momentum tensor for the whole group. PyTorch files state under a parameter: we take the first.
        state = self.state[group["params"][0]]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradients)
        momentum_buffer = state["momentum_buffer"]  # the exponential moving average of the gradients
        momentum_buffer.lerp_(gradients, 1 - group["momentum"])  # m * buffer + (1 - m) * gradients
        nesterov = gradients.lerp(momentum_buffer, group["momentum"])  # the same mix once more
        updates = zeropower_via_newtonschulz5(nesterov, group["ns_steps"])
        if group["beta2"]:
            updates = normalize_channels(updates, state, group["beta2"])
        return updates.bfloat16()

    @torch.no_grad()
    def step(self):
        gathers = []
        for group in self.param_groups:
            gathers.append(all_gather(self.updates(group), len(group["params"])))
        for group, (updates, handle) in zip(self.param_groups, gathers):
            if handle:
                handle.wait()
            for p, update in zip(group["params"], updates):
                # An orthogonal matrix (out, in) with out > in keeps the norm of its input, but spreads it
                # over more channels: the RMS falls by (in / out) ** 0.5. This undoes it, for c_fc.
                scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
                view_of_p = wide(p)
                view_of_p.add_(update, alpha=-group["lr"] * scale)

    def state_dict(self):
        """The state of all ranks, which doesn't depend on their number. Call it on all ranks."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            first = group["params"][0]  # in a state_dict, a parameter is its index
            state = saved["state"].get(first, {})  # none before the first step
            whole = {k: all_gather_now(share, len(group["params"])) for k, share in state.items()}
            saved["state"][first] = whole
        return saved

    def load_state_dict(self, saved):
        mine = {}
        for index, state in saved["state"].items():
            mine[index] = {name: torch.stack(rank_share(whole)) for name, whole in state.items()}
        super().load_state_dict(saved | {"state": mine})


# -----------------------------------------------------------------------------
# 4. Model. In fineweb, it has 12 layers (mini: 4), of which some differ:
#
#   layer               0    1    2    3    4    5    6    7    8    9   10   11
#   attention window  long  .    .    .  long  .    .   none  .    .    .   long  (. is half of it)
#   value embeddings    A    B    C                                  A    B    C
#   U-net: keeps x as   a    b    c    d    e    f
#          adds at first                             f    e    d    c    b    a
#
#   x = x0 = norm(embedding of each token)
#   each layer:    x = x + w * kept output                     (layers 6 to 11)
#                  x = r0 * x + r1 * x0
#                  x = x + attention(norm(x)), in which V = v0 * V + v1 * value embedding
#                  x = x + MLP(norm(x)), with 4 C hidden channels
#   at the end:    logits = scale_and_softcap(norm(x) @ head.T), loss = cross-entropy with the next token
#
# Each layer learns its own w (skip_weights), r0 and r1 (residual_lambdas), v0 and v1 (value_lambdas). Value
# embeddings are a second embedding of each token. In a pass of one sequence of 49,152 tokens, x is
# (1, 49152, 768), Q, K and V (1, 49152, 6, 128), the logits (49152, 50304).


def norm(x):
    """RMS norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """A linear layer without bias. Weights (out, in) are float32 and cast to the dtype of x."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):  # (..., in) -> (..., out)
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Rotary embeddings (RoPE: https://arxiv.org/abs/2104.09864): each pair of channels (x1, x2) turns by
    position * frequency, so that q . k depends on the distance of the two tokens. Half of the D/2 pairs
    don't turn (#17, @YouJiacheng)."""

    def __init__(self, head_dim, max_seq_len):
        super().__init__()
        # in radians a token, from 1 to 1/1024
        rotating = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
        freqs = F.pad(rotating, (0, head_dim // 4))  # (D/2,), zeros in the second half
        theta = torch.outer(torch.arange(max_seq_len), freqs)  # (max_seq_len, D/2)
        self.register_buffer("rotations", torch.stack([theta.cos(), theta.sin()]), persistent=False)

    def forward(self, x):  # (B, S, H, D)
        cos, sin = self.rotations[:, : x.size(1), None]  # each (S, 1, D/2)
        x1, x2 = x.float().chunk(2, -1)  # pair i has the channels i and i + D/2
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], -1).type_as(x)


# The mask (#12, @KoszarskyB; #13, @fernbear.bsky.social; #16, @YouJiacheng). A query attends to a key if
# - the key is not later than the query,
# - both are in the same document, and
# - the key's block is one of the last window_blocks blocks, including the query's own.
# On GPUs, FlexAttention takes it as a BlockMask. Section 6 has the version for CPUs.


def document_ids(input_seq, eot_token):
    """Returns each token's document, as a number from 1 on, int32 (T,), for input_seq (B, S). A document
    starts at each end-of-text token and at the start of each sequence."""
    begins = input_seq == eot_token
    begins[:, 0] = True
    return begins.flatten().cumsum(0, dtype=torch.int32)


def block_lists(kind, visible):
    """Converts a matrix of blocks, bool (N, N), to BlockMask's two arguments of this kind (kv, q, ...): for
    each row the number of True entries, int32 (1, 1, N), and a list of their columns, int32 (1, 1, N, N).
    The row True False True has the count 2 and the list 0 2 0, of which FlexAttention reads two."""
    n = len(visible)
    counts = visible.sum(-1, dtype=torch.int32)
    columns = torch.arange(n, dtype=torch.int32, device=visible.device).expand(n, n)
    # Sorting would do, but compiles for minutes. Instead, the column of a True entry is written to the
    # place in the list that is the number of True entries before it; others to place n, which is cut off.
    places = torch.where(visible, visible.cumsum(-1) - 1, n)
    # lists[row, places[row, column]] = column
    lists = visible.new_zeros(n, n + 1, dtype=torch.int32).scatter(-1, places, columns)
    lists = lists[:, :n].contiguous()  # FlexAttention's kernels read rows as contiguous memory
    return {f"{kind}_num_blocks": counts[None, None], f"{kind}_indices": lists[None, None]}


def flex_block_mask(docs, window_blocks):
    """Makes the BlockMask of docs (T,). window_blocks () is a tensor, so that a growing window
    doesn't recompile. FlexAttention computes fully visible blocks without a mask, asks document_causal in
    partly visible ones, and skips the others."""

    def document_causal(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (docs[q_idx] == docs[kv_idx])

    first_doc = docs[::BLOCK_SIZE]  # the document of each block's first token: (N,)
    last_doc = docs[BLOCK_SIZE - 1 :: BLOCK_SIZE]  # and of its last token
    block = torch.arange(len(first_doc), dtype=torch.int32, device=docs.device)
    # Matrices (N, N): a row is a query block, a column a key block. Document numbers never fall, and a visible
    # key block isn't later than the query block. So both have a document in common if the key block's last
    # document >= the query block's first. Both lie in one document if the key block's first document == the
    # query block's last.
    share_a_document = last_doc >= first_doc[:, None]
    are_one_document = first_doc == last_doc[:, None]
    distance = block[:, None] - block
    in_window = distance < window_blocks
    visible = in_window & (distance >= 0) & share_a_document
    # A block sees only a part of itself, so distance > 0. (PyTorch 2.11 can't compile the simpler
    # visible & (distance > 0) & are_one_document.)
    full = in_window & (distance > 0) & are_one_document
    partial = visible & ~full
    return BlockMask(
        (len(docs), len(docs)),
        **block_lists("kv", partial),  # the key blocks of each query block, for the forward pass
        **block_lists("full_kv", full),
        **block_lists("q", partial.T),  # the query blocks of each key block, for the backward pass
        **block_lists("full_q", full.T),
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=document_causal,
    )


def make_mask(docs, window_blocks, span):
    """Makes the mask of docs (T,) for attention. On a CPU, a mask always has room for `span` blocks,
    the longest window, so its shape is constant."""
    if docs.is_cuda:
        return flex_block_mask(docs, window_blocks)
    return portable_mask(docs, window_blocks, span)


def attention(q, k, v, mask, scale=0.12):
    """q, k, v (B, S, H, D) -> (B, S, H, D). The sequences are concatenated to T tokens: in the
    mask, each begins a document. QK norm makes 1 / sqrt(D) needless: the scale 0.12 was tuned (#20)."""
    if not isinstance(mask, BlockMask):
        return portable_attention(q, k, v, mask, scale)
    queries, keys, values = (t.flatten(0, 1).transpose(0, 1)[None] for t in (q, k, v))  # (1, H, T, D)
    y = flex_attention(queries, keys, values, block_mask=mask, scale=scale)
    return y[0].transpose(0, 1).reshape(q.shape)


class CausalSelfAttention(nn.Module):
    def __init__(self, hp: "Hyperparameters", rotary):
        super().__init__()
        self.num_heads = hp.num_heads
        self.rotary = rotary
        # Q, K and V in one matmul
        self.qkv_w = nn.Parameter(torch.empty(3, hp.model_dim, hp.model_dim))
        self.value_lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))  # of V and of the value embedding
        self.c_proj = CastedLinear(hp.model_dim, hp.model_dim)  # starts at zero, see init_weights
        self.xsa_weights = nn.Parameter(torch.zeros(hp.num_heads)) if hp.xsa else None

    def forward(self, x, ve, mask):  # x, normed (B, S, C), ve (B, S, C) or None -> (B, S, C)
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)  # each (B, S, H, D)
        # QK norm (#5): scores are at most scale * D, which portable_attention needs
        q = self.rotary(norm(q))
        k = self.rotary(norm(k))
        v = self.value_lambdas[0] * v
        if ve is not None:
            v = v + self.value_lambdas[1] * ve.view_as(v)  # tables have as many channels as V
        y = attention(q, k, v, mask)
        if self.xsa_weights is not None:
            y = exclusive_self_attention(y, v, self.xsa_weights)
        return self.c_proj(y.flatten(2))


class MLP(nn.Module):
    def __init__(self, hp: "Hyperparameters"):
        super().__init__()
        self.relu_slope = hp.relu_slope
        self.c_fc = CastedLinear(hp.model_dim, 4 * hp.model_dim)
        self.c_proj = CastedLinear(4 * hp.model_dim, hp.model_dim)  # starts at zero

    def forward(self, x):
        x = self.c_fc(x)
        # slope 0 is ReLU squared (https://arxiv.org/abs/2109.08668), others a later idea of @parinzee
        # (https://github.com/openai/parameter-golf/pull/493)
        x = F.leaky_relu(x, self.relu_slope).square()
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, hp: "Hyperparameters", layer, rotary):
        super().__init__()
        self.residual_lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # of x and x0
        self.attn = None if layer in hp.attn_free_layers else CausalSelfAttention(hp, rotary)
        self.mlp = MLP(hp)

    def forward(self, x, x0, ve, mask):  # x and x0, the token embeddings: (B, S, C) -> (B, S, C)
        # an indexed lambda is a scalar tensor (), so the product with a bf16 x stays bf16
        x = self.residual_lambdas[0] * x + self.residual_lambdas[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), ve, mask)
        return x + self.mlp(norm(x))


def scale_and_softcap(logits, model_dim):
    """Returns 30 sigmoid(z / 7.5) = 15 tanh(z / 15) + 15 for z = logits / sqrt(model_dim): z soft-capped at
    15 (Gemma 2, https://arxiv.org/abs/2408.00118; #18, @KoszarskyB), plus 15, which the softmax ignores."""
    return 30 * torch.sigmoid(logits.float() / (7.5 * model_dim**0.5))


def pad_vocab(vocab_size):
    """Rounds up to a multiple of 64, for faster matmuls (#5)."""
    return math.ceil(vocab_size / 64) * 64


def parameter_kind(name, p):
    """Returns head, embedding, matrix or scalar (also for a vector). It decides a parameter's initial values
    (init_weights) and its optimizer (build_optimizers). For a small matrix, such as a gate, which Muon
    doesn't suit, add a kind to all three functions, or make it a vector."""
    if name == "lm_head.weight":
        return "head"
    if name.split(".")[0] in ("embed", "value_embeds"):
        return "embedding"
    return "matrix" if p.ndim >= 2 else "scalar"


class GPT(nn.Module):
    """GPT(hp) is a model. Called with input_seq (B, S) int32, target_seq (B, S) int64 and window_blocks ()
    int32, the long window, it returns the cross-entropy in nats, summed over tokens. S is a multiple of
    128. Embeddings, and so activations, have dtype DTYPE; all other parameters are float32."""

    val_slice = 32768  # tokens whose logits validation computes at a time, to save memory

    def __init__(self, hp: "Hyperparameters"):
        super().__init__()
        self.hp = hp
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim, dtype=DTYPE)
        # Value embeddings: tables that are added to V in attention, a second embedding of each token
        # (https://arxiv.org/abs/2410.17897; #14, @KoszarskyB; #17, @YouJiacheng)
        self.value_embeds = nn.ModuleList()
        for _ in range(hp.num_value_embeds):
            self.value_embeds.append(nn.Embedding(hp.vocab_size, hp.model_dim, dtype=DTYPE))
        if hp.smear:
            self.smear_gate = nn.Parameter(torch.zeros(12))  # reads 12 channels (section 5)
            self.smear_scale = nn.Parameter(torch.zeros(1))
        rotary = Rotary(hp.model_dim // hp.num_heads, max(hp.train_seq_len, hp.val_seq_len))
        self.blocks = nn.ModuleList(Block(hp, i, rotary) for i in range(hp.num_layers))
        if hp.num_layers > 1:
            self.skip_weights = nn.Parameter(torch.ones(hp.num_layers // 2))
        self.lm_head = CastedLinear(hp.model_dim, pad_vocab(hp.vocab_size))  # starts at zero
        self.init_weights(hp.seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """Sets the initial values of all parameters but scalars and vectors. Each has its own random
        generator, seeded with the seed and the name, so that adding a parameter doesn't change the
        others."""
        for name, p in self.named_parameters():
            rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            kind = parameter_kind(name, p)
            if kind == "embedding":
                p.copy_(torch.randn(p.shape, generator=rng))  # drawn in float32, then rounded
            elif kind == "head" or name.endswith("c_proj.weight"):
                p.zero_()  # call the last matrix of your own MLP c_proj, too: at first, blocks add nothing
            elif kind == "matrix":
                std = 0.5 * p.size(-1) ** -0.5  # p is (..., out, in)
                bound = 3**0.5 * std  # uniform(-bound, bound) has this std
                p.uniform_(-bound, bound, generator=rng)
            elif kind != "scalar":  # a new one
                raise InputError(f"{name}: init_weights has no initial values for the kind {kind}")

    def masks(self, docs, window_blocks):
        """Returns the masks of layers with the long window, and with half of it (#20, @leloykun and others)."""
        span = math.ceil(self.hp.max_window / BLOCK_SIZE)  # the longest window in blocks
        long = make_mask(docs, window_blocks, span)
        short = make_mask(docs, (window_blocks // 2).clamp_min(1), max(1, span // 2))
        return long, short

    def forward(self, input_seq, target_seq, window_blocks):
        docs = document_ids(input_seq, self.hp.eot_token)  # (T,)
        long, short = self.masks(docs, window_blocks)
        n = len(self.blocks)
        embeddings = [table(input_seq) for table in self.value_embeds]  # each (B, S, C)
        ve = embeddings + [None] * (n - 2 * len(embeddings)) + embeddings  # of each layer
        x = self.embed(input_seq)  # (B, S, C)
        if self.hp.smear:
            x = smear(x, self.smear_gate, self.smear_scale)
        x = x0 = norm(x)
        # U-net (#11): of 12 layers, 6 adds the output of 5, 7 that of 4, ..., 11 that of 0
        num_kept = n // 2  # the first num_kept layers keep their outputs
        first_adding = n - num_kept  # from this layer on, one is added; a middle layer does neither
        kept = []
        for i, block in enumerate(self.blocks):
            if i >= first_adding:
                x = x + self.skip_weights[i - first_adding] * kept.pop()
            mask = long if i in self.hp.long_window_layers else short
            x = block(x, x0, ve[i], mask)
            if i < num_kept:
                kept.append(x)
        x = norm(x).flatten(0, 1)  # (T, C)
        targets = target_seq.flatten()
        if self.training:
            return self.loss(x, targets)
        slices = zip(x.split(self.val_slice), targets.split(self.val_slice))
        return sum(self.loss(*part) for part in slices)

    def loss(self, x, targets):
        """x (T, C), targets (T,) -> the cross-entropy in nats (natural logarithms), summed over tokens.
        Validation never uses FP8."""
        if self.training and uses_fp8(self.hp):
            return head_loss_op(x, self.lm_head.weight, targets)[0]
        logits = scale_and_softcap(self.lm_head(x), self.hp.model_dim)
        return F.cross_entropy(logits, targets, reduction="sum")


# -----------------------------------------------------------------------------
# 5. Later ideas, which the track mini uses


def normalize_channels(updates, state, beta2):
    """NorMuon (https://arxiv.org/abs/2510.05491; #41, @li_zichong): divides each channel of Muon's
    updates (n, ..., rows, cols), rows <= cols, by its running RMS, and keeps the norm of each matrix.
    In a wide matrix (C, 4 C) of the MLP, a channel is a column: the C weights of a hidden unit. In a
    square one (Q, K, V, the output of attention), it is a row: the C weights of an output."""
    rows, cols = updates.shape[-2:]
    within_channel = -1 if rows == cols else -2  # the dimension over which to take the mean
    updates = updates.float()
    mean_squares = updates.square().mean(within_channel, keepdim=True)
    # It starts at zero, without Adam's bias correction: that factor is the same for all channels, and the
    # old norm removes it
    running = state.setdefault("mean_squares", torch.zeros_like(mean_squares))
    running.lerp_(mean_squares, 1 - beta2)
    scaled = updates * running.clamp_min(1e-10).rsqrt()
    old_norm = updates.norm(dim=(-2, -1), keepdim=True)
    new_norm = scaled.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)
    return old_norm * (scaled / new_norm)


def exclusive_self_attention(y, v, weights):
    """XSA (Shuangfei Zhai, https://arxiv.org/abs/2603.09078; #82, @djdumpling): subtracts a fraction
    of y's component along the token's own value. The fraction is tanh(weight), learned for each
    head. y, v (B, S, H, D), weights (H,) -> (B, S, H, D)."""
    dot = (y * v).sum(-1, keepdim=True)  # (B, S, H, 1)
    square = (v * v).sum(-1, keepdim=True).clamp_min(1e-8)  # avoids 0 / 0
    fraction = weights.tanh().type_as(y)[:, None]  # (H, 1)
    return y - fraction * (dot / square) * v


def smear(x, gate, scale):
    """Adds scale * sigmoid(gate . x) * (the previous token's embedding) to each embedding of x
    (B, S, C). Only the token's own first 12 channels decide. Documents aren't separated. (#34, @classiclarryd)"""
    previous = F.pad(x, (0, 0, 1, 0))[:, :-1]  # x shifted by one token, with zeros in front
    opening = (x[..., : len(gate)] @ gate.type_as(x)).sigmoid()  # (B, S)
    # scale is (1,), so unlike a scalar tensor () it makes the product float32
    return x + (scale * opening).type_as(x).unsqueeze(-1) * previous


# -----------------------------------------------------------------------------
# 6. Attention on CPUs, where FlexAttention has no backward pass


def split_blocks(t):
    """(B, S, H, D) -> (N, H, 128, D)"""
    return t.reshape(-1, BLOCK_SIZE, *t.shape[2:]).transpose(1, 2)


def with_previous_blocks(blocks, span):
    """(N, H, 128, D) -> (N, H, span * 128, D): each block, preceded by span - 1 earlier ones or zeros."""
    # compiled, F.pad is slower
    padded = torch.cat([blocks.new_zeros(span - 1, *blocks.shape[1:]), blocks])
    shifted = [padded[i : i + len(blocks)] for i in range(span)]  # the earliest first, the own one last
    return torch.cat(shifted, dim=2)


def portable_mask(docs, window_blocks, span):
    """Makes the mask of docs (T,) for portable_attention: bool (N, 1, 128, span * 128), True where
    visible. The last dimension covers the keys of the query's own block and of the span - 1 blocks
    before it. window_blocks () is a tensor and span a constant, so that a growing window doesn't recompile."""
    query_docs = docs.view(-1, 1, BLOCK_SIZE, 1)  # (N, 1, 128, 1)
    # zeros, in front, match no document
    key_docs = with_previous_blocks(query_docs, span).mT  # (N, 1, 1, span * 128)
    # positions, counted from the start of the query's block; int32 is compared faster than int64
    key = torch.arange((1 - span) * BLOCK_SIZE, BLOCK_SIZE, dtype=torch.int32, device=docs.device)
    query = key[-BLOCK_SIZE:, None]  # 0 to 127, a column
    first_key = (1 - window_blocks) * BLOCK_SIZE  # of the window
    return (query_docs == key_docs) & (first_key <= key) & (key <= query)


def portable_attention(q, k, v, mask, scale):
    """Attention block by block, in O(T * span). Compiled, it is much faster on a CPU than
    scaled_dot_product_attention with a mask. q, k, v (B, S, H, D) -> (B, S, H, D)."""
    span = mask.size(-1) // BLOCK_SIZE
    bias = torch.where(mask, 0.0, -math.inf).type_as(q)
    keys = with_previous_blocks(split_blocks(k), span)  # (N, H, span * 128, D)
    values = with_previous_blocks(split_blocks(v), span)
    # no need to subtract the maximum: with QK norm, scores are at most scale * D, about 15
    scores = split_blocks(q * scale) @ keys.mT  # (N, H, 128, span * 128)
    weights = (scores + bias).exp()
    y = weights @ values  # (N, H, 128, D)
    y = y / weights.sum(-1, keepdim=True, dtype=torch.float32)
    return y.type_as(v).transpose(1, 2).reshape(q.shape)


# -----------------------------------------------------------------------------
# 7. Data. A shard is a header of 256 int32 (magic, version, number of tokens, zeros) and uint16 tokens,
# all little-endian.


def find_shards(pattern):
    files = sorted(glob.glob(pattern))
    require(files, f"no shards match {pattern}; ./run.sh makes them, or the scripts in data/")
    return files


def shard_length(file):
    """Returns the number of tokens in a shard."""
    header = np.fromfile(file, "<i4", 3).tolist()
    size = os.path.getsize(file)
    expected = [20240520, 1, (size - 1024) // 2]
    whole = header == expected and size % 2 == 0
    require(whole, f"{file} is cut off, or no shard; copy it again")
    return header[2]


def read_tokens(file, start, count):
    """Reads tokens (count,) int32."""
    tokens = np.fromfile(file, "<u2", count, offset=1024 + 2 * start)
    return torch.from_numpy(tokens.astype(np.int32))


def distributed_data_generator(pattern, batch_size, rank=0, world_size=1):
    """Yields this rank's tokens of each batch, int32 (batch_size / world_size + 1,), because
    targets are shifted by one. Trailing tokens of a shard that don't fill a batch, and one more, are dropped."""
    local = batch_size // world_size
    for file in find_shards(pattern):
        for start in range(0, shard_length(file) - batch_size, batch_size):
            yield read_tokens(file, start + rank * local, local + 1)


def token_checksum(pattern, batch_size, steps, vocab_size):
    """Reads and checks all tokens of the run (1.4 GB of fineweb): better an error now than hours later."""
    batches = distributed_data_generator(pattern, batch_size)
    count = checksum = 0
    change = f"change --vocab_size {vocab_size} and --eot_token, or the data"
    for tokens in itertools.islice(batches, steps):
        require(tokens.max() < vocab_size, f"{pattern} has token {tokens.max()}: {change}")
        count += 1
        checksum = zlib.crc32(tokens.numpy(), checksum)
    require(
        count == steps,
        f"{pattern} has {count} batches of {batch_size} tokens, not {steps}, and none is read twice: add "
        f"shards, or lower --num_iterations to {count} (of validation shards: --val_tokens)",
    )
    return checksum


# -----------------------------------------------------------------------------
# 8. Hyperparameters. `--name value` changes any of them.


def setting(default, text):
    """A field of Hyperparameters, with its default in the track fineweb and its line in --help."""
    return field(default=default, metadata={"text": text})


@dataclass(frozen=True)
class Hyperparameters:
    track: str = setting("fineweb", "set of defaults: fineweb, or mini, the default without a GPU")
    # data
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "training shards, in order")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    val_tokens: int = setting(10_485_760, "validation tokens; fixed, to compare losses")
    batch_tokens: int = setting(8 * 48 * 1024, "tokens per step, summed over all processes")
    train_seq_len: int = setting(48 * 1024, "tokens per training sequence, of many documents")
    val_seq_len: int = setting(4 * 64 * 1024, "tokens per validation sequence")
    sequences_per_pass: int = setting(1, "sequences in a micro-batch, or fewer, to make all equal")
    vocab_size: int = setting(50257, "number of token ids")
    eot_token: int = setting(50256, "token id that begins a document")
    # model
    num_layers: int = setting(12, "number of blocks")
    num_heads: int = setting(6, "attention heads per block")
    model_dim: int = setting(768, "channels of the residual stream, shared by the heads")
    num_value_embeds: int = setting(3, "N tables of value embeddings: first and last N layers")
    attn_free_layers: tuple[int, ...] = setting((7,), "layers without attention, such as 0,7 or none")
    long_window_layers: tuple[int, ...] = setting((0, 4, 11), "layers with the full window")
    max_window: int = setting(1728, "attention window at the end, in tokens; rounded up to blocks")
    xsa: bool = setting(False, "true to subtract a part of the token's own value (section 5)")
    smear: bool = setting(False, "true to add a part of the previous token's embedding")
    relu_slope: float = setting(0.0, "slope of the MLP's ReLU below zero, before squaring")
    fp8: bool = setting(True, "true to compute the head in FP8 in training, on GPUs that can")
    # optimization
    num_iterations: int = setting(1770, "training steps")
    cooldown_frac: float = setting(0.4, "learning rates decay in this last fraction of steps")
    final_lr_frac: float = setting(0.1, "final learning rate, relative to the initial one")
    head_lr: float = setting(0.22, "Adam's learning rate for the head")
    embed_lr: float = setting(0.6, "Adam's learning rate for token and value embeddings")
    scalar_lr: float = setting(0.04, "Adam's learning rate for scalars and vectors")
    adam_beta1: float = setting(0.8, "decay of Adam's first moment")
    adam_beta2: float = setting(0.95, "decay of Adam's second moment")
    muon_lr: float = setting(0.05, "Muon's learning rate, for the matrices of the blocks")
    ns_steps: int = setting(5, "Newton-Schulz iterations")
    muon_momentum: float = setting(0.95, "Muon's momentum after its warm-up")
    muon_momentum_start: float = setting(0.85, "Muon's momentum at the start")
    muon_momentum_warmup: int = setting(300, "steps in which Muon's momentum rises")
    muon_beta2: float = setting(0.0, "decay of NorMuon's mean squares; 0 for plain Muon")
    # the run
    seed: int = setting(0, "seed of the initial weights")
    warmup_steps: int = setting(10, "untimed steps on random tokens; the weights are then reset")
    val_loss_every: int = setting(125, "steps between validations; 0: only at the end")
    target_val_loss: float = setting(3.28, "validation loss to reach")


FINEWEB = Hyperparameters()
# A small version for two CPU cores: Shakespeare, in a vocabulary of 1,024 tokens
MINI = replace(
    FINEWEB,
    track="mini",
    train_files="data/shakespeare_1024/shakespeare_train_*.bin",
    val_files="data/shakespeare_1024/shakespeare_val_*.bin",
    val_tokens=131_072,
    batch_tokens=2048,
    train_seq_len=1024,
    val_seq_len=8192,
    sequences_per_pass=2,
    vocab_size=1024,
    eot_token=1023,
    num_layers=4,
    num_heads=1,
    model_dim=64,
    num_value_embeds=1,
    attn_free_layers=(),
    long_window_layers=(0, 3),
    max_window=256,
    xsa=True,
    smear=True,
    relu_slope=0.5,
    num_iterations=360,
    cooldown_frac=1.0,
    final_lr_frac=0.0,
    head_lr=0.28,
    embed_lr=0.56,
    scalar_lr=0.056,
    muon_lr=0.07,
    adam_beta2=0.98,
    muon_momentum=0.86,
    muon_momentum_warmup=111,
    muon_beta2=0.95,
    warmup_steps=3,
    val_loss_every=90,
    target_val_loss=2.98,
)
TRACKS = {"fineweb": FINEWEB, "mini": MINI}


def check_hyperparameters(hp: Hyperparameters, world_size):
    """Refuses sizes that don't fit together."""
    for tokens, seq_len in [("batch_tokens", "train_seq_len"), ("val_tokens", "val_seq_len")]:
        total, length = getattr(hp, tokens), getattr(hp, seq_len)
        multiple = f"a multiple of {world_size} (processes) times --{seq_len} {length}"
        require(length % BLOCK_SIZE == 0, f"--{seq_len} {length}: must be a multiple of {BLOCK_SIZE}")
        require(total % (world_size * length) == 0, f"--{tokens} {total}: must be {multiple}")
    require(hp.num_iterations > 0, "--num_iterations must be more than 0")
    # half of the channels of a head rotate, in pairs
    require(
        hp.model_dim % (4 * hp.num_heads) == 0, "--model_dim must be a multiple of 4 times --num_heads"
    )
    require(
        2 * hp.num_value_embeds <= hp.num_layers,
        "--num_value_embeds must be at most half of --num_layers",
    )
    last = hp.num_layers - 1
    exist = {*hp.attn_free_layers, *hp.long_window_layers} <= {*range(hp.num_layers)}
    require(
        exist and last in hp.long_window_layers,
        f"layers are 0 to {last}: change --attn_free_layers, or --long_window_layers, which must have {last}",
    )


def true_or_false(text):  # bool("false") is True; of a ValueError, argparse makes a message
    return bool(["false", "true"].index(text))


def layers(text):
    return tuple(int(layer) for layer in text.split(",") if text != "none")


# How the value of an option is read, by the type of the setting; others are read by the type itself
PARSERS = {bool: true_or_false, tuple[int, ...]: layers}


def parse_arguments(argv, tracks=TRACKS):
    """Returns the options of the run, and the hyperparameters: the track's defaults with the
    changes from the command line, which are also in args.given. Raises InputError."""
    parser = argparse.ArgumentParser(usage="%(prog)s [--NAME VALUE ...]", allow_abbrev=False)

    def fail(message):
        raise InputError(f"{message}; --help lists all options")

    parser.error = fail
    add = parser.add_argument
    add("--log_dir", default="logs", help="folder for logs and checkpoints; default: logs")
    add("--num_runs", default=1, type=int, help="runs, with seeds from --seed on; default: 1")
    add("--save_checkpoint", action="store_true", help="save LOG_DIR/RUN.pt at each validation")
    add("--print_settings", action="store_true", help="print all settings as JSON, and end")
    add("--resume", help="a checkpoint; ./run.sh also takes latest, for the newest unfinished run")
    for entry in fields(tracks["fineweb"]):
        defaults = [f"{track} {getattr(hp, entry.name)}" for track, hp in tracks.items()]
        add(
            f"--{entry.name}",
            type=PARSERS.get(entry.type, entry.type),
            metavar=entry.type.__name__,
            help=f"{entry.metadata.get('text', '')}; {', '.join(defaults)}",
            default=argparse.SUPPRESS,
        )
    args = parser.parse_args(argv)
    require(args.num_runs > 0, "--num_runs must be more than 0")
    # args has only the settings that were given, because of SUPPRESS
    args.given = {k: v for k, v in vars(args).items() if hasattr(tracks["fineweb"], k)}
    track = args.given.get("track", "fineweb" if ON_GPU else "mini")
    require(track in tracks, f"--track {track}: must be one of {', '.join(tracks)}")
    hp = replace(tracks[track], **args.given)
    args.last_seed = hp.seed + args.num_runs - 1
    return args, hp


# -----------------------------------------------------------------------------
# 9. Optimizers and schedules


def build_model(hp: Hyperparameters):
    torch.manual_seed(hp.seed)  # in case you add a random vector, which init_weights leaves alone
    model = GPT(hp).to(DEVICE)  # the same on all ranks
    for name, module in model.named_modules():
        require(
            type(module) is not nn.Linear or module.weight.dtype == DTYPE,
            f"{name}: nn.Linear doesn't take activations in {DTYPE}; use CastedLinear",
        )
    return model


def build_optimizers(model, hp: Hyperparameters):
    """Muon trains the matrices of the blocks; Adam the head, the embeddings, and the scalars. You can
    return other optimizers, and any number of them. The log lists what each one trains."""
    params = collections.defaultdict(list)
    for name, p in model.named_parameters():
        if p.requires_grad:
            params[parameter_kind(name, p)].append(p)
    groups = [
        dict(params=params["head"], lr=hp.head_lr),
        dict(params=params["embedding"], lr=hp.embed_lr),
        dict(params=params["scalar"], lr=hp.scalar_lr),
    ]
    # no weight decay; for the small gradients of rare tokens, Adam's usual epsilon, 1e-8, would be too large
    adam = torch.optim.Adam(groups, betas=(hp.adam_beta1, hp.adam_beta2), eps=1e-10, fused=True)
    muon = Muon(params["matrix"], hp.muon_lr, hp.muon_momentum, hp.ns_steps, hp.muon_beta2)
    return [adam, muon]


def parameter_table(model, optimizers):
    """Returns the log's list of parameters, in which all blocks share a line, blocks.*. Raises InputError
    unless each parameter that is trained is in exactly one optimizer."""
    require(isinstance(optimizers, list), "build_optimizers must return a list, also of one optimizer")
    lines = []
    for name, p in model.named_parameters():
        found = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if p in set(group["params"]):
                    found.append(f"{type(optimizer).__name__}, lr {group['lr']:g}")
        text = " and ".join(found) or "no optimizer"
        expected = 1 if p.requires_grad else 0
        needed = "it needs one, or none if it is frozen: change build_optimizers"
        require(len(found) == expected, f"{name} has {text}; {needed}")
        lines.append(f"{re.sub('[0-9]+', '*', name):34} {list(p.shape)} {text}")
    return "\n".join(dict.fromkeys(lines))  # each once


def get_lr(step, hp: Hyperparameters):
    """Returns the multiplier of all learning rates: 1, then a linear decay to final_lr_frac."""
    remaining = 1 - step / hp.num_iterations
    if remaining >= hp.cooldown_frac:
        return 1.0
    w = remaining / hp.cooldown_frac
    return w + (1 - w) * hp.final_lr_frac


def get_muon_momentum(step, hp: Hyperparameters):
    """Returns Muon's momentum: it rises linearly from muon_momentum_start to muon_momentum, and stays there."""
    frac = step / hp.muon_momentum_warmup if step < hp.muon_momentum_warmup else 1
    return (1 - frac) * hp.muon_momentum_start + frac * hp.muon_momentum


def get_window_blocks(step, hp: Hyperparameters):
    """Returns the long window in blocks, a tensor () int32 (see flex_block_mask). It grows linearly."""
    blocks = max(1, math.ceil(hp.max_window * (step / hp.num_iterations) / BLOCK_SIZE))
    return torch.full((), blocks, dtype=torch.int32, device=DEVICE)


def set_schedules(optimizers, step, hp: Hyperparameters):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            initial_lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = initial_lr * get_lr(step, hp)
            if isinstance(optimizer, Muon):
                group["momentum"] = get_muon_momentum(step, hp)


# -----------------------------------------------------------------------------
# 10. Gradient buckets: what DistributedDataParallel does, in the open (#22, @KonstantinWilleke and others;
# #23, @ryanyang0)


def gradient_buckets(model, bucket_bytes):
    """Returns lists of parameters. Those of a bucket have one dtype, and at most bucket_bytes together; a
    larger one is alone. The order is about that in which a backward pass reaches them."""
    buckets = []
    newest = {}  # of each dtype, the bucket that may have room
    for p in reversed(list(model.parameters())):
        if not p.requires_grad:
            continue
        bucket = newest.get(p.dtype)
        if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > bucket_bytes:
            bucket = []
            buckets.append(bucket)
            newest[p.dtype] = bucket
        bucket.append(p)
    return buckets


def start_all_reduce(bucket):
    """Starts to sum a bucket's gradients over the processes. Returns the handle to wait for."""
    gradients = [p.grad.flatten() for p in bucket]
    flat = torch.cat(gradients) if len(bucket) > 1 else gradients[0]  # one alone isn't copied
    for p, grad in zip(bucket, flat.split([p.numel() for p in bucket])):
        p.grad = grad.view_as(p)  # views of flat, so the all-reduce updates them
    return dist.all_reduce(flat, async_op=True)


@contextlib.contextmanager
def summed_gradients(model, bucket_bytes=25 * 2**20):
    """Around the last backward pass of a step, this sums the gradients over the processes. A hook runs
    when a parameter's gradient is complete. When all of a bucket are, its all-reduce starts, and
    overlaps with the rest of the backward pass, if the model isn't compiled. A compiled backward pass
    returns all gradients at its end: all-reduces then overlap only with filling the next bucket."""
    if WORLD_SIZE == 1:
        yield
        return
    bucket_of = {p: bucket for bucket in gradient_buckets(model, bucket_bytes) for p in bucket}
    missing = set(bucket_of)
    handles = []

    def gradient_is_complete(p):
        missing.remove(p)
        if missing.isdisjoint(bucket_of[p]):
            handles.append(start_all_reduce(bucket_of[p]))

    hooks = [p.register_post_accumulate_grad_hook(gradient_is_complete) for p in bucket_of]
    yield
    for hook in hooks:
        hook.remove()
    for handle in handles:
        handle.wait()
    refuse_unused(model, missing)


def refuse_unused(model, unused):
    """Raises InputError for a parameter on which the loss doesn't depend."""
    for name, p in model.named_parameters():
        require(p not in unused, f"no gradient for {name}: use it, or call requires_grad_(False)")


# -----------------------------------------------------------------------------
# 11. A step, and a validation


def to_batch(tokens, seq_len):
    """Copies tokens (n + 1,) to the device. Returns inputs int32 and targets int64: (n / S, S)."""
    if ON_GPU:
        tokens = tokens.pin_memory()  # the CPU doesn't wait for a copy from pinned memory
    tokens = tokens.to(DEVICE, non_blocking=True)
    return tokens[:-1].view(-1, seq_len), tokens[1:].long().view(-1, seq_len)


def add_gradients(model, tokens, step, hp: Hyperparameters):
    """Adds the gradients of all ranks' tokens to p.grad, in passes. Returns the mean loss of this rank's."""
    window = get_window_blocks(step, hp)
    inputs, targets = to_batch(tokens, hp.train_seq_len)
    per_pass = math.gcd(hp.sequences_per_pass, len(inputs))  # passes of one size, for one compilation
    passes = list(zip(inputs.split(per_pass), targets.split(per_pass)))
    total = 0
    model.train()
    for i, (x, y) in enumerate(passes, start=1):
        loss = model(x, y, window)
        # in the last pass, the gradients are summed over the processes
        with summed_gradients(model) if i == len(passes) else contextlib.nullcontext():
            # The loss is a sum over tokens. Divided by the sequences of the batch, and summed over passes and
            # processes, it is train_seq_len times the mean loss, as in modded-nanogpt. Muon and Adam ignore
            # such a factor (Adam up to its epsilon), but clipping doesn't.
            (loss / (hp.batch_tokens // hp.train_seq_len)).backward()
        total += loss.detach()
    return total / inputs.numel()


def train_step(model, optimizers, tokens, step, hp: Hyperparameters):
    """Trains on this rank's tokens (batch_tokens / WORLD_SIZE + 1,). Returns their mean loss."""
    set_schedules(optimizers, step, hp)
    mean_loss = add_gradients(model, tokens, step, hp)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()  # p.grad is now None
    return mean_loss


def mean_of_ranks(losses):
    """Returns the mean of all ranks' losses, a list of scalar tensors. Waits for the GPU."""
    mean = torch.stack(losses).double().mean()
    if WORLD_SIZE > 1:
        dist.all_reduce(mean)
    return mean.item() / WORLD_SIZE


@torch.no_grad()
def evaluate(model, window, hp: Hyperparameters):
    """Returns the mean loss on the validation tokens. Each rank computes every WORLD_SIZE-th sequence."""
    sequences = distributed_data_generator(hp.val_files, hp.val_seq_len)
    model.eval()
    mine = itertools.islice(sequences, RANK, hp.val_tokens // hp.val_seq_len, WORLD_SIZE)
    sums = [model(*to_batch(tokens, hp.val_seq_len), window) for tokens in mine]
    return mean_of_ranks([loss / hp.val_seq_len for loss in sums])


def warn_of_untrained_rows(run, model):
    """Names the matrices of which training has changed only some rows so far, such as learned positions
    beyond --train_seq_len."""
    initial = build_model(run.hp).state_dict()
    for name, p in model.named_parameters():
        if parameter_kind(name, p) == "matrix":
            untrained = (p == initial[name]).all(-1).float().mean()
            if 0 < untrained < 1:
                run.write(f"warning: {name}: {untrained:.0%} of its rows are as they were at first")


def warm_up(model, hp: Hyperparameters):
    """Trains on random tokens: this compiles the kernels, connects the processes and allocates
    memory. The weights must then be set again; its optimizers aren't used again."""
    optimizers = build_optimizers(model, hp)
    tokens = torch.randint(hp.vocab_size, (hp.batch_tokens // WORLD_SIZE + 1,), dtype=torch.int32)
    add_gradients(model, tokens, hp.num_iterations, hp)  # with the longest window
    refuse_unused(model, {p for p in model.parameters() if p.requires_grad and p.grad is None})
    for _ in range(hp.warmup_steps):
        train_step(model, optimizers, tokens, hp.num_iterations, hp)
    model.zero_grad()


# -----------------------------------------------------------------------------
# 12. Processes, logs, checkpoints


def init_processes():
    """Joins torchrun's process group: NCCL on GPUs, gloo on CPUs, none for a single process."""
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    else:  # without this, threads sum gradients of embeddings in varying order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it is slow
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=DEVICE if ON_GPU else None)


# Environment variables that change the time of a step
TIMING = "(OMP|GOMP|KMP|MKL|ATEN|MALLOC|LD_PRELOAD|PYTORCH|TORCH|CUDA|NCCL)"


def describe_machine():
    """Returns lines about versions, variables, and the GPUs, or the CPU and its compiler. They have no
    host, user or folder in them."""
    variables = " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if re.match(TIMING, k))
    software = (
        f"Running Python {sys.version}\n"
        f"Running PyTorch {torch.__version__} compiled for CUDA {torch.version.cuda}\n"
        f"Variables: {re.sub('[^ =:]*/', '', variables)}\n"  # without folders
    )
    if ON_GPU:
        # tables of GPUs and, after an empty line, of processes, which may have a user's name in their path
        return software + re.split(r"\n\s*\n", subprocess.getoutput("TZ=UTC nvidia-smi"))[0]
    compiler = subprocess.getoutput("${CXX:-g++} --version | head -n 1")
    # run.sh turns compiling off where compiled code is wrong, and says why
    reason = os.getenv("SPEEDRUN_COMPILE_REASON", "(torch.compile is turned off)")
    compiled = "yes" if COMPILED else f"no {reason}"
    return (
        f"{software}CPU: {CPU_MODEL}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process, "
        f"instruction sets: {' '.join(sorted(CPU_FLAGS))}\n"
        f"Compiler: {compiler}; flags: -march={os.getenv('TORCHINDUCTOR_CPP_MARCH', 'native')}; model compiled: {compiled}"
    )


LINE = "=" * 100  # in a log, below the source and below the machine


def log_header(source, hp: Hyperparameters, table, shards):
    settings = asdict(hp) | dict(world_size=WORLD_SIZE)
    return (
        f"{source}\n{LINE}\n{describe_machine()}\n"
        f"{WORLD_SIZE} process{'es' if WORLD_SIZE > 1 else ''} on {DEVICE.type}\n{LINE}\n"
        f"hyperparameters: {json.dumps(settings)}\n{table}\n{shards}"
    )


def clock():
    """Returns the time in ms, after the GPU has finished its work."""
    if ON_GPU:
        torch.cuda.synchronize()
    return 1000 * time.perf_counter()


@dataclass
class Run:
    """A run and its log, which rank 0 writes."""

    hp: Hyperparameters
    path: Path  # of the log
    saves: bool  # whether each validation saves a checkpoint
    log: str  # its text so far
    last_seed: int  # of the runs that follow with --num_runs
    step: int = 0
    train_ms: float = 0.0
    train_loss: float | None = None  # the mean of the steps between the last two validations
    extra: dict = field(default_factory=dict)  # for state of your own, such as an average of weights

    def open(self):
        """Writes the log so far. Locks it: a second process must not resume the same run."""
        if RANK > 0:
            return
        os.makedirs(self.path.parent, exist_ok=True)
        self.file = open(self.path, "a", buffering=1, encoding="utf-8")  # "w" would empty a locked log
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is writing {self.path}; wait until it ends")
        except OSError:
            pass  # some network file systems have no locks
        self.file.truncate(0)
        self.file.write(self.log)
        print(f"track {self.hp.track} on {DEVICE.type}; log: {self.path}", flush=True)

    def write(self, line):
        if RANK > 0:
            return
        print(line, flush=True)  # launch/terminal.py makes a bar of it
        self.log += line + "\n"
        self.file.write(line + "\n")

    def write_step(self, val_loss="", train_loss=""):
        self.write(
            f"step:{self.step}/{self.hp.num_iterations}{val_loss} train_time:{self.train_ms:.0f}ms "
            f"step_avg:{self.train_ms / max(self.step, 1):.2f}ms{train_loss}"
        )

    def write_result(self, val_loss, tokens):
        if ON_GPU:
            self.write(
                f"peak memory allocated: {torch.cuda.max_memory_allocated() // 2**20} MiB "
                f"reserved: {torch.cuda.max_memory_reserved() // 2**20} MiB"
            )
        verdict = "met" if val_loss <= self.hp.target_val_loss else f"not met in {self.step} steps"
        self.write(
            f"target {self.hp.target_val_loss}: {verdict}; val_loss {val_loss:.4f} "
            f"after {self.train_ms / 1000:.2f} s, {1000 * tokens / self.train_ms:,.0f} tokens/s"
        )


SAVED = ("log", "last_seed", "step", "train_ms", "train_loss", "extra")  # of a Run, in its checkpoint


def save_checkpoint(run, model, optimizers):
    """Writes RUN.pt beside the log. Call it on all ranks. Random numbers need no state (see train)."""
    checkpoint = dict(
        run={name: getattr(run, name) for name in SAVED},
        settings=asdict(run.hp),
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
    )
    if RANK > 0:
        return
    temporary = run.path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # a file called RUN.pt is complete, also after a power cut
    temporary.rename(run.path.with_suffix(".pt"))


def save_and_log(run, model, optimizers, val_loss, train_losses):
    """Saves a checkpoint and logs the losses. train_losses are those since the last validation."""
    require(math.isfinite(val_loss), f"step {run.step}: the loss is not finite; lower a learning rate")
    if train_losses:
        run.train_loss = mean_of_ranks(train_losses)
        train_losses.clear()
    train_loss = "" if run.train_loss is None else f" train_loss:{run.train_loss:.4f}"
    if run.saves:  # before the line in the log: a resumed run validates again, and writes it
        save_checkpoint(run, model, optimizers)
    run.write_step(f" val_loss:{val_loss:.4f}", train_loss)


def is_finished(path):
    """True if the log beside this checkpoint has its result, the last line."""
    log = Path(path).with_suffix(".txt")  # its source, above LINE, has these words, too
    return log.exists() and "\ntarget " in log.read_text().rpartition(LINE)[2]


def load_checkpoint(args, source):
    """Returns the checkpoint of --resume, or None. Raises InputError if it can't be resumed with this
    source and these options."""
    path = args.resume
    if not path:
        return
    require(not is_finished(path), f"--resume: the run of {path} is finished")
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    run = checkpoint["run"]
    require(run["log"].startswith(source), f"--resume: {path} is from another source; use that one")
    for name, value in args.given.items():
        saved = checkpoint["settings"][name]
        require(value == saved, f"--resume: --{name} is {saved} in {path}; leave it out")
    args.last_seed = run["last_seed"]
    args.log_dir = Path(path).parent  # for the runs that follow, with --num_runs
    return checkpoint


def start_run(args, hp: Hyperparameters, source, data_checksums, checkpoint, table):
    """Returns a new run, or that of the checkpoint, with its log open."""
    shards = f"checksums of training and validation tokens: {data_checksums}\n"
    if checkpoint:
        path = Path(args.resume)
        saved = checkpoint["run"]
        require(shards in saved["log"], "--resume: the shards have changed; use the old ones")
        saved["log"] += f"{describe_machine()}\n"
    else:
        path = Path(args.log_dir, str(uuid.uuid4()))
        saved = dict(log=log_header(source, hp, table, shards), last_seed=args.last_seed)
    run = Run(hp, path.with_suffix(".txt"), args.save_checkpoint, **saved)
    run.open()
    return run


def load_states(checkpoint, run, model, optimizers):
    model.load_state_dict(checkpoint["model"])
    for optimizer, state in zip(optimizers, checkpoint["optimizers"]):
        optimizer.load_state_dict(state)
    run.write(f"resume: from step {run.step}, on {WORLD_SIZE} processes")


# -----------------------------------------------------------------------------
# 13. The timed loop


def train(run, model, optimizers):
    """Trains until the last step."""
    hp = run.hp
    train_losses = []  # since the last validation; reading them would wait for the GPU
    batches = distributed_data_generator(hp.train_files, hp.batch_tokens, RANK, WORLD_SIZE)
    for _ in range(run.step):
        next(batches)  # the checkpoint was trained on these
    validated_ms = run.train_ms  # the training time up to the last validation
    start_ms = clock()
    for step in range(run.step, hp.num_iterations + 1):
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (step > 0 and hp.val_loss_every and step % hp.val_loss_every == 0):
            validated_ms += clock() - start_ms
            run.train_ms = validated_ms
            val_loss = evaluate(model, get_window_blocks(step, hp), hp)
            if not run.train_loss:  # the first validation
                warn_of_untrained_rows(run, model)
            save_and_log(run, model, optimizers, val_loss, train_losses)
            # Random numbers, such as those of dropout, then are the same in a resumed run
            torch.manual_seed(hp.seed + step)
            start_ms = clock()
        if last_step:
            break
        # --------------- training
        train_losses.append(train_step(model, optimizers, next(batches), step, hp))
        run.step += 1
        # clock() would wait for the GPU
        run.train_ms = validated_ms + 1000 * time.perf_counter() - start_ms
        run.write_step()
    run.write_result(val_loss, hp.batch_tokens * run.step)


def check_files(hp: Hyperparameters):
    both = {*find_shards(hp.train_files)} & {*find_shards(hp.val_files)}
    if both:
        raise InputError(f"{min(both)} is a training and a validation shard; change --train_files")


def check_inputs(args, hp: Hyperparameters):
    """Checks settings and shards before anything slow begins. Returns checksums of the tokens."""
    check_hyperparameters(hp, WORLD_SIZE)
    check_files(hp)
    first = read_tokens(find_shards(hp.val_files)[0], 0, 1).item()
    require(
        hp.eot_token in (first, -1),
        f"{hp.val_files} begins with token {first}, so --eot_token {hp.eot_token} begins no documents; "
        "name the token that does, or -1 if none does",
    )
    val_steps = hp.val_tokens // hp.val_seq_len
    return [
        token_checksum(hp.train_files, hp.batch_tokens, hp.num_iterations, hp.vocab_size),
        token_checksum(hp.val_files, hp.val_seq_len, val_steps, hp.vocab_size),
    ]


def train_runs(argv):
    """Trains --num_runs times. Only the first run compiles."""
    args, hp = parse_arguments(argv)
    checkpoint = load_checkpoint(args, SOURCE)
    if checkpoint:
        hp = replace(hp, **checkpoint["settings"])
    checksums = check_inputs(args, hp)
    if args.print_settings:  # of a run that would work
        return print(json.dumps(asdict(hp)))
    init_processes()
    model = build_model(hp)
    model.compile(dynamic=False)
    for seed in range(hp.seed, args.last_seed + 1):
        hp = replace(hp, seed=seed)
        optimizers = build_optimizers(model, hp)
        table = parameter_table(model, optimizers)
        run = start_run(args, hp, SOURCE, checksums, checkpoint, table)
        warm_up(model, hp)
        model.load_state_dict(build_model(hp).state_dict())  # the initial weights of this seed
        if checkpoint:
            load_states(checkpoint, run, model, optimizers)
        train(run, model, optimizers)
        checkpoint = None  # the other seeds have none
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def main(argv, work=train_runs):
    """Runs work(argv). Returns the exit status: 0, or 2 after a user error. The scripts in recipes/ have
    their own work."""
    # With Python's handler, Ctrl-C wouldn't end a process that waits for others
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        work(argv)
        return 0
    except InputError as e:
        if LOCAL_RANK:
            return 2  # every rank raises it; one on each machine prints it
        message = str(e)
    except OSError as e:
        message = f"rank {RANK}: {e}"
    except torch.OutOfMemoryError:
        message = f"rank {RANK}: out of GPU memory; lower --sequences_per_pass or a sequence length"
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
