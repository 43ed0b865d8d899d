"""
Trains a GPT to a target validation loss, as fast as the machine allows. One file, read top to bottom.

    ./run.sh                                               everything: packages, data, training
    python train_gpt.py --track shakespeare                one process, on the CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  the official run: FineWeb, 3.28, 8 H100s
    python train_gpt.py --help                             every hyperparameter, its type and default

What is special, against a plain GPT-2:
- Muon for the weight matrices of the blocks: momentum, orthogonalized by a Newton-Schulz iteration
- no biases, no learned norm gains; QK norm, half-truncated rotary embeddings, ReLU squared, zero-initialized
  output projections, U-net skips, value embeddings, learned residual mixing with the token embedding
- hashed n-gram embeddings beside the tokens' own, on the byte-level track
- sliding-window attention inside documents, whose window grows during training
- logits soft-capped and, on GPUs that can, computed in FP8
- the same training on any number of processes: a step is a fixed set of sequences, shared out among them

Sections: 1 preamble, 2 FP8 matmul, 3 Muon, 4 model, 5 data, 6 hyperparameters and tracks, 7 processes and log,
8 model, optimizers, schedules, 9 warm-up, 10 gradient buckets, 11 checkpoints, 12 the timed loop.
Importing it runs nothing. Shapes: B sequences of S tokens, T = B * S tokens of a forward pass, H heads of D channels, C = model_dim.
"""
# ----------------------------------------------------------------------------------------------------------
# 1. Preamble: the log carries the source, so that a log alone is enough to rerun a record and to judge it
with open(__file__, newline="") as f:
    SOURCE = f.read()  # read first: an edit made while the run is on must not reach its log

import argparse, contextlib, ctypes, dataclasses, datetime, glob, itertools, json, math, os, pickle, platform
import resource, select, signal, subprocess, sys, threading, time, uuid, zipfile
from collections import namedtuple
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
BLOCK_SIZE = 128  # tokens in a block of the attention mask; sequence lengths and windows are multiples of it

class InputError(Exception):
    """Something the user can mend; its message is the one line that is shown."""

class RankError(InputError):
    """The same, met on one rank alone, which then is the one that says so."""

# ----------------------------------------------------------------------------------------------------------
# 2. FP8 matmul: forward in e4m3, gradient in e5m2 (more range, less precision). Used by the head alone
FP8_MAX = 448  # the largest finite value of float8_e4m3fn

@torch.compile(dynamic=False)  # a custom op is opaque to the model's compile, so its casts are fused here
def fp8_mm(x: Tensor, w: Tensor, x_s: float, w_s: float) -> tuple[Tensor, Tensor, Tensor]:
    x_f8, w_f8 = (x / x_s).to(torch.float8_e4m3fn), (w / w_s).to(torch.float8_e4m3fn)
    x_s, w_s = (torch.full((), scale, dtype=torch.float32, device=x.device) for scale in (x_s, w_s))
    # _scaled_mm wants its second operand column-major: the transpose of a row-major w is just that
    out = torch._scaled_mm(x_f8, w_f8.T, scale_a=x_s, scale_b=w_s, out_dtype=torch.bfloat16, use_fast_accum=True)
    return out, x_f8, w_f8

@torch.compile(dynamic=False)
def fp8_mm_backward(grad, x_f8, w_f8, x_s: float, w_s: float, grad_s: float) -> tuple[Tensor, Tensor]:
    grad_f8 = (grad / grad_s).to(torch.float8_e5m2)
    x_s, w_s, grad_s = (torch.full((), scale, dtype=torch.float32, device=grad.device) for scale in (x_s, w_s, grad_s))
    grad_x = torch._scaled_mm(grad_f8, w_f8.T.contiguous().T, scale_a=grad_s, scale_b=w_s, out_dtype=torch.bfloat16)
    grad_w = torch._scaled_mm(grad_f8.T.contiguous(), x_f8.T.contiguous().T, scale_a=grad_s, scale_b=x_s,
                              out_dtype=torch.float32)
    return grad_x, grad_w

@torch.library.custom_op("nanogpt::mm", mutates_args=())
def mm_op(x: Tensor, w: Tensor, x_s: float, w_s: float, grad_s: float) -> tuple[Tensor, Tensor, Tensor]:
    """x @ w.T in FP8. x (T, in), w (out, in), any float type -> bf16 (T, out), and both FP8 operands for backward.
    The scales are what one unit of the FP8 operand stands for: x is about x_s * x_f8."""
    return fp8_mm(x, w, x_s, w_s)

@mm_op.register_fake
def _(x, w, x_s, w_s, grad_s):
    return (x.new_empty(x.size(0), w.size(0), dtype=torch.bfloat16),
            x.new_empty(x.shape, dtype=torch.float8_e4m3fn), w.new_empty(w.shape, dtype=torch.float8_e4m3fn))

@torch.library.custom_op("nanogpt::mm_backward", mutates_args=())
def mm_backward_op(grad: Tensor, x_f8: Tensor, w_f8: Tensor, x_s: float, w_s: float,
                   grad_s: float) -> tuple[Tensor, Tensor]:
    """grad (T, out) -> grad_x (T, in) in bf16 and grad_w (out, in) in float32, both with exact accumulation."""
    return fp8_mm_backward(grad, x_f8, w_f8, x_s, w_s, grad_s)

@mm_backward_op.register_fake
def _(grad, x_f8, w_f8, x_s, w_s, grad_s):
    return grad.new_empty(x_f8.shape, dtype=torch.bfloat16), grad.new_empty(w_f8.shape, dtype=torch.float32)

def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.scales = inputs[2:]
    ctx.set_materialize_grads(False)

def _mm_autograd(ctx, grad, *_):
    return *torch.ops.nanogpt.mm_backward(grad, *ctx.saved_tensors, *ctx.scales), None, None, None

mm_op.register_autograd(_mm_autograd, setup_context=_save_for_backward)

# ----------------------------------------------------------------------------------------------------------
# 3. Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon)
def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalizes each matrix of G (..., m, n): U S V^T becomes about U V^T, in half precision, same shape.

    A quintic Newton-Schulz iteration whose coefficients maximize the slope at zero, at the price of not
    converging: singular values end anywhere in about [0.5, 1.5], which does the optimizer no harm.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(activation_dtype(G.device))
    if G.size(-2) > G.size(-1):
        X = X.mT  # X X^T is then the smaller of the two products
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # the spectral norm is at most 1 from here on
    X = X.reshape(-1, *X.shape[-2:])
    for _ in range(steps):
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)           # a X + B X
    X = X.view(*G.shape[:-2], *X.shape[-2:])
    return X.mT if G.size(-2) > G.size(-1) else X

