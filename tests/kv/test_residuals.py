"""Residuals: who has which, that what a fork goes on from is copied in time, and what of a failed step is lost."""

from __future__ import annotations

from array import array

import pytest

from pagefold.kv import KVCore, Namespace, Residuals, audit

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


def test_what_a_failed_step_was_to_copy_is_lost_and_told_once(core):
    cache, _ = begin(core, 6)
    twin, gone = core.fork(cache), core.fork(cache)
    core.residuals.failed(core.residuals.take_copies())
    assert not core.residuals.take_lost(cache)
    assert core.residuals.take_lost(twin)
    assert not core.residuals.take_lost(twin)
    core.release(gone)
    assert not core.residuals.take_lost(begin(core, 6)[0])
