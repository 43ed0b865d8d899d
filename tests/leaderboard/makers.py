"""
Logs for tests: in our format and in those of modded-nanogpt. Helpers that run and judge.
"""

import contextlib
import json
import random
import subprocess
import uuid
from pathlib import Path

from judge.logs.read import read_logs
from judge.compare import compare
from judge.plot import plot
from leaderboard import replay, rules, submit, verify
from tests.judge.helpers import run_main
from tests.util import ROOT

RECORDS = ROOT / "records"
SOURCE = """\
import torch

val_tokens: int = 327_680
model = torch.compile(model, dynamic=False)
"naïve"
"""
LINE = "=" * 100
SMI_ROW = """\
|   {i}  NVIDIA H100 80GB HBM3          On  | 00000000:1{i}:00.0 Off |                    0 |
| N/A   38C    P0              75W / 700W |      3MiB / 81559MiB |      0%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+"""
SMI_HEAD = "| NVIDIA-SMI 535.183.06             Driver Version: 535.183.06   CUDA Version: 12.2     |"
SMI = "\n".join([SMI_HEAD, *(SMI_ROW.format(i=i) for i in range(8))])
# Training times in ms. The runs of make_runs() take about 100 s by default.
FASTER = (90_000, 90_300, 89_900, 90_200)


def cpu(model="AMD EPYC", cores=2, sets="avx2 fma", compiler="") -> str:
    """The lines of a log about the machine."""
    line = f"CPU: {model}, {cores} cores, 2 threads a process, instruction sets: {sets}\n"
    return f"{line}{compiler}1 process on cpu"


CPU = cpu()


def our_log(
    path: Path,
    loss=1.49,
    time_ms=100_000,
    seed=0,
    source=SOURCE,
    steps=600,
    extra="",
    machine=CPU,
    every=100,
    minute=None,
    **hyperparameters,
) -> Path:
    """
    Writes a log as train_gpt.py does.

    `time_ms` is the training time. The run validates `every` so many steps. `extra` is a line
    between two steps. `minute` is when the run began, in units of two. With track="", it is like a log of another program, without hyperparameters.
    """
    facts = dict(track="tiny", seed=seed, val_tokens=327_680, batch_tokens=4096, target_val_loss=1.5)
    facts |= hyperparameters
    lines = [
        source,
        LINE,
        "Running Python 3.11.7 (main) [GCC 12.2.0]",
        "Running PyTorch 2.13.0+cpu compiled for CUDA None",
        machine,
        LINE,
    ]
    if facts["track"]:
        lines.append(f"hyperparameters: {json.dumps(facts)}")
    for step in range(0, steps + 1, every):
        at = time_ms * step / steps
        value = loss + 4 * (1 - step / steps) ** 3
        timing = f"train_time:{at:.0f}ms step_avg:{at / max(step, 1):.2f}ms"
        if step:
            lines.append(f"step:{step}/{steps} {timing}")
        lines.append(f"step:{step}/{steps} val_loss:{value:.4f} {timing}")
        if extra and step == 200:
            lines.append(extra)
    lines += ["peak memory allocated: 612 MiB reserved: 700 MiB", "target 1.5 met after 100.0 s"]
    if minute is not None:
        lines.append(f"started: 2026-01-01 12:{2 * minute:02}:00.25")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("\n".join(lines).encode() + b"\n")
    return path


def make_runs(
    folder: Path,
    losses=(1.488, 1.491, 1.486, 1.489),
    times=(100_000, 100_400, 99_700, 100_100),
    turn=None,
    **kwargs,
) -> Path:
    """
    Writes a folder of our logs, with seeds 0, 1, ...

    The files have names like real ones, and as many validations as a record needs. With turn 0 and 1, the
    runs of two folders took turns.
    """
    names = random.Random(str(folder))
    for seed, (loss, time_ms) in enumerate(zip(losses, times)):
        name = uuid.UUID(int=names.getrandbits(128))
        minute = None if turn is None else 2 * seed + turn
        settings = dict(loss=loss, time_ms=time_ms, seed=seed, every=50, minute=minute)
        our_log(folder / f"{name}.txt", **settings | kwargs)
    return folder


MAINS = dict(
    compare=compare.main, verify=verify.main, replay=replay.main, plot=plot.main, submit=submit.main
)


