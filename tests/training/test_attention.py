"""Rotary embedding, block masks and attention against dense float64 definitions."""

import math

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from train_gpt import BLOCK_SIZE, Rotary, attention, document_ids, flex_block_mask, portable_mask

EOT = 9


def blocks(n):
    return torch.tensor(n, dtype=torch.int32)


def random_input(num_seqs, length, eot_every, seed):
    """Tokens (B, S) with an end-of-text every `eot_every` tokens on average."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, EOT, (num_seqs, length), generator=g, dtype=torch.int32)
    tokens[torch.rand(num_seqs, length, generator=g) < 1 / eot_every] = EOT
    return tokens


def dense_mask(tokens, window_blocks):
    """(T, T) by the definition, pair by pair over the concatenated sequences: True where the query sees the key."""
    num_seqs, length = tokens.shape
    pos = torch.arange(num_seqs * length)
    seq = pos // length
    eots = (tokens == EOT).flatten().cumsum(0)  # up to and including the position
    q, k = pos[:, None], pos[None, :]
    return (
        (k <= q) & (eots[q] == eots[k]) & (seq[q] == seq[k]) & (q // 128 - k // 128 < window_blocks)
    )


def dense_attention(q, k, v, mask, scale):
    """softmax(q k^T scale + mask) v for (1, T, H, D) tensors, in their own type."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def qkv(length, heads, dim, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, heads, dim, generator=g).to(dtype) for _ in range(3)]


# (sequences, tokens each, mean document length, window in blocks): one block, windows beyond the sequence,
# documents shorter than a block and longer than the sequence, sequences shorter than the window.
CASES = [
    (1, 128, 40, 1),
    (1, 256, 10**9, 1),
    (1, 512, 60, 2),
    (1, 640, 300, 3),
    (1, 384, 1.5, 5),
    (1, 1024, 10**9, 4),
    (2, 128, 50, 2),
    (3, 256, 10**9, 2),
    (4, 128, 200, 3),
    (2, 384, 130, 1),
    (1, 512, 200, 9),
    (5, 256, 7, 4),
]


def test_block_size():
    assert BLOCK_SIZE == 128


@pytest.mark.parametrize("case", CASES)
def test_document_ids(case):
    num_seqs, length, every, _ = case
    tokens = random_input(num_seqs, length, every, seed=1)
    tokens[0, -1] = EOT  # next to a sequence's start
    docs = document_ids(tokens, EOT)
    assert docs.shape == (num_seqs * length,)
    starts = tokens == EOT
    starts[:, 0] = True
    step = torch.diff(docs.long())
    assert ((step > 0) == starts.flatten()[1:]).all() and (step >= 0).all()


@pytest.mark.parametrize("case", CASES)
def test_flex_block_mask(case):
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=2)
    total = num_seqs * length
    want = dense_mask(tokens, window)
    bm = flex_block_mask(document_ids(tokens, EOT), blocks(window))
    assert tuple(bm.BLOCK_SIZE) == (128, 128)
    got = torch.zeros(total, total, dtype=torch.bool)
    pos = torch.arange(total)
    n = total // 128

    def tiles(num, indices):
        assert num.numel() == n
        for qb in range(n):
            chosen = indices.flatten(0, -3)[0, qb, : int(num.flatten()[qb])].tolist()
            assert len(set(chosen)) == len(chosen)
            yield from ((pos[qb * 128 :][:128], pos[kb * 128 :][:128]) for kb in chosen)

    zero = torch.tensor(0)
    for q, k in tiles(bm.kv_num_blocks, bm.kv_indices):  # partial blocks: the mask function decides
        assert not got[q[0], k].any()
        tile = torch.vmap(lambda i: torch.vmap(lambda j: bm.mask_mod(zero, zero, i, j))(k))(q)
        got[q[:, None], k] = tile
    for q, k in tiles(
        bm.full_kv_num_blocks, bm.full_kv_indices
    ):  # full blocks: no function is asked
        assert not got[q[:, None], k].any(), "a block is both partial and full"
        got[q[:, None], k] = True
    assert torch.equal(got, want)
    # A block that is seen entirely is a full one: the cheap path is really taken.
    tiled = want.view(n, 128, n, 128).transpose(1, 2).flatten(2).all(-1)
    assert int(bm.full_kv_num_blocks.sum()) == int(tiled.sum())
    # The lists of queries, for the backward pass, are those that the library makes of the lists of keys.
    theirs = BlockMask.from_kv_blocks(
        bm.kv_num_blocks, bm.kv_indices, bm.full_kv_num_blocks, bm.full_kv_indices
    )
    for kind in ("q", "full_q"):
        counts, order = getattr(bm, f"{kind}_num_blocks"), getattr(bm, f"{kind}_indices")
        assert (
            torch.equal(counts, getattr(theirs, f"{kind}_num_blocks"))
            and order.dtype == torch.int32
        )
        for k, count in enumerate(counts.flatten().tolist()):
            assert torch.equal(
                order[0, 0, k, :count], getattr(theirs, f"{kind}_indices")[0, 0, k, :count]
            )
    assert all(
        0 <= int(x.min()) and int(x.max()) < n
        for x in (bm.kv_indices, bm.q_indices, bm.full_kv_indices, bm.full_q_indices)
    ), "an index beyond the blocks"


