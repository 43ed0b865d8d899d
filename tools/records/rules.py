"""
The rules of a record, as far as they show in logs, and the statistics behind them.
"""

import itertools
import math
import statistics
import warnings
from dataclasses import dataclass, field

from scipy import stats

from tools.logs import Log
from tools.records.compiler import compiler_settings

P_VALUE = 0.01
CONFIDENCE = 0.95
FINEWEB_VAL_TOKENS = 10_485_760  # of the competition; other tracks have theirs in the source
# The smallest and the largest values that a track allows. They make sure that `mini` has all
# mechanisms of the official model.
BOUNDS = {
    "mini": {
        "num_layers": (4, math.inf),
        "num_value_embeds": (1, math.inf),
        "max_window": (129, math.inf),
        "muon_momentum_warmup": (1, math.inf),
    }
}
# Values that a track fixes, so that losses can be compared
FIXED = {
    "mini": {
        "train_files": "data/shakespeare/shakespeare_train_*.bin",
        "val_files": "data/shakespeare/shakespeare_val_*.bin",
        "val_tokens": 389_120,
        "val_seq_len": 12_160,
        "target_val_loss": 1.5,
    },
    "fineweb": {
        "train_files": "data/fineweb10B/fineweb_train_*.bin",
        "val_files": "data/fineweb10B/fineweb_val_*.bin",
        "val_seq_len": 262_144,
        "target_val_loss": 3.28,
    },
}
# On a CPU: the flags that train_gpt.py sets, and those of PyTorch
COMPILER_FLAGS = {"-march=native -mtune=icelake-server", "-march=native"}
# Hyperparameters that may differ between runs
PER_RUN = {"seed", "save_checkpoint", "checkpoint_every"}
# With --same-ml, these may differ, too: they change the speed, and losses at most by rounding
SPEED_ONLY = {"val_loss_every", "warmup_steps", "sequences_per_pass", "world_size"}
# What to do if a prior record can't prove the losses
TEST_LOSSES = "make enough runs to test your own losses, and drop --same-ml"


@dataclass
class Summary:
    """Statistics of the complete runs. Losses are in nats per token, times in seconds.

    A number is None if there are too few runs for it.
    """

    n: int
    loss_mean: float | None = None
    loss_std: float | None = None  # of the sample (n - 1)
    p_value: float | None = None  # of the mean being below the target
    time_mean: float | None = None
    time_interval: tuple[float, float] | None = None  # 95% confidence


@dataclass
class Comparison:
    """Training time compared with another record, in seconds."""

    prior: Summary
    saved: float  # mean of the other record - mean of ours
    saved_fraction: float
    p_value: float | None  # of ours being faster; None if no test is possible
    test: str


@dataclass
class Verdict:
    """Whether the runs make a valid record, and why not."""

    target: float  # nats per token
    same_ml: bool  # only the speed changed, so the losses need no test
    summary: Summary
    target_assumed: bool = False  # neither the logs nor the command name a target
    comparison: Comparison | None = None
    reasons: list[str] = field(default_factory=list)  # why it isn't valid; [] if it is


# -----------------------------------------------------------------------------
# Statistics

def p_below(losses: list[float], target: float) -> float | None:
    """One-sided one-sample t-test of mean(losses) < target. None if the losses have no spread."""
    if len(losses) < 2 or max(losses) == min(losses):
        return None
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def p_above(losses: list[float], prior: list[float]) -> float:
    """One-sided t-test of mean(losses) > mean(prior), with the standard deviation of `prior`.

    This also works for a single loss. `prior` needs at least two different losses.
    """
    difference = statistics.fmean(losses) - statistics.fmean(prior)
    standard_error = statistics.stdev(prior) * math.sqrt(1 / len(losses) + 1 / len(prior))
    return float(stats.t.sf(difference / standard_error, len(prior) - 1))


def final_losses(logs: list[Log]) -> list[float]:
    """Of the complete runs, in nats per token."""
    return [log.final.val_loss for log in logs if not log.incomplete]


def final_times(logs: list[Log]) -> list[float]:
    """Training times of the complete runs, in seconds."""
    return [log.final.train_time_ms / 1000 for log in logs if not log.incomplete]


def summarize(logs: list[Log], target: float) -> Summary:
    """Statistics of those logs that are complete."""
    losses = final_losses(logs)
    times = final_times(logs)
    n = len(losses)
    if n == 0:
        return Summary(0)
    summary = Summary(n, loss_mean=statistics.fmean(losses), time_mean=statistics.fmean(times))
    if n > 1:
        summary.loss_std = statistics.stdev(losses)
        summary.p_value = p_below(losses, target)
        standard_error = statistics.stdev(times) / math.sqrt(n)
        half = standard_error * float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
        summary.time_interval = (summary.time_mean - half, summary.time_mean + half)
    return summary


