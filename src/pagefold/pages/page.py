"""A page of HTML that stands alone: headings, tables and charts, with nothing to fetch."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from pagefold.files.whole import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: .25em .8em .25em 0; text-align: left; vertical-align: top; }
tr + tr td { border-top: 1px solid #ddd; } svg { max-width: 100%; height: auto; font: 13px system-ui, sans-serif; }
code { font-size: .95em; } .note { color: #666; }
"""


class Page:
    """Collects the parts of a page.

    Args:
        title: of the page, and its first heading.
    """

    def __init__(self, title: str) -> None:
        self._title = escape(title)
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def table(self, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> None:
        """Add a table of plain texts."""
        lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
        lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        self._parts.append(f"<table>{''.join(lines)}</table>")

    def chart(self, svg: str) -> None:
        """Add a chart of ``chart.py``."""
        self._parts.append(svg)

    def html(self) -> str:
        """Return the page."""
        head = f'<meta charset="utf-8"><title>{self._title}</title><style>{_STYLE}</style>'
        body = f"<h1>{self._title}</h1>{''.join(self._parts)}"
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'

    def write(self, file: Path) -> None:
        """Write the page.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_whole(file, self.html())
