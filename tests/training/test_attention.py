"""Compares rotary embedding, block masks and attention with dense definitions in float64."""

import math

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from train_gpt import Rotary, attention, document_ids, flex_block_mask, portable_mask

EOT = 9


def blocks(n):
    return torch.tensor(n, dtype=torch.int32)


def random_input(num_seqs, length, eot_every, seed):
    """Tokens (B, S) with an end-of-text every `eot_every` tokens on average."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, EOT, (num_seqs, length), generator=g, dtype=torch.int32)
    is_end = torch.rand(num_seqs, length, generator=g) < 1 / eot_every
    tokens[is_end] = EOT
    return tokens


def dense_mask(tokens, window_blocks):
    """The definition of the mask, pair by pair.

    Returns (T, T), True where the query sees the key. T counts the tokens of all sequences.
    """
    num_seqs, length = tokens.shape
    pos = torch.arange(num_seqs * length)
    seq = pos // length
    block = pos // 128
    doc = (tokens == EOT).flatten().cumsum(0)  # ends of text up to and including the position
    q = pos[:, None]
    k = pos[None, :]
    causal = k <= q
    same_document = doc[q] == doc[k]
    same_sequence = seq[q] == seq[k]
    in_window = block[q] - block[k] < window_blocks
    return causal & same_document & same_sequence & in_window


def dense_attention(q, k, v, mask):
    """softmax(0.12 q k^T + mask) v, in the dtype of q: q, k, v (B, S, H, D) and a mask (T, T)."""
    queries, keys, values = (t.flatten(0, 1).transpose(0, 1) for t in (q, k, v))  # (H, T, D)
    scores = 0.12 * queries @ keys.mT
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return (weights @ values).transpose(0, 1).reshape(q.shape)


def qkv(num_seqs, length, heads, dim, seed):
    """Three tensors (B, S, H, D)."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(num_seqs, length, heads, dim, generator=g) for _ in range(3)]


def make_mask(tokens, window, span=None):
    docs = document_ids(tokens, EOT)
    return portable_mask(docs, (1 - blocks(window)) * 128, span or window)


def assert_close(got, want, rtol, atol):
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


# (sequences, tokens in each, mean document length, window in blocks)
#
# There are sequences of one block, windows longer than the sequence, and documents that are shorter
# than a block or longer than the sequence.
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


@pytest.mark.parametrize("case", CASES)
def test_document_ids(case):
    num_seqs, length, every, _ = case
    tokens = random_input(num_seqs, length, every, seed=1)
    tokens[0, -1] = EOT  # right before the start of a sequence
    docs = document_ids(tokens, EOT)
    assert docs.shape == (num_seqs * length,)
    starts = tokens == EOT
    starts[:, 0] = True
    step = torch.diff(docs.long())
    assert (step >= 0).all()
    assert torch.equal(step > 0, starts.flatten()[1:])


def tiles(num_blocks, indices):
    """The (query positions, key positions) of all blocks in a list, (128,) each.

    No block may be in the list twice.
    """
    counts = num_blocks.flatten().tolist()
    rows = indices.flatten(0, -3)[0]
    found = []
    for q_block, count in enumerate(counts):
        k_blocks = rows[q_block, :count].tolist()
        assert len(set(k_blocks)) == len(k_blocks)
        q = torch.arange(128) + 128 * q_block
        for k_block in k_blocks:
            k = torch.arange(128) + 128 * k_block
            found.append((q, k))
    return found


def mask_of_tile(mask_mod, q, k):
    """The values of the mask function, (128, 128)."""
    zero = torch.tensor(0)

    def row(i):
        return torch.vmap(lambda j: mask_mod(zero, zero, i, j))(k)

    return torch.vmap(row)(q)


def read_block_mask(bm, total):
    """The (T, T) mask that a BlockMask describes."""
    got = torch.zeros(total, total, dtype=torch.bool)
    for q, k in tiles(bm.kv_num_blocks, bm.kv_indices):  # the mask function decides
        got[q[:, None], k] = mask_of_tile(bm.mask_mod, q, k)
    for q, k in tiles(bm.full_kv_num_blocks, bm.full_kv_indices):  # all pairs are visible
        assert not got[q[:, None], k].any(), "a block is both partial and full"
        got[q[:, None], k] = True
    return got


