"""Where runs are made: GPUs of their own, and launchers whose jobs are lost."""

import os
from pathlib import Path

import pytest

from judge import processes
from judge.commands import UserError
from judge.compare import compare
from judge.settings import Settings
from judge.runs import same_run, start
from tests.judge.helpers import commit_files, make_runs, run_main

# Says which GPUs it has, and waits for as many runs as there are slots
SCRIPT = """
import os, sys, time
from pathlib import Path
seed, together = sys.argv[1:3]
place = Path(os.environ["HOME"], "seen")
(place / "_".join(sys.argv[1:])).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
deadline = time.time() + 100
while len(list(place.iterdir())) < int(together) and time.time() < deadline:
    time.sleep(0.05)
print(f"step:1/1 val_loss:3.{seed}1")
"""


@pytest.fixture
def eight_gpus(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    gpus = "\n".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-{i})'" for i in range(8))
    program.write_text(f"#!/bin/sh\n{gpus}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def place(tmp_path, monkeypatch):
    commit_files(tmp_path / "theirs", {"train.py": SCRIPT})
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "theirs")
    return tmp_path


@pytest.mark.parametrize(
    "visible, keys, expected",
    [
        (None, dict(gpus_per_run=1), list("01234567")),
        (None, dict(gpus_per_run=2), ["0,1", "2,3", "4,5", "6,7"]),
        (None, dict(gpus_per_run=3), ["0,1,2", "3,4,5"]),
        (None, dict(), ["0,1,2,3,4,5,6,7"]),  # a command may use all
        ("5,2,GPU-7", dict(gpus_per_run=1), ["5", "2", "GPU-7"]),
        (None, dict(gpus_per_run=1, jobs=2), ["0", "1"]),
        ("", dict(gpus_per_run=1), [""]),
    ],
)
def test_gpus_of_slots(eight_gpus, monkeypatch, visible, keys, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [",".join(slot.gpus) for slot in start.find_slots(Settings(**keys))] == expected


@pytest.mark.parametrize("keys", [dict(jobs=8), dict(gpus_per_run=9), dict(gpus_per_run=2, jobs=5)])
def test_more_runs_than_gpus(eight_gpus, keys):
    with pytest.raises(UserError, match="need more than the 8 GPUs that are visible"):
        start.find_slots(Settings(**keys))


def test_gpus_without_a_name(monkeypatch, tmp_path):
    """Runs share none of them by mistake. The user can name them."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(processes, "DEVICES", tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(
        UserError, match="the 0 GPUs that are visible; .* name the GPUs in CUDA_VISIBLE"
    ):
        start.find_slots(Settings(job_per_core=True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [slot.gpus for slot in start.find_slots(Settings(job_per_core=True))] == [("0",)]


@pytest.mark.parametrize("each, together", [(1, 8), (2, 4)])
def test_runs_at_a_time_share_no_gpu(eight_gpus, place, each, together):
    """A comparison of one idea keeps all GPUs busy. Each run waits for those of the other slots."""
    words = ["--command", f"python train.py {{seed}} {together} {{options}}", "--idea", "--idea"]
    words += ["--runs", together // 2, "--gpus_per_run", each]
    status, _, err = run_main(compare.main, *words)
    assert status == 0, err
    seen = [file.read_text().split(",") for file in (place / "seen").iterdir()]
    assert sorted(gpu for gpus in seen for gpu in gpus) == list("01234567")
    assert {len(gpus) for gpus in seen} == {each}


def test_equal_gpus_are_counted(eight_gpus):
    """The answer of eight GPUs doesn't name each."""
    Path(os.environ["PATH"].partition(":")[0], "nvidia-smi").write_text(
        "#!/bin/sh\necho 'H100, 570'\necho 'H100, 570'\necho 'A100, 570'\n"
    )
    assert same_run.machine_facts(gpu=True)["machine"] == "2x H100, 570; A100, 570"


# -----------------------------------------------------------------------------
# Launchers

# Runs a command, but loses some jobs: it ends them before or after they began, by the number of the call
LAUNCHER = """#!/bin/bash
shift # -n1
echo "$@" >>~/calls
case $(wc -l <~/calls) in
1) exit 1 ;;
2) "$@" & sleep 1; kill -KILL $!; exit 137 ;;
esac
exec "$@"
"""


@pytest.fixture
def launcher(place):
    file = place / "launch"
    file.write_text(LAUNCHER)
    file.chmod(0o755)
    return f"{file} -n1"


def test_lost_runs_are_made_again(place, launcher, monkeypatch):
    """With the same seed, at most so often. The answer counts them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (place / "theirs/train.py").write_text("import sys, time\ntime.sleep(3)\n" + SCRIPT)
    settings = Settings(command="python train.py {seed} 1", launcher=launcher, root=Path.cwd())
    pool, _ = make_runs(settings, range(2))
    assert (pool.made, list(pool.lost.values())) == (2, [[128, 128]])
    assert len((place / "calls").read_text().splitlines()) == 4
    assert len(pool.places) == 1
    (place / "calls").unlink()
    settings.retries = 1
    assert "seed 7 (exit status 137)" in make_runs(settings, range(7, 8))[1]


def test_a_script_that_fails_by_itself_is_not_lost(place, launcher):
    (place / "theirs/train.py").write_text("import sys\nsys.exit(3)\n")
    (place / "calls").write_text("\n\n\n")
    settings = Settings(command="python train.py {seed}", launcher=launcher, root=Path.cwd(), retries=9)
    assert "exit status 3" in make_runs(settings, range(1))[1]
    assert len((place / "calls").read_text().splitlines()) == 5  # once more, and the same status


def test_a_queue_does_not_count(place, monkeypatch):
    """The time limit of a run begins when its job does. Other machines see its environment, but for what the modules
    of a cluster leave there: functions of bash."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MY_LR", "it's 3")
    monkeypatch.setenv("BASH_FUNC_module%%", "() { echo; }")
    file = place / "queue"
    file.write_text(
        '#!/bin/sh\nsleep 4\nexec env -i PATH=/usr/bin:/bin HOME=$HOME "$@" 2>$HOME/errors\n'
    )
    file.chmod(0o755)
    text = "import os\nassert os.environ['MY_LR'] == \"it's 3\"\nprint('step:1/1 val_loss:3.1 ')"
    (place / "theirs/train.py").write_text(text)
    settings = Settings(command="python train.py {seed}", launcher=str(file), root=Path.cwd())
    settings.run_timeout = 3.9 / 60
    assert make_runs(settings, range(1))[0].made == 1
    assert (place / "errors").read_text() == ""
