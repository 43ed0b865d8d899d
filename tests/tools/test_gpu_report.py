"""Tests of tools/gpu_report.py without a GPU: its stages, its verdict, and the row that it adds."""

import sys

import pytest
import torch

from util import ROOT

sys.path.append(str(ROOT / "tools"))
import gpu_report
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
    with pytest.raises(InputError, match="columns"):
        gpu_report.append_row(path, {})
    assert path.read_text() == "another table\n"


def test_judge():
    near = {step: loss + 0.01 for step, loss in LOSSES.items()}
    near[0] = LOSSES[0]
    assert gpu_report.judge(LOSSES, near) == "ok, FP8 and bf16 at most 0.0100 apart"
    assert "bf16: ended early" in gpu_report.judge(LOSSES, {0: 10.8258})
    assert "FP8: starts at 10.9" in gpu_report.judge(LOSSES | {0: 10.9}, LOSSES)
    assert "FP8: no fall to step 75" in gpu_report.judge(LOSSES | {75: LOSSES[50]}, LOSSES)
    assert "apart" in gpu_report.judge(LOSSES, LOSSES | {200: LOSSES[200] - 0.06})
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
    assert row["run"] == "ok, FP8 and bf16 at most 0.0000 apart"
    assert "100: 5.4129" in row["val_loss FP8"]
    assert page.read_text().splitlines()[-1] == gpu_report.table_row(row)
    assert list(folder.iterdir()) == []  # the next report measures again


def test_the_command_in_the_row():
    argv = ["--change", "x", "--shards", "/data/my shards", "--stage", "fp8", "--repeats", "5"]
    text = gpu_report.command_text(argv, "/data/my shards")
    assert text == "python tools/gpu_report.py --change x --shards DIR --repeats 5"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--change", "x"], "--shards"),
        (["--shards", "."], "--change"),
        (["--change", "x", "--shards", ".", "--stage", "fp9"], "--stage"),
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
