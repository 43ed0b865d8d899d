"""
Tests of what the script decides about GPUs, with imitated ones. The tests need no GPU.

The checks before a run are in tests/launch/test_launch_checks.py.
"""

from dataclasses import replace

import pytest
import torch

import train_gpt
from train_gpt import TRACKS


@pytest.mark.parametrize(
    "capability, hip, fp8, wanted",
    [
        ((10, 0), None, True, True),   # B200
        ((9, 0), None, True, True),    # H100
        ((8, 9), None, True, True),    # L4
        ((8, 0), None, True, False),   # A100
        ((9, 0), None, False, False),
        ((9, 4), "7.0", True, False),  # MI300X: AMD's FP8 format is float8_e4m3fnuz
    ],
)
def test_which_gpus_have_an_fp8_head(monkeypatch, capability, hip, fp8, wanted):
    monkeypatch.setattr(train_gpt, "ON_GPU", True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert train_gpt.uses_fp8(replace(TRACKS["fineweb"], fp8=fp8)) == wanted


@pytest.mark.parametrize("on_gpu, track", [(True, "fineweb"), (False, "mini")])
def test_the_default_track(monkeypatch, on_gpu, track):
    monkeypatch.setattr(train_gpt, "ON_GPU", on_gpu)
    _, hp = train_gpt.parse_arguments([])
    assert hp == TRACKS[track]
