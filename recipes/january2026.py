"""
Trains a GPT with the NanoGPT speedrun's recipe of January 2026 (record 62). One file, like train_gpt.py,
with which it shares the text of its data, machine, checkpoint and logging functions.

    ./run.sh --recipe january2026                                     the same as below, with packages and data
    python recipes/january2026.py --track mini                        one process, on a CPU or one GPU
    torchrun --standalone --nproc_per_node=8 recipes/january2026.py   the official run: FineWeb to 3.28 on 8 H100s
    python recipes/january2026.py --help                              every hyperparameter and its default

The recipe is modded-nanogpt's (https://github.com/KellerJordan/modded-nanogpt). New since May 2025:
- 26, 29  sequences begin at documents, which are cut after 2,048 tokens (@classiclarryd, @varunneal)
- 28, 55  gates on attention, value embeddings and the skip connection (@classiclarryd)
- 29, 35  three window sizes, and longer windows at the end (@varunneal, @classiclarryd)
- 31      rotary frequencies follow the window (@classiclarryd; YaRN, https://arxiv.org/abs/2309.00071)
- 34      smear: each token embedding gets some of the one before it (@classiclarryd)
- 38      Polar Express orthogonalizes Muon's updates (@varunneal; https://arxiv.org/abs/2505.16932)
- 39, 46  three batch sizes; Adam updates in every second step (@classiclarryd, @varunneal)
- 40, 45  backout, and one skip connection in place of the U-net (@classiclarryd)
- 41      NorMuon equalizes the channels of an update (@li_zichong; https://arxiv.org/abs/2510.05491)
- 43, 50  cautious weight decay (@varunneal, @roeeshenberg; https://arxiv.org/abs/2510.12402)
- 47, 48  the lambdas of attention multiply its weights (@roeeshenberg, @ChrisJMcCormick)
- 49, 62  key offset: long windows compare with the key before (@classiclarryd)
- 51, 53  head and embedding are tied for two thirds of the run (@varunneal)
- 53      the logits also predict the second and third next token (@varunneal, @classiclarryd)
- 54      logits are capped asymmetrically (@classiclarryd)
- 57      bf16 weights are truncated from float32 ones (@classiclarryd, @YouJiacheng, @ChrisJMcCormick)
- 58      paired heads attend to each other's keys (@classiclarryd)
- 62      embeddings of hashed bigrams, added in every layer (@classiclarryd)

A step is always 8 sequences, on 1, 2, 4 or 8 processes, with the same training (mini has 4, so at most
4 processes). They can't be halved for a small GPU as in train_gpt.py: packing, smear and targets would
change. A GPU needs memory for one of 49,152.

Importing this file trains nothing. In shape comments, B is sequences, S tokens per sequence, T = B * S,
H heads, D channels per head, C = model_dim, and V = padded_vocab_size.
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
import bisect
import codecs
import collections
import concurrent.futures
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

# A scale times an FP8 value is the value it stands for. 448 is the largest finite e4m3 value.
X_SCALE = 100 / 448
W_SCALE = 1.6 / 448
GRAD_SCALE = 0.75 / 448  # for a loss whose gradient is 1


def softcap(logits: Tensor) -> Tensor:
    """Caps logits asymmetrically. Returns float32 between 0 and 23."""
    return 23 * torch.sigmoid((logits.float() + 5) / 7.5)


def target_weights(targets: Tensor, weights: Tensor) -> Tensor:
    """targets (T, K), weights (K,) -> float32 (T, K), which is zero where there is no target
    (-1)."""
    return torch.where(targets >= 0, weights, 0.0)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weighted cross-entropies in nats of softcapped logits (T, V), summed over tokens
    and targets (T, K), and the logsumexp (T, 1)."""
    capped = softcap(logits)
    lse = capped.exp().sum(dim=-1, keepdim=True).log()  # exp(23) can't overflow
    losses = lse - capped.gather(1, targets.clamp_min(0))  # (T, K)
    return (losses * target_weights(targets, weights)).sum(), lse


