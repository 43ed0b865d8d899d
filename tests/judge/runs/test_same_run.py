"""What a run is, and what it reads: kept runs, the options of a command, the copy in which it runs."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

from judge.commands import UserError
from judge.compare import compare
from judge.settings import Settings, read_settings
from judge.runs import kept as kept_runs
from judge.runs import copies, make, same_run

from tests.judge.helpers import commit_files, git, make_runs, run_main, work_in

# -----------------------------------------------------------------------------
# Kept runs

COMMAND = "started_by python train.py {seed} {options} $HOME/outside/a.txt --from=$HOME/env/bin/tool "
COMMAND += "--out_dir=$HOME/outside/out | tee $HOME/outside/console.txt"
SCRIPT = """
import os, subprocess, sys
open("data/deep/shard.bin").read()
os.chdir(os.path.expanduser("~/outside"))
open("home.txt").read()
os.listdir("shards")
sys.path.append("modules")
import module
reading = "open('child.txt'); import subprocess; subprocess.run(['cat', 'grandchild.txt'])"
subprocess.run([sys.executable, "-c", reading])
os.system("cat < shell.txt")
os.makedirs("out", exist_ok=True)
for name in ("out/ckpt.pt", "out/ckpt.pt.tmp"):
    open(name, "w").write(str(os.getpid()))
