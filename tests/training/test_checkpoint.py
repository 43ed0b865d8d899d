"""
Tests of checkpoints and of what can interrupt a run: signals, full disks, processes that die.

The tests start real processes and really kill them.
"""

import io
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.run

import train_gpt
from util import (
    ROOT,
    env,
    forkserver,
    free_port,
    random_tokens,
    rank_env,
    read_log,
    run_script,
    val_losses,
    wait_until,
    write_shard,
)

STEPS = 12  # training steps of a run
EVERY = 3  # steps from one checkpoint to the next
TINY = dict(
    num_layers=4,
    num_heads=2,
    head_dim=16,
    model_dim=32,
    num_value_embeds=1,
    long_window_layers="0,3",
    max_window=256,
    train_seq_len=128,
    batch_tokens=512,
    val_seq_len=128,
    val_tokens=512,
    num_iterations=STEPS,
    val_loss_every=4,
    warmup_steps=0,
    sequences_per_pass=2,
)
# With this and float32(), runs on different numbers of processes agree: see test_run.py
IN_FLOAT32 = dict(scalar_lr=0.0)


def options(folder, *more, **changes):
    values = dict(
        train_files=folder / "tiny_train_*.bin",
        val_files=folder / "tiny_val_*.bin",
        muon_beta2=0.9,  # NorMuon is the optimizer with the most state to save
        **TINY,
    )
    values |= changes
    return [
        "--track",
        "mini",
        "--device",
        "cpu",
        "--checkpoint_every",
        str(EVERY),
        *more,
        *(f"--{k}={v}" for k, v in values.items()),
    ]


def write_shards(folder):
    """Writes one shard for 8 training steps and one for 40, and one for validation."""
    write_shard(folder / "tiny_train_000000.bin", random_tokens(8 * 512 + 100, seed=1))
    write_shard(folder / "tiny_train_000001.bin", random_tokens(40 * 512 + 1, seed=2))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(512 + 1, seed=3))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


# --------------------------------------------------------------- processes and their faults
A_LONG_TIME = 3600  # s, much longer than wait_until() waits, even on a busy machine


def rank_main(rank, world_size, port, argv, folder, console, hook):
    """Runs main() in this process and exits with its code. `hook` breaks something first."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{console}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    torch.set_num_threads(1)
    os.environ.update(rank_env(rank, world_size, port))
    os.chdir(folder)
    if hook:
        hook()
    sys.exit(train_gpt.main(argv))


class Job:
    """train_gpt.main(argv) in `world_size` processes of the fork server."""

    def __init__(self, argv, folder, world_size=1, hook=None):
        folder.mkdir(exist_ok=True)
        self.console = folder / f"console{len(list(folder.glob('console*.out')))}"
        args = (
            world_size,
            free_port(),
            [str(a) for a in argv],
            str(folder),
            str(self.console),
            hook,
        )
        self.processes = [
            forkserver().Process(target=rank_main, args=(rank, *args), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()
        wait_until(Path(f"{self.console}.out").exists)

    @property
    def out(self):
        return Path(f"{self.console}.out").read_text()

    @property
    def err(self):
        return Path(f"{self.console}.err").read_text()

    def steps(self):
        return steps_of(self.out)

    def done(self):
        return not any(p.is_alive() for p in self.processes)

    def signal(self, number):
        for p in self.processes:
            os.kill(p.pid, number)

    def wait(self):
        """Waits until all ranks have ended. Returns their exit codes."""
        try:
            wait_until(self.done)
        finally:
            for p in self.processes:
                p.kill()
                p.join()
        return [p.exitcode for p in self.processes]

    def succeeds(self):
        assert self.wait() == [0] * len(self.processes), self.err
        return self

    def fails(self, *says):
        """Checks that the job ends with code 2 and one error line, which matches all of `says`."""
        codes = self.wait()
        assert codes[0] == 2, (codes, self.err)
        lines = [s for s in self.err.splitlines() if not s.startswith("warning: ")]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: "), self.err
        for text in says:
            assert re.search(text, lines[0]), (text, lines[0])
        return self


def steps_of(text):
    """The number of training steps in a log or in the text of a terminal."""
    return len(re.findall(r"^step:\d+/\d+ train_time", text, re.M))


def float32():
    train_gpt.CPU_FLAGS = set()


def before_step(step, action, then=None):
    """Makes this process call action(model) right before step number `step`.

    `then` is another hook, which is called at once.
    """
    if then:
        then()
    plain_schedules = train_gpt.set_schedules
    plain_step = train_gpt.train_step
    seen = []

    def set_schedules(optimizers, step, hp):
        seen.append(step)
        plain_schedules(optimizers, step, hp)

    def train_step(model, *args):
        if seen[-1] == step:
            action(model)
        return plain_step(model, *args)

    train_gpt.set_schedules = set_schedules
    train_gpt.train_step = train_step


def hang():
    """Makes the first step hang. It prints a line when it begins and when it has seen a signal."""

    def train_step(*args):
        print("in the step", flush=True)
        while not train_gpt.stop_signal:
            time.sleep(0.01)
        print("signal seen", flush=True)
        time.sleep(A_LONG_TIME)

    train_gpt.train_step = train_step


def pause(step, go):
    """Makes that step wait until the file `go` exists."""
    before_step(step, lambda _: wait_until(go.exists))


def signal_in_step(job, step, go, number):
    """Sends a signal to a job that pauses in that step, and then lets the job continue."""
    wait_until(lambda: job.steps() >= step)
    job.signal(number)
    go.touch()


def slow_writing():
    """Imitates a large checkpoint on a slow disk.

    Writing a checkpoint then takes about as long as the training steps until the next one.
    """
    plain_save = torch.save
    plain_fsync = os.fsync

    def save(state, file):
        whole = io.BytesIO()
        plain_save(state, whole)
        for piece in range(0, len(whole.getvalue()), 200_000):
            file.write(whole.getvalue()[piece : piece + 200_000])
            file.flush()
            time.sleep(0.01)

    def fsync(fd):
        plain_fsync(fd)
        time.sleep(0.02)

    torch.save = save
    os.fsync = fsync


def checkpoints(folder):
    """{step: path} of the checkpoints under folder/checkpoints, which has one run at most."""
    runs = list((folder / "checkpoints").glob("*"))
    assert len(runs) <= 1
    return {int(f.stem[4:]): f for run in runs for f in sorted(run.glob("step*.pt"))}


def contents(folder):
    """{name: bytes} of all files but the consoles."""
    files = [f for f in folder.rglob("*") if f.is_file()]
    return {f.name: f.read_bytes() for f in files if not f.name.startswith("console")}


TIMES = r"train_time:\S+ step_avg:\S+|[\d.,]+ (s|tokens/s)\b"


def trace(log):
    """The parts of a log that an interruption must not change: not the times and a few lines."""
    header, machine, run = log.split("\n" + "=" * 100 + "\n")
    lines = [
        re.sub(TIMES, "", line)
        for line in run.splitlines()
        if not re.match("warm-up|resume|checkpoint|peak memory", line)
    ]
    return [header, machine] + lines


def same(a, b):
    """Whether two nested containers are equal. Tensors must agree bit for bit."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def weights(folder):
    (path,) = (folder / "checkpoints").glob("*/model.safetensors")
    return safetensors.torch.load_file(path)


