"""Auto: follows, of several policies, the one that finds most lately, as ghost caches tell, and says when it changes.

Each policy runs a cache of its own that holds no memory, only names. What another would have found beyond the one that
is followed is the regret; where that is more than chance, the other policy is followed. The idea of N. Megiddo and D.
S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003 (ghost lists that tell which side should have
had the room), taken from two lists to whole policies as in "Driving cache replacement with ML-based LeCaR" (G. Vietri
et al., HotStorage 2018), and to small caches of a sample of all blocks as in "Cache modeling and optimization using
miniature simulations" (C. A. Waldspurger et al., USENIX ATC'17, section 3).
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING
from zlib import crc32

from pagefold.events import EvictionPolicySwitched, ignore
from pagefold.kv.policies.ghost_cache import GhostCache, upwards
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pagefold.events import Emit
    from pagefold.kv.block import Node
    from pagefold.kv.eviction import EvictionPolicy, RequestFacts

__all__ = ["Auto"]

_GHOST_BLOCKS = 1024
"""Of each ghost cache, if the cache has more."""

_MOST_TOKENS = 512
"""Of a ghost's block. It has as many as it stands for: a policy may go by how long prompts are."""

_FADE = 0.8
_FADE_EVERY = 256
_BETTER = 0.02
_CHANCE = 2.0
"""Standard deviations by which another must be better; that of a difference of counts is the root of their sum."""

_ALL = 2**32


class _Candidate:
    """A policy that may be followed.

    Attributes:
        name: of it.
        real: knows the nodes of the cache.
        ghost: has a cache of its own.
        found: blocks that its own cache found, fading.
    """

    def __init__(self, name: str, make: Callable[[float], EvictionPolicy], rate: float) -> None:
        self.name = name
        self.real = make(1.0)
        self.ghost = GhostCache(make(rate))
        self.found = 0.0


class Auto:
    """Evicts as the best policy of late would.

    A block is in the sample by the checksum of its path's tokens: whenever it is used, and in every process.

    Args:
        makers: of the policies by name, each for a share of all blocks. The first is followed until another is better.
        num_blocks: places of paths in the cache; 0 where nobody knows: then ghosts are as large as it.
        emit: where :class:`~pagefold.events.EvictionPolicySwitched` goes; the first one comes at once.
    """

    def __init__(
        self, makers: Mapping[str, Callable[[float], EvictionPolicy]], num_blocks: int = 0, emit: Emit = ignore
    ) -> None:
        self._rate = min(1.0, _GHOST_BLOCKS / max(1, num_blocks))
        self._candidates = [_Candidate(name, make, self._rate) for name, make in makers.items()]
        self._leader = self._candidates[0]
        self._bound = int(self._rate * _ALL)
        self._places: dict[Node, int] = {}  # checksum of the path of each node that is there
        self._key = b""
        self._room = 0  # blocks that were there when one was last evicted; 0 while none had to go
        self._turn = 0
        self._num_uses = 0
        self._asked = 0.0  # blocks of the sample, fading
        self._emit = emit
        emit(EvictionPolicySwitched(self._leader.name, "", 0.0, 0.0))

    @property
    def leader(self) -> str:
        """The name of the policy that is followed now."""
        return self._leader.name

    def on_insert(self, node: Node) -> None:
        """Tell all."""
        parent = node.parent
        assert parent is not None, "a root is never inserted"
        self._places[node] = crc32(node.key, self._places.get(parent, 0))
        for each in self._candidates:
            each.real.on_insert(node)

    def on_hit(self, path: list[Node]) -> None:
        """Tell all."""
        for each in self._candidates:
            each.real.on_hit(path)

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Tell all, replay the use in their caches, and follow the best."""
        for each in self._candidates:
            each.real.on_release(tail, facts)
        places, bound = self._places, self._bound
        path = [node for node in upwards(tail) if places[node] < bound]
        path.reverse()
        if path:
            self._replay(path, facts)
        if facts.is_repeat:
            return
        self._num_uses += 1
        if self._num_uses % _FADE_EVERY == 0:
            self._asked *= _FADE
            for each in self._candidates:
                each.found *= _FADE

    def on_evict(self, node: Node) -> None:
        """Tell all, and ask one in turn for its victim: some put off work until they are asked, which would pile up."""
        self._room = len(self._places)
        del self._places[node]
        if not self._places:  # all has been dropped
            self._room = 0
        for each in self._candidates:
            each.real.on_evict(node)
        self._turn = (self._turn + 1) % len(self._candidates)
        self._candidates[self._turn].real.victim()

    def on_idle(self, node: Node) -> None:
        """Offer ``node`` to all."""
        for each in self._candidates:
            each.real.on_idle(node)

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node`` from all."""
        for each in self._candidates:
            each.real.on_busy(node)

    def victim(self) -> Node | None:
        """Ask the leader."""
        return self._leader.real.victim()

    def score(self, node: Node) -> float:
        """Ask the leader."""
        return self._leader.real.score(node)

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes."""
        return self._leader.real.candidates()

    def _replay(self, path: list[Node], facts: RequestFacts) -> None:
        """Use the sampled blocks of a path in all ghost caches, and follow another policy if its own found more."""
        if not self._key:
            of_cache = len(path[0].key) // TOKEN_BYTES
            self._key = bytes(TOKEN_BYTES * max(of_cache, min(_MOST_TOKENS, round(of_cache / self._rate))))
        room = max(round(max(self._room, len(self._places)) * self._rate), len(path)) if self._room else _ALL
        for each in self._candidates:
            num_found = each.ghost.use(path, self._key, facts, room)
            each.found += 0 if facts.is_repeat else num_found
        if facts.is_repeat:
            return
        self._asked += len(path)
        best, leader = max(self._candidates, key=lambda each: each.found), self._leader
        if best.found - leader.found > max(_BETTER * leader.found, _CHANCE * sqrt(leader.found + best.found)):
            self._leader = best
            shares = best.found / self._asked, leader.found / self._asked
            self._emit(EvictionPolicySwitched(best.name, leader.name, *shares))
