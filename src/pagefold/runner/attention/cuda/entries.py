"""Which entries of a sequence a token sees, and where its table would begin if it had all of them: Triton's part.

A group that keeps a window has given back what left it, so tables begin with a later block than the first; kernels
count entries from the sequence's first one all the same. With a group that keeps all, nothing of this is compiled.
"""

import triton
import triton.language as tl

__all__ = ["first_seen", "table_of"]


@triton.jit
def first_seen(
    entry,  # int32, of any shape; at least 0
    window,
    IS_CHUNKED: tl.constexpr,
):
    """Return the first entry that ``entry`` sees; see :class:`~pagefold.kv.keep.KeepRule`."""
    if IS_CHUNKED:
        return entry - entry % window
    else:  # noqa: RET505 - Triton compiles one of two branches, not what follows a return
        return tl.maximum(entry + 1 - window, 0)


@triton.jit
def table_of(
    tables,  # pointer to int32 [S, Hkv, W]
    first_blocks,  # pointer to int32 [S] (with HAS_WINDOW only)
    seq,
    head,  # seq and head have shapes that broadcast
    table_stride_s,
    table_stride_h,
    HAS_WINDOW: tl.constexpr,
):
    """Return a pointer to which adding ``entry // BLOCK_SIZE`` gives the id of that entry's block, if it is held."""
    table = tables + seq.to(tl.int64) * table_stride_s + head * table_stride_h
    if HAS_WINDOW:
        table -= tl.load(first_blocks + seq)
    return table
