"""
Compares the model with its definition in float64 (reference.py): losses, and the gradients of all
parameters. For each part of the model there is a control: the script with that part changed must fail.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import january2026
import reference
from variants import variant

EOT = 299


def tiny(m, **changes):
    """The official model with fewer channels, and windows of an eighth."""
    settings = dict(
        vocab_size=300,
        eot_token=EOT,
        num_heads=6,
        model_dim=96,
        window_block=16,
        seq_lens=(128, 128, 256),
        val_seq_len=256,
        val_tokens=2048,
    )
    return replace(m.TRACKS["fineweb"], **(settings | changes))


def randomize(model):
    """Gives every weight a random value, so that none hides a mistake by being zero or one."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng)
            if "lambda" in name:
                p.copy_(0.5 + 0.2 * noise)
            elif "gate" in name:
                p.copy_(noise)
            elif "embed" in name:
                p.copy_(2 * noise)
            else:
                p.copy_(noise * p.size(-1) ** -0.5)
    return model


def random_batch(num_seqs, length, mean=40, seed=2):
    """inputs and targets (B, S), with documents of `mean` tokens on average."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, EOT, (num_seqs, length + 1), generator=g)
    tokens[torch.rand(tokens.shape, generator=g) < 1 / mean] = EOT
    return tokens[:, :-1].int(), tokens[:, 1:].long()


def blocks(n):
    return torch.tensor(n, dtype=torch.int32)


def parameters64(model):
    return {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}


def check_training(m, step, num_seqs=2, length=128, **changes):
    """The training loss of a step and its gradients. Steps as in the official run."""
    hp = tiny(m, **changes)
    model = randomize(m.GPT(hp, torch.float32)).train()
    model.set_step(step)
    inputs, targets = random_batch(num_seqs, length)
    p = parameters64(model)
    long, short = (n // 8 for n in reference.windows(step))  # 16 tokens in place of 128
    passed = [n for n, first in [(3, 0), (7, 520), (11, 1040), (13, 1560)] if step >= first]
    freqs, scale = reference.rotary_and_scale(passed, hp.head_dim, unit=16)
    want = 0.0
    for seq, target in zip(inputs, targets):
        z = reference.capped_logits(p, hp, seq, long, short, freqs, scale)
        want = want + reference.training_loss(z, target, reference.loss_weights(step))
    loss = model(inputs, targets, blocks(m.get_window_blocks(step, hp)))
    assert loss.item() == pytest.approx(want.item(), rel=3e-6)
    want.backward()
    loss.backward()
    for name, q in model.named_parameters():
        right = p[name].grad
        error = (q.grad.double() - right).norm() / right.norm()
        assert error < 2e-3, f"{name}: {error}"


def check_validation(m):
    """The last validation has a longer window in the long layers only. No token is predicted twice."""
    hp = tiny(m)
    model = randomize(m.GPT(hp, torch.float32)).eval()
    model.set_step(hp.num_iterations)
    inputs, targets = random_batch(1, 256, mean=10_000)
    p = parameters64(model)
    freqs, scale = reference.rotary_and_scale([3, 7, 11, 13], hp.head_dim, unit=16)
    with torch.no_grad():
        z = reference.capped_logits(p, hp, inputs[0], 20 * 16, 6 * 16, freqs, scale)
        want = reference.mean_loss(z, targets[0]).item()
        for model.val_slice in (m.GPT.val_slice, 100):
            loss = model(inputs, targets, blocks(m.get_window_blocks(1600, hp)))
            assert loss.item() == pytest.approx(want, rel=3e-6)


@pytest.mark.parametrize("step", [0, 519, 520, 1040, 1560])
def test_training_loss_and_gradients(step):
    check_training(january2026, step)


def test_without_bigrams():
    check_training(january2026, 100, bigram_factor=0)


def test_validation():
    check_validation(january2026)


# item of the specification, what is changed, the text, its replacement
CONTROLS = [
    (3, "smear stops at documents", "gate(x[:, 1:], self.smear_gate) * x[:, :-1]",
     "gate(x[:, 1:], self.smear_gate) * x[:, :-1] * (tokens[:, 1:, None] != self.hp.eot_token)"),
    (5, "another layer without attention", "setting((6,), \"layers without",
     "setting((5,), \"layers without"),
    (5, "the MLP's hidden units not squared", ").square()\n            x = x + hidden",
     ")\n            x = x + hidden"),
    (5, "unused columns of the vocabulary are not in the softmax",
     "return 23 * torch.sigmoid((logits.float() + 5) / 7.5)",
     "return 23 * torch.sigmoid((logits.float()[:, :300] + 5) / 7.5)"),
    (7, "smear takes the smeared token before", "x[:, 1:] + smear], dim=1)",
     "x[:, 1:] + smear], dim=1) + 0.3 * torch.cat([x[:, :2] * 0, smear[:, :-1]], dim=1)"),
    (7, "smear without the sigmoid's gate of the token itself", "gate(x[:, 1:], self.smear_gate)",
     "gate(x[:, :-1], self.smear_gate)"),
    (8, "bigrams after the norm",
     "bigrams = F.embedding(self.bigram_rows(input_seq.long()), self.bigram_embed)",
     "bigrams = norm(F.embedding(self.bigram_rows(input_seq.long()), self.bigram_embed))"),
    (8, "hash's factors exchanged", "earlier = 27191 *", "earlier = 27192 *"),
    (9, "the skip is added after the mixing", "x = self.resid_lambdas[i] * x +",
     "x = 1.001 * self.resid_lambdas[i] * x +"),
    (9, "bigrams in the first layer only", "self.bigram_lambdas[i] * bigrams",
     "self.bigram_lambdas[0] * bigrams"),
    (10, "skip from layer 2", "setting(3, \"layer whose output is added again\")",
     "setting(2, \"layer whose output is added again\")"),
    (10, "skip's gate without its factor of 2", "torch.sigmoid(self.skip_lambda) * 2 *",
     "torch.sigmoid(self.skip_lambda) *"),
    (10, "the gate of the skip sees x, not x0", "2 * gate(x0, self.skip_gate)",
     "2 * gate(x, self.skip_gate)"),
    (11, "backout of layer 6", "setting(7, \"layer whose output is subtracted",
     "setting(6, \"layer whose output is subtracted"),
    (11, "backout after the norm", "x = norm(x - self.backout_lambda * backout)",
     "x = norm(x) - self.backout_lambda * norm(backout)"),
    (12, "the lambda of O left out", "o_w = weights[3] * self.o_lambdas[index]",
     "o_w = weights[3]"),
    (12, "the lambda of QKV left out", "flatten(0, 1) * self.qkv_lambdas[index]", "flatten(0, 1)"),
    (13, "value tables in another order",
     "zip(reversed(hp.value_layers), itertools.cycle(reversed(value_embeds)))",
     "zip(hp.value_layers, itertools.cycle(value_embeds))"),
    (13, "the value gate without its factor of 2", "ve_gate = 2 * gate", "ve_gate = gate"),
    (14, "no gate on attention's output",
     "y = y.view_as(q) * gate(x, self.attn_gates[index])[..., None]",
     "y = y.view_as(q)"),
    (15, "rotation in the other sense",
     "y1 = x1 * cos + x2 * sin\n        y2 = x2 * cos - x1 * sin",
     "y1 = x1 * cos - x2 * sin\n        y2 = x2 * cos + x1 * sin + 1e-3 * x1"),
    (15, "scale of attention doesn't follow the window", "scale *= 1 + 0.2 * math.log(new / old)",
     "scale *= 1"),
    (15, "all frequencies are lowered", "(hp.yarn_beta - 1)).clamp(0, 1)",
     "(hp.yarn_beta - 1)).clamp(0, 0)"),
    (16, "the turning channels of the key are offset",
     "k = torch.cat([turning, shifted(still)], dim=-1)",
     "k = torch.cat([shifted(turning), still], dim=-1)"),
    (16, "no key offset", "k = torch.cat([turning, shifted(still)], dim=-1)", "pass"),
    (17, "the softcap without its shift", "(logits.float() + 5) / 7.5", "logits.float() / 7.5"),
    (17, "targets of the next sequence",
     "ahead = [F.pad(target_seq[:, k:], (0, k), value=-1) for k in range(3)]",
     "ahead = [target_seq.flatten().roll(-k).view_as(target_seq) for k in range(3)]"),
    (17, "weight of the third token", "0.25 * max(0, 1 - thirds)", "0.25 * max(0, 1 - 2 * thirds)"),
    (18, "windows of W keys", "start = document_start.maximum(query - window)",
     "start = document_start.maximum(query - window + 1)"),
    (18, "windows in whole blocks", "start = document_start.maximum(query - window)",
     "start = document_start.maximum(query[:, :1] - window)"),
    (18, "the short window rounded up", "(window_blocks.clamp_max(last) // 2)",
     "((window_blocks.clamp_max(last) + 1) // 2)"),
    (18, "other long layers", "setting((3, 10), \"layers with the long",
     "setting((4, 10), \"layers with the long"),
    (19, "pairs of neighbours: (0, 1), (2, 3), (4, 5)",
     "y = attention(q.reshape(slots), k.reshape(slots), v.reshape(slots), mask, scale=1.0)",
     "order = [0, 2, 4, 1, 3, 5] if paired else list(range(6))\n"
     "        q, k, v = q[:, :, order], k[:, :, order], v[:, :, order]\n"
     "        y = attention(q.reshape(slots), k.reshape(slots), v.reshape(slots), mask, scale=1.0)\n"
     "        y = y.view_as(q)[:, :, torch.tensor(order).argsort()]"),
    (19, "positions follow the slots", "table.repeat(1, 1, heads // 2, 1)",
     "table.repeat_interleave(heads // 2, 2)"),
    (19, "the window of pairs doubled",
     "paired = make_mask(docs.repeat_interleave(2), short_window, max_short)",
     "paired = make_mask(docs.repeat_interleave(2), 2 * short_window, 2 * max_short)"),
    (19, "other paired layers", "setting((0, 2, 5, 9), \"layers with paired",
     "setting((0, 2, 4, 9), \"layers with paired"),
]


@pytest.mark.parametrize("item,what,old,new", CONTROLS, ids=[f"{c[0]}: {c[1]}" for c in CONTROLS])
def test_control(item, what, old, new):
    m = variant((old, new))
    with pytest.raises(AssertionError):
        check_training(m, 100 if "third token" in what else 600)


def test_controls_of_validation():
    changes = [
        ("(window_blocks.clamp_max(last) // 2)", "(window_blocks // 2)"),
        ("setting(20, \"long window of the last", "setting(13, \"long window of the last"),
    ]
    for change in changes:
        with pytest.raises(AssertionError):
            check_validation(variant(change))


# --------------------------------------------------------------- item 8: rows, in int32 of numpy
def check_bigram_rows(m, vocab):
    """All sequences, against numpy's int32, which overflows."""
    hp = replace(m.TRACKS["fineweb"], vocab_size=vocab)
    rows = 5 * hp.padded_vocab_size
    fake = type("fake", (), {"bigram_embed": range(rows)})
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab, (300, 50), generator=g)
    tokens[:, 1] = torch.linspace(0, vocab - 1, 300).long()
    got = m.GPT.bigram_rows(fake, tokens)
    t = tokens.numpy().astype(np.int32)
    first = np.full_like(t[:, :1], rows - 1)
    before = np.concatenate([first, t[:, 1:-1]], axis=1)  # of tokens 1, 2, ...
    with np.errstate(over="ignore"):
        hashed = np.int32(36313) * t[:, 1:] ^ np.int32(27191) * before
    want = np.concatenate([first, np.mod(hashed, rows - 1)], axis=1)
    assert np.array_equal(got.numpy(), want)
    assert got.min() >= 0
    if vocab == 50257:
        assert rows == 251_520
        token = int(tokens[7, 1])
        assert got[7, 1] == (36313 * token ^ -1750881463) % 251519


