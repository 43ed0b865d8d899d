"""Compares the model with its definition in float64 (reference.py): losses, and the gradients of all
parameters. The FP8 head is compared with float64 on the rounded operands."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from recipes import january2026
from recipes.january2026 import GPT, GRAD_SCALE, TRACKS, get_window_blocks, head_loss_op
from tests.recipes import reference
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


def parameters64(model):
    exact = {}
    for name, p in model.named_parameters():
        exact[name] = p.detach().double().requires_grad_()
    return exact


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
    p = parameters64(model)
    long, short = (n // 8 for n in reference.windows(step))  # 16 tokens in place of 128
    passed = [3, 7, 11, 13][: 1 + step // 520]
    freqs, scale = reference.rotary_and_scale(passed, 16, unit=16)
    want = 0.0
    for seq, target in zip(inputs, targets):
        z = reference.capped_logits(p, hp, seq, long, short, freqs, scale)
        want = want + reference.training_loss(z, target, reference.loss_weights(step))
    loss = model(inputs, targets, get_window_blocks(step, hp))
    assert loss.item() == pytest.approx(want.item(), rel=3e-6)
    want.backward()
    loss.backward()
    for name, q in model.named_parameters():
        right = p[name].grad
        error = q.grad.double() - right
        assert error.norm() < 2e-3 * right.norm(), name


def test_validation():
    """The last validation has a longer window in the long layers only. It predicts one token."""
    hp = tiny()
    model = randomized(GPT(hp)).eval()
    model.set_step(hp.num_iterations)
    inputs, targets = batch(hp, 1, 256, eot_every=10_000)
    p = parameters64(model)
    freqs, scale = reference.rotary_and_scale([3, 7, 11, 13], 16, unit=16)
    with torch.no_grad():
        long, short = 20 * 16, 6 * 16
        z = reference.capped_logits(p, hp, inputs[0], long, short, freqs, scale)
    want = F.cross_entropy(z, targets[0], reduction="sum").item()
    for model.val_slice in (GPT.val_slice, 100):
        with torch.no_grad():
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
    monkeypatch.setattr(january2026, "DTYPE", torch.bfloat16)
    monkeypatch.setattr(GPT, "init_weights", lambda model, seed: None)
    with torch.device("meta"):
        model = GPT(TRACKS["fineweb"])
    dim = 768
    tables = 50304 * dim * (2 + 3 + 5)  # embedding and head, value embeddings, bigrams
    matrices = dim * dim * (10 * 4 + 11 * 2 * 4)
    gates = 12 * (1 + 1 + 10 * 6 + 5 * 6)
    lambdas = 3 * 11 + 2 * 10 + 3
    params = dict(model.named_parameters())
    count = sum(p.numel() for p in params.values())
    assert count == tables + matrices + gates + lambdas
    for name, p in params.items():
        assert p.dtype == (torch.float32 if "lambda" in name else torch.bfloat16), name
    assert model.state_dict().keys() == params.keys()  # nothing that follows from the step is saved


def test_initial_values(monkeypatch):
    """Those in bf16 are drawn in float32 and rounded: PyTorch 2.11 draws few distinct values in bf16."""
    hp = tiny(model_dim=768, vocab_size=1000, bigram_factor=1)
    p = dict(GPT(hp).named_parameters())
    monkeypatch.setattr(january2026, "DTYPE", torch.bfloat16)
    for name, rounded in GPT(hp).named_parameters():
        assert torch.equal(rounded, p[name].to(rounded.dtype)), name
    bound = math.sqrt(3 / 768)  # of a uniform distribution
    q, k, v, o = p["attn_bank"].unbind(1)
    for values, largest in ((q, bound), (k, bound), (v, bound), (p["mlp_in_bank"], bound / 2)):
        assert values.abs().max().item() == pytest.approx(largest, rel=0.01)
        std = largest / math.sqrt(3)
        assert values.std().item() == pytest.approx(std, rel=0.01)
    assert not o.any()
    head = p["lm_head"]
    assert head.std().item() == pytest.approx(0.005, rel=0.01)
    assert head.abs().max() > 0.02  # normal, not uniform
    assert torch.equal(p["embed"], head)
    starts = dict(resid_lambdas=1.1, bigram_lambdas=0.1, qkv_lambdas=0.5, o_lambdas=1.0)
    starts |= dict(skip_lambda=-1.5, backout_lambda=0.5)
    for name in p.keys() - {"attn_bank", "mlp_in_bank", "lm_head", "embed"}:
        assert (p[name] == starts.get(name, 0.0)).all(), name


# --------------------------------------------------------------- FP8
def quantized(x, largest):
    """In float64. FP8 numbers (e4m3) are at most 448."""
    scale = largest / 448
    x8 = (x / scale).to(torch.float8_e4m3fn)
    return (x8.double() * scale).detach().requires_grad_()


def fp8_operands():
    """Inputs, weights, and the targets of three tokens, some of which lie behind the end."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(64, 32, generator=g).bfloat16()
    w = (0.3 * torch.randn(128, 32, generator=g)).bfloat16()
    targets = torch.randint(0, 128, (64, 3), generator=g)
    targets[-1, 1:] = targets[-2, 2] = -1
    return x.requires_grad_(), w.requires_grad_(), targets


def test_fp8_loss():
    """The operator's loss and gradients, and those in float64 with the same FP8 operands. They are at
    most 100 for inputs, 1.6 for weights, and 0.75 for gradients if that of the loss is 1."""
    assert GRAD_SCALE == 0.75 / 448
    x, w, targets = fp8_operands()
    weights = torch.tensor([1.0, 0.5, 0.2])
    loss = head_loss_op(x, w, targets, weights)[0]
    loss.backward(torch.tensor(1 / 8))
    x8 = quantized(x, 100)
    w8 = quantized(w, 1.6)
    exact = x8 @ w8.T
    logits = exact + (exact.bfloat16() - exact).detach()  # rounded, with the exact one's gradient
    z = 23 * torch.sigmoid((logits + 5) / 7.5)
    want = 0.0
    sums = dict(ignore_index=-1, reduction="sum")
    for weight, ahead in zip(weights.double(), targets.unbind(1)):
        want = want + weight * F.cross_entropy(z, ahead, **sums)
    (want / 8).backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-3)
    large = [x.grad, w.grad]
    for got, exact in zip(large, (x8.grad, w8.grad)):
        assert got.dtype == torch.bfloat16
        error = got.double() - exact
        assert error.norm() < 0.1 * exact.norm()
    # a small gradient of the loss doesn't make the FP8 gradients underflow
    x.grad = w.grad = None
    loss = head_loss_op(x, w, targets, weights)[0]
    loss.backward(torch.tensor(2.0**-30))
    assert torch.equal(x.grad, large[0] * 2.0**-27)
    assert torch.equal(w.grad, large[1] * 2.0**-27)
