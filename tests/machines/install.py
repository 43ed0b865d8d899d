"""Cases about run.sh: machines with other Pythons, networks and disks, and interruptions."""

import functools
import http.server
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from checkout import (
    NVIDIA_SMI,
    OLD_PYTHON,
    environment,
    make_checkout,
    system_torch,
    use_real_pip,
    without_ensurepip,
    write,
    write_amd_gpu,
    write_program,
)
from table import (
    ROOT,
    Case,
    Done,
    Outcome,
    cannot_unshare,
    clean_environment,
    finish,
    kill_group,
    one_line,
    run,
    start,
    trained,
    write_tiny_shards,
)

# -----------------------------------------------------------------------------
# Helpers


def stub_trained(done: Done) -> Outcome:
    """run.sh must have started the training, with stubs of the packages."""
    ok = done.code == 0 and "stub trains" in done.output and "Traceback" not in done.output
    what = "starts training (stubs)" if ok else f"exit {done.code}"
    return Outcome(ok, what, done.last_line)


def says(done: Done, words: str, outcome: Outcome) -> Outcome:
    """Like `outcome`, but a line of the output must also have these words."""
    lines = [line for line in done.output.splitlines() if words in line]
    if not outcome.ok:
        return outcome
    if not lines:
        return Outcome(False, f"doesn't say {words!r}", done.last_line)
    return Outcome(True, outcome.what, lines[-1])


def copy_repository(folder: Path) -> Path:
    """Copies the files that a fresh clone has, with changes that are not committed yet."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in names.split("\0"):
        if (ROOT / name).is_file() and not name.startswith("records/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def needs_git() -> str:
    if (ROOT / ".git").exists() and shutil.which("git"):
        return ""
    return "this is no git checkout"


def needs_flock() -> str:
    if shutil.which("flock"):
        return ""
    return "there is no flock"


# -----------------------------------------------------------------------------
# The whole program, with real packages


def fresh_clone(folder: Path) -> Outcome:
    checkout = copy_repository(folder / "clone")
    options = write_tiny_shards(folder)
    settings = clean_environment(TORCH_COMPILE_DISABLE=1)
    return trained(run(["./run.sh", *options], checkout, settings))


def special_path(folder: Path) -> Outcome:
    """Compilers fail in such paths, so this run is compiled.

    The packages are hard links to those of this Python.
    """
    checkout = copy_repository(folder / "the machine's own folder")
    subprocess.run(["cp", "-al", sys.prefix, checkout / ".venv"], check=True)
    options = write_tiny_shards(folder)
    options += ["--num_iterations=2", "--warmup_steps=0"]
    # A smaller model compiles faster
    options += ["--num_layers=1", "--long_window_layers=0", "--num_value_embeds=0"]
    settings = clean_environment(
        HOME=folder / "home",
        XDG_CACHE_HOME=None,
        OMP_NUM_THREADS=1,
        TORCHINDUCTOR_CACHE_DIR=folder / "cache",
    )
    done = run(["./run.sh", *options], checkout, settings)
    outcome = trained(done)
    if outcome.ok and not list((folder / "cache").rglob("*.so")):
        return Outcome(False, "trained, but compiled nothing", done.last_line)
    return outcome


def cannot_link_environment() -> str:
    if sys.prefix == sys.base_prefix:
        return "this Python is no virtual environment"
    return needs_git()


def with_junk(folder: Path, **changes) -> Outcome:
    """Runs the real script in the environment of this Python. The variables could break it."""
    write(folder / "junk" / "random.py", "raise SystemExit('junk')\n")
    write(folder / "junk" / "torch.py", "raise SystemExit('junk')\n")
    checkout = copy_repository(folder / "clone")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = clean_environment(
        TORCH_COMPILE_DISABLE=1,
        OMP_NUM_THREADS=1,
        VIRTUAL_ENV=sys.prefix,
        PATH=path,
        **changes,
    )
    return trained(run(["./run.sh", *write_tiny_shards(folder)], checkout, settings))


def c_locale(folder: Path) -> Outcome:
    return with_junk(folder, LC_ALL="C", LANG="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")


def junk_variables(folder: Path) -> Outcome:
    return with_junk(folder, PYTHONHOME=folder / "junk", PYTHONPATH=folder / "junk")


# -----------------------------------------------------------------------------
# Interruptions


def wait_for(path: Path, pattern: str, process) -> None:
    """Waits until a file appears below `path`."""
    while not list(path.glob(pattern)) and process.poll() is None:
        time.sleep(0.02)


def interrupted(folder: Path, pattern: str, number: int) -> Outcome:
    """Sends a signal as soon as a file is there, and then runs run.sh again, with the real pip."""
    checkout = make_checkout(folder)
    settings = environment(folder, **use_real_pip(folder))
    process = start(["./run.sh"], checkout, settings)
    wait_for(checkout, pattern, process)
    kill_group(process, number)
    done = finish(process)
    if done.code == 0:
        return Outcome(False, "it was over before the signal", done.last_line)
    stopped = re.search(r"^run\.sh: stopped by .*\n\Z", done.output, re.M)
    if number != signal.SIGKILL and not stopped:
        return Outcome(False, f"exit {done.code} without a line", done.last_line)
    return stub_trained(run(["./run.sh"], checkout, settings))


VENV_BEGUN = ".venv/lib/python*/site-packages/pip/_vendor"
TORCH_BEGUN = ".venv/lib/python*/site-packages/torch/part_1*.py"


def at_any_moment(folder: Path) -> Outcome:
    """Sends SIGTERM later and later, until a run gets as far as the training."""
    checkout = make_checkout(folder)
    delay = 0.05
    while True:
        process = start(["./run.sh"], checkout, environment(folder))
        time.sleep(delay)
        kill_group(process, signal.SIGTERM)
        done = finish(process)
        if "training on" in done.output:
            break
        progress = "run.sh: (making|installing|waiting)"
        lines = [line for line in done.output.splitlines() if not re.match(progress, line)]
        if done.code not in (143, -signal.SIGTERM) or len(lines) > 1:
            return Outcome(False, f"exit {done.code}", done.last_line)
        delay *= 1.5
    return stub_trained(run(["./run.sh"], checkout, environment(folder)))


def two_at_once(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    settings = environment(folder, **use_real_pip(folder))
    first = start(["./run.sh"], checkout, settings)
    wait_for(checkout, ".venv", first)
    second = run(["./run.sh"], checkout, settings)
    outcome = stub_trained(finish(first))
    if outcome.ok:
        outcome = stub_trained(second)
    return says(second, "waiting for another ./run.sh to finish its setup", outcome)


# -----------------------------------------------------------------------------
# Networks and disks


def no_network(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    use_real_pip(folder)
    done = run(["unshare", "--map-root-user", "--net", "./run.sh"], checkout, environment(folder))
    return one_line(done, "can't reach the package index", code=2)


READ_ONLY = "mount --bind . . && mount -o remount,bind,ro . && cd . && exec ./run.sh"


def read_only(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    command = [
        "unshare",
        "--map-root-user",
        "--net",
        "--mount",
        "sh",
        "-c",
        f'cd "$PWD" && {READ_ONLY}',
    ]
    return one_line(run(command, checkout, environment(folder)), "the disk is read-only", code=2)


def local_index(folder: Path):
    """Starts a local server in place of PyTorch's index. Returns its address."""
    (folder / "index" / "cpu" / "torch").mkdir(parents=True)
    for wheel in (folder / "wheels").glob("torch-*"):
        shutil.copy(wheel, folder / "index" / "cpu" / "torch")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=folder / "index")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


