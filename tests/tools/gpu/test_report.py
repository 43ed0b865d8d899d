"""Tests of tools/gpu/report.py without a GPU: its stages, its page and its verdicts."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.util import ROOT, wait_until

from tools.gpu import checks as gpu_checks
from tools.gpu import page as gpu_page
from tools.gpu import reference as gpu_reference
from tools.gpu import report as gpu_report
import train_gpt
from tools.gpu.bench import InputError, run_benchmark

# --------------------------------------------------------------- the report
FAKE_CHECKS = """
import json, sys, time
name, file = sys.argv[1:]
with open("made", "a") as made:
    made.write(name + "\\n")
if name == "attention":
    sys.exit("error: a kernel failed in " + __file__)
if name == "muon":
    time.sleep(1000)
figures = {"name": name}
if name == "machine":
    figures = {"GPU": "a GPU", "PyTorch": "2.11", "compute capability": "9.0", "free MiB": 80_000}
if name == "waits":
    figures = {"steps": 12, "waits": 0, "waiting ms": 0.0}
if name == "head":
    check = {"name": "FP8 loss", "value": 0.5, "limit": 0.1, "ok": False}
    figures["checks"] = [check]
json.dump(figures, open(file, "w"))
"""
FAKE_STAGES = ("machine", "head", "attention", "muon", "waits")


@pytest.fixture
def fake_checks(tmp_path, monkeypatch):
    """A repository whose stages take no GPU. Returns its folder."""
    (tmp_path / "tools" / "gpu").mkdir(parents=True)
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "tools" / "gpu" / "__init__.py").touch()
    (tmp_path / "tools" / "gpu" / "checks.py").write_text(FAKE_CHECKS)
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "STAGES", FAKE_STAGES)
    return tmp_path


def test_a_stage_that_fails_is_reported_and_the_others_go_on(fake_checks, capsys):
    out = fake_checks / "out"
    gpu_report.make_report(out, None, 0.3)  # a stage ends after 6 s
    assert sorted(path.name for path in out.iterdir()) == ["gpu_report.json", "gpu_report.md"]
    stages = json.loads((out / "gpu_report.json").read_text())["stages"]
    status = {name: result["status"] for name, result in stages.items()}
    assert status == {
        "machine": "done",
        "head": "done",
        "attention": "failed",
        "muon": "timed out",
        "waits": "done",
    }
    page = (out / "gpu_report.md").read_text()
    assert page.startswith("# a GPU, PyTorch 2.11\n")
    assert "error: a kernel failed in ./tools/gpu/checks.py" in page
    assert str(fake_checks) not in page
    assert "| FP8 loss | 0.5 | 0.1 | **too large** |" in page
    tiles = "| FlexAttention's tiles fit into the shared memory | refuted | error: a kernel failed in "
    assert tiles in page
    fp8 = "1 of 1 checks failed; FP8 loss: 0.5, limit 0.1"
    assert f"| the language-model head runs in FP8 | refuted | {fp8} |" in page


def test_a_report_continues_where_it_stopped(fake_checks):
    out = fake_checks / "out"
    gpu_report.make_report(out, ["head"], 0.3)
    gpu_report.make_report(out, ["waits"], 0.3)
    (fake_checks / "made").unlink()
    gpu_report.make_report(out, None, 0.3)
    made = (fake_checks / "made").read_text().split()
    assert made == ["machine", "attention", "muon"]
    # another PyTorch: everything is measured again
    text = (out / "gpu_report.json").read_text()
    (out / "gpu_report.json").write_text(text.replace('"PyTorch": "2.11"', '"PyTorch": "2.10"'))
    (fake_checks / "made").unlink()
    gpu_report.make_report(out, None, 0.3)
    assert (fake_checks / "made").read_text().split() == list(FAKE_STAGES)


def test_no_stage_starts_when_the_time_is_over(fake_checks):
    out = fake_checks / "out"
    gpu_report.make_report(out, None, 0.001)
    stages = json.loads((out / "gpu_report.json").read_text())["stages"]
    assert stages.pop("machine")["status"] == "done"
    for result in stages.values():
        assert result["status"] == "was left out"
        assert "run the command again" in result["error"]


# A stage that waits. It starts a process, as the compiler does. Both hold a lock.
ENDLESS_STAGE = """
import fcntl, os, subprocess, sys, time
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(sleep, pass_fds=[lock.fileno()])
with open("pids.tmp", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("pids.tmp", "pids")
print("started", flush=True)
time.sleep(1000)
"""


def stage_is_running(folder):
    with open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# tools/gpu/report.py as a command, but with the stages of the repository argv[1]
REPORT = f"""
import pathlib, sys
from tools.gpu import report as gpu_report
gpu_report.ROOT = pathlib.Path(sys.argv[1])
gpu_report.stop_on_signals()
sys.exit(gpu_report.run_benchmark(gpu_report.gpu_report, []))
"""


def test_a_signal_ends_the_stage(tmp_path):
    (tmp_path / "tools" / "gpu").mkdir(parents=True)
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "tools" / "gpu" / "__init__.py").touch()
    (tmp_path / "tools" / "gpu" / "checks.py").write_text(ENDLESS_STAGE)
    command = [sys.executable, "-c", REPORT, str(tmp_path)]
    report = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: (tmp_path / "pids").exists() or report.poll() is not None)
        report.terminate()
        _, err = report.communicate(timeout=60)
        wait_until(lambda: not stage_is_running(tmp_path), seconds=10)
        assert report.returncode == 130
        assert err == ""
    finally:
        report.kill()
        if stage_is_running(tmp_path):
            for pid in (tmp_path / "pids").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("options", [["--stage", "fp8"], ["--track", "mini"]])
def test_bad_options_are_one_line(options, capsys):
    assert run_benchmark(gpu_report.gpu_report, options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .*\n", err)


def test_claims_are_those_of_hardware_md():
    hardware = (ROOT / "records" / "HARDWARE.md").read_text()
    rows = re.findall(r"^\| (FP8|bf16) \| .* \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", hardware, re.M)
    table = []
    for head, *numbers in rows:
        table.append((head, *[int(number.replace(",", "")) for number in numbers]))
    assert table == gpu_page.PEAKS
    sentences = [claim for claim, *_ in gpu_page.claims({})][: -len(gpu_page.PEAKS)]
    assert len(sentences) == 5
    for sentence in sentences:
        assert sentence in " ".join(hardware.split())
    assert {verdict for _, verdict, _ in gpu_page.claims({})} == {gpu_page.UNKNOWN}


def result_of(figures):
    return {"status": "done", "seconds": 1.0, "figures": figures, "error": ""}


@pytest.mark.parametrize(
    "training, validation, verdict",
    [(29_580, 11_069, "confirmed"), (30_000, 11_000, "confirmed"), (31_000, 11_069, "refuted")],
)
def test_verdict_on_memory(training, validation, verdict):
    figures = {
        "head": "FP8",
        "train_seq_len": 49152,
        "training MiB": training,
        "validation MiB": validation,
    }
    results = {"machine": result_of({"train_seq_len": 49152}), "memory": result_of(figures)}
    claims = {claim: verdict for claim, verdict, _ in gpu_page.claims(results)}
    memory = {claim: verdict for claim, verdict in claims.items() if "tokens" in claim}
    assert list(memory.values()) == [verdict] + 5 * [gpu_page.UNKNOWN]


def test_verdict_on_waits():
    figures = {"steps": 12, "waits": 0, "waiting ms": 0.0}
    assert gpu_page.judge_waits({"waits": result_of(figures)})[0] == gpu_page.CONFIRMED
    figures = {"steps": 12, "waits": 2, "waiting ms": 150.0}
    verdict, text = gpu_page.judge_waits({"waits": result_of(figures)})
    assert verdict == gpu_page.REFUTED
    assert text == "2 waits of 150 ms in 12 steps"


def test_verdict_on_fp8_needs_a_gpu_that_has_it():
    head = result_of({"checks": []})
    results = {"machine": result_of({"compute capability": "8.6"}), "head": head}
    assert gpu_page.judge_fp8(results)[0] == gpu_page.UNKNOWN
    results["machine"] = result_of({"compute capability": "8.9"})
    assert gpu_page.judge_fp8(results)[0] == gpu_page.CONFIRMED


# --------------------------------------------------------------- its stages, on the CPU
@pytest.fixture(autouse=True)
def in_bf16(monkeypatch):
    monkeypatch.setattr(train_gpt, "DTYPE", torch.bfloat16)


def small_head():
    return gpu_checks.head(tokens=128, dim=256, out=384)


def small_attention():
    return gpu_checks.attention(cases=[(512, 60, 4), (512, 10**9, 2)], heads=2, dim=32)


def small_muon():
    return gpu_checks.muon(width=64)


def failed(figures):
    return [check["name"] for check in figures["checks"] if not check["ok"]]


def test_right_arithmetic_passes(monkeypatch):
    monkeypatch.setattr(train_gpt, "uses_fp8", lambda hp: True)
    assert failed(small_head()) == []
    assert failed(small_attention()) == []
    assert failed(small_muon()) == []


def test_a_wrong_head_is_noticed(monkeypatch):
    """The FP8 head computes the soft-cap's derivative from its value, so only a wrong value changes it."""
    monkeypatch.setattr(train_gpt, "uses_fp8", lambda hp: True)
    plain = train_gpt.softcap
    monkeypatch.setattr(train_gpt, "softcap", lambda logits, dim: plain(1.1 * logits, dim))
    names = failed(small_head())
    assert any(name.startswith("bf16 gradient") for name in names)
    assert "FP8 loss" in names
    monkeypatch.setattr(train_gpt, "softcap", lambda logits, dim: 1.3 * plain(logits, dim))
    names = failed(small_head())
    assert any(name.startswith("bf16 gradient") for name in names)
    assert any(name.startswith("FP8 gradient") for name in names)


def test_a_wrong_mask_is_noticed(monkeypatch):
    plain = train_gpt.portable_mask
    monkeypatch.setattr(
        train_gpt, "portable_mask", lambda docs, first_key, span: plain(docs, first_key + 128, span)
    )
    assert "512 tokens, window 2, output" in failed(small_attention())


def test_a_wrong_muon_is_noticed(monkeypatch):
    plain = train_gpt.zeropower_via_newtonschulz5
    monkeypatch.setattr(train_gpt, "zeropower_via_newtonschulz5", lambda G, steps: plain(G, steps - 1))
    assert len(failed(small_muon())) == 4


def test_a_value_that_is_not_finite_fails():
    check = gpu_checks.check("x", float("nan"), 1.0)
    assert not check["ok"]
    assert json.loads(json.dumps(check, allow_nan=False))["value"] == "nan"


class Event:
    def __init__(self, name, start, end, device_us=0):
        self.name = name
        self.is_async = False
        self.time_range = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        self.device_time_total = device_us


def test_waits_are_counted_within_the_steps_only():
    events = [
        Event("cudaDeviceSynchronize", 0, 10),
        Event("steps", 20, 1000),
        Event("cudaStreamSynchronize", 30, 2030),
        Event("cudaLaunchKernel", 40, 41),
        Event("Memcpy DtoD (Device -> Device)", 50, 60, device_us=500),
        Event("cudaEventSynchronize", 60, 66),  # the event was done: the host didn't wait
        Event("cudaDeviceSynchronize", 1100, 1200),
    ]
    with pytest.raises(InputError, match="sees no kernels.* run this as root"):  # the profiler can't see the GPU
        gpu_checks.count_waits([event for event in events if "Launch" not in event.name], steps=2)
    figures = gpu_checks.count_waits(events, steps=2)
    assert figures["waits"] == 1
    assert figures["waiting ms"] == 2.0
    assert figures["copies within the GPU, a step"] == 0.5
    assert figures["ms of these copies, a step"] == 0.25


# --------------------------------------------------------------- the losses of a CPU
def test_settings_are_those_of_the_kept_losses(monkeypatch):
    """The recipe of mini changes, but a GPU must train that of the kept losses."""
    hp = gpu_reference.settings()
    assert train_gpt.pad_vocab(hp.vocab_size) == 384
    monkeypatch.setattr(train_gpt, "DTYPE", torch.float32)
    assert gpu_reference.tokens_digest(hp) == gpu_reference.read_reference()["tokens_sha256"]
    two_steps = replace(hp, num_iterations=2)
    found = gpu_reference.losses_of_seeds(two_steps, [0])["0"]
    kept = gpu_reference.read_reference()["float32"]["0"]
    assert found == pytest.approx(kept[:2], abs=1e-4)


def test_tolerance_is_the_distance_plus_four_standard_errors():
    near = {"0": [1.0] * 50, "1": [1.0] * 50}
    bf16 = {"0": [1.0] * 40 + [1.25] * 10, "1": [1.0] * 40 + [1.75] * 10}  # mean 0.5, standard error 0.25
    reference = {"float32": near, "bf16": bf16, "fp8": near}
    assert gpu_reference.tolerance(reference, "steps 41 to 50") == pytest.approx(1.5)
    assert gpu_reference.tolerance(reference, "steps 11 to 20") == 0
