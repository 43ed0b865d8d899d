"""
Tests of run.sh: environments, packages, interruptions, GPUs.

All programs that it starts are stubs.
"""

import ast
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from util import ROOT, wait_until

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "machines"))
from checkout import (
    NVIDIA_SMI,
    OLD_PYTHON,
    TORCH,
    calls,
    environment,
    make_checkout,
    system_torch,
    without_ensurepip,
    write,
    write_amd_gpu,
    write_program,
)
from table import finish, kill_group, one_line, run, start


@pytest.fixture
def checkout(tmp_path):
    return make_checkout(tmp_path)


def run_sh(checkout, *arguments, **changes):
    variables = environment(checkout.parent, **changes)
    return run(["./run.sh", *arguments], checkout, variables, timeout=120)


def assert_trains(done):
    assert done.code == 0, done.output
    assert "stub trains" in done.output, done.output
    assert "Traceback" not in done.output, done.output


def install_stubs(checkout):
    """Runs run.sh once, and waits until nothing writes compiled files into .venv any more."""
    assert_trains(run_sh(checkout))
    wait_until((checkout.parent / "calls_imported").exists, 120)


def assert_line(done, *words, code=2):
    outcome = one_line(done, *words, code=code)
    assert outcome.ok, f"{outcome.what}\n{done.output}"


# -----------------------------------------------------------------------------
# .venv and its packages


def test_a_second_start_installs_nothing(checkout):
    first = run_sh(checkout, "--seed", "3")
    assert_trains(first)
    assert "stub trains ['--seed', '3', '--save_checkpoint']" in first.output
    assert len(calls(checkout.parent)) == 2  # one for PyTorch, one for all requirements
    again = run_sh(checkout)
    assert_trains(again)
    checks, training = again.output.splitlines()[:2]
    assert (checks, training) == (
        "stub checks ['--script', 'train_gpt']",
        "run.sh: training on the CPU; before the first step, compiling may take a minute or more",
    )
    assert calls(checkout.parent) == []


def test_a_lost_package_comes_back_alone(checkout):
    install_stubs(checkout)
    calls(checkout.parent)
    (info,) = (checkout / ".venv").rglob("tqdm-*.dist-info")
    shutil.rmtree(info)
    done = run_sh(checkout)
    assert_trains(done)
    assert "installing tqdm==4.70.1\n" in done.output
    assert len(calls(checkout.parent)) == 1


def test_commands_install_what_they_need(checkout):
    assert_trains(run_sh(checkout))
    assert "tools_package" not in os.listdir(next((checkout / ".venv").rglob("site-packages")))
    done = run_sh(checkout, "compare", "--runs", "2")
    assert done.code == 0, done.output
    assert "stub compare: ['--runs', '2']" in done.output, done.output
    assert "installing tools_package==1.0\n" in done.output
    done = run_sh(checkout, "screen", "x.toml", "--blocks", "2")
    assert done.code == 0, done.output
    assert "stub screen: ['x.toml', '--blocks', '2']" in done.output, done.output
    assert_trains(run_sh(checkout, "--num_runs", "2"))


@pytest.mark.parametrize("words", [["--help"], ["--seed", "3", "-h"], ["--recipe", "soup", "--help"]])
def test_help_names_all_commands(checkout, words):
    """The usage of run.sh comes first, then what the script prints."""
    write(checkout / "recipes" / "soup.py", (checkout / "train_gpt.py").read_text())
    done = run_sh(checkout, *words)
    assert_trains(done)
    assert done.output.startswith("usage: ./run.sh [OPTIONS OF train_gpt.py] "), done.output
    usage = done.output.partition("stub trains")[0]
    for command in ("--recipe NAME", "compare", "screen FILE", "test"):
        assert f"./run.sh {command} " in usage, done.output
    assert "making the Shakespeare" not in usage


def test_the_help_of_a_command_is_its_own(checkout):
    done = run_sh(checkout, "compare", "--help")
    assert done.code == 0, done.output
    assert "stub compare: ['--help']" in done.output
    assert "usage: ./run.sh" not in done.output


def imported_packages(*scripts):
    """The packages that scripts import anywhere in their code, without Python's own and ours."""
    ours = {path.stem for path in ROOT.glob("*/*.py")}
    ours |= {path.stem for path in ROOT.iterdir()}
    names = set()
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - ours


