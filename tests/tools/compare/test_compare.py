"""The command `compare`, with a stand-in for train_gpt.py (standin.py) whose losses and times are known."""

import contextlib
import difflib
import errno
import fcntl
import hashlib
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

from tools.compare import compare
from tools.compare import answer as compare_answer
from tools.compare import plan as compare_plan
from tools.compare import runs as compare_runs
from tools.compare import sources as compare_sources
from tools.compare import stats as compare_stats
from tools.compare import steps as compare_steps
from tools.common import FileError, UsageError, run_command
from tools.logs import parse_log
from tools.screen import screen
from tests.util import ROOT, random_tokens, write_shard

STANDIN = Path(__file__).resolve().parent / "standin.py"
# A recipe that imports train_gpt.py
TOY = """
import sys
import train_gpt
from train_gpt import DEVICE

EFFECT = 0.0


def parse_arguments(argv):
    return train_gpt.parse_arguments(argv)


def check_hyperparameters(hp, world_size):
    train_gpt.check_hyperparameters(hp, world_size)


if __name__ == "__main__":
    final_loss = train_gpt.final_loss
    train_gpt.final_loss = lambda hp: EFFECT + final_loss(hp)
    train_gpt.main(sys.argv[1:])
"""


def run(*arguments) -> tuple[int, str, str]:
    """Runs compare.py in this process. Returns exit status, output and errors."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
            with pytest.raises(SystemExit) as end:
                run_command(compare.main)
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return end.value.code, out.getvalue(), err.getvalue()


def git(folder, *words):
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A git repository with the stand-in as train_gpt.py and with a recipe, which were committed as v1. v0
    doesn't have them."""
    (tmp_path / "train_gpt.py").write_bytes(STANDIN.read_bytes())
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "toy.py").write_text(TOY)
    (tmp_path / "other.txt").write_text("text\n")
    (tmp_path / ".gitignore").write_text("logs/\ndata/*/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "-qm", "zero")
    git(tmp_path, "tag", "v0")
    git(tmp_path, "add", "train_gpt.py", "recipes")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "tag", "v1")
    monkeypatch.setattr(compare_sources, "ROOT", tmp_path)
    monkeypatch.setattr(compare_runs, "FOLDER", tmp_path / "logs" / "compare")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(place, *arguments) -> dict:
    """The JSON of a comparison of losses that ends well."""
    status, out, err = run(*arguments, "--no_times", "--json", "answer.json")
    assert status == 0, err
    return json.loads((place / "answer.json").read_text())


def patch_of(name: str, old: str, new: str) -> str:
    """What diff -u prints for a file of that name."""
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))


def write_idea(folder: Path, patch: str, **description) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "idea.patch").write_text(patch)
    (folder / "idea.json").write_text(json.dumps(description))
    return folder


# -----------------------------------------------------------------------------
# Answers


def test_an_idea_that_helps(place):
    """The whole answer, in twelve lines of 80 columns, with JSON and a plot."""
    arguments = ["--idea", "better=--effect -0.004", "--json", "o.json", "--plot", "o.png"]
    status, out, err = run(*arguments)
    assert status == 0, err
    assert out.startswith("better helps. It needs ")
    lines = out.splitlines()
    assert len(lines) <= 12 and max(map(len, lines)) <= 80
    found = json.loads((place / "o.json").read_text())
    (idea,) = found["ideas"]
    assert idea["verdict"] == "helps" and idea["n"] >= 12
    low, high = idea["steps_interval"]
    assert low < math.expm1(-0.004 / 0.123) < high
    low, high = idea["step_time_interval"]
    assert low < 1 < high
    assert re.search(rf"^  loss +{re.escape(format(idea['difference'], '+.4f'))}  ", out, re.MULTILINE)
    assert (place / "o.png").read_bytes()[:4] == b"\x89PNG"
    # The figures are those of the logs, at the same seeds
    runs = found["runs"]
    losses = {name: {r["seed"]: r["val_loss"] for r in group} for name, group in runs.items()}
    seeds = range(idea["n"])
    differences = [losses["better"][seed] - losses["worktree"][seed] for seed in seeds]
    assert idea["difference"] == pytest.approx(np.mean(differences))
    for name, group in runs.items():
        for r in group:
            log = parse_log(r["path"])
            assert not log.incomplete and log.final.val_loss == r["val_loss"]
            assert log.hyperparameters["seed"] == r["seed"], name
    assert {parse_log(group[0]["path"]).num_steps for group in runs.values()} == {80, 100, 125}


def test_an_idea_that_hurts(place):
    (idea,) = answer(place, "--idea", "--effect 0.02", "--until", "1%")["ideas"]
    assert idea["verdict"] in ("hurts", "not worth it")
    assert idea["steps"] > 0.1
    status, out, err = run("--idea", "--effect 0.02", "--runs", "16", "--no_times")
    assert status == 0 and "effect_0.02 hurts. It needs 1" in out and "more steps" in out


def test_an_idea_that_does_nothing(place):
    """Not worth what was asked for, and nothing is said of less."""
    status, out, err = run("--idea", "nothing=--slower 1.1", "--until", "3%", "--no_times")
    assert status == 0 and "nothing is not worth it: it saves less than 3% of the steps." in out


