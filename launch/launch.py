"""
Everything behind ./run.sh. It runs on Python's standard library alone, because it installs the other
packages. The order of a training:

    environment   the active one as it is, or .venv
    packages      what is missing of requirements.txt
    checks        launch/checks.py: options, GPUs, memory, data, compiled code
    training      one process per GPU; on a CPU, one per core
    sample        the trained model writes a short text
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would print a traceback

import argparse
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import venv
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # instead of launch/

from data.datasets import DATASETS, get_data
from judge.commands import UserError, did_you_mean
from judge.processes import has_nvidia_gpu, output_of
from judge.runs.same_run import ask_python
from lib.processes import (
    ROOT,
    check_machine,
    checkpoints,
    clean_environment,
    run,
    say,
    setup_lock,
    start,
    version_of,
    wait,
)

VENV = ROOT / ".venv"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

USAGE = f"""\
usage: ./run.sh [OPTIONS]            train; first, install packages and get data
       ./run.sh --recipe NAME        train recipes/NAME.py instead of train_gpt.py
       ./run.sh prepare              all of that but the training
       ./run.sh compare | screen     does an idea help? which parts of it matter?
                                     (--recipe NAME, --nproc_per_node N: of our scripts)
       ./run.sh verify | submit      check the logs of a record; file it
       ./run.sh replay | plot        extract a run's sources; draw loss curves
       ./run.sh sample | hellaswag   let a trained model write text; score it
       ./run.sh data NAME            get {", ".join(DATASETS)} or text
       ./run.sh bench | levers       time a step's parts; time GPT-2's speedups
       ./run.sh gpu-report           check and time training on a GPU
       ./run.sh test [--slow]        run the tests; with --slow, all of them
       ./run.sh test machines        imitate other machines
With --device cpu, GPUs aren't used. --help after a command lists its options.
"""
PATHS = ["log_dir", "train_files", "val_files", "resume"]  # options of trainings
COMMANDS = {
    "train": "train_gpt",
    "prepare": "train_gpt",
    "compare": "judge compare",
    "screen": "judge screen",
    "verify": "leaderboard.verify",
    "submit": "leaderboard.submit",
    "replay": "leaderboard.replay",
    "plot": "judge plot",
    "bench": "gpu.bench",
    "gpu-report": "gpu.gpu_report",
    "levers": "gpu.levers",
    "sample": "evals.sample",
    "hellaswag": "evals.hellaswag",
    "data text": "data.own_text",
    "test": "pytest",
    "test machines": "pytest",
}
COMMANDS |= {f"data {name}": dataset.command for name, dataset in DATASETS.items()}
# The folders whose requirements.txt a command needs. Those of judge/ and leaderboard/ need that of judge/.
ALL_FOLDERS = ["judge", "evals", "tests"]
FOLDERS = {"hellaswag": ["evals"], "test": ALL_FOLDERS, "test machines": ALL_FOLDERS}


NEXT = """
What next?
  ./run.sh sample --prompt "TEXT"            the model continues a text
  edit train_gpt.py, then ./run.sh compare   does your change help?
  ./run.sh data text FILES                   makes data of your own text
"""


class Stopped(BaseException):
    """A signal came. Its argument is the signal's number."""

    advice = "run the same command again to continue"


def handle_signals(handler):
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)


def stop(number, frame):
    handle_signals(signal.SIG_IGN)  # a second one doesn't disturb the end
    raise Stopped(number)


# -----------------------------------------------------------------------------
# The environment: the active one as it is, or .venv. Two files in .venv say how far it got: `ours` is
# written first, and `ready` last. An unfinished one is made again. The user's own is never deleted.


def has_pytorch(path):
    """Is there a PyTorch of at least 2.11, which train_gpt.py needs?"""
    numbers = re.findall(r"\d+", version_of("torch", path))
    return [int(number) for number in numbers[:2]] >= [2, 11]


