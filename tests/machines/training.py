"""Cases about training with run.sh: machines with other compilers, folders, signals and cores."""

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
    run,
    start,
    trained,
    write_tiny_shards,
)

WARNING = "warning: training without torch.compile"


def tiny_run(folder, *prefix, **environment):
    """Starts a tiny compiled run with this Python's packages, and with a compile cache of its own.

    `prefix` is a command that starts the run.
    """
    settings = dict(
        TORCHINDUCTOR_CACHE_DIR=folder / "cache",
        HOME=folder,
        XDG_CACHE_HOME=None,
        VIRTUAL_ENV=sys.prefix,
        PATH=f"{sys.prefix}/bin:{os.environ['PATH']}",
    )
    options = ["--device", "cpu", "--log_dir", folder / "logs", *write_tiny_shards(folder)]
    environment = clean_environment(**settings | environment)
    return start([*prefix, ROOT / "run.sh", *options], folder, environment)


def train(folder, *prefix, **environment):
    return finish(tiny_run(folder, *prefix, **environment))


def compiled(done) -> Outcome:
    """The run must have trained with compiled code."""
    outcome = trained(done)
    if outcome.ok and WARNING in done.output:
        return Outcome(False, "trained uncompiled", done.last_line)
    return outcome


def uncompiled(done, *words) -> Outcome:
    """The run must have trained without compiled code, with one warning with these words."""
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
    """Writes a shell script that takes the place of the compiler."""
    folder = folder / "bin"
    folder.mkdir()
    script = folder / "g++"
    script.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    script.chmod(0o755)
    return script


# -----------------------------------------------------------------------------
# Compilers


def cannot_compile() -> str:
    if shutil.which("g++"):
        return ""
    return "there is no g++"


def unknown_cpu(folder):
    return compiled(train(folder, CXX=shim(folder, 'exec g++ -mtune=generic "$@"')))


def no_compiler(folder):
    done = train(folder, CXX="no-such-compiler")
    return uncompiled(done, "No working C++ compiler", "apt install g++")


def no_python_headers(folder):
    headers = sysconfig.get_paths()["include"]
    hide = f'mount -t tmpfs none "{headers}" && exec "$@"'
    done = train(folder, "unshare", "-m", "sh", "-c", hide, "sh")
    return uncompiled(done, "Python.h", "python3-dev")


def compiler_crashes(folder):
    crash = (
        'case "$1" in --version|-v) exec g++ "$@";; esac\n'
        'echo "g++: internal compiler error: Segmentation fault" >&2\nexit 4'
    )
    return uncompiled(train(folder, CXX=shim(folder, crash)), "internal compiler error")


def wrong_code(folder):
    """The compiler changes a constant in the code: logits are capped at 15 instead of 30."""
    spoil = (
        'for file in "$@"; do\n'
        '    case "$file" in *.cpp) sed -i "s/(30[.]0)/(15.0)/g" "$file" ;; esac\n'
        "done\n"
        'exec g++ "$@"'
    )
    return uncompiled(train(folder, CXX=shim(folder, spoil)), "is wrong", "GCC 14")


# -----------------------------------------------------------------------------
# Folders for compiled code


def mounted(kind, folder):
    """Words that start a command with a separate file system at `folder`.

    kind: "noexec", "ro" or "size=20m"
    """
    folder.mkdir()
    return [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount -t tmpfs -o {kind} none "{folder}" && exec "$@"',
        "sh",
    ]


def cache_on(kind):
    """A case with the compile cache on such a file system. Compiled code goes elsewhere."""

    def case(folder):
        cache = folder / "mounted"
        done = train(folder, *mounted(kind, cache), TORCHINDUCTOR_CACHE_DIR=cache)
        outcome = compiled(done)
        if outcome.ok and "storing compiled code in" not in done.output:
            return Outcome(False, "says nothing of the other folder", done.last_line)
        return outcome

    return case


def full_disk(folder):
    cache = folder / "mounted"
    done = train(folder, *mounted("size=100k", cache), TORCHINDUCTOR_CACHE_DIR=cache)
    return uncompiled(done, "No space left on device", "free disk space")


# -----------------------------------------------------------------------------
# Signals before the first step


