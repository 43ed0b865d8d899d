"""
Judges a submission: the logs of several runs of one script.

    python tools/verify.py LOG_OR_FOLDER... [--target 3.28] [--against LOG_OR_FOLDER...] [--same-ml] [--json]

A record's runs have a mean loss below the target (one-sided one-sample t-test, p < 0.01), keep the rules that a log
can show, and with --against are faster than the record before (Welch's t-test on the times, p < 0.01).
--same-ml is for a change that makes the same training faster: one log is enough, as the prior record's losses stand
for its own. Exit status: 0 valid, 1 not valid (the reasons are listed), 2 input that cannot be read.
"""

import argparse
import json
import math
import statistics
import sys
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scipy import stats

from log_parsing import Log, compiler_settings, read_logs, run_command

P_VALUE = 0.01
CONFIDENCE = 0.95
FINEWEB_VAL_TOKENS = 10_485_760  # of the competition; other tracks fix theirs in the source
# What a track asks of the model: the smallest and the largest value of a hyperparameter. `mini` is the official
# model in miniature, with all of its mechanisms.
BOUNDS = {
    "mini": {
        "num_layers": (4, math.inf),
        "num_value_embeds": (1, math.inf),
        "max_window": (129, math.inf),
        "muon_momentum_warmup": (1, math.inf),
    }
}
# of a record on a CPU: what train_gpt.py sets, and what PyTorch sets by itself
COMPILER_FLAGS = {"-march=native -mtune=icelake-server", "-march=native"}
PER_RUN = {
    "seed",
    "save_checkpoint",
    "checkpoint_every",
}  # hyperparameters that may differ between counted runs


@dataclass
class Summary:
    """Of the complete runs. Losses in nats per token, times in seconds; None where too few runs define it."""

    n: int
    loss_mean: float | None = None
    loss_std: float | None = None  # of the sample (n - 1)
    p_value: float | None = None  # that the mean is not below the target
    time_mean: float | None = None
    time_interval: tuple[float, float] | None = None  # 95% confidence


@dataclass
class Comparison:
    """Training time against a prior record's, in seconds."""

    prior: Summary
    saved: float  # prior's mean - ours
    saved_fraction: float
    p_value: float | None  # that we are not faster; None where no test is possible
    test: str


@dataclass
class Verdict:
    target: float
    same_ml: bool
    summary: Summary
    target_assumed: bool = False  # the field's, as neither the logs nor the command name one
    comparison: Comparison | None = None
    reasons: list[str] = field(default_factory=list)  # why it is no record; empty for a valid one


# ----------------------------------------------------------------------------------------------------------
# Statistics
def p_below(losses: list[float], target: float) -> float | None:
    """One-sided one-sample t-test of mean(losses) < target. None for fewer than two runs or no spread at all."""
    if len(losses) < 2 or max(losses) == min(losses):
        return None
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def summarize(logs: list[Log], target: float) -> Summary:
    finals = [log.final for log in logs if not log.incomplete]
    losses, times = [v.val_loss for v in finals], [v.train_time_ms / 1000 for v in finals]
    n = len(finals)
    if n == 0:
        return Summary(0)
    summary = Summary(n, loss_mean=statistics.fmean(losses), time_mean=statistics.fmean(times))
    if n > 1:
        summary.loss_std = statistics.stdev(losses)
        summary.p_value = p_below(losses, target)
        half = (
            statistics.stdev(times) / math.sqrt(n) * float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
        )
        summary.time_interval = (summary.time_mean - half, summary.time_mean + half)
    return summary


def compare(logs: list[Log], prior: list[Log], target: float) -> Comparison:
    """Both need a complete run."""
    ours, theirs = (
        [log.final.train_time_ms / 1000 for log in group if not log.incomplete]
        for group in (logs, prior)
    )
    before = summarize(prior, target)
    saved = before.time_mean - statistics.fmean(ours)
    # Welch's test needs the spread of both; a single run borrows the other side's (Student's test)
    welch = min(len(ours), len(theirs)) > 1
    p, test = None, "no test: one run on each side"
    if len(ours) + len(theirs) > 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # equal times, for which p is nan or exact
            p = float(stats.ttest_ind(ours, theirs, equal_var=not welch, alternative="less").pvalue)
        p = None if math.isnan(p) else p
        test = (
            "Welch's t-test"
            if welch
            else "Student's t-test: a side with one run has no spread of its own"
        )
    return Comparison(before, saved, saved / before.time_mean, p, test)


