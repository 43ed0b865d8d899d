"""
Tests of launch/checks.py and gpu/memory.py, the checks before a run: imitated GPUs, memory, and compiled
code.

The tests need no GPU. Wrong compiled code is imitated by a method `compile` that changes the model.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import train_gpt
from recipes import gpt2, january2026
from gpu import memory
from launch import checks
from lib import processes
from train_gpt import TRACKS
from tests.util import ROOT, Job, random_tokens, tiny_options, write_shard


CHECK_INPUTS = train_gpt.check_inputs


@pytest.fixture(autouse=True)
def got(monkeypatch):
    """No data are downloaded or checked, and tests that follow keep their threads. The files that a run
    needs."""
    files = []
    monkeypatch.setattr(train_gpt, "check_inputs", lambda args, hp: [0, 0])
    monkeypatch.setattr(
        checks, "get_data", lambda python, settings: files.append(settings["train_files"])
    )
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return files


def check(tmp_path, capsys, *options, mode="train", script="train_gpt"):
    """Returns the exit status, the answer, and what the checks print."""
    words = options if mode == "compare" else [script, *options]
    status = checks.main([str(tmp_path / "answer"), mode, *words])
    out, err = capsys.readouterr()
    assert out == ""
    return status, json.loads((tmp_path / "answer").read_text()) if status == 0 else None, err


def test_the_answer_reaches_the_launcher(tmp_path, monkeypatch):
    """The checks run in their own process, and read the repository's data wherever the user is."""

    def run(command, cwd):
        return Job(command[3:], cwd, script=command[2]).wait()

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.chdir(tmp_path)
    options = ["--track=mini", "--log_dir=x"]
    needs = processes.check_machine(sys.executable, "prepare", "train_gpt", *options)
    assert needs["log_dir"] == "x"
    assert os.environ["MALLOC_MMAP_MAX_"] == "0"


def test_a_comparison_gets_the_data_of_all_sides(tmp_path, capsys, got):
    """compare starts its runs in copies, where nothing is downloaded. An idea may have options of its own."""
    words = [
        "--idea",
        "--train_files=a*",
        "--gate",
        "--base",
        "x.patch",
        "--recipe",
        "gpt2",
        "--track=edu",
    ]
    assert check(tmp_path, capsys, *words, mode="compare")[0] == 0
    assert got == [gpt2.TRACKS["edu"].train_files]


def test_a_confirmation_reads_tokens_that_no_run_reads(tmp_path, monkeypatch, capsys):
    """Those of Shakespeare, if the runs train on Shakespeare: as many whole sequences as there are."""
    monkeypatch.chdir(ROOT)

    def options(*words):
        return check(tmp_path, capsys, "--confirm", *words, mode="compare")[1]["options"]

    assert options("--track=fineweb") == options("--track=mini", "--train_files", "mine/*") == []
    name, words = options("--track=mini")
    assert name == "--confirm_options"
    args, hp = train_gpt.parse_arguments(["--track=mini", *words.split()])
    CHECK_INPUTS(args, hp)
    (file,) = train_gpt.find_shards(hp.val_files)
    assert train_gpt.shard_length(file) - 1 < hp.val_tokens + hp.val_seq_len


# -----------------------------------------------------------------------------
# GPUs


