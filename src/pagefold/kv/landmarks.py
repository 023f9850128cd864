"""Landmarks: places of paths where somebody may begin again, and the blocks of windows that this takes.

Of a group that keeps the last tokens only, whoever goes on at a place needs the window that ends there, and nothing
before it. Sequences leave windows behind all the time; of which places they stay cached is chosen here. A *firm*
landmark's windows stay as long as its path does; those of others while memory is to spare.

A landmark is a wish: it holds no block, and ends with the first of its blocks that goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pagefold.kv.block import Block, Node
    from pagefold.kv.keep_rules import KeepRules

__all__ = ["Landmark", "Landmarks", "MarkReason"]

MarkReason: TypeAlias = Literal["message", "prompt", "turn", "parting", "lost"]
"""Why a place is a landmark:

* ``message``: a message of a conversation ends there; or a sequence ended there, and others had gone on.
* ``prompt``: the last message of a prompt ends there. It is firm until the conversation has gone on from its end: an
  answer may be asked for once more, or be told of without its thinking.
* ``turn``: a sequence went on from the end of a path.
* ``parting``: a sequence went on from a place that another had gone on from. It is firm when that happens again.
* ``lost``: likewise, but the window was gone, and was computed once more. It is firm at once.
"""


_PARTINGS = {"parting": 1, "lost": 2}
"""For how many sequences that parted there a mark counts: who found no window was not the first to want it."""


class Landmark:
    """One place.

    Attributes:
        node: the last node of the path up to there.
        blocks: what it keeps, of all groups that leave tokens behind.
        num_partings: how many sequences have gone on from there, or wanted to, where another had gone on.
        ends_prompt: whether the last message of a prompt ends there, and nobody has gone on from a place behind it.
    """

    __slots__ = ("blocks", "ends_prompt", "node", "num_partings")

    def __init__(self, node: Node, blocks: tuple[Block, ...]) -> None:
        self.node = node
        self.blocks = blocks
        self.num_partings = 0
        self.ends_prompt = False

    @property
    def is_firm(self) -> bool:
        """Whether its windows stay as long as its path."""
        return self.ends_prompt or self.num_partings > 1


class Landmarks:
    """All landmarks, by their places and by the blocks that they keep.

    Args:
        rules: what each cache group keeps.
    """

    def __init__(self, rules: KeepRules) -> None:
        self._rules = rules
        self._at: dict[Node, Landmark] = {}
        self._keepers: dict[Block, dict[Landmark, None]] = {}
        self._num_firm: dict[Block, int] = {}  # how many of them are firm, where any is

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._at)

    def __iter__(self) -> Iterator[Landmark]:
        """Yield all of them."""
        return iter(self._at.values())

    def at(self, node: Node) -> Landmark | None:
        """Return the landmark at the end of ``node``'s path."""
        return self._at.get(node)

    def keepers(self, block: Block) -> tuple[Landmark, ...]:
        """Return the landmarks that keep ``block``."""
        return tuple(self._keepers.get(block, ()))

    def keeps(self, block: Block) -> bool:
        """Whether any landmark keeps ``block``."""
        return block in self._keepers

    def is_firm(self, block: Block) -> bool:
        """Whether a firm one does."""
        return block in self._num_firm

    def mark(self, node: Node, why: MarkReason) -> list[Landmark]:
        """Make the end of ``node``'s path a landmark, if its window is there as a whole. Return those that changed."""
        landmark = self._at.get(node) or self._add(node)
        if landmark is None:
            return []
        changed = [landmark]
        if why == "turn":
            passed = self._last_prompt_above(node)
            if passed is not None:
                changed.append(passed)
        was_firm = [each.is_firm for each in changed]
        if why == "prompt":
            landmark.ends_prompt = True
        elif why in _PARTINGS:
            landmark.num_partings += _PARTINGS[why]
        elif why == "turn":
            for each in changed:
                each.ends_prompt = False
        for each, before in zip(changed, was_firm, strict=True):
            if each.is_firm != before:
                self._count_firm(each.blocks, 1 if each.is_firm else -1)
        return changed

    def drop(self, landmark: Landmark) -> None:
        """Let a landmark be none."""
        del self._at[landmark.node]
        if landmark.is_firm:
            self._count_firm(landmark.blocks, -1)
        for block in landmark.blocks:
            keepers = self._keepers.get(block)
            if keepers is None:  # the one that is gone
                continue
            del keepers[landmark]
            if not keepers:
                del self._keepers[block]

    def forget(self, block: Block) -> tuple[Landmark, ...]:
        """``block`` is gone. Return the landmarks that kept it, which are to be dropped."""
        return tuple(self._keepers.pop(block, ()))

    # Inside.

    def _count_firm(self, blocks: Iterable[Block], change: int) -> None:
        counts = self._num_firm
        for block in blocks:
            count = counts.get(block, 0) + change
            if count:
                counts[block] = count
            else:
                del counts[block]

    def _add(self, node: Node) -> Landmark | None:
        blocks = self._blocks_behind(node)
        if blocks is None:
            return None
        landmark = self._at[node] = Landmark(node, blocks)
        for block in blocks:
            self._keepers.setdefault(block, {})[landmark] = None
        return landmark

    def _last_prompt_above(self, node: Node) -> Landmark | None:
        above = node.parent
        while above is not None and above.blocks:
            landmark = self._at.get(above)
            if landmark is not None and landmark.ends_prompt:
                return landmark
            above = above.parent
        return None

    def _blocks_behind(self, node: Node) -> tuple[Block, ...] | None:
        """Return the windows that are needed at the end of ``node``'s path, and those inside its last block, too.

        Who begins inside the last block copies a part of it, and may see one block more. None where a block is gone
        that is needed at the end itself. Sinks need not be kept: they stay as long as the path does.
        """
        rules = self._rules.of(node.root.mask)
        size, end = rules.block_size, node.depth + 1
        found: list[Block] = []
        for group in rules.trimmed:
            rule = rules[group]
            num_needed = end - rule.first_block(end, size)
            num_wanted = max(num_needed, end - rule.first_block(end - 1, size))
            of_group = rules.last_blocks(node, group, num_wanted)
            if len(of_group) < num_needed:
                return None
            found += of_group if len(of_group) == num_wanted else of_group[:num_needed]
        return tuple(found)
