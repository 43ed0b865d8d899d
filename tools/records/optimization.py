"""
The rule of modded-nanogpt's optimization track, for verify --rule optimization.

A result of n runs is accepted when

    (3.28 - mean loss) * sqrt(n) >= 0.004

and a new recipe is better than an old one when

    (dloss + dsteps * 0.0045 / 100) / sqrt(1/n1 + 1/n2) >= 0.004

where dloss says how much lower its mean loss is, and dsteps how many steps fewer it takes. Both are
one-sided z-tests at p < 0.001 for losses with a standard deviation of about 0.0013. The t-test that
is printed beside them uses the standard deviation of the runs instead.
"""

import json
import math
import statistics
import warnings
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from scipy import stats

from tools.common import LogError, plural
from tools.logs import Log, read_all_logs

TARGET = 3.28  # nats per token
THRESHOLD = Fraction("0.004")  # nats per token
LOSS_PER_STEP = Fraction("0.0045") / 100  # by which each step less raises the final loss
ASSUMPTION = "the rule assumes a standard deviation of about 0.0013 (p < 0.001)"


@dataclass
class Recipe:
    """The finished runs of one recipe, all with the same number of steps. Losses in nats per token."""

    name: str
    runs: list[Log]

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def steps(self) -> int:
        """Of each run."""
        return self.runs[0].num_steps

    @property
    def losses(self) -> list[float]:
        return [run.final.val_loss for run in self.runs]

    @property
    def mean(self) -> Fraction:
        """Exact: the mean of the decimal numbers in the logs."""
        return sum(Fraction(str(loss)) for loss in self.losses) / self.n

    @property
    def std(self) -> float | None:
        """Of the sample (n - 1). None for a single run."""
        return statistics.stdev(self.losses) if self.n > 1 else None


@dataclass
class Decision:
    """What the rule says, and the t-test beside it."""

    accepted: bool
    score: float  # left side of the rule, in nats per token
    formula: str
    p_value: float | None  # None if there is no t-test
    test: str  # what the t-test tests, or why there is none


def read_recipe(name: str, paths: list[Path]) -> Recipe:
    """Reads the runs of one recipe, at least one.

    Raises LogError if a log can't be read, if a run has no final loss, if two logs are copies, or if
    runs have different numbers of steps.
    """
    logs = read_all_logs(paths)
    first = logs[0]
    seen = {}
    for log in logs:
        if log.final is None or not math.isfinite(log.final.val_loss):
            raise LogError(
                f"{log.path}: no finite val_loss at the last step, {log.num_steps}; let the run finish, or "
                "leave this log out"
            )
        if log.num_steps != first.num_steps:
            raise LogError(
                f"{log.path}: a run of {log.num_steps} steps, but {first.path} has "
                f"{first.num_steps}; all runs must have the same number"
            )
        copy = seen.setdefault((*log.sources, log.run), log)
        if copy is not log:
            raise LogError(
                f"{log.path}: a copy of {copy.path}; each run counts once, so leave one out"
            )
    return Recipe(name, logs)


# -----------------------------------------------------------------------------
# The rule

def passes(gap: Fraction, spread: Fraction) -> bool:
    """gap / sqrt(spread) >= THRESHOLD, without rounding, because 3.28 - 3.276 < 0.004 in floats."""
    return gap > 0 and gap**2 >= THRESHOLD**2 * spread


def t_test(name: str, test, *groups: list[float], **options) -> tuple[float | None, str]:
    """Applies a one-sided test of scipy to groups of losses.

    Returns the p-value and the name, or None and why there is no p-value.
    """
    if min(map(len, groups)) == 1:
        return None, "one run has no standard deviation"
    if all(min(losses) == max(losses) for losses in groups):
        return None, "all runs of a recipe have the same loss"
    with warnings.catch_warnings(action="ignore"):  # almost equal losses
        return float(test(*groups, alternative="less", **options).pvalue), name


