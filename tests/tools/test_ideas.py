"""
Tests for tools/idea_pages.py.

The page of ideas must match the results in the repository. Every patch on the page must still apply
to the training script.
"""

import functools
import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import idea_pages
import compare_sources
from log_parsing import LogError, UsageError
from train_gpt import TRACKS
from util import SCRIPT, random_tokens, run_forked, write_shard

IDEAS = idea_pages.read_ideas(idea_pages.FOLDER)
CURRENT = {name: idea for name, idea in IDEAS.items() if idea["current"]}
PATCHED = {idea["patch"]: name for name, idea in CURRENT.items() if idea["patch"].exists()}
META = dict(
    part="soft-cap",
    change="none",
    does="caps.",
    where="4, `GPT`",
    records="9",
    field="10 to 8 min",
    options="--seed 1",
)


def effect(name, difference, p, **more):
    """The effect of one idea, as `compare --json` writes it."""
    half = abs(difference) / 2
    found = dict(
        name=name,
        n=5,
        loss=1.5 + difference,
        difference=difference,
        p=p,
        steps=difference,
        difference_interval=[difference - half, difference + half],
        step_time=1.0,
        time=None,
        verdict="helps",
        words="it helps",
    )
    return found | more


def answer(path: Path, *effects):
    """Writes the parts of `compare --json`'s output that the page reads."""
    runs = {}
    for name in ["base", *(e["name"] for e in effects)]:
        runs[name] = [
            dict(path="/a/b.txt", seed=i, val_loss=1.5, step_avg_ms=70.0) for i in range(5)
        ]
    found = dict(
        machine="a CPU, 2 cores",
        torch="2.13.0",
        threads=1,
        processes=1,
        jobs=2,
        folder="/x",
        base="base",
        ideas=list(effects),
        runs=runs,
    )
    path.write_text(json.dumps(found))
    return path


def describe(folder, name, **fields):
    """Writes the idea.json of one idea: META with these fields changed. None drops a field."""
    changed = META | fields
    kept = {key: value for key, value in changed.items() if value is not None}
    (folder / name / "idea.json").write_text(json.dumps(kept))


