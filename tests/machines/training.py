"""Machines on which train_gpt.py itself has to find its way: compilers, folders, signals, cores."""

import os
import re
import shutil
import signal
import sys
import sysconfig
import time

from table import (
    ROOT,
    Case,
    Outcome,
    cannot_unshare,
    clean_environment,
    finish,
    kill_group,
    one_line,
    run,
    start,
    trained,
    write_tiny_shards,
)

WARNING = "warning: training without torch.compile"


def train(folder, *prefix, more=(), timeout=600, **environment):
    """A tiny training, compiled, with a compile cache of its own. `prefix` stands before the command."""
    options = write_tiny_shards(folder)
    settings = {"TORCHINDUCTOR_CACHE_DIR": folder / "cache"} | environment
    command = [*prefix, sys.executable, ROOT / "train_gpt.py", "--device", "cpu", *options, *more]
    return run(command, folder, clean_environment(**settings), timeout)


def compiled(done) -> Outcome:
    """It trained, and with compiled code."""
    outcome = trained(done)
    if outcome.ok and WARNING in done.output:
        return Outcome(False, "trained uncompiled", done.last_line)
    return outcome


def uncompiled(done, *words) -> Outcome:
    """It trained without compiled code, and said why in one line with these words."""
    outcome = trained(done)
    warnings = [line for line in done.output.splitlines() if line.startswith(WARNING)]
    if not outcome.ok:
        return outcome
    if len(warnings) != 1 or "Traceback" in done.output:
        return Outcome(False, f"{len(warnings)} warnings", done.last_line)
    missing = [word for word in words if word not in warnings[0]]
    if missing:
        return Outcome(False, f"says nothing of {missing[0]}", warnings[0])
    return Outcome(True, outcome.what + ", uncompiled", warnings[0])


def shim(folder, text):
    """A compiler that is a shell script."""
    folder = folder / "bin"
    folder.mkdir()
    script = folder / "g++"
    script.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    script.chmod(0o755)
    return script


# -----------------------------------------------------------------------------
# Compilers


def cannot_compile() -> str:
    return "" if shutil.which("g++") else "there is no g++"


def unknown_cpu(folder):
    return compiled(train(folder, CXX=shim(folder, 'exec g++ -mtune=generic "$@"')))


def no_compiler(folder):
    return uncompiled(
        train(folder, CXX="no-such-compiler"), "no working C++ compiler", "apt install g++"
    )


def no_python_headers(folder):
    headers = sysconfig.get_paths()["include"]
    hide = f'mount -t tmpfs none "{headers}" && exec "$@"'
    done = train(folder, "unshare", "-m", "sh", "-c", hide, "sh")
    return uncompiled(done, "Python.h", "apt install python3-dev")


def compiler_crashes(folder):
    crash = (
        'case "$1" in --version|-v) exec g++ "$@";; esac\n'
        'echo "g++: internal compiler error: Segmentation fault" >&2\nexit 4'
    )
    return uncompiled(train(folder, CXX=shim(folder, crash)), "internal compiler error")


def wrong_code(folder):
    """A constant of the code is changed: logits are capped at half of what they should be."""
    spoil = (
        'for file in "$@"; do case "$file" in *.cpp) sed -i "s/(30[.]0)/(15.0)/g" "$file";; esac; done\n'
        'exec g++ "$@"'
    )
    return uncompiled(train(folder, CXX=shim(folder, spoil)), "makes wrong code", "GCC 14")


# -----------------------------------------------------------------------------
# Folders for compiled code


def mounted(kind, folder):
    """The prefix of a command that sees `folder` as a file system of its own: "noexec", "ro" or "size=20m"."""
    folder.mkdir()
    return [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount -t tmpfs -o {kind} none "{folder}" && exec "$@"',
        "sh",
    ]


def cache_on(kind, *words):
    """A case whose compile cache is on such a file system; the warning must have the words."""

    def case(folder):
        cache = folder / "mounted"
        done = train(folder, *mounted(kind, cache), TORCHINDUCTOR_CACHE_DIR=cache)
        return uncompiled(done, *words)

    return case