def assert_same_run(folder, reference):
    """Checks that two runs have the same log, except for times, and the same final weights."""
    assert trace(read_log(folder)) == trace(read_log(reference))
    assert same(weights(folder), weights(reference))


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    Job(options(shards, "--save_checkpoint"), folder).succeeds()
    return folder


@pytest.fixture(scope="module")
def killed(shards, tmp_path_factory):
    """The folder of the same run, killed in its 8th step. It has checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("killed")
    job = Job(options(shards, "--save_checkpoint"), folder, hook=partial(before_step, 7, kill_self))
    assert job.wait() == [-signal.SIGKILL]
    assert list(checkpoints(folder)) == [3, 6]
    return folder


@pytest.fixture
def stopped(killed, tmp_path):
    """A copy of that folder, which a test can resume or damage."""
    return shutil.copytree(killed, tmp_path, dirs_exist_ok=True)


def kill_self(_):
    os.kill(os.getpid(), signal.SIGKILL)


def resume(shards, folder, *more, where="latest", hook=None, world_size=1, **changes):
    argv = options(shards, "--save_checkpoint", "--resume", where, *more, **changes)
    return Job(argv, folder, hook=hook, world_size=world_size)


# --------------------------------------------------------------- what a run leaves
def test_checkpoints_of_a_whole_run(whole, shards, tmp_path):
    """
    A run keeps its two newest checkpoints, and no half-written file. The log names each checkpoint.

    A run without checkpoints has the same losses.
    """
    log = read_log(whole)
    (run,) = (whole / "checkpoints").iterdir()
    assert run.name == next((whole / "logs").iterdir()).stem
    assert sorted(f.name for f in run.iterdir()) == [
        "model.safetensors",
        "step000009.pt",
        "step000012.pt",
    ]
    written = re.findall(r"^checkpoint: step (\d+) written in \d+\.\d s, untimed$", log, re.M)
    assert list(dict.fromkeys(map(int, written))) == [3, 6, 9, 12]

    plain = [a for a in options(shards) if a not in ("--checkpoint_every", str(EVERY))]
    Job(plain, tmp_path).succeeds()
    assert val_losses(read_log(tmp_path)) == val_losses(log)
    assert list(val_losses(log)) == [0, 4, 8, 12]
    assert not (tmp_path / "checkpoints").exists()


def test_final_model_is_safetensors(whole, shards):
    """The weights and hyperparameters in that file alone give the final loss in the log."""
    (path,) = (whole / "checkpoints").glob("*/model.safetensors")
    with safetensors.safe_open(path, "pt") as f:
        metadata = f.metadata()
    assert metadata["model"] == "speedrun"
    hp = train_gpt.parse_arguments(options(shards, "--save_checkpoint"))[1]
    assert json.loads(metadata["hyperparameters"]) == json.loads(json.dumps(asdict(hp)))
    tensors = safetensors.torch.load_file(path)
    assert same(tensors, dict(torch.load(checkpoints(whole)[STEPS], weights_only=True)["model"]))

    model = train_gpt.GPT(hp, dtype=tensors["embed.weight"].dtype)
    model.load_state_dict(tensors)
    tokens = torch.tensor(random_tokens(513, seed=3))
    windows = torch.tensor(train_gpt.get_window_blocks(STEPS, hp), dtype=torch.int32)
    with torch.no_grad():
        loss = model.eval()(tokens[:-1].view(4, 128).int(), tokens[1:].view(4, 128), windows)
    assert loss.item() == pytest.approx(val_losses(read_log(whole))[STEPS], abs=1e-3)


def slow_fsync():
    """Puts the clock an hour forward at each fsync(). All else is short compared with that."""
    clock = time.perf_counter
    plain = os.fsync
    ahead = []

    def perf_counter():
        return clock() + sum(ahead)

    def fsync(fd):
        ahead.append(A_LONG_TIME)
        return plain(fd)

    time.perf_counter = perf_counter
    os.fsync = fsync


def test_checkpoints_are_not_timed(shards, tmp_path):
    Job(options(shards, num_iterations=6), tmp_path, hook=slow_fsync).succeeds()
    log = read_log(tmp_path)
    written = [float(s) for s in re.findall(r"^checkpoint: .* in (\S+) s", log, re.M)]
    assert len(written) >= 2
    assert min(written) >= A_LONG_TIME
    times = list(map(int, re.findall(r"train_time:(\d+)ms", log)))
    assert times == sorted(times), times
    assert times[-1] < 1000 * A_LONG_TIME, times


# --------------------------------------------------------------- kill -9
def wait_for_a_random_moment(job, rng):
    """Waits for 0 to 6 steps, or only until the job starts, and then for a part of a second."""
    steps = rng.randrange(-1, 7)

    def there():
        if job.done():
            return True
        if steps < 0:  # a moment while the job starts
            return True
        return job.steps() >= steps and bool(job.out)

    wait_until(there)
    longest = 0.4 if steps == 0 else 0.1
    time.sleep(rng.uniform(0, longest))


def remove_run(folder):
    """Removes what a run leaves, so that the next run starts from the beginning."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)


