"""
Tests of recipes/gpt2.py and gpu/levers.py.

They compare the model with transformers, micro-batches with one large batch, two processes with one,
and a killed and resumed run with an uninterrupted one.
"""

import itertools
import math
import re
import signal
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import parameters_to_vector
from transformers import GPT2Config, GPT2LMHeadModel

from recipes import gpt2, openai_gpt2
from train_gpt import InputError
from tests.training.test_checkpoint import kill_in_call, resuming
from tests.util import (
    ROOT,
    Job,
    assert_same_state,
    random_tokens,
    read_checkpoint,
    read_log,
    run_script,
    settings_of,
    succeeds,
    val_losses,
    write_shard,
)

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


def words(**changes):
    """The options of a tiny run."""
    return ["--track=mini", *(f"--{name}={value}" for name, value in (TINY | changes).items())]


def tiny_hp(**changes):
    _, hp = gpt2.parse_arguments(words(**changes))
    return hp


def write_shards(folder):
    """Two shards for training, one for validation."""
    write_shard(folder / "train_0.bin", random_tokens(1500, seed=0))
    write_shard(folder / "train_1.bin", random_tokens(2600, seed=1))
    write_shard(folder / "val.bin", random_tokens(1000, seed=9))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder, *more, nproc=1, hook=None, **changes):
    arguments = [*words(**changes), "--save_checkpoint", *more]
    return Job(arguments, folder, nproc, "recipes.gpt2", hook)


# -----------------------------------------------------------------------------
# The model and OpenAI's weights


@torch.no_grad()
def saved(path, **config):
    """A model of transformers, and saves its weights at `path`."""
    model = GPT2LMHeadModel(GPT2Config(**config)).eval()
    for p in model.parameters():
        p.normal_(std=0.2)  # also biases and gains of LayerNorm, because 0 and 1 would hide mistakes
    model.save_pretrained(path.parent)
    return model


