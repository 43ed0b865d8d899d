"""
Does an idea help? Trains a base and your ideas with the same seeds until the answer is clear.

    ./run.sh compare                                   the working tree against the last commit
    ./run.sh compare --idea "--muon_lr 0.03"           a setting against the working tree
    ./run.sh compare --idea records/mini/ideas/backout --until 1% --hours 8
    ./run.sh compare --recipe january2026              your edits of a recipe, or of what it imports

compare stops at the first of these answers that it can prove:

    helps          the loss is lower, by any amount
    hurts          the loss is higher
    not worth it   the idea saves less than --until (default: 2%) of the steps
    identical      all losses are the same

The answer is "undecided" if --hours, --runs, Ctrl-C or the maximum number of pairs ends it earlier.

--base and --idea take [NAME=]SOURCE. SOURCE is options of the script in quotes, a .patch or .diff to
the base, which may change several files, a folder of records/mini/ideas/, a .py script that takes the
place of the base's script, a git revision, or . for the working tree. Options may also follow any of
these but options: "gelu.patch --muon_lr 0.03". compare passes all options that it doesn't know to the
runs: --num_iterations 200. The track is the script's default (fineweb with a GPU, otherwise mini),
unless you pass --track.

The script is train_gpt.py, --recipe NAME, or what the base names: recipes/NAME.py, or
REVISION:recipes/NAME.py. It runs in a copy of the repository's files, so later edits change no run.

Press Ctrl-C to stop. compare then prints the answer so far. Run the same command again to continue.
You may look as often as you like: that doesn't make a wrong answer more likely. Finished runs are
kept in logs/compare/runs/. Later comparisons reuse those with the same source, settings, data and
machine.

Exit status: 0 the comparison was made, 1 a run failed, 2 bad input, 130 interrupted. With --gate:
0 helps, 1 any other answer, 2 an error, 130 interrupted.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tools.compare import runs as compare_runs
from tools import launch
from tools.compare.answer import (
    NEEDS_PAIRS,
    STEPS_UNKNOWN,
    answer_for_many,
    answer_for_one,
    effect_as_json,
    finite,
    has_interval,
    plot_answer,
    plural,
    progress,
    short,
    slope_in_words,
)
from tools.compare.plan import (
    Comparison,
    next_task,
    pairs_expected,
    plan_in_words,
    time_left,
    undecided,
    warning_in_words,
)
from tools.compare.runs import RunError, Setup, Task
from tools.compare.sources import (
    Variant,
    check_data,
    check_settings,
    check_validation,
    copy_tree,
    idea_commit,
    read_variant,
    tell_apart,
    with_steps,
)
from tools.compare.stats import SLOPE_FACTOR, Effect, fewest_pairs
from tools.compare.steps import LARGEST_ERROR, ROUNDS, half_width, measure_rounds
from tools.common import (
    FileError,
    UsageError,
    discard_output,
    run_command,
    stop_on_signals,
    write_file,
)
from tools.common import usable_cores

INTERRUPTED = "interrupted; finished runs are kept; run the same command again to continue"


# -----------------------------------------------------------------------------
# Arguments


def fail(message: str):
    raise UsageError(f"{message}; --help lists all options")


def parse_percent(text: str) -> float:
    """ "2%" or "2" as 0.02. Raises ArgumentTypeError."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a percentage, like 2%") from None
    if not 0.001 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text}: must be between 0.1% and 50%")
    return value


