"""
Tests of the whole model: shapes, counts, the initial loss, and a plain implementation in float64.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from test_attention import dense_attention, rotate
from train_gpt import GPT, TRACKS, CastedLinear, norm

FINEWEB = TRACKS["fineweb"]
TINY = replace(
    FINEWEB,
    vocab_size=300,
    eot_token=256,
    num_layers=12,
    num_heads=2,
    head_dim=32,
    model_dim=64,
    train_seq_len=512,
    val_seq_len=512,
    batch_tokens=8 * 512,
    max_window=512,
)


def blocks(n):
    return torch.tensor(n, dtype=torch.int32)


def build(hp, dtype=torch.float32):
    """The model with activations of this dtype. Elsewhere, the dtype depends on the machine."""
    with mock.patch.object(train_gpt, "DTYPE", dtype):
        return GPT(hp)


def batch(hp, num_seqs, length, eot_every=60):
    shape = (num_seqs, length + 1)
    tokens = torch.randint(0, hp.vocab_size, shape)
    tokens[torch.rand(shape) < 1 / eot_every] = hp.eot_token
    return tokens[:, :-1].int(), tokens[:, 1:].long()


def randomize(model):
    """Gives every weight a random value, so that no weight hides a mistake by being zero or one."""
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn_like(p)
            if p.ndim < 2 or p.numel() < 64:
                p.copy_(noise * 0.3 + 0.5)
            else:
                p.copy_(noise * 0.5 / math.sqrt(p.shape[-1]))
        for table in [model.embed, *model.value_embeds]:
            table.weight.mul_(10)
    return model


def rms_norm(x):
    mean_square = x.square().mean(-1, keepdim=True)
    return x / (mean_square + torch.finfo(torch.float32).eps).sqrt()


def visible_pairs(seq, hp, window_blocks):
    """(S, S): True where a query sees a key."""
    pos = torch.arange(len(seq))
    block = pos // 128
    docs = (seq == hp.eot_token).cumsum(0)
    causal = pos[:, None] >= pos
    same_document = docs[:, None] == docs
    in_window = block[:, None] - block < window_blocks
    return causal & same_document & in_window


def reference_attention(params, hp, i, x, ve, mask):
    """x: (S, dim). ve: the value embeddings of this layer, or None."""
    weights = params[f"blocks.{i}.attn.qkv_w"]  # (3, H * D, dim)
    lambdas = params[f"blocks.{i}.attn.lambdas"]
    heads = (1, len(x), hp.num_heads, hp.head_dim)
    q = (x @ weights[0].T).view(heads)
    k = (x @ weights[1].T).view(heads)
    v = lambdas[0] * (x @ weights[2].T).view(heads)
    if ve is not None:
        v = v + lambdas[1] * ve.view(heads)
    q = rotate(rms_norm(q), hp.head_dim)
    k = rotate(rms_norm(k), hp.head_dim)
    y = dense_attention(q, k, v, mask)
    if hp.xsa:
        dot = torch.einsum("bshd,bshd->bsh", y, v)
        square = torch.einsum("bshd,bshd->bsh", v, v)
        along = dot / square
        part = params[f"blocks.{i}.attn.xsa_weights"].tanh()
        y = y - torch.einsum("h,bsh,bshd->bshd", part, along, v)
    return y.reshape(len(x), -1) @ params[f"blocks.{i}.attn.c_proj.weight"].T


def reference_smear(params, embeddings):
    """x[t] + scale * sigmoid(gate @ x[t, :12]) * x[t - 1], token by token: (S, dim)."""
    smeared = [embeddings[0]]
    for t in range(1, len(embeddings)):
        x = embeddings[t]
        gate = torch.sigmoid(params["smear_gate"] @ x[:12])
        factor = params["smear_scale"] * gate
        smeared.append(x + factor * embeddings[t - 1])
    return torch.stack(smeared)


def reference_mlp(params, hp, i, x):
    h = x @ params[f"blocks.{i}.mlp.c_fc.weight"].T
    h = torch.where(h > 0, h, hp.relu_slope * h).square()
    return h @ params[f"blocks.{i}.mlp.c_proj.weight"].T


def reference_logits(params, hp, seq, window_blocks, long_layers, free_layers):
    """The forward pass of one sequence (S,), in the dtype of the parameters."""
    long_mask = visible_pairs(seq, hp, window_blocks)
    short_mask = visible_pairs(seq, hp, max(1, window_blocks // 2))
    n = hp.num_layers
    num_skips = n // 2
    # With an odd number of layers, the middle one has no skip connection
    first_decoder = n - num_skips
    ve = {}  # by layer: fineweb's layers 0 and 9 use table 0, 1 and 10 table 1, 2 and 11 table 2
    for i in range(hp.num_value_embeds):
        ve[i] = params[f"value_embeds.{i}.weight"][seq]
        ve[n - hp.num_value_embeds + i] = ve[i]
    x0 = params["embed.weight"][seq]  # (S, dim)
    if hp.smear:
        x0 = reference_smear(params, x0)
    x0 = rms_norm(x0)
    x = x0
    skips = []
    for i in range(n):
        if i >= first_decoder:
            x = x + params["skip_weights"][i - first_decoder] * skips.pop()
        lambdas = params[f"blocks.{i}.lambdas"]
        x = lambdas[0] * x + lambdas[1] * x0
        if i not in free_layers:
            mask = long_mask if i in long_layers else short_mask
            x = x + reference_attention(params, hp, i, rms_norm(x), ve.get(i), mask)
        x = x + reference_mlp(params, hp, i, rms_norm(x))
        if i < num_skips:
            skips.append(x)
    logits = rms_norm(x) @ params["lm_head.weight"].T
    return 30 * torch.sigmoid(logits / (7.5 * math.sqrt(hp.model_dim)))


def reference_losses(params, hp, inputs, targets, window_blocks, long_layers, free_layers):
    """The loss of each token, sequence by sequence."""
    losses = []
    for seq, target in zip(inputs.long(), targets):
        logits = reference_logits(params, hp, seq, window_blocks, long_layers, free_layers)
        losses.append(F.cross_entropy(logits, target, reduction="none"))
    return torch.cat(losses)


def double_parameters(model):
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def assert_same_gradients(model, exact):
    """Compares with `exact`: the parameters of the reference, with their gradients."""
    for name, p in model.named_parameters():
        want = exact[name].grad
        if want is None or not want.any():  # the value embeddings of a layer without them
            assert p.grad is None or not p.grad.any(), name
            continue
        error = (p.grad.double() - want).norm() / want.norm()
        assert error < 1e-3, f"{name}: {error}"


def test_a_single_layer():
    """One layer has no skip connections and no value embeddings."""
    hp = replace(
        TINY,
        num_layers=1,
        attn_free_layers=(),
        num_value_embeds=0,
        long_window_layers=(0,),
    )
    model = randomize(build(hp)).train()
    inputs, targets = batch(hp, 2, 256)
    exact = double_parameters(model)
    want = reference_losses(exact, hp, inputs, targets, 2, (0,), ()).sum()
    loss = model(inputs, targets, blocks(2))
    assert loss.item() == pytest.approx(want.item(), rel=2e-6)
    want.backward()
    loss.backward()
    assert_same_gradients(model, exact)


@pytest.mark.parametrize("num_seqs,window", [(1, 1), (3, 2), (1, 4)])
def test_loss_and_gradients_equal_the_plain_model(num_seqs, window):
    model = randomize(build(TINY)).train()
    inputs, targets = batch(TINY, num_seqs, 512)
    exact = double_parameters(model)
    losses = reference_losses(exact, TINY, inputs, targets, window, (0, 4, 7, 11), (7,))
    losses.sum().backward()
    loss = model(inputs, targets, blocks(window))
    assert loss.item() == pytest.approx(losses.sum().item(), rel=2e-6)
    loss.backward()
    assert_same_gradients(model, exact)
    model.eval()
    want = losses.mean().item()
    # Evaluation computes the logits in slices. The last one can be shorter.
    for model.val_slice in (GPT.val_slice, 512, 200):
        with torch.no_grad():
            loss = model(inputs, targets, blocks(window))
        assert loss.item() == pytest.approx(want, rel=2e-6)


IDEAS = dict(smear=True, xsa=True, relu_slope=0.5)


@pytest.mark.parametrize("name", [*IDEAS, "all"])
def test_each_idea_equals_the_plain_model(name):
    """Options at other values than fineweb's, one by one and all together."""
    changes = IDEAS if name == "all" else {name: IDEAS[name]}
    hp = replace(TINY, **changes)
    model = randomize(build(hp)).train()
    inputs, targets = batch(hp, 3, 256)
    exact = double_parameters(model)
    layers = (hp.long_window_layers, hp.attn_free_layers)
    losses = reference_losses(exact, hp, inputs, targets, 2, *layers)
    want = losses.sum()
    want.backward()
    loss = model(inputs, targets, blocks(2))
    assert loss.item() == pytest.approx(want.item(), rel=2e-6)
    loss.backward()
    assert_same_gradients(model, exact)
    # without the change, tokens have other losses
    plain = reference_losses(exact, TINY, inputs, targets, 2, *layers)
    largest = (plain - losses).abs().max()
    assert largest > 1e-3


