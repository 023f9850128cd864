"""DiskStore: blocks in files of a folder, within a hard limit of bytes, across crashes and restarts.

It holds at every moment, also if the process is killed:

* All files of the folder together never exceed the limit: places are given out only as far as their bytes, their rows
  of the index, the longest log of the index and what else may be written fit.
* An entry is in the index only after its frame is in its place, and a place is written only after its old entry is out
  of the index.
* Whatever is read is checked, whole, against what was asked for. So the index is never believed, and what a power
  failure left behind is a miss.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.files.private import make_private_folder
from pagefold.kv.transfers import MissCause, StoreError, TierUse
from pagefold.store.disk_budget import checked_budget
from pagefold.store.disk_entries import Entries
from pagefold.store.disk_folder import (
    SELF_TEST_NAME,
    check_is_ours,
    check_permissions,
    drop_contents,
    drop_layout_folders,
    drop_temporary,
    folder_bytes,
)
from pagefold.store.disk_index import (
    DiskIndex,
    FrameRow,
    LayoutRow,
    UnreadableIndexError,
)
from pagefold.store.disk_lock import FolderLock
from pagefold.store.disk_places import OtherLayout, Places
from pagefold.store.disk_probe import why_not_direct
from pagefold.store.disk_read import FrameReader
from pagefold.store.disk_segments import FileCalls, SegmentFiles
from pagefold.store.disk_self_test import try_disk
from pagefold.store.frame import VERSION, FrameFormat
from pagefold.store.protocol import SelfTest, StoreUse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.store.disk_entries import Entry
    from pagefold.store.frame import BlockName
    from pagefold.store.protocol import Get, Put

__all__ = ["DiskStore"]

_EVICTED_AT_ONCE = 32
"""Places that are freed together when room is needed: one transaction for several puts."""
_TOUCHED_AT_ONCE = 512
"""Uses that a put writes back; a crash loses fewer, and with them some of the order in which blocks leave."""
_TOUCHED_BY_GETS = 2**16
"""Uses that a get writes back, where nothing is ever put: whoever waits for blocks shall not wait for the index."""


class DiskStore:
    """A :class:`~pagefold.store.protocol.BlockStore` in a folder. One process at a time uses the folder.

    Args:
        path: the folder; made, for its owner alone, if it is not there.
        limit_bytes: of all its files together, of whatever layout.
        frames: the format of this model's and layout's frames. Frames of others stay as long as there is room.
        label: what people call the model and layout.
        calls: to the system.

    Attributes:
        tier: "disk".
        path: the folder.
        limit_bytes: of all its files.
        why_not_direct: why reads and writes go through the system's cache; empty if they do not.
        notes: what was found at the start that people should know, a line each.
        num_evicted: frames that were dropped for others since then.

    Raises:
        ConfigError: the folder cannot be used or is in use, or the limit is too small or too large for it.
    """

    is_out = False
    tier = "disk"

    def __init__(
        self,
        path: str | Path,
        limit_bytes: int,
        frames: FrameFormat,
        *,
        label: str = "",
        calls: FileCalls | None = None,
    ) -> None:
        self.path = Path(path)
        self.limit_bytes = limit_bytes
        self.frames = frames
        self.notes: list[str] = []
        self.num_evicted = 0
        self._calls = calls or FileCalls()
        self._mutex = threading.RLock()  # guards all below, but for bytes in places
        self._is_idle = threading.Condition(self._mutex)
        self._num_busy = 0
        self._is_closed = False
        self._entries = Entries()
        self._writing: set[bytes] = set()
        with contextlib.ExitStack() as opened:
            self._open(opened, label)
            self._opened = opened.pop_all()

    def self_test(self) -> SelfTest:
        """Write, read, flip a bit on the disk, measure, compare what is there with the limit. Kept blocks stay.

        Raises:
            StoreError: the folder is not there any more.
        """
        with self._busy():
            trial = try_disk(
                self.path / SELF_TEST_NAME,
                self._budget.self_test_bytes,
                self.frames,
                self._reader,
                direct=not self.why_not_direct,
            )
            failure = trial.failure
            if not failure and (there := folder_bytes(self.path)) > self.limit_bytes:
                failure = f"{there:,} bytes are there, over the limit"
            num_blocks, max_blocks = len(self._entries), self._places.num_allowed
            if failure:
                said = f"off: {failure}"
            else:
                how = f"through the system's cache ({self.why_not_direct})" if self.why_not_direct else "O_DIRECT"
                said = (
                    f"{trial.read_bytes_per_s / 1e9:.1f} GB/s read, {trial.write_bytes_per_s / 1e9:.1f} GB/s write, "
                    f"{how}, {num_blocks:,} blocks of {max_blocks:,} kept, {self.limit_bytes / 2**30:.1f} GiB limit"
                )
            return SelfTest(
                self.tier,
                not failure,
                trial.read_bytes_per_s,
                trial.write_bytes_per_s,
                trial.latency_s(self.frames.block_bytes),
                f"disk       {self.path}: {said}",
            )

    # Opening.

    def _open(self, opened: contextlib.ExitStack, label: str) -> None:
        try:
            make_private_folder(self.path)
            check_is_ours(self.path)
            self.notes += check_permissions(self.path)
        except OSError as error:
            msg = f"The cache folder {self.path} cannot be used: {error.strerror}."
            raise ConfigError(msg, remedy="Name a folder that this user may write to.") from None
        self._lock = FolderLock(self.path)
        opened.callback(self._lock.release)
        try:
            drop_temporary(self.path)
            try:
                self._open_contents(opened, label)
            except UnreadableIndexError as error:
                self.notes.append(f"the index of {self.path} cannot be used ({error}): the cache starts empty")
                drop_contents(self.path)
                self._open_contents(opened, label)
        except OSError as error:
            msg = f"The cache folder {self.path} cannot be used: {error.strerror or error}."
            raise ConfigError(msg, remedy="Name a folder that this user may write to, on a disk with room.") from None
        except StoreError as error:
            msg = f"The cache folder {self.path} cannot be used: {error}."
            raise ConfigError(msg, remedy="Name a folder that this user may write to, on a disk with room.") from None
        self._reader = FrameReader(self.frames)
        opened.callback(self._reader.close)

    def _open_contents(self, opened: contextlib.ExitStack, label: str) -> None:
        """Open the index and what it names. If that fails, nothing of it is open."""
        self._entries = Entries()
        with contextlib.ExitStack() as attempt:
            self._index = DiskIndex(self.path)
            attempt.callback(self._index.close)
            self._budget = checked_budget(self.path, self.limit_bytes, self.frames)
            *others, own = self._open_layouts(label)
            self._layout_id = own.layout_id
            self.why_not_direct = why_not_direct(self.path / own.folder_name)
            self._segments = self._open_segments(own, direct=not self.why_not_direct)
            self._places = Places(
                self._segments,
                [
                    OtherLayout(row, self.path / row.folder_name, self._open_segments(row, direct=False))
                    for row in others
                ],
                self._index,
                self._budget,
            )
            attempt.callback(self._places.close)
            self._load()
            opened.push(attempt.pop_all())

    def _open_layouts(self, label: str) -> list[LayoutRow]:
        """Drop what no version of today reads, and leftovers; return the layouts that stay, this one last."""
        for row in self._index.layouts():
            if row.version != VERSION:
                self.notes.append(f"{self.path} has frames of version {row.version}: they are dropped")
                self._index.remove_layout(row.layout_id)
            elif row.digest == self.frames.layout and row.sizes != self.frames.sizes:
                self.notes.append(f"{self.path} has frames of this layout with other sizes: they are dropped")
                self._index.remove_layout(row.layout_id)
                shutil.rmtree(self.path / row.folder_name, ignore_errors=True)
        self._index.add_layout(
            LayoutRow(
                0, self.frames.layout, VERSION, label, self.frames.block_bytes, self.frames.key_bytes, time.time_ns()
            )
        )
        self._index.set("limit_bytes", self.limit_bytes)
        rows = sorted(self._index.layouts(), key=lambda row: row.digest == self.frames.layout)
        drop_layout_folders(self.path, keep={row.folder_name for row in rows})
        for row in rows:
            make_private_folder(self.path / row.folder_name)
        return rows

    def _open_segments(self, row: LayoutRow, *, direct: bool) -> SegmentFiles:
        frames = FrameFormat(row.digest, row.block_bytes, row.key_bytes)
        return SegmentFiles(self.path / row.folder_name, frames, direct=direct, calls=self._calls)

    def _load(self) -> None:
        """Read the index. Frames whose places are not there, or are beyond the limit, are forgotten."""
        lost: list[int] = []
        for row in self._index.frames(self._layout_id):
            if not self._segments.has(row.place):
                lost.append(row.place)
                continue
            lost += self._entries.forget(self._entries.find([row.digest]))  # written anew: the older one was wrong
            self._entries.add(row)
        self._index.delete(self._layout_id, lost)
        self._places.begin({entry.place for entry in self._entries})
        while excess := self._places.excess():
            self._index.delete_range(self._layout_id, excess.start, excess.stop)
            self._entries.forget([entry for entry in self._entries if entry.place in excess])
            self._places.cut(excess)

    # What BlockStore asks for.

    def put(self, puts: Sequence[Put]) -> int:
        """Keep blocks, making room as needed. Return how many are kept now; known ones count, and are not rewritten.

        Blocks of one path lie one behind the other where that can be, so that they are read as one.

        Raises:
            StoreError: none is kept that was not known.
        """
        with self._busy():
            with self._mutex:
                ordered = _in_path_order(puts)
                known = [put for put in ordered if put.name.digest in self._entries]
                new = [
                    put
                    for put in ordered
                    if put.name.digest not in self._entries and put.name.digest not in self._writing
                ]
                for entry in reversed(self._entries.find(put.name.digest for put in known)):
                    self._entries.touch(entry)
                places = self._take_places(len(new))
                new = new[: len(places)]
                self._writing.update(put.name.digest for put in new)
            written = 0
            try:
                written = self._write(new, places)
            finally:
                with self._mutex:
                    self._writing.difference_update(put.name.digest for put in new)
                    self._places.give_back(places[written:])
            with self._mutex:
                self._publish(new[:written], places[:written])
            self._flush_if(_TOUCHED_AT_ONCE)
            return len(known) + written

    def get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        """Bring blocks. For each its checksum, or why it is not there; a frame that is wrong is dropped.

        The blocks are of one path, first to last; what is behind the first miss need not be brought, and is ``ABSENT``.

        Raises:
            StoreError: the folder is not there any more.
        """
        with self._busy():
            with self._mutex:
                found = self._entries.begin_read(get.name.digest for get in gets)
            results: list[bytes | MissCause] = []
            try:
                if found:
                    results = self._reader.read(self._segments, [entry.place for entry in found], gets[: len(found)])
            finally:
                wrong = [entry for entry, result in zip(found, results, strict=False) if isinstance(result, MissCause)]
                with self._mutex:
                    self._places.give_back(self._entries.end_read(found))
                    self._drop_wrong(wrong)
            self._flush_if(_TOUCHED_BY_GETS)
            end = next((index for index, result in enumerate(results) if isinstance(result, MissCause)), len(results))
            return results[: end + 1] + [MissCause.ABSENT] * (len(gets) - len(results[: end + 1]))

    def count(self, names: Sequence[BlockName]) -> int:
        """Return how many of ``names``, from the first on in a row, it probably holds."""
        for index, name in enumerate(names):  # without the mutex, which writes hold for long: it is a guess anyway
            if name.digest not in self._entries:
                return index
        return len(names)

    def delete(self, digests: Sequence[bytes]) -> None:
        """Forget blocks, if it holds them."""
        with self._busy(), self._mutex:
            self._drop(self._entries.find(digests))

    def clear(self) -> int:
        """Forget all blocks of this layout; return how many. Their room goes back to the disk."""
        with self._busy(), self._mutex:
            entries = list(self._entries)
            self._index.delete_range(self._layout_id, 0, max(self._segments.places(), default=-1) + 1)
            self._places.give_back(self._entries.forget(entries))
            if self._num_busy == 1:  # nobody else reads or writes
                self._places.give_all_back()
            return len(entries)

    def use(self) -> StoreUse:
        """Return what it holds."""
        with self._busy():
            return StoreUse(len(self._entries), folder_bytes(self.path), self.limit_bytes)

    def digests(self) -> list[bytes]:
        """Return the names of all blocks of this layout that it holds, used longest ago first."""
        with self._mutex:
            return [entry.digest for entry in self._entries.oldest(len(self._entries))]

    def known_use(self) -> TierUse:
        """Return how many frames of this layout can be found; without the mutex, which writes hold for long."""
        return TierUse(len(self._entries), self._places.num_allowed)

    def close(self) -> None:
        """Finish what was begun and let go of all resources. Again does nothing."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            self._is_idle.wait_for(lambda: not self._num_busy)
            self._flush()
        self._opened.close()

    # Inside.

    def _take_places(self, num: int) -> list[int]:
        """Take up to ``num`` places; if there are fewer, those of what was used longest ago."""
        places = self._places.take(num) if num else []
        if len(places) < num:
            num_victims = max(num - len(places), min(_EVICTED_AT_ONCE, self._segments.num_places // 64))
            victims = self._entries.oldest(num_victims)
            try:
                self._drop(victims)
                self.num_evicted += len(victims)
            except StoreError:
                self._places.give_back(places)
                raise
            places += self._places.take(num - len(places))
        return sorted(places)

    def _drop(self, entries: Sequence[Entry]) -> None:
        """Forget entries, in the index first."""
        if entries:
            self._index.delete(self._layout_id, [entry.place for entry in entries])
            self._places.give_back(self._entries.forget(entries))

    def _drop_wrong(self, entries: Sequence[Entry]) -> None:
        """Drop entries whose frames are not theirs, also if the index cannot be written any more."""
        entries = [entry for entry in dict.fromkeys(entries) if not entry.is_gone]
        try:
            self._drop(entries)
        except StoreError:
            self._entries.abandon(entries)

    def _publish(self, puts: Sequence[Put], places: Sequence[int]) -> None:
        """Put frames that are written into the index; heads become those used last."""
        rows = [
            FrameRow(place, put.name.digest, put.name.parent, put.name.namespace, used)
            for put, place, used in zip(puts, places, reversed(self._entries.times(len(puts))), strict=True)
        ]
        self._index.insert(self._layout_id, rows)  # if this fails, these places are not used again before a restart
        for row in reversed(rows):
            self._entries.add(row)

    def _flush_if(self, many: int) -> None:
        with self._mutex:
            if self._entries.num_touched >= many:
                self._flush()

    def _flush(self) -> None:
        """Write back when entries were used. If that fails, some order is lost and nothing else."""
        with contextlib.suppress(StoreError):
            self._index.touch(self._layout_id, self._entries.take_touched())

    def _write(self, puts: Sequence[Put], places: Sequence[int]) -> int:
        """Write frames; return how many were, from the first on.

        Raises:
            OSError: none was, for the disk fails.
        """
        for run in self._segments.runs(places):
            headers = [self.frames.header(put.name, put.checksum, note=put.note) for put in puts[run]]
            try:
                self._segments.write(places[run.start], headers, [put.payload for put in puts[run]])
            except OSError:
                if not run.start:
                    raise
                return int(run.start)
        return len(puts)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Do something for which the folder must be there."""
        with self._mutex:
            if self._is_closed:
                msg = "it is closed"
                raise StoreError(msg)
            if not self._lock.is_there:
                msg = f"the folder {self.path} was removed or replaced"
                raise StoreError(msg)
            self._num_busy += 1
        try:
            yield
        except OSError as error:
            raise StoreError(self._said(error)) from None
        finally:
            with self._mutex:
                self._num_busy -= 1
                self._is_idle.notify_all()

    def _said(self, error: OSError) -> str:
        return f"{self.path}: {error.strerror or error}"


def _in_path_order(puts: Sequence[Put]) -> list[Put]:
    """Return blocks with each behind its parent, and each path as one; of several of one name, one."""
    by_digest = {put.name.digest: put for put in puts}
    children: dict[bytes, list[Put]] = {}
    for put in by_digest.values():
        children.setdefault(put.name.parent, []).append(put)
    stack = [put for put in reversed(by_digest.values()) if put.name.parent not in by_digest]
    ordered: list[Put] = []
    while stack:
        put = stack.pop()
        ordered.append(put)
        stack.extend(reversed(children.get(put.name.digest, ())))
    return ordered
