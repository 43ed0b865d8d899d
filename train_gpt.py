"""
Trains a GPT to a target validation loss, as fast as the machine allows. One file, read top to bottom.

    ./run.sh                                               everything: packages, data, training
    python train_gpt.py --track mini                       one process, on the CPU or one GPU
    torchrun --standalone --nproc_per_node=8 train_gpt.py  the official run: FineWeb, 3.28, 8 H100s
    python train_gpt.py --help                             every hyperparameter, its type and default

What is special, against a plain GPT-2:
- Muon for the weight matrices of the blocks: momentum, orthogonalized by a Newton-Schulz iteration
- no biases, no learned norm gains; QK norm, half-truncated rotary embeddings, ReLU squared, zero-initialized
  output projections, U-net skips, value embeddings, learned residual mixing with the token embedding
- hashed n-gram embeddings beside the tokens' own, on the track shakespeare alone
- sliding-window attention inside documents, whose window grows in training; soft-capped logits, in FP8 on GPUs that can
- the same training on any number of processes: a step is a fixed set of sequences, shared out among them

Importing it runs nothing. Shapes: B sequences of S tokens, T = B * S, H heads of D channels, C = model_dim.
"""
# ---- 1. Preamble: the log carries the source, so that a log alone is enough to rerun a record and to judge it --------
with open(__file__, newline="", encoding="utf-8") as f:
    SOURCE = f.read()  # read first: an edit made while the run is on must not reach its log

import codecs, locale, os, signal, sys

