"""
Tests of evals/.

They compare the forward passes with a cache with those of the training scripts, and the HellaSwag
scores with hand-made answers and with transformers. A local server takes the place of the Hugging
Face hub.
"""
import contextlib
import dataclasses
import http.server
import json
import math
import pickle
import sys
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from util import ROOT, run_forked, run_script

sys.path[:0] = [str(ROOT / "evals"), str(ROOT / "baseline")]
import hellaswag_scoring
import models
import train_gpt
import train_gpt2
from models import Cache, Checkpoint, InputError

SAMPLE = ROOT / "evals" / "sample.py"
HELLASWAG = ROOT / "evals" / "hellaswag.py"
GPT2_BYTES = train_gpt2.GPTConfig(
    block_size=64,
    vocab_size=257,
    padded_vocab_size=320,
    n_layer=2,
    n_head=2,
    n_embd=32,
)
SPEEDRUN = replace(
    train_gpt.TRACKS["mini"],
    num_layers=5,
    num_heads=2,
    head_dim=16,
    model_dim=32,
    num_value_embeds=2,
    attn_free_layers=(2,),
    long_window_layers=(0, 4),
    max_window=512,
    train_seq_len=256,
    val_seq_len=1024,
    val_tokens=1024,
    xsa=True,
    smear=True,
    relu_slope=0.5,
)
PLAIN = dict(xsa=False, smear=False, relu_slope=0.0)  # as in fineweb


@torch.no_grad()
def randomized(model):
    """
    Gives every weight a random value, so that a swap of two weights would be noticed.

    The logits are far enough apart for a clear greedy choice.
    """
    rng = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        values = torch.randn(p.shape, generator=rng)
        if p.ndim < 2:
            p.copy_(0.5 + 0.3 * values)
        elif "wte" in name:  # shared with the head: large values make each token predict itself
            p.copy_(0.1 * values)
        elif "emb" in name or "wpe" in name:
            p.copy_(values)
        else:
            p.copy_(p.size(-1) ** -0.5 * values)
    return model.eval()


def gpt2_checkpoint():
    model = randomized(train_gpt2.GPT(GPT2_BYTES))
    return models.gpt2_checkpoint(model, train_gpt2.codec(257), "cpu")


def speedrun_checkpoint(hp=SPEEDRUN):
    model = randomized(train_gpt.GPT(hp, torch.float32))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return models.speedrun_checkpoint(model, train_gpt2.codec(257), "cpu")


CHECKPOINTS = {"gpt2": gpt2_checkpoint, "speedrun": speedrun_checkpoint}
SETTINGS = {"gpt2": dataclasses.asdict(GPT2_BYTES), "speedrun": dataclasses.asdict(SPEEDRUN)}
METADATA_KEY = {"gpt2": "config", "speedrun": "hyperparameters"}


def text(batch, length, eot_every=50):
    ids = torch.randint(0, 256, (batch, length))
    ids[torch.rand(batch, length) < 1 / eot_every] = 256
    return ids


def metadata_of(name, **changes):
    settings = SETTINGS[name] | changes
    return {"model": name, METADATA_KEY[name]: json.dumps(settings)}


def save(name, folder, **changes):
    """Saves a random model. Returns the path of its model.safetensors."""
    model = CHECKPOINTS[name]().model
    path = folder / "model.safetensors"
    if name == "gpt2":
        train_gpt2.save_model(model, path)
    else:
        save_file(model.state_dict(), path, metadata_of(name, **changes))
    return path


# -----------------------------------------------------------------------------
# Forward passes and decoding

