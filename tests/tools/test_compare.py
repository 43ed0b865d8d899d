"""
The comparison of ideas. Statistics against scipy's tests and simulated comparisons; the command with a stand-in for the
script, standin.py, whose losses and times have known distributions.
"""

import contextlib
import difflib
import fcntl
import io
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import compare
import compare_stats
import log_parsing
import plot
import compare_sources
import verify

STANDIN = Path(__file__).resolve().parent / "standin.py"


def logs_of(losses, times=None, steps=100) -> list[log_parsing.Log]:
    """Complete logs with these final losses, and milliseconds a step."""
    times = [40.0] * len(losses) if times is None else times
    return [
        log_parsing.Log(
            Path("x"),
            b"s",
            "",
            last_step=steps,
            num_steps=steps,
            validations=[log_parsing.Validation(steps, loss, ms * steps, ms)],
        )
        for loss, ms in zip(losses, times)
    ]


# ----------------------------------------------------------------------------------------------------------
# Statistics
def test_against_scipy():
    """Welch's test and its interval, Student's test of the log ratios: as scipy computes them."""
    rng = np.random.default_rng(1)
    base, ideas = (
        rng.normal(1.5, 0.002, 6),
        [rng.normal(1.501, 0.004, 4), rng.normal(1.49, 0.001, 6)],
    )
    base_ms, idea_ms = rng.normal(40, 1, 6), rng.normal(42, 1, 6)
    first, second = compare_stats.analyse(
        logs_of(base, base_ms), dict(a=logs_of(ideas[0]), b=logs_of(ideas[1], idea_ms))
    )
    for e, losses in zip((first, second), ideas):
        expected = stats.ttest_ind(losses, base, equal_var=False)
        assert e.p == pytest.approx(expected.pvalue)
        assert e.difference_interval == pytest.approx(tuple(expected.confidence_interval(0.99)))
        assert e.difference == pytest.approx(losses.mean() - base.mean())
        assert (e.n, e.base_n) == (len(losses), 6)
    expected = stats.ttest_1samp(np.log(idea_ms / base_ms), 0)
    assert second.step_time_p == pytest.approx(expected.pvalue)
    assert np.log(second.step_time_interval) == pytest.approx(expected.confidence_interval(0.99))
    assert second.step_time == pytest.approx(stats.gmean(idea_ms) / stats.gmean(base_ms))


def test_holm():
    assert compare_stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(
        [0.03, 0.06, 0.06, 0.02]
    )  # Holm's own procedure
    assert compare_stats.holm([0.3, None, 0.2]) == [0.4, None, 0.4] and compare_stats.holm(
        [None]
    ) == [None]
    rng = np.random.default_rng(0)
    for _ in range(
        50
    ):  # rejected at every level: as by the procedure, from the smallest p on until one is too large
        ps, level = list(rng.uniform(0, 0.2, 5)), rng.uniform(0.01, 0.3)
        rejected = set()
        for k, i in enumerate(np.argsort(ps)):
            if ps[i] > level / (5 - k):
                break
            rejected.add(i)
        assert {i for i, p in enumerate(compare_stats.holm(ps)) if p <= level} == rejected


def within(count: int, n: int, chance: float) -> bool:
    """In the central 99.9% of the binomial distribution."""
    low, high = stats.binom.interval(0.999, n, chance)
    return low <= count <= high


def test_a_thousand_comparisons_are_calibrated():
    """False positives 1%, intervals cover 99%, and what would be seen nine times in ten is, with other noise too."""
    rng, n = np.random.default_rng(2), 1000
    false, covered, seen, unlike = 0, 0, 0, 0
    for _ in range(n):
        draw = lambda mean=1.5, noise=0.002: logs_of(rng.normal(mean, noise, 5))
        (null,) = compare_stats.analyse(draw(), dict(idea=draw()), timed=False)
        false += null.verdict != "no difference shown"
        (other,) = compare_stats.analyse(draw(), dict(idea=draw(1.495, 0.004)), timed=False)
        covered += other.difference_interval[0] < -0.005 < other.difference_interval[1]
        (again,) = compare_stats.analyse(
            draw(), dict(idea=draw(1.5 + null.detectable)), timed=False
        )
        seen += again.verdict == "hurts"
        unlike += other.p < 0.01
    assert within(false, n, 0.01) and within(covered, n, 0.99) and within(seen, n, 0.9), (
        false,
        covered,
        seen,
    )
    assert 0 < unlike < n  # that interval is no wider than it must be


