"""Helpers of the tests: shards written by hand, the script as a subprocess, gloo processes on loopback."""
import multiprocessing
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"
EOT = 256  # end-of-text of the byte-level track


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """Write a shard from the format's definition: 256 int32 of header, then uint16 tokens, little-endian."""
    count = len(tokens) if count is None else count
    header = struct.pack("<256i", magic, version, count, *[0] * 253)
    Path(path).write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    return Path(path)


def random_tokens(n, seed, vocab=257, eot=EOT, eot_every=100):
    """n tokens under `vocab` with an end-of-text about every `eot_every`."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, eot, (n,), generator=g)
    tokens[torch.rand(n, generator=g) < 1 / eot_every] = eot
    tokens[0] = eot
    return tokens.tolist()


def env(**extra):
    """The environment of a subprocess: one thread, loopback only, no rank of ours, no progress bar."""
    e = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    e.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_COMPILE_DISABLE="1", PYTHONWARNINGS="ignore")
    e.update(extra)
    return e


def run_script(args, cwd, nproc=None, timeout=300, script=SCRIPT, **extra):
    """Run the script in `cwd`: alone, or with `nproc` processes under torchrun."""
    launcher = [] if nproc is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return subprocess.run([sys.executable, *launcher, str(script), *map(str, args)], cwd=cwd, env=env(**extra),
                          capture_output=True, text=True, timeout=timeout)


def _gloo_child(rank, fn, world_size, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        fn(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def start_processes(fn, nprocs, *args):
    """Run fn(rank, *args) in `nprocs` processes; their failures are ours. They are forked from a server that has
    imported torch once: a fresh interpreter each would take seconds."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.nn.attention.flex_attention", "numpy", "tqdm"])
    mp.start_processes(fn, args=args, nprocs=nprocs, start_method="forkserver")


def spawn(fn, world_size, tmp_path, *args):
    """Run fn(rank, world_size, *args) in `world_size` processes that share a gloo group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = Path(tmp_path) / f"store_{fn.__name__}_{world_size}"
    start_processes(_gloo_child, world_size, fn, world_size, str(store), args)


def read_log(folder):
    """The only log under folder/logs, as text."""
    logs = list((Path(folder) / "logs").glob("*.txt"))
    assert len(logs) == 1, f"expected one log, found {logs}"
    return logs[0].read_text()


def val_losses(text):
    """{step: validation loss} of a log's or a terminal's text."""
    return {int(s): float(v) for s, v in re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) ", text, re.M)}
