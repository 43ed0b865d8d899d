"""
Tests of the tools for records: they parse, judge, replay, plot and file logs.

The tests write the logs themselves, in our format and in those of modded-nanogpt. They compare
statistics with closed forms, with scipy, and with integrals of the densities.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from scipy import integrate, stats

from tools.records import pages as record_pages
from tools.common import FileError, LogError, run_command, write_file
from tools.logs import Validation, find_logs, parse_log, read_logs
from tools.records.compiler import compiler_settings
from tools.records import plot
from tools.records import replay
from tools.records import submit
import train_gpt
from tools.records import verify
from tests.util import ROOT

RECORDS = ROOT / "records"
SOURCE = """\
import torch

val_tokens: int = 327_680
model = torch.compile(model, dynamic=False)
"naïve"
"""
LINE = "=" * 100
SMI_ROW = """\
|   {i}  NVIDIA H100 80GB HBM3          On  | 00000000:1{i}:00.0 Off |                    0 |
| N/A   38C    P0              75W / 700W |      3MiB / 81559MiB |      0%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+"""
SMI_HEAD = (
    "| NVIDIA-SMI 535.183.06             Driver Version: 535.183.06   CUDA Version: 12.2     |"
)
SMI = "\n".join([SMI_HEAD, *(SMI_ROW.format(i=i) for i in range(8))])
# Training times in ms. The runs of make_runs() take about 100 s by default.
FASTER = (90_000, 90_300, 89_900, 90_200)


def our_log(
    path: Path,
    loss=1.49,
    time_ms=100_000,
    seed=0,
    source=SOURCE,
    steps=600,
    cpu="AMD EPYC, 2 cores",
    instruction_sets="avx2 fma",
    extra="",
    machine=None,
    every=100,
    **hyperparameters,
) -> Path:
    """
    Writes a log as train_gpt.py does.

    `time_ms` is the training time. The run validates `every` so many steps. `extra` is a line
    between two steps.
    """
    facts = dict(
        track="tiny",
        seed=seed,
        val_tokens=327_680,
        batch_tokens=4096,
        target_val_loss=1.5,
    )
    facts |= hyperparameters
    if machine is None:
        machine = (
            f"CPU: {cpu}, 2 threads a process, instruction sets: {instruction_sets}\n"
            "1 process on cpu"
        )
    lines = [
        source,
        LINE,
        "Running Python 3.11.7 (main) [GCC 12.2.0]",
        "Running PyTorch 2.13.0+cpu compiled for CUDA None",
        machine,
        LINE,
        f"hyperparameters: {json.dumps(facts)}",
    ]
    for step in range(0, steps + 1, every):
        at = time_ms * step / steps
        value = loss + 4 * (1 - step / steps) ** 3
        timing = f"train_time:{at:.0f}ms step_avg:{at / max(step, 1):.2f}ms"
        if step:
            lines.append(f"step:{step}/{steps} {timing}")
        lines.append(f"step:{step}/{steps} val_loss:{value:.4f} {timing}")
        if extra and step == 200:
            lines.append(extra)
    lines += ["peak memory allocated: 612 MiB reserved: 700 MiB", "target 1.5 met after 100.0 s"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("\n".join(lines).encode() + b"\n")
    return path


def make_runs(
    folder: Path,
    losses=(1.488, 1.491, 1.486, 1.489),
    times=(100_000, 100_400, 99_700, 100_100),
    **kwargs,
) -> Path:
    """
    Writes a folder of our logs, with seeds 0, 1, ...

    The files have names like real ones, and as many validations as a record needs.
    """
    names = random.Random(str(folder))
    for seed, (loss, time_ms) in enumerate(zip(losses, times)):
        name = uuid.UUID(int=names.getrandbits(128))
        settings = dict(loss=loss, time_ms=time_ms, seed=seed, every=50)
        our_log(folder / f"{name}.txt", **settings | kwargs)
    return folder


MAINS = dict(verify=verify.main, replay=replay.main, plot=plot.main, submit=submit.main)


def run(script: str, *arguments, cwd="/") -> subprocess.CompletedProcess:
    """
    Runs a command in this process, which is much faster than starting a new one.

    An exception fails the test. A user would see a traceback.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    main = MAINS[script.removesuffix(".py")]
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            run_command(main)
    return subprocess.CompletedProcess(
        arguments,
        end.value.code,
        out.buffer.getvalue(),
        err.buffer.getvalue(),
    )


def judged(*paths, **kwargs) -> verify.Verdict:
    logs, errors = read_logs(paths)
    assert not errors
    return verify.judge(logs, **kwargs)


def judged_against(prior, *paths, **kwargs) -> verify.Verdict:
    """Like judged(), but compares with the runs in the folder `prior`."""
    prior_logs, _ = read_logs([prior])
    return judged(*paths, prior=prior_logs, **kwargs)


def unwrapped(output: bytes) -> str:
    """A command's output with single spaces instead of line breaks."""
    return " ".join(output.decode().split())


def has_reason(words: str, *paths, **kwargs) -> bool:
    """Whether judged() gives a reason with these words."""
    return any(words in reason for reason in judged(*paths, **kwargs).reasons)


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


# -----------------------------------------------------------------------------
# Parsing
def test_our_log(tmp_path):
    log = parse_log(our_log(tmp_path / "a.txt", loss=1.4912, time_ms=90_000, seed=7))
    assert log.source == SOURCE.encode()
    assert log.track == "tiny"
    assert log.target == 1.5
    assert log.val_tokens == 327_680
    assert log.step_tokens == [4096]
    assert log.hardware == "AMD EPYC with AVX2, 2 cores"
    assert log.torch == "2.13.0+cpu"
    assert log.peak_memory_mib == 612
    assert log.last_step == 600
    assert log.num_steps == 600
    assert log.incomplete == ""
    assert log.forced is False
    assert [v.step for v in log.validations] == [0, 100, 200, 300, 400, 500, 600]
    assert log.final == Validation(600, 1.4912, 90_000, 150.0)


