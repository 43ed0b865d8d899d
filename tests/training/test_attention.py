"""
Compares block masks and FlexAttention with dense definitions in float64. test_model.py compares the portable
attention.
"""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.util import random_tokens
from train_gpt import attention, document_ids, flex_block_mask, portable_mask

EOT = 9


def blocks(n):
    return torch.tensor(n, dtype=torch.int32)


def random_input(num_seqs, length, eot_every, seed):
    """Tokens (B, S) with an end-of-text every `eot_every` tokens on average."""
    tokens = random_tokens(num_seqs * length, seed, EOT + 1, EOT, eot_every)
    return torch.tensor(tokens, dtype=torch.int32).view(num_seqs, length)


def dense_mask(tokens, window_blocks, eot=EOT):
    """The definition of the mask, pair by pair.

    Returns (T, T), True where the query sees the key. T counts the tokens of all sequences.
    """
    num_seqs, length = tokens.shape
    pos = torch.arange(num_seqs * length)
    seq = pos // length
    block = pos // 128
    doc = (tokens == eot).flatten().cumsum(0)  # ends of text up to and including the position
    q = pos[:, None]
    k = pos[None, :]
    causal = k <= q
    same_document = doc[q] == doc[k]
    same_sequence = seq[q] == seq[k]
    in_window = block[q] - block[k] < window_blocks
    return causal & same_document & same_sequence & in_window


def dense_attention(q, k, v, mask, scale=0.12):
    """softmax(scale q k^T + mask) v, in the dtype of q: q, k, v (B, S, H, D) and a mask (T, T)."""
    q_rows = q.flatten(0, 1)  # (T, H, D)
    k_rows = k.flatten(0, 1)
    v_rows = v.flatten(0, 1)
    scores = scale * torch.einsum("qhd,khd->hqk", q_rows, k_rows)
    scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights, v_rows)
    return out.reshape(q.shape)


def qkv(*shape, seed):
    """Three tensors (B, S, H, D)."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(3, *shape, generator=g).unbind()


# (sequences, tokens in each, mean document length, window in blocks)
#
# There are sequences of one block, windows longer than the sequence, and documents that are shorter
# than a block or longer than the sequence.
CASES = [
    (1, 128, 40, 1),
    (1, 512, 60, 2),
    (1, 640, 300, 3),
    (1, 384, 1.5, 5),
    (1, 1024, 10**9, 4),
    (3, 256, 10**9, 2),
    (4, 128, 200, 3),
    (1, 512, 200, 9),
    (5, 256, 7, 4),
]


def check_block_mask(found, mask):
    """A BlockMask must have the lists of PyTorch's own for this mask (T, T).

    They must be contiguous, because FlexAttention's kernels ignore the strides of a row. With
    those of a transposed matrix, gradients of k and v were off by up to 18% on an H200.
    """
    n = len(mask)
    want = create_block_mask(lambda b, h, q, k: mask[q, k], None, None, n, n, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, columns = getattr(found, f"{kind}_num_blocks"), getattr(found, f"{kind}_indices")
        assert counts.is_contiguous() and columns.is_contiguous()
        assert torch.equal(counts, getattr(want, f"{kind}_num_blocks"))
        listed = torch.arange(n // 128) < counts[..., None]
        assert torch.equal(columns[listed], getattr(want, f"{kind}_indices")[listed])
        assert 0 <= columns.min() <= columns.max() < n // 128
    assert found.BLOCK_SIZE == (128, 128)
    position = torch.arange(n)
    blocks = torch.kron(found.to_dense()[0, 0], torch.ones(128, 128)).bool()
    assert torch.equal(blocks & found.mask_mod(0, 0, position[:, None], position), mask)


@pytest.mark.parametrize("case", CASES)
def test_flex_block_mask(case):
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=2)
    tokens[0, -1] = EOT  # right before the start of a sequence
    docs = document_ids(tokens, EOT)
    check_block_mask(flex_block_mask(docs, blocks(window)), dense_mask(tokens, window))


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out):
            self.numel = max(self.numel, out.numel())
        return out


def test_portable_attention_is_linear_in_length():
    inputs = qkv(1, 4096, 1, 16, seed=11)
    for x in inputs:
        x.requires_grad_()
    docs = torch.ones(4096, dtype=torch.int32)
    with Largest() as largest:
        mask = portable_mask(docs, blocks(2), 2)
        attention(*inputs, mask).sum().backward()
    assert largest.numel <= 2 * 4096 * 2 * 128 < 4096**2


COMPILED = pytest.param(True, marks=pytest.mark.slow)


@pytest.mark.parametrize("compiled", [False, COMPILED])
@torch._dynamo.config.patch(disable=False)
def test_flex_attention_with_our_block_mask(compiled):
    """Runs the code for CUDA on the CPU, forward only. One compiled graph serves all windows."""

    def masked(q, k, v, docs, window):
        return attention(q, k, v, flex_block_mask(docs, window))

    if compiled:
        masked = torch.compile(masked, dynamic=False, fullgraph=True)
    tokens = random_input(2, 512, 150, seed=12)
    docs = document_ids(tokens, EOT)
    q, k, v = qkv(2, 512, 2, 32, seed=13)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=compiled):
        # uncompiled, FlexAttention ignores the lists of blocks
        for window in (1, 2, 5) if compiled else (8,):
            dense = dense_mask(tokens, window)
            exact = (q.double(), k.double(), v.double())
            want = dense_attention(*exact, dense)
            got = masked(q, k, v, docs, blocks(window))
            assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
