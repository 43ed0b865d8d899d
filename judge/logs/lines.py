"""
Finds steps and losses in the lines of a log.

A line about a step begins with it: `step:S/N`, `step S`, `Step S |`, `iter S` or `S/N`. A loss has a name before
it: `NAME:x`, `NAME: x`, `NAME=x`, `NAME | x`, `NAME x`, `"NAME": x`. So `step:9/9 val_loss:3.2` has the
value step_val_loss, and `final val_loss:3.3 val_bpb:1.2` has final_val_loss and final_val_bpb.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

# A number is whole if something is behind it, because a log may be cut anywhere, also by a progress bar
# (\r). A comma and a digit may be a decimal comma.
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf"
VALUE = re.compile(rf"(?<![\w.+-])({NUMBER})(?:/(\d{{1,12}}))?(?![\w.%/\r]|,\d|\Z)", re.IGNORECASE)
TIME = re.compile(r"\d(?:ms|s)\b")  # a number with a unit, which isn't a value
WORD = re.compile(r"[^\W\d][\w./-]*")
NAMED = re.compile(r"\w[\"']?[ \t]*[:=|]?[ \t]*$")  # what stands between a name and its value
STEP = re.compile(r"\W{0,2}(step|iter(?:ation)?)?[\"']?\W{0,3}", re.IGNORECASE)  # what stands before a step
SCHEDULE = re.compile(r"(?:step|iter(?:ation)?)[: ] *(\d{1,12})/(\d{1,12})\b", re.IGNORECASE)
LOSS = re.compile(r"val(?:idation)?_(?:[^\W_]+_)*loss(?:_\w+)?")  # val_loss, val_ema_loss, ...
COLOR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What logging, Hydra, torchrun and others print before a line: "2026-11-28 12:00:00,123 - main - INFO - ", or
# "[2026-11-28 12:00:00,123][main][INFO] - ". A word in brackets is the logger's name only before another stamp
STAMP = (
    r"[\[(<]*(?:\d{4}[-/]\d\d[-/]\d\d|T?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[-+]\d\d:?\d\d)?"
    r"|(?:DEBUG|INFO|WARNING)(?::[\w.]+)?|(?:rank|default)\d+)[\])>]*[ \t|:-]*"
)
STAMPS = re.compile(rf"^(?:{STAMP})+(?:[\w.]+ - (?:{STAMP})*|\[[\w.]+\](?:{STAMP})+)?(?=\S)", re.MULTILINE)


@dataclass
class Line:
    """A line about a step, or with a loss."""

    start: int  # in the text
    text: str
    step: int | None  # None if the line doesn't begin with it
    num_steps: int | None  # of the schedule
    losses: list[tuple[str, str]]  # (name, number as the log has it)


def plain(text: str) -> str:
    """Text without colours and time stamps. Where lines end with \\r, they get a newline instead."""
    text = COLOR.sub("", text.replace("\r\n", "\n"))
    text = re.sub(r"\r(?=step\b|\Z)", "\n", text, flags=re.IGNORECASE)
    text = STAMPS.sub("", text.replace("\r", "\r\n"))
    lines = from_json(text).split("\n")  # perhaps all of it is one object
    return "\n".join(map(from_json, lines))


def from_json(line: str) -> str:
    """An object of JSON as a line that begins with its step. Other lines stay as they are."""
    try:
        values = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return line
    if not isinstance(values, dict):
        return line
    words = [f"{name}:{value}" for name, value in values.items() if name != "step"]
    if "step" in values:
        words.insert(0, f"step:{values['step']}")
    return " ".join(words) + "\n"  # so that the last number is whole


def joined(words: list[str]) -> str:
    return re.sub(r"[./-]", "_", "_".join(words)).lower()


def is_called(words: list[str], metric: str) -> bool:
    """Whether the last words are the metric's name."""
    if not metric:
        return any(LOSS.fullmatch(joined(words[-count:])) for count in (1, 2))
    return any(joined(words[-count:]) == metric for count in range(1, len(words) + 1))


def values(text: str) -> Iterator[tuple[re.Match, str]]:
    """The numbers of a line, each with what stands between it and the one before."""
    end = 0
    for value in VALUE.finditer(text):
        yield value, TIME.split(text[end : value.start()])[-1]
        end = value.end()


def read_line(text: str, start: int, metric: str) -> Line:
    line = Line(start, text, None, None, [])
    first = None  # the words before the first value
    for value, before in values(text):
        words = WORD.findall(before)
        begins = STEP.fullmatch(before) if first is None else None
        if begins and value[1].isdecimal() and (begins[1] or value[2]):
            line.step = int(value[1])
            line.num_steps = int(value[2]) if value[2] else None
            first = ["step"]
            continue
        if first is None:
            first = words
        label = first if line.step is not None else first[: -len(words)]
        # without a step, a whole number is a setting: "val_loss_every": 41
        is_setting = not metric and line.step is None and value[1].isdecimal()
        if NAMED.search(before) and is_called(label + words, metric) and not is_setting:
            line.losses.append((joined(label + words), value[1]))
    return line


def named_numbers(text: str) -> dict[str, list[str]]:
    """All numbers that have a name, by the name, in the order of the text."""
    found = {}
    for line in text.splitlines():
        for value, before in values(f"{line} "):
            if NAMED.search(before) and not STEP.fullmatch(before):
                found.setdefault(joined(WORD.findall(before)), []).append(value[1])
    return found


def find_lines(text: str, metric: str) -> list[Line]:
    """The lines with a loss, and those that begin with `step:S/N`. Without a metric, a loss is a
    validation loss: val_loss, val_ema_loss, validation loss, ..."""
    key = metric.rpartition("_")[2] if metric else "loss"
    found = []
    start = 0
    for line in text.splitlines(keepends=True):
        step = SCHEDULE.match(line)
        losses = key in line.lower() and read_line(line, start, metric)
        if losses and losses.losses:
            found.append(losses)
        elif step:
            found.append(Line(start, line, int(step[1]), int(step[2]), []))
        start += len(line)
    return found
