"""TokenStream: what comes out of the engine for one request, on its way into an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from pagefold.engine.outputs import OutputDelta

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Taken", "TokenStream"]


class Taken:
    """The engine has taken a request: it stands in the queue."""


class TokenStream:
    """What each step adds to one request: an async iterator that ends behind the delta that ``is_last``.

    A reader that is slower than the engine gets what has come meanwhile as one delta, and so catches up. Deltas with
    logprobs come one by one.

    Args:
        loop: where it is read.
        num_samples: of the request.
        abort: called when its reader stops before the end.
        payer: the tenant that is charged for its tokens; None for nobody.
        is_taken: whether the engine has taken the request, or will not judge it.

    Attributes:
        is_taken: whether the engine has taken it, as far as its reader knows.
        on_end: called on the engine's thread when the request ends, and before the engine aborts it.

    Raises:
        InvalidRequestError, EngineStoppedError, LoadShedError: the engine refused the request, or failed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        num_samples: int,
        abort: Callable[[TokenStream], None],
        payer: str | None = None,
        *,
        is_taken: bool = True,
    ) -> None:
        self.loop = loop
        self.payer = payer
        self.num_samples = num_samples
        self.deltas: asyncio.Queue[OutputDelta | Taken | Exception] = asyncio.Queue()
        self.is_taken = is_taken
        self._held: deque[list[OutputDelta] | Exception] = deque()  # taken from the queue; a list is told as one
        self._growing: dict[int, list[OutputDelta]] = {}  # the lists of ``_held`` that may grow, by sample
        self.on_end: Callable[[], None] = _nothing
        self._abort = abort
        self._has_ended = False

    def __aiter__(self) -> TokenStream:
        """Return itself: there is one reader."""
        return self

    async def __anext__(self) -> OutputDelta:
        """Return the next delta."""
        if self._has_ended:
            raise StopAsyncIteration
        while not self._held:
            self._hold(await self.deltas.get())
        while not self.deltas.empty():
            self._hold(self.deltas.get_nowait())
        first = self._held.popleft()
        if isinstance(first, Exception):
            self._has_ended = True
            raise first
        if self._growing.get(first[0].index) is first:
            del self._growing[first[0].index]
        delta = OutputDelta.merged(first)
        self._has_ended = delta.is_last
        return delta

    async def taken(self) -> None:
        """Return when the engine has taken the request, so that a response may begin; before it is iterated over.

        Raises:
            InvalidRequestError, EngineStoppedError, LoadShedError: it was not taken.
        """
        while not self.is_taken:
            arrived = await self.deltas.get()
            if isinstance(arrived, Exception):
                self._has_ended = True
                raise arrived
            self._hold(arrived)

    def _hold(self, arrived: OutputDelta | Taken | Exception) -> None:
        """Put what has arrived to what waits of its sample, or else behind all: each sample's deltas stay in order."""
        self.is_taken = True
        if isinstance(arrived, Taken):
            return
        if isinstance(arrived, Exception):
            self._held.append(arrived)
        elif arrived.can_merge and arrived.index in self._growing:
            self._growing[arrived.index].append(arrived)
        else:
            self._held.append(alone := [arrived])
            self._growing.pop(arrived.index, None)
            if arrived.can_merge:
                self._growing[arrived.index] = alone

    def close(self) -> None:
        """Stop reading: a request that has not ended ends now, and gives its blocks back. Again does nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._abort(self)


def _nothing() -> None:
    """What is due at the end of a request that was never queued."""
