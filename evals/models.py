"""
Loads a saved model of train_gpt.py or of the baseline, or OpenAI's GPT-2, and generates text.

    model = load("logs/RUN.pt")   # or load("gpt2-xl")
    for tokens in generate(model, prompt, 100):
        ...

Nothing in a file is run. All models compute in float32, on the device of train_gpt.py.

The forward passes here use the modules of the training scripts, but with a key/value cache, which
training doesn't need.
"""
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "baseline")]
import train_gpt  # before torch: it sets environment variables that torch reads
import train_gpt2
from train_gpt import BLOCK_SIZE, DEVICE, InputError, norm, require

import torch
import torch.nn.functional as F

USER_ERRORS = (InputError, train_gpt2.InputError, OSError)  # printed as one line
# The longest context of train_gpt.py's models in tokens: those of fineweb's validation sequences
# would need a large cache
MAX_CONTEXT = 4096
MODEL_HELP = "a RUN.pt, a safetensors file, or gpt2, gpt2-medium, gpt2-large or gpt2-xl"
OTHER_VERSION = "saved by another version of the training script; check out that commit"


@dataclasses.dataclass
class TextModel:
    module: torch.nn.Module
    forward: Callable      # (module, ids (B, t), cache, last_only) -> logits (B, t or 1, V)
    cache_shape: tuple     # layers, heads, head_dim
    context: int           # longest context in tokens
    vocab_size: int        # V may be larger, because it is padded
    eot: int               # the end-of-text token, which begins each document
    encode: Callable       # str -> list of token ids
    token_bytes: Callable  # token id -> bytes

    def new_cache(self, batch: int, capacity: int):
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

    def __init__(self, shape, batch: int, capacity: int):
        layers, heads, head_dim = shape
        self.keys = torch.empty(layers, batch, heads, capacity, head_dim, device=DEVICE)
        self.values = torch.empty_like(self.keys)
        self.tokens = torch.zeros(batch, capacity, dtype=torch.int64, device=DEVICE)
        self.length = 0

    def append(self, layer: int, k, v, first: int = 0):
        """Stores keys and values (B, H, t, D) of the new tokens. Returns the layer's keys and
        values from position `first` to the last new token."""
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length:end] = k
        self.values[layer, :, :, self.length:end] = v
        return self.keys[layer, :, :, first:end], self.values[layer, :, :, first:end]


# -----------------------------------------------------------------------------
# Forward passes. ids: (B, t) int64, the tokens that follow those in the cache. last_only: return
# the logits of the last token only.

def gpt2_forward(module, ids, cache, last_only=False):
    """Runs train_gpt2.GPT on new tokens. Returns logits (B, t or 1, padded_vocab_size)."""
    B, t = ids.shape
    end = cache.length + t
    positions = torch.arange(cache.length, end, device=ids.device)
    visible = positions[:, None] >= torch.arange(end, device=ids.device)  # (t, end)
    x = module.wte(ids) + module.wpe(positions)  # (B, t, C)
    for i, block in enumerate(module.h):
        qkv = block.attn.c_attn(block.ln_1(x)).view(B, t, 3, module.config.n_head, -1)
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


def rotate(rotary, x, positions):
    """train_gpt.Rotary at the given positions (t,). x and the result: (B, t, H, D)."""
    cos, sin = rotary.rotations[:, positions, None]  # each (t, 1, D/2)
    x1, x2 = x.chunk(2, dim=-1)
    y1 = x1 * cos + x2 * sin
    y2 = x2 * cos - x1 * sin
    return torch.cat([y1, y2], dim=-1)


