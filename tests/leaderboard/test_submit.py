"""Tests of submit and of the pages about records."""

import re
import shutil
import time
from datetime import UTC, datetime, timedelta

import pytest

from judge.logs.read import parse_log
from judge.logs.taking_turns import started
from leaderboard import pages as record_pages
from leaderboard import make_runs as record_runs
from leaderboard import rules, submit
from tests.leaderboard.makers import (
    FASTER,
    RECORDS,
    SMI,
    everything,
    is_png,
    make_runs,
    our_log,
    run,
    unwrapped,
)
from tests.util import ROOT

FOLDERS = ["2026-01-02_FirstRecord", "2026-02-03_Faster", "2026-02-05_OnGpus"]


def submit_to(root, *words):
    """Submits, with another folder of records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "RECORDS", root)
        return run("submit", *words)


def file_it(root, logs, name, *options, date="2026-01-02"):
    words = ["--track", "tiny", "--name", name, "--date", date, *options]
    return submit_to(root, *(logs if isinstance(logs, list) else [logs]), *words)


@pytest.fixture(scope="module")
def filed(tmp_path_factory):
    """A records folder with three records. Tests don't change it."""
    folder = tmp_path_factory.mktemp("filed")
    root = folder / "records"
    first = make_runs(folder / "first")
    first_again = make_runs(folder / "first again", turn=1)
    second = make_runs(folder / "second", times=FASTER, turn=0, muon_lr=0.04)
    slower = dict(times=(200_000, 201_000, 200_500), machine=SMI + "\n8 processes on cuda")
    gpus = make_runs(folder / "gpus", **slower)
    one = our_log(folder / "one.out", 1.489, 200_700, 3, machine=slower["machine"], every=50)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "write_pages", lambda root: None)  # pictures take time
        done = [
            file_it(root, first, "First | record"),
            file_it(root, second, "faster!", "--against", first_again, date="2026-02-03"),
        ]
    # on other hardware, there is no time to beat
    gpus = [*gpus.glob("*.txt"), one]
    done.append(file_it(root, gpus, "on gpus", "--what", "Only *it*.", date="2026-02-05"))
    assert [d.returncode for d in done] == [0, 0, 0], done
    return root


def test_records_are_filed(filed):
    tiny = filed / "tiny"
    assert sorted(p.name for p in tiny.iterdir() if p.is_dir()) == FOLDERS
    assert not list(filed.rglob(".*"))
    for log in (filed.parent / "second").glob("*.txt"):
        assert (tiny / FOLDERS[1] / log.name).read_bytes() == log.read_bytes()
    assert (tiny / FOLDERS[2] / "one.txt").exists()  # a log of a folder ends in .txt or .log
    assert len(list((tiny / FOLDERS[1] / "before").iterdir())) == 4

    texts = [(tiny / name / "README.md").read_text() for name in FOLDERS]
    assert "The first record of the `tiny` track on this hardware." in texts[0]
    assert "(../2026-01-02_FirstRecord/)" in texts[1]
    assert "- saved: 9.950 s (9.95%)" in texts[1]
    assert "Only *it*." in texts[2]
    assert f"--against records/tiny/{FOLDERS[1]}/before\n" in texts[1]

    page = (filed / "README.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| [123] \| \S+ \| \[", line)]
    assert [row.split(" | ")[1] for row in rows] == ["100.05", "**90.10**", "**200.55**"]
    assert "First \\| record" in rows[0]
    assert is_png(tiny / "leaderboard.png") and is_png(tiny / FOLDERS[2] / "curves.png")


def test_pages_are_made_anew(filed, tmp_path):
    """With the same bytes, pictures too. Records from before there was a rule on validations stay."""
    root = tmp_path / "records"
    shutil.copytree(filed, root)
    for path in [*root.rglob("*.png"), *root.rglob("README.md")]:
        path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "FEWEST_VALIDATIONS", 100)
        assert submit_to(root, "--regenerate").returncode == 0
    assert everything(root) == everything(filed)
    (root / "tiny" / FOLDERS[0] / "record.json").write_text("[]")
    done = submit_to(root, "--regenerate")
    assert done.returncode == 2 and b"record.json: it doesn't describe a record" in done.stderr


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(times=(101_000, 101_500, 101_200, 102_000)), "slower"),
        (dict(again=dict(source="#\n")), f"other sources than the record to beat: {FOLDERS[1]}"),
        (dict(again=dict(muon_lr=0.05)), ": muon_lr 0.05, not 0.04"),
        (dict(again=dict(extra="in /home/jane/x.pt")), "/home/jane/x.pt; run again with"),
        (dict(track="fineweb"), "of the track fineweb"),
        (dict(train_files="/mnt/disk/x_*.bin"), "absolute path: /mnt/disk/x_"),
        (dict(extra="'/Users/x'"), "absolute path: /Users/x"),
        (dict(every=100), "all runs: 6 validations after step 0, but a record needs 8; run it with"),
    ],
)
def test_records_are_refused(tmp_path, filed, change, reason):
    before = everything(filed)
    sides = dict(times=(80_000, 80_100, 79_900, 80_050), turn=1, muon_lr=0.04)
    again = make_runs(tmp_path / "again", **sides | change.pop("again", {}))
    fast = dict(times=(70_000, 70_100, 70_200, 70_300), turn=0)
    runs = make_runs(tmp_path / "runs", **fast | change)
    done = file_it(filed, runs, "x", "--against", again)
    assert done.returncode == 1
    assert reason in unwrapped(done.stdout)
    assert b"REFUSED\n- " in done.stdout
    assert everything(filed) == before


