"""The screen: its design against direct definitions, its fit against numpy and scipy, and the command on a
stand-in whose effects are known."""

import contextlib
import fcntl
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from tools.compare import runs as compare_runs
from tools.compare import sources as compare_sources
from tools.common import run_command
from tools.logs import parse_log
from tools.screen import screen
from tools.screen import design as screen_design
from tools.compare.stats import Slope, measure_slope
from tools.screen.design import (
    Contrast,
    add_steps,
    fit,
    interval_half_width,
    make_design,
    pairs_of_group,
)
from test_compare import git, patch_of
from tests.util import ROOT

STANDIN = ROOT / "tests" / "tools" / "compare" / "standin.py"

# -----------------------------------------------------------------------------
# Design


@pytest.mark.parametrize("factors", range(5, 17))
def test_design(factors):
    """All configurations differ, factors are orthogonal, and no pair of factors looks like a factor."""
    design = make_design(factors)
    assert design.shape == (32, factors)
    assert set(design.flat) == {-1, 1}
    assert len({tuple(row) for row in design}) == 32
    assert (design.sum(axis=0) == 0).all()
    assert (design.T @ design == 32 * np.eye(factors)).all()
    for i, j in itertools.combinations(range(factors), 2):
        assert not (design.T @ (design[:, i] * design[:, j])).any()


@pytest.mark.parametrize("factors", [5, 9, 16])
def test_groups_of_pairs(factors):
    """Pairs have the same product in the design exactly if they are in the same group."""
    design = make_design(factors)
    columns = screen_design.group_columns()
    found = []
    for group in range(1, 16):
        for i, j in pairs_of_group(group, factors):
            assert (design[:, i] * design[:, j] == columns[:, group - 1]).all()
            found.append((i, j))
    assert sorted(found) == list(itertools.combinations(range(factors), 2))
    assert len({tuple(column) for column in columns.T}) == 15


@pytest.mark.parametrize("factors", [9, 16])
def test_separating_order(factors):
    """In the new order, the pairs of the group have different products."""
    design = make_design(factors)
    for group in range(1, 16):
        order = screen_design.separating_order(group, factors)
        assert sorted(order) == list(range(factors))
        pairs = pairs_of_group(group, factors)
        place = {factor: column for column, factor in enumerate(order)}
        products = {tuple(design[:, place[i]] * design[:, place[j]]) for i, j in pairs}
        assert len(products) == len(pairs)


# -----------------------------------------------------------------------------
# Fit


@pytest.mark.parametrize("factors", [5, 16])
def test_fit_is_least_squares(factors):
    """Against numpy's solution for a matrix with a column for each block, factor and group."""
    rng = np.random.default_rng(factors)
    losses = rng.normal(1.5, 0.004, (3, 32)) + np.array([[0.01], [0], [-0.02]])
    design = make_design(factors)
    losses += 0.002 * design[:, 1] + 0.003 * design[:, 0] * design[:, 1]
    blocks = np.repeat(np.eye(3), 32, axis=0)
    columns = np.hstack([design, screen_design.group_columns()])
    # Columns of the Hadamard matrix that no factor uses are noise to neither model
    unused = np.setdiff1d(range(16), screen_design.COLUMNS[:factors])
    spare = screen_design.hadamard(16)[:, unused]
    columns = np.hstack([columns, np.concatenate([spare, -spare])])
    matrix = np.hstack([blocks, np.tile(columns, (3, 1))])
    solution, residual, rank, _ = np.linalg.lstsq(matrix, losses.ravel(), rcond=None)
    fitted = fit(losses, factors)
    expected = 2 * solution[3:]  # coefficients of -1 and +1
    assert [c.difference for c in fitted.factors] == pytest.approx(expected[:factors])
    assert [c.difference for c in fitted.groups] == pytest.approx(expected[factors : factors + 15])
    assert fitted.sd == pytest.approx(math.sqrt(residual[0] / (96 - rank)))


