"""
Damaged and mixed logs, generated, through every command that reads logs: each is refused by name, or told
apart, or has the numbers of the undamaged log.
"""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from judge.runs import make as compare_runs
from judge.plot.curves import curve
from judge.plot import plot
from judge.commands import UserError
from judge.plot.plot import read_groups
from judge.settings import Settings
from tests.leaderboard.makers import SMI, SOURCE, cpu, our_log, run, unwrapped

COMPARE = ["compare", "--base_logs", "base", "--idea_logs", "idea"]
PLOT = ["plot", "idea", "-o", "o.png"]
VERIFY = ["verify", "idea"]
OPTIMIZATION = ["verify", "--rule", "optimization", "idea"]
VALIDATED = {"val_tokens": 4096, "val_seq_len": 512, "val_files": "b", "target_val_loss": 1.4}
SETTINGS = {"muon_lr": 0.1, "batch_tokens": 8192, "num_iterations": 700, "new_idea": True}
LAST = "step:600/600 val_loss:1.4900 train_time:100000ms step_avg:166.67ms"
AGAIN = f"{cpu('Intel Xeon', 8)}\nresume: from step 200, on 1 processes"
TORCH = f"{cpu()}\nRunning PyTorch 2.14.0 compiled\nresume: from step 200, on 1 processes"


def end(new: str):
    """Replaces the last validation."""
    return lambda text: text.replace(LAST, new)


def below(line: str):
    return lambda text: f"{text}{line}\n"


def lines(pattern: str, new: str):
    """Changes the lines of the run."""

    def changed(text: str) -> str:
        first = text.index("step:0/")
        return text[:first] + re.sub(pattern, new, text[first:], flags=re.MULTILINE)

    return changed


# No command may use this log
BROKEN = {
    "cut in a line": lambda text: text[:-500],
    "cut in the last number": lambda text: text[: text.index(LAST) + 25],
    "a bar cuts the last number": end(LAST[:25] + "\r 51%|#####"),
    "nan": end(LAST.replace("1.4900", "nan")),
    "inf": end(LAST.replace("1.4900", "inf")),
    "a tensor": end(LAST.replace("1.4900", "tensor(1.4900)")),
    "percent": end(LAST.replace("1.4900", "1.4900%")),
    "decimal comma": lines(r"val_loss:(\d)\.", r"val_loss:\1,"),
    "only step 0": lambda text: text[: text.index("step:100/")],
    "step 0 and bars": lines(r"^(step:[1-9].*)\n", r" 51%|## \1\r"),
    "zero bytes": below("\0\0"),
    "a second loss": below(LAST.replace("1.4900", "1.4800")),
    "a mean": below("mean val_loss: 1.4950"),
    "a rounded model": below("final_int8_roundtrip_exact val_loss:1.50269931 val_bpb:2.1"),
    "a moving average": lines(r"val_loss:(\S+)", r"val_loss:\1 val_ema_loss:1.4850"),
    "a step comes again": below("step:300/600 val_loss:1.7000 train_time:1ms step_avg:1ms"),
}
# The log is not of the training of the others
OTHER = {name: {name: value} for name, value in (VALIDATED | SETTINGS).items()} | {
    "steps": {"steps": 500},
    "uncompiled": {"machine": cpu(compiler="Compiler: g++; flags: -; model compiled: no\n")},
}
# The times are of another machine, or of two
MACHINES = {
    "CPU": {"machine": cpu("Intel Xeon", 8)},
    "GPU": {"machine": SMI},
    "resumed elsewhere": {"extra": AGAIN},
    "resumed with another PyTorch": {"extra": TORCH},
}
# The log is read as if it were undamaged
SAME = {
    "a space": lines("val_loss:", "val_loss: "),
    "equal signs": lines("val_loss:", "val_loss="),
    "bars of a table": lines("val_loss:", "| val loss | "),
    "quotes": lines("val_loss:", '"val_loss": '),
    "a label": lines(r"^step:(\d+)/600 val", r"Step \1/600: val"),
    "colours": lines("^(step:.*) val_loss:(.*?) ", "\x1b[1;32m\\1 val_loss:\x1b[0m\\2\x1b[0m "),
    "times": lines("^step", "[2026-11-28 04:02:22] step"),
    "logging": lines("^step", "2026-11-28 04:02:22,123 - __main__ - INFO - step"),
    "Hydra": lines("^step", "[2026-11-28 04:02:22,123][my.train][INFO] - step"),
    "Docker": lines("^step", "2026-11-28T04:02:22.123456Z step"),
    "ranks": lines("^step", "[rank0]: step"),
    "carriage returns": lines("\n(?=step)", "\r"),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "bars": lines("^step", " 51%|##   | 1/2\r         \rstep"),
    "PowerShell": lambda text: text.encode("utf-16"),
    "blank lines": lines("\n", "\n\n"),
    "the same loss again": below(LAST),
    "the same loss again, rounded": below("step:600/600 val_loss:1.5 in the end"),
    "what looks like a date": below("started: 28-11-2026 12:00:00"),
    "the same loss in words": below("done: val_loss 1.49 after 100 s"),
    "JSON": lines(r"^step:(\d+)/(\d+) val_loss:(\S+).*", r'{"val_loss": \3, "step": \1}'),
}