@torch.no_grad()
def test_gpt2_forward_is_the_models_own():
    checkpoint = gpt2_checkpoint()
    ids = text(3, 64)
    logits = models.gpt2_forward(checkpoint.model, ids)
    torch.testing.assert_close(logits, checkpoint.model(ids), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("max_window, long_layers, free_layers, changes", [
    (512, (0, 4), (2,), {}),
    (512, (0, 4), (2,), PLAIN),
    (256, (0, 1, 2, 3, 4), (), {}),
    (1024, (1,), (0, 4), PLAIN),
    (128, (), (), {}),
])
def test_speedrun_forward_is_the_models_own(max_window, long_layers, free_layers, changes):
    hp = replace(
        SPEEDRUN,
        max_window=max_window,
        long_window_layers=long_layers,
        attn_free_layers=free_layers,
        **changes,
    )
    model = speedrun_checkpoint(hp).model
    ids = text(2, 897)
    inputs = ids[:, :-1]
    targets = ids[:, 1:]
    window = train_gpt.get_window_blocks(hp.num_iterations, hp)
    window = torch.tensor(window, dtype=torch.int32)
    logits = models.speedrun_forward(model, inputs)
    for row in range(2):  # one by one, because a mean over both would hide a swap
        expected = model(inputs[row:row + 1].int(), targets[row:row + 1], window).item()
        loss = F.cross_entropy(logits[row], targets[row]).item()
        assert loss == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_cached_logits_are_those_of_the_whole_text(name):
    checkpoint = CHECKPOINTS[name]()
    length = min(checkpoint.context, 700)
    ids = text(2, length)
    whole = checkpoint.forward(checkpoint.model, ids)
    sizes = [1, 20, 1, 1, 30]
    if name == "speedrun":
        sizes += [300, 31, 1, 1, 250]
    sizes += [1] * 99
    cache = Cache(checkpoint.cache_shape, 2, length, ids.device)
    parts = []
    start = 0
    for size in sizes:
        part = ids[:, start:start + size]
        if part.size(1):
            parts.append(checkpoint.forward(checkpoint.model, part, cache))
        start += size
    parts = torch.cat(parts, dim=1)
    torch.testing.assert_close(parts, whole[:, :parts.size(1)], rtol=1e-3, atol=1e-3)
    last = checkpoint.forward(checkpoint.model, ids, last_only=True)
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-3, atol=1e-3)


def greedy(checkpoint, prompt, n, use_cache):
    """Generates n tokens greedily. Returns a tensor (n, B)."""
    tokens = models.generate(checkpoint, prompt, n, temperature=0, use_cache=use_cache)
    return torch.stack(list(tokens))


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("prompt_length, max_tokens", [(1, 60), (10, 100), (250, 20)])
def test_greedy_decoding_with_and_without_cache(name, prompt_length, max_tokens):
    """Some texts exceed GPT-2's context of 64 tokens. The prompts have end-of-text tokens."""
    checkpoint = CHECKPOINTS[name]()
    prompt = text(3, prompt_length, eot_every=8)
    cached = greedy(checkpoint, prompt, max_tokens, use_cache=True)
    assert torch.equal(cached, greedy(checkpoint, prompt, max_tokens, use_cache=False))
    assert cached.shape == (max_tokens, 3)
    assert len(cached.unique()) > 3, "the text only repeats itself, so the comparison says nothing"
    if name == "gpt2" and prompt_length + max_tokens <= 64:  # the training script can do it, too
        whole = checkpoint.model.generate(prompt, max_tokens, temperature=0)
        assert torch.equal(cached.T, whole[:, prompt_length:])


def test_speedrun_context_restarts_alike():
    checkpoint = speedrun_checkpoint()
    checkpoint.context = 150
    prompt = text(2, 100)
    cached = greedy(checkpoint, prompt, 200, use_cache=True)
    assert torch.equal(cached, greedy(checkpoint, prompt, 200, use_cache=False))


