"""
Tests of the whole model: shapes, counts, the initial loss, and a plain implementation in float64.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import train_gpt
from tests.training.test_attention import blocks, dense_attention, dense_mask
from tests.util import random_tokens, randomized
from train_gpt import GPT, TRACKS

FINEWEB = TRACKS["fineweb"]
TINY = replace(
    FINEWEB,
    vocab_size=300,
    eot_token=256,
    num_layers=12,
    num_heads=2,
    model_dim=64,
    train_seq_len=512,
    val_seq_len=512,
    batch_tokens=8 * 512,
    max_window=512,
)


def build(hp, dtype=torch.float32):
    """The model with activations of this dtype. Elsewhere, the dtype depends on the machine."""
    with mock.patch.object(train_gpt, "DTYPE", dtype):
        return GPT(hp)


def batch(hp, num_seqs, length, eot_every=60):
    n = num_seqs * (length + 1)
    tokens = random_tokens(n, seed=0, vocab=hp.vocab_size, eot=hp.eot_token, eot_every=eot_every)
    tokens = torch.tensor(tokens).view(num_seqs, length + 1)
    return tokens[:, :-1].int(), tokens[:, 1:]


def rms_norm(x):
    mean_square = x.square().mean(-1, keepdim=True)
    return x / (mean_square + torch.finfo(torch.float32).eps).sqrt()


def rotate(x, positions, freqs):
    """Rotates each pair (x_i, x_{i + D/2}) of x (..., D) by -position * frequency (D/2,)."""
    x1, x2 = x.chunk(2, dim=-1)
    y = torch.complex(x1, x2) * torch.exp(-1j * positions * freqs)
    return torch.cat([y.real, y.imag], dim=-1)


def reference_attention(params, hp, i, x, ve, mask):
    """x: (S, dim). ve: the value embeddings of this layer, or None."""
    weights = params[f"blocks.{i}.attn.qkv_w"]  # (3, H * D, dim)
    lambdas = params[f"blocks.{i}.attn.value_lambdas"]
    heads = (1, len(x), hp.num_heads, hp.model_dim // hp.num_heads)
    q = (x @ weights[0].T).view(heads)
    k = (x @ weights[1].T).view(heads)
    v = lambdas[0] * (x @ weights[2].T).view(heads)
    if ve is not None:
        v = v + lambdas[1] * ve.view(heads)
    quarter = q.size(-1) // 4
    turning = (1 / 1024) ** torch.linspace(0, 1, quarter, dtype=torch.float64)
    freqs = F.pad(turning, (0, quarter))  # half of the pairs stay
    positions = torch.arange(len(x))[:, None, None]
    q = rotate(rms_norm(q), positions, freqs)
    k = rotate(rms_norm(k), positions, freqs)
    y = dense_attention(q, k, v, mask)
    if hp.xsa:
        dot = torch.einsum("bshd,bshd->bsh", y, v)
        square = torch.einsum("bshd,bshd->bsh", v, v)
        along = dot / square
        part = params[f"blocks.{i}.attn.xsa_weights"].tanh()
        y = y - torch.einsum("h,bsh,bshd->bshd", part, along, v)
    return y.reshape(len(x), -1) @ params[f"blocks.{i}.attn.c_proj.weight"].T


def reference_smear(params, embeddings):
    """x[t] + scale * sigmoid(gate @ x[t, :12]) * x[t - 1], token by token: (S, dim)."""
    smeared = [embeddings[0]]
    for t in range(1, len(embeddings)):
        x = embeddings[t]
        gate = torch.sigmoid(params["smear_gate"] @ x[:12])
        factor = params["smear_scale"] * gate
        smeared.append(x + factor * embeddings[t - 1])
    return torch.stack(smeared)


def reference_mlp(params, hp, i, x):
    h = x @ params[f"blocks.{i}.mlp.c_fc.weight"].T
    h = torch.where(h > 0, h, hp.relu_slope * h).square()
    return h @ params[f"blocks.{i}.mlp.c_proj.weight"].T


def reference_logits(params, hp, seq, window_blocks):
    """The forward pass of one sequence (S,), in the dtype of the parameters."""
    long_mask = dense_mask(seq[None], window_blocks, hp.eot_token)
    short_mask = dense_mask(seq[None], max(1, window_blocks // 2), hp.eot_token)
    n = hp.num_layers
    num_skips = n // 2
    # With an odd number of layers, the middle one has no skip connection
    first_decoder = n - num_skips
    ve = {}  # by layer: fineweb's layers 0 and 9 use table 0, 1 and 10 table 1, 2 and 11 table 2
    for i in range(hp.num_value_embeds):
        ve[i] = params[f"value_embeds.{i}.weight"][seq]
        ve[n - hp.num_value_embeds + i] = ve[i]
    x0 = params["embed.weight"][seq]  # (S, dim)
    if hp.smear:
        x0 = reference_smear(params, x0)
    x0 = rms_norm(x0)
    x = x0
    skips = []
    for i in range(n):
        if i >= first_decoder:
            x = x + params["skip_weights"][i - first_decoder] * skips.pop()
        lambdas = params[f"blocks.{i}.residual_lambdas"]
        x = lambdas[0] * x + lambdas[1] * x0
        if i not in hp.attn_free_layers:
            mask = long_mask if i in hp.long_window_layers else short_mask
            x = x + reference_attention(params, hp, i, rms_norm(x), ve.get(i), mask)
        x = x + reference_mlp(params, hp, i, rms_norm(x))
        if i < num_skips:
            skips.append(x)
    logits = rms_norm(x) @ params["lm_head.weight"].T
    return 30 * torch.sigmoid(logits / (7.5 * math.sqrt(hp.model_dim)))


IDEAS = dict(smear=True, xsa=True, relu_slope=0.5)
# One layer has no skip connections and no value embeddings
SINGLE = dict(num_layers=1, attn_free_layers=(), num_value_embeds=0, long_window_layers=(0,))


@pytest.mark.parametrize(
    "hp, num_seqs, length, window",
    [
        (TINY, 1, 512, 1),
        (TINY, 3, 512, 3),  # half a window is one block
        (TINY, 1, 512, 4),
        (replace(TINY, num_layers=9, **IDEAS), 3, 256, 2),
        (replace(TINY, **SINGLE), 5, 128, 3),
        (TRACKS["mini"], 2, 256, 2),
    ],
)
def test_loss_and_gradients_equal_the_plain_model(hp, num_seqs, length, window):
    """In float64, token by token, sequence by sequence."""
    model = randomized(build(hp)).train()
    inputs, targets = batch(hp, num_seqs, length)
    exact = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    want = 0.0
    for seq, target in zip(inputs.long(), targets):
        logits = reference_logits(exact, hp, seq, window)
        want = want + F.cross_entropy(logits, target, reduction="sum")
    want.backward()
    loss = model(inputs, targets, blocks(window))
    assert loss.item() == pytest.approx(want.item(), rel=2e-6)
    loss.backward()
    for name, p in model.named_parameters():
        right = exact[name].grad
        if right is None or not right.any():  # the value embeddings of a layer without them
            assert p.grad is None or not p.grad.any(), name
            continue
        error = (p.grad.double() - right).norm() / right.norm()
        assert error < 1e-3, f"{name}: {error}"
    model.eval()
    # Evaluation computes the logits in slices. The last one can be shorter.
    for model.val_slice in (GPT.val_slice, 200):
        with torch.no_grad():
            loss = model(inputs, targets, blocks(window))
        assert loss.item() == pytest.approx(want.item(), rel=2e-6)


def test_fineweb_parameters():
    """The official model, without memory for it."""
    with torch.device("meta"):
        model = build(FINEWEB, torch.bfloat16)
    dim = 768
    tables = dim * (50304 + 4 * 50257)  # the head, the embedding and three value embeddings
    matrices = dim * dim * (12 * 8 + 11 * 4)
    scalars = 12 * 2 + 11 * 2 + 6
    assert sum(p.numel() for p in model.parameters()) == tables + matrices + scalars


def test_initial_values():
    """PyTorch 2.11 draws few distinct values in bf16, so ours are drawn in float32 and rounded."""
    hp = replace(TINY, **IDEAS)
    rounded = dict(build(hp, torch.bfloat16).named_parameters())
    starts = dict(value_lambdas=0.5, skip_weights=1.0)  # the others start at zero
    drawn = []
    for name, p in build(hp).named_parameters():
        dtype = torch.bfloat16 if "embed" in name else torch.float32
        assert_close(rounded[name], p.to(dtype), rtol=0, atol=0)
        if "embed" in name or name.endswith(("qkv_w", "c_fc.weight")):
            std = 1 if "embed" in name else 0.5 / 64**0.5
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert "embed" in name or p.abs().max() <= 3**0.5 * std, name  # uniform
            drawn.append(p.flatten()[0].item())
        elif name.endswith("residual_lambdas"):
            assert p.tolist() == [1.0, 0.0], name
        else:
            assert (p == starts.get(name.split(".")[-1], 0)).all(), name
    assert len(set(drawn)) == len(drawn)  # no two are drawn alike
