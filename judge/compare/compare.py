"""
Does an idea help? Trains a base and your ideas with the same seeds until the answer is clear.

    ./run.sh compare                                   the working tree against the last commit
    ./run.sh compare --idea "--muon_lr 0.03"           a setting against the working tree
    ./run.sh compare --idea records/mini/ideas/gelu --until 1% --hours 8
    ./run.sh compare --recipe january2026              your edits of a recipe, or of what it imports

compare stops at the first of these answers that it can prove:

    helps          the loss is lower, by any amount
    hurts          the loss is higher
    not worth it   the idea saves less than --until (default: 2%) of the steps
    identical      all losses are the same

The answer is "undecided" if --hours, --runs or Ctrl-C ends it earlier.

--base and --idea take [NAME=]SOURCE. SOURCE is options of the script in quotes, a .patch or .diff to
the base, which may change several files, a folder of records/mini/ideas/, a .py script that takes the
place of the base's script, a git revision, or . for the working tree. Options may also follow any of
these but options: "gelu.patch --muon_lr 0.03". compare passes all options that it doesn't know to the
runs: --num_iterations 200. The track is the script's default (fineweb with a GPU, otherwise mini),
unless you pass --track.

The script is train_gpt.py, --recipe NAME, or what the base names: recipes/NAME.py, or
REVISION:recipes/NAME.py. It runs in a copy of the repository's files, so later edits change no run.

With --command, compare trains anyone's script, for example the current one of modded-nanogpt:

    ./run.sh compare --command "torchrun --standalone --nproc_per_node=1 train_gpt.py"
                     --base ../modded-nanogpt --idea ../modded-nanogpt@my-branch

SOURCE is then PATH, a folder of a git repository, or PATH@REVISION, or a patch to the base, with or
without options. The command runs in a copy of that folder. What git ignores in data/ is linked. A run
is one command. Its log is the file that it writes below logs/, or else its output. Its losses stand in
lines like step:S/N val_loss:L, and its times are train_time:Tms in the same lines. --metric judges
another number than the validation loss; docs/compare.md says which lines are read. {seed} in the command
becomes the seed, and {options} those of the base or the idea, which otherwise stand at the end.

--base_logs and --idea_logs compare finished runs, with Welch's t-test:

    ./run.sh compare --base_logs logs/before --idea_logs logs/after --plot both.png

A loop of ideas, decided by --gate, ends with --confirm: the first base of the ledger against the working
tree, with new seeds.

Press Ctrl-C to stop. compare then prints the answer so far. Run the same command again to continue.
You may look as often as you like: that doesn't make a wrong answer more likely. Finished runs are
kept in logs/compare/runs/, which you may delete. Later comparisons reuse a run if all that it could
read is still the same.

Exit status: 0 the comparison was made (with --gate: helps), 1 another answer with --gate, 2 an error,
130 interrupted.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from judge.comparable import add_metric, judged_in_words, settle_metric
from judge.compare import runs as compare_runs
from judge.compare.finished_logs import compare_logs
from judge.compare.ledger import add_to_ledger, first_base, judged_before, loop_in_words, unused_seed
from judge.compare.pairs import (
    Comparison,
    answer_needs_slope,
    progress,
    slope_runs,
    undecided,
    wanted_runs,
)
from judge.compare.runs import make_runs, on_gpu, open_pool, runs_a_process, show_line
from judge.compare.sources import (
    Variant,
    check_data,
    check_settings,
    check_validation,
    first_variant,
    read_variant,
    tell_apart,
    with_steps,
)
from judge.compare.step_times import PROCESSES, STEPS, measure_processes, times_file
from judge.compare.verdict import (
    answer_in_words,
    far_in_words,
    headline,
    other_steps,
    record_in_words,
    record_table,
    slope_in_words,
    step_time,
    target_of,
)
from judge.stats import SLOPE_FACTOR, Effect
from lib.commands import (
    UserError,
    command_parser,
    fraction,
    join_values,
    output_file,
    positive,
    run_command,
    stop_on_signals,
    whole_number,
)
from lib.files import write_file
from lib.text import as_json, p_text, plural, short, wrap

TOO_EARLY = "too early for an answer: an idea needs two pairs of runs."

# -----------------------------------------------------------------------------
# Arguments


def refuse(message: str):
    raise UserError(f"{message}; --help lists all options")


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("compare", __doc__)
    parser.error = refuse
    add = parser.add_argument
    source = "[NAME=]SOURCE"
    base = "what to compare with; default: the working tree, or the last commit without --idea"
    add("--base", metavar=source, help=base)
    idea = "can be given several times; default: the working tree"
    add("--idea", metavar=source, action="append", help=idea)
    add("--recipe", metavar="NAME", help="train recipes/NAME.py; default: train_gpt.py")
    until = "the smallest saving of steps that matters; default: 2%%"
    add("--until", type=fraction, default=0.02, metavar="X%", help=until)
    add("--hours", type=float, default=1e9, metavar="H", help="stop after H hours; default: no limit")
    command = "train with this shell command instead of train_gpt.py"
    add("--command", metavar="COMMAND", help=command)
    add_metric(parser)
    early = "the runs of --command end before their last step, all at the same one"
    add("--stops_early", action="store_true", help=early)
    timeout = "end compare if a run takes longer than this; default: no limit"
    add("--run_timeout", type=positive, default=math.inf, metavar="MINUTES", help=timeout)
    slope = "what the last 100 steps are worth, to turn losses into steps; default: measured if the "
    slope += "number of steps can be set by --num_iterations"
    add("--loss_per_100_steps", type=positive, metavar="LOSS", help=slope)
    target = "the loss that a record needs; default: that of the logs, or 3.28"
    add("--target", type=positive, metavar="LOSS", help=target)
    for side in ("base", "idea"):
        logs = f"logs of finished runs of the {side}, or folders of them"
        add(f"--{side}_logs", nargs="+", type=Path, metavar="LOGS", help=logs)
    runs = 'make N pairs and look once, by a t-test; never says "not worth it". A pair is one run of '
    runs += "the base and one of the idea, with the same seed"
    add("--runs", type=whole_number, metavar="N", help=runs)
    add("--seed", type=int, default=0, metavar="N", help="first seed; default: 0")
    add("--jobs", type=whole_number, metavar="N", help="runs at a time on a CPU; default: one per core")
    processes = "processes per run; default: 1"
    add("--nproc_per_node", type=whole_number, default=1, metavar="N", help=processes)
    add("--no_times", action="store_true", help="don't measure step times")
    add("--gate", action="store_true", help="print only the verdict; exit status 0 if it helps")
    ledger = "the table of all ideas that were judged; default: logs/compare/ledger.tsv"
    add("--ledger", type=output_file, metavar="FILE", help=ledger)
    confirm = "compare the working tree with the first base of the ledger, with seeds that weren't used"
    add("--confirm", action="store_true", help=confirm)
    add("--json", type=output_file, metavar="FILE", help="write all numbers")
    add("--plot", type=output_file, metavar="FILE.png", help="draw the losses of finished runs")
    return parser


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns our options, and the options for all runs. Raises UserError."""
    args, common = make_parser().parse_known_args(join_values(argv, ("--base", "--idea")))
    for before, word in zip(["", *common], common):
        if not before.startswith("--") and not word.startswith("--"):
            refuse(
                f"unexpected argument: {word}. Say what to compare with --idea or --base, and put several "
                'words in quotes: --idea "--muon_lr 0.03"'
            )
    settle_metric(args)
    if args.gate and len(args.idea or []) > 1:
        refuse("--gate judges one idea; give one --idea")
    if args.confirm and (args.base or args.idea):
        refuse(
            "--confirm compares the first base of the ledger with the working tree; leave out --base, --idea"
        )
    if args.command and (args.recipe or args.nproc_per_node > 1):
        refuse("--command says what to run; leave out --recipe and --nproc_per_node")
    if bool(args.base_logs) != bool(args.idea_logs) or args.plot and not args.base_logs:
        refuse("finished runs, and --plot, need both --base_logs and --idea_logs")
    if args.base_logs and (args.command or args.base or args.idea or common):
        refuse(
            "finished runs train nothing; leave out --command, --base, --idea and options of the script"
        )
    return args, common