def run(script: str, *arguments, cwd="/") -> subprocess.CompletedProcess:
    """Runs a command in this process, in a folder. Its output is bytes."""
    with contextlib.chdir(cwd):
        status, *printed = run_main(MAINS[script], *arguments)
    output = [text.encode("utf-8", "surrogateescape") for text in printed]
    return subprocess.CompletedProcess(arguments, status, *output)


def judged(*paths, against=(), **kwargs) -> rules.Verdict:
    """What the rules say about logs. `against` is a folder or a log of the record to beat."""
    if against:
        kwargs["prior"] = read_logs([against])
    return rules.judge_runs(read_logs(paths), **kwargs)


def unwrapped(output: bytes) -> str:
    """A command's output with single spaces instead of line breaks."""
    return " ".join(output.decode().split())


def has_reason(words: str, *paths, **kwargs) -> bool:
    """Whether judged() gives a reason with these words."""
    return any(words in reason for reason in judged(*paths, **kwargs).reasons)


# Logs of modded-nanogpt, each with what the parser must find in it:
# final loss, training time in ms, step_avg, source, hardware, torch
FIELD = {
    "opens with a separator, train_loss lines, nan, no peak memory": (
        f"{LINE}\n"
        "batch_size : int = 8*64 # sequences\n"
        "sequence_length : int = 1024 # tokens\n"
        "val_tokens : int = 10485760 # n\n"
        f"{LINE}\n"
        "Running pytorch 2.5.0+cu124 compiled for CUDA 12.4\n"
        "nvidia-smi:\n"
        f"{SMI}\n\n"
        f"{LINE}\n"
        "step:0/12 val_loss:10.8258 train_time:0ms step_avg:nanms\n"
        "step:1/12 train_loss:10.8258 train_time:31613ms step_avg:nanms\n"
        "step:12/12 train_loss:3.2364 train_time:264ms step_avg:132.00ms\n"
        "step:12/12 val_loss:3.2751 train_time:271ms step_avg:135.5ms\n",
        3.2751,
        271,
        135.5,
        b"batch_size : int = 8*64 # sequences\nsequence_length : int = 1024 # tokens\n"
        b"val_tokens : int = 10485760 # n\n",
        "8x NVIDIA H100 80GB HBM3",
        "2.5.0+cu124",
    ),
    "more digits, times in seconds, other numbers in between, GPUs in one line": (
        f"val_tokens = 20 * 524288\nbatch_size = 8 * 64 * 1024\n\n{LINE}\n"
        "Running PyTorch 2.9.0+cu128 compiled for CUDA 12.8 on NVIDIA H200 with world_size 4\n"
        f"{LINE}\n"
        "step:0/3200 val_loss:10.82584 train_time:0.000s step_avg:nanms\n"
        "readout step:7 alpha:0.1 val_loss:1.0\n"
        "step:3200/3200 val_loss:3.278901 val_ema_loss:3.3 "
        "train_time:1053.829s step_avg:329.32ms\n",
        3.278901,
        1_053_829,
        329.32,
        b"val_tokens = 20 * 524288\nbatch_size = 8 * 64 * 1024\n",
        "4x NVIDIA H200",
        "2.9.0+cu128",
    ),
    "today's, lines in between, one step average": (
        f"val_tokens: int = 10485760 # how many\ntrain_seq_len = 48*1024\n# ====\n\n{LINE}\n"
        "Running Python 3.12.7 (main) [GCC 13.2.0]\n"
        "Running PyTorch 2.8.0.dev20250524+cu126 compiled for CUDA 12.6\n"
        f"{SMI}\n\n"
        f"{LINE}\n"
        "Created 22 gradient buckets\n"
        "Bucket 0: 1 params, 147.4 MB\n"
        "step:1770/1770 train_time:178618ms step_avg:100.91ms\n"
        "step:1770/1770 val_loss:3.2782 train_time:178723ms step_avg:100.97ms\n"
        "peak memory allocated: 30724 MiB reserved: 4 MiB\n",
        3.2782,
        178_723,
        100.97,
        b"val_tokens: int = 10485760 # how many\ntrain_seq_len = 48*1024\n# ====\n",
        "8x NVIDIA H100 80GB HBM3",
        "2.8.0.dev20250524+cu126",
    ),
}
DASHES = "-" * 40


def heading(name: str) -> str:
    return f"\n\n{DASHES}\n# {name}\n{DASHES}\n\n"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