@pytest.mark.parametrize("blocks, contrasts", [(2, 16), (4, 5), (6, 15)])
def test_interval_is_where_the_bayes_factor_is_the_limit(blocks, contrasts):
    """The density of Student's t averaged over effects of N(0, sd^2 / 8), over its density without one."""
    freedom = 31 * (blocks - 1)
    weight = 8 * blocks

    def bayes_factor(t):
        def integrand(effect):
            prior = stats.norm.pdf(effect, 0, 8**-0.5)
            return stats.nct.pdf(t, freedom, effect * math.sqrt(weight)) * prior

        top, _ = integrate.quad(integrand, -3, 3, limit=200)
        return top / stats.t.pdf(t, freedom)

    t = optimize.brentq(lambda t: math.log(bayes_factor(t) * 0.01 / contrasts), 1, 8)
    half = interval_half_width(0.004, freedom, 32 * blocks, contrasts)
    assert half == pytest.approx(0.004 * t / math.sqrt(weight), rel=1e-3)


def test_false_positives_when_looking_after_every_block():
    """4,000 screens in which no factor does anything, with looks after each of 40 blocks."""
    rng = np.random.default_rng(0)
    wrong = 0
    screens = 4000
    design = make_design(16)
    for trial in range(screens):
        losses = rng.normal(0, 1, (40, 32))
        count = np.arange(1, 41)
        sums = np.cumsum(losses, axis=0)
        effects = sums @ design / 16 / count[:, None]
        centered = losses - losses.mean(axis=1, keepdims=True)
        squares = np.cumsum((centered**2).sum(axis=1))
        means = np.cumsum(centered, axis=0) / count[:, None]
        squares -= count * (means**2).sum(axis=1)
        if trial < 3:  # these sums are those of fit
            for n in (2, 3, 40):
                fitted = fit(losses[:n], 16)
                assert fitted.factors[3].difference == pytest.approx(effects[n - 1, 3])
                assert fitted.sd**2 == pytest.approx(squares[n - 1] / (31 * (n - 1)))
        for n in range(2, 41):
            sd = math.sqrt(squares[n - 1] / (31 * (n - 1)))
            if abs(effects[n - 1]).max() > interval_half_width(sd, 31 * (n - 1), 32 * n, 16):
                wrong += 1
                break
    upper = stats.binomtest(wrong, screens).proportion_ci(0.99).high
    assert upper < 0.015


def test_steps_from_two_blocks():
    """With two blocks, losses already convert into steps, and the 99% intervals hold the truth."""
    rng = np.random.default_rng(1)
    design = make_design(5)
    trials = 2000
    worth = 0.14 * math.log1p(0.03)  # what 3% of the steps is worth
    longer = 0.14 * math.log(1.25)
    slope_held = 0
    steps_held = 0
    for _ in range(trials):
        level = rng.normal(1.5, 0.003, (2, 1))  # of a seed
        losses = rng.normal(level + worth / 2 * design[:, 0], 0.004)
        fewer = rng.normal(level[:, 0] + longer, 0.004)
        more = rng.normal(level[:, 0] - longer, 0.004)
        fitted = fit(losses, 5)
        width = 2 * math.log(1.25)
        slope = measure_slope(list(fewer), list(more), width, fitted.sd, fitted.freedom)
        if abs(slope.value + 0.14) <= abs(slope.value) * slope.half_width():
            slope_held += 1
        add_steps(fitted.factors[0], slope)
        low, high = fitted.factors[0].steps_interval
        if low <= 0.03 <= high:
            steps_held += 1
    fewest = stats.binom.ppf(0.001, trials, 0.99)
    most = stats.binom.ppf(0.999, trials, 0.99)
    assert fewest <= slope_held <= most
    assert steps_held >= fewest  # this interval is wider, because you may look after every block


def contrast_of(difference, half_width) -> Contrast:
    contrast = Contrast(difference, half_width)
    add_steps(contrast, Slope(-0.14, 0.01, 20, 19))
    return contrast


