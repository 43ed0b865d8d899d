"""
What are winners worth that were chosen for their luck? luck.jsonl has 30 runs of mini at width 32 (90 steps of 1,024
tokens), evaluated on the tokens that mini validates on, and on those behind them, which nobody sees. From them,
this imitates loops of 200 ideas that do nothing: an idea is only other seeds.

    python records/mini/transfer/luck.py
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
IDEAS = 200
LOOPS = 300
RUNS_A_SIDE = 2
PAIRS = 20  # at most, of a comparison by the judge


# -----------------------------------------------------------------------------
# Loops of ideas that do nothing


def loops(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """losses (runs, 2): seen, unseen. Runs are drawn from the normal distribution with their mean and covariance.
    Each loop keeps an idea if a t-test of RUNS_A_SIDE runs a side finds p < 0.2 on the seen tokens. The next base is
    then this idea, with the losses that were measured.

    Returns the sums of the gains of the ideas that were kept, (LOOPS, 3): on the seen tokens, with the same runs on the
    unseen ones, and there with new seeds; and how many ideas were kept, (LOOPS,)."""
    rng = np.random.default_rng(0)
    size = (LOOPS, RUNS_A_SIDE)

    def draw() -> np.ndarray:
        return rng.multivariate_normal(losses.mean(0), np.cov(losses.T), size)  # (*size, 2)

    gains = np.zeros((LOOPS, 3))
    count = np.zeros(LOOPS)
    base = draw()
    for _ in range(IDEAS):
        idea = draw()
        p = stats.ttest_ind(idea[..., 0], base[..., 0], axis=1, alternative="less").pvalue
        kept = p < 0.2
        gain = (base - idea).mean(1)  # (LOOPS, 2)
        with_new_seeds = (draw() - draw()).mean(1)[:, 1]
        gains += kept[:, None] * np.column_stack([gain, with_new_seeds])
        count += kept
        base = np.where(kept[:, None, None], idea, base)
    return gains, count


def main() -> None:
    losses = np.array([[run["seen"], run["unseen"]] for run in map(json.loads, RUNS.open())])
    sds = losses.std(0, ddof=1)
    print(f"{len(losses)} runs; standard deviation {sds[0]:.4f} seen, {sds[1]:.4f} unseen")
    fit = stats.linregress(*losses.T)
    half = fit.stderr * stats.t.isf(0.025, len(losses) - 2)
    print(f"Of luck on the seen tokens, the unseen ones have {fit.slope:.0%} (+-{half:.0%})")
    gains, count = loops(losses)
    print(f"{count.mean():.1f} of {IDEAS} ideas kept; their gains add up to")
    for name, column in zip(["seen", "unseen, same runs", "unseen, new seeds"], gains.T):
        low, high = np.quantile(column, [0.025, 0.975])
        print(f"  {column.mean():.4f} {name} ({low:+.4f} to {high:+.4f} in 95% of the loops)")
    rng = np.random.default_rng(0)
    judged = rng.normal(losses[:, 0].mean(), sds[0], (100, IDEAS, PAIRS, 2)).round(4)
    differences = np.diff(judged)[..., 0].reshape(-1, PAIRS)
    verdicts = [decide(row, 1e-4, None, None, 1)[0] for row in differences]
    print(
        f"compare keeps {verdicts.count('helps') / 100:.2f} of {IDEAS} ideas, after up to {PAIRS} pairs"
    )


if __name__ == "__main__":
    main()
