"""Tests of whole runs: logs, bad input, numbers of processes, warm-up, the default run of mini."""

import copy
import math
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import train_gpt
from train_gpt import (
    TRACKS,
    GradientBuckets,
    World,
    build_model,
    build_optimizers,
    get_window_blocks,
    warm_up,
)
from util import (
    ROOT,
    SCRIPT,
    free_port,
    random_tokens,
    rank_env,
    read_log,
    run_forked,
    run_script,
    spawn,
    start_processes,
    val_losses,
    write_shard,
)

sys.path.insert(0, str(ROOT / "tools"))
from log_parsing import find_hardware

# A model that takes milliseconds: 8 sequences of 128 tokens a step.
TINY = dict(
    num_layers=4,
    num_heads=2,
    head_dim=32,
    model_dim=64,
    num_value_embeds=1,
    long_window_layers="0,3",
    max_window=256,
    train_seq_len=128,
    batch_tokens=1024,
    val_seq_len=128,
    val_tokens=2048,
    num_iterations=6,
    val_loss_every=2,
    warmup_steps=1,
    sequences_per_pass=2,
)


# Some projections start at zero. Until they have moved, the loss does not depend on the scale of
# the residual stream, so the gradients of the scalars are only rounding errors. Adam's small
# epsilon turns them into full steps. So the scalars are not trained in tests that compare runs with
# different rounding.
NO_SCALARS = dict(scalar_lr=0.0)


def options(folder, **changes):
    values = dict(
        train_files=folder / "tiny_train_*.bin",
        val_files=folder / "tiny_val_*.bin",
        **TINY,
    )
    values |= changes
    return ["--track", "mini", "--device", "cpu", *(f"--{k}={v}" for k, v in values.items())]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two training shards, a validation shard, and two validation shards of 7 and 9 sequences."""
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "tiny_train_000000.bin", random_tokens(4 * 1024 + 300, seed=1))
    write_shard(folder / "tiny_train_000001.bin", random_tokens(3 * 1024 + 1, seed=2))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(16 * 128 + 1, seed=3))
    write_shard(folder / "odd_val_000000.bin", random_tokens(7 * 128 + 50, seed=4))
    write_shard(folder / "odd_val_000001.bin", random_tokens(9 * 128 + 1, seed=5))
    return folder


@pytest.fixture
def in_float32(monkeypatch):
    """Imitates a CPU without native bf16.

    In float32, runs that differ only in rounding agree to the last printed digits.
    """
    monkeypatch.setattr(train_gpt, "CPU_FLAGS", set())


def main_child(rank, argv, folder, world_size, port):
    torch.set_num_threads(1)
    os.environ.update(rank_env(rank, world_size, port))
    os.chdir(folder)
    train_gpt.CPU_FLAGS = set()  # float32
    assert train_gpt.main(argv) == 0


def spawn_main(world_size, folder, argv):
    """Runs main() in `world_size` processes, in float32. This starts faster than torchrun."""
    folder.mkdir(exist_ok=True)
    start_processes(main_child, world_size, argv, str(folder), world_size, free_port())


def run_here(argv, folder, monkeypatch):
    """Runs main() in this process, in `folder`. Returns its log."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    assert train_gpt.main(argv) == 0
    return read_log(folder)


# --------------------------------------------------------------- one training, many ways
def assert_same_losses(got, want, tolerance=2e-4):
    assert got.keys() == want.keys()
    for step in want:
        expected = pytest.approx(want[step], abs=tolerance)
        assert got[step] == expected, f"step {step}: {got} and {want}"


