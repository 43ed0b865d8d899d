"""
Which runs belong together: a side has repetitions of one training, which differ only in their seed.

All commands that read logs use this. Each says only which differences it tolerates.
"""

import argparse
import math
import re
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
    "GPU limits",
)
MACHINE = {"hardware", "GPU limits", "PyTorch", "resumed on"}
NEAR = 0.1  # by how much the last steps of runs of a fixed time may differ
FEW = 6  # numbers that two runs may share by chance
# "seed: 1", "seed=1", '"seed": 1', "--seed 1", "Random_Seed | 1", also in a line with other words
SEED = re.compile(r"(?<![^\W_])seed[\"']?[ \t]*[:=|]?[ \t]*(-?\d+)\b", re.IGNORECASE)
# A loss with so many digits that two seeds hardly ever share it
LOSS = re.compile(r"((?:[a-z]{1,20} )?\w{0,40}(?:loss|bpb))\W{1,4}(\d+\.\d{4,})", re.IGNORECASE)
MOVED = 0.01  # of the first loss: runs of all seeds may begin with the same one


def add_metric(parser: argparse.ArgumentParser) -> None:
    metric = "what to judge, by its name in the logs; default: the validation loss"
    parser.add_argument("--metric", default="", metavar="NAME", help=metric)
    higher = "more of the metric is better"
    parser.add_argument("--higher_is_better", action="store_true", help=higher)


def judged_in_words(logs: list[Log]) -> str:
    """Which number counts."""
    steps = sorted({log.end.step for log in logs} - {1})
    where = f"step {' or '.join(map(str, steps))}" if 0 < len(steps) < 3 else "the end"
    return f"The loss is {logs[0].metric} at {where}."


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
    return log.hyperparameters.get("val_tokens", val_tokens_of_source(log.source or b""))


def val_tokens_of_source(source: bytes) -> int | None:
    """None if it assigns no number to val_tokens, or several. Products like 20 * 524288 are computed."""
    assigned = re.findall(rb"^[^#\n]*\bval_tokens\b[^=\n]*=\s*([\d_* ]+?)\s*[,)#\n]", source + b"\n", re.MULTILINE)
    found = {math.prod(map(int, numbers.split(b"*"))) for numbers in assigned}
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
        "GPU limits": log.limits or None,
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


def seeds(log: Log) -> tuple:
    """All that the log names; () if they stand above several runs."""
    return () if log.trial else tuple(SEED.findall(log.run))


def early_losses(log: Log) -> tuple:
    """With each name, the first two that aren't near the run's first one, nor its last one. Runs of different
    seeds differ here, and those of one seed only later, if at all."""
    numbers = {}
    for name, number in LOSS.findall(log.run):
        numbers.setdefault(name, []).append(number)
    found = []
    for name, (first, *others) in numbers.items():
        far = MOVED * abs(float(first))
        moved = [number for number in others if abs(float(number) - float(first)) > far]
        found += [f"{name} {number}" for number in moved if number != others[-1]][:2]
    return tuple(found)


SEEDS = {"seed": seeds, "losses early in the training": early_losses}
ALL_DIFFERENT = {"log": fingerprint, **SEEDS}


def check_repeats(logs: list[Log], kinds: Collection[str] = ALL_DIFFERENT) -> Iterator[str]:
    """A replicate is a run of its own, whose seed took effect. These kinds of traits must all be different."""
    seen = {}
    for log in logs:
        for kind in kinds:
            key = ALL_DIFFERENT[kind](log)
            earlier = seen.setdefault((kind, key or id(log)), log)
            if earlier is not log:
                shown = f" ({', '.join(key)})" if kind != "log" else ""
                yield (
                    f"{log.name}: the same {kind}{shown} as {earlier.path}; a run counts only once, and "
                    "only with a seed of its own"
                )
                break


def check_units(log: Log, other: Log) -> Iterator[str]:
    """Losses per token of unlike vocabularies can't be compared. Their lines may have a number that can."""
    for name in log.units.keys() & other.units.keys():
        old, new = [f"{side.units[name]:.3g}" for side in (log, other)]
        if not math.isclose(log.units[name], other.units[name], rel_tol=0.005):
            yield (
                f"{log.path} and {other.path} can't be compared: {log.metric} is {old} and {new} times {name}, "
                "so the tokens aren't the same; choose one of the two with --metric NAME"
            )


def by_the_clock(logs: list[Log]) -> bool:
    """Whether the steps of the runs of a side aren't a setting: they depend on the speed of the machine."""
    return len({log.steps_made for log in logs}) > 1


def steps_in_words(sides: dict[str, list[Log]]) -> list[str]:
    """A sentence about runs of a fixed time; none if steps are a setting."""
    if not any(map(by_the_clock, sides.values())):
        return []
    steps = {name: [log.steps_made for log in logs] for name, logs in sides.items()}
    counts = [f"{short(name, 30)} {min(made)} to {max(made)}" for name, made in steps.items()]
    return [f"Steps depend on the speed of the machine: {', '.join(counts)}."]


def check_between(sides: list[list[Log]], tolerated: Collection[str] = ()) -> Iterator[str]:
    """The runs of several sides: what they must have in common, and that none is on two of them."""
    first = sides[0][0]
    for logs in sides[1:]:
        found = differences(first, logs[0])
        for name in IN_COMMON:
            if name in found and name not in tolerated and None not in found[name]:
                old, new = found[name]
                yield f"{first.path} and {logs[0].path} can't be compared: {name} {old} and {new}"
        yield from check_units(first, logs[0])
    if "log" not in tolerated:
        yield from check_repeats([log for logs in sides for log in logs], ["log"])


def check_sides(sides: list[list[Log]], tolerated: Collection[str] = ()) -> None:
    """Raises UserError if the runs of a side aren't whole repetitions of one training, or if the sides
    can't be compared. `tolerated` names traits that may differ; "stops early" means that runs may end
    before their schedule, "unfinished" that they may end anywhere, and "log" that a run may be on two
    sides. "seed" means that all runs may have one."""
    for logs in sides:
        for log in logs:
            fault = ""
            if len(logs) > 1 and "unfinished" not in tolerated:
                fault = not_whole(log, "stops early" in tolerated)
            steps = logs[0].last_step
            near = abs(log.last_step - steps) < NEAR * steps
            vary = {"last step", *["steps"] * (not log.scheduled)} if near else set()
            fault = fault or difference(logs[0], log, vary.union(tolerated))
            if fault:
                raise UserError(f"{log.path}: {log.name}: {fault}")
        for repeat in check_repeats(logs, ["log"] if "seed" in tolerated else ALL_DIFFERENT):
            raise UserError(f"{logs[0].path.parent}: {repeat}")
    for fault in check_between(sides, {"hardware", "GPU limits", *tolerated}):
        raise UserError(fault)
