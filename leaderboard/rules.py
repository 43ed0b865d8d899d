"""
The rules of a record (docs/rules.md), as far as they show in logs. compiler_rule.py has those about the compiler.
"""

import itertools
import re
import statistics
from dataclasses import dataclass
from operator import attrgetter

from judge.logs.comparable import MACHINE, check_between, check_repeats, difference, val_tokens
from judge.logs.read import Log
from leaderboard.compiler_rule import compiler_settings
from judge.stats.decide import P_VALUE, p_if_looked
from judge.stats.summary import Summary, summarize
from judge.logs.taking_turns import p_faster, turns
from judge.text import plural

# Values that a track fixes, so that losses can be compared
FIXED = {
    "mini": {
        "train_files": "data/shakespeare_1024/shakespeare_train_*.bin",
        "val_files": "data/shakespeare_1024/shakespeare_val_*.bin",
        "val_tokens": 131_072,
        "val_seq_len": 8192,
        "target_val_loss": 2.98,
        "bigram_factor": 0,  # of recipes/january2026.py: no tables of pairs of tokens
    },
    "fineweb": {
        "train_files": "data/fineweb10B/fineweb_train_*.bin",
        "val_files": "data/fineweb10B/fineweb_val_*.bin",
        "val_tokens": 10_485_760,
        "val_seq_len": 262_144,
        "target_val_loss": 3.28,
    },
}
DEFAULT_TARGET = FIXED["fineweb"]["target_val_loss"]  # of logs that name none, such as modded-nanogpt's
# The smallest values that a track allows, so that `mini` has all mechanisms of the official model
SMALLEST = {
    "mini": {"num_layers": 4, "num_value_embeds": 1, "max_window": 129, "muon_momentum_warmup": 1}
}
# On a CPU: the flags that train_gpt.py sets, and those of PyTorch
COMPILER_FLAGS = {"-march=native -mtune=icelake-server", "-march=native"}
FEWEST_VALIDATIONS = 8  # in a run, so that its curve can be drawn; validations are not timed
ABSOLUTE_PATH = re.compile(
    r"(?:^|[\s\"'=:(,\[])((?:/[\w.+@-]+){2,}/?|/(?:home|root|Users)\b\S*|[A-Za-z]:\\\w\S*)",
    re.MULTILINE,
)


@dataclass
class TimeSaved:
    """Training time compared with another record, in seconds."""

    prior: list[float]  # times of the other record
    saved: float  # mean of the other record - mean of ours
    pairs: int  # of runs that took turns; 0 if they didn't, so that the times can't be compared
    p_value: float | None  # of ours being faster; None if no test is possible


@dataclass
class Verdict:
    """Whether the runs make a valid record, and why not."""

    metric: str
    target: float  # nats per token
    summary: Summary
    p_if_looked: float | None  # of the losses, if somebody looked after each run
    comparison: TimeSaved | None  # None if there is no prior record, or none on this hardware
    reasons: list[str]  # why it isn't valid; [] if it is


# -----------------------------------------------------------------------------
# Statistics


def final_losses(logs: list[Log]) -> list[float]:
    """Of the runs that have one, also without times."""
    return [log.final.val_loss for log in logs if not log.unfinished]


def final_times(logs: list[Log]) -> list[float]:
    """Training times of the complete runs, in seconds."""
    return [log.final.train_time_ms / 1000 for log in logs if not log.incomplete]


def summary_of(logs: list[Log], target: float) -> Summary:
    return summarize(final_losses(logs), final_times(logs), target)


def compare_times(logs: list[Log], prior: list[Log]) -> TimeSaved:
    """Compares the training times. Both sides need at least one complete run."""
    before = final_times(prior)
    saved = statistics.fmean(before) - statistics.fmean(final_times(logs))
    pairs = turns([log for log in logs if log.final], [log for log in prior if log.final])
    return TimeSaved(before, saved, len(pairs), p_faster(pairs))


# -----------------------------------------------------------------------------
# Rules for a run. Each function returns what is wrong with it, or "".


