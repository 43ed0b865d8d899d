"""Sampling and HellaSwag: the cached forward passes against the models' own, scores against hand-made answers and
transformers, the hub against a stand-in on loopback, and checkpoints that are not what they should be."""
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
import hellaswag
import models
import train_gpt
import train_gpt2
from models import Cache, Checkpoint, InputError

SAMPLE, HELLASWAG = ROOT / "evals" / "sample.py", ROOT / "evals" / "hellaswag.py"
GPT2_BYTES = train_gpt2.GPTConfig(block_size=64, vocab_size=257, padded_vocab_size=320, n_layer=2, n_head=2, n_embd=32)
SPEEDRUN = replace(train_gpt.TRACKS["shakespeare"], num_layers=5, num_heads=2, head_dim=16, model_dim=32,
                   num_value_embeds=2, attn_free_layers=(2,), long_window_layers=(0, 4), max_window=512,
                   max_ngram=5, ngram_rows=64,
                   train_seq_len=256, val_seq_len=1024, val_tokens=1024)


def randomized(model):
    """No weight is zero, one, or equal to its neighbour; logits are far enough apart for a clear greedy choice."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim < 2:
                p.copy_(0.5 + 0.3 * torch.randn(p.shape, generator=g))
            else:  # a large token table, tied to the head, would only ever repeat the last token
                std = 0.1 if "wte" in name else 1 if "emb" in name or "wpe" in name else p.size(-1) ** -0.5
                p.copy_(std * torch.randn(p.shape, generator=g))
    return model.eval()


def gpt2_checkpoint():
    return models.gpt2_checkpoint(randomized(train_gpt2.GPT(GPT2_BYTES)), "cpu")


def speedrun_checkpoint(hp=SPEEDRUN):
    model = randomized(train_gpt.GPT(hp, torch.float32))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return Checkpoint(model, models.speedrun_forward, (hp.num_layers, hp.num_heads, hp.head_dim), 1024, 257, 256,
                      *train_gpt2.codec(257))


CHECKPOINTS = {"gpt2": gpt2_checkpoint, "speedrun": speedrun_checkpoint}


def text(batch, length, eot_every=50):
    ids = torch.randint(0, 256, (batch, length))
    ids[torch.rand(batch, length) < 1 / eot_every] = 256
    return ids


def save(checkpoint, path, hp=SPEEDRUN):
    weights = {k: v.clone() for k, v in checkpoint.model.state_dict().items()}
    if isinstance(checkpoint.model, train_gpt2.GPT):
        train_gpt2.save_model(checkpoint.model, path)
    else:
        save_file(weights, path, {"model": "speedrun", "hyperparameters": json.dumps(dataclasses.asdict(hp))})
    return path


# -----------------------------------------------------------------------------
# Forward passes and decoding

@torch.no_grad()
def test_gpt2_forward_is_the_models_own():
    c, ids = gpt2_checkpoint(), text(3, 64)
    torch.testing.assert_close(models.gpt2_forward(c.model, ids), c.model(ids), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("max_window, long_layers, free_layers", [(512, (0, 4), (2,)), (256, (0, 1, 2, 3, 4), ()),
                                                                  (1024, (1,), (0, 4)), (128, (), ())])
def test_speedrun_forward_is_the_models_own(max_window, long_layers, free_layers):
    hp = replace(SPEEDRUN, max_window=max_window, long_window_layers=long_layers, attn_free_layers=free_layers)
    c = speedrun_checkpoint(hp)
    ids = text(2, 897)
    window = torch.tensor(train_gpt.get_window_blocks(hp.num_iterations, hp), dtype=torch.int32)
    logits = models.speedrun_forward(c.model, ids[:, :-1])
    for row in range(2):  # one by one: a mean over both would hide a swap
        expected = c.model(ids[row:row + 1, :-1].int(), ids[row:row + 1, 1:].long(), window).item()
        assert F.cross_entropy(logits[row], ids[row, 1:]).item() == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_cached_logits_are_those_of_the_whole_text(name):
    c = CHECKPOINTS[name]()
    length = min(c.context, 700)
    ids = text(2, length)
    whole = c.forward(c.model, ids)
    cache, parts, at = Cache(c.cache_shape, 2, length, ids.device), [], 0
    for n in [1, 20, 1, 1, 30] + ([300, 31, 1, 1, 250] if name == "speedrun" else []) + [1] * 99:
        n = min(n, length - at)
        if n:
            parts.append(c.forward(c.model, ids[:, at:at + n], cache))
        at += n
    parts = torch.cat(parts, dim=1)
    torch.testing.assert_close(parts, whole[:, :parts.size(1)], rtol=1e-3, atol=1e-3)
    last = c.forward(c.model, ids, last_only=True)
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-3, atol=1e-3)


def greedy(c, prompt, n):
    """Two (n, B) tensors of tokens: with the cache and without."""
    return [torch.stack(list(models.generate(c, prompt, n, temperature=0, use_cache=use))) for use in (True, False)]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("prompt_length, max_tokens", [(1, 60), (10, 100), (250, 20)])
def test_greedy_decoding_with_and_without_cache(name, prompt_length, max_tokens):
    """Past the end of GPT-2's 64 tokens of context too, and with end-of-text tokens in the prompt."""
    c, prompt = CHECKPOINTS[name](), text(3, prompt_length, eot_every=8)
    runs = greedy(c, prompt, max_tokens)
    assert torch.equal(*runs) and runs[0].shape == (max_tokens, 3)
    assert len(runs[0].unique()) > 3, "a degenerate text would agree with anything"
    if name == "gpt2" and prompt_length + max_tokens <= 64:  # the training script's own sampling
        own = c.model.generate(prompt, max_tokens, temperature=0)[:, prompt_length:]
        assert torch.equal(runs[0].T, own)


