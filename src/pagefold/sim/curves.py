"""Miss-ratio curves of traces: what LRU would find at every size of the cache, from one pass.

Exact ones by stack distances (``curves/lru_stack.py``), sampled ones by SHARDS (``curves/hit_curve.py``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pagefold.curves.hit_curve import HitCurve, Sampled, curve_of
from pagefold.curves.lru_stack import LruStack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pagefold.sim.traces.request import TraceRequest

__all__ = ["HitCurve", "lru_curve", "mean_error"]

_MASK = 2**64 - 1


def lru_curve(requests: Iterable[TraceRequest], *, block_size: int, rate: float = 1.0, seed: int = 0) -> HitCurve:
    """Return what leaf-first LRU finds of a trace's prompts, cached one after another, at every size.

    Args:
        requests: of a trace.
        block_size: tokens a block.
        rate: share of the blocks to look at, above 0 and at most 1: less is faster, and less exact.
        seed: of which blocks those are.
    """
    bound = int(rate * 2**64)
    stack = LruStack()
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
    return curve_of(Sampled(found, looked_at, asked, stack.num_blocks, min(rate, 1.0)), block_size)


def mean_error(curve: HitCurve, exact: HitCurve, sizes: Sequence[int]) -> float:
    """Return how far two curves are apart on average over ``sizes``: FAST'15's mean absolute error (section 4.1)."""
    return sum(abs(curve.at(size) - exact.at(size)) for size in sizes) / len(sizes) if sizes else 0.0


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