# ----------------------------------------------------------------------------------------------------------
# Rules
def listed(values) -> str:
    return " and ".join(str(v) if v not in ("", None) else "unknown" for v in values)


def per_run(logs: list[Log], fault) -> list[str]:
    """fault: log -> what is wrong with it, or "". A line for each different fault, with the runs that have it."""
    runs = {}
    for log in logs:
        if what := fault(log):
            runs.setdefault(what, []).append(log.name)
    return [
        f"{'all runs' if len(names) == len(logs) > 1 else ', '.join(names)}: {what}"
        for what, names in runs.items()
    ]


def not_compiled(log: Log) -> str:
    """Why a log's model was not compiled as a record's is; "" if it was, and for logs that do not say."""
    if log.uncompiled:
        return 'trained without torch.compile ("model compiled: no" in the log, which says why)'
    other = [flags for flags in log.compiler_flags if flags not in COMPILER_FLAGS]
    if other:
        return (
            f"compiled with other flags, set in the environment: {listed(other)}; "
            "run it without TORCHINDUCTOR_CPP_MARCH"
        )
    return ""


def broken_rules(logs: list[Log]) -> list[str]:
    """What the logs themselves show against the rules, a line each."""
    reasons = per_run(logs, lambda log: log.incomplete)
    reasons += per_run(logs, lambda log: "resumed by force (--resume_force)" if log.forced else "")
    reasons += per_run(logs, not_compiled)

    sources = {}
    for log in logs:
        sources.setdefault(tuple(log.sources), log)
    if len(sources) > 1:
        first, other, *_ = sources.values()
        reasons.append(
            f"{len(sources)} different sources, see `replay.py {first.path} --diff {other.path}`"
        )
    for number, source in dict.fromkeys(
        pair for several in sources for pair in enumerate(several, 1)
    ):
        where = f" of the log's source {number}" if number > 1 else ""
        reasons += [f"not allowed: {what}{where}" for what in compiler_settings(source)]

    settings = [{k: v for k, v in log.hyperparameters.items() if k not in PER_RUN} for log in logs]
    differ = sorted(
        k for k in set().union(*settings) if any(s.get(k) != settings[0].get(k) for s in settings)
    )
    if differ:
        reasons.append(f"the runs differ in their hyperparameters: {', '.join(differ)}")

    hardware = list(dict.fromkeys(log.hardware for log in logs))
    if len(hardware) > 1 or "" in hardware:
        reasons.append(f"not all on the same, known hardware: {listed(hardware)}")

    def wrong_val_tokens(log):
        fixed = (
            [FINEWEB_VAL_TOKENS] if log.track in ("", "fineweb") else log.constants("val_tokens")
        )
        if log.val_tokens is None:
            return "does not say on how many tokens it validated"
        if log.val_tokens in fixed:
            return ""
        return f"validated on {log.val_tokens:,} tokens, not on the fixed {' or '.join(f'{n:,}' for n in fixed) or '?'}"

    reasons += per_run(logs, wrong_val_tokens)

    def out_of_bounds(log):
        found = []
        for name, (low, high) in BOUNDS.get(log.track, {}).items():
            value = log.hyperparameters.get(name)
            if not isinstance(value, (int, float)) or not low <= value <= high:
                found.append(f"{name} {value}, the track {log.track} has {low} or more")
        if (
            log.track == "mini" and log.hyperparameters.get("max_ngram", 1) != 1
        ):  # an option until November 2026
            found.append(
                f"max_ngram {log.hyperparameters['max_ngram']}, the track mini has no n-gram tables"
            )
        return "; ".join(found)

    reasons += per_run(logs, out_of_bounds)
    numbers = {log.val_tokens for log in logs}
    if len(numbers) > 1:
        reasons.append(
            f"validated on different numbers of tokens: {listed(sorted(numbers, key=str))}"
        )

    seen = {}
    for log in logs:
        seed = str(log.hyperparameters.get("seed", ""))
        for what, key in [("the same log as", log.digest()), ("the same seed as", seed)]:
            if key and (earlier := seen.setdefault((what, key), log)) is not log:
                reasons.append(f"{log.name}: {what} {earlier.name}; each run counts once")
                break
    return reasons


