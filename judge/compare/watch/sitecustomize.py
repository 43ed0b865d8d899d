"""
Python imports this file when it starts, because runs.py names its folder in PYTHONPATH. It writes down, in
the order of the events, what a run does outside of its copy:

    r PATH   reads a file, or the names in a folder
    w PATH   writes a file, or makes a folder
    n PATH   names a file to a program that it starts, or is this program
"""

import json
import os
import re
import shutil
import sys

FILE, *SKIPPED = json.loads(os.environ["COMPARE_WATCH"])
SKIPPED += [os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR")]
SKIPPED += [sys.prefix, sys.base_prefix, os.path.dirname(__file__)]
SKIPPED = tuple(f"{os.path.realpath(folder)}/" for folder in SKIPPED if folder)
PACKAGES_AND_CACHES = re.compile("/(site-packages|dist-packages|torchinductor_[^/]*|[.]triton)/")
READING = {"os.listdir", "os.scandir", "cpython.run_file"}
STARTING = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"}
seen = set()


def note(kind, name):
    """Appends a line, once."""
    if isinstance(name, int):  # a file that is open
        return
    path = os.path.realpath(os.fsdecode(name or "."))
    folder, _, module = path.rpartition("/__pycache__/")
    if folder:  # a module stands for its source
        kind, path = "r", f"{folder}/{module.split('.')[0]}.py"
    if f"{path}/".startswith(SKIPPED) or PACKAGES_AND_CACHES.search(f"{path}/"):
        return
    if (kind, path) not in seen:
        seen.add((kind, path))
        with open(FILE, "a", errors="surrogateescape") as file:
            print(kind, path, file=file)


def note_start(program, words=(), folder=None):
    """What a program that starts could read: itself, and the files that its arguments name."""
    texts = [program, *([words] if isinstance(words, (str, bytes)) else words)]
    for word in re.split(r"[\s'\"=;|&<>()]+", " ".join(map(os.fsdecode, texts))):
        path = os.path.join(folder or ".", os.path.expanduser(os.path.expandvars(word)))
        path = path if os.path.isfile(path) else shutil.which(word)
        if path:
            note("n", path)


def watch(event, arguments):
    """The audit hook, which Python calls before it opens a file."""
    if event == "open":
        flags = arguments[2] or 0
        writes = flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL)
        note("w" if writes else "r", arguments[0])
    elif event in READING:
        note("r", arguments[0])
    elif event == "os.mkdir":
        note("w", arguments[0])
    elif event == "os.rename":
        note("w", arguments[1])
    elif event in STARTING:
        note_start(*arguments[: 3 if event == "subprocess.Popen" else 2])


open(FILE, "a").close()  # this Python is watched
sys.addaudithook(watch)
