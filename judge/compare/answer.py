"""The answer of compare.py: in words, and as a table."""

import math
import statistics
from dataclasses import asdict

from judge.logs.comparable import judged_in_words, steps_in_words
from judge.logs.read import Log
from judge.runs.make import Pool
from judge.stats.decide import (
    P_WORTHLESS,
    Effect,
    Estimate,
    Slope,
    far_from_others,
    p_if_looked,
)
from judge.stats.summary import Summary, summarize
from judge.text import as_json, p_text, plural, short, table, wrap

NO_INTERVAL = "no interval yet"
NO_SEED = "With --no_seed, all runs may start from the same weights, and the answer may be about these."


# -----------------------------------------------------------------------------
# Words


def verdict_in_words(effect: Effect, until: float | None) -> str:
    name = short(effect.name, 30)
    if effect.verdict == "identical":
        return f"{name}: the losses are identical in all {effect.n} pairs."
    if effect.verdict in ("helps", "hurts"):
        return f"{name} {effect.verdict}."
    if effect.verdict == "not worth it":
        sure = (
            f"we are {1 - P_WORTHLESS:.0%} sure that it saves less than {100 * until:g}% of the steps"
        )
        return f"{name} is not worth it: {sure}."
    return f"{name}: undecided."


def change_in_words(effect: Effect) -> list[str]:
    """A sentence about the time to the same loss, or else about the steps: the first whose interval doesn't contain
    zero. None if there is no verdict about the loss."""
    if effect.verdict in ("not worth it", "undecided"):
        return []
    steps = None if effect.verdict == "identical" else effect.steps
    for change, less, more in [
        (effect.time, "less time", "more time"),
        (steps, "fewer steps", "more steps"),
    ]:
        if change is not None and change.low * change.high > 0:
            size = percent(change.value).lstrip("+-")
            return [f"The same loss takes {size} {less if change.value < 0 else more}."]
    return []


def percent(log_ratio: float) -> str:
    """log(0.96) as "-4.0%"."""
    return f"{math.expm1(log_ratio):+.1%}" if log_ratio < math.log(11) else "over +1000%"


def interval_in_words(change: Estimate) -> str:
    return f"{percent(change.low)} to {percent(change.high)}" if change.high < math.inf else NO_INTERVAL


def losses_in_words(change: Estimate) -> str:
    return f"{change.low:+.4f} to {change.high:+.4f}" if change.high < math.inf else NO_INTERVAL


def number_lines(effect: Effect) -> list[str]:
    """A line for each number below the headline, with its interval."""
    rows = []
    steps = None
    if effect.verdict != "identical":
        steps = effect.steps
        name = "loss at equal steps" if effect.own_steps == 1 else "last loss"
        interval = losses_in_words(effect.difference)
        rows.append((name, f"{effect.difference.value:+.4f}", interval))
    for name, change in [
        ("steps to the same loss", steps),
        ("time to the same loss", effect.time),
        ("time of a step", effect.step_time),
    ]:
        if change is not None:
            rows.append((name, percent(change.value), interval_in_words(change)))
    return [f"  {name:<22} {value:>8}   ({interval})" for name, value, interval in rows]


def answer_in_words(
    effects: list[Effect], until: float | None, test: str, facts: list[str]
) -> list[str]:
    """Lines of 80 columns, at most 12 for one idea. `test` says how many pairs there are and what the
    intervals hold for; `facts` are sentences about the runs."""
    lines = []
    for effect in effects:
        lines += wrap(" ".join([verdict_in_words(effect, until), *change_in_words(effect)]))
        lines += number_lines(effect)
    if all(effect.verdict == "identical" and effect.time is None for effect in effects):
        return lines
    return lines + wrap(" ".join([test, *facts]))


def warnings_in_words(sides: dict[str, dict[str, float]]) -> list[str]:
    """About runs that are far from the others of their side, and about a side whose losses vary much less than
    those of another one. `sides` has losses by the names of the runs."""
    warnings = []
    sds = {}
    for side, losses in sides.items():
        name = short(side, 30)
        labels = list(losses)
        far = [labels[i] for i in far_from_others(list(losses.values()))]
        near = [loss for label, loss in losses.items() if label not in far]
        if far:
            where = f"{', '.join(far)} of {name} ended far from its other runs"
            warnings.append(f"Warning: {where}; look at the logs, because failed runs can mislead.")
        if len(near) > 2:
            sds[name] = statistics.stdev(near)
    for name, sd in sds.items():
        if sd < max(sds.values()) / 10:
            less = f"the losses of {name} vary less than a tenth as much as the others (sd {sd:.1e})"
            warnings.append(f"Warning: {less}; look whether its seed takes effect.")
    return warnings


