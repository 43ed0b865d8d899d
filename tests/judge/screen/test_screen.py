"""The screen: its designs and statistics against direct definitions and simulation, and the command on a
repository whose commits have known effects."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.util import ROOT
from tests.judge.helpers import answer_of, check_refused, commit_files, git, patch_of, work_in
from judge.runs.copies import changed
from judge.screen import screen
from judge.screen.design import factorial, find_part_effect, fit, leave_one_out
from judge.screen.parts import choose_design, patch_between, split_hunks

PROJECT = (
    'command = "python -m train_gpt {options} --seed {seed} --num_runs {runs}"\njob_per_core = true\n'
)

# -----------------------------------------------------------------------------
# Designs


@pytest.mark.parametrize("parts", range(1, 17))
def test_designs(parts):
    """They find the effects of parts, whatever the others do; the factorial one also if pairs act together."""
    effects = np.random.default_rng(parts).normal(size=parts)
    for design in (factorial(parts), leave_one_out(parts)):
        assert design.contrasts @ (design.rows @ effects) == pytest.approx(effects)
        assert design.rows[0].all() and not design.rows[-1].any()
    design = factorial(parts)
    assert len({tuple(row) for row in design.rows}) == len(design.rows) <= max(2, 4 * parts)
    signs = np.where(design.rows, 1, -1)
    pairs = []
    for group in design.groups:
        for i, j in group.pairs:
            product = signs[:, i] * signs[:, j]
            assert not (design.contrasts @ product).any()
            assert group.contrast @ product == pytest.approx(2)
            pairs.append((i, j))
    assert sorted(pairs) == list(itertools.combinations(range(parts), 2))


@pytest.mark.parametrize("design", [factorial(5), leave_one_out(3)])
def test_fit_is_least_squares(design):
    """Against numpy's solution for a matrix with a column for each block and each combination."""
    combinations = len(design.rows)
    losses = np.random.default_rng(0).normal(1.5, 0.004, (3, combinations))
    blocks = np.repeat(np.eye(3), combinations, axis=0)
    matrix = np.hstack([blocks, np.tile(np.eye(combinations), (3, 1))])
    solution, _, rank, _ = np.linalg.lstsq(matrix, losses.ravel(), rcond=None)
    squares = ((losses.ravel() - matrix @ solution) ** 2).sum()
    for contrast in design.contrasts:
        found = fit(losses, contrast)
        assert found["mean"] == pytest.approx(contrast @ solution[3:])
        assert found["squares"] == pytest.approx(squares)  # losses aren't rounded here
        assert found["n"] == losses.size - rank + 1
        assert found["weight"] == pytest.approx(3 / (contrast**2).sum())


def simulate(design, effects, rng, blocks=60) -> list[str]:
    """The first verdicts of a screen with looks after each block. A run's standard deviation is 0.004."""
    noise = rng.normal(0, 0.003, (blocks, 1)) + rng.normal(0, 0.004, (blocks, len(design.rows)))
    losses = (1.5 + design.rows @ effects + noise).round(4)
    verdicts = []
    for contrast in design.contrasts:
        looks = (losses[:n] for n in range(2, blocks + 1))
        said = (find_part_effect("", look, contrast, 0.002, len(effects)).verdict for look in looks)
        verdicts.append(next((verdict for verdict in said if verdict != "undecided"), "undecided"))
    return verdicts


