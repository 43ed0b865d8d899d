"""
Trains a GPT with the NanoGPT speedrun's recipe of January 2026 (record 62).

    ./run.sh --recipe january2026           FineWeb to 3.28 on all GPUs, or mini on a CPU
    ./run.sh --recipe january2026 --help    every hyperparameter and its default

The recipe is modded-nanogpt's (https://github.com/KellerJordan/modded-nanogpt). It has its own model,
head, optimizers, data packing, schedules and loop. Shards, logs and checkpoints are train_gpt.py's.
New since May 2025:
- #26, #29  sequences begin at documents, which are cut after 2,048 tokens (@classiclarryd, @varunneal)
- #28, #55  gates on attention, value embeddings and the skip connection (@classiclarryd)
- #29, #35  three window sizes, and longer windows at the end (@varunneal, @classiclarryd)
- #31       rotary frequencies follow the window (@classiclarryd; YaRN, https://arxiv.org/abs/2309.00071)
- #34       smear: each token embedding gets some of the one before it (@classiclarryd)
- #38       Polar Express orthogonalizes Muon's updates (@varunneal; https://arxiv.org/abs/2505.16932)
- #39, #46  three batch sizes; Adam updates in every second step (@classiclarryd, @varunneal)
- #40, #45  backout, and one skip connection in place of the U-net (@classiclarryd)
- #41       NorMuon equalizes the channels of an update (@li_zichong; https://arxiv.org/abs/2510.05491)
- #43, #50  cautious weight decay (@varunneal, @roeeshenberg; https://arxiv.org/abs/2510.12402)
- #47, #48  the lambdas of attention multiply its weights (@roeeshenberg, @ChrisJMcCormick)
- #49, #62  key offset: long windows compare with the key before (@classiclarryd)
- #51, #53  head and embedding are tied for two thirds of the run (@varunneal)
- #53       the logits also predict the second and third next token (@varunneal, @classiclarryd)
- #54       logits are capped asymmetrically (@classiclarryd)
- #57       bf16 weights are truncated from float32 ones (@classiclarryd, @YouJiacheng, @ChrisJMcCormick)
- #58       paired heads attend to each other's keys (@classiclarryd)
- #62       embeddings of hashed bigrams, added in every layer (@classiclarryd)

A step is always 8 sequences (mini: 4), on 1, 2, 4 or 8 processes, with the same training. Sequences
can't be halved for a small GPU: packing, smear and targets would change. A GPU needs memory for one
of 49,152 tokens.

Shapes in comments: B sequences, S tokens per sequence, T = B * S, N = T / 128 blocks of the mask,
H heads, D channels per head, C = model_dim, V = padded vocabulary size.
"""
# -----------------------------------------------------------------------------
# 1. Preamble

import bisect
import concurrent.futures
import itertools
import json
import math
import sys
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import train_gpt  # before torch: it sets variables that torch reads

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from train_gpt import (
    BLOCK_SIZE,
    DEVICE,
    DTYPE,
    ON_GPU,
    RANK,
    WORLD_SIZE,
    all_gather,
    all_gather_now,
    as_scale,
    attention,
    block_lists,
    clock,
    column_major,
    document_ids,
    evaluate,
    fp8_matmul,
    norm,
    portable_mask,
    rank_share,
    require,
    setting,
    uses_fp8,
)

# A log begins with both sources, each under its name
LINE = "-" * 40
SOURCES = {
    "recipes/january2026.py": Path(__file__).read_bytes().decode(),
    "train_gpt.py": train_gpt.SOURCE,
}
SOURCE = "".join(f"\n\n{LINE}\n# {name}\n{LINE}\n\n{text}" for name, text in SOURCES.items())

# -----------------------------------------------------------------------------
# 2. FP8 head and loss. train_gpt.py says what an FP8 matmul with scales is.

X_SCALE = 100 / 448
W_SCALE = 1.6 / 448
GRAD_SCALE = 0.75 / 448  # for a loss whose gradient is 1


def softcap(logits):
    """Caps logits asymmetrically. Returns float32 between 0 and 23."""
    return 23 * torch.sigmoid((logits.float() + 5) / 7.5)


def target_weights(targets, weights):
    """targets (T, K), weights (K,) -> float32 (T, K), zero where there is no target (-1)."""
    return torch.where(targets >= 0, weights, 0.0)


def weighted_loss(logits, targets, weights):
    """Returns the weighted cross-entropies in nats of soft-capped logits (T, V), summed over tokens
    and targets (T, K), and the logsumexp (T, 1)."""
    capped = softcap(logits)
    lse = capped.exp().sum(dim=-1, keepdim=True).log()  # exp(23) can't overflow
    losses = lse - capped.gather(1, targets.clamp_min(0))  # (T, K)
    return (losses * target_weights(targets, weights)).sum(), lse


