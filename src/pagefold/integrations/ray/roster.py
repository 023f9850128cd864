"""Roster: which replicas the router knows.

It follows who takes requests, hears the events of each, and lets go of who has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from pagefold.errors import PagefoldError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pagefold.index import PrefixIndex
    from pagefold.index.order import EventCounts
    from pagefold.integrations.ray.forwarded import ReplicaAddress
    from pagefold.routing import Router

__all__ = ["Hearing", "Roster"]

_log = logging.getLogger(__name__)

_TURN_S = 1.0
"""How long it waits before it looks again for replicas that have not said who they are, or not finished."""


class Hearing(Protocol):
    """What hears a replica's events until it is closed."""

    @property
    def counts(self) -> EventCounts:
        """What has come so far."""

    def close(self) -> None:
        """End it; it may wait."""


class Roster:
    """Replicas by name, on one event loop.

    Args:
        router: is told who takes requests.
        index: is told who has gone.
        ask: asks a replica who it is; raises LookupError if it is not there.
        hear: hears a replica's events from now on.
    """

    def __init__(
        self,
        router: Router,
        index: PrefixIndex,
        ask: Callable[[str], Awaitable[ReplicaAddress]],
        hear: Callable[[ReplicaAddress], Hearing],
    ) -> None:
        self._router = router
        self._index = index
        self._ask = ask
        self._hear = hear
        self._wanted: frozenset[str] = frozenset()
        self._has_changed = asyncio.Event()
        self._heard: dict[str, Hearing] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()

    @property
    def heard(self) -> list[Hearing]:
        """What hears the replicas that are there."""
        return list(self._heard.values())

    def want(self, names: frozenset[str]) -> None:
        """The replicas that take requests are these now."""
        self._wanted = names
        self._has_changed.set()

    async def follow(self) -> None:
        """Do what is to be done whenever that changes; for ever. What goes wrong is tried again."""
        while True:
            is_done = False
            try:
                is_done = await self.turn()
            except Exception:  # noqa: BLE001 - whatever it is, those that are known are served
                _log.exception("replicas are looked at again in %g s", _TURN_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if is_done else _TURN_S):
                    await self._has_changed.wait()
            self._has_changed.clear()

    async def turn(self) -> bool:
        """Meet who has come, and let go of who has gone. Return whether nothing is left to do until that changes."""
        known = set(self._router.open_replicas)
        for name in self._wanted - known:  # first: the only one may go as its successor comes
            await self._meet(name)
        for name in known - self._wanted:
            self._router.drain(name)  # it finishes what it has, and gets nothing more
            self._ending.add(name)
            if name in self._heard:
                self._closing[name] = asyncio.create_task(self._close(name, self._heard.pop(name)))
        for name in [name for name in self._ending if not self._router.num_requests(name)]:
            self._router.remove(name)
            self._ending.discard(name)
        return not self._ending and self._wanted <= set(self._router.open_replicas)

    async def _meet(self, name: str) -> None:
        """Hear a replica's events, and give it requests from now on."""
        if name in self._closing:  # it was here before: what it told then goes first
            await self._closing.pop(name)
        try:
            address = await self._ask(name)
            if address.replica != name:  # it has gone, and another one answered
                return
            self._heard[name] = self._hear(address)
        except (LookupError, PagefoldError) as error:
            _log.warning("%s is not taken yet: %s", name, error)
            return
        self._router.add(name)
        self._ending.discard(name)

    async def _close(self, name: str, hearing: Hearing) -> None:
        await asyncio.to_thread(hearing.close)
        self._index.replica_gone(name)
