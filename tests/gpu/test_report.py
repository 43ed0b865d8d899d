"""Tests of gpu/gpu_report.py without a GPU: its stages, its page and its verdicts."""

import fcntl
import re
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from tests.util import ROOT
from judge.commands import UserError
from gpu import report_stages, gpu_report
from train_gpt import InputError

# --------------------------------------------------------------- the report
# The stage muon waits for a process that it has started, as the compiler does. It holds a lock.
FAKE_CHECKS = """
import fcntl, json, subprocess, sys
def run_stage(name, file):
    if name == "attention":
        sys.exit("error: a kernel failed in " + __file__)
    if name == "muon":
        lock = open("lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
        subprocess.run(sleep, pass_fds=[lock.fileno()])
    figures = {"name": name}
    if name == "machine":
        figures = {"GPU": "a GPU", "PyTorch": "2.11", "date": "2026-11-28"}
    if name == "head":
        figures["checks"] = [{"name": "FP8 loss", "value": 0.5, "limit": 0.1, "ok": False}]
    json.dump(figures, open(file, "w"))
"""
FAKE_STAGES = ("machine", "head", "attention", "muon", "waits")


@pytest.fixture
def fake_checks(tmp_path, monkeypatch):
    """A repository whose stages take no GPU. Returns its folder."""
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "__init__.py").touch()
    (tmp_path / "gpu" / "report_stages.py").write_text(FAKE_CHECKS)
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    return tmp_path


def test_a_stage_that_fails_is_reported_and_the_others_go_on(fake_checks):
    out = fake_checks / "out"
    gpu_report.make_report(out, FAKE_STAGES[1:], 0.3)  # a stage ends after 6 s, with its processes
    with open(fake_checks / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    text = (out / "gpu_report.md").read_text()
    done = dict.fromkeys(FAKE_STAGES, "done") | {"attention": "failed", "muon": "timed out"}
    assert re.findall(r"^\| (\w+) \| (done|failed|timed out) \|", text, re.M) == list(done.items())
    assert text.startswith("# a GPU, PyTorch 2.11\n\nMeasured on 2026-11-28 with")
    assert "error: a kernel failed in ./gpu/report_stages.py" in text
    assert str(fake_checks) not in text
    assert "| FP8 loss | 0.5 | 0.1 | **too large** |" in text
    assert "| head | done | 0 of 1 |" in text
    with pytest.raises(UserError, match="out exists; choose another folder with --out, or remove it"):
        gpu_report.make_report(out, ["waits"])


def test_a_report_ends_after_its_minutes(fake_checks, capsys):
    gpu_report.make_report(fake_checks / "out", ["head", "attention"], 0.001)
    assert "minutes are over; --stage runs a stage that is missing" in capsys.readouterr().out


def test_peaks_are_those_of_hardware_md():
    hardware = (ROOT / "docs" / "hardware.md").read_text()
    rows = re.findall(r"^\| (FP8|bf16) \| .* \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", hardware, re.M)
    assert len(rows) == len(report_stages.PEAKS)
    for head, *numbers in rows:
        seq_len, training, validation = (int(number.replace(",", "")) for number in numbers)
        assert report_stages.PEAKS[head, seq_len] == (training, validation)
        figures = {"head": head, "train_seq_len": seq_len, "training MiB": training * 1.02}
        checks = report_stages.check_peaks(figures | {"validation MiB": validation * 0.96})
        assert [check["ok"] for check in checks] == [True, False]


# --------------------------------------------------------------- its stages, on the CPU
@pytest.fixture(autouse=True)
def in_bf16(monkeypatch):
    monkeypatch.setattr(train_gpt, "DTYPE", torch.bfloat16)
    monkeypatch.setattr(train_gpt, "uses_fp8", lambda hp: True)


def small_head():
    return report_stages.check_head(tokens=128, dim=256, out=384)


def small_attention():
    return report_stages.check_attention(cases=[(512, 60, 4), (512, 10**9, 2)], heads=2, dim=32)


def small_muon():
    return report_stages.check_muon(width=64)


def failed(figures):
    return [check["name"] for check in figures["checks"] if not check["ok"]]


def test_right_arithmetic_passes():
    assert failed(small_head()) == failed(small_attention()) == failed(small_muon()) == []
    assert not report_stages.check("x", float("nan"), 1.0)["ok"]


def test_a_wrong_head_is_noticed(monkeypatch):
    """The FP8 head computes the soft-cap's derivative from its value, so only a wrong value changes it."""
    plain = train_gpt.scale_and_softcap
    monkeypatch.setattr(train_gpt, "scale_and_softcap", lambda logits, dim: 1.3 * plain(logits, dim))
    assert len(failed(small_head())) == 6


def test_a_wrong_mask_or_muon_is_noticed(monkeypatch):
    mask = train_gpt.portable_mask
    newton_schulz = train_gpt.zeropower_via_newtonschulz5
    monkeypatch.setattr(
        train_gpt, "portable_mask", lambda docs, window, span: mask(docs, window - 1, span)
    )
    assert "512 tokens, window 2, output" in failed(small_attention())
    monkeypatch.setattr(
        train_gpt, "zeropower_via_newtonschulz5", lambda G, steps: newton_schulz(G, steps - 1)
    )
    assert len(failed(small_muon())) == 4


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
