"""Shared settings of the tests: the script's folder is importable, nothing is compiled unless a test asks."""
import os
import signal
import sys
from pathlib import Path

# Before torch is imported anywhere: eager code is the same arithmetic and starts in no time.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)

# A shell's background job ignores SIGINT, and so would all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
