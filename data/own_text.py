"""
Makes shards of your own text: with a vocabulary of 1,024 tokens for the track mini, or GPT-2's for fineweb.

    ./run.sh data text "notes/**/*.md" "dumps/*.jsonl" [--out data/mine]
    ./run.sh data text --vocab 50257 "dumps/*.jsonl"

The files are read in the order of their sorted paths. A .jsonl or .ndjson file has one JSON object
per line, and the "text" of each object is a document, as is each "text" of a .parquet file. Any other file is
one document. Each document is preceded by end-of-text, the last token.

The shards are called after the text. Of notes.txt or notes/*.md, the first one, notes_val_000000.bin, is the
validation set; the others, notes_train_000001.bin and so on, are the training set. A document may continue
in the next shard, and the last shard may be shorter than the others. A shard is written to a temporary file
and renamed when it is complete. After an error or an interruption, or when the text has changed, run the same
command again: it makes all shards of this text anew.
"""

import glob
import hashlib
import json
import os
import re
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from data.datasets import MINI_VOCAB
from data.gpt2_bpe import VOCAB_SIZE, gpt2_encoding, tokenize
from data.shards import check_shard, split_tokens, write_shard
from judge.commands import UserError, command_parser, run_command, stop_on_signals, whole_number
from judge.text import plural
from lib.processes import ROOT

FEWEST_STEPS = 50  # of mini


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
# The command


def parse_arguments(argv):
    parser = command_parser("data text", __doc__)
    add = parser.add_argument
    add("patterns", nargs="+", help="text or .jsonl files; ** matches folders of any depth")
    add(
        "--vocab",
        type=int,
        default=MINI_VOCAB,
        metavar="V",
        help=f"size of the vocabulary; {VOCAB_SIZE} is all of GPT-2's; default: %(default)s, as in mini",
    )
    add("--out", type=Path, metavar="DIR", help="folder; default: data/own_text_V")
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
        help="tokens in the validation shard; default: a tenth, at most as many as a run reads",
    )
    return parser.parse_args(argv)


def first_tokens(arrays, count):
    """Reads arrays until they have `count` tokens. Returns their number, and all arrays again."""
    read = []
    found = 0
    for array in arrays:
        read.append(array)
        found += len(array)
        if found >= count:
            break
    return found, chain(read, arrays)


def default_val_tokens(count, hp):
    """A tenth of `count` tokens, at most as many as a run reads. Raises UserError if they are too few for
    mini."""
    tenth = min(hp.val_tokens + 1, count // 10)
    if hp.track == "fineweb":
        return max(1, tenth)
    # the last token of a shard is only a target
    fewest = FEWEST_STEPS * hp.train_seq_len + 1 + hp.val_seq_len + 1
    if count < fewest:
        whole = (hp.num_iterations * hp.batch_tokens + 1) * 10 // 9
        raise UserError(
            f"{count:,} tokens are too few to learn from: you need at least {fewest:,}, and {whole:,} for "
            "mini as it is; add text"
        )
    return max(hp.val_seq_len + 1, tenth)


def training_command(out, name, vocab_size, hp):
    """The command that trains mini on the shards: with smaller steps or fewer steps, if the text is short."""
    lengths = [check_shard(path) for path in out.glob(f"{name}_train_*.bin")]
    for batch in (hp.batch_tokens, hp.train_seq_len):
        steps = sum((length - 1) // batch for length in lengths)
        if steps >= hp.num_iterations:
            break
    sequences = (check_shard(out / f"{name}_val_000000.bin") - 1) // hp.val_seq_len
    if sequences > 1:
        sequences -= sequences % 2  # so that two processes can share them
    folder = os.path.relpath(out)
    options = dict(
        vocab_size=vocab_size,
        eot_token=vocab_size - 1,
        val_tokens=min(hp.val_tokens, sequences * hp.val_seq_len),
        batch_tokens=batch,
        num_iterations=min(hp.num_iterations, steps),
    )
    words = [f" --{option} {n}" for option, n in options.items() if n != getattr(hp, option)]
    return (
        f"./run.sh --track mini --train_files '{folder}/{name}_train_*.bin' \\\n"
        f"    --val_files '{folder}/{name}_val_*.bin'{''.join(words)}"
    )


def write_shards(shards, val_tokens, out, name):
    """Writes a stream of token arrays, the validation shard first, in place of all shards of this name. Returns
    their number. Raises UserError if there is no training data, before writing anything."""
    val = next(shards, ())
    train = next(shards, None)
    if train is None:
        raise UserError(
            f"the text has only {len(val):,} tokens, and the validation shard takes "
            f"{val_tokens:,}, so none are left for training; add text, or lower --val_tokens"
        )
    for split in ("train", "val"):
        for old in out.glob(f"{name}_{split}_{'[0-9]' * 6}.bin"):
            old.unlink()
    for i, tokens in enumerate(chain([val, train], shards)):
        split = "train" if i else "val"
        path = out / f"{name}_{split}_{i:06d}.bin"
        write_shard(path, tokens)
        tqdm.write(f"{path}: {len(tokens):,} tokens")
    return i + 1


def main(argv):
    args = parse_arguments(argv)
    out = args.out or ROOT / "data" / f"own_text_{args.vocab}"
    paths = find_files(args.patterns)
    print(f"{len(paths)} file(s), {sum(map(os.path.getsize, paths)):,} bytes")
    from train_gpt import TRACKS  # with PyTorch, which takes seconds: a wrong path is noticed before

    hp = TRACKS["fineweb" if args.vocab == VOCAB_SIZE else "mini"]
    encoding = gpt2_encoding(args.vocab)
    out.mkdir(parents=True, exist_ok=True)  # a folder that can't be written is noticed now
    # with disable=None, there is no bar unless on a terminal
    texts = without_repeats(tqdm(stream_files(paths), unit=" documents", disable=None))
    arrays = tokenize(texts, encoding)
    count, arrays = first_tokens(arrays, 10 * (hp.val_tokens + 1))
    val_tokens = default_val_tokens(count, hp)
    if args.val_tokens:
        val_tokens = args.val_tokens
    shards = split_tokens(arrays, val_tokens, args.shard_size)
    name = name_of(args.patterns[0])
    count = write_shards(shards, val_tokens, out, name)
    print(f"done: {count} shards")
    if hp.track == "mini":
        print(f"Now train on them:\n\n{training_command(out, name, args.vocab, hp)}")


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
