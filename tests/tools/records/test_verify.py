"""
Tests of verify. They compare statistics with closed forms, with scipy, and with integrals of the densities.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from scipy import integrate, stats

import train_gpt
from tools.logs import parse_log, read_logs
from tools.records import rules, verify
from tools.records.compiler import compiler_settings
from tests.tools.records.makers import (
    FASTER,
    FIELD,
    MAINS,
    RECORDS,
    SMI,
    SOURCE,
    compiler_line,
    has_reason,
    judged,
    judged_against,
    make_runs,
    our_log,
    png_size,
    run,
    unwrapped,
)


def test_scripts_run_from_anywhere(tmp_path):
    make_runs(tmp_path / "runs")
    log = next((tmp_path / "runs").glob("*.txt"))
    for command, status in [
        (["verify", "runs"], 0),
        (["replay", log, "-o", "old"], 0),
        (["submit"], 2),
        (["plot", "runs", "-o", "x.png"], 0),
        (["verify", "x.png"], 2),
    ]:
        full = [sys.executable, "-P", "-m", f"tools.records.{command[0]}", *command[1:]]
        done = subprocess.run(full, cwd=tmp_path, capture_output=True)
        assert done.returncode == status, done.stderr.decode()
        assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert (tmp_path / "old/train_gpt.py").read_bytes() == SOURCE.encode()
    png_size(tmp_path / "x.png")


def interrupted(argv):
    raise KeyboardInterrupt


def test_ctrl_c_is_one_line(monkeypatch):
    monkeypatch.setitem(MAINS, "plot", interrupted)
    try:
        done = run("plot")
    except KeyboardInterrupt:  # it would end pytest
        pytest.fail("a user would see a traceback")
    assert done.returncode == 130
    assert done.stdout == b""
    assert done.stderr == b"interrupted\n"


def t_cdf(t: float, df: float) -> float:
    """Student's distribution function.

    It uses the closed forms for 1 and 2 degrees of freedom, and otherwise integrates the density.
    """
    if df == 1:
        return 0.5 + math.atan(t) / math.pi
    if df == 2:
        return 0.5 + t / (2 * math.sqrt(2 + t * t))
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)

    def density(x):
        return scale * (1 + x * x / df) ** (-(df + 1) / 2)

    area = integrate.quad(density, 0, abs(t), epsabs=1e-13)[0]
    return 0.5 + math.copysign(area, t)


def test_p_value_by_hand():
    # Three runs have two degrees of freedom. The mean is 3.277 and s is 0.001, so
    # t = (3.277 - 3.28) / (0.001 / sqrt(3)) = -sqrt(27).
    by_hand = 0.5 - 27**0.5 / (2 * 29**0.5)
    assert rules.p_below([3.276, 3.277, 3.278], 3.28) == pytest.approx(by_hand, rel=1e-6)
    # Two runs a and b have one degree of freedom, and t = (mean - target) / (|a - b| / 2).
    # Here it is -1, and atan(-1) = -pi / 4.
    assert rules.p_below([3.27, 3.28], 3.28) == pytest.approx(0.25, rel=1e-6)
    assert rules.p_below([3.28, 3.29], 3.28) == pytest.approx(0.75, rel=1e-6)
    assert rules.p_below([3.2], 3.28) is None
    assert rules.p_below([3.2, 3.2, 3.2], 3.28) is None


@pytest.mark.parametrize("n", [2, 3, 5, 10, 40])
def test_p_value_and_interval(tmp_path, n):
    rng = np.random.default_rng(n)
    losses = np.round(rng.normal(1.499, 0.003, n), 4)
    times = np.round(rng.normal(100_000, 300, n))
    ours = judged(make_runs(tmp_path / "runs", losses, times)).summary
    mean = sum(losses) / n
    std = (sum((losses - mean) ** 2) / (n - 1)) ** 0.5
    assert ours.n == n
    assert ours.loss_mean == pytest.approx(mean, abs=1e-12)
    assert ours.loss_std == pytest.approx(std, rel=1e-9)
    assert ours.p_value == pytest.approx(t_cdf((mean - 1.5) / (std / n**0.5), n - 1), rel=1e-6)
    low, high = ours.time_interval
    assert (low + high) / 2 == pytest.approx(ours.time_mean) == pytest.approx(times.mean() / 1000)
    half = (high - low) / 2 / (times.std(ddof=1) / 1000 / n**0.5)
    assert t_cdf(half, n - 1) - t_cdf(-half, n - 1) == pytest.approx(0.95, rel=1e-6)


@pytest.mark.parametrize("n, m", [(2, 2), (2, 7), (10, 10), (13, 4)])
def test_welch(tmp_path, n, m):
    rng = np.random.default_rng(n)
    ours = np.round(rng.normal(99_700, 200, n))
    prior = np.round(rng.normal(100_000, 400, m))
    if n == m == 2:  # equal spreads give two degrees of freedom
        ours = np.array([99_000, 99_200])
        prior = np.array([99_500, 99_700])
    a = make_runs(tmp_path / "a", [1.48] * n, ours)
    b = make_runs(tmp_path / "b", [1.48] * m, prior)
    c = judged_against(b, a).comparison
    va = ours.var(ddof=1) / n
    vb = prior.var(ddof=1) / m
    df = (va + vb) ** 2 / (va**2 / (n - 1) + vb**2 / (m - 1))  # Welch-Satterthwaite
    if n == m == 2:
        assert df == 2
    t = (ours.mean() - prior.mean()) / (va + vb) ** 0.5
    assert c.p_value == pytest.approx(t_cdf(t, df), rel=1e-5)
    assert c.saved == pytest.approx((prior.mean() - ours.mean()) / 1000)
    assert c.saved_fraction == pytest.approx(1 - ours.mean() / prior.mean())
    assert "Welch" in c.test


def test_one_run_against_several(tmp_path):
    prior = np.array([100_000, 100_300, 99_900, 100_200])
    b = read_logs([make_runs(tmp_path / "b", times=prior)])[0]
    one = our_log(tmp_path / "a.txt", time_ms=99_000)
    c = judged(one, prior=b, same_ml=True).comparison
    # The test assumes that the one run has the spread of the others
    t = (99_000 - prior.mean()) / (prior.std(ddof=1) * (1 + 1 / 4) ** 0.5)
    assert c.p_value == pytest.approx(t_cdf(t, 3), rel=1e-6)
    assert "Student" in c.test
    assert judged(one, prior=b[:1], same_ml=True).comparison.p_value is None


def test_a_valid_submission(tmp_path):
    make_runs(tmp_path / "runs")
    done = run("verify", "runs", cwd=tmp_path)
    text = done.stdout.decode()
    assert done.returncode == 0
    assert text.endswith("\nvalid\n")
    assert max(map(len, text.splitlines())) <= 80
    losses = [1.488, 1.491, 1.486, 1.489]
    data = json.loads(run("verify", "runs", "--json", cwd=tmp_path).stdout)
    assert data["valid"]
    assert data["target"] == 1.5
    assert len(data["logs"]) == 4
    assert data["reasons"] == []
    expected = stats.ttest_1samp(losses, 1.5, alternative="less").pvalue
    assert data["summary"]["p_value"] == pytest.approx(expected)
    assert run("verify", "runs", "--target", "1.48", cwd=tmp_path).returncode == 1
    assert run("verify", "runs", "--target", "nan", cwd=tmp_path).returncode == 2
    # If one of the given logs is missing, the result is not valid
    assert run("verify", "runs", "missing.txt", cwd=tmp_path).returncode == 2
    done = run("verify", "runs", "missing.txt", "--json", cwd=tmp_path)
    assert not json.loads(done.stdout)["valid"]


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(loss=1.52), "not below 1.5 at p < 0.01"),
        (dict(source=SOURCE + "#\n"), "2 different sources"),
        (
            dict(cpu="AMD EPYC, 4 cores"),
            "AMD EPYC with AVX2, 2 cores and AMD EPYC with AVX2, 4 cores",
        ),
        (
            dict(instruction_sets="avx2 avx512_bf16 avx512f"),
            "AMD EPYC with AVX2, 2 cores and AMD EPYC with AVX-512 and bf16, 2 cores",
        ),
        (dict(machine="a machine"), "unknown"),
        (dict(seed=1), "the same seed as"),
        (dict(head_lr=0.3), "hyperparameters: head_lr"),
        (dict(val_tokens=4096), "validated on 4,096 tokens instead of 327,680"),
        (dict(target_val_loss=1.6), "different targets: 1.5 and 1.6"),
        (dict(extra="resume: from step 200 resume_force"), "resumed by force"),
        (
            dict(extra="step:0/600 val_loss:9.0 train_time:0ms step_avg:0ms"),
            "several runs in one file",
        ),
        (dict(loss=float("nan")), "final val_loss nan"),
        (dict(time_ms=0), "no training time"),
    ],
)
def test_each_rule(tmp_path, change, reason):
    runs = make_runs(tmp_path / "runs")
    assert judged(runs).reasons == []
    our_log(tmp_path / "odd.txt", **dict(loss=1.487, seed=99) | change)
    reasons = judged(runs, tmp_path / "odd.txt").reasons
    assert any(reason in r for r in reasons), reasons
    done = run("verify", runs, tmp_path / "odd.txt")
    assert done.returncode == 1 and "\nNOT VALID\n- " in done.stdout.decode()


def test_mini_is_the_whole_model(tmp_path):
    kept = dict(
        track="mini",
        num_layers=4,
        max_ngram=1,
        num_value_embeds=2,
        max_window=256,
        muon_momentum_warmup=100,
        val_tokens=389_120,
        source=SOURCE.replace("327_680", "389_120"),
    )
    assert judged(make_runs(tmp_path / "good", **kept)).reasons == []
    assert judged(make_runs(tmp_path / "deeper", **kept | dict(num_layers=9))).reasons == []
    changes = [
        ("num_layers", 3),
        ("max_ngram", 2),
        ("num_value_embeds", 0),
        ("max_window", 128),
        ("muon_momentum_warmup", 0),
        ("num_layers", "many"),
        ("max_ngram", None),
    ]
    for i, (name, value) in enumerate(changes):
        (reason,) = judged(make_runs(tmp_path / str(i), **kept | {name: value})).reasons
        assert reason.startswith(f"all runs: {name} {value}, but the track mini "), reason
        free = make_runs(tmp_path / f"free{i}", **kept | {name: value, "track": "tiny"})
        assert judged(free).reasons == []  # other tracks have no such rule


DAMAGED_WINDOWS = [
    dict(windows=[]),
    dict(windows=7),
    dict(windows=None),
    dict(windows=[3, "7"]),
    dict(windows=[3, None]),
    dict(windows=[[3], [7]]),
    dict(window_block=None),
    dict(window_block="16"),
]


@pytest.mark.parametrize("track", ["tiny", "mini"])
def test_damaged_windows_are_one_line(tmp_path, track):
    """Logs of recipes/january2026.py have windows in blocks."""
    good = dict(track=track, windows=[3, 7, 11], window_block=16)
    log = parse_log(our_log(tmp_path / "good.txt", **good))
    assert "damaged" not in rules.out_of_bounds(log)
    for i, change in enumerate(DAMAGED_WINDOWS):
        runs = make_runs(tmp_path / str(i), **good | change)
        found = [reason for reason in judged(runs).reasons if "damaged" in reason]
        assert len(found) == 1
        done = run("verify", runs)
        assert done.returncode == 1
        assert done.stderr == b""
        assert done.stdout.decode().count("all runs: the hyperparameters are damaged: windows ") == 1
    path = our_log(tmp_path / "no block.txt", track=track, windows=[3])
    reason = rules.out_of_bounds(parse_log(path))
    assert reason == (
        "the hyperparameters are damaged: windows [3] with window_block None; make the run again"
    )


@pytest.mark.parametrize("track", ["mini", "fineweb"])
def test_a_track_has_its_own_data_and_target(tmp_path, track):
    hyperparameters = dataclasses.asdict(train_gpt.TRACKS[track])
    hyperparameters.pop("seed")
    target = hyperparameters["target_val_loss"]
    for name, value in rules.FIXED[track].items():
        assert hyperparameters[name] == value  # the table agrees with train_gpt.py
    losses = (target - 0.012, target - 0.010, target - 0.014)
    kept = hyperparameters | dict(source="val_tokens = 389_120\n10_485_760\n", losses=losses)
    assert judged(make_runs(tmp_path / "good", **kept)).reasons == []
    changes = dict(
        train_files="data/mine/mine_train_*.bin",
        val_files="data/shakespeare/shakespeare_train_*.bin",
        val_seq_len=2 * hyperparameters["val_seq_len"],
        target_val_loss=target + 0.1,
    )
    for name, value in changes.items():
        folder = make_runs(tmp_path / name, **kept | {name: value})
        wanted = hyperparameters[name]
        reason = f"all runs: {name} {value!r}, but the track {track} needs {wanted!r}"
        assert judged(folder).reasons == [reason]


def test_mini_validates_on_all_its_tokens(tmp_path):
    """Even if the source has another number, too."""
    runs = make_runs(tmp_path / "runs", track="mini", val_tokens=4096, source="val_tokens = 4096\n")
    assert has_reason("val_tokens 4096, but the track mini needs 389120", runs)


def test_other_rules(tmp_path):
    runs = make_runs(tmp_path / "runs")
    copy = tmp_path / "copy.txt"
    copy.write_bytes(next(runs.glob("*.txt")).read_bytes())
    assert has_reason("the same log as", runs, copy)
    assert has_reason("one complete run is not enough", copy)
    equal = make_runs(tmp_path / "equal", losses=[1.48] * 3)
    assert has_reason("same loss", equal)
    cut = tmp_path / "cut.txt"
    cut.write_bytes(copy.read_bytes()[:-300])
    assert has_reason("stopped at step", runs, cut) or has_reason("no final", runs, cut)
    # The track needs the official number of validation tokens, whatever the source says
    fineweb = make_runs(tmp_path / "fineweb", track="fineweb")
    assert has_reason("all runs: validated on 327,680", fineweb)
    field = tmp_path / "field.txt"
    text = FIELD["today's, lines in between, one step average"][0]
    field.write_text(text.replace("10485760", "int(n)"))
    assert has_reason("doesn't say how many tokens the validation has", field)


def test_output_is_at_most_80_columns_wide(tmp_path):
    """Also if it isn't written to a terminal. Only the command to copy is longer."""
    runs = make_runs(tmp_path / "runs")
    wrong = dict(track="mini", num_layers=3, max_ngram=2, instruction_sets="", every=300)
    mini = make_runs(tmp_path / "a_long_name", **wrong)
    foreign = tmp_path / "foreign.txt"
    foreign.write_text(FIELD["today's, lines in between, one step average"][0])
    for command in (
        ["verify", runs, mini, foreign, "--against", runs, "--same-ml"],
        ["verify", runs, foreign, "--against", foreign],
        ["submit", "--track", "tiny", "--name", "x", runs, mini, foreign],
    ):
        done = run(*command)
        assert done.returncode == 1, done.stderr.decode()
        for line in done.stdout.decode().splitlines():
            is_command = line.startswith("  ./run.sh replay ")
            assert is_command or len(line) <= 80, line
        assert f"to see the difference: ./run.sh replay {runs}" in unwrapped(done.stdout)
        assert re.search(r"\n  ./run.sh replay \S+ --diff \S+\n", done.stdout.decode())