def test_speedrun_context_restarts_alike():
    c, prompt = speedrun_checkpoint(), text(2, 100)
    c.context = 150
    assert torch.equal(*greedy(c, prompt, 200))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_tokens_cost_is_attention_alone(name, monkeypatch):
    """With a cache every step after the first runs the layers on one token, against at most the window's keys."""
    c, calls = CHECKPOINTS[name](), []
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda q, k, v, **kw: calls.append((q.size(2), k.size(2))) or attention(q, k, v, **kw))
    list(models.generate(c, text(1, 10), 50 if name == "gpt2" else 900))
    layers = 2 if name == "gpt2" else 4  # one of the five has no attention
    assert all(q == 1 for q, _ in calls[layers:]) and calls[0] == (10, 10)
    assert max(k for _, k in calls) == (59 if name == "gpt2" else 512)


def test_sampling_follows_the_distribution():
    """The tokens drawn, against the softmax of the top_k logits at that temperature; padding never occurs."""
    table = torch.full((1, 1, 320), 9.0)
    table[..., :257] = torch.linspace(-1, 1, 257)[torch.randperm(257)]
    c = Checkpoint(torch.nn.Linear(1, 1), lambda model, ids, cache=None, last_only=False: table.expand(len(ids), 1, 320),
                   (1, 1, 1), 64, 257, 256, None, None)
    prompt = torch.zeros(20_000, 1, dtype=torch.int64)
    drawn = next(models.generate(c, prompt, 1, 0.7, 5, torch.Generator().manual_seed(0)))
    top, ids = (table[0, 0, :257] / 0.7).topk(5)
    frequency = torch.bincount(drawn, minlength=257) / 20_000
    torch.testing.assert_close(frequency[ids], top.softmax(-1), atol=0.02, rtol=0)
    assert frequency[ids].sum() == 1
    assert next(models.generate(c, prompt, 1, 1.0, 0, torch.Generator().manual_seed(0))).unique().numel() == 257
    again = next(models.generate(c, prompt, 1, 0.7, 5, torch.Generator().manual_seed(0)))
    assert torch.equal(drawn, again)


# -----------------------------------------------------------------------------
# Checkpoints

@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_load(name, tmp_path):
    c = CHECKPOINTS[name]()
    path = save(c, tmp_path / "model.safetensors")
    for given in (path, tmp_path):
        loaded = models.load(str(given))
        for key, weight in c.model.state_dict().items():
            assert torch.equal(loaded.model.state_dict()[key], weight), key
    assert (loaded.vocab_size, loaded.eot, loaded.context) == (257, 256, c.context)
    ids = text(1, 20)
    with torch.no_grad():
        assert torch.equal(loaded.forward(loaded.model, ids), c.forward(c.model, ids))


