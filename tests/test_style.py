"""ruff, whose settings are in pyproject.toml; which folder imports which, and which packages."""

import ast
import os
import subprocess
import sys

import pytest

from tests.util import ROOT

FLOORS = ["train_gpt judge", "lib", "data", "recipes", "leaderboard gpu", "evals", "launch"]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["format --check", "check"])
def test_ruff(words):
    command = [sys.executable, "-m", "ruff", *words.split(), "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --------------------------------------------------------------- imports
def imported(*files):
    """The first parts of the names of all modules that these files import anywhere."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split(".")[0])
    return names


def test_imports_go_down():
    """A folder imports only itself and those on floors below."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
    for name, number in floor.items():
        for file in [*ROOT.glob(f"{name}.py"), *(ROOT / name).rglob("*.py")]:
            for other in imported(file) - {name}:
                assert floor.get(other, -1) < number, f"{file} imports {other}"


def packages(*files):
    """The imported modules that aren't Python's, PyTorch's (triton) or ours."""
    others = {"train_gpt", "tiktoken_ext", "triton", *os.listdir(ROOT)}
    return imported(*files) - set(sys.stdlib_module_names) - others


def required(folder):
    return {line.split("==")[0] for line in open(ROOT / folder / "requirements.txt")}


def test_requirements_name_what_is_imported():
    before = [ROOT / "launch/launch.py", ROOT / "data/datasets.py", *(ROOT / "lib").glob("*.py")]
    assert packages(*before) == set()  # they run before there are packages
    names = "train_gpt.py launch/checks.py launch/terminal.py data/shakespeare.py data/fineweb.py evals/models.py evals/sample.py"
    always = [ROOT / name for name in names.split()]
    for folder in ("recipes", "gpu"):
        always += (ROOT / folder).glob("*.py")
    assert packages(*always) <= required(".")
    for folder in ("judge", "evals"):
        found = packages(*(ROOT / folder).rglob("*.py"))
        assert required(folder) <= found <= required(".") | required(folder)
    assert packages(*(ROOT / "leaderboard").glob("*.py")) <= required("judge")
