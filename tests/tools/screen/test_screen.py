"""The screen: its design against direct definitions, its fit against numpy and scipy, and the command on a
stand-in whose effects are known."""

import itertools
import json
import math
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from tests.tools.helpers import git, patch_of, run_main
from tests.util import ROOT
from tools.compare import runs as compare_runs
from tools.compare import sources as compare_sources
from tools.compare.stats import Slope, measure_slope
from tools.logs import parse_log
from tools.screen import answer, blocks, screen
from tools.screen import design as screen_design
from tools.screen.blocks import Block, Factor
from tools.screen.design import (
    Contrast,
    add_steps,
    fit,
    interval_half_width,
    make_design,
    pairs_of_group,
)

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
        product = design[:, i] * design[:, j]
        assert not (design.T @ product).any()


@pytest.mark.parametrize("factors", [5, 16])
def test_groups_of_pairs(factors):
    """Pairs have the same product in the design exactly if they are in the same group."""
    design = make_design(factors)
    columns = screen_design.group_columns()
    found = []
    for group in range(1, 16):
        for i, j in pairs_of_group(group, factors):
            product = design[:, i] * design[:, j]
            assert (product == columns[:, group - 1]).all()
            found.append((i, j))
    assert sorted(found) == list(itertools.combinations(range(factors), 2))
    assert len({tuple(column) for column in columns.T}) == 15


# -----------------------------------------------------------------------------
# Fit


@pytest.mark.parametrize("factors", [5, 16])
def test_fit_is_least_squares(factors):
    """Against numpy's solution for a matrix with a column for each block, factor and group."""
    rng = np.random.default_rng(factors)
    losses = rng.normal(1.5, 0.004, (3, 32))
    losses += np.array([[0.01], [0], [-0.02]])
    design = make_design(16)  # fewer factors have the first columns; the others aren't noise either
    losses += 0.002 * design[:, 1] + 0.003 * design[:, 0] * design[:, 1]
    blocks = np.repeat(np.eye(3), 32, axis=0)
    columns = np.hstack([design, screen_design.group_columns()])
    matrix = np.hstack([blocks, np.tile(columns, (3, 1))])
    solution, residual, rank, _ = np.linalg.lstsq(matrix, losses.ravel(), rcond=None)
    fitted = fit(losses, factors)
    expected = 2 * solution[3:]  # coefficients of -1 and +1
    assert [c.difference for c in fitted.factors] == pytest.approx(expected[:factors])
    assert [c.difference for c in fitted.groups] == pytest.approx(expected[16:])
    assert fitted.sd == pytest.approx(math.sqrt(residual[0] / (96 - rank)))
    # Factors are corrected for their number, groups for that of groups
    assert fitted.factors[0].half_width == interval_half_width(fitted.sd, 62, 96, factors)
    assert fitted.groups[0].half_width == interval_half_width(fitted.sd, 62, 96, 15)


@pytest.mark.parametrize(
    "blocks, contrasts",
    [
        (2, 16),
        (6, 5),
    ],
)
def test_interval_is_where_the_bayes_factor_is_the_limit(blocks, contrasts):
    """The density of Student's t averaged over effects of the prior, over its density without one."""
    freedom = 31 * (blocks - 1)
    weight = 8 * blocks

    def bayes_factor(t):
        def integrand(effect):
            priors = [0.6, 0.3, 0.1] @ stats.norm.pdf(effect, 0, np.sqrt([1 / 8, 4, 1000]))
            return stats.nct.pdf(t, freedom, effect * math.sqrt(weight)) * priors

        top, _ = integrate.quad(integrand, -3, 5, limit=200)
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
            half_width = interval_half_width(sd, 31 * (n - 1), 32 * n, 16)
            if abs(effects[n - 1]).max() > half_width:
                wrong += 1
                break
    upper = stats.binomtest(wrong, screens).proportion_ci(0.99).high
    assert upper < 0.015


def test_steps_from_two_blocks():
    """With two blocks, losses already convert into steps, and the 99% interval holds the truth."""
    rng = np.random.default_rng(1)
    design = make_design(5)
    trials = 2000
    worth = 0.14 * math.log1p(0.03)  # what 3% of the steps is worth
    longer = 0.14 * math.log(1.25)
    held = 0
    for _ in range(trials):
        level = rng.normal(1.5, 0.003, (2, 1))  # of a seed
        losses = rng.normal(level + worth / 2 * design[:, 0], 0.004)
        fewer = rng.normal(level[:, 0] + longer, 0.004)
        more = rng.normal(level[:, 0] - longer, 0.004)
        fitted = fit(losses, 5)
        width = 2 * math.log(1.25)
        slope = measure_slope(list(fewer), list(more), width, fitted.sd, fitted.freedom)
        add_steps(fitted.factors[0], slope)
        low, high = fitted.factors[0].steps_interval
        if low <= 0.03 <= high:
            held += 1
    assert held >= stats.binom.ppf(0.001, trials, 0.99)


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
# The answer


