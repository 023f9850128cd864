"""Charts as inline SVG: no script, no font, nothing to fetch."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bar", "Line", "bars", "lines", "stacked", "steps"]

_COLOURS = ("#3b6ea5", "#d98c3f", "#6aa56a", "#b0b0b0", "#8d6aa5", "#a5463b")
_WIDTH, _LABELS, _ROW = 760, 230, 26


class Bar(NamedTuple):
    """One bar.

    Attributes:
        label: before it.
        value: its length.
        shown: text behind the bar.
    """

    label: str
    value: float
    shown: str


def bars(rows: Sequence[Bar], title: str) -> str:
    """Return horizontal bars on a common scale."""
    most = max((row.value for row in rows), default=0.0) or 1.0
    room = _WIDTH - _LABELS - 110
    parts = []
    for index, row in enumerate(rows):
        top = index * _ROW
        length = max(1.0, room * row.value / most)
        parts.append(
            f'<text x="{_LABELS - 8}" y="{top + 17}" text-anchor="end">{escape(row.label)}</text>'
            f'<rect x="{_LABELS}" y="{top + 4}" width="{length:.1f}" height="{_ROW - 8}" fill="{_COLOURS[0]}"/>'
            f'<text x="{_LABELS + length + 6:.1f}" y="{top + 17}">{escape(row.shown)}</text>'
        )
    return _svg(len(rows) * _ROW, title, parts)


class Line(NamedTuple):
    """One line of a chart.

    Attributes:
        label: in the legend.
        points: (to the right, upwards), in order; upwards None where nothing is known, which leaves a gap.
    """

    label: str
    points: Sequence[tuple[float, float | None]]


def lines(drawn: Sequence[Line], title: str, *, x_unit: str = "", y_unit: str = "") -> str:
    """Return lines on common scales that begin at 0, with a legend below."""
    height, left, right = 200, 60, _WIDTH - 20
    places = [point for line in drawn for point in line.points]
    widest = max((x for x, _ in places), default=0.0) or 1.0
    highest = max((y for _, y in places if y is not None), default=0.0) or 1.0
    parts = [
        f'<line x1="{left}" y1="{height}" x2="{right}" y2="{height}" stroke="#888"/>',
        f'<line x1="{left}" y1="10" x2="{left}" y2="{height}" stroke="#888"/>',
        f'<text x="{left}" y="{height + 16}">0</text>',
        f'<text x="{right}" y="{height + 16}" text-anchor="end">{_short(widest)} {escape(x_unit)}</text>',
        f'<text x="{left - 6}" y="20" text-anchor="end">{_short(highest)}</text>',
        f'<text x="{left + 8}" y="14">{escape(y_unit)}</text>',
    ]
    for index, line in enumerate(drawn):
        colour = _COLOURS[index % len(_COLOURS)]
        for run in _runs(line.points):
            path = " ".join(
                f"{left + (right - left) * x / widest:.1f},{height - (height - 20) * y / highest:.1f}" for x, y in run
            )
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        legend = height + 30 + index * 20
        parts.append(
            f'<rect x="{left}" y="{legend}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{left + 20}" y="{legend + 11}">{escape(line.label)}</text>'
        )
    return _svg(height + 32 + 20 * len(drawn), title, parts)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Return the points, cut where nothing is known."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def _short(number: float) -> str:
    """Return a number as an axis shows it."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{number:.3g}"


def stacked(parts: Sequence[Bar], title: str) -> str:
    """Return one bar cut into parts, with a legend below."""
    whole = sum(part.value for part in parts) or 1.0
    drawn = []
    left = 0.0
    for index, part in enumerate(parts):
        colour = _COLOURS[index % len(_COLOURS)]
        width = _WIDTH * part.value / whole
        legend = _ROW + 10 + index * 20
        drawn.append(
            f'<rect x="{left:.1f}" y="0" width="{width:.1f}" height="{_ROW}" fill="{colour}"/>'
            f'<rect x="0" y="{legend}" width="12" height="12" fill="{colour}"/>'
            f'<text x="20" y="{legend + 11}">{escape(part.label)}: {escape(part.shown)}</text>'
        )
        left += width
    return _svg(_ROW + 16 + 20 * len(parts), title, drawn)


def steps(values: Sequence[float], title: str, *, unit: str = "") -> str:
    """Return the share of values (upwards) that are at most so large (to the right)."""
    ascending = sorted(values)
    if not ascending:
        return ""
    height, left, right = 180, 40, _WIDTH - 60
    most = ascending[-1] or 1.0
    points = " ".join(
        f"{left + (right - left) * value / most:.1f},{height - (height - 10) * (index + 1) / len(ascending):.1f}"
        for index, value in enumerate(ascending)
    )
    drawn = [
        f'<polyline points="{left},{height} {points}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>',
        f'<line x1="{left}" y1="{height}" x2="{right}" y2="{height}" stroke="#888"/>',
        f'<text x="{left}" y="{height + 16}">0</text>',
        f'<text x="{right}" y="{height + 16}" text-anchor="end">{most:,.4g} {escape(unit)}</text>',
        '<text x="0" y="14">100 %</text>',
    ]
    return _svg(height + 22, title, drawn)


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
