"""Tests of gpu/gpu_report.py without a GPU: its stages, its page and its verdicts."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from tests.util import ROOT, forkserver
from judge.commands import UserError
from gpu import report_stages, gpu_report
from train_gpt import InputError

# --------------------------------------------------------------- the report


def fake_machine():
    return {"GPU": "a GPU", "PyTorch": "2.11"}


def inaccurate():
    return {"checks": [{"name": "FP8 loss", "value": 0.5, "limit": 0.1, "ok": False}]}


def broken():
    raise RuntimeError("a kernel failed")


def crashes():
    os._exit(1)


def test_a_stage_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "machine", fake_machine)
    monkeypatch.setattr(gpu_report, "get_context", lambda method: forkserver())
    out = tmp_path / "out"
    gpu_report.make_report(out, {f.__name__: f for f in (broken, crashes, inaccurate)})
    text = (out / "gpu_report.md").read_text()
    assert re.findall(r"^## (.*)", text, re.M) == ["machine", "broken", "crashes", "inaccurate"]
    assert text.startswith("# a GPU, PyTorch 2.11\n\nMeasured on 20")
    assert text.count("This stage failed:") == 2
    assert "raise RuntimeError" in text and "RuntimeError: a kernel failed" in text
    assert "terminated abruptly" in text
    assert str(ROOT) not in text
    assert "- FP8 loss: 0.5, at most 0.1: **too large**\n" in text
    with pytest.raises(UserError, match="out exists; choose another folder with --out, or remove it"):
        gpu_report.make_report(out, {})


# --------------------------------------------------------------- its stages, on the CPU
@pytest.fixture(autouse=True)
def in_bf16(monkeypatch):
    monkeypatch.setattr(train_gpt, "DTYPE", torch.bfloat16)
    monkeypatch.setattr(train_gpt, "uses_fp8", lambda hp: True)


def small_head():
    return report_stages.check_head(tokens=128, dim=256, out=384)


def small_attention():
    return report_stages.check_attention(cases=[(512, 60, 4), (512, 10**9, 2)], heads=2, dim=32)


def failed(figures):
    return [check["name"] for check in figures["checks"] if not check["ok"]]


def test_right_arithmetic_passes():
    assert failed(small_head()) == failed(small_attention()) == []
    assert not report_stages.check("x", float("nan"), 1.0)["ok"]


def test_a_wrong_head_is_noticed(monkeypatch):
    """The FP8 head computes the soft-cap's derivative from its value, so only a wrong value changes it."""
    plain = train_gpt.scale_and_softcap
    monkeypatch.setattr(train_gpt, "scale_and_softcap", lambda logits, dim: 1.3 * plain(logits, dim))
    assert len(failed(small_head())) == 6


def test_a_wrong_mask_is_noticed(monkeypatch):
    mask = train_gpt.portable_mask
    monkeypatch.setattr(
        train_gpt, "portable_mask", lambda docs, window, span: mask(docs, window - 1, span)
    )
    assert "512 tokens, window 2, output" in failed(small_attention())


def event(name, start, end):
    times = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, is_async=False, time_range=times)


def test_waits_are_counted_within_the_steps_only():
    events = [
        event("cudaDeviceSynchronize", 0, 10),
        event("steps", 20, 1000),
        event("cudaStreamSynchronize", 30, 2030),
        event("cudaEventSynchronize", 60, 66),  # the event was done: the host didn't wait
        event("cudaDeviceSynchronize", 1100, 1200),
    ]
    with pytest.raises(InputError, match="sees no kernels.* run this as root"):
        report_stages.count_waits(events, steps=2)
    events.append(event("cudaLaunchKernel", 40, 41))
    figures = report_stages.count_waits(events, steps=2)
    assert (figures["waiting ms"], figures["checks"][0]["value"]) == (2.0, 1)
