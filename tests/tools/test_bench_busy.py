"""
Tests of tools/bench_busy.py.

They check which processes run at the same time, and that all of them end. One test runs a whole
benchmark.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import train_gpt
from util import ROOT, env, wait_until

sys.path.append(str(ROOT / "tools"))
import bench_busy
from bench import InputError, run_benchmark

SMALL = [
    "--device=cpu",
    "--track=mini",
    "--batch_tokens=512",
    "--train_seq_len=128",
    "--num_layers=4",
    "--model_dim=32",
    "--head_dim=16",
    "--num_heads=1",
    "--repeats=2",
    "--warmup=1",
]
ECHO = """
import sys
print('0', flush=True)
for _ in sys.stdin:
    print('0', flush=True)
"""


def state_of(pid):
    """The state of a process as a letter of the kernel, such as R, S or T; "" if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state = text.rpartition(")")[2].split()[0]
    if state == "Z":
        return ""
    return state


@pytest.fixture
def processes(monkeypatch):
    """Returns (stepping, busy), lists of the processes that were started.

    The stepping processes are stand-ins without PyTorch that answer at once.
    """
    stepping = []
    busy = []
    start_busy_process = bench_busy.busy_process

    @contextlib.contextmanager
    def fake_stepping_process(setting, argv):
        with bench_busy.child(ECHO) as process:
            stepping.append(process)
            yield process

    @contextlib.contextmanager
    def listed_busy_process():
        with start_busy_process() as process:
            busy.append(process)
            yield process

    monkeypatch.setattr(bench_busy, "stepping_process", fake_stepping_process)
    monkeypatch.setattr(bench_busy, "busy_process", listed_busy_process)
    before = signal.getsignal(signal.SIGTERM)
    yield stepping, busy
    signal.signal(signal.SIGTERM, before)
    for process in [*stepping, *busy]:
        process.kill()


def test_each_setting_is_timed_alone(processes, monkeypatch):
    """While one setting is timed, the processes of the others are stopped.

    Each measurement has its number of busy processes.
    """
    stepping, busy = processes
    counts = []
    answer = bench_busy.answer

    def others_are_stopped(process):
        return all(state_of(other.pid) == "T" for other in stepping if other is not process)

    def count_busy(process, setting):
        wait_until(lambda: others_are_stopped(process), 60)
        answer(process, setting)
        counts.append(sum(state_of(other.pid) != "" for other in busy))
        return counts[-1]

    monkeypatch.setattr(bench_busy, "answer", count_busy)
    args = argparse.Namespace(
        busy=2,
        rounds=3,
        openmp=["A=1"],
    )
    medians = bench_busy.time_beside_others(args, [])
    assert list(medians) == [bench_busy.OWN, bench_busy.DEFAULT, "A=1"]
    for by_busy in medians.values():
        assert by_busy == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    a_round = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert counts[3:] == 3 * a_round  # the first three are the answers after compiling
    assert len(stepping) == 3
    assert len(busy) == 9
    assert not any(state_of(process.pid) for process in [*stepping, *busy])


def fork_and_wait(stepping, busy, monkeypatch):
    """Forks a benchmark that waits in its second round. Returns its pid and its children's pids."""
    reader, writer = os.pipe()
    answer = bench_busy.answer

    def tell_and_wait(process, setting):
        if len(busy) == 2:  # in the second round
            pids = [str(process.pid) for process in [*stepping, *busy]]
            os.write(writer, " ".join(pids).encode())
            while True:  # signal.pause() would miss a signal that comes right before it
                time.sleep(0.01)
        return answer(process, setting)

    monkeypatch.setattr(bench_busy, "answer", tell_and_wait)
    pid = os.fork()
    if pid == 0:
        try:
            bench_busy.time_beside_others(argparse.Namespace(busy=1, rounds=3, openmp=[]), [])
        finally:
            os._exit(3)
    children = [int(text) for text in os.read(reader, 1000).split()]
    os.close(reader)
    os.close(writer)
    return pid, children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_busy_processes_end_with_the_benchmark(number, processes, monkeypatch):
    stepping, busy = processes
    pid, children = fork_and_wait(stepping, busy, monkeypatch)
    last_busy = children[-1]
    assert len(children) == 4
    assert state_of(last_busy)
    os.kill(pid, number)
    os.waitpid(pid, 0)
    wait_until(lambda: state_of(last_busy) == "", 60)
    if number != signal.SIGKILL:
        assert not any(map(state_of, children))
    for child in filter(state_of, children):  # after SIGKILL, stopped processes still exist
        os.kill(child, signal.SIGKILL)


