"""Tests of tools/bench.py and tools/flops.py on a CPU: FLOPs, tables, errors, a whole benchmark."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from train_gpt import GPT, TRACKS, build_optimizers, document_ids
from tests.util import ROOT, env, random_tokens

from tools.gpu import bench
from tools.gpu import flops

EOT = 9
TINY = replace(
    TRACKS["fineweb"],
    vocab_size=300,
    eot_token=299,
    num_layers=6,
    num_heads=2,
    head_dim=16,
    model_dim=64,
    num_value_embeds=1,
    attn_free_layers=(2,),
    long_window_layers=(0, 5),
    train_seq_len=512,
    max_window=512,
)

# -----------------------------------------------------------------------------
# FLOPs


def count_visible_pairs(docs, window_blocks):
    """Looks at every pair of query and key. docs: (T,)"""
    position = torch.arange(len(docs))
    query = position[:, None]
    key = position[None, :]
    causal = key <= query
    same_document = docs[:, None] == docs[None, :]
    in_window = query // 128 - key // 128 < window_blocks
    return int((causal & same_document & in_window).sum())


@pytest.mark.parametrize(
    "num_seqs, length, eot_every, window",
    [
        (1, 128, 40, 1),
        (1, 1024, 10**9, 3),
        (2, 512, 60, 2),
        (3, 256, 1.5, 9),
        (1, 1024, 200, 8),
    ],
)
def test_visible_pairs(num_seqs, length, eot_every, window):
    tokens = random_tokens(num_seqs * length, seed=1, eot=EOT, eot_every=eot_every)
    tokens = torch.tensor(tokens, dtype=torch.int32).view(num_seqs, length)
    docs = document_ids(tokens, EOT)
    assert flops.visible_pairs(docs, window) == count_visible_pairs(docs, window)


def test_model_flops_against_pytorch():
    """PyTorch's FlopCounterMode counts the products with weights as mm, and the attention as bmm.

    PyTorch counts all pairs that the portable attention computes. We only count visible pairs.
    """
    window = 4
    tokens = torch.randint(0, 299, (1, 512), dtype=torch.int32)
    model = GPT(TINY).train()
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens.long(), torch.tensor(window, dtype=torch.int32)).backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert set(counts) == {"aten.mm", "aten.bmm"}
    docs = torch.zeros(512, dtype=torch.int32)
    # Two layers have the long window of 4 blocks. Three have the short one of 2 blocks.
    pairs = 2 * flops.visible_pairs(docs, 4) + 3 * flops.visible_pairs(docs, 2)
    attention = 12 * 2 * 16 * pairs
    assert flops.model_flops(TINY, docs, window) == counts["aten.mm"] + attention
    assert counts["aten.bmm"] == 12 * 2 * 16 * 512 * 128 * (2 * 4 + 3 * 2)


def test_model_flops_of_fineweb_by_hand():
    """One document of 128 tokens is one block. It has 128 * 129 / 2 pairs in each of 11 layers."""
    attention_weights = 11 * 4 * 768 * 768
    mlp_weights = 12 * 8 * 768 * 768
    head_weights = 768 * 50304
    weights = attention_weights + mlp_weights + head_weights
    pairs = 11 * (128 * 129 // 2)
    expected = 6 * 128 * weights + 12 * 768 * pairs
    docs = torch.zeros(128, dtype=torch.int32)
    assert flops.model_flops(TRACKS["fineweb"], docs, 14) == expected


@pytest.mark.parametrize("steps", [1, 4])
def test_newton_schulz_flops_against_pytorch(steps):
    hp = replace(TINY, ns_steps=steps)
    muon = build_optimizers(GPT(hp), hp)[1]
    for group in muon.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    assert flops.newton_schulz_flops(muon) == counter.get_total_flops()


# -----------------------------------------------------------------------------
# The whole program

SMALL = [
    "--track=mini",
    "--batch_tokens=512",
    "--train_seq_len=128",
    "--sequences_per_pass=2",
    "--num_layers=4",
    "--model_dim=32",
    "--head_dim=16",
    "--num_heads=1",
    "--repeats=2",
    "--warmup=1",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Runs the benchmark. Returns what it prints and its JSON file."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    options = [*SMALL, "--kernels=3", "--peak_tflops=1", f"--json={path}"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu.bench", *options],
        cwd=ROOT,
        env=env(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert list(path.parent.iterdir()) == [path]
    return done.stdout, json.loads(path.read_text())


def numbers(row):
    """The last four cells of a row: ms, GFLOP, GFLOP/s and % of peak."""
    cells = row.split()[-4:]
    return [float(cell.replace(",", "")) for cell in cells]


def test_figures_agree(measured):
    _, figures = measured
    assert figures["micro-step tokens"] == 256
    assert figures["step tokens"] == 512
    positive = [
        "forward ms",
        "backward ms",
        "optimizer ms",
        "step ms",
        "first step s",
        "allocated MiB",
    ]
    for name in positive:
        assert figures[name] > 0
    both = figures["forward ms"] + figures["backward ms"]
    assert figures["forward+backward ms"] == pytest.approx(both)
    assert figures["tokens/s"] == pytest.approx(512 / figures["step ms"] * 1000)
    tflops = figures["step model TFLOP"] / figures["step ms"] * 1000
    assert figures["model TFLOP/s"] == pytest.approx(tflops)
    assert figures["MFU %"] == pytest.approx(100 * tflops)  # of --peak_tflops 1


def test_table_of_parts(measured):
    text, figures = measured
    assert "mini: 4 layers, width 32; 512 tokens a step, 2 micro-steps of 256\n" in text
    assert f"speed: {figures['tokens/s']:,.0f} tokens/s; first step, with compilation: " in text
    assert f"MFU {figures['MFU %']:.2f} %\n" in text
    micro_step = 1000 * figures["step model TFLOP"] / 2
    muon = 1000 * figures["optimizer TFLOP"]
    peak = bench.higher_peak(figures)
    assert peak == max(figures["matmul peak before GFLOP/s"], figures["matmul peak after GFLOP/s"])
    for part, name, gflop in [
        ("forward", "forward ms", micro_step / 3),
        ("backward", "backward ms", micro_step * 2 / 3),
        ("forward+backward", "forward+backward ms", micro_step),
        ("optimizers", "optimizer ms", muon),
        ("whole step", "step ms", 2 * micro_step + muon),
    ]:
        (row,) = re.findall(rf"^{re.escape(part)} +[\d,.]+ .*$", text, re.M)
        ms, shown_gflop, rate, percent = numbers(row)
        assert ms == pytest.approx(figures[name], abs=1e-3)
        assert shown_gflop == pytest.approx(gflop, abs=1e-3)
        expected_rate = gflop / figures[name] * 1000
        assert rate == pytest.approx(expected_rate, abs=0.6)
        assert percent == pytest.approx(100 * expected_rate / peak, abs=0.6)


@pytest.mark.parametrize(
    "product, shape",
    [
        ("attention in", (256, 32, 48)),
        ("attention out", (256, 16, 32)),
        ("MLP in", (256, 32, 128)),
        ("MLP out", (256, 128, 32)),
        ("head", (256, 32, 320)),
    ],
)
def test_table_of_products(measured, product, shape):
    text, _ = measured
    shape_text = " x ".join(map(str, shape))
    (row,) = re.findall(rf"^{product} +{shape_text} .*$", text, re.M)
    ms, gflop, rate, percent = numbers(row)
    assert ms > 0
    assert rate >= 0
    assert percent >= 0
    rows, inputs, outputs = shape
    assert gflop == pytest.approx(2e-9 * rows * inputs * outputs, abs=1e-3)


def test_table_of_kernels(measured):
    text, _ = measured
    *_, header, first, second, third = text.splitlines()
    assert header.split() == ["ms", "%", "calls", "kernel"]
    times = [float(row.split()[0]) for row in (first, second, third)]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0


# -----------------------------------------------------------------------------
# Single functions


@pytest.mark.parametrize(
    "args, message",
    [
        (["--repeats", "0"], "--repeats: 0: must be at least 1"),
        (["--train_seq_len", "100"], "train_seq_len"),
        (["--no_such_option", "1"], "no_such_option"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys):
    assert bench.run_benchmark(bench.bench, args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_fineweb_on_a_cpu_takes_short_steps():
    words = ["--track", "fineweb"]
    _, hp = bench.read_options(words)
    short = replace(TRACKS["fineweb"], batch_tokens=1024, train_seq_len=1024, val_seq_len=1024)
    assert hp == short
    _, hp = bench.read_options([*words, "--batch_tokens", "2048"])
    assert hp == replace(short, batch_tokens=2048)