def required(group):
    lines = (ROOT / group / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return {line.split("==")[0] for line in lines}


def test_requirements_name_what_is_imported():
    training = [ROOT / "train_gpt.py", ROOT / "tools" / "launch_checks.py", *(ROOT / "recipes").glob("*.py")]
    evals = [ROOT / "evals" / f"{name}.py" for name in ("models", "openai_gpt2", "sample")]
    assert imported_packages(*training, *evals) <= required(".")
    training_data = [ROOT / "data" / "shakespeare.py", ROOT / "data" / "cached_fineweb10B.py"]
    assert imported_packages(*training_data) <= required(".")
    tools = imported_packages(*(ROOT / "tools").glob("*.py"))
    assert tools <= required(".") | required("tools")
    assert required("tools") <= tools


def test_pytorch_is_imported_while_the_data_is_made(checkout):
    """
    After an installation, run.sh imports PyTorch while it makes the data.

    Training imports it, too. So this run imports it twice, and the next one once.
    """
    mark = checkout.parent / "imports"
    torch = f"open({str(mark)!r}, 'a').write('x')\n"
    assert_trains(run_sh(checkout, TORCH=torch, DATA_SECONDS="1"))
    end = time.monotonic() + 20
    while mark.read_text() != "xx" and time.monotonic() < end:
        time.sleep(0.1)
    assert mark.read_text() == "xx"
    assert_trains(run_sh(checkout, TORCH=torch))
    assert mark.read_text() == "xxx"


def test_an_environment_of_the_users_own_stays(checkout):
    """An environment that was made by hand has no file `ready`. If it is complete, it stays."""
    assert_trains(run_sh(checkout))
    (checkout / ".venv" / "ready").unlink()
    (checkout / ".venv" / "mine").write_text("")
    calls(checkout.parent)
    assert_trains(run_sh(checkout))
    assert (checkout / ".venv" / "mine").exists()
    assert (checkout / ".venv" / "ready").exists()
    assert calls(checkout.parent) == []


@pytest.mark.parametrize(
    "damage", ["no pip", "no python", "file missing", "no record", "no metadata"]
)
def test_what_an_interruption_left_is_repaired(checkout, damage):
    install_stubs(checkout)
    site = next((checkout / ".venv").rglob("site-packages"))
    (checkout / ".venv" / "ready").unlink()
    if damage == "no pip":
        shutil.rmtree(site / "pip")
    elif damage == "no python":
        (checkout / ".venv" / "bin" / "python").unlink()
    elif damage == "file missing":
        (site / "torch" / "__init__.py").unlink()
    elif damage == "no record":
        (site / "torch-2.13.0.dist-info" / "RECORD").unlink()
    else:
        shutil.rmtree(site / "torch-2.13.0.dist-info")
    done = run_sh(checkout)
    assert_trains(done)
    again = "making the virtual environment .venv again, because it is incomplete" in done.output
    assert again == (damage != "no metadata")  # without metadata, only PyTorch is installed again
    assert (checkout / ".venv" / "ready").exists()


def test_the_active_environment_is_used_as_it_is(checkout):
    install_stubs(checkout)
    theirs = checkout.parent / "theirs"
    (checkout / ".venv").rename(theirs)
    path = f"{theirs / 'bin'}:{checkout.parent / 'bin'}"
    done = run_sh(checkout, VIRTUAL_ENV=theirs, PATH=path)
    assert_trains(done)
    assert f"{theirs}/bin/python" in done.output
    assert not (checkout / ".venv").exists()
    assert "warning" not in done.output

    site = next(theirs.rglob("site-packages"))
    (site / "torch-2.13.0.dist-info").rename(site / "torch-2.9.1.dist-info")
    metadata = site / "torch-2.9.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("2.13.0", "2.9.1"))
    done = run_sh(checkout, VIRTUAL_ENV=theirs, PATH=path)
    assert_trains(done)  # a build of their own, perhaps
    assert "warning: the active environment's PyTorch is older than 2.11" in done.output
    assert "pip install torch==2.13.0\n" in done.output

    old = checkout.parent / "old"
    write(old / "python", "#!/bin/sh\nexit 3\n", executable=True)
    done = run_sh(checkout, VIRTUAL_ENV="/their/environment", PATH=f"{old}:{path}")
    assert_line(done, "/their/environment", "3.11", "deactivate")


# -----------------------------------------------------------------------------
# Which Python


def test_an_old_python_is_named(checkout):
    write_program(checkout.parent, "python3", OLD_PYTHON)
    done = run_sh(checkout)
    assert_line(done, "3.11 or later", "3.10.13")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("name", ["python3.11", "python3.12", "python3.13"])
def test_a_newer_python_is_found_by_its_name(checkout, name):
    programs = checkout.parent / "bin"
    (programs / "python3").rename(programs / name)
    write_program(checkout.parent, "python3", OLD_PYTHON)
    assert_trains(run_sh(checkout))


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "3.0"])
def test_the_systems_pytorch_is_used(checkout, version):
    site = system_torch(checkout, version)
    done = run_sh(checkout)
    assert_trains(done)
    assert f".venv; it will use the system's PyTorch {version}\n" in done.output
    assert f"{site}/torch" in done.output
    assert "include-system-site-packages = true" in (checkout / ".venv" / "pyvenv.cfg").read_text()
    assert len(calls(checkout.parent)) == 1  # for the other packages


