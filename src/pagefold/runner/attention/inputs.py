"""AttentionInputs: the general signature of attention over blocks.

For every sequence and KV head: a block table, a length, and for every layer the cell inside a block. In the plain case
they are the same for all heads and are broadcast (stride 0); compressed requests will differ by head, with no change
here or in the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from pagefold.runner.attention.device_columns import DeviceColumns
    from pagefold.runner.slab import AnySlab

__all__ = ["AttentionBackend", "AttentionInputs"]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the KV of each sequence of a step lies. T tokens, S sequences, Hkv KV heads, L layers.

    Query token ``i`` of the ``n`` that sequence ``s`` has in this step sees, for head ``h``, the first
    ``lengths[s, h] - (n - 1 - i)`` entries, and its own K and V are the last of those.

    Attributes:
        query_starts: int32 ``[S + 1]``: sequence ``s`` has the step's tokens ``[query_starts[s], query_starts[s+1])``.
        tables: int32 ``[S, Hkv, max_blocks]``: block ids.
        lengths: int32 ``[S, Hkv]``: entries after this step's writes.
        cells: int32 ``[S, L, Hkv]``: index of the cell inside a block.
        residual_ids: int32 ``[S]``: where each sequence has its unsealed block, of a slab that seals blocks. Then what
            a sequence has in this step begins with a block, or ends with the one that it begins in.
        on_device: the same where a card reads it, if it is there already.
    """

    query_starts: NDArray[np.int32]
    tables: NDArray[np.int32]
    lengths: NDArray[np.int32]
    cells: NDArray[np.int32]
    residual_ids: NDArray[np.int32] | None = None
    on_device: DeviceColumns | None = None

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.query_starts) - 1


class AttentionBackend(Protocol):
    """One implementation of attention over blocks. All implementations give the same result up to rounding."""

    def __call__(  # noqa: PLR0913, PLR0917 - the operands of the op
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slab: AnySlab,
        inputs: AttentionInputs,
        layer: int,
        scale: float,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Write this step's K and V into their blocks, then attend causally over the blocks.

        All writes of the layer come before any read, so a sequence may lean on a block that an earlier sequence of
        the same step writes.

        Args:
            query: ``[T, H, D]``; heads ``[h * G, (h + 1) * G)`` share KV head ``h``, with ``G = H // Hkv``.
            key: ``[T, Hkv, D]``, rope already applied.
            value: ``[T, Hkv, D]``.
            slab: the blocks; written in place.
            inputs: where everything lies.
            layer: which layer this is.
            scale: factor of the scores.
            softcap: scores become ``softcap * tanh(score / softcap)`` before softmax; 0 leaves them as they are.

        Returns:
            ``[T, H, D]``, dtype of ``query``.
        """
