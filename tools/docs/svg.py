"""A drawing for light and dark pages alike: it brings its own paper, and follows what the reader prefers."""

from __future__ import annotations

from xml.sax.saxutils import escape

__all__ = ["Drawing"]

_STYLE = """
  svg { --paper: #ffffff; --edge: #d0d7de; --ink: #1f2328; --pale: #59636e; --empty: #f6f8fa; --line: #8c959f;
        --a: #cfe8ff; --a-edge: #0969da; --b: #ffe2c8; --b-edge: #bc4c00; --c: #c9f2d2; --c-edge: #1a7f37;
        --shared: #ecdcff; --shared-edge: #8250df; --cached: #fff3b8; --cached-edge: #9a6700; --bad: #cf222e }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #161b22; --edge: #30363d; --ink: #e6edf3; --pale: #9da7b3; --empty: #0d1117; --line: #7d8590;
          --a: #12375f; --a-edge: #58a6ff; --b: #4d2a10; --b-edge: #f0883e; --c: #14401f; --c-edge: #3fb950;
          --shared: #37235c; --shared-edge: #bc8cff; --cached: #443611; --cached-edge: #d29922; --bad: #ff7b72 }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: var(--ink) }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
  .pale { fill: var(--pale) } .bold { font-weight: 600 } .bad { fill: var(--bad) }
  .paper { fill: var(--paper); stroke: var(--edge) }
  .box { fill: var(--paper); stroke: var(--line) } .empty { fill: var(--empty); stroke: var(--edge) }
  .a { fill: var(--a); stroke: var(--a-edge) } .b { fill: var(--b); stroke: var(--b-edge) }
  .c { fill: var(--c); stroke: var(--c-edge) } .shared { fill: var(--shared); stroke: var(--shared-edge) }
  .cached { fill: var(--cached); stroke: var(--cached-edge) }
  .line { fill: none; stroke: var(--line); stroke-width: 1.5 } .tip { fill: var(--line); stroke: none }
  .promised { stroke-dasharray: 5 4 } .strong { stroke-width: 2.5 }
"""


class Drawing:
    """Rectangles, texts and arrows on a sheet of paper.

    Args:
        width, height: of the sheet, in pixels.
        title: what it shows, in a few words.
        description: the same for who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._size = (width, height)
        self._words = (title, description)
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """Draw a rectangle; ``kind`` is one or more classes of the style."""
        at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {at} rx="4" class="{kind}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start", size: int = 13) -> None:
        """Write a line; ``anchor`` says whether it starts, ends or has its middle at ``x``."""
        at = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        self._parts.append(f'<text {at} class="{kind}">{escape(words)}</text>')

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """Draw a line through ``points`` with a tip at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{kind}" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        """Return the file's text."""
        width, height = self._size
        title, description = (escape(words) for words in self._words)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'role="img" aria-labelledby="title description">'
        )
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto" '
            'markerUnits="userSpaceOnUse"><path d="M0,0 L8,4 L0,8 z" class="tip"/></marker>'
        )
        paper = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" class="paper"/>'
        words = f'<title id="title">{title}</title>\n<desc id="description">{description}</desc>'
        return "\n".join([head, words, f"<style>{_STYLE}</style>", tip, paper, *self._parts, "</svg>", ""])
