"""
Scores a miniature on the reference list (docs/transfer.md): which ideas it decides rightly.

    python score.py tokens.jsonl slopes_tokens.jsonl [picture.png]

The first file has the runs of a fractional factorial design (resolution IV, 16 switches in 32 runs), in blocks of
one seed. The second has runs of the recipe alone, with fewer and more steps. The runs are of 28 and 29 November
2026; docs/transfer.md says which commit has the scripts that made them. Effects are means over the combinations of
the other ideas; intervals are 99%, for one idea at a time (Student's t).
"""

import json
import math
import sys
from collections import defaultdict

import numpy as np
from scipy import stats

# What the field says (docs/transfer.md): the name of the idea in the runs, whether it should help (-1) or cost (+1)
# steps, and how many percent of them, if that is known
CLEAR = {
    "adam": (+1, None),
    "no_rotary": (+1, None),
    "no_ve": (+1, None),
    "gelu": (+1, 2.3),
    "no_nesterov": (+1, 2.2),
    "no_normuon": (+1, 2.75),
    "cosine": (+1, 2.1),
    "no_xsa": (+1, 1.75),
    "o_init": (-1, 1.3),
    "tables": (-1, 2.1),
    "no_x0": (+1, None),
    "no_leaky": (+1, 3.2),
    "ve_gate": (-1, None),
    "bigrams": (-1, 9.3),
    "key_offset": (-1, None),
}

NAMES = {
    "bigrams": "hashed bigrams",
    "cosine": "cosine cooldown",
    "full_rotary": "full rotary",
    "gelu": "GELU",
    "key_offset": "key offset",
    "mtp": "multi-token prediction",
    "no_leaky": "ReLU squared, not leaky",
    "no_nesterov": "plain momentum",
    "no_normuon": "no NorMuon",
    "no_ve": "no value embeddings",
    "no_x0": "no x0 mixing",
    "no_xsa": "no XSA",
    "o_init": "attention output non-zero",
    "shifted": "shifted logits",
    "tables": "one value table per layer",
    "ve_gate": "gate of value embeddings",
}


def columns(ideas):
    """The columns of the linear model: an idea counts only where it can do something."""
    on = defaultdict(int, ideas)
    values = on["no_ve"] == 0
    return dict(ideas) | {
        "tables": on["tables"] * values,
        "ve_gate": on["ve_gate"] * values,
        "key_offset": on["key_offset"] * (1 - on["full_rotary"]),
    }


def read(path):
    return [json.loads(line) for line in open(path)]


def fit(runs):
    """Returns the effect of each idea, its standard error, and the degrees of freedom."""
    names = sorted({name for run in runs for name in run["ideas"]})
    seeds = sorted({run["seed"] for run in runs})
    rows = []
    for run in runs:
        cells = columns(run["ideas"])
        rows.append([run["seed"] == s for s in seeds] + [cells.get(name, 0) > 0 for name in names])
    X = np.array(rows, dtype=float)
    y = np.array([run["loss"] for run in runs])
    beta, *_ = np.linalg.lstsq(X, y, rcond=None)
    freedom = len(y) - np.linalg.matrix_rank(X)
    variance = ((y - X @ beta) ** 2).sum() / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(X.T @ X)))
    k = len(seeds)
    effects = {name: (b, e) for name, b, e in zip(names, beta[k:], errors[k:])}
    return effects, freedom, variance**0.5


def loss_of_one_percent(runs):
    """The loss of 1% of the steps, and its standard error: a line through log(steps) for each seed."""
    by_seed = defaultdict(list)
    for run in runs:
        by_seed[run["seed"]].append((math.log(run["size"]["num_iterations"]), run["loss"]))
    slopes = [np.polyfit(*zip(*points), 1)[0] for points in by_seed.values() if len(points) > 1]
    return -0.01 * np.mean(slopes), 0.01 * stats.sem(slopes)


def draw(effects, t, percent, path):
    """Draws the effect of each idea in % of the steps, with its interval, and what the list says."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    small = {name: pair for name, pair in effects.items() if abs(pair[0]) < 20 * percent}
    for name in sorted(small, key=lambda name: -small[name][0]):
        effect, error = small[name]
        sign, size = CLEAR.get(name, (0, None))
        color = "tab:blue" if sign else "tab:gray"
        row = NAMES.get(name, name)
        axes.errorbar(effect / percent, row, xerr=t * error / percent, fmt="o", color=color, capsize=3)
        if size:
            axes.plot(sign * size, row, "D", color="tab:orange")
    axes.plot([], [], "o", color="tab:blue", label="mini, clear in the list (99%)")
    axes.plot([], [], "o", color="tab:gray", label="mini, contested")
    axes.plot([], [], "D", color="tab:orange", label="in the list, where known")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("more steps with the change, in %")
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=150)


def main():
    effects, freedom, sd = fit(read(sys.argv[1]))
    percent, percent_error = loss_of_one_percent(read(sys.argv[2]))

    t = stats.t.ppf(0.995, freedom)
    print(
        f"sd of a run {sd:.4f}, {freedom} degrees of freedom; 1% of the steps is worth {percent:.5f} (se {percent_error:.5f})"
    )
    count = defaultdict(int)
    ours, theirs = [], []
    for name, (effect, error) in effects.items():
        low, high = effect - t * error, effect + t * error
        answer = ""
        if name in CLEAR:
            sign, size = CLEAR[name]
            answer = "undecided" if low < 0 < high else "right" if effect * sign > 0 else "wrong"
            count[answer] += 1
            if size:
                ours.append(effect / percent)
                theirs.append(sign * size)
        print(
            f"{name:12} {effect:+.4f} ({low:+.4f} to {high:+.4f}) {effect / percent:+6.1f}% of the steps  {answer}"
        )
    print(dict(count), f"of {sum(count.values())} clear rows")
    if len(sys.argv) > 3:
        draw(effects, t, percent, sys.argv[3])
    if len(ours) > 3:
        rho = stats.spearmanr(ours, theirs).statistic
        rng = np.random.default_rng(0)
        draws = []
        for _ in range(2000):
            pick = rng.integers(len(ours), size=len(ours))
            draws.append(stats.spearmanr(np.array(ours)[pick], np.array(theirs)[pick]).statistic)
        low, high = np.nanpercentile(draws, [2.5, 97.5])
        print(f"rank correlation {rho:+.2f} ({low:+.2f} to {high:+.2f}, bootstrap, {len(ours)} ideas)")


if __name__ == "__main__":
    main()
