"""The page: one file of HTML with its style and scripts in it, and a policy that lets a browser run nothing else.

It holds no data. What it draws it asks of ``/v1/dashboard``, with the key that it is given.
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

__all__ = ["PageFile", "dashboard_page"]

_SCRIPTS = ("draw.js", "panels.js", "poll.js")
_STYLE = "dashboard.css"


class PageFile(NamedTuple):
    """What a browser gets.

    Attributes:
        html: the page.
        headers: of the answer.
    """

    html: bytes
    headers: dict[str, str]


@cache
def dashboard_page() -> PageFile:
    """Return the page. Style and script are named in its policy by their digests (CSP level 3, ``'sha256-...'``).

    The script is a module: browsers put it off until the page is parsed, and may paint it meanwhile.
    """
    style = _text(_STYLE)
    script = "".join(map(_text, _SCRIPTS))
    html = _text("dashboard.html").replace("<!-- style -->", f"<style>{style}</style>")
    html = html.replace("<!-- scripts -->", f'<script type="module">{script}</script>')
    policy = {
        "default-src": "'none'",
        "style-src": _digest(style),
        "script-src": _digest(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return PageFile(
        html.encode(),
        {
            "Content-Security-Policy": "; ".join(f"{what} {who}" for what, who in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _text(name: str) -> str:
    return files("pagefold.server.dashboard").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