@pytest.mark.parametrize("name, max_tokens, layers, most_keys", [
    ("gpt2", 50, 2, 59),
    ("speedrun", 900, 4, 512),  # one of the five layers has no attention
])
def test_a_token_costs_one_query(name, max_tokens, layers, most_keys, monkeypatch):
    """
    With a cache, each step after the first runs the layers on one token.

    Its query sees no more keys than the window has.
    """
    checkpoint = CHECKPOINTS[name]()
    attention = F.scaled_dot_product_attention
    queries = []
    keys = []

    def counting(q, k, v, **options):
        queries.append(q.size(2))
        keys.append(k.size(2))
        return attention(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    list(models.generate(checkpoint, text(1, 10), max_tokens))
    assert queries[:layers] == keys[:layers] == [10] * layers
    assert set(queries[layers:]) == {1}
    assert max(keys) == most_keys


def test_sampling_follows_the_distribution():
    """
    Tokens are as frequent as the softmax of the top_k logits at that temperature says.

    Padding tokens never occur.
    """
    logits = torch.full((1, 1, 320), 9.0)
    logits[..., :257] = torch.linspace(-1, 1, 257)[torch.randperm(257)]

    def forward(model, ids, cache=None, last_only=False):
        return logits.expand(len(ids), 1, 320)

    checkpoint = Checkpoint(torch.nn.Linear(1, 1), forward, (1, 1, 1), 64, 257, 256, None, None)
    prompt = torch.zeros(20_000, 1, dtype=torch.int64)

    def draw(temperature, top_k):
        rng = torch.Generator().manual_seed(0)
        return next(models.generate(checkpoint, prompt, 1, temperature, top_k, rng))

    drawn = draw(0.7, 5)
    top, ids = (logits[0, 0, :257] / 0.7).topk(5)
    frequency = torch.bincount(drawn, minlength=257) / 20_000
    torch.testing.assert_close(frequency[ids], top.softmax(-1), atol=0.02, rtol=0)
    assert frequency[ids].sum() == 1
    assert draw(1.0, 0).unique().numel() == 257
    assert torch.equal(drawn, draw(0.7, 5))


# -----------------------------------------------------------------------------
# Saved models

@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_load(name, tmp_path):
    checkpoint = CHECKPOINTS[name]()
    path = save(name, tmp_path)
    ids = text(1, 20)
    for given in (path, tmp_path):
        loaded = models.load(str(given))
        weights = loaded.model.state_dict()
        for key, weight in checkpoint.model.state_dict().items():
            assert torch.equal(weights[key], weight), key
        assert (loaded.vocab_size, loaded.eot) == (257, 256)
        assert loaded.context == checkpoint.context
        with torch.no_grad():
            logits = loaded.forward(loaded.model, ids)
            assert torch.equal(logits, checkpoint.forward(checkpoint.model, ids))


def test_bfloat16_embeddings_are_evaluated_in_float32(tmp_path):
    model = train_gpt.GPT(SPEEDRUN, torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path, metadata_of("speedrun"))
    weight = models.load(str(path)).model.embed.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, model.embed.weight.float())


def test_old_models_without_ngrams_load(tmp_path):
    """Earlier versions of train_gpt.py had n-gram embeddings, and saved two more settings."""
    path = save("speedrun", tmp_path, max_ngram=1, ngram_rows=65536)
    assert models.load(str(path)).model.hp.num_layers == 5


def test_old_models_with_ngrams_are_refused(tmp_path):
    path = save("speedrun", tmp_path, max_ngram=5, ngram_rows=32768)
    with pytest.raises(InputError, match=r"n-gram embeddings \(max_ngram 5\)") as e:
        models.load(str(path))
    assert str(e.value).startswith(f"{path}: ")
    assert "\n" not in str(e.value)


WIDTH = {"gpt2": "n_embd", "speedrun": "model_dim"}
LAYERS = {"gpt2": "n_layer", "speedrun": "num_layers"}
MATRIX = {"gpt2": "h.0.mlp.c_fc.weight", "speedrun": "blocks.0.mlp.c_fc.weight"}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_wrong_checkpoints_are_refused(name, tmp_path):
    path = save(name, tmp_path)
    good = load_file(path)
    matrix = MATRIX[name]
    width = WIDTH[name]
    key = METADATA_KEY[name]

    def refused(message, tensors=good, metadata=None, **changes):
        save_file(tensors, path, metadata or metadata_of(name, **changes))
        with pytest.raises(InputError, match=message) as e:
            models.load(str(path))
        text = str(e.value)
        assert "\n" not in text
        remedies = ("copy it again", "or train the model again", "use a model.safetensors that one")
        assert any(words in text for words in remedies) or f"{width} 0" in text

    without_matrix = dict(good)
    del without_matrix[matrix]
    refused(f"{matrix} has shape", good | {matrix: torch.zeros(7, 7)})
    refused(f"{matrix} is missing", without_matrix)
    refused("tensor extra is not part of the model", good | {"extra": torch.zeros(1)})
    refused("has shape", **{width: 64})
    refused("says 1000000000 layers, but the file has only", **{LAYERS[name]: 10**9})
    refused(f"{width} = 'wide'", **{width: "wide"})
    refused(f"{width} = True", **{width: True})
    refused(f"{width} = \\(1, 2\\)", **{width: [1, 2]})
    refused("another version", new_field=1)
    refused(f"impossible model sizes|{width} 0", **{width: 0})
    refused("not a JSON object", metadata={"model": name, key: "[1"})
    refused("not a JSON object", metadata={"model": name, key: "3"})
    refused("names no model", metadata={"format": "pt"})
    refused("names no model", metadata={"model": "resnet"})


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_files_that_are_no_checkpoints(tmp_path):
    bomb = Bomb(tmp_path / "exploded")
    path = save("gpt2", tmp_path)
    cut = path.read_bytes()[:-100]
    for content in (pickle.dumps(bomb), b"", b"\xff" * 100, cut):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a complete safetensors file"):
            models.load(str(path))
    torch.save(bomb, path)
    with pytest.raises(InputError, match="not a complete safetensors file"):
        models.load(str(path))
    assert not (tmp_path / "exploded").exists()
    nothing = tmp_path / "nothing"
    with pytest.raises(InputError, match=f"{nothing}: no such file; use a model.safetensors, its"):
        models.load(str(nothing))
    path.unlink()
    with pytest.raises(InputError, match=f"{path}: no such file; use a model.safetensors, its"):
        models.load(str(tmp_path))


