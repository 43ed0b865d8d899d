"""
Tests of Muon.

They compare Newton-Schulz with the singular value decomposition, and Muon on 1, 2 and 4 processes
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
    u = random_orthogonal(rows, g)
    v = random_orthogonal(cols, g)
    k = len(values)
    s = torch.as_tensor(values, dtype=torch.float64)
    return u[:, :k] @ torch.diag(s) @ v[:, :k].T


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


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (1, 16), (127, 128)])
def test_singular_values_end_near_one(shape):
    generator = torch.Generator().manual_seed(shape[0])
    g = torch.randn(*shape, generator=generator)
    out = zeropower_via_newtonschulz5(g)
    assert out.shape == g.shape
    assert out.dtype == train_gpt.DTYPE
    before = torch.linalg.svdvals(g.double())
    after = torch.linalg.svdvals(out.double())
    # Five steps don't lift the few tiny singular values of a nearly square Gaussian matrix
    lifted = after[before > 0.02 * g.norm()]
    assert len(lifted) > 0
    assert lifted.min() > 0.5
    assert after.max() < 1.5


@pytest.mark.parametrize("shape", [(24, 24), (16, 40)])
def test_well_conditioned_matrix_gives_its_polar_factor(shape):
    k = min(shape)
    g = with_singular_values(*shape, np.linspace(1.0, 2.0, k), seed=k)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    out = zeropower_via_newtonschulz5(g.float()).double()
    # The singular vectors are the same: U^T out V is diagonal, with values around one
    inner = u.T @ out @ vt.T
    diagonal = inner.diagonal()
    off = inner - torch.diag(diagonal)
    assert off.abs().max() < 0.04
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.3
    polar = u @ vt
    assert (out - polar).norm() < 0.35 * polar.norm()


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_every_singular_value_follows_the_quintic(steps):
    values = np.array([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    g = with_singular_values(6, 10, values, seed=3)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    out = zeropower_via_newtonschulz5(g.float(), steps=steps).double()
    got = (u.T @ out @ vt.T).diagonal()
    error = np.abs(got.numpy() - quintic(values, steps))
    assert error.max() < 0.06  # bf16 keeps eight bits


def test_batched_and_scale_free():
    g = torch.randn(2, 3, 16, 24)
    g[0, 1] *= 1000  # every matrix has its own norm
    out = zeropower_via_newtonschulz5(g)
    assert out.shape == g.shape
    for i in range(2):
        for j in range(3):
            alone = zeropower_via_newtonschulz5(g[i, j])
            torch.testing.assert_close(out[i, j], alone, rtol=0.02, atol=0.02)
    zeros = torch.zeros(4, 8)
    assert not zeropower_via_newtonschulz5(zeros).any()  # no division by zero


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
        for i, p in enumerate(params):
            g = gradient(step, i, p.shape).double()
            momenta[i] = m * momenta[i] + (1 - m) * g
            nesterov = m * momenta[i] + (1 - m) * g
            shape = (-1, *p.shape[-2:])
            updates = nesterov.reshape(shape)
            matrices = p.view(shape)
            for j, (update, matrix) in enumerate(zip(updates, matrices)):
                rows, cols = matrix.shape
                x = orthogonalize(update)
                if beta2:
                    x, means[i, j] = normalize(x, means.get((i, j), 0), beta2)
                matrix -= lr_at(step) * max(1, rows / cols) ** 0.5 * x
    return params


def become(rank, world_size):
    """Sets the constants that train_gpt has when torchrun starts it."""
    train_gpt.RANK = rank
    train_gpt.WORLD_SIZE = world_size


def muon_child(rank, world_size, folder):
    become(rank, world_size)
    for beta2 in (0.0, 0.9):
        arrays = [p.numpy() for p in run_muon(beta2)]
        np.savez(f"{folder}/muon_{world_size}_{rank}_{beta2}.npz", *arrays)


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.95])
def test_one_process_equals_the_plain_loop(beta2):
    starts = [initial(i, s).double() for i, s in enumerate(SHAPES)]
    for got, start, want in zip(run_muon(beta2), starts, plain_muon(beta2)):
        moved = want - start
        assert moved.norm() > 0.01
        error = got.double() - want
        assert error.norm() < 0.03 * moved.norm()  # the iteration runs in bf16


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_agree_with_one_process(world_size, tmp_path):
    spawn(muon_child, world_size, tmp_path, str(tmp_path))
    for beta2 in (0.0, 0.9):
        alone = run_muon(beta2)
        for rank in range(world_size):
            got = np.load(tmp_path / f"muon_{world_size}_{rank}_{beta2}.npz")
            for i, want in enumerate(alone):
                np.testing.assert_allclose(got[f"arr_{i}"], want.numpy(), rtol=0, atol=2e-3 * LR)


def counting(name):
    """Replaces a function of train_gpt with a mock that calls the function."""
    return mock.patch.object(train_gpt, name, wraps=getattr(train_gpt, name))


def state_child(rank, world_size):
    become(rank, world_size)
    params = [torch.nn.Parameter(initial(i, s)) for i, s in enumerate(SHAPES)]
    opt = Muon(params, lr=LR, momentum=MOMENTUM, beta2=0.9)
    for i, p in enumerate(params):
        p.grad = gradient(0, i, p.shape)
    with counting("all_gather") as gather, counting("zeropower_via_newtonschulz5") as batch:
        opt.step()
    assert gather.call_count == batch.call_count == len(opt.param_groups)
    own = [dict(state) for state in opt.state.values()]
    saved = opt.state_dict()
    for group, numbers, mine in zip(opt.param_groups, saved["param_groups"], own, strict=True):
        assert len(mine["average"]) == math.ceil(len(group["params"]) / world_size)
        whole = saved["state"][numbers["params"][0]]
        for p, average in zip(group["params"], whole["average"], strict=True):
            torch.testing.assert_close(average, wide((1 - MOMENTUM) * p.grad))
    opt.load_state_dict(saved)
    for before, after in zip(own, opt.state.values(), strict=True):
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name])


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_keeps_its_share_of_the_state_and_saves_all_of_it(world_size, tmp_path):
    """A step makes one batch and one all-gather per shape."""
    spawn(state_child, world_size, tmp_path)
