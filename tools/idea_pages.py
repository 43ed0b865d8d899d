"""
Writes records/mini/IDEAS.md: what parts of the recipe and later ideas are worth on the mini track.

    python tools/idea_pages.py                      write the page from records/mini/ideas/
    python tools/idea_pages.py --measure NAME...    first compare these ideas with the recipe, and keep the
                                                    results; other options go to compare.py (--runs 8)
    python tools/idea_pages.py --keep FILE...       first keep what `./run.sh compare --json FILE` found
    python tools/idea_pages.py --size wide --measure NAME...    the same at another size (SIZES, below)

The folder of an idea, records/mini/ideas/NAME/, contains:

    idea.json      written by hand
    idea.patch     the change to train_gpt.py, unless idea.json has options or names another idea's patch
    result.json    written by --keep and --measure; for another size, SIZE.json

Fields of idea.json:

    part, change   the part of the recipe, and what replaces it
    does, where    what the part does, and in which section of train_gpt.py
    records, field the record of the NanoGPT speedrun that introduced it, and its effect there
    patch          the NAME of the idea whose patch this one uses
    options        options of train_gpt.py
    rank           place in the tables
    adds           true if the idea adds a part instead of removing it
    saves          true if it saves time at the cost of loss; then it is judged by its time
    later          true for ideas from after May 2025, which have their own table
    muon           true for later ideas about Muon, which have another table
    entered        the hyperparameter that the idea has become
    current        false if the patch need not apply to train_gpt.py any more

records/mini/ideas/NOTES.md is the text above the tables.

Exit status: 0 written, 1 a run failed, 2 bad input.
"""

import argparse
import json
import shlex
import tempfile
from pathlib import Path

from compare import main as compare
from compare_stats import holm, percent
from log_parsing import LogError, UsageError, run_command, write_file
from record_pages import RECORDS, markdown_table
from verify import P_VALUE, p_text

FOLDER = RECORDS / "mini" / "ideas"
FACTS = ("machine", "torch", "threads", "processes", "jobs")
FIELDS = ("part", "change", "does", "where", "records", "field")
# The track before NorMuon. All rows are differences to it.
RECIPE = ["--muon_beta2", "0", "--num_iterations", "490"]
SIZES = {
    "wide": (
        "twice the width",
        ["--model_dim", "256", "--num_heads", "4", "--num_iterations", "340"],
    ),
}
# Results of a comparison that depend on the other ideas in it
NOT_KEPT = ("name", "words", "verdict", "p_corrected", "step_time_p_corrected")


# -----------------------------------------------------------------------------
# Ideas and their results

def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def read_idea(folder: Path, file: Path) -> dict:
    """Reads an idea.json and the results beside it. Raises ValueError."""
    idea = read_json(file)
    for name in FIELDS:
        if not idea.get(name):
            raise ValueError(f"{name} is missing")
    idea["patch"] = folder / idea.get("patch", file.parent.name) / "idea.patch"
    if "options" not in idea and not idea["patch"].exists():
        raise ValueError("the idea needs options, or an idea.patch beside it")
    results = {}
    for path in file.parent.glob("*.json"):
        if path != file:
            results[path.stem] = read_json(path)
    idea["result"] = results.pop("result", None)
    idea["sizes"] = results
    return idea


def read_ideas(folder: Path) -> dict[str, dict]:
    """Maps names to ideas, sorted by rank: fields of idea.json, `result`, and `sizes`. Raises LogError."""
    ideas = {}
    for file in sorted(folder.glob("*/idea.json")):
        try:
            ideas[file.parent.name] = read_idea(folder, file)
        except ValueError as e:
            raise LogError(f"{file}: {e}") from None
    return dict(sorted(ideas.items(), key=lambda item: (item[1].get("rank", 0), item[0])))


def without(names: tuple[str, ...], values: dict) -> dict:
    return {name: value for name, value in values.items() if name not in names}


