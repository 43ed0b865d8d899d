"""The GPT-2 baseline against transformers, against one large batch, against one process, against its own numbers."""
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
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from util import ROOT, free_port, random_tokens, rank_env, run_forked, run_script, start_processes, val_losses, write_shard

BASELINE = ROOT / "baseline"
sys.path.insert(0, str(BASELINE))
import train_gpt
import train_gpt2
from train_gpt2 import GPT, GPTConfig, Hyperparameters, InputError

# a model that trains in a second, in float32, so that sums in another order agree closely
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_tokens=512, micro_batch=16, val_tokens=960,
            num_iterations=4, warmup_iters=2, val_loss_every=2, bf16=False, compile=False, flash=True,
            samples=0)


def options(**settings):
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder to run in, with byte shards: two for training, one for validation."""
    folder = tmp_path / "data" / "shakespeare"
    folder.mkdir(parents=True)
    for i, n in enumerate([1500, 2600]):
        write_shard(folder / f"shakespeare_train_{i:06d}.bin", random_tokens(n, seed=i))
    write_shard(folder / "shakespeare_val_000000.bin", random_tokens(1000, seed=9))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tiny_hp(**changes):
    return replace(train_gpt2.TRACKS["shakespeare"], **(TINY | changes))


def run_here(folder, **changes):
    """main() in this process -> the text of its log."""
    train_gpt2.main(["--track", "shakespeare", "--device", "cpu", *options(**(TINY | changes))])
    return max((folder / "logs").glob("*.txt"), key=lambda p: p.stat().st_mtime_ns).read_text()


def saved_model(folder):
    return max((folder / "checkpoints").glob("*/model.safetensors"), key=lambda p: p.stat().st_mtime_ns)


# -----------------------------------------------------------------------------
# The model and OpenAI's weights

def hf_model(n_layer, n_head, n_embd, vocab_size=211, n_positions=64):
    config = GPT2Config(vocab_size=vocab_size, n_positions=n_positions, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2)  # biases and LayerNorm gains too: none is at a value that hides a mistake
    return model


@pytest.mark.parametrize("n_layer, n_head, n_embd", [(1, 1, 16), (2, 2, 32), (3, 4, 48), (2, 5, 40)])
def test_logits_are_those_of_transformers(tmp_path, n_layer, n_head, n_embd):
    theirs = hf_model(n_layer, n_head, n_embd)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(211, (3, 50))
    for flash in (True, False):
        ours = GPT(GPTConfig(64, 211, 211, n_layer, n_head, n_embd), flash)
        train_gpt2.load_openai_weights(ours, tmp_path / "model.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours(ids[:, :-1], ids[:, 1:]), theirs(ids, labels=ids).loss, rtol=1e-5, atol=1e-5)


def test_openai_keys_must_match(tmp_path):
    """OpenAI's own files have no prefix and two mask buffers a layer; all else that differs is named."""
    hf_model(2, 2, 32).save_pretrained(tmp_path)
    good = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    masks = {f"h.{i}.attn.{name}": torch.ones(1) for i in range(2) for name in ("bias", "masked_bias")}
    path = tmp_path / "other.safetensors"

    def load(tensors):
        save_file(tensors, path, {"format": "pt"})
        model = GPT(GPTConfig(64, 211, 211, 2, 2, 32))
        train_gpt2.load_openai_weights(model, path)
        return model

    torch.testing.assert_close(load(good | masks).h[1].mlp.c_fc.weight, good["h.1.mlp.c_fc.weight"].T)
    torch.testing.assert_close(load(good | {"lm_head.weight": good["wte.weight"].clone()}).wte.weight, good["wte.weight"])
    for bad, names in [
        (good | {"h.2.ln_1.weight": torch.ones(32)}, "unexpected key h.2.ln_1.weight"),
        ({k: v for k, v in good.items() if k != "h.0.attn.c_attn.bias"}, "h.0.attn.c_attn.bias is missing"),
        (good | {"h.1.mlp.c_fc.weight": torch.ones(128, 32)}, "h.1.mlp.c_fc.weight has shape"),
        (good | {"lm_head.weight": good["wte.weight"] + 1}, "lm_head.weight is not the token table"),
    ]:
        with pytest.raises(InputError, match=re.escape(names)):
            load(bad)