def call(*words):
    return run(*words, cwd=Path.cwd())


def write(side: str, i: int, **settings) -> Path:
    facts = dict(loss=1.49, seed=i, time_ms=100_000 + i, val_seq_len=256, val_files="a", muon_lr=0.05)
    return our_log(Path(side, f"{i}.txt"), **facts | settings)


@pytest.fixture
def sides(tmp_path, monkeypatch):
    """Three runs of a base, and of an idea. Nothing is drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        plot, "plot_curves", lambda groups, *more: [curve(g, "step") for g in groups.values()]
    )
    for i in range(3):
        write("base", i, loss=1.495 + i / 1000)
        write("idea", i, loss=1.490 - i / 1000)


@pytest.fixture(params=["ours", "another program's"])
def damaged(request, sides):
    """A log of the idea. Other programs' logs have no settings, and no seed."""
    path = Path("idea/0.txt")
    if request.param != "ours":
        for file in [*Path("base").iterdir(), *Path("idea").iterdir()]:
            file.write_text(re.sub("hyperparameters: .*\n", "", file.read_text()))
    return path


def answer() -> tuple:
    """What compare says: the losses, and the test's p-value."""
    assert call(*COMPARE, "--json", "o.json", "--target", "1.5").returncode == 0
    found = json.loads(Path("o.json").read_text())
    return [run["val_loss"] for run in found["runs"]["idea"]], found["ideas"][0]["p"]


def refuses(*words, name: str = "0") -> bool:
    """Whether a command says in one line that it can't use this log, or that the runs are no record."""
    done = call(*words)
    if done.returncode == 1:
        reasons = done.stdout.decode().partition("\nNOT VALID\n")[2]
    else:
        reasons = done.stderr.decode().rpartition("error: ")[2]
        assert reasons.count("\n") == (done.returncode == 2)
    return re.search(rf"\b({name})\b", reasons) is not None


def collected(path: Path):
    """What compare and screen take from this log: that of a command, and a kept run."""
    folder = Path("worker/copy/logs")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.txt").write_bytes(path.read_bytes())
    variant = SimpleNamespace(name="idea", command="x", identity={"files": {}}, project=Settings())
    Path("worker/console.txt").touch()
    worker = SimpleNamespace(variant=variant, several=False, seeds=[0], folder=Path("worker"))
    kept = compare_runs.complete_log(path, Settings())
    return kept, compare_runs.log_of_command(worker)


