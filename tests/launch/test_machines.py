"""
Runs ./run.sh on imitations of other machines, on those that are quick.

`python tests/machines` runs all of them.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "machines"))
import install
import training
from table import Case, Done, Outcome, format_row, one_line, print_table, trained

CASES = install.CASES + training.CASES


FAST = [case for case in CASES if case.fast]


@pytest.mark.parametrize(
    "case",
    FAST,
    ids=[case.situation for case in FAST],
)
def test_machine(case, tmp_path):
    reason = case.cannot()
    if reason:
        pytest.skip(reason)
    outcome = case.run(tmp_path)
    assert outcome.ok, f"{outcome.what}: {outcome.last_line}"


def test_situations_differ():
    situations = [case.situation for case in CASES]
    assert len(situations) == len(set(situations))


def test_trained_wants_a_lower_loss():
    first = "step:0/2 val_loss:5.95 train_time:0ms\n"
    assert trained(Done(0, first + "step:2/2 val_loss:5.50 train_time:9ms\n")).ok
    assert not trained(Done(1, first + "step:2/2 val_loss:5.50 train_time:9ms\n")).ok
    assert not trained(Done(0, first + "step:2/2 val_loss:5.95 train_time:9ms\n")).ok
    assert not trained(Done(0, first + "step:2/2 val_loss:nan train_time:9ms\n")).ok
    assert not trained(Done(0, first)).ok


def test_one_line_wants_one_error_with_the_words():
    line = "run.sh: error: no network: check the cable\n"
    assert one_line(Done(2, "run.sh: making .venv\n" + line), "network", code=2).ok
    assert not one_line(Done(0, line), "network").ok
    assert not one_line(Done(2, line), "network", code=143).ok
    assert not one_line(Done(2, line), "disk").ok
    assert not one_line(Done(2, line + "error: again\n"), "network").ok
    assert not one_line(Done(2, "Traceback (most recent call last):\n" + line), "network").ok
    assert not one_line(Done(2, "nothing\n")).ok


def test_the_table_counts_and_wraps(capsys):
    def crash(folder):
        raise ValueError("broken")

    def long_line(folder):
        return Outcome(True, "line, exit 2", "error: " + "word " * 40)

    def fail(folder):
        return Outcome(False, "exit 1")

    cases = [
        Case("one", "a line", long_line),
        Case("two", "trains", fail),
        Case("three", "trains", crash),
        Case("four", "trains", crash, cannot=lambda: "no such machine"),
    ]
    assert print_table(cases) == 2
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 120
    assert lines[-1].startswith("1 ok, 2 failed, 1 not run")
    assert any("FAILED: ValueError" in line for line in lines)
    assert any("no such machine" in line for line in lines)
    assert format_row("a", "b", "c", "1", "").split() == ["a", "b", "c", "1"]
