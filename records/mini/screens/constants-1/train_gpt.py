"""
Trains a GPT to a target validation loss, as fast as the machine allows. One file, read from top to bottom.

    ./run.sh                                               installs packages, makes the data, trains
    python train_gpt.py --track mini                       one process, on a CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  the official run: FineWeb to 3.28 on 8 H100s
    python train_gpt.py --help                             every hyperparameter and its default

The recipe is modded-nanogpt's of May 2025 (https://github.com/KellerJordan/modded-nanogpt). Against GPT-2:
- Muon optimizes the weight matrices of the blocks: momentum, orthogonalized by a Newton-Schulz iteration
- no biases and no norm gains; QK norm, half-truncated rotary embeddings, ReLU squared, zero-initialized
  output projections, U-net skips, value embeddings, learned mixing of the residual with the embedding
- sliding-window attention within documents, with a window that grows during training
- soft-capped logits, computed in FP8 on GPUs that support it
- a step is a fixed set of sequences, shared by the processes: any number of them trains the same model

Importing this file runs nothing. In shape comments, B is sequences, S tokens per sequence, T = B * S,
H heads, D channels per head, and C = model_dim.
"""
# -----------------------------------------------------------------------------
# 1. Preamble

with open(__file__, newline="", encoding="utf-8") as f:
    SOURCE = f.read()  # every log contains the source; read it now, before an edit can change it

import os
import signal
import sys
import time

in_training = False  # True once there is something to save
stop_signal = 0      # the SIGTERM or SIGINT that came in training
stop_time = 0.0


def on_signal(number, frame):
    """Before training, exits at once. In training, the current step is finished and saved first.
    A second signal exits at once. Within a second of the first it is ignored: torchrun and batch
    systems often send several."""
    global stop_signal, stop_time
    if not in_training:
        if os.environ.get("RANK", "0") == "0":
            if os.isatty(2):
                os.write(2, b"\n")  # ends the line with ^C
            os.write(2, b"stopped before the first step; nothing was trained\n")
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
    # On CPUs that GCC 11 to 13 don't know, they tune for a generic one and then delete stores that
    # PyTorch's bf16 transposes need (similar to https://gcc.gnu.org/PR113255). A named tuning avoids
    # this. The instruction set is still the machine's own.
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")
# Waiting threads sleep instead of spinning. Next to another busy process this is much faster.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# check_gpus says in one line what these warnings say in many
warnings.filterwarnings("ignore", message=r"\s*(CUDA initialization|Found GPU)")

BLOCK_SIZE = 128  # tokens per block of the attention mask; divides sequence lengths


class InputError(Exception):
    """A user error. It is printed as one line, without a traceback, by one process per machine."""


class RankError(InputError):
    """A user error that only some ranks may see. Every rank that raises it prints it."""


# -----------------------------------------------------------------------------
# 2. FP8 head and loss. The forward pass uses e4m3, the gradient e5m2 (more range, less precision).

FP8_MAX = 448  # the largest finite value of float8_e4m3fn


def softcap(logits: Tensor, dim: int, shifted: bool = False, cap: float = 15) -> Tensor:
    """Soft-caps logits at 15 with a tanh (Gemma 2, https://arxiv.org/abs/2408.00118) and adds 15.
    Returns float32 between 0 and 30. The shift changes no probability."""
    if shifted:
        return 23 * torch.sigmoid((logits.float() / dim**0.5 + 5) / 7.5)
    return 2 * cap * torch.sigmoid(logits.float() / (0.5 * cap * dim**0.5))


