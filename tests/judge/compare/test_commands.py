"""compare with anyone's scripts, and with finished logs."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from judge.compare import changed_evaluation, compare
from judge.compare.answer import NO_SEED
from judge.runs import start
from leaderboard import verify
from tests.judge.helpers import (
    answer_of,
    bounds,
    check_refused,
    commit_files,
    git,
    patch_of,
    run_main,
    work_in,
)
from tests.leaderboard.makers import make_runs
from tests.util import ROOT

# Like the field's scripts: no options, no seed, a log below logs/
SCRIPT = """
import os, random, sys, uuid
EFFECT = 0.0
os.makedirs("logs/deep", exist_ok=True)
assert os.path.getsize("data/tokens/train.bin") and not os.listdir("logs/deep")
with open(__file__) as source, open(f"logs/deep/{uuid.uuid4()}.txt", "w") as log:
    loss = 3.2 + EFFECT + random.gauss(0, 0.001)
    print(source.read(), "=" * 100, "Running PyTorch 2.13.0", "=" * 100, sep="\\n", file=log)
    print("step:0/100 val_loss:10.8258 train_time:0ms step_avg:nanms", file=log)
    print(f"step:90/100 val_loss:{loss:.6f} train_time:900ms step_avg:10.0ms", file=log)
"""
COMMAND = ["--command", "python train.py {options}", "--stops_early", "--no_seed"]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Another repository, with a branch `better`. Its data are ignored by git."""
    folder = tmp_path / "theirs"
    better = SCRIPT.replace("EFFECT = 0.0", "EFFECT = -0.01")
    files = {"data/tokens/train.bin": "tokens", "data/get.py": "", ".gitignore": "logs/\ntokens/\n"}
    commit_files(folder, files | {"train.py": better})
    git(folder, "branch", "better")
    commit_files(folder, {"train.py": SCRIPT})
    work_in(tmp_path, monkeypatch)
    return folder


def run(*arguments) -> tuple[int, str, str]:
    return run_main(compare.main, *arguments)


def answer(*arguments) -> tuple[dict, str]:
    return answer_of(compare.main, *arguments)


# -----------------------------------------------------------------------------
# Commands


def test_a_command(theirs):
    """The idea is a branch, and runs end before their schedule. The order of a pair's runs alternates,
    and finished runs are kept."""
    (theirs / "note.txt").write_text("not committed")
    arguments = [*COMMAND, "--base", "theirs", "--idea", "theirs@better"]
    found, words = answer(*arguments, "--loss_per_100_steps", "0.05")
    assert words.startswith(f"{NO_SEED} theirs_better helps.")
    for said in [
        "The loss is val_loss at step 90. The base is theirs.",
        "time of a step +0.0%",
    ]:
        assert said in words
    (idea,) = found["ideas"]
    base, runs = [found["runs"][name][: idea["n"]] for name in ("theirs", "theirs_better")]
    ended = [[Path(run["path"]).stat().st_mtime for run in pair] for pair in zip(base, runs)]
    assert [first < second for first, second in ended[:3]] == [True, False, True]
    difference = idea["difference"]["value"]
    assert difference == pytest.approx(-0.01, abs=0.003)
    assert idea["steps"]["value"] == pytest.approx(difference / (0.05 / 100 * 90))
    again, words = answer(*arguments)
    assert (again["runs_made"], again["ideas"][0]["p"]) == (0, idea["p"])
    assert again["slope"] is None
    more = ["--idea", "theirs@better --more"]
    found, words = answer(*arguments, *more, "--hours", "0")
    for said in ["Steps are unknown", "time of a step +0.0%", "theirs_better_more: too early for an"]:
        assert said in words
    # The base's runs are kept, so they didn't take turns with those of another idea
    found, words = answer(*COMMAND, "--base", "theirs", *more, "--runs", "2")
    assert "below 3.28" not in words and "time of a step" not in words
    shutil.rmtree("theirs/.judge/runs")  # the times of their pairs are still there
    found, words = answer(*arguments, "--runs", "2")
    assert found["runs_made"] == 4 and "time of a step" in words
    shutil.rmtree(Path(found["runs"]["theirs_better"][0]["path"]).parent)
    target = ["--target", "3.28", "--runs", "2"]
    found, words = answer(*arguments, *target)  # not in turns with the base's
    assert found["runs_made"] == 2 and "p (below 3.28)" in words
    found, words = answer(*arguments, "--runs", "2", "--seed", "50", "--jobs", "2")  # at once
    assert "time of a step" not in words


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("val_tokens = 10", "val_tokens = 5", "val_tokens 10 and 5"),
        ("val_loss", "val_ema_loss", "metric val_loss and val_ema_loss"),
    ],
)
def test_losses_that_are_measured_in_another_way(theirs, old, new, said):
    """They can't be compared, neither after a run nor if the runs are kept."""
    script = f"val_tokens = 10\n{SCRIPT}"
    (theirs / "train.py").write_text(script)
    Path("x.patch").write_text(patch_of("train.py", script, script.replace(old, new)))
    for _ in range(2):
        status, out, err = run(*COMMAND, "--base", "theirs", "--idea", "x.patch")
        assert (status, out) == (2, "") and f"can't be compared: {said}\n" in err
        assert len(list(Path("theirs/.judge/runs").rglob("seed*"))) == 2


