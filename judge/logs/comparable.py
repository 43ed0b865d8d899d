"""
Which runs belong together: a side has repetitions of one training, which differ only in their seed.

All commands that read logs use this. Each says only which differences it tolerates.
"""

import argparse
import ast
import functools
import math
import warnings
from collections.abc import Collection, Iterator

from judge.logs.read import Log, what_is_there
from judge.commands import UserError
from judge.text import short

# Hyperparameters that may differ between the runs of a side
PER_RUN = {"seed", "save_checkpoint", "checkpoint_every"}
# What must be the same on all sides, where it is known
IN_COMMON = (
    "metric",
    "track",
    "val_tokens",
    "val_seq_len",
    "val_files",
    "target_val_loss",
    "compiled",
    "hardware",
)
MACHINE = {"hardware", "PyTorch", "resumed on"}
FEW = 6  # numbers that two runs may share by chance


def add_metric(parser: argparse.ArgumentParser) -> None:
    metric = "what to judge, by its name in the logs; default: the validation loss"
    parser.add_argument("--metric", default="", metavar="NAME", help=metric)
    higher = "judge the negative of the metric, so that lower is better"
    parser.add_argument("--higher_is_better", action="store_true", help=higher)


def settle_metric(args: argparse.Namespace) -> None:
    """Makes lower numbers better: with --higher_is_better, metric and target are negative."""
    if args.higher_is_better and not args.metric:
        raise UserError("--higher_is_better needs --metric NAME")
    if args.higher_is_better:
        args.metric = f"-{args.metric}"
        if "target" in args and args.target:
            args.target = -args.target


def judged_in_words(logs: list[Log]) -> str:
    """Which number counts."""
    steps = " or ".join(str(step) for step in sorted({log.end.step for log in logs}) if step > 1)
    return f"The loss is {logs[0].metric} {f'at step {steps}' if steps else 'at the end'}."


def not_whole(log: Log, stops_early: bool = False) -> str:
    """Why this isn't a whole run, with a finite loss after its last step; "" if it is. If it stops early,
    it may end before the last step of its schedule."""
    if log.end is None or log.last_step == 0:
        return f"no loss after its last step; {what_is_there(log.run)}"
    if log.last_step < log.num_steps and not stops_early:
        return f"{log.unfinished}; if the runs stop early on purpose, give --stops_early"
    return "" if math.isfinite(log.end.val_loss) else f"its loss is {log.end.val_loss}"


def val_tokens(log: Log) -> int | None:
    """Tokens in a validation. Other programs have no hyperparameters, so their source counts."""
    if "val_tokens" in log.hyperparameters:
        return log.hyperparameters["val_tokens"]
    return val_tokens_of_source(log.source or b"")


def parse_source(source: bytes) -> ast.AST:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(source.decode("utf-8", "replace"))


def assignments(tree: ast.AST):
    """Yields (name, value) of c = value, self.c: int = value, f(c=value) and the like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            yield node.arg, node.value
        elif isinstance(node, ast.Assign):
            yield from ((ast.unparse(target), node.value) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            yield ast.unparse(node.target), node.value


@functools.cache
def val_tokens_of_source(source: bytes) -> int | None:
    """None if it assigns no number to val_tokens, or several. Products like 20 * 524288 are computed."""
    try:
        assigned = list(assignments(parse_source(source)))
    except SyntaxError:
        return None
    values = [value for name, value in assigned if name and name.split(".")[-1] == "val_tokens"]
    found = {*map(constant_value, values)} - {None}
    return found.pop() if len(found) == 1 else None


def constant_value(node: ast.AST) -> int | None:
    """The value of a number or of a product. None for others."""
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.BinOp(left, ast.Mult(), right):
            factors = [constant_value(left), constant_value(right)]
            return None if None in factors else math.prod(factors)


def traits(log: Log) -> dict:
    """What the runs of a side have in common. None is what the log doesn't say."""
    found = {name: value for name, value in log.hyperparameters.items() if name not in PER_RUN}
    return found | {
        "metric": log.metric,
        "val_tokens": val_tokens(log),
        "target_val_loss": log.target,
        "steps": log.num_steps,
        "last step": log.last_step,
        "compiled": not log.uncompiled,
        "hardware": log.hardware or "unknown",
        "PyTorch": log.torch or "unknown",
        "resumed on": " and ".join(log.resumed_on),
    }


def differences(log: Log, other: Log) -> dict[str, tuple]:
    """The traits that differ, with their values in both logs."""
    a = traits(log)
    b = traits(other)
    return {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}


def difference(first: Log, log: Log, tolerated: Collection[str]) -> str:
    """How a log differs from the first one of its side; "" if it doesn't."""
    found = differences(first, log).items()
    texts = [f"{name} {new}, not {old}" for name, (old, new) in found if name not in tolerated]
    return f"differs from {first.name}: {short('; '.join(texts), 200)}" if texts else ""


def fingerprint(log: Log) -> tuple:
    """What tells a run apart: the numbers that were read; where they are few, and may be equal by chance,
    its words. A copy with another blank line is the same run."""
    found = [(v.step, v.val_loss, v.train_time_ms, v.step_avg_ms) for v in log.validations]
    known = [number for validation in found for number in validation if math.isfinite(number)]
    return (str(found),) if len(known) > FEW else tuple(log.run.split())


def check_repeats(logs: list[Log], also_seeds: bool = True) -> Iterator[str]:
    """Two runs must not have the same log. Those of a side must not have the same seed."""
    seen = {}
    for log in logs:
        seed = log.hyperparameters.get("seed") if also_seeds else None
        for what, key in [("log", fingerprint(log)), ("seed", seed)]:
            earlier = seen.setdefault((what, key), log)
            if earlier is not log and key is not None:
                yield (
                    f"{log.name}: the same {what} as {earlier.path}; each run counts once, so leave "
                    "one out"
                )
                break


def check_between(sides: list[list[Log]], tolerated: Collection[str] = ()) -> Iterator[str]:
    """The runs of several sides: what they must have in common, and that none is on two of them."""
    first = sides[0][0]
    for logs in sides[1:]:
        found = differences(first, logs[0])
        for name in IN_COMMON:
            if name in found and name not in tolerated and None not in found[name]:
                old, new = found[name]
                yield f"{first.path} and {logs[0].path} can't be compared: {name} {old} and {new}"
    if "log" not in tolerated:
        yield from check_repeats([log for logs in sides for log in logs], also_seeds=False)


def check_sides(sides: list[list[Log]], tolerated: Collection[str] = ()) -> None:
    """Raises UserError if the runs of a side aren't whole repetitions of one training, or if the sides
    can't be compared. `tolerated` names traits that may differ; "stops early" means that runs may end
    before their schedule, "unfinished" that they may end anywhere, and "log" that a run may be on two
    sides."""
    for logs in sides:
        for log in logs:
            fault = ""
            if len(logs) > 1 and "unfinished" not in tolerated:
                fault = not_whole(log, "stops early" in tolerated)
            fault = fault or difference(logs[0], log, tolerated)
            if fault:
                raise UserError(f"{log.path}: {log.name}: {fault}")
        for repeat in check_repeats(logs):
            raise UserError(f"{logs[0].path.parent}: {repeat}")
    for fault in check_between(sides, {"hardware", *tolerated}):
        raise UserError(fault)
