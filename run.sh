#!/usr/bin/env bash
# ./run.sh [train_gpt.py arguments]   everything on a fresh machine: packages, data, training
# ./run.sh --recipe NAME [arguments]  the same for recipes/NAME.py
# ./run.sh compare [arguments]        the same for "does my idea help?": tools/compare.py
# ./run.sh screen [arguments]         the same for many settings or ideas at once: tools/screen.py
# ./run.sh test [pytest arguments]    the same for the tests
set -euo pipefail
unset CDPATH  # with it, cd may go to another folder of the same name
cd "$(dirname "${BASH_SOURCE[0]}")"

# In braces, so that bash reads all of the script before it runs any of it: a signal's trap that
# comes while it reads would fail, and an edit during a run would confuse it.
{
# ---- Settings that tests change ------------------------------------------------------------------
graphics=${SPEEDRUN_GRAPHICS:-/sys/class/drm}  # where AMD's driver says how large a GPU is
torch_index=${SPEEDRUN_TORCH_INDEX:-https://download.pytorch.org/whl}  # has cpu/, rocm7.2/
devices=${SPEEDRUN_DEVICES:-/dev}  # where drivers put their files

# ---- Messages, child processes, signals ----------------------------------------------------------
exec 3>&2  # stderr, wherever a command's own stderr goes when a signal comes
say() { echo "run.sh: $*"; }

fail() {
    echo "run.sh: error: $*" >&2
    exit 2
}

# Runs a command and waits for it. It runs in the background, where Ctrl-C doesn't reach it: `stop`
# ends it. Of a command in the foreground, bash would say that it was terminated.
run() {
    local code=0
    "$@" 3>&- &
    wait "$!" || code=$?
    return "$code"
}

# Runs a command quietly: its output is in $answer, its complaints are in the file $work/log.
ask() {
    local code=0
    run "$@" >"$work/answer" 2>"$work/log" || code=$?
    answer=$(<"$work/answer")
    return "$code"
}

# A signal ends the child processes and this script. The next ./run.sh repairs what was left
# unfinished. Bash is asked which child processes there are: a variable doesn't know of one that
# started just before the signal.
advice="run the same command again to continue"
stop() {
    trap '' INT TERM
    # shellcheck disable=SC2046  # each process number is a word of its own
    kill $(jobs -p) 2>/dev/null || true
    wait 2>/dev/null || true
    echo "run.sh: stopped by $1; $advice" >&3
    exit "$2"
}

trap 'stop SIGINT 130' INT
trap 'stop SIGTERM 143' TERM

# A temporary folder for logs and downloads
work=""
trap 'rm -rf "$work"' EXIT
work=$(mktemp -d 2>/dev/null) ||
    { mkdir -p data/.cache && work=$(mktemp -d "$PWD/data/.cache/run.XXXXXX"); } 2>/dev/null ||
    fail "can't make a temporary folder, because ${TMPDIR:-/tmp} and $PWD are not writable;" \
        "set TMPDIR to a writable folder"

# ---- Help ----------------------------------------------------------------------------------------
show_usage() {
    cat <<'END'
usage: ./run.sh [OPTIONS OF train_gpt.py]  install packages, make the data, train
       ./run.sh --recipe NAME [OPTIONS]    train with recipes/NAME.py instead
       ./run.sh compare [OPTIONS]          find out whether an idea helps
       ./run.sh screen FILE [OPTIONS]      measure many settings or ideas at once
       ./run.sh test [PYTEST ARGUMENTS]    run the tests
With --device cpu, GPUs aren't used. Add --help to a command for its options.
The options of train_gpt.py (or of the recipe):
END
}

# ---- What the arguments say ----------------------------------------------------------------------
command=train
case "${1:-}" in
    compare | screen | test)
        command=$1
        shift ;;
esac

# Takes --recipe NAME and --device cpu out of the arguments. The others move to the end, one by one:
# no array holds them, because for bash before 4.4 an empty array isn't set.
module=train_gpt
recipe=none
device=none
previous=""
if [ "$command" != test ]; then
    for argument in "$@"; do
        shift
        case "$previous,$argument" in
            --recipe,*) recipe=$argument ;;
            --device,*) device=$argument ;;
            *,--recipe | *,--recipe=*) recipe=${argument#--recipe}; recipe=${recipe#=} ;;
            *,--device | *,--device=*) device=${argument#--device}; device=${device#=} ;;
            *) set -- "$@" "$argument" ;;
        esac
        previous=$argument
    done
