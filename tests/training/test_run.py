"""The script as its user runs it: logs, bad input, world sizes, warm-up, a short real run."""

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


# Until the zero-initialized projections have moved, the loss does not depend on the scale of the residual stream: the
# gradients of the scalars are zero but for rounding, and Adam's small epsilon makes full steps of that noise. Runs that
# differ in rounding alone are therefore compared with the scalars at rest.
NO_SCALARS = dict(scalar_lr=0.0)


def options(folder, **changes):
    values = (
        dict(train_files=folder / "tiny_train_*.bin", val_files=folder / "tiny_val_*.bin", **TINY)
        | changes
    )
    return ["--track", "mini", "--device", "cpu", *(f"--{k}={v}" for k, v in values.items())]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two training shards, a validation shard, and two more that hold an odd number of sequences each: 7 and 9."""
    folder = tmp_path_factory.mktemp("shards")
    write_shard(folder / "tiny_train_000000.bin", random_tokens(4 * 1024 + 300, seed=1))
    write_shard(folder / "tiny_train_000001.bin", random_tokens(3 * 1024 + 1, seed=2))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(16 * 128 + 1, seed=3))
    write_shard(folder / "odd_val_000000.bin", random_tokens(7 * 128 + 50, seed=4))
    write_shard(folder / "odd_val_000001.bin", random_tokens(9 * 128 + 1, seed=5))
    return folder


@pytest.fixture
def in_float32(monkeypatch):
    """A CPU without native bf16: runs that differ in rounding alone then agree to the last printed digits."""
    monkeypatch.setattr(train_gpt, "CPU_FLAGS", set())


def main_child(rank, argv, folder, world_size, port):
    torch.set_num_threads(1)
    os.environ.update(rank_env(rank, world_size, port))
    os.chdir(folder)
    train_gpt.CPU_FLAGS = set()  # float32
    assert train_gpt.main(argv) == 0


def spawn_main(world_size, folder, argv):
    """What torchrun does, without its seconds of imports: main() in `world_size` processes, in float32."""
    folder.mkdir(exist_ok=True)
    start_processes(main_child, world_size, argv, str(folder), world_size, free_port())


def run_here(argv, folder, monkeypatch):
    """Run main() in this process, in `folder`; returns its log."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    assert train_gpt.main(argv) == 0
    return read_log(folder)


# ---------------------------------------------------------------------------------------- one training, many ways
def assert_same_losses(got, want, tolerance=2e-4):
    assert got.keys() == want.keys()
    for step in want:
        assert got[step] == pytest.approx(want[step], abs=tolerance), (
            f"step {step}: {got} and {want}"
        )


