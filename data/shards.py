"""
Reads and writes token shards. All data scripts use this module.

A shard is a file of 256 little-endian int32 (magic number 20240520, version 1, number of tokens,
zeros), followed by that many little-endian uint16 tokens. It is the format of llm.c and of the
NanoGPT speedruns.
"""

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np

from judge.commands import UserError
from judge.files import atomic_write

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024


@contextlib.contextmanager
def from_hub(what):
    """Turns any error of the `with` block, which downloads `what` from the Hugging Face hub, into a
    UserError."""
    try:
        yield
    except Exception as e:  # the hub's and its HTTP library's errors share no base class
        reason = " ".join(str(e).split())
        raise UserError(
            f"can't download {what} from the Hugging Face hub ({type(e).__name__}: {reason}); mend "
            "that (HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror), then run the same command again"
        ) from None


# -----------------------------------------------------------------------------
# Writing


def has_sha256(content, expected):
    return hashlib.sha256(content).hexdigest() == expected


def is_whole(path, sha256):
    return path.is_file() and has_sha256(path.read_bytes(), sha256)


def write_shard(path, tokens, sha256=None):
    """Writes a shard atomically, and missing folders.

    tokens: a list or 1-D array of 1 to 2^31 - 1 integers from 0 to 65535.
    sha256: the expected SHA-256 of the whole file. If it differs, raises UserError and writes nothing.
    """
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    content = header.tobytes() + np.asarray(tokens).astype("<u2").tobytes()
    if sha256 and not has_sha256(content, sha256):
        raise UserError(
            f"{path}: not written, because its SHA-256 would not be {sha256}; if you have changed the "
            "data scripts, undo that, otherwise please report this error"
        )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(Path(path)) as f:
        f.write(content)


def split_tokens(arrays, first_size, size):
    """Cuts a stream of uint16 arrays into shards, regardless of where the arrays end.

    Yields uint16 arrays: the first has first_size tokens, all others have `size` tokens. The last
    one may be shorter.
    """
    parts = []
    missing = first_size  # tokens of the current shard
    for array in arrays:
        # A full shard is yielded only when more tokens arrive, so that a stream that ends here doesn't
        # start an empty shard.
        while len(array) > missing:
            yield np.concatenate([*parts, array[:missing]])
            parts = []
            array = array[missing:]
            missing = size
        parts.append(array)
        missing -= len(array)
    if parts:
        yield np.concatenate(parts)


# -----------------------------------------------------------------------------
# Reading


def check_shard(path):
    """Returns the number of tokens of a shard. Raises UserError unless its header is valid and
    agrees with the file's size. The tokens aren't read."""
    header = np.fromfile(path, "<i4", 3).tolist()
    expected = [MAGIC, VERSION, (os.path.getsize(path) - HEADER_BYTES) / 2]
    if header != expected:
        raise UserError(
            f"{path} is cut off, or no token shard: its magic number, version and number of tokens are "
            f"{header}, not {expected}"
        )
    return header[2]


def read_shard(path, vocab_size=65536):
    """Returns all tokens of a shard, (count,) uint16. Raises UserError for a bad shard or a token
    that isn't below vocab_size."""
    check_shard(path)
    tokens = np.fromfile(path, "<u2", offset=HEADER_BYTES)
    last = tokens.max(initial=0)  # a shard may be empty
    if last >= vocab_size:
        raise UserError(f"{path} has token {last}, outside the vocabulary of {vocab_size}")
    return tokens
