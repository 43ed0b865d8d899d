"""
The data generator's batches are slices of the tokens. tests/data/test_shards.py gives it shards that are wrong in many
ways.
"""

import pytest
import torch

from train_gpt import distributed_data_generator
from tests.util import random_tokens, write_shard


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_reads_its_slice_of_every_batch(tmp_path, world_size):
    """The last tokens of a shard that don't fill a batch are dropped."""
    # Three batches of 32 and a rest, exactly one (33 tokens), one token too few, and exactly four
    shards = [random_tokens(n, seed=n, vocab=65536) for n in (110, 33, 32, 129)]
    for i in (3, 2, 1, 0):
        write_shard(tmp_path / f"text_train_{i:06d}.bin", shards[i])
    batches = [shard[i : i + 33] for shard in shards for i in range(0, len(shard) - 32, 32)]
    assert len(batches) == 3 + 1 + 0 + 4
    local = 32 // world_size
    for rank in range(world_size):
        found = distributed_data_generator(f"{tmp_path}/*.bin", 32, rank, world_size)
        for got, want in zip(found, batches, strict=True):
            assert got.dtype == torch.int32
            assert got.tolist() == want[rank * local : (rank + 1) * local + 1]
