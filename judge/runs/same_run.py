"""
What makes two runs the same run: all that a run could read. That is

    run           the script or the command, and its settings
    files         of the copy in which it runs
    environment   all variables but those in IGNORED, which the run doesn't get, and in OF_A_JOB
    software      all installed packages, Python, the machine, the compiler, threads and processes
    read          what it read elsewhere, which only the run can show (see watch/sitecustomize.py); where the
                  links of its copy lead, such as data/; and the files and programs that the command and the
                  options name

A run is kept under a hash of the first four, which are found out before a run.
"""

import contextlib
import glob
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path

from judge.environment import child_environment, matches, usable_cores
from judge.processes import output_of
from judge.text import counted

# The terminal, the shell's own notes, the desktop, remote logins, the name of a container, where it was
# rented. Runs don't get these, nor what judge/environment.py drops
IGNORED = """
    _ PWD OLDPWD SHLVL PS? PROMPT_COMMAND HIST* TERM TERM_* COLORTERM COLUMNS LINES LS_COLORS LESS* PAGER
    EDITOR VISUAL MAIL TMUX* STY WINDOW* VTE_VERSION VSCODE_* CONDA_SHLVL *_PROMPT *_PROMPT_MODIFIER
    DISPLAY WAYLAND_DISPLAY XAUTHORITY XDG_SESSION_* XDG_RUNTIME_DIR DBUS_* DESKTOP_* GNOME_*
    INVOCATION_ID JOURNAL_STREAM SSH_* SUDO_* HOSTNAME RUNPOD_* KUBERNETES_* WSL* WT_SESSION WT_PROFILE_ID KRB5CCNAME
""".split()
# Which job this is, and where it runs. Runs get these, but they change no loss. For OMP_NUM_THREADS, see
# machine_facts
OF_A_JOB = """
    SLURM* PBS_* NCPUS PMI_* PMIX_* OMPI_* LSB_* LSF_* LS_SUBCWD LS_EXEC_T LS_JOBPID SGE_* JOB_ID JOB_NAME
    JOB_SCRIPT NHOSTS NQUEUES NSLOTS PE_HOSTFILE QUEUE REQUEST REQNAME OAR_* FLUX_* COBALT_* _CONDOR_* RAY_*
    SKYPILOT_* AWS_BATCH_* *_SERVICE_HOST *_SERVICE_PORT* *_PORT *_PORT_* MASTER_ADDR TMPDIR
    CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL OMP_NUM_THREADS
""".split()
# Where a run reads nothing of its own
SYSTEM = ("/usr", "/etc", "/proc", "/sys", "/run", sys.prefix, sys.base_prefix)

HASHES = {}  # file_key -> SHA-256 of a file; folders with times -> their packages
LARGE = 1 << 20  # bytes of a file whose hash is kept on the disk


def hash_text(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def file_key(stat: os.stat_result) -> str:
    """Another one for each content, unless a file changes twice at almost the same time."""
    times = f"{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{times}"


def load_hashes(table: Path) -> None:
    """Those of large files, from earlier comparisons. This one adds its own."""
    HASHES["table"] = table
    for line in table.read_text().splitlines() if table.exists() else []:
        key, _, found = line.partition(" ")
        HASHES[key] = found


def hash_file(path: Path) -> str:
    """Of the content, and whether it is executable. A file is read again only if its time or size has
    changed, or if it was so new that one more change may have the same time."""
    stat = path.stat()
    key = file_key(stat)
    found = HASHES.get(key)
    if found is None:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        if time.time() - stat.st_ctime > 1:
            HASHES[key] = found
            if stat.st_size >= LARGE and "table" in HASHES:
                with open(HASHES["table"], "a") as table:
                    print(key, found, file=table)
    return found + " executable" * bool(stat.st_mode & 0o100)


def hash_read(name: str) -> str | None:
    """Of a file, or of what a folder lists: names, sizes and dates, because there may be terabytes that no
    run reads. None if nothing can be read."""
    path = Path(name)
    with contextlib.suppress(OSError):
        if path.is_file():
            return hash_file(path)
        files = [(entry.name, entry.is_file() and entry.stat()) for entry in path.iterdir()]
        return hash_text(str(sorted((name, s and (s.st_size, s.st_mtime_ns)) for name, s in files)))


def hash_copy(folder: Path, not_read: list[str]) -> dict[str, str]:
    """Of the files of a copy, by name, without judge.toml and those that match a pattern of not_read. A link
    counts with where it leads: what is there counts if a run reads it."""
    patterns = ["judge.toml", *not_read]
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and path.parent.name != "__pycache__" and not matches(name, patterns):
            found[name] = hash_file(path)
    return found


def named_paths(text: str, known: list[Path], path: str) -> set[str]:
    """The files, folders and programs that a command names: its folder and its words, with tabs between them.
    Those in known folders are left out. `path` is its PATH. With a program of an environment, the packages that
    are installed there."""
    found = set()
    folder = Path(text.split("\t")[0])
    for word in re.split(r"[\s'\"=:;,|&<>()]+", text):
        word = os.path.expanduser(os.path.expandvars(word))
        for name in glob.glob(word, root_dir=folder) or [shutil.which(word, path=path) or "/"]:
            named = Path(os.path.normpath(folder / name))
            if not any(named.is_relative_to(a) or a.is_relative_to(named) for a in known):
                found.add(str(named))
                if named.parent.name == "bin":
                    found.update(glob.glob(f"{named.parent.parent}/lib/python*/site-packages"))
    return found


def packages(path: list[str]) -> dict[str, str]:
    """Their versions, by name. `path` is sys.path of a Python."""
    folders = [folder for folder in path if os.path.isdir(folder)]
    key = tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders)
    if key in HASHES:  # an installation makes and deletes folders
        return HASHES[key]
    found = HASHES[key] = {}
    for package in importlib.metadata.distributions(path=folders):
        found.setdefault(str(package.name), package.version)  # the first one is imported
    return found


