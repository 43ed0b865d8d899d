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
SIZE = dict(model_dim=32, batch_tokens=1024, num_iterations=90)
CONFIRM = "data/shakespeare_1024/shakespeare_confirm_000000.bin"
IDEAS = 200
LOOPS = 1000
RUNS_A_SIDE = 2
PAIRS = 20  # at most, of a comparison by the judge


def train_runs(count: int) -> None:
    from records.mini.transfer import screen

    done = RUNS.read_text().count("\n") if RUNS.exists() else 0
    hp = screen.settings(SIZE)
    for seed in range(5000 + done, 5000 + count):
        seen, seconds = screen.train(hp, {}, seed, hp.val_tokens)
        unseen = screen.evaluate(screen.get_model(hp, {}), hp, screen.tokens_of(CONFIRM))
        with open(RUNS, "a") as file:
            print(json.dumps(dict(seed=seed, seen=seen, unseen=unseen, seconds=seconds)), file=file)


# -----------------------------------------------------------------------------
# Loops of ideas that do nothing


def hill_climbing(rng: np.random.Generator, losses: np.ndarray) -> np.ndarray:
    """losses (runs, 2): seen, unseen. Each loop keeps an idea if a t-test of two runs each finds p < 0.2, and then
    it is the next base, with the losses that were measured. Returns how much the loss fell from the first base to the
    last, (LOOPS, 3): on the seen tokens, with the same runs on the unseen ones, and there with new seeds."""

    def draw() -> np.ndarray:
        return losses[rng.integers(len(losses), size=(LOOPS, RUNS_A_SIDE))]  # (LOOPS, RUNS_A_SIDE, 2)

    first = base = draw()
    for _ in range(IDEAS):
        idea = draw()
        p = stats.ttest_ind(idea[..., 0], base[..., 0], axis=1, alternative="less").pvalue
        base = np.where((p < 0.2)[:, None, None], idea, base)
    fell = (first - base).mean(1)
    fell_again = (draw() - draw()).mean(1)  # the last base does what the first one does
    return np.column_stack([fell, fell_again[:, 1]])


def main() -> None:
    losses = np.array([[run["seen"], run["unseen"]] for run in map(json.loads, RUNS.open())])
    seen, unseen = losses.T
    print(
        f"{len(losses)} runs; sd {seen.std(ddof=1):.4f} seen, {unseen.std(ddof=1):.4f} unseen; ", end=""
    )
    print(f"correlation {np.corrcoef(seen, unseen)[0, 1]:.2f}")
    rng = np.random.default_rng(0)
    fell = hill_climbing(rng, losses)
    for name, column in zip(["seen", "unseen, same runs", "unseen, new seeds"], fell.T):
        low, high = np.quantile(column, [0.025, 0.975])
        print(
            f"{name}: the loss fell by {column.mean():.4f} ({low:+.4f} to {high:+.4f} in 95% of the loops)"
        )
    print(f"survives with the same runs: {fell[:, 1].mean() / fell[:, 0].mean():.0%}")
    judged = rng.choice(seen, (100, IDEAS, 2, PAIRS)).round(4)
    verdicts = [decide(idea - base, 1e-4, None, None, 1)[0] for loop in judged for base, idea in loop]
    print(
        f"compare keeps {verdicts.count('helps') / 100:.2f} of {IDEAS} ideas, after up to {PAIRS} pairs"
    )


if __name__ == "__main__":
    if sys.argv[1:]:
        train_runs(int(sys.argv[2]))
    else:
        main()
