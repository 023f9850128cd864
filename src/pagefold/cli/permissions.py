"""Who else can read what prompts and keys left on this machine: told before a command uses it, and mended if asked."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import typer

from pagefold.config import cache_dir
from pagefold.engine.verdicts import verdicts_folder
from pagefold.files.private import check_private

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["tell_of_bundle", "tell_of_cache_folder", "tell_of_served"]


def tell_of_cache_folder(folder: Path, *, fix: bool = False) -> None:
    """Say who else can read a cache folder; nothing of one that is none, which is not touched either."""
    from pagefold.store.disk_folder import check_permissions, is_cache_folder  # noqa: PLC0415 - only here

    if is_cache_folder(folder):
        _say(check_permissions(folder, fix=fix))


def tell_of_bundle(file: Path, *, fix: bool = False) -> None:
    """Say who else can read an exported cache."""
    _say(check_private(f"the exported cache {file}", file, fix=fix))


def tell_of_served(disk: Path | None, recording: Path | None, key_file: Path | None, *, fix: bool) -> None:
    """Say who else can read what a server uses. Of its cache folder and its key file, who opens them says it too.

    Args:
        disk: its cache folder, if it has one; one that is not there yet, or is somebody else's, is left alone.
        recording: the file that it writes.
        key_file: of its accounts.
        fix: whether to mend what is found.

    Raises:
        ConfigError: the cache folder is somebody else's.
    """
    if fix and disk is not None:
        from pagefold.store.disk_folder import check_is_ours, check_permissions  # noqa: PLC0415 - only here

        with contextlib.suppress(OSError):  # who opens it says why it cannot be used
            check_is_ours(disk)
            _say(check_permissions(disk, fix=True))
    if fix and key_file is not None:
        _say(check_private(f"the key file {key_file}", key_file, fix=True))
    if recording is not None:
        _say(check_private(f"the recording {recording}", recording, fix=fix))
    verdicts = verdicts_folder(cache_dir())
    with contextlib.suppress(OSError):
        _say(check_private(f"the folder of verdicts {verdicts}", verdicts, sorted(verdicts.iterdir()), fix=fix))


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(f"warning: {line}", err=True)
