"""
The baseline of the speedrun: GPT-2 124M, reproduced.

This is the recipe that every speedup is measured against: Radford et al. 2019 for the model, Brown et al. 2020
(GPT-3, appendix B) for the optimizer's constants, and Karpathy's "Let's reproduce GPT-2" and llm.c for the rest.
It reads the same shards, in the same order, and writes the same log as train_gpt.py, so that the tools in tools/
compare the two directly.

    python baseline/train_gpt2.py --track shakespeare            # one process, CPU or GPU
    torchrun --standalone --nproc_per_node=8 baseline/train_gpt2.py --track fineweb
    python baseline/train_gpt2.py --init_from gpt2 --num_iterations 0   # only evaluates OpenAI's weights

Every speed lever is a flag (--tf32 --bf16 --compile --flash --pad_vocab --fused, each true or false):
levers.py in this folder measures them one after another.

The file reads top to bottom: self-logging, model, OpenAI's weights, data, hyperparameters and tracks, optimizer and
schedule, the run.
"""
import sys

with open(__file__, newline="", encoding="utf-8") as f:
    SOURCE = f.read()  # logged with every run: the log alone must be enough to repeat it

import argparse
import contextlib
import ctypes
import dataclasses
import glob
import json
import math
import os
import platform
import subprocess
import time
import uuid
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see train_gpt.py
if sys.platform == "linux" and platform.machine() == "x86_64":  # likewise: GCC 11 to 13 can be wrong without it
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent  # the repository: data/ and evals/ are found from here


class InputError(Exception):
    """Something the user can put right; the message is the one line that says how."""


# -----------------------------------------------------------------------------
# The model

@dataclasses.dataclass
class GPTConfig:
    block_size: int = 1024           # positions in the position table
    vocab_size: int = 50257          # token ids that occur
    padded_vocab_size: int = 50304   # rows of the token table; equal to vocab_size: no padding
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


# Radford et al. 2019, table 2: layers, heads, width
FAMILY = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024),
          "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        self.n_head, self.flash = config.n_head, flash
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, D)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # the same, written out: the (T, T) matrix goes through memory four times
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            att = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5  # (B, H, T, T)
            y = F.softmax(att.masked_fill(future, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, flash)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2. The names of its parameters are those of OpenAI's checkpoints on the hub."""

    def __init__(self, config: GPTConfig, flash: bool = True):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, flash) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.ndim == 2:
                # 2 n_layer projections are added into the residual stream; scaled so that its variance stays put
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(p, std=0.02 * (2 * config.n_layer) ** -0.5 if residual else 0.02)

    def forward(self, idx, targets=None):
        """idx (B, T) integer -> logits (B, T, padded vocab); with targets (B, T): the mean loss, -1 not counted."""
        assert idx.size(1) <= self.config.block_size, f"{idx.size(1)} tokens > block_size {self.config.block_size}"
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))  # (B, T, C)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # the head is the token table: tied
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_tokens, temperature=1.0, top_k=50, generator=None):
        """Continues idx (B, T) by max_tokens; no cache: evals/sample.py has one. Temperature 0 is greedy."""
        for _ in range(max_tokens):
            logits = self(idx[:, -self.config.block_size:])[:, -1, :self.config.vocab_size].float()
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                top, ids = logits.topk(min(top_k, logits.size(-1)))
                token = ids.gather(1, torch.multinomial((top / temperature).softmax(-1), 1, generator=generator))
            idx = torch.cat([idx, token], dim=1)
        return idx


# -----------------------------------------------------------------------------
# OpenAI's weights, and our own safetensors

def load_openai_weights(model: GPT, path):
    """Copies a Hugging Face GPT-2 `model.safetensors` into model. InputError names the key that does not fit."""
    from safetensors import safe_open
    own = model.state_dict()
    conv1d = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    with safe_open(path, "pt") as f:
        keys = {key.removeprefix("transformer."): key for key in f.keys()}
        for name, key in keys.items():
            if name.endswith((".attn.bias", ".attn.masked_bias")):
                continue  # the causal mask, saved as a buffer
            if name not in own and name != "lm_head.weight":
                raise InputError(f"{path}: unexpected key {key}")
            w = f.get_tensor(key)
            w = w.T if name.endswith(conv1d) else w  # Conv1D keeps (in, out), nn.Linear (out, in)
            if name == "lm_head.weight":
                if "wte.weight" not in keys or not torch.equal(w, f.get_tensor(keys["wte.weight"])):
                    raise InputError(f"{path}: {key} is not the token table, but GPT-2's head is tied to it")
            elif w.shape != own[name].shape:
                raise InputError(f"{path}: {key} has shape {tuple(w.shape)}, the model {tuple(own[name].shape)}")
            else:
                own[name].copy_(w)
    if missing := sorted(own.keys() - keys.keys()):
        raise InputError(f"{path}: key {missing[0]} is missing")