def result_of(losses, factors: list[Factor]) -> answer.Result:
    """Of one block with these 32 losses."""
    facts = {field.name: "" for field in fields(Block)}
    facts |= dict(seed=0, losses=list(losses), fewer=1.52, more=1.48, threads=1)
    block = Block(**facts)
    fitted = fit(np.array([losses]), len(factors))
    return answer.Result(factors, [block], fitted, slope=None, until=0.01)


SWITCHES = [Factor(name, high=f"--{name} 1") for name in "abcde"]
SETTINGS = [Factor(name, low=f"--{name} 0.01", high=f"--{name} 0.02 --more 1") for name in "abcde"]


def test_configurations_that_hardly_learn():
    """A warning names them, and what they have in common."""
    design = make_design(5)
    bad = (design[:, 0] > 0) & (design[:, 1] < 0)
    losses = np.linspace(1.49, 1.51, 32) + 2 * bad
    words = answer.warning_in_words(result_of(losses, SETTINGS))
    assert words.startswith("Warning: 8 configurations of 32 ended far above the median loss of 1.5")
    numbers = ", ".join(f"{number} ({losses[number]:.4f})" for number in np.flatnonzero(bad))
    shared = "All of them have a 0.02.., b 0.01. Consider a screen with smaller changes."
    assert words.endswith(f"may dominate the table: {numbers}. {shared}")
    assert answer.warning_in_words(result_of(losses - 2 * bad, SETTINGS)) == ""


def test_settings_around_the_base():
    """If all factors are settings, the answer compares the base with the mean of all configurations."""
    losses = np.linspace(1.6, 1.7, 32)
    words = answer.facts_in_words(result_of(losses, SETTINGS))
    mean = "The mean loss of all configurations is 1.6500. That of the base is about 1.5000, estimated from"
    assert "Loss: high minus low." in words
    assert mean in words
    words = answer.facts_in_words(result_of(losses, SWITCHES))
    assert "Loss: with the idea minus without it." in words
    assert "mean loss" not in words


# -----------------------------------------------------------------------------
# The command

# The stand-in of test_compare with an option for each factor. d and e act together.
SCRIPT = """
import dataclasses
import sys
import standin
from standin import DEVICE, InputError

OFFSET = 0.0
fields = [(name, float, 0.0) for name in "abcde"]
bases = (standin.Hyperparameters,)
standin.Hyperparameters = dataclasses.make_dataclass("Hyperparameters", fields, bases=bases)
plain = standin.final_loss


def parse_arguments(argv):
    return standin.parse_arguments(argv)


def check_hyperparameters(hp, world_size):
    standin.check_hyperparameters(hp, world_size)


def check_inputs(args, hp):
    if hp.num_iterations > 100:
        raise InputError(f"too few data for {hp.num_iterations} steps")


def final_loss(hp):
    effect = OFFSET + hp.a + hp.b + hp.c + hp.d + hp.e + 0.05 * (hp.d > 0 and hp.e > 0)
    return plain(dataclasses.replace(hp, effect=effect))


if __name__ == "__main__":
    standin.final_loss = final_loss
    standin.main(sys.argv[1:])
"""
LINES = {
    "a": 'low = "--a 0.001"\nhigh = "--a -0.029"',
    "b": 'low = "--b 0.001"\nhigh = "--b 0.021"',
    "c": 'high = "--c 1e-9"',
    "d": 'high = "--d 2e-9"',
    "e": 'high = "--e 4e-9"',
}


