"""Attention's columns in a card's memory: what the kernels read of a step, packed and copied in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs

__all__ = ["DeviceColumns", "pack", "plan_columns"]

_ALIGNMENT = 16
"""Bytes. Kernels are compiled for pointers and widths that are aligned so, once."""


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
    """

    query_starts: torch.Tensor
    seq_of: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    cells: torch.Tensor
    rows: torch.Tensor
    tiles: torch.Tensor


def plan_columns(inputs: AttentionInputs, tokens_a_tile: int) -> list[NDArray[Any]]:
    """Return the fields of a :class:`DeviceColumns`, in order, still on the host.

    Args:
        inputs: of the step.
        tokens_a_tile: tokens whose queries one program of prefilling takes.
    """
    starts = inputs.query_starts
    num_new = np.diff(starts)
    tables = _broadcast_as_one(inputs.tables, 1)
    tables = np.pad(tables, ((0, 0), (0, 0), (0, -tables.shape[2] % _ALIGNMENT)))
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
    ]


def pack(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in one piece; return them there, each aligned to 16 bytes.

    On a card the copy does not wait for what the card is doing: it goes through memory that is pinned.
    """
    sizes = [array.nbytes + -array.nbytes % _ALIGNMENT for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    view, offset = host.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        view[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += size
    there = host.to(device, non_blocking=True)
    pieces = torch.split(there, sizes)
    return [
        piece[: array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for piece, array in zip(pieces, arrays, strict=True)
    ]


_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _broadcast_as_one(array: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Return ``array`` with ``axis`` of length 1 where it is broadcast."""
    if array.strides[axis] == 0 and array.shape[axis] > 1:
        return array[:, :1] if axis else array[:1]
    return array
