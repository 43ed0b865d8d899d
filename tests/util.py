"""Helpers for tests: shards, runs of a tiny model, processes, gloo groups."""

import importlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import runpy
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch

from data.datasets import MINI_VOCAB

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"
EOT = MINI_VOCAB - 1  # end-of-text of the track mini


# --------------------------------------------------------------- shards, and a tiny model
def shard_bytes(tokens, magic=20240520, version=1, count=None):
    """A shard by the definition of the format: a header of 256 int32, then the tokens as uint16,
    little-endian."""
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    return header.ljust(1024, b"\0") + struct.pack(f"<{len(tokens)}H", *tokens)


def write_shard(path, tokens):
    path.write_bytes(shard_bytes(tokens))


def random_tokens(n, seed, vocab=257, eot=EOT, eot_every=100):
    """n random tokens below vocab - 1, with an end-of-text about every `eot_every` tokens. Most tokens of mini
    never occur, which is something to learn."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab - 1, (n,), generator=g)
    tokens[torch.rand(n, generator=g) < 1 / eot_every] = eot
    tokens[0] = eot
    return tokens.tolist()


@torch.no_grad()
def randomized(module):
    """Gives every weight a random value, so that none hides a mistake by being zero or one. The logits
    are far enough apart for a clear greedy choice."""
    rng = torch.Generator().manual_seed(5)
    for name, p in module.named_parameters():
        values = torch.randn(p.shape, generator=rng)
        if p.ndim < 2:
            p.copy_(0.5 + 0.3 * values)
        elif "wte" in name:  # shared with the head: large values make each token predict itself
            p.copy_(0.1 * values)
        elif "emb" in name or "wpe" in name:
            p.copy_(values)
        else:
            p.copy_(p.size(-1) ** -0.5 * values)
    return module.eval()


# A model that takes milliseconds: 4 sequences of 128 tokens a step. Three layers can't be shared
# equally by 2 or 4 processes. The validation shards have 7 and 9 sequences.
TINY = dict(
    train_files="tiny_train_*.bin",
    val_files="tiny_val_*.bin",
    val_tokens=16 * 128,
    batch_tokens=512,
    train_seq_len=128,
    val_seq_len=128,
    sequences_per_pass=2,
    num_layers=3,
    num_heads=2,
    model_dim=32,
    long_window_layers="0,2",
    num_iterations=6,
    val_loss_every=2,
    warmup_steps=1,
)


def tiny_options(**changes):
    return ["--track=mini", *(f"--{k}={v}" for k, v in (TINY | changes).items())]


def tiny_run(folder, *more, **changes):
    """Writes shards to `folder`, for 12 steps of the tiny model. Returns the options of a run there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "tiny_train_000000.bin", random_tokens(4 * 512 + 300, seed=1, vocab=33))
    write_shard(folder / "tiny_train_000001.bin", random_tokens(8 * 512 + 1, seed=2, vocab=33))
    write_shard(folder / "tiny_val_000000.bin", random_tokens(7 * 128 + 50, seed=3, vocab=33))
    write_shard(folder / "tiny_val_000001.bin", random_tokens(9 * 128 + 1, seed=4, vocab=33))
    return [*tiny_options(**changes), *more]


def read_log(folder):
    """The only log under folder/logs, as text."""
    logs = list((Path(folder) / "logs").glob("*.txt"))
    assert len(logs) == 1, f"expected one log, found {logs}"
    return logs[0].read_text()


def settings_of(log):
    """The hyperparameters in the text of a log."""
    return json.loads(re.search("^hyperparameters: (.*)", log, re.M)[1])


def checkpoint_of(folder):
    """The path of the only checkpoint under folder/logs."""
    (path,) = (folder / "logs").glob("*.pt")
    return path


def read_checkpoint(folder):
    return torch.load(checkpoint_of(folder), weights_only=True)


def assert_same_state(got, expected):
    """Two checkpoints have the same weights and optimizers, bit for bit."""
    for part in ("model", "optimizers"):
        torch.testing.assert_close(got[part], expected[part], rtol=0, atol=0)