def test_an_assumed_target_is_said(tmp_path):
    field = tmp_path / "field.txt"
    field.write_text(FIELD["today's, lines in between, one step average"][0])
    own = our_log(tmp_path / "own.txt")
    for paths, options, assumed in [
        ([field], [], True),
        ([field, own], [], True),
        ([own], [], False),
        ([field], ["--target", 2.92], False),
    ]:
        text = run("verify", *paths, *options).stdout.decode()
        line = "\ntarget    3.28 assumed; the logs name none, so give it with --target\n"
        assert (line in text) == assumed
        data = json.loads(run("verify", *paths, *options, "--json").stdout)
        assert data["target_assumed"] == assumed


def test_against_a_prior_record(tmp_path):
    prior = make_runs(tmp_path / "prior")
    faster = make_runs(tmp_path / "faster", times=FASTER, source=SOURCE + "#\n")
    done = run("verify", faster, "--against", prior)
    assert done.returncode == 0
    assert b"saved     9.950 s (9.95%)" in done.stdout
    assert run("verify", prior, "--against", faster).returncode == 1

    def only_reason(name, times, **kwargs):
        folder = make_runs(tmp_path / name, times=times, **kwargs)
        (reason,) = judged_against(prior, folder).reasons
        return reason

    fast = (9_000, 9_300, 9_100, 9_200)
    reasons = dict(
        slower=only_reason("slower", (101_000, 101_300, 102_000, 101_200)),
        noisy=only_reason("noisy", (80_000, 110_000, 95_000, 99_000)),
        elsewhere=only_reason("elsewhere", fast, cpu="Intel Xeon, 2 cores"),
        zen4=only_reason("zen4", fast, instruction_sets="avx2 avx512_bf16 avx512f"),
        track=only_reason("track", fast, track="other"),
    )
    assert "slower" in reasons["slower"]
    assert "at p < 0.01" in reasons["noisy"]
    hardware = "AMD EPYC with AVX2, 2 cores and Intel Xeon with AVX2, 2 cores"
    assert f"other hardware: {hardware}" in reasons["elsewhere"]
    hardware = "AMD EPYC with AVX-512 and bf16, 2 cores and AMD EPYC with AVX2, 2 cores"
    assert f"other hardware: {hardware}" in reasons["zen4"]
    assert "another track: other and tiny" in reasons["track"]