@pytest.mark.parametrize("screens", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_simulation(screens):
    """Eight parts: three matter, two hurt, three do nothing."""
    rng = np.random.default_rng(1)
    effects = np.array([-0.02, -0.01, -0.004, 0.006, 0.003, 0, 0, 0])
    right = ["needed"] * 3 + ["hurts"] * 2 + ["barnacle"] * 3
    wrong = Counter()
    for _ in range(screens):
        verdicts = simulate(factorial(8), effects, rng)
        wrong.update({said for said, truth in zip(verdicts, right) if said != truth})
    for said, most in (("needed", 0.01), ("hurts", 0.01), ("barnacle", 0.05), ("undecided", 0.01)):
        assert stats.binom.sf(wrong[said] - 1, screens, most) > 1e-3, wrong
    # On the edge: the most that a barnacle may be worth
    edge = [simulate(factorial(2), np.array([-0.002, 0.002]), rng) for _ in range(3 * screens)]
    assert stats.binom.sf(sum("barnacle" in said for said in edge) - 1, 3 * screens, 0.05) > 1e-3


def test_a_fixed_seed():
    """Equal blocks tell nothing about noise."""
    design = factorial(3)
    losses = np.tile(1.5123 - 0.1 * design.rows.sum(axis=1), (2, 1)).round(4)
    for contrast in design.contrasts:
        found = [
            find_part_effect("x", losses + shift, contrast, 0.002, 3) for shift in (0, [[0], [0.1]])
        ]
        assert [effect.verdict for effect in found] == ["undecided", "needed"]


# -----------------------------------------------------------------------------
# Parts


@pytest.mark.parametrize(
    "needs, groups, factors",
    [
        ({}, [(0,), (1,), (2,), (3,)], True),
        ({2: [{1}]}, [(0,), (1, 2), (3,)], True),
        ({2: [{1}], 1: [{0}]}, [(0, 1, 2), (3,)], True),
        ({3: [{0, 1}]}, [(0, 1, 3), (2,)], True),
        ({3: [{0}, {1}]}, [(0,), (1,), (2,), (3,)], False),  # one of both is enough
    ],
)
def test_parts_that_need_others(needs, groups, factors):
    def works(chosen):
        met = [any(other <= set(chosen) for other in needs.get(part, [set()])) for part in chosen]
        return all(met)

    found, design = choose_design([(i,) for i in range(4)], works)
    assert found == groups
    assert bool(design.groups) == factors


def test_hunks_change_their_own_lines(tmp_path):
    """Also where a file repeats itself, and whatever is left out."""
    old, new = tmp_path / "old", tmp_path / "new"
    edits = {69: "a\n" * 9, 49: "b\n", 29: "c\n" * 30, 9: "d\n" * 20}

    def write(folder: Path, some) -> str:
        text = "".join(edits[i] if i in some else f"line {i % 10}\n" for i in range(90))
        folder.mkdir(exist_ok=True)
        (folder / "x.py").write_text(text)
        return text

    write(old, []), write(new, edits)
    files = {}
    for at, (_, patch) in zip(edits, split_hunks(patch_between(old, new, tmp_path / "store"))):
        files[at] = tmp_path / f"{at}.patch"
        files[at].write_bytes(patch)
    for count in range(5):
        for some in itertools.combinations(edits, count):
            found = changed(old, "x.py", [files[at] for at in some])
            assert (found / "x.py").read_text() == write(new, some)


# -----------------------------------------------------------------------------
# The command

# Far apart, so that patches meet no line of another one
SCRIPT = ("\n" * 8).join(
    """import math, random, sys
a = b = 0
lr = 1.0 if "--lr" in sys.argv else 0.0
options = [pair for pair in zip(sys.argv, sys.argv[1:]) if pair[0] == "--num_iterations"]
steps = int(options[-1][1])
loss = 3 + a + b + 0.05 * lr - 0.1 * math.log(steps / 100)
noise = random.Random(repr((sys.argv, loss)))
loss += noise.gauss(0, 0.001)
print(f"step:{steps}/{steps} val_loss:{loss:.4f}")
""".splitlines(keepends=True)
)
COMMITS = {
    "a helps": ("import math", "A = -0.05\nimport math"),
    "nothing": ("a = b = 0", "b = a = 0"),
    "uses a": ("loss = 3 + a", "loss = 3 + A"),
    "b hurts": ("loss += ", "loss += 0.02 + "),
}
COMMAND = ["--command", "python train.py {seed} --num_iterations 100 {options}"]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A repository with a branch of four commits."""
    folder = tmp_path / "theirs"
    text = SCRIPT
    commit_files(folder, {"train.py": text})
    git(folder, "checkout", "-qb", "idea")
    for name, (old, new) in COMMITS.items():
        assert old in text
        text = text.replace(old, new, 1)
        commit_files(folder, {"train.py": text}, name)
    work_in(tmp_path, monkeypatch)
    return folder


def answer(*arguments) -> dict:
    return answer_of(screen.main, *COMMAND, *arguments)[0]


def verdicts(found: dict) -> dict[str, str]:
    """Of the parts, by name without hash."""
    return {part["name"].split(" ", 1)[-1]: part["verdict"] for part in found["parts"]}


def test_commits(theirs):
    """A commit that needs another one becomes one part with it. The screen goes on where it ended."""
    source = ["--base", "theirs@main", "--idea", "theirs@idea"]
    found = answer(*source, "--blocks", "2")
    a, nothing, b = found["parts"]
    assert "a helps + " in a["name"] and a["name"].endswith("uses a")
    assert a["without"]["value"] == pytest.approx(0.05, abs=0.003)
    assert b["without"]["value"] == pytest.approx(-0.02, abs=0.003)
    assert (a["verdict"], b["verdict"]) == ("needed", "hurts")
    assert np.shape(found["losses"]) == (2, 8)
    found = answer(*source)
    assert set(verdicts(found).values()) == {"needed", "hurts", "barnacle"}
    before = set(Path("theirs/.judge/runs").rglob("seed*"))
    assert answer(*source) == found
    assert set(Path("theirs/.judge/runs").rglob("seed*")) == before


def test_hunks_and_edits(theirs):
    """The working tree's edits are a part. By hunk, the parts are those of the whole difference; a new file
    stays whole."""
    (theirs / "new file").write_text("a\n" * 99)
    (theirs / ".git/info/exclude").write_text("data/\n")
    (theirs / "data").mkdir()
    (theirs / "data/x").touch()  # linked, and no part
    file = theirs / "train.py"
    file.write_text(file.read_text().replace("noise = ", "loss += 0.04\nnoise = "))
    arguments = ["--base", "theirs@main", "--idea", "theirs", "--blocks", "1"]
    assert "edits without a commit" in {part["name"] for part in answer(*arguments)["parts"]}
    names = {part["name"] for part in answer(*arguments, "--by", "hunk")["parts"]}
    assert names == {"new file", "train.py:43 + train.py:1", "train.py:7", "train.py:52", "train.py:61"}


def test_a_base_with_edits(theirs):
    """What the idea lacks of them is a part of its own."""
    git(theirs, "checkout", "-q", "main")
    (theirs / "train.py").write_text(SCRIPT.replace("noise = ", "loss += 0.04\nnoise = "))
    found = answer("--base", "theirs", "--idea", "theirs@idea", "--blocks", "1")
    effects = {part["name"]: part["without"]["value"] for part in found["parts"]}
    assert effects["edits of the base, undone"] == pytest.approx(0.04, abs=0.003)


def test_given_parts(theirs):
    """A patch that changes nothing, and options of the same name. The metric has another name, and higher is better."""
    text = SCRIPT.replace("val_loss:{loss:.4f}", "score:{-loss:.4f}")
    (theirs / "train.py").write_text(text)
    Path("same.patch").write_text(patch_of("train.py", text, text.replace("a = b", "b = a")))
    parts = ["--part", "x=same.patch", "--part", "x=--lr 1", "--base", "theirs"]
    found = answer(*parts, "--metric", "score", "--higher_is_better")
    assert [(part["name"], part["verdict"]) for part in found["parts"]] == [
        ("x", "barnacle"),
        ("x", "hurts"),
    ]


def test_a_script_of_ours(tmp_path, monkeypatch):
    """A script that can be asked. Options that it refuses together are one part."""
    standin = (ROOT / "tests/judge/compare/standin.py").read_text()
    refuse = "    if hp.effect > 1 and hp.slower == 1:\n        fail('too fast')\n"
    head = "def check_hyperparameters(hp):\n"
    files = {"train_gpt.py": standin.replace(head, head + refuse), "judge.toml": PROJECT}
    commit_files(tmp_path, files)
    work_in(tmp_path, monkeypatch)
    parts = ["--part", "--own_noise 0.002", "--part", "--slower 1.1", "--part", "--effect 1.1"]
    found, words = answer_of(screen.main, *parts, "--num_iterations", "10", "--blocks", "2")
    noise, both = found["parts"]
    assert (noise["name"], both["name"]) == ("--own_noise 0.002", "--slower 1.1 + --effect 1.1")
    assert both["without"]["value"] == pytest.approx(-1.1, abs=0.01)
    parts = ["--part", "--val_tokens 4", "--part", "--effect 1"]
    check_refused(screen.main, parts, "--val_tokens is 4, but 512 in the base")


BAD = [
    ([], "give --idea, whose difference from --base has the parts"),
    (
        ["--part", "nothing.py"],
        "nothing.py: a part is a .patch or .diff file that exists, or options in quotes",
    ),
    (["--base", "theirs@idea", "--idea", "theirs@main"], "doesn't contain all commits of theirs@idea"),
    (
        ["--base", "theirs@main --lr 1", "--idea", "theirs@idea --lr 2"],
        "theirs@idea --lr 2 must begin with the options of theirs@main --lr 1",
    ),
    (["--base", "theirs@main", "--idea", "theirs@main"], "are the same, so there are no parts"),
    (
        ["--command", "x {seed}", "--base", "theirs", "--part", "--lr 1"],
        "write {options} where --lr 1 must",
    ),
    (
        ["--command", "true {seed}", "--base", "theirs@main", "--idea", "theirs@idea", "--try=-h"],
        "{options}",
    ),
]


def test_bad_input(theirs):
    for arguments, message in BAD:
        check_refused(screen.main, [*COMMAND, *arguments], message)