@pytest.mark.parametrize("version", ["2.9.1", "1.13.1", "2.10.0a0+git12"])
def test_an_older_one_is_not(checkout, version):
    site = system_torch(checkout, version)
    done = run_sh(checkout)
    assert_trains(done)
    assert f"{site}/torch" not in done.output
    assert "include-system-site-packages = false" in (checkout / ".venv" / "pyvenv.cfg").read_text()


def test_ensurepip_is_missing(checkout):
    without_ensurepip(checkout, has_pip=True)
    assert_trains(run_sh(checkout))


def test_venv_is_missing(checkout):
    without_ensurepip(checkout, has_pip=False)
    assert_line(run_sh(checkout), "has no venv module; install it", "apt install python3-venv")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("name", ["PYTHONHOME", "PYTHONPATH"])
def test_junk_in_pythons_variables_is_ignored(checkout, name):
    junk = checkout.parent / "junk"
    write(junk / "random.py", "raise SystemExit('junk')\n")
    write(junk / "torch.py", "raise SystemExit('junk')\n")
    done = run_sh(checkout, **{name: junk})
    assert_trains(done)
    assert f"run.sh: ignoring {name}={junk}\n" in done.output


# -----------------------------------------------------------------------------
# Which PyTorch


def torch_calls(checkout):
    return [line for line in calls(checkout.parent) if "torch==2.13.0" in line]


def test_without_a_gpu_it_is_the_build_for_cpus(checkout):
    done = run_sh(checkout)
    assert_trains(done)
    (call,) = torch_calls(checkout)
    assert "--index-url http://torch.invalid/cpu --no-deps torch==2.13.0" in call
    assert "build for CPUs: a download of about 0.2 GB" in done.output


def test_pypi_where_that_index_is_down(checkout):
    done = run_sh(checkout, INDEX_IS_DOWN="1")
    assert_trains(done)
    assert torch_calls(checkout) == []
    words = "http://torch.invalid/cpu doesn't answer; using PyTorch's build from PyPI instead\n"
    assert words in done.output
    assert "up to 5 GB" in done.output


@pytest.mark.parametrize(
    "setting",
    [
        "global.index-url='https://mirror'",
        ":env:.find-links='/wheels'",
        "install.no-index='true'",
        "global.extra-index-url='https://mirror'",
    ],
)
def test_the_users_settings_of_pip_come_first(checkout, setting):
    done = run_sh(checkout, PIP_SETTINGS=f"global.timeout='60'\n{setting}", INDEX_IS_DOWN="1")
    assert_trains(done)
    assert torch_calls(checkout) == []
    assert "installing packages from the source in your pip settings" in done.output
    assert "doesn't answer" not in done.output


def test_other_settings_of_pip_do_not(checkout):
    assert_trains(run_sh(checkout, PIP_SETTINGS="global.timeout='60'\nglobal.cert='/c.pem'"))
    assert len(torch_calls(checkout)) == 1


def test_with_a_gpu_it_is_pypis(checkout):
    write_program(checkout.parent, "nvidia-smi", NVIDIA_SMI)
    assert_trains(run_sh(checkout, "--track", "mini", USABLE="1", TORCH_CUDA="13.0"))
    assert torch_calls(checkout) == []


def test_a_small_amd_gpu_is_part_of_a_cpu(checkout):
    write_amd_gpu(checkout.parent, 512)
    assert_trains(run_sh(checkout))
    (call,) = torch_calls(checkout)
    assert "/cpu" in call


def test_with_an_amd_gpu_it_is_rocms(checkout):
    write_amd_gpu(checkout.parent, 16 * 1024)
    done = run_sh(checkout, "--track", "mini", USABLE="1", TORCH_HIP="7.2")
    assert_trains(done)
    (call,) = torch_calls(checkout)
    assert "--index-url http://torch.invalid/rocm7.2 torch==2.13.0" in call
    assert "--no-deps" not in call