def idea_rows(text):
    """The rows of a table that are about ideas, each as a list of its columns."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "(ideas/" in line]
    return [[column.strip(" |") for column in line.split(" | ")] for line in lines]


@pytest.fixture
def folder(tmp_path):
    """A folder of four ideas. c and d are two ways to do without the same part."""
    ideas = tmp_path / "ideas"
    parts = dict(b="part b", a="part a", c="gelu", d="gelu")
    for rank, (name, part) in enumerate(parts.items()):
        (ideas / name).mkdir(parents=True)
        describe(ideas, name, part=part, rank=rank)
    return ideas


def test_page_says_what_was_measured(folder, tmp_path):
    found = answer(
        tmp_path / "answer.json",
        effect("a", 0.02, 1e-4),
        effect("b", -0.02, 0.0020),
        effect("c", 0.03, 1e-5),
        effect("d", 0.004, 0.5),
    )
    assert idea_pages.main(["--keep", str(found), "--folder", str(folder)]) == 0
    text = (tmp_path / "IDEAS.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "(ideas/" in line]
    assert [re.search(r"ideas/(\w)/", row)[1] for row in rows] == ["b", "a", "c", "d"]  # by rank
    # Holm's correction covers all rows: 1e-5 x 4, 1e-4 x 3, 0.002 x 2, 0.5 x 1
    assert [row.split(" | ")[5] for row in rows] == ["0.0040", "0.0003", "4.0e-05", "0.5000"]
    verdicts = [row.split(" | ")[8].strip(" |") for row in rows]
    assert verdicts == ["hurts", "helps", "helps", "unclear"]
    # c and d both drop the part "gelu". The better one, d, counts, and its effect is unclear.
    assert "\n4 of 4 changes to the recipe were measured" in text
    assert "**helps: 1, unclear: 1, hurts: 1**" in text
    assert "/a/b.txt" not in (folder / "a" / "result.json").read_text()
    (folder / "NOTES.md").write_text("By hand.\n")
    text = idea_pages.page(folder)
    assert "\n\nBy hand.\n\n## Columns of the tables\n\n- " in text
    assert "\n\n## Parts of the recipe\n\n| part |" in text


@pytest.mark.parametrize(
    "interval,adds,verdict",
    [
        ((0.02, 0.1), False, "helps (time)"),
        ((-0.1, -0.02), False, "hurts (time)"),
        ((-0.02, 0.1), False, "unclear (time)"),
        ((0.02, 0.1), True, "hurts (time)"),
        ((-0.1, -0.02), True, "helps (time)"),
        (None, True, "unclear (time)"),
    ],
)
def test_what_saves_time_is_judged_by_time(folder, tmp_path, interval, adds, verdict):
    describe(folder, "a", adds=adds, saves=True)
    measured = effect("a", -0.02, 1e-9, time_interval=interval)
    idea_pages.keep(answer(tmp_path / "answer.json", measured), folder)
    text = idea_pages.page(folder)
    assert f"| {verdict} |" in text
    counted = [words for words in ("helps:", "unclear:", "hurts:") if f"{words} 1" in text]
    assert len(counted) == 1


def test_later_ideas_have_a_table_and_a_correction_of_their_own(folder, tmp_path):
    for name in "cd":
        describe(folder, name, part=name, adds=True, later=True, does="gates.")
    text = idea_pages.page(folder)
    assert text.count("Nothing has been measured yet. 2 changes are ready") == 2
    found = answer(
        tmp_path / "answer.json",
        effect("a", 0.02, 0.004),
        effect("c", -0.03, 0.004),
        effect("d", 0.03, 1e-5),
    )
    idea_pages.keep(found, folder)
    recipe, later = idea_pages.page(folder).split("## Later ideas\n")
    assert "1 of 2 changes" in recipe
    assert "| 0.0040 |" in recipe
    assert "(ideas/c/)" not in recipe
    assert "| 0.0040 |" in later
    assert "| 2.0e-05 |" in later
    assert "(ideas/a/)" not in later
    assert [row[8] for row in idea_rows(later)] == ["helps", "hurts"]
    assert "- **c** (section 4, `GPT`): gates." in later.split("## What the later ideas do")[1]

    describe(folder, "d", part="d", adds=True, later=True, muon=True, entered="muon_d")
    text = idea_pages.page(folder)
    later, muon = text.split("## Later ideas\n")[1].split("## Later ideas about Muon\n")
    assert "| 0.0040 |" in later  # c is now the only measured idea in its table
    assert "(ideas/d/)" not in later
    assert "The mini track now uses none of them." in later
    assert "The mini track now uses d (`muon_d`)." in muon
    assert "| 1.0e-05 |" in muon
    assert "(ideas/c/)" not in muon
    assert "- **d** (section" in muon
    assert "variation of ours" not in muon

    describe(folder, "d", part="d", adds=True, later=True, muon=True, ours=True)
    muon = idea_pages.page(folder).split("## Later ideas about Muon\n")[1]
    assert "\nNot an idea of the speedrun, but a variation of ours: d.\n" in muon


def test_another_size_has_a_table_of_its_own(folder, tmp_path):
    path = tmp_path / "answer.json"
    found = answer(
        path,
        effect("a", 0.02, 1e-4),
        effect("b", 0.01, 1e-4),
    )
    idea_pages.keep(found, folder)
    before = idea_pages.page(folder)
    wide = answer(
        path,
        effect("a", 0.03, 0.0123, step_time=1.5),
        effect("b", -0.02, 0.3, step_time=0.9),
        effect("c", 0.1, 0.3),  # c was not measured at the size of the track
    )
    idea_pages.keep(wide, folder, "wide")
    rest, table = idea_pages.page(folder).split("## Other sizes")
    assert before.startswith(rest)  # the other tables stay as they are
    assert rest != before
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines() if "(ideas/" in line]
    assert [row[3:] for row in sorted(rows)] == [
        ["5", "+0.0300 (+0.0150 to +0.0450)", "1.500", "0.0123", "same"],
        ["5", "-0.0200 (-0.0300 to -0.0100)", "0.900", "0.3000", "opposite"],
    ]


def test_an_idea_that_is_not_described_is_refused(folder, tmp_path):
    with pytest.raises(LogError, match="e: .*idea.json is missing"):
        idea_pages.keep(answer(tmp_path / "answer.json", effect("e", 0.02, 1e-4)), folder)
    describe(folder, "a", options=None)
    with pytest.raises(LogError, match="needs `options`, or an idea.patch"):
        idea_pages.page(folder)
    describe(folder, "a", does="")
    with pytest.raises(LogError, match="field does is missing"):
        idea_pages.page(folder)


def screen_result(tmp_path, *factors):
    """Writes what `screen.py --json` writes about a screen, as far as the page reads it."""
    found = dict(
        dtype="bfloat16",
        torch="2.13.0",
        machines=["a CPU, 2 cores"],
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


def test_a_screen_has_a_table_and_replaces_the_rows_of_its_ideas(folder, tmp_path):
    describe(folder, "a", field_steps=-1.5, part="part a", rank=1)
    describe(folder, "b", field_steps=-3.1, part="part b", rank=0)
    kept = answer(tmp_path / "answer.json", effect("a", 0.02, 1e-4), effect("c", 0.03, 1e-5))
    idea_pages.keep(kept, folder)
    screen_result(
        tmp_path,
        factor("a", 0.001, 0.007, -0.016, 0.031, "undecided"),
        factor("b", -0.01, -0.07, -0.09, -0.032, "helps"),
        factor("d", 0.002, 0.014, -0.005, 0.04, "not worth it"),
        factor("", 0.002, 0.014, -0.005, 0.04, "undecided"),  # a setting
    )
    text = idea_pages.page(folder)
    screened, one_by_one = text.split("\n## Measured one by one\n")
    rows = idea_rows(screened)
    assert [re.search(r"ideas/(\w)/", row[0])[1] for row in rows] == ["b", "a", "d"]  # by effect
    assert rows[0][2:6] == ["-0.0100", "-7.0%", "-9.0% to -3.2%", "helps"]
    # -3.1% is above the interval, -1.5% is inside, and d has no figure
    assert [row[-1] for row in rows] == ["excluded", "inside", "not comparable"]
    assert [row[5] for row in rows] == ["helps", "undecided", "not worth it"]
    assert "3 ideas, each off or on, in 32 combinations with seeds 7 and 8:\n64 runs on a CPU" in screened
    assert "64 runs on a CPU, 2 cores, bfloat16, PyTorch 2.13.0.\n" in screened
    assert [re.search(r"ideas/(\w)/", row[1])[1] for row in idea_rows(one_by_one)] == ["c"]


def test_a_screen_of_an_unknown_idea_or_a_damaged_result_is_refused(folder, tmp_path):
    path = screen_result(tmp_path, factor("nosuch", 0.001, 0.007, -0.016, 0.031, "undecided"))
    with pytest.raises(LogError, match="first: there is no idea nosuch"):
        idea_pages.page(folder)
    for text in ("{", "[]", "[{}]", "3"):
        path.write_text(text)
        with pytest.raises(LogError, match="result.json: not written by screen.py"):
            idea_pages.page(folder)


def test_holm():
    """
    Checks the adjusted p-values against Holm's own procedure.

    The procedure rejects hypotheses from the smallest p upwards, and stops at the first p that is
    too large.
    """
    assert idea_pages.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    rng = np.random.default_rng(0)
    for _ in range(50):
        ps = list(rng.uniform(0, 0.2, 5))
        level = rng.uniform(0.01, 0.3)
        rejected = set()
        for k, i in enumerate(np.argsort(ps)):
            if ps[i] > level / (5 - k):
                break
            rejected.add(i)
        adjusted = idea_pages.holm(ps)
        assert {i for i, p in enumerate(adjusted) if p <= level} == rejected


def test_a_result_without_an_interval(folder, tmp_path):
    """With fewer than 12 pairs there is no interval. The page then shows the difference alone."""
    found = effect("a", 0.02, 0.5, difference_interval=[None, None], step_time=None)
    idea_pages.keep(answer(tmp_path / "answer.json", found), folder)
    assert "| +0.0200 |" in idea_pages.page(folder)


def test_measure_compares_and_files(folder, tmp_path, monkeypatch):
    """
    A fake compare.py returns a made-up answer. The test checks the arguments that it gets.

    If compare.py fails, no result is saved.
    """
    for name in "ac":
        (folder / name / "idea.patch").write_text("")
    describe(folder, "c", options=None, rank=2)  # c has a patch and no options
    asked = []
    status = 1

    def fake_compare(words):
        asked[:] = words
        answer(Path(words[-1]), effect("a", 0.02, 1e-4), effect("b", 0.03, 1e-4))
        return status

    monkeypatch.setattr(idea_pages, "compare", fake_compare)
    rest = ["--runs", "8", "--folder", str(folder)]
    assert idea_pages.main(["--measure", "a", "b", *rest]) == 1
    assert not (folder / "a" / "result.json").exists()
    status = 0
    assert idea_pages.main(["--measure", "a", "b", "c", *rest]) == 0
    assert asked[:-1] == [
        "--track",
        "mini",
        *idea_pages.RECIPE,
        "--runs",
        "8",
        "--idea",
        f"a={folder}/a/idea.patch --seed 1",
        "--idea",
        "b=--seed 1",
        "--idea",
        f"c={folder}/c/idea.patch",
        "--json",
    ]
    assert "helps: 2" in (tmp_path / "IDEAS.md").read_text()
    assert idea_pages.main(["--size", "wide", "--measure", "a", "--folder", str(folder)]) == 0
    assert asked[:-4] == [
        "--track",
        "mini",
        *idea_pages.RECIPE,
        *idea_pages.SIZES["wide"][1],
    ]
    assert asked[-3] == f"a={folder}/a/idea.patch --seed 1"
    describe(folder, "a", current=False)  # the patch of such an idea may be out of date
    assert idea_pages.as_idea("a", idea_pages.read_ideas(folder)["a"]) == "a=--seed 1"
    assert (folder / "a" / "wide.json").exists()
    assert "## Other sizes" in (tmp_path / "IDEAS.md").read_text()
    with pytest.raises(UsageError, match="e: no such idea"):
        idea_pages.main(["--measure", "e", "--folder", str(folder)])
    with pytest.raises(SystemExit):
        idea_pages.main(["--runs", "8", "--folder", str(folder)])


def test_the_page_is_current():
    page = (idea_pages.FOLDER.parent / "IDEAS.md").read_text()
    hint = "run `python tools/idea_pages.py` to update it"
    assert page == idea_pages.page(idea_pages.FOLDER), hint


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

# The activations must be bf16 on every CPU, and a patch must not change that. For example, a
# parameter of shape (1,) in the residual stream turns them into float32. That is a different model,
# and almost twice as slow.
IN_BF16 = {
    "    return torch.float32\n": "    return torch.bfloat16\n",
    "return F.linear(x, ": "assert x.dtype == torch.bfloat16\n        return F.linear(x, ",
    "    book.result()": "    save_model(Path('weights'), model, hp)\n    book.result()",
}


@functools.cache
def weights_of(source: bytes, options: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The weights after four steps of mini, with sequences of two blocks."""
    source = source.decode()
    for old, new in IN_BF16.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        script = folder / "train_gpt.py"
        script.write_text(source)
        for part, size in (("train", 2400), ("val", 300)):
            write_shard(folder / f"{part}.bin", random_tokens(size, seed=0))
        words = [f"--{k}={v}" for k, v in FOUR_STEPS.items()]
        ran = run_forked(["--track", "mini", *words, *options], folder, script=script)
        assert ran.returncode == 0, ran.stderr
        assert "step:4/4 val_loss:" in ran.stdout
        return safetensors.torch.load_file(folder / "weights")


