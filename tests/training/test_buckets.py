"""Tests of the all-reduce of gradients in buckets: what is in a bucket, and the sums."""

from dataclasses import replace
from unittest.mock import Mock

import torch
import torch.distributed as dist

import train_gpt
from tests.training.test_model import TINY, blocks, build
from tests.util import randomized, spawn
from train_gpt import sum_gradients

SMALL = replace(TINY, vocab_size=200, eot_token=199, train_seq_len=128, val_seq_len=128, max_window=256)
NUM_SEQUENCES = 4
BUCKET_BYTES = 60_000  # the matrices of the MLP are larger, and have their own


def model_and_data():
    torch.manual_seed(0)
    model = randomized(build(SMALL, torch.bfloat16)).train()
    tokens = torch.randint(0, SMALL.vocab_size, (NUM_SEQUENCES, 129))
    return model, tokens[:, :-1].int(), tokens[:, 1:].long()


def reduced():
    """The tensors that were all-reduced, where dist.all_reduce is a mock."""
    return [call.args[0] for call in dist.all_reduce.call_args_list]


def test_contents(monkeypatch):
    """The official model's tables have their own buckets, and the matrices fill theirs."""
    with torch.device("meta"):
        model = build(train_gpt.TRACKS["fineweb"], torch.bfloat16)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
    monkeypatch.setattr(dist, "all_reduce", Mock())
    monkeypatch.setattr(train_gpt, "WORLD_SIZE", 8)
    sum_gradients(model)
    buckets = reduced()
    sizes = {p.numel() for p in model.parameters()}
    for flat in buckets:
        assert flat.nbytes <= 25 * 2**20 or flat.numel() in sizes
    assert sum(flat.numel() for flat in buckets) == sum(p.numel() for p in model.parameters())
    tables = 5
    matrix_bytes = (12 * 8 + 11 * 4) * 768**2 * 4
    assert len(buckets) <= tables + 2 * matrix_bytes / (25 * 2**20)


# --------------------------------------------------------------- processes
def check_in_place(model, before):
    """The gradients are views of the buckets, so nothing is copied back. A gradient that has its own bucket
    isn't copied at all. `before` has the addresses of the gradients."""
    counts = {flat.data_ptr(): flat.numel() for flat in reduced()}
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
    alone = 0
    for p in model.parameters():
        address = p.grad.data_ptr()
        assert any(0 <= address - flat.data_ptr() < flat.nbytes for flat in reduced())
        assert p.grad.shape == p.shape
        assert p.grad.is_contiguous()
        if counts.get(address) == p.numel():
            assert address == before[p]
            alone += 1
    assert 0 < alone < len(counts)


def check_values(model, want):
    """Gradients are the mean over all sequences, and equal on all ranks. Embeddings are bf16."""
    for name, p in model.named_parameters():
        tolerance = 1e-5 if p.dtype == torch.float32 else 1e-2
        error = p.grad.double() - want[name]
        assert error.norm() <= tolerance * want[name].norm(), name
        first = p.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(p.grad, first), name


def bucket_child(rank, world_size):
    want = plain_gradients()
    model, inputs, targets = model_and_data()
    dist.all_reduce = Mock(wraps=dist.all_reduce)
    share = NUM_SEQUENCES // world_size
    for _ in range(2):  # in a second step, nothing is left over from the first
        for i in range(rank * share, (rank + 1) * share):
            loss = model(inputs[i : i + 1], targets[i : i + 1], blocks(2))
            (loss / NUM_SEQUENCES).backward()
        before = {p: p.grad.data_ptr() for p in model.parameters()}
        sum_gradients(model, BUCKET_BYTES)
        check_in_place(model, before)
        check_values(model, want)
        dist.all_reduce.reset_mock()
        model.zero_grad()  # in train_step, the optimizers do this


def plain_gradients():
    """The mean gradients by name, in float64: one backward pass per sequence, without buckets."""
    model, inputs, targets = model_and_data()
    mean = {}
    for name, p in model.named_parameters():
        mean[name] = torch.zeros_like(p, dtype=torch.float64)
    for i in range(NUM_SEQUENCES):
        model.zero_grad()
        loss = model(inputs[i : i + 1], targets[i : i + 1], blocks(2))
        loss.backward()
        for name, p in model.named_parameters():
            mean[name] += p.grad.double() / NUM_SEQUENCES
    return mean


def test_summed_over_processes(tmp_path):
    spawn(bucket_child, 2, tmp_path)
