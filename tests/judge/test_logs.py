"""Tests of judge/logs/read.py: our logs and those of others are read rightly, and damaged ones are refused."""

import contextlib
import re

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from judge.plot import curves
from judge.commands import UserError
from judge.logs.read import parse_log, parse_trials, read_logs
from leaderboard import tables, rules
from tests.util import assert_one_line
from tests.leaderboard.makers import FIELD, LINE, SMI, SOURCE, cpu, heading, judged, our_log, run


@pytest.mark.parametrize("kind", FIELD)
def test_logs_of_the_field(tmp_path, kind):
    text, loss, train_time, step_avg, source, hardware, torch = FIELD[kind]
    (tmp_path / "run.log").write_text(text)
    (tmp_path / "notes.md").write_text(text)
    (log,) = read_logs([tmp_path])
    assert log.path.name == "run.log"
    assert log.incomplete == ""
    assert log.hyperparameters == {}
    assert log.target is None
    assert log.final.val_loss == loss
    assert log.final.train_time_ms == pytest.approx(train_time)
    assert log.final.step_avg_ms == step_avg
    assert log.source == source
    assert log.hardware == hardware
    assert log.torch == torch
    assert rules.val_tokens(log) == 10_485_760


# Lines like those of other projects. What is judged, by --metric: (value, step, steps of the schedule).
# None is a log that could be read in two ways, or that has no such number.
OTHERS = {
    "parameter-golf, March": (
        "step:0/900 val_loss:6.9 val_bpb:4.1 train_time:0ms\n"
        "step:700/900 val_loss:2.07 val_bpb:1.22 train_time:600ms\n"
        "final_int8_roundtrip val_loss:2.09 val_bpb:1.24 eval_time:14ms\n"
        "final_int8_roundtrip_exact val_loss:2.0912 val_bpb:1.2436\n",
        {
            "": None,
            "val_bpb": None,
            "step val_bpb": (1.22, 700, 900),
            "final_int8_roundtrip_exact val_bpb": (1.2436, 1, 1),
            "final_int8_roundtrip_exact_val_loss": (2.0912, 1, 1),
        },
    ),
    "parameter-golf, April": (
        "0/900 val_loss: 9.01 val_bpb: 3.49\n800/900 train_loss: 2.8\n"
        "850/900 val_loss: 2.77 val_bpb: 1.07\n"
        "diagnostic pre-quantization post-ema val_loss:2.76 val_bpb:1.06 eval_time:6ms\n"
        "quantized_ttt val_loss:2.75 val_bpb:1.05 eval_time:3ms\n",
        {"val_bpb": None, "quantized_ttt val_bpb": (1.05, 1, 1), "Step val_bpb": (1.07, 850, 900)},
    ),
    "nanochat": (
        "Step 00000 | Validation bpb: 3.2\nstep 00199/00200 (99%) | loss: 2.7 | dt: 1.2ms\n"
        "Step 00200 | Validation bpb: 0.84\nMinimum validation bpb: 0.83\n",
        {
            "": None,
            "validation_bpb": None,
            "step validation bpb": (0.84, 200, 200),
            "minimum_validation_bpb": (0.83, 1, 1),
        },
    ),
    "autoresearch": (
        "step 00001 (0.1%) | loss: 9.0\rstep 00950 (99.9%) | loss: 2.9\r\n---\n"
        "val_bpb:          0.998100\nnum_steps:        951\n",
        {"": None, "val_bpb": (0.9981, 1, 1), "num_steps": (951, 1, 1), "-num_steps": (-951, 1, 1)},
    ),
    "slowrun": (
        "Step 00000 | Val BPB: 3.1 | Val Loss: 10.8\nStep 00099 | Epoch 1 | Val BPB: 1.1 | Val Loss: 3.3\n",
        {"": (3.3, 99, 99), "val_bpb": (1.1, 99, 99), "val loss": (3.3, 99, 99), "loss": (3.3, 99, 99)},
    ),
    "nanoGPT": (
        "step 0: train loss 4.2, val loss 4.3\niter 0: loss 4.2, time 9ms\n"
        "step 250: train loss 1.9, val loss 2.0\niter 250: loss 1.8, time 9ms\n",
        {"": (2.0, 250, 250), "train_loss": (1.9, 250, 250), "loss": None, "train": None},
    ),
    "ours": (
        "step:4/9 val_loss:4.2 train_loss:4.3 train_time:10ms step_avg:2.50ms\n"  # until November 2026
        "step:9/9 val_loss:3.3 train_time:20ms step_avg:2.22ms train_loss:3.5\n",
        {"": (3.3, 9, 9), "train_loss": (3.5, 9, 9), "step_train_loss": (3.5, 9, 9)},
    ),
    "optimization track": (
        "step:5/9 val_loss:3.3 val_avg_loss:3.1 val_ema_loss:3.2 train_time:1s step_avg:1ms\n"
        "step:8/9 val_loss:3.29 val_avg_loss:3.09 val_ema_loss:3.19 train_time:2s step_avg:1ms\n",
        {"": None, "val_loss": (3.29, 8, 9), "val_ema_loss": (3.19, 8, 9), "ema_loss": None},
    ),
    "JSON lines": (
        '{"loss": 3.1, "step": 1}\n{"step": 2, "val/loss": 3.05, "core": 0.21}\n',
        {"": (3.05, 2, 2), "val/loss": (3.05, 2, 2), "core": (0.21, 2, 2)},
    ),
    "one JSON file": ('{\n "name": "x",\n "val_bpb": 1.0614\n}', {"val_bpb": (1.0614, 1, 1)}),
    "the best so far": (
        "epoch 2: val loss: 3.3, best val loss: 3.1\n",
        {"": None, "val_loss": (3.3, 1, 1)},
    ),
}


