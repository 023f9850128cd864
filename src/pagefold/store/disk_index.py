"""DiskIndex: which frame is in which place of which layout, in SQLite. It never grows beyond what it is allowed.

SQLite writes ahead (WAL), so a process that dies leaves the index as it was before or after one of its transactions.
The log is bounded: transactions are small, and none begins while the log is long.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote

from pagefold.files.private import open_private
from pagefold.kv.transfers import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = [
    "INDEX_BASE_BYTES",
    "INDEX_FRAME_BYTES",
    "INDEX_LOG_BYTES",
    "INDEX_NAME",
    "INDEX_NAMES",
    "DiskIndex",
    "FrameRow",
    "LayoutRow",
    "UnreadableIndexError",
]

INDEX_NAME = "index.sqlite"
INDEX_NAMES = (INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm", f"{INDEX_NAME}-journal")

INDEX_FRAME_BYTES = 512
"""Bytes of the index, at most, for each frame: a row of 130 bytes, in pages of which SQLite fills at least a third."""
INDEX_BASE_BYTES = 2**16
"""Bytes of an empty index, at most."""
INDEX_LOG_BYTES = 3 * 2**20
"""Bytes of the log and its shared memory, at most."""

_Row = TypeVar("_Row")

_APPLICATION_ID = 0x50474644  # "PGFD"
_SCHEMA_VERSION = 1
_PAGE_BYTES = 4096
_LOG_PAGES = 256  # from here on the log is written back and begun anew
_LOG_TOO_LONG_BYTES = 3 * 2**19  # somebody reads it, and it cannot be begun anew
_ROWS_AT_ONCE = 32  # of a transaction, so that one cannot make the log much longer
_TOUCHED_AT_ONCE = 256  # these change a page each at most
_SCHEMA = """
    CREATE TABLE layouts (
        id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, version INTEGER NOT NULL, label TEXT NOT NULL,
        block_bytes INTEGER NOT NULL, key_bytes INTEGER NOT NULL, used INTEGER NOT NULL
    );
    CREATE TABLE frames (
        layout INTEGER NOT NULL, place INTEGER NOT NULL, digest BLOB NOT NULL, parent BLOB NOT NULL,
        namespace BLOB NOT NULL, used INTEGER NOT NULL, PRIMARY KEY (layout, place)
    ) WITHOUT ROWID;
    CREATE TABLE settings (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


_COLUMNS = {
    "layouts": ["id", "digest", "version", "label", "block_bytes", "key_bytes", "used"],
    "frames": ["layout", "place", "digest", "parent", "namespace", "used"],
    "settings": ["name", "value"],
}
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_IOERR_SHORT_READ,
)
"""What SQLite says of a file that is none of its own, or is damaged; all else is about the disk, or about us. What can
be opened for writing and must not be written says so itself."""
_LIES = "it holds what no index holds"
_DIGEST_BYTES = 32
_MOST_BLOCK_BYTES = 2**40
_MOST_KEY_BYTES = 2**24
_MOST_PLACES = 2**48
_LATEST = 2**62  # the year 2116, in nanoseconds since 1970


class UnreadableIndexError(StoreError):
    """The index is damaged, or of another version: what it names cannot be used any more."""


