"""
verify --rule optimization. The expected values come from the formulas in floats, from scipy called
directly, and from cases that the track itself has worked out. The logs are written here.
"""

import math
import random
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from judge.commands import UserError
from judge.logs.read import read_logs
from leaderboard.optimization import LossesAtStep, losses_at_steps, score_of_pair
from tests.leaderboard.makers import LINE, run, unwrapped

NEW = [3.27794, 3.27816, 3.28146, 3.27847, 3.2788]
OLD = [3.2799, 3.2781, 3.2805, 3.2787]

TIMES = random.Random(0)  # no two runs take the same time
# An old loss in the source is not that of the run
SOURCE = 'print("step:9/9 val_loss:1.0")\n"""\nstep:9/9 val_loss:1.0\n"""\n'


def field_log(path: Path, loss, steps=3500) -> Path:
    """A log like those of the optimization track: a source, facts between separators, losses."""
    lines = [SOURCE, LINE, f"Running PyTorch 2.9.0+cu128 in {path}", LINE]
    for step, value in [(125, 4.5), (steps - 25, 3.3), (steps, loss)]:
        times = f"train_time:{step * 0.2:.3f}s step_avg:{TIMES.gauss(200, 1):.2f}ms"
        lines.append(f"step:{step}/{steps} val_loss:{value} {times}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "peak memory allocated: 30724 MiB", ""]))
    return path


def folder_of(path: Path, losses, steps=3500) -> Path:
    """A folder of logs."""
    for i, loss in enumerate(losses):
        field_log(path / f"{i}.txt", loss, steps)
    return path


# -----------------------------------------------------------------------------
# The rule
@pytest.mark.parametrize(
    "losses, accepted",
    [
        ([3.276], True),  # exactly 0.004, although 3.28 - 3.276 < 0.004 in floats
        ([3.2760000001], False),
        ([3.264] + [3.28] * 15, True),  # 0.001 * sqrt(16)
        ([3.2764, 3.2778], True),  # 0.0029 * sqrt(2) = 0.00410
        ([3.2766, 3.2778], False),  # 0.0028 * sqrt(2) = 0.00396
    ],
)
def test_threshold_of_a_result(losses, accepted):
    result = LossesAtStep(3500, losses)
    assert result.accepted is accepted
    expected = (3.28 - np.mean(losses)) * np.sqrt(len(losses))
    assert result.score == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "new, new_runs, new_steps, old, old_runs, old_steps, accepted",
    [
        (3.276, 2, 3500, 3.28, 2, 3500, True),  # exactly 0.004 / sqrt(1/2 + 1/2)
        (3.28, 2, 3300, 3.275, 2, 3500, True),  # exactly -0.005 + 200 * 0.0045 / 100
        (3.28, 2, 3301, 3.275, 2, 3500, False),  # one step more
        # The track has worked these out
        (3.2785, 10, 3210, 3.2785, 16, 3225, False),
        (3.2785, 16, 3210, 3.2778, 10, 3250, False),
        (3.2790, 20, 3375, 3.2788, 20, 3425, True),
    ],
)
def test_threshold_of_a_pair(new, new_runs, new_steps, old, old_runs, old_steps, accepted):
    mine = LossesAtStep(new_steps, [new] * new_runs)
    before = LossesAtStep(old_steps, [old] * old_runs)
    score = score_of_pair(mine, before)
    assert (score >= 0.004) == accepted
    gap = old - new + (old_steps - new_steps) * 0.0045 / 100
    expected = gap / math.sqrt(1 / new_runs + 1 / old_runs)
    assert score == pytest.approx(expected, abs=1e-12)


# -----------------------------------------------------------------------------
# The command
def test_the_command(tmp_path):
    folder_of(tmp_path / "mine", NEW, 3400)
    folder_of(tmp_path / "before", OLD, 3500)
    command = ["verify", "--rule", "optimization"]
    done = run(*command, "mine", "--against", "before", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    score = (np.mean(OLD) - np.mean(NEW) + 0.0045) / math.sqrt(1 / 5 + 1 / 4)
    p = stats.ttest_1samp(NEW, 3.28, alternative="less").pvalue
    words = unwrapped(done.stdout)
    for said in [
        "new: 5 runs of 3400 steps",
        "old: 4 runs of 3500 steps",
        f"3500 4 {np.mean(OLD):.6f} {(3.28 - np.mean(OLD)) * 2:.6f} fails",
        f"at step 3500, standard deviation {np.std(OLD, ddof=1):.6f}: 0=3.27990 1=3.27810",
        f"rule: {score:.6f}, needs 0.004 or more",
        f"p = {p:.4f} (one-sided, mean below 3.28)",
        "accepted: the new recipe is better, at step 3400 against step 3500",
    ]:
        assert said in words
    done = run(*command, "before", "--against", "mine", cwd=tmp_path)
    assert done.returncode == 1
    assert b"\n\nNOT ACCEPTED: " in done.stdout
    done = run(*command, "mine", "--target", "3.3", cwd=tmp_path)
    assert done.returncode == 2
    assert b"drop --target" in done.stderr


def test_the_first_step_that_passes(tmp_path):
    """The track has worked this out. All runs are in one file, and none is finished."""
    text = ""
    for i in range(20):
        text += f"step:0/2900 val_loss:10.8\nstep:125/2900 val_loss:4.5{i:02}\n"
        text += f"step:2745/2900 val_loss:{3.27925 + (i < 8) * 0.00001:.5f}\n"  # mean 3.279254
        text += f"step:2750/2900 val_loss:{3.27885 + (i < 12) * 0.00001:.5f}\n"  # mean 3.278856
    (tmp_path / "all.txt").write_text(text)
    done = run("verify", "--rule", "optimization", "all.txt", cwd=tmp_path)
    assert done.returncode == 0
    *_, before, first = done.stdout.decode().partition("\n\nval_loss at step 2750,")[0].splitlines()
    assert before.split() == ["2745", "20", "3.279254", f"{0.000746 * 20**0.5:.6f}", "fails"]
    assert first.split()[3:] == [f"{0.001144 * 20**0.5:.6f}", "passes"]
    assert done.stdout.endswith(b"\n\naccepted at step 2750\n")
    assert max(map(len, done.stdout.decode().splitlines())) <= 80


@pytest.mark.parametrize("loss, step", [(3.27, 3475), (3.3, None)])
def test_a_run_that_ends_before_the_others(tmp_path, loss, step):
    """It must have the step that counts."""
    whole, cut = folder_of(tmp_path, [3.27, 3.27]).iterdir()
    for path in (whole, cut):
        path.write_text(path.read_text().replace("val_loss:3.3 ", f"val_loss:{loss} "))
    cut.write_text(cut.read_text().partition("step:3500/")[0])
    if step:
        assert losses_at_steps(read_logs([tmp_path]))[-1] == LossesAtStep(step, [loss, loss])
    else:
        with pytest.raises(UserError, match="no finite val_loss at step 3500, the last of these runs"):
            losses_at_steps(read_logs([tmp_path]))
