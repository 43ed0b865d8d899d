"""tools/bench.py, as far as it goes without a GPU: FLOPs, tables, errors, a whole bench on the CPU, busy processes."""
import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from test_attention import dense_mask, random_input
from train_gpt import GPT, TRACKS, InputError, build_optimizers, document_ids
from util import ROOT, env

sys.path.append(str(ROOT / "tools"))
import bench
import train_gpt

pytest_plugins = "pytester"
EOT = 9
TINY = replace(TRACKS["fineweb"], vocab_size=300, eot_token=299, num_layers=6, num_heads=2, head_dim=16, model_dim=64,
               num_value_embeds=1, attn_free_layers=(2,), long_window_layers=(0, 5), train_seq_len=512, max_window=512)


@pytest.mark.parametrize("num_seqs,length,every,window", [(1, 128, 40, 1), (1, 1024, 10**9, 3), (2, 512, 60, 2),
                                                          (3, 256, 1.5, 9), (1, 1024, 200, 8)])
def test_visible_pairs_are_those_of_the_mask(num_seqs, length, every, window):
    tokens = random_input(num_seqs, length, every, seed=1)
    want = int(dense_mask(tokens, window).sum())
    assert bench.visible_pairs(document_ids(tokens, EOT), window) == want


def test_flops_are_what_pytorch_counts():
    """FlopCounterMode sees 2-D products (weights) as mm, and the portable attention's as bmm: of all pairs in its
    spans, which the model's FLOPs count only where visible."""
    window = 4
    tokens = torch.randint(0, 299, (1, 512), dtype=torch.int32)
    model = GPT(TINY, torch.float32).train()
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens.long(), torch.tensor(window, dtype=torch.int32)).backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert set(counts) == {"aten.mm", "aten.bmm"}
    docs = torch.zeros(512, dtype=torch.int32)
    attention = 12 * 2 * 16 * (2 * bench.visible_pairs(docs, 4) + 3 * bench.visible_pairs(docs, 2))
    assert bench.model_flops(TINY, docs, window) == counts["aten.mm"] + attention
    # five layers of 512 queries, two with four blocks of keys and three with two, of which the counter sees all
    assert counts["aten.bmm"] == 12 * 2 * 16 * 512 * 128 * (2 * 4 + 3 * 2)


