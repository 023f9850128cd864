"""WindowBlocks: cached blocks of groups that keep the last tokens only, and the order in which they go one by one.

Such a block need not wait until its node is a leaf. When nobody holds it, it is one of these:

- *stale*: who held it last has left it behind, and no landmark keeps it;
- kept: likewise, but a landmark keeps it, and is firm or is not;
- idle: who held it last ended there, so whoever goes on needs it.

Transfers and pins keep a block for a while, and change nothing of that.

Blocks of sinks are none of these. All windows of all paths behind them need them, and they are few: so they go as the
blocks of a group that keeps all do, with their node when that is a leaf. So a path that is there has its sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.block import BlockState
from pagefold.kv.keep import NO_MASK
from pagefold.kv.landmarks import Landmarks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv.block import Block, Node
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.landmarks import Landmark, MarkReason

__all__ = ["WindowBlocks"]


class WindowBlocks:
    """Blocks that nobody holds, each in one of four orders; the first of an order goes first.

    Args:
        rules: what each cache group keeps.

    Attributes:
        landmarks: the places whose windows are kept.
    """

    def __init__(self, rules: KeepRules) -> None:
        self.landmarks = Landmarks(rules)
        self._rules = rules
        self._groups = frozenset(rules.trimmed)
        self._left: set[Block] = set()  # whom the last table left behind, also while a transfer or a pin keeps them
        self._stale: dict[Block, bool] = {}  # whether the host should keep it when it goes
        self._kept: dict[Block, None] = {}
        self._firm: dict[Block, None] = {}
        self._idle: dict[Block, None] = {}

    def all(self) -> list[Block]:
        """Return all of them, in the order in which they go if nothing else can."""
        return [*self._stale, *self._kept, *self._firm, *self._idle]

    def goes_alone(self, block: Block) -> bool:
        """Whether ``block``, which is published, need not wait until its node is a leaf."""
        if block.group not in self._groups:
            return False
        assert block.node is not None, "what is published has its node"
        if block.node.root.mask == NO_MASK and self._rules[block.group].packs:
            return False
        return not self._rules.is_sink(block.node.depth, block.group)

    def is_spare(self, block: Block) -> bool:
        """Whether ``block`` is not worth to be kept elsewhere: left behind, and no firm landmark keeps it."""
        return block in self._left and not self.landmarks.is_firm(block)

    def misplaced(self) -> list[Block]:
        """Return those that are in an order in which they do not belong: for audits."""
        is_firm, keeps = self.landmarks.is_firm, self.landmarks.keeps
        wrong = [block for block in self._stale if keeps(block)]
        wrong += [block for block in self._kept if is_firm(block) or not keeps(block)]
        wrong += [block for block in self._firm if not is_firm(block)]
        wrong += [block for block in (*self._stale, *self._kept, *self._firm) if block not in self._left]
        return wrong + [block for block in self._idle if block in self._left]

    # What happens to blocks.

    def note_idle(self, block: Block, *, is_left: bool = False) -> None:
        """Nobody holds ``block`` any more.

        Args:
            block: that was released, of any group.
            is_left: whether who held it last has left it behind.
        """
        if not self.goes_alone(block):
            return
        if block.num_table_refs:
            self._left.discard(block)
        elif is_left:
            self._left.add(block)
        if block.state != BlockState.CACHED or block.num_io_refs or block.num_pin_refs:
            self._withdraw(block)
        elif block not in self._left:
            self._idle.setdefault(block)
        elif not (block in self._stale or block in self._kept or block in self._firm):
            self._leave(block, to_host=False)

    def note_busy(self, block: Block) -> None:
        """A table holds ``block``: it cannot go."""
        self._left.discard(block)
        self._withdraw(block)

    def note_gone(self, block: Block) -> None:
        """``block`` is published no more: landmarks that keep it are none."""
        self.note_busy(block)
        for landmark in self.landmarks.forget(block):
            self._drop([landmark], to_host=landmark.is_firm)

    def mark(self, node: Node, why: MarkReason) -> None:
        """Make the end of ``node``'s path a landmark: a sequence has passed it, and holds its windows."""
        for landmark in self.landmarks.mark(node, why):
            self._sort(landmark.blocks, to_host=False)

    # What goes next.

    def stale_block(self) -> Block | None:
        """Return a block that goes before all others."""
        return next(iter(self._stale), None)

    def kept_block(self) -> Block | None:
        """Return a block that is kept, but not firmly. Landmarks that keep it are none then."""
        return self._give_up(self._kept, to_host=False)

    def firm_block(self) -> Block | None:
        """Return a block that is kept firmly. Landmarks that keep it are none then."""
        return self._give_up(self._firm, to_host=True)

    def idle_block(self) -> Block | None:
        """Return a block that somebody ended with."""
        return next(iter(self._idle), None)

    def goes_to_host(self, block: Block) -> bool:
        """Whether the host should keep what of ``block`` goes."""
        return self._stale.get(block, True)

    # Inside.

    def _withdraw(self, block: Block) -> None:
        """Take ``block`` out of its order, if it is in one."""
        for order in (self._idle, self._stale, self._kept, self._firm):
            order.pop(block, None)

    def _leave(self, block: Block, *, to_host: bool) -> None:
        """Put ``block``, which is in no order, into one."""
        if self.landmarks.is_firm(block):
            self._firm[block] = None
        elif self.landmarks.keeps(block):
            self._kept[block] = None
        else:
            self._stale[block] = to_host

    def _sort(self, blocks: Iterable[Block], *, to_host: bool) -> None:
        """Put those of ``blocks`` that were left behind where they belong since landmarks have changed."""
        is_firm, keeps = self.landmarks.is_firm, self.landmarks.keeps
        for block in blocks:
            if block in self._firm:
                if not is_firm(block):
                    del self._firm[block]
                    self._leave(block, to_host=to_host)
            elif block in self._kept:
                if is_firm(block) or not keeps(block):
                    del self._kept[block]
                    self._leave(block, to_host=to_host)
            elif block in self._stale and keeps(block):
                del self._stale[block]
                self._leave(block, to_host=to_host)

    def _drop(self, landmarks: Iterable[Landmark], *, to_host: bool) -> None:
        """Let landmarks be none. Each of their blocks is looked at once: many may keep the same."""
        touched: dict[Block, None] = {}
        for landmark in landmarks:
            self.landmarks.drop(landmark)
            touched.update(dict.fromkeys(landmark.blocks))
        self._sort(touched, to_host=to_host)

    def _give_up(self, order: dict[Block, None], *, to_host: bool) -> Block | None:
        """Return the first block of an order, and let the landmarks that keep it be none: it is stale then."""
        block = next(iter(order), None)
        if block is not None:
            self._drop(self.landmarks.keepers(block), to_host=to_host)
        return block