def test_same_ml(tmp_path):
    prior = make_runs(tmp_path / "prior")
    # A single loss proves nothing, but this one isn't clearly above the prior's losses
    one = our_log(tmp_path / "one.txt", loss=1.495, time_ms=90_000, source=SOURCE + "#\n")
    done = run("verify", one, "--against", prior, "--same-ml")
    assert done.returncode == 0
    assert b"waived (--same-ml)" in done.stdout
    assert run("verify", one, "--against", prior).returncode == 1
    alone = run("verify", one, "--same-ml")
    assert alone.returncode == 2
    assert b"needs --against" in alone.stderr


TEN_LOSSES = (1.4842, 1.4929, 1.4868, 1.4891, 1.4907, 1.4859, 1.4884, 1.4915, 1.4876, 1.4899)


def same_ml_reasons(prior, *paths) -> list[str]:
    return judged_against(prior, *paths, same_ml=True).reasons


def test_same_ml_needs_losses_like_the_prior_record(tmp_path):
    prior = make_runs(tmp_path / "prior", TEN_LOSSES, range(100_000, 101_000, 100))
    mean = sum(TEN_LOSSES) / 10
    std = stats.tstd(TEN_LOSSES)
    limit = mean + stats.t.ppf(0.99, 9) * std * (1 + 1 / 10) ** 0.5
    assert mean + 2.9 * std < limit < mean + 3 * std < 1.5
    path = tmp_path / "one.txt"
    for loss in (1.47, mean, limit - 0.0001):
        assert same_ml_reasons(prior, our_log(path, loss=loss, time_ms=90_000)) == []
    for loss in (limit + 0.0001, 1.51, 3.48):
        (reason,) = same_ml_reasons(prior, our_log(path, loss=loss, time_ms=90_000))
        assert reason.startswith("the losses are above the prior record's, so the training isn't")
        assert f"mean {loss:.4f} instead of {mean:.4f}, p = " in reason
    # Several runs: their own spread doesn't help them
    good = make_runs(tmp_path / "good", (1.489, 1.491), (90_000, 90_100))
    assert same_ml_reasons(prior, good) == []
    bad = make_runs(tmp_path / "bad", (1.48, 1.53), (90_000, 90_100))
    (reason,) = same_ml_reasons(prior, bad)
    assert "the losses are above the prior record's" in reason