@pytest.mark.parametrize("name", PATCHED.values())
def test_patches_of_current_ideas_apply_and_train(name):
    """
    A patched script must train other weights than the script itself.

    A patch can lose its effect when somebody adapts it to a newer script.
    """
    source = SCRIPT.read_bytes()
    idea = compare_sources.read_variant(idea_pages.as_idea(name, CURRENT[name]), source, [])
    known = []  # options that the script has without the patch
    for option, value in zip(idea.options[::2], idea.options[1::2]):
        if option[2:] in vars(TRACKS["mini"]):
            known += [option, value]
    changed = weights_of(idea.source, tuple(idea.options))
    base = weights_of(source, tuple(known))
    assert changed.keys() != base.keys() or any(
        not torch.equal(t, base[key]) for key, t in changed.items()
    )


PRINT_HYPERPARAMETERS = b"""\
    hp = parse_arguments(sys.argv[1:])[1]
    sys.exit(check_hyperparameters(hp, 1) or print(hp))
"""


def test_options_of_current_ideas_change_something(tmp_path):
    """
    Compares the hyperparameters with and without the options of each idea.

    The script runs in forked processes. A new interpreter would spend seconds on importing torch.
    """
    source = SCRIPT.read_bytes()
    track = ["--track", "mini"]
    variants = [
        compare_sources.read_variant(idea_pages.as_idea(name, idea), source, track)
        for name, idea in CURRENT.items()
        if "options" in idea
    ]
    start = b"    status = main(sys.argv[1:])\n"
    script = tmp_path / "train_gpt.py"

    @functools.cache
    def settings(source, options):
        assert source.count(start) == 1
        script.write_bytes(source.replace(start, PRINT_HYPERPARAMETERS))
        ran = run_forked(options, tmp_path, script=script)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert variants
    for variant in variants:
        changed = settings(variant.source, tuple(variant.options))
        assert "Hyperparameters(track='mini'" in changed, variant.name
        assert changed != settings(variant.source, tuple(track)), variant.name
