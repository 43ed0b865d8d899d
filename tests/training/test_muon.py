"""
Tests of Muon.

They compare Newton-Schulz with the singular value decomposition, and Muon on one and three processes
with a plain loop.
"""

import math
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt
from train_gpt import Muon, wide, zeropower_via_newtonschulz5
from tests.util import spawn


def random_orthogonal(size, g):
    gaussian = torch.randn(size, size, dtype=torch.float64, generator=g)
    return torch.linalg.qr(gaussian).Q


def with_singular_values(rows, cols, values, seed):
    """A (rows, cols) matrix in float64."""
    g = torch.Generator().manual_seed(seed)
    k = len(values)
    u = random_orthogonal(rows, g)[:, :k]
    v = random_orthogonal(cols, g)[:, :k]
    s = torch.as_tensor(values, dtype=torch.float64)
    return u @ torch.diag(s) @ v.T


def quintic(values, steps=5):
    """The singular values after the iteration.

    It divides them by the Frobenius norm, then repeats s -> a s + b s^3 + c s^5.
    """
    s = np.asarray(values, dtype=np.float64)
    norm = np.sqrt((s**2).sum())
    s = s / (norm + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    monkeypatch.setattr(train_gpt, "DTYPE", torch.float32)


@pytest.mark.parametrize("rows, steps", [(6, 5), (10, 1), (10, 5)])
def test_every_singular_value_follows_the_quintic(rows, steps):
    """The singular vectors stay: U^T out V is diagonal. Nothing is divided by zero."""
    values = np.array([3.0, 2.0, 1.0, 0.5, 0.2, 0.001])
    g = with_singular_values(rows, 10, values, seed=3)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    out = zeropower_via_newtonschulz5(g.float(), steps=steps).double()
    want = torch.zeros(rows, dtype=torch.float64)
    want[:6] = torch.from_numpy(quintic(values, steps))
    found = u.T @ out @ vt.T
    torch.testing.assert_close(found, want.diag(), rtol=0, atol=1e-4)
    assert not zeropower_via_newtonschulz5(torch.zeros(4, 8)).any()


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (1, 16)])
def test_singular_values_end_near_one(shape):
    g = torch.randn(2, 3, *shape)
    with mock.patch.object(train_gpt, "DTYPE", torch.bfloat16):
        out = zeropower_via_newtonschulz5(g)
    assert out.dtype == torch.bfloat16
    before = torch.linalg.svdvals(g.double())
    after = torch.linalg.svdvals(out.double())
    # Five steps don't lift the few tiny singular values of a square Gaussian matrix
    lifted = after[before > 0.02 * before.norm(dim=-1, keepdim=True)]
    assert 0.5 < lifted.min() < after.max() < 1.5


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


def run_muon(beta2=0.0):
    params = [torch.nn.Parameter(initial(i, s)) for i, s in enumerate(SHAPES)]
    opt = Muon(params, lr=LR, momentum=MOMENTUM, ns_steps=5, beta2=beta2)
    for step in range(STEPS):
        for group in opt.param_groups:
            group["momentum"] = momentum_at(step)
            group["lr"] = lr_at(step)
        for i, p in enumerate(params):
            p.grad = gradient(step, i, p.shape)
        opt.step()
    return [p.detach() for p in params]


def orthogonalize(x):
    """Newton-Schulz of one matrix, by its definition."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x


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


def plain_muon(beta2=0.0):
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
    params = [torch.nn.Parameter(initial(i, s)) for i, s in enumerate(SHAPES)]
    opt = Muon(params, lr=LR, momentum=MOMENTUM, ns_steps=5, beta2=0.9)
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
        assert len(mine["average"]) == share
        first = numbers["params"][0]
        whole = saved["state"][first]
        for p, average in zip(group["params"], whole["average"], strict=True):
            torch.testing.assert_close(average, wide((1 - MOMENTUM) * p.grad))
    opt.load_state_dict(saved)
    for before, after in zip(own, opt.state.values(), strict=True):
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name])


def muon_child(rank, world_size, folder):
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
