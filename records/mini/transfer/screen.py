"""
Trains mini with and without the ideas of the reference list (docs/transfer.md). All ideas are switches of
one compiled model, so a process compiles it once and trains many runs. Run it from the repository's root:

    python records/mini/transfer/plan.py 3000            writes plan_3000.json, a design of 32 runs
    python records/mini/transfer/screen.py PLAN.json     trains its runs that PLAN.jsonl lacks
    python records/mini/transfer/screen.py PLAN.json 0/2 every second one: two processes share a plan
    python records/mini/transfer/score.py RUNS.jsonl SLOPES.jsonl

The runs in this folder are of 28 and 29 November 2026. Those on bytes need the data of commit 0b2572d.

A plan is {"size": {...}, "runs": [{"ideas": {"gelu": 1}, "seed": 3, "size": {...}}, ...]}. A size has settings
of train_gpt.py, and "lr", a factor of all learning rates.
"""

import fcntl
import functools
import json
import math
import os
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.nn.functional as F
from torch import nn

import train_gpt as T

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# An idea is on (1) or off (0). The first ones remove a part of the recipe.
IDEAS = [
    "no_ve", "tables", "ve_gate", "gelu", "no_nesterov", "no_normuon", "cosine", "no_xsa", "o_init",
    "no_x0", "no_leaky", "bigrams", "key_offset", "mtp", "shifted", "full_rotary", "gate", "polar",
    "no_smear", "no_vlambdas", "no_unet", "cwd", "backout", "tied", "no_softcap", "no_qknorm", "no_docs",
]  # fmt: skip
OTHER = ["adam", "no_rotary"]
# "no_window_warmup", "no_zero_init" and the ideas of the optimizers need no tensor
VARIANTS = ["gelu", "long_windows"]  # each is another compiled model

