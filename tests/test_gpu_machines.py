"""Imitates machines with GPUs: unusable, old, AMD's, with little free memory. Needs no GPU."""
import argparse
import fnmatch
import glob
import math
import os
import re
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from train_gpt import TRACKS, InputError, Logbook, World
from util import ROOT, random_tokens, read_log, run_forked, spawn, write_shard

CPU = torch.device("cpu")


# ------------------------------------------------ a GPU that PyTorch cannot use
NVIDIA_FILES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
AMD_MEMORY = "/sys/class/drm/card1/device/mem_info_vram_total"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine("/dev/nvidia0", ...): these device files are there, and no others of a GPU."""
    plain_glob, plain_exists = glob.glob, os.path.exists

    def set_up(*files, amd_mib=0):
        memory = tmp_path / "mem_info_vram_total"
        memory.write_text(f"{amd_mib * 2**20}\n", encoding="utf-8")

        def fake_glob(pattern, **options):
            if pattern.startswith("/sys/class/drm"):
                return [str(memory)] if fnmatch.fnmatchcase(AMD_MEMORY, pattern) and amd_mib else []
            if pattern.startswith("/dev"):
                return [file for file in files if fnmatch.fnmatchcase(file, pattern)]
            return plain_glob(pattern, **options)

        def fake_exists(path):
            return path in files if path == "/dev/kfd" else plain_exists(path)

        monkeypatch.setattr(glob, "glob", fake_glob)
        monkeypatch.setattr(os.path, "exists", fake_exists)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return set_up


@pytest.mark.parametrize("files, amd_mib, make", [
    ((), 0, ""),
    (NVIDIA_FILES, 0, "NVIDIA"),
    (("/dev/nvidia15",), 0, "NVIDIA"),
    (("/dev/nvidiactl", "/dev/nvidia-uvm"), 0, ""),  # a driver without a GPU
    (("/dev/kfd",), 16 * 1024, "AMD"),
    (("/dev/kfd",), 512, ""),  # graphics inside a laptop's CPU
    (("/dev/kfd",), 0, ""),
    ((), 16 * 1024, ""),  # AMD's card without its driver for computing
])
def test_visible_gpu(machine, files, amd_mib, make):
    machine(*files, amd_mib=amd_mib)
    assert train_gpt.visible_gpu() == make


@pytest.mark.parametrize("value, make", [
    ("", ""), ("-1", ""), ("NoDevFiles", ""), ("0", "NVIDIA"), ("GPU-8f", "NVIDIA")])
def test_a_hidden_gpu_is_not_visible(machine, monkeypatch, value, make):
    machine(*NVIDIA_FILES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert train_gpt.visible_gpu() == make


# A process on a machine with one NVIDIA GPU. PyTorch is built for CUDA %(cuda)r, and the driver is
# too old for it. The messages are PyTorch's (c10/cuda/CUDAFunctions.cpp, torch/cuda/__init__.py).
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
    """Runs the script with some arguments where the driver is too old."""
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


@pytest.mark.parametrize("cuda, driver", [("13.0", "580"), ("12.8", "525"), ("11.8", "450")])
def test_a_driver_that_is_too_old_is_one_line(old_driver, cuda, driver):
    """Table 1 of https://docs.nvidia.com/deploy/cuda-compatibility/, minor versions."""
    done = old_driver(cuda=cuda)
    assert_one_line(done, f"CUDA {cuda}", f"driver is {driver} or later", "--device cpu")
    assert "too old (found version 12020)" in done.stderr


def test_a_build_without_cuda_is_one_line(old_driver):
    done = old_driver(cuda=None)
    assert_one_line(done, "NVIDIA GPU", torch.__version__, "built without CUDA", "--device cpu")


def test_an_unusable_gpu_that_was_asked_for_is_one_line(old_driver):
    done = old_driver("--device", "cuda", "--track", "mini")
    assert_one_line(done, "driver is 580 or later", "--device cpu")


