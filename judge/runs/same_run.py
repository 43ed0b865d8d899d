"""
What makes two runs the same run: all that a run could read. That is

    run           the script or the command, and its settings
    files         of the copy in which it runs, behind the copy's links (such as data/), and others that the
                  command, the options or the settings name
    environment   all variables but those in IGNORED, which the run doesn't get
    software      all installed packages, Python, the machine, the compiler, threads and processes

A run is kept under a hash of all this. It is found out before a run and again after it.
"""

import contextlib
import glob
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import time
from pathlib import Path

from judge.environment import child_environment, environment, matches, usable_cores
from judge.processes import output_of

# The terminal, the shell's own notes, the desktop, remote logins, the name of a container, where it was
# rented. Runs don't get these, nor what judge/environment.py drops
IGNORED = """
    _ PWD OLDPWD SHLVL PS? PROMPT_COMMAND HIST* TERM TERM_* COLORTERM COLUMNS LINES LS_COLORS LESS* PAGER
    EDITOR VISUAL MAIL TMUX* STY WINDOW* VTE_VERSION VSCODE_* CONDA_SHLVL *_PROMPT *_PROMPT_MODIFIER
    DISPLAY WAYLAND_DISPLAY XAUTHORITY XDG_SESSION_* XDG_RUNTIME_DIR DBUS_* DESKTOP_* GNOME_*
    INVOCATION_ID JOURNAL_STREAM SSH_* SUDO_* HOSTNAME RUNPOD_* KUBERNETES_*
""".split()
# What is in the repository, and no script of ours reads: a new note isn't a new script
NOT_READ = ("*.md", "records/*", "tests/*")

HASHES = {}  # (path, size, times, inode) -> SHA-256 of a file; folders with times -> their packages


def hash_text(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def hash_file(path: Path) -> str:
    """Of the content, and whether it is executable. A file is read again only if its time or size has
    changed, or if it was so new that one more change may have the same time."""
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    found = HASHES.get(key)
    if found is None:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        if time.time() - stat.st_ctime > 1:
            HASHES[key] = found
    return found + " executable" * bool(stat.st_mode & 0o100)


def hash_tree(path: Path, name: str, above: tuple[Path, ...] = ()) -> dict[str, str]:
    """The file at this path, or all files below it, by name. A link counts with what is behind it, and
    with its target: but if that is absolute, the same folder elsewhere has another one."""
    found = {}
    if path.is_symlink() and not os.path.isabs(os.readlink(path)):
        found[f"{name} (link)"] = os.readlink(path)
    if path.is_file():
        found[name] = hash_file(path)
    elif path.is_dir() and path.resolve() not in above:  # a link may lead to a folder around it
        above = (*above, path.resolve())
        for entry in sorted(path.iterdir()):
            if entry.name != "__pycache__":
                found |= hash_tree(entry, os.path.join(name, entry.name), above)
    return found


def hash_copy(folder: Path, is_command: bool) -> dict[str, str]:
    """Of the copy in which a run is made."""
    found = hash_tree(folder, "")
    if not is_command:
        found = {name: value for name, value in found.items() if not matches(name, NOT_READ)}
    return found


def named_paths(text: str, folder: Path, origin: Path) -> list[Path]:
    """The files and folders that a text names outside the copy and outside the folder that was copied."""
    found = set()
    words = re.split(r"['\"=]", text)  # may have blanks
    for word in words + re.split(r"[\s'\"=:;,|&<>()]+", text):
        for name in glob.glob(os.path.expanduser(os.path.expandvars(word)), root_dir=folder):
            path = Path(os.path.normpath(folder / name))
            if not any(path.is_relative_to(a) or a.is_relative_to(path) for a in (folder, origin)):
                found.add(path)
    return sorted(found)


def packages(path: list[str] = sys.path) -> dict[str, str]:
    """Their versions, by name."""
    folders = [folder for folder in path if os.path.isdir(folder)]
    key = tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders)
    if key in HASHES:  # an installation makes and deletes folders
        return HASHES[key]
    found = HASHES[key] = {}
    for package in importlib.metadata.distributions(path=folders):
        found.setdefault(str(package.name), package.version)  # the first one is imported
    return found


def hash_named(path: Path) -> dict[str, str]:
    """A program of an environment stands for the packages that are installed there."""
    found = hash_tree(path, str(path))
    folders = glob.glob(f"{path.parent.parent}/lib/python*/site-packages")
    if path.parent.name == "bin" and folders:
        found[f"packages of {path.parent.parent}"] = hash_text(str(sorted(packages(folders).items())))
    return found


def cpu_line(name: str) -> str:
    """The first value of this name in /proc/cpuinfo; "" if there is none."""
    info = ""
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^(?:{name})\s*: (.*)", info, re.MULTILINE)
    return found[1] if found else ""


def machine_facts(gpu: bool, threads: int, processes: int) -> dict:
    """The software and the machine, of which a GPU is the part that counts."""
    machine = f"{cpu_line('model name') or platform.machine()}, {usable_cores()} cores"
    if gpu:
        gpus = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        machine = "; ".join((gpus or "a GPU").strip().splitlines())
    compiler = os.environ.get("CXX", "g++").split()[:1]
    version = output_of(*compiler, "--version") or ""
    return packages() | {
        "Python": platform.python_version(),
        "machine": machine,
        "instruction sets": hash_text(cpu_line("flags|Features")),
        "compiler": version.strip().splitlines()[:1],
        "threads": threads,
        "processes": processes,
    }


def run_environment(is_command: bool) -> dict[str, str]:
    """The environment of a run. `python` and `torchrun` of a command are those of our environment."""
    variables = {
        name: value for name, value in child_environment().items() if not matches(name, IGNORED)
    }
    if is_command:
        path = variables.get("PATH", "")
        return variables | {"PATH": f"{Path(sys.executable).parent}:{path}"}
    return variables | environment()


def changes(old: dict[str, dict], new: dict[str, dict]) -> list[str]:
    """What isn't the same, in words."""
    words = []
    for kind in new:
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