# Logs of modded-nanogpt, each with what the parser must find in it:
# final loss, training time in ms, step_avg, source, hardware, torch
FIELD = {
    "opens with a separator, train_loss lines, nan, no peak memory": (
        f"{LINE}\n"
        "batch_size : int = 8*64 # sequences\n"
        "sequence_length : int = 1024 # tokens\n"
        "val_tokens : int = 10485760 # n\n"
        f"{LINE}\n"
        "Running pytorch 2.5.0+cu124 compiled for CUDA 12.4\n"
        "nvidia-smi:\n"
        f"{SMI}\n\n"
        f"{LINE}\n"
        "step:0/12 val_loss:10.8258 train_time:0ms step_avg:nanms\n"
        "step:1/12 train_loss:10.8258 train_time:31613ms step_avg:nanms\n"
        "step:12/12 train_loss:3.2364 train_time:264ms step_avg:132.00ms\n"
        "step:12/12 val_loss:3.2751 train_time:271ms step_avg:135.5ms\n",
        3.2751,
        271,
        135.5,
        b"batch_size : int = 8*64 # sequences\nsequence_length : int = 1024 # tokens\n"
        b"val_tokens : int = 10485760 # n\n",
        "8x NVIDIA H100 80GB HBM3",
        "2.5.0+cu124",
    ),
    "more digits, times in seconds, other numbers in between, GPUs in one line": (
        f"val_tokens = 20 * 524288\nbatch_size = 8 * 64 * 1024\n\n{LINE}\n"
        "Running PyTorch 2.9.0+cu128 compiled for CUDA 12.8 on NVIDIA H200 with world_size 4\n"
        f"{LINE}\n"
        "step:0/3200 val_loss:10.82584 train_time:0.000s step_avg:nanms\n"
        "readout step:7 alpha:0.1 val_loss:1.0\n"
        "step:3200/3200 val_loss:3.278901 val_ema_loss:3.3 "
        "train_time:1053.829s step_avg:329.32ms\n",
        3.278901,
        1_053_829,
        329.32,
        b"val_tokens = 20 * 524288\nbatch_size = 8 * 64 * 1024\n",
        "4x NVIDIA H200",
        "2.9.0+cu128",
    ),
    "today's, lines in between, one step average": (
        f"val_tokens: int = 10485760 # how many\ntrain_seq_len = 48*1024\n# ====\n\n{LINE}\n"
        "Running Python 3.12.7 (main) [GCC 13.2.0]\n"
        "Running PyTorch 2.8.0.dev20250524+cu126 compiled for CUDA 12.6\n"
        f"{SMI}\n\n"
        f"{LINE}\n"
        "Created 22 gradient buckets\n"
        "Bucket 0: 1 params, 147.4 MB\n"
        "step:1770/1770 train_time:178618ms step_avg:100.91ms\n"
        "step:1770/1770 val_loss:3.2782 train_time:178723ms step_avg:100.97ms\n"
        "peak memory allocated: 30724 MiB reserved: 4 MiB\n",
        3.2782,
        178_723,
        100.97,
        b"val_tokens: int = 10485760 # how many\ntrain_seq_len = 48*1024\n# ====\n",
        "8x NVIDIA H100 80GB HBM3",
        "2.8.0.dev20250524+cu126",
    ),
}


@pytest.mark.parametrize("kind", FIELD)
def test_logs_of_the_field(tmp_path, kind):
    text, loss, train_time, step_avg, source, hardware, torch = FIELD[kind]
    path = tmp_path / "run.log"
    path.write_text(text)
    log = parse_log(path)
    assert log.incomplete == ""
    assert log.hyperparameters == {}
    assert log.target == 3.28
    assert log.final.val_loss == loss
    assert log.final.train_time_ms == pytest.approx(train_time)
    assert log.final.step_avg_ms == step_avg
    assert log.source == source
    assert log.hardware == hardware
    assert log.torch == torch
    assert log.val_tokens == 10_485_760
    sequence = 48 if "1770" in text else 64
    assert log.step_tokens == [8 * sequence * 1024]
    assert [p.name for p in find_logs([tmp_path])[0]] == ["run.log"]


@pytest.mark.parametrize(
    "source, tokens",
    [
        ("train_batch_size: int = 2048 * 24 * 8", [393_216]),
        ("batch_size = 8*64*1024 # in tokens", [524_288]),
        ("batch_size = 8\nsequence_length = 64*1024", [524_288]),
        ("seq_len = 48*1024 # of each process\nval_seq_len = 4*64*1024", [393_216]),
        ("train_seq_len=64*1024,\nmax_seq_len = 65536", [524_288]),
        ("def load(files, batch_size: int, seq_len=1024): pass\nbatch_size = 524_288", [524_288]),
        (
            "train_bs_schedule: tuple = (8 * 2048 * 8, 16 * 2048 * 8, 24 * 2048 * 8)",
            [131_072, 262_144, 393_216],
        ),
        ("train_bs_schedule = [\n    131072,\n    262144]", [131_072, 262_144]),
        (
            "stages = [Stage(batch_size=8 * 2048 * 8, lr=1),\n"
            " Stage(lr=2, batch_size=16 * 2048 * 8)]",
            [131_072, 262_144],
        ),
        ("batch_size = 512", []),  # sequences of unknown length
        ("def load(files, seq_len=1024): pass\nbatch_size = int(os.environ['BATCH'])", []),
        ("train_batch_size = world_size * 65536", []),
        ("my_batch_size = 524288\nbatch_size_of = 524288", []),
    ],
)
def test_tokens_of_a_step(tmp_path, source, tokens):
    path = our_log(tmp_path / "a.txt", source=source)
    path.write_text(re.sub("hyperparameters: .*\n", "", path.read_text()))
    log = parse_log(path)
    assert log.step_tokens == tokens
    done = run("plot", path, "-o", tmp_path / "x.png", "--x", "tokens")
    if len(tokens) == 1:
        assert done.returncode == 0
        return
    assert done.returncode == 2
    what = "uses a varying number of" if tokens else "doesn't say how many"
    assert f"{what} tokens per step; use" in done.stderr.decode()


