"""Attention's columns in a card's memory: what the kernels read of a step, packed and copied in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pagefold.runner.to_device import ALIGNMENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs

__all__ = ["plan_columns"]


def plan_columns(inputs: AttentionInputs, tokens_a_tile: int) -> list[NDArray[Any]]:
    """Return the fields of the step's ``DeviceColumns``, in order, still on the host.

    Args:
        inputs: of the step.
        tokens_a_tile: tokens whose queries one program of prefilling takes.
    """
    starts, group = inputs.query_starts, inputs.only_group
    num_new = np.diff(starts)
    tables = _broadcast_as_one(group.tables, 1)
    tables = np.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % ALIGNMENT)))
    long = np.flatnonzero(num_new > 1)
    num_tiles = -(-num_new[long] // tokens_a_tile)
    seqs = np.repeat(long, num_tiles)
    index = np.arange(len(seqs)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    firsts = starts[seqs] + index * tokens_a_tile
    costs = group.lengths.max(1)[seqs] - (starts[seqs + 1] - firsts)  # entries that its tokens see, about
    order = np.argsort(-costs, kind="stable")
    return [
        starts,
        np.repeat(np.arange(inputs.num_seqs, dtype=np.int32), num_new),
        tables,
        _broadcast_as_one(group.lengths, 1),
        _broadcast_as_one(inputs.cells, 0),
        np.flatnonzero(num_new == 1).astype(np.int32),
        np.stack([seqs, firsts], 1)[order].astype(np.int32),
        np.zeros(0, np.int32) if inputs.residual_ids is None else inputs.residual_ids,
    ]


def _broadcast_as_one(array: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Return ``array`` with ``axis`` of length 1 where it is broadcast."""
    if array.strides[axis] == 0 and array.shape[axis] > 1:
        return array[:, :1] if axis else array[:1]
    return array
