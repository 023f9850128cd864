"""Breakpoints of the cache, as Anthropic spells them: ``cache_control`` on tools, texts and blocks of messages.

All prompts are cached here, so a breakpoint does not decide whether what is before it is found again: it asks that it
stays, so long. Its type, lifetime, number and order are checked, and its lifetime says under which count of ``usage``
new tokens are told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BeforeValidator

from pagefold.errors import InvalidRequestError
from pagefold.server.ignored import Body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.server.chat_prompt import ChatCut

__all__ = ["MAX_BREAKPOINTS", "Breakpoint", "CacheControl", "check_breakpoints"]

MAX_BREAKPOINTS = 4
"""Of one request, as in Anthropic's API."""

_SECONDS = {"5m": 300.0, "1h": 3600.0}


def _is_ephemeral(kind: object) -> object:
    if kind != "ephemeral":
        msg = "the only kind of cache_control is ephemeral"
        raise ValueError(msg)
    return kind


def _is_lifetime(ttl: object) -> object:
    if ttl not in ("5m", "1h"):  # a set would hash whatever the JSON was
        msg = "a breakpoint lives for 5m or 1h"
        raise ValueError(msg)
    return ttl


class CacheControl(Body):
    """A breakpoint.

    Attributes:
        ttl: how long the client expects it to be of use.
    """

    type: Annotated[Literal["ephemeral"], BeforeValidator(_is_ephemeral)]
    ttl: Annotated[Literal["5m", "1h"], BeforeValidator(_is_lifetime)] = "5m"

    @property
    def ttl_s(self) -> float:
        """The same in seconds."""
        return _SECONDS[self.ttl]


class Breakpoint(NamedTuple):
    """Where a breakpoint is in a chat, and for how many seconds it asks."""

    ttl_s: float
    cut: ChatCut


def check_breakpoints(controls: Iterable[CacheControl | None]) -> str:
    """Return the lifetime of the last breakpoint; 5m where there is none.

    Args:
        controls: of tools, of the system prompt and of messages, in this order; None for no breakpoint.

    Raises:
        InvalidRequestError: there are too many, or one that lives longer comes behind one that does not.
    """
    lifetimes = [control.ttl for control in controls if control is not None]
    if len(lifetimes) > MAX_BREAKPOINTS:
        msg = f"The request has {len(lifetimes)} blocks with cache_control."
        raise InvalidRequestError(msg, param="cache_control", remedy=f"There may be {MAX_BREAKPOINTS}.")
    if "1h" in lifetimes and "5m" in lifetimes[: len(lifetimes) - lifetimes[::-1].index("1h")]:
        msg = "A cache_control with ttl 1h comes behind one with ttl 5m."
        remedy = "Longer ones come first: in tools, then in system, then in messages."
        raise InvalidRequestError(msg, param="cache_control", remedy=remedy)
    return lifetimes[-1] if lifetimes else "5m"
