"""
Loads a saved model of train_gpt.py or of the baseline, or OpenAI's GPT-2, and generates text.

    checkpoint = load("model.safetensors")   # or load("gpt2-xl")
    for tokens in generate(checkpoint, prompt, 100):
        ...

A saved model is safetensors with JSON metadata. Nothing in it is unpickled or run. Its tensors must
have the names and shapes of the model that the metadata describes. All models run in float32.

The forward passes here use the modules of the training scripts, but with a key/value cache, which
training doesn't need.
"""
import codecs
import dataclasses
import json
import locale
import os
import sys
from pathlib import Path
from typing import Callable

if codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":
    sys.exit("error: PyTorch can't read its files in an ASCII locale; set PYTHONUTF8=1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see train_gpt.py
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "baseline")]
sys.path.append(str(ROOT / "tools"))
import train_gpt
import train_gpt2
from train_gpt import BLOCK_SIZE, norm
from train_gpt2 import InputError

# Longest context of the speedrun's model in tokens. Its rotary tables could be longer, but those of
# fineweb's validation sequences would take a lot of memory.
MAX_CONTEXT = 4096

# Texts of --help
MODEL_HELP = "a model.safetensors, its folder, or gpt2, gpt2-medium, gpt2-large or gpt2-xl"
DEVICE_HELP = "where the model runs; default: cuda with a GPU, otherwise cpu"


@dataclasses.dataclass
class Checkpoint:
    model: torch.nn.Module
    forward: Callable      # (model, ids (B, t), cache, last_only) -> logits (B, t or 1, V)
    cache_shape: tuple     # layers, heads, head_dim
    context: int           # longest context in tokens
    vocab_size: int        # V may be larger, because it is padded
    eot: int               # the end-of-text token, which begins each document
    encode: Callable       # str -> list of token ids
    token_bytes: Callable  # token id -> bytes

    @property
    def device(self):
        return next(self.model.parameters()).device


