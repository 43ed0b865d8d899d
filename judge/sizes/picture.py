"""Draws what an idea does at each size of the model."""

from pathlib import Path

import numpy as np

from judge.plot.style import COLORS, plt, save_figure
from judge.sizes.trend import LEVEL, Size, changes, forecast, interval_of
from judge.stats.decide import Estimate
from judge.text import short


def percent(log_ratio):
    return 100 * np.expm1(log_ratio)


def draw_point(axes, parameters: float, estimate: Estimate, **look) -> None:
    low, value, high = percent(np.array([estimate.low, estimate.value, estimate.high]))
    axes.errorbar(parameters, value, [[value - low], [high - value]], capsize=4, linewidth=1.6, **look)


def draw_ladder(name: str, sizes: list[Size], path: Path) -> None:
    """The change of each size with its interval, and what was forecast for it. The dashed line leads to the forecast
    for a model twice as large. Raises OSError."""
    figure, axes = plt.subplots()
    axes.axhline(0, color="0.35", linewidth=1)
    known = changes(sizes)
    names = [f"{size.name}\n{size.effect.verdict}" if size.effect else size.name for size in sizes]
    places = [size.parameters for size in sizes]
    for size in sizes:
        if size.change:
            draw_point(axes, size.parameters, interval_of(size.change), fmt="o", color=COLORS[0])
        if size.forecast:
            draw_point(axes, 1.06 * size.parameters, size.forecast, fmt="s", color=COLORS[1])
    if known and forecast(known, known[-1].parameters):
        last = [size for size in sizes if size.change][-1]
        ends = np.geomspace(known[0].parameters, 2 * last.parameters)
        line = [percent(forecast(known, end).value) for end in ends]
        axes.plot(ends, line, linestyle="--", color=COLORS[1], linewidth=1.2)
        draw_point(axes, ends[-1], forecast(known, ends[-1]), fmt="s", color=COLORS[1])
        places.append(ends[-1])
        names.append(f"\n\ntwice {last.name}")  # below the others, which may be near
    axes.set_xscale("log")
    axes.set_xticks(places, names)
    axes.minorticks_off()
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("parameters")
    axes.set_ylabel("steps to the base's loss (%)")
    axes.set_title(f"{short(name, 40)}: measured, and forecast (squares), with {LEVEL:.0%} intervals")
    save_figure(figure, path)
