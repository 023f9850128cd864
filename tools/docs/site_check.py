"""Links of a built site that lead nowhere, and pictures without words: what the builder itself does not tell."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["complaints"]


class _Page(HTMLParser):
    """One page.

    Attributes:
        ids: places that a link can lead to.
        links: where its links and pictures lead.
        num_wordless: pictures without an alternative text.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.num_wordless = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag brings."""
        fields = dict(attrs)
        self.ids.update(value for name in ("id", "name") if (value := fields.get(name)))
        if tag in ("a", "link", "img", "script"):
            self.links += [value for name in ("href", "src") if (value := fields.get(name))]
        self.num_wordless += tag == "img" and not (fields.get("alt") or "").strip()


def complaints(site: Path) -> list[str]:
    """Return a line for each link to a file or place that is not there, and for each picture without words."""
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site} has no pages"]
    found = []
    for file, page in pages.items():
        name = file.relative_to(site)
        if page.num_wordless:
            found.append(f"{name}: {page.num_wordless} pictures without alternative text")
        if file.name == "404.html":  # served under any address, so its links are absolute
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {"__skip"}:
                found.append(f"{name}: {link} leads to no place on its page")
    return found
