"""
The baseline of the speedrun: a reproduction of GPT-2 124M.

The model is that of Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners").
The optimizer's constants are GPT-3's (Brown et al. 2020, https://arxiv.org/abs/2005.14165,
appendix B). The rest follows Karpathy's "Let's reproduce GPT-2" and llm.c. The script reads the
same shards as train_gpt.py in the same order and writes the same kind of log, so the tools in
tools/ can compare the two.

    python baseline/train_gpt2.py --track mini            # one process, CPU or GPU
    torchrun --standalone --nproc_per_node=8 baseline/train_gpt2.py --track fineweb
    python baseline/train_gpt2.py --track fineweb --init_from gpt2 --num_iterations 0

The last command evaluates OpenAI's weights. README.md says which data and packages each needs.

Each speedup is an option: --tf32, --bf16, --compile, --flash, --pad_vocab and --fused, each true or
false. levers.py in this folder measures them one after another.

The file reads top to bottom: model, OpenAI's weights, data, hyperparameters, machine, optimizer and
training step, log, evaluation, training loop.
"""
with open(__file__, newline="", encoding="utf-8") as f:
    SOURCE = f.read()  # written to the log, so that a run can be repeated from its log alone

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
import sys
import time
import uuid
from pathlib import Path
from typing import Callable

# PyTorch and OpenMP read these variables when torch is imported. train_gpt.py says what they do.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if sys.platform == "linux" and platform.machine() == "x86_64":
    os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent  # the repository


class InputError(Exception):
    """A user error: printed as one line, without a traceback."""


# -----------------------------------------------------------------------------
# Model

@dataclasses.dataclass
class GPTConfig:
    block_size: int = 1024          # longest context, in tokens
    vocab_size: int = 50257         # number of tokens that occur in the data
    padded_vocab_size: int = 50304  # rows of the token embedding table
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


# layers, heads and width of OpenAI's models (Radford et al. 2019, table 2)
FAMILY = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        self.n_head = config.n_head
        self.flash = flash
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = explicit_attention(q, k, v)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y)


def explicit_attention(q, k, v):
    """Causal attention that materializes the (T, T) matrix. q, k, v and the result: (B, H, T,
    D)."""
    T, D = q.shape[-2:]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) * D ** -0.5  # (B, H, T, T)
    scores = scores.masked_fill(future, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        x = F.gelu(self.c_fc(x), approximate="tanh")
        return self.c_proj(x)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, flash: bool):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config, flash)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """GPT-2. Its parameters have the names of OpenAI's checkpoints on the Hugging Face hub."""

    def __init__(self, config: GPTConfig, flash: bool = True):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, flash) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        for name, parameter in self.named_parameters():
            self.initialize(name, parameter)

    def initialize(self, name: str, parameter: nn.Parameter):
        """Normal with standard deviation 0.02; zero for biases; LayerNorm gains stay 1. The 2 *
        n_layer projections into the residual stream are scaled down, so that its variance doesn't
        grow with the number of layers."""
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith("c_proj.weight"):
            nn.init.normal_(parameter, std=0.02 * (2 * self.config.n_layer) ** -0.5)
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)

    def forward(self, idx, targets=None):
        """idx (B, T) int64 -> logits (B, T, padded_vocab_size). With targets (B, T) int64 -> the
        mean cross-entropy in nats, a scalar; targets of -1 don't count."""
        T = idx.size(1)
        assert T <= self.config.block_size, f"{T} tokens > block_size {self.config.block_size}"
        position = torch.arange(T, device=idx.device)
        x = self.wte(idx) + self.wpe(position)  # (B, T, C)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        logits = F.linear(x, self.wte.weight)  # the head shares the token embedding's weights
        if targets is None:
            return logits
        logits = logits.flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_tokens, temperature=1.0, top_k=50, generator=None):
        """Appends max_tokens sampled tokens to idx (B, T). Temperature 0 is greedy. There is no
        key/value cache; evals/sample.py has one."""
        for _ in range(max_tokens):
            context = idx[:, -self.config.block_size:]
            logits = self(context)[:, -1, :self.config.vocab_size].float()
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                top, candidates = logits.topk(min(top_k, logits.size(-1)))
                probabilities = (top / temperature).softmax(-1)
                choice = torch.multinomial(probabilities, 1, generator=generator)
                token = candidates.gather(1, choice)
            idx = torch.cat([idx, token], dim=1)
        return idx


# -----------------------------------------------------------------------------
# OpenAI's weights, and saving ours

# OpenAI's Conv1D layers store (in, out), nn.Linear stores (out, in)
CONV1D_WEIGHTS = (
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)
DOWNLOAD_AGAIN = (
    "delete this model from the hub's cache (~/.cache/huggingface/hub by default) and run the same "
    "command again"
)
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")