def flex_case(case):
    """The (T, T) mask by the definition, and our BlockMask."""
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=2)
    dense = dense_mask(tokens, window)
    docs = document_ids(tokens, EOT)
    return dense, flex_block_mask(docs, blocks(window))


@pytest.mark.parametrize("case", CASES)
def test_flex_block_mask(case):
    want, bm = flex_case(case)
    total = len(want)
    n = total // 128
    assert tuple(bm.BLOCK_SIZE) == (128, 128)
    assert bm.kv_num_blocks.numel() == bm.full_kv_num_blocks.numel() == n
    assert torch.equal(read_block_mask(bm, total), want)
    # Blocks that are entirely visible must be full blocks, which take the fast path
    tiled = want.view(n, 128, n, 128).transpose(1, 2)
    entirely = tiled.flatten(2).all(-1)
    assert bm.full_kv_num_blocks.sum() == entirely.sum()
    for indices in (bm.kv_indices, bm.q_indices, bm.full_kv_indices, bm.full_q_indices):
        assert indices.min() >= 0
        assert indices.max() < n


@pytest.mark.parametrize("case", CASES)
def test_flex_block_mask_for_backward(case):
    """PyTorch must make the same lists of queries from our lists of keys.

    All lists are contiguous, because FlexAttention's kernels ignore the strides of a row. With
    those of a transposed matrix, gradients of k and v were off by up to 18% on an H200.
    """
    _, bm = flex_case(case)
    theirs = BlockMask.from_kv_blocks(
        bm.kv_num_blocks,
        bm.kv_indices,
        bm.full_kv_num_blocks,
        bm.full_kv_indices,
    )
    for kind in ("q", "full_q"):
        counts = getattr(bm, f"{kind}_num_blocks")
        their_counts = getattr(theirs, f"{kind}_num_blocks")
        assert torch.equal(counts, their_counts)
        order = getattr(bm, f"{kind}_indices")
        their_order = getattr(theirs, f"{kind}_indices")
        assert order.dtype == torch.int32
        for k, count in enumerate(counts.flatten().tolist()):
            row = order[0, 0, k]
            their_row = their_order[0, 0, k]
            assert torch.equal(row[:count], their_row[:count])
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert getattr(bm, f"{kind}_num_blocks").is_contiguous()
        assert getattr(bm, f"{kind}_indices").is_contiguous()


def test_flex_block_mask_needs_no_sort():
    """With sorts of 384 blocks, Triton took 300 s to compile attention's masks on two cores."""

    def query_blocks(docs, window):
        return flex_block_mask(docs, window).q_indices

    docs = document_ids(random_input(1, 1024, 100, seed=0), EOT)
    graph = make_fx(query_blocks)(docs, blocks(3)).graph  # all operations that run
    names = {str(node.target) for node in graph.nodes}  # such as aten.cumsum.default
    assert any("cumsum" in name for name in names)
    assert not any("sort" in name or "topk" in name for name in names)


@pytest.mark.parametrize("extra_span", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_portable_mask(case, extra_span):
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=3)
    total = num_seqs * length
    span = window + extra_span
    mask = make_mask(tokens, window, span)
    num_blocks = total // 128
    assert mask.shape == (num_blocks, 1, 128, span * 128)
    assert mask.dtype == torch.bool
    got = torch.zeros(total, total, dtype=torch.bool)
    for b in range(num_blocks):
        first_key = (b - span + 1) * 128
        key = first_key + torch.arange(span * 128)
        inside = (key >= 0) & (key < total)
        visible = mask[b, 0]
        outside = visible[:, ~inside]
        assert not outside.any()
        first = b * 128
        rows = slice(first, first + 128)
        got[rows, key[inside]] = visible[:, inside]
    assert torch.equal(got, dense_mask(tokens, window))


