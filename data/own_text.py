"""
Makes shards of your own text: of GPT-2 tokens for the track fineweb, or of bytes for the track mini.

    ./run.sh data text "notes/**/*.md" "dumps/*.jsonl" [--out data/mine]
    ./run.sh data text --bytes notes.txt

The files are read in the order of their sorted paths. A .jsonl or .ndjson file has one JSON object
per line, and the "text" of each object is a document, as is each "text" of a .parquet file. Any other file is
one document. Each document is preceded by end-of-text (50256, or 256 after the 256 bytes).

The shards are called after the text. Of notes.txt or notes/*.md, the first one, notes_val_000000.bin, is the
validation set; the others, notes_train_000001.bin and so on, are the training set. A document may continue
in the next shard, and the last shard may be shorter than the others. A shard is written to a temporary file
and renamed when it is complete. After an error or an interruption, or when the text has changed, run the same
command again: shards that are as they should be stay, and the others are made anew.
"""

import glob
import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.gpt2_bpe import EOT, fetch_vocabulary, gpt2_encoding
from data.shards import check_shard, read_shard, split_tokens, write_shard
from judge.commands import UserError, command_parser, run_command, stop_on_signals, whole_number
from judge.environment import usable_cores
from judge.text import plural
from lib.processes import ROOT

BATCH = 64  # documents sent to a process at a time
# Of the track mini
MINI_STEPS = 325
MINI_BATCHES = (4096, 2048, 1024)  # bytes per step: the default, and what suits shorter texts
MINI_SEQUENCE = 12_160  # bytes per validation sequence
MINI_VAL = 389_120  # bytes for validation
FEWEST_BYTES = 100_000  # about 90 steps


# -----------------------------------------------------------------------------
# Documents


def find_files(patterns):
    """Returns the files that match the glob patterns, sorted, each once: otherwise a file could be in the
    validation set and in the training set. The path of an existing file matches that file only, because a
    shell may have expanded a pattern. Raises UserError if a pattern matches no file."""
    paths = set()
    for pattern in patterns:
        matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        matches = list(filter(os.path.isfile, matches))
        if not matches:
            raise UserError(f"no file matches {pattern}")
        paths.update(map(os.path.realpath, matches))
    return sorted(paths)


def without_repeats(texts):
    """Yields each text once, also if copies differ in white space: a copy in the training text would make the
    validation loss too low. Prints how many it leaves out."""
    seen = set()
    repeats = 0
    for text in texts:
        words = " ".join(text.split())
        digest = hashlib.blake2b(words.encode(errors="replace"), digest_size=16).digest()
        if digest in seen:
            repeats += 1
        else:
            seen.add(digest)
            yield text
    if repeats:
        tqdm.write(f"left out {plural(repeats, 'document')} that the text has already")


def stream_files(paths):
    """Yields the texts of the files. Raises UserError."""
    for path in paths:
        if path.lower().endswith((".jsonl", ".ndjson")):
            yield from jsonl_texts(read_lines(path), path)
        elif path.lower().endswith(".parquet"):
            yield from parquet_texts(path)
        else:
            yield "".join(read_lines(path))


def read_lines(path):
    """Yields the lines of a file with their ends, without a byte-order mark. Raises UserError unless
    it is UTF-8 text. Zero bytes mean UTF-16, or no text."""
    with open(path, encoding="utf-8-sig", newline="") as f:
        try:
            for line in f:
                if "\0" in line:
                    raise UnicodeError
                yield line
        except UnicodeError:
            raise UserError(f"{path}: not UTF-8 text; convert it, or leave it out") from None


def jsonl_texts(lines, path):
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, LookupError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise UserError(f'{path}, line {number}: no JSON object with a string as its "text"')
        yield text


def parquet_texts(path):
    """Yields the texts of a file as on the Hugging Face hub. Raises UserError."""
    import pyarrow.parquet  # ./run.sh installs it if a parquet file is named

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=["text"]):
            texts = batch.column("text").to_pylist()
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("a text is no string")
            yield from texts
    except (ValueError, LookupError) as e:  # pyarrow's errors, too
        raise UserError(f'{path}: no parquet file with strings in a column "text" ({e})') from None


def name_of(pattern):
    """What the shards of a text are called: its file or folder, in front of the first * or ?."""
    plain = re.split(r"[*?\[]", pattern)[0]
    return re.sub(r"[^\w-]", "_", Path(plain).stem) or "text"


# -----------------------------------------------------------------------------
# Tokenizing on all cores


def start_worker():
    """Runs once in each process: loads the vocabulary, ignores Ctrl-C (the parent handles it), and
    exits when the parent exits."""
    global encoding
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    encoding = gpt2_encoding()


def exit_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_documents(texts):
    """Returns the tokens of the texts, (n,) uint16, with EOT before each text. "<|endoftext|>"
    inside a text is encoded as ordinary text."""
    tokens = []
    for text in texts:
        tokens.append(EOT)
        tokens += encoding.encode_ordinary(text)
    return np.array(tokens, dtype=np.uint16)


def tokenize(texts, workers):
    """Tokenizes a stream of texts in `workers` processes. Yields uint16 arrays in the order of the
    texts. Raises UserError if a process dies."""
    # Spawn, because the progress bar has a thread, which doesn't survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker)
    max_pending = 4 * workers  # enough to keep all processes busy, and a bound on memory
    texts = iter(texts)
    pending = deque()
    try:
        while batch := list(islice(texts, BATCH)):
            pending.append(pool.submit(encode_documents, batch))
            if len(pending) > max_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenizer process died, perhaps because the memory was full; run the same command again "
            "with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def byte_tokens(texts):
    """Yields the bytes of each text as tokens, with end-of-text (256) before them."""
    for text in texts:
        content = np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)
        yield np.concatenate([[256], content]).astype(np.uint16)


