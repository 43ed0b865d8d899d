"""
Tests with imitated GPUs: unusable ones, old ones, AMD's, and some with little memory.

The tests need no GPU.
"""

import argparse
import fnmatch
import glob
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from train_gpt import TRACKS, InputError, World
from util import ROOT, random_tokens, read_log, run_forked, spawn, write_shard

CPU = torch.device("cpu")


# ------------------------------------------------ a GPU that PyTorch can't use
@pytest.mark.parametrize(
    "files, hidden_by, unusable",
    [
        (["/dev/nvidia0"], None, True),
        (["/dev/nvidia15"], "0", True),
        (["/dev/nvidia0"], "GPU-8f", True),
        (["/dev/nvidia0"], "", False),
        (["/dev/nvidia0"], "-1", False),
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], None, False),  # a driver, but no GPU
        ([], None, False),
    ],
)
def test_unusable_gpu(monkeypatch, files, hidden_by, unusable):
    plain_glob = glob.glob

    def fake_glob(pattern):
        if pattern.startswith("/dev"):
            return [file for file in files if fnmatch.fnmatchcase(file, pattern)]
        return plain_glob(pattern)

    monkeypatch.setattr(glob, "glob", fake_glob)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden_by is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden_by)
    assert train_gpt.unusable_gpu() == unusable
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not train_gpt.unusable_gpu()


# Runs the script as on a machine with one NVIDIA GPU whose driver is too old. PyTorch is built for
# CUDA %(cuda)r. The messages are those of PyTorch (c10/cuda/CUDAFunctions.cpp and
# torch/cuda/__init__.py).
OLD_DRIVER = """
import glob, sys, warnings
import torch

sys.path.insert(0, %(root)r)
warnings.simplefilter("always")
plain = glob.glob
said = ("The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
        "driver by downloading and installing a new version from the URL: http://www.nvidia.com/")

def is_available():
    if torch.version.cuda:
        warnings.warn("CUDA initialization: " + said)
    return False

def init():
    if torch.version.cuda:
        raise RuntimeError(said)
    raise AssertionError("Torch not compiled with CUDA enabled")

def fake_glob(pattern, **options):
    if pattern == "/dev/nvidia[0-9]*":
        return ["/dev/nvidia0"]
    return plain(pattern, **options)

glob.glob = fake_glob
torch.version.cuda = %(cuda)r
torch.cuda.is_available = is_available
torch.cuda.init = init
import train_gpt
sys.exit(train_gpt.main(sys.argv[1:]))
"""