def judge(
    logs: list[Log], target: float | None = None, prior: list[Log] = (), same_ml: bool = False
) -> Verdict:
    """`logs` holds at least one; `prior`, if any, is the record to beat. target None: the one in the logs."""
    reasons = broken_rules(logs)
    targets = list(dict.fromkeys(log.target for log in logs))
    if target is None and len(targets) > 1:
        reasons.append(f"the runs race to different targets: {listed(targets)}")
    assumed = target is None and not all("target_val_loss" in log.hyperparameters for log in logs)
    target = targets[0] if target is None else target
    verdict = Verdict(target, same_ml, summarize(logs, target), assumed, reasons=reasons)
    ours = verdict.summary
    if ours.n and not same_ml:
        if ours.n < 2:
            reasons.append(
                "one complete run has no p-value; make more, or use --same-ml if only its speed changed"
            )
        elif ours.loss_std == 0:
            reasons.append("all runs end at the same loss: no spread, no p-value; make more runs")
        elif not ours.p_value < P_VALUE:
            reasons.append(
                f"the mean loss is not below {target:g} at p < {P_VALUE:g}: p = {ours.p_value:.2g}"
            )
    if prior:
        tracks, hardware = (
            {getattr(log, name) for log in (*logs, *prior)} for name in ("track", "hardware")
        )
        if len(tracks) > 1:
            reasons.append(f"the prior record is of another track: {listed(sorted(tracks))}")
        if len(hardware) > 1 and len({log.hardware for log in logs}) == 1:
            reasons.append(
                f"the prior record ran on other hardware: {listed(sorted(hardware))}; rerun it here"
            )
        reasons += [
            f"prior record, {fault}" for fault in per_run(prior, lambda log: log.incomplete)
        ]
        if ours.n and any(not log.incomplete for log in prior):
            verdict.comparison = c = compare(logs, prior, target)
            if not c.saved > 0:
                reasons.append(f"not faster than the prior record: {-c.saved:.3f} s slower")
            elif c.p_value is not None and not c.p_value < P_VALUE:
                reasons.append(
                    f"not faster than the prior record at p < {P_VALUE:g}: p = {c.p_value:.2g}"
                )
    return verdict


# ----------------------------------------------------------------------------------------------------------
# Tables
COLUMNS = ("log", "val_loss", "time", "steps", "step_avg", "on", "complete")


def table_rows(logs: list[Log]) -> tuple[list[tuple[str, ...]], list[str]]:
    """-> (a row of texts for each log in the order of COLUMNS, the machines that the letters in "on" stand for)"""
    machines = {}
    rows = []
    for log in logs:
        last = log.validations[-1] if log.validations else None
        letter = machines.setdefault((log.hardware, log.torch), chr(ord("A") + len(machines) % 26))
        rows.append(
            (
                log.name,
                f"{last.val_loss:.4f}" if last else "-",
                f"{last.train_time_ms / 1000:.3f} s" if last else "-",
                f"{log.last_step}/{log.num_steps}",
                f"{last.step_avg_ms:.2f} ms" if last and math.isfinite(last.step_avg_ms) else "-",
                letter,
                log.incomplete or "yes",
            )
        )
    return rows, [
        f"{letter}: {hardware or 'unknown hardware'}, PyTorch {torch or 'unknown'}"
        for (hardware, torch), letter in machines.items()
    ]


def print_table(logs: list[Log]) -> None:
    rows, machines = table_rows(logs)
    rows = [(row[0] if len(row[0]) <= 20 else row[0][:19] + "~", *row[1:]) for row in rows]
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    for row in (COLUMNS, *rows):
        cells = [
            text.ljust(w) if i in (0, 5, 6) else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip())
    print(*machines, sep="\n")


