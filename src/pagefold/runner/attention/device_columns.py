"""DeviceColumns: where the KV of a step's sequences lies, in the memory of the card that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["DeviceColumns", "GroupColumns"]


@dataclass(frozen=True, slots=True)
class GroupColumns:
    """Where one cache group has the entries of each sequence: int32.

    Attributes:
        tables: ``[S, Hkv or 1, W]``, 1 where all heads share a table; W is a multiple of 16. They begin with the first
            block that a token of the step sees, whatever is held before it.
        lengths: ``[S, Hkv or 1]``.
        first_blocks: ``[S]``: which of a sequence's blocks its tables begin with.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    first_blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """The columns of :class:`~pagefold.runner.attention.inputs.AttentionInputs` on a device, and who decodes: int32.

    Which group a layer has and what that keeps is the same in every step: it stays on the host.

    Attributes:
        query_starts: ``[S + 1]``.
        seq_of: ``[T]``: the sequence of each token.
        cells: ``[S or 1, L, Hkv]``.
        rows: ``[D]``: the sequences with one token, which decode.
        tiles: ``[N, 2]``: sequence and first token of each tile of the others' queries, the dearest first.
        residual_ids: ``[S]`` where blocks are sealed, else ``[0]``.
        groups: what each cache group has.
    """

    query_starts: torch.Tensor
    seq_of: torch.Tensor
    cells: torch.Tensor
    rows: torch.Tensor
    tiles: torch.Tensor
    residual_ids: torch.Tensor
    groups: tuple[GroupColumns, ...]

    @classmethod
    def of(cls, columns: Sequence[torch.Tensor]) -> DeviceColumns:
        """Return them from one list: all but the groups, in order, then the three of each group."""
        query_starts, seq_of, cells, rows, tiles, residual_ids, *of_groups = columns
        groups = tuple(GroupColumns(*of_groups[at : at + 3]) for at in range(0, len(of_groups), 3))
        return cls(query_starts, seq_of, cells, rows, tiles, residual_ids, groups)
