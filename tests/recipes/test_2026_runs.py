"""Whole runs: numbers of processes, checkpoints, signals, errors, compiled code, the tools."""

import json
import os
import re
import signal

import pytest
import safetensors.torch
import torch

import january2026
from util import (
    ROOT,
    forkserver,
    free_port,
    random_tokens,
    rank_env,
    read_log,
    start_processes,
    val_losses,
    write_shard,
)

SCRIPT = ROOT / "recipes" / "january2026.py"
STEPS = 12
# A model that takes milliseconds. It is tied until step 9.
TINY = dict(
    model_dim=32,
    num_sequences=8,  # as at the official size
    seq_lens="128,128,256",
    val_seq_len=128,
    val_tokens=2048,
    num_iterations=STEPS,
    extension_frac=0.1,
    val_loss_every=4,
    warmup_steps=0,
    sequences_per_pass=2,
    muon_momentum_warmup=3,
    muon_momentum_cooldown=3,
)


def options(folder, *more, **changes):
    values = dict(
        train_files=folder / "tiny_train_*.bin",
        val_files=folder / "tiny_val_*.bin",
        **TINY,
    )
    values |= changes
    words = [f"--{k}={v}" for k, v in values.items()]
    return ["--track", "mini", "--device", "cpu", *more, *words]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "tiny_train_000000.bin", random_tokens(9000, seed=1))
    write_shard(folder / "tiny_train_000001.bin", random_tokens(30_000, seed=2))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(2049, seed=3))
    return folder


def main_child(rank, argv, folder, world_size, port):
    torch.set_num_threads(1)
    os.environ.update(rank_env(rank, world_size, port))
    os.chdir(folder)
    january2026.CPU_FLAGS = set()  # float32
    assert january2026.main(argv) == 0


def weights(folder):
    (path,) = (folder / "checkpoints").glob("*/model.safetensors")
    return safetensors.torch.load_file(path)


@pytest.fixture(scope="module")
def one_process(shards, tmp_path_factory):
    """The validation losses and weights of one process in float32."""
    folder = tmp_path_factory.mktemp("one")
    argv = [str(a) for a in options(shards, "--save_checkpoint", skip_rest=True, scalar_lr=0.0)]
    start_processes(main_child, 1, argv, str(folder), 1, free_port())
    return val_losses(read_log(folder)), weights(folder)


def test_training_learns(one_process):
    losses, _ = one_process
    assert list(losses) == [0, 4, 8, 12]
    assert losses[12] < losses[0] - 0.1


@pytest.mark.parametrize("world_size", [2, 4])
def test_numbers_of_processes_train_the_same(world_size, shards, one_process, tmp_path):
    argv = [str(a) for a in options(shards, "--save_checkpoint", skip_rest=True, scalar_lr=0.0)]
    start_processes(main_child, world_size, argv, str(tmp_path), world_size, free_port())
    losses, want = one_process
    assert val_losses(read_log(tmp_path)) == pytest.approx(losses, abs=2e-4)
    for name, tensor in weights(tmp_path).items():
        error = (tensor - want[name]).norm()
        assert error <= 0.01 * want[name].norm(), name


