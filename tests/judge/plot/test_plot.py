"""Tests of replay and plot."""

import subprocess

import pytest

from judge.logs.read import parse_log, read_logs
from judge.plot import curves
from judge.plot import plot
from tests.leaderboard.makers import (
    FIELD,
    LINE,
    SMI,
    everything,
    heading,
    is_png,
    judged,
    make_runs,
    our_log,
    run,
)


# -----------------------------------------------------------------------------
# Replay


@pytest.mark.parametrize("source", ["x = 1\r\n\r\ny = 2\r\n", "\n\n# ü\n\n\n", f"'{LINE}'\n# {LINE}"])
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

    recipe = "".join(heading(name) + text for name, text in sources.items())
    runs = make_runs(tmp_path / "runs", source=recipe)
    path = min(runs.glob("*.txt"), key=lambda path: parse_log(path).hyperparameters["seed"])
    log = parse_log(path)
    assert log.sources == [(name, text.encode()) for name, text in sources.items()]
    assert judged(runs).reasons == []

    # All files come back, and the printed command runs them
    done = run("replay", path, "-o", "my old", cwd=tmp_path)
    assert everything(tmp_path / "my old") == dict(log.sources)
    _, command = done.stdout.decode().split(": ")
    options = "--track tiny --seed 0 --val_tokens 327680 --batch_tokens 4096 --target_val_loss 1.5"
    assert command.endswith(f" 'my old/recipes/mine.py' {options}\n")
    ran = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True)
    assert ran.stdout == b"hello\n", ran.stderr.decode()
    again = run("replay", path, "-o", "my old", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == b"error: my old exists already; choose another name\n"


def test_the_command_uses_as_many_gpus_as_the_run(tmp_path):
    path = our_log(tmp_path / "a.txt", machine=SMI + "\n8 processes on cuda")
    done = run("replay", path, "-o", "old", cwd=tmp_path)
    words = " -m torch.distributed.run --standalone --nproc_per_node=8 old/train_gpt.py --track tiny"
    assert words in done.stdout.decode()


@pytest.mark.parametrize(
    "name, fault",
    [
        ("a/../../x.py", "a source named {}, outside of the folder"),
        ("/tmp/x.py", "a source named {}, outside of the folder"),
        ("train_gpt.py", "several sources named {}"),
        ("a/../train_gpt.py", "several sources named {}"),
        ("train_gpt.py/x.py", "several sources named {}"),
    ],
)
def test_replay_writes_each_source_inside_of_its_folder(tmp_path, name, fault):
    """Names come from a log, perhaps a stranger's."""
    path = our_log(tmp_path / "a.txt", source=f"x = 1\n{heading(name)}y = 2\n")
    done = run("replay", path, "-o", tmp_path / "old")
    assert done.returncode == 2
    assert done.stderr.decode().endswith(f"a.txt: contains {fault.format(name)}\n")
    assert list(everything(tmp_path)) == ["a.txt"]


# -----------------------------------------------------------------------------
# Plots


def test_curve(tmp_path):
    losses = [1.48, 1.5, 1.46]
    times = [100_000, 110_000, 120_000]
    logs = read_logs([make_runs(tmp_path / "runs", losses, times)])
    for x, last in [("step", 600), ("time", 110)]:
        curve = curves.curve(logs, x)
        assert len(curve.x) == 13
        assert curve.x[0] == 0
        assert curve.x[-1] == pytest.approx(last)
        assert curve.mean[-1] == pytest.approx(1.48)
        assert curve.spread[-1] == pytest.approx(0.02)
    # A curve has only the steps that all runs share, and losses that are finite
    del logs[0].validations[2]
    logs[1].validations[3].val_loss = float("nan")
    assert len(curves.curve(logs, "step").x) == 11


@pytest.fixture
def figures(monkeypatch):
    """The figures that would be saved."""
    found = []
    monkeypatch.setattr(curves, "save_figure", lambda figure, path: found.append(figure))
    yield found
    for figure in found:
        curves.plt.close(figure)


def test_what_is_drawn(tmp_path, figures):
    make_runs(tmp_path / "a b")
    one = make_runs(tmp_path / "other", losses=(1.51,))
    groups = plot.read_groups([str(tmp_path / "a b"), f"_$\\frac$={one}"])
    curves.plot_curves(groups, tmp_path / "x.png", "step", target=1.4)
    figures[0].savefig(tmp_path / "x.png")  # draws the labels as they are
    (legend,) = figures[0].legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["a b: 1.4885 ± 0.0021, 4 runs", "_$\\frac$: 1.5100", "target: 1.4"]
    whole, end = figures[0].axes
    assert [len(line.get_xdata()) for line in whole.lines] == [13, 13, 2]
    band = whole.collections[0].get_paths()[0].vertices
    assert max(y for x, y in band if x == 600) == pytest.approx(1.4885 + 0.0021, abs=1e-4)
    assert whole.get_ylim()[0] < 1.4
    assert end.get_xlim()[0] == 510  # the last 15%


def test_equal_names(tmp_path, monkeypatch):
    """Folders and files of one name are apart, unless they share a given label."""
    monkeypatch.chdir(tmp_path)
    for side in "ab":
        our_log(tmp_path / side / "x.txt")
        our_log(tmp_path / side / "logs" / "y.txt")
    for words, labels in [
        (["a/logs", "b/logs"], ["logs", "b/logs"]),
        (["a/x.txt", "b/x.txt"], ["x", "b/x.txt"]),
        (["L=a/logs", "L=b/logs"], ["L"]),
    ]:
        assert list(plot.read_groups(words)) == labels


def test_plot_command(tmp_path):
    make_runs(tmp_path / "a b")
    done = run("plot", "a b", "-o", "out.png", "--x", "time", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert is_png(tmp_path / "out.png")
    assert run("plot", "a b", "-o", "out.pdf", cwd=tmp_path).returncode == 2
    assert b"its folder doesn't exist" in run("plot", "a b", "-o", "no/out.png", cwd=tmp_path).stderr
    assert run("plot", f"{'x' * 300}=a b", "-o", "out.png", cwd=tmp_path).returncode == 0
    # Runs with a single validation, or without
    text = FIELD["more digits, times in seconds, other numbers in between, GPUs in one line"][0]
    only_final = text.replace("step:0/3200", "nothing")
    (tmp_path / "b.txt").write_text(only_final)
    assert run("plot", "b.txt", "-o", "out.png", cwd=tmp_path).returncode == 0
    (tmp_path / "c.txt").write_text(only_final.replace("val_", ""))
    assert b"no validation" in run("plot", "c.txt", "-o", "out.png", cwd=tmp_path).stderr
