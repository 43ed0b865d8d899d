"""Numbers in words, tables, JSON, and the line of progress."""

import json
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def counted(parts: Iterable[str]) -> str:
    """Like "a CPU; 8x a GPU"."""
    counts = Counter(parts).items()
    return "; ".join(part if count == 1 else f"{count}x {part}" for part, count in counts)


def short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"


def show_line(text: str = "") -> None:
    """Shows at most 79 columns on standard error. On a terminal, the next line replaces them."""
    text = short(text, 79)
    if sys.stderr.isatty():
        print(f"{text:79}\r", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr)


def p_text(p: float | None) -> str:
    """Like "0.0123" or "1.2e-05". "-" for None."""
    if p is None:
        return "-"
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def table(rows: list[tuple[str, ...]], alignment: str) -> list[str]:
    """Lines of text. `alignment` has < (left) or > (right) for each column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths)]
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown_table(rows: list[dict[str, str]], right: Collection[str] = ()) -> str:
    """The keys are the header. `right` names the columns to align to the right."""
    header = list(rows[0])
    alignment = ["---:" if name in right else "---" for name in header]
    lines = []
    for cells in [header, alignment, *(row.values() for row in rows)]:
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines)


def wrap(text: str, indent: str = "", later_indent: str = "") -> list[str]:
    """Lines of 80 columns. A longer word stays whole."""
    return textwrap.wrap(
        text,
        80,
        initial_indent=indent,
        subsequent_indent=later_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def finite(value):
    """Infinite numbers as None, because JSON has none."""
    if isinstance(value, dict):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_json(value) -> bytes:
    """Infinite numbers become null."""
    return json.dumps(finite(value), indent=1, allow_nan=False).encode()
