"""Tests of judge/environment.py. They count cores under the quota of a cgroup, whose files they write."""

import os
import subprocess

import pytest

from judge import environment
from lib import processes


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 8),  # macOS
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "50000 100000\n"}, 1),  # half a core
        ({"cpu.max": "250000 100000\n"}, 2),
    ],
)
def test_cores_follow_the_quota(tmp_path, monkeypatch, files, cores):
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert environment.usable_cores(tmp_path) == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert environment.usable_cores(tmp_path) == cores


def test_what_the_user_set_stays(monkeypatch):
    """Processes share the threads that the user chose, or else the cores."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "5")
    monkeypatch.setattr(processes, "usable_cores", lambda: 7)
    assert processes.environment()["MALLOC_MMAP_MAX_"] == "5"
    for threads, of_two in [("6", "3"), ("1", "1"), ("", "3"), ("4,2", "3"), ("²", "3")]:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert processes.environment(processes=2)["OMP_NUM_THREADS"] == of_two


@pytest.mark.parametrize(
    "kept, dropped",
    [
        ("PATH HOME CXX LD_PRELOAD NCCL_DEBUG", "RANK LOCAL_RANK WORLD_SIZE"),
        ("PIP_INDEX_URL PIP_CONFIG_FILE PIP_CACHE_DIR", "PIP_TARGET PIP_PREFIX PIP_USER PIP_NO_BINARY"),
        ("OMP_NUM_THREADS OMP_WAIT_POLICY", "OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY KMP_AFFINITY"),
        (
            "TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE",
            "TORCHINDUCTOR_FREEZING TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        ),
    ],
)
def test_what_could_change_what_runs_is_dropped(monkeypatch, kept, dropped):
    monkeypatch.setattr(
        os, "environ", dict.fromkeys(f"{kept} {dropped} GIT_DIR PYTHONPATH".split(), "junk")
    )
    assert processes.clean_environment() == sorted(dropped.split())
    assert os.environ.keys() - environment.FIXED.keys() == set(kept.split())


def test_git_finds_the_repository_of_another_user(tmp_path, monkeypatch):
    """In a hook, its variables name another repository."""
    monkeypatch.setenv("GIT_DIR", "/elsewhere")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init"], env=environment.child_environment(), check=True)
    if os.getuid() == 0:
        for path in [tmp_path, tmp_path / ".git"]:
            os.chown(path, 4321, 4321)
    subprocess.run([*git, "status"], env=environment.child_environment(), check=True)


def test_a_user_who_is_not_in_passwd_has_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert os.path.isdir(environment.child_environment()["HOME"])