def as_scale(value: float, like: Tensor) -> Tensor:
    """A scale for torch._scaled_mm: a float32 scalar on the device of `like`."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


@torch.library.custom_op("nanogpt2026::head_loss", mutates_args=())
@torch.compile(dynamic=False)  # compiling the model doesn't compile the body of a custom op
def head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes weighted_loss of the logits x @ w.T.

    x (T, C) and w (V, C) are bf16, targets (T, K) int64, -1 for none, weights (K,) float32. Returns
    the loss in float32, and for the backward pass the logits (T, V) in bf16, their logsumexp (T, 1)
    and both FP8 operands."""
    x_f8 = (x / X_SCALE).to(torch.float8_e4m3fn)
    w_f8 = (w / W_SCALE).to(torch.float8_e4m3fn)
    logits = torch._scaled_mm(
        x_f8,
        w_f8.T,
        scale_a=as_scale(X_SCALE, x),
        scale_b=as_scale(W_SCALE, x),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    loss, lse = weighted_loss(logits, targets, weights)
    return loss, logits, lse, x_f8, w_f8


@head_loss_op.register_fake
def _(x, w, targets, weights):
    loss = x.new_empty((), dtype=torch.float32)
    logits = x.new_empty(x.size(0), w.size(0), dtype=torch.bfloat16)
    lse = x.new_empty(x.size(0), 1, dtype=torch.float32)
    x_f8 = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    w_f8 = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    return loss, logits, lse, x_f8, w_f8


@torch.library.custom_op("nanogpt2026::head_loss_backward", mutates_args=())
@torch.compile(dynamic=False)
def head_loss_backward_op(
    grad: Tensor, logits: Tensor, lse: Tensor, x_f8: Tensor, w_f8: Tensor, targets: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns grad_x (T, C) and grad_w (V, C) in bf16, given the loss's scalar gradient.
    When compiled, it stores the gradient of the logits only in FP8."""
    capped = softcap(logits)
    weights = target_weights(targets, weights)
    grad_capped = (capped - lse).exp() * weights.sum(dim=1, keepdim=True)
    column = torch.arange(logits.size(1), device=logits.device)
    for k in range(targets.size(1)):
        is_target = column == targets[:, k, None]
        grad_capped = grad_capped - torch.where(is_target, weights[:, k, None], 0.0)
    # the derivative of 23 sigmoid((z + 5) / 7.5) is capped (1 - capped / 23) / 7.5
    grad_logits = grad_capped * capped * (1 - capped / 23) / 7.5
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
        scale_b=as_scale(X_SCALE, grad),
        out_dtype=torch.bfloat16,
    )
    return grad_x, grad_w


@head_loss_backward_op.register_fake
def _(grad, logits, lse, x_f8, w_f8, targets, weights):
    grad_x = torch.empty_like(x_f8, dtype=torch.bfloat16)
    grad_w = torch.empty_like(w_f8, dtype=torch.bfloat16)
    return grad_x, grad_w


def setup_context(ctx, inputs, output):
    x, w, targets, weights = inputs
    loss, logits, lse, x_f8, w_f8 = output
    ctx.save_for_backward(logits, lse, x_f8, w_f8, targets, weights)
    ctx.set_materialize_grads(False)  # creates no zero gradients for the other outputs


def head_loss_gradients(ctx, grad, *unused):
    grad_x, grad_w = torch.ops.nanogpt2026.head_loss_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_w, None, None


head_loss_op.register_autograd(head_loss_gradients, setup_context=setup_context)

# -----------------------------------------------------------------------------
# 3. Optimizers. Muon is by Keller Jordan et al., https://kellerjordan.github.io/posts/muon.

# (a, b, c) of each step, for a spectral norm of at most 1 / 1.02 (You Jiacheng's for the speedrun)
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(G: Tensor) -> Tensor:
    """Orthogonalizes each matrix of G (N, rows, cols): U S V^T becomes about U V^T.
    The result has the shape of G, in bf16 or float32 (activation_dtype)."""
    tall = G.size(-2) > G.size(-1)
    X = G.to(activation_dtype(G.device))
    if tall:
        X = X.mT  # X X^T is then the smaller product
    X = X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.mT if tall else X


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts float32 to bf16 by dropping the lower 16 bits, or returns it as it is."""
    if dtype == torch.float32:
        return x
    return (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)


if hasattr(dist, "all_gather_single"):  # its name since PyTorch 2.13
    all_gather = dist.all_gather_single
else:
    all_gather = dist.all_gather_into_tensor


class Muon(torch.optim.Optimizer):
    """NorMuon with cautious weight decay. Each parameter is a bank of matrices (..., rows, cols),
    which are updated one by one. A group's `scale` multiplies its learning rate.

    With several processes, each one keeps the state of its share of every bank, computes the new
    weights, and sends them to the others. Gradients must be equal on all ranks. Weights are kept in
    float32 here; parameters in bf16 are truncated from them."""

    def __init__(self, groups, lr, momentum, beta2, weight_decay):
        self.rank, self.world_size = 0, 1
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        defaults = dict(lr=lr, momentum=momentum, beta2=beta2, weight_decay=weight_decay)
        super().__init__(groups, defaults)

    def _state(self, p: Tensor) -> dict:
        state = self.state[p]
        if not state:
            weights = p.detach().flatten(0, -3).float()  # (N, rows, cols)
            state["weights"] = weights.clone()
            state["momentum_buffer"] = torch.zeros_like(weights)
            state["mean_squares"] = torch.zeros_like(weights[..., :1])
        return state

    def _share(self, p: Tensor, rank: int) -> slice:
        """The matrices that a rank updates."""
        per_rank = math.ceil(p.shape[:-2].numel() / self.world_size)
        return slice(rank * per_rank, (rank + 1) * per_rank)

    def _updates(self, gradients: Tensor, state: dict, group: dict) -> Tensor:
        """Returns the updates (N, rows, cols), in float32."""
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradients, 1 - group["momentum"])
        updates = polar_express(gradients.lerp(momentum, group["momentum"]))  # Nesterov
        # NorMuon: divide each row by its running RMS, and keep the norm of the matrix
        exact = updates.float()
        mean_squares = state["mean_squares"]
        mean_squares.lerp_(exact.square().mean(dim=-1, keepdim=True), 1 - group["beta2"])
        inverse_rms = mean_squares.clamp_min(1e-10).rsqrt()
        norm = exact.norm(dim=(-2, -1), keepdim=True)
        new_norm = (exact * inverse_rms).norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10)
        factor = inverse_rms * norm / new_norm
        return (updates * factor.type_as(updates)).float()

    def _new_weights(self, p: Tensor, group: dict) -> Tensor:
        """Updates this rank's share of a bank. Returns its matrices, in the dtype of p."""
        share = self._share(p, self.rank)
        state = {name: value[share] for name, value in self._state(p).items()}
        gradients = p.grad.flatten(0, -3)[share].float()
        weights = state["weights"]
        if len(weights):
            updates = self._updates(gradients, state, group)
            # cautious weight decay: only where the update, too, moves the weight towards zero
            decay = group["weight_decay"] * group["lr"] * weights
            updates += torch.where(updates * weights >= 0, decay, 0.0)
            weights.sub_(updates, alpha=group["lr"] * group["scale"])
        return truncated(weights, p.dtype)

    @torch.no_grad()
    def step(self):
        gathers = []
        for group in self.param_groups:
            for p in group["params"]:
                weights = self._new_weights(p, group)
                handle = None
                if self.world_size > 1:
                    # pad so that every rank sends the same number
                    per_rank = self._share(p, 0).stop
                    padded = F.pad(weights, (0, 0, 0, 0, 0, per_rank - len(weights)))
                    weights = padded.new_empty(self.world_size * per_rank, *p.shape[-2:])
                    handle = all_gather(weights, padded, async_op=True)
                gathers.append((p, weights, handle))
        for p, weights, handle in gathers:
            if handle is not None:
                handle.wait()
            p.copy_(weights[: p.shape[:-2].numel()].view_as(p))

    def gather_state(self):
        """Broadcasts the state of all parameters, so that rank 0 can save it. Call it on all
        ranks."""
        if self.world_size == 1:
            return
        for p, state in self.state.items():
            for value in state.values():
                for rank in range(self.world_size):
                    dist.broadcast(value[self._share(p, rank)], rank)


def adam_update(p, grad, mean, mean_square, beta1, beta2, lr, decay):
    """Updates p of any dtype and its moments in float32. lr and decay are scalar tensors."""
    grad = grad.float()
    weight = p.float()
    mean.lerp_(grad, 1 - beta1)
    mean_square.lerp_(grad.square(), 1 - beta2)
    update = lr * mean / (mean_square.sqrt() + 1e-10)
    update = update + torch.where(update * weight > 0, decay * weight, 0.0)  # cautious weight decay
    p.copy_(weight - update)


compiled_adam_update = torch.compile(adam_update, dynamic=True)


