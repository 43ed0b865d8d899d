"""The compiled script on a CPU: it trains as the uncompiled one, and nothing recompiles after the warm-up."""

import shutil
import subprocess
import sys

import pytest

from test_2026_runs import SCRIPT, TINY
from util import env, random_tokens, read_log, val_losses, write_shard

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

# Runs main() and prints the number of compiled graphs after the warm-up and at the end
COUNTED = """
import sys
sys.path.insert(0, sys.argv[1])
import january2026, torch
counters = torch._dynamo.utils.counters["stats"]
plain = january2026.warm_up
def warm_up(*args):
    plain(*args)
    print("graphs after the warm-up:", counters["unique_graphs"])
january2026.warm_up = warm_up
january2026.CPU_FLAGS = set()
status = january2026.main(sys.argv[2:])
print("graphs at the end:", counters["unique_graphs"])
sys.exit(status)
"""


def run(folder, shards, disabled):
    folder.mkdir()
    settings = TINY | dict(warmup_steps=2, seq_lens="128,256,384", scalar_lr=0.0, val_loss_every=3)
    settings |= dict(train_files=shards / "tiny_train_*.bin", val_files=shards / "tiny_val_*.bin")
    words = ["--track=mini", "--device=cpu", *(f"--{k}={v}" for k, v in settings.items())]
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(SCRIPT.parent), *words],
        cwd=folder,
        env=env(TORCH_COMPILE_DISABLE=disabled),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compiled_run_agrees(tmp_path):
    write_shard(tmp_path / "tiny_train_000000.bin", random_tokens(60_000, seed=2))
    write_shard(tmp_path / "tiny_val_000000.bin", random_tokens(2049, seed=3))
    run(tmp_path / "eager", tmp_path, "1")
    printed = run(tmp_path / "compiled", tmp_path, "0")
    log = read_log(tmp_path / "compiled")
    assert "model compiled: yes" in log
    want = val_losses(read_log(tmp_path / "eager"))
    assert list(want) == [0, 3, 6, 9, 12]
    assert val_losses(log) == pytest.approx(want, abs=2e-3)
    counts = [int(line.split(":")[1]) for line in printed.splitlines() if line.startswith("graphs ")]
    assert counts[0] == counts[1] >= 4  # three sequence lengths and the validation