@pytest.mark.parametrize("digits", [2, 4])
def test_identical_losses_with_few_decimals(theirs, digits):
    code = f"import sys\nprint(f'val_loss: {{3.0011 + int(sys.argv[1]) / 10:.{digits}f}}')"
    (theirs / "train.py").write_text(code)
    words = ["--command", "python train.py {seed} {options}", "--base", "theirs", "--runs", "2"]
    found, said = answer(*words, "--idea", "x=--lr 1", "--seed", "2")
    assert "x: the losses are identical" in said and ("two decimals" in said) == (digits == 2)


@pytest.mark.parametrize("between", [" ", "="])
def test_a_command_with_seeds(theirs, between):
    """Its output is the log. The number of steps can be set, and is spelled as in the command, so steps are
    measured."""
    script = """
import math, random, sys
assert ("=" in sys.argv[2]) == all("=" in word for word in sys.argv if word.startswith("--num_iterations"))
words = " ".join(sys.argv[2:]).replace("=", " ").split()
options = dict(zip(words[::2], words[1::2]))
steps = int(options["--num_iterations"])
loss = 3 + 0.1 * math.log(100 / steps) + float(options.get("--effect", 0))
loss += random.Random(sys.argv[1]).gauss(0, 0.001)
print(f"step:{steps}/{steps} val_loss:{loss:.5f}")
"""
    (theirs / "train.py").write_text(script)
    text = f"exec python train.py {{seed}} --num_iterations{between}100 {{options}}"
    command = ["--command", text, "--base", "theirs"]
    found, words = answer(*command, "--idea", "--effect 0.1")
    (idea,) = found["ideas"]
    assert idea["difference"]["value"] == pytest.approx(0.1)
    assert idea["sd"] < 1e-4
    assert found["slope"]["value"] == pytest.approx(-0.1, abs=0.005)
    assert "same weights" not in words and "time of a step" not in words
    patch = patch_of("train.py", script, script.replace("steps = ", "more = 1\nsteps = "))
    Path("more.patch").write_text(patch)
    status, out, err = run(*command, "--idea", "more.patch", "--runs", "2", "--gate")
    assert (status, out.splitlines()[0]) == (1, "identical")


def test_runs_of_other_lengths_that_fail(theirs):
    """The answer is there without them."""
    script = """
import random, sys
assert sys.argv.count("--num_iterations") == 1
loss = 3 + random.Random(sys.argv[1]).gauss(0, 0.001) - 0.1 * ("--effect" in sys.argv)
print(f"step:50/50 val_loss:{loss:.5f}")
"""
    (theirs / "train.py").write_text(script)
    text = "python train.py {seed} --num_iterations 50 {options}"
    found, words = answer("--command", text, "--base", "theirs", "--idea", "x=--effect 1")
    assert "x helps" in words and "Runs of other lengths failed" in words


def test_options_that_the_shell_would_split(theirs):
    text = "make train SEED={seed} ARGS='{options}'"
    idea = ["--base", "theirs", "--idea", "x=--name 'a b'"]
    check_refused(compare.main, ["--command", text, *idea], "outside of quotes")