def make_environment():
    if VENV.exists():
        if not (VENV / "ours").exists():
            raise UserError(
                f"{VENV} isn't from ./run.sh; activate it, then run ./run.sh again, or move it away"
            )
        shutil.rmtree(VENV)
    VENV.mkdir()
    (VENV / "ours").touch()
    system_torch = has_pytorch(sys.path)
    say(f"making the virtual environment .venv{', with the PyTorch of the system' * system_torch}")
    # Debian and Colab take ensurepip away
    has_ensurepip = importlib.util.find_spec("ensurepip")
    if not (has_ensurepip or importlib.util.find_spec("pip")):
        raise UserError(
            f"{sys.executable} has no venv module; install it (on Debian or Ubuntu: apt install python3-venv)"
        )
    venv.create(VENV, system_site_packages=system_torch, symlinks=True, with_pip=bool(has_ensurepip))
    if not has_ensurepip:
        pip_install(sys.executable, ["pip"], "--python", VENV / "bin" / "python")


def missing_packages(path, folders):
    """Returns the lines of requirements.txt in the folders whose package is missing. One that is there in
    another version stays: machines with their own PyTorch keep it."""
    lines = []
    for folder in [".", *folders]:
        lines += Path(ROOT, folder, "requirements.txt").read_text().splitlines()
    requirements = dict.fromkeys(line.partition("#")[0].strip() for line in lines)
    return [line for line in requirements if not version_of(line.partition("==")[0], path)]


def install(folders, theirs=False):
    """Installs what is missing of the folders' requirements.txt. Returns the environment's Python. The
    scripts of others may need an older PyTorch than train_gpt.py."""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if sys.prefix != sys.base_prefix:  # the first python3 may be that of an environment
        active = sys.prefix
    ours = not active or (os.path.realpath(active) == str(VENV) and (VENV / "ours").exists())
    ready = VENV / "ready"
    python = plain_folder() / "bin" / "python" if ours else sys.executable
    if not (ours or theirs or has_pytorch(sys.path) or not version_of("torch", sys.path)):
        raise UserError(
            f"the PyTorch of the active environment ({active}) is older than 2.11; update it, or deactivate "
            "the environment"
        )
    version, path = ask_python(python)
    if ours and not (ready.exists() and version):
        make_environment()
        _, path = ask_python(python)
    missing = missing_packages(path, folders)
    if missing and ours:
        ready.unlink(missing_ok=True)
    pip_install(python, missing)
    if ours and not ready.exists():
        ready.touch()
    return python


def plain_folder():
    """Returns .venv, or a link to it. PyTorch's command line for the C++ compiler doesn't quote its own
    folder, so .venv needs a path without spaces and the like."""
    if re.fullmatch(r"[A-Za-z0-9_./+:@%,=-]+", str(VENV)):
        return VENV
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    link = Path(cache, "nanogpt-speedrun", hashlib.sha256(str(VENV).encode()).hexdigest()[:16])
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(VENV)
    return link if link.is_symlink() else VENV


# -----------------------------------------------------------------------------
# Packages


def answers(index):
    """Does a package index answer, if only that it lacks the package?"""
    try:
        urllib.request.urlopen(f"{index}/pip/", timeout=10)
    except OSError as e:
        return isinstance(e, urllib.error.HTTPError)
    return True


def torch_source(python):
    """Returns pip's options for the build of PyTorch that this machine needs."""
    settings = output_of(python, "-m", "pip", "config", "list") or ""
    if re.search("(index-url|find-links|no-index)=", settings):
        say("installing packages from the source in your pip settings")
        return []
    if not has_nvidia_gpu():
        if answers(CPU_INDEX):
            say("installing packages, with PyTorch for CPUs: a download of about 0.2 GB")
            return ["--extra-index-url", CPU_INDEX]
        say(f"{CPU_INDEX} doesn't answer, so PyTorch comes from the package index")
    say("installing packages, with PyTorch and CUDA: a download of up to 5 GB")
    return []


def pip_install(python, requirements, *options):
    """Shows pip's progress bars on a terminal. Elsewhere it shows only warnings and errors."""
    if not requirements:
        return
    if any(requirement.startswith("torch==") for requirement in requirements):
        options = torch_source(python)
    else:
        say(f"installing {', '.join(requirements)}")
    # --no-compile: Python compiles what it imports; compiling all of PyTorch would double the time
    quiet = ["--no-input", "--disable-pip-version-check", "--no-compile"]
    with tempfile.TemporaryDirectory() as folder:
        status = run(
            [python, "-m", "pip", "install", *quiet, *options, *requirements],
            stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,
            env=os.environ | {"TMPDIR": folder},
        )
    if status:
        raise UserError(f"{python} can't install the packages; pip's output is above")


