"""Tests of gpu/bench.py and measure.py on a CPU: FLOPs, tables, errors, a whole benchmark."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train_gpt
from tests.training.test_attention import CASES, EOT, dense_mask, random_input
from tests.training.test_model import TINY
from gpu import bench, measure
from train_gpt import GPT, build_optimizers, document_ids

# -----------------------------------------------------------------------------
# FLOPs


@pytest.mark.parametrize("case", CASES)
def test_visible_pairs(case):
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=1)
    docs = document_ids(tokens, EOT)
    assert measure.visible_pairs(docs, window) == dense_mask(tokens, window).sum()


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
    # Three layers have the long window of 4 blocks. Eight have the short one of 2 blocks.
    pairs = 3 * measure.visible_pairs(docs, 4) + 8 * measure.visible_pairs(docs, 2)
    attention = 12 * 64 * pairs
    assert measure.model_flops(TINY, docs, window) == counts["aten.mm"] + attention
    assert counts["aten.bmm"] == 12 * 64 * 512 * 128 * (3 * 4 + 8 * 2)


def test_newton_schulz_flops_against_pytorch():
    hp = replace(TINY, ns_steps=4)
    model = GPT(hp)
    optimizers = build_optimizers(model, hp)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with FlopCounterMode(display=False) as counter:
        for optimizer in optimizers:
            optimizer.step()
    assert measure.newton_schulz_flops(optimizers) == counter.get_total_flops()


# -----------------------------------------------------------------------------
# The whole program

SMALL = (
    "--track=mini --batch_tokens=512 --train_seq_len=128 --sequences_per_pass=2 --num_layers=4 "
    "--model_dim=32 --num_heads=2 --repeats=2 --kernels=3 --peak_tflops=1"
)


def test_whole_benchmark(monkeypatch, capsys):
    """What it prints agrees with what it prints elsewhere."""
    monkeypatch.setattr(measure, "matmul_peak", lambda: 50.0)  # GFLOP/s
    monkeypatch.setattr(train_gpt, "init_processes", lambda: None)
    bench.main(SMALL.split())
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    rows = re.findall(r"^(\S.*?) {2,}([\d,.]+)$", text, re.M)
    found = {name: float(value.replace(",", "")) for name, value in rows}
    assert (found["step tokens"], found["micro-step tokens"]) == (512, 256)
    for part in ("forward", "backward", "optimizers", "whole step"):
        rate = 1000 * found[f"{part} GFLOP"] / found[f"{part} ms"]
        assert found[f"{part} % of matmul peak"] == pytest.approx(100 * rate / 50, rel=0.002)
    model = 2 * (found["forward GFLOP"] + found["backward GFLOP"])
    assert model + found["optimizers GFLOP"] == pytest.approx(found["whole step GFLOP"], rel=0.002)
    seconds = found["whole step ms"] / 1000
    assert found["tokens/s"] == pytest.approx(512 / seconds, rel=0.01)
    assert found["MFU %"] == pytest.approx(model / seconds / 10, rel=0.002)  # of --peak_tflops 1
    times = [float(row.split()[0]) for row in text.splitlines()[-3:]]  # of kernels
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0