def read_variants(args: argparse.Namespace, common: list[str]) -> list[Variant]:
    """Returns the base and the ideas, checked. Raises UserError."""
    texts = [text for text in [args.base, *(args.idea or [])] if text]
    tree = first_variant(texts, args.command, args.recipe, compare_runs.scratch())
    last_commit = "@HEAD" if args.command else "HEAD"
    default_base = "." if args.idea else last_commit
    base = read_variant(args.base or default_base, tree, common)
    ideas = [read_variant(text, base, common) for text in args.idea or ["."]]
    variants = [base, *ideas]
    check_settings(variants, args.nproc_per_node)
    check_validation(base, ideas)
    tell_apart(variants)
    return variants


def set_up(args: argparse.Namespace, common: list[str], lock: int) -> Comparison:
    """Raises UserError."""
    args.ledger = args.ledger or compare_runs.FOLDER / "ledger.tsv"
    if args.confirm:
        args.base = f"{'.@' if args.command else ''}{first_base(args.ledger)}"
        args.seed = unused_seed(args.ledger)
    base, *ideas = variants = read_variants(args, common)
    fewer = more = None
    if not args.loss_per_100_steps and not (args.command and base.num_iterations() is None):
        fewer = with_steps(base, 1 / SLOPE_FACTOR, ideas)
        more = with_steps(base, SLOPE_FACTOR, ideas)
        variants = [*variants, fewer, more]
    pool = open_pool(variants, lock, args.jobs, args.nproc_per_node, args.stops_early, args.metric)
    changed = compare_runs.why_again(pool)
    if changed and not args.gate:
        print(f"training again, because {changed}", file=sys.stderr)
    pool.timeout = args.run_timeout
    check_data([base, *ideas] if args.runs else variants)
    return Comparison(args, pool, base, ideas, fewer, more)


