"""
Loads a saved model of train_gpt.py or of recipes/gpt2.py, or OpenAI's GPT-2, and generates text.

    model = load("logs/RUN.pt")   # or load("latest"), load("gpt2-xl")
    for tokens in generate(model, prompt, 100):
        ...

Nothing in a file is run. All models compute in float32.

Each new token takes a forward pass over the whole text, by the code that trained the model: there is no
key/value cache.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import train_gpt  # before torch: it sets variables that torch reads
from data.gpt2_bpe import VOCAB_SIZE, gpt2_encoding
from lib.processes import ROOT, checkpoints
from recipes import openai_gpt2
from recipes import gpt2
from train_gpt import BLOCK_SIZE, DEVICE, InputError, require

import torch
import torch.nn.functional as F

MAX_CONTEXT = 4096  # tokens of train_gpt.py's models: fineweb's validation sequences are very long
# by the folder of the training text; on a text of the user's own, a sample begins a document
SCIENCE = "The most important thing about science is"
PROMPTS = {"shakespeare_1024": "**MACBETH**  \n", "fineweb10B": SCIENCE, "finewebedu10B": SCIENCE}
MODEL_HELP = "a RUN.pt, a folder with some, or gpt2, gpt2-medium, gpt2-large or gpt2-xl"


@dataclass
class TextModel:
    logits: Callable  # of whole texts: ids (B, t) int64 -> (B, t, V)
    context: int  # longest text in tokens
    vocab_size: int  # V may be larger, because it is padded
    eot: int  # the end-of-text token, which begins each document
    prompt: str  # for samples, if the user gives none
    encode: Callable  # str -> list of token ids
    token_bytes: Callable  # token id -> bytes


class LogitsGPT(train_gpt.GPT):
    """The model of train_gpt.py. Its forward pass returns the logits (T, V) instead of the loss."""

    val_slice = 2**31  # all tokens at a time

    def masks(self, docs, window_blocks):
        """Those of a CPU also on a GPU, where the others need compilation."""
        return [mask.to(docs.device) for mask in super().masks(docs.cpu(), window_blocks.cpu())]

    def loss(self, x, targets):
        return train_gpt.scale_and_softcap(self.lm_head(x), self.hp.model_dim)

    def logits(self, ids):
        """ids (B, t) int64 -> (B, t, V), with the window of the last step."""
        B, t = ids.shape
        # the model takes multiples of 128 tokens; nothing before the padding sees it
        padded = F.pad(ids, (0, -t % BLOCK_SIZE))
        window = train_gpt.get_window_blocks(self.hp.num_iterations, self.hp)
        return self(padded.int(), padded, window).view(B, padded.size(1), -1)[:, :t]


# -----------------------------------------------------------------------------
# Loading


def codec(vocab_size, offline=False):
    """Returns encode, from str to token ids, and token_bytes, from a token id to bytes."""
    encoding = gpt2_encoding(vocab_size, offline)
    return encoding.encode_ordinary, encoding.decode_single_token_bytes


def text_model(module, codec):
    """module: a LogitsGPT, or a GPT of recipes/gpt2.py; codec: what codec() returns."""
    hp = module.hp
    if isinstance(module, gpt2.GPT):
        eot = hp.vocab_size - 1
        context = hp.block_size
    else:
        eot = hp.eot_token
        context = min(MAX_CONTEXT, max(hp.train_seq_len, hp.val_seq_len))
    logits = module.eval().to(DEVICE).logits
    prompt = PROMPTS.get(Path(hp.train_files).parent.name, "")
    return TextModel(logits, context, hp.vocab_size, eot, prompt, *codec)


def find_file(name):
    """Returns the newest RUN.pt of a folder, or the name of a file as it is. "latest" is the folder logs."""
    folder = ROOT / "logs" if name == "latest" else Path(name)
    if not folder.is_dir():
        return name
    found = checkpoints(folder)
    require(found, f"{folder} has no RUN.pt; ./run.sh trains a model")
    _, newest = found[-1]
    print(f"the model of {os.path.relpath(newest)}", file=sys.stderr)
    return newest


def read_file(name):
    """Returns the settings and the weights of a RUN.pt."""
    require(Path(name).is_file(), f"{name}: no such file; the model can be {MODEL_HELP}")
    try:  # with mmap, the optimizers' state isn't read
        checkpoint = torch.load(name, map_location="cpu", mmap=True, weights_only=True)
        return checkpoint["settings"], checkpoint["model"]
    except (LookupError, TypeError):
        raise InputError(f"{name} isn't a RUN.pt: it lacks the entries settings and model")
    except Exception as e:  # corrupt files raise many exception types
        raise InputError(f"{name} is damaged, or no saved model ({type(e).__name__})")


def load(name, offline=False):
    """Loads a model. `name` is what MODEL_HELP says. With offline, GPT-2's vocabulary isn't downloaded."""
    if name in openai_gpt2.SIZES:
        text = codec(VOCAB_SIZE)  # before the weights, which take longer
        _, hp = gpt2.parse_arguments(["--track=fineweb", f"--init_from={name}"])
        return text_model(gpt2.build_model(hp), text)
    name = find_file(name)
    settings, weights = read_file(name)
    require(
        "seq_lens" not in settings,
        f"{name}: sample and hellaswag can't run models of recipes/january2026.py",
    )
    model_class, script = (gpt2.GPT, gpt2) if "n_embd" in settings else (LogitsGPT, train_gpt)
    mini = script.TRACKS["mini"]
    differing = asdict(mini).keys() ^ settings.keys()
    version = "saved by another version of the training script; check out that commit"
    require(not differing, f"{name}: {version} (setting {min(differing, default='')})")
    hp = replace(mini, **settings)
    last = hp.vocab_size - 1
    eot = settings.get("eot_token", last)
    require(eot == last, f"{name}: its tokens aren't GPT-2's: end-of-text is {eot}, not {last}")
    text = codec(hp.vocab_size, offline)
    module = model_class(hp).float()
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
    T = prompt.size(1)
    ids = F.pad(prompt, (0, max_tokens))  # with space for the new tokens
    start = 0  # where the context begins
    for end in range(T, T + max_tokens):
        if end - start > model.context:
            start = end - model.context // 2
        logits = model.logits(ids[:, start:end])
        logits = logits[:, -1, : model.vocab_size].float()  # without the padding tokens
        token = sample_token(logits, temperature, top_k, generator)
        ids[:, end] = token
        yield token
