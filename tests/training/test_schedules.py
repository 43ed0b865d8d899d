"""Tests of the learning rate, the momentum and the window, in exact fractions."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
import torch

from test_model import TINY, build
from train_gpt import (
    TRACKS,
    Muon,
    build_optimizers,
    get_lr,
    get_muon_momentum,
    get_window_blocks,
    set_schedules,
)

HP = TRACKS["fineweb"]


def test_official_values():
    assert HP.num_iterations == 1770
    assert HP.cooldown_frac == 0.4
    assert HP.train_seq_len == 49152
    assert HP.batch_tokens == 393216
    assert HP.val_tokens == 10485760
    assert HP.val_seq_len == 262144
    assert HP.val_loss_every == 125
    assert HP.vocab_size == 50257
    assert HP.num_layers == 12
    assert HP.num_heads == 6
    assert HP.head_dim == 128
    assert HP.model_dim == 768
    assert HP.head_lr == 0.22
    assert HP.embed_lr == 0.6
    assert HP.scalar_lr == 0.04
    assert HP.muon_lr == 0.05
    assert HP.max_window == 1728
    assert HP.num_value_embeds == 3
    assert tuple(HP.long_window_layers) == (0, 4, 7, 11)
    assert tuple(HP.attn_free_layers) == (7,)
    assert HP.train_files == "data/fineweb10B/fineweb_train_*.bin"
    assert HP.val_files == "data/fineweb10B/fineweb_val_*.bin"
    assert HP.target_val_loss == 3.28
    assert TRACKS["mini"].target_val_loss == 1.50


@pytest.mark.parametrize(
    "step,want",
    [
        (0, 1.0),
        (600, 1.0),
        (1062, 1.0),  # 60% of 1770 steps: the last step at the full rate
        (1416, 0.55),  # in the middle of the cooldown
        (1769, 0.1 + 0.9 * (1 / 708)),  # the last step
        (1770, 0.1),
    ],
)
def test_learning_rate(step, want):
    assert get_lr(step, HP) == pytest.approx(want, abs=1e-12)


def test_learning_rate_falls_linearly_from_the_corner():
    lrs = [get_lr(s, HP) for s in range(1770)]
    assert lrs[:1063] == [1.0] * 1063
    falls = [a - b for a, b in zip(lrs[1062:], lrs[1063:])]
    assert all(f == pytest.approx(0.9 / 708, abs=1e-12) for f in falls)


def test_learning_rate_that_falls_from_the_start():
    hp = replace(HP, num_iterations=10, cooldown_frac=1.0)
    want = [1 - 0.09 * s for s in range(10)]
    assert [get_lr(s, hp) for s in range(10)] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    "step,want", [(0, 0.85), (150, 0.90), (300, 0.95), (301, 0.95), (1769, 0.95)]
)
def test_muon_momentum(step, want):
    assert get_muon_momentum(step, HP) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("iterations", [1, 27, 600, 1770])
def test_window(iterations):
    hp = replace(HP, num_iterations=iterations)
    for step in range(iterations + 1):
        want = max(1, ceil(Fraction(1728 * step, iterations) / 128))
        assert get_window_blocks(step, hp) == want, f"step {step} of {iterations}"
    assert get_window_blocks(0, hp) == 1
    assert get_window_blocks(iterations, hp) == 14


def test_optimizers_and_what_each_trains():
    model = build(TINY)
    adam, muon = build_optimizers(model, TINY)
    assert isinstance(adam, torch.optim.Adam)
    assert isinstance(muon, Muon)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {g["lr"]: sorted(names[id(p)] for p in g["params"]) for g in adam.param_groups}
    assert groups == {
        0.22: ["lm_head.weight"],
        0.6: ["embed.weight", *(f"value_embeds.{i}.weight" for i in range(3))],
        0.04: sorted(n for n, p in model.named_parameters() if p.ndim < 2),
    }
    for group in adam.param_groups:
        assert group["betas"] == (0.8, 0.95)
        assert group["eps"] == 1e-10
        assert group["weight_decay"] == 0
        assert group["fused"]
    matrices = [names[id(p)] for g in muon.param_groups for p in g["params"]]
    want = [n for n, p in model.named_parameters() if "blocks" in n and p.ndim >= 2]
    assert sorted(matrices) == sorted(want)
    for group in muon.param_groups:
        assert group["lr"] == 0.05
        assert group["ns_steps"] == 5


def test_schedules_reach_the_optimizers():
    hp = replace(TINY, num_iterations=100)
    optimizers = build_optimizers(build(hp), hp)
    adam, muon = optimizers
    # Rates follow from the initial rates and not from those before, so steps may come in any order
    for step in (0, 80, 99, 10):
        set_schedules(optimizers, step, hp)
        factor = get_lr(step, hp)
        want = [0.22 * factor, 0.6 * factor, 0.04 * factor]
        assert [g["lr"] for g in adam.param_groups] == pytest.approx(want)
        for g in muon.param_groups:
            assert g["lr"] == pytest.approx(0.05 * factor)
            assert g["momentum"] == pytest.approx(0.85 + 0.1 * step / 300)
