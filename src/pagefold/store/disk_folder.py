"""What belongs to a cache folder, what it may take, and what a crash, an older version or a stranger left in it.

::

    folder/
        lock                        who uses it
        index.sqlite{,-wal,-shm}    which frame is where
        0123456789abcdef/           the segments of a layout, by the begin of its digest
            segment-00000.frames

All of it is its owner's alone: prompts can be read from it. Nothing of it is a link.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.files.private import check_private
from pagefold.store.disk_index import INDEX_NAME, INDEX_NAMES
from pagefold.store.disk_lock import LOCK_NAME
from pagefold.store.disk_probe import PROBE_NAME

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "SELF_TEST_NAME",
    "check_is_ours",
    "check_permissions",
    "drop_contents",
    "drop_layout_folders",
    "drop_temporary",
    "folder_bytes",
    "foreign_bytes",
    "is_cache_folder",
    "own_paths",
]

SELF_TEST_NAME = "self-test.tmp"
_LAYOUT_NAME = re.compile(r"[0-9a-f]{16}")
_OTHERS_MAY_MAKE = ("lost+found",)


def check_is_ours(folder: Path) -> None:
    """Refuse a folder that holds files of somebody else and no index: nobody's files shall be taken for leftovers.

    Nor is any file of ours a link: what is behind it, somebody else may have chosen.

    Raises:
        ConfigError: it is such a folder.
    """
    for path in own_paths(folder):
        if path.is_symlink():
            msg = f"{path} is a link, and in a cache folder nothing is."
            raise ConfigError(msg, remedy="Remove it, or name another folder.")
    if (folder / INDEX_NAME).exists():
        return
    for entry in folder.iterdir():
        if not _is_ours(entry.name) and entry.name not in _OTHERS_MAY_MAKE:
            msg = f"{folder} is no cache folder: it holds {entry.name}."
            raise ConfigError(msg, remedy="Name an empty folder, or one that does not exist yet.")


def is_cache_folder(folder: Path) -> bool:
    """Whether somebody made a cache in it."""
    try:
        return (folder / INDEX_NAME).is_file()
    except OSError:
        return False


def own_paths(folder: Path) -> Iterator[Path]:
    """Yield what of a cache folder is ours, as far as it can be looked at: folders first, nothing behind a link."""
    with contextlib.suppress(OSError):
        for entry in sorted(folder.iterdir()):
            if _is_ours(entry.name):
                yield entry
                if entry.is_dir() and not entry.is_symlink():
                    yield from _below(entry)


def check_permissions(folder: Path, *, fix: bool = False) -> list[str]:
    """Return what people should be told of who else can read or change a cache folder; see ``check_private``."""
    return check_private(f"the cache folder {folder}", folder, own_paths(folder), fix=fix)


def drop_contents(folder: Path) -> None:
    """Remove the index and all segments; not the lock, nor what is not ours."""
    for name in INDEX_NAMES:
        (folder / name).unlink(missing_ok=True)
    drop_layout_folders(folder, keep=set())


def drop_layout_folders(folder: Path, keep: set[str]) -> None:
    """Remove the segments of all layouts but those whose folders are named ``keep``."""
    for entry in folder.iterdir():
        if _LAYOUT_NAME.fullmatch(entry.name) and entry.name not in keep and entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)


def drop_temporary(folder: Path) -> None:
    """Remove what a probe or a self-test left when its process died."""
    shutil.rmtree(folder / SELF_TEST_NAME, ignore_errors=True)
    for file in (folder / PROBE_NAME, *folder.glob(f"*/{PROBE_NAME}")):
        file.unlink(missing_ok=True)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files of a folder: of each the larger of its length and of what the disk keeps for it."""
    return sum(max(stat.st_size, stat.st_blocks * 512) for _, stat in _files(folder))


def foreign_bytes(folder: Path) -> int:
    """Return the bytes of the files that are not ours."""
    return sum(max(stat.st_size, stat.st_blocks * 512) for top, stat in _files(folder) if not _is_ours(top))


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file and folder below ``folder``, with the name at its top below ``folder``."""
    for path in folder.rglob("*"):
        try:
            yield path.relative_to(folder).parts[0], path.lstat()
        except FileNotFoundError:
            continue  # it was removed meanwhile


def _below(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _is_ours(name: str) -> bool:
    return name in (LOCK_NAME, *INDEX_NAMES, PROBE_NAME, SELF_TEST_NAME) or _LAYOUT_NAME.fullmatch(name) is not None
