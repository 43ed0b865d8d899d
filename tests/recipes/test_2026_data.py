"""
Packing of documents, beside a plain loop over lists; the validation's slices; masks pair by pair.
"""

from dataclasses import replace

import pytest
import torch

import january2026
import reference
from test_attention import read_block_mask
from test_2026_model import EOT, tiny
from util import write_shard
from variants import variant

WORLD = january2026.World


def documents(lengths, seed):
    """Tokens of documents with these lengths, each beginning with end-of-text."""
    g = torch.Generator().manual_seed(seed)
    tokens = []
    for length in lengths:
        rest = torch.randint(0, EOT, (length - 1,), generator=g)
        tokens += [EOT, *rest.tolist()]
    return tokens


def random_documents(total, mean, seed):
    g = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < total:
        draw = torch.empty(1).exponential_(1 / mean, generator=g)
        lengths.append(1 + int(draw))
    return documents(lengths, seed)


def write_shards(folder, shards):
    for i, tokens in enumerate(shards):
        write_shard(folder / f"docs_train_{i:06d}.bin", tokens)


# Shards with short and long documents, tokens before the first one, a last document that ends a step
# exactly, documents that fill no step, no document at all, and no tokens
SHARDS = [
    [1, 2, 3, *random_documents(9000, 30, seed=1)],
    random_documents(7000, 200, seed=2),
    documents([129] * 8, seed=3),
    documents([130] * 7, seed=4),
    [5] * 4000,
    [],
    documents([50] * 20 + [129] * 30 + [1] * 3 + [600] * 40, seed=5),
    random_documents(20000, 60, seed=6),
    documents([100] * 64, seed=9),
]


def packing_hp(m, folder, **changes):
    hp = tiny(m, train_files=str(folder / "docs_train_*.bin"), seq_lens=(128, 256, 384), max_document=100)
    return replace(hp, num_iterations=20, extension_frac=0.1, **changes)


def check_packing(m, folder, world_size=1):
    """All steps until the shards are used up, on all ranks."""
    hp = packing_hp(m, folder)

    def seq_lens(step):
        return 128 if step < 6 else 256 if step < 12 else 384

    want = list(reference.packed_steps(SHARDS, EOT, seq_lens, 100))
    assert len(want) > 13  # so that all lengths occur
    local = 8 // world_size
    for rank in range(world_size):
        world = WORLD(rank, world_size, torch.device("cpu"))
        got = list(m.training_batches(hp, world))
        assert len(got) == len(want)
        for (inputs, targets), sequences in zip(got, want):
            mine = torch.tensor(sequences[rank * local : (rank + 1) * local])
            assert inputs.dtype == torch.int32
            assert targets.dtype == torch.int64
            assert torch.equal(inputs.long(), mine[:, :-1])
            assert torch.equal(targets, mine[:, 1:])
            assert (inputs[:, 0] == EOT).all()
            assert inputs.is_contiguous()


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_packing(tmp_path, world_size):
    write_shards(tmp_path, SHARDS)
    check_packing(january2026, tmp_path, world_size)


@pytest.mark.parametrize(
    "old,new",
    [
        ("position + hp.max_document, position + count)", "position + count)"),
        ("stop = min(document_end, ", "stop = min("),
        ("        if hp.skip_rest:", "        if not pieces:"),
        ("count = get_seq_len(step, hp) + 1", "count = get_seq_len(step, hp) + 2"),
        ("if None not in sequences:\n                yield sequences", "if True:\n                yield [s or sequences[0] for s in sequences]"),
        ("bisect.bisect_right(begins, position)", "bisect.bisect_right(begins, position + 9)"),
        ("                step += 1\n\n\ndef check_training", "            step += 1\n\n\ndef check_training"),
        ("return tokens, [*begins, len(tokens)]", "return tokens, [*begins, len(tokens) - 1]"),
    ],
)
def test_control_of_packing(tmp_path, old, new):
    write_shards(tmp_path, SHARDS)
    with pytest.raises((AssertionError, IndexError, TypeError, ValueError)):
        check_packing(variant((old, new)), tmp_path)


def test_resuming_goes_on_with_the_same_batches(tmp_path):
    write_shards(tmp_path, SHARDS)
    hp = packing_hp(january2026, tmp_path)
    world = WORLD(0, 1, torch.device("cpu"))
    whole = list(january2026.training_batches(hp, world))
    for first in (1, 7, 13):
        rest = list(january2026.training_batches(hp, world, first))
        assert len(rest) == len(whole) - first
        for (a, _), (b, _) in zip(rest, whole[first:]):
            assert torch.equal(a, b)


def test_mini_reads_on_within_documents(tmp_path):
    """Without skip_rest, sequences follow each other."""
    write_shards(tmp_path, SHARDS[:2])
    hp = packing_hp(january2026, tmp_path, skip_rest=False)
    world = WORLD(0, 1, torch.device("cpu"))
    position = 0
    shard = 0
    for inputs, targets in january2026.training_batches(hp, world):
        count = inputs.numel() + 8
        if position + count > len(SHARDS[shard]):
            shard += 1
            position = 0
        tokens = torch.tensor(SHARDS[shard][position : position + count]).view(8, -1)
        assert torch.equal(inputs.long(), tokens[:, :-1])
        assert torch.equal(targets, tokens[:, 1:])
        position += count
    assert shard == 1


def test_too_few_documents_are_one_clear_line(tmp_path):
    write_shards(tmp_path, SHARDS)
    hp = packing_hp(january2026, tmp_path)
    january2026.check_training_shards(replace(hp, num_iterations=8))
    with pytest.raises(january2026.InputError, match="documents for .* steps, but the run needs 90"):
        january2026.check_training_shards(replace(hp, num_iterations=90))


