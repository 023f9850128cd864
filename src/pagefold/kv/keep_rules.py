"""KeepRules: what all cache groups of a model keep together, and so which prefixes can be gone on from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.keep import KEEP_ALL, NO_MASK
from pagefold.kv.table import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pagefold.kv.block import Block, Node, PackedChunk
    from pagefold.kv.keep import KeepRule
    from pagefold.kv.sequence_cache import SequenceCache
    from pagefold.kv.tree import PrefixHit

__all__ = ["KeepRules"]


class KeepRules:
    """The rule of each cache group, in the groups' order. It never changes.

    Args:
        rules: of the groups.
        block_size: tokens a block.

    Attributes:
        block_size: as given.
        trimmed: the groups that leave tokens behind while a sequence runs.
        keeps_paths: whether any group keeps all, so that who has a path has all of it.
        packing: the rule whose older chunks are packed; None where there is none.
        exact: the rules of sequences that keep all where others have chunks packed.
    """

    __slots__ = ("_num_sink_blocks", "_rules", "block_size", "exact", "keeps_paths", "packing", "trimmed")

    def __init__(self, rules: Iterable[KeepRule], block_size: int) -> None:
        self._rules = tuple(rules)
        self.block_size = block_size
        self._num_sink_blocks = [rule.num_sink_blocks(block_size) for rule in self._rules]
        self.trimmed = tuple(group for group, rule in enumerate(self._rules) if rule.trims)
        self.keeps_paths = len(self.trimmed) < len(self._rules)
        packing = [rule for rule in self._rules if rule.packs]
        assert len(packing) <= 1, "the layers that pack are one group"
        self.packing = packing[0] if packing else None
        self.exact = self
        if packing:
            self.exact = KeepRules((KEEP_ALL if rule.packs else rule for rule in self._rules), block_size)

    def of(self, mask: int) -> KeepRules:
        """Return the rules of a sequence, or of a path: of one that keeps all, though others have chunks packed."""
        return self.exact if mask == NO_MASK else self

    @property
    def num_names(self) -> int:
        """How many blocks of one path have names: one of each group, and behind those the blocks of a packed chunk."""
        return len(self) + (0 if self.packing is None else self.packing.chunk_blocks(self.block_size))

    def __len__(self) -> int:
        """Return how many groups there are."""
        return len(self._rules)

    def __iter__(self) -> Iterator[KeepRule]:
        """Yield the rule of each group."""
        return iter(self._rules)

    def __getitem__(self, group: int) -> KeepRule:
        """Return the rule of a group."""
        return self._rules[group]

    def num_blocks_for(
        self, num_tokens: int, num_new: int, cache: SequenceCache | None = None, kept_share: float = 1.0
    ) -> int:
        """Return the most blocks, of all groups, that a sequence of ``num_tokens`` holds at once.

        Of one that has begun: how many more than it has. What it gave back already it does not take again, so these are
        at most the blocks of tokens that it has no place for yet, a copy of a tail that it may share, and what is
        granted for chunks on the way.

        Args:
            num_tokens: of the sequence.
            num_new: the most that one step computes of it.
            cache: what it has already; that is not counted.
            kept_share: that of :meth:`KeepRule.num_blocks_for`.
        """
        if cache is None:
            return sum(rule.num_blocks_for(num_tokens, num_new, self.block_size, kept_share) for rule in self._rules)
        num_places = num_blocks_for(num_tokens, self.block_size) - num_blocks_for(cache.capacity, self.block_size)
        num_places = max(0, num_places) + cache.may_share_tail
        num_blocks = 0
        for rule, table in zip(self._rules, cache.tables, strict=True):
            num_held, num_packed, num_lacking = table.num_held, 0, num_places
            if rule.packs:  # what is packed fills what it fills
                num_packed = len(cache.chunks)
                num_held += len(cache.granted)
                num_due = max(0, rule.num_packed(num_tokens) - num_packed)
                num_lacking += max(0, num_due * rule.chunk_blocks(self.block_size) - len(cache.granted))
            most = rule.num_blocks_for(num_tokens, num_new, self.block_size, kept_share, num_packed)
            num_blocks += min(max(0, most - num_held), num_lacking)
        return num_blocks

    def blocks_of(self, hit: PrefixHit) -> list[Block]:
        """Return the blocks that a cache holds which is made from ``hit``, but for a partial one and loaded ones."""
        blocks = [
            block
            for group, rule in enumerate(self._rules)
            for at in rule.places(hit.num_blocks, self.block_size)
            if at < len(hit.nodes) and (block := hit.nodes[at].blocks[group]) is not None
        ]
        return [*blocks, *(block for chunk in self.packed_of(hit.nodes) for block in chunk.blocks)]

    def packed_of(self, nodes: list[Node]) -> list[PackedChunk]:
        """Return the packed chunks that whoever goes on behind the path ``nodes`` needs, as far as they are there."""
        rule = self.packing
        if rule is None:
            return []
        found = []
        for chunk in range(rule.num_packed(len(nodes) * self.block_size)):
            packed = nodes[rule.chunk_places(chunk, self.block_size)[-1]].packed
            if packed is None:
                break
            found.append(packed)
        return found

    def num_whole(self, nodes: list[Node]) -> int:
        """Return how many of ``nodes`` can be gone on from.

        Groups that keep the last tokens only have those; and where chunks are packed, those before are.
        """
        num_places, rule = len(nodes), self.packing
        if rule is not None:  # what is being written now is not packed yet
            num_places = min(num_places, rule.reach(len(self.packed_of(nodes))) // self.block_size)
        return self.last_whole(num_places, lambda at, group: nodes[at].blocks[group] is not None)

    def last_whole(self, num_places: int, has: Callable[[int, int], bool]) -> int:
        """Return how many of a path's places can be gone on from: whoever does finds there what each group keeps.

        It looks from the end, and not twice at one place of a window.

        Args:
            num_places: of the path; groups that keep all have all of them.
            has: whether the block of a group at a place is there.
        """
        end = num_places
        for group in self.trimmed:
            end = next((at for at in range(min(end, self._num_sink_blocks[group])) if not has(at, group)), end)
        begins = [end] * len(self._rules)  # each group has all from there on, up to the last end
        lacks = [-1] * len(self._rules)  # and not the one before, where that is known
        while end:
            lacking = -1
            for group in self.trimmed:
                first = self._rules[group].first_block(end, self.block_size)
                if first <= lacks[group] < end:
                    lacking = max(lacking, lacks[group])
                    continue
                for at in range(min(end, begins[group]) - 1, max(first - 1, lacking), -1):
                    if not has(at, group):
                        lacking = lacks[group] = at
                        break
                    begins[group] = at
            if lacking < 0:
                break
            end = lacking  # who goes on behind that place, and not beyond ``end``, needs it too
        return end

    def held_part(self, nodes: list[Node], num_blocks: int) -> list[Node]:
        """Return the first of ``nodes``, up to the last that has a block which whoever goes on behind the path needs.

        Who holds what it needs keeps these in the tree, and not those behind them.

        Args:
            nodes: the first of the path.
            num_blocks: of the path.
        """
        if self.keeps_paths:
            return nodes
        firsts = [rule.first_block(num_blocks, self.block_size) for rule in self._rules]
        rule, size = self.packing, self.block_size
        num_packed = 0 if rule is None else rule.num_packed(num_blocks * size) * rule.chunk_blocks(size)

        def is_held(at: int) -> bool:
            packed = nodes[at].packed if at < num_packed else None
            return bool(packed is not None and packed.blocks) or any(
                nodes[at].blocks[group] is not None and (at >= first or self.is_sink(at, group))
                for group, first in enumerate(firsts)
            )

        num_held = next((at + 1 for at in reversed(range(len(nodes))) if is_held(at)), 0)
        return nodes[:num_held]

    def is_sink(self, place: int, group: int) -> bool:
        """Whether a group has sinks in its block at one place of a path."""
        return place < self._num_sink_blocks[group]

    def is_whole(self, node: Node) -> bool:
        """Whether who goes on at the end of ``node``'s path finds there what each group keeps.

        Blocks of sinks are there as long as the path is (``window_blocks.py``). Packed chunks are not asked for.
        """
        end = node.depth + 1
        for group in self.trimmed:
            num_needed = end - self._rules[group].first_block(end, self.block_size)
            if len(self.last_blocks(node, group, num_needed)) < num_needed:
                return False
        return True

    @staticmethod
    def last_blocks(node: Node, group: int, num_blocks: int) -> list[Block]:
        """Return a group's last blocks of ``node``'s path, the last first: so many, or those up to where one is gone.

        Args:
            node: the last of the path, which has so many nodes at least.
            group: of which group.
            num_blocks: how many are wanted.
        """
        found: list[Block] = []
        at: Node | None = node
        while len(found) < num_blocks:
            assert at is not None, "a path ends at its root"
            block = at.blocks[group]
            if block is None:
                break
            found.append(block)
            at = at.parent
        return found