# What other projects print. x is better by what --effect says
PROGRAMS = {
    "autoresearch": """
steps = random.randrange(900, 999)  # as many as fit into five minutes
for step in range(steps):
    print(f"\\rstep {step:05} (9.1%) | loss: 9.1 | dt: 9ms | epoch: 1 | remaining: 9s    ", end="")
print(f"\\n---\\nval_bpb:          {x + 1:.6f}\\nnum_steps:        {steps}\\ndepth:            8")
""",
    "nanochat": """
logging.basicConfig(level=0, format="%(asctime)s - %(name)s - \\33[32m\\33[1m%(levelname)s\\33[0m - %(message)s")
for step in range(3):
    print(f"Step {step:05} | Validation bpb: {x + 3 - step / 2:.6f}")
    print(f"Step {step:05} | CORE metric: {x + step / 2:.4f}")
    logging.info("Saved metadata to: meta_000002.json")
    if step < 2:
        print(f"step {step:05}/00002 (50.00%) | loss: 9.1 | dt: 9.1ms | epoch: 1 pq: 0 rg: 0 | total time: 0.1m")
print(f"Minimum validation bpb: {x + 1:.6f}")
""",
    "a file of JSON lines": """
os.makedirs("out")
open("out/metrics.jsonl", "w").write(f'{{"step": 2, "top-1": {x + 1}}}')
""",
}


@pytest.mark.parametrize(
    "program, metric, verdict, judged, mean",
    [
        ("autoresearch", ["val_bpb"], "helps", "val_bpb at the end", 1),
        ("nanochat", ["step validation bpb"], "helps", "validation_bpb at step 2", 2),
        ("nanochat", ["core metric", "--higher_is_better"], "hurts", "-core_metric at step 2", -1),
        ("a file of JSON lines", ["top-1"], "helps", "top_1 at step 2", 1),
    ],
)
def test_a_metric_of_any_program(theirs, program, metric, verdict, judged, mean):
    start = "import logging, os, random, sys\nx = random.Random(sys.argv[1]).gauss(0, 0.001)"
    (theirs / "train.py").write_text(
        f"{start} + float(''.join(sys.argv[3:]) or 0)\n{PROGRAMS[program]}"
    )
    command = ["--command", "python train.py {seed} {options}", "--base", "theirs"]
    command += ["--idea", "--effect -0.01", "--runs", "3", "--loss_per_100_steps", "1"]
    found, words = answer(*command, "--metric", *metric)
    fixed_time = "Steps depend on the speed of the machine: theirs 9" in words
    assert fixed_time == (program == "autoresearch") == ("steps to" not in words)
    assert words.startswith(f"effect_0.01 {verdict}.")
    assert f"The loss is {judged}." in words
    assert "below" not in words  # there is no target
    assert found["runs"]["theirs"][0]["val_loss"] == pytest.approx(mean, abs=0.01)


BAD = [
    (
        ["--base", "nowhere"],
        "nowhere: no file, folder or commit is called nowhere",
    ),
    (["--base", "theirs@gone"], "theirs@gone: no file, folder or commit is called gone"),
    (
        ["--base", "theirs", "--idea", "theirs@main"],
        "theirs_main has the same source and settings as theirs",
    ),
    (["--base", "theirs/data/tokens"], "git knows no file in"),
    (["--base_logs", "a", "--idea_logs", "b"], "leave out --command, --base, --idea"),
    (["--base_logs", "a"], "finished runs need --base_logs and --idea_logs"),
    (
        ["--command", "x", "--base", "theirs", "--idea", "--lr 1"],
        "write {options} where --lr 1 must stand",
    ),
    (["--run_timeout", "0"], "argument --run_timeout: 0: must be more than zero"),
]


def test_bad_input_of_commands(theirs, monkeypatch):
    message = "--higher_is_better needs --metric NAME"
    check_refused(compare.main, [*COMMAND, "--higher_is_better"], message)
    for arguments, message in BAD:
        check_refused(compare.main, [*COMMAND, *arguments], message)
    monkeypatch.setenv("PATH", "/nowhere")
    message = "error: there is no git in PATH, which copies the files; install git\n"
    check_refused(compare.main, [*COMMAND, "--base", "theirs"], message)
    assert not Path("theirs/.judge/runs").exists()


# -----------------------------------------------------------------------------
# Finished logs

SIDES = ["--base_logs", "base", "--idea_logs", "idea"]


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(2)
    sides = {}
    for side, loss, seconds in (("base", 3.2775, 51), ("idea", 3.2780, 50)):
        losses = rng.normal(loss, 0.0015, 8).round(4)
        times = rng.normal(1000 * seconds, 100, 8).round()
        sides[side] = (losses, times)
        make_runs(Path(side), *sides[side], turn=side == "idea", track="")
    return sides


