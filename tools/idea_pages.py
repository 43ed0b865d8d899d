"""
Writes records/mini/IDEAS.md: what the parts of the recipe, and later ideas, do on the mini track.

    python tools/idea_pages.py                      writes the page from records/mini/ideas/
    python tools/idea_pages.py --measure NAME...    first compares these ideas with the recipe and
                                                    keeps the results; all other options go to
                                                    compare.py (--until 1%)
    python tools/idea_pages.py --keep FILE...       first keeps the results in FILE, which
                                                    `./run.sh compare --json FILE` wrote
    python tools/idea_pages.py --size wide --measure NAME...
                                                    compares with a larger model

An idea has a folder records/mini/ideas/NAME/ with these files:

    idea.json      describes the idea; written by hand
    idea.patch     changes train_gpt.py; not needed if idea.json has `options` or `patch`
    result.json    written by --measure and --keep; with --size, the file is SIZE.json

Ideas that a screen has measured (records/mini/screens/*/result.json, written by `./run.sh screen FILE
--json`) are in a separate table, with the screen's numbers instead of those in result.json.

Fields of idea.json:

    part, change   the part of the recipe, and what replaces it
    does, where    what the part does, and in which section of train_gpt.py
    records, field records of the NanoGPT speedrun that introduced it, and its effect there
    field_steps    the same effect in percent of the steps, negative for fewer steps; missing if it
                   can't be compared (for example, because it was measured with other ideas)
    patch          NAME of another idea whose patch this one uses
    options        options of train_gpt.py
    rank           place in the tables
    adds           true if the idea adds a part instead of removing one
    saves          true if the part saves time at the cost of loss; its time is judged, not its loss
    ours           true for a variation of ours, which no record of the speedrun made
    later          true for ideas from after May 2025, which are in a separate table
    muon           true for later ideas about Muon, which are in another table
    entered        the hyperparameter that the idea has become
    current        false if the patch need not apply to today's train_gpt.py

records/mini/ideas/NOTES.md is the text above the tables.

Exit status: 0 written, 1 a run failed, 2 bad input.
"""

import argparse
import itertools
import json
import shlex
import tempfile
import textwrap
from pathlib import Path

import numpy as np

from compare import main as compare
from compare_answer import goal, percent, percent_interval
from log_parsing import LogError, UsageError, run_command, write_file
from record_pages import RECORDS, markdown_table
from verify import P_VALUE, p_text

FOLDER = RECORDS / "mini" / "ideas"
SCREENS = "screens"  # the folder of the screens, beside FOLDER
FACTS = ("machine", "torch", "threads", "processes", "jobs")
FIELDS = ("part", "change", "does", "where", "records", "field")
# The recipe that all ideas are compared with: the track before NorMuon
RECIPE = [
    "--muon_beta2", "0",
    "--muon_momentum", "0.9",
    "--smear", "false",
    "--xsa", "false",
    "--relu_slope", "0",
    "--num_iterations", "490",
]
SIZES = {
    "wide": (
        "twice the width",
        ["--model_dim", "256", "--num_heads", "4", "--num_iterations", "340"],
    ),
}
# How the tables of the page differ
TWO_KINDS = [
    "The page has two kinds of tables, and their figures differ:",
    "",
    "- A [screen](screens/README.md) measures many ideas together. It uses the recipe with NorMuon (385 steps).",
    "- The other tables compare one change at a time with the recipe before NorMuon (490 steps).",
    "  An idea that a screen has measured has no row there, except at other sizes.",
    "",
]
# Not kept of a comparison, because it depends on the other ideas in the same comparison
NOT_KEPT = ("name", "words", "verdict")


# -----------------------------------------------------------------------------
# Ideas and their results


