"""
verify.py --rule optimization. The expected values come from the formulas in floats, from scipy
called directly, and from cases that the track itself has worked out. The logs are written here.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tools.common import LogError
from tools.logs import parse_final_loss, parse_log, read_final_losses
from tools.records import optimization as optimization_rule
from tools.records import verify
from tests.util import ROOT

LINE = "=" * 100
NEW = [3.27794, 3.27816, 3.28146, 3.27847, 3.2788]
OLD = [3.2799, 3.2781, 3.2805, 3.2787]


def field_log(path: Path, loss, steps=3500, times=True, source="import torch\n", end="\n") -> Path:
    """A log like those of the optimization track: a source, facts between separators, losses."""
    lines = [source, LINE, "Running PyTorch 2.9.0+cu128 compiled for CUDA 12.8", LINE]
    for step, value in [(125, 4.5), (steps - 25, 3.3), (steps, loss)]:
        line = f"step:{step}/{steps} val_loss:{value}"
        if times:
            line += f" train_time:{step * 0.2:.3f}s step_avg:200.00ms"
        lines.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + end)
    return path


def folder_of(path: Path, losses, steps=3500, **kwargs) -> Path:
    """A folder of logs. Each source has another seed, because copies of a log are refused."""
    for seed, loss in enumerate(losses):
        field_log(path / f"{seed}.txt", loss, steps, source=f"SEED = {seed}\n", **kwargs)
    return path


def command(*arguments, cwd=None) -> subprocess.CompletedProcess:
    """verify.py --rule optimization in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "tools.records.verify", "--rule", "optimization", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def decide(folder: Path, against: Path | None = None) -> optimization_rule.Decision:
    new = optimization_rule.Recipe("new", read_final_losses([folder]))
    if against is None:
        return optimization_rule.judge_result(new)
    old = optimization_rule.Recipe("old", read_final_losses([against]))
    return optimization_rule.judge_pair(new, old)


# --------------------------------------------------------------------------------------------------
# The rule

def test_what_the_rule_assumes():
    """The threshold is that of a z-test at p = 0.001 with the standard deviation in the output."""
    threshold = float(optimization_rule.THRESHOLD)
    assert round(threshold / stats.norm.isf(0.001), 4) == 0.0013
    assert "about 0.0013 (p < 0.001)" in optimization_rule.ASSUMPTION


@pytest.mark.parametrize(
    "losses, accepted",
    [
        (["3.276"], True),  # exactly 0.004, although 3.28 - 3.276 < 0.004 in floats
        (["3.27601"], False),
        (["3.2760000001"], False),
        (["3.2779", "3.2781", "3.2770", "3.2790"], True),  # 0.002 * sqrt(4)
        (["3.2779", "3.2781", "3.2770", "3.27901"], False),
        (["3.264"] + ["3.28"] * 15, True),  # 0.001 * sqrt(16)
        (["3.279"] * 16, True),
        (["3.279"] * 15, False),
        (["3.28"], False),
        (["3.3"] * 100, False),
        (["3.2764", "3.2778"], True),  # 0.0029 * sqrt(2) = 0.00410
        (["3.2766", "3.2778"], False),  # 0.0028 * sqrt(2) = 0.00396
    ],
)
def test_threshold_of_a_result(tmp_path, losses, accepted):
    decision = decide(folder_of(tmp_path, losses))
    assert decision.accepted is accepted
    numbers = [float(loss) for loss in losses]
    expected = (3.28 - np.mean(numbers)) * np.sqrt(len(numbers))
    assert decision.score == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "new, new_steps, old, old_steps, accepted",
    [
        (["3.276"], 3500, ["3.282"], 3500, True),  # 0.006 / sqrt(2) = 0.00424
        (["3.277"], 3500, ["3.282"], 3500, False),  # 0.005 / sqrt(2) = 0.00354
        (["3.276"] * 2, 3500, ["3.28"] * 2, 3500, True),  # exactly 0.004 / sqrt(1/2 + 1/2)
        (["3.276"] * 2, 3500, ["3.27999"] * 2, 3500, False),
        (["3.28"] * 2, 3300, ["3.275"] * 2, 3500, True),  # exactly -0.005 + 200 * 0.0045 / 100
        (["3.28"] * 2, 3301, ["3.275"] * 2, 3500, False),  # one step more
        (["3.27"] * 2, 3600, ["3.2785"] * 2, 3500, True),  # more steps: 0.0085 - 0.0045
        (["3.27"] * 2, 3600, ["3.2784"] * 2, 3500, False),
        (["3.28"], 3500, ["3.27"], 3500, False),
    ],
)
def test_threshold_of_a_pair(tmp_path, new, new_steps, old, old_steps, accepted):
    mine = folder_of(tmp_path / "mine", new, new_steps)
    before = folder_of(tmp_path / "before", old, old_steps)
    decision = decide(mine, before)
    assert decision.accepted is accepted
    dloss = float(old[0]) - float(new[0])
    dsteps = old_steps - new_steps
    expected = (dloss + dsteps * 0.0045 / 100) / math.sqrt(1 / len(new) + 1 / len(old))
    assert decision.score == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "new, new_runs, new_steps, old, old_runs, old_steps, score, accepted",
    [
        (3.2785, 10, 3210, 3.2785, 16, 3225, 0.00167, False),
        (3.2785, 16, 3210, 3.2778, 10, 3250, 0.0027, False),
        (3.2790, 20, 3375, 3.2788, 20, 3425, 0.00648, True),
    ],
)
def test_pairs_that_the_track_has_worked_out(
    tmp_path, new, new_runs, new_steps, old, old_runs, old_steps, score, accepted
):
    mine = folder_of(tmp_path / "mine", [new] * new_runs, new_steps)
    before = folder_of(tmp_path / "before", [old] * old_runs, old_steps)
    decision = decide(mine, before)
    digits = len(str(score)) - 2
    assert abs(decision.score - score) < 10**-digits
    assert decision.accepted is accepted


