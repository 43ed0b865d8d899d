"""
Tests of baseline/.

They compare the model with transformers, micro-batches with one large batch, two processes with
one, and the data with those of train_gpt.py.
"""
import dataclasses
import gc
import json
import math
import os
import platform
import re
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from util import (
    ROOT,
    free_port,
    random_tokens,
    rank_env,
    run_forked,
    run_script,
    start_processes,
    val_losses,
    write_shard,
)

BASELINE = ROOT / "baseline"
SCRIPT = BASELINE / "train_gpt2.py"
sys.path.insert(0, str(BASELINE))
import hellaswag_scoring
import train_gpt
import train_gpt2
from train_gpt2 import GPT, GPTConfig, Hyperparameters, InputError

CPU = torch.device("cpu")
# A model that trains in a second. It uses float32, so that sums in another order agree closely.
TINY = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 32,
    "batch_tokens": 512,
    "micro_batch": 16,
    "val_tokens": 960,
    "num_iterations": 4,
    "warmup_iters": 2,
    "val_loss_every": 2,
    "bf16": False,
    "compile": False,
    "samples": 0,
}
TINY_CONFIG = GPTConfig(
    block_size=32, vocab_size=257, padded_vocab_size=320, n_layer=2, n_head=2, n_embd=32
)


def tiny_hp(**changes):
    return replace(train_gpt2.TRACKS["mini"], **(TINY | changes))


