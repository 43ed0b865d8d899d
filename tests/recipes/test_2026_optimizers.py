"""
Muon, Adam and the training step, beside their definitions in float64 (reference.py), and bf16 weights
beside 64-bit integers.
"""

import math
import struct
from dataclasses import replace

import pytest
import torch

import january2026
import reference
from test_2026_model import randomize, tiny
from util import spawn
from variants import variant

CPU = torch.device("cpu")


@pytest.fixture
def in_float32(monkeypatch):
    monkeypatch.setattr(january2026, "CPU_FLAGS", set())


def float32(m):
    m.CPU_FLAGS = set()
    return m


def gradient(step, shape, scale=1.0):
    g = torch.Generator().manual_seed(100 + step)
    return scale * torch.randn(shape, generator=g)


# --------------------------------------------------------------- item 23
def check_polar_express(m):
    for shape in [(3, 24, 24), (2, 16, 40), (2, 40, 16)]:
        x = gradient(0, shape, 7.0)
        got = m.polar_express(x)
        assert got.shape == x.shape
        for matrix, out in zip(x, got):
            want = reference.polar_express(matrix.double())
            assert (out.double() - want).norm() < 1e-4 * want.norm()
    assert m.POLAR_EXPRESS == tuple(reference.POLAR)
    small = m.polar_express(torch.full((1, 4, 8), 1e-7))  # 1e-6 isn't nothing here
    want = reference.polar_express(torch.full((4, 8), 1e-7).double())
    assert (small[0].double() - want).norm() < 1e-4 * want.norm()
    assert not m.polar_express(torch.zeros(1, 4, 8)).any()


def test_polar_express(in_float32):
    check_polar_express(january2026)


@pytest.mark.parametrize(
    "old,new",
    [
        ("X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)", "X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-6)"),
        ("X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)", "X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-7)"),
        ("1.02 * X.norm(dim=(-2, -1), keepdim=True)", "1.02 * X.norm()"),
        ("for a, b, c in POLAR_EXPRESS:", "for a, b, c in POLAR_EXPRESS[:4]:"),
        ("beta=b, alpha=c)", "beta=b, alpha=b)"),
    ],
)
def test_control_of_polar_express(old, new):
    with pytest.raises(AssertionError):
        check_polar_express(float32(variant((old, new))))


# --------------------------------------------------------------- items 12, 22: NorMuon with cautious decay
def check_muon(m, steps=4):
    """Three steps of all matrices of a small model."""
    hp = tiny(m, model_dim=48, muon_lr=0.023)
    model = randomize(m.GPT(hp, torch.float32))
    muon = m.build_optimizers(model, hp)[1]
    banks = [(model.attn_bank, 1.0), (model.mlp_in_bank, 2.0), (model.mlp_out_bank, 4.0)]
    want = []
    for bank, scale in banks:
        matrices = bank.detach().flatten(0, -3)
        want.append([reference.NorMuon(matrix, scale) for matrix in matrices])
    assert [len(w) for w in want] == [40, 11, 11]
    for step in range(steps):
        lr, mu = 0.023 / (1 + step), 0.85 + 0.02 * step
        for group in muon.param_groups:
            assert group["initial_lr"] == 0.023
            group["lr"] = lr
            group["momentum"] = mu
        for (bank, _), matrices in zip(banks, want):
            bank.grad = gradient(step, bank.shape)
            for g, matrix in zip(bank.grad.flatten(0, -3), matrices):
                matrix.step(g, lr, mu)
        muon.step()
    for (bank, _), matrices in zip(banks, want):
        for got, matrix in zip(bank.detach().flatten(0, -3), matrices):
            moved = matrix.weight - matrix.weight.mean()
            assert (got.double() - matrix.weight).norm() < 1e-5 * moved.norm()


def test_muon(in_float32):
    check_muon(january2026)


