"""The harness of tests/gpu, as far as it goes without a GPU: FLOP formula, tables, errors, a whole bench on the CPU."""
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from test_attention import dense_mask, random_input
from train_gpt import GPT, TRACKS, document_ids
from util import ROOT, env

sys.path.append(str(ROOT / "tests" / "gpu"))
import bench

EOT = 9
TINY = replace(TRACKS["fineweb"], vocab_size=300, eot_token=299, num_layers=6, num_heads=2, head_dim=16, model_dim=64,
               num_value_embeds=1, attn_free_layers=(2,), long_window_layers=(0, 5), train_seq_len=512, max_window=512)


@pytest.mark.parametrize("num_seqs,length,every,window", [(1, 128, 40, 1), (1, 1024, 10**9, 3), (2, 512, 60, 2),
                                                          (3, 256, 1.5, 9), (1, 1024, 200, 8)])
def test_visible_pairs_are_those_of_the_mask(num_seqs, length, every, window):
    tokens = random_input(num_seqs, length, every, seed=1)
    want = int(dense_mask(tokens, window).sum())
    assert bench.visible_pairs(document_ids(tokens, EOT), window) == want


def test_flops_are_what_pytorch_counts():
    """FlopCounterMode sees 2-D products (weights) as mm, and the portable attention's as bmm: of all pairs in its
    spans, which the model's FLOPs count only where visible."""
    window = 4
    tokens = torch.randint(0, 299, (1, 512), dtype=torch.int32)
    model = GPT(TINY, torch.float32).train()
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens.long(), torch.tensor(window, dtype=torch.int32)).backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert set(counts) == {"aten.mm", "aten.bmm"}
    docs = torch.zeros(512, dtype=torch.int32)
    attention = 12 * 2 * 16 * (2 * bench.visible_pairs(docs, 4) + 3 * bench.visible_pairs(docs, 2))
    assert bench.model_flops(TINY, docs, window) == counts["aten.mm"] + attention
    # five layers of 512 queries, two with four blocks of keys and three with two, of which the counter sees all
    assert counts["aten.bmm"] == 12 * 2 * 16 * 512 * 128 * (2 * 4 + 3 * 2)


def test_flops_of_the_fineweb_track_by_hand():
    """One document of 128 tokens, one block: 128 * 129 / 2 pairs in each of eleven layers."""
    weights = 11 * 4 * 768 * 768 + 12 * 8 * 768 * 768 + 768 * 50304
    want = 6 * 128 * weights + 12 * 768 * 11 * (128 * 129 // 2)
    assert bench.model_flops(TRACKS["fineweb"], torch.zeros(128, dtype=torch.int32), 14) == want


def test_table_row():
    row = bench.table_row({"date": "2000-01-01", "change": "a | b\nc", "step ms": 1234.5678, "allocated MiB": 7})
    cells = [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]
    assert len(cells) == len(bench.COLUMNS)
    assert dict(zip(bench.COLUMNS, cells)) == {c: "-" for c in bench.COLUMNS} | {
        "date": "2000-01-01", "change": "a / b c", "step ms": "1,234.57", "allocated MiB": "7"}


def test_a_row_joins_the_table_that_ends_hopper_md(tmp_path):
    path = tmp_path / "HOPPER.md"
    path.write_text(bench.HOPPER.read_text())
    bench.append_row(path, {"change": "first"})
    bench.append_row(path, {"change": "second"})
    old, new = bench.HOPPER.read_text().splitlines(), path.read_text().splitlines()
    assert new[:-2] == old and "| first |" in new[-2] and "| second |" in new[-1]
    assert old[-1].startswith("|")  # else what was added would not be of the table
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("another table\n")
    with pytest.raises(bench.BenchError, match="columns"):
        bench.append_row(path, {})
    assert path.read_text() == "another table\n"


def test_judging_the_short_run():
    good = {step: round(10.8258 / (1 + step / 100), 4) for step in range(0, 201, 25)}
    assert bench.judge(good, {s: l + 0.01 * (s > 0) for s, l in good.items()}) == "ok, FP8 and bf16 at most 0.0100 apart"
    assert "bf16: ended early" in bench.judge(good, {0: 10.8258})
    assert "FP8: starts at 10.9" in bench.judge(good | {0: 10.9}, good)
    assert "FP8: no fall to step 75" in bench.judge(good | {75: good[50]}, good)
    assert "apart" in bench.judge(good, good | {200: good[200] - 0.06})
    nan = bench.judge(good | {100: float("nan")}, good)
    assert "FP8: no fall to step 100" in nan


def run_bench(*args):
    return subprocess.run([sys.executable, ROOT / "tests" / "gpu" / "bench.py", *map(str, args)], cwd=ROOT,
                          env=env(), capture_output=True, text=True, timeout=300)


def test_bench_runs_on_the_cpu(tmp_path):
    done = run_bench("--device=cpu", "--repeats=2", "--warmup=1", "--kernels=3", "--peak_tflops=1", "--json",
                     tmp_path / "out.json", "--num_layers=2", "--long_window_layers=0", "--model_dim=32", "--head_dim=16",
                     "--train_seq_len=128", "--batch_tokens=512", "--sequences_per_pass=2")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["micro-step tokens"] == 256 and figures["step tokens"] == 512
    for name in ("forward ms", "backward ms", "optimizer ms", "step ms", "first step s", "allocated MiB"):
        assert figures[name] > 0
    assert figures["forward+backward ms"] == pytest.approx(figures["forward ms"] + figures["backward ms"])
    assert figures["tokens/s"] == pytest.approx(512 / figures["step ms"] * 1000)
    assert figures["MFU %"] == pytest.approx(100 * figures["model TFLOP/s"])
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == 1 + 14 + 1 + 3 and lines[15].split() == ["ms", "%", "calls", "kernel"]


@pytest.mark.parametrize("args,says", [
    (["--repeats", "0"], "--repeats"),
    (["--device", "cpu", "--peak_tflops", "-1"], "more than zero"),
    (["--report", "x"], "--shards DIR"),
    (["--report", "x", "--shards", "nowhere"], "make them with data/fineweb.py"),
    (["--device", "cpu", "--train_seq_len", "100"], "multiple of 128"),
    (["--device", "cpu", "--no_such_option", "1"], "no_such_option"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line(args, says, capsys):
    assert bench.main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_a_report_needs_a_gpu(tmp_path, capsys):
    for kind in ("train", "val"):
        (tmp_path / f"x_{kind}_0.bin").touch()
    assert bench.main(["--report", "x", "--shards", str(tmp_path), "--device", "cpu"]) == 2
    assert "no usable CUDA GPU" in capsys.readouterr().err


def test_missing_packages_are_named():
    with pytest.raises(bench.BenchError, match="missing packages: no_such_package_a, no_such_package_b;"):
        bench.check_packages(["json", "no_such_package_a", "no_such_package_b"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_whole_folder_is_skipped():
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"], cwd=ROOT,
                          env=env(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout and "passed" not in done.stdout and "failed" not in done.stdout
