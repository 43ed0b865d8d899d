"""
Which parts of a change matter? Trains combinations of them until each part is clear.

    ./run.sh screen --base main --idea my-branch              the commits of a branch
    ./run.sh screen --base main --idea my-branch --by hunk    the hunks of the whole difference
    ./run.sh screen --part my.patch --part "--muon_lr 0.03"   patches and options
    ./run.sh screen --command "python train.py {seed} {options}"
                    --base ../theirs@main --idea ../theirs@mine

--base, --idea and --command are those of compare (./run.sh compare --help). screen first tries the
combinations that it needs: the patches must apply, and two steps must run. Parts that only work
together become one. Up to 16 parts share the runs of a two-level design, in which each part is in half
of the combinations. Where parts can't be combined like that, each is left out of the whole once.

screen stops when each part has one of these answers:

    needed      without it, the loss is higher
    hurts       without it, the loss is lower
    barnacle    we are 95% sure that it changes the loss by less than --until

A part is "undecided" if --blocks, --hours or Ctrl-C ends the screen earlier. A block is one run of each
combination with the same seed. Runs are kept as those of compare, so the same command goes on where it
ended. You may look as often as you like.

Exit status: 0 done, 2 an error, 130 interrupted.
"""

import argparse
import functools
import itertools
import shlex
import sys
from dataclasses import dataclass, replace

import numpy as np

from judge.comparable import add_metric, judged_in_words, settle_metric
from judge.compare import runs as compare_runs
from judge.compare.runs import (
    Pool,
    add_variants,
    make_runs,
    open_pool,
    runs_a_process,
    show_line,
)
from judge.compare.sources import (
    Variant,
    check_data,
    check_settings,
    first_variant,
    read_variant,
    set_steps,
)
from judge.screen.design import Design
from judge.screen.effects import Result, effects_as_json, effects_in_words, plot_effects
from judge.screen.parts import Group, Part, choose_design, combine, given_part, members, read_parts
from lib.commands import (
    UserError,
    command_parser,
    join_values,
    output_file,
    positive,
    run_command,
    stop_on_signals,
    whole_number,
)
from lib.files import write_file
from lib.text import plural


@dataclass
class Screen:
    """What is screened, and the runs so far."""

    args: argparse.Namespace
    base: Variant
    parts: list[Part]
    groups: list[Group]
    pool: Pool
    design: Design | None = None

    def combinations(self) -> list[Variant]:
        """In the order of the design's rows."""
        chosen = [members(self.groups, row) for row in self.design.rows]
        return [combine(self.base, self.parts, some) for some in chosen]

    def losses(self) -> np.ndarray:
        """Of the blocks that are whole, from the first seed on. Shape (blocks, combinations)."""
        runs = [self.pool.runs[variant.name] for variant in self.combinations()]
        seeds = itertools.count(self.args.seed)
        whole = itertools.takewhile(lambda seed: all(seed in logs for logs in runs), seeds)
        losses = [[logs[seed].end.val_loss for logs in runs] for seed in whole]
        return np.array(losses).reshape(-1, len(runs))

    def result(self) -> Result:
        names = [" + ".join(self.parts[i].name for i in group) for group in self.groups]
        logs = [log for variant in self.combinations() for log in self.pool.runs[variant.name].values()]
        facts = f"{self.pool.facts['machine']}, PyTorch {self.pool.facts['torch']}."
        if logs:
            facts = f"{judged_in_words(logs)} {facts}"
        return Result(names, self.design, self.losses(), self.args.until, facts)

    def undecided(self) -> int:
        """How many parts."""
        if not len(self.losses()):
            return len(self.groups)
        return sum(effect.verdict == "undecided" for effect in self.result().effects())