fi
if [ "$recipe" != none ]; then
    [ "$command" != screen ] || fail "--recipe is not an option of ./run.sh screen"
    if [[ ! $recipe =~ ^[A-Za-z0-9_]+$ ]] || [ ! -f "recipes/$recipe.py" ]; then
        names=(recipes/*.py)
        names=("${names[@]##*/}")
        fail "there is no recipe \"$recipe\"; --recipe takes one of: ${names[*]%.py}"
    fi
    module=recipes.$recipe
    [ "$command" = train ] || set -- "$@" --recipe "$recipe"
fi
if [ "$device" = cpu ]; then
    export CUDA_VISIBLE_DEVICES=""
elif [ "$device" != none ]; then
    fail "--device \"$device\": it only takes cpu; without it, a GPU is used if there is one"
fi

# Prints a TOML file without its comments. A # inside quotes is part of a text.
print_toml() {
    local before_comment="^(([^\"'#]|[\"']{3}|\"[^\"]*\"|'[^']*')*)#"
    local line
    while IFS= read -r line || [ -n "$line" ]; do
        if [[ $line =~ $before_comment ]]; then
            line=${BASH_REMATCH[1]}
        fi
        printf "%s\n" "$line"
    done <"$1"
}

# Options may also be inside quotes, as in --base "--track mini", or in the file of a screen
words=$*
if [ "$command" = screen ]; then
    for argument in "$@"; do
        if [[ $argument = *.toml ]]; then
            words+=" $(cd "$OLDPWD" && print_toml "$argument" 2>/dev/null)" || true
        fi
    done
fi
words=${words//[\"\']/ }

track=""
own_data=""
help=""
kept_runs=""
previous=""
set -f  # a word with a star is no pattern here
for word in $words; do
    case "$word" in
        --track=*) track=${word#*=} ;;
        --train_files | --val_files | --train_files=* | --val_files=*) own_data=yes ;;
        --list | --clear) kept_runs=yes ;;  # compare only lists or deletes the runs that it keeps
        -h | --help) help=yes ;;
    esac
    [ "$previous" != --track ] || track=$word
    previous=$word
done
set +f
if [ "$command" = train ] && [ -n "$help" ]; then
    show_usage
fi

# ---- GPUs that the machine has: usable ones or not -----------------------------------------------
# Is there an AMD GPU of 8 GiB or more? A smaller one is part of a CPU; train_gpt.py doesn't use it.
has_amd_gpu() {
    [ -e "$devices/kfd" ] || return
    local bytes
    while read -r bytes; do
        [ "$bytes" -lt $((8 * 2 ** 30)) ] || return 0
    done < <(cat "$graphics"/card*/device/mem_info_vram_total 2>/dev/null)
    return 1
}

present=0
maker=""
if [ -n "${CUDA_VISIBLE_DEVICES-all}" ]; then
    present=$(nvidia-smi -L 2>/dev/null | grep -c "^GPU") || true
    if [ "$present" -eq 0 ]; then
        present=$(compgen -G "$devices/nvidia[0-9]*" | wc -l) || true
    fi
    if [ "$present" -gt 0 ]; then
        maker=NVIDIA
    elif has_amd_gpu; then
        present=1
        maker=AMD
    fi
fi

# ---- One at a time: packages and data are shared by all runs of this checkout --------------------
# The lock is on the checkout's folder, so no file can be left behind. It ends with the processes
# that hold it. Without flock, or on a file system without locks, go on.
lock() {
    local code=0
    command -v flock >/dev/null || return 0
    exec 9<.
    run flock --nonblock 9 2>/dev/null || code=$?
    if [ "$code" -eq 1 ]; then
        say "waiting for another ./run.sh to finish its setup in this folder"
        run flock 9
    fi
}

unlock() { exec 9<&-; }

# ---- Python: the active environment's, or our own in .venv ---------------------------------------
# Junk in these would break any Python, ours too
for variable in PYTHONHOME PYTHONPATH; do
    if [ -n "${!variable:-}" ]; then
        say "ignoring $variable=${!variable}"
        unset "$variable"
    fi
done
export PYTHONUTF8=1  # files are UTF-8 in every locale

python=$PWD/.venv/bin/python
own=yes
if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    python=python
    own=""
