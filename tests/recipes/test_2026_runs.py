"""Whole runs: numbers of processes, kill -9 and resume, validations, errors, the log."""

import functools
import re
import signal

import pytest
import torch

from recipes import january2026
from judge.logs.read import parse_log
from leaderboard.rules import too_small
from tests.training.test_checkpoint import kill_in_call, resuming
from tests.util import (
    ROOT,
    Job,
    assert_one_line,
    assert_same_state,
    in_float32,
    random_tokens,
    read_checkpoint,
    read_log,
    succeeds,
    val_losses,
    write_shard,
)

# A model that takes milliseconds, for 8 steps. It is tied until step 5. The last validation has a
# longer window.
TINY = dict(
    model_dim=32,
    seq_lens="128,128,256",
    val_seq_len=256,
    val_tokens=1024,
    windows="2,3,4,5",
    val_window=9,
    num_iterations=8,
    extension_frac=0.1,
    val_loss_every=4,
    warmup_steps=0,
    sequences_per_pass=2,
    muon_momentum_warmup=3,
    muon_momentum_cooldown=3,
)
# Different numbers of processes round differently, and Adam enlarges that in scalars (see test_run.py)
IN_FLOAT32 = dict(scalar_lr=0.0, skip_rest="true")


def tiny_run(folder, *more, **changes):
    """Writes shards to `folder`. Returns the options of a run there."""
    folder.mkdir(exist_ok=True)
    write_shard(folder / "tiny_train_000000.bin", random_tokens(9000, seed=1))
    write_shard(folder / "tiny_train_000001.bin", random_tokens(30_000, seed=2))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(1025, seed=3))
    settings = dict(train_files="tiny_train_*.bin", val_files="tiny_val_*.bin", **TINY) | changes
    return ["--track=mini", *(f"--{k}={v}" for k, v in settings.items()), *more]


# --------------------------------------------------------------- runs
def in_bf16():
    """A hook, which runs in the processes."""
    january2026.DTYPE = torch.bfloat16


def start(argv, folder, nproc=1, hook=in_bf16):
    return Job([*argv, "--save_checkpoint"], folder, nproc, "recipes.january2026", hook)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The folder of a run of one process in float32."""
    folder = tmp_path_factory.mktemp("one")
    succeeds(start(tiny_run(folder, **IN_FLOAT32), folder, hook=in_float32))
    return folder


def test_processes_warm_up_and_resume_change_no_loss(one_process, tmp_path):
    """And no weight, except for rounding. Two processes can't share the 11 layers equally. They are killed in
    step 7, after six steps of warm-up."""
    losses = val_losses(read_log(one_process))
    assert list(losses) == [0, 4, 8]
    assert losses[8] < losses[0] - 0.1
    argv = tiny_run(tmp_path, **IN_FLOAT32, warmup_steps=2)
    kill = functools.partial(kill_in_call, 14, "recipes.january2026", "train_step", in_float32)
    assert start(argv, tmp_path, 2, kill).wait() != 0
    assert read_checkpoint(tmp_path)["run"]["step"] == 4
    succeeds(start([resuming(tmp_path)], tmp_path, 2, in_float32))
    assert val_losses(read_log(tmp_path)) == pytest.approx(losses, abs=2e-4)
    want = read_checkpoint(one_process)["model"]
    for name, tensor in read_checkpoint(tmp_path)["model"].items():
        assert (tensor - want[name]).norm() <= 0.01 * want[name].norm(), name


# --------------------------------------------------------------- kill -9
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run in bf16 that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    succeeds(start(tiny_run(folder), folder))
    return folder


def steps_of(folder):
    return re.findall(r"^(step:.*) train_time", read_log(folder), re.M)


def test_killed_and_resumed_is_the_same_run(whole, tmp_path):
    """It is killed in step 7, and resumed from step 4, before head and embedding are untied."""
    kill = functools.partial(kill_in_call, 8, "recipes.january2026", "train_step", in_bf16)
    assert start(tiny_run(tmp_path), tmp_path, hook=kill).wait() == -signal.SIGKILL
    assert read_checkpoint(tmp_path)["run"]["step"] == 4
    succeeds(start([resuming(tmp_path)], tmp_path))
    assert steps_of(tmp_path) == steps_of(whole)
    assert_same_state(read_checkpoint(tmp_path), read_checkpoint(whole))


def test_validations_follow_the_schedules(tmp_path, monkeypatch):
    """They have the window of their step, and the last one a longer window."""
    seen = []

    def evaluate(model, window, hp):
        seen.append((model.stage, window.item()))
        return 1.0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(january2026, "evaluate", evaluate)
    monkeypatch.setattr(january2026, "train_step", lambda *args: None)
    assert january2026.main(tiny_run(tmp_path)) == 0
    assert seen == [(0, 2), (1, 3), (3, 9)]


# --------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "option, says",
    [
        ("--val_loss_every=3", "must be even"),
        ("--seq_lens=128,256", "needs three numbers"),
        ("--num_heads=3", "must be even"),
        ("--paired_layers=1", "can't share layers {1}"),
        ("--num_iterations=100000", "the run needs 100000"),
    ],
)
def test_bad_settings_are_one_line(option, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = january2026.main([*tiny_run(tmp_path), option])
    assert_one_line(status, capsys.readouterr().err, says)
    assert not (tmp_path / "logs").exists()


# --------------------------------------------------------------- the log
def test_log(whole):
    """It begins with both sources, each below its name, and the tools read it."""
    (path,) = (whole / "logs").glob("*.txt")
    text = path.read_text()
    line = "-" * 40
    for name in ("recipes/january2026.py", "train_gpt.py"):
        assert f"\n\n{line}\n# {name}\n{line}\n\n{(ROOT / name).read_text()}" in text
    log = parse_log(path)
    assert log.incomplete == ""
    assert (log.track, log.num_steps) == ("mini", 8)
    assert log.hyperparameters["seq_lens"] == [128, 128, 256]
    assert "max_window 80, but" in too_small(log)  # five blocks of 16
    tokens = int(re.search(r"([\d,]+) tokens/s", text)[1].replace(",", ""))
    seconds = float(re.search(r"after ([\d.]+) s, ", text)[1])
    # 4 sequences a step: in 5 steps of 128 tokens, and in 3 of 256, with the extension
    assert tokens * seconds == pytest.approx(4 * (5 * 128 + 3 * 256), rel=0.05)
