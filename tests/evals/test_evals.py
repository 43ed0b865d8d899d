"""
Tests of evals/.

They compare logits with the loss of the training scripts (tests/recipes/test_gpt2.py compares GPT-2 with
transformers), and the HellaSwag scores with hand-made answers. Everything runs on the CPU.
"""

import dataclasses
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import train_gpt
from data import gpt2_bpe
from data.datasets import MINI_VOCAB as VOCAB
from evals import hellaswag, models, sample, speed
from evals.models import TextModel
from launch import train_and_sample
from recipes import gpt2, openai_gpt2
from train_gpt import InputError
from tests.training.test_checkpoint import Hostile
from tests.util import EOT, Job, checkpoint_of, randomized, succeeds, tiny_run

GPT2 = replace(gpt2.TRACKS["mini"], block_size=64, n_layer=2, n_head=2, n_embd=32)
SPEEDRUN = replace(
    train_gpt.TRACKS["mini"],
    num_layers=5,
    num_heads=2,
    model_dim=32,
    num_value_embeds=2,
    attn_free_layers=(2,),
    long_window_layers=(0, 4),
    max_window=512,
    train_seq_len=256,
    val_seq_len=1024,
    val_tokens=1024,
)
MODULES = {"gpt2": (gpt2.GPT, GPT2), "speedrun": (models.LogitsGPT, SPEEDRUN)}


def module_of(name):
    model_class, hp = MODULES[name]
    return randomized(model_class(hp).float())


def text(batch, length, eot_every=50):
    ids = torch.randint(0, EOT, (batch, length))
    ids[torch.rand(batch, length) < 1 / eot_every] = EOT
    return ids


def save(path, name="speedrun", **changes):
    """Writes what evals/ reads of a RUN.pt. Returns its path."""
    module = module_of(name)
    settings = dataclasses.asdict(module.hp) | changes
    torch.save(dict(settings=settings, model=module.state_dict()), path)
    return path