def test_an_unusable_gpu_with_several_processes_is_one_line(old_driver):
    assert_one_line(old_driver(nproc=2), "driver is 580 or later")


def test_a_bad_choice_of_gpus_is_named(old_driver):
    assert_one_line(old_driver(CUDA_VISIBLE_DEVICES="7"), "CUDA_VISIBLE_DEVICES=7", "--device cpu")


def test_the_cpu_can_be_chosen_beside_an_unusable_gpu(old_driver):
    """--device cpu and an empty CUDA_VISIBLE_DEVICES go on, here to the shards that are missing."""
    missing = ("--train_files", "nothing_*.bin")
    assert_one_line(old_driver("--device", "cpu", *missing), "no shards match nothing_*.bin")
    done = old_driver(*missing, CUDA_VISIBLE_DEVICES="")
    assert_one_line(done, "no shards match nothing_*.bin")


def test_help_beside_an_unusable_gpu(old_driver):
    done = old_driver("--help")
    assert done.returncode == 0 and "--num_iterations" in done.stdout and done.stderr == ""


def test_amd_without_rocm(machine, monkeypatch):
    machine("/dev/kfd", amd_mib=192 * 1024)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "AMD GPU, but PyTorch" in train_gpt.why_no_gpu()
    assert "built without ROCm" in train_gpt.why_no_gpu()
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")

    def init():
        raise RuntimeError("No HIP GPUs are available")
    monkeypatch.setattr(torch.cuda, "init", init)
    reason = train_gpt.why_no_gpu()
    assert "for ROCm 7.0.51831" in reason and "(No HIP GPUs are available)" in reason
    assert "580" not in reason and "--device cpu" in reason


def test_no_gpu_at_all(machine):
    machine()
    args, hp = train_gpt.parse_arguments([])
    assert args.device == "cpu" and hp == TRACKS["mini"]
    with pytest.raises(InputError, match="--device cuda: .* no GPU .*; give --device cpu"):
        train_gpt.check_gpus()


# ------------------------------------------------ what a GPU is capable of
CARDS = {"B200": (10, 0), "H100": (9, 0), "L4": (8, 9), "A10G": (8, 6), "A100": (8, 0),
         "T4": (7, 5), "V100": (7, 0), "P100": (6, 0)}


@pytest.fixture
def cards(monkeypatch):
    """cards("H100", "T4"): the GPUs that PyTorch finds. Like PyTorch, it warns about old ones."""
    def set_up(*names, capabilities=CARDS):
        def capability(i):
            if capabilities[names[i]] < (7, 5):
                warnings.warn(f"Found GPU{i} which is of compute capability 7.0.\nThe following")
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would spoil the line
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
def test_the_oldest_gpu_in_use_decides(cards, monkeypatch, processes, refused):
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
    with pytest.raises(InputError, match="2 processes, but PyTorch finds 1 GPU"):
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
    """A capability is another thing there: an MI300 has 9.4. Its FP8 is float8_e4m3fnuz."""
    cards("MI300X", capabilities={"MI300X": capability})
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    train_gpt.check_gpus()
    assert not train_gpt.uses_fp8(TRACKS["fineweb"])


class RecordingGPT:
    """In GPT's place: what build_model asks for."""
    def __init__(self, hp, dtype, use_fp8):
        self.dtype, self.use_fp8 = dtype, use_fp8

    def to(self, device):
        return self