def python_of(command: str, root: Path, path: str) -> str:
    """The Python that a command names, or else the first one of its PATH; "" if there is none."""
    words = re.split(r"[\s'\";&|=()]+", command)
    named = [word for word in words if re.fullmatch(r"(.*/)?python[\d.]*", word)]
    for word in [*named, "python", "python3"]:
        if found := shutil.which(root / word if "/" in word else word, path=path):
            return found
    return ""


def ask_python(python: str) -> tuple[str, list[str]]:
    """The version of a Python, and where its packages are."""
    code = "import sys, platform; print(platform.python_version(), *sys.path[1:], sep='\\n')"
    version, *path = (output_of(python, "-c", code) or "").splitlines() or [""]
    return version, path


def cpu_line(name: str) -> str:
    """The first value of this name in /proc/cpuinfo; "" if there is none."""
    info = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^(?:{name})\s*: (.*)", info, re.MULTILINE)
    return found[1] if found else ""


def machine_facts(gpu: bool) -> dict:
    """The machine, of which a GPU is the part that counts, and its compiler."""
    machine = f"{cpu_line('model name') or platform.machine()}, {usable_cores()} cores"
    if gpu:
        gpus = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = visible.count(",") + 1 if visible else None
        machine = counted((gpus or "a GPU").strip().splitlines()[:count])
    compiler = os.environ.get("CXX", "g++").split()[:1]
    version = output_of(*compiler, "--version") or ""
    return {
        "machine": machine,
        "instruction sets": hash_text(cpu_line("flags|Features")),
        "compiler": version.strip().splitlines()[:1],
    }


def run_environment(root: Path | None = None) -> dict[str, str]:
    """The environment of a run. The project's .venv comes first, unless the user has activated another."""
    variables = {
        name: value for name, value in child_environment().items() if not matches(name, IGNORED)
    }
    bin = root / ".venv" / "bin" if root else None
    if bin and bin.is_dir() and "VIRTUAL_ENV" not in variables:
        variables["PATH"] = f"{bin}:{variables.get('PATH', '')}"
    return {"PATH": os.defpath} | variables


def without_job(environment: dict[str, str]) -> dict[str, str]:
    """The variables that could change a loss."""
    return {name: value for name, value in environment.items() if not matches(name, OF_A_JOB)}


def changes(old: dict[str, dict], new: dict[str, dict]) -> list[str]:
    """What isn't the same, in words."""
    words = []
    for kind in old:
        for name in sorted(old[kind].keys() | new[kind].keys()):
            before, after = [facts[kind].get(name) for facts in (old, new)]
            if before == after:
                continue
            if kind == "software":
                words.append(f"{name} {before} -> {after}")
            elif before is None or after is None:
                words.append(f"{name} is {'new' if before is None else 'gone'}")
            else:
                words.append(f"{name} changed")
    return words
