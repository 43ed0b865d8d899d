"""
What are winners worth that were chosen on the tokens which everybody sees? Trains mini at width 32, the smallest size
of the ladder, with many seeds, and evaluates each run on the validation tokens and on those of --confirm. Then it
imitates loops of 200 ideas that do nothing: an idea is nothing but other seeds. Run it from the repository's root:

    python records/mini/transfer/luck.py train 96   trains the seeds that luck.jsonl lacks, up to 96
    python records/mini/transfer/luck.py            prints the table
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from judge.stats.decide import decide

RUNS = HERE / "luck.jsonl"
SIZE = dict(model_dim=32, batch_tokens=1024, num_iterations=180)
CONFIRM = "data/shakespeare_1024/shakespeare_confirm_000000.bin"
IDEAS, LOOPS, PAIRS = 200, 1000, 20


def train_runs(count: int) -> None:
    from records.mini.transfer import screen

    done = RUNS.read_text().count("\n") if RUNS.exists() else 0
    hp = screen.settings(SIZE)
    for seed in range(5000 + done, 5000 + count):
        seen, seconds = screen.train(hp, {}, seed, hp.val_tokens)
        unseen = screen.evaluate(screen.get_model(hp, {}), hp, screen.tokens_of(CONFIRM))
        with open(RUNS, "a") as file:
            print(json.dumps(dict(seed=seed, seen=seen, unseen=unseen, seconds=seconds)), file=file)


if __name__ == "__main__":
    if sys.argv[1:]:
        train_runs(int(sys.argv[2]))