def run_sh_elsewhere(folder):
    """run.sh puts compiled code into another folder, so training goes on compiled."""
    cache = folder / "mounted"
    options = write_tiny_shards(folder)
    environment = clean_environment(
        TORCHINDUCTOR_CACHE_DIR=cache,
        HOME=folder,
        VIRTUAL_ENV=sys.prefix,
        PATH=f"{sys.prefix}/bin:{os.environ['PATH']}",
        XDG_CACHE_HOME=None,
    )
    command = [
        *mounted("noexec", cache),
        ROOT / "run.sh",
        "--log_dir",
        folder / "logs",
        "--device",
        "cpu",
        *options,
    ]
    done = run(command, folder, environment)
    outcome = compiled(done)
    if outcome.ok and "compiled code goes to" not in done.output:
        return Outcome(False, "says nothing of the other folder", done.last_line)
    return outcome


noexec_cache = cache_on("noexec", "noexec", "TORCHINDUCTOR_CACHE_DIR")
read_only_cache = cache_on("ro", "Read-only file system", "TORCHINDUCTOR_CACHE_DIR")
full_disk = cache_on("size=100k", "disk is full")

# -----------------------------------------------------------------------------
# Signals before the first step


def stopped(done, code) -> Outcome:
    lines = [
        line for line in done.output.splitlines() if not line.startswith(("logs/", "compiling"))
    ]
    ok = done.code == code and len(lines) == 1 and "stopped before the first step" in lines[0]
    return Outcome(ok, f"{len(lines)} lines, exit {done.code}", done.last_line)


def signal_after(seconds, number):
    def case(folder):
        options = write_tiny_shards(folder)
        environment = clean_environment(TORCHINDUCTOR_CACHE_DIR=folder / "cache")
        process = start(
            [sys.executable, ROOT / "train_gpt.py", "--device", "cpu", *options],
            folder,
            environment,
        )
        time.sleep(seconds)
        kill_group(process, number)
        return stopped(finish(process), 128 + number)

    return case


# -----------------------------------------------------------------------------
# Cores, instruction sets, locale


def train_and_read_log(folder, *prefix, **environment):
    done = train(folder, *prefix, TORCH_COMPILE_DISABLE="1", **environment)
    logs = list((folder / "logs").glob("*.txt"))
    return done, logs[0].read_text(encoding="utf-8") if logs else ""


def with_threads(outcome, log, wanted) -> Outcome:
    found = re.search(r"(\d+) threads? a process, instruction", log)
    if outcome.ok and (found is None or int(found[1]) != wanted):
        return Outcome(False, f"{found and found[1]} threads", outcome.last_line)
    return outcome


def one_core(folder):
    done, log = train_and_read_log(folder, "taskset", "-c", "0")
    return with_threads(trained(done), log, 1)


QUOTA_SHELL = """
set -e
for kind in cpu unified .; do
    group=/sys/fs/cgroup/$kind/speedrun-test-$$
    mkdir $group 2>/dev/null || continue
    if [ -e $group/cpu.cfs_quota_us ]; then
        echo 50000 >$group/cpu.cfs_quota_us
    elif [ -e $group/cpu.max ]; then
        echo "50000 100000" >$group/cpu.max
    else
        rmdir $group
        continue
    fi
    echo $$ >$group/cgroup.procs
    mount --bind $group /sys/fs/cgroup/$kind
    exec "$@"
done
exit 99
"""


def half_a_core(folder):
    """As a container sees it: its own control group is at the top."""
    done, log = train_and_read_log(folder, "unshare", "-m", "sh", "-c", QUOTA_SHELL, "sh")
    return with_threads(trained(done), log, 1)


def cannot_limit() -> str:
    reason = cannot_unshare("-m")
    done = None if reason else run(["unshare", "-m", "sh", "-c", QUOTA_SHELL, "sh", "true"], "/")
    return reason or ("" if done.code == 0 else "no control group can be made here")


def cannot_use_8_cores() -> str:
    """PyTorch never uses more threads than there are cores."""
    cores = len(os.sched_getaffinity(0))
    return "" if cores >= 8 else f"this machine has {cores} cores"


def eight_cores(folder):
    done, log = train_and_read_log(folder, "taskset", "-c", "0-7")
    return with_threads(trained(done), log, 8)