def loaded(path, **changes):
    hp = replace(gpt2.TRACKS["mini"], block_size=64, vocab_size=211, pad_vocab=False, **changes)
    model = gpt2.GPT(hp)
    openai_gpt2.load_weights(model, path)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    "flash, sizes",
    [
        (False, dict(n_layer=3, n_head=4, n_embd=48)),
        (True, dict(n_layer=2, n_head=5, n_embd=40)),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, flash, sizes):
    path = tmp_path / "model.safetensors"
    theirs = saved(path, vocab_size=211, n_positions=64, **sizes)
    ours = loaded(path, flash=flash, **sizes)
    ids = torch.randint(211, (3, 50))
    torch.testing.assert_close(ours.logits(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_openai_keys_must_match(tmp_path):
    """OpenAI's own files have no prefix, and two mask buffers in each layer. Other differences are errors."""
    path = tmp_path / "model.safetensors"
    sizes = dict(n_layer=2, n_head=2, n_embd=32)
    saved(path, vocab_size=211, n_positions=64, **sizes)
    good = {key.removeprefix("transformer."): tensor for key, tensor in load_file(path).items()}
    head = good["wte.weight"].clone()
    one = torch.ones(32)
    save_file(
        good | {"h.0.attn.bias": one, "h.1.attn.masked_bias": one + 0, "lm_head.weight": head}, path
    )
    weight = loaded(path, **sizes).h[1].mlp.c_fc.weight
    torch.testing.assert_close(weight, good["h.1.mlp.c_fc.weight"].T)
    for key, tensor, message in (
        ("lm_head.weight", head + 1, "lm_head.weight isn't wte.weight"),
        ("h.2.ln_1.weight", one, "isn't this GPT-2: .*h.2.ln_1.weight"),
    ):
        save_file(good | {key: tensor}, path)
        with pytest.raises(InputError, match=message):
            loaded(path, **sizes)


@pytest.mark.parametrize(
    "name, count",
    [
        ("scratch", 124_475_904),  # with 47 rows of padding
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameter_counts(name, count):
    _, hp = gpt2.parse_arguments(["--track=fineweb", f"--init_from={name}"])
    with torch.device("meta"):
        model = gpt2.GPT(hp)
    assert sum(p.numel() for p in model.parameters()) == count


def test_initialization():
    hp = replace(gpt2.TRACKS["mini"], n_layer=8, n_head=4, n_embd=256)
    for name, p in gpt2.GPT(hp).named_parameters():
        if p.ndim == 1:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # 4 = (2 * 8 layers) ** 0.5
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < std / 20, name


def test_the_loss_of_openais_weights(folder, monkeypatch):
    """The weights of a small stand-in, without training. It needs no training shard."""
    path = folder / "model.safetensors"
    theirs = saved(path, n_layer=1, n_head=1, n_embd=8)
    tokens = random_tokens(2049, seed=9)
    write_shard(folder / "val.bin", tokens)
    monkeypatch.setitem(openai_gpt2.SIZES, "gpt2", (1, 1, 8))
    monkeypatch.setattr(openai_gpt2, "download", lambda name: path)
    options = (
        "--val_files=val.bin --val_tokens=2048 --sequences_per_pass=1 --compile=false --bf16=false"
    )
    assert (
        gpt2.main(["--track=fineweb", "--init_from=gpt2", "--num_iterations=0", *options.split()]) == 0
    )
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens[:-1]).view(2, 1024)).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item()
    assert val_losses(read_log(folder)) == {0: pytest.approx(expected, abs=1e-4)}


# -----------------------------------------------------------------------------
# Settings, optimizer, schedule, data


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(batch_tokens=500), "--batch_tokens 500: must be a multiple of 1 .* --block_size 32"),
        (dict(n_head=0), "--n_head must be more than 0"),
        (dict(n_head=3), "--n_embd 32: must be a multiple of --n_head 3"),
        (dict(num_iterations=8, repeat_data="false"), "has 7 batches .*, not 8"),
        (dict(batch_tokens=4096), "has 0 batches .*, not 1"),
        (dict(train_files="*.bin"), "val.bin is a training and a validation shard"),
        (dict(init_from="gpt3"), "--init_from gpt3: must be one of scratch, gpt2, "),
        (dict(init_from="gpt2"), "needs --track fineweb or edu"),
    ],
)
def test_impossible_settings(folder, changes, message):
    with pytest.raises(InputError, match=message):
        gpt2.check_inputs(*gpt2.parse_arguments(words(**changes)))


def test_decay_groups():
    hp = tiny_hp(beta1=0.9, beta2=0.95, weight_decay=0.1)
    model = gpt2.build_model(hp)
    optimizer = gpt2.build_optimizer(model, hp)
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        assert decay[p] == (0.0 if "ln_" in name or name.endswith("bias") else 0.1), name
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["eps"] == 1e-8


def test_learning_rate():
    """A line, then a quarter of a squared cosine."""
    hp = gpt2.TRACKS["fineweb"]
    for step in range(715):
        assert gpt2.get_lr(step, hp) == pytest.approx(6e-4 * (step + 1) / 715), step
    for step in range(715, 19_074):
        angle = math.pi / 2 * (step - 715) / 18_358
        want = 6e-5 + 5.4e-4 * math.cos(angle) ** 2
        assert gpt2.get_lr(step, hp) == pytest.approx(want), step
    assert gpt2.get_lr(0, replace(hp, warmup_iters=0)) == pytest.approx(6e-4)


def test_data_are_repeated(folder):
    """The shards have 1500 and 2600 tokens: 2 + 5 batches."""
    batches = list(itertools.islice(gpt2.training_batches(tiny_hp()), 9))
    for first, again in ((0, 7), (1, 8)):
        assert torch.equal(batches[first], batches[again])
    assert len(list(gpt2.training_batches(tiny_hp(repeat_data="false")))) == 7


