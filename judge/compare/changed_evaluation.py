"""
Does an idea touch what measures? Then a lower loss says nothing about the training.

What measures: the functions with `val`, `eval`, `evaluate` or `validation` in their name, those that they
call (such as the data path of the validation), and all lines with one of these words or with the metric's
name, such as the print of the loss. Only files that the idea changes are looked at.
"""

import re

from judge.runs.variants import Variant

WORD = r"(?<![a-z])(?:e?val|evaluate|evaluation|validat\w*)(?![a-z])"


def lines_of(text: str) -> set[tuple[str, str]]:
    """The lines without comments, each with the function or the class that it is in; "" outside of them."""
    found = set()
    place = ""
    for line in text.splitlines():
        if re.match(r"[\w@]", line):  # a line that isn't indented
            start = re.match(r"(?:async )?(?:def|class) (\w+)", line)
            place = start[1] if start else ""
        found.add((place, line.split("#")[0].strip()))
    return found


def changed_measure(old: str, new: str, metric: str) -> str:
    """A line that measures and isn't the same in two versions of a file; "" if there is none."""
    name = r"[\W_]*".join(re.findall(r"[a-z0-9]+", metric.lower()))
    words = re.compile(f"{WORD}|{name}" if name else WORD, re.IGNORECASE)
    before, after = lines_of(old), lines_of(new)
    lines = before | after
    more = {place for place, _ in lines if re.search(WORD, place)}
    measuring = set()
    while more:
        measuring |= more
        called = " ".join(line for place, line in lines if place in more)
        more = {place for place, _ in lines if f"{place}(" in called} - measuring - {""}
    changes = [line for place, line in before ^ after if place in measuring or words.search(line)]
    return min(filter(None, changes), default="")


def touches_measure(base: Variant, idea: Variant) -> str:
    """Like "train.py: val_loss = 0". "" if the idea leaves alone what measures."""
    metric = base.project.metric
    for name, _ in sorted(base.files().items() ^ idea.files().items()):
        paths = [variant.folder / name for variant in (base, idea)]
        texts = [path.read_text(errors="replace") if path.is_file() else "" for path in paths]
        if line := changed_measure(*texts, metric):
            return f"{name}: {line}"
    options = ["\n".join(variant.options) for variant in (base, idea)]
    return "" if base.settings else changed_measure(*options, metric)
