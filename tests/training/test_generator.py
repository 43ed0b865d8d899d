"""
Tests of the data generator.

They compare its batches with slices of the tokens. tests/data/test_shards.py gives it shards that are wrong
in many ways.
"""

import pytest
import torch

from train_gpt import distributed_data_generator
from tests.util import random_tokens, write_shard

VOCAB = 65536  # the largest that fits into a shard


def shards(folder, sizes):
    """Writes shards of random tokens, the last one first. Returns their pattern and their tokens."""
    tokens = [random_tokens(n, seed=i, vocab=VOCAB) for i, n in enumerate(sizes)]
    for i in reversed(range(len(sizes))):
        write_shard(folder / f"text_train_{i:06d}.bin", tokens[i])
    return str(folder / "text_train_*.bin"), tokens


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
def test_each_rank_reads_its_slice_of_every_batch(tmp_path, world_size):
    batch = 32
    # Three batches and a rest, exactly one batch (33 tokens), one token too few for a batch, and
    # exactly four batches
    pattern, tokens = shards(tmp_path, [110, 33, 32, 129])
    ranks = []
    for rank in range(world_size):
        ranks.append(distributed_data_generator(pattern, batch, rank, world_size))
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