def check_device(device: str):
    """Raises InputError if PyTorch can't use the device, "cpu" or "cuda"."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")


# -----------------------------------------------------------------------------
# Key/value cache

class Cache:
    """What the model has read so far, for B texts of at most `capacity` tokens.

    tokens, docs: (B, capacity) int64, each token and the number of its document.
    keys, values: (layers, B, H, capacity, D) float32.
    """

    def __init__(self, shape, batch: int, capacity: int, device):
        layers, heads, head_dim = shape
        self.keys = torch.empty(layers, batch, heads, capacity, head_dim, device=device)
        self.values = torch.empty_like(self.keys)
        self.tokens = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        self.docs = torch.zeros_like(self.tokens)
        self.length = 0

    def append_tokens(self, ids, eot_token: int):
        """Stores new tokens (B, t). Each end-of-text token begins a new document."""
        start = self.length
        end = start + ids.size(1)
        new_documents = (ids == eot_token).cumsum(1)
        self.tokens[:, start:end] = ids
        self.docs[:, start:end] = new_documents
        if start > 0:
            self.docs[:, start:end] += self.docs[:, start - 1:start]

    def append(self, layer: int, k, v, first: int = 0):
        """Stores keys and values (B, H, t, D) of the new tokens. Returns the layer's keys and
        values from position `first` to the last new token."""
        end = self.length + k.size(2)
        self.keys[layer, :, :, self.length:end] = k
        self.values[layer, :, :, self.length:end] = v
        return self.keys[layer, :, :, first:end], self.values[layer, :, :, first:end]


# -----------------------------------------------------------------------------
# Forward passes

def gpt2_forward(model, ids, cache=None, last_only=False):
    """Runs train_gpt2.GPT on new tokens.

    ids: (B, t) int64, the tokens that follow those in the cache.
    last_only: return the logits of the last token only.
    Returns logits (B, t or 1, padded_vocab_size).
    """
    B, t = ids.shape
    config = model.config
    if cache is None:
        shape = (config.n_layer, config.n_head, config.n_embd // config.n_head)
        cache = Cache(shape, B, t, ids.device)
    end = cache.length + t
    positions = torch.arange(cache.length, end, device=ids.device)
    visible = positions[:, None] >= torch.arange(end, device=ids.device)  # (t, end)
    x = model.wte(ids) + model.wpe(positions)  # (B, t, C)
    for i, block in enumerate(model.h):
        qkv = block.attn.c_attn(block.ln_1(x)).view(B, t, 3, config.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, t, D) each
        k, v = cache.append(i, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        y = y.transpose(1, 2).reshape(B, t, -1)
        x = x + block.attn.c_proj(y)
        x = x + block.mlp(block.ln_2(x))
    cache.length = end
    if last_only:
        x = x[:, -1:]
    return F.linear(model.ln_f(x), model.wte.weight)


def rotate(rotary, x, positions):
    """train_gpt.Rotary at the given positions (t,). x and the result: (B, t, H, D)."""
    cos = rotary.cos[positions, None]  # (t, 1, D/2)
    sin = rotary.sin[positions, None]
    x1, x2 = x.chunk(2, dim=-1)
    y1 = x1 * cos + x2 * sin
    y2 = x2 * cos - x1 * sin
    return torch.cat([y1, y2], dim=-1)


def visible_keys(cache, start: int, end: int, window_blocks: int):
    """Returns (first, mask) for queries at the positions from `start` to `end`: the position of the
    first key that any of them sees, and a mask (B, 1, end - start, end - first), True if visible.

    A query sees a key that is not later, in the same document, and in one of the window_blocks
    blocks of 128 tokens that end with the query's own. This is the mask of train_gpt.py.
    """
    device = cache.docs.device
    first_block = max(0, start // BLOCK_SIZE - window_blocks + 1)
    first = first_block * BLOCK_SIZE
    query = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    causal = query >= key
    in_window = query // BLOCK_SIZE - key // BLOCK_SIZE < window_blocks
    same_document = cache.docs[:, start:end, None] == cache.docs[:, None, first:end]
    mask = causal & in_window & same_document  # (B, t, keys)
    return first, mask[:, None]


def speedrun_attention(model, layer: int, x, value_embed, cache, visible):
    """train_gpt.CausalSelfAttention with a cache. x and the result: (B, t, C). value_embed: (B, t,
    H*D), or None if the layer has none. visible: what visible_keys returns."""
    attn = model.blocks[layer].attn
    hp = model.hp
    B, t, _ = x.shape
    first, mask = visible
    positions = torch.arange(cache.length, cache.length + t, device=x.device)
    qkv = F.linear(x, attn.qkv_w.flatten(0, 1))
    q, k, v = qkv.view(B, t, 3, hp.num_heads, hp.head_dim).unbind(2)  # (B, t, H, D) each
    q = rotate(attn.rotary, norm(q), positions)
    k = rotate(attn.rotary, norm(k), positions)
    v = attn.lambdas[0] * v
    if value_embed is not None:
        v = v + attn.lambdas[1] * value_embed.view_as(v)
    keys, values = cache.append(layer, k.transpose(1, 2), v.transpose(1, 2), first)
    q = q.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.12)
    y = y.transpose(1, 2)  # (B, t, H, D)
    if attn.xsa_weights is not None:
        y = train_gpt.exclusive_self_attention(y, v, attn.xsa_weights)
    return attn.c_proj(y.flatten(2))


def speedrun_embeddings(model, cache, start: int, end: int):
    """Returns the embeddings (B, end - start, C) of tokens in the cache. With smear, each includes a
    part of the previous token's embedding."""
    if model.smear is None:
        return model.embed(cache.tokens[:, start:end])
    first = max(0, start - 1)  # the first token of a text has no previous one
    x = model.smear(model.embed(cache.tokens[:, first:end]))
    return x[:, start - first:]  # without the token before the first one


