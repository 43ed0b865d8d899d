"""Tests of the all-reduce of gradients in buckets: what is in a bucket, when it is reduced, and the sums."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import train_gpt
from tests.training.test_model import TINY, blocks, build
from tests.util import randomized, spawn
from train_gpt import InputError, gradient_buckets, summed_gradients

SMALL = replace(TINY, vocab_size=200, eot_token=199, train_seq_len=128, val_seq_len=128, max_window=256)
NUM_SEQUENCES = 4
BUCKET_BYTES = 60_000  # the matrices of the MLP are larger, and have their own


def model_and_data():
    torch.manual_seed(0)
    model = randomized(build(SMALL, torch.bfloat16)).train()
    model.skip_weights.requires_grad_(False)
    tokens = torch.randint(0, SMALL.vocab_size, (NUM_SEQUENCES, 129))
    return model, tokens[:, :-1].int(), tokens[:, 1:].long()


def trained(model):
    """The parameters that aren't frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_contents():
    """The official model's tables have their own buckets, and the matrices fill theirs."""
    with torch.device("meta"):
        model = build(train_gpt.TRACKS["fineweb"], torch.bfloat16)
    model.skip_weights.requires_grad_(False)
    buckets = gradient_buckets(model, 25 * 2**20)
    for bucket in buckets:
        assert len({p.dtype for p in bucket}) == 1
        assert len(bucket) == 1 or sum(p.nbytes for p in bucket) <= 25 * 2**20
    members = [p for bucket in buckets for p in bucket]
    assert len(members) == len(set(members))
    assert set(members) == set(trained(model).values())
    tables = 5
    matrix_bytes = (12 * 8 + 11 * 4) * 768**2 * 4
    assert len(buckets) <= tables + 2 * matrix_bytes / (25 * 2**20)


# --------------------------------------------------------------- processes
def check_values(parameters, want):
    """Gradients are the mean over all sequences, and equal on all ranks. Embeddings are bf16."""
    for name, p in parameters.items():
        tolerance = 1e-5 if p.dtype == torch.float32 else 1e-2
        error = p.grad.double() - want[name]
        assert error.norm() <= tolerance * want[name].norm(), name
        first = p.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(p.grad, first), name


def check_in_place(parameters, reduced):
    """The gradients are views of what was reduced, so nothing is copied back."""
    assert sum(flat.numel() for flat in reduced) == sum(p.numel() for p in parameters.values())
    for p in parameters.values():
        assert any(0 <= p.grad.data_ptr() - flat.data_ptr() < flat.nbytes for flat in reduced)
        assert p.grad.shape == p.shape
        assert p.grad.is_contiguous()


def bucket_child(rank, world_size):
    """Each step has several passes. The gradient of the embedding is the last one of a pass."""
    want = plain_gradients()
    model, inputs, targets = model_and_data()
    parameters = trained(model)
    share = NUM_SEQUENCES // world_size
    calls = []  # the tensors that are all-reduced, and the handles
    early = []  # the names of gradients that were there before the backward pass had ended
    plain = dist.all_reduce

    def all_reduce(flat, async_op):
        calls.append((flat, plain(flat, async_op=async_op)))
        return calls[-1][1]

    def before_the_end(grad):
        if not calls:
            return
        flat, handle = calls[0]
        handle.wait()
        for name, p in parameters.items():
            if p.grad is not None and 0 <= p.grad.data_ptr() - flat.data_ptr() < flat.nbytes:
                check_values({name: p}, want)
                early.append(name)

    dist.all_reduce = all_reduce
    hook = model.embed.weight.register_hook(before_the_end)
    for _ in range(2):  # in a second step, nothing is left over from the first
        *passes, last = range(rank * share, (rank + 1) * share)
        for i in passes:
            loss = model(inputs[i : i + 1], targets[i : i + 1], blocks(2))
            (loss / NUM_SEQUENCES).backward()
        assert not calls
        loss = model(inputs[last : last + 1], targets[last : last + 1], blocks(2))
        with summed_gradients(model, BUCKET_BYTES):
            (loss / NUM_SEQUENCES).backward()
        assert "lm_head.weight" in early
        check_in_place(parameters, [flat for flat, _ in calls])
        check_values(parameters, want)
        calls.clear()
        early.clear()
        model.zero_grad()  # in train_step, the optimizers do this
    hook.remove()
    model.spare = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(InputError, match="no gradient for spare: use it"):
        with summed_gradients(model, BUCKET_BYTES):
            model(inputs[:1], targets[:1], blocks(2)).backward()


def plain_gradients():
    """The mean gradients by name, in float64: one backward pass per sequence, without buckets."""
    model, inputs, targets = model_and_data()
    mean = {}
    for name, p in trained(model).items():
        mean[name] = torch.zeros_like(p, dtype=torch.float64)
    for i in range(NUM_SEQUENCES):
        model.zero_grad()
        loss = model(inputs[i : i + 1], targets[i : i + 1], blocks(2))
        loss.backward()
        for name, p in trained(model).items():
            mean[name] += p.grad.double() / NUM_SEQUENCES
    return mean


def test_summed_over_processes(tmp_path):
    spawn(bucket_child, 2, tmp_path)
