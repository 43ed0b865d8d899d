"""
Schedules over all 1,601 steps of the official run. test_2026_model.py has the rotary frequencies.
"""

import pytest

from recipes.january2026 import (
    TRACKS,
    get_loss_weights,
    get_lr,
    get_muon_momentum,
    get_seq_len,
    get_window_blocks,
    is_tied,
    scheduled_iterations,
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
