"""
Tests of tools/launch_checks.py, the checks before a run: imitated GPUs, memory, and compiled code.

The tests need no GPU. Wrong compiled code is imitated by a method `compile` that changes the model.
"""

import glob
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import launch_checks
import machine
import train_gpt
from train_gpt import TRACKS, InputError
from util import ROOT, env, random_tokens, write_shard

# -----------------------------------------------------------------------------
# GPUs


@pytest.mark.parametrize("hidden_by, unusable", [(None, True), ("0", True), ("", False), ("-1", False)])
def test_a_gpu_that_pytorch_cannot_use(monkeypatch, hidden_by, unusable):
    """There is an NVIDIA GPU, but the driver is too old, or PyTorch is the build for CPUs."""
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden_by is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden_by)
    if not unusable:
        assert launch_checks.find_gpus() == 0
        return
    with pytest.raises(InputError) as error:
        launch_checks.find_gpus()
    for words in (torch.__version__, "nvidia-smi", "pytorch.org", "--device cpu"):
        assert words in str(error.value)


CARDS = {"H100": (9, 0), "A10G": (8, 6), "A100": (8, 0), "T4": (7, 5)}


@pytest.fixture
def cards(monkeypatch):
    """A function: after cards({"H100": 80_000}), PyTorch finds this GPU, with so many MiB free."""

    def set_up(free):
        names = list(free)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: CARDS[names[i]])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free[names[i]] * 2**20, 10**12))

    monkeypatch.setattr(torch.version, "hip", None)
    return set_up


def check(capsys, *options, script="train_gpt"):
    """Returns the exit status, the lines that the command prints, and its stderr."""
    status = launch_checks.main(["--script", script, *options])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_an_old_gpu_is_one_line(cards, monkeypatch, capsys):
    cards({"T4": 15_000})
    status, lines, err = check(capsys)
    assert (status, lines) == (2, [])
    assert err.startswith("error: the GPU T4 has compute capability 7.5, ")
    assert err.endswith("8.0 (Ampere) or later; use another GPU or --device cpu\n")
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")  # AMD's numbers mean something else
    assert check(capsys)[0] == 0


@pytest.mark.parametrize(
    "gpus, track, processes", [(8, "mini", 4), (8, "fineweb", 8), (6, "fineweb", 4), (3, "mini", 2)]
)
def test_as_many_processes_as_can_share_the_sequences(gpus, track, processes):
    assert launch_checks.most_processes(train_gpt, TRACKS[track], gpus) == processes


@pytest.mark.parametrize(
    "free, wanted",
    [
        ({"H100": 80_000}, 49152),
        ({"H100": 80_000, "A100": 23_000}, 24576),
        ({"A100": 12_000, "H100": 80_000}, 12288),
        ({"H100": 28_000}, 24576),
        ({"A100": 28_000}, 49152),  # without FP8, the head needs less
        ({"H100": 1_000}, 12288),
    ],
)
def test_the_length_that_fits_into_the_smallest_memory(cards, capsys, free, wanted):
    cards(free)
    status, lines, err = check(capsys, "--track", "fineweb", "--log_dir", "x")
    assert lines == ["log_dir=x", f"processes={len(free)}", f"--train_seq_len={wanted}"]
    assert (status, err) == (0, "")


@pytest.mark.parametrize("options", [["--track=mini"], ["--track=fineweb", "--train_seq_len=1024"]])
def test_a_length_that_the_user_chose_stays(cards, capsys, options):
    cards({"H100": 1_000})
    assert check(capsys, *options)[1] == ["log_dir=logs", "processes=1"]


@pytest.mark.parametrize("found", [True, False])
def test_a_resumed_run_keeps_its_length(cards, monkeypatch, capsys, found):
    """And its log, wherever that is. With --resume latest, there may be nothing to resume."""

    def load_checkpoint(args, source):
        args.resume = "somewhere/run.pt" if found else None
        print("--resume: there is no unfinished run")
        return dict(settings=asdict(TRACKS["fineweb"])) if found else None

    cards({"H100": 1_000})
    monkeypatch.setattr(train_gpt, "load_checkpoint", load_checkpoint)
    _, lines, _ = check(capsys, "--resume=latest", "--track=fineweb")
    if found:
        assert lines == ["log_dir=somewhere", "processes=1"]
    else:
        assert lines == ["log_dir=logs", "processes=1", "--train_seq_len=12288"]


