"""
HellaSwag accuracy of a saved model (Zellers et al. 2019, https://arxiv.org/abs/1905.07830).

    python evals/hellaswag.py MODEL [--limit N] [--data FILE]
    torchrun --standalone --nproc_per_node=8 evals/hellaswag.py gpt2

MODEL is a RUN.pt of `./run.sh`, a safetensors file of the baseline or of `evals/sample.py --export`,
or OpenAI's gpt2, gpt2-medium, gpt2-large or gpt2-xl.
baseline/hellaswag_scoring.py says how the items are scored. For comparison, others have measured an
acc_norm of 29.55% for GPT-2 124M and 48.93% for GPT-2 XL.

The 10,042 validation items come from the Hugging Face hub (Rowan/hellaswag). --data reads a local
.parquet or .jsonl file instead. Parquet files, including the one on the hub, need pyarrow:
pip install -r evals/requirements.txt.
"""
import argparse
import sys

import models  # before torch: see there
from train_gpt import DEVICE, RANK, WORLD_SIZE, init_processes, require
from hellaswag_scoring import DataError, DownloadError, load_items, score, summary

import torch.distributed as dist


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="HellaSwag accuracy of a saved model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("model", help=models.MODEL_HELP)
    add("--limit", type=int, metavar="N", help="score only the first N items; default: all")
    add("--data", metavar="FILE",
        help="read the items from a local .parquet or .jsonl file; default: download them")
    args = parser.parse_args()
    require(args.limit is None or args.limit > 0, "--limit must be at least 1")
    return args


def main():
    args = parse_arguments()
    try:
        items = load_items(args.data, args.limit)
    except DownloadError as e:
        raise DataError(f"{e}, or use a local file with --data") from e
    model = models.load(args.model)
    init_processes()
    counts = score(
        model.logits,
        items,
        model.encode,
        model.vocab_size,
        model.context,
        DEVICE,
        RANK,
        WORLD_SIZE,
        progress=True,
    )
    if RANK == 0:
        print(f"hellaswag {summary(counts)}")
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (DataError, *models.USER_ERRORS) as error:
        if RANK == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if RANK == 0:
            print("interrupted", file=sys.stderr)
        sys.exit(130)
