"""
Tests of the head and its loss in FP8.

The reference is in float64. It gets the operands as the ops have quantized them.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import train_gpt
from tests.training.test_model import build
from train_gpt import TRACKS
from tests.util import random_tokens

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# (tokens, in, out)
SHAPES = [
    (16, 16, 16),
    (48, 128, 256),
    (128, 32, 16),
]
W_SCALE = 24 / 448
head_loss = torch.ops.nanogpt.head_loss
head_loss_backward = torch.ops.nanogpt.head_loss_backward


def head_inputs(tokens, dim, out, seed, spread=1.0):
    """An input after RMS norm, a head weight of at most 24, and targets.

    With a spread of 20, most logits are in the flat ends of the soft-cap.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, dim, generator=g)
    x = F.rms_norm(x, (dim,)).bfloat16()
    w = torch.randn(out, dim, generator=g)
    w = (spread * w).clamp(-24, 24).bfloat16()
    targets = torch.randint(out, (tokens,), generator=g)
    targets[0] = 0
    targets[-1] = out - 1
    return x, w, targets


def capped(logits, dim):
    return 30 * torch.sigmoid(logits / (7.5 * math.sqrt(dim)))


def plain_loss(logits, targets, dim):
    """The loss, summed over tokens, in the dtype of the logits."""
    return F.cross_entropy(capped(logits, dim), targets, reduction="sum")


def dequantize(x_f8, scale):
    return x_f8.double() * scale


def assert_nearest_e4m3(full, f8, scale):
    """
    Checks that every number is rounded to the nearest e4m3 number.

    The error is at most half a unit of the 3-bit mantissa, or half the smallest subnormal (2^-9).
    """
    scaled = full.double() / scale
    error = (f8.double() - scaled).abs()
    room = scaled.abs() * (2**-4 + 2**-8)
    assert (error <= room + 2**-10).all()


@pytest.mark.parametrize("spread", [1.0, 20.0])
@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_forward(tokens, dim, out, spread):
    x, w, targets = head_inputs(tokens, dim, out, tokens, spread)
    x_scale = math.sqrt(dim) / 448
    loss, logits, lse, x_f8, w_f8 = head_loss(x, w, targets)
    assert loss.dtype == torch.float32
    assert lse.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    assert x_f8.dtype == E4M3
    assert w_f8.dtype == E4M3
    assert_nearest_e4m3(x, x_f8, x_scale)
    assert_nearest_e4m3(w, w_f8, W_SCALE)
    # The product of the dequantized operands, up to the order of the sum and one rounding to bf16
    x8 = dequantize(x_f8, x_scale)
    w8 = dequantize(w_f8, W_SCALE)
    want = x8 @ w8.T
    room = x8.abs() @ w8.abs().T
    exact = logits.double()
    error = (exact - want).abs()
    rounding = want.abs() * 2**-8
    assert (error <= rounding + room * 2**-12).all()
    # The loss of these logits
    want_loss = plain_loss(exact, targets, dim)
    want_lse = capped(exact, dim).logsumexp(-1)
    assert_close(loss.double(), want_loss, rtol=1e-6, atol=1e-5)
    assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


SMALL = 2.0**-32  # with a small gradient of the loss, FP8 gradients must not underflow


