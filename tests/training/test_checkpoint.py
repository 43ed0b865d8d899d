"""Runs that survive: checkpoints, resume, signals, full disks, dead ranks. All with real processes, really killed."""

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
from dataclasses import asdict
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
    write_shard,
)

STEPS, EVERY = 12, 3  # of a run, and from one checkpoint to the next
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
IN_FLOAT32 = dict(
    scalar_lr=0.0
)  # with float32(): runs on other numbers of processes agree (see test_run.py)


def options(folder, *more, **changes):
    values = (
        dict(
            train_files=folder / "tiny_train_*.bin",
            val_files=folder / "tiny_val_*.bin",
            muon_beta2=0.9,
            **TINY,
        )
        | changes
    )  # NorMuon: the optimizer with the most to keep
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
    """Two shards of 8 and of 40 steps."""
    write_shard(folder / "tiny_train_000000.bin", random_tokens(8 * 512 + 100, seed=1))
    write_shard(folder / "tiny_train_000001.bin", random_tokens(40 * 512 + 1, seed=2))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(512 + 1, seed=3))
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


# ---------------------------------------------------------------------------------------- processes and their faults
A_LONG_TIME = 3600  # s: what takes so long has not happened, however busy the machine, when wait_until() gives up


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {seconds} s in vain")
        time.sleep(0.005)


def rank_main(rank, world_size, port, argv, folder, console, hook):
    """main() in a process of its own, with its exit code; `hook` breaks something first."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{console}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
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
        """The exit codes of all ranks."""
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
        """Ends with code 2 and one line, which says all this."""
        codes = self.wait()
        assert codes[0] == 2, (codes, self.err)
        lines = [s for s in self.err.splitlines() if not s.startswith("warning: ")]
        assert len(lines) == 1 and lines[0].startswith("error: "), self.err
        for text in says:
            assert re.search(text, lines[0]), (text, lines[0])
        return self


def steps_of(text):
    """How many training steps a log or a terminal's text shows."""
    return len(re.findall(r"^step:\d+/\d+ train_time", text, re.M))


def float32():
    train_gpt.CPU_FLAGS = set()


def before_step(step, action, then=None):
    """Have the process do action(model) right before step number `step`."""
    if then:
        then()
    plain_schedules, plain_step, seen = train_gpt.set_schedules, train_gpt.train_step, []

    def set_schedules(optimizers, step, hp):
        seen.append(step)
        plain_schedules(optimizers, step, hp)

    def train_step(model, *args):
        if seen[-1] == step:
            action(model)
        return plain_step(model, *args)

    train_gpt.set_schedules, train_gpt.train_step = set_schedules, train_step


def slow_steps(seconds):
    plain = train_gpt.train_step
    train_gpt.train_step = lambda *args: (time.sleep(seconds), plain(*args))[1]


def pause(step, go):
    """Wait in that step until the file `go` is there."""
    before_step(step, lambda _: wait_until(go.exists))


def signal_in_step(job, step, go, number):
    """That signal to a job that pauses in that step, which then goes on."""
    wait_until(lambda: job.steps() >= step)
    job.signal(number)
    go.touch()


def slow_writing():
    """A checkpoint takes about as long as the steps between two, as a large one on a slow disk does."""
    plain_save, plain_fsync = torch.save, os.fsync

    def save(state, file):
        whole = io.BytesIO()
        plain_save(state, whole)
        for piece in range(0, len(whole.getvalue()), 200_000):
            file.write(whole.getvalue()[piece : piece + 200_000])
            file.flush()
            time.sleep(0.01)

    torch.save = save
    os.fsync = lambda fd: (plain_fsync(fd), time.sleep(0.02))[0]


def checkpoints(folder):
    """{step: path} of the only run's checkpoints under folder/checkpoints."""
    runs = list((folder / "checkpoints").glob("*")) if (folder / "checkpoints").exists() else []
    assert len(runs) <= 1
    return {int(f.stem[4:]): f for run in runs for f in sorted(run.glob("step*.pt"))}


def contents(folder):
    return {
        f.name: f.read_bytes()
        for f in folder.rglob("*")
        if f.is_file() and not f.name.startswith("console")
    }


