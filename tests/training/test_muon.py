"""
Tests of Muon.

They compare Newton-Schulz with the singular value decomposition, and Muon on one and three processes
with a plain loop.
"""

import copy
import math
import warnings
from unittest import mock

import pytest
import torch

import train_gpt
from train_gpt import Muon, wide, zeropower_via_newtonschulz5
from tests.util import spawn


QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(x, polynomials=(QUINTIC,) * 5, factor=1, epsilon=1e-7):
    """The iteration by its definition, of matrices in float64.

    It divides by the Frobenius norm, then takes s -> a s + b s^3 + c s^5 for each singular value.
    """
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / (factor * s.norm(dim=-1, keepdim=True) + epsilon)
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vt


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    monkeypatch.setattr(train_gpt, "DTYPE", torch.float32)


@pytest.mark.parametrize("shape, steps", [((6, 10), 5), ((10, 10), 1), ((2, 3, 10, 10), 5)])
def test_every_singular_value_follows_the_quintic(shape, steps):
    """Nothing is divided by zero. tests/gpu/test_report.py compares Muon in bf16."""
    g = torch.randn(shape)
    out = zeropower_via_newtonschulz5(g, steps)
    want = orthogonalize(g.double(), (QUINTIC,) * steps)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4)
    assert not zeropower_via_newtonschulz5(torch.zeros(4, 8)).any()
    with mock.patch.object(train_gpt, "DTYPE", torch.bfloat16):
        assert zeropower_via_newtonschulz5(g).dtype == torch.bfloat16


# Shapes of a small model: stacked QKV, projections, an MLP. For some shapes, there are fewer
# matrices than ranks.
SHAPES = [
    (3, 32, 16),
    (16, 32),
    (64, 16),
    (16, 64),
    (3, 32, 16),
    (64, 16),
    (16, 64),
    (48, 8),
    (32, 16),
    (8, 16, 4),
]
LR = 0.05
MOMENTUM = 0.9
STEPS = 3


def initial(i, shape):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(shape, generator=generator)


def gradient(step, i, shape):
    """Gradients of three magnitudes."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    scale = 10.0 ** (i % 3 - 1)
    return torch.randn(shape, generator=generator) * scale


def lr_at(step):
    return LR / (1 + step)


def momentum_at(step):
    return MOMENTUM + 0.02 * step


def new_muon(beta2):
    params = [torch.nn.Parameter(initial(i, s)) for i, s in enumerate(SHAPES)]
    return params, Muon(params, lr=LR, momentum=MOMENTUM, ns_steps=5, beta2=beta2)


def run_muon(beta2):
    params, opt = new_muon(beta2)
    for step in range(STEPS):
        for group in opt.param_groups:
            group["momentum"] = momentum_at(step)
            group["lr"] = lr_at(step)
        for i, p in enumerate(params):
            p.grad = gradient(step, i, p.shape)
        opt.step()
    return [p.detach() for p in params]


def normalize(x, mean, beta2):
    """NorMuon of one matrix.

    It equalizes the rows of tall and square matrices, and the columns of wide ones.
    """
    rows, cols = x.shape
    dim = 1 if rows >= cols else 0
    square = (x**2).mean(dim, keepdim=True)
    mean = beta2 * mean + (1 - beta2) * square
    even = x / mean**0.5
    return even * x.norm() / even.norm(), mean


def plain_muon(beta2):
    """Muon by its definition, one matrix at a time, in float64."""
    params = [initial(i, s).double() for i, s in enumerate(SHAPES)]
    momenta = [torch.zeros_like(p) for p in params]
    means = {}
    for step in range(STEPS):
        m = momentum_at(step)
        lr = lr_at(step)
        for i, p in enumerate(params):
            g = gradient(step, i, p.shape).double()
            momenta[i] = m * momenta[i] + (1 - m) * g
            nesterov = m * momenta[i] + (1 - m) * g
            shape = (-1, *p.shape[-2:])
            updates = nesterov.reshape(shape)
            matrices = p.view(shape)
            for j, (update, matrix) in enumerate(zip(updates, matrices)):
                x = orthogonalize(update)
                if beta2:
                    mean = means.get((i, j), 0)
                    x, means[i, j] = normalize(x, mean, beta2)
                rows, cols = matrix.shape
                scale = max(1, rows / cols) ** 0.5
                matrix -= lr * scale * x
    return params


@pytest.mark.parametrize("beta2", [0.0, 0.9])
def test_one_process_equals_the_plain_loop(beta2):
    starts = [initial(i, s).double() for i, s in enumerate(SHAPES)]
    found = run_muon(beta2)
    wanted = plain_muon(beta2)
    for got, start, want in zip(found, starts, wanted):
        moved = want - start
        assert moved.norm() > 0.01
        error = got.double() - want
        assert error.norm() < 0.01 * moved.norm()  # updates are rounded to bf16


# --------------------------------------------------------------- processes
def counting(name):
    """Replaces a function of train_gpt with a mock that calls the function."""
    return mock.patch.object(train_gpt, name, wraps=getattr(train_gpt, name))


def check_state(world_size):
    """A rank keeps its share of the state, and saves and loads all of it. A step makes one batch and
    one all-gather per shape."""
    params, opt = new_muon(beta2=0.9)
    for i, p in enumerate(params):
        p.grad = gradient(0, i, p.shape)
    with counting("all_gather") as gather:
        with counting("zeropower_via_newtonschulz5") as batch:
            opt.step()
    assert gather.call_count == batch.call_count == len(opt.param_groups)
    own = [dict(state) for state in opt.state.values()]
    saved = opt.state_dict()
    for group, numbers, mine in zip(opt.param_groups, saved["param_groups"], own, strict=True):
        share = math.ceil(len(group["params"]) / world_size)
        assert len(mine["momentum_buffer"]) == share
        first = numbers["params"][0]
        whole = saved["state"][first]
        for p, momentum in zip(group["params"], whole["momentum_buffer"], strict=True):
            torch.testing.assert_close(momentum, wide((1 - MOMENTUM) * p.grad))
    kept = copy.deepcopy(saved)
    opt.load_state_dict(saved)
    torch.testing.assert_close(saved, kept, rtol=0, atol=0)  # its argument stays as it is
    for before, after in zip(own, opt.state.values(), strict=True):
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name])


def muon_child(rank, world_size, folder):
    warnings.simplefilter("error", FutureWarning)  # PyTorch renames functions
    train_gpt.DTYPE = torch.float32
    check_state(world_size)
    torch.save(run_muon(beta2=0.9), f"{folder}/{rank}.pt")


def test_processes_agree_with_one_process(tmp_path):
    """Of three ranks, some have no matrix of their own in a group."""
    spawn(muon_child, 3, tmp_path, str(tmp_path))
    alone = run_muon(beta2=0.9)
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt")
        for got, want in zip(found, alone, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-3 * LR)
