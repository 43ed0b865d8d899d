"""
What verify and submit print about runs, and the pages of records show.
"""

import math
import statistics

from judge.logs.read import Log
from leaderboard.rules import Verdict
from judge.stats.decide import P_VALUE
from judge.text import p_text, plural, short, table, wrap

COLUMNS = ("log", "val_loss", "time", "steps", "step_avg", "complete")
ALIGNMENT = "<>>>><"


def table_row(log: Log) -> tuple[str, ...]:
    """The texts of a log's row, in the order of COLUMNS."""
    loss = time = step_avg = "-"
    if log.validations:
        last = log.validations[-1]
        loss = f"{last.val_loss:.4f}"
        if math.isfinite(last.train_time_ms):
            time = f"{last.train_time_ms / 1000:.3f} s"
        if math.isfinite(last.step_avg_ms):
            step_avg = f"{last.step_avg_ms:.2f} ms"
    steps = f"{log.last_step}/{log.num_steps}"
    return (short(log.name, 20), loss, time, steps, step_avg, log.incomplete or "yes")


def machines(logs: list[Log]) -> list[str]:
    """Those of the runs, each once."""
    return list(dict.fromkeys(log.machine for log in logs))


def print_wrapped(text: str, indent: str = "", later_indent: str = "") -> None:
    """Prints text in lines of 80 columns."""
    print(*wrap(text, indent, later_indent), sep="\n")


def print_table(logs: list[Log]) -> None:
    columns = [short(logs[0].metric, 20) if name == "val_loss" else name for name in COLUMNS]
    print("\n".join(table([columns, *map(table_row, logs)], ALIGNMENT)))
    for machine in machines(logs):
        print_wrapped(f"on {machine}", later_indent="  ")


def summary_lines(verdict: Verdict) -> list[tuple[str, str]]:
    """The verdict's statistics as pairs (name, value)."""
    summary = verdict.summary
    if summary.n == 0:
        return [("runs", "0 complete")]
    loss = f"mean {summary.loss_mean:.4f}"
    time = "-" if summary.time_mean is None else f"mean {summary.time_mean:.3f} s"
    if summary.n > 1:
        loss += f", standard deviation {summary.loss_std:.4f}"
    test = f"one-sided t-test, mean below {verdict.target:g}; needs < {P_VALUE:g}"
    p_value = f"{p_text(summary.p_value)} ({test})"
    if verdict.p_if_looked is not None:
        p_value += f"; if you looked more than once, p <= {p_text(verdict.p_if_looked)}"

    lines = [
        ("runs", f"{summary.n} complete"),
        (verdict.metric, loss),
        ("p-value", p_value),
        ("time", time),
    ]
    if comparison := verdict.comparison:
        mean = statistics.fmean(comparison.prior)
        saved = f"{comparison.saved:.3f} s ({comparison.saved / mean:.2%})"
        test = "other session: not comparable"
        if comparison.pairs:
            p = p_text(comparison.p_value)
            test = f"p {p} (t-test of {plural(comparison.pairs, 'pair')} that took turns)"
        lines.append(("prior", f"mean {mean:.3f} s, {plural(len(comparison.prior), 'run')}"))
        lines.append(("saved", f"{saved}, {test}"))
    return lines


def print_summary(verdict: Verdict) -> None:
    for what, value in summary_lines(verdict):
        print_wrapped(value, f"{what:<9} ", " " * 10)


def print_reasons(reasons: list[str]) -> None:
    """A list. A command has its own line, which isn't wrapped, so that it can be copied."""
    for reason in reasons:
        text, start, command = reason.partition("./run.sh ")
        print_wrapped(text, "- ", "  ")
        if command:
            print(f"  {start}{command}")