def test_flops_of_the_fineweb_track_by_hand():
    """One document of 128 tokens, one block: 128 * 129 / 2 pairs in each of eleven layers."""
    weights = 11 * 4 * 768 * 768 + 12 * 8 * 768 * 768 + 768 * 50304
    want = 6 * 128 * weights + 12 * 768 * 11 * (128 * 129 // 2)
    assert bench.model_flops(TRACKS["fineweb"], torch.zeros(128, dtype=torch.int32), 14) == want


@pytest.mark.parametrize("steps", [1, 4])
def test_newton_schulz_flops_are_what_pytorch_counts(steps):
    hp = replace(TINY, ns_steps=steps)
    muon = build_optimizers(GPT(hp, torch.float32), hp)[1]
    for group in muon.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    with FlopCounterMode(display=False) as counter:
        muon.step()
    assert bench.newton_schulz_flops(muon) == counter.get_total_flops()


def test_table_row():
    row = bench.table_row({"date": "2000-01-01", "change": "a | b\nc", "step ms": 1234.5678, "allocated MiB": 7})
    cells = [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]
    assert len(cells) == len(bench.COLUMNS)
    assert dict(zip(bench.COLUMNS, cells)) == {c: "-" for c in bench.COLUMNS} | {
        "date": "2000-01-01", "change": "a / b c", "step ms": "1,234.57", "allocated MiB": "7"}


def test_a_row_joins_the_table_that_ends_hopper_md(tmp_path):
    path = tmp_path / "HOPPER.md"
    path.write_text(bench.HOPPER.read_text())
    bench.append_row(path, {"change": "first"})
    bench.append_row(path, {"change": "second"})
    old, new = bench.HOPPER.read_text().splitlines(), path.read_text().splitlines()
    assert new[:-2] == old and "| first |" in new[-2] and "| second |" in new[-1]
    assert old[-1].startswith("|")  # else what was added would not be of the table
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("another table\n")
    with pytest.raises(InputError, match="columns"):
        bench.append_row(path, {})
    assert path.read_text() == "another table\n"


def test_judging_the_short_run():
    good = {step: round(10.8258 / (1 + step / 100), 4) for step in range(0, 201, 25)}
    near = {step: loss + 0.01 * (step > 0) for step, loss in good.items()}
    assert bench.judge(good, near) == "ok, FP8 and bf16 at most 0.0100 apart"
    assert "bf16: ended early" in bench.judge(good, {0: 10.8258})
    assert "FP8: starts at 10.9" in bench.judge(good | {0: 10.9}, good)
    assert "FP8: no fall to step 75" in bench.judge(good | {75: good[50]}, good)
    assert "apart" in bench.judge(good, good | {200: good[200] - 0.06})
    nan = bench.judge(good | {100: float("nan")}, good)
    assert "FP8: no fall to step 100" in nan


# ----------------------------------------------------------------------------
# The whole script

SMALL = ["--device=cpu", "--track=shakespeare", "--batch_tokens=512", "--train_seq_len=128", "--sequences_per_pass=2",
         "--num_layers=3", "--model_dim=32", "--head_dim=16", "--ngram_rows=64", "--repeats=2", "--warmup=1"]


def run_bench(*args, **extra):
    done = subprocess.run([sys.executable, ROOT / "tools" / "bench.py", *SMALL, *map(str, args)], cwd=ROOT,
                          env=env(**extra), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    return done


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """-> what a run prints, and its JSON."""
    path = tmp_path_factory.mktemp("bench") / "out.json"
    done = run_bench("--kernels=3", "--peak_tflops=1", "--json", path)
    assert list(path.parent.iterdir()) == [path]
    return done.stdout, json.loads(path.read_text())


def numbers(row):
    """The last four cells: ms, GFLOP, GFLOP/s and % of peak."""
    return [float(cell.replace(",", "")) for cell in row.split()[-4:]]


def test_the_figures_agree_with_each_other(measured):
    _, figures = measured
    assert figures["micro-step tokens"] == 256 and figures["step tokens"] == 512
    for name in ("forward ms", "backward ms", "optimizer ms", "step ms", "first step s", "allocated MiB"):
        assert figures[name] > 0
    assert figures["forward+backward ms"] == pytest.approx(figures["forward ms"] + figures["backward ms"])
    assert figures["tokens/s"] == pytest.approx(512 / figures["step ms"] * 1000)
    assert figures["model TFLOP/s"] == pytest.approx(figures["step model TFLOP"] / figures["step ms"] * 1000)
    assert figures["MFU %"] == pytest.approx(100 * figures["model TFLOP/s"])  # of the 1 TFLOP/s given
    told_by_report = {"GPU tests", "val_loss FP8", "val_loss bf16", "run"}
    assert set(bench.COLUMNS) - told_by_report <= set(figures)


def test_the_table_of_parts(measured):
    text, figures = measured
    assert "shakespeare: 3 layers, width 32; 512 tokens a step, in 2 passes of 256\n" in text
    assert f"speed: {figures['tokens/s']:,.0f} tokens/s; first step, with compilation: " in text
    assert f"MFU {figures['MFU %']:.2f} %\n" in text
    one_pass, muon = 500 * figures["step model TFLOP"], 1000 * figures["optimizer TFLOP"]
    peak = max(figures["matmul peak before GFLOP/s"], figures["matmul peak after GFLOP/s"])
    for part, name, gflop in [("forward", "forward ms", one_pass / 3), ("backward", "backward ms", one_pass * 2 / 3),
                              ("forward+backward", "forward+backward ms", one_pass),
                              ("optimizers", "optimizer ms", muon), ("whole step", "step ms", 2 * one_pass + muon)]:
        (row,) = re.findall(rf"^{re.escape(part)} +[\d,.]+ .*$", text, re.M)
        rate = gflop / figures[name] * 1000
        assert numbers(row) == [pytest.approx(figures[name], abs=1e-3), pytest.approx(gflop, abs=1e-3),
                                pytest.approx(rate, abs=0.6), pytest.approx(100 * rate / peak, abs=0.6)]


def test_the_table_of_products(measured):
    text, _ = measured
    for product, *shape in [("attention in", 256, 32, 48), ("attention out", 256, 16, 32), ("MLP in", 256, 32, 128),
                            ("MLP out", 256, 128, 32), ("head", 256, 32, 384)]:
        (row,) = re.findall(rf"^{product} +{' x '.join(map(str, shape))} .*$", text, re.M)
        ms, gflop, rate, percent = numbers(row)
        assert ms > 0 and rate >= 0 and percent >= 0
        assert gflop == pytest.approx(2e-9 * shape[0] * shape[1] * shape[2], abs=1e-3)


def test_the_table_of_kernels(measured):
    *_, header, first, second, third = measured[0].splitlines()
    assert header.split() == ["ms", "%", "calls", "kernel"]
    assert float(first.split()[0]) >= float(second.split()[0]) >= float(third.split()[0]) > 0


@pytest.mark.parametrize("args,says", [
    (["--repeats", "0"], "--repeats"),
    (["--device", "cpu", "--peak_tflops", "-1"], "above zero"),
    (["--json", "no_such_folder/out.json"], "its folder is not there"),
    (["--busy", "0"], "--busy"),
    (["--busy", "1", "--rounds", "2"], "at least 3"),
    (["--busy", "1", "--kernels", "3"], "without --report and --kernels"),
    (["--openmp", "GOMP_SPINCOUNT=1000"], "--openmp needs --busy N"),
    (["--busy", "1", "--openmp", ""], "OMP_WAIT_POLICY=PASSIVE"),
    (["--busy", "1", "--openmp", "OMP_WAIT_POLICY"], "OMP_WAIT_POLICY=PASSIVE"),
    (["--busy", "1", "--openmp", "GOMP_SPINCOUNT=1 PATH=x"], "variables of OpenMP"),
    (["--report", "x"], "--shards DIR"),
    (["--stage", "fp8"], "--stage is for --report"),
    (["--report", "x", "--stage", "fp9"], "--stage"),
    (["--report", "x", "--shards", "nowhere"], "make them with data/fineweb.py"),
    (["--device", "cpu", "--train_seq_len", "100"], "train_seq_len % 128 == 0"),
    (["--device", "cpu", "--head_dim", "30"], "--head_dim 30"),
    (["--device", "cpu", "--no_such_option", "1"], "no_such_option"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line(args, says, capsys):
    assert bench.main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_a_report_needs_a_gpu(tmp_path, capsys):
    for kind in ("train", "val"):
        (tmp_path / f"x_{kind}_0.bin").touch()
    assert bench.main(["--report", "x", "--shards", str(tmp_path), "--device", "cpu"]) == 2
    assert "no usable CUDA GPU" in capsys.readouterr().err


def test_a_report_is_made_of_stages(tmp_path, monkeypatch, capsys):
    """One a command or all at once, none twice; the last adds the row, and a stage that fails leaves nothing."""
    losses = {step: round(10.8258 / (1 + step / 100), 4) for step in range(0, 201, 25)}
    page, folder, made = tmp_path / "HOPPER.md", tmp_path / "logs" / "report" / "x", []
    page.write_text(bench.HOPPER.read_text())
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "HOPPER", page)
    monkeypatch.setattr(bench, "gpu_tests", lambda: made.append("tests") or "30 passed")
    monkeypatch.setattr(bench, "short_run", lambda shards, fp8: made.append(fp8) or losses)

    def killed():
        raise KeyboardInterrupt

    assert bench.report(["fp8"], tmp_path, folder, killed).keys() == {"fp8"}
    assert "still to run: --stage tests, --stage bf16, --stage figures\n" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        bench.report(bench.STAGES, tmp_path, folder, killed)
    assert made == [True, "tests", False] and page.read_text() == bench.HOPPER.read_text()
    row = bench.report(bench.STAGES, tmp_path, folder, lambda: {"step ms": 100.0, "change": "as it is"})
    assert made == [True, "tests", False] and row["run"] == "ok, FP8 and bf16 at most 0.0000 apart"
    assert page.read_text().splitlines()[-1] == bench.table_row(row) and "100: 5.4129" in row["val_loss FP8"]
    assert list(folder.iterdir()) == []  # the next report measures anew


def test_the_two_orders_of_the_heads_gradient():
    torch.manual_seed(0)
    first, second = (run() for run in bench.head_gradients(32, 16, 48, torch.device("cpu")))
    torch.manual_seed(0)
    grad = torch.randn(32, 48).to(torch.float8_e5m2).double()
    x = torch.randn(32, 16).to(torch.float8_e4m3fn).double()
    for got in (first, second):
        torch.testing.assert_close(got.double(), grad.T @ x, rtol=1e-5, atol=1e-5)


def test_missing_packages_are_named():
    with pytest.raises(SystemExit, match="missing packages: no_such_package_a, no_such_package_b;"):
        bench.check_packages("json", "no_such_package_a", "no_such_package_b")


def test_fineweb_on_a_cpu_takes_short_steps():
    _, _, hp = bench.read_options(["--track", "fineweb", "--device", "cpu"])
    assert hp == replace(TRACKS["fineweb"], batch_tokens=1024, train_seq_len=1024, val_seq_len=1024)
    _, _, hp = bench.read_options(["--track", "fineweb", "--device", "cpu", "--batch_tokens", "2048"])
    assert (hp.batch_tokens, hp.train_seq_len) == (2048, 1024)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_whole_folder_is_skipped(pytester):
    outcomes = pytester.runpytest_inprocess(ROOT / "tests" / "gpu", "-p", "no:cacheprovider").parseoutcomes()
    assert outcomes.pop("skipped") > 0 and outcomes.keys() <= {"warning", "warnings"}


# ----------------------------------------------------------------------------
# Beside other work

def state(process):
    """R, S, T, ... as the kernel has it; "" for a process that has ended. process: one of ours, or a pid"""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{getattr(process, 'pid', process)}/stat").read_text()
        return text.rpartition(")")[2].split()[0].replace("Z", "")
    return ""


def wait_for(condition):
    """Raises AssertionError if it does not come true; a busy machine has a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def stand_ins(monkeypatch):
    """-> (stepping, busy): all processes of these kinds. Those that step are stand-ins, without torch, which answer
    at once."""
    stepping, busy, start_busy = [], [], bench.busy_process

    @contextlib.contextmanager
    def listed(child, processes):
        with child as process:
            processes.append(process)
            yield process

    echo = "import sys\nprint('0', flush=True)\nfor _ in sys.stdin: print('0', flush=True)"
    monkeypatch.setattr(bench, "stepping_process", lambda *_: listed(bench.child(echo), stepping))
    monkeypatch.setattr(bench, "busy_process", lambda: listed(start_busy(), busy))
    before = signal.getsignal(signal.SIGTERM)
    yield stepping, busy
    signal.signal(signal.SIGTERM, before)
    for process in [*stepping, *busy]:
        process.kill()


def test_each_setting_is_timed_alone_with_its_number_of_busy_processes(stand_ins, monkeypatch):
    (stepping, busy), counts, answer = stand_ins, [], bench.answer

    def count(process, setting):
        wait_for(lambda: all(state(other) == "T" for other in stepping if other is not process))
        answer(process, setting)
        counts.append(sum(state(other) != "" for other in busy))
        return counts[-1]

    monkeypatch.setattr(bench, "answer", count)
    got = bench.time_beside_others(argparse.Namespace(busy=2, rounds=3, openmp=["A=1"]), [])
    assert got == {setting: [[0] * 3, [1] * 3, [2] * 3] for setting in (bench.OWN, bench.DEFAULT, "A=1")}
    assert counts[3:] == 3 * [0, 0, 0, 1, 1, 1, 2, 2, 2]  # a round has every number and every setting once
    assert len(stepping) == 3 and len(busy) == 9 and not any(map(state, [*stepping, *busy]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_busy_processes_end_with_us(number, stand_ins, monkeypatch):
    """In a fork, as it must be possible to kill it: it tells its children's pids, and waits for the signal."""
    (stepping, busy), answer = stand_ins, bench.answer
    reader, writer = os.pipe()

    def tell_and_wait(process, setting):
        if len(busy) == 2:  # the second round's
            os.write(writer, " ".join(str(p.pid) for p in [*stepping, *busy]).encode())
            while True:  # not signal.pause(), which never returns from a signal that came right before it
                time.sleep(0.01)
        return answer(process, setting)

    monkeypatch.setattr(bench, "answer", tell_and_wait)
    if (pid := os.fork()) == 0:
        try:
            bench.time_beside_others(argparse.Namespace(busy=1, rounds=3, openmp=[]), [])
        finally:
            os._exit(3)
    pids = [int(text) for text in os.read(reader, 1000).split()]
    assert len(pids) == 4 and state(pids[-1])
    os.kill(pid, number)
    os.waitpid(pid, 0)
    wait_for(lambda: state(pids[-1]) == "")
    if number != signal.SIGKILL:  # one that is killed cannot end those that it has stopped
        assert not any(map(state, pids))
    else:
        for pid in filter(state, pids):
            os.kill(pid, signal.SIGKILL)
    os.close(reader)
    os.close(writer)


def test_a_stepping_process_that_fails_is_an_error():
    with bench.child("raise SystemExit(5)") as process, pytest.raises(InputError, match="X=1 ended with exit code 5"):
        bench.answer(process, "X=1")


def test_settings_reach_the_stepping_processes(monkeypatch):
    """Through the child's environment; the caller's own is not in it."""
    started = []
    monkeypatch.setattr(bench, "child", lambda code, env: started.append((code, env)))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for setting in (bench.OWN, bench.DEFAULT, "GOMP_SPINCOUNT=1000 OMP_PROC_BIND=true"):
        bench.stepping_process(setting, [])
    rest = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    assert rest["OMP_NUM_THREADS"] == "7"
    assert [env for _, env in started] == [rest, rest, rest | {"GOMP_SPINCOUNT": "1000", "OMP_PROC_BIND": "true"}]


def test_busy_on_the_cpu(tmp_path, monkeypatch, capfd):
    """The whole of it, but for this process being the script's own. OpenMP itself tells what it was given: 300,000
    spins are GNU's default, whatever train_gpt.py and the caller want."""
    monkeypatch.setattr(train_gpt, "start_world", lambda name: train_gpt.World(0, 1, torch.device(name)))
    for name, value in env(OMP_DISPLAY_ENV="VERBOSE", OMP_WAIT_POLICY="ACTIVE").items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    assert bench.main([*SMALL, "--busy=1", "--json", str(tmp_path / "out.json")]) == 0
    signal.signal(signal.SIGTERM, before)
    out, err = capfd.readouterr()
    spins = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", err)
    assert len(spins) == 2 and spins[1] == "300000"
    assert all(len(line) <= 80 for line in out.splitlines())
    rounds, rows = json.loads((tmp_path / "out.json").read_text())["busy ms"], iter(out.splitlines()[4:])
    assert list(rounds) == [bench.OWN, bench.DEFAULT]
    for setting, by_busy in rounds.items():
        for name, next_to, times in zip((setting, ""), ("alone", "1 busy"), by_busy):
            low, middle, high = sorted(times)
            ratio = middle / sorted(by_busy[0])[1]
            assert next(rows).split() == [*name.split(), *next_to.split(), f"{middle:,.1f}", f"{ratio:.2f}",
                                          f"{low:,.1f}", "to", f"{high:,.1f}"]
    assert next(rows, None) is None


def test_each_setting_compiles_alike(monkeypatch):
    """Where torch is loaded before train_gpt.py, what that sets for the compiler must come from the environment."""
    monkeypatch.setenv("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setattr(bench, "child", lambda code, env: env)
    for setting, spin in ((bench.OWN, None), (bench.DEFAULT, None), ("GOMP_SPINCOUNT=9", "9")):
        environment = bench.stepping_process(setting, [])
        assert environment["TORCHINDUCTOR_CPP_MARCH"] == "native -mtune=icelake-server"
        assert environment.get("GOMP_SPINCOUNT") == spin
