"""Settings for all tests: the module path, and no compilation unless a test asks for it."""

import os
import signal
import sys
from pathlib import Path

# Set before torch is imported. Eager code does the same arithmetic and starts at once.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).resolve().parent
FOLDERS = [TESTS.parent, TESTS, TESTS / "training", TESTS / "tools"]
sys.path[:0] = map(str, FOLDERS)

import pytest

# The slowest tests compile a model or wait for torchrun. They start first, and other processes run
# the short ones meanwhile.
LONGEST = [
    "test_mini_meets_its_target",
    "test_generic_tuning",
    "test_mini_compiled",
    "test_wrong_code",
    "test_compiled_run_agrees",
    "test_compiled_flex_attention_with_our_block_mask",
    "torchrun",
]


def pytest_configure(config):
    """Reports paths that don't exist. With several processes, pytest doesn't do that."""
    if not any("gpu" in Path(path).parts for path in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # only the tests in tests/gpu use a GPU
    for path in config.args:
        if not (config.invocation_params.dir / path.split("::")[0]).exists():
            raise pytest.UsageError(f"file or directory not found: {path}")


def place(item):
    """The place of a test in LONGEST, or after it."""
    for i, name in enumerate(LONGEST):
        if name in item.name:
            return i
    return len(LONGEST)


def pytest_collection_modifyitems(items):
    items.sort(key=place)  # stable: the others stay in order


@pytest.fixture(autouse=True)
def _seed():
    import torch  # not at the top, because pytest's main process doesn't need it

    torch.manual_seed(0)


# Background jobs of a shell ignore SIGINT. Without this line, the processes that tests interrupt
# would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
