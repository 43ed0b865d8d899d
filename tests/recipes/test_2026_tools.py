"""The tools with logs and options of the recipe: parsing, verify, plot, the launcher."""

import subprocess
import sys

import pytest

from recipes import january2026
from test_2026_runs import in_float32, start, succeeds, tiny_run
from tests.util import ROOT

from tools.compare import sources as compare_sources
from tools import launch_checks
from tools.records import rules
from tools.common import UsageError
from tools.logs import parse_log


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The log of a tiny run."""
    folder = tmp_path_factory.mktemp("run")
    argv = tiny_run(folder, bigram_factor=0, windows="3,7,11,13")
    succeeds(start(argv, folder, hook=in_float32))
    (path,) = (folder / "logs").glob("*.txt")
    return path


def test_parse(log):
    parsed = parse_log(log)
    assert parsed.incomplete == ""
    assert parsed.track == "mini"
    assert parsed.num_steps == 8
    assert rules.val_tokens(parsed) == 1024
    assert [v.step for v in parsed.validations] == [0, 4, 8]


def test_plot(log, tmp_path):
    picture = tmp_path / "curves.png"
    command = [sys.executable, "-m", "tools.records.plot", str(log), "-o", str(picture)]
    assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    "change, says",
    [
        ({}, ""),
        ({"windows": [1, 2, 3, 4]}, "max_window 64"),
        ({"num_layers": 3}, "num_layers 3"),
    ],
)
def test_verify_knows_the_rules_of_mini(log, change, says):
    parsed = parse_log(log)
    parsed.hyperparameters |= change
    found = rules.too_small(parsed)
    assert says in found
    assert bool(found) == bool(says)


def test_verify_knows_what_mini_fixes(log):
    parsed = parse_log(log)
    parsed.hyperparameters |= {"bigram_factor": 5}
    found = rules.other_than_fixed(parsed)
    assert "val_tokens 1024, but the track mini needs 389120" in found
    assert "bigram_factor 5, but the track mini needs 0" in found
    parsed.hyperparameters |= {"bigram_factor": 0, "val_tokens": january2026.TRACKS["mini"].val_tokens}
    found = rules.other_than_fixed(parsed)
    assert "bigram_factor" not in found and "val_tokens" not in found


def test_compare_reads_the_recipe(tmp_path):
    """Its settings, and those of an idea, come from the script itself."""
    tree = compare_sources.Variant("tree", compare_sources.copy_tree(tmp_path), "train_gpt.py", [])
    base = compare_sources.read_variant("recipes/january2026.py", tree, ["--track", "mini"])
    idea = compare_sources.read_variant("--muon_lr 0.03", base, ["--track", "mini"])
    compare_sources.check_settings([base, idea], 1)
    assert base.settings["muon_lr"] == 0.035
    assert idea.settings["muon_lr"] == 0.03
    assert base.settings["seq_lens"] == [256, 512, 768]
    longer = compare_sources.with_steps(base, 1.25)
    assert longer.settings["num_iterations"] == 700
    wrong = compare_sources.read_variant("--max_window 256", base, ["--track", "mini"])
    with pytest.raises(UsageError, match="max_window"):
        compare_sources.check_settings([wrong], 1)


@pytest.mark.parametrize("gpus, track, processes", [(8, "mini", 4), (8, "fineweb", 8), (6, "fineweb", 4)])
def test_as_many_processes_as_fit(gpus, track, processes):
    _, hp = january2026.parse_arguments(["--track", track])
    assert launch_checks.most_processes(january2026, hp, gpus) == processes
