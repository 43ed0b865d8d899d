"""
Times a training step on this machine: each part of it, and how close it comes to the machine's
speed.

    ./run.sh bench                                the default track, on a GPU if there is one
    ./run.sh bench --fp8 false --max_window 512   with any option of train_gpt.py
    ./run.sh bench --kernels 25                   also list the 25 slowest kernels

It runs on a CPU or on one GPU.

Times are medians of --repeats measurements in milliseconds. Each waits until the device is done. A
micro-step runs --sequences_per_pass sequences of train_seq_len tokens through forward and backward.
A step runs as many micro-steps as make batch_tokens, then the optimizers. The tokens are random, in
documents of about 1,000 tokens. The attention window is the one at the end of training, the
longest. The model trains during the measurements, because GPUs multiply zeros faster than other
numbers, and many weights start at zero. The first step includes compilation, unless its results are
cached.

The "matmul peak" is the speed of the best of several large square matrix products in the data type
of the activations, before and after the steps. The GFLOP of a part are those of the model, as
gpu/measure.py counts them. For the optimizers, they are those of Newton-Schulz; for the whole step,
the sum of both. The gap to 100% is element-wise work, masked pairs, memory traffic and small products.

MFU (model FLOPs utilization) is the model's FLOP/s divided by the dense bf16 peak in the GPU's
datasheet, even if the head runs in FP8.
"""

import os
import sys

from judge.commands import command_parser, positive, run_command, whole_number
from lib.processes import environment
from judge.text import table

if __name__ == "__main__" and not environment().items() <= os.environ.items():
    os.execve(sys.executable, sys.orig_argv, os.environ | environment())  # as ./run.sh trains on a CPU

import train_gpt  # before torch, because it sets variables that torch reads when it is loaded
import torch
from gpu.memory import check_gpus, find_gpus, fit_to_memory
from gpu.measure import PEAK_FLOPS, Training, device_name, measure, number, slowest_kernels
from train_gpt import InputError


def print_kernels(step, count):
    print("\n      ms      %  calls  kernel")
    for name, calls, ms, percent in slowest_kernels(step, count):
        print(f"{ms:8.3f} {percent:6.1f} {calls:6}  {name[:55]}")


# -----------------------------------------------------------------------------
# Command line


def read_options(argv):
    """Returns the benchmark's options and the hyperparameters, with sequences that fit the GPU.

    Raises InputError.
    """
    parser = command_parser("bench", __doc__)
    add = parser.add_argument
    add(
        "--repeats",
        type=whole_number,
        default=20,
        metavar="N",
        help="timed repetitions, after half as many untimed ones (default: 20)",
    )
    add("--kernels", type=whole_number, metavar="N", help="list the N slowest kernels of a step")
    add(
        "--peak_tflops",
        type=positive,
        metavar="X",
        help="the GPU's dense bf16 peak in TFLOP/s, which the MFU needs (default: known for the H100 SXM "
        "and the H200)",
    )
    args, rest = parser.parse_known_args(argv)
    options, hp = train_gpt.parse_arguments(rest)
    if find_gpus():
        check_gpus(1)
        if "train_seq_len" not in options.given:
            hp = fit_to_memory(hp, 1)
    train_gpt.check_hyperparameters(hp, 1)
    return args, hp


def main(argv):
    args, hp = read_options(argv)
    train_gpt.init_processes()
    machine = device_name()
    print(f"{hp.track} on {machine}, PyTorch {torch.__version__}\n", flush=True)
    peak_flops = args.peak_tflops * 1e12 if args.peak_tflops else PEAK_FLOPS.get(machine)
    training = Training(hp)
    figures = measure(training, args.repeats, peak_flops)
    print(*table([(name, number(value)) for name, value in figures.items()], "<>"), sep="\n")
    if args.kernels:
        print_kernels(training.last_step, args.kernels)


if __name__ == "__main__":
    run_command(main, InputError)