def test_undecided(place):
    status, out, err = run("--idea", "--effect -0.001", "--runs", "3", "--no_times")
    assert status == 0 and "undecided" in out and out.count("(no interval before 12 pairs)") == 2
    assert "3 pairs of runs, p = " in out and "inf" not in out
    assert "warning: too few to say helps or hurts; use --runs 12 or more" in err
    status, out, err = run("--idea", "a=--effect 0.3", "--idea", "b=--effect 0.4", "--runs", "3", "--no_times")
    assert status == 0 and "With 2 ideas, there is no interval before 13 pairs." in " ".join(out.split())
    assert "use --runs 13 or more" in err
    status, out, err = run("--idea", "a=--effect 0.3", "--idea", "b=--effect 0.4", "--runs", "13", "--no_times")
    assert status == 0 and out.count("hurts") == 4 and "no interval" not in out
    assert "warning" not in err


@pytest.mark.parametrize("ideas", [1, 2, 3, 8, 20])
def test_fewest_pairs(ideas):
    """The first finite interval."""
    half = compare_stats.half_widths(np.arange(40.0) % 2, compare_stats.P_VALUE / ideas)
    assert compare_stats.fewest_pairs(ideas) == 1 + np.flatnonzero(np.isfinite(half))[0]


def test_many_ideas(place):
    """Each gets its verdict; more runs go to those that are undecided; intervals are for all together."""
    found = answer(
        place, "--idea", "good=--effect -0.02", "--idea", "small=--effect -0.0018", "--plot", "o.png"
    )
    good, small = found["ideas"]
    assert (good["name"], good["verdict"]) == ("good", "helps")
    assert small["verdict"] == "helps" and small["n"] > good["n"]
    assert len(found["runs"]["small"]) > len(found["runs"]["good"])
    losses = {name: [run["val_loss"] for run in group] for name, group in found["runs"].items()}
    alone = compare_stats.analyse(
        "good", losses["good"][: good["n"]], losses["worktree"][: good["n"]], None, None, ideas=2
    )
    assert good["difference_interval"] == pytest.approx(alone.difference_interval)
    status, out, err = run("--idea", "good=--effect -0.02", "--idea", "small=--effect -0.0018", "--no_times")
    assert status == 0 and "all 2 ideas together" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_an_interrupted_comparison_of_two_ideas():
    """The intervals are for both ideas, although one has no pairs yet. The answer names that one."""
    losses = [1.50, 1.51, 1.49]
    effect = compare_stats.analyse("first", losses, [1.52, 1.50, 1.51], None, None, ideas=2)
    lines = compare_answer.answer_for_many([effect], ["first", "second"], 0.02, [])
    text = " ".join(" ".join(lines).split())
    assert "99% confidence for all 2 ideas together" in text
    assert "second: too early for an answer; an idea needs two pairs of runs." in text
    assert "first: too early" not in text


def test_a_slower_idea(place):
    """It helps, but its steps take three times as long: the answer says so."""
    status, out, err = run("--idea", "slow=--effect -0.004 --slower 3", "--json", "o.json")
    assert status == 0 and "slow helps" in out
    assert "But its steps are slower, so the same loss takes more time." in out
    (idea,) = json.loads((place / "o.json").read_text())["ideas"]
    low, high = idea["step_time_interval"]
    assert 1.5 < idea["step_time"] < 4  # the stand-in's sleeps are longer than asked for
    assert low < 3 and high > 1.5
    assert (place / "logs/compare/times").exists()


LIMIT = """
def check_inputs(args, hp):
    if hp.num_iterations > 400:
        raise InputError(f"{hp.num_iterations} steps: there are data for 400")


"""


def test_steps_that_cannot_be_timed(place):
    """The answer is about losses only, and says so."""
    source = STANDIN.read_text()
    old = "def run(hp, log_dir):\n"
    assert source.count(old) == 1
    limit = "    if hp.num_iterations > 130:\n        sys.exit('too few data')\n"
    (place / "train_gpt.py").write_text(source.replace(old, old + limit))
    status, out, err = run("--idea", "better=--effect -0.01")
    assert status == 0 and out.startswith("better helps.") and "time of a step" not in out
    words = " ".join(out.split())
    assert "The steps of better could not be timed; the error is above this answer." in words
    assert "too few data" in err and "--no_times skips this measurement" in err


@pytest.mark.parametrize("more", [[], ["--gate"]])
def test_the_answer_comes_before_a_file_that_cannot_be_written(place, monkeypatch, more):
    def write(path, data):
        raise FileError(f"cannot write {path}: no space left on device")

    monkeypatch.setattr(compare, "write_file", write)
    status, out, err = run("--idea", "--effect -0.01", "--no_times", "--json", "o.json", *more)
    assert status == 2 and "helps" in out
    assert "error: cannot write o.json: no space left on device" in err


def test_other_steps_are_no_gain(place):
    """An idea that trains fewer steps: the loss is worth what it is, and the answer names the steps."""
    found = answer(place, "--idea", "--num_iterations 90")
    (idea,) = found["ideas"]
    low, high = idea["steps_interval"]
    assert low < 100 / 90 - 1 < high and idea["own_steps"] == 0.9
    status, out, err = run("--idea", "--num_iterations 90", "--no_times")
    assert "trains 90 steps, the base 100" in " ".join(out.split())


@pytest.mark.parametrize("steps, other", [(80, 125), (125, 80)])
def test_an_idea_with_the_steps_of_the_slope(place, steps, other):
    """The idea is the base with fewer or with more steps. Both have the same runs, each made once."""
    found = answer(place, "--idea", f"--num_iterations {steps}", "--jobs", "4", "--runs", "8")
    assert set(found["runs"]) == {"worktree", f"num_iterations_{steps}", f"worktree with {other} steps"}
    assert found["runs_made"] == 8 + 8 + compare_stats.FEWEST_SLOPES
    assert found["slope"]["n"] == compare_stats.FEWEST_SLOPES


