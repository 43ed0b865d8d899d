"""The machines. Each function imitates one in an empty folder and runs ./run.sh there. It returns what
happened, raises AssertionError if that is wrong, or SkipTest where this machine can't be imitated."""

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest import SkipTest

from tests.machines.table import (
    finish,
    need,
    one_line,
    run,
    start,
    stopped,
    trained,
    wait_for,
)
from tests.util import ROOT, tiny_run
from lib.environment import DROPPED


OUR_PATH = f"{sys.prefix}/bin:{os.environ['PATH']}"


def copy_repository(folder):
    """Copies the files that a fresh clone has, with changes that are not committed yet."""
    git = ["git", "-C", str(ROOT)]
    need(*git, "status")
    names = subprocess.check_output([*git, "ls-files", "-coz", "--exclude-standard"], text=True)
    for name in names.split("\0"):
        if (ROOT / name).is_file() and not name.startswith("records/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def training(folder, checkout=ROOT):
    """A command that trains a model of one layer."""
    settings = dict(num_layers=1, long_window_layers=0, num_value_embeds=0)
    return [checkout / "run.sh", *tiny_run(folder, "--device=cpu", "--log_dir=logs", **settings)]


def start_training(folder, *prefix, **variables):
    """Starts a training with this Python's packages, with no compiled code yet. `prefix` is a command
    that starts it."""
    usual = dict(VIRTUAL_ENV=sys.prefix, PATH=OUR_PATH, TORCHINDUCTOR_CACHE_DIR=folder / "cache")
    return start([*prefix, *training(folder)], folder, **usual | variables)


def train(folder, *prefix, **variables):
    return finish(start_training(folder, *prefix, **variables))


def unshare(command, *options):
    """Words that start a command after another one, whose mounts only it sees."""
    words = ["unshare", "--map-root-user", "--mount", *options]
    need(*words, "true")
    return [*words, "sh", "-c", f'{command} && exec "$@"', "sh"]


# --------------------------------------------------------------------------------------------------
# Installations
def fresh_clone(folder):
    command = training(folder, copy_repository(folder / "clone"))
    first = start(command, folder, TORCH_COMPILE_DISABLE=1)
    wait_for(folder, "clone/.venv/ours", first)
    second = run(command, folder, TORCH_COMPILE_DISABLE=1)
    trained(finish(first))
    return trained(second, "waiting for another ./run.sh")


REPLAY = ["clone/run.sh", "replay", "--help"]  # a command that installs packages, but imports none
PARTS = 3000


def stub_packages(folder):
    """Writes wheels without code. Returns variables with which pip installs those."""
    copy_repository(folder / "clone")
    (folder / "wheels").mkdir()
    for file in ("requirements.txt", "judge/requirements.txt"):
        for line in (ROOT / file).read_text().splitlines():
            name, version = line.split("#")[0].strip().split("==")
            info = f"{name}-{version}.dist-info"
            count = PARTS if name == "torch" else 1
            files = {f"{name}/part_{i}.py": "" for i in range(count)}
            files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
            with zipfile.ZipFile(folder / f"wheels/{name}-{version}-py3-none-any.whl", "w") as wheel:
                for path, text in files.items():
                    wheel.writestr(path, text)
    return dict(PIP_NO_INDEX=1, PIP_FIND_LINKS=folder / "wheels", PIP_CONFIG_FILE=os.devnull)


def killed(folder):
    """While PyTorch is installed. The same command then repairs .venv."""
    variables = stub_packages(folder)
    process = start(REPLAY, folder, **variables)
    wait_for(folder, "clone/.venv/lib/python*/site-packages/torch/part_1*.py", process)
    os.killpg(process.pid, signal.SIGKILL)
    finish(process)
    done = run(REPLAY, folder, **variables)
    assert done.code == 0 and "making the virtual environment" in done.output, done.last_line
    assert len(list(folder.glob("clone/.venv/lib/*/site-packages/torch/part_*"))) == PARTS
    return "repaired"


def no_network(folder):
    copy_repository(folder / "clone")
    settings = dict(PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS=None, PIP_RETRIES=0)
    done = run([*unshare("true", "--net"), *REPLAY], folder, **settings)
    return one_line(done, "can't reach the package index")


def read_only(folder):
    copy_repository(folder / "clone")
    prefix = unshare("mount --bind clone clone && mount -o remount,bind,ro clone")
    return one_line(run([*prefix, *REPLAY], folder), "Read-only file system")


def pip_settings(folder):
    """Variables that put packages elsewhere are ignored. A file that does so is noticed."""
    variables = stub_packages(folder)
    elsewhere = dict(PIP_TARGET=folder / "x", PIP_PREFIX=folder / "y", PIP_USER=1)
    done = run(REPLAY, folder, **variables, **elsewhere)
    assert done.code == 0 and "ignored: PIP_PREFIX, PIP_TARGET, PIP_USER" in done.output, done.last_line
    shutil.rmtree(folder / "clone" / ".venv")
    (folder / "pip.conf").write_text(f"[install]\ntarget = {folder}/x\n")
    done = run(REPLAY, folder, **variables | dict(PIP_CONFIG_FILE=folder / "pip.conf"))
    return one_line(done, "pip has installed the packages elsewhere")


def colon(folder):
    """Python would split it into two folders of modules."""
    copy_repository(folder / "p:2")
    return one_line(run([folder / "p:2/run.sh", "replay", "--help"], folder), "has a colon in its path")


# --------------------------------------------------------------------------------------------------
# The environment
def nobody(folder):
    prefix = ["unshare", "--user", "--map-user=4321", "--map-group=4321"]
    need(*prefix, "true")
    return trained(train(folder, *prefix, HOME=None, USER=None, LOGNAME=None, TORCH_COMPILE_DISABLE=1))


# --------------------------------------------------------------------------------------------------
# Git
def converted_lines(folder):
    """Git writes Windows line ends, but not here."""
    need("git", "-C", str(ROOT), "status")
    git = ["git", "-c", "core.autocrlf=true", "clone", ROOT, "clone"]
    assert run(git, folder).code == 0
    listed = run(["git", "ls-files", "--eol"], folder / "clone").output
    assert "i/lf " in listed and not re.search("i/lf +w/crlf", listed)
    return "the same bytes"


# --------------------------------------------------------------------------------------------------
# Compilers
def compiler(folder, text):
    """Writes a shell script that takes the compiler's place."""
    need("g++", "--version")
    script = folder / "g++"
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


def skip_comparison(cache, folder, *prefix, **variables):
    """Writes the file that a successful comparison of compiled code leaves. The comparison takes minutes."""
    variables |= dict(TORCHINDUCTOR_CACHE_DIR=cache, CUDA_VISIBLE_DEVICES="", PYTHONPATH=ROOT)
    done = run([*prefix, sys.executable, "-c", SKIP], folder, **variables)
    assert done.code == 0, done.last_line


def old_cpu(folder):
    """PyTorch sees neither AVX512 nor AMX, and g++ doesn't know the CPU."""
    info = Path("/proc/cpuinfo").read_text()
    (folder / "cpuinfo").write_text(re.sub(r" (avx512|amx)\w*", "", info))
    prefix = unshare("mount --bind cpuinfo /proc/cpuinfo")
    cxx = compiler(folder, 'exec g++ -mtune=generic "$@"')
    skip_comparison(folder / "cache", folder, *prefix, CXX=cxx)
    return trained(train(folder, *prefix, CXX=cxx, ATEN_CPU_CAPABILITY="avx2"), COMPILED)


def wrong_code(folder):
    """The compiler changes a constant: it caps logits at 15 instead of 30."""
    change = 'for file; do case "$file" in *.cpp) sed -i "s/(30[.]0)/(15.0)/g" "$file";; esac; done'
    cxx = compiler(folder, f'{change}\nexec g++ "$@"')
    return trained(train(folder, CXX=cxx), "is wrong", "GCC 14", UNCOMPILED)


def no_compiler(folder):
    done = train(folder, CXX="no-such-compiler")
    return trained(done, "apt install g++", "No working C++ compiler", UNCOMPILED)


def stopped_while_compiling(folder):
    process = start_training(folder)
    wait_for(folder, "cache/**/*.cpp", process)
    os.killpg(process.pid, signal.SIGINT)
    return stopped(finish(process), signal.SIGINT)


def special_path(folder):
    """PyTorch and the repository lie in a path that a shell would split. .venv has hard links to the
    files of this Python's environment."""
    if sys.prefix == sys.base_prefix:
        raise SkipTest("this Python is in no virtual environment")
    checkout = copy_repository(folder / "the machine's own folder")
    environment = checkout / ".venv"
    shutil.copytree(os.path.realpath(sys.prefix), environment, symlinks=True, copy_function=os.link)
    (environment / "ours").touch()
    (environment / "ready").touch()
    skip_comparison(folder / "cache", folder)
    variables = dict(TORCHINDUCTOR_CACHE_DIR=folder / "cache", XDG_CACHE_HOME=folder / "home")
    done = run(training(folder, checkout), folder, **variables)
    assert list(folder.glob("cache/**/*.so")), "compiled nothing"
    return trained(done, COMPILED)


# --------------------------------------------------------------------------------------------------
# Variables
def strange_variables(folder):
    """All that is dropped is junk, and some of Python's and OpenMP's variables are worse."""
    junk = folder / r"junk\1"
    junk.mkdir()
    (junk / "random.py").write_text("raise SystemExit('junk')\n")
    variables = dict.fromkeys([pattern.replace("*", "JUNK") for pattern in DROPPED], "junk")
    variables |= dict(PYTHONHOME=junk, PYTHONPATH=junk, PYTHONHASHSEED="abc", PYTHONSAFEPATH=1)
    variables |= dict(LC_ALL="C", LANG="C", PYTHONCOERCECLOCALE=0, PYTHONUTF8=0)
    variables |= dict(OMP_PROC_BIND="true", GOMP_CPU_AFFINITY=0, TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)
    done = train(folder, TORCH_COMPILE_DISABLE=1, HOME=junk, **variables)
    return trained(done, "GOMP_CPU_AFFINITY, GOMP_JUNK")


CASES = {
    "compiler makes wrong code": wrong_code,  # takes longest
    "a CPU unknown to the compiler": old_cpu,
    "no C++ compiler": no_compiler,
    "Ctrl-C while compiling": stopped_while_compiling,
    "a path with a space and an apostrophe": special_path,
    "a fresh clone, two ./run.sh at once": fresh_clone,
    "kill -9 during the installation": killed,
    "no network": no_network,
    "read-only disk": read_only,
    "C locale, junk in variables": strange_variables,
    "pip's settings put packages elsewhere": pip_settings,
    "a colon in the path": colon,
    "a user without a name and a home": nobody,
    "git converts line ends": converted_lines,
}
