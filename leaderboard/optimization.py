"""
The rule of modded-nanogpt's optimization track, for verify --rule optimization.

A result of n runs is accepted when

    (3.28 - mean loss) * sqrt(n) >= 0.004

at a step that all of them validated. The first such step counts, also if it isn't the last one: the
track allows to choose it afterwards, if it is the same for all runs. A new recipe is better than an old
one when

    (dloss + dsteps * 0.0045 / 100) / sqrt(1/n1 + 1/n2) >= 0.004

where dloss says how much lower its mean loss is, and dsteps how many steps fewer it takes, each at the
step that counts, or at the last one if none is accepted. Both are one-sided z-tests at p < 0.001 for
losses with a standard deviation of about 0.0013. The t-test that is printed beside a result uses the
standard deviation of its runs instead.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from judge.logs.comparable import MACHINE, check_sides
from judge.logs.read import Log, read_logs
from leaderboard.tables import print_wrapped
from judge.stats.summary import p_below
from judge.commands import UserError
from judge.text import p_text, plural, table

TARGET = 3.28  # nats per token
THRESHOLD = 0.004  # nats per token
LOSS_PER_STEP = 0.0045 / 100  # by which each step less raises the final loss
SHOWN = 10  # results in the table
ALLOWED = {"unfinished", "last step", *MACHINE}  # differences between runs
ASSUMPTION = "the rule assumes a standard deviation of about 0.0013 (p < 0.001)"


@dataclass
class LossesAtStep:
    """All runs of a recipe at one step. Losses in nats per token."""

    step: int
    losses: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def score(self) -> float:
        """Left side of the rule. Rounded, because 3.28 - 3.276 < 0.004 as floats."""
        return round((TARGET - self.mean) * math.sqrt(len(self.losses)), 12)

    @property
    def accepted(self) -> bool:
        return self.score >= THRESHOLD


def score_of_pair(new: LossesAtStep, old: LossesAtStep) -> float:
    """Left side of the rule for a new recipe against an old one."""
    gain = old.mean - new.mean + (old.step - new.step) * LOSS_PER_STEP
    return round(gain / math.sqrt(1 / len(new.losses) + 1 / len(old.losses)), 12)


def losses_at_steps(runs: list[Log]) -> list[LossesAtStep]:
    """At each step that all runs of a recipe validated, up to the first that the rule accepts, which counts.

    A run that ended before the others doesn't matter below that step. If there is none, raises UserError.
    """
    losses = [
        {v.step: v.val_loss for v in run.validations if math.isfinite(v.val_loss)} for run in runs
    ]
    results = []
    for step in sorted(set.intersection(*map(set, losses))):
        results.append(LossesAtStep(step, [found[step] for found in losses]))
        if results[-1].accepted:
            return results
    end = max(run.last_step for run in runs)
    for run, found in zip(runs, losses):
        if end not in found:
            raise UserError(
                f"{run.name}: no finite val_loss at step {end}, the last of these runs; let it finish"
            )
    return results


def print_recipe(name: str, runs: list[Log]) -> LossesAtStep:
    """Prints the last results of a recipe, and the losses of each run. Returns the result that counts."""
    results = losses_at_steps(runs)
    rows = [("step", "runs", "mean", "statistic", "verdict")]
    for r in results[-SHOWN:]:
        verdict = "passes" if r.accepted else "fails"
        rows.append((str(r.step), str(len(runs)), f"{r.mean:.6f}", f"{r.score:.6f}", verdict))
    print(f"{name}: {plural(len(runs), 'run')} of {runs[0].num_steps} steps\n")
    print("\n".join(table(rows, ">>>><")))
    last = results[-1]
    std = f"{statistics.stdev(last.losses):.6f}" if len(runs) > 1 else "unknown"
    print(f"\n{runs[0].metric} at step {last.step}, standard deviation {std}:")
    losses = [f"{run.name}={loss:.5f}" for run, loss in zip(runs, last.losses)]
    print_wrapped(" ".join(losses), "  ", "  ")
    print(f"t-test: p = {p_text(p_below(last.losses, TARGET))} (one-sided, mean below {TARGET})\n")
    return last


def apply_rule(logs: list[Path], against: list[Path], metric: str) -> int:
    """Applies the rule to logs, or folders of logs, and prints what it says.

    Returns the exit status: 0 accepted, 1 not. Raises UserError if the logs can't be used.
    """
    recipes = {"new": read_logs(logs, metric)}
    if against:
        recipes["old"] = read_logs(against, metric)
    check_sides(list(recipes.values()), ALLOWED)
    new, *old = [print_recipe(name, runs) for name, runs in recipes.items()]
    score = score_of_pair(new, *old) if old else new.score
    accepted = score >= THRESHOLD
    verdict = f"accepted at step {new.step}" if accepted else "NOT ACCEPTED at any step"
    if old:
        shown = "accepted: the new" if accepted else "NOT ACCEPTED: the runs don't show that the new"
        verdict = f"{shown} recipe is better, at step {new.step} against step {old[0].step}"
    print_wrapped(f"rule: {score:.6f}, needs {THRESHOLD} or more; {ASSUMPTION}")
    print()
    print_wrapped(verdict)
    return 0 if accepted else 1
