"""The head and its loss in FP8, on the matrix units of a GPU, which round sums differently."""

import pytest

from tests.training.test_fp8 import check_head


@pytest.mark.parametrize("tokens, dim, out", [(1024, 256, 384), (48 * 1024, 768, 50304)])
def test_head_loss_and_its_gradients(tokens, dim, out, device):
    """The larger one is the head of the fineweb track."""
    check_head(tokens, dim, out, device=device, limits=(1e-5, 5e-3, 5e-3, 2e-3))