os.replace("out/ckpt.pt.tmp", "out/ckpt.pt")
open("out/ckpt.pt").read()
open("results.txt", "a").write("one more")
print(f"step:9/9 val_loss:{3 + int(sys.argv[1]) % 7 / 100}\\n")
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A repository with runs of a base and of an idea. Gives a function: how many runs of them are kept,
    and of another idea."""
    place = tmp_path_factory.mktemp("kept")
    names = "base/config.json base/README.md base/package/a".split()
    names += "base/data/corpus.txt base/data/deep/shard.bin outside/a.txt outside/folder/b.txt".split()
    names += "env/bin/tool env/lib/python3.11/site-packages/dream-0.1.dist-info/METADATA".split()
    names += ["outside/site/dream-0.1.dist-info/METADATA", "outside/shards/1.bin", "bin/started_by"]
    names += [f"outside/{name}.txt" for name in ("home", "child", "grandchild", "shell", "not_read")]
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("Name: dream\nVersion: 0.1\n" if "METADATA" in name else name)
    (place / "bin/started_by").write_text('#!/bin/sh\nexec "$@"')
    (place / "bin/started_by").chmod(0o755)
    (place / "outside/modules").mkdir()
    (place / "outside/modules/module.py").write_text("")
    (place / "base/link").symlink_to("package")
    (place / "base/out").symlink_to("../outside/folder")
    ignored = "data/deep/\nlogs/\n__pycache__/\n"
    commit_files(place / "base", {"train.py": SCRIPT, ".gitignore": ignored})
    with pytest.MonkeyPatch.context() as patch:
        work_in(place, patch)
        patch.setenv("HOME", str(place))
        patch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
        patch.setenv("OMP_NUM_THREADS", "1")
        arguments = ["--command", COMMAND, "--base", "base", "--seed", "-5", "--ledger", "ledger.tsv"]
        first = ["--idea", "a=--lr 1", "--runs", "2"]
        status, out, err = run_main(compare.main, *arguments, *first)
        assert status == 0, err

        def count() -> tuple[list[int], str]:
            args, common = compare.read_arguments([*arguments, *first, "--idea", "b=--lr 2"])
            settings = read_settings(args, place / "base")
            with make.locked_folder(settings):
                c = compare.set_up(args, common, settings)
            found = [len(variant.runs) for variant in c.variants]
            return found, kept_runs.why_again(c.variants)

        yield count


def write(name: str, text: str = "new"):
    def change(patch):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

    return change


def link(name: str, target: str):
    def change(patch):
        Path(name).unlink()
        Path(name).symlink_to(target)

    return change


ask_python = same_run.ask_python


def another_path(python: str) -> tuple[str, list[str]]:
    version, path = ask_python(python)
    return version, [*path, "outside/site"]


CHANGES = [
    ("config.json changed", write("base/config.json", "BASE/config.json")),  # the same size
    ("config.json changed", lambda patch: Path("base/config.json").chmod(0o755)),
    ("config.json is gone", lambda patch: Path("base/config.json").unlink()),
    ("new.json is new", write("base/new.json")),
    ("link changed", link("base/link", "data")),
    ("out changed", link("base/out", "../outside/shards")),
    ("data/corpus.txt changed", write("base/data/corpus.txt")),
    ("data/deep/shard.bin changed", write("base/data/deep/shard.bin")),
    ("data/deep changed", write("base/data/deep/more")),
    ("outside/a.txt changed", write("outside/a.txt")),
    ("env/bin/tool changed", write("env/bin/tool")),
    (
        "site-packages changed",
        write("env/lib/python3.11/site-packages/x-1.dist-info/METADATA", "Version: 3"),
    ),
    ("home.txt changed", write("outside/home.txt")),
    ("home.txt is gone", lambda patch: Path("outside/home.txt").unlink()),
    ("shards changed", write("outside/shards/1.bin")),
    ("shards changed", write("outside/shards/2.bin")),
    ("module.py changed", write("outside/modules/module.py", "import os")),
    ("child.txt changed", write("outside/child.txt")),
    ("grandchild.txt changed", write("outside/grandchild.txt")),
    ("shell.txt changed", write("outside/shell.txt")),
    ("started_by changed", write("bin/started_by", '#!/bin/sh\n\nexec "$@"')),
    ("LR is new", lambda patch: patch.setenv("LR", "0.05")),
    ("LD_PRELOAD is new", lambda patch: patch.setenv("LD_PRELOAD", "")),
    ("PATH changed", lambda patch: patch.setenv("PATH", f"/opt:{os.environ['PATH']}")),
    ("threads 1 -> 3", lambda patch: patch.setenv("OMP_NUM_THREADS", "3")),
    ("compiler", lambda patch: patch.setenv("CXX", "another")),
    ("machine", lambda patch: patch.setattr(same_run, "cpu_line", lambda name: "Z80")),
    ("Python", lambda patch: patch.setattr(make, "ask_python", lambda python: ("3.99", []))),
    ("dream None -> 0.1", lambda patch: patch.setattr(make, "ask_python", another_path)),
    # No reason to make runs again
    ("", lambda patch: None),
    ("", lambda patch: os.utime("base/config.json", (1, 1))),
    ("", write("base/my.patch")),
    ("", write("base/results.tsv")),
    ("", write("base/answer.json", '{\n "until": 0.02,')),
    ("", write("base/logs/new.txt")),
    ("", lambda patch: Path("base/logs").symlink_to("../outside")),  # which git doesn't ignore
    ("", write("base/__pycache__/train.pyc")),
    ("", lambda patch: patch.setenv("TERM", "vt52")),
    ("", lambda patch: patch.setenv("SSH_CONNECTION", "1 2")),
    ("", write("outside/not_read.txt")),
    ("", write("outside/out/ckpt.pt")),
    ("", write("outside/out/more.pt")),
    ("", write("outside/console.txt")),
    ("", write("outside/results.txt")),
    ("", lambda patch: patch.setenv("GIT_DIR", "/nowhere")),
    ("", lambda patch: patch.setenv("PYTHONHASHSEED", "1")),
]


# What managers of jobs, terminals and WSL set
OF_A_JOB = """
    SLURM_JOB_ID SLURMD_NODENAME SLURM_NODELIST PBS_JOBID PBS_O_HOST LSB_JOBID LS_SUBCWD SGE_TASK_ID JOB_ID
    OMPI_COMM_WORLD_SIZE PMI_RANK FLUX_JOB_ID OAR_JOB_ID _CONDOR_SLOT KUBERNETES_PORT MY_SERVICE_HOST
    REDIS_PORT_80_TCP_ADDR SKYPILOT_TASK_ID MASTER_PORT TMPDIR CUDA_VISIBLE_DEVICES
    NVIDIA_VISIBLE_DEVICES WSL_INTEROP WT_SESSION
