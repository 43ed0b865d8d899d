"""
Tests of tools/common.py.

They count the cores under the quota of a cgroup, whose files the tests write, and write files, links
and pipes.
"""

import contextlib
import os
import subprocess
import sys

import pytest

from tools import common
from tests.util import ROOT


def version_1(quota, period):
    return {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 8),  # macOS
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "50000 100000\n"}, 1),  # half a core
        ({"cpu.max": "250000 100000\n"}, 2),
        (version_1("150000\n", "50000\n"), 3),
        (version_1("-1\n", "100000\n"), 8),
    ],
)
def test_cores_follow_the_quota(tmp_path, monkeypatch, files, cores):
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert common.usable_cores(tmp_path) == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert common.usable_cores(tmp_path) == cores


def test_what_the_user_set_stays(monkeypatch):
    """Processes share the threads that the user chose, or else the cores."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "5")
    monkeypatch.setattr(common, "usable_cores", lambda: 7)
    assert common.environment()["MALLOC_MMAP_MAX_"] == "5"
    for threads, of_two in [("6", "3"), ("1", "1"), ("", "3"), ("4,2", "3"), ("²", "3")]:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert common.environment(processes=2)["OMP_NUM_THREADS"] == of_two


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
    assert common.clean_environment() == sorted(dropped.split())
    assert os.environ.keys() - common.FIXED.keys() == set(kept.split())


def test_git_finds_the_repository_of_another_user(tmp_path, monkeypatch):
    """In a hook, its variables name another repository."""
    monkeypatch.setenv("GIT_DIR", "/elsewhere")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init"], env=common.child_environment(), check=True)
    if os.getuid() == 0:
        for path in [tmp_path, tmp_path / ".git"]:
            os.chown(path, 4321, 4321)
    subprocess.run([*git, "status"], env=common.child_environment(), check=True)


def test_a_user_who_is_not_in_passwd_has_a_home(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert os.path.isdir(common.child_environment()["HOME"])


def test_output_into_a_closed_pipe():
    """`| head` may stop reading early. That is no error of a file, so nothing is printed about one."""
    code = "from tools import common; common.run_command(lambda argv: print('text', flush=True))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


# -----------------------------------------------------------------------------
# Commands and files
def test_files_are_replaced_also_behind_links(tmp_path):
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    common.write_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["folder", "link", "target"]
    with pytest.raises(common.FileError, match="^cannot write .*/link/file: not a directory$"):
        common.write_file(link / "file", b"text")


def test_a_folder_is_there_when_it_is_whole(tmp_path):
    folder = tmp_path / "deep" / "new"
    for good in (False, True):
        with contextlib.suppress(KeyboardInterrupt), common.new_folder(folder) as made:
            (made / "file").touch()
            assert not folder.exists()
            if not good:
                raise KeyboardInterrupt
        assert [file.name for file in tmp_path.rglob("*")] == (
            ["deep", "new", "file"] if good else ["deep"]
        )
    with pytest.raises(common.FileError, match="new exists already"), common.new_folder(folder):
        pass


def test_pipes_are_written_into(tmp_path):
    """--json /dev/stdout | cat shows the file. A pipe stays a pipe. (The link is this test's own, so that
    a mistake can't damage /dev.)"""
    link = tmp_path / "out"
    link.symlink_to("/dev/stdout")
    code = "import sys; from tools import common; common.write_file(sys.argv[1], b'text')"
    command = [sys.executable, "-c", code, str(link)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert shown.stdout == b"text" and link.is_symlink()