def not_compiled(log: Log) -> str:
    """How the compilation breaks the rules. "" if it doesn't, or if the log doesn't say."""
    if log.uncompiled:
        return 'trained without torch.compile ("model compiled: no" in the log, which says why)'
    other = [flags for flags in log.compiler_flags if flags not in COMPILER_FLAGS]
    if other:
        return (
            f"compiled with other flags, set in the environment: {' and '.join(other)}; "
            "unset TORCHINDUCTOR_CPP_MARCH and run it again"
        )
    return ""


def other_machine(log: Log) -> str:
    if not log.hardware:
        return "unknown hardware"
    if not log.resumed_on:
        return ""
    return (
        f"started on {log.hardware} and resumed on {' and '.join(log.resumed_on)}; "
        "make a run on one machine only"
    )


def too_small(log: Log) -> str:
    """Hyperparameters that are too small for the track."""
    settings = dict(log.hyperparameters)
    if {"windows", "window_block"} <= settings.keys():  # recipes/january2026.py
        settings["max_window"] = settings["window_block"] * max(settings["windows"], default=0)
    found = []
    for name, smallest in SMALLEST.get(log.track, {}).items():
        value = settings.get(name)
        if (value or 0) < smallest:
            found.append(f"{name} {value}, but the track {log.track} needs {smallest} or more")
    return "; ".join(found)


def other_than_fixed(log: Log) -> str:
    """Hyperparameters that aren't those of the track. Not all programs have all of them. Logs without any count
    as runs on FineWeb, and must at least say how many tokens the validation has."""
    track = log.track or "fineweb"
    settings = {"val_tokens": val_tokens(log), **log.hyperparameters}
    found = []
    for name, wanted in FIXED.get(track, {}).items():
        value = settings.get(name, wanted)
        if value != wanted:
            found.append(f"{name} {value!r}, but the track {track} needs {wanted!r}")
    return "; ".join(found)


def per_run(logs: list[Log], fault) -> list[str]:
    """Calls fault(log) for each run. Runs with the same fault share a line."""
    runs = {}  # fault -> names of the runs that have it
    for log in logs:
        runs.setdefault(fault(log), []).append(log.name)
    runs.pop("", None)
    lines = []
    for what, names in runs.items():
        who = "all runs" if 1 < len(names) == len(logs) else ", ".join(names)
        lines.append(f"{who}: {what}")
    return lines


# -----------------------------------------------------------------------------
# Rules for several runs. Each function yields the reasons why they don't make a valid record.


def check_sources(logs: list[Log]):
    """All runs must have the same sources, and none may change the compiler's settings."""
    first_log = {}
    for log in logs:
        first_log.setdefault(tuple(log.sources), log)
    if len(first_log) > 1:
        first, other, *_ = first_log.values()
        yield (
            f"the logs have {len(first_log)} different sources, but a record needs one; to see the "
            f"difference: diff {first.path} {other.path}"
        )
    for name, source in dict.fromkeys(itertools.chain(*first_log)):  # each once, in order
        for what in compiler_settings(source):
            yield f"not allowed: {what} of {name}"


def check_seeds(logs: list[Log]):
    """Seeds follow each other, so that no run is left out. Logs of other programs have none."""
    seeds = {log.hyperparameters["seed"] for log in logs if "seed" in log.hyperparameters}
    if seeds and len(seeds) <= max(seeds) - min(seeds):
        missing = next(seed for seed in itertools.count(min(seeds)) if seed not in seeds)
        yield (
            f"seed {missing} is missing; the seeds of a record follow each other ({min(seeds)} to {max(seeds)}), "
            "because no run may be left out"
        )


def broken_rules(logs: list[Log]) -> list[str]:
    """The rules that the logs break, one line each."""
    return [
        *per_run(logs, attrgetter("incomplete")),
        *per_run(logs, not_compiled),
        *check_sources(logs),
        *check_seeds(logs),
        *per_run(logs, lambda log: difference(logs[0], log, {"last step", "resumed on"})),
        *per_run(logs, other_machine),
        *per_run(logs, too_small),
        *per_run(logs, other_than_fixed),
        *check_repeats(logs),
    ]


