"""The command `compare`, with a stand-in for train_gpt.py (standin.py) whose losses and times are known."""

import csv
import errno
import fcntl
import json
import math
import os
import platform
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from judge.compare import compare, ledger
from judge.settings import Settings
from judge.runs import make as compare_runs
from judge.runs import start
from judge.runs import variants as compare_sources
from judge.stats import decide as compare_stats
from judge.compare import step_times as compare_steps
from judge.commands import stop_on_signals
from judge.logs.read import parse_log
from tests.judge.helpers import answer_of, bounds, check_refused, commit_files, git, patch_of, run_main
from tests.util import ROOT, tiny_run

STANDIN = Path(__file__).resolve().parent / "standin.py"
# As that of the repository
PROJECT = """
command = "python -m train_gpt {options} --seed {seed} --num_runs {runs} --val_loss_every 0"
job_per_core = true
"""
RECIPE = "python -m recipes.toy {options} --seed {seed} --num_runs {runs}"
# A recipe that imports train_gpt.py
TOY = """
import sys
import train_gpt  # which knows --print_settings

EFFECT = 0.0

if __name__ == "__main__":
    final_loss = train_gpt.final_loss
    train_gpt.final_loss = lambda hp: EFFECT + final_loss(hp)
    train_gpt.main(sys.argv[1:])
"""


def run(*arguments) -> tuple[int, str, str]:
    return run_main(compare.main, *arguments)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with the stand-in as train_gpt.py and with a recipe, which were committed as v1."""
    files = {"train_gpt.py": STANDIN.read_text(), "recipes/toy.py": TOY}
    commit_files(tmp_path, files | {".gitignore": "logs/\ndata/*/\n", "judge.toml": PROJECT})
    git(tmp_path, "tag", "v1")
    monkeypatch.setattr(compare_steps, "SHORT_SEEDS", range(3))
    monkeypatch.setattr(compare_steps, "STEPS", 70)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(*arguments) -> tuple[dict, str]:
    """A comparison of losses that ends well."""
    return answer_of(compare.main, *arguments, "--no_times")


# -----------------------------------------------------------------------------
# Answers


def test_an_idea_that_helps(place):
    """The figures are those of the logs, at the same seeds."""
    found, words = answer_of(compare.main, "--idea", "better=--effect -0.004")
    assert re.match(r"better helps\. The same loss takes \d", words)
    (idea,) = found["ideas"]
    low, high = bounds(idea["steps"])
    assert low < -0.004 / 0.123 < high and idea["n"] >= 3
    assert f" loss at equal steps {idea['difference']['value']:+.4f} (" in words
    losses = {}
    for name, group in found["runs"].items():
        for r in group:
            log = parse_log(r["path"])
            seed = log.hyperparameters["seed"]
            assert Path(r["path"]).name == f"seed{seed}.txt"
            losses[name, seed, log.num_steps] = log.final.val_loss
    differences = []
    for seed in range(idea["n"]):
        differences.append(losses["better", seed, 100] - losses["worktree", seed, 100])
    assert idea["difference"]["value"] == pytest.approx(np.mean(differences))
    assert {steps for name, seed, steps in losses} == {80, 100, 125}


def test_an_idea_that_does_nothing(place):
    """Not worth what was asked for, and nothing is said of less."""
    found, words = answer("--idea", "nothing=--slower 1.1", "--until", "3%")
    assert "nothing is not worth it: we are 95% sure that it saves less than 3%" in words


def test_one_look(place):
    """--runs makes exactly so many pairs, and no other runs. Before the last, there is no verdict."""
    found, words = answer("--idea", "x=--effect -0.1", "--runs", "3")
    assert [len(runs) for runs in found["runs"].values()] == [3, 3]
    (idea,) = found["ideas"]
    assert (idea["verdict"], idea["steps"]) == ("helps", None)
    assert "by a paired t-test, for one look" in words
    found, words = answer("--idea", "x=--effect -0.1", "--runs", "8", "--hours", "0")
    assert "Too early for an answer" in words and "Stopped after --hours 0." in words
    assert found["ideas"] == []


def test_many_ideas(place):
    """Each gets its verdict; more runs go to those that are undecided; intervals are for all together."""
    found, words = answer("--idea", "good=--effect -0.02", "--idea", "small=--effect -0.003")
    assert "all 2 ideas together" in words
    good, small = found["ideas"]
    assert good["verdict"] == small["verdict"] == "helps"
    n = good["n"]
    assert small["n"] > n
    sides = [[run["val_loss"] for run in found["runs"][name][:n]] for name in ("good", "worktree")]
    alone = compare_stats.analyse("good", *sides, None, None, ideas=2)
    assert bounds(good["difference"]) == pytest.approx((alone.difference.low, alone.difference.high))


def test_steps_that_cannot_be_timed(place):
    """The answer is about losses only, and says so."""
    source = STANDIN.read_text()
    old = "    n = hp.num_iterations\n"
    assert source.count(old) == 1
    fail = "    if n == 70:\n        sys.exit('no more')\n"
    (place / "train_gpt.py").write_text(source.replace(old, old + fail))
    status, out, err = run("--idea", "better=--effect -0.01")
    assert status == 0 and out.startswith("better helps.") and "time of a step" not in out
    assert "could not be timed; the error is above this answer." in " ".join(out.split())
    assert "no more\na run failed: worktree with 70 steps, seed 0 (exit status 1)" in err


def test_an_idea_with_the_steps_of_the_slope(place):
    """The idea is the base with more steps. Both have the same runs, each made once. Its loss is lower, but
    not the steps to the base's loss. 8 and 12 steps have another slope than 10 / 1.25 and 10 * 1.25."""
    found, words = answer("--num_iterations", "10", "--idea", "more=--num_iterations 12", "--jobs", "4")
    assert set(found["runs"]) == {"worktree", "more", "worktree with 8 steps"}
    assert found["runs_made"] == sum(map(len, found["runs"].values()))
    assert found["slope"]["n"] >= compare_stats.FEWEST_SLOPES
    assert found["slope"]["value"] == pytest.approx(-0.123, rel=0.05)
    (idea,) = found["ideas"]
    assert idea["own_steps"] == 1.2 and idea["difference"]["value"] < -0.015
    assert abs(idea["steps"]["value"]) < 0.05