def test_a_vocabulary_without_text(tmp_path):
    """The message gives no advice about training."""
    model = train_gpt2.GPT(replace(GPT2_BYTES, vocab_size=300))
    train_gpt2.save_model(model, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="tokens of a vocabulary of 300 can't be") as e:
        models.load(str(tmp_path))
    assert str(e.value).endswith("257 tokens (bytes) or 50257 tokens (GPT-2's)")


# -----------------------------------------------------------------------------
# sample.py

def test_sample_from_the_command_line(tmp_path):
    save("gpt2", tmp_path)
    args = [tmp_path, "--n", 3, "--max_tokens", 40, "--prompt", "Ay, é", "--seed", 7]
    first = run_script(args, cwd=tmp_path, script=SAMPLE)
    second = run_forked(args, cwd=tmp_path, script=SAMPLE)
    for result in (first, second):
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
    assert first.stdout == second.stdout
    for i in (1, 2, 3):
        assert f"[{i}/3] Ay, é" in first.stdout
    assert all(c.isprintable() or c in "\n\t" for c in first.stdout)

    one = run_forked([tmp_path, "--n", 1, "--prompt", "Ay"], cwd=tmp_path, script=SAMPLE)
    assert one.returncode == 0
    assert one.stdout.startswith("Ay")
    bad = run_forked([tmp_path, "--temperature", -1], cwd=tmp_path, script=SAMPLE)
    assert bad.returncode == 2
    assert bad.stderr == "error: --temperature must be at least 0, not -1.0\n"


@pytest.mark.parametrize("option, value, message", [
    ("--seed", "99999999999999999999999", "at most 18446744073709551615, not 999999999999999999"),
    ("--seed", "-9223372036854775809", "at least -9223372036854775808, not -922337203685477580"),
    ("--temperature", "1e-40", "0 or at least 1e-06, not 1e-40"),
    ("--temperature", "nan", "at least 0, not nan"),
    ("--temperature", "inf", "at most 1000000.0, not inf"),
    ("--max_tokens", "1000000000000", "at most 100000, not 1000000000000"),
    ("--max_tokens", "0", "at least 1, not 0"),
    ("--n", "1000000000000", "at most 10000, not 1000000000000"),
    ("--top_k", "-1", "at least 0, not -1"),
])
def test_impossible_options(monkeypatch, option, value, message):
    """They are refused before the model is read. Here, there is none."""
    import sample
    monkeypatch.setattr(sys, "argv", ["sample.py", "nothing", f"{option}={value}"])
    with pytest.raises(InputError) as e:
        sample.main()
    assert str(e.value).startswith(f"{option} must be {message}")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("options", [
    ["--seed", str(2**64 - 1)],
    ["--seed", str(-2**63)],
    ["--temperature", "1e-6"],
    ["--temperature", "1e6", "--top_k", str(10**30)],
])
def test_extreme_options(tmp_path, monkeypatch, capsys, options):
    import sample
    save("gpt2", tmp_path)
    arguments = [str(tmp_path), "--n", "1", "--prompt", "Hi", "--device", "cpu", *options]
    monkeypatch.setattr(sys, "argv", ["sample.py", *arguments])
    sample.main()
    assert capsys.readouterr().out.startswith("Hi")


def test_samples_are_the_generators_tokens(tmp_path, monkeypatch, capsys):
    """The script prints the decoded bytes that generate() yields, up to an end-of-text token."""
    import sample
    checkpoint = speedrun_checkpoint()
    save("speedrun", tmp_path)
    tokens = greedy(checkpoint, torch.tensor([[256, 72, 105]]), 30, use_cache=True)[:, 0].tolist()
    if 256 in tokens:
        tokens = tokens[:tokens.index(256)]
    expected = sample.printable(bytes(tokens).decode(errors="replace"))
    options = ["--prompt", "Hi", "--max_tokens", "30", "--temperature", "0", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["sample.py", str(tmp_path), "--n", "1", *options])
    sample.main()
    assert capsys.readouterr().out == f"Hi{expected}\n"


