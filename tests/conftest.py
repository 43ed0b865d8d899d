"""Shared settings of the tests: the script's folder is importable, nothing is compiled unless a test asks."""

import os
import signal
import sys
from pathlib import Path

# Before torch is imported anywhere: eager code is the same arithmetic and starts in no time.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "training"), str(TESTS / "tools")]

import pytest

# A process that compiles, or waits for torchrun, takes longest: these begin, and the short ones fill the gaps.
LONGEST = [
    "test_mini_meets_its_target",
    "test_generic_tuning",
    "test_mini_compiled",
    "test_wrong_code",
    "test_compiled_run_agrees",
    "test_compiled_flex_attention_with_our_block_mask",
    "torchrun",
    "test_two_nodes",
    "test_killed_rank",
]


def pytest_configure(config):
    """Where several processes run the tests, pytest does not say by itself that a path is wrong."""
    for path in config.args:
        if not (config.invocation_params.dir / path.split("::")[0]).exists():
            raise pytest.UsageError(f"file or directory not found: {path}")


def pytest_collection_modifyitems(items):
    place = lambda item: next(
        (i for i, name in enumerate(LONGEST) if name in item.name), len(LONGEST)
    )
    items.sort(key=place)  # stable: all others stay in order


@pytest.fixture(autouse=True)
def _seed():
    import torch  # not above: where several processes run the tests, the one that starts them has no use for it

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _signal_handlers():
    """main() has handlers of its own, which outlive a run in this process, a module's fixture too: what a later test
    forks must not have them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# A shell's background job ignores SIGINT, and so would all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