@pytest.mark.parametrize("vocab", [257, 50257])
def test_bigram_rows(vocab):
    check_bigram_rows(january2026, vocab)


@pytest.mark.parametrize(
    "old,new",
    [
        ("earlier = (earlier + 2**31) % 2**32 - 2**31  # int32", "pass"),
        ("torch.cat([first, tokens[:, 1:-1]], dim=1)", "tokens[:, :-1]"),
        ("rows = (36313 *", "rows = (36314 *"),
        ("torch.cat([first, rows], dim=1)", "torch.cat([first - 1, rows], dim=1)"),
    ],
)
def test_control_of_bigram_rows(old, new):
    with pytest.raises(AssertionError):
        check_bigram_rows(variant((old, new)), 50257)


# --------------------------------------------------------------- items 5 and 6: shapes and first values
def check_shapes(m):
    hp = m.TRACKS["fineweb"]
    with torch.device("meta"):
        model = m.GPT.__new__(m.GPT)
        torch.nn.Module.__init__(model)
        m.GPT.set_step = m.GPT.init_weights = lambda *_: None
        model.__init__(hp)
    vocab, dim = 50304, 768
    table = (vocab, dim)
    want = {
        "embed": (table, torch.bfloat16),
        "lm_head": (table, torch.bfloat16),
        "bigram_embed": ((5 * vocab, dim), torch.bfloat16),
        "attn_bank": ((10, 4, dim, dim), torch.bfloat16),
        "mlp_in_bank": ((11, 4 * dim, dim), torch.bfloat16),
        "mlp_out_bank": ((11, 4 * dim, dim), torch.bfloat16),
        "smear_gate": ((1, 12), torch.bfloat16),
        "skip_gate": ((1, 12), torch.bfloat16),
        "attn_gates": ((10, 6, 12), torch.bfloat16),
        "value_gates": ((5, 6, 12), torch.bfloat16),
        "resid_lambdas": ((11,), torch.float32),
        "x0_lambdas": ((11,), torch.float32),
        "bigram_lambdas": ((11,), torch.float32),
        "qkv_lambdas": ((10,), torch.float32),
        "o_lambdas": ((10,), torch.float32),
        "smear_lambda": ((), torch.float32),
        "skip_lambda": ((), torch.float32),
        "backout_lambda": ((), torch.float32),
    }
    want |= {f"value_embeds.{i}": (table, torch.bfloat16) for i in range(3)}
    got = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    assert got == want
    assert set(model.state_dict()) == set(want)  # nothing that follows from the step is saved