def keep(answer: Path, folder: Path, size: str | None = None) -> None:
    """Keeps the results of a comparison, made at the track's size or another one. Raises LogError, FileError."""
    found = read_json(answer)
    for effect in found["ideas"]:
        name = effect["name"]
        home = folder / name
        if not (home / "idea.json").exists():
            raise LogError(f"{answer}: {name}: {home / 'idea.json'} is missing; it describes the idea")
        kept = {fact: found[fact] for fact in FACTS}
        kept["effect"] = without(NOT_KEPT, effect)
        kept["runs"] = [without(("path",), run) for run in found["runs"][name]]
        kept["base_runs"] = [without(("path",), run) for run in found["runs"][found["base"]]]
        text = json.dumps(kept, indent=1) + "\n"
        write_file(home / f"{size or 'result'}.json", text.encode())


def as_idea(name: str, idea: dict) -> str:
    """The argument for compare.py's --idea: a patch, options, or both."""
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
            raise UsageError(f"{name}: no such idea; there are {', '.join(ideas)}")
        words += ["--idea", as_idea(name, ideas[name])]
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        status = compare([*words, "--json", str(answer)])
        if status == 0:
            keep(answer, folder, size)
    return status


# -----------------------------------------------------------------------------
# Tables

def verdict_on(idea: dict, p: float | None) -> str:
    """Whether mini agrees with the speedrun. Each part helped there: without it the loss is higher.

    A part that saves time is judged by its time.
    """
    effect = idea["result"]["effect"]
    if idea.get("saves"):
        low, high = effect["time_interval"] or (-1, 1)
        seen = low > 0 or high < 0
        lower = high < 0
        by = " (time)"
    else:
        seen = p is not None and p < P_VALUE
        lower = effect["difference"] < 0
        by = ""
    if not seen:
        return "not seen" + by
    agrees = lower == idea.get("adds", False)
    return ("agrees" if agrees else "disagrees") + by


def difference(effect: dict) -> str:
    """A difference in loss with its interval."""
    low, high = effect["difference_interval"]
    return f"{effect['difference']:+.4f} ({low:+.4f} to {high:+.4f})"


def measured_ideas(ideas: dict[str, dict]) -> dict[str, dict]:
    return {name: idea for name, idea in ideas.items() if idea["result"]}


def corrected_ps(ideas: dict[str, dict]) -> dict[str, float | None]:
    """p-values of the ideas that were measured, with Holm's correction."""
    measured = measured_ideas(ideas)
    ps = holm([idea["result"]["effect"]["p"] for idea in measured.values()])
    return dict(zip(measured, ps))


def table(ideas: dict[str, dict]) -> list[str]:
    """The lines of a table with one row per idea."""
    if not measured_ideas(ideas):
        command = "`python tools/idea_pages.py --measure NAME`"
        return [f"Nothing has been measured yet. {len(ideas)} changes are ready: {command}.", ""]
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
            "sign": verdict_on(idea, p),
        }
        rows.append(row)
    header = tuple(rows[0])
    cells = [tuple(row.values()) for row in rows]
    return [
        *markdown_table(header, cells, right=header[3:8]),
        "",
        "Steps and time: how much more or less the change needs for the loss of the whole recipe. The sign is that of the "
        "difference in loss. If a part saves time at the cost of loss, it is that of the time, by its 99% interval.",
        "",
    ]


def verdicts_on_parts(ideas: dict[str, dict]) -> list[str]:
    """One verdict for each part. Of several ways to replace a part, the best one counts."""
    parts = {}
    for name, p in corrected_ps(ideas).items():
        idea = ideas[name]
        loss = idea["result"]["effect"]["difference"]
        parts.setdefault(idea["part"], []).append((loss, verdict_on(idea, p)))
    return [min(ways)[1] for ways in parts.values()]


