"""
Tests on a CUDA GPU; without one, this folder's are skipped.

    TORCH_COMPILE_DISABLE=0 python -m pytest tests/gpu

With the variable, the FP8 op's own kernels are compiled as in training; without it, only they are not.
"""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture
def device():
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _compiled():
    """The other tests run uncompiled; here every test compiles afresh, and float32 products are float32."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()
