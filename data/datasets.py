"""
The datasets that ./run.sh gets by itself. To add one, write a script in this folder, like
shakespeare.py, and add a row here. Then ./run.sh data NAME runs the script. So does a run whose
--train_files are in the dataset's folder, if shards are missing there.
"""

import glob
import math
import sys
from pathlib import Path
from typing import NamedTuple

from lib.processes import ROOT, run, say, setup_lock


# The tokens of the track mini: GPT-2's first 1,023, and end-of-text. Folders of tokens other than all of
# GPT-2's have their number in the name, so that no run reads those of another vocabulary.
MINI_VOCAB = 1024


class Dataset(NamedTuple):
    command: str  # the module of the script, and words for it
    folder: str  # where the script writes *_train_*.bin and *_val_*.bin
    shards: int  # for training; if there are several, the script takes the number to get
    mb: int  # to download for a shard
    unseen: str = ""  # a file of validation tokens that only compare --confirm reads


DATASETS = {
    "shakespeare": Dataset(
        "data.shakespeare",
        f"data/shakespeare_{MINI_VOCAB}",
        shards=1,
        mb=1,
        unseen=f"data/shakespeare_{MINI_VOCAB}/shakespeare_confirm_000000.bin",
    ),
    "fineweb": Dataset("data.fineweb fineweb", "data/fineweb10B", shards=103, mb=200),
    "edu": Dataset("data.fineweb edu", "data/finewebedu10B", shards=99, mb=200),
}


def dataset_of(settings):
    """The dataset that a run with these settings trains on; None if it is your own."""
    folder = str(Path(settings["train_files"]).parent)
    by_folder = {dataset.folder: dataset for dataset in DATASETS.values()}
    return by_folder.get(folder)


def get_data(python, settings):
    """Gets the shards that a run with these settings reads. Your own files stay as they are."""
    dataset = dataset_of(settings)
    if dataset is None:
        return
    # If there are several shards, each has 100M tokens, and no batch is in two of them
    batch_tokens = settings.get("batch_tokens", 2**19)  # january2026 has none: its batches grow
    batches = (10**8 - 1) // batch_tokens
    needed = math.ceil(settings["num_iterations"] / batches)
    shards = min(dataset.shards, max(1, needed))
    command = [python, "-m", *dataset.command.split()]
    if dataset.shards > 1:
        command.append(str(shards))
    with setup_lock():
        files = f"{ROOT}/{dataset.folder}/*"
        found = [len(glob.glob(f"{files}_{split}_*.bin")) for split in ("train", "val")]
        unseen = ROOT / dataset.unseen  # in older clones, it is missing; without one, this is a folder
        if found[0] < shards or not found[1] or not unseen.exists():
            say(f"getting {dataset.folder}: a download of {(shards + 1) * dataset.mb:,} MB")
            status = run(command, cwd=ROOT)
            if status:
                sys.exit(status)