def sizes_table(ideas: dict[str, dict]) -> list[str]:
    """Ideas that were also measured at another size. No lines if there are none."""
    header = ("idea", "track's size (99%)", "size", "n", "there (99%)", "step time", "p", "sign")
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
                f"{there['step_time']:.3f}",
                p_text(there["p"]),
                "same" if same_sign else "opposite",
            )
            rows.append(row)
    if not rows:
        return []
    lines = ["## Other sizes", "", *markdown_table(header, rows, right=header[3:7]), ""]
    for words, options in SIZES.values():
        lines.append(
            f"{words.capitalize()}: `{' '.join(options)}`, otherwise the recipe with its learning rates."
        )
    lines.append("p is for the other size, uncorrected. Step times are fractions of the recipe's.")
    return [*lines, ""]


# -----------------------------------------------------------------------------
# The page

def machines(results: list[dict]) -> str:
    found = set()
    for result in results:
        found.add(
            f"{result['machine']} (threads per run: {result['threads']}, runs at a time: {result['jobs']}, "
            f"PyTorch {result['torch']})"
        )
    return "; ".join(sorted(found))


def summary(recipe: dict[str, dict]) -> list[str]:
    """What was measured of the recipe's parts, in a paragraph. No lines if nothing was."""
    results = [idea["result"] for idea in measured_ideas(recipe).values()]
    if not results:
        return []
    runs = sorted({result["effect"]["n"] for result in results})
    verdicts = verdicts_on_parts(recipe)
    counts = []
    for words, start in (("helps too", "agrees"), ("not seen", "not seen"), ("hurts", "disagrees")):
        count = len([verdict for verdict in verdicts if verdict.startswith(start)])
        counts.append(f"{words}: {count}")
    text = (
        f"{len(results)} of {len(recipe)} changes to the recipe were measured, with "
        f"{' or '.join(str(n) for n in runs)} runs each, on {machines(results)}. Each part helped at the official "
        f"size. Of the parts measured here: **{', '.join(counts)}** (p < {P_VALUE:g}, Welch's t-test with Holm's "
        "correction over all rows; of several ways to replace a part, the best one counts)."
    )
    return [text, ""]


def later_section(title: str, ideas: dict[str, dict]) -> list[str]:
    """A table of ideas from after May 2025. No lines if there are none."""
    if not ideas:
        return []
    entered = []
    for idea in ideas.values():
        if idea.get("entered"):
            entered.append(f"{idea['part']} (`{idea['entered']}`)")
    text = (
        "These ideas shortened the NanoGPT speedrun after May 2025. Each one is added alone to the recipe from before "
        f"all of them. In use on the track since then: {', '.join(entered) or 'none'}. An idea that doesn't help here "
        "may help at the official size. p is corrected by Holm's method over this table."
    )
    return [f"## {title}", "", text, "", *table(ideas)]


def descriptions(title: str, ideas: dict[str, dict]) -> list[str]:
    """What each part does, once. No lines if there are no ideas."""
    lines = {}
    for idea in ideas.values():
        lines.setdefault(
            idea["part"],
            f"- **{idea['part']}** (section {idea['where']}): {idea['does']}",
        )
    if not lines:
        return []
    return [f"## {title}", "", *lines.values(), ""]


def page(folder: Path) -> str:
    recipe = {}
    later = {}
    muon = {}
    for name, idea in read_ideas(folder).items():
        if not idea.get("later"):
            recipe[name] = idea
        elif idea.get("muon"):
            muon[name] = idea
        else:
            later[name] = idea
    notes = folder / "NOTES.md"
    lines = [
        "# What each part of the recipe is worth on the mini track",
        "",
        "`python tools/idea_pages.py` writes this page from [ideas/](ideas/). Don't edit it.",
        "",
        *summary(recipe),
    ]
    if notes.exists():
        lines += [notes.read_text(encoding="utf-8").strip(), "", "## Parts of the recipe", ""]
    lines += table(recipe)
    lines += later_section("Later ideas", later)
    lines += later_section("Later ideas about Muon", muon)
    lines += sizes_table(recipe | later | muon)
    lines += descriptions("What the parts do", recipe)
    lines += descriptions("What the later ideas do", later | muon)
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="idea_pages.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--keep", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--measure", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: records/mini/ideas")
    args, options = parser.parse_known_args(argv)
    if options and not args.measure:
        parser.error(f"{options[0]}: only --measure passes options on")
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
