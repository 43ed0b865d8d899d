"""Compares attention on a GPU, which is compiled FlexAttention, with the portable attention in float32.

test_gpu_report.py compares it with the dense definition.
"""

import pytest
import torch

from gpu.report_stages import attend, with_gradients
from train_gpt import attention, portable_mask


def case(length, every, device):
    """Document ids (T,), and q, k, v and an output gradient, each (1, T, H, D) in bf16.

    Documents have random lengths. q and k have an RMS of 1, as after QK norm.
    """
    g = torch.Generator(device).manual_seed(length + every % 1000)
    begins = torch.rand(length, device=device, generator=g) < 1 / every
    docs = begins.cumsum(0, dtype=torch.int32) + 1
    four = torch.randn(4, 1, length, 6, 128, device=device, generator=g)
    return docs, four.bfloat16().unbind()


@pytest.mark.parametrize(
    "length,every,blocks",  # `every`: the mean length of a document; blocks: the window
    [
        (1024, 60, 1),
        (8192, 5, 14),
        (48 * 1024, 1000, 14),  # these have the length of the training
        (48 * 1024, 10**9, 14),
    ],
)
def test_flex_equals_portable_forward_and_backward(length, every, blocks, device):
    """No row, the vector of one head at one position, is off by more than 3% of the largest."""
    docs, (*qkv, grad) = case(length, every, device)
    window = torch.tensor(blocks, dtype=torch.int32, device=device)
    mask = portable_mask(docs, window, blocks)

    def flex(q, k, v):
        return attend(q, k, v, docs, window)

    def portable(q, k, v):
        return attention(q, k, v, mask)

    got = with_gradients(flex, qkv, grad)
    want = with_gradients(portable, [t.float() for t in qkv], grad)
    for a, b in zip(got, want):
        error = (a.double() - b.double()).norm(dim=-1)
        assert error.max() < 0.03 * b.double().norm(dim=-1).max()
