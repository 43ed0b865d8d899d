"""
Imitations of other people's machines: each test makes one in an empty folder, runs the real ./run.sh there,
and skips itself where this machine can't be imitated.

    ./run.sh test machines              all: four minutes on two cores; it downloads packages, too
    ./run.sh test machines -k compiler  those with this word in their name

The suite doesn't run this file, because its name doesn't begin with test_.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from judge.environment import DROPPED
from tests.util import ROOT, tiny_run

# A user's shell doesn't have these variables, and finds a Python that is in no environment
UNWANTED = (
    "VIRTUAL_ENV CONDA_PREFIX PYTHONPATH CUDA_VISIBLE_DEVICES TORCH_COMPILE_DISABLE OMP_NUM_THREADS"
).split()
PATH = f"{sys.base_prefix}/bin:{os.environ['PATH']}"
OUR_PATH = f"{sys.prefix}/bin:{os.environ['PATH']}"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Deleted afterwards, because it may hold all packages."""
    monkeypatch.chdir(tmp_path)
    yield
    shutil.rmtree(tmp_path)


# --------------------------------------------------------------------------------------------------
# Commands
def start(command, **variables):
    """Starts a command as the leader of a process group, as a shell does. None removes a variable."""
    environment = os.environ | dict.fromkeys(UNWANTED) | dict(PATH=PATH) | variables
    return subprocess.Popen(
        [str(word) for word in command],
        env={name: str(value) for name, value in environment.items() if value is not None},
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process):
    """Returns the exit status, and all that the command wrote."""
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def run(command, **variables):
    return finish(start(command, **variables))


def wait_for(pattern, process):
    """Waits until there is such a file."""
    while process.poll() is None and not list(Path().glob(pattern)):
        time.sleep(0.01)


def need(*command):
    """Skips the test unless a command works here."""
    if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{' '.join(command)} doesn't work here")


# --------------------------------------------------------------------------------------------------
# Outcomes. done: (exit status, output)
def check_trained(done, *words):
    """The command must have trained: status 0, a last validation loss below the first, and these words."""
    status, output = done
    losses = [float(loss) for loss in re.findall(r"^step:\d+/\d+ val_loss:(\S+)", output, re.M)]
    assert status == 0 and "Traceback" not in output, output
    assert len(losses) > 1 and losses[-1] < losses[0], output
    for word in words:
        assert word in output


def check_error(done, words):
    """The command must have ended with status 2 and one error line with these words."""
    status, output = done
    (line,) = re.findall(r"^(?:run\.sh: )?error: .*$", output, re.M)
    assert status == 2 and "Traceback" not in output, output
    assert words in line


