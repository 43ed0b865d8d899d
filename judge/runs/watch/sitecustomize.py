"""
Python imports this file when it starts, because runs.py names its folder in PYTHONPATH. It writes down
each file that is read in the folder of which the run has a copy.
"""

import json
import os
import sys

FOLDER, ORIGIN, *DATA = json.loads(os.environ["COMPARE_WATCH"])
ALLOWED = [f for f in (*DATA, sys.prefix, sys.base_prefix) if f.startswith(f"{ORIGIN}/")]


def watch(event, arguments):
    """The audit hook, which Python calls before it opens a file."""
    if event not in ("open", "cpython.run_file") or isinstance(arguments[0], int):
        return
    if event == "open" and arguments[2] & os.O_ACCMODE == os.O_WRONLY:
        return
    path = os.path.realpath(os.fsdecode(arguments[0]))
    if not path.startswith(f"{ORIGIN}/") or "/." in os.path.dirname(path)[len(ORIGIN) :]:
        return  # hidden folders hold caches and environments
    if os.path.isfile(path) and not any(f"{path}/".startswith(f"{folder}/") for folder in ALLOWED):
        with open(f"{FOLDER}/read", "a") as file:
            print(path, file=file)


sys.addaudithook(watch)
