"""Tests of checkpoints: runs that are killed, also while they write a checkpoint, and resumed."""

import os
import pickle
import pkgutil
import re
import resource
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

import train_gpt
from launch.checks import latest_checkpoint
from tests.util import (
    Job,
    assert_one_line,
    assert_same_state,
    checkpoint_of,
    in_float32,
    read_checkpoint,
    read_log,
    settings_of,
    succeeds,
    tiny_run,
    val_losses,
)

# 12 steps, with validations and checkpoints after steps 4, 8 and 12. NorMuon has the most state.
SETTINGS = dict(num_iterations=12, val_loss_every=4, muon_beta2=0.9)


# --------------------------------------------------------------- hooks, which run in the processes
def kill_in_call(number, owner, name, hook=in_float32):
    """The process is killed when it calls this function for the number-th time."""
    hook()
    owner = pkgutil.resolve_name(owner)
    plain = getattr(owner, name)
    calls = []

    def function(*args):
        calls.append(args)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args)

    setattr(owner, name, function)


# The second validation is that of step 8. The warm-up has one step.
kill_in_step_6 = partial(kill_in_call, 8, "train_gpt", "train_step")
kill_while_writing = partial(kill_in_call, 2, "pathlib.Path", "rename")
# The tenth line of the log: before it, those of eight steps and a validation
kill_after_renaming = partial(kill_in_call, 10, "train_gpt.Run", "write")


def full_disk(limit):
    """Allows no file of more than `limit` bytes. Writes then fail as they do on a full disk."""
    in_float32()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


# --------------------------------------------------------------- runs
def start(folder, nproc=1, hook=in_float32, **changes):
    argv = tiny_run(folder, "--save_checkpoint", **SETTINGS | changes)
    return Job(argv, folder, nproc, hook=hook)


def resume(folder, nproc=1, hook=in_float32):
    """Resumes the run. Its options come from the checkpoint."""
    return Job(["--save_checkpoint", resuming(folder)], folder, nproc, hook=hook)


def resuming(folder):
    """The option that resumes the run."""
    return f"--resume={checkpoint_of(folder).relative_to(folder)}"


def trace(log):
    """The parts of a log that an interruption must not change: not the times and a few lines."""
    log = re.sub(r"train_time:\S+ step_avg:\S+|[\d.,]+ (s|tokens/s)\b", "", log)
    source, machine, run = log.split("=" * 100 + "\n")
    other = ("Running ", "Variables: ", "CPU: ", "Compiler: ", "resume: ")
    return [source, machine, *(line for line in run.splitlines() if not line.startswith(other))]


def assert_same_run(folder, reference):
    """Two runs have the same log, except for times, and the same last checkpoint."""
    assert trace(read_log(folder)) == trace(read_log(reference))
    assert_same_state(read_checkpoint(folder), read_checkpoint(reference))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    succeeds(start(folder))
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of the same run, killed in step 6."""
    folder = tmp_path_factory.mktemp("killed")
    assert start(folder, hook=kill_in_step_6).wait() == -signal.SIGKILL
    assert read_checkpoint(folder)["run"]["step"] == 4
    return folder


@pytest.fixture
def stopped(killed, tmp_path, monkeypatch):
    """A copy of that folder, which is the current one."""
    monkeypatch.chdir(shutil.copytree(killed, tmp_path, dirs_exist_ok=True))
    return tmp_path


# --------------------------------------------------------------- kill -9
@pytest.mark.parametrize("kill, step", [(kill_while_writing, 4), (kill_after_renaming, 8)])
def test_killed_and_resumed_is_the_same_run(kill, step, whole, tmp_path):
    assert start(tmp_path, hook=kill).wait() == -signal.SIGKILL
    assert bool(list(tmp_path.rglob("*.tmp"))) == (kill is kill_while_writing)
    assert read_checkpoint(tmp_path)["run"]["step"] == step
    job = succeeds(resume(tmp_path))
    assert_same_run(tmp_path, whole)
    assert str(checkpoint_of(tmp_path).relative_to(tmp_path).with_suffix(".txt")) in job.out
    log = read_log(tmp_path)
    assert re.search(rf"^resume: from step {step}\b", log, re.M)
    assert "CPU: " not in job.out  # only in the log
    for line in ("CPU: ", "Running PyTorch "):  # it may be another machine
        assert len(re.findall(f"^{line}", log, re.M)) == 2
    times = list(map(int, re.findall(r"train_time:(\d+)ms", log)))
    assert times == sorted(times)  # the training time goes on from that of the checkpoint
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("nproc, atol", [(1, 2e-4), pytest.param(2, 0, marks=pytest.mark.slow)])
def test_a_run_of_two_processes_is_resumed(nproc, atol, tmp_path):
    """Each rank keeps the momentum of the matrices that it owns, so with one process, they get another
    owner. Losses then agree except for rounding: scalars aren't trained for that (see test_run.py)."""
    reference = tmp_path / "reference"
    succeeds(start(reference, nproc, scalar_lr=0.0))
    folder = tmp_path / "killed"
    assert start(folder, 2, hook=kill_in_step_6, scalar_lr=0.0).wait() == -signal.SIGKILL
    succeeds(resume(folder, nproc))
    got = val_losses(read_log(folder))
    assert got == pytest.approx(val_losses(read_log(reference)), rel=0, abs=atol)