def test_shapes():
    check_shapes(variant())  # a copy, because it changes the class


def check_initial_values(m):
    """Standard deviations and shapes of the distributions, from 768 channels."""
    hp = tiny(m, model_dim=768, num_layers=11, vocab_size=1000)
    model = m.GPT(replace(hp, bigram_factor=1), torch.float32)
    p = dict(model.named_parameters())
    std = 768**-0.5
    for i in range(3):
        values = p["attn_bank"][:, i]
        assert values.std().item() == pytest.approx(std, rel=0.01)
        assert values.abs().max().item() == pytest.approx(math.sqrt(3) * std, rel=0.01)
    assert not p["attn_bank"][:, 3].any()
    assert p["mlp_in_bank"].std().item() == pytest.approx(0.5 * std, rel=0.01)
    assert p["mlp_in_bank"].abs().max().item() == pytest.approx(math.sqrt(3) * 0.5 * std, rel=0.01)
    assert p["lm_head"].std().item() == pytest.approx(0.005, rel=0.01)
    assert p["lm_head"].abs().max() > 0.02  # normal, not uniform
    assert torch.equal(p["embed"], p["lm_head"])
    zeros = [n for n in p if n.endswith("gate") or n.endswith("gates") or n.startswith("value_embeds")]
    for name in [*zeros, "mlp_out_bank", "bigram_embed", "x0_lambdas", "smear_lambda"]:
        assert not p[name].any(), name
    starts = dict(resid_lambdas=1.1, bigram_lambdas=0.1, qkv_lambdas=0.5, o_lambdas=1.0)
    starts |= dict(skip_lambda=-1.5, backout_lambda=0.5)
    for name, value in starts.items():
        torch.testing.assert_close(p[name].data, torch.full(p[name].shape, value), msg=name)