def test_a_text_ends_at_end_of_text(tmp_path, monkeypatch, capsys):
    """
    A text can have characters of several tokens, and control characters.

    It can also end within a character, because of max_tokens.
    """
    import sample
    save("speedrun", tmp_path)
    steps = [[0xC3, 65], [0xA9, 256], [27, 66], [0xE2, 67]]
    steps = [torch.tensor(step) for step in steps]
    monkeypatch.setattr(sample, "generate", lambda *_: iter(steps))
    options = ["--prompt", "Hi", "--n", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["sample.py", str(tmp_path), *options])
    sample.main()
    assert capsys.readouterr().out == "[1/2] Hi\u00e9\ufffd\ufffd\n\n[2/2] HiA\n"


def test_offline_nothing_is_downloaded(tmp_path, monkeypatch, capsys):
    """With --offline, missing files are an error: GPT-2's vocabulary, or OpenAI's weights."""
    import sample
    sys.path.append(str(ROOT / "data"))
    import gpt2_bpe
    gpt2_bpe.fetch_vocabulary()  # in the second half, only the weights may be missing

    def never(*_):
        raise AssertionError("sample.py tries to download something")

    config = replace(GPT2_BYTES, vocab_size=50257, padded_vocab_size=50257)
    train_gpt2.save_model(train_gpt2.GPT(config), tmp_path / "model.safetensors")
    monkeypatch.setattr(gpt2_bpe, "CACHE", tmp_path / "empty")
    monkeypatch.setattr(gpt2_bpe, "download_vocabulary", never)
    monkeypatch.setattr(gpt2_bpe, "open_wheel", never)
    monkeypatch.setattr(sys, "argv", ["sample.py", str(tmp_path), "--offline"])
    with pytest.raises(InputError, match="cannot load GPT-2's vocabulary: .*--offline") as e:
        sample.main()
    assert "\n" not in str(e.value)
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    weights = run_forked(["gpt2", "--offline"], cwd=tmp_path, script=SAMPLE, **settings)
    assert weights.returncode == 2
    assert weights.stderr == "error: gpt2 is not in the hub's cache; run without --offline\n"


# -----------------------------------------------------------------------------
# HellaSwag

def bigram(table):
    """Returns a logits_fn. The loss of token b after token a is -log(table[a][b])."""
    logits = torch.tensor(table).log()

    def logits_fn(ids):
        return logits[ids.clamp_max(len(table) - 1)]

    return logits_fn


def words(text):
    return [int(word) for word in text.split()]