def test_many_ideas_raise_no_false_alarm():
    rng, n = np.random.default_rng(3), 1000
    alarms = raw = 0
    for _ in range(n):
        found = compare_stats.analyse(
            logs_of(rng.normal(1.5, 0.002, 5)),
            {str(i): logs_of(rng.normal(1.5, 0.002, 5)) for i in range(6)},
            timed=False,
        )
        alarms += any(e.verdict != "no difference shown" for e in found)
        raw += any(e.p < 0.01 for e in found)
    assert alarms <= stats.binom.ppf(0.9995, n, 0.01) < raw


def test_steps_and_times_cover_the_truth():
    """Loss that falls by 0.3 times the logarithm of steps, seeds that the base feels at every number of them, a machine
    that slows by a third meanwhile and jitters; an idea that is 0.006 better, worth 2% of steps, and whose step takes 3% more
    time."""
    rng, n = np.random.default_rng(4), 600
    hits = dict(step_time=0, steps=0, time=0)
    truth = dict(step_time=1.03, steps=math.exp(-0.02) - 1, time=1.03 * math.exp(-0.02) - 1)
    found = 0
    for _ in range(n):
        machine = 40 * np.linspace(1, 4 / 3, 8) * np.exp(rng.normal(0, 0.05, 8))  # of the round
        run = lambda mean, factor=1, steps=100: logs_of(
            rng.normal(mean - 0.3 * math.log(steps / 100), 0.002, 8),
            factor * machine * np.exp(rng.normal(0, 0.01, 8)),
            steps,
        )
        base = 1.5 + rng.normal(0, 0.003, 8)  # of the round's seed
        (e,) = compare_stats.analyse(
            run(base), dict(idea=run(1.494, 1.03)), [run(base, 1, 90), run(base, 1, 110)]
        )
        for name in hits:
            low, high = getattr(e, f"{name}_interval")
            hits[name] += low < truth[name] < high
        found += e.step_time_p_corrected < 0.01
    assert all(within(hit, n, 0.99) for hit in hits.values()), hits
    assert found > 0.8 * n, found  # 3% is found next to a drift of 33%: the rounds are pairs


def test_slope_against_least_squares():
    """One slope and a level for each round, solved as a linear system; what the rounds have in common changes nothing."""
    rng = np.random.default_rng(5)
    steps, losses = (
        np.log([90, 100, 110])[:, None] + np.zeros((3, 4)),
        1.5 + rng.normal(0, 0.002, (3, 4)),
    )
    losses -= 0.3 * (steps - math.log(100))
    columns = np.column_stack([steps.ravel(), *(np.arange(12) % 4 == i for i in range(4))])
    solution, (residual,), *_ = np.linalg.lstsq(columns, losses.ravel())
    variance = residual / (12 - 5) * np.linalg.inv(columns.T @ columns)[0, 0]
    for level in (0, rng.normal(0, 0.1, 4)):
        groups = [logs_of(row + level, steps=n) for row, n in zip(losses, (90, 100, 110))]
        slope, part = compare_stats.loss_slope(groups)
        assert slope == pytest.approx(solution[0]) and part == pytest.approx((variance, 7))


def test_more_steps_are_worth_themselves():
    """An idea that is nothing but a tenth more steps reaches the base's loss in as many steps, and as much time."""
    line = lambda steps: [1.5 - 0.3 * math.log(steps / 100) + 0.0001 * i for i in (-1, 0, 1)]
    extras = [logs_of(line(90), steps=90), logs_of(line(110), steps=110)]
    (e,) = compare_stats.analyse(
        logs_of(line(100)), dict(idea=logs_of(line(110), steps=110)), extras
    )
    assert (
        e.steps == pytest.approx(0, abs=1e-6)
        and e.time == pytest.approx(0, abs=1e-6)
        and e.verdict == "helps"
    )


