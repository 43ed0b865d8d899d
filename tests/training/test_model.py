"""The whole model: shapes, counts, initial loss, and a plain float64 re-implementation of its forward pass."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

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


def batch(hp, num_seqs, length, eot_every=60):
    tokens = torch.randint(0, hp.vocab_size, (num_seqs, length + 1))
    tokens[torch.rand(num_seqs, length + 1) < 1 / eot_every] = hp.eot_token
    return tokens[:, :-1].int(), tokens[:, 1:].long()


def randomize(model):
    """No weight is at a value that hides a wire: not zero, not one, not equal to its neighbour."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.randn_like(p) * 0.3 + 0.5
                if p.ndim < 2 or p.numel() < 64
                else torch.randn_like(p) * 0.5 / math.sqrt(p.shape[-1])
            )
        for table in [model.embed, *model.value_embeds]:
            table.weight.mul_(10)
    return model


def reference_loss(params, hp, inputs, targets, window_blocks, long_layers, free_layers, reduction):
    """The forward pass from the specification, one sequence at a time, in the parameters' own type (float64)."""
    rms = lambda x: x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    n_layers, losses = hp.num_layers, []
    for seq, target in zip(inputs.long(), targets):
        length = len(seq)
        pos = torch.arange(length)
        docs = (seq == hp.eot_token).cumsum(0)
        causal = (pos[:, None] >= pos) & (docs[:, None] == docs)
        distance = pos[:, None] // 128 - pos // 128
        windows = {
            True: causal & (distance < window_blocks),
            False: causal & (distance < max(1, window_blocks // 2)),
        }
        x = params["embed.weight"][seq]  # (S, dim)
        x = x0 = rms(x)
        ve = [params[f"value_embeds.{i}.weight"][seq] for i in range(hp.num_value_embeds)]
        ve = ve + [None] * (n_layers - 2 * len(ve)) + ve
        stack = []
        for i in range(n_layers):
            second_half = (
                n_layers - n_layers // 2
            )  # of an odd number of layers, the middle one stands alone
            if i >= second_half:
                x = x + params["skip_weights"][i - second_half] * stack.pop()
            x = params[f"blocks.{i}.lambdas"][0] * x + params[f"blocks.{i}.lambdas"][1] * x0
            if i not in free_layers:
                w, lam = params[f"blocks.{i}.attn.qkv_w"], params[f"blocks.{i}.attn.lambdas"]
                q, k, v = (rms(x) @ w[j].T for j in range(3))
                q, k, v = (t.view(1, length, hp.num_heads, hp.head_dim) for t in (q, k, v))
                q, k = rotate(rms(q), hp.head_dim), rotate(rms(k), hp.head_dim)
                v = lam[0] * v if ve[i] is None else lam[0] * v + lam[1] * ve[i].view_as(v)
                y = dense_attention(q, k, v, windows[i in long_layers], 0.12).reshape(length, -1)
                x = x + y @ params[f"blocks.{i}.attn.c_proj.weight"].T
            h = (rms(x) @ params[f"blocks.{i}.mlp.c_fc.weight"].T).relu().square()
            x = x + h @ params[f"blocks.{i}.mlp.c_proj.weight"].T
            if i < n_layers // 2:
                stack.append(x)
        logits = rms(x) @ params["lm_head.weight"].T
        logits = 30 * torch.sigmoid(logits / (7.5 * math.sqrt(hp.model_dim)))
        losses.append(F.cross_entropy(logits, target, reduction="none"))
    losses = torch.cat(losses)
    return losses.sum() if reduction == "sum" else losses.mean()


def test_a_single_layer():
    """One layer has no skip connections and no value embeddings."""
    hp = replace(
        TINY, num_layers=1, attn_free_layers=(), num_value_embeds=0, long_window_layers=(0,)
    )
    model = randomize(GPT(hp, dtype=torch.float32)).train()
    inputs, targets = batch(hp, 2, 256)
    exact = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    want = reference_loss(exact, hp, inputs, targets, 2, (0,), (), reduction="sum")
    loss = model(inputs, targets, blocks(2))
    assert loss.item() == pytest.approx(want.item(), rel=2e-6)
    want.backward()
    loss.backward()
    for name, p in model.named_parameters():
        if exact[name].grad is None or not exact[name].grad.any():
            assert not p.grad.any(), name  # the value embeddings' share, in a layer without them
            continue
        assert (p.grad.double() - exact[name].grad).norm() / exact[name].grad.norm() < 1e-3, name


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_loss_and_gradients_equal_the_plain_model(window, num_seqs):
    model = randomize(GPT(TINY, dtype=torch.float32)).train()
    inputs, targets = batch(TINY, num_seqs, 512)
    exact = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    args = (exact, TINY, inputs, targets, window, (0, 4, 7, 11), (7,))
    want = reference_loss(*args, reduction="sum")
    want.backward()
    loss = model(inputs, targets, blocks(window))
    assert loss.item() == pytest.approx(want.item(), rel=2e-6)
    loss.backward()
    for name, p in model.named_parameters():
        if exact[name].grad is None or not exact[name].grad.any():
            assert p.grad is None or not p.grad.any(), name
            continue
        error = (p.grad.double() - exact[name].grad).norm() / exact[name].grad.norm()
        assert error < 1e-3, f"{name}: {error}"
    model.eval()
    want = reference_loss(*args, reduction="mean").item()
    for model.val_slice in (
        GPT.val_slice,
        512,
        200,
    ):  # evaluation takes the head by slices, the last one shorter
        with torch.no_grad():
            assert model(inputs, targets, blocks(window)).item() == pytest.approx(want, rel=2e-6)


def test_mini_equals_the_plain_model():
    """Another depth, other value embeddings, other windows."""
    hp = TRACKS["mini"]
    model = randomize(GPT(hp, dtype=torch.float32)).eval()
    inputs, targets = batch(hp, 2, 256)
    params = {n: p.detach().double() for n, p in model.named_parameters()}
    for window in (1, 2):
        want = reference_loss(
            params, hp, inputs, targets, window, hp.long_window_layers, hp.attn_free_layers, "mean"
        )
        with torch.no_grad():
            assert model(inputs, targets, blocks(window)).item() == pytest.approx(
                want.item(), rel=2e-6
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_loss_is_exactly_the_log_of_the_padded_vocabulary(dtype):
    hp = replace(TINY, vocab_size=50257, eot_token=50256, model_dim=128)
    model = GPT(hp, dtype=dtype)
    inputs, targets = batch(hp, 1, 256)
    model.eval()
    with torch.no_grad():
        mean = model(inputs, targets, blocks(1)).item()
    assert mean == pytest.approx(math.log(50304), abs=1e-5) and f"{mean:.4f}" == "10.8258"
    model.train()
    assert model(inputs, targets, blocks(1)).item() == pytest.approx(
        256 * math.log(50304), rel=1e-6
    )


def test_initial_loss_of_the_byte_track():
    hp = TRACKS["mini"]
    model = GPT(hp, dtype=torch.float32).eval()
    inputs, targets = batch(hp, 2, 256)
    with torch.no_grad():
        assert model(inputs, targets, blocks(1)).item() == pytest.approx(math.log(384), abs=1e-5)


def fineweb_shapes():
    """Every parameter of the official model, from the specification's sizes."""
    dim, vocab, padded, layers = 768, 50257, 50304, 12
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
        model = GPT(FINEWEB)
    got = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert got == fineweb_shapes()
    embeds, head = 4 * 50257 * 768, 50304 * 768
    matrices, scalars = 12 * 8 * 768**2 + 11 * 4 * 768**2, 6 + 12 * 2 + 11 * 2
    assert sum(p.numel() for p in model.parameters()) == embeds + head + matrices + scalars
    assert set(model.state_dict()) == set(got)  # tables of the rotary embedding are not saved
    for name, p in model.named_parameters():
        assert p.dtype == (torch.bfloat16 if "embed" in name else torch.float32), name


def test_initial_values():
    model = GPT(TINY, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        if name == "lm_head.weight" or "c_proj" in name:
            assert not p.any(), f"{name} starts at zero"
        elif name.endswith("attn.lambdas"):
            assert set(p.tolist()) == {0.5}, name
        elif name.endswith("lambdas"):
            assert p.tolist() == [1.0, 0.0], name
        elif name == "skip_weights":
            assert p.tolist() == [1.0] * 6
        elif "embed" not in name:
            bound = math.sqrt(3) * 0.5 / math.sqrt(64)
            assert p.abs().max() <= bound and p.abs().max() > 0.95 * bound, name
            assert p.std().item() == pytest.approx(0.5 / math.sqrt(64), rel=0.05), name
        else:
            assert p.float().std().item() == pytest.approx(1.0, rel=0.05), name


def test_value_embeddings_feed_the_layers_of_the_specification():
    """Layers 0, 1, 2 and 9, 10, 11 hear tables 0, 1, 2: found by which tables change the loss."""
    model = randomize(GPT(TINY, dtype=torch.float32)).eval()
    inputs, targets = batch(TINY, 1, 256)

    def loss():
        with torch.no_grad():
            return model(inputs, targets, blocks(2)).item()

    layers = [0, 1, 2, 9, 10, 11]
    assert {0, 1, 2, 9, 10, 11} <= set(layers)
    with torch.no_grad():
        for i in layers:
            model.blocks[i].attn.lambdas[1] = 0
        silent = loss()
        for i in layers:
            for t, table in enumerate(model.value_embeds):
                model.blocks[i].attn.lambdas[1] = 0.5
                before, kept = loss(), table.weight.clone()
                table.weight.normal_()
                assert (loss() != before) == (i in (t, 9 + t)), f"layer {i}, table {t}"
                model.blocks[i].attn.lambdas[1] = 0
                assert loss() == silent  # nothing else of the model reads the tables
                table.weight.copy_(kept)


def test_sequences_of_one_pass_are_independent():
    model = randomize(GPT(TINY, dtype=torch.float32)).train()
    inputs, targets = batch(TINY, 4, 256)
    together = model(inputs, targets, blocks(2)).item()
    alone = sum(model(inputs[i : i + 1], targets[i : i + 1], blocks(2)).item() for i in range(4))
    assert together == pytest.approx(alone, rel=1e-6)


def test_bf16_is_close_to_float32():
    torch.manual_seed(1)
    exact = randomize(GPT(TINY, dtype=torch.float32)).eval()
    half = GPT(TINY, dtype=torch.bfloat16).eval()
    half.load_state_dict(exact.state_dict())
    inputs, targets = batch(TINY, 2, 256)
    with torch.no_grad():
        a, b = (m(inputs, targets, blocks(2)) for m in (exact, half))
    assert a.dtype == b.dtype == torch.float32
    assert a.item() == pytest.approx(b.item(), rel=5e-3)


def test_norm_and_casted_linear():
    x = torch.randn(3, 5, 64, dtype=torch.float64) * 7
    torch.testing.assert_close(
        norm(x), x / x.square().mean(-1, keepdim=True).sqrt(), rtol=1e-6, atol=1e-6
    )
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    layer = CastedLinear(64, 32)
    assert (
        layer.weight.dtype == torch.float32
        and layer.weight.shape == (32, 64)
        and layer.bias is None
    )
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), x @ layer.weight.double().T, rtol=0.05, atol=0.1)