def visible_keys(docs, start: int, window_blocks: int):
    """Returns (first, mask) for queries from position `start` on: the position of the first key
    that any of them sees, and a mask (B, 1, queries, keys from there), True if visible.

    docs: (B, end), the number of each token's document. A query sees a key that is not later, in
    the same document, and in one of the window_blocks blocks of 128 tokens that end with the
    query's own. This is the mask of train_gpt.py.
    """
    end = docs.size(1)
    first_block = max(0, start // BLOCK_SIZE - window_blocks + 1)
    first = first_block * BLOCK_SIZE
    query = torch.arange(start, end, device=docs.device)[:, None]
    key = torch.arange(first, end, device=docs.device)
    causal = query >= key
    in_window = query // BLOCK_SIZE - key // BLOCK_SIZE < window_blocks
    same_document = docs[:, start:, None] == docs[:, None, first:]
    mask = causal & in_window & same_document  # (B, queries, keys)
    return first, mask[:, None]


def speedrun_attention(attn, layer: int, x, ve, cache, visible):
    """train_gpt.CausalSelfAttention with a cache. x and the result: (B, t, C). ve: (B, t, H*D), or
    None if the layer has no value embeddings. visible: what visible_keys returns."""
    first, mask = visible
    positions = torch.arange(cache.length, cache.length + x.size(1), device=x.device)
    qkv = F.linear(x, attn.qkv_w.flatten(0, 1))
    q, k, v = qkv.unflatten(-1, (3, *attn.heads)).unbind(2)  # (B, t, H, D) each
    q = rotate(attn.rotary, norm(q), positions)
    k = rotate(attn.rotary, norm(k), positions)
    v = attn.lambdas[0] * v
    if ve is not None:
        v = v + attn.lambdas[1] * ve.view_as(v)
    keys, values = cache.append(layer, k.transpose(1, 2), v.transpose(1, 2), first)
    q = q.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.12)
    y = y.transpose(1, 2)  # (B, t, H, D)
    if attn.xsa_weights is not None:
        y = train_gpt.exclusive_self_attention(y, v, attn.xsa_weights)
    return attn.c_proj(y.flatten(2))


def speedrun_embeddings(module, tokens, start: int):
    """Returns the embeddings (B, t, C) of tokens (B, start + t) from position `start` on. With
    smear, each includes a part of the previous token's embedding."""
    if not module.hp.smear:
        return module.embed(tokens[:, start:])
    first = max(0, start - 1)  # the first token of a text has no previous one
    x = module.embed(tokens[:, first:])
    return train_gpt.smear(x, module.smear_gate, module.smear_scale)[:, start - first:]


