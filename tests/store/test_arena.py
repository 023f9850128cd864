"""HostArena: bytes go and come back, and what does not come back as it was is found."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from pagefold.kv import BlockId, HostOps, LoadOp, StoreOp
from pagefold.steps import DamagedBlocksError
from pagefold.store import HostArena
from pagefold.store.card_arena import CardArena


def ops(stores=(), loads=()) -> HostOps:
    return HostOps(
        [StoreOp(BlockId(block), host_id) for block, host_id in stores],
        [LoadOp(host_id, BlockId(block)) for host_id, block in loads],
    )


def random_blocks(num_blocks: int, block_bytes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)


def make_card_arena(num_blocks: int, block_bytes: int) -> CardArena:
    """Return what a card has, without its pins and streams: the blocks are a CPU's."""
    return CardArena(num_blocks, block_bytes, torch.device("cpu"))


MAKERS = pytest.mark.parametrize("make_arena", [HostArena, make_card_arena], ids=["host", "card"])


@MAKERS
@pytest.mark.parametrize("block_bytes", [1, 37, 2**18, 2**18 + 1, 737_280])
def test_bytes_come_back_as_they_were(make_arena, block_bytes):
    arena, blocks = make_arena(3, block_bytes), random_blocks(4, block_bytes)
    before = blocks.copy()
    arena.carry_out(ops(stores=[(0, 2), (3, 0)]), blocks)
    assert np.array_equal(blocks, before), "a store reads"
    blocks[:] = 0
    arena.carry_out(ops(loads=[(2, 1), (0, 2), (2, 3)]), blocks)
    assert np.array_equal(blocks, [np.zeros_like(before[0]), before[0], before[3], before[0]])
    assert arena.num_bytes == 3 * block_bytes


@MAKERS
def test_a_load_sees_what_a_store_of_the_same_step_wrote(make_arena):
    arena, blocks = make_arena(1, 64), random_blocks(2, 64)
    arena.carry_out(ops(stores=[(0, 0)], loads=[(0, 1)]), blocks)
    assert np.array_equal(blocks[0], blocks[1])


@MAKERS
def test_any_bit_that_turns_is_found(make_arena):
    rng = Random(1)
    arena, blocks = make_arena(2, 1000), random_blocks(3, 1000)
    for _ in range(200):
        arena.carry_out(ops(stores=[(0, 0), (1, 1)]), blocks)
        arena.blocks[0][rng.randrange(1000)] ^= 1 << rng.randrange(8)
        with pytest.raises(DamagedBlocksError) as damage:
            arena.carry_out(ops(loads=[(0, 2), (1, 2)]), blocks)
        assert damage.value.host_ids == {0}
        assert np.array_equal(blocks[2], blocks[1]), "the other load was made"


@MAKERS
def test_all_that_are_damaged_are_named_at_once(make_arena):
    arena, blocks = make_arena(3, 100), random_blocks(3, 100)
    arena.carry_out(ops(stores=[(0, 0), (1, 1), (2, 2)]), blocks)
    arena.blocks[0] += 1
    arena.blocks[2] += 1
    with pytest.raises(DamagedBlocksError, match="2 blocks of the host arena are damaged") as damage:
        arena.carry_out(ops(loads=[(2, 0), (1, 1), (0, 2)]), blocks)
    assert damage.value.host_ids == {0, 2}


@MAKERS
def test_a_block_that_was_never_written_is_no_block(make_arena):
    arena, blocks = make_arena(1, 100), random_blocks(1, 100)
    with pytest.raises(DamagedBlocksError):
        arena.carry_out(ops(loads=[(0, 0)]), blocks)