@pytest.mark.parametrize("name, hip, fp8, wanted", [
    ("B200", None, True, True),
    ("H100", None, True, True),
    ("L4", None, True, True),
    ("A100", None, True, False),
    ("H100", None, False, False),
    ("H100", "7.0", True, False)])
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
    """Whether PyTorch's own checks of shapes allow the FP8 head's three products."""
    def product(m, k, n):
        a = torch.empty(m, k, dtype=torch.float8_e4m3fn, device="meta")
        b = torch.empty(n, k, dtype=torch.float8_e4m3fn, device="meta").T
        scale = torch.empty((), device="meta")
        torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    tokens, channels, vocabulary = hp.train_seq_len, hp.model_dim, hp.padded_vocab_size
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
    hp = replace(TRACKS["fineweb"], model_dim=model_dim, train_seq_len=384, vocab_size=vocab_size,
                 eot_token=256)
    if scaled_mm_takes(hp):
        train_gpt.check_hyperparameters(hp, 1, "cuda")
    else:
        says = rf"--model_dim {model_dim}: .*multiple of 16 .*--fp8 false"
        with pytest.raises(InputError, match=says):
            train_gpt.check_hyperparameters(hp, 1, "cuda")
    train_gpt.check_hyperparameters(replace(hp, fp8=False), 1, "cuda")  # the remedy
    train_gpt.check_hyperparameters(hp, 1)
    cards("A100")  # no FP8
    train_gpt.check_hyperparameters(hp, 1, "cuda")


def test_the_rule_for_heads(cards):
    cards("H100")
    narrow = replace(TRACKS["mini"], head_dim=8)
    with pytest.raises(InputError, match="--head_dim 8: must be at least 16 on a GPU"):
        train_gpt.check_hyperparameters(narrow, 1, "cuda")
    train_gpt.check_hyperparameters(replace(narrow, head_dim=16), 1, "cuda")
    train_gpt.check_hyperparameters(narrow, 1, "cpu")


# ------------------------------------------------ the memory that is free
def check_fit(rank, world_size, free_mib, wanted):
    """Each rank sees another free memory, of its own GPU; all get the same length."""
    torch.cuda.mem_get_info = lambda device: (free_mib[rank] * 2**20, 10**12)
    args = argparse.Namespace(fit_memory=True)
    hp = train_gpt.fit_to_memory(args, TRACKS["fineweb"], World(rank, world_size, CPU), {})
    assert hp == replace(TRACKS["fineweb"], train_seq_len=wanted)
    train_gpt.check_hyperparameters(hp, world_size)


@pytest.mark.parametrize("free_mib, wanted", [
    ((80_000, 23_000), 24576), ((12_000, 80_000), 12288), ((80_000, 40_000), 49152)])
def test_all_ranks_take_the_smallest_free_memory(free_mib, wanted, tmp_path):
    spawn(check_fit, 2, tmp_path, free_mib, wanted)


def test_no_length_breaks_the_sharing_of_a_step():
    """If some processes can share the track's sequences, they can share the shorter ones too."""
    for mib in (40_000, 20_000, 10_000):
        hp = train_gpt.fitted(TRACKS["fineweb"], mib)
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
train_gpt.fitted = lambda hp, mib: replace(hp, train_seq_len=256 if mib >= 1000 else 128)
plain = train_gpt.parse_arguments

def parse_arguments(argv):
    args, hp = plain(argv)
    args.fit_memory = "--train_seq_len" not in argv
    return args, hp