def trace(log):
    """A log but for its times and what only an interruption leaves."""
    header, machine, run = log.split("\n" + "=" * 100 + "\n")
    lines = [
        s for s in run.splitlines() if not re.match("warm-up|resume|checkpoint|peak memory", s)
    ]
    return [header, machine] + [
        re.sub(r"train_time:\S+ step_avg:\S+|[\d.,]+ (s|tokens/s)\b", "", s) for s in lines
    ]


def same(a, b):
    """Equality of nested containers, bit for bit in tensors."""
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
    """The same log but for times, and the same final weights, bit for bit."""
    assert trace(read_log(folder)) == trace(read_log(reference))
    assert same(weights(folder), weights(reference))


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    Job(options(shards, "--save_checkpoint"), folder).succeeds()
    return folder


@pytest.fixture(scope="module")
def killed(shards, tmp_path_factory):
    """The folder of the same run, killed in its 8th step; checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("killed")
    job = Job(options(shards, "--save_checkpoint"), folder, hook=partial(before_step, 7, kill_self))
    assert job.wait() == [-signal.SIGKILL]
    assert list(checkpoints(folder)) == [3, 6]
    return folder


@pytest.fixture
def stopped(killed, tmp_path):
    """A copy of that folder, to go on with or to spoil."""
    return shutil.copytree(killed, tmp_path, dirs_exist_ok=True)


def kill_self(_):
    os.kill(os.getpid(), signal.SIGKILL)


def resume(shards, folder, *more, where="latest", hook=None, world_size=1, **changes):
    argv = options(shards, "--save_checkpoint", "--resume", where, *more, **changes)
    return Job(argv, folder, hook=hook, world_size=world_size)


# ---------------------------------------------------------------------------------------- what a run leaves
def test_checkpoints_of_a_whole_run(whole, shards, tmp_path):
    """The newest two, each named in the log; nothing half-written; and they change nothing in the training."""
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
    assert val_losses(read_log(tmp_path)) == val_losses(log) and list(val_losses(log)) == [
        0,
        4,
        8,
        12,
    ]
    assert not (tmp_path / "checkpoints").exists()


def test_final_model_is_safetensors(whole, shards):
    """Weights and hyperparameters from that file alone give the validation loss that the log ends with."""
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
    """The clock is put forward: what all else really takes is nothing against that."""
    clock, plain, ahead = time.perf_counter, os.fsync, []
    time.perf_counter = lambda: clock() + sum(ahead)
    os.fsync = lambda fd: (ahead.append(A_LONG_TIME), plain(fd))[1]


def test_checkpoints_are_not_timed(shards, tmp_path):
    Job(options(shards, num_iterations=6), tmp_path, hook=slow_fsync).succeeds()
    log = read_log(tmp_path)
    written = [float(s) for s in re.findall(r"^checkpoint: .* in (\S+) s", log, re.M)]
    assert len(written) >= 2 and min(written) >= A_LONG_TIME
    times = list(map(int, re.findall(r"train_time:(\d+)ms", log)))
    assert times == sorted(times) and times[-1] < 1000 * A_LONG_TIME, times


# ---------------------------------------------------------------------------------------- kill -9
def test_kill_9_at_20_random_moments(shards, tmp_path_factory, capsys):
    """Runs are killed and resumed until 20 kills are done; every run that ends is the uninterrupted one bit for bit."""
    rng = random.Random()
    steps = dict(num_iterations=24, warmup_steps=1)
    argv = options(shards, "--save_checkpoint", **steps) + ["--checkpoint_every", "2"]
    reference, folder = tmp_path_factory.mktemp("reference"), tmp_path_factory.mktemp("killed")
    Job(argv, reference).succeeds()
    kills = writing = runs = 0
    while runs == 0 or kills < 20:
        job = Job(
            argv + ["--resume", "latest"] * bool(checkpoints(folder)), folder, hook=slow_writing
        )
        after = rng.randrange(-1, 7)  # steps; -1: while it starts
        wait_until(lambda: job.done() or job.steps() >= after and (after < 0 or job.out))
        time.sleep(rng.uniform(0, 0.1 if after else 0.4))
        if kills < 20 and not job.done():
            job.signal(signal.SIGKILL)
            if job.wait() == [-signal.SIGKILL]:
                kills += 1
                writing += bool(list(folder.rglob("*.tmp")))
                for file in checkpoints(folder).values():  # one that is there is whole
                    train_gpt.read_checkpoint(str(file), "")
        if not checkpoints(folder):  # it had not come to the first one: there is nothing to resume
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            shutil.rmtree(folder / "logs", ignore_errors=True)
        elif job.wait() == [0]:
            runs += 1
            assert_same_run(folder, reference)
            shutil.rmtree(folder / "checkpoints")
            shutil.rmtree(folder / "logs")
        else:
            assert job.wait() == [-signal.SIGKILL], job.err
    with capsys.disabled():
        print(
            f"\n{kills} times kill -9, {writing} of them while a checkpoint was being written; "
            f"{runs} runs ended, each with the uninterrupted run's losses and weights bit for bit"
        )
    assert kills == 20 and writing > 0


def kill_in(name):
    """kill -9 where the final files are written: `name` is the one in the making."""
    plain = os.replace

    def replace(old, new):
        if Path(new).name == name:
            kill_self(None)
        plain(old, new)

    os.replace = replace


def test_kill_9_before_the_final_model_is_there(shards, whole, tmp_path):
    """All steps are done and saved: what is resumed has only the end of its log and this file to write."""
    job = Job(
        options(shards, "--save_checkpoint"), tmp_path, hook=partial(kill_in, "model.safetensors")
    )
    assert job.wait() == [-signal.SIGKILL]
    assert not list(tmp_path.rglob("model.safetensors"))
    resume(shards, tmp_path).succeeds()
    assert_same_run(tmp_path, whole)
    assert not list(tmp_path.rglob("*.tmp"))


# ---------------------------------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_then_resume_is_the_same_run(number, shards, whole, tmp_path):
    go = tmp_path / "console go"
    job = Job(options(shards, "--save_checkpoint"), tmp_path, hook=partial(pause, 4, go))
    signal_in_step(job, 4, go, number)
    assert job.wait() == [128 + number]
    assert job.err == ""
    last = max(checkpoints(tmp_path))
    assert last == job.steps() < STEPS  # the step was finished, and is saved
    before = read_log(tmp_path)
    resume(shards, tmp_path).succeeds()
    log = read_log(tmp_path)
    assert_same_run(tmp_path, whole)
    assert re.search(rf"^resume: from step {last}\b", log, re.M)
    times = list(map(int, re.findall(r"train_time:(\d+)ms", log)))
    assert times == sorted(times), "training time goes on where it was"
    assert log.startswith(before[: before.rindex("checkpoint: ")])


def test_signal_checkpoints_without_being_asked_for_any(shards, tmp_path):
    go = tmp_path / "console go"
    job = Job(options(shards) + ["--checkpoint_every", "0"], tmp_path, hook=partial(pause, 2, go))
    signal_in_step(job, 2, go, signal.SIGTERM)
    assert job.wait() == [128 + signal.SIGTERM]
    assert list(checkpoints(tmp_path)) == [job.steps()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_exits_at_once(number, shards, tmp_path):
    job = Job(options(shards), tmp_path, hook=partial(slow_steps, A_LONG_TIME))
    wait_until(lambda: "val_loss" in job.out)
    time.sleep(0.2)
    job.signal(number)
    time.sleep(1)
    assert not job.done()
    job.signal(number)
    assert job.wait() == [128 + number]
    assert not checkpoints(tmp_path)


# ---------------------------------------------------------------------------------------- resume
def test_resume_after_a_kill_is_the_same_run(shards, whole, stopped):
    resume(shards, stopped).succeeds()
    assert_same_run(stopped, whole)
    assert same(
        *(
            torch.load(checkpoints(f)[STEPS], weights_only=True)["optimizers"]
            for f in (stopped, whole)
        )
    )


def test_resume_a_file_or_a_folder(shards, whole, stopped):
    """The older file is taken when it is named; a run's folder means its newest."""
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
    """Muon's momentum lives on its owner's rank: it finds its new ones. Losses agree but for rounding."""
    one = tmp_path / "1"
    Job(options(shards, "--save_checkpoint", **IN_FLOAT32), one, hook=float32).succeeds()
    want = val_losses(read_log(one))
    four = tmp_path / "4"
    codes = Job(
        options(shards, "--save_checkpoint", **IN_FLOAT32),
        four,
        world_size=4,
        hook=partial(before_step, 6, exit_self, float32),
    ).wait()
    assert codes == [7] * 4 and list(checkpoints(four)) == [3, 6]
    for world_size in (1, 2, 4):
        folder = tmp_path / f"4 then {world_size}"
        shutil.copytree(four, folder, ignore=shutil.ignore_patterns("console*"))
        resume(shards, folder, hook=float32, world_size=world_size, **IN_FLOAT32).succeeds()
        got = val_losses(read_log(folder))
        assert got.keys() == want.keys()
        assert got == pytest.approx(want, abs=2e-4), world_size
        log = read_log(folder)
        assert re.search(rf"^resume: from step 6, on {world_size} process", log, re.M)
        if world_size == 4:  # the same number: bit for bit
            whole4 = tmp_path / "whole 4"
            Job(
                options(shards, "--save_checkpoint", **IN_FLOAT32),
                whole4,
                world_size=4,
                hook=float32,
            ).succeeds()
            assert_same_run(folder, whole4)


