"""Muon, Adam and the training step, beside their definitions in float64 (reference.py), and bf16 weights
beside the bits of float32 ones."""

import torch

from recipes.january2026 import (
    Adam,
    Muon,
    build_model,
    build_optimizers,
    get_lr,
    get_muon_momentum,
    get_window_blocks,
    parameters_of,
    set_schedules,
    train_step,
)
from tests.recipes import reference
from tests.recipes.test_2026_model import in_float32, tiny  # noqa: F401 (a fixture for all tests)
from tests.training.test_muon import PlainMuon
from tests.util import randomized


def gradient(step, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))


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
SCALES = dict(attn_bank=1.0, mlp_in_bank=2.0, mlp_out_bank=4.0)  # of Muon's steps
# Adam's mul, betas and wd of the parameters whose names begin so
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


def plain_optimizer(name, p):
    """The definition for one parameter."""
    if name in SCALES:
        how = dict(polynomials=reference.POLAR, factor=1.02, epsilon=1e-6)
        return [PlainMuon(matrix, 0.95, **how) for matrix in p.flatten(0, -3)]
    group = next(values for start, values in GROUPS.items() if name.startswith(start))
    return reference.Adam(p, *group)


def step_gradients(model, hp, sequences, step):
    """The mean over sequences of the gradients, from one backward pass each."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for sequence in sequences:
        inputs, targets = sequence[None, :-1], sequence[None, 1:].long()
        loss = model(inputs, targets, get_window_blocks(step, hp))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for name, g in zip(total, gradients):
            total[name] += g / len(sequences)
    return total


def test_train_step():
    """Six steps around the untying: which gradients the optimizers get, and what they make of them. Some are
    zero: those of bigrams that don't occur, and at first of Q, K and V in a layer whose output is zero."""
    settings = dict(num_sequences=2, num_iterations=48, extension_frac=0.0)  # tied until 33
    hp = tiny(model_dim=48, seq_lens=(128, 128, 128), **settings)
    model = randomized(build_model(hp)).train()
    with torch.no_grad():
        model.embed.copy_(model.lm_head)
        model.attn_bank[0, 3] = 0
    adam, muon = optimizers = build_optimizers(model, hp)
    names = {p: n for n, p in model.named_parameters()}
    plain = {n: plain_optimizer(n, p) for n, p in model.named_parameters()}
    got = {}

    def keep(optimizer, *_):
        for p in parameters_of(optimizer):
            assert names[p] not in got
            got[names[p]] = p.grad.clone()

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(keep)
    waiting = None
    for step in range(30, 36):
        sequences = torch.randint(300, (2, 129), dtype=torch.int32)
        set_schedules(model, optimizers, step, hp)
        want = step_gradients(model, hp, sequences, step)
        got.clear()
        train_step(model, optimizers, sequences, step, hp)
        trained = {name for name in want if step % 2 == 1 or name in SCALES}
        assert got.keys() == trained
        if step % 2 == 1:
            for name in waiting.keys() - SCALES.keys():
                want[name] += waiting[name]
            if step <= 33:
                want["lm_head"] = want["embed"] = want["lm_head"] + want["embed"]
        lr = get_lr(step, hp)
        for name, g in got.items():
            error = g - want[name]
            assert error.norm() < 1e-4 * want[name].norm(), (step, name)
            if name not in SCALES:
                plain[name].step(g, lr)
                continue
            how = (0.023 * lr, SCALES[name], get_muon_momentum(step, hp))
            for matrix, part in zip(plain[name], g.flatten(0, -3)):
                reference.muon_step(matrix, part, *how)
        waiting = want
        same = torch.equal(model.embed, model.lm_head)
        assert same == (step < 35), step
        if step == 33:  # the embedding goes on from the head's moments
            moments = [adam.state[p] for p in (model.embed, model.lm_head)]
            torch.testing.assert_close(*moments, rtol=0, atol=0)
    for name, p in model.named_parameters():
        if name in SCALES:
            want = torch.stack([matrix.weight for matrix in plain[name]]).view_as(p)
        else:
            want = plain[name].weight
        error = p.detach().double() - want
        limit = 1e-5 if name in SCALES else 1e-6
        assert error.norm() < limit * (want.norm() + 0.1), name  # a lambda may be near zero
