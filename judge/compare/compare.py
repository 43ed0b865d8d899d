"""
Does an idea help? Trains a base and your ideas with the same seeds until the answer is clear.

    judge compare                              the working tree against the last commit
    judge compare --idea "--lr 0.03"           an option against the working tree
    judge compare --idea my.patch --idea my-branch --until 1% --hours 8

compare stops at the first of these answers that it can prove:

    helps          the loss is lower, by any amount
    hurts          the loss is higher
    not worth it   the idea saves less than --until (default: 2%) of the steps
    identical      all losses are the same

The answer is "undecided" if --hours, --runs or Ctrl-C ends it earlier.

--base and --idea take [NAME=]SOURCE. SOURCE is options of the command in quotes ("--lr 0.03", "lr=0.03"), a
.patch or .diff to the base, a folder with idea.patch, a .py script that takes the place of the base's script,
a git revision, REVISION:SCRIPT, a folder of any git repository, FOLDER@REVISION, or . for the working tree.
More options may follow: "gelu.patch --lr 0.03". Options and patches change the base, so its options stay.
compare passes all options that it doesn't know to the runs: --num_iterations 200.

The command is that of judge.toml, which judge init writes, or --command. {seed} in it becomes the seed, and
{options} those of the base or the idea. It runs in a copy of the folder, so later edits change no run. What
git ignores in data/ is linked. A run is one command, or one of {runs}. Its log is the file that it writes
below logs/, or else its newest file of JSON lines, or else its output. Its losses stand in lines like
step:S/N val_loss:L, and its times are train_time:Tms in the same lines. --metric judges another number than
the validation loss. A run counts only with a seed of its own, which takes effect. A command without {seed}
needs --no_seed.

With --command, it compares the scripts of others, in any folder:

    judge compare --no_seed --command "torchrun --standalone --nproc_per_node=1 train_gpt.py"
                  --base ../modded-nanogpt --idea ../modded-nanogpt@my-branch

--base_logs and --idea_logs compare finished runs, with Welch's t-test:

    judge compare --base_logs logs/before --idea_logs logs/after

A loop of ideas, decided by --gate, ends with --confirm: the first base of the ledger against the working
tree, with new seeds, and on the validation tokens that confirm_options in judge.toml names.

--sizes judges an idea at each size of the table [sizes] in judge.toml, smallest first: its trend, and a
forecast of each next size before that is run.

Press Ctrl-C to stop. compare then prints the answer so far. Run the same command again to continue.
You may look as often as you like: that doesn't make a wrong answer more likely. Other tests of the same
idea, with another --seed or --runs, share its error, as long as they have the same ledger. Finished runs are
kept in .judge/runs/, which you may delete. Later comparisons reuse a run if all that it could
read is still the same.

Exit status: 0 the comparison was made (with --gate: helps), 1 another answer with --gate, 2 an error,
130 interrupted.
"""

import argparse
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from judge.compare.finished_logs import compare_logs
from judge.compare.ledger import (
    Row,
    first_base,
    loop_in_words,
    read_ledger,
    seen_in_words,
    seeds_of_other_tests,
    unused_seed,
    with_answers,
    write_ledger,
)
from judge.compare.changed_evaluation import touches_measure
from judge.compare.pairs import (
    Comparison,
    answer_needs_slope,
    progress,
    slope_runs,
    undecided,
    wanted_runs,
)
from judge.settings import TEXTS, Settings, add_run_options, read_settings
from judge.runs.kept import why_again
from judge.runs.make import locked_folder, make_runs, open_pool
from judge.runs.variants import (
    Variant,
    check_settings,
    check_validation,
    first_variant,
    read_variant,
    start_of,
    tell_apart,
    with_steps,
)
from judge.compare.step_times import add_all_times
from judge.sizes.ladder import climb
from judge.sizes.retune import retuned, value_list
from judge.compare.answer import (
    NO_SEED,
    answer_as_json,
    answer_in_words,
    end_as_json,
    end_losses,
    facts_in_words,
    machine_in_words,
    target_table,
)
from judge.logs.read import Log
from judge.stats.decide import SLOPE_FACTOR, Effect, rounding
from judge.commands import (
    UserError,
    command_parser,
    fraction,
    join_values,
    output_file,
    positive,
    whole_number,
)
from judge.files import write_file
from judge.text import p_text, short, show_line, wrap