def assert_one_line(status, text, words):
    """A user's error ends a run with one line, which has these words."""
    assert status == 2
    (line,) = text.splitlines()
    assert line.startswith("error: ")
    assert words in line


# A random guess among the logits: at first, all are zero
INITIAL_LOSS = math.log(MINI_VOCAB)


def val_losses(text):
    """The validation losses by step, from a log or the text of a terminal."""
    found = re.findall(r"^step:(\d+)/\d+ val_loss:(\S+) ", text, re.M)
    return {int(step): float(loss) for step, loss in found}


def in_float32():
    """A hook for Job: runs that differ only in rounding then agree to the last printed digits."""
    import train_gpt

    train_gpt.DTYPE = torch.float32


# --------------------------------------------------------------- processes
def env(**extra):
    """The environment variables of a subprocess: one thread, the loopback network, no compilation."""
    ours = dict(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_COMPILE_DISABLE="1",
        PYTHONWARNINGS="ignore",
    )
    return os.environ | ours | extra


def rank_env(rank, world_size, port):
    """The environment variables that torchrun sets on one machine."""
    return dict(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def run_script(args, cwd, script=SCRIPT, **extra):
    """Runs the script in the folder `cwd`. It is a file, or the name of a module, such as recipes.gpt2."""
    command = [sys.executable]
    if not str(script).endswith(".py"):
        command.append("-m")
    command += [str(script), *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env=env(**extra), capture_output=True, text=True, timeout=1200
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
            "pytest",
        ]
    )
    return multiprocessing.get_context("forkserver")


# A number for each Job: its port. Those of a test process are outside the range from which the system
# assigns ports, so that no other process takes one before it is used.
_ports = itertools.count(10_000 + os.getpid() % 350 * 64)


class Job:
    """A script in `nproc` processes, which are forked from the server and started without torchrun.

    The script is a file or the name of a module. With a `hook`, it is main() of the module after
    hook(), which may change modules.
    """

    def __init__(self, args, cwd, nproc=1, script="train_gpt", hook=None, **extra):
        self.argv = [str(script), *map(str, args)]
        self.folder = tempfile.TemporaryDirectory()
        self.processes = []
        port = next(_ports)
        for rank in range(nproc):
            environment = env(**extra)
            if nproc > 1:
                environment |= rank_env(rank, nproc, port)
            console = f"{self.folder.name}/{rank}"
            arguments = (self.argv, str(cwd), environment, console, pickle.dumps(hook))
            process = forkserver().Process(target=_as_main, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def text(self, stream):
        """What all ranks have written to `stream`, one after the other."""
        return "".join(path.read_text() for path in sorted(Path(self.folder.name).glob(f"*.{stream}")))

    def wait(self, timeout=1200):
        """Waits until all ranks have ended. Returns the first exit status that isn't 0, or 0. `out` and
        `err` are what they have written."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(end - time.monotonic())
        self.out = self.text("out")
        self.err = self.text("err")
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"exit codes after {timeout} s: {codes}\n{self.out}{self.err}"
        return next(filter(None, codes), 0)


def succeeds(job):
    """Waits for a Job, which must end well. Returns it."""
    assert job.wait() == 0, job.err
    return job


def _as_main(argv, cwd, environment, console, hook):
    """Does what `python argv[0] argv[1] ...` does in that folder and environment, or `python -m argv[0] ...`
    for the name of a module. It runs in a forked process.
    """
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{console}.{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    hook = pickle.loads(hook)  # imports train_gpt, so the environment must be set before
    script, *arguments = sys.argv = argv
    if hook:
        hook()
        sys.exit(importlib.import_module(script).main(arguments))
    run = runpy.run_path if script.endswith(".py") else runpy.run_module
    run(script, run_name="__main__")


def _in_group(fn, world_size):
    import train_gpt

    train_gpt.init_processes()
    fn(train_gpt.RANK, world_size)
    torch.distributed.destroy_process_group()
    sys.exit()


def spawn(fn, world_size, tmp_path):
    """Runs fn(rank, world_size) in `world_size` processes of a gloo group. All must end well."""
    succeeds(Job([], tmp_path, world_size, hook=partial(_in_group, fn, world_size)))