@pytest.mark.parametrize("extra_span", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_portable_mask(case, extra_span):
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=3)
    total, span = num_seqs * length, window + extra_span
    mask = portable_mask(document_ids(tokens, EOT), blocks(window), span)
    assert mask.shape == (total // 128, 1, 128, span * 128) and mask.dtype == torch.bool
    got = torch.zeros(total, total, dtype=torch.bool)
    for b in range(total // 128):
        key = (b - span + 1) * 128 + torch.arange(span * 128)
        inside = (key >= 0) & (key < total)
        assert not mask[b, 0][:, ~inside].any()
        got[b * 128 : (b + 1) * 128, key[inside]] = mask[b, 0][:, inside]
    assert torch.equal(got, dense_mask(tokens, window))


@pytest.mark.parametrize("case", CASES)
def test_portable_attention_forward_and_backward(case):
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=4)
    total = num_seqs * length
    inputs = [x.requires_grad_() for x in qkv(total, 2, 16, seed=5)]
    mask = portable_mask(document_ids(tokens, EOT), blocks(window), window + total % 3)
    out = attention(*inputs, mask, 0.12)
    assert out.shape == inputs[0].shape and out.dtype == inputs[0].dtype
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = dense_attention(*exact, dense_mask(tokens, window), 0.12)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape)
    out.backward(grad), want.backward(grad.double())
    for x, e in zip(inputs, exact):
        torch.testing.assert_close(x.grad.double(), e.grad, rtol=1e-4, atol=2e-5)


def test_a_large_scale_is_applied_before_the_softmax():
    tokens = random_input(1, 256, 50, seed=6)
    q, k, v = qkv(256, 1, 8, seed=7)
    mask = portable_mask(document_ids(tokens, EOT), blocks(2), 2)
    want = dense_attention(q.double(), k.double(), v.double(), dense_mask(tokens, 2), 3.0)
    torch.testing.assert_close(attention(q, k, v, mask, 3.0).double(), want, rtol=1e-4, atol=1e-4)


