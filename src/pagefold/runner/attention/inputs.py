"""AttentionInputs: the general signature of attention over blocks.

For every cache group, sequence and KV head: a block table and a length; for every layer the cell inside a block of its
group. In the plain case there is one group, tables and lengths are the same for all heads and are broadcast (stride 0);
compressed requests will differ by head, with no change here or in the kernels.

Attention knows entries: the numbers of what a group has of a sequence, in order. It is never told positions, which say
where a token stands in its text: those are rope's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pagefold.kv import KEEP_ALL, KeepRule

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from pagefold.runner.attention.device_columns import DeviceColumns
    from pagefold.runner.attention.packed import PackedInputs
    from pagefold.runner.slab import AnySlab

__all__ = ["AttentionBackend", "AttentionInputs", "GroupInputs"]

_NO_BLOCKS = np.zeros((0, 0, 0), np.int32)


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Where one cache group has the entries of each sequence of a step. S sequences, Hkv KV heads.

    Query token ``i`` of the ``n`` that sequence ``s`` has in this step is, for head ``h``, entry
    ``q = lengths[s, h] - (n - i)``. It sees the entries from ``keeps.first_seen(q)`` to ``q``, its own. Entry ``e``
    lies in block ``tables[s, h, (e - firsts[s]) // block_size]``. What is before ``firsts[s]`` lies nowhere: no token
    of the step sees it.

    Where ``keeps`` has sink tokens, it also sees those of the first ``keeps.num_sinks`` entries that are before
    ``keeps.first_seen(q)``, by another query: see :class:`AttentionBackend`. Entry ``e`` of these lies in block
    ``sink_tables[s, h, e // block_size]``.

    Attributes:
        tables: int32 ``[S, Hkv, max_blocks]``: block ids.
        lengths: int32 ``[S, Hkv]``: entries after this step's writes, counted from the sequence's first one, also where
            the first of them are held no more.
        firsts: int32 ``[S]``: the entry that each sequence's tables begin with, a multiple of the block size.
        keeps: which entries a token sees.
        sink_tables: int32 ``[S, Hkv, blocks]``: ids of the first blocks; of none where no rule has sink tokens.
    """

    tables: NDArray[np.int32]
    lengths: NDArray[np.int32]
    firsts: NDArray[np.int32]
    keeps: KeepRule = KEEP_ALL
    sink_tables: NDArray[np.int32] = field(default_factory=lambda: _NO_BLOCKS)

    def first_seen(self, first_query: int, num_queries: int) -> NDArray[np.int64]:
        """Return the first entry that each of ``num_queries`` entries sees, the first of which is ``first_query``."""
        queries = range(first_query, first_query + num_queries)
        return np.fromiter(map(self.keeps.first_seen, queries), np.int64, num_queries)

    def sink_blocks(self, seq: int) -> NDArray[np.int32]:
        """Return the blocks of a sequence's sink tokens, ``[Hkv, blocks]``: of no blocks where none are kept."""
        blocks: NDArray[np.int32] = self.sink_tables[seq] if self.keeps.num_sinks else self.tables[seq, :, :0]
        return blocks


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the KV of each sequence of a step lies. T tokens, S sequences, Hkv KV heads, L layers.

    Attributes:
        query_starts: int32 ``[S + 1]``: sequence ``s`` has the step's tokens ``[query_starts[s], query_starts[s+1])``.
        groups: the entries of each cache group.
        group_of_layer: which of them each layer reads and writes, ``[L]``.
        cells: int32 ``[S, L, Hkv]``: index of each layer's cell inside a block of its own group.
        residual_ids: int32 ``[S]``: where each sequence has its unsealed block, of a slab that seals blocks. Then what
            a sequence has in this step begins with a block, or ends with the one that it begins in.
        on_device: the same where a card reads it, if it is there already.
        sources: the layer whose K and V each layer reads; empty where each has its own.
        packed: what was kept of older chunks, of the group that packs; None where none does.
    """

    query_starts: NDArray[np.int32]
    groups: tuple[GroupInputs, ...]
    group_of_layer: tuple[int, ...]
    cells: NDArray[np.int32]
    residual_ids: NDArray[np.int32] | None = None
    on_device: DeviceColumns | None = None
    sources: tuple[int, ...] = ()
    packed: PackedInputs | None = None

    @classmethod
    def of_one_group(
        cls,
        query_starts: NDArray[np.int32],
        tables: NDArray[np.int32],
        lengths: NDArray[np.int32],
        cells: NDArray[np.int32],
        residual_ids: NDArray[np.int32] | None = None,
    ) -> AttentionInputs:
        """Return the inputs of a model whose layers are one group that keeps all."""
        group = GroupInputs(tables, lengths, np.zeros(len(tables), np.int32))
        return cls(query_starts, (group,), (0,) * cells.shape[1], cells, residual_ids)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.query_starts) - 1

    @property
    def last_own_layer(self) -> int:
        """The last layer that has K and V of its own."""
        return max(self.sources) if self.sources else self.cells.shape[1] - 1

    def source_of(self, layer: int) -> int:
        """Return the layer whose K and V a layer reads: mostly itself."""
        return self.sources[layer] if self.sources else layer

    def group_of(self, layer: int) -> GroupInputs:
        """Return the entries of a layer's group."""
        return self.groups[self.group_of_layer[layer]]


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
        sinks: torch.Tensor | None = None,
        turned: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's K and V into their blocks, then attend causally over the blocks.

        All writes of the layer come before any read, so a sequence may lean on a block that an earlier sequence of
        the same step writes. A layer that reads what another one has written in the step brings no K and V.

        Args:
            query: ``[T, H, D]``; heads ``[h * G, (h + 1) * G)`` share KV head ``h``, with ``G = H // Hkv``.
            key: ``[T, Hkv, D]``, rope already applied; or ``[0, Hkv, D]``: then nothing is written.
            value: as many.
            slab: the blocks; written in place.
            inputs: where everything lies.
            layer: which layer this is.
            scale: factor of the scores.
            softcap: scores become ``softcap * tanh(score / softcap)`` before softmax; 0 leaves them as they are.
            sinks: ``[H]``: of each head the score of a sink, neither scaled nor capped, which has its share of the
                softmax and no value; None for none.
            turned: ``[T, H, D]``: the queries as they look at sink tokens, which lie nearer than they were written;
                None in a layer whose group has no sink tokens.

        Returns:
            ``[T, H, D]``, dtype of ``query``.
        """
