"""The GPUs of this machine, and the sequences that fit into their memory."""

import dataclasses
import sys

from judge.processes import has_nvidia_gpu
from train_gpt import InputError, require  # before torch: it sets variables that torch reads

import torch


def find_gpus():
    """Returns the number of GPUs. Raises InputError if PyTorch can't use those of the machine."""
    if has_nvidia_gpu() and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as e:
            raise InputError(
                f"this machine has an NVIDIA GPU, but PyTorch {torch.__version__} can't use it ({e}); "
                f"update the driver, install another build in {sys.prefix} (if it is ./run.sh's, remove it "
                "and run ./run.sh again), or use --device cpu"
            )
    return torch.cuda.device_count()


def check_gpus(processes):
    """Raises InputError unless each GPU in use can train."""
    for i in range(processes):
        major, minor = torch.cuda.get_device_capability(i)
        require(
            torch.version.hip or major >= 8,
            f"the GPU {torch.cuda.get_device_name(i)} has compute capability {major}.{minor}, but "
            "bfloat16 and FlexAttention need 8.0 (Ampere) or later; use another GPU or --device cpu",
        )


def fitted(hp, mib, fp8):
    """Halves train_seq_len until a training step fits into `mib` MiB of GPU memory. Stops at 12,288
    tokens, where validation needs more memory than training. The number of tokens per step doesn't
    change.

    The default model with one sequence per pass needs 3,144 MiB plus 0.538 MiB per token of
    train_seq_len with the FP8 head, and 3,209 plus 0.441 with a bf16 head. That was measured on a
    simulated GPU with PyTorch 2.13's allocator (docs/hardware.md). The formula adds a margin."""
    per_token = 0.56 if fp8 else 0.46
    while 3700 + per_token * hp.train_seq_len > mib and hp.train_seq_len > 12288:
        hp = dataclasses.replace(hp, train_seq_len=hp.train_seq_len // 2)
    return hp


def fit_to_memory(hp, processes):
    """Fits train_seq_len to the free memory of all GPUs in use."""
    for i in range(processes):
        free, _ = torch.cuda.mem_get_info(i)
        fp8 = hp.fp8 and not torch.version.hip and torch.cuda.get_device_capability(i) >= (8, 9)
        hp = fitted(hp, free / 2**20, fp8)
    return hp