@pytest.mark.parametrize("case", CASES)
def test_portable_attention_forward_and_backward(case):
    num_seqs, length, every, window = case
    tokens = random_input(num_seqs, length, every, seed=4)
    inputs = [x.requires_grad_() for x in qkv(num_seqs, length, 2, 16, seed=5)]
    span = window + num_seqs * length % 3
    mask = make_mask(tokens, window, span)
    out = attention(*inputs, mask)
    assert out.shape == inputs[0].shape
    assert out.dtype == inputs[0].dtype
    exact = [x.detach().double() for x in inputs]
    for x in exact:
        x.requires_grad_()
    dense = dense_mask(tokens, window)
    want = dense_attention(*exact, dense)
    assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape)
    out.backward(grad)
    want.backward(grad.double())
    for x, e in zip(inputs, exact):
        assert_close(x.grad.double(), e.grad, rtol=1e-4, atol=2e-5)


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, (tuple, list)) else [out]
        for t in outputs:
            if torch.is_tensor(t):
                self.numel = max(self.numel, t.numel())
        return out


def test_portable_attention_is_linear_in_length():
    flops = []
    for total in (2048, 4096):
        tokens = random_input(1, total, 500, seed=10)
        inputs = [x.requires_grad_() for x in qkv(1, total, 1, 16, seed=11)]
        counter = FlopCounterMode(display=False)
        # The counter doesn't know the fused attention for CPUs
        with Largest() as largest, counter, sdpa_kernel(SDPBackend.MATH):
            mask = make_mask(tokens, 2)
            out = attention(*inputs, mask)
            out.sum().backward()
        assert largest.numel <= 2 * total * 2 * 128
        assert largest.numel < total * total
        flops.append(counter.get_total_flops())
    assert flops[0] > 0
    assert flops[1] == 2 * flops[0]


@torch._dynamo.config.patch(disable=False)
def test_compiled_flex_attention_with_our_block_mask():
    """Runs the code for CUDA on the CPU, forward only. One compiled graph serves all windows."""
    graphs = []

    def counted(graph, example_inputs):
        graphs.append(graph)
        return compile_fx(graph, example_inputs)

    @torch.compile(dynamic=False, backend=counted)
    def masked(q, k, v, docs, window):
        return attention(q, k, v, flex_block_mask(docs, window))

    tokens = random_input(2, 512, 150, seed=12)
    docs = document_ids(tokens, EOT)
    q, k, v = qkv(2, 512, 2, 32, seed=13)
    with torch.no_grad():
        for window in (1, 2, 5):
            dense = dense_mask(tokens, window)
            want = dense_attention(q.double(), k.double(), v.double(), dense)
            got = masked(q, k, v, docs, blocks(window))
            assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


def rotate(x, head_dim):
    """Rotary embedding in float64, with complex numbers.

    The pair (x_i, x_{i + D/2}) is rotated by -position * frequency.
    """
    exponents = torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
    rotated = (1 / 1024) ** exponents
    not_rotated = torch.zeros_like(rotated)
    freq = torch.cat([rotated, not_rotated])
    pos = torch.arange(x.shape[1], dtype=torch.float64)
    theta = pos[:, None] * freq
    x1, x2 = x.double().chunk(2, dim=-1)
    turn = torch.exp(-1j * theta)
    y = torch.complex(x1, x2) * turn[None, :, None]
    parts = [y.real, y.imag]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("head_dim,length", [(128, 300), (64, 1), (32, 2048)])
def test_rotary(head_dim, length):
    rotary = Rotary(head_dim, 2048)
    x = torch.randn(2, length, 3, head_dim)
    y = rotary(x)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    want = rotate(x, head_dim)
    atol = 2e-3 * length / 2048 + 1e-6
    assert_close(y.double(), want, rtol=0, atol=atol)
    assert torch.equal(y[:, 0], x[:, 0])  # position 0 is not rotated
    quarter = head_dim // 4
    first_half = range(quarter, 2 * quarter)
    second_half = range(3 * quarter, head_dim)
    still = [*first_half, *second_half]  # half of the pairs are never rotated
    assert torch.equal(y[..., still], x[..., still])
    assert rotary.state_dict() == {}
    assert list(rotary.parameters()) == []
    assert rotary(x.bfloat16()).dtype == torch.bfloat16
