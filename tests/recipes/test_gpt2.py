"""
Tests of recipes/gpt2.py and tools/levers.py.

They compare the model with transformers, micro-batches with one large batch, two processes with one,
and a killed and resumed run with an uninterrupted one.
"""
import json
import math
import os
import re
import signal
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import train_gpt
from evals import openai_gpt2
from recipes import gpt2
from train_gpt import GradientBuckets, InputError
from tests.util import ROOT, Job, random_tokens, read_log, run_forked, run_script, val_losses, write_shard

# A model that trains in a second, in float32, so that sums in another order agree closely
TINY = {
    "train_files": "train_*.bin",
    "val_files": "val.bin",
    "val_tokens": 960,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 32,
    "batch_tokens": 512,
    "sequences_per_pass": 16,
    "num_iterations": 6,
    "warmup_iters": 2,
    "warmup_steps": 1,
    "val_loss_every": 2,
    "bf16": "false",
    "compile": "false",
}


def tiny_hp(**changes):
    return gpt2.parse_arguments(words(**changes))[1]


def words(**changes):
    """The options of a tiny run."""
    return ["--track=mini", *(f"--{name}={value}" for name, value in (TINY | changes).items())]


def write_shards(folder):
    """Byte shards: two for training, one for validation."""
    write_shard(folder / "train_0.bin", random_tokens(1500, seed=0))
    write_shard(folder / "train_1.bin", random_tokens(2600, seed=1))
    write_shard(folder / "val.bin", random_tokens(1000, seed=9))


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path)
    return tmp_path


def run(folder, *more, nproc=1, **changes):
    """Runs the recipe in the folder."""
    arguments = [*words(**changes), "--save_checkpoint", *more]
    result = run_forked(arguments, cwd=folder, nproc=nproc, script="recipes.gpt2")
    assert result.returncode == 0, result.stderr[-2000:]


def checkpoint_of(folder):
    (path,) = folder.glob("logs/*.pt")
    return torch.load(path, weights_only=True)


# -----------------------------------------------------------------------------
# The model and OpenAI's weights


@torch.no_grad()
def hf_model(n_layer, n_head, n_embd, vocab_size=211, n_positions=64):
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=n_positions, n_layer=n_layer, n_head=n_head, n_embd=n_embd
    )
    model = GPT2LMHeadModel(config).eval()
    for p in model.parameters():
        p.normal_(std=0.2)  # also biases and gains of LayerNorm, because 0 and 1 would hide mistakes
    return model


def of_sizes(n_layer, n_head, n_embd):
    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    return replace(gpt2.TRACKS["mini"], block_size=64, vocab_size=211, pad_vocab=False, **sizes)


