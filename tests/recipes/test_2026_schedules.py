"""Schedules over all 1,601 steps of the official run, and the rotary frequencies of its four windows."""

from dataclasses import replace

import pytest
import torch

import january2026
import reference
from variants import variant

STEPS = range(1600)


def check_batches_and_windows(m):
    hp = m.TRACKS["fineweb"]
    assert hp.num_iterations == 1600
    assert hp.scheduled_iterations == 1560
    assert hp.num_sequences == 8
    total = 0
    for step in STEPS:
        length = m.get_seq_len(step, hp)
        assert length == reference.tokens_per_sequence(step), step
        total += 8 * length
        assert m.tokens_trained(1, hp) == 131_072
        long, short = reference.windows(step)
        n = m.get_window_blocks(step, hp)
        assert (hp.window_block * n, hp.window_block * (n // 2)) == (long, short), step
    assert m.tokens_trained(1600, hp) == total == 424_673_280
    assert m.get_window_blocks(1600, hp) * hp.window_block == 2560  # the last validation


def check_rates(m):
    hp = m.TRACKS["fineweb"]
    for step in range(1601):
        want = reference.learning_rate(step)
        assert m.get_lr(step, hp) == pytest.approx(want, abs=1e-12), step
    for step in STEPS:
        want = reference.momentum(step)
        assert m.get_muon_momentum(step, hp) == pytest.approx(want, abs=1e-12), step
        want = reference.loss_weights(step)
        assert m.get_loss_weights(step, hp) == pytest.approx(want, abs=1e-12), step
    tied = [m.is_tied(step, hp) for step in STEPS]
    assert tied == [step <= 1041 for step in STEPS]


def check_rotary(m):
    hp = m.TRACKS["fineweb"]
    for stage, step in enumerate((0, 520, 1040, 1560)):
        want, scale = reference.rotary_and_scale([3, 7, 11, 13][: stage + 1], 128)
        for at in (step, step + 30):
            freqs, got = m.get_rotary(at, hp, "cpu")
            assert freqs.shape == (32,)
            torch.testing.assert_close(freqs.double(), want, rtol=2e-6, atol=0)
            assert got == pytest.approx(scale, rel=1e-12)
        assert scale == pytest.approx([0.1, 0.116946, 0.127518, 0.131778][stage], abs=5e-7)
    # the last validation has a longer window, but the frequencies of the extension
    assert torch.equal(m.get_rotary(1600, hp, "cpu")[0], freqs)


def check_rotary_of_mini(m):
    """YaRN's beta is scaled with the windows: the fastest frequency doesn't change."""
    hp = m.TRACKS["mini"]
    want, scale = reference.rotary_and_scale([3, 7, 11, 13], 64, unit=16, beta=4)
    freqs, got = m.get_rotary(hp.num_iterations - 1, hp, "cpu")
    torch.testing.assert_close(freqs.double(), want, rtol=2e-6, atol=0)
    assert got == pytest.approx(scale, rel=1e-12)
    assert freqs[0] == 1
    # the last validation has the windows of the extension
    assert m.get_window_blocks(hp.num_iterations, hp) == m.get_window_blocks(hp.num_iterations - 1, hp)


def check_set_schedules(m):
    """What reaches the model and the optimizers, in the order of the run and at once."""
    hp = replace(m.TRACKS["mini"], num_iterations=80)
    model = m.GPT(hp, torch.float32)
    optimizers = m.build_optimizers(model, hp)
    for step in range(80):
        m.set_schedules(model, optimizers, step, hp)
        fresh = m.GPT(hp, torch.float32)
        if step in (0, 25, 26, 52, 78, 79):
            m.set_schedules(fresh, m.build_optimizers(fresh, hp), step, hp)
            for (name, a), b in zip(model.named_buffers(), fresh.buffers()):
                assert torch.equal(a, b), (step, name)
            assert model.loss_weights.tolist() == pytest.approx(m.get_loss_weights(step, hp))
            freqs, scale = m.get_rotary(step, hp, "cpu")
            assert model.attn_scale.item() == pytest.approx(scale)
            assert torch.equal(model.rotary.table[0, 5], (5 * freqs).cos())
            assert torch.equal(model.rotary.table[1, 7], (7 * freqs).sin())
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    assert group["lr"] == group["initial_lr"] * m.get_lr(step, hp)
            for group in optimizers[1].param_groups:
                assert group["momentum"] == m.get_muon_momentum(step, hp)


CHECKS = [
    check_batches_and_windows, check_rates, check_rotary, check_rotary_of_mini, check_set_schedules,
]


@pytest.mark.parametrize("check", CHECKS)
def test_schedules(check):
    check(january2026)


def test_rotary_tables_are_rounded_to_the_models_dtype():
    hp = january2026.TRACKS["mini"]
    exact = january2026.GPT(hp, torch.float32).rotary
    half = january2026.GPT(hp, torch.bfloat16).rotary
    assert torch.equal(half.table, exact.table.bfloat16())
    assert half.table.shape == (2, 2 * 12_160, 16)


@pytest.mark.parametrize(
    "check,old,new",
    [
        (check_batches_and_windows, "min(3, 3 * step // hp.scheduled", "min(3, 3 * step // hp.num"),
        (check_batches_and_windows, "(16384, 32768, 49152)", "(16384, 32768, 32768)"),
        (check_batches_and_windows, "return hp.val_window", "return hp.windows[-1]"),
        (check_rates, "if 3 * step > hp.scheduled", "if 3 * step >= hp.scheduled"),
        (check_rates, "if 3 * step > 2 * hp.scheduled", "if 3 * step >= 2 * hp.scheduled"),
        (check_rates, "setting(0.55, \"fraction of the schedule", "setting(0.50, \"fraction of the schedule"),
        (check_rates, "setting(1.52,", "setting(1.53,"),
        (check_rates, "w * factor + (1 - w)", "w * factor + factor * (1 - w)"),
        (check_rates, "setting(50, \"last steps", "setting(40, \"last steps"),
        (check_rates, "elif step > cooldown_start:", "elif step > cooldown_start + 1:"),
        (check_rates, "setting(300, \"steps in which Muon", "setting(301, \"steps in which Muon"),
        (check_rates, "0.5 * min(1, max(0, 2 - thirds))", "0.5 * min(1, max(0, 2 - 2 * thirds))"),
        (check_rates, "return step <= math.ceil", "return step < math.ceil"),
        (check_rates, "hp.scheduled_iterations) | 1", "hp.scheduled_iterations)"),
        (check_rotary, "ratio + kept * (1 - ratio)", "kept + ratio * (1 - ratio)"),
        (check_rotary, "1 + 0.2 * math.log", "1 + 0.1 * math.log"),
        (check_rotary, "(turns - 1) / (hp.yarn_beta - 1)", "(turns - 1) / hp.yarn_beta"),
        (check_rotary, "torch.linspace(0, 1, hp.head_dim // 4", "torch.linspace(0, 1, 1 + hp.head_dim // 4"),
        (check_rotary_of_mini, "yarn_beta=4", "yarn_beta=32"),
        (check_rotary_of_mini, "val_window=13", "val_window=20"),
        (check_set_schedules, "self.rotary.set_frequencies(freqs)", "pass"),
        (check_set_schedules, "if self.stage != stage:", "if self.stage < 1:"),
    ],
)
def test_control(check, old, new):
    with pytest.raises(AssertionError):
        check(variant((old, new)))
