"""Uses: what is noted of published blocks when sequences go on from them, for policies and for whoever listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import BlocksReused, Emit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.block import Node
    from pagefold.kv.block_cache import BlockCache
    from pagefold.kv.sequence_cache import SequenceCache

__all__ = ["Uses"]


class Uses:
    """Notes on nodes: when they were used, how often, and whether they will be again.

    Args:
        blocks: of the device.
        emit: where events go.
    """

    def __init__(self, blocks: BlockCache, emit: Emit) -> None:
        self._blocks = blocks
        self._emit = emit

    def note(self, nodes: list[Node]) -> None:
        """Note that a sequence goes on from ``nodes``, of which there are some, and holds their blocks."""
        tick, now_s = self._blocks.tick, self._blocks.now_s
        gaps: dict[float, int] = {}
        used_s, num_alike = nodes[0].used_s, 0  # blocks of a path were mostly used together
        for node in nodes:
            node.last_used = tick
            node.num_hits += 1
            if node.used_s != used_s:
                gaps[now_s - used_s] = gaps.get(now_s - used_s, 0) + num_alike
                used_s, num_alike = node.used_s, 0
            num_alike += 1
            node.used_s = now_s
        gaps[now_s - used_s] = gaps.get(now_s - used_s, 0) + num_alike
        self._emit(BlocksReused(gaps))
        self._blocks.update_evictable(nodes[-1])
        self._blocks.policy.on_hit(nodes)

    def note_part(self, node: Node) -> None:
        """Note that a sequence goes on from a part of ``node``, which it copies: policies are not told of it."""
        now_s = self._blocks.now_s
        node.last_used = self._blocks.tick
        node.num_hits += 1
        self._emit(BlocksReused({now_s - node.used_s: 1}))
        node.used_s = now_s

    @staticmethod
    def hint(cache: SequenceCache, will_be_reused: Iterable[bool]) -> None:
        """Say of the first blocks of ``cache`` whether they will be used again; call it before releasing the cache.

        Policies may heed it, as far as hints have proved right; nothing else does. It holds until the next user's hint.
        """
        path: list[Node] = []
        node = cache.tail
        while node is not None and node.blocks:
            path.append(node)
            node = node.parent
        for one, hint in zip(reversed(path), will_be_reused, strict=False):
            one.reuse_hint = hint
