"""
Any checkpoint of this repository, or OpenAI's GPT-2 from the hub, as one thing that evaluates and decodes.

    checkpoint = load("model.safetensors")   # of train_gpt.py or of baseline/train_gpt2.py; or load("gpt2-xl")
    for tokens in generate(checkpoint, prompt, 100): ...

A checkpoint is data: safetensors and JSON. Nothing is unpickled and nothing that it contains is run; its keys and
shapes must be those of the model that its metadata describes. Both models are evaluated in float32.
The two forward passes below walk the modules of the training scripts with a key/value cache, which those, made for
training, do not have.
"""
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see train_gpt.py
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "baseline")]
sys.path.append(str(ROOT / "tools"))
import train_gpt
import train_gpt2

MAX_CONTEXT = 4096  # of the speedrun's model, whose own limit is the size of its rotary tables: a gigabyte and more


class InputError(Exception):
    """Something the user can put right; the message is the one line that says how."""


@dataclasses.dataclass
class Checkpoint:
    model: torch.nn.Module
    forward: Callable    # (model, ids (B, t), cache or None, last_only) -> logits (B, t or 1, at least vocab_size)
    cache_shape: tuple   # layers, heads, head_dim
    context: int         # tokens the model can look back on, the current one included
    vocab_size: int
    eot: int             # the token that begins a document
    encode: Callable     # str -> list of token ids
    token_bytes: Callable  # token id -> bytes

    @property
    def device(self):
        return next(self.model.parameters()).device


# -----------------------------------------------------------------------------
# Forward passes with a cache. Greedy decoding with and without it gives the same tokens

class Cache:
    """The tokens so far and their documents (B, capacity), their keys and values (layers, B, H, capacity, D)."""

    def __init__(self, shape, batch: int, capacity: int, device):
        layers, heads, head_dim = shape
        self.keys = torch.empty(layers, batch, heads, capacity, head_dim, device=device)
        self.values = torch.empty_like(self.keys)
        self.tokens, self.docs = torch.zeros(2, batch, capacity, dtype=torch.int64, device=device)
        self.length = 0

    def append(self, layer: int, k, v, first: int = 0):
        """k, v (B, H, t, D) of the new tokens -> keys and values from position `first` on, the new ones included."""
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length:end] = k
        self.values[layer, :, :, self.length:end] = v
        return self.keys[layer, :, :, first:end], self.values[layer, :, :, first:end]


