"""
Trains a GPT to a target validation loss in as little time as possible. Everything is in this file.

    ./run.sh                                               installs packages, makes the data, trains
    python train_gpt.py --track mini                       one process, on a CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  the official run: FineWeb to 3.28 on 8 H100s
    python train_gpt.py --help                             every hyperparameter and its default

The recipe is modded-nanogpt's of May 2025 (https://github.com/KellerJordan/modded-nanogpt). Changes to GPT-2:
- Muon trains the weight matrices of the blocks. It orthogonalizes the momentum.
- no biases and no norm gains
- QK norm, half-truncated rotary embeddings, ReLU squared, zero-initialized output projections,
  U-net skips, value embeddings
- each block mixes the token embedding back into the residual stream, with learned weights
- sliding-window attention within documents, with a window that grows during training
- soft-capped logits, in training computed in FP8 on GPUs that support it
The track mini adds later ideas of the field, each an option: NorMuon, XSA, smear, a leaky ReLU.

The batch doesn't depend on the number of processes: one GPU and eight GPUs train the same model.
GPUs with little memory train on shorter sequences (see fitted).

Importing this file trains nothing. Shapes in comments: B sequences, S tokens per sequence,
T = B * S tokens, N = T / 128 blocks of the mask, H heads, D channels per head, C = model_dim,
V = padded vocabulary size.
"""
# -----------------------------------------------------------------------------
# 1. Preamble

with open(__file__, newline="", encoding="utf-8") as f:
    SOURCE = f.read()  # every log contains the source; read it now, before an edit can change it

import os
import signal
import sys
import time

in_training = False  # True in the training loop
stop_signal = 0      # the SIGTERM or SIGINT that came in training
stop_time = 0.0


def env_int(name, default):
    """Returns an environment variable that torchrun sets, or the default without torchrun."""
    return int(os.environ.get(name, default))


def on_signal(number, frame):
    """Handles Ctrl-C and SIGTERM. In the training loop, it only remembers the signal: all ranks
    save a checkpoint and exit within a few steps (see vote_while_training), or finish if the run is
    about to end. Before training, or on a second signal, it exits at once. Signals within a second
    of the first are ignored, because torchrun and batch systems often send several."""
    global stop_signal, stop_time
    if not in_training:
        if env_int("RANK", 0) == 0:
            if os.isatty(2):
                os.write(2, b"\n")  # start a new line after the terminal's ^C
            os.write(2, b"stopped; there is nothing to save\n")
        os._exit(128 + number)
    if not stop_signal:
        stop_signal = number
        stop_time = time.monotonic()
    elif time.monotonic() > stop_time + 1:
        os._exit(128 + number)


def handle_signals():
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


if __name__ == "__main__":
    handle_signals()  # before the imports, which take seconds

if sys.platform == "win32":
    sys.exit("error: this needs Linux or macOS; on Windows, run it in WSL")

import argparse
import codecs
import collections
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import glob
import io
import itertools
import json
import locale
import math
import platform
import re
import resource
import statistics
import subprocess
import tempfile
import threading
import uuid
import warnings
import zipfile
import zlib
from pathlib import Path

if __name__ == "__main__" and codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":
    sys.exit("error: PyTorch can't read its files in an ASCII locale; set PYTHONUTF8=1")

# PyTorch and OpenMP read these variables when torch is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
if sys.platform == "linux" and platform.machine() == "x86_64":
    # Works around a bug of GCC 11 to 13 (similar to https://gcc.gnu.org/PR113255): on CPUs that GCC
    # doesn't know, it miscompiles PyTorch's bf16 transposes. Naming a CPU with -mtune avoids this,
    # and -march stays native. PyTorch puts "-march=" before this value.
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")
# Make waiting OpenMP threads sleep instead of spin. This is much faster when another process keeps
# the cores busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# check_gpus replaces these long warnings with one line
warnings.filterwarnings("ignore", message=r"\s*(CUDA initialization|Found GPU)")

BLOCK_SIZE = 128  # tokens per block of the attention mask; divides sequence lengths


class InputError(Exception):
    """A user error. One process per machine prints it, as one line without a traceback."""


class RankError(InputError):
    """A user error that may occur on one rank only, so each rank prints its own."""


# -----------------------------------------------------------------------------
# 2. FP8 head and loss. The forward pass uses e4m3, the gradient e5m2 (more range, less precision).

# The real value of an FP8 tensor is tensor * scale. 448 is the largest finite e4m3 value.
# Scales are those of modded-nanogpt.
W_SCALE = 24 / 448    # weights are assumed to stay below 24
# If the gradient of the loss is 1, those of the logits are below 1. Divided by this scale, they are
# below 448, far from the largest e5m2 value, 57,344.
GRAD_SCALE = 1 / 448


def x_scale(model_dim: int) -> float:
    """The scale of RMS-normed inputs (T, model_dim). Their elements are at most sqrt(model_dim)."""
    return model_dim**0.5 / 448


def softcap(logits: Tensor, model_dim: int) -> Tensor:
    """Divides logits by sqrt(model_dim), soft-caps them at 15 (Gemma 2,
    https://arxiv.org/abs/2408.00118), and adds 15, which doesn't change the softmax. Returns
    float32 between 0 and 30."""
    # = 15 tanh(z / 15) + 15 for z = logits / sqrt(model_dim)
    return 30 * torch.sigmoid(logits.float() / (7.5 * model_dim**0.5))


