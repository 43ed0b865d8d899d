"""Muon, Adam and the training step, beside their definitions in float64 (reference.py), and bf16 weights
beside the bits of float32 ones."""

from dataclasses import replace

import torch

from recipes.january2026 import (
    Adam,
    GPT,
    Muon,
    TRACKS,
    build_model,
    build_optimizers,
    get_window_blocks,
    parameters_of,
    set_schedules,
    train_step,
)
from tests.recipes import reference
from tests.recipes.test_2026_model import in_float32, tiny  # noqa: F401 (a fixture for all tests)
from tests.training.test_muon import PlainMuon
from tests.util import randomized

POLAR = dict(polynomials=reference.POLAR, factor=1.02, epsilon=1e-6)


def gradient(step, shape, scale=1.0):
    g = torch.Generator().manual_seed(100 + step)
    return scale * torch.randn(shape, generator=g)


# --------------------------------------------------------------- Muon
def test_muon():
    """Four steps of all matrices of a small model. The first layer gets no gradient: the weights decay where
    the update is zero."""
    hp = tiny(model_dim=48)
    model = randomized(GPT(hp))
    muon = build_optimizers(model, hp)[1]
    assert {group["lr"] for group in muon.param_groups} == {0.023}
    scales = {model.attn_bank: 1.0, model.mlp_in_bank: 2.0, model.mlp_out_bank: 4.0}
    want = {}
    for bank in scales:
        matrices = bank.detach().flatten(0, -3)
        want[bank] = [PlainMuon(matrix, 0.95, **POLAR) for matrix in matrices]
    for step in range(4):
        lr, mu = 0.023 / (1 + step), 0.85 + 0.02 * step
        for group in muon.param_groups:
            group.update(lr=lr, momentum=mu)
        for bank, matrices in want.items():
            bank.grad = gradient(step, bank.shape)
            bank.grad[0] = 0
            for g, matrix in zip(bank.grad.flatten(0, -3), matrices):
                reference.muon_step(matrix, g, lr, scales[bank], mu)
        muon.step()
    for bank, matrices in want.items():
        for got, matrix in zip(bank.detach().flatten(0, -3), matrices):
            spread = matrix.weight - matrix.weight.mean()
            error = got.double() - matrix.weight
            assert error.norm() < 1e-5 * spread.norm()


# --------------------------------------------------------------- Adam
# mul, betas and wd of the parameters whose names begin so
GROUPS = {
    "lm_head": (1, (0.5, 0.95), 150),
    "embed": (1, (0.5, 0.95), 150),
    "value_embeds": (75, (0.75, 0.95), 5),
    "bigram_embed": (75, (0.75, 0.95), 5),
    "x0_lambdas": (5, (0.65, 0.95), 0),
    "smear_gate": (0.01, (0.9, 0.99), 0),
    "skip_gate": (0.05, (0.9, 0.99), 0),
    "attn_gates": (1, (0.9, 0.99), 1),
    "value_gates": (1, (0.9, 0.99), 1),
    "": (5, (0.9, 0.99), 0),  # the other lambdas
}


def test_adam():
    """Five steps. One row gets no gradient: the weights don't decay where the update is zero."""
    hp = tiny(model_dim=48)
    model = randomized(GPT(hp))
    adam, _ = build_optimizers(model, hp)
    params = {n: p for n, p in model.named_parameters() if not n.endswith("bank")}
    want = {}
    for n, p in params.items():
        group = next(values for start, values in GROUPS.items() if n.startswith(start))
        want[n] = reference.Adam(p.detach(), *group)
    for step in range(5):
        schedule = 1.5 - 0.3 * step
        for group in adam.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * schedule
        for n, p in params.items():
            p.grad = gradient(step, p.shape, 0.01)
            if p.ndim >= 2:
                p.grad[1:2] = 0
            want[n].step(p.grad, schedule)
        adam.step()
    for n, p in params.items():
        right = want[n].weight
        error = p.detach().double() - right
        # lambdas get relative steps of 0.04, the smear gate of 8e-5
        assert error.norm() < 1e-6 * right.norm(), n