@pytest.mark.parametrize(
    "old,new",
    [
        ("dict(params=[model.mlp_in_bank], scale=2.0)", "dict(params=[model.mlp_in_bank], scale=1.0)"),
        ("dict(params=[model.mlp_out_bank], scale=4.0)", "dict(params=[model.mlp_out_bank], scale=2.0)"),
        ("dict(params=[model.attn_bank], scale=1.0)", "dict(params=[model.attn_bank], scale=2.0)"),
        ('decay = group["weight_decay"] * group["lr"] * weights',
         'decay = group["weight_decay"] * group["lr"] * group["scale"] * weights'),
        ("torch.where(updates * weights >= 0, decay, 0.0)", "decay"),
        ("torch.where(updates * weights >= 0, decay, 0.0)", "torch.where(updates * weights <= 0, decay, 0.0)"),
        ('setting(1.2, "Muon', 'setting(1.0, "Muon'),
        ('gradients.lerp(momentum, group["momentum"])', "momentum"),
        ("exact.square().mean(dim=-1, keepdim=True), 1", "exact.square().mean(dim=(-2, -1), keepdim=True).expand_as(mean_squares), 1"),
        ("factor = inverse_rms * norm / new_norm", "factor = inverse_rms"),
        ('setting(0.95, "decay of NorMuon', 'setting(0.9, "decay of NorMuon'),
    ],
)
def test_control_of_muon(old, new):
    with pytest.raises(AssertionError):
        check_muon(float32(variant((old, new))))


# --------------------------------------------------------------- items 21, 25: Adam
GROUPS = {  # mul, betas, wd
    "lm_head": (1, (0.5, 0.95), 150),
    "embed": (1, (0.5, 0.95), 150),
    "value_embeds.0": (75, (0.75, 0.95), 5),
    "value_embeds.1": (75, (0.75, 0.95), 5),
    "value_embeds.2": (75, (0.75, 0.95), 5),
    "bigram_embed": (75, (0.75, 0.95), 5),
    "resid_lambdas": (5, (0.9, 0.99), 0),
    "bigram_lambdas": (5, (0.9, 0.99), 0),
    "qkv_lambdas": (5, (0.9, 0.99), 0),
    "o_lambdas": (5, (0.9, 0.99), 0),
    "smear_lambda": (5, (0.9, 0.99), 0),
    "skip_lambda": (5, (0.9, 0.99), 0),
    "backout_lambda": (5, (0.9, 0.99), 0),
    "x0_lambdas": (5, (0.65, 0.95), 0),
    "smear_gate": (0.01, (0.9, 0.99), 0),
    "skip_gate": (0.05, (0.9, 0.99), 0),
    "attn_gates": (1, (0.9, 0.99), 1),
    "value_gates": (1, (0.9, 0.99), 1),
}


def check_adam(m, steps=5):
    hp = tiny(m, model_dim=48)
    model = randomize(m.GPT(hp, torch.float32))
    adam, muon = m.build_optimizers(model, hp)
    trained_by_muon = ["attn_bank", "mlp_in_bank", "mlp_out_bank"]
    params = {n: p for n, p in model.named_parameters() if n not in trained_by_muon}
    assert params.keys() == GROUPS.keys()
    want = {n: reference.Adam(p.detach(), *GROUPS[n]) for n, p in params.items()}
    for step in range(steps):
        schedule = 1.5 - 0.3 * step
        for group in adam.param_groups:
            group["lr"] = group["initial_lr"] * schedule
        for n, p in params.items():
            p.grad = gradient(step, p.shape, 0.01)
            want[n].step(p.grad, schedule)
        adam.step()
    for n, p in params.items():
        right = want[n].weight
        error = (p.detach().double() - right).norm() / right.norm()
        # lambdas get relative steps of 0.04, the smear gate of 8e-5
        assert error < 1e-6, f"{n}: {error}"


def test_adam():
    check_adam(january2026)


