"""
Compares finished runs, which compare.py didn't make: anyone's logs of a base and of an idea.

Each side is a sample of independent runs, so the test is Welch's t-test. If you make more runs because
the answer wasn't clear, and look again, its p-values and intervals no longer hold.
"""

import argparse
import math
from dataclasses import asdict

import numpy as np

from judge.comparable import MACHINE, check_sides, judged_in_words
from judge.compare.verdict import (
    answer_in_words,
    count_sources,
    end_losses,
    end_times,
    far_in_words,
    other_steps,
    record_in_words,
    record_table,
    summary_of,
    target_of,
)
from judge.logs import Log, read_logs
from judge.stats import Effect, add_times, given_slope, look_once
from judge.turns import log_ratios, turns
from lib.commands import UserError
from lib.files import write_file
from lib.text import as_json, wrap

OTHER_SESSION = (
    "Their times can't be compared, because they didn't take turns: the same script is up to 2% slower in another "
    "session. Make runs of both again: ./run.sh compare."
)
ONE_LOOK = "These numbers hold for one look at a number of runs that was chosen beforehand."


def read_sides(args: argparse.Namespace) -> list[list[Log]]:
    """The runs of the base, and of the idea. Raises UserError if they can't be compared."""
    sides = [read_logs(paths, args.metric) for paths in (args.base_logs, args.idea_logs)]
    for side, logs in zip(("base", "idea"), sides):
        if len(logs) < 2:
            raise UserError(f"the {side} has one run; give two or more")
    tolerated = {
        *MACHINE,
        *["target_val_loss"] * bool(args.target),
        *["stops early"] * args.stops_early,
    }
    check_sides(sides, tolerated)
    for side, logs in zip(("base", "idea"), sides):
        if len(set(end_losses(logs))) < 2:
            raise UserError(f"the losses of the {side} are all equal, so there is no test")
    return sides


def machines(base: list[Log], idea: list[Log]) -> tuple[bool, str]:
    """Whether the times can be compared, and a sentence about it."""
    logs = [*base, *idea]
    places = {
        f"{log.hardware or 'an unknown machine'}, PyTorch {log.torch or 'unknown'}" for log in logs
    }
    places |= {place for log in logs for place in log.resumed_on}
    where = " and ".join(sorted(places))
    if not end_times(base) or not end_times(idea):
        return False, "Times aren't compared, because not all logs have them."
    if len(places) > 1 or where.startswith("an unknown"):
        return False, f"Times aren't compared, because the runs were on {where}."
    return True, f"All runs were on {where}."


def find_effect(
    base: list[Log],
    idea: list[Log],
    loss_per_100_steps: float | None,
    pairs: list[tuple[Log, Log]],
) -> Effect:
    """`pairs` are runs that took turns, if there are any."""
    steps = base[0].end.step
    slope = loss_per_100_steps and given_slope(loss_per_100_steps, steps)
    own_steps = idea[0].end.step / steps
    effect = look_once("idea", end_losses(idea), end_losses(base), False, slope, own_steps=own_steps)
    if pairs:
        step_ratios = np.array(log_ratios(pairs)) - math.log(own_steps)
        add_times(effect, step_ratios, slope)
    return effect


def facts_in_words(base: list[Log], idea: list[Log], has_slope: bool) -> list[str]:
    facts = []
    for side, logs in (("base", base), ("idea", idea)):
        count = count_sources(logs)
        if count > 1:
            facts.append(f"The logs of the {side} have {count} different sources.")
        losses = end_losses(logs)
        facts += far_in_words(f"the {side}", losses, [log.name for log in logs])
    return facts + other_steps("The idea", idea[0].end.step, base[0].end.step, has_slope)


def sides_as_json(base: list[Log], idea: list[Log], effect: Effect, target: float | None) -> bytes:
    found = {"effect": asdict(effect), "target": target, "metric": base[0].metric}
    for side, logs in (("base", base), ("idea", idea)):
        runs = [{"path": str(log.path), "trial": log.trial, **asdict(log.end)} for log in logs]
        found[side] = {**asdict(summary_of(logs, target)), "runs": runs}
    return as_json(found)


def compare_logs(args: argparse.Namespace) -> int:
    """Prints the answer, and writes what was asked for. Returns the exit status.

    Raises UserError.
    """
    base, idea = read_sides(args)
    target, assumed = target_of(args.target, base)
    timed, where = machines(base, idea)
    pairs = turns(idea, base) if timed else []
    if timed and not pairs:
        where += f" {OTHER_SESSION}"
    effect = find_effect(base, idea, args.loss_per_100_steps, pairs)
    if args.gate:
        print(effect.verdict)
    else:
        lines = []
        if target is not None:
            record = record_in_words("idea", idea, target, pairs, looks=False)
            lines += wrap(record)
        lines += record_table({"base": base, "idea": idea}, target, looks=False)
        judged = judged_in_words([*base, *idea])
        facts = facts_in_words(base, idea, effect.steps is not None)
        facts = [judged, *facts, where, *assumed, ONE_LOOK]
        test = f"p = {effect.p:.2g} (Welch's t-test). In parentheses: 99% confidence intervals."
        print("\n".join([*lines, "", *answer_in_words([effect], None, test, facts)]))
    if args.json:
        write_file(args.json, sides_as_json(base, idea, effect, target))
    if args.plot:
        from judge.curves import plot_curves  # slow to import, and only needed here

        plot_curves({"base": base, "idea": idea}, args.plot, "time" if timed else "step", target)
    return int(args.gate and effect.verdict != "helps")
