"""Charts as inline SVG: no script, no font, nothing to fetch."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bar", "bars", "stacked", "steps"]

_COLOURS = ("#3b6ea5", "#d98c3f", "#6aa56a", "#b0b0b0", "#8d6aa5", "#a5463b")
_WIDTH, _LABELS, _ROW = 760, 230, 26


class Bar(NamedTuple):
    """One bar.

    Attributes:
        label: before it.
        value: its length.
        shown: behind it.
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
