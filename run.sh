#!/usr/bin/env bash
# Everything behind one command: installs packages, makes data, trains, compares, tests. All of it is
# launch/launch.py. This script finds the Python that runs it. ./run.sh --help lists the commands.
for name in ${!PYTHON@}; do     # junk in Python's variables would break any Python
    [ "$name" = PYTHONNOUSERSITE ] || unset "$name"
done
set -eu
export PYTHONUTF8=1             # files are UTF-8 in every locale
# The next file that a program opens would take the place of a closed stdin, stdout or stderr. For
# stderr, that file is this script
if [ /dev/fd/2 -ef "${BASH_SOURCE[0]}" ] || ! { : 3>&2; }; then exec 2>/dev/null; fi
{ : 3>&1; } 2>/dev/null || exec >/dev/null
{ : 3<&0; } 2>/dev/null || exec </dev/null

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
pythons="python3 python3.13 python3.12 python3.11 python3.14"
if [ -n "$active" ]; then
    pythons=python
fi
# prints the folder of this script, which may have been started through a link
folder='import os, sys; assert sys.version_info >= (3, 11); print(os.path.dirname(os.path.realpath(sys.argv[1])))'
for python in $pythons; do
    if root=$("$python" -c "$folder" "${BASH_SOURCE[0]}" 2>/dev/null); then
        exec "$python" "$root/launch/launch.py" "$@"
    fi
done
missing="Python 3.11 or later is needed, but python3 is $(python3 --version 2>&1 || true); \
install Python 3.11, 3.12 or 3.13, including its venv module"
if [ -n "$active" ]; then
    missing="the active environment ($active) has no Python 3.11 or later; deactivate it or activate another one"
fi
echo "run.sh: error: $missing" >&2
exit 2