def test_identical_losses(place):
    """One line, and no test."""
    source = STANDIN.read_text().replace('hp.slower, os.environ["OMP_NUM_THREADS"]', '"x"')
    (place / "train_gpt.py").write_text(source)
    status, out, err = run("--idea", "same=--slower 1.2")
    assert (status, out) == (0, "same: the losses are identical in all 8 pairs.\n")
    assert "identical so far" in err and "decided" not in err


# -----------------------------------------------------------------------------
# The gate


@pytest.mark.parametrize(
    "idea, status, verdict",
    [("--effect -0.01", 0, "helps"), ("--effect 0.05", 1, "hurts"), ("--x 1", 2, None)],
)
def test_gate(place, idea, status, verdict):
    found, out, err = run("--idea", idea, "--gate")
    assert found == status
    if verdict:
        assert (out, err) == (f"{verdict}\n", "")
    else:
        assert out == "" and len(err.splitlines()) == 1


def test_gate_with_a_run_that_fails(place):
    status, out, err = run("--idea", "--crash 1", "--gate")
    assert (status, out) == (2, "") and "the loss is not finite" in err


# -----------------------------------------------------------------------------
# Kept runs


def test_going_on(place):
    """The same command again makes no runs; with a smaller goal, it goes on."""
    first = answer(place, "--idea", "--effect -0.003")
    again = answer(place, "--idea", "--effect -0.003")
    assert first["runs_made"] > 0 and again["runs_made"] == 0
    assert first["ideas"] == again["ideas"]
    more = answer(place, "--idea", "--effect -0.003", "--runs", "40")
    assert len(more["runs"]["effect_0.003"]) == 40
    assert 0 < more["runs_made"] < 80


def test_the_base_is_kept_for_other_ideas(place, monkeypatch):
    """Its runs are used again where everything is the same that losses depend on."""

    def base_runs(*arguments) -> int:
        """How many runs of the base were made, with its other steps."""
        before = set(place.glob("logs/compare/runs/*/seed*.txt"))
        answer(place, *arguments, "--runs", "4")
        made = set(place.glob("logs/compare/runs/*/seed*.txt")) - before
        effects = [parse_log(path).hyperparameters["effect"] for path in made]
        return effects.count(0.0)

    whole = base_runs("--idea", "--effect 0.1")
    assert whole == 4 + 2 * compare_stats.FEWEST_SLOPES
    assert base_runs("--idea", "--effect 0.2") == 0
    assert base_runs("--idea", "--effect 0.2", "--seed", "2") == 2 + 2 * 2  # seeds 4 and 5
    assert base_runs("--idea", "--effect 0.2", "--takes", "0.001") == whole
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert base_runs("--idea", "--effect 0.2") == whole
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CXX", "another-compiler")
    assert base_runs("--idea", "--effect 0.2") == whole
    monkeypatch.delenv("CXX")
    (place / "data").mkdir()
    (place / "data" / "x").mkdir()
    (place / "data" / "x" / "train.bin").write_bytes(b"tokens")
    assert base_runs("--idea", "--effect 0.2") == whole
    (place / "data" / "x" / "train.bin").write_bytes(b"others")
    assert base_runs("--idea", "--effect 0.2") == whole
    monkeypatch.setattr(compare_runs.importlib.metadata, "version", lambda name: "9.9")
    assert base_runs("--idea", "--effect 0.2") == whole
    (place / "train_gpt.py").write_bytes(STANDIN.read_bytes() + b"\n")
    assert base_runs("--idea", "--effect 0.2") == whole


def facts_of(train_files, val_files):
    settings = {"train_files": str(train_files), "val_files": str(val_files)}
    return compare_runs.data_facts([compare_sources.Variant("x", Path.cwd(), "", [], settings)])


def test_data_with_absolute_names_count(place):
    """Their files are hashed. Relative names are those in the repository."""
    (place / "a.bin").write_bytes(b"tokens")
    (place / "b.bin").write_bytes(b"tokens")
    before = facts_of(place / "a*.bin", "b.bin")
    assert set(before) == {str(place / "a.bin"), "b.bin"}
    (place / "a.bin").write_bytes(b"others")
    after = facts_of(place / "a*.bin", "b.bin")
    assert after != before and after["b.bin"] == before["b.bin"]


def test_data_that_are_not_there(place, small):
    status, out, err = run("--idea", "--muon_lr 0.03", *small, "--val_files", "")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "worktree: --val_files: no file matches ''; your own data must lie in" in err
    assert not list(place.glob("logs/compare/runs"))
    for pattern in ("no*.bin", "/no/x.bin"):
        with pytest.raises(UsageError, match="x: --train_files: no file matches"):
            facts_of(pattern, "val.bin")


def test_a_damaged_log_is_made_again(place):
    first = answer(place, "--idea", "--effect 0.1", "--runs", "3")
    path = Path(first["runs"]["effect_0.1"][1]["path"])
    path.write_bytes(path.read_bytes()[:-100])
    again = answer(place, "--idea", "--effect 0.1", "--runs", "3")
    assert (again["runs_made"], again["ideas"]) == (1, first["ideas"])