def definition(first='options = "--num_iterations 20"', **changes) -> str:
    """Five factors, which add what they say to the loss. `changes`: other lines for a factor."""
    factors = [f'[[factor]]\nname = "{name}"\n{lines}' for name, lines in (LINES | changes).items()]
    return "\n".join([first, "seed = 7", *factors])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A repository with the stand-in. Kept runs serve all tests."""
    place = tmp_path_factory.mktemp("place")
    shutil.copy(ROOT / "tests" / "tools" / "compare" / "standin.py", place)
    (place / "train_gpt.py").write_text(SCRIPT)
    (place / "old.py").write_text("print '--log_dir'")
    (place / ".gitignore").write_text("logs/\n__pycache__/\nscreens/\n*.patch\n")
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_sources, "ROOT", place)
        patch.setattr(compare_runs, "FOLDER", place / "logs" / "compare")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(place)
        yield place


def run(text: str, *arguments, name="first") -> tuple[int, str, str]:
    """Runs screen.py in this process on this definition. Returns exit status, output and errors."""
    file = Path("screens", name, "screen.toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, newline="\r\n" if "\ufeff" in text else "\n")
    return run_main(screen.main, file, *arguments)


def block_files(name="first") -> list[Path]:
    return sorted(Path("screens", name).glob("seed*.json"))


def change_block(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_screen(place):
    """Known effects, kept blocks, the answer in words, as JSON and as a picture."""
    status, out, err = run("\ufeff" + definition(), name="whole")
    assert (status, out) == (0, "whole: no block is finished yet.\n")
    status, out, err = run(
        definition(), "--blocks", 2, "--json", "o.json", "--plot", "o.png", name="whole"
    )
    assert status == 0, err
    assert "2 blocks to make: " in err
    assert max(map(len, out.splitlines())) <= 80
    assert "2 blocks of 32 runs, seeds 7, 8" in out
    assert "Warning" not in out
    (found,) = json.loads(Path("o.json").read_text())
    factors = {factor["name"]: factor for factor in found["factors"]}
    # the effect of d is averaged over e, and that of e over d
    for name, effect in zip("abcde", (-0.03, 0.02, 0.0, 0.025, 0.025)):
        factor = factors[name]
        assert abs(factor["difference"] - effect) < factor["half_width"], name
    verdicts = [factors[name]["verdict"] for name in "abd"]
    assert verdicts == ["high is better", "low is better", "hurts"]
    low, high = factors["a"]["steps_interval"]
    assert low < math.expm1(-0.03 / 0.123) < high
    assert found["sd"] == pytest.approx(0.001, rel=0.4)
    (group,) = [group for group in found["groups"] if group["found"]]
    assert group["pairs"] == [["d", "e"]]
    assert group["difference"] == pytest.approx(0.025, abs=0.002)
    assert "Two factors interact: d x e. The effect is +0.0" in out
    # a: -0.014 on average over low and high, b: 0.011, d and e: 0.05 in a quarter of the configurations
    assert found["mean_loss"] - found["base_loss"] == pytest.approx(0.0095, abs=0.002)
    assert Path("o.png").read_bytes()[:4] == b"\x89PNG"


def test_blocks(place):
    """The losses of a block are those of its runs, and each run has the settings of its configuration."""
    assert run(definition(), "--blocks", 2)[0] == 0
    block = json.loads(block_files()[0].read_text())
    losses = {}
    for path in Path("logs/compare/runs").glob("*/seed7.txt"):
        log = parse_log(path)
        values = [log.hyperparameters[name] for name in ("num_iterations", *"abcde")]
        losses[tuple(values)] = log.final.val_loss
    low = np.array([0.001, 0.001, 0, 0, 0])
    high = np.array([-0.029, 0.021, 1e-9, 2e-9, 4e-9])
    settings = np.where(make_design(5) > 0, high, low)
    assert block["losses"] == [losses[20, *row] for row in settings.tolist()]
    assert block["fewer"] == losses[16, 0, 0, 0, 0, 0]
    assert block["more"] == losses[25, 0, 0, 0, 0, 0]
    # Runs are kept, too, so a lost block costs nothing
    block_files()[0].unlink()
    assert "1 block to make: 0 runs" in run(definition(), "--blocks", 2)[2]
    assert len(block_files()) == 2


def test_blocks_that_do_not_belong_together(place):
    assert run(definition(), "--blocks", 2, name="mixed")[0] == 0
    # Another name or spelling: the runs are the same. Another value needs other blocks
    text = definition().replace("--b 0.001", "--b=0.001")
    text = text.replace('name = "a"', 'name = "alpha"')
    status, out, err = run(text, "--blocks", 2, name="mixed")
    assert status == 0
    assert "0 blocks to make: 0 runs" in err
    assert "2 blocks of 32 runs, seeds 7, 8" in out
    assert "alpha" in out
    status, out, err = run(text.replace("--a 0.001", "--a 0.002"), name="mixed")
    assert out == "mixed: no block is finished yet.\nIts folder has 2 blocks of another definition.\n"
    path = block_files("mixed")[0]
    change_block(path, dtype="float16")
    out = run(definition(), name="mixed")[1]
    assert "1 block of 32 runs, seed 8" in out
    assert "1 block of 32 runs, seed 7, float16" in out
    # A copy, and blocks that aren't whole
    copy = path.with_stem(f"{path.stem} (1)")
    copy.write_text("{")
    for changes in ({}, dict(losses=[1.5] * 31), dict(losses=["1"] * 32), dict(seed="7")):
        status, out, err = run(definition(), name="mixed")
        assert status == 2
        assert err.count("\n") == 1
        assert " (1).json" in err
        assert "; move " in err
        copy.write_text(path.read_text())
        change_block(copy, **changes)


@pytest.mark.parametrize(
    "text, message",
    [
        ("options =", "Invalid value"),
        ("seeds = 3\n" + definition(), "unexpected keyword argument 'seeds'"),
        ("[[factor]]\nname = 'a'", "1 factors; a screen has 5 to 16"),
        (definition(b='high = "--a 3"'), "--a is set by a and by b"),
        (definition(b='high = "--nothing 3"'), "b, high: unrecognized arguments"),
        (
            definition().replace('name = "b"', 'name = "a"'),
            "several factors are called a; give each its own name",
        ),
        (
            definition(b="high = 0.5"),
            "screen.toml: high must be of type str",
        ),
        (definition(b='high = "--b 0"'), "b: both sides have the same source and settings"),
        (
            definition('script = "old.py"'),
            "it needs to know --num_iterations; give --num_iterations 10 or more",
        ),
        (definition('commit = "v9"'), "no file or commit is called v9"),
        (
            definition('options = "--num_iterations 90"'),
            "the base with 112 steps: too few data for 112 steps",
        ),
    ],
)
def test_bad_definition(place, text, message):
    status, out, err = run(text, "--blocks", 1, name="bad")
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_patches(place):
    """A factor can be a patch, also one from Windows. Patches that don't apply together are refused."""
    for name in "cd":
        changed = SCRIPT.replace("OFFSET = 0.0", f"OFFSET = 0.0{ord(name)}")
        patch = patch_of("train_gpt.py", SCRIPT, changed)
        Path(f"{name}.patch").write_text(patch, encoding="utf-8-sig", newline="\r\n")
    text = definition(c='patch = "c.patch"')
    assert run(text, "--blocks", 2, "--json", "o.json", name="patched")[0] == 0
    (found,) = json.loads(Path("o.json").read_text())
    (factor,) = [factor for factor in found["factors"] if factor["name"] == "c"]
    assert factor["difference"] == pytest.approx(0.099, abs=0.002)
    status, out, err = run(definition(c='patch = "c.patch"', d='patch = "d.patch"'), name="patched")
    assert status == 2
    assert "c.patch, d.patch: the patch doesn't apply" in err
    assert "combine the patches by hand" in err
    assert len(err.splitlines()) == 1


