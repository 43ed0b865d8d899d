"""
Tests of Muon, on one and three processes: beside its definition in float64, matrix by matrix, with the singular
value decomposition in place of Newton-Schulz.
"""

import math
import warnings
from unittest import mock

import pytest
import torch

import train_gpt
from train_gpt import Muon, zeropower_via_newtonschulz5
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


class PlainMuon:
    """The definition for one matrix: NorMuon if beta2 isn't 0. `how` are the options of orthogonalize."""

    def __init__(self, weight, beta2, **how):
        self.weight = weight.detach().double()
        self.beta2 = beta2
        self.how = how
        self.momentum = self.mean_squares = 0

    def update(self, gradient, momentum):
        g = gradient.double()
        self.momentum = momentum * self.momentum + (1 - momentum) * g
        x = orthogonalize(momentum * self.momentum + (1 - momentum) * g, **self.how)
        if not self.beta2:
            return x
        rows, cols = x.shape
        channel = 1 if rows >= cols else 0  # rows of tall and square matrices, columns of wide ones
        square = (x**2).mean(channel, keepdim=True)
        self.mean_squares = self.beta2 * self.mean_squares + (1 - self.beta2) * square
        even = x / self.mean_squares.clamp_min(1e-10).sqrt()
        return even * x.norm() / even.norm().clamp_min(1e-30)  # without gradients: 0 / 0


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


def matrices(t):
    return t.reshape(-1, *t.shape[-2:])


def counting(name):
    """Replaces a function of train_gpt with a mock that calls the function."""
    return mock.patch.object(train_gpt, name, wraps=getattr(train_gpt, name))


def check_muon(beta2, ns_steps, world_size=1):
    """Three steps. Gradients have three magnitudes, and those of a parameter are zero. A step makes one batch
    and one all-gather per shape, and a rank keeps its share of the state."""
    rng = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]
    starts = [p.detach().double() for p in params]
    muon = Muon(params, lr=0.05, momentum=0.9, ns_steps=ns_steps, beta2=beta2)
    how = dict(beta2=beta2, polynomials=(QUINTIC,) * ns_steps)
    plain = [[PlainMuon(matrix, **how) for matrix in matrices(p)] for p in params]
    for step in range(3):
        lr, momentum = 0.05 / (1 + step), 0.9 + 0.02 * step
        for group in muon.param_groups:
            group.update(lr=lr, momentum=momentum)
        for i, (p, those) in enumerate(zip(params, plain)):
            p.grad = torch.randn(p.shape, generator=rng) * (0, 0.1, 1, 10)[i % 4]
            for matrix, g in zip(those, matrices(p.grad)):
                rows, cols = g.shape
                matrix.weight -= lr * max(1, rows / cols) ** 0.5 * matrix.update(g, momentum)
        with counting("all_gather") as gather, counting("zeropower_via_newtonschulz5") as batch:
            muon.step()
        assert gather.call_count == batch.call_count == len(muon.param_groups)
    for group in muon.param_groups:
        share = math.ceil(len(group["params"]) / world_size)
        assert len(muon.state[group["params"][0]]["momentum_buffer"]) == share
    for p, start, those in zip(params, starts, plain):
        want = torch.stack([matrix.weight for matrix in those]).view_as(p)
        error = p.detach().double() - want
        limit = 0.01 if train_gpt.DTYPE == torch.float32 else 0.05  # updates are rounded to bf16
        assert error.norm() <= limit * (want - start).norm()


@pytest.mark.parametrize(
    "beta2, ns_steps, dtype",
    [(0.0, 4, torch.float32), (0.9, 5, torch.float32), (0.0, 5, torch.bfloat16)],
)
def test_one_process(beta2, ns_steps, dtype, monkeypatch):
    monkeypatch.setattr(train_gpt, "DTYPE", dtype)
    check_muon(beta2, ns_steps)
    assert zeropower_via_newtonschulz5(torch.randn(4, 8)).dtype == dtype


def muon_child(rank, world_size):
    warnings.simplefilter("error", FutureWarning)  # PyTorch renames functions
    train_gpt.DTYPE = torch.float32
    check_muon(0.9, 5, world_size)


def test_three_processes(tmp_path):
    """Some have no matrix of their own in a group."""
    spawn(muon_child, 3, tmp_path)
