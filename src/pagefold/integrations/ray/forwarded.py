"""What crosses between the ingress and a replica: a request, the head of its answer, and who a replica is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import PagefoldError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Forwarded", "Head", "ReplicaAddress", "ReplicaLostError", "passed_on"]


_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length", "date"}
)
"""Headers that speak of one connection, or that whoever sends the next one writes himself."""


def passed_on(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the headers that are passed on, their names in lower case."""
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in _HOP_HEADERS)


class ReplicaLostError(PagefoldError):
    """A replica has gone before its answer was complete."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A client's HTTP request, to be sent on as it came.

    Attributes:
        method: of HTTP.
        target: its path and query.
        headers: names in lower case, each byte a character; those that speak of the connection are left out.
        body: all of it.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""

    @property
    def path(self) -> str:
        """The path alone."""
        return self.target.partition("?")[0]


class Head(NamedTuple):
    """How an answer begins.

    Attributes:
        replica: who answers.
        status: of HTTP.
        headers: as of :class:`Forwarded`.
    """

    replica: str
    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def is_stream(self) -> bool:
        """Whether events follow, one after another, as they come."""
        return any(name == "content-type" and value.startswith("text/event-stream") for name, value in self.headers)


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """What the router must know of a replica.

    Attributes:
        replica: its name.
        events: where its KV events are; empty if it sends none.
        replay: where it is asked for those that were missed.
        block_size: tokens a block.
        cache_tokens: tokens that its cache holds.
    """

    replica: str
    events: str
    replay: str
    block_size: int
    cache_tokens: int
