"""
Reproduces GPT-2 124M: the model of Radford et al. 2019 ("Language Models are Unsupervised Multitask
Learners"), with the optimizer's constants of GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165,
appendix B). The rest follows Karpathy's "Let's reproduce GPT-2" and llm.c.

    ./run.sh --recipe gpt2           GPT-2 124M on all GPUs, or mini on a CPU
    ./run.sh --recipe gpt2 --help    every hyperparameter and its default
    ./run.sh --recipe gpt2 --track fineweb --init_from gpt2 --num_iterations 0

The last command computes the loss of OpenAI's weights. Data, log and checkpoints are those of
train_gpt.py. Each speedup is an option, so that gpu/levers.py can measure them one by one.
Shapes in comments: B sequences of S tokens, H heads of D channels, C = n_embd, V rows of wte.
"""
# -----------------------------------------------------------------------------
# 1. Preamble

import contextlib
import itertools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import train_gpt  # before torch: it sets variables that torch reads

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from recipes import openai_gpt2
from train_gpt import (
    DEVICE,
    DTYPE,
    RANK,
    WORLD_SIZE,
    clock,
    distributed_data_generator,
    require,
    setting,
)

# Each source under its name: a log begins with this
LINE = "-" * 40
SOURCES = {
    "recipes/gpt2.py": Path(__file__).read_bytes().decode(),
    "recipes/openai_gpt2.py": Path(openai_gpt2.__file__).read_bytes().decode(),
    "train_gpt.py": train_gpt.SOURCE,
}
SOURCE = "".join(f"\n\n{LINE}\n# {name}\n{LINE}\n\n{text}" for name, text in SOURCES.items())

# -----------------------------------------------------------------------------
# 2. Model. Its parameters have the names of OpenAI's weights on the Hugging Face hub.


def explicit_attention(q, k, v):
    """Causal attention that stores the matrix of all scores. q, k, v (B, H, S, D) -> (B, H, S, D)"""
    S, D = q.shape[-2:]
    future = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT) * D**-0.5  # (B, H, S, S)
    scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(dim=-1) @ v