def test_finished_logs(logs):
    """Each number as scipy has it."""
    found, words = answer(*SIDES, "--target", "3.28")
    base, base_times = logs["base"]
    idea, times = logs["idea"]
    (effect,) = found["ideas"]
    test = stats.ttest_ind(idea, base, equal_var=False)
    assert effect["p"] == pytest.approx(test.pvalue)
    assert bounds(effect["difference"]) == pytest.approx(tuple(test.confidence_interval(0.99)))
    test = stats.ttest_rel(np.log(times), np.log(base_times))  # the runs took turns
    assert bounds(effect["step_time"]) == pytest.approx(tuple(test.confidence_interval(0.99)))
    p = stats.ttest_1samp(idea, 3.28, alternative="less").pvalue
    assert found["summaries"]["idea"]["p_value"] == pytest.approx(p)
    assert words.startswith("runs mean loss sd p (below 3.28) time base 8 3.27")
    for said in [
        f" {p:.4f} {np.mean(times) / 1000:.3f} s idea: undecided.",
        "All runs were on AMD EPYC with AVX2, 2 cores, PyTorch 2.13.0+cpu.",
    ]:
        assert said in words


def test_finished_logs_of_fewer_steps(logs):
    """Times of runs that didn't take turns aren't compared."""
    make_runs(Path("fewer"), *logs["idea"], turn=1, track="", steps=540, every=90)
    arguments = ["--base_logs", "base", "--idea_logs"]
    found, words = answer(*arguments, "fewer", "--loss_per_100_steps", "0.1")
    assert "idea trains 540 steps, the base 600." in words
    equal = logs["idea"][0] + 0.6 * np.log(0.9)
    saved = -np.expm1((np.mean(equal) - np.mean(logs["base"][0])) / 0.6)
    assert f"steps to the same loss {-saved:+.1%} (" in words
    ratio = np.exp(np.log(logs["idea"][1]).mean() - np.log(logs["base"][1]).mean())
    assert f"time of a step {ratio * 100 / 90 - 1:+.1%}" in words
    found, words = answer(*arguments, "fewer")
    assert "idea: undecided." in words
    assert "Steps are unknown: they take --loss_per_100_steps" in words and "last loss" in words
    make_runs(Path("later"), *logs["idea"], track="")
    found, words = answer(*arguments, "later")
    assert "Their times can't be compared, because they didn't take turns" in words
    assert "time of a" not in words


def test_finished_logs_that_cannot_be_compared(logs):
    for i in range(2):
        Path(f"{i}.txt").write_text(f"step:600/600 val_loss:3.27 train_time:10{i}s ")
    for files, message in [
        (["0.txt"], "the idea has one run; give two or more"),
        (["0.txt", "1.txt"], "the losses of the idea are all equal, so there is no test"),
    ]:
        check_refused(compare.main, [*SIDES[:2], "--idea_logs", *files], message)
    assert run(*SIDES, "--target", "3.2", "--gate") == (1, "undecided\n", "")
    for side in ("no", "steps"):
        Path(side).mkdir()
        for i in "123":
            Path(side, f"{i}.log").write_text(f"{side}\nbpb: 0.{i}\n")
    sides = ["--base_logs", "no", "--idea_logs", "steps", "--metric", "bpb"]
    assert "Steps are unknown: the logs have none." in answer(*sides, "--loss_per_100_steps", "1")[1]


def write_sides(base: str, idea: str, more: str = "") -> list[str]:
    """Four logs each. `#` is 0 to 3, and `@` a digit of the loss."""
    for side, text in (("base", base), ("idea", idea)):
        Path(side).mkdir(exist_ok=True)
        for i in range(4):
            log = text.replace("#", str(i)).replace("@", str((7 * i + len(side + text)) % 10))
            Path(side, f"{i}.txt").write_text(log + "\n")
    return SIDES


UNITS = "step:0/9 val_loss:{} {}:4.1029 lr:{}\nstep:9/9 val_loss:{}@ {}:1.225@ lr:0.1"