# -----------------------------------------------------------------------------
# Failures


@pytest.mark.parametrize(
    "error, words",
    [
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            ["can't reach the package index; check the network, the proxy"],
        ),
        (
            "ERROR: Could not find a version that satisfies torch==2.13.0\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            ["has no torch==2.13.0 for Python 3"],
        ),
        (
            "ERROR: Could not install packages: [Errno 28] No space left on device",
            ["the disk is full; free some space in", "then run ./run.sh again"],
        ),
        (
            "ERROR: Could not install: [Errno 30] Read-only file system: '/x'",
            ["can't write to a folder (ERROR: ", "'/x'); make the folder writable"],
        ),
        ("ERROR: something new", ["; see the output above"]),
    ],
)
def test_pip_fails(checkout, error, words):
    done = run_sh(checkout, PIP_ERROR=error)
    assert_line(done, *words)
    assert ("ERROR: something new" in done.output) == ("something new" in error)
    assert_trains(run_sh(checkout))


def test_pips_chatter_is_not_shown(checkout):
    pip = checkout.parent / "bin" / "pip" / "__main__.py"
    chatter = "\nprint('WARNING: Location is ignored', file=sys.stderr)\nprint('Collecting')\n"
    pip.write_text(pip.read_text() + chatter)
    done = run_sh(checkout)
    assert_trains(done)
    assert "WARNING" not in done.output
    assert "Collecting" not in done.output
    before = done.output.partition("stub trains")[0]
    assert len(before.splitlines()) <= 5, done.output


def test_data_that_fails_says_so_itself(checkout):
    write(checkout / "data" / "shakespeare.py", "import sys\nsys.exit('error: no wheel')\n")
    done = run_sh(checkout)
    assert done.code == 1
    assert done.output.endswith("error: no wheel\n")
    assert "trains" not in done.output


# -----------------------------------------------------------------------------
# FineWeb shards

# Imitates the download of three shards, without the data. It leaves `unfinished` when it fails.
DOWNLOAD = """
import os, pathlib, sys
folder = pathlib.Path(__file__).parent / "fineweb10B"
folder.mkdir(exist_ok=True)
(folder / "unfinished").touch()
for name in ("val_000000", "train_000001", "train_000002"):
    (folder / f"fineweb_{name}.bin").touch()
    if name == os.environ.get("LAST"):
        sys.exit("error: no network")
(folder / "unfinished").unlink()
print("stub downloaded", sys.argv[1:])
"""


def test_an_interrupted_download_is_finished(checkout):
    """After an interruption, there are a validation shard and a training shard, but not all."""
    write(checkout / "data" / "cached_fineweb10B.py", DOWNLOAD)
    done = run_sh(checkout, "--track", "fineweb", LAST="train_000001")
    assert done.code == 1
    assert done.output.endswith("error: no network\n")
    own_data = ["--train_files", "mine_*.bin", "--val_files", "mine_val.bin"]
    done = run_sh(checkout, "--track", "fineweb", *own_data)
    assert_trains(done)
    assert "stub downloaded" not in done.output
    done = run_sh(checkout, "--track", "fineweb")
    assert_trains(done)
    assert "run.sh: downloading the FineWeb shards (2 GB in all)\n" in done.output
    assert "stub downloaded []" in done.output
    done = run_sh(checkout, "--track", "fineweb")
    assert_trains(done)
    assert "downloading" not in done.output


def test_fewer_shards_are_enough_if_the_user_downloaded_them(checkout):
    """`./run.sh data fineweb 1` is enough for a short run."""
    write(checkout / "data" / "cached_fineweb10B.py", DOWNLOAD)
    for name in ("val_000000", "train_000001"):
        write(checkout / "data" / "fineweb10B" / f"fineweb_{name}.bin", "")
    done = run_sh(checkout, "--track", "fineweb")
    assert_trains(done)
    assert "downloading" not in done.output


# -----------------------------------------------------------------------------
# Interruptions, and two runs at the same time

PHASES = {
    "VENV_SECONDS": "making the virtual environment",
    "PIP_SECONDS": "installing packages",
    "DATA_SECONDS": "making the Shakespeare",
}


def start_until(checkout, words, **changes):
    """Starts run.sh and waits until it prints these words. Returns the process."""
    process = start(["./run.sh"], checkout, environment(checkout.parent, **changes))
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return process
    raise AssertionError(f"run.sh has not printed {words!r}, only: {said}")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_breaks_nothing(checkout, phase, number, code):
    process = start_until(checkout, PHASES[phase], **{phase: "6"})
    time.sleep(0.5)
    kill_group(process, number)
    done = finish(process, 20)
    assert done.code == code
    if number != signal.SIGKILL:
        stopped = f"run.sh: stopped by {number.name}; run the same command again to continue\n"
        assert done.output == stopped
    assert_trains(run_sh(checkout))