def signal_after(seconds, number):
    def case(folder):
        process = tiny_run(folder)
        while not process.stdout.readline().startswith("comparing compiled code"):
            assert process.poll() is None, "it ended before it compiled"
        time.sleep(seconds)
        kill_group(process, number)
        done = finish(process)
        lines = done.output.splitlines()
        ok = done.code == 128 + number and len(lines) == 1 and "run.sh: stopped by" in lines[0]
        return Outcome(ok, f"{len(lines)} lines, exit {done.code}", done.last_line)

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
    """Limits the run to half a core. As in a container, its own control group is at the top."""
    done, log = train_and_read_log(folder, "unshare", "-m", "sh", "-c", QUOTA_SHELL, "sh")
    return with_threads(trained(done), log, 1)


def cannot_limit() -> str:
    reason = cannot_unshare("-m")
    if reason:
        return reason
    done = run(["unshare", "-m", "sh", "-c", QUOTA_SHELL, "sh", "true"], "/")
    if done.code == 0:
        return ""
    return "no control group can be made here"


def cannot_use_8_cores() -> str:
    """PyTorch never uses more threads than there are cores."""
    cores = len(os.sched_getaffinity(0))
    if cores >= 8:
        return ""
    return f"this machine has {cores} cores"


def cannot_use_arm() -> str:
    if os.uname().machine == "x86_64":
        return "this is an x86-64 CPU"
    return ""


def eight_cores(folder):
    done, log = train_and_read_log(folder, "taskset", "-c", "0-7")
    return with_threads(trained(done), log, 8)


def no_vector_extensions(folder):
    """/proc/cpuinfo has no AVX512 and no AMX, and PyTorch's own kernels only use AVX2."""
    info = re.sub(r" (avx512|amx)\w*", "", open("/proc/cpuinfo", encoding="utf-8").read())
    (folder / "cpuinfo").write_text(info, encoding="utf-8")
    hide = f'mount --bind "{folder}/cpuinfo" /proc/cpuinfo && exec "$@"'
    done = train(folder, "unshare", "-m", "sh", "-c", hide, "sh", ATEN_CPU_CAPABILITY="avx2")
    return compiled(done)


def busy_machine(folder):
    loop = "import os\nwhile os.getppid() > 1: pass"
    others = [start([sys.executable, "-c", loop], folder) for _ in range(8)]
    try:
        return trained(train_and_read_log(folder)[0])
    finally:
        for other in others:
            kill_group(other, signal.SIGKILL)


def cannot_compile_or_mount() -> str:
    return cannot_compile() or cannot_unshare("-m")


CASES = [
    Case("CPU unknown to the compiler", "trains", unknown_cpu, cannot=cannot_compile),
    Case("compiler makes wrong code", "trains uncompiled", wrong_code, cannot=cannot_compile),
    Case("no C++ compiler", "trains uncompiled", no_compiler),
    Case("no Python.h", "trains uncompiled", no_python_headers, cannot=cannot_compile_or_mount),
    Case("compiler crashes", "trains uncompiled", compiler_crashes, cannot=cannot_compile),
    Case("cache folder mounted noexec", "trains", cache_on("noexec"), cannot=cannot_compile_or_mount),
    Case("cache folder read-only", "trains", cache_on("ro"), cannot=cannot_compile_or_mount),
    Case(
        "disk full while compiling", "trains uncompiled", full_disk, cannot=cannot_compile_or_mount
    ),
    Case(
        "SIGTERM while compiling", "a line", signal_after(5, signal.SIGTERM), cannot=cannot_compile
    ),
    Case(
        "Ctrl-C while compiling", "a line", signal_after(10, signal.SIGINT), cannot=cannot_compile
    ),
    Case("one core", "trains", one_core, fast=True),
    Case("half a core by quota", "trains", half_a_core, cannot=cannot_limit),
    Case("8 cores", "trains", eight_cores, cannot=cannot_use_8_cores),
    Case("no AVX512 or AMX", "trains", no_vector_extensions, cannot=cannot_compile_or_mount),
    Case(
        "ARM",
        "trains",
        one_core,
        cannot=cannot_use_arm,
    ),
    Case("busy machine (load 8)", "trains", busy_machine),
]
