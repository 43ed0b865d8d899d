"""FlexAttention with the block mask, compiled, against the portable attention and the dense definition."""

import math

import pytest
import torch

from train_gpt import attention, document_ids, flex_block_mask, portable_mask

EOT = 50256
# (tokens, mean document length, window in blocks): the training length last, with the first and the last window
CASES = [
    (1024, 60, 1),
    (1024, 10**9, 3),
    (2048, 300, 16),
    (4096, 1000, 4),
    (8192, 5, 14),
    (16384, 2000, 7),
    (48 * 1024, 1000, 1),
    (48 * 1024, 1000, 14),
    (48 * 1024, 10**9, 14),
]


def case(length, every, device, heads=6, dim=128):
    """Documents of random lengths; q and k of unit RMS, as the QK norm makes them; an output gradient."""
    g = torch.Generator(device).manual_seed(length + every % 1000)
    tokens = torch.randint(0, EOT, (1, length), device=device, generator=g, dtype=torch.int32)
    tokens[torch.rand(1, length, device=device, generator=g) < 1 / every] = EOT
    qkv = torch.randn(4, 1, length, heads, dim, device=device, generator=g)
    return document_ids(tokens, EOT), qkv.bfloat16().unbind()


def assert_near(got, want, tolerance):
    """No row (a head's vector at a position) is off by more than `tolerance` of the largest row."""
    assert got.isfinite().all()
    off = (got.double() - want.double()).norm(dim=-1).max() / want.double().norm(dim=-1).max()
    assert off < tolerance, float(off)


def flex(q, k, v, docs, window):
    return attention(q, k, v, flex_block_mask(docs, window), 0.12)


def run(function, q, k, v, grad):
    """-> output, and the gradients of q, k and v."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    y = function(q, k, v)
    y.backward(grad.to(y.dtype))
    return y.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("length,every,blocks", CASES)
def test_flex_equals_portable_forward_and_backward(length, every, blocks, device):
    docs, (q, k, v, grad) = case(length, every, device)
    window = torch.tensor(blocks, dtype=torch.int32, device=device)
    compiled = torch.compile(flex, dynamic=False)
    got = run(lambda *qkv: compiled(*qkv, docs, window), q, k, v, grad)
    mask = portable_mask(docs, window, blocks)
    want = run(lambda *qkv: attention(*qkv, mask, 0.12), *(t.float() for t in (q, k, v)), grad)
    for a, b in zip(got, want):
        assert_near(a, b, 0.03)


@pytest.mark.parametrize("length,every,blocks", CASES)
def test_flex_equals_the_definition(length, every, blocks, device):
    """Every row where the sequence is short, else 256 of them, spread over blocks and their edges."""
    docs, (q, k, v, _) = case(length, every, device)
    got = torch.compile(flex, dynamic=False)(
        q, k, v, docs, torch.tensor(blocks, dtype=torch.int32, device=device)
    )
    edges = torch.tensor([0, 127, 128, length - 129, length - 128, length - 1], device=device)
    rows = (
        torch.arange(length, device=device)
        if length <= 2048
        else torch.cat([edges, torch.randint(length, (250,), device=device)])
    )
    keys = torch.arange(length, device=device)
    visible = (
        (keys <= rows[:, None])
        & (docs[rows][:, None] == docs)
        & (rows[:, None] // 128 - keys // 128 < blocks)
    )
    scores = torch.einsum("qhd,khd->hqk", q[0, rows].float(), k[0].float()) * 0.12
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    assert_near(got[0, rows], torch.einsum("hqk,khd->qhd", weights, v[0].float()), 0.02)


def test_backward_equals_the_definition(device):
    length, blocks = 2048, 5
    docs, (q, k, v, grad) = case(length, 300, device)
    window = torch.tensor(blocks, dtype=torch.int32, device=device)
    compiled = torch.compile(flex, dynamic=False)
    got = run(lambda *qkv: compiled(*qkv, docs, window), q, k, v, grad)
    i = torch.arange(length, device=device)
    visible = (i <= i[:, None]) & (docs[:, None] == docs) & (i[:, None] // 128 - i // 128 < blocks)

    def dense(q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.12
        return torch.einsum(
            "bhqk,bkhd->bqhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v
        )

    for a, b in zip(got, run(dense, *(t.double() for t in (q, k, v)), grad)):
        assert_near(a, b, 0.03)