def test_bfloat16_embeddings_are_evaluated_in_float32(tmp_path):
    model = train_gpt.GPT(SPEEDRUN, torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path, {"model": "speedrun", "hyperparameters": json.dumps(dataclasses.asdict(SPEEDRUN))})
    loaded = models.load(str(path)).model
    assert loaded.embed.weight.dtype == torch.float32 and torch.equal(loaded.embed.weight, model.embed.weight.float())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_wrong_checkpoints_are_refused(name, tmp_path):
    path = save(CHECKPOINTS[name](), tmp_path / "model.safetensors")
    good, key = load_file(path), {"gpt2": "config", "speedrun": "hyperparameters"}[name]
    settings = dataclasses.asdict(GPT2_BYTES if name == "gpt2" else SPEEDRUN)
    matrix, width, layers = ("h.0.mlp.c_fc.weight", "n_embd", "n_layer") if name == "gpt2" else \
        ("blocks.0.mlp.c_fc.weight", "model_dim", "num_layers")

    def refused(message, tensors=good, metadata=None, **changes):
        metadata = metadata or {"model": name, key: json.dumps(settings | changes)}
        save_file(tensors, path, metadata)
        with pytest.raises(InputError, match=message) as e:
            models.load(str(path))
        assert "\n" not in str(e.value)

    refused(f"{matrix} has shape", good | {matrix: torch.zeros(7, 7)})
    refused(f"{matrix} is missing", {k: v for k, v in good.items() if k != matrix})
    refused("tensor extra is not one", good | {"extra": torch.zeros(1)})
    refused("has shape", **{width: 64})
    refused("layers, but only", **{layers: 10**9})
    refused(f"{width} = 'wide'", **{width: "wide"})
    refused(f"{width} = True", **{width: True})
    refused("another version", **{"new_field": 1})
    refused("no possible model|model_dim 0", **{width: 0})
    refused("not a JSON object", metadata={"model": name, key: "[1"})
    refused("not a JSON object", metadata={"model": name, key: "3"})
    refused("names no model", metadata={"format": "pt"})
    refused("names no model", metadata={"model": "resnet"})


def test_files_that_are_no_checkpoints(tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "exploded"), "w")

    path = tmp_path / "model.safetensors"
    for content in (pickle.dumps(Bomb()), b"", b"\xff" * 100, save(gpt2_checkpoint(), path).read_bytes()[:-100]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a whole safetensors file"):
            models.load(str(path))
    torch.save(Bomb(), path)
    with pytest.raises(InputError, match="not a whole safetensors file"):
        models.load(str(path))
    assert not (tmp_path / "exploded").exists()
    with pytest.raises(InputError, match="no such checkpoint"):
        models.load(str(tmp_path / "nothing"))


# -----------------------------------------------------------------------------
# sample.py

def test_sample_from_the_command_line(tmp_path):
    save(gpt2_checkpoint(), tmp_path / "model.safetensors")
    args = [tmp_path, "--n", 3, "--max_tokens", 40, "--prompt", "Ay, é", "--seed", 7]
    first, second = (run(args, cwd=tmp_path, script=SAMPLE) for run in (run_script, run_forked))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout and first.stderr == second.stderr == ""
    assert [f"[{i}/3] Ay, é" in first.stdout for i in (1, 2, 3)] == [True] * 3
    assert all(c.isprintable() or c in "\n\t" for c in first.stdout)
    bad = run_forked([tmp_path, "--temperature", -1], cwd=tmp_path, script=SAMPLE)
    assert bad.returncode == 2 and bad.stderr == "error: --temperature must be at least 0, not -1.0\n"


def test_samples_are_the_generators_tokens(tmp_path, monkeypatch, capsys):
    """Greedy text from the script is the decoded bytes of generate(); a continuation ends at end-of-text."""
    import sample
    c = speedrun_checkpoint()
    save(c, tmp_path / "model.safetensors")
    with torch.no_grad():
        tokens = [t.item() for t in models.generate(c, torch.tensor([[256, 72, 105]]), 30, temperature=0)]
    stop = tokens.index(256) if 256 in tokens else len(tokens)
    expected = "Hi" + sample.printable(bytes(tokens[:stop]).decode(errors="replace"))
    monkeypatch.setattr(sys, "argv", ["sample.py", str(tmp_path), "--prompt", "Hi", "--n", "1", "--max_tokens", "30",
                                      "--temperature", "0", "--device", "cpu"])
    sample.main()
    assert capsys.readouterr().out == f"[1/1] {expected}\n"

    monkeypatch.setattr(sample, "generate", lambda *a: iter([torch.tensor([0xC3, 65]), torch.tensor([0xA9, 256]),
                                                             torch.tensor([27, 66]), torch.tensor([0xE2, 67])]))
    sys.argv[5:6] = ["2"]
    sample.main()
    assert capsys.readouterr().out == "[1/2] Hi\u00e9\ufffd\ufffd\n\n[2/2] HiA\n"


# -----------------------------------------------------------------------------
# HellaSwag

def bigram(table):
    """logits_fn whose loss of token b after token a is -log(table[a][b]) exactly."""
    logits = torch.tensor(table).log()
    return lambda ids: logits[ids.clamp_max(len(table) - 1)]


def words(text):
    return [int(word) for word in text.split()]


def test_endings_are_scored_as_by_hand():
    # after 0: 1 with p 1/2, 2 with 1/4, 3 with 1/4; after 1: 1 with 7/8, 2 with 1/8; after 2, 3: uniform
    logits_fn = bigram([[1e-9, 1 / 2, 1 / 4, 1 / 4], [1e-9, 7 / 8, 1 / 8, 1e-9], [1 / 4] * 4, [1 / 4] * 4])
    # sums: log 2 = 0.69; log 2 + 3 log(8/7) = 1.09; log 4 = 1.39; log 2 + log 8 = 2.77
    # means:         0.69;                      0.27;         1.39;                  1.39
    item = dict(ctx="3 0", endings=["1", "1 1 1 1", "3", "1 2"], label=0)
    rows = hellaswag.tokenize(item, words, context=10)
    assert rows == [([3, 0, 1], 1), ([3, 0, 1, 1, 1, 1], 4), ([3, 0, 3], 1), ([3, 0, 1, 2], 2)]
    sums, means = hellaswag.ending_losses(logits_fn, rows, 4, "cpu")
    log = math.log
    expected = torch.tensor([log(2), log(2) + 3 * log(8 / 7), log(4), log(2) + log(8)])
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(means, expected / torch.tensor([1, 4, 1, 2]), rtol=1e-5, atol=1e-6)

    count = lambda labels: hellaswag.score(logits_fn, [item | dict(label=i) for i in labels], words, 4, 10, "cpu")
    assert count([0]) == [1, 1, 0] and count([1]) == [1, 0, 1] and count([2, 3, 0, 1, 1]) == [5, 1, 2]


def test_what_is_too_long_loses_its_beginning():
    item = dict(ctx="1 2 3", endings=["4", "4 5 6 7 8 9"] + ["4"] * 2, label=0)
    rows = hellaswag.tokenize(item, words, context=3)
    assert rows[0] == ([1, 2, 3, 4], 1) and rows[1] == ([6, 7, 8, 9], 3)


def test_padding_and_other_vocabulary_rows_do_not_count():
    rows = [([5, 6, 7], 1), (list(range(8)), 3), ([9, 9], 1)]
    table = torch.randn(10, 16)
    logits_fn = lambda ids: table[ids]
    together, _ = hellaswag.ending_losses(logits_fn, rows, 10, "cpu")
    for i, (row, n) in enumerate(rows):
        logits, targets = table[row[:-1], :10][-n:], torch.tensor(row[-n:])
        assert together[i].item() == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-5)