def test_without_a_slope_no_steps():
    flat = [1.5, 1.501, 1.499, 1.5]
    extras = [logs_of(flat, steps=90), logs_of(flat, steps=110)]
    (e,) = compare_stats.analyse(logs_of(flat), dict(idea=logs_of([1.4, 1.401, 1.4])), extras)
    assert (
        e.steps is None
        and e.time is None
        and e.verdict == "helps"
        and "steps" not in compare_stats.in_words(e)
    )


def test_no_spread_is_no_test():
    (e,) = compare_stats.analyse(logs_of([1.5, 1.5]), dict(idea=logs_of([1.4, 1.4])))
    assert e.p is None and e.step_time_p is None and "no test" in compare_stats.in_words(e)
    (e,) = compare_stats.analyse(
        logs_of([1.5, 1.5]), dict(idea=logs_of([1.4, 1.41]))
    )  # a spread on one side is one
    assert e.p == pytest.approx(stats.ttest_1samp([1.4, 1.41], 1.5).pvalue)


@pytest.mark.parametrize(
    "loss, factor, words",
    [
        (
            1.49,
            1.0,
            r"helps: loss 0\.0100 lower \(0\.00\d\d to 0\.01\d\d; n = 4 and 4\); to the base's loss: "
            r"steps -3\.\d% \(-\d\.\d% to -\d\.\d%\), time -3\.\d% \([^)]*\)$",
        ),
        (1.51, 1.0, r"hurts: loss 0\.0100 higher .* steps \+3\.\d% .* time \+3\.\d%"),
        (1.49, 1.5, r"helps.* so later there all the same; time of a step \+50\.\d% "),
        (1.51, 0.5, r"hurts.* so sooner there all the same; time of a step -50\.\d% "),
        (1.40, 1.0, r"helps.* beyond the tenth that was measured"),
        (
            1.50,
            0.8,
            r"no difference shown; one of 0\.00\d\d or more would have been seen nine times in ten "
            r"\(n = 4 and 4\); time of a step -20\.\d% ",
        ),
    ],
)
def test_words(loss, factor, words):
    ms, noise = np.array([40, 40.1, 39.9, 40]), np.array([0, 0.001, -0.001, 0])
    extras = [
        logs_of(1.5 - 0.3 * math.log(steps / 100) + noise[::-1], steps=steps) for steps in (90, 110)
    ]
    (e,) = compare_stats.analyse(
        logs_of(1.5 + noise, ms), dict(idea=logs_of(loss + noise, factor * ms[::-1])), extras
    )
    assert re.match("idea: " + words, compare_stats.in_words(e)), compare_stats.in_words(e)


def test_two_runs_may_tell_nothing():
    """An interval that reaches anywhere is shown as such, in a table that still fits."""
    base, idea = logs_of([1.5, 1.6], [40, 400]), logs_of([1.9, 1.1], [900, 1e-6])
    (e,) = compare_stats.analyse(
        base, dict(idea=idea), [logs_of([1.6, 1.601], steps=50), logs_of([1.5, 1.501], steps=200)]
    )
    assert (
        math.isfinite(e.step_time_interval[1])
        and "±>10" in compare_stats.table(dict(base=base, idea=idea), [e])[-1]
    )
    assert max(map(len, compare_stats.table(dict(base=base, idea=idea), [e]))) <= 80


# ----------------------------------------------------------------------------------------------------------
# The command
def run(*arguments) -> tuple[int, str, str]:
    """compare.py in this process -> exit status, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            log_parsing.run_command(compare.main)
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return end.value.code, out.getvalue(), err.getvalue()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of our own with the stand-in as train_gpt.py, in a git repository that has it as v1."""
    (tmp_path / "train_gpt.py").write_bytes(STANDIN.read_bytes())
    (tmp_path / "other.txt").write_text("text\n")
    git = lambda *words: subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    git("init", "-q")
    git("add", "other.txt")
    git("commit", "-qm", "zero")
    git("tag", "v0")
    git("add", "train_gpt.py")
    git("commit", "-qm", "one")
    git("tag", "v1")
    for module in (compare, compare_sources):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(compare, "COMPARISONS", tmp_path / "logs" / "compare")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(err: str) -> list[str]:
    """The runs that were made, in order, but for those that compile: "name, seed N"."""
    return re.findall(r"^\d+/\d+ (.*, seed \d+):", err, re.MULTILINE)