else
    unset PYTHONDONTWRITEBYTECODE  # without Python's compiled files, each start takes ten seconds more
fi

# Sets $base to a Python of at least 3.11, for making .venv
find_base() {
    for base in python3 python3.13 python3.12 python3.11 python3.14; do
        if ask "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            return
        fi
    done
    local version
    version=$(python3 --version 2>/dev/null) || version=missing
    fail "Python 3.11 or later is needed, but python3 is $version;" \
        "install Python 3.11, 3.12 or 3.13, including its venv module"
}

# Prints the version of a Python's PyTorch if we can use it; doesn't import it
has_torch='
import importlib.metadata
try:
    version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    version = "0.0"
major, minor = version.split(".")[:2]
if (int(major), int(minor)) >= (2, 11):
    print(version)
'

# Makes .venv, with the base Python's packages if it has a PyTorch, and pip in any case
make_environment() {
    [ -w . ] ||
        fail "can't write to $PWD: the disk is read-only, or you lack permission;" \
            "clone the repository into a folder that is writable"
    [[ $PWD != *:* ]] ||
        fail "the path $PWD contains a colon, which Python's venv module doesn't allow;" \
            "move the repository to a path without a colon"
    find_base
    local options=(-m venv)
    local note=""
    [ ! -e .venv ] || note=" again, because it is incomplete"
    ask "$base" -c "$has_torch" || answer=""
    if [ -n "$answer" ]; then
        options+=(--system-site-packages)
        note+="; it will use the system's PyTorch $answer"
    fi
    say "making the virtual environment .venv$note"
    # Debian and Colab take ensurepip away
    local pip_from_base=""
    if ! ask "$base" -c "import venv, ensurepip"; then
        ask "$base" -c "import venv, pip" ||
            fail "$base has no venv module; install it" \
                "(on Debian or Ubuntu: apt install python3-venv)"
        options+=(--without-pip)
        pip_from_base=yes
    fi
    # `ready` goes first: a signal may end rm halfway
    { run rm -f .venv/ready; run rm -rf .venv; } >"$work/log" 2>&1 ||
        explain "could not remove the old .venv"
    run "$base" "${options[@]}" .venv >"$work/log" 2>&1 || explain "python -m venv failed"
    if [ -n "$pip_from_base" ] && ! ask .venv/bin/python -m pip --version; then
        run "$base" -m pip --python .venv/bin/python install pip >"$work/log" 2>&1 ||
            explain "could not install pip"
    fi
}

# ---- Packages ------------------------------------------------------------------------------------
# Prints the lines of requirement files whose package is missing. One that is there in another
# version stays: machines with their own PyTorch keep it.
find_missing='
import importlib.metadata, sys
if sys.version_info < (3, 11):
    sys.exit(3)
for file in sys.argv[1:]:
    for line in open(file, encoding="utf-8"):
        requirement = line.split("#")[0].strip()
        name = requirement.split("==")[0].split("[")[0]
        try:
            if name:
                importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(requirement)
'

# Fails unless pip and all files of all packages in .venv are there: an interrupted installation
# leaves some out
check_files='
import importlib.metadata, pathlib, sys
assert sys.prefix != sys.base_prefix  # without pyvenv.cfg, .venv/bin/python is the base Python
importlib.metadata.version("pip")  # its metadata is written last
for package in importlib.metadata.distributions():
    if pathlib.Path(package.locate_file("")).is_relative_to(sys.prefix):
        assert package.files
        assert all(file.suffix == ".pyc" or file.locate().exists() for file in package.files)
'

network_errors="Max retries exceeded|ProxyError|SSLError|Connection(Reset|Refused)?Error"
network_errors+="|NewConnection|NameResolution|ConnectTimeout|ReadTimeout"
network_errors+="|onnection (refused|reset|timed out|broken)"

# Ends with the reason why the command failed whose output is in $work/log
explain() {
    local log=$work/log
    if grep -qE "No space left on device|Disk quota exceeded" "$log"; then
        fail "$1: the disk is full; free some space in $PWD or ${TMPDIR:-/tmp}," \
            "then run ./run.sh again"
    elif grep -qE "Read-only file system|Permission denied" "$log"; then
        fail "$1: can't write to a folder" \
            "($(grep -m 1 -E "Read-only file system|Permission denied" "$log"));" \
            "make the folder writable, then run ./run.sh again"
    elif grep -qE "$network_errors" "$log"; then
        fail "$1: can't reach the package index; check the network, the proxy and pip's settings" \
            "(python3 -m pip config list), then run ./run.sh again"
    elif grep -q "No matching distribution found for" "$log"; then
        local package
        package=$(grep -m 1 "No matching distribution found for" "$log" | cut -d " " -f 7)
        fail "$1: the package index has no $package for $("$python" --version) on $(uname -sm);" \
            "use Python 3.11, 3.12 or 3.13"
    fi
    tail -n 20 "$log" >&2
    fail "$1; see the output above"
}