def stop_before_training(number: int, frame) -> None:
    """SIGTERM or SIGINT before the first step: there is nothing to save, so the process ends at once."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"\n" * os.isatty(2) + b"stopped before the first step; nothing was trained\n")
    os._exit(128 + number)

if __name__ == "__main__":  # before the imports, which take seconds
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, stop_before_training)
    if codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":
        sys.exit("error: Python reads text as ASCII in this locale, which PyTorch can't; set PYTHONUTF8=1")

import argparse, collections, contextlib, ctypes, dataclasses, datetime, glob, importlib.util, itertools, json, math
import platform, re, subprocess, threading, time, uuid, warnings, zipfile
from pathlib import Path

# PyTorch and OpenMP read these variables when torch is imported
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
if sys.platform == "linux" and platform.machine() == "x86_64":
    # GCC 11 to 13 tune for a generic CPU where they don't know the real one, and then delete stores that PyTorch's bf16
    # transposes need (a bug like https://gcc.gnu.org/PR113255). Any named tuning avoids it; the instruction set stays.
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")

# Waiting threads sleep instead of spinning: spinning starves the others beside another busy process (README, Hardware)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import numpy as np, safetensors.torch, torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm

BLOCK_SIZE = 128  # tokens in a block of the attention mask; sequence lengths and windows are multiples of it

class InputError(Exception):
    """Something the user can mend; its message is the one line that is shown. one_rank: this rank alone has met it."""
    def __init__(self, message: str, one_rank: bool = False):
        super().__init__(message)
        self.one_rank = one_rank

@contextlib.contextmanager
def naming(task: str):
    """An OSError inside becomes the one line that says what could not be done."""
    try:
        yield
    except (OSError, RuntimeError) as e:  # torch.save turns a full disk into a RuntimeError
        raise InputError(f"{task} ({getattr(e, 'strerror', None) or str(e).splitlines()[0]})", one_rank=True) from None

# ---- 2. FP8 head and loss: forward in e4m3, gradient in e5m2 (more range, less precision) ----------------------------
FP8_MAX = 448  # the largest finite value of float8_e4m3fn

def softcap(logits: Tensor, dim: int) -> Tensor:
    """-> float32 in (0, 30): tanh soft-capping at 15 (Gemma 2, https://arxiv.org/abs/2408.00118), shifted by 15."""
    return 30 * torch.sigmoid(logits.float() / (7.5 * dim**0.5))

@torch.library.custom_op("nanogpt::head_loss", mutates_args=())
@torch.compile(dynamic=False)  # a custom op is opaque to the model's compile, so its kernels are fused here
def head_loss_op(x: Tensor, w: Tensor, targets: Tensor, x_s: float, w_s: float,
                 grad_s: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The cross-entropy of softcap(x @ w.T, in) in nats, summed over tokens, the product in FP8. x (T, in) and
    w (out, in) of any float type, targets (T,) -> the loss in float32, and for backward the logits in bf16, their logsumexp
    and both FP8 operands. x_s, w_s, grad_s: what one unit of the FP8 operand stands for, so that x is about x_s * x_f8."""
    x_f8, w_f8 = (x / x_s).to(torch.float8_e4m3fn), (w / w_s).to(torch.float8_e4m3fn)
    x_s, w_s = (torch.full((), s, dtype=torch.float32, device=x.device) for s in (x_s, w_s))
    # _scaled_mm wants its second operand column-major: the transpose of a row-major w is just that
    logits = torch._scaled_mm(x_f8, w_f8.T, scale_a=x_s, scale_b=w_s, out_dtype=torch.bfloat16, use_fast_accum=True)
    lse = softcap(logits, w.size(1)).exp().sum(dim=-1).log()  # nothing to subtract first: exp(30) is far from overflow
    chosen = softcap(logits.gather(1, targets[:, None]), w.size(1))[:, 0]
    return (lse - chosen).sum(), logits, lse, x_f8, w_f8

head_loss_op.register_fake(lambda x, w, targets, x_s, w_s, grad_s: (
    x.new_empty((), dtype=torch.float32), x.new_empty(x.size(0), w.size(0), dtype=torch.bfloat16),
    x.new_empty(x.size(0), dtype=torch.float32),
    x.new_empty(x.shape, dtype=torch.float8_e4m3fn), w.new_empty(w.shape, dtype=torch.float8_e4m3fn)))

@torch.library.custom_op("nanogpt::head_loss_backward", mutates_args=())
@torch.compile(dynamic=False)
def head_loss_backward_op(grad: Tensor, logits: Tensor, lse: Tensor, x_f8: Tensor, w_f8: Tensor, targets: Tensor,
                          x_s: float, w_s: float, grad_s: float) -> tuple[Tensor, Tensor]:
    """grad of the loss -> grad_x (T, in) in bf16, grad_w (out, in) in float32, both with exact accumulation. The gradient
    of the logits exists in FP8 alone, written in both layouts by the kernel that computes it: no tensor is larger."""
    capped, softcap_backward = torch.func.vjp(lambda z: softcap(z, w_f8.size(1)), logits.float())
    one_hot = torch.arange(logits.size(1), device=logits.device) == targets[:, None]
    grad_logits, = softcap_backward(grad * ((capped - lse[:, None]).exp() - one_hot.float()))
    grad_f8 = (grad_logits / grad_s).to(torch.float8_e5m2)
    x_s, w_s, grad_s = (torch.full((), s, dtype=torch.float32, device=grad.device) for s in (x_s, w_s, grad_s))
    grad_x = torch._scaled_mm(grad_f8, w_f8.T.contiguous().T, scale_a=grad_s, scale_b=w_s, out_dtype=torch.bfloat16)
    grad_w = torch._scaled_mm(grad_f8.T.contiguous(), x_f8.T.contiguous().T, scale_a=grad_s, scale_b=x_s,
                              out_dtype=torch.float32)
    return grad_x, grad_w

head_loss_backward_op.register_fake(lambda grad, logits, lse, x_f8, w_f8, targets, x_s, w_s, grad_s: (
    grad.new_empty(x_f8.shape, dtype=torch.bfloat16), grad.new_empty(w_f8.shape, dtype=torch.float32)))

def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*output[1:], inputs[2])
    ctx.scales = inputs[3:]
    ctx.set_materialize_grads(False)

head_loss_op.register_autograd(lambda ctx, grad, *_: (
    *torch.ops.nanogpt.head_loss_backward(grad, *ctx.saved_tensors, *ctx.scales), *4 * [None]),
    setup_context=_save_for_backward)

# ---- 3. Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon) ----------------------------------------------
def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalizes each matrix of G (..., m, n): U S V^T becomes about U V^T, in half precision, same shape.
    A quintic Newton-Schulz iteration whose coefficients maximize the slope at zero, at the price of not
    converging: singular values end anywhere in about [0.5, 1.5], which does the optimizer no harm."""
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

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to PyTorch 2.12

class Muon(torch.optim.Optimizer):
    """MomentUm Orthogonalized by Newton-schulz, for the weight matrices of the blocks and nothing else.
    Parameters (..., rows, cols) are stacks of matrices, each orthogonalized by itself, those of a shape in one batch.
    With a process group, every rank keeps the momentum of every world_size-th parameter alone, and computes its update;
    those of a shape are then gathered, in bf16, while the next ones are computed. All ranks need equal gradients.
    With beta2, NorMuon (https://arxiv.org/abs/2510.05491): an update's channels, on the longer side, get one size."""
    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, ns_steps=5, beta2=0.0):
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        groups = {}  # by shape, whether a matrix stands or lies; in the order of params, as all ranks must agree
        for p in params:
            groups.setdefault((*p.shape[:-2], *sorted(p.shape[-2:])), []).append(p)
        super().__init__([dict(params=group) for group in groups.values()],
                         dict(lr=lr, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, beta2=beta2))

    def _state(self, p: Tensor, group: dict) -> dict:
        """The momentum, and for NorMuon a mean square for each channel on the longer side."""
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if group["beta2"]:
                self.state[p]["mean_squares"] = p.new_zeros(*p.shape[:-2], max(p.shape[-2:]))
        return self.state[p]

    def _update(self, params: list[Tensor], group: dict) -> Tensor:
        """The updates of a group's parameters, in one batch: (N, numel) in bf16."""
        matrices = []
        for p in params:
            buf = self._state(p, group)["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            g = p.grad.lerp(buf, group["momentum"]) if group["nesterov"] else buf
            matrices.append(g.mT if g.size(-2) > g.size(-1) else g)  # tall ones lie down, to be as wide ones are
        updates = zeropower_via_newtonschulz5(torch.stack(matrices), group["ns_steps"])
        if group["beta2"]:
            side = -1 if updates.size(-2) == updates.size(-1) else -2  # the mean is over: a square matrix's columns
            states, updates = [self.state[p]["mean_squares"] for p in params], updates.float()
            torch._foreach_lerp_(states, updates.square().mean(side).unbind(), 1 - group["beta2"])
            even = updates * torch.stack(states).clamp_min(1e-10).rsqrt().unsqueeze(side)
            updates = updates.norm(dim=(-2, -1), keepdim=True) * F.normalize(even, dim=(-2, -1))
        updates = [(u.mT if p.size(-2) > p.size(-1) else u).flatten() for p, u in zip(params, updates)]
        return torch.stack(updates).bfloat16()

    def gather_state(self) -> None:
        """Gives every rank the state of all parameters, for a checkpoint: all ranks must call this."""
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                for buf in self._state(p, group).values():
                    if self.world_size > 1:
                        dist.broadcast(buf, i % self.world_size)

    def _apply(self, group: dict, updates: Tensor, handle) -> None:
        if handle is not None:
            handle.wait()
        for i, p in enumerate(group["params"]):
            scale = max(1, p.size(-2) / p.size(-1)) ** 0.5  # tall matrices: the same RMS of the output's change
            p.add_(updates[i % self.world_size, i // self.world_size].view_as(p), alpha=-group["lr"] * scale)

    @torch.no_grad()
    def step(self):
        pending = None  # the group whose updates are under way while the next one's are computed
        for group in self.param_groups:
            params, handle = group["params"], None
            mine = params[self.rank::self.world_size]
            mine = self._update(mine, group) if mine else params[0].new_empty(0, params[0].numel(), dtype=torch.bfloat16)
            updates = mine[None]  # (world_size, parameters a rank, numel)
            if self.world_size > 1:  # equally many of every rank: nothing in place of a parameter too few
                mine = F.pad(mine, (0, 0, 0, math.ceil(len(params) / self.world_size) - len(mine)))
                updates = mine.new_empty(self.world_size, *mine.shape)
                handle = all_gather(updates.view(-1), mine.view(-1), async_op=True)
            if pending is not None:
                self._apply(*pending)
            pending = group, updates, handle
        self._apply(*pending)

# ---- 4. The model ----------------------------------------------------------------------------------------------------
def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),))

class CastedLinear(nn.Linear):
    """A linear layer without bias: weights (out, in) kept in float32, cast to the type of x (..., in) where used."""
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self):
        bound = 3**0.5 * 0.5 * self.in_features**-0.5  # uniform with standard deviation 0.5 / sqrt(in)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
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

    first, last = docs.view(-1, BLOCK_SIZE)[:, 0], docs.view(-1, BLOCK_SIZE)[:, -1]  # documents are in order
    i = torch.arange(len(first), dtype=torch.int32, device=docs.device)
    distance = i[:, None] - i  # (N, N): query block - key block
    in_window = (distance >= 0) & (distance < window_blocks)
    some = in_window & (first[:, None] <= last)  # the query's first document is not past the key's last
    every = in_window & (distance > 0) & (first[:, None] == last) & (last[:, None] == first)
    # Nothing is sorted: the key blocks that a query block sees are a run that ends with itself, and those seen whole a
    # run just before itself; from a key block, such runs begin with and behind itself. What follows a list is not read.
    own, (seen, whole), (seers, whole_seers) = i[:, None], *(
        [blocks.sum(dim, dtype=torch.int32)[:, None] for blocks in (some, every)] for dim in (1, 0))  # each (N, 1)
    keys, whole_keys = own + 1 - seen + i, own - whole + i  # (N, N)
    keys = keys + whole * (keys >= own - whole)  # the whole ones are left out
    queries, whole_queries = own + i + whole_seers * (i > 0), own + 1 + i
    lists = (seen - whole, keys), (whole, whole_keys), (seers - whole_seers, queries), (whole_seers, whole_queries)
    lists = [t[None, None] for count, order in lists for t in (count[:, 0], order.clamp_max(len(first) - 1))]
    return BlockMask((len(docs), len(docs)), *lists, (BLOCK_SIZE, BLOCK_SIZE), document_causal)

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
    def __init__(self, hp: "Hyperparameters", rotary: Rotary):
        super().__init__()
        self.num_heads, self.head_dim, self.rotary = hp.num_heads, hp.head_dim, rotary
        hdim = hp.num_heads * hp.head_dim
        bound = 3**0.5 * 0.5 * hp.model_dim**-0.5
        self.qkv_w = nn.Parameter(torch.empty(3, hdim, hp.model_dim).uniform_(-bound, bound))  # merged Q, K, V
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
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
    def __init__(self, hp: "Hyperparameters", layer: int, rotary: Rotary):
        super().__init__()
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attn = None if layer in hp.attn_free_layers else CausalSelfAttention(hp, rotary)
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
    val_slice = 32768  # tokens whose logits exist at once in evaluation: those of a FineWeb sequence are 26 GB

    def __init__(self, hp: "Hyperparameters", dtype=torch.bfloat16, use_fp8=False):
        super().__init__()
        self.hp = hp
        k, n = hp.num_value_embeds, hp.num_layers
        # registered in the order of the forward pass: the gradient buckets count on it
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim, dtype=dtype)
        # hashed n-gram embeddings (Byte Latent Transformer, https://arxiv.org/abs/2412.09871; bigrams in the speedrun's
        # record 62): n = 2, 3, ... have a table each, and an equal share of the channels
        self.ngram_embed = None
        if (tables := hp.max_ngram - 1) > 0:
            self.ngram_embed = nn.Embedding(tables * hp.ngram_rows, hp.model_dim // tables, dtype=dtype)
            self.ngram_embed.weight.data.zero_()
        # value embeddings (Zhou et al. 2024, https://arxiv.org/abs/2410.17897): first and last k layers share k tables
        hdim = hp.num_heads * hp.head_dim
        self.value_embeds = nn.ModuleList(nn.Embedding(hp.vocab_size, hdim, dtype=dtype) for _ in range(k))
        self.ve_of_layer = {i: i for i in range(k)} | {n - k + i: i for i in range(k)}
        rotary = Rotary(hp.head_dim, max(hp.train_seq_len, hp.val_seq_len))  # one table for all layers
        self.blocks = nn.ModuleList(Block(hp, i, rotary) for i in range(n))
        self.skip_weights = nn.Parameter(torch.ones(n // 2)) if n > 1 else None
        self.use_fp8, self.lm_head = use_fp8, CastedLinear(hp.model_dim, hp.padded_vocab_size)
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
            # (T, tables, C / tables) -> (T, C). Indexed on a CPU: an nn.Embedding's gradient takes a float32 copy of
            # the table, which a GPU needs: its atomic sums in bf16 would lose what frequent rows add up
            x = x + (self.ngram_embed(rows) if rows.is_cuda else self.ngram_embed.weight[rows]).flatten(1)
        x = x0 = norm(x)[None]  # (1, T, C)
        skips, n = [], self.hp.num_layers // 2
        for i, block in enumerate(self.blocks):
            if i >= self.hp.num_layers - n:  # second half of the U-net: add what the first half stored
                x = x + self.skip_weights[i - (self.hp.num_layers - n)] * skips.pop()
            ve = value_embeds[self.ve_of_layer[i]] if i in self.ve_of_layer else None
            x = block(x, x0, ve, masks[i], seq_len)
            if i < n:
                skips.append(x)
        x, targets = norm(x)[0], target_seq.flatten()
        if self.training:
            return self.loss(x, targets)
        return sum(map(self.loss, x.split(self.val_slice), targets.split(self.val_slice))) / len(targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (T, C), targets (T,) -> the cross-entropy in nats, summed over tokens."""
        if not (self.use_fp8 and self.training):
            return F.cross_entropy(softcap(self.lm_head(x), self.hp.model_dim), targets, reduction="sum")
        # x is RMS-normed, so no element exceeds sqrt(C); the loss is a sum over tokens, of which a step counts
        # 1 / num_sequences (see train_step), so that gradients are within that
        x_s, w_s, grad_s = self.hp.model_dim**0.5 / FP8_MAX, 24 / FP8_MAX, 1 / FP8_MAX / self.hp.num_sequences
        return torch.ops.nanogpt.head_loss(x, self.lm_head.weight, targets, x_s, w_s, grad_s)[0]

# ---- 5. Data: shards of 256 little-endian int32 (magic, version, number of tokens, zeros), then uint16 tokens --------
def shard_length(file: Path) -> int:
    """The number of tokens that the shard's header and its size agree on."""
    with naming(f"cannot read {file}"):
        header, size = np.fromfile(file, dtype="<i4", count=256), file.stat().st_size
    if len(header) < 256 or tuple(header[:2]) != (20240520, 1) or size != 1024 + 2 * int(header[2]):
        raise InputError(f"{file}: {size} bytes that begin with {header[:3]} are no shard of tokens; make it again")
    return int(header[2])

def read_tokens(file: Path, start: int, count: int, vocab_size: int) -> np.ndarray:
    """(count,) uint16. Read, not memory-mapped: a shard cut short under a running job is an error, not a SIGBUS."""
    with naming(f"cannot read {file}"):
        tokens = np.fromfile(file, dtype="<u2", count=count, offset=1024 + 2 * start)
        if len(tokens) < count:
            raise OSError(f"it ends before token {start + count}; was it changed while the run was on?")
        if tokens.max() >= vocab_size:
            raise OSError(f"token {tokens.max()} is outside the vocabulary of {vocab_size}; another track's?")
    return tokens

def global_batches(pattern: str, batch_size: int):
    """Yields every batch's shard and first token, in sorted order. A rest too short for a batch and the token after it
    is left. A relative pattern is looked for here, then beside this file."""
    files = sorted(glob.glob(pattern)) or sorted(glob.glob(str(Path(__file__).resolve().parent / pattern)))
    if not files:
        raise InputError(f"no shards match {pattern}; data/cached_fineweb10B.py or data/shakespeare.py makes them")
    for file in map(Path, files):
        for start in range(0, shard_length(file) - batch_size, batch_size):
            yield file, start

def check_shards(pattern: str, batch_size: int, steps: int, vocab_size: int, lower: str = "") -> None:
    """Reads all that the run will read: an InputError now, not an hour into training. `lower` asks for fewer steps."""
    batches = list(itertools.islice(global_batches(pattern, batch_size), steps))
    if len(batches) < steps:
        raise InputError(f"{pattern}: tokens for {len(batches)} batches of {batch_size}, but {steps} are asked for; "
                         f"add shards or lower {lower}")
    for file, start in batches:
        read_tokens(file, start, batch_size + 1, vocab_size)

def distributed_data_generator(pattern: str, batch_size: int, rank: int, world_size: int, vocab_size: int = 65536,
                               device: str | torch.device = "cpu", first_batch: int = 0):
    """Yields (inputs int32, targets int64), each (batch_size / world_size,): this rank's slice of every batch."""
    local = batch_size // world_size
    for file, start in itertools.islice(global_batches(pattern, batch_size), first_batch, None):
        tokens = torch.from_numpy(read_tokens(file, start + rank * local, local + 1, vocab_size).astype(np.int32))
        inputs, targets = tokens[:-1], tokens[1:].long()
        if torch.device(device).type == "cuda":
            inputs, targets = (t.pin_memory().to(device, non_blocking=True) for t in (inputs, targets))
        yield inputs, targets

# ---- 6. Hyperparameters and tracks. The defaults are the official FineWeb track; `--field value` sets any of them ----
@dataclasses.dataclass
class Hyperparameters:
    track: str = "fineweb"             # whose defaults all the others are
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # pattern of the training shards, read in sorted order
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"      # pattern of the validation shards
    val_tokens: int = 10_485_760       # how many tokens to validate on: fixed, or losses don't compare
    batch_tokens: int = 8 * 48 * 1024  # tokens a step, whatever the number of processes
    train_seq_len: int = 48 * 1024     # tokens a sequence; halve it on a small card, the step keeps its tokens
    val_seq_len: int = 4 * 64 * 1024   # tokens a sequence in validation
    sequences_per_pass: int = 1        # at most so many sequences go through the model at once
    vocab_size: int = 50257            # token ids lie below
    eot_token: int = 50256             # the token that begins a document
    # model
    num_layers: int = 12               # blocks of attention and MLP
    num_heads: int = 6                 # of attention
    head_dim: int = 128                # channels a head
    model_dim: int = 768               # channels of the residual stream
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
    final_lr_frac: float = 0.1         # what they fall to, of themselves
    head_lr: float = 0.22              # Adam's learning rate for the head
    embed_lr: float = 0.6              # Adam's for the embedding tables of tokens, n-grams and values
    scalar_lr: float = 0.04            # Adam's for all that is not a matrix: lambdas, skip weights
    adam_beta1: float = 0.8            # decay of Adam's first moment
    adam_beta2: float = 0.95           # decay of its second
    adam_eps: float = 1e-10            # far below the usual 1e-8, which would drown rare tokens' second moments
    muon_lr: float = 0.05              # for the matrices of the blocks
    ns_steps: int = 5                  # of the Newton-Schulz iteration
    muon_momentum: float = 0.95        # Muon's momentum after its warm-up
    muon_momentum_start: float = 0.85  # momentum rises from here
    muon_momentum_warmup: int = 300    # over so many steps
    muon_beta2: float = 0.0            # decay of NorMuon's mean squares (record 41); 0: Muon without them
    # the run
    seed: int = 0                      # of the initial weights
    warmup_steps: int = 10             # untimed steps that compile and leave no trace
    val_loss_every: int = 125          # validate every so many steps; 0: only at the end
    target_val_loss: float = 3.28      # what the track races to
    save_checkpoint: bool = False      # save the final model and optimizers

    num_sequences = property(lambda self: self.batch_tokens // self.train_seq_len)     # of a step
    padded_vocab_size = property(lambda self: math.ceil(self.vocab_size / 128) * 128)  # matmuls like multiples of 128

TRACKS = {
    "fineweb": Hyperparameters(),
    "mini": Hyperparameters(  # the official model in miniature, on the plays as bytes, for two CPU cores
        track="mini", train_files="data/shakespeare/shakespeare_train_*.bin",
        val_files="data/shakespeare/shakespeare_val_*.bin", val_tokens=389_120, batch_tokens=4096, train_seq_len=1024,
        val_seq_len=12_160, sequences_per_pass=4, vocab_size=257, eot_token=256, num_layers=4, num_heads=2, head_dim=64,
        model_dim=128, num_value_embeds=1, attn_free_layers=(), long_window_layers=(0, 3), max_window=256,
        num_iterations=385, cooldown_frac=1.0, final_lr_frac=0.0, head_lr=0.1, embed_lr=0.2, adam_beta2=0.98,
        muon_momentum=0.9, muon_momentum_warmup=100, muon_beta2=0.95, warmup_steps=3, target_val_loss=1.50),
}
TRACKS["shakespeare"] = dataclasses.replace(  # the open race on the same bytes: anything goes
    TRACKS["mini"], track="shakespeare", train_seq_len=256, sequences_per_pass=16, num_layers=1, num_heads=1,
    num_value_embeds=0, max_ngram=5, ngram_rows=32768, long_window_layers=(0,), num_iterations=170, head_lr=0.2,
    adam_beta1=0.5, adam_beta2=0.99, muon_lr=0.04, ns_steps=3, muon_momentum_warmup=0, muon_beta2=0.0, val_loss_every=85)

RULES = f"""
train_seq_len % {BLOCK_SIZE} == 0; val_seq_len % {BLOCK_SIZE} == 0; batch_tokens % train_seq_len == 0; val_tokens % val_seq_len == 0
eot_token < vocab_size; head_dim % 4 == 0; 2 * num_value_embeds <= num_layers
all(i in range(num_layers) for i in attn_free_layers + long_window_layers)
max_ngram <= {BLOCK_SIZE}; max_ngram == 1 or model_dim % (max_ngram - 1) == 0; ngram_rows <= 2**31
cooldown_frac <= 1; adam_beta1 < 1; adam_beta2 < 1; muon_momentum < 1; muon_momentum_start < 1; muon_beta2 < 1
"""  # what every set of hyperparameters keeps, in Python

def check_hyperparameters(hp: Hyperparameters, world_size: int, device: str = "cpu") -> None:
    """Raises InputError for what cannot be trained."""
    may_be_zero = re.compile("eot_token|num_value_embeds|seed|warmup|every|lr|beta|momentum")
    for name, value in vars(hp).items():
        zero = bool(may_be_zero.search(name))
        if type(value) in (int, float) and not (math.isfinite(value) and (value > 0 or value == 0 and zero)):
            raise InputError(f"--{name} {value}: must be finite, {'zero or more' if zero else 'more than zero'}")
    for rule in filter(None, re.split(r"[;\n]\s*", RULES)):
        if not eval(rule, dict(vars(hp))):
            given = [f"--{name} {value}" for name, value in vars(hp).items() if re.search(rf"\b{name}\b", rule)]
            raise InputError(f"{', '.join(given)}: must keep the rule {rule}")
    if device == "cuda" and hp.head_dim < 16:
        raise InputError(f"--head_dim {hp.head_dim}: must be at least 16 on a GPU (FlexAttention)")
    if device == "cuda" and uses_fp8(hp) and hp.model_dim % 16:
        raise InputError(f"--model_dim {hp.model_dim}: must be a multiple of 16 for the FP8 head; "
                         "change it, or give --fp8 false")
    val_sequences = hp.val_tokens // hp.val_seq_len
    most = math.gcd(hp.num_sequences, val_sequences)
    if most % world_size:
        fits = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise InputError(f"{world_size} processes cannot share {hp.num_sequences} training and {val_sequences} "
                         f"validation sequences equally; use {fits}")

def fitted(hp: Hyperparameters, mib: float) -> Hyperparameters:
    """Halves train_seq_len until a step fits into `mib` MiB of GPU memory. A step keeps its tokens.
    In the caching allocator, a step with the FP8 head takes 3,144 MiB and 0.538 a token, and
    validation 11,069 (PyTorch 2.13). A bf16 head takes less. The formula adds some for libraries
    that allocate by themselves. Below 12288 tokens, validation is what does not fit."""
    while 3700 + 0.56 * hp.train_seq_len > mib and hp.train_seq_len > 12288:
        hp = dataclasses.replace(hp, train_seq_len=hp.train_seq_len // 2)
    return hp

def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Hyperparameters]:
    """The options, and the track's hyperparameters with what the command line changes in them."""
    def fail(message):
        raise InputError(f"{message}; --help lists what there is")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, description=__doc__.split("\n\n")[0],
                                     usage="train_gpt.py [--track NAME] [--device NAME] [--FIELD VALUE ...]")
    parser.error = fail
    parser.register("type", bool, lambda text: bool(json.loads(text.lower())))
    parser.register("type", tuple, lambda text: tuple(json.loads(f"[{text}]")))
    add = parser.add_argument
    add("--track", choices=TRACKS, help="default: fineweb where CUDA is, otherwise mini")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--log_dir", default="logs", help="default: logs")
    add("--num_runs", type=int, default=1, metavar="N", help="runs, with seeds seed, seed + 1, ...; default: 1")
    add("--checkpoint_dir", default="checkpoints", help="default: checkpoints")
    add("--checkpoint_every", type=int, default=0, metavar="N", help="steps; default: 0, never")
    add("--resume", metavar="PATH", help="a checkpoint, a run's folder of them, or: latest")
    add("--resume_force", action="store_true", help="even if source or settings differ (no record)")
    args = parser.parse_known_args(argv)[0]
    # also choose a GPU that PyTorch cannot use: check_gpus() then says why
    on_cuda = args.device != "cpu" and (cuda_is_available() or visible_gpu() != "")
    hp = TRACKS[args.track or ("fineweb" if on_cuda else "mini")]
    parser.set_defaults(track=hp.track, device="cuda" if on_cuda else "cpu")
    add("-h", "--help", action="help", help="show this and exit")
    fields = parser.add_argument_group(f"hyperparameters, with the defaults of track {hp.track}")
    meaning = dict(re.findall(r"^    (\w+): .*?  # (.*)$", SOURCE, re.M))  # of each field: the comment beside it
    for name, value in list(vars(hp).items())[1:]:
        shown = ",".join(map(str, value)) if type(value) is tuple else value
        fields.add_argument(f"--{name}", type=type(value), default=value, metavar=type(value).__name__,
                            help=f"{meaning[name]}; default: {shown}",
                            **(dict(nargs="?", const=True) if type(value) is bool else {}))
    args = parser.parse_args(argv)
    seq_len_given = any(argument.split("=")[0] == "--train_seq_len" for argument in argv)
    args.fit_memory = args.device == "cuda" and hp.track == "fineweb" and not seq_len_given
    if args.num_runs < 1 or args.checkpoint_every < 0 or (args.num_runs > 1 and args.resume):
        fail("--num_runs must be at least 1, and 1 with --resume; --checkpoint_every must not be negative")
    return args, Hyperparameters(**{name: getattr(args, name) for name in vars(hp)})

# ---- 7. Processes and machines ---------------------------------------------------------------------------------------
World = collections.namedtuple("World", "rank size device")

# the CPU's model, the cores that this process may use, and its instruction sets as the kernel names them
def text_of(path: str) -> str:
    """The file's text; "" if there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

def cpu_quota(folder: str = "/sys/fs/cgroup") -> float:
    """How many CPUs' worth of time a container may use, from its control group; infinity without a limit."""
    quota, period = (text_of(f"{folder}/cpu.max").split() + ["max", "1"])[:2]  # version 2: "50000 100000" or "max 100000"
    if quota == "max":  # version 1: where no limit is -1
        quota = text_of(f"{folder}/cpu/cpu.cfs_quota_us").strip()
        period = text_of(f"{folder}/cpu/cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() else math.inf

_cpu = text_of("/proc/cpuinfo")
_cpu = dict(re.findall(r"^(\S[^\t:]*)\s*: (.*)$", _cpu, re.M))
CPU_MODEL = _cpu.get("model name") or platform.machine()
CPU_FLAGS = set(f"{_cpu.get('flags')} {_cpu.get('Features')}".split())
CPU_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
CPU_CORES = max(1, int(min(CPU_CORES, cpu_quota())))

def activation_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it, float32 on other CPUs."""
    return torch.bfloat16 if device.type == "cuda" or CPU_FLAGS & {"avx512_bf16", "amx_bf16", "bf16"} else torch.float32

def cuda_is_available() -> bool:
    """torch.cuda.is_available() without its warning about the driver: check_gpus() says that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()

def visible_gpu() -> str:
    """The make of this machine's GPU, whether or not PyTorch can use it. "" if there is none, or if
    the user hides it. Only Linux has these files. A small AMD GPU is part of a CPU."""
    hidden = ("", "-1", "NoDevFiles")  # the last one is Slurm's
    if os.environ.get("CUDA_VISIBLE_DEVICES") in hidden:
        return ""
    if glob.glob("/dev/nvidia[0-9]*"):
        return "NVIDIA"
    if os.path.exists("/dev/kfd"):
        for file in glob.glob("/sys/class/drm/card*/device/mem_info_vram_total"):
            if int(Path(file).read_text(encoding="utf-8")) >= 8 * 2**30:
                return "AMD"
    return ""

def why_no_gpu() -> str:
    """Says why PyTorch can't use a GPU here, and what to do about it."""
    make = visible_gpu()
    software = "ROCm" if make == "AMD" else "CUDA"
    built_for = torch.version.hip if make == "AMD" else torch.version.cuda
    if not make:
        return "--device cuda: PyTorch finds no GPU on this machine; give --device cpu"
    if built_for is None:
        return (f"this machine has an {make} GPU, but PyTorch {torch.__version__} is built without "
                f"{software}: install a build with {software} "
                "(https://pytorch.org/get-started/locally), or give --device cpu")
    reason = "it does not say why"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as e:  # the first sentence of what PyTorch says
        reason = str(e).splitlines()[0].split(". ")[0].rstrip(".")
    remedy = "check its driver"
    driver = {"11": 450, "12": 525, "13": 580}.get(built_for.split(".")[0])  # of NVIDIA's, on Linux
    if make == "NVIDIA" and driver:
        remedy = f"check that its driver is {driver} or later (nvidia-smi shows it)"
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        remedy += f", change CUDA_VISIBLE_DEVICES={chosen}"
    return (f"PyTorch {torch.__version__} for {software} {built_for} cannot use this machine's "
            f"{make} GPU ({reason}): {remedy}, or give --device cpu")

def oldest_gpu() -> tuple[tuple[int, int], str]:
    """The smallest compute capability of the GPUs that this machine's processes use."""
    gpus = range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return min((torch.cuda.get_device_capability(i), torch.cuda.get_device_name(i)) for i in gpus)

def check_gpus() -> None:
    """Raises InputError unless each process of this machine has a GPU that can train. All of them
    look at the same GPUs, so all decide the same."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not cuda_is_available():
        raise InputError(why_no_gpu())
    gpus = torch.cuda.device_count()
    if processes > gpus:
        raise InputError(f"--device cuda: {processes} processes, but PyTorch finds {gpus} GPU(s); "
                         "use fewer processes, or give --device cpu")
    with warnings.catch_warnings():  # PyTorch warns of GPUs that it was not compiled for
        warnings.simplefilter("ignore")
        (major, minor), name = oldest_gpu()
    if torch.version.hip is None and major < 8:  # an AMD GPU's numbers mean something else
        raise InputError(f"the GPU {name} has compute capability {major}.{minor}, but training "
                         "needs 8.0 (Ampere) or later, for bfloat16 and FlexAttention; use a newer "
                         "GPU, or give --device cpu")

def uses_fp8(hp: Hyperparameters) -> bool:
    """Whether the head is in FP8 on the GPUs here. The MI300's FP8 is another type than
    float8_e4m3fn, so AMD GPUs use the bf16 head."""
    return hp.fp8 and torch.version.hip is None and oldest_gpu()[0] >= (8, 9)

def fit_to_memory(args: argparse.Namespace, hp: Hyperparameters, world: World,
                  resumed: dict) -> Hyperparameters:
    """Fits the official track's train_seq_len to the smallest free memory of all ranks' GPUs. All
    ranks get the same. A given --train_seq_len stays as it is, and so does a resumed run's."""
    if not args.fit_memory:
        return hp
    if resumed:
        return dataclasses.replace(hp, train_seq_len=resumed["settings"]["train_seq_len"])
    free = torch.cuda.mem_get_info(world.device)[0] / 2**20
    smallest = torch.full((), free, device=world.device)
    if world.size > 1:
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return fitted(hp, smallest.item())

def start_world(device_name: str) -> World:
    """Joins torchrun's process group, NCCL on CUDA and gloo on the CPU; a single process needs none."""
    rank, size, local_rank, local_size = (int(os.environ.get(name, default)) for name, default in [
        ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)])
    device = torch.device(device_name, local_rank if device_name == "cuda" else None)
    if device.type == "cuda":
        check_gpus()
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
    if size > 1:  # ten minutes: as long as one rank may wait for another that still compiles
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=10),
                                device_id=device if device.type == "cuda" else None)
    return World(rank, size, device)

def log_header(hp: Hyperparameters, world: World, compiler: str = "") -> str:
    """The source, versions, nvidia-smi or the CPU with its compiler, the settings. Names no host or user."""
    if world.device.type == "cuda":
        machine = f"{torch.cuda.get_device_name()} with world_size={world.size}: there is no nvidia-smi"
        with contextlib.suppress(FileNotFoundError):
            machine = subprocess.run(["nvidia-smi"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                     encoding="utf-8", errors="replace").stdout
        machine = re.sub(r"\n[^\n]*\n[^\n]*Processes:.*", "", machine, flags=re.S)  # that table has paths in it
    else:
        flags = sorted(f for f in CPU_FLAGS if f.startswith(("avx", "amx", "fma", "asimd", "sve", "bf16", "i8mm")))
        openmp = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("OMP_", "GOMP_"))]
        machine = (f"CPU: {CPU_MODEL}, {CPU_CORES} cores, {torch.get_num_threads()} threads a process, "
                   f"instruction sets: {' '.join(flags)}\n{compiler}\nOpenMP: {' '.join(openmp) or 'defaults'}")
    return "\n".join((
        SOURCE, "=" * 100, f"Running Python {sys.version}",
        f"Running PyTorch {torch.version.__version__} compiled for CUDA {torch.version.cuda}", machine,
        f"{world.size} process{'es' * (world.size > 1)} on {world.device.type}", "=" * 100,
        f"hyperparameters: {json.dumps(dict(dataclasses.asdict(hp), world_size=world.size))}\n"))

# ---- 8. Model, optimizers, schedules ---------------------------------------------------------------------------------
def build_model(hp: Hyperparameters, world: World) -> GPT:
    torch.manual_seed(hp.seed)
    use_fp8 = world.device.type == "cuda" and uses_fp8(hp)
    model = GPT(hp, activation_dtype(world.device), use_fp8).to(world.device)
    if world.size > 1:
        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
    return model

def build_optimizers(model: GPT, hp: Hyperparameters) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks; Adam for the head, the embeddings and all that is not a matrix."""
    matrices = [p for p in model.blocks.parameters() if p.ndim >= 2]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    embeds = [p for name, p in model.named_parameters() if "embed" in name]  # of tokens, n-grams and values
    adam = torch.optim.Adam([dict(params=[model.lm_head.weight], lr=hp.head_lr), dict(params=embeds, lr=hp.embed_lr),
                             dict(params=scalars, lr=hp.scalar_lr)],
                            betas=(hp.adam_beta1, hp.adam_beta2), eps=hp.adam_eps, fused=True)
    muon = Muon(matrices, lr=hp.muon_lr, momentum=hp.muon_momentum, ns_steps=hp.ns_steps, beta2=hp.muon_beta2)
    for group in (*adam.param_groups, *muon.param_groups):
        group["initial_lr"] = group["lr"]
    return [adam, muon]

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
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["initial_lr"] * get_lr(step, hp)
        if "momentum" in group:
            group["momentum"] = get_muon_momentum(step, hp)

# ---- 9. Compilation and warm-up: everything the run will use, on random tokens, before the clock starts --------------
CXX = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # the compiler that PyTorch calls
MAX_LOSS_ERROR = 1e-3      # relative; right builds of mini differ from the uncompiled model by up to 2e-6
MAX_GRADIENT_ERROR = 0.1   # relative, in the norm of each matrix; right builds differ by up to 1.4e-2 (in bf16)

@contextlib.contextmanager
def announced(task: str, shown: bool):
    """Prints what takes a while; on a terminal with the seconds so far."""
    started, finished = time.perf_counter(), threading.Event()

    def count_seconds():
        while not finished.wait(1):
            print(f"\r{task}: {time.perf_counter() - started:.0f} s", end="", flush=True)

    counts = shown and sys.stdout.isatty()
    if counts:
        threading.Thread(target=count_seconds, daemon=True).start()
    elif shown:
        print(task, flush=True)
    try:
        yield
    finally:
        finished.set()
        if counts:
            print(flush=True)

def compiler_version() -> str:
    """The first line of what the C++ compiler says of itself; "" if there is none that works."""
    try:
        done = subprocess.run([CXX, "--version"], capture_output=True, encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip()

def compiler_problem(error: Exception) -> str:
    """Why the C++ compiler failed, and what helps; "" for an error that isn't the compiler's."""
    text = str(error)
    if not compiler_version():
        return f"there is no working C++ compiler ({CXX}); install one (Debian, Ubuntu: apt install g++) or set CXX"
    if "No space left on device" in text:
        return "the disk is full; free 300 MB, or set TMPDIR and TORCHINDUCTOR_CACHE_DIR to folders on another disk"
    if "Python.h" in text:
        return f"{CXX} doesn't find Python.h; install Python's headers (Debian, Ubuntu: apt install python3-dev)"
    if "'openssl'" in text:
        return "PyTorch needs the command openssl to compile; install it (Debian, Ubuntu: apt install openssl)"
    if "noexec" in text or "failed to map segment" in text:
        return "the folder for compiled code is mounted noexec; set TORCHINDUCTOR_CACHE_DIR to another one"
    if "CppCompileError" in text or "C++ compile error" in text:
        found = re.search(r".*\b(?:error|fatal)\b.*", text.partition("Output:")[2])
        return f"{CXX} failed ({found[0].strip()[-200:] if found else 'without a message'}); set CXX to another compiler"
    if isinstance(error, OSError) or "OSError" in text or "PermissionError" in text:
        return (f"compiled code can't be kept or loaded ({text.strip().splitlines()[0][:200]}); set TMPDIR and "
                "TORCHINDUCTOR_CACHE_DIR to a folder that can be written")
    return ""

def randomize(model: GPT) -> None:
    """Seeded random weights of which none is zero, so that every gradient takes part in the check."""
    rng = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.ndim < 2:
            values = 0.5 + 0.5 * torch.rand(p.shape, generator=rng)
        else:
            std = 1.0 if "embed" in name else 0.5 * p.size(-1) ** -0.5
            values = std * torch.randn(p.shape, generator=rng)
        p.data.copy_(values)

def losses_and_gradients(run_model, model: GPT, hp: Hyperparameters, world: World) -> tuple[dict, dict]:
    """One micro-batch of training and one validation sequence of random tokens, through run_model: the model itself or
    compiled. -> the two losses, and the gradients of the matrices and tables, by name."""
    window_blocks = get_window_blocks(hp.num_iterations, hp)
    tokens = torch.randint(hp.vocab_size, (hp.batch_tokens + hp.val_seq_len,), generator=torch.Generator().manual_seed(0))
    x = tokens[:sequences_per_pass(hp, world) * hp.train_seq_len].view(-1, hp.train_seq_len)  # (B, S)
    model.train()
    loss = run_model(x.int(), x.roll(1), torch.full((), window_blocks, dtype=torch.int32))
    loss.backward()
    gradients = {}
    for name, p in model.named_parameters():
        if p.ndim >= 2 and p.grad is not None:  # the gradients of scalars cancel: rounding is all that is left of some
            gradients[name] = p.grad.double()
    model.zero_grad()
    x = tokens[-hp.val_seq_len:]
    val_loss = evaluate(run_model, [(x.int(), x.roll(1))], window_blocks, hp, World(0, 1, world.device))
    return {"training": loss.item(), "validation": val_loss.item()}, gradients

def wrong_results(model: GPT, compiled, hp: Hyperparameters, world: World) -> str:
    """What the compiled model computes otherwise than the uncompiled one, by more than rounding; "" if nothing."""
    losses, gradients = losses_and_gradients(compiled, model, hp, world)
    right_losses, right_gradients = losses_and_gradients(model, model, hp, world)
    if not all(math.isfinite(loss) for loss in right_losses.values()):
        return ""  # a model that overflows with these weights by itself says nothing about the compiler
    for name, right in right_losses.items():
        if not abs(losses[name] - right) <= MAX_LOSS_ERROR * right:  # "not": NaN is wrong, too
            return f"a {name} loss of {losses[name]:.6g} for {right:.6g}"
    for name, right in right_gradients.items():
        error, size = (gradients[name] - right).norm(), right.norm()
        if not error <= MAX_GRADIENT_ERROR * size:
            return f"the gradient of {name} is off by {100 * error / size:.0f}%"
    return ""

def compile_problem(model: GPT, compiled, hp: Hyperparameters, world: World) -> str:
    """Compiles the model on a CPU and checks it. -> why it can't be used, with the remedy; "" if it can."""
    randomize(model)
    try:
        wrong = wrong_results(model, compiled, hp, world)
    except (OSError, RuntimeError) as e:  # PyTorch's compilation errors are RuntimeErrors
        problem = compiler_problem(e)
        if not problem:
            raise
        return problem
    finally:
        model.zero_grad()
    return wrong and f"{CXX} makes wrong code ({wrong}); install GCC 14 or later, or set CXX to another compiler"

def compile_model(model: GPT, hp: Hyperparameters, world: World) -> tuple:
    """-> the model to train with, compiled where possible, and the log's line about it. Changes the weights."""
    compiled = torch.compile(model, dynamic=False)
    if world.device.type == "cuda":
        return compiled, ""
    tuned = torch.__version__ >= (2, 13) and "TORCHINDUCTOR_CPP_MARCH" in os.environ  # PyTorch 2.11 doesn't read it
    flags = "-march=" + (os.environ["TORCHINDUCTOR_CPP_MARCH"] if tuned else "native")
    line = f"Compiler: {compiler_version() or 'none'}; flags: {flags}; model compiled:"
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return model, f"{line} no (TORCH_COMPILE_DISABLE is set)"
    with announced("compiling the model: about a minute the first time, then seconds", world.rank == 0):
        problem = compile_problem(model, compiled, hp, world)
    first = torch.tensor(world.rank if problem else world.size)  # the first rank that can't
    if world.size > 1:
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
    if first == world.size:
        return compiled, f"{line} yes"
    if not problem:  # all ranks or none
        problem = f"rank {first.item()} can't compile it"
    if first == world.rank:
        print(f"warning: training without torch.compile, which takes about twice as long: {problem}",
              file=sys.stderr, flush=True)
    return model, f"{line} no ({problem})"

def warm_up(model, optimizers: list, buckets: "GradientBuckets", hp: Hyperparameters, world: World) -> None:
    """Compiles, starts the communicators, fills the allocator's caches; then weights and optimizers begin anew."""
    local, window_blocks = hp.batch_tokens // world.size, get_window_blocks(hp.num_iterations, hp)
    rng = torch.Generator(world.device).manual_seed(world.rank)
    tokens = torch.randint(hp.vocab_size, (max(local, hp.val_seq_len),), device=world.device, generator=rng)
    for _ in range(hp.warmup_steps):
        train_step(model, optimizers, buckets, tokens[:local].int(), tokens[:local], window_blocks, hp, world)
    if hp.warmup_steps:
        evaluate(model, [(tokens[:hp.val_seq_len].int(), tokens[:hp.val_seq_len])], window_blocks, hp, world)
    with torch.no_grad():
        for p, initial in zip(model.parameters(), build_model(hp, world).parameters()):
            p.copy_(initial)
    for optimizer in optimizers:
        optimizer.state.clear()

# ---- 10. Gradient buckets: what several processes have to exchange in a step, 25 MB at a time ------------------------
class GradientBuckets:
    """With several processes, gradients are summed over them in buckets of about 25 MB, one dtype each, filled in the
    order that backward produces them: on a step's last micro-step, one that is complete is copied into a flat buffer and
    starts one asynchronous all-reduce. Eager, that overlaps the rest of backward; compiled, the model is one graph, which
    hands out all gradients at its end, and buckets overlap each other alone. A single process moves no gradients."""
    def __init__(self, params, bucket_bytes: int = 25 * 2**20):
        self.last_micro_step, self.handles = False, []
        self.buckets, open_bucket = [], {}  # lists of parameters, and dtype -> the list that is being filled
        for p in reversed(list(params)):  # backward runs the forward pass in reverse
            bucket = open_bucket.get(p.dtype)
            if bucket is None or sum(x.nbytes for x in bucket) + p.nbytes > bucket_bytes:
                self.buckets.append([])
                bucket = open_bucket[p.dtype] = self.buckets[-1]
            bucket.append(p)
        for index, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, index=index: self._gradient_ready(index))
        self.missing = [len(bucket) for bucket in self.buckets]

    def _gradient_ready(self, index: int) -> None:
        self.missing[index] -= self.last_micro_step  # a bool: the earlier ones do not count
        if self.missing[index] == 0 and dist.is_initialized():
            bucket = self.buckets[index]
            flat = torch.cat([p.grad.flatten() for p in bucket])
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = grad.view_as(p)
            self.handles.append(dist.all_reduce(flat, async_op=True))

    def wait(self) -> None:
        assert not any(self.missing), "a parameter took no part in the loss"
        for handle in self.handles:
            handle.wait()
        self.handles, self.missing = [], [len(bucket) for bucket in self.buckets]