@pytest.fixture(scope="module")
def one_process(shards, tmp_path_factory):
    """The validation losses of one process in float32."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train_gpt, "CPU_FLAGS", set())
        log = run_here(options(shards, **NO_SCALARS), folder, monkeypatch)
    return val_losses(log)


def test_training_learns_from_an_exact_start(one_process):
    assert list(one_process) == [0, 2, 4, 6]
    assert one_process[0] == round(math.log(320), 4)
    assert one_process[6] < one_process[0] - 0.05


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_world_sizes_give_the_same_losses(shards, one_process, world_size, tmp_path):
    spawn_main(world_size, tmp_path, options(shards, **NO_SCALARS))
    assert_same_losses(val_losses(read_log(tmp_path)), one_process)


def test_validation_shards_of_odd_lengths(shards, one_process, tmp_path):
    """
    The validation shards have 7 and 9 sequences.

    Two processes evaluate the 7th and the 8th sequence together. The mean must include all 16.
    """
    changes = dict(num_iterations=2, val_files=shards / "odd_val_*.bin")
    argv = options(shards, **NO_SCALARS, **changes)
    spawn_main(1, tmp_path / "1", argv)
    spawn_main(2, tmp_path / "2", argv)
    assert_same_losses(val_losses(read_log(tmp_path / "2")), val_losses(read_log(tmp_path / "1")))


def test_torchrun(shards, tmp_path):
    """
    Starts the run with torchrun, as for the official record.

    It uses the precision of this machine, so the losses are only roughly those of the other tests.
    """
    done = run_script(options(shards, num_iterations=2), tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = val_losses(done.stdout)
    assert list(losses) == [0, 2]
    assert losses == val_losses(read_log(tmp_path))
    assert losses[0] == pytest.approx(math.log(320), abs=2e-4)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("per_pass", [1, 3, 8])
def test_sequences_per_pass_changes_no_loss(
    shards, one_process, per_pass, tmp_path, monkeypatch, in_float32
):
    argv = options(shards, **NO_SCALARS, sequences_per_pass=per_pass)
    log = run_here(argv, tmp_path, monkeypatch)
    assert_same_losses(val_losses(log), one_process)


def test_same_seed_same_run_other_seed_other_run(
    shards, one_process, tmp_path, monkeypatch, in_float32
):
    again = val_losses(run_here(options(shards, **NO_SCALARS), tmp_path / "a", monkeypatch))
    other = val_losses(run_here(options(shards, **NO_SCALARS, seed=1), tmp_path / "b", monkeypatch))
    assert again == one_process
    assert other[0] == one_process[0]
    assert other[6] != one_process[6]


def test_num_runs_are_the_runs_that_each_seed_gives(shards, tmp_path, monkeypatch, capsys):
    """
    --num_runs 3 does three runs in one process, each with a log of its own.

    Weights, optimizer states and losses are bit for bit those of a single run with that --seed. The
    last line has the number of runs, and the mean and standard deviation of their final losses.
    """
    argv = options(shards, warmup_steps=2) + ["--save_checkpoint"]
    (tmp_path / "all").mkdir()
    monkeypatch.chdir(tmp_path / "all")
    assert train_gpt.main([*argv, "--seed", "5", "--num_runs", "3"]) == 0
    summary = capsys.readouterr().out.splitlines()[-1]
    losses = []
    for log in (tmp_path / "all" / "logs").iterdir():
        run = log.read_text()
        seed = int(re.search(r'"seed": (\d+)', run)[1])
        alone = run_here([*argv, "--seed", str(seed)], tmp_path / str(seed), monkeypatch)
        assert val_losses(run) == val_losses(alone)
        assert len(val_losses(run)) > 1
        (path,) = (tmp_path / "all" / "checkpoints" / log.stem).glob("step*.pt")
        (path_alone,) = (tmp_path / str(seed) / "checkpoints").glob("*/step*.pt")
        ours = torch.load(path, weights_only=True)
        theirs = torch.load(path_alone, weights_only=True)
        for part in ("model", "optimizers"):
            assert_identical(ours[part], theirs[part])
        losses.append(val_losses(run)[6])
    assert len(set(losses)) == 3
    numbers = [float(x) for x in re.findall(r"\d+\.\d+(?:e-\d+)?|\d+", summary)]
    expected = [3, statistics.mean(losses), statistics.stdev(losses)]
    assert numbers == pytest.approx(expected, rel=0.01, abs=1e-4), summary


def test_shorter_sequences_keep_the_tokens_of_a_step(tmp_path, monkeypatch, shards, capsys):
    seen = []
    plain_step = train_gpt.train_step

    def spy(model, optimizers, buckets, inputs, *args):
        seen.append((inputs.tolist(), args[2].num_sequences))
        return plain_step(model, optimizers, buckets, inputs, *args)

    monkeypatch.setattr(train_gpt, "train_step", spy)
    full = options(shards, train_seq_len=256, batch_tokens=2048, num_iterations=2, warmup_steps=0)
    run_here(full, tmp_path / "full", monkeypatch)
    monkeypatch.setitem(TRACKS, "mini", replace(TRACKS["mini"], train_seq_len=256))
    log = run_here(full + ["--train_seq_len", "128"], tmp_path / "half", monkeypatch)
    assert [tokens for tokens, _ in seen[:2]] == [tokens for tokens, _ in seen[2:]]
    assert [n for _, n in seen] == [8, 8, 16, 16]
    run = log.split("=" * 100)[2]
    lines = [line for line in run.splitlines() if line.startswith("train_seq_len is 128")]
    assert "2048 tokens per step" in lines[0]
    assert lines[0] in capsys.readouterr().out


# --------------------------------------------------------------- machines
def test_log_header_without_nvidia_smi(monkeypatch):
    """Without nvidia-smi, the header still names the GPUs, in a form that verify.py can read."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("PATH", "")
    header = train_gpt.log_header(TRACKS["fineweb"], World(0, 8, torch.device("cuda")))
    separator = "=" * 100
    machine = header.rpartition(f"{separator}\nRunning")[2]
    assert find_hardware(machine) == "8x NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "card, mib, seq_len",
    [
        ((9, 0), 80 * 1024, 49152),  # with an FP8 head
        ((8, 9), 23_500, 24576),
        ((8, 9), 16_376, 12288),
        ((8, 9), 12_282, 12288),
        ((8, 9), 8_192, 12288),
        ((8, 0), 40_000, 49152),  # with a bf16 head, which takes less memory
        ((8, 6), 27_000, 49152),
        ((8, 6), 23_500, 24576),
        ((8, 6), 15_800, 24576),
        ((8, 6), 11_700, 12288),
        ((8, 6), 8_192, 12288),
    ],
)
def test_the_default_fits_the_free_memory(monkeypatch, card, mib, seq_len):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "a card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (mib * 2**20, 10**12))

    def fit(*argv):
        args, hp = train_gpt.parse_arguments(list(argv))
        return train_gpt.fit_to_memory(args, hp, World(0, 1, torch.device("cpu")), {})

    assert train_gpt.parse_arguments([])[1] == TRACKS["fineweb"]
    assert fit() == replace(TRACKS["fineweb"], train_seq_len=seq_len)
    assert fit("--train_seq_len", "1024").train_seq_len == 1024  # an explicit option stays
    assert fit("--train_seq_len=49152") == TRACKS["fineweb"]
    assert fit("--track", "mini") == TRACKS["mini"]
    assert fit("--device", "cpu") == TRACKS["mini"]


