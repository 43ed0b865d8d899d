"""Settings for all tests: no compilation unless a test asks for it, and no GPU outside tests/on_a_gpu."""

import os
import signal
from pathlib import Path

# Set before torch is imported. Eager code does the same arithmetic and starts at once.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = str(TESTS.parent)  # as the launcher sets it for the commands

import pytest


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests, too")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; runs with --slow, or when it is named")
    if not any(Path(path).resolve().is_relative_to(TESTS / "on_a_gpu") for path in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # only the tests in tests/on_a_gpu use a GPU


def pytest_collection_modifyitems(config, items):
    """Slow tests start first. They are skipped, unless --slow is given or their name is on the command line."""
    named = {path.split("::")[-1].split("[")[0] for path in config.args}
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        skipped = not config.option.slow and item.originalname not in named
        if skipped and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.fixture(autouse=True)
def _seed():
    import torch  # not at the top, because pytest's main process doesn't need it

    torch.manual_seed(0)


# Background jobs of a shell ignore SIGINT. Without this line, the processes that tests interrupt
# would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
