"""SegmentFiles: files of places, each as large as a frame. It moves bytes; what is where, others decide.

::

    segment-00000.frames   | place 0 | place 1 | ... | place n-1 |
    segment-00001.frames   | place n | ...                         a frame: header, payload, zeros up to 4,096

A place is on the disk before anything is written to it, so writing a frame never needs room that is not there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.files.private import open_private
from pagefold.store.frame import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pagefold.store.frame import FrameFormat

__all__ = ["FileCalls", "FoundFrame", "SegmentFiles", "place_bytes_of", "places_of_segment", "segment_name"]

_SEGMENT_NAME = re.compile(r"segment-(\d{5,9})\.frames")  # so that every place is a number that the index can hold
_SEGMENT_BYTES = 2**26
_RUN_BYTES = 2**22
"""What one call reads or writes at most: enough for a disk's bandwidth, few enough that several are in flight."""
_HUGE_PAGE_BYTES = 2**21
_MAX_RUN = 256  # a call takes at most 1,024 buffers


def place_bytes_of(frame_bytes: int) -> int:
    """Return the bytes of a place."""
    return -(-frame_bytes // ALIGNMENT) * ALIGNMENT


def places_of_segment(place_bytes: int) -> int:
    """Return how many places a segment has. It follows from their size alone, so that a restart finds them again."""
    return max(1, _SEGMENT_BYTES // place_bytes)


def segment_name(segment: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{segment:05}.frames"


class FileCalls:
    """The calls to the system that segments are made of. Tests make them fail."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file that is no link; one that is made is its owner's alone."""
        return open_private(path, flags | os.O_NOFOLLOW)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into buffers."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write buffers."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Have the disk keep room for bytes of a file."""
        os.posix_fallocate(fd, offset, num_bytes)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Cut a file."""
        os.ftruncate(fd, num_bytes)


class FoundFrame(NamedTuple):
    """What was read of a place.

    Attributes:
        header: as it was read.
        is_whole: whether the file had all bytes of the frame.
    """

    header: bytes
    is_whole: bool


class SegmentFiles:
    """The segments of one layout.

    Growing, cutting and closing are for one thread at a time; reading and writing for any number.

    Args:
        folder: of the layout; exists.
        frames: the format of its frames.
        direct: whether to go past the system's cache.
        calls: to the system.

    Attributes:
        place_bytes: of a place.
        places_per_segment: of every segment but those that may still grow.
    """

    def __init__(self, folder: Path, frames: FrameFormat, *, direct: bool, calls: FileCalls) -> None:
        self._folder = folder
        self._frames = frames
        self._direct = direct
        self._calls = calls
        self.place_bytes = place_bytes_of(frames.frame_bytes)
        self.places_per_segment = places_of_segment(self.place_bytes)
        self.max_run = max(1, min(_MAX_RUN, _RUN_BYTES // self.place_bytes))
        self._sizes: dict[int, int] = {}  # how many places each segment has
        self._fds: dict[int, int] = {}
        self._scratch = _Scratch()
        for file in folder.iterdir():
            if match := _SEGMENT_NAME.fullmatch(file.name):
                self._adopt(int(match[1]), file)

    @property
    def num_places(self) -> int:
        """How many places there are."""
        return sum(self._sizes.values())

    @property
    def num_segments(self) -> int:
        """How many files there are."""
        return len(self._sizes)

    def places(self) -> Iterator[int]:
        """Yield all places, first to last."""
        for segment in sorted(self._sizes):
            first = segment * self.places_per_segment
            yield from range(first, first + self._sizes[segment])

    def has(self, place: int) -> bool:
        """Whether there is such a place."""
        segment, index = divmod(place, self.places_per_segment)
        return index < self._sizes.get(segment, 0)

    def grow(self, num: int) -> range:
        """Add up to ``num`` places, all in one segment, and return them.

        Raises:
            OSError: there are no more than before.
        """
        segment = 0
        while self._sizes.get(segment, 0) == self.places_per_segment:
            segment += 1
        size = self._sizes.get(segment, 0)
        num = min(num, self.places_per_segment - size)
        fd = self._open(segment)
        try:
            self._calls.allocate(fd, size * self.place_bytes, num * self.place_bytes)
        except OSError:
            self._calls.truncate(fd, size * self.place_bytes)
            raise
        self._sizes[segment] = size + num
        first = segment * self.places_per_segment + size
        return range(first, first + num)

    def cut_last(self, num: int) -> int:
        """Take away up to ``num`` places of the last segment; return how many it were.

        Raises:
            OSError: they are still there.
        """
        segment = max(self._sizes)
        num = min(num, self._sizes[segment])
        self._cut(segment, self._sizes[segment] - num)
        return num

    def remove_all(self) -> None:
        """Take away all places.

        Raises:
            OSError: some may still be there.
        """
        for segment in sorted(self._sizes, reverse=True):
            self._cut(segment, 0)

    def last_places(self) -> range:
        """Return the places of the last segment."""
        segment = max(self._sizes)
        first = segment * self.places_per_segment
        return range(first, first + self._sizes[segment])

    def runs(self, places: Sequence[int]) -> Iterator[slice]:
        """Yield the parts of ``places`` that lie one behind the other in a segment: each is one call to the system."""
        begin = 0
        for index in range(1, len(places) + 1):
            if (
                index == len(places)
                or places[index] != places[index - 1] + 1
                or index - begin == self.max_run
                or places[index] % self.places_per_segment == 0
            ):
                yield slice(begin, index)
                begin = index

    def write(self, place: int, headers: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        """Write frames to places one behind the other.

        Raises:
            OSError: any of them may be written, none, or a part of one.
        """
        fd, offset = self._find(place)
        header_bytes, num = self._frames.header_bytes, len(headers)
        buffers: list[memoryview] = []
        if self._direct and not all(self._is_aligned(payload) for payload in payloads):
            whole = self._scratch.take(num * self.place_bytes)
            for index, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
                at = index * self.place_bytes
                whole[at : at + header_bytes] = header
                _copy(payload, whole[at + header_bytes : at + self._frames.frame_bytes])
            buffers.append(whole)
        else:
            heads = self._scratch.take(num * header_bytes)
            pad = memoryview(bytes(self.place_bytes - self._frames.frame_bytes))
            for index, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
                head = heads[index * header_bytes : (index + 1) * header_bytes]
                head[:] = header
                buffers += [head, payload, pad] if pad else [head, payload]
        written = self._calls.pwritev(fd, buffers, offset)
        if written != num * self.place_bytes:
            msg = f"{written} of {num * self.place_bytes} bytes were written"
            raise OSError(msg)

    def read(self, place: int, intos: Sequence[memoryview]) -> list[FoundFrame]:
        """Read the frames of places one behind the other: payloads into ``intos``.

        Raises:
            OSError: nothing of ``intos`` means anything.
        """
        fd, offset = self._find(place)
        header_bytes, frame_bytes, num = self._frames.header_bytes, self._frames.frame_bytes, len(intos)
        if self._direct and not all(self._is_aligned(into) for into in intos):
            whole = self._scratch.take(num * self.place_bytes)
            num_read = self._calls.preadv(fd, [whole], offset)
            headers = []
            for index, into in enumerate(intos):
                frame = whole[index * self.place_bytes :][:frame_bytes]
                headers.append(bytes(frame[:header_bytes]))
                _copy(frame[header_bytes:], into)
        else:
            heads = self._scratch.take(num * header_bytes + ALIGNMENT)
            pad = heads[num * header_bytes :][: self.place_bytes - frame_bytes]
            parts = [heads[index * header_bytes : (index + 1) * header_bytes] for index in range(num)]
            buffers: list[memoryview] = []
            for part, into in zip(parts, intos, strict=True):
                buffers += [part, into, pad] if pad else [part, into]
            num_read = self._calls.preadv(fd, buffers, offset)
            headers = [bytes(part) for part in parts]
        return [
            FoundFrame(header, num_read >= index * self.place_bytes + frame_bytes)
            for index, header in enumerate(headers)
        ]

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    # Inside.

    def _is_aligned(self, payload: memoryview) -> bool:
        address = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
        return payload.nbytes % ALIGNMENT == 0 and address % ALIGNMENT == 0

    def _adopt(self, segment: int, file: Path) -> None:
        """Take over a file that is there. What is not a whole place was left by a crash while the file grew."""
        num_bytes = file.stat().st_size
        size = min(num_bytes // self.place_bytes, self.places_per_segment)
        if not size:
            file.unlink()
            return
        if num_bytes != size * self.place_bytes:
            os.truncate(file, size * self.place_bytes)
        self._sizes[segment] = size

    def _find(self, place: int) -> tuple[int, int]:
        segment, index = divmod(place, self.places_per_segment)
        return self._fds.get(segment) or self._open(segment), index * self.place_bytes

    def _file(self, segment: int) -> Path:
        return self._folder / segment_name(segment)

    def _open(self, segment: int) -> int:
        fd = self._fds.get(segment)
        if fd is None:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
            fd = self._calls.open(self._file(segment), flags | (0 if segment in self._sizes else os.O_CREAT))
            other = self._fds.setdefault(segment, fd)
            if other != fd:  # another thread was sooner
                os.close(fd)
                return other
        return fd

    def _cut(self, segment: int, size: int) -> None:
        if size:
            self._calls.truncate(self._open(segment), size * self.place_bytes)
            self._sizes[segment] = size
            return
        self._file(segment).unlink(missing_ok=True)
        del self._sizes[segment]
        fd = self._fds.pop(segment, None)
        if fd is not None:
            os.close(fd)


def _copy(src: memoryview, dst: memoryview) -> None:
    """Copy bytes. NumPy lets other threads go on meanwhile."""
    np.copyto(np.frombuffer(dst, np.uint8), np.frombuffer(src, np.uint8))


class _Scratch(threading.local):
    """Aligned memory, one for each thread: what is not aligned goes through it, and so do headers."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ALIGNMENT)

    def take(self, num_bytes: int) -> memoryview:
        """Return so many bytes, aligned. What was taken before means nothing any more."""
        if len(self._memory) < num_bytes:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if (
                num_bytes >= _HUGE_PAGE_BYTES
            ):  # fewer pieces for the device: direct I/O into huge pages is twice as fast
                with contextlib.suppress(OSError):
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._memory)[:num_bytes]
