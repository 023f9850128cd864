"""Residuals: who has which, that what a fork goes on from is copied in time, and what of a failed step is lost."""

from __future__ import annotations

from array import array

import pytest

from pagefold.kv import KEEP_ALL, KeepRule, KVCore, Namespace, Residuals, audit

NAMESPACE = Namespace("m", "l", "d").key()
SIZE = 4


def packed(num_tokens, first=0):
    return array("i", range(first, first + num_tokens)).tobytes()


@pytest.fixture
def core():
    core = KVCore(32, block_size=SIZE, residuals=Residuals(4, SIZE))
    yield core
    audit(core)


def begin(core, num_tokens):
    tokens = packed(num_tokens)
    cache, start = core.acquire(core.match(NAMESPACE, tokens, num_tokens - 1))
    assert core.extend(cache, start, num_tokens)
    promise = core.publishing.promise(cache, tokens, num_tokens)
    if promise is not None:
        core.publishing.commit(promise)
    return cache, start


def test_each_table_has_one_of_its_own_until_it_is_released(core):
    caches = [begin(core, num_tokens)[0] for num_tokens in (3, 9, 5, 1)]
    assert {cache.residual_id for cache in caches} == {0, 1, 2, 3}
    audit(core)
    taken = caches[1].residual_id
    core.release(caches[1])
    assert begin(core, 6)[0].residual_id == taken


def test_only_whole_blocks_are_taken_over(core):
    """Of a block that is sealed in another's company no part is what its tokens alone come to."""
    core.release(begin(core, 11)[0])
    cache, start = begin(core, 7)
    assert start == SIZE
    assert not core.moves.pending_copies
    core.release(cache)
    plain = KVCore(32, block_size=SIZE)
    plain.release(begin(plain, 11)[0])
    assert begin(plain, 7)[1] == 6  # what is not sealed is taken over up to the last token


def test_a_fork_goes_on_from_a_copy(core):
    cache, _ = begin(core, 6)
    twin = core.fork(cache)
    assert twin.residual_id != cache.residual_id
    audit(core)
    assert core.extend(twin, 6, 7)  # the block is one of its own, and nothing of it is copied
    assert twin.only_table.block_ids[:1] == cache.only_table.block_ids[:1]
    assert twin.only_table.block_ids[1] != cache.only_table.block_ids[1]
    assert not core.moves.pending_copies
    (copy,) = core.residuals.take_copies()
    assert copy == (cache.residual_id, twin.residual_id)
    assert not core.residuals.take_copies()


def test_what_ends_before_its_copy_is_copied_no_more(core):
    cache, _ = begin(core, 6)
    gone, stays = core.fork(cache), core.fork(cache)
    wanted = [(cache.residual_id, stays.residual_id)]
    core.release(gone)
    core.release(cache)  # what it holds is there until the next step's first write
    assert core.residuals.take_copies() == wanted


def test_what_ends_before_its_copy_is_copied_on(core):
    """To who forked from it before it had its copy."""
    cache, _ = begin(core, 6)
    twin = core.fork(cache)
    stays = core.fork(twin)
    wanted = [(cache.residual_id, twin.residual_id), (twin.residual_id, stays.residual_id)]
    core.release(twin)
    assert core.residuals.take_copies() == wanted


def test_what_a_failed_step_was_to_copy_is_lost_and_told_once(core):
    cache, _ = begin(core, 6)
    twin, gone = core.fork(cache), core.fork(cache)
    core.lodgers.on_failed([(cache, 6), (twin, 6)], core.residuals.take_copies())
    assert core.lodgers.num_left(cache, 6) == 6
    assert core.lodgers.num_left(twin, 6) == 4
    assert core.lodgers.num_left(twin, 6) == 6
    core.release(gone)
    assert core.lodgers.num_left(begin(core, 6)[0], 6) == 6


def test_what_a_failed_step_began_a_block_over_is_lost(core):
    """Two steps fail: the one that ends a block, and the one behind it that has begun the next where that one lay."""
    cache, other = begin(core, 7)[0], begin(core, 7)[0]
    core.lodgers.on_failed([(cache, 8), (other, 9)], [])
    core.lodgers.on_failed([(cache, 7), (other, 8)], [])
    assert core.lodgers.num_left(cache, 7) == 4
    assert core.lodgers.num_left(other, 8) == 8


def test_a_window_is_kept_from_the_beginning_of_the_block_that_is_being_filled():
    """Who loses its residual begins that block again, and sees the window of its first token."""
    core = KVCore(
        32, block_size=SIZE, rules=(KeepRule(6), KEEP_ALL), residuals=Residuals(2, SIZE), enable_prefix_caching=False
    )
    cache, _ = begin(core, 11)
    windowed, full = cache.tables
    core.trim(cache, 11)
    assert windowed.num_trimmed == 0  # token 8 sees from token 3 on; token 11 sees none of the first block
    assert core.extend(cache, 11, 12)
    core.trim(cache, 12)
    assert windowed.num_trimmed == 1  # token 12 sees from token 7 on
    assert full.num_trimmed == 0
    core.release(cache)
    audit(core)


def test_of_several_groups_a_sequence_has_one_and_takes_over_whole_blocks():
    core = KVCore(32, block_size=SIZE, rules=(KEEP_ALL, KeepRule(6)), residuals=Residuals(2, SIZE))
    core.release(begin(core, 11)[0])
    cache, start = begin(core, 7)
    assert start == SIZE
    assert cache.residual_id in {0, 1}
    audit(core)
    twin = core.fork(cache)
    audit(core)
    assert core.extend(twin, 7, 8)
    assert not core.moves.pending_copies
    assert core.residuals.take_copies() == [(cache.residual_id, twin.residual_id)]
    for table, other in zip(cache.tables, twin.tables, strict=True):
        assert table.block_ids[:1] == other.block_ids[:1]
        assert table.block_ids[1] != other.block_ids[1]