def from_pretrained(name: str, flash: bool = True) -> GPT:
    """OpenAI's gpt2, gpt2-medium, gpt2-large or gpt2-xl, float32, from the hub. InputError where that fails."""
    from huggingface_hub import hf_hub_download
    try:
        path = hf_hub_download(f"openai-community/{name}", "model.safetensors")
    except Exception as e:  # the hub's errors have no common base class
        raise InputError(f"cannot fetch {name} from the hub ({type(e).__name__}): check the network") from e
    n_layer, n_head, n_embd = FAMILY[name]
    # the vocabulary stays unpadded: rows of zeros have logits of 0, which is not unlikely beside trained ones
    model = GPT(GPTConfig(padded_vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd), flash)
    load_openai_weights(model, path)
    return model


def save_model(model: GPT, path: Path):
    """Weights as safetensors, the configuration as JSON metadata; the final name appears when the file is whole."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    weights = {k: v.contiguous().cpu() for k, v in model.state_dict().items()}
    try:
        save_file(weights, temporary, {"model": "gpt2", "config": json.dumps(dataclasses.asdict(model.config))})
    except SafetensorError as e:  # a full disk comes as this, not as an OSError
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot save {path}: {e}") from e
    with open(temporary, "rb") as f:
        os.fsync(f.fileno())
    os.replace(temporary, path)


# -----------------------------------------------------------------------------
# Data: shards of a 256-int32 header (magic 20240520, version 1, token count) and uint16 tokens

def shard_length(path) -> int:
    """The number of tokens of a shard, its header and its file size checked."""
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or header[0] != 20240520:
        raise InputError(f"{path}: not a token shard (wrong magic number)")
    if header[1] != 1:
        raise InputError(f"{path}: shard version {header[1]}, this reads version 1")
    if os.path.getsize(path) != 1024 + 2 * int(header[2]):
        raise InputError(f"{path}: the header says {header[2]} tokens, the file's size disagrees; make it again")
    return int(header[2])


def load_shard(path, vocab_size: int):
    """-> (tokens,) uint16 numpy array; every id is checked."""
    tokens = np.fromfile(path, dtype="<u2", offset=1024, count=shard_length(path))
    if tokens.max(initial=0) >= vocab_size:
        raise InputError(f"{path}: token id {tokens.max()} is outside the vocabulary of {vocab_size}")
    return tokens


def find_shards(pattern: str):
    files = sorted(glob.glob(pattern)) or sorted(glob.glob(str(ROOT / pattern)))
    if not files:
        script = "data/shakespeare.py" if "shakespeare" in pattern else "data/cached_fineweb10B.py"
        raise InputError(f"no shards match {pattern}; make them with: python {script}")
    return files


def training_batches(hp, rank: int, world_size: int, device):
    """Yields (inputs, targets), int64 (sequences of this rank, block_size), the rank-th slice of every batch.

    The order is train_gpt.py's: files sorted, batch_tokens at a step, the rest of a shard that is too short for a
    batch is left. After the last shard it starts again.
    """
    local = hp.batch_tokens // world_size
    while True:
        for path in find_shards(hp.train_files):
            tokens = load_shard(path, hp.vocab_size)
            for start in range(rank * local, len(tokens) - (world_size - rank) * local, hp.batch_tokens):
                chunk = torch.from_numpy(tokens[start:start + local + 1].astype(np.int64))
                if device.type == "cuda":
                    chunk = chunk.pin_memory().to(device, non_blocking=True)
                yield chunk[:-1].view(-1, hp.block_size), chunk[1:].view(-1, hp.block_size)


def validation_batches(hp, rank: int, world_size: int, device):
    """Yields (inputs, targets) of (micro_batch, block_size): this rank's part of the first val_tokens tokens in
    windows of block_size that do not overlap. The last batch is filled up with targets of -1, which count nothing."""
    tokens = load_shard(find_shards(hp.val_files)[0], hp.vocab_size)
    n = hp.val_tokens // hp.block_size
    for first in range(rank * hp.micro_batch, n, world_size * hp.micro_batch):
        last = min(first + hp.micro_batch, n)
        chunk = torch.from_numpy(tokens[first * hp.block_size:last * hp.block_size + 1].astype(np.int64)).to(device)
        fill = (0, 0, 0, hp.micro_batch - (last - first))
        yield (F.pad(chunk[:-1].view(-1, hp.block_size), fill),
               F.pad(chunk[1:].view(-1, hp.block_size), fill, value=-1))


# -----------------------------------------------------------------------------
# Hyperparameters and tracks

@dataclasses.dataclass
class Hyperparameters:
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: int = 10_485_760     # as many of the first validation shard
    repeat_data: bool = False        # begin again when the training shards are used up; false: that is an error
    target_val_loss: float = 3.28
    # model
    init_from: str = "scratch"       # or gpt2, gpt2-medium, gpt2-large, gpt2-xl: OpenAI's weights
    block_size: int = 1024           # tokens of context
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # optimization
    batch_tokens: int = 524_288      # tokens a step, over all processes
    micro_batch: int = 32            # sequences in one forward pass of one process, at most
    num_iterations: int = 19_073
    warmup_iters: int = 715
    learning_rate: float = 6e-4
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    seed: int = 1337
    # speed levers
    tf32: bool = True                # TF32 matmuls (CUDA)
    bf16: bool = True                # bf16 autocast, where the hardware has bf16
    compile: bool = True
    flash: bool = True               # scaled_dot_product_attention; false: softmax(q k) v written out
    pad_vocab: bool = True           # token table padded to a multiple of 64
    fused: bool = True               # fused AdamW
    # evaluation
    val_loss_every: int = 250        # 0: only at the end
    hellaswag: int = 10_042          # HellaSwag items scored at every validation
    samples: int = 4                 # continuations sampled at every validation
    sample_prompt: str = "Hello, I'm a language model,"
    save_checkpoint: bool = True     # model.safetensors of the final weights


TRACKS = {
    "fineweb": Hyperparameters(),
    # bytes, for a CPU of two cores: see the track of the same name in train_gpt.py. What was tried for its best time
    # is in records/shakespeare/NOTES.md; attention written out is the faster one there, once compiled
    "shakespeare": Hyperparameters(
        train_files="data/shakespeare/shakespeare_train_*.bin", val_files="data/shakespeare/shakespeare_val_*.bin",
        val_tokens=389_120, repeat_data=True, target_val_loss=1.50, block_size=128, vocab_size=257,
        n_layer=4, n_head=6, n_embd=192, batch_tokens=2048, micro_batch=16, num_iterations=5800, warmup_iters=100,
        learning_rate=4e-3, beta2=0.99, flash=False, val_loss_every=500, hellaswag=0, samples=1,
        sample_prompt="To be, or not to be"),
}


def parse_args(argv=None):
    """-> (namespace with track, device and log_dir; the track's Hyperparameters with what argv changes in them)."""
    def read_bool(text):
        if text.lower() not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
        return text.lower() == "true"

    has_cuda = torch.cuda.is_available()
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--track", choices=TRACKS, default="fineweb" if has_cuda else "shakespeare")
    first.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_cuda else "cpu")
    first.add_argument("--log_dir", default="logs")
    parser = argparse.ArgumentParser(parents=[first], allow_abbrev=False, description="GPT-2 124M, the baseline.")
    track = TRACKS[first.parse_known_args(argv)[0].track]
    for field in dataclasses.fields(Hyperparameters):
        default = getattr(track, field.name)
        kind = dict(type=read_bool, nargs="?", const=True) if field.type is bool else dict(type=field.type)
        parser.add_argument(f"--{field.name}", **kind, default=default, metavar=field.type.__name__,
                            help=f"default: {str(default).replace('%', '%%')}")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not has_cuda:
        raise InputError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")
    return args, Hyperparameters(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Hyperparameters)})