def remove_unfinished(folder):
    for file in folder.rglob("*.tmp"):
        file.unlink()


def unfinished(folder):
    """True if a checkpoint is being written, or was when the job was killed."""
    return bool(list(folder.rglob("*.tmp")))


def test_kill_9_at_20_random_moments(shards, tmp_path_factory, capsys):
    """
    Kills and resumes runs until there were 20 kills.

    Most of the moments are random. Every fourth is while a checkpoint is being written, because
    20 random ones may all miss that. Every run that reaches its end must agree with the
    uninterrupted run bit for bit.
    """
    rng = random.Random()
    steps = dict(num_iterations=24, warmup_steps=1)
    argv = options(shards, "--save_checkpoint", **steps) + ["--checkpoint_every", "2"]
    reference = tmp_path_factory.mktemp("reference")
    folder = tmp_path_factory.mktemp("killed")
    Job(argv, reference).succeeds()
    kills = 0
    writing = 0  # how many of the kills hit a checkpoint that was being written
    runs = 0
    while runs == 0 or kills < 20:
        more = ["--resume", "latest"] if checkpoints(folder) else []
        remove_unfinished(folder)  # of the kill before
        job = Job(argv + more, folder, hook=slow_writing)
        if kills % 4 == 3:
            wait_until(lambda job=job: job.done() or unfinished(folder))
        else:
            wait_for_a_random_moment(job, rng)
        if kills < 20 and not job.done():
            job.signal(signal.SIGKILL)
            if job.wait() == [-signal.SIGKILL]:
                kills += 1
                if unfinished(folder):
                    writing += 1
                for file in checkpoints(folder).values():
                    train_gpt.read_checkpoint(str(file), "")  # raises if the file is incomplete
        if not checkpoints(folder):  # killed before its first checkpoint: nothing to resume
            remove_run(folder)
        elif job.wait() == [0]:
            runs += 1
            assert_same_run(folder, reference)
            remove_run(folder)
        else:
            assert job.wait() == [-signal.SIGKILL], job.err
    with capsys.disabled():
        print(
            f"\n{kills} times kill -9, {writing} of them while a checkpoint was being written; "
            f"{runs} runs ended, each with the uninterrupted run's losses and weights bit for bit"
        )
    assert kills == 20
    assert writing > 0


def kill_in(name):
    """Kills the process when it is about to put the file `name` in place."""
    plain = os.replace

    def replace(old, new):
        if Path(new).name == name:
            kill_self(None)
        plain(old, new)

    os.replace = replace


def test_kill_9_before_the_final_model_is_there(shards, whole, tmp_path):
    """
    The run is killed after its last step, whose checkpoint is already saved.

    The resumed run only writes the end of the log and the final model.
    """
    hook = partial(kill_in, "model.safetensors")
    job = Job(options(shards, "--save_checkpoint"), tmp_path, hook=hook)
    assert job.wait() == [-signal.SIGKILL]
    assert not list(tmp_path.rglob("model.safetensors"))
    resume(shards, tmp_path).succeeds()
    assert_same_run(tmp_path, whole)
    assert not list(tmp_path.rglob("*.tmp"))


# --------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_then_resume_is_the_same_run(number, shards, whole, tmp_path):
    go = tmp_path / "console go"
    job = Job(options(shards, "--save_checkpoint"), tmp_path, hook=partial(pause, 4, go))
    signal_in_step(job, 4, go, number)
    assert job.wait() == [128 + number]
    assert job.err == ""
    last = max(checkpoints(tmp_path))
    assert last == job.steps() < STEPS  # the run finished the step and saved it
    before = read_log(tmp_path)
    resume(shards, tmp_path).succeeds()
    log = read_log(tmp_path)
    assert_same_run(tmp_path, whole)
    assert re.search(rf"^resume: from step {last}\b", log, re.M)
    times = list(map(int, re.findall(r"train_time:(\d+)ms", log)))
    assert times == sorted(times), "the training time must continue from the checkpoint"
    assert log.startswith(before[: before.rindex("checkpoint: ")])