class Adam(torch.optim.Optimizer):
    """Adam (https://arxiv.org/abs/1412.6980) with cautious weight decay, and moments in float32."""

    def __init__(self, groups):
        super().__init__(groups, dict(weight_decay=0.0))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())  # on the CPU
                    state["mean"] = torch.zeros_like(p, dtype=torch.float32)
                    state["mean_square"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                t = state["step"].item()
                correction = (1 - beta2**t) ** 0.5 / (1 - beta1**t)
                lr = torch.full((), group["lr"] * correction, device=p.device)
                decay = torch.full((), group["lr"] ** 2 * group["weight_decay"], device=p.device)
                update = compiled_adam_update if p.is_cuda else adam_update
                # flat, so that one compiled function serves all shapes
                flat = (p, p.grad, state["mean"], state["mean_square"])
                update(*(t.view(-1) for t in flat), beta1, beta2, lr, decay)


# -----------------------------------------------------------------------------
# 4. Model

GATE_CHANNELS = 12  # gates are linear functions of this many channels


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class Rotary(nn.Module):
    """Half-truncated rotary embeddings: the first half of a head's channels rotates, in pairs (i, i
    + D/4), and the other half stays."""

    def __init__(self, head_dim, max_seq_len, dtype):
        super().__init__()
        # cosines and sines; paired heads count two positions per token
        table = torch.zeros(2, 2 * max_seq_len, head_dim // 4, dtype=dtype)
        self.register_buffer("table", table, persistent=False)

    def set_frequencies(self, freqs: Tensor):  # (D/4,) in float32
        t = torch.arange(self.table.size(1), dtype=torch.float32, device=freqs.device)
        theta = t[:, None] * freqs
        self.table[0] = theta.cos()
        self.table[1] = theta.sin()

    def forward(self, x: Tensor, paired: bool, scale: Tensor | float = 1.0) -> Tensor:  # (B, S, H, D)
        seq_len, heads = x.shape[1:3]
        if paired:  # even heads are at positions 2t, odd ones at 2t + 1
            table = self.table[:, : 2 * seq_len].view(2, seq_len, 2, -1)
            cos, sin = table.repeat(1, 1, heads // 2, 1)  # (S, H, D/4) each
        else:
            cos, sin = self.table[:, :seq_len, None]  # (S, 1, D/4) each
        quarter = x.size(-1) // 4
        x1, x2, still = x.float().split([quarter, quarter, 2 * quarter], dim=-1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return (torch.cat([y1, y2, still], dim=-1) * scale).type_as(x)


# Attention masks. A query sees a key if the key is not later, is in the same document, and is at
# most `window` tokens back. There are two versions: a BlockMask for FlexAttention on GPUs, and a
# mask in plain PyTorch.


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


def flex_block_mask(docs: Tensor, window: Tensor) -> BlockMask:
    """Makes the BlockMask of docs (T,). window is a scalar tensor on the device, in tokens, so that
    a growing window doesn't recompile. FlexAttention calls document_causal_window only in partly
    visible blocks."""

    def document_causal_window(b, h, q_idx, kv_idx):
        causal = q_idx >= kv_idx
        same_document = docs[q_idx] == docs[kv_idx]
        return causal & same_document & (q_idx - kv_idx <= window)

    first_doc = docs.view(-1, BLOCK_SIZE)[:, 0]  # (N,)
    last_doc = docs.view(-1, BLOCK_SIZE)[:, -1]
    block = torch.arange(len(first_doc), dtype=torch.int32, device=docs.device)
    distance = BLOCK_SIZE * (block[:, None] - block)  # (N, N), from the first key to the first query
    window_any = distance - (BLOCK_SIZE - 1) <= window  # from the last key to the first query
    window_all = distance + (BLOCK_SIZE - 1) <= window  # from the first key to the last query
    causal_any = distance >= 0
    causal_all = distance > 0
    # Rows are query blocks, columns are key blocks. Documents are numbered in order, so for a key block
    # that isn't later than the query block:
    document_any = first_doc[:, None] <= last_doc  # they share a document
    document_all = last_doc[:, None] == first_doc  # both are in one document
    visible_any = window_any & causal_any & document_any
    visible_all = window_all & causal_all & document_all
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
        mask_mod=document_causal_window,
    )


def portable_mask(docs: Tensor, window: Tensor, span: int) -> Tensor:
    """Makes the mask of docs (T,) for portable_attention: bool (N, 1, 128, span * 128), True where
    visible. Each block of queries has keys in itself and in the span - 1 blocks before it. `span`
    is a constant upper bound, so that a growing window (in tokens) doesn't recompile."""
    query = torch.arange(len(docs), dtype=torch.int32, device=docs.device)
    query = query.view(-1, BLOCK_SIZE, 1)  # (N, 128, 1)
    # the first token of each query's document: docs 1 1 1 2 2 -> 0 0 0 3 3
    document_start = torch.searchsorted(docs, docs, out_int32=True).view_as(query)
    start = document_start.maximum(query - window)
    offset = torch.arange((1 - span) * BLOCK_SIZE, BLOCK_SIZE, dtype=torch.int32, device=docs.device)
    key = query[:, :1] + offset  # (N, 1, span * 128); negative before the first token
    visible = (start <= key) & (key <= query)
    return visible[:, None]


def make_mask(docs: Tensor, window: Tensor, max_window: int) -> BlockMask | Tensor:
    if docs.is_cuda:
        return flex_block_mask(docs, window)
    return portable_mask(docs, window, math.ceil(max_window / BLOCK_SIZE) + 1)


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


def shifted(x: Tensor) -> Tensor:
    """x (B, S, ...) one position later. The first stays."""
    return torch.cat([x[:, :1], x[:, :-1]], dim=1)


def gate(x: Tensor, weight: Tensor) -> Tensor:  # (..., C), (n, 12) -> (..., n)
    return torch.sigmoid(F.linear(x[..., :GATE_CHANNELS], weight))


class GPT(nn.Module):
    """The model with its loss: GPT(hp)(input_seq, target_seq, window_blocks).

    input_seq (B, S) is int32, target_seq (B, S) int64, window_blocks a scalar int32; S is a
    multiple of 128. Returns in training the weighted cross-entropy of the next three tokens in
    nats, summed, and in evaluation that of the next token, averaged. `dtype` is that of the
    activations, tables, matrices and gates; lambdas are float32. set_step sets what is
    scheduled."""

    val_slice = 32768  # validation computes the logits of this many tokens at a time, to save memory

    def __init__(self, hp, dtype=torch.bfloat16, use_fp8=False):
        super().__init__()
        self.hp = hp
        self.use_fp8 = use_fp8
        layers, heads, dim = hp.num_layers, hp.num_heads, hp.model_dim
        attn_layers, value_layers = len(hp.attn_layers), len(hp.value_layers)

        def weights(*shape):
            return nn.Parameter(torch.empty(shape, dtype=dtype))

        def lambdas(value, *shape):
            return nn.Parameter(torch.full(shape, value))

        self.embed = weights(hp.padded_vocab_size, dim)
        self.lm_head = weights(hp.padded_vocab_size, dim)
        tables = [weights(hp.padded_vocab_size, dim) for _ in range(hp.num_value_embeds)]
        self.value_embeds = nn.ParameterList(tables)
        self.bigram_embed = self.bigram_lambdas = None
        if hp.bigram_factor:
            self.bigram_embed = weights(hp.bigram_factor * hp.padded_vocab_size, dim)
            self.bigram_lambdas = lambdas(0.1, layers)
        # banks of matrices: Q, K, V and O (out, in); the MLP's input (hidden, in) and output
        # (hidden, out)
        self.attn_bank = weights(attn_layers, 4, dim, dim)
        self.mlp_in_bank = weights(layers, 4 * dim, dim)
        self.mlp_out_bank = weights(layers, 4 * dim, dim)
        self.smear_gate = weights(1, GATE_CHANNELS)
        self.skip_gate = weights(1, GATE_CHANNELS)
        self.attn_gates = weights(attn_layers, heads, GATE_CHANNELS)
        self.value_gates = weights(value_layers, heads, GATE_CHANNELS)
        self.resid_lambdas = lambdas(1.1, layers)
        self.x0_lambdas = lambdas(0.0, layers)
        self.qkv_lambdas = lambdas(0.5, attn_layers)
        self.o_lambdas = lambdas(1.0, attn_layers)
        self.smear_lambda = lambdas(0.0)
        self.skip_lambda = lambdas(-1.5)
        self.backout_lambda = lambdas(0.5)
        # what changes with the step
        self.stage = -1
        self.rotary = Rotary(hp.head_dim, max(*hp.seq_lens, hp.val_seq_len), dtype)
        self.register_buffer("attn_scale", torch.zeros(()), persistent=False)
        self.register_buffer("loss_weights", torch.zeros(3), persistent=False)
        self.set_step(0)
        self.init_weights(hp.seed)

    def set_step(self, step):
        """Sets the loss weights, and in a new stage the rotary tables and the scale of
        attention."""
        for k, weight in enumerate(get_loss_weights(step, self.hp)):
            self.loss_weights[k].fill_(weight)
        stage = get_stage(step, self.hp)
        if self.stage != stage:
            self.stage = stage
            freqs, scale = get_rotary(step, self.hp, self.loss_weights.device)
            self.rotary.set_frequencies(freqs)
            self.attn_scale.fill_(scale)

    @torch.no_grad()
    def init_weights(self, seed):
        """Sets the initial values of all tensors but scalars, which keep the values that they are
        created with. Each has a random generator of its own, keyed by the seed and its name."""
        bound = (3 / self.hp.model_dim) ** 0.5  # of a uniform distribution with variance 1 / model_dim
        for name, p in self.named_parameters():
            key = zlib.crc32(f"{seed} {name}".encode())
            rng = torch.Generator().manual_seed(key)
            value = torch.zeros(p.shape)  # in float32: PyTorch 2.11 draws coarse values in bf16
            if name == "lm_head":
                value.normal_(std=0.005, generator=rng)
            elif name == "attn_bank":
                value.uniform_(-bound, bound, generator=rng)
                value[:, 3].zero_()
            elif name == "mlp_in_bank":
                value.uniform_(-bound / 2, bound / 2, generator=rng)
            if p.ndim >= 2:
                p.copy_(value)
        self.embed.copy_(self.lm_head)

    def masks(self, docs: Tensor, window_blocks: Tensor) -> list[BlockMask | Tensor]:
        """Returns a mask for each layer. The final validation's longer window is for long layers
        only."""
        hp = self.hp
        last = hp.windows[-1]
        longest = hp.window_block * (last if self.training else hp.val_window)
        short_window = hp.window_block * (window_blocks.clamp_max(last) // 2)
        max_short = hp.window_block * (last // 2)
        masks = [make_mask(docs, short_window, max_short)] * hp.num_layers
        long = make_mask(docs, hp.window_block * window_blocks, longest)
        for i in hp.long_window_layers:
            masks[i] = long
        paired = make_mask(docs.repeat_interleave(2), short_window, max_short)
        for i in hp.paired_layers:
            masks[i] = paired
        return masks

    def smeared_embeddings(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) -> (B, S, C). Each one but a sequence's first gets some of the one
        before."""
        x = F.embedding(tokens, self.embed)
        smear = self.smear_lambda * gate(x[:, 1:], self.smear_gate) * x[:, :-1]
        return torch.cat([x[:, :1], x[:, 1:] + smear], dim=1)

    def bigram_rows(self, tokens: Tensor) -> Tensor:
        """tokens (B, S) in int64 -> the row of each token and the one before in the table of
        bigrams.

        A sequence's first token has the last row. In the record, its number has also taken the
        place of the token in the next bigram, where it overflows int32."""
        last_row = len(self.bigram_embed) - 1
        first = torch.full_like(tokens[:, :1], last_row)
        earlier = 27191 * torch.cat([first, tokens[:, 1:-1]], dim=1)
        earlier = (earlier + 2**31) % 2**32 - 2**31  # int32
        rows = (36313 * tokens[:, 1:]).bitwise_xor(earlier) % last_row
        return torch.cat([first, rows], dim=1)

    def attention(self, x, ve, weights, mask, layer):
        """x (B, S, C), normed -> (B, S, C). ve (B, S, C) are the value embeddings of this layer, or
        None; weights (4, C, C) are Q, K, V and O."""
        hp = self.hp
        index = hp.attn_layers.index(layer)
        paired = layer in hp.paired_layers
        # multiplying the weights is faster than multiplying activations
        qkv_w = weights[:3].flatten(0, 1) * self.qkv_lambdas[index]
        o_w = weights[3] * self.o_lambdas[index]
        qkv = F.linear(x, qkv_w).unflatten(2, (3, hp.num_heads, hp.head_dim))
        q, k, v = qkv.unbind(2)  # (B, S, H, D) each
        q = self.rotary(norm(q), paired, self.attn_scale)
        k = self.rotary(norm(k), paired)
        if layer in hp.long_window_layers:  # key offset: the still channels are those of the key before
            turning, still = k.chunk(2, dim=-1)
            k = torch.cat([turning, shifted(still)], dim=-1)
        if ve is not None:
            ve_gate = 2 * gate(x, self.value_gates[hp.value_layers.index(layer)])
            v = v + ve_gate[..., None] * ve.view_as(v)
        # Paired heads are one sequence of twice the length: the first half of the heads of token t
        # is in slot 2t, the second half in slot 2t + 1, which is how they lie in memory.
        slots = (1, -1, hp.num_heads // 2 if paired else hp.num_heads, hp.head_dim)
        y = attention(q.reshape(slots), k.reshape(slots), v.reshape(slots), mask, scale=1.0)
        y = y.view_as(q) * gate(x, self.attn_gates[index])[..., None]
        return F.linear(y.flatten(2), o_w)

    def forward(self, input_seq: Tensor, target_seq: Tensor, window_blocks: Tensor) -> Tensor:
        hp = self.hp
        docs = document_ids(input_seq, hp.eot_token)  # (T,)
        masks = self.masks(docs, window_blocks)
        x = x0 = norm(self.smeared_embeddings(input_seq))  # (B, S, C)
        if self.bigram_embed is not None:
            bigrams = F.embedding(self.bigram_rows(input_seq.long()), self.bigram_embed)
        value_embeds = [F.embedding(input_seq, table) for table in self.value_embeds]
        ve_of_layer = dict(zip(reversed(hp.value_layers), itertools.cycle(reversed(value_embeds))))
        attn_w = dict(zip(hp.attn_layers, self.attn_bank.unbind()))
        mlp_in_w = self.mlp_in_bank.unbind()
        mlp_out_w = self.mlp_out_bank.unbind()
        for i in range(hp.num_layers):
            if i == hp.skip_to:
                skip_gate = torch.sigmoid(self.skip_lambda) * 2 * gate(x0, self.skip_gate)
                x = x + skip_gate * skip
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            if self.bigram_embed is not None:
                x = x + self.bigram_lambdas[i] * bigrams
            if i in hp.attn_layers:
                x = x + self.attention(norm(x), ve_of_layer.get(i), attn_w[i], masks[i], i)
            hidden = F.relu(F.linear(norm(x), mlp_in_w[i])).square()
            x = x + hidden @ mlp_out_w[i]
            if i == hp.skip_from:
                skip = x
            if i == hp.backout_layer:
                backout = x
        x = norm(x - self.backout_lambda * backout)
        if self.training:
            return self.training_loss(x.flatten(0, 1), target_seq)
        x, target_seq = x.flatten(0, 1), target_seq.flatten()
        total = 0.0
        for part, targets in zip(x.split(self.val_slice), target_seq.split(self.val_slice)):
            logits = softcap(F.linear(part, self.lm_head))
            total += F.cross_entropy(logits, targets, reduction="sum")
        return total / target_seq.numel()

    def training_loss(self, x: Tensor, target_seq: Tensor) -> Tensor:
        """x (T, C), target_seq (B, S) -> the weighted cross-entropy in nats, summed over tokens."""
        ahead = [F.pad(target_seq[:, k:], (0, k), value=-1) for k in range(3)]
        targets = torch.stack(ahead, dim=-1).flatten(0, 1)  # (T, 3)
        if self.use_fp8:
            head_loss = torch.ops.nanogpt2026.head_loss
            return head_loss(x, self.lm_head, targets, self.loss_weights)[0]
        return weighted_loss(F.linear(x, self.lm_head), targets, self.loss_weights)[0]


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


def shard_files(pattern):
    """Returns the shards in sorted order. A relative pattern is first looked for in the current
    folder, then in the repository."""
    folder = glob.escape(str(Path(__file__).resolve().parents[1]))
    files = sorted(glob.glob(pattern) or glob.glob(f"{folder}/{pattern}"))
    if not files:
        raise InputError(
            f"no shards match {pattern}; make them with data/shakespeare.py (mini) or "
            "data/cached_fineweb10B.py (fineweb)"
        )
    return list(map(Path, files))


def global_batches(pattern, batch_size):
    """Yields the shard and the first token of each batch of consecutive tokens, for validation.
    Trailing tokens that don't fill a batch are dropped."""
    for file in shard_files(pattern):
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


def read_documents(file, hp):
    """Returns the tokens of a shard, and a list with the first position of each document, followed
    by the number of tokens."""
    tokens = read_tokens(file, 0, shard_length(file), hp.vocab_size)
    begins = np.flatnonzero(tokens == hp.eot_token).tolist()
    return tokens, [*begins, len(tokens)]


def read_shards(hp):
    """Yields read_documents of each training shard. Meanwhile, a thread reads the next one."""
    files = shard_files(hp.train_files)
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as reader:
        ahead = reader.submit(read_documents, files[0], hp)
        for file in files[1:]:
            shard = ahead.result()
            ahead = reader.submit(read_documents, file, hp)
            yield shard
        yield ahead.result()


def pack_sequence(tokens, begins, position, count, hp):
    """Fills a sequence of `count` tokens with documents from `position` on, of which each gives its
    first max_document tokens. Returns the pieces of `tokens`, and the position after them.

    `begins` are those of read_documents. Returns (None, len(tokens)) at the end of the shard. With
    hp.skip_rest, what a document has left is skipped; otherwise the next piece goes on with it."""
    pieces = []
    while count > 0:
        if hp.skip_rest:
            position = begins[bisect.bisect_left(begins, position)]
        if position == len(tokens):
            return None, position
        document_end = begins[bisect.bisect_right(begins, position)]
        stop = min(document_end, position + hp.max_document, position + count)
        pieces.append(tokens[position:stop])
        count -= stop - position
        position = stop
    return pieces, position


def packed_steps(hp):
    """Yields for each step a list of the pieces of each sequence. A step that a shard can't fill
    begins anew in the next shard."""
    step = 0
    for tokens, begins in read_shards(hp):
        position = 0
        while position < len(tokens):
            sequences = []
            for _ in range(hp.num_sequences):
                count = get_seq_len(step, hp) + 1  # the inputs, and the last target
                pieces, position = pack_sequence(tokens, begins, position, count, hp)
                sequences.append(pieces)
            if None not in sequences:
                yield sequences
                step += 1


def check_training_shards(hp):
    """Raises InputError if there are too few documents for all steps."""
    steps = sum(1 for _ in itertools.islice(packed_steps(hp), hp.num_iterations))
    if steps < hp.num_iterations:
        raise InputError(
            f"{hp.train_files} has enough documents for {steps} steps, but the run needs "
            f"{hp.num_iterations}; add shards or lower --num_iterations"
        )


def training_batches(hp, world, first_step=0):
    """Yields this rank's sequences of each step: inputs int32 and targets int64, each
    (num_sequences / world.size, S)."""
    local = hp.num_sequences // world.size
    mine = slice(world.rank * local, (world.rank + 1) * local)
    for sequences in itertools.islice(packed_steps(hp), first_step, None):
        rows = [np.concatenate(pieces) for pieces in sequences[mine]]
        batch = torch.from_numpy(np.stack(rows).astype(np.int32))  # (local, S + 1)
        inputs = batch[:, :-1].contiguous()
        targets = batch[:, 1:].long()
        yield to_device(inputs, world.device), to_device(targets, world.device)


# -----------------------------------------------------------------------------
# 6. Hyperparameters. The defaults are those of the fineweb track; `--name value` changes any of them.


def setting(default, help):
    """Defines a hyperparameter, with its text in --help."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class Hyperparameters:
    track: str = setting("fineweb", "the track that sets the other defaults")
    # data
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "training shards")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    val_tokens: int = setting(10_485_760, "number of validation tokens; compare losses only if it is the same")
    val_seq_len: int = setting(4 * 64 * 1024, "tokens per validation sequence")
    num_sequences: int = setting(8, "sequences per step, on all processes together")
    seq_lens: tuple[int, ...] = setting((16384, 32768, 49152), "tokens per sequence, in thirds of the run")
    sequences_per_pass: int = setting(
        1, "sequences per micro-batch; reduced if it doesn't divide the sequences of a process"
    )
    max_document: int = setting(2048, "tokens after which a document is cut")
    skip_rest: bool = setting(True, "skip what a document has left when it is cut")
    vocab_size: int = setting(50257, "number of token ids")
    eot_token: int = setting(50256, "token id that begins a document")
    # model
    num_layers: int = setting(11, "number of layers")
    num_heads: int = setting(6, "attention heads per layer")
    model_dim: int = setting(768, "channels of the residual stream")
    attn_free_layers: tuple[int, ...] = setting((6,), "layers without attention, like 0,7")
    long_window_layers: tuple[int, ...] = setting((3, 10), "layers with the long window and key offset")
    paired_layers: tuple[int, ...] = setting((0, 2, 5, 9), "layers with paired heads")
    value_layers: tuple[int, ...] = setting((0, 1, 8, 9, 10), "layers with value embeddings")
    num_value_embeds: int = setting(3, "value embedding tables; the last value layers use them in order")
    skip_from: int = setting(3, "layer whose output is added again")
    skip_to: int = setting(6, "layer before which it is added")
    backout_layer: int = setting(7, "layer whose output is subtracted at the end")
    bigram_factor: int = setting(5, "rows of the bigram table per token id; 0 for no table")
    window_block: int = setting(128, "tokens in which windows are counted")
    windows: tuple[int, ...] = setting((3, 7, 11, 13), "long windows, in thirds and in the extension")
    val_window: int = setting(20, "long window of the last validation")
    yarn_beta: int = setting(32, "YaRN keeps frequencies that turn more often than this within a window")
    fp8: bool = setting(True, "compute the head in FP8 on GPUs that support it")
    # optimization
    num_iterations: int = setting(1600, "training steps, with the extension")
    extension_frac: float = setting(0.025, "fraction of the steps after the schedules' end")
    lr_factor2: float = setting(1.52, "factor of learning rates in the second third")
    lr_factor3: float = setting(1.73, "factor of learning rates in the last third")
    cooldown_frac: float = setting(0.55, "fraction of the schedule in which learning rates decay")
    final_lr: float = setting(0.1, "factor of learning rates in the extension")
    head_lr: float = setting(0.008, "Adam's learning rate for head, embedding and gates")
    table_lr: float = setting(0.6, "Adam's learning rate for value and bigram embeddings")
    scalar_lr: float = setting(0.04, "Adam's learning rate for lambdas")
    adam_weight_decay: float = setting(0.005, "factor of Adam's cautious weight decay")
    muon_lr: float = setting(0.023, "Muon's learning rate, for the matrices")
    muon_weight_decay: float = setting(1.2, "Muon's cautious weight decay")
    muon_momentum: float = setting(0.95, "Muon's momentum after its warm-up")
    muon_momentum_start: float = setting(0.85, "Muon's momentum at the start and the end")
    muon_momentum_warmup: int = setting(300, "steps in which Muon's momentum rises")
    muon_momentum_cooldown: int = setting(50, "last steps, in which Muon's momentum falls")
    muon_beta2: float = setting(0.95, "decay of NorMuon's mean squares")
    # the run
    seed: int = setting(0, "seed of the initial weights")
    warmup_steps: int = setting(4, "untimed steps per sequence length that compile and are then undone")
    val_loss_every: int = setting(250, "steps between validations; 0 to validate only at the end")
    target_val_loss: float = setting(3.28, "validation loss to reach")
    save_checkpoint: bool = setting(False, "save the final model and the optimizers' state")

    @property
    def head_dim(self):
        return self.model_dim // self.num_heads

    @property
    def train_seq_len(self):
        """The longest training sequence."""
        return max(self.seq_lens)

    @property
    def scheduled_iterations(self):
        """Steps before the extension."""
        return round(self.num_iterations * (1 - self.extension_frac))

    @property
    def attn_layers(self):
        return [i for i in range(self.num_layers) if i not in self.attn_free_layers]

    @property
    def padded_vocab_size(self):
        """vocab_size rounded up to a multiple of 128, for faster matmuls."""
        return math.ceil(self.vocab_size / 128) * 128


# mini is the same model in miniature, on Shakespeare's bytes, for two CPU cores. Its rules:
# - Depth: 4 layers in place of 11. The layers of the skip, backout and value embeddings keep their
#   relative depth. The long windows are in layers 1 and 3, and the paired heads in the other two. No
#   layer lacks attention, as in train_gpt.py's mini.
# - Steps have 1/128 of the tokens, in four sequences of 1/64. With eight of 1/128, most tokens would
#   see less context than in validation. Scenes are longer than a sequence, so a sequence goes on where
#   the one before ended.
# - Windows have 1/8 of the tokens, as train_gpt.py's have about 1/7. So frequencies turn 1/8 as often
#   in a window, and YaRN's beta is 1/8. The last validation has the windows of the extension: with
#   longer ones than in training, the loss is higher at this size.
# - Steps that are counted (Muon's momentum) are scaled with the number of steps.
TRACKS = {
    "fineweb": Hyperparameters(),
    "mini": Hyperparameters(
        track="mini",
        train_files="data/shakespeare/shakespeare_train_*.bin",
        val_files="data/shakespeare/shakespeare_val_*.bin",
        val_tokens=389_120,
        val_seq_len=12_160,
        num_sequences=4,
        seq_lens=(256, 512, 768),
        sequences_per_pass=4,
        skip_rest=False,
        vocab_size=257,
        eot_token=256,
        num_layers=4,
        num_heads=2,
        model_dim=128,
        attn_free_layers=(),
        long_window_layers=(1, 3),
        paired_layers=(0, 2),
        value_layers=(0, 3),
        num_value_embeds=1,
        skip_from=1,
        skip_to=3,
        backout_layer=2,
        window_block=16,
        val_window=13,
        yarn_beta=4,
        num_iterations=560,
        lr_factor2=1.25,
        lr_factor3=1.35,
        cooldown_frac=0.8,
        head_lr=0.01,
        table_lr=0.24,
        muon_lr=0.035,
        muon_weight_decay=0.9,
        muon_momentum=0.86,
        muon_momentum_start=0.8,
        muon_momentum_warmup=105,
        muon_momentum_cooldown=18,
        muon_beta2=0.9,
        val_loss_every=40,
        target_val_loss=1.50,
    ),
}

POSITIVE = (
    "val_tokens", "val_seq_len", "num_sequences", "sequences_per_pass", "max_document", "vocab_size",
    "num_layers", "num_heads", "model_dim", "num_value_embeds", "window_block", "num_iterations",
    "cooldown_frac", "target_val_loss",
)
BELOW_ONE = ("extension_frac", "muon_momentum", "muon_momentum_start", "muon_beta2")


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
    require(hp.yarn_beta > 1, f"--yarn_beta {hp.yarn_beta}: must be more than 1")
    for name, size in [("seq_lens", 3), ("windows", 4)]:
        values = getattr(hp, name)
        require(len(values) == size, f"--{name}: {len(values)} numbers; it needs {size}")
        require(min(values) > 0 and list(values) == sorted(values), f"--{name}: must be positive and rise")
    for length in (*hp.seq_lens, hp.val_seq_len):
        valid = length % BLOCK_SIZE == 0
        require(valid, f"--seq_lens, --val_seq_len: {length} is not a multiple of {BLOCK_SIZE}")
    valid = hp.val_tokens % hp.val_seq_len == 0
    require(valid, f"--val_tokens {hp.val_tokens}: must be a multiple of --val_seq_len {hp.val_seq_len}")
    require(
        hp.model_dim % (4 * hp.num_heads) == 0 and hp.num_heads % 2 == 0,
        f"--num_heads {hp.num_heads}: must be even, and 4 times it must divide --model_dim {hp.model_dim}",
    )
    require(
        hp.eot_token < hp.vocab_size,
        f"--eot_token {hp.eot_token}: must be less than --vocab_size {hp.vocab_size}",
    )
    check_layers(hp)
    if device == "cuda":
        require(hp.head_dim >= 16, f"--model_dim {hp.model_dim}: FlexAttention needs 16 channels a head")
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


def check_layers(hp):
    """Raises InputError for layers that there aren't, or that can't be combined."""
    layers = range(hp.num_layers)
    for name in ("attn_free_layers", "long_window_layers", "paired_layers", "value_layers"):
        for i in getattr(hp, name):
            valid = i in layers
            require(valid, f"--{name}: there is no layer {i}, as --num_layers is {hp.num_layers}")
    for name in ("paired_layers", "value_layers"):
        other = "long_window_layers" if name == "paired_layers" else "attn_free_layers"
        both = set(getattr(hp, name)) & set(getattr(hp, other))
        require(not both, f"--{name} and --{other} can't both have layer {min(both, default=0)}")
    require(
        hp.skip_from < hp.skip_to < hp.num_layers and hp.backout_layer < hp.num_layers,
        f"--skip_from {hp.skip_from}, --skip_to {hp.skip_to}, --backout_layer {hp.backout_layer}: "
        f"must be layers of {hp.num_layers}, the first before the second",
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
        usage="january2026.py [--track NAME] [--device NAME] [--NAME VALUE ...]",
        description="Trains a GPT with the speedrun's recipe of January 2026.",
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
    hp = TRACKS[args.track or ("fineweb" if on_gpu else "mini")]
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


# lines are "name\t: value"; the values of the last core stay
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
    """Muon trains the banks of matrices; Adam the rest. Raises ValueError for a parameter that
    isn't in exactly one group."""

    def group(params, lr, betas, weight_decay=0):
        params = [p for p in params if p is not None]
        decay = weight_decay * hp.adam_weight_decay
        return dict(params=params, lr=lr, betas=betas, weight_decay=decay)

    lambdas = [model.resid_lambdas, model.qkv_lambdas, model.o_lambdas, model.bigram_lambdas]
    lambdas += [model.smear_lambda, model.skip_lambda, model.backout_lambda]
    adam = Adam(
        [
            group([model.lm_head, model.embed], hp.head_lr, (0.5, 0.95), 150),
            group([*model.value_embeds, model.bigram_embed], hp.table_lr, (0.75, 0.95), 5),
            group(lambdas, hp.scalar_lr, (0.9, 0.99)),
            group([model.x0_lambdas], hp.scalar_lr, (0.65, 0.95)),
            group([model.smear_gate], 0.01 * hp.head_lr, (0.9, 0.99)),
            group([model.skip_gate], 0.05 * hp.head_lr, (0.9, 0.99)),
            group([model.attn_gates, model.value_gates], hp.head_lr, (0.9, 0.99), 1),
        ]
    )
    # The MLP has steps of sqrt(rows / cols), and its output steps twice as large. At the end of a
    # step, the learning rates also multiply weight decay, but without these factors.
    muon = Muon(
        [
            dict(params=[model.attn_bank], scale=1.0),
            dict(params=[model.mlp_in_bank], scale=2.0),
            dict(params=[model.mlp_out_bank], scale=4.0),
        ],
        hp.muon_lr,
        hp.muon_momentum,
        hp.muon_beta2,
        hp.muon_weight_decay,
    )
    groups = adam.param_groups + muon.param_groups
    grouped = [id(p) for group in groups for p in group["params"]]
    for name, p in model.named_parameters():
        count = grouped.count(id(p))
        if count != 1:
            raise ValueError(f"build_optimizers puts {name} into {count} groups, instead of one")
    for group in groups:
        group["initial_lr"] = group["lr"]
    return [adam, muon]


def get_stage(step, hp):
    """Returns 0, 1 or 2 in the thirds of the schedule, and 3 in the extension."""
    return min(3, 3 * step // hp.scheduled_iterations)


def get_seq_len(step, hp):
    return hp.seq_lens[min(2, get_stage(step, hp))]


def get_window_blocks(step, hp):
    """Returns the long window of a step in units of window_block, or that of the last
    validation."""
    if step >= hp.num_iterations:
        return hp.val_window
    return hp.windows[get_stage(step, hp)]


def get_lr(step, hp):
    """Returns the factor of all learning rates: 1, then larger with larger batches, with a linear
    decay to final_lr at the end."""
    factor = 1.0
    if 3 * step > hp.scheduled_iterations:
        factor = hp.lr_factor2
    if 3 * step > 2 * hp.scheduled_iterations:
        factor = hp.lr_factor3
    w = min(1.0, max(0.0, 1 - step / hp.scheduled_iterations) / hp.cooldown_frac)
    return w * factor + (1 - w) * hp.final_lr


def get_muon_momentum(step, hp):
    """Returns the momentum: it rises at the start, and falls at the end."""
    cooldown_start = hp.num_iterations - hp.muon_momentum_cooldown
    frac = 1.0
    if step < hp.muon_momentum_warmup:
        frac = step / hp.muon_momentum_warmup
    elif step > cooldown_start:
        frac = 1 - (step - cooldown_start) / hp.muon_momentum_cooldown
    return (1 - frac) * hp.muon_momentum_start + frac * hp.muon_momentum


def get_loss_weights(step, hp):
    """Returns the weights of the next three tokens: 1, 0.5 to the second third, 0.25 to the first.
    Both end with a linear decay over a third."""
    thirds = 3 * step / hp.scheduled_iterations
    return 1.0, 0.5 * min(1, max(0, 2 - thirds)), 0.25 * max(0, 1 - thirds)


def get_rotary(step, hp, device):
    """Returns the rotary frequencies (D/4,) and the scale of attention. Both change with the window
    by YaRN: frequencies that turn rarely within it are lowered, those that turn often stay."""
    freqs = (1 / 1024) ** torch.linspace(0, 1, hp.head_dim // 4, device=device)
    scale = 0.1
    windows = hp.windows[: get_stage(step, hp) + 1]
    for old, new in itertools.pairwise(windows):
        ratio = old / new
        turns = hp.window_block * old * freqs / (2 * math.pi)
        kept = ((turns - 1) / (hp.yarn_beta - 1)).clamp(0, 1)
        freqs = freqs * (ratio + kept * (1 - ratio))
        scale *= 1 + 0.2 * math.log(new / old)
    return freqs, scale


def is_tied(step, hp):
    """Head and embedding are tied until two thirds of the schedule, up to and with an odd step."""
    return step <= math.ceil(2 / 3 * hp.scheduled_iterations) | 1


def set_schedules(model, optimizers, step, hp):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr(step, hp)
            if "momentum" in group:
                group["momentum"] = get_muon_momentum(step, hp)
    model.set_step(step)


# -----------------------------------------------------------------------------
# 9. Compilation and warm-up: everything that the run uses, on random tokens, before the clock starts

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


def warm_up(model, optimizers, hp, world):
    """Trains and validates on random tokens: this compiles the kernels, connects the processes and
    allocates memory. Then resets the weights and the optimizers."""
    local = hp.num_sequences // world.size
    window_blocks = get_window_blocks(hp.num_iterations, hp)
    rng = torch.Generator(world.device).manual_seed(world.rank)
    for seq_len in hp.seq_lens:
        shape = (local, seq_len)
        targets = torch.randint(hp.vocab_size, shape, device=world.device, generator=rng)
        for step in range(hp.warmup_steps):
            train_step(model, optimizers, targets.int(), targets, window_blocks, step, hp, world)
    targets = torch.randint(hp.vocab_size, (hp.val_seq_len,), device=world.device, generator=rng)
    if hp.warmup_steps:
        evaluate(model, [(targets.int(), targets)], window_blocks, hp, world)
    with torch.no_grad():  # compile_model and earlier runs have changed the weights, too
        for p, initial in zip(model.parameters(), build_model(hp, world).parameters()):
            p.copy_(initial)
    for optimizer in optimizers:
        optimizer.zero_grad()
        optimizer.state.clear()


# -----------------------------------------------------------------------------
# 10. Sums of gradients over the processes


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def start_all_reduce(optimizer, world):
    """Starts to sum an optimizer's gradients. Returns what to wait for."""
    if world.size == 1:
        return []
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    return [dist.all_reduce(gradient, async_op=True) for gradient in gradients]


def finish(handles, optimizer):
    """Waits for an optimizer's gradients and takes its step."""
    for handle in handles:
        handle.wait()
    optimizer.step()
    optimizer.zero_grad()


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
    random state to save, because training draws no random numbers. The number of steps must be
    even: then no gradients wait for Adam."""
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
    metadata = dict(model="january2026", hyperparameters=json.dumps(dataclasses.asdict(hp)))
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
    differences = []
    for name, value in dataclasses.asdict(hp).items():
        old = state["settings"].get(name)
        if old != value and name != "save_checkpoint":
            differences.append(f"{name}: {old} in the checkpoint, {value} now")
    if state["source"] != SOURCE:
        differences.append("the source has changed")
    last_step, step = hp.num_iterations, state["step"]
    too_late = f"--resume: the checkpoint is at step {step}, but --num_iterations is {last_step}"
    require(step <= last_step, too_late)
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
    except RuntimeError as e:
        reason = str(e).splitlines()[-1].strip()
        raise InputError(
            f"--resume: the checkpoint is from a different model ({reason}); use the settings of its run"
        ) from None
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        # Loads only the moments, because --resume_force may change learning rates and betas.
        # PyTorch's own load_state_dict would round them to the dtype of the parameters.
        for i, p in enumerate(parameters_of(optimizer)):
            for name, value in saved["state"].get(i, {}).items():
                optimizer.state[p][name] = value if name == "step" else value.to(p.device)


# -----------------------------------------------------------------------------
# 12. The timed loop


def sequences_per_pass(hp, world):
    """Returns the micro-batch size: hp.sequences_per_pass, reduced to a divisor of the number of
    sequences of each process."""
    return math.gcd(hp.sequences_per_pass, hp.num_sequences // world.size)


def tokens_trained(steps, hp):
    """Returns the number of tokens in the first `steps` steps."""
    return sum(hp.num_sequences * get_seq_len(step, hp) for step in range(steps))


def train_step(model, optimizers, inputs, targets, window_blocks, step, hp, world):
    """Trains on this process's sequences (num_sequences / world.size, S) of a step. Muon updates
    its parameters in every step, Adam in odd steps, with the sum of two gradients. Returns the mean
    loss."""
    adam, muon = optimizers
    adam_step = step % 2 == 1
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    per_pass = sequences_per_pass(hp, world)
    total = torch.zeros((), device=world.device)
    model.train()
    for x, y in zip(inputs.split(per_pass), targets.split(per_pass)):
        loss = model(x, y, window)
        # As in modded-nanogpt, the gradient is that of the summed loss divided by the number of
        # sequences. Muon ignores its scale, and so does Adam, up to its epsilon.
        (loss / hp.num_sequences).backward()
        total += loss.detach()
    head, embed = parameters_of(adam)[:2]
    tied = adam_step and is_tied(step, hp)
    if tied:
        head.grad += embed.grad
        embed.grad = None
    muon_handles = start_all_reduce(muon, world)
    adam_handles = start_all_reduce(adam, world) if adam_step else []
    finish(muon_handles, muon)
    if adam_step:
        if tied:  # with equal gradients, weights and moments stay equal, too
            embed.grad = head.grad
        finish(adam_handles, adam)
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
    """Starts a vote every four steps, and reads it four steps later. By then the copy has finished,
    so reading it doesn't stall the GPU. All ranks read it after the same step, and so stop
    together. `pending` holds the vote that isn't read yet. A single process on a CPU votes after
    every second step."""
    if step % 2 != 0:
        return 0  # Adam needs two steps
    if world.size == 1 and world.device.type == "cpu":
        return vote(first_bad_step, world)
    if step % 4 != 0:
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
    """The clock, validations and log of a run. Rank 0 writes <log_dir>/<run_id>.txt and the
    console."""

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
        speed = tokens_trained(step, self.hp) / (ms / 1000)
        self.write(peak_memory(self.world))
        self.write(
            f"target {target}: {verdict}; val_loss {val_loss:.4f}{bits} after {ms / 1000:.2f} s, "
            f"{speed:,.0f} tokens/s"
        )


def start_run(args, hp, world, parts, resumed):
    """Starts the log, warms up, and loads the checkpoint of a resumed run."""
    model, compiled, compiler_line, optimizers = parts
    book = Logbook(args.log_dir, hp, world, resumed, compiler_line)
    start = time.perf_counter()
    warm_up(compiled, optimizers, hp, world)
    seconds = time.perf_counter() - start
    steps = hp.warmup_steps * len(hp.seq_lens)
    book.write(f"warm-up: {steps} steps in {seconds:.1f} s, untimed")
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
    model, compiled, _, optimizers = parts
    book = start_run(args, hp, world, parts, resumed)
    folder = Path(args.checkpoint_dir) / book.run_id
    first_step = resumed.get("step", 0)
    batches = training_batches(hp, world, first_step)
    first_bad_step = torch.full((), math.inf, dtype=torch.float64, device=world.device)
    pending = []
    in_training = True
    book.start_clock()
    for step in range(first_step, hp.num_iterations + 1):
        set_schedules(model, optimizers, step, hp)
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            book.stop_clock()
            val_loss = validate(compiled, step, hp, world)
            stop = vote(first_bad(first_bad_step, step, val_loss), world)
            book.validation(step, val_loss.item())
            book.start_clock()
        if last_step:
            break
        # --------------- training
        inputs, targets = next(batches)
        window_blocks = get_window_blocks(step, hp)
        loss = train_step(compiled, optimizers, inputs, targets, window_blocks, step, hp, world)
        first_bad_step = first_bad(first_bad_step, step + 1, loss)
        stop = vote_while_training(pending, step + 1, first_bad_step, world)
        book.step(step + 1)
        # --------------- checkpoint
        due = args.checkpoint_every and (step + 1) % args.checkpoint_every == 0
        if stop or due or (hp.save_checkpoint and step + 1 == hp.num_iterations):
            book.stop_clock()
            save_checkpoint(folder, step + 1, book, model, optimizers, first_bad_step)
            book.start_clock()
        if stop:
            os._exit(128 + stop)  # all ranks stop here
    book.result()
    if world.rank == 0 and (hp.save_checkpoint or args.checkpoint_every):
        save_model(folder / "model.safetensors", model, hp)
    if stop:  # a signal came in the last validation or shortly before
        os._exit(128 + stop)
    return book.validations[-1]


def check_inputs(args, hp):
    """Raises InputError for invalid settings or inputs, before anything slow begins."""
    if args.device == "cuda":
        check_gpus()
    check_hyperparameters(hp, env_int("WORLD_SIZE", 1), args.device)
    every = args.checkpoint_every
    require(every % 2 == 0, f"--checkpoint_every {every}: must be even, as Adam needs two steps")
    if env_int("LOCAL_RANK", 0) != 0:
        return  # one process per machine reads the files
    check_training_shards(hp)
    val_steps = hp.val_tokens // hp.val_seq_len
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
    handle_signals()  # for a script that imports this file
    model = build_model(hp, world)
    optimizers = build_optimizers(model, hp)
    compiled, compiler_line = compile_model(model, hp, world)
    parts = (model, compiled, compiler_line, optimizers)
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
        message = f"{name}: out of GPU memory; use a smaller --val_seq_len, or use a larger GPU"
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