@torch.no_grad()
def test_scores_are_those_of_transformers(tmp_path):
    """A tiny random GPT-2 in transformers, each ending alone and unpadded, its loss by labels of -100."""
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=128, n_layer=2, n_head=2, n_embd=32)).eval()
    for p in theirs.parameters():
        p.normal_(std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = train_gpt2.GPT(train_gpt2.GPTConfig(128, 257, 257, 2, 2, 32))
    train_gpt2.load_openai_weights(ours, tmp_path / "model.safetensors")
    c = models.gpt2_checkpoint(ours, "cpu")

    pieces = "A man is sitting on a roof. He starts pulling up shingles, then he waves at the crowd below him".split()
    g = torch.Generator().manual_seed(1)
    draw = lambda n: " ".join(pieces[i] for i in torch.randint(len(pieces), (n,), generator=g).tolist())
    items = [dict(ctx=draw(3 + i % 7), endings=[draw(1 + (i + j) % 5) for j in range(4)], label=i % 4) for i in range(24)]
    acc = acc_norm = 0
    for item in items:
        sums = []
        for ending in item["endings"]:
            ctx, tokens = list(item["ctx"].encode()), list(f" {ending}".encode())
            loss = theirs(torch.tensor([ctx + tokens]), labels=torch.tensor([[-100] * len(ctx) + tokens])).loss.item()
            sums.append((loss * len(tokens), loss))
        rows = hellaswag.tokenize(item, c.encode, c.context)
        got = hellaswag.ending_losses(lambda ids: c.forward(c.model, ids), rows, 257, "cpu")
        torch.testing.assert_close(torch.stack(got, 1), torch.tensor(sums), rtol=1e-4, atol=1e-4)
        acc += min(range(4), key=lambda j: sums[j][0]) == item["label"]
        acc_norm += min(range(4), key=lambda j: sums[j][1]) == item["label"]
    for batch_tokens in (1, 500, 100_000):
        counts = hellaswag.score(lambda ids: c.forward(c.model, ids), items, c.encode, 257, c.context, "cpu",
                                 batch_tokens=batch_tokens)
        assert counts == [24, acc, acc_norm]


def test_summary_has_standard_errors():
    assert hellaswag.summary([10_042, 2871, 2967]) == "acc:0.2859 +- 0.0045 acc_norm:0.2955 +- 0.0046 items:10042"


ITEMS = [dict(ind=i, ctx=f"A man number {i} is", endings=["here", "there and back", "gone now", "it"], label=str(i % 4))
         for i in range(13)]


def write_items(folder):
    import pyarrow
    import pyarrow.parquet
    (folder / "items.jsonl").write_text("".join(json.dumps(item | dict(label=int(item["label"]))) + "\n" for item in ITEMS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ITEMS), folder / "items.parquet")


def test_items_from_parquet_and_jsonl(tmp_path):
    write_items(tmp_path)
    expected = [dict(ctx=item["ctx"], endings=item["endings"], label=int(item["label"])) for item in ITEMS]
    for name in ("items.parquet", "items.jsonl"):
        assert hellaswag.load_items(tmp_path / name) == expected
        assert hellaswag.load_items(tmp_path / name, limit=5) == expected[:5]
    for content, message in [(b"{", "not HellaSwag items"), (b"\xff\xfe", "not HellaSwag items"), (b"", "no items"),
                             (b'{"ctx": "a", "endings": ["b"], "label": 0}', "item 1 is not"), (b"[]", "item 1 is not"),
                             (b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "item 1 is not"),
                             (b'{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": ""}', "item 1 is not")]:
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(hellaswag.DataError, match=message):
            hellaswag.load_items(tmp_path / "bad.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(hellaswag.DataError, match="not HellaSwag items"):
        hellaswag.load_items(tmp_path / "bad.parquet")


def test_two_processes_count_as_one(tmp_path):
    write_items(tmp_path)
    save(speedrun_checkpoint(), tmp_path / "model.safetensors")
    args = [tmp_path, "--data", tmp_path / "items.jsonl"]
    one = run_forked(args, cwd=tmp_path, script=HELLASWAG)
    two = run_forked(args, cwd=tmp_path, script=HELLASWAG, nproc=2)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr[-2000:]
    assert one.stdout == two.stdout and one.stdout.endswith(" items:13\n") and one.stderr == ""
    bad = run_forked([tmp_path, "--data", "nothing.jsonl"], cwd=tmp_path, script=HELLASWAG)
    assert bad.returncode == 2 and bad.stderr.startswith("error: nothing.jsonl: ") and bad.stderr.count("\n") == 1


# -----------------------------------------------------------------------------
# The hub, played by a server on loopback

@contextlib.contextmanager
def hub(files):
    """Serves {path: bytes} with the headers that huggingface_hub asks for; yields the endpoint's address."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = files.get(self.path)
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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_weights_and_items_from_the_hub(tmp_path):
    """`hellaswag.py gpt2` with nothing but a hub: a GPT-2 of OpenAI's vocabulary, but two thin layers."""
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16))
    theirs.save_pretrained(tmp_path)
    write_items(tmp_path)
    files = {"/openai-community/gpt2/resolve/main/model.safetensors": (tmp_path / "model.safetensors").read_bytes(),
             "/datasets/Rowan/hellaswag/resolve/main/data/validation-00000-of-00001.parquet":
                 (tmp_path / "items.parquet").read_bytes()}
    launcher = tmp_path / "launch.py"  # hellaswag.py, with the family's smallest member made smaller still
    launcher.write_text(f"import runpy, sys; sys.path.insert(0, {str(ROOT / 'evals')!r}); import models\n"
                        "models.train_gpt2.FAMILY['gpt2'] = (2, 2, 16)\n"
                        f"runpy.run_path({str(HELLASWAG)!r}, run_name='__main__')\n")
    with hub(files) as endpoint:
        settings = dict(HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_XET="1",
                        HF_HUB_DISABLE_PROGRESS_BARS="1")
        result = run_script(["gpt2", "--limit", 4, "--device", "cpu"], cwd=tmp_path, script=launcher, **settings)
        assert result.returncode == 0, result.stderr[-2000:]
        assert result.stdout.startswith("hellaswag acc:") and result.stdout.endswith(" items:4\n")
        missing = run_forked(["gpt2-medium"], cwd=tmp_path, script=launcher, **settings)
    assert missing.returncode == 2 and missing.stderr.startswith("error: cannot fetch gpt2-medium from the hub")
