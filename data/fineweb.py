"""
Downloads FineWeb-10B or FineWeb-Edu-10B from the Hugging Face hub, already tokenized with GPT-2's BPE.
FineWeb has the shards of the official speedrun.

    ./run.sh data fineweb [N] [--out DIR]
    ./run.sh data edu [N] [--out DIR]

Downloads the validation shard and the first N training shards (default: 9). A shard has 100M tokens
and takes 200 MB. If the connection breaks, the script reconnects and resumes the download. After an
error or an interruption, run the same command again. It skips complete shards: those whose size
agrees with the number of tokens in their header. Checksums are not compared.
"""

import os
import tempfile
from pathlib import Path

from huggingface_hub import hf_hub_download

from data.datasets import DATASETS
from data.shards import check_shard, from_hub, read_shard
from judge.commands import UserError, command_parser, run_command, stop_on_signals
from lib.processes import ROOT

VOCAB_SIZE = 50257


def fetch(repo, name, out):
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
        downloaded = hf_hub_download(repo, name, repo_type="dataset", local_dir=folder)
        tokens = read_shard(downloaded, VOCAB_SIZE)
        os.replace(downloaded, path)
    print(f"{name}: downloaded, {len(tokens):,} tokens")


def main(argv):
    parser = command_parser("data", __doc__)
    add = parser.add_argument
    add("dataset", choices=["fineweb", "edu"])
    add("shards", type=int, nargs="?", default=9, metavar="N", help="training shards; default: 9")
    add(
        "--out", type=Path, metavar="DIR", help="folder; default: data/fineweb10B or data/finewebedu10B"
    )
    args = parser.parse_args(argv)
    dataset = DATASETS[args.dataset]
    if not 0 <= args.shards <= dataset.shards:
        parser.error(f"N must be from 0 to {dataset.shards}, not {args.shards}")
    out = args.out or ROOT / dataset.folder
    name = Path(dataset.folder).name  # fineweb10B, or finewebedu10B
    repo = f"kjj0/{name}-gpt2"
    prefix = name.removesuffix("10B")
    print(f"{repo}: the validation shard and {args.shards} training shards, into {out}")
    fetch(repo, f"{prefix}_val_000000.bin", out)
    for i in range(1, args.shards + 1):
        fetch(repo, f"{prefix}_train_{i:06d}.bin", out)


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
