"""The FP8 matmul on a GPU's matrix units, against float32 and bf16."""
import pytest
import torch

import train_gpt  # noqa: F401  (registers the ops)

# (tokens, in, out); the last is the head of the FineWeb track
SHAPES = [(128, 64, 128), (1024, 256, 384), (4096, 768, 1024), (48 * 1024, 768, 50304)]


def error(got, want):
    """Relative, in the Frobenius norm."""
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_mm_and_its_gradients(tokens, dim, out, device):
    g = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, dim, device=device, generator=g)
    x = torch.nn.functional.rms_norm(x, (dim,)).bfloat16()
    w = torch.randn(out, dim, device=device, generator=g)
    grad = (torch.rand(tokens, out, device=device, generator=g) * 2 - 1).bfloat16()
    x_s, w_s, grad_s = dim**0.5 / 448, 24 / 448, 1 / 448

    y, x_f8, w_f8 = torch.ops.nanogpt.mm(x, w, x_s, w_s, grad_s)
    grad_x, grad_w = torch.ops.nanogpt.mm_backward(grad, x_f8, w_f8, x_s, w_s, grad_s)
    assert y.dtype == grad_x.dtype == torch.bfloat16 and grad_w.dtype == torch.float32

    # float32 products of the very FP8 operands: only accumulation and the last rounding are between them
    x8, w8, g8 = x_f8.float() * x_s, w_f8.float() * w_s, (grad.float() / grad_s).to(torch.float8_e5m2).float() * grad_s
    assert error(y, x8 @ w8.T) < 5e-3
    assert error(grad_x, g8 @ w8) < 5e-3
    assert error(grad_w, g8.T @ x8) < 2e-3
    del x8, w8, g8
    # the bf16 matmuls they stand for: now with the roundings to 4 bits (e4m3) and 3 bits (e5m2) too
    w16 = w.bfloat16()
    assert error(y, x @ w16.T) < 0.06
    assert error(grad_x, grad @ w16) < 0.09
    assert error(grad_w, grad.T @ x) < 0.09
