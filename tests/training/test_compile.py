"""Compiled training on a CPU: the launcher's check of compiled code, in float32, where it differs little."""

import shutil
from dataclasses import replace

import pytest
import torch

import train_gpt
from launch import checks
from tests.training.test_model import SINGLE, TINY


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@torch._dynamo.config.patch(disable=False)
def test_compiled_code_is_right(monkeypatch):
    monkeypatch.setattr(train_gpt, "DTYPE", torch.float32)
    monkeypatch.setattr(checks, "MAX_LOSS_ERROR", 1e-5)
    monkeypatch.setattr(checks, "MAX_GRADIENT_ERROR", 1e-3)
    hp = replace(TINY, **SINGLE, train_seq_len=128, batch_tokens=256)
    assert checks.compile_problem(hp, "training") == ""