def exit_self(_):
    os._exit(7)


def test_other_hyperparameters_are_listed(shards, stopped):
    before = contents(stopped)
    job = resume(shards, stopped, muon_lr=0.125, head_lr=0.5)
    before_lr = train_gpt.TRACKS["mini"].muon_lr
    job.fails(
        f"muon_lr: {before_lr} in the checkpoint, 0.125 now", "head_lr", "0.5", "--resume_force"
    )
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
    """What was changed by force counts from there on, and the log says that it was."""
    resume(shards, stopped, "--resume_force", hook=other_source, **{name: value}).succeeds()
    (line,) = re.findall(r"^resume: .*", read_log(stopped), re.M)
    assert "resume_force" in line and "no record" in line and "source" in line and name in line
    assert val_losses(read_log(stopped))[4] == val_losses(read_log(whole))[4]
    assert not same(weights(stopped)[key], weights(whole)[key])


def test_resume_force_with_another_model_is_one_line(shards, stopped):
    before = contents(stopped / "checkpoints")
    resume(shards, stopped, "--resume_force", model_dim=64, head_dim=32).fails(
        "model_dim|checkpoint"
    )
    assert contents(stopped / "checkpoints") == before


def test_negative_checkpoint_every_is_refused(shards, tmp_path):
    Job(options(shards) + ["--checkpoint_every", "-3"], tmp_path).fails("checkpoint_every")
    assert contents(tmp_path) == {}


