"""Reading and checking frames: adjacent ones by one call, several calls at once, one checked while others are read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pagefold.store.frame import MissCause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.store.disk_segments import SegmentFiles
    from pagefold.store.frame import FrameFormat
    from pagefold.store.protocol import Get

__all__ = ["FrameReader"]

_NUM_THREADS = 4
"""A disk needs several calls in flight, and a core that checks what others have read."""


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
        if len(runs) == 1:
            return self._read_run(segments, places, gets)
        parts = [self._threads.submit(self._read_run, segments, places[run], gets[run]) for run in runs]
        return [result for part in parts for result in part.result()]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _read_run(self, segments: SegmentFiles, places: Sequence[int], gets: Sequence[Get]) -> list[bytes | MissCause]:
        try:
            found = segments.read(places[0], [get.into for get in gets])
        except OSError:
            if len(gets) == 1:
                return [MissCause.IO_ERROR]
            # Find out which of them it is.
            return [self._read_run(segments, [place], [get])[0] for place, get in zip(places, gets, strict=True)]
        return [
            self._frames.check(frame.header, get.into if frame.is_whole else b"", get.name)
            for frame, get in zip(found, gets, strict=True)
        ]
