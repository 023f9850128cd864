"""How vLLM cuts layers into groups of equal blocks, and which blocks a request takes of each.

Written from ``vllm/v1/core/kv_cache_utils.py`` and ``vllm/v1/kv_cache_interface.py``. Ours cuts with less padding
(``kv/geometry.py``), and gives back what a window leaves behind sooner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.kv import CacheGroup, CacheLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import Codec, KeepRule, LayerKV

__all__ = ["vllm_layout"]


@dataclass(frozen=True, slots=True)
class _Group(CacheGroup):
    """A group as vLLM counts it: a request holds its window and all that a step writes behind it."""

    def num_blocks_for(self, num_tokens: int, num_new: int | None = None) -> int:
        """Return the most blocks that a request of so many tokens holds while steps write ``num_new`` of them."""
        window = self.keeps.window
        if window is None:
            return -(-num_tokens // self.block_size)
        if num_new is None:
            return CacheGroup.num_blocks_for(self, num_tokens)
        if self.keeps.is_chunked:
            return -(-min(window + num_new, num_tokens) // self.block_size)
        # A window seldom begins where a block does.
        return -(-min(window - 1 + num_new, num_tokens) // self.block_size) + 1


def vllm_layout(
    layers: Sequence[LayerKV], codec: Codec, *, block_size: int, state_bytes: int, even_ratio: float
) -> CacheLayout:
    """Cut ``layers`` into groups of as many layers as there are of the rarest kind; the last of a kind is padded.

    Where the commonest kind has less than ``even_ratio`` times as many layers as the rarest, groups have as many as
    that. Kinds with fewer bytes a token have more tokens a block. Where all layers keep equally much, there is one
    group.
    """
    codec = codec.in_blocks(block_size)
    sizes = [layer.bytes_per_token(codec) for layer in layers]
    kinds: dict[tuple[KeepRule, int], list[int]] = {}
    rules = {layer.keeps for layer in layers}
    for index, layer in enumerate(layers):
        size = 0 if len(rules) == 1 else sizes[index]
        kinds.setdefault((layer.keeps, size), []).append(index)
    counts = [len(indices) for indices in kinds.values()]
    group_size = max(counts) if max(counts) < even_ratio * min(counts) else min(counts)
    largest, groups = max(sizes), []
    for (keeps, size), indices in kinds.items():
        times = largest // size if size else 1
        num_groups = -(-len(indices) // group_size)
        for first in range(num_groups):
            dealt = tuple(indices[first::num_groups])
            heads = layers[dealt[0]].num_kv_heads
            groups.append(_Group(dealt, heads, block_size * times, keeps))
    if len(rules) == 1:
        bytes_per_block = block_size * sum(sizes)
    else:
        bytes_per_block = block_size * largest * max(len(group.layers) for group in groups)
    return CacheLayout(tuple(layers), codec, block_size, tuple(groups), bytes_per_block, state_bytes)