def read_json(path: Path) -> dict:
    """Raises LogError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise LogError(f"{path}: {(e.strerror or 'cannot be read').lower()}") from None
    except ValueError as e:
        raise LogError(f"{path}: not JSON ({e})") from None
    if not isinstance(found, dict):
        raise LogError(f"{path}: not a JSON object")
    return found


def read_idea(folder: Path, file: Path) -> dict:
    """Reads an idea.json and the results beside it. Raises LogError."""
    idea = read_json(file)
    for name in FIELDS:
        if not idea.get(name):
            raise LogError(f"{file}: the field {name} is missing; add it")
    idea["patch"] = folder / idea.get("patch", file.parent.name) / "idea.patch"
    if "options" not in idea and not idea["patch"].exists():
        raise LogError(f"{file}: it needs `options`, or an idea.patch beside it")
    results = {}
    for path in file.parent.glob("*.json"):
        if path != file:
            results[path.stem] = read_json(path)
    idea["result"] = results.pop("result", None)
    idea["sizes"] = results
    return idea


def read_ideas(folder: Path) -> dict[str, dict]:
    """Maps names to ideas, sorted by rank and name. Raises LogError.

    An idea has the fields of its idea.json, its `result` (or None), and `sizes`: the results at
    other sizes, by name.
    """
    ideas = {}
    for file in sorted(folder.glob("*/idea.json")):
        ideas[file.parent.name] = read_idea(folder, file)
    names = sorted(ideas, key=lambda name: (ideas[name].get("rank", 0), name))
    return {name: ideas[name] for name in names}


def without(names: tuple[str, ...], values: dict) -> dict:
    """A copy of `values` without these names."""
    return {name: value for name, value in values.items() if name not in names}


def keep(answer: Path, folder: Path, size: str | None = None) -> None:
    """Writes the results of a comparison beside the ideas that were compared.

    `answer` was written by `compare.py --json`, for the track's size or another one. Raises
    LogError and FileError.
    """
    found = read_json(answer)
    missing = [name for name in (*FACTS, "ideas", "base", "runs") if name not in found]
    if missing:
        raise LogError(f"{answer}: not written by compare.py --json ({missing[0]} is missing)")
    for effect in found["ideas"]:
        name = effect["name"]
        home = folder / name
        if not (home / "idea.json").exists():
            file = home / "idea.json"
            raise LogError(f"{answer}: {name}: {file} is missing; describe the idea there first")
        kept = {fact: found[fact] for fact in FACTS}
        kept["effect"] = without(NOT_KEPT, effect)
        kept["runs"] = [without(("path",), run) for run in found["runs"][name]]
        kept["base_runs"] = [without(("path",), run) for run in found["runs"][found["base"]]]
        text = json.dumps(kept, indent=1) + "\n"
        write_file(home / f"{size or 'result'}.json", text.encode())


def as_idea(name: str, idea: dict) -> str:
    """The idea as an argument of compare.py's --idea: a name with a patch, options, or both."""
    words = []
    if idea["patch"].exists() and idea.get("current", True):
        words.append(shlex.quote(str(idea["patch"])))
    if "options" in idea:
        words.append(idea["options"])
    return f"{name}={' '.join(words)}"


def measure(names: list[str], folder: Path, size: str | None, options: list[str]) -> int:
    """Compares ideas with the recipe and keeps the results. Returns compare.py's exit status."""
    ideas = read_ideas(folder)
    words = ["--track", "mini", *RECIPE]
    if size:
        words += SIZES[size][1]
    words += options
    for name in names:
        if name not in ideas:
            raise UsageError(f"{name}: no such idea; {folder} has a folder for each idea")
        words += ["--idea", as_idea(name, ideas[name])]
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        status = compare([*words, "--json", str(answer)])
        if status == 0:
            keep(answer, folder, size)
    return status


# -----------------------------------------------------------------------------
# Screens