@pytest.fixture
def old_driver(tmp_path, monkeypatch):
    """A function that runs the script on such a machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(*args, cuda="13.0", **options):
        script = tmp_path / "script.py"
        script.write_text(OLD_DRIVER % dict(root=str(ROOT), cuda=cuda), encoding="utf-8")
        return run_forked(args, tmp_path, script=script, **options)

    return run


def assert_one_line(done, *says):
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: [^\n]*\n", done.stderr), done.stderr
    for words in says:
        assert words in done.stderr, done.stderr


@pytest.mark.parametrize("cuda", ["13.0", "12.8"])
@pytest.mark.parametrize("args", [(), ("--device", "cuda", "--track", "mini")])
def test_a_driver_that_is_too_old_is_one_line(old_driver, cuda, args):
    done = old_driver(*args, cuda=cuda)
    assert_one_line(
        done, f"PyTorch {torch.__version__} (CUDA {cuda})", "nvidia-smi", "--device cpu"
    )


def test_a_build_without_cuda_is_one_line(old_driver):
    done = old_driver(cuda=None)
    assert_one_line(done, torch.__version__, "CUDA not built in", "pytorch.org", "--device cpu")


def test_an_unusable_gpu_with_several_processes_is_one_line(old_driver):
    assert_one_line(old_driver(nproc=2), "finds no GPU that it can use")


def test_the_cpu_can_be_chosen_beside_an_unusable_gpu(old_driver):
    """
    --device cpu or an empty CUDA_VISIBLE_DEVICES lets the script continue.

    Here it then stops because its shards are missing.
    """
    missing = ("--train_files", "nothing_*.bin")
    assert_one_line(old_driver("--device", "cpu", *missing), "no shards match nothing_*.bin")
    done = old_driver(*missing, CUDA_VISIBLE_DEVICES="")
    assert_one_line(done, "no shards match nothing_*.bin")


def test_help_beside_an_unusable_gpu(old_driver):
    done = old_driver("--help")
    assert done.returncode == 0
    assert "--num_iterations" in done.stdout
    assert done.stderr == ""


def test_no_gpu_at_all():
    args, hp = train_gpt.parse_arguments([])
    assert args.device == "cpu"
    assert hp == TRACKS["mini"]
    with pytest.raises(InputError, match="finds no GPU that it can use.*--device cpu"):
        train_gpt.check_gpus()


# ------------------------------------------------ what a GPU is capable of
CARDS = {
    "B200": (10, 0),
    "H100": (9, 0),
    "L4": (8, 9),
    "A10G": (8, 6),
    "A100": (8, 0),
    "T4": (7, 5),
    "V100": (7, 0),
    "P100": (6, 0),
}


@pytest.fixture
def cards(monkeypatch):
    """A function: after cards("H100", "T4"), PyTorch finds these two GPUs."""

    def set_up(*names, capabilities=CARDS):
        def capability(i):
            return capabilities[names[i]]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    return set_up


@pytest.mark.parametrize("name", CARDS)
def test_capability_of_8_is_needed(cards, name):
    cards(name)
    if name not in ("T4", "V100", "P100"):
        train_gpt.check_gpus()
        return
    with pytest.raises(InputError) as error:
        train_gpt.check_gpus()
    major, minor = CARDS[name]
    message = str(error.value)
    assert f"the GPU {name} has compute capability {major}.{minor}, " in message
    assert "8.0 (Ampere) or later" in message
    assert "--device cpu" in message


@pytest.mark.parametrize("processes, refused", [(1, False), (2, False), (3, True)])
def test_the_weakest_gpu_in_use_decides(cards, monkeypatch, processes, refused):
    cards("H100", "A100", "T4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    if refused:
        with pytest.raises(InputError, match="GPU T4 has compute capability 7.5"):
            train_gpt.check_gpus()
    else:
        train_gpt.check_gpus()


def test_more_processes_than_gpus(cards, monkeypatch):
    cards("H100")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes need 2 GPUs, but PyTorch finds 1;"):
        train_gpt.check_gpus()


def test_an_old_gpu_is_one_line_before_the_data_is_looked_at(cards, monkeypatch, tmp_path, capsys):
    cards("T4")
    monkeypatch.chdir(tmp_path)
    for argv in ([], ["--track", "mini"], ["--device", "cuda"]):
        assert train_gpt.main([*argv, "--train_files", "nothing_*.bin"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(r"error: the GPU T4 has compute capability 7\.5[^\n]*\n", err)
    assert train_gpt.main(["--device", "cpu", "--train_files", "nothing_*.bin"]) == 2
    assert "no shards match" in capsys.readouterr().err


@pytest.mark.parametrize("capability", [(9, 4), (7, 0)])
def test_amd_trains_with_a_bf16_head(cards, monkeypatch, capability):
    """
    On AMD's GPUs, the compute capability means something else: an MI300 has 9.4.

    Their FP8 format is float8_e4m3fnuz, which our head doesn't support.
    """
    cards("MI300X", capabilities={"MI300X": capability})
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    train_gpt.check_gpus()
    assert not train_gpt.uses_fp8(TRACKS["fineweb"])


class RecordingGPT:
    """Takes the place of GPT, and stores the arguments that build_model passes."""

    def __init__(self, hp, dtype, use_fp8):
        self.dtype = dtype
        self.use_fp8 = use_fp8

    def to(self, device):
        return self


@pytest.mark.parametrize(
    "name, hip, fp8, wanted",
    [
        ("B200", None, True, True),
        ("H100", None, True, True),
        ("L4", None, True, True),
        ("A100", None, True, False),
        ("H100", None, False, False),
        ("H100", "7.0", True, False),
    ],
)
def test_which_head_the_model_gets(cards, monkeypatch, name, hip, fp8, wanted):
    cards(name)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(train_gpt, "GPT", RecordingGPT)
    hp = replace(TRACKS["fineweb"], fp8=fp8)
    model = train_gpt.build_model(hp, World(0, 1, torch.device("cuda", 0)))
    assert model.use_fp8 == wanted
    assert model.dtype == torch.bfloat16


# ------------------------------------------------ rules for GPUs
def scaled_mm_takes(hp):
    """Whether PyTorch accepts the shapes of the three matrix products of the FP8 head."""

    def product(m, k, n):
        a = torch.empty(m, k, dtype=torch.float8_e4m3fn, device="meta")
        b = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="meta").T
        scale = torch.empty((), device="meta")
        torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    tokens = hp.train_seq_len
    channels = hp.model_dim
    vocabulary = hp.padded_vocab_size
    try:
        product(tokens, channels, vocabulary)  # the logits
        product(tokens, vocabulary, channels)  # the gradient of the input
        product(vocabulary, tokens, channels)  # the gradient of the weights
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("model_dim", [64, 72, 80, 90, 768, 776])
@pytest.mark.parametrize("vocab_size", [257, 50257])
def test_the_rule_for_fp8_is_pytorchs(cards, model_dim, vocab_size):
    cards("H100")
    hp = replace(
        TRACKS["fineweb"],
        model_dim=model_dim,
        train_seq_len=384,
        vocab_size=vocab_size,
        eot_token=256,
    )
    if scaled_mm_takes(hp):
        train_gpt.check_hyperparameters(hp, 1, "cuda")
    else:
        says = rf"--model_dim {model_dim}: .*multiple of 16; .*--fp8 false"
        with pytest.raises(InputError, match=says):
            train_gpt.check_hyperparameters(hp, 1, "cuda")
    train_gpt.check_hyperparameters(replace(hp, fp8=False), 1, "cuda")  # what the error suggests
    train_gpt.check_hyperparameters(hp, 1)
    cards("A100")  # no FP8
    train_gpt.check_hyperparameters(hp, 1, "cuda")


def test_the_rule_for_heads(cards):
    cards("H100")
    narrow = replace(TRACKS["mini"], head_dim=8)
    with pytest.raises(InputError, match="--head_dim 8: FlexAttention needs at least 16"):
        train_gpt.check_hyperparameters(narrow, 1, "cuda")
    train_gpt.check_hyperparameters(replace(narrow, head_dim=16), 1, "cuda")
    train_gpt.check_hyperparameters(narrow, 1, "cpu")


# ------------------------------------------------ the memory that is free
def check_fit(rank, world_size, free_mib, fp8, wanted):
    """Each rank sees its own GPU. All ranks must choose the same length."""
    torch.cuda.mem_get_info = lambda device: (free_mib[rank] * 2**20, 10**12)
    train_gpt.uses_fp8 = lambda hp: fp8[rank]
    args = argparse.Namespace(fit_memory=True)
    hp = train_gpt.fit_to_memory(args, TRACKS["fineweb"], World(rank, world_size, CPU), {})
    assert hp == replace(TRACKS["fineweb"], train_seq_len=wanted)
    train_gpt.check_hyperparameters(hp, world_size)


@pytest.mark.parametrize(
    "free_mib, fp8, wanted",
    [
        ((80_000, 23_000), (True, True), 24576),
        ((12_000, 80_000), (True, True), 12288),
        ((80_000, 40_000), (True, True), 49152),
        ((28_000, 28_000), (False, False), 49152),
        ((28_000, 28_000), (True, False), 24576),  # machines with different GPUs
    ],
)
def test_all_ranks_take_the_shortest_length_that_fits(free_mib, fp8, wanted, tmp_path):
    spawn(check_fit, 2, tmp_path, free_mib, fp8, wanted)


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
        assert train_gpt.fitted(hp, peak + 500, fp8).train_seq_len < seq_len
    assert train_gpt.fitted(hp, peak + 1700, fp8).train_seq_len >= seq_len


def test_no_length_breaks_the_sharing_of_a_step():
    """If some processes can share the sequences of the track, they can share shorter ones, too."""
    for mib in (40_000, 20_000, 10_000):
        hp = train_gpt.fitted(TRACKS["fineweb"], mib, fp8=True)
        for world_size in (1, 2, 4, 8):
            train_gpt.check_hyperparameters(TRACKS["fineweb"], world_size)
            train_gpt.check_hyperparameters(hp, world_size)


# Two processes on the CPU train as if their GPUs had the free memory in $FREE, in MiB: with 256
# tokens a sequence if 1,000 are free, otherwise with 128.
FREE_MEMORY = """
import os, sys
import torch
from dataclasses import replace

