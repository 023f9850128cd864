"""EventOrder: one replica's batches, brought into their order before the index is told.

A publisher numbers its batches from 0. From the numbers follows what was lost, what came twice, and that another
publisher has taken its place, which begins at 0 again. What was lost is asked for; the last batch that came is asked
for with it, and if that is not what it was, it is another publisher's. (Where the first that comes of another one has
the very number that was next, only the connection tells: see :meth:`EventOrder.disconnect`.)

What cannot be had any more is a loss: the replica is forgotten, and what it tells from then on is true, but not all.
It is known again when it tells that it holds nothing. (Pagefold's publisher does that, and tells of all its blocks
anew, when somebody asks for what it has no more.)
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import PagefoldError
from pagefold.index.wire import decode_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagefold.index.prefix_index import PrefixIndex

__all__ = ["EventCounts", "EventOrder", "Numbered"]

_log = logging.getLogger(__name__)

_MOST_REPLAYED = 10_000
"""So many batches that were replayed are remembered until they come by themselves: as many as publishers keep."""


class Numbered(NamedTuple):
    """A batch, as it is sent.

    Attributes:
        number: its place in the publisher's order, from 0.
        payload: of an :class:`~pagefold.index.wire.EventBatch`.
    """

    number: int
    payload: bytes


class EventCounts(NamedTuple):
    """What has come of one replica since the subscriber began.

    Attributes:
        num_applied: batches that the index was told.
        num_repeated: batches that had come before.
        num_replayed: batches that were asked for, and came.
        num_bad: messages and payloads that were none of what a publisher sends.
        num_gaps: times that batches were missing.
        num_lost: times that they could not be had, and the replica was forgotten.
        num_restarts: times that another publisher had taken the place of the one before.
    """

    num_applied: int = 0
    num_repeated: int = 0
    num_replayed: int = 0
    num_bad: int = 0
    num_gaps: int = 0
    num_lost: int = 0
    num_restarts: int = 0


class EventOrder:
    """Tells the index of one replica, batch by batch. One thread calls it.

    Args:
        index: what is told.
        replica: its name there. It is not known until its first batch has come, or one that says that it holds nothing.
        ask: returns the batches from a number on that the publisher still has, in order; None if nobody answers.

    Attributes:
        counts: what has come.
    """

    def __init__(self, index: PrefixIndex, replica: str, ask: Callable[[int], Iterable[Numbered] | None]) -> None:
        self._index = index
        self._replica = replica
        self._ask = ask
        self._next = 0  # the number of the batch that is to be applied next
        self._heard = -1  # of the last one that was published, not replayed
        self._last = b""  # digest of the batch before the next
        self._replayed: dict[int, bytes] = {}  # digests of batches that were replayed and may still come, by number
        self._is_doubted = False
        self.counts = EventCounts()
        index.forget(replica)

    def take(self, batch: Numbered) -> None:
        """Take a batch that was published."""
        is_another = batch.number < self._next and self._replayed.get(batch.number) != _digest(batch.payload)
        if batch.number <= self._heard or is_another:  # a publisher sends none twice, nor another than it replayed
            self._restart()
        self._heard = batch.number
        is_behind = batch.number > self._next
        if is_behind:
            self._count(num_gaps=1)
        if is_behind or self._is_doubted:
            self._catch_up()
            self._heard = batch.number
        if self._is_doubted or batch.number > self._next:
            self._lose()
        elif batch.number < self._next:  # it was replayed
            self._count(num_repeated=1)
            self._replayed.pop(batch.number, None)
            return
        self._replayed.clear()  # those come no more: a publisher's batches come in their order
        self._apply(batch)

    def check(self) -> None:
        """Nothing has come for a while: see whether the publisher is still there and still the same, and catch up.

        One that does not answer is doubted: what it holds stays noted, and is not known.
        """
        if not self._catch_up():
            self.disconnect()

    def disconnect(self) -> None:
        """The connection is gone: what comes next may be another publisher's."""
        self._is_doubted = True
        self._index.doubt(self._replica)

    def note_bad(self) -> None:
        """A message has come that no publisher sends."""
        self._count(num_bad=1)

    # Inside.

    def _catch_up(self) -> bool:
        """Ask for what is missing, and see that it goes on from what came last. Return whether anybody answered."""
        first = max(0, self._next - 1)
        answer = self._ask(first)
        if answer is None:
            return False
        batches = list(answer)
        if self._next:
            begins = batches[0].number if batches else 0
            if begins == first and batches and _digest(batches[0].payload) == self._last:
                del batches[0]
            elif begins <= first:  # it has not sent so many, or it has sent others
                self._restart()
                batches = list(self._ask(0) or ())
            else:  # nothing tells whether it is the one that it was
                self._lose()
        self._believe()
        for batch in batches:
            if batch.number > self._next:
                self._lose()
            if batch.number >= self._next:
                self._count(num_replayed=1)
                self._apply(batch)
                self._replayed[batch.number] = self._last
                if len(self._replayed) > _MOST_REPLAYED:  # whose batch comes all the same is asked for all it has
                    del self._replayed[next(iter(self._replayed))]
        return True

    def _believe(self) -> None:
        """The publisher is the one that it was, or another one from its beginning on."""
        self._is_doubted = False
        self._index.trust(self._replica)

    def _apply(self, batch: Numbered) -> None:
        """Tell the index of the next batch, or of a later one if those between are lost."""
        if not batch.number:
            self._index.begin(self._replica)
        self._believe()
        self._next = batch.number + 1
        self._last = _digest(batch.payload)
        try:
            self._index.apply(self._replica, decode_batch(batch.payload))
        except PagefoldError as error:
            level = logging.DEBUG if self.counts.num_bad else logging.WARNING  # a flood of them is counted
            _log.log(level, "batch %d of %s is left out: %s", batch.number, self._replica, error)
            self._count(num_bad=1)
            self._lose()
        else:
            self._count(num_applied=1)

    def _lose(self) -> None:
        """What was missing cannot be had."""
        self._count(num_lost=1)
        self._index.forget(self._replica)

    def _restart(self) -> None:
        """Another publisher has taken the place of the one before."""
        self._count(num_restarts=1)
        self._next, self._last, self._heard = 0, b"", -1
        self._replayed = {}
        self._index.forget(self._replica)

    def _count(self, **more: int) -> None:
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + num for name, num in more.items()})


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