# pip install, with a progress bar on a terminal. Elsewhere its output is shown if it fails.
# --no-compile: Python compiles what it imports; all of PyTorch's modules would double the time
pip_install() {
    local pip=("$python" -m pip install --no-compile --no-input --disable-pip-version-check)
    local code=0
    if [ -t 1 ]; then
        TMPDIR=$work run "${pip[@]}" "$@" 2>"$work/log" || code=$?
    else
        TMPDIR=$work run "${pip[@]}" "$@" >"$work/log" 2>&1 || code=$?
    fi
    [ "$code" -eq 0 ] || explain "pip could not install the packages"
}

# Installs PyTorch ($1), where PyPI's build is not the right one. The user's settings of pip come
# first.
install_torch() {
    if ask "$python" -m pip config list &&
        grep -qE "(index-url|find-links|no-index)=" <<<"$answer"; then
        say "installing packages from the source in your pip settings (a minute or two)"
        return
    fi
    if [ "$(uname -s)" != Linux ]; then
        say "installing packages: a download of about 0.2 GB"
        return
    fi
    if [ "$maker" = AMD ]; then
        say "installing packages, with PyTorch's build for AMD GPUs: a download of about 5 GB" \
            "(about 0.2 GB with --device cpu)"
        pip_install --index-url "$torch_index/rocm7.2" "$1"
        return
    fi
    if [ -z "$maker" ] && ask "$python" -m pip index versions torch --index-url "$torch_index/cpu" \
        --timeout 5 --retries 0 --disable-pip-version-check; then
        say "installing packages, with PyTorch's build for CPUs: a download of about 0.2 GB"
        pip_install --index-url "$torch_index/cpu" --no-deps "$1"
        return
    fi
    if [ -z "$maker" ]; then
        say "$torch_index/cpu doesn't answer; using PyTorch's build from PyPI instead"
    fi
    say "installing packages, with PyTorch and CUDA: a download of up to 5 GB"
}

# Sets $missing to the packages of requirement files that are not there. Fails if Python fails.
list_missing() {
    ask "$python" -c "$find_missing" "$@" || return
    missing=$answer
}

# Is .venv whole? The file `ready` says so. Without it, an installation was cut short, or the user
# made .venv.
is_whole() {
    if [ ! -e .venv/ready ]; then
        ask "$python" -c "$check_files" || return
    fi
    [ -z "$missing" ] || ask "$python" -m pip --version
}

# The active environment keeps its PyTorch. An old one may lack what train_gpt.py needs
warn_of_old_torch() {
    [[ $missing != *torch==* ]] || return 0
    ask "$python" -c "$has_torch" || answer=""
    [ -n "$answer" ] ||
        say "warning: the active environment's PyTorch is older than 2.11, so training may fail;" \
            "to replace it: pip install $(grep "^torch==" requirements.txt)"
}

# Installs what is missing of the given requirement files
installed=""
install() {
    if [ -z "$own" ]; then
        list_missing "$@" || fail "the active environment (${VIRTUAL_ENV:-$CONDA_PREFIX}) has no" \
            "Python 3.11 or later; deactivate it or activate another one"
        warn_of_old_torch
    elif ! list_missing "$@" || ! is_whole; then
        make_environment
        list_missing "$@" || fail "$PWD/.venv/bin/python, made with $base, doesn't run" \
            "($(tail -n 1 "$work/log")); reinstall Python, then run ./run.sh again"
    fi
    if [ -n "$missing" ]; then
        if [ -n "$own" ]; then
            [ -w .venv ] ||
                fail "can't write to $PWD/.venv: the disk is read-only, or you lack permission;" \
                    "make .venv writable, or clone the repository into another folder"
            run rm -f .venv/ready
        fi
        local torch
        torch=$(grep "^torch==" <<<"$missing") || true
        if [ -n "$torch" ]; then
            install_torch "$torch"
        else
            say "installing ${missing//$'\n'/, }"
        fi
        echo "$missing" >"$work/requirements.txt"
        pip_install -r "$work/requirements.txt"
        installed=yes
    fi
    if [ -n "$own" ] && [ ! -e .venv/ready ]; then
        { : >.venv/ready; } 2>/dev/null || true
    fi
}

