"""
Do forecasts over sizes hold? Forecasts what each idea does at width 64 from the screens of widths 32, 40 and 48,
as judge compare --sizes does (judge/sizes/trend.py). Run it from the repository's root:

    python records/mini/transfer/calibrate.py
"""

import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from judge.sizes.trend import LEVEL, Change, forecast, interval_of, trend
from judge.stats.decide import Estimate
from records.mini.transfer.score import CLEAR, NAMES, fit, loss_of_one_percent, read

WIDTHS = {32: "width_32", 40: "width_40", 48: "width_48", 64: "tokens"}
FOUR_LAYERS = 4 * 12  # weights of the blocks: this many times the width squared


def changes_at(width: int, name: str) -> dict[str, Change]:
    """What each idea does to the steps, as a logarithm."""
    runs = read(HERE / f"{name}.jsonl")
    effects, freedom, _ = fit(runs)
    percent, percent_error = loss_of_one_percent(read(HERE / f"slopes_{name}.jsonl"))
    slope = 100 * percent
    found = {}
    for idea, (effect, error) in effects.items():
        variances = ((error / slope) ** 2, (effect / slope * percent_error / percent) ** 2)
        found[idea] = Change(
            FOUR_LAYERS * width**2, effect / slope, variances, (freedom, 2)
        )  # three seeds of slopes
    return found


def answer(estimate: Estimate, sign: int) -> str:
    """Whether an effect has the sign of the reference list, and whether its interval leaves no doubt."""
    clearly = "clearly " if estimate.low * estimate.high > 0 else ""
    return clearly + ("right" if estimate.value * sign > 0 else "wrong")


def agreement(by_size: list[dict[str, Change]]) -> None:
    """Prints, for each clear row of the list, what the smallest size says, and what all sizes say together: the
    line at the largest one, and its forecast from the others."""
    count = Counter()
    for idea in sorted(by_size[0].keys() & CLEAR.keys()):
        known = [changes[idea] for changes in by_size]
        sign, _ = CLEAR[idea]
        largest = known[-1].parameters
        estimates = [interval_of(known[0]), forecast(known[:-1], largest), forecast(known, largest)]
        answers = [answer(estimate, sign) for estimate in estimates]
        print(f"| {NAMES[idea]} | {' | '.join(answers)} |")
        count[tuple(text.removeprefix("clearly ") for text in answers)] += 1
    print("smallest size, forecast, all sizes:", dict(count))


def main():
    *smaller, largest = [changes_at(*pair) for pair in WIDTHS.items()]
    held = 0
    distances = []
    for idea, measured in sorted(largest.items(), key=lambda pair: -pair[1].value):
        known = [changes[idea] for changes in smaller]
        ahead = forecast(known, measured.parameters)
        line = trend([*known, measured])
        # the forecast's error and that of what was measured
        half = (
            (ahead.high - ahead.value) ** 2 + (interval_of(measured).high - measured.value) ** 2
        ) ** 0.5
        distances.append(abs(measured.value - ahead.value) / half)
        held += distances[-1] <= 1
        cells = [f"{100 * change.value:+.1f}" for change in [*known, measured]]
        cells.append(f"{100 * ahead.value:+.1f} ({100 * ahead.low:+.1f} to {100 * ahead.high:+.1f})")
        cells.append(f"{100 * line.value:+.1f} ({100 * line.low:+.1f} to {100 * line.high:+.1f})")
        clear = "clear" if idea in CLEAR else ""
        print(f"| {NAMES[idea]} | {' | '.join(cells)} | {clear} | {distances[-1]:.2f}")
    print(
        f"{held} of {len(distances)} forecasts hold at {LEVEL:.0%}; the largest distances, in half intervals:"
    )
    print([f"{d:.2f}" for d in sorted(distances)[-4:]])
    agreement([*smaller, largest])


if __name__ == "__main__":
    main()
