"""Compares the head and its loss in FP8, on the matrix units of a GPU, with float32 and bf16."""

import pytest
import torch
import torch.nn.functional as F

import train_gpt  # noqa: F401  (registers the ops)

head_loss = torch.ops.nanogpt.head_loss
head_loss_backward = torch.ops.nanogpt.head_loss_backward

# (tokens, in, out); the last one is the head of the fineweb track
SHAPES = [
    (128, 64, 128),
    (1024, 256, 384),
    (4096, 768, 1024),
    (48 * 1024, 768, 50304),
]


def error(got, want):
    """The relative error in the Frobenius norm."""
    difference = got.float() - want.float()
    return float(difference.norm() / want.float().norm())


def loss_and_gradients(logits, targets, dim, grad_s):
    """The loss, summed over tokens, and its gradient with respect to the logits, twice.

    The first gradient is in bf16. The second is rounded to e5m2 as the op does it, in units of
    grad_s. The function works on 4,096 tokens at a time, because all tokens together would need
    tens of GB.
    """
    loss = 0
    grads = []
    quantized = []
    for z, t in zip(logits.split(4096), targets.split(4096)):
        z = z.float().requires_grad_()
        capped = 30 * torch.sigmoid(z / (7.5 * dim**0.5))
        part = F.cross_entropy(capped, t, reduction="sum")
        (grad,) = torch.autograd.grad(part, z)
        grads.append(grad.bfloat16())
        quantized.append((grad / grad_s).to(torch.float8_e5m2))
        loss += part.item()
    return loss, torch.cat(grads), torch.cat(quantized).float() * grad_s


@pytest.mark.parametrize("tokens,dim,out", SHAPES)
def test_head_loss_and_its_gradients(tokens, dim, out, device):
    g = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, dim, device=device, generator=g)
    x = F.rms_norm(x, (dim,)).bfloat16()
    w = torch.randn(out, dim, device=device, generator=g)
    targets = torch.randint(out, (tokens,), device=device, generator=g)

    loss, logits, lse, x_f8, w_f8 = head_loss(x, w, targets)
    one = torch.ones((), device=device)
    grad_x, grad_w = head_loss_backward(one, logits, lse, x_f8, w_f8, targets)
    assert logits.dtype == torch.bfloat16
    assert grad_x.dtype == torch.bfloat16
    assert grad_w.dtype == torch.float32

    # float32 products of the same FP8 operands: they differ by accumulation and the last rounding
    x8 = x_f8.float() * (dim**0.5 / 448)
    w8 = w_f8.float() * (24 / 448)
    assert error(logits, x8 @ w8.T) < 5e-3
    want, grad, g8 = loss_and_gradients(logits, targets, dim, 1 / 448)
    assert abs(loss.item() - want) < 1e-5 * want
    assert error(grad_x, g8 @ w8) < 5e-3
    assert error(grad_w, g8.T @ x8) < 2e-3
    del x8, w8, g8

    # bf16 products: they also differ by rounding to 4 bits (e4m3) and 3 bits (e5m2)
    w16 = w.bfloat16()
    assert error(logits, x @ w16.T) < 0.06
    assert error(grad_x, grad @ w16) < 0.09
    assert error(grad_w, grad.T @ x) < 0.09
