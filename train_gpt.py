"""
Trains a GPT to a target validation loss in as little time as possible. Everything is in this file.

    ./run.sh                                               installs packages, makes the data, trains
    python train_gpt.py --track mini                       one process, on a CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  the official run: FineWeb to 3.28 on 8 H100s
    python train_gpt.py --help                             every hyperparameter and its default

The recipe is record 23 of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt, May 2025),
a series of ever faster runs. Numbers with a # are its records. What the recipe changes in GPT-2:
- #3, #4, #6   Muon trains the weight matrices of the blocks (@kellerjordan0, @jxbz, @bozavlado)
- #5           ReLU squared, QK norm, projections that start at zero (@Grad62304977, @kellerjordan0)
- #8, #9, #18  untied head, soft-capped logits (@Grad62304977, @kellerjordan0, @KoszarskyB)
- #9, #11      each block mixes in the token embedding; U-net skips (@Grad62304977, @brendanh0gan)
- #12, #13     attention within documents, in a window that grows (@KoszarskyB, @fernbear.bsky.social)
- #14 to #17   value embeddings, sliding windows, RoPE on half of the channels, a layer without
               attention (@KoszarskyB, @leloykun, @YouJiacheng)
- #19, #20     FP8 head; Q, K and V in one matrix; long and short windows (@YouJiacheng, @leloykun)
- #22, #23     gradients are summed in buckets (@KonstantinWilleke and others, @ryanyang0)
The track mini adds four later ideas: NorMuon, XSA, smear, a leaky ReLU (section 5).

The batch doesn't depend on the number of processes: but for rounding, one GPU and eight GPUs train
the same model. Shapes in comments: B sequences, S tokens per sequence, T = B * S tokens, N = T / 128
blocks of the mask, H heads, D channels per head, C = model_dim, V = padded vocabulary size.
"""
# -----------------------------------------------------------------------------
# 1. Preamble

from pathlib import Path

SOURCE = Path(__file__).read_bytes().decode()  # for the log; read now, before an edit can change it

import signal

if __name__ == "__main__":
    # With Python's handler, Ctrl-C wouldn't end a process that waits for others
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import collections
import fcntl
import glob
import io
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import uuid
import zipfile
import zlib
from dataclasses import asdict, dataclass, make_dataclass, replace

# PyTorch and OpenMP read these variables when torch is imported
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# Waiting OpenMP threads sleep, not spin: much faster when another process keeps the cores busy
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if platform.machine() == "x86_64":
    # GCC 11 to 13 miscompile PyTorch's bf16 transposes on CPUs that they don't know (similar to
    # https://gcc.gnu.org/PR113255). -mtune with a known CPU avoids this; PyTorch puts "-march=" before.
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# torchrun sets these variables
RANK = int(os.getenv("RANK") or 0)
LOCAL_RANK = int(os.getenv("LOCAL_RANK") or 0)  # among the processes of this machine
WORLD_SIZE = int(os.getenv("WORLD_SIZE") or 1)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if ON_GPU else "cpu")
BLOCK_SIZE = 128  # tokens per block of the attention mask; divides sequence lengths

CPUINFO = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
CPU_MODEL = next(iter(re.findall(r"model name\s*: (.*)", CPUINFO)), platform.machine())
CPU_FLAGS = set(re.findall(r"\b(?:avx|amx|fma|asimd|sve|bf16|i8mm)\w*", CPUINFO))
# The dtype of activations: bf16 where there are bf16 matmuls (#10, @kellerjordan0)
DTYPE = torch.bfloat16 if ON_GPU or CPU_FLAGS & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32


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

W_SCALE = 24 / 448  # the scales are modded-nanogpt's; weights stay below 24
# If the gradient of the loss is 1, those of the logits are below 1: divided by this, below 448
GRAD_SCALE = 1 / 448


def x_scale(model_dim):
    """The scale of RMS-normed inputs (T, model_dim). Their elements are at most sqrt(model_dim)."""
    return model_dim**0.5 / 448


def as_scale(value, like):
    """torch._scaled_mm takes scales as float32 tensors on the device."""
    return torch.full((), value, device=like.device)


def softcap(logits, model_dim):
    """Returns 15 tanh(z / 15) + 15 for z = logits / sqrt(model_dim): z soft-capped at 15 (Gemma 2,
    https://arxiv.org/abs/2408.00118; #18, @KoszarskyB). Adding 15 doesn't change the softmax."""
    # 15 tanh(u) + 15 = 30 sigmoid(2 u)
    return 30 * torch.sigmoid(logits.float() / (7.5 * model_dim**0.5))


@torch.library.custom_op("nanogpt::head_loss", mutates_args=())
@torch.compile(dynamic=False)  # compiling the model doesn't compile the body of a custom op
def head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes the cross-entropy of softcap(x @ w.T) in nats, summed over tokens. x (T, C) is
    RMS-normed; w is (V, C), targets (T,). Returns the loss in float32, and for the backward pass
    the logits (T, V) in bf16, their logsumexp (T,) and both FP8 operands. Head and loss are one op,
    so that the gradient of the logits is never stored in bf16."""
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
    lse = softcap(logits, w.size(1)).exp().sum(-1).log()
    target_logits = softcap(logits.gather(1, targets[:, None]), w.size(1))[:, 0]
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
    x_s = x_scale(model_dim)
    grad_scale = GRAD_SCALE * grad  # multiplies by the gradient of the loss without another pass
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
        scale_b=as_scale(x_s, grad),
        out_dtype=torch.float32,
    )
    return grad_x, grad_w


@head_loss_backward_op.register_fake
def _(grad, logits, lse, x_f8, w_f8, targets):
    return x_f8.bfloat16(), w_f8.float()


def save_for_backward(ctx, inputs, output):
    x, w, targets = inputs
    loss, logits, lse, x_f8, w_f8 = output
    ctx.save_for_backward(logits, lse, x_f8, w_f8, targets)
    ctx.set_materialize_grads(False)  # creates no zero gradients for the other outputs


def head_loss_gradients(ctx, grad, *unused):
    return *head_loss_backward_op(grad, *ctx.saved_tensors), None


head_loss_op.register_autograd(head_loss_gradients, setup_context=save_for_backward)


def uses_fp8(hp):
    """FP8 needs compute capability 8.9. AMD GPUs (torch.version.hip) may have another format."""
    can = ON_GPU and not torch.version.hip and torch.cuda.get_device_capability(DEVICE) >= (8, 9)
    return hp.fp8 and can


# -----------------------------------------------------------------------------
# 3. Muon (Keller Jordan et al., https://kellerjordan.github.io/posts/muon; #3, #4, #6, #20)


def zeropower_via_newtonschulz5(G, steps=5):
    """Orthogonalizes each matrix of G (..., m, n), m <= n: U S V^T becomes about U V^T, in DTYPE.
    Each step turns a singular value s into a s + b s^3 + c s^5.
    The coefficients of the quintic Newton-Schulz iteration maximize its slope at zero. It doesn't
    converge: singular values end between about 0.5 and 1.5, which doesn't hurt the optimizer."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(DTYPE)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # the spectral norm is now at most 1
    X = X.reshape(-1, *G.shape[-2:])  # baddbmm needs exactly one batch dimension
    for _ in range(steps):
        A = X @ X.mT
        # baddbmm multiplies and adds in one kernel
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.view(G.shape)


