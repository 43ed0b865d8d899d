"""
The ledger of compare: a line for each idea that was judged, in a table that spreadsheets read.

A loop that tries ideas all night needs it: it says how often the loop errs, and --confirm starts from its
first line.
"""

import argparse
import contextlib
import csv
import io
import re
from dataclasses import asdict
from datetime import date
from operator import itemgetter
from pathlib import Path

from judge.compare.pairs import Comparison
from judge.runs.copies import git
from judge.runs.variants import Variant
from judge.stats.decide import P_VALUE
from judge.commands import UserError
from judge.files import without_windows, write_file
from judge.text import plural

Row = dict[str, str]
CONFIRMATION = "--confirm"  # instead of an idea
FIELDS = "date base commit idea text metric until verdict loss low high seed runs pairs last_seed minutes".split()
FINDING = itemgetter(*FIELDS[1:-2])  # what a line says, whenever it was found out
IDEA = itemgetter("base", "idea", "metric")  # one idea, also if it was judged again with more runs
TEST = itemgetter("seed", "runs")  # of an idea: the first seed and --runs


def read_ledger(file: Path) -> list[Row]:
    """[] if there is no such file yet. If git has merged two, their headers and lines may stand there twice.
    Raises UserError."""
    if not file.exists():
        return []
    text = without_windows(file.read_bytes()).decode("utf-8", "replace")  # of a spreadsheet
    rows = list(csv.DictReader(io.StringIO(text), delimiter="\t"))
    if any(row.keys() != set(FIELDS) or None in row.values() for row in rows):
        raise UserError(
            f"{file}: it isn't a ledger of compare, or it is damaged; give another --ledger"
        )
    return list({FINDING(row): row for row in rows if row["date"] != "date"}.values())


def write_ledger(file: Path, rows: list[Row]) -> None:
    table = io.StringIO()
    writer = csv.DictWriter(table, FIELDS, delimiter="\t", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(file, table.getvalue().encode())


def commit_of(variant: Variant, text: str) -> str:
    """The commit that is all of the variant with this text; "" if some of its files aren't committed, if it
    has options or another script, or without git."""
    if re.search("[ :]", text):
        return ""
    commit = variant.folder.name  # see copy_commit
    with contextlib.suppress(OSError):
        if commit == "worktree" and not git("diff", "HEAD", "--name-only", cwd=variant.origin):
            commit = git("rev-parse", "HEAD", cwd=variant.origin).decode().strip()
    return commit if re.fullmatch("[0-9a-f]{40}", commit) else ""


def seeds_of_other_tests(c: Comparison, args: argparse.Namespace, idea: Variant) -> list[int]:
    """The seeds of the tests of this idea that began with another seed, or had another --runs."""
    seeds = []
    key = (c.base.key(), idea.key(), c.pool.settings.name_of_metric)
    for row in read_ledger(args.ledger):
        same = IDEA(row) == key and (row["text"] == CONFIRMATION) == args.confirm
        if same and TEST(row) != test_of(c):
            first = int(row["seed"])
            seeds += range(first, first + int(row["pairs"]))
    return seeds


def test_of(c: Comparison) -> tuple[str, str]:
    return str(c.seed), str(c.runs or "")


def with_answers(c: Comparison, args: argparse.Namespace) -> list[Row]:
    """The ledger with a line for each idea that has an answer, unless it says that already. Raises UserError."""
    rows = read_ledger(args.ledger)
    for idea, text in zip(c.ideas, args.idea or ["."]):
        effect = c.effect(idea)
        goes_on = args.confirm and not c.runs  # with the same seeds, by the same command
        if effect is None or goes_on and effect.verdict == "undecided":
            continue
        values = [
            date.today(),
            c.base.key(),
            commit_of(c.base, args.base or ""),
            idea.key(),
            CONFIRMATION if args.confirm else " ".join(text.split()),
            c.pool.settings.name_of_metric,
            c.until,
            effect.verdict,
            *(f"{number:.5f}" for number in asdict(effect.difference).values()),
            *test_of(c),
            min(effect.n, c.count(idea)),
            max(seed for variant in c.variants for seed in variant.runs),
            f"{c.pool.minutes():.1f}",
        ]
        row = dict(zip(FIELDS, map(str, values)))
        if FINDING(row) not in map(FINDING, rows):
            rows.append(row)
    return rows


def loop_in_words(rows: list[Row]) -> list[str]:
    """A sentence about how often a loop errs; none with fewer than two ideas."""
    rows = [row for row in rows if row["text"] != CONFIRMATION]
    judged = set(map(IDEA, rows))
    accepted = {IDEA(row) for row in rows if row["verdict"] == "helps"}
    if len(judged) < 2:
        return []
    wrong = f"on average at most {len(judged) * P_VALUE:.2f} of those that do nothing are accepted"
    return [f"{len(judged)} ideas judged, {len(accepted)} accepted; {wrong}."]


def first_base(file: Path) -> str:
    """The commit where the ledger begins. Raises UserError."""
    rows = read_ledger(file)
    if not rows or not rows[0]["commit"]:
        raise UserError(
            f"{file} doesn't begin with a base that is a commit; compare it with --base and --seed"
        )
    return rows[0]["commit"]


def unused_seed(file: Path) -> int:
    """The first seed after those of all comparisons."""
    return max(int(row["last_seed"]) for row in read_ledger(file)) + 1


def seen_in_words(file: Path, confirm_options: str) -> str:
    """A sentence about how often the validation text of a confirmation was seen before."""
    rows = read_ledger(file)
    if confirm_options:
        rows = [row for row in rows if row["text"] == CONFIRMATION]
        return f"Its validation text ({confirm_options}) was seen by {plural(len(rows), 'confirmation')} before."
    return (
        f"Its validation text was seen by {plural(len(rows), 'comparison')} before; confirm_options in judge.toml "
        "names another one."
    )
