"""Schedules over all 1,601 steps of the official run, and the rotary frequencies of its four windows."""

from dataclasses import replace

import pytest
import torch

from recipes.january2026 import (
    GPT,
    TRACKS,
    build_optimizers,
    get_loss_weights,
    get_lr,
    get_muon_momentum,
    get_rotary,
    get_seq_len,
    get_window_blocks,
    is_tied,
    scheduled_iterations,
    set_schedules,
)
from tests.recipes import reference

STEPS = range(1600)


def test_batches_and_windows():
    hp = TRACKS["fineweb"]
    assert hp.num_iterations == 1600
    assert scheduled_iterations(hp) == 1560
    assert hp.num_sequences == 8
    for step in STEPS:
        length = get_seq_len(step, hp)
        assert length == reference.tokens_per_sequence(step), step
        long, short = reference.windows(step)
        n = get_window_blocks(step, hp).item()
        assert (hp.window_block * n, hp.window_block * (n // 2)) == (long, short), step
    mini = TRACKS["mini"]
    assert get_window_blocks(mini.num_iterations, mini) == 13


def test_rates():
    hp = TRACKS["fineweb"]
    for step in range(1601):
        want = reference.learning_rate(step)
        assert get_lr(step, hp) == pytest.approx(want, abs=1e-12), step
    for step in STEPS:
        want = reference.momentum(step)
        assert get_muon_momentum(step, hp) == pytest.approx(want, abs=1e-12), step
        want = reference.loss_weights(step)
        assert get_loss_weights(step, hp) == pytest.approx(want, abs=1e-12), step
    tied = [is_tied(step, hp) for step in STEPS]
    assert tied == [step <= 1041 for step in STEPS]


@pytest.mark.parametrize(
    "track, head_dim, unit, beta", [("fineweb", 128, 128, 32), ("mini", 64, 16, 4)]
)
def test_rotary(track, head_dim, unit, beta):
    """In mini, YaRN's beta is scaled with the windows, so that the fastest frequency stays 1."""
    windows = [3, 7, 11, 13]
    for stage in range(4):
        want, scale = reference.rotary_and_scale(windows[: stage + 1], head_dim, unit, beta)
        freqs, got = get_rotary(stage, TRACKS[track])
        torch.testing.assert_close(freqs.double(), want, rtol=2e-6, atol=0)
        assert freqs[0] == 1
        assert got == pytest.approx(scale, rel=1e-12)
        assert scale == pytest.approx([0.1, 0.116946, 0.127518, 0.131778][stage], abs=5e-7)


def test_set_schedules():
    """What reaches the model and the optimizers, in the order of the run and at once.
    test_training_loss_and_gradients compares the values."""
    hp = replace(TRACKS["mini"], num_iterations=80)
    model = GPT(hp)
    optimizers = build_optimizers(model, hp)
    for step in range(80):
        set_schedules(model, optimizers, step, hp)
        if step in (0, 25, 26, 52, 78, 79):
            fresh = GPT(hp)
            fresh.set_step(step)
            for (name, a), b in zip(model.named_buffers(), fresh.buffers()):
                assert torch.equal(a, b), (step, name)
            adam, muon = optimizers
            for group in adam.param_groups + muon.param_groups:
                assert group["lr"] == group["initial_lr"] * get_lr(step, hp)
            for group in muon.param_groups:
                assert group["momentum"] == get_muon_momentum(step, hp)
