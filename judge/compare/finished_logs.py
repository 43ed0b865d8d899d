"""
Compares finished runs, which compare.py didn't make: anyone's logs of a base and of an idea.

Each side is a sample of independent runs, so the test is Welch's t-test. If you make more runs because
the answer wasn't clear, and look again, its p-values and intervals no longer hold.
"""

import argparse
import math
from dataclasses import asdict

from judge.logs.comparable import MACHINE, check_sides, judged_in_words, steps_in_words
from judge.compare.answer import (
    NO_SEED,
    answer_in_words,
    count_sources,
    end_as_json,
    end_losses,
    end_times,
    other_steps,
    summary_of,
    target_of,
    target_table,
    warnings_in_words,
)
from judge.logs.read import Log, read_logs
from judge.stats.decide import add_times, given_slope, look_once
from judge.logs.taking_turns import log_ratios, turns
from judge.commands import UserError
from judge.files import write_file
from judge.settings import Settings
from judge.text import as_json, wrap

OTHER_SESSION = (
    "Their times can't be compared, because they didn't take turns: the same script is up to 2% slower in another "
    "session. Make runs of both again: judge compare."
)
ONE_LOOK = "These numbers hold for one look at a number of runs that was chosen beforehand."


def read_sides(args: argparse.Namespace, stops_early: bool) -> dict[str, list[Log]]:
    """The runs of the base, and of the idea. Raises UserError if they can't be compared."""
    sides = {
        "base": read_logs(args.base_logs, args.metric),
        "idea": read_logs(args.idea_logs, args.metric),
    }
    for side, logs in sides.items():
        if len(logs) < 2:
            raise UserError(f"the {side} has one run; give two or more")
    given = {"target_val_loss": args.target, "stops early": stops_early, "seed": args.no_seed}
    check_sides(list(sides.values()), MACHINE.union(name for name in given if given[name]))
    for side, logs in sides.items():
        if len(set(end_losses(logs))) < 2:
            raise UserError(f"the losses of the {side} are all equal, so there is no test")
    return sides


def machines(logs: list[Log]) -> tuple[bool, str]:
    """Whether the times can be compared, and a sentence about it."""
    places = {log.machine for log in logs}
    places |= {place for log in logs for place in log.resumed_on}
    where = " and ".join(sorted(places))
    if not end_times(logs):
        return False, "Times aren't compared, because not all logs have them."
    if len(places) > 1 or where.startswith("an unknown"):
        return False, f"Times aren't compared, because the runs were on {where}."
    return True, f"All runs were on {where}."


def facts_in_words(sides: dict[str, list[Log]], has_slope: bool) -> list[str]:
    base, idea = sides.values()
    facts = [judged_in_words([*base, *idea])]
    for side, logs in sides.items():
        count = count_sources(logs)
        if count > 1:
            facts.append(f"The logs of the {side} have {count} different sources.")
    losses = {side: {log.name: log.end.val_loss for log in logs} for side, logs in sides.items()}
    facts += warnings_in_words(losses)
    clock = steps_in_words(sides)
    return facts + (clock or other_steps("The idea", idea[0].end.step, base[0].end.step, has_slope))


def compare_logs(args: argparse.Namespace, settings: Settings) -> int:
    """Prints the answer, and writes what was asked for. Returns the exit status.

    Raises UserError.
    """
    sides = read_sides(args, settings.stops_early)
    base, idea = sides.values()
    timed, where = machines([*base, *idea])
    clock = steps_in_words(sides)
    if clock and len({log.machine for log in [*base, *idea]}) > 1:
        raise UserError(f"{clock[0]} {where} So the losses can't be compared, either")
    pairs = turns(idea, base) if timed else []  # runs that took turns
    if timed and not pairs:
        where += f" {OTHER_SESSION}"
    steps = base[0].end.step
    own_steps = 1 if clock else idea[0].end.step / steps
    slope = args.loss_per_100_steps and given_slope(args.loss_per_100_steps, steps)
    effect = look_once("idea", end_losses(idea), end_losses(base), False, slope, own_steps=own_steps)
    if pairs:
        add_times(effect, [ratio - math.log(own_steps) for ratio in log_ratios(pairs)])
    if args.gate:
        print(effect.verdict)
    else:
        lines = target_table(sides, args.target, looks=False)
        facts = [*facts_in_words(sides, slope is not None), where, ONE_LOOK]
        test = f"p = {effect.p:.2g} (Welch's t-test). In parentheses: 99% confidence intervals."
        lines = [*wrap(NO_SEED if args.no_seed else ""), *lines]
        print("\n".join([*lines, "", *answer_in_words([effect], None, test, facts)]))
    if args.json:
        target = target_of(args.target, base)
        found = {"effect": asdict(effect), "target": target, "metric": base[0].metric}
        for side, logs in sides.items():
            runs = list(map(end_as_json, logs))
            found[side] = {**asdict(summary_of(logs, target)), "runs": runs}
        write_file(args.json, as_json(found))
    return int(args.gate and effect.verdict != "helps")
