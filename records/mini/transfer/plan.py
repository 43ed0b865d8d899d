"""
Writes the plan of a screen of mini: 16 switches in 32 runs (resolution IV), in four blocks of one seed each.

    python records/mini/transfer/plan.py FIRST_SEED          ideas of the reference list
    python records/mini/transfer/plan.py FIRST_SEED others   the rest of mini's techniques
"""

import json
import sys
from pathlib import Path

import numpy as np

# Two switches decide about value embeddings: shared tables (half of the runs), one per layer, or none
FACTORS = ["ve_a", "ve_b", "gelu", "no_nesterov", "no_normuon", "cosine", "no_xsa", "o_init",
           "no_x0", "no_leaky", "ve_gate", "bigrams", "key_offset", "mtp", "shifted", "full_rotary"]  # fmt: skip
OTHERS = ["tied", "no_qknorm", "no_vlambdas", "long_windows", "no_softcap", "no_window_warmup", "no_zero_init",
          "no_unet", "no_docs", "no_smear", "gate", "cwd", "backout", "polar"]  # fmt: skip


def design(rng):
    h = np.array([[1]])
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    main = np.vstack([h, -h])  # no main effect is mixed with an effect of two ideas
    main = main[:, rng.permutation(16)] * np.where(rng.random(16) < 0.5, 1, -1)
    even = np.vstack([h, h])  # orthogonal to all columns of main
    a, b = 1 + rng.permutation(15)[:2]
    return main > 0, 2 * (even[:, a] > 0) + (even[:, b] > 0)


def plan(first_seed, factors):
    rng = np.random.default_rng(first_seed)
    rows, blocks = design(rng)
    runs = []
    for row, block in zip(rows, blocks):
        on = {name: int(bit) for name, bit in zip(factors, row)}
        if "ve_a" in on:
            a, b = on.pop("ve_a"), on.pop("ve_b")
            on["no_ve"], on["tables"] = int(a and b), int(a and not b)
        runs.append(dict(ideas=on, seed=first_seed + int(block)))
    order = rng.permutation(len(runs))
    return dict(size={}, runs=[runs[i] for i in order])


if __name__ == "__main__":
    seed = int(sys.argv[1])
    factors = OTHERS if len(sys.argv) > 2 else FACTORS
    Path(f"plan_{seed}.json").write_text(json.dumps(plan(seed, factors)))