# --------------------------------------------------------------------------------------------------
# The t-test

def test_t_test_of_a_result(tmp_path):
    decision = decide(folder_of(tmp_path, NEW))
    t = (np.mean(NEW) - 3.28) / (np.std(NEW, ddof=1) / math.sqrt(len(NEW)))
    assert decision.p_value == pytest.approx(stats.t.cdf(t, len(NEW) - 1), rel=1e-9)


@pytest.mark.parametrize("steps", [3500, 3400, 3550])
def test_t_test_of_a_pair(tmp_path, steps):
    """Welch's test with its degrees of freedom written out."""
    mine = folder_of(tmp_path / "mine", NEW, steps)
    decision = decide(mine, folder_of(tmp_path / "before", OLD, 3500))
    new_part = np.var(NEW, ddof=1) / len(NEW)
    old_part = np.var(OLD, ddof=1) / len(OLD)
    gap = np.mean(OLD) - np.mean(NEW) + (3500 - steps) * 0.0045 / 100
    t = gap / math.sqrt(new_part + old_part)
    df = (new_part + old_part) ** 2 / (
        new_part**2 / (len(NEW) - 1) + old_part**2 / (len(OLD) - 1)
    )
    assert decision.p_value == pytest.approx(stats.t.sf(t, df), rel=1e-9)


def test_no_t_test_without_a_spread(tmp_path):
    one = folder_of(tmp_path / "one", [3.276])
    equal = folder_of(tmp_path / "equal", [3.278, 3.278, 3.278])
    for decision in (decide(one), decide(one, equal), decide(equal, one)):
        assert decision.p_value is None
        assert decision.test == "one run has no standard deviation"
    assert decide(equal).test == "all runs have the same loss"
    assert decide(equal, equal).test == "all runs of a recipe have the same loss"
    spread = folder_of(tmp_path / "spread", NEW)
    expected = stats.ttest_1samp(NEW, 3.278, alternative="greater").pvalue
    assert decide(equal, spread).p_value == pytest.approx(expected, rel=1e-6)


# --------------------------------------------------------------------------------------------------
# The command

