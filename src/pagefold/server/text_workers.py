"""TextWorkers: the threads on which texts become tokens, and tokens texts, while the event loop goes on."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from pagefold.memory.native import give_back_memory
from pagefold.server.disconnect import while_connected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Receive

__all__ = ["TextWorkers"]

_Done = TypeVar("_Done")

_NUM_THREADS = 2
"""Tokenizing takes up to 320 bytes and 3 us a character: so many texts at once, and no more."""

_LONG = 4_000
"""Characters or tokens. More of them are worked on aside, so that streams do not stall; these take milliseconds."""


_HUGE = 100_000
"""After so many, memory is given back: else the C library would keep the most that was ever needed."""


class TextWorkers:
    """A few threads for all requests. Pieces of work are taken in the order in which they come."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "pagefold-text")  # they start when they are needed

    async def run(self, size: int, pieces: Sequence[Callable[[], _Done]], receive: Receive) -> list[_Done]:
        """Return what each piece of work returns: done here if it is little, else aside, one after another.

        Others' pieces come between. When the client goes away, no piece begins any more; the one under way ends by
        itself, so callers bound each.

        Args:
            size: characters or tokens of all pieces.
            pieces: what is to be done.
            receive: of the client who waits for it.

        Raises:
            ClientGoneError: the client went away.
        """
        if size < _LONG:
            return [work() for work in pieces]
        try:
            return await while_connected(receive, self._aside(pieces))
        finally:
            if size >= _HUGE:
                self._threads.submit(give_back_memory)

    async def _aside(self, pieces: Sequence[Callable[[], _Done]]) -> list[_Done]:
        # Who is cancelled while a piece waits for a thread takes it back: wrap_future cancels it.
        return [await asyncio.wrap_future(self._threads.submit(work)) for work in pieces]