class LayoutRow(NamedTuple):
    """A layout of which the folder holds frames, or did.

    Attributes:
        layout_id: in the index.
        digest: the layout's.
        version: of its frames.
        label: what people call it.
        block_bytes, key_bytes: of its blocks.
        used: when it was last opened, in nanoseconds since 1970.
    """

    layout_id: int
    digest: bytes
    version: int
    label: str
    block_bytes: int
    key_bytes: int
    used: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a block, and of its packed tokens."""
        return self.block_bytes, self.key_bytes

    @property
    def is_sound(self) -> bool:
        """Whether it is what was once written: nothing else is believed."""
        return (
            _are(int, self.layout_id, self.version, self.block_bytes, self.key_bytes, self.used)
            and _are_digests(self.digest)
            and _are(str, self.label)
            and 0 < self.block_bytes <= _MOST_BLOCK_BYTES
            and 0 < self.key_bytes <= _MOST_KEY_BYTES
            and 0 <= self.used < _LATEST
        )

    @property
    def folder_name(self) -> str:
        """The folder of its segments."""
        return self.digest.hex()[:16]


class FrameRow(NamedTuple):
    """A frame.

    Attributes:
        place: where it is, in its layout's segments.
        digest, parent, namespace: of its block.
        used: when it was last used, in nanoseconds since 1970; never the same for two frames.
    """

    place: int
    digest: bytes
    parent: bytes
    namespace: bytes
    used: int

    @property
    def is_sound(self) -> bool:
        """Whether it is what was once written: nothing else is believed."""
        return (
            _are(int, self.place, self.used)
            and _are_digests(self.digest, self.parent, self.namespace)
            and 0 <= self.place < _MOST_PLACES
            and 0 <= self.used < _LATEST
        )


class DiskIndex:
    """The index of a cache folder.

    Not for several threads at once.

    Args:
        folder: the cache folder.
        read_only: for looking at a folder that another process may be using.

    Raises:
        UnreadableIndexError: it is damaged, or of another version.
        StoreError: the disk fails, or is full.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._log = folder / INDEX_NAMES[1]
        file = folder / INDEX_NAME
        uri = f"file:{_quoted(file)}?mode={'ro' if read_only else 'rw'}"
        if not read_only:  # SQLite gives its log the permissions that the file has
            try:
                os.close(open_private(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW))
            except OSError as error:
                msg = f"its index cannot be opened: {error.strerror}"
                raise StoreError(msg) from None
        with _errors():
            # Checkpoints wait for nobody: who reads keeps the log from being begun anew, not the store from going on.
            self._sql = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=0)
        self._sql.text_factory = _text
        try:
            with _errors():
                self._prepare(read_only=read_only)
        except StoreError:
            self._sql.close()
            raise

    def _prepare(self, *, read_only: bool) -> None:
        if read_only:
            self._sql.execute("PRAGMA query_only = 1")
        is_new = not self._value("PRAGMA page_count")
        if is_new and not read_only:
            self._sql.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            self._sql.execute("PRAGMA auto_vacuum = INCREMENTAL")
        if not read_only:
            self._sql.execute("PRAGMA journal_mode = WAL")
            # A crash of the system may lose the last transactions, and every frame is checked when it is read.
            self._sql.execute("PRAGMA synchronous = NORMAL")
            self._sql.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
            self._sql.execute(f"PRAGMA journal_size_limit = {_LOG_PAGES * _PAGE_BYTES}")
        self._sql.execute("PRAGMA temp_store = MEMORY")
        if is_new and not read_only:
            self._sql.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
            self._sql.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        if self._value("PRAGMA user_version") != _SCHEMA_VERSION or (
            self._value("PRAGMA application_id") != _APPLICATION_ID
        ):
            msg = "it is of another version"
            raise UnreadableIndexError(msg)
        self._check_schema()
        if not read_only and self._sql.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            msg = "it is damaged"
            raise UnreadableIndexError(msg)

    def _check_schema(self) -> None:
        """See that the tables are ours, and nothing else is there: views and triggers would act."""
        found = self._sql.execute("SELECT name FROM sqlite_master WHERE name NOT GLOB 'sqlite_autoindex_*'")
        names = {name for (name,) in found}
        columns = {name: [row[1] for row in self._sql.execute(f"PRAGMA table_info({name})")] for name in _COLUMNS}
        if names != set(_COLUMNS) or columns != _COLUMNS or self._value("PRAGMA page_size") != _PAGE_BYTES:
            msg = "its tables are not those of an index"
            raise UnreadableIndexError(msg)

    @property
    def num_bytes(self) -> int:
        """Bytes of its file when the log has been written back."""
        return self._value("PRAGMA page_count") * _PAGE_BYTES

    def allow(self, num_bytes: int) -> None:
        """Have its file never grow beyond ``num_bytes``, or beyond what it is now."""
        with _errors():
            self._sql.execute(f"PRAGMA max_page_count = {num_bytes // _PAGE_BYTES}")

    def shrink(self) -> None:
        """Give back the pages that hold nothing."""
        with _errors():
            while self._value("PRAGMA freelist_count"):
                before = self._value("PRAGMA page_count")
                with self._writing():
                    self._sql.execute(f"PRAGMA incremental_vacuum({_LOG_PAGES // 4})").fetchall()
                if self._value("PRAGMA page_count") >= before:
                    break
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def layouts(self) -> list[LayoutRow]:
        """Return all layouts, used longest ago first."""
        with _errors():
            columns = "id, digest, version, label, block_bytes, key_bytes, used"
            query = f"SELECT {columns} FROM layouts ORDER BY used"  # noqa: S608 - columns are ours
            rows = [LayoutRow(*row) for row in self._sql.execute(query)]
        if not all(row.is_sound for row in rows) or len({row.folder_name for row in rows}) < len(rows):
            raise UnreadableIndexError(_LIES)
        return rows

    def add_layout(self, row: LayoutRow) -> int:
        """Add a layout, or say that it is used again; return its id."""
        with _errors(), self._writing():
            self._sql.execute(
                "INSERT INTO layouts (digest, version, label, block_bytes, key_bytes, used) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (digest) DO UPDATE SET used = excluded.used,"
                " label = iif(excluded.label = '', label, excluded.label)",
                row[1:],
            )
        return self._value("SELECT id FROM layouts WHERE digest = ?", row.digest)

    def remove_layout(self, layout_id: int) -> None:
        """Forget a layout and its frames."""
        num_deleted = 1
        while num_deleted:  # whatever the places are: who lies may have written any
            with _errors(), self._writing():
                num_deleted = self._sql.execute(
                    "DELETE FROM frames WHERE layout = ?1 AND place IN"
                    " (SELECT place FROM frames WHERE layout = ?1 ORDER BY place LIMIT ?2)",
                    (layout_id, 8 * _ROWS_AT_ONCE),
                ).rowcount
        with _errors(), self._writing():
            self._sql.execute("DELETE FROM layouts WHERE id = ?", (layout_id,))

    def frames(self, layout_id: int) -> Iterator[FrameRow]:
        """Yield the frames of a layout, used longest ago first."""
        with _errors():
            columns = "place, digest, parent, namespace, used"
            query = f"SELECT {columns} FROM frames WHERE layout = ? ORDER BY used"  # noqa: S608 - columns are ours
            for row in self._sql.execute(query, (layout_id,)):
                frame = FrameRow(*row)
                if not frame.is_sound:
                    raise UnreadableIndexError(_LIES)
                yield frame

    def num_frames(self, layout_id: int) -> int:
        """Return how many frames of a layout there are."""
        return self._value("SELECT count(*) FROM frames WHERE layout = ?", layout_id)

    def insert(self, layout_id: int, rows: Sequence[FrameRow]) -> None:
        """Add frames, whose bytes are in their places."""
        for part in _parts(rows):
            with _errors(), self._writing():
                self._sql.executemany(
                    "INSERT INTO frames (layout, place, digest, parent, namespace, used) VALUES (?, ?, ?, ?, ?, ?)",
                    [(layout_id, *row) for row in part],
                )

    def delete(self, layout_id: int, places: Sequence[int]) -> None:
        """Forget frames. When this returns, their places may be written."""
        for part in _parts(places):
            with _errors(), self._writing():
                self._sql.executemany(
                    "DELETE FROM frames WHERE layout = ? AND place = ?", [(layout_id, place) for place in part]
                )

    def delete_range(self, layout_id: int, first: int, end: int) -> None:
        """Forget the frames of places from ``first`` to before ``end``."""
        for begin in range(first, end, 8 * _ROWS_AT_ONCE):  # neighbours share pages
            with _errors(), self._writing():
                self._sql.execute(
                    "DELETE FROM frames WHERE layout = ? AND place >= ? AND place < ?",
                    (layout_id, begin, min(end, begin + 8 * _ROWS_AT_ONCE)),
                )

    def touch(self, layout_id: int, used: Iterable[tuple[int, int]]) -> None:
        """Note when frames were used: pairs of place and time."""
        for part in _parts(sorted(used), _TOUCHED_AT_ONCE):
            with _errors(), self._writing():
                self._sql.executemany(
                    "UPDATE frames SET used = ? WHERE layout = ? AND place = ?",
                    [(time, layout_id, place) for place, time in part],
                )

    def setting(self, name: str) -> int:
        """Return a number that was kept; 0 if none was."""
        return self._value("SELECT value FROM settings WHERE name = ?", name)

    def set(self, name: str, value: int) -> None:
        """Keep a number."""
        with _errors(), self._writing():
            self._sql.execute("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", (name, value))

    def close(self) -> None:
        """Write the log back and close."""
        with contextlib.suppress(sqlite3.Error):
            self._sql.close()

    # Inside.

    def _value(self, query: str, *arguments: bytes | str | int) -> int:
        with _errors():
            row = self._sql.execute(query, arguments).fetchone()
        value = (row[0] or 0) if row else 0
        if not isinstance(value, int):
            raise UnreadableIndexError(_LIES)
        return value

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Make one transaction, if the log has room for it."""
        if self._log_bytes() > _LOG_TOO_LONG_BYTES:
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if self._log_bytes() > _LOG_TOO_LONG_BYTES:
                msg = "the log of its index cannot be written back while another process reads it"
                raise StoreError(msg)
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._sql.execute("COMMIT")
        except BaseException:
            if self._sql.in_transaction:
                self._sql.execute("ROLLBACK")
            raise

    def _log_bytes(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0


def _parts(rows: Sequence[_Row], at_once: int = _ROWS_AT_ONCE) -> Iterator[Sequence[_Row]]:
    for begin in range(0, len(rows), at_once):
        yield rows[begin : begin + at_once]


def _are(kind: type, *values: object) -> bool:
    return all(type(value) is kind for value in values)


def _are_digests(*values: object) -> bool:
    return all(isinstance(value, bytes) and len(value) == _DIGEST_BYTES for value in values)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE)
        is_damaged = code in _DAMAGED or code & 0xFF in _DAMAGED
        msg = f"its index fails: {error}"
        raise (UnreadableIndexError if is_damaged else StoreError)(msg) from None


def _quoted(file: Path) -> str:
    return quote(str(file.absolute()))
