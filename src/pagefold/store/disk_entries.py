"""Entries: which frames can be found, in which places, in the order in which they were used."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pagefold.store.disk_index import FrameRow

__all__ = ["Entries", "Entry"]

_NOWHERE = -1


class Entry:
    """A frame that can be found.

    Attributes:
        digest: of its block.
        place: where it is.
        num_reads: how many read it now: its place is not given to another.
        is_gone: whether it was forgotten meanwhile.
    """

    __slots__ = ("digest", "is_gone", "num_reads", "place")

    def __init__(self, digest: bytes, place: int) -> None:
        self.digest = digest
        self.place = place
        self.num_reads = 0
        self.is_gone = False


class Entries:
    """The entries of a layout, as the index has them.

    Not for several threads at once.
    """

    def __init__(self) -> None:
        self._all: dict[bytes, Entry] = {}
        self._order: OrderedDict[bytes, Entry] = OrderedDict()  # those that nobody reads; used longest ago first
        self._touched: dict[int, int] = {}
        self._last_used = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._all

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._all.values())

    @property
    def num_touched(self) -> int:
        """How many uses :meth:`take_touched` would return."""
        return len(self._touched)

    def find(self, digests: Iterable[bytes]) -> list[Entry]:
        """Return the entries of those that there are."""
        return [self._all[digest] for digest in dict.fromkeys(digests) if digest in self._all]

    def oldest(self, num: int) -> list[Entry]:
        """Return up to ``num`` entries that nobody reads, used longest ago first."""
        return [entry for entry, _ in zip(self._order.values(), range(num), strict=False)]

    def times(self, num: int) -> range:
        """Return ``num`` times of use, one after another, that no entry has: about now, in nanoseconds since 1970."""
        first = max(self._last_used + 1, time.time_ns())
        self._last_used = first + num - 1
        return range(first, first + num)

    def add(self, row: FrameRow) -> None:
        """Add a frame that the index has, used later than all others."""
        self._all[row.digest] = self._order[row.digest] = Entry(row.digest, row.place)
        self._last_used = max(self._last_used, row.used)

    def touch(self, entry: Entry) -> None:
        """Say that an entry is used now."""
        self._touched[entry.place] = self.times(1)[0]
        if not entry.num_reads:
            self._order.move_to_end(entry.digest)

    def begin_read(self, digests: Iterable[bytes]) -> list[Entry]:
        """Keep entries where they are, up to the first that is not there, and return them."""
        entries: list[Entry] = []
        for digest in digests:
            entry = self._all.get(digest)
            if entry is None:
                break
            entry.num_reads += 1
            self._order.pop(digest, None)
            entries.append(entry)
        return entries

    def end_read(self, entries: Sequence[Entry]) -> list[int]:
        """Let go of entries, and return the places of those that were forgotten meanwhile.

        The first becomes the one used last: tails leave before heads.
        """
        free: list[int] = []
        for entry in reversed(entries):
            entry.num_reads -= 1
            if not entry.is_gone:
                if not entry.num_reads:
                    self._order[entry.digest] = entry
                self.touch(entry)
            elif not entry.num_reads and entry.place != _NOWHERE:
                free.append(entry.place)
        return free

    def forget(self, entries: Iterable[Entry]) -> list[int]:
        """Forget entries that the index has no more, and return the places that nobody reads."""
        free: list[int] = []
        for entry in entries:
            self._remove(entry)
            if not entry.num_reads:
                free.append(entry.place)
        return free

    def abandon(self, entries: Iterable[Entry]) -> None:
        """Forget entries that the index still has: their places stay taken."""
        for entry in entries:
            self._remove(entry)
            entry.place = _NOWHERE

    def take_touched(self) -> list[tuple[int, int]]:
        """Return when which places were used since the last call."""
        touched, self._touched = self._touched, {}
        return list(touched.items())

    def _remove(self, entry: Entry) -> None:
        entry.is_gone = True
        del self._all[entry.digest]
        self._order.pop(entry.digest, None)
        self._touched.pop(entry.place, None)
