"""How many bytes KV takes: computed once, here, for the pool, the planner and the metrics.

A model's layers may keep different things: all KV heads of every token, those of the last tokens only (a sliding
window), a latent vector (MLA), nothing at all (they read another layer's), or a state of constant size. What they
keep of a token is a :class:`LayerKV`; :func:`lay_out` cuts the layers into cache groups whose blocks are equal in
bytes, so that one free list serves all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from pagefold.kv.codec import Codec, plain_codec
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.table import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CacheGroup", "CacheLayout", "KVGeometry", "LayerKV", "lay_out"]

_LINE_BYTES = 64
_MAX_PADDING = 1 / 16
"""Share of a layout that may be padding, so that groups are few: a table of blocks for each group is kept for each
sequence."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer keeps of a token.

    Attributes:
        num_kv_heads: KV heads; 1 for a latent vector, which all heads read.
        key_dim: elements of K of one head; for a latent vector all of it.
        value_dim: elements of V of one head; 0 for a latent vector.
        keeps: which tokens it keeps.
        codec: how it is stored, where that is not as most layers are.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    keeps: KeepRule = KEEP_ALL
    codec: Codec | None = None

    def bytes_per_token(self, codec: Codec) -> int:
        """Return the bytes that a token takes here; ``codec`` is of layers that have none of their own."""
        codec = self.codec or codec
        of_heads = self.num_kv_heads * (codec.key_bytes(self.key_dim) + codec.value_bytes(self.value_dim))
        return of_heads + self.mark_bytes_per_token

    @property
    def mark_bytes_per_token(self) -> int:
        """Bytes of a token's marks: a bit for each KV head, whether its entry is kept when its chunk is packed."""
        return -(-self.num_kv_heads // 8) if self.keeps.packs else 0

    def residual_bytes_per_token(self, codec: Codec) -> int:
        """Return the bytes that a token takes here until its block is sealed; 0 where blocks are not sealed."""
        return self.num_kv_heads * (self.codec or codec).residual_bytes(self.key_dim + self.value_dim)

    def num_tokens(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` it keeps at most."""
        window = self.keeps.window
        return num_tokens if window is None or self.keeps.packs else min(num_tokens, self.keeps.num_sinks + window)

    def shard(self, tensor_parallel_size: int) -> LayerKV:
        """Return what one of so many devices keeps: its share of the heads, and at least one of them."""
        return replace(self, num_kv_heads=max(1, -(-self.num_kv_heads // tensor_parallel_size)))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A set of cells whose KV lies together in one block. A cell is the K and V of one (layer, KV head).

    Attributes:
        layers: the layers whose cells it holds, ascending.
        num_kv_heads: KV heads of each of them.
        block_size: tokens a block. Groups with fewer cells have more tokens, so that blocks stay equal in bytes.
        keeps: which tokens its layers keep.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    block_size: int
    keeps: KeepRule = KEEP_ALL

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

    def num_blocks_for(self, num_tokens: int, num_new: int | None = None) -> int:
        """Return how many blocks a sequence of ``num_tokens`` holds at once in this group.

        The last ``window`` tokens seldom begin where a block does, so they lie in one block more than they fill.

        Args:
            num_tokens: of the sequence.
            num_new: how many of them our own steps write at a time, beside what is kept; None for what any engine
                needs at least.
        """
        keeps = self.keeps
        if num_new is not None:
            return keeps.num_blocks_for(num_tokens, num_new, self.block_size)
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        if keeps.window is None or keeps.packs:
            return num_blocks
        if keeps.is_chunked:
            return min(num_blocks, num_blocks_for(keeps.window, self.block_size))
        num_kept = num_blocks_for(keeps.window - 1, self.block_size) + 1
        return min(num_blocks, self.keeps.num_sink_blocks(self.block_size) + num_kept)


@dataclass(frozen=True)
class CacheLayout:
    """Layers cut into groups whose blocks all have the same number of bytes.

    What layers of a group take may be less than that: the rest of its blocks is padding, and counts like all else.

    Attributes:
        layers: what they keep of a token.
        codec: how it is stored.
        block_size: tokens a block of the groups with the most bytes a token; other groups have more.
        groups: that the layers are cut into.
        bytes_per_block: of every group.
        state_bytes: bytes of constant size for each sequence, beside tokens: of state-space layers. They take whole
            blocks.
    """

    layers: tuple[LayerKV, ...]
    codec: Codec
    block_size: int
    groups: tuple[CacheGroup, ...]
    bytes_per_block: int
    state_bytes: int = 0

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers together."""
        return sum(layer.bytes_per_token(self.codec) for layer in self.layers)

    @cached_property
    def lasting_bytes_per_token(self) -> int:
        """The part of ``bytes_per_token`` that stays when the windows have passed; all may, where chunks are packed."""
        lasting = (layer for layer in self.layers if layer.keeps.window is None or layer.keeps.packs)
        return sum(layer.bytes_per_token(self.codec) for layer in lasting)

    @cached_property
    def residual_bytes(self) -> int:
        """Bytes that a running sequence has beside its blocks: its unsealed block, of every layer, in 16 bit."""
        return self.block_size * sum(layer.residual_bytes_per_token(self.codec) for layer in self.layers)

    @property
    def num_state_blocks(self) -> int:
        """Blocks that the state of a sequence takes."""
        return -(-self.state_bytes // self.bytes_per_block)

    def num_bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that a sequence needs, before rounding to blocks: what the formula says."""
        kept = sum(layer.num_tokens(num_tokens) * layer.bytes_per_token(self.codec) for layer in self.layers)
        return kept + self.state_bytes

    def num_blocks(self, budget_bytes: int) -> int:
        """Return how many whole blocks a budget holds."""
        return max(0, budget_bytes) // self.bytes_per_block

    def num_blocks_for(self, num_tokens: int, num_new: int | None = None) -> int:
        """Return how many blocks a sequence of ``num_tokens`` holds, of all groups and its state.

        Arguments are those of :meth:`CacheGroup.num_blocks_for`.
        """
        return self.num_state_blocks + sum(group.num_blocks_for(num_tokens, num_new) for group in self.groups)

    def longest_in(self, num_blocks: int, at_most: int, num_new: int | None = None) -> int:
        """Return the most tokens, up to ``at_most``, of a sequence that ``num_blocks`` hold; 0 if they hold none."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_blocks_for(middle, num_new) <= num_blocks else (low, middle - 1)
        return low


def lay_out(
    layers: Sequence[LayerKV], codec: Codec, *, block_size: int = 16, state_bytes: int = 0, max_len: int | None = None
) -> CacheLayout:
    """Cut ``layers`` into groups of equal blocks.

    Layers of one kind (same shape, window, sinks) make groups of as many layers as there are of the rarest kind, or of
    fewer where that would leave more than a sixteenth of the memory as padding beyond what no cut avoids (62 layers of
    which 10 are full make 11 groups of 6, not 7 of 10). Layers whose older chunks are packed are one group, if they are
    the rarest. Kinds with fewer bytes a token have more tokens a block. A
    layer with a codec of its own is of its kind all the same, and as many times as large as that codec makes it: a
    block that holds 5 layers in 16 bit holds 9 or 10 in 8. All blocks have the bytes of the largest group's; what is
    left in those of others is padding.

    Args:
        layers: what they keep of a token; those that keep nothing are left out.
        codec: how it is stored.
        block_size: tokens a block of the kind with the most bytes a token.
        state_bytes: bytes of constant size for each sequence.
        max_len: the longest sequence: a window that none passes, beside the sinks, is no window.
    """
    codec = codec.in_blocks(block_size)
    kept = [
        replace(layer, keeps=KEEP_ALL) if max_len is not None and _is_never_passed(layer.keeps, max_len) else layer
        for layer in layers
    ]
    kinds: dict[LayerKV, list[int]] = {}
    for index, layer in enumerate(kept):
        kinds.setdefault(replace(layer, codec=None), []).append(index)
    layer_bytes = [layer.bytes_per_token(codec) for layer in kept]
    kind_bytes = {kind: kind.bytes_per_token(codec) for kind in kinds}
    most = max(kind_bytes.values())
    # More tokens where there are fewer bytes: powers of two, so that block sizes stay what kernels like.
    times = {kind: 1 << ((most // num_bytes).bit_length() - 1) for kind, num_bytes in kind_bytes.items()}
    sizes = {
        index: Fraction(layer_bytes[index], kind_bytes[kind]) for kind, indices in kinds.items() for index in indices
    }

    def cut(room: Fraction) -> list[CacheGroup]:
        return [
            CacheGroup(dealt, kind.num_kv_heads, block_size * times[kind], kind.keeps)
            for kind, indices in kinds.items()
            for dealt in _deal(indices, sizes, room)
        ]

    def used(groups: list[CacheGroup]) -> list[int]:
        return [group.block_size * sum(layer_bytes[layer] for layer in group.layers) for group in groups]

    def padding(groups: list[CacheGroup]) -> float:
        return 1 - sum(used(groups)) / (len(groups) * max(used(groups)))

    cuts = [cut(room) for room in _rooms(list(kinds.values()), sizes)]
    in_one = [groups for groups in cuts if sum(group.keeps.packs for group in groups) <= 1]
    cuts = in_one or cuts  # what is packed lies in one group, whatever is padding then
    least = min(map(padding, cuts))
    groups = next(groups for groups in cuts if padding(groups) <= least + _MAX_PADDING)
    bytes_per_block = max(used(groups))
    if any(group.keeps.packs for group in groups):  # marks are few: blocks begin where cache lines do all the same
        bytes_per_block += -bytes_per_block % _LINE_BYTES
    return CacheLayout(tuple(kept), codec, block_size, tuple(groups), bytes_per_block, state_bytes)


def _is_never_passed(keeps: KeepRule, max_len: int) -> bool:
    """Whether no sequence of at most ``max_len`` tokens is longer than what is kept of it."""
    return keeps.window is not None and not keeps.packs and keeps.num_sinks + keeps.window >= max_len


def _rooms(kinds: list[list[int]], sizes: dict[int, Fraction]) -> list[Fraction]:
    """Return how much a group may hold, the most first: what some layers take, up to all of the rarest kind.

    Args:
        kinds: the layers of each kind.
        sizes: of each layer; 1 where it has the codec that most have.
    """
    if len(kinds) == 1:
        return [sum(sizes.values(), Fraction())]
    largest = max(sizes.values())
    most = largest * min(map(len, kinds))
    rooms = {Fraction()}
    for size, count in Counter(sizes.values()).items():
        rooms = {room + size * num for room in rooms for num in range(count + 1) if room + size * num <= most}
    return sorted((room for room in rooms if room >= largest), reverse=True)


def _deal(layers: list[int], sizes: dict[int, Fraction], room: Fraction) -> list[tuple[int, ...]]:
    """Deal layers of one kind to groups that hold ``room``, the largest first: each to the first that has room left."""
    dealt: list[list[int]] = []
    left: list[Fraction] = []
    for layer in sorted(layers, key=lambda layer: -sizes[layer]):
        at = next((at for at, free in enumerate(left) if free >= sizes[layer]), len(dealt))
        if at == len(dealt):
            dealt.append([])
            left.append(room)
        dealt[at].append(layer)
        left[at] -= sizes[layer]
    return [tuple(sorted(group)) for group in dealt]


@dataclass(frozen=True)
class KVGeometry:
    """Shape of a model's KV: MHA, GQA and MQA, with or without windows. What a slab is made of.

    Bytes a token are, of every cell, those of a K and of a V in the cell's codec; without one
    ``2 * num_layers * num_kv_heads * head_dim * element_bytes``. With as many KV heads as query heads this is MHA, with
    one MQA, between them GQA; query heads do not enter.

    Attributes:
        num_layers, num_kv_heads, head_dim: of the model.
        element_bytes: bytes of one element of K or V, where there is no codec.
        block_size: tokens a block.
        codec: how K and V are stored; None for as they are computed.
        skip_layers: layers that are stored by ``skip_codec`` instead.
        skip_codec: how these are stored; None for as they are computed.
        keeps: what each layer keeps; empty where all keep all. Then there is one group, which holds every cell.
        sources: the layer whose K and V each layer reads; empty where each has its own. Layers that read another's come
            behind all that have their own, take no bytes, and their cells are those of that other layer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int = 16
    codec: Codec | None = None
    skip_layers: tuple[int, ...] = ()
    skip_codec: Codec | None = None
    keeps: tuple[KeepRule, ...] = ()
    sources: tuple[int, ...] = ()

    @cached_property
    def num_own_layers(self) -> int:
        """Layers that have K and V of their own: the first so many."""
        if not self.sources:
            return self.num_layers
        num_own = max(self.sources) + 1
        assert all(source == layer for layer, source in enumerate(self.sources[:num_own])), "others read between them"
        return num_own

    @property
    def num_cells(self) -> int:
        """Cells of all layers, each counted once."""
        return self.num_own_layers * self.num_kv_heads

    def source_of(self, layer: int) -> int:
        """Return the layer whose K and V a layer reads: mostly itself."""
        return self.sources[layer] if self.sources else layer

    def codec_of(self, layer: int) -> Codec:
        """Return how the K and V are stored that a layer reads."""
        codec = self.skip_codec if self.source_of(layer) in self.skip_layers else self.codec
        return (codec or plain_codec(self.element_bytes)).in_blocks(self.block_size)

    def cell_bytes(self, layer: int) -> int:
        """Return the bytes of one of a layer's cells in one block: K and V of ``block_size`` tokens."""
        codec = self.codec_of(layer)
        return self.block_size * (codec.key_bytes(self.head_dim) + codec.value_bytes(self.head_dim))

    @cached_property
    def layer_begins(self) -> tuple[int, ...]:
        """Where a layer's cells begin in a block of its group, in bytes: behind those of the layer before it.

        Of layers that have their own.
        """
        begins: dict[int, int] = {}
        for group in self.groups:
            sizes = (self.num_kv_heads * self.cell_bytes(layer) for layer in group.layers[:-1])
            begins.update(zip(group.layers, accumulate(sizes, initial=0), strict=True))
        return tuple(begins[layer] for layer in range(self.num_own_layers))

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """Where they end there, in bytes. Of several groups, layers lie in the same places of their own blocks."""
        sizes = (self.num_kv_heads * self.cell_bytes(layer) for layer in range(self.num_own_layers))
        return tuple(begin + size for begin, size in zip(self.layer_begins, sizes, strict=True))

    @cached_property
    def mark_begin(self) -> int:
        """Where marks begin in a block of the group that packs, in bytes: behind its cells; 0 where none packs."""
        return 0 if self.packing is None else self.layer_ends[self.packing.layers[-1]]

    @property
    def packing(self) -> CacheGroup | None:
        """The group whose older chunks are packed; None where there is none."""
        return next((group for group in self.groups if group.keeps.packs), None)

    @cached_property
    def group_of_layer(self) -> tuple[int, ...]:
        """The index of each layer's group."""
        found = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found[self.source_of(layer)] for layer in range(self.num_layers))

    def cell(self, layer: int, kv_head: int) -> int:
        """Return the number by which a slab knows a cell.

        Without a codec all cells are alike, and it is the cell's place in a block of its group. Cells of codes differ
        from layer to layer, so each has its own number: those of one layer after those of another.
        """
        layer = self.source_of(layer)
        if self.codec is None:
            return self.groups[self.group_of_layer[layer]].cell(layer, kv_head)
        return layer * self.num_kv_heads + kv_head

    @cached_property
    def layout(self) -> CacheLayout:
        """Layers that keep the same in groups of their own, also where their codecs differ: one where all keep all."""
        codec = (self.codec or plain_codec(self.element_bytes)).in_blocks(self.block_size)
        keeps = self.keeps or (KEEP_ALL,) * self.num_layers
        layers = [
            LayerKV(
                self.num_kv_heads,
                self.head_dim,
                self.head_dim,
                keeps=keep,
                codec=self.codec_of(layer) if layer in self.skip_layers else None,
            )
            for layer, keep in enumerate(keeps[: self.num_own_layers])
        ]
        return lay_out(layers, codec, block_size=self.block_size)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups."""
        return self.layout.groups

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block."""
        return self.layout.bytes_per_block

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in a full block."""
        return self.layout.bytes_per_token

    @property
    def residual_bytes(self) -> int:
        """Bytes of a running sequence's unsealed block, in 16 bit; 0 where blocks are not sealed."""
        return self.layout.residual_bytes

    def num_blocks(self, budget_bytes: int) -> int:
        """How many whole blocks a budget holds."""
        return self.layout.num_blocks(budget_bytes)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks a sequence of ``num_tokens`` needs."""
        return self.layout.num_blocks_for(num_tokens)