def test_full_disk_leaves_the_checkpoint_whole(whole, stopped):
    before = checkpoint_of(stopped).read_bytes()
    job = resume(stopped, hook=partial(full_disk, len(before) - 1000))
    assert job.wait() != 0
    assert "File too large" in job.err or "file write failed" in job.err
    assert checkpoint_of(stopped).read_bytes() == before
    os.truncate(checkpoint_of(stopped).with_suffix(".txt"), 100)  # what of the log reached the disk
    succeeds(resume(stopped))
    assert_same_run(stopped, whole)


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *paths: calls.append("rename") or rename(*paths))
    path = "/proc/self/fd/{}".format
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(Path(os.readlink(path(fd))).suffix))
    monkeypatch.chdir(tmp_path)
    assert train_gpt.main(tiny_run(tmp_path, "--save_checkpoint", num_iterations=2)) == 0
    assert calls == [".tmp", "rename"]


def test_several_runs_are_the_runs_of_their_seeds(tmp_path):
    """Killed in the first of two runs, and resumed. Each is then, bit for bit, the run of its seed alone, which
    has no warm-up, so that leaves no trace."""
    folder = tmp_path / "both"
    argv = tiny_run(folder, "--num_runs=2", "--save_checkpoint", **SETTINGS, seed=5)
    assert Job(argv, folder, hook=kill_in_step_6).wait() == -signal.SIGKILL
    succeeds(resume(folder))
    last_losses = set()
    for path in (folder / "logs").glob("*.txt"):
        log = path.read_text()
        seed = settings_of(log)["seed"]
        alone = tmp_path / str(seed)
        succeeds(start(alone, seed=seed, warmup_steps=0))
        assert val_losses(log) == val_losses(read_log(alone))
        found = torch.load(path.with_suffix(".pt"), weights_only=True)
        assert_same_state(found, read_checkpoint(alone))
        last_losses.add(val_losses(log)[12])
    assert len(last_losses) == 2


# --------------------------------------------------------------- which run is resumed
def test_latest_is_the_newest_unfinished_run(tmp_path):
    """The newest file is that of a finished run, the oldest of another unfinished one."""
    folder = tmp_path / "runs[1]"
    folder.mkdir()
    # only the result is missing; the source has such a line
    begun = f"\ntarget 1.5: met\n{train_gpt.LINE}\nstep:12/12 val_loss:1.5000\n"
    logs = dict(older=begun, newest=begun, finished=begun + "target 1.5: met\n")
    for time, (name, log) in enumerate(logs.items()):
        (folder / f"{name}.txt").write_text(log)
        (folder / f"{name}.pt").touch()
        os.utime(folder / f"{name}.pt", (time, time))
    assert latest_checkpoint(folder).stem == "newest"
    assert latest_checkpoint(tmp_path) is None


# --------------------------------------------------------------- refused
def refused(argv, words, folder, capsys):
    """main() ends with one error line, and changes nothing."""

    def contents():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = contents()
    capsys.readouterr()
    status = train_gpt.main(["--save_checkpoint", *argv])
    out, err = capsys.readouterr()
    assert_one_line(status, err, words)
    assert out == ""
    assert contents() == before


def test_other_runs_are_refused(whole, stopped, monkeypatch, capsys):
    refused([f"--resume={checkpoint_of(whole)}"], "is finished", whole, capsys)
    argv = [resuming(stopped), "--head_lr=0.28", "--muon_lr=0.125"]  # head_lr is the same
    refused(argv, "--muon_lr is 0.07", stopped, capsys)
    monkeypatch.setattr(train_gpt, "SOURCE", train_gpt.SOURCE.replace("Muon", "Neon", 1))
    refused([resuming(stopped)], "source", stopped, capsys)


@pytest.mark.parametrize("name", ["train_000001", "val_000000"])
def test_other_shards_are_refused(name, stopped, capsys):
    """One token of the shard has changed."""
    path = stopped / f"tiny_{name}.bin"
    data = bytearray(path.read_bytes())
    data[1024 + 2 * 300] ^= 1
    path.write_bytes(data)
    refused([resuming(stopped)], "shards", stopped, capsys)


def test_two_at_once_are_refused(stopped, monkeypatch, capsys):
    """A run is resumed, and in its first step, the same command is given again."""
    plain = train_gpt.train_step

    def train_step(*args):
        monkeypatch.setattr(train_gpt, "train_step", plain)
        refused([resuming(stopped)], "another process is writing logs/", stopped, capsys)
        return plain(*args)

    monkeypatch.setattr(train_gpt, "train_step", train_step)
    assert train_gpt.main([resuming(stopped)]) == 0
    assert train_gpt.train_step is plain


# --------------------------------------------------------------- hostile files
class Hostile:
    """A pickle that creates the file `victim` when it is loaded."""

    def __reduce__(self):
        return open, ("victim", "w")


def test_a_pickle_is_not_executed(stopped):
    path = checkpoint_of(stopped)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["run"]["step"] = Hostile()
    torch.save(checkpoint, path)
    with pytest.raises(pickle.UnpicklingError):
        train_gpt.main([resuming(stopped)])
    assert not (stopped / "victim").exists(), "the pickle was executed"