# -----------------------------------------------------------------------------
# Training


def run_ranks(command, processes, **options):
    """Runs a command as the processes of one training on this machine. Returns its exit status. Only rank
    0 is seen. What another rank printed is shown if that one fails and rank 0 doesn't."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # a free one
    world = dict(WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    world["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    logs = [tempfile.TemporaryFile("w+") for _ in range(processes)]
    children = []
    for rank in range(processes):
        if rank:
            options = options | dict(stdout=logs[rank], stderr=logs[rank])
        env = os.environ | world | dict(RANK=str(rank), LOCAL_RANK=str(rank))
        children.append(start(command, env=env, **options))
    failed, status = wait(children)
    logs[failed].seek(0)
    print(logs[failed].read(), end="", file=sys.stderr)
    return status


def prepare(command, needs):
    """Trains a step, so that its compiled code is in PyTorch's cache. Returns the exit status."""
    say("compiling may take a minute or two")
    with tempfile.TemporaryDirectory() as folder:
        step = ["--num_iterations=1", "--num_runs=1", f"--log_dir={folder}"]
        status = run_ranks(command + step, needs["processes"], cwd=ROOT, stdout=subprocess.DEVNULL)
    if status == 0:
        say(f"ready: {needs['text']}")
    return status


def train_and_sample(command, needs, same):
    """Trains, and lets the model write a short text. Returns the exit status of the training. `same` is how
    a command begins that continues it."""
    say(f"training {needs['text']}")
    if not sys.stdout.isatty():  # there, the seconds are shown
        say("before the first step, compiling may take a minute or two")
    words = [command[0], "-m", "launch.train_and_sample", *command[2:], "--save_checkpoint"]
    folder = ROOT / needs["log_dir"]
    before = checkpoints(folder)
    try:
        status = run_ranks(words, needs["processes"], cwd=ROOT)
    except Stopped as stopped:
        if sys.stdout.isatty():
            print()  # the bar has begun this line
        saved = [found for found in checkpoints(folder) if found not in before]
        stopped.advice = "nothing is saved yet; run the same command again"
        if saved:
            stopped.advice = f"continue with {same} --resume {os.path.relpath(saved[-1][1])}"
        raise
    if status == 0:
        print(NEXT, end="")
    return status


# -----------------------------------------------------------------------------
# The command line


def at_home(word):
    """Replaces a ~ that the shell leaves as it is, as in --log_dir=~/logs."""
    option, equals, value = word.partition("=")
    return option + equals + os.path.expanduser(value)


def from_caller(path):
    """A path that the user typed, as seen from the repository, where training runs."""
    return path if path == "latest" or os.path.isabs(path) else os.path.relpath(path, ROOT)


