"""Miss-ratio curves: what LRU would find at every size of the cache, from one pass over a trace.

Exact ones by stack distances: R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems
Journal 9(2), 1970. LRU keeps the blocks that were used last, so a block is found if the cache holds as many blocks as
were used since, and itself. Leaf first: of one prompt, which is used all at once, the blocks nearer its end go first;
so a block counts behind those above it.

Sampled ones by SHARDS: C. A. Waldspurger et al., "Efficient MRC construction with SHARDS", FAST'15: only blocks whose
hash is below a bound are looked at, and each of their distances stands for one that is ``1 / rate`` times as long. With
the correction of its section 4.2 (SHARDS-adj): tokens that the sample has too many or too few of count at the smallest
distance.

A prompt is what makes this cheap. All its blocks are used at once, and whoever uses a block uses those above it; so of
any earlier prompt the blocks that nobody used since are the end of its path. One counter a prompt is enough (how many
of its blocks are still its own), in a Fenwick tree over prompts, and a distance is asked for once a run of blocks that
the same earlier prompt used last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pagefold.sim.traces.request import TraceRequest

__all__ = ["HitCurve", "lru_curve", "mean_error"]

_MASK = 2**64 - 1


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

    @property
    def infinite(self) -> float:
        """The token hit ratio of a cache that never evicts."""
        return self.ratios[-1] if self.ratios else 0.0

    @property
    def largest(self) -> int:
        """Tokens beyond which more do not help."""
        return self.sizes[-1] if self.sizes else 0


def lru_curve(requests: Iterable[TraceRequest], *, block_size: int, rate: float = 1.0, seed: int = 0) -> HitCurve:
    """Return what leaf-first LRU finds of a trace's prompts, cached one after another, at every size.

    Args:
        requests: of a trace.
        block_size: tokens a block.
        rate: share of the blocks to look at, above 0 and at most 1: less is faster, and less exact.
        seed: of which blocks those are.
    """
    bound = int(rate * 2**64)
    stack = _Stack()
    found: Counter[int] = Counter()  # blocks that the cache must hold, of those looked at -> tokens found with them
    asked = looked_at = 0
    names: dict[tuple[int, int], int] = {}
    for index, request in enumerate(requests):
        asked += request.prompt_tokens
        path: list[int] = []
        tokens: list[int] = []
        left = request.prompt_tokens
        for name in _names(index, request, block_size, names):
            size = min(block_size, left)
            left -= size
            if rate >= 1 or _hash(name, seed) < bound:
                path.append(name)
                tokens.append(size)
        looked_at += sum(tokens)
        for distance, num_tokens in zip(stack.use(path), tokens, strict=False):
            found[distance] += num_tokens
    if rate < 1:
        found[1] += round(asked * rate) - looked_at
        looked_at = round(asked * rate)
    places = sorted(found)
    sums = accumulate(found[place] for place in places)
    ratios = tuple(min(1.0, max(0.0, total / looked_at)) if looked_at else 0.0 for total in sums)
    sizes = tuple(round(place / rate) * block_size for place in places)
    return HitCurve(sizes, ratios, block_size, rate, stack.num_blocks)


def mean_error(curve: HitCurve, exact: HitCurve, sizes: Sequence[int]) -> float:
    """Return how far two curves are apart on average over ``sizes``: FAST'15's mean absolute error (section 4.1)."""
    return sum(abs(curve.at(size) - exact.at(size)) for size in sizes) / len(sizes) if sizes else 0.0


class _Stack:
    """The LRU stack of blocks, as far as distances need it."""

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


def _names(index: int, request: TraceRequest, block_size: int, known: dict[tuple[int, int], int]) -> Iterator[int]:
    """Yield a name for each block of a prompt: two have one in common where they agree up to there.

    As :func:`~pagefold.sim.replay_cache_only` makes tokens: a block is told by those above it and the id at its end.
    """
    ids, size = request.prefix_ids, request.tokens_per_id
    name = -1
    for end in range(block_size, request.prompt_tokens + block_size, block_size):
        place = (min(end, request.prompt_tokens) - 1) // size
        name = known.setdefault((name, ids[place] if place < len(ids) else -1 - index), len(known))
        yield name


def _hash(name: int, seed: int) -> int:
    """Return 64 bits that depend on all bits of both (the finalizer of SplitMix64)."""
    mixed = (name * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