# ---- 11. Checkpoints and signals: nothing trained is lost, and nothing wrong is loaded -------------------------------
def write_whole(path: Path, write, advice: str) -> None:
    """write(file) under a temporary name, then on the disk, then renamed: what bears the final name is whole."""
    temporary = path.with_suffix(".tmp")
    with naming(f"cannot write {path}; {advice}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as f:
                write(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

def save_checkpoint(folder: Path, step: int, book: "Logbook", model: GPT, optimizers: list) -> None:
    """folder/step000100.pt from rank 0; the newest two stay. No random state: training draws no random numbers."""
    optimizers[1].gather_state()
    if book.world.rank == 0:
        state = dict(run_id=book.run_id, step=step, tokens=step * book.hp.batch_tokens, train_time_ms=book.train_ms,
                     validations=book.validations, log=book.text, settings=dataclasses.asdict(book.hp), source=SOURCE,
                     model=model.state_dict(), optimizers=[optimizer.state_dict() for optimizer in optimizers])
        write_whole(folder / f"step{step:06d}.pt", lambda f: torch.save(state, f), "those before it are as they were")
        for old in [*sorted(folder.glob("step*.pt"))[:-2], *folder.glob("*.tmp")]:
            old.unlink(missing_ok=True)

def save_model(path: Path, model: GPT, hp: Hyperparameters) -> None:
    """The weights alone, as safetensors: loading them executes nothing."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    data = safetensors.torch.save(tensors, dict(model="speedrun", hyperparameters=json.dumps(dataclasses.asdict(hp))))
    write_whole(path, lambda f: f.write(data), "the checkpoints are as they were")

def read_checkpoint(where: str, checkpoint_dir: str) -> dict:
    """The newest whole checkpoint of a run: of the newest run for "latest", of a folder, or up to a given file."""
    path = Path(where)
    if where == "latest":
        files = sorted(Path(checkpoint_dir).glob("*/step*.pt"), key=lambda f: f.stat().st_mtime)
        path = files[-1].parent if files else Path(checkpoint_dir)
    folder, newest = (path.parent, path.name) if path.is_file() else (path, "~")  # "~" sorts behind all
    for file in sorted((f for f in folder.glob("*.pt") if f.name <= newest), reverse=True):
        with contextlib.suppress(Exception):  # damage has many faces
            if zipfile.ZipFile(file).testzip() is None:  # torch.load ignores the checksums that torch.save wrote
                state = torch.load(file, map_location="cpu", weights_only=True)  # refuses a pickle of more than data
                uuid.UUID(state["run_id"])  # it becomes the log's name: nothing but that
                return state
        print(f"warning: {file} is damaged or no checkpoint of this program; trying the one before", file=sys.stderr)
    raise InputError(f"--resume {where}: no whole checkpoint there; look into {checkpoint_dir}")

def find_checkpoint(args: argparse.Namespace, hp: Hyperparameters) -> dict:
    """What --resume asks for. Raises InputError where its settings or source are not ours."""
    state = read_checkpoint(args.resume, args.checkpoint_dir)
    old, new = state["settings"], dataclasses.asdict(hp)
    may_differ = {"save_checkpoint"}
    if args.fit_memory:
        may_differ.add("train_seq_len")  # the checkpoint's is taken
    names = [name for name in sorted({*old, *new} - may_differ) if old.get(name) != new.get(name)]
    differences = [f"{name}: {old.get(name)} in the checkpoint, {new.get(name)} now" for name in names]
    differences = "; ".join(differences + ["source: not the same"] * (state["source"] != SOURCE))
    if differences and not args.resume_force:
        raise InputError(f"--resume: another run ({differences}); --resume_force goes on all the same")
    return dict(state, forced=f", by resume_force ({differences}): no record" if differences else "")

def load_checkpoint(state: dict, model: GPT, optimizers: list) -> None:
    try:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            # its moments alone: learning rates and betas are this run's, which differ where --resume_force lets them
            optimizer.load_state_dict(dict(saved, param_groups=optimizer.state_dict()["param_groups"]))
    except (RuntimeError, ValueError) as e:
        raise InputError(f"--resume: a checkpoint of another model ({str(e).splitlines()[-1].strip()})") from None

stop_signal = []  # SIGTERM or SIGINT, and when it came

def on_signal(number: int, frame) -> None:
    """The first one: the step is finished and saved. A second one exits at once; but of several processes, within a
    second it is the first, as batch systems signal all of them, and torchrun then passes its own on."""
    if stop_signal and time.monotonic() >= stop_signal[1] + (int(os.environ.get("WORLD_SIZE", 1)) > 1):
        os._exit(128 + number)
    stop_signal[:] = stop_signal or (number, time.monotonic())

# ---- 12. The timed loop ----------------------------------------------------------------------------------------------
def sequences_per_pass(hp: Hyperparameters, world: World) -> int:
    """Micro-batch size in sequences: the largest that divides this process's share of a step."""
    local = hp.num_sequences // world.size
    return max(n for n in range(1, min(local, hp.sequences_per_pass) + 1) if local % n == 0)

def train_step(model, optimizers, buckets, inputs: Tensor, targets: Tensor, window_blocks: int, hp: Hyperparameters,
               world: World) -> Tensor:
    """Forward, backward and update on this process's share of a step, (local tokens,). -> its mean loss."""
    per_pass = sequences_per_pass(hp, world)
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    model.train()
    inputs, targets = (t.view(-1, per_pass, hp.train_seq_len) for t in (inputs, targets))  # (micro-steps, B, S)
    total = torch.zeros((), device=world.device)
    share = torch.full((), 1 / hp.num_sequences, device=world.device)  # of a sequence in the step's gradient
    for micro_step, (x, y) in enumerate(zip(inputs, targets)):
        buckets.last_micro_step = micro_step == len(inputs) - 1
        loss = model(x, y, window)
        loss.backward(share)
        total += loss.detach()
    buckets.wait()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total / inputs.numel()

@torch.no_grad()
def evaluate(model, sequences, window_blocks: int, hp: Hyperparameters, world: World) -> Tensor:
    """The mean loss of `sequences`, (val_seq_len,) inputs and targets, equally many on each process, and of those."""
    model.eval()
    window = torch.full((), window_blocks, dtype=torch.int32, device=world.device)
    mean = torch.stack([model(x[None], y[None], window) for x, y in sequences]).double().mean()
    if world.size > 1:
        dist.all_reduce(mean)
    return mean / world.size

def peak_memory(world: World) -> str:
    if world.device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    elif sys.platform == "win32":
        return "peak memory: not measured on Windows"
    else:  # a CPU process has its peak resident set, and no caching allocator with a reserve
        import resource  # Windows has no such module
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        allocated = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"peak memory allocated: {allocated // 2**20} MiB reserved: {reserved // 2**20} MiB"

def synchronized_ms(world: World) -> float:
    """The clock, read when all ranks and their devices are done with what was asked of them."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    if world.size > 1:
        dist.barrier()
    return 1000 * time.perf_counter()

# what Logbook.look() looks at, in the order of a step
NUMBERS = ("training loss", "norm of the weights", "validation loss")

class Logbook:
    """A run's clock, validations and log: <log_dir>/<run_id>.txt and the console (a terminal has a bar). Rank 0 writes."""
    def __init__(self, args: argparse.Namespace, hp: Hyperparameters, world: World, resumed: dict, compiler: str):
        self.hp, self.world, self.run_id = hp, world, resumed.get("run_id") or str(uuid.uuid4())
        self.train_ms, self.validations = resumed.get("train_time_ms", 0.0), resumed.get("validations", [])
        self.loss = math.nan
        # this rank's first number that is not finite: step, index in NUMBERS, the number
        self.first_bad = torch.full((3,), math.inf, dtype=torch.float64, device=world.device)
        self.text, self.path = resumed.get("log") or log_header(hp, world, compiler), Path(args.log_dir) / f"{self.run_id}.txt"
        self.bar = tqdm(total=hp.num_iterations, unit="step", dynamic_ncols=True, leave=False, file=sys.stdout,
                        disable=world.rank > 0 or not sys.stdout.isatty())
        if world.rank == 0:
            write_whole(self.path, lambda file: file.write(self.text.encode()), "choose another --log_dir")
        self.write(f"{self.path}", log=False)

    def write(self, line: str, log: bool = True, console: bool = True) -> None:
        if log and self.world.rank == 0:
            self.text += f"{line}\n"
            with naming(f"cannot write the log {self.path}"), open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        if console and self.world.rank == 0:
            with naming("cannot write to the console"):
                tqdm.write(line, file=sys.stdout)  # above the bar, if there is one
                sys.stdout.flush()

    @contextlib.contextmanager
    def untimed(self):
        """The clock runs while training, and for nothing else: it stands while the block under `with` runs."""
        self.train_ms += synchronized_ms(self.world) - self.started_ms
        yield
        self.started_ms = synchronized_ms(self.world)

    def look(self, step: int, number: Tensor, what: str = "training loss") -> int:
        """Stops the run at a number that is not finite on any rank. -> the signal that all ranks
        heed now, or 0. The host waits for a training loss on a GPU only at each fifth step:
        torchrun leaves 30 s from a signal to the kill."""
        world = self.world
        now = what != "training loss"  # the host waits for the others anyway
        number = number.detach()
        kind = torch.full_like(number, NUMBERS.index(what))
        found = [torch.full_like(number, step), kind, number]
        is_first = ~number.isfinite() & self.first_bad[0].isinf()
        self.first_bad = torch.where(is_first, torch.stack(found).double(), self.first_bad)
        if not now and step % (1 if world.size == 1 and not number.is_cuda else 5):
            return 0
        stop = torch.full_like(self.first_bad[0], stop_signal[0] if stop_signal else 0)
        votes = torch.stack([-self.first_bad[0], stop])
        if world.size > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        (bad, stop), self.loss = votes.tolist(), self.loss if now else number.item()
        if bad > -math.inf:
            raise InputError(self.not_finite())
        return int(stop)

    def not_finite(self) -> str:
        """What is known of the first number that is not finite, and a remedy. All ranks call it."""
        found = [self.first_bad]
        if self.world.size > 1:
            found = [torch.empty_like(self.first_bad) for _ in range(self.world.size)]
            dist.all_gather(found, self.first_bad)
        found = [numbers.tolist() for numbers in found]
        rank = min(range(self.world.size), key=lambda rank: found[rank][:2])
        step, kind, number = found[rank]
        track = TRACKS[self.hp.track]
        changed = []
        for name, value in vars(self.hp).items():
            if name.endswith("_lr") and value != getattr(track, name):
                changed.append(f"--{name} {value}")
        if changed:
            advice = f"lower {', '.join(changed)}"
        else:
            advice = ("if you changed the source or a setting, look there first; otherwise the "
                      "compiler or the machine may be wrong: report it with the log")
            if self.world.device.type == "cpu":
                advice += ", and try TORCH_COMPILE_DISABLE=1"
        what = NUMBERS[int(kind)]
        return f"step {int(step)}, rank {rank}: the {what} is not finite ({number}); {advice}"

    def validation(self, step: int, val_loss: float) -> None:
        self.validations.append((step, val_loss, self.train_ms))
        self.write(f"step:{step}/{self.hp.num_iterations} val_loss:{val_loss:.4f} train_time:{self.train_ms:.0f}ms "
                   f"step_avg:{self.train_ms / max(step, 1):.2f}ms")

    def step(self, step: int) -> None:
        """A training step's line: on a terminal it moves the bar instead of scrolling by."""
        ms = self.train_ms + 1000 * time.perf_counter() - self.started_ms  # the host may be ahead of the GPU
        line = f"step:{step}/{self.hp.num_iterations} train_time:{ms:.0f}ms step_avg:{ms / step:.2f}ms"
        self.write(line, console=self.bar.disable)
        self.bar.set_postfix_str(f"loss {self.loss:.4f}, {ms / step:.2f} ms a step", refresh=False)
        self.bar.update(step - self.bar.n)

    def result(self) -> None:
        hp, (step, val_loss, ms) = self.hp, self.validations[-1]
        met = next((v for v in self.validations if v[1] <= hp.target_val_loss), None)
        verdict = f"met at step {met[0]} after {met[2] / 1000:.2f} s of training" if met else "not met"
        bits = f" ({val_loss / math.log(2):.4f} bits per byte)" if hp.vocab_size == 257 else ""  # a byte-level track
        self.write(peak_memory(self.world))
        self.write(f"target {hp.target_val_loss}: {verdict}; val_loss {val_loss:.4f}{bits} after {ms / 1000:.2f} s, "
                   f"{hp.batch_tokens * step / (ms / 1000):,.0f} tokens/s")
        self.bar.close()

def run(args: argparse.Namespace, hp: Hyperparameters, world: World, parts: tuple, resumed: dict) -> tuple:
    """One counted run with a log of its own. -> its last validation: (step, val_loss, training time in ms)."""
    model, compiled, compiler, compile_seconds, optimizers, buckets = parts
    book = Logbook(args, hp, world, resumed, compiler)
    folder, first_step = Path(args.checkpoint_dir) / book.run_id, resumed.get("step", 0)
    if hp.train_seq_len != TRACKS[hp.track].train_seq_len and not resumed:
        book.write(f"train_seq_len {hp.train_seq_len} (track: {TRACKS[hp.track].train_seq_len}): {hp.num_sequences} "
                   f"sequences a step, {hp.batch_tokens} tokens as before")
    begun = time.perf_counter()
    warm_up(compiled, optimizers, buckets, hp, world)
    seconds = time.perf_counter() - begun
    book.write(f"warm-up: compilation {compile_seconds:.1f} s, {hp.warmup_steps} steps {seconds:.1f} s, untimed")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if compiler not in book.text:  # resumed on another machine, or with another compiler
        book.write(compiler, console=False)
    if resumed:
        load_checkpoint(resumed, model, optimizers)
        book.write(f"resume: from step {first_step}, on {world.size} process(es){resumed['forced']}")
    batches = distributed_data_generator(hp.train_files, hp.batch_tokens, world.rank, world.size, hp.vocab_size,
                                         world.device, first_step)
    book.started_ms = synchronized_ms(world)
    for step in range(first_step, hp.num_iterations + 1):
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            with book.untimed():
                sequences = distributed_data_generator(hp.val_files, hp.val_seq_len, 0, 1, hp.vocab_size, world.device)
                # the same sequences whatever the world size
                mine = itertools.islice(sequences, world.rank, hp.val_tokens // hp.val_seq_len, world.size)
                val_loss = evaluate(compiled, mine, get_window_blocks(step, hp), hp, world)
                book.look(step, val_loss, "validation loss")
                book.validation(step, val_loss.item())
        if last_step:
            break
        # --------------- training
        set_schedules(optimizers, step, hp)
        inputs, targets = next(batches)
        loss = train_step(compiled, optimizers, buckets, inputs, targets, get_window_blocks(step, hp), hp, world)
        stop = book.look(step + 1, loss)
        book.step(step + 1)
        # --------------- checkpoint
        due = args.checkpoint_every and (step + 1) % args.checkpoint_every == 0
        if stop or due or (hp.save_checkpoint and step + 1 == hp.num_iterations):
            with book.untimed():
                begun = time.perf_counter()
                weights = nn.utils.get_total_norm(model.parameters())
                book.look(step + 1, weights, "norm of the weights")  # before they are saved
                save_checkpoint(folder, step + 1, book, model, optimizers)
                book.write(f"checkpoint: step {step + 1} written in {time.perf_counter() - begun:.1f} s, untimed")
            if stop:  # all ranks are here: torchrun stops the others when the first one leaves
                os._exit(128 + stop)
    if world.rank == 0 and (hp.save_checkpoint or args.checkpoint_every):
        save_model(folder / "model.safetensors", model, hp)
    book.result()
    return book.validations[-1]

def train(args: argparse.Namespace, hp: Hyperparameters) -> None:
    if args.device == "cuda":
        check_gpus()  # before the data is looked at
    check_hyperparameters(hp, int(os.environ.get("WORLD_SIZE", 1)), args.device)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # one look at the data a machine
        check_shards(hp.train_files, hp.batch_tokens, hp.num_iterations, hp.vocab_size, "--num_iterations")
        check_shards(hp.val_files, hp.val_seq_len, hp.val_tokens // hp.val_seq_len, hp.vocab_size, "--val_tokens")
        if args.checkpoint_every or hp.save_checkpoint:
            with naming(f"--checkpoint_dir {args.checkpoint_dir} cannot be made"):
                Path(args.checkpoint_dir).mkdir(parents=True, exist_ok=True)
    if args.num_runs > 1 and importlib.util.find_spec("scipy") is None:
        raise InputError("--num_runs needs scipy; install it with pip install -r tools/requirements.txt")
    world = start_world(args.device)
    resumed = find_checkpoint(args, hp) if args.resume else {}
    hp = fit_to_memory(args, hp, world, resumed)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_before_training)
    model = build_model(hp, world)
    begun = time.perf_counter()
    compiled, compiler = compile_model(model, hp, world)
    compile_seconds = time.perf_counter() - begun
    parts = (model, compiled, compiler, compile_seconds, build_optimizers(model, hp), GradientBuckets(model.parameters()))
    ends = [run(args, dataclasses.replace(hp, seed=hp.seed + i), world, parts, resumed) for i in range(args.num_runs)]
    if args.num_runs > 1 and world.rank == 0:  # Student's one-sided test that the mean loss is below the target
        from scipy import stats
        losses, times = np.array(ends)[:, 1], np.array(ends)[:, 2] / 1000
        p = stats.ttest_1samp(losses, hp.target_val_loss, alternative="less").pvalue
        print(f"{len(losses)} runs: val_loss {losses.mean():.4f}, standard deviation {losses.std(ddof=1):.4f}, p-value of "
              f"being below {hp.target_val_loss} {p:.2g}; training time {times.mean():.2f} s, {times.std(ddof=1):.2f}")
    if world.size > 1:
        dist.destroy_process_group()

def main(argv: list[str]) -> int:
    try:
        train(*parse_arguments(argv))
    except InputError as e:
        if e.one_rank or int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once a machine is enough
            print(f"error: {e}", file=sys.stderr, flush=True)
        return 2
    except torch.OutOfMemoryError:
        print(f"error: rank {os.environ.get('RANK', 0)}: the GPU's memory is full; give half the --train_seq_len (a step "
              "keeps its tokens), or where validation is too much, half the --val_seq_len", file=sys.stderr, flush=True)
        return 2
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        print(f"error: rank {os.environ.get('RANK')} lost another process, whose own error counts "
              f"({str(e).splitlines()[0][-80:]})", file=sys.stderr, flush=True)
        return 1
    return 0

if __name__ == "__main__":
    if code := main(sys.argv[1:]):
        sys.stdout = None  # all it took is written; what a full disk did not take, Python would try again and fail
    sys.exit(code)
