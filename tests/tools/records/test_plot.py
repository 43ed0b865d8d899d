"""Tests of replay and plot."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.logs import parse_log, read_logs
from tools.records import pages as record_pages
from tools.records import plot
from tests.tools.records.makers import (
    FIELD,
    LINE,
    SOURCE,
    everything,
    has_reason,
    heading,
    judged,
    make_runs,
    our_log,
    png_size,
    run,
)


@pytest.mark.parametrize(
    "source", [SOURCE, "x = 1", "x = 1\r\n\r\ny = 2\r\n", "\n\n# ü\n\n\n", f"'{LINE}'\n# {LINE}\n"]
)
def test_replay_is_byte_for_byte(tmp_path, source):
    path = our_log(tmp_path / "a.txt", source=source)
    assert run("replay", path).stdout == source.encode()
    assert run("replay", "a.txt", "-o", "old", cwd=tmp_path).returncode == 0
    assert (tmp_path / "old/train_gpt.py").read_bytes() == source.encode()


def test_a_recipe_has_two_sources(tmp_path):
    """The log of a recipe begins with the heading of the recipe, then of train_gpt.py."""
    sources = {
        "recipes/mine.py": "from train_gpt import HELLO\nval_tokens = 327_680\nprint(HELLO)\n",
        "train_gpt.py": "HELLO = 'hello'\n",
    }

    def recipe(sources):
        return "".join(heading(name) + text for name, text in sources.items())

    runs = make_runs(tmp_path / "runs", source=recipe(sources))
    path = min(runs.glob("*.txt"), key=lambda path: parse_log(path).hyperparameters["seed"])
    log = parse_log(path)
    assert log.sources == [(name, text.encode()) for name, text in sources.items()]
    assert judged(runs).reasons == []

    # All files come back, and the printed command runs them
    done = run("replay", path, "-o", "my old", cwd=tmp_path)
    assert everything(tmp_path / "my old") == dict(log.sources)
    _, command = done.stdout.decode().split(": ")
    assert command == "PYTHONPATH='my old' python 'my old/recipes/mine.py' --track tiny --seed 0\n"
    variables = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ran = subprocess.run(command, shell=True, cwd=tmp_path, env=variables, capture_output=True)
    assert ran.stdout == b"hello\n", ran.stderr.decode()
    again = run("replay", path, "-o", "my old", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == b"error: my old isn't empty; choose a new folder\n"

    # Another second source is seen, also if only its name differs
    changed = recipe(sources | {"train_gpt.py": "HELLO = 'bye'\n"})
    renamed = recipe(sources).replace("# train_gpt.py", "# core.py")
    for source, added in [(changed, ["+HELLO = 'bye'"]), (renamed, ["+HELLO = 'hello'"])]:
        other = our_log(tmp_path / "other.txt", seed=9, source=source)
        assert has_reason("the logs have 2 different sources", runs, other)
        lines = run("replay", path, "--diff", other).stdout.decode().splitlines()
        assert lines[0] == f"--- {path.name}: train_gpt.py"
        assert [line for line in lines if re.match(r"\+[^+]", line)] == added


def test_replay_writes_nothing_outside_of_its_folder(tmp_path):
    """Nor does it write over a file: names come from a log, perhaps a stranger's."""
    (tmp_path / "in").mkdir()
    kept = tmp_path / "x.py"
    kept.write_bytes(b"mine")
    for name in ("../x.py", "a/../../x.py", "../new.py", str(kept), str(tmp_path / "new.py")):
        path = our_log(tmp_path / "in/a.txt", source=f"x = 1\n{heading(name)}y = 2\n")
        before = everything(tmp_path)
        done = run("replay", path, "-o", tmp_path / "old")
        assert done.returncode == 2
        assert done.stderr.decode() == (
            f"error: {path}: contains a source named {name}, outside of the folder\n"
        )
        assert everything(tmp_path) == before
    for number, name in enumerate(("train_gpt.py", "./train_gpt.py", "train_gpt.py/x.py", ".")):
        path = our_log(tmp_path / "in/a.txt", source=f"x = 1\n{heading(name)}y = 2\n")
        folder = tmp_path / f"old_{number}"
        done = run("replay", path, "-o", folder)
        assert done.returncode == 2
        assert b"cannot write" in done.stderr
        assert everything(folder) == {"train_gpt.py": b"x = 1\n"}


def test_replay_diff(tmp_path):
    changed = SOURCE.replace("import torch", "import torch as t")
    a = our_log(tmp_path / "a.txt")
    b = our_log(tmp_path / "b.txt", source=changed)
    lines = run("replay", a, "--diff", b).stdout.decode().splitlines()
    assert lines[:2] == ["--- a.txt: train_gpt.py", "+++ b.txt: train_gpt.py"]
    assert "-import torch" in lines
    assert "+import torch as t" in lines
    same = run("replay", a, "--diff", a)
    assert same.returncode == 0
    assert same.stdout == b""
    assert b"same" in same.stderr
    unwritable = run("replay", a, "-o", a / "old")
    assert unwritable.returncode == 2
    assert b"cannot write" in unwritable.stderr


def test_curve(tmp_path):
    losses = [1.48, 1.5, 1.46]
    times = [100_000, 110_000, 120_000]
    logs, _ = read_logs([make_runs(tmp_path / "runs", losses, times)])
    for x, last in [("step", 600), ("time", 110), ("tokens", 600 * 4096 / 1e6)]:
        curve = plot.curve(logs, x)
        assert len(curve.x) == 13
        assert curve.x[0] == 0
        assert curve.x[-1] == pytest.approx(last)
        assert curve.mean[-1] == pytest.approx(1.48)
        assert curve.spread[-1] == pytest.approx(0.02)
    del logs[0].validations[2]  # a curve has only the steps that all runs share
    assert len(plot.curve(logs, "step").x) == 12