def test_compiled_and_uncompiled_runs_are_not_mixed(place, monkeypatch):
    answer(place, "--idea", "--effect 0.01", "--runs", "2")
    monkeypatch.setenv("STANDIN_COMPILED", "no (no C++ compiler was found)")
    status, out, err = run("--idea", "--effect 0.01", "--runs", "3", "--no_times")
    assert status == 2 and out == ""
    line = err.splitlines()[-1]
    assert line.startswith("error: these runs can't be compared: ") and "seed 2" in line
    assert line.endswith(", and run the same command again")
    names = re.search(r"the compiled runs \((.*)\) or of the others \((.*)\)", line)
    for name in names[1].split():
        shutil.rmtree(place / "logs" / "compare" / "runs" / name)
    status, out, err = run("--idea", "--effect 0.01", "--runs", "3", "--no_times")
    assert status == 0 and "The runs were not compiled" in " ".join(out.split())
    run("--clear")
    status, out, err = run("--idea", "--effect 0.01", "--runs", "3", "--no_times")
    assert status == 0 and "The runs were not compiled" in " ".join(out.split())


# -----------------------------------------------------------------------------
# Sources


def test_sources_are_frozen(place):
    """An edit during the comparison changes nothing, in the script or in what it imports."""
    script = place / "train_gpt.py"
    source = script.read_text()
    edit = f'\nif len(sys.argv) > 4:\n    open({str(script)!r}, "a").write("broken(")\n'
    script.write_text(source + edit)  # a run of the script edits it; its check doesn't
    found = answer(place, "--recipe", "toy", "--idea", "--effect 0.1", "--runs", "3")
    assert script.read_text().endswith("broken(")
    for group in found["runs"].values():
        for r in group:
            assert parse_log(r["path"]).source == (source + edit).encode()


def test_what_can_be_compared(place):
    """Options, a patch, a file, a revision, the working tree, each with options too."""
    script = place / "train_gpt.py"
    source = STANDIN.read_text()
    patched = source.replace("noise: float = 0.002", "noise: float = 0.003")
    (place / "p.patch").write_text(patch_of("train_gpt.py", source, patched))
    text = source.replace("num_iterations: int = 100", "num_iterations: int = 200")
    (place / "my script.py").write_text(text)
    script.write_text(text.replace("200", "300"))
    git(place, "checkout", "-q", "-b", "feature")
    scratch = place / "logs" / "scratch"
    compare_sources.copy_tree(scratch)
    base = compare_sources.Variant("base", compare_sources.copy_commit("v1", scratch), "train_gpt.py", [])
    for what, name, expected, options in [
        ("--effect 0.1 --slower=2", "effect_0.1_slower_2", source, ["--effect", "0.1", "--slower=2"]),
        ("p.patch", "p", patched, []),
        ("new=p.patch --effect 1", "new", patched, ["--effect", "1"]),
        ("'my script.py'", "my_script", text, []),
        ("v1", "v1", source, []),
        ("feature~0 --effect 1", "feature_0_effect_1", source, ["--effect", "1"]),
        (".", "worktree", script.read_text(), []),
        ("", "worktree", script.read_text(), []),
        ("x=", "x", script.read_text(), []),
        ("x=--effect=1", "x", source, ["--effect=1"]),
    ]:
        variant = compare_sources.read_variant(what, base, ["--noise", "1"])
        assert (variant.name, variant.options) == (name, ["--noise", "1", *options])
        assert (variant.script, variant.source().decode()) == ("train_gpt.py", expected), what
    assert base.source().decode() == source  # copies of the folder are changed, not the folder
    for what in ("recipes/toy.py", "v1:recipes/toy.py"):
        variant = compare_sources.read_variant(what, base, [])
        assert (variant.script, variant.source().decode()) == ("recipes/toy.py", TOY)


def test_an_idea_over_two_files(place):
    """Its effect is that of both changes."""
    source = STANDIN.read_text()
    patch = patch_of("train_gpt.py", source, source.replace("return 1.5 + ", "return 1.52 + "))
    patch += patch_of("recipes/toy.py", TOY, TOY.replace("EFFECT = 0.0", "EFFECT = 0.3"))
    (place / "both.patch").write_text(patch)
    (idea,) = answer(place, "--recipe", "toy", "--idea", "both.patch", "--runs", "3")["ideas"]
    assert idea["difference"] == pytest.approx(0.32, abs=0.005)


def test_edits_of_a_recipe(place):
    """Without --idea, the working tree is compared with the last commit: the recipe, and what it imports."""
    script = place / "train_gpt.py"
    script.write_text(script.read_text().replace("return 1.5 + ", "return 1.7 + "))
    found = answer(place, "--recipe", "toy", "--runs", "3")
    assert found["ideas"][0]["difference"] == pytest.approx(0.2, abs=0.005)
    found = answer(place, "--base", "HEAD:recipes/toy.py", "--idea", "v1:train_gpt.py --effect 0.3", "--runs", "3")
    assert found["ideas"][0]["difference"] == pytest.approx(0.3, abs=0.005)