def speedrun_forward(module, ids, cache, last_only=False):
    """Runs train_gpt.GPT on new tokens. Returns soft-capped logits (B, t or 1, padded_vocab_size).

    The window has its final size. Only the keys in the window are read, so the cost of a token
    hardly grows with the length of the text.
    """
    hp = module.hp
    start = cache.length
    end = start + ids.size(1)
    cache.tokens[:, start:end] = ids
    tokens = cache.tokens[:, :end]
    docs = (tokens == hp.eot_token).cumsum(1)
    window_blocks = max(1, math.ceil(hp.max_window / BLOCK_SIZE))
    long_window = visible_keys(docs, start, window_blocks)
    short_window = visible_keys(docs, start, max(1, window_blocks // 2))

    ve = [table(ids) for table in module.value_embeds]  # (B, t, H*D) each
    ve = ve + [None] * (hp.num_layers - 2 * len(ve)) + ve
    x = x0 = norm(speedrun_embeddings(module, tokens, start))  # (B, t, C)
    skips = []
    num_skips = hp.num_layers // 2
    first_decoder = hp.num_layers - num_skips  # the first layer of the U-net's second half
    for i, block in enumerate(module.blocks):
        if i >= first_decoder:
            x = x + module.skip_weights[i - first_decoder] * skips.pop()
        x = block.lambdas[0] * x + block.lambdas[1] * x0
        if block.attn is not None:
            visible = long_window if i in hp.long_window_layers else short_window
            x = x + speedrun_attention(block.attn, i, norm(x), ve[i], cache, visible)
        x = x + block.mlp(norm(x))
        if i < num_skips:
            skips.append(x)
    cache.length = end
    if last_only:
        x = x[:, -1:]
    return train_gpt.softcap(module.lm_head(norm(x)), hp.model_dim)


# -----------------------------------------------------------------------------
# Loading

def gpt2_text_model(module, codec) -> TextModel:
    """codec: what train_gpt2.codec returns."""
    config = module.config
    encode, token_bytes = codec
    return TextModel(
        module=module.eval().to(DEVICE),
        forward=gpt2_forward,
        cache_shape=(config.n_layer, config.n_head, config.n_embd // config.n_head),
        context=config.block_size,
        vocab_size=config.vocab_size,
        eot=config.vocab_size - 1,
        encode=encode,
        token_bytes=token_bytes,
    )


def speedrun_text_model(module, codec) -> TextModel:
    """codec: what train_gpt2.codec returns."""
    hp = module.hp
    encode, token_bytes = codec
    return TextModel(
        module=module.eval().to(DEVICE),
        forward=speedrun_forward,
        cache_shape=(hp.num_layers, hp.num_heads, hp.head_dim),
        context=min(MAX_CONTEXT, max(hp.train_seq_len, hp.val_seq_len)),
        vocab_size=hp.vocab_size,
        eot=hp.eot_token,
        encode=encode,
        token_bytes=token_bytes,
    )


# by the name of the model in safetensors: the name of the settings there, and what to make of them
KINDS = {
    "gpt2": ("config", train_gpt2.GPTConfig, train_gpt2.GPT, gpt2_text_model),
    "speedrun": (
        "hyperparameters", train_gpt.Hyperparameters, train_gpt.GPT, speedrun_text_model
    ),
}


def read_file(name: str):
    """Reads a RUN.pt of train_gpt.py, or a safetensors file of the baseline or of export().

    Returns (kind, settings, weights): a key of KINDS, a dict, tensors by name.
    """
    path = Path(name)
    require(path.is_file(), f"{path}: no such file; the model can be {MODEL_HELP}")
    try:
        if path.suffix == ".pt":  # with mmap, the optimizers' state isn't read
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            return "speedrun", checkpoint["settings"], checkpoint["model"]
        from safetensors import safe_open
        with safe_open(path, "pt") as file:
            kind = file.metadata()["model"]
            settings = json.loads(file.metadata()[KINDS[kind][0]])
            return kind, settings, {key: file.get_tensor(key) for key in file.keys()}
    except Exception as e:  # corrupt files raise many exception types
        raise InputError(f"{path} is damaged or no saved model ({type(e).__name__})") from None


def export(name: str, target: str):
    """Writes a saved model as safetensors, with its settings as JSON metadata."""
    import safetensors.torch
    kind, settings, weights = read_file(name)
    metadata = {"model": kind, KINDS[kind][0]: json.dumps(settings)}
    Path(target).write_bytes(safetensors.torch.save(weights, metadata))


def can_print(name: str) -> bool:
    """Whether the model's vocabulary is here: bytes, or GPT-2's, if it has been downloaded."""
    _, settings, _ = read_file(name)
    if settings["vocab_size"] == 257:
        return True
    sys.path.append(str(ROOT / "data"))
    from gpt2_bpe import is_cached
    return is_cached()


def load(name: str, offline: bool = False) -> TextModel:
    """Loads a model. `name` is what MODEL_HELP says.

    offline: don't download OpenAI's weights or vocabulary.
    Raises one of USER_ERRORS.
    """
    if name in train_gpt2.FAMILY:
        codec = train_gpt2.codec(50257, offline)  # before the weights, which take longer
        return gpt2_text_model(train_gpt2.from_pretrained(name, offline=offline), codec)
    kind, settings, weights = read_file(name)
    _, config_class, model_class, text_model = KINDS[kind]
    differing = {field.name for field in dataclasses.fields(config_class)} ^ settings.keys()
    if differing:
        raise InputError(f"{name}: {OTHER_VERSION} (setting {min(differing)})")
    config = config_class(**settings)
    codec = train_gpt2.codec(config.vocab_size, offline)
    module = model_class(config).float()
    try:
        module.load_state_dict(weights)
    except RuntimeError:
        raise InputError(f"{name}: its weights don't fit; {OTHER_VERSION}") from None
    return text_model(module, codec)


# -----------------------------------------------------------------------------
# Decoding

def sample_token(logits, temperature: float, top_k: int, generator):
    """logits (B, V) -> tokens (B,) int64. Temperature 0 is greedy; top_k 0 means all tokens."""
    if temperature == 0:
        return logits.argmax(-1)
    vocab_size = logits.size(-1)
    top, candidates = logits.topk(min(top_k or vocab_size, vocab_size))
    probabilities = (top / temperature).softmax(-1)
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return candidates.gather(1, choice)[:, 0]


@torch.no_grad()
def generate(model: TextModel, prompt, max_tokens: int, temperature=1.0, top_k=50, generator=None):
    """Continues prompt (B, T) int64, T >= 1. Yields max_tokens times the next token of each text,
    (B,) int64.

    When the context is full, its first half is dropped.
    """
    B, T = prompt.shape
    ids = F.pad(prompt, (0, max_tokens))  # with space for the new tokens
    start = 0                             # where the context begins
    cache = None
    for end in range(T, T + max_tokens):
        new_ids = ids[:, end - 1:end]
        if end - start > model.context:
            start = end - model.context // 2
            cache = None
        if cache is None:
            cache = model.new_cache(B, min(model.context, T + max_tokens - start))
            new_ids = ids[:, start:end]
        logits = model.forward(model.module, new_ids, cache, last_only=True)
        logits = logits[:, -1, :model.vocab_size].float()  # without the padding tokens
        token = sample_token(logits, temperature, top_k, generator)
        ids[:, end] = token
        yield token
