"""What a disk can do, and whether a flipped bit on it is found: tried in a file of its own, beside all kept blocks."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.files.private import make_private_folder
from pagefold.kv.transfers import MissCause
from pagefold.store.disk_segments import FileCalls, SegmentFiles
from pagefold.store.frame import ALIGNMENT, BlockName, checksum_of
from pagefold.store.protocol import Get

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.store.disk_read import FrameReader
    from pagefold.store.frame import FrameFormat

__all__ = ["DiskTrial", "try_disk"]

_NUM_SINGLE = 3


class DiskTrial(NamedTuple):
    """What was found of a disk.

    Attributes:
        failure: what does not work; empty if all does.
        read_s: to bring one block, checked.
        read_bytes_per_s, write_bytes_per_s: of many blocks at once; 0 where it does not work.
    """

    failure: str
    read_s: float = 0.0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0

    def latency_s(self, block_bytes: int) -> float:
        """Return what one block takes beside its bytes."""
        return max(0.0, self.read_s - block_bytes / self.read_bytes_per_s) if self.read_bytes_per_s else 0.0


def try_disk(folder: Path, num_bytes: int, frames: FrameFormat, reader: FrameReader, *, direct: bool) -> DiskTrial:
    """Write frames, read them, flip a bit of one, and measure.

    Args:
        folder: made, and removed at the end.
        num_bytes: to write.
        frames: the format.
        reader: of such frames.
        direct: whether to go past the system's cache.
    """
    try:
        make_private_folder(folder)
        segments = SegmentFiles(folder, frames, direct=direct, calls=FileCalls())
        try:
            return _try(folder, segments, max(1, num_bytes // segments.place_bytes), frames, reader)
        finally:
            segments.close()
    except OSError as error:
        return DiskTrial(error.strerror or str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _try(folder: Path, segments: SegmentFiles, num: int, frames: FrameFormat, reader: FrameReader) -> DiskTrial:
    places = list(segments.grow(num))  # all in one file
    size = -(-frames.block_bytes // ALIGNMENT) * ALIGNMENT
    blocks = np.frombuffer(os.urandom(len(places) * size), np.uint8).reshape(len(places), size)
    payloads = [block[: frames.block_bytes].data for block in blocks]
    names = [_name(index, frames) for index in places]
    headers = [frames.header(name, checksum_of(payload)) for name, payload in zip(names, payloads, strict=True)]
    begin = time.perf_counter()
    for run in segments.runs(places):
        segments.write(places[run.start], headers[run], payloads[run])
    write_s = time.perf_counter() - begin
    _leave_cache(folder)

    memory = np.empty(len(places) * size + ALIGNMENT, np.uint8)
    begin_at = -memory.ctypes.data % ALIGNMENT
    back = memory[begin_at : begin_at + len(places) * size].reshape(len(places), size)
    back[:] = 0  # take the memory from the system before the clock runs
    gets = [Get(name, block[: frames.block_bytes].data) for name, block in zip(names, back, strict=True)]
    begin = time.perf_counter()
    results = reader.read(segments, places, gets)
    read_s = time.perf_counter() - begin
    if any(isinstance(result, MissCause) for result in results) or not all(
        np.array_equal(get.into, payload) for get, payload in zip(gets, payloads, strict=True)
    ):
        return DiskTrial("what was read is not what was written")
    single_s = []
    for index in range(min(_NUM_SINGLE, len(places))):
        _leave_cache(folder)
        begin = time.perf_counter()
        reader.read(segments, places[index : index + 1], gets[index : index + 1])
        single_s.append(time.perf_counter() - begin)
    _flip_a_bit(folder, frames.header_bytes + frames.block_bytes // 2)
    _leave_cache(folder)
    if reader.read(segments, places[:1], gets[:1]) != [MissCause.DAMAGED]:
        return DiskTrial("a flipped bit was not found")
    num_bytes = len(places) * frames.block_bytes
    return DiskTrial("", statistics.median(single_s), num_bytes / read_s, num_bytes / write_s)


def _name(index: int, frames: FrameFormat) -> BlockName:
    digest = hashlib.sha256(index.to_bytes(8, "little")).digest()
    return BlockName(digest, bytes(32), bytes(32), bytes(frames.key_bytes))


def _flip_a_bit(folder: Path, offset: int) -> None:
    (file,) = folder.iterdir()
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes((byte ^ 1,)))


def _leave_cache(folder: Path) -> None:
    """Have the next read come from the disk, also where the system's cache is used."""
    (file,) = folder.iterdir()
    with file.open("rb") as opened:
        os.fdatasync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