@pytest.mark.parametrize(
    "difference, half_width, switch, setting",
    [
        (-0.003, 0.001, "helps", "high is better"),
        (0.003, 0.001, "hurts", "low is better"),
        (0.0002, 0.0008, "not worth it", "no difference"),
        (0.001, 0.0015, "not worth it", "undecided"),
        (-0.001, 0.0015, "undecided", "undecided"),
        (-0.001, math.inf, "undecided", "undecided"),
    ],
)
def test_verdict(difference, half_width, switch, setting):
    contrast = contrast_of(difference, half_width)
    assert screen_design.verdict(contrast, 0.01, is_switch=True) == switch
    assert screen_design.verdict(contrast, 0.01, is_switch=False) == setting


# -----------------------------------------------------------------------------
# The command

NAMES = "abcde"
EFFECTS = {"a": -0.03, "b": 0.02, "c": 0.0, "d": 0.0, "e": 0.0}


def definition(**changes) -> str:
    """Five factors, which add what they say to the loss. `changes`: other lines for a factor."""
    lines = ['options = "--num_iterations 20"', "seed = 7"]
    for name in NAMES:
        default = f'low = "--{name} 0.001"\nhigh = "--{name} {EFFECTS[name] + 0.001}"'
        if EFFECTS[name] == 0:
            default = f'high = "--{name} 1e-9"'
        lines += ["[[factor]]", f'name = "{name}"', changes.get(name, default)]
    return "\n".join(lines)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a stand-in that has an option for each factor; d and e act together."""
    source = STANDIN.read_text()
    fields = "".join(f"    {name}: float = 0.0\n" for name in NAMES)
    together = "+ (0.05 if hp.d > 0 and hp.e > 0 else 0)"
    total = "+".join(f"hp.{name}" for name in NAMES)
    for old, new in [
        ("    effect: float = 0.0 ", fields + "    effect: float = 0.0 "),
        ("(hp.seed, hp.num_iterations,", f"(hp.seed, {total}, hp.c, hp.d, hp.e, hp.num_iterations,"),
        ("hp.effect - 0.123", f"hp.effect + {total} {together} - 0.123"),
    ]:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "train_gpt.py").write_text(source)
    (tmp_path / ".gitignore").write_text("logs/\n")
    git(tmp_path, "init", "-q")
    (tmp_path / "screens" / "first").mkdir(parents=True)
    (tmp_path / "screens" / "first" / "screen.toml").write_text(definition())
    monkeypatch.setattr(compare_sources, "ROOT", tmp_path)
    monkeypatch.setattr(compare_runs, "FOLDER", tmp_path / "logs" / "compare")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments) -> tuple[int, str, str]:
    """Runs screen.py in this process on the first definition. Returns exit status, output and errors."""
    out = io.StringIO()
    err = io.StringIO()
    words = ["screen.py", "screens/first/screen.toml", *map(str, arguments)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as end:
                run_command(screen.main)
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return end.value.code, out.getvalue(), err.getvalue()


def blocks(place) -> list[Path]:
    return sorted((place / "screens" / "first").glob("seed*.json"))


def test_screen(place):
    """Known effects, kept blocks, the answer in words, as JSON and as a picture."""
    status, out, err = run()
    assert (status, out) == (0, "first: no block is finished yet.\n")
    status, out, err = run("--blocks", 2)
    assert status == 0, err
    assert "2 blocks to make: 68 runs" in err
    assert len(blocks(place)) == 2
    status, out, err = run("--blocks", 3, "--json", "o.json", "--plot", "o.png")
    assert status == 0
    assert "1 block to make: 34 runs" in err
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "3 blocks of 32 runs, seeds 7, 8, 9" in out
    (answer,) = json.loads((place / "o.json").read_text())
    factors = {factor["name"]: factor for factor in answer["factors"]}
    for name, effect in EFFECTS.items():
        both = 0.025 if name in "de" else 0  # the effect of one is averaged over the other
        difference = factors[name]["difference"]
        assert abs(difference - effect - both) < factors[name]["half_width"], name
    assert "Warning" not in out
    assert factors["a"]["verdict"] == "high is better"
    assert factors["b"]["verdict"] == "low is better"
    assert factors["d"]["verdict"] == "hurts"
    low, high = factors["a"]["steps_interval"]
    assert low < math.expm1(-0.03 / 0.123) < high
    assert answer["sd"] == pytest.approx(0.001, rel=0.4)
    (group,) = [group for group in answer["groups"] if group["found"]]
    assert group["pairs"] == [["d", "e"]]
    assert group["difference"] == pytest.approx(0.025, abs=0.002)
    assert "Two factors interact: d x e. The effect is +0.0" in out
    # a: -0.014 on average over low and high, b: 0.011, d and e: 0.05 in a quarter of the configurations
    assert answer["mean_loss"] - answer["base_loss"] == pytest.approx(0.0095, abs=0.002)
    assert "mean loss" not in out  # ideas that are off or on have no middle
    assert (place / "o.png").read_bytes()[:4] == b"\x89PNG"


def test_blocks(place):
    """The losses of a block are those of its runs, and each run has the settings of its configuration."""
    assert run("--blocks", 1)[0] == 0
    (path,) = blocks(place)
    block = json.loads(path.read_text())
    assert block["seed"] == 7
    assert block["dtype"] in ("bfloat16", "float32")
    kept = [parse_log(p) for p in (place / "logs/compare/runs").glob("*/seed7.txt")]
    losses = sorted(log.final.val_loss for log in kept)
    assert losses == sorted([*block["losses"], block["fewer"], block["more"]])
    by_settings = {}
    for log in kept:
        values = tuple(log.hyperparameters[name] for name in NAMES)
        by_settings[values] = log.final.val_loss
    for row, loss in zip(make_design(5), block["losses"]):
        values = [EFFECTS[name] + 0.001 if side > 0 else 0.001 for name, side in zip("ab", row)]
        values += [1e-9 if side > 0 else 0.0 for side in row[2:]]
        assert by_settings[tuple(values)] == loss
    # Runs are kept, too, so a lost block costs nothing
    path.unlink()
    status, out, err = run("--blocks", 1)
    assert status == 0
    assert "1 block to make: 0 runs" in err
    assert blocks(place) == [path]


def test_blocks_that_do_not_belong_together(place):
    assert run("--blocks", 2)[0] == 0
    path = blocks(place)[0]
    block = json.loads(path.read_text())
    block["dtype"] = "float16"
    path.write_text(json.dumps(block))
    out = run()[1]
    assert "1 block of 32 runs, seed 8" in out
    assert f"1 block of 32 runs, seed 7, {block['dtype']}" in out
    block["factors"][0]["high"] = "--a 0.5"
    block["digest"] = "of this other screen"
    path.write_text(json.dumps(block))
    assert "seed 7" not in run()[1]
    with open(place / "train_gpt.py", "a") as file:
        file.write("# changed\n")
    assert "made with another source or other settings than today's" in " ".join(run()[1].split())
    path.write_text("{")
    status, out, err = run()
    assert status == 2
    assert err.startswith("error: ")
    assert "this block is damaged; delete the file" in err


def test_blocks_of_factors_with_other_names(place):
    """A factor may get another name, or its options another spelling: the runs are the same, so their
    blocks count and are shown. A factor with another value needs other blocks."""
    file = place / "screens/first/screen.toml"
    assert run("--blocks", 2)[0] == 0
    text = file.read_text().replace('name = "a"', 'name = "alpha"').replace('"--b 0.001"', '"--b=0.001"')
    file.write_text(text)
    status, out, err = run("--blocks", 2, "--json", "o.json")
    assert status == 0
    assert "0 blocks to make: 0 runs" in err
    assert "2 blocks of 32 runs, seeds 7, 8" in out
    (answer,) = json.loads((place / "o.json").read_text())
    assert [factor["name"] for factor in answer["factors"]] == ["alpha", *"bcde"]
    file.write_text(text.replace("--a 0.001", "--a 0.002"))
    status, out, err = run("--json", "new.json", "--plot", "new.png")
    assert status == 0
    assert out == "first: no block is finished yet.\nIts folder has 2 blocks of another definition.\n"
    assert err.splitlines() == [f"{name}: not written, because there is no block" for name in ("new.json", "new.png")]


def test_a_failing_configuration(place):
    """It is named, and finished runs are kept. So the next command makes only the others."""
    (place / "screens/first/screen.toml").write_text(definition(c='high = "--crash 7 --num_iterations 30"'))
    status, out, err = run("--blocks", 1)
    assert status == 1
    assert "a run failed: configuration" in err
    assert re.search(r"high: (\w, )*c[,)]", err)
    assert not blocks(place)
    kept = len(list((place / "logs/compare/runs").glob("*/seed7.txt")))
    assert run("--blocks", 1)[0] == 1
    assert len(list((place / "logs/compare/runs").glob("*/seed7.txt"))) >= kept


def test_a_killed_run(place):
    note = place / "note"
    options = f'"--kill 8 --note {note} --num_iterations 20"'
    text = definition().replace('"--num_iterations 20"', options)
    (place / "screens/first/screen.toml").write_text(text)
    status, out, err = run("--blocks", 2)
    assert status == 0, err
    assert note.exists()
    assert len(blocks(place)) == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("options =", "Invalid value"),
        ("seeds = 3\n" + definition(), "unknown key seeds; the keys are commit"),
        (definition().replace("seed = 7", 'seed = "7"'), "seed must be a whole number"),
        ('options = ""\n[[factor]]\nname = "a"\nhigh = "--a 1"', "1 factors; a screen has 5 to 16"),
        (definition().replace('name = "b"', 'name = "a"'), "there are two factors a"),
        (definition(b='high = "--a 3"'), "--a is set by a and by b"),
        (definition(b='high = "--seed 3"'), "screen sets this option for each run"),
        (definition(b='high = "--nothing 3"'), "b, high: unrecognized arguments"),
        (definition(b='high = "--b 0"'), "b: the default and high have the same settings"),
        (definition(b='low = "--b 0"'), 'b: set high = "OPTIONS" or patch = "FILE"'),
        (definition(b='high = "--b 1'), "Illegal character"),
        (definition(b="high = \"--b '1\""), "No closing quotation"),
        (definition(b='patch = "none.patch"'), "there is no file none.patch"),
        (definition().replace("seed = 7", 'seed = 7\nuntil = "x"'), "must be a percentage"),
        ('script = "gone.py"\n' + definition(), "there is no file gone.py"),
        ('switches = "gone.patch"\n' + definition(), "there is no file gone.patch in the repository"),
    ],
)
def test_bad_definition(place, text, message):
    (place / "screens/first/screen.toml").write_text(text)
    status, out, err = run("--blocks", 1)
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (place / "logs/compare/runs").exists()


def test_a_commit(place):
    """The script can be that of a commit, so that a screen goes on although the file changes."""
    git(place, "add", "train_gpt.py")
    git(place, "commit", "-qm", "one")
    git(place, "tag", "v1")
    (place / "screens/first/screen.toml").write_text('commit = "v1"\n' + definition())
    assert run("--blocks", 1)[0] == 0
    with open(place / "train_gpt.py", "a") as file:
        file.write("# changed\n")
    status, out, err = run("--blocks", 1)
    assert status == 0
    assert "0 blocks to make" in err
    assert "another source" not in out
    for line, message in [
        ('commit = "v9"', "screen.toml: no file or commit is called v9"),
        ('commit = "v1"\nscript = "gone.py"', "gone.py"),
    ]:
        (place / "screens/first/screen.toml").write_text(f"{line}\n{definition()}")
        status, out, err = run()
        assert (status, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_bad_arguments(place):
    for arguments, message in [
        (["--blocks", "0"], "must be at least 1"),
        (["--blocks", "x"], "x: must be a whole number"),
        (["--until", "0%"], "must be a percentage"),
        (["--blocks", "1", "--until", "abc"], "abc: must be a percentage"),
        (["--json", "no/folder.json"], "its folder doesn't exist"),
    ]:
        status, out, err = run(*arguments)
        assert status == 2
        assert message in err
        assert len(err.splitlines()) == 1
    assert not (place / "logs").exists()


def test_a_configuration_that_is_the_base_with_more_steps(place):
    """Both have the same run, which is made once."""
    text = definition(
        a='high = "--a 0.001"', b='high = "--b 0.002"', c='high = "--num_iterations 25"'
    )
    (place / "screens/first/screen.toml").write_text(text)
    status, out, err = run("--blocks", 1)
    assert status == 0, err
    assert "1 block to make: 33 runs" in err
    (path,) = blocks(place)
    block = json.loads(path.read_text())
    assert block["more"] in block["losses"]


def test_too_few_data(place):
    """The script is asked before the first run. The base's runs with more steps have 25."""
    script = place / "train_gpt.py"
    lines = [
        "def check_inputs(args, hp):",
        "    if hp.num_iterations > 20:",
        '        raise InputError(f"too few data for {hp.num_iterations} steps")',
    ]
    old = "def final_loss(hp):\n"
    assert script.read_text().count(old) == 1
    script.write_text(script.read_text().replace(old, "\n".join(lines) + f"\n\n\n{old}"))
    status, out, err = run("--blocks", 1)
    assert status == 2
    assert err == "error: the base with 25 steps: too few data for 25 steps\n"
    assert not (place / "logs/compare/runs").exists()


