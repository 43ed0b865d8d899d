"""
The rule of modded-nanogpt's optimization track, for verify.py --rule optimization.

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

from tools.logs import DEFAULT_TARGET, FinalLoss, read_final_losses, short_name

THRESHOLD = Fraction("0.004")  # nats per token
LOSS_PER_STEP = Fraction("0.0045") / 100  # by which each step less raises the final loss
ASSUMPTION = "the rule assumes a standard deviation of about 0.0013 (p < 0.001)"


@dataclass
class Recipe:
    """The runs of one recipe. Losses are in nats per token."""

    name: str
    runs: list[FinalLoss]

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def steps(self) -> int:
        """Of each run."""
        return self.runs[0].steps

    @property
    def losses(self) -> list[float]:
        return [run.val_loss for run in self.runs]

    @property
    def mean(self) -> Fraction:
        """Exact: the mean of the decimal numbers in the logs."""
        total = sum(Fraction(str(loss)) for loss in self.losses)
        return total / self.n

    @property
    def std(self) -> float | None:
        """Of the sample (n - 1). None for a single run."""
        if self.n == 1:
            return None
        return statistics.stdev(self.losses)


@dataclass
class Decision:
    """What the rule says, and the t-test beside it."""

    accepted: bool
    score: float  # left side of the rule, in nats per token
    formula: str
    p_value: float | None  # None if there is no t-test
    test: str  # what the t-test tests, or why there is none


# -----------------------------------------------------------------------------
# The rule

def passes(gap: Fraction, spread: Fraction) -> bool:
    """gap / sqrt(spread) >= THRESHOLD, without rounding, because 3.28 - 3.276 < 0.004 in floats."""
    return gap > 0 and gap**2 >= THRESHOLD**2 * spread


def p_below_target(losses: list[float]) -> tuple[float | None, str]:
    """One-sided one-sample t-test. Returns the p-value or None, and what was tested or why not."""
    if len(losses) == 1:
        return None, "one run has no standard deviation"
    if min(losses) == max(losses):
        return None, "all runs have the same loss"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # almost equal losses
        p = stats.ttest_1samp(losses, DEFAULT_TARGET, alternative="less").pvalue
    return float(p), f"one-sided, mean below {DEFAULT_TARGET}"


def p_lower(new: list[float], old: list[float]) -> tuple[float | None, str]:
    """One-sided Welch's t-test. Returns the p-value or None, and what was tested or why not."""
    if min(len(new), len(old)) == 1:
        return None, "one run has no standard deviation"
    if min(new) == max(new) and min(old) == max(old):
        return None, "all runs of a recipe have the same loss"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal losses on one side
        p = stats.ttest_ind(new, old, equal_var=False, alternative="less").pvalue
    return float(p), "Welch's, one-sided, old losses adjusted to the new number of steps"


def judge_result(recipe: Recipe) -> Decision:
    """Is the mean loss low enough below the target?"""
    gap = Fraction(str(DEFAULT_TARGET)) - recipe.mean
    spread = Fraction(1, recipe.n)
    score = float(gap) / math.sqrt(spread)
    formula = f"({DEFAULT_TARGET} - {float(recipe.mean):.6f}) * sqrt({recipe.n})"
    p, test = p_below_target(recipe.losses)
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
    p, test = p_lower(new.losses, adjusted)
    return Decision(passes(gap, spread), score, formula, p, test)


# -----------------------------------------------------------------------------
# Output

def print_runs(recipe: Recipe) -> None:
    """One line for each run, then their mean and standard deviation."""
    print(f"{recipe.name + ' log':<20}  val_loss")
    for run in recipe.runs:
        print(f"{short_name(run.path)[:20]:<20}  {run.val_loss:8.5f}")
    print()


def summary(recipe: Recipe) -> str:
    """Like "4 runs of 3500 steps, mean 3.277500, observed standard deviation 0.000900"."""
    runs = "1 run" if recipe.n == 1 else f"{recipe.n} runs"
    if recipe.std is None:
        std = "no observed standard deviation"
    else:
        std = f"observed standard deviation {recipe.std:.6f}"
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
    if decision.p_value is None:
        print(f"t-test  none: {decision.test}")
    else:
        print(f"t-test  p = {decision.p_value:.2g} ({decision.test})")
    print(f"\n{verdict_text(decision, len(recipes) > 1)}")


def as_json(recipes: list[Recipe], decision: Decision) -> str:
    answer = {"rule": "optimization", "assumption": ASSUMPTION} | asdict(decision)
    for recipe in recipes:
        answer[recipe.name] = {
            "steps": recipe.steps,
            "mean": float(recipe.mean),
            "std": recipe.std,
            "losses": {str(run.path): run.val_loss for run in recipe.runs},
        }
    return json.dumps(answer, indent=2)


def run_rule(logs: list[Path], against: list[Path], show_json: bool = False) -> int:
    """Applies the rule to logs, or folders of logs, and prints what it says.

    Returns the exit status: 0 accepted, 1 not. Raises LogError if the logs can't be used.
    """
    new = Recipe("new", read_final_losses(logs))
    recipes = [new]
    if against:
        old = Recipe("old", read_final_losses(against))
        recipes.append(old)
        decision = judge_pair(new, old)
    else:
        decision = judge_result(new)
    if show_json:
        print(as_json(recipes, decision))
    else:
        print_decision(recipes, decision)
    return 0 if decision.accepted else 1
