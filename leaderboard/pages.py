"""
Writes the pages of records/: the README of each record, the leaderboards, and the plots.

A record is a folder records/<track>/<date>_<Name>/ with its logs and a record.json. All numbers
come from the logs. The pages depend on nothing else, so a test can check that they are up to date.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from judge.plot.curves import plot_curves
from judge.plot.style import COLORS, plt, save_figure
from judge.logs.read import Log, read_logs
from leaderboard.rules import judge_runs, summary_of
from leaderboard.tables import COLUMNS, machines, summary_lines, table_row
from judge.stats.decide import P_VALUE
from judge.stats.summary import Summary
from judge.commands import UserError
from lib.processes import ROOT
from judge.files import write_file
from judge.text import markdown_table, p_text, short

RECORDS = ROOT / "records"
BEFORE = "before"  # the folder in a record with the runs of the one that it beat


@dataclass
class Record:
    """A record: its logs and the fields of its record.json."""

    folder: Path
    logs: list[Log]
    before: list[Log]  # runs of the record that it beat, which took turns with them; may be []
    name: str
    what: str  # what changed, in Markdown
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
    def target(self) -> float:
        """Loss, in nats per token."""
        return self.logs[0].target

    @property
    def summary(self) -> Summary:
        return summary_of(self.logs, self.target)


def read_record(folder: Path) -> Record:
    """Raises UserError."""
    logs = read_logs([folder])
    before = read_logs([folder / BEFORE]) if (folder / BEFORE).is_dir() else []
    file = folder / "record.json"
    try:
        return Record(folder, logs, before, **json.loads(file.read_bytes()))
    except (TypeError, ValueError) as e:
        raise UserError(f"{file}: it doesn't describe a record ({e})") from None


def read_records(root: Path) -> dict[str, list[Record]]:
    """Maps tracks to their records, sorted by date. Raises UserError.

    On the same day, the faster record came later, because it beat the slower one.
    """
    tracks = {}
    for file in sorted(root.glob("*/*/record.json")):
        record = read_record(file.parent)
        tracks.setdefault(record.track, []).append(record)
    for records in tracks.values():
        records.sort(key=lambda r: (r.date, -r.summary.time_mean))
    return tracks


def record_to_beat(records: list[Record], hardware: str) -> Record | None:
    """The fastest record on this hardware."""
    same = [r for r in records if r.hardware == hardware]
    return min(same, key=lambda r: r.summary.time_mean, default=None)


# -----------------------------------------------------------------------------
# Text

INTRODUCTION = """\
# Records

`./run.sh submit --regenerate` writes this page from the logs in this folder. Don't edit it.

| command | what it does |
| --- | --- |
| `./run.sh verify LOG...` | checks whether runs make a valid record, and prints their statistics |
| `./run.sh replay LOG` | extracts the source of a run from its log |
| `./run.sh plot LOG... -o curves.png` | draws loss curves |
| `./run.sh submit --track mini --name NAME LOG...` | files a record and updates this page |

[docs/rules.md](../docs/rules.md) has the rules.

| page | what it is about |
| --- | --- |
| [docs/transfer.md](../docs/transfer.md) | what `mini` says about larger models |
| [docs/log.md](../docs/log.md) | where a step's time goes, and what was measured on GPUs |
| [OPTIMIZATION.md](OPTIMIZATION.md) | what the logs of modded-nanogpt's optimization track say |
| [fineweb/h100_report.md](fineweb/h100_report.md) | a report of `./run.sh gpu-report` on an H100 |
| [docs/history.md](../docs/history.md) | records and measurements of `mini` until 28 November 2026 |
"""

NO_FINEWEB = """
There is no record on `fineweb`, because we have only run short tests on a GPU.
"""

HISTORY = """
## Records of the NanoGPT speedrun (8x NVIDIA H100)

In the NanoGPT speedrun, people compete to train a 124M-parameter GPT on FineWeb to a
validation loss of 3.28. Its home is
[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt), which credits the
author of each record. These records are **not** ours, and we have reproduced none of
them. [record_history.csv](record_history.csv) lists them, with their techniques. Record 21 is there
three times: as it was set, with the new timing rules, and with a later PyTorch. The last two are
slower, so the curve rises there.