# named all_gather_into_tensor up to PyTorch 2.12, deprecated under that name since
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-schulz, for the weight matrices of the blocks and nothing else.

    Parameters (..., rows, cols) are stacks of matrices, each orthogonalized by itself. With a process group,
    every rank keeps the momentum of every world_size-th parameter alone, and computes that one's update;
    the updates are then gathered, in bf16, while the next ones are computed. All ranks need equal gradients.
    """
    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5):
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        params = list(params)
        sizes = dict.fromkeys(p.numel() for p in params)  # a set that keeps its order, as all ranks must agree
        super().__init__([dict(params=[p for p in params if p.numel() == size]) for size in sizes],
                         dict(lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps))
        self.buffers = [torch.empty(self.world_size, g["params"][0].numel(), dtype=torch.bfloat16,
                                    device=g["params"][0].device) for g in self.param_groups]

    def _update(self, params: list[Tensor], group: dict) -> Tensor:
        """The updates of parameters whose shapes differ by a transpose at most, in one batch: (N, numel) in bf16."""
        matrices = []
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buf = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            g = p.grad.lerp(buf, group["momentum"]) if group["nesterov"] else buf
            matrices.append(g.mT if g.size(-2) > g.size(-1) else g)  # tall ones lie down, to be as wide ones are
        updates = zeropower_via_newtonschulz5(torch.stack(matrices), group["ns_steps"]).bfloat16()
        return torch.stack([(u.mT if p.size(-2) > p.size(-1) else u).flatten() for p, u in zip(params, updates)])

    def _owners(self) -> list[tuple[Tensor, int]]:
        return [(p, i % self.world_size) for group in self.param_groups for i, p in enumerate(group["params"])]

    def momentum_buffers(self) -> list[Tensor]:
        """The momentum of all parameters, in the groups' order, on every rank: all ranks must call this."""
        buffers = [self.state.get(p, {}).get("momentum_buffer", torch.zeros_like(p)) for p, _ in self._owners()]
        for buf, (_, owner) in zip(buffers, self._owners()):
            if self.world_size > 1:
                dist.broadcast(buf, owner)
        return buffers

    def load_momentum_buffers(self, buffers: list[Tensor]) -> None:
        """What momentum_buffers() gave, perhaps on another number of ranks: each keeps its own parameters' share."""
        for buf, (p, owner) in zip(buffers, self._owners()):
            if owner == self.rank:
                self.state[p]["momentum_buffer"] = buf.to(p.device, copy=True)

    def _apply(self, params: list[Tensor], group: dict, updates: Tensor, handle) -> None:
        if handle is not None:
            handle.wait()
        for p, update in zip(params, updates):
            scale = max(1, p.size(-2) / p.size(-1)) ** 0.5  # tall matrices: the same RMS of the output's change
            p.add_(update.view_as(p), alpha=-group["lr"] * scale)

    @torch.no_grad()
    def step(self):
        for group, updates in zip(self.param_groups, self.buffers):
            pending = None
            if self.world_size == 1:  # nothing to gather: all of a shape at once
                shapes = [(*p.shape[:-2], *sorted(p.shape[-2:])) for p in group["params"]]
                for shape in dict.fromkeys(shapes):
                    same = [p for p, other in zip(group["params"], shapes) if other == shape]
                    self._apply(same, group, self._update(same, group), None)
                continue
            for first in range(0, len(group["params"]), self.world_size):
                chunk = group["params"][first:first + self.world_size]
                if self.rank < len(chunk):
                    mine = self._update([chunk[self.rank]], group)[0]
                else:  # beyond the chunk's end: nothing to compute, but the gather needs every rank
                    mine = torch.zeros_like(updates[0])
                if pending is not None:
                    self._apply(*pending)  # done with before the buffer is overwritten
                pending = (chunk, group, updates, all_gather(updates.view(-1), mine, async_op=True))
            self._apply(*pending)

# ----------------------------------------------------------------------------------------------------------
# 4. The model
def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),))

class CastedLinear(nn.Linear):
    """A linear layer without bias: weights (out, in) kept in float32, cast to the type of x (..., in) where used.
    With use_fp8 the product is an FP8 one in training (scales: see mm_op), a bf16 one in evaluation."""
    def __init__(self, in_features, out_features, use_fp8=False, x_s=1.0, w_s=1.0, grad_s=1.0):
        self.use_fp8, self.scales = use_fp8, (x_s, w_s, grad_s)
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self):
        bound = 3**0.5 * 0.5 * self.in_features**-0.5  # uniform with standard deviation 0.5 / sqrt(in)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_fp8 and self.training:
            out = torch.ops.nanogpt.mm(x.flatten(0, -2), self.weight, *self.scales)[0]
            return out.view(*x.shape[:-1], -1)
        return F.linear(x, self.weight.type_as(x))

class Rotary(nn.Module):
    """Half-truncated rotary embeddings: of the D/2 channel pairs, half rotate and half stay put (RoPE is
    https://arxiv.org/abs/2104.09864; the truncation is the speedrun's). Tables are float32, not saved."""
    def __init__(self, head_dim: int, max_seq_len: int):
        super().__init__()
        freqs = torch.cat([(1 / 1024) ** torch.linspace(0, 1, head_dim // 4), torch.zeros(head_dim // 4)])
        theta = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * freqs  # (max_seq_len, D/2)
        self.register_buffer("cos", theta.cos(), persistent=False)
        self.register_buffer("sin", theta.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, S, H, D)
        cos, sin = self.cos[None, :x.size(1), None], self.sin[None, :x.size(1), None]  # (1, S, 1, D/2)
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)

# Attention masks. A query sees a key iff the key is not later, is in the same document, and lies in a block
# (of 128 tokens) fewer than window_blocks before its own. Twice: for FlexAttention, and in plain PyTorch.
def document_ids(input_seq: Tensor, eot_token: int) -> Tensor:
    """input_seq (B, S) -> (B * S,): the running count of documents. One begins at each end-of-text token and
    at each sequence's start, so that concatenated sequences never see each other."""
    begins = input_seq == eot_token
    begins[:, 0] = True
    return begins.flatten().cumsum(0, dtype=torch.int32)

def flex_block_mask(docs: Tensor, window_blocks: Tensor) -> BlockMask:
    """docs (T,), window_blocks a scalar tensor (on the device: its growth recompiles nothing) -> BlockMask.
    Made from the bounds of each block, at (T/128)^2 cost; only partly visible blocks are masked inside."""
    def document_causal(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (docs[q_idx] == docs[kv_idx])

    def ordered(blocks):  # (N, N) bool -> how many and which keys' blocks each query block has, those first
        blocks = blocks.int()
        return blocks.sum(-1, dtype=torch.int32)[None, None], \
            blocks.argsort(dim=-1, descending=True, stable=True).int()[None, None]

    first, last = docs.view(-1, BLOCK_SIZE)[:, 0], docs.view(-1, BLOCK_SIZE)[:, -1]  # documents are in order
    i = torch.arange(len(first), device=docs.device)
    distance = i[:, None] - i  # (N, N): query block - key block
    in_window = (distance >= 0) & (distance < window_blocks)
    some = in_window & (first[:, None] <= last)  # the query's first document is not past the key's last
    every = in_window & (distance > 0) & (first[:, None] == last) & (last[:, None] == first)
    return BlockMask.from_kv_blocks(*ordered(some & ~every), *ordered(every),
                                    BLOCK_SIZE=BLOCK_SIZE, mask_mod=document_causal)

def portable_mask(docs: Tensor, window_blocks: Tensor, span: int) -> Tensor:
    """docs (T,) -> bool (T/128, 1, 128, span*128), True where visible: each block of queries against itself and
    the span - 1 blocks before it. span is static, an upper bound of window_blocks: growth recompiles nothing."""
    position = torch.arange(len(docs), dtype=torch.int32, device=docs.device).view(-1, BLOCK_SIZE, 1)
    block = position[:, :1]  # (N, 1, 1): where each block starts
    # a query sees from here on: its document's first token, which a search finds as docs are in order, or its window's
    begin = torch.searchsorted(docs, docs, out_int32=True).view_as(position)
    begin = begin.maximum(block - (window_blocks - 1) * BLOCK_SIZE)
    keys = block + torch.arange((1 - span) * BLOCK_SIZE, BLOCK_SIZE, dtype=torch.int32, device=docs.device)
    return ((begin <= keys) & (keys <= position))[:, None]

def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """q, k, v (1, T, H, D) -> (1, T, H, D). With a BlockMask: FlexAttention. With portable_mask's tensor: plain
    attention block by block, for all that is not CUDA (FlexAttention has no backward there), O(T * span)."""
    if isinstance(mask, BlockMask):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask, scale=scale).transpose(1, 2)

    def blocks(t, span):  # (1, T, H, D) -> (N, H, span * 128, D): each block with the span - 1 before it
        t = t.view(-1, BLOCK_SIZE, *t.shape[2:]).transpose(1, 2)
        return torch.cat([F.pad(t, (0, 0, 0, 0, 0, 0, back, 0))[:len(t)] for back in reversed(range(span))], dim=2)

    span = mask.size(-1) // BLOCK_SIZE
    # spelled out: compiled, this is far faster on a CPU than scaled_dot_product_attention with a mask. QK norm bounds
    # the scores by scale * D: softmax needs no maximum subtracted, and can divide by its sum after the product
    bias = torch.where(mask, 0.0, -math.inf).type_as(q)
    weights = (blocks(q * scale, 1) @ blocks(k, span).mT + bias).exp()  # (N, H, 128, span * 128)
    y = (weights @ blocks(v, span)) / weights.sum(dim=-1, keepdim=True, dtype=torch.float32)  # (N, H, 128, D)
    return y.type_as(v).transpose(1, 2).reshape(q.shape)

def ngram_rows(tokens: Tensor, docs: Tensor, max_ngram: int, rows: int) -> Tensor:
    """tokens, docs (T,) -> (T, max_ngram - 1) int64: for n = 2 to max_ngram, the row to which the last n tokens hash
    in a table of its own, all tables in one. Document by document: what lies before one is the same for all."""
    hashed, found = tokens.long() * 0x9E3779B1 & 2**31 - 1, []
    for back in range(1, max_ngram):
        inside = F.pad(docs, (back, 0))[:-back] == docs
        earlier = torch.where(inside, 1 + F.pad(tokens, (back, 0))[:-back], 0)
        hashed = (hashed + earlier) * 0x9E3779B1 & 2**31 - 1  # below 2^63 before the mask
        found.append((back - 1) * rows + (hashed * rows >> 31))  # the upper bits are the well-mixed ones
    return torch.stack(found, dim=1)

class CausalSelfAttention(nn.Module):
    def __init__(self, hp: "Hyperparameters"):
        super().__init__()
        self.num_heads, self.head_dim = hp.num_heads, hp.head_dim
        hdim = hp.num_heads * hp.head_dim
        bound = 3**0.5 * 0.5 * hp.model_dim**-0.5
        self.qkv_w = nn.Parameter(torch.empty(3, hdim, hp.model_dim).uniform_(-bound, bound))  # merged Q, K, V
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len))
        self.c_proj = CastedLinear(hdim, hp.model_dim)
        self.c_proj.weight.data.zero_()

    def forward(self, x: Tensor, ve: Tensor | None, mask: BlockMask | Tensor, seq_len: int) -> Tensor:
        heads = (self.num_heads, self.head_dim)
        q, k, v = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x)).view(-1, seq_len, 3, *heads).unbind(2)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))  # (B, S, H, D); positions count within the sequence
        q, k, v = (t.reshape(1, -1, *heads) for t in (q, k, v))  # (1, T, H, D)
        v = self.lambdas[0] * v
        if ve is not None:
            v = v + self.lambdas[1] * ve.view_as(v)
        y = attention(q, k, v, mask, scale=0.12)  # 0.12 was tuned; QK norm makes 1/sqrt(D) meaningless
        return self.c_proj(y.flatten(2))

