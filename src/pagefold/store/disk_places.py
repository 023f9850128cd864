"""Places: which places of this layout are free, and how there come to be more, within the budget."""

from __future__ import annotations

import errno
import shutil
from bisect import insort
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from pagefold.store.disk_budget import Budget
    from pagefold.store.disk_index import DiskIndex, LayoutRow
    from pagefold.store.disk_segments import SegmentFiles

__all__ = ["OtherLayout", "Places"]


class OtherLayout(NamedTuple):
    """Frames of another model or layout: kept as long as nobody needs their room."""

    row: LayoutRow
    folder: Path
    segments: SegmentFiles


class Places:
    """The places of a layout's segments.

    Not for several threads at once.

    Args:
        segments: of the layout.
        others: of other layouts, used longest ago first.
        index: of the folder.
        budget: of the folder.

    Attributes:
        num_allowed: how many there can be at most, once no other layout has any.
    """

    def __init__(self, segments: SegmentFiles, others: list[OtherLayout], index: DiskIndex, budget: Budget) -> None:
        self._segments = segments
        self._others = others
        self._index = index
        self._budget = budget
        self._free: list[int] = []  # sorted
        self.num_allowed = budget.most_places(segments)

    @property
    def num_free(self) -> int:
        """How many hold nothing."""
        return len(self._free)

    def begin(self, taken: Collection[int]) -> None:
        """Say which places are taken; all others are free."""
        self._free = [place for place in self._segments.places() if place not in taken]

    def excess(self) -> range:
        """Return the places, the last ones, that are beyond the budget: it may have become smaller.

        Before anything of this layout, others go.
        """
        while self._room() < 0 and self._drop_other():
            pass
        room = self._room()
        if room >= 0 or not self._segments.num_places:
            self._allow()
            return range(0)
        per_place = self._budget.index_bytes([self._segments]) // self._segments.num_places + self._segments.place_bytes
        return self._segments.last_places()[room // per_place :]

    def cut(self, places: range) -> None:
        """Take away what :meth:`excess` returned, and what the index names no more."""
        self._free = [place for place in self._free if place not in places]
        self._segments.cut_last(len(places))
        self._allow()

    def take(self, num: int) -> list[int]:
        """Take up to ``num`` places: free neighbours if there are so many, else new ones; then any that are free.

        Fewer are returned where only frames that are kept could make room.

        Raises:
            StoreError, OSError: none is taken.
        """
        places = self._take_neighbours(num)
        while len(places) < num:
            try:
                grown = self._grow(num - len(places))
            except BaseException:
                self.give_back(places)
                raise
            if not grown:
                break
            places += grown
        return sorted(places + self._take_any(num - len(places)))

    def give_back(self, places: Iterable[int]) -> None:
        """Say that places hold nothing."""
        for place in places:
            insort(self._free, place)

    def give_all_back(self) -> None:
        """Say that no place holds anything, and give all their bytes back to the disk.

        Raises:
            OSError: some may still be there.
        """
        try:
            self._segments.remove_all()
        finally:
            self._free = list(self._segments.places())

    def close(self) -> None:
        """Close all files."""
        self._segments.close()
        for other in self._others:
            other.segments.close()

    # Inside.

    def _all_segments(self) -> list[SegmentFiles]:
        return [self._segments, *(other.segments for other in self._others)]

    def _room(self) -> int:
        return self._budget.room(self._all_segments(), self._index.num_bytes)

    def _allow(self) -> None:
        """Bound the index by what there is now."""
        num_bytes = self._budget.index_bytes(self._all_segments())
        if self._index.num_bytes > num_bytes:
            self._index.shrink()
        self._index.allow(num_bytes)

    def _take_neighbours(self, num: int) -> list[int]:
        begin = 0
        for index in range(1, len(self._free) + 1):
            if index - begin == num:
                places = self._free[begin:index]
                del self._free[begin:index]
                return places
            if index < len(self._free) and self._free[index] != self._free[index - 1] + 1:
                begin = index
        return []

    def _take_any(self, num: int) -> list[int]:
        places = self._free[:num]
        del self._free[:num]
        return places

    def _grow(self, num: int) -> list[int]:
        place_bytes = self._segments.place_bytes
        while not (fits := self._budget.places(self._room(), place_bytes)) and self._drop_other():
            pass
        if not fits:
            return []
        try:
            grown = self._segments.grow(min(num, fits))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return []  # somebody else filled the disk: what is here already can be used again
            raise
        self._index.allow(self._budget.index_bytes(self._all_segments()))
        return list(grown)

    def _drop_other(self) -> bool:
        """Drop the last segment of the layout that was used longest ago. Return False if there is none."""
        if not self._others:
            return False
        row, folder, segments = self._others[0]
        if segments.num_segments:
            last = segments.last_places()
            self._index.delete_range(row.layout_id, last.start, last.stop)
            segments.cut_last(len(last))
        if not segments.num_segments:
            self._index.remove_layout(row.layout_id)
            segments.close()
            shutil.rmtree(folder, ignore_errors=True)
            del self._others[0]
        self._allow()
        return True
