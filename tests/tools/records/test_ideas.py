"""
Tests of the page of ideas, and of their patches.

The page must match the results in the repository. Every patch must apply to the commit that it was made
for, or to the current training script.
"""

import json
import re
from pathlib import Path

import pytest

from tools.common import LogError
from tools.compare import sources as compare_sources
from tools.records import idea_pages
from tests.util import ROOT, SCRIPT, random_tokens, read_log, run_forked, val_losses, write_shard

RECORDS = ROOT / "records"
IDEAS = idea_pages.read_ideas(RECORDS / "mini/ideas")


def describe(root, name, **fields):
    """Writes the description of an idea."""
    folder = root / "mini/ideas" / name
    folder.mkdir(parents=True, exist_ok=True)
    facts = dict(part="soft-cap", change="none", does="caps.", records="9", field="10 to 8 min")
    (folder / "idea.json").write_text(json.dumps(facts | fields))


def idea_rows(text):
    """The rows of a table that are about ideas, each as a list of its columns."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "(ideas/" in line]
    return [[column.strip(" |") for column in line.split(" | ")] for line in lines]


def factor(patch, difference, steps, low, high, verdict):
    interval = [low, high]
    return dict(patch=patch, difference=difference, steps=steps, steps_interval=interval, verdict=verdict)


def write_screen(root, name, *factors):
    """Writes what `screen --json` writes about a screen, as far as the page reads it."""
    found = dict(
        dtype="bfloat16",
        torch="2.13.0",
        machines=["a CPU, 2 cores", "another, 4 cores"],
        seeds=[7, 8],
        until=0.01,
        sd=0.004,
        factors=list(factors),
    )
    folder = root / "mini/screens" / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps([found, "another group of blocks"]))


def patch(name):
    return f"records/mini/ideas/{name}/idea.patch"


@pytest.fixture
def root(tmp_path):
    """A records folder with six ideas, four of them in a screen. c and d are about the same part."""
    describe(tmp_path, "a", part="part a", does="gates.", field_steps=-1.5, later=True)
    describe(tmp_path, "b", part="part b", field_steps=-3.1)
    for name in "cdf":
        describe(tmp_path, name, part="gelu")
    describe(tmp_path, "e", part="part e", does="smears.", later=True)
    write_screen(
        tmp_path,
        "first",
        factor(patch("a"), 0.001, 0.007, -0.016, 0.031, "undecided"),
        factor(patch("b"), -0.01, -0.07, -0.09, -0.032, "helps"),
        factor(patch("c"), 0.003, 0.02, -0.005, 0.05, "undecided"),
        factor(patch("d"), 0.002, 0.014, -0.005, 0.04, "not worth it"),
        factor("", 0.002, 0.014, -0.005, 0.04, "undecided"),  # a setting
        factor("records/mini/screens/first/x.patch", 0.001, 0.007, -0.016, 0.031, "undecided"),
    )
    return tmp_path


def test_measured_ideas_have_figures_and_the_others_are_listed(root):
    # A screen with one block has no intervals
    write_screen(root, "second", factor(patch("f"), 0.001, None, None, None, "undecided"))
    text = idea_pages.page(root)
    measured, others = text.split("\n## Not in a screen yet\n")
    rows = idea_rows(measured)
    assert [re.search(r"ideas/(\w)/", row[0])[1] for row in rows] == ["b", "a", "d", "c"]  # by effect
    assert rows[0][2:5] == ["-7.0%", "-9.0% to -3.2%", "helps"]
    # -3.1% is above the interval, -1.5% is inside, and d has no figure
    assert [row[-1] for row in rows[:3]] == ["excluded", "inside", "not comparable"]
    assert [row[4] for row in rows[1:3]] == ["undecided", "not worth it"]
    words = " ".join(measured.split())
    assert "4 ideas, each off or on, in 32 combinations. 64 runs with seeds 7, 8, in bfloat16" in words
    assert "with PyTorch 2.13.0, on a CPU, 2 cores, and another, 4 cores. A run's" in words
    assert "- **part a**: gates.\n" in measured
    assert measured.count("- **gelu**: caps.\n") == 1
    assert "smears." not in text
    later, recipe = others.split("Parts of the recipe, removed or replaced:")
    assert [row[0] for row in idea_rows(later)] == ["[part e](ideas/e/)"]
    assert [row[0] for row in idea_rows(recipe)] == ["[gelu](ideas/f/)"]


def test_an_idea_that_is_not_described_is_refused(root):
    describe(root, "a", does="")
    with pytest.raises(LogError, match="a/idea.json: the field does is missing"):
        idea_pages.page(root)


def test_the_page_is_current():
    page = (RECORDS / "mini/IDEAS.md").read_text(encoding="utf-8")
    assert page == idea_pages.page(RECORDS), "stale: run `./run.sh submit --regenerate`"


@pytest.mark.slow
def test_patches_apply_to_their_commits(tmp_path):
    """This needs the whole history: a shallow clone fails with a line that says so."""
    for name, idea in IDEAS.items():
        if "commit" not in idea:
            continue
        commit = compare_sources.copy_commit(idea["commit"], tmp_path)
        file = RECORDS / "mini/ideas" / name / "idea.patch"
        patched = compare_sources.changed(commit, "train_gpt.py", [file])
        assert (patched / "train_gpt.py").read_bytes() != (commit / "train_gpt.py").read_bytes(), name


# The data are small, but the model is that of mini: patches depend on its layers and heads.
FOUR_STEPS = dict(
    train_files="train.bin",
    val_files="val.bin",
    val_tokens=256,
    val_seq_len=256,
    batch_tokens=512,
    train_seq_len=256,
    num_iterations=4,
    warmup_steps=0,
)


def final_loss(source: bytes, folder: Path) -> float:
    """The loss after four steps of mini, with sequences of two blocks."""
    folder.mkdir()
    script = folder / "train_gpt.py"
    script.write_bytes(source)
    for part, size in (("train", 2400), ("val", 300)):
        write_shard(folder / f"{part}.bin", random_tokens(size, seed=0))
    words = [f"--{k}={v}" for k, v in FOUR_STEPS.items()]
    ran = run_forked(["--track", "mini", *words], folder, script=script)
    assert ran.returncode == 0, ran.stderr
    return val_losses(read_log(folder))[4]


def test_ideas_for_the_current_script_apply_and_train(tmp_path):
    """They train in another way than the script itself, and than each other."""
    current = [name for name, idea in IDEAS.items() if "commit" not in idea]
    assert current == ["gelu", "no-nesterov", "tied-head"]
    losses = {final_loss(SCRIPT.read_bytes(), tmp_path / "base")}
    tree = compare_sources.copy_tree(tmp_path / "scratch")
    for name in current:
        file = RECORDS / "mini/ideas" / name / "idea.patch"
        patched = compare_sources.changed(tree, "train_gpt.py", [file])
        losses.add(final_loss((patched / "train_gpt.py").read_bytes(), tmp_path / name))
    assert len(losses) == 4
