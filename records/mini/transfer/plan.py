"""
Writes the plan of a screen: 16 switches in 32 runs (resolution IV), in four blocks of one seed each.

    python records/mini/transfer/plan.py VOCAB_SIZE FIRST_SEED [WIDTH]       257 is bytes; the width is 64 or 128
"""

import json
import sys
from pathlib import Path

import numpy as np

# Two switches decide about value embeddings: shared tables (half of the runs), one per layer, or none
FACTORS = ["ve_a", "ve_b", "gelu", "no_nesterov", "no_normuon", "cosine", "no_xsa", "o_init",
           "no_x0", "no_leaky", "ve_gate", "bigrams", "key_offset", "mtp", "shifted", "full_rotary"]  # fmt: skip


def design(rng):
    h = np.array([[1]])
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    main = np.vstack([h, -h])  # no main effect is mixed with an effect of two ideas
    main = main[:, rng.permutation(16)] * np.where(rng.random(16) < 0.5, 1, -1)
    even = np.vstack([h, h])  # orthogonal to all columns of main
    a, b = 1 + rng.permutation(15)[:2]
    return main > 0, 2 * (even[:, a] > 0) + (even[:, b] > 0)


def size(vocab_size, width):
    """Width 64: rates that were the best of five for bytes and for 1,024 tokens (seed 900). Width 128 is
    mini's own size, and rates that were the best of four for 1,024 tokens."""
    folder = "data/shakespeare" if vocab_size == 257 else f"data/shakespeare_{vocab_size}"
    data = dict(
        vocab_size=vocab_size,
        eot_token=vocab_size - 1,
        train_files=f"{folder}/shakespeare_train_*.bin",
        val_files=f"{folder}/shakespeare_val_*.bin",
    )
    if width == 128:
        return data | dict(lr=1, head_lr=0.2, embed_lr=0.4)
    return data | dict(
        model_dim=64,
        num_heads=1,
        num_iterations=360,
        batch_tokens=2048,
        lr=1.4,
        head_lr=0.2,
        embed_lr=0.4,
    )


def plan(vocab_size, first_seed, width):
    rng = np.random.default_rng(first_seed)
    rows, blocks = design(rng)
    runs = []
    for row, block in zip(rows, blocks):
        on = {name: int(bit) for name, bit in zip(FACTORS, row)}
        a, b = on.pop("ve_a"), on.pop("ve_b")
        on["no_ve"], on["tables"] = int(a and b), int(a and not b)
        runs.append(dict(ideas=on, seed=first_seed + int(block)))
    order = rng.permutation(len(runs))
    return dict(size=size(vocab_size, width), runs=[runs[i] for i in order])


if __name__ == "__main__":
    vocab_size, seed, width = (*map(int, sys.argv[1:]), 64)[:3]
    Path(f"plan_{vocab_size}_{seed}_{width}.json").write_text(json.dumps(plan(vocab_size, seed, width)))