def test_commit_and_switches(place):
    """The script is that of the commit, changed by a patch, so a screen goes on although the working tree
    changes. Blocks of the same factors in another source are shown, and the answer says so."""
    switched = SCRIPT.replace("OFFSET = 0.0", "OFFSET = 1.0")
    Path("s.patch").write_text(patch_of("train_gpt.py", SCRIPT, switched))
    switches = 'switches = "s.patch"\noptions = "--num_iterations 20"'
    text = definition(f'commit = "HEAD"\n{switches}')
    assert run(text, "--blocks", 1, name="switched")[0] == 0
    losses = json.loads(block_files("switched")[0].read_text())["losses"]
    assert min(losses) > 2
    Path("train_gpt.py").write_text("# changed\n" + switched)
    try:
        out = run(text, name="switched")[1]
        assert "1 block of 32 runs" in out
        assert "another source" not in out
        words = " ".join(run(definition(), name="switched")[1].split())
        assert "made with another source or other settings than today's" in words
        assert "s.patch: the patch doesn't apply" in run(definition(switches), name="switched")[2]
    finally:
        Path("train_gpt.py").write_text(SCRIPT)


DEFINITIONS = []
for path in sorted(ROOT.glob("records/mini/screens/*/screen.toml")):
    marks = () if path.parent.name == "baseline-2" else pytest.mark.slow
    DEFINITIONS.append(pytest.param(path, id=path.parent.name, marks=marks))


@pytest.mark.parametrize("path", DEFINITIONS)
def test_definitions_of_the_repository(path, tmp_path, monkeypatch):
    """Scripts accept the options of all configurations, and finished blocks are of these."""
    monkeypatch.setattr(compare_sources, "ROOT", ROOT)
    found = blocks.read_screen(path, tmp_path)
    assert len({variant.digest() for variant in found.configurations}) == 32
    assert {block.digest for block in blocks.read_blocks(found)} == {found.digest()}