def test_the_code_that_a_run_depends_on(tmp_path):
    """The script, and what it imports from its folder, also in a function and through another file."""

    def changes(name):
        before = compare_sources.hash_code(tmp_path, "recipes/a.py")
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"# changed\n")
        return compare_sources.hash_code(tmp_path, "recipes/a.py") != before

    (tmp_path / "recipes").mkdir()
    (tmp_path / "package" / "inner").mkdir(parents=True)
    files = {
        "recipes/a.py": "import json, package.inner.module\ndef f():\n    from b import x\n",
        "b.py": "from recipes.c import *\nimport recipes.a\n",
        "recipes/c.py": "from . import d\n",
        "recipes/d.py": "",
        "package/__init__.py": "",
        "package/inner/module.py": "",
        "package/other.py": "",
        "recipes/b.py": "",
        "e.py": "import b\n",
        "json.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert [name for name in files if changes(name)] == list(files)[:6]
    alone = compare_sources.hash_code(tmp_path, "recipes/d.py")
    assert alone == [hashlib.sha256(b"# changed\n").hexdigest()]


def test_data_of_a_commit(place):
    """Git ignores the data, so the copy of a commit links them."""
    (place / "data" / "own").mkdir(parents=True)
    (place / "data" / "own" / "train.bin").write_bytes(b"tokens")
    folder = compare_sources.copy_commit("v1", place / "logs" / "scratch")
    assert (folder / "data" / "own" / "train.bin").read_bytes() == b"tokens"


def sources_of(found: dict, name: str) -> set[str]:
    """The sources of the runs with this name."""
    return {parse_log(run["path"]).source.decode() for run in found["runs"][name]}


def test_an_idea_of_a_commit(place):
    """The idea's folder names the base, whatever the working tree is. --base overrides it."""
    source = STANDIN.read_text()
    changed = source.replace("effect: float = 0.0 ", "effect: float = 0.03 ")
    patch = patch_of("train_gpt.py", source, changed)
    folder = write_idea(place / "ideas" / "worse-0.03", patch, commit="v1", options="--slower 1.1")
    now = source.replace("jitter: float = 0.0 ", "jitter: float = 0.1 ")
    (place / "train_gpt.py").write_text(now)
    found = answer(place, "--idea", "ideas/worse-0.03", "--runs", "2")
    assert (found["base"], found["ideas"][0]["name"]) == ("v1", "worse-0.03")
    assert sources_of(found, "v1") == {source} and sources_of(found, "worse-0.03") == {changed}
    assert parse_log(found["runs"]["worse-0.03"][0]["path"]).hyperparameters["slower"] == 1.1
    out = run("--idea", f"bad={folder}/ --effect 1", "--runs", "2", "--no_times")[1]
    assert out.startswith("bad") and "The base is v1." in " ".join(out.split())
    patched_now = now.replace("effect: float = 0.0 ", "effect: float = 0.03 ")
    found = answer(place, "--idea", "ideas/worse-0.03", "--base", ".", "--runs", "2")
    assert found["base"] == "worktree" and sources_of(found, "worse-0.03") == {patched_now}
    write_idea(folder, patch)  # without a commit, it is for the working tree
    found = answer(place, "--idea", "ideas/worse-0.03", "--runs", "2")
    assert found["base"] == "worktree" and sources_of(found, "worse-0.03") == {patched_now}


def test_the_working_tree_against_the_last_commit(place):
    script = place / "train_gpt.py"
    script.write_text(script.read_text().replace("effect: float = 0.0 ", "effect: float = 0.03 "))
    found = answer(place, "--until", "5%")
    assert (found["base"], found["ideas"][0]["name"]) == ("HEAD", "worktree")
    assert found["ideas"][0]["difference"] == pytest.approx(0.03, abs=0.002)


def test_a_script_of_another_make(place):
    """A script that can't be asked for its settings is asked for its --help."""
    text = STANDIN.read_text().replace("parse_arguments", "read_options")
    (place / "other.py").write_text(text.replace("InputError(message)", "SystemExit(message)"))
    arguments = ["--base", "other.py", "--idea", "other.py --effect 0.1", "--num_iterations", "50"]
    found = answer(place, *arguments, "--runs", "3")
    assert found["ideas"][0]["difference"] == pytest.approx(0.1, abs=0.005)
    assert "other with 40 steps" in found["runs"]
    status, out, err = run("--base", "other.py", "--idea", "other.py --effect 0.1")
    assert status == 2 and "give --num_iterations" in err and len(err.splitlines()) == 1


def test_several_processes(place, monkeypatch):
    """--nproc_per_node starts torchrun, here one that only says how it was called."""
    package = place / "path" / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "run.py").write_text(
        "import runpy, sys\n"
        "assert sys.argv[1:3] == ['--standalone', '--nproc_per_node=2']\n"
        "print('through torchrun')\n"
        "assert sys.argv[3] == '-m'\n"
        "sys.argv = sys.argv[4:]\n"
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(place / "path"))
    status, out, err = run("--idea", "--effect 0.1", "--nproc_per_node", "2", "--runs", "12")
    assert status == 0 and "hurts" in out and "time of a step" in out  # from the runs' own times
    status, out, err = run("--idea", "--crash 0", "--nproc_per_node", "2", "--runs", "2")
    assert status == 1 and "through torchrun" in err