def test_identical_losses(place):
    """No test of losses, but the steps are timed. They take three times as long. The stand-in's sleeps are
    longer than asked for."""
    source = STANDIN.read_text().replace("hp.slower, threads)", "threads)")
    (place / "train_gpt.py").write_text(source)
    options = ["--slower", "2", "--idea", "same=--slower 6"]
    identical = "same: the losses are identical in all [4-8] pairs."
    found, words = answer_of(compare.main, *options)
    assert re.match(f"{identical} .*time of a step ", words)
    assert "loss at equal" not in words
    time = found["ideas"][0]["step_time"]
    assert ("The same loss takes" in words) == (bounds(time)[0] > 0)
    assert math.log(1.5) < time["value"] < math.log(4)
    assert bounds(time)[0] < math.log(3) and bounds(time)[1] > math.log(1.5)
    (file,) = (place / ".judge/step_times").iterdir()
    assert len(json.loads(file.read_text())) == 3
    found, words = answer(*options)
    assert re.fullmatch(identical, words)


# -----------------------------------------------------------------------------
# The gate


def test_gate(place):
    """Its exit status 1 means an answer, so an error has 2."""
    assert run("--idea", "--effect -0.1", "--gate")[:2] == (0, "helps\n")
    status, out, err = run("--idea", "--effect 0.1", "--gate")
    loop = "2 ideas judged, 1 accepted; on average at most 0.02 of those that do nothing are accepted."
    assert (status, out.splitlines()) == (1, ["hurts", loop])
    status, out, err = run("--idea", "--crash 1", "--gate")
    assert (status, out) == (2, "") and "the loss is not finite" in err
    (place / "o.json").mkdir()  # the answer comes before the error
    status, out, err = run("--idea", "--effect -0.02", "--gate", "--json", "o.json")
    assert (status, out.splitlines()[0]) == (2, "helps") and "error: " in err and "o.json" in err


