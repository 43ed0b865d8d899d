"""
Writes data/shakespeare_V: the documents of data/shakespeare in V tokens. GPT-2's ids are ordered by merge
rank, so the first V - 1 with their merges are a byte-pair encoding. End-of-text is the last id.

    python records/mini/transfer/tokens.py 1024
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import numpy as np
import tiktoken

from data.gpt2_bpe import gpt2_encoding, r50k_pat_str
from data.shakespeare import EOT
from data.shards import read_shard, write_shard


def encoding(vocab_size):
    ranks = gpt2_encoding()._mergeable_ranks
    return tiktoken.Encoding(
        f"gpt2-{vocab_size}",
        explicit_n_vocab=vocab_size,
        pat_str=r50k_pat_str,
        mergeable_ranks={token: rank for token, rank in ranks.items() if rank < vocab_size - 1},
        special_tokens={"<|endoftext|>": vocab_size - 1},
    )


def main():
    vocab_size = int(sys.argv[1])
    encode = encoding(vocab_size).encode_ordinary
    out = ROOT / f"data/shakespeare_{vocab_size}"
    out.mkdir(exist_ok=True)
    for path in (ROOT / "data/shakespeare").glob("*.bin"):
        content = read_shard(path)
        tokens = []
        for document in np.split(content, np.flatnonzero(content == EOT)):
            if len(document):
                tokens += [vocab_size - 1, *encode(bytes(document[1:].astype(np.uint8)).decode())]
        write_shard(out / path.name, np.array(tokens, dtype=np.uint16))
        print(f"{out / path.name}: {len(tokens):,} tokens, {len(content) / len(tokens):.2f} bytes each")


if __name__ == "__main__":
    main()