def patch_of(name: str, old: str, new: str) -> str:
    """What diff -u prints for a file of that name."""
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))


def check_files_of_a_comparison(place, source, order):
    """JSON, plot, and logs that the other tools read."""
    answer = json.loads((place / "o.json").read_text())
    folder = place / "logs/compare/all"
    assert answer["folder"] == str(folder)
    assert [idea["verdict"] for idea in answer["ideas"]] == ["hurts", "no difference shown"]
    groups = {}
    for name, runs in answer["runs"].items():
        groups[name], errors = log_parsing.read_logs([folder / "runs" / name])
        assert not errors and [str(log.path) for log in groups[name]] == [r["path"] for r in runs]
        assert (
            [log.hyperparameters["seed"] for log in groups[name]]
            == [0, 1, 2]
            == [r["seed"] for r in runs]
        )
        assert all(log.source == source.encode() and not log.incomplete for log in groups[name])
        assert all(log.hyperparameters["noise"] == 0.001 for log in groups[name])
    assert {logs[0].num_steps for logs in groups.values()} == {90, 100, 110}
    extras = [groups["worktree-10%"], groups["worktree+10%"]]
    again = compare_stats.analyse(
        groups["worktree"], {name: groups[name] for name in order[3:]}, extras
    )
    assert [idea["time_interval"] for idea in answer["ideas"]] == [
        list(e.time_interval) for e in again
    ]
    assert verify.summarize(groups["wide"], 1.6).n == 3
    plot.plot_curves(groups, place / "curves.png")
    assert (place / "o.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(f.name for f in folder.iterdir()) == [
        "comparison.json",
        "lock",
        "runs",
        "sources",
        "working",
    ]
    assert not list((folder / "working").iterdir())


def test_a_whole_comparison(place):
    """Sources frozen while they are edited, order, seeds, table, JSON, picture, and logs that other tools read."""
    script = place / "train_gpt.py"
    edit = f'\nif len(sys.argv) > 4:\n    open({str(script)!r}, "a").write("broken(")\n'  # by a run, not by the check
    source = script.read_text() + edit
    script.write_text(source)
    status, out, err = run(
        "--idea",
        "wide=--effect 0.05",
        "--idea",
        "--slower=1.5",
        "--runs",
        3,
        "--json",
        "o.json",
        "--plot",
        "o.png",
        "--noise",
        "0.001",
        "--name",
        "all",
    )
    assert status == 0, err
    assert script.read_text().endswith("broken(")
    order = ["worktree", "worktree-10%", "worktree+10%", "wide", "slower_1.5"]
    assert made(err) == [
        f"{compare_stats.short((order[r:] + order[:r])[i])}, seed {r}"
        for r in range(3)
        for i in range(5)
    ]
    assert re.findall(r"^\d+/18 (.*), to compile", err, re.MULTILINE) == [
        "worktree",
        "wide",
        "slower_1.5",
    ]
    assert all(len(line) <= 80 for line in out.splitlines()[:-1])
    assert re.search(r"^worktree +3 .* ms$", out, re.M)
    assert re.search(r"^wide +3 +1.5\d{3} +\+0.0[45]\d\d±0.0\d{3} ", out, re.M)
    assert re.search(r"^wide: hurts", out, re.M) and "slower_1.5: no difference shown" in out

    check_files_of_a_comparison(place, source, order)