def test_p_above_by_hand():
    # The prior has two degrees of freedom, mean 2 and standard deviation 1
    prior = [1, 2, 3]
    for losses, t in [([4], 2 / (1 + 1 / 3) ** 0.5), ([2, 5], 1.5 / (1 / 2 + 1 / 3) ** 0.5)]:
        assert rules.p_above(losses, prior) == pytest.approx(1 - t_cdf(t, 2), rel=1e-6)


def test_same_ml_needs_a_prior_record_that_meets_the_target(tmp_path):
    one = our_log(tmp_path / "one.txt", loss=1.49, time_ms=90_000, source=SOURCE + "#\n")
    why = "the prior record doesn't show that the target 1.5 is met: "
    for name, losses, found in [
        ("high", (1.498, 1.502, 1.497, 1.501), "p = 0.35"),
        ("single", (1.488,), "too few runs for a p-value"),
        ("equal", (1.49, 1.49, 1.49), "too few runs for a p-value"),
    ]:
        prior = make_runs(tmp_path / name, losses)
        (reason,) = same_ml_reasons(prior, one)
        assert reason.startswith(why + found), reason
        assert judged_against(prior, one).reasons  # nor is it valid without --same-ml
    # A prior record that breaks a rule proves nothing
    forced = make_runs(tmp_path / "forced", extra="resume: from step 200, resume_force")
    assert same_ml_reasons(forced, one) == [
        "prior record: all runs: resumed by force (--resume_force)"
    ]


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(steps=500), "500 steps, but the prior record has 600; "),
        (dict(batch_tokens=8192), "the prior record has other hyperparameters: batch_tokens; "),
        (dict(muon_lr=0.04), "the prior record has other hyperparameters: muon_lr; "),
        (dict(new_idea=True), "the prior record has other hyperparameters: new_idea; "),
        (dict(seed=99, save_checkpoint=True), None),
        (dict(warmup_steps=3, sequences_per_pass=2, world_size=2, val_loss_every=100), None),
    ],
)
def test_same_ml_needs_the_same_training(tmp_path, change, reason):
    settings = dict(
        muon_lr=0.05,
        removed_later=0.12,
        warmup_steps=10,
        sequences_per_pass=4,
        world_size=1,
        val_loss_every=50,
    )
    prior = make_runs(tmp_path / "prior", **settings)
    settings.pop("removed_later")
    one = our_log(tmp_path / "one.txt", time_ms=90_000, every=50, **settings | change)
    reasons = same_ml_reasons(prior, one)
    if reason is None:
        assert reasons == []
    else:
        assert len(reasons) == 1
        assert reasons[0] == reason + rules.TEST_LOSSES