""".split()


def set_all(patch):
    for name in OF_A_JOB:
        patch.setenv(name, "/tmp")


CHANGES.append(("", set_all))


@pytest.mark.parametrize("words, change", CHANGES)
def test_what_makes_it_another_run(kept, monkeypatch, tmp_path, words, change):
    """Whatever a run could read. The answer says what it was. Otherwise a second idea uses the base's runs."""
    for name in ("base", "outside", "env", "bin"):
        shutil.copytree(name, tmp_path / name, symlinks=True)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    try:
        change(monkeypatch)
        counts, reason = kept()
    finally:
        for name in ("base", "outside", "env", "bin"):
            shutil.rmtree(name)
            shutil.move(tmp_path / name, name)
    assert counts == ([0, 0, 0] if words else [2, 2, 0])
    assert words in reason if words else reason == ""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository with a script that writes and runs what a test wants."""
    commit_files(tmp_path / "toy", {".gitignore": "data/x/"})
    work_in(tmp_path, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "toy"


UNSEEN = [
    (
        "sh -c 'cat ~/corpus' && echo step:9/9 val_loss:3.{seed}",
        "no Python ran that shows what it reads",
    ),
    ("python -I train.py {seed}", "no Python ran that shows what it reads"),
    ("env -u PYTHONPATH python train.py {seed}", "no Python ran that shows what it reads"),
    ("python count.py && python train.py {seed}", "it reads {}/count, which changed meanwhile"),
]


@pytest.mark.parametrize("command, why", UNSEEN)
def test_runs_that_are_not_kept(toy, command, why):
    """Where it can't be seen what they read, and where each leaves something for the next."""
    (toy / "train.py").write_text("import sys\nprint(f'step:9/9 val_loss:3.{sys.argv[1]}\\n')")
    (toy / "count.py").write_text("import os; open(os.path.expanduser('~/count'), 'r+').write('x')")
    for name in ("corpus", "count"):
        Path(name).write_text("")
    git(toy, "add", ".")
    words = ["--command", command + " {options}", "--base", "toy", "--idea", "--a 1", "--runs", "2"]
    for _ in range(2):
        status, out, err = run_main(compare.main, *words, "--json", "o.json")
        assert status == 0, err
        assert err.count(f"runs of toy aren't kept, because {why.format(toy.parent)}\n") == 1
        assert json.loads(Path("o.json").read_text())["runs_made"] == 4


def test_large_data_are_read_once(toy, monkeypatch):
    """By all runs, and by later commands."""
    script = (
        "import sys\nopen('data/x/corpus.bin').close()\nprint(f'step:9/9 val_loss:3.{sys.argv[1]} ')"
    )
    (toy / "train.py").write_text(script)
    (toy / "data/x").mkdir(parents=True)
    corpus = toy / "data/x/corpus.bin"
    corpus.write_bytes(bytes(2 << 20))
    monkeypatch.setattr(same_run.time, "time", lambda: corpus.stat().st_ctime + 2)
    digest = same_run.hashlib.file_digest
    sizes = []

    def count(file, name):
        sizes.append(os.fstat(file.fileno()).st_size)
        return digest(file, name)

    monkeypatch.setattr(same_run.hashlib, "file_digest", count)
    words = ["--command", "python train.py {seed} {options}", "--base", "toy", "--runs", "2"]
    words += ["--idea", "--a 1", "--idea", "--a 2"]
    for bytes_read in (2 << 20, 2 << 20, 4 << 20):
        monkeypatch.setattr(same_run, "HASHES", {})  # as in another process
        if bytes_read > 2 << 20:
            corpus.write_bytes(b"1" * (2 << 20))
        status, out, err = run_main(compare.main, *words)
        assert status == 0, err
        assert bytes_read <= sum(sizes) < bytes_read + (1 << 20)
    assert "corpus.bin changed" in err


# -----------------------------------------------------------------------------
# Copies