def test_compiled_and_uncompiled_runs_are_not_mixed(place, monkeypatch):
    """Also not with runs taken over from another comparison. All uncompiled is said once."""
    command = ["--idea", "--effect 0.01", "--runs"]
    assert run(*command, 2)[0] == 0
    (folder,) = (place / "logs" / "compare").iterdir()
    monkeypatch.setenv("STANDIN_COMPILED", "no (no C++ compiler was found)")
    status, out, err = run(*command, 3)
    assert (
        status == 2 and out == "" and made(err) == ["worktree+10%, seed 2"]
    )  # the first that differs is the last
    line = err.splitlines()[-1]
    assert line.startswith("error: ") and line.count("not compiled: ") == 1
    said = dict(re.findall(r"; ((?:not )?compiled): (.*?)(?= \(|;)", line))
    assert said["not compiled"] == "worktree+10%_seed2" and said["compiled"].endswith(" and 3 more")
    assert len(said["compiled"].split(" and ")[0].split(", ")) == 5 and str(folder) in line
    again = run(*command, 3)
    assert again[0] == 2 and again[2].splitlines() == [line]  # before any run

    # another comparison would take the base's other steps from the first one, whose runs were compiled
    other = ["--idea", "--effect 0.02", "--runs", 2, "--name", "other"]
    status, out, err = run(*other)
    assert status == 2 and "cannot be compared" in err and "worktree+10%_seed0" in err
    shutil.rmtree(place / "logs" / "compare" / "other" / "taken_over")
    status, out, err = run(*other)
    assert status == 0, err
    assert out.count("no run was compiled") == 1
    logs, _ = log_parsing.read_logs(sorted((place / "logs/compare/other/runs").iterdir()))
    assert len(logs) == 8 and all(log.uncompiled for log in logs)

    # the remedy: without the uncompiled one, and with a compiler again
    monkeypatch.delenv("STANDIN_COMPILED")
    (folder / "runs" / "worktree+10%" / "worktree+10%_seed2.txt").unlink()
    status, out, err = run(*command, 3)
    assert status == 0 and "no run was compiled" not in out


def test_going_on(place):
    """More runs, a run that is lost, one cut short, a leftover: only what is missing is made."""
    command = ["--idea", "--effect 0.01", "--runs"]
    first = run(*command, 2)
    assert first[0] == 0 and len(made(first[2])) == 8
    status, out, err = run(*command, 2)
    assert (status, err) == (0, "") and out == first[1]
    status, out, err = run(*command, 3)
    assert status == 0 and made(err) == [
        f"{name}, seed 2" for name in ("worktree+10%", "effect_0.01", "worktree", "worktree-10%")
    ]
    (folder,) = (place / "logs" / "compare").iterdir()
    lost = folder / "runs" / "worktree" / "worktree_seed1.txt"
    cut = folder / "runs" / "worktree-10%" / "worktree-10%_seed2.txt"
    before = lost.read_bytes(), cut.read_bytes()
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-100])
    leftover = folder / "working" / "worktree_seed1" / "logs" / "half.txt"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(before[0][:-50])
    assert run(*command, 3)[1] == out
    assert (lost.read_bytes(), cut.read_bytes()) == before and not leftover.exists()


def test_what_can_be_compared(place):
    """Options, a patch, a file, a revision, the working tree, each with options too; --base takes the same."""
    script = place / "train_gpt.py"
    patched = STANDIN.read_text().replace("noise: float = 0.002", "noise: float = 0.003")
    (place / "p.patch").write_text(patch_of("train_gpt.py", STANDIN.read_text(), patched))
    text = script.read_text().replace("num_iterations: int = 100", "num_iterations: int = 200")
    (place / "my script.py").write_text(text)
    script.write_text(text.replace("200", "300"))
    subprocess.run(["git", "checkout", "-q", "-b", "feature"], cwd=place, check=True)
    read = lambda what: compare_sources.read_variant(what, STANDIN.read_bytes(), ["--noise", "1"])
    for what, name, source, options in [
        (
            "--effect 0.1 --slower=2",
            "effect_0.1_slower_2",
            STANDIN.read_text(),
            ["--effect", "0.1", "--slower=2"],
        ),
        ("p.patch", "p", patched, []),
        ("new=p.patch --effect 1", "new", patched, ["--effect", "1"]),
        ("'my script.py'", "my_script", text, []),
        ("v1", "v1", STANDIN.read_text(), []),
        ("feature~0 --effect 1", "feature_0_effect_1", STANDIN.read_text(), ["--effect", "1"]),
        (".", "worktree", script.read_text(), []),
        ("", "worktree", script.read_text(), []),
        ("x=", "x", script.read_text(), []),
        ("x=--effect=1", "x", STANDIN.read_text(), ["--effect=1"]),
    ]:
        variant = read(what)
        assert (variant.name, variant.options) == (name, ["--noise", "1", *options])
        assert variant.source.decode() == source, what
    status, out, err = run("--runs", 2)  # the working tree against the last commit
    assert (
        status == 0 and out.startswith("base HEAD;") and re.search(r"^worktree: helps", out, re.M)
    ), out
    status, out, err = run(
        "--base",
        "v1 --effect 0.5",
        "--idea",
        "v1",
        "--idea",
        "v1 --effect 0.2",
        "--no_steps",
        "--runs",
        2,
    )
    assert status == 0 and "v1: helps" in out and "v1_effect_0.2: helps" in out