def test_a_stepping_process_that_fails_is_an_error():
    with bench_busy.child("raise SystemExit(5)") as process:
        with pytest.raises(InputError, match="X=1 ended with exit code 5"):
            bench_busy.answer(process, "X=1")


def test_environment_of_the_stepping_processes(monkeypatch):
    """Only the setting decides how threads wait. The processes inherit all other variables.

    They need those for the compiler, because they load PyTorch before train_gpt.py.
    """
    monkeypatch.setattr(bench_busy, "child", lambda code, env: env)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")
    inherited = dict(os.environ)
    del inherited["OMP_WAIT_POLICY"], inherited["GOMP_SPINCOUNT"]
    assert bench_busy.stepping_process(bench_busy.OWN, []) == inherited
    assert bench_busy.stepping_process(bench_busy.DEFAULT, []) == inherited
    environment = bench_busy.stepping_process("GOMP_SPINCOUNT=9 OMP_PROC_BIND=true", [])
    assert environment == inherited | {"GOMP_SPINCOUNT": "9", "OMP_PROC_BIND": "true"}


@pytest.mark.parametrize(
    "args, message",
    [
        (["--busy", "0"], "--busy"),
        (["--busy", "1", "--rounds", "2"], "at least 3"),
        (["--openmp", ""], "OMP_WAIT_POLICY=PASSIVE"),
        (["--openmp", "OMP_WAIT_POLICY"], "OMP_WAIT_POLICY=PASSIVE"),
        (["--openmp", "GOMP_SPINCOUNT=1 PATH=x"], "OpenMP variables"),
        (["--kernels", "3"], "--kernels"),
    ],
)
def test_bad_busy_options(args, message, capsys):
    assert run_benchmark(bench_busy.bench_busy, ["--device", "cpu", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def check_rows(rows, medians):
    """Compares the rows of the table with the medians of the rounds in the JSON file."""
    for setting, by_busy in medians.items():
        alone = sorted(by_busy[0])[1]
        for name, next_to, times in zip((setting, ""), ("alone", "1 busy"), by_busy):
            low, middle, high = sorted(times)
            cells = [
                *name.split(),
                *next_to.split(),
                f"{middle:,.1f}",
                f"{middle / alone:.2f}",
                f"{low:,.1f}",
                "to",
                f"{high:,.1f}",
            ]
            assert rows.pop(0).split() == cells
    assert rows == []


def test_busy_on_the_cpu(tmp_path, monkeypatch, capfd):
    """OpenMP prints its own settings. By default, its threads spin 300,000 times.

    The benchmark must use this default, though the environment and train_gpt.py set other values.
    """

    def start_world(name):
        return train_gpt.World(0, 1, torch.device(name))

    monkeypatch.setattr(train_gpt, "start_world", start_world)
    for name, value in env(OMP_DISPLAY_ENV="VERBOSE", OMP_WAIT_POLICY="ACTIVE").items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "out.json"
    options = [*SMALL, "--busy=1", "--json", str(path)]
    assert run_benchmark(bench_busy.bench_busy, options) == 0
    signal.signal(signal.SIGTERM, before)
    out, err = capfd.readouterr()
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", err)
    assert len(spins) == 2
    assert spins[1] == "300000"
    assert all(len(line) <= 80 for line in out.splitlines())
    medians = json.loads(path.read_text())["busy ms"]
    assert list(medians) == [bench_busy.OWN, bench_busy.DEFAULT]
    check_rows(out.splitlines()[4:], medians)
