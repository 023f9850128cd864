"""Publishing: what a step writes is known to others from when it is planned, and stays known if the step ran.

The life of what a step will write::

    promise = publishing.promise(cache, packed, end)    others may lean on the blocks
    publishing.commit(promise)                          the step ran: what was promised is written and stays
    publishing.abandon(promise)                         the step failed: it is taken back

Of one cache group that keeps all, every place of a path has one block. Of several, one for each group that keeps what
is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import BlocksPublished, BlocksRegained, Emit
from pagefold.kv.sequence_cache import Promise
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from pagefold.kv.block import Block, Node
    from pagefold.kv.block_cache import BlockCache
    from pagefold.kv.sequence_cache import SequenceCache
    from pagefold.kv.table import BlockTable

__all__ = ["Publishing", "PublishingByGroups"]


class Publishing:
    """Promises of caches, and what becomes of them, where there is one cache group, which keeps all.

    Args:
        blocks: of the device.
        block_size: tokens a block.
        emit: where events go.
    """

    def __init__(self, blocks: BlockCache, block_size: int, emit: Emit) -> None:
        self._blocks = blocks
        self._emit = emit
        self._pool, self._tree, self._policy = blocks.pool, blocks.tree, blocks.policy
        self._block_size = block_size
        self._stride = block_size * TOKEN_BYTES
        self._alone = [(block,) for block in blocks.pool.blocks]  # made once: a node has them as long as it is there

    def promise(self, cache: SequenceCache, packed: bytes, num_tokens: int) -> Promise | None:
        """Publish the whole blocks among the first ``num_tokens`` that the step being planned will complete.

        Until :meth:`commit` they are promised: requests planned later in the same step may lean on them, since each
        layer writes K and V before it attends. None when there is nothing to publish.

        A cache may have two: that of a step in flight, and that of the step planned behind it.
        """
        older = cache.promise
        assert older is None or older.before is None, "two promises a cache: commit or abandon the last ones first"
        tail = cache.tail
        index = cache.num_published
        num_blocks = num_tokens // self._block_size
        if num_blocks <= index or tail is None:
            return None
        if tail.parent is None:
            tail = self._tree.root(tail.key, mask=tail.mask)  # the namespace's root may have left and come back since
        promise = Promise(cache, packed, num_blocks, tail)
        cache.promise = promise
        stride = self._stride
        tick, now_s = self._blocks.tick, self._blocks.now_s
        own_at = self._own
        insert = self._tree.insert
        on_insert = self._policy.on_insert
        while index < num_blocks:
            key = packed[index * stride : (index + 1) * stride]
            if key in tail.children:
                break  # somebody else's: commit() joins it once ours and theirs are both written
            own = own_at(cache, index)
            if own is None:
                break
            node = insert(tail, key, own, tick)
            node.born_s = node.used_s = now_s
            on_insert(node)
            tail = node
            index += 1
        cache.tail = promise.end = tail
        cache.num_published = index
        return promise

    def commit(self, promise: Promise, *, joins: bool = True) -> None:
        """The step ran: what was promised is written and stays. A cache's oldest promise first.

        Where another cache had published the same tokens first, this cache joins those blocks: see :meth:`join`. Not
        without ``joins``: then that is the caller's, when all of the step is committed, and no other reads its tables.
        """
        cache = promise.cache
        assert promise.before is None, "a cache's oldest promise is committed first"
        if cache.promise is promise:
            cache.promise = None
        elif cache.promise is not None:
            cache.promise.before = None
        if cache.tail is None:  # the cache was reset while the step ran
            return
        node = promise.end
        written: list[Node] = []
        while node is not promise.tail:
            node.committed = True
            written.append(node)
            assert node.parent is not None
            node = node.parent
        written.reverse()
        self._tell(cache, written)
        if joins and promise.is_behind:
            self.join(promise)

    def join(self, promise: Promise) -> None:
        """Publish what a committed promise left; where others had published the same tokens first, join their blocks.

        The cache gives its own back for them, so that a published path is always the path of the cache itself.
        """
        if not promise.is_behind:
            return
        cache = promise.cache
        tail = cache.tail
        assert tail is not None, "behind, and it publishes nothing"
        if tail.parent is None:
            tail = self._tree.root(tail.key, mask=tail.mask)
        index = cache.num_published
        late: list[Node] = []
        while index < promise.num_blocks:
            key = promise.packed[index * self._stride : (index + 1) * self._stride]
            child = tail.children.get(key)
            if child is None:
                own = self._own(cache, index)
                if own is None:
                    break
                child = self._tree.insert(tail, key, own, self._blocks.tick)
                child.born_s = self._blocks.now_s
                child.committed = True
                late.append(child)
                self._policy.on_insert(child)
                if tail.evictable:  # a leaf until now, of which the cache holds nothing: it has led to this one
                    self._blocks.update_evictable(tail)
            elif child.committed:
                if not self._exchange(cache, index, child):
                    break
            else:  # theirs is still being written by a step in flight: try again when this cache grows
                break
            child.last_used = self._blocks.tick
            child.used_s = self._blocks.now_s
            tail = child
            index += 1
        while index > cache.num_published and not self._holds(cache, index - 1):
            assert tail.parent is not None, "what is published are the nodes of a path"
            tail = tail.parent  # else who has nothing there would lean on it
            index -= 1
        self._tell(cache, late)
        cache.tail = tail
        cache.num_published = index

    def abandon(self, promise: Promise) -> None:
        """The step failed: take back what was promised. Newest promise first.

        Tables that lean on it (acquired after the promise was made) must be released by the caller, after all promises
        of the step are abandoned: their blocks hold nothing.
        """
        cache = promise.cache
        assert cache.promise is promise, "a cache's newest promise is abandoned first"
        cache.promise = promise.before
        node = cache.tail
        if node is None:
            return
        while node is not promise.tail:
            parent = node.parent
            if parent is None:  # another root: the namespace's may have left and come back between two promises
                break
            self._tree.remove(node)
            self._policy.on_evict(node)
            for block in node.blocks:
                if block is not None:
                    self._pool.withdraw(block)
            node = parent
        cache.tail = promise.tail
        cache.num_published = promise.first

    # Inside.

    def _tell(self, cache: SequenceCache, nodes: list[Node]) -> None:
        """Tell what a cache has published, if that is anything."""
        if nodes:
            self._emit(BlocksPublished(cache.owner, tuple(nodes)))

    def _own(self, cache: SequenceCache, index: int) -> tuple[Block | None, ...] | None:
        """Return the blocks of every group at one place of a path, none of a group that does not keep what is there.

        None if a fork holds one too, off the tree: published, it would not be of that one's path.
        """
        own = self._alone[cache.tables[0].block_ids[index]]
        return None if own[0].num_table_refs > 1 else own

    def _holds(self, cache: SequenceCache, index: int) -> bool:  # noqa: ARG002
        """Whether a cache holds any block at one place of its path."""
        return True

    def _exchange(self, cache: SequenceCache, index: int, node: Node) -> bool:
        """Give the block of ``cache`` at one place back for that of ``node``, which holds the same."""
        block_ids = cache.tables[0].block_ids
        theirs = node.blocks[0]
        assert theirs is not None, "a node of a group that keeps all has its block to its end"
        own = self._pool.blocks[block_ids[index]]
        self._pool.acquire(theirs)
        self._blocks.update_evictable(node)
        block_ids[index] = theirs.block_id
        self._pool.release(own)
        return True


class PublishingByGroups(Publishing):
    """The same where there are several groups, or one that keeps the last tokens only."""

    def __init__(self, blocks: BlockCache, block_size: int, emit: Emit) -> None:
        super().__init__(blocks, block_size, emit)
        self._regained: list[Node] = []  # of the path that is being joined

    def _tell(self, cache: SequenceCache, nodes: list[Node]) -> None:
        """Tell what nodes have regained, and then what lies behind them."""
        if self._regained:
            self._emit(BlocksRegained(tuple(self._regained)))
            self._regained.clear()
        super()._tell(cache, nodes)

    def _own(self, cache: SequenceCache, index: int) -> tuple[Block | None, ...] | None:
        """Return the blocks of every group at one place; see :class:`Publishing`.

        None, too, at a place of which no group keeps anything, if what lies behind it cannot be published: nodes
        without blocks only lead to others.
        """
        own = tuple(self._at(table, index) for table in cache.tables)
        if not any(own) and self._own(cache, min(table.num_trimmed for table in cache.tables)) is None:
            return None
        return None if any(block is not None and block.num_table_refs > 1 for block in own) else own

    def _exchange(self, cache: SequenceCache, index: int, node: Node) -> bool:
        """Give blocks of ``cache`` back for those of ``node``, which hold the same; or to ``node``, where it has none.

        False, with nothing changed, where a fork holds what ``node`` would be given.
        """
        pool = self._pool
        pairs = [
            (table, own, theirs)
            for table, theirs in zip(cache.tables, node.blocks, strict=True)
            if (own := self._at(table, index)) is not None
        ]
        if any(theirs is None and own.num_table_refs > 1 for _, own, theirs in pairs):
            return False
        for _, own, theirs in pairs:
            if theirs is None:
                node.put(own.group, own)
                own.node = node
                self._regained.append(node)
            else:
                pool.acquire(theirs)
        self._blocks.update_evictable(node)
        for table, own, theirs in pairs:
            if theirs is not None:
                table.put(index, theirs.block_id)
                pool.release(own)
        return True

    def _holds(self, cache: SequenceCache, index: int) -> bool:
        """Whether a cache holds any block at one place of its path."""
        return any(table.at(index) is not None for table in cache.tables)

    def _at(self, table: BlockTable, index: int) -> Block | None:
        """Return what a table has at one place of a path."""
        block_id = table.at(index)
        return None if block_id is None else self._pool.blocks[block_id]
