"""What the core asks the edge to do. The core decides; the runner and the store carry these out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pagefold.kv.block import BlockId

__all__ = ["CopyOp"]


class CopyOp(NamedTuple):
    """Copy a whole block before the step's first write (copy-on-write).

    Only the first ``num_tokens`` positions of ``dst`` mean anything afterwards; a block is one contiguous copy, so the
    rest is copied too and overwritten later. Both blocks stay pinned until :meth:`KVCore.copies_done`.

    No copy of a step reads what another one writes: they may be made in any order, or all at once.
    """

    src: BlockId
    dst: BlockId
    num_tokens: int