def test_parameter_counts():
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(GPTConfig()).parameters()) == 124_475_904
        for name, (n_layer, n_head, n_embd) in train_gpt2.FAMILY.items():
            ours = GPT(GPTConfig(padded_vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd))
            theirs = GPT2LMHeadModel(GPT2Config(n_layer=n_layer, n_head=n_head, n_embd=n_embd))
            assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters(), name


def test_initialization():
    model = GPT(GPTConfig(256, 300, 320, 8, 4, 256))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif p.ndim == 1:
            assert (p == 1).all(), name
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # (2 * 8)^-0.5
            assert p.std().item() == pytest.approx(std, rel=0.03) and abs(p.mean().item()) < std / 20, name


def test_initial_loss_is_near_that_of_guessing():
    loss = GPT(GPTConfig(64, 257, 320, 2, 2, 32))(torch.randint(257, (4, 64)), torch.randint(257, (4, 64)))
    assert loss.item() == pytest.approx(math.log(320), abs=0.05)


def test_encoding():
    encode, token_bytes = train_gpt2.codec(50257)
    ids = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert encode("Hello, I'm a language model,") == ids
    assert b"".join(map(token_bytes, ids)) == b"Hello, I'm a language model,"
    encode, token_bytes = train_gpt2.codec(257)
    assert encode("aé") == [97, 0xC3, 0xA9] and b"".join(map(token_bytes, [97, 256, 0xC3, 0xA9])) == "aé".encode()
    with pytest.raises(InputError):
        train_gpt2.codec(300)


# -----------------------------------------------------------------------------
# Optimizer and schedule

def test_decay_groups():
    hp = tiny_hp(beta2=Hyperparameters().beta2)
    model, _, optimizer, _ = train_gpt2.build(hp, torch.device("cpu"))
    decayed, kept = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for name, p in model.named_parameters():
        is_matrix = name.endswith(".weight") and ".ln_" not in name and not name.startswith("ln_f")
        assert (id(p) in decayed) == is_matrix and (id(p) in kept) == (not is_matrix), name
    assert optimizer.defaults["betas"] == (0.9, 0.95) and optimizer.defaults["eps"] == 1e-8
    assert optimizer.defaults["fused"] and model.wte.weight.size(0) == 320


def test_learning_rate_corners():
    hp = Hyperparameters()
    lr = lambda step: train_gpt2.get_lr(step, hp)
    assert lr(0) == pytest.approx(6e-4 / 715)
    assert lr(714) == pytest.approx(6e-4) and lr(715) == pytest.approx(6e-4)
    assert lr((715 + 19_073) // 2) == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-6)
    assert lr(19_073) == pytest.approx(6e-5) and lr(30_000) == pytest.approx(6e-5)
    curve = [lr(step) for step in range(715, 19_074)]
    assert all(a > b for a, b in zip(curve, curve[1:]))
    assert train_gpt2.get_lr(0, replace(hp, warmup_iters=0)) == pytest.approx(6e-4)
    assert train_gpt2.get_lr(5, replace(hp, num_iterations=5)) == pytest.approx(6e-4 * 6 / 715)


def one_step(hp, inputs, targets):
    model, compiled, optimizer, autocast = train_gpt2.build(hp, torch.device("cpu"))
    loss, norm = train_gpt2.train_step(compiled, optimizer, autocast, inputs, targets, hp, hp.learning_rate)
    return model, loss.item(), norm.item()


def test_four_micro_steps_are_one_large_batch():
    # Adam's first step is about lr * sign(gradient): rounding turns a few signs of gradients near zero around
    ids = torch.randint(257, (2, 16, 32))
    whole, loss, norm = one_step(tiny_hp(micro_batch=16), *ids)
    parts, loss4, norm4 = one_step(tiny_hp(micro_batch=4), *ids)
    assert loss4 == pytest.approx(loss, rel=1e-6) and norm4 == pytest.approx(norm, rel=1e-5)
    difference = torch.cat([(a - b).flatten().abs() for a, b in zip(whole.parameters(), parts.parameters())])
    assert difference.mean() < 1e-3 * tiny_hp().learning_rate


def test_gradient_norm_is_clipped_and_true():
    hp, ids = tiny_hp(grad_clip=0.01), torch.randint(257, (2, 16, 32))
    model, compiled, optimizer, autocast = train_gpt2.build(hp, torch.device("cpu"))
    reference = GPT(model.config)
    reference.load_state_dict(model.state_dict())
    reference(*ids).backward()
    grads = torch.cat([p.grad.flatten() for p in reference.parameters()]).double()
    seen = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update(
        norm=torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()))
    _, norm = train_gpt2.train_step(compiled, optimizer, autocast, *ids, hp, 1e-3)
    assert norm.item() == pytest.approx(grads.norm().item(), rel=1e-4) and norm > 0.01
    assert seen["norm"] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("lever", ["flash", "pad_vocab", "fused", "tf32"])