def test_a_script_of_another_make(place):
    """One that cannot be asked for its settings is asked for its --help."""
    text = STANDIN.read_text().replace("parse_arguments", "read_options")
    text = text.replace("InputError(message)", "SystemExit(message)")
    (place / "other.py").write_text(text)
    status, out, err = run(
        "--base", "other.py", "--idea", "other.py --effect 0.1", "--runs", 2, "--num_iterations", 50
    )
    assert status == 0 and "hurts" in out and "other-10%" in out, err
    assert log_parsing.read_logs(place.glob("logs/compare/*/runs/other-10%"))[0][0].num_steps == 45
    for arguments, message in [
        (["--num_iterations", "x"], "invalid int value"),
        ([], "--no_steps"),
    ]:
        status, out, err = run("--base", "other.py", "--idea", "other.py --effect 0.1", *arguments)
        assert status == 2 and message in err and len(err.splitlines()) == 1


def test_a_thing_with_itself(place):
    """--aa: other seeds for each copy, as equal seeds would give equal losses; refused without."""
    status, out, err = run(
        "--idea", ".", "--idea", "copy=--effect 0.0", "--aa", "--runs", 2, "--no_steps", "--seed", 7
    )
    assert status == 0 and "copy: the base or a copy, with seeds from 2007 on" in out
    assert made(err) == [
        "worktree, seed 7",
        "worktree_2, seed 1007",
        "copy, seed 2007",
        "worktree_2, seed 1008",
        "copy, seed 2008",
        "worktree, seed 8",
    ]
    losses = [
        log.final.val_loss for log in log_parsing.read_logs(place.glob("logs/compare/*/runs/*"))[0]
    ]
    assert len(set(losses)) > 3


def test_runs_of_others_count_for_losses_alone(place, monkeypatch):
    """The base with other steps comes from an earlier comparison, the base itself too where no time is wanted; not if
    anything that losses depend on is another."""

    def counts(*words):
        names = " ".join(made(run(*words)[2]))
        return [len(re.findall(name, names)) for name in ("worktree,", "worktree.10%", "idea")]

    assert counts("--idea", "idea1=--effect 0.1", "--runs", 2) == [2, 4, 2]
    assert counts("--idea", "idea2=--effect 0.2", "--runs", 3) == [3, 2, 3]
    assert counts("--idea", "idea3=--effect 0.3", "--runs", 3, "--no_times") == [0, 0, 3]
    status, out, err = run("--idea", "idea3=--effect 0.3", "--runs", 3, "--no_times")
    assert (
        status == 0
        and re.search(r"idea3 +3 .* -  +\S+%  +-$", out, re.M)
        and "time of a step" not in out
    )
    assert counts("--idea", "idea3=--effect 0.3", "--runs", 3) == [3, 0, 0]  # with times after all
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert counts("--idea", "idea4=--effect 0.4", "--runs", 2) == [2, 4, 2]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert counts("--idea", "idea5=--effect 0.1", "--runs", 2, "--noise", "0.001") == [2, 4, 2]
    assert counts("--idea", "idea6=--effect 0.1", "--runs", 2, "--seed", "2") == [
        2,
        2,
        2,
    ]  # seed 2 was there, 3 not
    (place / "train_gpt.py").write_bytes(STANDIN.read_bytes() + b"\n")
    assert counts("--idea", "idea7=--effect 0.1", "--runs", 2) == [2, 4, 2]
    monkeypatch.setattr(compare.importlib.metadata, "version", lambda name: "9.9")
    assert counts("--idea", "idea8=--effect 0.1", "--runs", 2) == [2, 4, 2]