def check(hp: Hyperparameters, world_size: int) -> Hyperparameters:
    """Refuses what cannot run; -> hp with the micro_batch and the model sizes that this run has."""
    for name in "block_size vocab_size n_layer n_head n_embd batch_tokens micro_batch val_tokens".split():
        if getattr(hp, name) < 1:
            raise InputError(f"--{name} must be at least 1, not {getattr(hp, name)}")
    for name in "num_iterations warmup_iters val_loss_every hellaswag samples weight_decay".split():
        if not 0 <= getattr(hp, name) < math.inf:
            raise InputError(f"--{name} must be zero or more, not {getattr(hp, name)}")
    for name in "learning_rate grad_clip target_val_loss".split():
        if not 0 < getattr(hp, name) < math.inf:
            raise InputError(f"--{name} must be a positive number, not {getattr(hp, name)}")
    if not (0 <= hp.beta1 < 1 and 0 <= hp.beta2 < 1):
        raise InputError("--beta1 and --beta2 must be in [0, 1)")
    if hp.init_from != "scratch":
        if hp.init_from not in FAMILY:
            raise InputError(f"--init_from {hp.init_from}: choose scratch, {', '.join(FAMILY)}")
        if hp.vocab_size != 50257 or hp.block_size > 1024:
            raise InputError(f"--init_from {hp.init_from} needs GPT-2's tokens (--track fineweb) and a --block_size "
                             "of at most 1024")
        n_layer, n_head, n_embd = FAMILY[hp.init_from]
        hp = dataclasses.replace(hp, n_layer=n_layer, n_head=n_head, n_embd=n_embd, pad_vocab=False)
    if hp.n_embd % hp.n_head:
        raise InputError(f"--n_embd {hp.n_embd} is not a multiple of --n_head {hp.n_head}")
    sequences, rest = divmod(hp.batch_tokens, hp.block_size)
    if rest or sequences % world_size:
        raise InputError(f"--batch_tokens {hp.batch_tokens} must be a multiple of {world_size} processes x "
                         f"--block_size {hp.block_size}")
    micro_batch = min(hp.micro_batch, sequences // world_size)
    if sequences // world_size % micro_batch:
        raise InputError(f"--micro_batch {micro_batch} does not divide the {sequences // world_size} sequences that "
                         "a process has in each step")
    # data: every header is read now, so that a bad shard does not end a run of days
    files = find_shards(hp.train_files) if hp.num_iterations else []
    per_pass = sum((shard_length(p) - 1) // hp.batch_tokens for p in files)
    if hp.num_iterations > per_pass and not (hp.repeat_data and per_pass):
        raise InputError(f"{hp.train_files} has tokens for {per_pass} steps, the run needs {hp.num_iterations}: "
                         "add shards" + (", or --repeat_data" if per_pass else ""))
    available = (shard_length(find_shards(hp.val_files)[0]) - 1) // hp.block_size * hp.block_size
    if hp.val_tokens % hp.block_size or hp.val_tokens > available:
        raise InputError(f"--val_tokens {hp.val_tokens} must be a multiple of --block_size {hp.block_size}, and at "
                         f"most {available} for {hp.val_files}")
    return dataclasses.replace(hp, micro_batch=micro_batch)


# -----------------------------------------------------------------------------
# Optimizer, schedule, one step

def cpu_info():
    """-> (the CPU's model, the set of its instruction-set flags, empty where the system does not say)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    entries = {key.strip(): value.strip() for key, value in lines}
    flags = entries.get("flags") or entries.get("Features") or ""
    return entries.get("model name") or platform.processor() or platform.machine(), set(flags.split())


def cpu_cores(cgroups=Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: a container's quota counts, rounded down; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # cgroups 2, then 1
        try:
            words = " ".join((cgroups / name).read_text(encoding="utf-8") for name in names).split()
            quota, period = map(int, words)
        except (OSError, ValueError):  # not there, or "max": no limit
            continue
        if quota > 0:
            cores = min(cores, quota // period)
    return max(1, cores)


def has_bf16(device) -> bool:
    """Whether the device multiplies bf16 natively: CUDA from Ampere on, CPUs with AVX512-BF16, AMX or Arm's bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(cpu_info()[1] & {"avx512_bf16", "amx_bf16", "bf16"})


def keep_freed_memory():
    """Tells glibc to keep what is freed: a step on a CPU otherwise faults its activations in again, every time."""
    if os.name != "posix":  # Windows: CDLL(None) is an error
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)   # M_MMAP_MAX


def configure_optimizer(model, hp, device):
    """AdamW; weight decay only on matrices and tables, not on biases and LayerNorm gains."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in params if p.ndim >= 2], weight_decay=hp.weight_decay),
              dict(params=[p for p in params if p.ndim < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=hp.learning_rate, betas=(hp.beta1, hp.beta2), eps=1e-8, fused=hp.fused)


def get_lr(step: int, hp) -> float:
    """Linear warm-up over warmup_iters steps, then a cosine to a tenth at num_iterations."""
    if step < hp.warmup_iters:
        return hp.learning_rate * (step + 1) / hp.warmup_iters
    progress = min(1.0, (step - hp.warmup_iters) / max(1, hp.num_iterations - hp.warmup_iters))
    return hp.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def build(hp, device):
    """-> (model, compiled model, optimizer, autocast context); the levers of hp act here and nowhere else."""
    torch.set_float32_matmul_precision("high" if hp.tf32 else "highest")
    torch.manual_seed(hp.seed)
    if hp.init_from == "scratch":
        padded = -(-hp.vocab_size // 64) * 64 if hp.pad_vocab else hp.vocab_size
        model = GPT(GPTConfig(hp.block_size, hp.vocab_size, padded, hp.n_layer, hp.n_head, hp.n_embd), hp.flash)
    else:
        model = from_pretrained(hp.init_from, hp.flash)
    model.to(device)
    optimizer = configure_optimizer(model, hp, device)
    compiled = torch.compile(model, dynamic=False) if hp.compile else model
    bf16 = hp.bf16 and has_bf16(device)
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    return model, compiled, optimizer, autocast


def train_step(model, optimizer, autocast, inputs, targets, hp, lr: float):
    """One optimizer step on this process's (sequences, block_size) -> (mean loss, gradient norm), 0-dim tensors."""
    micro_steps = len(inputs) // hp.micro_batch
    loss_sum = torch.zeros((), device=inputs.device)
    for i, (x, y) in enumerate(zip(inputs.split(hp.micro_batch), targets.split(hp.micro_batch))):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = i == micro_steps - 1  # gradients travel once a step
        with autocast:
            loss = model(x, y) / micro_steps
        loss.backward()
        loss_sum += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss_sum, norm


@torch.no_grad()
def validate(model, autocast, batches, device) -> torch.Tensor:
    """-> float64 (sum of the loss over all counted tokens, their number) of this rank's batches."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for x, y in batches:
        with autocast:
            loss = model(x, y)
        n = (y >= 0).sum()
        total += torch.stack([loss.double() * n, n.double()])
    return total


# -----------------------------------------------------------------------------
# The run

def nvidia_smi() -> str:
    """Its table without the list of processes, which has paths; "" where there is no nvidia-smi, or it fails."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if done.returncode:
        return ""
    end = done.stdout.find("Processes:")
    if end < 0:
        return done.stdout
    return done.stdout[:done.stdout.rfind("+--", 0, end)]


def peak_memory_mib(device):
    """-> (allocated, reserved). On a CPU the process's peak resident memory stands for both; None where the system
    does not tell it, as on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mib = peak >> 20 if sys.platform == "darwin" else peak >> 10  # in bytes there, else in KiB
    return mib, mib


def describe_machine(device, world_size: int) -> str:
    """Versions, then nvidia-smi without its list of processes, or the CPU. The wording is train_gpt.py's: the tools
    that read logs compare runs on equal hardware."""
    lines = [f"Running Python {sys.version}",
             f"Running PyTorch {torch.version.__version__} compiled for CUDA {torch.version.cuda}"]
    if device.type == "cuda":
        lines.append(nvidia_smi() or f"{torch.cuda.get_device_name(device)} with world_size={world_size}: "
                     "there is no nvidia-smi that works")
    else:
        name, flags = cpu_info()
        known = "avx avx2 f16c fma avx512f avx512bw avx512vl avx512_bf16 avx512_fp16 avx512_vnni amx_tile amx_bf16 " \
                "amx_int8 asimd bf16 i8mm sve"
        lines.append(f"CPU: {name}, {cpu_cores()} cores, {torch.get_num_threads()} threads a process, "
                     f"instruction sets: {' '.join(f for f in known.split() if f in flags)}")
    lines.append(f"{world_size} process{'es' if world_size > 1 else ''} on {device.type}")
    return "\n".join(lines)


def codec(vocab_size: int):
    """-> (encode: str -> list of ids, token_bytes: id -> bytes) of the two vocabularies: bytes, or GPT-2's BPE."""
    if vocab_size == 257:
        def encode(text):
            return list(text.encode("utf-8", "surrogateescape"))  # the C locale reads a prompt's bytes that way

        def token_bytes(token):
            return bytes([token]) if token < 256 else b""

        return encode, token_bytes
    if vocab_size != 50257:
        raise InputError(f"a vocabulary of {vocab_size} tokens has no text: only 257 (bytes) and 50257 (GPT-2's) have; "
                         "to train on it, --samples 0 --hellaswag 0")
    sys.path.append(str(ROOT / "data"))
    from gpt2_bpe import gpt2_encoding
    try:
        encoding = gpt2_encoding()
    except Exception as e:  # what the data scripts raise is already one line
        raise InputError(f"GPT-2's vocabulary cannot be had: {e}") from e
    return encoding.encode_ordinary, encoding.decode_single_token_bytes


def main(argv=None):
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal's encoding lacks must not end a run
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args, hp = parse_args(argv)
    hp = check(hp, world_size)
    if hp.samples or hp.hellaswag:
        encode, token_bytes = codec(hp.vocab_size)
    if hp.hellaswag:
        sys.path.append(str(ROOT / "evals"))
        import hellaswag
        try:
            items = hellaswag.load_items(limit=hp.hellaswag)  # now: a missing network shows before training
        except hellaswag.DataError as e:
            raise InputError(f"{e}, or train without it: --hellaswag 0") from e

    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cpu_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    master = rank == 0

    def synchronized_time() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def mean_over_ranks(x):  # in place
        if world_size > 1:
            dist.all_reduce(x)
            x /= world_size
        return x

    model, compiled, optimizer, autocast = build(hp, device)
    wrapped = compiled
    if world_size > 1:
        wrapped = DistributedDataParallel(compiled, device_ids=[device.index] if device.type == "cuda" else None)

    run_id = str(uuid.uuid4())
    log_file, bar = None, None
    if master:
        from tqdm import tqdm
        os.makedirs(args.log_dir, exist_ok=True)
        log_file = open(f"{args.log_dir}/{run_id}.txt", "x", newline="", encoding="utf-8")
        print(f"{args.log_dir}/{run_id}.txt")
        bar = tqdm(total=hp.num_iterations, unit="step", dynamic_ncols=True, leave=False, file=sys.stdout,
                   disable=not sys.stdout.isatty())

    def log(line: str, console: bool = True):
        if master:
            print(line, file=log_file, flush=True)
            if console:
                print(line, flush=True) if bar.disable else bar.write(line)

    for part in (SOURCE, "=" * 100, describe_machine(device, world_size), "=" * 100):
        log(part, console=False)
    settings = dict(model="gpt2", track=args.track, world_size=world_size, **dataclasses.asdict(hp))
    log(f"hyperparameters: {json.dumps(settings)}", console=False)
    log(f"parameters: {sum(p.numel() for p in model.parameters()):,}  "
        f"activations: {'bf16' if hp.bf16 and has_bf16(device) else 'float32'}  "
        f"tokens a step: {hp.batch_tokens:,} in {hp.batch_tokens // (hp.block_size * world_size * hp.micro_batch)} "
        f"micro-steps x {world_size} processes x {hp.micro_batch} sequences of {hp.block_size}")

    # Warm-up: everything is compiled and every kernel run once on random tokens, then all that was learned is undone
    saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    generator = torch.Generator().manual_seed(rank)
    shape = (2, hp.batch_tokens // world_size // hp.block_size, hp.block_size)
    for _ in range(3 if hp.num_iterations else 0):
        x, y = torch.randint(hp.vocab_size, shape, generator=generator).to(device)
        train_step(wrapped, optimizer, autocast, x, y, hp, hp.learning_rate)
    blank = torch.zeros(hp.micro_batch, hp.block_size, dtype=torch.int64, device=device)
    validate(compiled, autocast, [(blank, blank)], device)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    del saved

    def evaluate(step: int) -> float:
        total = validate(compiled, autocast, validation_batches(hp, rank, world_size, device), device)
        mean_over_ranks(total)
        val_loss = (total[0] / total[1]).item()
        log(f"step:{step}/{hp.num_iterations} val_loss:{val_loss:.4f} train_time:{1000 * training_time:.0f}ms "
            f"step_avg:{1000 * training_time / max(step, 1):.2f}ms")
        if hp.hellaswag:
            with autocast:
                counts = hellaswag.score(model, items, encode, hp.vocab_size, hp.block_size, device, rank, world_size)
            log(f"hellaswag step:{step} {hellaswag.summary(counts)}")
        if hp.samples and master:
            prompt = torch.tensor([encode(hp.sample_prompt)] * hp.samples, device=device)
            with autocast:
                rows = model.generate(prompt, 32 if hp.vocab_size > 257 else 100,
                                      generator=torch.Generator(device).manual_seed(step))
            for row in rows.tolist():
                text = b"".join(map(token_bytes, row)).decode(errors="replace")
                log(f"sample step:{step} {json.dumps(text)}")  # as JSON it stays on one line
        return val_loss

    # The timed loop: the clock runs only while training
    batches = training_batches(hp, rank, world_size, device)
    clock = synchronized_time()
    training_time, met = 0.0, None  # met: (step, training time) of the first validation at the target
    for step in range(hp.num_iterations + 1):
        last = step == hp.num_iterations
        if last or (hp.val_loss_every and step % hp.val_loss_every == 0):
            val_loss = evaluate(step)
            if met is None and val_loss <= hp.target_val_loss:
                met = step, training_time
            clock = synchronized_time()
        if last:
            break
        loss, norm = train_step(wrapped, optimizer, autocast, *next(batches), hp, get_lr(step, hp))
        loss, norm = mean_over_ranks(loss).item(), norm.item()
        clock, elapsed = synchronized_time(), synchronized_time() - clock
        training_time += elapsed
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise InputError(f"step {step + 1}: loss {loss}, gradient norm {norm}; lower the --learning_rate")
        log(f"step:{step + 1}/{hp.num_iterations} train_time:{1000 * training_time:.0f}ms "
            f"step_avg:{1000 * training_time / (step + 1):.2f}ms train_loss:{loss:.4f} lr:{get_lr(step, hp):.2e} "
            f"grad_norm:{norm:.3f} tok/s:{hp.batch_tokens / elapsed:.0f}", console=master and bar.disable)
        if master:
            bar.set_postfix_str(f"loss {loss:.3f}, {1000 * elapsed:.0f} ms", refresh=False)
            bar.update()

    verdict = f"met at step {met[0]} after {met[1]:.2f} s of training" if met else "not met"
    bits = f" ({val_loss / math.log(2):.4f} bits per byte)" if hp.vocab_size == 257 else ""
    speed = hp.batch_tokens * hp.num_iterations / training_time if training_time else 0
    log(f"target {hp.target_val_loss}: {verdict}; val_loss {val_loss:.4f}{bits} after {training_time:.2f} s, "
        f"{speed:,.0f} tokens/s")
    if peak := peak_memory_mib(device):
        log(f"peak memory allocated: {peak[0]} MiB reserved: {peak[1]} MiB")
    if master:
        bar.close()
        log_file.close()  # complete, whatever becomes of the checkpoint
        if hp.save_checkpoint:
            path = Path("checkpoints") / run_id / "model.safetensors"
            save_model(model, path)
            print(f"saved {path}")
    if world_size > 1:
        # DDP's reducer must go first. Were it the last to hold the group, it would wait for gloo's threads without
        # releasing the GIL, and one of those may need the GIL to free a tensor: one run in fifteen never ended.
        del wrapped
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        if os.environ.get("RANK", "0") == "0" or isinstance(error, OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)  # at once: no waiting for ranks that wait in a collective
    except KeyboardInterrupt:
        sys.exit("interrupted")
