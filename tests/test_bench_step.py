"""tests/bench_step.py: what it counts, against PyTorch's own count; what it prints, on a model that takes no time."""
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bench_step
from test_model import TINY
from train_gpt import GPT, build_optimizers
from util import ROOT, env

SMALL = ["--track", "shakespeare", "--device", "cpu", "--repeats", "2", "--batch_tokens", "512", "--train_seq_len", "128",
         "--sequences_per_pass", "2", "--model_dim", "32", "--head_dim", "16", "--ngram_rows", "64", "--num_layers", "3"]


@pytest.mark.parametrize("steps", [1, 4])
def test_newton_schulz_flops_are_what_pytorch_counts(steps):
    model = GPT(replace(TINY, num_layers=3, attn_free_layers=(1,), num_value_embeds=1, long_window_layers=()))
    muon = build_optimizers(model, replace(TINY, ns_steps=steps))[1]
    for group in muon.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    assert bench_step.newton_schulz_flops(muon) == counter.get_total_flops()


def run(*arguments):
    return subprocess.run([sys.executable, str(ROOT / "tests" / "bench_step.py"), *arguments], env=env(),
                          capture_output=True, text=True, timeout=300)


def test_the_tables():
    done = run(*SMALL)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "shakespeare: 3 layers, width 32; 512 tokens a step, in 2 passes of 256" in done.stdout
    number = r"\s+[\d,.]+"
    for part in ("forward", "backward", "optimizers", "whole step"):
        (row,) = re.findall(rf"^{part}((?:{number}){{4}})$", done.stdout, re.M)
        ms, gflop, rate, _ = (float(cell.replace(",", "")) for cell in row.split())
        assert rate == pytest.approx(gflop / (ms / 1000), rel=0.1, abs=2)
    (tokens,) = re.findall(r"^([\d,]+) tokens/s", done.stdout, re.M)
    (ms,) = re.findall(r"^whole step\s+([\d,.]+)", done.stdout, re.M)
    assert float(tokens.replace(",", "")) == pytest.approx(512 / (float(ms.replace(",", "")) / 1000), rel=0.01)
    for product in ("attention in   256 x 32 x 48", "MLP out        256 x 128 x 32", "head           256 x 32 x 384"):
        assert re.search("^" + re.sub(r" {2,}", r"\\s+", product) + rf"(?:{number}){{4}}$", done.stdout, re.M), product
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.parametrize("bad,what", [(["--repeats", "0"], "--repeats 0"), (["--no_such", "1"], "no_such"),
                                      (["--head_dim", "30"], "--head_dim 30")])
def test_bad_input(bad, what):
    done = run("--track", "shakespeare", "--device", "cpu", *bad)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(rf"error: .*{what}.*\n", done.stderr)
