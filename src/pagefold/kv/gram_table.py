"""GramTable: where n tokens were seen last, by a hash of them. A guess: whoever asks compares the tokens.

A slot is a number, and nothing tells whose it is: grams of the same hash overwrite each other, and what a slot names
may have gone. So a table takes 4 bytes a slot, never grows, and forgetting costs nothing.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING
from zlib import crc32

from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["GRAM_SIZES", "GramTable", "num_common"]

GRAM_SIZES = (5, 2)
"""How many tokens grams have, the most first: long ones say more, and short ones are found more often."""

_SLOTS_PER_GRAM = 2.4
"""So a slot in three is taken where all grams are different, and few overwrite others."""


class GramTable:
    """Places by the tokens that end there.

    Args:
        num_tokens: how many tokens it is made for: so many places, each with a gram of every size.
        sizes: of grams, in tokens, the most first.
    """

    def __init__(self, num_tokens: int, sizes: tuple[int, ...] = GRAM_SIZES) -> None:
        self.sizes = sizes
        self._num_slots = max(1, int(num_tokens * len(sizes) * _SLOTS_PER_GRAM))
        self._places = array("i", [-1]) * self._num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return len(self._places) * self._places.itemsize

    def note(self, packed: bytes, first: int, places: Iterable[int], seed: int = 0) -> None:
        """Note the grams that end with each token from ``first`` on.

        Args:
            packed: tokens, 4 bytes each.
            first: the first of them that ends a gram.
            places: the place of each of those.
            seed: only who asks with the same finds them.
        """
        slots, num_slots = self._places, self._num_slots
        sizes = [(size * TOKEN_BYTES, seed + size) for size in self.sizes]
        end = first * TOKEN_BYTES
        for place in places:
            end += TOKEN_BYTES
            for num_bytes, salt in sizes:
                if num_bytes <= end:
                    slots[crc32(packed[end - num_bytes : end], salt) % num_slots] = place

    def find(self, packed: bytes, seed: int = 0) -> Iterator[int]:
        """Yield where the last tokens of ``packed`` may have been seen, by the longest gram first."""
        end = len(packed)
        for size in self.sizes:
            if size * TOKEN_BYTES <= end:
                place = self._places[crc32(packed[end - size * TOKEN_BYTES :], seed + size) % self._num_slots]
                if place >= 0:
                    yield place

    def clear(self) -> None:
        """Forget all."""
        self._places = array("i", [-1]) * self._num_slots


def num_common(packed: bytes, other: bytes) -> int:
    """Return how many of the last tokens of two packed sequences are the same."""
    most = min(len(packed), len(other)) // TOKEN_BYTES
    for num in range(most):
        ends = len(packed) - num * TOKEN_BYTES, len(other) - num * TOKEN_BYTES
        if packed[ends[0] - TOKEN_BYTES : ends[0]] != other[ends[1] - TOKEN_BYTES : ends[1]]:
            return num
    return most