# -----------------------------------------------------------------------------
# Runs


def show_progress(c: Comparison, text: str = "") -> None:
    if not c.args.gate:
        show_line(text)


def make_until(c: Comparison, wanted, done) -> bool:
    """Makes runs until done() is true; returns False if the time is over before. Raises UserError."""
    late = False

    def enough(new: int) -> bool:
        nonlocal late
        if new and done():
            return True
        if new:
            show_progress(c, progress(c, steps_to_time(c)))
        late = c.pool.minutes() > 60 * c.args.hours
        return late

    make_runs(c.pool, wanted, enough)
    if late:
        c.notes.append(f"Stopped after --hours {c.args.hours:g}.")
    return not late


def make_all_runs(c: Comparison) -> None:
    """Makes runs until all ideas are decided, and those for the slope if the answer needs them. Raises
    UserError."""
    show_progress(c, progress(c, steps_to_time(c)))
    in_time = make_until(c, lambda: wanted_runs(c), lambda: not undecided(c))
    if in_time and answer_needs_slope(c):
        make_until(c, lambda: slope_runs(c), lambda: not slope_runs(c))


def steps_to_time(c: Comparison) -> int:
    """By measure_times; 0 if it isn't needed."""
    if c.args.no_times or c.args.gate or times_are_in_logs(c):
        return 0
    return len(c.ideas) * 2 * PROCESSES * STEPS