def load_openai_weights(model: GPT, path):
    """Copies the weights of a GPT-2 `model.safetensors` from the Hugging Face hub into the model.
    Raises InputError if a tensor is missing, unexpected or of another shape."""
    from safetensors import safe_open
    own = model.state_dict()
    with safe_open(path, "pt") as file:
        keys = {}
        for key in file.keys():
            name = key.removeprefix("transformer.")
            if not name.endswith(MASK_BUFFERS):
                keys[name] = key
        missing = sorted(own.keys() - keys.keys())
        if missing:
            raise InputError(f"{path}: key {missing[0]} is missing; {DOWNLOAD_AGAIN}")
        for name, key in keys.items():
            weight = file.get_tensor(key)
            if name.endswith(CONV1D_WEIGHTS):
                weight = weight.T
            if name == "lm_head.weight":
                if not torch.equal(weight, file.get_tensor(keys["wte.weight"])):
                    raise InputError(
                        f"{path}: {key} differs from the token embedding, but GPT-2 shares them; "
                        f"{DOWNLOAD_AGAIN}"
                    )
                continue
            if name not in own:
                raise InputError(f"{path}: unexpected key {key}; {DOWNLOAD_AGAIN}")
            if weight.shape != own[name].shape:
                raise InputError(
                    f"{path}: {key} has shape {tuple(weight.shape)} instead of "
                    f"{tuple(own[name].shape)}; {DOWNLOAD_AGAIN}"
                )
            own[name].copy_(weight)


