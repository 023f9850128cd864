"""What a model's files hold, in a digest: equal on every machine that has the same bytes, whenever they came there.

Reading all weights takes about as long as loading them, so a file's digest is kept in the cache folder until the
file is another one: other size, time, or inode.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pagefold.files.file_digest import digest_of_file
from pagefold.files.weights import find_weight_files

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["content_fingerprint"]


def content_fingerprint(folder: Path, cache_dir: Path) -> str:
    """Return a digest of a model folder's config and weights: of their bytes, not of names or times.

    Args:
        folder: the model's.
        cache_dir: where digests of files are kept.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in find_weight_files(folder):
        digest.update(digest_of_file(file, cache_dir / "digests").encode())
    return digest.hexdigest()