def test_a_signal_while_an_incomplete_environment_is_removed(checkout):
    """The deletion takes seconds on a slow disk. The shell must not add that it was terminated."""
    (checkout / ".venv").mkdir()
    (checkout.parent / "bin" / "rm").unlink()
    slow = f'case "$*" in "-rf .venv") sleep 6 ;; esac\nexec {shutil.which("rm")} "$@"'
    write_program(checkout.parent, "rm", slow)
    process = start_until(checkout, ".venv again")
    time.sleep(0.5)
    kill_group(process, signal.SIGTERM)
    done = finish(process, 60)
    assert done.code == 143
    stopped = "run.sh: stopped by SIGTERM; run the same command again to continue\n"
    assert done.output == stopped
    assert_trains(run_sh(checkout))


def test_a_half_deleted_environment_is_made_again(checkout):
    """Without pyvenv.cfg, .venv/bin/python is the base Python, and pip would install into that."""
    install_stubs(checkout)
    shutil.rmtree(checkout / ".venv" / "lib")
    (checkout / ".venv" / "pyvenv.cfg").unlink()
    (checkout / ".venv" / "ready").unlink()
    done = run_sh(checkout)
    assert "making the virtual environment .venv again, because it is incomplete" in done.output
    assert_trains(done)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_at_any_moment(checkout, number, code):
    """
    Sends the signal later and later, until a run gets as far as the training.

    A stopped run must print nothing but one line that says so.
    """
    delay = 0.02
    while True:
        process = start(["./run.sh"], checkout, environment(checkout.parent, TRAIN_SECONDS="0"))
        time.sleep(delay)
        kill_group(process, number)
        done = finish(process, 60)
        if "training on" in done.output:
            break
        assert done.code in (code, -number), done.output
        progress = "run.sh: (making|installing|waiting)"
        said = [line for line in done.output.splitlines() if not re.match(progress, line)]
        assert len(said) <= 1, done.output
        delay *= 1.3
    assert_trains(run_sh(checkout))


# Bash reads this first. It sends run.sh the signal between two commands: as soon as run.sh has
# started a child process, and before it does anything else.
SIGNAL_AFTER_START = """
set -o functrace
started=0
last=
count_starts() {
    [ "${!:-}" != "$last" ] || return 0
    last=$!
    started=$((started + 1))
    [ "$started" -ne "${SIGNAL_AT:-0}" ] || kill -TERM $$
}
trap count_starts DEBUG
"""


def has_ended(group):
    """Whether no process of a process group is left."""
    try:
        os.killpg(group, 0)
        return False
    except ProcessLookupError:
        return True


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_training(checkout, number, code):
    """The stub is Python, so run.sh must not rely on the signal that reaches it from the terminal."""
    process = start_until(checkout, "stub trains", TRAIN_SECONDS="60")
    kill_group(process, number)
    done = finish(process, 20)
    assert done.code == code
    advice = "to continue from the last validation, add --resume latest"
    assert done.output.endswith(f"run.sh: stopped by {number.name}; {advice}\n")
    assert "stub trained" not in done.output
    assert_group_ends(process)


def assert_group_ends(process):
    """The processes that run.sh started end within three seconds. Python's venv module starts
    ensurepip, which isn't a child of run.sh, so it isn't stopped; in these tests, it ends at once."""
    wait_until(lambda: has_ended(process.pid), 3)


def test_a_signal_to_run_sh_alone_ends_what_it_started(checkout):
    process = start_until(checkout, PHASES["PIP_SECONDS"], PIP_SECONDS="30")
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process, 20).code == 143
    assert_group_ends(process)


def test_a_signal_right_after_the_start_of_a_child_ends_the_child(checkout):
    """Bash runs the trap before the command that follows the start."""
    hook = write(checkout.parent / "hook", SIGNAL_AFTER_START)
    changes = {"BASH_ENV": str(hook), "PIP_SECONDS": "6", "DATA_SECONDS": "6"}
    starts = 0
    while True:
        starts += 1
        variables = environment(checkout.parent, SIGNAL_AT=str(starts), **changes)
        process = start(["./run.sh"], checkout, variables)
        done = finish(process, 60)
        if done.code == 0:
            break
        assert done.code == 143, done.output
        assert_group_ends(process)
    assert starts > 10
    assert_trains(done)


