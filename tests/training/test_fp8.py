"""The head and its loss in FP8 against plain definitions in float64, on the operands as the ops quantized them."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import train_gpt
from util import random_tokens

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(16, 16, 16), (32, 64, 128), (48, 128, 256), (128, 32, 16)]


def head_inputs(tokens, dim, out, seed, spread=1.0):
    """An RMS-normed input, a head weight and targets, as the language-model head sees them, and the op's scales.
    With a spread of 20 most logits are in the cap's flat ends."""
    g = torch.Generator().manual_seed(seed)
    x = F.rms_norm(torch.randn(tokens, dim, generator=g), (dim,)).bfloat16()
    w = (spread * torch.randn(out, dim, generator=g)).bfloat16()
    targets = torch.randint(out, (tokens,), generator=g)
    targets[0], targets[-1] = 0, out - 1
    return x, w, targets, math.sqrt(dim) / 448, 24 * max(1, spread / 4) / 448, 1 / 448


def capped(logits, dim):
    return 30 * torch.sigmoid(logits / (7.5 * math.sqrt(dim)))


def plain_loss(logits, targets, dim):
    """Summed over tokens, in the type of the logits."""
    return F.cross_entropy(capped(logits, dim), targets, reduction="sum")


def deq(x_f8, scale):
    return x_f8.double() * scale


