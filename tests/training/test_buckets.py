"""Gradient buckets on two gloo processes: what is in them, when they are reduced, and what comes out."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import train_gpt
from train_gpt import GPT, GradientBuckets
from test_model import TINY, blocks, randomize
from util import spawn

SMALL = replace(
    TINY,
    vocab_size=200,
    eot_token=199,
    model_dim=64,
    train_seq_len=128,
    val_seq_len=128,
    max_window=256,
)
NUM_SEQUENCES, BUCKET_BYTES = 4, 200_000


def model_and_data():
    torch.manual_seed(0)
    model = randomize(GPT(SMALL, dtype=torch.bfloat16)).train()
    tokens = torch.randint(0, SMALL.vocab_size, (NUM_SEQUENCES, 129))
    return model, tokens[:, :-1].int(), tokens[:, 1:].long()


def test_every_parameter_is_in_one_bucket():
    model, *_ = model_and_data()
    buckets = GradientBuckets(model.parameters(), BUCKET_BYTES).buckets
    members = [p for bucket in buckets for p in bucket]
    assert len(members) == len({id(p) for p in members}) == len(list(model.parameters()))
    assert {id(p) for p in members} == {id(p) for p in model.parameters()}
    for bucket in buckets:
        assert len({p.dtype for p in bucket}) == 1
        assert sum(p.nbytes for p in bucket) <= BUCKET_BYTES or len(bucket) == 1


def test_default_size_on_the_official_model():
    with torch.device("meta"):
        buckets = GradientBuckets(GPT(train_gpt.TRACKS["fineweb"]).parameters())
    sizes = [sum(p.nbytes for p in bucket) for bucket in buckets.buckets]
    # Tables larger than a bucket have one each; the matrices share buckets that are about full.
    assert all(n <= 25 * 2**20 for n, bucket in zip(sizes, buckets.buckets) if len(bucket) > 1)
    assert len(sizes) <= 5 + 2 * (12 * 8 + 11 * 4) * 768**2 * 4 / (25 * 2**20)


def test_filled_in_the_order_of_backward():
    """A chain of layers: the last one's gradient comes first, so its bucket is the first."""
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(10))
    buckets = GradientBuckets(layers.parameters(), bucket_bytes=2 * 8 * 8 * 4)
    assert [[id(p) for p in bucket] for bucket in buckets.buckets] == [
        [id(layers[9 - 2 * i].weight), id(layers[8 - 2 * i].weight)] for i in range(5)
    ]


def bucket_child(rank, world_size):
    model, inputs, targets = model_and_data()
    events, ready, want = [], {}, plain_gradients()
    names = {id(p): n for n, p in model.named_parameters()}
    buckets = GradientBuckets(model.parameters(), BUCKET_BYTES)
    for p in model.parameters():  # ours run after the buckets' own hooks
        p.register_post_accumulate_grad_hook(lambda p: events.append(("ready", names[id(p)])))
    plain_all_reduce = dist.all_reduce

    def all_reduce(tensor, *args, async_op=False, **kwargs):
        events.append(("reduce", tensor, async_op))
        return plain_all_reduce(tensor, *args, async_op=async_op, **kwargs)

    dist.all_reduce = all_reduce
    share = NUM_SEQUENCES // world_size
    for step in range(2):  # a second step: nothing is left over from the first
        events.clear()
        for micro in range(share):
            buckets.last_micro_step = micro == share - 1
            i = rank * share + micro
            (model(inputs[i : i + 1], targets[i : i + 1], blocks(2)) / NUM_SEQUENCES).backward()
            if micro < share - 1:
                assert not any(e[0] == "reduce" for e in events), (
                    "reduced before the last micro-step"
                )
        events_last = events[(share - 1) * len(names) :]
        buckets.wait()
        reduced = [e for e in events if e[0] == "reduce"]
        assert all(e[2] for e in reduced), "an all-reduce was not asynchronous"
        # Once each, and it is where the gradients are: nothing is copied back.
        assert [e[1].numel() for e in reduced] == [
            sum(p.numel() for p in bucket) for bucket in buckets.buckets
        ]
        for (_, flat, _), bucket in zip(reduced, buckets.buckets):
            offsets = [(p.grad.data_ptr() - flat.data_ptr(), p.grad.nbytes) for p in bucket]
            assert offsets[0][0] == 0 and all(
                a + n == b for (a, n), (b, _) in zip(offsets, offsets[1:])
            )
            assert all(p.grad.shape == p.shape and p.grad.is_contiguous() for p in bucket)
        # Overlap: most buckets were on their way while gradients were still to come.
        kinds = [e[0] for e in events_last]
        last_ready = len(kinds) - 1 - kinds[::-1].index("ready")
        early = sum(k == "reduce" for k in kinds[:last_ready])
        assert len(reduced) > 4 and early >= len(reduced) - 3, (
            f"{early} of {len(reduced)} overlapped"
        )
        assert kinds.index("reduce") < len(kinds) / 3
        # Values: the mean over all sequences of each one's gradients, summed in float64. Embedding tables are bf16.
        for name, p in model.named_parameters():
            tolerance = 1e-5 if p.dtype == torch.float32 else 1e-2
            assert (p.grad.double() - want[name]).norm() <= tolerance * want[name].norm(), name
            ready[name] = p.grad.clone()
        both = torch.cat([g.float().flatten() for g in ready.values()])
        other = both.clone()
        dist.broadcast(other, 0)
        assert torch.equal(both, other), "ranks disagree"
        model.zero_grad()  # as train_step does, by its optimizers


def plain_gradients():
    """{name: float64}: the mean of the sequences' gradients, each from a backward pass of its own, no buckets."""
    model, inputs, targets = model_and_data()
    mean = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters()}
    for i in range(NUM_SEQUENCES):
        model.zero_grad()
        model(inputs[i : i + 1], targets[i : i + 1], blocks(2)).backward()
        for n, p in model.named_parameters():
            mean[n] += p.grad.double() / NUM_SEQUENCES
    return mean


@pytest.mark.parametrize("world_size", [2, 4])
def test_reduced_once_a_step_overlapping_backward(world_size, tmp_path):
    spawn(bucket_child, world_size, tmp_path)


def test_one_process_keeps_gradients_as_they_come():
    layer = torch.nn.Linear(4, 4, bias=False)
    buckets = GradientBuckets(layer.parameters())
    for micro in range(5):
        buckets.last_micro_step = micro == 4
        layer(torch.full((1, 4), float(micro))).sum().backward(torch.tensor(1 / 5))
        first = layer.weight.grad if micro == 0 else first
    buckets.wait()
    assert layer.weight.grad is first  # neither copied nor zeroed first
    torch.testing.assert_close(layer.weight.grad, torch.full((4, 4), (0 + 1 + 2 + 3 + 4) / 5))


def test_a_parameter_without_gradient_is_an_error():
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    buckets = GradientBuckets(layers.parameters())
    layers[0](torch.ones(1, 4)).sum().backward()
    with pytest.raises(AssertionError, match="took no part"):
        buckets.wait()