@pytest.mark.parametrize("project", OTHERS)
def test_any_metric(tmp_path, project):
    text, expected = OTHERS[project]
    path = tmp_path / "run.log"
    path.write_text(text)
    for metric, found in expected.items():
        end = None
        try:
            log = parse_log(path, metric)
            end = log.end and (log.end.val_loss, log.end.step, log.num_steps)
        except UserError as error:
            for name, number in re.findall(r"(\S+) \(([\d.]+)\)", str(error)):  # can be chosen
                assert parse_log(path, name).end.val_loss == float(number)
        assert end == found, metric


# How a log can join a script with two more files, and the names that these get
APPENDED = {
    "named, between dashes": (
        [heading("kernels.py"), heading("more/kernels_2.py")],
        ["kernels.py", "more/kernels_2.py"],
    ),
    "below another line of =": ([f"\n{LINE}\n"] * 2, ["source_2.py", "source_3.py"]),
    "both": ([heading("x.py"), f"\n{LINE}\n"], ["x.py", "source_3.py"]),
}


@pytest.mark.parametrize("way", APPENDED)
@pytest.mark.parametrize("ending", ["\n", ""])
def test_several_sources_in_one_log(tmp_path, way, ending):
    joins, names = APPENDED[way]
    sources = [SOURCE + ending, "\nimport triton\n", "def g(): pass"]
    text = sources[0] + joins[0] + sources[1] + joins[1] + sources[2]
    log = parse_log(our_log(tmp_path / "a.txt", source=text))
    alone = parse_log(our_log(tmp_path / "b.txt", source=sources[0]))
    assert log.sources == list(zip(["train_gpt.py", *names], [s.encode() for s in sources]))
    assert alone.sources == log.sources[:1]
    assert (log.run, log.validations) == (alone.run, alone.validations)
    changed = our_log(
        tmp_path / "c.txt", source=text.replace("import triton", "torch._inductor.config.x = 1")
    )
    reason = f"not allowed: torch._inductor.config in source line 2 of {names[0]}"
    assert reason in judged(changed).reasons