class CausalSelfAttention(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.n_head = hp.n_head
        self.flash = hp.flash
        self.c_attn = nn.Linear(hp.n_embd, 3 * hp.n_embd)
        self.c_proj = nn.Linear(hp.n_embd, hp.n_embd)

    def forward(self, x):  # (B, S, C) -> (B, S, C)
        qkv = self.c_attn(x).unflatten(-1, (3, self.n_head, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = explicit_attention(q, k, v)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.c_fc = nn.Linear(hp.n_embd, 4 * hp.n_embd)
        self.c_proj = nn.Linear(4 * hp.n_embd, hp.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hp.n_embd)
        self.attn = CausalSelfAttention(hp)
        self.ln_2 = nn.LayerNorm(hp.n_embd)
        self.mlp = MLP(hp)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT(hp)(input_seq (B, S) int, target_seq (B, S) int64) is the mean cross-entropy in nats."""

    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        rows = train_gpt.pad_vocab(hp.vocab_size) if hp.pad_vocab else hp.vocab_size
        self.wte = nn.Embedding(rows, hp.n_embd)  # of tokens
        self.wpe = nn.Embedding(hp.block_size, hp.n_embd)  # of positions
        self.h = nn.ModuleList(Block(hp) for _ in range(hp.n_layer))
        self.ln_f = nn.LayerNorm(hp.n_embd)
        self.init_weights()

    def init_weights(self):
        """Normal with standard deviation 0.02; zero for biases; gains of LayerNorm stay 1. The
        2 n_layer projections into the residual stream are smaller, so that its variance doesn't
        grow with the number of layers."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 * (2 * self.hp.n_layer) ** -0.5)
            elif p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def logits(self, input_seq):  # (B, S) -> (B, S, V)
        positions = torch.arange(input_seq.size(1), device=input_seq.device)
        x = self.wte(input_seq) + self.wpe(positions)  # (B, S, C)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)  # the head has the weights of wte

    def forward(self, input_seq, target_seq):
        logits = self.logits(input_seq).flatten(0, 1).float()
        return F.cross_entropy(logits, target_seq.flatten())


# -----------------------------------------------------------------------------
# 3. Hyperparameters. `--name value` changes any of them.


@dataclass(frozen=True)
class Hyperparameters:
    track: str = setting("fineweb", "set of defaults: fineweb, edu or mini")
    # data
    train_files: str = setting("data/fineweb10B/fineweb_train_*.bin", "training shards")
    val_files: str = setting("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    val_tokens: int = setting(10_485_760, "validation tokens; fixed, to compare losses")
    repeat_data: bool = setting(False, "true to begin again after the last shard")
    batch_tokens: int = setting(524_288, "tokens per step, summed over all processes")
    block_size: int = setting(1024, "tokens per sequence, and the longest context")
    sequences_per_pass: int = setting(32, "sequences in a micro-batch; fewer if it doesn't divide them")
    vocab_size: int = setting(50257, "number of token ids")
    # model
    init_from: str = setting("scratch", "scratch, or OpenAI's gpt2, gpt2-medium, -large or -xl")
    n_layer: int = setting(12, "number of blocks")
    n_head: int = setting(12, "attention heads per block")
    n_embd: int = setting(768, "channels of the residual stream")
    # optimization
    num_iterations: int = setting(19_073, "training steps; 0: only validate")
    warmup_iters: int = setting(715, "steps in which the learning rate rises")
    learning_rate: float = setting(6e-4, "AdamW's highest learning rate")
    final_lr_frac: float = setting(0.1, "final learning rate, relative to the highest")
    weight_decay: float = setting(0.1, "weight decay of matrices and embeddings")
    beta1: float = setting(0.9, "decay of AdamW's first moment")
    beta2: float = setting(0.95, "decay of AdamW's second moment")
    grad_clip: float = setting(1.0, "highest norm of the gradient; above, it is scaled down")
    # speedups
    tf32: bool = setting(True, "true to multiply float32 matrices in TF32, on GPUs")
    bf16: bool = setting(True, "true for bf16 autocast, where the hardware has bf16")
    compile: bool = setting(True, "true to compile the model")
    flash: bool = setting(True, "true for scaled_dot_product_attention; slower in mini on a CPU")
    pad_vocab: bool = setting(True, "true to pad wte to a multiple of 64 rows")
    fused: bool = setting(True, "true for fused AdamW")
    # the run
    seed: int = setting(1337, "seed of the initial weights")
    warmup_steps: int = setting(3, "untimed steps on random tokens; the weights are then reset")
    val_loss_every: int = setting(250, "steps between validations; 0: only at the end")
    target_val_loss: float = setting(3.28, "validation loss to reach")


FINEWEB = Hyperparameters()
# FineWeb-Edu
EDU = replace(
    FINEWEB,
    track="edu",
    train_files="data/finewebedu10B/finewebedu_train_*.bin",
    val_files="data/finewebedu10B/finewebedu_val_*.bin",
    repeat_data=True,
    target_val_loss=3.29,
)
MINI = replace(
    FINEWEB,
    track="mini",
    train_files=train_gpt.MINI.train_files,
    val_files=train_gpt.MINI.val_files,
    val_tokens=train_gpt.MINI.val_tokens,
    repeat_data=True,
    batch_tokens=2048,
    block_size=128,
    sequences_per_pass=16,
    vocab_size=train_gpt.MINI.vocab_size,
    n_layer=3,
    n_head=7,
    n_embd=224,
    num_iterations=3500,
    warmup_iters=200,
    learning_rate=1.4e-3,
    final_lr_frac=0.0,
    weight_decay=0.05,
    beta1=0.8,
    beta2=0.998,
    flash=False,
    target_val_loss=train_gpt.MINI.target_val_loss,
)
TRACKS = {"fineweb": FINEWEB, "edu": EDU, "mini": MINI}


def parse_arguments(argv):
    args, hp = train_gpt.parse_arguments(argv, TRACKS)
    names = ["scratch", *openai_gpt2.SIZES]
    require(hp.init_from in names, f"--init_from {hp.init_from}: must be one of {', '.join(names)}")
    if hp.init_from != "scratch":
        n_layer, n_head, n_embd = openai_gpt2.SIZES[hp.init_from]
        # OpenAI's weights have no padding. The logits of rows of zeros would be 0, and those of tokens
        # are negative, so padding would get most of the probability.
        hp = replace(hp, n_layer=n_layer, n_head=n_head, n_embd=n_embd, pad_vocab=False)
    return args, hp


def check_hyperparameters(hp, world_size):
    """Refuses sizes that don't divide each other, and what OpenAI's weights don't fit."""
    names = ["batch_tokens", "val_tokens", "block_size", "n_layer", "n_head", "n_embd", "grad_clip"]
    for name in names:
        require(getattr(hp, name) > 0, f"--{name} must be more than 0")
    require(hp.num_iterations >= 0, "--num_iterations must be at least 0")
    for name in ["batch_tokens", "val_tokens"]:
        total = getattr(hp, name)
        require(
            total % (world_size * hp.block_size) == 0,
            f"--{name} {total}: must be a multiple of {world_size} (processes) times "
            f"--block_size {hp.block_size}",
        )
    require(
        hp.n_embd % hp.n_head == 0, f"--n_embd {hp.n_embd}: must be a multiple of --n_head {hp.n_head}"
    )
    require(
        hp.init_from == "scratch" or (hp.vocab_size, hp.block_size) == (50257, 1024),
        f"--init_from {hp.init_from}: needs --track fineweb or edu, and their --block_size 1024",
    )


# -----------------------------------------------------------------------------
# 4. Optimizer and schedule


def build_model(hp):
    """Called again, it returns the same weights."""
    torch.set_float32_matmul_precision("high" if hp.tf32 else "highest")
    torch.manual_seed(hp.seed)
    model = GPT(hp)
    if hp.init_from != "scratch":
        openai_gpt2.load_weights(model, openai_gpt2.download(hp.init_from))
    if hp.compile:
        model.compile(dynamic=False)
    return model.to(DEVICE)


def autocast(hp):
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=hp.bf16 and DTYPE == torch.bfloat16)


def build_optimizer(model, hp):
    """AdamW. Matrices and embeddings decay; biases and gains of LayerNorm don't."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        dict(params=matrices, weight_decay=hp.weight_decay),
        dict(params=vectors, weight_decay=0.0),
    ]
    betas = (hp.beta1, hp.beta2)
    return torch.optim.AdamW(groups, lr=hp.learning_rate, betas=betas, eps=1e-8, fused=hp.fused)


def get_lr(step, hp):
    """Linear warm-up over warmup_iters steps, then a cosine decay to final_lr_frac."""
    if step < hp.warmup_iters:
        return hp.learning_rate * (step + 1) / hp.warmup_iters
    progress = (step - hp.warmup_iters) / (hp.num_iterations - hp.warmup_iters)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    return hp.learning_rate * (hp.final_lr_frac + (1 - hp.final_lr_frac) * cosine)


# -----------------------------------------------------------------------------
# 5. A step, and a validation


def training_batches(hp):
    """Yields this rank's tokens of each batch, int32 (batch_tokens / WORLD_SIZE + 1,)."""
    while True:
        yield from distributed_data_generator(hp.train_files, hp.batch_tokens, RANK, WORLD_SIZE)
        if not hp.repeat_data:
            return


def train_step(model, optimizer, tokens, step, hp):
    """Trains on this rank's tokens (local + 1,). Returns their mean loss."""
    inputs, targets = train_gpt.to_batch(tokens, hp.block_size)
    per_pass = math.gcd(hp.sequences_per_pass, len(inputs))  # passes of one size, for one compilation
    passes = list(zip(inputs.split(per_pass), targets.split(per_pass)))
    total = 0
    for i, (x, y) in enumerate(passes, start=1):
        with autocast(hp):
            loss = model(x, y) / len(passes)
        is_last = i == len(passes)
        with train_gpt.summed_gradients(model) if is_last else contextlib.nullcontext():
            (loss / WORLD_SIZE).backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step, hp)
    optimizer.step()
    optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluate(model, hp):
    """Returns the mean loss on the validation tokens. Each rank computes every WORLD_SIZE-th sequence."""
    sequences = distributed_data_generator(hp.val_files, hp.block_size)
    mine = itertools.islice(sequences, RANK, hp.val_tokens // hp.block_size, WORLD_SIZE)
    tokens = torch.stack(list(mine)).to(DEVICE)  # (n, S + 1)
    micro_batch = math.gcd(hp.sequences_per_pass, len(tokens))
    losses = []
    for batch in tokens.split(micro_batch):
        with autocast(hp):
            losses.append(model(batch[:, :-1], batch[:, 1:].long()))
    return train_gpt.mean_of_ranks(losses)


def warm_up(model, hp):
    """Trains on random tokens: this compiles the kernels, connects the processes and allocates
    memory. The weights must then be set again."""
    optimizer = build_optimizer(model, hp)
    tokens = torch.randint(hp.vocab_size, (hp.batch_tokens // WORLD_SIZE + 1,), dtype=torch.int32)
    for _ in range(min(hp.warmup_steps, hp.num_iterations)):
        train_step(model, optimizer, tokens, 0, hp)


# -----------------------------------------------------------------------------
# 6. The timed loop


def train(run, model, optimizer):
    """Trains until the last step."""
    hp = run.hp
    train_losses = []  # since the last validation; reading them would wait for the GPU
    batches = training_batches(hp)
    for _ in range(run.step):
        next(batches)  # the checkpoint was trained on these
    train_ms = run.train_ms  # up to the last validation
    start_ms = clock()
    for step in range(run.step, hp.num_iterations + 1):
        # --------------- validation
        last_step = step == hp.num_iterations
        if last_step or (hp.val_loss_every and step % hp.val_loss_every == 0):
            train_ms += clock() - start_ms
            run.train_ms = train_ms
            val_loss = evaluate(model, hp)
            train_gpt.save_and_log(run, model, [optimizer], val_loss, train_losses)
            start_ms = clock()
        if last_step:
            break
        # --------------- training
        train_losses.append(train_step(model, optimizer, next(batches), step, hp))
        run.step += 1
        run.train_ms = train_ms + 1000 * time.perf_counter() - start_ms  # doesn't wait for the GPU
        run.write_step()
    run.write_result(val_loss, hp.batch_tokens * run.step)


def check_inputs(args, hp):
    """Checks settings and shards before anything slow begins. Returns checksums of the tokens."""
    check_hyperparameters(hp, WORLD_SIZE)
    sequences = hp.val_tokens // hp.block_size
    checksums = [0, train_gpt.token_checksum(hp.val_files, hp.block_size, sequences, hp.vocab_size)]
    steps = hp.num_iterations
    if steps and hp.repeat_data:
        lengths = [train_gpt.shard_length(file) for file in train_gpt.find_shards(hp.train_files)]
        once = sum((length - 1) // hp.batch_tokens for length in lengths)
        steps = min(steps, max(once, 1))
    if steps:
        checksums[0] = train_gpt.token_checksum(hp.train_files, hp.batch_tokens, steps, hp.vocab_size)
        train_gpt.check_files(hp)
    return checksums


def train_runs(argv):
    """Trains --num_runs times. Only the first run compiles."""
    args, hp = parse_arguments(argv)
    checkpoint = train_gpt.load_checkpoint(args, SOURCE)
    if checkpoint:
        hp = replace(hp, **checkpoint["settings"])
    checksums = check_inputs(args, hp)
    if args.print_settings:
        return print(json.dumps(asdict(hp)))
    train_gpt.init_processes()
    model = build_model(hp)
    for seed in range(hp.seed, args.last_seed + 1):
        hp = replace(hp, seed=seed)
        optimizer = build_optimizer(model, hp)
        table = train_gpt.parameter_table(model, [optimizer])
        run = train_gpt.start_run(args, hp, SOURCE, checksums, checkpoint, table)
        warm_up(model, hp)
        model.load_state_dict(build_model(hp).state_dict())  # the initial weights of this seed
        if checkpoint:
            train_gpt.load_states(checkpoint, run, model, [optimizer])
        train(run, model, optimizer)
        checkpoint = None  # the other seeds have none
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def main(argv):
    return train_gpt.main(argv, train_runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
