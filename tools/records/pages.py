"""
Writes the pages of records/: the README of each record, the leaderboards, and the plots.

A record is a folder records/<track>/<date>_<Name>/ with its logs and a record.json. All numbers
come from the logs. The pages depend on nothing else, so a test can check that they are up to date.
"""

import csv
import datetime
import json
import re
import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import matplotlib.dates as mdates
import matplotlib.pyplot as plt

from tools.common import ROOT, LogError, write_file
from tools.logs import Log, read_logs
from tools.common import readable
from tools.records.plot import COLORS, plot_curves, save_figure
from tools.records.replay import command_to_run
from tools.records.report import COLUMNS, p_text, summary_lines, table_rows
from tools.records.rules import P_VALUE, Summary, Verdict, judge, summarize

RECORDS = ROOT / "records"
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_(\w+)")


@dataclass
class Record:
    """A record: its logs and the fields of its record.json."""

    folder: Path
    logs: list[Log]
    name: str
    what: str  # what changed, in Markdown
    target: float  # loss, in nats per token
    same_ml: bool  # only the speed changed, so the p-value is waived
    against: str  # folder name of the record that it beat; "" for the first one on its hardware

    @property
    def date(self) -> str:
        return self.folder.name[:10]

    @property
    def track(self) -> str:
        return self.folder.parent.name

    @property
    def hardware(self) -> str:
        return self.logs[0].hardware

    @property
    def summary(self) -> Summary:
        return summarize(self.logs, self.target)


def read_facts(path: Path) -> dict:
    """Reads a record.json. Raises LogError."""
    kinds = {"name": str, "what": str, "target": float, "same_ml": bool, "against": str}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {key: kind(facts[key]) for key, kind in kinds.items()}
    except OSError as e:
        raise LogError(f"{path}: {(e.strerror or 'cannot be read').lower()}") from None
    except (ValueError, KeyError, TypeError) as e:
        raise LogError(f"{path}: it doesn't describe a record ({e})") from None


def read_record(folder: Path) -> Record:
    """Raises LogError."""
    facts = read_facts(folder / "record.json")
    logs, errors = read_logs([folder])
    for log in logs:
        if log.incomplete:
            errors.append(f"{log.path}: {log.incomplete}")
    if errors:
        raise LogError(errors[0])
    return Record(folder, logs, **facts)


def by_date_then_time(record: Record) -> tuple[str, float]:
    """A sort key. On the same day, the faster record came later, because it beat the slower one."""
    return record.date, -record.summary.time_mean


def read_records(root: Path) -> dict[str, list[Record]]:
    """Maps tracks to their records, sorted by date. Raises LogError."""
    tracks = {}
    for folder in sorted(root.glob("*/*")):
        if folder.is_dir() and FOLDER.fullmatch(folder.name):
            tracks.setdefault(folder.parent.name, []).append(read_record(folder))
    for records in tracks.values():
        records.sort(key=by_date_then_time)
    return tracks


def record_to_beat(records: list[Record], hardware: str) -> Record | None:
    """The fastest record on this hardware."""
    same = [r for r in records if r.hardware == hardware]
    return min(same, key=lambda r: r.summary.time_mean, default=None)


# -----------------------------------------------------------------------------
# Text

def markdown_row(cells) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return "| " + " | ".join(escaped) + " |"


def markdown_table(
    header: tuple[str, ...],
    rows: list[tuple[str, ...]],
    right: Collection[str] = (),
) -> list[str]:
    """The lines of a table. `right` names the columns to align to the right."""
    alignment = ["---:" if name in right else "---" for name in header]
    return [markdown_row(header), markdown_row(alignment)] + [markdown_row(row) for row in rows]


def commands_to_repeat(record: Record, prior: Record | None) -> list[str]:
    """Commands that verify a record, extract its sources, and run them."""
    folder = f"records/{record.track}/{record.folder.name}"
    verify = f"./run.sh verify {folder}"
    if prior:
        verify += f" --against records/{record.track}/{prior.folder.name}"
    if prior and record.same_ml:
        verify += " --same-ml"
    log = record.logs[0]
    replay = f"./run.sh replay {folder}/{readable(log.path.name)} -o old"
    return [verify, replay, command_to_run(log, "old")]


def result_lines(verdict: Verdict) -> list[str]:
    """The statistics as a list. Its names are longer than those in verify.py's column."""
    lines = []
    for name, value in summary_lines(verdict):
        if name == "prior":
            name = "previous record"
        lines.append(f"- {name}: {value}")
    return lines


