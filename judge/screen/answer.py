"""The answer of screen.py: as a table, and as JSON."""

from dataclasses import asdict

from judge.logs.comparable import judged_in_words
from judge.compare.answer import NO_SEED, losses_in_words, machine_in_words
from judge.screen.blocks import Screen
from judge.screen.design import PartEffect
from judge.text import as_json, plural, short, table, wrap

# -----------------------------------------------------------------------------
# Words


def table_of_parts(effects: list[PartEffect]) -> list[str]:
    """A line a part."""
    rows = [("part", "without it", "interval", "answer")]
    for effect in effects:
        interval = f"({losses_in_words(effect.without)})"
        rows.append((short(effect.name, 30), f"{effect.without.value:+.4f}", interval, effect.verdict))
    return table(rows, "<><<")


def interaction_in_words(effect: PartEffect) -> str:
    value = effect.without.value
    return (
        f"{effect.name}: together they do {'more' if value > 0 else 'less'} than alone ({value:+.4f})."
    )


def facts_in_words(s: Screen) -> str:
    losses = s.losses()
    blocks, combinations = losses.shape
    means = losses.mean(axis=0)
    average = "a mean over combinations of the other parts"
    if not s.design.groups and len(s.groups) > 1:
        average = "for the whole"
    return " ".join(
        [
            f"The loss with all parts is {means[0]:.4f}, with none {means[-1]:.4f}.",
            f"{plural(blocks, 'block')} of {combinations} combinations.",
            f"Without it: how much higher the loss is then, {average}.",
            "Each bound of an interval is wrong at most 1 time in 100, for all parts together, however often you look.",
            f"Barnacle: we are 95% sure that the part changes the loss by less than {s.until:g}.",
            judged_in_words(list(s.variants[0].runs.values())),
            machine_in_words(s.pool),
        ]
    )


def effects_in_words(s: Screen) -> list[str]:
    """Lines of 80 columns."""
    if not len(s.losses()):
        return ["Too early for an answer: no block is finished yet."]
    lines = wrap(NO_SEED) if s.pool.settings.no_seed else []
    lines += table_of_parts(s.effects())
    for effect in s.interactions():
        lines += wrap(interaction_in_words(effect))
    return [*lines, "", *wrap(facts_in_words(s))]


def effects_as_json(s: Screen) -> bytes:
    found = {
        "until": s.until,
        "parts": list(map(asdict, s.effects())),
        "interactions": list(map(asdict, s.interactions())),
        "combinations": s.design.rows.tolist(),
        "losses": s.losses().tolist(),
    }
    return as_json(found)