@torch.no_grad()
@pytest.mark.parametrize("sizes, flash", [((1, 1, 16), True), ((3, 4, 48), False), ((2, 5, 40), True)])
def test_logits_are_those_of_transformers(tmp_path, sizes, flash):
    theirs = hf_model(*sizes)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(211, (3, 50))
    ours = gpt2.GPT(replace(of_sizes(*sizes), flash=flash))
    openai_gpt2.load_weights(ours, tmp_path / "model.safetensors")
    torch.testing.assert_close(ours.logits(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    loss = ours(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(loss, theirs(ids, labels=ids).loss, rtol=1e-5, atol=1e-5)


def test_openai_keys_must_match(tmp_path):
    """OpenAI's own files have no prefix, and two mask buffers in each layer. Other differences are errors."""
    hf_model(2, 2, 32).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    good = {key.removeprefix("transformer."): tensor for key, tensor in load_file(path).items()}

    def load(**changes):
        tensors = good | {key.replace("__", "."): tensor for key, tensor in changes.items()}
        save_file(tensors, path, {"format": "pt"})
        model = gpt2.GPT(of_sizes(2, 2, 32))
        openai_gpt2.load_weights(model, path)
        return model

    mask = torch.ones(1)
    head = good["wte.weight"].clone()
    model = load(h__0__attn__bias=mask, h__1__attn__masked_bias=mask.clone(), lm_head__weight=head)
    torch.testing.assert_close(model.h[1].mlp.c_fc.weight, good["h.1.mlp.c_fc.weight"].T)
    with pytest.raises(InputError, match="lm_head.weight isn't wte.weight"):
        load(lm_head__weight=head + 1)
    with pytest.raises(InputError, match="isn't this GPT-2: .*h.2.ln_1.weight") as e:
        load(h__2__ln_1__weight=torch.ones(32))
    assert "\n" not in str(e.value)


def test_parameter_counts():
    """Those that OpenAI's models have. Padding adds 47 rows of 768."""
    counts = {"scratch": 124_475_904, "gpt2": 124_439_808, "gpt2-medium": 354_823_168}
    counts |= {"gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    for name, count in counts.items():
        _, hp = gpt2.parse_arguments(["--track=fineweb", f"--init_from={name}"])
        with torch.device("meta"):
            model = gpt2.GPT(hp)
        assert sum(p.numel() for p in model.parameters()) == count, name


def test_initialization():
    hp = replace(gpt2.TRACKS["mini"], block_size=256, vocab_size=320, n_layer=8, n_head=4, n_embd=256)
    for name, p in gpt2.GPT(hp).named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.ndim == 1:
            assert (p == 1).all(), name
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # 4 = (2 * 8 layers) ** 0.5
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < std / 20, name


def test_the_loss_of_openais_weights(folder, monkeypatch):
    """The weights of a small stand-in, without training. It needs no training shard."""
    theirs = hf_model(1, 1, 8, vocab_size=50257, n_positions=1024)
    theirs.save_pretrained(folder)
    tokens = random_tokens(1025, seed=9)
    write_shard(folder / "val.bin", tokens)
    monkeypatch.setitem(openai_gpt2.SIZES, "gpt2", (1, 1, 8))
    monkeypatch.setattr(openai_gpt2, "download", lambda name: folder / "model.safetensors")
    monkeypatch.chdir(folder)
    options = ["--val_files=val.bin", "--val_tokens=1024", "--compile=false", "--bf16=false"]
    status = gpt2.main(["--track=fineweb", "--init_from=gpt2", "--num_iterations=0", *options])
    torch.use_deterministic_algorithms(False)  # as before
    assert status == 0
    ids = torch.tensor([tokens[:1024]])
    with torch.no_grad():
        logits = theirs(ids).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item()
    assert val_losses(read_log(folder)) == {0: pytest.approx(expected, abs=1e-4)}


# -----------------------------------------------------------------------------
# Settings, optimizer, schedule, data


def test_mini_is_the_mini_of_train_gpt():
    """Losses can be compared only if the data and the target are the same."""
    for name in ("train_files", "val_files", "val_tokens", "target_val_loss", "vocab_size"):
        assert getattr(gpt2.TRACKS["mini"], name) == getattr(train_gpt.TRACKS["mini"], name), name


@pytest.mark.parametrize("changes, message", [
    ({"batch_tokens": 500}, "--batch_tokens 500: must be a multiple of 1 .* --block_size 32"),
    ({"n_head": 3}, "--n_embd 32: must be a multiple of --n_head 3"),
    ({"val_tokens": 1024}, "val.bin has 31 batches of 32 tokens, and the run needs 32"),
    ({"num_iterations": 8, "repeat_data": "false"}, "has 7 batches .*, and the run needs 8"),
    ({"batch_tokens": 4096}, "has 0 batches .*, and the run needs 1"),
    ({"init_from": "gpt3"}, "--init_from gpt3: must be one of scratch, gpt2, "),
    ({"init_from": "gpt2"}, "needs --track fineweb or edu"),
])
def test_impossible_settings(folder, monkeypatch, changes, message):
    monkeypatch.chdir(folder)
    with pytest.raises(InputError, match=message):
        args, hp = gpt2.parse_arguments(words(**changes))
        gpt2.check_inputs(args, hp)


def test_decay_groups():
    model = gpt2.build_model(tiny_hp())
    optimizer = gpt2.build_optimizer(model, tiny_hp(beta1=0.9, beta2=0.95, weight_decay=0.1))
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
    decayed_ids = {id(p) for p in decayed["params"]}
    for name, p in model.named_parameters():
        is_matrix = name.endswith(".weight") and "ln_" not in name
        assert (id(p) in decayed_ids) == is_matrix, name
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["eps"] == 1e-8


def test_learning_rate():
    hp = gpt2.TRACKS["fineweb"]
    middle = (715 + 19_073) // 2
    for step, expected in [(0, 6e-4 / 715), (714, 6e-4), (715, 6e-4), (middle, 3.3e-4), (19_073, 6e-5)]:
        assert gpt2.get_lr(step, hp) == pytest.approx(expected, rel=1e-6), step
    curve = [gpt2.get_lr(step, hp) for step in range(715, 19_074)]
    assert all(a > b for a, b in zip(curve, curve[1:]))
    assert gpt2.get_lr(0, replace(hp, warmup_iters=0)) == pytest.approx(6e-4)


def test_data_are_repeated(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = gpt2.training_batches(tiny_hp())
    batches = [next(found) for _ in range(9)]  # the shards have 1500 and 2600 tokens: 2 + 5 batches
    assert torch.equal(batches[7], batches[0])
    assert torch.equal(batches[8], batches[1])
    assert len(list(gpt2.training_batches(tiny_hp(repeat_data="false")))) == 7


def one_step(hp, tokens):
    """Returns the model after a step, the loss, and the gradient that the optimizer gets."""
    model = gpt2.build_model(hp)
    optimizer = gpt2.build_optimizer(model, hp)
    gradients = []

    def keep(*_):
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    optimizer.register_step_pre_hook(keep)
    loss = gpt2.train_step(model, optimizer, GradientBuckets(model.parameters()), tokens, 1, hp)
    return model, loss.item(), gradients[0].clone()


def test_a_step():
    """Four micro-steps are one large batch. The gradient is clipped. Fused AdamW is AdamW."""
    tokens = torch.tensor(random_tokens(513, seed=3), dtype=torch.int32)
    model, loss, gradient = one_step(tiny_hp(grad_clip=1e9), tokens)
    _, loss4, gradient4 = one_step(tiny_hp(grad_clip=1e9, sequences_per_pass=4), tokens)
    assert loss4 == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(gradient4, gradient, rtol=1e-4, atol=1e-7)
    _, _, clipped = one_step(tiny_hp(grad_clip=0.01), tokens)
    torch.testing.assert_close(clipped, gradient * 0.01 / gradient.norm(), rtol=1e-3, atol=1e-7)
    plain, _, _ = one_step(tiny_hp(grad_clip=1e9, fused="false"), tokens)
    for got, want in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_padding_changes_no_logits():
    padded = gpt2.GPT(tiny_hp())
    plain = gpt2.GPT(tiny_hp(pad_vocab="false"))
    weights = padded.state_dict()
    assert len(weights["wte.weight"]) == 320
    plain.load_state_dict(weights | {"wte.weight": weights["wte.weight"][:257]})
    ids = torch.randint(257, (4, 32))
    torch.testing.assert_close(plain.logits(ids), padded.logits(ids)[..., :257])


def test_validation_loss_is_the_mean_over_tokens(folder, monkeypatch):
    monkeypatch.chdir(folder)
    hp = tiny_hp(sequences_per_pass=4)
    model = gpt2.build_model(hp)
    tokens = torch.tensor(random_tokens(1000, seed=9))
    with torch.no_grad():
        expected = model(tokens[:960].view(30, 32), tokens[1:961].view(30, 32)).item()
    assert gpt2.evaluate(model, hp) == pytest.approx(expected, rel=1e-6)


# -----------------------------------------------------------------------------
# Whole runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a whole run."""
    folder = tmp_path_factory.mktemp("whole")
    write_shards(folder)
    run(folder)
    return folder


def test_the_log(whole):
    log = read_log(whole)
    assert log.startswith(gpt2.SOURCE)
    for name in ("recipes/gpt2.py", "evals/openai_gpt2.py", "train_gpt.py"):
        header = f"\n\n{'-' * 40}\n# {name}\n{'-' * 40}\n\n"
        assert header + (ROOT / name).read_text() in log
    settings = json.loads(re.search("^hyperparameters: (.*)$", log, re.M)[1])
    assert settings == asdict(tiny_hp()) | {"world_size": 1}
    assert val_losses(log).keys() == {0, 2, 4, 6}
    assert "\ntarget 1.5: not met; val_loss " in log


def test_two_processes_are_one(folder, whole):
    """And the warm-up leaves no trace."""
    run(folder, sequences_per_pass=4, warmup_steps=0, nproc=2)
    losses = val_losses(read_log(whole))
    assert val_losses(read_log(folder)) == pytest.approx(losses, abs=1.5e-4)
    actual, expected = checkpoint_of(folder)["model"], checkpoint_of(whole)["model"]
    differences = [(actual[key] - expected[key]).abs().mean() for key in expected]
    assert sum(differences) / len(differences) < 2e-5  # after six steps of up to 1.4e-3 each


def die_in_fourth_step():
    train_step = gpt2.train_step

    def dying(model, optimizer, buckets, tokens, step, hp):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(model, optimizer, buckets, tokens, step, hp)

    gpt2.train_step = dying


def test_a_killed_run_can_be_resumed(folder, whole):
    arguments = [*words(), "--save_checkpoint"]
    job = Job(arguments, folder, hook=die_in_fourth_step, module="recipes.gpt2")
    assert job.wait() == -signal.SIGKILL
    assert checkpoint_of(folder)["run"]["step"] == 2
    run(folder, "--resume=latest")
    assert val_losses(read_log(folder)) == val_losses(read_log(whole))
    actual, expected = checkpoint_of(folder)["model"], checkpoint_of(whole)["model"]
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


def test_a_loss_that_is_not_finite_is_one_line(folder):
    arguments = words(learning_rate=1e30)
    result = run_forked(arguments, cwd=folder, script="recipes.gpt2")
    assert result.returncode == 2
    assert result.stderr == "error: step 2: the loss is not finite; lower --learning_rate\n"


@pytest.mark.slow
def test_compiled_run_agrees(folder):
    changes = dict(n_layer=1, num_iterations=2)
    arguments = words(compile="true", **changes)
    result = run_script(arguments, cwd=folder, script="recipes.gpt2", TORCH_COMPILE_DISABLE="0")
    assert result.returncode == 0, result.stderr[-2000:]
    run(folder, "--log_dir=uncompiled/logs", **changes)
    want = val_losses(read_log(folder / "uncompiled"))
    assert val_losses(result.stdout) == pytest.approx(want, abs=2e-4)


def test_levers_table(tmp_path):
    arguments = ["--steps", 1, "--sequences", 1]
    result = run_forked(arguments, cwd=tmp_path, script="tools.levers")
    assert result.returncode == 0, result.stderr[-2000:]
    lines = result.stdout.splitlines()
    assert lines[1].startswith("mini: 128 tokens per step")
    assert len(lines) == 4 + 7
    assert re.search(r"^float32 +[\d.]+ +[\d,]+ +1\.00 +1\.00$", lines[4])
    assert lines[5].split() == "TF32 matmuls - the hardware has none".split()
