"""
Shards of GPT-2 tokens from raw text: FineWeb or FineWeb-Edu, streamed from the hub, or your own files.

    python data/fineweb.py                                                 # FineWeb's sample of 10B tokens
    python data/fineweb.py --version fineweb-edu --config sample-100BT --max_tokens 5_000_000_000
    python data/fineweb.py --files "notes/**/*.md" "dumps/*.jsonl" --out data/mine

Every document is preceded by end-of-text (50256). The first shard, fineweb_val_000000.bin, is for validation,
the others, fineweb_train_000001.bin and so on, for training; documents go on from one shard into the next, and
the last shard may be shorter. A shard gets its name only when it is complete.

Own files are read in the order of their sorted paths: a .jsonl file holds one JSON object a line, whose "text"
is a document; any other file is one document. The hub's datasets need data/requirements.txt.
"""
import argparse
import glob
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
from gpt2_bpe import EOT, fetch_vocabulary, gpt2_encoding
from machine import usable_cores
from shards import ShardError, hub_unreachable, run_script, split_tokens, write_shard

DATASETS = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
BATCH = 64  # documents handed to a process at a time

# -----------------------------------------------------------------------------
# Documents

def stream_dataset(version, config):
    """The texts of a FineWeb dataset, in its order, downloaded while they are read."""
    try:
        for row in dataset_rows(version, config):
            yield row["text"]
    except Exception as e:  # the hub's own errors and its HTTP library's have no base class in common
        if message := hub_unreachable(e):
            raise ShardError(message) from None
        raise


def dataset_rows(version, config):
    try:
        from datasets import load_dataset  # slow to import, and own files do not need it
        return load_dataset(DATASETS[version], name=config, split="train", streaming=True)
    except ImportError as e:
        requirements = Path(__file__).resolve().parent / "requirements.txt"
        raise ShardError(f"{e}: run pip install -r {requirements}") from None
    except ValueError as e:  # the datasets library's answer to an unknown config
        raise ShardError(str(e)) from None


def find_files(patterns):
    """The files that match the glob patterns, each once, sorted. Raises ShardError if a pattern has none."""
    files = set()
    for pattern in patterns:
        matches = list(filter(os.path.isfile, glob.glob(os.path.expanduser(pattern), recursive=True)))
        if not matches:
            raise ShardError(f"--files: no file matches {pattern}")
        files.update(matches)
    return sorted(files)


def stream_files(paths):
    """The texts of own files. Raises ShardError where one is not what its name says."""
    for path in paths:
        try:
            with open(path, encoding="utf-8", newline="") as f:  # newline="": no line ending is changed
                if path.endswith(".jsonl"):
                    for number, line in enumerate(f, start=1):
                        if line.strip():
                            yield jsonl_text(line, f"{path}, line {number}")
                else:
                    yield f.read()
        except UnicodeDecodeError:
            raise ShardError(f"{path}: not UTF-8 text") from None


def jsonl_text(line, where):
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ShardError(f"{where}: not JSON ({e})") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ShardError(f'{where}: no string under "text"')
    return row["text"]

# -----------------------------------------------------------------------------
# Tokens, on all cores

def start_worker():
    """Load the vocabulary once per process; leave Ctrl-C to the parent, and never outlive it."""
    global encoding
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    encoding = gpt2_encoding()


def encode_documents(texts):
    """Texts to tokens, (n,) uint16, with EOT before each; "<|endoftext|>" within a text is ordinary text."""
    tokens = []
    for text in texts:
        tokens.append(EOT)
        tokens.extend(encoding.encode_ordinary(text))
    return np.array(tokens, dtype=np.uint16)