def test_mini_equals_the_plain_model():
    """mini has another depth, other value embeddings and other windows."""
    hp = TRACKS["mini"]
    model = randomize(build(hp)).eval()
    inputs, targets = batch(hp, 2, 256)
    exact = double_parameters(model)
    layers = (hp.long_window_layers, hp.attn_free_layers)
    for window in (1, 2):
        with torch.no_grad():
            want = reference_losses(exact, hp, inputs, targets, window, *layers).mean()
            loss = model(inputs, targets, blocks(window))
        assert loss.item() == pytest.approx(want.item(), rel=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_loss_is_the_log_of_the_padded_vocabulary(dtype):
    model = build(TINY, dtype)
    inputs, targets = batch(TINY, 1, 256)
    model.eval()
    with torch.no_grad():
        mean = model(inputs, targets, blocks(1)).item()
    assert mean == pytest.approx(math.log(320), abs=1e-5)
    model.train()
    total = model(inputs, targets, blocks(1)).item()
    assert total == pytest.approx(256 * math.log(320), rel=1e-6)


def fineweb_shapes():
    """{name: shape} of the parameters of the official model."""
    dim = 768
    vocab = 50257
    padded = 50304
    layers = 12
    shapes = {"embed.weight": (vocab, dim), "lm_head.weight": (padded, dim), "skip_weights": (6,)}
    for i in range(3):
        shapes[f"value_embeds.{i}.weight"] = (vocab, dim)
    for i in range(layers):
        shapes[f"blocks.{i}.lambdas"] = (2,)
        shapes[f"blocks.{i}.mlp.c_fc.weight"] = (4 * dim, dim)
        shapes[f"blocks.{i}.mlp.c_proj.weight"] = (dim, 4 * dim)
        if i != 7:
            shapes[f"blocks.{i}.attn.qkv_w"] = (3, 6 * 128, dim)
            shapes[f"blocks.{i}.attn.lambdas"] = (2,)
            shapes[f"blocks.{i}.attn.c_proj.weight"] = (dim, 6 * 128)
    return shapes


def test_fineweb_parameters():
    with torch.device("meta"):
        model = build(FINEWEB, torch.bfloat16)
    got = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert got == fineweb_shapes()
    embeds = 4 * 50257 * 768
    head = 50304 * 768
    matrices = 12 * 8 * 768**2 + 11 * 4 * 768**2
    scalars = 6 + 12 * 2 + 11 * 2
    total = sum(p.numel() for p in model.parameters())
    assert total == embeds + head + matrices + scalars
    assert set(model.state_dict()) == set(got)  # tables of the rotary embedding are not saved
    for name, p in model.named_parameters():
        dtype = torch.bfloat16 if "embed" in name else torch.float32
        assert p.dtype == dtype, name


def test_initial_embeddings_in_bf16_are_those_in_float32_rounded():
    """PyTorch 2.11 draws few distinct values in bf16: their standard deviation is 0.993, not 1."""
    exact = dict(build(TRACKS["mini"]).named_parameters())
    rounded = dict(build(TRACKS["mini"], torch.bfloat16).named_parameters())
    for name in ("embed.weight", "value_embeds.0.weight"):
        assert rounded[name].dtype == torch.bfloat16
        assert torch.equal(rounded[name], exact[name].bfloat16())


def test_initial_values():
    model = build(replace(TINY, **IDEAS), torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    assert {"smear_gate", "smear_scale", "blocks.11.attn.xsa_weights"} <= set(names)
    for name, p in model.named_parameters():
        if name == "lm_head.weight" or "c_proj" in name:
            assert not p.any(), f"{name} starts at zero"
        elif "smear" in name or "xsa" in name:
            assert not p.any(), f"{name} starts at zero"
        elif name.endswith("attn.lambdas"):
            assert set(p.tolist()) == {0.5}, name
        elif name.endswith("lambdas"):
            assert p.tolist() == [1.0, 0.0], name
        elif name == "skip_weights":
            assert p.tolist() == [1.0] * 6
        elif "embed" not in name:
            bound = math.sqrt(3) * 0.5 / math.sqrt(64)
            largest = p.abs().max()
            assert 0.95 * bound < largest <= bound, name
            assert p.std().item() == pytest.approx(0.5 / math.sqrt(64), rel=0.05), name
        else:
            assert p.float().std().item() == pytest.approx(1.0, rel=0.05), name


@pytest.mark.parametrize("name", ["fineweb", "all ideas"])
def test_bf16_is_close_to_float32(name):
    torch.manual_seed(1)
    hp = TINY if name == "fineweb" else replace(TINY, **IDEAS)
    exact = randomize(build(hp)).eval()
    half = build(hp, torch.bfloat16).eval()
    half.load_state_dict(exact.state_dict())
    inputs, targets = batch(hp, 2, 256)
    with torch.no_grad():
        want = exact(inputs, targets, blocks(2))
        got = half(inputs, targets, blocks(2))
    assert want.dtype == got.dtype == torch.float32
    assert got.item() == pytest.approx(want.item(), rel=5e-3)


def test_norm_and_casted_linear():
    x = torch.randn(3, 5, 64, dtype=torch.float64) * 7
    want = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(x), want, rtol=1e-6, atol=1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    layer = CastedLinear(64, 32)
    assert layer.weight.dtype == torch.float32
    assert layer.weight.shape == (32, 64)
    assert layer.bias is None
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), x @ layer.weight.double().T, rtol=0.05, atol=0.1)
