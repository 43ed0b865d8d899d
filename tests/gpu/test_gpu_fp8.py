"""The head and its loss in FP8 on a GPU's matrix units, against float32 and bf16."""

import pytest
import torch

import train_gpt  # noqa: F401  (registers the ops)

# (tokens, in, out); the last is the head of the FineWeb track
SHAPES = [(128, 64, 128), (1024, 256, 384), (4096, 768, 1024), (48 * 1024, 768, 50304)]


def error(got, want):
    """Relative, in the Frobenius norm."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def loss_and_gradients(logits, targets, dim, grad_s):
    """The loss, summed over tokens, and its gradient, 4,096 tokens at a time (all at once would be several 10 GB): in bf16,
    and in the e5m2 values, grad_s a unit, that the op makes of it."""
    loss, grads, quantized = 0, [], []
    for z, t in zip(logits.split(4096), targets.split(4096)):
        z = z.float().requires_grad_()
        part = torch.nn.functional.cross_entropy(
            30 * torch.sigmoid(z / (7.5 * dim**0.5)), t, reduction="sum"
        )
        grad = torch.autograd.grad(part, z)[0]
        grads.append(grad.bfloat16())
        quantized.append((grad / grad_s).to(torch.float8_e5m2))
        loss += part.item()
    return loss, torch.cat(grads), torch.cat(quantized).float() * grad_s


@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_head_loss_and_its_gradients(tokens, dim, out, device):
    g = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, dim, device=device, generator=g)
    x = torch.nn.functional.rms_norm(x, (dim,)).bfloat16()
    w = torch.randn(out, dim, device=device, generator=g)
    targets = torch.randint(out, (tokens,), device=device, generator=g)
    x_s, w_s, grad_s = dim**0.5 / 448, 24 / 448, 1 / 448

    loss, logits, lse, x_f8, w_f8 = torch.ops.nanogpt.head_loss(x, w, targets, x_s, w_s, grad_s)
    grad_x, grad_w = torch.ops.nanogpt.head_loss_backward(
        torch.ones((), device=device), logits, lse, x_f8, w_f8, targets, x_s, w_s, grad_s
    )
    assert logits.dtype == grad_x.dtype == torch.bfloat16 and grad_w.dtype == torch.float32

    # float32 products of the very FP8 operands: only accumulation and the last rounding are between them
    x8, w8 = x_f8.float() * x_s, w_f8.float() * w_s
    assert error(logits, x8 @ w8.T) < 5e-3
    want, grad, g8 = loss_and_gradients(logits, targets, dim, grad_s)
    assert abs(loss.item() - want) < 1e-5 * want
    assert error(grad_x, g8 @ w8) < 5e-3
    assert error(grad_w, g8.T @ x8) < 2e-3
    del x8, w8, g8
    # the bf16 matmuls they stand for: now with the roundings to 4 bits (e4m3) and 3 bits (e5m2) too
    w16 = w.bfloat16()
    assert error(logits, x @ w16.T) < 0.06
    assert error(grad_x, grad @ w16) < 0.09
    assert error(grad_w, grad.T @ x) < 0.09