@pytest.mark.parametrize(
    "old,new",
    [
        ("group([model.lm_head, model.embed], hp.head_lr, (0.5, 0.95), 150)", "group([model.lm_head, model.embed], hp.head_lr, (0.5, 0.95), 50)"),
        ("hp.table_lr, (0.75, 0.95), 5)", "hp.table_lr, (0.75, 0.95), 4)"),
        ("hp.table_lr, (0.75, 0.95), 5)", "hp.table_lr, (0.7, 0.95), 5)"),
        ("group(lambdas, hp.scalar_lr, (0.9, 0.99))", "group(lambdas, hp.scalar_lr, (0.9, 0.95))"),
        ("group([model.x0_lambdas], hp.scalar_lr, (0.65, 0.95))", "group([model.x0_lambdas], hp.scalar_lr, (0.9, 0.95))"),
        ("0.01 * hp.head_lr, (0.9, 0.99)", "0.02 * hp.head_lr, (0.9, 0.99)"),
        ("0.05 * hp.head_lr, (0.9, 0.99)", "0.06 * hp.head_lr, (0.9, 0.99)"),
        ("hp.head_lr, (0.9, 0.99), 1)", "hp.head_lr, (0.9, 0.99), 100)"),
        ("torch.where(update * weight > 0, decay * weight, 0.0)", "decay * weight"),
        ("torch.where(update * weight > 0, decay * weight, 0.0)", "torch.where(update * weight < 0, decay * weight, 0.0)"),
        ('group["lr"] ** 2 * group["weight_decay"]', 'group["lr"] * group["weight_decay"]'),
        ("(1 - beta2**t) ** 0.5 / (1 - beta1**t)", "1.0"),
        ("mean_square.sqrt() + 1e-10)", "mean_square.sqrt() + 1e-5)"),
        ('setting(0.6, "Adam', 'setting(0.5, "Adam'),
        ('setting(0.04, "Adam', 'setting(0.05, "Adam'),
        ('setting(0.008, "Adam', 'setting(0.007, "Adam'),
    ],
)
def test_control_of_adam(old, new):
    with pytest.raises(AssertionError):
        check_adam(variant((old, new)))


def check_no_decay_where_the_update_is_zero(m):
    """Adam's decay is strict: a row without gradients never moves. Muon's includes zero."""
    p = torch.nn.Parameter(torch.full((4,), 2.0))
    adam = m.Adam([dict(params=[p], lr=0.1, betas=(0.9, 0.99), weight_decay=1.0)])
    p.grad = torch.tensor([0.0, 1.0, -1.0, 0.0])
    adam.step()
    assert p[0] == p[3] == 2.0
    assert p[1].item() == pytest.approx(2 - 0.1 - 0.1**2 * 2)
    assert p[2].item() == pytest.approx(2 + 0.1)


def test_no_decay_where_the_update_is_zero():
    check_no_decay_where_the_update_is_zero(january2026)


def test_control_of_strict_decay():
    m = variant(("update * weight > 0", "update * weight >= 0"))
    with pytest.raises(AssertionError):
        check_no_decay_where_the_update_is_zero(m)


def check_muon_decays_where_the_update_is_zero(m):
    bank = torch.nn.Parameter(torch.full((1, 2, 2), 2.0))
    muon = m.Muon([dict(params=[bank], scale=1.0)], 0.1, 0.9, 0.95, 1.0)
    bank.grad = torch.zeros(1, 2, 2)
    muon.step()
    torch.testing.assert_close(bank.data, torch.full((1, 2, 2), 2 - 0.1 * 0.1 * 2))


def test_muon_decays_where_the_update_is_zero():
    check_muon_decays_where_the_update_is_zero(january2026)
    m = variant(("updates * weights >= 0", "updates * weights > 0"))
    with pytest.raises(AssertionError):
        check_muon_decays_where_the_update_is_zero(m)


