"""Forgetting: what must not be found any more: everything, or what may be corrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import CacheReset, Emit, PathsDistrusted
from pagefold.kv.names import digest_of, in_group, path_digest, root_digest
from pagefold.kv.tree import TOKEN_BYTES, doubtful_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pagefold.kv.block_cache import BlockCache
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.lodger import Lodger
    from pagefold.kv.pins import PinTable
    from pagefold.kv.sequence_cache import SequenceCache
    from pagefold.kv.slow_tiers import SlowTiers

__all__ = ["Forgetting"]


class Forgetting:
    """Takes what is known of sequences out of all that knows it: tree, pins, host, slow tiers, and running caches.

    Args:
        blocks: of the device.
        rules: what each cache group keeps.
        host: what it holds.
        slow: what is brought from there.
        pins: what stays cached.
        lodgers: what else they have of a sequence.
        caches: all that were acquired and not released.
        emit: where events go.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - all that know of a sequence
        self,
        blocks: BlockCache,
        rules: KeepRules,
        host: HostTier,
        slow: SlowTiers,
        pins: PinTable,
        lodgers: Lodger,
        caches: Iterable[SequenceCache],
        emit: Emit,
    ) -> None:
        self._blocks = blocks
        self._rules = rules
        self._host = host
        self._slow = slow
        self._pins = pins
        self._lodgers = lodgers
        self._caches = caches
        self._emit = emit
        self._stride = rules.block_size * TOKEN_BYTES
        self._doubted: set[bytes] = set()  # paths of first blocks; where tiers cannot be told of all behind them

    def reset(self) -> int:
        """Forget every prefix: cached blocks become free, and what running caches hold is never published again.

        Pins are dropped: what they keep must not be used any more. Return how many cached blocks were freed.
        """
        self._emit(CacheReset())
        self._doubted.clear()
        self._pins.clear()
        self._slow.fetches.reset()
        self._blocks.cancel_stores()  # else their blocks would wait for a step, which may wait for the blocks
        self._host.reset()
        num_cached = self._blocks.pool.num_cached
        self._blocks.clear()
        for cache in self._caches:
            cache.tail = None
            cache.num_published = 0
            self._lodgers.on_forget(cache)
        return num_cached

    def forget(self, namespaces: Collection[bytes]) -> int:
        """Forget all that is cached in namespaces that nobody runs in any more. Return how many blocks were freed.

        What slower tiers have of them stays there. Nobody finds it who does not have the same namespace again, and then
        it is right.

        Args:
            namespaces: keys.
        """
        roots = {root_digest(key) for key in namespaces}
        nodes = [root for key, root in self._blocks.tree.roots.items() if key in namespaces]
        num_roots = len(nodes)
        for node in nodes:  # it grows, parents before children
            nodes += node.children.values()
        del nodes[:num_roots]
        self._slow.fetches.forget(roots)
        self._pins.forget(set(nodes))
        num_free = self._blocks.pool.num_free
        for node in reversed(nodes):
            if node.attached:  # one without blocks has gone with its last child
                self._blocks.evict(node, "reset")
        self._host.forget(roots)
        return self._blocks.pool.num_free - num_free

    def those_cached(self, namespaces: Collection[bytes]) -> set[bytes]:
        """Return those of the namespaces, by key, of which device or host have anything."""
        held = {one.name.namespace for one in self._host.blocks.all()}
        roots = self._blocks.tree.roots
        return {key for key in namespaces if key in roots or root_digest(key) in held}

    def distrust(self, cache: SequenceCache, namespace: bytes, packed: bytes) -> set[bytes]:
        """Forget what ``cache`` has, what it began with, and whatever else goes on from that: it may be corrupted.

        Those are all paths that begin with its first block, since nobody knows which of its blocks is at fault. Other
        caches on them go on, and publish nothing any more.

        Args:
            cache: of a sequence of which the model computed no numbers.
            namespace: key of the namespace that its blocks are in.
            packed: the sequence's packed tokens.

        Returns the digests of the paths, in every group, for slower tiers to forget; none without a host tier.
        """
        nodes = doubtful_nodes(self._blocks.tree, namespace, packed[: self._stride], cache.copied_from)
        paths = self._host.distrust(namespace, packed, self._rules, nodes, cache.copied_from)
        if self._slow.is_on and not self._rules.keeps_paths:
            self._doubted.update(digest_of(node) for node in nodes if not node.depth)
            self._doubted.add(self._first_path(namespace, packed))
        digests = {in_group(path, group) for path in paths for group in range(self._rules.num_names)}
        self._slow.fetches.distrust(digests)
        self._pins.distrust(set(nodes))
        self._emit(PathsDistrusted(tuple(nodes)))
        for node in reversed(nodes):
            if node.attached:  # one without blocks has gone with its last child
                self._blocks.evict(node, "corrupted")
        for other in self._caches:
            tail = other.tail
            if other is cache or (tail is not None and tail.parent is not None and not tail.attached):
                other.tail = None
                other.num_published = 0
            if other is cache or any(held.name.digest in digests for held in other.cold):
                self._lodgers.on_forget(other)
        return digests

    def doubts(self, namespace: bytes, packed: bytes) -> bool:
        """Whether what slow tiers have of a path may be corrupted.

        Where no group keeps all, windows lie there alone: of those that go on from what was forgotten nobody knows the
        names, so they cannot be forgotten too. As long as this core is there they are not asked for.

        Args:
            namespace: key of the path's namespace.
            packed: its tokens, packed.
        """
        return bool(self._doubted) and self._first_path(namespace, packed) in self._doubted

    # Inside.

    def _first_path(self, namespace: bytes, packed: bytes) -> bytes:
        return path_digest(root_digest(namespace), packed[: self._stride])
