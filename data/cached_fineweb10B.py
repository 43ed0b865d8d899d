"""
FineWeb-10B, already tokenized with GPT-2's BPE: the speedrun's official shards, from the Hugging Face hub.

    python data/cached_fineweb10B.py [N] [--out DIR]

Fetches the validation shard and the first N training shards (default 9: 900M tokens, enough for the
official run; at most 103), 100M tokens and 200 MB each. A connection that drops is taken up where it broke
off; after an error or an interruption run the same command again: shards that are there and whole are skipped.
"""
import argparse
import errno
import os
import tempfile
from pathlib import Path

from huggingface_hub import hf_hub_download

from shards import ShardError, check_shard, hub_unreachable, read_shard, run_script, writing

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
VOCAB_SIZE = 50257
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


def fetch(name, out):
    """Bring one shard to out/name: downloaded aside, checked, and only then given its name."""
    path = out / name
    if path.exists():
        try:
            print(f"{name}: there, {check_shard(path):,} tokens")
            return
        except ShardError as e:
            print(f"{e}: fetching it again")
    with writing(path):
        tokens = download(name, path)
    print(f"{name}: fetched, {len(tokens):,} tokens")


def download(name, path):
    """-> the tokens of a shard that was not there. Raises ShardError, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # within the same folder, so that a finished download is renamed, not copied
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
        try:
            downloaded = hf_hub_download(REPO, name, repo_type="dataset", local_dir=folder)
        except Exception as e:  # the hub's own errors and its HTTP library's have no base class in common
            if isinstance(e, OSError) and e.errno in DISK_ERRORS:
                raise
            if message := hub_unreachable(e):
                raise ShardError(f"{name} could not be fetched: {message}") from None
            raise ShardError(f"{name} could not be fetched; to go on, run the same command again: {e}") from None
        try:
            tokens = read_shard(downloaded, VOCAB_SIZE)
        except ShardError as e:
            raise ShardError(f"{name}, as fetched, is not kept: {e}") from None
        with open(downloaded, "rb") as f:
            os.fsync(f.fileno())
        os.replace(downloaded, path)
    return tokens


def main():
    parser = argparse.ArgumentParser(description="Fetch FineWeb-10B's GPT-2 tokens from the hub.")
    parser.add_argument("shards", type=int, nargs="?", default=9, metavar="N",
                        help="training shards of 100M tokens to fetch, 0 to 103 (default: 9)")
    default = Path(__file__).resolve().parent / "fineweb10B"
    parser.add_argument("--out", type=Path, default=default, metavar="DIR",
                        help="folder for the shards (default: fineweb10B/ beside this script)")
    args = parser.parse_args()
    if not 0 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"N is {args.shards}, but there are 0 to {TRAIN_SHARDS} training shards")

    print(f"{REPO}: the validation shard and {args.shards} training shards, into {args.out}")
    fetch("fineweb_val_000000.bin", args.out)
    for i in range(1, args.shards + 1):
        fetch(f"fineweb_train_{i:06d}.bin", args.out)


if __name__ == "__main__":
    run_script(main)