def test_a_loop(place):
    """An idea that was judged before is answered from its kept runs. In the end, the first base is compared
    with what was accepted, with new seeds."""
    script = place / "train_gpt.py"
    old = script.read_text()
    better = old.replace("effect: float = 0.0", "effect: float = -0.01")
    worse = better.replace("-0.01", "0.5")
    (place / "better.patch").write_text(patch_of("train_gpt.py", old, better))
    (place / "worse.patch").write_text(patch_of("train_gpt.py", old, worse))
    for patch, table, expected in [
        ("better", "l.tsv", (0, "helps")),
        ("worse", "l.tsv", (1, "hurts")),
        ("better", "l.tsv", (0, "helps")),
        ("better", "other.tsv", (0, "helps")),
    ]:
        status, out, err = run("--idea", f"{patch}.patch", "--gate", "--ledger", table)
        assert (status, out.split()[0]) == expected
    with open("other.tsv", newline="") as other, open("l.tsv", newline="") as file:
        (answered,) = csv.DictReader(other, delimiter="\t")
        first, second = csv.DictReader(file, delimiter="\t")
    assert [answered[name] for name in ("idea", "loss")] == [first[name] for name in ("idea", "loss")]
    assert (first["verdict"], second["verdict"]) == ("helps", "hurts")
    assert float(first["low"]) < float(first["loss"]) < float(first["high"]) < 0
    assert (first["text"], first["idea"] != second["idea"]) == ("better.patch", True)
    # Judged by another metric, and once more with fewer runs; as spreadsheets save it
    rows = [first, second, first | {"metric": "größer"}, first | {"verdict": "undecided"}]
    text = "\r\n".join(map("\t".join, [first, *(row.values() for row in rows), [""]]))
    for encoding in ("utf-16", "utf-8-sig", "cp1252"):
        (place / "l.tsv").write_bytes(text.encode(encoding))
        (said,) = ledger.loop_in_words(ledger.read_ledger(place / "l.tsv"))
        assert said.startswith("3 ideas judged, 2 accepted;")
    script.write_text(better)
    git(place, "commit", "-qam", "better")
    found, words = answer("--confirm", "--ledger", "l.tsv")
    assert words.startswith("worktree helps.") and "3 ideas judged, 2 accepted" in words
    assert found["base"] == first["commit"]
    options = ["--base", ". --noise 0.003", "--idea", "--effect 0.5"]
    assert run(*options, "--gate", "--ledger", "options.tsv")[0] == 1
    message = "doesn't begin with a base that is a commit"
    check_refused(compare.main, ["--confirm", "--ledger", "options.tsv"], message)
    (place / "l.tsv").write_text("date\n1\n")
    check_refused(compare.main, ["--idea", "--effect 0.3", "--ledger", "l.tsv"], "it isn't a ledger")


def test_a_full_disk(place, monkeypatch):
    """The ledger is tried before any run. If the disk is full later, the answer is printed first."""
    works = [False]

    def write(file, data):
        if not (works and works.pop()):
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(ledger, "write_file", write)
    check_refused(compare.main, ["--idea", "--effect 0.1"], "No space left on device: ")
    assert not list(place.glob("logs/compare/runs"))
    works += [True]
    status, out, err = run("--idea", "--effect -0.1", "--gate")
    assert (status, out) == (2, "helps\n") and "No space left on device" in err


# -----------------------------------------------------------------------------
# Kept runs


