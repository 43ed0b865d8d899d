"""The page of ideas: it is what the kept results say, and the patches of its rows apply to the script as it is."""

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

CURRENT = {
    name: idea for name, idea in idea_pages.read_ideas(idea_pages.FOLDER).items() if idea["current"]
}
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
    """What `compare --json` writes, as far as the page reads it."""
    runs = {
        name: [dict(path="/a/b.txt", seed=i, val_loss=1.5, step_avg_ms=70.0) for i in range(5)]
        for name in ["base", *(e["name"] for e in effects)]
    }
    path.write_text(
        json.dumps(
            dict(
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
        )
    )
    return path


@pytest.fixture
def folder(tmp_path):
    for i, name in enumerate(["b", "a", "c", "d"]):
        (tmp_path / "ideas" / name).mkdir(parents=True)
        part = "gelu" if name in "cd" else f"part {name}"
        (tmp_path / "ideas" / name / "idea.json").write_text(
            json.dumps(META | dict(part=part, rank=i))
        )
    return tmp_path / "ideas"


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
    # Holm over all rows: 1e-5 x 4, 1e-4 x 3, 0.002 x 2, 0.5 x 1
    assert [row.split(" | ")[5] for row in rows] == ["0.0040", "0.0003", "4.0e-05", "0.5000"]
    assert [row.split(" | ")[8].strip(" |") for row in rows] == [
        "disagrees",
        "agrees",
        "agrees",
        "not seen",
    ]
    # of the two ways to do without the part "gelu", the better one, d, is not seen
    assert "\n4 of 4 changes to the recipe were measured" in text
    assert "**helps too: 1, not seen: 1, hurts: 1**" in text
    assert "/a/b.txt" not in (folder / "a" / "result.json").read_text()
    (folder / "NOTES.md").write_text("By hand.\n")
    text = idea_pages.page(folder)
    assert "\n\nBy hand.\n\n## Columns of the tables\n\n- " in text
    assert "\n\n## Parts of the recipe\n\n| part |" in text


@pytest.mark.parametrize(
    "interval,adds,verdict",
    [
        ((0.02, 0.1), False, "agrees (time)"),
        ((-0.1, -0.02), False, "disagrees (time)"),
        ((-0.02, 0.1), False, "not seen (time)"),
        ((0.02, 0.1), True, "disagrees (time)"),
        ((-0.1, -0.02), True, "agrees (time)"),
        (None, True, "not seen (time)"),
    ],
)
def test_what_saves_time_is_judged_by_time(folder, tmp_path, interval, adds, verdict):
    (folder / "a" / "idea.json").write_text(json.dumps(META | dict(adds=adds, saves=True)))
    idea_pages.keep(
        answer(tmp_path / "answer.json", effect("a", -0.02, 1e-9, time_interval=interval)), folder
    )
    text = idea_pages.page(folder)
    assert f"| {verdict} |" in text
    assert sum(f"{words} 1" in text for words in ("helps too:", "not seen:", "hurts:")) == 1


def test_later_ideas_have_a_table_and_a_correction_of_their_own(folder, tmp_path):
    for name in "cd":
        (folder / name / "idea.json").write_text(
            json.dumps(META | dict(part=name, adds=True, later=True, does="gates."))
        )
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
    assert [
        line.split(" | ")[8].strip(" |") for line in later.splitlines() if "(ideas/" in line
    ] == ["agrees", "disagrees"]
    assert "- **c** (section 4, `GPT`): gates." in later.split("## What the later ideas do")[1]
    (folder / "d" / "idea.json").write_text(
        json.dumps(META | dict(part="d", adds=True, later=True, muon=True, entered="muon_d"))
    )
    text = idea_pages.page(folder)
    later, muon = text.split("## Later ideas\n")[1].split("## Later ideas about Muon\n")
    assert "| 0.0040 |" in later  # now the only one of its table
    assert "(ideas/d/)" not in later
    assert "The mini track now uses: none." in later
    assert "The mini track now uses: d (`muon_d`)." in muon
    assert "| 1.0e-05 |" in muon
    assert "(ideas/c/)" not in muon
    assert "- **d** (section" in muon


def test_another_size_has_a_table_of_its_own(folder, tmp_path):
    idea_pages.keep(
        answer(tmp_path / "answer.json", effect("a", 0.02, 1e-4), effect("b", 0.01, 1e-4)), folder
    )
    before = idea_pages.page(folder)
    wide = effect("a", 0.03, 0.0123, step_time=1.5), effect("b", -0.02, 0.3, step_time=0.9)
    idea_pages.keep(
        answer(tmp_path / "answer.json", *wide, effect("c", 0.1, 0.3)), folder, "wide"
    )  # c: not at the track's
    rest, table = idea_pages.page(folder).split("## Other sizes")
    assert before.startswith(rest) and rest != before  # the other tables stay as they are
    rows = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines() if "(ideas/" in line]
    assert [row[3:] for row in sorted(rows)] == [
        ["5", "+0.0300 (+0.0150 to +0.0450)", "1.500", "0.0123", "same"],
        ["5", "-0.0200 (-0.0300 to -0.0100)", "0.900", "0.3000", "opposite"],
    ]