H200 = SMI.replace("H100 80GB HBM3", "H200          ")
H100 = "8x NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "machine, later, processes, resumed_on",
    [
        (cpu(), cpu("Intel Xeon", 8, "avx2 amx_bf16"), 1, ["Intel Xeon with AMX, 8 cores"]),
        (cpu(), cpu(), 2, []),
        (cpu(), "a sample: CPU: Intel Xeon, 8 cores", 1, []),
        (f"{SMI}\n8 processes on cuda", H200, 8, ["8x NVIDIA H200"]),
        (f"{SMI}\n8 processes on cuda", SMI.replace("75W", "81W"), 8, []),
        (f"{SMI}\n8 processes on cuda", SMI, 2, ["2x NVIDIA H100 80GB HBM3"]),
    ],
)
def test_a_resume_describes_its_machine(tmp_path, machine, later, processes, resumed_on):
    extra = f"{later}\nresume: from step 200, on {processes} processes"
    source = f'{SOURCE}"""\n{later}\nCPU: Other, 9 cores\n"""\n'
    path = our_log(tmp_path / "a.txt", machine=machine, extra=extra, source=source)
    log = parse_log(path)
    assert log.incomplete == ""
    assert log.hardware == (H100 if machine.startswith(SMI) else "AMD EPYC with AVX2, 2 cores")
    assert log.resumed_on == resumed_on


WRONG_TIME = "its train_time isn't that of its steps: they took step_avg each"


def test_what_is_not_one_whole_run(tmp_path):
    path = our_log(tmp_path / "a.txt")
    text = path.read_text()
    last = text.index("step:600/600 val_loss")
    for changed, why in [
        (text, ""),
        (text[:last], "no final validation"),
        (text.split("step:400/600 val")[0], "stopped at step 400 of 600"),
        (text.replace("val_loss:1.4900", "val_loss:nan"), "final val_loss nan"),
        (text.replace("train_time:100000ms", "train_time:0ms"), "no training time"),
        (text[:last] + "step:600/600 val_loss:1.49\n", "no training time"),
        (text.replace("train_time:50000ms", "train_time:90000ms"), "its clock goes back"),
        (text.replace("step_avg:166.67ms", "step_avg:nanms"), ""),
        (text.replace(" step_avg:166.67ms", ""), ""),
        (text.replace("train_time:100000ms", "train_time:900000ms"), WRONG_TIME),
        (text.replace("step_avg:166.67ms", "step_avg:1666.7ms"), WRONG_TIME),
        (text[text.index("step:0/600") :], "no source above the run"),
    ]:
        path.write_text(changed)
        assert parse_log(path).incomplete == why


VALIDATIONS = re.compile("step:.* val_loss:.*\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run,
        lambda run: VALIDATIONS.sub(r"\g<0>\g<0>", run),  # each printed twice
        lambda run: run + "".join(VALIDATIONS.findall(run)[-3:]),  # again below the run
        lambda run: "".join(VALIDATIONS.findall(run)),
    ],
)
def test_several_runs_in_one_file(tmp_path, change):
    """Each is read as if it had a file of its own, also one that was stopped."""
    logs = []
    parts = []
    for i in range(3):
        path = our_log(tmp_path / f"{i}.txt", loss=1.48 + i / 100, time_ms=90_000 + i)
        if i == 1:
            path.write_text(path.read_text().split("step:400/600 train")[0])
        logs.append(parse_log(path))
        header, steps = path.read_text().split("\nstep:0/")
        parts.append(change(f"step:0/{steps}"))
    path = tmp_path / "all.txt"
    path.write_text("\n".join([header, *parts]))
    found = read_logs([path])
    assert [log.name for log in found] == ["all#1", "all#2", "all#3"]
    for ours, log in zip(found, logs):
        assert (ours.sources, ours.hardware) == (log.sources, log.hardware)
        assert ours.validations == log.validations
        assert ours.incomplete == log.incomplete
    with pytest.raises(UserError, match="all.txt: 3 runs in one file"):
        parse_log(path)