train_gpt.parse_arguments = parse_arguments
sys.exit(train_gpt.main(sys.argv[1:]))
"""


def test_a_run_on_gpus_with_different_free_memory(tmp_path):
    """Two ranks agree and train. Resumed with more memory, the run keeps its length. An option that
    asks for another length is refused."""
    script = tmp_path / "script.py"
    script.write_text(FREE_MEMORY % dict(root=str(ROOT)), encoding="utf-8")
    write_shard(tmp_path / "train_0.bin", random_tokens(4 * 1024 + 1, seed=1))
    write_shard(tmp_path / "val_0.bin", random_tokens(4 * 128 + 1, seed=2))
    settings = dict(
        train_files="train_*.bin", val_files="val_*.bin", num_layers=2, num_heads=1, head_dim=16,
        model_dim=32, max_ngram=1, long_window_layers="0", max_window=128, batch_tokens=1024,
        val_seq_len=128, val_tokens=512, num_iterations=4, val_loss_every=0, warmup_steps=0,
        checkpoint_every=2)
    argv = ["--track", "shakespeare", "--device", "cpu"]
    argv += [f"--{name}={value}" for name, value in settings.items()]
    done = run_forked(argv, tmp_path, nproc=2, script=script, FREE="2000,500")
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path)
    assert "train_seq_len 128 (track: 256): 8 sequences a step" in log
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
# What a process on Windows meets at its imports: there is no module named resource.
WITHOUT_RESOURCE = """
import sys
sys.modules["resource"] = None
sys.path.insert(0, %(root)r)
import torch, train_gpt
sys.platform = "win32"
print(train_gpt.peak_memory(train_gpt.World(0, 1, torch.device("cpu"))))
"""


def test_a_system_without_the_module_resource(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_RESOURCE % dict(root=str(ROOT)), encoding="utf-8")
    done = run_forked([], tmp_path, script=script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "peak memory: not measured on Windows\n"


def test_macos_counts_memory_in_bytes(monkeypatch):
    """One number that the system gives: KiB on Linux, bytes on macOS."""
    import resource
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**30))
    world = World(0, 1, CPU)
    for name, mib in (("darwin", 3 * 2**10), ("linux", 3 * 2**20)):
        monkeypatch.setattr(sys, "platform", name)
        line = f"peak memory allocated: {mib} MiB reserved: {mib} MiB"
        assert train_gpt.peak_memory(world) == line


# ------------------------------------------------ numbers that are not finite
def not_finite(hp, looks, folder, world=World(0, 1, CPU)):
    """The message at the end of a run that looks at these (step, number, what) in turn."""
    book = Logbook(argparse.Namespace(log_dir=folder), hp, world, {}, "")
    with pytest.raises(InputError) as error:
        for step, number, what in looks:
            assert book.look(step, torch.tensor(number), what) == 0
    return str(error.value)


@pytest.mark.parametrize("changes, advice", [
    ({}, "if you changed the source or a setting"),
    (dict(num_layers=2), "if you changed the source or a setting"),
    (dict(muon_lr=9.0), "lower --muon_lr 9.0"),
    (dict(head_lr=8.0, embed_lr=7.0), "lower --head_lr 8.0, --embed_lr 7.0")])
def test_advice_is_about_what_the_user_changed(changes, advice, tmp_path):
    looks = [(1, 2.5, "training loss"), (2, math.nan, "training loss")]
    message = not_finite(replace(TRACKS["mini"], **changes), looks, tmp_path)
    start = f"step 2, rank 0: the training loss is not finite (nan); {advice}"
    assert message.startswith(start)
    assert ("TORCH_COMPILE_DISABLE=1" in message) == ("lower" not in message)


@pytest.mark.parametrize("what", ["norm of the weights", "validation loss"])
def test_what_was_not_finite_is_named(what, tmp_path):
    looks = [(1, 2.5, "training loss"), (1, math.inf, what)]
    message = not_finite(TRACKS["mini"], looks, tmp_path)
    assert message.startswith(f"step 1, rank 0: the {what} is not finite (inf);")


def check_two_ranks(rank, world_size, folder, numbers, says):
    """Numbers of steps 1 to 5, whose vote is at step 5: both ranks stop with the same words."""
    looks = []
    for step, number in enumerate(numbers[rank], 1):
        looks.append((step, number, "training loss"))
    message = not_finite(TRACKS["mini"], looks, folder, World(rank, world_size, CPU))
    assert message.startswith(says), message


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("first, second, place, number", [
    ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, INF, NAN, 1.0], "step 3, rank 1", "inf"),
    ([1.0, 1.0, 1.0, NAN, 1.0], [1.0, -INF, 1.0, 1.0, 1.0], "step 2, rank 1", "-inf"),
    ([1.0, NAN, 1.0, 1.0, 1.0], [1.0, INF, 1.0, 1.0, 1.0], "step 2, rank 0", "nan")])
def test_the_first_rank_and_its_number_are_named(first, second, place, number, tmp_path):
    says = f"{place}: the training loss is not finite ({number});"
    spawn(check_two_ranks, 2, tmp_path, str(tmp_path / "logs"), (first, second), says)
