"""
The tests in this folder need a CUDA GPU. They are skipped without one.

    TORCH_COMPILE_DISABLE=0 python -m pytest tests/on_a_gpu

Without the variable, the kernels of the FP8 op are not compiled.
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
    """Other tests run uncompiled. Here, every test compiles from scratch."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()