def test_an_idea_that_is_not_described_is_refused(folder, tmp_path):
    with pytest.raises(LogError, match="e: .*idea.json is missing"):
        idea_pages.keep(answer(tmp_path / "answer.json", effect("e", 0.02, 1e-4)), folder)
    (folder / "a" / "idea.json").write_text(
        json.dumps({k: v for k, v in META.items() if k != "options"})
    )
    with pytest.raises(LogError, match="needs `options`, or an idea.patch"):
        idea_pages.page(folder)
    (folder / "a" / "idea.json").write_text(json.dumps(META | dict(does="")))
    with pytest.raises(LogError, match="field does is missing"):
        idea_pages.page(folder)


def test_holm():
    """Against Holm's own procedure: reject from the smallest p on, until one is too large."""
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
        assert {i for i, p in enumerate(idea_pages.holm(ps)) if p <= level} == rejected


def test_a_result_without_an_interval(folder, tmp_path):
    """Fewer than 12 pairs of the new comparison: the difference stands alone."""
    found = effect("a", 0.02, 0.5, difference_interval=[None, None], step_time=None)
    idea_pages.keep(answer(tmp_path / "answer.json", found), folder)
    assert "| +0.0200 |" in idea_pages.page(folder)


def test_measure_compares_and_files(folder, tmp_path, monkeypatch):
    """With compare.py's answer made up: what it is asked for, and that a failure files nothing."""
    for name in "ac":  # c is a patch alone
        (folder / name / "idea.patch").write_text("")
    (folder / "c" / "idea.json").write_text(
        json.dumps({k: v for k, v in META.items() if k != "options"} | dict(rank=2))
    )
    asked = []

    def compared(status, words):
        asked[:] = words
        answer(Path(words[-1]), effect("a", 0.02, 1e-4), effect("b", 0.03, 1e-4))
        return status

    monkeypatch.setattr(idea_pages, "compare", lambda words: compared(1, words))
    assert idea_pages.main(["--measure", "a", "b", "--runs", "8", "--folder", str(folder)]) == 1
    assert not (folder / "a" / "result.json").exists()
    monkeypatch.setattr(idea_pages, "compare", lambda words: compared(0, words))
    assert (
        idea_pages.main(["--measure", "a", "b", "c", "--runs", "8", "--folder", str(folder)]) == 0
    )
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
    assert "helps too: 2" in (tmp_path / "IDEAS.md").read_text()
    assert idea_pages.main(["--size", "wide", "--measure", "a", "--folder", str(folder)]) == 0
    assert asked[:-4] == ["--track", "mini", *idea_pages.RECIPE, *idea_pages.SIZES["wide"][1]]
    assert asked[-3] == f"a={folder}/a/idea.patch --seed 1"
    (folder / "a" / "idea.json").write_text(
        json.dumps(META | dict(current=False))
    )  # its patch need not apply any more
    assert idea_pages.as_idea("a", idea_pages.read_ideas(folder)["a"]) == "a=--seed 1"
    assert (folder / "a" / "wide.json").exists()
    assert "## Other sizes" in (tmp_path / "IDEAS.md").read_text()
    with pytest.raises(UsageError, match="e: no such idea"):
        idea_pages.main(["--measure", "e", "--folder", str(folder)])
    with pytest.raises(SystemExit):
        idea_pages.main(["--runs", "8", "--folder", str(folder)])


