"""
Tests both readers of shards, in data/shards.py and in train_gpt.py, with random files.

The files may have any header and any tokens, and may be cut anywhere. The readers must accept
exactly the complete shards. They must refuse all other files with an error of one line.
"""
import contextlib
import io
import struct
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import train_gpt
from tests.util import ROOT

from data import shards

VOCAB = 257
BATCH = 4
fuzz = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
int32 = st.integers(-2**31, 2**31 - 1)


@pytest.fixture(scope="module")
def path():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "fuzz_000000.bin"


def shard_bytes(tokens, magic=20240520, version=1, count=None):
    """A shard, made by the definition of the format."""
    if count is None:
        count = len(tokens)
    header = struct.pack("<3i", magic, version, count)
    return header.ljust(1024, b"\0") + struct.pack(f"<{len(tokens)}H", *tokens)


def rarely(usual, other):
    """Draws the usual value four times in five, otherwise one of `other`."""
    return st.integers(0, 4).flatmap(lambda n: other if n == 0 else st.just(usual))


@st.composite
def files(draw):
    """
    Draws random bytes, or a shard that may have mistakes.

    The magic number, the version, the count, a token or the length may be wrong.
    """
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=3000))
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), max_size=40))
    if tokens and draw(st.booleans()):
        position = draw(st.integers(0, len(tokens) - 1))
        tokens[position] = draw(st.integers(0, 65535))
    magic = draw(rarely(20240520, int32))
    version = draw(rarely(1, int32))
    count = draw(rarely(len(tokens), st.one_of(int32, st.integers(-3, 45))))
    content = shard_bytes(tokens, magic, version, count)
    length = draw(rarely(len(content), st.integers(0, len(content))))
    extra = draw(rarely(b"", st.binary(max_size=6)))
    return content[:length] + extra


def meaning(content):
    """The tokens of a shard by the definition of the format, or None if it isn't a shard."""
    if len(content) < 1024:
        return None
    magic, version, count = struct.unpack_from("<3i", content)
    if (magic, version) != (20240520, 1):
        return None
    if count < 0 or len(content) != 1024 + 2 * count:
        return None
    return list(struct.unpack_from(f"<{count}H", content, 1024))


nine = shard_bytes([1] * 9)
CORNERS = [
    b"",
    shard_bytes([]),
    shard_bytes([1]),
    shard_bytes([1] * BATCH),
    shard_bytes([1] * (BATCH + 1)),
    nine,
    nine[:10],
    nine[:1023],
    nine[:1024],
    nine[:1025],
    nine[:-1],
    nine + b"\0",
    shard_bytes([], count=-1),
    shard_bytes([1] * 1000, count=2**31 - 1),
    shard_bytes([1] * 9, magic=-1),
    shard_bytes([1] * 9, version=0),
    shard_bytes([1] * 9, magic=0x18D83401),  # the magic number in big-endian order
]


def with_corners(test):
    for content in CORNERS:
        test = example(content)(test)
    return test


def assert_one_line(error, path):
    message = str(error)
    assert path.name in message
    assert "\n" not in message
    assert len(message) > len(str(path)) + 10


@with_corners
@fuzz
@given(files())
def test_data_scripts_reader(path, content):
    path.write_bytes(content)
    tokens = meaning(content)
    if tokens and max(tokens) < VOCAB:  # an empty shard is refused
        assert shards.check_shard(path) == len(tokens)
        assert shards.read_shard(path, VOCAB).tolist() == tokens
    else:
        with pytest.raises(shards.ShardError) as error:
            shards.read_shard(path, VOCAB)
        assert_one_line(error.value, path)


def read_batches(path):
    return list(train_gpt.distributed_data_generator(str(path), BATCH, VOCAB))


def assert_batch(batch, i, tokens):
    start = i * BATCH
    assert batch.tolist() == tokens[start:start + BATCH + 1]


@with_corners
@fuzz
@given(files())
def test_training_reader(path, content):
    """check_shards() accepts the same shards as the reader. A run calls it first."""
    path.write_bytes(content)
    tokens = meaning(content)
    batches = 0
    used = []
    if tokens:
        batches = (len(tokens) - 1) // BATCH
    if batches:
        used = tokens[:batches * BATCH + 1]
    if tokens is None or max(used, default=0) >= VOCAB:
        with pytest.raises(train_gpt.InputError) as error:
            read_batches(path)
        assert_one_line(error.value, path)
        with pytest.raises(train_gpt.InputError) as error:
            train_gpt.check_shards(str(path), BATCH, max(batches, 1), VOCAB)
        assert_one_line(error.value, path)
        return
    if batches:
        train_gpt.check_shards(str(path), BATCH, batches, VOCAB)
    with pytest.raises(train_gpt.InputError, match=f"has {batches} batches"):
        train_gpt.check_shards(str(path), BATCH, batches + 1, VOCAB)
    found = read_batches(path)
    assert len(found) == batches
    for i, batch in enumerate(found):
        assert_batch(batch, i, tokens)


@with_corners
@settings(fuzz, max_examples=60)
@given(files())
def test_a_run_begins_or_says_why_not(path, content):
    """The script ends with code 2 and one line. All shards here have too few tokens for a run."""
    path.write_bytes(content)
    stderr = io.StringIO()
    arguments = ["--track", "mini", f"--train_files={path}"]
    with contextlib.redirect_stderr(stderr):
        code = train_gpt.main(arguments)
    assert code == 2
    message = stderr.getvalue()
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert path.name in message
