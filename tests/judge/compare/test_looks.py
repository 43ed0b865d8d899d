"""Looks that compare counts: several tests of one idea are together wrong at most once in 100."""

import functools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from judge.compare import compare, ledger
from judge.compare.pairs import Comparison
from judge.settings import Settings

POOL = SimpleNamespace(minutes=lambda: 0.0, fixed_time=False, settings=Settings())
USERS = 1000
# What they try until the idea helps: first seed, and --runs (0: as many as it takes, at most 20)
HABITS = {
    "three seeds": [(0, 5), (10, 5), (20, 5)],
    "3, 5, 7, 9 runs": [(0, 3), (0, 5), (0, 7), (0, 9)],
    "ten seeds": [(10 * i, 4) for i in range(10)],
    "runs, then as many as it takes": [(0, 8), (0, 0)],
    "as many as it takes, thrice": [(0, 0), (100, 0), (200, 0)],
}


class Variant(SimpleNamespace):
    """The runs of a user's base, or of an idea that does nothing."""

    def key(self) -> str:
        return self.name

    def num_iterations(self):
        return None


def make_variant(rng: np.random.Generator, name: str) -> Variant:
    losses = rng.normal(3.28, 0.002, 300).round(4)
    none = dict(command="x", folder=Path("x"), origin=Path("x"))
    return Variant(name=name, losses=losses, runs={}, before=[], log_ratios=[], **none)


@functools.cache
def arguments(seed: int, runs: int):
    words = ["--command", "x {seed}", "--seed", str(seed), "--ledger", "l.tsv"]
    args, _ = compare.read_arguments(words + ["--runs", str(runs)] * (runs > 0))
    return args


def look(base: Variant, idea: Variant, seed: int, runs: int) -> str:
    """The verdict of one command, which makes what is missing and writes the ledger."""
    args = arguments(seed, runs)
    c = Comparison(POOL, base, [idea], seed, args.runs, args.until, None)
    idea.before = ledger.seeds_of_other_tests(c, args, idea)
    for i in range(seed, seed + (runs or 20)):
        for variant in (base, idea):
            end = SimpleNamespace(val_loss=float(variant.losses[i]), step=1)
            variant.runs[i] = SimpleNamespace(end=end)
    rows = ledger.with_answers(c, args)
    ledger.write_ledger(args.ledger, rows)
    return rows[-1]["verdict"]


SOME = ["three seeds", "3, 5, 7, 9 runs"]


@pytest.mark.parametrize(
    "habit", [pytest.param(h, marks=[] if h in SOME else pytest.mark.slow) for h in HABITS]
)
def test_users_who_stop_at_helps(tmp_path, monkeypatch, habit):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ledger, "write_file", lambda file, text: Path(file).write_bytes(text))
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(USERS):
        Path("l.tsv").unlink(missing_ok=True)
        base, idea = make_variant(rng, "base"), make_variant(rng, "idea")
        wrong += any(look(base, idea, *test) == "helps" for test in HABITS[habit])
    print(habit, wrong)
    assert wrong <= 0.01 * USERS


HEADER = " ".join(ledger.FIELDS)
ROW = "2026-11-28 b c{} i --lr=1 m 0.02 undecided 0.1 -1 1 0 5 3 2 0.0"


def test_a_merged_ledger(tmp_path):
    """git puts the lines of two ledgers below each other, with both headers."""
    lines = [HEADER, ROW.format(1), ROW.format(2), HEADER, ROW.format(2), ROW.format(3)]
    file = tmp_path / "l.tsv"
    file.write_text("\n".join(line.replace(" ", "\t") for line in lines))
    rows = ledger.read_ledger(file)
    assert [row["commit"] for row in rows] == ["c1", "c2", "c3"]
    ledger.write_ledger(file, rows)
    assert ledger.read_ledger(file) == rows
    assert ledger.unused_seed(file) == 3
