"""Tests of judge/files.py and of commands that print: files, links, folders and pipes."""

import contextlib
import errno
import os
import subprocess
import sys
from unittest import mock

import pytest

from judge import files
from judge.commands import UserError
from tests.util import ROOT


def test_files_are_replaced_also_behind_links(tmp_path):
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    files.write_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["folder", "link", "target"]
    with pytest.raises(NotADirectoryError, match="target/file'$"):
        files.write_file(link / "file", b"text")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.fsync", side_effect=full), pytest.raises(OSError, match="target'$"):
        files.write_file(link, b"more")
    assert target.read_bytes() == b"new"


def test_a_folder_is_there_when_it_is_whole(tmp_path):
    folder = tmp_path / "deep" / "new"
    for good in (False, True):
        with contextlib.suppress(KeyboardInterrupt), files.new_folder(folder) as made:
            (made / "file").touch()
            assert not folder.exists()
            if not good:
                raise KeyboardInterrupt
        assert [file.name for file in tmp_path.rglob("*")] == (
            ["deep", "new", "file"] if good else ["deep"]
        )
    with pytest.raises(UserError, match="new exists already"), files.new_folder(folder):
        pass


def test_pipes_are_written_into(tmp_path):
    """--json /dev/stdout | cat shows the file. A pipe stays a pipe. (The link is this test's own, so that
    a mistake can't damage /dev.)"""
    link = tmp_path / "out"
    link.symlink_to("/dev/stdout")
    code = "import sys; from judge import files; files.write_file(sys.argv[1], b'text')"
    command = [sys.executable, "-c", code, str(link)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert shown.stdout == b"text" and link.is_symlink()


def test_output_into_a_closed_pipe():
    """`| head` may stop reading early. That is no error of a file, so nothing is printed about one."""
    code = "from judge.commands import run_command; run_command(lambda argv: print('text', flush=True))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
