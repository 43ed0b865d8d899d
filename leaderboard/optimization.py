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
losses with a standard deviation of about 0.0013. The t-test that is printed beside them uses the
standard deviation of the runs instead.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from judge.logs.comparable import MACHINE, check_sides
from judge.logs.read import Log, read_logs
from leaderboard.tables import print_wrapped
from judge.stats.summary import p_below, p_lower
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


@dataclass
class Recipe:
    """The runs of one recipe, all with the same number of steps."""

    name: str
    runs: list[Log]
    results: list[LossesAtStep]  # at each step that all runs validated, in order

    @property
    def result(self) -> LossesAtStep:
        """The one that counts: the first that the rule accepts, or the last if it accepts none."""
        return next((r for r in self.results if r.accepted), self.results[-1])


@dataclass
class Decision:
    """What the rule says, and the t-test beside it."""

    score: float  # left side of the rule, in nats per token
    formula: str
    p_value: float | None  # None if the losses don't differ, or there is only one
    test: str  # what the t-test tests

    @property
    def accepted(self) -> bool:
        return self.score >= THRESHOLD


def read_recipe(name: str, paths: list[Path], metric: str = "") -> Recipe:
    """Reads the runs of one recipe, at least one.

    Raises UserError if a log can't be read, or if the runs aren't repetitions of one training. A run that
    ended before the others doesn't matter below the step that the rule accepts. If there is none, this
    raises it, too.
    """
    runs = read_logs(paths, metric)
    check_sides([runs], ALLOWED)
    losses = [
        {v.step: v.val_loss for v in run.validations if math.isfinite(v.val_loss)} for run in runs
    ]
    results = []
    for step in sorted(set.intersection(*map(set, losses))):
        results.append(LossesAtStep(step, [found[step] for found in losses]))
    end = max(run.last_step for run in runs)
    for run, found in zip(runs, losses):
        if end not in found and not any(result.accepted for result in results):
            raise UserError(
                f"{run.name}: no finite val_loss at step {end}, the last of these runs; let it finish"
            )
    return Recipe(name, runs, results)


# -----------------------------------------------------------------------------
# The rule


def judge_result(result: LossesAtStep) -> Decision:
    """Is the mean loss low enough below the target?"""
    formula = f"({TARGET} - {result.mean:.6f}) * sqrt({len(result.losses)})"
    p = p_below(result.losses, TARGET)
    return Decision(result.score, formula, p, f"one-sided, mean below {TARGET}")


def judge_pair(new: LossesAtStep, old: LossesAtStep) -> Decision:
    """Is the new recipe better? A step saved is worth LOSS_PER_STEP."""
    fewer_steps = old.step - new.step
    worth = fewer_steps * LOSS_PER_STEP
    lower_loss = old.mean - new.mean
    n1, n2 = len(new.losses), len(old.losses)
    score = round((lower_loss + worth) / math.sqrt(1 / n1 + 1 / n2), 12)
    formula = f"({lower_loss:.6f} + {fewer_steps} * 0.0045 / 100) / sqrt(1/{n1} + 1/{n2})"
    p = p_lower(new.losses, [loss + worth for loss in old.losses])
    test = "Welch's t-test, one-sided, old losses adjusted to the new number of steps"
    return Decision(score, formula, p, test)


# -----------------------------------------------------------------------------
# Output


def print_recipe(recipe: Recipe) -> None:
    """The results up to the one that counts, and the losses of each run there."""
    result = recipe.result
    n = len(recipe.runs)
    print(f"{recipe.name}: {plural(n, 'run')} of {recipe.runs[0].num_steps} steps\n")

    rows = [("step", "runs", "mean", "statistic", "verdict")]
    count = recipe.results.index(result) + 1
    for r in recipe.results[:count][-SHOWN:]:
        verdict = "passes" if r.accepted else "fails"
        rows.append((str(r.step), str(n), f"{r.mean:.6f}", f"{r.score:.6f}", verdict))
    print("\n".join(table(rows, ">>>><")))

    std = f"{statistics.stdev(result.losses):.6f}" if n > 1 else "unknown"
    print(f"\n{recipe.runs[0].metric} at step {result.step}, standard deviation {std}:")
    losses = [f"{run.name}={loss:.5f}" for run, loss in zip(recipe.runs, result.losses)]
    print_wrapped(" ".join(losses), "  ", "  ")
    print()


def verdict_text(recipes: list[Recipe], decision: Decision) -> str:
    steps = " against step ".join(str(recipe.result.step) for recipe in recipes)
    if len(recipes) == 1:
        return f"accepted at step {steps}" if decision.accepted else "NOT ACCEPTED at any step"
    if decision.accepted:
        return f"accepted: the new recipe is better, at step {steps}"
    return f"NOT ACCEPTED: the runs don't show that the new recipe is better, at step {steps}"


def print_decision(recipes: list[Recipe], decision: Decision) -> None:
    for recipe in recipes:
        print_recipe(recipe)
    rule = f"{decision.formula} = {decision.score:.6f}, needs {THRESHOLD} or more; {ASSUMPTION}"
    print_wrapped(rule, "rule    ", " " * 8)
    print_wrapped(f"p = {p_text(decision.p_value)} ({decision.test})", "t-test  ", " " * 8)
    print()
    print_wrapped(verdict_text(recipes, decision))


def apply_rule(logs: list[Path], against: list[Path], metric: str) -> int:
    """Applies the rule to logs, or folders of logs, and prints what it says.

    Returns the exit status: 0 accepted, 1 not. Raises UserError if the logs can't be used.
    """
    recipes = [read_recipe("new", logs, metric)]
    decision = judge_result(recipes[0].result)
    if against:
        recipes.append(read_recipe("old", against, metric))
        check_sides([recipe.runs for recipe in recipes], ALLOWED)
        decision = judge_pair(*[recipe.result for recipe in recipes])
    print_decision(recipes, decision)
    return 0 if decision.accepted else 1