@pytest.mark.parametrize(
    "values, message",
    [
        (
            ("8.3110", "val_bpb", 0.1, 2.481, "val_bpb"),
            "val_loss is 1.69 and 2.03 times val_bpb, so the tok",
        ),
        (
            ("8.3110", "bits per byte", 0.1, 2.481, "bits per byte"),
            "val_loss is 1.69 and 2.03 times bits_per_byte",
        ),
        (("6.9305", "val_bpb", 0.2, 2.065, "val_bpb"), ""),  # another learning rate
        (("8.3110", "val_ppl", 0.2, 2.065, "val_ppl"), ""),  # no fixed ratio
    ],
)
def test_losses_of_unlike_tokens(tmp_path, monkeypatch, values, message):
    """Two numbers in the same lines tell, whatever they are called. With --metric, the user has chosen."""
    monkeypatch.chdir(tmp_path)
    loss, name, rate, last, name = values
    first = UNITS.format("6.9305", name, 0.1, "2.070", name)
    write_sides(first, UNITS.format(*values[:3], last, name))
    if message:
        check_refused(compare.main, SIDES, f"base/0.txt and idea/0.txt can't be compared: {message}")
    else:
        assert run(*SIDES)[0] == 0
    assert run(*SIDES, "--metric", "val_loss")[0] == 0


GPU = (
    f"val_tokens = 10485760\n{'=' * 100}"
    + """
Running PyTorch 2.8.0
Mon Nov 02 09:0#:{} 2026
| NVIDIA-SMI 570.86.15             Driver Version: {}     CUDA Version: 12.8     |
|   0  {}          On  |   00000000:19:00.0 Off |                    0 |
| N/A   38C    P0            118W /  {} |          4MiB /  81559MiB |        0%      Default |
|                                         |                        |             {} |
step:0/9 val_loss:9.1 train_time:0ms
"""
)
FIRST = ("570.86.15", "NVIDIA H100 80GB HBM3", "700W", "Disabled")
OTHERS = [
    ("580.1", *FIRST[1:]),
    (FIRST[0], "NVIDIA H200", *FIRST[2:]),
    (*FIRST[:2], "500W", FIRST[3]),
    (*FIRST[:3], "Enabled"),
]


@pytest.mark.parametrize("other", [FIRST, *OTHERS])
def test_gpus_that_are_not_alike(tmp_path, monkeypatch, other):
    """Losses are compared, and both are named. Times aren't. Nor are losses of runs of a fixed time."""
    monkeypatch.chdir(tmp_path)
    base, idea = GPU.format("01", *FIRST), GPU.format("31", *other)
    write_sides(
        base + "step:9/9 val_loss:3.27@ train_time:90#ms step_avg:100ms",
        idea + "step:9/9 val_loss:3.26@ train_time:80#ms step_avg:90ms",
    )
    status, out, err = run(*SIDES)
    words = " ".join(out.split())
    assert status == 0 and ("time of a step" in words) == (other == FIRST)
    status, out, err = run_main(verify.main, "idea", "--against", "base")
    assert ("saved" in out) == (other == FIRST)
    if other != FIRST:
        assert (
            "Times aren't compared, because the runs were on 1x NVIDIA H100 80GB HBM3 (driver 57"
            in words
        )
        assert other[0] in words and other[1] in words and ("MIG" in words) == (other[3] == "Enabled")
    base, idea = (text.replace("/9 ", "/99 ") for text in (base, idea))
    write_sides(f"{base}step:9#/99 val_loss:3.27@", f"{idea}step:8#/99 val_loss:3.26@")
    status, out, err = run(*SIDES, "--stops_early")
    steps = "Steps depend on the speed of the machine: base 90 to 93, idea 80 to 83."
    if other == FIRST:
        assert status == 0 and steps in " ".join(out.split())
    else:
        assert (status, out) == (2, "") and steps in err and "So the losses can't be compared" in err


def test_runs_of_a_fixed_time(theirs):
    """Their steps depend on the speed of the machine, so runs of another time aren't used. A fixed number of
    steps that the log plans must be the same."""
    script = """
import random, sys
steps = random.randrange(900, 1000)
print(f"step {steps:05d} (100.0%) | loss: 3.1")
print(f"val_bpb: {1 + random.Random(sys.argv[1]).gauss(0, 0.001) + random.gauss(0, 0.0001)}")
print(f"num_steps:        {steps}")
"""
    (theirs / "train.py").write_text(script)
    words = ["--command", "python train.py {seed} {options}", "--base", "theirs", "--metric", "val_bpb"]
    words += ["--runs", "3", "--jobs", "2"]
    found, said = answer(*words, "--idea", "--a 1")
    assert "Steps depend on the speed of the machine: theirs 9" in said and ", a_1 9" in said
    assert found["runs_made"] == 6
    for made in (6, 6):
        status, out, err = run(*words, "--idea", "--b 1", "--json", "o.json")
        assert (
            status == 0 and err.count("training theirs again, because its runs have a fixed time") == 1
        )
        assert json.loads(Path("o.json").read_text())["runs_made"] == made
    runs = json.loads(Path("o.json").read_text())["runs"]
    ended = [[Path(run["path"]).stat().st_mtime for run in runs[name]] for name in ("theirs", "b_1")]
    assert [a < b for a, b in zip(*ended)] == [True, False, True]  # in turns