def copy_repository(name="clone"):
    """Copies the files that a fresh clone has, with changes that are not committed yet."""
    folder = Path(name).absolute()
    git = ["git", "-C", str(ROOT)]
    need(*git, "status")
    names = subprocess.check_output([*git, "ls-files", "-coz", "--exclude-standard"], text=True)
    for name in names.split("\0"):
        if (ROOT / name).is_file() and not name.startswith("records/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def training(checkout=ROOT):
    """A command that trains a model of one layer."""
    settings = dict(num_layers=1, long_window_layers=0, num_value_embeds=0)
    return [checkout / "run.sh", *tiny_run(Path(), "--device=cpu", "--log_dir=logs", **settings)]


def start_training(*prefix, **variables):
    """Starts a training with this Python's packages, with no compiled code yet. `prefix` is a command
    that starts it."""
    usual = dict(
        VIRTUAL_ENV=sys.prefix, PATH=OUR_PATH, TORCHINDUCTOR_CACHE_DIR=Path("cache").absolute()
    )
    return start([*prefix, *training()], **usual | variables)


def train(*prefix, **variables):
    return finish(start_training(*prefix, **variables))


def unshare(command):
    """Words that start a command after another one, whose mounts only it sees."""
    words = ["unshare", "--map-root-user", "--mount"]
    need(*words, "true")
    return [*words, "sh", "-c", f'{command} && exec "$@"', "sh"]


# --------------------------------------------------------------------------------------------------
# Installations
def test_fresh_clone_and_two_at_once():
    command = training(copy_repository())
    first = start(command, TORCH_COMPILE_DISABLE=1)
    wait_for("clone/.venv/ours", first)
    second = run(command, TORCH_COMPILE_DISABLE=1)
    check_trained(finish(first))
    check_trained(second, "waiting for another ./run.sh")


def test_read_only_disk():
    copy_repository()
    prefix = unshare("mount --bind clone clone && mount -o remount,bind,ro clone")
    check_error(run([*prefix, "clone/run.sh", "replay", "--help"]), "Read-only file system")


# --------------------------------------------------------------------------------------------------
# The environment
def test_user_without_name_and_home():
    prefix = ["unshare", "--user", "--map-user=4321", "--map-group=4321"]
    need(*prefix, "true")
    check_trained(train(*prefix, HOME=None, USER=None, LOGNAME=None, TORCH_COMPILE_DISABLE=1))


# --------------------------------------------------------------------------------------------------
# Git
def test_git_converts_line_ends():
    """Git writes Windows line ends, but not here."""
    need("git", "-C", str(ROOT), "status")
    git = ["git", "-c", "core.autocrlf=true", "clone", ROOT, "clone"]
    subprocess.run(git, check=True)
    listed = subprocess.check_output(["git", "ls-files", "--eol"], cwd="clone", text=True)
    assert "i/lf " in listed and not re.search("i/lf +w/crlf", listed)


# --------------------------------------------------------------------------------------------------
# Compilers
def compiler(text):
    """Writes a shell script that takes the compiler's place."""
    need("g++", "--version")
    script = Path("g++").absolute()
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return script


UNCOMPILED = "warning: training without torch.compile"
COMPILED = ", compiled"
SKIP = """
from launch import checks
file = checks.stamp()
file.parent.mkdir(parents=True, exist_ok=True)
file.touch()
"""


def skip_comparison(*prefix, **variables):
    """Writes the file that a successful comparison of compiled code leaves. The comparison takes minutes."""
    variables |= dict(TORCHINDUCTOR_CACHE_DIR="cache", CUDA_VISIBLE_DEVICES="", PYTHONPATH=ROOT)
    status, output = run([*prefix, sys.executable, "-c", SKIP], **variables)
    assert status == 0, output


def test_cpu_unknown_to_the_compiler():
    """PyTorch sees neither AVX512 nor AMX, and g++ doesn't know the CPU."""
    info = Path("/proc/cpuinfo").read_text()
    Path("cpuinfo").write_text(re.sub(r" (avx512|amx)\w*", "", info))
    prefix = unshare("mount --bind cpuinfo /proc/cpuinfo")
    cxx = compiler('exec g++ -mtune=generic "$@"')
    skip_comparison(*prefix, CXX=cxx)
    check_trained(train(*prefix, CXX=cxx, ATEN_CPU_CAPABILITY="avx2"), COMPILED)


def test_compiler_makes_wrong_code():
    """The compiler changes a constant: it caps logits at 15 instead of 30."""
    change = 'for file; do case "$file" in *.cpp) sed -i "s/(30[.]0)/(15.0)/g" "$file";; esac; done'
    cxx = compiler(f'{change}\nexec g++ "$@"')
    check_trained(train(CXX=cxx), "is wrong", "GCC 14", UNCOMPILED)


def test_no_compiler():
    done = train(CXX="no-such-compiler")
    check_trained(done, "apt install g++", "No working C++ compiler", UNCOMPILED)


def test_ctrl_c_while_compiling():
    process = start_training()
    wait_for("cache/**/*.cpp", process)
    os.killpg(process.pid, signal.SIGINT)
    status, output = finish(process)
    assert status == 128 + signal.SIGINT
    *before, last = output.splitlines()
    assert all(line.startswith("run.sh: ") for line in before), output
    assert last.startswith("run.sh: stopped by SIGINT"), output


def test_path_with_space_and_apostrophe():
    """PyTorch and the repository lie in a path that a shell would split. .venv has hard links to the
    files of this Python's environment."""
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is in no virtual environment")
    checkout = copy_repository("the machine's own folder")
    environment = checkout / ".venv"
    shutil.copytree(os.path.realpath(sys.prefix), environment, symlinks=True, copy_function=os.link)
    (environment / "ours").touch()
    (environment / "ready").touch()
    skip_comparison()
    folders = dict(
        TORCHINDUCTOR_CACHE_DIR=Path("cache").absolute(), XDG_CACHE_HOME=Path("home").absolute()
    )
    done = run(training(checkout), **folders)
    assert list(Path().glob("cache/**/*.so")), "compiled nothing"
    check_trained(done, COMPILED)


# --------------------------------------------------------------------------------------------------
# Variables
def test_c_locale_and_junk_in_variables():
    """All that is dropped is junk, and some of Python's and OpenMP's variables are worse."""
    junk = Path(r"junk\1").absolute()
    junk.mkdir()
    (junk / "random.py").write_text("raise SystemExit('junk')\n")
    variables = dict.fromkeys([pattern.replace("*", "JUNK") for pattern in DROPPED], "junk")
    variables |= dict(PYTHONHOME=junk, PYTHONPATH=junk, PYTHONHASHSEED="abc", PYTHONSAFEPATH=1)
    variables |= dict(LC_ALL="C", LANG="C", PYTHONCOERCECLOCALE=0, PYTHONUTF8=0)
    variables |= dict(OMP_PROC_BIND="true", GOMP_CPU_AFFINITY=0, TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)
    done = train(TORCH_COMPILE_DISABLE=1, HOME=junk, **variables)
    check_trained(done, "GOMP_CPU_AFFINITY, GOMP_JUNK")
