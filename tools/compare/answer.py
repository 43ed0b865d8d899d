"""The answer of compare.py: in words, and as a table."""

import math
import statistics
import textwrap

from tools.common import goal, p_text, percent, percent_interval, short, table
from tools.compare.stats import P_VALUE, Bounds, Effect, Slope
from tools.logs import Log
from tools.summary import Summary, p_lower, summarize

WIDTH = 80
NO_INTERVAL = "no interval yet"


# -----------------------------------------------------------------------------
# Words


def headline(effect: Effect, until: float | None) -> str:
    """The verdict as a sentence, and a second one if the time says something else."""
    return f"{verdict_in_words(effect, until)} {time_conflict(effect)}".strip()


def verdict_in_words(effect: Effect, until: float | None) -> str:
    name = short(effect.name, 30)
    if effect.verdict == "identical":
        return f"{name}: the losses are identical in all {effect.n} pairs."
    known = effect.steps is not None
    needs = ""
    if known:
        more = "fewer" if effect.steps < 0 else "more"
        needs = f" It needs {abs(effect.steps):.1%} {more} steps for the same loss."
    if effect.verdict in ("helps", "hurts"):
        return f"{name} {effect.verdict}.{needs}"
    if effect.verdict == "not worth it":
        return f"{name} is not worth it: it saves less than {goal(until)} of the steps."
    if known and effect.has_interval():
        low, high = effect.steps_interval
        return f"{name}: undecided. It changes the steps by {percent(low)} to {percent(high)}."
    return f"{name}: undecided."


def time_conflict(effect: Effect) -> str:
    """A warning if the loss and the time to the same loss disagree; "" if not."""
    if effect.time_interval is None:
        return ""
    low, high = effect.time_interval
    if effect.verdict == "helps" and low > 0:
        return "But its steps are slower, so the same loss takes more time."
    if effect.verdict != "helps" and high < 0:
        return "But its steps are faster, so the same loss takes less time."
    return ""


def interval_in_words(bounds: Bounds) -> str:
    """Of a change, as a fraction. An interval that is infinite begins at -1."""
    return percent_interval(bounds) if bounds[0] > -1 else NO_INTERVAL


def numbers(effect: Effect) -> list[str]:
    """A line for each number, with its interval."""
    low, high = effect.difference_interval
    interval = f"{low:+.4f} to {high:+.4f}" if effect.has_interval() else NO_INTERVAL
    rows = [("loss", f"{effect.difference:+.4f}", interval)]
    if effect.steps is not None:
        rows.append(("steps", percent(effect.steps), interval_in_words(effect.steps_interval)))
    if effect.step_time is not None:
        low, high = effect.step_time_interval
        interval = interval_in_words((low - 1, high - 1))
        rows.append(("time of a step", percent(effect.step_time - 1), interval))
    if effect.time is not None:
        rows.append(("time", percent(effect.time), interval_in_words(effect.time_interval)))
    return [f"  {name:<15} {value:>8}   ({interval})" for name, value, interval in rows]


def answer_in_words(
    effects: list[Effect], until: float | None, test: str, facts: list[str]
) -> list[str]:
    """Lines of 80 columns, at most 12 for one idea. `test` says how many pairs there are and what the
    intervals hold for; `facts` are sentences about the runs."""
    lines = []
    for effect in effects:
        lines += textwrap.wrap(headline(effect, until), WIDTH)
        if effect.verdict != "identical":
            lines += numbers(effect)
    if all(effect.verdict == "identical" for effect in effects):
        return lines
    sentences = [test]
    if any(effect.steps is not None for effect in effects):
        timed = any(effect.time is not None for effect in effects)
        steps = "Steps and time" if timed else "Steps"
        sentences.append(
            f"{steps} are those to reach the base's loss, computed from the difference in loss."
        )
    return lines + textwrap.wrap(" ".join([*sentences, *facts]), WIDTH)


def other_steps(name: str, steps: int | None, base_steps: int, has_slope: bool) -> list[str]:
    """What to know if the idea trains another number of steps than the base."""
    if steps in (None, base_steps):
        return []
    sentence = f"{short(name, 30)} trains {steps} steps, the base {base_steps}"
    if not has_slope:
        return [f"{sentence}; without --loss_per_100_steps, only their last losses are compared."]
    return [f"{sentence}."]


def slope_in_words(slope: Slope | None) -> str:
    if slope is None:
        return "Steps are unknown: they take more runs of the base with fewer and with more steps."
    one_percent = abs(slope.value) * -math.log1p(-0.01)
    words = f"If the base trains 1% fewer steps, its loss rises by {one_percent:.5f}"
    return f"{words} ({f'standard error {slope.error:.0%}' if slope.n else 'as given'})."


# -----------------------------------------------------------------------------
# What a record needs


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


def count_sources(logs: list[Log]) -> int:
    return len({tuple(log.sources) for log in logs})


def summary_of(logs: list[Log], target: float | None) -> Summary:
    return summarize(end_losses(logs), end_times(logs), target)


def target_of(given: float | None, logs: list[Log]) -> tuple[float | None, list[str]]:
    """The target, and what to say if nobody named it."""
    target = given or logs[0].target
    if given or target is None or "target_val_loss" in logs[0].hyperparameters:
        return target, []
    return target, [f"The target {target:g} is assumed; --target changes it."]


def record_table(sides: dict[str, list[Log]], target: float | None) -> list[str]:
    """A row for each side, with its p-value for a mean loss below the target."""
    p = "p" if target is None else f"p (below {target:g})"
    rows = [("", "runs", "mean loss", "sd", p, "time")]
    for name, logs in sides.items():
        found = summary_of(logs, target)
        sd = "-" if found.loss_std is None else f"{found.loss_std:.4f}"
        time = "-" if found.time_mean is None else f"{found.time_mean:.3f} s"
        mean = f"{found.loss_mean:.4f}"
        rows.append((f"  {short(name, 16)}", str(found.n), mean, sd, p_text(found.p_value), time))
    return table(rows, "<>>>>>")


def record_in_words(
    name: str, logs: list[Log], target: float, timed: list[Log], timed_base: list[Log]
) -> str:
    """Whether the runs show what a record needs. `timed` are those whose times can be compared with the
    base's; empty if there are none."""
    found = summary_of(logs, target)
    p_loss = found.p_value
    reached = p_loss is not None and p_loss < P_VALUE
    loss = f"the mean loss is {'' if reached else 'not '}below {target:g} (p = {p_text(p_loss)})"
    times, base_times = end_times(timed), end_times(timed_base)
    if not (times and base_times):
        return f"{name}: {loss}."
    saved = statistics.fmean(base_times) - statistics.fmean(times)
    p_time = p_lower(times, base_times)[0]
    faster = p_time is not None and p_time < P_VALUE
    valid = reached and faster and count_sources(logs) == 1
    record = "has what a record needs" if valid else "isn't a record"
    time = f"a run takes {abs(saved):.3f} s {'less' if saved > 0 else 'more'} (p = {p_text(p_time)})"
    return f"{name} {record}: {loss}, and {time}."