def speedrun_forward(model, ids, cache=None, last_only=False):
    """Runs train_gpt.GPT on new tokens.

    ids: (B, t) int64, the tokens that follow those in the cache.
    last_only: return the logits of the last token only.
    Returns soft-capped logits (B, t or 1, padded_vocab_size).

    The window has its final size. Only the keys in the window are read, so the cost of a token
    doesn't grow with the length of the text.
    """
    B, t = ids.shape
    hp = model.hp
    if cache is None:
        shape = (hp.num_layers, hp.num_heads, hp.head_dim)
        cache = Cache(shape, B, t, ids.device)
    cache.append_tokens(ids, hp.eot_token)
    end = cache.length + t
    window_blocks = train_gpt.get_window_blocks(hp.num_iterations, hp)
    long_window = visible_keys(cache, cache.length, end, window_blocks)
    short_window = visible_keys(cache, cache.length, end, max(1, window_blocks // 2))

    value_embeds = [table(ids) for table in model.value_embeds]  # (B, t, H*D) each
    x = norm(speedrun_embeddings(model, cache, cache.length, end))  # (B, t, C)
    x0 = x
    skips = []
    num_skips = hp.num_layers // 2
    first_decoder = hp.num_layers - num_skips  # the first layer of the U-net's second half
    for i, block in enumerate(model.blocks):
        if i >= first_decoder:
            x = x + model.skip_weights[i - first_decoder] * skips.pop()
        x = block.lambdas[0] * x + block.lambdas[1] * x0
        if block.attn is not None:
            value_embed = None
            if i in model.ve_of_layer:
                value_embed = value_embeds[model.ve_of_layer[i]]
            visible = long_window if i in hp.long_window_layers else short_window
            x = x + speedrun_attention(model, i, norm(x), value_embed, cache, visible)
        x = x + block.mlp(norm(x))
        if i < num_skips:
            skips.append(x)
    cache.length = end
    if last_only:
        x = x[:, -1:]
    return train_gpt.softcap(model.lm_head(norm(x)), hp.model_dim)


# -----------------------------------------------------------------------------
# Loading

# Settings of hashed n-gram embeddings, which train_gpt.py once had. max_ngram 1 means none.
NGRAM_SETTINGS = ("max_ngram", "ngram_rows")
# What to do about a file that can't be loaded
DAMAGED = "the file is damaged; copy it again from its source, or train the model again"
OTHER_VERSION = "check out the commit that saved it, or train the model again"


def remove_ngram_settings(values: dict, where: str):
    """Removes the n-gram settings from a model's settings. Raises InputError if it has n-grams."""
    if values.get("max_ngram", 1) != 1:
        raise InputError(
            f"{where}: the model has n-gram embeddings (max_ngram {values['max_ngram']}), which "
            "are no longer supported; train the model again"
        )
    for name in NGRAM_SETTINGS:
        values.pop(name, None)


def has_type(value, kind) -> bool:
    """Whether a value from JSON has the type of a dataclass field: bool, int, float, str or a tuple
    of int. A bool is not an int here, but an int is a float."""
    if kind is float:
        return type(value) in (int, float)
    if kind in (bool, int, str):
        return type(value) is kind
    return isinstance(value, tuple) and all(type(item) is int for item in value)


def read_settings(cls, text: str, where: str):
    """Makes a dataclass from JSON metadata. Raises InputError unless the JSON has exactly its
    fields, each of the right type."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise InputError(f"{where}: its metadata is not a JSON object; {DAMAGED}")
    remove_ngram_settings(values, where)
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    differing = sorted(types.keys() ^ values.keys())
    if differing:
        raise InputError(
            f"{where}: saved by another version of the training script (setting {differing[0]}); "
            f"{OTHER_VERSION}"
        )
    for name, kind in types.items():
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
        if not has_type(values[name], kind):
            raise InputError(f"{where}: its metadata has {name} = {values[name]!r}; {DAMAGED}")
    return cls(**values)


def load_weights(make_model, num_layers: int, file, where: str):
    """Returns make_model() with the tensors of an open safetensors file. Raises InputError unless
    they have the model's names and shapes."""
    keys = set(file.keys())
    if not 0 < num_layers <= len(keys):
        raise InputError(
            f"{where}: its metadata says {num_layers} layers, but the file has only {len(keys)} "
            f"tensors; {DAMAGED}"
        )
    with torch.device("meta"):  # takes no memory, however large the metadata says the model is
        expected = make_model().state_dict()
    differing = sorted(expected.keys() ^ keys)
    if differing:
        problem = "is missing" if differing[0] in expected else "is not part of the model"
        raise InputError(f"{where}: tensor {differing[0]} {problem}; {OTHER_VERSION}")
    for key, tensor in expected.items():
        shape = tuple(tensor.shape)
        found = tuple(file.get_slice(key).get_shape())
        if found != shape:
            raise InputError(
                f"{where}: tensor {key} has shape {found} instead of {shape}; {OTHER_VERSION}"
            )
    model = make_model()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(file.get_tensor(key))
    return model


def gpt2_checkpoint(model, codec, device) -> Checkpoint:
    """codec: what train_gpt2.codec returns."""
    config = model.config
    encode, token_bytes = codec
    return Checkpoint(
        model=model.eval().to(device),
        forward=gpt2_forward,
        cache_shape=(config.n_layer, config.n_head, config.n_embd // config.n_head),
        context=config.block_size,
        vocab_size=config.vocab_size,
        eot=config.vocab_size - 1,
        encode=encode,
        token_bytes=token_bytes,
    )


def speedrun_checkpoint(model, codec, device) -> Checkpoint:
    """codec: what train_gpt2.codec returns."""
    hp = model.hp
    encode, token_bytes = codec
    return Checkpoint(
        model=model.eval().to(device),
        forward=speedrun_forward,
        cache_shape=(hp.num_layers, hp.num_heads, hp.head_dim),
        context=max(hp.train_seq_len, hp.val_seq_len),
        vocab_size=hp.vocab_size,
        eot=hp.eot_token,
        encode=encode,
        token_bytes=token_bytes,
    )


def load_gpt2(file, where: str, device, offline: bool) -> Checkpoint:
    """Loads a train_gpt2.GPT from an open safetensors file."""
    text = file.metadata().get("config", "")
    config = read_settings(train_gpt2.GPTConfig, text, where)
    if min(dataclasses.astuple(config)) < 1 or config.n_embd % config.n_head:
        raise InputError(f"{where}: its metadata has impossible model sizes; {DAMAGED}")
    codec = train_gpt2.codec(config.vocab_size, offline)  # before the weights, which take longer
    model = load_weights(lambda: train_gpt2.GPT(config), config.n_layer, file, where)
    return gpt2_checkpoint(model, codec, device)


def load_speedrun(file, where: str, device, offline: bool) -> Checkpoint:
    """Loads a train_gpt.GPT from an open safetensors file, in float32."""
    text = file.metadata().get("hyperparameters", "")
    hp = read_settings(train_gpt.Hyperparameters, text, where)
    try:
        train_gpt.check_hyperparameters(hp, 1, "cpu")
    except train_gpt.InputError as e:
        raise InputError(f"{where}: {e}") from None
    context = min(MAX_CONTEXT, max(hp.train_seq_len, hp.val_seq_len))
    hp = dataclasses.replace(hp, train_seq_len=context, val_seq_len=context)
    codec = train_gpt2.codec(hp.vocab_size, offline)
    model = load_weights(lambda: train_gpt.GPT(hp, torch.float32), hp.num_layers, file, where)
    return speedrun_checkpoint(model, codec, device)


def load(name: str, device="cpu", offline: bool = False) -> Checkpoint:
    """Loads a model for evaluation.

    name: a model.safetensors, a folder that has one, or gpt2, gpt2-medium, gpt2-large or gpt2-xl.
    offline: don't download OpenAI's weights or vocabulary.
    Raises InputError.
    """
    from safetensors import SafetensorError, safe_open
    if name in train_gpt2.FAMILY:
        codec = train_gpt2.codec(50257, offline)
        model = train_gpt2.from_pretrained(name, offline=offline)
        return gpt2_checkpoint(model, codec, device)
    path = Path(name)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        names = ", ".join(train_gpt2.FAMILY)
        raise InputError(
            f"{path}: no such file; use a model.safetensors, its folder, or one of {names} "
            "(./run.sh --save_checkpoint saves a model.safetensors)"
        )
    where = str(path)
    try:
        with safe_open(path, "pt") as file:
            kind = (file.metadata() or {}).get("model")
            if kind == "gpt2":
                return load_gpt2(file, where, device, offline)
            if kind == "speedrun":
                return load_speedrun(file, where, device, offline)
    except SafetensorError as e:
        raise InputError(f"{where}: not a complete safetensors file ({e}); {DAMAGED}") from None
    raise InputError(
        f"{where}: not saved by train_gpt.py or train_gpt2.py (its metadata names no model); use a "
        "model.safetensors that one of them has saved"
    )


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
def generate(
    checkpoint: Checkpoint,
    prompt,
    max_tokens: int,
    temperature=1.0,
    top_k=50,
    generator=None,
    use_cache=True,
):
    """Continues prompt (B, T) int64, T >= 1. Yields max_tokens times the next token of each text,
    (B,) int64.

    When the context is full, its first half is dropped.
    """
    B, T = prompt.shape
    ids = F.pad(prompt, (0, max_tokens))  # with space for the new tokens
    start = 0                             # where the context begins
    cache = None
    for position in range(T, T + max_tokens):
        if position - start > checkpoint.context:
            start = position - checkpoint.context // 2
            cache = None
        new_ids = ids[:, position - 1:position]
        if cache is None:
            new_ids = ids[:, start:position]
            if use_cache:
                capacity = min(checkpoint.context, T + max_tokens - start)
                cache = Cache(checkpoint.cache_shape, B, capacity, ids.device)
        logits = checkpoint.forward(checkpoint.model, new_ids, cache, last_only=True)
        logits = logits[:, -1, :checkpoint.vocab_size].float()  # without the padding tokens
        token = sample_token(logits, temperature, top_k, generator)
        ids[:, position] = token
        yield token