def wide(matrices):
    """Transposes tall matrices (..., m, n), as a view: X X^T is smaller than X^T X if m <= n."""
    return matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices


# its name since PyTorch 2.13, and before
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_gather(share):
    """Starts to collect the equal shares (n, ...) of all ranks. Returns a function that waits for
    the result (WORLD_SIZE * n, ...) and returns it."""
    if WORLD_SIZE == 1:
        return lambda: share
    whole = share.new_empty(WORLD_SIZE * len(share), *share.shape[1:])
    handle = all_gather_single(whole, share, async_op=True)

    def wait():
        handle.wait()
        return whole

    return wait


def rank_share(items):
    """Returns this rank's share of a list, or of a tensor's first dimension. all_gather needs shares of
    equal length, so the last item may come twice (5 items, 2 ranks: 0 1 2, 3 4 4)."""
    size = math.ceil(len(items) / WORLD_SIZE)
    mine = range(RANK * size, (RANK + 1) * size)
    return [items[min(i, len(items) - 1)] for i in mine]


class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-Schulz. Each matrix of a parameter (..., rows, cols) is
    orthogonalized separately; updates are rounded to bf16. Each rank owns a share of the parameters:
    it keeps their momentum and computes their updates. The all-gather of one group's updates
    overlaps with computing the next group's. With beta2 > 0 this is NorMuon (section 5)."""

    def __init__(self, params, **defaults):  # lr, momentum, ns_steps, beta2
        groups = collections.defaultdict(list)
        for p in params:  # a shape and its transpose share a group: one batched matmul
            groups[wide(p).shape].append(p)
        super().__init__([dict(params=group) for group in groups.values()], defaults)

    def updates(self, group):
        """Returns the updates of this rank's share, bf16 (share, ..., rows, cols), rows <= cols."""
        gradients = torch.stack([wide(p.grad) for p in rank_share(group["params"])])
        state = self.state[group["params"][0]]  # the state of the whole group
        if not state:
            state["average"] = torch.zeros_like(gradients)
        average = state["average"]  # the exponential moving average of the gradients
        average.lerp_(gradients, 1 - group["momentum"])
        nesterov = gradients.lerp(average, group["momentum"])
        updates = zeropower_via_newtonschulz5(nesterov, group["ns_steps"])
        if group["beta2"]:
            updates = normalize_channels(updates, state, group["beta2"])
        return updates.bfloat16()

    @torch.no_grad()
    def step(self):
        gathers = [all_gather(self.updates(group)) for group in self.param_groups]
        for group, wait in zip(self.param_groups, gathers):
            for p, update in zip(group["params"], wait()):  # zip ignores repeats at the end
                # a tall matrix gets a larger step: the RMS change of its output then doesn't depend
                # on its shape
                scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
                wide(p).add_(update, alpha=-group["lr"] * scale)

    def state_dict(self):
        """The state of all ranks, which doesn't depend on their number. Call it on all ranks."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            first, count = group["params"][0], len(group["params"])  # here, parameters are indices
            state = saved["state"].get(first, {})
            # all_gather starts, () waits, [:count] drops repeats at the end
            saved["state"][first] = {name: all_gather(share)()[:count] for name, share in state.items()}
        return saved

    def load_state_dict(self, saved):
        for state in saved["state"].values():
            for name, whole in state.items():
                state[name] = torch.stack(rank_share(whole))
        super().load_state_dict(saved)


# -----------------------------------------------------------------------------
# 4. Model


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
    """Half-truncated rotary embeddings (RoPE: https://arxiv.org/abs/2104.09864). Only half of the
    D/2 channel pairs rotate (#17, @YouJiacheng)."""

    def __init__(self, head_dim, max_seq_len):
        super().__init__()
        rotating = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
        freqs = F.pad(rotating, (0, head_dim // 4))  # (D/2,), zeros in the second half
        theta = torch.outer(torch.arange(max_seq_len), freqs)  # (max_seq_len, D/2)
        self.register_buffer("rotations", torch.stack([theta.cos(), theta.sin()]), persistent=False)

    def forward(self, x):  # (B, S, H, D)
        cos, sin = self.rotations[:, : x.size(1), None]  # each (S, 1, D/2)
        x1, x2 = x.float().chunk(2, -1)
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
        return torch.cat([y1, y2], -1).type_as(x)


# The mask (#12, @KoszarskyB; #13, @fernbear.bsky.social; #16, @YouJiacheng). A query attends to a key if
# - the key is not later than the query,
# - both are in the same document, and
# - the key's block is one of the last window_blocks blocks, including the query's own.
# On GPUs, FlexAttention takes it as a BlockMask. Section 6 has the version for CPUs.


def document_ids(input_seq, eot_token):
    """Returns the number of each token's document, int32 (T,), starting at 1, for input_seq (B, S).
    A document starts at each end-of-text token and at the start of each sequence."""
    begins = input_seq == eot_token
    begins[:, 0] = True
    return begins.flatten().cumsum(0, dtype=torch.int32)


def block_lists(visible):
    """Converts a matrix of blocks, bool (N, N), to FlexAttention's lists: for each row the number
    of True entries, int32 (1, 1, N), and their columns in ascending order, int32 (1, 1, N, N)."""
    n = len(visible)
    counts = visible.sum(-1, dtype=torch.int32)
    # Row True False True has count 2 and columns 0 2 0. Its True entries go to places 0 and 1 of the
    # list, the False one to place n = 3, which is cut off. (Sorting does the same, but compiles for minutes.)
    places = torch.where(visible, visible.cumsum(-1) - 1, n)
    columns = torch.arange(n, dtype=torch.int32, device=visible.device).expand(n, n)
    lists = visible.new_zeros(n, n + 1, dtype=torch.int32).scatter(-1, places, columns)
    lists = lists[:, :n].contiguous()  # FlexAttention's kernels read rows as contiguous memory
    return counts[None, None], lists[None, None]


def flex_block_mask(docs, window_blocks):
    """Makes the BlockMask of docs (T,). window_blocks () is a tensor, so that a growing window
    doesn't recompile. FlexAttention calls document_causal only in partly visible blocks."""

    def document_causal(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (docs[q_idx] == docs[kv_idx])

    first_doc = docs[::BLOCK_SIZE]  # of each block: (N,)
    last_doc = docs[BLOCK_SIZE - 1 :: BLOCK_SIZE]
    block = torch.arange(len(first_doc), dtype=torch.int32, device=docs.device)
    # Matrices (N, N): rows are query blocks, columns key blocks. Documents are numbered in order, so
    # of an earlier key block only the last document matters, of the query block the first. Two blocks
    # are one document if the first key and the last query are in the same.
    distance = block[:, None] - block
    share_a_document = first_doc[:, None] <= last_doc
    are_one_document = last_doc[:, None] == first_doc
    in_window = distance < window_blocks
    visible = in_window & (distance >= 0) & share_a_document
    # not made from `visible`, because PyTorch 2.11 can't compile that
    full = in_window & (distance > 0) & are_one_document
    partial = visible & ~full
    return BlockMask(
        (len(docs), len(docs)),
        *block_lists(partial),  # kv_num_blocks, kv_indices: key blocks of each query block (forward)
        *block_lists(full),  # full_kv_num_blocks, full_kv_indices
        *block_lists(partial.T),  # q_num_blocks, q_indices: query blocks of each key block (backward)
        *block_lists(full.T),  # full_q_num_blocks, full_q_indices
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=document_causal,
    )


def make_mask(docs, window_blocks, span):
    """Makes the mask of docs (T,) for attention. Only on a CPU, the window is at most span blocks."""
    if docs.is_cuda:
        return flex_block_mask(docs, window_blocks)
    # the second argument is the window's first key, counted from the start of the query's block
    return portable_mask(docs, (1 - window_blocks) * BLOCK_SIZE, span)


def attention(q, k, v, mask, scale=0.12):
    """q, k, v (B, S, H, D) -> (B, S, H, D). The sequences are concatenated to T tokens: in the
    mask, each begins a document. With QK norm, the scale is free: 0.12 was tuned (#20)."""
    if not isinstance(mask, BlockMask):
        return portable_attention(q, k, v, mask, scale)
    queries, keys, values = (t.flatten(0, 1).transpose(0, 1)[None] for t in (q, k, v))  # (1, H, T, D)
    y = flex_attention(queries, keys, values, block_mask=mask, scale=scale)
    return y[0].transpose(0, 1).reshape(q.shape)


class CausalSelfAttention(nn.Module):
    def __init__(self, hp, rotary):
        super().__init__()
        self.heads = (hp.num_heads, hp.head_dim)
        self.rotary = rotary
        hdim = hp.num_heads * hp.head_dim
        self.qkv_w = nn.Parameter(torch.empty(3, hdim, hp.model_dim))  # Q, K and V in one matmul
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))  # weights of V and of the value embedding
        self.c_proj = CastedLinear(hdim, hp.model_dim)  # starts at zero
        self.xsa_weights = nn.Parameter(torch.zeros(hp.num_heads)) if hp.xsa else None

    def forward(self, x, ve, mask):  # x, normed (B, S, C), ve (B, S, H * D) or None -> (B, S, C)
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.unflatten(-1, (3, *self.heads)).unbind(2)  # each (B, S, H, D)
        q = self.rotary(norm(q))  # QK norm (#5)
        k = self.rotary(norm(k))
        v = self.lambdas[0] * v
        if ve is not None:
            v = v + self.lambdas[1] * ve.view_as(v)
        y = attention(q, k, v, mask)
        if self.xsa_weights is not None:
            y = exclusive_self_attention(y, v, self.xsa_weights)
        return self.c_proj(y.flatten(2))


class MLP(nn.Module):
    def __init__(self, hp):
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
    def __init__(self, hp, layer, rotary):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # weights of x and of x0
        self.attn = None if layer in hp.attn_free_layers else CausalSelfAttention(hp, rotary)
        self.mlp = MLP(hp)

    def forward(self, x, x0, ve, mask):  # x and x0, the token embeddings: (B, S, C) -> (B, S, C)
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), ve, mask)
        return x + self.mlp(norm(x))


def pad_vocab(vocab_size):
    """Rounds up to a multiple of 64, for faster matmuls (#5)."""
    return math.ceil(vocab_size / 64) * 64


class GPT(nn.Module):
    """GPT(hp)(input_seq (B, S) int32, target_seq (B, S) int64, window_blocks () int32) is the
    cross-entropy in nats, summed over tokens in training, averaged in evaluation. S is a multiple of
    128. Embeddings, and so activations, have dtype DTYPE; all other parameters are float32."""

    val_slice = 32768  # tokens whose logits validation computes at a time, to save memory

    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        hdim = hp.num_heads * hp.head_dim
        # create modules in the order of the forward pass: GradientBuckets assumes it
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim, dtype=DTYPE)
        # Value embeddings: tables that are added to V in attention, a second embedding of each token
        # (https://arxiv.org/abs/2410.17897; #14, @KoszarskyB; #17, @YouJiacheng)
        tables = [nn.Embedding(hp.vocab_size, hdim, dtype=DTYPE) for _ in range(hp.num_value_embeds)]
        self.value_embeds = nn.ModuleList(tables)
        if hp.smear:
            self.smear_gate = nn.Parameter(torch.zeros(min(12, hp.model_dim)))
            self.smear_scale = nn.Parameter(torch.zeros(1))
        rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len))
        self.blocks = nn.ModuleList(Block(hp, i, rotary) for i in range(hp.num_layers))
        if hp.num_layers > 1:
            self.skip_weights = nn.Parameter(torch.ones(hp.num_layers // 2))
        self.lm_head = CastedLinear(hp.model_dim, pad_vocab(hp.vocab_size))  # starts at zero
        self.init_weights(hp.seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """Sets the initial values of all parameters with 2 or more dimensions, by their names. Each has
        its own random generator, seeded with the seed and the name, so that adding a parameter
        doesn't change the others."""
        for name, p in self.named_parameters():
            rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if "embed" in name:
                p.copy_(torch.randn(p.shape, generator=rng))  # normal_ is coarse in bf16
            elif name.endswith(("c_proj.weight", "lm_head.weight")):
                p.zero_()
            elif p.ndim >= 2:
                std = 0.5 * p.size(-1) ** -0.5  # p is (..., out, in)
                bound = 3**0.5 * std  # uniform(-bound, bound) has this std
                p.uniform_(-bound, bound, generator=rng)

    def masks(self, docs, window_blocks):
        """Returns each layer's mask: the long window or half of it (#20, @leloykun and others)."""
        span = math.ceil(self.hp.max_window / BLOCK_SIZE)  # the longest window in blocks
        long = make_mask(docs, window_blocks, span)
        short = make_mask(docs, (window_blocks // 2).clamp_min(1), max(1, span // 2))
        return [long if i in self.hp.long_window_layers else short for i in range(self.hp.num_layers)]

    def forward(self, input_seq, target_seq, window_blocks):
        n = len(self.blocks)
        docs = document_ids(input_seq, self.hp.eot_token)  # (T,)
        masks = self.masks(docs, window_blocks)
        # of 3 tables in 12 layers, layers 0 and 9 use the first, 1 and 10, 2 and 11 the others
        ve = [table(input_seq) for table in self.value_embeds]  # each (B, S, H * D)
        ve = ve + [None] * (n - 2 * len(ve)) + ve
        x = self.embed(input_seq)  # (B, S, C)
        if self.hp.smear:
            x = smear(x, self.smear_gate, self.smear_scale)
        x = x0 = norm(x)
        skips = []  # U-net (#11): of 12 layers, 6 adds the output of 5, 7 that of 4, ..., 11 that of 0
        for i, (block, block_ve, mask) in enumerate(zip(self.blocks, ve, masks, strict=True)):
            if i >= n - n // 2:  # i - n is negative: the last layer has the last weight
                x = x + self.skip_weights[i - n] * skips.pop()
            x = block(x, x0, block_ve, mask)
            if i < n // 2:
                skips.append(x)
        x = norm(x).flatten(0, 1)  # (T, C)
        targets = target_seq.flatten()
        if self.training:
            return self.loss(x, targets)
        slices = zip(x.split(self.val_slice), targets.split(self.val_slice))
        return sum(self.loss(*part) for part in slices) / len(targets)

    def loss(self, x, targets):
        """x (T, C), targets (T,) -> the cross-entropy in nats, summed over tokens."""
        if self.training and uses_fp8(self.hp):
            return head_loss_op(x, self.lm_head.weight, targets)[0]
        logits = softcap(self.lm_head(x), self.hp.model_dim)
        return F.cross_entropy(logits, targets, reduction="sum")


# -----------------------------------------------------------------------------
# 5. Later ideas, which the track mini uses


def normalize_channels(updates, state, beta2):
    """NorMuon (https://arxiv.org/abs/2510.05491; #41, @li_zichong): divides each channel of Muon's
    updates (n, ..., rows, cols), rows <= cols, by its running RMS, and keeps the norm of each matrix.
    A channel is a column: of c_fc and c_proj, one of the 4 C hidden ones. In a square matrix (Q, K, V,
    the output of attention) it is a row."""
    square = updates.size(-2) == updates.size(-1)
    updates = updates.float()
    mean_squares = updates.square().mean(-1 if square else -2, keepdim=True)
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
    # scale has a dimension, so the product is float32
    return x + (scale * opening).type_as(x).unsqueeze(-1) * previous


# -----------------------------------------------------------------------------
# 6. Attention on CPUs, where FlexAttention has no backward pass


def split_blocks(t):
    """(B, S, H, D) -> (N, H, 128, D)"""
    return t.reshape(-1, BLOCK_SIZE, *t.shape[2:]).transpose(1, 2)


def with_previous_blocks(t, span):
    """(B, S, H, D) -> (N, H, span * 128, D): each block, preceded by span - 1 earlier blocks."""
    blocks = split_blocks(t)
    padded = F.pad(blocks, (0,) * 6 + (span - 1, 0))  # blocks of zeros in front
    shifted = [padded[i : i + len(blocks)] for i in range(span)]
    return torch.cat(shifted, 2)


def portable_mask(docs, first_key, span):
    """Makes the mask of docs (T,) for portable_attention: bool (N, 1, 128, span * 128), True where
    visible. The last dimension covers the keys of the query's own block and of the span - 1 blocks
    before it. The window begins at first_key, a tensor that counts from the start of the query's
    block. span is constant, so that a growing window doesn't recompile."""
    docs = docs.view(1, -1, 1, 1)  # (B, S, H, D) with B = H = D = 1
    key_docs = with_previous_blocks(docs, span).mT  # (N, 1, 1, span * 128); 0 before the first token
    # positions, counted from the start of the query's block
    query = torch.arange(BLOCK_SIZE, device=docs.device)[:, None]
    key = torch.arange((1 - span) * BLOCK_SIZE, BLOCK_SIZE, device=docs.device)
    return (split_blocks(docs) == key_docs) & (first_key <= key) & (key <= query)


def portable_attention(q, k, v, mask, scale):
    """Attention block by block, in O(T * span). Compiled, it is much faster on a CPU than
    scaled_dot_product_attention with a mask. q, k, v (B, S, H, D) -> (B, S, H, D)."""
    span = mask.size(-1) // BLOCK_SIZE
    bias = torch.where(mask, 0.0, -math.inf).type_as(q)
    # no need to subtract the maximum: with QK norm, scores are at most scale * D, about 15
    scores = split_blocks(q * scale) @ with_previous_blocks(k, span).mT  # (N, H, 128, span * 128)
    weights = (scores + bias).exp()
    y = weights @ with_previous_blocks(v, span)  # (N, H, 128, D)
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
    expected = [20240520, 1, (os.path.getsize(file) - 1024) / 2]
    require(
        header == expected,
        f"{file} is cut off, or no shard of uint16 tokens: its magic, version and number of tokens are "
        f"{header}, not {expected}; copy it again, or make shards with the scripts in data/",
    )
    return header[2]


def read_tokens(file, start, count, vocab_size):
    """Reads tokens (count,) int32."""
    tokens = np.fromfile(file, "<u2", count, offset=1024 + 2 * start)
    last = tokens.max(initial=0)  # a shard may be empty
    require(last < vocab_size, f"{file} has token {last}, outside the vocabulary of {vocab_size}")
    return torch.from_numpy(tokens.astype(np.int32))


def distributed_data_generator(pattern, batch_size, vocab_size, rank=0, world_size=1):
    """Yields this rank's tokens of each batch, int32 (batch_size / world_size + 1,), because
    targets are shifted by one. Trailing tokens of a shard that don't fill a batch are dropped."""
    local = batch_size // world_size
    for file in find_shards(pattern):
        for start in range(0, shard_length(file) - batch_size, batch_size):
            yield read_tokens(file, start + rank * local, local + 1, vocab_size)


def check_shards(pattern, batch_size, steps, vocab_size):
    """Reads what the run will read: better an error now than hours later. Returns a checksum."""
    batches = distributed_data_generator(pattern, batch_size, vocab_size)
    count = checksum = 0
    for tokens in itertools.islice(batches, steps):
        count += 1
        checksum = zlib.crc32(tokens.numpy(), checksum)
    require(
        count == steps,
        f"{pattern} has {count} batches of {batch_size} tokens, and the run needs {steps}; "
        "add shards, or lower --num_iterations or --val_tokens",
    )
    return checksum


# -----------------------------------------------------------------------------
# 8. Hyperparameters. `--name value` changes any of them.

# name=(default of the track fineweb, default of the track mini, text for --help). mini is a small
# version for two CPU cores, trained on Shakespeare as bytes.
SETTINGS = dict(
    track=("fineweb", "mini", "set of defaults: fineweb or mini"),
    # data
    train_files=(
        "data/fineweb10B/fineweb_train_*.bin",
        "data/shakespeare/shakespeare_train_*.bin",
        "training shards, read in the order of their names",
    ),
    val_files=(
        "data/fineweb10B/fineweb_val_*.bin",
        "data/shakespeare/shakespeare_val_*.bin",
        "validation shards",
    ),
    val_tokens=(10_485_760, 389_120, "validation tokens; fixed, to compare losses"),
    batch_tokens=(8 * 48 * 1024, 4096, "tokens per step, summed over all processes"),
    train_seq_len=(48 * 1024, 1024, "tokens per training sequence"),
    val_seq_len=(4 * 64 * 1024, 12_160, "tokens per validation sequence"),
    sequences_per_pass=(1, 4, "sequences in a micro-batch; fewer if it doesn't divide them"),
    vocab_size=(50257, 257, "number of token ids"),
    eot_token=(50256, 256, "token id that begins a document"),
    # model
    num_layers=(12, 4, "number of blocks"),
    num_heads=(6, 2, "attention heads per block"),
    head_dim=(128, 64, "channels per head, a multiple of 4"),
    model_dim=(768, 128, "channels of the residual stream"),
    num_value_embeds=(3, 1, "N tables of value embeddings: first and last N layers"),
    # as in modded-nanogpt, layer 7 is in both lists; without attention, its window has no effect
    attn_free_layers=((7,), (), "layers without attention, such as 0,7 or none"),
    long_window_layers=((0, 4, 7, 11), (0, 3), "layers with the full window"),
    max_window=(1728, 256, "attention window at the end of training, in tokens"),
    xsa=(False, True, "true to subtract a part of the token's own value (section 5)"),
    smear=(False, True, "true to add a part of the previous token's embedding"),
    relu_slope=(0.0, 0.5, "slope of the MLP's ReLU below zero, before squaring"),
    fp8=(True, True, "true to compute the head in FP8 in training, on GPUs that can"),
    # optimization
    num_iterations=(1770, 325, "training steps"),
    cooldown_frac=(0.4, 1.0, "learning rates decay in this last fraction of steps"),
    final_lr_frac=(0.1, 0.0, "final learning rate, relative to the initial one"),
    head_lr=(0.22, 0.1, "Adam's learning rate for the head"),
    embed_lr=(0.6, 0.2, "Adam's learning rate for token and value embeddings"),
    scalar_lr=(0.04, 0.04, "Adam's learning rate for scalars and vectors"),
    adam_beta1=(0.8, 0.8, "decay of Adam's first moment"),
    adam_beta2=(0.95, 0.98, "decay of Adam's second moment"),
    adam_eps=(1e-10, 1e-10, "Adam's epsilon; 1e-8 is too large for rare tokens"),
    muon_lr=(0.05, 0.05, "Muon's learning rate, for the matrices of the blocks"),
    ns_steps=(5, 5, "Newton-Schulz iterations"),
    muon_momentum=(0.95, 0.86, "Muon's momentum after its warm-up"),
    muon_momentum_start=(0.85, 0.85, "Muon's momentum at the start"),
    muon_momentum_warmup=(300, 100, "steps in which Muon's momentum rises"),
    muon_beta2=(0.0, 0.95, "decay of NorMuon's mean squares; 0 for plain Muon"),
    # the run
    seed=(0, 0, "seed of the initial weights"),
    warmup_steps=(10, 3, "untimed steps on random tokens; the weights are then reset"),
    val_loss_every=(125, 35, "steps between validations; 0: only at the end"),
    target_val_loss=(3.28, 1.50, "validation loss to reach"),
)


def make_tracks(settings):
    """Returns the hyperparameters of each track: the columns of the table, by their names in its
    first row."""
    Hyperparameters = make_dataclass("Hyperparameters", settings)
    *columns, texts = zip(*settings.values(), strict=True)
    return {values[0]: Hyperparameters(*values) for values in columns}


TRACKS = make_tracks(SETTINGS)


def check_hyperparameters(hp, world_size):
    """Refuses sizes that don't divide each other, and what would divide by zero."""
    for tokens, seq_len in [("batch_tokens", "train_seq_len"), ("val_tokens", "val_seq_len")]:
        total, length = getattr(hp, tokens), getattr(hp, seq_len)
        require(
            length > 0
            and length % BLOCK_SIZE == 0
            and total > 0
            and total % (world_size * length) == 0,
            f"--{tokens} {total}: must be a multiple of {world_size} (processes) times "
            f"--{seq_len} {length}, and that one of {BLOCK_SIZE}",
        )
    require(
        hp.num_iterations > 0 and hp.adam_eps > 0, "--num_iterations and --adam_eps must be more than 0"
    )


def parse_bool(text):  # bool("false") is True; argparse reports the ValueError of index
    return ["false", "true"].index(text) == 1


def parse_layers(text):
    return tuple(int(layer) for layer in text.split(",") if text != "none")


def parse_arguments(argv, settings=SETTINGS, tracks=TRACKS):
    """Returns the options of the run, and the hyperparameters: the track's defaults with the
    changes from the command line, which are also in args.given. Raises InputError."""
    parser = argparse.ArgumentParser(usage="%(prog)s [--NAME VALUE ...]", allow_abbrev=False)

    def fail(message):
        raise InputError(
            f"{message}; --help lists all options; a bool is true or false, and a pattern with * needs quotes"
        )

    parser.error = fail
    parser.register("type", bool, parse_bool)
    parser.register("type", tuple, parse_layers)
    add = parser.add_argument
    add("--log_dir", default="logs", help="folder for logs and checkpoints; default: logs")
    add("--num_runs", default=1, type=int, help="runs, with seeds from --seed on; default: 1")
    add("--save_checkpoint", action="store_true", help="save LOG_DIR/RUN.pt at each validation")
    add("--resume", help="a checkpoint, or latest: that of the newest unfinished run")
    for name, (*defaults, text) in settings.items():
        add(
            f"--{name}",
            default=argparse.SUPPRESS,
            type=type(defaults[0]),
            help=f"{text} {dict(zip(tracks, defaults))}",
        )
    # as the shell does, except after =
    args = parser.parse_args([word.replace("=~/", f"={os.path.expanduser('~')}/") for word in argv])
    require(
        args.num_runs == 1 if args.resume else args.num_runs > 0,
        f"--num_runs {args.num_runs}: must be at least 1, and 1 with --resume",
    )
    args.given = {name: value for name, value in vars(args).items() if name in settings}
    track = args.given.get("track", "fineweb" if ON_GPU else "mini")
    require(track in tracks, f"--track {track}: must be one of {', '.join(tracks)}")
    return args, replace(tracks[track], **args.given)


# -----------------------------------------------------------------------------
# 9. Optimizers and schedules


def build_model(hp):
    torch.manual_seed(hp.seed)  # in case you add a random vector: init_weights only sets matrices
    return GPT(hp).to(DEVICE)  # the same on all ranks


def build_optimizers(model, hp):
    """Muon trains the matrices of the blocks; Adam the head, the embeddings, and the scalars. A new
    parameter goes to Adam as an embedding if its name has "embed" in it, as a scalar if it is a
    vector, and otherwise to Muon. For a small matrix, such as a gate, add its name here and in
    init_weights, or make it a vector."""
    head, embeds, scalars, matrices = [], [], [], []
    for name, p in model.named_parameters():
        if name == "lm_head.weight":
            head.append(p)
        elif "embed" in name:
            embeds.append(p)
        elif p.ndim < 2:
            scalars.append(p)
        else:
            matrices.append(p)
    groups = [
        dict(params=head, lr=hp.head_lr),
        dict(params=embeds, lr=hp.embed_lr),
        dict(params=scalars, lr=hp.scalar_lr),
    ]
    adam = torch.optim.Adam(groups, betas=(hp.adam_beta1, hp.adam_beta2), eps=hp.adam_eps, fused=True)
    muon = Muon(
        matrices, lr=hp.muon_lr, momentum=hp.muon_momentum, ns_steps=hp.ns_steps, beta2=hp.muon_beta2
    )
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
    """Returns the long window in blocks, () int32. It grows linearly to max_window."""
    blocks = max(1, math.ceil(hp.max_window * (step / hp.num_iterations) / BLOCK_SIZE))
    return torch.full((), blocks, dtype=torch.int32, device=DEVICE)


def set_schedules(optimizers, step, hp):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr(step, hp)
            if "momentum" in group:
                group["momentum"] = get_muon_momentum(step, hp)


# -----------------------------------------------------------------------------
# 10. Gradient buckets (#22, @KonstantinWilleke and others; #23, @ryanyang0)


class GradientBuckets:
    """Sums gradients over the processes, in buckets of one dtype and at most 25 MB; a larger gradient
    has its own. Backward produces gradients in the reverse order of the forward pass. In the last
    micro-step a bucket is all-reduced as soon as its gradients are there. This overlaps with the rest
    of backward only in an uncompiled model: a compiled one returns all gradients at once."""

    def __init__(self, params, bucket_bytes=25 * 2**20):
        self.last_micro_step = False  # train_step sets it
        self.bucket_of = {}  # parameter -> the list of parameters in its bucket
        self.ready = set()
        self.handles = []
        filling = {}  # dtype -> bucket
        for p in reversed(list(params)):
            bucket = filling.get(p.dtype)
            if bucket is None or sum(q.nbytes for q in bucket) + p.nbytes > bucket_bytes:
                bucket = filling[p.dtype] = []
            bucket.append(p)
            self.bucket_of[p] = bucket
            p.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, param):
        if not self.last_micro_step:
            return
        self.ready.add(param)
        bucket = self.bucket_of[param]
        if WORLD_SIZE > 1 and self.ready.issuperset(bucket):
            gradients = [p.grad.flatten() for p in bucket]
            flat = torch.cat(gradients) if len(bucket) > 1 else gradients[0]  # copies no large one
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = grad.view_as(p)  # views of flat, so the all-reduce updates them
            self.handles.append(dist.all_reduce(flat, async_op=True))

    def wait(self):
        assert len(self.ready) == len(self.bucket_of), "a parameter got no gradient"
        while self.handles:
            self.handles.pop().wait()
        self.ready.clear()


# -----------------------------------------------------------------------------
# 11. A step, and a validation


def to_batch(tokens, seq_len):
    """Copies tokens (n + 1,) to the device. Returns inputs int32 and targets int64: (n / S, S)."""
    if ON_GPU:
        tokens = tokens.pin_memory()  # the CPU doesn't wait for a copy from pinned memory
    tokens = tokens.to(DEVICE, non_blocking=True)
    return tokens[:-1].view(-1, seq_len), tokens[1:].long().view(-1, seq_len)


def train_step(model, optimizers, buckets, tokens, step, hp):
    """Trains on this rank's tokens (local + 1,). Returns their mean loss."""
    set_schedules(optimizers, step, hp)
    window = get_window_blocks(step, hp)
    inputs, targets = to_batch(tokens, hp.train_seq_len)
    micro_batch = math.gcd(hp.sequences_per_pass, len(inputs))  # all of a size: one compilation
    micro_steps = list(zip(inputs.split(micro_batch), targets.split(micro_batch)))
    num_sequences = hp.batch_tokens // hp.train_seq_len
    total = 0
    model.train()
    for i, micro_step in enumerate(micro_steps, start=1):
        buckets.last_micro_step = i == len(micro_steps)
        loss = model(*micro_step, window)
        # As in modded-nanogpt, the gradient is that of the summed loss divided by the number of
        # sequences. Muon ignores its scale, and so does Adam, up to adam_eps.
        (loss / num_sequences).backward()
        total += loss.detach()
    buckets.wait()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total / inputs.numel()


@torch.no_grad()
def evaluate(model, window, hp):
    """Returns the mean loss on the validation tokens. Each rank computes every WORLD_SIZE-th sequence."""
    sequences = distributed_data_generator(hp.val_files, hp.val_seq_len, hp.vocab_size)
    model.eval()
    mine = itertools.islice(sequences, RANK, hp.val_tokens // hp.val_seq_len, WORLD_SIZE)
    losses = [model(*to_batch(tokens, hp.val_seq_len), window) for tokens in mine]
    mean = torch.stack(losses).double().mean()
    if WORLD_SIZE > 1:
        dist.all_reduce(mean)
    return mean.item() / WORLD_SIZE


def warm_up(model, optimizers, buckets, hp):
    """Trains on random tokens: this compiles the kernels, connects the processes and allocates
    memory. Then sets the initial weights of the run's seed."""
    tokens = torch.randint(hp.vocab_size, (hp.batch_tokens // WORLD_SIZE + 1,), dtype=torch.int32)
    for _ in range(hp.warmup_steps):
        train_step(model, optimizers, buckets, tokens, hp.num_iterations, hp)  # the longest window
    model.load_state_dict(build_model(hp).state_dict())
    for optimizer in optimizers:
        optimizer.state.clear()


# -----------------------------------------------------------------------------
# 12. Processes, logs, checkpoints


def init_processes():
    """Joins torchrun's process group: NCCL on GPUs, gloo on CPUs, none for a single process."""
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    else:  # without this, threads sum gradients of embeddings in varying order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if ON_GPU else "gloo", device_id=DEVICE if ON_GPU else None)


def describe_machine():
    """Returns lines about the GPUs, or the CPU and its compiler, without host and user name."""
    if ON_GPU:
        # without the table of processes, which has paths in it
        return re.split(r"\n\s*\n", subprocess.getoutput("nvidia-smi"))[0]
    compiler = subprocess.getoutput("${CXX:-g++} --version | head -n 1")
    # run.sh sets both variables where compiled code is wrong
    reason = os.getenv("SPEEDRUN_COMPILE_REASON", "(TORCH_COMPILE_DISABLE is set)")
    compiled = f"no {reason}" if os.getenv("TORCH_COMPILE_DISABLE") == "1" else "yes"
    return (
        f"CPU: {CPU_MODEL}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process, "
        f"instruction sets: {' '.join(sorted(CPU_FLAGS))}\n"
        f"Compiler: {compiler}; flags: -march={os.getenv('TORCHINDUCTOR_CPP_MARCH', 'native')}; "
        f"model compiled: {compiled}"
    )


def log_header(source, hp):
    """Returns the start of a log: the source, versions, machine and settings."""
    line = "=" * 100
    return (
        f"{source}\n{line}\n"
        f"Running Python {sys.version}\n"
        f"Running PyTorch {torch.version.__version__} compiled for CUDA {torch.version.cuda}\n"
        f"{describe_machine()}\n"
        f"{WORLD_SIZE} process{'es' if WORLD_SIZE > 1 else ''} on {DEVICE.type}\n{line}\n"
        f"hyperparameters: {json.dumps(asdict(hp) | {'world_size': WORLD_SIZE})}\n"
    )


def clock():
    """Returns the time in ms, after the GPU has finished its work."""
    if ON_GPU:
        torch.cuda.synchronize()
    return 1000 * time.perf_counter()


@dataclass
class Run:
    """A run's log and state besides model and optimizers. A checkpoint holds these fields."""

    log: str  # its text so far
    data_checksums: list  # of the training and of the validation tokens
    step: int = 0
    train_ms: float = 0.0
    verdict: str = "not met"

    def open(self, path, hp):
        """Opens the log on rank 0, and locks it: a second process must not resume the same run."""
        self.path = path
        self.hp = hp
        if RANK > 0:
            return
        os.makedirs(path.parent, exist_ok=True)
        self.file = open(path, "a", buffering=1, encoding="utf-8")  # "w" would empty a locked log
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is writing {path}; wait until it ends")
        old = path.read_bytes()
        new = self.log.encode()
        require(
            old.startswith(new) or new.startswith(old),
            f"{path} is in the way: it isn't the log of this checkpoint; move it or rename it",
        )
        self.file.truncate(0)
        self.file.write(self.log)
        print(f"track {hp.track} on {DEVICE.type}; log: {path}", flush=True)

    def write(self, line, end="\n"):
        """With end="  \\r", the next line replaces this one on a terminal."""
        if RANK > 0:
            return
        self.log += line + "\n"
        self.file.write(line + "\n")
        print(line, end=end if sys.stdout.isatty() else "\n", flush=True)

    def write_step(self, val_loss="", end="\n"):
        self.write(
            f"step:{self.step}/{self.hp.num_iterations}{val_loss} train_time:{self.train_ms:.0f}ms "
            f"step_avg:{self.train_ms / max(self.step, 1):.2f}ms",
            end,
        )

    def write_validation(self, val_loss):
        if val_loss <= self.hp.target_val_loss and self.verdict == "not met":
            self.verdict = f"met at step {self.step} after {self.train_ms / 1000:.2f} s of training"
        self.write_step(f" val_loss:{val_loss:.4f}")

    def write_result(self, val_loss, tokens):
        if ON_GPU:
            self.write(
                f"peak memory allocated: {torch.cuda.max_memory_allocated() // 2**20} MiB "
                f"reserved: {torch.cuda.max_memory_reserved() // 2**20} MiB"
            )
        self.write(
            f"target {self.hp.target_val_loss}: {self.verdict}; val_loss {val_loss:.4f} "
            f"after {self.train_ms / 1000:.2f} s, {1000 * tokens / self.train_ms:,.0f} tokens/s"
        )


def save_checkpoint(run, model, optimizers):
    """Writes RUN.pt beside the log. Call it on all ranks. There is no random state to save."""
    checkpoint = dict(
        run=asdict(run),
        settings=asdict(run.hp),
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
    )
    if RANK > 0:
        return
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    temporary = run.path.with_suffix(".tmp")
    temporary.write_bytes(buffer.getbuffer())  # unlike torch.save, reports a full disk as an OSError
    temporary.rename(run.path.with_suffix(".pt"))  # a file with this name is complete


def is_finished(path):
    """True if the log beside this checkpoint has its final validation, step:N/N."""
    log = Path(path).with_suffix(".txt")
    return log.exists() and re.search(rb"^step:(\d+)/\1 val_loss", log.read_bytes(), re.MULTILINE)


def load_checkpoint(args, source):
    """Returns the checkpoint of --resume, or None if there is none. Raises InputError if it can't
    be resumed with this source and these options."""
    if args.resume == "latest":
        pattern = f"{glob.escape(args.log_dir or '.')}/*.pt"
        unfinished = [path for path in glob.glob(pattern) if not is_finished(path)]
        args.resume = max(unfinished, key=os.path.getmtime, default=None)
        if RANK == 0 and not args.resume:
            print(f"--resume: there is no unfinished run in {args.log_dir}, so a new one begins")
    path = args.resume
    if not path:
        return
    require(not is_finished(path), f"--resume: the run of {path} is finished")
    try:
        assert zipfile.ZipFile(path).testzip() is None  # torch.load doesn't check the CRCs
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        log, settings = checkpoint["run"]["log"], checkpoint["settings"]
    except Exception as e:  # corrupt files raise many exception types
        raise InputError(f"--resume: {path} is damaged or no checkpoint ({type(e).__name__})")
    require(log.startswith(source), f"--resume: {path} is from another source; use that one")
    for name, value in args.given.items() - settings.items():
        raise InputError(f"--resume: --{name} is {settings[name]} in {path}; leave it out")
    return checkpoint


def start_run(args, hp, source, data_checksums, checkpoint):
    """Returns a new run, or that of the checkpoint, with its log open."""
    run = Run(**checkpoint["run"]) if checkpoint else Run(log_header(source, hp), data_checksums)
    require(run.data_checksums == data_checksums, "--resume: the shards have changed; use the old ones")
    run.open(Path(args.resume or f"{args.log_dir or '.'}/{uuid.uuid4()}").with_suffix(".txt"), hp)
    return run


def load_states(checkpoint, run, model, optimizers):
    model.load_state_dict(checkpoint["model"])
    for optimizer, state in zip(optimizers, checkpoint["optimizers"]):
        optimizer.load_state_dict(state)
    run.write(f"{describe_machine()}\nresume: from step {run.step}, on {WORLD_SIZE} processes")


# -----------------------------------------------------------------------------
# 13. The timed loop


def train(run, hp, model, optimizers, buckets, save):
    """Trains until the last step. With `save`, each validation saves a checkpoint."""
    batches = distributed_data_generator(
        hp.train_files, hp.batch_tokens, hp.vocab_size, RANK, WORLD_SIZE
    )
    for _ in range(run.step):
        next(batches)  # the checkpoint was trained on these
    start_ms = clock() - run.train_ms  # when it would have started without a pause
    for step in range(run.step, hp.num_iterations + 1):
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            run.train_ms = clock() - start_ms
            val_loss = evaluate(model, get_window_blocks(step, hp), hp)
            require(
                math.isfinite(val_loss), f"step {step}: the loss is not finite; lower a learning rate"
            )
            if save:  # before the line in the log: a resumed run validates again, and writes it
                save_checkpoint(run, model, optimizers)
            run.write_validation(val_loss)
            start_ms = clock() - run.train_ms
        if last_step:
            break
        # --------------- training
        train_step(model, optimizers, buckets, next(batches), step, hp)
        run.step += 1
        run.train_ms = 1000 * time.perf_counter() - start_ms  # doesn't wait for the GPU
        run.write_step(end="  \r")
    run.write_result(val_loss, hp.batch_tokens * run.step)


def check_files(hp, eot_token):
    """Refuses shards of another tokenizer, and training shards that begin like a validation shard."""
    for files in itertools.product(find_shards(hp.train_files), find_shards(hp.val_files)):
        train, val = (read_tokens(file, 0, 65536, hp.vocab_size) for file in files)
        require(
            not train.equal(val),
            f"{files[0]} is also a validation shard, or a copy of one; change --train_files",
        )
        require(
            eot_token in val,
            f"{files[1]} begins without token {eot_token}; is it of another tokenizer?",
        )


def check_inputs(args, hp):
    """Checks settings and shards before anything slow begins. Returns checksums of the tokens."""
    check_hyperparameters(hp, WORLD_SIZE)
    checksums = [
        check_shards(hp.train_files, hp.batch_tokens, hp.num_iterations, hp.vocab_size),
        check_shards(hp.val_files, hp.val_seq_len, hp.val_tokens // hp.val_seq_len, hp.vocab_size),
    ]
    check_files(hp, hp.eot_token)
    return checksums


def train_runs(argv):
    """Trains --num_runs times. Only the first run compiles."""
    args, hp = parse_arguments(argv)
    checkpoint = load_checkpoint(args, SOURCE)
    if checkpoint:
        hp = replace(hp, **checkpoint["settings"])
    checksums = check_inputs(args, hp)
    init_processes()
    model = build_model(hp)
    model.compile(dynamic=False)
    optimizers = build_optimizers(model, hp)
    buckets = GradientBuckets(model.parameters())
    for seed in range(hp.seed, hp.seed + args.num_runs):
        hp = replace(hp, seed=seed)
        run = start_run(args, hp, SOURCE, checksums, checkpoint)
        warm_up(model, optimizers, buckets, hp)
        if checkpoint:
            load_states(checkpoint, run, model, optimizers)
        train(run, hp, model, optimizers, buckets, args.save_checkpoint)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def main(argv, work=train_runs):
    """Runs work(argv). Returns the exit status: 0, or 2 after a user error. Recipes have their own work."""
    try:
        require(
            RANK < WORLD_SIZE and (WORLD_SIZE == 1 or "MASTER_PORT" in os.environ),
            "RANK or WORLD_SIZE is set, but not by torchrun; use torchrun, or unset both",
        )
        work(argv)
        return 0
    except InputError as e:
        if LOCAL_RANK and WORLD_SIZE > 1:
            return 2  # every rank raises it; one on each machine prints it
        message = str(e)
    except OSError as e:
        message = f"rank {RANK}: {e}"
    except torch.OutOfMemoryError:
        message = f"rank {RANK}: out of GPU memory; lower --sequences_per_pass or a sequence length"
    except RuntimeError as e:
        if "C++ compile" not in str(e):
            raise
        message = "no C++ compiler works; start ./run.sh, or set TORCH_COMPILE_DISABLE=1"
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
