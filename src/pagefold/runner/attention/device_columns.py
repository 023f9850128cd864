"""DeviceColumns: where the KV of a step's sequences lies, in the memory of the card that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceColumns"]


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """The columns of :class:`~pagefold.runner.attention.inputs.AttentionInputs` on a device, and who decodes: int32.

    Those of one cache group that keeps all: a card computes no others yet.

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
