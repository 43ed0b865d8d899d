"""
The page of parts and ideas on the mini track: records/mini/IDEAS.md, written from what was measured.

    python tools/idea_pages.py                         write the page from records/mini/ideas/
    python tools/idea_pages.py --keep answer.json...   first file what `./run.sh compare --json answer.json` answered
    python tools/idea_pages.py --measure NAME...       first compare these with the recipe (options go on to compare.py:
                                                  --runs 8 --seed 200), and file the answer
    python tools/idea_pages.py --size wide --measure NAME...     the same at another size (SIZES, below)

records/mini/ideas/NAME/ has idea.json, by hand: which part of the recipe it takes out and how, what the part
does and where it stands, the field's record that brought it and its effect there ("adds": true where the idea
is the field's change and not its removal; "saves": true where it costs loss and pays in time, by which it is
then judged; "later": true for one of after May 2025, which has a table of its own, and "muon": true beside it
for those of the optimizer, which have another; "entered": the field of Hyperparameters that it has become;
"current": false once it need no longer apply to train_gpt.py); idea.patch ("patch": another's NAME, whose patch
it shares), or options in idea.json, or both; and result.json, which --keep writes, or SIZE.json for --size SIZE.
An idea's name in the comparison is NAME. What is said by hand above the table is records/mini/ideas/NOTES.md.
Exit status: 0 written, 1 a run failed, 2 bad input.
"""

import argparse
import json
import shlex
import tempfile
from pathlib import Path

from compare import main as compare
from compare_stats import holm, percent
from record_pages import RECORDS, markdown_table
from log_parsing import LogError, run_command, write_file
from verify import P_VALUE, p_text

FOLDER = RECORDS / "mini" / "ideas"
FACTS = ("machine", "torch", "threads", "processes", "jobs")
FIELDS = ("part", "change", "does", "where", "records", "field")
RECIPE = [
    "--muon_beta2",
    "0",
    "--num_iterations",
    "490",
]  # the track before NorMuon: all rows are differences to it
SIZES = {"wide": ("twice the width", "--model_dim 256 --num_heads 4 --num_iterations 340".split())}


