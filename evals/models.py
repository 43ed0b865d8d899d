"""
Loads a saved model of train_gpt.py or of recipes/gpt2.py, or OpenAI's GPT-2, and generates text.

    model = load("logs/RUN.pt")   # or load("gpt2-xl")
    for tokens in generate(model, prompt, 100):
        ...

Nothing in a file is run. All models compute in float32.

The forward passes here use the modules of the training scripts, but with a key/value cache, which
training doesn't need.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import train_gpt  # before torch: it sets variables that torch reads
from data.gpt2_bpe import gpt2_encoding
from recipes import openai_gpt2
from recipes import gpt2
from train_gpt import BLOCK_SIZE, DEVICE, InputError, norm, require

import torch
import torch.nn.functional as F

# The longest context of train_gpt.py's models in tokens: those of fineweb's validation sequences
# would need a large cache
MAX_CONTEXT = 4096
MODEL_HELP = "a RUN.pt, a safetensors file, or gpt2, gpt2-medium, gpt2-large or gpt2-xl"


@dataclass
class TextModel:
    module: torch.nn.Module
    forward: Callable  # (module, ids (B, t), cache, last_only) -> logits (B, t or 1, V)
    cache_shape: tuple  # layers, heads, head_dim
    context: int  # longest context in tokens
    vocab_size: int  # V may be larger, because it is padded
    eot: int  # the end-of-text token, which begins each document
    encode: Callable  # str -> list of token ids
    token_bytes: Callable  # token id -> bytes

    def new_cache(self, batch, capacity):
        return Cache(self.cache_shape, batch, capacity)

    def logits(self, ids):
        """The logits (B, t, V) of whole texts (B, t)."""
        return self.forward(self.module, ids, self.new_cache(*ids.shape))


# -----------------------------------------------------------------------------
# Key/value cache


class Cache:
    """What the model has read so far, for B texts of at most `capacity` tokens.

    tokens: (B, capacity) int64.
    keys, values: (layers, B, H, capacity, D) float32.
    """

    def __init__(self, shape, batch, capacity):
        layers, heads, head_dim = shape
        self.keys = torch.empty(layers, batch, heads, capacity, head_dim, device=DEVICE)
        self.values = torch.empty_like(self.keys)
        self.tokens = torch.zeros(batch, capacity, dtype=torch.int64, device=DEVICE)
        self.length = 0

    def append(self, layer, k, v):
        """Stores keys and values (B, H, t, D) of the new tokens. Returns all of the layer's."""
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


# -----------------------------------------------------------------------------
# Forward passes. ids: (B, t) int64, the tokens that follow those in the cache. last_only: return
# the logits of the last token only.


def gpt2_forward(module, ids, cache, last_only=False):
    """Runs the GPT of recipes/gpt2.py on new tokens. Returns logits (B, t or 1, V)."""
    B, t = ids.shape
    end = cache.length + t
    positions = torch.arange(cache.length, end, device=ids.device)
    visible = positions[:, None] >= torch.arange(end, device=ids.device)  # (t, end)
    x = module.wte(ids) + module.wpe(positions)  # (B, t, C)
    for i, block in enumerate(module.h):
        qkv = block.attn.c_attn(block.ln_1(x)).view(B, t, 3, module.hp.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, t, D) each
        k, v = cache.append(i, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        y = y.transpose(1, 2).reshape(B, t, -1)
        x = x + block.attn.c_proj(y)
        x = x + block.mlp(block.ln_2(x))
    cache.length = end
    if last_only:
        x = x[:, -1:]
    return F.linear(module.ln_f(x), module.wte.weight)


def rotate(rotary, x, start):
    """Rotates x (B, t, H, D), whose first token has position `start`. Rotary counts from 0."""
    return rotary(F.pad(x, (0, 0, 0, 0, start, 0)))[:, start:]


def visible_keys(docs, start, window_blocks):
    """Returns the mask (B, 1, queries, keys) for queries from position `start` on, True if visible.

    docs: (B, end), the number of each token's document. A query sees a key that is not later, in
    the same document, and in one of the window_blocks blocks of 128 tokens that end with the
    query's own. This is the mask of train_gpt.py.
    """
    positions = torch.arange(docs.size(1), device=docs.device)
    query = positions[start:, None]
    causal = query >= positions
    in_window = query // BLOCK_SIZE - positions // BLOCK_SIZE < window_blocks
    same_document = docs[:, start:, None] == docs[:, None, :]
    mask = causal & in_window & same_document  # (B, queries, keys)
    return mask[:, None]


def speedrun_attention(attn, layer, x, ve, cache, mask):
    """train_gpt.CausalSelfAttention with a cache. x and the result: (B, t, C). ve: (B, t, H*D), or
    None if the layer has no value embeddings. mask: what visible_keys returns."""
    qkv = F.linear(x, attn.qkv_w.flatten(0, 1))
    q, k, v = qkv.unflatten(-1, (3, -1, attn.head_dim)).unbind(2)  # (B, t, H, D) each
    q = rotate(attn.rotary, norm(q), cache.length)
    k = rotate(attn.rotary, norm(k), cache.length)
    v = attn.value_lambdas[0] * v
    if ve is not None:
        v = v + attn.value_lambdas[1] * ve.view_as(v)
    keys, values = cache.append(layer, k.transpose(1, 2), v.transpose(1, 2))
    q = q.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.12)
    y = y.transpose(1, 2)  # (B, t, H, D)
    if attn.xsa_weights is not None:
        y = train_gpt.exclusive_self_attention(y, v, attn.xsa_weights)
    return attn.c_proj(y.flatten(2))