TOO_EARLY = "too early for an answer; it takes 2 pairs, or --runs N."

# -----------------------------------------------------------------------------
# Arguments


def refuse(message: str):
    raise UserError(f"{message}; --help lists all options")


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("compare", __doc__, refuse)
    add = parser.add_argument
    source = "[NAME=]SOURCE"
    base = "what to compare with; default: the working tree, or the last commit without --idea"
    add("--base", metavar=source, help=base)
    idea = "can be given several times; default: the working tree"
    add("--idea", metavar=source, action="append", help=idea)
    until = "the smallest saving of steps that matters; default: 2%%"
    add("--until", type=fraction, default=0.02, metavar="X%", help=until)
    slope = "what the last 100 steps are worth, to turn losses into steps; default: measured if the "
    slope += "number of steps can be set (--steps_option)"
    add("--loss_per_100_steps", type=positive, metavar="LOSS", help=slope)
    target = "also tests whether the mean losses are below this; default of finished logs: their own"
    add("--target", type=positive, metavar="LOSS", help=target)
    for side in ("base", "idea"):
        logs = f"logs of finished runs of the {side}, or folders of them"
        add(f"--{side}_logs", nargs="+", type=Path, metavar="LOGS", help=logs)
    runs = 'make N pairs and look once, by a t-test; never says "not worth it". A pair is one run of '
    runs += "the base and one of the idea, with the same seed"
    add("--runs", type=whole_number, metavar="N", help=runs)
    add("--times", action="store_true", help="measure step times also of ideas that don't help")
    add("--no_times", action="store_true", help="don't measure step times")
    add("--gate", action="store_true", help="print only the verdict; exit status 0 if it helps")
    ledger = "the table of all ideas that were judged; default: .judge/ledger.tsv"
    add("--ledger", type=output_file, metavar="FILE", help=ledger)
    confirm = "compare the working tree with the first base of the ledger, with seeds that weren't used, and with "
    confirm += "judge.toml's confirm_options"
    add("--confirm", action="store_true", help=confirm)
    sizes = "judge the idea at each size of judge.toml; the trend takes this many pairs of each (default: 8)"
    add("--sizes", type=whole_number, nargs="?", const=8, metavar="PAIRS", help=sizes)
    all_sizes = "go on after the two smallest sizes, even if the idea pays at neither"
    add("--all_sizes", action="store_true", help=all_sizes)
    picture = "with --sizes: a picture of the effect over the size"
    add("-o", "--output", type=output_file, metavar="FILE.png", help=picture)
    retune = "give base and idea the best of these values each, on other seeds: '--lr 0.01 0.02'"
    add("--retune", type=value_list, metavar='"OPTION VALUE VALUE..."', help=retune)
    add_run_options(parser)
    return parser


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns our options, and the options for all runs. Raises UserError."""
    args, common = make_parser().parse_known_args(
        join_values(argv, ("--base", "--idea", "--retune", *TEXTS))
    )
    for before, word in zip(["", *common], common):
        if not before.startswith("--") and not word.startswith("--"):
            refuse(
                f"unexpected argument: {word}. Say what to compare with --idea or --base, and put several "
                'words in quotes: --idea "--muon_lr 0.03"'
            )
    if args.gate and len(args.idea or []) > 1:
        refuse("--gate judges one idea; give one --idea")
    if args.confirm and (args.base or args.idea):
        refuse(
            "--confirm compares the first base of the ledger with the working tree; leave out --base, --idea"
        )
    if args.sizes and (
        args.runs or args.gate or args.confirm or args.base_logs or len(args.idea or []) > 1
    ):
        refuse("--sizes judges one --idea, without --runs, --gate, --confirm or finished logs")
    if args.output and (not args.sizes or args.output.suffix != ".png"):
        refuse("-o writes the picture of --sizes, so its name must end in .png")
    made = args.base_logs or args.idea_logs
    both = args.base_logs and args.idea_logs
    if made and (not both or args.command or args.base or args.idea or common):
        refuse(
            "finished runs need --base_logs and --idea_logs, and train nothing; leave out --command, --base, --idea "
            "and options of the script"
        )
    return args, common


def sources(args: argparse.Namespace) -> list[str]:
    """What the base and the ideas are, as far as the user says it."""
    return [text for text in [args.base, *(args.idea or [])] if text]


def read_variants(args: argparse.Namespace, common: list[str], settings: Settings) -> list[Variant]:
    """Returns the base and the ideas, checked. Raises UserError."""
    tree = first_variant(sources(args), settings)
    base = read_variant(args.base or ("." if args.idea else "HEAD"), tree, common)
    ideas = [read_variant(text, base, common) for text in args.idea or ["."]]
    variants = [base, *ideas]
    check_settings(variants)
    check_validation(base, ideas)
    tell_apart(variants)
    return variants


def check_measures(args: argparse.Namespace, base: Variant, ideas: list[Variant]) -> list[str]:
    """Lines about ideas that touch what measures. With --gate, raises UserError."""
    found = []
    for idea in ideas:
        if what := touches_measure(base, idea):
            found.append(f"{idea.name} changes what measures the loss ({short(what, 80)})")
    if found and args.gate:
        raise UserError(f"{found[0]}, so --gate doesn't judge it")
    return [f"Warning: {text}. Then a lower loss says nothing." for text in found]


def set_up(args: argparse.Namespace, common: list[str], settings: Settings) -> Comparison:
    """Raises UserError."""
    write_ledger(args.ledger, read_ledger(args.ledger))  # what is wrong is said before the runs
    notes = []
    if args.confirm:
        args.base = first_base(args.ledger)
        args.seed = unused_seed(args.ledger)
        common = common + shlex.split(settings.confirm_options)
        notes.append(seen_in_words(args.ledger, settings.confirm_options))
    variants = read_variants(args, common, settings)
    if args.retune:
        variants, found = retuned(variants, args.retune, args.hours)
        notes += found
    base, *ideas = variants
    warnings = check_measures(args, base, ideas) + [NO_SEED] * settings.no_seed
    fewer = more = None
    if not args.loss_per_100_steps and base.num_iterations() is not None:
        fewer = with_steps(base, 1 / SLOPE_FACTOR, ideas)
        more = with_steps(base, SLOPE_FACTOR, ideas)
        variants = [*variants, fewer, more]
    pool = open_pool(variants, settings, args.hours)
    changed = why_again(variants)
    if changed:
        print(f"training again, because {changed}", file=sys.stderr)
    if not (fewer or args.loss_per_100_steps or args.runs or pool.hours < math.inf):
        print(
            "without --hours, this may not end: nothing sets the steps (see --steps_option)",
            file=sys.stderr,
        )
    if fewer and not args.runs:
        check_settings([fewer, more], again=True)  # there may be too few data
    asked = (args.seed, args.runs, args.until, args.loss_per_100_steps)
    c = Comparison(pool, base, ideas, *asked, fewer, more, warnings, notes)
    for idea in ideas:
        idea.before = seeds_of_other_tests(c, args, idea)
    return c


# -----------------------------------------------------------------------------
# Runs


def make_all_runs(c: Comparison, gate: bool) -> None:
    """Makes runs until all ideas are decided, and those for the slope if the answer needs them. Raises
    UserError."""

    def show():
        show_line(progress(c))

    show()
    make_runs(c.pool, lambda: wanted_runs(c), show)
    if answer_needs_slope(c) and not gate:
        try:
            make_runs(c.pool, lambda: slope_runs(c), show)
        except UserError as e:  # the answer is there without them
            show_line()
            print(f"error: {e}", file=sys.stderr)
            c.notes.append("Runs of other lengths failed; the error is above this answer.")
    if c.pool.late() and undecided(c):
        c.notes.append(f"Stopped after --hours {c.pool.hours:g}.")


# -----------------------------------------------------------------------------
# The answer


def test_in_words(c: Comparison, effects: list[Effect]) -> str:
    other_tests = any(idea.before for idea in c.ideas)
    bounds = "In parentheses: bounds, each of them wrong at most 1 time in 100"
    if c.runs and not other_tests:
        bounds = "In parentheses: 99% confidence intervals"
    if len(c.ideas) > 1:
        pairs = ", ".join(f"{short(effect.name, 30)} {effect.n}" for effect in effects)
        return f"Pairs of runs: {pairs}. {bounds}, for all {len(c.ideas)} ideas together."
    (effect,) = effects
    test = f"one-sided p = {p_text(effect.p)}, however often you look"
    if other_tests:
        test += ", after other tests of this idea, so all its pairs count, and p must be below 0.005"
    elif c.runs:
        test = f"p = {p_text(effect.p)} by a {'paired' if c.paired else 'Welch'} t-test, for one look"
    return f"{effect.n} pairs of runs, {test}. {bounds}."


def more_facts(c: Comparison, ledger: list[Row]) -> list[str]:
    """Sentences for the end of the answer."""
    sentences = []
    if c.base.name != "worktree":
        sentences.append(f"The base is {short(c.base.name, 30)}.")
    if any(log.uncompiled for variant in c.variants for log in variant.runs.values()):
        sentences.append("The runs were not compiled (their logs say why).")
    return [*sentences, *c.notes, *loop_in_words(ledger), machine_in_words(c.pool)]


def runs_of(variants: list[Variant]) -> dict[str, list[Log]]:
    """By name, in the order of their seeds; without variants that have none."""
    sides = {}
    for variant in variants:
        if variant.runs:
            sides[variant.name] = [variant.runs[seed] for seed in sorted(variant.runs)]
    return sides


def comparison_as_json(c: Comparison) -> bytes:
    slope = c.slope()
    runs = {}
    for variant in c.variants:
        logs = sorted(variant.runs.items())
        if logs:
            runs[variant.name] = [{"seed": seed, **end_as_json(log)} for seed, log in logs]
    return answer_as_json(
        c.effects(),
        runs,
        until=c.until,
        base=c.base.name,
        slope=slope and asdict(slope),
        facts=c.pool.facts,
        runs_made=c.pool.made,
    )


def answer_lines(c: Comparison, args: argparse.Namespace, ledger: list[Row]) -> list[str]:
    effects = c.effects()
    if args.gate:
        verdict = effects[0].verdict if effects else "undecided"
        return [verdict, *loop_in_words(ledger)]
    if not effects:
        return [TOO_EARLY.capitalize(), *c.notes]
    lines = [line for text in c.warnings for line in wrap(text)]
    sides = runs_of([c.base, *c.ideas])
    losses = [loss for logs in sides.values() for loss in end_losses(logs)]
    if rounding(losses) >= 0.01 and "identical" in [effect.verdict for effect in effects]:
        lines += wrap("Warning: the logs show two decimals or fewer, so small differences don't show.")
    facts = facts_in_words(sides, c.slope()) + more_facts(c, ledger)
    lines += answer_in_words(effects, c.until, test_in_words(c, effects), facts)
    for idea in c.ideas:
        if c.effect(idea) is None:
            lines.append(f"{short(idea.name, 20)}: {TOO_EARLY}")
    if args.target:
        lines += ["", *target_table(sides, args.target, looks=not c.runs)]
    return lines


def main(argv: list[str]) -> int:
    args, common = read_arguments(argv)
    settings = read_settings(args, start_of(sources(args)), needs_command=not args.base_logs)
    if args.target and settings.higher_is_better:
        args.target = -args.target
    if args.base_logs:
        return compare_logs(args, settings)
    args.ledger = args.ledger or settings.folder / "ledger.tsv"
    status = 0
    with locked_folder(settings):
        if args.sizes:
            return climb(args, settings, lambda args, size: set_up(args, common + size, settings))
        c = set_up(args, common, settings)
        try:
            make_all_runs(c, args.gate)
            if not (args.no_times or args.gate):
                add_all_times(c, args.times)
        except KeyboardInterrupt:
            status = 130
            c.notes.append("Interrupted; run the same command again to continue.")
        show_line()
        ledger = with_answers(c, args)
        lines = answer_lines(c, args, ledger)
        try:
            print("\n".join(lines), flush=True)
        finally:
            write_ledger(args.ledger, ledger)
        if args.json:
            write_file(args.json, comparison_as_json(c))
    if args.gate and status == 0:
        return int(lines[0] != "helps")
    return status
