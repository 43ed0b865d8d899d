"""Compares head, attention and Muon on a GPU with float64 on the CPU, as a GPU report does."""

import pytest

from tools.gpu import checks


@pytest.mark.parametrize("stage", [checks.head, checks.attention, checks.muon])
def test_a_stage_of_the_report(stage, device):
    for check in stage()["checks"]:
        assert check["ok"], check
