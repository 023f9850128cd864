"""Prefixes: what of a sequence is known on the device and the host, and how a cache begins with it.

Of one cache group that keeps all, a path can be gone on from as far as its blocks are there. Of several, as far as
every group has what it keeps behind that place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.host_paths import extend_by_groups
from pagefold.kv.missing import Missing, missing_by_groups, missing_of_one_group
from pagefold.kv.tree import TOKEN_BYTES, PrefixHit, attached_part

if TYPE_CHECKING:
    from pagefold.kv.block import Node
    from pagefold.kv.holding import Holding
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.sequence_cache import SequenceCache
    from pagefold.kv.tree import PrefixTree

__all__ = ["Prefixes", "PrefixesByGroups"]


class Prefixes:
    """Prefixes where there is one cache group, which keeps all.

    Args:
        tree: what is published on the device.
        rules: what each cache group keeps.
        host: what it holds.
        holding: gives caches their blocks.
        copies_parts: whether a part of a block can be taken over: not of a sealed one, which is not what its first
            tokens alone come to.
    """

    def __init__(
        self, tree: PrefixTree, rules: KeepRules, host: HostTier, holding: Holding, *, copies_parts: bool
    ) -> None:
        self._tree = tree
        self._rules = rules
        self._host = host
        self._holding = holding
        self._copies_parts = copies_parts
        self._stride = rules.block_size * TOKEN_BYTES

    def match(self, namespace: bytes, packed: bytes, max_tokens: int, mask: int = 0) -> PrefixHit:
        """Find the longest known prefix; see :meth:`KVCore.match`."""
        assert mask == 0, "all sequences keep all here"
        hit = self._cut(self._tree.match(namespace, packed, max_tokens))
        return self._host.extend(hit, packed, max_tokens, self._stride)

    def missing(self, namespace: bytes, packed: bytes, max_tokens: int, mask: int = 0, of_chunk: int = 0) -> Missing:
        """Return what device and host lack; see :meth:`KVCore.missing`.

        ``of_chunk`` is how many blocks a packed chunk is expected to fill, of which that is not known.
        """
        assert mask == 0 == of_chunk, "all sequences keep all here"
        packed = packed[: max(0, max_tokens) * TOKEN_BYTES]
        return missing_of_one_group(self.match(namespace, packed, max_tokens), packed, self._stride)

    def begin(self, cache: SequenceCache, nodes: list[Node], hit: PrefixHit) -> list[Node]:  # noqa: ARG002
        """Let ``cache`` begin with the blocks of ``nodes``, those of ``hit`` that are still there.

        Return those that it can go on from, and holds.
        """
        self._holding.take(cache, nodes)
        return nodes

    def go_on(self, cache: SequenceCache, nodes: list[Node], hit: PrefixHit) -> int:
        """Let ``cache`` have what is behind the nodes of ``hit``, if it has begun with all. Return its tokens.

        Args:
            cache: that has begun.
            nodes: what :meth:`begin` returned.
            hit: what was found.
        """
        if len(nodes) < len(hit.nodes):
            return 0
        if hit.partial is not None and hit.partial.attached:
            return self._holding.take_partial(cache, hit.partial, hit.num_partial_tokens)
        return self._holding.take_held(cache, hit.held) * self._rules.block_size if hit.held else 0

    def _cut(self, hit: PrefixHit) -> PrefixHit:
        """Return as much of ``hit`` as can be copied."""
        return hit if self._copies_parts else hit._replace(partial=None, num_partial_tokens=0)


class PrefixesByGroups(Prefixes):
    """The same where there are several groups, or one that keeps the last tokens only."""

    def match(self, namespace: bytes, packed: bytes, max_tokens: int, mask: int = 0) -> PrefixHit:
        """Find the longest known prefix; see :meth:`KVCore.match`."""
        hit = self._match(namespace, packed, max_tokens, self._rules.of(mask))
        return hit._replace(mask=mask) if mask else hit

    def _match(self, namespace: bytes, packed: bytes, max_tokens: int, rules: KeepRules) -> PrefixHit:
        whole = hit = self._tree.match(namespace, packed, max_tokens)
        if self._host.is_on:
            hit = extend_by_groups(hit, packed, max_tokens, rules, self._host.blocks)
        if not hit.held:
            num_whole = rules.num_whole(hit.nodes)
            if num_whole < len(hit.nodes):
                num_tokens = num_whole * rules.block_size
                hit = self._tree.match_part(namespace, hit.nodes[:num_whole], packed, num_tokens, max_tokens)
            hit = self._cut(hit)
        if hit.num_blocks >= len(whole.nodes) or (rules.packing is not None and not whole.nodes[-1].committed):
            return hit  # what a step writes now is not packed yet, and not lost
        return hit._replace(lost=whole.nodes[-1])

    def missing(self, namespace: bytes, packed: bytes, max_tokens: int, mask: int = 0, of_chunk: int = 0) -> Missing:
        """Return what device and host lack; see :class:`Prefixes`."""
        packed = packed[: max(0, max_tokens) * TOKEN_BYTES]
        hit = self._tree.match(namespace, packed, max_tokens)
        return missing_by_groups(hit, packed, self._rules.of(mask), self._host.blocks, of_chunk)

    def begin(self, cache: SequenceCache, nodes: list[Node], hit: PrefixHit) -> list[Node]:
        """Let ``cache`` begin: at once with what the host holds, if nothing of ``hit`` has gone."""
        if hit.held and len(nodes) == len(hit.nodes):
            own = self._rules.of(hit.mask).held_part(nodes, hit.num_blocks)
            if self._holding.take_with_held(cache, own, hit):
                return own
            nodes = attached_part(nodes)  # room was sought, and whom nobody held may have gone for it
        nodes = nodes[: self._rules.of(hit.mask).num_whole(nodes)]
        self._holding.take(cache, nodes)
        return nodes

    def go_on(self, cache: SequenceCache, nodes: list[Node], hit: PrefixHit) -> int:
        """Let ``cache`` have what is behind ``nodes``; see :class:`Prefixes`."""
        if hit.held:  # it began with them, if at all
            return (cache.tables[0].end - len(nodes)) * self._rules.block_size
        return super().go_on(cache, nodes, hit)