def command_line(**changes):
    arguments = ["--track", "mini", "--device", "cpu"]
    for name, value in (TINY | changes).items():
        arguments += [f"--{name}", str(value)]
    return arguments


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The current folder of the test. It has byte shards: two for training, one for validation."""
    folder = tmp_path / "data" / "shakespeare"
    folder.mkdir(parents=True)
    write_shard(folder / "shakespeare_train_000000.bin", random_tokens(1500, seed=0))
    write_shard(folder / "shakespeare_train_000001.bin", random_tokens(2600, seed=1))
    write_shard(folder / "shakespeare_val_000000.bin", random_tokens(1000, seed=9))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def newest(paths):
    return max(paths, key=lambda path: path.stat().st_mtime_ns)


def run_here(folder, **changes):
    """Calls main() in this process. Returns the text of its log."""
    train_gpt2.main(command_line(**changes))
    return newest((folder / "logs").glob("*.txt")).read_text()


def saved_model(folder):
    return newest((folder / "checkpoints").glob("*/model.safetensors"))


# -----------------------------------------------------------------------------
# The model and OpenAI's weights

@torch.no_grad()
def hf_model(n_layer, n_head, n_embd):
    config = GPT2Config(
        vocab_size=211, n_positions=64, n_layer=n_layer, n_head=n_head, n_embd=n_embd
    )
    model = GPT2LMHeadModel(config).eval()
    for p in model.parameters():
        p.normal_(std=0.2)  # also biases and LayerNorm gains, because 0 and 1 would hide mistakes
    return model


@torch.no_grad()
@pytest.mark.parametrize("n_layer, n_head, n_embd", [
    (1, 1, 16),
    (2, 2, 32),
    (3, 4, 48),
    (2, 5, 40),
])
def test_logits_are_those_of_transformers(tmp_path, n_layer, n_head, n_embd):
    theirs = hf_model(n_layer, n_head, n_embd)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(211, (3, 50))
    for flash in (True, False):
        ours = GPT(GPTConfig(64, 211, 211, n_layer, n_head, n_embd), flash)
        train_gpt2.load_openai_weights(ours, tmp_path / "model.safetensors")
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
        loss = ours(ids[:, :-1], ids[:, 1:])
        expected = theirs(ids, labels=ids).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_openai_keys_must_match(tmp_path):
    """
    OpenAI's own files have no prefix, and two mask buffers in each layer.

    Any other difference is an error that names the key.
    """
    hf_model(2, 2, 32).save_pretrained(tmp_path)
    good = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        good[key.removeprefix("transformer.")] = tensor
    masks = {}
    for i in range(2):
        masks[f"h.{i}.attn.bias"] = torch.ones(1)
        masks[f"h.{i}.attn.masked_bias"] = torch.ones(1)
    path = tmp_path / "other.safetensors"

    def load(tensors):
        save_file(tensors, path, {"format": "pt"})
        model = GPT(GPTConfig(64, 211, 211, 2, 2, 32))
        train_gpt2.load_openai_weights(model, path)
        return model

    c_fc = load(good | masks).h[1].mlp.c_fc.weight
    torch.testing.assert_close(c_fc, good["h.1.mlp.c_fc.weight"].T)
    wte = load(good | {"lm_head.weight": good["wte.weight"].clone()}).wte.weight
    torch.testing.assert_close(wte, good["wte.weight"])

    without_bias = dict(good)
    del without_bias["h.0.attn.c_attn.bias"]
    for bad, message in [
        (good | {"h.2.ln_1.weight": torch.ones(32)}, "unexpected key h.2.ln_1.weight"),
        (without_bias, "h.0.attn.c_attn.bias is missing"),
        (good | {"h.1.mlp.c_fc.weight": torch.ones(128, 32)}, "h.1.mlp.c_fc.weight has shape"),
        (
            good | {"lm_head.weight": good["wte.weight"] + 1},
            "lm_head.weight differs from the token",
        ),
    ]:
        with pytest.raises(InputError, match=re.escape(message) + ".*; delete this model"):
            load(bad)


def count_parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_parameter_counts():
    with torch.device("meta"):
        assert count_parameters(GPT(GPTConfig())) == 124_475_904
        for name, (n_layer, n_head, n_embd) in train_gpt2.FAMILY.items():
            sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
            ours = GPT(GPTConfig(padded_vocab_size=50257, **sizes))
            theirs = GPT2LMHeadModel(GPT2Config(**sizes))
            assert count_parameters(ours) == theirs.num_parameters(), name


def test_initialization():
    model = GPT(GPTConfig(256, 300, 320, 8, 4, 256))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.ndim == 1:
            assert (p == 1).all(), name
        else:
            std = 0.02
            if name.endswith("c_proj.weight"):
                std = 0.02 / 4  # (2 * 8 layers) ** -0.5
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < std / 20, name


def test_initial_loss_is_near_that_of_guessing():
    model = GPT(GPTConfig(64, 257, 320, 2, 2, 32))
    loss = model(torch.randint(257, (4, 64)), torch.randint(257, (4, 64)))
    assert loss.item() == pytest.approx(math.log(320), abs=0.05)


def test_encoding():
    encode, token_bytes = train_gpt2.codec(50257)
    text = "Hello, I'm a language model,"
    ids = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert encode(text) == ids
    assert b"".join(map(token_bytes, ids)) == text.encode()
    encode, token_bytes = train_gpt2.codec(257)
    assert encode("aé") == [97, 0xC3, 0xA9]
    assert b"".join(map(token_bytes, [97, 256, 0xC3, 0xA9])) == "aé".encode()
    with pytest.raises(InputError, match="tokens of a vocabulary of 300 can't be converted") as e:
        train_gpt2.codec(300)
    message = f"{e.value}; to train without text, use --samples 0 --hellaswag 0"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        train_gpt2.load_text_tools(tiny_hp(vocab_size=300, samples=1))
    train_gpt2.load_text_tools(tiny_hp(vocab_size=300, samples=0))


# -----------------------------------------------------------------------------
# Settings

def test_mini_is_the_mini_of_train_gpt():
    """Losses can be compared only if the data and the target are the same."""
    ours = train_gpt2.TRACKS["mini"]
    theirs = train_gpt.TRACKS["mini"]
    for name in ("train_files", "val_files", "val_tokens", "target_val_loss", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        train_gpt2.parse_args(["--track", "mini", "--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(Hyperparameters):
        assert f"--{field.name} " in text
        assert field.metadata["help"], field.name
    words = " ".join(text.split())
    assert "--track {fineweb,mini} data, model and default settings; default: " in words
    assert "--device {cpu,cuda} where to train; default: cuda with a GPU, otherwise cpu " in words


# -----------------------------------------------------------------------------
# Optimizer and schedule

def test_decay_groups():
    hp = tiny_hp(beta1=0.9, beta2=0.95, weight_decay=0.1)
    model, _, optimizer, _ = train_gpt2.build(hp, CPU)
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    decayed_ids = {id(p) for p in decayed["params"]}
    kept_ids = {id(p) for p in kept["params"]}
    for name, p in model.named_parameters():
        is_matrix = name.endswith(".weight") and "ln_" not in name
        assert (id(p) in decayed_ids) == is_matrix, name
        assert (id(p) in kept_ids) == (not is_matrix), name
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["eps"] == 1e-8
    assert optimizer.defaults["fused"]
    assert model.wte.weight.size(0) == 320


def test_learning_rate_corners():
    hp = Hyperparameters()
    for step, expected in [
        (0, 6e-4 / 715),
        (714, 6e-4),
        (715, 6e-4),
        ((715 + 19_073) // 2, (6e-4 + 6e-5) / 2),
        (19_073, 6e-5),
        (30_000, 6e-5),
    ]:
        assert train_gpt2.get_lr(step, hp) == pytest.approx(expected, rel=1e-6), step
    curve = [train_gpt2.get_lr(step, hp) for step in range(715, 19_074)]
    assert all(a > b for a, b in zip(curve, curve[1:]))
    no_warmup = replace(hp, warmup_iters=0)
    assert train_gpt2.get_lr(0, no_warmup) == pytest.approx(6e-4)
    only_warmup = replace(hp, num_iterations=5)
    assert train_gpt2.get_lr(5, only_warmup) == pytest.approx(6e-4 * 6 / 715)
    to_zero = replace(hp, final_lr_frac=0.0)
    assert train_gpt2.get_lr((715 + 19_073) // 2, to_zero) == pytest.approx(3e-4)
    assert train_gpt2.get_lr(19_073, to_zero) == 0


def one_step(hp, inputs, targets):
    model, compiled, optimizer, autocast = train_gpt2.build(hp, CPU)
    loss, norm = train_gpt2.train_step(
        compiled, optimizer, autocast, inputs, targets, hp, hp.learning_rate
    )
    return model, loss.item(), norm.item()


def test_four_micro_steps_are_one_large_batch():
    inputs, targets = torch.randint(257, (2, 16, 32))
    whole, loss, norm = one_step(tiny_hp(micro_batch=16), inputs, targets)
    parts, loss4, norm4 = one_step(tiny_hp(micro_batch=4), inputs, targets)
    assert loss4 == pytest.approx(loss, rel=1e-6)
    assert norm4 == pytest.approx(norm, rel=1e-5)
    # Adam's first step is about lr * sign(gradient). Rounding changes the sign of a few gradients
    # near zero, so the test checks the mean difference and not the largest.
    pairs = zip(whole.parameters(), parts.parameters())
    differences = torch.cat([(a - b).flatten().abs() for a, b in pairs])
    assert differences.mean() < 1e-3 * tiny_hp().learning_rate


def gradient_norm(model):
    gradients = [p.grad.flatten() for p in model.parameters()]
    return torch.cat(gradients).double().norm().item()


def test_gradient_norm_is_clipped_and_true():
    hp = tiny_hp(grad_clip=0.01)
    inputs, targets = torch.randint(257, (2, 16, 32))
    model, compiled, optimizer, autocast = train_gpt2.build(hp, CPU)
    reference = GPT(model.config)
    reference.load_state_dict(model.state_dict())
    reference(inputs, targets).backward()
    clipped = []
    optimizer.register_step_pre_hook(lambda *_: clipped.append(gradient_norm(model)))
    _, norm = train_gpt2.train_step(compiled, optimizer, autocast, inputs, targets, hp, 1e-3)
    assert norm.item() == pytest.approx(gradient_norm(reference), rel=1e-4)
    assert norm > 0.01
    assert clipped == [pytest.approx(0.01, rel=1e-3)]


@torch.no_grad()
def set_weights(model):
    """Sets the same weights, whether the vocabulary is padded or not."""
    for name, p in model.named_parameters():
        rng = torch.Generator().manual_seed(len(name))
        rows = 320 if name == "wte.weight" else len(p)
        values = 0.05 * torch.randn(rows, *p.shape[1:], generator=rng)
        p.copy_(values[:len(p)])


@pytest.mark.parametrize("lever", ["flash", "pad_vocab", "fused", "tf32"])
def test_a_lever_changes_speed_alone(lever):
    inputs, targets = torch.randint(257, (2, 16, 32))
    logits = []
    norms = []
    for on in (True, False):
        hp = tiny_hp(**{lever: on})
        model, compiled, optimizer, autocast = train_gpt2.build(hp, CPU)
        set_weights(model)
        logits.append(compiled(inputs)[..., :257].detach())
        _, norm = train_gpt2.train_step(compiled, optimizer, autocast, inputs, targets, hp, 1e-3)
        norms.append(norm)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    if lever != "pad_vocab":  # the logits of the padding change the loss
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=1e-5)


# -----------------------------------------------------------------------------
# Data

@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_batches_are_those_of_the_main_script(workplace, world_size):
    hp = tiny_hp()
    for rank in range(world_size):
        ours = train_gpt2.training_batches(hp, rank, world_size, CPU)
        theirs = train_gpt.distributed_data_generator(
            hp.train_files, hp.batch_tokens, 257, rank, world_size
        )
        theirs = list(theirs)
        assert len(theirs) == 2 + 5  # the shards have 1500 and 2600 tokens, a batch needs 512 + 1
        theirs.append(theirs[0])  # after the last shard, the first one is read again
        for (x, y), tokens in zip(ours, theirs):
            assert torch.equal(x.flatten(), tokens[:-1].long())
            assert torch.equal(y.flatten(), tokens[1:].long())
            assert x.shape == (512 // 32 // world_size, 32)


@pytest.mark.parametrize("world_size, micro_batch", [(1, 16), (1, 7), (2, 4), (3, 7)])
def test_validation_counts_every_token_once(workplace, world_size, micro_batch):
    hp = tiny_hp(micro_batch=micro_batch)
    path = workplace / "data" / "shakespeare" / "shakespeare_val_000000.bin"
    tokens = np.fromfile(path, "<u2", offset=1024).tolist()
    found = []
    for rank in range(world_size):
        for inputs, targets in train_gpt2.validation_batches(hp, rank, world_size, CPU):
            assert inputs.shape == targets.shape == (micro_batch, 32)
            for x, y in zip(inputs.tolist(), targets.tolist()):
                if y != [-1] * 32:  # padding
                    found.append((x, y))
    expected = []
    for i in range(0, 960, 32):
        expected.append((tokens[i:i + 32], tokens[i + 1:i + 33]))
    assert sorted(found) == sorted(expected)


def test_validation_loss_is_the_mean_over_tokens(workplace):
    hp = tiny_hp(micro_batch=7)
    model, compiled, _, autocast = train_gpt2.build(hp, CPU)
    tokens = train_gpt2.load_shard(hp.val_files.replace("*", "000000"), 257)
    tokens = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        expected = model(tokens[:960].view(30, 32), tokens[1:961].view(30, 32)).item()
    batches = train_gpt2.validation_batches(hp, 0, 1, CPU)
    total, count = train_gpt2.validate(compiled, autocast, batches, CPU).tolist()
    assert count == 960
    assert total / count == pytest.approx(expected, rel=1e-6)


# -----------------------------------------------------------------------------
# Whole runs

VALIDATION = r"step:\d/4 val_loss:\d\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms"
TRAINING_STEP = (
    r"step:\d/4 train_time:\d+ms step_avg:\d+\.\d\dms train_loss:\d+\.\d{4} "
    r"lr:\d\.\d\de-\d\d grad_norm:\d+\.\d{3} tok/s:\d+"
)


def test_the_log(workplace, capsys):
    log = run_here(workplace, samples=1)
    source, machine, rest = log.split("\n" + "=" * 100 + "\n", 2)
    assert source == SCRIPT.read_text()
    assert "Running PyTorch" in machine
    assert "cores" in machine
    assert str(workplace) not in rest
    assert str(ROOT) not in rest

    lines = rest.strip().splitlines()
    settings = json.loads(lines[0].removeprefix("hyperparameters: "))
    expected = dataclasses.asdict(tiny_hp(samples=1))
    assert settings == expected | {"model": "gpt2", "track": "mini", "world_size": 1}
    validations = [line for line in lines if "val_loss:" in line]
    assert [line.split()[0] for line in validations] == ["step:0/4", "step:2/4", "step:4/4"]
    for line in validations:
        assert re.fullmatch(VALIDATION, line), line
    steps = [line for line in lines if "train_loss:" in line]
    assert len(steps) == 4
    for line in steps:
        assert re.fullmatch(TRAINING_STEP, line), line
    assert sum(line.startswith("sample step:") for line in lines) == 3
    assert lines[-2].startswith("target 1.5: not met; val_loss ")
    assert re.fullmatch(r"peak memory allocated: \d+ MiB reserved: \d+ MiB", lines[-1])
    console = capsys.readouterr().out
    assert all(line in console for line in validations)


def test_the_saved_model(workplace):
    run_here(workplace, num_iterations=1)
    with safe_open(saved_model(workplace), "pt") as file:
        metadata = file.metadata()
    assert metadata["model"] == "gpt2"
    assert json.loads(metadata["config"]) == dataclasses.asdict(TINY_CONFIG)
    assert not list(workplace.rglob("*.tmp"))


def test_warm_up_leaves_no_trace(workplace):
    run_here(workplace, num_iterations=3, val_loss_every=0)
    hp = tiny_hp(num_iterations=3)
    model, compiled, optimizer, autocast = train_gpt2.build(hp, CPU)
    batches = train_gpt2.training_batches(hp, 0, 1, CPU)
    for step in range(3):
        inputs, targets = next(batches)
        lr = train_gpt2.get_lr(step, hp)
        train_gpt2.train_step(compiled, optimizer, autocast, inputs, targets, hp, lr)
    saved = load_file(saved_model(workplace))
    assert saved.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(saved[name], weight), name


def gradient_norms(text):
    return [float(norm) for norm in re.findall(r"grad_norm:(\d\S*)", text)]


def test_two_processes_are_one(workplace):
    one = run_here(workplace, grad_clip=0.5)
    expected = load_file(saved_model(workplace))
    arguments = command_line(grad_clip=0.5, micro_batch=4)
    result = run_forked(arguments, cwd=workplace, nproc=2, script=SCRIPT)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "in 2 micro-steps x 2 processes x 4 sequences of 32" in result.stdout
    losses = val_losses(result.stdout)
    assert losses == pytest.approx(val_losses(one), abs=1.5e-4)
    assert losses.keys() == {0, 2, 4}
    assert gradient_norms(result.stdout) == pytest.approx(gradient_norms(one), abs=1.1e-3)
    actual = load_file(saved_model(workplace))
    differences = [(actual[key] - expected[key]).abs().mean() for key in expected]
    assert sum(differences) / len(differences) < 2e-5  # after four steps of up to 2e-3 each


def main_then_what_is_left(rank, port, folder):
    """Runs main() of one rank. When it leaves the process group, no DDP object may exist."""
    os.environ.update(rank_env(rank, 2, port))
    os.chdir(folder)
    leave = dist.destroy_process_group
    left = []

    def watched():
        for thing in gc.get_objects():
            if isinstance(thing, DistributedDataParallel):
                left.append(thing)
        leave()

    dist.destroy_process_group = watched
    train_gpt2.main(command_line(micro_batch=4, num_iterations=1))
    assert not left


def test_the_group_ends_after_what_uses_it(workplace):
    """
    DDP's reducer must not outlive the process group.

    Otherwise it waits for gloo's threads while it holds the GIL, and a thread may need the GIL.
    """
    start_processes(main_then_what_is_left, 2, free_port(), str(workplace))


def test_loss_falls_on_a_tiny_corpus(workplace):
    text = b"It was the best of times, it was the worst of times. " * 80
    for path in (workplace / "data" / "shakespeare").glob("*.bin"):
        write_shard(path, list(text))
    log = run_here(
        workplace,
        num_iterations=120,
        warmup_iters=10,
        learning_rate=4e-3,
        val_loss_every=120,
        target_val_loss=1.0,
    )
    losses = val_losses(log)
    assert losses[0] > 5
    assert losses[120] < 1.0
    assert "\ntarget 1.0: met at step 120 after " in log


def test_compiled_run_agrees(workplace):
    """A compiled run has the losses of an uncompiled one. It is the only compiled run here."""
    result = run_script(
        command_line(compile=True, n_layer=1),
        cwd=workplace,
        script=SCRIPT,
        TORCH_COMPILE_DISABLE="0",
    )
    assert result.returncode == 0, result.stderr[-2000:]
    expected = val_losses(run_here(workplace, n_layer=1))
    assert val_losses(result.stdout) == pytest.approx(expected, abs=2e-4)


def test_hellaswag_during_training(workplace, monkeypatch):
    item = {"ctx": "to be or not", "endings": [" to be", "x", "yy", "zzz"], "label": 0}
    monkeypatch.setattr(hellaswag_scoring, "load_items", lambda limit: [item] * limit)
    log = run_here(workplace, hellaswag=2, val_loss_every=0)
    accuracy = r"\d\.\d{4} \+- \d\.\d{4}"
    line = rf"^hellaswag step:4 acc:{accuracy} acc_norm:{accuracy} items:2$"
    assert re.search(line, log, re.MULTILINE)


def test_hellaswag_of_a_broken_model_is_an_input_error(workplace, monkeypatch):
    """train_gpt2.py prints an InputError as one line."""
    item = {"ctx": "to be or not", "endings": [" to be", "x", "yy", "zzz"], "label": 0}
    monkeypatch.setattr(hellaswag_scoring, "load_items", lambda limit: [item] * limit)
    losses = torch.full((8,), torch.nan)
    monkeypatch.setattr(hellaswag_scoring, "ending_losses", lambda *_: (losses, losses))
    with pytest.raises(InputError, match="^HellaSwag after step 0: the model's loss is not finite"):
        run_here(workplace, hellaswag=2, val_loss_every=4)


def test_openais_weights_are_evaluated_without_a_gpu(workplace):
    """The command in README.md checks its settings. It needs a validation shard only."""
    words = "--track fineweb --init_from gpt2 --num_iterations 0"
    for text in (train_gpt2.__doc__, (BASELINE / "README.md").read_text(encoding="utf-8")):
        assert f"python baseline/train_gpt2.py {words}\n" in text
    val_files = workplace / "fineweb_val_000000.bin"
    write_shard(val_files, random_tokens(2049, seed=9))
    changes = ["--device", "cpu", "--val_files", str(val_files), "--val_tokens", "2048"]
    _, hp = train_gpt2.parse_args([*words.split(), *changes])
    hp = train_gpt2.check(hp, world_size=1)
    assert (hp.init_from, hp.n_layer, hp.n_embd) == ("gpt2", 12, 768)
    with pytest.raises(InputError, match="needs GPT-2's tokens \\(--track fineweb\\)"):
        _, mini = train_gpt2.parse_args(["--track", "mini", *words.split()[2:], "--device", "cpu"])
        train_gpt2.check(mini, world_size=1)


def test_fineweb_needs_101_shards_of_100m_tokens(monkeypatch):
    """README.md says so. The headers of the shards are not read here."""
    hp = train_gpt2.TRACKS["fineweb"]
    monkeypatch.setattr(train_gpt2, "shard_length", lambda path: 100_000_000)
    shards = [f"{i}.bin" for i in range(101)]
    monkeypatch.setattr(train_gpt2, "find_shards", lambda pattern: shards)
    train_gpt2.check(hp, world_size=8)
    shards.pop()
    with pytest.raises(InputError, match="for 19000 steps, and the run needs 19073; add shards"):
        train_gpt2.check(hp, world_size=8)


def test_pyarrow_is_missing(monkeypatch):
    def fail(limit):
        raise hellaswag_scoring.DataError("HellaSwag needs pyarrow")

    monkeypatch.setattr(hellaswag_scoring, "load_items", fail)
    message = "^HellaSwag needs pyarrow, or use --hellaswag 0 to train without HellaSwag$"
    with pytest.raises(InputError, match=message):
        train_gpt2.load_text_tools(tiny_hp(hellaswag=2))


# -----------------------------------------------------------------------------
# Bad input

@pytest.mark.parametrize("changes, message", [
    ({"batch_tokens": 500}, "--batch_tokens 500 must be a multiple"),
    ({"micro_batch": 3}, "--micro_batch 3 must divide the 16 sequences"),
    ({"n_head": 3}, "--n_embd 32 must be a multiple of --n_head 3"),
    ({"n_layer": 0}, "--n_layer must be at least 1"),
    ({"learning_rate": math.nan}, "--learning_rate must be a positive number"),
    ({"grad_clip": 0.0}, "--grad_clip must be a positive number"),
    ({"beta2": 1.0}, "--beta2 must be in [0, 1)"),
    ({"final_lr_frac": 1.1}, "--final_lr_frac must be in [0, 1]"),
    ({"seed": 2**64}, "--seed must be in [-2^63, 2^64), not 18446744073709551616"),
    ({"seed": -2**63 - 1}, "--seed must be in [-2^63, 2^64), not -9223372036854775809"),
    ({"samples": 1, "sample_prompt": ""}, "--sample_prompt must not be empty; to train without"),
    (
        {"num_iterations": 8, "repeat_data": False},
        "has only enough tokens for 7 steps, and the run needs 8; add shards (see data/README.md), "
        "lower --num_iterations or use --repeat_data true",
    ),
    ({"val_tokens": 1024}, "at most 992"),
    ({"val_tokens": 100}, "must be a multiple of --block_size 32"),
    ({"train_files": "nothing/*.bin"}, "no shards match nothing/*.bin"),
    ({"init_from": "gpt3"}, "--init_from gpt3: choose scratch, gpt2"),
    ({"init_from": "gpt2"}, "needs GPT-2's tokens"),
])
def test_impossible_settings(workplace, changes, message):
    with pytest.raises(InputError) as e:
        train_gpt2.check(tiny_hp(**changes), world_size=1)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("seed", [-2**63, 2**64 - 1])
def test_the_greatest_seeds(workplace, seed):
    hp = train_gpt2.check(tiny_hp(seed=seed), world_size=1)
    train_gpt2.build(hp, CPU)


def test_no_prompt_is_needed_without_samples(workplace):
    assert train_gpt2.check(tiny_hp(samples=0, sample_prompt=""), world_size=1)


@pytest.mark.parametrize("header, message", [
    ({"magic": 1}, "wrong magic number.*; delete it and run the data script again"),
    ({"version": 2}, "shard version 2 instead of 1; delete it and run the data script again"),
    ({"count": 99}, "size differs; delete it and run the data script again"),
])
def test_impossible_shards(workplace, header, message):
    path = workplace / "data" / "shakespeare" / "shakespeare_train_000001.bin"
    write_shard(path, random_tokens(600, 0), **header)
    with pytest.raises(InputError, match=message):
        train_gpt2.check(tiny_hp(), world_size=1)


def test_tokens_outside_the_vocabulary(workplace):
    path = write_shard(workplace / "a.bin", [1, 257, 3])
    with pytest.raises(InputError, match="token id 257 is outside the vocabulary of 257; is it"):
        train_gpt2.load_shard(path, 257)


@pytest.mark.parametrize("run, changes, message", [
    (run_script, {"n_head": 3}, "error: --n_embd 32 must be a multiple of --n_head 3"),
    (run_forked, {"seed": 10**23}, r"error: --seed must be in \[-2\^63, 2\^64\), not 10{23}$"),
    (run_forked, {"samples": 1, "sample_prompt": ""}, "error: --sample_prompt must not be empty"),
    (
        run_forked,
        {"learning_rate": 1e30, "val_loss_every": 0},
        r"error: step \d+: the loss \(.+\) or the gradient norm \(.+\) is not finite; lower --lear",
    ),
])
def test_errors_are_one_line(workplace, run, changes, message):
    """Runs the script with a bad setting, and with one that makes the loss infinite."""
    result = run(command_line(**changes), cwd=workplace, script=SCRIPT)
    assert result.returncode == 2
    assert re.match(message, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
    assert not (workplace / "checkpoints").exists()


def test_levers_table(workplace):
    arguments = ["--device", "cpu", "--steps", 1, "--micro_batch", 1]
    result = run_script(arguments, cwd=workplace, script=BASELINE / "levers.py")
    assert result.returncode == 0, result.stderr[-2000:]
    lines = result.stdout.splitlines()
    assert lines[1].startswith("mini: 3 layers, width 224, 1 x 128 tokens per step")
    rows = lines[4:]
    assert [row[:18].strip() for row in rows] == [
        "float32",
        "TF32 matmuls",
        "bf16 autocast",
        "torch.compile",
        "flash attention",
        "padded vocabulary",
        "fused AdamW",
    ]
    assert re.search(r"\d\.\d\s+[\d,]+\s+1\.00\s+1\.00$", rows[0])
    assert rows[1].split()[2:] == "- the hardware has no TF32".split()
    assert all(len(line) <= 80 for line in lines[3:])


# Runs levers.py, and presses Ctrl-C while it makes the first model
INTERRUPTED = f"""\
import runpy, signal, sys
sys.path.insert(0, {str(BASELINE)!r})
import train_gpt2
def build(hp, device):
    signal.raise_signal(signal.SIGINT)
