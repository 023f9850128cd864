"""Publish a folder: it appears whole or not at all, also when two processes want it at once or one is killed.

The work is done under an exclusive file lock, in a work folder beside the target, which is flushed to disk and renamed
into place at the end. Whoever holds the lock may clear away what a killed process left behind. A manifest with every
file's size tells a whole folder from one that somebody or something cut short later.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.files.lock import locked
from pagefold.hub.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

__all__ = ["MANIFEST", "is_published", "publish_folder"]

MANIFEST = "pagefold.json"


def is_published(folder: Path) -> bool:
    """Whether ``folder`` was published by us and every file has the size it had then."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        return all((folder / name).stat().st_size == num_bytes for name, num_bytes in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def publish_folder(
    target: Path,
    build: Callable[[Path, Path], None],
    *,
    about: Mapping[str, str],
    progress: Progress = silent,
) -> Path:
    """Return ``target``, after having it built if it is not there.

    Args:
        target: the folder that shall exist. Only its parent is written to until it is whole.
        build: called with two empty folders on the same file system: the one to fill, and a scratch folder that is
            thrown away. It runs in one process at a time, and not at all when another process was first.
        about: written into the manifest beside the files' sizes: where the content comes from.
        progress: told when another process has to be waited for.

    Raises:
        ConfigError: the folder cannot be written, or something that is not ours is in its place.
        Exception: whatever ``build`` raises; nothing is left behind then.
    """
    if is_published(target):
        return target
    work = target.parent / f".{target.name}.work"
    with _plain_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, progress):
        if is_published(target):
            return target
        try:
            with _plain_errors(target):
                # A process killed in the middle left its work folder. It cannot be alive: we hold the lock.
                shutil.rmtree(work, ignore_errors=True)
                fresh, scratch, stale = work / "fresh", work / "scratch", work / "stale"
                fresh.mkdir(parents=True)
                scratch.mkdir()
                build(fresh, scratch)
                _seal(fresh, about)
                _set_aside(target, stale)
                # POSIX renames a folder only onto nothing or onto an empty folder, and does it at once.
                fresh.replace(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _seal(folder: Path, about: Mapping[str, str]) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({**about, "files": sizes}, indent=2) + "\n", encoding="utf-8")
    # Flushed before the rename: else a power cut can leave the new name on files that never reached the disk.
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _set_aside(target: Path, stale: Path) -> None:
    # What lies there is damaged, or not ours at all: then it is not ours to delete.
    if not target.exists():
        return
    if not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        message = f"{target} is in the way: it was not made by Pagefold."
        raise ConfigError(message, remedy="Move it elsewhere, or name another cache folder.")
    target.replace(stale)


@contextlib.contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with _plain_errors(target):
            file = target.parent / f".{target.name}.lock"
            stack.enter_context(locked(file, lambda: progress("waiting for another process", 0, 0)))
        yield


@contextlib.contextmanager
def _plain_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"{target} cannot be made: {error}."
        raise ConfigError(message, remedy="Make room or give permission, or name another cache folder.") from error