# Only this machine can be reached, and not PyPI, so nothing large is downloaded by mistake
NO_PYPI = dict(https_proxy="http://127.0.0.1:1", no_proxy="127.0.0.1")


def cpu_index(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    use_real_pip(folder)
    write(checkout / "requirements.txt", "torch==2.13.0\n")
    write(checkout / "train_gpt.py", "import torch\nprint('stub trains')\n")
    settings = environment(folder, SPEEDRUN_TORCH_INDEX=local_index(folder), **NO_PYPI)
    done = run(["./run.sh"], checkout, settings)
    return says(done, "0.2 GB", stub_trained(done))


def silent_index(folder: Path) -> Outcome:
    """The index accepts connections, but never answers. run.sh then tries PyPI, and fails here."""
    checkout = make_checkout(folder)
    use_real_pip(folder)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = environment(folder, SPEEDRUN_TORCH_INDEX=address, **NO_PYPI)
        done = run(["./run.sh"], checkout, settings)
    outcome = one_line(done, "can't reach the package index")
    return says(done, "doesn't answer; using PyTorch's build from PyPI instead", outcome)


def dead_index(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    done = run(["./run.sh"], checkout, environment(folder, INDEX_IS_DOWN="1"))
    return says(done, "up to 5 GB", stub_trained(done))


def pip_settings(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    settings = environment(
        folder, **use_real_pip(folder), SPEEDRUN_TORCH_INDEX="http://127.0.0.1:1"
    )
    done = run(["./run.sh"], checkout, settings)
    return says(done, "pip settings", stub_trained(done))


# -----------------------------------------------------------------------------
# Pythons


def find_python(version: str) -> str | None:
    """The path of a working Python of this version, on the PATH or from pyenv, or None."""
    found = [
        shutil.which(f"python{version}"),
        f"/usr/bin/python{version}",
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")),
    ]
    for python in found:
        if python and os.path.exists(python):
            question = "import sys, venv, ensurepip; print(sys.version)"
            done = subprocess.run([python, "-c", question], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.startswith(version + "."):
                return python
    return None


def old_python(folder: Path, version="3.10") -> Outcome:
    checkout = make_checkout(folder)
    python = folder / "bin" / "python3"
    python.unlink()
    python.symlink_to(find_python(version))
    done = run(["./run.sh"], checkout, environment(folder))
    return one_line(done, "3.11 or later", version, code=2)


def new_python(folder: Path, version: str) -> Outcome:
    """A new Python has its own name, next to an older python3.

    The packages are stubs, because the real ones would be gigabytes.
    """
    checkout = make_checkout(folder)
    settings = environment(folder, **use_real_pip(folder, find_python(version)))
    (folder / "bin" / "python3").rename(folder / "bin" / f"python{version}")
    write_program(folder, "python3", OLD_PYTHON)
    done = run(["./run.sh"], checkout, settings)
    if not (checkout / ".venv" / "lib" / f"python{version}").exists():
        return Outcome(False, "another Python", done.last_line)
    return stub_trained(done)


def needs_python(version: str) -> str:
    if find_python(version):
        return ""
    return f"no Python {version} here"


def python_cases() -> list[Case]:
    cases = []
    for version in ("3.8", "3.10"):
        cases.append(
            Case(
                f"Python {version} alone",
                "a line",
                functools.partial(old_python, version=version),
                True,
                functools.partial(needs_python, version),
            )
        )
    for version in ("3.11", "3.12", "3.13"):
        cases.append(
            Case(
                f"Python {version} beside an older python3",
                "trains",
                functools.partial(new_python, version=version),
                False,
                functools.partial(needs_python, version),
            )
        )
    return cases


def has_system_torch(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    system_torch(checkout, "2.12.1")
    done = run(["./run.sh"], checkout, environment(folder))
    return says(done, "it will use the system's PyTorch 2.12.1", stub_trained(done))


def lacks_ensurepip(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    without_ensurepip(checkout, has_pip=True)
    return stub_trained(run(["./run.sh"], checkout, environment(folder)))


def lacks_pip(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    without_ensurepip(checkout, has_pip=False)
    return one_line(run(["./run.sh"], checkout, environment(folder)), "venv", "apt install", code=2)


# -----------------------------------------------------------------------------
# GPUs


def old_driver(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    write_program(folder, "nvidia-smi", NVIDIA_SMI)
    settings = environment(folder, USABLE="0", TORCH_CUDA="13.0", DRIVER="550.54.15")
    done = run(["./run.sh"], checkout, settings)
    return one_line(done, "driver 580 or later", "550.54.15", code=2)


def amd_gpu(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    settings = environment(folder, USABLE="1", TORCH_HIP="7.2")
    write_amd_gpu(folder, 16 * 1024)
    done = run(["./run.sh"], checkout, settings)
    return says(done, "build for AMD GPUs", stub_trained(done))


def amd_gpu_unusable(folder: Path) -> Outcome:
    checkout = make_checkout(folder)
    settings = environment(folder, TORCH_HIP="7.2")
    write_amd_gpu(folder, 16 * 1024)
    return one_line(run(["./run.sh"], checkout, settings), "AMD GPU", "--device cpu", code=2)


# -----------------------------------------------------------------------------
NET = ("--map-root-user", "--net")
CASES = [
    Case("a fresh clone", "trains", fresh_clone, cannot=needs_git),
    Case(
        "a path with a space and an apostrophe",
        "trains",
        special_path,
        cannot=cannot_link_environment,
    ),
    Case("C locale, no UTF-8", "trains", c_locale, cannot=needs_git),
    Case("junk in PYTHONHOME and PYTHONPATH", "trains", junk_variables, cannot=needs_git),
    Case(
        "Ctrl-C while .venv is made",
        "repaired",
        functools.partial(interrupted, pattern=VENV_BEGUN, number=signal.SIGINT),
    ),
    Case(
        "kill -9 while .venv is made",
        "repaired",
        functools.partial(interrupted, pattern=VENV_BEGUN, number=signal.SIGKILL),
    ),
    Case(
        "Ctrl-C while packages are installed",
        "repaired",
        functools.partial(interrupted, pattern=TORCH_BEGUN, number=signal.SIGINT),
    ),
    Case(
        "kill -9 while packages are installed",
        "repaired",
        functools.partial(interrupted, pattern=TORCH_BEGUN, number=signal.SIGKILL),
    ),
    Case("SIGTERM to the group before training", "a line", at_any_moment),
    Case(
        "two ./run.sh at once in a fresh clone",
        "waits",
        two_at_once,
        cannot=needs_flock,
    ),
    Case(
        "no network, fresh clone",
        "a line",
        no_network,
        cannot=functools.partial(cannot_unshare, *NET),
    ),
    Case(
        "no network, read-only disk",
        "a line",
        read_only,
        True,
        functools.partial(cannot_unshare, *NET, "--mount"),
    ),
    *python_cases(),
    Case("no GPU: PyTorch's index of CPU builds", "trains", cpu_index),
    Case("no GPU: that index doesn't answer", "PyPI's", dead_index, True),
    Case("no GPU: that index is silent, PyPI dead", "a line", silent_index),
    Case("pip has the user's settings", "trains", pip_settings),
    Case("the system's Python has PyTorch", "trains", has_system_torch, True),
    Case("Python without ensurepip", "trains", lacks_ensurepip, True),
    Case("Python without venv and pip", "a line", lacks_pip, True),
    Case("an NVIDIA driver that is too old", "a line", old_driver, True),
    Case("an AMD GPU", "trains", amd_gpu, True),
    Case("an AMD GPU that PyTorch can't use", "a line", amd_gpu_unusable, True),
]