def from_pretrained(name: str, flash: bool = True, offline: bool = False) -> GPT:
    """Returns OpenAI's gpt2, gpt2-medium, gpt2-large or gpt2-xl in float32. The weights are
    downloaded from the Hugging Face hub unless they are in its cache; with offline=True they never
    are. Raises InputError."""
    from huggingface_hub import hf_hub_download
    repo = f"openai-community/{name}"
    try:
        path = hf_hub_download(repo, "model.safetensors", local_files_only=offline)
    except Exception as e:  # the hub's errors share no base class
        if offline:
            raise InputError(f"{name} is not in the hub's cache; run without --offline") from e
        raise InputError(
            f"cannot download {name} from the Hugging Face hub ({type(e).__name__}); check the "
            "network and run the same command again"
        ) from e
    n_layer, n_head, n_embd = FAMILY[name]
    # No padding: the logits of rows of zeros would be 0, and the trained ones are negative, so
    # padding would get most of the probability.
    config = GPTConfig(padded_vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    model = GPT(config, flash)
    load_openai_weights(model, path)
    return model


def save_model(model: GPT, path: Path):
    """Saves the weights as safetensors, with the configuration as JSON metadata. Writes to a
    temporary file, fsyncs, then renames. Raises InputError if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    weights = {}
    for name, weight in model.state_dict().items():
        weights[name] = weight.contiguous().cpu()
    config = json.dumps(dataclasses.asdict(model.config))
    try:
        save_file(weights, temporary, {"model": "gpt2", "config": config})
    except SafetensorError as e:  # safetensors raises this instead of OSError
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot save {path}: {e}") from e
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


# -----------------------------------------------------------------------------
# Data: a shard has 256 int32 (magic number, version, number of tokens, zeros), then uint16 tokens

NEW_SHARD = "delete it and run the data script again (see data/README.md)"


def shard_length(path) -> int:
    """Returns the number of tokens of a shard. Raises InputError unless the header is valid and
    agrees with the file's size."""
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256 or header[0] != 20240520:
        raise InputError(f"{path}: not a token shard (wrong magic number); {NEW_SHARD}")
    if header[1] != 1:
        raise InputError(f"{path}: shard version {header[1]} instead of 1; {NEW_SHARD}")
    count = int(header[2])
    if os.path.getsize(path) != 1024 + 2 * count:
        raise InputError(
            f"{path}: the header says {count} tokens, but the file's size differs; {NEW_SHARD}"
        )
    return count


def load_shard(path, vocab_size: int):
    """Returns all tokens of a shard, (n,) uint16. Raises InputError for a token outside the
    vocabulary."""
    tokens = np.fromfile(path, dtype="<u2", offset=1024, count=shard_length(path))
    largest = tokens.max(initial=0)
    if largest >= vocab_size:
        raise InputError(
            f"{path}: token id {largest} is outside the vocabulary of {vocab_size}; is it the data "
            "of another track?"
        )
    return tokens


def find_shards(pattern: str) -> list[str]:
    """Returns the matching files, sorted. A relative pattern is tried in the current folder, then
    in the repository. Raises InputError if nothing matches."""
    files = sorted(glob.glob(pattern))
    if not files:
        files = sorted(glob.glob(str(ROOT / pattern)))
    if not files:
        script = "cached_fineweb10B.py"
        if "shakespeare" in pattern:
            script = "shakespeare.py"
        raise InputError(f"no shards match {pattern}; make them with: python data/{script}")
    return files


def training_batches(hp, rank: int, world_size: int, device):
    """Yields (inputs, targets), each (sequences of this rank, block_size) int64: this rank's part
    of each batch.

    The order is train_gpt.py's: sorted files, batch_tokens per step. Trailing tokens of a shard
    that don't fill a batch are dropped. After the last shard, the first one follows.
    """
    local_tokens = hp.batch_tokens // world_size
    while True:
        for path in find_shards(hp.train_files):
            tokens = load_shard(path, hp.vocab_size)
            for batch_start in range(0, len(tokens) - hp.batch_tokens, hp.batch_tokens):
                start = batch_start + rank * local_tokens
                chunk = tokens[start:start + local_tokens + 1].astype(np.int64)
                chunk = torch.from_numpy(chunk)
                if device.type == "cuda":
                    chunk = chunk.pin_memory().to(device, non_blocking=True)
                inputs = chunk[:-1].view(-1, hp.block_size)
                targets = chunk[1:].view(-1, hp.block_size)
                yield inputs, targets


def validation_batches(hp, rank: int, world_size: int, device):
    """Yields (inputs, targets), each (micro_batch, block_size) int64: this rank's part of the first
    val_tokens validation tokens, in sequences that don't overlap. The last batch is padded with
    targets of -1, which don't count."""
    tokens = load_shard(find_shards(hp.val_files)[0], hp.vocab_size)
    sequences = hp.val_tokens // hp.block_size
    for first in range(rank * hp.micro_batch, sequences, world_size * hp.micro_batch):
        last = min(first + hp.micro_batch, sequences)
        chunk = tokens[first * hp.block_size:last * hp.block_size + 1].astype(np.int64)
        chunk = torch.from_numpy(chunk).to(device)
        inputs = chunk[:-1].view(-1, hp.block_size)
        targets = chunk[1:].view(-1, hp.block_size)
        missing_rows = hp.micro_batch - (last - first)
        inputs = F.pad(inputs, (0, 0, 0, missing_rows))
        targets = F.pad(targets, (0, 0, 0, missing_rows), value=-1)
        yield inputs, targets


# -----------------------------------------------------------------------------
# Hyperparameters

def setting(default, help: str):
    """A dataclass field with the text that --help prints."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass
class Hyperparameters:
    # data
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "training shards")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    val_tokens: int = setting(10_485_760, "validate on this many tokens of the first shard")
    repeat_data: bool = setting(False, "start again at the first shard after the last one")
    target_val_loss: float = setting(3.28, "validation loss that the run should reach")
    # model
    init_from: str = setting("scratch", "scratch, or OpenAI's gpt2, gpt2-medium, -large or -xl")
    block_size: int = setting(1024, "sequence length and context, in tokens")
    vocab_size: int = setting(50257, "number of tokens in the vocabulary")
    n_layer: int = setting(12, "layers")
    n_head: int = setting(12, "attention heads")
    n_embd: int = setting(768, "model width")
    # optimization
    batch_tokens: int = setting(524_288, "tokens per step, over all processes")
    micro_batch: int = setting(32, "micro-batch size of a process, in sequences")
    num_iterations: int = setting(19_073, "training steps")
    warmup_iters: int = setting(715, "steps of linear learning rate warm-up")
    learning_rate: float = setting(6e-4, "peak learning rate")
    final_lr_frac: float = setting(0.1, "final learning rate as a fraction of the peak")
    weight_decay: float = setting(0.1, "weight decay of matrices and embedding tables")
    beta1: float = setting(0.9, "AdamW's beta1")
    beta2: float = setting(0.95, "AdamW's beta2")
    grad_clip: float = setting(1.0, "largest gradient norm; larger ones are scaled down")
    seed: int = setting(1337, "seed of the initial weights")
    # speedups
    tf32: bool = setting(True, "use TF32 for float32 matrix products on CUDA")
    bf16: bool = setting(True, "use bf16 autocast if the hardware supports bf16")
    compile: bool = setting(True, "use torch.compile")
    flash: bool = setting(True, "use scaled_dot_product_attention")
    pad_vocab: bool = setting(True, "pad the token embedding to a multiple of 64 rows")
    fused: bool = setting(True, "use fused AdamW")
    # evaluation
    val_loss_every: int = setting(250, "steps between validations; 0: validate at the end only")
    hellaswag: int = setting(10_042, "HellaSwag items to score at each validation")
    samples: int = setting(4, "texts to sample at each validation")
    sample_prompt: str = setting("Hello, I'm a language model,", "prompt of the samples")
    save_checkpoint: bool = setting(True, "save the final weights as model.safetensors")


TRACKS = {
    "fineweb": Hyperparameters(),
    # The data and target are those of train_gpt.py's mini track. README.md in this folder says how
    # the other settings were chosen.
    "mini": Hyperparameters(
        train_files="data/shakespeare/shakespeare_train_*.bin",
        val_files="data/shakespeare/shakespeare_val_*.bin",
        val_tokens=389_120,
        repeat_data=True,
        target_val_loss=1.50,
        block_size=128,
        vocab_size=257,
        n_layer=3,
        n_head=7,
        n_embd=224,
        batch_tokens=2048,
        micro_batch=16,
        num_iterations=3500,
        warmup_iters=200,
        learning_rate=1.4e-3,
        final_lr_frac=0.0,
        weight_decay=0.05,
        beta1=0.8,
        beta2=0.998,
        flash=False,
        val_loss_every=250,
        hellaswag=0,
        samples=1,
        sample_prompt="To be, or not to be",
    ),
}


def read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def parse_args(argv=None):
    """Returns (args, hp): a namespace with track, device and log_dir, and the track's
    Hyperparameters with the changes that the command line makes."""
    has_cuda = torch.cuda.is_available()
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument(
        "--track",
        choices=TRACKS,
        default="fineweb" if has_cuda else "mini",
        help="data, model and default settings; default: fineweb with a GPU, otherwise mini",
    )
    first.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if has_cuda else "cpu",
        help="where to train; default: cuda with a GPU, otherwise cpu",
    )
    first.add_argument(
        "--log_dir", default="logs", metavar="DIR", help="folder for logs; default: logs"
    )
    track = TRACKS[first.parse_known_args(argv)[0].track]

    parser = argparse.ArgumentParser(
        parents=[first],
        allow_abbrev=False,
        description="Train GPT-2, the baseline of the speedrun.",
    )
    for field in dataclasses.fields(Hyperparameters):
        default = getattr(track, field.name)
        shown = str(default).replace("%", "%%")
        options = {"type": field.type}
        if field.type is bool:
            options = {"type": read_bool, "nargs": "?", "const": True}
        parser.add_argument(
            f"--{field.name}",
            **options,
            default=default,
            metavar=field.type.__name__,
            help=f"{field.metadata['help']}; default: {shown}",
        )
    args = parser.parse_args(argv)
    if args.device == "cuda" and not has_cuda:
        raise InputError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")
    values = {}
    for field in dataclasses.fields(Hyperparameters):
        values[field.name] = getattr(args, field.name)
    return args, Hyperparameters(**values)


AT_LEAST_ONE = (
    "block_size",
    "vocab_size",
    "n_layer",
    "n_head",
    "n_embd",
    "batch_tokens",
    "micro_batch",
    "val_tokens",
)
ZERO_OR_MORE = (
    "num_iterations",
    "warmup_iters",
    "val_loss_every",
    "hellaswag",
    "samples",
    "weight_decay",
)
POSITIVE = ("learning_rate", "grad_clip", "target_val_loss")


def check(hp: Hyperparameters, world_size: int) -> Hyperparameters:
    """Returns hp with the micro_batch and the model sizes of this run. Raises InputError for
    settings that can't run and for bad shards."""
    check_ranges(hp)
    hp = check_model(hp)
    hp = check_batches(hp, world_size)
    check_data(hp)
    return hp


def check_ranges(hp: Hyperparameters):
    for name in AT_LEAST_ONE:
        value = getattr(hp, name)
        if value < 1:
            raise InputError(f"--{name} must be at least 1, not {value}")
    for name in ZERO_OR_MORE:
        value = getattr(hp, name)
        if not 0 <= value < math.inf:
            raise InputError(f"--{name} must be zero or more, not {value}")
    for name in POSITIVE:
        value = getattr(hp, name)
        if not 0 < value < math.inf:
            raise InputError(f"--{name} must be a positive number, not {value}")
    for name in ("beta1", "beta2"):
        value = getattr(hp, name)
        if not 0 <= value < 1:
            raise InputError(f"--{name} must be in [0, 1), not {value}")
    if not 0 <= hp.final_lr_frac <= 1:
        raise InputError(f"--final_lr_frac must be in [0, 1], not {hp.final_lr_frac}")
    if not -2**63 <= hp.seed < 2**64:  # PyTorch's range
        raise InputError(f"--seed must be in [-2^63, 2^64), not {hp.seed}")
    if hp.samples and not hp.sample_prompt:
        raise InputError(
            "--sample_prompt must not be empty; to train without samples, use --samples 0"
        )


def check_model(hp: Hyperparameters) -> Hyperparameters:
    if hp.init_from != "scratch":
        if hp.init_from not in FAMILY:
            names = ", ".join(FAMILY)
            raise InputError(f"--init_from {hp.init_from}: choose scratch, {names}")
        if hp.vocab_size != 50257 or hp.block_size > 1024:
            raise InputError(
                f"--init_from {hp.init_from} needs GPT-2's tokens (--track fineweb) and a "
                "--block_size of at most 1024"
            )
        n_layer, n_head, n_embd = FAMILY[hp.init_from]
        hp = dataclasses.replace(
            hp, n_layer=n_layer, n_head=n_head, n_embd=n_embd, pad_vocab=False
        )
    if hp.n_embd % hp.n_head:
        raise InputError(f"--n_embd {hp.n_embd} must be a multiple of --n_head {hp.n_head}")
    return hp


def check_batches(hp: Hyperparameters, world_size: int) -> Hyperparameters:
    if hp.batch_tokens % (world_size * hp.block_size):
        raise InputError(
            f"--batch_tokens {hp.batch_tokens} must be a multiple of {world_size} processes x "
            f"--block_size {hp.block_size}"
        )
    sequences = hp.batch_tokens // (world_size * hp.block_size)  # of each process
    micro_batch = min(hp.micro_batch, sequences)
    if sequences % micro_batch:
        raise InputError(
            f"--micro_batch {micro_batch} must divide the {sequences} sequences of a process in "
            "each step"
        )
    return dataclasses.replace(hp, micro_batch=micro_batch)


def check_data(hp: Hyperparameters):
    """Reads the header of each shard now, so that a bad one doesn't end a run after days."""
    steps = 0
    if hp.num_iterations:
        for path in find_shards(hp.train_files):
            steps += (shard_length(path) - 1) // hp.batch_tokens
    if hp.num_iterations > steps and not (hp.repeat_data and steps):
        advice = "add shards (see data/README.md)"
        if steps:
            advice += ", lower --num_iterations or use --repeat_data true"
        raise InputError(
            f"{hp.train_files} has only enough tokens for {steps} steps, and the run needs "
            f"{hp.num_iterations}; {advice}"
        )
    tokens = shard_length(find_shards(hp.val_files)[0])
    available = (tokens - 1) // hp.block_size * hp.block_size
    if hp.val_tokens % hp.block_size or hp.val_tokens > available:
        raise InputError(
            f"--val_tokens {hp.val_tokens} must be a multiple of --block_size {hp.block_size} and "
            f"at most {available} for {hp.val_files}"
        )


# -----------------------------------------------------------------------------
# Machine

@dataclasses.dataclass
class World:
    rank: int
    size: int
    device: torch.device


def start_world(device_name: str) -> World:
    """Chooses the device and joins torchrun's processes, if there are any."""
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    if device_name == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
        keep_freed_memory()
        if "OMP_NUM_THREADS" not in os.environ:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, cpu_cores() // processes))
    if size > 1:
        dist.init_process_group(backend)
    return World(rank, size, device)


def synchronized_time(world: World) -> float:
    """Seconds, read when the GPU has finished its work."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def mean_over_ranks(x, world: World):
    """Replaces x by its mean over all ranks, in place, and returns it."""
    if world.size > 1:
        dist.all_reduce(x)
        x /= world.size
    return x


def cpu_info():
    """Returns (the CPU's model name, the set of its instruction set flags). The set is empty if the
    system doesn't list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    entries = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        entries[key.strip()] = value.strip()
    model = entries.get("model name") or platform.processor() or platform.machine()
    flags = entries.get("flags") or entries.get("Features") or ""
    return model, set(flags.split())


def cpu_cores(cgroups=Path("/sys/fs/cgroup")) -> int:
    """Returns the number of cores that this process may use, at least 1. A container's CPU quota
    counts, rounded down."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    version_2 = ["cpu.max"]  # "quota period"
    version_1 = ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]
    for names in (version_2, version_1):
        try:
            texts = [(cgroups / name).read_text(encoding="utf-8") for name in names]
            quota, period = [int(word) for word in " ".join(texts).split()]
        except (OSError, ValueError):  # no such file, or "max", which means no limit
            continue
        if quota > 0:
            cores = min(cores, quota // period)
    return max(1, cores)


def has_bf16(device) -> bool:
    """Whether the hardware multiplies bf16: GPUs from Ampere on, CPUs with AVX512-BF16, AMX or
    Arm's bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    _, flags = cpu_info()
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def keep_freed_memory():
    """Tells glibc to keep freed memory. Without this, each step on a CPU gets its activations'
    memory from the kernel again, which is slow."""
    if os.name != "posix":  # CDLL(None) fails on Windows
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)   # M_MMAP_MAX


def nvidia_smi() -> str:
    """Returns nvidia-smi's output without its list of processes, which contains paths. Returns ""
    if it can't run."""
    try:
        done = subprocess.run(
            ["nvidia-smi"], capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError:
        return ""
    if done.returncode:
        return ""
    processes = done.stdout.find("Processes:")
    if processes < 0:
        return done.stdout
    return done.stdout[:done.stdout.rfind("+--", 0, processes)]


def peak_memory_mib(device):
    """Returns (allocated, reserved) in MiB. On a CPU both are the process's peak resident memory.
    Returns None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # counts bytes
        mib = peak >> 20
    else:  # counts KiB
        mib = peak >> 10
    return mib, mib


KNOWN_FLAGS = (
    "avx avx2 f16c fma avx512f avx512bw avx512vl avx512_bf16 avx512_fp16 avx512_vnni "
    "amx_tile amx_bf16 amx_int8 asimd bf16 i8mm sve"
).split()


def describe_machine(device, world_size: int) -> str:
    """Returns the versions and the hardware in the words of train_gpt.py's logs. The tools that
    read logs compare runs on equal hardware."""
    cuda = torch.version.cuda
    lines = [
        f"Running Python {sys.version}",
        f"Running PyTorch {torch.version.__version__} compiled for CUDA {cuda}",
    ]
    if device.type == "cuda":
        hardware = nvidia_smi()
        if not hardware:
            name = torch.cuda.get_device_name(device)
            hardware = f"{name} with world_size={world_size}: there is no nvidia-smi that works"
    else:
        name, flags = cpu_info()
        known = " ".join(flag for flag in KNOWN_FLAGS if flag in flags)
        hardware = (
            f"CPU: {name}, {cpu_cores()} cores, {torch.get_num_threads()} threads a process, "
            f"instruction sets: {known}"
        )
    lines.append(hardware)
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    lines.append(f"{processes} on {device.type}")
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# Optimizer, learning rate, training step

def configure_optimizer(model, hp):
    """AdamW. Only matrices and embedding tables have weight decay; biases and LayerNorm gains
    don't."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": hp.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (hp.beta1, hp.beta2)
    return torch.optim.AdamW(groups, lr=hp.learning_rate, betas=betas, eps=1e-8, fused=hp.fused)


def get_lr(step: int, hp) -> float:
    """Linear warm-up for warmup_iters steps, then a cosine decay to final_lr_frac of the peak."""
    if step < hp.warmup_iters:
        return hp.learning_rate * (step + 1) / hp.warmup_iters
    decay_steps = max(1, hp.num_iterations - hp.warmup_iters)
    progress = min(1.0, (step - hp.warmup_iters) / decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    return hp.learning_rate * (hp.final_lr_frac + (1 - hp.final_lr_frac) * cosine)


def build(hp, device):
    """Returns (model, compiled model, optimizer, autocast context). The settings tf32, bf16,
    compile, flash, pad_vocab and fused act here and nowhere else."""
    torch.set_float32_matmul_precision("high" if hp.tf32 else "highest")
    torch.manual_seed(hp.seed)
    if hp.init_from == "scratch":
        padded = hp.vocab_size
        if hp.pad_vocab:
            padded = math.ceil(hp.vocab_size / 64) * 64
        config = GPTConfig(
            hp.block_size, hp.vocab_size, padded, hp.n_layer, hp.n_head, hp.n_embd
        )
        model = GPT(config, hp.flash)
    else:
        model = from_pretrained(hp.init_from, hp.flash)
    model.to(device)
    optimizer = configure_optimizer(model, hp)
    compiled = model
    if hp.compile:
        compiled = torch.compile(model, dynamic=False)
    autocast = contextlib.nullcontext()
    if hp.bf16 and has_bf16(device):
        autocast = torch.autocast(device.type, torch.bfloat16)
    return model, compiled, optimizer, autocast


def train_step(model, optimizer, autocast, inputs, targets, hp, lr: float):
    """One optimizer step.

    inputs, targets: this process's (sequences, block_size) int64.
    Returns (mean loss, gradient norm before clipping), both scalar tensors.
    """
    micro_steps = len(inputs) // hp.micro_batch
    micro_inputs = inputs.split(hp.micro_batch)
    micro_targets = targets.split(hp.micro_batch)
    loss_sum = torch.zeros((), device=inputs.device)
    for i in range(micro_steps):
        if isinstance(model, DistributedDataParallel):
            # average gradients over processes once per step, in the last backward pass
            model.require_backward_grad_sync = i == micro_steps - 1
        with autocast:
            loss = model(micro_inputs[i], micro_targets[i]) / micro_steps
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
    """Returns (sum of the losses of all counted tokens, number of these tokens), (2,) float64."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        with autocast:
            loss = model(inputs, targets)
        count = (targets >= 0).sum().double()
        total += torch.stack([loss.double() * count, count])
    return total


# -----------------------------------------------------------------------------
# Log

class Log:
    """Rank 0's log, <log_dir>/<run_id>.txt, and the console with a progress bar on a terminal. On
    other ranks it does nothing."""

    def __init__(self, log_dir: str, num_iterations: int, rank: int):
        self.run_id = str(uuid.uuid4())
        self.file = None
        is_terminal = sys.stdout.isatty()
        self.bar = tqdm(
            total=num_iterations,
            unit="step",
            dynamic_ncols=True,
            leave=False,
            file=sys.stdout,
            disable=rank > 0 or not is_terminal,
        )
        if rank == 0:
            os.makedirs(log_dir, exist_ok=True)
            path = f"{log_dir}/{self.run_id}.txt"
            self.file = open(path, "x", newline="", encoding="utf-8")
            print(path)

    def write(self, line: str, console: bool = True):
        if self.file is None:
            return
        print(line, file=self.file, flush=True)
        if console and self.bar.disable:
            print(line, flush=True)
        elif console:
            self.bar.write(line)

    def show_step(self, loss: float, seconds: float):
        """Moves the progress bar by one step."""
        self.bar.set_postfix_str(f"loss {loss:.3f}, {1000 * seconds:.0f} ms", refresh=False)
        self.bar.update()

    def close(self):
        self.bar.close()
        if self.file is not None:
            self.file.close()


# -----------------------------------------------------------------------------
# Evaluation

@dataclasses.dataclass
class Run:
    """The parts of a run. `parallel` is the compiled model, wrapped in DistributedDataParallel if
    there are several processes."""
    hp: Hyperparameters
    world: World
    log: Log
    model: GPT
    compiled: nn.Module
    parallel: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: contextlib.AbstractContextManager
    encode: Callable | None       # str -> list of token ids
    token_bytes: Callable | None  # token id -> bytes
    items: list                   # of HellaSwag


def encode_bytes(text: str) -> list[int]:
    # surrogateescape: in the C locale, Python reads the bytes of a --sample_prompt this way
    return list(text.encode("utf-8", "surrogateescape"))


def byte_of_token(token: int) -> bytes:
    return bytes([token]) if token < 256 else b""


def codec(vocab_size: int, offline: bool = False):
    """Returns (encode, token_bytes) for a vocabulary of 257 tokens (bytes) or 50257 (GPT-2's BPE).

    encode: maps a str to a list of token ids.
    token_bytes: maps a token id to bytes.
    offline: don't download GPT-2's vocabulary.
    Raises InputError.
    """
    if vocab_size == 257:
        return encode_bytes, byte_of_token
    if vocab_size != 50257:
        raise InputError(
            f"tokens of a vocabulary of {vocab_size} can't be converted to text; the supported "
            "vocabularies have 257 tokens (bytes) or 50257 tokens (GPT-2's)"
        )
    sys.path.append(str(ROOT / "data"))
    from gpt2_bpe import gpt2_encoding
    try:
        encoding = gpt2_encoding(offline)
    except Exception as e:  # ShardError, or an error of tiktoken
        raise InputError(f"cannot load GPT-2's vocabulary: {e}") from e
    return encoding.encode_ordinary, encoding.decode_single_token_bytes


def load_text_tools(hp):
    """Returns (encode, token_bytes, HellaSwag items), as far as the run needs them. This is called
    before training, so that a missing network shows at once."""
    encode = None
    token_bytes = None
    items = []
    if hp.samples or hp.hellaswag:
        try:
            encode, token_bytes = codec(hp.vocab_size)
        except InputError as e:
            raise InputError(f"{e}; to train without text, use --samples 0 --hellaswag 0") from e
    if hp.hellaswag:
        import hellaswag_scoring  # not at the top, so that a copy of this file can train alone

        try:
            items = hellaswag_scoring.load_items(limit=hp.hellaswag)
        except hellaswag_scoring.DataError as e:
            raise InputError(f"{e}, or use --hellaswag 0 to train without HellaSwag") from e
    return encode, token_bytes, items


def evaluate(run: Run, step: int, training_time: float) -> float:
    """Logs the validation loss, HellaSwag's accuracy and samples. Returns the validation loss in
    nats per token. training_time is in seconds."""
    hp = run.hp
    world = run.world
    batches = validation_batches(hp, world.rank, world.size, world.device)
    total = validate(run.compiled, run.autocast, batches, world.device)
    mean_over_ranks(total, world)
    val_loss = (total[0] / total[1]).item()
    ms = 1000 * training_time
    run.log.write(
        f"step:{step}/{hp.num_iterations} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms "
        f"step_avg:{ms / max(step, 1):.2f}ms"
    )
    if hp.hellaswag:
        log_hellaswag(run, step)
    if hp.samples and world.rank == 0:
        log_samples(run, step)
    return val_loss


def log_hellaswag(run: Run, step: int):
    import hellaswag_scoring

    hp = run.hp
    world = run.world
    try:
        with run.autocast:
            counts = hellaswag_scoring.score(
                run.model,
                run.items,
                run.encode,
                hp.vocab_size,
                hp.block_size,
                world.device,
                world.rank,
                world.size,
            )
    except hellaswag_scoring.DataError as e:
        raise InputError(f"HellaSwag after step {step}: {e}") from e
    run.log.write(f"hellaswag step:{step} {hellaswag_scoring.summary(counts)}")


def log_samples(run: Run, step: int):
    hp = run.hp
    device = run.world.device
    prompt = torch.tensor([run.encode(hp.sample_prompt)] * hp.samples, device=device)
    length = 100 if hp.vocab_size == 257 else 32  # a byte is less text than a BPE token
    generator = torch.Generator(device).manual_seed(step)
    with run.autocast:
        rows = run.model.generate(prompt, length, generator=generator)
    for row in rows.tolist():
        text = b"".join(run.token_bytes(token) for token in row)
        text = text.decode(errors="replace")
        run.log.write(f"sample step:{step} {json.dumps(text)}")  # JSON keeps it on one line


# -----------------------------------------------------------------------------
# Training loop

def log_header(run: Run, track: str):
    """Logs the source, the machine and the settings."""
    hp = run.hp
    world = run.world
    for part in (SOURCE, "=" * 100, describe_machine(world.device, world.size), "=" * 100):
        run.log.write(part, console=False)
    settings = {"model": "gpt2", "track": track, "world_size": world.size}
    settings |= dataclasses.asdict(hp)
    run.log.write(f"hyperparameters: {json.dumps(settings)}", console=False)
    parameters = sum(p.numel() for p in run.model.parameters())
    activations = "bf16" if hp.bf16 and has_bf16(world.device) else "float32"
    micro_steps = hp.batch_tokens // (hp.block_size * world.size * hp.micro_batch)
    run.log.write(
        f"parameters: {parameters:,}  activations: {activations}  "
        f"tokens per step: {hp.batch_tokens:,} in {micro_steps} micro-steps x {world.size} processes "
        f"x {hp.micro_batch} sequences of {hp.block_size}"
    )


def warm_up(run: Run):
    """Compiles the model and runs each kernel on random tokens, then restores the initial weights
    and the optimizer's initial state."""
    hp = run.hp
    device = run.world.device
    weights = {name: w.clone() for name, w in run.model.state_dict().items()}
    optimizer_state = run.optimizer.state_dict()
    generator = torch.Generator().manual_seed(run.world.rank)
    sequences = hp.batch_tokens // run.world.size // hp.block_size
    shape = (2, sequences, hp.block_size)
    steps = 3 if hp.num_iterations else 0
    for _ in range(steps):
        inputs, targets = torch.randint(hp.vocab_size, shape, generator=generator).to(device)
        train_step(
            run.parallel, run.optimizer, run.autocast, inputs, targets, hp, hp.learning_rate
        )
    blank = torch.zeros(hp.micro_batch, hp.block_size, dtype=torch.int64, device=device)
    validate(run.compiled, run.autocast, [(blank, blank)], device)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(optimizer_state)


def train(run: Run) -> list[tuple[int, float, float]]:
    """The training loop. The clock runs during training only, not during evaluation.

    Returns a list of (step, validation loss, training time in seconds), one for each validation.
    """
    hp = run.hp
    world = run.world
    batches = training_batches(hp, world.rank, world.size, world.device)
    validations = []
    training_time = 0.0
    clock = synchronized_time(world)
    for step in range(hp.num_iterations + 1):
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            val_loss = evaluate(run, step, training_time)
            validations.append((step, val_loss, training_time))
            clock = synchronized_time(world)
        if last_step:
            break
        inputs, targets = next(batches)
        lr = get_lr(step, hp)
        loss, norm = train_step(
            run.parallel, run.optimizer, run.autocast, inputs, targets, hp, lr
        )
        loss = mean_over_ranks(loss, world).item()
        norm = norm.item()
        now = synchronized_time(world)
        seconds = now - clock
        clock = now
        training_time += seconds
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise InputError(
                f"step {step + 1}: the loss ({loss}) or the gradient norm ({norm}) is not finite; "
                "lower --learning_rate"
            )
        ms = 1000 * training_time
        run.log.write(
            f"step:{step + 1}/{hp.num_iterations} train_time:{ms:.0f}ms "
            f"step_avg:{ms / (step + 1):.2f}ms train_loss:{loss:.4f} lr:{lr:.2e} "
            f"grad_norm:{norm:.3f} tok/s:{hp.batch_tokens / seconds:.0f}",
            console=run.log.bar.disable,
        )
        run.log.show_step(loss, seconds)
    return validations


def log_result(run: Run, validations: list[tuple[int, float, float]]):
    hp = run.hp
    met = "not met"
    for step, val_loss, seconds in validations:
        if val_loss <= hp.target_val_loss:
            met = f"met at step {step} after {seconds:.2f} s of training"
            break
    _, val_loss, seconds = validations[-1]
    bits = ""
    if hp.vocab_size == 257:
        bits = f" ({val_loss / math.log(2):.4f} bits per byte)"
    speed = 0
    if seconds:
        speed = hp.batch_tokens * hp.num_iterations / seconds
    run.log.write(
        f"target {hp.target_val_loss}: {met}; val_loss {val_loss:.4f}{bits} after {seconds:.2f} s, "
        f"{speed:,.0f} tokens/s"
    )
    peak = peak_memory_mib(run.world.device)
    if peak is not None:
        allocated, reserved = peak
        run.log.write(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")


def main(argv=None):
    if hasattr(sys.stdout, "reconfigure"):
        # print a question mark for a character that the terminal can't show
        sys.stdout.reconfigure(errors="replace")
    args, hp = parse_args(argv)
    hp = check(hp, int(os.environ.get("WORLD_SIZE", 1)))
    encode, token_bytes, items = load_text_tools(hp)
    world = start_world(args.device)
    model, compiled, optimizer, autocast = build(hp, world.device)
    parallel = compiled
    if world.size > 1:
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        parallel = DistributedDataParallel(compiled, device_ids=device_ids)
    log = Log(args.log_dir, hp.num_iterations, world.rank)
    run = Run(
        hp, world, log, model, compiled, parallel, optimizer, autocast, encode, token_bytes, items
    )
    log_header(run, args.track)
    warm_up(run)
    validations = train(run)
    log_result(run, validations)
    log.close()  # before the model is saved, so that the log is complete if that fails
    if hp.save_checkpoint and world.rank == 0:
        path = Path("checkpoints") / log.run_id / "model.safetensors"
        save_model(model, path)
        print(f"saved {path}")
    if world.size > 1:
        # DDP's reducer must be freed before the process group. Otherwise it frees the group itself
        # and waits for gloo's threads while it holds the GIL. One of those threads may need the GIL
        # to free a tensor, and then the process never ends.
        del run.parallel, parallel
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        if os.environ.get("RANK", "0") == "0" or isinstance(error, OSError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)  # at once, because the other ranks may be waiting in a collective
    except KeyboardInterrupt:
        sys.exit("interrupted")
