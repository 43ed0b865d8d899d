"""Runs ./run.sh on imitations of other machines, on those that are quick. `./run.sh test machines` runs all."""
import sys
from pathlib import Path
from unittest import SkipTest

import pytest

from tests.machines import cases
from tests.machines.table import Case, Done, one_line, print_table, stopped, trained

FAST = [case for case in cases.CASES if case.fast]


@pytest.mark.parametrize("case", FAST, ids=[case.machine for case in FAST])
def test_machine(case, tmp_path):
    try:
        case.run(tmp_path)
    except SkipTest as e:
        pytest.skip(str(e))


FIRST = "step:0/2 val_loss:5.95 train_time:0ms\n"
LOWER = FIRST + "step:2/2 val_loss:5.50 train_time:9ms\n"
LINE = "run.sh: error: no network: check the cable\n"
STOP = "run.sh: stopped by SIGINT; go on\n"


def test_right_outcomes():
    assert trained(Done(0, "run.sh: warning: no compiler\n" + LOWER), "compiler") == "run.sh: warning: no compiler"
    assert one_line(Done(2, "run.sh: making .venv\n" + LINE), "network") == LINE.strip()
    assert stopped(Done(130, "run.sh: making .venv\n" + STOP), 2) == STOP.strip()


@pytest.mark.parametrize(
    "check, code, output, argument",
    [
        (trained, 1, LOWER, "step"),
        (trained, 0, LOWER, "compiler"),
        (trained, 0, FIRST, "step"),
        (trained, 0, FIRST + "step:2/2 val_loss:nan train_time:9ms\n", "step"),
        (one_line, 0, LINE, "network"),
        (one_line, 2, LINE, "disk"),
        (one_line, 2, LINE + "error: again\n", "network"),
        (one_line, 2, "Traceback (most recent call last):\n" + LINE, "network"),
        (stopped, 143, STOP, 2),
        (stopped, 130, "KeyboardInterrupt\n" + STOP, 2),
        (stopped, 130, "run.sh: making .venv\n", 2),
    ],
)
def test_wrong_outcomes(check, code, output, argument):
    with pytest.raises(AssertionError):
        check(Done(code, output), argument)


def test_the_table_counts_and_wraps(capsys):
    def crash(folder):
        raise ValueError("broken")

    def skip(folder):
        raise SkipTest("no such machine")

    machines = [
        Case("one", "a line", lambda folder: "error: " + "word " * 40),
        Case("two", "trains", crash),
        Case("three", "trains", skip),
    ]
    assert print_table(machines) == 1
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert max(len(line) for line in lines) <= 120
    assert lines[-1].startswith("1 ok, 1 FAILED, 1 not run")
    assert "FAILED: ValueError: broken" in output
    assert "not run: no such machine" in output
