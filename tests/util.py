"""Helpers for tests: writing shards, running the script in other processes, gloo groups."""

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
    """Writes a shard: a header of 256 int32, then the tokens as uint16, little-endian."""
    if count is None:
        count = len(tokens)
    header = struct.pack("<256i", magic, version, count, *[0] * 253)
    body = struct.pack(f"<{len(tokens)}H", *tokens)
    Path(path).write_bytes(header + body)
    return Path(path)


def random_tokens(n, seed, vocab=257, eot=EOT, eot_every=100):
    """n random tokens, with an end-of-text about every `eot_every` tokens."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, eot, (n,), generator=g)
    tokens[torch.rand(n, generator=g) < 1 / eot_every] = eot
    tokens[0] = eot
    return tokens.tolist()


def env(**extra):
    """The environment variables of a subprocess: one thread, the loopback network, no rank."""
    e = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        e.pop(name, None)
    e.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_COMPILE_DISABLE="1",
        PYTHONWARNINGS="ignore",
    )
    e.update(extra)
    return e


def rank_env(rank, world_size, port):
    """The environment variables that torchrun sets on one machine."""
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
    """Runs the script in the folder `cwd`, alone or with `nproc` processes under torchrun."""
    command = [sys.executable]
    if nproc is not None:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    command += [str(script), *map(str, args)]
    return subprocess.run(
        command,
        cwd=cwd,
        env=env(**extra),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
    )


def forkserver():
    """A multiprocessing context whose processes are forked from a server that has imported torch.

    A new interpreter would need seconds for the import. The server has none of our modules loaded.
    """
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


def wait_until(condition, seconds=300):
    """Waits until condition() is true. Raises AssertionError if that takes longer."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {seconds} s"
        time.sleep(0.005)


def wait_for_processes(processes, timeout):
    """Waits until all processes have ended, or one has failed.

    Returns the first exit status that isn't 0, or None.
    """
    end = time.monotonic() + timeout
    while True:
        alive = [p for p in processes if p.exitcode is None]
        if not alive:
            return None
        sentinels = [p.sentinel for p in alive]
        if not multiprocessing.connection.wait(sentinels, max(0, end - time.monotonic())):
            return None
        for p in alive:
            if p.exitcode:
                return p.exitcode


def run_forked(args, cwd, nproc=1, timeout=300, script=SCRIPT, **extra):
    """Like run_script(), but forked from the server. Several ranks are started without torchrun.

    Returns the first exit status that isn't 0, and the outputs of the ranks one after the other.
    """
    argv = [str(script), *map(str, args)]
    environments = [env(**extra)]
    if nproc > 1:
        port = free_port()
        environments = [env(**extra, **rank_env(rank, nproc, port)) for rank in range(nproc)]
    with tempfile.TemporaryDirectory() as folder:
        consoles = [f"{folder}/{rank}" for rank in range(nproc)]
        processes = []
        for environment, console in zip(environments, consoles):
            arguments = (argv, str(cwd), environment, console)
            processes.append(forkserver().Process(target=_as_main, args=arguments))
        for process in processes:
            process.start()
        failed = None
        try:
            failed = wait_for_processes(processes, timeout)
            if failed is not None:  # the others may still print an error about it
                for process in processes:
                    process.join(10)
        finally:
            stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            for process in processes:
                process.kill()
                process.join()
        out = "".join(Path(f"{console}.out").read_text() for console in consoles)
        err = "".join(Path(f"{console}.err").read_text() for console in consoles)
    if stuck and failed is None:
        raise subprocess.TimeoutExpired(argv, timeout, f"ranks {stuck} did not end\n{out}", err)
    return subprocess.CompletedProcess(argv, failed or 0, out, err)


def redirect(descriptor, path):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)


def _as_main(argv, cwd, environment, console):
    """Does what `python argv[0] argv[1] ...` does in that folder and environment.

    It runs in a forked process.
    """
    redirect(1, f"{console}.out")
    redirect(2, f"{console}.err")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The tests have our folders on their path, but the script must not have them
    ours = {str(ROOT), *map(str, ROOT.iterdir())}
    theirs = [p for p in sys.path if p not in ours]
    sys.path = [str(Path(argv[0]).parent), *theirs]
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


_first_port = 10_000 + os.getpid() % 350 * 64
_ports = itertools.cycle(range(_first_port, _first_port + 64))


def free_port():
    """A port that no process listens on.

    Each test process has 64 ports of its own, outside the range from which the system assigns
    ports. So no other process takes the port before it is used.
    """
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
    """Runs fn(rank, *args) in `nprocs` processes of the fork server. Raises if one fails."""
    forkserver()
    mp.start_processes(fn, args=args, nprocs=nprocs, start_method="forkserver")


def spawn(fn, world_size, tmp_path, *args):
    """Runs fn(rank, world_size, *args) in `world_size` processes of a gloo group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = Path(tmp_path) / f"store_{fn.__name__}_{world_size}"
    start_processes(_gloo_child, world_size, fn, world_size, str(store), args)


def read_log(folder):
    """The only log under folder/logs, as text."""
    logs = list((Path(folder) / "logs").glob("*.txt"))
    assert len(logs) == 1, f"expected one log, found {logs}"
    return logs[0].read_text()


def val_losses(text):
    """The validation losses by step, from a log or the text of a terminal."""
    found = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) ", text, re.M)
    return {int(step): float(loss) for step, loss in found}