def test_signal_checkpoints_without_being_asked_for_any(shards, tmp_path):
    go = tmp_path / "console go"
    job = Job(options(shards) + ["--checkpoint_every", "0"], tmp_path, hook=partial(pause, 2, go))
    signal_in_step(job, 2, go, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    assert list(checkpoints(tmp_path)) == [job.steps()]


def interrupt_the_last_validation():
    plain = train_gpt.validate

    def validate(model, step, hp, world):
        if step == STEPS:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(model, step, hp, world)

    train_gpt.validate = validate


def test_signal_in_the_last_validation_ends_all_runs(shards, tmp_path):
    """The run is finished, and --num_runs starts no further one."""
    argv = options(shards) + ["--num_runs", "2", "--checkpoint_every", "0"]
    job = Job(argv, tmp_path, hook=interrupt_the_last_validation)
    assert job.wait() == [128 + signal.SIGINT]
    assert f"step:{STEPS}/{STEPS} val_loss" in read_log(tmp_path)
    assert "target 1.5: " in read_log(tmp_path)


def hang_after_training():
    plain = train_gpt.train

    def train(*args):
        plain(*args)
        print("trained", flush=True)
        time.sleep(A_LONG_TIME)

    train_gpt.train = train


def test_signal_after_training_exits_at_once(shards, tmp_path):
    """For example while ./run.sh prints a sample of text."""
    job = Job(options(shards), tmp_path, hook=hang_after_training)
    wait_until(lambda: "trained" in job.out)
    job.signal(signal.SIGINT)
    assert job.wait() == [128 + signal.SIGINT]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_exits_at_once(number, shards, tmp_path):
    job = Job(options(shards), tmp_path, hook=hang)
    wait_until(lambda: "in the step" in job.out)
    job.signal(number)
    wait_until(lambda: "signal seen" in job.out)
    time.sleep(1.1)  # a signal within a second of the first is ignored
    assert not job.done()
    job.signal(number)
    assert job.wait() == [128 + number]
    assert not checkpoints(tmp_path)


# --------------------------------------------------------------- resume
def test_resume_after_a_kill_is_the_same_run(shards, whole, stopped):
    resume(shards, stopped).succeeds()
    assert_same_run(stopped, whole)
    resumed = torch.load(checkpoints(stopped)[STEPS], weights_only=True)
    expected = torch.load(checkpoints(whole)[STEPS], weights_only=True)
    assert same(resumed["optimizers"], expected["optimizers"])


def test_resume_a_file_or_a_folder(shards, whole, stopped):
    """--resume takes any checkpoint, or the folder of a run, which means its newest checkpoint."""
    folder = checkpoints(stopped)[6].parent
    shutil.copytree(stopped, stopped / "copy", ignore=shutil.ignore_patterns("console*", "copy"))
    resume(shards, stopped, where=checkpoints(stopped)[3]).succeeds()
    assert_same_run(stopped, whole)
    assert re.search(r"^resume: from step 3\b", read_log(stopped), re.M)
    resume(shards, stopped / "copy", where=Path("checkpoints") / folder.name).succeeds()
    assert_same_run(stopped / "copy", whole)
    assert re.search(r"^resume: from step 6\b", read_log(stopped / "copy"), re.M)


def test_resume_of_a_run_that_had_ended(shards, whole, tmp_path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("console*"))
    resume(shards, tmp_path).succeeds()
    assert_same_run(tmp_path, whole)


def test_nothing_to_resume(shards, tmp_path):
    for where in ("latest", "nosuch.pt", "nosuch", tmp_path):
        resume(shards, tmp_path, where=where).fails("--resume", re.escape(str(where)))
    assert contents(tmp_path) == {}


def test_saved_on_4_processes_resumed_on_1_and_2(shards, tmp_path):
    """
    Each rank keeps the momentum of the matrices that it owns.

    With another number of ranks, the matrices have other owners. The losses agree except for
    rounding.
    """
    argv = options(shards, "--save_checkpoint", **IN_FLOAT32)
    one = tmp_path / "1"
    Job(argv, one, hook=float32).succeeds()
    want = val_losses(read_log(one))
    four = tmp_path / "4"
    exit_before_step_6 = partial(before_step, 6, exit_self, float32)
    codes = Job(argv, four, world_size=4, hook=exit_before_step_6).wait()
    assert codes == [7] * 4
    assert list(checkpoints(four)) == [3, 6]
    for world_size in (1, 2, 4):
        folder = tmp_path / f"4 then {world_size}"
        shutil.copytree(four, folder, ignore=shutil.ignore_patterns("console*"))
        resume(shards, folder, hook=float32, world_size=world_size, **IN_FLOAT32).succeeds()
        got = val_losses(read_log(folder))
        assert got.keys() == want.keys()
        assert got == pytest.approx(want, abs=2e-4), world_size
        log = read_log(folder)
        assert re.search(rf"^resume: from step 6, on {world_size} process", log, re.M)
        if world_size == 4:  # the same number of ranks as before: bit for bit
            whole4 = tmp_path / "whole 4"
            Job(argv, whole4, world_size=4, hook=float32).succeeds()
            assert_same_run(folder, whole4)


def exit_self(_):
    os._exit(7)


def test_other_hyperparameters_are_listed(shards, stopped):
    before = contents(stopped)
    job = resume(shards, stopped, muon_lr=0.125, head_lr=0.5)
    muon_lr = train_gpt.TRACKS["mini"].muon_lr
    change = f"muon_lr: {muon_lr} in the checkpoint, 0.125 now"
    job.fails(change, "head_lr", "0.5", "--resume_force")
    assert "embed_lr" not in job.err
    assert contents(stopped) == before


def other_source():
    train_gpt.SOURCE = train_gpt.SOURCE.replace("\n3. ", "\n3.  ", 1) + "# changed\n"


def test_other_source_is_listed(shards, stopped):
    before = contents(stopped)
    resume(shards, stopped, hook=other_source).fails("source", "--resume_force")
    assert contents(stopped) == before


@pytest.mark.parametrize(
    "name, value, key",
    [("muon_lr", 0.125, "blocks.0.mlp.c_fc.weight"), ("head_lr", 0.125, "lm_head.weight")],
)
def test_resume_force_is_recorded(name, value, key, shards, whole, stopped):
    """The changed setting takes effect from the checkpoint on, and the log names the change."""
    resume(shards, stopped, "--resume_force", hook=other_source, **{name: value}).succeeds()
    (line,) = re.findall(r"^resume: .*", read_log(stopped), re.M)
    for words in ("resume_force", "can't be a record", "source", name):
        assert words in line
    assert val_losses(read_log(stopped))[4] == val_losses(read_log(whole))[4]
    assert not same(weights(stopped)[key], weights(whole)[key])


def test_resume_force_can_turn_normuon_on(shards, tmp_path):
    """Its mean squares aren't in the checkpoint, so they begin at zero."""
    go = tmp_path / "console go"
    job = Job(options(shards, muon_beta2=0.0), tmp_path, hook=partial(pause, 4, go))
    signal_in_step(job, 4, go, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    resume(shards, tmp_path, "--resume_force", muon_beta2=0.9).succeeds()
    assert re.search(r"^resume: .*muon_beta2: 0.0 in the checkpoint, 0.9 now", read_log(tmp_path), re.M)


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    path = tmp_path / "step000003.pt"
    path.write_bytes(b"")

    def refuse(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(train_gpt.zipfile, "ZipFile", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        train_gpt.read_checkpoint(path, tmp_path)


def test_resume_force_with_another_model_is_one_line(shards, stopped):
    before = contents(stopped / "checkpoints")
    job = resume(shards, stopped, "--resume_force", model_dim=64, head_dim=32)
    job.fails("model_dim|checkpoint")
    assert contents(stopped / "checkpoints") == before


def test_resume_after_the_last_step_is_one_line(shards, stopped):
    before = contents(stopped)
    job = resume(shards, stopped, "--resume_force", num_iterations=5)
    job.fails("step 6", "--num_iterations is 5")
    assert contents(stopped) == before


def test_resumed_length_that_does_not_fit_the_processes_is_one_line(monkeypatch):
    """On GPUs, a resumed run takes train_seq_len from its checkpoint."""
    hp = train_gpt.TRACKS["fineweb"]
    monkeypatch.setattr(train_gpt, "check_inputs", lambda args, hp: None)
    monkeypatch.setattr(train_gpt, "start_world", lambda name: train_gpt.World(0, 8, torch.device("cpu")))
    state = {"settings": {"train_seq_len": 8 * 48 * 1024}}
    monkeypatch.setattr(train_gpt, "find_checkpoint", lambda args, hp: state)
    args, _ = train_gpt.parse_arguments(["--track", "fineweb", "--device", "cpu", "--resume", "x"])
    args.fit_memory = True
    with pytest.raises(train_gpt.InputError, match="8 processes can't share 1 training"):
        train_gpt.train(args, hp)


def test_a_checkpoint_that_was_just_written_is_kept(shards, stopped):
    """A run that is resumed from an earlier step than the newest checkpoint."""
    folder = checkpoints(stopped)[6].parent
    for step in (300, 400):
        shutil.copy(checkpoints(stopped)[6], folder / f"step{step:06d}.pt")
    go = stopped / "console go"
    job = resume(shards, stopped, where=checkpoints(stopped)[3], hook=partial(pause, 4, go))
    wait_until(lambda: job.steps() >= 4 - 3)
    job.signal(signal.SIGTERM)
    go.touch()
    assert job.wait() == [128 + signal.SIGTERM]
    found = checkpoints(stopped)
    saved = max(found, key=lambda step: found[step].stat().st_mtime)
    assert 3 < saved < 300
    # The one before it and later ones stay
    assert {3, 300, 400} <= set(found)


def test_the_checkpoint_before_is_kept(tmp_path):
    """Step 200 is damaged, so the run goes on from step 150. Step 200 must not take the place of the
    checkpoint before."""
    hp = replace(train_gpt.TRACKS["mini"], **TINY | dict(long_window_layers=(0, 3)))
    world = train_gpt.World(0, 1, torch.device("cpu"))
    model = train_gpt.build_model(hp, world)
    optimizers = train_gpt.build_optimizers(model, hp)
    book = train_gpt.Logbook(tmp_path, hp, world, {}, "")
    good = torch.full((), math.inf, dtype=torch.float64)
    kept = []
    for n, step in enumerate((100, 150, 200, 170, 220)):
        train_gpt.save_checkpoint(tmp_path, step, book, model, optimizers, good)
        os.utime(tmp_path / f"step{step:06d}.pt", (n, n))  # files may be written in the same moment
        kept.append(sorted(int(file.stem[4:]) for file in tmp_path.glob("step*.pt")))
    assert kept == [[100], [100, 150], [150, 200], [150, 170, 200], [170, 220]]


def another_cpu():
    train_gpt.CPU_MODEL = "another CPU"


def test_a_resume_on_another_machine_is_in_the_log(shards, stopped):
    log = read_log(stopped)
    (machine,) = re.findall("^CPU: .*", log, re.M)
    resume(shards, stopped, hook=another_cpu).succeeds()
    machines = re.findall("^CPU: .*", read_log(stopped), re.M)
    assert machines[0] == machine
    assert len(machines) == 2
    assert machines[1].startswith("CPU: another CPU, ")


def test_negative_checkpoint_every_is_refused(shards, tmp_path):
    Job(options(shards) + ["--checkpoint_every", "-3"], tmp_path).fails("checkpoint_every")
    assert contents(tmp_path) == {}


# --------------------------------------------------------------- damaged and hostile files
def flip(path, at):
    data = bytearray(path.read_bytes())
    data[int(at)] ^= 0x10
    path.write_bytes(data)


def truncate(path, fraction):
    os.truncate(path, int(path.stat().st_size * fraction))


class Hostile:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, victim):
        self.victim = str(victim)

    def __reduce__(self):
        return open, (self.victim, "w")


def flip_in_the_middle(path):
    flip(path, path.stat().st_size / 2)


def cut_in_half(path):
    truncate(path, 0.5)


def cut_a_few_bytes(path):
    os.truncate(path, path.stat().st_size - 20)


def make_empty(path):
    truncate(path, 0)


def hostile(path):
    return Hostile(path.with_name("victim"))


def hostile_file(path):
    torch.save(hostile(path), path)


def hostile_entry(path):
    state = torch.load(path, weights_only=True)
    state["step"] = hostile(path)
    torch.save(state, path)


def hostile_in_the_old_format(path):
    torch.save(hostile(path), path, _use_new_zipfile_serialization=False)


def hostile_pickle(path):
    path.write_bytes(pickle.dumps(hostile(path)))


def other_content(path):
    torch.save(dict(model=torch.ones(3)), path)


DAMAGE = {
    "a bit flipped in the middle": flip_in_the_middle,
    "cut in half": cut_in_half,
    "a few bytes short": cut_a_few_bytes,
    "empty": make_empty,
    "hostile, as torch.save makes it": hostile_file,
    "hostile, among the rest": hostile_entry,
    "hostile, in the old format": hostile_in_the_old_format,
    "hostile, a bare pickle": hostile_pickle,
    "another program's": other_content,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_refused(kind, shards, stopped, whole):
    """The earlier checkpoint is still there, and a user can resume from it by its name."""
    newest = checkpoints(stopped)[6]
    DAMAGE[kind](newest)
    assert not list(stopped.rglob("victim"))
    says = r"step000006\.pt is damaged .*try the previous one"
    with pytest.raises(train_gpt.InputError, match=says) as error:
        train_gpt.read_checkpoint(str(newest.parent), "")
    assert "\n" not in str(error.value)
    # Only two kinds are also tested with whole runs, which take longer
    if kind in ("a bit flipped in the middle", "hostile, among the rest"):
        before = contents(stopped)
        resume(shards, stopped).fails(r"step000006\.pt is damaged")
        assert contents(stopped) == before
        resume(shards, stopped, where=checkpoints(stopped)[3]).succeeds()
        assert_same_run(stopped, whole)
    assert not list(stopped.rglob("victim")), "the pickle was executed"


def test_damage_anywhere_is_noticed_or_harmless(whole, tmp_path):
    """
    Flips bits and cuts off ends at random.

    Either the file is refused, or the loaded checkpoint is the one that was saved.
    """
    original = checkpoints(whole)[STEPS]
    want = train_gpt.read_checkpoint(str(original), "")
    size = original.stat().st_size
    rng = random.Random(0)
    path = tmp_path / "step000012.pt"
    refused = 0
    for trial in range(60):
        shutil.copy(original, path)
        cut = trial % 2 == 0
        damage = os.truncate if cut else flip
        damage(path, rng.randrange(size))
        try:
            assert same(train_gpt.read_checkpoint(str(path), ""), want)
            assert not cut, "a truncated file was accepted"
        except train_gpt.InputError:
            refused += 1
    assert refused > 40


# --------------------------------------------------------------- full disks, unwritable places
def file_size_limit(limit):
    """Allows no file of more than `limit` bytes. Writes then fail as they do on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_full_disk_for_a_checkpoint(shards, stopped, whole):
    before = contents(stopped / "checkpoints")
    limit = min(map(len, before.values())) - 1000
    job = resume(shards, stopped, hook=partial(file_size_limit, limit))
    job.fails("can't write", r"step000009\.pt")
    assert contents(stopped / "checkpoints") == before  # there is no half-written file
    resume(shards, stopped).succeeds()
    assert_same_run(stopped, whole)


def test_full_disk_for_the_log(shards, stopped, whole):
    before = contents(stopped / "checkpoints")
    (log,) = (stopped / "logs").iterdir()
    job = resume(shards, stopped, hook=partial(limit_at_step, 7, log))
    job.fails("can't write logs/", "too large|space")
    assert contents(stopped / "checkpoints") == before
    resume(shards, stopped).succeeds()
    assert_same_run(stopped, whole)


def limit_at_step(step, file):
    """From that step on, `file` can't grow, and no other file can grow beyond its size."""
    before_step(step, lambda _: file_size_limit(file.stat().st_size))


def test_full_disk_for_the_console(shards, stopped):
    """
    A run prints to a file on a full disk.

    The interpreter buffers its output here, and tries to write it once more when it ends.
    """
    before = contents(stopped / "checkpoints")
    with open("/dev/full", "w") as full:
        ran = run_script(
            options(shards, "--save_checkpoint", "--resume", "latest"),
            stopped,
            timeout=300,
            stdout=full,
            PYTHONUNBUFFERED="",
        )
    assert ran.returncode == 2, ran.stderr
    assert re.fullmatch(r"error: .*No space left on device\n", ran.stderr)
    assert contents(stopped / "checkpoints") == before


@pytest.mark.parametrize("option", ["--log_dir", "--checkpoint_dir"])
@pytest.mark.parametrize("place", ["a file", "no place for files", "a folder without room for files"])
def test_unwritable_folder_is_one_line_before_training(option, place, shards, tmp_path):
    (tmp_path / "file").write_text("")
    places = {
        "a file": "file",
        "no place for files": "/proc/nosuch",
        "a folder without room for files": "/proc",
    }
    where = places[place]
    job = Job(options(shards, "--save_checkpoint") + [option, where], tmp_path)
    job.fails(f"can't write {where}")
    assert job.steps() == 0, "the run must fail before it trains"


# --------------------------------------------------------------- failures in the middle of a run
def poison_loss(model):
    if os.environ["RANK"] == "1":
        model.lm_head.weight.data[0, 0] = math.nan


def poison_gradient(model):
    if os.environ["RANK"] == "1":
        model.lm_head.weight.register_hook(lambda grad: grad * math.inf)


@pytest.mark.parametrize("what, says", [(poison_loss, "step 8: "), (poison_gradient, "step 8: ")])
def test_non_finite_stops_all_ranks_and_names_the_step(what, says, shards, tmp_path):
    """
    Something goes wrong on the second of two ranks. Both ranks stop, and the error names the step.

    Gradients are averaged over the ranks, so a bad gradient spoils the weights of both. The
    validation after that step shows it.
    """
    job = Job(options(shards), tmp_path, world_size=2, hook=partial(before_step, 7, what))
    job.fails(says, "not finite")
    assert job.processes[1].exitcode not in (0, None)
    assert list(checkpoints(tmp_path)) == [3, 6]
    for path in checkpoints(tmp_path).values():
        state = train_gpt.read_checkpoint(str(path), "")
        assert all(t.isfinite().all() for t in state["model"].values())


def record_last_step(folder):
    """Writes how many steps this rank has started to a file of its own."""
    plain = train_gpt.train_step
    steps = 0

    def train_step(*args):
        nonlocal steps
        steps += 1
        (folder / f"steps{os.environ['RANK']}").write_text(str(steps))
        return plain(*args)

    train_gpt.train_step = train_step


def test_non_finite_loss_stops_all_ranks_after_the_same_step(shards, tmp_path):
    """
    The second of two ranks gets a NaN in step 8, far from any validation.

    The next vote starts after step 10, and is read when the following one starts.
    """
    hook = partial(before_step, 7, poison_loss, then=partial(record_last_step, tmp_path))
    argv = options(shards, num_iterations=20, val_loss_every=0) + ["--checkpoint_every", "0"]
    Job(argv, tmp_path, world_size=2, hook=hook).fails("step 8: ", "not finite")
    steps = [int((tmp_path / f"steps{rank}").read_text()) for rank in range(2)]
    assert steps == [15, 15]


def poison_update(model):
    """Makes the update of the weights NaN. The loss and the gradients stay finite."""
    plain = torch.optim.Adam.step

    def step(self):
        plain(self)
        self.param_groups[0]["params"][0].data.fill_(math.nan)

    torch.optim.Adam.step = step


def test_non_finite_validation_stops(shards, tmp_path):
    """The last update spoils the weights. Only the last validation can notice it."""
    hook = partial(before_step, STEPS - 1, poison_update)
    job = Job(options(shards, "--save_checkpoint"), tmp_path, hook=hook)
    job.fails(rf"step {STEPS}\b", "not finite")
    assert "target" not in job.out
    assert not list(tmp_path.rglob("model.safetensors"))


def test_no_checkpoint_of_spoiled_weights(shards, tmp_path):
    """
    The last update before a checkpoint spoils the weights, and no loss has shown it yet.

    These weights are not saved. The newest checkpoint is still good.
    """
    hook = partial(before_step, 5, poison_update)
    job = Job(options(shards, val_loss_every=0), tmp_path, hook=hook)
    job.fails("step 6: ", "not finite")
    assert list(checkpoints(tmp_path)) == [3]
    assert train_gpt.read_checkpoint(str(checkpoints(tmp_path)[3]), "")["step"] == 3


def delete(path, _):
    path.unlink()


def cut(path, _):
    os.truncate(path, 2000)


# Step 8 is the first to read the second shard. The file is opened again for every batch.
@pytest.mark.parametrize("step, action", [(4, delete), (10, delete), (10, cut)])
def test_shard_spoiled_under_a_running_job(step, action, tmp_path):
    spoiled = write_shards(tmp_path) / "tiny_train_000001.bin"
    hook = partial(before_step, step, partial(action, spoiled))
    job = Job(options(tmp_path), tmp_path / "run", hook=hook)
    job.fails(re.escape(str(spoiled)))
    assert job.steps() >= 8
    for path in checkpoints(tmp_path / "run").values():
        assert train_gpt.read_checkpoint(str(path), "")


def test_shard_spoiled_for_one_rank(tmp_path):
    """Rank 1 alone reads tokens outside the vocabulary, and its error says so."""
    spoiled = write_shards(tmp_path) / "tiny_train_000001.bin"
    hook = partial(before_step, 8, partial(spoil_for_rank_1, spoiled))
    job = Job(options(tmp_path), tmp_path / "run", world_size=2, hook=hook)
    codes = job.wait()
    assert all(codes), codes
    errors = [line for line in job.err.splitlines() if line.startswith("error: ")]
    (error,) = [line for line in errors if "lost contact with another process" not in line]
    assert str(spoiled) in error
    assert "vocabulary" in error
    assert "Traceback" not in job.err


def spoil_for_rank_1(path, model):
    """Changes the file after rank 0 has read its part of the next batch, and before rank 1 does."""
    plain = train_gpt.read_tokens
    has_read = path.with_name("rank 0 has read")

    def read_tokens(*args):
        if os.environ["RANK"] == "1":
            wait_until(has_read.exists)
            header = path.read_bytes()[:1024]
            tokens = (path.stat().st_size - 1024) // 2
            path.write_bytes(header + b"\xff\xff" * tokens)
        tokens = plain(*args)
        has_read.touch()
        return tokens

    train_gpt.read_tokens = read_tokens


# --------------------------------------------------------------- torchrun
SLOW = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch

# Does what TORCH_COMPILE_DISABLE does, but without importing the compiler for seconds
torch.compile = lambda f=None, **_: f or (lambda f: f)
import train_gpt

slow_step = float(os.environ.get("SLOW", "0"))
slow_disk = float(os.environ.get("SLOW_DISK", "0"))
quick_steps = int(os.environ.get("QUICK_STEPS", "0"))
plain_step = train_gpt.train_step
plain_fsync = os.fsync
steps = 0

def train_step(*args):
    global steps
    steps += 1
    if steps > quick_steps:
        time.sleep(slow_step)
    return plain_step(*args)

def fsync(fd):
    time.sleep(slow_disk)
    return plain_fsync(fd)

if "FLOAT32" in os.environ:
    train_gpt.CPU_FLAGS = set()
train_gpt.train_step = train_step
os.fsync = fsync
sys.exit(train_gpt.main(sys.argv[1:]))
"""


def launcher_main(argv, folder, console, environment):
    """Runs `torchrun argv` in a forked process, as a shell would."""
    os.setsid()
    for number in (1, 2):
        file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.distributed.run.main(argv)


def torchrun(argv, folder, *launcher, **environment):
    """Starts torchrun with a slowed-down script, in its own process group, as a shell does."""
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(SLOW.format(root=str(ROOT)))
    console = folder / "console.txt"
    console.write_text("")
    command = [*launcher, "slow.py", *map(str, argv)]
    arguments = (command, str(folder), str(console), env(**environment))
    process = forkserver().Process(target=launcher_main, args=arguments)
    process.start()
    return process


def workers(launcher):
    """{rank: pid} of the processes that torchrun started."""
    ranks = {}
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(after_name(task)[1])
            if parent != launcher.pid:
                continue
            rank = re.search(r"(?:^|\0)RANK=(\d+)", (task / "environ").read_text())
            if rank:
                ranks[int(rank[1])] = int(task.name)
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            pass
    return ranks


def after_name(task):
    """The fields after the name in /proc/PID/stat: the state, the parent and more."""
    return (task / "stat").read_text().rsplit(")", 1)[1].split()


def shows(folder, text):
    return re.search(text, (folder / "console.txt").read_text(), re.M)


def ends(launcher):
    """Waits for the end of a job and returns its exit code. Kills all that is left of it."""
    pids = [launcher.pid, *workers(launcher).values()]
    try:
        wait_until(lambda: not launcher.is_alive())
        return launcher.exitcode
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        launcher.join()


STANDALONE = ("--standalone", "--nproc_per_node=2")
# torchrun prints this when it kills a process that ignored its signal for 30 s
KILLED = "forcefully exiting"
# The first four steps are quick, the others are slow
SLOW_LATER = dict(QUICK_STEPS="4", SLOW="1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_under_torchrun_then_resume(number, shards, tmp_path):
    """The launcher gets a signal, as from `kill` or Ctrl-C, and passes it on to the ranks."""
    job = torchrun(options(shards, "--save_checkpoint"), tmp_path, *STANDALONE, **SLOW_LATER)
    wait_until(lambda: shows(tmp_path, "^step:4/"))
    os.killpg(job.pid, number)
    assert ends(job) != 0
    assert not shows(tmp_path, KILLED)
    last = max(checkpoints(tmp_path))
    assert 4 <= last == steps_of(read_log(tmp_path)) < STEPS
    assert not list(tmp_path.rglob("*.tmp"))
    resume(shards, tmp_path, world_size=2).succeeds()
    Job(options(shards, "--save_checkpoint"), tmp_path / "whole", world_size=2).succeeds()
    assert_same_run(tmp_path, tmp_path / "whole")


@pytest.mark.parametrize("launcher_too", [True, False])
def test_every_process_signalled_under_torchrun(launcher_too, shards, tmp_path):
    """
    Batch systems send a signal to each process. The ranks then get it twice.

    torchrun sends the second one, because it got the signal itself, or because it saw that the
    first rank ended. Writing the checkpoint takes a while. It must be complete in the end.
    """
    argv = options(shards) + ["--checkpoint_every", "0"]
    job = torchrun(argv, tmp_path, *STANDALONE, **SLOW_LATER, SLOW_DISK="2")
    wait_until(lambda: shows(tmp_path, "^step:4/"))
    pids = list(workers(job).values())
    if launcher_too:
        pids.append(job.pid)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
    assert ends(job) != 0
    assert not shows(tmp_path, KILLED)
    assert max(checkpoints(tmp_path)) == steps_of(read_log(tmp_path)) >= 4


def test_second_signal_under_torchrun(shards, tmp_path):
    """A step would take an hour. After two Ctrl-C, all processes end long before that."""
    job = torchrun(options(shards), tmp_path, *STANDALONE, SLOW=str(A_LONG_TIME))
    wait_until(lambda: shows(tmp_path, "^step:0/"))
    pids = workers(job).values()
    assert len(pids) == 2
    for _ in range(2):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(3)  # a second signal within a second is ignored; busy machines handle signals late
    try:
        wait_until(lambda: not job.is_alive() and not any(map(alive, pids)))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        job.kill()
    assert job.exitcode != 0
    assert not checkpoints(tmp_path)
    assert not shows(tmp_path, KILLED)


def alive(pid):
    try:
        return after_name(Path(f"/proc/{pid}"))[0] != "Z"
    except FileNotFoundError:
        return False


def test_killed_rank_takes_the_job_down(shards, tmp_path):
    job = torchrun(options(shards, "--save_checkpoint"), tmp_path, *STANDALONE, **SLOW_LATER)
    wait_until(lambda: shows(tmp_path, "^step:4/"))
    os.kill(workers(job)[1], signal.SIGKILL)
    assert ends(job) != 0
    assert not shows(tmp_path, KILLED)
    assert shows(tmp_path, "SIGKILL")
    assert shows(tmp_path, r"rank\s*: 1\b")
    assert list(checkpoints(tmp_path)) == [3]
    resume(shards, tmp_path, world_size=2).succeeds()
    assert list(val_losses(read_log(tmp_path))) == [0, 4, 8, 12]


def test_two_nodes_of_two_processes_train_as_one_process(shards, tmp_path):
    argv = options(shards, **IN_FLOAT32, num_iterations=8)
    one = Job(argv, tmp_path / "one", hook=float32).succeeds()
    launcher = [
        "--nnodes=2",
        "--nproc_per_node=2",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{free_port()}",
        "--local_addr=127.0.0.1",
    ]
    nodes = [torchrun(argv, tmp_path / f"node{i}", *launcher, FLOAT32="1") for i in (0, 1)]
    codes = [ends(node) for node in nodes]
    texts = [(tmp_path / f"node{i}" / "console.txt").read_text() for i in (0, 1)]
    assert codes == [0, 0], texts
    logs = list(tmp_path.glob("node*/logs/*.txt"))
    assert len(logs) == 1, "only rank 0 may write a log"
    log = logs[0].read_text()
    assert '"world_size": 4' in log
    assert val_losses(log) == pytest.approx(val_losses(one.out), abs=2e-4)
    assert list(val_losses(log)) == [0, 4, 8]
