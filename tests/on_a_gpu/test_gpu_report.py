"""Compares head, attention and Muon on a GPU with float64 on the CPU, as a GPU report does."""

import pytest

from gpu import stages


@pytest.mark.parametrize("stage", [stages.check_head, stages.check_attention, stages.check_muon])
def test_a_stage_of_the_report(stage, device):
    for check in stage()["checks"]:
        assert check["ok"], check
