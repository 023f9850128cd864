"""A comparison as a picture, by matplotlib: the only file of this package that needs it."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from math import nan
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.sim.answer import OVER_TIME, over_time, run_name
from pagefold.sim.html import size_lines
from pagefold.sim.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from pagefold.sim.comparison import Comparison

__all__ = ["comparison_png", "ensure_matplotlib"]

_WIDTH, _HEIGHT, _DPI = 6.0, 3.2, 110


def ensure_matplotlib() -> None:
    """Return if a picture can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        msg = "To draw a PNG, matplotlib must be installed."
        raise ConfigError(msg, remedy='pip install "pagefold[sim]", or write a page with --html.')


def comparison_png(comparison: Comparison) -> bytes:
    """Return a PNG: hit ratio by size, the miss-ratio curve, and of runs with timing what happened over time.

    The same comparison makes the same bytes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    ensure_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    timed = [(run_name(run), run.report) for run in comparison.runs if isinstance(run.report, Report)]
    plots = OVER_TIME if timed else ()
    num_plots = 1 + (comparison.curves is not None) + len(plots)
    num_columns = 2 if num_plots > 1 else 1
    num_rows = -(-num_plots // num_columns)
    figure = Figure(figsize=(_WIDTH * num_columns, _HEIGHT * num_rows), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(comparison.question.name)
    axes = iter(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    _sizes(next(axes), comparison)
    if comparison.curves is not None:
        _curve(next(axes), comparison)
    for plot in plots:
        axis = next(axes)
        for name, report in timed:
            points = over_time(report, plot.name)
            axis.plot([x for x, _ in points], _drawn(points), label=name)
        _name(axis, plot.title, "virtual seconds", plot.unit)
    for axis in axes:
        axis.set_axis_off()
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "pagefold"})
    return out.getvalue()


def _sizes(axis: Axes, comparison: Comparison) -> None:
    for line in size_lines(comparison):
        axis.plot([x for x, _ in line.points], _drawn(line.points), marker="o", label=line.label)
    _name(axis, "Token hit ratio by size of the cache", "tokens", "")


def _drawn(points: Sequence[tuple[float, float | None]]) -> list[float]:
    """Return the values; where there is none the line has a gap."""
    return [nan if y is None else y for _, y in points]


def _curve(axis: Axes, comparison: Comparison) -> None:
    curves = comparison.curves
    assert curves is not None
    axis.plot(curves.sizes, [1 - curves.exact.at(size) for size in curves.sizes], label="exact")
    label = f"sampled at {curves.sampled.rate:g}, error {curves.error:.4f}"
    axis.plot(curves.sizes, [1 - curves.sampled.at(size) for size in curves.sizes], label=label)
    _name(axis, "Miss-ratio curve of LRU", "tokens", "")


def _name(axis: Axes, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x_label, fontsize=8)
    axis.set_ylabel(y_label, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)
