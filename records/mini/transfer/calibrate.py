"""
Do forecasts over sizes hold? Forecasts what each idea does at width 64 from the screens of widths 32, 40 and 48,
as judge compare --sizes does (judge/sizes/trend.py). Run it from the repository's root:

    python records/mini/transfer/calibrate.py
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from judge.sizes.trend import LEVEL, Change, forecast, interval_of, trend
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


if __name__ == "__main__":
    main()
