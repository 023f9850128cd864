"""A cache folder as people see it: what is in it, whether it is right, and all of it in one file or out of one.

Looking needs nobody's leave: it also works while a server uses the folder. What writes takes the folder's lock.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.kv.names import is_of_path, path_digest
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.disk_folder import drop_contents, drop_layout_folders, folder_bytes, is_cache_folder
from pagefold.store.disk_index import DiskIndex, UnreadableIndexError
from pagefold.store.disk_lock import FolderLock, holder_of
from pagefold.store.disk_segments import place_bytes_of, places_of_segment, segment_name
from pagefold.store.frame import FrameFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from io import FileIO
    from pathlib import Path

    from pagefold.store.disk_index import FrameRow, LayoutRow
    from pagefold.store.frame import BlockName

__all__ = [
    "CacheView",
    "Frame",
    "LayoutView",
    "NamespaceView",
    "Verified",
    "check_frame",
    "clear",
    "layout_sizes",
    "look",
    "read_frames",
    "read_path",
    "verify",
]

_TOKEN_BYTES = 4


class NamespaceView(NamedTuple):
    """The blocks of a layout that one namespace has: a tenant's, a salt's.

    Attributes:
        namespace: the digest of its namespace.
        num_blocks: how many blocks.
        used: when one was last used, in nanoseconds since 1970.
    """

    namespace: bytes
    num_blocks: int
    used: int


class LayoutView(NamedTuple):
    """The blocks of a layout.

    Attributes:
        row: what the index says of it.
        namespaces: used last first.
    """

    row: LayoutRow
    namespaces: list[NamespaceView]

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return sum(namespace.num_blocks for namespace in self.namespaces)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.row.key_bytes // _TOKEN_BYTES

    @property
    def place_bytes(self) -> int:
        """What a block takes on the disk."""
        return place_bytes_of(_format(self.row).frame_bytes)


class CacheView(NamedTuple):
    """A cache folder.

    Attributes:
        path: the folder.
        limit_bytes: that it was last opened with.
        num_bytes: of all its files.
        holder: who uses it now; empty if nobody does.
        layouts: used last first.
    """

    path: Path
    limit_bytes: int
    num_bytes: int
    holder: str
    layouts: list[LayoutView]


class Frame(NamedTuple):
    """A frame as it is on the disk.

    Attributes:
        layout: what the index says of its layout.
        row: what the index says of it.
        header, payload: its bytes.
        name: what it says it is; None if it is not right.
        cause: what is wrong with it; None if nothing is.
    """

    layout: LayoutRow
    row: FrameRow
    header: bytes
    payload: bytes
    name: BlockName | None
    cause: MissCause | None


class Verified(NamedTuple):
    """What came of reading all frames.

    Attributes:
        num_blocks: how many blocks were read.
        dropped: how many of them were dropped, by what was wrong with them.
    """

    num_blocks: int
    dropped: dict[MissCause, int]


def look(folder: Path) -> CacheView:
    """Return what a cache folder holds.

    Raises:
        ConfigError: it is none.
    """
    with _looking(folder) as index:
        layouts = [_layout_view(index, row) for row in reversed(index.layouts())]
        return CacheView(folder, index.setting("limit_bytes"), folder_bytes(folder), holder_of(folder), layouts)


def layout_sizes(folder: Path) -> dict[bytes, tuple[int, int]]:
    """Return of each layout that a folder knows the bytes of a block, and of its packed tokens; none if it is new."""
    if not is_cache_folder(folder):
        return {}
    try:
        with _looking(folder) as index:
            return {row.digest: row.sizes for row in index.layouts()}
    except ConfigError:
        return {}  # it is damaged: who opens it to write begins anew


def read_frames(folder: Path) -> Iterator[Frame]:
    """Yield all frames, by layout, used longest ago first; whoever uses the folder may change it meanwhile.

    Raises:
        ConfigError: it is no cache folder.
    """
    with _looking(folder) as index:
        rows = [(layout, list(index.frames(layout.layout_id))) for layout in index.layouts()]
    for layout, frames in rows:
        yield from _read_layout(folder, layout, frames)


def read_path(folder: Path, layout: bytes, digests: Sequence[bytes]) -> Iterator[Frame]:
    """Yield the frames of some blocks of a layout, in this order, up to the first that the folder does not have.

    Raises:
        ConfigError: it is no cache folder.
    """
    with _looking(folder) as index:
        rows = {row.digest: row for row in index.layouts()}
        wanted, all_frames = set(digests), index.frames(rows[layout].layout_id) if layout in rows else iter(())
        found = {row.digest: row for row in all_frames if row.digest in wanted}
    there: list[FrameRow] = []
    for digest in digests:
        if digest not in found:
            break
        there.append(found[digest])
    if there:
        yield from _read_layout(folder, rows[layout], there)


def verify(folder: Path, progress: Callable[[int, int], None]) -> Verified:
    """Read every frame and drop those that are wrong.

    Args:
        folder: a cache folder that nobody uses.
        progress: is told how many frames of how many were read.

    Raises:
        ConfigError: it is no cache folder, or somebody uses it.
    """
    view = look(folder)
    total = sum(layout.num_blocks for layout in view.layouts)
    dropped: dict[MissCause, int] = {}
    wrong: dict[int, list[int]] = {}
    num_blocks = 0
    with _writing(folder) as index:
        progress(0, total)
        for num_blocks, frame in enumerate(read_frames(folder), start=1):
            progress(num_blocks, total)
            if frame.cause is not None:
                dropped[frame.cause] = dropped.get(frame.cause, 0) + 1
                wrong.setdefault(frame.layout.layout_id, []).append(frame.row.place)
        for layout_id, places in wrong.items():
            index.delete(layout_id, places)
    return Verified(num_blocks, dropped)


def clear(folder: Path) -> int:
    """Drop all blocks of a folder that nobody uses; return how many they were.

    Raises:
        ConfigError: it is no cache folder, or somebody uses it.
    """
    _check_is_cache(folder)
    try:
        with _writing(folder) as index:
            rows = index.layouts()
            num_blocks = sum(index.num_frames(row.layout_id) for row in rows)
            for row in rows:
                index.remove_layout(row.layout_id)
            drop_layout_folders(folder, keep=set())
            index.shrink()
            return num_blocks
    except UnreadableIndexError:
        lock = FolderLock(folder)
        try:
            drop_contents(folder)
        finally:
            lock.release()
        return 0


def _check_is_cache(folder: Path) -> None:
    if not is_cache_folder(folder):
        msg = f"{folder} is no cache folder."
        raise ConfigError(msg, remedy="Name the folder that a server was given with --kv-disk-path.")


@contextlib.contextmanager
def _looking(folder: Path) -> Iterator[DiskIndex]:
    _check_is_cache(folder)
    with _errors(folder), contextlib.closing(DiskIndex(folder, read_only=True)) as index:
        yield index


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[DiskIndex]:
    lock = FolderLock(folder)
    try:
        with _errors(folder, but=UnreadableIndexError), contextlib.closing(DiskIndex(folder)) as index:
            yield index
    finally:
        lock.release()


@contextlib.contextmanager
def _errors(folder: Path, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    try:
        yield
    except but:
        raise
    except (StoreError, OSError) as error:
        msg = f"The cache folder {folder} cannot be read: {error}."
        raise ConfigError(msg, remedy="Drop it with pagefold cache clear, or name another one.") from None


def _layout_view(index: DiskIndex, row: LayoutRow) -> LayoutView:
    namespaces: dict[bytes, NamespaceView] = {}
    for frame in index.frames(row.layout_id):
        old = namespaces.get(frame.namespace, NamespaceView(frame.namespace, 0, 0))
        namespaces[frame.namespace] = NamespaceView(frame.namespace, old.num_blocks + 1, max(old.used, frame.used))
    return LayoutView(row, sorted(namespaces.values(), key=lambda namespace: -namespace.used))


def _read_layout(folder: Path, layout: LayoutRow, rows: list[FrameRow]) -> Iterator[Frame]:
    frames = _format(layout)
    place_bytes = place_bytes_of(frames.frame_bytes)
    per_segment = places_of_segment(place_bytes)
    with contextlib.ExitStack() as opened:
        files: dict[int, FileIO] = {}
        for row in rows:
            segment, index = divmod(row.place, per_segment)
            try:
                if segment not in files:
                    path = folder / layout.folder_name / segment_name(segment)
                    files[segment] = opened.enter_context(path.open("rb", buffering=0))
                file = files[segment]
                file.seek(index * place_bytes)
                raw = file.read(frames.frame_bytes)
            except OSError:
                yield Frame(layout, row, b"", b"", None, MissCause.IO_ERROR)
                continue
            header, payload = raw[: frames.header_bytes], raw[frames.header_bytes :]
            found = check_frame(frames, header, payload)
            if not isinstance(found, MissCause) and found[:3] != (row.digest, row.parent, row.namespace):
                found = MissCause.OTHER_BLOCK
            if isinstance(found, MissCause):
                yield Frame(layout, row, header, payload, None, found)
            else:
                yield Frame(layout, row, header, payload, found, None)


def check_frame(frames: FrameFormat, header: bytes, payload: memoryview | bytes) -> BlockName | MissCause:
    """Return the block that a frame is of, if it is whole, unchanged, and under its own name; or what is wrong."""
    found = frames.read_header(header)
    if isinstance(found, MissCause):
        return found
    name = found[0]
    if not is_of_path(name.digest, path_digest(name.parent, name.key)):
        return MissCause.OTHER_BLOCK
    checked = frames.check(header, payload, name)
    return checked if isinstance(checked, MissCause) else name


def _format(row: LayoutRow) -> FrameFormat:
    return FrameFormat(row.digest, row.block_bytes, row.key_bytes)
