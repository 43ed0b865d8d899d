"""Compares compiled FlexAttention with the portable attention and with the dense definition."""

import math

import pytest
import torch

from train_gpt import attention, document_ids, flex_block_mask, portable_mask

EOT = 50256
# (tokens, mean document length, window in blocks); the last two have the length of the training
CASES = [
    (1024, 60, 1),
    (2048, 300, 16),
    (8192, 5, 14),
    (48 * 1024, 1000, 14),
    (48 * 1024, 10**9, 14),
]


def case(length, every, device, heads=6, dim=128):
    """Document ids (T,), and q, k, v and an output gradient, each (1, T, H, D) in bf16.

    Documents have random lengths. q and k have an RMS of 1, as after QK norm.
    """
    g = torch.Generator(device).manual_seed(length + every % 1000)
    shape = (1, length)
    tokens = torch.randint(
        EOT,
        shape,
        device=device,
        generator=g,
        dtype=torch.int32,
    )
    is_end = torch.rand(shape, device=device, generator=g) < 1 / every
    tokens[is_end] = EOT
    docs = document_ids(tokens, EOT)
    four = torch.randn(
        (4, 1, length, heads, dim),
        device=device,
        generator=g,
    )
    return docs, four.bfloat16().unbind()


def as_window(blocks, device):
    return torch.tensor(blocks, dtype=torch.int32, device=device)


def assert_near(got, want, tolerance):
    """The error of each row is below `tolerance` times the largest row.

    A row is the vector of one head at one position.
    """
    assert got.isfinite().all()
    error = (got.double() - want.double()).norm(dim=-1)
    largest = want.double().norm(dim=-1).max()
    off = float(error.max() / largest)
    assert off < tolerance, off


@torch.compile(dynamic=False)
def flex(q, k, v, docs, window):
    return attention(q, k, v, flex_block_mask(docs, window))


def forward_and_backward(function, q, k, v, grad):
    """The output, and the gradients of q, k and v."""
    inputs = [t.detach().clone() for t in (q, k, v)]
    for t in inputs:
        t.requires_grad_()
    y = function(*inputs)
    y.backward(grad.to(y.dtype))
    return [y.detach()] + [t.grad for t in inputs]


def flex_forward_and_backward(q, k, v, grad, docs, window):
    def function(q, k, v):
        return flex(q, k, v, docs, window)

    return forward_and_backward(function, q, k, v, grad)


def visible_pairs(rows, docs, blocks):
    """(rows, T): True where a query sees a key."""
    keys = torch.arange(len(docs), device=docs.device)
    queries = rows[:, None]
    query_docs = docs[rows][:, None]
    causal = keys <= queries
    same_document = query_docs == docs
    in_window = queries // 128 - keys // 128 < blocks
    return causal & same_document & in_window


@pytest.mark.parametrize("length,every,blocks", CASES)
def test_flex_equals_portable_forward_and_backward(length, every, blocks, device):
    docs, (q, k, v, grad) = case(length, every, device)
    window = as_window(blocks, device)
    mask = portable_mask(docs, (1 - window) * 128, blocks)

    def portable(q, k, v):
        return attention(q, k, v, mask)

    got = flex_forward_and_backward(q, k, v, grad, docs, window)
    want = forward_and_backward(portable, q.float(), k.float(), v.float(), grad)
    for a, b in zip(got, want):
        assert_near(a, b, 0.03)


@pytest.mark.parametrize("length,every,blocks", CASES)
def test_flex_equals_the_definition(length, every, blocks, device):
    """Checks all rows of short sequences.

    In long sequences, it checks random rows and those at the edges of blocks.
    """
    docs, (q, k, v, _) = case(length, every, device)
    got = flex(q, k, v, docs, as_window(blocks, device))
    rows = torch.arange(length, device=device)
    if length > 2048:
        edges = [0, 127, 128, length - 129, length - 128, length - 1]
        chosen = torch.randint(length, (250,), device=device)
        rows = torch.cat([rows[edges], chosen])
    visible = visible_pairs(rows, docs, blocks)
    queries = q[0, rows].float()
    keys = k[0].float()
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * 0.12
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    want = torch.einsum("hqk,khd->qhd", weights, v[0].float())
    assert_near(got[0, rows], want, 0.02)


def test_backward_equals_the_definition(device):
    length = 2048
    blocks = 5
    docs, (q, k, v, grad) = case(length, 300, device)
    rows = torch.arange(length, device=device)
    visible = visible_pairs(rows, docs, blocks)

    def dense(q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.12
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    got = flex_forward_and_backward(q, k, v, grad, docs, as_window(blocks, device))
    want = forward_and_backward(dense, q.double(), k.double(), v.double(), grad)
    for a, b in zip(got, want):
        assert_near(a, b, 0.03)
