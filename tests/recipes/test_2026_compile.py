"""The compiled script on a CPU: it trains as the uncompiled one, and nothing recompiles after the warm-up."""

import shutil
import subprocess
import sys

import pytest

from tests.recipes.test_2026_runs import tiny_run
from tests.util import ROOT, env, read_log, val_losses

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

# Runs main() and prints the number of compiled graphs after the warm-up, and at the end
COUNTED = """
import sys
from recipes import january2026
import torch
def print_graphs():
    print("graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
plain = january2026.train
def train(*args):
    print_graphs()
    plain(*args)
    print_graphs()
january2026.train = train
january2026.DTYPE = torch.float32
sys.exit(january2026.main(sys.argv[1:]))
"""


def run(folder, disabled):
    """Returns what the run printed."""
    argv = tiny_run(folder, f"--log_dir={folder}/logs", **SETTINGS, train_files=f"{folder}/tiny_train_*.bin")
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *argv, f"--val_files={folder}/tiny_val_*.bin"],
        cwd=ROOT,
        env=env(TORCH_COMPILE_DISABLE=disabled),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_compiled_run_agrees(tmp_path):
    run(tmp_path / "uncompiled", "1")
    printed = run(tmp_path / "compiled", "0")
    log = read_log(tmp_path / "compiled")
    assert "model compiled: yes" in log
    want = val_losses(read_log(tmp_path / "uncompiled"))
    assert list(want) == [0, 4, 8]
    assert val_losses(log) == pytest.approx(want, abs=2e-3)
    # the warm-up doesn't validate, so the first validation compiles
    before, after = [int(line.split(":")[1]) for line in printed.splitlines() if line.startswith("graphs:")]
    assert (before, after) == (2, 3)
