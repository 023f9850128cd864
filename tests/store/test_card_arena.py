"""CardArena: what waits for what, shown by a stream whose copies come as late as they may."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from store.late_stream import LateStream

from pagefold.kv import BlockId, HostOps, LoadOp, StoreOp
from pagefold.steps import DamagedBlocksError
from pagefold.store import HostArena
from pagefold.store.card_arena import CardArena

NUM_LAYERS, BLOCK_BYTES = 10, 2**20
ENDS = [(layer + 1) * (BLOCK_BYTES // NUM_LAYERS) for layer in range(NUM_LAYERS)]


def ops(stores=(), loads=()):
    return HostOps(
        [StoreOp(BlockId(block), host_id) for block, host_id in stores],
        [LoadOp(host_id, BlockId(block)) for host_id, block in loads],
    )


@pytest.fixture
def world(monkeypatch):
    """Return an arena on a late stream, that stream, and four blocks, of which the first two are stored."""
    stream = LateStream(monkeypatch)
    arena = CardArena(4, BLOCK_BYTES, torch.device("cpu"), stream)
    blocks = np.random.default_rng(0).integers(0, 256, (4, BLOCK_BYTES), np.uint8)
    arena.carry_out(ops(stores=[(0, 0), (1, 1)]), blocks)
    stream.log.clear()
    return arena, stream, blocks


def layer_of(blocks, block, layer):
    size = BLOCK_BYTES // NUM_LAYERS
    return blocks[block, layer * size : (layer + 1) * size]


def test_a_layer_waits_for_its_own_group_and_no_more(world):
    arena, stream, blocks = world
    expected, before = blocks[:2].copy(), blocks[2:].copy()
    moves = arena.begin(ops(loads=[(0, 2), (1, 3)]), blocks, ENDS)
    assert stream.log == ["behind current"]
    assert np.array_equal(blocks[2:], before), "nobody has waited"
    firsts = []
    for layer in range(NUM_LAYERS):
        num_waits = len(stream.log)
        moves.hold(layer)
        if len(stream.log) > num_waits:
            firsts.append(layer)
            assert layer == 8 or not np.array_equal(layer_of(blocks, 2, 9), layer_of(expected, 0, 9))
        for block in (0, 1):
            assert np.array_equal(layer_of(blocks, block + 2, layer), layer_of(expected, block, layer))
    assert firsts == [0, 3, 5, 8], "four slices of layers, each waited for once"
    moves.hold_all()
    assert np.array_equal(blocks[2:], expected), "what is behind the last layer has come too"
    moves.verify()
    assert not [entry for entry in stream.log if entry[0] == "wait"], "the host has waited for nothing"


def test_layers_that_differ_in_bytes_each_come_in_their_group(world):
    """As those of two codecs do."""
    arena, _, blocks = world
    ends = [2**18, 2**18 + 100, 2**19, 2**19 + 16, BLOCK_BYTES]
    expected = blocks[0].copy()
    moves = arena.begin(ops(loads=[(0, 2)]), blocks, ends)
    for layer, end in enumerate(ends):
        moves.hold(layer)
        assert np.array_equal(blocks[2, :end], expected[:end])
    moves.verify()


def test_layers_of_several_cache_groups_lie_in_the_same_places(world):
    """Of six layers two are in each of three groups, the last two with cells of other bytes; they come in any order."""
    arena, stream, blocks = world
    half, third = BLOCK_BYTES // 2, BLOCK_BYTES // 3
    ends = [half, half, 2 * half, third, 2 * half, 2 * third]
    expected, before = blocks[0].copy(), blocks[2].copy()
    moves = arena.begin(ops(loads=[(0, 2)]), blocks, ends)
    for layer, end in enumerate(ends):
        moves.hold(layer)
        assert np.array_equal(blocks[2, :end], expected[:end])
        assert layer > 1 or np.array_equal(blocks[2, 2 * third :], before[2 * third :]), "it waits for no more"
    assert len(stream.log) == 3, "the last wait, of the third layer, was for all"


def test_small_blocks_come_in_one_piece(monkeypatch):
    stream = LateStream(monkeypatch)
    arena = CardArena(2, 1000, torch.device("cpu"), stream)
    blocks = np.ones((2, 1000), np.uint8)
    arena.carry_out(ops(stores=[(0, 0)]), blocks)
    moves = arena.begin(ops(loads=[(0, 1)]), blocks, range(142, 995, 142))
    stream.log.clear()
    moves.hold(0)
    moves.hold_all()
    assert len(stream.log) == 1


def test_what_the_step_may_overwrite_is_stored_first(world):
    """Block 2 goes to the host, and what the host has comes into it."""
    arena, _, blocks = world
    old, new = blocks[2].copy(), blocks[0].copy()
    moves = arena.begin(ops(stores=[(2, 2)], loads=[(0, 2)]), blocks, ENDS)
    moves.hold(0)
    assert np.array_equal(arena.blocks[2], old)
    moves.hold_all()
    assert np.array_equal(blocks[2], new)
    moves.verify()
    arena.carry_out(ops(loads=[(2, 3)]), blocks)
    assert np.array_equal(blocks[3], old)


def test_a_step_that_only_stores_holds_its_writes_back(world):
    arena, _, blocks = world
    old = blocks[3].copy()
    moves = arena.begin(ops(stores=[(3, 3)]), blocks, ENDS)
    moves.hold(0)
    blocks[3] = 0  # the step's first write
    assert np.array_equal(arena.blocks[3], old)
    moves.verify()
    arena.carry_out(ops(loads=[(3, 0)]), blocks)
    assert np.array_equal(blocks[0], old)


def test_nothing_to_do_is_nothing_on_its_way(world):
    arena, stream, blocks = world
    assert arena.begin(ops(), blocks, ENDS) is None
    assert stream.log == []


def test_damage_is_told_when_it_is_looked_for(world):
    arena, _, blocks = world
    arena.blocks[1][7] ^= 1
    moves = arena.begin(ops(loads=[(0, 2), (1, 3)]), blocks, ENDS)
    moves.hold_all()
    with pytest.raises(DamagedBlocksError) as damage:
        moves.verify()
    assert damage.value.host_ids == {1}


def test_what_a_restore_took_is_told_when_the_step_has_ended(world):
    arena, _, blocks = world
    told = []
    arena.on_restored = lambda num_bytes, seconds: told.append((num_bytes, seconds))
    moves = arena.begin(ops(loads=[(0, 2), (1, 3)]), blocks, ENDS)
    moves.hold_all()
    moves.verify()
    assert told == []
    moves.learn()
    assert told == [(2 * BLOCK_BYTES, 4.0)], "from the stores' mark to that of the fourth group"
    arena.begin(ops(stores=[(0, 3)]), blocks, ENDS).learn()
    assert len(told) == 1


def test_the_link_is_measured_before_it_is_used():
    arena = CardArena(40, 2**16, torch.device("cpu"))
    latency_s, bytes_per_s = arena.measure(np.zeros((50, 2**16), np.uint8))
    assert 0 <= latency_s < 1
    assert 1e6 < bytes_per_s < 1e13


def test_a_host_arena_has_nothing_on_its_way():
    arena, blocks = HostArena(1, 64), np.ones((2, 64), np.uint8)
    assert arena.begin(ops(stores=[(0, 0)]), blocks, [0, 500]) is None
    assert np.array_equal(arena.blocks[0], blocks[0])