def tokenize(texts, workers):
    """Stream texts through `workers` processes: yields uint16 arrays, in the texts' order."""
    # spawn, not fork: the datasets library runs threads, which a forked process must not inherit
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker)
    texts, pending = iter(texts), deque()
    try:
        while batch := list(islice(texts, BATCH)):
            pending.append(pool.submit(encode_documents, batch))
            if len(pending) > 4 * workers:  # enough to keep all busy, and a bound on memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise ShardError("a tokenizing process died (out of memory?): try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def limit(arrays, count, progress):
    """The first `count` tokens of a stream of arrays (None: all), shown on a progress bar."""
    left = float("inf") if count is None else count
    for array in arrays:
        array = array[:min(left, len(array))]
        progress.update(len(array))
        yield array
        left -= len(array)
        if left == 0:
            return

# -----------------------------------------------------------------------------
# Shards

def positive_int(text):
    if (n := int(text)) < 1:
        raise ValueError
    return n


def parse_arguments():
    parser = argparse.ArgumentParser(description="Make GPT-2 token shards from FineWeb or from your own text.")
    parser.add_argument("--version", choices=DATASETS, default="fineweb",
                        help="dataset (default: %(default)s)")
    parser.add_argument("--config", default="sample-10BT", help="its configuration (default: %(default)s)")
    parser.add_argument("--files", nargs="+", metavar="GLOB",
                        help="own text or .jsonl files instead, ** for any depth")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="folder for the shards (default, beside this script: fineweb10B/, "
                             "fineweb_edu10B/ for fineweb-edu, own_text/ for --files)")
    parser.add_argument("--shard_size", type=positive_int, default=100_000_000, metavar="N",
                        help="tokens in a training shard (default: 100M)")
    parser.add_argument("--val_tokens", type=positive_int, metavar="N",
                        help="tokens in the validation shard (default: shard_size; for --files a fortieth "
                             "of their bytes, about a tenth of their tokens, if that is less)")
    parser.add_argument("--max_tokens", type=positive_int, metavar="N",
                        help="stop after N tokens (default: at the end)")
    parser.add_argument("--workers", type=positive_int, default=usable_cores(), metavar="N",
                        help="processes that tokenize (default: one per core)")
    args = parser.parse_args()
    if args.out is None:
        folder = "own_text" if args.files else args.version.replace("-", "_") + "10B"
        args.out = Path(__file__).resolve().parent / folder
    return args


def main():
    args = parse_arguments()
    # shards of two runs in one folder would train as one dataset
    if there := sorted(args.out.glob("fineweb_*_*.bin")):
        raise ShardError(f"{args.out} holds shards already ({there[0].name}...): "
                         f"remove them, or choose another --out")
    val_tokens = args.val_tokens or args.shard_size
    if args.files:
        paths = find_files(args.files)
        size = sum(os.path.getsize(path) for path in paths)
        print(f"{len(paths)} file(s), {size:,} bytes")
        # English is about four bytes a token
        val_tokens = args.val_tokens or max(1, min(args.shard_size, size // 40))
        texts = stream_files(paths)
    else:
        print(f"streaming {DATASETS[args.version]}, config {args.config}")
        texts = stream_dataset(args.version, args.config)
    fetch_vocabulary()  # here, once, not in every process

    start = time.perf_counter()
    progress = tqdm(total=args.max_tokens, unit=" tokens", unit_scale=True, disable=not sys.stderr.isatty())
    arrays = limit(tokenize(texts, args.workers), args.max_tokens, progress)
    shards = split_tokens(arrays, val_tokens, args.shard_size)
    val, train = next(shards, ()), next(shards, None)
    if train is None:  # known before anything is written
        raise ShardError(f"the text has {len(val):,} tokens, none beyond the {val_tokens:,} for validation: "
                         f"give more text, or fewer --val_tokens")
    total = 0
    for i, tokens in enumerate(chain([val, train], shards)):
        path = args.out / f"fineweb_{'train' if i else 'val'}_{i:06d}.bin"
        write_shard(path, tokens)
        total += len(tokens)
        tqdm.write(f"{path}: {len(tokens):,} tokens")
    progress.close()
    print(f"{total:,} tokens in {i + 1} shards, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    run_script(main)