def test_jobs_share_the_cores(place, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(compare, "CORES", 7)
    status, out, err = run(
        "--idea", "--effect 0.1", "--jobs", 3, "--runs", 2, "--no_steps", "--name", "x"
    )
    assert (
        status == 0 and "2 threads a process" in " ".join(out.split()) and "3 runs at a time" in out
    )
    logs, _ = log_parsing.read_logs(place.glob("logs/compare/x/runs/*"))
    assert len(logs) == 4 and all("OMP_NUM_THREADS=2" in log.run for log in logs)
    for jobs, what in [
        (1, "threads 2, not 7"),
        (2, "threads 2, not 3"),
    ]:  # nor is it gone on with in another way
        status, out, err = run(
            "--idea", "--effect 0.1", "--jobs", jobs, "--runs", 3, "--no_steps", "--name", "x"
        )
        assert status == 2 and what in err and "--name" in err and len(err.splitlines()) == 1


def test_several_processes(place, monkeypatch):
    """--nproc_per_node: by torchrun, here one that only says how it was called."""
    package = place / "path" / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "run.py").write_text(
        "import runpy, sys\n"
        "assert sys.argv[1:3] == ['--standalone', '--nproc_per_node=2']\n"
        "print('through torchrun')\nsys.argv = sys.argv[3:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(place / "path"))
    status, out, err = run(
        "--idea", "--effect 0.1", "--nproc_per_node", 2, "--runs", 2, "--no_steps"
    )
    assert status == 0 and "hurts" in out
    status, out, err = run("--idea", "--crash 1", "--nproc_per_node", 2, "--runs", 2, "--no_steps")
    assert status == 1 and "through torchrun" in err


def test_a_run_that_fails(place):
    """Its last lines are shown, what was finished stays, and nothing of the failed one passes for a log."""
    command = ["--idea", "bad=--crash 1", "--runs", "3", "--no_steps", "--name", "x"]
    status, out, err = run(*command)
    assert (status, out) == (1, "") and made(err) == ["worktree, seed 0", "bad, seed 0"]
    assert "step 7: the loss is not finite" in err
    assert "error: this run failed: bad, seed 1 (exit status 1)" in err
    assert sorted(f.name for f in place.glob("logs/compare/x/runs/*/*")) == [
        "bad_seed0.txt",
        "worktree_seed0.txt",
    ]
    (place / "short.py").write_text(STANDIN.read_text().replace("step:{n}/{n}", "step:{n - 1}/{n}"))
    status, out, err = run("--base", "v1", "--idea", "short.py", "--runs", 2)
    assert status == 1 and "no log of a whole run" in err


BAD = {
    "an idea that is the base": (
        ["--idea", "--effect 0.0"],
        "same source and settings as worktree",
    ),
    "no change since the commit": ([], "same source and settings as HEAD"),
    "twice the same idea": (
        ["--idea", "--effect 1", "--idea", "x=--effect 1.0"],
        "same source and settings as effe",
    ),
    "a patch that does not apply": (
        ["--idea", "no.patch"],
        "no.patch: does not apply (patch failed: train_gpt.py:1)",
    ),
    "a patch of another file": (["--idea", "other.patch"], "changes other.txt"),
    "a patch that is none": (
        ["--idea", "empty.patch"],
        "empty.patch: does not apply (No valid patches",
    ),
    "a patch that is not there": (["--idea", "gone.patch"], "no such file"),
    "a script that is not there": (["--idea", "x=gone.py"], "no such file"),
    "a script with an error": (["--idea", "broken.py"], "broken: SyntaxError"),
    "a script without options": (["--idea", "plain.py"], "plain: a script without --log_dir"),
    "an unknown field": (["--idea", "wide=--width 3"], "wide: unrecognized arguments: --width 3"),
    "an unknown field for all": (
        ["--idea", "--effect 1", "--width", "3"],
        "unrecognized arguments: --width 3",
    ),
    "a value that is none": (["--idea", "--effect much"], "invalid float value"),
    "a value out of range": (["--idea", "--num_iterations 0"], "must be more than zero"),
    "no such revision": (["--idea", "nowhere"], "nowhere: no revision here"),
    "a revision without the file": (["--idea", "v0"], "train_gpt.py"),
    "quotes that do not close": (["--idea", "--effect '1"], "No closing quotation"),
    "a seed of its own": (["--idea", "--seed 4"], "--seed: this command gives it"),
    "a folder of its own": (
        ["--idea", "--effect 1", "--log_dir", "x"],
        "--log_dir: this command gives it",
    ),
    "a source without --idea": (["v1"], "v1: not the value of an option; give a source with --idea or --base"),
    "an idea without its quotes": (
        ["--num_iterations", "9", "--idea", "--effect", "1"],
        "1: not the value of an option",
    ),
    "one run": (["--idea", "--effect 1", "--runs", "1"], "--runs must be 2 or more"),
    "runs that are no number": (["--idea", "--effect 1", "--runs", "many"], "many"),
    "an idea left out": (["--idea"], "expected one argument"),
    "a name with a slash": (["--idea", "--effect 1", "--name", "../x"], "--name ../x"),
    "a picture of another kind": (["--idea", "--effect 1", "--plot", "x.pdf"], "x.pdf"),
    "a folder that is not there": (["--idea", "--effect 1", "--json", "nowhere/x.json"], "nowhere"),
    "steps that have no tenth": (["--idea", "--effect 1", "--num_iterations", "1"], "--no_steps"),
}


def test_bad_input_is_one_line_before_any_run(place):
    (place / "no.patch").write_text(patch_of("train_gpt.py", "never there\n", "x\n"))
    (place / "other.patch").write_text(patch_of("other.txt", "text\n", "x\n"))
    (place / "empty.patch").write_text("")
    (place / "broken.py").write_text("def parse_arguments(:\ndef check_hyperparameters(\n")
    (place / "plain.py").write_text("open('was run', 'w')\n")
    for what, (arguments, message) in BAD.items():
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and message in err and len(err.splitlines()) == 1, (
            what,
            err,
        )
        assert not (place / "logs").exists() and not (place / "was run").exists(), what


def test_a_folder_that_cannot_be_made(place):
    (place / "logs").write_text("in the way")
    status, out, err = run("--idea", "--effect 1")
    assert (
        status == 1
        and re.search("error: .*logs.*: not a directory", err)
        and len(err.splitlines()) == 1
    )


def test_a_folder_of_another_comparison(place):
    """--name of other sources, settings or seeds is refused; so is one where a comparison is at work."""
    command = ["--runs", 2, "--no_steps", "--name", "x"]
    assert run("--idea", "--effect 0.1", *command)[0] == 0
    for arguments in (
        ["--idea", "--effect 0.2"],
        ["--idea", "--effect 0.1", "--seed", 1],
        ["--idea", "--effect 0.1", "--noise", 1],
        ["--idea", "--effect 0.1", "--idea", "--effect 0.2"],
        ["--idea", "effect_0.1=v1 --effect 0.2"],
    ):
        status, out, err = run(*arguments, *command)
        assert (
            status == 2
            and "of other sources, settings or seeds" in err
            and len(err.splitlines()) == 1
        ), arguments
    with open(place / "logs" / "compare" / "x" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out, err = run("--idea", "--effect 0.1", *command)
    assert status == 2 and "a comparison is at work here" in err
    assert run("--idea", "--effect 0.1", *command)[0] == 0


def test_interrupted_on_a_terminal_and_gone_on_with(place):
    """A bar that says what runs and the time left; Ctrl-C ends the run that is on, and what was finished stays."""
    shutil.copytree(ROOT / "tools", place / "tools")
    command = [
        sys.executable,
        "tools/compare.py",
        "--idea",
        "slow=--takes 600",
        "--runs",
        "2",
        "--no_steps",
    ]
    source = (
        place / "train_gpt.py"
    ).read_text()  # slow only where it counts, not in the run that compiles
    (place / "train_gpt.py").write_text(
        source.replace("time.sleep(hp.takes)", "time.sleep(hp.takes * (n > 1))")
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    child = subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 120
    while (
        not re.search(r"slow, seed 0: +50%.* 3/6 \[\d\d:\d\d<\d\d:\d\d", shown)
        and time.monotonic() < deadline
    ):
        shown += os.read(ours, 4096).decode()
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal is gone with the process
        while more := os.read(ours, 4096):
            shown += more.decode()
    os.close(ours)
    assert child.wait(60) == 130 and child.stdout.read() == b""
    child.stdout.close()
    assert "interrupted; runs that were finished are kept" in shown and "Traceback" not in shown
    assert [f.name for f in place.glob("logs/compare/*/runs/*/*")] == ["worktree_seed0.txt"]
    with open(*place.glob("logs/compare/*/lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a run that went on would hold it
