"""BlockPool: who holds a block decides where it goes; the block freed last is handed out first."""

from __future__ import annotations

import pytest

from pagefold.kv.block import Block, BlockState, IllegalMoveError, Node
from pagefold.kv.pool import BlockPool


def allocated(pool: BlockPool) -> Block:
    block = pool.allocate()
    assert block is not None
    return block


def published(pool: BlockPool) -> Block:
    block = allocated(pool)
    block.node = Node(b"", None, (block,), 0)
    return block


def test_a_new_pool_hands_out_blocks_in_order() -> None:
    pool = BlockPool(3)
    assert (pool.num_blocks, pool.num_free, pool.num_cached) == (3, 3, 0)
    assert [allocated(pool).block_id for _ in range(3)] == [0, 1, 2]
    assert pool.num_free == 0


def test_an_empty_pool_hands_out_nothing() -> None:
    pool = BlockPool(1)
    allocated(pool)
    assert pool.allocate() is None


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(4)
    blocks = [allocated(pool) for _ in range(4)]
    for index in (2, 0, 3):
        pool.release(blocks[index])
    assert [allocated(pool).block_id for _ in range(3)] == [3, 0, 2]


def test_a_private_block_is_free_when_its_last_table_lets_go() -> None:
    pool = BlockPool(1)
    block = allocated(pool)
    pool.acquire(block)
    assert block.num_table_refs == 2
    assert not pool.release(block)
    assert block.state == BlockState.ACTIVE
    assert pool.release(block)
    assert (block.state, pool.num_free, pool.num_cached) == (BlockState.FREE, 1, 0)


def test_a_published_block_is_cached_and_wakes_up() -> None:
    pool = BlockPool(1)
    block = published(pool)
    assert pool.release(block)
    assert (block.state, pool.num_free, pool.num_cached) == (BlockState.CACHED, 0, 1)
    pool.acquire(block)
    assert (block.state, block.num_table_refs, pool.num_cached) == (BlockState.ACTIVE, 1, 0)


def test_a_transfer_keeps_a_private_block_from_becoming_free() -> None:
    pool = BlockPool(1)
    block = allocated(pool)
    pool.pin_io(block)
    pool.pin_io(block)
    assert pool.release(block)
    assert (block.state, pool.num_free) == (BlockState.ACTIVE, 0)
    pool.unpin_io(block)
    assert pool.num_free == 0
    pool.unpin_io(block)
    assert (block.state, pool.num_free) == (BlockState.FREE, 1)


def test_a_transfer_that_ends_while_a_table_holds_the_block_frees_nothing() -> None:
    pool = BlockPool(1)
    block = allocated(pool)
    pool.pin_io(block)
    pool.unpin_io(block)
    assert (block.state, pool.num_free) == (BlockState.ACTIVE, 0)


def test_a_transfer_that_ends_leaves_a_cached_block_cached() -> None:
    pool = BlockPool(1)
    block = published(pool)
    pool.pin_io(block)
    pool.release(block)
    pool.unpin_io(block)
    assert (block.state, pool.num_cached) == (BlockState.CACHED, 1)


def test_withdrawing_a_cached_block_frees_it() -> None:
    pool = BlockPool(1)
    block = published(pool)
    pool.release(block)
    pool.withdraw(block)
    assert (block.state, block.node, pool.num_cached, pool.num_free) == (BlockState.FREE, None, 0, 1)


def test_withdrawing_a_held_block_makes_it_private() -> None:
    pool = BlockPool(1)
    block = published(pool)
    pool.withdraw(block)
    assert (block.state, block.node) == (BlockState.ACTIVE, None)
    pool.release(block)
    assert block.state == BlockState.FREE


def test_withdrawing_a_cached_block_that_a_transfer_reads_waits_for_the_transfer() -> None:
    pool = BlockPool(1)
    block = published(pool)
    pool.pin_io(block)
    pool.release(block)
    pool.withdraw(block)
    assert (block.state, pool.num_cached, pool.num_free) == (BlockState.ACTIVE, 0, 0)
    pool.unpin_io(block)
    assert (block.state, pool.num_free) == (BlockState.FREE, 1)


def test_freeing_what_is_free_is_illegal() -> None:
    pool = BlockPool(1)
    block = allocated(pool)
    pool.release(block)
    with pytest.raises(IllegalMoveError):
        pool.withdraw(block)


def test_releasing_what_nobody_holds_is_loud() -> None:
    """A block that is free, one that was released before, and one that is cached: nothing of it changes."""
    pool = BlockPool(3)
    once, cached = allocated(pool), published(pool)
    pool.release(once)
    pool.release(cached)
    for block in (once, cached, pool.blocks[2]):
        before = block.state
        with pytest.raises(AssertionError, match=f"block {block.block_id} is released, and no table holds it"):
            pool.release(block)
        assert (block.state, block.num_table_refs) == (before, 0)
    assert sorted(pool.free_ids) == [0, 2]
    assert pool.num_cached == 1
