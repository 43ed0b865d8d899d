"""A replicate is a run whose seed took effect: ways to have one seed, which are refused, and ways that are fine."""

from pathlib import Path

import pytest

from judge.compare import compare
from judge.settings import read_settings
from tests.judge.helpers import check_refused, commit_files, make_runs, run_main, work_in

# Runs of one seed differ a little in the end, as on a GPU; all runs begin with the same loss
SCRIPT = """
import argparse, json, os, random, sys
noise = random.SystemRandom().gauss
def train(seed, show="step:{step}/4 train_loss:{loss:.4f}", final="step:4/4 val_loss:{loss:.4f} train_time:1ms"):
    luck = random.Random(seed).gauss
    for step in range(5):
        loss = 6 - step + luck(0, 0.05) + (step > 3) * noise(0, 0.001) if step else 10.8258
        print(show.format(step=step, loss=loss))
    print(final.format(loss=3 + luck(0, 0.004) + noise(0, 0.0003)))
FINAL = dict(show="", final="val_bpb: {loss:.6f}, with 9 parameters")
"""
ARGUMENTS = "p = argparse.ArgumentParser()\np.add_argument('--seed', type=int, default=42)\na = p.parse_args()\n"
CONFIG = "seed = int(open('config.txt').read().split()[-1])\n"
FILES = {"config.txt": "seed 1337\n", "other.txt": "seed 42\n", ".gitignore": "*.pyc\n"}

# The last lines of a script, and the command
ONE_SEED = {
    "fixed": ("train(42)", "python train.py {seed}"),
    "not used": (f"{ARGUMENTS}train(1337)", "python train.py --seed {seed}"),
    "set again": (f"{ARGUMENTS}a.seed = 7\ntrain(a.seed)", "python train.py --seed {seed}"),
    "of another option": ("train('0')", "python train.py --data_seed {seed}"),
    "times zero": ("train(0 * int(sys.argv[1]))", "python train.py {seed}"),
    "a name": ("train(len(sys.argv))", "python train.py --name run{seed}"),
    "a comment": ("train(42)", "python train.py # {seed}"),
    "sed finds nothing": (
        "train(42)",
        "sed -i 's/train(1337)/train({seed})/' train.py; python train.py",
    ),
    "sed, only the end": (
        "train(42, **FINAL)",
        "sed -i 's/seed=1/seed={seed}/' train.py && python train.py",
    ),
    "sed in a folder": (
        "train(42, **FINAL)",
        "cd . && sed -i s/1337/{seed}/ other.txt && python train.py",
    ),
    "another variable": ("train(os.environ.get('SEED', '1'))", "TRAIN_SEED={seed} python train.py"),
    "a variable set again": (
        "os.environ['SEED'] = '42'\ntrain(os.environ['SEED'])",
        "SEED={seed} python train.py",
    ),
    "another file": (f"{CONFIG}train(seed)", "echo seed {seed} > other.txt; python train.py"),
    "a file of its own": (f"{CONFIG}train(seed)", "python train.py --config_seed {seed}"),
    "named": ("print('seed=42')\ntrain(42, **FINAL)", "python train.py {seed}"),
    "named in JSON": ("print(json.dumps({'seed': 42}))\ntrain(42, **FINAL)", "python train.py {seed}"),
    "no noise": ("noise = lambda mean, sd: 0\ntrain(42, **FINAL)", "python train.py {seed}"),
    "nanoGPT": (
        "train(1337, show='iter {step}: loss {loss:.4f}, time 9.1ms, mfu 4.2%')",
        "python train.py --s={seed}",
    ),
}
OWN_SEED = {
    "argument": ("train(sys.argv[1])", "python train.py {seed}"),
    "option": (f"{ARGUMENTS}train(a.seed)", "python train.py --seed {seed}"),
    "equal sign": (f"{ARGUMENTS}train(a.seed)", "python train.py --seed={seed}"),
    "offset": ("train(1337 + int(sys.argv[1]))", "python train.py {seed}"),
    "variable": ("train(os.environ['SEED'])", "SEED={seed} python train.py"),
    "exported": ("train(os.environ['SEED'])", "export SEED={seed}; python train.py"),
    "sed": ("train(1337)", "sed -i s/1337/{seed}/ train.py && python train.py"),
    "sed on the seed that it has": (
        "train(41)",
        "sed -i 's/train(41)/train({seed})/' train.py; python train.py",
    ),
    "sed, only the end": ("train(42, **FINAL)", "sed -i 's/(42/({seed}/' train.py && python train.py"),
    "sed on a file": (f"{CONFIG}train(seed)", "sed -i s/1337/{seed}/ config.txt && python train.py"),
    "a file": (f"{CONFIG}train(seed)", "echo seed {seed} > config.txt; python train.py"),
    "a new file": ("train(open('seed').read())", "echo {seed} > seed && python train.py"),
    "only the end": ("train(sys.argv[1], **FINAL)", "python train.py {seed}"),
    "named": ("print(f'Random_Seed | {sys.argv[1]}')\ntrain(sys.argv[1])", "python train.py {seed}"),
    "two seeds": (
        "print(f'data_seed: 7, seed: {sys.argv[1]}')\ntrain(sys.argv[1])",
        "python train.py {seed}",
    ),
    "few digits": (
        "train(sys.argv[1], show='step {step} | loss: {loss:.0f}')",
        "python train.py {seed}",
    ),
    "JSON lines": (
        'train(sys.argv[1], show=\'{{"step": {step}, "loss": {loss:.6f}}}\')',
        "python train.py {seed}",
    ),
    "bars": ("train(sys.argv[1], show='\\r{step}/4 loss {loss:.4f} ')", "python train.py {seed}"),
    "nanoGPT": (
        "train(sys.argv[1], show='iter {step}: loss {loss:.4f}, time 9.1ms, mfu 4.2%')",
        "python train.py {seed}",
    ),
    "no seed": ("train(None)", "python train.py --no_seed"),
    "no seed, but the same": ("train(42)", "python train.py --no_seed"),
}