def test_what_is_ignored_in_a_folder_is_named(tmp_path, capsys):
    our_log(tmp_path / "runs" / "a.txt")
    for name in ("README.md", "curves.png", "b.txt"):
        (tmp_path / "runs" / name).touch()
    read_logs([tmp_path / "runs"])
    said = capsys.readouterr().err
    assert said == f"{tmp_path}/runs: ignored, because no losses are in them: b.txt\n"


def test_what_is_no_log(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "in" / "a.txt").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.log").write_text("bpb: 1")
    setting = (
        b'hyperparameters: {"val_loss_every": 41, "seed": 0}\n'  # the run ended before its first step
    )
    for name, content in [
        ("zeros", b"\x89PNG\r\n\0"),
        ("source", SOURCE.encode()),
        ("setting", setting),
    ]:
        (tmp_path / name).write_bytes(content)
    for name, why in [
        ("missing", "No such file or directory: 'missing'"),
        ("empty", "no log in this folder"),
        ("in", "Is a directory: 'in/a.txt'"),
        (
            "other",
            "other/a.log: no line has a number for val_loss, or step:S/N; it has lines like 'bpb: 1'",
        ),
        ("zeros", "binary"),
        ("setting", "no line has a number for val_loss, or step:S/N"),
        ("source", "no line has a number for val_loss, or step:S/N; it has lines like 'import torch'"),
    ]:
        done = run("verify", name, cwd=tmp_path)
        assert_one_line(done.returncode, done.stderr.decode(), why)
        assert name in done.stderr.decode()


def test_a_log_cut_anywhere_is_never_complete(tmp_path):
    data = our_log(tmp_path / "a.txt").read_bytes()
    last_validation = data.index(b"step:600/600 val_loss")
    enough = data.index(b"ms", last_validation) + 2  # the end of its time
    path = tmp_path / "cut.txt"
    for size in [*range(0, last_validation, 29), *range(last_validation, len(data))]:
        path.write_bytes(data[:size])
        try:
            log = parse_log(path)
        except UserError:
            assert size < data.index(b"step:0/600") + 12
            continue
        assert bool(log.incomplete) == (size < enough), size


STRANGE = [
    b"9" * 5000,
    b"nan",
    b"-1",
    b"1e999",
    b"\r",
    LINE.encode(),
    b"\nresume: from step 9",
    b"[[" * 9,
    b"NaN",
    b"{}",
    b"val_loss:",
]
# Names that mean something else in a stranger's recipe
NAMES = st.sampled_from(["seed", "windows", "batch_tokens", "val_tokens", "target_val_loss"])
SETTINGS = st.dictionaries(NAMES, st.sampled_from([[7], "7", 7, {}, None, 7.5]), max_size=2)
RANDOM_BYTES = st.binary(max_size=30).filter(lambda b: b"\0" not in b)
PIECE = st.one_of(RANDOM_BYTES, st.sampled_from(STRANGE))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_log_raises_nothing_else(tmp_path, data):
    """Damages a log, perhaps of a stranger's recipe, in one to five places. Reading, judging and drawing it
    must not raise anything."""
    whole = our_log(tmp_path / "a.txt", **data.draw(SETTINGS))
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, len(content)))
        piece = data.draw(PIECE)
        length = data.draw(st.integers(0, 400))
        content[start : start + length] = piece
    (tmp_path / "b.txt").write_bytes(content)
    logs = [parse_log(whole)]
    with contextlib.suppress(UserError):
        logs += parse_trials(tmp_path / "b.txt")
    verdict = rules.judge_runs(logs, prior=logs[:1])
    list(map(tables.table_row, logs))
    tables.summary_lines(verdict)
    with contextlib.suppress(UserError):  # no validation in common
        curves.curve(logs, "time")