# ---------------------------------------------------------------------------------------- damaged and hostile files
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


DAMAGE = {
    "a bit flipped in the middle": lambda path: flip(path, path.stat().st_size / 2),
    "cut in half": lambda path: truncate(path, 0.5),
    "a few bytes short": lambda path: os.truncate(path, path.stat().st_size - 20),
    "empty": lambda path: truncate(path, 0),
    "hostile, as torch.save makes it": lambda path: torch.save(
        Hostile(path.with_name("victim")), path
    ),
    "hostile, among the rest": lambda path: torch.save(
        torch.load(path, weights_only=True) | dict(step=Hostile(path.with_name("victim"))), path
    ),
    "hostile, in the old format": lambda path: torch.save(
        Hostile(path.with_name("victim")), path, _use_new_zipfile_serialization=False
    ),
    "hostile, a bare pickle": lambda path: path.write_bytes(
        pickle.dumps(Hostile(path.with_name("victim")))
    ),
    "another program's": lambda path: torch.save(dict(model=torch.ones(3)), path),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoint_is_refused(kind, shards, stopped, whole):
    """The one before it is still there, and can be named."""
    newest = checkpoints(stopped)[6]
    DAMAGE[kind](newest)
    assert not list(stopped.rglob("victim"))
    with pytest.raises(
        train_gpt.InputError, match=r"step000006\.pt is damaged .*try the one before"
    ) as error:
        train_gpt.read_checkpoint(str(newest.parent), "")
    assert "\n" not in str(error.value)
    if kind in ("a bit flipped in the middle", "hostile, among the rest"):  # all the way
        before = contents(stopped)
        resume(shards, stopped).fails(r"step000006\.pt is damaged")
        assert contents(stopped) == before
        resume(shards, stopped, where=checkpoints(stopped)[3]).succeeds()
        assert_same_run(stopped, whole)
    assert not list(stopped.rglob("victim")), "the pickle was executed"


def test_damage_anywhere_is_noticed_or_harmless(whole, tmp_path):
    """Bits flipped and ends cut off at random: either the file is refused, or what is loaded is what was saved."""
    original = checkpoints(whole)[STEPS]
    want, size = train_gpt.read_checkpoint(str(original), ""), original.stat().st_size
    rng, refused, path = random.Random(0), 0, tmp_path / "step000012.pt"
    for trial in range(60):
        shutil.copy(original, path)
        flip(path, rng.randrange(size)) if trial % 2 else os.truncate(path, rng.randrange(size))
        try:
            assert same(train_gpt.read_checkpoint(str(path), ""), want)
            assert trial % 2, "a truncated file was taken"
        except train_gpt.InputError:
            refused += 1
    assert refused > 40


# ---------------------------------------------------------------------------------------- full disks, unwritable places
def file_size_limit(limit):
    """No file beyond `limit` bytes: a write then fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_full_disk_for_a_checkpoint(shards, stopped, whole):
    before = contents(stopped / "checkpoints")
    limit = min(map(len, before.values())) - 1000
    resume(shards, stopped, hook=partial(file_size_limit, limit)).fails(
        "can't write", r"step000009\.pt"
    )
    assert contents(stopped / "checkpoints") == before  # the earlier ones, and nothing half-written
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
    """From that step on, `file` (and every other of its size) can't grow."""
    before_step(step, lambda _: file_size_limit(file.stat().st_size))


def test_full_disk_for_the_console(shards, stopped):
    """`> run.out` on the disk that is full; by an interpreter that buffers, and tries once more when it ends."""
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
@pytest.mark.parametrize("place", ["a file", "no place for files"])
def test_unwritable_folder_is_one_line_before_training(option, place, shards, tmp_path):
    (tmp_path / "file").write_text("")
    where = {"a file": "file", "no place for files": "/proc/nosuch"}[place]
    job = Job(options(shards, "--save_checkpoint") + [option, where], tmp_path).fails(
        f"can't write {where}"
    )
    assert job.steps() == 0, "found only after training"


# ---------------------------------------------------------------------------------------- failures under way
def poison_loss(model):
    if os.environ["RANK"] == "1":
        model.lm_head.weight.data[0, 0] = math.nan


def poison_gradient(model):
    if os.environ["RANK"] == "1":
        model.lm_head.weight.register_hook(lambda grad: grad * math.inf)


@pytest.mark.parametrize("what, says", [(poison_loss, "step 8: "), (poison_gradient, "step 8: ")])
def test_non_finite_stops_all_ranks_and_names_the_step(what, says, shards, tmp_path):
    """On the second of two ranks alone: both stop, and the line names the step. A gradient is averaged over the ranks, and
    spoils the weights of all: the validation after that step shows it."""
    job = Job(options(shards), tmp_path, world_size=2, hook=partial(before_step, 7, what))
    job.fails(says, "not finite")
    assert job.processes[1].exitcode not in (0, None)
    assert list(checkpoints(tmp_path)) == [3, 6]
    for path in checkpoints(tmp_path).values():
        state = train_gpt.read_checkpoint(str(path), "")
        assert all(t.isfinite().all() for t in state["model"].values())


def poison_update(model):
    """A loss and a gradient that are finite, and an update that isn't."""
    plain = torch.optim.Adam.step
    torch.optim.Adam.step = lambda self: (
        plain(self),
        self.param_groups[0]["params"][0].data.fill_(math.nan),
    )[0]


def test_non_finite_validation_stops(shards, tmp_path):
    """The last update spoils the weights: only the last validation sees it."""
    job = Job(
        options(shards, "--save_checkpoint"),
        tmp_path,
        hook=partial(before_step, STEPS - 1, poison_update),
    )
    job.fails(rf"step {STEPS}\b", "not finite")
    assert "target" not in job.out and not list(tmp_path.rglob("model.safetensors"))


def test_no_checkpoint_of_spoiled_weights(shards, tmp_path):
    """The last update before a checkpoint spoils them, and no loss has shown it yet: the newest one is still good."""
    job = Job(
        options(shards, val_loss_every=0), tmp_path, hook=partial(before_step, 5, poison_update)
    )
    job.fails("step 6: ", "not finite")
    assert list(checkpoints(tmp_path)) == [3]
    assert train_gpt.read_checkpoint(str(checkpoints(tmp_path)[3]), "")["step"] == 3


def delete(path, _):
    path.unlink()


def cut(path, _):
    os.truncate(path, 2000)


# The second shard's first step is step 8; a file is opened for every batch.
@pytest.mark.parametrize("step, action", [(4, delete), (10, delete), (10, cut)])
def test_shard_spoiled_under_a_running_job(step, action, tmp_path):
    spoiled = write_shards(tmp_path) / "tiny_train_000001.bin"
    job = Job(
        options(tmp_path),
        tmp_path / "run",
        hook=partial(before_step, step, partial(action, spoiled)),
    )
    job.fails(re.escape(str(spoiled)))
    assert job.steps() >= 8
    for path in checkpoints(tmp_path / "run").values():
        assert train_gpt.read_checkpoint(str(path), "")


def test_shard_spoiled_for_one_rank(tmp_path):
    """Rank 1 alone reads tokens outside the vocabulary: it says so."""
    spoiled = write_shards(tmp_path) / "tiny_train_000001.bin"
    job = Job(
        options(tmp_path),
        tmp_path / "run",
        world_size=2,
        hook=partial(before_step, 8, partial(spoil_for_rank_1, spoiled)),
    )
    codes = job.wait()
    assert all(codes), codes
    (line,) = [
        s
        for s in job.err.splitlines()
        if s.startswith("error: ") and "lost another process" not in s
    ]
    assert str(spoiled) in line and "vocabulary" in line
    assert "Traceback" not in job.err


def spoil_for_rank_1(path, model):
    """The file changes when rank 0 has read its share of the next batch, and rank 1 has not."""
    plain, has_read = train_gpt.read_tokens, path.with_name("rank 0 has read")

    def read_tokens(*args):
        if os.environ["RANK"] == "1":
            wait_until(has_read.exists)
            path.write_bytes(
                path.read_bytes()[:1024] + b"\xff\xff" * ((path.stat().st_size - 1024) // 2)
            )
        tokens = plain(*args)
        has_read.touch()
        return tokens

    train_gpt.read_tokens = read_tokens


# ---------------------------------------------------------------------------------------- torchrun
SLOW = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch
torch.compile = lambda f=None, **_: f or (lambda f: f)  # as TORCH_COMPILE_DISABLE has it, without seconds of imports
import train_gpt
if "FLOAT32" in os.environ:
    train_gpt.CPU_FLAGS = set()
step, fsync, steps = train_gpt.train_step, os.fsync, []
def train_step(*args):
    steps.append(step)
    time.sleep(float(os.environ.get("SLOW", "0")) if len(steps) > int(os.environ.get("QUICK_STEPS", "0")) else 0)
    return step(*args)
train_gpt.train_step = train_step
os.fsync = lambda fd: (time.sleep(float(os.environ.get("SLOW_DISK", "0"))), fsync(fd))[1]
sys.exit(train_gpt.main(sys.argv[1:]))
"""


def launcher_main(argv, folder, console, environment):
    """In a forked process: what a shell does for `torchrun argv`."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(console, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.distributed.run.main(argv)


def torchrun(argv, folder, *launcher, **environment):
    """torchrun in a process group of its own, as a shell would have it; the script is the real one, made slow."""
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(SLOW.format(root=str(ROOT)))
    (folder / "console.txt").write_text("")
    process = forkserver().Process(
        target=launcher_main,
        args=(
            [*launcher, "slow.py", *map(str, argv)],
            str(folder),
            str(folder / "console.txt"),
            env(**environment),
        ),
    )
    process.start()
    return process


def workers(launcher):
    """{rank: pid} of torchrun's processes."""
    ranks = {}
    for task in Path("/proc").glob("[0-9]*"):
        try:
            if int((task / "stat").read_text().rsplit(")", 1)[1].split()[1]) == launcher.pid:
                rank = re.search(r"(?:^|\0)RANK=(\d+)", (task / "environ").read_text())
                ranks |= {int(rank[1]): int(task.name)} if rank else {}
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            pass
    return ranks


def shows(folder, text):
    return re.search(text, (folder / "console.txt").read_text(), re.M)


def ends(launcher):
    """The code of a job that ends; nothing of it is left over either way."""
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
KILLED = "forcefully exiting"  # what torchrun says when it kills a process that ignored its signal for 30 s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_under_torchrun_then_resume(number, shards, tmp_path):
    """The launcher is signalled, as by `kill` or by Ctrl-C, and passes it on."""
    job = torchrun(
        options(shards, "--save_checkpoint"), tmp_path, *STANDALONE, QUICK_STEPS="4", SLOW="1"
    )
    wait_until(lambda: shows(tmp_path, "^step:4/"))
    os.killpg(job.pid, number)
    assert ends(job) != 0 and not shows(tmp_path, KILLED)
    last, log = max(checkpoints(tmp_path)), read_log(tmp_path)
    assert 4 <= last == steps_of(log) < STEPS
    assert not list(tmp_path.rglob("*.tmp"))
    resume(shards, tmp_path, world_size=2).succeeds()
    Job(options(shards, "--save_checkpoint"), tmp_path / "whole", world_size=2).succeeds()
    assert_same_run(tmp_path, tmp_path / "whole")


@pytest.mark.parametrize("launcher_too", [True, False])
def test_every_process_signalled_under_torchrun(launcher_too, shards, tmp_path):
    """As batch systems do: the ranks get it from there, and again from torchrun, be it that it was signalled as well
    or that it saw the first rank leave. The checkpoint takes its time, and is still there in the end."""
    job = torchrun(
        options(shards) + ["--checkpoint_every", "0"],
        tmp_path,
        *STANDALONE,
        QUICK_STEPS="4",
        SLOW="1",
        SLOW_DISK="2",
    )
    wait_until(lambda: shows(tmp_path, "^step:4/"))
    for pid in [*workers(job).values()] + [job.pid] * launcher_too:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
    assert ends(job) != 0 and not shows(tmp_path, KILLED)
    log = read_log(tmp_path)
    assert max(checkpoints(tmp_path)) == steps_of(log) >= 4


def test_second_signal_under_torchrun(shards, tmp_path):
    """A step that would take an hour: two Ctrl-C, and nothing of the job is left long before."""
    job = torchrun(options(shards), tmp_path, *STANDALONE, SLOW=str(A_LONG_TIME))
    wait_until(lambda: shows(tmp_path, "^step:0/"))
    pids = workers(job).values()
    assert len(pids) == 2
    for _ in range(2):
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(1.5)
    try:
        wait_until(lambda: not job.is_alive() and not any(map(alive, pids)))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        job.kill()
    assert job.exitcode != 0 and not checkpoints(tmp_path) and not shows(tmp_path, KILLED)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_killed_rank_takes_the_job_down(shards, tmp_path):
    job = torchrun(
        options(shards, "--save_checkpoint"), tmp_path, *STANDALONE, QUICK_STEPS="4", SLOW="1"
    )
    wait_until(lambda: shows(tmp_path, "^step:4/"))
    os.kill(workers(job)[1], signal.SIGKILL)
    assert ends(job) != 0 and not shows(tmp_path, KILLED)
    assert shows(tmp_path, "SIGKILL") and shows(tmp_path, r"rank\s*: 1\b")
    assert list(checkpoints(tmp_path)) == [3]
    resume(shards, tmp_path, world_size=2).succeeds()
    assert list(val_losses(read_log(tmp_path))) == [0, 4, 8, 12]


def test_two_nodes_of_two_processes_train_as_one_process(shards, tmp_path):
    argv = options(shards, **IN_FLOAT32, num_iterations=8)
    one = Job(argv, tmp_path / "one", hook=float32).succeeds()
    port = free_port()
    nodes = [
        torchrun(
            argv,
            tmp_path / f"node{i}",
            "--nnodes=2",
            "--nproc_per_node=2",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint=127.0.0.1:{port}",
            "--local_addr=127.0.0.1",
            FLOAT32="1",
        )
        for i in (0, 1)
    ]
    codes = [ends(node) for node in nodes]
    texts = [(tmp_path / f"node{i}" / "console.txt").read_text() for i in (0, 1)]
    assert codes == [0, 0], texts
    logs = list(tmp_path.glob("node*/logs/*.txt"))
    assert len(logs) == 1, "rank 0 alone writes it"
    log = logs[0].read_text()
    assert '"world_size": 4' in log
    assert val_losses(log) == pytest.approx(val_losses(one.out), abs=2e-4) and list(
        val_losses(log)
    ) == [0, 4, 8]
