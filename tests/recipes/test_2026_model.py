"""Compares the model with its definition in float64 (reference.py): losses, and the gradients of all
parameters. The FP8 head is compared with float64 on the rounded operands."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from recipes import january2026
from recipes.january2026 import GPT, TRACKS, get_window_blocks, head_loss_op
from tests.recipes import reference
from tests.training.test_fp8 import error
from tests.training.test_model import batch
from tests.util import randomized

EOT = 299


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    monkeypatch.setattr(january2026, "DTYPE", torch.float32)


def tiny(**changes):
    """The official model with fewer channels, and windows of an eighth."""
    settings = dict(
        vocab_size=300,
        eot_token=EOT,
        num_heads=6,
        model_dim=96,
        window_block=16,
        seq_lens=(128, 128, 256),
        val_seq_len=256,
        val_tokens=2048,
    )
    return replace(TRACKS["fineweb"], **(settings | changes))


def exact_logits(model, step, inputs):
    """The parameters in float64, and the logits of each sequence."""
    hp = model.hp
    p = {name: q.detach().double().requires_grad_() for name, q in model.named_parameters()}
    passed = [3, 7, 11, 13][: 1 + step // 520]
    freqs, scale = reference.rotary_and_scale(passed)
    long, short = (n // 8 for n in reference.windows(step))  # 16 tokens in place of 128
    return p, [reference.capped_logits(p, hp, seq, long, short, freqs, scale) for seq in inputs]


@pytest.mark.parametrize(
    "step, changes",
    [
        (100, dict(bigram_factor=0)),
        (600, {}),
        (1560, {}),
    ],
)
def test_training_loss_and_gradients(step, changes):
    """The loss of a step and its gradients, with the schedules of the official run."""
    hp = tiny(**changes)
    model = randomized(GPT(hp)).train()
    model.set_step(step)
    inputs, targets = batch(hp, 2, 128)
    p, logits = exact_logits(model, step, inputs)
    weights = reference.loss_weights(step)
    want = sum(reference.training_loss(z, target, weights) for z, target in zip(logits, targets))
    loss = model(inputs, targets, get_window_blocks(step, hp))
    assert loss.item() == pytest.approx(want.item(), rel=3e-6)
    want.backward()
    loss.backward()
    for name, q in model.named_parameters():
        right = p[name].grad
        error = q.grad.double() - right
        assert error.norm() < 2e-3 * right.norm(), name


@torch.no_grad()
def test_validation():
    """The last validation has a longer window in the long layers only. It predicts one token."""
    hp = tiny()
    model = randomized(GPT(hp)).eval()
    model.set_step(hp.num_iterations)
    inputs, targets = batch(hp, 1, 256, eot_every=10_000)
    _, (z,) = exact_logits(model, 1600, inputs)
    want = F.cross_entropy(z, targets[0], reduction="sum").item()
    for model.val_slice in (GPT.val_slice, 100):
        loss = model(inputs, targets, get_window_blocks(1600, hp))
        assert loss.item() == pytest.approx(want, rel=3e-6)


def test_bigram_rows():
    """With the official table, the hash of the last row overflows int32."""
    rows = 251_520
    fake = type("fake", (), {"bigram_embed": range(rows)})
    tokens = torch.randint(0, 50257, (300, 50))
    got = GPT.bigram_rows(fake, tokens)
    for seq, found in zip(tokens, got.tolist()):
        assert found == [reference.bigram_row(seq, t, rows) for t in range(50)]


# --------------------------------------------------------------- shapes and first values
def test_shapes(monkeypatch):
    """The parameters of the official model, without memory for them."""
    monkeypatch.setattr(GPT, "init_weights", lambda model, seed: None)
    with torch.device("meta"):
        model = GPT(TRACKS["fineweb"])
    dim = 768
    tables = 50304 * dim * (2 + 3 + 5)  # embedding and head, value embeddings, bigrams
    matrices = dim * dim * (10 * 4 + 11 * 2 * 4)
    gates = 12 * (1 + 1 + 10 * 6 + 5 * 6)
    lambdas = 3 * 11 + 2 * 10 + 3
    count = sum(p.numel() for p in model.parameters())
    assert count == tables + matrices + gates + lambdas


def test_initial_values(monkeypatch):
    """Those in bf16 are drawn in float32 and rounded: PyTorch 2.11 draws few distinct values in bf16."""
    hp = tiny(model_dim=768, vocab_size=1000, bigram_factor=1)
    p = dict(GPT(hp).named_parameters())
    monkeypatch.setattr(january2026, "DTYPE", torch.bfloat16)
    for name, rounded in GPT(hp).named_parameters():
        dtype = torch.float32 if "lambda" in name else torch.bfloat16
        assert_close(rounded, p[name].to(dtype), rtol=0, atol=0)
    std = 768**-0.5  # of a uniform distribution
    q, k, v, o = p.pop("attn_bank").unbind(1)
    for values, want in ((q, std), (k, std), (v, std), (p.pop("mlp_in_bank"), std / 2)):
        assert values.abs().max().item() == pytest.approx(3**0.5 * want, rel=0.01)
        assert values.std().item() == pytest.approx(want, rel=0.01)
    assert not o.any()
    head = p.pop("lm_head")
    assert head.std().item() == pytest.approx(0.005, rel=0.01)
    assert head.abs().max() > 0.02  # normal, not uniform
    assert torch.equal(p.pop("embed"), head)
    starts = dict(resid_lambdas=1.1, bigram_lambdas=0.1, qkv_lambdas=0.5, o_lambdas=1.0)
    starts |= dict(skip_lambda=-1.5, backout_lambda=0.5)
    for name, values in p.items():
        assert (values == starts.get(name, 0.0)).all(), name


# --------------------------------------------------------------- FP8
@pytest.mark.parametrize("grad", [1 / 8, 2.0**-30])
def test_fp8_loss(grad):
    """The operator's loss and gradients, and those in float64 with the same FP8 operands. They are at
    most 100 for inputs, 1.6 for weights, and 0.75 for gradients if that of the loss is 1. Some targets
    lie behind the end."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(64, 32, generator=g).bfloat16().requires_grad_()
    w = (0.3 * torch.randn(128, 32, generator=g)).bfloat16().requires_grad_()
    targets = torch.randint(0, 128, (64, 3), generator=g)
    targets[-1, 1:] = targets[-2, 2] = -1
    weights = torch.tensor([1.0, 0.5, 0.2])
    loss, logits, _, x_f8, w_f8 = head_loss_op(x, w, targets, weights)
    loss.backward(torch.tensor(grad))
    x8 = x_f8.double() * 100 / 448
    w8 = w_f8.double() * 1.6 / 448
    assert error(x8, x.double()) < 0.03  # e4m3 has four significant bits
    assert error(w8, w.double()) < 0.03
    assert error(logits, x8 @ w8.T) < 2e-3
    z = logits.detach().double().requires_grad_()
    want = 0.0
    sums = dict(ignore_index=-1, reduction="sum")
    for weight, ahead in zip(weights.double(), targets.unbind(1)):
        want = want + weight * F.cross_entropy(23 * torch.sigmoid((z + 5) / 7.5), ahead, **sums)
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    unit = 0.75 / 448
    grad_z = grad * unit * (z.grad / unit).to(torch.float8_e5m2).double()
    assert error(x.grad, grad_z @ w8) < 2e-3
    assert error(w.grad, grad_z.T @ x8) < 2e-3
