"""
Compares finished runs, which compare.py didn't make: anyone's logs of a base and of an idea.

Each side is a sample of independent runs, so the test is Welch's t-test. If you make more runs because
the answer wasn't clear, and look again, its p-values and intervals no longer hold.
"""

import argparse
import math
from dataclasses import asdict

from judge.logs.comparable import MACHINE, check_sides, steps_in_words
from judge.compare.answer import (
    NO_SEED,
    answer_as_json,
    end_as_json,
    answer_in_words,
    end_losses,
    end_times,
    facts_in_words,
    summary_of,
    target_of,
    target_table,
)
from judge.logs.read import Log, read_logs
from judge.stats.decide import add_times, given_slope, look_once
from judge.logs.taking_turns import log_ratios, turns
from judge.commands import UserError
from judge.files import write_file
from judge.settings import Settings
from judge.text import wrap

OTHER_SESSION = (
    "Their times can't be compared, because they didn't take turns: the same script is up to 2% slower in another "
    "session. Make runs of both again: judge compare."
)
ONE_LOOK = "These numbers hold for one look at a number of runs that was chosen beforehand."


def read_sides(args: argparse.Namespace, settings: Settings) -> dict[str, list[Log]]:
    """The runs of the base, and of the idea. Raises UserError if they can't be compared."""
    sides = {
        "base": read_logs(args.base_logs, settings.name_of_metric),
        "idea": read_logs(args.idea_logs, settings.name_of_metric),
    }
    given = {
        "target_val_loss": args.target,
        "stops early": settings.stops_early,
        "seed": settings.no_seed,
    }
    check_sides(list(sides.values()), MACHINE.union(name for name in given if given[name]))
    for side, logs in sides.items():
        if len(logs) < 2:
            raise UserError(f"the {side} has one run; give two or more")
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


def sources_in_words(sides: dict[str, list[Log]]) -> list[str]:
    """None if the runs of each side have the same sources."""
    counts = {side: len({tuple(log.sources) for log in logs}) for side, logs in sides.items()}
    return [
        f"The logs of the {side} have {n} different sources." for side, n in counts.items() if n > 1
    ]


def compare_logs(args: argparse.Namespace, settings: Settings) -> int:
    """Prints the answer, and writes what was asked for. Returns the exit status.

    Raises UserError.
    """
    sides = read_sides(args, settings)
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
        facts = [*facts_in_words(sides, slope), *sources_in_words(sides), where, ONE_LOOK]
        test = f"p = {effect.p:.2g} (Welch's t-test). In parentheses: 99% confidence intervals."
        lines = [*wrap(NO_SEED if settings.no_seed else ""), *lines]
        print("\n".join([*lines, "", *answer_in_words([effect], None, test, facts)]))
    if args.json:
        target = target_of(args.target, base)
        summaries = {side: asdict(summary_of(logs, target)) for side, logs in sides.items()}
        more = {"metric": base[0].metric, "target": target, "summaries": summaries}
        runs = {side: list(map(end_as_json, logs)) for side, logs in sides.items()}
        write_file(args.json, answer_as_json([effect], runs, **more))
    return int(args.gate and effect.verdict != "helps")