def speedrun_forward(module, ids, cache, last_only=False):
    """Runs train_gpt.GPT on new tokens. Returns soft-capped logits (B, t or 1, V).
    The window has its final size."""
    hp = module.hp
    start = cache.length
    end = start + ids.size(1)
    cache.tokens[:, start:end] = ids
    tokens = cache.tokens[:, :end]
    docs = (tokens == hp.eot_token).cumsum(1)
    window_blocks = max(1, math.ceil(hp.max_window / BLOCK_SIZE))
    long_window = visible_keys(docs, start, window_blocks)
    short_window = visible_keys(docs, start, max(1, window_blocks // 2))

    ve = {}  # layer -> value embeddings (B, t, H*D)
    for i, table in enumerate(module.value_embeds):
        ve[i] = ve[hp.num_layers - hp.num_value_embeds + i] = table(ids)
    first = max(0, start - 1)  # smear needs the previous token, which is in the cache
    x = module.embed(tokens[:, first:])
    if hp.smear:
        x = train_gpt.smear(x, module.smear_gate, module.smear_scale)
    x = x0 = norm(x[:, start - first :])  # (B, t, C)
    skips = []
    num_skips = hp.num_layers // 2
    first_decoder = hp.num_layers - num_skips  # the first layer of the U-net's second half
    for i, block in enumerate(module.blocks):
        if i >= first_decoder:
            x = x + module.skip_weights[i - first_decoder] * skips.pop()
        x = block.residual_lambdas[0] * x + block.residual_lambdas[1] * x0
        if block.attn is not None:
            mask = long_window if i in hp.long_window_layers else short_window
            x = x + speedrun_attention(block.attn, i, norm(x), ve.get(i), cache, mask)
        x = x + block.mlp(norm(x))
        if i < num_skips:
            skips.append(x)
    cache.length = end
    if last_only:
        x = x[:, -1:]
    return train_gpt.softcap(module.lm_head(norm(x)), hp.model_dim)


# -----------------------------------------------------------------------------
# Loading


def codec(vocab_size, offline=False):
    """Returns encode, from str to token ids, and token_bytes, from a token id to bytes."""
    if vocab_size == 257:
        return lambda text: list(text.encode()), lambda token: bytes([token]) if token < 256 else b""
    require(vocab_size == 50257, f"only bytes and GPT-2's tokens are text, not {vocab_size} tokens")
    encoding = gpt2_encoding(offline)
    return encoding.encode_ordinary, encoding.decode_single_token_bytes


def text_model(module, codec):
    """module: a GPT of train_gpt.py or of recipes/gpt2.py; codec: what codec() returns."""
    hp = module.hp
    if isinstance(module, gpt2.GPT):
        forward, eot, context = gpt2_forward, hp.vocab_size - 1, hp.block_size
        cache_shape = (hp.n_layer, hp.n_head, hp.n_embd // hp.n_head)
    else:
        forward, eot = speedrun_forward, hp.eot_token
        context = min(MAX_CONTEXT, max(hp.train_seq_len, hp.val_seq_len))
        cache_shape = (hp.num_layers, hp.num_heads, hp.head_dim)
    return TextModel(
        module.eval().to(DEVICE), forward, cache_shape, context, hp.vocab_size, eot, *codec
    )


def read_file(name):
    """Reads a RUN.pt, or a safetensors file of export(). Returns its settings and weights."""
    path = Path(name)
    require(path.is_file(), f"{path}: no such file; the model can be {MODEL_HELP}")
    try:
        if path.suffix == ".pt":  # with mmap, the optimizers' state isn't read
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            return checkpoint["settings"], checkpoint["model"]
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            settings = json.loads(file.metadata()["settings"])
            return settings, {key: file.get_tensor(key) for key in file.keys()}
    except Exception as e:  # corrupt files raise many exception types
        raise InputError(f"{path} is damaged or no saved model ({type(e).__name__})")


def export(name, target):
    """Writes a saved model as safetensors, with its settings as JSON metadata. The file must be new."""
    import safetensors.torch

    settings, weights = read_file(name)
    metadata = {"settings": json.dumps(settings)}
    with open(target, "xb") as file:
        file.write(safetensors.torch.save(weights, metadata))


def load(name, offline=False):
    """Loads a model. `name` is what MODEL_HELP says. With offline, GPT-2's vocabulary isn't downloaded."""
    if name in openai_gpt2.SIZES:
        text = codec(50257)  # before the weights, which take longer
        _, hp = gpt2.parse_arguments(["--track=fineweb", f"--init_from={name}"])
        return text_model(gpt2.build_model(hp), text)
    settings, weights = read_file(name)
    require("seq_lens" not in settings, "evals/ can't run the model of recipes/january2026.py")
    script = gpt2 if "n_embd" in settings else train_gpt
    mini = script.TRACKS["mini"]
    differing = asdict(mini).keys() ^ settings.keys()
    version = "saved by another version of the training script; check out that commit"
    require(not differing, f"{name}: {version} (setting {min(differing, default='')})")
    hp = replace(mini, **settings)
    text = codec(hp.vocab_size, offline)
    module = script.GPT(hp).float()
    try:
        module.load_state_dict(weights)
    except RuntimeError:
        raise InputError(f"{name}: its weights don't fit; {version}")
    return text_model(module, text)


# -----------------------------------------------------------------------------
# Decoding


def sample_token(logits, temperature, top_k, generator):
    """logits (B, V) -> tokens (B,) int64. Temperature 0 is greedy; top_k 0 means all tokens."""
    if temperature == 0:
        return logits.argmax(-1)
    vocab_size = logits.size(-1)
    top, candidates = logits.topk(min(top_k or vocab_size, vocab_size))
    probabilities = (top / temperature).softmax(-1)
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return candidates.gather(1, choice)[:, 0]


@torch.no_grad()
def generate(model, prompt, max_tokens, temperature=1.0, top_k=50, generator=None):
    """Continues prompt (B, T) int64, T >= 1. Yields max_tokens times the next token of each text,
    (B,) int64.

    When the context is full, its first half is dropped.
    """
    B, T = prompt.shape
    ids = F.pad(prompt, (0, max_tokens))  # with space for the new tokens
    start = 0  # where the context begins
    cache = None
    for end in range(T, T + max_tokens):
        new_ids = ids[:, end - 1 : end]
        if end - start > model.context:
            start = end - model.context // 2
            cache = None
        if cache is None:
            cache = model.new_cache(B, min(model.context, T + max_tokens - start))
            new_ids = ids[:, start:end]
        logits = model.forward(model.module, new_ids, cache, last_only=True)
        logits = logits[:, -1, : model.vocab_size].float()  # without the padding tokens
        token = sample_token(logits, temperature, top_k, generator)
        ids[:, end] = token
        yield token
