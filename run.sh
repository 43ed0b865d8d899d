#!/usr/bin/env bash
# ./run.sh [train_gpt.py arguments]   everything on a fresh machine: packages, data, training
# ./run.sh compare [arguments]        the same for "does my idea help?": tools/compare.py
# ./run.sh test [pytest arguments]    the same for the tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
say() { echo "run.sh: $*"; }

# Packages: the active virtual environment, or our own in .venv
python=python3
if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    python=python
else
    if [ ! -x .venv/bin/python ]; then
        say "making the virtual environment .venv"
        rm -rf .venv
        python3 -m venv .venv || { rm -rf .venv; say "error: python3 -m venv failed; install Python 3.11 or later with its venv module" >&2; exit 2; }
    fi
    python=$PWD/.venv/bin/python
fi

# Installs the given requirement files when a package of theirs is missing. A package that is there in
# another version stays: machines with their own PyTorch keep it.
install() {
    local missing
    missing=$("$python" - "$@" <<'PY'
import importlib.metadata, sys
for file in sys.argv[1:]:
    for line in open(file):
        name = line.split("#")[0].strip().split("==")[0].split("[")[0]
        try:
            name and importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(file, end=" ")
            break
PY
)
    for file in $missing; do
        say "installing $file"
        # --no-compile: Python compiles what it imports; all of PyTorch's modules would take half of the time
        "$python" -m pip install --quiet --no-compile --disable-pip-version-check -r "$file"
    done
}

if [ "${1:-}" = test ]; then
    shift
    install requirements.txt data/requirements.txt evals/requirements.txt tests/requirements.txt
    "$python" data/shakespeare.py
    say "running the tests"
    # a process a core, and those that run out of tests take some from another; a path in the arguments replaces "tests"
    exec "$python" -m pytest -o testpaths=tests -n auto --maxprocesses 8 --dist worksteal "$@"
fi

install requirements.txt
compare=""
[ "${1:-}" != compare ] || { compare=yes; shift; }

# What the arguments say of the track, the device and the data
track="" device="" own_data="" help="" previous=""
for argument in "$@"; do
    case "$argument" in
        --track=*) track=${argument#*=} ;;
        --device=*) device=${argument#*=} ;;
        --train_files | --val_files | --train_files=* | --val_files=*) own_data=yes ;;
        -h | --help) help=yes ;;
    esac
    case "$previous" in
        --track) track=$argument ;;
        --device) device=$argument ;;
    esac
    previous=$argument
done
gpus=0
if [ "$device" != cpu ] && [ -n "${CUDA_VISIBLE_DEVICES-all}" ]; then
    # PyTorch is asked only where there may be a GPU: its import takes seconds
    there=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU" || true)
    [ "$there" -gt 0 ] || there=$(compgen -G "/dev/nvidia[0-9]*" | wc -l || true)
    if [ "$there" -gt 0 ]; then
        gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
        [ "$gpus" -gt 0 ] || { say "error: this machine has $there GPUs, but PyTorch can use none: update the driver, install a PyTorch for it, or give --device cpu" >&2; exit 2; }
    fi
fi
[ -n "$track" ] || { [ "$gpus" -gt 0 ] && track=fineweb || track=mini; }

# Data: made or fetched where there is none
has() { compgen -G "$1" >/dev/null; }
if [ -z "$own_data$help" ]; then
    case "$track" in
        fineweb)
            if ! has "data/fineweb10B/fineweb_train_*.bin" || ! has "data/fineweb10B/fineweb_val_*.bin"; then
                say "fetching the fineweb shards (2 GB)"
                "$python" data/cached_fineweb10B.py
            fi ;;
        mini | shakespeare)
            if ! has "data/shakespeare/shakespeare_train_*.bin" || ! has "data/shakespeare/shakespeare_val_*.bin"; then
                say "making the shakespeare shards"
                "$python" data/shakespeare.py
            fi ;;
    esac
fi

if [ -n "$compare" ]; then
    script=$PWD/tools/compare.py
    cd "$OLDPWD"  # patches and scripts are named as the caller sees them
    exec "$python" "$script" "$@"
fi

# Launch: a power of two of the GPUs, which share the 8 sequences of a step equally
processes=1
while [ $((processes * 2)) -le "$gpus" ] && [ "$processes" -lt 8 ]; do processes=$((processes * 2)); done
if [ "$processes" -gt 1 ] && [ -z "$help" ]; then
    say "training on $processes of $gpus GPUs"
    exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$processes" train_gpt.py "$@"
fi
[ -n "$help" ] || say "training on $([ "$gpus" -gt 0 ] && echo "one GPU" || echo "the CPU")"
exec "$python" train_gpt.py "$@"