@pytest.mark.parametrize("spread", [1.0, 20.0])
@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_forward(tokens, dim, out, spread):
    x, w, targets, x_s, w_s, grad_s = head_inputs(tokens, dim, out, tokens, spread)
    loss, logits, lse, x_f8, w_f8 = torch.ops.nanogpt.head_loss(x, w, targets, x_s, w_s, grad_s)
    assert (
        logits.dtype == torch.bfloat16
        and x_f8.dtype == w_f8.dtype == E4M3
        and loss.dtype == lse.dtype == torch.float32
    )
    assert (
        logits.shape == (tokens, out)
        and x_f8.shape == x.shape
        and w_f8.shape == w.shape
        and lse.shape == (tokens,)
    )
    # Operands: nearest e4m3 value, half a unit of a 3-bit mantissa, or half the smallest subnormal (2^-9).
    for full, f8, s in ((x, x_f8, x_s), (w, w_f8, w_s)):
        error = (f8.double() - full.double() / s).abs()
        assert (error <= (full.double() / s).abs() * (2**-4 + 2**-8) + 2**-10).all()
    # Product: that of the dequantised operands, but for accumulation order and one rounding to bf16.
    want = deq(x_f8, x_s) @ deq(w_f8, w_s).T
    room = deq(x_f8, x_s).abs() @ deq(w_f8, w_s).abs().T
    assert ((logits.double() - want).abs() <= want.abs() * 2**-8 + room * 2**-12).all()
    # Loss: of those logits.
    torch.testing.assert_close(
        loss.double(), plain_loss(logits.double(), targets, dim), rtol=1e-6, atol=1e-5
    )
    torch.testing.assert_close(
        lse.double(), capped(logits.double(), dim).logsumexp(-1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("spread,grad", [(1.0, 1.0), (20.0, 1.0), (1.0, 1 / 16)])
@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_backward(tokens, dim, out, spread, grad):
    x, w, targets, x_s, w_s, grad_s = head_inputs(tokens, dim, out, tokens + 1, spread)
    _, logits, lse, x_f8, w_f8 = torch.ops.nanogpt.head_loss(x, w, targets, x_s, w_s, grad_s)
    backward, grad = torch.ops.nanogpt.head_loss_backward, torch.tensor(grad)
    grad_x, grad_w = backward(grad, logits, lse, x_f8, w_f8, targets, x_s, w_s, grad_s)
    assert grad_x.shape == x.shape and grad_x.dtype == torch.bfloat16
    assert grad_w.shape == w.shape and grad_w.dtype == torch.float32
    # The logits' gradient as the op quantizes it, read off by an identity in the place of x.
    eye = torch.eye(tokens).to(E4M3)
    g = backward(grad, logits, lse, eye, w_f8, targets, 1.0, w_s, grad_s)[1].T.double()
    torch.testing.assert_close(
        g / grad_s, (g / grad_s).to(E5M2).double(), rtol=1e-6, atol=0
    )  # e5m2 values they are
    exact = logits.double().requires_grad_()
    (plain_loss(exact, targets, dim) * grad).backward()
    # half a unit of a 2-bit mantissa, or half the smallest subnormal; float32's own error where p is nearly 1
    assert (
        (g - exact.grad).abs() <= exact.grad.abs() * (2**-3 + 2**-8) + grad_s * 2**-17 + 1e-6 * grad
    ).all()
    want_x, want_w = g @ deq(w_f8, w_s), g.T @ deq(x_f8, x_s)
    room_x, room_w = g.abs() @ deq(w_f8, w_s).abs(), g.abs().T @ deq(x_f8, x_s).abs()
    assert ((grad_x.double() - want_x).abs() <= want_x.abs() * 2**-8 + room_x * 2**-18).all()
    assert ((grad_w.double() - want_w).abs() <= room_w * 2**-18).all()


def test_autograd_reaches_both_operands():
    x, w, targets, *scales = head_inputs(32, 64, 48, 5)
    x.requires_grad_(), w.requires_grad_()
    loss, *saved = torch.ops.nanogpt.head_loss(x, w, targets, *scales)
    (loss / 4).backward()
    grad_x, grad_w = torch.ops.nanogpt.head_loss_backward(
        torch.tensor(0.25), *saved, targets, *scales
    )
    torch.testing.assert_close(x.grad, grad_x, rtol=0, atol=0)
    torch.testing.assert_close(w.grad.float(), grad_w, rtol=2**-8, atol=1e-6)
    # And near the gradients of the loss that was meant, within the precision of e5m2 and e4m3.
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    (plain_loss(exact[0] @ exact[1].T, targets, 64) / 4).backward()
    for got, want in zip((x, w), exact):
        assert (got.grad.double() - want.grad).norm() < 0.12 * want.grad.norm()


def test_ops_are_well_formed():
    """Fake kernels and autograd registration, by PyTorch's own checker."""
    x, w, targets, *scales = head_inputs(32, 64, 48, 6)
    checks = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.nanogpt.head_loss.default,
        (x.requires_grad_(), w.requires_grad_(), targets, *scales),
        test_utils=checks,
    )
    _, *saved = torch.ops.nanogpt.head_loss(x.detach(), w.detach(), targets, *scales)
    # opcheck's fake tensors do not go through torch.func.vjp, which this op uses
    inputs = (torch.ones(()), *saved, targets)
    with FakeTensorMode() as mode:
        fake = torch.ops.nanogpt.head_loss_backward(*map(mode.from_tensor, inputs), *scales)
    for got, want in zip(fake, torch.ops.nanogpt.head_loss_backward(*inputs, *scales), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


def test_the_model_uses_fp8_in_training_only():
    hp = replace(
        train_gpt.TRACKS["mini"],
        num_layers=2,
        num_heads=1,
        head_dim=16,
        model_dim=32,
        num_value_embeds=1,
        long_window_layers=(0,),
        max_window=128,
        train_seq_len=128,
        val_seq_len=128,
        batch_tokens=512,
    )
    torch.manual_seed(0)
    model, x = train_gpt.GPT(hp, use_fp8=True), F.rms_norm(torch.randn(128, 32), (32,)).bfloat16()
    torch.nn.init.normal_(model.lm_head.weight)
    targets = torch.as_tensor(random_tokens(128, seed=0)).long()
    with torch.no_grad():
        plain = plain_loss((x @ model.lm_head.weight.bfloat16().T).float(), targets, 32)
        # one sequence of a step's four: the gradient's scale counts on 1/4 of the loss
        fp8 = torch.ops.nanogpt.head_loss(
            x, model.lm_head.weight, targets, 32**0.5 / 448, 24 / 448, 1 / 448 / 4
        )[0]
        torch.testing.assert_close(model.train().loss(x, targets), fp8, rtol=0, atol=0)
        torch.testing.assert_close(model.eval().loss(x, targets), plain, rtol=0, atol=0)
    assert fp8 != plain and abs(fp8 - plain) < 0.01 * plain
