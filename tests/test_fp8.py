"""The FP8 matmul against matmuls of the dequantised operands."""
import math

import pytest
import torch

import train_gpt  # noqa: F401  (registers the ops)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def head_inputs(tokens, dim, out, seed):
    """An RMS-normed input, a head weight and an output gradient, as the language-model head sees them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.rms_norm(torch.randn(tokens, dim, generator=g), (dim,)).bfloat16()
    w = torch.randn(out, dim, generator=g).bfloat16()
    grad = (torch.rand(tokens, out, generator=g) * 2 - 1).bfloat16()
    return x, w, grad, math.sqrt(dim) / 448, 24 / 448, 1 / 448


def deq(x_f8, scale):
    return x_f8.double() * scale


SHAPES = [(16, 16, 16), (32, 64, 128), (48, 128, 256), (128, 32, 16)]


@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_forward(tokens, dim, out):
    x, w, _, x_s, w_s, grad_s = head_inputs(tokens, dim, out, tokens)
    y, x_f8, w_f8 = torch.ops.nanogpt.mm(x, w, x_s, w_s, grad_s)
    assert y.dtype == torch.bfloat16 and x_f8.dtype == w_f8.dtype == E4M3
    assert y.shape == (tokens, out) and x_f8.shape == x.shape and w_f8.shape == w.shape
    # Operands: nearest e4m3 value, half a unit of a 3-bit mantissa, or half the smallest subnormal (2^-9).
    for full, f8, s in ((x, x_f8, x_s), (w, w_f8, w_s)):
        error = (f8.double() - full.double() / s).abs()
        assert (error <= (full.double() / s).abs() * (2**-4 + 2**-8) + 2**-10).all()
    # Product: that of the dequantised operands, but for accumulation order and one rounding to bf16.
    want = deq(x_f8, x_s) @ deq(w_f8, w_s).T
    scale = deq(x_f8, x_s).abs() @ deq(w_f8, w_s).abs().T
    assert ((y.double() - want).abs() <= want.abs() * 2**-8 + scale * 2**-12).all()


@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_backward(tokens, dim, out):
    x, w, grad, x_s, w_s, grad_s = head_inputs(tokens, dim, out, tokens + 1)
    _, x_f8, w_f8 = torch.ops.nanogpt.mm(x, w, x_s, w_s, grad_s)
    grad_x, grad_w = torch.ops.nanogpt.mm_backward(grad, x_f8, w_f8, x_s, w_s, grad_s)
    assert grad_x.shape == x.shape and grad_x.dtype == torch.bfloat16
    assert grad_w.shape == w.shape and grad_w.dtype == torch.float32
    # The gradient as the op quantizes it, read off by an identity in the place of x.
    eye = torch.eye(tokens).to(E4M3)
    _, read = torch.ops.nanogpt.mm_backward(grad, eye, w_f8, 1.0, w_s, grad_s)
    g = read.T.double()
    torch.testing.assert_close(g / grad_s, (g / grad_s).to(E5M2).double(), rtol=1e-6, atol=0)  # e5m2 values they are
    assert ((g - grad.double()).abs() <= grad.double().abs() * (2**-3 + 2**-8) + grad_s * 2**-17).all()
    want_x, want_w = g @ deq(w_f8, w_s), g.T @ deq(x_f8, x_s)
    scale_x, scale_w = g.abs() @ deq(w_f8, w_s).abs(), g.abs().T @ deq(x_f8, x_s).abs()
    assert ((grad_x.double() - want_x).abs() <= want_x.abs() * 2**-8 + scale_x * 2**-18).all()
    assert ((grad_w.double() - want_w).abs() <= scale_w * 2**-18).all()


def test_autograd_reaches_both_operands():
    x, w, grad, *scales = head_inputs(32, 64, 48, 5)
    x.requires_grad_(), w.requires_grad_()
    y, x_f8, w_f8 = torch.ops.nanogpt.mm(x, w, *scales)
    y.backward(grad)
    grad_x, grad_w = torch.ops.nanogpt.mm_backward(grad, x_f8, w_f8, *scales)
    torch.testing.assert_close(x.grad, grad_x, rtol=0, atol=0)
    torch.testing.assert_close(w.grad.float(), grad_w, rtol=2**-8, atol=1e-6)
    # And near the gradients of the product that was meant, within the precision of e5m2 and e4m3.
    exact_x, exact_w = grad.double() @ w.detach().double(), grad.double().T @ x.detach().double()
    assert (x.grad.double() - exact_x).norm() < 0.12 * exact_x.norm()
    assert (w.grad.double() - exact_w).norm() < 0.12 * exact_w.norm()


def test_ops_are_well_formed():
    """Fake kernels and autograd registration, by PyTorch's own checker."""
    x, w, grad, *scales = head_inputs(32, 64, 48, 6)
    checks = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.nanogpt.mm.default, (x.requires_grad_(), w.requires_grad_(), *scales),
                          test_utils=checks)
    _, x_f8, w_f8 = torch.ops.nanogpt.mm(x.detach(), w.detach(), *scales)
    torch.library.opcheck(torch.ops.nanogpt.mm_backward.default, (grad, x_f8, w_f8, *scales),
                          test_utils="test_faketensor")


def test_casted_linear_uses_fp8_in_training_only():
    dim, out = 64, 128
    x, w, _, x_s, w_s, grad_s = head_inputs(32, dim, out, 7)
    layer = train_gpt.CastedLinear(dim, out, use_fp8=True, x_s=x_s, w_s=w_s, grad_s=grad_s)
    with torch.no_grad():
        layer.weight.copy_(w)
    layer.train()
    fp8 = torch.ops.nanogpt.mm(x, layer.weight.detach(), x_s, w_s, grad_s)[0]
    bf16 = torch.nn.functional.linear(x, w)
    assert not torch.equal(fp8, bf16)
    torch.testing.assert_close(layer(x), fp8, rtol=0, atol=0)
    torch.testing.assert_close(layer(x[None]), fp8[None], rtol=0, atol=0)  # a leading batch dimension
    layer.eval()
    torch.testing.assert_close(layer(x), bf16, rtol=0, atol=0)
