"""
Which parts of a change matter? Trains combinations of them until each part is clear.

    judge screen --base main --idea my-branch              the commits of a branch
    judge screen --base main --idea my-branch --by hunk    the hunks of the whole difference
    judge screen --part my.patch --part "--muon_lr 0.03"   patches and options
    judge screen --command "python train.py {seed} {options}"
                    --base ../theirs@main --idea ../theirs@mine

--base, --idea and --command are those of compare. screen first tries the
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
import shlex
import sys
from dataclasses import replace

from judge.settings import TEXTS, Settings, add_run_options, read_settings
from judge.runs.make import add_variants, locked_folder, make_runs, open_pool
from judge.runs.variants import (
    Variant,
    check_options,
    check_settings,
    check_validation,
    first_variant,
    read_variant,
    set_steps,
    start_of,
)
from judge.screen.blocks import Screen, wanted_blocks
from judge.screen.answer import effects_as_json, effects_in_words
from judge.screen.parts import combine, given_part, read_parts
from judge.commands import (
    UserError,
    command_parser,
    join_values,
    positive,
    whole_number,
)
from judge.files import write_file
from judge.text import plural, show_line

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
    trial = "options of a short run, to try a combination; default: --num_iterations 2, if it has that"
    add("--try", dest="trial", default="", metavar="OPTIONS", help=trial)
    until = "a part that is worth less than this loss is a barnacle; default: 0.002"
    add("--until", type=positive, default=0.002, metavar="LOSS", help=until)
    add("--blocks", type=whole_number, default=sys.maxsize, metavar="N", help="stop after N blocks")
    add_run_options(parser)
    return parser


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns our options, and the options for all runs. Raises UserError."""
    names = ("--base", "--idea", "--part", "--try", *TEXTS)
    args, common = make_parser().parse_known_args(join_values(argv, names))
    if bool(args.idea) == bool(args.part):
        raise UserError(
            "give --idea, whose difference from --base has the parts, or the parts with --part"
        )
    return args, common


# -----------------------------------------------------------------------------
# Which combinations work


def trial_of(variant: Variant, options: str) -> Variant | None:
    """The variant with so few steps that it ends at once; None if nobody knows how."""
    if options:
        return replace(variant, options=variant.options + shlex.split(options))
    return set_steps(variant, 2) if variant.num_iterations() else None


def make_trials(s: Screen, variants: list[Variant]) -> None:
    """Makes a short run of each. Raises UserError if one fails."""
    check_settings(variants)
    trials = [trial for variant in variants if (trial := trial_of(variant, s.trial))]
    add_variants(s.pool, trials)
    wanted = [(trial, [s.seed]) for trial in trials]
    make_runs(s.pool, lambda: wanted)


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
    s.choose(lambda chosen: applies(s, chosen))
    show_line(f"{plural(len(s.groups), 'part')}: trying {len(s.design.rows)} combinations")
    try:
        make_trials(s, s.variants)
    except UserError:  # then each is tried alone
        s.choose(functools.cache(lambda chosen: survives(s, chosen)))
        check_settings(s.variants)


def sources(args: argparse.Namespace) -> list[str]:
    return [text for text in [args.base, *(args.part or []), args.idea] if text]


def set_up(args: argparse.Namespace, common: list[str], settings: Settings) -> Screen:
    """Raises UserError."""
    parts = [given_part(text) for text in args.part or []]
    tree = first_variant(sources(args), settings)
    base = read_variant(args.base, tree, common)
    check_settings([base])
    if args.idea:
        idea = read_variant(args.idea, base, common)
        parts = read_parts(base, idea, (args.base, args.idea), args.by)
    pool = open_pool([base], settings, args.hours)  # links data, which are no part
    if not parts:
        raise UserError(f"{args.base} and {args.idea} are the same, so there are no parts")
    more = [word for part in parts for word in part.options] + shlex.split(args.trial)
    check_options(base.command, more)
    whole = combine(base, parts, tuple(range(len(parts))))
    check_settings([whole])
    check_validation(base, [whole])
    asked = (args.seed, args.until, args.blocks, args.trial)
    s = Screen(pool, base, parts, [(i,) for i in range(len(parts))], *asked)
    choose_combinations(s)
    add_variants(pool, s.variants)
    return s


# -----------------------------------------------------------------------------
# Blocks


def show_progress(s: Screen) -> None:
    """Like "2 blocks, 5 of 8 parts undecided, 12 runs to the next look"."""
    wanted = wanted_blocks(s)
    missing = sum(seed not in variant.runs for variant, seeds in wanted for seed in seeds)
    of = f"{s.undecided()} of {plural(len(s.groups), 'part')} undecided"
    show_line(f"{plural(len(s.losses()), 'block')}, {of}, {plural(missing, 'run')} to the next look")


# -----------------------------------------------------------------------------
# The answer


def main(argv: list[str]) -> int:
    args, common = read_arguments(argv)
    settings = read_settings(args, start_of(sources(args)))
    with locked_folder(settings):
        s = set_up(args, common, settings)
        status = 0
        try:
            make_runs(s.pool, lambda: wanted_blocks(s), lambda: show_progress(s))
        except KeyboardInterrupt:
            status = 130
        show_line()
        print("\n".join(effects_in_words(s)))
        if args.json:
            write_file(args.json, effects_as_json(s))
    if status:
        print("Interrupted; run the same command again to continue.")
    return status