# --------------------------------------------------------------- interruptions
def interrupted_child(argv, folder, console, step, number):
    """main(argv), which gets a signal in that step. In bf16 where the CPU has it."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{console}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(1)
    os.chdir(folder)
    plain = january2026.train_step

    def train_step(model, optimizers, inputs, targets, window_blocks, now, hp, world):
        if now == step:
            os.kill(os.getpid(), number)
        return plain(model, optimizers, inputs, targets, window_blocks, now, hp, world)

    january2026.train_step = train_step
    os._exit(january2026.main(argv))


def interrupted(argv, folder, step=None, number=0):
    """Returns the exit code, and what the run printed to stderr."""
    console = folder / f"console{len(list(folder.glob('console*.err')))}"
    arguments = ([str(a) for a in argv], str(folder), str(console), step, number)
    process = forkserver().Process(target=interrupted_child, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode is not None
    return process.exitcode, (folder / f"{console.name}.err").read_text()


def checkpoints(folder):
    return [p.stem for p in sorted((folder / "checkpoints").glob("*/step*.pt"))]


def without_times(log):
    lines = [line for line in log.splitlines() if not re.match("warm-up|resume|checkpoint|peak", line)]
    return [re.sub(r"train_time:.*|after .*", "", line) for line in lines]


def assert_same_run(folder, whole):
    want, got = weights(whole), weights(folder)
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    assert without_times(read_log(folder)) == without_times(read_log(whole))


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    code, err = interrupted(options(shards, "--save_checkpoint"), folder)
    assert code == 0, err
    return folder


# Adam's gradients of an even step wait for the odd one. Step 9 is the last one that is tied.
@pytest.mark.parametrize("step", [3, 6, 9, 11])
def test_killed_and_resumed(step, shards, whole, tmp_path):
    argv = options(shards, "--save_checkpoint", "--checkpoint_every=2")
    code, _ = interrupted(argv, tmp_path, step, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert checkpoints(tmp_path)[-1] == f"step{step // 2 * 2:06d}"
    code, err = interrupted([*argv, "--resume=latest"], tmp_path)
    assert code == 0, err
    assert_same_run(tmp_path, whole)


def test_control_a_lost_moment_is_seen(shards, whole, tmp_path):
    argv = options(shards, "--save_checkpoint", "--checkpoint_every=2")
    interrupted(argv, tmp_path, 9, signal.SIGKILL)
    path = sorted((tmp_path / "checkpoints").glob("*/step*.pt"))[-1]
    state = torch.load(path, weights_only=True)
    state["optimizers"][0]["state"][2]["mean"] += 1e-6
    torch.save(state, path)
    assert interrupted([*argv, "--resume=latest"], tmp_path)[0] == 0
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path, whole)


@pytest.mark.parametrize("step", [4, 5])
def test_sigterm_saves_after_adams_step(step, shards, whole, tmp_path):
    argv = options(shards, "--save_checkpoint")
    code, _ = interrupted(argv, tmp_path, step, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert checkpoints(tmp_path) == ["step000006"]
    code, err = interrupted([*argv, "--resume=latest"], tmp_path)
    assert code == 0, err
    assert_same_run(tmp_path, whole)


def test_resumed_on_two_processes(shards, whole, tmp_path):
    """The state of all ranks is in the checkpoint."""
    argv = options(shards, "--checkpoint_every=4", "--save_checkpoint", scalar_lr=0.0)
    argv = [str(a) for a in argv]
    (tmp_path / "two").mkdir()
    start_processes(main_child, 2, argv, str(tmp_path / "two"), 2, free_port())
    (path,) = (tmp_path / "two").glob("checkpoints/*/step000008.pt")
    (tmp_path / "one").mkdir()
    start_processes(main_child, 1, [*argv, f"--resume={path}"], str(tmp_path / "one"), 1, free_port())
    want = weights(tmp_path / "two")
    for name, tensor in weights(tmp_path / "one").items():
        assert (tensor - want[name]).norm() <= 0.01 * want[name].norm(), name


# --------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "words,says",
    [
        (["--checkpoint_every=3"], "must be even"),
        (["--seq_lens=128,256"], "it needs 3"),
        (["--seq_lens=128,256,200"], "must be positive and rise"),
        (["--seq_lens=100,128,256"], "not a multiple of 128"),
        (["--num_heads=3"], "must be even"),
        (["--yarn_beta=1"], "must be more than 1"),
        (["--seed=99999999999999999999"], "must be less than"),
        (["--paired_layers=1"], "can't both have layer 1"),
        (["--backout_layer=4"], "must be layers of 4"),
        (["--num_iterations=100000"], "enough documents|enough"),
        (["--train_seq_len=512"], "--help lists all options"),
        (["--val_tokens=100"], "must be a multiple"),
        (["--muon_lr=nan"], "finite"),
        (["--resume=nowhere"], "there is no checkpoint"),
    ],
)
def test_bad_input_is_one_line(words, says, shards, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    given = [word.split("=")[0] for word in words]
    plain = [w for w in options(shards) if w.split("=")[0] not in given]
    assert january2026.main([str(w) for w in [*plain, *words]]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert re.search(says, err), err


def test_numbers_of_processes_that_do_not_fit():
    hp = january2026.TRACKS["fineweb"]
    for size in (1, 2, 4, 8):
        january2026.check_hyperparameters(hp, size)
    for size in (3, 5, 16):
        with pytest.raises(january2026.InputError, match="possible numbers of processes: 1, 2, 4, 8"):
            january2026.check_hyperparameters(hp, size)


# --------------------------------------------------------------- the log
def test_log(whole):
    """The log contains the source and all settings, in the field's format."""
    log = read_log(whole)
    assert log.startswith(SCRIPT.read_text(encoding="utf-8"))
    settings = json.loads(re.search(r"^hyperparameters: (.*)$", log, re.M)[1])
    assert settings["seq_lens"] == [128, 128, 256]
    assert len(re.findall(r"^step:\d+/12 train_time:\d+ms step_avg:[\d.]+ms$", log, re.M)) == STEPS
    tokens = int(re.search(r"([\d,]+) tokens/s", log)[1].replace(",", ""))
    seconds = float(re.search(r"after ([\d.]+) s, ", log)[1])
    # 11 scheduled steps: 8 of 128 tokens, and 4 of 256, with the extension
    assert tokens * seconds == pytest.approx(8 * (8 * 128 + 4 * 256), rel=0.05)