def parse_count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return count


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run.sh compare",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = fail
    add = parser.add_argument
    source = "[NAME=]SOURCE"
    base = "what to compare with; default: the commit that the ideas' folders name, otherwise the working "
    base += "tree, or the last commit without --idea"
    add("--base", metavar=source, help=base)
    idea = "can be given several times; default: the working tree"
    add("--idea", metavar=source, action="append", help=idea)
    add("--recipe", metavar="NAME", help="train recipes/NAME.py; default: train_gpt.py")
    until = "the smallest saving of steps that matters; default: 2%%"
    add("--until", type=parse_percent, default=0.02, metavar="X%", help=until)
    add("--hours", type=float, metavar="H", help="stop after H hours; default: no limit")
    runs = "make N pairs and look only once, at the end; never says \"not worth it\". A pair is one run of "
    runs += "the base and one of the idea, with the same seed"
    add("--runs", type=parse_count, metavar="N", help=runs)
    add("--seed", type=int, default=0, metavar="N", help="first seed; default: 0")
    add("--jobs", type=parse_count, metavar="N", help="runs at a time on a CPU; default: one per core")
    add("--nproc_per_node", type=parse_count, default=1, metavar="N", help="processes per run")
    add("--no_times", action="store_true", help="don't measure step times")
    add("--gate", action="store_true", help="print only the answer; exit status 0 if it helps")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--plot", type=Path, metavar="FILE.png", help="draw the effects and their intervals")
    add("--list", action="store_true", help="list the runs that are kept, and exit")
    add("--clear", action="store_true", help="delete the runs that are kept, and exit")
    return parser


