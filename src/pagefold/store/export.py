"""All frames of a cache folder in one file, and back: for another machine.

The file is a header of 4,096 bytes (``export_head.py``) and then the frames, one behind the other, without padding.
Frames say themselves what they are (``frame.py``), so those of several layouts can follow each other; of each layout
those that were used longest ago come first, so that what does not fit elsewhere is what matters least.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.files.private import create_private
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.cache_folder import check_frame, layout_sizes, look, read_frames
from pagefold.store.disk import DiskStore
from pagefold.store.disk_folder import is_cache_folder
from pagefold.store.export_head import EXPORT_HEADER_BYTES, export_head, read_export_head
from pagefold.store.frame import FrameFormat, checksum_of, sizes_of
from pagefold.store.protocol import Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from pagefold.store.frame import BlockName

__all__ = ["Imported", "export_frames", "import_frames", "import_limit"]

_REMEDY = "Name a file that pagefold cache export wrote."
_SIZES_BYTES = 4096  # of a frame, in which its sizes are
_MOST_FRAME_BYTES = 2**29  # far beyond blocks of any model; frames are read whole
_BATCH_BYTES = 2**26
_BATCH = 8  # frames, which the smallest folder holds: of more at once it would keep the first, not the last


class Imported(NamedTuple):
    """What came of an import.

    Attributes:
        num_frames: of the file.
        num_kept: blocks that are in the folder now.
        wrong: how many frames were left out, by what is wrong with them.
    """

    num_frames: int
    num_kept: int
    wrong: dict[MissCause, int]


def export_frames(folder: Path, file: Path, progress: Callable[[int, int], None]) -> tuple[int, int]:
    """Write all right frames of a cache folder to ``file``; return how many, and how many were wrong and left out.

    The file is there whole or not at all, and is its owner's alone. A server may be using the folder.

    Args:
        folder: a cache folder.
        file: replaced if it is there.
        progress: is told how many frames of how many were read.

    Raises:
        ConfigError: it is no cache folder, or the file cannot be written.
    """
    total = sum(layout.num_blocks for layout in look(folder).layouts)
    part = file.parent / f"{file.name}.{os.getpid()}"
    num_frames = num_wrong = 0
    try:
        try:
            with create_private(part) as out:
                out.write(bytes(EXPORT_HEADER_BYTES))
                progress(0, total)
                for frame in read_frames(folder):
                    if frame.cause is None:
                        out.write(frame.header)
                        out.write(frame.payload)
                        num_frames += 1
                    else:
                        num_wrong += 1
                    progress(num_frames + num_wrong, total)
                head = export_head(num_frames, out.tell())
                out.seek(0)
                out.write(head)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        msg = f"Cannot write {file}: {error.strerror}."
        raise ConfigError(msg, remedy="Name a file in a folder that can be written, on a disk with room.") from None
    return num_frames, num_wrong


def import_frames(file: Path, folder: Path, limit_bytes: int | None, progress: Callable[[int, int], None]) -> Imported:
    """Put the frames of an exported file into a cache folder, each checked. What does not fit makes room as always.

    Args:
        file: an exported one.
        folder: a cache folder that nobody uses, or one that is to become one.
        limit_bytes: what the folder may take; None for the limit that it has.
        progress: is told how many frames of how many were read.

    Raises:
        ConfigError: the file is none or is not whole, or the folder cannot be used. Nothing was imported.
    """
    limit_bytes = import_limit(folder, limit_bytes)
    if file.exists() and not file.is_file():  # opening a pipe would wait
        msg = f"Cannot read {file}: it is no file."
        raise ConfigError(msg, remedy=_REMEDY)
    try:
        with file.open("rb") as opened:
            num_frames = read_export_head(opened, file).num_frames
            progress(0, num_frames)
            return _import(opened, num_frames, folder, limit_bytes, progress)
    except OSError as error:
        msg = f"Cannot read {file}: {error.strerror}."
        raise ConfigError(msg, remedy=_REMEDY) from None


def import_limit(folder: Path, limit_bytes: int | None) -> int:
    """Return what a folder may take that something is to be imported into.

    Args:
        folder: a cache folder, or one that is to become one.
        limit_bytes: what is asked for; None for the limit that it has.

    Raises:
        ConfigError: it is a link, or has no limit yet.
    """
    if folder.is_symlink():
        msg = f"{folder} is a link, which an import does not follow."
        raise ConfigError(msg, remedy=f"If that is what you mean, name {folder.resolve()}.")
    if limit_bytes is None:
        if not is_cache_folder(folder):
            msg = f"{folder} is no cache folder yet."
            raise ConfigError(msg, remedy="Say with --limit how large it may become.")
        return look(folder).limit_bytes
    return limit_bytes


def _import(
    opened: BinaryIO, num_frames: int, folder: Path, limit_bytes: int, progress: Callable[[int, int], None]
) -> Imported:
    wrong: dict[MissCause, int] = {}
    num_kept = number = 0
    batch: list[Put] = []
    names: list[BlockName] = []  # of what was put into the store that is open
    with contextlib.ExitStack() as stores:
        store: DiskStore | None = None
        for number, read in enumerate(_frames(opened, num_frames, layout_sizes(folder)), start=1):
            progress(number, num_frames)
            if isinstance(read, MissCause):
                wrong[read] = wrong.get(read, 0) + 1
                continue
            frames, put = read
            if store is None or store.frames.layout != frames.layout:
                num_kept += _put(store, batch, names)
                names.clear()
                stores.close()
                store = DiskStore(folder, limit_bytes, frames)
                stores.callback(store.close)
            batch.append(put)
            names.append(put.name)
            if len(batch) >= min(_BATCH, _BATCH_BYTES // frames.frame_bytes):
                _put(store, batch)
        num_kept += _put(store, batch, names)
    if number < num_frames:
        wrong[MissCause.DAMAGED] = wrong.get(MissCause.DAMAGED, 0) + num_frames - number
        progress(num_frames, num_frames)
    return Imported(num_frames, num_kept, wrong)


def _frames(
    opened: BinaryIO, num_frames: int, sizes: dict[bytes, tuple[int, int]]
) -> Iterator[tuple[FrameFormat, Put] | MissCause]:
    """Yield what is right and what is wrong, up to where not even sizes can be read: the rest is wrong too.

    Args:
        opened: the file, read up to the end of its header.
        num_frames: how many frames the header says there are.
        sizes: of blocks of the layouts that are known, to which those of others are added: a layout has one size.
    """
    end = os.fstat(opened.fileno()).st_size
    for _ in range(num_frames):
        most_bytes = min(_MOST_FRAME_BYTES, end - opened.tell())
        begin = opened.read(_SIZES_BYTES)
        frames = sizes_of(begin)
        if frames is None or frames.frame_bytes > most_bytes:  # before anything of that size is read
            return
        header = begin + opened.read(frames.header_bytes - len(begin))
        payload = opened.read(frames.block_bytes)
        name = check_frame(frames, header, payload)
        if isinstance(name, MissCause):
            yield name
        elif sizes.setdefault(frames.layout, frames.sizes) != frames.sizes:
            yield MissCause.OTHER_LAYOUT
        else:
            yield frames, Put(name, memoryview(payload), checksum_of(payload), frames.note_of(header))


def _put(store: DiskStore | None, batch: list[Put], names: Sequence[BlockName] = ()) -> int:
    """Put a batch and empty it; return how many of ``names`` the store holds then."""
    if store is None:
        return 0
    try:
        store.put(batch)
    except StoreError as error:
        msg = f"The cache folder {store.path} cannot be written: {error}."
        raise ConfigError(msg, remedy="What was imported before stays. Make room on its disk.") from None
    batch.clear()
    return sum(store.count([name]) for name in names)
