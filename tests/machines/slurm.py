"""
A night on a cluster: comparisons through Slurm, one node of which is started here. Skips itself without Slurm
(Debian: apt install slurm-wlm munge), and for users that aren't root.

    ./run.sh test machines -k slurm           a small night: two minutes
    ./run.sh test machines -k slurm --slow    40 ideas, and the speed of two slots: a quarter of an hour
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.judge.helpers import commit_files
from tests.util import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel", "scontrol", "squeue", "sinfo")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={port2}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""
# The loss of an idea is that of its number: every fifth helps. A run hardly computes, so two cores don't limit it
SCRIPT = """
import os, random, sys, time
seed, idea = int(sys.argv[1]), int((sys.argv[3:] or [1])[0])
time.sleep(float(os.environ["SECONDS"]))
loss = 3 - 0.05 * (idea % 5 == 0) + random.Random(f"{seed}").gauss(0, 0.01)
loss += random.Random(f"{seed} {idea}").gauss(0, 0.001)
print(f"step:9/9 val_loss:{loss:.5f} ")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """One node with four cores, as Slurm believes. The environment in which its commands work."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.getuid():
        pytest.skip(f"no {missing[0]}" if missing else "Slurm's daemons need root")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    for above in (folder, folder.parent, folder.parent.parent):
        above.chmod(0o755)  # as munged wants it
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    host = socket.gethostname().split(".")[0]
    ports = dict(port=free_port(), port2=free_port())
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, **ports))
    files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "seed"}
    words = [f"--{option}={folder}/{name}" for option, name in files.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        subprocess.run(["munged", "--force", *words], check=True)
        subprocess.run(["slurmctld", "-f", folder / "slurm.conf"], check=True)
        subprocess.run(["slurmd", "-f", folder / "slurm.conf", "-N", host], check=True)
        try:
            wait_until(lambda: "idle" in read("sinfo", "-h", "-o", "%T"))
            yield host
        finally:
            read("scancel", "--user", "root")
            for name in ("slurmd", "slurmctld", "munged"):
                os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGTERM)


def wait_until(happens, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def place(slurm, tmp_path, monkeypatch):
    commit_files(tmp_path / "theirs", {"train.py": SCRIPT})
    monkeypatch.setenv("SECONDS", "0.5")
    monkeypatch.chdir(tmp_path / "theirs")
    return tmp_path / "theirs"


def judge(*words, launcher: str = "srun -Q -n1 -c1", jobs: int = 2) -> subprocess.Popen:
    """Starts a comparison by Slurm, or on this machine."""
    command = [sys.executable, *f"-m judge compare --jobs {jobs} --command".split()]
    command += ["python train.py {seed} {options}"]
    command += ["--launcher", launcher] if launcher else []
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, *words], env=env, **streams)


def ideas(count: int) -> list[str]:
    return [word for i in range(1, count + 1) for word in ("--idea", f"idea{i}=--idea {i}")]


def finished(child: subprocess.Popen) -> dict:
    out, _ = child.communicate(timeout=900)
    assert child.returncode == 0, out
    return json.loads(Path("o.json").read_text())


def runs_of(found: dict) -> dict:
    """The losses, by variant and seed. Each run is there once."""
    runs = [
        (name, run["seed"], run["val_loss"]) for name, group in found["runs"].items() for run in group
    ]
    assert len({run[:2] for run in runs}) == len(runs)
    return {run[:2]: run[2] for run in runs}


def count_kept() -> int:
    return len(list(Path(".judge/runs").glob("*/seed*.txt")))


@pytest.mark.parametrize("count, seconds", [(8, 0.5), pytest.param(40, 3, marks=pytest.mark.slow)])
def test_slurm_a_night(slurm, place, monkeypatch, count, seconds):
    """Jobs are cancelled, the node is drained for a while, and the judge is killed once. No run is lost, none
    counts twice, and the verdicts are those of the same seeds on this machine."""
    monkeypatch.setenv("SECONDS", str(seconds))
    words = [*ideas(count), "--runs", "4", "--no_times", "--json", "o.json"]
    child = judge(*words)
    for kept in (2, 6, 10):
        wait_until(lambda kept=kept: count_kept() >= kept)
        wait_until(lambda: read("squeue", "-h", "-t", "running", "-o", "%i").split())
        read("scancel", read("squeue", "-h", "-t", "running", "-o", "%i").split()[0])
    read("scontrol", "update", f"nodename={slurm}", "state=drain", "reason=test")
    time.sleep(3)
    assert child.poll() is None
    read("scontrol", "update", f"nodename={slurm}", "state=resume")
    wait_until(lambda: count_kept() >= 15)
    child.kill()
    child.communicate()
    wait_until(lambda: not read("squeue", "-h"), 30)  # its jobs end with it
    kept = count_kept()
    found = finished(judge(*words))
    assert found["runs_made"] == (count + 1) * 4 - kept
    shutil.rmtree(".judge")
    alone = finished(judge(*words, launcher=""))
    assert runs_of(found) == runs_of(alone)
    verdicts = [[(idea["name"], idea["verdict"]) for idea in each["ideas"]] for each in (found, alone)]
    assert verdicts[0] == verdicts[1]
    assert {name for name, verdict in verdicts[0] if verdict == "helps"} == {
        f"idea{number}" for number in range(5, count + 1, 5)
    }


@pytest.mark.slow
def test_slurm_two_slots(place, monkeypatch):
    """They are almost twice as fast as one."""
    monkeypatch.setenv("SECONDS", "5")
    times = {1: 0.0, 2: 0.0}
    for jobs in (1, 2, 2, 1):  # the load of the machine may drift
        began = time.monotonic()
        finished(judge(*ideas(5), "--runs", "4", "--no_times", "--json", "o.json", jobs=jobs))
        times[jobs] += time.monotonic() - began
        shutil.rmtree(".judge")
    print(times)
    assert times[1] / times[2] > 1.9


def test_slurm_interrupted(place):
    """Ctrl-C leaves no job behind."""
    child = judge("--idea", "--idea 7")
    wait_until(lambda: count_kept() >= 5)
    wait_until(lambda: read("squeue", "-h"))
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130 and "Interrupted" in out
    assert not read("squeue", "-h") and not list(Path(".judge").glob("working/*"))
