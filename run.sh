#!/usr/bin/env bash
# Everything behind one command: installs packages, makes data, trains, compares, tests. All of it is
# tools/launch.py. This script finds the Python that runs it. ./run.sh --help lists the commands.
set -eu
unset CDPATH                          # with it, cd may go to another folder of the same name
unset PYTHONHOME PYTHONPATH           # junk in them would break any Python
unset PYTHONDONTWRITEBYTECODE         # without compiled files, each start takes ten seconds more
unset RANK LOCAL_RANK WORLD_SIZE      # of another job: a run would wait for its processes
export PYTHONUTF8=1                   # files are UTF-8 in every locale
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
pythons="python3 python3.13 python3.12 python3.11 python3.14"
if [ -n "$active" ]; then
    pythons=python
fi
for python in $pythons; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        exec "$python" "$root/tools/launch.py" "$@"
    fi
done
missing="Python 3.11 or later is needed, but python3 is $(python3 --version 2>&1 || true); \
install Python 3.11, 3.12 or 3.13, including its venv module"
if [ -n "$active" ]; then
    missing="the active environment ($active) has no Python 3.11 or later; deactivate it or activate another one"
fi
echo "run.sh: error: $missing" >&2
exit 2
