"""BlockTable: which blocks hold a sequence's tokens, and where in them a position lies; and what a step promises it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.eviction import RequestFacts

if TYPE_CHECKING:
    from pagefold.kv.block import BlockId, Node
    from pagefold.kv.held_block import HeldBlock

__all__ = ["BlockTable", "Promise", "num_blocks_for", "slot_of"]

_NO_FACTS = RequestFacts()


class BlockTable:
    """The blocks of one sequence, in order of position.

    Attributes:
        block_ids: position ``p`` lies in block ``block_ids[p // block_size]``, at ``p % block_size``. Ids from the
            number of the device's blocks on are blocks of the host's arena, of a table that streams.
        capacity: how many tokens the blocks can hold: ``len(block_ids) * block_size``.
        num_published: the first so many blocks are those of the tree path that ends in ``tail``.
        tail: the deepest node of that path; the namespace's root when nothing is published; None when this table
            publishes nothing, because caching is off or the cache was reset.
        may_share_tail: a fork may hold the last block too, so a write must look first.
        copied_from: whose block it took a part of, if it began so.
        promise: what the newest step being planned or run will add, if anything.
        cold_root: digest of its namespace, if it is one that streams (``streaming.py``); else None. After a reset one
            that nobody else has.
        cold_tip: digest of the path that its cold blocks are.
        cold: the host's blocks that are its first ones, if it streams.
        num_loaded_tokens: how many of its tokens were loaded when it was acquired, by the tier that they came from.
        residual_id: where it has its unsealed block, of a codec that seals blocks (``residuals.py``); else -1.
        facts: of the request that holds it, for the eviction policy; whoever releases the table may set them before.

    Always: ``num_published <= len(block_ids)``, and the path from the root to ``tail`` publishes exactly
    ``block_ids[:num_published]``.
    """

    __slots__ = (
        "block_ids",
        "capacity",
        "cold",
        "cold_root",
        "cold_tip",
        "copied_from",
        "facts",
        "may_share_tail",
        "num_loaded_tokens",
        "num_published",
        "promise",
        "residual_id",
        "tail",
    )

    def __init__(self, tail: Node | None) -> None:
        self.block_ids: list[BlockId] = []
        self.capacity = 0
        self.num_published = 0
        self.tail = tail
        self.may_share_tail = False
        self.copied_from: Node | None = None
        self.promise: Promise | None = None
        self.cold_root: bytes | None = None
        self.cold_tip = b""
        self.cold: list[HeldBlock] = []
        self.num_loaded_tokens: dict[str, int] = {}
        self.residual_id = -1
        self.facts = _NO_FACTS

    @property
    def streams(self) -> bool:
        """Whether it is one that streams (``streaming.py``)."""
        return self.cold_root is not None

    @property
    def has_path(self) -> bool:
        """Whether it holds published blocks that are still in the tree: not if the step failed that wrote them."""
        return bool(self.num_published) and self.tail is not None and self.tail.attached


class Promise:
    """Blocks of one table that the step being planned will fill: published before they are written.

    Attributes:
        table: whose blocks.
        packed: the sequence's packed tokens.
        num_blocks: how many whole blocks the table will have written when the step has run.
        first: ``table.num_published`` before the promise.
        tail: ``table.tail`` before the promise.
        end: ``table.tail`` after it: what is promised are the nodes behind ``tail``, up to ``end``.
        before: the table's promise of the step before, where that is still in flight.
    """

    __slots__ = ("before", "end", "first", "num_blocks", "packed", "table", "tail")

    def __init__(self, table: BlockTable, packed: bytes, num_blocks: int, tail: Node) -> None:
        self.table = table
        self.packed = packed
        self.num_blocks = num_blocks
        self.first = table.num_published
        self.tail = self.end = tail
        self.before = table.promise

    @property
    def is_behind(self) -> bool:
        """Whether somebody else's blocks are where some of the table's should be published."""
        return self.table.tail is not None and self.table.num_published < self.num_blocks


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks ``num_tokens`` need: a ceiling division."""
    return -(-num_tokens // block_size)


def slot_of(block_ids: list[BlockId], position: int, block_size: int) -> int:
    """Return the slot of ``position`` in the slab: ``block_id * block_size + offset``."""
    return block_ids[position // block_size] * block_size + position % block_size
