"""
Tests of compiled code on a CPU: two steps of a tiny model, and `mini` with its default settings, compiled
and uncompiled.

The comparison before a run is in tests/launch/test_launch_checks.py.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import train_gpt
from tests.training.test_model import SINGLE, TINY, build, randomize
from tests.util import ROOT, run_script, val_losses

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


# The largest relative difference between the weights of a compiled and an uncompiled run.
#
# The output projections start at zero, so Muon's first updates of them come from rounding errors.
# Measured after 20 steps in bf16 on an EPYC (Zen 4), with seeds 0 to 2:
#   compiled and uncompiled            0.19 to 0.21
#   different numbers of threads       0.13
#   logits capped at 15, not at 30     0.59
# The losses differed by 0.0017 at most, and by 0.2 with the wrong cap.
MAX_WEIGHT_ERROR = 0.4 if train_gpt.DTYPE == torch.bfloat16 else 0.2

# The recipe of mini for 20 steps, validated on two sequences of 12,160 tokens
OPTIONS = ["--track", "mini", "--num_iterations", "20", "--val_loss_every", "5", "--val_tokens", "24320"]


@torch._dynamo.config.patch(disable=False)
def test_compiled_steps_are_uncompiled_steps():
    """Two steps of one layer, in float32."""
    hp = replace(TINY, **SINGLE, train_seq_len=128, batch_tokens=256)
    tokens = torch.randint(hp.vocab_size, (257,), dtype=torch.int32)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = randomize(build(hp))
        if compiled:
            model.compile(dynamic=False)
        optimizers = train_gpt.build_optimizers(model, hp)
        buckets = train_gpt.GradientBuckets(model.parameters())
        losses = []
        for step in range(2):
            losses.append(train_gpt.train_step(model, optimizers, buckets, tokens, step, hp).item())
        results.append((losses, model.state_dict()))
    (expected, right), (losses, weights) = results
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in right.items():
        assert (weights[name] - weight).norm() < 1e-3 * weight.norm(), name


@pytest.fixture
def shakespeare():
    if not (ROOT / "data" / "shakespeare" / "shakespeare_train_000000.bin").exists():
        subprocess.run([sys.executable, str(ROOT / "data" / "shakespeare.py")], check=True)


@pytest.fixture
def unknown_cpu(tmp_path):
    """A compiler that doesn't know the CPU: it tunes for a generic one unless PyTorch's options, which
    come later, say otherwise. GCC 11 to 13 then compile bf16 transposes wrongly."""
    script = tmp_path / "g++"
    script.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -mtune=generic "$@"\n')
    script.chmod(0o755)
    return str(script)


def run(folder, **environment):
    """Returns the validation losses, the compiler's line of the log, and the weights."""
    folder.mkdir()
    data = [f"--{split}_files={ROOT}/data/shakespeare/shakespeare_{split}_*.bin" for split in ("train", "val")]
    done = run_script(
        [*OPTIONS, *data, "--save_checkpoint"],
        folder,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="2",
        **environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (checkpoint,) = (folder / "logs").glob("*.pt")
    log = checkpoint.with_suffix(".txt").read_text(encoding="utf-8")
    (line,) = re.findall(r"^Compiler: .*$", log, re.M)
    return val_losses(done.stdout), line, torch.load(checkpoint, weights_only=True)["model"]


@pytest.mark.slow
def test_mini_compiled_trains_as_uncompiled(shakespeare, tmp_path, unknown_cpu):
    """With a compile cache of its own: otherwise the kernels might already be there."""
    losses, line, weights = run(
        tmp_path / "compiled",
        TORCH_COMPILE_DISABLE="0",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        CXX=unknown_cpu,
    )
    assert line.endswith("; flags: -march=native -mtune=icelake-server; model compiled: yes")
    expected, line, right = run(tmp_path / "uncompiled", SPEEDRUN_COMPILE_REASON="(a reason)")
    assert line.endswith("; model compiled: no (a reason)")
    assert list(losses) == [0, 5, 10, 15, 20]
    assert losses == pytest.approx(expected, abs=0.005)
    for name, matrix in right.items():
        if matrix.ndim < 2:
            continue  # scalars amplify rounding: see test_run.py
        error = (weights[name].double() - matrix.double()).norm() / matrix.double().norm()
        assert error < MAX_WEIGHT_ERROR, f"{name}: {error}"
