"""
Writes what stands in records/ beside the logs: each record's README, the leaderboards, the plots.

A record is a folder records/<track>/<date>_<Name>/ with its logs and a record.json; every number is taken from the
logs. The text depends on nothing else, so a test can tell when it is stale.
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

from log_parsing import Log, LogError, read_logs, write_file
from machine import readable
from plot import COLORS, plot_curves, save_figure
from verify import COLUMNS, P_VALUE, Summary, judge, p_text, summarize, summary_lines, table_rows

RECORDS = Path(__file__).resolve().parent.parent / "records"
FOLDER = re.compile(r"(\d{4}-\d\d-\d\d)_(\w+)")


@dataclass
class Record:
    folder: Path
    logs: list[Log]
    name: str
    what: str  # what changed, Markdown
    target: float
    same_ml: bool  # only the speed changed: the p-value is waived
    against: str  # the folder of the record it beat; "" for the first on its hardware

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


def read_record(folder: Path) -> Record:
    """Raises LogError."""
    try:
        facts = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        facts = {
            key: kind(facts[key])
            for key, kind in dict(
                name=str, what=str, target=float, same_ml=bool, against=str
            ).items()
        }
    except OSError as e:
        raise LogError(
            f"{folder / 'record.json'}: {(e.strerror or 'cannot be read').lower()}"
        ) from None
    except (ValueError, KeyError, TypeError) as e:
        raise LogError(f"{folder / 'record.json'}: not a record's facts ({e})") from None
    logs, errors = read_logs([folder])
    errors += [f"{log.path}: {log.incomplete}" for log in logs if log.incomplete]
    if errors:
        raise LogError(errors[0])
    return Record(folder, logs, **facts)


def read_records(root: Path) -> dict[str, list[Record]]:
    """track -> its records by date. Raises LogError."""
    folders = sorted(f for f in root.glob("*/*") if f.is_dir() and FOLDER.fullmatch(f.name))
    tracks = {}
    for folder in folders:
        tracks.setdefault(folder.parent.name, []).append(read_record(folder))
    for records in (
        tracks.values()
    ):  # those of one day in the order in which they beat each other: slowest first
        records.sort(key=lambda r: (r.date, -r.summary.time_mean))
    return tracks


def record_to_beat(records: list[Record], hardware: str) -> Record | None:
    """The fastest on that hardware."""
    return min(
        (r for r in records if r.hardware == hardware),
        key=lambda r: r.summary.time_mean,
        default=None,
    )


# ----------------------------------------------------------------------------------------------------------
# Text
def markdown_table(
    header: tuple[str, ...], rows: list[tuple[str, ...]], right: Collection[str] = ()
) -> list[str]:
    """`right` names the columns that are aligned to the right."""
    escape = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    return [
        escape(header),
        escape(tuple("---:" if h in right else "---" for h in header)),
        *map(escape, rows),
    ]


def record_readme(record: Record, prior: Record | None) -> str:
    """The README of one record's folder."""
    verdict = judge(record.logs, record.target, prior.logs if prior else [], record.same_ml)
    rows, machines = table_rows(record.logs)
    rows = [
        (f"[{log.name}]({readable(log.path.name)})", *row[1:])
        for log, row in zip(record.logs, rows)
    ]
    command = f"python tools/verify.py records/{record.track}/{record.folder.name}"
    if prior:
        command += (
            f" --against records/{record.track}/{prior.folder.name}" + " --same-ml" * record.same_ml
        )
    log = record.logs[0]
    gpus = re.match(r"(\d+)x ", log.hardware)
    run = (
        f"torchrun --standalone --nproc_per_node={gpus[1]}" if gpus and gpus[1] != "1" else "python"
    )
    run += " train_gpt.py"
    run += "".join(
        f" --{key} {log.hyperparameters[key]}"
        for key in ("track", "seed")
        if key in log.hyperparameters
    )
    return "\n".join(
        [
            f"# {record.name}",
            "",
            f"A record of the `{record.track}` track, {record.date}: target {record.target:g}, on {record.hardware}.",
            "",
            "## What changed",
            "",
            record.what,
            "",
            "## Result",
            "",
            *(f"- {what}: {value}" for what, value in summary_lines(verdict)),
            "",
            "![validation loss](curves.png)",
            "",
            *markdown_table(COLUMNS, rows, right="val_loss time steps step_avg".split()),
            "",
            *machines,
            "",
            "## Check it, run it",
            "",
            "```",
            command,
            f"python tools/replay.py records/{record.track}/{record.folder.name}/{readable(log.path.name)} -o train_gpt.py",
            run,
            "```",
            "",
            "Every hyperparameter of a run stands in its log.",
            "",
        ]
    )