def as_scale(value: float, like: Tensor) -> Tensor:
    """A scale for torch._scaled_mm: a float32 scalar on the device of `like`."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


@torch.library.custom_op("nanogpt::head_loss", mutates_args=())
@torch.compile(dynamic=False)  # the model's compilation can't look into a custom op: compile it here
def head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor, x_s: float, w_s: float, grad_s: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the cross-entropy of softcap(x @ w.T) in nats, summed over tokens.

    x (T, C) and w (V, C) may have any float dtype; targets is (T,). An FP8 operand times its scale
    (x_s, w_s, grad_s) is the value it stands for. Returns the loss in float32, and for the backward
    pass the logits (T, V) in bf16, their logsumexp (T,) and both FP8 operands."""
    x_f8 = (x / x_s).to(torch.float8_e4m3fn)
    w_f8 = (w / w_s).to(torch.float8_e4m3fn)
    logits = torch._scaled_mm(
        x_f8,
        w_f8.T,
        scale_a=as_scale(x_s, x),
        scale_b=as_scale(w_s, x),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    lse = softcap(logits, w.size(1)).exp().sum(dim=-1).log()  # exp(30) can't overflow
    target_logits = softcap(logits.gather(1, targets[:, None]), w.size(1))[:, 0]
    return (lse - target_logits).sum(), logits, lse, x_f8, w_f8


@head_loss_op.register_fake
def _(x, w, targets, x_s, w_s, grad_s):
    loss = x.new_empty((), dtype=torch.float32)
    logits = x.new_empty(x.size(0), w.size(0), dtype=torch.bfloat16)
    lse = x.new_empty(x.size(0), dtype=torch.float32)
    x_f8 = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    w_f8 = w.new_empty(w.shape, dtype=torch.float8_e4m3fn)
    return loss, logits, lse, x_f8, w_f8


@torch.library.custom_op("nanogpt::head_loss_backward", mutates_args=())
@torch.compile(dynamic=False)
def head_loss_backward_op(
    grad: Tensor, logits: Tensor, lse: Tensor, x_f8: Tensor, w_f8: Tensor, targets: Tensor,
    x_s: float, w_s: float, grad_s: float,
) -> tuple[Tensor, Tensor]:
    """Returns grad_x (T, C) in bf16 and grad_w (V, C) in float32, given the loss's scalar gradient.
    The logits' gradient only ever exists in FP8: in bf16 it would be the largest tensor of a step."""
    capped, softcap_backward = torch.func.vjp(lambda z: softcap(z, w_f8.size(1)), logits.float())
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets[:, None]
    grad_capped = grad * ((capped - lse[:, None]).exp() - one_hot.float())
    (grad_logits,) = softcap_backward(grad_capped)
    grad_f8 = (grad_logits / grad_s).to(torch.float8_e5m2)
    grad_scale = as_scale(grad_s, grad)
    # _scaled_mm wants the first operand row-major and the second column-major
    grad_x = torch._scaled_mm(
        grad_f8,
        w_f8.T.contiguous().T,
        scale_a=grad_scale,
        scale_b=as_scale(w_s, grad),
        out_dtype=torch.bfloat16,
    )
    grad_w = torch._scaled_mm(
        grad_f8.T.contiguous(),
        x_f8.T.contiguous().T,
        scale_a=grad_scale,
        scale_b=as_scale(x_s, grad),
        out_dtype=torch.float32,
    )
    return grad_x, grad_w


@head_loss_backward_op.register_fake
def _(grad, logits, lse, x_f8, w_f8, targets, x_s, w_s, grad_s):
    grad_x = grad.new_empty(x_f8.shape, dtype=torch.bfloat16)
    grad_w = grad.new_empty(w_f8.shape, dtype=torch.float32)
    return grad_x, grad_w


def setup_context(ctx, inputs, output):
    x, w, targets, *scales = inputs
    loss, *saved = output
    ctx.save_for_backward(*saved, targets)
    ctx.scales = scales
    ctx.set_materialize_grads(False)


def head_loss_gradients(ctx, grad, *unused):
    backward = torch.ops.nanogpt.head_loss_backward
    grad_x, grad_w = backward(grad, *ctx.saved_tensors, *ctx.scales)
    return grad_x, grad_w, None, None, None, None


head_loss_op.register_autograd(head_loss_gradients, setup_context=setup_context)

# -----------------------------------------------------------------------------
# 3. Muon (Keller Jordan et al., https://kellerjordan.github.io/posts/muon)


POLAR_EXPRESS = [  # https://arxiv.org/abs/2505.16932
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5, polar_express: bool = False) -> Tensor:
    """Orthogonalizes each matrix of G (..., m, n): U S V^T becomes about U V^T.

    The quintic Newton-Schulz iteration has coefficients that maximize the slope at zero. It doesn't
    converge: singular values end between about 0.5 and 1.5, which works as well for the optimizer.
    Returns the shape of G, in bf16 or float32 (activation_dtype)."""
    coefficients = [(3.4445, -4.7750, 2.0315)] * steps
    margin, epsilon = 1.0, 1e-7
    if polar_express:
        coefficients = POLAR_EXPRESS[:steps]
        margin, epsilon = 1.02, 1e-6
    tall = G.size(-2) > G.size(-1)
    X = G.to(activation_dtype(G.device))
    if tall:
        X = X.mT  # X X^T is then the smaller product
    X = X / (margin * X.norm(dim=(-2, -1), keepdim=True) + epsilon)  # the spectral norm is now at most 1
    shape = X.shape
    X = X.reshape(-1, *shape[-2:])  # torch.bmm wants one batch dimension
    for a, b, c in coefficients:
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    X = X.view(shape)
    return X.mT if tall else X


all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # PyTorch < 2.13


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz, for the weight matrices of the blocks.

    A parameter (..., rows, cols) is a stack of matrices; each is orthogonalized by itself.
    With several processes, each one keeps the momentum of its share of the parameters and computes
    their updates in bf16. The updates are then gathered, while the next ones are computed.
    Gradients must be equal on all ranks. With beta2 > 0 this is NorMuon
    (https://arxiv.org/abs/2510.05491): all channels of an update get about the same size."""

    def __init__(self, params, lr=0.02, momentum=0.95, ns_steps=5, beta2=0.0):
        self.rank, self.world_size = 0, 1
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        groups = {}  # one batch for each shape; a transposed matrix counts as the same shape
        for p in params:
            shape = (*p.shape[:-2], *sorted(p.shape[-2:]))
            groups.setdefault(shape, []).append(p)
        defaults = dict(lr=lr, momentum=momentum, ns_steps=ns_steps, beta2=beta2)
        super().__init__([dict(params=group) for group in groups.values()], defaults)

    def _state(self, p: Tensor, group: dict) -> dict:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
            if group["beta2"]:  # a mean square for each channel of the longer side
                state["mean_squares"] = p.new_zeros(*p.shape[:-2], max(p.shape[-2:]))
        return state

    def _normalize(self, params: list[Tensor], group: dict, updates: Tensor) -> Tensor:
        """NorMuon: divides each channel by its running RMS, and keeps the update's norm."""
        square = updates.size(-2) == updates.size(-1)
        dim = -1 if square else -2  # the dimension to average over
        updates = updates.float()
        mean_squares = [self._state(p, group)["mean_squares"] for p in params]
        new = updates.square().mean(dim).unbind()
        torch._foreach_lerp_(mean_squares, new, 1 - group["beta2"])
        inverse_rms = torch.stack(mean_squares).clamp_min(1e-10).rsqrt().unsqueeze(dim)
        norm = updates.norm(dim=(-2, -1), keepdim=True)
        return norm * F.normalize(updates * inverse_rms, dim=(-2, -1))

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
        stack = torch.stack(gradients)
        steps, polar_express = group["ns_steps"], group["polar_express"]
        if group["heads_apart"] and stack.ndim == 4:  # each head of Q and K by itself, V as a whole
            qk, v = stack[:, :2], stack[:, 2:]
            heads = qk.reshape(-1, 64, stack.size(-1))
            heads = zeropower_via_newtonschulz5(heads, steps, polar_express)
            v = zeropower_via_newtonschulz5(v, steps, polar_express)
            updates = torch.cat([heads.view_as(qk), v], dim=1)
        else:
            updates = zeropower_via_newtonschulz5(stack, steps, polar_express)
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
            numel = params[0].numel()
            updates = params[0].new_zeros(0, numel, dtype=torch.bfloat16)
            if mine:
                updates = self._updates(mine, group)
            handle = None
            if self.world_size > 1:
                # pad so that every rank sends the same number
                padded = F.pad(updates, (0, 0, 0, per_rank - len(mine)))
                updates = padded.new_empty(self.world_size * per_rank, numel)
                handle = all_gather(updates, padded, async_op=True)
            gathers.append((group, updates, handle))
        for group, updates, handle in gathers:
            if handle is not None:
                handle.wait()
            for p, update in zip(group["params"], updates):
                # a tall matrix gets a larger step, so that its output changes by the same RMS
                scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
                update = update.view_as(p)
                if not group["cautious"]:
                    p.add_(update, alpha=-group["lr"] * scale)
                    continue
                update = update.float()
                agrees = update * p >= 0  # the update moves the weight towards zero
                decay = 1.2 * group["lr"] * p
                p.sub_(update + agrees * decay, alpha=group["lr"] * scale)

    def gather_state(self):
        """Sends the state of all parameters to every rank, for a checkpoint. All ranks must call it."""
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
    """Half-truncated rotary embeddings: half of the D/2 channel pairs rotate, the others stay.
    RoPE is https://arxiv.org/abs/2104.09864; @YouJiacheng proposed the truncation for the speedrun."""

    def __init__(self, head_dim, max_seq_len, base):
        super().__init__()
        rotating = (1 / base) ** torch.linspace(0, 1, head_dim // 4)
        freqs = torch.cat([rotating, torch.zeros(head_dim // 4)])  # (D/2,)
        t = torch.arange(max_seq_len, dtype=torch.float32)
        theta = t[:, None] * freqs  # (max_seq_len, D/2)
        self.register_buffer("cos", theta.cos(), persistent=False)
        self.register_buffer("sin", theta.sin(), persistent=False)

    def forward(self, x: Tensor, paired: bool) -> Tensor:  # (B, S, H, D)
        cos = self.cos[None, : x.size(1), None]  # (1, S, 1, D/2)
        sin = self.sin[None, : x.size(1), None]
        if paired:  # the two heads of a pair are at positions 2 t and 2 t + 1
            shape = (1, x.size(1), 2, -1)
            cos = self.cos[: 2 * x.size(1)].view(shape).repeat(1, 1, x.size(2) // 2, 1)  # (1, S, H, D/2)
            sin = self.sin[: 2 * x.size(1)].view(shape).repeat(1, 1, x.size(2) // 2, 1)
        x1, x2 = x.float().chunk(2, dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], dim=-1).type_as(x)


# Attention masks. A query sees a key if the key is not later, is in the same document, and is in one
# of the last window_blocks blocks, counting the query's own. There are two versions: a BlockMask for
# FlexAttention on GPUs, and a mask in plain PyTorch.


def document_ids(input_seq: Tensor, eot_token: int) -> Tensor:
    """Numbers the documents of input_seq (B, S) from 1 on. Returns int32 (T,). Every end-of-text token
    begins a document, and so does every sequence."""
    begins = input_seq == eot_token
    begins[:, 0] = True
    return begins.flatten().cumsum(0, dtype=torch.int32)


def block_lists(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a matrix of blocks, bool (N, N), to FlexAttention's lists: for each row the number of
    True entries, int32 (1, 1, N), and their columns in ascending order, int32 (1, 1, N, N)."""
    counts = visible.sum(dim=-1, dtype=torch.int32)
    columns = visible.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], columns[None, None]


def flex_block_mask(docs: Tensor, window_blocks: Tensor) -> BlockMask:
    """Makes the BlockMask of docs (T,) and a window, which is a scalar tensor on the device so that
    its growth recompiles nothing. FlexAttention masks single tokens only in partly visible blocks."""

    def document_causal(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (docs[q_idx] == docs[kv_idx])

    # documents are numbered in order, so the first and last token bound the documents of a block
    first = docs.view(-1, BLOCK_SIZE)[:, 0]  # (N,)
    last = docs.view(-1, BLOCK_SIZE)[:, -1]
    block = torch.arange(len(first), dtype=torch.int32, device=docs.device)
    distance = block[:, None] - block  # (N, N): query block - key block
    in_window = distance < window_blocks
    causal_any = distance >= 0
    causal_all = distance > 0
    document_any = (first[:, None] <= last) & (last[:, None] >= first)
    document_all = (first[:, None] == last) & (last[:, None] == first)
    visible_any = in_window & causal_any & document_any
    visible_all = in_window & causal_all & document_all
    partial = visible_any & ~visible_all
    return BlockMask(
        (len(docs), len(docs)),
        *block_lists(partial),
        *block_lists(visible_all),
        *block_lists(partial.T),  # the backward pass goes from keys to queries
        *block_lists(visible_all.T),
        (BLOCK_SIZE, BLOCK_SIZE),
        document_causal,
    )


def portable_mask(docs: Tensor, window_blocks: Tensor, span: int) -> Tensor:
    """Makes the mask of docs (T,) for portable_attention: bool (N, 1, 128, span * 128), True where
    visible. Each block of queries can see itself and the span - 1 blocks before it. `span` is a
    static upper bound of window_blocks, so that growth of the window recompiles nothing."""
    query = torch.arange(len(docs), dtype=torch.int32, device=docs.device)
    query = query.view(-1, BLOCK_SIZE, 1)  # (N, 128, 1)
    block_start = query[:, :1]  # (N, 1, 1)
    # docs is sorted: a search finds the first token of each query's document
    document_start = torch.searchsorted(docs, docs, out_int32=True).view_as(query)
    window_start = block_start - (window_blocks - 1) * BLOCK_SIZE
    start = document_start.maximum(window_start)
    offset = torch.arange((1 - span) * BLOCK_SIZE, BLOCK_SIZE, dtype=torch.int32, device=docs.device)
    key = block_start + offset  # (N, 1, span * 128)
    visible = (start <= key) & (key <= query)
    return visible[:, None]


def with_previous_blocks(t: Tensor, span: int) -> Tensor:
    """(1, T, H, D) -> (N, H, span * 128, D): each block after the span - 1 blocks before it."""
    t = t.view(-1, BLOCK_SIZE, *t.shape[2:]).transpose(1, 2)  # (N, H, 128, D)
    shifted = []
    for back in reversed(range(span)):
        padded = F.pad(t, (0, 0, 0, 0, 0, 0, back, 0))  # (back + N, H, 128, D)
        shifted.append(padded[: len(t)])
    return torch.cat(shifted, dim=2)


def portable_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention block by block for devices where FlexAttention has no backward, at O(T * span) cost.
    Compiled, it is much faster on a CPU than scaled_dot_product_attention with a mask."""
    span = mask.size(-1) // BLOCK_SIZE
    bias = torch.where(mask, 0.0, -math.inf).type_as(q)
    # QK norm bounds the scores, so softmax can't overflow without subtracting the maximum
    queries = with_previous_blocks(q * scale, 1)  # (N, H, 128, D)
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


class CausalSelfAttention(nn.Module):
    def __init__(self, hp, layer, rotary):
        super().__init__()
        self.num_heads = hp.num_heads
        self.head_dim = hp.head_dim
        self.rotary = rotary
        self.paired = hp.paired_heads and layer in (0, 2)
        self.key_offset = hp.key_offset and layer in (0, 3)
        hdim = hp.num_heads * hp.head_dim
        self.qkv_w = nn.Parameter(torch.empty(3, hdim, hp.model_dim))  # Q, K and V in one matmul
        self.lambdas = nn.Parameter(torch.tensor([0.5, hp.value_embed_init]))
        self.scale = hp.attention_scale
        self.c_proj = CastedLinear(hdim, hp.model_dim)
        self.gate = None
        if hp.attention_gate:  # a vector, so that Adam trains it
            self.gate = nn.Parameter(torch.zeros(hp.num_heads * 12))
        self.ve_gate = None
        has_ve = not hp.num_value_embeds <= layer < hp.num_layers - hp.num_value_embeds
        if hp.value_gate and has_ve:
            self.ve_gate = nn.Parameter(torch.zeros(hp.num_heads * 12))
        self.own = None
        if hp.xsa:
            self.own = nn.Parameter(torch.zeros(hp.num_heads))

    def forward(self, x, ve, mask, seq_len):  # x (1, T, C), ve (T, H * D) or None -> (1, T, C)
        heads = (self.num_heads, self.head_dim)
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(-1, seq_len, 3, *heads).unbind(2)  # each (B, S, H, D)
        q = self.rotary(norm(q), self.paired)  # positions count from the start of the sequence
        k = self.rotary(norm(k), self.paired)
        if self.key_offset:  # the channels that don't rotate take the key of the token before
            still = torch.arange(self.head_dim, device=k.device) // (self.head_dim // 4) % 2 == 1
            earlier = torch.cat([k[:, :1], k[:, :-1]], dim=1)
            k = torch.where(still, earlier, k)
        q, k, v = (t.reshape(1, -1, *heads) for t in (q, k, v))  # each (1, T, H, D)
        v = self.lambdas[0] * v
        if ve is not None and self.ve_gate is None:
            v = v + self.lambdas[1] * ve.view_as(v)
        if ve is not None and self.ve_gate is not None:
            gate_w = self.ve_gate.view(-1, 12).type_as(x)
            gate = 2 * F.linear(x[..., :12], gate_w).sigmoid()  # (1, T, H)
            v = v + self.lambdas[1] * gate[..., None] * ve.view_as(v)
        own = v
        if self.paired:  # (1, T, H, D) -> (1, 2T, H/2, D)
            pairs = (1, -1, self.num_heads // 2, 2, self.head_dim)
            joined = (1, -1, self.num_heads // 2, self.head_dim)
            q = q.view(pairs).transpose(2, 3).reshape(joined)
            k = k.view(pairs).transpose(2, 3).reshape(joined)
            v = v.view(pairs).transpose(2, 3).reshape(joined)
        # with QK norm, 1 / sqrt(D) has no special meaning; the speedrun tuned 0.12
        y = attention(q, k, v, mask, scale=self.scale)
        if self.paired:
            y = y.view(1, -1, 2, self.num_heads // 2, self.head_dim).transpose(2, 3)
            y = y.reshape(1, -1, *heads)
        if self.own is not None:
            along = (y * own).sum(-1, keepdim=True) / (own * own).sum(-1, keepdim=True).clamp_min(1e-8)
            y = y - self.own.tanh().type_as(y)[:, None] * along * own
        if self.gate is not None:
            gate_w = self.gate.view(-1, 12).type_as(x)
            gate = F.linear(x[..., :12], gate_w).sigmoid()  # (1, T, H)
            y = y * gate[..., None]
        return self.c_proj(y.flatten(2))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.c_fc = CastedLinear(dim, 4 * dim)
        self.c_proj = CastedLinear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = F.relu(x).square()  # ReLU squared, https://arxiv.org/abs/2109.08668
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, hp, layer, rotary):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.1 if hp.backout else hp.residual_init, hp.x0_init]))
        self.attn = None
        if layer not in hp.attn_free_layers:
            self.attn = CausalSelfAttention(hp, layer, rotary)
        self.mlp = MLP(hp.model_dim)

    def forward(
        self, x: Tensor, x0: Tensor, ve: Tensor | None, mask: BlockMask | Tensor, seq_len: int
    ) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), ve, mask, seq_len)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The model with its loss: GPT(hp)(input_seq, target_seq, window_blocks).

    input_seq (B, S) is int32, target_seq (B, S) int64, window_blocks a scalar int32; S is a multiple
    of 128. Returns the cross-entropy in nats, summed over tokens in training and averaged in
    evaluation. `dtype` is that of the embeddings and so of the activations; all else is float32."""

    val_slice = 32768  # validation computes the logits of this many tokens at a time, to save memory

    def __init__(self, hp, dtype=torch.bfloat16, use_fp8=False):
        super().__init__()
        self.hp = hp
        self.use_fp8 = use_fp8
        hdim = hp.num_heads * hp.head_dim
        # keep the order of the forward pass: the gradient buckets rely on it
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim, dtype=dtype)
        # value embeddings (https://arxiv.org/abs/2410.17897): the first and last layers share tables
        self.value_embeds = nn.ModuleList()
        self.ve_of_layer = {}
        num_tables = hp.num_value_embeds
        if hp.value_tables:  # the last layers have tables of their own
            num_tables = 2 * hp.num_value_embeds
        for i in range(num_tables):
            self.value_embeds.append(nn.Embedding(hp.vocab_size, hdim, dtype=dtype))
        for i in range(hp.num_value_embeds):
            self.ve_of_layer[i] = i
            self.ve_of_layer[hp.num_layers - hp.num_value_embeds + i] = num_tables - hp.num_value_embeds + i
        positions = max(hp.train_seq_len, hp.val_seq_len)
        if hp.paired_heads:
            positions = 2 * positions
        rotary = Rotary(hp.head_dim, positions, hp.rotary_base)
        self.blocks = nn.ModuleList(Block(hp, i, rotary) for i in range(hp.num_layers))
        self.skip_weights = None
        if hp.num_layers > 1:
            self.skip_weights = nn.Parameter(torch.full((hp.num_layers // 2,), hp.skip_init))
        self.backout = None
        if hp.backout:
            self.skip_weights = nn.Parameter(torch.tensor(-1.5))
            self.backout = nn.Parameter(torch.tensor(0.5))
        self.smear_w = None
        if hp.smear:
            self.smear_w = nn.Parameter(torch.zeros(12))
            self.smear_l = nn.Parameter(torch.zeros(1))
        self.lm_head = CastedLinear(hp.model_dim, hp.padded_vocab_size)
        # loss weights of the second and the third next token
        self.register_buffer("ahead", torch.zeros(2), persistent=False)
        self.init_weights(hp.seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """Sets the initial values of all matrices. Each has a random generator of its own, keyed by
        the seed and its name, so that a new parameter changes no other one's values. Scalars keep the
        values that they are created with."""
        for name, p in self.named_parameters():
            key = zlib.crc32(f"{seed} {name}".encode())
            rng = torch.Generator().manual_seed(key)
            if "value_embeds" in name and self.hp.value_tables:
                p.normal_(std=0.01, generator=rng)
            elif "embed" in name:
                std = self.hp.value_embed_std if "value_embeds" in name else self.hp.embed_std
                p.normal_(std=std, generator=rng)
            elif name.endswith(("mlp.c_proj.weight", "lm_head.weight")):
                p.zero_()
            elif name.endswith("attn.c_proj.weight") and not self.hp.nonzero_attention_out:
                p.zero_()
            elif p.ndim >= 2:
                bound = 3**0.5 * self.hp.matrix_std * p.size(-1) ** -0.5  # standard deviation matrix_std / sqrt(in)
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
        if self.hp.paired_heads:
            paired_masks = self.masks(docs.repeat_interleave(2), window_blocks)
            masks[0], masks[2] = paired_masks[0], paired_masks[2]
        tokens = input_seq.flatten()
        seq_len = input_seq.size(1)
        value_embeds = [table(tokens) for table in self.value_embeds]  # each (T, H * D)
        if self.smear_w is None:
            x = x0 = norm(self.embed(tokens))[None]  # (1, T, C)
        else:
            x = self.embed(input_seq)  # (B, S, C)
            gate = self.smear_l * (x[..., :12] @ self.smear_w.type_as(x)).sigmoid()[..., None]
            before = F.pad(x, (0, 0, 1, 0))[:, :-1]
            x = x + gate.type_as(x) * before
            x = x0 = norm(x).view(1, -1, x.size(-1))  # (1, T, C)
        skips = []
        num_skips = self.hp.num_layers // 2
        first_decoder = self.hp.num_layers - num_skips
        for i, block in enumerate(self.blocks):
            if self.backout is not None:
                if i == 2:  # one skip, past the layer before
                    x = x + self.skip_weights.sigmoid() * skips[0]
            elif i >= first_decoder:  # U-net: the second half adds what the first half stored
                x = x + self.skip_weights[i - first_decoder] * skips.pop()
            ve = None
            if i in self.ve_of_layer:
                ve = value_embeds[self.ve_of_layer[i]]
            x = block(x, x0, ve, masks[i], seq_len)
            if i < num_skips:
                skips.append(x)
            if i == 2:
                early = x
        if self.backout is not None:
            x = x - self.backout * early
        x = norm(x)[0]  # (T, C)
        targets = target_seq.flatten()
        if self.training and self.hp.multi_token:
            logits = softcap(self.lm_head(x), self.hp.model_dim, self.hp.shifted_logits, self.hp.softcap)
            total = F.cross_entropy(logits, targets, reduction="sum")
            logits = logits.view(*target_seq.shape, -1)  # (B, S, padded_vocab_size)
            for k, weight in enumerate(self.ahead, start=1):
                z = logits[:, :-k]
                target_logits = z.gather(-1, target_seq[:, k:, None])[..., 0]
                total = total + weight * (z.logsumexp(-1) - target_logits).sum()
            return total
        if self.training:
            return self.loss(x, targets)
        pairs = zip(x.split(self.val_slice), targets.split(self.val_slice))
        return sum(self.loss(x, targets) for x, targets in pairs) / len(targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (T, C), targets (T,) -> the cross-entropy in nats, summed over tokens."""
        if not (self.use_fp8 and self.training):
            logits = softcap(self.lm_head(x), self.hp.model_dim, self.hp.shifted_logits, self.hp.softcap)
            return F.cross_entropy(logits, targets, reduction="sum")
        # x is RMS-normed, so its elements are at most sqrt(C). The gradient of a summed loss is at most
        # 1 per token, times 1 / num_sequences (see train_step).
        x_s = self.hp.model_dim**0.5 / FP8_MAX
        w_s = 24 / FP8_MAX
        grad_s = 1 / FP8_MAX / self.hp.num_sequences
        head_loss = torch.ops.nanogpt.head_loss
        return head_loss(x, self.lm_head.weight, targets, x_s, w_s, grad_s)[0]


# -----------------------------------------------------------------------------
# 5. Data. A shard is a header of 256 int32 (magic, version, number of tokens, zeros) and uint16 tokens,
# all little-endian.


def shard_length(file):
    """Returns the number of tokens in a shard. Raises RankError if header and file size disagree."""
    header = np.fromfile(file, dtype="<i4", count=256)
    size = file.stat().st_size
    valid = len(header) == 256 and header[0] == 20240520 and header[1] == 1
    if not valid or size != 1024 + 2 * int(header[2]):
        raise RankError(f"{file} ({size} bytes) is not a complete shard of tokens; make it again")
    return int(header[2])


def read_tokens(file, start, count, vocab_size):
    """Reads tokens (count,) uint16. It doesn't map the file: a file that is truncated during the run
    then raises RankError instead of killing the process."""
    tokens = np.fromfile(file, dtype="<u2", count=count, offset=1024 + 2 * start)
    if len(tokens) < count:
        raise RankError(f"{file} has fewer tokens than its header says; was it changed? make it again")
    if tokens.max() >= vocab_size:
        raise RankError(
            f"{file} has token {tokens.max()}, outside the vocabulary of {vocab_size}; "
            "is it the data of another track?"
        )
    return tokens


def global_batches(pattern, batch_size):
    """Yields the shard and the first token of each batch of all processes. Shards are read in sorted
    order. Trailing tokens that don't fill a batch are dropped. A relative pattern is first looked for
    in the current folder, then next to this file."""
    files = sorted(glob.glob(pattern))
    if not files:
        files = sorted(glob.glob(str(Path(__file__).resolve().parent / pattern)))
    if not files:
        raise InputError(
            f"no shards match {pattern}; make them with data/shakespeare.py (mini) or "
            "data/cached_fineweb10B.py (fineweb)"
        )
    for file in map(Path, files):
        for start in range(0, shard_length(file) - batch_size, batch_size):
            yield file, start


def check_shards(pattern, batch_size, steps, vocab_size, option="--num_iterations"):
    """Reads everything that the run will read. Raises InputError now rather than hours later.
    `option` is the one to lower if there are too few."""
    batches = list(itertools.islice(global_batches(pattern, batch_size), steps))
    if len(batches) < steps:
        raise InputError(
            f"{pattern} has enough tokens for {len(batches)} batches of {batch_size}, but the run "
            f"needs {steps}; add shards or lower {option}"
        )
    for file, start in batches:
        read_tokens(file, start, batch_size + 1, vocab_size)


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
        inputs = tokens[:-1]
        targets = tokens[1:].long()
        if torch.device(device).type == "cuda":
            inputs = inputs.pin_memory().to(device, non_blocking=True)
            targets = targets.pin_memory().to(device, non_blocking=True)
        yield inputs, targets


# -----------------------------------------------------------------------------
# 6. Hyperparameters. The defaults are those of the fineweb track; `--name value` changes any of them.


def setting(default, help):
    """A field of Hyperparameters with its text in --help."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class Hyperparameters:
    track: str = setting("fineweb", "the track that sets the other defaults")
    # data
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "training shards")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    val_tokens: int = setting(10_485_760, "validation tokens; losses only compare at equal numbers")
    batch_tokens: int = setting(8 * 48 * 1024, "tokens per step, on all processes together")
    train_seq_len: int = setting(48 * 1024, "tokens per training sequence; halve it on small GPUs")
    val_seq_len: int = setting(4 * 64 * 1024, "tokens per validation sequence")
    sequences_per_pass: int = setting(1, "micro-batch size, in sequences")
    vocab_size: int = setting(50257, "number of token ids")
    eot_token: int = setting(50256, "token id that begins a document")
    # model
    num_layers: int = setting(12, "number of blocks")
    num_heads: int = setting(6, "attention heads per block")
    head_dim: int = setting(128, "channels per head")
    model_dim: int = setting(768, "channels of the residual stream")
    num_value_embeds: int = setting(3, "value embedding tables, used by as many first and last layers")
    attn_free_layers: tuple[int, ...] = setting((7,), "layers without attention")
    long_window_layers: tuple[int, ...] = setting((0, 4, 7, 11), "layers with the full window")
    max_window: int = setting(1728, "attention window at the end of training, in tokens")
    fp8: bool = setting(True, "compute the head in FP8 on GPUs that support it")
    # optimization
    num_iterations: int = setting(1770, "training steps")
    cooldown_frac: float = setting(0.4, "fraction of the steps in which learning rates decay")
    final_lr_frac: float = setting(0.1, "final learning rate, as a fraction of the initial one")
    head_lr: float = setting(0.22, "Adam's learning rate for the head")
    embed_lr: float = setting(0.6, "Adam's learning rate for token and value embeddings")
    scalar_lr: float = setting(0.04, "Adam's learning rate for lambdas and skip weights")
    adam_beta1: float = setting(0.8, "decay of Adam's first moment")
    adam_beta2: float = setting(0.95, "decay of Adam's second moment")
    adam_eps: float = setting(1e-10, "Adam's epsilon; 1e-8 is too large for rare tokens")
    muon_lr: float = setting(0.05, "Muon's learning rate, for the matrices of the blocks")
    ns_steps: int = setting(5, "Newton-Schulz iterations")
    muon_momentum: float = setting(0.95, "Muon's momentum after its warm-up")
    muon_momentum_start: float = setting(0.85, "Muon's momentum at the start")
    muon_momentum_warmup: int = setting(300, "steps in which Muon's momentum rises")
    muon_beta2: float = setting(0.0, "decay of NorMuon's mean squares; 0 for plain Muon")
    # ideas, each off or on
    attention_gate: bool = setting(False, "multiply each head's output by a gate of 12 channels")
    value_gate: bool = setting(False, "multiply value embeddings by a gate of 12 channels")
    value_tables: bool = setting(False, "a value table for each layer, initialized from N(0, 0.01)")
    key_offset: bool = setting(False, "partial key offset in layers with the long window")
    shifted_logits: bool = setting(False, "soft-cap with 23 sigmoid((z + 5) / 7.5)")
    backout: bool = setting(False, "backout, and one skip instead of the U-net's")
    scalar_betas: bool = setting(False, "Adam's betas of scalars are 0.9 and 0.99")
    nonzero_attention_out: bool = setting(False, "attention's output projection doesn't start at zero")
    smear: bool = setting(False, "add a part of the previous token's embedding")
    xsa: bool = setting(False, "remove the component along the token's own value")
    multi_token: bool = setting(False, "also predict the second and third next token")
    paired_heads: bool = setting(False, "paired heads in layers 0 and 2")
    polar_express: bool = setting(False, "Polar Express instead of Newton-Schulz")
    cautious_muon: bool = setting(False, "cautious weight decay of matrices, 1.2 lr^2")
    cautious_adam: bool = setting(False, "cautious weight decay of tables and head, 0.1 lr^2")
    heads_apart: bool = setting(False, "Muon orthogonalizes Q and K head by head")
    softcap: float = setting(15.0, "soft-cap of the logits")
    attention_scale: float = setting(0.12, "scale of the attention scores")
    rotary_base: float = setting(1024.0, "base of the rotary frequencies")
    embed_std: float = setting(1.0, "standard deviation of the initial token embeddings")
    value_embed_std: float = setting(1.0, "standard deviation of the initial value embeddings")
    matrix_std: float = setting(0.5, "standard deviation of the initial matrices, times sqrt(in)")
    skip_init: float = setting(1.0, "initial skip weights")
    value_embed_init: float = setting(0.5, "initial weight of the value embeddings")
    residual_init: float = setting(1.0, "initial weight of the residual stream in each block")
    x0_init: float = setting(0.0, "initial weight of the token embedding in each block")
    # the run
    seed: int = setting(0, "seed of the initial weights")
    warmup_steps: int = setting(10, "untimed steps that compile and are then undone")
    val_loss_every: int = setting(125, "steps between validations; 0 to validate only at the end")
    target_val_loss: float = setting(3.28, "validation loss to reach")
    save_checkpoint: bool = setting(False, "save the final model and the optimizers' state")

    @property
    def num_sequences(self):
        """Sequences per step."""
        return self.batch_tokens // self.train_seq_len

    @property
    def padded_vocab_size(self):
        """Rounded up to a multiple of 128, which makes faster matmuls."""
        return math.ceil(self.vocab_size / 128) * 128


TRACKS = {
    "fineweb": Hyperparameters(),
    "mini": Hyperparameters(  # the same model in miniature, on Shakespeare's bytes, for two CPU cores
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
        num_iterations=385,
        cooldown_frac=1.0,
        final_lr_frac=0.0,
        head_lr=0.1,
        embed_lr=0.2,
        adam_beta2=0.98,
        muon_momentum=0.9,
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
    """Raises InputError for settings that can't be trained."""
    for name, value in vars(hp).items():
        if type(value) in (int, float):
            valid = math.isfinite(value) and value >= 0
            require(valid, f"--{name} {value}: must be finite and not negative")
    for name in POSITIVE:
        require(getattr(hp, name) > 0, f"--{name} {getattr(hp, name)}: must be more than zero")
    for name in BELOW_ONE:
        require(getattr(hp, name) < 1, f"--{name} {getattr(hp, name)}: must be less than 1")
    require(hp.cooldown_frac <= 1, f"--cooldown_frac {hp.cooldown_frac}: must be at most 1")
    for whole, name in [
        ("batch_tokens", "train_seq_len"),
        ("val_tokens", "val_seq_len"),
    ]:
        size, part = getattr(hp, whole), getattr(hp, name)
        require(part % BLOCK_SIZE == 0, f"--{name} {part}: must be a multiple of {BLOCK_SIZE}")
        require(size % part == 0, f"--{whole} {size}: must be a multiple of --{name} {part}")
    require(hp.head_dim % 4 == 0, f"--head_dim {hp.head_dim}: must be a multiple of 4")
    require(
        hp.eot_token < hp.vocab_size,
        f"--eot_token {hp.eot_token}: must be less than --vocab_size {hp.vocab_size}",
    )
    require(
        2 * hp.num_value_embeds <= hp.num_layers,
        f"--num_value_embeds {hp.num_value_embeds}: at most half of --num_layers {hp.num_layers}",
    )
    for name in ("attn_free_layers", "long_window_layers"):
        for i in getattr(hp, name):
            valid = 0 <= i < hp.num_layers
            require(valid, f"--{name}: there is no layer {i}, as --num_layers is {hp.num_layers}")
    if device == "cuda":
        require(hp.head_dim >= 16, f"--head_dim {hp.head_dim}: FlexAttention needs at least 16")
        fp8_fits = hp.model_dim % 16 == 0 or not uses_fp8(hp)
        require(fp8_fits, f"--model_dim {hp.model_dim}: not a multiple of 16; give --fp8 false")
    val_sequences = hp.val_tokens // hp.val_seq_len
    most = math.gcd(hp.num_sequences, val_sequences)
    fits = [str(n) for n in range(1, most + 1) if most % n == 0]
    require(
        most % world_size == 0,
        f"{world_size} processes can't share {hp.num_sequences} training and {val_sequences} "
        f"validation sequences equally; use {', '.join(fits)}",
    )


def parse_bool(text):
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def parse_layers(text):
    return tuple(int(layer) for layer in text.split(",") if layer)


def make_parser():
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        usage="train_gpt.py [--track NAME] [--device NAME] [--NAME VALUE ...]",
        description="Trains a GPT to a target validation loss, as fast as the machine allows.",
    )

    def fail(message):
        raise InputError(f"{message}; --help lists all options")

    parser.error = fail
    parser.register("type", bool, parse_bool)
    parser.register("type", tuple, parse_layers)
    add = parser.add_argument
    add("--track", choices=TRACKS, help="default: fineweb with a GPU, otherwise mini")
    add("--device", choices=("cpu", "cuda"), help="default: cuda with a GPU, otherwise cpu")
    add("--log_dir", default="logs", help="folder for logs; default: logs")
    add("--num_runs", type=int, default=1, help="runs with seeds seed, seed + 1, ...; default: 1")
    add("--checkpoint_dir", default="checkpoints", help="default: checkpoints")
    add("--checkpoint_every", type=int, default=0, help="steps between checkpoints; default: 0, never")
    add("--resume", metavar="PATH", help="a checkpoint, a folder of checkpoints, or: latest")
    add("--resume_force", action="store_true", help="resume with another source or other settings")
    return parser


def parse_arguments(argv):
    """Returns the options of the run, and the track's hyperparameters with changes from the command
    line. Raises InputError."""
    parser = make_parser()
    args = parser.parse_known_args(argv)[0]
    has_gpu = torch.cuda.is_available() or unusable_gpu()
    on_gpu = has_gpu and args.device != "cpu"
    hp = TRACKS[args.track or ("fineweb" if on_gpu else "mini")]
    parser.set_defaults(track=hp.track, device="cuda" if on_gpu else "cpu")
    parser.add_argument("-h", "--help", action="help", help="show this text and exit")
    group = parser.add_argument_group(f"hyperparameters, with the defaults of track {hp.track}")
    for field in dataclasses.fields(hp)[1:]:  # the first one is the track
        value = getattr(hp, field.name)
        options = dict(type=type(value), default=value, metavar=type(value).__name__)
        shown = value
        if type(value) is bool:
            options.update(nargs="?", const=True)
        if type(value) is tuple:
            shown = ",".join(map(str, value))
        help = f"{field.metadata.get('help', '')}; default: {shown}"
        group.add_argument(f"--{field.name}", help=help, **options)
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
    """Returns how many CPUs' worth of time a container may use; infinity without a limit."""
    quota, period = (read_text(f"{folder}/cpu.max").split() + ["max", "1"])[:2]
    if quota == "max":  # version 1 of control groups; -1 means no limit
        quota = read_text(f"{folder}/cpu/cpu.cfs_quota_us").strip()
        period = read_text(f"{folder}/cpu/cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() else math.inf


def cpu_cores():
    """Returns the number of cores that this process may use."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, int(min(cores, cpu_quota())))


cpuinfo = dict(re.findall(r"^(\S[^\t:]*)\s*: (.*)$", read_text("/proc/cpuinfo"), re.M))
CPU_MODEL = cpuinfo.get("model name", platform.machine())
CPU_FLAGS = set(cpuinfo.get("flags", cpuinfo.get("Features", "")).split())  # instruction sets
CPU_CORES = cpu_cores()


def activation_dtype(device):
    """Returns bf16 on GPUs and on CPUs that multiply it in hardware, otherwise float32."""
    if device.type == "cuda" or CPU_FLAGS & {"avx512_bf16", "amx_bf16", "bf16"}:
        return torch.bfloat16
    return torch.float32


def unusable_gpu():
    """Returns whether this machine has an NVIDIA GPU that PyTorch can't use. Only Linux has the file.
    An empty CUDA_VISIBLE_DEVICES or -1 hides the GPU on purpose."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return bool(glob.glob("/dev/nvidia[0-9]*")) and not hidden and not torch.cuda.is_available()


def oldest_gpu():
    """Returns the smallest compute capability of the GPUs of this machine's processes, and its name."""
    gpus = range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return min((torch.cuda.get_device_capability(i), torch.cuda.get_device_name(i)) for i in gpus)


def check_gpus():
    """Raises InputError unless each process of this machine has a GPU that can train."""
    build = f"PyTorch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"
    require(
        torch.cuda.is_available(),
        f"--device cuda: {build} can't use a GPU of this machine; check the driver with nvidia-smi, install a build "
        "for it (https://pytorch.org/get-started/locally), or use --device cpu",
    )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    require(
        processes <= gpus,
        f"{processes} processes need as many GPUs, but PyTorch finds {gpus}; start fewer processes "
        "or use --device cpu",
    )
    capability, name = oldest_gpu()
    require(
        torch.version.hip or capability >= (8, 0),
        f"the GPU {name} has compute capability {capability[0]}.{capability[1]}, but bfloat16 and "
        "FlexAttention need 8.0 (Ampere) or later; use another GPU or --device cpu",
    )


def uses_fp8(hp):
    """The head is in FP8 on NVIDIA GPUs that multiply it. AMD's FP8 may be another format."""
    return hp.fp8 and torch.version.hip is None and oldest_gpu()[0] >= (8, 9)


def fitted(hp, mib, fp8):
    """Halves train_seq_len until a step fits into `mib` MiB of GPU memory. The step keeps its tokens.

    With PyTorch 2.13's caching allocator, a step takes 3,144 MiB plus 0.538 per token with the FP8
    head, and 3,209 plus 0.441 with a bf16 head. The formula adds some for other libraries.
    Below 12,288 tokens, validation is larger."""
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
    """Joins torchrun's process group (NCCL on CUDA, gloo on the CPU). One process needs none."""
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    if device_name == "cuda":
        check_gpus()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend, device_id = "nccl", device
    else:
        device = torch.device("cpu")
        backend, device_id = "gloo", None
        set_up_cpu()
    if size > 1:  # a rank may wait ten minutes for another that still compiles
        timeout = datetime.timedelta(minutes=10)
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    return World(rank, size, device)


def set_up_cpu():
    # otherwise threads add up the embeddings' gradients in any order, and no run can be repeated
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc: keep freed memory, or each step pays to map it again
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return the top of the heap
        libc.mallopt(-4, 0)  # M_MMAP_MAX: take large blocks from the heap, too
    if "OMP_NUM_THREADS" not in os.environ:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, CPU_CORES // processes))


def describe_machine(world, compiler):
    """Returns the log's lines about the GPUs, or the CPU and its compiler. They name no host or user."""
    if world.device.type == "cuda":
        try:
            command = subprocess.run(
                ["nvidia-smi"], capture_output=True, encoding="utf-8", errors="replace"
            )
        except FileNotFoundError:
            return f"{torch.cuda.get_device_name()} with world_size={world.size}: there is no nvidia-smi"
        # the table of processes has paths in it
        return re.sub(r"\n[^\n]*\n[^\n]*Processes:.*", "", command.stdout, flags=re.S)
    prefixes = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
    flags = sorted(flag for flag in CPU_FLAGS if flag.startswith(prefixes))
    openmp = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(("OMP_", "GOMP_")):
            openmp.append(f"{name}={value}")
    return (
        f"CPU: {CPU_MODEL}, {CPU_CORES} cores, {torch.get_num_threads()} threads a process, "
        f"instruction sets: {' '.join(flags)}\n{compiler}\nOpenMP: {' '.join(openmp) or 'defaults'}"
    )


def log_header(hp, world, compiler=""):
    """Returns the start of a log: the source, versions, machine and settings."""
    settings = dict(dataclasses.asdict(hp), world_size=world.size)
    plural = "es" if world.size > 1 else ""
    lines = [
        SOURCE,
        "=" * 100,
        f"Running Python {sys.version}",
        f"Running PyTorch {torch.version.__version__} compiled for CUDA {torch.version.cuda}",
        describe_machine(world, compiler),
        f"{world.size} process{plural} on {world.device.type}",
        "=" * 100,
        f"hyperparameters: {json.dumps(settings)}\n",
    ]
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# 8. Optimizers and schedules


def build_model(hp, world):
    torch.manual_seed(hp.seed)
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
            raise ValueError(f"{name} is in {groups} optimizer groups; build_optimizers: one is needed")
    scalar_betas = (hp.adam_beta1, hp.adam_beta2)
    if hp.scalar_betas:
        scalar_betas = (0.9, 0.99)
    adam = torch.optim.Adam(
        [
            dict(params=head, lr=hp.head_lr),
            dict(params=embeds, lr=hp.embed_lr),
            dict(params=scalars, lr=hp.scalar_lr, betas=scalar_betas),
        ],
        betas=(hp.adam_beta1, hp.adam_beta2),
        eps=hp.adam_eps,
        fused=True,
    )
    muon = Muon(matrices, hp.muon_lr, hp.muon_momentum, hp.ns_steps, hp.muon_beta2)
    for group in muon.param_groups:
        group["polar_express"] = hp.polar_express
        group["heads_apart"] = hp.heads_apart
        group["cautious"] = hp.cautious_muon
    for group in adam.param_groups + muon.param_groups:
        group["initial_lr"] = group["lr"]
    return [adam, muon]


def get_lr(step, hp):
    """Returns the factor of all learning rates: 1, then a linear decay to final_lr_frac."""
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
# 9. Compilation and warm-up: everything that the run uses, on random tokens, before the clock starts

CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as PyTorch chooses it
MAX_LOSS_ERROR = 1e-3     # relative; correct builds of mini differ by up to 2e-6
MAX_GRADIENT_ERROR = 0.1  # relative, of each matrix's norm; correct builds differ by up to 1.4e-2


def print_dots(done):
    while not done.wait(1):
        print(".", end="", flush=True)


def compiler_version():
    """Returns the first line of `g++ --version`, or "" without a compiler that works."""
    try:
        command = subprocess.run(
            [CXX, "--version"], capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError:
        return ""
    return command.stdout.partition("\n")[0].strip()


@torch.no_grad()
def randomize(model):
    """Sets random weights, none of them zero: at initialization most gradients are."""
    rng = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            values = 0.5 + 0.5 * torch.rand(p.shape, generator=rng)
        else:
            std = 1.0 if "embed" in name else 0.5 * p.size(-1) ** -0.5
            values = std * torch.randn(p.shape, generator=rng)
        p.copy_(values)


def losses_and_gradients(run_model, model, hp, world):
    """Runs a micro-batch of training and a validation sequence of random tokens through run_model,
    which is the model or its compiled version. Returns the losses and the gradients by name.
    The gradients of scalars cancel to rounding errors and are left out."""
    rng = torch.Generator().manual_seed(0)
    shape = (sequences_per_pass(hp, world), hp.train_seq_len)
    tokens = torch.randint(hp.vocab_size, shape, generator=rng)
    window_blocks = get_window_blocks(hp.num_iterations, hp)
    model.train()
    loss = run_model(tokens.int(), tokens.roll(1), torch.tensor(window_blocks, dtype=torch.int32))
    loss.backward()
    results = {"training loss": loss.detach().double()}
    for name, p in model.named_parameters():
        if p.ndim >= 2 and p.grad is not None:
            results[f"gradient of {name}"] = p.grad.double()
    model.zero_grad()
    tokens = torch.randint(hp.vocab_size, (hp.val_seq_len,), generator=rng)
    alone = World(0, 1, world.device)
    sequences = [(tokens.int(), tokens.roll(1))]
    results["validation loss"] = evaluate(run_model, sequences, window_blocks, hp, alone)
    return results


def relative_error(value, right):
    return (value - right).norm() / right.norm()


def wrong_results(model, compiled, hp, world):
    """Compares the compiled model with the uncompiled one. Returns what differs, or "".
    Some models amplify rounding errors. So a difference only counts if it is also much larger than
    the uncompiled model's own rounding error, which is its difference from a copy in float32."""
    results = losses_and_gradients(compiled, model, hp, world)
    expected = losses_and_gradients(model, model, hp, world)
    if not expected["training loss"].isfinite():
        return ""  # the model overflows with these weights, which says nothing about the compiler
    in_float32 = None
    for name, right in expected.items():
        error = relative_error(results[name], right)
        if not error.isfinite():
            return f"the {name} is not finite"
        if error <= (MAX_LOSS_ERROR if name.endswith("loss") else MAX_GRADIENT_ERROR):
            continue
        if in_float32 is None:
            twin = copy.deepcopy(model).float()
            in_float32 = losses_and_gradients(twin, twin, hp, world)
        rounding_error = relative_error(right, in_float32[name])
        if not error <= 3 * rounding_error:  # also if it is NaN
            return f"the {name} is off by {100 * error:.2g}%"
    return ""


def compile_problem(model, compiled, hp, world):
    """Compiles the model and checks its results. Returns why it can't be used, or ""."""
    randomize(model)
    try:
        wrong = wrong_results(model, compiled, hp, world)
    except (OSError, RuntimeError) as e:  # PyTorch's compilation errors are RuntimeErrors
        model.zero_grad()
        losses_and_gradients(model, model, hp, world)  # if the model is at fault, this fails, too
        text = str(e)
        output = text.partition("Output:\n")[2] or text  # of the compiler, if it ran
        lines = [line for line in output.splitlines() if "error" in line] + text.splitlines()
        return (
            f"{lines[0].strip()[:200]}; compiling needs a C++ compiler ({CXX}), Python's headers and "
            "openssl (Debian, Ubuntu: apt install g++ python3-dev openssl), free disk space, and a "
            "TORCHINDUCTOR_CACHE_DIR that can be written and isn't mounted noexec"
        )
    finally:
        model.zero_grad()
    if wrong:
        return f"{CXX} makes wrong code ({wrong}); install GCC 14 or later, or set CXX"
    return ""


def compile_model(model, hp, world):
    """Returns the model to train with, compiled if possible, and the log's line about the compiler.
    On a CPU, checks the compiled code, which changes the weights."""
    compiled = torch.compile(model, dynamic=False)
    if world.device.type == "cuda":
        return compiled, ""
    march = "native"
    if torch.__version__ >= (2, 13):  # earlier versions ignore the variable
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
    failed = torch.tensor(world.rank if problem else world.size)
    if world.size > 1:  # if one rank can't compile, no rank does
        dist.all_reduce(failed, op=dist.ReduceOp.MIN)
    if failed == world.size:
        return compiled, f"{line} yes"
    problem = problem or f"rank {failed.item()} can't compile it"
    if failed == world.rank:
        message = f"warning: training without torch.compile, at about half the speed: {problem}"
        print(message, file=sys.stderr, flush=True)
    return model, f"{line} no ({problem})"


def warm_up(model, optimizers, buckets, hp, world):
    """Trains and validates on random tokens, so that everything is compiled, connected and allocated.
    Then resets the weights and the optimizers."""
    local = hp.batch_tokens // world.size
    window_blocks = get_window_blocks(hp.num_iterations, hp)
    rng = torch.Generator(world.device).manual_seed(world.rank)
    count = max(local, hp.val_seq_len)
    tokens = torch.randint(hp.vocab_size, (count,), device=world.device, generator=rng)
    targets = tokens[:local]
    for _ in range(hp.warmup_steps):
        train_step(model, optimizers, buckets, targets.int(), targets, window_blocks, hp, world)
    targets = tokens[: hp.val_seq_len]
    if hp.warmup_steps:
        evaluate(model, [(targets.int(), targets)], window_blocks, hp, world)
    with torch.no_grad():
        for p, initial in zip(model.parameters(), build_model(hp, world).parameters()):
            p.copy_(initial)
    for optimizer in optimizers:
        optimizer.state.clear()


# -----------------------------------------------------------------------------
# 10. Gradient buckets


class GradientBuckets:
    """Sums gradients over the processes, in buckets of one dtype and about 25 MB.

    Backward produces gradients in the reverse order of the forward pass. In a step's last micro-step,
    a bucket whose gradients are all there starts an asynchronous all-reduce. Uncompiled, this
    overlaps with the rest of backward; a compiled model returns all gradients at the end."""

    def __init__(self, params, bucket_bytes=25 * 2**20):
        self.last_micro_step = False
        self.handles = []
        self.buckets = []
        filling = {}  # dtype -> the bucket that is being filled
        for p in reversed(list(params)):
            bucket = filling.get(p.dtype)
            if bucket is None or sum(x.nbytes for x in bucket) + p.nbytes > bucket_bytes:
                bucket = []
                filling[p.dtype] = bucket
                self.buckets.append(bucket)
            bucket.append(p)
        self.missing = [len(bucket) for bucket in self.buckets]
        for index, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, i=index: self._gradient_ready(i))

    def _gradient_ready(self, index):
        if not self.last_micro_step:
            return
        self.missing[index] -= 1
        if self.missing[index] == 0 and dist.is_initialized():
            bucket = self.buckets[index]
            flat = bucket[0].grad.flatten()  # a view: a bucket of one gradient isn't copied
            if len(bucket) > 1:
                flat = torch.cat([p.grad.flatten() for p in bucket])
            grads = flat.split([p.numel() for p in bucket])
            for p, grad in zip(bucket, grads):
                p.grad = grad.view_as(p)
            self.handles.append(dist.all_reduce(flat, async_op=True))

    def wait(self):
        assert not any(self.missing), "a parameter took no part in the loss"
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
        raise RankError(f"can't write {path} ({reason}); free space or choose another folder") from None


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
    """Rank 0 writes folder/step000100.pt and keeps the newest two. There is no random state: training
    draws no random numbers. All ranks must call this. Raises InputError if a weight isn't finite."""
    start = time.perf_counter()
    weights = nn.utils.get_total_norm(model.parameters())
    vote(first_bad(first_bad_step, step, weights), book.world)
    optimizers[1].gather_state()
    if book.world.rank > 0:
        return
    state = dict(
        run_id=book.run_id,
        step=step,
        tokens=step * book.hp.batch_tokens,
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
    write_file(folder / f"step{step:06d}.pt", buffer.getvalue())
    for old in sorted(folder.glob("step*.pt"))[:-2]:
        old.unlink(missing_ok=True)
    book.write(f"checkpoint: step {step} written in {time.perf_counter() - start:.1f} s, untimed")


def save_model(path, model, hp):
    """Writes the weights as safetensors, with the hyperparameters as metadata."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    metadata = dict(model="speedrun", hyperparameters=json.dumps(dataclasses.asdict(hp)))
    write_file(path, safetensors.torch.save(tensors, metadata))


def read_checkpoint(where, checkpoint_dir):
    """Returns the checkpoint `where`, the newest one in the folder `where`, or the newest of all runs
    for "latest". Raises InputError if there is none or it is damaged."""
    path = Path(checkpoint_dir if where == "latest" else where)
    if not path.is_file():
        files = sorted(path.rglob("step*.pt"), key=lambda file: file.stat().st_mtime)
        require(files, f"--resume {where}: there is no checkpoint in {path}")
        path = files[-1]
    try:
        intact = zipfile.ZipFile(path).testzip() is None  # torch.load doesn't check the CRCs
        state = torch.load(path, map_location="cpu", weights_only=True)  # executes no pickle
        uuid.UUID(state["run_id"])  # it becomes a file name
    except Exception:  # corrupt files raise many exception types
        intact = False
    require(intact, f"--resume: {path} is damaged or not a checkpoint; try the one before it")
    return state


def find_checkpoint(args, hp):
    """Returns the checkpoint of --resume. Raises InputError if its source or settings differ."""
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
        differences.append("source: not the same")
    state["forced"] = ""
    if differences:
        found = "; ".join(differences)
        require(args.resume_force, f"--resume: another run ({found}); use --resume_force to go on")
        state["forced"] = f", by resume_force ({found}): no record"
    return state


def load_checkpoint(state, model, optimizers):
    try:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            # only the moments: --resume_force may change learning rates and betas
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(dict(saved, param_groups=groups))
    except (RuntimeError, ValueError) as e:
        reason = str(e).splitlines()[-1].strip()
        raise InputError(f"--resume: the checkpoint is of another model ({reason})") from None


# -----------------------------------------------------------------------------
# 12. The timed loop


def sequences_per_pass(hp, world):
    """Returns the micro-batch size. It divides the number of sequences of each process."""
    return math.gcd(hp.sequences_per_pass, hp.num_sequences // world.size)


def train_step(model, optimizers, buckets, inputs, targets, window_blocks, hp, world):
    """Trains on this process's tokens (local,) of a step. Returns their mean loss."""
    if hp.multi_token:
        group = optimizers[0].param_groups[0]
        frac = 1 - group["lr"] / group["initial_lr"]  # of the run: learning rates decay from its start
        second = 0.5 * min(1, max(0, 2 - 3 * frac))
        third = 0.25 * max(0, 1 - 3 * frac)
        model.ahead.copy_(torch.tensor([second, third]))
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    per_pass = sequences_per_pass(hp, world)
    inputs = inputs.view(-1, per_pass, hp.train_seq_len)  # (micro-steps, B, S)
    targets = targets.view(-1, per_pass, hp.train_seq_len)
    total = torch.zeros((), device=world.device)
    # the gradient of a step is that of its summed loss, divided by its number of sequences
    weight = torch.full((), 1 / hp.num_sequences, device=world.device)
    model.train()
    for i in range(len(inputs)):
        buckets.last_micro_step = i == len(inputs) - 1
        loss = model(inputs[i], targets[i], window)
        loss.backward(weight)
        total += loss.detach()
    buckets.wait()
    tables = []
    for group in optimizers[0].param_groups:
        for p in group["params"]:
            if hp.cautious_adam and p.ndim > 1:
                tables.append((p, group["lr"], p.detach().clone()))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for p, lr, old in tables:
            agrees = (old - p) * old > 0  # the update moves the weight towards zero
            p.sub_(agrees * old * (lr**2 * 0.1))
    return total / inputs.numel()


@torch.no_grad()
def evaluate(model, sequences, window_blocks, hp, world):
    """Returns the mean loss over all processes. `sequences` yields this process's inputs and targets,
    each (val_seq_len,). Every process has the same number of them."""
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    model.eval()
    losses = [model(inputs[None], targets[None], window) for inputs, targets in sequences]
    mean = torch.stack(losses).double().mean()
    if world.size > 1:
        dist.all_reduce(mean)
    return mean / world.size


def validate(model, step, hp, world):
    """Returns the loss on the first val_tokens tokens, the same ones for any number of processes."""
    sequences = distributed_data_generator(
        hp.val_files, hp.val_seq_len, 0, 1, hp.vocab_size, world.device
    )
    count = hp.val_tokens // hp.val_seq_len
    mine = itertools.islice(sequences, world.rank, count, world.size)
    return evaluate(model, mine, get_window_blocks(step, hp), hp, world)


def peak_memory(world):
    """Returns the log's line about memory: the GPU allocator's, or on a CPU the process's."""
    if world.device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        allocated = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"peak memory allocated: {allocated // 2**20} MiB reserved: {reserved // 2**20} MiB"


def synchronized_ms(world):
    """Reads the clock after all ranks and their GPUs have finished their work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.size > 1:
        dist.barrier()
    return 1000 * time.perf_counter()


def read_vote(votes):
    """Returns the first step whose loss isn't finite (math.inf without one), and the signal to act on
    (0 without one)."""
    first_bad_step, minus_signal = votes.tolist()
    return first_bad_step, -int(minus_signal)


def start_vote(first_bad_step, world):
    """Combines over all ranks the first step whose loss isn't finite, and the signals that came.
    Returns a copy on the CPU, and the CUDA event after which it can be read. Doesn't wait."""
    votes = torch.stack([first_bad_step, torch.full_like(first_bad_step, -stop_signal)])
    if world.size > 1:
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    votes = votes.to("cpu", non_blocking=True)  # PyTorch copies into pinned memory
    copied = None
    if world.device.type == "cuda":
        copied = torch.cuda.current_stream().record_event()
    return votes, copied


def finish_vote(votes, copied):
    """Raises InputError if any rank has seen a loss that isn't finite. Returns the signal that all
    ranks act on now, or 0. Waits for the copy if it isn't done yet."""
    if copied is not None and not copied.query():
        copied.synchronize()
    step, stop = read_vote(votes)
    if step < math.inf:
        raise InputError(
            f"step {step:.0f}: the loss is not finite. If you raised a learning rate, lower it. If you "
            "changed nothing, the compiler or the machine may be at fault: try TORCH_COMPILE_DISABLE=1 "
            "and report it with the log"
        )
    return stop


def vote(first_bad_step, world):
    """Votes while the clock is stopped: the host waits for the GPU and for the other ranks."""
    return finish_vote(*start_vote(first_bad_step, world))


def vote_while_training(votes, step, first_bad_step, world):
    """Starts a vote every five steps, and reads it five steps later. By then the copy is there, so
    the GPU never runs out of work. All ranks read it after the same step, and so stop together.
    `votes` holds the vote that isn't read yet. One process on a CPU votes after every step."""
    if world.size == 1 and world.device.type == "cpu":
        return vote(first_bad_step, world)
    if step % 5 != 0:
        return 0
    votes.append(start_vote(first_bad_step, world))
    if len(votes) == 1:
        return 0
    return finish_vote(*votes.pop(0))


def first_bad(first_bad_step, step, loss):
    """Returns first_bad_step, or `step` if that is earlier and the loss isn't finite. Doesn't wait."""
    return torch.where(loss.isfinite(), first_bad_step, first_bad_step.clamp_max(step))


class Logbook:
    """The clock, validations and log of a run. Rank 0 writes <log_dir>/<run_id>.txt and the console."""

    def __init__(self, log_dir, hp, world, resumed, compiler):
        self.hp = hp
        self.world = world
        self.run_id = resumed.get("run_id", str(uuid.uuid4()))
        self.train_ms = resumed.get("train_time_ms", 0.0)
        self.validations = resumed.get("validations", [])  # (step, val_loss, train_ms)
        self.text = resumed.get("log") or log_header(hp, world, compiler)
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
            line = line.ljust(79)  # covers the line before
        print(line, end=end, flush=True)

    def step(self, step):
        ms = self.train_ms + 1000 * time.perf_counter() - self.start_ms  # the GPU may be behind
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
        for met_step, met_loss, met_ms in reversed(self.validations):
            if met_loss <= target:
                verdict = f"met at step {met_step} after {met_ms / 1000:.2f} s of training"
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
    model, compiled, compiler, optimizers, buckets = parts
    book = Logbook(args.log_dir, hp, world, resumed, compiler)
    usual = TRACKS[hp.track].train_seq_len
    if hp.train_seq_len != usual and not resumed:
        book.write(f"train_seq_len {hp.train_seq_len} (track: {usual}), with the same tokens per step")
    start = time.perf_counter()
    warm_up(compiled, optimizers, buckets, hp, world)
    seconds = time.perf_counter() - start
    book.write(f"warm-up: {hp.warmup_steps} steps in {seconds:.1f} s, untimed")
    if compiler not in book.text:
        book.write(compiler)  # resumed with another compiler
    if resumed:
        load_checkpoint(resumed, model, optimizers)
        where = f"from step {resumed['step']}, on {world.size} process(es)"
        book.write(f"resume: {where}{resumed['forced']}")
    return book


def run(args, hp, world, parts, resumed):
    """Trains once. Returns the last validation: (step, val_loss, training time in ms)."""
    global in_training
    in_training = False
    model, compiled, _, optimizers, buckets = parts
    book = start_run(args, hp, world, parts, resumed)
    folder = Path(args.checkpoint_dir) / book.run_id
    first_step = resumed.get("step", 0)
    batches = distributed_data_generator(
        hp.train_files, hp.batch_tokens, world.rank, world.size, hp.vocab_size, world.device, first_step
    )
    first_bad_step = torch.full((), math.inf, dtype=torch.float64, device=world.device)
    votes = []
    in_training = True
    book.start_clock()
    for step in range(first_step, hp.num_iterations + 1):
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            book.stop_clock()
            val_loss = validate(compiled, step, hp, world)
            vote(first_bad(first_bad_step, step, val_loss), world)
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
        stop = vote_while_training(votes, step + 1, first_bad_step, world)
        book.step(step + 1)
        # --------------- checkpoint
        due = args.checkpoint_every and (step + 1) % args.checkpoint_every == 0
        if stop or due or (hp.save_checkpoint and step + 1 == hp.num_iterations):
            book.stop_clock()
            save_checkpoint(folder, step + 1, book, model, optimizers, first_bad_step)
            book.start_clock()
        if stop:
            os._exit(128 + stop)  # all ranks stop here
    if world.rank == 0 and (hp.save_checkpoint or args.checkpoint_every):
        save_model(folder / "model.safetensors", model, hp)
    book.result()
    return book.validations[-1]


def check_inputs(args, hp):
    """Raises InputError for what can't be trained, before anything slow begins."""
    if args.device == "cuda":
        check_gpus()
    check_hyperparameters(hp, int(os.environ.get("WORLD_SIZE", 1)), args.device)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # one process per machine reads the files
    steps, val_steps = hp.num_iterations, hp.val_tokens // hp.val_seq_len
    check_shards(hp.train_files, hp.batch_tokens, steps, hp.vocab_size)
    check_shards(hp.val_files, hp.val_seq_len, val_steps, hp.vocab_size, "--val_tokens")
    if args.checkpoint_every or hp.save_checkpoint:
        with writing(args.checkpoint_dir):
            Path(args.checkpoint_dir).mkdir(parents=True, exist_ok=True)


def train(args, hp):
    """Trains --num_runs times. Returns the model of the last run."""
    check_inputs(args, hp)
    world = start_world(args.device)
    resumed = find_checkpoint(args, hp) if args.resume else {}
    hp = fit_to_memory(args, hp, world, resumed)
    handle_signals()
    model = build_model(hp, world)
    optimizers = build_optimizers(model, hp)
    compiled, compiler = compile_model(model, hp, world)
    parts = (model, compiled, compiler, optimizers, GradientBuckets(model.parameters()))
    losses = []
    for i in range(args.num_runs):
        hp_of_run = dataclasses.replace(hp, seed=hp.seed + i)
        _, val_loss, _ = run(args, hp_of_run, world, parts, resumed)
        losses.append(val_loss)
    if len(losses) > 1 and world.rank == 0:
        mean, std = statistics.mean(losses), statistics.stdev(losses)
        print(f"{len(losses)} runs: val_loss {mean:.4f}, standard deviation {std:.4f}")
    if world.size > 1:
        dist.destroy_process_group()
    return model


def main(argv, after_training=None):
    """Returns the exit status: 0, 2 after a user error, 1 after losing another process.
    On success, it first calls after_training(model)."""
    name = f"rank {os.environ.get('RANK', 0)}"
    try:
        model = train(*parse_arguments(argv))
        if after_training is not None:
            after_training(model)
        return 0
    except (RankError, OSError) as e:
        message = str(e)
    except InputError as e:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return 2  # every rank raises it; one prints it
        message = str(e)
    except torch.OutOfMemoryError:
        message = f"{name}: the GPU's memory is full; halve --train_seq_len (or --val_seq_len)"
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        print(f"error: {name} lost another process, whose error counts", file=sys.stderr, flush=True)
        return 1
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status != 0:
        sys.stdout = None  # if the disk is full, Python can't flush it and would print a second error
    sys.exit(status)
