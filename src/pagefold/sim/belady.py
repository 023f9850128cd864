"""Belady's rule: evict what is used again last. It knows the future, so it is a bound and no policy.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. With
bypass: what is used again later than all that is cached need not be cached at all.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BeladyCache", "next_uses"]

_Entry = tuple[int, int, int]


class BeladyCache:
    """A cache of blocks that evicts the one whose next use is farthest, the deeper one first where two are as far.

    Whoever uses a block uses those above it, so a block's next use is never before its parent's: this evicts leaves
    first without trying. A request takes no room while it runs, since only what is kept counts: an upper bound of what
    a server with that much memory could find.

    Args:
        num_blocks: how many it holds.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._next: dict[int, int] = {}  # cached block -> its next use
        self._heap: list[_Entry] = []  # (-next use, -depth, block); stale where _next says otherwise
        self.num_evictions = 0

    def use(self, path: Sequence[int], next_use: Sequence[int]) -> int:
        """Use the blocks of ``path``, from the first on; return how many of its first blocks were cached.

        Args:
            path: names of blocks.
            next_use: when each of the blocks is used again: from :func:`next_uses`.
        """
        cached = self._next
        num_hits = 0
        while num_hits < len(path) and path[num_hits] in cached:
            num_hits += 1
        for depth, block in enumerate(path):
            cached[block] = next_use[depth]
            heappush(self._heap, (-next_use[depth], -depth, block))
        while len(cached) > self._num_blocks:
            after, _, block = heappop(self._heap)
            if cached.get(block) == -after:
                del cached[block]
                self.num_evictions += 1
        if len(self._heap) > 4 * len(cached) + 64:  # mostly stale
            self._heap = [entry for entry in self._heap if cached.get(entry[2]) == -entry[0]]
            heapify(self._heap)
        return num_hits


def next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, of each block of each path, the index of the next path that has it; ``len(paths)`` where none has."""
    never = len(paths)
    coming: dict[int, int] = {}
    found: list[list[int]] = []
    for index in range(len(paths) - 1, -1, -1):
        found.append([coming.get(block, never) for block in paths[index]])
        coming.update(dict.fromkeys(paths[index], index))
    found.reverse()
    return found