def test_only_what_is_missing_is_made_again(place):
    """A damaged log, and two of the runs for the slope."""
    arguments = ["--idea", "--effect 0.1", "--jobs", "1"]
    first, words = answer(*arguments)
    runs = first["runs"]
    damaged = Path(runs["effect_0.1"][1]["path"])
    damaged.write_bytes(damaged.read_bytes()[:-100])
    for run in runs["worktree with 125 steps"][2:]:
        Path(run["path"]).unlink()
    again, words = answer(*arguments)
    assert (again["runs_made"], again["ideas"]) == (3, first["ideas"])


# -----------------------------------------------------------------------------
# Sources


def test_sources_are_frozen(place):
    """Without --idea, the working tree is compared with the last commit: the recipe, and what it imports. An
    edit during the comparison changes nothing. PYTHONPATH names another package `recipes`, which nothing
    imports."""
    script = place / "train_gpt.py"
    edit = (
        f'\nif "--print_settings" not in sys.argv:\n    open({str(script)!r}, "a").write("broken(")\n'
    )
    source = script.read_text().replace("return 1.5 + ", "return 1.7 + ") + edit
    script.write_text(source)  # a run of the script edits it; its check doesn't
    assert os.environ["PYTHONPATH"] == str(ROOT)
    found, words = answer("--command", RECIPE, "--runs", "3")
    assert script.read_text().endswith("broken(")
    assert (found["base"], found["ideas"][0]["name"]) == ("HEAD", "worktree")
    assert found["ideas"][0]["difference"]["value"] == pytest.approx(0.2, abs=0.005)
    assert {parse_log(r["path"]).source for r in found["runs"]["worktree"]} == {source.encode()}


