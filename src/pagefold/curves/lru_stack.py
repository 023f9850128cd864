"""LruStack: how many blocks leaf-first LRU must hold to find each block of a prompt.

R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970. LRU keeps the
blocks that were used last, so a block is found if the cache holds as many blocks as were used since, and itself. Leaf
first: of one prompt, which is used all at once, the blocks nearer its end go first; so a block counts behind those
above it.

A prompt is what makes this cheap. All its blocks are used at once, and whoever uses a block uses those above it; so of
any earlier prompt the blocks that nobody used since are the end of its path. One counter a prompt is enough (how many
of its blocks are still its own), in a Fenwick tree over prompts, and a distance is asked for once a run of blocks that
the same earlier prompt used last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LruStack"]


class LruStack:
    """The stack, as far as distances need it. It grows with the prompts that use it."""

    def __init__(self) -> None:
        self._used_by: dict[int, tuple[int, int]] = {}  # block -> the prompt that used it last, its place in that
        self._first: list[int] = []  # of each prompt: the first place whose block nobody used since
        self._alive = _Counts()  # of each prompt: how many blocks nobody used since

    @property
    def num_blocks(self) -> int:
        """Blocks that were ever used."""
        return len(self._used_by)

    def use(self, path: Sequence[int]) -> list[int]:
        """Use a prompt's blocks. Of those that were used before, return how many a cache must hold to find each.

        They are the first of the path.
        """
        distances: list[int] = []
        ends: dict[int, int] = {}  # prompt -> the place behind the last of its blocks that are used now
        above = 0
        for block in path:
            last = self._used_by.get(block)
            if last is None:
                break
            prompt, place = last
            if prompt not in ends:
                above = self._alive.total - self._alive.up_to(prompt) - self._first[prompt]
            ends[prompt] = place + 1
            distances.append(above + place + 1)
        for prompt, end in ends.items():
            self._alive.add(prompt, self._first[prompt] - end)
            self._first[prompt] = end
        own = len(self._first)
        self._first.append(0)
        self._alive.append(len(path))
        self._used_by.update((block, (own, place)) for place, block in enumerate(path))
        return distances


class _Counts:
    """Numbers in a row, and sums of the first of them: a Fenwick tree that grows. O(log n)."""

    def __init__(self) -> None:
        self._tree = [0]
        self.total = 0

    def append(self, count: int) -> None:
        index = len(self._tree)
        self._tree.append(count + self.total - self._sum(index & (index - 1)))
        self.total += count

    def add(self, place: int, count: int) -> None:
        self.total += count
        index = place + 1
        while index < len(self._tree):
            self._tree[index] += count
            index += index & -index

    def up_to(self, place: int) -> int:
        """Return the sum of the numbers up to ``place``, itself included."""
        return self._sum(place + 1)

    def _sum(self, index: int) -> int:
        total = 0
        while index:
            total += self._tree[index]
            index &= index - 1
        return total
