"""Files with a digest behind their bytes: numbers with a wrong bit are numbers too, so what is damaged is not taken."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pagefold.files.whole import write_whole

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_digested", "write_digested"]

_DIGEST_BYTES = 32
"""Bytes of the SHA-256."""


def write_digested(file: Path, content: bytes) -> None:
    """Write ``content`` and its digest to ``file``, or leave what is there.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole(file, content + hashlib.sha256(content).digest())


def read_digested(file: Path) -> bytes | None:
    """Return what :func:`write_digested` wrote; None where there is no such file, or not all that was written."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    content, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None