@pytest.mark.skipif(not shutil.which("flock"), reason="there is no flock")
def test_two_at_once(checkout):
    first = start_until(checkout, "making the virtual environment", VENV_SECONDS="1")
    second = run_sh(checkout)
    assert_trains(finish(first))
    assert_trains(second)
    assert second.output.startswith("run.sh: waiting for another ./run.sh to finish")
    assert len(calls(checkout.parent)) == 2  # only one of the two installed packages


def test_nobody_waits_for_training(checkout):
    assert_trains(run_sh(checkout))
    first = start_until(checkout, "stub trains", TRAIN_SECONDS="60")
    second = run_sh(checkout)
    assert_trains(second)
    assert first.poll() is None
    assert "waiting" not in second.output
    kill_group(first, signal.SIGKILL)
    finish(first)


def test_without_flock(checkout):
    (checkout.parent / "bin" / "flock").unlink()
    assert_trains(run_sh(checkout))


# -----------------------------------------------------------------------------
# Paths


@pytest.mark.parametrize("name", ["with space", "it's", "ü", "a;b$c&(d)", "plain_1.2+3@5%6,7=8-9"])
def test_any_path(tmp_path, name):
    checkout = make_checkout(tmp_path, name)
    done = run_sh(checkout)
    assert_trains(done)
    paths = r"stub trains \['--save_checkpoint'\] (.*/bin/python) (.*torch.__init__.py)"
    executable, module = re.search(paths, done.output).groups()
    if name.startswith("plain"):
        assert executable == f"{checkout}/.venv/bin/python"
        assert not (tmp_path / "home").exists()
    else:
        assert name not in executable
        assert name not in module
        assert Path(module).samefile(next((checkout / ".venv").rglob("torch/__init__.py")))
    assert "installing" not in run_sh(checkout).output


def test_a_special_path_where_no_link_can_be_made(tmp_path):
    checkout = make_checkout(tmp_path, "with space")
    (tmp_path / "file").write_text("")
    choices = [
        dict(HOME="/dev/null"),
        dict(HOME=None),
        dict(XDG_CACHE_HOME=f"{tmp_path}/a b"),
    ]
    for changes in choices:
        done = run_sh(checkout, **changes)
        assert_trains(done)
        assert f"{checkout}/.venv/bin/python" in done.output


def test_a_colon_in_the_path(tmp_path):
    """Python's venv refuses such a path."""
    assert_line(run_sh(make_checkout(tmp_path, "a:b")), "a:b contains a colon", "move")


def test_called_from_elsewhere(checkout):
    done = run([checkout / "run.sh"], checkout.parent, environment(checkout.parent))
    assert_trains(done)


def test_cdpath_leads_nowhere_else(checkout):
    """With CDPATH, bash's cd prefers a folder of the same name there."""
    other = checkout.parent / "other" / "checkout"
    other.mkdir(parents=True)
    variables = environment(checkout.parent, CDPATH=other.parent)
    done = run(["checkout/run.sh"], checkout.parent, variables)
    assert_trains(done)
    assert list(other.iterdir()) == []


# -----------------------------------------------------------------------------
# GPUs


@pytest.fixture
def with_gpus(checkout):
    """A checkout with installed packages, on a machine whose nvidia-smi lists two GPUs."""
    assert_trains(run_sh(checkout))
    write_program(checkout.parent, "nvidia-smi", NVIDIA_SMI)
    return checkout


@pytest.mark.parametrize(
    "cuda, driver, words",
    [
        ("13.0", "550.54.15", ["driver 580 or later", "is 550.54.15;", "use --device cpu"]),
        ("12.6", "470.199.02", ["driver 525 or later", "is 470.199.02;"]),
        ("13.0", "580.65", ["580.65 is new enough; check the output of nvidia-smi"]),
        ("12.6", "", ["driver 525 or later", "is unknown;"]),
        (None, "580.65", ["build for CPUs; remove .venv and run ./run.sh again"]),
    ],
)
def test_gpus_that_pytorch_cannot_use(with_gpus, cuda, driver, words):
    assert_line(run_sh(with_gpus, USABLE="0", TORCH_CUDA=cuda, DRIVER=driver), *words)


def test_the_users_own_environment_is_not_removed(with_gpus):
    """Its PyTorch is the build for CPUs. The user must install another one into it."""
    theirs = with_gpus.parent / "theirs"
    (with_gpus / ".venv").rename(theirs)
    path = f"{theirs / 'bin'}:{with_gpus.parent / 'bin'}"
    done = run_sh(with_gpus, VIRTUAL_ENV=theirs, PATH=path, USABLE="0", DRIVER="580.65")
    assert_line(done, "install the build for NVIDIA GPUs in the active environment (https://")
    assert "remove .venv" not in done.output