def leaderboard(track: str, records: list[Record]) -> list[str]:
    """The lines of one track's section."""
    best = {record_to_beat(records, r.hardware).folder for r in records}
    rows = []
    for number, r in enumerate(records, 1):
        s, log = r.summary, r.logs[0]
        time = f"{s.time_mean:.2f}"
        rows.append(
            (
                str(number),
                f"**{time}**" if r.folder in best else time,
                f"[{r.name}]({track}/{r.folder.name}/)",
                r.date,
                f"{s.loss_mean:.4f}",
                "waived" if r.same_ml else p_text(s.p_value),
                str(s.n),
                str(log.num_steps),
                r.hardware,
                log.torch,
            )
        )
    targets = " and ".join(dict.fromkeys(f"{r.target:g}" for r in records))
    header = (
        "#",
        "seconds",
        "record",
        "date",
        "val_loss",
        "p",
        "runs",
        "steps",
        "hardware",
        "PyTorch",
    )
    return [
        f"## {track}",
        "",
        f"Target: a mean validation loss below {targets}, at p < {P_VALUE:g}. Seconds are mean "
        "training time; in bold, the fastest on its hardware.",
        "",
        *markdown_table(header, rows, right="# seconds val_loss p runs steps".split()),
        "",
        f"![record times]({track}/leaderboard.png)",
        "",
    ]


def read_history(root: Path) -> list[dict[str, str]]:
    """The rows of record_history.csv. Raises LogError."""
    try:
        with open(root / "record_history.csv", newline="", encoding="utf-8") as f:
            return list(csv.DictReader(f))
    except OSError as e:
        raise LogError(
            f"{root / 'record_history.csv'}: {(e.strerror or 'cannot be read').lower()}"
        ) from None