def measure_times(c: Comparison) -> None:
    """Measures the step times of all ideas. If that fails, the answer is about losses only."""
    for idea in c.ideas:
        name = short(idea.name, 30)
        try:
            processes = measure_processes(
                c.pool,
                c.base,
                idea,
                lambda n, name=name: show_progress(
                    c, f"step times of {name}: {n} of {PROCESSES} processes"
                ),
            )
            c.log_ratios[idea.name] = [statistics.fmean(rounds) for rounds in processes]
        except OSError as e:
            show_progress(c)
            print(e, file=sys.stderr)
            c.notes.append(f"The steps of {name} could not be timed; the error is above this answer.")


def times_are_in_logs(c: Comparison) -> bool:
    """True where two runs don't fit side by side."""
    return on_gpu([c.base]) or c.args.nproc_per_node > 1 or bool(c.args.command)


def read_times(c: Comparison) -> None:
    """The step times of all ideas from whole runs: log(idea's / base's) of each pair. Only pairs count
    whose runs took turns. A run that is kept from another comparison met the machine at another time.

    Pairs of the same two processes aren't independent, so their mean counts."""
    for idea in c.ideas:
        file = times_file(c.pool, c.base, idea)
        ratios = json.loads(file.read_bytes()) if file.exists() else {}
        logs, base_logs = [c.pool.runs[variant.name] for variant in (idea, c.base)]
        for seed in sorted(logs.keys() & base_logs.keys()):
            time, base_time = step_time(logs[seed]), step_time(base_logs[seed])
            took_turns = {(idea.name, seed), (c.base.name, seed)} <= c.pool.new
            if took_turns and time > 0 and base_time > 0:
                ratios[str(seed)] = math.log(time / base_time)
        write_file(file, json.dumps(ratios).encode())
        processes = {}
        for seed, ratio in ratios.items():
            processes.setdefault(int(seed) // runs_a_process(c.base), []).append(ratio)
        c.log_ratios[idea.name] = [statistics.fmean(pairs) for pairs in processes.values()]
        c.timed[idea.name] = [int(seed) for seed in ratios]


# -----------------------------------------------------------------------------
# The answer


def test_in_words(c: Comparison, effects: list[Effect]) -> str:
    if len(c.ideas) > 1:
        pairs = ", ".join(f"{short(effect.name, 30)} {effect.n}" for effect in effects)
        together = f"intervals with 99% confidence for all {len(c.ideas)} ideas together"
        return f"Pairs of runs: {pairs}. In parentheses: {together}."
    (effect,) = effects
    test = f"one-sided p = {p_text(effect.p)}, however often you look"
    if c.args.runs:
        test = f"p = {p_text(effect.p)} by a {'paired' if c.paired else 'Welch'} t-test, for one look"
        if effect.n < c.args.runs:
            test = f"but the test is for {c.args.runs}"
    return f"{effect.n} pairs of runs, {test}. In parentheses: 99% confidence intervals."


def facts_in_words(c: Comparison) -> list[str]:
    """Sentences for the end of the answer."""
    facts = c.pool.facts
    per = "run" if facts["processes"] == 1 else "process"
    threads = f"{plural(facts['threads'], 'thread')} per {per}"
    slope = c.slope()
    sentences = [slope_in_words(slope)]
    if c.steps(c.base) == 1:
        sentences = ["Steps are unknown: the logs have none."]
    elif c.fewer is None and slope is None:
        sentences = [
            "Steps are unknown: give --loss_per_100_steps, or --num_iterations in the command."
        ]
    if not c.paired:
        sentences.append("The runs of a pair share no seed.")
    sentences.append(judged_in_words(list(c.pool.runs[c.base.name].values())))
    if c.base.name != "worktree":
        sentences.append(f"The base is {short(c.base.name, 30)}.")
    for variant in [c.base, *c.ideas]:
        seeds = sorted(c.pool.runs[variant.name])
        losses = [c.pool.runs[variant.name][seed].end.val_loss for seed in seeds]
        sentences += far_in_words(variant.name, losses, [f"seed {seed}" for seed in seeds])
    for idea in c.ideas:
        sentences += other_steps(idea.name, c.steps(idea), c.steps(c.base), slope is not None)
        timed = len(c.timed.get(idea.name, []))
        if 0 < timed < c.pairs(idea).shape[1]:
            sentences.append(f"Only {timed} pairs of {idea.name} took turns, and were timed.")
    if any(log.uncompiled for runs in c.pool.runs.values() for log in runs.values()):
        sentences.append("The runs were not compiled (their logs say why).")
    sentences += [*c.notes, *loop_in_words(c.args.ledger)]
    sentences.append(f"{facts['machine']}; {threads}, PyTorch {facts['torch']}.")
    return sentences


def comparison_as_json(c: Comparison) -> bytes:
    facts = c.pool.facts
    runs = {}
    for name, logs in c.pool.runs.items():
        seeds = sorted(logs)
        runs[name] = [{"path": str(logs[s].path), "seed": s, **asdict(logs[s].end)} for s in seeds]
    slope = c.slope()
    found = {
        **{name: facts[name] for name in ("machine", "torch", "threads", "processes")},
        "jobs": c.pool.jobs,
        "until": None if c.args.runs else c.args.until,
        "base": c.base.name,
        "slope": slope and asdict(slope),
        "ideas": [{**asdict(e), "words": headline(e, c.args.until)} for e in c.effects()],
        "log_ratios": c.log_ratios,
        "minutes": c.pool.minutes(),
        "runs_made": c.pool.made,
        "runs": runs,
    }
    return as_json(found)


def answer_lines(c: Comparison) -> list[str]:
    effects = c.effects()
    if c.args.gate:
        verdict = effects[0].verdict if effects else "undecided"
        return [verdict, *loop_in_words(c.args.ledger)]
    if not effects:
        return [TOO_EARLY.capitalize()]
    lines = answer_in_words(effects, c.args.until, test_in_words(c, effects), facts_in_words(c))
    for idea in c.ideas:
        if c.pairs(idea).shape[1] < 2:
            lines.append(f"{short(idea.name, 20)}: {TOO_EARLY}")
    return [*lines, "", *record_lines(c)] if c.args.command else lines


def record_lines(c: Comparison) -> list[str]:
    """Whether the ideas that have runs would be records."""
    variants = [variant for variant in [c.base, *c.ideas] if c.pool.runs[variant.name]]
    sides = {variant.name: list(c.pool.runs[variant.name].values()) for variant in variants}
    base = sides[c.base.name]
    target, assumed = target_of(c.args.target, base)
    looks = not c.args.runs
    lines = [*record_table(sides, target, looks), *assumed]
    for idea in variants[1:] if target is not None else []:
        runs = [c.pool.runs[variant.name] for variant in (idea, c.base)]
        pairs = [(runs[0][seed], runs[1][seed]) for seed in c.timed.get(idea.name, [])]
        words = record_in_words(idea.name, sides[idea.name], target, pairs, looks)
        lines += wrap(words)
    return lines


def main(argv: list[str]) -> int:
    args, common = read_arguments(argv)
    if args.base_logs:
        return compare_logs(args)
    status = 0
    with compare_runs.locked_folder() as lock:
        c = set_up(args, common, lock)
        before = judged_before(c) if args.gate else ""
        if before:
            print(before, *loop_in_words(args.ledger), sep="\n")
            return int(before != "helps")
        try:
            make_all_runs(c)
            if steps_to_time(c):
                measure_times(c)
        except KeyboardInterrupt:
            status = 130
            c.notes.append("Interrupted; run the same command again to continue.")
        if times_are_in_logs(c) and not args.no_times:
            read_times(c)
        show_progress(c)
        if c.pool.made:
            add_to_ledger(c)
        lines = answer_lines(c)
        print("\n".join(lines), flush=True)
        if args.json:
            write_file(args.json, comparison_as_json(c))
    if args.gate and status == 0:
        return int(lines[0] != "helps")
    return status


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