@torch.library.custom_op("nanogpt2026::head_loss", mutates_args=())
@torch.compile(dynamic=False)  # compiling the model doesn't compile the body of a custom op
def head_loss_op(
    x: Tensor, w: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Computes weighted_loss of x @ w.T. x (T, C) and w (V, C) are bf16, targets (T, K) int64, -1 for
    none, weights (K,) float32. Returns the loss in float32, and for the backward pass the logits
    (T, V) in bf16, their logsumexp (T, 1) and both FP8 operands."""
    x_f8 = (x / X_SCALE).to(torch.float8_e4m3fn)
    w_f8 = (w / W_SCALE).to(torch.float8_e4m3fn)
    scales = (as_scale(X_SCALE, x), as_scale(W_SCALE, x))
    logits = fp8_matmul(x_f8, w_f8.T, *scales, torch.bfloat16, fast=True)
    loss, lse = weighted_loss(logits, targets, weights)
    return loss, logits, lse, x_f8, w_f8


@head_loss_op.register_fake  # torch.compile needs the shapes and dtypes of the results
def _(x, w, targets, weights):
    logits = x.new_empty(len(x), len(w), dtype=torch.bfloat16)
    lse = logits[:, :1].float()
    return lse.sum(), logits, lse, x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)


@torch.library.custom_op("nanogpt2026::head_loss_backward", mutates_args=())
@torch.compile(dynamic=False)
def head_loss_backward_op(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    x_f8: Tensor,
    w_f8: Tensor,
    targets: Tensor,
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
    grad_T = grad_f8.T.contiguous()
    w, x = column_major(w_f8), column_major(x_f8)
    grad_x = fp8_matmul(grad_f8, w, grad_scale, as_scale(W_SCALE, grad), torch.bfloat16)
    grad_w = fp8_matmul(grad_T, x, grad_scale, as_scale(X_SCALE, grad), torch.bfloat16)
    return grad_x, grad_w


@head_loss_backward_op.register_fake
def _(grad, logits, lse, x_f8, w_f8, targets, weights):
    return x_f8.bfloat16(), w_f8.bfloat16()


def save_for_backward(ctx, inputs, output):
    x, w, targets, weights = inputs
    loss, logits, lse, x_f8, w_f8 = output
    ctx.save_for_backward(logits, lse, x_f8, w_f8, targets, weights)
    ctx.set_materialize_grads(False)  # creates no zero gradients for the other outputs


def head_loss_gradients(ctx, grad, *unused):
    grad_x, grad_w = head_loss_backward_op(grad, *ctx.saved_tensors)
    return grad_x, grad_w, None, None  # targets and weights have no gradient


head_loss_op.register_autograd(head_loss_gradients, setup_context=save_for_backward)

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


def polar_express(G):
    """Orthogonalizes each matrix of G (N, rows, cols): U S V^T becomes about U V^T, in DTYPE."""
    tall = G.size(-2) > G.size(-1)
    X = G.to(DTYPE)
    X = X.mT if tall else X  # X X^T is then the smaller product
    X = X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = torch.bmm(X, X.mT)
        # baddbmm multiplies and adds in one kernel
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.mT if tall else X


def truncated(x, dtype):
    """Casts float32 to bf16 by dropping the lower 16 bits, or returns it as it is."""
    if dtype == torch.float32:
        return x
    return (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class Muon(torch.optim.Optimizer):
    """NorMuon with cautious weight decay. Each parameter is a bank of matrices (..., rows, cols),
    which are updated one by one. A group's `scale` multiplies its learning rate. Each rank keeps the
    state of its share of every bank, and sends the new weights to the others. Weights are kept in
    float32 here; parameters in bf16 are truncated from them."""

    def __init__(self, groups, lr, momentum, beta2, weight_decay):
        super().__init__(groups, dict(lr=lr, momentum=momentum, beta2=beta2, weight_decay=weight_decay))

    def updates(self, gradients, state, group):
        """gradients (n, rows, cols) -> updates, float32"""
        state["average"].lerp_(gradients, 1 - group["momentum"])
        nesterov = gradients.lerp(state["average"], group["momentum"])
        updates = polar_express(nesterov)
        # NorMuon: divide each row by its running RMS, and keep the norm of the matrix
        exact = updates.float()
        mean_squares = state["mean_squares"]
        squares = exact.square().mean(dim=-1, keepdim=True)
        mean_squares.lerp_(squares, 1 - group["beta2"])
        inverse_rms = mean_squares.clamp_min(1e-10).rsqrt()
        old_norm = exact.norm(dim=(-2, -1), keepdim=True)
        new_norm = (exact * inverse_rms).norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10)
        factor = inverse_rms * old_norm / new_norm
        return (updates * factor.type_as(updates)).float()

    def new_weights(self, p, group):
        """Updates this rank's share of a bank. Returns its matrices (share, rows, cols)."""
        gradients = torch.stack(rank_share(p.grad.flatten(0, -3))).float()
        state = self.state[p]
        if not state:
            state["weights"] = torch.stack(rank_share(p.flatten(0, -3))).float()
            state["average"] = torch.zeros_like(gradients)
            state["mean_squares"] = torch.zeros_like(gradients[..., :1])
        weights = state["weights"]
        updates = self.updates(gradients, state, group)
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
                count = p.shape[:-2].numel()  # of matrices
                gathers.append((p, all_gather(self.new_weights(p, group), count)))
        for p, (weights, handle) in gathers:
            if handle:
                handle.wait()
            p.copy_(weights.view_as(p))

    def state_dict(self):
        """The state of all ranks, which doesn't depend on their number. Call it on all ranks."""
        saved = super().state_dict()
        for index, state in saved["state"].items():
            count = parameters_of(self)[index].shape[:-2].numel()
            saved["state"][index] = {k: all_gather_now(share, count) for k, share in state.items()}
        return saved

    def load_state_dict(self, saved):  # PyTorch's would round the state to the dtype of the parameter
        for index, p in enumerate(parameters_of(self)):
            for name, whole in saved["state"].get(index, {}).items():
                self.state[p][name] = torch.stack(rank_share(whole)).to(DEVICE)


def adam_update(p, grad, mean, mean_square, beta1, beta2, lr, decay):
    """Updates p of any dtype and its moments in float32. lr and decay are scalar tensors."""
    grad = grad.float()
    weight = p.float()
    mean.lerp_(grad, 1 - beta1)
    mean_square.lerp_(grad.square(), 1 - beta2)
    update = lr * mean / (mean_square.sqrt() + 1e-10)
    update = update + torch.where(update * weight > 0, decay * weight, 0.0)  # cautious weight decay
    p.copy_(weight - update)


# Without a flag, PyTorch compiles it six times: it makes sizes and betas dynamic. With dynamic=False, there
# would be more than 8, where PyTorch stops compiling
compiled_adam_update = torch.compile(adam_update)


class Adam(torch.optim.Optimizer):
    """Adam (https://arxiv.org/abs/1412.6980) with cautious weight decay, and moments in float32."""

    def __init__(self, groups):
        super().__init__(groups, dict(weight_decay=0.0))

    def update(self, p, group):
        beta1, beta2 = group["betas"]
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
        # flat, so that few compiled functions serve all shapes
        flat = (x.view(-1) for x in (p, p.grad, state["mean"], state["mean_square"]))
        update(*flat, beta1, beta2, lr, decay)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)

    def load_state_dict(self, saved):  # PyTorch's would round the moments to the dtype of the parameter
        for index, p in enumerate(parameters_of(self)):
            for name, value in saved["state"].get(index, {}).items():
                self.state[p][name] = value if name == "step" else value.to(DEVICE)


