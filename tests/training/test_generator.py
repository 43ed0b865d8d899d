"""
Tests of the data generator.

They compare its batches with slices of the tokens, and give it shards that are wrong in many ways.
"""

import struct

import pytest
import torch

from train_gpt import InputError, check_shards, distributed_data_generator
from tests.util import random_tokens, write_shard

VOCAB = 65536  # the largest that fits into a shard


def shards(folder, sizes):
    """Writes shards of random tokens, the last one first. Returns their pattern and their tokens."""
    tokens = [random_tokens(n, seed=i, vocab=VOCAB) for i, n in enumerate(sizes)]
    for i in reversed(range(len(sizes))):
        write_shard(folder / f"text_train_{i:06d}.bin", tokens[i])
    return str(folder / "text_train_*.bin"), tokens


def generator(pattern, batch_size, rank=0, world_size=1):
    return distributed_data_generator(pattern, batch_size, VOCAB, rank, world_size)


def expected(tokens, batch_size):
    """The tokens of all global batches, and the first token of the next one.

    If the last tokens of a shard don't fill a batch, they are dropped.
    """
    for shard in tokens:
        pos = 0
        while pos + batch_size + 1 <= len(shard):
            yield shard[pos : pos + batch_size + 1]
            pos += batch_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_slices_are_disjoint_and_cross_shards(tmp_path, world_size):
    batch = 32
    # Three batches and a rest, exactly one batch (33 tokens), one token too few for a batch, and
    # exactly four batches
    pattern, tokens = shards(tmp_path, [110, 33, 32, 129])
    ranks = [generator(pattern, batch, r, world_size) for r in range(world_size)]
    want = list(expected(tokens, batch))
    assert len(want) == 3 + 1 + 0 + 4
    local = batch // world_size
    for all_tokens in want:
        for rank, generator_of_rank in enumerate(ranks):
            part = next(generator_of_rank)
            assert part.dtype == torch.int32
            first = rank * local
            assert part.tolist() == all_tokens[first : first + local + 1]
    for generator_of_rank in ranks:
        assert next(generator_of_rank, None) is None


def raw(path, header, body=b""):
    zeros = [0] * (256 - len(header))
    packed = struct.pack("<256i", *header, *zeros)
    path.write_bytes(packed + body)


GOOD = struct.pack("<100H", *range(100))
LONG = struct.pack("<100I", *range(100))
# Functions that write a bad shard at a path
BAD_SHARDS = {
    "magic": lambda p: raw(p, (20240519, 1, 100), GOOD),
    "version": lambda p: raw(p, (20240520, 2, 100), GOOD),
    "tokens of 32 bits": lambda p: raw(p, (20240520, 1, 100), LONG),
    "half a token": lambda p: raw(p, (20240520, 1, 100), GOOD[:-1]),
    "empty file": lambda p: p.write_bytes(b""),
    "the very last target is outside the vocabulary": lambda p: write_shard(p, [1] * 48 + [257]),
}


@pytest.mark.parametrize("kind", BAD_SHARDS)
def test_check_shards_finds_a_bad_second_shard(tmp_path, kind):
    write_shard(tmp_path / "text_train_000000.bin", random_tokens(40, seed=0))
    BAD_SHARDS[kind](tmp_path / "text_train_000001.bin")
    pattern = str(tmp_path / "*.bin")
    check_shards(pattern, 16, 2, 257)
    with pytest.raises(InputError, match="text_train_000001.bin") as error:
        check_shards(pattern, 16, 5, 257)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sizes", [[110, 33, 32, 129], [16, 5]])
def test_check_shards_counts_the_steps_as_the_generator_does(sizes, tmp_path):
    pattern, tokens = shards(tmp_path, sizes)
    steps = len(list(expected(tokens, 16)))
    check_shards(pattern, 16, steps, VOCAB)
    with pytest.raises(InputError, match=f"has {steps} batches"):
        check_shards(pattern, 16, steps + 1, VOCAB)