def test_plot_command(tmp_path):
    make_runs(tmp_path / "a b")
    make_runs(tmp_path / "other", losses=(1.51, 1.52))
    choices = [
        [],
        ["--smooth"],
        ["--x", "time", "--smooth"],
        ["--x", "tokens"],
        ["--target", "1.4"],
    ]
    for options in choices:
        done = run("plot", "a b", "Mine=other", "-o", "out.png", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        width, height = png_size(tmp_path / "out.png")
        assert width == 1200
        assert 500 < height < 900
        (tmp_path / "out.png").unlink()
    groups = plot.read_groups([str(tmp_path / "a b"), f"Mine={tmp_path / 'other'}"])
    assert {label: len(logs) for label, logs in groups.items()} == {"a b": 4, "Mine": 2}
    assert run("plot", "other", "-o", "out.pdf", cwd=tmp_path).returncode == 2
    assert run("plot", "other", "-o", "no/out.png", cwd=tmp_path).returncode == 2
    for target in ("nan", "inf", "-inf"):
        done = run("plot", "other", "-o", "out.png", f"--target={target}", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.decode().endswith(f"error: --target {target}: must be a finite number\n")
    assert not list(tmp_path.glob("*out*"))


def test_plot_of_unusual_runs(tmp_path):
    text = FIELD["more digits, times in seconds, other numbers in between, GPUs in one line"][0]
    only_final = text.replace("step:0/3200", "nothing")
    (tmp_path / "b.txt").write_text(only_final)
    assert run("plot", "b.txt", "-o", "out.png", "--smooth", cwd=tmp_path).returncode == 0
    png_size(tmp_path / "out.png")
    (tmp_path / "c.txt").write_text(only_final.replace("val_loss", "loss"))
    assert b"no validation" in run("plot", "c.txt", "-o", "out.png", cwd=tmp_path).stderr


def drawn(patch, draw) -> "plot.plt.Figure":
    """The figure that `draw` would save."""
    figures = []

    def save_figure(figure, path):
        figure.canvas.draw()
        figures.append(figure)

    for module in (plot, record_pages):
        patch.setattr(module, "save_figure", save_figure)
    draw()
    plot.plt.close(figures[0])
    return figures[0]


@pytest.mark.parametrize(
    "times, scale",
    [((5_000, 600_000), "symlog"), ((59_000, 600_000), "symlog"), ((60_000, 600_000), "linear")],
)
def test_times_of_different_magnitude(tmp_path, monkeypatch, times, scale):
    groups = {}
    for t in times:
        path = our_log(tmp_path / f"{t}.txt", time_ms=t)
        groups[str(t)] = [parse_log(path)]

    def curves(x, **options):
        image = tmp_path / "x.png"
        return drawn(monkeypatch, lambda: plot.plot_curves(groups, image, x, **options))

    for x, expected in [("time", scale), ("step", "linear")]:
        figure = curves(x, smooth=True)
        assert [axes.get_xscale() for axes in figure.axes] == [expected, expected]
    if scale == "linear":
        return
    whole = curves("time").axes[0]

    def place(seconds):
        """Where a time is on the axis: 0 is the left edge, 1 the right edge."""
        pixels = whole.transData.transform((seconds, 1))
        return whole.transAxes.inverted().transform(pixels)[0]

    first = times[0] / 6000  # the first validation of the shorter run
    last = times[1] / 1000  # the end of the longer run
    # Equal factors are equally far apart
    decade = place(10 * first) - place(first)
    assert decade == pytest.approx(place(100 * first) - place(10 * first), rel=1e-3)
    # The curves start at the left edge, and the short run gets enough space
    assert place(0) == pytest.approx(0, abs=1e-6)
    assert place(first) > 0.05
    assert place(last) < 1
    assert place(times[0] / 1000) - place(0) > 0.2
    labels = [label.get_text() for label in whole.get_xticklabels()]
    assert labels[0] == "0"
    assert labels[-1] == "100"
    assert float(labels[1]) >= first


def test_leaderboard_within_a_month_counts_records(tmp_path, monkeypatch):
    def figure(*dates):
        records = []
        for n, date in enumerate(dates):
            log = parse_log(our_log(tmp_path / "a.txt", time_ms=90_000 - n))
            folder = tmp_path / f"{date}_R{n}"
            records.append(record_pages.Record(folder, [log], names[n], "", 1.5, False, ""))
        image = tmp_path / "x.png"
        return drawn(monkeypatch, lambda: record_pages.plot_leaderboard(records, image)).axes[0]

    names = [
        "r0",
        "the official model in miniature",
        "a name that is too long to stand in the picture",
    ]
    texts = [
        "#1 r0, 90.0 s",
        f"#2 {names[1]}, 90.0 s",
        "#3 a name that is too long to …, 90.0 s",
    ]
    cases = [
        (["2026-11-21"] * 3, "record, 2026-11-21"),
        (["2026-11-21"], "record, 2026-11-21"),
        (["2026-01-01", "2026-01-31"], "record, 2026-01-01 to 2026-01-31"),  # 30 days apart
    ]
    for dates, label in cases:
        axes = figure(*dates)
        numbers = list(range(1, len(dates) + 1))
        assert list(axes.lines[0].get_xdata()) == numbers
        assert [t.get_text() for t in axes.get_xticklabels()] == [f"#{n}" for n in numbers]
        assert axes.get_xlabel() == label
        assert [t.get_text() for t in axes.texts] == texts[: len(dates)]
    axes = figure("2026-01-01", "2026-02-01")
    assert list(axes.lines[0].get_xdata()) == [
        record_pages.day("2026-01-01"),
        record_pages.day("2026-02-01"),
    ]
