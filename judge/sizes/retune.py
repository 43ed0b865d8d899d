"""
Gives the base and the ideas the best of a few values of an option each, such as the learning rate: a rate that
suits only one of them would decide the comparison (https://arxiv.org/abs/2512.24503). The runs have other seeds than
those that are judged.
"""

import argparse
import shlex
import statistics
from dataclasses import replace

from judge.commands import UserError
from judge.compare.pairs import losses
from judge.runs.make import make_runs, open_pool
from judge.runs.variants import Variant, check_settings, tell_apart
from judge.text import short, show_line

SEEDS = [200_000, 200_001]  # no other runs have them


def value_list(text: str) -> list[list[str]]:
    """ "--lr 1 2" as [["--lr", "1"], ["--lr", "2"]], and "lr= 1 2" as [["lr=1"], ["lr=2"]]. Raises
    ArgumentTypeError."""
    option, *values = shlex.split(text)
    if len(values) < 2 or not (option.startswith("-") or option.endswith("=")):
        raise argparse.ArgumentTypeError(
            f'{text}: must be an option and two values or more: "--lr 1 2"'
        )
    return [[option + value] if option.endswith("=") else [option, value] for value in values]


def with_words(variant: Variant, words: list[str]) -> Variant:
    return replace(variant, options=[*variant.options, *words], settings={})


def retuned(
    variants: list[Variant], values: list[list[str]], hours: float
) -> tuple[list[Variant], list[str]]:
    """The variants with their best values, and sentences about these. Raises UserError."""
    tried = [[with_words(variant, words) for words in values] for variant in variants]
    every = [candidate for row in tried for candidate in row]
    check_settings(every)
    tell_apart([row[0] for row in tried])  # an idea may be nothing but another value
    pool = open_pool(every, variants[0].project, hours)
    make_runs(
        pool,
        lambda: [(candidate, SEEDS) for candidate in every],
        lambda: show_line(f"--retune: {pool.made} of {len(every) * len(SEEDS)} runs"),
    )
    best = []
    notes = []
    for variant, candidates in zip(variants, tried):
        if not all(candidate.runs.keys() >= {*SEEDS} for candidate in candidates):
            raise UserError(
                "--hours ended before --retune had all its runs; run the same command again"
            )
        means = [statistics.fmean(losses(candidate, SEEDS)) for candidate in candidates]
        place = means.index(min(means))
        best.append(candidates[place])
        edge = ", the first or last one" if place in (0, len(values) - 1) else ""
        chosen = " ".join(values[place])
        notes.append(
            f"{short(variant.name, 30)} got {chosen}, the best of {len(values)} on other seeds{edge}."
        )
    return best, notes
