"""Publishing: what a step writes is known to others from when it is planned, and stays known if the step ran.

The life of what a step will write::

    promise = publishing.promise(table, packed, end)    others may lean on the blocks
    publishing.commit(promise)                          the step ran: what was promised is written and stays
    publishing.abandon(promise)                         the step failed: it is taken back
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.table import Promise
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from pagefold.kv.block_cache import BlockCache
    from pagefold.kv.table import BlockTable

__all__ = ["Publishing"]


class Publishing:
    """Promises of tables, and what becomes of them.

    Args:
        cache: the blocks.
        block_size: tokens a block.
    """

    def __init__(self, cache: BlockCache, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._stride = block_size * TOKEN_BYTES

    def promise(self, table: BlockTable, packed: bytes, num_tokens: int) -> Promise | None:
        """Publish the whole blocks among the first ``num_tokens`` that the step being planned will complete.

        Until :meth:`commit` they are promised: requests planned later in the same step may lean on them, since each
        layer writes K and V before it attends. None when there is nothing to publish.

        A table may have two: that of a step in flight, and that of the step planned behind it.
        """
        older = table.promise
        assert older is None or older.before is None, "two promises a table: commit or abandon the last ones first"
        tail = table.tail
        index = table.num_published
        num_blocks = num_tokens // self._block_size
        if num_blocks <= index or tail is None:
            return None
        if tail.parent is None:
            tail = self._cache.tree.root(tail.key)  # the namespace's root may have left and come back since
        promise = Promise(table, packed, num_blocks, tail)
        table.promise = promise
        stride = self._stride
        tick, now_s = self._cache.tick, self._cache.now_s
        blocks = self._cache.pool.blocks
        block_ids = table.block_ids
        insert = self._cache.tree.insert
        on_insert = self._cache.policy.on_insert
        while index < num_blocks:
            key = packed[index * stride : (index + 1) * stride]
            if key in tail.children:
                break  # somebody else's: commit() joins it once ours and theirs are both written
            block = blocks[block_ids[index]]
            if block.num_table_refs > 1:
                break  # a fork holds it too, off the tree: published, it would not be of that table's path
            node = insert(tail, key, block, tick)
            node.born_s = node.used_s = now_s
            block.node = node
            on_insert(node)
            tail = node
            index += 1
        table.tail = promise.end = tail
        table.num_published = index
        return promise

    def commit(self, promise: Promise, *, joins: bool = True) -> None:
        """The step ran: what was promised is written and stays. A table's oldest promise first.

        Where another table had published the same tokens first, this table joins those blocks: see :meth:`join`. Not
        without ``joins``: then that is the caller's, when all of the step is committed, and no other reads the table.
        """
        table = promise.table
        assert promise.before is None, "a table's oldest promise is committed first"
        if table.promise is promise:
            table.promise = None
        elif table.promise is not None:
            table.promise.before = None
        if table.tail is None:  # the cache was reset while the step ran
            return
        node = promise.end
        while node is not promise.tail:
            node.committed = True
            assert node.parent is not None
            node = node.parent
        if joins and promise.is_behind:
            self.join(promise)

    def join(self, promise: Promise) -> None:
        """Publish what a committed promise left; where others had published the same tokens first, join their blocks.

        The table gives its own back for them, so that a published path is always the path of the table itself.
        """
        if not promise.is_behind:
            return
        table = promise.table
        tail = table.tail
        assert tail is not None, "behind, and it publishes nothing"
        if tail.parent is None:
            tail = self._cache.tree.root(tail.key)
        index = table.num_published
        while index < promise.num_blocks:
            key = promise.packed[index * self._stride : (index + 1) * self._stride]
            own = self._cache.pool.blocks[table.block_ids[index]]
            child = tail.children.get(key)
            if child is None:
                if own.num_table_refs > 1:  # as in promise()
                    break
                child = self._cache.tree.insert(tail, key, own, self._cache.tick)
                own.node = child
                child.born_s = self._cache.now_s
                child.committed = True
                self._cache.policy.on_insert(child)
            elif child.committed:
                assert child.block is not None
                self._cache.pool.acquire(child.block)
                self._cache.update_evictable(child)
                table.block_ids[index] = child.block.block_id
                self._cache.pool.release(own)
            else:  # theirs is still being written by a step in flight: try again when this table grows
                break
            child.last_used = self._cache.tick
            child.used_s = self._cache.now_s
            tail = child
            index += 1
        table.tail = tail
        table.num_published = index

    def abandon(self, promise: Promise) -> None:
        """The step failed: take back what was promised. Newest promise first.

        Tables that lean on it (acquired after the promise was made) must be released by the caller, after all promises
        of the step are abandoned: their blocks hold nothing.
        """
        table = promise.table
        assert table.promise is promise, "a table's newest promise is abandoned first"
        table.promise = promise.before
        node = table.tail
        if node is None:
            return
        while node is not promise.tail:
            parent = node.parent
            assert parent is not None
            assert node.block is not None
            self._cache.tree.remove(node)
            self._cache.policy.on_evict(node)
            self._cache.pool.withdraw(node.block)
            node = parent
        table.tail = promise.tail
        table.num_published = promise.first