# Has the path only characters that a shell takes as they are?
is_plain() {
    local LC_ALL=C  # ranges of ASCII
    [[ $1 =~ ^[A-Za-z0-9_./+:@%,=-]+$ ]]
}

# PyTorch's command line for the C++ compiler doesn't quote its own folder. If the path to .venv has
# a space or the like, use .venv through a link whose path has none.
avoid_special_characters() {
    local folder=${XDG_CACHE_HOME:-${HOME:-no home}/.cache}/nanogpt-speedrun
    if [ -z "$own" ] || is_plain "$PWD" || ! is_plain "$folder"; then
        return
    fi
    local link
    link=$folder/$(printf "%s" "$PWD" | cksum | tr -c "0-9\n" -)
    if [ "$(readlink "$link" 2>/dev/null)" != "$PWD/.venv" ]; then
        { mkdir -p "$folder" && ln -sfn "$PWD/.venv" "$link"; } 2>/dev/null || return 0
    fi
    if [ -O "$folder" ]; then  # nobody else can change the link
        python=$link/bin/python
    fi
}

# Imports what training imports, in the background after an installation, so that Python's compiled
# files get written
import_ahead() {
    [ -n "$installed" ] && [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || return 0
    "$python" -c "import train_gpt, torch._inductor.compile_fx" >/dev/null 2>&1 3>&- 9<&- &
}

# ---- GPUs that PyTorch can use -------------------------------------------------------------------
ask_torch='
import torch
print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
print(torch.version.cuda or "")
print(torch.version.hip or "")
'

# Sets $gpus. Asks PyTorch only if there may be a GPU: its import takes seconds.
gpus=0
count_gpus() {
    [ "$present" -gt 0 ] || return 0
    if ! ask "$python" -c "$ask_torch"; then
        cat "$work/log" >&2
        fail "PyTorch can't be imported; see the error above"
    fi
    local cuda hip
    { read -r gpus; read -r cuda; read -r hip; } <<<"$answer"$'\n\n' || true
    [ "$gpus" -eq 0 ] || return 0
    local site=https://pytorch.org/get-started
    local choice="or use --device cpu"
    if [ -z "$cuda$hip" ]; then
        local remedy="remove .venv and run ./run.sh again to install the build for $maker GPUs"
        if [ -z "$own" ]; then
            remedy="install the build for $maker GPUs in the active environment ($site)"
        elif grep -q "^include-system-site-packages = true" .venv/pyvenv.cfg; then
            remedy="replace the system's PyTorch with the build for $maker GPUs ($site)"
        fi
        fail "this machine has an $maker GPU, but the installed PyTorch is the build for CPUs;" \
            "$remedy, $choice"
    elif [ "$maker" = AMD ] || [ -n "$hip" ]; then
        fail "this machine has an $maker GPU, but PyTorch (ROCm ${hip:-missing}) can't use it;" \
            "install a PyTorch build and a driver that support the GPU ($site), $choice"
    fi
    local needed=525
    [ "${cuda%%.*}" -lt 13 ] || needed=580
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) ||
        true
    if [ "${driver%%.*}" -ge "$needed" ] 2>/dev/null; then
        fail "this machine has an NVIDIA GPU, but PyTorch (CUDA $cuda) can't use it," \
            "although driver $driver is new enough; check the output of nvidia-smi, $choice"
    fi
    fail "this machine has an NVIDIA GPU, but PyTorch can't use it:" \
        "CUDA $cuda needs driver $needed or later, but the version here is ${driver:-unknown};" \
        "update the driver, $choice"
}

# ---- Data: made or downloaded where there is none ------------------------------------------------
has() { compgen -G "data/$1_train_*.bin" >/dev/null && compgen -G "data/$1_val_*.bin" >/dev/null; }