@pytest.fixture(scope="module")
def one_process(shards, tmp_path_factory):
    """Validation losses of one process in float32."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train_gpt, "CPU_FLAGS", set())
        return val_losses(
            run_here(options(shards, **NO_SCALARS), tmp_path_factory.mktemp("one"), monkeypatch)
        )


def test_training_learns_from_an_exact_start(one_process):
    assert list(one_process) == [0, 2, 4, 6]
    assert one_process[0] == round(math.log(384), 4)
    assert one_process[6] < one_process[0] - 0.05


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_world_sizes_give_the_same_losses(shards, one_process, world_size, tmp_path):
    spawn_main(world_size, tmp_path, options(shards, **NO_SCALARS))
    assert_same_losses(val_losses(read_log(tmp_path)), one_process)


def test_validation_shards_of_odd_lengths(shards, one_process, tmp_path):
    """7 sequences, then 9: on two processes the 7th and the 8th are in one step, and the mean is still of all 16."""
    argv = options(
        shards, **NO_SCALARS | dict(num_iterations=2, val_files=shards / "odd_val_*.bin")
    )
    spawn_main(1, tmp_path / "1", argv)
    spawn_main(2, tmp_path / "2", argv)
    assert_same_losses(val_losses(read_log(tmp_path / "2")), val_losses(read_log(tmp_path / "1")))


def test_torchrun(shards, tmp_path):
    """The launcher of the official run; in this machine's own precision, so only roughly the same losses."""
    done = run_script(options(shards, num_iterations=2), tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = val_losses(done.stdout)
    assert list(losses) == [0, 2] and losses == val_losses(read_log(tmp_path))
    assert losses[0] == pytest.approx(math.log(384), abs=2e-4) and losses[2] < losses[0]


@pytest.mark.parametrize("per_pass", [1, 3, 8])
def test_sequences_per_pass_changes_no_loss(
    shards, one_process, per_pass, tmp_path, monkeypatch, in_float32
):
    log = run_here(
        options(shards, **NO_SCALARS, sequences_per_pass=per_pass), tmp_path, monkeypatch
    )
    assert_same_losses(val_losses(log), one_process)


def test_same_seed_same_run_other_seed_other_run(
    shards, one_process, tmp_path, monkeypatch, in_float32
):
    again = val_losses(run_here(options(shards, **NO_SCALARS), tmp_path / "a", monkeypatch))
    other = val_losses(run_here(options(shards, **NO_SCALARS, seed=1), tmp_path / "b", monkeypatch))
    assert again == one_process
    assert other[0] == one_process[0] and other[6] != one_process[6]


def test_num_runs_are_the_runs_that_each_seed_gives(shards, tmp_path, monkeypatch, capsys):
    """Three counted runs in one process: each bitwise (weights, state, losses) what --seed gives alone, each with a
    log of its own; then n, mean and standard deviation of the logged losses."""
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
        assert val_losses(run) == val_losses(alone) and len(val_losses(run)) > 1
        (ours,) = (tmp_path / "all" / "checkpoints" / log.stem).glob("step*.pt")
        (theirs,) = (tmp_path / str(seed) / "checkpoints").glob("*/step*.pt")
        ours, theirs = (torch.load(path, weights_only=True) for path in (ours, theirs))
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
    line = next(
        line
        for line in log.split("=" * 100)[2].splitlines()
        if line.startswith("train_seq_len 128")
    )
    assert "same tokens per step" in line and line in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- machines
def test_log_header_without_nvidia_smi(monkeypatch):
    """It names the GPUs all the same, in words that verify.py reads."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("PATH", "")
    header = train_gpt.log_header(TRACKS["fineweb"], World(0, 8, torch.device("cuda")))
    assert (
        find_hardware(header.rpartition(f"{'=' * 100}\nRunning")[2]) == "8x NVIDIA H100 80GB HBM3"
    )


@pytest.mark.parametrize(
    "mib, seq_len",
    [(80 * 1024, 49152), (23_500, 24576), (16_376, 12288), (12_282, 12288), (8_192, 12288)],
)
def test_the_default_fits_the_free_memory(monkeypatch, mib, seq_len):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (mib * 2**20, 10**12))

    def fit(*argv):
        args, hp = train_gpt.parse_arguments(list(argv))
        return train_gpt.fit_to_memory(args, hp, World(0, 1, torch.device("cpu")), {})

    assert train_gpt.parse_arguments([])[1] == TRACKS["fineweb"]
    assert fit() == replace(TRACKS["fineweb"], train_seq_len=seq_len)
    assert fit("--train_seq_len", "1024").train_seq_len == 1024  # whoever asks gets it
    assert fit("--train_seq_len=49152") == TRACKS["fineweb"]
    assert fit("--track", "mini") == TRACKS["mini"]
    assert fit("--device", "cpu") == TRACKS["mini"]


def test_out_of_memory_is_one_line(monkeypatch, capsys):
    def full(args, hp):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 24.56 GiB.\nGPU 0 has ..."
        )

    monkeypatch.setattr(train_gpt, "train", full)
    assert train_gpt.main([]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: rank 0: the GPU's memory is full; halve --train_seq_len")
        and error.count("\n") == 1
    )


# ---------------------------------------------------------------------------------------- warm-up
def state_of(model, optimizers):
    """Everything that training changes: parameters, gradients, both optimizers' state and settings."""
    return copy.deepcopy(
        dict(
            weights=dict(model.named_parameters()),
            buffers=dict(model.named_buffers()),
            grads={n: p.grad for n, p in model.named_parameters()},
            optimizers=[o.state_dict() for o in optimizers],
            rng=torch.get_rng_state(),
        )
    )


def assert_identical(a, b, where="state"):
    assert type(a) is type(b), where
    if torch.is_tensor(a):
        assert a.dtype == b.dtype and torch.equal(a, b), where
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
    tokens = torch.randint(
        0, 257, (3, 1024 // world_size + 1), generator=torch.Generator().manual_seed(rank)
    )
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
    assert not torch.equal(
        before["weights"]["lm_head.weight"], after[0]["weights"]["lm_head.weight"]
    )
    assert_identical(
        *after
    )  # nor does it hide anywhere else: training goes on as if it had not been


def test_warm_up_leaves_no_trace():
    check_warm_up(0, 1)


def test_warm_up_leaves_no_trace_on_two_processes(tmp_path):
    spawn(check_warm_up, 2, tmp_path)


def test_warm_up_trains_and_validates_whatever_the_lengths(monkeypatch):
    """Also where a step has as many tokens as a validation sequence: both graphs are needed once the clock runs."""
    world, calls = World(0, 1, torch.device("cpu")), []
    hp = replace(
        TRACKS["mini"], **TINY | dict(long_window_layers=(0, 3), warmup_steps=3, val_seq_len=1024)
    )
    assert hp.val_seq_len == hp.batch_tokens // world.size
    for name in ("train_step", "evaluate"):
        plain = getattr(train_gpt, name)
        monkeypatch.setattr(
            train_gpt, name, lambda *args, n=name, f=plain: (calls.append(n), f(*args))[1]
        )
    model = build_model(hp, world)
    warm_up(model, build_optimizers(model, hp), GradientBuckets(model.parameters()), hp, world)
    assert calls == ["train_step"] * 3 + ["evaluate"]


def test_only_training_is_timed(shards, tmp_path, monkeypatch):
    """By a clock that is put forward: 10,000 s for warm-up and each validation, which must not be seen, and 1,000 s
    for each step. What they really take, be the machine ever so busy, is nothing against that."""
    clock, ahead = time.perf_counter, [0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(ahead))

    def takes(seconds, function):
        return lambda *args, **kwargs: (ahead.append(seconds), function(*args, **kwargs))[1]

    monkeypatch.setattr(train_gpt, "warm_up", takes(10_000, train_gpt.warm_up))
    monkeypatch.setattr(train_gpt, "evaluate", takes(10_000, train_gpt.evaluate))
    monkeypatch.setattr(train_gpt, "train_step", takes(1_000, lambda *args: torch.ones(())))
    log = run_here(options(shards, num_iterations=2, val_loss_every=1), tmp_path, monkeypatch)
    assert (
        ahead.count(1_000) == 1 + 2 and ahead.count(10_000) == 1 + 1 + 3
    )  # the first of each in the warm-up
    times = [int(t) for t in re.findall(r"^step:2/2 .*?train_time:(\d+)ms", log, re.M)]
    assert len(times) == 2 and all(2_000_000 <= t < 3_000_000 for t in times), times


# ---------------------------------------------------------------------------------------- the log
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
    """Of a run of six steps with a validation after every second one. Times never decrease."""
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
    """The line about the target of 5.9."""
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
    assert "not met" in verdict and "bits per byte" not in verdict


def test_a_step_replaces_the_one_before_on_a_terminal(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    log = run_here(options(shards), tmp_path, monkeypatch)
    out = capsys.readouterr().out
    assert re.search(r"^step:6/6 train_time", log, re.M) and "\r" not in log
    screen = []  # what a terminal shows in the end
    for line in out.split("\n"):
        screen.append("")
        for text in line.split("\r"):
            screen[-1] = text + screen[-1][len(text) :]
    assert not any(re.match(r"step:\d+/6 train_time", line) for line in screen)
    assert list(val_losses("\n".join(screen))) == [0, 2, 4, 6]
    assert [line.rstrip() for line in screen if "val_loss:" in line] == re.findall(
        r"^step.*val_loss:.*", log, re.M
    )


def test_the_log_can_be_run_again(shards, tmp_path, monkeypatch):
    """What stands above the first line of 100 = is a program: this one."""
    log = run_here(options(shards, num_iterations=1, val_loss_every=0), tmp_path, monkeypatch)
    script = tmp_path / "again.py"
    script.write_text(log.split("\n" + "=" * 100 + "\n")[0])
    done = run_forked(["--help"], tmp_path, script=script)
    assert done.returncode == 0 and "--num_iterations" in done.stdout


# ---------------------------------------------------------------------------------------- the command line
def test_help_lists_every_field_with_type_and_default(capsys):
    with pytest.raises(SystemExit) as exit:
        train_gpt.main(["--track", "fineweb", "--help"])
    assert exit.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, field in train_gpt.Hyperparameters.__dataclass_fields__.items():
        if name == "track":  # an option of its own, as it chooses all these defaults
            continue
        default = getattr(TRACKS["fineweb"], name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        entry = out.split(f"hyperparameters", 1)[1].split(f"--{name} ", 1)[1].split(" --", 1)[0]
        assert shown in entry, f"{name}: {entry}"
        assert (field.type.__name__ in entry) or isinstance(default, tuple), f"{name}: {entry}"
        help = " ".join(field.metadata["help"].split())  # a field without one fails here
        assert help and help in entry, f"{name}: {entry}"
    for flag in ("--track", "--device", "--log_dir"):
        assert flag in out


def test_a_new_field_just_works(tmp_path):
    """Somebody adds weight_decay to a copy of the file, without a help text."""
    source = SCRIPT.read_text()
    field = '    seed: int = setting(0, "seed of the initial weights")\n'
    assert field in source
    script = tmp_path / "changed.py"
    script.write_text(source.replace(field, field + "    weight_decay: float = 0.0\n"))
    program = (
        "import changed, sys; hp = changed.parse_arguments(sys.argv[1:])[1]; "
        "changed.check_hyperparameters(hp, 1); print(hp.weight_decay)"
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
    assert train_gpt.parse_arguments(["--track", "mini"])[1] == TRACKS["mini"]
    if not torch.cuda.is_available():
        assert train_gpt.parse_arguments([])[1] == TRACKS["mini"]


# ---------------------------------------------------------------------------------------- bad input
BAD_OPTIONS = {  # name: (what is changed, what the line must say)
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
    "more value embeddings than layers": (dict(num_value_embeds=3), "num_value_embeds"),
    "head size": (dict(head_dim=30), "head_dim"),
    "end-of-text outside the vocabulary": (dict(eot_token=257), "eot_token"),
    "no window": (dict(max_window=0), "max_window"),
    "cooldown beyond the run": (dict(cooldown_frac=1.5), "cooldown_frac"),
    "no pass": (dict(sequences_per_pass=0), "sequences_per_pass"),
    "learning rate not a number": (dict(muon_lr="nan"), "muon_lr"),
    "momentum of one": (dict(muon_momentum=1.0), "muon_momentum"),
    "a word for a number": (dict(num_iterations="many"), "num_iterations"),
    "a word for a flag": (dict(fp8="perhaps"), "fp8"),
    "a word for layers": (dict(attn_free_layers="a,b"), "attn_free_layers"),
    "unknown option": (dict(num_iteration=3), "num_iteration"),
}


def refused(argv, capsys):
    """main()'s exit code and the lines on stderr, when it is to refuse its input."""
    try:
        code = train_gpt.main(argv)
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert "step:" not in out, "training had begun"
    return code, err.splitlines()


def assert_one_line(code, lines, says, folder):
    assert code == 2
    assert len(lines) == 1, lines
    assert "error: " in lines[0] and says in lines[0], lines[0]
    assert not (folder / "logs").exists(), "a log of a run that never was"


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
    write_shard(
        path,
        tokens,
        **{
            "magic": dict(magic=1),
            "version": dict(version=2),
            "size": dict(count=10**6),
            "empty": {},
        }[kind],
    )
    if kind == "empty":
        path.write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert_one_line(*refused(options(shards, train_files=path), capsys), path.name, tmp_path)


def test_unwritable_log_folder_is_one_line(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert_one_line(
        *refused(options(shards) + ["--log_dir", "file"], capsys), "can't write file/", tmp_path
    )


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
    assert re.fullmatch(
        r"error: step [12]: the loss is not finite. If you raised a learning rate, lower it.*\n",
        err,
    ), err
    assert "step:6/6" not in out and "target" not in out


def test_a_bad_input_as_a_subprocess(tmp_path):
    """The real exit code, and nothing but the line, even without data in sight."""
    done = run_script(["--track", "mini", "--train_files", "nothing_*.bin"], tmp_path)
    assert done.returncode == 2
    assert done.stdout == "" and re.fullmatch(
        r"error: .*nothing_\*\.bin.*data/shakespeare\.py.*\n", done.stderr
    )
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- checkpoint
def test_checkpoint_holds_the_trained_model(shards, tmp_path, monkeypatch):
    run_here(options(shards, num_iterations=2) + ["--save_checkpoint"], tmp_path, monkeypatch)
    (path,) = (tmp_path / "checkpoints").glob("*/step*.pt")
    saved = torch.load(path, weights_only=True)
    hp = train_gpt.parse_arguments(options(shards))[1]
    model = train_gpt.GPT(hp, dtype=saved["model"]["embed.weight"].dtype)
    model.load_state_dict(saved["model"])
    assert model.lm_head.weight.any()


# ---------------------------------------------------------------------------------------- the real thing
@pytest.fixture(scope="module")
def shakespeare():
    folder = ROOT / "data" / "shakespeare"
    if not (folder / "shakespeare_train_000000.bin").exists():
        subprocess.run([sys.executable, str(ROOT / "data" / "shakespeare.py")], check=True)
    return folder


def test_mini_meets_its_target(shakespeare, tmp_path):
    """The default run, compiled, as a newcomer starts it. Losses of different seeds differ by about 0.003; the
    bound leaves room for the rounding of other CPUs."""
    hp = TRACKS["mini"]
    done = run_script(["--track", "mini", "--device", "cpu"], tmp_path, TORCH_COMPILE_DISABLE="0")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = val_losses(done.stdout)
    assert losses[0] == pytest.approx(math.log(384), abs=2e-4)
    assert losses[hp.num_iterations] < hp.target_val_loss + 0.005, losses
    assert len(losses) == 12  # a record needs at least eight after step 0
