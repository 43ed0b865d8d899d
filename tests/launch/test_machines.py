"""Tests of tests/machines: the quickest machine, and what counts as a right outcome."""

import pytest

from tests.machines import cases
from tests.machines.table import Done, one_line, print_table, stopped, trained


def test_a_quick_machine(capsys):
    quick = [case for case in cases.CASES if case.machine == "read-only disk"]
    assert print_table(quick) == 0
    assert capsys.readouterr().out.count("read-only disk") == 1


FIRST = "step:0/2 val_loss:5.95 train_time:0ms\n"
LINE = "run.sh: error: no network: check the cable\n"
STOP = "run.sh: stopped by SIGINT; go on\n"


@pytest.mark.parametrize(
    "check, code, output, argument",
    [
        (trained, 0, FIRST + "step:2/2 val_loss:nan train_time:9ms\n", "step"),
        (one_line, 2, "Traceback (most recent call last):\n" + LINE, "network"),
        (stopped, 130, "KeyboardInterrupt\n" + STOP, 2),
    ],
)
def test_wrong_outcomes(check, code, output, argument):
    with pytest.raises(AssertionError):
        check(Done(code, output), argument)