def p_faster(ours: list[float], theirs: list[float]) -> tuple[float | None, str]:
    """Tests whether our times are lower. Returns the p-value, or None, and the name of the test."""
    if len(ours) + len(theirs) < 3:
        return None, "no test: one run on each side"
    if min(len(ours), len(theirs)) > 1:
        equal_var = False
        name = "Welch's t-test"
    else:  # a single run has no spread of its own: assume that of the other side
        equal_var = True
        name = "Student's t-test, because one side has a single run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # equal times
        p = float(stats.ttest_ind(ours, theirs, equal_var=equal_var, alternative="less").pvalue)
    if math.isnan(p):
        return None, name
    return p, name


def compare(logs: list[Log], prior: list[Log], target: float) -> Comparison:
    """Compares the training times. Both sides need at least one complete run."""
    ours = final_times(logs)
    before = summarize(prior, target)
    saved = before.time_mean - statistics.fmean(ours)
    p, test = p_faster(ours, final_times(prior))
    return Comparison(before, saved, saved / before.time_mean, p, test)


# -----------------------------------------------------------------------------
# Rules

def listed(values) -> str:
    """"A and B". A value that isn't known becomes "unknown"."""
    return " and ".join("unknown" if v in ("", None) else str(v) for v in values)


def per_run(logs: list[Log], fault) -> list[str]:
    """Calls fault(log) for each run. Runs with the same fault share a line.

    fault returns what is wrong with a run, or "".
    """
    runs = {}  # fault -> names of the runs that have it
    for log in logs:
        what = fault(log)
        if what:
            runs.setdefault(what, []).append(log.name)
    lines = []
    for what, names in runs.items():
        who = ", ".join(names)
        if len(logs) > 1 and len(names) == len(logs):
            who = "all runs"
        lines.append(f"{who}: {what}")
    return lines


def is_incomplete(log: Log) -> str:
    return log.incomplete


def is_forced(log: Log) -> str:
    return "resumed by force (--resume_force)" if log.forced else ""


def other_hardware(log: Log) -> str:
    if not log.resumed_on:
        return ""
    started = log.hardware or "unknown hardware"
    return (
        f"started on {started} and resumed on {listed(log.resumed_on)}; "
        "make a run on one kind of hardware only"
    )


def not_compiled(log: Log) -> str:
    """How the compilation breaks the rules. "" if it doesn't, or if the log doesn't say."""
    if log.uncompiled:
        return 'trained without torch.compile ("model compiled: no" in the log, which says why)'
    other = [flags for flags in log.compiler_flags if flags not in COMPILER_FLAGS]
    if other:
        return (
            f"compiled with other flags, set in the environment: {listed(other)}; "
            "unset TORCHINDUCTOR_CPP_MARCH and run it again"
        )
    return ""


def wrong_val_tokens(log: Log) -> str:
    """On FineWeb the number is fixed. Other tracks have it in their source."""
    allowed = log.constants("val_tokens")
    if log.track in ("", "fineweb"):
        allowed = [FINEWEB_VAL_TOKENS]
    if log.val_tokens is None:
        return "the log doesn't say how many tokens the validation has"
    if log.val_tokens in allowed:
        return ""
    if not allowed:
        return "the source doesn't set val_tokens, so the validation can't be checked"
    wanted = " or ".join(f"{n:,}" for n in allowed)
    return f"validated on {log.val_tokens:,} tokens instead of {wanted}"


def damaged_windows(log: Log) -> str:
    """Logs of recipes/january2026.py have a list of windows, in blocks."""
    if "windows" not in log.hyperparameters:
        return ""
    block = log.hyperparameters.get("window_block")
    windows = log.hyperparameters["windows"]
    if isinstance(block, int) and isinstance(windows, list) and windows:
        if all(isinstance(window, int) for window in windows):
            return ""
    return (
        f"the hyperparameters are damaged: windows {windows!r} with window_block {block!r}; "
        "make the run again"
    )