def record_readme(record: Record, prior: Record | None) -> str:
    """The README of a record's folder."""
    verdict = judge(record.logs, record.target, prior.logs if prior else [], record.same_ml)
    rows, machines = table_rows(record.logs)
    linked_rows = []
    for log, row in zip(record.logs, rows):
        link = f"[{log.name}]({readable(log.path.name)})"
        linked_rows.append((link, *row[1:]))
    return "\n".join(
        [
            f"# {record.name}",
            "",
            f"A record of the `{record.track}` track, set on {record.date}. Hardware: {record.hardware}.",
            f"The target loss is {record.target:g}.",
            "",
            "## What changed",
            "",
            record.what,
            "",
            "## Result",
            "",
            *result_lines(verdict),
            "",
            "![validation loss](curves.png)",
            "",
            *markdown_table(COLUMNS, linked_rows, right=("val_loss", "time", "steps", "step_avg")),
            "",
            *machines,
            "",
            "## Verify and reproduce",
            "",
            "```",
            *commands_to_repeat(record, prior),
            "```",
            "",
            "`replay.py` extracts the source of the run from its log. The log also has all",
            "hyperparameters.",
            "",
        ]
    )


def leaderboard(track: str, records: list[Record]) -> list[str]:
    """The lines of a track's section."""
    fastest = {record_to_beat(records, r.hardware).folder for r in records}
    rows = []
    for number, record in enumerate(records, 1):
        summary = record.summary
        log = record.logs[0]
        time = f"{summary.time_mean:.2f}"
        if record.folder in fastest:
            time = f"**{time}**"
        p = "waived" if record.same_ml else p_text(summary.p_value)
        row = {
            "#": str(number),
            "seconds": time,
            "record": f"[{record.name}]({track}/{record.folder.name}/)",
            "date": record.date,
            "val_loss": f"{summary.loss_mean:.4f}",
            "p": p,
            "runs": str(summary.n),
            "steps": str(log.num_steps),
            "hardware": record.hardware,
            "PyTorch": log.torch,
        }
        rows.append(row)
    header = tuple(rows[0])
    cells = [tuple(row.values()) for row in rows]
    targets = " and ".join(dict.fromkeys(f"{r.target:g}" for r in records))
    return [
        f"## {track}",
        "",
        f"Target: a mean validation loss below {targets} with p < {P_VALUE:g}. Seconds are the",
        "mean training time. The fastest record on each kind of hardware is in bold.",
        "",
        *markdown_table(header, cells, right=("#", "seconds", "val_loss", "p", "runs", "steps")),
        "",
        f"![record times]({track}/leaderboard.png)",
        "",
    ]


def read_history(root: Path) -> list[dict[str, str]]:
    """The rows of record_history.csv. Raises LogError."""
    path = root / "record_history.csv"
    try:
        with open(path, newline="", encoding="utf-8") as f:
            return list(csv.DictReader(f))
    except OSError as e:
        raise LogError(f"{path}: {(e.strerror or 'cannot be read').lower()}") from None


def history_section(root: Path) -> list[str]:
    """The lines about the records of the NanoGPT speedrun. Raises LogError."""
    columns = ("record", "minutes", "technique", "date")
    rows = [tuple(row[name] for name in columns) for row in read_history(root)]
    return [
        "## Records of the NanoGPT speedrun (8x NVIDIA H100)",
        "",
        "In the NanoGPT speedrun, people compete to train a 124M-parameter GPT on FineWeb to a",
        "validation loss of 3.28. Its home is",
        "[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), which credits the",
        "author of each record. These records are **not** ours, and we have reproduced none of",
        "them. Record 21 is listed three times: as it was set, with the new timing rules, and",
        "with a later PyTorch. The last two are slower, so the curve rises there.",
        "[record_history.csv](record_history.csv) has the same table.",
        "",
        "![record time by date](history.png)",
        "",
        *markdown_table(columns, rows, right=("record", "minutes")),
        "",
    ]


def readme(root: Path) -> str:
    """records/README.md. Raises LogError."""
    lines = [
        "# Records",
        "",
        "`./run.sh submit --regenerate` writes this page from the logs in this folder. "
        "Don't edit it.",
        "",
        "| command | what it does |",
        "| --- | --- |",
        "| `./run.sh verify LOG...` | checks whether runs make a valid record, "
        "and prints their statistics |",
        "| `./run.sh replay LOG` | extracts the source of a run from its log |",
        "| `./run.sh plot LOG... -o curves.png` | draws loss curves |",
        "| `./run.sh submit --track TRACK --name NAME LOG...` | files a record and updates "
        "this page |",
        "",
        "[tools/README.md](../tools/README.md#rules-of-a-record) lists the rules.",
        "",
        "| page | what it is about |",
        "| --- | --- |",
        "| [mini/IDEAS.md](mini/IDEAS.md) | what the ideas of the NanoGPT speedrun are "
        "worth on `mini` |",
        "| [mini/screens/](mini/screens/README.md) | screens: many settings or ideas of "
        "`mini`, measured together |",
        "| [mini/NOTES.md](mini/NOTES.md) | how `mini` was chosen and tuned |",
        "| [HARDWARE.md](HARDWARE.md) | which hardware the code runs on |",
        "| [fineweb/HOPPER.md](fineweb/HOPPER.md) | what we measured on an H200 and an H100, "
        "and checked without a GPU |",
        "| [baseline/](baseline/) | logs of the [GPT-2 recipe](../recipes/README.md) at the size of "
        "`mini` |",
        "",
    ]
    tracks = read_records(root)
    for track, records in tracks.items():
        lines += leaderboard(track, records)
    if not tracks:
        lines += ["There is no record yet.", ""]
    if "fineweb" not in tracks:
        lines += ["There is no record on `fineweb`, because we have only run short tests on a GPU.", ""]
    lines += history_section(root)
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# Plots

