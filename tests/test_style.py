"""ruff, whose settings are in pyproject.toml, and which folder imports which."""

import ast
import subprocess
import sys

import pytest

from tests.util import ROOT

FLOORS = ["train_gpt", "lib", "data", "recipes", "judge gpu evals", "launch"]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["format --check", "check"])
def test_ruff(words):
    command = [sys.executable, "-m", "ruff", *words.split(), "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_go_down():
    """A folder imports only itself and those on floors below."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
    for name, number in floor.items():
        for file in [*ROOT.glob(f"{name}.py"), *(ROOT / name).rglob("*.py")]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [node.module]
                for module in modules:
                    top = module.split(".")[0]
                    assert top == name or floor.get(top, -1) < number, f"{file} imports {module}"