def test_sequences_in_one_pass_do_not_see_each_other():
    tokens = random_input(4, 256, 80, seed=8)
    q, k, v = qkv(1024, 2, 16, seed=9)
    together = attention(q, k, v, portable_mask(document_ids(tokens, EOT), blocks(2), 3), 0.12)
    for i in range(4):
        part = slice(256 * i, 256 * (i + 1))
        alone = attention(
            q[:, part],
            k[:, part],
            v[:, part],
            portable_mask(document_ids(tokens[i : i + 1], EOT), blocks(2), 3),
            0.12,
        )
        torch.testing.assert_close(together[:, part], alone, rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if torch.is_tensor(t):
                self.numel = max(self.numel, t.numel())
        return out


def test_portable_attention_is_linear_in_length():
    flops = []
    for total in (2048, 4096):
        tokens = random_input(1, total, 500, seed=10)
        inputs = [x.requires_grad_() for x in qkv(total, 1, 16, seed=11)]
        # the counter knows the flops of matmuls, not of the CPU's fused attention
        with (
            Largest() as largest,
            FlopCounterMode(display=False) as counter,
            sdpa_kernel(SDPBackend.MATH),
        ):
            mask = portable_mask(document_ids(tokens, EOT), blocks(2), 2)
            attention(*inputs, mask, 0.12).sum().backward()
        assert largest.numel <= 2 * total * 2 * 128 < total * total
        flops.append(counter.get_total_flops())
    assert flops[0] > 0 and flops[1] == 2 * flops[0]


@torch._dynamo.config.patch(disable=False)  # FlexAttention needs the tracer even in eager code
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_portable_equals_flex_attention_forward():
    """FlexAttention's own forward, its block mask built by PyTorch from the definition."""
    for seed, (num_seqs, length, every, window) in enumerate(CASES[2:5] + CASES[7:9]):
        tokens = random_input(num_seqs, length, every, seed)
        total = num_seqs * length
        dense = dense_mask(tokens, window)
        bm = create_block_mask(
            lambda b, h, q, k: dense[q, k], None, None, total, total, device="cpu"
        )
        q, k, v = qkv(total, 2, 32, seed)
        want = flex_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), block_mask=bm, scale=0.12
        ).transpose(1, 2)
        got = attention(
            q, k, v, portable_mask(document_ids(tokens, EOT), blocks(window), window), 0.12
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@torch._dynamo.config.patch(disable=False)
def test_compiled_flex_attention_with_our_block_mask():
    """The CUDA path's code on the CPU, forward only: one compiled graph serves every window."""
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return compile_fx(graph, example_inputs)

    @torch.compile(dynamic=False, backend=counted)
    def masked(q, k, v, docs, window):
        return attention(q, k, v, flex_block_mask(docs, window), 0.12)

    tokens = random_input(2, 512, 150, seed=12)
    q, k, v = qkv(1024, 2, 32, seed=13)
    with torch.no_grad():
        for window in (1, 2, 5):
            want = dense_attention(
                q.double(), k.double(), v.double(), dense_mask(tokens, window), 0.12
            )
            got = masked(q, k, v, document_ids(tokens, EOT), blocks(window))
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


def rotate(x, head_dim):
    """RoPE by complex numbers in float64: pair (x_i, x_{i + D/2}) turns by minus position * frequency."""
    freq = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
    freq = torch.cat([freq, torch.zeros(head_dim // 4, dtype=torch.float64)])
    theta = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * freq
    x1, x2 = x.double().chunk(2, dim=-1)
    y = torch.complex(x1, x2) * torch.exp(-1j * theta)[None, :, None]
    return torch.cat([y.real, y.imag], dim=-1)


@pytest.mark.parametrize("head_dim,length", [(128, 300), (64, 1), (32, 2048)])
def test_rotary(head_dim, length):
    rotary = Rotary(head_dim, 2048)
    x = torch.randn(2, length, 3, head_dim)
    y = rotary(x)
    assert y.dtype == x.dtype and y.shape == x.shape
    torch.testing.assert_close(
        y.double(), rotate(x, head_dim), rtol=0, atol=2e-3 * length / 2048 + 1e-6
    )
    assert torch.equal(y[:, 0], x[:, 0])  # position 0 is not turned
    still = list(range(head_dim // 4, head_dim // 2)) + list(range(3 * head_dim // 4, head_dim))
    assert torch.equal(y[..., still], x[..., still])  # half of the pairs never are
    assert rotary.state_dict() == {} and list(rotary.parameters()) == []
    assert rotary(x.bfloat16()).dtype == torch.bfloat16


def test_rotary_scores_depend_on_distance_only():
    rotary = Rotary(64, 512)
    q, k = torch.randn(64).expand(1, 512, 1, 64), torch.randn(64).expand(1, 512, 1, 64)
    scores = rotary(q)[0, :, 0].double() @ rotary(k)[0, :, 0].double().T
    for distance in (0, 1, 100):
        diagonal = scores.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-3
    assert (scores[0, 0] - scores[0, 100]).abs() > 1e-2
