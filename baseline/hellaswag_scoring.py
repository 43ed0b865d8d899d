"""
HellaSwag (Zellers et al. 2019, https://arxiv.org/abs/1905.07830): which of four endings continues a
text? Guessing gets 25% right.

This module loads the items and scores a model on them. train_gpt2.py uses it during training and
evals/hellaswag.py uses it for a saved model.

Scoring is completion style: the model reads context + " " + ending, and only the cross-entropy of
the ending's tokens counts. `acc` chooses the ending with the lowest sum, `acc_norm` the one with
the lowest mean per token.
"""
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

REPO = "Rowan/hellaswag"
FILE = "data/validation-00000-of-00001.parquet"


class DataError(Exception):
    """A user error about the items: printed as one line, without a traceback."""


class DownloadError(DataError):
    """The items can't be downloaded."""


# -----------------------------------------------------------------------------
# Items

def load_items(path=None, limit=None) -> list[dict]:
    """Loads the validation items: {"ctx": str, "endings": list of 4 str, "label": int}.

    path: a .parquet or .jsonl file. By default the items come from the Hugging Face hub.
    limit: return only the first `limit` items.
    Raises DataError.
    """
    if path is None:
        path = download_items()
    items = []
    for number, row in enumerate(read_rows(path)[:limit], start=1):
        item = parse_item(row)
        if item is None:
            raise DataError(
                f"{path}: item {number} must have a context, four endings and a label from 0 to 3"
            )
        items.append(item)
    if not items:
        raise DataError(f"{path}: no items")
    return items


def download_items() -> str:
    from huggingface_hub import hf_hub_download
    try:
        return hf_hub_download(REPO, FILE, repo_type="dataset")
    except Exception as e:  # the hub's errors share no base class
        raise DownloadError(
            f"cannot download HellaSwag from the Hugging Face hub ({type(e).__name__}); check the "
            "network and run the same command again"
        ) from e


def read_rows(path) -> list:
    """Returns the rows of a .parquet file, or the lines of any other file parsed as JSON. Raises
    DataError."""
    try:
        if str(path).endswith(".parquet"):
            import pyarrow.parquet
            table = pyarrow.parquet.read_table(path, columns=["ctx", "endings", "label"])
            return table.to_pylist()
        # not splitlines(), because a text in JSON may have other line separators, such as U+2028
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        return parse_lines(lines)
    except ImportError as e:
        raise DataError(
            f"HellaSwag needs pyarrow ({e}); run pip install -r evals/requirements.txt"
        ) from e
    except (OSError, ValueError) as e:  # pyarrow's errors and JSON errors are ValueErrors
        reason = " ".join(str(e).split())[:100]
        raise DataError(f"{path}: can't be read as HellaSwag items ({reason})") from e


def parse_lines(lines) -> list:
    """Parses each line that isn't blank as JSON. Raises ValueError that names a bad line."""
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as e:
            raise ValueError(f"line {number} is not JSON: {e}") from e
    return rows


def parse_item(row):
    """Returns the item of a row, or None if the row isn't one."""
    try:
        context = row["ctx"]
        endings = row["endings"]
        label = int(row["label"])
    except (KeyError, TypeError, ValueError, OverflowError):  # int(inf) overflows
        return None
    if not isinstance(endings, list) or len(endings) != 4 or not 0 <= label < 4:
        return None
    for text in (context, *endings):
        if not isinstance(text, str) or not text:
            return None
    return {"ctx": context, "endings": endings, "label": label}


# -----------------------------------------------------------------------------
# Scores

def tokenize(item: dict, encode, context: int) -> list[tuple[list[int], int]]:
    """Returns four (tokens, n), one for each ending: the tokens of context + " " + ending, of which
    the last n are the ending's. Rows longer than the model's context lose their beginning."""
    context_tokens = encode(item["ctx"])
    rows = []
    for ending in item["endings"]:
        ending_tokens = encode(" " + ending)
        row = context_tokens + ending_tokens
        row = row[-(context + 1):]  # the last token is a target only
        n = min(len(ending_tokens), len(row) - 1)
        rows.append((row, n))
    return rows


