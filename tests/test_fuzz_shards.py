"""Shards with any header, cut anywhere, one token off: both readers take exactly the whole ones, the rest is one line."""
import io
import struct
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import train_gpt
from util import ROOT

sys.path.insert(0, str(ROOT / "data"))
import shards

VOCAB, BATCH = 257, 4
fuzz = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
int32 = st.integers(-2**31, 2**31 - 1)


@pytest.fixture(scope="module")
def path():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "fuzz_000000.bin"


@st.composite
def files(draw):
    """A shard with any of these wrong: magic, version, count, the header's rest, a token, the length; or noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=3000))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), max_size=40))
    if tokens and draw(st.booleans()):
        tokens[draw(st.integers(0, len(tokens) - 1))] = draw(st.integers(0, 65535))
    sometimes = lambda usual, other: draw(other if draw(st.integers(0, 4)) == 0 else st.just(usual))
    count = sometimes(len(tokens), st.one_of(int32, st.integers(-3, 45)))
    header = struct.pack("<3i", sometimes(20240520, int32), sometimes(1, int32), count).ljust(1024, b"\0")
    content = header + struct.pack(f"<{len(tokens)}H", *tokens)
    content = content[:sometimes(len(content), st.integers(0, len(content)))]
    return content + sometimes(b"", st.binary(max_size=6))


def meaning(content):
    """The tokens of a shard, from the format's definition; None for what is no shard."""
    if len(content) < 1024:
        return None
    magic, version, count = struct.unpack_from("<3i", content)
    if (magic, version) != (20240520, 1) or count < 0 or len(content) != 1024 + 2 * count:
        return None
    return list(struct.unpack_from(f"<{count}H", content, 1024))


def shard(count, length=None, magic=20240520, version=1):
    return (struct.pack("<3i", magic, version, count).ljust(1024, b"\0") + b"\1\0" * min(max(count, 0), 1000))[:length]


corners = [b"", shard(0), shard(1), shard(BATCH), shard(BATCH + 1), shard(9), shard(9, 1023), shard(9, 1024),
           shard(9, 1025), shard(9, -1), shard(9) + b"\0", shard(-1), shard(2**31 - 1), shard(9, magic=-1),
           shard(9, version=0), shard(9, magic=0x18D83401)]  # the last: big-endian


def with_corners(test):
    for content in corners:
        test = example(content)(test)
    return test


def one_line(error, path):
    assert path.name in str(error) and "\n" not in str(error) and len(str(error)) > len(str(path)) + 10


@with_corners
@fuzz
@given(files())
def test_data_scripts_reader(path, content):
    path.write_bytes(content)
    tokens = meaning(content)
    if tokens and max(tokens) < VOCAB:  # an empty shard is none
        assert shards.check_shard(path) == len(tokens)
        assert shards.read_shard(path, VOCAB).tolist() == tokens
    else:
        with pytest.raises(shards.ShardError) as error:
            shards.read_shard(path, VOCAB)
        one_line(error.value, path)


@with_corners
@fuzz
@given(files())
def test_training_reader(path, content):
    """What a run does first, check_shards, and what it then reads: the same shards are good enough for both."""
    path.write_bytes(content)
    tokens = meaning(content)
    batches = (len(tokens) - 1) // BATCH if tokens else 0
    used = tokens[:batches * BATCH + 1] if batches else []

    def read():
        return list(train_gpt.distributed_data_generator(str(path), BATCH, 0, 1, VOCAB))

    if tokens is None or max(used, default=0) >= VOCAB:
        for function in (read, lambda: train_gpt.check_shards(str(path), BATCH, max(batches, 1), VOCAB)):
            with pytest.raises(train_gpt.InputError) as error:
                function()
            one_line(error.value, path)
        return
    if batches:
        train_gpt.check_shards(str(path), BATCH, batches, VOCAB)
    with pytest.raises(train_gpt.InputError, match=f"tokens for {batches} batches"):
        train_gpt.check_shards(str(path), BATCH, batches + 1, VOCAB)
    got = read()
    assert len(got) == batches
    for i, (inputs, targets) in enumerate(got):
        assert inputs.tolist() == tokens[i * BATCH:(i + 1) * BATCH]
        assert targets.tolist() == tokens[i * BATCH + 1:(i + 1) * BATCH + 1]


@with_corners
@settings(fuzz, max_examples=60)
@given(files())
def test_a_run_begins_or_says_why_not(path, content):
    """The whole command: code 2 and one line for all that is no shard, or has too few tokens (all here have)."""
    path.write_bytes(content)
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        code = train_gpt.main(["--track", "shakespeare", "--device", "cpu", f"--train_files={path}"])
    assert code == 2
    assert stderr.getvalue().startswith("error: ") and stderr.getvalue().count("\n") == 1
    assert path.name in stderr.getvalue()


@settings(fuzz, max_examples=100)
@given(st.data())
def test_shard_cut_while_it_is_read(path, data):
    """Truncated or grown after its header was believed: every batch is right, or there is one line."""
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=2 * BATCH + 1, max_size=60))
    path.write_bytes(struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0")
                     + struct.pack(f"<{len(tokens)}H", *tokens))
    generator = train_gpt.distributed_data_generator(str(path), BATCH, 0, 1, VOCAB)
    next(generator)
    size = data.draw(st.integers(0, 1024 + 2 * len(tokens)))
    with open(path, "r+b") as f:
        f.truncate(size)
    left = max(size - 1024, 0) // 2  # whole tokens
    good = min((len(tokens) - 1) // BATCH, max(left - 1, 0) // BATCH) - 1
    for i in range(1, 1 + max(good, 0)):
        inputs, _ = next(generator)
        assert inputs.tolist() == tokens[i * BATCH:(i + 1) * BATCH]
    if good < (len(tokens) - 1) // BATCH - 1:
        with pytest.raises(train_gpt.InputError) as error:
            next(generator)
        one_line(error.value, path)
