"""compare --sizes, --retune and --confirm, with a stand-in for train_gpt.py."""

import math
from pathlib import Path

import numpy as np
import pytest

from judge.compare import compare
from judge.logs.read import parse_log
from tests.judge.compare.test_compare import PROJECT, STANDIN
from tests.judge.helpers import answer_of, check_refused, commit_files

# The effect of an idea shrinks with the size
SIZES = """
[sizes]
40k = "--num_iterations 20 --factor 0.5"
10k = "--num_iterations 10 --factor 1"
20k = "--num_iterations 14 --factor 0.8"
100k = "--num_iterations 28 --factor 0.2"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with the stand-in as train_gpt.py."""
    files = {"train_gpt.py": STANDIN.read_text(), ".gitignore": "logs/\n"}
    project = f'{PROJECT}confirm_options = "--val_tokens 1024"\n{SIZES}'
    commit_files(tmp_path, files | {"judge.toml": project})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(*arguments) -> tuple[dict, str]:
    return answer_of(compare.main, *arguments)


def test_a_ladder(place):
    """The sizes are run in their order. The forecast stands before the size that it is for."""
    found, words = answer("--idea", "x=--effect -0.02", "--sizes", "4", "-o", "sizes.png")
    assert words.startswith("Forecast for 100k: -") and "x: helps at all 4 sizes." in words
    sizes = found["sizes"]
    assert [size["name"] for size in sizes] == ["10k", "20k", "40k", "100k"]
    assert [size["effect"]["verdict"] for size in sizes] == 4 * ["helps"] and found[
        "verdict"
    ] == "helps"
    for size, factor in zip(sizes, (1, 0.8, 0.5, 0.2)):
        assert size["change"]["value"] == pytest.approx(-0.02 * factor / 0.123, abs=0.05)
        losses = [size["losses"][name] for name in ("x", "worktree")]
        first = [[ends[f"seed {seed}"] for seed in range(4)] for ends in losses]
        effect = size["effect"]
        ratio = effect["steps"]["value"] / effect["difference"]["value"]
        assert size["change"]["value"] == pytest.approx(ratio * np.subtract(*first).mean())
    assert found["trend"]["low"] < 0.016 / 0.123 / math.log2(10) < found["trend"]["high"]
    ahead = sizes[3]["forecast"]
    assert ahead["low"] < -0.004 / 0.123 < ahead["high"] and not sizes[2]["forecast"]
    assert "before it was run; measured" in words and "Forecast for twice 100k" in words
    assert Path("sizes.png").read_bytes().startswith(b"\x89PNG")
    rows = Path(".judge/ledger.tsv").read_text().splitlines()
    assert len(rows) == 5  # a test of the idea at each size
    assert "1 thread per run" in words
    again, _ = answer("--idea", "x=--effect -0.02", "--sizes", "4")
    assert again["trend"] == found["trend"]  # of kept runs


def test_an_early_end(place):
    """Two sizes are enough for an idea that doesn't pay, but for --all_sizes. After --hours, the answer so far."""
    found, words = answer("--idea", "x=--effect 0.02", "--sizes", "2")
    assert "x: hurts at all 2 sizes." in words and "The two smallest sizes decide" in words
    assert [bool(size["effect"]) for size in found["sizes"]] == [True, True, False, False]
    found, words = answer("--idea", "x=--effect 0.02", "--sizes", "2", "--all_sizes")
    assert "at all 4 sizes." in words and all(size["effect"] for size in found["sizes"])
    found, words = answer("--idea", "y=--effect 0.01", "--sizes", "--hours", "0")
    assert words == "Too early for an answer; 10k takes 2 pairs." and found["verdict"] == "undecided"


def test_a_ladder_warns_as_compare_does(place):
    (place / "train_gpt.py").write_text(STANDIN.read_text() + "\nval_loss = 0\n")
    _, words = answer("--sizes", "--hours", "0")
    assert "Warning: worktree changes what measures the loss (train_gpt.py: val_loss = 0)." in words


def test_retuned(place):
    """Base and idea each get the value that suits them."""
    found, words = answer("--idea", "x=--factor -1", "--retune", "--effect 0 0.01 -0.01", "--runs", "2")
    assert "worktree got --effect -0.01, the best of 3 on other seeds, the first or last one." in words
    assert "x got --effect 0.01, the best of 3 on other seeds. " in words
    judged = {name: runs for name, runs in found["runs"].items() if runs}
    for name, effect in [("worktree", -0.01), ("x", 0.01)]:
        logs = [parse_log(Path(run["path"])) for run in judged[name] if run["seed"] < 2]
        assert [log.hyperparameters["effect"] for log in logs] == [effect, effect]
    same = ["--idea", "--effect 0.5", "--retune", "--effect 0 1"]
    check_refused(compare.main, same, "has the same source and settings as worktree")


def test_confirmed_on_other_tokens(place):
    """Those of confirm_options. Without it, the answer says how often they were seen."""
    answer("--base", "HEAD", "--idea", "--effect -0.1", "--runs", "2")
    (place / "train_gpt.py").write_text(
        STANDIN.read_text().replace("effect: float = 0.0", "effect: float = -0.1")
    )
    found, words = answer("--confirm", "--runs", "2")
    assert "Its validation text (--val_tokens 1024) was seen by 0 confirmations before." in words
    logs = [parse_log(Path(run["path"])) for runs in found["runs"].values() for run in runs]
    assert {log.hyperparameters["val_tokens"] for log in logs} == {1024}
    assert min(log.hyperparameters["seed"] for log in logs) == 2
    found, words = answer("--confirm", "--runs", "2", "--confirm_options", "")
    assert "Its validation text was seen by 2 comparisons before; confirm_options in" in words
    found, words = answer("--confirm", "--runs", "2")
    assert "was seen by 2 confirmations before." in words


@pytest.mark.parametrize(
    "sizes, words, message",
    [
        (
            '[sizes]\nsmall = "--x"\n1M = "--x"',
            [],
            "[sizes], small: name a size by its number of parameters",
        ),
        ("[sizes]\n1k = 3\n1M = 4", [], "[sizes], 1k: name a size by its number of parameters"),
        ('[sizes]\n1M = "--x"', [], "--sizes needs a table [sizes] with two sizes or more"),
        ("sizes = 3", [], "judge.toml: sizes must be a table"),
        (SIZES, ["--runs", "3"], "--sizes judges one --idea, without --runs"),
        (SIZES, ["--idea", "--effect 1"], "--sizes judges one --idea"),
        (SIZES, ["-o", "sizes.pdf"], "must end in .png"),
        (SIZES, ["--retune", "effect 1 2"], "effect 1 2: must be an option and two values or more"),
        (SIZES + '1M = "--num_iterations 900"', [], "too few data"),  # of the runs with more steps
    ],
)
def test_what_is_refused(place, sizes, words, message):
    (place / "judge.toml").write_text(PROJECT + sizes)
    check_refused(compare.main, ["--idea", "--effect 2", "--sizes", *words], message)
    assert not list(Path(".judge").glob("runs/*"))