def test_same_ml_with_our_records(tmp_path):
    prior = RECORDS / "mini/2026-11-24_SmearXSAAndLeakyReLUSquared"
    log = next(prior.glob("*.txt"))

    def halve(match):
        return f"train_time:{int(match[1]) // 2}ms"

    faster = re.sub(r"train_time:(\d+)ms", halve, log.read_text(encoding="utf-8"))
    path = tmp_path / "one.txt"
    path.write_text(faster, encoding="utf-8")
    assert same_ml_reasons(prior, path) == []
    for earlier in ("2026-11-21_TheOfficialModelInMiniature", "2026-11-24_385StepsOnAnAMDEPYC"):
        reasons = "\n".join(same_ml_reasons(RECORDS / "mini" / earlier, path))
        assert "325 steps, but the prior record has " in reasons
    path.write_text(re.sub(r"val_loss:1\.4", "val_loss:3.4", faster), encoding="utf-8")
    (reason,) = same_ml_reasons(prior, path)
    assert "the losses are above the prior record's" in reason


def test_same_ml_with_logs_of_other_programs(tmp_path):
    """They have no hyperparameters, so steps and tokens per step are compared."""
    source = SOURCE.replace("327_680", "10_485_760") + "batch_size = 8 * 65536\n"

    def foreign(name, losses, times, source=source, steps=600):
        folder = make_runs(tmp_path / name, losses, times, source=source, steps=steps)
        for path in folder.glob("*.txt"):
            path.write_text(re.sub("hyperparameters: .*\n", "", path.read_text()))
        return folder

    prior = foreign("prior", (3.274, 3.275, 3.276), (100_000, 100_100, 100_200))
    assert same_ml_reasons(prior, foreign("faster", [3.277], [90_000])) == []
    (reason,) = same_ml_reasons(prior, foreign("short", [3.277], [90_000], steps=550))
    assert reason == f"550 steps, but the prior record has 600; {rules.TEST_LOSSES}"
    small = source.replace("8 *", "4 *")
    (reason,) = same_ml_reasons(prior, foreign("small", [3.277], [90_000], source=small))
    assert reason.startswith("262144 tokens per step, but the prior record has 524288; ")
    (reason,) = same_ml_reasons(prior, foreign("bad", [3.31], [90_000]))
    assert "the losses are above the prior record's" in reason


