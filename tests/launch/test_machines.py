"""A test of tests/machines with the quickest machine."""

from tests.machines import cases
from tests.machines.table import print_table


def test_a_quick_machine(capsys):
    name = "read-only disk"
    assert print_table({name: cases.CASES[name]}) == 0
    assert capsys.readouterr().out.count(name) == 1
