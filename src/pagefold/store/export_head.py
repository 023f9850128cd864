"""The header of an exported file: how many frames follow, and of one prefix what it is.

::

    offset  bytes  field
         0     16  magic: "PAGEFOLD EXPORT" and a zero
        16      4  version: 1
        20      4  zero
        24      8  how many frames follow
        32      8  bytes of the file
        40     16  checksum of all before it: XXH3, 128 bits
        56      4  bytes of what is told of a prefix; zero where the file is a whole cache
        60      n  that, as JSON
                16  checksum of these two fields: XXH3, 128 bits; not there where nothing is told
                   zeros up to 4,096

What reads whole caches passes over what is told: a prefix file is an exported cache like any other.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.store.frame import ALIGNMENT, VERSION, checksum_of

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["EXPORT_HEADER_BYTES", "MAX_TOLD_BYTES", "ExportHead", "export_head", "read_export_head"]

EXPORT_HEADER_BYTES = 4096
"""Bytes before the first frame."""

_MAGIC = b"PAGEFOLD EXPORT\0"
_HEAD = struct.Struct("<16sIIQQ")
_CHECKSUM_BYTES = 16
_TOLD_SIZE = struct.Struct("<I")
_TOLD_AT = _HEAD.size + _CHECKSUM_BYTES
_LEAST_FRAME_BYTES = ALIGNMENT  # of its header alone
_REMEDY = "Name a file that pagefold cache export wrote."

MAX_TOLD_BYTES = EXPORT_HEADER_BYTES - _TOLD_AT - _TOLD_SIZE.size - _CHECKSUM_BYTES
"""Bytes of what a header has room to tell of a prefix."""


class ExportHead(NamedTuple):
    """What an exported file's header says.

    Attributes:
        num_frames: that follow.
        told: of a prefix, as JSON; empty where the file is a whole cache.
    """

    num_frames: int
    told: bytes


def export_head(num_frames: int, num_bytes: int, told: bytes = b"") -> bytes:
    """Return the header of a file.

    Args:
        num_frames: that follow.
        num_bytes: of the whole file.
        told: of a prefix, as JSON; empty for a whole cache.
    """
    assert len(told) <= MAX_TOLD_BYTES, "more than a header has room for"
    head = _HEAD.pack(_MAGIC, VERSION, 0, num_frames, num_bytes)
    head += checksum_of(head)
    if told:
        sized = _TOLD_SIZE.pack(len(told)) + told
        head += sized + checksum_of(sized)
    return head.ljust(EXPORT_HEADER_BYTES, b"\0")


def read_export_head(opened: BinaryIO, file: Path) -> ExportHead:
    """Return what the header of a file says, which is read up to the first frame.

    Raises:
        ConfigError: it is no exported file, or not whole, or says that it holds more than it can.
    """
    raw = opened.read(EXPORT_HEADER_BYTES)
    if len(raw) < EXPORT_HEADER_BYTES or raw[: len(_MAGIC)] != _MAGIC:
        msg = f"{file} is no exported cache."
        raise ConfigError(msg, remedy=_REMEDY)
    _, version, _, num_frames, num_bytes = _HEAD.unpack_from(raw)
    if version != VERSION:
        msg = f"{file} is of version {version}; this is version {VERSION}."
        raise ConfigError(msg, remedy="Export it again with this version of Pagefold.")
    there = os.fstat(opened.fileno()).st_size
    if raw[_HEAD.size : _TOLD_AT] != checksum_of(raw[: _HEAD.size]) or there != num_bytes:
        msg = f"{file} is not whole: it has {there:,} bytes of {num_bytes:,}."
        raise ConfigError(msg, remedy="Copy it again.")
    if num_frames > there // _LEAST_FRAME_BYTES:
        msg = f"{file} says that it holds {num_frames:,} frames, and has {there:,} bytes."
        raise ConfigError(msg, remedy=_REMEDY)
    return ExportHead(int(num_frames), _told(raw, file))


def _told(raw: bytes, file: Path) -> bytes:
    """Return what a header tells of a prefix."""
    (size,) = _TOLD_SIZE.unpack_from(raw, _TOLD_AT)
    if not size:
        return b""
    end = _TOLD_AT + _TOLD_SIZE.size + size
    rest = raw[end + _CHECKSUM_BYTES :]
    is_right = size <= MAX_TOLD_BYTES and raw[end : end + _CHECKSUM_BYTES] == checksum_of(raw[_TOLD_AT:end])
    if not is_right or rest.strip(b"\0"):
        msg = f"{file} is damaged: what its header tells of a prefix is not what was written."
        raise ConfigError(msg, remedy="Copy it again.")
    return raw[_TOLD_AT + _TOLD_SIZE.size : end]