POLAR = (  # https://arxiv.org/abs/2505.16932, constants of record 38
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def settings(size):
    size = dict(size)
    lr = size.pop("lr", 1)
    hp = replace(T.MINI, **size)
    rates = {name: lr * getattr(hp, name) for name in ("head_lr", "embed_lr", "scalar_lr", "muon_lr")}
    warmup = max(1, round(hp.num_iterations * 111 / 360))
    return replace(hp, muon_momentum_warmup=warmup, **rates)


# -----------------------------------------------------------------------------
# The model


class Model(nn.Module):
    def __init__(self, hp, gelu, long_windows):
        super().__init__()
        self.hp, self.gelu = hp, gelu
        self.long = range(hp.num_layers) if long_windows else hp.long_window_layers
        d, vocab, n = hp.model_dim, hp.vocab_size, hp.num_layers
        k = 2 * hp.num_value_embeds
        self.embed = nn.Embedding(vocab, d, dtype=T.DTYPE)
        # one row of tables per layer with value embeddings; shared: the first ones
        self.value_embeds = nn.Embedding(k * vocab, d, dtype=T.DTYPE)
        self.bigram_embed = nn.Embedding(5 * vocab, d, dtype=T.DTYPE)
        self.qkv_w = nn.ParameterList([nn.Parameter(torch.empty(3, d, d)) for _ in range(n)])
        self.attn_c_proj = nn.ModuleList(T.CastedLinear(d, d) for _ in range(n))
        self.c_fc = nn.ModuleList(T.CastedLinear(d, 4 * d) for _ in range(n))
        self.c_proj = nn.ModuleList(T.CastedLinear(4 * d, d) for _ in range(n))
        self.lm_head = T.CastedLinear(d, T.pad_vocab(vocab))
        h = hp.num_heads
        scalars = dict(
            value_lambdas=(n, 2),
            residual_lambdas=(n, 2),
            skip_weights=(n // 2,),
            xsa=(n, h),
            ve_gate=(n, 12 * h),
            attn_gate=(n, 12 * h),
            smear_gate=(12,),
            smear_scale=(1,),
            bigram_lambdas=(n,),
            back=(1,),
        )
        # as vectors: Adam trains them
        self.scalars = nn.ParameterDict(
            {k: nn.Parameter(torch.zeros(math.prod(v))) for k, v in scalars.items()}
        )
        self.shapes = scalars
        for name in IDEAS + OTHER:
            self.register_buffer(f"f_{name}", torch.tensor(0.0), persistent=False)
        self.register_buffer("ahead", torch.tensor([1.0, 0.0, 0.0]), persistent=False)
        self.register_buffer("rot", torch.zeros(2, hp.train_seq_len, d // h // 2), persistent=False)
        stationary = torch.zeros(d // h // 2, dtype=torch.bool)
        stationary[d // h // 4 :] = True
        self.register_buffer("stationary", torch.cat([stationary, stationary]), persistent=False)

    def switch(self, ideas):
        self.ideas = ideas
        for name in IDEAS + OTHER:
            getattr(self, f"f_{name}").fill_(ideas.get(name, 0))
        seq, half = self.rot.shape[1:]
        if ideas.get("full_rotary"):
            freqs = (1 / 1024) ** torch.linspace(0, 1, half)
        else:
            freqs = F.pad((1 / 1024) ** torch.linspace(0, 1, half // 2), (0, half - half // 2))
        if ideas.get("no_rotary"):
            freqs = 0 * freqs
        theta = torch.outer(torch.arange(seq), freqs)
        self.rot.copy_(torch.stack([theta.cos(), theta.sin()]))

    @torch.no_grad()
    def init_weights(self, seed):
        for name, p in self.named_parameters():
            rng = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            if name == "scalars.value_lambdas":
                p.fill_(0.5)
            elif name == "scalars.residual_lambdas":
                p.copy_(torch.tensor([1.0, 0.0]).repeat(self.hp.num_layers))
            elif name == "scalars.skip_weights":
                p.fill_(1)
            elif name == "scalars.bigram_lambdas":
                p.fill_(0.1)
            elif name == "scalars.back":
                p.fill_(0.5)
            elif p.ndim == 1 or name == "bigram_embed.weight":
                p.zero_()
            elif name == "value_embeds.weight":
                p.copy_(torch.randn(p.shape, generator=rng))
                if self.ideas.get("tables"):
                    p.mul_(0.01)  # record 63
            elif name == "embed.weight":
                p.copy_(torch.randn(p.shape, generator=rng))
                if self.ideas.get("tied"):
                    p.mul_(0.02)
            elif name == "lm_head.weight":
                p.zero_()
            elif name.startswith("c_proj") and not self.ideas.get("no_zero_init"):
                p.zero_()
            elif name.startswith("attn_c_proj") and not (
                self.ideas.get("o_init") or self.ideas.get("no_zero_init")
            ):
                p.zero_()
            else:
                bound = 3**0.5 * 0.5 * p.size(-1) ** -0.5
                p.uniform_(-bound, bound, generator=rng)

    def s(self, name):
        return self.scalars[name].view(self.shapes[name])

    def attention(self, i, x, ve, mask, long):
        h = self.hp.num_heads
        B, S, _ = x.shape
        q, k, v = (
            F.linear(x, self.qkv_w[i].flatten(0, 1).type_as(x)).unflatten(-1, (3, h, -1)).unbind(2)
        )
        cos, sin = self.rot[0, :S, None], self.rot[1, :S, None]
        q = rotate(torch.where(self.f_no_qknorm > 0, q, T.norm(q)), cos, sin)
        k = rotate(torch.where(self.f_no_qknorm > 0, k, T.norm(k)), cos, sin)
        if long:  # partial key offset (record 49)
            shifted = F.pad(k, (0, 0, 0, 0, 1, 0))[:, :-1]
            k = torch.where((self.f_key_offset > 0) & self.stationary, shifted, k)
        lambdas = self.s("value_lambdas")[i]
        lambdas = lambdas + self.f_no_vlambdas * (1 - lambdas)
        v = lambdas[0] * v
        if ve is not None:
            gate = 2 * F.linear(x[..., :12], self.s("ve_gate")[i].view(h, 12).type_as(x)).sigmoid()
            gate = 1 + self.f_ve_gate * (gate.float() - 1)
            v = v + (lambdas[1] * (1 - self.f_no_ve) * gate).type_as(v)[..., None] * ve.view_as(v)
        y = T.portable_attention(q, k, v, mask, 0.12)
        dot = (y * v).sum(-1, keepdim=True)
        square = (v * v).sum(-1, keepdim=True).clamp_min(1e-8)
        fraction = ((1 - self.f_no_xsa) * self.s("xsa")[i].tanh()).type_as(y)[:, None]
        y = y - fraction * (dot / square) * v
        gate = F.linear(x[..., :12], self.s("attn_gate")[i].view(h, 12).type_as(x)).sigmoid()
        y = y * (1 + self.f_gate * (gate.float() - 1)).type_as(y)[..., None]
        return self.attn_c_proj[i](y.flatten(2))

    def mlp(self, i, x):
        x = self.c_fc[i](x)
        if self.gelu:
            x = F.gelu(x)
        else:
            slope = self.hp.relu_slope * (1 - self.f_no_leaky)
            x = x.clamp_min(0) + slope.type_as(x) * x.clamp_max(0)  # torch.where wouldn't be vectorized
            x = x * x
        return self.c_proj[i](x)

    def forward(self, tokens, targets, window):
        hp = self.hp
        n, vocab, k = hp.num_layers, hp.vocab_size, hp.num_value_embeds
        B, S = tokens.shape
        docs = T.document_ids(tokens, hp.eot_token)
        sequences = torch.arange(B, dtype=docs.dtype).repeat_interleave(S) + 1
        docs = torch.where(self.f_no_docs > 0, sequences, docs)
        span = math.ceil(hp.max_window / 128)
        long = T.make_mask(docs, window, span)
        short = T.make_mask(docs, (window // 2).clamp_min(1), max(1, span // 2))
        ve = {}
        for i in range(k):
            ve[i] = self.value_embeds(tokens + i * vocab)
            own = (self.f_tables > 0).int() * k * vocab
            ve[n - k + i] = self.value_embeds(tokens + i * vocab + own)
        previous = F.pad(tokens, (1, 0))[:, :-1].long()
        row = ((36313 * tokens.long()) ^ (27191 * previous)) % (5 * vocab - 1)
        bigram = self.f_bigrams.type_as(self.bigram_embed.weight) * self.bigram_embed(row)
        x = self.embed(tokens)
        x = T.smear(x, self.s("smear_gate"), (1 - self.f_no_smear) * self.s("smear_scale"))
        x = x0 = T.norm(x)
        skips = []
        lam = self.s("residual_lambdas")
        for i in range(n):
            if i >= n - n // 2:
                x = x + ((1 - self.f_no_unet) * self.s("skip_weights")[i - n]).type_as(x) * skips.pop()
            x = (
                lam[i, 0] * x
                + (1 - self.f_no_x0) * lam[i, 1] * x0
                + self.s("bigram_lambdas")[i] * bigram
            )
            mask = long if i in self.long else short
            x = x + self.attention(i, T.norm(x), ve.get(i), mask, i in hp.long_window_layers)
            x = x + self.mlp(i, T.norm(x))
            if i < n // 2:
                skips.append(x)
            if i == 2 * n // 3:
                back = x
        x = x - (self.f_backout * self.s("back")).type_as(x) * back
        x = T.norm(x).flatten(0, 1)
        head = torch.where(self.f_tied > 0, self.embed.weight.float(), self.lm_head.weight[:vocab])
        z = (
            F.linear(x, F.pad(head, (0, 0, 0, T.pad_vocab(vocab) - vocab)).type_as(x)).float()
            / hp.model_dim**0.5
        )
        cap = 30 - 7 * self.f_shifted
        logits = cap * torch.sigmoid((z + 5 * self.f_shifted) / 7.5)
        logits = torch.where(self.f_no_softcap > 0, z, logits)
        lse = logits.exp().sum(-1).log()
        ahead = torch.stack([torch.roll(targets, -j, 1) for j in range(3)], -1)
        inside = torch.arange(S)[:, None] + torch.arange(3) < S
        w = torch.where(inside, self.ahead, 0.0).expand(B, S, 3).flatten(0, 1)
        return (w * (lse[:, None] - logits.gather(1, ahead.flatten(0, 1)))).sum()


def rotate(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x)


# -----------------------------------------------------------------------------
# Optimizers


def polar_express(G):
    X = G.to(T.DTYPE)
    X = X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    X = X.reshape(-1, *G.shape[-2:])
    for a, b, c in POLAR:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X.view(G.shape)


class Muon(T.Muon):
    ideas: dict

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            g = torch.stack([T.wide(p.grad) for p in group["params"]])
            state = self.state[group["params"][0]]
            m = state.setdefault("momentum_buffer", torch.zeros_like(g))
            m.lerp_(g, 1 - group["momentum"])
            u = m if self.ideas.get("no_nesterov") else g.lerp(m, group["momentum"])
            u = (
                polar_express(u)
                if self.ideas.get("polar")
                else T.zeropower_via_newtonschulz5(u, group["ns_steps"])
            )
            if not self.ideas.get("no_normuon"):
                u = T.normalize_channels(u, state, group["beta2"])
            u = u.bfloat16()
            for p, update in zip(group["params"], u):
                scale = max(1, p.size(-2) / p.size(-1)) ** 0.5
                w = T.wide(p)
                if self.ideas.get("cwd"):
                    v = update.float()
                    update = v + (v * w >= 0) * (1.2 * group["lr"] * w)
                w.add_(update, alpha=-group["lr"] * scale)


def optimizers(model, hp, ideas):
    params = dict(head=[], embedding=[], matrix=[], scalar=[])
    for name, p in model.named_parameters():
        kind = (
            "head"
            if name == "lm_head.weight"
            else "embedding"
            if "embed" in name
            else "matrix"
            if p.ndim > 1
            else "scalar"
        )
        params[kind].append(p)
    groups = [
        dict(params=params["head"], lr=hp.head_lr),
        dict(params=params["embedding"], lr=hp.embed_lr),
        dict(params=params["scalar"], lr=hp.scalar_lr),
    ]
    if ideas.get("adam"):
        groups.append(dict(params=params["matrix"], lr=ideas["adam"]))
    adam = torch.optim.Adam(groups, betas=(hp.adam_beta1, hp.adam_beta2), eps=1e-10, fused=True)
    if ideas.get("adam"):
        return [adam]
    muon = Muon(params["matrix"], hp.muon_lr, hp.muon_momentum, hp.ns_steps, hp.muon_beta2)
    muon.ideas = ideas
    return [adam, muon]


def lr_mult(step, hp, cosine):
    remaining = 1 - step / hp.num_iterations
    if remaining >= hp.cooldown_frac:
        return 1.0
    w = remaining / hp.cooldown_frac
    if cosine:
        w = 0.5 - 0.5 * math.cos(math.pi * w)
    return w + (1 - w) * hp.final_lr_frac


# -----------------------------------------------------------------------------
# Runs

MODELS = {}


def get_model(hp, ideas):
    variant = [bool(ideas.get(name)) for name in VARIANTS]
    key = (hp.model_dim, hp.num_heads, hp.num_layers, hp.vocab_size, *variant)
    if key not in MODELS:
        MODELS[key] = Model(hp, *variant)
        if not os.getenv("EAGER"):
            MODELS[key].compile(dynamic=False)
    return MODELS[key]


@functools.cache
def tokens_of(pattern):
    (file,) = T.find_shards(pattern)
    return T.read_tokens(file, 0, T.shard_length(file))


MICRO = 2  # sequences of a pass


def train(hp, ideas, seed, val_tokens):
    """Returns the validation loss and the seconds of training."""
    model = get_model(hp, ideas)
    model.switch(ideas)
    model.init_weights(seed)
    model.zero_grad(set_to_none=True)
    opts = optimizers(model, hp, ideas)
    stream = tokens_of(hp.train_files)
    seq, per = hp.train_seq_len, hp.batch_tokens
    micro = min(MICRO, per // seq)
    start_time = time.perf_counter()
    for step in range(hp.num_iterations):
        for opt in opts:
            for group in opt.param_groups:
                initial = group.setdefault("initial_lr", group["lr"])
                group["lr"] = initial * lr_mult(step, hp, ideas.get("cosine"))
                if isinstance(opt, Muon):
                    group["momentum"] = T.get_muon_momentum(step, hp)
        if ideas.get("mtp"):
            thirds = 3 * step / hp.num_iterations
            model.ahead.copy_(
                torch.tensor([1.0, 0.5 * min(1, max(0, 2 - thirds)), 0.25 * max(0, 1 - thirds)])
            )
        window = T.get_window_blocks(hp.num_iterations if ideas.get("no_window_warmup") else step, hp)
        x, y = T.to_batch(stream[step * per : (step + 1) * per + 1], seq)
        for xs, ys in zip(x.split(micro), y.split(micro)):
            (model(xs, ys, window) / (per // seq)).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    seconds = time.perf_counter() - start_time
    return evaluate(model, hp, tokens_of(hp.val_files)[: val_tokens + 1]), seconds


def evaluate(model, hp, tokens):
    """Returns the loss on an array of tokens; the last one is only a target."""
    model.ahead.copy_(torch.tensor([1.0, 0.0, 0.0]))
    window = T.get_window_blocks(hp.num_iterations, hp)
    seq = hp.train_seq_len
    block = min(MICRO, hp.batch_tokens // seq) * seq
    total = count = 0
    for start in range(0, (len(tokens) - 1) // block * block, block):
        x, y = T.to_batch(tokens[start : start + block + 1], seq)
        total += model(x, y, window).item()  # the training graph: no second compilation
        count += block
    return total / count


def key_of(run):
    return json.dumps({k: run[k] for k in ("size", "ideas", "seed")}, sort_keys=True)


def main():
    plan = json.loads(Path(sys.argv[1]).read_text())
    out = sys.argv[1].replace(".json", ".jsonl")
    part, parts = map(int, sys.argv[2].split("/")) if len(sys.argv) > 2 else (0, 1)
    done = set()
    if os.path.exists(out):
        done = {key_of(json.loads(line)) for line in open(out)}
    for number, run in enumerate(plan["runs"]):
        run = dict(run, size={**plan["size"], **run.get("size", {})})
        if number % parts != part or key_of(run) in done:
            continue
        hp = settings(run["size"])
        loss, seconds = train(hp, run["ideas"], run["seed"], plan.get("val_tokens", 131_072))
        with open(out, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(run | dict(loss=loss, seconds=seconds)) + "\n")
        print(f"{number}: {loss:.4f} {seconds:.1f} s {run['seed']} {run['ideas']}", flush=True)


if __name__ == "__main__":
    main()