class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.c_fc = CastedLinear(dim, 4 * dim)
        self.c_proj = CastedLinear(4 * dim, dim)
        self.c_proj.weight.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())  # ReLU squared: https://arxiv.org/abs/2109.08668

class Block(nn.Module):
    def __init__(self, hp: "Hyperparameters", layer: int):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attn = None if layer in hp.attn_free_layers else CausalSelfAttention(hp)
        self.mlp = MLP(hp.model_dim)

    def forward(self, x: Tensor, x0: Tensor, ve: Tensor | None, mask: BlockMask | Tensor, seq_len: int) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), ve, mask, seq_len)
        return x + self.mlp(norm(x))

class GPT(nn.Module):
    """(input_seq (B, S) int32, target_seq (B, S) int64, window_blocks scalar int32) -> the cross-entropy in nats,
    summed over tokens in training and averaged in evaluation. S is a multiple of 128. `dtype` is that of the
    embedding tables, and so of all activations; every other weight is float32."""
    def __init__(self, hp: "Hyperparameters", dtype=torch.bfloat16, use_fp8=False):
        super().__init__()
        self.hp = hp
        k, n = hp.num_value_embeds, hp.num_layers
        # registered in the order of the forward pass: the gradient buckets count on it
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim, dtype=dtype)
        # hashed n-gram embeddings (Byte Latent Transformer, https://arxiv.org/abs/2412.09871; bigrams in the speedrun's
        # record 62): n = 2, 3, ... have a table each, and an equal share of the channels
        self.ngram_embed = None
        if hp.max_ngram > 1:
            tables = hp.max_ngram - 1
            self.ngram_embed = nn.Embedding(tables * hp.ngram_rows, hp.model_dim // tables, dtype=dtype)
            self.ngram_embed.weight.data.zero_()
        # token value embeddings (Zhou et al. 2024, https://arxiv.org/abs/2410.17897), in U-net order:
        # the first k layers and the last k share k tables
        hdim = hp.num_heads * hp.head_dim
        self.value_embeds = nn.ModuleList(nn.Embedding(hp.vocab_size, hdim, dtype=dtype) for _ in range(k))
        self.ve_of_layer = {i: i for i in range(k)} | {n - k + i: i for i in range(k)}
        self.blocks = nn.ModuleList(Block(hp, i) for i in range(n))
        self.skip_weights = nn.Parameter(torch.ones(n // 2)) if n > 1 else None
        # the head's input is RMS-normed, so no element exceeds sqrt(C); a summed loss has gradients within 1
        self.lm_head = CastedLinear(hp.model_dim, hp.padded_vocab_size, use_fp8, x_s=hp.model_dim**0.5 / FP8_MAX,
                                    w_s=24 / FP8_MAX, grad_s=1 / FP8_MAX)
        self.lm_head.weight.data.zero_()

    def masks(self, docs: Tensor, window_blocks: Tensor) -> list[BlockMask | Tensor]:
        """One mask a layer: the long window or half of it, at least one block."""
        short_blocks = (window_blocks // 2).clamp_min(1)
        if docs.is_cuda:
            long, short = flex_block_mask(docs, window_blocks), flex_block_mask(docs, short_blocks)
        else:
            span = math.ceil(self.hp.max_window / BLOCK_SIZE)
            long = portable_mask(docs, window_blocks, span)
            short = portable_mask(docs, short_blocks, max(1, span // 2))
        return [long if i in self.hp.long_window_layers else short for i in range(self.hp.num_layers)]

    def forward(self, input_seq: Tensor, target_seq: Tensor, window_blocks: Tensor) -> Tensor:
        docs = document_ids(input_seq, self.hp.eot_token)
        masks = self.masks(docs, window_blocks)
        tokens, seq_len = input_seq.flatten(), input_seq.size(1)
        value_embeds = [table(tokens) for table in self.value_embeds]  # each (T, H*D)
        x = self.embed(tokens)
        if self.ngram_embed is not None:
            rows = ngram_rows(tokens, docs, self.hp.max_ngram, self.hp.ngram_rows)
            # (T, tables, C / tables) -> (T, C). Indexed: an nn.Embedding's gradient takes a float32 copy of the table
            x = x + self.ngram_embed.weight[rows].flatten(1)
        x = x0 = norm(x)[None]  # (1, T, C)
        skips, n = [], self.hp.num_layers // 2
        for i, block in enumerate(self.blocks):
            if i >= self.hp.num_layers - n:  # second half of the U-net: add what the first half stored
                x = x + self.skip_weights[i - (self.hp.num_layers - n)] * skips.pop()
            ve = value_embeds[self.ve_of_layer[i]] if i in self.ve_of_layer else None
            x = block(x, x0, ve, masks[i], seq_len)
            if i < n:
                skips.append(x)
        logits = self.lm_head(norm(x)).float()  # (1, T, padded_vocab_size)
        # tanh soft-capping at 15 (Gemma 2, https://arxiv.org/abs/2408.00118), shifted to be positive
        logits = 30 * torch.sigmoid(logits / (7.5 * self.hp.model_dim**0.5))
        reduction = "sum" if self.training else "mean"
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target_seq.flatten(), reduction=reduction)

# ----------------------------------------------------------------------------------------------------------
# 5. Data: shards of 256 little-endian int32 (magic, version, number of tokens, zeros), then uint16 tokens
def find_shards(pattern: str, data_command: str = "") -> list[Path]:
    """The shards in sorted order. A relative pattern is looked for here, then beside this file."""
    files = sorted(glob.glob(pattern)) or sorted(glob.glob(str(HERE / pattern)))
    if not files:
        raise InputError(f"no shards match {pattern}" + (f"; make them with: {data_command}" if data_command else ""))
    return [Path(f) for f in files]

def shard_length(file: Path) -> int:
    """The number of tokens that the shard's header and its size agree on."""
    try:
        header, size = np.fromfile(file, dtype="<i4", count=256), file.stat().st_size
    except OSError as e:
        raise InputError(f"{file}: cannot be read ({e.strerror})") from None
    if len(header) < 256 or header[0] != 20240520:
        raise InputError(f"{file}: not a token shard (no magic 20240520 in a header of 1024 bytes); make it again")
    if header[1] != 1:
        raise InputError(f"{file}: shard version {header[1]}, but only version 1 is known; make it again")
    if header[2] < 0 or size != 1024 + 2 * int(header[2]):
        raise InputError(f"{file}: {header[2]} tokens by its header, but {size} bytes; make it again")
    return int(header[2])

def read_tokens(file: Path, start: int, count: int, vocab_size: int) -> np.ndarray:
    """(count,) uint16. Read, not memory-mapped: a shard cut short under a running job is an error, not a SIGBUS."""
    try:
        tokens = np.fromfile(file, dtype="<u2", count=count, offset=1024 + 2 * start)
    except OSError as e:
        raise RankError(f"{file}: cannot be read any more ({e.strerror})") from None
    if len(tokens) < count:
        raise RankError(f"{file}: ends before token {start + count}; was it changed while the run was on?")
    if count and tokens.max() >= vocab_size:
        raise RankError(f"{file}: token {tokens.max()} is outside the vocabulary of {vocab_size}; another track's?")
    return tokens

def check_shards(pattern: str, batch_size: int, steps: int, vocab_size: int, data_command="", lower="") -> None:
    """Reads all that the run will read, and raises InputError now rather than an hour into training. data_command
    makes such shards, and the option `lower` asks for fewer steps: the error says so."""
    have = 0
    for file in find_shards(pattern, data_command):
        here = min((shard_length(file) - 1) // batch_size, steps - have)
        for start in range(0, here * batch_size, 2**24):
            read_tokens(file, start, min(2**24, here * batch_size + 1 - start), vocab_size)
        have += max(here, 0)
    if have < steps:
        raise InputError(f"{pattern}: tokens for {have} batches of {batch_size}, but {steps} are asked for; "
                         f"add shards ({data_command}) or lower {lower}")

def distributed_data_generator(pattern: str, batch_size: int, rank: int, world_size: int, vocab_size: int = 65536,
                               device: str | torch.device = "cpu", first_batch: int = 0):
    """Yields (inputs int32, targets int64), each (batch_size / world_size,): this rank's slice of every global
    batch, from number first_batch on, targets one token ahead. What remains of a shard and is too short for a
    batch is left."""
    local, batch = batch_size // world_size, -1
    for file in find_shards(pattern):
        length = shard_length(file)
        for start in range(0, length - batch_size, batch_size):
            batch += 1
            if batch < first_batch:
                continue
            tokens = torch.from_numpy(read_tokens(file, start + rank * local, local + 1, vocab_size).astype(np.int32))
            inputs, targets = tokens[:-1], tokens[1:].long()
            if torch.device(device).type == "cuda":
                inputs, targets = (t.pin_memory().to(device, non_blocking=True) for t in (inputs, targets))
            yield inputs, targets

# ----------------------------------------------------------------------------------------------------------
# 6. Hyperparameters and tracks. The defaults are the official FineWeb track; `--field value` sets any of them
@dataclasses.dataclass
class Hyperparameters:
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # pattern of the training shards, read in sorted order
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"      # pattern of the validation shards
    data_command: str = "python data/cached_fineweb10B.py"    # what makes them, for the error that says so
    val_tokens: int = 10_485_760       # how many tokens to validate on: fixed, or losses don't compare
    batch_tokens: int = 8 * 48 * 1024  # tokens a step, whatever the number of processes
    train_seq_len: int = 48 * 1024     # tokens a sequence; halve it on a small card, the step keeps its tokens
    val_seq_len: int = 4 * 64 * 1024   # tokens a sequence in validation
    sequences_per_pass: int = 1        # at most so many sequences go through the model at once
    vocab_size: int = 50257            # token ids lie below
    eot_token: int = 50256             # the token that begins a document
    # model
    num_layers: int = 12
    num_heads: int = 6
    head_dim: int = 128
    model_dim: int = 768
    num_value_embeds: int = 3          # tables; the first and the last so many layers use them
    max_ngram: int = 1                 # the longest n-grams that have embeddings; 1: none but the tokens' own
    ngram_rows: int = 65536            # of each table of n-gram embeddings: n-grams are hashed into so many
    attn_free_layers: tuple[int, ...] = (7,)                # layers with an MLP only
    long_window_layers: tuple[int, ...] = (0, 4, 7, 11)     # layers with the long window, the others have half
    max_window: int = 1728             # the long window at the end of training, in tokens
    fp8: bool = True                   # FP8 head where the GPU has FP8 matrix units
    # optimization
    num_iterations: int = 1770         # steps
    cooldown_frac: float = 0.4         # the fraction of the steps in which learning rates fall
    final_lr_frac: float = 0.1         # what it falls to, of itself
    head_lr: float = 0.22
    embed_lr: float = 0.6
    scalar_lr: float = 0.04
    adam_beta1: float = 0.8
    adam_beta2: float = 0.95
    adam_eps: float = 1e-10
    muon_lr: float = 0.05
    ns_steps: int = 5                  # of the Newton-Schulz iteration
    muon_momentum: float = 0.95
    muon_momentum_start: float = 0.85  # momentum rises from here
    muon_momentum_warmup: int = 300    # over so many steps
    # the run
    seed: int = 0                      # of the initial weights
    warmup_steps: int = 10             # untimed steps that compile and leave no trace
    val_loss_every: int = 125          # validate every so many steps; 0: only at the end
    target_val_loss: float = 3.28      # what the track races to
    save_checkpoint: bool = False      # save the final model and optimizers

    @property
    def num_sequences(self) -> int:
        return self.batch_tokens // self.train_seq_len

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / 128) * 128  # matmuls like multiples of 128

TRACKS = {
    "fineweb": Hyperparameters(),
    # Shakespeare's plays as bytes, for two CPU cores
    "shakespeare": Hyperparameters(
        train_files="data/shakespeare/shakespeare_train_*.bin", val_files="data/shakespeare/shakespeare_val_*.bin",
        data_command="python data/shakespeare.py", val_tokens=389_120, batch_tokens=4096, train_seq_len=256,
        val_seq_len=12_160, sequences_per_pass=16, vocab_size=257, eot_token=256, num_layers=1, num_heads=1,
        head_dim=64, model_dim=128, num_value_embeds=0, max_ngram=5, ngram_rows=32768, attn_free_layers=(),
        long_window_layers=(0,), max_window=256, num_iterations=170, cooldown_frac=1.0, final_lr_frac=0.0, head_lr=0.2,
        embed_lr=0.2, adam_beta1=0.5, adam_beta2=0.99, muon_lr=0.04, ns_steps=3, muon_momentum=0.9,
        muon_momentum_warmup=0, warmup_steps=3, val_loss_every=85, target_val_loss=1.50),
}

def check_hyperparameters(hp: Hyperparameters, world_size: int) -> None:
    """Raises InputError for what cannot be trained."""
    def require(ok, name, rule):
        if not ok:
            raise InputError(f"--{name} {getattr(hp, name)}: {rule}")

    may_be_zero = ("eot_token num_value_embeds muon_momentum_warmup seed warmup_steps val_loss_every final_lr_frac "
                   "head_lr embed_lr scalar_lr muon_lr adam_beta1 adam_beta2 muon_momentum muon_momentum_start")
    for field in dataclasses.fields(hp):
        if field.type in (int, float):
            value, zero = getattr(hp, field.name), field.name in may_be_zero.split()
            require(math.isfinite(value) and (value >= 0 if zero else value > 0), field.name,
                    f"must be a finite number, {'zero or more' if zero else 'more than zero'}")
    for name in ("adam_beta1", "adam_beta2", "muon_momentum", "muon_momentum_start"):
        require(getattr(hp, name) < 1, name, "must be below 1")
    for name in ("train_seq_len", "val_seq_len"):
        require(getattr(hp, name) % BLOCK_SIZE == 0, name, f"must be a multiple of {BLOCK_SIZE}")
    for name in ("attn_free_layers", "long_window_layers"):
        require(all(0 <= i < hp.num_layers for i in getattr(hp, name)), name, f"layers are 0 to {hp.num_layers - 1}")
    require(hp.batch_tokens % hp.train_seq_len == 0, "batch_tokens", f"no multiple of train_seq_len {hp.train_seq_len}")
    require(hp.val_tokens % hp.val_seq_len == 0, "val_tokens", f"not a multiple of val_seq_len {hp.val_seq_len}")
    require(hp.eot_token < hp.vocab_size, "eot_token", f"outside the vocabulary of {hp.vocab_size}")
    require(hp.head_dim % 4 == 0, "head_dim", "must be a multiple of 4 (half-truncated rotary embeddings)")
    require(2 * hp.num_value_embeds <= hp.num_layers, "num_value_embeds", f"more than half of {hp.num_layers} layers")
    require(hp.max_ngram <= BLOCK_SIZE, "max_ngram", f"must be at most {BLOCK_SIZE}")
    require(hp.max_ngram == 1 or hp.model_dim % (hp.max_ngram - 1) == 0, "max_ngram",
            f"its {hp.max_ngram - 1} tables cannot share {hp.model_dim} channels equally")
    require(hp.ngram_rows <= 2**31, "ngram_rows", "must be at most 2^31, as hashes are below it")
    require(hp.cooldown_frac <= 1, "cooldown_frac", "must be at most 1")
    val_sequences = hp.val_tokens // hp.val_seq_len
    fits = [n for n in range(1, hp.num_sequences + 1) if hp.num_sequences % n == 0 and val_sequences % n == 0]
    if world_size not in fits:
        raise InputError(f"{world_size} processes cannot share {hp.num_sequences} training and {val_sequences} "
                         f"validation sequences equally; use {', '.join(map(str, fits))} processes")

def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Hyperparameters]:
    """The options, and the track's hyperparameters with what the command line changes in them."""
    def fail(message):
        raise InputError(f"{message}; --help lists what there is")

    def true_or_false(text):
        return dict(true=True, false=False)[text.lower()] if text.lower() in ("true", "false") else int(text) != 0

    def layer_list(text):
        return tuple(int(i) for i in text.split(",") if i.strip())

    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.error = fail
    options.add_argument("--track", choices=TRACKS, help="default: fineweb where CUDA is, otherwise shakespeare")
    options.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    options.add_argument("--log_dir", default="logs", help="default: logs")
    options.add_argument("--num_runs", type=int, default=1, metavar="N", help="runs, with seeds seed, seed + 1, ...")
    options.add_argument("--checkpoint_dir", default="checkpoints", help="default: checkpoints")
    options.add_argument("--checkpoint_every", type=int, default=0, metavar="N", help="steps; default: 0, never")
    options.add_argument("--resume", metavar="PATH", help="a checkpoint, a run's folder of them, or: latest")
    options.add_argument("--resume_force", action="store_true", help="even if source or settings differ (no record)")
    args = options.parse_known_args(argv)[0]
    on_cuda = args.device != "cpu" and torch.cuda.is_available()
    track = args.track or ("fineweb" if on_cuda else "shakespeare")
    options.set_defaults(track=track, device="cuda" if on_cuda else "cpu")
    parser = argparse.ArgumentParser(parents=[options], allow_abbrev=False, description=__doc__.split("\n\n")[0],
                                     usage="train_gpt.py [--track NAME] [--device NAME] [--FIELD VALUE ...]",
                                     formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44))
    parser.error = fail
    fields = parser.add_argument_group(f"hyperparameters, with the defaults of track {track}")
    for name, value in vars(TRACKS[track]).items():
        read = {bool: true_or_false, tuple: layer_list}.get(type(value), type(value))
        shown = ",".join(map(str, value)) if read is layer_list else str(value)
        fields.add_argument(f"--{name}", type=read, default=value, metavar=type(value).__name__, help=shown,
                            **(dict(nargs="?", const=True) if read is true_or_false else {}))
    args = parser.parse_args(argv)
    if args.num_runs < 1 or args.checkpoint_every < 0 or (args.num_runs > 1 and args.resume):
        fail("--num_runs must be at least 1, and 1 with --resume; --checkpoint_every must not be negative")
    return args, Hyperparameters(**{name: getattr(args, name) for name in vars(TRACKS[track])})

# ----------------------------------------------------------------------------------------------------------
# 7. Processes and the log
World = namedtuple("World", "rank size device")

def cpu_info() -> tuple[str, int, set[str]]:
    """The CPU's model, the cores that this process may use, and its instruction sets as the kernel names them."""
    text = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    entries = {key.strip(): value for key, _, value in (line.partition(": ") for line in text.splitlines())}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = set(f"{entries.get('flags', '')} {entries.get('Features', '')}".split())
    return entries.get("model name") or platform.machine(), cores, flags

CPU_MODEL, CPU_CORES, CPU_FLAGS = cpu_info()

def activation_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it, float32 on other CPUs."""
    native = device.type == "cuda" or CPU_FLAGS & {"avx512_bf16", "amx_bf16", "bf16"}
    return torch.bfloat16 if native else torch.float32

def start_world(device_name: str) -> World:
    """Joins torchrun's process group, NCCL on CUDA and gloo on the CPU; a single process needs none."""
    rank, size, local_rank, local_size = (int(os.environ.get(name, default)) for name, default in [
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)])
    device = torch.device(device_name, local_rank if device_name == "cuda" else None)
    if device.type == "cuda":
        if local_size > torch.cuda.device_count():
            raise InputError(f"--device cuda: {local_size} process{'es' * (local_size > 1)}, but "
                             f"{torch.cuda.device_count()} usable GPUs; use fewer processes, or --device cpu")
        torch.cuda.set_device(device)
    else:
        # else threads add up the embeddings' gradients in any order, and no run is like another
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc: keep freed activations instead of faulting them in at every step
            libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never give the heap's top back to the kernel
            libc.mallopt(-4, 0)   # M_MMAP_MAX: no mapping of its own for a large block
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, CPU_CORES // local_size))
    if size > 1:
        # ten minutes: as long as one rank may wait for another that still compiles. One that dies is another
        # matter: its launcher notices at once, and stops the others (see StopSignal)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=10),
                                device_id=device if device.type == "cuda" else None)
    return World(rank, size, device)

class Log:
    """<log_dir>/<run_id>.txt and the console: a progress bar on a terminal, plain lines elsewhere. Rank 0 only."""
    def __init__(self, world: World, log_dir: str, total_steps: int, run_id: str = "", size: int = 0):
        """A new log; or that of a run to be continued, cut back to the size in bytes it had at the checkpoint."""
        self.active, self.run_id, self.bar = world.rank == 0, run_id or str(uuid.uuid4()), None
        self.path = Path(log_dir) / f"{self.run_id}.txt"
        if not self.active:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.is_new = not self.path.exists()
            self.file = open(self.path, "xb" if self.is_new else "r+b", buffering=0)  # a line that is out is safe
            self.file.truncate(min(size, self.size()))
            self.file.seek(0, os.SEEK_END)
        except OSError as e:
            raise InputError(f"cannot write the log {self.path} ({e.strerror}); choose another --log_dir") from None
        self.show(str(self.path))
        if sys.stdout.isatty():
            self.bar = tqdm(total=total_steps, unit="step", dynamic_ncols=True, leave=False, file=sys.stdout)

    def size(self) -> int:
        return self.path.stat().st_size if self.active else 0

    def write(self, line: str, console: bool = True) -> None:
        if not self.active:
            return
        try:
            data = f"{line}\n".encode()
            while data:
                data = data[self.file.write(data):]
        except OSError as e:
            raise RankError(f"cannot write the log {self.path} ({e.strerror})") from None
        if console:
            self.show(line)

    def show(self, line: str) -> None:
        try:
            self.bar.write(line) if self.bar is not None else print(line, flush=True)
        except OSError as e:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter fails once more at its end
            raise RankError(f"cannot write to the console ({e.strerror})") from None

    def step(self, line: str, step: int, loss: float) -> None:
        """A training step: on a terminal it moves the bar instead of scrolling by."""
        self.write(line, console=self.bar is None)
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {line.split('step_avg:')[1]}", refresh=False)
            self.bar.update(step - self.bar.n)

    def close(self) -> None:
        if self.active:
            self.file.close()
        if self.bar is not None:
            self.bar.close()

def describe_machine(world: World) -> str:
    """Versions, then nvidia-smi, or the CPU's model, cores and instruction sets. Names no host or user."""
    if world.device.type == "cuda":
        machine = subprocess.run(["nvidia-smi"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        if "Processes:" in machine:  # that table has paths in it
            machine = machine[:machine.rfind("+--", 0, machine.find("Processes:"))]
    else:
        kinds = ("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")
        machine = (f"CPU: {CPU_MODEL}, {CPU_CORES} cores, {torch.get_num_threads()} threads a process, "
                   f"instruction sets: {' '.join(sorted(flag for flag in CPU_FLAGS if flag.startswith(kinds)))}")
    return (f"Running Python {sys.version}\nRunning PyTorch {torch.version.__version__} compiled for CUDA "
            f"{torch.version.cuda}\n{machine}\n{world.size} process{'es' * (world.size > 1)} on {world.device.type}")

# ----------------------------------------------------------------------------------------------------------
# 8. Model, optimizers, schedules
def build_model(hp: Hyperparameters, world: World) -> GPT:
    torch.manual_seed(hp.seed)
    has_fp8 = world.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    model = GPT(hp, activation_dtype(world.device), use_fp8=hp.fp8 and has_fp8).to(world.device)
    if world.size > 1:
        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
    return model

def build_optimizers(model: GPT, hp: Hyperparameters) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks; Adam for the head, the embeddings and all that is not a matrix."""
    matrices = [p for p in model.blocks.parameters() if p.ndim >= 2]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    embeds = [p for name, p in model.named_parameters() if "embed" in name]  # of tokens, n-grams and values
    # an epsilon far below the usual 1e-8: with it, second moments of rare tokens are not drowned
    adam = torch.optim.Adam([dict(params=[model.lm_head.weight], lr=hp.head_lr), dict(params=embeds, lr=hp.embed_lr),
                             dict(params=scalars, lr=hp.scalar_lr)],
                            betas=(hp.adam_beta1, hp.adam_beta2), eps=hp.adam_eps, fused=True)
    muon = Muon(matrices, lr=hp.muon_lr, momentum=hp.muon_momentum, ns_steps=hp.ns_steps)
    for group in (*adam.param_groups, *muon.param_groups):
        group["initial_lr"] = group["lr"]
    set_schedules([adam, muon], 0, hp)
    return [adam, muon]

@torch.no_grad()
def initialize(model: nn.Module, optimizers: list, hp: Hyperparameters, world: World) -> None:
    """Back to where a run begins: the seed's weights, and optimizers without a past."""
    for p, initial in zip(model.parameters(), build_model(hp, world).parameters()):
        p.copy_(initial)
    for optimizer in optimizers:
        optimizer.state.clear()
    set_schedules(optimizers, 0, hp)

def get_lr(step: int, hp: Hyperparameters) -> float:
    """What the learning rates are multiplied by: 1, then a straight line down to final_lr_frac."""
    left = (1 - step / hp.num_iterations) / hp.cooldown_frac
    return 1.0 if left >= 1 else left + (1 - left) * hp.final_lr_frac

def get_muon_momentum(step: int, hp: Hyperparameters) -> float:
    frac = min(step / hp.muon_momentum_warmup, 1) if hp.muon_momentum_warmup else 1
    return (1 - frac) * hp.muon_momentum_start + frac * hp.muon_momentum

def get_window_blocks(step: int, hp: Hyperparameters) -> int:
    """The long window in blocks: grows with progress to max_window tokens, rounded up, at least one block."""
    return max(1, math.ceil(hp.max_window * (step / hp.num_iterations) / BLOCK_SIZE))

def set_schedules(optimizers: list[torch.optim.Optimizer], step: int, hp: Hyperparameters) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * get_lr(step, hp)
            if "momentum" in group:
                group["momentum"] = get_muon_momentum(step, hp)

# ----------------------------------------------------------------------------------------------------------
# 9. Warm-up: everything the run will use, on random tokens, before the clock starts
def warm_up(model, optimizers: list, buckets: "GradientBuckets", hp: Hyperparameters, world: World) -> None:
    """Compiles training and evaluation, starts the communicators, fills the allocator's caches. Then weights and
    optimizers are what they were: no learning is carried over."""
    rng = torch.Generator(world.device).manual_seed(world.rank)
    window_blocks = get_window_blocks(hp.num_iterations, hp)

    def random_tokens(n):
        tokens = torch.randint(hp.vocab_size, (n,), dtype=torch.int32, device=world.device, generator=rng)
        return tokens, tokens.long()

    for _ in range(hp.warmup_steps):
        train_step(model, optimizers, buckets, *random_tokens(hp.batch_tokens // world.size), window_blocks, hp, world)
    if hp.warmup_steps:
        evaluate(model, [random_tokens(hp.val_seq_len)], window_blocks, hp, world)
    initialize(model, optimizers, hp, world)

# ----------------------------------------------------------------------------------------------------------
# 10. Gradient buckets: averaging overlaps the rest of the backward pass
class GradientBuckets:
    """Gradients live in flat buffers of about 25 MB, one dtype each, filled in the order that backward produces
    them. On a step's last micro-step, a bucket that is complete starts one asynchronous all-reduce, without copies.
    After wait(), gradients are sums of tokens' losses, averaged over the step's sequences on all processes."""
    def __init__(self, params, num_sequences: int, bucket_bytes: int = 25 * 2**20):
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.num_sequences = num_sequences
        self.last_micro_step = False
        self.handles, self.norms = [], []
        self.buckets = []  # lists of parameters
        open_bucket = {}   # dtype -> the list being filled
        for p in reversed(list(params)):  # backward runs the forward pass in reverse
            bucket = open_bucket.get(p.dtype)
            if bucket is None or sum(x.nbytes for x in bucket) + p.nbytes > bucket_bytes:
                self.buckets.append([])
                bucket = open_bucket[p.dtype] = self.buckets[-1]
            bucket.append(p)
        self.flat = [torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
                     for bucket in self.buckets]
        for index, (bucket, flat) in enumerate(zip(self.buckets, self.flat)):
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = grad.view_as(p)
                p.register_post_accumulate_grad_hook(lambda p, index=index: self._gradient_ready(index))
        self.missing = [len(bucket) for bucket in self.buckets]

    def _gradient_ready(self, index: int) -> None:
        if not self.last_micro_step:
            return
        self.missing[index] -= 1
        if self.missing[index] == 0:
            flat = self.flat[index]
            self.norms.append(torch.linalg.vector_norm(flat).float())  # this rank's own; added up in float32 anyway
            if self.num_sequences > 1:
                flat.div_(self.num_sequences)  # before the sum: gloo has no average
            if self.world_size > 1:
                self.handles.append(dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True))

    def wait(self) -> Tensor:
        """Ends the step's reductions. -> the norm of this rank's own gradient."""
        assert not any(self.missing), "a parameter took no part in the loss"
        for handle in self.handles:
            handle.wait()
        norm = torch.stack(self.norms).norm()
        self.handles, self.norms = [], []
        self.missing = [len(bucket) for bucket in self.buckets]
        return norm

    def zero(self) -> None:
        for flat in self.flat:
            flat.zero_()

# ----------------------------------------------------------------------------------------------------------
# 11. Checkpoints and signals: nothing trained is lost, and nothing wrong is loaded
CHECKPOINT_KEYS = set("run_id step tokens train_time_ms validations log_size settings source rng model adam muon".split())

def write_whole(path: Path, write) -> None:
    """write(file) under a temporary name, then on the disk, then renamed: what bears the final name is whole."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:  # torch.save turns a full disk into a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RankError(f"cannot write {path} ({getattr(e, 'strerror', None) or 'disk full?'}); "
                        "the checkpoints before it are as they were") from None

def save_checkpoint(folder: Path, model: GPT, optimizers: list, progress: dict, settings: dict, world: World) -> None:
    """folder/step000100.pt from rank 0, with the momentum that the ranks keep gathered; the newest two stay."""
    adam, muon = optimizers
    momentum = muon.momentum_buffers()
    if world.rank == 0:
        rng = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if world.device.type == "cuda" else [])
        state = dict(progress, settings=settings, source=SOURCE, rng=rng, model=model.state_dict(),
                     adam=adam.state_dict(), muon=momentum)
        write_whole(folder / f"step{progress['step']:06d}.pt", lambda f: torch.save(state, f))
        for old in [*sorted(folder.glob("step*.pt"))[:-2], *folder.glob("*.tmp")]:
            old.unlink(missing_ok=True)

def save_model(path: Path, model: GPT, hp: Hyperparameters) -> None:
    """The weights alone, as safetensors: loading them executes nothing."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    metadata = dict(model="speedrun", hyperparameters=json.dumps(dataclasses.asdict(hp)))
    write_whole(path, lambda f: f.write(safetensors.torch.save(tensors, metadata)))

def read_checkpoint(where: str, checkpoint_dir: str) -> dict:
    """The newest whole checkpoint of a run: of the newest run for "latest", of a folder, or up to a given file."""
    path = Path(where)
    if where == "latest":
        files = sorted(Path(checkpoint_dir).glob("*/step*.pt"), key=lambda f: f.stat().st_mtime)
        path = files[-1].parent if files else Path(checkpoint_dir)
    folder = path.parent if path.is_file() else path
    for file in sorted(folder.glob("*.pt"), reverse=True):
        if path.is_file() and file.name > path.name:
            continue
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch.load ignores the checksums that torch.save wrote
            state = None if damaged else torch.load(file, map_location="cpu", weights_only=True)
            if isinstance(state, dict) and CHECKPOINT_KEYS <= state.keys():
                uuid.UUID(state["run_id"])  # it becomes the log's name: nothing but that
                return state
            why = f"damaged at {damaged}" if damaged else "not a checkpoint of this program"
        except Exception as e:  # damage has many faces; a pickle that is refused is one of them
            refused = isinstance(e, pickle.UnpicklingError)
            why = "its pickle holds more than data" if refused else f"{type(e).__name__}: {e}".splitlines()[0]
        print(f"warning: {file} cannot be used ({why}); trying the one before it", file=sys.stderr)
    raise InputError(f"--resume {where}: no whole checkpoint there; look into {checkpoint_dir}")

def check_same_run(state: dict, settings: dict) -> list[str]:
    """What differs between a checkpoint's settings and source and ours, in words."""
    old = state["settings"]
    differences = [f"{name}: {old.get(name)} in the checkpoint, {settings.get(name)} now"
                   for name in sorted({*old, *settings} - {"save_checkpoint"}) if old.get(name) != settings.get(name)]
    if state["source"] != SOURCE:
        pairs = itertools.zip_longest(state["source"].splitlines(), SOURCE.splitlines())
        line = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), 1)
        differences.append(f"source: not the same, first at line {line}")
    return differences

def load_checkpoint(state: dict, model: GPT, optimizers: list, world: World) -> None:
    adam, muon = optimizers
    try:
        model.load_state_dict(state["model"])
        # its moments alone: learning rates and betas are this run's, which differ where --resume_force lets them
        adam.load_state_dict(dict(state["adam"], param_groups=adam.state_dict()["param_groups"]))
    except (RuntimeError, ValueError) as e:
        raise InputError(f"--resume: a checkpoint of another model ({str(e).splitlines()[-1].strip()})") from None
    muon.load_momentum_buffers(state["muon"])
    torch.set_rng_state(state["rng"][0])
    if world.device.type == "cuda" and len(state["rng"]) > 1:
        torch.cuda.set_rng_state(state["rng"][1])

class StopSignal:
    """SIGTERM or SIGINT: `number` is set, the step is finished and saved. A second one exits at once.

    A thread listens, as a rank that waits for a dead one never comes back to Python's own signal handlers; it
    gives the other processes of a job 20 seconds, which is within the 30 after which torchrun kills."""
    def __init__(self, world: World):
        self.number, self.grace = 0, 20 if world.size > 1 else None
        self.reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self.number = os.read(self.reader, 1)[0]
        if self.grace:  # batch systems signal all processes, and torchrun then passes its own on: the same signal twice
            time.sleep(1)
            os.set_blocking(self.reader, False)
            with contextlib.suppress(BlockingIOError):
                os.read(self.reader, 100)
        select.select([self.reader], [], [], self.grace)
        os._exit(128 + self.number)

# ----------------------------------------------------------------------------------------------------------
# 12. The timed loop
def train_step(model, optimizers, buckets, inputs: Tensor, targets: Tensor, window_blocks: int, hp: Hyperparameters,
               world: World) -> tuple[Tensor, Tensor]:
    """Forward, backward and update on this process's share of a step, (local tokens,).
    -> its loss, the mean over its tokens, and the norm of its gradient."""
    local = hp.num_sequences // world.size
    per_pass = max(n for n in range(1, min(local, hp.sequences_per_pass) + 1) if local % n == 0)
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    model.train()
    inputs, targets = (t.view(-1, per_pass, hp.train_seq_len) for t in (inputs, targets))  # (micro-steps, B, S)
    total = torch.zeros((), device=world.device)
    for micro_step, (x, y) in enumerate(zip(inputs, targets)):
        buckets.last_micro_step = micro_step == len(inputs) - 1
        loss = model(x, y, window)
        loss.backward()
        total += loss.detach()
    grad_norm = buckets.wait()
    for optimizer in optimizers:
        optimizer.step()
    buckets.zero()
    return total / inputs.numel(), grad_norm

@torch.no_grad()
def evaluate(model, sequences, window_blocks: int, hp: Hyperparameters, world: World) -> float:
    """The mean loss over this process's `sequences` of (val_seq_len,) inputs and targets
    and over all processes, each of which has equally many."""
    model.eval()
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    losses = torch.stack([model(x[None], y[None], window) for x, y in sequences])
    mean = losses.double().mean()
    if world.size > 1:
        dist.all_reduce(mean)
    return mean.item() / world.size

class StepCheck:
    """Stops the run at a loss or a gradient that is not finite, and has the ranks agree on when to heed a signal.
    On CUDA a step is looked at when the next one is on its way, so that reading never makes the GPU wait for the
    host; flush() looks at once."""
    def __init__(self, world: World, stop_signal: StopSignal):
        self.world, self.stop_signal, self.unread, self.loss, self.stop = world, stop_signal, None, math.nan, 0

    def __call__(self, step: int, loss: Tensor, grad_norm: Tensor) -> int:
        """-> the number of the signal that all ranks now know of, or 0."""
        self.flush()
        bad_rank = torch.where((loss + grad_norm).isfinite(), 0.0, self.world.rank + 1.0)
        votes = torch.stack([bad_rank, torch.full_like(bad_rank, self.stop_signal.number)])
        if self.world.size > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        event = torch.cuda.Event() if loss.is_cuda else None
        self.unread = (step, torch.stack([*votes, loss, grad_norm]).to("cpu", non_blocking=True), event)
        event.record() if event else self.flush()
        return self.stop

    def flush(self) -> None:
        if self.unread is None:
            return
        (step, values, event), self.unread = self.unread, None
        if event:
            event.synchronize()
        bad_rank, stop, self.loss, grad_norm = values.tolist()
        self.stop = int(stop)
        if bad_rank:
            raise InputError(f"step {step}, rank {int(bad_rank) - 1}: the loss or the gradient is not finite (on rank "
                             f"{self.world.rank}: loss {self.loss}, gradient norm {grad_norm}); lower the learning "
                             "rates, or look at what was changed last")

def synchronized_ms(world: World) -> float:
    """The clock, read when all ranks and their devices are done with what was asked of them."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.size > 1:
        dist.barrier()
    return 1000 * time.perf_counter()

def peak_memory(world: World) -> str:
    if world.device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:  # a CPU process has its peak resident set, and no caching allocator with a reserve
        allocated = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"peak memory allocated: {allocated // 2**20} MiB reserved: {reserved // 2**20} MiB"

def describe_result(hp: Hyperparameters, validations: list[tuple[int, float, float]]) -> str:
    """The line after the last validation. validations: (step, val_loss, training time in ms)."""
    step, val_loss, total_ms = validations[-1]
    met = next((v for v in validations if v[1] <= hp.target_val_loss), None)
    verdict = f"met at step {met[0]} after {met[2] / 1000:.2f} s of training" if met else "not met"
    bits = f" ({val_loss / math.log(2):.4f} bits per byte)" if hp.vocab_size == 257 else ""  # a byte-level track
    speed = f"{hp.batch_tokens * step / (total_ms / 1000):,.0f} tokens/s"
    return f"target {hp.target_val_loss}: {verdict}; val_loss {val_loss:.4f}{bits} after {total_ms / 1000:.2f} s, {speed}"

def describe_runs(hp: Hyperparameters, results: list[tuple[int, float, float]]) -> str:
    """n, mean, deviation, and Student's one-sided p-value that the mean loss is below the target."""
    from scipy import stats
    losses, times = np.array(results)[:, 1], np.array(results)[:, 2] / 1000
    p = stats.ttest_1samp(losses, hp.target_val_loss, alternative="less").pvalue
    return (f"{len(losses)} runs: val_loss {losses.mean():.4f}, standard deviation {losses.std(ddof=1):.4f}, p-value of "
            f"being below {hp.target_val_loss} {p:.2g}; training time {times.mean():.2f} s, {times.std(ddof=1):.2f}")

def run(args: argparse.Namespace, hp: Hyperparameters, world: World, parts: tuple, resumed: dict | None,
        differences: list[str], warm: bool) -> tuple[int, float, float]:
    """One counted run with a log of its own. -> its last validation: (step, val_loss, training time in ms)."""
    model, compiled, optimizers, buckets, stop_signal = parts
    settings = dict(track=args.track, **dataclasses.asdict(hp))
    log = Log(world, args.log_dir, hp.num_iterations, *((resumed["run_id"], resumed["log_size"]) if resumed else ()))
    if world.rank == 0 and log.is_new:
        for part in (SOURCE, "=" * 100, describe_machine(world), "=" * 100):
            log.write(part, console=False)
        log.write(f"hyperparameters: {json.dumps(dict(settings, world_size=world.size))}", console=False)
        if hp.train_seq_len != TRACKS[args.track].train_seq_len:
            log.write(f"train_seq_len {hp.train_seq_len} (track: {TRACKS[args.track].train_seq_len}): "
                      f"{hp.num_sequences} sequences a step, {hp.batch_tokens} tokens as before")
    if warm:
        initialize(model, optimizers, hp, world)
    else:
        begun = time.perf_counter()
        warm_up(compiled, optimizers, buckets, hp, world)
        log.write(f"warm-up: {hp.warmup_steps} steps and compilation took {time.perf_counter() - begun:.1f} s, untimed")
        if stop_signal.number:
            os._exit(128 + stop_signal.number)  # there is nothing to save yet
    train_ms, validations, first_step = 0.0, [], 0
    if resumed:
        load_checkpoint(resumed, model, optimizers, world)
        first_step, train_ms, validations = resumed["step"], resumed["train_time_ms"], resumed["validations"]
        forced = f", by resume_force ({'; '.join(differences)}): no record" if differences else ""
        log.write(f"resume: from step {first_step}, on {world.size} process{'es' * (world.size > 1)}{forced}")
    folder, check = Path(args.checkpoint_dir) / log.run_id, StepCheck(world, stop_signal)

    def checkpoint(step):
        begun = time.perf_counter()
        progress = dict(run_id=log.run_id, step=step, tokens=step * hp.batch_tokens, train_time_ms=train_ms,
                        validations=validations, log_size=log.size())
        save_checkpoint(folder, model, optimizers, progress, settings, world)
        log.write(f"checkpoint: step {step} written in {time.perf_counter() - begun:.1f} s, untimed")

    data = dict(vocab_size=hp.vocab_size, device=world.device)
    batches = distributed_data_generator(hp.train_files, hp.batch_tokens, world.rank, world.size, **data,
                                         first_batch=first_step)
    started = synchronized_ms(world)  # the clock runs while training, and for nothing else
    for step in range(first_step, hp.num_iterations + 1):
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            train_ms += synchronized_ms(world) - started
            check.flush()
            sequences = distributed_data_generator(hp.val_files, hp.val_seq_len, 0, 1, **data)
            # the same sequences whatever the world size
            mine = itertools.islice(sequences, world.rank, hp.val_tokens // hp.val_seq_len, world.size)
            val_loss = evaluate(compiled, mine, get_window_blocks(step, hp), hp, world)
            if not math.isfinite(val_loss):
                raise InputError(f"step {step}: the validation loss is not finite ({val_loss}); lower the learning rates, "
                                 "or look at what was changed last")
            validations.append((step, val_loss, train_ms))
            log.write(f"step:{step}/{hp.num_iterations} val_loss:{val_loss:.4f} train_time:{train_ms:.0f}ms "
                      f"step_avg:{train_ms / max(step, 1):.2f}ms")
            if last_step:
                break
            started = synchronized_ms(world)
        set_schedules(optimizers, step, hp)
        inputs, targets = next(batches)
        losses = train_step(compiled, optimizers, buckets, inputs, targets, get_window_blocks(step, hp), hp, world)
        stop = check(step + 1, *losses)
        ms = train_ms + 1000 * time.perf_counter() - started  # not synchronized: the host may be ahead of the GPU
        log.step(f"step:{step + 1}/{hp.num_iterations} train_time:{ms:.0f}ms step_avg:{ms / (step + 1):.2f}ms",
                 step + 1, check.loss)
        final = hp.save_checkpoint and step + 1 == hp.num_iterations
        if stop or final or (args.checkpoint_every and (step + 1) % args.checkpoint_every == 0):
            train_ms += synchronized_ms(world) - started
            check.flush()
            checkpoint(step + 1)
            if stop:
                if world.size > 1:
                    dist.barrier()  # torchrun stops all when the first leaves: none does before the file is there
                log.close()
                os._exit(128 + stop)
            started = synchronized_ms(world)
    if world.rank == 0 and (hp.save_checkpoint or args.checkpoint_every):
        save_model(folder / "model.safetensors", model, hp)
    log.write(peak_memory(world))
    log.write(describe_result(hp, validations))
    log.close()
    return validations[-1]

def train(args: argparse.Namespace, hp: Hyperparameters) -> None:
    check_hyperparameters(hp, int(os.environ.get("WORLD_SIZE", 1)))
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # one look at the data a machine
        how = (hp.vocab_size, hp.data_command)
        check_shards(hp.train_files, hp.batch_tokens, hp.num_iterations, *how, lower="--num_iterations")
        check_shards(hp.val_files, hp.val_seq_len, hp.val_tokens // hp.val_seq_len, *how, lower="--val_tokens")
    if args.checkpoint_every or hp.save_checkpoint:
        try:
            Path(args.checkpoint_dir).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"--checkpoint_dir {args.checkpoint_dir}: cannot be made ({e.strerror})") from None
    world = start_world(args.device)
    resumed, differences = None, []
    if args.resume:
        box = [read_checkpoint(args.resume, args.checkpoint_dir) if world.rank == 0 else None]
        if world.size > 1:
            dist.broadcast_object_list(box, 0, device=world.device)
        resumed, differences = box[0], check_same_run(box[0], dict(track=args.track, **dataclasses.asdict(hp)))
        if differences and not args.resume_force:
            raise InputError(f"--resume: another run ({'; '.join(differences)}); --resume_force goes on all the same")
    model = build_model(hp, world)
    parts = (model, torch.compile(model, dynamic=False), build_optimizers(model, hp),
             GradientBuckets(model.parameters(), hp.num_sequences), StopSignal(world))
    results = []
    for i in range(args.num_runs):
        seeded = dataclasses.replace(hp, seed=hp.seed + i)
        results.append(run(args, seeded, world, parts, resumed, differences, warm=i > 0))
    if args.num_runs > 1 and world.rank == 0:
        print(describe_runs(hp, results))
    if world.size > 1:
        dist.destroy_process_group()

def main(argv: list[str]) -> int:
    try:
        train(*parse_arguments(argv))
    except InputError as e:
        if isinstance(e, RankError) or int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once a machine is enough
            print(f"error: {e}", file=sys.stderr, flush=True)
        return 2
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        print(f"error: rank {os.environ.get('RANK')} lost another process, whose own error counts "
              f"({str(e).splitlines()[0][-80:]})", file=sys.stderr, flush=True)
        return 1
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
