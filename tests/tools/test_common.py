"""
Tests of tools/common.py.

They count the cores under the quota of a cgroup, whose files the tests write, and print text in any
locale.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tools import common


def write_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


V2 = "proc/self/cgroup"
V1 = "sys/fs/cgroup/cpu/"


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 8),  # macOS
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),  # half a core
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),  # more than there are
        (
            {
                V2: "0::/a.slice/b\n",
                "sys/fs/cgroup/a.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a.slice/b/cpu.max": "max 100000\n",
            },
            3,  # the limit of the group around it
        ),
        (
            {V2: "0::/a.slice/b\n", "sys/fs/cgroup/a.slice/c/cpu.max": "300000 100000\n"},
            8,  # another group has this limit
        ),
        ({V2: "0::/../../b\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        (
            {
                V2: "5:cpu,cpuacct:/docker/1\n0::/\n",
                f"{V1}cpu.cfs_quota_us": "150000\n",
                f"{V1}cpu.cfs_period_us": "50000\n",
            },
            3,
        ),
        (
            {
                V2: "5:cpu,cpuacct:/\n",
                f"{V1}cpu.cfs_quota_us": "-1\n",
                f"{V1}cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({V2: "5:cpu:/\n", f"{V1}cpu.cfs_quota_us": "1000\n", f"{V1}cpu.cfs_period_us": "0\n"}, 8),
        (
            {
                V2: "5:cpuset:/\n",
                f"{V1}cpu.cfs_quota_us": "100000\n",
                f"{V1}cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_cores_follow_the_quota(tmp_path, monkeypatch, files, cores):
    write_files(tmp_path, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert common.usable_cores(tmp_path) == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert common.usable_cores(tmp_path) == cores
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert common.usable_cores(tmp_path) == 1


def test_what_the_user_set_stays(monkeypatch):
    """Processes share the threads that the user chose, or else the cores."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "5")
    monkeypatch.setattr(common, "usable_cores", lambda: 7)
    assert common.environment()["MALLOC_MMAP_MAX_"] == "5"
    for threads, of_two in [("6", "3"), ("1", "1"), ("", "3"), ("4,2", "3")]:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert common.environment(processes=2)["OMP_NUM_THREADS"] == of_two


def test_output_into_a_closed_pipe():
    """`| head` may stop reading early. That is no error of a file, so nothing is printed about one."""
    code = "from tools import common; common.run_command(lambda argv: print('text', flush=True))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


COUNT_FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_is_kept(kept):
    """The second time, a block of 64 MiB needs no new pages."""
    variables = common.environment() if kept else {}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS], env=variables, capture_output=True, text=True
    )
    first, second = map(int, done.stdout.split())
    assert (second < first / 10) == kept


def test_text_in_the_c_locale(tmp_path):
    """A terminal shows a question mark for other characters. Arguments are still read as UTF-8."""
    code = (
        "import sys\n"
        "from tools import common\n"
        "common.show_any_text()\n"
        "readable = ascii(common.readable(sys.argv[1]))\n"
        "print('a ± b', sys.argv[1], common.readable('plain'), readable)\n"
    )
    (tmp_path / "x.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "x.py", "naïve"],
        capture_output=True,
        env=os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"a ? b na??ve plain 'na\\xefve'\n"
