"""
Tests of the head and its loss in FP8. tests/on_a_gpu compares them on a GPU, by check_head.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from tests.training.test_model import TINY, build
from train_gpt import TRACKS

head_loss = torch.ops.nanogpt.head_loss
head_loss_backward = torch.ops.nanogpt.head_loss_backward


def head_inputs(tokens, dim, out, device="cpu", spread=1):
    """An input after RMS norm, a head weight of at most 24, and targets.

    With a spread of 20, most logits are in the flat ends of the soft-cap.
    """
    g = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, dim, device=device, generator=g)
    w = torch.randn(out, dim, device=device, generator=g)
    targets = torch.randint(out, (tokens,), device=device, generator=g)
    return F.rms_norm(x, (dim,)).bfloat16(), (spread * w).clamp(-24, 24), targets


def plain_loss(logits, targets, dim):
    """The loss, summed over tokens, in the dtype of the logits."""
    return F.cross_entropy(30 * torch.sigmoid(logits / (7.5 * dim**0.5)), targets, reduction="sum")


def error(got, want):
    """The relative error in the Frobenius norm."""
    return float((got.double() - want).norm() / want.norm())


# relative errors of the loss, the logits, and the gradients of x and w, of which logits and grad_x are bfloat16
LIMITS = (1e-6, 2e-3, 2e-3, 1e-5)


def check_head(tokens, dim, out, spread=1, grad=1.0, device="cpu", limits=LIMITS):
    """Compares the loss and its gradients with float64 on the operands that the ops have rounded to FP8."""
    x, w, targets = head_inputs(tokens, dim, out, device, spread)
    loss, logits, lse, x_f8, w_f8 = head_loss(x, w, targets)
    grad_x, grad_w = head_loss_backward(
        torch.tensor(grad, device=device), logits, lse, x_f8, w_f8, targets
    )
    dtypes = [t.dtype for t in (loss, logits, lse, grad_x, grad_w)]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    x8 = x_f8.double() * dim**0.5 / 448
    w8 = w_f8.double() * 24 / 448
    assert error(x8, x.double()) < 0.03  # e4m3 has four significant bits
    assert error(w8, w.double()) < 0.03
    want_loss = want_w = 0
    for rows in torch.arange(tokens, device=device).split(4096):  # all logits would need tens of GB
        assert error(logits[rows], x8[rows] @ w8.T) < limits[1]
        z = logits[rows].double().requires_grad_()
        part = plain_loss(z, targets[rows], dim)
        part.backward()
        g = grad / 448 * (448 * z.grad).to(torch.float8_e5m2).double()
        assert error(grad_x[rows], g @ w8) < limits[2]
        want_loss += part.item()
        want_w += g.T @ x8[rows]
    assert loss.item() == pytest.approx(want_loss, rel=limits[0])
    assert error(grad_w, want_w) < limits[3]


@pytest.mark.parametrize("tokens, dim, out", [(16, 16, 16), (48, 128, 256), (128, 32, 16)])
@pytest.mark.parametrize("spread, grad", [(1, 1.0), (20, 1.0), (1, 2.0**-32)])
def test_head_loss_and_its_gradients(tokens, dim, out, spread, grad):
    """With a small gradient of the loss, FP8 gradients must not underflow."""
    check_head(tokens, dim, out, spread, grad)


def test_ops_are_well_formed():
    """PyTorch checks the fake kernels and the registration of autograd."""
    x, w, targets = head_inputs(32, 64, 48)
    checks = ("test_faketensor", "test_autograd_registration")
    inputs = (x.requires_grad_(), w.requires_grad_(), targets)
    torch.library.opcheck(head_loss.default, inputs, test_utils=checks)
    _, *saved = head_loss(x.detach(), w.detach(), targets)
    inputs = (torch.ones(()), *saved, targets)
    torch.library.opcheck(head_loss_backward.default, inputs, test_utils=checks[:1])


@pytest.mark.parametrize("use", [True, False])
@torch.no_grad()
def test_the_model_uses_fp8_in_training_only(use, monkeypatch):
    monkeypatch.setattr(train_gpt, "uses_fp8", lambda hp: use)
    model = build(TINY, torch.bfloat16)
    x, w, targets = head_inputs(128, 64, 320)
    model.lm_head.weight.copy_(w)
    plain = plain_loss((x @ w.bfloat16().T).float(), targets, 64)
    fp8, *_ = head_loss(x, w, targets)
    assert model.train().loss(x, targets) == (fp8 if use else plain) != (plain if use else fp8)
    assert model.eval().loss(x, targets) == plain


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