def test_jobs_share_the_cores(place, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(compare, "usable_cores", lambda: 7)
    found = answer(place, "--idea", "--effect 0.1", "--jobs", "3", "--runs", "2")
    assert (found["jobs"], found["threads"]) == (3, 2)
    found = answer(place, "--idea", "--effect 0.1", "--runs", "2")
    assert (found["jobs"], found["threads"]) == (7, 1)


def test_slope_runs_under_way_are_not_made_twice(place):
    """The base has its runs with fewer steps; two of four with more steps are still missing."""
    found = answer(place, "--idea", "--effect 0.1", "--runs", "2")
    paths = {name: [run["path"] for run in group] for name, group in found["runs"].items()}
    for path in paths["worktree with 125 steps"][2:]:
        Path(path).unlink()
    again = answer(place, "--idea", "--effect 0.1", "--runs", "2")
    assert again["runs_made"] == 2
    assert len(again["runs"]["worktree with 80 steps"]) == compare_stats.FEWEST_SLOPES


# -----------------------------------------------------------------------------
# With train_gpt.py itself


@pytest.fixture
def small(place, monkeypatch):
    """Options that make train_gpt.py train a small model for 20 steps, in seconds."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copy(ROOT / "train_gpt.py", place / "train_gpt.py")
    write_shard(place / "train.bin", random_tokens(8000, seed=0))
    write_shard(place / "val.bin", random_tokens(600, seed=1))
    settings = {
        "track": "mini",
        "train_files": "train.bin",
        "val_files": "val.bin",
        "val_tokens": 512,
        "val_seq_len": 256,
        "batch_tokens": 256,
        "train_seq_len": 256,
        "num_iterations": 20,
        "warmup_steps": 0,
    }
    return [f"--{name}={value}" for name, value in settings.items()]


def test_too_few_data(place, small):
    """There are data for 31 steps. The base with more steps needs 35. The second idea takes 16 steps of
    twice the size."""
    status, out, err = run("--idea", "--muon_lr 0.03", *small, "--num_iterations", "28")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "worktree with 35 steps: train.bin has 31 batches of 256 tokens" in err
    status, out, err = run("--idea", "large=--batch_tokens 512", *small, "--num_iterations", "16")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "large: train.bin has 15 batches of 512 tokens" in err
    assert not list(place.glob("logs/compare/runs")) and not list(place.glob("logs/*.txt"))


# -----------------------------------------------------------------------------
# Trouble


BAD = {
    "an idea that is the base": (
        ["--idea", "--effect 0.0"],
        "effect_0.0 has the same source and settings as worktree",
    ),
    "no change since the commit": (
        [],
        "worktree has the same source and settings as HEAD, so there is nothing to compare; edit "
        "train_gpt.py, or pass an --idea",
    ),
    "twice the same idea": (
        ["--idea", "--effect 1", "--idea", "x=--effect 1.0"],
        "x has the same source and settings as effect_1",
    ),
    "only another validation": (
        ["--idea", "--val_loss_every 9"],
        "val_loss_every_9 has the same source and settings",
    ),
    "a patch that does not apply": (
        ["--idea", "no.patch"],
        "no.patch: the patch doesn't apply (patch failed: train_gpt.py:1)",
    ),
    "a patch of another file": (["--idea", "other.patch"], "other has the same source and settings as"),
    "a patch that is none": (["--idea", "empty.patch"], "doesn't apply (No valid patches"),
    "a patch that is not there": (["--idea", "gone.patch"], "gone.patch: no such file"),
    "a script that is not there": (["--idea", "x=gone.py"], "gone.py: no such file"),
    "a script with an error": (["--idea", "broken.py"], "broken: SyntaxError"),
    "a script without options": (["--idea", "plain.py"], "plain: this script has no option --log_dir"),
    "an unknown field": (["--idea", "wide=--width 3"], "wide: unrecognized arguments: --width 3"),
    "an unknown field for all": (["--idea", "--effect 1", "--width", "3"], "unrecognized arguments"),
    "a value that is none": (["--idea", "--effect much"], "invalid float value"),
    "a value out of range": (["--idea", "--num_iterations 0"], "must be more than zero"),
    "no such revision": (["--idea", "nowhere"], "no file or commit is called nowhere"),
    "no such recipe": (["--recipe", "gone"], "HEAD: there is no file recipes/gone.py"),
    "a revision without the file": (["--idea", "v0"], "train_gpt.py"),
    "a file that a revision lacks": (["--idea", "v0:gone.py"], "gone.py"),
    "quotes that do not close": (["--idea", "--effect '1"], "No closing quotation"),
    "a seed of its own": (["--idea", "--seed 4"], "--seed: compare sets this option"),
    "a folder of its own": (["--idea", "--effect 1", "--log_dir", "x"], "--log_dir: compare sets this"),
    "a source without --idea": (["v1"], "unexpected argument: v1. Say what to compare"),
    "an idea without its quotes": (
        ["--num_iterations", "9", "--idea", "--effect", "1"],
        "unexpected argument: 1. Say what to compare",
    ),
    "one run": (["--idea", "--effect 1", "--runs", "1"], "--runs must be 2 or more"),
    "runs that are no number": (["--idea", "--effect 1", "--runs", "many"], "many: must be a whole number"),
    "a goal that is none": (["--idea", "--effect 1", "--until", "0"], "between 0.1% and 50%"),
    "a goal in words": (["--idea", "--effect 1", "--until", "much"], "much: must be a percentage"),
    "no hours": (["--idea", "--effect 1", "--hours", "0"], "--hours must be more than zero"),
    "an idea left out": (["--idea"], "expected one argument"),
    "a gate of two": (["--gate", "--idea", "--effect 1", "--idea", "--effect 2"], "--gate judges one idea"),
    "a picture of another kind": (
        ["--idea", "--effect 1", "--plot", "x.pdf"],
        "x.pdf: the name must end in .png",
    ),
    "figures into a folder": (["--idea", "--effect 1", "--json", "."], ".: is a folder; give the name"),
    "a folder that is not there": (["--idea", "--effect 1", "--json", "nowhere/x.json"], "nowhere"),
    "steps that can't be changed": (["--idea", "--effect 1", "--num_iterations", "1"], "--num_iterations"),
    "jobs of several processes": (
        ["--idea", "--effect 1", "--jobs", "2", "--nproc_per_node", "2"],
        "only one run is made at a time; leave out --jobs",
    ),
    "an idea for a commit that is not there": (
        ["--idea", "ideas/lost"],
        f"no file or commit is called {'0' * 40}",
    ),
    "ideas for two commits": (
        ["--idea", "ideas/zero", "--idea", "ideas/one"],
        "these ideas were made for different commits; compare them one at a time, or give --base",
    ),
    "an idea whose commit has no script": (["--idea", "ideas/zero"], "train_gpt.py"),
    "an idea without a description": (["--idea", "ideas/bare"], "ideas/bare/idea.json: no such file"),
    "an idea with a damaged description": (["--idea", "ideas/damaged"], "idea.json: not JSON"),
}


def test_percent_signs_in_the_help():
    """Python formats some texts of the help with %, others not."""
    for parser in (compare.make_parser(), screen.make_parser()):
        text = parser.format_help()
        assert "[--until X%]" in text and "--until X% " in text
        assert "%%" not in text
    assert "a setting against the working tree" in compare.make_parser().format_help()


def test_bad_input_is_one_line_before_any_run(place):
    patch = patch_of("train_gpt.py", "never there\n", "x\n")
    (place / "no.patch").write_text(patch)
    (place / "other.patch").write_text(patch_of("other.txt", "text\n", "x\n"))
    (place / "empty.patch").write_text("")
    for name, commit in (("lost", "0" * 40), ("zero", "v0"), ("one", "v1")):
        write_idea(place / "ideas" / name, patch, commit=commit)
    (write_idea(place / "ideas" / "bare", "") / "idea.json").unlink()
    (write_idea(place / "ideas" / "damaged", "") / "idea.json").write_text("{")
    (place / "broken.py").write_text("\ndef parse_arguments(:\ndef check_hyperparameters(\n")
    (place / "plain.py").write_text("open('was run', 'w')\n")
    for what, (arguments, message) in BAD.items():
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and message in err and len(err.splitlines()) == 1, (what, err)
        assert not list(place.glob("logs/compare/runs")) and not (place / "was run").exists(), what


def test_a_run_that_fails(place):
    """Its last lines are shown, finished runs are kept, and the failed one isn't."""
    status, out, err = run("--idea", "bad=--crash 1", "--runs", "3", "--no_times")
    assert (status, out) == (1, "")
    assert "step 7: the loss is not finite" in err
    assert "error: a run failed: bad, seed 1 (exit status 1)" in err
    assert "console.txt" not in err  # it is deleted
    kept = [path for path in place.glob("logs/compare/runs/*/about.json") if '"bad"' in path.read_text()]
    assert [path.name for path in kept[0].parent.glob("seed*")] == ["seed0.txt"]
    (place / "short.py").write_text(STANDIN.read_text().replace("step:{n}/{n}", "step:{n - 1}/{n}"))
    status, out, err = run("--base", "v1", "--idea", "short.py", "--runs", "2")
    assert status == 1 and "its log is incomplete" in err


def test_a_killed_run_is_made_again(place):
    found = answer(place, "--idea", "x=--effect 0.1 --kill 2", "--note", str(place / "note"), "--runs", "4")
    assert (place / "note").exists()
    assert [run["seed"] for run in found["runs"]["x"]] == [0, 1, 2, 3]


def test_hours(place):
    """The limit ends the comparison with a valid answer."""
    arguments = ["--idea", "--effect -0.0002", "--until", "0.5%", "--hours", "0.001", "--takes", "0.1"]
    status, out, err = run(*arguments, "--no_times")
    assert status == 0 and "undecided" in out and "Stopped after --hours 0.001." in " ".join(out.split())


def test_a_folder_that_cannot_be_made(place):
    (place / "logs").write_text("in the way")
    status, out, err = run("--idea", "--effect 1")
    assert status == 1 and re.search("error: .*logs.*: not a directory", err)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "option, value, base",
    [("val_tokens", "256", "512"), ("val_seq_len", "128", "256"), ("val_files", "train.bin", "val.bin")],
)
def test_an_idea_with_another_validation_is_refused(place, small, option, value, base):
    """Losses on other tokens, or in shorter sequences, say nothing about the training."""
    small = [text for text in small if f"--{option}=" not in text]
    arguments = ["--base", f"--{option} {base}", "--idea", f"x=--{option} {value}", *small]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert f"error: x: --{option} is {value}, but {base} in the base" in err


