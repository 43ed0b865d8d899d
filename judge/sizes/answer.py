"""The answer of a ladder of sizes, in words."""

from judge.compare.answer import interval_in_words, percent
from judge.sizes.trend import (
    LEVEL,
    Size,
    changes,
    forecast,
    interval_of,
    trend,
    verdict_over,
    verdicts,
)
from judge.stats.decide import Estimate
from judge.text import short, table, wrap

LEVELS = (
    "Each bound in the table, helps and hurts are wrong at most 1 time in 100, not worth it 5 times, however often "
    "you look."
)


def headline(name: str, sizes: list[Size]) -> str:
    """The verdict over the sizes that were run."""
    verdict = verdict_over(verdicts(sizes))
    where = f"at all {len(sizes)} sizes" if len(sizes) > 1 else f"at {sizes[0].name}"
    helpful = [size.name for size in sizes if size.effect.verdict == "helps"]
    if verdict == "helps only small":
        verdict, where = "helps", f"only at small sizes, up to {helpful[-1]}"
    elif verdict == "helps only large":
        verdict, where = "helps", f"only at large sizes, from {helpful[0]} on"
    elif verdict == "undecided":
        where = "over the sizes"
    return f"{short(name, 30)}: {verdict} {where}."


def with_interval(estimate: Estimate) -> str:
    return f"{percent(estimate.value)} ({interval_in_words(estimate)})"


def size_table(sizes: list[Size]) -> list[str]:
    rows = [("  size", "loss", "steps to the same loss", "answer", "pairs", "minutes")]
    for size in sizes:
        effect = size.effect
        steps = with_interval(effect.steps) if effect.steps else "unknown"
        numbers = (f"{effect.difference.value:+.4f}", steps, effect.verdict)
        rows.append((f"  {size.name}", *numbers, str(effect.n), f"{size.minutes:.1f}"))
    return table(rows, "<>><>>")


def forecast_in_words(size: Size) -> str:
    """Before it is run."""
    return f"Forecast for {size.name}: {with_interval(size.forecast)}."


def trend_in_words(sizes: list[Size], pairs: int) -> list[str]:
    """Sentences about the trend, about what was forecast and then measured, and about a model twice as large."""
    line = trend(changes(sizes))
    if line is None:
        return ["No trend: it takes two sizes with all pairs, where it is known what a step is worth."]
    measured = [size for size in sizes if size.change]
    found = ", ".join(f"{size.name} {percent(size.change.value)}" for size in measured)
    sentences = [
        f"Trend, from the first {pairs} pairs of each size ({found}): each doubling of the parameters changes "
        f"the idea's steps by {with_interval(line)}."
    ]
    for size in measured:
        if size.forecast:
            was = with_interval(interval_of(size.change))
            sentences.append(f"{forecast_in_words(size)[:-1]}, before it was run; measured {was}.")
    last = measured[-1]
    if ahead := forecast(changes(sizes), 2 * last.parameters):
        sentences.append(f"Forecast for twice {last.name}: {with_interval(ahead)}.")
    return [*sentences, f"These intervals are {LEVEL:.0%}."]


def ladder_in_words(name: str, sizes: list[Size], pairs: int, facts: list[str]) -> list[str]:
    """Lines of 80 columns."""
    done = [size for size in sizes if size.effect]
    if not done:
        return wrap(" ".join([f"Too early for an answer; {sizes[0].name} takes 2 pairs.", *facts]))
    notes = [f"{size.name}: {note}" for size in done for note in size.notes]
    words = " ".join([LEVELS, *trend_in_words(done, pairs), *notes, *facts])
    return [headline(name, done), *size_table(done), *wrap(words)]