def test_the_page_is_current():
    assert (idea_pages.FOLDER.parent / "IDEAS.md").read_text() == idea_pages.page(
        idea_pages.FOLDER
    ), "python tools/idea_pages.py writes it"


@functools.cache
def weights_of(source: bytes, options: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What four steps of mini, with sequences of two blocks, make of the weights."""
    source = source.decode()
    # activations in bf16 on every CPU, and so they must stay: a parameter of shape (1,) in the residual stream, say, turns
    # them into float32, which is another model, and nearly twice as slow
    for old, new in (
        ("    return torch.float32\n", "    return torch.bfloat16\n"),
        ("return F.linear(x, ", "assert x.dtype == torch.bfloat16\n        return F.linear(x, "),
        ("    book.result()", "    save_model(Path('weights'), model, hp)\n    book.result()"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "train_gpt.py").write_text(source)
        for part, size in (("train", 2400), ("val", 300)):
            write_shard(folder / f"{part}.bin", random_tokens(size, seed=0))
        settings = dict(
            train_files="train.bin",
            val_files="val.bin",
            val_tokens=256,
            val_seq_len=256,
            batch_tokens=512,
            train_seq_len=256,
            num_iterations=4,
            warmup_steps=0,
        )  # of mini: patches count on its layers and heads
        words = [f"--{k}={v}" for k, v in settings.items()]
        ran = run_forked(
            ["--track", "mini", *words, *options], folder, script=folder / "train_gpt.py"
        )
        assert ran.returncode == 0, ran.stderr
        assert "step:4/4 val_loss:" in ran.stdout
        return safetensors.torch.load_file(folder / "weights")


@pytest.mark.parametrize(
    "name",
    {idea["patch"]: name for name, idea in CURRENT.items() if idea["patch"].exists()}.values(),
)
def test_patches_of_current_ideas_apply_and_train(name):
    """And train something else than the script: a patch that was refreshed may have lost what it was for."""
    source = SCRIPT.read_bytes()
    idea = compare_sources.read_variant(idea_pages.as_idea(name, CURRENT[name]), source, [])
    pairs = zip(idea.options[::2], idea.options[1::2])
    known = [
        word for pair in pairs if pair[0][2:] in vars(TRACKS["mini"]) for word in pair
    ]  # the others are the patch's
    changed, base = weights_of(idea.source, tuple(idea.options)), weights_of(source, tuple(known))
    assert changed.keys() != base.keys() or any(
        not torch.equal(t, base[key]) for key, t in changed.items()
    )


def test_options_of_current_ideas_change_something(tmp_path):
    """Against the same source without them. Forked, as each new interpreter would import torch for seconds."""
    source, track = SCRIPT.read_bytes(), ["--track", "mini"]
    made = [
        compare_sources.read_variant(idea_pages.as_idea(name, idea), source, track)
        for name, idea in CURRENT.items()
        if "options" in idea
    ]
    start, script = b"    status = main(sys.argv[1:])\n", tmp_path / "train_gpt.py"
    say = b"    hp = parse_arguments(sys.argv[1:])[1]\n    sys.exit(check_hyperparameters(hp, 1) or print(hp))\n"

    @functools.cache
    def settings(source, options):
        assert source.count(start) == 1
        script.write_bytes(source.replace(start, say))
        ran = run_forked(options, tmp_path, script=script)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert made
    for variant in made:
        changed = settings(variant.source, tuple(variant.options))
        assert "Hyperparameters(track='mini'" in changed and changed != settings(
            variant.source, tuple(track)
        ), variant.name