def slope_in_words(slope: Slope | None) -> str:
    if slope is None:
        return (
            "Steps are unknown: they take --loss_per_100_steps, or runs of the base with fewer and with more steps "
            "(see --steps_option)."
        )
    one_percent = abs(slope.value) * -math.log1p(-0.01)
    words = f"if the base trains 1% fewer steps, its loss rises by {one_percent:.5f}"
    error = f"standard error {slope.error:.0%}" if slope.n else "as given"
    return f"Steps are computed from the loss: {words} ({error})."


def facts_in_words(sides: dict[str, list[Log]], slope: Slope | None) -> list[str]:
    """Sentences about the runs of the base, which is the first side, and of the ideas."""
    steps = {name: logs[0].end.step for name, logs in sides.items()}
    (base, base_steps), *others = steps.items()
    facts = steps_in_words(sides)
    if not facts and base_steps == 1:
        facts = ["Steps are unknown: the logs have none."]
    elif not facts:
        facts = [slope_in_words(slope)]
        for name, count in others:
            if count != base_steps:
                facts.append(f"{short(name, 30)} trains {count} steps, the base {base_steps}.")
    facts.append(judged_in_words(sides[base]))
    losses = {name: {log.name: log.end.val_loss for log in logs} for name, logs in sides.items()}
    return facts + warnings_in_words(losses)


def machine_in_words(pool: Pool) -> str:
    """Where the runs were made."""
    words = [" and ".join(sorted(pool.places)) or pool.facts["machine"]]
    if pool.facts["threads"]:
        words.append(f"{plural(pool.facts['threads'], 'thread')} per run")
    if "torch" in pool.facts:
        words.append(f"PyTorch {pool.facts['torch']}")
    again = sum(map(len, pool.lost.values()))
    more = f" {plural(again, 'run')} were lost and made again." if again else ""
    return f"{', '.join(words)}.{more}"


# -----------------------------------------------------------------------------
# Losses against a target


def end_losses(logs: list[Log]) -> list[float]:
    """Where each run ended, in nats per token."""
    return [log.end.val_loss for log in logs]


def end_times(logs: list[Log]) -> list[float]:
    """Training times in seconds; [] if a log has none."""
    times = [log.end.train_time_ms / 1000 for log in logs]
    return times if all(0 < time < math.inf for time in times) else []


def step_time(log: Log) -> float:
    """In ms; nan if the log has no times."""
    return log.end.train_time_ms / max(1, log.end.step)


def summary_of(logs: list[Log], target: float | None) -> Summary:
    return summarize(end_losses(logs), end_times(logs), target)


def target_of(given: float | None, logs: list[Log]) -> float | None:
    """That of the logs, if none is given."""
    return given or logs[0].target


def target_table(sides: dict[str, list[Log]], given: float | None, looks: bool) -> list[str]:
    """A row for each side. If there is a target, it has the p-value for a mean loss below it; with `looks`,
    however often one looks. The first side is the base."""
    target = target_of(given, next(iter(sides.values())))
    below = [f"p (below {target:g})"] if target else []
    rows = [("", "runs", "mean loss", "sd", *below, "time")]
    for name, logs in sides.items():
        found = summary_of(logs, target)
        sd = "-" if found.loss_std is None else f"{found.loss_std:.4f}"
        time = "-" if found.time_mean is None else f"{found.time_mean:.3f} s"
        p = []
        if target:
            p = [p_text(p_if_looked(end_losses(logs), target) if looks else found.p_value)]
        cells = [f"  {short(name, 16)}", str(found.n), f"{found.loss_mean:.4f}", sd]
        rows.append((*cells, *p, time))
    return table(rows, "<>>>>>")


# -----------------------------------------------------------------------------
# JSON


def end_as_json(log: Log) -> dict:
    return {"path": f"{log.path}{log.number}", **asdict(log.end)}


def answer_as_json(effects: list[Effect], runs: dict[str, list[dict]], **more) -> bytes:
    """`runs` has those of each side, see end_as_json; `more` is what else there is to say."""
    return as_json({"ideas": list(map(asdict, effects)), "runs": runs, **more})