def plot_mixes(*names):
    """Whether plot takes some of these logs of the folder idea and others of it for one training."""
    if call(*PLOT).returncode == 2:
        return False
    groups = read_groups(["idea"]).values()
    return any(len({log.path.name in names for log in logs}) == 2 for logs in groups)


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_logs(damaged, damage):
    text = damaged.read_text()
    accepted = call(*OPTIMIZATION).stdout.partition(b"val_loss at step")[2]
    damaged.write_text(BROKEN[damage](text))
    assert damaged.read_text() != text
    for words in (COMPARE, VERIFY):
        assert refuses(*words), words
    assert not plot_mixes("0.txt")
    assert refuses(*OPTIMIZATION) or call(*OPTIMIZATION).stdout.endswith(accepted)
    with pytest.raises(UserError):
        collected(damaged)
    done = call("replay", damaged)
    assert done.stdout == SOURCE.encode() or done.returncode == 2 and b"idea/0.txt" in done.stderr


@pytest.mark.parametrize("name", OTHER)
def test_logs_of_another_training(sides, name):
    for i in range(3):
        for words in (COMPARE, VERIFY, OPTIMIZATION):
            if 0 < i < 3:
                assert refuses(*words, name="0|1|2"), words
        assert not plot_mixes(*(f"{k}.txt" for k in range(i)))
        write("idea", i, loss=1.490 - i / 1000, **OTHER[name])
    for words in (COMPARE, [*VERIFY, "--against", "base"], ["plot", "base", *PLOT[1:]]):
        done = call(*words)
        found = "can't be compared: " in unwrapped(done.stdout + done.stderr)
        assert found == (name not in ("steps", *SETTINGS)), words


@pytest.mark.parametrize("name", MACHINES)
def test_logs_of_other_machines(sides, name):
    write("idea", 0, **MACHINES[name])
    assert "Times aren't compared, because the runs were on" in unwrapped(call(*COMPARE).stdout)
    assert refuses(*VERIFY)
    assert refuses(*PLOT, "--x", "time")
    assert call(*PLOT).returncode == call(*OPTIMIZATION, "--against", "base").returncode == 0
    for i in range(3):  # labels may be of different machines, and share a run
        write("idea", i, **MACHINES[name])
    assert call("plot", "base", "idea/0.txt", *PLOT[1:], "--x", "time").returncode == 0


@pytest.mark.parametrize("change", SAME)
def test_logs_that_look_different(damaged, change):
    """A copy of one is the same run."""
    expected = answer()
    text = damaged.read_text()
    changed = SAME[change](text)
    damaged.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    assert damaged.read_bytes() != text.encode()
    assert answer() == expected
    kept, log = collected(damaged)
    assert str(log.end) == str(kept.end)
    Path("idea/config.txt").write_text("no log\n")
    assert answer() == expected
    if change == "JSON":
        return  # these lines don't have the times, so they could be of a repetition
    damaged.rename("idea/copy.txt")
    damaged.write_text(text)
    for words in (COMPARE, OPTIMIZATION):
        assert refuses(*words, name="copy"), words
    assert not plot_mixes("copy.txt")
    Path("base/copy.txt").write_bytes(Path("idea/copy.txt").read_bytes())
    Path("idea/copy.txt").unlink()
    assert refuses(*COMPARE, name="0|copy")


def test_seeds_are_those_in_the_logs(sides):
    """Also if the clock goes back. The newest log may still grow."""
    for i in range(3):
        write("worker/copy/logs", i).rename(f"worker/copy/logs/{9 - i}.txt")
        os.utime(f"worker/copy/logs/{9 - i}.txt", (0, 9 - i))
    variant = SimpleNamespace(identity={"files": {}}, project=Settings())
    worker = SimpleNamespace(variant=variant, several=True, seeds=[0, 1, 2], folder=Path("worker"))
    for status, seeds in ((0, [0, 1, 2]), (None, [0, 1])):
        logs = compare_runs.complete_logs(worker, status)
        assert [log.hyperparameters["seed"] for log in logs] == seeds
