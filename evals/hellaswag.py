"""
HellaSwag accuracy of a saved model (Zellers et al. 2019, https://arxiv.org/abs/1905.07830): which
of four endings continues a text? Guessing gets 25% right.

    ./run.sh hellaswag MODEL [--limit N] [--data FILE]

The model reads context + " " + ending, and only the cross-entropy of the ending's tokens counts.
`acc` chooses the ending with the lowest sum, `acc_norm` the one with the lowest mean per token. For
comparison, others have measured an acc_norm of 29.55% for GPT-2 124M and 48.93% for GPT-2 XL.

The 10,042 validation items come from the Hugging Face hub (Rowan/hellaswag). --data reads
a copy of its file instead. It is a parquet file, which needs pyarrow.
"""

from data.shards import from_hub
from evals import models
from judge.commands import command_parser, run_command, whole_number
from train_gpt import DEVICE, InputError, require  # before torch: it sets variables that torch reads

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

REPO = "Rowan/hellaswag"
FILE = "data/validation-00000-of-00001.parquet"
IGNORED = -100  # a target that doesn't count

# -----------------------------------------------------------------------------
# Items


def download_items():
    from huggingface_hub import hf_hub_download

    with from_hub("HellaSwag"):
        return hf_hub_download(REPO, FILE, repo_type="dataset")


def load_items(path, limit=None):
    """Returns the first `limit` items, or all: (context, four endings, number of the right one)."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, columns=["ctx", "endings", "label"])
        rows = table.to_pylist()
        return [(row["ctx"], row["endings"], int(row["label"])) for row in rows[:limit]]
    except ValueError as e:  # also pyarrow's errors; the items of the test set have no labels
        raise InputError(f"{path} has no HellaSwag items with labels ({type(e).__name__})")


# -----------------------------------------------------------------------------
# Scores


def ending_losses(model, context, endings):
    """Returns the cross-entropy of each ending after the context, summed and averaged over its
    tokens, (endings,) each, in nats."""
    inputs = []
    targets = []
    for ending in endings:
        tokens = model.encode(" " + ending)
        text = torch.tensor(model.encode(context) + tokens)
        text = text[-(model.context + 1) :]  # too long a text loses its beginning
        target = text[1:].clone()
        target[: -len(tokens)] = IGNORED  # the context
        inputs.append(text[:-1])
        targets.append(target)
    # padded at the end, which a causal model doesn't see: (endings, tokens)
    inputs = pad_sequence(inputs, batch_first=True).to(DEVICE)
    targets = pad_sequence(targets, batch_first=True, padding_value=IGNORED).to(DEVICE)
    logits = model.logits(inputs)[..., : model.vocab_size]
    losses = F.cross_entropy(logits.mT, targets, ignore_index=IGNORED, reduction="none")
    sums = losses.sum(dim=1)
    return sums, sums / (targets != IGNORED).sum(dim=1)


@torch.no_grad()
def score(model, items):
    """Returns counts: [items, right by acc, right by acc_norm]."""
    counts = torch.tensor([len(items), 0, 0], device=DEVICE)
    for context, endings, label in tqdm(items, unit="item", disable=None):
        losses = torch.stack(ending_losses(model, context, endings))  # (2, 4)
        require(losses.isfinite().all(), "the model's loss isn't finite, so it has no accuracy")
        counts[1:] += losses.argmin(dim=1) == label
    return counts.tolist()


def accuracy_line(counts):
    """One line with acc and acc_norm, each with its standard error (that of a proportion)."""
    items = counts[0]
    parts = []
    for name, right in zip(["acc", "acc_norm"], counts[1:]):
        accuracy = right / items
        error = (accuracy * (1 - accuracy) / items) ** 0.5
        parts.append(f"{name}:{accuracy:.4f} +- {error:.4f}")
    return f"hellaswag {' '.join(parts)} items:{items}"


def main(argv):
    parser = command_parser("hellaswag", __doc__)
    add = parser.add_argument
    add("model", help=models.MODEL_HELP)
    add("--limit", type=whole_number, metavar="N", help="score only the first N items; default: all")
    add("--data", metavar="FILE", help="a parquet file; default: download it")
    args = parser.parse_args(argv)
    model = models.load(args.model)
    items = load_items(args.data or download_items(), args.limit)
    print(accuracy_line(score(model, items)))


if __name__ == "__main__":
    run_command(main, InputError, torch.OutOfMemoryError)