def p_text(p: float | None) -> str:
    return "-" if p is None else f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def summary_lines(verdict: Verdict) -> list[tuple[str, str]]:
    """-> (what, value) pairs of text"""
    s, c = verdict.summary, verdict.comparison
    if s.n == 0:
        return [("runs", "0 complete")]
    spread = f", standard deviation {s.loss_std:.4f}" if s.n > 1 else ""
    lines = [
        ("runs", f"{s.n} complete"),
        ("val_loss", f"mean {s.loss_mean:.4f}{spread}"),
        (
            "p-value",
            f"{p_text(s.p_value)} (one-sided t-test, mean below {verdict.target:g}; needs < {P_VALUE:g})",
        ),
        (
            "time",
            f"mean {s.time_mean:.3f} s"
            + (
                ""
                if s.time_interval is None
                else f", {CONFIDENCE:.0%} confidence {s.time_interval[0]:.3f} to {s.time_interval[1]:.3f} s"
            ),
        ),
    ]
    if verdict.same_ml:
        lines[2] = (
            "p-value",
            f"waived (--same-ml): the prior record's losses stand; measured {p_text(s.p_value)}",
        )
    if verdict.target_assumed:
        lines.insert(
            2,
            (
                "target",
                f"{verdict.target:g} assumed, as the logs state none: give theirs with --target",
            ),
        )
    if c:
        lines += [
            (
                "prior",
                f"mean {c.prior.time_mean:.3f} s, {c.prior.n} run{'s' if c.prior.n > 1 else ''}",
            ),
            (
                "saved",
                f"{c.saved:.3f} s ({c.saved_fraction:.2%}), p {p_text(c.p_value)} ({c.test})",
            ),
        ]
    return lines


# ----------------------------------------------------------------------------------------------------------
def as_json(logs: list[Log], verdict: Verdict | None, errors: list[str]) -> str:
    def finite(x):  # JSON has no nan
        if isinstance(x, dict):
            return {k: finite(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(v) for v in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    shown = [
        dict(
            path=str(log.path),
            final=asdict(log.final) if log.final else None,
            last_step=log.last_step,
            num_steps=log.num_steps,
            hardware=log.hardware,
            torch=log.torch,
            track=log.track,
            val_tokens=log.val_tokens,
            peak_memory_mib=log.peak_memory_mib,
            incomplete=log.incomplete,
        )
        for log in logs
    ]
    valid = bool(verdict) and not verdict.reasons and not errors
    return json.dumps(
        finite(
            dict(valid=valid, errors=errors, logs=shown, **(asdict(verdict) if verdict else {}))
        ),
        indent=2,
        allow_nan=False,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="verify.py", description=__doc__.strip().split("\n")[0])
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG_OR_FOLDER")
    parser.add_argument(
        "--target", type=float, help="loss to stay below (default: the logs', else 3.28)"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        type=Path,
        default=[],
        metavar="LOG_OR_FOLDER",
        help="the record to beat",
    )
    parser.add_argument(
        "--same-ml",
        action="store_true",
        help="only the speed changed: waive the p-value; needs --against",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    args = parser.parse_args(argv)
    if args.same_ml and not args.against:
        parser.error("--same-ml needs --against: the record whose losses stand for these runs")
    if args.target is not None and not math.isfinite(args.target):
        parser.error(f"--target {args.target}: must be a finite number")

    logs, errors = read_logs(args.logs)
    prior, prior_errors = read_logs(args.against)
    errors += prior_errors
    verdict = judge(logs, args.target, prior, args.same_ml) if logs and not prior_errors else None
    if args.json:
        print(as_json(logs, verdict, errors))
    elif logs:
        print_table(logs)
    if verdict and not args.json:
        print()
        for what, value in summary_lines(verdict):
            print(f"{what:<9} {value}")
        print("\nNOT VALID" if verdict.reasons or errors else "\nvalid")
        for reason in verdict.reasons:
            print(f"- {reason}")
    sys.stdout.flush()
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 2 if errors else 1 if verdict.reasons else 0


if __name__ == "__main__":
    run_command(main)
