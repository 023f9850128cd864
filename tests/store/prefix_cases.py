"""Prefixes for tests: layouts that somebody made up, and folders that hold a prompt's blocks."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

from pagefold.kv.names import names_behind
from pagefold.store.disk import DiskStore
from pagefold.store.frame import checksum_of
from pagefold.store.prefix_folder import WantedPrefix, export_prefix
from pagefold.store.prefix_layout import PrefixLayout
from pagefold.store.protocol import Put

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["LIMIT", "TOKENS", "exported", "folder_of", "layout_of", "payload_of", "quiet"]

LIMIT = 16 * 2**20
TOKENS = list(range(100, 170))
_HEAD_DIM, _NUM_CELLS = 8, 3


def layout_of(block_size: int = 16, **fields: object) -> PrefixLayout:
    """Return a layout of plain float32 on a CPU."""
    layout = PrefixLayout(
        label="tiny",
        model="3f" * 32,
        layout=f"panels-v1/{block_size}/fused: float32 by FMA",
        dtype="torch.float32",
        block_size=block_size,
        block_bytes=2 * _NUM_CELLS * _HEAD_DIM * block_size * 4,
        head_dim=_HEAD_DIM,
    )
    return layout._replace(**fields)


def payload_of(layout: PrefixLayout, key: bytes, parent: bytes = b"") -> bytes:
    """Return bytes that follow from a block's tokens and what is before it."""
    raw, seed = b"", blake2b(parent + key).digest()
    while len(raw) < layout.block_bytes:
        seed = blake2b(seed).digest()
        raw += seed
    return raw[: layout.block_bytes]


def quiet(_done: int, _total: int) -> None:
    """Report to no one."""


def folder_of(
    folder: Path, layout: PrefixLayout, tokens: Sequence[int] = TOKENS, *, num: int | None = None, **whose: str
) -> Path:
    """Return a cache folder that holds the first ``num`` blocks of a prompt, all of them if it is not given."""
    root = layout.root(**whose)
    names = names_behind(root, root, array("i", tokens).tobytes(), layout.frames.key_bytes)
    store = DiskStore(folder, LIMIT, layout.frames, label=layout.label)
    for name in names[:num]:
        payload = payload_of(layout, name.key, name.parent)
        store.put([Put(name, memoryview(payload), checksum_of(payload))])
    store.close()
    return folder


def exported(tmp_path: Path, layout: PrefixLayout, tokens: Sequence[int] = TOKENS, **whose: str) -> Path:
    """Return the file of a prompt's blocks."""
    folder = folder_of(tmp_path / "exported from", layout, tokens, **whose)
    file = tmp_path / "prefix.kv"
    export_prefix(folder, file, WantedPrefix(layout, layout.root(**whose), tokens), quiet)
    return file
