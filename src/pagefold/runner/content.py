"""What a model's files hold, in a digest: equal on every machine that has the same bytes, whenever they came there.

Reading all weights takes about as long as loading them, so a file's digest is kept in the cache folder until the
file is another one: other size, time, or inode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING

import xxhash

from pagefold.errors import ConfigError
from pagefold.files.weights import find_weight_files
from pagefold.files.whole import write_whole

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["content_fingerprint"]

_CHUNK_BYTES = 2**22


def content_fingerprint(folder: Path, cache_dir: Path) -> str:
    """Return a digest of a model folder's config and weights: of their bytes, not of names or times.

    Args:
        folder: the model's.
        cache_dir: where digests of files are kept.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in find_weight_files(folder):
        digest.update(_file_digest(file, cache_dir / "digests").encode())
    return digest.hexdigest()


def _file_digest(file: Path, kept: Path) -> str:
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
