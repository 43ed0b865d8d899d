"""
Python imports this file when it starts, because start.py names its folder in PYTHONPATH. It writes down, in
the order of the events, what a run does outside of its copy:

    r PATH   reads a file, or the names in a folder
    w PATH   writes a file, or makes a folder
    s TEXT   starts a program: a folder and the words, with tabs between them
"""

import json
import os
import re
import sys

FILE, *SKIPPED = json.loads(os.environ["COMPARE_WATCH"])
SKIPPED += [os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR")]
SKIPPED += [sys.prefix, sys.base_prefix, os.path.dirname(__file__)]
SKIPPED = tuple(f"{os.path.realpath(folder)}/" for folder in SKIPPED if folder)
PACKAGES_AND_CACHES = re.compile("/(site-packages|dist-packages|torchinductor_[^/]*|[.]triton)/")
EVENTS = {
    "os.listdir": ("r", 0),
    "os.scandir": ("r", 0),
    "cpython.run_file": ("r", 0),
    "os.mkdir": ("w", 0),
    "os.rename": ("w", 1),
}
STARTING = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"}
seen = set()


def note(kind, name):
    """What happens to a file or a folder."""
    if isinstance(name, int):  # a file that is open
        return
    path = os.path.realpath(os.fsdecode(name or "."))
    folder, _, module = path.rpartition("/__pycache__/")
    if folder:  # a module stands for its source
        kind, path = "r", f"{folder}/{module.split('.')[0]}.py"
    if f"{path}/".startswith(SKIPPED) or PACKAGES_AND_CACHES.search(f"{path}/"):
        return
    add_line(kind, path)


def add_line(kind, text):
    if (kind, text) not in seen:
        seen.add((kind, text))
        with open(FILE, "a", errors="surrogateescape") as file:
            print(kind, text, file=file)


def watch(event, arguments):
    """The audit hook, which Python calls before it opens a file."""
    if event == "open":
        flags = arguments[2] or 0
        writes = flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL)
        note("w" if writes else "r", arguments[0])
    elif event in EVENTS:
        kind, place = EVENTS[event]
        note(kind, arguments[place])
    elif event in STARTING:
        folder = arguments[2] if event == "subprocess.Popen" else None
        words = [os.path.abspath(folder or "."), arguments[0], *(arguments[1:2] or [()])[0]]
        add_line("s", "\t".join(map(os.fsdecode, words)).replace("\n", " "))


open(FILE, "a").close()  # this Python is watched
sys.addaudithook(watch)