def no_vector_extensions(folder):
    """/proc/cpuinfo without AVX512 and AMX, and PyTorch's own kernels held to AVX2."""
    info = re.sub(r" (avx512|amx)\w*", "", open("/proc/cpuinfo", encoding="utf-8").read())
    (folder / "cpuinfo").write_text(info, encoding="utf-8")
    hide = f'mount --bind "{folder}/cpuinfo" /proc/cpuinfo && exec "$@"'
    done = train(folder, "unshare", "-m", "sh", "-c", hide, "sh", ATEN_CPU_CAPABILITY="avx2")
    return compiled(done)


def c_locale(folder):
    """Python then chooses UTF-8 by itself."""
    done, _ = train_and_read_log(folder, LC_ALL="C", PYTHONUTF8=None)
    return trained(done)


def ascii_locale(folder):
    """PyTorch reads a file of its own in the locale's encoding, and fails."""
    done, _ = train_and_read_log(folder, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    return one_line(done, "PYTHONUTF8=1")


def busy_machine(folder):
    loop = "import os\nwhile os.getppid() > 1: pass"
    others = [start([sys.executable, "-c", loop], folder) for _ in range(8)]
    try:
        return trained(train_and_read_log(folder)[0])
    finally:
        for other in others:
            kill_group(other, signal.SIGKILL)


def two_processes(folder):
    """Both must go on uncompiled when one of them can't compile."""
    options = write_tiny_shards(folder)
    crash = (
        'case "$1" in --version|-v) exec g++ "$@";; esac\n[ "$RANK" = 0 ] && exec g++ "$@"\nexit 4'
    )
    environment = clean_environment(
        TORCHINDUCTOR_CACHE_DIR=folder / "cache", CXX=shim(folder, crash), GLOO_SOCKET_IFNAME="lo"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        ROOT / "train_gpt.py",
        "--device",
        "cpu",
        *options,
    ]
    return uncompiled(run(command, folder, environment))


def cannot_unshare_mounts() -> str:
    return cannot_unshare("-m")


def cannot_compile_or_mount() -> str:
    return cannot_compile() or cannot_unshare("-m")


CASES = [
    Case("CPU unknown to the compiler", "trains", unknown_cpu, cannot=cannot_compile),
    Case("compiler makes wrong code", "trains uncompiled", wrong_code, cannot=cannot_compile),
    Case("no C++ compiler", "trains uncompiled", no_compiler),
    Case("no Python.h", "trains uncompiled", no_python_headers, cannot=cannot_compile_or_mount),
    Case("compiler crashes", "trains uncompiled", compiler_crashes, cannot=cannot_compile),
    Case(
        "one of two processes can't compile",
        "trains uncompiled",
        two_processes,
        cannot=cannot_compile,
    ),
    Case(
        "cache folder mounted noexec",
        "trains uncompiled",
        noexec_cache,
        cannot=cannot_compile_or_mount,
    ),
    Case(
        "run.sh, cache folder mounted noexec",
        "trains",
        run_sh_elsewhere,
        cannot=cannot_compile_or_mount,
    ),
    Case(
        "cache folder read-only",
        "trains uncompiled",
        read_only_cache,
        cannot=cannot_compile_or_mount,
    ),
    Case(
        "disk full while compiling", "trains uncompiled", full_disk, cannot=cannot_compile_or_mount
    ),
    Case("SIGTERM while Python starts", "a line", signal_after(1.0, signal.SIGTERM), fast=True),
    Case(
        "SIGTERM while compiling", "a line", signal_after(15, signal.SIGTERM), cannot=cannot_compile
    ),
    Case(
        "Ctrl-C while compiling", "a line", signal_after(20, signal.SIGINT), cannot=cannot_compile
    ),
    Case("one core", "trains", one_core, fast=True),
    Case("half a core by quota", "trains", half_a_core, cannot=cannot_limit),
    Case("8 cores", "trains", eight_cores, cannot=cannot_use_8_cores),
    Case("no AVX512 or AMX", "trains", no_vector_extensions, cannot=cannot_compile_or_mount),
    Case(
        "ARM",
        "trains",
        one_core,
        cannot=lambda: "this is an x86-64 CPU" if os.uname().machine == "x86_64" else "",
    ),
    Case("C locale", "trains", c_locale),
    Case("ASCII forced on Python", "a line", ascii_locale, fast=True),
    Case("busy machine (load 8)", "trains", busy_machine),
]