# --------------------------------------------------------------- item 28: bf16 weights, truncated
def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def check_truncation(m):
    """Three steps in bf16. The upper 16 bits of float32 are the parameter, bit for bit."""
    x = torch.cat([gradient(0, (2000,)), torch.tensor([0.0, -0.0, 1e-40, 3e38])])
    got = m.truncated(x, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    for value, low in zip(x.tolist(), got.tolist()):
        assert bits(low) == bits(value) >> 16 << 16
    exact = m.truncated(x, torch.float32)
    assert torch.equal(exact, x)
    bank = torch.nn.Parameter(gradient(1, (3, 8, 16)).bfloat16())
    muon = m.Muon([dict(params=[bank], scale=1.0)], 0.01, 0.9, 0.95, 1.2)
    kept = bank.detach().double()  # the lower bits start at zero
    for step in range(3):
        before = bank.detach().clone()
        bank.grad = gradient(step, bank.shape).bfloat16()
        muon.step()
        weights = muon.state[bank]["weights"]
        assert weights.dtype == torch.float32
        for value, low in zip(weights.flatten().tolist(), bank.flatten().tolist()):
            assert bits(low) == bits(value) >> 16 << 16
        assert not torch.equal(bank, before)
        moved = (weights.double() - kept).norm()
        assert 0.005 < moved / math.sqrt(3 * 8) < 0.02  # bits are not lost between the steps
        kept = weights.double().clone()


def test_truncation():
    check_truncation(january2026)


@pytest.mark.parametrize(
    "old,new",
    [
        ("return (x.view(torch.int32) & -65536).view(torch.float32).to(dtype)", "return x.to(dtype)"),
        ("return truncated(weights, p.dtype)", "return weights.to(p.dtype)"),
    ],
)
def test_control_of_truncation(old, new):
    with pytest.raises(AssertionError):
        check_truncation(variant((old, new)))


def test_adams_tables_are_rounded_to_nearest():
    p = torch.nn.Parameter(gradient(0, (1000,)).bfloat16())
    adam = january2026.Adam([dict(params=[p], lr=0.1, betas=(0.5, 0.95))])
    want = reference.Adam(p.detach().double(), 0.1 / 0.008, (0.5, 0.95), 0)
    for step in range(3):
        p.grad = gradient(step, (1000,)).bfloat16()
        want.weight = p.detach().double()
        want.step(p.grad, 1.0)
        adam.step()
        same = p.detach() == want.weight.bfloat16()
        assert same.float().mean() > 0.995  # ties and float32 aside
    for value in ("mean", "mean_square"):
        assert adam.state[p][value].dtype == torch.float32


# --------------------------------------------------------------- items 20, 21, 26: the training step
def small(m, **changes):
    return replace(
        m.TRACKS["mini"], model_dim=48, vocab_size=100, eot_token=99, val_seq_len=128, val_tokens=256,
        num_sequences=8, seq_lens=(128, 128, 128), num_iterations=48, extension_frac=0.0, **changes
    )


def batch(step, hp):
    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, hp.vocab_size, (8, 129), generator=g)
    return tokens[:, :-1].int().contiguous(), tokens[:, 1:].contiguous()


def step_gradients(m, model, hp, step):
    """The sum over sequences of the gradients, over 8, from one backward pass each."""
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    inputs, targets = batch(step, hp)
    window = torch.tensor(m.get_window_blocks(step, hp), dtype=torch.int32)
    for i in range(8):
        loss = model(inputs[i : i + 1], targets[i : i + 1], window)
        names, params = zip(*model.named_parameters())
        for name, g in zip(names, torch.autograd.grad(loss, params)):
            total[name] += g / 8
    return total


