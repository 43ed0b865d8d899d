"""The settings of ruff are in pyproject.toml."""

import subprocess
import sys

import pytest

from tests.util import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("words", ["format --check", "check"])
def test_ruff(words):
    command = [sys.executable, "-m", "ruff", *words.split(), "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
