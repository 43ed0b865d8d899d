"""The compiled script on a CPU: it trains as the uncompiled one, and nothing recompiles after the warm-up."""

import os
import shutil

import pytest
import torch

import train_gpt
from recipes import january2026
from tests.recipes.test_2026_runs import start, tiny_run
from tests.util import in_float32, read_log, succeeds, val_losses

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

# Two layers compile faster: a paired one, and one with a long window and the skip. They have one
# graph for each of two sequence lengths in training, and one for validation.
SETTINGS = dict(
    num_layers=2,
    paired_layers="0",
    long_window_layers="1",
    value_layers="0",
    skip_from=0,
    skip_to=1,
    backout_layer=0,
    warmup_steps=2,
    scalar_lr=0.0,
)


def compiled():
    """A hook. The warm-up compiles both graphs of the training. It doesn't validate."""
    os.environ["TORCH_COMPILE_DISABLE"] = "0"
    torch._dynamo.config.disable = False  # PyTorch has read the variable before the process was forked
    train_gpt.COMPILED = True  # and so has the script
    january2026.DTYPE = torch.float32
    plain = january2026.train
    counts = torch._dynamo.utils.counters["stats"]

    def train(*args):
        assert counts["unique_graphs"] == 2
        plain(*args)
        assert counts["unique_graphs"] == 3

    january2026.train = train


@pytest.mark.slow
def test_compiled_run_agrees(tmp_path):
    losses = []
    for hook in (in_float32, compiled):
        folder = tmp_path / hook.__name__
        succeeds(start(tiny_run(folder, **SETTINGS), folder, hook=hook))
        losses.append(val_losses(read_log(folder)))
    assert "model compiled: yes" in read_log(folder)
    want, got = losses
    assert list(want) == [0, 4, 8]
    assert got == pytest.approx(want, abs=2e-3)