# -----------------------------------------------------------------------------
# The command


def parse_arguments(argv):
    parser = command_parser("data text", __doc__)
    add = parser.add_argument
    add("patterns", nargs="+", help="text or .jsonl files; ** matches folders of any depth")
    add("--bytes", action="store_true", help="make tokens of bytes, for the track mini")
    add("--out", type=Path, metavar="DIR", help="folder; default: data/own_text or data/own_bytes")
    add(
        "--shard_size",
        type=whole_number,
        default=100_000_000,
        metavar="N",
        help="tokens in a training shard; default: 100M",
    )
    add(
        "--val_tokens",
        type=whole_number,
        metavar="N",
        help="tokens in the validation shard; default: about a tenth of the text",
    )
    add(
        "--workers",
        type=whole_number,
        default=usable_cores(),
        metavar="N",
        help="processes that tokenize; default: one per core",
    )
    return parser.parse_args(argv)


def default_val_tokens(size, args):
    """About a tenth of `size` bytes of text. Raises UserError if they are too few for mini."""
    if not args.bytes:
        # English has about four bytes a token, so a fortieth of the bytes is a tenth of the tokens.
        return max(1, min(args.shard_size, size // 40))
    if size < FEWEST_BYTES:
        raise UserError(
            f"{size:,} bytes are too few to learn from: you need at least {FEWEST_BYTES:,}, and "
            f"{bytes_for_mini():,} for mini as it is; add text"
        )
    return max(MINI_SEQUENCE + 1, min(MINI_VAL + 1, size // 10))


def bytes_for_mini():
    """How many bytes of text all steps of mini need, with a tenth for validation."""
    return (MINI_STEPS * MINI_BATCHES[0] + 1) * 10 // 9


def training_command(out, name):
    """The command that trains mini on the shards of bytes: with smaller steps or fewer steps, if the text
    is short."""
    folder = os.path.relpath(out)
    lengths = [check_shard(path) for path in out.glob(f"{name}_train_*.bin")]
    for batch in MINI_BATCHES:
        steps = sum((length - 1) // batch for length in lengths)
        if steps >= MINI_STEPS:
            break
    sequences = (check_shard(out / f"{name}_val_000000.bin") - 1) // MINI_SEQUENCE
    sequences -= sequences % 2 if sequences > 1 else 0  # so that two processes can share them
    options = f"--val_tokens {min(MINI_VAL, sequences * MINI_SEQUENCE)}"
    if batch < MINI_BATCHES[0]:
        options += f" --batch_tokens {batch}"
    if steps < MINI_STEPS:
        options += f" --num_iterations {steps}"
    return (
        f"./run.sh --track mini --train_files '{folder}/{name}_train_*.bin' \\\n"
        f"    --val_files '{folder}/{name}_val_*.bin' {options}"
    )


def remove_shards(out, name, first):
    """Removes the shards of a text from number `first` on."""
    for split in ("train", "val"):
        for path in out.glob(f"{name}_{split}_{'[0-9]' * 6}.bin"):
            if int(path.stem[-6:]) >= first:
                path.unlink()


def write_shards(shards, val_tokens, out, name):
    """Writes a stream of token arrays, the validation shard first. Shards that are there stay as long as they
    are equal; then all others of this name are removed. Returns the number of shards. Raises UserError if
    there is no training data, before writing anything."""
    val = next(shards, ())
    train = next(shards, None)
    if train is None:
        raise UserError(
            f"the text has only {len(val):,} tokens, and the validation shard takes "
            f"{val_tokens:,}, so none are left for training; add text, or lower --val_tokens"
        )
    for i, tokens in enumerate(chain([val, train], shards)):
        split = "train" if i else "val"
        path = out / f"{name}_{split}_{i:06d}.bin"
        if not (path.exists() and np.array_equal(read_shard(path), tokens)):
            remove_shards(out, name, i)
            write_shard(path, tokens)
        tqdm.write(f"{path}: {len(tokens):,} tokens")
    remove_shards(out, name, i + 1)
    return i + 1


def main(argv):
    args = parse_arguments(argv)
    out = args.out or ROOT / "data" / ("own_bytes" if args.bytes else "own_text")
    paths = find_files(args.patterns)
    size = sum(os.path.getsize(path) for path in paths)
    print(f"{len(paths)} file(s), {size:,} bytes")
    val_tokens = default_val_tokens(size, args)
    if args.val_tokens:
        val_tokens = args.val_tokens
    out.mkdir(parents=True, exist_ok=True)  # a folder that can't be written is noticed now
    # with disable=None, there is no bar unless on a terminal
    texts = without_repeats(tqdm(stream_files(paths), unit=" documents", disable=None))
    if args.bytes:
        arrays = byte_tokens(texts)
    else:
        fetch_vocabulary()  # once, before the worker processes load it
        arrays = tokenize(texts, args.workers)
    shards = split_tokens(arrays, val_tokens, args.shard_size)
    name = name_of(args.patterns[0])
    count = write_shards(shards, val_tokens, out, name)
    print(f"done: {count} shards")
    if args.bytes:
        print(f"Now train on them:\n\n{training_command(out, name)}")


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