DASHES = "-" * 40
KERNELS = ["\nimport triton\n\nbatch_size = 99 * 65536\n", "def g(): pass"]


def heading(name: str) -> str:
    return f"\n\n{DASHES}\n# {name}\n{DASHES}\n\n"


# How a log can join a script with one or two more files, and the names that these get
APPENDED = {
    "named, between dashes": (
        [heading("kernels.py"), heading("more/kernels_2.py")],
        ["kernels.py", "more/kernels_2.py"],
    ),
    "below another line of =": ([f"\n{LINE}\n"] * 2, ["source_2.py", "source_3.py"]),
    "both": ([heading("x.py"), f"\n{LINE}\n"], ["x.py", "source_3.py"]),
}


@pytest.mark.parametrize("way", APPENDED)
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("ending", ["\n", ""])
def test_several_sources_in_one_log(tmp_path, way, files, ending):
    joins, names = APPENDED[way]
    script = f"{SOURCE}batch_size = 65536{ending}"
    text = script + "".join(join + text for join, text in zip(joins, KERNELS[:files]))
    path = our_log(tmp_path / "a.txt", source=text)
    log = parse_log(path)
    alone = parse_log(our_log(tmp_path / "b.txt", source=script))
    texts = [s.encode() for s in (script, *KERNELS[:files])]
    assert log.sources == list(zip(["train_gpt.py", *names], texts))
    assert alone.sources == [("train_gpt.py", script.encode())]
    for part in ("run", "validations", "hardware", "torch"):
        assert getattr(log, part) == getattr(alone, part)
    assert log.constants("batch_size") == [65_536]

    done = run("replay", path)
    assert done.returncode == 0
    assert done.stdout == script.encode()
    said = f"this is only train_gpt.py; -o FOLDER also writes {', '.join(names[:files])}\n"
    assert done.stderr.decode() == said
    assert run("replay", tmp_path / "b.txt").stderr == b""

    changed = our_log(
        tmp_path / "c.txt",
        source=text.replace("import triton", "import triton as tr"),
    )
    lines = run("replay", path, "--diff", changed).stdout.decode().splitlines()
    difference = [line for line in lines[2:] if line[0] in "+-"]
    assert difference == ["-import triton", "+import triton as tr"]
    assert has_reason("the logs have 2 different sources, but a record needs one", path, changed, same_ml=True)
    our_log(changed, source=text.replace("import triton", "torch._inductor.config.x = 1"))
    reason = f"not allowed: torch._inductor.config in source line 2 of {names[0]}"
    assert reason in judged(changed).reasons


def test_short_separator_but_not_a_heading_in_the_source(tmp_path):
    underline = "=" * 30
    source = f'"""\nTitle\n{underline}\n"""\n'
    path = our_log(tmp_path / "a.txt", source=source)
    # The log has longer separators, so the underline of the title isn't one
    assert parse_log(path).source.decode() == source

    text = path.read_text(encoding="utf-8")
    text = text.replace(LINE, "=" * 40)
    text = text.replace(f'{underline}\n"""', '"""')
    path = tmp_path / "b.txt"
    path.write_text(text, encoding="utf-8")
    assert parse_log(path).source == b'"""\nTitle\n"""\n'


def test_resumed_runs(tmp_path):
    whole = parse_log(our_log(tmp_path / "a.txt"))
    text = (tmp_path / "a.txt").read_text()
    path = tmp_path / "b.txt"

    def parse(content):
        path.write_text(content)
        return parse_log(path)

    # The run was killed in the middle of a line after step 300, and resumed from step 100. It did
    # steps 200 and 300 twice, and the second time counts.
    cut = text.index("step:400/600 train_time")
    again = text[text.index("step:200/600 train_time") :]
    wrong = text[:cut].replace("step:300/600 val_loss:1.", "step:300/600 val_loss:9.")
    log = parse(wrong + "step:400/600 train_ti\nresume: from step 100\n" + again)
    assert log.validations == whole.validations
    assert not log.incomplete
    assert not log.forced

    # A resumed run may print the validation at the step of its checkpoint again
    validation_again = text[text.index("step:200/600 val") :]
    log = parse(text[:cut] + "resume: from step 200\n" + validation_again)
    assert log.validations == whole.validations

    log = parse(text[:cut] + "resume: from step 200, resume_force\n" + again)
    assert log.forced
    assert has_reason("force", path, same_ml=True)
    log = parse(text[:cut] + again)
    assert log.incomplete == "several runs in one file"
    log = parse(text + "resume: from step 500\nstep:501/600 train_time:1ms step_avg:1ms\n")
    assert log.incomplete == "stopped at step 501 of 600"


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\x89PNG\r\n\0\0\0", "binary"),
        (SOURCE.encode(), "no line"),
        (SOURCE.encode() + LINE.encode() + b"\nCPU: x, 2 cores\n", "no line"),
        (b"step:9/", "no line"),
        (b"\xff\xfe" * 1000, "no line"),
        (LINE.encode() * 3, "no line"),
    ],
)
def test_what_is_no_log(tmp_path, content, why):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(LogError, match=why) as error:
        parse_log(tmp_path / "a.txt")
    assert "\n" not in str(error.value)
    assert "a.txt" in str(error.value)
    done = run("verify", tmp_path / "a.txt")
    assert done.returncode == 2
    assert len(done.stderr.decode().strip().splitlines()) == 1


def test_paths_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "in" / "a.txt").mkdir(parents=True)
    for path, why in [
        ("missing.txt", "no such file"),
        ("empty", "no .txt or .log file"),
        ("in", "not a file"),
    ]:
        logs, errors = read_logs([tmp_path / path])
        assert logs == []
        assert len(errors) == 1
        assert why in errors[0]
        assert run("verify", path, cwd=tmp_path).returncode == 2
        assert run("replay", path, cwd=tmp_path).returncode == 2
        assert run("plot", path, "-o", "x.png", cwd=tmp_path).returncode == 2