# The peak of the allocator in MiB, measured with PyTorch 2.13: (FP8 head, tokens) -> MiB
PEAKS = {
    (True, 49152): 29_580,
    (True, 24576): 16_362,
    (True, 12288): 9_753,
    (False, 49152): 24_893,
    (False, 24576): 14_051,
    (False, 12288): 8_582,
}


@pytest.mark.parametrize("fp8, seq_len", PEAKS)
def test_the_length_that_fits_leaves_room_for_other_libraries(fp8, seq_len):
    """The least memory in which a length is chosen is 500 to 1,700 MiB more than its peak."""
    hp = TRACKS["fineweb"]
    peak = PEAKS[fp8, seq_len]
    if seq_len > 12288:
        assert launch_checks.fitted(hp, peak + 500, fp8).train_seq_len < seq_len
    fitted = launch_checks.fitted(hp, peak + 1700, fp8)
    assert fitted.train_seq_len >= seq_len
    for world_size in (1, 2, 4, 8):  # they can still share a step
        train_gpt.check_hyperparameters(fitted, world_size)


# -----------------------------------------------------------------------------
# Compiled code

TINY = replace(
    TRACKS["mini"],
    num_layers=2,
    num_heads=2,
    head_dim=32,
    model_dim=64,
    num_value_embeds=1,
    long_window_layers=(0,),
    max_window=256,
    train_seq_len=128,
    batch_tokens=256,
    val_seq_len=512,
    val_tokens=1024,
    sequences_per_pass=2,
)


def test_no_gradient_of_the_check_is_zero():
    model = train_gpt.build_model(TINY)
    results = launch_checks.losses_and_gradients(model, TINY)
    matrices = [f"gradient of {name}" for name, p in model.named_parameters() if p.ndim >= 2]
    assert sorted(results) == sorted([*matrices, "training loss", "validation loss"])
    for name, result in results.items():
        assert result.isfinite().all(), name
        assert result.norm() > 0, name


def half_loss(model):
    model.register_forward_hook(lambda model, inputs, loss: loss / 2)


def wrong_validation(model):
    model.register_forward_hook(lambda model, inputs, loss: loss if model.training else loss * 1.01)


def wrong_gradient(model):
    """Generic tuning has this effect: the loss is right, but gradients are NaN."""
    model.blocks[0].mlp.c_fc.weight.register_hook(lambda grad: grad * float("nan"))


def no_headers(model):
    output = "In file included from x.cpp\ny.h:3:10: fatal error: Python.h: No such file or directory\n"
    raise RuntimeError(f"CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\n{output}")


def no_compiler(model):
    raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")


def full_disk(model):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "spoil, says",
    [
        (half_loss, ["training loss is off by 50%", "is wrong", "install GCC 14"]),
        (wrong_validation, ["validation loss is off by 1%", "is wrong"]),
        (wrong_gradient, ["gradient of blocks.0.mlp.c_fc.weight is off by nan%", "is wrong"]),
        (no_headers, ["y.h:3:10: fatal error: Python.h", "apt install g++ python3-dev"]),
        (no_compiler, ["No working C++ compiler found", "needs a C++ compiler (g++)"]),
        (full_disk, ["No space left on device", "free disk space"]),
    ],
)
def test_what_a_compiler_does_wrong(spoil, says, monkeypatch):
    monkeypatch.setattr(train_gpt.GPT, "compile", lambda model, dynamic: spoil(model))
    monkeypatch.setattr(launch_checks, "CXX", "g++")
    problem = launch_checks.compile_problem(TINY)
    for words in says:
        assert words in problem
    assert "\n" not in problem


