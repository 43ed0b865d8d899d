"""Tests of gradient buckets: their contents, when they are reduced, and the reduced gradients."""

from dataclasses import replace

import torch
import torch.distributed as dist

import train_gpt
from tests.training.test_model import TINY, blocks, build
from tests.util import randomized, spawn
from train_gpt import GradientBuckets

SMALL = replace(TINY, vocab_size=200, eot_token=199, train_seq_len=128, val_seq_len=128, max_window=256)
NUM_SEQUENCES = 4
BUCKET_BYTES = 60_000  # the matrices of the MLP are larger, and have their own


def model_and_data():
    torch.manual_seed(0)
    model = randomized(build(SMALL, torch.bfloat16)).train()
    tokens = torch.randint(0, SMALL.vocab_size, (NUM_SEQUENCES, 129))
    return model, tokens[:, :-1].int(), tokens[:, 1:].long()


def lists(buckets):
    """The buckets, each a list of parameters, in the order in which they were filled."""
    return list({id(bucket): bucket for bucket in buckets.bucket_of.values()}.values())


def test_contents():
    """The official model's tables have their own buckets, and the matrices fill theirs."""
    with torch.device("meta"):
        model = build(train_gpt.TRACKS["fineweb"], torch.bfloat16)
    members = []
    buckets = lists(GradientBuckets(model))
    for bucket in buckets:
        members += [id(p) for p in bucket]
        assert len({p.dtype for p in bucket}) == 1
        assert len(bucket) == 1 or sum(p.nbytes for p in bucket) <= 25 * 2**20
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    tables = 5
    matrix_bytes = (12 * 8 + 11 * 4) * 768**2 * 4
    assert len(buckets) <= tables + 2 * matrix_bytes / (25 * 2**20)


# --------------------------------------------------------------- processes
def record_events(model):
    """Records in the order of time when gradients are ready, with the address of each, and when
    all-reduces start. Our hooks must run before those of the buckets."""
    events = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: events.append((p, p.grad.data_ptr())))
    plain_all_reduce = dist.all_reduce

    def all_reduce(tensor, async_op):
        assert async_op
        events.append(("reduce", tensor))
        return plain_all_reduce(tensor, async_op=True)

    dist.all_reduce = all_reduce
    return events


def check_reduced_in_place(reduced, buckets, came):
    """Each bucket is reduced once. The gradients are views of it, so nothing is copied back, and a
    bucket of one gradient isn't copied at all. `came` has the addresses before."""
    assert len(reduced) == len(buckets)
    for flat, bucket in zip(reduced, buckets):
        assert flat.numel() == sum(p.numel() for p in bucket)
        address = flat.data_ptr()
        if len(bucket) == 1:
            assert address == came[bucket[0]]
        for p in bucket:
            assert p.grad.data_ptr() == address
            assert p.grad.shape == p.shape
            assert p.grad.is_contiguous()
            address += p.grad.nbytes


def check_overlap(events):
    """Most buckets are reduced before all gradients are ready."""
    reduces = [i for i, (what, _) in enumerate(events) if what == "reduce"]
    last_ready = max(i for i, (what, _) in enumerate(events) if what != "reduce")
    early = sum(i < last_ready for i in reduces)
    assert early >= len(reduces) - 3 > 1, f"{early} of {len(reduces)} overlapped"
    assert reduces[0] < len(events) / 3


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
    events = record_events(model)
    buckets = GradientBuckets(model, BUCKET_BYTES)
    assert {len(bucket) == 1 for bucket in lists(buckets)} == {True, False}
    share = NUM_SEQUENCES // world_size
    for _ in range(2):  # in a second step, nothing is left over from the first
        for micro_step in range(share):
            events.clear()
            buckets.last_micro_step = micro_step == share - 1
            i = rank * share + micro_step
            loss = model(inputs[i : i + 1], targets[i : i + 1], blocks(2))
            (loss / NUM_SEQUENCES).backward()
            if not buckets.last_micro_step:
                assert "reduce" not in dict(events)
        check_overlap(events)
        buckets.wait()
        reduced = [tensor for what, tensor in events if what == "reduce"]
        check_reduced_in_place(reduced, lists(buckets), dict(events))
        check_values(model, want)
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


def test_reduced_once_a_step_overlapping_backward(tmp_path):
    spawn(bucket_child, 2, tmp_path)