get_data() {
    case "$track" in
        fineweb)
            # cached_fineweb10B.py leaves the file `unfinished` if it was interrupted. It skips the
            # shards that are there.
            if ! has fineweb10B/fineweb || [ -e data/fineweb10B/unfinished ]; then
                say "downloading the FineWeb shards (2 GB in all)"
                TMPDIR=$work run "$python" data/cached_fineweb10B.py || exit
            fi ;;
        mini)
            if ! has shakespeare/shakespeare; then
                say "making the Shakespeare shards"
                TMPDIR=$work run "$python" data/shakespeare.py || exit
            fi ;;
    esac
}

# ---- Compiled code -------------------------------------------------------------------------------
# Can files be written to the folder, and programs be run from it?
can_run_from() {
    local probe=$1/probe.$$
    local code=0
    { mkdir -p "$1" && echo "#!/bin/sh" >"$probe" && chmod +x "$probe" && "$probe"; } 2>/dev/null || code=1
    run rm -f "$probe" 2>/dev/null || true
    return "$code"
}

# PyTorch keeps compiled code in TORCHINDUCTOR_CACHE_DIR or else in the temporary folder, and headers
# always in the latter. Where one of them is read-only or mounted noexec, both move elsewhere.
choose_code_folder() {
    local temporary=${TMPDIR:-/tmp}
    local usual=${TORCHINDUCTOR_CACHE_DIR:-$temporary}
    local bad=$usual
    if can_run_from "$usual"; then
        bad=$temporary
        if can_run_from "$temporary"; then
            return
        fi
    fi
    local folder
    for folder in "${XDG_CACHE_HOME:-${HOME:-$PWD/data}/.cache}/torchinductor" "$PWD/data/.cache/torchinductor"; do
        if is_plain "$folder" && can_run_from "$folder"; then
            say "storing compiled code in $folder, because $bad is read-only or mounted noexec"
            export TORCHINDUCTOR_CACHE_DIR=$folder
            export TMPDIR=$folder
            return
        fi
    done
}

# ---- Everything in its order ---------------------------------------------------------------------
# Becomes the given command: from here on, signals are its own
become() {
    unlock
    run rm -rf "$work"
    exec 3>&-
    exec "$@"
}

requirements=(requirements.txt)
if [ "$command" = test ]; then
    requirements+=({tools,data,evals,tests}/requirements.txt)
elif [ "$command" != train ]; then
    requirements+=(tools/requirements.txt)
fi
lock
install "${requirements[@]}"
avoid_special_characters

choose_code_folder
import_ahead

if [ "$command" = test ]; then
    track=mini
    get_data
    say "running the tests"
    # a process a core; those that run out of tests take some from another; a path in the arguments
    # replaces "tests"
    become "$python" -m pytest -o testpaths=tests -n auto --maxprocesses 8 --dist worksteal "$@"
fi

count_gpus
if [ -z "$track" ]; then
    track=mini
    [ "$gpus" -eq 0 ] || track=fineweb
fi
if [ -z "$own_data$help$kept_runs" ]; then
    get_data
fi

if [ "$command" != train ]; then
    script=$PWD/tools/$command.py
    cd "$OLDPWD"  # patches and scripts are named as the caller sees them
    become "$python" "$script" "$@"
fi

if [ -n "$help" ]; then
    become "$python" -m "$module" "$@"
fi

# The checks of the machine print what the run needs
run "$python" tools/launch_checks.py --script "$module" "$@" >"$work/answer" || exit
while IFS= read -r line; do
    case "$line" in
        processes=*) processes=${line#*=} ;;
        log_dir=*) log_dir=${line#*=} ;;
        --*) set -- "$@" "$line" ;;
        *) export "${line?}" ;;
    esac
done <"$work/answer"

where="the CPU"
[ "$gpus" -eq 0 ] || where="one GPU"
launcher=()
if [ "$processes" -gt 1 ]; then
    where="$processes of $gpus GPUs"
    launcher=(-m torch.distributed.run --standalone --nproc_per_node="$processes")
fi
say "training on $where; before the first step, compiling may take a minute or more"
unlock
advice="to continue from the last validation, add --resume latest"
run "$python" ${launcher[@]+"${launcher[@]}"} -m "$module" "$@" --save_checkpoint || exit

# The trained model writes a short text
checkpoint=""
for file in "$log_dir"/*.pt; do
    if [ "$file" -nt "${checkpoint:-$work/answer}" ]; then
        checkpoint=$file
    fi
done
if [ "$module" != recipes.january2026 ]; then  # evals/ can't run its model
    become "$python" -m evals.sample --brief "$checkpoint"
fi
}
