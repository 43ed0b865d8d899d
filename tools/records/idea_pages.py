"""
Writes records/mini/IDEAS.md: what the ideas of the NanoGPT speedrun are worth on the mini track.

The figures come from the screens of ideas, records/mini/screens/*/result.json, which
`./run.sh screen FILE --json` writes. A factor of a screen is an idea if it has a patch in
records/mini/ideas/. An idea has a folder there, with these files:

    idea.json      describes the idea
    idea.patch     changes train_gpt.py, or several files

Fields of idea.json. The first five are required:

    part, change   the idea, or the part of the recipe that it removes or replaces; and what changes
    does           what the idea or the part does
    records, field records of the NanoGPT speedrun that introduced it, and its effect there
    field_steps    the same effect in percent of the steps, negative for fewer steps; missing if it
                   can't be compared (for example, because it was measured with other ideas)
    later          true for ideas from after May 2025
    commit         the commit that the patch changes; missing: the current files
    options        options of train_gpt.py that the idea needs, too
"""

import json
import textwrap
from pathlib import Path

from tools.common import LogError, goal, markdown_table, percent, percent_interval
from tools.compare import sources as compare_sources

PATCHES = "records/mini/ideas/"  # how the patch of an idea begins in a screen's definition
FIELDS = ("part", "change", "does", "records", "field")

INTRODUCTION = """\
# What ideas are worth on the mini track

`./run.sh submit --regenerate` writes this page from [ideas/](ideas/) and [screens/](screens/). Don't
edit it.

A [screen](screens/README.md) measures up to 16 ideas at once. An idea that doesn't help here may
help at the official size. [NOTES.md](NOTES.md#five-runs-for-each-idea) has older results.
"""

COLUMNS = """
- **steps**: how many more (+) or fewer (-) steps it takes to reach the same loss. The effect is the
  mean over all combinations of the other factors. The time of a step isn't counted.
- **99% interval**: for all ideas of a screen together.
- **verdict**: *helps* or *hurts* if the loss clearly differs. The interval of the steps can then
  still contain zero, because it includes the error of converting losses to steps. *Not worth it*
  if a gain of {until} of the steps is ruled out. Otherwise *undecided*: more runs are needed.
- **record and gain in the speedrun**: the record of the NanoGPT speedrun that introduced the idea,
  and how many steps it saved there. Percentages with *about* are our estimates: the steps that it
  saved, divided by the steps of a record near it.
- **that gain is**: *inside* our interval or *excluded* by it. *Not comparable* if the speedrun
  measured the idea together with other changes.
"""

UNMEASURED = """
## Not in a screen yet

To measure one of these, run `./run.sh compare --idea records/mini/ideas/NAME`. Its `idea.json`
describes it.

Ideas from after May 2025:

{later}

Parts of the recipe, removed or replaced:

{recipe}
"""


# -----------------------------------------------------------------------------
# Ideas


def read_ideas(folder: Path) -> dict[str, dict]:
    """Maps the names of ideas to their idea.json, sorted by name. Raises LogError and UsageError."""
    ideas = {}
    for file in sorted(folder.glob("*/idea.json")):
        idea = compare_sources.read_idea(file.parent)
        missing = [name for name in FIELDS if not idea.get(name)]
        if missing:
            raise LogError(f"{file}: the field {missing[0]} is missing; add it")
        ideas[file.parent.name] = idea
    return ideas


def idea_row(name: str, idea: dict, **figures: str) -> dict[str, str]:
    """A row of a table, with these figures."""
    return {
        "idea": f"[{idea['part']}](ideas/{name}/)",
        "change": idea["change"],
        **figures,
        "record and gain in the speedrun": f"{idea['records']}: {idea['field']}",
    }


# -----------------------------------------------------------------------------
# Screens


def read_screens(folder: Path) -> dict[str, dict]:
    """Maps the names of screens of ideas to their results.

    A result is what `screen --json` wrote about the largest group of blocks, and `effects`, which
    maps names of ideas to factors. A screen with too few blocks to know the steps is left out.
    """
    screens = {}
    for file in sorted(folder.glob("*/result.json")):
        found = json.loads(file.read_bytes())[0]
        effects = {}
        for factor in found["factors"]:
            if factor["patch"].startswith(PATCHES) and factor["steps"] is not None:
                effects[Path(factor["patch"]).parent.name] = factor
        if effects:
            screens[file.parent.name] = {**found, "effects": effects}
    return screens


def figure_there(idea: dict, effect: dict) -> str:
    """Whether the interval contains the speedrun's own figure."""
    if "field_steps" not in idea:
        return "not comparable"
    low, high = (round(100 * bound, 1) for bound in effect["steps_interval"])  # as they are shown
    inside = low <= idea["field_steps"] <= high
    return "inside" if inside else "excluded"


def screen_table(screen: dict, ideas: dict[str, dict]) -> str:
    """One row per idea, the most helpful one first."""
    rows = []
    for name, effect in sorted(screen["effects"].items(), key=lambda e: e[1]["difference"]):
        figures = {
            "steps": percent(effect["steps"]),
            "99% interval": percent_interval(effect["steps_interval"]),
            "verdict": effect["verdict"],
        }
        row = idea_row(name, ideas[name], **figures)
        row["that gain is"] = figure_there(ideas[name], effect)
        rows.append(row)
    return markdown_table(rows, right=("steps", "99% interval"))


def screen_section(name: str, screen: dict, ideas: dict[str, dict]) -> str:
    seeds = ", ".join(map(str, screen["seeds"]))
    runs = 32 * len(screen["seeds"])
    machines = ", and ".join(screen["machines"])
    facts = f"{len(screen['effects'])} ideas, each off or on, in 32 combinations. "
    facts += f"{runs} runs with seeds {seeds}, in {screen['dtype']} with PyTorch {screen['torch']}, "
    facts += f"on {machines}. A run's standard deviation is {screen['sd']:.4f}."
    facts = wrapped(facts)
    table = screen_table(screen, ideas)
    return f"""
## The screen {name}

{facts}

{table}

![The effects with their intervals](screens/{name}/effects.png)
"""


# -----------------------------------------------------------------------------
# The page


def wrapped(text: str, indent: str = "") -> str:
    """Lines of a paragraph. All but the first are indented."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def descriptions(names: list[str], ideas: dict[str, dict]) -> str:
    """What ideas do. Two ideas about the same part need only one entry."""
    texts = {f"- **{ideas[name]['part']}**: {ideas[name]['does']}" for name in names}
    lines = [wrapped(text, indent="  ") for text in sorted(texts, key=str.lower)]
    return "\n## What they do\n\n" + "\n".join(lines) + "\n"


def unmeasured(ideas: dict[str, dict]) -> str:
    """About ideas that no screen has measured."""
    later = []
    recipe = []
    for name, idea in sorted(ideas.items(), key=lambda i: i[1]["part"].lower()):
        rows = later if idea.get("later") else recipe
        rows.append(idea_row(name, idea))
    return UNMEASURED.format(later=markdown_table(later), recipe=markdown_table(recipe))


def page(root: Path) -> str:
    """mini/IDEAS.md. Raises LogError and UsageError."""
    ideas = read_ideas(root / "mini/ideas")
    text = INTRODUCTION
    measured = []
    for name, screen in read_screens(root / "mini/screens").items():
        text += screen_section(name, screen, ideas)
        measured += screen["effects"]
        until = goal(screen["until"])
    text += COLUMNS.format(until=until) + descriptions(measured, ideas)
    return text + unmeasured({name: idea for name, idea in ideas.items() if name not in measured})
