"""
HellaSwag (Zellers et al. 2019): which of four endings continues a text? Chance is 25%.

    python evals/hellaswag.py CHECKPOINT [--limit N] [--data FILE]
    torchrun --standalone --nproc_per_node=8 evals/hellaswag.py gpt2

CHECKPOINT is the model.safetensors of train_gpt.py or of the baseline, or gpt2, gpt2-medium, gpt2-large, gpt2-xl.
Completion style: the model scores context + " " + ending, and the cross-entropy over the ending's tokens alone
decides; `acc` takes the ending of the lowest sum, `acc_norm` the one of the lowest mean per token.
The field's numbers for this scoring: GPT-2 124M has an acc_norm of 29.55%, GPT-2 XL one of 48.93%.

The 10,042 validation items come from the hub's Rowan/hellaswag; --data reads a local .parquet or .jsonl instead.
"""
import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: see train_gpt.py
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm


class DataError(Exception):
    """The items cannot be had or read; the message is one line."""


def load_items(path=None, limit=None) -> list[dict]:
    """The first `limit` items, each {"ctx": str, "endings": four str, "label": int}. Raises DataError."""
    if path is None:
        from huggingface_hub import hf_hub_download
        try:
            path = hf_hub_download("Rowan/hellaswag", "data/validation-00000-of-00001.parquet", repo_type="dataset")
        except Exception as e:  # the hub's errors have no common base class
            raise DataError(f"cannot fetch HellaSwag from the Hugging Face hub ({type(e).__name__}); "
                            "check the network, or evaluate a local file with --data") from e
    try:
        if str(path).endswith(".parquet"):
            import pyarrow.parquet
            rows = pyarrow.parquet.read_table(path, columns=["ctx", "endings", "label"]).to_pylist()
        else:
            rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as e:  # pyarrow's errors and broken JSON are ValueErrors
        raise DataError(f"{path}: not HellaSwag items ({' '.join(str(e).split())[:100]})") from e
    items = []
    for number, row in enumerate(rows[:limit], 1):
        try:
            item = dict(ctx=row["ctx"], endings=list(row["endings"]), label=int(row["label"]))
            good = item["ctx"] and len(item["endings"]) == 4 and all(item["endings"]) and 0 <= item["label"] < 4
        except (KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise DataError(f"{path}: item {number} is not a context, four endings and a label from 0 to 3")
        items.append(item)
    if not items:
        raise DataError(f"{path}: no items")
    return items


def tokenize(item: dict, encode, context: int):
    """-> four (row, n): the ids of context + " " + ending, and how many of them at the end are the ending's.
    What is longer than the model's context loses its beginning."""
    ctx = encode(item["ctx"])
    rows = []
    for ending in item["endings"]:
        tokens = encode(" " + ending)
        row = (ctx + tokens)[-(context + 1):]  # the last token is only predicted
        rows.append((row, min(len(tokens), len(row) - 1)))
    return rows


def ending_losses(logits_fn, rows, vocab_size: int, device):
    """rows of (ids, n) -> summed and mean cross-entropy of each row's last n tokens, two float32 (rows,) tensors.
    logits_fn: ids (B, T) -> logits (B, T, at least vocab_size), causal, so that padding at the end has no effect."""
    width = max(len(row) for row, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows], device=device)
    at = torch.arange(width - 1, device=device)
    length, n = torch.tensor([(len(row), n) for row, n in rows], device=device).T[..., None]
    counted = (at >= length - 1 - n) & (at < length - 1)  # position t predicts token t + 1; (B, T - 1)
    logits = logits_fn(ids[:, :-1])[counted][:, :vocab_size].float()
    losses = F.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    sums = torch.zeros(len(rows), device=device).index_add_(0, counted.nonzero()[:, 0], losses)
    return sums, sums / n[:, 0]


@torch.no_grad()
def score(logits_fn, items, encode, vocab_size: int, context: int, device, rank=0, world_size=1, batch_tokens=4096,
          progress=False):
    """Scores the items, shared out over the ranks -> (items, right by sum, right by mean), the counts of all ranks.

    Sorted by length, so that little of a batch is padding; the longest come first, so that too much memory is asked
    for at the start or not at all.
    """
    tokenized = [(tokenize(item, encode, context), item["label"]) for item in items]
    tokenized.sort(key=lambda pair: -max(len(row) for row, _ in pair[0]))
    mine = tokenized[rank::world_size]
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    with tqdm(total=len(mine), unit="item", disable=None if progress and rank == 0 else True) as bar:
        while mine:
            n = max(1, batch_tokens // (4 * max(len(row) for row, _ in mine[0][0])))
            batch, mine = mine[:n], mine[n:]
            sums, means = ending_losses(logits_fn, [row for rows, _ in batch for row in rows], vocab_size, device)
            labels = torch.tensor([label for _, label in batch], device=device)
            right = [(x.view(-1, 4).argmin(1) == labels).sum() for x in (sums, means)]
            counts += torch.stack([torch.tensor(len(batch), device=device), *right])
            bar.update(len(batch))
    if world_size > 1:
        dist.all_reduce(counts)
    return counts.tolist()


def summary(counts) -> str:
    """One line: acc and acc_norm, each with the standard error of a proportion."""
    n = counts[0]
    parts = [f"{name}:{k / n:.4f} +- {(k / n * (1 - k / n) / n) ** 0.5:.4f}"
             for name, k in zip(("acc", "acc_norm"), counts[1:])]
    return f"{' '.join(parts)} items:{n}"


def main():
    parser = argparse.ArgumentParser(description="HellaSwag accuracy of a checkpoint.", allow_abbrev=False)
    parser.add_argument("checkpoint", help="a model.safetensors, its folder, or gpt2, gpt2-medium, ...")
    parser.add_argument("--limit", type=int, help="only the first N items")
    parser.add_argument("--data", help="a local .parquet or .jsonl instead of the hub's")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="tokens in a batch; default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1 or args.batch_tokens < 1:
        raise DataError("--limit and --batch_tokens must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise DataError("--device cuda: PyTorch finds no CUDA GPU here; use --device cpu")

    from models import load
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    items = load_items(args.data, args.limit)
    c = load(args.checkpoint, device)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    counts = score(lambda ids: c.forward(c.model, ids), items, c.encode, c.vocab_size, c.context, device, rank,
                   world_size, args.batch_tokens, progress=True)
    if rank == 0:
        print(f"hellaswag {summary(counts)}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    from models import InputError
    try:
        main()
    except (DataError, InputError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