def day(date: str) -> datetime.date:
    return datetime.date.fromisoformat(date)


def annotate(axes, text: str, point: tuple, offset: tuple[int, int]) -> None:
    axes.annotate(text, point, offset, textcoords="offset points", fontsize=9)


def plot_leaderboard(records: list[Record], path: Path) -> None:
    """Plots the times of records, with a line for each hardware.

    The x axis is the date, or the record's number if all records are from within 31 days.
    """
    figure, axes = plt.subplots()
    dates = [day(r.date) for r in records]
    times = [r.summary.time_mean for r in records]
    numbers = list(range(1, len(records) + 1))
    one_month = max(dates) - min(dates) < datetime.timedelta(days=31)
    places = numbers if one_month else dates
    for i, hardware in enumerate(dict.fromkeys(r.hardware for r in records)):
        own = [n for n, r in enumerate(records) if r.hardware == hardware]
        xs = [places[n] for n in own]
        ys = [times[n] for n in own]
        color = COLORS[i % len(COLORS)]
        axes.step(xs, ys, "o-", where="post", color=color, label=hardware)
        for n in own:
            name = textwrap.shorten(records[n].name, 32, placeholder=" …")
            text = f"#{n + 1} {name}, {times[n]:.1f} s"
            offset = (7, -14) if n == own[-1] else (7, 5)  # above the line, but the last one below
            annotate(axes, text, (places[n], times[n]), offset)
    if one_month:
        axes.set_xticks(numbers, [f"#{n}" for n in numbers])
        room = max(len(records) - 1, 1)
        axes.set_xlim(1 - 0.05 * room, len(records) + 0.6 * room)  # room for the last name
        label = f"record, {min(dates)}"
        if max(dates) > min(dates):
            label += f" to {max(dates)}"
        axes.set_xlabel(label)
    else:
        finish_time_axes(axes, dates)
    axes.set_ylim(0, 1.15 * max(times))
    axes.set_ylabel("training time to the target (s)")
    figure.legend(loc="outside upper center", ncols=2)
    save_figure(figure, path)


NAMED_IN_PLOT = {
    "1": "llm.c baseline",
    "3": "Muon",
    "12": "FlexAttention",
    "19": "FP8 head",
    "41": "NorMuon",
    "62": "bigram hash embedding",
    "89": "FP8 MLP",
}


def plot_history(history: list[dict[str, str]], path: Path) -> None:
    """Plots the times of the NanoGPT speedrun's records by date."""
    figure, axes = plt.subplots()
    dates = [day(row["date"]) for row in history]
    minutes = [float(row["minutes"]) for row in history]
    axes.step(dates, minutes, where="post", color=COLORS[0], linewidth=1.6)
    axes.plot(dates, minutes, "o", color=COLORS[0], markersize=3.5)
    for row, x, y in zip(history, dates, minutes):
        name = NAMED_IN_PLOT.get(row["record"])
        if name:
            annotate(axes, f"{name}, {y:.3g} min", (x, y), (8, 8))
    axes.set_yscale("log")
    axes.set_ylim(1, 60)
    ticks = [1, 2, 5, 10, 20, 45]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    finish_time_axes(axes, dates)
    axes.set_ylabel("minutes on 8x H100")
    axes.set_title("Records of the NanoGPT speedrun (FineWeb to 3.28), not ours")
    save_figure(figure, path)


def finish_time_axes(axes, dates: list[datetime.date]) -> None:
    """Sets limits and ticks for dates. The right margin leaves room for the last name."""
    pad = datetime.timedelta(days=max(3, (max(dates) - min(dates)).days // 10))
    axes.set_xlim(min(dates) - pad / 2, max(dates) + 2.4 * pad)
    locator = mdates.AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))


# -----------------------------------------------------------------------------
# Files

def write_record(record: Record, prior: Record | None) -> None:
    """Writes the README and the plot of a record's folder."""
    write_file(record.folder / "README.md", record_readme(record, prior).encode())
    curves = {record.name: record.logs}
    plot_curves(curves, record.folder / "curves.png", x="time", targets=[record.target])


def regenerate(root: Path = RECORDS) -> None:
    """Writes all generated files in records/. Raises LogError."""
    text = readme(root)
    tracks = read_records(root)
    for track, records in tracks.items():
        by_folder = {r.folder.name: r for r in records}
        for record in records:
            write_record(record, by_folder.get(record.against))
        plot_leaderboard(records, root / track / "leaderboard.png")
    plot_history(read_history(root), root / "history.png")
    write_file(root / "README.md", text.encode())