def test_initial_values():
    check_initial_values(january2026)


def test_initial_values_in_bf16_are_those_in_float32_rounded():
    """PyTorch 2.11 draws few distinct values in bf16."""
    hp = tiny(january2026)
    exact = dict(january2026.GPT(hp, torch.float32).named_parameters())
    for name, p in january2026.GPT(hp, torch.bfloat16).named_parameters():
        assert torch.equal(p, exact[name].to(p.dtype)), name


@pytest.mark.parametrize(
    "old,new",
    [
        ("value.uniform_(-bound, bound, generator=rng)", "value.normal_(std=bound / 3**0.5, generator=rng)"),
        ("bound / 2, generator=rng", "bound, generator=rng"),
        ("value[:, 3].zero_()", "pass"),
        ("value.normal_(std=0.005,", "value.normal_(std=0.006,"),
        ("self.embed.copy_(self.lm_head)", "self.embed.normal_(std=0.005)"),
        ("lambdas(1.1, layers)", "lambdas(1.0, layers)"),
        ("lambdas(-1.5)", "lambdas(-1.4)"),
        ("lambdas(0.5, attn_layers)", "lambdas(0.6, attn_layers)"),
    ],
)
def test_control_of_initial_values(old, new):
    with pytest.raises(AssertionError):
        check_initial_values(variant((old, new)))


