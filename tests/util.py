"""Helpers of the tests: shards written by hand, the script as a process of its own, gloo processes on loopback."""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import re
import runpy
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
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
    e = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    e.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_COMPILE_DISABLE="1",
        PYTHONWARNINGS="ignore",
    )
    e.update(extra)
    return e


def rank_env(rank, world_size, port):
    """What torchrun tells a process of its place, on one machine."""
    return dict(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )


def run_script(args, cwd, nproc=None, timeout=1200, script=SCRIPT, stdout=subprocess.PIPE, **extra):
    """Run the script in `cwd`: alone, or with `nproc` processes under torchrun."""
    launcher = (
        []
        if nproc is None
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    )
    return subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, args)],
        cwd=cwd,
        env=env(**extra),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
    )


def forkserver():
    """A multiprocessing context whose processes are forked from a server that has made torch's imports once: a fresh
    interpreter each would take seconds. The server holds nothing of ours: what it forks runs our files as they are."""
    multiprocessing.set_forkserver_preload(
        [
            "torch._inductor.compile_fx",
            "torch.nn.attention.flex_attention",
            "torch.distributed.run",
            "numpy",
            "tqdm",
            "safetensors.torch",
            "pytest",
        ]
    )
    return multiprocessing.get_context("forkserver")


def run_forked(args, cwd, nproc=1, timeout=300, script=SCRIPT, **extra):
    """run_script(), but forked from the server; several processes as torchrun starts them, without torchrun itself.
    The code is the first that is not 0, the outputs are those of the ranks one after the other."""
    ranks = (
        [{}]
        if nproc == 1
        else [rank_env(rank, nproc, port) for port in [free_port()] for rank in range(nproc)]
    )
    argv = [str(script), *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        consoles = [str(Path(folder) / str(rank)) for rank in range(nproc)]
        processes = [
            forkserver().Process(
                target=_as_main, args=(argv, str(cwd), env(**extra, **rank), console)
            )
            for rank, console in zip(ranks, consoles)
        ]
        for process in processes:
            process.start()
        failed = None  # the first that failed; the others then wait for it, and torchrun would end them too
        try:
            end = time.monotonic() + timeout
            while failed is None and (alive := [p for p in processes if p.exitcode is None]):
                if not multiprocessing.connection.wait(
                    [p.sentinel for p in alive], max(0, end - time.monotonic())
                ):
                    break
                failed = next((p.exitcode for p in alive if p.exitcode), None)
            for process in processes if failed is not None else ():
                process.join(10)  # what it has to say about the one that is gone
        finally:
            stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            for process in processes:
                process.kill()
                process.join()
        out, err = (
            "".join(Path(f"{console}.{name}").read_text() for console in consoles)
            for name in ("out", "err")
        )
    if stuck and failed is None:
        raise subprocess.TimeoutExpired(argv, timeout, f"ranks {stuck} did not end\n{out}", err)
    return subprocess.CompletedProcess(argv, failed or 0, out, err)


def _as_main(argv, cwd, environment, console):
    """In a forked process: what `python argv[0] argv[1] ...` does in that folder and environment."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{console}.{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours = {str(ROOT), *map(str, ROOT.iterdir())}  # on the path of the tests, not on the script's
    sys.argv, sys.path = argv, [str(Path(argv[0]).parent), *(p for p in sys.path if p not in ours)]
    runpy.run_path(argv[0], run_name="__main__")


_ports = itertools.cycle(
    range(10_000 + os.getpid() % 350 * 64, 10_000 + os.getpid() % 350 * 64 + 64)
)


def free_port():
    """A port that nobody listens on. Each process of the tests goes round in 64 of its own, below those that the system
    gives away: none is taken between here and its use."""
    for port in itertools.islice(_ports, 64):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise OSError("none of 64 ports is free")


def _gloo_child(rank, fn, world_size, store, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        fn(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def start_processes(fn, nprocs, *args):
    """Run fn(rank, *args) in `nprocs` processes of the fork server; their failures are ours."""
    forkserver()
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
