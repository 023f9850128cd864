"""SequenceCache: what one sequence has of the device's blocks, and what a step promises it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.eviction import RequestFacts
from pagefold.kv.quotas import EVERYBODY
from pagefold.kv.table import BlockTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Block, BlockId, Node, PackedChunk
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.landmarks import MarkReason

__all__ = ["Mark", "Promise", "SequenceCache"]

_NO_FACTS = RequestFacts()


class Mark(NamedTuple):
    """A place of a sequence's path that will be a landmark when it is published.

    Attributes:
        end: how many blocks of the path there are up to it.
        why: what happened there, or may.
    """

    end: int
    why: MarkReason


class SequenceCache:
    """What one sequence has on the device: for each cache group a block table, and how far it is published.

    Attributes:
        tables: one for each cache group, in the groups' order.
        capacity: how many positions the tables reach up to: all of them end with the same one.
        num_published: the first so many blocks are those of the tree path that ends in ``tail``.
        num_begun: how many blocks of its path were found when it, or what it was forked from, was acquired. Those that
            were loaded are published later: by its first promise, or when nobody else promises the same.
        tail: the deepest node of that path; the namespace's root when nothing is published; None when this cache
            publishes nothing, because caching is off or the cache was reset.
        may_share_tail: a fork may hold the last block too, so a write must look first.
        copied_from: whose block it took a part of, if it began so.
        marks: places that will be landmarks, the next one last; where all groups keep all there are none.
        promise: what the newest step being planned or run will add, if anything.
        cold_root: digest of its namespace, if it is one that streams (``streaming.py``); else None. After a reset one
            that nobody else has.
        cold_tip: digest of the path that its cold blocks are.
        cold: the host's blocks that are its first ones, if it streams.
        num_loaded_tokens: how many of its tokens were loaded when it, or what it was forked from, was acquired, by the
            tier that they came from.
        residual_id: where it has its unsealed block, of a codec that seals blocks (``residuals.py``); else -1.
        chunks: its packed chunks, from the first on (``packing.py``).
        num_packed_blocks: how many blocks these fill.
        granted: blocks for the chunks that the step packs which is being planned or run.
        mask: by which mask it keeps older tokens, where those are packed; ``NO_MASK`` for all of them.
        owner: the request that holds it, as events name it; nothing that is decided hangs on it.
        tenant: whose it is.
        facts: of the request that holds it, for the eviction policy; whoever releases the cache may set them before.

    Always: the path from the root to ``tail`` has ``num_published`` nodes, and where a table holds one of the first so
    many blocks, that node publishes it; or, of a group that trims, it was loaded since the node had none.
    """

    __slots__ = (
        "capacity",
        "chunks",
        "cold",
        "cold_root",
        "cold_tip",
        "copied_from",
        "facts",
        "granted",
        "marks",
        "mask",
        "may_share_tail",
        "num_begun",
        "num_loaded_tokens",
        "num_packed_blocks",
        "num_published",
        "owner",
        "promise",
        "residual_id",
        "tables",
        "tail",
        "tenant",
    )

    def __init__(self, num_groups: int, tail: Node | None) -> None:
        self.tables = tuple(BlockTable() for _ in range(num_groups))
        self.capacity = 0
        self.num_published = self.num_begun = 0
        self.tail = tail
        self.may_share_tail = False
        self.copied_from: Node | None = None
        self.marks: list[Mark] = []
        self.promise: Promise | None = None
        self.cold_root: bytes | None = None
        self.cold_tip = b""
        self.cold: list[HeldBlock] = []
        self.num_loaded_tokens: dict[str, int] = {}
        self.residual_id = -1
        self.chunks: list[PackedChunk] = []
        self.num_packed_blocks = 0
        self.granted: list[Block] = []
        self.mask = 0
        self.owner = ""
        self.tenant = EVERYBODY
        self.facts = _NO_FACTS

    @property
    def only_table(self) -> BlockTable:
        """The table of a cache of one group, as every one is that streams."""
        (table,) = self.tables
        return table

    @property
    def streams(self) -> bool:
        """Whether it is one that streams (``streaming.py``)."""
        return self.cold_root is not None

    @property
    def has_path(self) -> bool:
        """Whether it holds published blocks that are still in the tree: not if the step failed that wrote them."""
        return bool(self.num_published) and self.tail is not None and self.tail.attached

    def all_block_ids(self) -> Iterator[BlockId]:
        """Yield the blocks of all groups, and of packed chunks."""
        for table in self.tables:
            yield from table.all_ids()
        for chunk in self.chunks:
            yield from (block.block_id for block in chunk.blocks)
        yield from (block.block_id for block in self.granted)


class Promise:
    """Blocks of one cache that the step being planned will fill: published before they are written.

    Attributes:
        cache: whose blocks.
        packed: the sequence's packed tokens.
        num_blocks: how many whole blocks the cache will have written when the step has run.
        first: ``cache.num_published`` before the promise.
        tail: ``cache.tail`` before the promise.
        end: ``cache.tail`` after it: what is promised are the nodes behind ``tail``, up to ``end``.
        before: the cache's promise of the step before, where that is still in flight.
    """

    __slots__ = ("before", "cache", "end", "first", "num_blocks", "packed", "tail")

    def __init__(self, cache: SequenceCache, packed: bytes, num_blocks: int, tail: Node) -> None:
        self.cache = cache
        self.packed = packed
        self.num_blocks = num_blocks
        self.first = cache.num_published
        self.tail = self.end = tail
        self.before = cache.promise

    @property
    def is_behind(self) -> bool:
        """Whether somebody else's blocks are where some of the cache's should be published."""
        return self.cache.tail is not None and self.cache.num_published < self.num_blocks
