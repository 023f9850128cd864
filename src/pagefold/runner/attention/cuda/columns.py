"""Attention's columns in a card's memory: what the kernels read of a step, packed and copied in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefold.runner.to_device import ALIGNMENT

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs

__all__ = ["DeviceColumns", "plan_columns"]


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """The columns of :class:`~pagefold.runner.attention.inputs.AttentionInputs` on a device, and who decodes: int32.

    Attributes:
        query_starts: ``[S + 1]``.
        seq_of: ``[T]``: the sequence of each token.
        tables: ``[S, Hkv or 1, W]``, 1 where all heads share a table; W is a multiple of 16.
        lengths: ``[S, Hkv or 1]``.
        cells: ``[S or 1, L, Hkv]``.
        rows: ``[D]``: the sequences with one token, which decode.
        tiles: ``[N, 2]``: sequence and first token of each tile of the others' queries, the dearest first.
        residual_ids: ``[S]`` where blocks are sealed, else ``[0]``.
    """

    query_starts: torch.Tensor
    seq_of: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    cells: torch.Tensor
    rows: torch.Tensor
    tiles: torch.Tensor
    residual_ids: torch.Tensor


def plan_columns(inputs: AttentionInputs, tokens_a_tile: int) -> list[NDArray[Any]]:
    """Return the fields of a :class:`DeviceColumns`, in order, still on the host.

    Args:
        inputs: of the step.
        tokens_a_tile: tokens whose queries one program of prefilling takes.
    """
    starts = inputs.query_starts
    num_new = np.diff(starts)
    tables = _broadcast_as_one(inputs.tables, 1)
    tables = np.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % ALIGNMENT)))
    long = np.flatnonzero(num_new > 1)
    num_tiles = -(-num_new[long] // tokens_a_tile)
    seqs = np.repeat(long, num_tiles)
    index = np.arange(len(seqs)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    firsts = starts[seqs] + index * tokens_a_tile
    costs = inputs.lengths.max(1)[seqs] - (starts[seqs + 1] - firsts)  # entries that its tokens see, about
    order = np.argsort(-costs, kind="stable")
    return [
        starts,
        np.repeat(np.arange(inputs.num_seqs, dtype=np.int32), num_new),
        tables,
        _broadcast_as_one(inputs.lengths, 1),
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
