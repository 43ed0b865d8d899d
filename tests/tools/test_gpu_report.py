"""Tests of tools/gpu_report.py without a GPU: its stages, its verdict, and the row that it adds."""

import contextlib
import fcntl
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from util import ROOT, wait_until, write_shard

sys.path.append(str(ROOT / "tools"))
import gpu_checks
import gpu_page
import gpu_reference
import gpu_report
import train_gpt
from bench import InputError, run_benchmark

pytest_plugins = "pytester"
LOSSES = {step: round(10.8258 / (1 + step / 100), 4) for step in range(0, 201, 25)}


def test_table_row():
    figures = {
        "date": "2000-01-01",
        "change": "a | b\nc",
        "step ms": 1234.5678,
        "allocated MiB": 7,
    }
    row = gpu_report.table_row(figures)
    cells = [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]
    expected = {column: "-" for column in gpu_report.COLUMNS}
    expected["date"] = "2000-01-01"
    expected["change"] = "a / b c"
    expected["step ms"] = "1,234.57"
    expected["allocated MiB"] = "7"
    assert dict(zip(gpu_report.COLUMNS, cells)) == expected
    assert len(cells) == len(gpu_report.COLUMNS)


def test_rows_are_added_to_the_table_that_ends_hopper_md(tmp_path):
    path = tmp_path / "HOPPER.md"
    before = gpu_report.HOPPER.read_text()
    path.write_text(before)
    gpu_report.append_row(path, {"change": "first"})
    gpu_report.append_row(path, {"change": "second"})
    *old, first, second = path.read_text().splitlines()
    assert old == before.splitlines()
    assert old[-1].startswith("|")  # the file ends with the table
    assert "| first |" in first
    assert "| second |" in second
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("another table\n")
    with pytest.raises(InputError, match=r"table of results is missing .*: \| date \| machine "):
        gpu_report.append_row(path, {})
    assert path.read_text() == "another table\n"


def test_judge():
    near = {step: loss + 0.01 for step, loss in LOSSES.items()}
    near[0] = LOSSES[0]
    assert gpu_report.judge(LOSSES, near) == "ok, FP8 minus bf16: -0.0100 to 0.0000"
    assert gpu_report.judge(near, LOSSES) == "ok, FP8 minus bf16: 0.0000 to 0.0100"
    assert "bf16: ended early" in gpu_report.judge(LOSSES, {0: 10.8258})
    assert "FP8: starts at 10.9" in gpu_report.judge(LOSSES | {0: 10.9}, LOSSES)
    assert "FP8: no fall to step 75" in gpu_report.judge(LOSSES | {75: LOSSES[50]}, LOSSES)
    assert "FP8 is 0.0600 above bf16" in gpu_report.judge(LOSSES, LOSSES | {200: LOSSES[200] - 0.06})
    assert "ok" in gpu_report.judge(LOSSES, LOSSES | {200: LOSSES[200] + 0.06})
    assert "FP8: no fall to step 100" in gpu_report.judge(LOSSES | {100: float("nan")}, LOSSES)


def test_stages(tmp_path, monkeypatch, capsys):
    """Stages can run one by one or all at once. None runs twice.

    A stage that fails leaves no result.
    """
    page = tmp_path / "HOPPER.md"
    before = gpu_report.HOPPER.read_text()
    page.write_text(before)
    folder = tmp_path / "logs" / "report" / "x"
    made = []

    def fake_gpu_tests():
        made.append("tests")
        return "30 passed"

    def fake_short_run(shards, fp8):
        made.append("fp8" if fp8 else "bf16")
        return LOSSES

    def killed():
        raise KeyboardInterrupt

    def figures():
        return {"step ms": 100.0, "change": "as it is"}

    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "HOPPER", page)
    monkeypatch.setattr(gpu_report, "gpu_tests", fake_gpu_tests)
    monkeypatch.setattr(gpu_report, "short_run", fake_short_run)

    assert gpu_report.report(["fp8"], tmp_path, folder, killed).keys() == {"fp8"}
    text = capsys.readouterr().out
    assert "still to run: --stage tests, --stage bf16, --stage figures\n" in text
    with pytest.raises(KeyboardInterrupt):
        gpu_report.report(gpu_report.STAGES, tmp_path, folder, killed)
    assert made == ["fp8", "tests", "bf16"]
    assert page.read_text() == before
    row = gpu_report.report(gpu_report.STAGES, tmp_path, folder, figures)
    assert made == ["fp8", "tests", "bf16"]
    assert row["run"] == "ok, FP8 minus bf16: 0.0000 to 0.0000"
    assert "100: 5.4129" in row["val_loss FP8"]
    assert page.read_text().splitlines()[-1] == gpu_report.table_row(row)
    assert list(folder.iterdir()) == []  # the next report measures again