def out_of_bounds(log: Log) -> str:
    """Hyperparameters that the track doesn't allow."""
    damage = damaged_windows(log)
    if damage:
        return damage
    found = []
    settings = dict(log.hyperparameters)
    if "windows" in settings:  # recipes/january2026.py
        settings["max_window"] = settings["window_block"] * max(settings["windows"])
    for name, (low, high) in BOUNDS.get(log.track, {}).items():
        value = settings.get(name)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            found.append(f"{name} {value}, but the track {log.track} needs {low} or more")
    max_ngram = settings.get("max_ngram", 1)  # an option until November 2026
    if log.track == "mini" and max_ngram != 1:
        found.append(f"max_ngram {max_ngram}, but the track mini has no n-gram tables")
    bigram_factor = settings.get("bigram_factor", 0)
    if log.track == "mini" and bigram_factor != 0:
        found.append(f"bigram_factor {bigram_factor}, but the track mini has no n-gram tables")
    return "; ".join(found)


def other_than_fixed(log: Log) -> str:
    """Hyperparameters that aren't those of the track. Logs of other programs may not have them."""
    found = []
    for name, wanted in FIXED.get(log.track, {}).items():
        value = log.hyperparameters.get(name, wanted)
        if value != wanted:
            found.append(f"{name} {value!r}, but the track {log.track} needs {wanted!r}")
    return "; ".join(found)


def check_sources(logs: list[Log]) -> list[str]:
    """All runs must have the same sources, and none may change the compiler's settings."""
    reasons = []
    first_log = {}
    for log in logs:
        first_log.setdefault(tuple(log.sources), log)
    if len(first_log) > 1:
        first, other, *_ = first_log.values()
        reasons.append(
            f"the logs have {len(first_log)} different sources, but a record needs one; to see the "
            f"difference: ./run.sh replay {first.path} --diff {other.path}"
        )
    for name, source in dict.fromkeys(itertools.chain(*first_log)):  # each once, in order
        for what in compiler_settings(source):
            reasons.append(f"not allowed: {what} of {name}")
    return reasons


def differing_hyperparameters(logs: list[Log]) -> list[str]:
    """Names of hyperparameters that differ between the runs but must not."""
    names = set()
    for log in logs:
        names |= set(log.hyperparameters)
    differ = []
    for name in sorted(names - PER_RUN):
        values = [log.hyperparameters.get(name) for log in logs]
        if any(value != values[0] for value in values):
            differ.append(name)
    return differ


def check_repeats(logs: list[Log]) -> list[str]:
    """Two runs must not have the same log or the same seed."""
    reasons = []
    seen = {}
    for log in logs:
        keys = {
            "the same log as": log.digest(),
            "the same seed as": str(log.hyperparameters.get("seed", "")),
        }
        for what, key in keys.items():
            if not key:
                continue
            earlier = seen.setdefault((what, key), log)
            if earlier is not log:
                reasons.append(
                    f"{log.name}: {what} {earlier.name}; each run counts once, so leave one out"
                )
                break
    return reasons


def broken_rules(logs: list[Log]) -> list[str]:
    """The rules that the logs break, one line each."""
    reasons = per_run(logs, is_incomplete)
    reasons += per_run(logs, is_forced)
    reasons += per_run(logs, not_compiled)
    reasons += check_sources(logs)
    differ = differing_hyperparameters(logs)
    if differ:
        reasons.append(f"the runs differ in their hyperparameters: {', '.join(differ)}")
    hardware = list(dict.fromkeys(log.hardware for log in logs))
    if len(hardware) > 1 or "" in hardware:
        reasons.append(
            f"all runs must be on the same known hardware; these are on {listed(hardware)}"
        )
    reasons += per_run(logs, other_hardware)
    reasons += per_run(logs, wrong_val_tokens)
    reasons += per_run(logs, out_of_bounds)
    reasons += per_run(logs, other_than_fixed)
    numbers = sorted({log.val_tokens for log in logs}, key=str)
    if len(numbers) > 1:
        reasons.append(f"validated on different numbers of tokens: {listed(numbers)}")
    return reasons + check_repeats(logs)


def judge_losses(summary: Summary, target: float) -> list[str]:
    """Why the losses don't show that the target is met."""
    if summary.n == 0:
        return []
    if summary.n == 1:
        return [
            "one complete run is not enough for a p-value; "
            "make more, or use --same-ml if only the speed changed"
        ]
    if summary.loss_std == 0:
        return ["all runs end at the same loss, so there is no p-value; make more runs"]
    if not summary.p_value < P_VALUE:
        return [
            f"the mean loss is not below {target:g} at p < {P_VALUE:g}: p = {summary.p_value:.2g}"
        ]
    return []