def test_a_log_cut_anywhere_is_never_complete(tmp_path):
    data = our_log(tmp_path / "a.txt").read_bytes()
    last_validation = data.index(b"step:600/600 val_loss")
    step_avg = data.index(b"step_avg", last_validation)
    enough = data.index(b"ms", step_avg) + 2  # the end of that line
    path = tmp_path / "cut.txt"
    for size in [*range(0, len(data), 7), enough - 1, enough, len(data)]:
        path.write_bytes(data[:size])
        try:
            log = parse_log(path)
        except LogError:
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
RANDOM_BYTES = st.binary(max_size=30).filter(lambda b: b"\0" not in b)
PIECE = st.one_of(RANDOM_BYTES, st.sampled_from(STRANGE))


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_damaged_logs_never_raise_anything_else(tmp_path, data):
    whole = tmp_path / "a.txt"
    if not whole.exists():
        our_log(whole)
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, len(content)))
        piece = data.draw(PIECE)
        length = data.draw(st.integers(0, 400))
        content[start : start + length] = piece
    (tmp_path / "b.txt").write_bytes(content)
    logs, errors = read_logs([tmp_path / "b.txt", whole])
    assert len(logs) + len(errors) == 2
    verify.judge(logs, prior=logs, same_ml=True)
    verdict = verify.judge(logs, prior=logs[:1])
    json.loads(verify.as_json(logs, verdict, errors))
    verify.table_rows(logs)
    verify.summary_lines(verdict)


def test_20_mb_in_a_second(tmp_path):
    lines = [SOURCE * 1000, LINE, "CPU: x, 2 cores", LINE]
    for step in range(400_001):
        loss = f"val_loss:4.{step:06d} " if step % 125 == 0 else ""
        lines.append(f"step:{step}/400000 {loss}train_time:{step * 97}ms step_avg:97.44ms")
    path = tmp_path / "a.txt"
    path.write_text("\n".join(lines) + "\n")
    assert path.stat().st_size > 20e6
    seconds = []
    for _ in range(3):  # the shortest processor time of three: other processes disturb it less
        start = time.process_time()
        log = parse_log(path)
        seconds.append(time.process_time() - start)
    assert len(log.validations) == 3201
    assert not log.incomplete
    assert min(seconds) < 1


# -----------------------------------------------------------------------------
# Writing


def test_files_are_replaced_also_behind_links(tmp_path):
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    write_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    new = tmp_path / "new"
    write_file(new, b"text")
    assert new.read_bytes() == b"text"
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["folder", "link", "new", "target"]


