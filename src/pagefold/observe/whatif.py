"""What if: what a cache of another size, or of another policy, would have found of what was used lately.

LRU at every size by reuse distances. Other policies by ghost caches: the real policy over the real tree, with few of
the blocks and a cache that is as much smaller (C. A. Waldspurger et al., "Cache Modeling and Optimization using
Miniature Simulations", USENIX ATC'17). What a ghost is told is how much it differs from LRU over the same few blocks;
that is put on LRU's curve, of which more blocks are known: by how much a sample is off, it is off for both (a control
variate; R. Y. Rubinstein, R. Marcus, "Efficiency of multivariate control variates in Monte Carlo simulation",
Operations Research 33(3), 1985).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from pagefold.curves.hit_curve import Sampled, curve_of
from pagefold.curves.lru_stack import LruStack
from pagefold.curves.prompt_cache import PromptCache
from pagefold.kv import AUTO, POLICIES, TOKEN_BYTES, make_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.curves.hit_curve import HitCurve
    from pagefold.observe.use_log import Uses

__all__ = ["GHOST_BLOCKS", "TIMES", "Asked", "asked_of", "ghost_ratios", "lru_curve_of", "other_policies"]

TIMES = (0.5, 1.0, 2.0, 4.0)
"""Sizes of ghosts, in caches of today."""

GHOST_BLOCKS = 256
"""Blocks of a ghost of today's size, if the sample has so many of them."""

_MOST_GHOST_KEYS = 8192
_KEY_BYTES = 8
_LEAST_TOKENS, _MOST_TOKENS = _KEY_BYTES // TOKEN_BYTES, 512
"""Of a ghost's block. It has as many as it stands for, within these: a policy may go by how long prompts are."""
_TURN = 16
"""After so many prompts a ghost lets the engine go on."""


class Asked(NamedTuple):
    """How much was looked up.

    Attributes:
        num_tokens: of prompts.
        num_blocks: full ones of those.
    """

    num_tokens: int
    num_blocks: int


def asked_of(uses: Uses) -> Asked:
    """Return how much was looked up by the uses that count."""
    return Asked(sum(use.num_tokens for use in uses.counted), sum(use.num_blocks for use in uses.counted))


def other_policies(policy: str) -> tuple[str, ...]:
    """Return the names of all eviction policies but one, and but the one that follows others."""
    return tuple(name for name in POLICIES if name not in (policy, AUTO))


def lru_curve_of(uses: Uses, block_size: int) -> HitCurve:
    """Return the share of all prompt tokens that leaf-first LRU would have found, by the tokens that it holds.

    Args:
        uses: that are looked at.
        block_size: tokens a block.
    """
    stack = LruStack()
    found: Counter[int] = Counter()
    num_looked_at = 0
    for index, use in enumerate(uses.uses):
        distances = stack.use(use.keys)
        if index >= uses.num_warm and use.is_lookup:
            num_looked_at += len(use.keys)
            found.update(distances)
    asked = asked_of(uses)
    sampled = Sampled(found, num_looked_at, asked.num_blocks, stack.num_blocks, uses.rate)
    return curve_of(sampled, block_size).scaled(_full_share(asked, block_size))


def ghost_ratios(
    uses: Uses,
    curve: HitCurve,
    policies: Sequence[str],
    num_blocks: int,
    pause: Callable[[], None] = lambda: time.sleep(0),
) -> dict[str, list[float]]:
    """Return of each policy the share of all prompt tokens that it would have found, at each of :data:`TIMES`.

    Args:
        uses: that are looked at.
        curve: LRU's, of those.
        policies: by name.
        num_blocks: of a cache of today.
        pause: called now and then, for other threads to go on.
    """
    block_size = curve.block_size
    fewer = uses.sampled(GHOST_BLOCKS / max(1, num_blocks), _MOST_GHOST_KEYS)
    near = lru_curve_of(fewer, block_size)
    asked = asked_of(fewer)
    expected = round(asked.num_blocks * fewer.rate)  # by which curve_of() corrects the sample too
    num_looked_at = sum(len(use.keys) for use in fewer.counted if use.is_lookup)
    extra = expected - num_looked_at if fewer.rate < 1 else 0
    full_share = _full_share(asked, block_size)
    found: dict[str, list[float]] = {}
    for policy in policies:
        found[policy] = []
        for times in TIMES:
            size = max(1, round(times * num_blocks * fewer.rate))
            num_found = _play(fewer, policy, size, block_size, pause)
            found_share = (num_found + extra) / expected if expected else 0.0
            ratio = min(1.0, max(0.0, found_share)) * full_share
            tokens = round(times * num_blocks) * block_size
            of_fewer = near.at(round(size / fewer.rate) * block_size)
            found[policy].append(min(1.0, max(0.0, curve.at(tokens) + ratio - of_fewer)))
    return found


def _play(uses: Uses, policy: str, num_blocks: int, block_size: int, pause: Callable[[], None]) -> int:
    """Return how many blocks a cache of so many finds, with a policy by name."""
    times = round(min(_MOST_TOKENS, max(_LEAST_TOKENS, block_size / uses.rate))) // _LEAST_TOKENS
    num_tokens = times * _LEAST_TOKENS
    room = max((len(use.keys) for use in uses.uses), default=0) + 1
    cache = PromptCache(num_blocks, room, num_tokens, make_policy(policy))
    num_found = 0
    for index, use in enumerate(uses.uses):
        if not use.keys:
            continue
        packed = b"".join(key.to_bytes(_KEY_BYTES, "little") * times for key in use.keys)
        found = cache.use(packed, len(use.keys) * num_tokens) // num_tokens
        if index >= uses.num_warm and use.is_lookup:
            num_found += found
        if index % _TURN == 0:
            pause()
    return num_found


def _full_share(asked: Asked, block_size: int) -> float:
    """Return how much of all prompt tokens is in full blocks."""
    return min(1.0, asked.num_blocks * block_size / asked.num_tokens) if asked.num_tokens else 0.0