@pytest.mark.parametrize(
    "code",
    [
        "model = torch.compile(model, dynamic=False)",
        "@torch.compile\ndef f(): pass",
        "@torch.compile(dynamic=False)\ndef f(): pass",
        "torch.compile(model, dynamic=False, fullgraph=True)",
        "@torch.compile(fullgraph=True)\ndef f(): pass",
        "import torch as t\nt.compile(f, fullgraph=True)",
        "functools.partial(torch.compile, fullgraph=True)",
        "model.compile(fullgraph=True)",
        "# torch._inductor.config.x = 1",
        "'torch._inductor.config.x = 1'",
        "re.compile('a', flags=re.M)",
        "import re as r\nr.compile('a')",
        "torch._dynamo.config.compiled_autograd = True",
        "@torch.compiler.disable\ndef f(): pass",
        "compile('1', '', mode='eval')",
    ],
)
def test_allowed_compiler_use(code):
    assert compiler_settings(f"import re\nimport torch\n{code}\n".encode()) == []


@pytest.mark.parametrize(
    "code, found",
    [
        ("torch._inductor.config.coordinate_descent_tuning = True", "torch._inductor.config"),
        ("import torch._inductor.config as config", "torch._inductor.config"),
        ("from torch._inductor import config", "torch._inductor.config"),
        ("from torch._inductor.config import triton", "torch._inductor.config"),
        ("import torch._inductor as i\ni.config.x = 1", "torch._inductor.config"),
        ("from torch import _inductor\n_inductor.config.x = 1", "torch._inductor.config"),
        (
            "torch.compile(model, mode='max-autotune', dynamic=False)",
            "torch.compile(mode='max-autotune')",
        ),
        ("@torch.compile(disable=True)\ndef f(): pass", "torch.compile(disable=True)"),
        ("torch.compile(model, fullgraph=flag)", "torch.compile(fullgraph=flag)"),
        ("torch.compile(model, fullgraph=True, mode='x')", "torch.compile(mode='x')"),
        ("torch.compile(model, dynamic=True)", "torch.compile(dynamic=True)"),
        (
            "torch.compile(model,\n  dynamic=False,\n  options={'a': 1})",
            "torch.compile(options={'a': 1})",
        ),
        ("torch.compile(model, **flags)", "torch.compile(**=flags)"),
        ("from torch import compile as c\nc(model, backend='x')", "torch.compile(backend='x')"),
        ("import torch as t\nt.compile(model, mode='x')", "torch.compile(mode='x')"),
        ("c = torch.compile\nc(model, mode='x')", "torch.compile(mode='x')"),
        ("functools.partial(torch.compile, mode='x')", "torch.compile(mode='x')"),
        ("model.compile(mode='max-autotune')", "torch.compile(mode='max-autotune')"),
    ],
)
def test_forbidden_compiler_use(tmp_path, code, found):
    source = f"import torch\n{code}\n"
    used = compiler_settings(source.encode())
    assert any(setting.startswith(f"{found} in source line") for setting in used)
    runs = make_runs(tmp_path / "runs", source="val_tokens = 327_680\n" + source)
    assert [r for r in judged(runs).reasons if r.startswith(f"not allowed: {found}")]


def test_compiler_use_in_a_source_that_does_not_parse():
    source = (
        "def (\n"
        "# torch._inductor.config\n"
        "torch._inductor.config.x = 1\n"
        "@torch.compile(\n"
        " dynamic=False,\n"
        " mode='x')\n"
    )
    assert compiler_settings(source.encode()) == [
        "torch._inductor.config in source line 3",
        "torch.compile(mode='x') in source line 4",
    ]
    for call in (b"f", b"f, dynamic=False", b"f, fullgraph=True,\n dynamic=False"):
        assert compiler_settings(b"def (\ntorch.compile(" + call + b")\n") == []
    assert compiler_settings(b"(" * 100_000) == []