# -----------------------------------------------------------------------------
# 4. Model

GATE_CHANNELS = 12  # gates are linear functions of this many channels


class Rotary(nn.Module):
    """Half-truncated rotary embeddings: the first half of a head's channels rotates, in pairs (i, i
    + D/4), and the other half stays."""

    def __init__(self, head_dim, max_seq_len):
        super().__init__()
        # cosines and sines; paired heads count two positions per token
        table = torch.zeros(2, 2 * max_seq_len, head_dim // 4, dtype=DTYPE)
        self.register_buffer("table", table, persistent=False)

    def set_frequencies(self, freqs):  # (D/4,) in float32
        t = torch.arange(self.table.size(1), dtype=torch.float32, device=freqs.device)
        theta = t[:, None] * freqs
        self.table[0] = theta.cos()
        self.table[1] = theta.sin()

    def forward(self, x, paired, scale=1.0):  # (B, S, H, D)
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
# most `window` tokens back. The window is a tensor () in tokens, so that it can change without
# another compilation.


def flex_block_mask(docs, window):
    """Makes the BlockMask of docs (T,). FlexAttention calls document_causal_window only in partly
    visible blocks."""

    def document_causal_window(b, h, q_idx, kv_idx):
        causal = q_idx >= kv_idx
        same_document = docs[q_idx] == docs[kv_idx]
        return causal & same_document & (q_idx - kv_idx <= window)

    first_doc = docs[::BLOCK_SIZE]  # of each block: (N,)
    last_doc = docs[BLOCK_SIZE - 1 :: BLOCK_SIZE]
    block = torch.arange(len(first_doc), dtype=torch.int32, device=docs.device)
    # Matrices (N, N): rows are query blocks, columns key blocks. Documents are numbered in order, so
    # of an earlier key block only the last document matters, of the query block the first.
    distance = BLOCK_SIZE * (block[:, None] - block)  # from the first key to the first query
    share_a_document = first_doc[:, None] <= last_doc
    are_one_document = last_doc[:, None] == first_doc
    nearest = distance - (BLOCK_SIZE - 1)  # from the last key to the first query
    farthest = distance + (BLOCK_SIZE - 1)  # from the first key to the last query
    visible = (nearest <= window) & (distance >= 0) & share_a_document
    full = (farthest <= window) & (distance > 0) & are_one_document
    partial = visible & ~full
    return BlockMask(
        (len(docs), len(docs)),
        **block_lists("kv", partial),  # the key blocks of each query block, for the forward pass
        **block_lists("full_kv", full),
        **block_lists("q", partial.T),  # the query blocks of each key block, for the backward pass
        **block_lists("full_q", full.T),
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=document_causal_window,
    )


def make_mask(docs, window, max_window):
    if docs.is_cuda:
        return flex_block_mask(docs, window)
    span = math.ceil(max_window / BLOCK_SIZE) + 1
    key = torch.arange((1 - span) * BLOCK_SIZE, BLOCK_SIZE)  # positions as in portable_mask
    query = key[-BLOCK_SIZE:, None]
    return portable_mask(docs, span, span) & (query - window <= key)


def shifted(x):
    """x (B, S, ...) one position later. The first stays."""
    return torch.cat([x[:, :1], x[:, :-1]], dim=1)


def gate(x, weight):  # (..., C), (n, 12) -> (..., n)
    return torch.sigmoid(F.linear(x[..., :GATE_CHANNELS], weight))


class GPT(nn.Module):
    """GPT(hp)(input_seq (B, S) int32, target_seq (B, S) int64, window_blocks () int32) is in training
    the weighted cross-entropy of the next three tokens in nats, and in evaluation that of the next
    token, summed over tokens. S is a multiple of 128. Lambdas are float32, all other parameters are
    DTYPE. set_step sets what is scheduled."""

    val_slice = 32768  # tokens whose logits validation computes at a time, to save memory

    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        layers, heads, dim = hp.num_layers, hp.num_heads, hp.model_dim
        self.attn_layers = [i for i in range(layers) if i not in hp.attn_free_layers]
        attn_layers, value_layers = len(self.attn_layers), len(hp.value_layers)
        rows = math.ceil(hp.vocab_size / 128) * 128  # padded, for faster matmuls

        def weights(*shape):
            return nn.Parameter(torch.empty(shape, dtype=DTYPE))

        def lambdas(value, *shape):
            return nn.Parameter(torch.full(shape, value))

        self.embed = weights(rows, dim)
        self.lm_head = weights(rows, dim)
        self.value_embeds = nn.ParameterList(weights(rows, dim) for _ in range(hp.num_value_embeds))
        self.bigram_embed = self.bigram_lambdas = None
        if hp.bigram_factor:
            self.bigram_embed = weights(hp.bigram_factor * rows, dim)
            self.bigram_lambdas = lambdas(0.1, layers)
        # banks of matrices
        self.attn_bank = weights(attn_layers, 4, dim, dim)  # Q, K, V and O, each (out, in)
        self.mlp_in_bank = weights(layers, 4 * dim, dim)  # (hidden, in)
        self.mlp_out_bank = weights(layers, 4 * dim, dim)  # (hidden, out)
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
        self.rotary = Rotary(dim // heads, max(*hp.seq_lens, hp.val_seq_len))
        self.register_buffer("attn_scale", torch.zeros(()), persistent=False)
        self.register_buffer("loss_weights", torch.zeros(3), persistent=False)
        self.init_weights(hp.seed)

    def set_step(self, step):
        """Sets the loss weights, and in a new stage the rotary tables and the scale of attention."""
        for k, weight in enumerate(get_loss_weights(step, self.hp)):
            self.loss_weights[k].fill_(weight)
        stage = get_stage(step, self.hp)
        if self.stage != stage:
            self.stage = stage
            freqs, scale = get_rotary(stage, self.hp)
            self.rotary.set_frequencies(freqs)
            self.attn_scale.fill_(scale)

    @torch.no_grad()
    def init_weights(self, seed):
        """Sets the initial values of all tensors but scalars, which keep the values that they are
        created with. Each has a random generator of its own, seeded with the seed and its name."""
        bound = (3 / self.hp.model_dim) ** 0.5  # of a uniform distribution with variance 1 / model_dim
        for name, p in self.named_parameters():
            rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            value = torch.zeros(p.shape)  # float32: values drawn in bf16 are coarse
            if name == "lm_head":
                value.normal_(std=0.005, generator=rng)
            elif name == "attn_bank":
                value.uniform_(-bound, bound, generator=rng)
                value[:, 3].zero_()  # O
            elif name == "mlp_in_bank":
                value.uniform_(-bound / 2, bound / 2, generator=rng)
            if p.ndim >= 2:
                p.copy_(value)
        self.embed.copy_(self.lm_head)

    def masks(self, docs, window_blocks):
        """Returns a mask for each layer. The last validation's longer window is for long layers
        only."""
        hp = self.hp
        last = hp.windows[-1]
        short_window = hp.window_block * (window_blocks.clamp_max(last) // 2)
        # constants, for the size of the CPU's masks
        longest = hp.window_block * (last if self.training else hp.val_window)
        max_short = hp.window_block * (last // 2)
        masks = [make_mask(docs, short_window, max_short)] * hp.num_layers
        long = make_mask(docs, hp.window_block * window_blocks, longest)
        for i in hp.long_window_layers:
            masks[i] = long
        paired = make_mask(docs.repeat_interleave(2), short_window, max_short)
        for i in hp.paired_layers:
            masks[i] = paired
        return masks

    def smeared_embeddings(self, tokens):
        """tokens (B, S) -> (B, S, C). Each one but a sequence's first gets some of the one before."""
        x = F.embedding(tokens, self.embed)
        amount = self.smear_lambda * gate(x[:, 1:], self.smear_gate)
        smeared = x[:, 1:] + amount * x[:, :-1]
        return torch.cat([x[:, :1], smeared], dim=1)

    def bigram_rows(self, tokens):
        """tokens (B, S) int64 -> the row of each token and the one before in the table of bigrams.
        A sequence's first token has the last row. As in the record, this number is also what the
        second token takes for the token before, and it overflows int32."""
        last_row = len(self.bigram_embed) - 1
        first = torch.full_like(tokens[:, :1], last_row)
        earlier = 27191 * torch.cat([first, tokens[:, 1:-1]], dim=1)
        earlier = (earlier + 2**31) % 2**32 - 2**31  # int32
        rows = (36313 * tokens[:, 1:]).bitwise_xor(earlier) % last_row
        return torch.cat([first, rows], dim=1)

    def self_attention(self, x, ve, weights, mask, layer):
        """x (B, S, C), normed -> (B, S, C). ve (B, S, C) are the value embeddings of this layer, or
        None; weights (4, C, C) are Q, K, V and O."""
        hp = self.hp
        index = self.attn_layers.index(layer)
        paired = layer in hp.paired_layers
        # multiplying the weights is faster than multiplying activations
        qkv_w = weights[:3].flatten(0, 1) * self.qkv_lambdas[index]
        o_w = weights[3] * self.o_lambdas[index]
        qkv = F.linear(x, qkv_w).unflatten(2, (3, hp.num_heads, -1))
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
        slots = (1, -1, hp.num_heads // 2 if paired else hp.num_heads, q.size(-1))
        y = attention(q.reshape(slots), k.reshape(slots), v.reshape(slots), mask, scale=1.0)
        y = y.view_as(q) * gate(x, self.attn_gates[index])[..., None]
        return F.linear(y.flatten(2), o_w)

    def forward(self, input_seq, target_seq, window_blocks):
        hp = self.hp
        docs = document_ids(input_seq, hp.eot_token)  # (T,)
        masks = self.masks(docs, window_blocks)
        x = x0 = norm(self.smeared_embeddings(input_seq))  # (B, S, C)
        if self.bigram_embed is not None:
            bigrams = F.embedding(self.bigram_rows(input_seq.long()), self.bigram_embed)
        value_embeds = [F.embedding(input_seq, table) for table in self.value_embeds]
        # layers 0 1 8 9 10 have tables 1 2 0 1 2
        ve_of_layer = dict(zip(reversed(hp.value_layers), itertools.cycle(reversed(value_embeds))))
        attn_w = dict(zip(self.attn_layers, self.attn_bank.unbind()))
        mlp_in_w = self.mlp_in_bank.unbind()
        mlp_out_w = self.mlp_out_bank.unbind()
        skip = backout = x
        for i in range(hp.num_layers):
            if i == hp.skip_to:
                skip_gate = torch.sigmoid(self.skip_lambda) * 2 * gate(x0, self.skip_gate)
                x = x + skip_gate * skip
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            if self.bigram_embed is not None:
                x = x + self.bigram_lambdas[i] * bigrams
            if i in attn_w:
                x = x + self.self_attention(norm(x), ve_of_layer.get(i), attn_w[i], masks[i], i)
            hidden = F.relu(F.linear(norm(x), mlp_in_w[i])).square()
            x = x + hidden @ mlp_out_w[i]
            if i == hp.skip_from:
                skip = x
            if i == hp.backout_layer:
                backout = x
        x = norm(x - self.backout_lambda * backout).flatten(0, 1)  # (T, C)
        if self.training:
            return self.training_loss(x, target_seq)
        targets = target_seq.flatten()
        total = 0.0
        for part, part_targets in zip(x.split(self.val_slice), targets.split(self.val_slice)):
            logits = softcap(F.linear(part, self.lm_head))
            total += F.cross_entropy(logits, part_targets, reduction="sum")
        return total

    def training_loss(self, x, target_seq):
        """x (T, C), target_seq (B, S) -> the weighted cross-entropy in nats, summed over tokens."""
        ahead = [F.pad(target_seq[:, k:], (0, k), value=-1) for k in range(3)]
        targets = torch.stack(ahead, dim=-1).flatten(0, 1)  # (T, 3)
        if uses_fp8(self.hp):
            return head_loss_op(x, self.lm_head, targets, self.loss_weights)[0]
        return weighted_loss(F.linear(x, self.lm_head), targets, self.loss_weights)[0]


# -----------------------------------------------------------------------------
# 5. Data: sequences are filled with whole documents, or their first tokens


def read_documents(file, hp):
    """Returns the tokens of a shard as a numpy array, and a list with the first position of each
    document, followed by the number of tokens."""
    tokens = train_gpt.read_tokens(file, 0, train_gpt.shard_length(file)).numpy()
    last = tokens.max(initial=0)  # a shard may be empty
    require(last < hp.vocab_size, f"{file} has token {last}, outside the vocabulary of {hp.vocab_size}")
    begins = np.flatnonzero(tokens == hp.eot_token).tolist()
    return tokens, [*begins, len(tokens)]


def read_shards(hp):
    """Yields read_documents of each training shard. Meanwhile, a thread reads the next one."""
    files = train_gpt.find_shards(hp.train_files)
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


def training_batches(hp, first_step):
    """Yields this rank's sequences of each step, int32 (num_sequences / WORLD_SIZE, S + 1)."""
    local = hp.num_sequences // WORLD_SIZE
    for sequences in itertools.islice(packed_steps(hp), first_step, None):
        mine = sequences[RANK * local : (RANK + 1) * local]
        yield torch.from_numpy(np.stack([np.concatenate(pieces) for pieces in mine]))


def check_training_shards(hp):
    """Packs all sequences of the run: better an error now than hours later. Returns a checksum."""
    count = checksum = 0
    for sequences in itertools.islice(packed_steps(hp), hp.num_iterations):
        count += 1
        for piece in itertools.chain(*sequences):
            checksum = zlib.crc32(piece, checksum)
    found = f"{hp.train_files} has documents for {count} steps, and the run needs {hp.num_iterations}"
    require(count == hp.num_iterations, f"{found}; add shards, or lower --num_iterations")
    return checksum


# -----------------------------------------------------------------------------
# 6. Hyperparameters. `--name value` changes any of them.


@dataclass(frozen=True)
class Hyperparameters:
    track: str = setting("fineweb", "set of defaults: fineweb or mini")
    # data
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "training shards")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    val_tokens: int = setting(10_485_760, "validation tokens; fixed, to compare losses")
    val_seq_len: int = setting(4 * 64 * 1024, "tokens per validation sequence")
    num_sequences: int = setting(8, "sequences per step, on all processes together")
    seq_lens: tuple[int, ...] = setting(
        (16384, 32768, 49152), "tokens per sequence, in thirds of the run"
    )
    sequences_per_pass: int = setting(1, "sequences in a micro-batch; fewer if it doesn't divide them")
    max_document: int = setting(2048, "tokens after which a document is cut")
    skip_rest: bool = setting(True, "true to skip what a document has left when it is cut")
    vocab_size: int = setting(50257, "number of token ids")
    eot_token: int = setting(50256, "token id that begins a document")
    # model
    num_layers: int = setting(11, "number of layers")
    num_heads: int = setting(6, "attention heads per layer, an even number")
    model_dim: int = setting(768, "channels of the residual stream")
    attn_free_layers: tuple[int, ...] = setting((6,), "layers without attention, such as 0,7 or none")
    long_window_layers: tuple[int, ...] = setting((3, 10), "layers with the long window and key offset")
    paired_layers: tuple[int, ...] = setting((0, 2, 5, 9), "layers with paired heads")
    value_layers: tuple[int, ...] = setting((0, 1, 8, 9, 10), "layers with value embeddings")
    num_value_embeds: int = setting(
        3, "value embedding tables; the last value layers use them in order"
    )
    skip_from: int = setting(3, "layer whose output is added again")
    skip_to: int = setting(6, "layer before which it is added")
    backout_layer: int = setting(7, "layer whose output is subtracted at the end")
    bigram_factor: int = setting(5, "rows of the bigram table per token id; 0 for no table")
    window_block: int = setting(
        128, "tokens in which windows are counted (masks always have blocks of 128)"
    )
    windows: tuple[int, ...] = setting((3, 7, 11, 13), "long windows, in thirds and in the extension")
    val_window: int = setting(20, "long window of the last validation")
    yarn_beta: int = setting(
        32, "YaRN keeps frequencies that turn more often than this within a window"
    )
    fp8: bool = setting(True, "true to compute the head in FP8 in training, on GPUs that can")
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
    warmup_steps: int = setting(
        4, "untimed steps per sequence length on random tokens; the weights are then reset"
    )
    val_loss_every: int = setting(250, "steps between validations, an even number; 0: only at the end")
    target_val_loss: float = setting(3.28, "validation loss to reach")


FINEWEB = Hyperparameters()

# mini is the same model in miniature, on Shakespeare, for two CPU cores. Its rules:
# - Width: 128, because paired heads need an even number of heads, of 64 channels. The learning rates were
#   chosen when mini read bytes.
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
MINI = replace(
    FINEWEB,
    track="mini",
    train_files=train_gpt.MINI.train_files,
    val_files=train_gpt.MINI.val_files,
    val_tokens=train_gpt.MINI.val_tokens,
    val_seq_len=train_gpt.MINI.val_seq_len,
    num_sequences=4,
    seq_lens=(256, 512, 768),
    sequences_per_pass=4,
    skip_rest=False,
    vocab_size=train_gpt.MINI.vocab_size,
    eot_token=train_gpt.MINI.eot_token,
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
    target_val_loss=train_gpt.MINI.target_val_loss,
)
TRACKS = {"fineweb": FINEWEB, "mini": MINI}


def parse_arguments(argv):
    return train_gpt.parse_arguments(argv, TRACKS)


def check_hyperparameters(hp, world_size):
    """Refuses sizes that don't divide each other, what would divide by zero, and what would be
    ignored."""
    for length in (*hp.seq_lens, hp.val_seq_len):
        valid = length > 0 and length % BLOCK_SIZE == 0
        require(valid, f"--seq_lens, --val_seq_len: {length} is not a multiple of {BLOCK_SIZE}")
    three = len(hp.seq_lens) == 3 and len(hp.windows) == 4
    require(three, "--seq_lens needs three numbers, and --windows four")
    for name, step in [("num_sequences", world_size), ("val_tokens", world_size * hp.val_seq_len)]:
        value = getattr(hp, name)
        require(value > 0 and value % step == 0, f"--{name} {value}: must be a multiple of {step}")
    heads = hp.num_heads > 0 and hp.num_heads % 2 == 0 and hp.model_dim % (4 * hp.num_heads) == 0
    require(heads, f"--num_heads {hp.num_heads}: must be even, and 4 times it must divide --model_dim")
    named = [hp.skip_from, hp.skip_to, hp.backout_layer, *hp.attn_free_layers, *hp.long_window_layers]
    named += [*hp.paired_layers, *hp.value_layers]
    last = max(named)
    require(last < hp.num_layers, f"--num_layers {hp.num_layers}: another option names layer {last}")
    require(hp.skip_from < hp.skip_to, "--skip_from must be below --skip_to")
    tables = 0 < hp.num_value_embeds <= len(hp.value_layers)
    require(tables, f"--num_value_embeds {hp.num_value_embeds}: must be 1 to {len(hp.value_layers)}")
    both = set(hp.paired_layers) & set(hp.long_window_layers)
    require(not both, f"--paired_layers and --long_window_layers can't share layers {both}")
    even = hp.val_loss_every % 2 == 0
    require(even, f"--val_loss_every {hp.val_loss_every}: must be even, because Adam needs two steps")
    positive = hp.cooldown_frac > 0 and hp.max_document > 0
    require(positive, "--cooldown_frac and --max_document must be more than 0")
    require(hp.yarn_beta > 1, f"--yarn_beta {hp.yarn_beta}: must be more than 1")
    steps = scheduled_iterations(hp)
    require(steps > 0, f"--num_iterations {hp.num_iterations}: the schedule has {steps} steps")


def check_inputs(args, hp):
    """Checks settings and shards before anything slow begins. Returns checksums of the tokens."""
    check_hyperparameters(hp, WORLD_SIZE)
    val_steps = hp.val_tokens // hp.val_seq_len
    checksums = [
        check_training_shards(hp),
        train_gpt.token_checksum(hp.val_files, hp.val_seq_len, val_steps, hp.vocab_size),
    ]
    train_gpt.check_files(hp)
    return checksums


# -----------------------------------------------------------------------------
# 7. Optimizers and schedules


def build_model(hp):
    torch.manual_seed(hp.seed)  # in case you add a random vector: init_weights only sets matrices
    return GPT(hp).to(DEVICE)  # the same on all ranks


def build_optimizers(model, hp):
    """Muon trains the banks of matrices; Adam the rest."""

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
    # The MLP has steps of sqrt(rows / cols), and its output steps twice as large. A step of a weight is
    # lr * scale * (update + lr * weight_decay * weight).
    banks = [
        dict(params=[model.attn_bank], scale=1.0),
        dict(params=[model.mlp_in_bank], scale=2.0),
        dict(params=[model.mlp_out_bank], scale=4.0),
    ]
    muon = Muon(banks, hp.muon_lr, hp.muon_momentum, hp.muon_beta2, hp.muon_weight_decay)
    return [adam, muon]


def scheduled_iterations(hp):
    """Returns the number of steps before the extension."""
    return round(hp.num_iterations * (1 - hp.extension_frac))


def get_stage(step, hp):
    """Returns 0, 1 or 2 in the thirds of the schedule, and 3 in the extension."""
    return min(3, 3 * step // scheduled_iterations(hp))


def get_seq_len(step, hp):
    return hp.seq_lens[min(2, get_stage(step, hp))]


def get_window_blocks(step, hp):
    """Returns the long window of a step, or that of the last validation, in units of window_block:
    () int32."""
    blocks = hp.val_window if step >= hp.num_iterations else hp.windows[get_stage(step, hp)]
    return torch.full((), blocks, dtype=torch.int32, device=DEVICE)


def get_lr(step, hp):
    """Returns the factor of all learning rates: 1, then larger with larger batches, with a linear
    decay to final_lr at the end."""
    scheduled = scheduled_iterations(hp)
    factor = 1.0
    if 3 * step > scheduled:
        factor = hp.lr_factor2
    if 3 * step > 2 * scheduled:
        factor = hp.lr_factor3
    w = min(1.0, max(0.0, 1 - step / scheduled) / hp.cooldown_frac)
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
    thirds = 3 * step / scheduled_iterations(hp)
    return 1.0, 0.5 * min(1, max(0, 2 - thirds)), 0.25 * max(0, 1 - thirds)


def get_rotary(stage, hp):
    """Returns the rotary frequencies (D/4,) and the scale of attention. Both change with the window
    by YaRN: frequencies that turn rarely within it are lowered, those that turn often stay."""
    head_dim = hp.model_dim // hp.num_heads
    freqs = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4, device=DEVICE)
    scale = 0.1
    for old, new in itertools.pairwise(hp.windows[: stage + 1]):
        ratio = old / new
        turns = hp.window_block * old * freqs / (2 * math.pi)
        kept = ((turns - 1) / (hp.yarn_beta - 1)).clamp(0, 1)
        freqs = freqs * (ratio + kept * (1 - ratio))
        scale *= 1 + 0.2 * math.log(new / old)
    return freqs, scale


def is_tied(step, hp):
    """Head and embedding are tied until two thirds of the schedule, up to and with an odd step."""
    return step <= math.ceil(2 / 3 * scheduled_iterations(hp)) | 1


def set_schedules(model, optimizers, step, hp):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            initial_lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = initial_lr * get_lr(step, hp)
            if isinstance(optimizer, Muon):
                group["momentum"] = get_muon_momentum(step, hp)
    model.set_step(step)


# -----------------------------------------------------------------------------
# 8. A step


def start_all_reduce(optimizer):
    """Starts to sum an optimizer's gradients over the processes. Returns what to wait for."""
    if WORLD_SIZE == 1:
        return []
    return [
        dist.all_reduce(p.grad, async_op=True) for p in parameters_of(optimizer) if p.grad is not None
    ]


def finish(handles, optimizer):
    """Waits for an optimizer's gradients and takes its step."""
    for handle in handles:
        handle.wait()
    optimizer.step()
    optimizer.zero_grad()


def train_step(model, optimizers, sequences, step, hp):
    """Trains on this rank's sequences (local, S + 1). Muon updates its parameters in every step, Adam
    in odd steps, with the sum of two gradients. Returns the mean loss."""
    set_schedules(model, optimizers, step, hp)
    adam, muon = optimizers
    if ON_GPU:
        sequences = sequences.pin_memory()  # the CPU doesn't wait for a copy from pinned memory
    sequences = sequences.to(DEVICE, non_blocking=True)
    inputs = sequences[:, :-1].contiguous()
    targets = sequences[:, 1:].long()
    window = get_window_blocks(step, hp)
    per_pass = math.gcd(hp.sequences_per_pass, len(inputs))
    total = 0
    model.train()
    for x, y in zip(inputs.split(per_pass), targets.split(per_pass)):
        loss = model(x, y, window)
        # As in modded-nanogpt, the gradient is that of the summed loss divided by the number of
        # sequences. Muon ignores its scale, and so does Adam, up to its epsilon.
        (loss / hp.num_sequences).backward()
        total += loss.detach()
    adam_step = step % 2 == 1
    head, embed = model.lm_head, model.embed
    tied = adam_step and is_tied(step, hp)
    if tied:
        head.grad += embed.grad
        embed.grad = None  # the processes sum it once, in the head's
    muon_handles = start_all_reduce(muon)
    adam_handles = start_all_reduce(adam) if adam_step else []
    finish(muon_handles, muon)
    if tied:  # with equal gradients, weights and moments stay equal, too
        embed.grad = head.grad
    if adam_step:
        finish(adam_handles, adam)
    return total / inputs.numel()


def warm_up(model, hp):
    """Trains on random tokens of each length: this compiles the kernels, connects the processes and
    allocates memory. The weights must then be set again."""
    optimizers = build_optimizers(model, hp)
    for stage in range(3):
        first = math.ceil(stage * scheduled_iterations(hp) / 3)
        for step in range(first, first + hp.warmup_steps):
            shape = (hp.num_sequences // WORLD_SIZE, get_seq_len(step, hp) + 1)
            train_step(
                model, optimizers, torch.randint(hp.vocab_size, shape, dtype=torch.int32), step, hp
            )
    model.zero_grad()


# -----------------------------------------------------------------------------
# 9. The timed loop


def train(run, model, optimizers):
    """Trains until the last step."""
    hp = run.hp
    batches = training_batches(hp, run.step)
    batches = itertools.chain([next(batches)], batches)  # reads the first shard before the clock starts
    train_ms = run.train_ms  # up to the last validation
    start_ms = clock()
    for step in range(run.step, hp.num_iterations + 1):
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            train_ms += clock() - start_ms
            run.train_ms = train_ms
            model.set_step(step)
            val_loss = evaluate(model, get_window_blocks(step, hp), hp)
            # without the training loss, which is that of three tokens
            train_gpt.save_and_log(run, model, optimizers, val_loss, [])
            start_ms = clock()
        if last_step:
            break
        # --------------- training
        train_step(model, optimizers, next(batches), step, hp)
        run.step += 1
        run.train_ms = train_ms + 1000 * time.perf_counter() - start_ms  # doesn't wait for the GPU
        run.write_step()
    tokens = sum(hp.num_sequences * get_seq_len(step, hp) for step in range(run.step))
    run.write_result(val_loss, tokens)


def train_runs(argv):
    """Trains --num_runs times. Only the first run compiles."""
    args, hp = parse_arguments(argv)
    checkpoint = train_gpt.load_checkpoint(args, SOURCE)
    if checkpoint:
        hp = replace(hp, **checkpoint["settings"])
    checksums = check_inputs(args, hp)
    if args.print_settings:
        return print(json.dumps(asdict(hp)))
    train_gpt.init_processes()
    model = build_model(hp)
    model.compile(dynamic=False)
    for seed in range(hp.seed, args.last_seed + 1):
        hp = replace(hp, seed=seed)
        optimizers = build_optimizers(model, hp)
        table = train_gpt.parameter_table(model, optimizers)
        run = train_gpt.start_run(args, hp, SOURCE, checksums, checkpoint, table)
        warm_up(model, hp)
        model.load_state_dict(build_model(hp).state_dict())  # the initial weights of this seed
        if checkpoint:
            train_gpt.load_states(checkpoint, run, model, optimizers)
        train(run, model, optimizers)
        checkpoint = None  # the other seeds have none
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def main(argv):
    return train_gpt.main(argv, train_runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