def test_a_gpu_that_pytorch_cannot_use(monkeypatch, tmp_path, capsys):
    """It never trains on the CPU in silence."""

    def init():
        raise RuntimeError("The driver is too old (found version 11040).")

    monkeypatch.setattr(memory, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", init)
    for mode in ("train", "compare"):
        status, _, err = check(tmp_path, capsys, mode=mode)
        assert (status, err.count("\n")) == (2, 1)
        for words in (
            "an NVIDIA GPU",
            torch.__version__,
            "too old (found version 11040).); update the driver",
            "--device cpu",
        ):
            assert words in err


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


def test_an_old_gpu_is_one_line(cards, monkeypatch, tmp_path, capsys):
    cards({"T4": 15_000})
    status, _, err = check(tmp_path, capsys)
    assert status == check(tmp_path, capsys, mode="compare")[0] == 2
    assert err.startswith("error: the GPU T4 has compute capability 7.5, ")
    assert err.endswith("8.0 (Ampere) or later; use another GPU or --device cpu\n")
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")  # AMD's numbers mean something else
    assert check(tmp_path, capsys)[0] == 0
    monkeypatch.setattr(torch.version, "hip", None)
    cards({"A100": 80_000, "T4": 15_000})
    assert check(tmp_path, capsys, mode="compare")[0] == 0  # it needs one GPU


@pytest.mark.parametrize(
    "script, track, gpus, processes",
    [
        (train_gpt, "fineweb", 6, 4),
        (train_gpt, "mini", 3, 2),
        (january2026, "mini", 8, 4),
    ],
)
def test_as_many_processes_as_can_share_the_sequences(script, track, gpus, processes):
    assert checks.most_processes(script, script.TRACKS[track], gpus) == processes


@pytest.mark.parametrize(
    "free, options, wanted",
    [
        ({"H100": 80_000, "A100": 23_000}, "--track=fineweb", 24576),
        ({"H100": 30_500}, "--track=fineweb", 24576),  # MiB; so many MB are enough for more
        ({"A100": 28_000}, "--track=fineweb", 49152),  # without FP8, the head needs less
        ({"H100": 1_000}, "--track=fineweb --train_seq_len=1024", None),
        ({"H100": 1_000}, "--track=mini", None),
    ],
)
def test_the_length_that_fits_into_the_smallest_memory(cards, tmp_path, capsys, free, options, wanted):
    """A length that the user has chosen stays."""
    cards(free)
    status, needs, err = check(tmp_path, capsys, *options.split(), "--log_dir", "x")
    length = [f"--train_seq_len={wanted}"] if wanted else []
    assert needs["options"] == length
    assert (needs["log_dir"], needs["processes"], needs["environment"]) == ("x", len(free), {})
    words = [f"{options[8:].split()[0]} on GPUs", f"processes: {len(free)}", "not compiled"]
    assert needs["text"] == ", ".join([*words, *length])  # tests don't compile
    assert err == ""


@pytest.mark.parametrize("resume, found", [("latest", True), ("old/run.pt", True), ("latest", False)])
def test_a_resumed_run_keeps_its_length(cards, monkeypatch, tmp_path, capsys, resume, found):
    """And its log, wherever that is. With --resume latest, there may be nothing to resume."""
    monkeypatch.chdir(tmp_path)
    cards({"H100": 1_000})
    if found:
        folder = Path("logs" if resume == "latest" else "old")
        folder.mkdir()
        torch.save(dict(settings=asdict(TRACKS["fineweb"])), folder / "run.pt")
        (folder / "run.txt").touch()
        torch.save({}, folder / "best.pt")  # somebody else's, and newer
    _, needs, err = check(tmp_path, capsys, f"--resume={resume}", "--track=fineweb")
    assert needs["log_dir"] == ("old" if "old" in resume else "logs")
    options = [] if found else ["--train_seq_len=12288"]
    if resume == "latest":
        options.insert(0, "--resume=logs/run.pt" if found else "--resume=")
    assert needs["options"] == options
    assert ("there is no unfinished run in logs, so a new one begins" in err) == (not found)


def test_the_length_that_fits_leaves_room_for_other_libraries():
    """As in the table of docs/hardware.md, 500 to 1,700 MiB above the peak."""
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (FP8|bf16) \|.*\| ([\d,]+) \| (\d+) \| ([\d,]+) \| [\d,]+ \|$", page, re.M)
    assert len(rows) == 4
    hp = TRACKS["fineweb"]
    for head, *numbers in rows:
        least, seq_len, peak = (int(number.replace(",", "")) for number in numbers)
        fitted = memory.fitted(hp, least, head == "FP8")
        assert fitted.train_seq_len == seq_len
        assert memory.fitted(hp, least - 1, head == "FP8").train_seq_len == seq_len // 2
        assert 500 < least - peak < 1700
        for world_size in (1, 2, 4, 8):  # they can still share a step
            train_gpt.check_hyperparameters(fitted, world_size)


# -----------------------------------------------------------------------------
# Compiled code

_, TINY = train_gpt.parse_arguments(tiny_options())


def test_no_gradient_of_the_check_is_zero():
    model = train_gpt.build_model(TINY)
    results = checks.loss_and_gradients(model, TINY, "training")
    matrices = [f"gradient of {name}" for name, p in model.named_parameters() if p.ndim >= 2]
    assert sorted(results) == sorted([*matrices, "training loss"])
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
    raise RuntimeError(
        f"CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\n{output}"
    )


def full_disk(model):
    raise OSError(28, "No space left on device")


def compile_problem():
    problems = [checks.compile_problem(TINY, part) for part in ("training", "validation")]
    return next(filter(None, problems), "")


@pytest.mark.parametrize(
    "spoil, says",
    [
        (half_loss, ["training loss is off by 50%", "is wrong", "install GCC 14"]),
        (wrong_validation, ["validation loss is off by 1%", "is wrong"]),
        (wrong_gradient, ["gradient of blocks.0.mlp.c_fc.weight is off by nan%", "is wrong"]),
        (no_headers, ["y.h:3:10: fatal error: Python.h", "apt install g++ python3-dev"]),
        (full_disk, ["No space left on device", "needs a C++ compiler (g++)", "free disk space"]),
    ],
)
def test_what_a_compiler_does_wrong(spoil, says, monkeypatch):
    monkeypatch.setattr(train_gpt.GPT, "compile", lambda model, dynamic: spoil(model))
    monkeypatch.setattr(checks, "CXX", "g++")
    problem = compile_problem()
    for words in says:
        assert words in problem
    assert "\n" not in problem


def test_an_error_of_the_model_itself_is_not_the_compilers(monkeypatch):
    def forward(model, *args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train_gpt.GPT, "forward", forward)
    with pytest.raises(RuntimeError, match="a bug"):
        compile_problem()


COUNT = """
from torch._dynamo.utils import counters
print(dict(counters["aot_autograd"]), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiled_code_is_right_and_made_once(tmp_path, monkeypatch, capfd):
    """Here a compiler is really called, one that doesn't know the CPU: it tunes for a generic one unless
    PyTorch's options, which come later, say otherwise. GCC 11 to 13 then compile bf16 transposes wrongly.
    A run then finds all of the code."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -mtune=generic "$@"\n')
    compiler.chmod(0o755)
    changes = dict(CXX=str(compiler), TORCH_COMPILE_DISABLE="0", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    os.environ.update(changes, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert checks.find_problem(2) == ""
    assert list(tmp_path.rglob("*.so"))
    half = TRACKS["mini"].batch_tokens // 2  # what each of two processes computes
    options = ["--track=mini", "--num_iterations=1", f"--batch_tokens={half}", f"--log_dir={tmp_path}"]
    code = f"import sys, train_gpt; train_gpt.main(sys.argv[1:]){COUNT}"
    done = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    counted = ast.literal_eval(done.stdout.splitlines()[-1])
    assert (counted["autograd_cache_hit"], counted.get("autograd_cache_miss", 0)) == (2, 0)


@pytest.fixture
def right_code(tmp_path, monkeypatch):
    """Compiled code is right, and no answer is remembered yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(train_gpt, "COMPILED", True)
    monkeypatch.setattr(checks, "find_problem", lambda processes: "")


def test_a_right_answer_is_remembered(right_code, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    status, needs, err = check(tmp_path, capsys)
    assert (status, needs["environment"]) == (0, processes.environment(needs["processes"]))
    assert needs["text"].endswith(", compiled")
    monkeypatch.setattr(checks, "find_problem", lambda processes: "it is wrong")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    _, again, err = check(tmp_path, capsys)
    assert (again["text"], err) == (needs["text"], "")
    variables = processes.environment()
    del variables["OMP_NUM_THREADS"]  # runs at the same time share the cores
    assert check(tmp_path, capsys, mode="compare")[1] == {"environment": variables, "options": []}
    for module, name, value in [
        (checks, "CXX", "another"),
        (checks, "DTYPE", torch.float16),
        (train_gpt, "CPU_MODEL", "another"),
        (train_gpt, "CPU_FLAGS", {"another"}),
    ]:
        with monkeypatch.context() as context:
            context.setattr(module, name, value)
            assert "it is wrong" in check(tmp_path, capsys, mode="compare")[2], name


def test_a_wrong_answer_is_not_remembered(right_code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "find_problem", lambda processes: "it is wrong")
    for _ in range(2):
        _, needs, err = check(tmp_path, capsys)
        assert err == (
            "run.sh: warning: training without torch.compile, at about half the speed: it is wrong\n"
        )
        assert needs["text"].endswith(", not compiled")
        variables = dict(TORCH_COMPILE_DISABLE="1", SPEEDRUN_COMPILE_REASON="(it is wrong)")
        assert variables.items() <= needs["environment"].items()


def test_the_user_can_do_without_compiled_code(right_code, tmp_path, monkeypatch, capsys):
    """With any of the variables that turn torch.compile off. Nothing is called right then."""
    monkeypatch.setattr(train_gpt, "COMPILED", False)
    status, needs, err = check(tmp_path, capsys)
    assert (status, err) == (0, "")
    assert needs["text"].endswith(", not compiled")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("code", ["print(sys.argv[1:], end='')", "raise MemoryError"])
def test_each_part_is_compared_in_a_process(monkeypatch, code):
    """Its output is what is wrong. A process that fails without any has printed a traceback."""
    start = checks.start

    def start_code(command, **options):
        fails = f"import sys\nif 'validation' in sys.argv:\n    {code}\n    sys.exit(1)"
        return start([sys.executable, "-c", fails, *command[3:]], **options)

    monkeypatch.setattr(checks, "start", start_code)
    if "print" in code:
        assert checks.find_problem(2) == "['2', 'compile', 'validation']"
    else:
        with pytest.raises(SystemExit, match="1"):
            checks.find_problem(2)


@pytest.mark.parametrize("cores, count", [(1, 1), (8, 2)])
def test_processes_on_a_cpu(right_code, got, tmp_path, monkeypatch, capsys, cores, count):
    """At most two, and they share the cores."""
    seen = []
    monkeypatch.setattr(checks, "find_problem", seen.append)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    _, needs, _ = check(tmp_path, capsys, "--batch_tokens=8192")  # 8 could share these
    assert needs["processes"] == count
    assert needs["environment"]["OMP_NUM_THREADS"] == str(cores // count)
    assert seen == [count]
    assert got == [TRACKS["mini"].train_files]


def test_user_errors_come_before_the_comparison(right_code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt, "check_inputs", CHECK_INPUTS)
    monkeypatch.setattr(checks, "find_problem", None)
    missing = check(tmp_path, capsys, "--train_files=nothing_*.bin")
    assert missing[2].startswith("error: no shards match nothing")
    batch = TRACKS["mini"].batch_tokens
    write_shard(tmp_path / "few.bin", random_tokens(batch + 1, seed=0))
    few = check(tmp_path, capsys, f"--train_files={tmp_path}/few.bin", "--num_iterations=2")
    assert f"few.bin has 1 batches of {batch} tokens, not 2," in few[2]
    status, _, err = check(tmp_path, capsys, "--num_iterations", "x")
    assert (status, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "word, meant",
    [
        ("--num_iteration=3", "; did you mean --num_iterations?\n"),
        ("--num-iterations", "; did you mean --num_iterations"),
        (
            "--lr",
            "; did you mean --final_lr_frac or --head_lr or --embed_lr or --scalar_lr or --muon_lr?\n",
        ),
        ("--flowers", "all options"),
    ],
)
def test_an_option_that_is_almost_right(tmp_path, capsys, word, meant):
    status, _, err = check(tmp_path, capsys, word)
    assert (status, err.count("\n")) == (2, 1)
    assert meant in err


def test_the_settings_of_a_recipe_are_its_own(tmp_path, capsys):
    status, _, err = check(tmp_path, capsys, "--val_loss_every=3", script="recipes.january2026")
    assert status == 2
    assert err.startswith("error: --val_loss_every 3")
