"""LFU: evict what was used least often, counts outliving eviction ("perfect LFU").

L. Breslau et al., "Web caching and Zipf-like distributions: evidence and implications", INFOCOM 1999, section 5:
perfect LFU against in-cache LFU.
"""

from __future__ import annotations

from pagefold.kv.policies.counting import CountingPolicy

__all__ = ["Lfu"]


class Lfu(CountingPolicy):
    """Evicts by number of uses, of equals the least recently used, then the deepest.

    Args:
        sample: share of all blocks that it is told of.
    """

    def __init__(self, sample: float = 1.0) -> None:
        super().__init__(lambda node: (self.num_uses(node), node.last_used, -node.depth), sample)