def test_an_error_of_the_model_itself_is_not_the_compilers(monkeypatch):
    def forward(model, *args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train_gpt.GPT, "forward", forward)
    with pytest.raises(RuntimeError, match="a bug"):
        launch_checks.compile_problem(TINY)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled_code_is_right(tmp_path):
    """Here the compiler is really called."""
    code = (
        "import launch_checks\n"
        "from test_launch_checks import TINY\n"
        "print(f'problem: {launch_checks.compile_problem(TINY)!r}')\n"
    )
    folders = [ROOT / "tools", ROOT / "tests" / "tools", ROOT / "tests"]
    changes = dict(
        PYTHONPATH=os.pathsep.join(map(str, folders)),
        TORCH_COMPILE_DISABLE="0",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
    )
    done = subprocess.run([sys.executable, "-c", code], env=env(**changes), capture_output=True, text=True)
    assert done.stdout == "problem: ''\n", done.stderr
    assert list(tmp_path.rglob("*.so"))


@pytest.fixture
def tiny_mini(tmp_path, monkeypatch):
    """The track mini is tiny, and no answer is remembered yet."""
    write_shard(tmp_path / "train_0.bin", random_tokens(8 * 1024 + 1, seed=1))
    write_shard(tmp_path / "val_0.bin", random_tokens(4 * 256 + 1, seed=2))
    files = dict(train_files=str(tmp_path / "train_*.bin"), val_files=str(tmp_path / "val_*.bin"))
    monkeypatch.setitem(TRACKS, "mini", replace(TINY, num_iterations=4, **files))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setattr(train_gpt.GPT, "compile", lambda model, dynamic: None)


def test_a_right_answer_is_remembered(tiny_mini, tmp_path, monkeypatch, capsys):
    variables = [f"{name}={value}" for name, value in machine.environment().items()]
    status, lines, err = check(capsys, f"--log_dir={tmp_path}")
    assert (status, lines) == (0, [f"log_dir={tmp_path}", "processes=1", *variables])
    assert err.startswith("comparing compiled code")
    monkeypatch.setattr(train_gpt.GPT, "compile", lambda model, dynamic: half_loss(model))
    assert check(capsys, f"--log_dir={tmp_path}") == (0, lines, "")
    changes = [
        (launch_checks, "CXX", "another"),
        (launch_checks, "DTYPE", torch.float16),
        (train_gpt, "describe_machine", lambda: "another CPU, compiler or flags"),
    ]
    for module, name, value in changes:
        with monkeypatch.context() as context:
            context.setattr(module, name, value)
            _, lines, err = check(capsys, f"--log_dir={tmp_path}")
            assert "is wrong (the training loss" in err, name


def test_a_wrong_answer_is_not_remembered(tiny_mini, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt.GPT, "compile", lambda model, dynamic: half_loss(model))
    for _ in range(2):
        status, lines, err = check(capsys, f"--log_dir={tmp_path}")
        warning = err.splitlines()[1]
        prefix = "warning: training without torch.compile, at about half the speed: "
        assert status == 0
        assert warning.startswith(prefix)
        assert lines[-2:] == [
            "TORCH_COMPILE_DISABLE=1",
            f"SPEEDRUN_COMPILE_REASON=({warning.removeprefix(prefix)})",
        ]


def test_the_user_can_do_without_compiled_code(tiny_mini, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    status, lines, err = check(capsys, f"--log_dir={tmp_path}")
    assert (status, err) == (0, "")
    assert not (tmp_path / "cache").exists()


def test_user_errors_come_before_the_comparison(tiny_mini, capsys):
    assert check(capsys, "--train_files=nothing_*.bin")[2].startswith("error: no shards match nothing")
    status, lines, err = check(capsys, "--num_iterations", "x")
    assert (status, lines) == (2, [])
    assert err.count("\n") == 1


def test_the_settings_of_a_recipe_are_its_own(capsys):
    status, lines, err = check(capsys, "--val_loss_every=3", script="recipes.january2026")
    assert (status, lines) == (2, [])
    assert err.startswith("error: --val_loss_every 3")
