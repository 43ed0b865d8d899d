"""Newton-Schulz against the singular value decomposition; Muon against a plain loop on 1, 2 and 4 processes."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt
from train_gpt import Muon, activation_dtype, zeropower_via_newtonschulz5
from util import spawn


def with_singular_values(rows, cols, values, seed):
    g = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64, generator=g)).Q
    v = torch.linalg.qr(torch.randn(cols, cols, dtype=torch.float64, generator=g)).Q
    k = len(values)
    return u[:, :k] @ torch.diag(torch.as_tensor(values, dtype=torch.float64)) @ v[:, :k].T


def quintic(values, steps=5):
    """What the iteration does to singular values: s -> a s + b s^3 + c s^5, after dividing by the Frobenius norm."""
    s = np.asarray(values, dtype=np.float64)
    s = s / (np.sqrt((s**2).sum()) + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32), (1, 16), (128, 127)])
def test_singular_values_end_near_one(shape):
    g = torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))
    out = zeropower_via_newtonschulz5(g)
    assert out.shape == g.shape and out.dtype == activation_dtype(g.device)
    s = torch.linalg.svdvals(out.double())
    # A Gaussian matrix that is nearly square has a few singular values too small to be lifted in five steps.
    lifted = s[torch.linalg.svdvals(g.double()) > 0.02 * g.norm()]
    assert len(lifted) > 0 and lifted.min() > 0.5 and s.max() < 1.5


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_well_conditioned_matrix_gives_its_polar_factor(shape):
    k = min(shape)
    g = with_singular_values(*shape, np.linspace(1.0, 2.0, k), seed=k)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    out = zeropower_via_newtonschulz5(g.float()).double()
    # Same singular vectors: U^T out V is diagonal, with values in the band around one.
    inner = u.T @ out @ vt.T
    off = inner - torch.diag(inner.diagonal())
    assert off.abs().max() < 0.04
    assert inner.diagonal().min() > 0.6 and inner.diagonal().max() < 1.3
    assert (out - u @ vt).norm() < 0.35 * (u @ vt).norm()


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_every_singular_value_follows_the_quintic(steps):
    values = np.array([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    g = with_singular_values(6, 10, values, seed=3)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    got = (u.T @ zeropower_via_newtonschulz5(g.float(), steps=steps).double() @ vt.T).diagonal()
    assert np.abs(got.numpy() - quintic(values, steps)).max() < 0.06  # bf16 keeps eight bits


def test_batched_and_scale_free():
    g = torch.randn(2, 3, 24, 16)
    g[0, 1] *= 1000  # every matrix has its own norm
    out = zeropower_via_newtonschulz5(g)
    assert out.shape == g.shape
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(
                out[i, j], zeropower_via_newtonschulz5(g[i, j]), rtol=0.02, atol=0.02
            )
    assert not zeropower_via_newtonschulz5(torch.zeros(4, 8)).any()  # no division by zero


# Shapes of a small model: stacked QKV, projections, an MLP pair, and numels that leave ranks without work.
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
LR, MOMENTUM, STEPS = 0.05, 0.9, 3


def initial(i, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def gradient(step, i, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + i)) * 10.0 ** (
        i % 3 - 1
    )


def run_muon(beta2=0.0):
    params = [torch.nn.Parameter(initial(i, s)) for i, s in enumerate(SHAPES)]
    opt = Muon(params, lr=LR, momentum=MOMENTUM, ns_steps=5, beta2=beta2)
    for step in range(STEPS):
        for group in opt.param_groups:
            group["momentum"] = (
                MOMENTUM + 0.02 * step
            )  # it is scheduled, so it is read at every step
            group["lr"] = LR / (1 + step)
        for i, p in enumerate(params):
            p.grad = gradient(step, i, p.shape)
        opt.step()
    return [p.detach() for p in params]


def plain_muon(beta2=0.0):
    """The definition, one matrix at a time, orthogonalized in float64."""
    params = [initial(i, s).double() for i, s in enumerate(SHAPES)]
    bufs, means = [torch.zeros_like(p) for p in params], {}
    for step in range(STEPS):
        m, lr = MOMENTUM + 0.02 * step, LR / (1 + step)
        for i, (p, buf) in enumerate(zip(params, bufs)):
            g = gradient(step, i, p.shape).double()
            buf.copy_(m * buf + (1 - m) * g)
            u = (1 - m) * g + m * buf  # Nesterov
            for j, (x, pm) in enumerate(
                zip(u.reshape(-1, *p.shape[-2:]), p.view(-1, *p.shape[-2:]))
            ):
                rows, cols = x.shape
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                if beta2:  # NorMuon: rows of tall and square matrices, columns of wide ones
                    square = (x**2).mean(1 if rows >= cols else 0, keepdim=True)
                    means[i, j] = beta2 * means.get((i, j), 0) + (1 - beta2) * square
                    even = x / means[i, j] ** 0.5
                    x = even * x.norm() / even.norm()
                pm -= lr * max(1, rows / cols) ** 0.5 * x
    return params


def muon_child(rank, world_size, folder):
    for beta2 in (0.0, 0.9):
        out = run_muon(beta2)
        np.savez(f"{folder}/muon_{world_size}_{rank}_{beta2}.npz", *[p.numpy() for p in out])


@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.95])
def test_one_process_equals_the_plain_loop(beta2):
    for p, start, want in zip(run_muon(beta2), map(initial, range(99), SHAPES), plain_muon(beta2)):
        moved = want - start.double()
        assert moved.norm() > 0.01
        assert (p.double() - want).norm() < 0.03 * moved.norm()  # the iteration runs in bf16


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_agree_with_one_process(world_size, tmp_path):
    spawn(muon_child, world_size, tmp_path, str(tmp_path))
    for rank, beta2 in itertools.product(range(world_size), (0.0, 0.9)):
        got = np.load(tmp_path / f"muon_{world_size}_{rank}_{beta2}.npz")
        for i, w in enumerate(run_muon(beta2)):
            np.testing.assert_allclose(got[f"arr_{i}"], w.numpy(), rtol=0, atol=2e-3 * LR)


def test_momentum_state_lives_on_its_owner_only_and_a_shape_is_one_batch(tmp_path):
    spawn(state_child, 2, tmp_path, str(tmp_path))
    counts = [int(np.load(tmp_path / f"state_{r}.npy")) for r in range(2)]
    total = sum(torch.Size(s).numel() for s in SHAPES)
    assert sum(counts) == total and max(counts) < 0.75 * total


def state_child(rank, world_size, folder):
    params = [torch.nn.Parameter(initial(i, s)) for i, s in enumerate(SHAPES)]
    opt = Muon(params, lr=LR)
    for i, p in enumerate(params):
        p.grad = gradient(0, i, p.shape)
    opt.step()
    with (
        mock.patch.object(train_gpt, "all_gather", wraps=train_gpt.all_gather) as gather,
        mock.patch.object(
            train_gpt, "zeropower_via_newtonschulz5", wraps=zeropower_via_newtonschulz5
        ) as batch,
    ):
        opt.step()
    assert gather.call_count == len(
        opt.param_groups
    )  # one a shape, and one batch of what is this rank's
    assert batch.call_count == sum(len(group["params"]) > rank for group in opt.param_groups)
    tensors = [t for state in opt.state.values() for t in state.values() if torch.is_tensor(t)]
    np.save(f"{folder}/state_{rank}.npy", sum(t.numel() for t in tensors))