def test_one_folder(tmp_path):
    folder_of(tmp_path / "mine", NEW)
    done = command("mine", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    score = (3.28 - np.mean(NEW)) * math.sqrt(5)
    p = stats.ttest_1samp(NEW, 3.28, alternative="less").pvalue
    expected = f"""\
new log               val_loss
0                      3.27794
1                      3.27816
2                      3.28146
3                      3.27847
4                      3.27880

new     5 runs of 3500 steps, mean {np.mean(NEW):.6f}, \
observed standard deviation {np.std(NEW, ddof=1):.6f}
rule    (3.28 - {np.mean(NEW):.6f}) * sqrt(5) = {score:.6f}, needs 0.004 or more
        the rule assumes a standard deviation of about 0.0013 (p < 0.001)
t-test  p = {p:.2g} (one-sided, mean below 3.28)

NOT ACCEPTED
"""
    assert done.stdout == expected
    done = command(folder_of(tmp_path / "good", [3.2775, 3.278, 3.2772]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n\naccepted\n")


def test_two_folders(tmp_path):
    folder_of(tmp_path / "mine", NEW, 3400)
    folder_of(tmp_path / "before", OLD, 3500)
    done = command("mine", "--against", "before", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    dloss = np.mean(OLD) - np.mean(NEW)
    score = (dloss + 0.0045) / math.sqrt(1 / 5 + 1 / 4)
    p = stats.ttest_ind(NEW, np.add(OLD, 0.0045), equal_var=False, alternative="less").pvalue
    summary = done.stdout.split("\n\n", 2)[2]
    expected = f"""\
new     5 runs of 3400 steps, mean {np.mean(NEW):.6f}, \
observed standard deviation {np.std(NEW, ddof=1):.6f}
old     4 runs of 3500 steps, mean {np.mean(OLD):.6f}, \
observed standard deviation {np.std(OLD, ddof=1):.6f}
rule    ({dloss:.6f} + 100 * 0.0045 / 100) / sqrt(1/5 + 1/4) = {score:.6f}, needs 0.004 or more
        the rule assumes a standard deviation of about 0.0013 (p < 0.001)
t-test  p = {p:.2g} (Welch's, one-sided, old losses adjusted to the new number of steps)

accepted: the new recipe is better
"""
    assert summary == expected
    done = command("before", "--against", "mine", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "\n\nNOT ACCEPTED: " in done.stdout


def test_single_runs(tmp_path):
    """One log can be given by its name, and has neither a standard deviation nor a t-test."""
    log = field_log(tmp_path / "a.txt", 3.275)
    done = command(log)
    assert done.returncode == 0
    summary = "new     1 run of 3500 steps, mean 3.275000, no observed standard deviation\n"
    assert summary in done.stdout
    assert "t-test  none: one run has no standard deviation" in done.stdout
    before = field_log(tmp_path / "b.log", 3.2805)
    done = command(log, "--against", before)
    assert done.returncode == 1
    assert done.stdout.count("no observed standard deviation") == 2
    assert "= 0.003889, needs 0.004 or more" in done.stdout


def test_json(tmp_path):
    mine = folder_of(tmp_path / "mine", NEW, 3400)
    before = field_log(tmp_path / "b.log", 3.2805)
    done = command(mine, "--against", before, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["accepted"] is True
    assert answer["p_value"] is None
    assert list(answer["new"]["losses"].values()) == NEW
    assert answer["new"]["std"] == pytest.approx(np.std(NEW, ddof=1))
    assert answer["old"] == {
        "steps": 3500,
        "mean": 3.2805,
        "std": None,
        "losses": {str(before): 3.2805},
    }


# --------------------------------------------------------------------------------------------------
# Logs

QUOTED = 'print("step:9/9 val_loss:1.0")\n"""\nstep:9/9 val_loss:1.0\n"""\n'


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"times": False},
        {"times": False, "end": ""},
        {"end": "\npeak memory allocated: 30724 MiB\n"},
        {"end": "\nstep:3500/3500 train_time:700.000s step_avg:200.00ms\n"},
        {"source": QUOTED},  # an old loss in the source is not that of the run
        {"source": "'''\nTitle\n" + "=" * 30 + "\n'''\n"},
        {"source": "x = 1\n" + LINE + "\ny = 2\n"},
    ],
)
def test_logs_of_the_field(tmp_path, options):
    path = field_log(tmp_path / "a.txt", 3.27850, **options)
    for newline in ("\n", "\r\n"):
        path.write_bytes(path.read_text().replace("\n", newline).encode())
        loss = parse_final_loss(path)
        assert (loss.path, loss.steps, loss.val_loss) == (path, 3500, 3.2785)


def test_the_last_validation_counts(tmp_path):
    """As in a log of a run that was resumed."""
    again = "\nresume: from step 3400\nstep:3475/3500 val_loss:3.29\nstep:3500/3500 val_loss:3.27\n"
    path = field_log(tmp_path / "a.txt", 3.2785, end=again)
    assert parse_final_loss(path).val_loss == 3.27


def test_log_without_a_source(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("step:0/10 val_loss:10.8\nstep:10/10 val_loss:3.2 train_time:1ms\n")
    assert parse_final_loss(path).val_loss == 3.2


def test_our_logs(tmp_path):
    """A kept log: the final loss is the one that verify.py reads for a record."""
    logs = sorted(ROOT.glob("records/mini/2026-11-22_385Steps/*.txt"))
    assert len(logs) > 1
    ours = [log.final.val_loss for log in map(parse_log, logs)]
    found = read_final_losses(logs)
    assert [loss.val_loss for loss in found] == ours
    assert {loss.steps for loss in found} == {385}


# --------------------------------------------------------------------------------------------------
# Bad input

def bad_inputs(folder: Path) -> dict[str, tuple[list, str]]:
    """For each kind: the arguments, and words of the error."""
    good = field_log(folder / "good.txt", 3.2785)
    (folder / "empty").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "notes.md").write_text("step:3500/3500 val_loss:3.2\n")
    (folder / "blank.txt").write_text("")
    (folder / "zeros.txt").write_bytes(b"step:1/1 val_loss:3.2\0\n")
    (folder / "other.txt").write_text("not a log\n")
    (folder / "crash.txt").write_text(QUOTED + LINE + "\nTraceback\n")
    (folder / "outer" / "inner.txt").mkdir(parents=True)
    cut = field_log(folder / "cut.txt", 3.2785)
    cut.write_text(cut.read_text().replace("step:3500/3500", "step:3499/3500"))
    words = field_log(folder / "words.txt", "tensor(3.27)")
    mixed = folder_of(folder / "mixed", [3.27, 3.27])
    field_log(mixed / "1.txt", 3.27, steps=3400)
    copies = folder / "copies"
    for name in "ab":
        field_log(copies / f"{name}.txt", 3.27)
    return {
        "missing": ([folder / "missing"], "no such file"),
        "empty folder": ([folder / "empty"], "no .txt or .log file"),
        "no log in the folder": ([folder / "notes"], "no .txt or .log file"),
        "empty file": ([folder / "blank.txt"], "empty file"),
        "binary": ([folder / "zeros.txt"], "binary"),
        "another text": ([folder / "other.txt"], "the run wrote no validation loss; leave this log"),
        "no step": ([folder / "crash.txt"], "no line of the run starts with"),
        "folder in a folder": ([folder / "outer"], "inner.txt: not a file"),
        "unfinished": ([cut], "at step 3499 of 3500; let the run finish, or"),
        "a word": ([words], "val_loss is tensor(3.27), not a number from 0 to 1,000,000"),
        "two numbers of steps": ([mixed], "1.txt: a run of 3400 steps, but "),
        "copies": ([copies], "b.txt: a copy of "),
        "twice": ([good, good], "each run counts once, so leave one out"),
        "bad against": ([good, "--against", cut], "cut.txt: unfinished"),
        "empty against": ([good, "--against", folder / "empty"], "no .txt or .log file"),
    }


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "-3.27", "1e300"])
def test_impossible_losses(tmp_path, loss):
    folder_of(tmp_path, [3.27, loss, 3.28])
    with pytest.raises(LogError, match=f"1.txt: the final val_loss is {loss},"):
        optimization_rule.run_rule([tmp_path], [])


def test_bad_input(tmp_path):
    """Each is one line. The next test runs some of them as commands."""
    for kind, (arguments, words) in bad_inputs(tmp_path).items():
        against = []
        if "--against" in arguments:
            against = arguments[2:]
            arguments = arguments[:1]
        with pytest.raises(LogError) as error:
            optimization_rule.run_rule(arguments, against)
        assert words in str(error.value), kind
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "unfinished", "a word", "bad against"])
def test_bad_input_of_the_command(tmp_path, kind):
    arguments, words = bad_inputs(tmp_path)[kind]
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("option", [["--target", "3.3"], ["--same-ml", "--against", "x"]])
def test_options_that_do_not_go_together(capsys, option):
    with pytest.raises(SystemExit) as end:
        verify.parse_arguments(["logs", "--rule", "optimization", *option])
    assert end.value.code == 2
    assert "drop --target and --same-ml" in capsys.readouterr().err
