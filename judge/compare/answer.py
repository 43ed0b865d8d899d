"""The answer of compare.py: in words, and as a table."""

import math
import statistics
from dataclasses import asdict

from judge.logs.read import Log
from judge.stats.decide import (
    P_WORTHLESS,
    Effect,
    Estimate,
    Slope,
    far_from_others,
    p_if_looked,
)
from judge.stats.summary import Summary, summarize
from judge.text import p_text, short, table, wrap

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


def time_in_words(effect: Effect) -> list[str]:
    """A sentence about the time to the same loss, or about the steps; none if neither is known."""
    time, steps = effect.time, effect.steps
    if time is not None:
        more = "less" if time.value < 0 else "more"
        change = percent(time.value).lstrip("+-")
        return [f"The same loss takes {change} {more} time ({interval_in_words(time)})."]
    if steps is None or effect.verdict == "not worth it":
        return []
    if effect.verdict == "undecided":
        return [f"It changes the steps by {interval_in_words(steps)}."] if steps.high < math.inf else []
    more = "fewer" if steps.value < 0 else "more"
    return [f"It needs {percent(steps.value).lstrip('+-')} {more} steps for the same loss."]


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
    for name, change in [("steps to the same loss", steps), ("time of a step", effect.step_time)]:
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
        lines += wrap(" ".join([verdict_in_words(effect, until), *time_in_words(effect)]))
        lines += number_lines(effect)
    if all(effect.verdict == "identical" and effect.time is None for effect in effects):
        return lines
    sentences = [test]
    if any(effect.steps is not None for effect in effects):
        timed = any(effect.time is not None for effect in effects)
        steps = "Steps and time" if timed else "Steps"
        sentences.append(
            f"{steps} are those to reach the base's loss, computed from the difference in loss."
        )
    return lines + wrap(" ".join([*sentences, *facts]))


def other_steps(name: str, steps: int | None, base_steps: int, has_slope: bool) -> list[str]:
    """What to know if the idea trains another number of steps than the base."""
    if steps in (None, base_steps):
        return []
    sentence = f"{short(name, 30)} trains {steps} steps, the base {base_steps}"
    if not has_slope:
        return [f"{sentence}; without --loss_per_100_steps, only their last losses are compared."]
    return [f"{sentence}."]


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
        return "Steps are unknown: they take more runs of the base with fewer and with more steps."
    one_percent = abs(slope.value) * -math.log1p(-0.01)
    words = f"If the base trains 1% fewer steps, its loss rises by {one_percent:.5f}"
    return f"{words} ({f'standard error {slope.error:.0%}' if slope.n else 'as given'})."


# -----------------------------------------------------------------------------
# Losses against a target


def end_losses(logs: list[Log]) -> list[float]:
    """Where each run ended, in nats per token."""
    return [log.end.val_loss for log in logs]


def end_times(logs: list[Log]) -> list[float]:
    """Training times in seconds; [] if a log has none."""
    times = [log.end.train_time_ms / 1000 for log in logs]
    return times if all(0 < time < math.inf for time in times) else []


def end_as_json(log: Log) -> dict:
    return {"path": f"{log.path}{log.number}", **asdict(log.end)}


def step_time(log: Log) -> float:
    """In ms; nan if the log has no times."""
    return log.end.train_time_ms / max(1, log.end.step)


def count_sources(logs: list[Log]) -> int:
    return len({tuple(log.sources) for log in logs})


def summary_of(logs: list[Log], target: float | None) -> Summary:
    return summarize(end_losses(logs), end_times(logs), target)


def target_of(given: float | None, logs: list[Log]) -> float | None:
    """That of the logs, if none is given."""
    return given or logs[0].target


def target_table(sides: dict[str, list[Log]], given: float | None, looks: bool) -> list[str]:
    """A row for each side, with the p-value for a mean loss below the target; with `looks`, however often one
    looks. The first side is the base."""
    base = next(iter(sides.values()))
    target = target_of(given, base)
    p = "p" if target is None else f"p (below {target:g})"
    rows = [("", "runs", "mean loss", "sd", p, "time")]
    for name, logs in sides.items():
        found = summary_of(logs, target)
        sd = "-" if found.loss_std is None else f"{found.loss_std:.4f}"
        time = "-" if found.time_mean is None else f"{found.time_mean:.3f} s"
        p = p_if_looked(end_losses(logs), target) if target and looks else found.p_value
        rows.append(
            (f"  {short(name, 16)}", str(found.n), f"{found.loss_mean:.4f}", sd, p_text(p), time)
        )
    lines = table(rows, "<>>>>>")
    if not (given or target is None or "target_val_loss" in base[0].hyperparameters):
        lines.append(f"The target {target:g} is assumed; --target changes it.")
    return lines