def test_equal_file_names(tmp_path, filed):
    """In two folders. One would be written over the other."""
    logs = [our_log(tmp_path / f"{seed}" / "a.txt", seed=seed) for seed in range(2)]
    done = file_it(filed, logs, "x")
    assert done.returncode == 1 and b"two logs have the same file name; rename one" in done.stdout


def test_make_trains_both_in_turns(tmp_path, monkeypatch):
    """With the stand-in as train_gpt.py: the first record, and one that is twice as fast. It is edited
    meanwhile, and runs of yesterday count."""
    script = (ROOT / "tests/judge/compare/standin.py").read_text()
    script = script.replace("flags: -; model compiled: no", "flags: -march=native; model compiled: yes")
    needs = dict(processes=1, options=[])
    monkeypatch.setattr(record_runs, "check_machine", lambda *words: needs)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    records = tmp_path / "records"
    for module in (submit, record_runs):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(submit, "RECORDS", records)
    monkeypatch.setattr(submit, "write_pages", lambda root: None)
    monkeypatch.setattr(rules, "FEWEST_VALIDATIONS", 1)
    monkeypatch.setattr(record_runs, "RUNS", 4)
    options = ["--track", "tiny", "--make", "--name"]
    (tmp_path / "train_gpt.py").write_text(script.replace("slower: float = 1.0", "slower: float = 9.0"))
    assert run("submit", *options, "first").returncode == 0
    edited = f"{script}    open('train_gpt.py', 'a').write('#')\n"
    (tmp_path / "train_gpt.py").write_text(edited)
    done = run("submit", *options, "second", "--date", "2026-01-01")
    assert done.returncode == 0, done
    shown = [line for line in done.stdout.decode().splitlines() if " run " in line]
    assert shown == [
        *["new run 1 of 4", "record run 1 of 4", "record run 2 of 4", "new run 2 of 4"],
        *["new run 3 of 4", "record run 3 of 4", "record run 4 of 4", "new run 4 of 4"],
    ]
    shutil.rmtree(records / "tiny" / "2026-01-01_Second")
    (tmp_path / "train_gpt.py").write_text(edited)
    assert b" run " not in run("submit", *options, "second").stdout
    (folder,) = records.glob("tiny/*_Second")
    record = record_pages.read_record(folder)
    assert len(record.logs) == len(record.before) == 4
    assert {log.source.decode() for log in record.before} == {
        script.replace("slower: float = 1.0", "slower: float = 9.0")
    }
    assert (
        b"(t-test of 4 pairs that took turns)"
        in run("verify", folder, "--against", folder / "before").stdout
    )
    (tmp_path / "train_gpt.py").write_text("import sys\nsys.exit(3)\n")
    done = run("submit", *options, "third")
    assert (
        done.returncode == 2
        and b"train_gpt.py --track tiny --seed 0 --log_dir logs/records/" in done.stderr
    )


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("!", [], "--name"),
        ("first record", [], "exists already"),
        ("x", ["--against", "nothing"], "No such file or directory: 'nothing'"),
    ],
)
def test_what_cannot_be_filed(tmp_path, filed, name, options, reason):
    before = everything(filed)
    good = make_runs(tmp_path / "good", times=(70_000, 70_100, 70_200, 70_300))
    done = file_it(filed, good, name, *options)
    assert done.returncode == 2
    assert reason in done.stderr.decode()
    assert everything(filed) == before


@pytest.mark.parametrize(
    "steps, every, enough",
    [(600, 75, True), (600, 86, False), (607, 75, True)],
)
def test_a_record_is_a_curve(tmp_path, steps, every, enough):
    path = our_log(tmp_path / "a.txt", steps=steps, every=every)
    assert bool(rules.too_few_validations(parse_log(path))) != enough
    # The rule is only for our logs, which have hyperparameters
    path.write_text(re.sub("hyperparameters: .*\n", "", path.read_text()))
    assert rules.too_few_validations(parse_log(path)) == ""


def test_what_stands_in_the_repository_is_fresh():
    hint = "stale: run `./run.sh submit --regenerate`"
    tracks = record_pages.read_records(RECORDS)
    page = record_pages.readme(tracks)
    assert (RECORDS / "README.md").read_text(encoding="utf-8") == page, hint
    for track, records in tracks.items():
        assert (RECORDS / track / "leaderboard.png").exists(), hint
        for record in records:
            prior = next((r for r in records if r.folder.name == record.against), None)
            text = (record.folder / "README.md").read_text(encoding="utf-8")
            expected = record_pages.record_readme(record, prior)
            assert text == expected, f"{record.folder.name} is {hint}"
            # Older records were compared with one of another session
            assert rules.judge_runs(record.logs, prior=record.before).reasons == []
            assert not any(map(rules.absolute_path, record.logs))


def test_when_a_run_began(tmp_path, monkeypatch):
    """In UTC: at the end of summer time, local clocks show an hour twice."""
    log = our_log(tmp_path / "log")
    (tmp_path / "train.sh").write_text(f"for folder; do :; done; cp {log} $folder/a.txt")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        record_runs.make_run(f"sh {tmp_path}/train.sh", {}, 0, tmp_path / "runs" / "0.txt")
    finally:
        monkeypatch.undo()
        time.tzset()
    began = started(parse_log(tmp_path / "runs" / "0.txt"))
    assert abs(datetime.now(UTC).replace(tzinfo=None) - began) < timedelta(minutes=10)