def test_bad_shards_are_found(tmp_path):
    write_shards(tmp_path, SHARDS)
    hp = packing_hp(january2026, tmp_path)
    (tmp_path / "docs_train_000001.bin").write_bytes(b"\0" * 100)
    with pytest.raises(january2026.InputError, match="docs_train_000001.bin"):
        january2026.check_training_shards(hp)
    write_shard(tmp_path / "docs_train_000001.bin", [EOT, 300] * 100)
    with pytest.raises(january2026.InputError, match="300, outside the vocabulary"):
        january2026.check_training_shards(hp)
    hp = replace(hp, train_files=str(tmp_path / "nothing_*.bin"))
    with pytest.raises(january2026.InputError, match="no shards match"):
        january2026.check_training_shards(hp)


# --------------------------------------------------------------- item 4: validation
def check_validation(m, folder, monkeypatch):
    """Slices of consecutive tokens, wherever documents begin; the ranks' losses are averaged."""
    tokens = random_documents(16 * 256 + 300, 70, seed=7)
    write_shard(folder / "docs_val_000000.bin", tokens)
    hp = tiny(m, val_files=str(folder / "docs_val_*.bin"), val_tokens=16 * 256)
    seen = []

    def evaluate(model, sequences, window_blocks, hp, world):
        assert window_blocks == 20
        seen.extend(sequences)

    monkeypatch.setattr(m, "evaluate", evaluate)
    for rank in range(2):
        m.validate(None, 1600, hp, WORLD(rank, 2, torch.device("cpu")))
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    assert len(seen) == 16
    for i, (inputs, targets) in zip(order, seen):
        assert inputs.tolist() == tokens[256 * i : 256 * i + 256]
        assert targets.tolist() == tokens[256 * i + 1 : 256 * i + 257]
    official = m.TRACKS["fineweb"]
    assert (official.val_seq_len, official.val_tokens) == (262_144, 40 * 262_144)


def test_validation(tmp_path, monkeypatch):
    check_validation(january2026, tmp_path, monkeypatch)


def test_control_of_validation(tmp_path, monkeypatch):
    m = variant(("range(0, shard_length(file) - batch_size, batch_size)", "range(1, shard_length(file) - batch_size, batch_size)"))
    with pytest.raises(AssertionError):
        check_validation(m, tmp_path, monkeypatch)


# --------------------------------------------------------------- items 18, 19: masks
WINDOWS = [1, 16, 127, 128, 129, 200, 256, 384, 2000]


def masks_of(m, docs, window, span):
    """The masks that FlexAttention and the portable attention get, as (T, T)."""
    n = len(docs)
    window = torch.tensor(window, dtype=torch.int32)
    block_mask = m.flex_block_mask(docs, window)
    flex = read_block_mask(block_mask, n)
    tiles = m.portable_mask(docs, window, span)
    portable = torch.zeros(n, n, dtype=torch.bool)
    for b in range(n // 128):
        keys = (b - span + 1) * 128 + torch.arange(span * 128)
        inside = (keys >= 0) & (keys < n)
        assert not tiles[b, 0][:, ~inside].any()
        portable[b * 128 : (b + 1) * 128, keys[inside]] = tiles[b, 0][:, inside]
    return block_mask, flex, portable


def check_masks(m, num_windows=len(WINDOWS)):
    g = torch.Generator().manual_seed(8)
    for mean in (20, 300):
        tokens = torch.randint(0, EOT, (2, 384), generator=g)
        tokens[torch.rand(tokens.shape, generator=g) < 1 / mean] = EOT
        plain = m.document_ids(tokens.int(), EOT)
        for docs in (plain, plain.repeat_interleave(2)[:768]):
            for window in WINDOWS[:num_windows]:
                want = reference.visible(docs.tolist(), window)
                span = -(-window // 128) + 1
                block_mask, flex, portable = masks_of(m, docs, window, min(span, 7))
                assert torch.equal(flex, want), window
                assert torch.equal(portable, want), window
                # blocks that are entirely visible take the fast path
                whole = want.view(6, 128, 6, 128).transpose(1, 2).flatten(2).all(-1)
                assert block_mask.full_kv_num_blocks.sum() == whole.sum(), window


def test_masks():
    check_masks(january2026)


@pytest.mark.parametrize(
    "old,new",
    [
        ("window_any = distance - (BLOCK_SIZE - 1) <= window", "window_any = distance <= window - BLOCK_SIZE"),
        ("window_all = distance + (BLOCK_SIZE - 1) <= window", "window_all = distance <= window"),
        ("(q_idx - kv_idx <= window)", "(q_idx - kv_idx < window)"),
        ("start = document_start.maximum(query - window)", "start = document_start.maximum(query - window - 1)"),
    ],
)
def test_control_of_masks(old, new):
    with pytest.raises(AssertionError):
        check_masks(variant((old, new)))


def test_masks_of_the_layers():
    """Long, short and paired layers of the official model get their masks."""
    hp = tiny(january2026)
    model = january2026.GPT(hp, torch.float32).train()
    docs = torch.ones(256, dtype=torch.int32)
    masks = model.masks(docs, torch.tensor(7, dtype=torch.int32))
    most = [mask.sum(-1).max().item() for mask in masks]  # W + 1 keys
    blocks = [len(mask) for mask in masks]
    for i in range(11):
        assert most[i] == (7 * 16 + 1 if i in (3, 10) else 3 * 16 + 1), i
        assert blocks[i] == (4 if i in (0, 2, 5, 9) else 2), i