def one_step(**changes):
    """Returns the weights after a step, the loss, and the gradient that the optimizer gets."""
    hp = tiny_hp(**dict(grad_clip=1e9) | changes)
    model = gpt2.build_model(hp)
    optimizer = gpt2.build_optimizer(model, hp)
    tokens = torch.tensor(random_tokens(513, seed=3), dtype=torch.int32)
    gradients = []

    def keep(*_):
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    optimizer.register_step_pre_hook(keep)
    loss = gpt2.train_step(model, optimizer, tokens, 1, hp)
    return model.state_dict(), loss, gradients[0]


def test_a_step():
    """Four micro-steps are one large batch. The gradient is clipped. Fused AdamW is AdamW."""
    weights, loss, gradient = one_step()
    _, loss4, gradient4 = one_step(sequences_per_pass=4)
    torch.testing.assert_close(loss4, loss)
    torch.testing.assert_close(gradient4, gradient, rtol=1e-4, atol=1e-7)
    _, _, clipped = one_step(grad_clip=0.01)
    torch.testing.assert_close(clipped, gradient * 0.01 / gradient.norm(), rtol=1e-3, atol=1e-7)
    plain, _, _ = one_step(fused="false")
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-5)


# -----------------------------------------------------------------------------
# Whole runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a whole run."""
    folder = tmp_path_factory.mktemp("whole")
    write_shards(folder)
    succeeds(start(folder))
    return folder


def test_the_log(whole):
    log = read_log(whole)
    assert log.startswith(gpt2.SOURCE)
    for name in ("recipes/gpt2.py", "recipes/openai_gpt2.py", "train_gpt.py"):
        assert f"# {name}\n{'-' * 40}\n\n{(ROOT / name).read_text()}" in log
    assert settings_of(log) == asdict(tiny_hp()) | {"world_size": 1}
    losses = val_losses(log)
    assert list(losses) == [0, 2, 4, 6]
    assert losses[6] < losses[0] - 0.02
    assert f"\ntarget {gpt2.TRACKS['mini'].target_val_loss}: not met in 6 steps; val_loss " in log


def test_two_processes_are_one(folder, whole):
    """And the warm-up leaves no trace."""
    succeeds(start(folder, sequences_per_pass=4, warmup_steps=0, nproc=2))
    losses = val_losses(read_log(whole))
    assert val_losses(read_log(folder)) == pytest.approx(losses, abs=1.5e-4)
    got, expected = (
        parameters_to_vector(read_checkpoint(path)["model"].values()) for path in (folder, whole)
    )
    assert (got - expected).abs().mean() < 2e-5  # after six steps of up to 1.4e-3 each


def test_a_killed_run_can_be_resumed(folder, whole):
    """It is killed in the fourth step. The warm-up has one."""
    kill = partial(kill_in_call, 5, "recipes.gpt2", "train_step")
    assert start(folder, hook=kill).wait() == -signal.SIGKILL
    assert read_checkpoint(folder)["run"]["step"] == 2
    succeeds(start(folder, resuming(folder)))
    assert val_losses(read_log(folder)) == val_losses(read_log(whole))
    assert_same_state(read_checkpoint(folder), read_checkpoint(whole))


@pytest.mark.slow
def test_compiled_run_agrees(folder, whole):
    arguments = words(compile="true")
    result = run_script(arguments, cwd=folder, script="recipes.gpt2", TORCH_COMPILE_DISABLE="0")
    assert result.returncode == 0, result.stderr
    assert val_losses(result.stdout) == pytest.approx(val_losses(read_log(whole)), abs=2e-4)


def test_levers_table(tmp_path):
    job = succeeds(Job("--steps 1 --sequences 1".split(), tmp_path, script="gpu.levers"))
    lines = job.out.splitlines()
    assert lines[1].startswith("mini: 128 tokens per step")
    assert len(lines) == 4 + 7
    assert re.search(r"^float32 +[\d.]+ +[\d,]+ +1\.00 +1\.00$", lines[4])
