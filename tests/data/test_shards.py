"""
Tests of data/shards.py, and of the reader in train_gpt.py with the same damaged files.

The readers must accept exactly the complete shards. They must refuse all other files with an error of one
line.
"""

import hashlib
import itertools
import os
import struct
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import train_gpt
from data import shards
from judge.commands import UserError
from tests.util import shard_bytes

VOCAB = 257
BATCH = 4


# -----------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize("dtype", ["uint16", ">u2", "int64"])
def test_what_is_written_has_the_format_and_can_be_read(tmp_path, dtype):
    tokens = np.random.default_rng(1).integers(0, 65536, 3456).astype(dtype)[::3]
    path = tmp_path / "deep" / "folder" / "a.bin"
    shards.write_shard(path, tokens)
    assert path.read_bytes() == shard_bytes(tokens.tolist())
    assert shards.check_shard(path) == 1152
    assert shards.read_shard(path).tolist() == tokens.tolist()
    assert os.listdir(path.parent) == ["a.bin"]


def test_a_shard_with_another_checksum_is_not_written(tmp_path):
    expected = hashlib.sha256(shard_bytes([1, 2, 3])).hexdigest()
    message = "not written, because its SHA-256 .* please report this error$"
    with pytest.raises(UserError, match=message):
        shards.write_shard(tmp_path / "a.bin", [1, 2, 4], expected)
    assert os.listdir(tmp_path) == []
    shards.write_shard(tmp_path / "a.bin", [1, 2, 3], expected)


def test_interrupted_at_any_line_leaves_a_whole_shard(tmp_path):
    """Interrupts write_shard() at its first, second, ... line, as Ctrl-C does, also in the functions that
    it calls. SIGKILL would leave the shard that is there when the line begins."""
    path = tmp_path / "a.bin"
    old, new = shard_bytes([1] * 3), shard_bytes([2] * 4)
    path.write_bytes(old)
    before = sys.gettrace()
    for last in itertools.count():
        lines = itertools.count()

        def trace(frame, event, argument):
            assert path.read_bytes() in (old, new)
            if event == "line" and next(lines) == last:
                sys.settrace(before)  # don't interrupt the code that handles the interrupt
                raise KeyboardInterrupt
            return trace

        finished = False
        try:
            sys.settrace(trace)
            shards.write_shard(path, [2] * 4)
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert os.listdir(tmp_path) == ["a.bin"]
        if finished:
            break
    assert last > 30
    assert path.read_bytes() == new


# -----------------------------------------------------------------------------
# Reading


def rarely(usual, other):
    """Draws the usual value four times in five, otherwise one of `other`."""
    return st.integers(0, 4).flatmap(lambda n: other if n == 0 else st.just(usual))


@st.composite
def files(draw):
    """Draws a shard whose magic number, version, count, length or one of whose tokens may be wrong."""
    int32 = st.integers(-(2**31), 2**31 - 1)
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), max_size=40))
    if tokens:
        tokens[-1] = draw(rarely(tokens[-1], st.integers(0, 65535)))
    magic = draw(rarely(20240520, int32))
    version = draw(rarely(1, int32))
    count = draw(rarely(len(tokens), st.integers(-3, 45)))
    content = shard_bytes(tokens, magic, version, count)
    length = draw(rarely(len(content), st.integers(0, len(content))))
    return content[:length] + draw(rarely(b"", st.binary(max_size=6)))


def meaning(content):
    """The tokens of a shard by the definition of the format, or None if it isn't a shard."""
    if len(content) < 1024:
        return None
    magic, version, count = struct.unpack_from("<3i", content)
    if (magic, version) != (20240520, 1) or count < 0 or len(content) != 1024 + 2 * count:
        return None
    return list(struct.unpack_from(f"<{count}H", content, 1024))


# one folder serves all examples
fuzz = settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def refused(error, read, *arguments):
    with pytest.raises(error) as e:
        read(*arguments)
    assert "a.bin" in str(e.value)
    assert "\n" not in str(e.value)


@given(files())
@fuzz
def test_the_reader_of_the_data_scripts(tmp_path, content):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    tokens = meaning(content)
    if tokens is not None and max(tokens, default=0) < VOCAB:
        assert shards.check_shard(path) == len(tokens)
        assert shards.read_shard(path, VOCAB).tolist() == tokens
    else:
        refused(UserError, shards.read_shard, path, VOCAB)


@given(files())
@fuzz
def test_the_reader_of_trainings(tmp_path, content):
    """token_checksum() reads a shard before a run does. tests/training/test_generator.py compares the batches."""
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    tokens = meaning(content)
    batches = (len(tokens) - 1) // BATCH if tokens else 0
    used = tokens[: batches * BATCH + 1] if batches else []
    if tokens is None or max(used, default=0) >= VOCAB:
        steps = max(batches, 1)
        refused(train_gpt.InputError, train_gpt.token_checksum, str(path), BATCH, steps, VOCAB)
        return
    train_gpt.token_checksum(str(path), BATCH, batches, VOCAB)
    with pytest.raises(train_gpt.InputError, match=f"has {batches} batches"):
        train_gpt.token_checksum(str(path), BATCH, batches + 1, VOCAB)