def test_a_lever_changes_speed_alone(lever):
    ids = torch.randint(257, (2, 16, 32))
    results = []
    for on in (True, False):
        torch.manual_seed(1)
        hp = tiny_hp(**{lever: on})
        model, compiled, optimizer, autocast = train_gpt2.build(hp, torch.device("cpu"))
        with torch.no_grad():
            for name, p in model.named_parameters():  # the same weights whatever the padding
                g = torch.Generator().manual_seed(len(name))
                p.copy_(0.05 * torch.randn(320 if name == "wte.weight" else len(p), *p.shape[1:], generator=g)[:len(p)])
        logits = compiled(ids[0])[..., :257]
        _, norm = train_gpt2.train_step(compiled, optimizer, autocast, *ids, hp, 1e-3)
        results.append((logits.detach(), norm))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    if lever != "pad_vocab":  # the loss sees the padding's logits
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)


# -----------------------------------------------------------------------------
# Data

@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_batches_are_those_of_the_main_script(workplace, world_size):
    hp = tiny_hp()
    for rank in range(world_size):
        ours = train_gpt2.training_batches(hp, rank, world_size, torch.device("cpu"))
        theirs = list(train_gpt.distributed_data_generator(hp.train_files, hp.batch_tokens, rank, world_size, 257))
        assert len(theirs) == 2 + 5  # 1500 and 2600 tokens in batches of 512 plus one
        for (x, y), (inputs, targets) in zip(ours, theirs + theirs[:1]):  # after the last shard comes the first
            assert torch.equal(x.flatten(), inputs.long()) and torch.equal(y.flatten(), targets)
            assert x.shape == (512 // 32 // world_size, 32)


@pytest.mark.parametrize("world_size, micro_batch", [(1, 16), (1, 7), (2, 4), (3, 7)])
def test_validation_counts_every_token_once(workplace, world_size, micro_batch):
    hp = tiny_hp(micro_batch=micro_batch)
    tokens = np.fromfile(workplace / "data/shakespeare/shakespeare_val_000000.bin", "<u2", offset=1024).tolist()
    pairs = []
    for rank in range(world_size):
        for x, y in train_gpt2.validation_batches(hp, rank, world_size, torch.device("cpu")):
            assert x.shape == y.shape == (micro_batch, 32)
            pairs += [(tuple(a.tolist()), tuple(b.tolist())) for a, b in zip(x, y) if (b >= 0).all()]
            assert all((b >= 0).all() or (b == -1).all() for b in y)
    expected = [(tuple(tokens[i:i + 32]), tuple(tokens[i + 1:i + 33])) for i in range(0, 960, 32)]
    assert sorted(pairs) == sorted(expected)


def test_validation_loss_is_the_mean_over_tokens(workplace):
    hp = tiny_hp(micro_batch=7)
    model, compiled, _, autocast = train_gpt2.build(hp, torch.device("cpu"))
    tokens = torch.from_numpy(train_gpt2.load_shard(hp.val_files.replace("*", "000000"), 257).astype(np.int64))
    with torch.no_grad():
        expected = model(tokens[:960].view(30, 32), tokens[1:961].view(30, 32)).item()
    batches = train_gpt2.validation_batches(hp, 0, 1, torch.device("cpu"))
    total = train_gpt2.validate(compiled, autocast, batches, torch.device("cpu"))
    assert total[1] == 960 and (total[0] / total[1]).item() == pytest.approx(expected, rel=1e-6)


# -----------------------------------------------------------------------------
# Whole runs

def test_the_log_and_the_saved_model(workplace, capsys):
    log = run_here(workplace, samples=1)
    source, machine, run = log.split("\n" + "=" * 100 + "\n", 2)
    assert source + "\n" == (BASELINE / "train_gpt2.py").read_text() + "\n"
    assert "Running PyTorch" in machine and "cores" in machine
    lines = run.strip().splitlines()
    settings = json.loads(lines[0].removeprefix("hyperparameters: "))
    assert settings["track"] == "shakespeare" and settings["seed"] == 1337 and settings["val_tokens"] == 960
    assert settings["target_val_loss"] == 1.5 and settings["world_size"] == 1
    steps = [line for line in lines if line.startswith("step:")]
    validations = [line for line in steps if "val_loss" in line]
    assert [line.split()[0] for line in validations] == ["step:0/4", "step:2/4", "step:4/4"]
    for line in validations:
        assert re.fullmatch(r"step:\d/4 val_loss:\d\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms", line), line
    assert len(steps) == 3 + 4
    for line in set(steps) - set(validations):
        assert re.fullmatch(r"step:\d/4 train_time:\d+ms step_avg:\d+\.\d\dms train_loss:\d+\.\d{4} lr:\d\.\d\de-\d\d "
                            r"grad_norm:\d+\.\d{3} tok/s:\d+", line), line
    assert sum(line.startswith("sample step:") for line in lines) == 3
    assert lines[-2].startswith("target 1.5: not met; val_loss ")
    assert re.fullmatch(r"peak memory allocated: \d+ MiB reserved: \d+ MiB", lines[-1])
    assert str(workplace) not in run and str(ROOT) not in run

    with safe_open(saved_model(workplace), "pt") as f:
        metadata = f.metadata()
    assert metadata["model"] == "gpt2"
    assert json.loads(metadata["config"]) == dataclasses.asdict(GPTConfig(32, 257, 320, 2, 2, 32))
    assert not list(workplace.rglob("*.tmp"))
    out = capsys.readouterr().out
    assert all(line in out for line in validations)


def test_warm_up_leaves_no_trace(workplace):
    run_here(workplace, num_iterations=3, val_loss_every=0)
    hp = tiny_hp(num_iterations=3)
    model, compiled, optimizer, autocast = train_gpt2.build(hp, torch.device("cpu"))
    batches = train_gpt2.training_batches(hp, 0, 1, torch.device("cpu"))
    for step in range(3):
        train_gpt2.train_step(compiled, optimizer, autocast, *next(batches), hp, train_gpt2.get_lr(step, hp))
    saved = load_file(saved_model(workplace))
    assert saved.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(saved[name], weight), name


def test_two_processes_are_one(workplace):
    one = run_here(workplace, grad_clip=0.5)
    expected = load_file(saved_model(workplace))
    result = run_forked(["--track", "shakespeare", "--device", "cpu", *options(**(TINY | dict(grad_clip=0.5, micro_batch=4)))],
                        cwd=workplace, nproc=2, script=BASELINE / "train_gpt2.py")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "in 2 micro-steps x 2 processes x 4 sequences of 32" in result.stdout
    losses, wanted = val_losses(result.stdout), val_losses(one)
    assert losses.keys() == wanted.keys() == {0, 2, 4}
    for step, loss in wanted.items():
        assert losses[step] == pytest.approx(loss, abs=1.5e-4)
    norms = lambda text: [float(x) for x in re.findall(r"grad_norm:(\d\S*)", text)]
    assert norms(result.stdout) == pytest.approx(norms(one), abs=1.1e-3)
    actual = load_file(saved_model(workplace))
    moved = sum((actual[k] - expected[k]).abs().mean() for k in expected) / len(expected)
    assert moved < 2e-5  # four steps of up to 2e-3 each


def main_then_what_is_left(rank, port, folder):
    """One rank's main(); when it leaves the group, nothing but the group may hold gloo's threads."""
    os.environ.update(rank_env(rank, 2, port))
    os.chdir(folder)
    leave, left = dist.destroy_process_group, []

    def watched():
        left.extend(x for x in gc.get_objects() if isinstance(x, DistributedDataParallel))
        leave()

    dist.destroy_process_group = watched
    train_gpt2.main(["--track", "shakespeare", "--device", "cpu", *options(**(TINY | dict(micro_batch=4, num_iterations=1)))])
    assert not left


def test_the_group_ends_after_what_uses_it(workplace):
    """A reducer that outlives the group joins gloo's threads while it holds the GIL, and one may wait for the GIL."""
    start_processes(main_then_what_is_left, 2, free_port(), str(workplace))


def test_loss_falls_on_a_tiny_corpus(workplace):
    text = b"It was the best of times, it was the worst of times. " * 80
    for path in (workplace / "data" / "shakespeare").glob("*.bin"):
        write_shard(path, list(text))
    losses = val_losses(run_here(workplace, num_iterations=120, warmup_iters=10, learning_rate=4e-3, val_loss_every=120,
                                 target_val_loss=1.0))
    assert losses[0] > 5 and losses[120] < 1.0
    log = max((workplace / "logs").glob("*.txt"), key=lambda p: p.stat().st_mtime_ns).read_text()
    assert "\ntarget 1.0: met at step 120 after " in log


def test_compiled_run_agrees(workplace):
    """The one run with torch.compile, in a process of its own: the first validation and first losses are equal."""
    result = run_script(["--track", "shakespeare", "--device", "cpu", *options(**(TINY | dict(compile=True, n_layer=1)))],
                        cwd=workplace, script=BASELINE / "train_gpt2.py", TORCH_COMPILE_DISABLE="0")
    assert result.returncode == 0, result.stderr[-2000:]
    assert val_losses(result.stdout) == pytest.approx(val_losses(run_here(workplace, n_layer=1)), abs=2e-4)


def test_hellaswag_during_training(workplace, monkeypatch):
    sys.path.append(str(ROOT / "evals"))
    import hellaswag
    items = [dict(ctx="to be or not", endings=[" to be", "x", "yy", "zzz"], label=0)] * 3
    monkeypatch.setattr(hellaswag, "load_items", lambda limit: items[:limit])
    log = run_here(workplace, hellaswag=2, val_loss_every=0)
    assert re.search(r"^hellaswag step:4 acc:\d\.\d{4} \+- \d\.\d{4} acc_norm:\d\.\d{4} \+- \d\.\d{4} items:2$", log, re.M)


# -----------------------------------------------------------------------------
# Bad input

@pytest.mark.parametrize("changes, message", [
    (dict(batch_tokens=500), "--batch_tokens 500 must be a multiple"),
    (dict(micro_batch=3), "--micro_batch 3 does not divide the 16 sequences"),
    (dict(n_head=3), "--n_embd 32 is not a multiple of --n_head 3"),
    (dict(n_layer=0), "--n_layer must be at least 1"),
    (dict(learning_rate=math.nan), "--learning_rate must be a positive number"),
    (dict(grad_clip=0.0), "--grad_clip must be a positive number"),
    (dict(beta2=1.0), "must be in [0, 1)"),
    (dict(num_iterations=8, repeat_data=False), "has tokens for 7 steps, the run needs 8"),
    (dict(val_tokens=1024), "at most 992"),
    (dict(val_tokens=100), "must be a multiple of --block_size 32"),
    (dict(train_files="nothing/*.bin"), "no shards match nothing/*.bin"),
    (dict(init_from="gpt3"), "--init_from gpt3: choose scratch, gpt2"),
    (dict(init_from="gpt2"), "needs GPT-2's tokens"),
])
def test_impossible_settings(workplace, changes, message):
    with pytest.raises(InputError) as e:
        train_gpt2.check(tiny_hp(**changes), world_size=1)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_impossible_shards(workplace):
    folder = workplace / "data" / "shakespeare"
    for bad, message in [(dict(magic=1), "wrong magic number"), (dict(version=2), "shard version 2"),
                         (dict(count=99), "size disagrees")]:
        write_shard(folder / "shakespeare_train_000001.bin", random_tokens(600, 0), **bad)
        with pytest.raises(InputError, match=message):
            train_gpt2.check(tiny_hp(), world_size=1)
    write_shard(folder / "shakespeare_train_000001.bin", [1, 257, 3])
    with pytest.raises(InputError, match="token id 257 is outside the vocabulary of 257"):
        list(train_gpt2.load_shard(folder / "shakespeare_train_000001.bin", 257))


def test_errors_are_one_line(workplace):
    """From the command line: a bad setting, and a loss that becomes infinite, end with one line and status 2."""
    for run, changes, message in [(run_script, dict(n_head=3), "error: --n_embd 32 is not"),
                                  (run_forked, dict(learning_rate=1e30, val_loss_every=0), "error: step ")]:
        result = run(["--track", "shakespeare", "--device", "cpu", *options(**(TINY | changes))],
                     cwd=workplace, script=BASELINE / "train_gpt2.py")
        assert result.returncode == 2 and result.stderr.startswith(message), result.stderr
        assert result.stderr.count("\n") == 1 and not (workplace / "checkpoints").exists()


def test_levers_table(workplace):
    result = run_script(["--device", "cpu", "--steps", 1, "--micro_batch", 1], cwd=workplace, script=BASELINE / "levers.py")
    assert result.returncode == 0, result.stderr[-2000:]
    rows = result.stdout.splitlines()[4:]
    assert [row[:18].strip() for row in rows] == ["float32", "TF32 matmuls", "bf16 autocast", "torch.compile",
                                                  "flash attention", "padded vocabulary", "fused AdamW"]
    assert rows[1].split()[2:] == "- the hardware has no TF32".split()
    assert re.search(r"\d\.\d\s+[\d,]+\s+1\.00\s+1\.00$", rows[0])
    assert all(len(line) <= 80 for line in result.stdout.splitlines()[3:])


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
    (None, "2x NVIDIA A100-SXM4-80GB"), ("echo NVIDIA-SMI has failed\nexit 9", "2x NVIDIA A100-SXM4-80GB"),
    ("cat <<'EOF'\n" + SMI + "EOF", "2x NVIDIA H100 80GB HBM3")])