train_gpt2.build = build
runpy.run_path({str(BASELINE / 'levers.py')!r}, run_name='__main__')
"""


def test_interrupted_levers_print_one_line(tmp_path):
    launcher = tmp_path / "launch.py"
    launcher.write_text(INTERRUPTED)
    result = run_script(["--device", "cpu"], cwd=tmp_path, script=launcher)
    assert result.returncode == 130
    assert result.stderr == "interrupted\n"


# -----------------------------------------------------------------------------
# Machines

SMI = """+-----+
| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |
|   0  NVIDIA H100 80GB HBM3          On  | 00000000:19:00.0 Off |
+-----+
+-----+
| Processes:    |
|   /home/someone/python    |
+-----+
"""


@pytest.mark.parametrize("script, found", [
    (None, "2x NVIDIA A100-SXM4-80GB"),
    ("echo NVIDIA-SMI has failed\nexit 9", "2x NVIDIA A100-SXM4-80GB"),
    ("cat <<'EOF'\n" + SMI + "EOF", "2x NVIDIA H100 80GB HBM3"),
])
def test_a_gpu_with_and_without_nvidia_smi(tmp_path, monkeypatch, script, found):
    """The log always names the GPUs, so that the tools know the hardware. It contains no paths."""
    sys.path.append(str(ROOT / "tools"))
    import log_parsing
    if script is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        (tmp_path / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    text = train_gpt2.describe_machine(torch.device("cuda", 0), 2)
    assert log_parsing.find_hardware(text) == found
    assert "/home" not in text
    assert text.endswith("2 processes on cuda")


def test_peak_memory_on_other_systems(monkeypatch):
    """Linux counts in KiB, macOS counts in bytes, and Windows has no module `resource`."""
    usage = types.SimpleNamespace(ru_maxrss=3 * 2**20)
    resource = types.SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage)
    monkeypatch.setitem(sys.modules, "resource", resource)
    for system, mib in (("linux", 3 * 2**10), ("darwin", 3)):
        monkeypatch.setattr(sys, "platform", system)
        assert train_gpt2.peak_memory_mib(CPU) == (mib, mib)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert train_gpt2.peak_memory_mib(CPU) is None


# Prints the variable when torch is about to be imported
WATCH_TORCH = f"""\
import os, sys
sys.path.append({str(BASELINE)!r})

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("TORCHINDUCTOR_CPP_MARCH"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Watch())
import train_gpt2
"""


@pytest.mark.parametrize("mine, wanted", [
    (None, "native -mtune=icelake-server"),
    ("native", "native"),
])
def test_what_the_baseline_compiles_for(mine, wanted):
    """
    The baseline sets the same variable as train_gpt.py, before it imports torch.

    A user's own setting stays.
    """
    environment = dict(os.environ)
    environment.pop("TORCHINDUCTOR_CPP_MARCH", None)
    if mine is not None:
        environment["TORCHINDUCTOR_CPP_MARCH"] = mine
    command = [sys.executable, "-c", WATCH_TORCH]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    is_intel = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_intel and mine is None:
        wanted = "None"
    assert done.stdout.strip() == wanted, done.stderr