FAKE_TRAINING = """
import pathlib, sys
if not pathlib.Path("shards").exists():
    print("step:0/200 val_loss:10.8258 train_time:0ms step_avg:0.00ms", flush=True)
    sys.exit("error: no shards")
print("step:200/200 val_loss:6.5000 train_time:9ms step_avg:0.05ms")
"""


@pytest.mark.parametrize("stage", ["fp8", "bf16"])
def test_a_training_that_fails_is_no_result(stage, tmp_path, monkeypatch, capfd):
    """The command fails with one line. The same command tries again."""
    folder = tmp_path / "parts"
    (tmp_path / "train_gpt.py").write_text(FAKE_TRAINING)
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)

    def command(argv):
        gpu_report.report([stage], tmp_path, folder, None)

    for _ in range(2):
        assert run_benchmark(command, []) == 2
        out, err = capfd.readouterr()
        assert "  error: no shards\n" in out
        assert err.startswith("error: the stage failed with exit status 1; ")
        assert err.count("\n") == 1
        assert not folder.exists()
    (tmp_path / "shards").mkdir()
    assert run_benchmark(command, []) == 0
    assert json.loads((folder / f"{stage}.json").read_text()) == [[200, 6.5]]


def test_gpu_tests_that_could_not_run_are_no_result(tmp_path, monkeypatch):
    """Tests that fail are a result, and the row shows it."""
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    test = tmp_path / "tests" / "gpu" / "test_it.py"
    for content in ("import nothing_of_this_name\n", ""):
        test.write_text(content)
        with pytest.raises(InputError, match="the stage failed with exit status"):
            gpu_report.gpu_tests()
    test.write_text("def test_it():\n    assert False\n")
    assert gpu_report.gpu_tests().startswith("1 failed")


def test_the_stages_of_a_row_have_the_same_shards(tmp_path, monkeypatch, capsys):
    made = []

    def fake_short_run(shards, fp8):
        made.append("fp8" if fp8 else "bf16")
        return LOSSES

    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "PARTS", tmp_path / "parts")
    monkeypatch.setattr(gpu_report, "short_run", fake_short_run)
    monkeypatch.setattr(gpu_report, "read_row_options", gpu_report.read_options)  # without a GPU
    monkeypatch.setattr(gpu_report, "start", lambda options, hp: (SimpleNamespace(device=CPU), hp))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "x_train_0.bin", [1, 2, 3])
        write_shard(tmp_path / name / "x_val_0.bin", [1, 2, 3])

    def stages_to_run(shards, stage):
        options = ["--device", "cpu", "--track", "mini", "--change", "x", "--stage", stage]
        gpu_report.gpu_report([*options, "--shards", str(tmp_path / shards)])
        return re.findall(r"--stage (\w+)", capsys.readouterr().out)

    assert stages_to_run("one", "fp8") == ["tests", "bf16", "figures"]
    assert stages_to_run("other", "bf16") == ["tests", "fp8", "figures"]
    assert stages_to_run("one", "fp8") == ["tests", "bf16", "figures"]
    assert made == ["fp8", "bf16"]
    assert stages_to_run("one", "bf16") == ["tests", "figures"]
    write_shard(tmp_path / "one" / "x_train_0.bin", [1, 2, 3, 4])  # other tokens in the same folder
    assert stages_to_run("one", "bf16") == ["tests", "fp8", "figures"]
    (tmp_path / "one" / "x_train_1.bin").symlink_to("missing")
    with pytest.raises(InputError, match="x_train_1.bin: no such file or directory; remove it"):
        stages_to_run("one", "bf16")


def test_the_help_lists_the_options_and_stages_of_both(capsys):
    with pytest.raises(SystemExit):
        gpu_report.gpu_report(["--help"])
    text = " ".join(capsys.readouterr().out.partition("\noptions:")[2].split())
    for name in (*gpu_report.REPORT_OPTIONS, *gpu_report.ROW_OPTIONS, "stage"):
        assert f"--{name} " in text
    for stage in (*gpu_report.CHECKS, *gpu_report.STAGES):
        assert stage in text