# -----------------------------------------------------------------------------
# Arguments


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("screen", __doc__)
    add = parser.add_argument
    source = "[NAME=]SOURCE"
    add("--base", metavar=source, default=".", help="default: the working tree")
    add("--idea", metavar=source, help="the base with all parts")
    by = "what the parts of the idea are; default: commit"
    add("--by", choices=["commit", "hunk"], default="commit", help=by)
    part = "a part instead of --idea: a patch, or options in quotes; can be given several times"
    add("--part", metavar="[NAME=]PART", action="append", help=part)
    add("--recipe", metavar="NAME", help="train recipes/NAME.py; default: train_gpt.py")
    add("--command", default="", metavar="COMMAND", help="train with this shell command instead")
    trial = "options of a short run, to try a combination; default: --num_iterations 2, if it has that"
    add("--try", dest="trial", default="", metavar="OPTIONS", help=trial)
    until = "a part that changes the loss by less than this is a barnacle; default: 0.002"
    add("--until", type=positive, default=0.002, metavar="LOSS", help=until)
    add("--blocks", type=whole_number, default=sys.maxsize, metavar="N", help="stop after N blocks")
    add("--hours", type=float, default=1e9, metavar="H", help="stop after H hours")
    add("--seed", type=int, default=0, metavar="N", help="seed of the first block; default: 0")
    add("--jobs", type=whole_number, metavar="N", help="runs at a time on a CPU; default: one per core")
    add_metric(parser)
    add("--json", type=output_file, metavar="FILE", help="write all numbers")
    add("--plot", type=output_file, metavar="FILE.png", help="draw the effects and their intervals")
    return parser


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns our options, and the options for all runs. Raises UserError."""
    names = ("--base", "--idea", "--part", "--try")
    args, common = make_parser().parse_known_args(join_values(argv, names))
    settle_metric(args)
    if bool(args.idea) == bool(args.part):
        raise UserError(
            "give --idea, whose difference from --base has the parts, or the parts with --part"
        )
    return args, common


# -----------------------------------------------------------------------------
# Which combinations work


def trial_of(variant: Variant, options: str) -> Variant | None:
    """The variant with so few steps that it ends at once; None if nobody knows how."""
    name = f"{variant.name} (trial)"
    if options:
        return replace(variant, name=name, options=variant.options + shlex.split(options))
    if variant.num_iterations() is None:
        return None
    return replace(set_steps(variant, 2), name=name)


def make_trials(s: Screen, variants: list[Variant]) -> None:
    """Makes a short run of each. Raises UserError if a script refuses its options, and UserError."""
    check_settings(variants, 1)
    trials = [trial for variant in variants if (trial := trial_of(variant, s.args.trial))]
    add_variants(s.pool, trials)
    wanted = [(trial, [s.args.seed]) for trial in trials]
    make_runs(s.pool, lambda: wanted, lambda new: False)


def applies(s: Screen, chosen: tuple[int, ...]) -> bool:
    """Whether the patches of these parts can be applied to the base."""
    try:
        combine(s.base, s.parts, chosen)
    except UserError:
        return False
    return True


def survives(s: Screen, chosen: tuple[int, ...]) -> bool:
    """Whether the script makes a short run with these parts."""
    variant = combine(s.base, s.parts, chosen)
    try:
        make_trials(s, [variant])
    except UserError as e:
        show_line(f"{variant.name}: {str(e).splitlines()[-1]}")
        return False
    return True


def choose_combinations(s: Screen) -> None:
    """Raises UserError if the whole doesn't work."""
    s.groups, s.design = choose_design(s.groups, lambda chosen: applies(s, chosen))
    show_line(f"{plural(len(s.groups), 'part')}: trying {len(s.design.rows)} combinations")
    try:
        make_trials(s, s.combinations())
    except UserError:  # then each is tried alone
        works = functools.cache(lambda chosen: survives(s, chosen))
        s.groups, s.design = choose_design(s.groups, works)


def set_up(args: argparse.Namespace, common: list[str], lock: int) -> Screen:
    """Raises UserError."""
    parts = [given_part(text) for text in args.part or []]
    texts = [args.base, *(args.part or []), args.idea or ""]
    tree = first_variant(texts, args.command, args.recipe, compare_runs.scratch())
    base = read_variant(args.base, tree, common)
    check_settings([base], 1)
    pool = open_pool([base], lock, args.jobs, metric=args.metric)
    check_data([base])
    if args.idea:
        idea = read_variant(args.idea, base, common)
        parts = read_parts(base, idea, (args.base, args.idea), args.by)
    if not parts:
        raise UserError(f"{args.base} and {args.idea} are the same, so there are no parts")
    s = Screen(args, base, parts, [(i,) for i in range(len(parts))], pool)
    choose_combinations(s)
    return s


# -----------------------------------------------------------------------------
# Blocks


def progress(s: Screen, missing: int) -> str:
    """Like "2 blocks, 5 of 8 parts undecided, 12 runs to the next look"."""
    of = f"{s.undecided()} of {plural(len(s.groups), 'part')} undecided"
    return f"{plural(len(s.losses()), 'block')}, {of}, {plural(missing, 'run')} to the next look"


def make_blocks(s: Screen) -> None:
    """Makes blocks until each part is decided, or the time is over. Raises UserError."""
    variants = s.combinations()
    check_settings(variants, 1)
    add_variants(s.pool, variants)
    while (done := len(s.losses())) < s.args.blocks and s.undecided():
        blocks = min(done + runs_a_process(s.base), s.args.blocks)
        seeds = range(s.args.seed, s.args.seed + blocks)
        wanted = [(variant, seeds) for variant in variants]

        def enough(new: int) -> bool:
            if new:
                missing = sum(seed not in s.pool.runs[v.name] for v in variants for seed in seeds)
                show_line(progress(s, missing))
            return s.pool.minutes() > 60 * s.args.hours

        make_runs(s.pool, lambda: wanted, enough)
        if s.pool.minutes() > 60 * s.args.hours:
            return


# -----------------------------------------------------------------------------
# The answer


def main(argv: list[str]) -> int:
    args, common = read_arguments(argv)
    with compare_runs.locked_folder() as lock:
        s = set_up(args, common, lock)
        status = 0
        try:
            make_blocks(s)
        except KeyboardInterrupt:
            status = 130
        show_line()
        result = s.result()
        print("\n".join(effects_in_words(result)))
        if args.json:
            write_file(args.json, effects_as_json(result))
        if args.plot:
            plot_effects(result, args.plot)
    if status:
        print("Interrupted; run the same command again to continue.")
    return status


if __name__ == "__main__":
    stop_on_signals()
    run_command(main)