![record time by date](history.png)
"""


def commands_to_repeat(record: Record, prior: Record | None) -> str:
    """Commands that verify a record, extract its sources, and show what is new in them."""
    folder = f"records/{record.track}/{record.folder.name}"
    log = f"{folder}/{record.logs[0].path.name}"
    verify = f"./run.sh verify {folder}"
    replay = f"./run.sh replay {log} -o old"
    if not prior:
        return f"{verify}\n{replay}"
    before = f"records/{record.track}/{prior.folder.name}"
    verify += f" --against {f'{folder}/{BEFORE}' if record.before else before}"
    return f"{verify}\n{replay}\ndiff {before}/{prior.logs[0].path.name} {log} | less"


def record_readme(record: Record, prior: Record | None) -> str:
    """The README of a record's folder."""
    prior_logs = record.before or (prior.logs if prior else [])
    verdict = judge_runs(record.logs, prior=prior_logs)
    results = "\n".join(f"- {name}: {value}" for name, value in summary_lines(verdict))
    results = results.replace("- prior:", "- previous record:")
    rows = [dict(zip(COLUMNS, table_row(log))) for log in record.logs]
    for log, row in zip(record.logs, rows):
        row["log"] = f"[{log.name}]({log.path.name})"
    table = markdown_table(rows, right=("val_loss", "time", "steps", "step_avg"))
    commands = commands_to_repeat(record, prior)
    return f"""\
# {record.name}

A record of the `{record.track}` track, set on {record.date}. Hardware: {" and ".join(machines(record.logs))}.
The target loss is {record.target:g}.

## What changed

{record.what}

## Result

{results}

![validation loss](curves.png)

{table}

## Verify and reproduce

```
{commands}
```

`replay -o` extracts the sources of the run from its log, and prints the command that runs
them. `diff` shows how two logs differ: first their sources, then their hyperparameters.
"""


def leaderboard(track: str, records: list[Record]) -> str:
    """A track's section."""
    rows = []
    for number, record in enumerate(records, 1):
        summary = record.summary
        time = f"{summary.time_mean:.2f}"
        if record is record_to_beat(records, record.hardware):
            time = f"**{time}**"
        row = {
            "#": str(number),
            "seconds": time,
            "record": f"[{record.name}]({track}/{record.folder.name}/)",
            "date": record.date,
            "val_loss": f"{summary.loss_mean:.4f}",
            "p": p_text(summary.p_value),
            "runs": str(summary.n),
            "steps": str(record.logs[0].num_steps),
            "hardware": record.hardware,
            "PyTorch": record.logs[0].torch,
        }
        rows.append(row)
    table = markdown_table(rows, right=("#", "seconds", "val_loss", "p", "runs", "steps"))
    return f"""
## {track}

Target: a mean validation loss below {records[0].target:g} with p < {P_VALUE:g}. Seconds are the
mean training time. The fastest record on each kind of hardware is in bold.

{table}

![record times]({track}/leaderboard.png)
"""


def readme(tracks: dict[str, list[Record]]) -> str:
    """records/README.md."""
    text = INTRODUCTION
    for track, records in tracks.items():
        text += leaderboard(track, records)
    if "fineweb" not in tracks:
        text += NO_FINEWEB
    return text + HISTORY


# -----------------------------------------------------------------------------
# Plots


def plot_leaderboard(records: list[Record], path: Path) -> None:
    """A bar for the time of each record, in the color of its hardware."""
    by_hardware = {}
    for number, record in enumerate(records, 1):
        label = f"#{number} {short(record.name, 32)}"
        by_hardware.setdefault(record.hardware, {})[label] = record.summary.time_mean
    figure, axes = plt.subplots()
    axes.set_prop_cycle(color=COLORS)
    for hardware, times in by_hardware.items():
        bars = axes.barh(list(times), list(times.values()), label=hardware)
        axes.bar_label(bars, fmt=" %.1f s")
    axes.invert_yaxis()
    axes.set_xlabel("training time to the target (s)")
    axes.margins(x=0.15)  # room for the numbers
    figure.legend(loc="outside upper center", ncols=2)
    save_figure(figure, path)


# -----------------------------------------------------------------------------
# Files


def write_pages(root: Path) -> None:
    """Writes all pages and pictures about records. Raises UserError."""
    tracks = read_records(root)
    for track, records in tracks.items():
        by_name = {r.folder.name: r for r in records}
        for r in records:
            text = record_readme(r, by_name.get(r.against))
            write_file(r.folder / "README.md", text.encode())
            plot_curves({r.name: r.logs}, r.folder / "curves.png", "time", r.target)
        plot_leaderboard(records, root / track / "leaderboard.png")
    write_file(root / "README.md", readme(tracks).encode())
