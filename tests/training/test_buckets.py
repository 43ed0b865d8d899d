"""Tests of gradient buckets: their contents, when they are reduced, and the reduced gradients."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import train_gpt
from test_model import TINY, blocks, build, randomize
from test_muon import become
from train_gpt import GradientBuckets
from tests.util import spawn

SMALL = replace(
    TINY,
    vocab_size=200,
    eot_token=199,
    model_dim=64,
    train_seq_len=128,
    val_seq_len=128,
    max_window=256,
)
NUM_SEQUENCES = 4
BUCKET_BYTES = 200_000


def model_and_data():
    torch.manual_seed(0)
    model = build(SMALL, torch.bfloat16).train()
    randomize(model)
    tokens = torch.randint(0, SMALL.vocab_size, (NUM_SEQUENCES, 129))
    return model, tokens[:, :-1].int(), tokens[:, 1:].long()


def lists(buckets):
    """The buckets, each a list of parameters, in the order in which they were filled."""
    return list({id(bucket): bucket for bucket in buckets.bucket_of.values()}.values())


def test_every_parameter_is_in_one_bucket():
    model, *_ = model_and_data()
    members = []
    for bucket in lists(GradientBuckets(model.parameters(), BUCKET_BYTES)):
        members += [id(p) for p in bucket]
        dtypes = {p.dtype for p in bucket}
        assert len(dtypes) == 1
        if len(bucket) > 1:
            assert sum(p.nbytes for p in bucket) <= BUCKET_BYTES
    wanted = [id(p) for p in model.parameters()]
    assert sorted(members) == sorted(wanted)


def test_default_size_on_the_official_model():
    with torch.device("meta"):
        model = build(train_gpt.TRACKS["fineweb"], torch.bfloat16)
    buckets = lists(GradientBuckets(model.parameters()))
    # Each table is larger than a bucket, and has one of its own. The matrices share buckets, which
    # are almost full.
    limit = 25 * 2**20
    for bucket in buckets:
        if len(bucket) > 1:
            assert sum(p.nbytes for p in bucket) <= limit
    tables = 5
    matrix_bytes = (12 * 8 + 11 * 4) * 768**2 * 4
    assert len(buckets) <= tables + 2 * matrix_bytes / limit


def test_filled_in_the_order_of_backward():
    """In a chain of layers, the last gradient is ready first, so it is in the first bucket."""
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(10)]
    weights = [layer.weight for layer in layers]
    buckets = lists(GradientBuckets(weights, bucket_bytes=2 * 8 * 8 * 4))
    assert len(buckets) == 5
    for i, bucket in enumerate(buckets):
        first, second = bucket
        assert first is weights[9 - 2 * i]
        assert second is weights[8 - 2 * i]


def record_events(model):
    """Records when gradients are ready and when all-reduces start, in the order of time.

    Our hooks run after those of the buckets.
    """
    events = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(("ready", name)))
    plain_all_reduce = dist.all_reduce

    def all_reduce(tensor, *args, async_op=False, **kwargs):
        assert async_op
        events.append(("reduce", tensor))
        return plain_all_reduce(tensor, *args, async_op=async_op, **kwargs)

    dist.all_reduce = all_reduce
    return events


def check_reduced_in_place(reduced, buckets):
    """Each bucket is reduced once. The gradients are views of it, so nothing is copied back."""
    assert len(reduced) == len(buckets)
    for flat, bucket in zip(reduced, buckets):
        assert flat.numel() == sum(p.numel() for p in bucket)
        address = flat.data_ptr()
        for p in bucket:
            assert p.grad.data_ptr() == address
            assert p.grad.shape == p.shape
            assert p.grad.is_contiguous()
            address += p.grad.nbytes


def check_overlap(events, num_buckets):
    """Most buckets are reduced before all gradients are ready."""
    kinds = [kind for kind, _ in events]
    last_ready = max(i for i, kind in enumerate(kinds) if kind == "ready")
    early = kinds[:last_ready].count("reduce")
    assert num_buckets > 4
    assert early >= num_buckets - 3, f"{early} of {num_buckets} overlapped"
    assert kinds.index("reduce") < len(kinds) / 3


def check_values(model, want):
    """Gradients are the mean over all sequences, and equal on all ranks. Embeddings are bf16."""
    grads = []
    for name, p in model.named_parameters():
        tolerance = 1e-5 if p.dtype == torch.float32 else 1e-2
        error = p.grad.double() - want[name]
        assert error.norm() <= tolerance * want[name].norm(), name
        grads.append(p.grad.float().flatten())
    own = torch.cat(grads)
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first), "the ranks have different gradients"


def bucket_child(rank, world_size):
    become(rank, world_size)
    want = plain_gradients()
    model, inputs, targets = model_and_data()
    buckets = GradientBuckets(model.parameters(), BUCKET_BYTES)
    events = record_events(model)
    share = NUM_SEQUENCES // world_size
    for _ in range(2):  # in a second step, nothing is left over from the first
        for micro_step in range(share):
            events.clear()
            buckets.last_micro_step = micro_step == share - 1
            i = rank * share + micro_step
            loss = model(inputs[i : i + 1], targets[i : i + 1], blocks(2))
            (loss / NUM_SEQUENCES).backward()
            if not buckets.last_micro_step:
                assert all(kind == "ready" for kind, _ in events)
        before_wait = list(events)
        buckets.wait()
        reduced = [tensor for kind, tensor in events if kind == "reduce"]
        check_reduced_in_place(reduced, lists(buckets))
        check_overlap(before_wait, len(reduced))
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


@pytest.mark.parametrize("world_size", [2, 4])
def test_reduced_once_a_step_overlapping_backward(world_size, tmp_path):
    spawn(bucket_child, world_size, tmp_path)


def one_gradient_child(rank, world_size):
    become(rank, world_size)
    layer = torch.nn.Linear(4, 2)
    came = {}  # the address of each gradient before any bucket sees it
    for name, p in layer.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: came.update({name: p.grad.data_ptr()})
        )
    buckets = GradientBuckets(layer.parameters(), bucket_bytes=1)
    assert [len(bucket) for bucket in lists(buckets)] == [1, 1]
    buckets.last_micro_step = True
    layer(torch.full((1, 4), float(rank))).sum().backward()
    buckets.wait()
    for name, p in layer.named_parameters():
        assert p.grad.data_ptr() == came[name], name
    assert torch.equal(layer.weight.grad, torch.full((2, 4), float(sum(range(world_size)))))
    assert torch.equal(layer.bias.grad, torch.full((2,), float(world_size)))


def test_a_bucket_of_one_gradient_is_not_copied(tmp_path):
    spawn(one_gradient_child, 2, tmp_path)


def test_one_process_keeps_gradients_as_they_come():
    layer = torch.nn.Linear(4, 4, bias=False)
    buckets = GradientBuckets(layer.parameters())
    for micro in range(5):
        buckets.last_micro_step = micro == 4
        inputs = torch.full((1, 4), float(micro))
        layer(inputs).sum().backward(torch.tensor(1 / 5))
        if micro == 0:
            first = layer.weight.grad
    buckets.wait()
    assert layer.weight.grad is first  # not copied
    want = torch.full((4, 4), (0 + 1 + 2 + 3 + 4) / 5)
    torch.testing.assert_close(layer.weight.grad, want)


def test_a_parameter_without_gradient_is_an_error():
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    buckets = GradientBuckets(layers.parameters())
    layers[0](torch.ones(1, 4)).sum().backward()
    with pytest.raises(AssertionError, match="a parameter got no gradient"):
        buckets.wait()