def ending_losses(logits_fn, rows, vocab_size: int, device):
    """Computes the cross-entropy of the last n tokens of each row, in nats.

    logits_fn: maps tokens (B, T) int64 to logits (B, T, V), V >= vocab_size. It must be causal,
        because rows are padded at the end.
    rows: list of (tokens, n).
    Returns (sums, means), each (rows,) float32.
    """
    width = max(len(row) for row, n in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, n in rows], device=device)
    lengths = torch.tensor([[len(row)] for row, n in rows], device=device)
    counts = torch.tensor([[n] for row, n in rows], device=device)
    # position t predicts token t + 1, so the ending is predicted at the last n of length - 1
    position = torch.arange(width - 1, device=device)
    is_ending = (position >= lengths - 1 - counts) & (position < lengths - 1)  # (rows, width - 1)
    logits = logits_fn(ids[:, :-1])[is_ending]
    logits = logits[:, :vocab_size].float()
    losses = F.cross_entropy(logits, ids[:, 1:][is_ending], reduction="none")
    row_of_loss = is_ending.nonzero()[:, 0]
    sums = torch.zeros(len(rows), device=device)
    sums.index_add_(0, row_of_loss, losses)
    return sums, sums / counts[:, 0]


def count_right(losses, labels):
    """losses (4 * items,), labels (items,) -> how many items' lowest loss is the label's."""
    chosen = losses.view(-1, 4).argmin(dim=1)
    return (chosen == labels).sum().item()


@torch.no_grad()
def score(
    logits_fn,
    items,
    encode,
    vocab_size: int,
    context: int,
    device,
    rank=0,
    world_size=1,
    batch_tokens=4096,
    progress=False,
) -> list[int]:
    """Scores the items, divided among the ranks.

    logits_fn: see ending_losses.
    encode: maps a str to a list of token ids.
    context: the most tokens that the model can read.
    batch_tokens: the most tokens in a batch.
    progress: show a progress bar on rank 0.
    Returns the counts of all ranks: [items, right by acc, right by acc_norm]. Raises DataError on
    all ranks if a loss is not finite.
    """
    tokenized = [(tokenize(item, encode, context), item["label"]) for item in items]
    # Sorting by length keeps padding low. The longest come first, so that the largest batch, which
    # may not fit in memory, fails at the start.
    tokenized.sort(key=lambda pair: longest_row(pair[0]), reverse=True)
    mine = tokenized[rank::world_size]
    right_by_sum = 0
    right_by_mean = 0
    not_finite = 0  # sums of an ending's losses
    show = progress and rank == 0
    with tqdm(total=len(mine), unit="item", disable=None if show else True) as bar:
        start = 0
        while start < len(mine):
            longest = longest_row(mine[start][0])
            batch_size = max(1, batch_tokens // (4 * longest))
            batch = mine[start:start + batch_size]
            rows = [row for item_rows, label in batch for row in item_rows]
            labels = torch.tensor([label for item_rows, label in batch], device=device)
            sums, means = ending_losses(logits_fn, rows, vocab_size, device)
            right_by_sum += count_right(sums, labels)
            right_by_mean += count_right(means, labels)
            not_finite += len(sums) - sums.isfinite().sum().item()
            start += len(batch)
            bar.update(len(batch))
    counts = torch.tensor([len(mine), right_by_sum, right_by_mean, not_finite], device=device)
    if world_size > 1:
        dist.all_reduce(counts)
    *counts, not_finite = counts.tolist()
    if not_finite:
        raise DataError(
            f"the model's loss is not finite for {not_finite} of {4 * counts[0]} endings, so it "
            "has no accuracy; check that the model's weights are finite"
        )
    return counts


def longest_row(rows) -> int:
    return max(len(row) for row, n in rows)


def summary(counts) -> str:
    """One line with acc and acc_norm, each with its standard error (that of a proportion)."""
    items = counts[0]
    parts = []
    for name, right in zip(("acc", "acc_norm"), counts[1:]):
        accuracy = right / items
        error = (accuracy * (1 - accuracy) / items) ** 0.5
        parts.append(f"{name}:{accuracy:.4f} +- {error:.4f}")
    return f"{' '.join(parts)} items:{items}"
