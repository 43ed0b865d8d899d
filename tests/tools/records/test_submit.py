"""Tests of submit and of the pages about records."""

import re

import pytest

from tools.logs import parse_log
from tools.records import pages as record_pages
from tools.records import rules, submit
from tests.tools.records.makers import (
    FASTER,
    RECORDS,
    SMI,
    SOURCE,
    everything,
    make_runs,
    our_log,
    png_size,
    run,
    unwrapped,
)


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
            verdict = rules.judge(record.logs, record.target, prior_logs, record.same_ml)
            assert verdict.reasons == []
            others = [log for log in published if log.path.parent != record.folder]
            assert not any(submit.leaks(log, others) for log in record.logs)
