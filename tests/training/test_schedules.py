"""Learning rate, momentum and window at their corners, in exact fractions."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
import torch

from test_model import TINY
from train_gpt import (
    GPT,
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
    assert (HP.num_iterations, HP.cooldown_frac, HP.train_seq_len, HP.batch_tokens) == (
        1770,
        0.4,
        49152,
        393216,
    )
    assert (HP.val_tokens, HP.val_seq_len, HP.val_loss_every) == (10485760, 262144, 125)
    assert (HP.vocab_size, HP.num_layers, HP.num_heads, HP.head_dim, HP.model_dim) == (
        50257,
        12,
        6,
        128,
        768,
    )
    assert (HP.head_lr, HP.embed_lr, HP.scalar_lr, HP.muon_lr) == (0.22, 0.6, 0.04, 0.05)
    assert (HP.max_window, HP.num_value_embeds, HP.save_checkpoint) == (1728, 3, False)
    assert tuple(HP.long_window_layers) == (0, 4, 7, 11) and tuple(HP.attn_free_layers) == (7,)
    assert HP.train_files == "data/fineweb10B/fineweb_train_*.bin"
    assert HP.val_files == "data/fineweb10B/fineweb_val_*.bin"
    assert HP.target_val_loss == 3.28 and TRACKS["mini"].target_val_loss == 1.50


@pytest.mark.parametrize(
    "step,want",
    [
        (0, 1.0),
        (600, 1.0),
        (1062, 1.0),  # 60% of 1770 is 1062: the last step at the full rate
        (1416, 0.55),  # half of the cooldown
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
    assert [get_lr(s, hp) for s in range(10)] == pytest.approx(
        [1 - 0.09 * s for s in range(10)], abs=1e-12
    )


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
    assert get_window_blocks(0, hp) == 1 and get_window_blocks(iterations, hp) == 14


def test_optimizers_and_what_each_trains():
    model = GPT(TINY)
    adam, muon = build_optimizers(model, TINY)
    assert isinstance(adam, torch.optim.Adam) and isinstance(muon, Muon)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = {g["lr"]: sorted(names[id(p)] for p in g["params"]) for g in adam.param_groups}
    assert groups == {
        0.22: ["lm_head.weight"],
        0.6: ["embed.weight", *(f"value_embeds.{i}.weight" for i in range(3))],
        0.04: sorted(n for n, p in model.named_parameters() if p.ndim < 2),
    }
    assert all(
        g["betas"] == (0.8, 0.95) and g["eps"] == 1e-10 and g["weight_decay"] == 0 and g["fused"]
        for g in adam.param_groups
    )
    matrices = [names[id(p)] for g in muon.param_groups for p in g["params"]]
    assert sorted(matrices) == sorted(
        n for n, p in model.named_parameters() if "blocks" in n and p.ndim >= 2
    )
    assert all(g["lr"] == 0.05 and g["ns_steps"] == 5 for g in muon.param_groups)


def test_every_parameter_is_in_exactly_one_group():
    model = GPT(TINY)
    model.gate = torch.nn.Parameter(torch.zeros(4, 4))  # a matrix outside the blocks
    with pytest.raises(ValueError, match="gate is in 0 optimizer groups"):
        build_optimizers(model, TINY)
    model = GPT(TINY)
    model.blocks[0].embed = torch.nn.Parameter(torch.zeros(4, 4))  # Muon's and Adam's
    with pytest.raises(ValueError, match="blocks.0.embed is in 2 optimizer groups"):
        build_optimizers(model, TINY)


def test_schedules_reach_the_optimizers():
    hp = replace(TINY, num_iterations=100)
    optimizers = adam, muon = build_optimizers(GPT(hp), hp)
    for step in (0, 80, 99, 10):  # each is set from the initial rate, not from the one before
        set_schedules(optimizers, step, hp)
        factor = get_lr(step, hp)
        assert [g["lr"] for g in adam.param_groups] == pytest.approx(
            [0.22 * factor, 0.6 * factor, 0.04 * factor]
        )
        for g in muon.param_groups:
            assert g["lr"] == pytest.approx(0.05 * factor)
            assert g["momentum"] == pytest.approx(0.85 + 0.1 * step / 300)