def test_pipes_are_written_into(tmp_path):
    """--json /dev/stdout | cat shows the file. A pipe stays a pipe. (The links and the pipe are this test's
    own, so that a mistake can't damage /dev.)"""
    link = tmp_path / "out"
    link.symlink_to("/dev/stdout")
    code = "import log_parsing, sys; write_file(sys.argv[1], b'text')"
    command = [sys.executable, "-c", code, str(link)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert shown.stdout == b"text" and link.is_symlink()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        write_file(pipe, b"text")
        assert reader.stdout.read() == b"text"
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", [".", "missing/file", "file/inside"])
def test_what_cannot_be_written_is_one_line(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError) as error:
        write_file(tmp_path / name, b"text")
    assert str(error.value).startswith(f"cannot write {tmp_path / name}: ")
    assert "\n" not in str(error.value)


# -----------------------------------------------------------------------------
# Replay
@pytest.mark.parametrize(
    "source", [SOURCE, "x = 1", "x = 1\r\n\r\ny = 2\r\n", "\n\n# ü\n\n\n", f"'{LINE}'\n# {LINE}\n"]
)
def test_replay_is_byte_for_byte(tmp_path, source):
    path = our_log(tmp_path / "a.txt", source=source)
    assert run("replay", path).stdout == source.encode()
    assert run("replay", "a.txt", "-o", "old", cwd=tmp_path).returncode == 0
    assert (tmp_path / "old/train_gpt.py").read_bytes() == source.encode()


def test_a_recipe_has_two_sources(tmp_path):
    """The log of a recipe begins with the heading of the recipe, then of train_gpt.py."""
    sources = {
        "recipes/mine.py": "from train_gpt import HELLO\nval_tokens = 327_680\nprint(HELLO)\n",
        "train_gpt.py": "HELLO = 'hello'\n",
    }

    def recipe(sources):
        return "".join(heading(name) + text for name, text in sources.items())

    runs = make_runs(tmp_path / "runs", source=recipe(sources))
    path = min(runs.glob("*.txt"), key=lambda path: parse_log(path).hyperparameters["seed"])
    log = parse_log(path)
    assert log.sources == [(name, text.encode()) for name, text in sources.items()]
    assert judged(runs).reasons == []

    # All files come back, and the printed command runs them
    done = run("replay", path, "-o", "my old", cwd=tmp_path)
    assert everything(tmp_path / "my old") == dict(log.sources)
    _, command = done.stdout.decode().split(": ")
    assert command == "PYTHONPATH='my old' python 'my old/recipes/mine.py' --track tiny --seed 0\n"
    variables = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ran = subprocess.run(command, shell=True, cwd=tmp_path, env=variables, capture_output=True)
    assert ran.stdout == b"hello\n", ran.stderr.decode()
    again = run("replay", path, "-o", "my old", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == b"error: my old isn't empty; choose a new folder\n"

    # Another second source is seen, also if only its name differs
    changed = recipe(sources | {"train_gpt.py": "HELLO = 'bye'\n"})
    renamed = recipe(sources).replace("# train_gpt.py", "# core.py")
    for source, added in [(changed, ["+HELLO = 'bye'"]), (renamed, ["+HELLO = 'hello'"])]:
        other = our_log(tmp_path / "other.txt", seed=9, source=source)
        assert has_reason("the logs have 2 different sources", runs, other)
        lines = run("replay", path, "--diff", other).stdout.decode().splitlines()
        assert lines[0] == f"--- {path.name}: train_gpt.py"
        assert [line for line in lines if re.match(r"\+[^+]", line)] == added


def test_replay_writes_nothing_outside_of_its_folder(tmp_path):
    """Nor does it write over a file: names come from a log, perhaps a stranger's."""
    (tmp_path / "in").mkdir()
    kept = tmp_path / "x.py"
    kept.write_bytes(b"mine")
    for name in ("../x.py", "a/../../x.py", "../new.py", str(kept), str(tmp_path / "new.py")):
        path = our_log(tmp_path / "in/a.txt", source=f"x = 1\n{heading(name)}y = 2\n")
        before = everything(tmp_path)
        done = run("replay", path, "-o", tmp_path / "old")
        assert done.returncode == 2
        assert done.stderr.decode() == (
            f"error: {path}: contains a source named {name}, outside of the folder\n"
        )
        assert everything(tmp_path) == before
    for number, name in enumerate(("train_gpt.py", "./train_gpt.py", "train_gpt.py/x.py", ".")):
        path = our_log(tmp_path / "in/a.txt", source=f"x = 1\n{heading(name)}y = 2\n")
        folder = tmp_path / f"old_{number}"
        done = run("replay", path, "-o", folder)
        assert done.returncode == 2
        assert b"cannot write" in done.stderr
        assert everything(folder) == {"train_gpt.py": b"x = 1\n"}


def test_replay_diff(tmp_path):
    changed = SOURCE.replace("import torch", "import torch as t")
    a = our_log(tmp_path / "a.txt")
    b = our_log(tmp_path / "b.txt", source=changed)
    lines = run("replay", a, "--diff", b).stdout.decode().splitlines()
    assert lines[:2] == ["--- a.txt: train_gpt.py", "+++ b.txt: train_gpt.py"]
    assert "-import torch" in lines
    assert "+import torch as t" in lines
    same = run("replay", a, "--diff", a)
    assert same.returncode == 0
    assert same.stdout == b""
    assert b"same" in same.stderr
    unwritable = run("replay", a, "-o", a / "old")
    assert unwritable.returncode == 2
    assert b"cannot write" in unwritable.stderr


# -----------------------------------------------------------------------------
# Statistics
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
    assert verify.p_below([3.276, 3.277, 3.278], 3.28) == pytest.approx(by_hand, rel=1e-6)
    # Two runs a and b have one degree of freedom, and t = (mean - target) / (|a - b| / 2).
    # Here it is -1, and atan(-1) = -pi / 4.
    assert verify.p_below([3.27, 3.28], 3.28) == pytest.approx(0.25, rel=1e-6)
    assert verify.p_below([3.28, 3.29], 3.28) == pytest.approx(0.75, rel=1e-6)
    assert verify.p_below([3.2], 3.28) is None
    assert verify.p_below([3.2, 3.2, 3.2], 3.28) is None


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


# -----------------------------------------------------------------------------
# Rules
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
    assert "damaged" not in verify.out_of_bounds(log)
    for i, change in enumerate(DAMAGED_WINDOWS):
        runs = make_runs(tmp_path / str(i), **good | change)
        found = [reason for reason in judged(runs).reasons if "damaged" in reason]
        assert len(found) == 1
        done = run("verify", runs)
        assert done.returncode == 1
        assert done.stderr == b""
        assert done.stdout.decode().count("all runs: the hyperparameters are damaged: windows ") == 1
    path = our_log(tmp_path / "no block.txt", track=track, windows=[3])
    reason = verify.out_of_bounds(parse_log(path))
    assert reason == (
        "the hyperparameters are damaged: windows [3] with window_block None; make the run again"
    )


@pytest.mark.parametrize("track", ["mini", "fineweb"])
def test_a_track_has_its_own_data_and_target(tmp_path, track):
    hyperparameters = dataclasses.asdict(train_gpt.TRACKS[track])
    hyperparameters.pop("seed")
    target = hyperparameters["target_val_loss"]
    for name, value in verify.FIXED[track].items():
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
        assert verify.p_above(losses, prior) == pytest.approx(1 - t_cdf(t, 2), rel=1e-6)


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
        assert reasons[0] == reason + verify.TEST_LOSSES


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
    assert reason == f"550 steps, but the prior record has 600; {verify.TEST_LOSSES}"
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


def compiler_line(
    flags="-march=native -mtune=icelake-server",
    compiled="yes",
    name="g++ (Debian 12.2.0-14+deb12u1) 12.2.0",
):
    """The lines on the machine and the compiler in the header of a log."""
    return (
        "CPU: AMD EPYC, 2 cores, 2 threads a process, instruction sets: avx2 fma\n"
        "1 process on cpu\n"
        f"Compiler: {name}; flags: {flags}; model compiled: {compiled}"
    )


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
        assert not verify.not_compiled(log)
        for _, source in log.sources:
            assert not compiler_settings(source), log.path


# -----------------------------------------------------------------------------
# Plots
def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data[-8:-4] == b"IEND"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_curve(tmp_path):
    losses = [1.48, 1.5, 1.46]
    times = [100_000, 110_000, 120_000]
    logs, _ = read_logs([make_runs(tmp_path / "runs", losses, times)])
    for x, last in [("step", 600), ("time", 110), ("tokens", 600 * 4096 / 1e6)]:
        curve = plot.curve(logs, x)
        assert len(curve.x) == 13
        assert curve.x[0] == 0
        assert curve.x[-1] == pytest.approx(last)
        assert curve.mean[-1] == pytest.approx(1.48)
        assert curve.spread[-1] == pytest.approx(0.02)
    del logs[0].validations[2]  # a curve has only the steps that all runs share
    assert len(plot.curve(logs, "step").x) == 12


def test_plot_command(tmp_path):
    make_runs(tmp_path / "a b")
    make_runs(tmp_path / "other", losses=(1.51, 1.52))
    choices = [
        [],
        ["--smooth"],
        ["--x", "time", "--smooth"],
        ["--x", "tokens"],
        ["--target", "1.4"],
    ]
    for options in choices:
        done = run("plot", "a b", "Mine=other", "-o", "out.png", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        width, height = png_size(tmp_path / "out.png")
        assert width == 1200
        assert 500 < height < 900
        (tmp_path / "out.png").unlink()
    groups = plot.read_groups([str(tmp_path / "a b"), f"Mine={tmp_path / 'other'}"])
    assert {label: len(logs) for label, logs in groups.items()} == {"a b": 4, "Mine": 2}
    assert run("plot", "other", "-o", "out.pdf", cwd=tmp_path).returncode == 2
    assert run("plot", "other", "-o", "no/out.png", cwd=tmp_path).returncode == 2
    for target in ("nan", "inf", "-inf"):
        done = run("plot", "other", "-o", "out.png", f"--target={target}", cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.decode().endswith(f"error: --target {target}: must be a finite number\n")
    assert not list(tmp_path.glob("*out*"))


def test_plot_of_unusual_runs(tmp_path):
    text = FIELD["more digits, times in seconds, other numbers in between, GPUs in one line"][0]
    only_final = text.replace("step:0/3200", "nothing")
    (tmp_path / "b.txt").write_text(only_final)
    assert run("plot", "b.txt", "-o", "out.png", "--smooth", cwd=tmp_path).returncode == 0
    png_size(tmp_path / "out.png")
    (tmp_path / "c.txt").write_text(only_final.replace("val_loss", "loss"))
    assert b"no validation" in run("plot", "c.txt", "-o", "out.png", cwd=tmp_path).stderr


def drawn(patch, draw) -> "plot.plt.Figure":
    """The figure that `draw` would save."""
    figures = []

    def save_figure(figure, path):
        figure.canvas.draw()
        figures.append(figure)

    for module in (plot, record_pages):
        patch.setattr(module, "save_figure", save_figure)
    draw()
    plot.plt.close(figures[0])
    return figures[0]


@pytest.mark.parametrize(
    "times, scale",
    [((5_000, 600_000), "symlog"), ((59_000, 600_000), "symlog"), ((60_000, 600_000), "linear")],
)
def test_times_of_different_magnitude(tmp_path, monkeypatch, times, scale):
    groups = {}
    for t in times:
        path = our_log(tmp_path / f"{t}.txt", time_ms=t)
        groups[str(t)] = [parse_log(path)]

    def curves(x, **options):
        image = tmp_path / "x.png"
        return drawn(monkeypatch, lambda: plot.plot_curves(groups, image, x, **options))

    for x, expected in [("time", scale), ("step", "linear")]:
        figure = curves(x, smooth=True)
        assert [axes.get_xscale() for axes in figure.axes] == [expected, expected]
    if scale == "linear":
        return
    whole = curves("time").axes[0]

    def place(seconds):
        """Where a time is on the axis: 0 is the left edge, 1 the right edge."""
        pixels = whole.transData.transform((seconds, 1))
        return whole.transAxes.inverted().transform(pixels)[0]

    first = times[0] / 6000  # the first validation of the shorter run
    last = times[1] / 1000  # the end of the longer run
    # Equal factors are equally far apart
    decade = place(10 * first) - place(first)
    assert decade == pytest.approx(place(100 * first) - place(10 * first), rel=1e-3)
    # The curves start at the left edge, and the short run gets enough space
    assert place(0) == pytest.approx(0, abs=1e-6)
    assert place(first) > 0.05
    assert place(last) < 1
    assert place(times[0] / 1000) - place(0) > 0.2
    labels = [label.get_text() for label in whole.get_xticklabels()]
    assert labels[0] == "0"
    assert labels[-1] == "100"
    assert float(labels[1]) >= first


def test_leaderboard_within_a_month_counts_records(tmp_path, monkeypatch):
    def figure(*dates):
        records = []
        for n, date in enumerate(dates):
            log = parse_log(our_log(tmp_path / "a.txt", time_ms=90_000 - n))
            folder = tmp_path / f"{date}_R{n}"
            records.append(record_pages.Record(folder, [log], names[n], "", 1.5, False, ""))
        image = tmp_path / "x.png"
        return drawn(monkeypatch, lambda: record_pages.plot_leaderboard(records, image)).axes[0]

    names = [
        "r0",
        "the official model in miniature",
        "a name that is too long to stand in the picture",
    ]
    texts = [
        "#1 r0, 90.0 s",
        f"#2 {names[1]}, 90.0 s",
        "#3 a name that is too long to …, 90.0 s",
    ]
    cases = [
        (["2026-11-21"] * 3, "record, 2026-11-21"),
        (["2026-11-21"], "record, 2026-11-21"),
        (["2026-01-01", "2026-01-31"], "record, 2026-01-01 to 2026-01-31"),  # 30 days apart
    ]
    for dates, label in cases:
        axes = figure(*dates)
        numbers = list(range(1, len(dates) + 1))
        assert list(axes.lines[0].get_xdata()) == numbers
        assert [t.get_text() for t in axes.get_xticklabels()] == [f"#{n}" for n in numbers]
        assert axes.get_xlabel() == label
        assert [t.get_text() for t in axes.texts] == texts[: len(dates)]
    axes = figure("2026-01-01", "2026-02-01")
    assert list(axes.lines[0].get_xdata()) == [
        record_pages.day("2026-01-01"),
        record_pages.day("2026-02-01"),
    ]


# -----------------------------------------------------------------------------
# Filing records
@pytest.fixture
def root(tmp_path):
    """A records folder without records."""
    folder = tmp_path / "records"
    folder.mkdir()
    (folder / "record_history.csv").write_bytes((RECORDS / "record_history.csv").read_bytes())
    return folder


def file_it(root, logs, name, *options, date="2026-01-02", track="tiny"):
    return run(
        "submit",
        "--records_dir",
        root,
        "--track",
        track,
        "--name",
        name,
        "--date",
        date,
        *options,
        logs,
    )


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_records_are_filed(tmp_path, root):
    first = make_runs(tmp_path / "first")
    second = make_runs(
        tmp_path / "second",
        times=FASTER,
        source=SOURCE + "#\n",
        muon_lr=0.04,
    )
    assert file_it(root, first, "First | record").returncode == 0
    assert file_it(root, second, "faster!", date="2026-02-03").returncode == 0
    one = our_log(tmp_path / "one.txt", loss=1.495, time_ms=80_000, every=50, muon_lr=0.04)
    options = ["--same-ml", "--what", "Only *kernels*."]
    assert file_it(root, one, "kernel", *options, date="2026-02-04").returncode == 0
    folders = ["2026-01-02_FirstRecord", "2026-02-03_Faster", "2026-02-04_Kernel"]
    assert sorted(p.name for p in (root / "tiny").iterdir() if p.is_dir()) == folders
    assert not list(root.rglob(".*"))

    made = root / "tiny" / folders[1]
    for log in second.glob("*.txt"):
        assert (made / log.name).read_bytes() == log.read_bytes()
    text = (made / "README.md").read_text()
    for part in (
        "lines of source: 1 added, 0 removed",
        "`muon_lr`: 0.04 (before: not set)",
        "(../2026-01-02_FirstRecord/)",
        "saved: 9.950 s (9.95%)",
        "p-value: ",
        f"--against records/tiny/{folders[0]}",
    ):
        assert part in text
    text = (root / "tiny" / folders[2] / "README.md").read_text()
    assert "Only *kernels*." in text
    assert "waived" in text

    page = (root / "README.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| [123] \| \S+ \| \[", line)]
    assert [row.split(" | ")[1] for row in rows] == ["100.05", "90.10", "**80.00**"]
    assert "First \\| record" in rows[0]
    assert "waived" in rows[2]
    png_size(root / "history.png")
    png_size(root / "tiny" / "leaderboard.png")
    for name in folders:
        png_size(root / "tiny" / name / "curves.png")

    before = everything(root)
    assert run("submit", "--records_dir", root, "--regenerate").returncode == 0
    assert everything(root) == before  # the pictures have the same bytes, too


def test_records_are_refused(tmp_path, root):
    assert file_it(root, make_runs(tmp_path / "first"), "first").returncode == 0
    before = everything(root)
    faster = dict(times=FASTER)
    for name, kwargs, reason in [
        ("slow", dict(times=(101_000, 101_500, 101_200, 102_000)), "slower"),
        ("bad", dict(losses=(1.6, 1.7)), "p < 0.01"),
        ("target", dict(target_val_loss=1.6) | faster, "target is 1.5, not 1.6"),
        ("track", dict(track="fineweb") | faster, "of the track fineweb"),
        ("leak", dict(extra="saved to /home/jane/x.pt") | faster, "/home/jane/x.pt; run again with"),
        ("files", dict(train_files="/mnt/disk/x_*.bin") | faster, "absolute path: /mnt/disk/x_"),
        ("mac", dict(extra="see /Users/jane") | faster, "absolute path: /Users/jane"),
        ("root", dict(extra="'/root/x'") | faster, "absolute path: /root/x"),
        (
            "few",
            dict(every=100) | faster,
            "all runs: 6 validations after step 0, but a record needs 8; run it "
            "with --val_loss_every 75, which costs no training time",
        ),
        ("last", dict(every=600) | faster, "all runs: 1 validation after step 0"),
    ]:
        done = file_it(root, make_runs(tmp_path / name, **kwargs), name)
        output = done.stdout.decode()
        assert done.returncode == 1, (name, output)
        assert reason in unwrapped(done.stdout), (name, output)
        assert "REFUSED\n- " in output
    good = make_runs(tmp_path / "good", **faster)
    for name, options, reason in [
        ("good", ["--date", "2026-13-01"], "is not a date"),
        ("!", [], "--name"),
        ("first", [], "exists already"),
        ("good", ["--track", "../x"], "--track"),
        ("good", ["--target", "inf"], "finite"),
    ]:
        done = file_it(root, good, name, *options)
        assert done.returncode == 2, done.stderr.decode()
        assert reason in done.stderr.decode()
    assert file_it(root, tmp_path / "nothing", "x").returncode == 2
    assert everything(root) == before
    assert not list(root.rglob(".*"))


def test_only_logs_that_can_be_read_again_are_filed(tmp_path, root):
    """A record's logs end in .txt or .log, because the tools ignore all other files of a folder."""
    runs = make_runs(tmp_path / "runs")
    paths = sorted(runs.glob("*.txt"))
    for suffix in (".out", "", ".TXT"):
        other = paths[0].rename(runs / f"run{suffix}")
        options = ["--track", "tiny", "--name", "x", "--records_dir", root]
        before = everything(root)
        for logs in ([other, *paths[1:]], [other]):
            assert run("verify", *paths[1:], other).returncode == 0
            done = run("submit", *options, *logs)
            assert done.returncode == 2
            (line,) = done.stderr.decode().splitlines()
            assert line == f"error: {other}: rename it, so that its name ends in .txt or .log"
            assert everything(root) == before
        other.rename(paths[0])
    paths[0] = paths[0].rename(runs / "run.log")
    assert run("submit", *options, *paths).returncode == 0


@pytest.mark.parametrize(
    "steps, every, enough",
    [
        (600, 75, True),
        (600, 86, False),
        (600, 600, False),
        (607, 75, True),
        (5, 1, True),
        (5, 2, False),
    ],
)
def test_a_record_is_a_curve(tmp_path, steps, every, enough):
    path = our_log(tmp_path / "a.txt", steps=steps, every=every)
    assert bool(submit.too_few_validations(parse_log(path))) != enough
    # The rule is only for our logs, which have hyperparameters
    path.write_text(re.sub("hyperparameters: .*\n", "", path.read_text()))
    assert submit.too_few_validations(parse_log(path)) == ""


def test_records_without_a_curve_stay(tmp_path, root):
    """Records from before there was a rule on the number of validations stay valid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "FEWEST_VALIDATIONS", 0)
        assert file_it(root, make_runs(tmp_path / "first", every=300), "first").returncode == 0
    before = everything(root)
    assert run("submit", "--records_dir", root, "--regenerate").returncode == 0
    assert everything(root) == before
    faster = make_runs(tmp_path / "second", times=FASTER, source=SOURCE + "#\n")
    assert file_it(root, faster, "second", date="2026-02-03").returncode == 0


def test_names_of_this_machine_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(submit.socket, "gethostname", lambda: "node-17.example.org")
    monkeypatch.setattr(submit.getpass, "getuser", lambda: "jane")
    for line, leak in [
        ("on node-17 now", True),
        ("by jane.", True),
        ("janet", False),
        ("step-node-17", False),
    ]:
        log = parse_log(our_log(tmp_path / "a.txt", extra=line))
        assert bool(submit.leaks(log)) == leak, line
    # Names in the source are not checked
    path = our_log(tmp_path / "a.txt", source="# jane /home/jane\n")
    assert submit.leaks(parse_log(path)) == []


@pytest.mark.parametrize("host, user", [("mini", "jane"), ("node-17", "data")])
def test_a_machine_with_a_common_name_can_file(tmp_path, root, monkeypatch, host, user):
    """Its name, or its user's, is a word in every log."""
    monkeypatch.setattr(submit.socket, "gethostname", lambda: host)
    monkeypatch.setattr(submit.getpass, "getuser", lambda: user)
    settings = dict(train_files="data/mini/x_*.bin", times=FASTER)
    leaking = make_runs(tmp_path / "leaking", extra="by jane on node-17", **settings)
    done = file_it(root, leaking, "first")
    assert done.returncode == 1
    secret = "jane" if user == "jane" else "node-17"
    assert f"name of this machine or its user: {secret}; run again" in unwrapped(done.stdout)
    assert file_it(root, make_runs(tmp_path / "runs", **settings), "first").returncode == 0


@pytest.mark.parametrize(
    "name, public",
    [
        ("mini", True),
        ("main", True),
        ("threads", True),
        ("shakespeare", True),
        ("cuda", True),
        ("fineweb", True),
        ("H100", True),
        ("jane", False),
        ("adam", False),  # a word in the source, but not in the run
        ("max", False),
    ],
)
def test_which_names_are_public(tmp_path, monkeypatch, name, public):
    """Words in the logs of records, and the names of the track and its hardware."""
    monkeypatch.setattr(submit.socket, "gethostname", lambda: name)
    monkeypatch.setattr(submit.getpass, "getuser", lambda: "root")
    log = parse_log(
        our_log(
            tmp_path / "a.txt",
            source=f"# {name}\n",
            track="fineweb",
            machine=SMI + "\n8 processes on cuda",
            train_files=f"../{name}/x_*.bin",
        )
    )
    assert (submit.leaks(log, submit.published_logs()) == []) == public


def test_other_hardware_starts_its_own_line(tmp_path, root):
    assert file_it(root, make_runs(tmp_path / "first"), "first").returncode == 0
    gpus = make_runs(
        tmp_path / "gpus",
        times=(200_000, 201_000, 200_500, 200_700),
        machine=SMI + "\n8 processes on cuda",
    )
    done = file_it(root, gpus, "on gpus", date="2026-01-05")
    assert done.returncode == 0
    assert "no time to beat" in unwrapped(done.stdout)
    page = (root / "README.md").read_text()
    assert "**100.05**" in page
    assert "**200.55**" in page
    assert "8x NVIDIA H100 80GB HBM3" in page
    text = (root / "tiny/2026-01-05_OnGpus/README.md").read_text()
    assert "torchrun --standalone --nproc_per_node=8 old/train_gpt.py --track tiny" in text


def test_a_damaged_record_is_one_line(tmp_path, root):
    assert file_it(root, make_runs(tmp_path / "first"), "first").returncode == 0
    facts = root / "tiny/2026-01-02_First/record.json"
    for content in (b"", b"[]", b'{"name": "x"}', b"\xff"):
        facts.write_bytes(content)
        done = run("submit", "--records_dir", root, "--regenerate")
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert b"record.json" in done.stderr


def test_history_has_every_row(root):
    page = record_pages.readme(root)
    rows = [line for line in page.splitlines() if re.match(r"\| \d+ \| [\d.]+ \|", line)]
    csv_lines = (RECORDS / "record_history.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert len(rows) == len(csv_lines) == 91
    for row, line in zip(rows, csv_lines):
        first, second = line.split(",")[:2]
        assert row.startswith(f"| {first} | {second} | ")
    assert "**not** ours" in page


def test_what_stands_in_the_repository_is_fresh():
    hint = "stale: run `./run.sh submit --regenerate`"
    assert (RECORDS / "README.md").read_text(encoding="utf-8") == record_pages.readme(RECORDS), hint
    assert (RECORDS / "history.png").exists(), hint
    published = submit.published_logs()
    for track, records in record_pages.read_records(RECORDS).items():
        assert (RECORDS / track / "leaderboard.png").exists(), hint
        for record in records:
            prior = next((r for r in records if r.folder.name == record.against), None)
            text = (record.folder / "README.md").read_text(encoding="utf-8")
            expected = record_pages.record_readme(record, prior)
            assert text == expected, f"{record.folder.name} is {hint}"
            prior_logs = prior.logs if prior else []
            verdict = verify.judge(record.logs, record.target, prior_logs, record.same_ml)
            assert verdict.reasons == []
            others = [log for log in published if log.path.parent != record.folder]
            assert not any(submit.leaks(log, others) for log in record.logs)
