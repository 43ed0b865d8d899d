"""Compares the head and its loss in FP8, on the matrix units of a GPU, with float32 products of the same
FP8 operands. test_gpu_report.py compares them with float64, unrounded.
"""

import pytest
import torch
import torch.nn.functional as F

import train_gpt  # noqa: F401  (registers the ops)

head_loss = torch.ops.nanogpt.head_loss
head_loss_backward = torch.ops.nanogpt.head_loss_backward

# (tokens, in, out); the last one is the head of the fineweb track
SHAPES = [
    (1024, 256, 384),
    (48 * 1024, 768, 50304),
]


def error(got, want):
    """The relative error in the Frobenius norm."""
    difference = got.float() - want.float()
    return float(difference.norm() / want.float().norm())


def loss_and_gradient(logits, targets, dim):
    """The loss, summed over tokens, and its gradient with respect to the logits, rounded to e5m2.

    The function works on 4,096 tokens at a time, because all tokens together would need tens of GB.
    """
    unit = 1 / 448  # as in the op
    loss = 0
    grads = []
    for z, t in zip(logits.split(4096), targets.split(4096)):
        z = z.float().requires_grad_()
        capped = 30 * torch.sigmoid(z / (7.5 * dim**0.5))
        part = F.cross_entropy(capped, t, reduction="sum")
        part.backward()
        quantized = (z.grad / unit).to(torch.float8_e5m2)
        grads.append(quantized.float() * unit)
        loss += part.item()
    return loss, torch.cat(grads)


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

    # They differ by accumulation and the last rounding
    x8 = x_f8.float() * (dim**0.5 / 448)
    w8 = w_f8.float() * (24 / 448)
    assert error(logits, x8 @ w8.T) < 5e-3
    want, g8 = loss_and_gradient(logits, targets, dim)
    assert abs(loss.item() - want) < 1e-5 * want
    assert error(grad_x, g8 @ w8) < 5e-3
    assert error(grad_w, g8.T @ x8) < 2e-3