@pytest.mark.parametrize("spread,grad", [(1.0, 1.0), (20.0, 1.0), (1.0, SMALL)])
@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_backward(tokens, dim, out, spread, grad):
    x, w, targets = head_inputs(tokens, dim, out, tokens + 1, spread)
    x_scale = math.sqrt(dim) / 448
    _, logits, lse, x_f8, w_f8 = head_loss(x, w, targets)
    grad = torch.tensor(grad)
    grad_scale = grad / 448
    grad_x, grad_w = head_loss_backward(grad, logits, lse, x_f8, w_f8, targets)
    assert grad_x.dtype == torch.bfloat16
    assert grad_w.dtype == torch.float32

    # With an identity matrix in place of x, the op returns its quantized gradient of the logits,
    # times the scale of x
    eye = torch.eye(tokens).to(E4M3)
    _, transposed = head_loss_backward(grad, logits, lse, eye, w_f8, targets)
    g = transposed.T.double() / x_scale
    scaled = g / grad_scale
    assert_close(scaled, scaled.to(E5M2).double(), rtol=1e-6, atol=0)
    exact = logits.double().requires_grad_()
    (plain_loss(exact, targets, dim) * grad).backward()
    # Half a unit of the 2-bit mantissa, half the smallest subnormal number, and the error of
    # float32 near p = 1
    error = (g - exact.grad).abs()
    room = exact.grad.abs() * (2**-3 + 2**-8)
    room += grad_scale * 2**-17
    room += 1e-6 * grad
    assert (error <= room).all()

    # The products of this gradient with the dequantized operands
    x8 = dequantize(x_f8, x_scale)
    w8 = dequantize(w_f8, W_SCALE)
    want_x = g @ w8
    room_x = g.abs() @ w8.abs()
    error_x = (grad_x.double() - want_x).abs()
    rounding = want_x.abs() * 2**-8
    assert (error_x <= rounding + room_x * 2**-18).all()
    want_w = g.T @ x8
    room_w = g.abs().T @ x8.abs()
    error_w = (grad_w.double() - want_w).abs()
    assert (error_w <= room_w * 2**-18).all()


def test_ops_are_well_formed():
    """PyTorch checks the fake kernels and the registration of autograd."""
    x, w, targets = head_inputs(32, 64, 48, 6)
    torch.library.opcheck(
        head_loss.default,
        (x.requires_grad_(), w.requires_grad_(), targets),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    # opcheck can't fake torch.func.vjp, which the backward op uses
    _, *saved = head_loss(x.detach(), w.detach(), targets)
    inputs = (torch.ones(()), *saved, targets)
    with FakeTensorMode() as mode:
        fake_inputs = [mode.from_tensor(t) for t in inputs]
        fake = head_loss_backward(*fake_inputs)
    real = head_loss_backward(*inputs)
    for got, want in zip(fake, real, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()


@pytest.mark.parametrize("use", [True, False])
def test_the_model_uses_fp8_in_training_only(use, monkeypatch):
    monkeypatch.setattr(train_gpt, "uses_fp8", lambda hp: use)
    model = build(TRACKS["mini"], torch.bfloat16)
    weight = model.lm_head.weight
    torch.nn.init.normal_(weight)
    x = F.rms_norm(torch.randn(128, 128), (128,)).bfloat16()
    targets = torch.as_tensor(random_tokens(128, seed=0)).long()
    with torch.no_grad():
        logits = x @ weight.bfloat16().T
        plain = plain_loss(logits.float(), targets, 128)
        fp8, *_ = head_loss(x, weight, targets)
        in_training = model.train().loss(x, targets)
        in_evaluation = model.eval().loss(x, targets)
    assert_close(in_training, fp8 if use else plain, rtol=0, atol=0)
    assert_close(in_evaluation, plain, rtol=0, atol=0)
    assert fp8 != plain
    assert abs(fp8 - plain) < 0.01 * plain


@pytest.mark.parametrize(
    "capability,hip,want",
    [
        ((8, 9), None, True),  # L4
        ((8, 6), None, False),  # A10
        ((9, 4), "6.2", False),  # MI300X: AMD's FP8 format is float8_e4m3fnuz
    ],
)
def test_gpus_that_use_fp8(capability, hip, want, monkeypatch):
    monkeypatch.setattr(train_gpt, "ON_GPU", True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert train_gpt.uses_fp8(TRACKS["fineweb"]) == want
    assert not train_gpt.uses_fp8(replace(TRACKS["fineweb"], fp8=False))