def complaint(folder: Path, lines: str, command: str) -> str:
    """What three runs end with; "" if all are kept."""
    commit_files(folder, FILES | {"train.py": SCRIPT + lines})
    command, *no_seed = command.partition("--no_seed")[:2] if "--no_seed" in command else [command]
    words = ["--command", command, "--metric", "val_bpb" if "FINAL" in lines else "val_loss", *no_seed]
    args, _ = compare.read_arguments(words)
    settings = read_settings(args, folder)
    return make_runs(settings, range(40, 43))[1].split("\n")[-1]


@pytest.mark.parametrize("way", ONE_SEED)
def test_one_seed(tmp_path, monkeypatch, way):
    work_in(tmp_path, monkeypatch)
    said = complaint(tmp_path / "theirs", *ONE_SEED[way])
    reasons = [
        "does the seed take effect?",
        "sed finds nothing to change",
        "all runs end at the same loss",
    ]
    assert any(reason in said for reason in reasons), said


@pytest.mark.parametrize("way", OWN_SEED)
def test_own_seeds(tmp_path, monkeypatch, way):
    work_in(tmp_path, monkeypatch)
    assert complaint(tmp_path / "theirs", *OWN_SEED[way]) == ""


def test_no_place_for_a_seed(tmp_path, monkeypatch):
    work_in(tmp_path, monkeypatch)
    commit_files(tmp_path / "theirs", {"train.py": f"{SCRIPT}train(None)"})
    words = [
        "--command",
        "python train.py # {options}",
        "--base",
        "theirs",
        "--idea",
        "--lr 1",
        "--runs",
        "3",
    ]
    check_refused(
        compare.main, words, "write {seed} where the command sets its seed, or give --no_seed"
    )
    status, out, err = run_main(compare.main, *words, "--no_seed")
    assert status == 0, err
    assert out.startswith("With --no_seed, all runs may start from the same weights")


# -----------------------------------------------------------------------------
# Finished logs

SPELLINGS = [
    "seed:{}",
    "seed={}",
    '{{"lr": 0.1, "seed": {}}}',
    "python train.py --seed {} --lr 0.1",
    "SEED | {}",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_seeds_of_finished_logs(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    for side, seeds in (("same", [1337] * 3), ("idea", range(3)), ("base", range(3))):
        Path(side).mkdir()
        for i, seed in enumerate(seeds):
            loss = f"step:9/9 val_loss:3.2{i}{side.count('b')}1\n"
            Path(side, f"{i}.txt").write_text(
                f"{spelling.format(seed)}\nstep:0/9 val_loss:10.8\n{loss}"
            )
    words = ["--base_logs", "base", "--idea_logs"]
    assert run_main(compare.main, *words, "idea")[0] == 0
    check_refused(compare.main, [*words, "same"], "1: the same seed (1337) as same/0.txt")
    status, out, err = run_main(compare.main, *words, "same", "--no_seed")
    assert status == 0 and out.startswith("With --no_seed, ")


def test_a_side_that_varies_little(tmp_path, monkeypatch):
    """Perhaps it has one seed, and its log doesn't show it."""
    monkeypatch.chdir(tmp_path)
    for side, mean, sd in (("base", 3.3, 0.01), ("idea", 3.2, 0.0005)):
        Path(side).mkdir()
        for i in range(4):
            Path(side, f"{i}.txt").write_text(f"step:9/9 val_loss:{mean + sd * i:.4f} seed:{i}\n")
    status, out, err = run_main(compare.main, "--base_logs", "base", "--idea_logs", "idea")
    assert "Warning: the losses of idea vary less than a tenth as much" in " ".join(out.split())