# --------------------------------------------------------------- bf16 weights, truncated
def test_truncation():
    """After three steps, bf16 weights are the upper 16 bits of float32 ones. The lower bits start at zero."""
    bf16 = torch.nn.Parameter(gradient(1, (3, 8, 16)).bfloat16())
    exact = torch.nn.Parameter(bf16.detach().float())
    banks = (bf16, exact)
    muons = [Muon([dict(params=[bank], scale=1.0)], 0.01, 0.9, 0.95, 1.2) for bank in banks]
    for step in range(3):
        for bank, muon in zip(banks, muons):
            bank.grad = gradient(step, bank.shape).bfloat16().to(bank.dtype)
            muon.step()
    upper = exact.view(torch.int32) >> 16
    assert torch.equal(bf16.view(torch.int16), upper.short())


def test_adams_tables_are_rounded_to_nearest():
    p = torch.nn.Parameter(gradient(0, (1000,)).bfloat16())
    adam = Adam([dict(params=[p], lr=0.1, betas=(0.5, 0.95), weight_decay=1.0)])
    want = reference.Adam(p.detach(), 0.1 / 0.008, (0.5, 0.95), 1 / 0.005)
    for step in range(3):
        p.grad = gradient(step, (1000,)).bfloat16()
        want.weight.copy_(p.detach())
        want.step(p.grad, 1.0)
        adam.step()
        same = p.detach() == want.weight.bfloat16()
        assert same.float().mean() > 0.995  # ties and float32 aside


# --------------------------------------------------------------- the training step
def step_gradients(model, hp, sequences, step):
    """The sum over sequences of the gradients, over 8, from one backward pass each."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for sequence in sequences:
        inputs, targets = sequence[None, :-1], sequence[None, 1:].long()
        loss = model(inputs, targets, get_window_blocks(step, hp))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, g in zip(total, gradients):
            total[name] += g / 8
    return total


def test_train_step():
    """Which gradients the optimizers get, in six steps around the untying."""
    hp = replace(
        TRACKS["mini"],
        model_dim=48,
        vocab_size=100,
        eot_token=99,
        val_seq_len=128,
        num_sequences=8,
        seq_lens=(128, 128, 128),
        num_iterations=48,
        extension_frac=0.0,  # tied until 33
        sequences_per_pass=2,
    )
    model = randomized(build_model(hp)).train()
    with torch.no_grad():
        model.embed.copy_(model.lm_head)
    adam, muon = optimizers = build_optimizers(model, hp)
    names = {p: n for n, p in model.named_parameters()}
    got = {}

    def keep(optimizer, *_):
        for p in parameters_of(optimizer):
            assert names[p] not in got
            got[names[p]] = p.grad.clone()

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(keep)
    waiting = None
    for step in range(30, 36):
        sequences = torch.randint(100, (8, 129), dtype=torch.int32)
        set_schedules(model, optimizers, step, hp)
        want = step_gradients(model, hp, sequences, step)
        got.clear()
        train_step(model, optimizers, sequences, step, hp)
        trained = {name for name in want if step % 2 == 1 or "bank" in name}
        assert got.keys() == trained
        if step % 2 == 1:
            for name in waiting:
                if "bank" not in name:
                    want[name] += waiting[name]
            if step <= 33:
                want["lm_head"] = want["embed"] = want["lm_head"] + want["embed"]
        for name, g in got.items():
            error = g - want[name]
            assert error.norm() < 1e-4 * want[name].norm(), (step, name)
        waiting = want
        same = torch.equal(model.embed, model.lm_head)
        assert same == (step < 35), step
        if step == 33:  # the embedding goes on from the head's moments
            moments = [adam.state[p] for p in (model.embed, model.lm_head)]
            torch.testing.assert_close(*moments, rtol=0, atol=0)
