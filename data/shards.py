"""
Reads and writes token shards. All data scripts use this module.

A shard is a file of 256 little-endian int32 (magic number 20240520, version 1, number of tokens,
zeros), followed by that many little-endian uint16 tokens. It is the format of llm.c and of the
NanoGPT speedruns.
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
    """A user error: printed as one line, without a traceback."""


# -----------------------------------------------------------------------------
# Error messages

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)


@contextlib.contextmanager
def writing(path, remedy="choose another folder with --out"):
    """Turns an OSError inside the `with` block into a ShardError that names the file `path`, the
    reason, and `remedy`, which says what the user can do."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e)
        if e.errno in DISK_FULL:
            remedy = "free some space and run the same command again"
        raise ShardError(f"{path}: cannot be written ({reason}); {remedy}") from None


def network_error(error):
    """Returns why the network can't be reached if that is what caused `error`, otherwise ""."""
    while error is not None:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
            return reason
        if isinstance(error, OSError) and error.errno in UNREACHABLE:
            return reason
        error = error.__cause__ or error.__context__
    return ""


def hub_unreachable(error, remedy="run the same command again"):
    """Returns a message for the user if `error` was caused by the network, otherwise "". `remedy`
    says what to do when the network works again."""
    reason = network_error(error)
    if not reason:
        return ""
    return (
        f"the Hugging Face hub cannot be reached ({reason}); check the network (set HTTPS_PROXY "
        f"to use a proxy, HF_ENDPOINT to use a mirror), then {remedy}"
    )


# -----------------------------------------------------------------------------
# Writing

@contextlib.contextmanager
def atomic_write(path):
    """Opens a binary file for writing. It is written to a temporary file, fsynced, and then
    renamed to `path`, so `path` is never incomplete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary file is in the same folder because a rename is atomic only within a file
    # system. Its name doesn't match *.bin, so no reader takes it for a shard. The name is chosen
    # here and not by tempfile, so that an interrupt can't come between creating and naming it.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_shard(path, tokens, sha256=None):
    """Writes a shard atomically.

    path: the file to write; missing folders are created.
    tokens: 1-D integer array or list with values from 0 to 65535.
    sha256: the expected SHA-256 of the whole file, as a hex string. If it differs, nothing is
        written.
    Raises ShardError.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ShardError(
            f"{path}: tokens must be a 1-D array of integers, not {tokens.ndim}-D {tokens.dtype}"
        )
    if not 0 < len(tokens) < 2**31:
        raise ShardError(f"{path}: a shard holds 1 to 2^31 - 1 tokens, not {len(tokens)}")
    if tokens.min() < 0 or tokens.max() > 65535:
        raise ShardError(
            f"{path}: tokens must be in 0..65535, but they span {tokens.min()}..{tokens.max()}"
        )
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[0] = MAGIC
    header[1] = VERSION
    header[2] = len(tokens)
    header = header.tobytes()
    body = np.ascontiguousarray(tokens, dtype="<u2").data
    if sha256 is not None:
        check_sha256(path, header, body, sha256)
    with writing(path), atomic_write(path) as f:
        f.write(header)
        f.write(body)


def check_sha256(path, header, body, expected):
    """Raises ShardError unless header + body has the SHA-256 `expected`."""
    found = hashlib.sha256(header)
    found.update(body)
    found = found.hexdigest()
    if found != expected:
        raise ShardError(
            f"{path}: not written, because its SHA-256 would be {found} instead of {expected}; if "
            "you have changed the data scripts, undo that, otherwise please report this error"
        )


def split_tokens(arrays, first_size, size):
    """Cuts a stream of uint16 arrays into shards, regardless of where the arrays end.

    Yields uint16 arrays: the first has first_size tokens, all others have `size` tokens. The last
    one may be shorter.
    """
    shard = np.empty(first_size, dtype=np.uint16)
    used = 0
    for array in arrays:
        while len(array):
            # A full shard is yielded only when more tokens arrive, so that a stream that ends
            # here doesn't start an empty shard.
            if used == len(shard):
                yield shard
                shard = np.empty(size, dtype=np.uint16)
                used = 0
            n = min(len(array), len(shard) - used)
            shard[used:used + n] = array[:n]
            used += n
            array = array[n:]
    if used:
        yield shard[:used]


# -----------------------------------------------------------------------------
# Reading

def check_shard(path):
    """Returns the number of tokens of a shard. Raises ShardError unless its header is valid and
    agrees with the file's size. The tokens aren't read."""
    if not os.path.isfile(path):
        raise ShardError(f"{path}: no such file")
    try:
        with open(path, "rb") as f:
            header = f.read(HEADER_BYTES)
            file_bytes = f.seek(0, os.SEEK_END)
    except OSError as e:
        raise ShardError(f"{path}: cannot be read ({e.strerror})") from None
    if len(header) < HEADER_BYTES:
        raise ShardError(
            f"{path}: too short for a shard header ({file_bytes} of {HEADER_BYTES} bytes)"
        )
    magic, version, count = np.frombuffer(header, dtype="<i4")[:3].tolist()
    if magic != MAGIC:
        raise ShardError(f"{path}: not a token shard (magic number {magic}, expected {MAGIC})")
    if version != VERSION:
        raise ShardError(f"{path}: shard version {version}, expected {VERSION}")
    if count < 1:
        raise ShardError(f"{path}: the header says {count} tokens, expected at least 1")
    expected_bytes = HEADER_BYTES + 2 * count
    if file_bytes != expected_bytes:
        raise ShardError(
            f"{path}: the header says {count} tokens ({expected_bytes} bytes), but the file has "
            f"{file_bytes} bytes"
        )
    return count


def read_shard(path, vocab_size=65536):
    """Returns all tokens of a shard, (count,) uint16. Raises ShardError for a bad shard or a token
    that isn't below vocab_size."""
    count = check_shard(path)
    tokens = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES)
    if len(tokens) != count:
        raise ShardError(f"{path}: the file changed while it was being read; run the same "
                         "command again")
    if tokens.max() >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        raise ShardError(
            f"{path}: token {tokens[position]} at position {position} is outside the vocabulary "
            f"of {vocab_size}; is it the data of another track?"
        )
    return tokens


# -----------------------------------------------------------------------------
# Running a script

def run_script(main, after_interrupt="run the same command again"):
    """Calls main(). A ShardError or OSError is printed as one line, with exit status 2. Ctrl-C ends the
    script with exit status 130 after temporary files are removed. after_interrupt tells the user what
    to do then. SIGTERM, with which the launcher ends its child processes, says nothing."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # print a question mark for a character that the terminal can't show
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except KeyboardInterrupt:
        print(f"interrupted; {after_interrupt}", file=sys.stderr)
        sys.exit(130)
    except (ShardError, OSError) as e:
        print("error:", " ".join(str(e).split()), file=sys.stderr)
        sys.exit(2)