def test_a_zip_without_git(place, monkeypatch):
    """Options can be compared."""
    shutil.rmtree(place / ".git")
    (place / "bin").mkdir()
    (place / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (place / "bin/python").chmod(0o755)
    (place / "bin/bash").symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", str(place / "bin"))
    found, words = answer("--idea", "--effect 0.1")
    assert found["ideas"][0]["verdict"] == "hurts"


def test_what_can_be_compared(place):
    """Options, a patch, an idea's folder, a file, a revision, the working tree, each with options too. The
    first three change the base, so they keep its options."""
    source = STANDIN.read_text()
    patched = source.replace("noise: float = 0.002", "noise: float = 0.003")
    patch = patch_of("train_gpt.py", source, patched)
    (place / "p.patch").write_text(patch)
    (place / "ideas" / "noisy").mkdir(parents=True)
    (place / "ideas" / "noisy" / "idea.patch").write_text(patch)
    (place / "my script.py").write_text("text")
    (place / "train_gpt.py").write_text("now")
    project = Settings(
        root=place, command="python -m train_gpt {options}", scratch="logs", no_seed=True
    )
    tree = compare_sources.first_variant([], project)
    base = replace(
        compare_sources.read_variant("v1", tree, []), options=["--noise", "1", "--takes", "0"]
    )

    def source_of(variant):
        return (variant.folder / variant.script()).read_text()

    for what, name, expected, options in [
        ("--effect 0.1 --slower=2", "effect_0.1_slower_2", source, ["--effect", "0.1", "--slower=2"]),
        ("p.patch --effect 1", "p_effect_1", patched, ["--effect", "1"]),
        ("ideas/noisy", "noisy", patched, []),
        ("'my script.py'", "my_script", "text", []),
        ("v1~0", "v1_0", source, []),
        (".", "worktree", "now", []),
        ("x=--effect=1", "x", source, ["--effect=1"]),
        ("toy=v1:recipes/toy.py", "toy", TOY, []),
    ]:
        variant = compare_sources.read_variant(what, base, ["--noise", "1"])
        kept = ["--takes", "0"] if re.match("--|.*patch|ideas|x=--", what) else []
        assert (variant.name, variant.options) == (name, ["--noise", "1", *kept, *options])
        assert source_of(variant) == expected, what
    assert source_of(base) == source  # copies of the folder are changed, not the folder


def test_jobs_share_the_cores(place, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    for module in (compare_runs, start):
        monkeypatch.setattr(module, "usable_cores", lambda: 7)
    for keys, *expected in [
        (dict(jobs=3), 3, 2),
        (dict(job_per_core=True), 7, 1),
        (dict(job_per_core=True, jobs=1), 1, 7),
        (dict(), 1, 0),  # the script's own choice
        (dict(launcher="srun", job_per_core=True, jobs=4), 4, 0),
    ]:
        pool = compare_runs.open_pool([], Settings(command="x", root=place, **keys), 1)
        assert [len(pool.slots), pool.facts["threads"]] == expected


# -----------------------------------------------------------------------------
# With train_gpt.py itself


@pytest.mark.slow
def test_train_gpt(place, monkeypatch):
    """The script itself, with a tiny model."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copy(ROOT / "train_gpt.py", place / "train_gpt.py")
    options = tiny_run(place / "data" / "tiny", num_iterations=8, warmup_steps=0)
    options += ["--train_files=data/tiny/*train*", "--val_files=data/tiny/*val*"]

    found, words = answer("--idea", "--muon_lr 0", *options, "--runs", "2")
    (idea,) = found["ideas"]
    assert idea["difference"]["value"] > 0


# -----------------------------------------------------------------------------
# Trouble


BAD = [
    (["--idea", "--effect 0.0"], "effect_0.0 has the same source and settings as worktree"),
    (["--idea", "no.patch"], "no.patch doesn't apply (patch failed: train_gpt.py:1)"),
    (["--idea", "broken.py"], "broken: SyntaxError"),
    (["--idea", "wide=--width 3"], "wide: unrecognized arguments: --width 3"),
    (["--idea", "--effect 1", "--num_iterations", "900"], "worktree with 1125 steps: too few data"),
    (
        ["--idea", "x=--val_tokens 256"],
        "x: --val_tokens is 256, but 512 in the base; losses can only be compared on the same",
    ),
    (["--idea", "--effect", "1"], "unexpected argument: 1. Say what to compare"),
    (["--idea", "--effect '1"], "No closing quotation"),
    (["--idea", "--seed 4"], "seed_4 has the same source and settings as worktree"),
    (["--idea", "--effect 1", "--until", "0"], "0: must be a percentage of at most 50%"),
]


def test_bad_input_is_one_line_before_any_run(place):
    patch = patch_of("train_gpt.py", "never there\n", "x\n")
    (place / "no.patch").write_text(patch)
    (place / "broken.py").write_text("open('was run', 'w')\nprint_settings = (\n")
    for arguments, message in BAD:
        check_refused(compare.main, arguments, message)
        assert not list(place.glob(".judge/runs"))
        assert not (place / "was run").exists()


def test_a_run_that_fails(place):
    """Its last lines are shown, finished runs are kept, and the failed one isn't."""
    status, out, err = run("--idea", "bad=--crash 1", "--runs", "3", "--no_times", "--jobs", "1")
    assert (status, out) == (2, "")
    assert "step 7: the loss is not finite" in err
    assert "error: a run failed: bad, seed 1 (exit status 1)" in err
    kept = [path.name for path in place.glob(".judge/runs/*/seed*")]
    assert sorted(kept) == ["seed0.txt", "seed0.txt", "seed1.txt"]
    compile_error = "torch._dynamo.exc.TorchRuntimeError: no such kernel\n\nfrom user code:\n"
    (place / "console").write_text("Traceback ...\n" + compile_error + "  File ...\n" * 20)
    shown = start.last_lines(place / "console").splitlines()
    assert shown[0] == compile_error.splitlines()[0]
    assert shown[1:] == ["  File ..."] * 12
    (place / "short.py").write_text(STANDIN.read_text().replace("step:{n}/{n}", "step:{n - 1}/{n}"))
    status, out, err = run("--base", "v1", "--idea", "short.py", "--runs", "2")
    assert status == 2 and "its log is incomplete" in err


def test_a_number_of_steps_with_a_dash():
    """As argparse spells it. The judge writes it as the command does."""
    command = "train --num-iterations=10 {options}"
    base = compare_sources.Variant("x", Path(), command, [], Settings(), Path())
    more = compare_sources.with_steps(base, 1.25, [])
    assert (more.options, more.num_iterations()) == (["--num-iterations=12"], 12)


def test_a_second_comparison_waits_for_the_first(place, monkeypatch):
    """It leaves the files of one on another machine alone; without locks, also those of one on this machine."""
    settings = Settings(root=place)
    mine, other = [place / ".judge" / "working" / name for name in (f"{platform.node()}-1", "other-1")]
    mine.mkdir(parents=True)
    other.mkdir()
    with open(place / ".judge" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_refused(
            compare.main, ["--idea", "--effect 0.1"], "another comparison or screen is running"
        )
    with compare_runs.locked_folder(settings):
        assert list(other.parent.iterdir()) == [other]  # the lock is free, so mine was killed
    mine.mkdir()
    monkeypatch.delattr(fcntl, "LOCK_NB")
    monkeypatch.setattr(fcntl, "LOCK_NB", 1 << 20, raising=False)  # an error of flock
    with compare_runs.locked_folder(settings):
        settings.working().mkdir()
    assert sorted(other.parent.iterdir()) == sorted([mine, other])


def start_on_a_terminal(place, *options) -> tuple[subprocess.Popen, int]:
    """Returns the process of compare, and the terminal's file descriptor."""
    shutil.copytree(ROOT / "judge", place / "judge")
    command = [sys.executable, "-m", "judge", "compare", *options]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    streams = dict(stdout=subprocess.PIPE, stderr=theirs)
    child = subprocess.Popen(command, cwd=place, start_new_session=True, **streams)
    os.close(theirs)
    return child, ours


def read_terminal(ours: int, pattern: str) -> str:
    """Reads until the pattern is shown."""
    shown = ""
    deadline = time.monotonic() + 300
    while not re.search(pattern, shown):
        assert time.monotonic() < deadline, shown
        shown += os.read(ours, 4096).decode()
    return shown


def test_interrupted_on_a_terminal(place):
    """One line that updates. Ctrl-C prints the answer so far, ends the runs, and frees the folder."""
    options = ["--idea", "--effect -0.0004", "--takes", "0.2", "--until", "0.5%"]
    child, ours = start_on_a_terminal(place, *options)
    # The loss stands there from the second pair on: before, it is too early for an answer
    shown = read_terminal(ours, r"effect_0.0004: \d+ of about \d+ pairs, loss .*left")
    child.send_signal(signal.SIGINT)
    out = " ".join(child.communicate(timeout=60)[0].decode().split())
    os.close(ours)
    assert child.returncode == 130
    assert "undecided" in out and "Interrupted; run the same command again to continue" in out
    assert "\n" not in shown and all(len(line) <= 79 for line in shown.split("\r"))
    with open(place / ".judge/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a run that went on would hold it
    assert not list(place.glob(".judge/working/*"))


def test_a_closed_terminal(place):
    """SIGHUP, twice as from a shell, ends the runs and frees the folder, also while step times are measured."""
    child, ours = start_on_a_terminal(
        place, "--idea", "--effect -0.1", "--times", "--runs", "2", "--slower", "2"
    )
    read_terminal(ours, "0 of 6 runs")
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGHUP)
    os.close(ours)
    assert child.wait(60) != 0
    with open(place / ".judge/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a run that went on would hold it


def test_nohup(monkeypatch):
    """It ignores SIGHUP, and compare goes on."""
    handlers = {}
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    stop_on_signals()
    assert set(handlers) == {signal.SIGTERM}
