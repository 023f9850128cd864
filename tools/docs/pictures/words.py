"""A core whose tokens are words, and how its blocks are drawn."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagefold.kv import KVCore, audit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from svg import Drawing

    from pagefold.kv import Promise, SequenceCache
    from pagefold.kv.block import Node

__all__ = ["BLOCK", "BLOCK_SIZE", "Words", "draw_block"]

BLOCK_SIZE = 4
SLOT = 52  # pixels: a word of seven letters
BLOCK = SLOT * BLOCK_SIZE


class Words:
    """A core whose tokens are words, so that blocks can be read."""

    def __init__(self, num_blocks: int) -> None:
        self.core = KVCore(num_blocks, block_size=BLOCK_SIZE)
        self._ids: dict[str, int] = {}
        self.slab = [[""] * BLOCK_SIZE for _ in range(num_blocks)]

    def packed(self, text: str) -> bytes:
        """Return the tokens of ``text`` as the core wants them."""
        return array("i", [self._ids.setdefault(word, len(self._ids)) for word in text.split()]).tobytes()

    def admit(self, text: str) -> tuple[SequenceCache, int, Promise | None]:
        """Do what the scheduler does for a request that is let in; return its cache, its hit and its promise."""
        words = text.split()
        hit = self.core.match(b"", self.packed(text), len(words) - 1)
        cache, start = self.core.acquire(hit)
        assert self.core.extend(cache, start, len(words))
        self.write(cache, words, 0)
        return cache, start, self.core.publishing.promise(cache, self.packed(text), len(words))

    def write(self, cache: SequenceCache, words: list[str], start: int) -> None:
        """Fill the cache's blocks from position ``start`` on, as a runner would."""
        for position in range(start, len(words)):
            block_id = cache.only_table.block_ids[position // BLOCK_SIZE]
            self.slab[block_id][position % BLOCK_SIZE] = words[position]

    def commit(self, promise: Promise | None) -> None:
        """Do what the scheduler does when the step has run."""
        assert promise is not None
        self.core.publishing.commit(promise)
        copies = self.core.moves.take_copies()
        self.core.moves.copies_done(copies)
        audit(self.core)

    def words_of(self, node: Node) -> list[str]:
        """Return the words of a published block."""
        names = {number: word for word, number in self._ids.items()}
        return [names[number] for number in array("i", node.key)]


def draw_block(drawing: Drawing, x: float, y: float, words: Iterable[str], kind: str, name: str) -> None:
    """Draw a block and what its slots hold; ``name`` goes above it."""
    for index, word in enumerate(words):
        drawing.box(x + index * SLOT, y, SLOT, 26, kind if word else "empty")
        drawing.text(x + (index + 0.5) * SLOT, y + 17, word, anchor="middle", size=12)
    drawing.text(x, y - 5, name, "code pale", size=11)