def test_the_systems_pytorch_cannot_use_the_gpu(checkout):
    """A new .venv would have the same PyTorch, so run.sh must not advise to remove .venv."""
    system_torch(checkout, "2.12.1")
    torch = checkout.parent / "system" / "torch" / "__init__.py"
    torch.write_text(TORCH)
    write_program(checkout.parent, "nvidia-smi", NVIDIA_SMI)
    done = run_sh(checkout, USABLE="0", DRIVER="580.65")
    assert_line(done, "replace the system's PyTorch with the build for NVIDIA GPUs (https://")
    assert "remove .venv" not in done.output


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--device=cpu"], ["--recipe=soup", "--device=cpu"]])
def test_the_cpu_can_be_chosen(with_gpus, words):
    """The script doesn't get the option. It sees no GPU."""
    write(with_gpus / "recipes" / "soup.py", (with_gpus / "train_gpt.py").read_text())
    for done in (run_sh(with_gpus, *words), run_sh(with_gpus, CUDA_VISIBLE_DEVICES="")):
        assert_trains(done)
        assert "'CUDA_VISIBLE_DEVICES': ''" in done.output
        assert "--device" not in done.output
    done = run_sh(with_gpus, "compare", "--device=cpu", "--runs", "2")
    assert "stub compare: ['--runs', '2']" in done.output, done.output
    assert (with_gpus / "data" / "shakespeare").exists()
    assert not (with_gpus / "data" / "fineweb10B").exists()


def test_another_device(checkout):
    assert_line(run_sh(checkout, "--device", "cuda"), '"cuda": it only takes cpu')


def test_an_amd_gpu_that_pytorch_cannot_use(checkout):
    assert_trains(run_sh(checkout))
    write_amd_gpu(checkout.parent, 16 * 1024)
    assert_line(run_sh(checkout, TORCH_HIP="7.2.5"), "AMD GPU", "ROCm 7.2.5", "--device cpu")


def test_gpus_are_used(with_gpus):
    """run.sh starts torchrun. The launcher is a stub, too."""
    site = next((with_gpus / ".venv").rglob("site-packages"))
    write(
        site / "torch" / "distributed" / "run.py",
        "import sys\nprint('stub launches', sys.argv[1:])\n",
    )
    done = run_sh(with_gpus, "--seed", "1", USABLE="2", TORCH_CUDA="13.0")
    assert done.code == 0, done.output
    assert "run.sh: training on 2 of 2 GPUs" in done.output, done.output
    words = ["--standalone", "--nproc_per_node=2", "-m", "train_gpt", "--seed", "1", "--save_checkpoint"]
    assert f"stub launches {words}" in done.output
    assert (with_gpus / "data" / "fineweb10B").exists()


SCREEN = """# not --track fineweb
options = {options}
[[factor]]
name = "muon_lr"
low = "--muon_lr 0.04"
high = "--muon_lr 0.06"
"""


@pytest.mark.parametrize(
    "words, made",
    [
        (["compare"], "fineweb10B"),
        (["compare", "--base", "--track mini"], "shakespeare"),
        (["compare", "--base=main --track=mini", "--no_times"], "shakespeare"),
        (["compare", "--track", "mini", "--idea", "*.patch"], "shakespeare"),
        (["compare", "--list"], None),
        (["compare", "--clear"], None),
        (["screen", '"--track mini"', "--blocks", "16"], "shakespeare"),
        (["screen", "'--track=mini --num_iterations 600'"], "shakespeare"),
        (["screen", '"""\n  --track mini\n"""'], "shakespeare"),
        (["screen", '"--track mini"  # use --track fineweb on a GPU'], "shakespeare"),
        (["screen", "'--track mini'# it's not \"--track fineweb\""], "shakespeare"),
        (["screen", '"""\n  --track mini\n"""\t# not --track fineweb'], "shakespeare"),
        (["screen", '"""\n  --idea it\'s --track mini\n"""'], "shakespeare"),
        (["screen", '"--log_dir a#b --track mini"'], "shakespeare"),
        (["screen", "'--log_dir \"#\" --track mini'"], "shakespeare"),
        (["screen", '"--muon_lr 0.05"  # not --track mini'], "fineweb10B"),
        (["screen", '"--muon_lr 0.05"'], "fineweb10B"),
    ],
)
def test_the_data_of_the_track_that_is_trained_on_gpus(with_gpus, words, made):
    """Options also count inside quotes, and in the file of a screen (here: the second word)."""
    shutil.rmtree(with_gpus / "data" / "shakespeare")
    folder = with_gpus.parent / "my screens"
    folder.mkdir()
    if words[0] == "screen":
        write(folder / "screen.toml", SCREEN.format(options=words[1]))
        words = ["screen", "screen.toml", *words[2:]]
    variables = environment(with_gpus.parent, USABLE="2", TORCH_CUDA="13.0")
    done = run(["../checkout/run.sh", *words], folder, variables, timeout=120)
    assert done.code == 0, done.output
    assert f"stub {words[0]}: {words[1:]}" in done.output, done.output
    folders = [path.name for path in (with_gpus / "data").iterdir() if path.is_dir()]
    assert folders == ([made] if made else [])