def judge_prior(logs: list[Log], prior: list[Log], same_ml: bool) -> list[str]:
    """Why the runs can't be compared with the prior record.

    With --same-ml, the prior record must obey all rules, because it is the proof.
    """
    reasons = []
    tracks = sorted({log.track for log in logs} | {log.track for log in prior})
    if len(tracks) > 1:
        reasons.append(f"the prior record is from another track: {listed(tracks)}")
    ours = {log.hardware for log in logs}
    hardware = sorted(ours | {log.hardware for log in prior})
    if len(hardware) > 1 and len(ours) == 1:
        reasons.append(
            f"the prior record ran on other hardware: {listed(hardware)}; run it again here"
        )
    faults = broken_rules(prior) if same_ml else per_run(prior, is_incomplete)
    for fault in faults:
        reasons.append(f"prior record: {fault}")
    return reasons


def check_same_training(logs: list[Log], prior: list[Log]) -> list[str]:
    """Why the training isn't that of the prior record.

    All runs of a record have the same settings, so the first log speaks for all. The prior record
    may have more hyperparameters than ours: later versions of a script drop some.
    """
    reasons = []
    steps = sorted({log.num_steps for log in logs})
    prior_steps = sorted({log.num_steps for log in prior})
    if steps != prior_steps:
        reasons.append(
            f"{listed(steps)} steps, but the prior record has {listed(prior_steps)}; {TEST_LOSSES}"
        )
    ours = logs[0].hyperparameters
    theirs = prior[0].hyperparameters
    if ours and theirs:
        differ = []
        for name in sorted(set(ours) - PER_RUN - SPEED_ONLY):
            if name not in theirs or ours[name] != theirs[name]:
                differ.append(name)
        if differ:
            names = ", ".join(differ)
            reasons.append(f"the prior record has other hyperparameters: {names}; {TEST_LOSSES}")
        return reasons
    tokens = logs[0].step_tokens
    prior_tokens = prior[0].step_tokens
    if tokens and prior_tokens and tokens != prior_tokens:
        reasons.append(
            f"{listed(tokens)} tokens per step, but the prior record has {listed(prior_tokens)}; "
            f"{TEST_LOSSES}"
        )
    return reasons


def judge_same_ml(logs: list[Log], prior: list[Log], target: float) -> list[str]:
    """Why the prior record doesn't prove the losses of our runs."""
    reasons = check_same_training(logs, prior)
    losses = final_losses(logs)
    prior_losses = final_losses(prior)
    p = p_below(prior_losses, target)
    if p is None or not p < P_VALUE:
        found = "too few runs for a p-value" if p is None else f"p = {p:.2g}"
        reasons.append(
            f"the prior record doesn't show that the target {target:g} is met: {found}; "
            f"{TEST_LOSSES}"
        )
    if losses and p is not None:
        p_higher = p_above(losses, prior_losses)
        if p_higher < P_VALUE:
            reasons.append(
                "the losses are above the prior record's, so the training isn't the same: mean "
                f"{statistics.fmean(losses):.4f} instead of {statistics.fmean(prior_losses):.4f}, "
                f"p = {p_higher:.2g}; {TEST_LOSSES}"
            )
    return reasons


def judge_times(comparison: Comparison) -> list[str]:
    """Why the times don't show that the runs are faster than the prior record."""
    p = comparison.p_value
    if not comparison.saved > 0:
        return [f"not faster than the prior record: {-comparison.saved:.3f} s slower"]
    if p is not None and not p < P_VALUE:
        return [f"not faster than the prior record at p < {P_VALUE:g}: p = {p:.2g}"]
    return []


def judge(
    logs: list[Log],
    target: float | None = None,
    prior: list[Log] = (),
    same_ml: bool = False,
) -> Verdict:
    """Judges one log or more. `prior` has the logs of the record to beat.

    Without a target, that of the logs counts.
    """
    reasons = broken_rules(logs)
    targets = list(dict.fromkeys(log.target for log in logs))
    assumed = False
    if target is None:
        target = targets[0]
        assumed = not all("target_val_loss" in log.hyperparameters for log in logs)
        if len(targets) > 1:
            reasons.append(f"the runs have different targets: {listed(targets)}")
    summary = summarize(logs, target)
    verdict = Verdict(target, same_ml, summary, assumed, reasons=reasons)
    if not same_ml:
        reasons += judge_losses(summary, target)
    if prior:
        reasons += judge_prior(logs, prior, same_ml)
        if final_times(logs) and final_times(prior):
            verdict.comparison = compare(logs, prior, target)
            reasons += judge_times(verdict.comparison)
    if prior and same_ml:
        reasons += judge_same_ml(logs, prior, target)
    return verdict
