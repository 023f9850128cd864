"""Turns: what holds the event loop for milliseconds is done piece by piece, and everybody else comes in between."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]

_NUM_ITERATIONS_BETWEEN = 8
"""As many iterations of the loop as a small request takes from its first byte to its answer, and a few more."""


class Turns:
    """Lets one heavy piece of work at a time onto the event loop, however many wait for it.

    After each piece the loop goes round a few times. So a small request, or a stream's next token, waits for one piece
    and not for all that came before it.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self) -> None:
        """Return when it is the caller's turn: what it does before it waits for anything else is its piece."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._go_round, loop, _NUM_ITERATIONS_BETWEEN)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _go_round(self, loop: asyncio.AbstractEventLoop, num_iterations: int) -> None:
        if num_iterations:
            loop.call_soon(self._go_round, loop, num_iterations - 1)
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # who waited for it may have been cancelled
                turn.set_result(None)
                loop.call_soon(self._go_round, loop, _NUM_ITERATIONS_BETWEEN)
                return
        self._is_taken = False
