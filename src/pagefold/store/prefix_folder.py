"""A known prefix out of a cache folder into a file, and out of a file into a folder."""

from __future__ import annotations

import contextlib
from array import array
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError, PrefixMismatchError
from pagefold.kv.names import names_behind
from pagefold.kv.transfers import StoreError
from pagefold.store.cache_folder import layout_sizes, read_path
from pagefold.store.disk import DiskStore
from pagefold.store.prefix_file import writing_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pagefold.store.prefix_blocks import PrefixBlocks
    from pagefold.store.prefix_file import PrefixAbout
    from pagefold.store.prefix_layout import PrefixLayout

__all__ = ["WantedPrefix", "export_prefix", "import_prefix"]

_BATCH_BYTES, _BATCH = 2**26, 8
"""Of blocks that are put at once: as many as the smallest folder holds (see ``export.py``), and not too much memory."""


class WantedPrefix(NamedTuple):
    """A prompt whose blocks are wanted.

    Attributes:
        layout: of its blocks.
        namespace: digest of whose it is.
        token_ids: its tokens.
    """

    layout: PrefixLayout
    namespace: bytes
    token_ids: Sequence[int]


def export_prefix(
    folder: Path, file: Path, wanted: WantedPrefix, progress: Callable[[int, int], None], *, partial: bool = False
) -> PrefixAbout:
    """Write what a cache folder has of a prompt to ``file``; return what the file says. A server may be using it.

    Args:
        folder: a cache folder.
        file: replaced if it is there.
        wanted: the prompt.
        progress: is told how many blocks of how many were read.
        partial: whether its first blocks will do where the others are not there.

    Raises:
        ConfigError: it is no cache folder, does not have all the blocks, or none; or the file cannot be written.
    """
    layout, size = wanted.layout, wanted.layout.block_size
    packed = array("i", wanted.token_ids).tobytes()
    names = names_behind(wanted.namespace, wanted.namespace, packed, layout.frames.key_bytes)
    if not names:
        msg = f"The prompt has {len(wanted.token_ids)} tokens that stay the same, which do not fill a block of {size}."
        raise ConfigError(msg, remedy="Give a longer one.")
    progress(0, len(names))
    with writing_prefix(file, layout, wanted.namespace) as out:
        why = "the next block is not there"
        for frame, name in zip(read_path(folder, layout.digest, [name.digest for name in names]), names, strict=False):
            if frame.cause is not None or frame.name != name:
                why = f"block {out.num_blocks} is {str(frame.cause or 'other_block').replace('_', ' ')}"
                break
            out.add(name, frame.header, frame.payload)
            progress(out.num_blocks, len(names))
        if out.num_blocks < len(names) and not (partial and out.num_blocks):
            found, num_whole = out.num_blocks * size, len(names) * size
            if layout.digest not in layout_sizes(folder):
                why = f"it has no blocks of {layout.label} in this layout ({layout.dtype}, {layout.layout})"
            msg = f"{folder} has {found:,} of the prompt's {num_whole:,} tokens: {why}."
            raise ConfigError(msg, remedy=_how_to_have_it(found))
        return out.finish(len(wanted.token_ids))


def _how_to_have_it(num_found: int) -> str:
    partial = ", or export what is there with --partial" if num_found else ""
    return (
        "Warm it on a server that uses the folder, with --kv-write-policy write_through, or end that server; "
        f"give the model and the flags that it has{partial}."
    )


def import_prefix(blocks: PrefixBlocks, folder: Path, limit_bytes: int, progress: Callable[[int, int], None]) -> int:
    """Put a prefix into a cache folder; return how many of its blocks, from the first on, are in it then.

    A process that is killed meanwhile leaves a folder with fewer of them.

    Args:
        blocks: of a file that was checked.
        folder: a cache folder that nobody uses, or one that is to become one.
        limit_bytes: what the folder may take.
        progress: is told how many blocks of how many were put.

    Raises:
        ConfigError: the folder cannot be used, or the file is another by now.
        PrefixMismatchError: the folder has blocks of this layout that have another size.
    """
    layout = blocks.layout
    frames = layout.frames
    there = layout_sizes(folder).get(layout.digest, frames.sizes)
    if there != frames.sizes:
        msg = f"{folder} has blocks of this layout with {there[0]:,} bytes, and the file's have {frames.block_bytes:,}."
        raise PrefixMismatchError(msg, remedy="One of them is not what it says it is: verify the folder.")
    num_put = 0
    progress(0, len(blocks.names))
    with contextlib.closing(DiskStore(folder, limit_bytes, frames, label=layout.label)) as store:
        for batch in blocks.backwards(max(1, min(_BATCH, _BATCH_BYTES // frames.frame_bytes))):
            try:
                store.put(batch)
            except StoreError as error:
                msg = f"The cache folder {folder} cannot be written: {error}."
                raise ConfigError(msg, remedy="What was imported before stays. Make room on its disk.") from None
            num_put += len(batch)
            progress(num_put, len(blocks.names))
        return store.count(blocks.names)