def test_lines_of_progress_are_short(place, capsys):
    found = screen.Session(
        screen=screen.read_screen(place / "screens/first/screen.toml", place / "logs"),
        setup=None,
        dtype="float32",
        jobs=1,
        started=screen.time.monotonic() - 60_000,
        made=1000,
        to_make=1088,
    )
    found.screen.folder = place / "a-screen-with-a-long-name"
    screen.show_progress(found, [1000, 1001])
    line = capsys.readouterr().err
    assert re.match(r"a-screen-with-a-l~: seeds 1000 to 1001, 1000 of 1088 runs, 88 min left ", line)
    assert line.endswith(")\n") and len(line) <= 80


@pytest.mark.parametrize("path", sorted(ROOT.glob("records/mini/screens/*/screen.toml")), ids=lambda path: path.parent.name)
def test_definitions_of_the_repository(path, tmp_path, monkeypatch):
    """Scripts accept the options of all configurations, and finished blocks are of these."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = screen.read_screen(path, tmp_path)
    assert len({variant.digest() for variant in found.configurations}) == 32
    assert {block.digest for block in screen.read_blocks(found)} == {found.digest()}


@pytest.mark.parametrize(
    "command, status",
    [
        (["tools.screen.screen", "records/mini/screens/ideas-1-half/screen.toml"], 1),
        (["tools.compare.compare", "--list"], 1),
        (["tools.compare.compare", "--list", "--gate"], 2),  # for the gate, 1 would mean an answer
    ],
)
def test_output_into_a_closed_pipe(command, status):
    """`| head` may stop reading early. That is no error of a file, so nothing is printed about one."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # so that print itself fails, not the last flush
    read, write = os.pipe()
    os.close(read)
    tool = [sys.executable, "-m", *command]
    ended = subprocess.run(tool, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (status, "")


def test_two_screens_at_once(place):
    compare_runs.FOLDER.mkdir(parents=True)
    with open(compare_runs.FOLDER / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, out, err = run("--blocks", 1)
    assert status == 2
    assert "another comparison or screen is running" in err


def test_settings_around_the_base(place):
    """All factors are settings: the answer compares the base with the mean of all configurations."""
    settings = {name: f'low = "--{name} 0.01"\nhigh = "--{name} 0.02"' for name in NAMES}
    (place / "screens/first/screen.toml").write_text(definition(**settings))
    status, out, err = run("--blocks", 1, "--json", "o.json")
    assert status == 0, err
    (answer,) = json.loads((place / "o.json").read_text())
    # five factors at 0.015 on average, and 0.05 as both d and e are positive
    assert answer["mean_loss"] - answer["base_loss"] == pytest.approx(0.125, abs=0.003)
    words = " ".join(out.split())
    mean = f"The mean loss of all configurations is {answer['mean_loss']:.4f}. That of the base is about "
    assert f"{mean}{answer['base_loss']:.4f}, estimated from its runs" in words
    assert "Loss: high minus low." in words


def test_configurations_that_hardly_learn(place):
    """A warning names them, and what they have in common. Here the loss is higher by 2 if both a and b
    are high, in 8 of 32 configurations."""
    script = place / "train_gpt.py"
    text = script.read_text()
    old = "hp.effect + "
    assert text.count(old) == 1
    script.write_text(text.replace(old, "hp.effect + (2 if hp.a < 0 and hp.b > 0.01 else 0) + "))
    status, out, err = run("--blocks", 1)
    assert status == 0, err
    words = " ".join(out.split())
    assert "Warning: 8 configurations of 32 ended far above the median loss of " in words
    far = re.search(r"may dominate the table: (.*?\))\. All", words)[1]
    numbers = [int(number) for number in re.findall(r"(\d+) \(", far)]
    design = make_design(5)
    assert numbers == np.flatnonzero((design[:, 0] > 0) & (design[:, 1] > 0)).tolist()
    assert f"All of them have a {EFFECTS['a'] + 0.001}, b 0.021. Consider" in words
    assert max(len(line) for line in out.splitlines()) <= 80


def test_patches(place):
    """A factor can be a patch. Patches that don't apply together are refused."""
    source = (place / "train_gpt.py").read_text()
    old = "    return 1.5 + "
    patch = patch_of("train_gpt.py", source, source.replace(old, "    return 0.04 + 1.5 + "))
    (place / "c.patch").write_text(patch)
    (place / "d.patch").write_text(patch.replace("0.04", "0.05"))
    text = definition(c='patch = "c.patch"')
    (place / "screens/first/screen.toml").write_text(text)
    status, out, err = run("--blocks", 2, "--json", "o.json")
    assert status == 0, err
    (answer,) = json.loads((place / "o.json").read_text())
    (factor,) = [factor for factor in answer["factors"] if factor["name"] == "c"]
    assert factor["difference"] == pytest.approx(0.04, abs=0.002)
    assert factor["verdict"] == "hurts"
    text = definition(c='patch = "c.patch"', d='patch = "d.patch"')
    (place / "screens/first/screen.toml").write_text(text)
    status, out, err = run("--blocks", 2)
    assert status == 2
    assert "c.patch, d.patch: the patch doesn't apply" in err
    assert "combine the patches by hand" in err
    assert len(err.splitlines()) == 1


def test_switches(place):
    """They change the script of the commit, or of the working tree."""
    source = (place / "train_gpt.py").read_text()
    old = "    return 1.5 + "
    assert source.count(old) == 1
    expected = source.replace(old, "    return 0.04 + 1.5 + ")
    (place / "switches.patch").write_text(patch_of("train_gpt.py", source, expected))
    text = 'switches = "switches.patch"\n' + definition()
    file = place / "screens/first/screen.toml"
    file.write_text(text)
    found = screen.read_screen(file, place / "logs" / "a")
    assert {variant.source() for variant in found.variants()} == {expected.encode()}
    git(place, "add", "-A")
    git(place, "commit", "-qm", "first")
    (place / "train_gpt.py").write_text(source.replace(old, "    return 2.5 + "))
    status, out, err = run()
    assert status == 2
    assert "screen.toml: switches: switches.patch: the patch doesn't apply" in err
    assert 'set commit = "COMMIT"' in err
    assert len(err.splitlines()) == 1
    file.write_text('commit = "HEAD"\n' + text)
    assert screen.read_screen(file, place / "logs" / "b").base.source() == expected.encode()