def test_a_folder_that_is_no_repository(place, monkeypatch):
    """Git's own reason is shown: here, there is no repository. The second time, there is no git."""
    shutil.rmtree(place / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(place.parent))
    status, out, err = run()
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "error: not a git repository" in err
    monkeypatch.setenv("PATH", str(place))
    status, out, err = run()
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "git isn't installed; install it" in err


def test_what_is_not_written_is_said(place):
    arguments = ["--idea", "--effect 0.1", "--takes", "0.1", "--hours", "0.00001"]
    status, out, err = run(*arguments, "--plot", "o.png", "--json", "o.json")
    assert status == 0 and out.startswith("Too early for an answer")
    assert "o.json: not written, because there is no answer yet" in err
    assert "o.png: not drawn, because effects in steps aren't known yet" in err
    assert not (place / "o.json").exists() and not (place / "o.png").exists()


def test_the_slope_of_short_runs(place):
    """12 and 8 steps instead of 12.5 and 8: the slope is that of the steps that were trained."""
    arguments = ["--idea", "--effect 0.1", "--num_iterations", "10", "--noise", "0", "--own_noise", "0.00001"]
    status, out, err = run(*arguments, "--runs", "12", "--no_times")
    assert status == 0, err
    loss_of_a_percent = -0.123 * math.log(0.99)
    assert f"its loss rises by {loss_of_a_percent:.5f} (standard" in " ".join(out.split())