# --------------------------------------------------------------- item 17: FP8
def check_fp8_loss(m):
    """The operator's loss and gradients against float64 with the same FP8 operands."""
    g = torch.Generator().manual_seed(5)
    x = (torch.randn(64, 32, generator=g)).bfloat16()
    w = (0.3 * torch.randn(128, 32, generator=g)).bfloat16()
    targets = torch.randint(0, 128, (64, 3), generator=g)
    targets[-1, 1:] = targets[-2, 2] = -1
    weights = torch.tensor([1.0, 0.5, 0.2])
    x_s, w_s = 100 / 448, 1.6 / 448
    x = x.requires_grad_()
    w = w.requires_grad_()
    head_loss = getattr(torch.ops, m.head_loss_op._namespace).head_loss
    loss = head_loss(x, w, targets, weights)[0]
    loss.backward(torch.tensor(1 / 8))
    x8 = ((x / x_s).to(torch.float8_e4m3fn).double() * x_s).detach().requires_grad_()
    w8 = ((w / w_s).to(torch.float8_e4m3fn).double() * w_s).detach().requires_grad_()
    exact = x8 @ w8.T
    logits = exact + (exact.bfloat16() - exact).detach()  # rounded, with the exact one's gradient
    z = 23 * torch.sigmoid((logits + 5) / 7.5)
    want = 0.0
    for i in range(64):
        for k in range(3):
            if targets[i, k] >= 0:
                want = want + weights[k].double() * (z[i].logsumexp(-1) - z[i, targets[i, k]])
    (want / 8).backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-3)
    for got, right in [(x.grad, x8.grad), (w.grad, w8.grad)]:
        assert got.dtype == torch.bfloat16
        assert (got.double() - right).norm() < 0.1 * right.norm()
    # a small gradient of the loss doesn't make the FP8 gradients underflow
    grad_x, grad_w = x.grad, w.grad
    x.grad = w.grad = None
    loss = head_loss(x, w, targets, weights)[0]
    loss.backward(torch.tensor(2.0**-30))
    assert torch.equal(x.grad, grad_x * 2.0**-27)
    assert torch.equal(w.grad, grad_w * 2.0**-27)


def test_fp8_loss():
    check_fp8_loss(january2026)


@pytest.mark.parametrize(
    "old,new",
    [
        ("return torch.where(targets >= 0, weights, 0.0)", "return weights.expand(targets.shape)"),
        ("for k in range(targets.size(1)):", "for k in range(1):"),
        ("(capped - lse).exp() * weights.sum(dim=1, keepdim=True)", "(capped - lse).exp()"),
        ("grad_logits = grad_capped * capped * (1 - capped / 23) / 7.5", "grad_logits = grad_capped"),
        ("grad_scale = GRAD_SCALE * grad", "grad_scale = as_scale(GRAD_SCALE, grad)"),
        ("X_SCALE = 100 / 448", "X_SCALE = 1 / 448"),
        ("W_SCALE = 1.6 / 448", "W_SCALE = 0.1 / 448"),
        ("GRAD_SCALE = 0.75 / 448", "GRAD_SCALE = 1e-7"),
    ],
)
def test_control_of_fp8_loss(old, new):
    with pytest.raises(AssertionError):
        check_fp8_loss(variant((old, new)))


def test_fp8_scales():
    """The largest values that the operands can have. In a step, the gradient of the loss is 1/8."""
    m = january2026
    assert 448 * m.X_SCALE == pytest.approx(100)
    assert 448 * m.W_SCALE == pytest.approx(1.6)
    assert 448 * m.GRAD_SCALE == pytest.approx(0.75)


def test_the_model_with_fp8():
    """Its loss and the head's gradient are near those in bf16."""
    model = randomize(january2026.GPT(tiny(january2026))).train()
    batch = random_batch(1, 128)
    results = []
    for use_fp8 in (False, True):
        model.use_fp8 = use_fp8
        model.zero_grad()
        loss = model(*batch, blocks(3))
        loss.backward()
        results.append((loss.item(), model.lm_head.grad.double()))
    (loss, grad), (loss_fp8, grad_fp8) = results
    assert loss_fp8 != loss
    assert loss_fp8 == pytest.approx(loss, rel=1e-2)
    assert (grad_fp8 - grad).norm() < 0.15 * grad.norm()