def check_train_step(m, sequences_per_pass=3):
    """Which gradients the optimizers get, in ten steps around the untying."""
    hp = small(m, sequences_per_pass=sequences_per_pass)  # tied until 33
    world = m.World(0, 1, CPU)
    model = randomize(m.build_model(hp, world)).train()
    with torch.no_grad():
        model.embed.copy_(model.lm_head)
    adam, muon = optimizers = m.build_optimizers(model, hp)
    seen = []
    for name, optimizer in (("adam", adam), ("muon", muon)):
        plain = optimizer.step

        def step(plain=plain, name=name, optimizer=optimizer):
            seen.append(name)
            for p in m.parameters_of(optimizer):
                got[names[id(p)]] = p.grad.clone()
            plain()

        optimizer.step = step
    names = {id(p): n for n, p in model.named_parameters()}
    waiting = None
    for step in range(28, 38):
        m.set_schedules(model, optimizers, step, hp)
        want = step_gradients(m, model, hp, step)
        got = {}
        seen.clear()
        window = m.get_window_blocks(step, hp)
        m.train_step(model, optimizers, *batch(step, hp), window, step, hp, world)
        adams_step = step % 2 == 1
        assert sorted(seen) == (["adam", "muon"] if adams_step else ["muon"]), step
        if adams_step:
            for name in waiting:
                if "bank" not in name:
                    want[name] = want[name] + waiting[name]
            if step <= 33:
                want["lm_head"] = want["embed"] = want["lm_head"] + want["embed"]
        for name, g in got.items():
            error = (g - want[name]).norm() / want[name].norm()
            assert error < 1e-4, (step, name, error)
        waiting = want
        same = torch.equal(model.embed, model.lm_head)
        assert same == (step < 35), step
        if step == 33:  # the embedding goes on from the head's moments
            for name in ("step", "mean", "mean_square"):
                assert torch.equal(adam.state[model.embed][name], adam.state[model.lm_head][name])


@pytest.mark.parametrize("sequences_per_pass", [1, 4, 8])
def test_train_step(sequences_per_pass, in_float32):
    check_train_step(january2026, sequences_per_pass)


@pytest.mark.parametrize(
    "old,new",
    [
        ("(loss / hp.num_sequences).backward()", "(loss / inputs.numel()).backward()"),
        ("adam_step = step % 2 == 1", "adam_step = step % 2 == 0"),
        ("adam_step = step % 2 == 1", "adam_step = True"),
        ("        head.grad += embed.grad\n", ""),
        ("tied = adam_step and is_tied(step, hp)", "tied = adam_step and step < hp.num_iterations // 2"),
        ("tied = adam_step and is_tied(step, hp)", "tied = adam_step"),
    ],
)
def test_control_of_train_step(old, new):
    with pytest.raises((AssertionError, AttributeError)):
        check_train_step(float32(variant((old, new))))


def test_every_parameter_is_in_exactly_one_group():
    hp = tiny(january2026)
    model = january2026.GPT(hp)
    model.new_gate = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="puts new_gate into 0 groups"):
        january2026.build_optimizers(model, hp)


# --------------------------------------------------------------- processes
# PyTorch multiplies batches of tiny bf16 matrices (at most 16**3 products in all) with a kernel that
# rounds differently. From 17 x 17 on, a share of a bank takes the same kernel as the whole bank.
BANKS = [(5, 4, 24, 24), (3, 40, 24), (1, 24, 56)]


def muon_steps(dtype):
    banks = [
        torch.nn.Parameter(gradient(i, shape).to(dtype)) for i, shape in enumerate(BANKS)
    ]
    muon = january2026.Muon([dict(params=banks, scale=2.0)], 0.02, 0.9, 0.95, 1.2)
    for step in range(3):
        for i, bank in enumerate(banks):
            bank.grad = gradient(10 * step + i, bank.shape).to(dtype)
        muon.step()
    muon.gather_state()
    states = [value for bank in banks for value in muon.state[bank].values()]
    return [t.detach().float() for t in [*banks, *states]]


def muon_child(rank, world_size, folder):
    for dtype in (torch.float32, torch.bfloat16):
        torch.save(muon_steps(dtype), f"{folder}/{rank}_{dtype}.pt")


@pytest.mark.parametrize("world_size", [2, 4])
def test_muon_on_several_processes(world_size, tmp_path):
    """Weights and the gathered state are those of one process, on all ranks."""
    spawn(muon_child, world_size, tmp_path, str(tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        alone = muon_steps(dtype)
        for rank in range(world_size):
            got = torch.load(tmp_path / f"{rank}_{dtype}.pt")
            for a, b in zip(got, alone):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