sys.path.insert(0, %(root)r)
import train_gpt

free = os.environ["FREE"].split(",")[int(os.environ.get("RANK", 0))]
torch.cuda.mem_get_info = lambda device: (int(free) * 2**20, 10**12)
train_gpt.uses_fp8 = lambda hp: True
train_gpt.fitted = lambda hp, mib, fp8: replace(hp, train_seq_len=256 if mib >= 1000 else 128)
plain = train_gpt.parse_arguments

def parse_arguments(argv):
    args, hp = plain(argv)
    args.fit_memory = "--train_seq_len" not in argv
    return args, hp

train_gpt.parse_arguments = parse_arguments
sys.exit(train_gpt.main(sys.argv[1:]))
"""


def test_a_run_on_gpus_with_different_free_memory(tmp_path):
    """
    Two ranks agree on a length and train.

    When the run is resumed with more memory, it keeps its length. An option that asks for another
    length is refused.
    """
    script = tmp_path / "script.py"
    script.write_text(FREE_MEMORY % dict(root=str(ROOT)), encoding="utf-8")
    write_shard(tmp_path / "train_0.bin", random_tokens(8 * 1024 + 1, seed=1))
    write_shard(tmp_path / "val_0.bin", random_tokens(4 * 128 + 1, seed=2))
    settings = dict(
        train_files="train_*.bin",
        val_files="val_*.bin",
        num_layers=2,
        num_heads=1,
        head_dim=16,
        model_dim=32,
        long_window_layers="0",
        max_window=128,
        batch_tokens=2048,
        val_seq_len=128,
        val_tokens=512,
        num_iterations=4,
        val_loss_every=0,
        warmup_steps=0,
        checkpoint_every=2,
    )
    argv = ["--track", "mini", "--device", "cpu"]
    argv += [f"--{name}={value}" for name, value in settings.items()]
    done = run_forked(argv, tmp_path, nproc=2, script=script, FREE="2000,500")
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path)
    assert "train_seq_len is 128 instead of the track's 1024" in log
    assert "step:4/4 val_loss" in log

    for path in (tmp_path / "checkpoints").glob("*/step000004.pt"):
        path.unlink()
    argv += ["--resume", "latest"]
    done = run_forked(argv, tmp_path, nproc=2, script=script, FREE="2000,2000")
    assert done.returncode == 0, done.stderr
    assert "resume: from step 2" in done.stdout
    (path,) = (tmp_path / "checkpoints").glob("*/step000004.pt")
    assert torch.load(path, weights_only=True)["settings"]["train_seq_len"] == 128

    argv += ["--train_seq_len", "256"]
    done = run_forked(argv, tmp_path, script=script, FREE="2000")
    assert done.returncode == 2
    assert "train_seq_len: 128 in the checkpoint, 256 now" in done.stderr


# ------------------------------------------------ other systems
def test_windows_is_refused_in_one_line(tmp_path):
    script = tmp_path / "script.py"
    lines = [
        "import sys",
        "sys.platform = 'win32'",
        f"sys.path.insert(0, {str(ROOT)!r})",
        "import train_gpt",
    ]
    script.write_text("\n".join(lines))
    done = run_forked([], tmp_path, script=script)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"error: .*WSL\n", done.stderr)


def test_macos_counts_memory_in_bytes(monkeypatch):
    """The system reports the peak memory in KiB on Linux, and in bytes on macOS."""
    import resource

    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**30))
    world = World(0, 1, CPU)
    for name, mib in (("darwin", 3 * 2**10), ("linux", 3 * 2**20)):
        monkeypatch.setattr(sys, "platform", name)
        line = f"peak memory allocated: {mib} MiB reserved: {mib} MiB"
        assert train_gpt.peak_memory(world) == line


# ------------------------------------------------ losses that aren't finite, and signals
NAN, INF = math.nan, math.inf


def check_votes(rank, world_size, losses, signals, wanted):
    """Each rank sees its own losses of steps 1, 2, ... and its own signal. All decide the same."""
    world = World(rank, world_size, CPU)
    train_gpt.stop_signal = signals[rank]
    first_bad_step = torch.tensor(math.inf, dtype=torch.float64)
    for step, loss in enumerate(losses[rank], 1):
        first_bad_step = train_gpt.first_bad(first_bad_step, step, torch.tensor(loss))
    if isinstance(wanted, int):
        assert train_gpt.vote(first_bad_step, world) == wanted
    else:
        with pytest.raises(InputError, match=wanted):
            train_gpt.vote(first_bad_step, world)


@pytest.mark.parametrize(
    "losses, signals, wanted",
    [
        ([[1.0, 2.0], [1.0, 2.0]], [0, 0], 0),
        ([[1.0, 2.0], [1.0, 2.0]], [0, 15], 15),
        ([[1.0, 2.0], [1.0, 2.0]], [2, 0], 2),
        ([[1.0, 1.0, 1.0, NAN], [1.0, 1.0, INF, NAN]], [0, 0], "step 3: the loss or the weights are not finite"),
        ([[1.0, NAN, 1.0, 1.0], [1.0, 1.0, -INF, 1.0]], [15, 0], "step 2: the loss or the weights are not finite"),
    ],
)
def test_all_ranks_decide_the_same(losses, signals, wanted, tmp_path):
    spawn(check_votes, 2, tmp_path, losses, signals, wanted)


def test_read_vote():
    assert train_gpt.read_vote(torch.tensor([math.inf, 0.0], dtype=torch.float64)) == (math.inf, 0)
    assert train_gpt.read_vote(torch.tensor([7.0, -15.0], dtype=torch.float64)) == (7, 15)