MARCH = 'os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")'


@pytest.mark.parametrize(
    "code",
    [
        MARCH,
        MARCH.replace('"', "'"),
        f"if linux:\n    {MARCH}",
        f"march = {MARCH}",
        "where = os.environ.get('TORCHINDUCTOR_CACHE_DIR', '/tmp')",
        "os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder)",
        "raise InputError(f'TORCHINDUCTOR_CACHE_DIR {folder}: cannot be written')",
        MARCH.replace("setdefault", "get"),
        "march = os.environ['TORCHINDUCTOR_CPP_MARCH']",
        "tuned = 'TORCHINDUCTOR_CPP_MARCH' in os.environ",
        "off = os.getenv('TORCH_COMPILE_DISABLE') == '1'",
        "def f():\n    'TORCHINDUCTOR_MAX_AUTOTUNE makes it faster.'",
        "# os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'",
        "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'",
        "print('see TORCH_COMPILE_DISABLE')",
    ],
)
def test_allowed_variables_of_the_compiler(code):
    for broken in ("", "def (\n"):  # valid code is parsed; broken code is read as text
        if broken and code.startswith("def f"):
            continue  # in a text, a docstring looks like any other string
        assert compiler_settings(f"{broken}import os\n{code}\n".encode()) == []


@pytest.mark.parametrize(
    "code, name",
    [
        ("os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        ("os.environ.setdefault('TORCHINDUCTOR_CPP_MARCH', 'native')", "TORCHINDUCTOR_CPP_MARCH"),
        ("os.environ.pop('TORCHINDUCTOR_CPP_MARCH')", "TORCHINDUCTOR_CPP_MARCH"),
        ("del os.environ['TORCHINDUCTOR_CPP_MARCH']", "TORCHINDUCTOR_CPP_MARCH"),
        (MARCH.replace("icelake-server", "icelake-server -Ofast"), "TORCHINDUCTOR_CPP_MARCH"),
        (MARCH + "\nos.environ['TORCHINDUCTOR_CPP_MARCH'] += ' -Ofast'", "TORCHINDUCTOR_CPP_MARCH"),
        ("os.putenv('TORCH_COMPILE_DISABLE', '1')", "TORCH_COMPILE_DISABLE"),
        ("os.environ.update(TORCHINDUCTOR_FREEZING='1')", "TORCHINDUCTOR_FREEZING"),
        ("os.environ |= dict(a=1, TORCHINDUCTOR_FREEZING='1')", "TORCHINDUCTOR_FREEZING"),
        ("os.environb[b'TORCHINDUCTOR_FREEZING'] = b'1'", "TORCHINDUCTOR_FREEZING"),
        ("os.environ[f'TORCHINDUCTOR_{name}'] = '1'", "TORCHINDUCTOR_"),
        ("x = {'TORCHINDUCTOR_CACHE_DIR_2': 1}", "TORCHINDUCTOR_CACHE_DIR_2"),
        ("os.environ['TORCHINDUCTOR_' 'FREEZING'] = '1'", "TORCHINDUCTOR_"),
    ],
)
def test_forbidden_variables_of_the_compiler(tmp_path, code, name):
    line = code.count("\n") + 2
    (said,) = compiler_settings(f"import os\n{code}\n".encode())
    assert said.startswith(name) and said.endswith(f" in source line {line}")
    (said,) = compiler_settings(f"def (\nimport os\n{code}\n".encode())
    assert said.startswith(name) and said.endswith(f" in source line {line + 1}")
    runs = make_runs(tmp_path / "runs", source=f"val_tokens = 327_680\n{code}\n")
    assert [r for r in judged(runs).reasons if r.startswith(f"not allowed: {name}")]


UNCOMPILED = dict(flags="-", compiled="no (no C++ compiler was found: install g++)", name="none")


@pytest.mark.parametrize(
    "line, reason",
    [
        (dict(), None),
        (dict(flags="-march=native"), None),
        (dict(name="clang++ 19; mine"), None),
        (
            dict(flags="-march=native -Ofast"),
            "compiled with other flags, set in the environment: -march=native -Ofast;",
        ),
        (dict(flags="-march=native -mtune=generic"), "compiled with other flags"),
        (dict(flags=""), "compiled with other flags"),
        (UNCOMPILED, "trained without torch.compile"),
    ],
)
def test_the_compiler_in_the_log(tmp_path, line, reason):
    """One bad run among several is enough for a refusal. Logs without the line are fine."""
    runs = make_runs(tmp_path / "runs")
    odd = our_log(tmp_path / "odd.txt", loss=1.487, seed=99, machine=compiler_line(**line))
    assert judged(runs).reasons == []
    reasons = judged(runs, odd).reasons
    if reason is None:
        assert reasons == []
    else:
        assert len(reasons) == 1
        assert reasons[0].startswith(f"odd: {reason}")
    log = parse_log(odd)
    assert log.uncompiled == (line is UNCOMPILED)
    assert log.hardware == "AMD EPYC with AVX2, 2 cores"


def test_a_resume_that_could_not_compile(tmp_path):
    """
    A run is compiled on one machine, and resumed without compilation on another.

    verify and submit both say so.
    """
    machine = compiler_line()
    runs = make_runs(tmp_path / "runs", track="tiny", machine=machine)
    assert judged(runs).reasons == []
    logs, _ = read_logs([runs])
    assert not any(log.uncompiled for log in logs)
    extra = "resume: from step 200, on 1 process(es)\nmodel compiled: no (g++ failed: no Python.h)"
    odd = our_log(tmp_path / "odd.txt", loss=1.487, seed=99, machine=machine, extra=extra, every=50)
    said = 'odd: trained without torch.compile ("model compiled: no" in the log, which says why)'
    assert judged(runs, odd).reasons == [said]
    root = tmp_path / "records"
    done = run("submit", "--track", "tiny", "--name", "x", "--records_dir", root, runs, odd)
    assert done.returncode == 1
    assert unwrapped(done.stdout).endswith(f" REFUSED - {said}")
    assert not root.exists()


RESUMED = "resume: from step 200, on {n} process"
H200 = SMI.replace("H100 80GB HBM3", "H200          ")


@pytest.mark.parametrize(
    "machine, later, where",
    [
        (None, "CPU: Intel Xeon, 8 cores, 8 threads a process, instruction sets: avx2 amx_bf16",
         "Intel Xeon with AMX, 8 cores"),
        (None, "CPU: AMD EPYC, 2 cores, 2 threads a process, instruction sets: avx2 avx512_bf16",
         "AMD EPYC with AVX-512 and bf16, 2 cores"),
        (None, "CPU: AMD EPYC, 2 cores, 1 threads a process, instruction sets: avx2", ""),
        (None, "a sample: CPU: Intel Xeon, 8 cores", ""),
        (SMI + "\n8 processes on cuda", H200, "8x NVIDIA H200"),
        (SMI + "\n8 processes on cuda", SMI.replace("75W", "81W"), ""),
        (
            SMI + "\n8 processes on cuda",
            "NVIDIA H200 with world_size=8: nvidia-smi not found",
            "8x NVIDIA H200",
        ),
    ],
)
@pytest.mark.parametrize("order", ["machine first", "resume first"])
def test_a_resume_on_another_machine(tmp_path, machine, later, where, order):
    runs = make_runs(tmp_path / "runs", machine=machine)
    first = read_logs([runs])[0][0].hardware
    lines = [later, RESUMED.format(n=8)]
    if order == "resume first":
        lines.reverse()
    odd = our_log(
        tmp_path / "odd.txt",
        loss=1.487,
        seed=99,
        machine=machine,
        extra="\n".join(lines),
        source=SOURCE + f'"""\n{later}\nCPU: Other, 9 cores\n"""\n',
    )
    log = parse_log(odd)
    assert log.hardware == first
    reasons = judged(odd, same_ml=True).reasons
    if not where:
        assert log.resumed_on == []
        assert reasons == []
        return
    assert log.resumed_on == [where]
    said = f"odd: started on {first} and resumed on {where}; "
    assert reasons == [said + "make a run on one kind of hardware only"]
    done = run("verify", odd, "--json")
    assert json.loads(done.stdout)["logs"][0]["resumed_on"] == [where]


def test_a_resume_on_fewer_gpus(tmp_path):
    """The log has all GPUs of the machine, and how many of them were used."""
    machine = SMI + "\n4 processes on cuda"

    def resumed_on(*counts):
        lines = []
        for count in counts:
            lines += [SMI, RESUMED.format(n=count)]
        path = our_log(tmp_path / "a.txt", machine=machine, extra="\n".join(lines))
        log = parse_log(path)
        assert log.hardware == "4x NVIDIA H100 80GB HBM3"
        return log.resumed_on

    assert resumed_on(4, 4) == []
    assert resumed_on(4, 2, 2) == ["2x NVIDIA H100 80GB HBM3"]
    assert resumed_on(8, 2) == ["8x NVIDIA H100 80GB HBM3", "2x NVIDIA H100 80GB HBM3"]


def test_records_keep_the_rules_of_the_compiler():
    """Older logs have no line about the compiler. They stay valid."""
    folders = sorted(path for path in RECORDS.glob("*/*") if list(path.glob("*.txt")))
    logs, errors = read_logs(folders)
    assert not errors
    assert len(logs) > 10
    for log in logs:
        assert not rules.not_compiled(log)
        for _, source in log.sources:
            assert not compiler_settings(source), log.path
