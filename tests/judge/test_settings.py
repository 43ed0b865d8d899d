"""The settings of a project, what judge init finds out, and that the package stands alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from judge import init
from judge.compare import compare
from judge.settings import Settings, make_folder, read_settings
from tests.judge.helpers import check_refused, commit_files, run_main, work_in
from tests.util import ROOT


def settings_of(*words, start: Path = Path()) -> Settings:
    args, _ = compare.read_arguments(list(words))
    return read_settings(args, start)


def test_where_settings_are(tmp_path, monkeypatch):
    """In judge.toml or pyproject.toml, of this folder or one above. An option wins."""
    monkeypatch.chdir(tmp_path)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    Path("pyproject.toml").write_text('[tool.judge]\ncommand = "one"\njobs = 3\nrun_timeout = 5\n')
    found = settings_of(start=deep)
    assert (found.command, found.jobs, found.run_timeout, found.root) == ("one", 3, 5, tmp_path)
    Path("a/judge.toml").write_text('command = "two"\ndata = ["x", "y"]\nno_seed = false\n')
    found = settings_of("--jobs", "2", start=deep)
    assert (found.command, found.jobs, found.data, found.root) == ("two", 2, ["x", "y"], tmp_path / "a")
    found = settings_of("--command", "--x", "--higher_is_better", "--metric", "m", start=deep)
    assert (found.command, found.name_of_metric) == ("--x", "-m")
    assert settings_of("--project", str(tmp_path), start=deep).command == "one"
    make_folder(settings_of())
    assert Path(".judge/.gitignore").read_text() == "*\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ('comand = "x"', "judge.toml: unrecognized arguments: --comand=x; did you mean --command?"),
        ("zzz = 1", "judge.toml: unrecognized arguments: --zzz=1"),
        ("jobs = true", "argument --jobs: expected one argument"),
        ("jobs = 0", "argument --jobs: 0: must be a whole number, at least 1"),
        ("run_timeout = -1", "argument --run_timeout: -1: must be more than zero"),
        ("job_per_core = 1", "argument --job_per_core: ignored explicit argument '1'"),
        ("command = ", "Invalid value"),
        ("", "has no judge.toml that says how to train; give --command, or write it by: judge init"),
        ('command = "x"\nhigher_is_better = true', "--higher_is_better needs --metric NAME"),
    ],
)
def test_settings_that_are_wrong(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    Path("judge.toml").write_text(text)
    check_refused(compare.main, ["--idea", "--lr 1"], message)


# What a project prints, and what is found: the metric, what is said of the seed, of its steps, and of data
PROJECTS = {
    "nanoGPT": (
        "print(f'step 9: train loss {2 + x:.4f}, val loss {3 + x:.4f}\\niter 9: loss {2 + x:.4f}, time 4.0ms')",
        (
            "val_loss",
            "takes effect: val_loss is",
            "9; --num_iterations sets them",
            "outside the project: none",
        ),
    ),
    "a fixed seed": (
        "x = 0; print(f'Epoch 3: acc: {0.9 + x:.3f}')",
        ("acc", "HAS NO EFFECT: acc is 0.900 with both", "unknown; ", "outside the project: none"),
    ),
    "JSON lines": (
        "open(os.path.expanduser('~/corpus')); os.mkdir('out'); "
        "open('out/m.jsonl', 'w').write(f'{{\"step\": 7, \"eval/loss\": {3 + x}}}\\n')",
        ("eval_loss", "takes effect: eval_loss is", "7; ", "outside the project: {}/corpus"),
    ),
    "no end": (
        "print(f'step:1/90 val_bpb:{1 + x}', flush=True); time.sleep(60)",
        ("val_bpb", "takes effect: val_bpb is", "90; ", "outside the project: none"),
    ),
}


@pytest.mark.parametrize("name", PROJECTS)
def test_init(tmp_path, monkeypatch, name):
    """Six lines and judge.toml."""
    code, (metric, seed, steps, data) = PROJECTS[name]
    start = "import os, random, sys, time\nx = random.Random(sys.argv[1]).random() / 10\n"
    commit_files(tmp_path / "theirs", {"train.py": start + code})
    (tmp_path / "corpus").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    work_in(tmp_path / "theirs", monkeypatch)
    steps_option = "--num-iterations=9 " * (name == "nanoGPT")
    command = f"python train.py {{seed}} {steps_option}{{options}}"
    words = ["--command", command, "--seconds", "20" if name != "no end" else "5"]
    status, out, err = run_main(init.main, *words)
    assert status == 0, err
    assert max(len(line) for line in out.splitlines() if "/corpus" not in line) <= 80
    said = " ".join(out.split())
    assert f"metric: {metric}" in said and f"steps: {steps}" in said
    assert f"seed: {seed}" in said and f"data: {data.format(tmp_path)}" in said
    assert ("more than 5 s;" in said) == (name == "no end")
    assert ("only --hours ends it" in said) == (not steps_option)
    found = settings_of()
    assert (found.command, found.metric) == (command, metric)
    before = Path("judge.toml").read_text()
    status, out, err = run_main(init.main)
    assert "stays as it is" in out and Path("judge.toml").read_text() == before
    check_refused(compare.main, [], "nothing to compare")  # judge.toml, which is new, is no change


def test_init_of_a_project_that_fails(tmp_path, monkeypatch):
    commit_files(tmp_path, {"train.py": "print('hello')"})
    work_in(tmp_path, monkeypatch)
    status, out, err = run_main(init.main, "--command", "python train.py {seed}")
    assert status == 2 and "hello\nerror: the run names no number" in err
    status, out, err = run_main(init.main, "--command", "python gone.py {seed}")
    assert status == 2 and "No such file" in err and "exit status 2" in err
    assert not Path("judge.toml").exists() and not list(Path().glob(".judge/working/*"))


@pytest.mark.slow
def test_the_package_stands_alone(tmp_path):
    """Installed by pip, far from this repository, it has the command judge, whose modules import nothing of ours."""
    target = tmp_path / "site"
    pip = [sys.executable, *"-m pip install -q --no-deps --target".split(), target, ROOT / "judge"]
    subprocess.run(pip, check=True, env=os.environ | {"PYTHONPATH": ""})
    assert (target / "judge/runs/watch/sitecustomize.py").is_file()  # which no command imports
    env = {**os.environ, "PYTHONPATH": str(target), "COLUMNS": "80"}
    for command in ("compare", "screen", "plot", "init"):
        words = [target / "bin" / "judge", command, "--help"]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout.startswith(f"usage: judge {command}") and "./run.sh" not in done.stdout, done
        prose = [line for line in done.stdout.splitlines() if line[:1].isalpha()]
        assert len(prose) > 4 and max(map(len, prose)) < 80
    code = (
        "import sys, judge.compare.compare; assert not {'lib', 'data', 'train_gpt'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)
