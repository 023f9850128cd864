"""Budget: how a folder's limit is shared out, so that all of its files together never exceed it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.store.disk_folder import folder_bytes, foreign_bytes
from pagefold.store.disk_index import INDEX_BASE_BYTES, INDEX_FRAME_BYTES, INDEX_LOG_BYTES
from pagefold.store.disk_segments import place_bytes_of

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.store.disk_segments import SegmentFiles
    from pagefold.store.frame import FrameFormat

__all__ = ["Budget", "checked_budget"]

_FOLDER_BYTES = 2**18
"""Bytes of the lock, the folders themselves, and a probe."""
_SEGMENT_BYTES = 2**16
"""Bytes of a segment beside its places: what file systems keep of where they are."""
_SELF_TEST_BYTES = 2**23
_MIN_PLACES = 8


class Budget(NamedTuple):
    """What of the limit is for places and their rows of the index.

    Attributes:
        num_bytes: of segments and of the index.
        self_test_bytes: of the file that a self-test may write.
    """

    num_bytes: int
    self_test_bytes: int

    def room(self, segments: list[SegmentFiles], index_bytes: int) -> int:
        """Return the bytes that may still be taken; negative if less is allowed than there is.

        Args:
            segments: all that there are.
            index_bytes: of the index as it is.
        """
        taken = sum(one.num_places * one.place_bytes + one.num_segments * _SEGMENT_BYTES for one in segments)
        return self.num_bytes - taken - max(index_bytes, self.index_bytes(segments))

    def places(self, room: int, place_bytes: int) -> int:
        """Return how many places more fit into ``room``, be it in a new segment."""
        return max(0, room - _SEGMENT_BYTES) // (place_bytes + INDEX_FRAME_BYTES)

    def most_places(self, segments: SegmentFiles) -> int:
        """Return how many places there can be at most, of one layout alone."""
        per_segment = segments.places_per_segment * (segments.place_bytes + INDEX_FRAME_BYTES) + _SEGMENT_BYTES
        full, rest = divmod(self.num_bytes - INDEX_BASE_BYTES, per_segment)
        return full * segments.places_per_segment + self.places(rest, segments.place_bytes)

    @staticmethod
    def index_bytes(segments: list[SegmentFiles]) -> int:
        """Return how large the index may become: a row for each place that there is."""
        return INDEX_BASE_BYTES + INDEX_FRAME_BYTES * sum(one.num_places for one in segments)


def checked_budget(folder: Path, limit_bytes: int, frames: FrameFormat) -> Budget:
    """Return what there is for places. What is not ours in the folder counts too.

    Raises:
        ConfigError: the limit is too small for anything, or larger than what the disk has.
    """
    place_bytes = place_bytes_of(frames.frame_bytes)
    fixed = INDEX_LOG_BYTES + _FOLDER_BYTES + foreign_bytes(folder)
    self_test = max(place_bytes, min(_SELF_TEST_BYTES, (limit_bytes - fixed) // 64 // place_bytes * place_bytes))
    least = fixed + place_bytes + INDEX_BASE_BYTES + _SEGMENT_BYTES + _MIN_PLACES * (place_bytes + INDEX_FRAME_BYTES)
    if limit_bytes < least:
        msg = f"A cache folder of {limit_bytes:,} bytes is too small for blocks of {frames.block_bytes:,}."
        raise ConfigError(msg, remedy=f"Give it at least {least:,} bytes.")
    missing = limit_bytes - folder_bytes(folder) - shutil.disk_usage(folder).free
    if missing > 0:
        msg = f"The disk of {folder} has {missing:,} bytes less than the {limit_bytes:,} that the cache is to hold."
        raise ConfigError(msg, remedy=f"Give it at most {limit_bytes - missing:,} bytes.")
    return Budget(limit_bytes - fixed - self_test, self_test)
