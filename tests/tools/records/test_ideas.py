"""
Tests for tools/idea_pages.py.

The page of ideas must match the results in the repository. Every patch must apply to the commit that it
was made for, or to the current training script.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from tools.records import idea_pages
from tools.compare import sources as compare_sources
from tools.common import LogError, UsageError
from tests.util import SCRIPT, random_tokens, read_log, run_forked, val_losses, write_shard

IDEAS = idea_pages.read_ideas(idea_pages.FOLDER)
META = dict(
    part="soft-cap",
    change="none",
    does="caps.",
    records="9",
    field="10 to 8 min",
)


def describe(folder, name, **fields):
    """Writes the files of one idea. Its idea.json is META with these fields changed."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "idea.json").write_text(json.dumps(META | fields))
    (folder / name / "idea.patch").write_text("")


def idea_rows(text):
    """The rows of a table that are about ideas, each as a list of its columns."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "(ideas/" in line]
    return [[column.strip(" |") for column in line.split(" | ")] for line in lines]


@pytest.fixture
def folder(tmp_path):
    """A folder of four ideas. c and d are two ways to do without the same part."""
    ideas = tmp_path / "ideas"
    parts = dict(b="part b", a="part a", c="gelu", d="gelu")
    for name, part in parts.items():
        describe(ideas, name, part=part)
    return ideas


def test_a_screen_without_steps_shows_losses(folder):
    """With two blocks, a screen may have too few runs of the base to convert losses into steps."""
    ranked = [("b", -0.004, "undecided"), ("a", 0.0125, "hurts")]
    factors = []
    for name, difference, verdict in ranked:
        effect = dict(difference=difference, half_width=0.005, verdict=verdict)
        effect |= dict(steps=None, steps_interval=None, patch=f"{idea_pages.PATCHES}{name}/idea.patch")
        factors.append(effect)
    facts = dict(seeds=[1, 2], dtype="float32", torch="2.13", machines=["a CPU"], sd=0.003, until=0.01)
    describe(folder, "a", field_steps=-2.0)  # can't be compared with a loss
    (folder.parent / "screens" / "s").mkdir(parents=True)
    result = folder.parent / "screens" / "s" / "result.json"
    result.write_text(json.dumps([dict(facts, factors=factors)]))
    text = idea_pages.page(folder)
    assert "| idea | change | loss | 99% interval |" in text
    rows = {row[0]: row[2:5] + row[6:7] for row in idea_rows(text) if len(row) == 7}
    assert list(rows.values()) == [
        ["-0.0040", "-0.0090 to +0.0010", "undecided", "not comparable"],
        ["+0.0125", "+0.0075 to +0.0175", "hurts", "not comparable"],
    ]


def test_an_idea_that_is_not_described_is_refused(folder):
    (folder / "a" / "idea.patch").unlink()
    with pytest.raises(LogError, match="a/idea.json: there is no idea.patch"):
        idea_pages.page(folder)
    describe(folder, "a", does="")
    with pytest.raises(LogError, match="field does is missing"):
        idea_pages.page(folder)
    for text in ("{", "[]"):
        (folder / "a" / "idea.json").write_text(text)
        with pytest.raises(UsageError, match="a/idea.json: not "):
            idea_pages.page(folder)


def screen_result(tmp_path, *factors):
    """Writes what `screen.py --json` writes about a screen, as far as the page reads it."""
    found = dict(
        dtype="bfloat16",
        torch="2.13.0",
        machines=["a CPU, 2 cores", "another, 4 cores"],
        seeds=[7, 8],
        until=0.01,
        sd=0.004,
        factors=list(factors),
    )
    folder = tmp_path / "screens" / "first"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps([found, "another group of blocks"]))
    return folder / "result.json"


def factor(idea, difference, steps, low, high, verdict):
    patch = f"records/mini/ideas/{idea}/idea.patch" if idea else ""
    interval = [low, high]
    return dict(patch=patch, difference=difference, steps=steps, steps_interval=interval, verdict=verdict)


def test_measured_ideas_have_figures_and_the_others_are_listed(folder, tmp_path):
    describe(folder, "a", field_steps=-1.5, part="part a", does="gates.", later=True)
    describe(folder, "b", field_steps=-3.1, part="part b")
    describe(folder, "e", part="part e", does="smears.", later=True)
    a_patch_that_is_no_idea = factor("", 0.001, 0.007, -0.016, 0.031, "undecided")
    a_patch_that_is_no_idea["patch"] = "records/mini/screens/first/constant.patch"
    screen_result(
        tmp_path,
        factor("a", 0.001, 0.007, -0.016, 0.031, "undecided"),
        factor("b", -0.01, -0.07, -0.09, -0.032, "helps"),
        factor("d", 0.002, 0.014, -0.005, 0.04, "not worth it"),
        factor("", 0.002, 0.014, -0.005, 0.04, "undecided"),  # a setting
        a_patch_that_is_no_idea,
    )
    assert idea_pages.main(["--folder", str(folder)]) == 0
    text = (tmp_path / "IDEAS.md").read_text()
    measured, others = text.split("\n## Not in a screen yet\n")
    rows = idea_rows(measured)
    assert [re.search(r"ideas/(\w)/", row[0])[1] for row in rows] == ["b", "a", "d"]  # by effect
    assert rows[0][2:5] == ["-7.0%", "-9.0% to -3.2%", "helps"]
    # -3.1% is above the interval, -1.5% is inside, and d has no figure
    assert [row[-1] for row in rows] == ["excluded", "inside", "not comparable"]
    assert [row[4] for row in rows] == ["helps", "undecided", "not worth it"]
    words = " ".join(measured.split())
    assert "3 ideas, each off or on, in 32 combinations. 64 runs with seeds 7, 8, in bfloat16" in words
    assert "with PyTorch 2.13.0, on a CPU, 2 cores, and another, 4 cores. A run's" in words
    assert "- **part a**: gates.\n" in measured
    assert "smears." not in text
    later, recipe = others.split("Parts of the recipe, removed or replaced:")
    assert [row[0] for row in idea_rows(later)] == ["[part e](ideas/e/)"]
    assert [row[0] for row in idea_rows(recipe)] == ["[gelu](ideas/c/)"]


def test_two_ideas_about_the_same_part_are_described_once(folder, tmp_path):
    """c and d are about the same part. Only a different text is a second entry."""
    measured = [factor(name, 0.001, 0.007, -0.016, 0.031, "undecided") for name in "bcd"]
    screen_result(tmp_path, *measured)
    entries = [line for line in idea_pages.page(folder).splitlines() if line.startswith("- **gelu**")]
    assert entries == ["- **gelu**: caps."]
    describe(folder, "d", part="gelu", does="is smooth.")
    entries = [line for line in idea_pages.page(folder).splitlines() if line.startswith("- **gelu**")]
    assert entries == ["- **gelu**: caps.", "- **gelu**: is smooth."]


def test_a_screen_of_an_unknown_idea_or_a_damaged_result_is_refused(folder, tmp_path):
    path = screen_result(tmp_path, factor("nosuch", 0.001, 0.007, -0.016, 0.031, "undecided"))
    with pytest.raises(LogError, match="first: there is no idea nosuch"):
        idea_pages.page(folder)
    for text in ("{", "[]", "[{}]", "3"):
        path.write_text(text)
        with pytest.raises(LogError, match="result.json: not written by screen.py"):
            idea_pages.page(folder)


def test_a_screen_with_one_block_is_refused(folder, tmp_path):
    """It has no intervals."""
    effect = factor("a", 0.001, None, None, None, "undecided")
    effect |= dict(half_width=None, steps_interval=None)
    path = screen_result(tmp_path, effect)
    found, other = json.loads(path.read_text())
    found |= dict(seeds=[7], sd=None)
    path.write_text(json.dumps([found, other]))
    with pytest.raises(LogError, match="result.json: it has one block, so there are no intervals; make more"):
        idea_pages.page(folder)


def test_the_page_is_current():
    page = (idea_pages.FOLDER.parent / "IDEAS.md").read_text()
    hint = "run `python tools/idea_pages.py` to update it"
    assert page == idea_pages.page(idea_pages.FOLDER), hint


def test_patches_apply_to_their_commits(tmp_path):
    """This needs the whole history: a shallow clone fails with a line that says so."""
    for name, idea in IDEAS.items():
        if "commit" not in idea:
            continue
        folder = idea_pages.FOLDER / name
        commit = compare_sources.copy_commit(compare_sources.idea_commit(str(folder)), tmp_path)
        patched = compare_sources.changed(commit, "train_gpt.py", [folder / "idea.patch"])
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
        patched = compare_sources.changed(tree, "train_gpt.py", [idea_pages.FOLDER / name / "idea.patch"])
        losses.add(final_loss((patched / "train_gpt.py").read_bytes(), tmp_path / name))
    assert len(losses) == 4
