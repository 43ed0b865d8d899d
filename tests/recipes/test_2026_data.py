"""Packing of documents, beside a plain loop over lists, and masks pair by pair."""

from dataclasses import replace

import pytest
import torch

import train_gpt
from recipes import january2026
from recipes.january2026 import (
    check_training_shards,
    document_ids,
    flex_block_mask,
    training_batches,
)
from tests.recipes import reference
from tests.recipes.test_2026_model import EOT, tiny
from tests.training.test_attention import check_block_mask
from tests.util import random_tokens, write_shard


def documents(lengths, seed):
    """Tokens of documents with these lengths, each beginning with end-of-text."""
    g = torch.Generator().manual_seed(seed)
    tokens = []
    for length in lengths:
        rest = torch.randint(0, EOT, (length - 1,), generator=g)
        tokens += [EOT, *rest.tolist()]
    return tokens


def write_shards(folder, shards):
    for i, tokens in enumerate(shards):
        write_shard(folder / f"docs_train_{i:06d}.bin", tokens)


# Shards with short and long documents, tokens before the first one, a last document that ends a step
# exactly, documents that fill no step, and no document at all
SHARDS = [
    [1, 2, 3, *random_tokens(9000, 1, EOT + 1, EOT, 30)],
    random_tokens(7000, 2, EOT + 1, EOT, 200),
    documents([129] * 8, seed=3),
    documents([130] * 7, seed=4),
    [5] * 4000,
    documents([50] * 20 + [129] * 30 + [1] * 3 + [600] * 40, seed=5),
    random_tokens(20000, 6, EOT + 1, EOT, 60),
    documents([100] * 64, seed=9),
]


def packing_hp(folder, **changes):
    files = str(folder / "docs_train_*.bin")
    steps = dict(num_iterations=20, extension_frac=0.1)
    return tiny(train_files=files, seq_lens=(128, 256, 384), max_document=100, **steps, **changes)


@pytest.mark.parametrize("world_size, first", [(1, 0), (2, 7)])
def test_packing(world_size, first, tmp_path, monkeypatch):
    """All steps until the shards are used up, on all ranks. A resumed run doesn't begin at the first."""
    write_shards(tmp_path, SHARDS)
    hp = packing_hp(tmp_path)

    def seq_lens(step):
        return 128 if step < 6 else 256 if step < 12 else 384

    want = list(reference.packed_steps(SHARDS, EOT, seq_lens, 100))
    assert len(want) > 13  # so that all lengths occur
    local = 8 // world_size
    monkeypatch.setattr(january2026, "WORLD_SIZE", world_size)
    for rank in range(world_size):
        monkeypatch.setattr(january2026, "RANK", rank)
        got = list(training_batches(hp, first))
        assert [tokens.tolist() for tokens in got] == [
            s[rank * local : (rank + 1) * local] for s in want[first:]
        ]
        assert all(tokens.dtype == torch.int32 for tokens in got)
        assert all((tokens[:, 0] == EOT).all() for tokens in got)


def test_mini_reads_on_within_documents(tmp_path):
    """Without skip_rest, sequences follow each other."""
    write_shards(tmp_path, SHARDS[:2])
    hp = packing_hp(tmp_path, skip_rest=False)
    position = shard = 0
    for sequences in training_batches(hp, 0):
        count = sequences.numel()
        if position + count > len(SHARDS[shard]):
            shard += 1
            position = 0
        assert sequences.flatten().tolist() == SHARDS[shard][position : position + count]
        position += count
    assert shard == 1


def test_shards_are_checked_before_training(tmp_path):
    write_shards(tmp_path, SHARDS)
    hp = packing_hp(tmp_path)
    checksum = check_training_shards(replace(hp, num_iterations=8))
    with pytest.raises(train_gpt.InputError, match="documents for 29 steps, and the run needs 90"):
        check_training_shards(replace(hp, num_iterations=90))
    shard = tmp_path / "docs_train_000000.bin"
    data = bytearray(shard.read_bytes())
    data[1024 + 2 * 4] ^= 1  # a token of the first document
    shard.write_bytes(data)
    assert check_training_shards(replace(hp, num_iterations=8)) != checksum
    write_shard(shard, [EOT, 300] * 100)
    with pytest.raises(train_gpt.InputError, match="300, outside the vocabulary"):
        check_training_shards(hp)


# --------------------------------------------------------------- masks
@pytest.mark.parametrize("window", [1, 16, 127, 128, 129, 200, 256, 384, 2000])
@pytest.mark.parametrize("mean", [20, 300])
def test_masks(mean, window):
    """FlexAttention's mask, for documents of `mean` tokens, and twice as long ones. The losses of
    test_2026_model.py have the CPU's."""
    g = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, EOT, (2, 384), generator=g)
    tokens[torch.rand(tokens.shape, generator=g) < 1 / mean] = EOT
    single = document_ids(tokens.int(), EOT)
    for docs in (single, single.repeat_interleave(2)[:768]):
        mask = flex_block_mask(docs, torch.tensor(window))
        check_block_mask(mask, reference.visible(docs, window))


@pytest.mark.parametrize("name", ["cooldown_frac", "max_document", "yarn_beta", "num_iterations"])
def test_zero_is_refused(name):
    with pytest.raises(train_gpt.InputError, match=name):
        january2026.check_hyperparameters(tiny(**{name: 0}), 1)