def as_scale(value: float, like: Tensor) -> Tensor:
    """A scale for torch._scaled_mm: a float32 scalar on the device of `like`."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


@torch.library.custom_op("nanogpt::head_loss", mutates_args=())
@torch.compile(dynamic=False)  # compiling the model doesn't compile the body of a custom op
def head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the cross-entropy of softcap(x @ w.T) in nats, summed over tokens.

    x (T, C) is RMS-normed. x and w (V, C) may have any float dtype; targets is (T,). Returns the
    loss in float32, and for the backward pass the logits (T, V) in bf16, their logsumexp (T,) and
    both FP8 operands. Head and loss are one op, so that the gradient of the logits is never stored
    in bf16."""
    x_s = x_scale(x.size(1))
    x_f8 = (x / x_s).to(torch.float8_e4m3fn)
    w_f8 = (w / W_SCALE).to(torch.float8_e4m3fn)
    logits = torch._scaled_mm(
        x_f8,
        w_f8.T,
        scale_a=as_scale(x_s, x),
        scale_b=as_scale(W_SCALE, x),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    # logsumexp without subtracting the maximum: soft-capped logits are at most 30
    lse = softcap(logits, w.size(1)).exp().sum(dim=-1).log()
    target_logits = softcap(logits.gather(1, targets[:, None]), w.size(1))[:, 0]
    return (lse - target_logits).sum(), logits, lse, x_f8, w_f8


@head_loss_op.register_fake
def _(x, w, targets):
    loss = x.new_empty((), dtype=torch.float32)
    logits = x.new_empty(x.size(0), w.size(0), dtype=torch.bfloat16)
    lse = x.new_empty(x.size(0), dtype=torch.float32)
    x_f8 = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    w_f8 = w.new_empty(w.shape, dtype=torch.float8_e4m3fn)
    return loss, logits, lse, x_f8, w_f8


@torch.library.custom_op("nanogpt::head_loss_backward", mutates_args=())
@torch.compile(dynamic=False)
def head_loss_backward_op(
    grad: Tensor, logits: Tensor, lse: Tensor, x_f8: Tensor, w_f8: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns grad_x (T, C) in bf16 and grad_w (V, C) in float32, given the loss's scalar gradient.
    When compiled, it stores the gradient of the logits only in FP8."""
    model_dim = w_f8.size(1)
    capped = softcap(logits, model_dim)
    probabilities = (capped - lse[:, None]).exp()
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets[:, None]
    grad_capped = probabilities - one_hot.float()
    # d capped / d logits = capped (1 - capped / 30) / (7.5 sqrt(model_dim)), see softcap
    grad_logits = grad_capped * capped * (1 - capped / 30) / (7.5 * model_dim**0.5)
    grad_f8 = (grad_logits / GRAD_SCALE).to(torch.float8_e5m2)
    grad_scale = GRAD_SCALE * grad
    # _scaled_mm needs a row-major first operand and a column-major second one
    grad_x = torch._scaled_mm(
        grad_f8,
        w_f8.T.contiguous().T,
        scale_a=grad_scale,
        scale_b=as_scale(W_SCALE, grad),
        out_dtype=torch.bfloat16,
    )
    grad_w = torch._scaled_mm(
        grad_f8.T.contiguous(),
        x_f8.T.contiguous().T,
        scale_a=grad_scale,
        scale_b=as_scale(x_scale(model_dim), grad),
        out_dtype=torch.float32,
    )
    return grad_x, grad_w


@head_loss_backward_op.register_fake
def _(grad, logits, lse, x_f8, w_f8, targets):
    grad_x = grad.new_empty(x_f8.shape, dtype=torch.bfloat16)
    grad_w = grad.new_empty(w_f8.shape, dtype=torch.float32)
    return grad_x, grad_w


def setup_context(ctx, inputs, output):
    x, w, targets = inputs
    loss, logits, lse, x_f8, w_f8 = output
    ctx.save_for_backward(logits, lse, x_f8, w_f8, targets)
    ctx.set_materialize_grads(False)  # creates no zero gradients for the other outputs


def head_loss_gradients(ctx, grad, *unused):
    grad_x, grad_w = torch.ops.nanogpt.head_loss_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_w, None


head_loss_op.register_autograd(head_loss_gradients, setup_context=setup_context)

# -----------------------------------------------------------------------------
# 3. Muon (Keller Jordan et al., https://kellerjordan.github.io/posts/muon)


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalizes each matrix of G (..., m, n): U S V^T becomes about U V^T.

    The coefficients of the quintic Newton-Schulz iteration maximize its slope at zero. It doesn't
    converge: singular values end between about 0.5 and 1.5, which doesn't hurt the optimizer.
    The result has the shape of G, in bf16 or float32 (see activation_dtype)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.size(-2) > G.size(-1)
    X = G.to(activation_dtype(G.device))
    if tall:
        X = X.mT  # X X^T is smaller than X^T X
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # the spectral norm is now at most 1
    shape = X.shape
    X = X.reshape(-1, *shape[-2:])  # torch.bmm needs exactly one batch dimension
    for _ in range(steps):
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    X = X.view(shape)
    return X.mT if tall else X


if hasattr(dist, "all_gather_single"):  # its name since PyTorch 2.13
    all_gather = dist.all_gather_single
else:
    all_gather = dist.all_gather_into_tensor


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz, for the weight matrices of the blocks.

    A parameter (..., rows, cols) is a stack of matrices; each matrix is orthogonalized separately.
    Updates are rounded to bf16. Each rank owns a share of the parameters: it keeps their momentum
    and computes their updates. The all-gather of one group's updates overlaps with computing the
    next group's. Gradients must be equal on all ranks. With beta2 > 0 this is NorMuon
    (https://arxiv.org/abs/2510.05491), which scales all channels of an update to a similar RMS."""

    def __init__(self, params, lr=0.02, momentum=0.95, ns_steps=5, beta2=0.0):
        self.rank, self.world_size = 0, 1
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        groups = {}  # matrices of a shape and of its transpose share a group: one batched matmul
        for p in params:
            *stack, rows, cols = p.shape
            shape = (*stack, min(rows, cols), max(rows, cols))
            groups.setdefault(shape, []).append(p)
        defaults = dict(lr=lr, momentum=momentum, ns_steps=ns_steps, beta2=beta2)
        super().__init__([dict(params=group) for group in groups.values()], defaults)

    def _state(self, p: Tensor, group: dict) -> dict:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        if group["beta2"] and "mean_squares" not in state:  # one per channel, see _normalize
            state["mean_squares"] = p.new_zeros(*p.shape[:-2], max(p.shape[-2:]))
        return state

    def _normalize(self, params: list[Tensor], group: dict, updates: Tensor) -> Tensor:
        """NorMuon: divides each channel by its running RMS, and keeps the norm of the update.
        Updates are (n, ..., rows, cols) with rows <= cols. A channel is a column: an index along
        the longer side. In a square matrix, a channel is a row: an output."""
        square = updates.size(-2) == updates.size(-1)
        dim = -1 if square else -2  # the dimension to average over
        updates = updates.float()
        mean_squares = []
        for p, new in zip(params, updates.square().mean(dim)):
            running = self._state(p, group)["mean_squares"]
            running.lerp_(new, 1 - group["beta2"])
            mean_squares.append(running)
        inverse_rms = torch.stack(mean_squares).clamp_min(1e-10).rsqrt().unsqueeze(dim)
        scaled = updates * inverse_rms
        old_norm = updates.norm(dim=(-2, -1), keepdim=True)  # of each matrix
        new_norm = scaled.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)
        return old_norm * (scaled / new_norm)

    def _updates(self, params: list[Tensor], group: dict) -> Tensor:
        """Computes the updates of these parameters: (len(params), numel) in bf16."""
        gradients = []
        for p in params:
            buf = self._state(p, group)["momentum_buffer"]
            buf.lerp_(p.grad, 1 - group["momentum"])
            g = p.grad.lerp(buf, group["momentum"])  # Nesterov
            if g.size(-2) > g.size(-1):
                g = g.mT  # transpose tall matrices so that rows <= columns
            gradients.append(g)
        updates = zeropower_via_newtonschulz5(torch.stack(gradients), group["ns_steps"])
        if group["beta2"]:
            updates = self._normalize(params, group, updates)
        flat = []
        for p, update in zip(params, updates):
            if p.size(-2) > p.size(-1):
                update = update.mT
            flat.append(update.flatten())
        return torch.stack(flat).bfloat16()

    @torch.no_grad()
    def step(self):
        gathers = []
        for group in self.param_groups:
            params = group["params"]
            per_rank = math.ceil(len(params) / self.world_size)
            mine = params[self.rank * per_rank : (self.rank + 1) * per_rank]
            if self.world_size == 1:
                gathers.append((group, self._updates(mine, group), None))
                continue
            # every rank sends per_rank updates; those that it doesn't have are zero
            numel = params[0].numel()
            sent = params[0].new_zeros(per_rank, numel, dtype=torch.bfloat16)
            if mine:
                sent[: len(mine)] = self._updates(mine, group)
            updates = sent.new_empty(self.world_size * per_rank, numel)
            handle = all_gather(updates, sent, async_op=True)
            gathers.append((group, updates, handle))
        for group, updates, handle in gathers:
            if handle is not None:
                handle.wait()
            for p, update in zip(group["params"], updates):  # zip drops the padding
                # a tall matrix gets a larger step: the RMS change of its output then doesn't depend
                # on its shape
                scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
                p.add_(update.view_as(p), alpha=-group["lr"] * scale)

    def gather_state(self):
        """Broadcasts the state of all parameters, so that rank 0 can save it. Call it on all
        ranks."""
        for group in self.param_groups:
            per_rank = math.ceil(len(group["params"]) / self.world_size)
            for i, p in enumerate(group["params"]):
                for value in self._state(p, group).values():
                    if self.world_size > 1:
                        dist.broadcast(value, i // per_rank)


# -----------------------------------------------------------------------------
# 4. Model


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class CastedLinear(nn.Linear):
    """A linear layer without bias. Weights (out, in) are float32 and cast to the dtype of x.
    GPT.init_weights sets their initial values."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return F.linear(x, self.weight.type_as(x))


class Rotary(nn.Module):
    """Half-truncated rotary embeddings (RoPE: https://arxiv.org/abs/2104.09864). Only half of the
    D/2 channel pairs rotate. @YouJiacheng proposed this for the speedrun."""

    def __init__(self, head_dim, max_seq_len):
        super().__init__()
        rotating = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
        freqs = torch.cat([rotating, torch.zeros(head_dim // 4)])  # (D/2,)
        t = torch.arange(max_seq_len, dtype=torch.float32)
        theta = t[:, None] * freqs  # (max_seq_len, D/2)
        self.register_buffer("cos", theta.cos(), persistent=False)
        self.register_buffer("sin", theta.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, H, D)
        cos = self.cos[None, : x.size(1), None]  # (1, S, 1, D/2)
        sin = self.sin[None, : x.size(1), None]
        x1, x2 = x.float().chunk(2, dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], dim=-1).type_as(x)


# Attention masks. A query attends to a key if
# - the key is not later than the query,
# - both are in the same document, and
# - the key's block is one of the last window_blocks blocks, including the query's own.
# There are two versions: a BlockMask for FlexAttention on GPUs, and a mask in plain PyTorch.


def document_ids(input_seq: Tensor, eot_token: int) -> Tensor:
    """Returns the number of each token's document, int32 (T,), starting at 1, for input_seq (B, S).
    A document starts at each end-of-text token and at the start of each sequence."""
    begins = input_seq == eot_token
    begins[:, 0] = True
    return begins.flatten().cumsum(0, dtype=torch.int32)


def block_lists(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a matrix of blocks, bool (N, N), to FlexAttention's lists: for each row the number
    of True entries, int32 (1, 1, N), and their columns in ascending order, int32 (1, 1, N, N)."""
    n = len(visible)
    counts = visible.sum(dim=-1, dtype=torch.int32)
    # Each True entry's place in its row's list. False entries go to place n, which is cut off below.
    # Sorting would give the same lists, but a sort takes minutes to compile for GPUs.
    places = torch.where(visible, visible.cumsum(dim=-1) - 1, n)
    columns = torch.arange(n, dtype=torch.int32, device=visible.device).expand(n, n)
    lists = visible.new_zeros(n, n + 1, dtype=torch.int32).scatter(-1, places, columns)
    lists = lists[:, :n].contiguous()  # FlexAttention's kernels read rows as contiguous memory
    return counts[None, None], lists[None, None]


def flex_block_mask(docs: Tensor, window_blocks: Tensor) -> BlockMask:
    """Makes the BlockMask of docs (T,). window_blocks is a scalar tensor on the device, so that a
    growing window doesn't recompile. FlexAttention calls document_causal only in partly visible
    blocks."""

    def document_causal(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (docs[q_idx] == docs[kv_idx])

    first_doc = docs.view(-1, BLOCK_SIZE)[:, 0]  # (N,)
    last_doc = docs.view(-1, BLOCK_SIZE)[:, -1]
    block = torch.arange(len(first_doc), dtype=torch.int32, device=docs.device)
    distance = block[:, None] - block  # (N, N): query block - key block
    in_window = distance < window_blocks
    causal_any = distance >= 0
    causal_all = distance > 0
    # Rows are query blocks, columns are key blocks. Documents are numbered in order, so for a key block
    # that isn't later than the query block:
    document_any = first_doc[:, None] <= last_doc  # they share a document
    document_all = last_doc[:, None] == first_doc  # both are in one document
    visible_any = in_window & causal_any & document_any
    visible_all = in_window & causal_all & document_all
    partial = visible_any & ~visible_all
    # key blocks of each query block, for the forward pass
    kv_num, kv_indices = block_lists(partial)
    full_kv_num, full_kv_indices = block_lists(visible_all)
    # query blocks of each key block, for the backward pass
    q_num, q_indices = block_lists(partial.T)
    full_q_num, full_q_indices = block_lists(visible_all.T)
    return BlockMask(
        seq_lengths=(len(docs), len(docs)),
        kv_num_blocks=kv_num,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=document_causal,
    )


def portable_mask(docs: Tensor, window_blocks: Tensor, span: int) -> Tensor:
    """Makes the mask of docs (T,) for portable_attention: bool (N, 1, 128, span * 128), True where
    visible. The last dimension covers the keys of the query's own block and of the span - 1 blocks
    before it. `span` is a constant upper bound of window_blocks, so that a growing window doesn't
    recompile."""
    query = torch.arange(len(docs), dtype=torch.int32, device=docs.device)
    query = query.view(-1, BLOCK_SIZE, 1)  # (N, 128, 1)
    block_start = query[:, :1]  # (N, 1, 1)
    # the first token of each query's document: docs 1 1 1 2 2 -> 0 0 0 3 3
    document_start = torch.searchsorted(docs, docs, out_int32=True).view_as(query)
    window_start = block_start - (window_blocks - 1) * BLOCK_SIZE
    start = document_start.maximum(window_start)
    offset = torch.arange((1 - span) * BLOCK_SIZE, BLOCK_SIZE, dtype=torch.int32, device=docs.device)
    key = block_start + offset  # (N, 1, span * 128); negative before the first token, so not visible
    visible = (start <= key) & (key <= query)
    return visible[:, None]


def split_blocks(t: Tensor) -> Tensor:
    """(1, T, H, D) -> (N, H, 128, D)"""
    return t.view(-1, BLOCK_SIZE, *t.shape[2:]).transpose(1, 2)


def with_previous_blocks(t: Tensor, span: int) -> Tensor:
    """(1, T, H, D) -> (N, H, span * 128, D): each block, preceded by span - 1 earlier blocks."""
    t = split_blocks(t)
    shifted = []
    for back in reversed(range(span)):
        padded = F.pad(t, (0, 0, 0, 0, 0, 0, back, 0))  # zeros in front: (back + N, H, 128, D)
        shifted.append(padded[: len(t)])
    return torch.cat(shifted, dim=2)


def portable_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention block by block, in O(T * span), for devices where FlexAttention has no backward
    (CPUs). Compiled, it is much faster on a CPU than scaled_dot_product_attention with a mask."""
    span = mask.size(-1) // BLOCK_SIZE
    bias = torch.where(mask, 0.0, -math.inf).type_as(q)
    # no need to subtract the maximum: with QK norm, scores are at most scale * D, about 15
    queries = split_blocks(q * scale)  # (N, H, 128, D)
    scores = queries @ with_previous_blocks(k, span).mT  # (N, H, 128, span * 128)
    weights = (scores + bias).exp()
    y = weights @ with_previous_blocks(v, span)  # (N, H, 128, D)
    y = y / weights.sum(dim=-1, keepdim=True, dtype=torch.float32)
    return y.type_as(v).transpose(1, 2).reshape(q.shape)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """q, k, v (1, T, H, D) -> (1, T, H, D), with the mask of flex_block_mask or portable_mask."""
    if not isinstance(mask, BlockMask):
        return portable_attention(q, k, v, mask, scale)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (1, H, T, D)
    y = flex_attention(q, k, v, block_mask=mask, scale=scale)
    return y.transpose(1, 2)


def exclusive_self_attention(y: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """XSA (Shuangfei Zhai, https://arxiv.org/abs/2603.09078): subtracts a fraction of y's component
    along the token's own value. The fraction is tanh(weight), learned for each head, as in record
    82 of the speedrun by @djdumpling. y, v (1, T, H, D), weights (H,) -> (1, T, H, D)."""
    dot = (y * v).sum(dim=-1, keepdim=True)  # (1, T, H, 1)
    square = (v * v).sum(dim=-1, keepdim=True).clamp_min(1e-8)  # avoids 0 / 0
    fraction = weights.tanh().type_as(y)[:, None]  # (H, 1)
    coefficient = fraction * (dot / square)
    return y - coefficient * v


class CausalSelfAttention(nn.Module):
    def __init__(self, hp, rotary):
        super().__init__()
        self.num_heads = hp.num_heads
        self.head_dim = hp.head_dim
        self.rotary = rotary
        hdim = hp.num_heads * hp.head_dim
        self.qkv_w = nn.Parameter(torch.empty(3, hdim, hp.model_dim))  # Q, K and V in one matmul
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.c_proj = CastedLinear(hdim, hp.model_dim)
        self.xsa_weights = None
        if hp.xsa:
            self.xsa_weights = nn.Parameter(torch.zeros(hp.num_heads))

    def forward(self, x, ve, mask, seq_len):  # x (1, T, C), ve (T, H * D) or None -> (1, T, C)
        heads = (self.num_heads, self.head_dim)
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(-1, seq_len, 3, *heads).unbind(2)  # each (B, S, H, D)
        q = self.rotary(norm(q))  # positions count from the start of the sequence
        k = self.rotary(norm(k))
        q, k, v = (t.reshape(1, -1, *heads) for t in (q, k, v))  # each (1, T, H, D)
        v = self.lambdas[0] * v
        if ve is not None:
            v = v + self.lambdas[1] * ve.view_as(v)
        # with QK norm, the scale is free: 0.12 was tuned for the speedrun
        y = attention(q, k, v, mask, scale=0.12)
        if self.xsa_weights is not None:
            y = exclusive_self_attention(y, v, self.xsa_weights)
        return self.c_proj(y.flatten(2))


class MLP(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.relu_slope = hp.relu_slope
        self.c_fc = CastedLinear(hp.model_dim, 4 * hp.model_dim)
        self.c_proj = CastedLinear(4 * hp.model_dim, hp.model_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        # Leaky ReLU, then a square (@parinzee, https://github.com/openai/parameter-golf/pull/493).
        # Slope 0 gives ReLU squared (https://arxiv.org/abs/2109.08668).
        x = F.leaky_relu(x, self.relu_slope).square()
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, hp, layer, rotary):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attn = None
        if layer not in hp.attn_free_layers:
            self.attn = CausalSelfAttention(hp, rotary)
        self.mlp = MLP(hp)

    def forward(
        self, x: Tensor, x0: Tensor, ve: Tensor | None, mask: BlockMask | Tensor, seq_len: int
    ) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), ve, mask, seq_len)
        return x + self.mlp(norm(x))


class Smear(nn.Module):
    """Adds scale * gate * (the previous token's embedding) to each embedding. The gate is the sigmoid
    of a linear function of the token's own first 12 channels. Documents are not separated. By
    @classiclarryd, record 34 of the speedrun."""

    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(min(12, dim)))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:  # (B, S, C)
        previous = F.pad(x, (0, 0, 1, 0))[:, :-1]  # x shifted by one token, with zeros in front
        channels = x[..., : len(self.gate)]
        gate = (channels @ self.gate.type_as(x)).sigmoid()  # (B, S)
        factor = self.scale * gate  # float32, because scale is
        factor = factor.type_as(x).unsqueeze(-1)
        return x + factor * previous


class GPT(nn.Module):
    """The model with its loss: GPT(hp)(input_seq, target_seq, window_blocks).

    input_seq (B, S) is int32, target_seq (B, S) int64, window_blocks a scalar int32; S is a
    multiple of 128. Returns the cross-entropy in nats, summed over tokens in training and averaged
    in evaluation. Embeddings, and therefore activations, have dtype `dtype`; all other parameters
    are float32."""

    val_slice = 32768  # validation computes the logits of this many tokens at a time, to save memory

    def __init__(self, hp, dtype=torch.bfloat16, use_fp8=False):
        super().__init__()
        self.hp = hp
        self.use_fp8 = use_fp8
        hdim = hp.num_heads * hp.head_dim
        # create modules in the order of the forward pass: GradientBuckets assumes it
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim, dtype=dtype)
        # value embeddings (https://arxiv.org/abs/2410.17897): of 3 tables in 12 layers, table 0
        # serves layers 0 and 9, table 1 layers 1 and 10, and table 2 layers 2 and 11
        self.value_embeds = nn.ModuleList()
        self.ve_of_layer = {}
        for i in range(hp.num_value_embeds):
            self.value_embeds.append(nn.Embedding(hp.vocab_size, hdim, dtype=dtype))
            self.ve_of_layer[i] = i
            self.ve_of_layer[hp.num_layers - hp.num_value_embeds + i] = i
        self.smear = None
        if hp.smear:
            self.smear = Smear(hp.model_dim)
        rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len))
        self.blocks = nn.ModuleList(Block(hp, i, rotary) for i in range(hp.num_layers))
        self.skip_weights = None
        if hp.num_layers > 1:
            self.skip_weights = nn.Parameter(torch.ones(hp.num_layers // 2))
        self.lm_head = CastedLinear(hp.model_dim, hp.padded_vocab_size)
        self.init_weights(hp.seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """Sets the initial values of all matrices. Each has its own random generator, seeded with
        the seed and its name, so that adding a parameter doesn't change the others. Scalars keep
        the values that they were created with."""
        for name, p in self.named_parameters():
            key = zlib.crc32(f"{seed} {name}".encode())
            rng = torch.Generator().manual_seed(key)
            if "embed" in name:
                p.copy_(torch.randn(p.shape, generator=rng))  # normal_ is coarse in bf16
            elif name.endswith(("c_proj.weight", "lm_head.weight")):
                p.zero_()
            elif p.ndim >= 2:
                std = 0.5 * p.size(-1) ** -0.5  # p is (..., out, in)
                bound = 3**0.5 * std            # uniform(-bound, bound) has this std
                p.uniform_(-bound, bound, generator=rng)

    def masks(self, docs: Tensor, window_blocks: Tensor) -> list[BlockMask | Tensor]:
        """Returns a mask for each layer: the long window or half of it."""
        short_blocks = (window_blocks // 2).clamp_min(1)
        if docs.is_cuda:
            long = flex_block_mask(docs, window_blocks)
            short = flex_block_mask(docs, short_blocks)
        else:
            span = math.ceil(self.hp.max_window / BLOCK_SIZE)
            long = portable_mask(docs, window_blocks, span)
            short = portable_mask(docs, short_blocks, max(1, span // 2))
        layers = range(self.hp.num_layers)
        return [long if i in self.hp.long_window_layers else short for i in layers]

    def forward(self, input_seq: Tensor, target_seq: Tensor, window_blocks: Tensor) -> Tensor:
        docs = document_ids(input_seq, self.hp.eot_token)  # (T,)
        masks = self.masks(docs, window_blocks)
        tokens = input_seq.flatten()
        seq_len = input_seq.size(1)
        value_embeds = [table(tokens) for table in self.value_embeds]  # each (T, H * D)
        x = self.embed(input_seq)  # (B, S, C)
        if self.smear is not None:
            x = self.smear(x)
        x = norm(x).flatten(0, 1)[None]  # (1, T, C)
        x0 = x
        skips = []
        num_skips = self.hp.num_layers // 2
        first_decoder = self.hp.num_layers - num_skips
        for i, block in enumerate(self.blocks):
            if i >= first_decoder:  # U-net: the second half adds what the first half stored
                x = x + self.skip_weights[i - first_decoder] * skips.pop()
            ve = None
            if i in self.ve_of_layer:
                ve = value_embeds[self.ve_of_layer[i]]
            x = block(x, x0, ve, masks[i], seq_len)
            if i < num_skips:
                skips.append(x)
        x = norm(x)[0]  # (T, C)
        targets = target_seq.flatten()
        if self.training:
            return self.loss(x, targets)
        total = 0.0
        for some_x, some_targets in zip(x.split(self.val_slice), targets.split(self.val_slice)):
            total = total + self.loss(some_x, some_targets)
        return total / len(targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (T, C), targets (T,) -> the cross-entropy in nats, summed over tokens."""
        if self.use_fp8 and self.training:
            return torch.ops.nanogpt.head_loss(x, self.lm_head.weight, targets)[0]
        logits = softcap(self.lm_head(x), self.hp.model_dim)
        return F.cross_entropy(logits, targets, reduction="sum")


# -----------------------------------------------------------------------------
# 5. Data. A shard is a header of 256 int32 (magic, version, number of tokens, zeros) and uint16 tokens,
# all little-endian.


def shard_length(file):
    """Returns the number of tokens in a shard. Raises RankError if the header is invalid or doesn't
    match the file size."""
    header = np.fromfile(file, dtype="<i4", count=256)
    size = file.stat().st_size
    valid = len(header) == 256 and header[0] == 20240520 and header[1] == 1
    if not valid or size != 1024 + 2 * int(header[2]):
        raise RankError(
            f"{file} ({size} bytes) is not a valid shard; delete it and run its data script again"
        )
    return int(header[2])


def read_tokens(file, start, count, vocab_size):
    """Reads tokens (count,) uint16. Raises RankError if the file was truncated. (With mmap, the
    process would be killed.)"""
    tokens = np.fromfile(file, dtype="<u2", count=count, offset=1024 + 2 * start)
    if len(tokens) < count:
        raise RankError(f"{file} is shorter than its header says; run its data script again")
    if tokens.max(initial=0) >= vocab_size:  # a shard may be empty
        raise RankError(
            f"{file} has token {tokens.max()}, outside the vocabulary of {vocab_size}; "
            "does it belong to another track?"
        )
    return tokens


def global_batches(pattern, batch_size):
    """Yields the file and the first token's position of each global batch. Shards are read in
    sorted order. Trailing tokens that don't fill a batch are dropped. A relative pattern is looked
    up in the current folder first, then in this file's folder."""
    files = sorted(glob.glob(pattern))
    if not files:
        folder = glob.escape(str(Path(__file__).resolve().parent))
        files = sorted(glob.glob(f"{folder}/{pattern}"))
    if not files:
        raise InputError(
            f"no shards match {pattern}; make them with data/shakespeare.py (mini) or "
            "data/cached_fineweb10B.py (fineweb)"
        )
    for file in map(Path, files):
        # a batch needs batch_size + 1 tokens, because targets are shifted by one
        for start in range(0, shard_length(file) - batch_size, batch_size):
            yield file, start


def check_shards(pattern, batch_size, steps, vocab_size, option="--num_iterations"):
    """Reads everything that the run will read. Raises InputError now rather than hours later.
    If there are too few tokens, the message suggests lowering `option`."""
    batches = list(itertools.islice(global_batches(pattern, batch_size), steps))
    if len(batches) < steps:
        raise InputError(
            f"{pattern} has only enough tokens for {len(batches)} batches of {batch_size}, and the run "
            f"needs {steps}; add shards or lower {option}"
        )
    for file, start in batches:
        read_tokens(file, start, batch_size + 1, vocab_size)


def to_device(tensor, device):
    """Copies a batch to the device. The copy to a GPU is from pinned memory, so the CPU doesn't
    wait for it."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def distributed_data_generator(
    pattern, batch_size, rank, world_size, vocab_size=65536, device="cpu", first_batch=0
):
    """Yields this rank's slice of each batch: inputs int32 and targets int64, each (local,), where
    local = batch_size / world_size."""
    local = batch_size // world_size
    batches = global_batches(pattern, batch_size)
    for file, start in itertools.islice(batches, first_batch, None):
        tokens = read_tokens(file, start + rank * local, local + 1, vocab_size)
        tokens = torch.from_numpy(tokens.astype(np.int32))
        yield to_device(tokens[:-1], device), to_device(tokens[1:].long(), device)


# -----------------------------------------------------------------------------
# 6. Hyperparameters. The defaults are those of the fineweb track; `--name value` changes any of them.


def setting(default, help):
    """Defines a hyperparameter, with its text in --help."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class Hyperparameters:
    track: str = setting("fineweb", "set of defaults")
    # data
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "training shards")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    val_tokens: int = setting(
        10_485_760, "number of validation tokens; compare losses only if it is the same"
    )
    batch_tokens: int = setting(8 * 48 * 1024, "tokens per step, summed over all processes")
    train_seq_len: int = setting(
        48 * 1024, "tokens per training sequence; halved on small GPUs if not set"
    )
    val_seq_len: int = setting(4 * 64 * 1024, "tokens per validation sequence")
    sequences_per_pass: int = setting(
        1, "sequences per micro-batch; reduced if it doesn't divide the sequences of a process"
    )
    vocab_size: int = setting(50257, "number of token ids")
    eot_token: int = setting(50256, "token id that begins a document")
    # model
    num_layers: int = setting(12, "number of blocks")
    num_heads: int = setting(6, "attention heads per block")
    head_dim: int = setting(128, "channels per head")
    model_dim: int = setting(768, "channels of the residual stream")
    num_value_embeds: int = setting(3, "N value embedding tables, for the first N and last N layers")
    # as in modded-nanogpt, layer 7 is in both lists; without attention, its window has no effect
    attn_free_layers: tuple[int, ...] = setting((7,), "layers without attention, such as 0,7")
    long_window_layers: tuple[int, ...] = setting(
        (0, 4, 7, 11), "layers with the full window, such as 0,7"
    )
    max_window: int = setting(1728, "attention window at the end of training, in tokens")
    xsa: bool = setting(
        False, "subtract a learned part of a token's own value from the attention output"
    )
    smear: bool = setting(
        False, "add a learned part of the previous token's embedding to each embedding"
    )
    relu_slope: float = setting(0.0, "slope of the MLP's ReLU for negative inputs, before squaring")
    fp8: bool = setting(True, "in training, compute the head in FP8 on GPUs that support it")
    # optimization
    num_iterations: int = setting(1770, "training steps")
    cooldown_frac: float = setting(0.4, "learning rates decay in this last fraction of the steps")
    final_lr_frac: float = setting(0.1, "final learning rate, as a fraction of the initial one")
    head_lr: float = setting(0.22, "Adam's learning rate for the head")
    embed_lr: float = setting(0.6, "Adam's learning rate for token and value embeddings")
    scalar_lr: float = setting(
        0.04, "Adam's learning rate for scalars and vectors, such as lambdas and skip weights"
    )
    adam_beta1: float = setting(0.8, "decay of Adam's first moment")
    adam_beta2: float = setting(0.95, "decay of Adam's second moment")
    adam_eps: float = setting(1e-10, "Adam's epsilon; 1e-8 is too large for rare tokens")
    muon_lr: float = setting(0.05, "Muon's learning rate, for the matrices of the blocks")
    ns_steps: int = setting(5, "Newton-Schulz iterations")
    muon_momentum: float = setting(0.95, "Muon's momentum after its warm-up")
    muon_momentum_start: float = setting(0.85, "Muon's momentum at the start")
    muon_momentum_warmup: int = setting(300, "steps in which Muon's momentum rises")
    muon_beta2: float = setting(0.0, "decay of NorMuon's mean squares; 0 for plain Muon")
    # the run
    seed: int = setting(0, "seed of the initial weights")
    warmup_steps: int = setting(10, "untimed steps on random tokens; the weights are then reset")
    val_loss_every: int = setting(125, "steps between validations; 0 to validate only at the end")
    target_val_loss: float = setting(3.28, "validation loss to reach")
    save_checkpoint: bool = setting(False, "at the end, save a checkpoint and model.safetensors")

    @property
    def num_sequences(self):
        """Sequences per step."""
        return self.batch_tokens // self.train_seq_len

    @property
    def padded_vocab_size(self):
        """vocab_size rounded up to a multiple of 64, for faster matmuls."""
        return math.ceil(self.vocab_size / 64) * 64


TRACKS = {
    "fineweb": Hyperparameters(),
    "mini": Hyperparameters(  # a small version for two CPU cores, trained on Shakespeare as bytes
        track="mini",
        train_files="data/shakespeare/shakespeare_train_*.bin",
        val_files="data/shakespeare/shakespeare_val_*.bin",
        val_tokens=389_120,
        batch_tokens=4096,
        train_seq_len=1024,
        val_seq_len=12_160,
        sequences_per_pass=4,
        vocab_size=257,
        eot_token=256,
        num_layers=4,
        num_heads=2,
        head_dim=64,
        model_dim=128,
        num_value_embeds=1,
        attn_free_layers=(),
        long_window_layers=(0, 3),
        max_window=256,
        xsa=True,
        smear=True,
        relu_slope=0.5,
        num_iterations=325,
        cooldown_frac=1.0,
        final_lr_frac=0.0,
        head_lr=0.1,
        embed_lr=0.2,
        adam_beta2=0.98,
        muon_momentum=0.86,
        muon_momentum_warmup=100,
        muon_beta2=0.95,
        warmup_steps=3,
        val_loss_every=35,
        target_val_loss=1.50,
    ),
}

POSITIVE = (
    "val_tokens", "batch_tokens", "train_seq_len", "val_seq_len", "sequences_per_pass", "vocab_size",
    "num_layers", "num_heads", "head_dim", "model_dim", "max_window", "num_iterations",
    "cooldown_frac", "adam_eps", "ns_steps", "target_val_loss",
)
BELOW_ONE = ("adam_beta1", "adam_beta2", "muon_momentum", "muon_momentum_start", "muon_beta2")


def require(condition, message):
    if not condition:
        raise InputError(message)


def check_hyperparameters(hp, world_size, device="cpu"):
    """Raises InputError for invalid settings."""
    for name, value in vars(hp).items():
        if type(value) in (int, float):
            valid = math.isfinite(value) and value >= 0
            require(valid, f"--{name} {value}: must be finite and not negative")
    for name in POSITIVE:
        require(getattr(hp, name) > 0, f"--{name} {getattr(hp, name)}: must be more than zero")
    for name in BELOW_ONE:
        require(getattr(hp, name) < 1, f"--{name} {getattr(hp, name)}: must be less than 1")
    require(hp.cooldown_frac <= 1, f"--cooldown_frac {hp.cooldown_frac}: must be at most 1")
    require(hp.seed < 2**63, f"--seed {hp.seed}: must be less than 2**63")
    for whole_name, part_name in [
        ("batch_tokens", "train_seq_len"),
        ("val_tokens", "val_seq_len"),
    ]:
        whole, part = getattr(hp, whole_name), getattr(hp, part_name)
        require(part % BLOCK_SIZE == 0, f"--{part_name} {part}: must be a multiple of {BLOCK_SIZE}")
        require(whole % part == 0, f"--{whole_name} {whole}: must be a multiple of --{part_name} {part}")
    require(hp.head_dim % 4 == 0, f"--head_dim {hp.head_dim}: must be a multiple of 4")
    require(
        hp.eot_token < hp.vocab_size,
        f"--eot_token {hp.eot_token}: must be less than --vocab_size {hp.vocab_size}",
    )
    require(
        2 * hp.num_value_embeds <= hp.num_layers,
        f"--num_value_embeds {hp.num_value_embeds}: must be at most half of --num_layers {hp.num_layers}",
    )
    for name in ("attn_free_layers", "long_window_layers"):
        for i in getattr(hp, name):
            valid = 0 <= i < hp.num_layers
            message = f"--{name}: layer {i} doesn't exist, because --num_layers is {hp.num_layers}"
            require(valid, message)
    for i in range(hp.num_value_embeds):
        pair = (i, hp.num_layers - hp.num_value_embeds + i)
        used = any(layer not in hp.attn_free_layers for layer in pair)
        message = f"layers {pair} share a value embedding, so one of them needs attention"
        require(used, f"--attn_free_layers: {message}")
    if device == "cuda":
        require(hp.head_dim >= 16, f"--head_dim {hp.head_dim}: FlexAttention needs at least 16")
        fp8_fits = hp.model_dim % 16 == 0 or not uses_fp8(hp)
        advice = "FP8 needs a multiple of 16; change it or use --fp8 false"
        require(fp8_fits, f"--model_dim {hp.model_dim}: {advice}")
    val_sequences = hp.val_tokens // hp.val_seq_len
    most = math.gcd(hp.num_sequences, val_sequences)
    fits = [str(n) for n in range(1, most + 1) if most % n == 0]
    require(
        most % world_size == 0,
        f"{world_size} processes can't share {hp.num_sequences} training and {val_sequences} "
        f"validation sequences equally; possible numbers of processes: {', '.join(fits)}",
    )


def parse_bool(text):
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def parse_layers(text):
    if text == "none":
        return ()
    return tuple(int(layer) for layer in text.split(",") if layer)


def make_parser():
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        usage="train_gpt.py [--track NAME] [--device NAME] [--NAME VALUE ...]",
        description="Trains a GPT to a target validation loss in as little time as possible.",
    )

    def fail(message):
        raise InputError(f"{message}; --help lists all options")

    parser.error = fail
    parser.register("type", bool, parse_bool)
    parser.register("type", tuple, parse_layers)
    add = parser.add_argument
    add("--track", choices=TRACKS, help="default: fineweb when training on a GPU, otherwise mini")
    add("--device", choices=("cpu", "cuda"), help="default: cuda with a GPU, otherwise cpu")
    add("--log_dir", default="logs", help="folder for logs; default: logs")
    add("--num_runs", type=int, default=1, help="number of runs, with seeds from --seed on; default: 1")
    add("--checkpoint_dir", default="checkpoints", help="folder for checkpoints; default: checkpoints")
    every = "steps between checkpoints; also saves the final model; default: 0, never"
    add("--checkpoint_every", type=int, default=0, help=every)
    resume = "a checkpoint, a folder with checkpoints (takes the newest), or the word latest"
    add("--resume", metavar="PATH", help=resume)
    add("--resume_force", action="store_true", help="resume even if the source or the settings changed")
    return parser


def parse_arguments(argv):
    """Returns the options of the run, and the hyperparameters: the track's defaults with the
    changes from the command line. Raises InputError."""
    parser = make_parser()
    args = parser.parse_known_args(argv)[0]  # the track sets the defaults of the options below
    # with a GPU that PyTorch can't use, check_gpus fails; training must not silently use the CPU
    has_gpu = torch.cuda.is_available() or unusable_gpu()
    on_gpu = has_gpu and args.device != "cpu"
    default_track = "fineweb" if on_gpu else "mini"
    hp = TRACKS[args.track or default_track]
    parser.set_defaults(track=hp.track, device="cuda" if on_gpu else "cpu")
    parser.add_argument("-h", "--help", action="help", help="show this text and exit")
    group = parser.add_argument_group(f"hyperparameters, with the defaults of track {hp.track}")
    for field in dataclasses.fields(hp):
        if field.name == "track":
            continue
        value = getattr(hp, field.name)
        options = dict(type=type(value), default=value, metavar=type(value).__name__)
        shown = value
        if type(value) is bool:
            options.update(nargs="?", const=True)
        if type(value) is tuple:
            shown = ",".join(map(str, value)) or "none"
        text = field.metadata.get("help", "")  # a field that you add may have none
        group.add_argument(f"--{field.name}", help=f"{text}; default: {shown}", **options)
    args = parser.parse_args(argv)
    require(args.num_runs >= 1, f"--num_runs {args.num_runs}: must be at least 1")
    require(args.num_runs == 1 or not args.resume, "--resume: only one run can be resumed")
    require(args.checkpoint_every >= 0, "--checkpoint_every: must not be negative")
    given = any(word.split("=")[0] == "--train_seq_len" for word in argv)
    args.fit_memory = args.device == "cuda" and hp.track == "fineweb" and not given
    values = {name: getattr(args, name) for name in vars(hp)}
    return args, Hyperparameters(**values)


# -----------------------------------------------------------------------------
# 7. Processes and machines

World = collections.namedtuple("World", "rank size device")


def read_text(path):
    """Returns the text of a file, or "" if it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_quota(folder="/sys/fs/cgroup"):
    """Returns the CPU limit of a container in cores, or infinity."""
    words = read_text(f"{folder}/cpu.max").split()
    if not words:  # cgroup v1
        words = read_text(f"{folder}/cpu/cpu.cfs_quota_us").split()
        words += read_text(f"{folder}/cpu/cpu.cfs_period_us").split()
    if len(words) < 2 or not words[0].isdigit():  # "max" or -1: no limit
        return math.inf
    return int(words[0]) / int(words[1])


def cpu_cores():
    """Returns the number of cores that this process may use."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, int(min(cores, cpu_quota())))


cpuinfo = {}
for line in read_text("/proc/cpuinfo").splitlines():  # it repeats the lines for every core
    name, _, value = line.partition(":")
    cpuinfo[name.strip()] = value.strip()
CPU_MODEL = cpuinfo.get("model name", platform.machine())
CPU_FLAGS = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())  # instruction sets
CPU_CORES = cpu_cores()


def activation_dtype(device):
    """Returns bf16 on GPUs and on CPUs with bf16 matmul instructions, otherwise float32."""
    if device.type == "cuda" or CPU_FLAGS & {"avx512_bf16", "amx_bf16", "bf16"}:
        return torch.bfloat16
    return torch.float32


def unusable_gpu():
    """Returns whether this machine has an NVIDIA GPU that PyTorch can't use. Looks for
    /dev/nvidia*, which only exists on Linux. If CUDA_VISIBLE_DEVICES is empty or -1, the user has
    hidden the GPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return bool(glob.glob("/dev/nvidia[0-9]*")) and not hidden and not torch.cuda.is_available()


def weakest_gpu():
    """Returns the compute capability and the name of the weakest GPU in use on this machine."""
    gpus = range(env_int("LOCAL_WORLD_SIZE", 1))
    return min((torch.cuda.get_device_capability(i), torch.cuda.get_device_name(i)) for i in gpus)


def check_gpus():
    """Raises InputError unless each process of this machine has a GPU that can train."""
    build = f"PyTorch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"
    require(
        torch.cuda.is_available(),
        f"--device cuda: {build} finds no GPU that it can use; check the driver with nvidia-smi, "
        "install a build for it (https://pytorch.org/get-started/locally), or use --device cpu",
    )
    processes = env_int("LOCAL_WORLD_SIZE", 1)
    gpus = torch.cuda.device_count()
    require(
        processes <= gpus,
        f"{processes} processes need {processes} GPUs, but PyTorch finds {gpus}; start fewer processes "
        "or use --device cpu",
    )
    capability, name = weakest_gpu()
    require(
        torch.version.hip or capability >= (8, 0),
        f"the GPU {name} has compute capability {capability[0]}.{capability[1]}, but bfloat16 and "
        "FlexAttention need 8.0 (Ampere) or later; use another GPU or --device cpu",
    )


def uses_fp8(hp):
    """Returns whether the head uses FP8: only on NVIDIA GPUs that support it. AMD GPUs may use
    another FP8 format."""
    return hp.fp8 and torch.version.hip is None and weakest_gpu()[0] >= (8, 9)


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


def fit_to_memory(args, hp, world, resumed):
    """Fits train_seq_len to the free memory of all GPUs, unless the user chose it."""
    if not args.fit_memory:
        return hp
    if resumed:
        return dataclasses.replace(hp, train_seq_len=resumed["settings"]["train_seq_len"])
    free = torch.cuda.mem_get_info(world.device)[0] / 2**20
    hp = fitted(hp, free, uses_fp8(hp))
    shortest = torch.full((), hp.train_seq_len, device=world.device)
    if world.size > 1:
        dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
    return dataclasses.replace(hp, train_seq_len=shortest.item())


def start_world(device_name):
    """Joins torchrun's process group: NCCL on CUDA, gloo on the CPU, none for a single process."""
    rank = env_int("RANK", 0)
    size = env_int("WORLD_SIZE", 1)
    if device_name == "cuda":
        check_gpus()
        device = torch.device("cuda", env_int("LOCAL_RANK", 0))
        torch.cuda.set_device(device)
        backend, device_id = "nccl", device
    else:
        device = torch.device("cpu")
        backend, device_id = "gloo", None
        set_up_cpu()
    if size > 1:  # ten minutes, because another rank may still be compiling
        timeout = datetime.timedelta(minutes=10)
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    return World(rank, size, device)


def set_up_cpu():
    # otherwise threads sum embedding gradients in varying order, and runs aren't reproducible
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc: keep freed memory, because mapping it again is slow
        M_TRIM_THRESHOLD = -1  # option numbers from malloc.h
        M_MMAP_MAX = -4
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never return the top of the heap
        libc.mallopt(M_MMAP_MAX, 0)  # take large blocks from the heap, too
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it to 1 if it starts several processes
        processes = env_int("LOCAL_WORLD_SIZE", 1)
        torch.set_num_threads(max(1, CPU_CORES // processes))


def describe_machine(world, compiler_line):
    """Returns lines for the log about the GPUs, or the CPU and its compiler. No host or user
    name."""
    if world.device.type == "cuda":
        try:
            command = subprocess.run(
                ["nvidia-smi"], capture_output=True, encoding="utf-8", errors="replace"
            )
        except FileNotFoundError:
            return f"{torch.cuda.get_device_name()} with world_size={world.size}: nvidia-smi not found"
        # cuts off the table of processes, because it has paths in it
        return re.sub(r"\n[^\n]*\n[^\n]*Processes:.*", "", command.stdout, flags=re.S)
    prefixes = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
    flags = sorted(flag for flag in CPU_FLAGS if flag.startswith(prefixes))
    openmp = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(("OMP_", "GOMP_")):
            openmp.append(f"{name}={value}")
    return (
        f"CPU: {CPU_MODEL}, {CPU_CORES} cores, {torch.get_num_threads()} threads a process, "
        f"instruction sets: {' '.join(flags)}\n{compiler_line}\nOpenMP: {' '.join(openmp) or 'defaults'}"
    )


def log_header(hp, world, compiler_line=""):
    """Returns the start of a log: the source, versions, machine and settings."""
    settings = dict(dataclasses.asdict(hp), world_size=world.size)
    plural = "es" if world.size > 1 else ""
    lines = [
        SOURCE,
        "=" * 100,
        f"Running Python {sys.version}",
        f"Running PyTorch {torch.version.__version__} compiled for CUDA {torch.version.cuda}",
        describe_machine(world, compiler_line),
        f"{world.size} process{plural} on {world.device.type}",
        "=" * 100,
        f"hyperparameters: {json.dumps(settings)}\n",
    ]
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# 8. Optimizers and schedules


def build_model(hp, world):
    torch.manual_seed(hp.seed)  # in case you add a random vector: init_weights only sets matrices
    use_fp8 = world.device.type == "cuda" and uses_fp8(hp)
    model = GPT(hp, activation_dtype(world.device), use_fp8).to(world.device)
    if world.size > 1:
        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
    return model


def build_optimizers(model, hp):
    """Muon trains the matrices of the blocks; Adam the head, the embeddings, and the scalars.
    Raises ValueError for a parameter that isn't in exactly one group."""
    head = [model.lm_head.weight]
    embeds = [p for name, p in model.named_parameters() if "embed" in name]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.blocks.parameters() if p.ndim >= 2]
    grouped = [id(p) for p in head + embeds + scalars + matrices]
    for name, p in model.named_parameters():
        groups = grouped.count(id(p))
        if groups != 1:
            raise ValueError(f"build_optimizers puts {name} into {groups} groups, instead of one")
    adam = torch.optim.Adam(
        [
            dict(params=head, lr=hp.head_lr),
            dict(params=embeds, lr=hp.embed_lr),
            dict(params=scalars, lr=hp.scalar_lr),
        ],
        betas=(hp.adam_beta1, hp.adam_beta2),
        eps=hp.adam_eps,
        fused=True,
    )
    muon = Muon(matrices, hp.muon_lr, hp.muon_momentum, hp.ns_steps, hp.muon_beta2)
    for group in adam.param_groups + muon.param_groups:
        group["initial_lr"] = group["lr"]
    return [adam, muon]


def get_lr(step, hp):
    """Returns the multiplier of all learning rates: 1, then a linear decay to final_lr_frac."""
    remaining = 1 - step / hp.num_iterations
    if remaining >= hp.cooldown_frac:
        return 1.0
    w = remaining / hp.cooldown_frac
    return w + (1 - w) * hp.final_lr_frac


def get_muon_momentum(step, hp):
    if step >= hp.muon_momentum_warmup:
        return hp.muon_momentum
    frac = step / hp.muon_momentum_warmup
    return (1 - frac) * hp.muon_momentum_start + frac * hp.muon_momentum


def get_window_blocks(step, hp):
    """Returns the long window in blocks. It grows linearly to max_window, rounded up."""
    window = hp.max_window * (step / hp.num_iterations)
    return max(1, math.ceil(window / BLOCK_SIZE))


def set_schedules(optimizers, step, hp):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr(step, hp)
            if "momentum" in group:
                group["momentum"] = get_muon_momentum(step, hp)


# -----------------------------------------------------------------------------
# 9. Compilation and warm-up, on random tokens, before the clock starts

# the C++ compiler that PyTorch uses
CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
MAX_LOSS_ERROR = 1e-3     # relative; correct builds of mini stay below 2e-6
MAX_GRADIENT_ERROR = 0.1  # relative error of the norm; correct builds of mini stay below 1.4e-2
COMPILE_ADVICE = (
    f"compiling needs a C++ compiler ({CXX}), Python's headers and openssl (Debian, Ubuntu: apt "
    "install g++ python3-dev openssl), free disk space, and a TORCHINDUCTOR_CACHE_DIR that is "
    "writable and not mounted noexec"
)


def print_dots(done):
    while not done.wait(1):
        print(".", end="", flush=True)


def compiler_version():
    """Returns the first line of `g++ --version`, or "" if there is no working compiler."""
    try:
        command = subprocess.run(
            [CXX, "--version"], capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError:
        return ""
    return command.stdout.partition("\n")[0].strip()


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


def losses_and_gradients(run_model, model, hp, world):
    """Runs a training micro-batch and a validation sequence of random tokens through run_model,
    which is the model or its compiled version. Returns the losses and the gradients by name.
    Gradients of scalars are left out, because they are mostly rounding error."""
    rng = torch.Generator().manual_seed(0)
    shape = (sequences_per_pass(hp, world), hp.train_seq_len)
    tokens = torch.randint(hp.vocab_size, shape, generator=rng)
    window_blocks = get_window_blocks(hp.num_iterations, hp)
    model.train()
    loss = run_model(tokens.int(), tokens.roll(-1), torch.tensor(window_blocks, dtype=torch.int32))
    loss.backward()
    results = {"training loss": loss.detach().double()}
    for name, p in model.named_parameters():
        if p.ndim >= 2 and p.grad is not None:
            results[f"gradient of {name}"] = p.grad.double()
    model.zero_grad()
    tokens = torch.randint(hp.vocab_size, (hp.val_seq_len,), generator=rng)
    alone = World(0, 1, world.device)  # evaluate on this process only
    sequences = [(tokens.int(), tokens.roll(-1))]
    results["validation loss"] = evaluate(run_model, sequences, window_blocks, hp, alone)
    return results


def relative_error(value, right):
    return (value - right).norm() / right.norm().clamp_min(1e-30)  # 0 if both are zero


def wrong_results(model, compiled, hp, world):
    """Compares the compiled model with the uncompiled one. Returns what differs, or "".

    Some models amplify rounding. So a difference also has to be three times as large as the
    rounding error of the uncompiled model, which is measured against a copy in float32."""
    results = losses_and_gradients(compiled, model, hp, world)
    expected = losses_and_gradients(model, model, hp, world)
    if not expected["training loss"].isfinite():
        return ""  # the model overflows with these weights, which says nothing about the compiler
    in_float32 = None
    for name, right in expected.items():
        error = relative_error(results[name], right)
        if not error.isfinite():
            return f"the {name} is not finite"
        limit = MAX_GRADIENT_ERROR
        if name.endswith("loss"):
            limit = MAX_LOSS_ERROR
        if error <= limit:
            continue
        if in_float32 is None:
            twin = copy.deepcopy(model).float()
            in_float32 = losses_and_gradients(twin, twin, hp, world)
        rounding_error = relative_error(right, in_float32[name])
        if error > 3 * rounding_error or rounding_error.isnan():
            return f"the {name} is off by {100 * error:.2g}%"
    return ""


def first_error(text):
    """Returns the first line with an error of the compiler, or else the first line of the text."""
    output = text.partition("Output:\n")[2] or text  # PyTorch quotes the compiler after this
    for line in output.splitlines():
        if "error" in line:
            return line.strip()[:200]
    return text.partition("\n")[0].strip()[:200]


def compile_problem(model, compiled, hp, world):
    """Compiles the model and checks its results. Returns why it can't be used, or ""."""
    randomize(model)
    try:
        wrong = wrong_results(model, compiled, hp, world)
    except (OSError, RuntimeError) as e:  # PyTorch's compilation errors are RuntimeErrors
        losses_and_gradients(model, model, hp, world)  # a bug in the model itself raises here, too
        return f"{first_error(str(e))}; {COMPILE_ADVICE}"
    finally:
        model.zero_grad()
    if wrong:
        return f"code compiled by {CXX} is wrong ({wrong}); install GCC 14 or later, or set CXX"
    return ""


def compile_model(model, hp, world):
    """Returns the model to train with, compiled if possible, and a line about the compiler for the
    log. On a CPU, it also checks the results of the compiled model. This overwrites the weights."""
    compiled = torch.compile(model, dynamic=False)
    if world.device.type == "cuda":
        return compiled, ""
    march = "native"
    if torch.__version__ >= (2, 13):  # a TorchVersion, not a str; earlier ones ignore the variable
        march = os.environ.get("TORCHINDUCTOR_CPP_MARCH", "native")
    line = f"Compiler: {compiler_version() or 'none'}; flags: -march={march}; model compiled:"
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return model, f"{line} no (TORCH_COMPILE_DISABLE is set)"
    done = threading.Event()
    if world.rank == 0:
        print("compiling: about a minute the first time, then seconds", end="", flush=True)
        threading.Thread(target=print_dots, args=(done,), daemon=True).start()
    problem = compile_problem(model, compiled, hp, world)
    done.set()
    if world.rank == 0:
        print()
    # if one rank can't compile, no rank does
    first_failed = torch.tensor(world.size)  # no rank
    if problem:
        first_failed = torch.tensor(world.rank)
    if world.size > 1:
        dist.all_reduce(first_failed, op=dist.ReduceOp.MIN)
    if first_failed == world.size:
        return compiled, f"{line} yes"
    problem = problem or f"rank {first_failed.item()} can't compile it"
    if world.rank == first_failed:
        message = f"warning: training without torch.compile, at about half the speed: {problem}"
        print(message, file=sys.stderr, flush=True)
    return model, f"{line} no ({problem})"


def warm_up(model, optimizers, buckets, hp, world):
    """Trains and validates on random tokens: this compiles the kernels, connects the processes and
    allocates memory. Then resets the weights and the optimizers."""
    local = hp.batch_tokens // world.size
    window_blocks = get_window_blocks(hp.num_iterations, hp)
    rng = torch.Generator(world.device).manual_seed(world.rank)
    count = max(local, hp.val_seq_len)
    tokens = torch.randint(hp.vocab_size, (count,), device=world.device, generator=rng)
    targets = tokens[:local]  # also the inputs: only shapes and dtypes matter here
    for _ in range(hp.warmup_steps):
        train_step(model, optimizers, buckets, targets.int(), targets, window_blocks, hp, world)
    targets = tokens[: hp.val_seq_len]
    if hp.warmup_steps:
        evaluate(model, [(targets.int(), targets)], window_blocks, hp, world)
    with torch.no_grad():  # compile_model and earlier runs have changed the weights, too
        for p, initial in zip(model.parameters(), build_model(hp, world).parameters()):
            p.copy_(initial)
    for optimizer in optimizers:
        optimizer.state.clear()


# -----------------------------------------------------------------------------
# 10. Gradient buckets


class GradientBuckets:
    """Sums gradients over the processes, in buckets. The gradients of a bucket have the same dtype
    and at most 25 MB in total; a larger gradient has a bucket of its own.

    Backward produces gradients in the reverse order of the forward pass. In the last micro-step of
    a step, a bucket is all-reduced as soon as all its gradients are there. This overlaps with the
    rest of backward only if the model isn't compiled: a compiled one returns all gradients at
    once."""

    def __init__(self, params, bucket_bytes=25 * 2**20):
        self.last_micro_step = False  # train_step sets it
        self.handles = []
        self.buckets = []
        self.bucket_of = {}  # parameter -> index of its bucket
        filling = {}  # dtype -> index of the bucket that is being filled
        for p in reversed(list(params)):
            index = filling.get(p.dtype)
            if index is not None:
                size = p.nbytes + sum(other.nbytes for other in self.buckets[index])
            if index is None or size > bucket_bytes:
                index = len(self.buckets)
                filling[p.dtype] = index
                self.buckets.append([])
            self.buckets[index].append(p)
            self.bucket_of[p] = index
            p.register_post_accumulate_grad_hook(self._gradient_ready)
        self.missing = [len(bucket) for bucket in self.buckets]

    def _gradient_ready(self, param):
        if not self.last_micro_step:
            return
        index = self.bucket_of[param]
        self.missing[index] -= 1
        if self.missing[index] == 0 and dist.is_initialized():
            self._reduce(self.buckets[index])

    def _reduce(self, bucket):
        if len(bucket) == 1:
            flat = bucket[0].grad.flatten()  # a view, not a copy
        else:
            flat = torch.cat([p.grad.flatten() for p in bucket])
        # gradients become views of flat, so the all-reduce updates them
        for p, grad in zip(bucket, flat.split([p.numel() for p in bucket])):
            p.grad = grad.view_as(p)
        self.handles.append(dist.all_reduce(flat, async_op=True))

    def wait(self):
        assert not any(self.missing), "a parameter got no gradient"
        for handle in self.handles:
            handle.wait()
        self.handles = []
        self.missing = [len(bucket) for bucket in self.buckets]


# -----------------------------------------------------------------------------
# 11. Checkpoints


@contextlib.contextmanager
def writing(path):
    """Turns an OSError into a RankError that names the path."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or e
        advice = "free some space or use another folder"
        raise RankError(f"can't write {path} ({reason}); {advice}") from None


def write_file(path, data):
    """Writes to a temporary file, fsyncs, then renames: a file with the final name is complete."""
    temporary = path.with_suffix(".tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def save_checkpoint(folder, step, book, model, optimizers, first_bad_step):
    """Rank 0 writes folder/stepNNNNNN.pt, keeps the one before it, deletes older ones. All ranks
    must call this. Raises InputError if a weight or any loss so far isn't finite. There is no
    random state to save, because training draws no random numbers."""
    start = time.perf_counter()
    weight_norm = nn.utils.get_total_norm(model.parameters())
    bad_step = first_bad(first_bad_step, step, weight_norm)
    vote(bad_step, book.world)  # raises InputError on all ranks if there is one
    optimizers[1].gather_state()  # Muon's
    if book.world.rank > 0:
        return
    state = dict(
        run_id=book.run_id,
        step=step,
        train_time_ms=book.train_ms,
        validations=book.validations,
        log=book.text,
        settings=dataclasses.asdict(book.hp),
        source=SOURCE,
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
    )
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = folder / f"step{step:06d}.pt"
    write_file(path, buffer.getvalue())
    earlier = [file for file in folder.glob("step*.pt") if file < path]
    earlier.sort(key=lambda file: file.stat().st_mtime)
    for old in earlier[:-1]:
        old.unlink(missing_ok=True)
    book.write(f"checkpoint: step {step} written in {time.perf_counter() - start:.1f} s, untimed")


def save_model(path, model, hp):
    """Writes the weights as safetensors, with the hyperparameters as metadata."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    metadata = dict(model="speedrun", hyperparameters=json.dumps(dataclasses.asdict(hp)))
    write_file(path, safetensors.torch.save(tensors, metadata))


def read_checkpoint(where, checkpoint_dir):
    """Reads a checkpoint. `where` is a file, a folder (its newest checkpoint), or "latest" (the
    newest of all runs). Raises InputError if there is none or it is damaged."""
    path = Path(checkpoint_dir if where == "latest" else where)
    if not path.is_file():
        files = sorted(path.rglob("step*.pt"), key=lambda file: file.stat().st_mtime)
        require(files, f"--resume {where}: there is no checkpoint in {path}")
        path = files[-1]
    try:
        intact = zipfile.ZipFile(path).testzip() is None  # torch.load doesn't check the CRCs
        state = torch.load(path, map_location="cpu", weights_only=True)  # runs no code from the file
        uuid.UUID(state["run_id"])  # must be a UUID, because it is used as a file name
    except PermissionError:
        raise
    except Exception:  # corrupt files raise many exception types
        intact = False
    require(intact, f"--resume: {path} is damaged or not a checkpoint; try the previous one")
    return state


def find_checkpoint(args, hp):
    """Returns the checkpoint of --resume. Raises InputError if its source or settings differ from
    this run's, unless --resume_force is given."""
    state = read_checkpoint(args.resume, args.checkpoint_dir)
    may_differ = ["save_checkpoint"]
    if args.fit_memory:
        may_differ.append("train_seq_len")  # fit_to_memory takes the checkpoint's
    differences = []
    for name, value in dataclasses.asdict(hp).items():
        old = state["settings"].get(name)
        if old != value and name not in may_differ:
            differences.append(f"{name}: {old} in the checkpoint, {value} now")
    if state["source"] != SOURCE:
        differences.append("the source has changed")
    step = state["step"]
    require(
        step <= hp.num_iterations,
        f"--resume: the checkpoint is at step {step}, but --num_iterations is {hp.num_iterations}",
    )
    state["forced"] = ""
    if differences:
        found = "; ".join(differences)
        advice = "undo the change, or use --resume_force"
        require(args.resume_force, f"--resume: not the run of the checkpoint ({found}); {advice}")
        state["forced"] = f", with --resume_force ({found}); it can't be a record"
    return state


def load_checkpoint(state, model, optimizers):
    try:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            # loads only the moments, because --resume_force may change learning rates and betas
            saved["param_groups"] = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(saved)
    except (RuntimeError, ValueError) as e:
        reason = str(e).splitlines()[-1].strip()
        raise InputError(
            f"--resume: the checkpoint is from a different model ({reason}); use the settings of its run"
        ) from None


# -----------------------------------------------------------------------------
# 12. The timed loop


def sequences_per_pass(hp, world):
    """Returns the micro-batch size: hp.sequences_per_pass, reduced to a divisor of the number of
    sequences of each process."""
    return math.gcd(hp.sequences_per_pass, hp.num_sequences // world.size)


def train_step(model, optimizers, buckets, inputs, targets, window_blocks, hp, world):
    """Runs one training step on this process's tokens (local,). Returns their mean loss."""
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    per_pass = sequences_per_pass(hp, world)
    inputs = inputs.view(-1, per_pass, hp.train_seq_len)  # (micro-steps, B, S)
    targets = targets.view(-1, per_pass, hp.train_seq_len)
    total = torch.zeros((), device=world.device)
    # As in modded-nanogpt, the gradient is that of the summed loss divided by the number of
    # sequences. Muon ignores its scale, and so does Adam, up to adam_eps.
    weight = torch.full((), 1 / hp.num_sequences, device=world.device)
    model.train()
    for i in range(len(inputs)):
        buckets.last_micro_step = i == len(inputs) - 1
        loss = model(inputs[i], targets[i], window)
        loss.backward(weight)
        total += loss.detach()
    buckets.wait()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total / inputs.numel()


@torch.no_grad()
def evaluate(model, sequences, window_blocks, hp, world):
    """Returns the mean loss over all processes. `sequences` yields this process's inputs and
    targets, each (val_seq_len,). Every process has the same number of them."""
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    model.eval()
    losses = [model(inputs[None], targets[None], window) for inputs, targets in sequences]
    mean = torch.stack(losses).double().mean()
    if world.size > 1:
        dist.all_reduce(mean)
    return mean / world.size


def validate(model, step, hp, world):
    """Returns the loss on the first val_tokens / val_seq_len sequences of the validation shards.
    They don't depend on the number of processes."""
    sequences = distributed_data_generator(
        hp.val_files, hp.val_seq_len, 0, 1, hp.vocab_size, world.device  # rank 0 of 1: all of them
    )
    count = hp.val_tokens // hp.val_seq_len
    mine = itertools.islice(sequences, world.rank, count, world.size)  # every world.size-th sequence
    return evaluate(model, mine, get_window_blocks(step, hp), hp, world)


def peak_memory(world):
    """Returns a line for the log: peak memory of the GPU's allocator, or on a CPU of the
    process."""
    if world.device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        allocated = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        reserved = allocated
    return f"peak memory allocated: {allocated // 2**20} MiB reserved: {reserved // 2**20} MiB"


def synchronized_ms(world):
    """Reads the clock after all ranks and their GPUs have finished their work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.size > 1:
        dist.barrier()
    return 1000 * time.perf_counter()


def read_vote(votes):
    """Returns the first step whose loss isn't finite (or math.inf), and the signal received (or
    0)."""
    first_bad_step, minus_signal = votes.tolist()
    return first_bad_step, -int(minus_signal)


def start_vote(first_bad_step, world):
    """All-reduces the first step whose loss isn't finite, and the signal received. Returns a copy
    on the CPU, and the CUDA event after which it can be read. Doesn't wait for the GPU."""
    # one reduction serves for both: the minimum of the negative signals is the largest signal
    votes = torch.stack([first_bad_step, torch.full_like(first_bad_step, -stop_signal)])
    if world.size > 1:
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    votes = votes.to("cpu", non_blocking=True)  # PyTorch copies into pinned memory
    copied = None
    if world.device.type == "cuda":
        copied = torch.cuda.current_stream().record_event()
    return votes, copied


def finish_vote(votes, copied):
    """Returns the signal that any rank has received, or 0. Raises InputError if any rank had a loss
    that isn't finite. Waits for the copy."""
    if copied is not None:
        copied.synchronize()
    step, stop = read_vote(votes)
    if step < math.inf:
        raise InputError(
            f"step {step:.0f}: the loss or the weights are not finite. If you raised a learning rate, "
            "lower it. If you changed nothing, the compiler or the machine may be at fault: report it "
            "with the log, and on a CPU try TORCH_COMPILE_DISABLE=1"
        )
    return stop


def vote(first_bad_step, world):
    """Votes, and waits for the result."""
    votes, copied = start_vote(first_bad_step, world)
    return finish_vote(votes, copied)


def vote_while_training(pending, step, first_bad_step, world):
    """Starts a vote every five steps, and reads it five steps later. By then the copy has finished,
    so reading it doesn't stall the GPU. All ranks read it after the same step, and so stop
    together. `pending` holds the vote that isn't read yet. A single process on a CPU votes after
    every step."""
    if world.size == 1 and world.device.type == "cpu":
        return vote(first_bad_step, world)
    if step % 5 != 0:
        return 0
    pending.append(start_vote(first_bad_step, world))
    if len(pending) == 1:
        return 0  # this is the first vote
    votes, copied = pending.pop(0)
    return finish_vote(votes, copied)


def first_bad(first_bad_step, step, value):
    """Returns the smaller of first_bad_step and `step` if the value isn't finite, otherwise
    first_bad_step. Doesn't wait for the GPU."""
    earlier = first_bad_step.clamp_max(step)  # the smaller of the two
    return torch.where(value.isfinite(), first_bad_step, earlier)


class Logbook:
    """The clock, validations and log of a run. Rank 0 prints it and writes log_dir/RUN_ID.txt."""

    def __init__(self, log_dir, hp, world, resumed, compiler_line):
        self.hp = hp
        self.world = world
        self.run_id = resumed.get("run_id", str(uuid.uuid4()))
        self.train_ms = resumed.get("train_time_ms", 0.0)
        self.validations = resumed.get("validations", [])  # (step, val_loss, train_ms)
        self.text = resumed.get("log") or log_header(hp, world, compiler_line)
        self.path = Path(log_dir) / f"{self.run_id}.txt"
        if world.rank == 0:
            write_file(self.path, self.text.encode())
            print(self.path, flush=True)

    def start_clock(self):
        self.start_ms = synchronized_ms(self.world)

    def stop_clock(self):
        self.train_ms += synchronized_ms(self.world) - self.start_ms

    def write(self, line, end="\n"):
        """With end="\\r", the next line replaces this one on the terminal."""
        if self.world.rank > 0:
            return
        self.text += f"{line}\n"
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        if sys.stdout.isatty():
            line = line.ljust(79)  # overwrite the previous line
        print(line, end=end, flush=True)

    def step(self, step):
        # approximate: doesn't wait for the GPU
        ms = self.train_ms + 1000 * time.perf_counter() - self.start_ms
        end = "\r" if sys.stdout.isatty() else "\n"
        steps = f"step:{step}/{self.hp.num_iterations}"
        self.write(f"{steps} train_time:{ms:.0f}ms step_avg:{ms / step:.2f}ms", end)

    def validation(self, step, val_loss):
        ms = self.train_ms
        self.validations.append((step, val_loss, ms))
        steps = f"step:{step}/{self.hp.num_iterations}"
        times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        self.write(f"{steps} val_loss:{val_loss:.4f} {times}")

    def result(self):
        target = self.hp.target_val_loss
        step, val_loss, ms = self.validations[-1]
        verdict = "not met"
        for met_step, met_loss, met_ms in self.validations:
            if met_loss <= target:
                verdict = f"met at step {met_step} after {met_ms / 1000:.2f} s of training"
                break
        bits = ""
        if self.hp.vocab_size == 257:  # tokens are bytes
            bits = f" ({val_loss / math.log(2):.4f} bits per byte)"
        speed = self.hp.batch_tokens * step / (ms / 1000)
        self.write(peak_memory(self.world))
        self.write(
            f"target {target}: {verdict}; val_loss {val_loss:.4f}{bits} after {ms / 1000:.2f} s, "
            f"{speed:,.0f} tokens/s"
        )


def start_run(args, hp, world, parts, resumed):
    """Starts the log, warms up, and loads the checkpoint of a resumed run."""
    model, compiled, compiler_line, optimizers, buckets = parts
    book = Logbook(args.log_dir, hp, world, resumed, compiler_line)
    usual = TRACKS[hp.track].train_seq_len
    if hp.train_seq_len != usual and not resumed:
        book.write(
            f"train_seq_len is {hp.train_seq_len} instead of the track's {usual}, with "
            f"{hp.batch_tokens} tokens per step"
        )
    start = time.perf_counter()
    warm_up(compiled, optimizers, buckets, hp, world)
    seconds = time.perf_counter() - start
    book.write(f"warm-up: {hp.warmup_steps} steps in {seconds:.1f} s, untimed")
    if resumed:
        load_checkpoint(resumed, model, optimizers)
        machine = describe_machine(world, compiler_line)
        if machine not in book.text:  # another machine or another compiler
            book.write(machine)
        plural = "es" if world.size > 1 else ""
        where = f"from step {resumed['step']}, on {world.size} process{plural}"
        book.write(f"resume: {where}{resumed['forced']}")
    return book


def run(args, hp, world, parts, resumed):
    """Trains once. Returns the last validation: (step, val_loss, training time in ms)."""
    global in_training
    model, compiled, _, optimizers, buckets = parts
    book = start_run(args, hp, world, parts, resumed)
    folder = Path(args.checkpoint_dir) / book.run_id
    first_step = resumed.get("step", 0)
    batches = distributed_data_generator(
        hp.train_files, hp.batch_tokens, world.rank, world.size, hp.vocab_size, world.device, first_step
    )
    first_bad_step = torch.full((), math.inf, dtype=torch.float64, device=world.device)
    pending = []
    in_training = True
    book.start_clock()
    for step in range(first_step, hp.num_iterations + 1):
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            book.stop_clock()
            val_loss = validate(compiled, step, hp, world)
            bad_step = first_bad(first_bad_step, step, val_loss)
            stop = vote(bad_step, world)  # raises InputError; only the last step uses `stop`
            book.validation(step, val_loss.item())
            book.start_clock()
        if last_step:
            break
        # --------------- training
        set_schedules(optimizers, step, hp)
        inputs, targets = next(batches)
        window_blocks = get_window_blocks(step, hp)
        loss = train_step(compiled, optimizers, buckets, inputs, targets, window_blocks, hp, world)
        first_bad_step = first_bad(first_bad_step, step + 1, loss)
        stop = vote_while_training(pending, step + 1, first_bad_step, world)
        book.step(step + 1)
        # --------------- checkpoint
        due = args.checkpoint_every and (step + 1) % args.checkpoint_every == 0
        if stop or due or (hp.save_checkpoint and step + 1 == hp.num_iterations):
            book.stop_clock()
            save_checkpoint(folder, step + 1, book, model, optimizers, first_bad_step)
            book.start_clock()  # waits for rank 0, which writes the file
        if stop:
            os._exit(128 + stop)  # all ranks stop here
    book.result()
    if world.rank == 0 and (hp.save_checkpoint or args.checkpoint_every):
        save_model(folder / "model.safetensors", model, hp)
    if stop:  # received too late for a checkpoint
        os._exit(128 + stop)
    return book.validations[-1]


def check_inputs(args, hp):
    """Raises InputError for invalid settings or inputs, before anything slow begins."""
    if args.device == "cuda":
        check_gpus()
    check_hyperparameters(hp, env_int("WORLD_SIZE", 1), args.device)
    if env_int("LOCAL_RANK", 0) != 0:
        return  # one process per machine reads the files
    val_steps = hp.val_tokens // hp.val_seq_len
    check_shards(hp.train_files, hp.batch_tokens, hp.num_iterations, hp.vocab_size)
    check_shards(hp.val_files, hp.val_seq_len, val_steps, hp.vocab_size, "--val_tokens")
    folders = [args.log_dir]
    if args.checkpoint_every or hp.save_checkpoint:
        folders.append(args.checkpoint_dir)
    for folder in folders:
        with writing(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # an existing folder may be read-only


def train(args, hp):
    """Trains --num_runs times. Returns the model of the last run."""
    global in_training
    check_inputs(args, hp)
    world = start_world(args.device)
    resumed = find_checkpoint(args, hp) if args.resume else {}
    hp = fit_to_memory(args, hp, world, resumed)
    check_hyperparameters(hp, world.size, args.device)  # again, with the sequence length that fits
    handle_signals()  # for a script that imports this file
    model = build_model(hp, world)
    optimizers = build_optimizers(model, hp)
    compiled, compiler_line = compile_model(model, hp, world)
    parts = (model, compiled, compiler_line, optimizers, GradientBuckets(model.parameters()))
    losses = []
    for i in range(args.num_runs):
        hp_of_run = dataclasses.replace(hp, seed=hp.seed + i)
        try:
            _, val_loss, _ = run(args, hp_of_run, world, parts, resumed)
        finally:
            in_training = False  # Ctrl-C exits at once again
        losses.append(val_loss)
    if len(losses) > 1 and world.rank == 0:
        mean, std = statistics.mean(losses), statistics.stdev(losses)
        print(f"{len(losses)} runs: val_loss {mean:.4f}, standard deviation {std:.4f}")
    if world.size > 1:
        dist.destroy_process_group()
    return model


def main(argv, after_training=None):
    """Returns the exit status: 0 on success, 1 if another process died, 2 after a user error. On
    success, it first calls after_training(model)."""
    name = f"rank {env_int('RANK', 0)}"
    try:
        model = train(*parse_arguments(argv))
        if after_training is not None:
            after_training(model)
        return 0
    except (RankError, OSError) as e:
        message = str(e)
    except InputError as e:
        if env_int("LOCAL_RANK", 0) != 0:
            return 2  # every rank raises it; one prints it
        message = str(e)
    except torch.OutOfMemoryError:
        message = f"{name}: out of GPU memory; halve --train_seq_len (or --val_seq_len)"
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        message = f"error: {name} lost contact with another process; see that process's error"
        print(message, file=sys.stderr, flush=True)
        return 1
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status != 0:
        sys.stdout = None  # don't flush it: on a full disk, this would print a second error
    sys.exit(status)
