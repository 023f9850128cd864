"""HitCurve: the token hit ratio by the size of the cache; and how one is made of sampled reuse distances.

SHARDS: C. A. Waldspurger et al., "Efficient MRC construction with SHARDS", FAST'15: only blocks whose hash is below a
bound are looked at, and each of their distances stands for one that is ``1 / rate`` times as long. With the correction
of its section 4.2 (SHARDS-adj): tokens that the sample has too many or too few of count at the smallest distance.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HitCurve", "Sampled", "curve_of"]


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Token hit ratio of LRU by the size of the cache: a step function.

    Attributes:
        sizes: tokens, ascending: where it rises.
        ratios: token hit ratio from each of ``sizes`` on.
        block_size: tokens a block.
        rate: share of the blocks that were looked at; 1 where it is exact.
        num_blocks: blocks that were looked at, each counted once.
    """

    sizes: tuple[int, ...]
    ratios: tuple[float, ...]
    block_size: int
    rate: float
    num_blocks: int

    def at(self, cache_tokens: int) -> float:
        """Return the token hit ratio with a cache of so many tokens; a miss ratio is what is left to 1."""
        place = bisect_right(self.sizes, cache_tokens // self.block_size * self.block_size)
        return self.ratios[place - 1] if place else 0.0

    def scaled(self, share: float) -> HitCurve:
        """Return the same where all that was asked for is so much of what ratios are told of."""
        return replace(self, ratios=tuple(share * ratio for ratio in self.ratios))

    @property
    def infinite(self) -> float:
        """The token hit ratio of a cache that never evicts."""
        return self.ratios[-1] if self.ratios else 0.0

    @property
    def largest(self) -> int:
        """Tokens beyond which more do not help."""
        return self.sizes[-1] if self.sizes else 0


class Sampled(NamedTuple):
    """What looking at a part of the blocks has counted.

    Attributes:
        found: by the blocks that a cache must hold, of those looked at: tokens found with so many.
        num_looked_at: tokens of the blocks looked at, each as often as it was asked for.
        num_asked: tokens of all blocks, likewise.
        num_blocks: blocks that were looked at, each counted once.
        rate: share of the blocks to look at.
    """

    found: Mapping[int, int]
    num_looked_at: int
    num_asked: int
    num_blocks: int
    rate: float


def curve_of(sampled: Sampled, block_size: int) -> HitCurve:
    """Return the curve that a sample tells of; ``block_size`` is in tokens."""
    found, rate, num_looked_at = dict(sampled.found), sampled.rate, sampled.num_looked_at
    if rate < 1:
        expected = round(sampled.num_asked * rate)
        found[1] = found.get(1, 0) + expected - num_looked_at
        num_looked_at = expected
    places = sorted(found)
    sums = accumulate(found[place] for place in places)
    ratios = tuple(min(1.0, max(0.0, total / num_looked_at)) if num_looked_at else 0.0 for total in sums)
    sizes = tuple(round(place / rate) * block_size for place in places)
    return HitCurve(sizes, ratios, block_size, rate, sampled.num_blocks)
