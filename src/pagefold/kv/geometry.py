"""How many bytes KV takes: computed once, here, for the pool, the planner and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pagefold.kv.table import num_blocks_for

__all__ = ["CacheGroup", "KVGeometry"]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A set of cells whose KV lies together in one block. A cell is the K and V of one (layer, KV head).

    Attributes:
        layers: the layers whose cells it holds, ascending.
        num_kv_heads: KV heads of each of them.
        block_size: tokens a block. Groups with fewer cells have more tokens, so that blocks stay equal in bytes.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    block_size: int

    @property
    def num_cells(self) -> int:
        """Cells a block."""
        return len(self.layers) * self.num_kv_heads

    def cell(self, layer: int, kv_head: int) -> int:
        """Return the index of the cell of (``layer``, ``kv_head``) inside a block of this group.

        Raises:
            ValueError: the group does not hold that layer.
        """
        return self.layers.index(layer) * self.num_kv_heads + kv_head


@dataclass(frozen=True)
class KVGeometry:
    """Shape of a model's KV, one group with all cells: MHA, GQA and MQA without windows.

    Bytes a token are ``2 * num_layers * num_kv_heads * head_dim * element_bytes``: K and V of every cell. With as many
    KV heads as query heads this is MHA, with one MQA, between them GQA; query heads do not enter.

    Attributes:
        num_layers, num_kv_heads, head_dim: of the model.
        element_bytes: bytes of one element of K or V.
        block_size: tokens a block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int = 16

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups: one, which holds every cell."""
        return (CacheGroup(tuple(range(self.num_layers)), self.num_kv_heads, self.block_size),)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell in one block: K and V of ``block_size`` tokens."""
        return 2 * self.block_size * self.head_dim * self.element_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: the same for every group."""
        return self.groups[0].num_cells * self.cell_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in a full block."""
        return self.bytes_per_block // self.block_size

    def num_blocks(self, budget_bytes: int) -> int:
        """How many whole blocks a budget holds."""
        return budget_bytes // self.bytes_per_block

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks a sequence of ``num_tokens`` needs."""
        return num_blocks_for(num_tokens, self.block_size)