def test_endings_are_scored_as_by_hand():
    logits_fn = bigram([
        [1e-9, 1 / 2, 1 / 4, 1 / 4],
        [1e-9, 7 / 8, 1 / 8, 1e-9],
        [1 / 4] * 4,
        [1 / 4] * 4,
    ])
    item = {"ctx": "3 0", "endings": ["1", "1 1 1 1", "3", "1 2"], "label": 0}
    rows = hellaswag_scoring.tokenize(item, words, context=10)
    assert rows == [([3, 0, 1], 1), ([3, 0, 1, 1, 1, 1], 4), ([3, 0, 3], 1), ([3, 0, 1, 2], 2)]
    sums, means = hellaswag_scoring.ending_losses(logits_fn, rows, 4, "cpu")
    # The sums are 0.69, 1.09, 1.39 and 2.77; the means are 0.69, 0.27, 1.39 and 1.39
    expected = torch.tensor([
        math.log(2),
        math.log(2) + 3 * math.log(8 / 7),
        math.log(4),
        math.log(2) + math.log(8),
    ])
    lengths = torch.tensor([1, 4, 1, 2])
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(means, expected / lengths, rtol=1e-5, atol=1e-6)

    def count(labels):
        items = [item | {"label": label} for label in labels]
        return hellaswag_scoring.score(logits_fn, items, words, 4, 10, "cpu")

    assert count([0]) == [1, 1, 0]
    assert count([1]) == [1, 0, 1]
    assert count([2, 3, 0, 1, 1]) == [5, 1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_has_no_score(bad):
    """The lowest of four losses of NaN would be the first one."""
    logits = torch.zeros(8, 8)
    logits[7] = bad

    def logits_fn(ids):
        return logits[ids]

    good = {"ctx": "1 2", "endings": ["1", "2", "3", "4"], "label": 0}
    worse = good | {"endings": ["1", "7 2", "3", "4"]}
    assert hellaswag_scoring.score(logits_fn, [good], words, 8, 10, "cpu") == [1, 1, 1]
    message = "^the model's loss is not finite for 1 of 8 endings, so it has no accuracy; check that"
    with pytest.raises(hellaswag_scoring.DataError, match=message):
        hellaswag_scoring.score(logits_fn, [good, worse], words, 8, 10, "cpu")


def test_what_is_too_long_loses_its_beginning():
    item = {"ctx": "1 2 3", "endings": ["4", "4 5 6 7 8 9", "4", "4"], "label": 0}
    rows = hellaswag_scoring.tokenize(item, words, context=3)
    assert rows[0] == ([1, 2, 3, 4], 1)
    assert rows[1] == ([6, 7, 8, 9], 3)


def test_padding_and_other_vocabulary_rows_do_not_count():
    rows = [([5, 6, 7], 1), (list(range(8)), 3), ([9, 9], 1)]
    table = torch.randn(10, 16)
    sums, _ = hellaswag_scoring.ending_losses(lambda ids: table[ids], rows, 10, "cpu")
    for (row, n), found in zip(rows, sums.tolist()):
        logits = table[row[:-1], :10][-n:]
        expected = F.cross_entropy(logits, torch.tensor(row[-n:]), reduction="sum").item()
        assert found == pytest.approx(expected, rel=1e-5)


def random_items(n):
    sentences = "A man is sitting on a roof. He starts pulling up shingles, then he waves below"
    pieces = sentences.split()
    rng = torch.Generator().manual_seed(1)

    def draw(length):
        chosen = torch.randint(len(pieces), (length,), generator=rng).tolist()
        return " ".join(pieces[i] for i in chosen)

    items = []
    for i in range(n):
        context = draw(3 + i % 7)
        endings = [draw(1 + (i + j) % 5) for j in range(4)]
        items.append({"ctx": context, "endings": endings, "label": i % 4})
    return items


def transformers_losses(model, item):
    """
    The sum and the mean of the loss of each ending, a tensor (4, 2).

    Each ending is evaluated alone and without padding. Labels of -100 leave out the context.
    """
    context = list(item["ctx"].encode())
    losses = []
    for ending in item["endings"]:
        tokens = list(f" {ending}".encode())
        ids = torch.tensor([context + tokens])
        labels = torch.tensor([[-100] * len(context) + tokens])
        mean = model(ids, labels=labels).loss.item()
        losses.append([mean * len(tokens), mean])
    return torch.tensor(losses)


@torch.no_grad()
def test_scores_are_those_of_transformers(tmp_path):
    config = GPT2Config(vocab_size=257, n_positions=128, n_layer=2, n_head=2, n_embd=32)
    theirs = GPT2LMHeadModel(config).eval()
    for p in theirs.parameters():
        p.normal_(std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = train_gpt2.GPT(train_gpt2.GPTConfig(128, 257, 257, 2, 2, 32))
    train_gpt2.load_openai_weights(ours, tmp_path / "model.safetensors")
    encode, _ = train_gpt2.codec(257)

    def logits_fn(ids):
        return models.gpt2_forward(ours, ids)

    items = random_items(24)
    right = torch.zeros(2, dtype=torch.int64)  # by sum and by mean
    for item in items:
        expected = transformers_losses(theirs, item)
        rows = hellaswag_scoring.tokenize(item, encode, 128)
        found = hellaswag_scoring.ending_losses(logits_fn, rows, 257, "cpu")
        torch.testing.assert_close(torch.stack(found, 1), expected, rtol=1e-4, atol=1e-4)
        right += expected.argmin(0) == item["label"]
    for batch_tokens in (1, 500, 100_000):
        counts = hellaswag_scoring.score(
            logits_fn, items, encode, 257, 128, "cpu", batch_tokens=batch_tokens
        )
        assert counts == [24, *right.tolist()]


def test_summary_has_standard_errors():
    line = "acc:0.2859 +- 0.0045 acc_norm:0.2955 +- 0.0046 items:10042"
    assert hellaswag_scoring.summary([10_042, 2871, 2967]) == line


def make_items():
    """Rows like those on the hub, whose labels are strings."""
    rows = []
    for i in range(13):
        endings = ["here", "there and back", "gone now", "it"]
        row = {"ind": i, "ctx": f"A man number {i} is", "endings": endings, "label": str(i % 4)}
        rows.append(row)
    return rows


def write_items(folder):
    import pyarrow
    import pyarrow.parquet
    lines = []
    for row in make_items():
        lines.append(json.dumps(row | {"label": int(row["label"])}) + "\n")
    (folder / "items.jsonl").write_text("".join(lines))
    table = pyarrow.Table.from_pylist(make_items())
    pyarrow.parquet.write_table(table, folder / "items.parquet")


def test_items_from_parquet_and_jsonl(tmp_path):
    write_items(tmp_path)
    expected = []
    for row in make_items():
        item = {"ctx": row["ctx"], "endings": row["endings"], "label": int(row["label"])}
        expected.append(item)
    for name in ("items.parquet", "items.jsonl"):
        assert hellaswag_scoring.load_items(tmp_path / name) == expected
        assert hellaswag_scoring.load_items(tmp_path / name, limit=5) == expected[:5]


def test_a_line_of_jsonl_ends_at_a_newline_only(tmp_path):
    """JSON allows Unicode's line separators inside a text."""
    rows = [row | {"ctx": "a\u2028b\u0085c\u2029d"} for row in make_items()]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path = tmp_path / "items.jsonl"
    path.write_bytes("\r\n".join(lines).encode())
    items = hellaswag_scoring.load_items(path)
    assert [item["ctx"] for item in items] == ["a\u2028b\u0085c\u2029d"] * 13


@pytest.mark.parametrize("name, content, message", [
    ("bad.jsonl", b"{", "can't be read as HellaSwag items"),
    ("bad.jsonl", b"\xff\xfe", "can't be read as HellaSwag items"),
    ("bad.jsonl", b"", "no items"),
    ("bad.jsonl", b'{"ctx": "a", "endings": ["b"], "label": 0}', "item 1 must have"),
    ("bad.jsonl", b"[]", "item 1 must have"),
    ("bad.jsonl", b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "item 1 must have"),
    ("bad.jsonl", b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": ""}', "item 1 must have"),
    ("bad.jsonl", b'{"ctx": 5, "endings": ["b", "c", "d", "e"], "label": 0}', "item 1 must have"),
    ("bad.jsonl", b'{"ctx": ["a"], "endings": ["b", "c", "d", "e"], "label": 0}', "item 1 must"),
    ("bad.jsonl", b'{"ctx": "a", "endings": [1, 2, 3, 4], "label": 0}', "item 1 must have"),
    ("bad.jsonl", b'{"ctx": "a", "endings": ["b", "c", "d", ""], "label": 0}', "item 1 must have"),
    ("bad.jsonl", b'{"ctx": "a", "endings": "bcde", "label": 0}', "item 1 must have"),
    ("bad.jsonl", b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1e999}', "item 1 must"),
    ("bad.jsonl", b"[]\n\n{", "line 3 is not JSON: Expecting property name"),
    ("bad.parquet", b"PAR1", "can't be read as HellaSwag items"),
])
def test_bad_items(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(hellaswag_scoring.DataError, match=message) as e:
        hellaswag_scoring.load_items(path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("beginning", ["[", '{"ctx": ['])
def test_deeply_nested_items(tmp_path, beginning):
    path = tmp_path / "bad.jsonl"
    path.write_text("[]\n\n" + 100_000 * beginning)
    message = "bad.jsonl: can't be read as HellaSwag items .line 3 is not JSON: maximum recursion"
    with pytest.raises(hellaswag_scoring.DataError, match=message):
        hellaswag_scoring.load_items(path)


def test_a_bad_item_is_one_line(tmp_path):
    save("speedrun", tmp_path)
    path = tmp_path / "items.jsonl"
    path.write_text('{"ctx": 5, "endings": ["b", "c", "d", "e"], "label": 0}')
    result = run_forked([tmp_path, "--data", path], cwd=tmp_path, script=HELLASWAG)
    assert result.returncode == 2
    message = f"error: {path}: item 1 must have a context, four endings and a label from 0 to 3\n"
    assert result.stderr == message


def test_pyarrow_is_missing(tmp_path, monkeypatch):
    write_items(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # importing it fails
    message = "HellaSwag needs pyarrow .*; run pip install -r evals/requirements.txt$"
    with pytest.raises(hellaswag_scoring.DataError, match=message):
        hellaswag_scoring.load_items(tmp_path / "items.parquet")
    assert len(hellaswag_scoring.load_items(tmp_path / "items.jsonl")) == 13


def test_a_failed_download_of_the_items(tmp_path):
    """--data is an option of hellaswag.py only, so hellaswag_scoring.py doesn't mention it."""
    save("speedrun", tmp_path)
    settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = run_script([tmp_path], cwd=tmp_path, script=HELLASWAG, **settings)
    assert result.returncode == 2
    message = result.stderr.splitlines()[-1]
    assert message.startswith("error: cannot download HellaSwag from the Hugging Face hub (")
    assert message.endswith("run the same command again, or use a local file with --data")


def test_two_processes_count_as_one(tmp_path):
    write_items(tmp_path)
    save("speedrun", tmp_path)
    args = [tmp_path, "--data", tmp_path / "items.jsonl"]
    one = run_forked(args, cwd=tmp_path, script=HELLASWAG)
    two = run_forked(args, cwd=tmp_path, script=HELLASWAG, nproc=2)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr[-2000:]
    assert one.stdout == two.stdout
    assert one.stdout.endswith(" items:13\n")
    assert one.stderr == ""
    bad = run_forked([tmp_path, "--data", "nothing.jsonl"], cwd=tmp_path, script=HELLASWAG)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: nothing.jsonl: ")
    assert bad.stderr.count("\n") == 1


# Runs hellaswag.py, and presses Ctrl-C while it loads the items
INTERRUPTED = f"""\
import runpy, signal, sys
sys.path.insert(0, {str(ROOT / 'evals')!r})
import models
import hellaswag_scoring
def load_items(path, limit):
    signal.raise_signal(signal.SIGINT)
hellaswag_scoring.load_items = load_items
runpy.run_path({str(HELLASWAG)!r}, run_name='__main__')
"""


def test_an_interruption_is_one_line(tmp_path):
    launcher = tmp_path / "launch.py"
    launcher.write_text(INTERRUPTED)
    result = run_script([tmp_path, "--device", "cpu"], cwd=tmp_path, script=launcher)
    assert result.returncode == 130
    assert result.stderr == "interrupted\n"


# -----------------------------------------------------------------------------
# The hub

class HubHandler(http.server.BaseHTTPRequestHandler):
    """Serves self.server.files (path: bytes) with the headers that huggingface_hub needs."""

    def do_GET(self):
        content = self.server.files.get(self.path)
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("ETag", '"0123"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.end_headers()
        if self.command == "GET" and content:
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def hub(files):
    """Yields the address of a server on loopback that serves the files."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.files = files
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


# Runs hellaswag.py, but "gpt2" is an even smaller model
LAUNCHER = f"""\
import runpy, sys
sys.path.insert(0, {str(ROOT / 'evals')!r})
import models
models.train_gpt2.FAMILY['gpt2'] = (2, 2, 16)
runpy.run_path({str(HELLASWAG)!r}, run_name='__main__')
"""


def test_weights_and_items_from_the_hub(tmp_path):
    """
    `hellaswag.py gpt2` downloads the weights and the items from the hub.

    The model has OpenAI's vocabulary, but only two thin layers.
    """
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16))
    theirs.save_pretrained(tmp_path)
    write_items(tmp_path)
    weights = "/openai-community/gpt2/resolve/main/model.safetensors"
    items = "/datasets/Rowan/hellaswag/resolve/main/data/validation-00000-of-00001.parquet"
    files = {
        weights: (tmp_path / "model.safetensors").read_bytes(),
        items: (tmp_path / "items.parquet").read_bytes(),
    }
    launcher = tmp_path / "launch.py"
    launcher.write_text(LAUNCHER)
    settings = {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with hub(files) as endpoint:
        settings["HF_ENDPOINT"] = endpoint
        args = ["gpt2", "--limit", 4, "--device", "cpu"]
        result = run_script(args, cwd=tmp_path, script=launcher, **settings)
        missing = run_forked(["gpt2-medium"], cwd=tmp_path, script=launcher, **settings)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("hellaswag acc:")
    assert result.stdout.endswith(" items:4\n")
    assert missing.returncode == 2
    message = "error: cannot download gpt2-medium from the Hugging Face hub"
    assert missing.stderr.startswith(message)