def test_a_file_system_without_locks(place, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(compare_runs.fcntl, "flock", no_locks)
    status, out, err = run("--idea", "--effect 0.1", "--runs", "3", "--no_times")
    assert status == 0 and out.startswith("effect_0.1")
    assert "can't be locked; don't run two comparisons there at once" in err


def test_a_second_comparison_waits_for_the_first(place):
    (place / "logs" / "compare").mkdir(parents=True)
    with open(place / "logs" / "compare" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out, err = run("--idea", "--effect 0.1")
    assert status == 2 and "another comparison or screen is running" in err and len(err.splitlines()) == 1


def read_terminal(ours: int, pattern: str, seconds: float) -> str:
    """Reads until the pattern is shown."""
    shown = ""
    deadline = time.monotonic() + seconds
    while not re.search(pattern, shown) and time.monotonic() < deadline:
        shown += os.read(ours, 4096).decode()
    return shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_warning_on_a_terminal(place):
    """It has a line of its own, which nothing replaces."""
    shown = Terminal()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(shown):
        assert compare.main(["--idea", "--effect 0.1", "--runs", "3", "--no_times"]) == 0
    warning, progress = shown.getvalue().split("\n")
    assert warning == "warning: too few to say helps or hurts; use --runs 12 or more"
    assert progress.startswith("\r3 pairs: ")


def test_lines_of_progress_are_short(place):
    """Also with a long name and many pairs. On a pipe, no line is cut."""
    answer(place, "--idea", "--effect 0.1", "--runs", "12")
    name = "a_long_name_that_somebody_gave_to_an_idea_of_sixty_letters"
    arguments = ["--idea", f"{name}=--effect -0.0002 --own_noise 0.004", "--until", "0.5%"]
    status, out, err = run(*arguments, "--hours", "0.0001", "--no_times")
    assert status == 0 and max(map(len, err.splitlines())) <= 80
    assert re.match(r"about \d+ pairs show a saving of 0.5%: \d+ runs to make in .*, \d+ kept\n", err)
    slope = compare_stats.Slope(-0.123, 0.05, 4, 3)
    losses = [1.51] * 8 + [1.5] * 8
    effect = compare_stats.analyse(name, losses, [1.505] * 16, slope, 0.001, ideas=1)
    assert effect.verdict == "undecided"
    for minutes in (0.1, 119, 1278):
        left = f"{compare_plan.duration(minutes)} left"
        line = compare_answer.progress([effect], 1412, left)
        assert len(line) < 80 and line.endswith(left) and ", steps " in line


def test_interrupted_on_a_terminal(place):
    """One line that updates. Ctrl-C prints the answer so far, ends the runs, and frees the folder."""
    shutil.copytree(ROOT / "tools", place / "tools")
    command = [sys.executable, "-m", "tools.compare.compare", "--idea", "--effect -0.003", "--takes", "0.2"]
    command += ["--until", "0.5%"]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    child = subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = read_terminal(ours, r"effect_0.003: 3 of about \d+ pairs, .*left", 60)
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal is gone with the process
        while more := os.read(ours, 4096):
            shown += more.decode()
    os.close(ours)
    out = child.stdout.read().decode()
    child.stdout.close()
    assert child.wait(60) == 130
    words = " ".join(out.split())
    assert "undecided" in words and "Interrupted; run the same command again to continue" in words
    assert "\n" not in shown and all(len(line) <= 80 for line in shown.split("\r"))
    with open(place / "logs/compare/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a run that went on would hold it
    assert not list(place.glob("logs/compare/working/*"))


@pytest.mark.parametrize("when", ["runs", "step times"])
def test_a_closed_terminal(place, when):
    """SIGHUP, twice as from a shell, ends the runs and frees the folder. While step times are measured, a
    run is stopped by SIGSTOP, so it would wait forever."""
    shutil.copytree(ROOT / "tools", place / "tools")
    command = [sys.executable, "-m", "tools.compare.compare", "--idea", "--effect 0.1", "--runs", "3"]
    if when == "runs":
        command += ["--takes", "0.3"]
        shown = r"\d of 3 pairs|\d runs? made"
    else:
        command += ["--slower", "5", "--num_iterations", "60"]
        shown = "of 30 rounds"
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        command, cwd=place, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    assert re.search(shown, read_terminal(ours, shown, 60))
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGHUP)
    os.close(ours)
    assert child.wait(60) != 0
    with open(place / "logs/compare/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a run that went on would hold it


def test_a_closed_terminal_under_nohup(place):
    """nohup ignores SIGHUP, and compare goes on."""
    shutil.copytree(ROOT / "tools", place / "tools")
    command = ["nohup", sys.executable, "-m", "tools.compare.compare", "--idea", "--effect 0.1", "--runs", "3"]
    command += ["--takes", "0.3", "--no_times"]
    child = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stderr:
        if "1 run" in line or "pairs" in line:
            break
    child.send_signal(signal.SIGHUP)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0 and out.startswith("effect_0.1"), err
