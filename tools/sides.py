"""
Which runs belong together: a side has repetitions of one training, which differ only in their seed.

All commands that read logs use this. Each says only which differences it tolerates.
"""

import math
import re
from collections.abc import Collection, Iterator

from tools.common import LogError, short
from tools.logs import Log, what_is_there

# Hyperparameters that may differ between the runs of a side
PER_RUN = {"seed", "save_checkpoint", "checkpoint_every"}
# What must be the same on all sides, where it is known, so that their losses can be compared
VALIDATION = ("metric", "val_tokens", "val_seq_len", "val_files", "target_val_loss", "compiled")
MACHINE = {"hardware", "PyTorch", "resumed on"}
FEW = 6  # numbers that two runs may share by chance


def not_whole(log: Log, stops_early: bool = False) -> str:
    """Why this isn't a whole run, with a finite loss after its last step; "" if it is. If it stops early,
    it may end before the last step of its schedule."""
    if log.end is None:
        _, step, end = log.run.rpartition("\nstep")
        return f"no loss after its last step; {what_is_there(step + end)}"
    if log.last_step < log.num_steps and not stops_early:
        return f"{log.unfinished}; if the runs stop early on purpose, give --stops_early"
    return "" if math.isfinite(log.end.val_loss) else f"its loss is {log.end.val_loss}"


def val_tokens(log: Log) -> int | None:
    """Tokens in a validation. Other programs have no hyperparameters, so their source counts.

    None if it assigns no number to val_tokens, or several. Products like 20 * 524288 are computed.
    """
    if "val_tokens" in log.hyperparameters:
        return log.hyperparameters["val_tokens"]
    number = r"\d[\d_]{0,18}"
    products = rf"\bval_tokens\s*(?::\s*\w+\s*)?=\s*({number}(?:\s*\*\s*{number})*)\s*(?=[,)#]|$)"
    found = set()
    for product in re.findall(products, (log.source or b"").decode("utf-8", "replace"), re.MULTILINE):
        found.add(math.prod(int(n.replace("_", "")) for n in product.split("*")))
    return found.pop() if len(found) == 1 else None


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


def differences(log: Log, other: Log) -> dict[str, str]:
    """What is different in the other log, by name: "muon_lr 0.03, not 0.05"."""
    old = traits(log)
    new = traits(other)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {name: f"{name} {new.get(name)}, not {old.get(name)}" for name in names}


def difference(first: Log, log: Log, tolerated: Collection[str]) -> str:
    """How a log differs from the first one of its side; "" if it doesn't."""
    found = [text for name, text in differences(first, log).items() if name not in tolerated]
    return f"differs from {first.name}: {short('; '.join(found), 200)}" if found else ""


def numbers(log: Log) -> tuple:
    """What tells a run apart: the numbers that were read; where they are few, and may be equal by chance,
    its words. A copy with another blank line is the same run."""
    found = [(v.step, v.val_loss, v.train_time_ms, v.step_avg_ms) for v in log.validations]
    known = [number for validation in found for number in validation if math.isfinite(number)]
    return (str(found),) if len(known) > FEW else tuple(log.run.split())


def check_repeats(logs: list[Log]) -> Iterator[str]:
    """Two runs must not have the same log or the same seed."""
    seen = {}
    for log in logs:
        for what, key in [("log", numbers(log)), ("seed", log.hyperparameters.get("seed"))]:
            earlier = seen.setdefault((what, key), log)
            if earlier is not log and key is not None:
                yield (
                    f"{log.name}: the same {what} as {earlier.name}; each run counts once, so leave "
                    "one out"
                )
                break


def check_between(sides: list[list[Log]], tolerated: Collection[str] = ()) -> Iterator[str]:
    """What the sides must have in common. No run may be on two of them."""
    first = {numbers(log): log for log in sides[0]}
    for logs in sides[1:]:
        old, new = traits(sides[0][0]), traits(logs[0])
        for name in VALIDATION:
            known = old.get(name) is not None and new.get(name) is not None
            if known and old[name] != new[name] and name not in tolerated:
                names = f"{sides[0][0].name} and {logs[0].name}"
                yield f"{names} can't be compared: {name} {old[name]} and {new[name]}"
        for log in logs:
            if numbers(log) in first:
                yield f"{log.path}: {log.name} is on both sides; leave it out of one"


def check_sides(sides: list[list[Log]], tolerated: Collection[str] = ()) -> None:
    """Raises LogError if the runs of a side aren't whole repetitions of one training, or if the sides
    can't be compared. `tolerated` names traits that may differ; "stops early" means that runs may end
    before their schedule, and "unfinished" that they may end anywhere."""
    for logs in sides:
        for log in logs:
            fault = ""
            if len(logs) > 1 and "unfinished" not in tolerated:
                fault = not_whole(log, "stops early" in tolerated)
            fault = fault or difference(logs[0], log, tolerated)
            if fault:
                raise LogError(f"{log.path}: {log.name}: {fault}")
        for repeat in check_repeats(logs):
            raise LogError(f"{logs[0].path.parent}: {repeat}")
    for fault in check_between(sides, tolerated):
        raise LogError(fault)