def readme(root: Path) -> str:
    """records/README.md. Raises LogError."""
    tracks = read_records(root)
    history = read_history(root)
    rows = [(r["record"], r["minutes"], r["technique"], r["date"]) for r in history]
    lines = [
        "# Records",
        "",
        "Written by `python tools/submit.py --regenerate` from the logs in this folder: edit those, not this.",
        "",
        "| command | |",
        "|---|---|",
        "| `python tools/verify.py LOG...` | judges a submission: statistics and rules |",
        "| `python tools/replay.py LOG` | the source of a run, out of its log |",
        "| `python tools/plot.py LOG... -o curves.png` | loss curves against each other |",
        "| `python tools/submit.py --track T --name NAME LOG...` | files a record, rewrites this page |",
        "",
    ]
    for track, records in tracks.items():
        lines += leaderboard(track, records)
    if not tracks:
        lines += ["No record yet.", ""]
    lines += [
        "## The field's history (8x NVIDIA H100)",
        "",
        "These are the records of the public NanoGPT speedrun competition, on FineWeb to a loss of 3.28, as its",
        "participants reported them ([record_history.csv](record_history.csv)). They are **not** ours, and nothing in",
        "this repository has reproduced them. Record 21 stands three times: as set, with the new timing, and with a",
        "later PyTorch, which is why the curve rises there.",
        "",
        "![the field's record time by date](history.png)",
        "",
        *markdown_table(
            ("record", "minutes", "technique", "date"), rows, right="record minutes".split()
        ),
        "",
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------
# Plots
def day(date: str) -> datetime.date:
    return datetime.date.fromisoformat(date)


def plot_leaderboard(records: list[Record], path: Path) -> None:
    """Record time by date, or by the table's number within a month; a line for each hardware."""
    figure, axes = plt.subplots()
    dates, times = [day(r.date) for r in records], [r.summary.time_mean for r in records]
    crowded = max(dates) - min(dates) < datetime.timedelta(days=31)
    places = list(range(1, len(records) + 1)) if crowded else dates
    for i, hardware in enumerate(dict.fromkeys(r.hardware for r in records)):
        own = [n for n, r in enumerate(records) if r.hardware == hardware]
        axes.step(
            [places[n] for n in own],
            [times[n] for n in own],
            "o-",
            where="post",
            color=COLORS[i % len(COLORS)],
            label=hardware,
        )
        for n in own:  # above the line to the next record
            name = textwrap.shorten(records[n].name, 32, placeholder=" …")
            axes.annotate(
                f"#{n + 1} {name}, {times[n]:.1f} s",
                (places[n], times[n]),
                (7, 5),
                textcoords="offset points",
                fontsize=9,
            )
    if crowded:
        axes.set_xticks(places, [f"#{n}" for n in places])
        room = max(len(records) - 1, 1)
        axes.set_xlim(
            1 - 0.05 * room, len(records) + 0.45 * room
        )  # the last one's name stands on the right
        axes.set_xlabel(f"record, {min(dates)}" + f" to {max(dates)}" * (max(dates) > min(dates)))
    else:
        finish_time_axes(axes, dates)
    axes.set_ylim(0, 1.15 * max(r.summary.time_mean for r in records))
    axes.set(ylabel="training time to the target (s)")
    axes.legend(loc="upper right")
    save_figure(figure, path)


def plot_history(history: list[dict[str, str]], path: Path) -> None:
    figure, axes = plt.subplots()
    dates, minutes = [day(r["date"]) for r in history], [float(r["minutes"]) for r in history]
    axes.step(dates, minutes, where="post", color=COLORS[0], linewidth=1.6)
    axes.plot(dates, minutes, "o", color=COLORS[0], markersize=3.5)
    named = {
        "1": "llm.c baseline",
        "3": "Muon",
        "12": "FlexAttention",
        "19": "FP8 head",
        "41": "NorMuon",
        "62": "bigram hash embedding",
        "89": "FP8 MLP",
    }
    for record, x, y in zip((r["record"] for r in history), dates, minutes):
        if record in named:
            axes.annotate(
                f"{named[record]}, {y:.3g} min",
                (x, y),
                (8, 8),
                textcoords="offset points",
                fontsize=9,
            )
    axes.set_yscale("log")
    axes.set_ylim(1, 60)
    axes.set_yticks([1, 2, 5, 10, 20, 45], ["1", "2", "5", "10", "20", "45"])
    axes.minorticks_off()
    finish_time_axes(axes, dates)
    axes.set(ylabel="minutes on 8x H100", title="The field's records (FineWeb to 3.28), not ours")
    save_figure(figure, path)


def finish_time_axes(axes, dates: list[datetime.date]) -> None:
    pad = datetime.timedelta(days=max(3, (max(dates) - min(dates)).days // 10))
    axes.set_xlim(min(dates) - pad / 2, max(dates) + 2.4 * pad)
    locator = mdates.AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator))


# ----------------------------------------------------------------------------------------------------------
def write_record(record: Record, prior: Record | None) -> None:
    """The README and the picture of one record's folder."""
    write_file(record.folder / "README.md", record_readme(record, prior).encode())
    plot_curves(
        {record.name: record.logs}, record.folder / "curves.png", x="time", targets=[record.target]
    )


def regenerate(root: Path = RECORDS) -> None:
    """Writes everything that is generated in records/. Raises LogError."""
    text, tracks = readme(root), read_records(root)
    for track, records in tracks.items():
        by_folder = {r.folder.name: r for r in records}
        for record in records:
            write_record(record, by_folder.get(record.against))
        plot_leaderboard(records, root / track / "leaderboard.png")
    plot_history(read_history(root), root / "history.png")
    write_file(root / "README.md", text.encode())