def test_a_recipe_is_trained(checkout):
    """--recipe takes another script, which gets the other arguments."""
    (checkout / "recipes").mkdir()
    stub = (checkout / "train_gpt.py").read_text().replace("stub trains", "stub cooks")
    write(checkout / "recipes" / "soup.py", stub)
    for words in (["--recipe", "soup", "--seed", "3"], ["--seed", "3", "--recipe=soup"]):
        done = run_sh(checkout, *words)
        assert done.code == 0, done.output
        assert "stub cooks ['--seed', '3', '--save_checkpoint']" in done.output, done.output
    done = run_sh(checkout, "--recipe", "soup", "--log_dir", "a  b *", "")
    assert "stub cooks ['--log_dir', 'a  b *', '', '--save_checkpoint']" in done.output, done.output
    assert_line(run_sh(checkout, "--recipe", "cake"), 'no recipe "cake"', "one of: soup")


# -----------------------------------------------------------------------------
# Before and after training


def test_what_the_checks_find_reaches_the_run(checkout):
    found = "REASON=g++: 'x' $HOME; and more\n--train_seq_len=12288"
    done = run_sh(checkout, "--seed", "3", CHECKED=found)
    assert "stub checks ['--script', 'train_gpt', '--seed', '3']" in done.output
    assert "stub trains ['--seed', '3', '--train_seq_len=12288', '--save_checkpoint']" in done.output
    assert """'REASON': "g++: 'x' $HOME; and more\"""" in done.output


def test_a_check_that_fails_ends_the_run(checkout):
    done = run_sh(checkout, CHECK_ERROR="1")
    assert done.code == 2
    assert "trains" not in done.output


def test_the_trained_model_writes_a_text(checkout):
    write(checkout / "my logs" / "old.pt", "")
    done = run_sh(checkout)
    old, new = sorted((checkout / "my logs").iterdir(), reverse=True)
    words = ["--brief", f"my logs/{new.name}"]
    assert done.output.endswith(f"stub trained\nstub samples {words}\n")


def test_the_status_of_training_is_that_of_run_sh(checkout):
    done = run_sh(checkout, TRAIN_STATUS="3")
    assert done.code == 3
    assert "stub trained" in done.output
    assert "sample" not in done.output


# -----------------------------------------------------------------------------
# Folders for compiled code


def test_compiled_code_goes_elsewhere_from_a_folder_that_cannot_hold_it(checkout):
    """There is a file where the folder should be. Even root can't write files into it."""
    write(checkout.parent / "file", "")
    done = run_sh(checkout, TORCHINDUCTOR_CACHE_DIR=checkout.parent / "file")
    assert_trains(done)
    home = checkout.parent / "home" / ".cache" / "torchinductor"
    bad = checkout.parent / "file"
    words = f"storing compiled code in {home}, because {bad} is read-only or mounted noexec\n"
    assert words in done.output
    assert list(home.iterdir()) == []  # run.sh has removed its test file


def test_a_folder_that_holds_compiled_code_is_kept(checkout):
    done = run_sh(checkout, TORCHINDUCTOR_CACHE_DIR=checkout.parent / "cache")
    assert_trains(done)
    assert "storing compiled code" not in done.output
    assert list((checkout.parent / "cache").iterdir()) == []


def test_our_environment_keeps_compiled_modules(checkout):
    """
    Containers often set PYTHONDONTWRITEBYTECODE.

    Then Python would compile all modules of PyTorch again at every start.
    """
    assert_trains(run_sh(checkout, PYTHONDONTWRITEBYTECODE="1"))
    site = next((checkout / ".venv").rglob("site-packages"))
    assert list((site / "torch").rglob("*.pyc"))
