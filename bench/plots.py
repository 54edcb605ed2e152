"""Plots of what was measured, as PNG beside the JSON: bars, grouped bars, a save's timeline, lines.

The colours are Okabe and Ito's, which colour-blind readers can tell apart; lines differ in their markers as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

    from tidegate.report import Span

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STAGES = ("stage", "encode", "copy", "write")
_MANY_BARS = 12
_MOST_MARKERS = 50


def beside(results: Path, suffix: str = "") -> Path:
    """Return the PNG's path for a results file: `stall.json`, "device" → `stall-device.png`."""
    return results.with_name(f"{results.stem}{'-' if suffix else ''}{suffix}.png")


def bars(
    path: Path,
    title: str,
    values: Mapping[str, float],
    *,
    unit: str,
    log: bool = False,
    limits: Mapping[str, float] | None = None,
) -> Path:
    """Draw one horizontal bar a name, each with its figure.

    Args:
        path: The PNG to write.
        title: The question that it answers.
        values: In the order from top to bottom.
        unit: What the values are, such as "stall (ms)".
        log: Whether the axis is logarithmic; values must be above zero.
        limits: Dashed lines with names: bounds to stay within.
    """
    figure, axes = _new(8, 1.4 + 0.38 * len(values))
    drawn = axes.barh(list(values), list(values.values()), color=COLOURS[0])
    axes.invert_yaxis()
    _label(axes, drawn)
    _draw_limits(axes, limits, is_vertical=True)
    axes.set_xlabel(unit)
    if log:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)
    return _finish(figure, axes, path, title)


def grouped_bars(
    path: Path,
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str,
    log: bool = False,
    limits: Mapping[str, float] | None = None,
) -> Path:
    """Draw a group of bars a name, one bar of it a series.

    Args:
        path: The PNG to write.
        title: The question that it answers.
        groups: Names along the x axis.
        series: For each name in the legend, one value a group; None where there is none.
        unit: What the values are.
        log: Whether the axis is logarithmic; values must be above zero.
        limits: Dashed lines with names.
    """
    figure, axes = _new(max(7, 1.2 + 0.26 * len(groups) * (len(series) + 1)), 4.5)
    width = 0.84 / max(1, len(series))
    for i, (name, values) in enumerate(series.items()):
        places = [g - 0.42 + (i + 0.5) * width for g, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        drawn = axes.bar(places, heights, width * 0.94, label=name, color=COLOURS[i % len(COLOURS)])
        _label(axes, drawn, size=6 if len(groups) * len(series) > _MANY_BARS else 8)
    axes.set_xticks(range(len(groups)), groups)
    _draw_limits(axes, limits, is_vertical=False)
    axes.set_ylabel(unit)
    if log:
        axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(fontsize=8, ncols=min(4, len(series) or 1), loc="outside lower left", frameon=False)
    return _finish(figure, axes, path, title)


def timeline(path: Path, title: str, spans: Sequence[Span | Sequence[object]], *, stall_s: float | None = None) -> Path:
    """Draw what each stage of a save did on each chunk, over time.

    Args:
        path: The PNG to write.
        title: The question that it answers.
        spans: A report's timeline, or (chunk, stage, start_s, end_s) each.
        stall_s: When `save_async` returned: a dashed line.
    """
    rows = [s if isinstance(s, Sequence) else (s.chunk, s.stage, s.start_s, s.end_s) for s in spans]
    found = {str(row[1]) for row in rows}
    names = [name for name in STAGES if name in found] + sorted(found.difference(STAGES))
    figure, axes = _new(9, 1.4 + 0.55 * max(1, len(names)))
    for i, name in enumerate(names):
        ranges = [(1e3 * float(row[2]), 1e3 * (float(row[3]) - float(row[2]))) for row in rows if row[1] == name]  # type: ignore[arg-type]
        colour = COLOURS[i % len(COLOURS)]
        axes.broken_barh(ranges, (i - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3, alpha=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("time since the call (ms)")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    if stall_s is not None:
        _draw_limits(axes, {"save_async returns": 1e3 * stall_s}, is_vertical=True)
    return _finish(figure, axes, path, title)


def lines(
    path: Path,
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_unit: str,
    y_unit: str,
    log_x: bool = False,
    log_y: bool = False,
    limits: Mapping[str, float] | None = None,
) -> Path:
    """Draw one line a series.

    Args:
        path: The PNG to write.
        title: The question that it answers.
        series: For each name in the legend, the x and the y values.
        x_unit: What x is.
        y_unit: What y is.
        log_x: Whether x is logarithmic.
        log_y: Whether y is logarithmic.
        limits: Dashed horizontal lines with names.
    """
    figure, axes = _new(7.5, 4.5)
    for i, (name, (xs, ys)) in enumerate(series.items()):
        marker = MARKERS[i % len(MARKERS)] if len(xs) <= _MOST_MARKERS else None
        axes.plot(xs, ys, label=name, color=COLOURS[i % len(COLOURS)], marker=marker, markersize=5, linewidth=1.5)
    _draw_limits(axes, limits, is_vertical=False)
    axes.set_xlabel(x_unit)
    axes.set_ylabel(y_unit)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return _finish(figure, axes, path, title)


def _new(width_inches: float, height_inches: float) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=(width_inches, height_inches), layout="constrained")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _label(axes: Axes, drawn: BarContainer, size: int = 8) -> None:
    axes.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=size)


def _draw_limits(axes: Axes, limits: Mapping[str, float] | None, *, is_vertical: bool) -> None:
    """Draw dashed lines, each with its name at its end."""
    for name, value in (limits or {}).items():
        if is_vertical:
            axes.axvline(value, color="black", linestyle="--", linewidth=1)
            axes.text(value, 1.0, f" {name}", transform=axes.get_xaxis_transform(), fontsize=7, va="bottom")
        else:
            axes.axhline(value, color="black", linestyle="--", linewidth=1)
            axes.text(1.0, value, f" {name}", transform=axes.get_yaxis_transform(), fontsize=7, va="center")


def _finish(figure: Figure, axes: Axes, path: Path, title: str) -> Path:
    axes.set_title(title, fontsize=11, loc="left", pad=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