def judge_result(recipe: Recipe) -> Decision:
    """Is the mean loss low enough below the target?"""
    gap = Fraction(str(TARGET)) - recipe.mean
    spread = Fraction(1, recipe.n)
    score = float(gap) / math.sqrt(spread)
    formula = f"({TARGET} - {float(recipe.mean):.6f}) * sqrt({recipe.n})"
    name = f"one-sided, mean below {TARGET}"
    p, test = t_test(name, stats.ttest_1samp, recipe.losses, popmean=TARGET)
    return Decision(passes(gap, spread), score, formula, p, test)


def judge_pair(new: Recipe, old: Recipe) -> Decision:
    """Is the new recipe better? A step saved is worth LOSS_PER_STEP."""
    fewer_steps = old.steps - new.steps
    worth = fewer_steps * LOSS_PER_STEP
    lower_loss = old.mean - new.mean
    gap = lower_loss + worth
    spread = Fraction(1, new.n) + Fraction(1, old.n)
    score = float(gap) / math.sqrt(spread)
    formula = (
        f"({float(lower_loss):.6f} + {fewer_steps} * 0.0045 / 100) / sqrt(1/{new.n} + 1/{old.n})"
    )
    adjusted = [loss + float(worth) for loss in old.losses]
    name = "Welch's, one-sided, old losses adjusted to the new number of steps"
    p, test = t_test(name, stats.ttest_ind, new.losses, adjusted, equal_var=False)
    return Decision(passes(gap, spread), score, formula, p, test)


# -----------------------------------------------------------------------------
# Output

def print_runs(recipe: Recipe) -> None:
    """One line for each run."""
    print(f"{recipe.name + ' log':<20}  val_loss")
    for run in recipe.runs:
        print(f"{run.name[:20]:<20}  {run.final.val_loss:8.5f}")
    print()


def summary(recipe: Recipe) -> str:
    """Like "4 runs of 3500 steps, mean 3.277500, observed standard deviation 0.000900"."""
    std = "no observed standard deviation"
    if recipe.std is not None:
        std = f"observed standard deviation {recipe.std:.6f}"
    runs = plural(recipe.n, "run")
    return f"{runs} of {recipe.steps} steps, mean {float(recipe.mean):.6f}, {std}"


def verdict_text(decision: Decision, against: bool) -> str:
    if not against:
        return "accepted" if decision.accepted else "NOT ACCEPTED"
    if decision.accepted:
        return "accepted: the new recipe is better"
    return "NOT ACCEPTED: these runs don't show that the new recipe is better"


def print_decision(recipes: list[Recipe], decision: Decision) -> None:
    for recipe in recipes:
        print_runs(recipe)
    for recipe in recipes:
        print(f"{recipe.name:<7} {summary(recipe)}")
    print(f"rule    {decision.formula} = {decision.score:.6f}, needs {float(THRESHOLD)} or more")
    print(f"        {ASSUMPTION}")
    test = f"none: {decision.test}"
    if decision.p_value is not None:
        test = f"p = {decision.p_value:.2g} ({decision.test})"
    print(f"t-test  {test}")
    print(f"\n{verdict_text(decision, len(recipes) > 1)}")


def print_json(recipes: list[Recipe], decision: Decision) -> None:
    answer = {"rule": "optimization", "assumption": ASSUMPTION} | asdict(decision)
    for recipe in recipes:
        answer[recipe.name] = {
            "steps": recipe.steps,
            "mean": float(recipe.mean),
            "std": recipe.std,
            "losses": {str(run.path): run.final.val_loss for run in recipe.runs},
        }
    print(json.dumps(answer, indent=2))


def decide(logs: list[Path], against: list[Path], as_json: bool = False) -> int:
    """Applies the rule to logs, or folders of logs, and prints what it says.

    Returns the exit status: 0 accepted, 1 not. Raises LogError if the logs can't be used.
    """
    recipes = [read_recipe("new", logs)]
    if against:
        recipes.append(read_recipe("old", against))
        decision = judge_pair(*recipes)
    else:
        decision = judge_result(*recipes)
    show = print_json if as_json else print_decision
    show(recipes, decision)
    return 0 if decision.accepted else 1
