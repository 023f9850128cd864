"""The digest of a file of many gigabytes, kept until the file is another one: reading it takes as long as a load."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING

import xxhash

from pagefold.errors import ConfigError
from pagefold.files.whole import write_whole

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["digest_of_file"]

_CHUNK_BYTES = 2**22


def digest_of_file(file: Path, kept: Path) -> str:
    """Return a digest of all bytes of a file, 128 bits in hexadecimal.

    Args:
        file: what is read, unless its digest is known: of this path, size, times and inode.
        kept: the folder of digests that are known.
    """
    stat = file.stat()
    path = str(file.resolve())
    known_as = [path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    note = kept / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.json"
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
        if found["file"] == known_as:
            return str(found["xxh3_128"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    told = digest.hexdigest()
    with contextlib.suppress(OSError, ConfigError):  # else it is read again next time
        kept.mkdir(parents=True, exist_ok=True)
        write_whole(note, json.dumps({"file": known_as, "xxh3_128": told}))
    return told
