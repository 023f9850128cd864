"""Attention's columns in a card's memory: what the kernels read of a step, packed and copied in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagefold.runner.to_device import ALIGNMENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.kv import KeepRule
    from pagefold.runner.attention.inputs import AttentionInputs, GroupInputs

__all__ = ["most_blocks_seen", "plan_columns", "seen_tables"]


def plan_columns(inputs: AttentionInputs, tokens_a_tile: int, block_size: int) -> list[NDArray[Any]]:
    """Return the fields of the step's ``DeviceColumns``, in the order of its ``of``, still on the host.

    Args:
        inputs: of the step.
        tokens_a_tile: tokens whose queries one program of prefilling takes.
        block_size: entries a block.
    """
    starts = inputs.query_starts
    num_new = np.diff(starts)
    long = np.flatnonzero(num_new > 1)
    num_tiles = -(-num_new[long] // tokens_a_tile)
    seqs = np.repeat(long, num_tiles)
    index = np.arange(len(seqs)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    firsts = starts[seqs] + index * tokens_a_tile
    longest = np.max([group.lengths.max(1) for group in inputs.groups], axis=0)
    costs = longest[seqs] - (starts[seqs + 1] - firsts)  # entries before its tokens: what sees most takes longest
    order = np.argsort(-costs, kind="stable")
    columns = [
        starts,
        np.repeat(np.arange(inputs.num_seqs, dtype=np.int32), num_new),
        _broadcast_as_one(inputs.cells, 0),
        np.flatnonzero(num_new == 1).astype(np.int32),
        np.stack([seqs, firsts], 1)[order].astype(np.int32),
        np.zeros(0, np.int32) if inputs.residual_ids is None else inputs.residual_ids,
    ]
    for group in inputs.groups:
        tables, first_blocks = seen_tables(group, num_new, block_size)
        tables = np.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % ALIGNMENT)))
        columns += [tables, _broadcast_as_one(group.lengths, 1), first_blocks]
    return columns


def seen_tables(
    group: GroupInputs, num_new: NDArray[Any], block_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return tables that begin with the first block that a token of the step sees, and which blocks those are, ``[S]``.

    Blocks before that may be held a little longer than they are seen: a card is not told of them.

    Args:
        group: of the step.
        num_new: tokens of each sequence, ``[S]``.
        block_size: entries a block.
    """
    tables, held = _broadcast_as_one(group.tables, 1), group.firsts // np.int32(block_size)
    if not group.keeps.trims:
        return tables, held
    first_queries = np.maximum(group.lengths.min(1) - num_new, 0)  # 0 of a row that only fills up a batch
    first_seen = np.fromiter(map(group.keeps.first_seen, first_queries.tolist()), np.int32, len(first_queries))
    seen = first_seen // np.int32(block_size)
    assert (held <= seen).all(), "a token sees what lies nowhere"
    width = max(1, int((-(-group.lengths.max(1) // block_size) - seen).max()))
    at = np.minimum((seen - held)[:, None] + np.arange(width), tables.shape[2] - 1)
    return np.take_along_axis(tables, at[:, None], 2), seen


def most_blocks_seen(keeps: KeepRule, max_len: int, block_size: int) -> int:
    """Return in how many blocks at most what one token sees lies, in sequences of up to ``max_len`` entries."""
    num_blocks = -(-max_len // block_size)
    if keeps.window is None:
        return num_blocks
    return min(num_blocks, -(-(keeps.window - 1) // block_size) + 1)


def _broadcast_as_one(array: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Return ``array`` with ``axis`` of length 1 where it is broadcast."""
    if array.strides[axis] == 0 and array.shape[axis] > 1:
        return array[:, :1] if axis else array[:1]
    return array