def judge_losses(summary: Summary, target: float):
    """Do the losses show that the target is met?"""
    if summary.n == 1:
        yield "one complete run is not enough for a p-value; make more"
    elif summary.loss_std == 0:
        yield "all runs end at the same loss, so there is no p-value; make more runs"
    elif summary.n and not summary.p_value < P_VALUE:
        found = f"p = {summary.p_value:.2g}, but a record needs p < {P_VALUE:g}"
        yield f"the mean loss is not shown to be below {target:g}: {found}"


def judge_prior(logs: list[Log], prior: list[Log]):
    """Can the runs be compared with the prior record?"""
    yield from check_between([prior, logs])
    for fault in per_run(prior, attrgetter("incomplete")):
        yield f"prior record: {fault}"


def judge_times(comparison: TimeSaved, track: str):
    """Do the times show that the runs are faster than the prior record?"""
    p = comparison.p_value
    if not comparison.pairs:
        command = "compare --command COMMAND --base THEIRS --idea OURS"
        if track:
            command = f"submit --track {track} --name NAME --make"
        yield (
            "other session: times are comparable only between runs that took turns; rule 10 asks you to run the "
            f"record again beside yours: ./run.sh {command}"
        )
    elif not comparison.saved > 0:
        yield f"not faster than the prior record: {-comparison.saved:.3f} s slower"
    elif p is None or not p < P_VALUE:
        found = "too few runs for a p-value" if p is None else f"p = {p:.2g}"
        yield f"not shown to be faster than the prior record: {found}"


def judge_runs(logs: list[Log], target: float | None = None, prior: list[Log] = ()) -> Verdict:
    """Judges one log or more. `prior` has the logs of the record to beat.

    Without a target, that of the logs counts, or else that of the competition.
    """
    reasons = broken_rules(logs)  # one of them: all runs have the same target
    if target is None:
        target = logs[0].target or DEFAULT_TARGET
    summary = summary_of(logs, target)
    reasons += judge_losses(summary, target)
    comparison = None
    if prior:
        faults = list(judge_prior(logs, prior))
        if not faults and final_times(logs):
            comparison = compare_times(logs, prior)
            faults += judge_times(comparison, logs[0].track)
        reasons += faults
    looked = p_if_looked(final_losses(logs), target)
    return Verdict(logs[0].metric, target, summary, looked, comparison, reasons)


# -----------------------------------------------------------------------------
# Rules for new records, which submit checks, too


def too_few_validations(log: Log) -> str:
    """What to do if a log has too few validations. "" if it has enough.

    Logs of other programs have no hyperparameters and are exempt.
    """
    count = len([v for v in log.validations if v.step > 0])
    if count >= FEWEST_VALIDATIONS or not log.hyperparameters:
        return ""
    every = log.num_steps // FEWEST_VALIDATIONS
    return (
        f"{plural(count, 'validation')} after step 0, but a record needs {FEWEST_VALIDATIONS}; run it "
        f"with --val_loss_every {every}, which costs no training time"
    )


def absolute_path(log: Log) -> str:
    """Only the run is searched, not the sources."""
    found = ABSOLUTE_PATH.search(log.run)
    return f"contains an absolute path: {found[1]}; run again with relative paths" if found else ""


def other_than_record(log: Log, record: Log) -> str:
    """How a run of --against differs from the runs of the record to beat."""
    if log.sources != record.sources:
        return f"other sources than the record to beat: {record.path.parent.name}"
    return difference(record, log, MACHINE)


def new_record_reasons(logs: list[Log], before: list[Log], track: str, record: list[Log]) -> list[str]:
    """Why the runs can't be filed. `before` are the runs of --against; `record` those of the record to beat."""
    reasons = per_run(logs, too_few_validations) + per_run([*logs, *before], absolute_path)
    for log in logs:
        if log.track not in ("", track):
            reasons.append(f"{log.name}: this is a log of the track {log.track}, not {track}")
    for side in (logs, before):
        files = {log.path for log in side}
        if len({file.stem for file in files}) < len(files):
            reasons.append("two logs have the same file name; rename one")
    if before and not record:
        reasons.append("there is no record on this hardware; drop --against")
    elif before:
        reasons += per_run(before, lambda log: other_than_record(log, record[0]))
    return reasons
