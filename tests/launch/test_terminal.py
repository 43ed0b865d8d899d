"""
Tests of launch/terminal.py, which shows a training to a person: what is seen, and that the training is the
same as without a terminal.
"""

import io
import sys

import pytest
import torch

import train_gpt
from launch import terminal
from tests.training.test_checkpoint import assert_same_run
from tests.util import (
    Job,
    assert_one_line,
    checkpoint_of,
    read_log,
    succeeds,
    tiny_run,
    val_losses,
)

OPTIONS = dict(num_iterations=6, val_loss_every=2)


def lines_seen(text):
    """The lines that stay on a terminal: a carriage return begins the line again."""
    return [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]


def use_random_numbers():
    """A hook: each step uses PyTorch's random numbers, as dropout does. Stdout is taken for a terminal."""
    sys.stdout.isatty = lambda: True
    plain_step = train_gpt.train_step

    def step(*args):
        return plain_step(*args) + torch.rand(())

    train_gpt.train_step = step


def show_steps():
    """A hook: the line of text is the step of the checkpoint that would write it."""
    use_random_numbers()
    terminal.written_line = lambda path: f"step {torch.load(path)['run']['step']}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    words = tiny_run(folder, "--save_checkpoint", **OPTIONS)
    succeeds(Job(words, folder, hook=use_random_numbers))
    return folder


@pytest.mark.parametrize("hook, nproc", [(use_random_numbers, 1), (show_steps, 2)])
def test_a_training_that_is_watched(plain, tmp_path, hook, nproc):
    """Log and checkpoint are those of the plain script, and each text is of the newest weights. The second
    process shows nothing."""
    words = ["train_gpt", *tiny_run(tmp_path, "--save_checkpoint", **OPTIONS)]
    job = succeeds(Job(words, tmp_path, nproc, script="launch.train_and_sample", hook=hook))
    log = read_log(tmp_path)
    if nproc == 1:
        assert_same_run(tmp_path, plain)
    seen = lines_seen(job.out)
    shown = [line for line in seen if line.startswith("step:")]
    assert {
        int(line.split("/")[0][5:]): float(line.split(":")[2].split()[0]) for line in shown
    } == val_losses(log)
    assert not any("train_time" in line for line in seen)
    texts = [line.strip() for line in seen if line.startswith("    ")]
    assert len(texts) == 3
    assert nproc == 1 or texts == ["step 2", "step 4", "step 6"]
    assert any(line.startswith("100%") and "6/6" in line and "val_loss" in line for line in seen)
    picture = checkpoint_of(tmp_path).with_suffix(".png")
    assert f"picture: {picture.relative_to(tmp_path)}" in seen
    assert "A sample of what the model writes:" in seen
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert job.out.count("track mini") == 1


def test_an_error_is_one_line(tmp_path):
    words = ["train_gpt", *tiny_run(tmp_path, num_iterations=99)]
    job = Job(words, tmp_path, script="launch.train_and_sample", hook=show_steps)
    status = job.wait()
    assert_one_line(status, lines_seen(job.err)[-2], "12")
    assert "picture" not in job.out


def test_a_text_only_where_the_loss_is_lower(monkeypatch):
    """A model that evals/ doesn't know writes none. A second run begins anew."""
    monkeypatch.setattr(terminal, "written_line", lambda path: f"by {path}")
    screen = terminal.Screen(io.StringIO())
    for run in "ab":
        print(f"track mini on cpu; log: x/{run}.txt", file=screen)
        print("step:0/3 val_loss:5.0 train_time:0ms step_avg:0.01ms", file=screen)
        print("step:1/3 train_time:1ms step_avg:1.00ms", end="  \r", file=screen)
        print("step:1/3 val_loss:2.0 train_loss:2.5 train_time:1ms step_avg:1.00ms", file=screen)
        print("step:2/3 val_loss:3.0 train_time:2ms step_avg:1.00ms train_loss:1.5", file=screen)
        print("a forker's line", file=screen)
        print("step:3/3 val_loss:1.0 train_time:2ms step_avg:1.00ms", file=screen)
        print("target 1.5: met; val_loss 1.0 after 0.00 s", file=screen)
    screen.end()
    stays = [line for line in lines_seen(screen.terminal.getvalue()) if line and "%" not in line]
    one = [
        "track mini on cpu; log: x/a.txt",
        "step:0/3 val_loss:5.0",
        "step:1/3 val_loss:2.0 train_loss:2.5",
        "    by x/a.pt",
        "step:2/3 val_loss:3.0 train_loss:1.5",
        "a forker's line",
        "step:3/3 val_loss:1.0",
        "    by x/a.pt",
        "target 1.5: met; val_loss 1.0 after 0.00 s",
    ]
    assert stays == one + [line.replace("/a.", "/b.") for line in one]