def read_screens(folder: Path) -> dict[str, dict]:
    """Maps the names of screens of ideas to their results. A result is what `screen.py --json` wrote
    about the largest group of blocks, and `effects`: names of ideas to factors. Raises LogError."""
    screens = {}
    for file in sorted((folder.parent / SCREENS).glob("*/result.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))[0]
            effects = {}
            for factor in found["factors"]:
                if factor["patch"]:
                    effects[Path(factor["patch"]).parent.name] = factor
        except (OSError, ValueError, LookupError, TypeError):
            raise LogError(f"{file}: not written by screen.py --json") from None
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


def screen_section(name: str, screen: dict, ideas: dict[str, dict]) -> list[str]:
    """The lines about a screen. Raises LogError."""
    rows = []
    effects = screen["effects"]
    for idea_name in sorted(effects, key=lambda n: effects[n]["difference"]):
        if idea_name not in ideas:
            raise LogError(f"{name}: there is no idea {idea_name}")
        idea = ideas[idea_name]
        effect = effects[idea_name]
        row = (
            f"[{idea['part']}](ideas/{idea_name}/)",
            idea["change"],
            f"{effect['difference']:+.4f}",
            percent(effect["steps"]),
            percent_interval(effect["steps_interval"]),
            effect["verdict"],
            f"{idea['records']}: {idea['field']}",
            figure_there(idea, effect),
        )
        rows.append(row)
    header = (
        "idea",
        "change",
        "loss",
        "steps",
        "99% interval",
        "verdict",
        "record and gain in the speedrun",
        "the speedrun's gain is",
    )
    seeds = " and ".join(map(str, screen["seeds"]))
    return [
        f"## Measured together: {name}",
        "",
        f"{len(effects)} ideas, each off or on, in 32 combinations with seeds {seeds}:",
        f"{32 * len(screen['seeds'])} runs on {'; '.join(screen['machines'])}, {screen['dtype']}, "
        f"PyTorch {screen['torch']}.",
        f"A run's standard deviation is {screen['sd']:.4f}.",
        "",
        *markdown_table(header, rows, right=header[2:5]),
        "",
        f"![The effects with their intervals](screens/{name}/effects.png)",
        "",
    ]


def screens_explained(until: float) -> list[str]:
    """The lines that explain the columns of the screens' tables."""
    return [
        "An effect is the mean over all combinations of the other factors. A screen compares losses",
        "only, not the time of a step. The intervals have 99% confidence for all ideas of a",
        "screen together.",
        "",
        "- **loss**: the loss with the idea minus the loss without it.",
        "- **steps**: how many more (+) or fewer (-) steps it takes to reach the same loss.",
        "- **verdict**: *helps* or *hurts* if the loss clearly differs. The interval of the steps",
        "  can then still contain zero, because it includes the error of converting losses to",
        f"  steps. *Not worth it* if a gain of {goal(until)} of the steps is ruled out. Otherwise",
        "  *undecided*: more runs are needed.",
        "- **record and gain in the speedrun**: the record of the NanoGPT speedrun that",
        "  introduced the idea, and how many steps it saved there. Percentages with *about* are",
        "  our estimates: the steps that it saved, divided by the steps of a record near it.",
        "- **the speedrun's gain is**: *inside* our interval or *excluded* by it. *Not",
        "  comparable* if the speedrun measured the idea together with other changes.",
        "",
    ]


# -----------------------------------------------------------------------------
# Tables


def verdict_on(idea: dict, p: float | None) -> str:
    """Whether the idea's part helps on mini: "helps", "hurts" or "unclear".

    A part that was removed helps if the loss is higher without it. A part that saves time is judged
    by its time.
    """
    effect = idea["result"]["effect"]
    by = ""
    clear = p is not None and p < P_VALUE
    lower = effect["difference"] < 0
    if idea.get("saves"):
        by = " (time)"
        interval = effect["time_interval"]
        lower = interval is not None and interval[1] < 0
        higher = interval is not None and interval[0] > 0
        clear = lower or higher
    if not clear:
        return "unclear" + by
    if idea.get("adds"):
        part_helps = lower
    else:
        part_helps = not lower  # the part was removed
    return ("helps" if part_helps else "hurts") + by


def holm(ps: list[float]) -> list[float]:
    """p-values with Holm's correction (1979): the smallest times n, the next one times n - 1, ..."""
    corrected = [0.0] * len(ps)
    largest = 0.0
    for rank, i in enumerate(np.argsort(ps)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = largest
    return corrected


def difference(effect: dict) -> str:
    """A difference in loss with its 99% interval."""
    low, high = effect["difference_interval"]
    if low is None:
        return f"{effect['difference']:+.4f}"  # too few pairs for an interval
    return f"{effect['difference']:+.4f} ({low:+.4f} to {high:+.4f})"


def measured_ideas(ideas: dict[str, dict]) -> dict[str, dict]:
    """The ideas that were measured at the track's size."""
    return {name: idea for name, idea in ideas.items() if idea["result"]}


def corrected_ps(ideas: dict[str, dict]) -> dict[str, float | None]:
    """p-values of the measured ideas, with Holm's correction over all of them."""
    measured = measured_ideas(ideas)
    ps = holm([idea["result"]["effect"]["p"] for idea in measured.values()])
    return dict(zip(measured, ps))


def table(ideas: dict[str, dict]) -> list[str]:
    """The lines of a table with one row per idea."""
    if not measured_ideas(ideas):
        command = "`python tools/idea_pages.py --measure NAME`"
        ready = f"{len(ideas)} changes are ready to be measured with {command}."
        return [f"Nothing has been measured yet. {ready}", ""]
    rows = []
    for name, p in corrected_ps(ideas).items():
        idea = ideas[name]
        effect = idea["result"]["effect"]
        row = {
            "part": idea["part"],
            "change": f"[{idea['change']}](ideas/{name}/)",
            "record and effect in the speedrun": f"{idea['records']}: {idea['field']}",
            "n": str(effect["n"]),
            "difference in loss (99%)": difference(effect),
            "p": p_text(p),
            "steps": percent(effect["steps"]),
            "time": percent(effect["time"]),
            "verdict": verdict_on(idea, p),
        }
        rows.append(row)
    header = tuple(rows[0])
    cells = [tuple(row.values()) for row in rows]
    return [*markdown_table(header, cells, right=header[3:8]), ""]


def columns(ideas: dict[str, dict]) -> list[str]:
    """The lines that explain the columns of the tables."""
    test = "Welch's t-test on the losses of five runs each"
    if any(idea["result"]["effect"]["n"] > 5 for idea in measured_ideas(ideas).values()):
        test += ", or the paired test of `compare` where n is larger"
    return [
        "## Columns of the tables",
        "",
        "- **n**: the number of runs with the change. The recipe has as many.",
        "- **difference in loss**: the loss with the change minus the loss of the recipe, with",
        "  its 99% interval.",
        f"- **p**: {test}, with Holm's correction over the rows of the table.",
        "- **steps**, **time**: how much more (+) or less (-) the change needs to reach the loss",
        "  of the recipe. A dash means that there is no estimate.",
        "- **verdict**: whether the part in the first column helps on `mini`. If the change",
        "  removes or replaces the part, the part helps if the loss gets higher. If the change",
        "  adds the part, it helps if the loss gets lower. *Helps* and *hurts* need p <",
        f"  {P_VALUE:g}. Otherwise it is *unclear*.",
        "- ***(time)*** after a verdict: the part saves time at the cost of loss, so its time is",
        "  judged. If the 99% interval of the time contains zero, it is *unclear*.",
        "",
    ]


def verdicts_on_parts(ideas: dict[str, dict]) -> list[str]:
    """One verdict for each part. If a part was replaced in several ways, the best one counts."""
    parts = {}
    for name, p in corrected_ps(ideas).items():
        idea = ideas[name]
        loss = idea["result"]["effect"]["difference"]
        parts.setdefault(idea["part"], []).append((loss, verdict_on(idea, p)))
    return [min(ways)[1] for ways in parts.values()]


def sizes_table(ideas: dict[str, dict]) -> list[str]:
    """The lines about ideas that were also measured at another size. None if there are none."""
    header = (
        "idea",
        "difference in loss (99%)",
        "other size",
        "n",
        "difference there (99%)",
        "step time there",
        "p there",
        "signs",
    )
    rows = []
    for size, (words, _) in SIZES.items():
        for name, idea in measured_ideas(ideas).items():
            if size not in idea["sizes"]:
                continue
            here = idea["result"]["effect"]
            there = idea["sizes"][size]["effect"]
            same_sign = here["difference"] * there["difference"] > 0
            row = (
                f"[{idea['part']}: {idea['change']}](ideas/{name}/)",
                difference(here),
                words,
                str(there["n"]),
                difference(there),
                f"{there['step_time']:.3f}" if there["step_time"] else "-",
                p_text(there["p"]),
                "same" if same_sign else "opposite",
            )
            rows.append(row)
    if not rows:
        return []
    lines = ["## Other sizes", "", *markdown_table(header, rows, right=header[3:7]), ""]
    for words, options in SIZES.values():
        setting = f"the recipe with `{' '.join(options)}` and the same learning rates"
        lines.append(f"{words.capitalize()}: {setting}.")
    lines.append("Step time is relative to the recipe's. p is not corrected.")
    return [*lines, ""]


# -----------------------------------------------------------------------------
# The page

def wrapped(text: str, indent: str = "") -> list[str]:
    """The lines of a paragraph. All but the first are indented."""
    return textwrap.wrap(
        text,
        width=100,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(n: int, noun: str) -> str:
    """Like "1 run" or "2 runs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def machines(results: list[dict]) -> str:
    """The machines that results come from, and how many runs they made at a time."""
    ways = {}  # machine -> how the runs were made
    for result in results:
        machine = f"{result['machine']}, PyTorch {result['torch']}"
        runs = counted(result["jobs"], "run")
        threads = counted(result["threads"], "thread")
        ways.setdefault(machine, set()).add(f"{runs} at a time, {threads} per run")
    texts = []
    for machine, found in ways.items():
        texts.append(f"{machine} ({'; '.join(sorted(found))})")
    return "; ".join(texts)


def summary(recipe: dict[str, dict]) -> list[str]:
    """A paragraph about the results for the recipe's parts. No lines if nothing was measured."""
    results = [idea["result"] for idea in measured_ideas(recipe).values()]
    if not results:
        return []
    runs = sorted({result["effect"]["n"] for result in results})
    verdicts = verdicts_on_parts(recipe)
    counts = []
    for word in ("helps", "unclear", "hurts"):
        count = len([verdict for verdict in verdicts if verdict.startswith(word)])
        counts.append(f"{word}: {count}")
    each = " or ".join(str(n) for n in runs)
    return [
        f"{len(results)} of {len(recipe)} changes to the recipe were measured, {each} runs each.",
        "Each one adds, removes or replaces a part that helped the larger model of the NanoGPT",
        f"speedrun. Of these parts, on `mini`: **{', '.join(counts)}**. If a part was replaced in",
        "several ways, the best one counts.",
        "",
        *wrapped(f"Machine: {machines(results)}."),
        "",
    ]


def later_section(title: str, ideas: dict[str, dict]) -> list[str]:
    """The lines about ideas from after May 2025. None if there are no ideas."""
    if not ideas:
        return []
    entered = []
    for idea in ideas.values():
        if idea.get("entered"):
            entered.append(f"{idea['part']} (`{idea['entered']}`)")
    adopted = ", ".join(entered) or "none of them"
    own = []
    for idea in ideas.values():
        if idea.get("ours") and idea["part"] not in own:
            own.append(idea["part"])
    lines = [
        f"## {title}",
        "",
        "These ideas shortened the NanoGPT speedrun after May 2025. Each was added alone to",
        "a recipe that had none of them. An idea that doesn't help here may help at the official",
        "size.",
    ]
    if own:
        lines.append(f"Not an idea of the speedrun, but a variation of ours: {', '.join(own)}.")
    return [*lines, f"The mini track now uses {adopted}.", "", *table(ideas)]


def descriptions(title: str, ideas: dict[str, dict]) -> list[str]:
    """The lines that say what each part does. None if there are no ideas."""
    lines = {}
    for idea in ideas.values():
        text = f"- **{idea['part']}** (section {idea['where']}): {idea['does']}"
        lines.setdefault(idea["part"], wrapped(text, indent="  "))
    if not lines:
        return []
    return [f"## {title}", "", *itertools.chain(*lines.values()), ""]


def page(folder: Path) -> str:
    """IDEAS.md. Raises LogError."""
    ideas = read_ideas(folder)
    screens = read_screens(folder)
    screened = {name for screen in screens.values() for name in screen["effects"]}
    recipe = {}
    later = {}
    muon = {}
    for name, idea in ideas.items():
        if name in screened:
            continue
        if not idea.get("later"):
            recipe[name] = idea
        elif idea.get("muon"):
            muon[name] = idea
        else:
            later[name] = idea
    notes = folder / "NOTES.md"
    lines = [
        "# What ideas are worth on the mini track",
        "",
        "`python tools/idea_pages.py` writes this page from [ideas/](ideas/) and "
        "[screens/](screens/). Don't edit it.",
        "",
    ]
    if screens:
        lines += TWO_KINDS
    for name, screen in screens.items():
        lines += screen_section(name, screen, ideas)
    if screens:
        lines += screens_explained(next(iter(screens.values()))["until"])
        lines += ["## Measured one by one", ""]
    lines += summary(recipe)
    if notes.exists():
        lines += [notes.read_text(encoding="utf-8").strip(), ""]
    lines += columns({**recipe, **later, **muon})
    lines += ["## Parts of the recipe", "", *table(recipe)]
    lines += later_section("Later ideas", later)
    lines += later_section("Later ideas about Muon", muon)
    lines += sizes_table(ideas)
    lines += descriptions("What the parts do", recipe)
    all_later = {name: idea for name, idea in ideas.items() if idea.get("later")}
    lines += descriptions("What the later ideas do", all_later)
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="idea_pages.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--keep", type=Path, nargs="+", default=[], metavar="FILE", help="keep these results")
    add("--measure", nargs="+", default=[], metavar="NAME", help="compare these ideas now")
    add("--size", choices=SIZES, help="wide: twice the width (default: as the track)")
    add("--folder", type=Path, default=FOLDER, help="folder of ideas (default: records/mini/ideas)")
    args, options = parser.parse_known_args(argv)
    if options and not args.measure:
        parser.error(f"{options[0]}: unknown option; only --measure passes options to compare.py")
    for answer in args.keep:
        keep(answer, args.folder, args.size)
    if args.measure:
        status = measure(args.measure, args.folder, args.size, options)
        if status:
            return status
    write_file(args.folder.parent / "IDEAS.md", page(args.folder).encode())
    return 0


if __name__ == "__main__":
    run_command(main)
