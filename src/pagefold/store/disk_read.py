"""Reading and checking frames: adjacent ones by one call, several calls at once, some checked while others are read.

Threads only read, and the caller alone checks: a check is a little Python a frame, and several threads would spend more
time on waiting for each other's than on their own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pagefold.kv.transfers import MissCause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.store.disk_segments import FoundFrame, SegmentFiles
    from pagefold.store.frame import FrameFormat
    from pagefold.store.protocol import Get

__all__ = ["FrameReader"]

_NUM_THREADS = 4
"""A disk needs several calls in flight."""


class FrameReader:
    """Reads frames of a format with threads of its own.

    Args:
        frames: their format.
    """

    def __init__(self, frames: FrameFormat) -> None:
        self._frames = frames
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pagefold-disk")

    def read(self, segments: SegmentFiles, places: Sequence[int], gets: Sequence[Get]) -> list[bytes | MissCause]:
        """Bring blocks from places; for each its checksum, or why it is not what was asked for.

        Args:
            segments: where to read.
            places: of the blocks.
            gets: which blocks they should be, and where they go.
        """
        runs = list(segments.runs(places))
        results: list[bytes | MissCause] = []
        parts = [self._threads.submit(_read, segments, places[run], gets[run]) for run in runs[1:]]
        for index, run in enumerate(runs):
            # One of them the caller reads itself: where there is only one, no thread is woken.
            found = parts[index - 1].result() if index else _read(segments, places[run], gets[run])
            results += [self._check(frame, get) for frame, get in zip(found, gets[run], strict=True)]
        return results

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _check(self, frame: FoundFrame | None, get: Get) -> bytes | MissCause:
        if frame is None:
            return MissCause.IO_ERROR
        found = self._frames.check(frame.header, get.into if frame.is_whole else b"", get.name)
        if get.note is not None and not isinstance(found, MissCause):
            get.note.extend(self._frames.note_of(frame.header))
        return found


def _read(segments: SegmentFiles, places: Sequence[int], gets: Sequence[Get]) -> list[FoundFrame | None]:
    """Read a run; None for what the disk does not give."""
    try:
        return [*segments.read(places[0], [get.into for get in gets])]
    except OSError:
        if len(gets) == 1:
            return [None]
        # Find out which of them it is.
        return [_read(segments, [place], [get])[0] for place, get in zip(places, gets, strict=True)]