def test_copies_have_all_files(tmp_path, monkeypatch):
    """Those of the working tree and those of its commit: with submodules, links, and what archives lack."""
    module = tmp_path / "module"
    commit_files(module, {"inner.py": "1"})
    place = tmp_path / "place"
    files = {"a.py": "a.py", "config.txt": "", "sub/code/b.py": "", "sub/tool": ""}
    commit_files(place, files | {".gitattributes": "config.txt export-ignore\n"})
    (place / "sub" / "tool").chmod(0o755)
    (place / "sub" / "link").symlink_to("../a.py")
    (place / "folder").symlink_to("sub/code")
    git(place, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", "../module", "lib/m")
    commit_files(place, {})
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    (place / "run.log").write_text("not copied")
    tree = tmp_path / "copies" / "worktree"
    copies.copy_tree(tree, place)
    commit = copies.copy_commit("HEAD", tmp_path / "copies", place)
    found = same_run.hash_copy(tree, [])
    assert found == same_run.hash_copy(commit, [])
    names = {*files, ".gitattributes", "sub/link", "folder", "lib/m/inner.py"}
    assert names <= set(found) and "run.log" not in found
    inner = copies.copy_commit("HEAD", tmp_path / "inner", place / "sub")
    assert (inner / "link").read_text() == "a.py"
    shutil.rmtree(place / "lib" / "m")
    (place / "lib" / "m").mkdir()
    for copy in (copies.copy_tree, lambda *more: copies.copy_commit("HEAD", *more)):
        with pytest.raises(UserError, match="lib/m isn't checked out; run git submodule update --init"):
            copy(tmp_path / "again", place)


READING = """
import os, random, sys, time
sys.path.insert(0, {place!r})
{code}
print("step:1/1 val_loss:3.{{:03}}".format(random.randrange(1000)))
"""
HELLO = "print('hello'); "
ELSEWHERE = [
    ("python {place}/train.py", "", "train.py"),
    ("cd {place} && python train.py {options}", "", "train.py"),
    ("F={place}; cd $F; python -m train {options}", "", "train.py"),
    ("python train.py", "import other", "other.py"),
    ("PYTHONPATH=data python train.py", "open({place!r} + '/config.json')", "config.json"),
    ("python train.py", "open({place!r} + '/data/x/a.bin'); open({place!r} + '/o', 'w')", ""),
    ("python train.py", "open({place!r} + '/ignored.pyc')", ""),
    (
        "python train.py",
        "sys.exit('out of memory')",
        "out of memory\na run failed: idea, seed 1 (exit status 1)",
    ),
    ("python train.py {options} | cat", "print('step:1/1 val_loss:3 '); sys.exit(3)", "exit status 3"),
    ("python train.py", "open('data/x/b.bin', 'a').write('1')", ""),
    ("python train.py", "open('data/x/a.bin').read()", ""),
    ("python train.py", "print('step:1/9 val_loss:3 '); sys.exit()", "stopped at step 1 of 9"),
    (
        "bash -c 'cd .; python train.py {options} | cat'",
        "assert sys.argv[1:] == ['--env', 'PYTHONPATH=1']",
        "",
    ),
    ("python train.py {options}", "assert sys.argv[1:] == ['--env', 'PYTHONPATH=1']", ""),
    (
        "python train.py",
        "os.makedirs('logs/x.txt'); open('logs/a.log', 'w').write(f'val_loss:{{random.random()}} ')",
        "",
    ),
    ("python train.py", HELLO + "time.sleep(60)", "hello\na run failed: idea, seed 1 (it took"),
    ("python train.py", HELLO + "sys.exit()", "(no log below logs/"),
    (
        "python train.py",
        "print('step:1/9 train_loss:3'); sys.exit()",
        "no loss after its last step; it has lines like 'step:1/9 train_loss:",
    ),
    (
        "python train.py",
        "os.mkdir('logs'); [open(f'logs/{{i}}.txt', 'w').write('step:1/1 val_loss:3 ') for i in 'ab']",
        "(it wrote 2 logs below logs/",
    ),
    (
        "python train.py {seed}",
        "print(f'step:{{sys.argv[1]}}/{{sys.argv[1]}} val_loss:3 '); sys.exit()",
        "(it ended at step 2, an earlier run at step 1)",
    ),
    ("python train.py", "random.seed(0)", "(all runs end at the same loss; write {seed}"),
]


@pytest.mark.parametrize("command, code, message", ELSEWHERE)
def test_what_ran_is_the_copy(tmp_path, monkeypatch, command, code, message):
    """Reading the folder that was copied is an error, apart from its data. So is what changes while it is
    read, and a run that ends early or fails. Runs that were finished before are kept."""
    place = tmp_path / "place"
    script = READING.format(place=str(place), code=code.format(place=str(place)))
    files = {"config.json": "", "data/x/a.bin": "", "other.py": "", ".gitignore": "data/x/\n*.pyc\n"}
    files["ignored.pyc"] = ""
    commit_files(place, files | {"train.py": script})
    work_in(tmp_path, monkeypatch)
    text = command.format(place=place, options="{options}", seed="{seed}")
    settings = Settings(command=text, root=place, no_seed=True)
    settings.run_timeout = 0.1 if "sleep" in code else math.inf
    pool, said = make_runs(settings, range(1, 4), ["--env", "PYTHONPATH=1"])
    assert message in said
    assert pool.made == len(list((place / ".judge").rglob("seed*")))
    if not message:
        assert said == "" and pool.made == 3
    elif "while idea trained" not in message:
        assert f"\na run failed: idea, seed {1 + pool.made} (" in said
    assert not list((place / ".judge").glob("working/*"))
