"""
Tests of verify. They compare statistics with closed forms and with formulas.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np

import pytest
from scipy import stats

import train_gpt
from judge.logs import comparable
from judge.stats.decide import log_e_values
from leaderboard import rules
from leaderboard.compiler_rule import compiler_settings
from judge.logs.taking_turns import turns
from lib.processes import ROOT
from tests.leaderboard.makers import (
    FASTER,
    FIELD,
    SOURCE,
    cpu,
    has_reason,
    judged,
    make_runs,
    our_log,
    run,
    unwrapped,
)


# -----------------------------------------------------------------------------
# Statistics
def test_p_if_looked(tmp_path):
    """1 / the e-value of the definition, with the noise of one rounded loss. test_stats.py shows that this is
    valid after any run."""
    losses = [1.49, 1.4921, 1.4893, 1.4911]
    verdict = judged(make_runs(tmp_path / "runs", losses))
    log_e = log_e_values(1.5 - np.array(losses), 0.0001 / 2**0.5)[-1]
    assert verdict.p_if_looked == pytest.approx(np.exp(-log_e))
    assert verdict.summary.p_value < verdict.p_if_looked < 0.1


@pytest.mark.parametrize("n", [2, 13])
def test_times_of_runs_that_took_turns(tmp_path, n):
    rng = np.random.default_rng(n)
    ours = np.round(rng.normal(99_700, 200, n))
    prior = np.round(rng.normal(100_000, 400, n))
    losses = [1.48 + seed / 1000 for seed in range(n)]  # two runs may take the same time
    a = make_runs(tmp_path / "a", losses, ours, turn=0)
    b = make_runs(tmp_path / "b", losses, prior, turn=1)
    c = judged(a, against=b).comparison
    assert c.p_value == pytest.approx(
        stats.ttest_rel(np.log(ours), np.log(prior), alternative="less").pvalue
    )
    assert c.saved == pytest.approx((prior.mean() - ours.mean()) / 1000)
    assert c.pairs == n


def test_other_sessions_are_not_compared(tmp_path):
    """Here, no log says when its run began."""
    prior, ours = make_runs(tmp_path / "prior"), make_runs(tmp_path / "ours", times=FASTER)
    done = run("verify", ours, "--against", prior)
    words = unwrapped(done.stdout)
    assert done.returncode == 1
    assert "other session: not comparable" in words
    assert "saved " in words and "t-test of" not in words
    assert done.stdout.endswith(b"\n  ./run.sh submit --track tiny --name NAME --make\n")


def test_turns_are_one_run_after_the_other():
    """Random runs of two sides took turns if none began before the one before it had ended, and if each has a
    partner."""
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(300):
        minutes = np.sort(rng.choice(20, 4, replace=False))
        took = rng.choice([0.5, 0.9, 1.0, 1.2], 4, p=[0.4, 0.4, 0.1, 0.1])
        sides = rng.permutation([0, 0, 1, 1])
        runs = ([], [])
        for i in rng.permutation(4):
            end = SimpleNamespace(train_time_ms=60_000 * took[i])
            run = f"started: 2026-01-01 12:{minutes[i]:02}:00"
            runs[sides[i]].append(SimpleNamespace(run=run, end=end))
        alone = all(minutes[:-1] + took[:-1] < minutes[1:])
        expected = alone and sides[0] != sides[1] and sides[2] != sides[3]
        assert bool(turns(*runs)) == expected
        count += expected
    assert 30 < count < 270


# -----------------------------------------------------------------------------
# The command
def test_a_valid_submission(tmp_path):
    make_runs(tmp_path / "runs")
    done = run("verify", "runs", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.endswith(b"\nvalid\n")
    assert max(map(len, done.stdout.decode().splitlines())) <= 80
    expected = stats.ttest_1samp([1.488, 1.491, 1.486, 1.489], 1.5, alternative="less").pvalue
    test = "one-sided t-test, mean below 1.5; needs < 0.01"
    assert (
        f"runs 4 complete val_loss mean 1.4885, standard deviation 0.0021 p-value {expected:.4f} ({test})"
        in unwrapped(done.stdout)
    )
    for options, status in [
        (["--target", "1.48"], 1),
        (["--target", "nan"], 2),
        (["missing.txt"], 2),  # also if the others are valid
    ]:
        assert run("verify", "runs", *options, cwd=tmp_path).returncode == status


# -----------------------------------------------------------------------------
# Rules
COMPILER = "Compiler: g++ 12; mine; flags: {}; model compiled: {}\n"
OTHER_CPU = cpu(sets="avx2 avx512_bf16 avx512f")


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(loss=1.52), "the mean loss is not shown to be below 1.5: p = "),
        (dict(source=SOURCE + "#\n"), "2 different sources"),
        (
            dict(machine=cpu(cores=4)),
            "hardware AMD EPYC with AVX2, 4 cores, not AMD EPYC with AVX2, 2 cores",
        ),
        (dict(machine="a machine"), "unknown"),
        (dict(seed=1), "the same seed (1) as"),
        (dict(seed=6), "seed 4 is missing; the seeds of a record follow each other (0 to 6)"),
        (dict(head_lr=0.3), "head_lr 0.3, not None"),
        (dict(machine=cpu(compiler=COMPILER.format("-march=native", "yes"))), None),
        (
            dict(machine=cpu(compiler=COMPILER.format("-march=native -Ofast", "yes"))),
            "odd: compiled with other flags, set in the environment: -march=native -Ofast;",
        ),
        (
            dict(machine=cpu(compiler=COMPILER.format("-march=native", "no (g++ failed)"))),
            "odd: trained without torch.compile",
        ),
        (
            dict(extra=f"{COMPILER.format('-march=native', 'no')}resume: from step 200"),
            "odd: trained without torch.compile",
        ),
        (dict(source="def (\n"), "not allowed: syntax that this Python can't parse in source line 1"),
    ],
)
def test_each_rule(tmp_path, change, reason):
    runs = make_runs(tmp_path / "runs")
    assert judged(runs).reasons == []
    our_log(tmp_path / "odd.txt", **dict(loss=1.487, seed=4) | change)
    reasons = judged(runs, tmp_path / "odd.txt").reasons
    if reason is None:
        assert reasons == []
    else:
        assert any(reason in r for r in reasons), reasons


def test_other_rules(tmp_path):
    runs = make_runs(tmp_path / "runs")
    assert has_reason("one complete run is not enough", next(runs.glob("*.txt")))
    assert has_reason("same loss", make_runs(tmp_path / "equal", losses=[1.48] * 3))
    field = tmp_path / "field.txt"
    text = FIELD["today's, lines in between, one step average"][0]
    for number, reason in [
        ("10485760", ""),
        ("20 * 524_288", ""),
        ("int(n)", "field: val_tokens None, but the track fineweb needs 10485760"),
        ("4096", "field: val_tokens 4096, but the track fineweb needs 10485760"),
    ]:
        field.write_text(text.replace("10485760", number))
        assert [r for r in judged(field).reasons if "val_tokens" in r] == [reason] * bool(reason)


def test_mini_is_the_whole_model(tmp_path):
    kept = dict(
        track="mini",
        num_layers=4,
        num_value_embeds=2,
        max_window=256,
        muon_momentum_warmup=100,
        val_tokens=rules.FIXED["mini"]["val_tokens"],
        target_val_loss=rules.FIXED["mini"]["target_val_loss"],
    )
    assert judged(make_runs(tmp_path / "good", **kept)).reasons == []
    changes = [
        dict(num_layers=3),
        dict(max_window=128),
        dict(bigram_factor=5),
        dict(windows=[3, 7], window_block=16),  # recipes/january2026.py
        dict(windows=[], window_block=16),
    ]
    for i, change in enumerate(changes):
        (reason,) = judged(make_runs(tmp_path / str(i), **kept | change)).reasons
        name = "max_window" if "windows" in change else next(iter(change))
        assert reason.startswith(f"all runs: {name} ")
        assert ", but the track mini needs " in reason
    wide = dict(windows=[3, 11], window_block=16)
    assert judged(make_runs(tmp_path / "wide", **kept | wide)).reasons == []


@pytest.mark.parametrize("track", ["mini", "fineweb"])
def test_a_track_has_its_own_data_and_target(tmp_path, track):
    hyperparameters = dataclasses.asdict(train_gpt.TRACKS[track])
    hyperparameters.pop("seed")
    target = hyperparameters["target_val_loss"]
    kept = hyperparameters | dict(losses=(target - 0.012, target - 0.010, target - 0.014))
    assert judged(make_runs(tmp_path / "good", **kept)).reasons == []
    for name, wanted in rules.FIXED[track].items():
        if name == "bigram_factor":
            continue
        assert hyperparameters[name] == wanted  # the table agrees with train_gpt.py
        value = wanted + 1 if isinstance(wanted, (int, float)) else "data/mine/mine_*.bin"
        folder = make_runs(tmp_path / name, **kept | {name: value})
        reason = f"all runs: {name} {value!r}, but the track {track} needs {wanted!r}"
        assert judged(folder).reasons == [reason]


# -----------------------------------------------------------------------------
# Against a prior record
def test_against_a_prior_record(tmp_path):
    prior = make_runs(tmp_path / "prior", turn=0)
    faster = make_runs(tmp_path / "faster", times=FASTER, turn=1, source=SOURCE + "#\n")
    done = run("verify", faster, "--against", prior)
    assert done.returncode == 0
    assert b"saved     9.950 s (9.95%)" in done.stdout
    fast = (9_000, 9_300, 9_100, 9_200)
    hardware = "AMD EPYC with AVX2, 2 cores and AMD EPYC with AVX-512 and bf16, 2 cores"
    for name, changes, words in [
        ("slower", dict(times=(101_000, 101_300, 102_000, 101_200)), "slower"),
        ("noisy", dict(times=(80_000, 110_000, 95_000, 99_000)), "not shown to be faster"),
        ("elsewhere", dict(times=fast, machine=OTHER_CPU), f"can't be compared: hardware {hardware}"),
        ("track", dict(times=fast, track="other"), "can't be compared: track tiny and other"),
    ]:
        (reason,) = judged(make_runs(tmp_path / name, turn=1, **changes), against=prior).reasons
        assert words in reason


# -----------------------------------------------------------------------------
# The compiler
ALLOWED = """
import functools, os, re
import re as r
import torch
import torch as t
model = torch.compile(model, dynamic=False, fullgraph=True)
t.compile(f, fullgraph=True)
functools.partial(torch.compile, fullgraph=True)
model.compile(fullgraph=True)
re.compile("a", flags=re.M)
r.compile("a", flags=re.M)
compile("1", "", mode="eval")
torch._dynamo.config.compiled_autograd = True
# torch._inductor.config.x = 1
"torch._inductor.config.x = 1"
@torch.compile
def f():
    "See TORCHINDUCTOR_MAX_AUTOTUNE."
