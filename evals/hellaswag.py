"""
HellaSwag accuracy of a saved model (Zellers et al. 2019, https://arxiv.org/abs/1905.07830).

    python evals/hellaswag.py MODEL [--limit N] [--data FILE]
    torchrun --standalone --nproc_per_node=8 evals/hellaswag.py gpt2

MODEL is a model.safetensors of train_gpt.py or of the baseline, the folder of one, or OpenAI's
gpt2, gpt2-medium, gpt2-large or gpt2-xl. `./run.sh --save_checkpoint` saves a model.safetensors.
baseline/hellaswag_scoring.py says how the items are scored. For comparison, others have measured an
acc_norm of 29.55% for GPT-2 124M and 48.93% for GPT-2 XL.

The 10,042 validation items come from the Hugging Face hub (Rowan/hellaswag). --data reads a local
.parquet or .jsonl file instead. Parquet files, including the one on the hub, need pyarrow:
pip install -r evals/requirements.txt.
"""
import argparse
import os
import sys

# before torch, because models sets OpenMP's variables and the path to baseline/
from models import DEVICE_HELP, MODEL_HELP, InputError, check_device, load
from hellaswag_scoring import DataError, DownloadError, load_items, score, summary

import torch
import torch.distributed as dist


def parse_arguments():
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description="HellaSwag accuracy of a saved model.", allow_abbrev=False
    )
    add = parser.add_argument
    add("model", help=MODEL_HELP)
    add("--limit", type=int, metavar="N", help="score only the first N items; default: all")
    add("--data", metavar="FILE",
        help="read the items from a local .parquet or .jsonl file; default: download them")
    add("--batch_tokens", type=int, default=4096, metavar="N",
        help="maximum tokens per batch; default: %(default)s")
    add("--device", default=default_device, choices=["cpu", "cuda"], help=DEVICE_HELP)
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        raise InputError("--limit must be at least 1")
    if args.batch_tokens < 1:
        raise InputError("--batch_tokens must be at least 1")
    check_device(args.device)
    return args


def main():
    args = parse_arguments()
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    try:
        items = load_items(args.data, args.limit)
    except DownloadError as e:
        raise DataError(f"{e}, or use a local file with --data") from e
    checkpoint = load(args.model, device)
    if world_size > 1:
        dist.init_process_group(backend)
    counts = score(
        lambda ids: checkpoint.forward(checkpoint.model, ids),
        items,
        checkpoint.encode,
        checkpoint.vocab_size,
        checkpoint.context,
        device,
        rank,
        world_size,
        args.batch_tokens,
        progress=True,
    )
    if rank == 0:
        print(f"hellaswag {summary(counts)}")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (DataError, InputError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        sys.exit(130)