def run_sample(*arguments):
    sample.main(list(map(str, arguments)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The RUN.pt of a short training."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = tiny_run(folder, "--save_checkpoint", num_iterations=2)
    succeeds(Job(words, folder))
    return checkpoint_of(folder)


# -----------------------------------------------------------------------------
# Forward passes and decoding


@torch.no_grad()
def test_the_logits_of_a_text():
    """Their loss is the model's own. A text has any length, and its beginning the same logits."""
    module = module_of("speedrun")
    model = train_gpt.GPT(SPEEDRUN).float().eval()
    model.load_state_dict(module.state_dict())
    ids = text(2, 897, eot_every=400)  # some documents are longer than the windows
    inputs = ids[:, :-1]
    targets = ids[:, 1:]
    window = torch.tensor(4, dtype=torch.int32)  # of all 512 tokens
    logits = module.logits(inputs)
    for row in range(2):  # one by one, because a sum over both would hide a swap
        one = slice(row, row + 1)
        expected = model(inputs[one].int(), targets[one], window).item()
        loss = F.cross_entropy(logits[row], targets[row], reduction="sum").item()
        assert loss == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(module.logits(inputs[:, :300]), logits[:, :300], rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", MODULES)
def test_greedy_decoding(name):
    """The texts exceed the context of 64 tokens twice. The prompts have end-of-text tokens."""
    model = models.text_model(module_of(name), models.codec(VOCAB))
    model.context = 64
    prompt = text(3, 60, eot_every=8)
    ids = prompt
    for end in range(60, 120):
        start = {0: 0, 1: 33, 2: 66}[(end >= 65) + (end >= 98)]
        logits = model.logits(ids[:, start:])[:, -1, :VOCAB]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    found = list(models.generate(model, prompt, 60, temperature=0))
    found = torch.stack(found, dim=1)
    assert torch.equal(found, ids[:, 60:])
    assert len(found.unique()) > 3, "the text only repeats itself, so the comparison says nothing"


def test_sampling_follows_the_distribution():
    """Tokens are as frequent as the softmax of the top_k logits at that temperature says. Padding tokens never
    occur."""
    logits = torch.linspace(-1, 1, 257)[torch.randperm(257)]
    padded = F.pad(logits, (0, 63), value=9.0)
    model = TextModel(lambda ids: padded.expand(len(ids), 1, -1), 64, 257, 256, "", None, None)
    prompt = torch.zeros(20_000, 1, dtype=torch.int64)
    for temperature, top_k in ((0.7, 5), (1.0, 0)):
        drawn = next(models.generate(model, prompt, 1, temperature, top_k))
        least = logits.topk(top_k or 257).values[-1]
        want = (logits / temperature).masked_fill(logits < least, -math.inf).softmax(0)
        frequency = drawn.bincount(minlength=257) / 20_000
        torch.testing.assert_close(frequency, want, atol=0.02, rtol=0)
        assert not frequency[want == 0].any()


# -----------------------------------------------------------------------------
# Saved models


@torch.no_grad()
@pytest.mark.parametrize("name, context", [("gpt2", 64), ("speedrun", 1024)])
def test_a_saved_model(name, context, tmp_path, monkeypatch):
    expected = module_of(name)  # randomized in the same way
    path = save(tmp_path / "run.pt", name)
    ids = text(1, 20)
    monkeypatch.setattr(train_gpt, "DTYPE", torch.bfloat16)  # as on GPUs; evals/ use float32
    loaded = models.load(str(path))
    assert torch.equal(loaded.logits(ids), expected.logits(ids))
    assert (loaded.vocab_size, loaded.eot, loaded.context) == (VOCAB, EOT, context)


def test_models_of_another_version_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    for changes, message in (
        ({"old_field": 1}, r"saved by another version .* \(setting old_field\)"),
        ({"model_dim": 64}, "its weights don't fit; saved by another version"),
        ({"eot_token": 0}, "its tokens aren't GPT-2's: end-of-text is 0, not 1023"),
    ):
        save(path, **changes)
        with pytest.raises(InputError, match=f"^{path}: {message}"):
            models.load(str(path))


def test_files_that_are_no_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "run.pt")
    cut = path.read_bytes()[:-100]
    torch.save(Hostile(), path)
    bomb = path.read_bytes()
    torch.save({"model": "resnet"}, path)
    for content in (b"", cut, bomb, path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"{path} (is damaged|isn't a RUN.pt)"):
            models.load(str(path))
    assert not (tmp_path / "victim").exists()
    with pytest.raises(InputError, match="nothing: no such file; the model can be a RUN.pt"):
        models.load("nothing")


# -----------------------------------------------------------------------------
# sample.py


def test_sample_from_the_command_line(trained, tmp_path, capsys):
    """A seed gives the same texts in another process."""
    args = [trained, "--n", 3, "--max_tokens", 40, "--prompt", "Ay, é", "--seed", 7]
    job = Job(args, tmp_path, script="evals.sample")
    assert (job.wait(), job.err) == (0, "")
    run_sample(*args)
    assert job.out == capsys.readouterr().out
    assert all(f"[{i}/3] Ay, é" in job.out for i in (1, 2, 3))
    assert all(c.isprintable() or c in "\n\t" for c in job.out)
    with pytest.raises(InputError, match="^--temperature and --top_k must be at least 0$"):
        run_sample(trained, "--temperature=-1")


def test_what_is_printed(tmp_path, monkeypatch, capsys):
    """A text begins after an end-of-text token and ends at one, or within a character, because of
    max_tokens. Its characters may have several tokens, tokens several characters, and some control the
    terminal."""
    token = gpt2_bpe.gpt2_encoding(VOCAB).encode_single_token
    first = [*map(token, [b"\xc3", b"\xa9", b" the", b"\x1b", b"\xe2"])]
    second = [*map(token, ["A", "ing", "<|endoftext|>", "B", "C"])]
    steps = torch.tensor([first, second]).T
    asked = []
    monkeypatch.setattr(models, "generate", lambda model, *how: asked.extend(how) or iter(steps))
    run_sample(save(tmp_path / "run.pt"), "--prompt", "Hi the", "--n", 2, "--top_k", 3)
    assert asked[0].tolist() == [[EOT, *map(token, ["H", "i", " the"])]] * 2
    assert asked[1:4] == [300, 0.8, 3]
    printed = capsys.readouterr().out
    assert printed == "[1/2] Hi the\u00e9 the\ufffd\ufffd\n\n[2/2] Hi theAing\n"


def test_the_speed_of_a_run(trained, monkeypatch, capsys):
    """Counted by hand: three layers of width 32, a head of 1,024 rows. The run has two steps of 512 tokens."""
    monkeypatch.setattr(speed, "matmul_peak", lambda n, repeats: 1.0)
    sample.sample_after_training(trained)
    counted, line = capsys.readouterr().out.splitlines()[-2:]
    weights = 3 * (4 * 32 * 32 + 2 * 32 * 128) + VOCAB * 32
    parameters = weights + 2 * VOCAB * 32 + 3 * (2 + 2 + 2) + 1 + 12 + 1
    assert counted.startswith(f"{parameters:,} parameters; {6 * weights:,} floating-point operations")
    seconds = torch.load(trained, weights_only=True)["run"]["train_ms"] / 1000
    share = float(re.search(r"(\d+)% of what a large", line)[1])
    assert share == pytest.approx(6 * weights * 2 * 512 / seconds / 1e9 * 100, abs=0.51)


def test_a_brief_sample(tmp_path, monkeypatch, capsys):
    """It takes little time."""
    path = save(tmp_path / "run.pt")
    sample.sample_after_training(path)
    heading = "\nA sample of what the model writes:\n\n**MACBETH**  \n"
    output = capsys.readouterr().out
    assert output.startswith(heading)
    assert len(output) > len(heading) + 1
    monkeypatch.setattr(sample, "BRIEF_SECONDS", 0)
    sample.sample_after_training(path)
    assert capsys.readouterr().out == f"{heading}\n"


def test_without_a_vocabulary(tmp_path, monkeypatch, capsys):
    """After a training, it isn't downloaded, and it is no error if there is no sample."""
    monkeypatch.setattr(gpt2_bpe, "CACHE", tmp_path / "empty")
    monkeypatch.setattr(gpt2_bpe, "fetch_vocabulary", None)
    save(tmp_path / "run.pt").with_suffix(".txt").touch()
    train_and_sample.write_sample(train_gpt, [f"--log_dir={tmp_path}"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("can't print a sample: GPT-2's vocabulary isn't in ")
    assert captured.err.count("\n") == 1


def test_the_default_prompt(tmp_path, monkeypatch, capsys):
    """Models of your own text begin a document. test_a_brief_sample has a prompt of mini."""
    monkeypatch.setattr(models, "generate", lambda *_: [])
    run_sample(save(tmp_path / "run.pt", train_files="data/own_text_1024/notes_train_*.bin"))
    assert capsys.readouterr().out == "\n"


# -----------------------------------------------------------------------------
# HellaSwag


def scorer(logits, context):
    """What hellaswag.py needs of a TextModel. Tokens are the digits of a text; a space is token 0. `logits` are
    those of the next token, by the last one; a column more is padding."""

    def encode(text):
        return [int(character) for character in text.replace(" ", "0")]

    padded = F.pad(logits, (0, 1), value=99.0)
    return SimpleNamespace(
        logits=lambda ids: padded[ids], vocab_size=10, context=context, encode=encode
    )


@pytest.mark.parametrize("context", [10, 3])
def test_endings_are_scored_one_by_one(context):
    """Only an ending's tokens count. What is too long loses its beginning, and then those, too."""
    logits = torch.randn(10, 10)
    losses = -logits.log_softmax(-1)
    endings = ["1", "1111", "3", "12"]
    wanted = []
    for ending in endings:
        text = [int(digit) for digit in f"130{ending}"][-(context + 1) :]
        pairs = list(zip(text, text[1:]))[-(len(ending) + 1) :]  # a space begins an ending
        wanted.append([losses[pair].item() for pair in pairs])
    want = torch.tensor([[sum(each), sum(each) / len(each)] for each in wanted]).T
    model = scorer(logits, context)
    torch.testing.assert_close(torch.stack(hellaswag.ending_losses(model, "13", endings)), want)
    best = want.argmin(1).tolist()
    items = [("13", endings, label) for label in range(4)]
    assert hellaswag.score(model, items) == [4, 1, 1]
    assert hellaswag.score(model, [items[best[1]]]) == [1, best[0] == best[1], 1]


def test_a_loss_that_is_not_finite_has_no_score():
    """The lowest of four losses of NaN would be the first one."""
    logits = torch.zeros(10, 10)
    logits[7] = math.inf  # so its losses are NaN
    model = scorer(logits, 10)
    good = ("12", ["1", "2", "3", "4"], 0)
    assert hellaswag.score(model, [good]) == [1, 1, 1]
    with pytest.raises(InputError, match="^the model's loss isn't finite, so it has no accuracy$"):
        hellaswag.score(model, [good, ("12", ["1", "72", "3", "4"], 0)])


def test_summary_has_standard_errors():
    line = "hellaswag acc:0.2859 +- 0.0045 acc_norm:0.2955 +- 0.0046 items:10042"
    assert hellaswag.accuracy_line([10_042, 2871, 2967]) == line


def write_items(path, **changes):
    """Writes 13 items as on the hub, and returns them."""
    import pyarrow
    import pyarrow.parquet

    items = []
    rows = []
    for i in range(13):
        items.append((f"A man sits {i}", ["on a roof", "pulls up", "shingles", f"{i} times"], i % 4))
        rows.append(dict(ctx=items[i][0], endings=items[i][1], label=str(i % 4)) | changes)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return items


def test_items(tmp_path):
    path = tmp_path / "items.parquet"
    expected = write_items(path)
    assert hellaswag.load_items(path) == expected
    assert hellaswag.load_items(path, limit=5) == expected[:5]
    write_items(path, label="")  # as in the test set
    for _ in range(2):
        with pytest.raises(InputError, match="has no HellaSwag items with labels"):
            hellaswag.load_items(path)
        path.write_text("PAR1")


def test_the_newest_model(tmp_path, monkeypatch, capsys):
    """Of a folder, or of logs in the repository. A line says which one it is."""
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr(models, "ROOT", tmp_path)
    monkeypatch.chdir(logs)
    with pytest.raises(InputError, match="has no RUN.pt; ./run.sh trains a model"):
        models.load("latest")
    save(logs / "b.pt")
    for age, name in enumerate(["best.pt", "b.pt", "a.pt", "a.txt", "b.txt"]):  # the first is newest
        (logs / name).touch()
        os.utime(logs / name, (0, 1000 - age))
    for name in ("latest", "../logs"):
        assert models.load(name).vocab_size == VOCAB
    assert capsys.readouterr().err == 2 * "the model of b.pt\n"
    assert models.find_file("a.pt") == "a.pt"


def test_weights_and_items_from_the_hub(trained, tmp_path, monkeypatch, capsys):
    """The model has OpenAI's vocabulary, but only two thin layers."""
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16)).save_pretrained(tmp_path)
    items = tmp_path / "items.parquet"
    write_items(items)
    files = {
        ("openai-community/gpt2", "model.safetensors"): tmp_path / "model.safetensors",
        ("Rowan/hellaswag", "data/validation-00000-of-00001.parquet"): items,
    }
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *name, repo_type="model": files[name])
    monkeypatch.setitem(openai_gpt2.SIZES, "gpt2", (2, 2, 16))
    hellaswag.main(["gpt2", "--limit=4"])
    hellaswag.main([str(trained), f"--data={items}"])
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r" .*:", " ", line) for line in lines] == ["hellaswag 4", "hellaswag 13"]
