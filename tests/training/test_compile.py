"""
Compiled training on a CPU. tests/launch/test_launch_checks.py compares the compiled gradients of `mini`,
test_run.py trains it.
"""

import shutil
from dataclasses import replace

import pytest
import torch

import train_gpt
from tests.util import randomized
from tests.training.test_model import SINGLE, TINY, build


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@torch._dynamo.config.patch(disable=False)
def test_compiled_steps_are_uncompiled_steps(monkeypatch):
    """Two steps of one layer, all in float32: bfloat16 in Newton-Schulz would make rounding large."""
    monkeypatch.setattr(train_gpt, "DTYPE", torch.float32)
    hp = replace(TINY, **SINGLE, train_seq_len=128, batch_tokens=256)
    tokens = torch.randint(hp.vocab_size, (257,), dtype=torch.int32)
    results = []
    for compiled in (False, True):
        model = randomized(build(hp))
        if compiled:
            model.compile(dynamic=False)
        optimizers = train_gpt.build_optimizers(model, hp)
        losses = []
        for step in range(2):
            losses.append(train_gpt.train_step(model, optimizers, tokens, step, hp).item())
        results.append((losses, model.state_dict()))
    (expected, right), (losses, weights) = results
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in right.items():
        assert (weights[name] - weight).norm() < 1e-3 * weight.norm(), name
