"""
Tests of run.sh and launch/launch.py: which environment, packages and data, which command line, and what
happens to child processes.

Most run in this process: `machine` stands for the programs that launch.py asks and starts.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import datasets
from launch import launch
from judge.commands import UserError
from judge import processes as judge_processes
from judge.runs import same_run
from lib import processes
from recipes import gpt2, january2026
from train_gpt import TRACKS
from tests.util import ROOT, env

OURS = ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_VISIBLE_DEVICES"]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty repository. `answers` says what programs print, by a part of their command line, `versions`
    which packages are there. `ran` collects the commands that are run; pip installs what it is told to."""
    machine = SimpleNamespace(answers={}, versions={}, ran=[], status=0, root=tmp_path / "root")
    (machine.root / "data").mkdir(parents=True)
    (machine.root / "requirements.txt").write_text("torch==2.13.0\nnumpy==2.4.6  # arrays\n")

    def output_of(*command):
        words = " ".join(map(str, command))
        return next((answer for part, answer in machine.answers.items() if part in words), None)

    def run(command, **options):
        machine.ran.append([str(word) for word in command])
        if machine.status == 0:
            machine.versions |= dict(word.split("==") for word in machine.ran[-1] if "==" in word)
        return machine.status

    monkeypatch.setattr(os, "environ", os.environ.copy())  # launch cleans it
    for name in OURS:
        os.environ.pop(name, None)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(launch, "VENV", machine.root / ".venv")
    monkeypatch.setattr(judge_processes, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(launch, "version_of", lambda package, path: machine.versions.get(package, ""))
    for module in (launch, processes, datasets):
        monkeypatch.setattr(module, "ROOT", machine.root)
        monkeypatch.setattr(module, "run", run)
    for module in (launch, same_run, judge_processes):
        monkeypatch.setattr(module, "output_of", output_of)
    monkeypatch.setattr(venv, "create", lambda folder, **how: None)
    return machine


def file(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -----------------------------------------------------------------------------
# run.sh

LAUNCH = """
import os, sys
opened = [os.fstat(number) and True for number in range(3)]
print(__file__, sys.argv[1:], sorted(name for name in os.environ if name.startswith("PYTHON")), file=sys.stderr)
open("ran", "w").close()
"""


@pytest.fixture
def run_sh(tmp_path):
    """A function that runs a copy of run.sh, through a link, in front of LAUNCH. Only one of the programs is
    a Python that is new enough. Python's variables are junk."""
    file(tmp_path / "root" / "launch" / "launch.py", LAUNCH)
    shutil.copy(ROOT / "run.sh", tmp_path / "root")
    (tmp_path / "link").symlink_to("root/run.sh")
    for name in ("python", "python3"):
        old = "#!/bin/sh\n[ $1 = --version ] && echo Python 3.10.13\n"
        file(tmp_path / "bin" / name, old).chmod(0o755)

    def run(new="python3", closing="", **variables):
        for name, program in {
            "bash": shutil.which("bash"),
            new: os.path.realpath(sys.executable),
        }.items():
            (tmp_path / "bin" / name).unlink(missing_ok=True)
            (tmp_path / "bin" / name).symlink_to(program)
        variables |= dict(PYTHONNOUSERSITE="1") | dict.fromkeys(
            ["PYTHONHOME", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONSAFEPATH"], "junk"
        )
        command = f"{tmp_path}/link --seed 3 {closing}"
        return subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=tmp_path,
            env=dict(PATH=f"{tmp_path}/bin") | variables,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize(
    "new, active, says",
    [
        ("python3", "", "root/launch/launch.py ['--seed', '3'] ['PYTHONNOUSERSITE', 'PYTHONUTF8']\n"),
        ("python3.12", "", "root/launch/launch.py "),
        ("python", "/theirs", "root/launch/launch.py "),
        (
            "python3",
            "/theirs",
            "error: the active environment (/theirs) has no Python 3.11 or later; deactivate",
        ),
        ("none", "", "error: Python 3.11 or later is needed, but python3 is Python 3.10.13; install"),
    ],
)
def test_run_sh_finds_a_python(run_sh, new, active, says):
    done = run_sh(new, VIRTUAL_ENV=active)
    assert says in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == ((2, 1) if "error" in says else (0, 1))


@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_run_sh_opens_what_is_closed(run_sh, tmp_path, closing):
    assert run_sh(closing=closing).returncode == 0
    assert (tmp_path / "ran").exists()


# -----------------------------------------------------------------------------
# The environment


def test_a_new_environment_is_ready_only_after_the_installation(machine):
    machine.status = 1
    with pytest.raises(UserError, match="can't install the packages; pip's output is above"):
        launch.install([])
    machine.status = 0
    for _ in range(2):  # it is made again, because no Python runs in it
        file(launch.VENV / "half")
        assert launch.install([]) == launch.VENV / "bin" / "python"
        assert sorted(path.name for path in launch.VENV.iterdir()) == ["ours", "ready"]
    assert machine.ran[1][-2:] == ["torch==2.13.0", "numpy==2.4.6"]

    machine.answers["sys.path"] = "3.11.2\nx\n"
    machine.versions["torch"] = "2.12.0"  # another version stays
    launch.install([])
    assert len(machine.ran) == 2
    del machine.versions["numpy"]  # it was lost
    machine.status = 1
    with pytest.raises(UserError):
        launch.install([])
    assert machine.ran[2][7:] == ["numpy==2.4.6"]
    assert [path.name for path in launch.VENV.iterdir()] == ["ours"]


def test_an_environment_that_is_not_ours_stays(machine):
    file(launch.VENV / "theirs")
    with pytest.raises(UserError, match="isn't from ./run.sh; activate it, .* or move it away"):
        launch.install([])
    assert [path.name for path in launch.VENV.iterdir()] == ["theirs"]


def test_the_active_environment_is_used_as_it_is(machine, monkeypatch):
    monkeypatch.setenv("CONDA_PREFIX", "/theirs")
    machine.versions["torch"] = "2.11.0+cu130"
    assert launch.install([]) == sys.executable
    assert machine.ran[0][:4] == [sys.executable, "-m", "pip", "install"]
    assert machine.ran[0][7:] == ["numpy==2.4.6"]
    machine.versions["torch"] = "2.9.1"
    with pytest.raises(UserError, match="of the active environment .* is older than 2.11; update it"):
        launch.install([])
    assert launch.install([], theirs=True) == sys.executable
    machine.versions.clear()
    monkeypatch.delenv("CONDA_PREFIX")
    monkeypatch.setattr(sys, "prefix", "/theirs")  # it isn't activated, but its python3 comes first
    assert launch.install([]) == sys.executable
    assert not launch.VENV.exists()
    monkeypatch.setattr(sys, "prefix", str(launch.VENV))  # ours may be active, too
    file(launch.VENV / "ours")
    assert launch.install([]) == launch.VENV / "bin" / "python"


def test_which_packages_are_installed():
    _, path = same_run.ask_python(sys.executable)
    assert launch.version_of("pytest", path) == pytest.__version__
    assert launch.version_of("no-package", path) == ""


@pytest.mark.parametrize("torch, modules", [("2.11.0", ["ensurepip"]), ("2.9.1", ["pip"]), ("", [])])
def test_a_new_environment(machine, monkeypatch, torch, modules):
    """It has the system's PyTorch, if that is new enough. Debian takes ensurepip away."""
    how = {}
    monkeypatch.setattr(venv, "create", lambda folder, **options: how.update(options))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in modules)
    machine.versions["torch"] = torch
    if not modules:
        with pytest.raises(UserError, match="has no venv module; .* apt install python3-venv"):
            launch.make_environment()
        return
    launch.make_environment()
    assert (how["system_site_packages"], how["with_pip"]) == (
        torch == "2.11.0",
        modules == ["ensurepip"],
    )
    pip = [] if how["with_pip"] else [["--python", str(launch.VENV / "bin" / "python"), "pip"]]
    assert [command[-3:] for command in machine.ran] == pip


@pytest.mark.parametrize("name, link", [("a b", True), ("a", False)])
def test_a_special_path_gets_a_link(machine, monkeypatch, tmp_path, name, link):
    monkeypatch.setattr(launch, "VENV", file(tmp_path / name / ".venv" / "ours").parent)
    for _ in range(2):
        folder = launch.plain_folder()
        assert folder.samefile(launch.VENV)
        assert (folder != launch.VENV) == link
        assert " " not in str(folder)


# -----------------------------------------------------------------------------
# Packages


CPU = ["--extra-index-url", launch.CPU_INDEX]


@pytest.mark.parametrize(
    "answers, files, options",
    [
        ({"index": ""}, [], CPU),
        ({}, [], []),  # that index doesn't answer
        ({"index": "", "config list": "global.find-links='/wheels'"}, [], []),
        ({"index": "", "nvidia-smi": "GPU 0: NVIDIA H100"}, [], []),
        ({"index": ""}, ["dev/nvidia0"], []),
        ({"index": ""}, ["dev/nvidia0", "hidden"], CPU),
    ],
)
def test_which_build_of_pytorch(machine, tmp_path, monkeypatch, answers, files, options):
    machine.answers = answers
    monkeypatch.setattr(launch, "answers", lambda index: "index" in answers)
    if "hidden" in files:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in files:
        file(tmp_path / name)
    launch.pip_install("python", ["torch==2.13.0", "numpy==2.4.6"])
    assert machine.ran[0][7:] == [*options, "torch==2.13.0", "numpy==2.4.6"]


# -----------------------------------------------------------------------------
# Data, and a folder for compiled code


FINEWEB = TRACKS["fineweb"]
TWO = replace(FINEWEB, num_iterations=300)  # needs two shards


@pytest.mark.parametrize(
    "hp, found, made",
    [
        (TRACKS["mini"], "", "data.shakespeare"),
        (FINEWEB, "", "data.fineweb fineweb 7"),
        (january2026.TRACKS["fineweb"], "", "data.fineweb fineweb 9"),
        (gpt2.TRACKS["edu"], "", "data.fineweb edu 99"),
        (TWO, "val_000000 train_000001", "data.fineweb fineweb 2"),
        (TWO, "train_000001 train_000002", "data.fineweb fineweb 2"),
        (TWO, "val_000000 train_000001 train_000002", ""),
        (replace(FINEWEB, train_files="../mine/train_*.bin"), "", ""),
    ],
)
def test_the_data_of_a_run(machine, hp, found, made):
    for name in found.split():
        file(machine.root / "data" / "fineweb10B" / f"fineweb_{name}.bin")
    machine.status = 1
    with pytest.raises(SystemExit, match="1") if made else contextlib.nullcontext():
        launch.get_data("python", vars(hp))
    assert machine.ran == ([["python", "-m", *made.split()]] if made else [])


# -----------------------------------------------------------------------------
# Training


@pytest.fixture
def training(machine, monkeypatch, tmp_path):
    """The machine, where nothing trains. `needs` is what the checks find."""
    machine.needs = dict(processes=2, options=["--train_seq_len=256"], log_dir="logs", text="mini")
    machine.checked = []
    machine.saves = True
    file(machine.root / "recipes" / "soup.py", "def parse_arguments")
    file(machine.root / "recipes" / "openai_gpt2.py")

    def check_machine(python, *words):
        machine.checked = list(words)
        return machine.needs

    def run_ranks(command, processes, **options):
        folder = os.open(machine.root, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if the launcher still has the lock
        os.close(folder)
        machine.ran.append([str(word) for word in command])
        machine.processes = processes
        for age, name in enumerate(["new", "older"] if machine.saves else []):
            path = file(machine.root / machine.needs["log_dir"] / f"{name}.pt")
            path.with_suffix(".txt").touch()
            os.utime(path, (0, 1000 - age))  # long ago: the disk has another clock
        if machine.status < 0:
            launch.stop(-machine.status, None)
        return machine.status

    def install(folders, theirs):
        assert "OMP_PROC_BIND" not in os.environ
        machine.folders = folders
        return "python"

    monkeypatch.setattr(launch, "check_machine", check_machine)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    monkeypatch.setattr(launch, "install", install)
    monkeypatch.setattr(launch, "handle_signals", lambda handler: None)
    monkeypatch.setattr(launch.Stopped, "advice", launch.Stopped.advice)
    monkeypatch.setattr(os, "execv", lambda python, command: machine.ran.append(command))
    monkeypatch.chdir(tmp_path)
    return machine


def test_a_training(training, monkeypatch, capsys):
    monkeypatch.setenv("HOME", r"/home/\x")
    options = ["--val_files=~/v_*.bin", "--what=a ~/b"]
    assert (
        launch.main(["--seed", "3", "--recipe=soup", "--log_dir", "mine", "--resume=latest", *options])
        == 0
    )
    options = ["--what=a ~/b", "--log_dir=../mine", r"--val_files=/home/\x/v_*.bin", "--resume=latest"]
    words = ["recipes.soup", "--seed", "3", *options]
    assert training.checked == ["train", *words]
    (train,) = training.ran
    assert training.processes == 2
    options = [*words, "--train_seq_len=256", "--save_checkpoint"]
    assert train == ["python", "-m", "launch.train_and_sample", *options]
    assert capsys.readouterr().out == launch.NEXT


STOPPED = "run.sh: stopped by SIGTERM; "


@pytest.mark.parametrize(
    "words, status, saves, advice",
    [
        ([], 3, True, ""),
        (["prepare"], 3, False, ""),
        ([], -15, False, STOPPED + "nothing is saved yet; run the same command again\n"),
        ([], -15, True, STOPPED + "continue with ./run.sh --resume root/logs/new.pt\n"),
        (
            ["--recipe=soup", "--device=cpu"],
            -15,
            True,
            STOPPED + "continue with ./run.sh --device cpu --recipe soup --resume root/logs/new.pt\n",
        ),
        (["prepare"], -15, False, STOPPED + "run the same command again to continue\n"),
    ],
)
def test_a_training_that_fails_or_is_stopped(training, capsys, words, status, saves, advice):
    """The advice names the run's own checkpoint, whatever else is in the folder."""
    for suffix in ("pt", "txt"):
        file(training.root / "logs" / f"other.{suffix}")  # of another run, and newer
    training.saves = saves
    training.status = status
    assert launch.main(words) == (3 if status > 0 else 143)
    assert len(training.ran) == 1
    err = capsys.readouterr().err
    assert err.endswith(advice)
    assert "ready" not in err


def test_a_machine_is_prepared(training, capsys):
    assert launch.main(["prepare", "--track=mini"]) == 0
    assert len(training.ran) == 1
    assert capsys.readouterr().err.endswith("run.sh: ready: mini\n")
    assert {"--num_iterations=1", "--num_runs=1", "--train_seq_len=256"} < set(training.ran[0])
    assert training.checked == ["prepare", "train_gpt", "--track=mini"]


def test_a_check_that_fails_ends_the_run(machine):
    machine.status = 2
    with pytest.raises(SystemExit, match="2"):
        launch.check_machine("python", "train", "train_gpt")


# -----------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize(
    "words, folders, command",
    [
        ("sample x.pt", [], "evals.sample x.pt"),
        ("data edu --help", [], "data.fineweb edu --help"),
        ("compare --command=x", ["judge"], "judge compare --command=x"),
        ("hellaswag x", ["evals"], "evals.hellaswag x"),
    ],
)
def test_the_command_line_of_a_command(training, tmp_path, words, folders, command):
    launch.launch(words.split())
    assert training.folders == folders
    assert training.ran == [["python", "-P", "-m", *command.split()]]
    assert os.environ["PYTHONPATH"] == str(launch.ROOT)
    assert Path.cwd() == tmp_path
    assert training.checked == []


@pytest.mark.parametrize(
    "words, last",
    [
        ("test tests/x.py --slow", ["tests/x.py", "--slow"]),
        ("test machines -k network", ["tests/machines/slurm.py", "-k", "network"]),
    ],
)
def test_pytest_runs_in_the_repository(training, words, last):
    launch.launch(words.split())
    command = training.ran[-1]
    assert command[:3] == ["python", "-m", "pytest"]
    assert command[-len(last) :] == last
    assert training.folders == ["judge", "evals", "tests"]
    assert Path.cwd() == launch.ROOT


def test_compare_checks_the_machine(training):
    """It trains by the command in judge.toml, with another script or torchrun if the user says so. The user's
    options come after those of the checks, so they win."""
    training.needs["options"] = ["--confirm_options", "--val_tokens 1"]
    file(launch.ROOT / "judge.toml", 'command = "python -m train_gpt {options}"')
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2"
    for words, expected in [
        ([], ["--command", "python -m train_gpt {options}"]),
        (["--recipe", "gpt2"], ["--command", "python -m recipes.gpt2 {options}"]),
        (
            ["--nproc_per_node=2"],
            "--jobs 1 --gpus_per_run 2 --command".split()
            + [f"python {torchrun} -m train_gpt {{options}}"],
        ),
    ]:
        launch.launch(["compare", "--device", "cpu", *words, "--runs", "2"])
        command = ["python", "-P", "-m", "judge", "compare", "--project", str(launch.ROOT)]
        assert training.ran[-1] == [*command, *expected, *training.needs["options"], "--runs", "2"]
        assert training.checked == ["compare", *words, "--runs", "2"]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_what_does_not_exist(training, capsys):
    for words, meant in [
        ("sampel x.pt", "there is no command sampel; did you mean sample?\n"),
        (
            "data",
            "no command data; did you mean data text or data shakespeare or data fineweb or data edu?",
        ),
        ("data pile", "no command data; did you mean data text or data shakespeare"),
        ("flower", "no command flower; ./run.sh --help lists them"),
    ]:
        assert launch.main(words.split()) == 2
        assert meant in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch.main(["--recipe=cake"])
    assert "invalid choice: 'cake' (choose from" in capsys.readouterr().err
    assert training.ran == []


def test_a_full_disk_is_one_line_and_a_bug_is_not(training, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "execv", fail)
    with pytest.raises(OSError):
        launch.main(["plot"])
    monkeypatch.setattr(launch, "install", fail)
    assert launch.main(["plot"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("No space left on device")


def test_help_names_the_commands_first(training, capsys):
    launch.main(["--seed=3", "-h"])
    assert capsys.readouterr().out.startswith(launch.USAGE)
    assert training.ran == [["python", "-m", "train_gpt", "--help"]]


# -----------------------------------------------------------------------------
# Processes


def python(code):
    return [
        sys.executable,
        "-c",
        f"import os, signal, sys, time\nrank = int(os.environ.get('RANK', 0))\n{code}",
    ]


def test_one_setup_at_a_time(machine, capsys):
    with launch.setup_lock():
        other = threading.Thread(target=wait_for_the_lock)
        other.start()
        other.join(0.3)
        assert other.is_alive()
        assert "waiting for another ./run.sh to finish" in capsys.readouterr().err
    other.join(20)
    assert not other.is_alive()
    with launch.setup_lock():
        assert capsys.readouterr().err == ""


def wait_for_the_lock():
    with launch.setup_lock():
        pass


def test_the_ranks_of_a_training(tmp_path, capfd):
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"
    code = f"text = ' '.join(os.environ[n] for n in {names.split()})\nprint(text)\nopen(sys.argv[1] + str(rank), 'w').write(text)"
    assert launch.run_ranks([*python(code), f"{tmp_path}/"], 2) == 0
    first, second = ((tmp_path / name).read_text() for name in "01")
    assert first.startswith("0 0 2 127.0.0.1 ")
    assert second == "1 1" + first[3:]
    assert capfd.readouterr().out == f"{first}\n"


@pytest.mark.parametrize(
    "code, status, says",
    [
        ("if rank == 0: time.sleep(60)\nprint('broken')\nsys.exit(3)", 3, "broken\n"),
        ("if rank == 0: time.sleep(1.5)\nprint('error', rank)\nsys.exit(2)", 2, "error 0\n"),
        (
            "if rank: os.kill(os.getpid(), 9)\ntime.sleep(60)",
            137,
            "run.sh: process 1 was ended by signal 9\n",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_others(capfd, code, status, says):
    began = time.monotonic()
    assert launch.run_ranks(python(code), 2) == status
    assert time.monotonic() - began < 30
    assert "".join(capfd.readouterr()) == says


LAUNCHER = "import sys; from launch import launch; launch.launch = lambda argv: launch.run(argv); sys.exit(launch.main(sys.argv[1:]))"


@pytest.mark.parametrize(
    "number, send",
    [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill), (signal.SIGKILL, os.kill)],
)
def test_a_signal(number, send):
    """A terminal sends Ctrl-C to the child, too, which ignores it. The pipes close when no child is left."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            LAUNCHER,
            *python("print(signal.getsignal(2) == signal.SIG_IGN, flush=True)\ntime.sleep(60)"),
        ],
        env=env(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "True\n"
    send(process.pid, number)
    said = f"run.sh: stopped by {number.name}; run the same command again to continue\n"
    killed = number == signal.SIGKILL
    assert process.communicate(timeout=20)[1] == ("" if killed else said)
    assert process.returncode == (-9 if killed else 128 + number)


# -----------------------------------------------------------------------------
# The remembered answer of the check


@pytest.fixture
def checked(machine, monkeypatch):
    """A function that checks the machine as for a training. Returns whether PyTorch was asked."""
    answer = dict(environment={"MALLOC_MMAP_MAX_": "0"}, right=True, files=["data/*.bin"], text="mini")
    machine.answer = answer
    file(machine.root / "data" / "train.bin")
    file(machine.root / "train_gpt.py", "1")
    machine.versions["torch"] = "2.13.0"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(processes, "version_of", lambda package, path: machine.versions[package])

    def run(command, **options):
        machine.ran.append(command)
        Path(command[3]).write_text(json.dumps(machine.answer))
        return 0

    def check(*options, mode="train"):
        machine.ran.clear()
        before = dict(os.environ)
        needs = processes.check_machine("python", mode, "train_gpt", *options)
        assert needs["text"] == "mini"
        assert os.environ["MALLOC_MMAP_MAX_"] == "0"
        os.environ.clear()  # each ./run.sh is a process of its own
        os.environ.update(before)
        return bool(machine.ran)

    monkeypatch.setattr(processes, "run", run)
    return check


def test_the_answer_is_remembered(checked):
    assert checked("--seed=1")
    assert not checked("--seed=1")
    assert not checked("--seed=1")


@pytest.mark.parametrize(
    "change",
    [
        lambda machine: machine.versions.update(torch="2.14.0"),
        lambda machine: machine.answers.update({"g++ --version": "g++ 15"}),
        lambda machine: machine.answers.update({"nvidia-smi": "GPU 0: NVIDIA H100"}),
        lambda machine: file(machine.root / "train_gpt.py", "2"),
        lambda machine: (machine.root / "data" / "train.bin").unlink(),
        lambda machine: os.environ.update(TORCHDYNAMO_DISABLE="1"),
        lambda machine: os.environ.update(OMP_NUM_THREADS="77"),
        lambda machine: file(machine.root / "data/.cache/machine-is-checked.json", "{"),
    ],
)
def test_what_changes_the_answer(checked, machine, change):
    assert checked()
    change(machine)
    assert checked()


def test_other_answers_are_not_remembered(checked, machine):
    """A resumed run depends on its checkpoint, and each mode has its own answer."""
    for _ in range(2):
        assert checked("--resume=latest")
        assert checked(mode="prepare")
    machine.answer["right"] = False  # a GPU, or wrong code
    assert checked()
    assert checked()