def gpt2_forward(model, ids, cache=None, last_only=False):
    """train_gpt2.GPT on ids (B, t), the continuation of what is in the cache -> logits (B, t, padded vocab)."""
    (B, t), config = ids.shape, model.config
    cache = cache or Cache((config.n_layer, config.n_head, config.n_embd // config.n_head), B, t, ids.device)
    positions = cache.length + torch.arange(t, device=ids.device)
    visible = positions[:, None] >= torch.arange(cache.length + t, device=ids.device)  # (t, keys)
    x = model.wte(ids) + model.wpe(positions)
    for i, block in enumerate(model.h):
        qkv = block.attn.c_attn(block.ln_1(x)).view(B, t, 3, config.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, t, D) each
        k, v = cache.append(i, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + block.attn.c_proj(y.transpose(1, 2).reshape(B, t, -1))
        x = x + block.mlp(block.ln_2(x))
    cache.length += t
    return F.linear(model.ln_f(x[:, -1:] if last_only else x), model.wte.weight)


def rotate(rotary, x, positions):
    """train_gpt.Rotary at given positions (t,): x (B, t, H, D) -> the same shape."""
    cos, sin = rotary.cos[positions, None], rotary.sin[positions, None]  # (t, 1, D/2)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


def ngram_embeddings(model, cache, start, end):
    """(B, end - start, C) of the tokens there, from them and the few before them that an n-gram reaches back to."""
    hp, B = model.hp, len(cache.tokens)
    first = max(0, start - hp.max_ngram + 1)
    # the function of the training script takes one row of tokens: the rows' documents are told apart
    docs = cache.docs[:, first:end] + 1 + torch.arange(B, device=cache.docs.device)[:, None] * (end + 1)
    rows = train_gpt.ngram_rows(cache.tokens[:, first:end].flatten(), docs.flatten(), hp.max_ngram, hp.ngram_rows)
    return model.ngram_embed(rows).view(B, end - first, -1)[:, start - first:]


def speedrun_forward(model, ids, cache=None, last_only=False):
    """train_gpt.GPT on ids (B, t), the continuation of what is in the cache -> logits (B, t, padded vocab), capped.

    A key is visible iff it is not later, in the same document, and its block of 128 is fewer than the layer's window
    (at its final size) before the query's. Only keys that the window reaches are read, so that a token's cost is
    bounded however long the text grows."""
    (B, t), hp, norm = ids.shape, model.hp, train_gpt.norm
    cache = cache or Cache((hp.num_layers, hp.num_heads, hp.head_dim), B, t, ids.device)
    start, end = cache.length, cache.length + t
    before = cache.docs[:, start - 1:start] if start else torch.zeros(B, 1, dtype=torch.int64, device=ids.device)
    cache.tokens[:, start:end] = ids
    cache.docs[:, start:end] = before + (ids == hp.eot_token).cumsum(1)
    long_window = train_gpt.get_window_blocks(hp.num_iterations, hp)
    q_pos = torch.arange(start, end, device=ids.device)
    masks = {}  # window in blocks -> (first key, visible (B, 1, t, keys))
    for window in {long_window, max(1, long_window // 2)}:
        first = max(0, start // train_gpt.BLOCK_SIZE - window + 1) * train_gpt.BLOCK_SIZE
        k_pos = torch.arange(first, end, device=ids.device)
        blocks = q_pos[:, None] // train_gpt.BLOCK_SIZE - k_pos // train_gpt.BLOCK_SIZE
        near = (q_pos[:, None] >= k_pos) & (blocks < window)  # (t, keys)
        same = cache.docs[:, start:end, None] == cache.docs[:, None, first:end]
        masks[window] = first, (near & same)[:, None]

    value_embeds = [table(ids) for table in model.value_embeds]  # each (B, t, H*D)
    x = model.embed(ids)
    if model.ngram_embed is not None:
        x = x + ngram_embeddings(model, cache, start, end)
    x = x0 = norm(x)
    skips, half = [], hp.num_layers // 2
    for i, block in enumerate(model.blocks):
        if i >= hp.num_layers - half:
            x = x + model.skip_weights[i - (hp.num_layers - half)] * skips.pop()
        x = block.lambdas[0] * x + block.lambdas[1] * x0
        if block.attn is not None:
            attn = block.attn
            q, k, v = F.linear(norm(x), attn.qkv_w.flatten(0, 1)).view(B, t, 3, hp.num_heads, hp.head_dim).unbind(2)
            q, k = rotate(attn.rotary, norm(q), q_pos), rotate(attn.rotary, norm(k), q_pos)
            v = attn.lambdas[0] * v
            if i in model.ve_of_layer:
                v = v + attn.lambdas[1] * value_embeds[model.ve_of_layer[i]].view_as(v)
            first, visible = masks[long_window if i in hp.long_window_layers else max(1, long_window // 2)]
            k, v = cache.append(i, k.transpose(1, 2), v.transpose(1, 2), first)
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible, scale=0.12)
            x = x + attn.c_proj(y.transpose(1, 2).reshape(B, t, -1))
        x = x + block.mlp(norm(x))
        if i < half:
            skips.append(x)
    cache.length = end
    return train_gpt.softcap(model.lm_head(norm(x[:, -1:] if last_only else x)), hp.model_dim)


# -----------------------------------------------------------------------------
# Loading

def read_fields(cls, text: str, where: str):
    """A dataclass from JSON metadata: exactly its fields, each of its type. Raises InputError."""
    try:
        values = json.loads(text)
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    except (ValueError, AttributeError, TypeError):
        raise InputError(f"{where}: its metadata is not a JSON object") from None
    fields = {f.name: f.type for f in dataclasses.fields(cls)}
    if differing := sorted(fields.keys() ^ values.keys()):
        raise InputError(f"{where}: made by another version of the training script (field {differing[0]})")
    for name, kind in fields.items():
        allowed = {float: (float, int), int: (int,), bool: (bool,), str: (str,)}.get(kind, (tuple,))
        if not isinstance(values[name], allowed) or (isinstance(values[name], bool) and kind is not bool):
            raise InputError(f"{where}: its metadata has {name} = {values[name]!r}")
    return cls(**values)


def load_weights(make_model, num_layers: int, file, where: str):
    """make_model() with the tensors of an open safetensors file, whose keys and shapes must be the model's."""
    keys = set(file.keys())
    if not 0 < num_layers <= len(keys):
        raise InputError(f"{where}: {num_layers} layers, but only {len(keys)} tensors")
    with torch.device("meta"):  # shapes alone: a wrong checkpoint is refused before any memory is spent on it
        shapes = {k: tuple(v.shape) for k, v in make_model().state_dict().items()}
    if differing := sorted(shapes.keys() ^ keys):
        problem = "is missing" if differing[0] in shapes else "is not one of the model's"
        raise InputError(f"{where}: tensor {differing[0]} {problem}")
    for key, shape in shapes.items():
        found = tuple(file.get_slice(key).get_shape())
        if found != shape:
            raise InputError(f"{where}: tensor {key} has shape {found}, its metadata asks for {shape}")
    model = make_model()
    for key, parameter in model.state_dict().items():
        parameter.copy_(file.get_tensor(key))
    return model


def load(name: str, device="cpu") -> Checkpoint:
    """A model.safetensors, a folder that has one, or gpt2, gpt2-medium, gpt2-large, gpt2-xl. Raises InputError."""
    from safetensors import SafetensorError, safe_open
    try:
        if name in train_gpt2.FAMILY:
            return gpt2_checkpoint(train_gpt2.from_pretrained(name), device)
        path = Path(name) / "model.safetensors" if Path(name).is_dir() else Path(name)
        if not path.is_file():
            raise InputError(f"{name}: no such checkpoint; give a model.safetensors or {', '.join(train_gpt2.FAMILY)}")
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("model") == "gpt2":
                config = read_fields(train_gpt2.GPTConfig, metadata.get("config", ""), str(path))
                if min(dataclasses.astuple(config)) < 1 or config.n_embd % config.n_head:
                    raise InputError(f"{path}: its metadata describes no possible model")
                model = load_weights(lambda: train_gpt2.GPT(config), config.n_layer, file, str(path))
                return gpt2_checkpoint(model, device)
            if metadata.get("model") == "speedrun":
                hp = read_fields(train_gpt.Hyperparameters, metadata.get("hyperparameters", ""), str(path))
                train_gpt.check_hyperparameters(hp, 1)
                context = min(MAX_CONTEXT, max(hp.train_seq_len, hp.val_seq_len))
                hp = dataclasses.replace(hp, train_seq_len=context, val_seq_len=context)
                model = load_weights(lambda: train_gpt.GPT(hp, torch.float32), hp.num_layers, file, str(path))
                shape = (hp.num_layers, hp.num_heads, hp.head_dim)
                return Checkpoint(model.eval().to(device), speedrun_forward, shape, context, hp.vocab_size,
                                  hp.eot_token, *train_gpt2.codec(hp.vocab_size))
            raise InputError(f"{path}: not saved by train_gpt.py or train_gpt2.py (its metadata names no model)")
    except SafetensorError as e:
        raise InputError(f"{name}: not a whole safetensors file ({e})") from None
    except (train_gpt.InputError, train_gpt2.InputError) as e:
        raise InputError(str(e) if name in str(e) else f"{name}: {e}") from None


def gpt2_checkpoint(model, device) -> Checkpoint:
    c = model.config
    eot = c.vocab_size - 1  # in both vocabularies
    return Checkpoint(model.eval().to(device), gpt2_forward, (c.n_layer, c.n_head, c.n_embd // c.n_head),
                      c.block_size, c.vocab_size, eot, *train_gpt2.codec(c.vocab_size))


# -----------------------------------------------------------------------------
# Decoding

@torch.no_grad()
def generate(checkpoint: Checkpoint, prompt, max_tokens: int, temperature=1.0, top_k=50, generator=None,
             use_cache=True):
    """Continues prompt (B, T), T >= 1; yields max_tokens times the next token of each row, (B,) int64.

    temperature 0 is greedy; top_k 0 means all tokens. Where the context is full, decoding goes on from its last half.
    """
    c, (B, T) = checkpoint, prompt.shape
    ids = F.pad(prompt, (0, max_tokens))  # room for what comes
    start, cache = 0, None                # where the context begins
    for now in range(T, T + max_tokens):
        if now - start > c.context:
            start, cache = now - c.context // 2, None
        if use_cache and cache is not None:
            logits = c.forward(c.model, ids[:, now - 1:now], cache, last_only=True)
        else:
            capacity = min(c.context, T + max_tokens - start)
            cache = Cache(c.cache_shape, B, capacity, ids.device) if use_cache else None
            logits = c.forward(c.model, ids[:, start:now], cache, last_only=True)
        logits = logits[:, -1, :c.vocab_size].float()  # padding tokens are never drawn
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            top, candidates = logits.topk(min(top_k or c.vocab_size, c.vocab_size))
            choice = torch.multinomial((top / temperature).softmax(-1), 1, generator=generator)
            token = candidates.gather(1, choice)[:, 0]
        ids[:, now] = token
        yield token