def test_the_command_in_the_row():
    argv = ["--change", "x", "--shards", "/data/my shards", "--stage", "fp8", "--repeats", "5"]
    text = gpu_report.command_text(argv, "/data/my shards")
    assert text == "python tools/gpu_report.py --change x --shards DIR --repeats 5"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--change", "x"], "--shards"),
        (["--shards", "."], "--change"),
        (["--change", "x", "--shards", ".", "--stage", "fp9"], "--stage fp9: choose from tests, fp8"),
        (["--change", "x", "--shards", ".", "--minutes", "5"], "--minutes is only for the report"),
        (["--stage", "fp8"], "--stage fp8: choose from machine, head"),
        (["--repeats", "5"], "--repeats is only for adding a row; give --change and --shards"),
        ([], "unrecognized arguments: --device cpu"),
        (["--change", "x", "--shards", "nowhere"], "make them with data/fineweb.py"),
        (["--change", "x", "--shards", "SHARDS"], "needs a CUDA GPU"),
    ],
)
def test_bad_report_options(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SHARDS").mkdir()
    (tmp_path / "SHARDS" / "x_train_0.bin").touch()
    (tmp_path / "SHARDS" / "x_val_0.bin").touch()
    assert run_benchmark(gpu_report.gpu_report, ["--device", "cpu", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_gpu_tests_are_skipped_without_a_gpu(pytester):
    result = pytester.runpytest_inprocess(ROOT / "tests" / "gpu", "-p", "no:cacheprovider")
    outcomes = result.parseoutcomes()
    assert outcomes.pop("skipped") > 0
    assert outcomes.keys() <= {"warning", "warnings"}


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
FAKE_STAGES = {"machine": 60, "head": 60, "attention": 60, "muon": 3, "waits": 60}


@pytest.fixture
def fake_checks(tmp_path, monkeypatch):
    """A repository whose stages take no GPU. Returns its folder."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "gpu_checks.py").write_text(FAKE_CHECKS)
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "CHECKS", FAKE_STAGES)
    return tmp_path


def test_a_stage_that_fails_is_reported_and_the_others_go_on(fake_checks, capsys):
    out = fake_checks / "out"
    gpu_report.gpu_page_and_json(out, None, 20)
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
    assert "error: a kernel failed in ./tools/gpu_checks.py" in page
    assert str(fake_checks) not in page
    assert "| FP8 loss | 0.5 | 0.1 | **too large** |" in page
    tiles = "| FlexAttention's tiles fit into the shared memory | refuted | error: a kernel failed in "
    assert tiles in page
    fp8 = "1 of 1 checks failed; FP8 loss: 0.5, limit 0.1"
    assert f"| the language-model head runs in FP8 | refuted | {fp8} |" in page


def test_a_report_continues_where_it_stopped(fake_checks):
    out = fake_checks / "out"
    gpu_report.gpu_page_and_json(out, ["head"], 20)
    gpu_report.gpu_page_and_json(out, ["waits"], 20)
    (fake_checks / "made").unlink()
    gpu_report.gpu_page_and_json(out, None, 20)
    made = (fake_checks / "made").read_text().split()
    assert made == ["machine", "attention", "muon"]
    # another PyTorch: everything is measured again
    text = (out / "gpu_report.json").read_text()
    (out / "gpu_report.json").write_text(text.replace('"PyTorch": "2.11"', '"PyTorch": "2.10"'))
    (fake_checks / "made").unlink()
    gpu_report.gpu_page_and_json(out, None, 20)
    assert (fake_checks / "made").read_text().split() == list(FAKE_STAGES)


def test_no_stage_starts_when_the_time_is_over(fake_checks):
    out = fake_checks / "out"
    gpu_report.gpu_page_and_json(out, None, 0.001)
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


@pytest.fixture
def no_stage_left(tmp_path):
    """Ends what a failed test left."""
    yield
    if (tmp_path / "pids").exists() and stage_is_running(tmp_path):
        for pid in (tmp_path / "pids").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


# tools/gpu_report.py as a command, but in the repository argv[1]
REPORT = f"""
import pathlib, runpy, signal, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import bench
folder, hang_up = sys.argv[1:]
bench.ROOT = pathlib.Path(folder)
signal.signal(signal.SIGHUP, signal.SIG_IGN if hang_up == "ignored" else signal.SIG_DFL)
sys.argv = ["gpu_report.py"]
runpy.run_path({str(ROOT / "tools" / "gpu_report.py")!r}, run_name="__main__")
"""


@pytest.mark.parametrize("number, hang_up", [(signal.SIGHUP, "default"), (signal.SIGTERM, "ignored")])
def test_a_signal_ends_the_stage(number, hang_up, tmp_path, no_stage_left):
    """Under nohup, SIGHUP is ignored."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "gpu_checks.py").write_text(ENDLESS_STAGE)
    command = [sys.executable, "-c", REPORT, str(tmp_path), hang_up]
    report = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until((tmp_path / "pids").exists)
        if hang_up == "ignored":
            report.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            assert report.poll() is None
            assert stage_is_running(tmp_path)
        report.send_signal(number)
        _, err = report.communicate(timeout=60)
        wait_until(lambda: not stage_is_running(tmp_path), seconds=10)
        assert report.returncode == 130
        assert err == ""
    finally:
        report.kill()


def test_an_interrupt_ends_a_stage_of_a_row(tmp_path, monkeypatch, no_stage_left):
    """A signal may reach only the report, so the report ends its stage."""

    def interrupted_print(text, **options):
        if "started" in text:
            raise KeyboardInterrupt

    (tmp_path / "train_gpt.py").write_text(ENDLESS_STAGE)
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_report, "print", interrupted_print, raising=False)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.short_run(tmp_path, fp8=True)
    wait_until(lambda: not stage_is_running(tmp_path), seconds=10)


def test_claims_are_those_of_hardware_md():
    hardware = (ROOT / "records" / "HARDWARE.md").read_text()
    rows = re.findall(r"^\| (FP8|bf16) \| .* \| (\d+) \| ([\d,]+) \| ([\d,]+) \|$", hardware, re.M)
    table = []
    for head, tokens, training, validation in rows:
        numbers = (int(training.replace(",", "")), int(validation.replace(",", "")))
        table.append((f"memory {tokens}", head, *numbers))
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
    figures = {"head": "FP8", "training MiB": training, "validation MiB": validation}
    results = {"memory 49152": result_of(figures)}
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
CPU = torch.device("cpu")


def small_head():
    return gpu_checks.head(CPU, tokens=128, dim=256, out=384, fp8=True)


def small_attention():
    return gpu_checks.attention(CPU, cases=[(512, 60, 4), (512, 10**9, 2)], heads=2, dim=32)


def small_muon():
    return gpu_checks.muon(CPU, width=64)


def failed(figures):
    return [check["name"] for check in figures["checks"] if not check["ok"]]


@pytest.fixture
def in_bf16(monkeypatch):
    monkeypatch.setattr(train_gpt, "CPU_FLAGS", {"avx512_bf16"})


def test_right_arithmetic_passes(in_bf16):
    assert failed(small_head()) == []
    assert failed(small_attention()) == []
    assert failed(small_muon()) == []


def test_a_wrong_head_is_noticed(monkeypatch):
    """The FP8 head computes the soft-cap's derivative from its value, so only a wrong value changes it."""
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
        train_gpt, "portable_mask", lambda docs, window, span: plain(docs, window - 1, span)
    )
    assert "512 tokens, window 2, output" in failed(small_attention())


def test_a_wrong_muon_is_noticed(monkeypatch, in_bf16):
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
def test_reference_is_complete():
    reference = gpu_reference.read_reference()
    seeds = [str(seed) for seed in range(5)]
    for variant in gpu_reference.VARIANTS:
        assert list(reference[variant]) == seeds
        for losses in reference[variant].values():
            assert len(losses) == gpu_reference.STEPS
            assert losses[0] == pytest.approx(math.log(384), abs=1e-3)  # the head starts at zero
            assert losses[-1] < 2.2


def test_settings_are_those_of_the_kept_losses(monkeypatch):
    """The recipe of mini changes, but a GPU must train that of the kept losses."""
    hp = gpu_reference.settings()
    assert hp.padded_vocab_size == 384
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    world = train_gpt.World(rank=0, size=1, device=CPU)
    two_steps = replace(hp, num_iterations=2)
    found = gpu_reference.losses_of_seeds(two_steps, world, [0], torch.float32, fp8=False)["0"]
    kept = gpu_reference.read_reference()["float32"]["0"]
    assert found == pytest.approx(kept[:2], abs=1e-4)


@pytest.mark.parametrize("window", gpu_reference.WINDOWS)
def test_the_cpu_is_within_the_tolerance(window):
    reference = gpu_reference.read_reference()
    tolerance = gpu_reference.tolerance(reference, window)
    for variant in ("bf16", "fp8"):
        found = gpu_reference.differences(reference[variant], reference["float32"], window)
        assert abs(statistics.mean(found)) < tolerance < 0.02


def test_tolerance_is_the_distance_plus_four_standard_errors():
    near = {"0": [1.0] * 50, "1": [1.0] * 50}
    bf16 = {"0": [1.25] * 50, "1": [1.75] * 50}  # mean 0.5, standard error 0.25
    reference = {"float32": near, "bf16": bf16, "fp8": near}
    assert gpu_reference.tolerance(reference, "steps 41 to 50") == pytest.approx(1.5)


def test_differences_are_means_of_a_window():
    losses = {"0": [9.0] * 40 + [2.0] * 10}
    expected = {"0": [8.0] * 40 + [1.5] * 10}
    assert gpu_reference.differences(losses, expected, "steps 41 to 50") == [0.5]
    assert gpu_reference.differences(losses, expected, "steps 11 to 20") == [1.0]


def test_the_tokens_have_a_digest(tmp_path):
    hp = replace(train_gpt.TRACKS["mini"], train_files=str(tmp_path / "*.bin"), num_iterations=2)
    digests = []
    for change in (0, 1):
        tokens = [7] * (2 * hp.batch_tokens) + [8]
        tokens[-1] += change
        write_shard(tmp_path / "a.bin", tokens)
        digests.append(gpu_reference.tokens_digest(hp))
    assert digests[0] != digests[1]
