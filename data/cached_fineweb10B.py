"""
Downloads FineWeb-10B from the Hugging Face hub, already tokenized with GPT-2's BPE. These are the
shards of the official speedrun.

    ./run.sh data fineweb [N] [--out DIR]

Downloads the validation shard and the first N training shards (default: 9, at most 103). A shard
has 100M tokens and takes 200 MB. If the connection breaks, the script reconnects and resumes the
download. After an error or an interruption, run the same command again. It skips complete shards:
those whose size agrees with the number of tokens in their header. Checksums are not compared.
"""

import os
import tempfile
from pathlib import Path

from huggingface_hub import hf_hub_download

from data.shards import check_shard, from_hub, read_shard
from lib.commands import UserError, command_parser, run_command, stop_on_signals

REPO = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103
VOCAB_SIZE = 50257


def fetch(name, out):
    """Downloads the shard `name` into the folder `out` unless it is already there and complete."""
    path = out / name
    if path.exists():
        try:
            print(f"{name}: exists, {check_shard(path):,} tokens")
            return
        except UserError as e:
            print(f"{e}; downloading it again")
    out.mkdir(parents=True, exist_ok=True)
    # The temporary folder is beside the final file, so the shard is renamed and not copied.
    with tempfile.TemporaryDirectory(dir=out, prefix=".download-") as folder, from_hub(name):
        downloaded = hf_hub_download(REPO, name, repo_type="dataset", local_dir=folder)
        tokens = read_shard(downloaded, VOCAB_SIZE)
        os.replace(downloaded, path)
    print(f"{name}: downloaded, {len(tokens):,} tokens")


def parse_arguments(argv):
    parser = command_parser("data fineweb", __doc__)
    parser.add_argument(
        "shards",
        type=int,
        nargs="?",
        default=9,
        metavar="N",
        help="number of training shards to download, from 0 to 103; each has 100M tokens and takes "
        "200 MB (default: 9)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parent / "fineweb10B",
        metavar="DIR",
        help="folder for the shards (default: data/fineweb10B)",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.shards <= TRAIN_SHARDS:
        parser.error(f"N must be from 0 to {TRAIN_SHARDS}, not {args.shards}")
    return args


def main(argv):
    args = parse_arguments(argv)
    print(f"{REPO}: the validation shard and {args.shards} training shards, into {args.out}")
    fetch("fineweb_val_000000.bin", args.out)
    for i in range(1, args.shards + 1):
        fetch(f"fineweb_train_{i:06d}.bin", args.out)


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
