"""Tests of the defaults, and of the learning rate, the momentum and the window, in exact fractions."""

import json
import re
from dataclasses import asdict, replace
from fractions import Fraction
from math import ceil

import pytest
import torch

from train_gpt import (
    TRACKS,
    Muon,
    build_optimizers,
    get_lr,
    get_muon_momentum,
    get_window_blocks,
    parameter_table,
    set_schedules,
)
from tests.training.test_model import IDEAS, TINY, build
from tests.util import ROOT
from judge.logs.read import parse_log

HP = TRACKS["fineweb"]
EMBEDDINGS = ("embed.weight", "value_embeds.*.weight")


def test_defaults():
    """A run with other defaults can't be compared with the records. Those of mini are its last record's, but
    for the validations. The other tests know the rest of fineweb's."""
    expected = dict(
        train_files="data/fineweb10B/fineweb_train_*.bin",
        val_files="data/fineweb10B/fineweb_val_*.bin",
        val_tokens=10485760,
        batch_tokens=393216,
        train_seq_len=49152,
        val_seq_len=262144,
        eot_token=50256,
        attn_free_layers=(7,),
        long_window_layers=(0, 4, 11),
        relu_slope=0.0,
        fp8=True,
        muon_beta2=0.0,
        val_loss_every=125,
        target_val_loss=3.28,
    )
    assert expected.items() <= asdict(HP).items()
    record = parse_log(next(ROOT.glob("records/mini/2026-11-29_NorMuon*/63f436e7*.txt")))
    mini = asdict(replace(TRACKS["mini"], seed=9, val_loss_every=45))
    assert json.loads(json.dumps(mini)).items() <= record.hyperparameters.items()


def test_learning_rate():
    """1 in the first 60% of the steps, up to step 1062, then a line to 0.1. In mini, a line from 1 to 0."""
    for step in range(1771):
        want = 1 - Fraction(9, 10) * max(0, step - 1062) / 708
        assert get_lr(step, HP) == pytest.approx(float(want), abs=1e-12), step
    for step in range(361):
        assert get_lr(step, TRACKS["mini"]) == pytest.approx(1 - step / 360, abs=1e-12), step


def test_muon_momentum():
    for step in range(1770):
        want = 0.85 + 0.1 * min(step, 300) / 300
        assert get_muon_momentum(step, HP) == pytest.approx(want, abs=1e-12), step
    assert get_muon_momentum(0, replace(HP, muon_momentum_warmup=0)) == 0.95


@pytest.mark.parametrize("iterations", [1, 27, 1770])
def test_window(iterations):
    hp = replace(HP, num_iterations=iterations)
    for step in range(iterations + 1):
        want = max(1, ceil(Fraction(1728 * step, iterations) / 128))
        assert get_window_blocks(step, hp) == want, f"step {step} of {iterations}"


def test_optimizers_and_what_each_trains():
    """The learning rates follow from the initial rates, so steps may come in any order."""
    hp = replace(TINY, num_iterations=100, **IDEAS)
    model = build(hp)
    adam, muon = optimizers = build_optimizers(model, hp)
    assert isinstance(adam, torch.optim.Adam)
    assert isinstance(muon, Muon)
    for line in parameter_table(model, optimizers).splitlines():
        name, shape, trained_by = re.fullmatch(r"(\S+) +\[(.*)\] (.*)", line).groups()
        special = {"lm_head.weight": "Adam, lr 0.22"} | dict.fromkeys(EMBEDDINGS, "Adam, lr 0.6")
        assert trained_by == special.get(name, "Muon, lr 0.05" if "," in shape else "Adam, lr 0.04")
    for group in adam.param_groups:
        assert group["betas"] == (0.8, 0.95)
        assert group["eps"] == 1e-10
        assert group["weight_decay"] == 0
        assert group["fused"]
    for step in (0, 80, 99, 10):
        set_schedules(optimizers, step, hp)
        factor = get_lr(step, hp)
        rates = [g["lr"] for g in adam.param_groups]
        assert rates == pytest.approx([0.22 * factor, 0.6 * factor, 0.04 * factor])
        for g in muon.param_groups:
            assert g["lr"] == pytest.approx(0.05 * factor)
            assert g["momentum"] == pytest.approx(0.85 + 0.1 * step / 300)
            assert g["ns_steps"] == 5