def join_values(argv: list[str]) -> list[str]:
    """Joins --idea and --base with their values, because argparse takes "--x" for an option."""
    joined = []
    for word in argv:
        if joined and joined[-1] in ("--base", "--idea"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def check_output_file(file: Path, ending: str) -> None:
    if not file.absolute().parent.is_dir():
        fail(f"{file}: its folder doesn't exist; make it first")
    if file.is_dir():
        fail(f"{file}: is a folder; give the name of a file")
    if not file.name.endswith(ending):
        fail(f"{file}: the name must end in {ending}")


def check_arguments(args: argparse.Namespace, common: list[str]) -> None:
    """Raises UsageError."""
    before = ""
    for word in common:
        if not before.startswith("--") and not word.startswith("--"):
            fail(
                f"unexpected argument: {word}. Say what to compare with --idea or --base, and put several "
                'words in quotes: --idea "--muon_lr 0.03"'
            )
        before = word
    if args.seed < 0:
        fail("--seed must not be negative")
    if args.runs == 1:
        fail("--runs must be 2 or more")
    if args.hours is not None and not args.hours > 0:
        fail("--hours must be more than zero")
    if args.json:
        check_output_file(args.json, "")
    if args.plot:
        check_output_file(args.plot, ".png")


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns our options, and the options for all runs. Raises UsageError."""
    args, common = make_parser().parse_known_args(join_values(argv))
    check_arguments(args, common)
    return args, common


def base_of_ideas(args: argparse.Namespace) -> str:
    """The base if --base isn't given. Raises UsageError."""
    if not args.idea:
        return "HEAD"
    commits = {idea_commit(text) for text in args.idea} - {""}
    if len(commits) > 1:
        fail("these ideas were made for different commits; compare them one at a time, or give --base")
    if not commits:
        return "."
    commit = commits.pop()
    return f"{commit[:7]}={commit}"


def read_variants(args: argparse.Namespace, common: list[str]) -> list[Variant]:
    """Returns the base and the ideas, checked. Raises UsageError."""
    script = f"recipes/{args.recipe}.py" if args.recipe else "train_gpt.py"
    tree = Variant("worktree", copy_tree(compare_runs.FOLDER / "working"), script, [])
    base = read_variant(args.base or base_of_ideas(args), tree, common)
    ideas = [read_variant(text, base, common) for text in args.idea or ["."]]
    variants = [base, *ideas]
    check_settings(variants, args.nproc_per_node)
    check_validation(base, ideas)
    tell_apart(variants)
    return variants


def on_gpu(variants: list[Variant]) -> bool:
    return any(v.settings is not None and v.settings["device"] == "cuda" for v in variants)


def number_of_jobs(args: argparse.Namespace, variants: list[Variant]) -> int:
    """One run per core on a CPU: that gives the most runs an hour. One on GPUs. Raises UsageError."""
    if on_gpu(variants) or args.nproc_per_node > 1:
        if args.jobs not in (None, 1):
            raise UsageError(
                "--jobs: on GPUs, and with several processes per run, only one run is made at a time; "
                "leave out --jobs"
            )
        return 1
    return args.jobs or usable_cores()


def threads_of_a_process(args: argparse.Namespace, jobs: int) -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, usable_cores() // (jobs * args.nproc_per_node))


def get_data(variants: list[Variant]) -> None:
    """Makes or downloads the data of the variants, unless they are there."""
    for variant in variants:
        if "train_files" in (variant.settings or {}):
            launch.get_data(sys.executable, variant.settings)


def set_up(args: argparse.Namespace, variants: list[Variant], lock: int) -> Comparison:
    """Raises UsageError."""
    base, *ideas = variants
    fewer = with_steps(base, 1 / SLOPE_FACTOR, ideas)
    more = with_steps(base, SLOPE_FACTOR, ideas)
    get_data([*variants, more])
    jobs = number_of_jobs(args, variants)
    threads = threads_of_a_process(args, jobs)
    facts = compare_runs.machine_facts(on_gpu(variants), threads, args.nproc_per_node)
    facts["data"] = compare_runs.data_facts(variants)
    setup = Setup(facts, threads, args.nproc_per_node, lock)
    c = Comparison(
        args=args,
        setup=setup,
        base=base,
        ideas=ideas,
        fewer=fewer,
        more=more,
        jobs=jobs,
    )
    check_data(c.variants())
    return c


# -----------------------------------------------------------------------------
# Display


def show_line(text: str) -> None:
    """Shows at most 79 columns on standard error. On a terminal, the next line replaces them."""
    text = short(text, 79)
    if sys.stderr.isatty():
        print(f"\r{text.ljust(79)}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def say(c: Comparison, text: str) -> None:
    """A line on standard error. On a terminal, the next one replaces it."""
    if not c.args.gate:
        show_line(text)


def end_line(c: Comparison) -> None:
    if sys.stderr.isatty() and not c.args.gate:
        print("\r" + " " * 79 + "\r", end="", file=sys.stderr, flush=True)


def show_progress(c: Comparison) -> None:
    effects = c.effects()
    if effects:
        say(c, progress(effects, pairs_expected(c), time_left(c)))
    else:
        say(c, f"{plural(c.made, 'run')} made, {time_left(c)}")


# -----------------------------------------------------------------------------
# Runs


def start_workers(c: Comparison, retries: list[Task]) -> None:
    while len(c.workers) < c.jobs:
        task = retries.pop() if retries else next_task(c)
        if task is None:
            return
        c.workers.append(compare_runs.start(c.setup, task))


def make_runs(c: Comparison) -> None:
    """Makes runs until all ideas are decided, or the time is over. Raises RunError and UsageError."""
    c.started = time.monotonic()
    retries = []
    try:
        while True:
            start_workers(c, retries)
            if not c.workers:
                return
            time.sleep(0.1)
            new, undone = compare_runs.collect_all(c.setup, c.workers, c.runs)
            retries += undone
            c.made += new
            if new:
                compare_runs.check_compiled(c.runs)
                show_progress(c)
                if not c.args.runs and not undecided(c):
                    return
            if c.args.hours and time.monotonic() - c.started > 3600 * c.args.hours:
                c.notes.append(f"Stopped after --hours {c.args.hours:g}.")
                return
    finally:
        for worker in c.workers:
            compare_runs.stop(c.setup, worker)
        c.workers.clear()


def measure_time(c: Comparison, idea: Variant) -> None:
    """Measures the step time of an idea. Raises RunError, FileError and OSError."""
    # The base's step times are in the runs' logs where two runs don't fit side by side
    if on_gpu([c.base]) or c.args.nproc_per_node > 1:
        c.log_ratios[idea.name] = ratios_of_runs(c, idea)
        return
    name = short(idea.name, 30)

    def show(ratios):
        rounds = ROUNDS if len(ratios) <= ROUNDS else 2 * ROUNDS  # noisy machines need more
        say(c, f"step times of {name}: {len(ratios)} of {rounds} rounds")

    say(c, f"step times of {name}: starting both scripts")
    threads = max(1, usable_cores() // c.args.nproc_per_node)
    ratios = measure_rounds(c.setup, c.base, idea, threads, show)
    if half_width(ratios) > LARGEST_ERROR:
        c.notes.append("This machine is too noisy to time steps, so only losses are compared.")
    else:
        c.log_ratios[idea.name] = ratios


def measure_times(c: Comparison) -> None:
    """Measures the step times of all ideas. If that fails, the answer is about losses only."""
    for idea in c.ideas:
        try:
            measure_time(c, idea)
        except (RunError, FileError, OSError) as e:
            end_line(c)
            print(e, file=sys.stderr, flush=True)
            name = short(idea.name, 30)
            c.notes.append(f"The steps of {name} could not be timed; the error is above this answer.")


def ratios_of_runs(c: Comparison, idea: Variant) -> list[float]:
    """log(idea's step time / base's) at each seed, from whole runs."""
    logs = c.runs[idea.name]
    base_logs = c.runs[c.base.name]
    ratios = []
    for seed in sorted(set(logs) & set(base_logs)):
        ratio = logs[seed].final.step_avg_ms / base_logs[seed].final.step_avg_ms
        ratios.append(float(np.log(ratio)))
    return ratios


# -----------------------------------------------------------------------------
# The answer


def facts_in_words(c: Comparison) -> list[str]:
    """Sentences for the end of the answer."""
    facts = c.setup.facts
    per = "run" if facts["processes"] == 1 else "process"
    threads = f"{plural(facts['threads'], 'thread')} per {per}"
    slope = slope_in_words(c.slope())
    sentences = [slope or STEPS_UNKNOWN]
    if c.base.name != "worktree":
        sentences.append(f"The base is {short(c.base.name, 30)}.")
    for idea in c.ideas:
        steps = idea.num_iterations()
        if steps != c.base.num_iterations():
            sentences.append(f"{idea.name} trains {steps} steps, the base {c.base.num_iterations()}.")
    logs = [log for runs in c.runs.values() for log in runs.values()]
    if any(log.uncompiled for log in logs):
        sentences.append("The runs were not compiled (their logs say why).")
    if len(c.ideas) > 1 and not all(has_interval(effect) for effect in c.effects()):
        fewest = fewest_pairs(len(c.ideas))
        sentences.append(f"With {len(c.ideas)} ideas, there is no interval before {fewest} pairs.")
    sentences += c.notes
    sentences.append(f"{facts['machine']}; {threads}, PyTorch {facts['torch']}.")
    return sentences


def write_json(c: Comparison, effects: list[Effect]) -> None:
    """Raises FileError."""
    facts = c.setup.facts
    runs = {}
    for variant in c.variants():
        folder = c.setup.folder(variant)
        runs[variant.name] = []
        for seed, log in sorted(c.runs[variant.name].items()):
            path = str(folder / f"seed{seed}.txt")
            ms = log.final.step_avg_ms
            run = {"path": path, "seed": seed, "val_loss": log.final.val_loss, "step_avg_ms": ms}
            runs[variant.name].append(run)
    slope = c.slope()
    answer = {
        **{name: facts[name] for name in ("machine", "torch", "threads", "processes")},
        "jobs": c.jobs,
        "until": None if c.args.runs else c.args.until,
        "base": c.base.name,
        "slope": slope and {"value": slope.value, "error": slope.error, "n": slope.n},
        "ideas": [effect_as_json(effect, c.args.until) for effect in effects],
        "log_ratios": c.log_ratios,
        "minutes": (time.monotonic() - c.started) / 60,
        "runs_made": c.made,
        "runs": runs,
    }
    write_file(c.args.json, json.dumps(finite(answer), indent=1, allow_nan=False).encode())


def report(c: Comparison) -> None:
    """Prints the answer, and writes what was asked for. Raises FileError."""
    effects = c.effects()
    print_answer(c, effects)
    sys.stdout.flush()
    if c.args.json and effects:
        write_json(c, effects)
    slope = c.slope()
    if c.args.json and not effects:
        print(f"{c.args.json}: not written, because there is no answer yet", file=sys.stderr)
    if c.args.plot and (not effects or slope is None):
        print(f"{c.args.plot}: not drawn, because effects in steps aren't known yet", file=sys.stderr)
    elif c.args.plot:
        differences = {}
        for idea in c.ideas:
            losses, base_losses = c.pairs(idea)
            differences[idea.name] = np.array(losses) - np.array(base_losses)
        plot_answer(effects, differences, slope, c.args.until, c.args.plot)


def print_answer(c: Comparison, effects: list[Effect]) -> None:
    if c.args.gate:
        print(effects[0].verdict if effects else "undecided")
        return
    if not effects:
        print(f"Too early for an answer: {NEEDS_PAIRS}.")
        return
    until = None if c.args.runs else c.args.until
    facts = facts_in_words(c)
    if len(c.ideas) == 1:
        lines = answer_for_one(effects[0], until, facts)
    else:
        names = [idea.name for idea in c.ideas]
        lines = answer_for_many(effects, names, until, facts)
    print("\n".join(lines))


def gate_status(c: Comparison) -> int:
    effects = c.effects()
    return 0 if effects and effects[0].verdict == "helps" else 1


def compare_locked(args: argparse.Namespace, variants: list[Variant], lock: int) -> int:
    """Compares while the folder is locked. Returns the exit status."""
    c = set_up(args, variants, lock)
    compare_runs.make_room({c.setup.folder(variant) for variant in c.variants()})
    for variant in c.variants():
        c.runs[variant.name] = compare_runs.kept_runs(c.setup, variant)
    compare_runs.check_compiled(c.runs)
    warning = warning_in_words(c)
    if warning and not args.gate:
        print(warning, file=sys.stderr, flush=True)
    say(c, plan_in_words(c))
    status = 0
    try:
        make_runs(c)
        identical = all(effect.verdict == "identical" for effect in c.effects())
        if not (args.no_times or args.gate or identical):
            measure_times(c)
    except KeyboardInterrupt:
        status = 130
        c.notes.append("Interrupted; run the same command again to continue.")
    end_line(c)
    report(c)
    if args.gate and status == 0:
        return gate_status(c)
    return status


def compare(argv: list[str]) -> int:
    args, common = read_arguments(argv)
    if args.list:
        print("\n".join(compare_runs.list_runs()))
        return 0
    if args.gate and len(args.idea or []) > 1:
        raise UsageError("--gate judges one idea; give one --idea")
    with compare_runs.locked_folder() as lock:
        if args.clear:
            compare_runs.clear_runs()
            return 0
        return compare_locked(args, read_variants(args, common), lock)


def run_and_report(command: Callable[[list[str]], int], argv: list[str], failed: int) -> int:
    """Returns the status of command(argv), or `failed` if a run fails, a file can't be used, or the reader of
    the output has closed the pipe. run_command handles all other errors."""
    try:
        return command(argv)
    except RunError as e:
        print(e, file=sys.stderr)
        return failed
    except BrokenPipeError:
        discard_output()
        return failed
    except OSError as e:  # a full disk, or a folder that can't be written
        where = e.filename or "logs/compare"
        print(f"error: {where}: {(e.strerror or str(e)).lower()}", file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130


def main(argv: list[str]) -> int:
    failed = 2 if "--gate" in argv else 1
    return run_and_report(compare, argv, failed)


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