def test_a_gpu_with_and_without_nvidia_smi(tmp_path, monkeypatch, script, found):
    """The header names the GPUs in any case, so that the tools can tell the hardware; and no process's path."""
    sys.path.append(str(ROOT / "tools"))
    import log_parsing
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)
        (tmp_path / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    text = train_gpt2.describe_machine(torch.device("cuda", 0), 2)
    assert log_parsing.find_hardware(text) == found
    assert "/home" not in text and text.endswith("2 processes on cuda")


def test_peak_memory_on_other_systems(monkeypatch):
    """Linux counts KiB, macOS bytes; Windows has no module that counts."""
    usage = types.SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: types.SimpleNamespace(ru_maxrss=3 * 2**20))
    monkeypatch.setitem(sys.modules, "resource", usage)
    cpu = torch.device("cpu")
    for platform, mib in (("linux", 3 * 2**10), ("darwin", 3)):
        monkeypatch.setattr(sys, "platform", platform)
        assert train_gpt2.peak_memory_mib(cpu) == (mib, mib)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert train_gpt2.peak_memory_mib(cpu) is None


@pytest.mark.parametrize("mine, wanted", [(None, "native -mtune=icelake-server"), ("native", "native")])
def test_what_the_baseline_compiles_for(mine, wanted):
    """As train_gpt.py does, and before torch is imported; the user's own comes first."""
    code = (f"import os, sys; sys.path.append({str(BASELINE)!r}); seen = []\n"
            "class Watch:\n    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'torch': print(os.environ.get('TORCHINDUCTOR_CPP_MARCH')); os._exit(0)\n"
            "sys.meta_path.insert(0, Watch()); import train_gpt2")
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CPP_MARCH"}
    environment |= dict(TORCHINDUCTOR_CPP_MARCH=mine) if mine else {}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8")
    intel = sys.platform == "linux" and platform.machine() == "x86_64"
    assert done.stdout.strip() == (wanted if intel or mine else "None"), done.stderr