def test_out_of_memory_is_one_line(monkeypatch, capsys):
    message = "CUDA out of memory. Tried to allocate 24.56 GiB.\nGPU 0 has ..."

    def full(args, hp):
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(train_gpt, "train", full)
    assert train_gpt.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: rank 0: out of GPU memory; halve --train_seq_len")
    assert error.count("\n") == 1


# --------------------------------------------------------------- warm-up
def state_of(model, optimizers):
    """A copy of all that training changes: parameters, gradients, optimizers, random numbers."""
    state = dict(
        weights=dict(model.named_parameters()),
        buffers=dict(model.named_buffers()),
        grads={n: p.grad for n, p in model.named_parameters()},
        optimizers=[o.state_dict() for o in optimizers],
        rng=torch.get_rng_state(),
    )
    return copy.deepcopy(state)


def assert_identical(a, b, where="state"):
    """Compares nested containers. Tensors must agree bit for bit."""
    assert type(a) is type(b), where
    if torch.is_tensor(a):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for k in a:
            assert_identical(a[k], b[k], f"{where}.{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_identical(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def check_warm_up(rank, world_size):
    world = World(rank, world_size, torch.device("cpu"))
    hp = replace(TRACKS["mini"], **TINY | dict(long_window_layers=(0, 3), warmup_steps=3))
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 257, (3, 1024 // world_size + 1), generator=generator)
    after = []
    for warm in (True, False):
        model = build_model(hp, world)
        optimizers = build_optimizers(model, hp)
        buckets = GradientBuckets(model.parameters())
        before = state_of(model, optimizers)
        if warm:
            warm_up(model, optimizers, buckets, hp, world)
            assert_identical(before, state_of(model, optimizers))
        for step in range(3):
            train_gpt.set_schedules(optimizers, step, hp)
            train_gpt.train_step(
                model,
                optimizers,
                buckets,
                tokens[step, :-1].int(),
                tokens[step, 1:],
                get_window_blocks(step, hp),
                hp,
                world,
            )
        after.append(state_of(model, optimizers))
    head_before = before["weights"]["lm_head.weight"]
    head_after = after[0]["weights"]["lm_head.weight"]
    assert not torch.equal(head_before, head_after)
    with_warm_up, without = after
    assert_identical(with_warm_up, without)


def test_warm_up_leaves_no_trace():
    check_warm_up(0, 1)


def test_warm_up_leaves_no_trace_on_two_processes(tmp_path):
    spawn(check_warm_up, 2, tmp_path)


def test_warm_up_trains_and_validates_whatever_the_lengths(monkeypatch):
    """
    Here a training step has as many tokens as a validation sequence.

    The warm-up must still do both, because each has a compiled graph of its own.
    """
    world = World(0, 1, torch.device("cpu"))
    changes = dict(long_window_layers=(0, 3), warmup_steps=3, val_seq_len=1024)
    hp = replace(TRACKS["mini"], **TINY | changes)
    assert hp.val_seq_len == hp.batch_tokens // world.size
    calls = []

    def recorded(name):
        plain = getattr(train_gpt, name)

        def function(*args):
            calls.append(name)
            return plain(*args)

        return function

    for name in ("train_step", "evaluate"):
        monkeypatch.setattr(train_gpt, name, recorded(name))
    model = build_model(hp, world)
    warm_up(model, build_optimizers(model, hp), GradientBuckets(model.parameters()), hp, world)
    assert calls == ["train_step"] * 3 + ["evaluate"]


def test_only_training_is_timed(shards, tmp_path, monkeypatch):
    """
    The test puts the clock forward.

    The warm-up and each validation seem to take 10,000 s, which must not count. Each step seems to
    take 1,000 s. The real times are short compared with that, even on a busy machine.
    """
    clock = time.perf_counter
    ahead = [0]

    def perf_counter():
        return clock() + sum(ahead)

    def takes(seconds, plain):
        def function(*args, **kwargs):
            ahead.append(seconds)
            return plain(*args, **kwargs)

        return function

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    monkeypatch.setattr(train_gpt, "warm_up", takes(10_000, train_gpt.warm_up))
    monkeypatch.setattr(train_gpt, "evaluate", takes(10_000, train_gpt.evaluate))
    monkeypatch.setattr(train_gpt, "train_step", takes(1_000, lambda *args: torch.ones(())))
    log = run_here(options(shards, num_iterations=2, val_loss_every=1), tmp_path, monkeypatch)
    assert ahead.count(1_000) == 1 + 2  # one step in the warm-up, two in the run
    assert ahead.count(10_000) == 1 + 1 + 3  # the warm-up, its validation, three in the run
    times = [int(t) for t in re.findall(r"^step:2/2 .*?train_time:(\d+)ms", log, re.M)]
    assert len(times) == 2, times
    assert all(2_000_000 <= t < 3_000_000 for t in times), times


# --------------------------------------------------------------- the log
NUMBER = r"\d+\.\d{4}"
VALIDATION_LINE = re.compile(
    rf"step:(\d+)/6 val_loss:{NUMBER} train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
)
STEP_LINE = re.compile(r"step:(\d+)/6 train_time:(\d+)ms step_avg:(\d+\.\d\d)ms")


def check_header(source, machine):
    assert source.rstrip("\n") == SCRIPT.read_text().rstrip("\n")
    for words in (sys.version.split()[0], torch.__version__, "CUDA", "core"):
        assert words in machine
    assert os.uname().nodename not in machine.split()


def check_step_lines(lines):
    """Checks the lines of a run of six steps, with a validation after every second one."""
    kinds = ["val" if "val_loss" in line else "train" for line in lines]
    steps = [int(line[5]) for line in lines]
    assert kinds == "val train train val train train val train train val".split()
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    last_time = 0
    for line in lines:
        match = VALIDATION_LINE.fullmatch(line) or STEP_LINE.fullmatch(line)
        assert match, line
        step = int(match[1])
        ms = int(match[2])
        assert ms >= last_time
        assert float(match[3]) == pytest.approx(ms / max(step, 1), abs=0.51)
        last_time = ms


def check_verdict(verdict, losses):
    """Checks the line about the target of 5.9."""
    met = next(step for step in losses if losses[step] <= 5.9)
    assert "5.9" in verdict
    assert re.search(rf"\bmet\b.*\bstep {met}\b", verdict)
    assert "not met" not in verdict
    assert re.search(r"\d+ tokens/s", verdict)
    bits = re.search(r"(\d+\.\d+) bits per byte", verdict)
    assert float(bits[1]) == pytest.approx(losses[6] / math.log(2), abs=2e-4)


def test_plain_run_and_its_log(shards, tmp_path):
    """`python train_gpt.py` without a launcher, in the precision of this machine."""
    done = run_script(options(shards, target_val_loss=5.9), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (path,) = (tmp_path / "logs").iterdir()
    uuid4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert re.fullmatch(rf"{uuid4}\.txt", path.name)
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]  # nothing else is left

    log = path.read_text()
    separator = "=" * 100
    source, machine, run = re.split(f"^{separator}$", log, flags=re.M)
    check_header(source, machine)
    lines = run.rstrip("\n").splitlines()
    steps = [line for line in lines if line.startswith("step:")]
    check_step_lines(steps)
    after = lines[lines.index(steps[-1]) + 1 :]
    memory_line = re.compile(r"peak memory allocated: \d+ MiB reserved: \d+ MiB")
    (memory,) = [line for line in after if memory_line.fullmatch(line)]
    (verdict,) = [line for line in after if line.startswith("target")]
    check_verdict(verdict, val_losses(log))

    # The console shows the same lines. In a pipe, there is no carriage return.
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    shown = done.stdout.splitlines()
    assert [line for line in shown if line.startswith("step:")] == steps
    assert verdict in done.stdout
    assert memory in done.stdout


def test_target_not_met_and_a_word_level_track(shards, tmp_path, monkeypatch, capsys):
    argv = options(shards, target_val_loss=0.5, val_loss_every=0, num_iterations=2, vocab_size=258)
    run_here(argv, tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert re.findall(r"^step:(\d+)/2 val_loss", out, re.M) == ["2"]  # 0: only at the end
    (verdict,) = [s for s in out.splitlines() if s.startswith("target")]
    assert "not met" in verdict
    assert "bits per byte" not in verdict


def test_a_step_replaces_the_one_before_on_a_terminal(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    log = run_here(options(shards), tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert re.search(r"^step:6/6 train_time", log, re.M)
    assert "\r" not in log
    screen = []  # the lines that a terminal shows in the end
    for line in out.split("\n"):
        screen.append("")
        for text in line.split("\r"):
            screen[-1] = text + screen[-1][len(text) :]
    assert not any(re.match(r"step:\d+/6 train_time", line) for line in screen)
    assert list(val_losses("\n".join(screen))) == [0, 2, 4, 6]
    shown = [line.rstrip() for line in screen if "val_loss:" in line]
    assert shown == re.findall(r"^step.*val_loss:.*", log, re.M)


def test_the_log_can_be_run_again(shards, tmp_path, monkeypatch):
    """The text above the first line of 100 = is the script itself."""
    log = run_here(options(shards, num_iterations=1, val_loss_every=0), tmp_path, monkeypatch)
    script = tmp_path / "again.py"
    script.write_text(log.split("\n" + "=" * 100 + "\n")[0])
    done = run_forked(["--help"], tmp_path, script=script)
    assert done.returncode == 0
    assert "--num_iterations" in done.stdout


# --------------------------------------------------------------- the command line
def test_help_lists_every_field_with_type_and_default(capsys):
    with pytest.raises(SystemExit) as exit:
        train_gpt.main(["--track", "fineweb", "--help"])
    assert exit.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, field in train_gpt.Hyperparameters.__dataclass_fields__.items():
        if name == "track":  # --track is not a hyperparameter: it chooses their defaults
            continue
        default = getattr(TRACKS["fineweb"], name)
        shown = str(default)
        if isinstance(default, tuple):
            shown = ",".join(map(str, default))
        hyperparameters = out.split("hyperparameters", 1)[1]
        entry = hyperparameters.split(f"--{name} ", 1)[1].split(" --", 1)[0]
        assert shown in entry, f"{name}: {entry}"
        assert (field.type.__name__ in entry) or isinstance(default, tuple), f"{name}: {entry}"
        help = " ".join(field.metadata["help"].split())  # a field without help fails here
        assert help, name
        assert help in entry, f"{name}: {entry}"
    for flag in ("--track", "--device", "--log_dir"):
        assert flag in out


def test_a_new_field_just_works(tmp_path):
    """Somebody adds the field weight_decay to a copy of the script, without a help text."""
    source = SCRIPT.read_text()
    field = '    seed: int = setting(0, "seed of the initial weights")\n'
    assert field in source
    script = tmp_path / "changed.py"
    script.write_text(source.replace(field, field + "    weight_decay: float = 0.0\n"))
    program = (
        "import changed, sys\n"
        "hp = changed.parse_arguments(sys.argv[1:])[1]\n"
        "changed.check_hyperparameters(hp, 1)\n"
        "print(hp.weight_decay)\n"
    )
    for argv, value in (([], "0.0"), (["--weight_decay", "0.1"], "0.1")):
        done = subprocess.run(
            [sys.executable, "-c", program, "--track", "mini", *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [value], done.stderr


def test_every_field_is_an_option():
    argv = [
        "--track",
        "fineweb",
        "--num_iterations",
        "7",
        "--muon_lr=0.125",
        "--fp8",
        "false",
        "--save_checkpoint",
        "--attn_free_layers",
        "1,2",
        "--train_files",
        "x_*.bin",
    ]
    _, hp = train_gpt.parse_arguments(argv)
    assert hp == replace(
        TRACKS["fineweb"],
        num_iterations=7,
        muon_lr=0.125,
        fp8=False,
        save_checkpoint=True,
        attn_free_layers=(1, 2),
        train_files="x_*.bin",
    )
    # what --help shows for no layers
    _, hp = train_gpt.parse_arguments(["--track", "fineweb", "--attn_free_layers", "none"])
    assert hp == replace(TRACKS["fineweb"], attn_free_layers=())
    assert train_gpt.parse_arguments(["--track", "mini"])[1] == TRACKS["mini"]
    if not torch.cuda.is_available():
        assert train_gpt.parse_arguments([])[1] == TRACKS["mini"]


# --------------------------------------------------------------- bad input
# {name: (the changed options, a part of the error line)}
BAD_OPTIONS = {
    "no training shards": (dict(train_files="nothing_*.bin"), "nothing_*.bin"),
    "no validation shards": (dict(val_files="nothing_*.bin"), "nothing_*.bin"),
    "the command that makes shards": (dict(train_files="nothing_*.bin"), "data/shakespeare.py"),
    "too few training tokens": (dict(num_iterations=8), "7"),
    "too few validation tokens": (dict(val_tokens=17 * 128), "val_tokens"),
    "token outside the vocabulary": (dict(vocab_size=256, eot_token=0), "256"),
    "sequence length": (dict(train_seq_len=100), "128"),
    "validation sequence length": (dict(val_seq_len=64), "128"),
    "sequences do not fill a step": (dict(batch_tokens=1000), "batch_tokens"),
    "validation sequences do not fill": (dict(val_tokens=1000), "val_tokens"),
    "no steps": (dict(num_iterations=0), "num_iterations"),
    "negative steps": (dict(num_iterations=-3), "num_iterations"),
    "no layers": (dict(num_layers=0), "num_layers"),
    "layer that is not there": (dict(long_window_layers="0,4"), "long_window_layers"),
    "attention-free layer that is not there": (dict(attn_free_layers="9"), "attn_free_layers"),
    "value embedding that no layer uses": (dict(attn_free_layers="0,3"), "attn_free_layers"),
    "more value embeddings than layers": (dict(num_value_embeds=3), "num_value_embeds"),
    "head size": (dict(head_dim=30), "head_dim"),
    "end-of-text outside the vocabulary": (dict(eot_token=257), "eot_token"),
    "no window": (dict(max_window=0), "max_window"),
    "cooldown beyond the run": (dict(cooldown_frac=1.5), "cooldown_frac"),
    "a seed of more than 64 bits": (dict(seed=2**64), "seed"),
    "no pass": (dict(sequences_per_pass=0), "sequences_per_pass"),
    "learning rate not a number": (dict(muon_lr="nan"), "muon_lr"),
    "momentum of one": (dict(muon_momentum=1.0), "muon_momentum"),
    "a word for a number": (dict(num_iterations="many"), "num_iterations"),
    "a word for a flag": (dict(fp8="perhaps"), "fp8"),
    "a word for layers": (dict(attn_free_layers="a,b"), "attn_free_layers"),
    "unknown option": (dict(num_iteration=3), "num_iteration"),
}


def refused(argv, capsys):
    """Runs main() with bad input. Returns its exit code and the lines on stderr."""
    try:
        code = train_gpt.main(argv)
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert "step:" not in out, "the script began to train"
    return code, err.splitlines()


def assert_one_line(code, lines, says, folder):
    assert code == 2
    assert len(lines) == 1, lines
    assert "error: " in lines[0], lines[0]
    assert says in lines[0], lines[0]
    assert not (folder / "logs").exists(), "the script wrote a log, though it did not run"


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_option_is_one_line(name, shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changes, says = BAD_OPTIONS[name]
    assert_one_line(*refused(options(shards, **changes), capsys), says, tmp_path)


@pytest.mark.parametrize(
    "argv,says",
    [
        (["--track", "nosuch"], "fineweb"),
        (["--device", "tpu"], "cuda"),
        (["--track"], "--track"),
        (["surplus"], "surplus"),
    ],
)
def test_bad_choice_is_one_line(argv, says, shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_one_line(*refused(options(shards) + argv, capsys), says, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_absent_is_one_line(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert_one_line(*refused(options(shards) + ["--device", "cuda"], capsys), "cuda", tmp_path)


@pytest.mark.parametrize("kind", ["magic", "version", "size", "empty"])
def test_bad_shard_is_one_line(kind, shards, tmp_path, monkeypatch, capsys):
    tokens = random_tokens(7 * 1024 + 1, seed=0)
    path = tmp_path / "tiny_train_000000.bin"
    headers = {
        "magic": dict(magic=1),
        "version": dict(version=2),
        "size": dict(count=10**6),
        "empty": {},
    }
    write_shard(path, tokens, **headers[kind])
    if kind == "empty":
        path.write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert_one_line(*refused(options(shards, train_files=path), capsys), path.name, tmp_path)


def test_unwritable_log_folder_is_one_line(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    code, lines = refused(options(shards) + ["--log_dir", "file"], capsys)
    assert_one_line(code, lines, "can't write file (File exists)", tmp_path)


def test_world_size_that_does_not_divide_says_which_do(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, lines = refused(options(shards), capsys)
    assert_one_line(code, lines, "3 processes", tmp_path)
    assert "1, 2, 4, 8" in lines[0]


def test_non_finite_loss_stops_the_run(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = options(shards, head_lr=3e38, val_loss_every=0)
    assert train_gpt.main(argv) == 2
    out, err = capsys.readouterr()
    line = r"error: step [12]: the loss or the weights are not finite. If you raised a learning.*\n"
    assert re.fullmatch(line, err), err
    assert "step:6/6" not in out
    assert "target" not in out
    assert not train_gpt.in_training  # the next Ctrl-C ends this process


def test_a_bad_input_as_a_subprocess(tmp_path):
    """Checks the real exit code, and that the script prints nothing but the line."""
    done = run_script(["--track", "mini", "--train_files", "nothing_*.bin"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: .*nothing_\*\.bin.*data/shakespeare\.py.*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------- checkpoint
def test_checkpoint_holds_the_trained_model(shards, tmp_path, monkeypatch):
    run_here(options(shards, num_iterations=2) + ["--save_checkpoint"], tmp_path, monkeypatch)
    (path,) = (tmp_path / "checkpoints").glob("*/step*.pt")
    saved = torch.load(path, weights_only=True)
    hp = train_gpt.parse_arguments(options(shards))[1]
    model = train_gpt.GPT(hp, dtype=saved["model"]["embed.weight"].dtype)
    model.load_state_dict(saved["model"])
    assert model.lm_head.weight.any()


# --------------------------------------------------------------- the default run
@pytest.fixture(scope="module")
def shakespeare():
    folder = ROOT / "data" / "shakespeare"
    if not (folder / "shakespeare_train_000000.bin").exists():
        subprocess.run([sys.executable, str(ROOT / "data" / "shakespeare.py")], check=True)
    return folder


def test_mini_meets_its_target(shakespeare, tmp_path):
    """
    Runs mini as a new user does: compiled, with its default settings.

    The losses of different seeds differ by about 0.003. The bound leaves room for the rounding of
    other CPUs.
    """
    hp = TRACKS["mini"]
    done = run_script(["--track", "mini", "--device", "cpu"], tmp_path, TORCH_COMPILE_DISABLE="0")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = val_losses(done.stdout)
    assert losses[0] == pytest.approx(math.log(320), abs=2e-4)
    assert losses[hp.num_iterations] < hp.target_val_loss + 0.005, losses
    assert len(losses) == 11  # a record needs at least eight after step 0


def test_the_command_for_two_machines_passes_the_checks():
    """tools/README.md had one whose validation sequences 16 processes couldn't share."""
    page = (ROOT / "tools" / "README.md").read_text(encoding="utf-8")
    command = re.search(r"^torchrun --nnodes=2 --nproc_per_node=8 .*train_gpt.py (.*)$", page, re.M)
    _, hp = train_gpt.parse_arguments(["--track", "fineweb", "--device", "cpu", *command[1].split()])
    train_gpt.check_hyperparameters(hp, 16)