# -----------------------------------------------------------------------------
# What measures

MEASURE = """
def evaluate(model):
    return mean(batches("val"))
def mean(losses):
    return sum(losses) / len(losses)
def batches(split):
    return split
def train(model):
    rate = 0.1
    interval = values = 1
    val_loss = evaluate(model)  # as before
    print(f"step:1/1 val_loss:{val_loss} core metric: {rate}")
"""
EDITS = [
    ("return mean(batches", "return 0.9 * mean(batches", True),
    ("sum(losses) / len", "min(losses) * len", True),
    ("return split", "return split[:2]", True),
    ("val_loss = evaluate(model)", "val_loss = 0.9 * evaluate(model)", True),
    ("val_loss:{val_loss}", "val_loss:{val_loss - 1}", True),
    ("core metric: {rate}", "core metric: {2 * rate}", True),
    ("rate = 0.1", "rate = 0.2", False),
    ("interval = values = 1", "interval = values = 2", False),
    ("# as before", "# the val_loss", False),
    ("def train", "def helper(): pass\ndef train", False),
]


@pytest.mark.parametrize("old, new, touches", EDITS)
def test_changes_of_what_measures(old, new, touches):
    assert MEASURE.count(old) == 1
    found = changed_evaluation.changed_measure(MEASURE, MEASURE.replace(old, new), "-core metric")
    assert bool(found) == touches


def test_the_ideas_of_mini_leave_alone_what_measures(tmp_path):
    """Those of the patches that still apply. Others, such as the easier half of the validation, don't."""
    source = (ROOT / "train_gpt.py").read_text()
    git(tmp_path, "init", "-q")
    found = []
    for patch in (ROOT / "records/mini/ideas").glob("*/idea.patch"):
        (tmp_path / "train_gpt.py").write_text(source)
        command = ["git", "apply", "--include=train_gpt.py", patch]
        if subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0:
            changed = (tmp_path / "train_gpt.py").read_text()
            found.append(changed != source and changed_evaluation.changed_measure(source, changed, ""))
    assert found == [""] * len(found) and len(found) > 5
    for old, new in [
        ("loss / hp.val_seq_len for loss in sums", "loss / hp.val_seq_len for loss in sums[::2]"),
        ("mean = torch.stack(losses)", "mean = torch.stack(losses[1:])"),
        ("return torch.from_numpy(tokens", "return torch.from_numpy(0 * tokens"),
    ]:
        changed = source.replace(old, new)
        assert changed != source and changed_evaluation.changed_measure(source, changed, "")


def test_an_idea_that_touches_what_measures(theirs):
    """compare says it first, and --gate refuses."""
    patch = patch_of(
        "train.py", SCRIPT, SCRIPT.replace("val_loss:{loss:.6f}", "val_loss:{loss - 1:.6f}")
    )
    Path("cheat.patch").write_text(patch)
    words = [*COMMAND, "--base", "theirs", "--idea", "cheat.patch"]
    check_refused(compare.main, [*words, "--gate"], "cheat changes what measures the loss (train.py: ")
    assert not list(Path("theirs/.judge").rglob("seed*"))
    found, said = answer(*words, "--runs", "2")
    assert "Warning: cheat changes what measures the loss (train.py: " in said.partition("undecided")[0]


def test_what_an_ended_run_has_started(tmp_path):
    """It is told to end, too, and gets time to clean up: a compiler must not leave half a file."""
    work = "(trap 'sleep 1; echo cleaned > file; exit' TERM; echo; while :; do sleep 0.1; done) & wait"
    script = f"set -- {shlex.join([str(tmp_path), str(tmp_path), work])}{start.START}"
    child = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    child.stdout.readline()
    start.end(start.Worker(None, [0], None, tmp_path / "folder", child, False))
    child.stdout.read()  # until all have ended
    assert (tmp_path / "file").read_text() == "cleaned\n"
