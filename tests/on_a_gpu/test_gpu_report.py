"""Compares head and attention on a GPU with float64 on the CPU, as a GPU report does."""

import pytest

from gpu import report_stages


@pytest.mark.parametrize("stage", [report_stages.check_head, report_stages.check_attention])
def test_a_stage_of_the_report(stage, device):
    for check in stage()["checks"]:
        assert check["ok"], check
