"""Clients that go away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Message, Receive

__all__ = ["CLIENT_CLOSED_REQUEST", "ClientGoneError", "stays", "while_connected"]

CLIENT_CLOSED_REQUEST = 499
"""nginx's number; nobody gets to read it but the access log."""

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Await ``work``; if the client goes away first, cancel it and wait until it has ended.

    The request's body must have been read: what ``receive`` has left is that the client went away.

    Raises:
        ClientGoneError: the client went away.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def stays() -> Message:
    """Be the ``receive`` of a client who never goes away: of the server itself."""
    await asyncio.Event().wait()
    raise AssertionError  # nobody sets it


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