@torch.compile(dynamic=False)
@torch.compiler.disable
def g(): pass
os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")
march = os.environ.setdefault('TORCHINDUCTOR_CPP_MARCH', 'native -mtune=icelake-server')
where = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/tmp")
os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder)
march = os.environ.get("TORCHINDUCTOR_CPP_MARCH")
off = os.getenv("TORCH_COMPILE_DISABLE") == "1"
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
print("see TORCH_COMPILE_DISABLE")
"""


def test_allowed_use_of_the_compiler():
    assert compiler_settings(ALLOWED.encode()) == []
    for script in [ROOT / "train_gpt.py", *(ROOT / "recipes").glob("*.py")]:
        assert compiler_settings(script.read_bytes()) == [], script


CONFIG = "torch._inductor.config"
MARCH = "TORCHINDUCTOR_CPP_MARCH"


@pytest.mark.parametrize(
    "code, found",
    [
        ("torch._inductor.config.coordinate_descent_tuning = True", CONFIG),
        ("import torch._inductor.config as config", CONFIG),
        ("import torch._inductor as i; i.config.x = 1", CONFIG),
        ("torch.compile(model, mode='max-autotune')", "torch.compile(mode='max-autotune')"),
        ("torch.compile(model, fullgraph=flag)", "torch.compile(fullgraph=flag)"),
        ("torch.compile(model, **flags)", "torch.compile(**=flags)"),
        ("from torch import compile as c; c(model, backend='x')", "from torch import compile"),
        ("functools.partial(torch.compile, mode='x')", "torch.compile(mode='x')"),
        ("model.compile(mode='x')", "torch.compile(mode='x')"),
        ("os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        (f"os.environ.setdefault('{MARCH}', 'native -mtune=icelake-server -Ofast')", MARCH),
        (f"os.environ['{MARCH}'] += ' -Ofast'", MARCH),
        ("os.environ.update(TORCHINDUCTOR_FREEZING='1')", "TORCHINDUCTOR_FREEZING"),
        ("os.environ[f'TORCHINDUCTOR_{name}'] = '1'", "TORCHINDUCTOR_"),
    ],
)
def test_forbidden_use_of_the_compiler(code, found):
    assert compiler_settings(f"import os, torch\n{code}\n".encode()) == [f"{found} in source line 2"]


@pytest.mark.parametrize(
    "code, tokens",
    [
        ("val_tokens = 10 * 2", 20),
        ("class Hyperparameters:\n    val_tokens: int = 20_0  # how many", 200),
        ("N = 3 * 4\nargs = Arguments(val_tokens=N * 2)", None),
        ("args.val_tokens = 7\nval_tokens = args.val_tokens", 7),
        ("# val_tokens=5", None),
        ("val_tokens = 5\nval_tokens = 6", None),
        ("val_tokens = int(sys.argv[1])", None),
        ("val_tokens = 5 +", None),
    ],
)
def test_val_tokens_of_a_source(code, tokens):
    assert comparable.val_tokens_of_source(code.encode()) == tokens
