"""
Token shards: the one place where the data scripts read and write them.

A shard is a file of 256 little-endian int32 (magic 20240520, version 1, the number of tokens, zeros), followed
by that many little-endian uint16 tokens: the format of llm.c and of the NanoGPT speedruns.
"""
import contextlib
import errno
import hashlib
import os
import signal
import socket
import sys
import uuid
from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


class ShardError(Exception):
    """A shard, or what should become one, is not as it must be; the message is one line."""

# -----------------------------------------------------------------------------
# Errors in one line

FULL = (errno.ENOSPC, errno.EDQUOT)
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


@contextlib.contextmanager
def writing(path, remedy="choose another folder with --out"):
    """An OSError inside becomes a ShardError that says which file cannot be written, why, and what to do."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e)
        if e.errno in FULL:
            remedy = "free some space, and run the same command again"
        raise ShardError(f"{path}: cannot be written ({reason}); {remedy}") from None


def hub_unreachable(error):
    """What to say of an exception that goes back to a network that cannot be reached; "" for all others."""
    reason = network_error(error)
    if not reason:
        return ""
    return (f"the Hugging Face hub cannot be reached ({reason}); check the network (HTTPS_PROXY names a proxy, "
            "HF_ENDPOINT a mirror), then run the same command again")


def network_error(error):
    """Why the network cannot be reached, where an exception goes back to that; "" for all others."""
    while error is not None:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
            return reason
        if isinstance(error, OSError) and error.errno in UNREACHABLE:
            return reason
        error = error.__cause__ or error.__context__
    return ""

# -----------------------------------------------------------------------------
# Writing

@contextlib.contextmanager
def atomic_write(path):
    """Open a file for writing bytes that takes the name `path` only when it is complete and on the disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # the same folder: a rename is atomic only within a file system; the suffix keeps it out of *.bin patterns
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:  # named before it is made (tempfile names what it has made): an interrupt finds nothing that has no name here
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_shard(path, tokens, sha256=None):
    """Write tokens, a 1-D integer array with values in 0..65535, as one shard. Raises ShardError.

    sha256: what the file's SHA-256 must be, where it is known beforehand; with any other, nothing is written.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ShardError(f"{path}: tokens must be a 1-D array of integers, not {tokens.ndim}-D {tokens.dtype}")
    if not 0 < len(tokens) < 2**31:
        raise ShardError(f"{path}: a shard holds 1 to 2^31 - 1 tokens, not {len(tokens)}")
    if tokens.min() < 0 or tokens.max() > 65535:
        raise ShardError(f"{path}: tokens must be in 0..65535, but they span {tokens.min()}..{tokens.max()}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    content = header.tobytes(), np.ascontiguousarray(tokens, dtype="<u2").data
    if sha256 is not None:
        found = hashlib.sha256(content[0])
        found.update(content[1])
        if found.hexdigest() != sha256:
            raise ShardError(f"{path}: not written, SHA-256 would be {found.hexdigest()}, expected {sha256}")
    with writing(path), atomic_write(path) as f:
        f.writelines(content)


def split_tokens(arrays, first_size, size):
    """Cut a stream of uint16 arrays into shards, across the arrays' ends.

    Yields uint16 arrays: one of first_size tokens, then all others of size tokens; the last may be shorter.
    """
    shard, used = np.empty(first_size, dtype=np.uint16), 0
    for array in arrays:
        while len(array):
            if used == len(shard):  # only now, so that a stream which ends here leaves no empty shard behind
                yield shard
                shard, used = np.empty(size, dtype=np.uint16), 0
            n = min(len(array), len(shard) - used)
            shard[used:used + n] = array[:n]
            used += n
            array = array[n:]
    if used:
        yield shard[:used]

# -----------------------------------------------------------------------------
# Reading

def check_shard(path):
    """The number of tokens in a shard, from a header that agrees with the file's size. Raises ShardError."""
    if not os.path.isfile(path):
        raise ShardError(f"{path}: no such file")
    try:
        with open(path, "rb") as f:
            header, file_bytes = f.read(HEADER_BYTES), f.seek(0, os.SEEK_END)
    except OSError as e:
        raise ShardError(f"{path}: cannot be read ({e.strerror})") from None
    if len(header) < HEADER_BYTES:
        raise ShardError(f"{path}: too short for a shard header ({file_bytes} bytes of {HEADER_BYTES})")
    magic, version, count = (int(x) for x in np.frombuffer(header, dtype="<i4")[:3])
    if magic != MAGIC:
        raise ShardError(f"{path}: not a token shard (magic number {magic}, expected {MAGIC})")
    if version != VERSION:
        raise ShardError(f"{path}: shard version {version}, expected {VERSION}")
    if count < 1:
        raise ShardError(f"{path}: the header promises {count} tokens, expected at least 1")
    if file_bytes != HEADER_BYTES + 2 * count:
        raise ShardError(f"{path}: the header promises {count} tokens ({HEADER_BYTES + 2 * count} bytes), "
                         f"but the file has {file_bytes} bytes")
    return count


def read_shard(path, vocab_size=65536):
    """All tokens of a shard, (count,) uint16, each below vocab_size. Raises ShardError."""
    count = check_shard(path)
    tokens = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES)
    if len(tokens) != count:
        raise ShardError(f"{path}: changed while it was being read")
    if tokens.max() >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        raise ShardError(f"{path}: token {tokens[at]} at position {at} is outside the vocabulary of {vocab_size}")
    return tokens

# -----------------------------------------------------------------------------
# Running

def run_script(main):
    """Call a script's main(); what its user can put right ends in one line and exit status 2, no traceback."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill cleans up as Ctrl-C does
    sys.stdout.reconfigure(errors="replace")  # a character that the terminal's encoding lacks is no error
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted: every shard that is there is whole", file=sys.stderr)
        sys.exit(130)
    except (ShardError, OSError) as e:
        print("error:", " ".join(str(e).split()), file=sys.stderr)
        sys.exit(2)