def parse(name, words):
    """Returns our own options, and the others for the command."""
    usage = "./run.sh [COMMAND] [OPTIONS]"
    parser = argparse.ArgumentParser("run.sh", usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--device", choices=["cpu"])
    if name in ("train", "prepare"):
        recipes = [
            path.stem
            for path in sorted(Path(ROOT, "recipes").glob("*.py"))
            if "parse_arguments" in path.read_text(encoding="utf-8")
        ]
        parser.add_argument("--recipe", choices=recipes)
        for path in PATHS:
            parser.add_argument(f"--{path}", type=from_caller)
    args, words = parser.parse_known_args(words)
    words += [f"--{name}={value}" for name, value in vars(args).items() if name in PATHS and value]
    return args, words


def of_our_scripts(words):
    """What compare and screen need to train train_gpt.py: judge.toml; or --recipe NAME, or several processes:
    another command than the one in there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    parser.add_argument("--nproc_per_node", default="1")
    args, words = parser.parse_known_args(words)
    command = tomllib.loads((ROOT / "judge.toml").read_text())["command"]
    ours = ["--project", str(ROOT)]
    if args.recipe:
        command = command.replace("-m train_gpt", f"-m recipes.{args.recipe}")
    if args.nproc_per_node != "1":
        torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={args.nproc_per_node}"
        command = command.replace("python", f"python {torchrun}")
        ours += ["--jobs", "1", "--gpus_per_run", args.nproc_per_node]
    return [*ours, "--command", command, *words]


def command_line(name, python, arguments):
    """Returns the command that ./run.sh NAME becomes. Its exit status and signals are its own."""
    # the python of the runs that it starts
    os.environ["PATH"] = f"{Path(python).parent}:{os.environ.get('PATH', os.defpath)}"
    if name.startswith("test"):
        get_data(python, dict(train_files=f"{DATASETS['shakespeare'].folder}/*", num_iterations=1))
        os.chdir(ROOT)
        # a process a core; those that run out of tests take some from another; paths replace "tests"
        workers = "-n auto --maxprocesses 8 --dist worksteal".split()
        machines = ["tests/machines/cases.py", "tests/machines/slurm.py"]
        paths = machines if name == "test machines" else []
        return [python, "-m", "pytest", "-o", "testpaths=tests", *workers, *paths, *arguments]
    script, *words = COMMANDS[name].split()
    os.environ["PYTHONPATH"] = str(ROOT)  # the working directory stays the caller's
    os.environ["JUDGE_PROGRAM"] = "./run.sh"
    return [python, "-P", "-m", script, *words, *arguments]


def split_command(argv):
    """Returns the name of the command, and the words after it."""
    for count in (2, 1):
        name = " ".join(argv[:count])
        if name in COMMANDS:
            return name, argv[count:]
    if argv and not argv[0].startswith("-"):
        meant = did_you_mean(argv[0], COMMANDS)
        raise UserError(f"there is no command {name}{meant or '; ./run.sh --help lists them'}")
    return "train", argv


def launch(argv):
    """Runs a command. Returns its exit status."""
    dropped = clean_environment()
    if dropped:
        say(f"ignored: {', '.join(dropped)}")
    name, words = split_command(list(map(at_home, argv)))
    args, words = parse(name, words)
    if args.device:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    wants_help = "--help" in words or "-h" in words
    if wants_help and name == "train":
        print(USAGE, flush=True)
    script = COMMANDS[name]
    needs_judge = script.startswith(("judge ", "leaderboard."))
    folders = FOLDERS.get(name, ["judge"] if needs_judge else [])
    if name == "data text" and any(".parquet" in word for word in words):
        folders = FOLDERS["hellaswag"]  # the package that reads such files
    theirs = any(word.startswith(("--command", "--base_logs")) for word in words)  # of compare
    try:
        with setup_lock():
            tempfile.gettempdir()
            python = install(folders, theirs)
    except UserError:
        raise
    except (OSError, subprocess.CalledProcessError) as e:  # a disk is full or read-only
        raise UserError(f"can't install the packages: {e}")
    if script == "train_gpt":
        module = f"recipes.{args.recipe}" if args.recipe else script
        if wants_help:
            return run([python, "-m", module, "--help"], cwd=ROOT)
        needs = check_machine(python, name, module, *words)
        command = [python, "-m", module, *words, *needs["options"]]
        if name == "prepare":
            return prepare(command, needs)
        chosen = [
            f" --{name} {getattr(args, name)}" for name in ("device", "recipe") if getattr(args, name)
        ]
        return train_and_sample(command, needs, f"./run.sh{''.join(chosen)}")
    if name in ("compare", "screen") and not theirs:
        if not wants_help:
            needs = check_machine(python, name, *words)
            words = [*needs["options"], *words]
        words = of_our_scripts(words)
    command = command_line(name, python, words)
    os.execv(python, command)


def main(argv):
    handle_signals(stop)
    try:
        return launch(argv)
    except UserError as e:
        print(f"run.sh: error: {e}", file=sys.stderr)
        return 2
    except Stopped as e:
        number = e.args[0]
        say(f"stopped by {signal.Signals(number).name}; {e.advice}")
        return 128 + number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