def read_ideas(folder: Path) -> dict[str, dict]:
    """Name -> idea.json's fields, in the order of `rank`, with `result` and `sizes`, by name. Raises LogError."""
    ideas = {}
    for file in sorted(folder.glob("*/idea.json")):
        try:
            idea = json.loads(file.read_text(encoding="utf-8"))
            missing = [name for name in FIELDS if not idea.get(name)]
            idea["patch"] = folder / idea.get("patch", file.parent.name) / "idea.patch"
            if missing or not ("options" in idea or idea["patch"].exists()):
                raise ValueError(
                    f"{missing[0]} is missing"
                    if missing
                    else "wants options, or idea.patch beside it"
                )
            results = {}
            for path in file.parent.glob("*.json"):
                if path != file:
                    results[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            idea["result"], idea["sizes"] = results.pop("result", None), results
        except ValueError as e:
            raise LogError(f"{file}: {e}") from None
        ideas[file.parent.name] = idea
    return dict(sorted(ideas.items(), key=lambda item: (item[1].get("rank", 0), item[0])))


def keep(answer: Path, folder: Path, size: str | None = None) -> None:
    """Files each idea of a comparison, made at this one of SIZES or at the track's own. Raises LogError."""
    found = json.loads(answer.read_text(encoding="utf-8"))
    strip = lambda runs: [{k: v for k, v in run.items() if k != "path"} for run in runs]
    for effect in found["ideas"]:
        home = folder / effect["name"]
        if not (home / "idea.json").exists():
            raise LogError(
                f"{answer}: {effect['name']}: no {home / 'idea.json'}, which says what the idea is"
            )
        kept = {name: found[name] for name in FACTS} | dict(
            effect={
                k: v
                for k, v in effect.items()
                if k not in ("name", "words", "verdict", "p_corrected", "step_time_p_corrected")
            },
            runs=strip(found["runs"][effect["name"]]),
            base_runs=strip(found["runs"][found["base"]]),
        )
        write_file(home / f"{size or 'result'}.json", (json.dumps(kept, indent=1) + "\n").encode())


def as_idea(name: str, idea: dict) -> str:
    """What compare.py's --idea takes: the patch, the options or both; of one that has entered, the options."""
    patch = idea["patch"].exists() and idea.get("current", True)
    what = shlex.quote(str(idea["patch"])) if patch else "", idea.get("options", "")
    return f"{name}={' '.join(filter(None, what))}"


def measure(names: list[str], folder: Path, size: str | None, options: list[str]) -> int:
    """Compares them with the recipe and files the answer. -> compare.py's exit status. Raises LogError."""
    ideas, words = (
        read_ideas(folder),
        ["--track", "mini", *RECIPE, *(SIZES[size][1] if size else []), *options],
    )
    for name in names:
        if name not in ideas:
            raise LogError(f"{name}: no such idea; there are {', '.join(ideas)}")
        words += ["--idea", as_idea(name, ideas[name])]
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        status = compare([*words, "--json", str(answer)])
        if status == 0:
            keep(answer, folder, size)
    return status


def verdict_on(idea: dict, p: float | None) -> str:
    """All parts helped the field: without them the loss should be higher, or the time, where time is what they save."""
    effect = idea["result"]["effect"]
    if idea.get("saves"):
        low, high = effect["time_interval"] or (-1, 1)
        seen, lower, by = not low <= 0 <= high, high < 0, " (time)"
    else:
        seen, lower, by = p is not None and p < P_VALUE, effect["difference"] < 0, ""
    return (
        "not seen" if not seen else "agrees" if lower == idea.get("adds", False) else "disagrees"
    ) + by


def difference(effect: dict) -> str:
    """A difference in loss with its interval, for a table's cell."""
    low, high = effect["difference_interval"]
    return f"{effect['difference']:+.4f} ({low:+.4f} to {high:+.4f})"


def table(ideas: dict[str, dict]) -> tuple[list[str], list[str]]:
    """-> the table's lines, Holm-corrected over its rows, and the verdict on each part that was measured."""
    measured = {name: idea for name, idea in ideas.items() if idea["result"]}
    ps = dict(zip(measured, holm([idea["result"]["effect"]["p"] for idea in measured.values()])))
    rows, parts = [], {}
    for name, idea in measured.items():
        e = idea["result"]["effect"]
        verdict = verdict_on(idea, ps[name])
        parts.setdefault(idea["part"], []).append((e["difference"], verdict))
        rows.append(
            (
                idea["part"],
                f"[{idea['change']}](ideas/{name}/)",
                f"{idea['records']}: {idea['field']}",
                str(e["n"]),
                difference(e),
                p_text(ps[name]),
                percent(e["steps"]),
                percent(e["time"]),
                verdict,
            )
        )
    if not rows:
        return [
            f"Nothing has been measured yet. {len(ideas)} changes are ready: `python tools/idea_pages.py --measure NAME`.",
            "",
        ], []
    best = [
        min(ways)[1] for ways in parts.values()
    ]  # of several ways to do without a part, the best tells its worth
    header = (
        "part",
        "instead",
        "the field's record and effect",
        "n",
        "difference in loss (99%)",
        "p",
        "steps",
        "time",
        "sign",
    )
    lines = [
        *markdown_table(header, rows, right=header[3:8]),
        "",
        "Steps and time: what it takes more, or less, to the loss that the whole recipe reaches. The sign is that of the "
        "difference in loss; where a part costs loss to save time, that of the time, by its 99% interval.",
        "",
    ]
    return lines, best


def sizes_table(ideas: dict[str, dict]) -> list[str]:
    """Ideas that were measured at another size too: lines of a table, none if there are none."""
    rows = []
    for size, (words, options) in SIZES.items():
        for name, idea in ideas.items():
            if size in idea["sizes"] and idea["result"]:
                here, there = idea["result"]["effect"], idea["sizes"][size]["effect"]
                sign = "holds" if here["difference"] * there["difference"] > 0 else "turns"
                rows.append(
                    (
                        f"[{idea['part']}: {idea['change']}](ideas/{name}/)",
                        difference(here),
                        words,
                        str(there["n"]),
                        difference(there),
                        f"{there['step_time']:.3f}",
                        p_text(there["p"]),
                        sign,
                    )
                )
    header = (
        "idea",
        "at the track's size (99%)",
        "at",
        "n",
        "there (99%)",
        "step time",
        "p",
        "sign",
    )
    return (
        [
            "## What carries over",
            "",
            *markdown_table(header, rows, right=header[3:7]),
            "",
            *(
                f"{words.capitalize()}: `{' '.join(options)}`, the recipe otherwise, learning rates too."
                for words, options in SIZES.values()
            ),
            "p is of the other size alone, uncorrected; step time as a fraction of the recipe's there.",
            "",
        ]
        if rows
        else []
    )


def page(folder: Path) -> str:
    ideas = read_ideas(folder)
    recipe = {name: idea for name, idea in ideas.items() if not idea.get("later")}
    later = {
        name: idea for name, idea in ideas.items() if idea.get("later") and not idea.get("muon")
    }
    muon = {name: idea for name, idea in ideas.items() if idea.get("later") and idea.get("muon")}
    lines = [
        "# What the mini track can tell: every part of the recipe, taken out",
        "",
        "Written by `python tools/idea_pages.py` from [ideas/](ideas/): edit there, not here.",
        "",
    ]
    rows, best = table(recipe)
    if best:
        results = [idea["result"] for idea in recipe.values() if idea["result"]]
        machines = sorted(
            {
                f"{r['machine']} (threads a run: {r['threads']}, runs at a time: {r['jobs']}, PyTorch {r['torch']})"
                for r in results
            }
        )
        runs = sorted({r["effect"]["n"] for r in results})
        counts = ", ".join(
            f"{words} {sum(b.startswith(sign) for b in best)}"
            for sign, words in [
                ("agrees", "helps too:"),
                ("not seen", "not seen:"),
                ("disagrees", "hurts:"),
            ]
        )
        lines += [
            f"Measured are {len(results)} of {len(recipe)} changes to the recipe, {' or '.join(map(str, runs))} runs "
            f"each on {'; '.join(machines)}. Each part helped the field at the official size. Of the parts measured "
            f"here, **{counts}** (p < {P_VALUE:g}, Welch's t-test, corrected by Holm over all rows; of several ways "
            "to do without a part, the best one counts).",
            "",
        ]
    notes = folder / "NOTES.md"
    lines += [notes.read_text(encoding="utf-8").strip(), ""] if notes.exists() else []
    lines += rows
    for title, some in (
        ("What the field found later, put in", later),
        ("Muon's variants, put in", muon),
    ):
        entered = [
            f"{idea['part']} (`{idea['entered']}`)" for idea in some.values() if idea.get("entered")
        ]
        if some:
            lines += [
                f"## {title}",
                "",
                "Ideas that shortened the field's run after May 2025, each alone on the recipe as it was before any of "
                f"them. On in the track since: {', '.join(entered) or 'none'}. One that does not help here may help at "
                "the official size. p is corrected by Holm over this table.",
                "",
                *table(some)[0],
            ]
    lines += sizes_table(ideas)
    for title, some in (
        ("The parts, and where they stand", recipe),
        ("The later ideas, and where they would stand", later | muon),
    ):
        said = {}
        for idea in some.values():
            said.setdefault(
                idea["part"], f"- **{idea['part']}** (section {idea['where']}): {idea['does']}"
            )
        lines += [f"## {title}", "", *said.values(), ""] if said else []
    return "\n".join(lines).rstrip() + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="idea_pages.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--keep", type=Path, nargs="+", default=[], metavar="answer.json")
    parser.add_argument("--measure", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: records/mini/ideas")
    args, options = parser.parse_known_args(argv)
    if options and not args.measure:
        parser.error(f"{options[0]}: only --measure passes options on")
    for answer in args.keep:
        keep(answer, args.folder, args.size)
    if args.measure and (status := measure(args.measure, args.folder, args.size, options)):
        return status
    write_file(args.folder.parent / "IDEAS.md", page(args.folder).encode())
    return 0


if __name__ == "__main__":
    run_command(main)
