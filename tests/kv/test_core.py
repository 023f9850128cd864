"""KVCore, one behaviour a test: what is found, pinned, copied, promised, taken back, kept and given up.

``audit`` runs after every call of the core. What random orders of calls do is test_machine.py's.
"""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pagefold.kv
from pagefold.events import BlocksPublished, BlocksReused, CacheReset
from pagefold.kv import BlockState, CopyOp, KVCore, Promise, SequenceCache, audit, make_policy
from pagefold.kv.table import num_blocks_for, slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.events import BlockEvicted
    from pagefold.kv import PrefixHit

NS = b"namespace"
BLOCK_SIZE = 4


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Core(KVCore):
    """A KVCore of small blocks that audits itself, and speaks in tokens."""

    def __init__(self, num_blocks: int = 16, **arguments: object) -> None:
        self.events: list[
            BlockEvicted
        ] = []  # what was published is the ledger's test's, what was found again test_residency's
        super().__init__(num_blocks, block_size=BLOCK_SIZE, emit=self._note, **arguments)

    def _note(self, event):
        if not isinstance(event, BlocksPublished | BlocksReused):
            self.events.append(event)

    def find(self, tokens: Sequence[int], namespace: bytes = NS) -> PrefixHit:
        """Match as a request does: its last token is left to compute."""
        return self.match(namespace, pack(tokens), len(tokens) - 1)

    def hit_tokens(self, tokens: Sequence[int], namespace: bytes = NS) -> int:
        """How many tokens of ``tokens`` are known."""
        hit = self.match(namespace, pack(tokens), len(tokens))
        return len(hit.nodes) * BLOCK_SIZE + hit.num_partial_tokens

    def admit(self, tokens: Sequence[int], namespace: bytes = NS) -> tuple[SequenceCache, int]:
        cache, start = self.acquire(self.find(tokens, namespace))
        audit(self)
        return cache, start

    def plan(self, cache: SequenceCache, tokens: Sequence[int], start: int) -> Promise | None:
        """Plan to write all of ``tokens`` from ``start`` on."""
        assert self.extend(cache, start, len(tokens))
        audit(self)
        promise = self.publishing.promise(cache, pack(tokens), len(tokens))
        audit(self)
        return promise

    def finish_step(self, *promises: Promise | None) -> list[CopyOp]:
        """Let the step that was planned succeed; return the copies that it made."""
        copies = self.moves.take_copies()
        self.moves.copies_done(copies)
        for promise in promises:
            if promise is not None:
                self.publishing.commit(promise)
            audit(self)
        return copies

    def fail_step(self, *promises: Promise | None, admitted: Sequence[SequenceCache] = ()) -> None:
        """Let it fail."""
        self.moves.copies_failed(self.moves.take_copies())
        for promise in reversed(promises):
            if promise is not None:
                self.publishing.abandon(promise)
        for cache in admitted:
            self.release(cache)
        audit(self)

    def serve(self, tokens: Sequence[int], namespace: bytes = NS) -> SequenceCache:
        """Admit and compute ``tokens`` in a step of its own; the table still runs."""
        cache, start = self.admit(tokens, namespace)
        self.finish_step(self.plan(cache, tokens, start))
        return cache

    def grow(self, cache: SequenceCache, tokens: Sequence[int], start: int) -> list[CopyOp]:
        """Compute the rest of ``tokens``; return the copies that it took."""
        return self.finish_step(self.plan(cache, tokens, start))

    def drop(self, cache: SequenceCache) -> None:
        self.release(cache)
        audit(self)

    def states(self) -> tuple[int, int, int]:
        """Free, cached and active blocks."""
        return self.pool.num_free, self.pool.num_cached, self.num_active


# Match and acquire.


def test_an_empty_core_knows_nothing() -> None:
    core = Core(4)
    cache, num_tokens = core.admit(range(9))
    assert (cache.only_table.block_ids, num_tokens, cache.capacity) == ([], 0, 0)
    assert core.states() == (4, 0, 0)
    assert core.usage == 0.0


def test_what_was_computed_is_found_again() -> None:
    core = Core()
    first = core.serve(range(13))
    ids = list(first.only_table.block_ids)
    core.drop(first)
    cache, num_tokens = core.admit(range(13))
    assert num_tokens == 12
    assert cache.only_table.block_ids == ids[:3]
    assert cache.num_published == 3


def test_two_sequences_share_blocks_at_the_same_time() -> None:
    core = Core()
    first = core.serve(range(9))
    second, num_tokens = core.admit(range(9))
    assert num_tokens == 8
    assert second.only_table.block_ids == first.only_table.block_ids[:2]
    assert [core.pool.blocks[i].num_table_refs for i in first.only_table.block_ids] == [2, 2, 1]


def test_the_last_block_of_a_sequence_is_private_until_it_is_full() -> None:
    core = Core()
    cache = core.serve(range(6))
    assert core.hit_tokens(range(6)) == 4
    core.grow(cache, range(8), 6)
    assert core.hit_tokens(range(8)) == 8


def test_match_pins_nothing() -> None:
    core = Core(2)
    core.drop(core.serve(range(8)))
    hit = core.find(range(9))
    assert len(hit.nodes) == 2
    assert core.states() == (0, 2, 0)
    assert core.blocks.reclaim(2) == 2


def test_acquire_pins() -> None:
    core = Core(2)
    core.drop(core.serve(range(8)))
    core.admit(range(9))
    assert core.states() == (0, 0, 2)
    assert core.blocks.reclaim(2) == 0


def test_a_whole_prompt_that_is_known_leaves_its_last_token_to_compute() -> None:
    core = Core()
    core.drop(core.serve(range(8)))
    cache, num_tokens = core.admit(range(8))
    assert num_tokens == 7
    copies = core.grow(cache, range(8), 7)
    assert [copy.num_tokens for copy in copies] == [3]


def test_usage_is_the_share_that_is_held() -> None:
    core = Core(8)
    cache = core.serve(range(8))
    assert (core.usage, core.num_active, core.num_available) == (0.25, 2, 6)
    core.drop(cache)
    assert (core.usage, core.num_active, core.num_available) == (0.0, 0, 8)


# Partial matches.


def test_a_partial_match_is_a_copy() -> None:
    core = Core()
    first = core.serve(range(8))
    cache, num_tokens = core.admit([0, 1, 2, 3, 4, 5, 99])
    assert num_tokens == 6
    (copy,) = core.moves.pending_copies
    assert copy == CopyOp(first.only_table.block_ids[1], cache.only_table.block_ids[1], 2)
    assert cache.only_table.block_ids[1] not in first.only_table.block_ids
    assert core.grow(cache, [0, 1, 2, 3, 4, 5, 99], 6) == [copy]
    assert core.moves.pending_copies == core.moves.copies_in_flight == []


def test_a_partial_match_needs_a_block_and_does_without() -> None:
    core = Core(3)
    core.drop(core.serve(range(8)))
    other = core.serve([50])
    hit = core.find([0, 1, 2, 3, 4, 5, 99])
    assert hit.num_partial_tokens == 2
    cache, num_tokens = core.acquire(hit)  # the one block that could be evicted is the one to copy from
    audit(core)
    assert (num_tokens, cache.only_table.block_ids, core.moves.pending_copies) == (4, [0], [])
    core.drop(other)
    core.drop(cache)
    assert core.blocks.reclaim(2) == 2


def test_a_partial_match_may_evict_for_its_copy_but_never_its_source() -> None:
    core = Core(3)
    core.drop(core.serve(range(8)))
    core.drop(core.serve([50, 51, 52, 53]))
    src = core.match(NS, pack(range(8)), 8).nodes[1].blocks[0]
    assert src is not None
    cache, num_tokens = core.admit([0, 1, 2, 3, 4, 5, 99])
    assert num_tokens == 6
    assert core.hit_tokens([50]) == 0
    assert core.moves.pending_copies == [CopyOp(src.block_id, cache.only_table.block_ids[1], 2)]
    assert src.num_io_refs == 1


def test_a_promised_block_is_not_copied_from() -> None:
    """Copies are made before the step's writes: there is nothing to copy yet."""
    core = Core()
    cache, _ = core.admit(range(8))
    promise = core.plan(cache, range(8), 0)
    other, num_tokens = core.admit([0, 1, 2, 3, 4, 99])
    assert num_tokens == 4
    assert not core.moves.pending_copies
    core.finish_step(promise, core.plan(other, [0, 1, 2, 3, 4, 99], 4))


# Stale hits.


def test_a_stale_hit_is_cut_where_the_tree_was() -> None:
    core = Core(4)
    core.drop(core.serve(range(16)))
    hit = core.match(NS, pack(range(16)), 15)
    assert (len(hit.nodes), hit.num_partial_tokens) == (3, 3)
    core.blocks.reclaim(2)
    cache, num_tokens = core.acquire(hit)
    audit(core)
    assert (num_tokens, len(cache.only_table.block_ids)) == (8, 2)


def test_a_stale_hit_whose_partial_block_left() -> None:
    core = Core()
    core.drop(core.serve(range(8)))
    hit = core.find([0, 1, 2, 3, 4, 5, 99])
    core.blocks.reclaim(1)
    cache, num_tokens = core.acquire(hit)
    audit(core)
    assert (hit.num_partial_tokens, num_tokens, len(cache.only_table.block_ids)) == (2, 4, 1)
    assert not core.moves.pending_copies


def test_a_stale_hit_of_which_nothing_is_left() -> None:
    core = Core(4)
    core.drop(core.serve(range(16)))
    hit = core.find(range(16))
    core.blocks.reclaim(4)
    cache, num_tokens = core.acquire(hit)
    audit(core)
    assert (num_tokens, cache.only_table.block_ids) == (0, [])
    core.grow(cache, range(16), 0)
    assert core.hit_tokens(range(16)) == 16


def test_a_stale_hit_does_not_take_the_same_tokens_in_another_block() -> None:
    """What left and came back came back as another node; the hit knows only the first."""
    core = Core(3)
    core.drop(core.serve(range(8)))
    hit = core.find(range(9))
    core.blocks.reclaim(2)
    core.drop(core.serve(range(8)))
    cache, num_tokens = core.acquire(hit)
    audit(core)
    assert (num_tokens, cache.only_table.block_ids) == (0, [])


def test_a_hit_survives_a_reset_as_nothing() -> None:
    core = Core()
    core.drop(core.serve(range(9)))
    hit = core.find(range(9))
    core.forgetting.reset()
    cache, num_tokens = core.acquire(hit)
    audit(core)
    assert num_tokens == 0
    core.grow(cache, range(9), 0)  # and what it computes is published in the new tree
    assert core.hit_tokens(range(9)) == 8


def test_a_hit_on_a_promise_that_was_abandoned_is_nothing() -> None:
    core = Core()
    cache, _ = core.admit(range(9))
    promise = core.plan(cache, range(9), 0)
    hit = core.find(range(9))
    assert len(hit.nodes) == 2
    core.fail_step(promise, admitted=[cache])
    late, num_tokens = core.acquire(hit)
    audit(core)
    assert (num_tokens, late.only_table.block_ids) == (0, [])


def test_a_hit_may_be_acquired_more_than_once() -> None:
    core = Core()
    core.drop(core.serve(range(9)))
    hit = core.find(range(9))
    one, other = core.acquire(hit)[0], core.acquire(hit)[0]
    audit(core)
    assert one.only_table.block_ids == other.only_table.block_ids
    one.only_table.block_ids.append(one.only_table.block_ids.pop())  # lists of their own
    assert one.only_table.block_ids is not other.only_table.block_ids


# Extend.


@pytest.mark.parametrize(("end", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4)])
def test_extend_makes_room_for_whole_blocks(end: int, num_blocks: int) -> None:
    core = Core()
    cache, _ = core.admit(range(20))
    assert core.extend(cache, 0, end)
    audit(core)
    assert (len(cache.only_table.block_ids), cache.capacity) == (num_blocks, num_blocks * BLOCK_SIZE)


def test_extend_within_the_capacity_takes_nothing() -> None:
    core = Core()
    cache = core.serve(range(5))
    ids = list(cache.only_table.block_ids)
    assert core.extend(cache, 5, 8)
    assert cache.only_table.block_ids == ids


def test_extend_refuses_what_does_not_fit_and_changes_nothing() -> None:
    core = Core(4)
    core.drop(core.serve(range(4)))
    cache = core.serve(range(50, 58))
    assert not core.extend(cache, 8, 21)
    audit(core)
    assert (len(cache.only_table.block_ids), core.states()) == (2, (1, 1, 2))
    assert core.hit_tokens(range(4)) == 4
    assert core.extend(cache, 8, 16)


def test_extend_evicts_what_is_cached_when_nothing_is_free() -> None:
    core = Core(4)
    core.drop(core.serve(range(16)))
    cache, _ = core.admit(range(90, 98))
    assert core.extend(cache, 0, 8)
    audit(core)
    assert [(event.depth, event.cause) for event in core.events] == [(3, "allocation"), (2, "allocation")]
    assert core.hit_tokens(range(16)) == 8


def test_free_blocks_are_used_before_cached_ones_are_evicted() -> None:
    core = Core(4)
    core.drop(core.serve(range(8)))
    core.serve(range(90, 98))
    assert core.events == []


def test_slots() -> None:
    assert [slot_of([7, 3], position, 4) for position in range(8)] == [28, 29, 30, 31, 12, 13, 14, 15]
    assert [num_blocks_for(num, 4) for num in (0, 1, 4, 5)] == [0, 1, 1, 2]


# Fork: copy-on-write.


def test_a_fork_shares_all_blocks_until_somebody_writes() -> None:
    core = Core()
    cache = core.serve(range(6))
    twin = core.fork(cache)
    audit(core)
    assert twin.only_table.block_ids == cache.only_table.block_ids
    assert twin.only_table.block_ids is not cache.only_table.block_ids
    assert core.num_active == 2


def test_the_first_to_write_gets_a_copy_and_the_second_keeps_the_block() -> None:
    core = Core()
    cache = core.serve(range(6))
    shared = cache.only_table.block_ids[1]
    twin = core.fork(cache)
    copies = core.grow(cache, range(7), 6)
    assert copies == [CopyOp(shared, cache.only_table.block_ids[1], 2)]
    assert cache.only_table.block_ids[0] == twin.only_table.block_ids[0]
    assert cache.only_table.block_ids[1] != shared
    assert core.grow(twin, [*range(6), 99], 6) == []
    assert twin.only_table.block_ids[1] == shared


def test_both_may_write_in_one_step() -> None:
    core = Core()
    cache = core.serve(range(6))
    shared = cache.only_table.block_ids[1]
    twin = core.fork(cache)
    promises = core.plan(cache, range(7), 6), core.plan(twin, [*range(6), 99], 6)
    copies = core.finish_step(*promises)
    assert copies == [CopyOp(shared, cache.only_table.block_ids[1], 2)]
    assert twin.only_table.block_ids[1] == shared


def test_many_forks_each_get_their_own() -> None:
    core = Core()
    cache = core.serve(range(6))
    twins = [cache, *(core.fork(cache) for _ in range(4))]
    for index, twin in enumerate(twins):
        core.grow(twin, [*range(6), 90 + index], 6)
    assert len({twin.only_table.block_ids[1] for twin in twins}) == 5
    assert len({twin.only_table.block_ids[0] for twin in twins}) == 1


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    core = Core()
    cache = core.serve(range(8))
    twin = core.fork(cache)
    assert core.grow(cache, range(9), 8) == core.grow(twin, [*range(8), 99], 8) == []
    assert cache.only_table.block_ids[:2] == twin.only_table.block_ids[:2]
    assert cache.only_table.block_ids[2] != twin.only_table.block_ids[2]


def test_a_fork_of_a_roomy_table_copies_one_block_and_replaces_the_rest() -> None:
    core = Core()
    cache = core.serve(range(6))
    assert core.extend(cache, 6, 16)
    before = list(cache.only_table.block_ids)
    twin = core.fork(cache)
    copies = core.grow(cache, range(7), 6)
    assert len(copies) == 1
    assert not set(cache.only_table.block_ids[1:]) & set(before)
    assert twin.only_table.block_ids == before


def test_a_fork_outlives_what_it_was_forked_from() -> None:
    core = Core()
    cache = core.serve(range(6))
    twin = core.fork(cache)
    core.drop(cache)
    assert core.grow(twin, [*range(6), 99], 6) == []  # it is alone now


def test_copy_on_write_that_finds_no_memory_says_so_and_goes_on_later() -> None:
    core = Core(5)
    cache = core.serve(range(6))
    assert core.extend(cache, 6, 12)
    twin = core.fork(cache)
    other = core.serve([50])
    assert not core.extend(cache, 6, 7)  # two blocks are needed and one is left
    audit(core)
    assert core.moves.pending_copies == [CopyOp(twin.only_table.block_ids[1], cache.only_table.block_ids[1], 2)]
    core.drop(other)
    assert core.extend(cache, 6, 7)
    audit(core)
    assert len(core.moves.pending_copies) == 1
    assert not set(cache.only_table.block_ids[1:]) & set(twin.only_table.block_ids[1:])


def test_a_table_does_not_fork_while_it_has_a_promise() -> None:
    core = Core()
    cache, _ = core.admit(range(8))
    core.plan(cache, range(8), 0)
    with pytest.raises(AssertionError, match="forks between steps"):
        core.fork(cache)


def test_forks_that_say_the_same_end_in_one_block() -> None:
    core = Core()
    cache = core.serve(range(6))
    twin = core.fork(cache)
    core.finish_step(core.plan(cache, range(8), 6), core.plan(twin, range(8), 6))
    assert cache.only_table.block_ids == twin.only_table.block_ids
    assert core.num_active == 2


# Promise and commit.


def test_a_promise_is_known_at_once_and_only_of_whole_blocks() -> None:
    core = Core()
    cache, _ = core.admit(range(11))
    promise = core.plan(cache, range(11), 0)
    assert promise is not None
    assert (promise.num_blocks, promise.first, cache.num_published) == (2, 0, 2)
    assert core.hit_tokens(range(11)) == 8


@pytest.mark.parametrize("num_tokens", range(4))
def test_there_is_nothing_to_promise_below_a_block(num_tokens: int) -> None:
    core = Core()
    cache, _ = core.admit(range(4))
    assert core.extend(cache, 0, 4)
    assert core.publishing.promise(cache, pack(range(4)), num_tokens) is None
    assert cache.promise is None


def test_there_is_nothing_to_promise_twice() -> None:
    core = Core()
    cache = core.serve(range(8))
    assert core.publishing.promise(cache, pack(range(8)), 8) is None


def test_a_request_of_the_same_step_leans_on_a_promise() -> None:
    core = Core()
    cache, _ = core.admit(range(9))
    first = core.plan(cache, range(9), 0)
    other, num_tokens = core.admit(range(9))
    assert num_tokens == 8
    assert other.only_table.block_ids == cache.only_table.block_ids[:2]
    second = core.plan(other, range(9), 8)
    assert second is None
    core.finish_step(first, second)
    core.drop(cache)
    assert core.pool.blocks[other.only_table.block_ids[0]].state == BlockState.ACTIVE


def test_leaning_may_go_on_and_on() -> None:
    core = Core()
    caches, promises = [], []
    for num_tokens in (5, 9, 13):
        cache, start = core.admit(range(num_tokens))
        assert start == max(0, num_tokens - 5)
        promises.append(core.plan(cache, range(num_tokens), start))
        caches.append(cache)
    core.finish_step(*promises)
    assert [cache.num_published for cache in caches] == [1, 2, 3]
    assert caches[2].only_table.block_ids[:2] == caches[1].only_table.block_ids[:2]


def test_a_table_with_a_promise_is_not_released() -> None:
    core = Core()
    cache, _ = core.admit(range(4))
    core.plan(cache, range(4), 0)
    with pytest.raises(AssertionError, match="commit or abandon"):
        core.release(cache)


# Duplicates.


def test_duplicates_of_one_step_are_joined_at_commit() -> None:
    """Both were admitted before either had written a block: the second to commit gives its blocks back."""
    core = Core()
    (one, _), (other, _) = core.admit(range(9)), core.admit(range(9))
    promises = core.plan(one, range(9), 0), core.plan(other, range(9), 0)
    assert (one.num_published, other.num_published) == (2, 0)
    assert core.num_active == 6
    core.finish_step(*promises)
    assert other.only_table.block_ids[:2] == one.only_table.block_ids[:2]
    assert other.num_published == 2
    assert core.states() == (12, 0, 4)


def test_a_duplicate_of_what_is_cached_wakes_it_up() -> None:
    core = Core()
    early, _ = core.admit(range(9))
    core.drop(core.serve(range(9)))
    assert core.pool.num_cached == 2
    core.grow(early, range(9), 0)
    assert core.pool.num_cached == 0
    assert early.num_published == 2
    core.drop(early)
    assert core.states() == (14, 2, 0)


def test_a_duplicate_that_goes_further_publishes_the_rest() -> None:
    core = Core()
    early, _ = core.admit(range(13))
    core.serve(range(5))
    core.grow(early, range(13), 0)
    assert early.num_published == 3
    assert core.hit_tokens(range(13)) == 12


def test_a_duplicate_whose_twin_left_meanwhile_is_published_after_all() -> None:
    """Also when the root left with it and another came: what is planned later in the step may do both."""
    core = Core(4)
    early, _ = core.admit(range(5))
    core.drop(core.serve(range(4)))
    promise = core.plan(early, range(5), 0)
    assert core.pool.num_free == 1
    core.blocks.reclaim(1)
    assert not core.tree.roots
    other, _ = core.admit([50, 51, 52, 53])
    other_promise = core.plan(other, [50, 51, 52, 53], 0)
    assert list(core.tree.roots) == [NS]
    core.finish_step(promise, other_promise)
    assert early.num_published == 1
    assert core.hit_tokens(range(5)) == 4
    assert core.hit_tokens([50, 51, 52, 53]) == 4


def behind_a_later_promise(core: Core) -> tuple[SequenceCache, SequenceCache]:
    """Return a table that committed before the one whose block it duplicates, and that one.

    The first finds its block 0 known, so it promises nothing; the second, later in the same step, finds it too and
    promises block 1.
    """
    cold, _ = core.admit(range(12))
    early, _ = core.admit(range(12))
    core.finish_step(core.plan(cold, range(4), 0), core.plan(early, range(2), 0))
    core.drop(cold)
    first = core.plan(early, range(8), 2)
    late, start = core.admit(range(9))
    assert start == 4
    second = core.plan(late, range(8), 4)
    core.finish_step(first, second)
    assert (early.num_published, late.num_published) == (1, 2)
    return early, late


def test_a_duplicate_of_what_a_later_row_promises_is_joined_when_it_grows() -> None:
    core = Core()
    early, late = behind_a_later_promise(core)
    core.grow(early, range(9), 8)
    assert early.num_published == 2
    assert early.only_table.block_ids[:2] == late.only_table.block_ids[:2]


def test_a_block_that_a_fork_holds_too_is_not_published_under_it() -> None:
    """The fork's path would not lead through it. Found by test_machine.py."""
    core = Core()
    early, late = behind_a_later_promise(core)
    twin = core.fork(early)
    core.drop(late)
    core.blocks.reclaim(1)
    core.grow(early, range(9), 8)
    assert (early.num_published, twin.num_published) == (1, 1)
    core.drop(twin)
    core.grow(early, range(10), 9)
    assert early.num_published == 2


def test_nor_is_it_at_commit() -> None:
    core = Core()
    early, late = behind_a_later_promise(core)
    twin = core.fork(early)
    core.drop(late)
    promise = core.plan(early, range(9), 8)
    core.blocks.reclaim(1)
    core.finish_step(promise)
    assert (early.num_published, twin.num_published) == (1, 1)
    core.grow(twin, [*range(8), 99], 8)
    core.drop(early)
    core.grow(twin, [*range(8), 99, 99], 9)
    assert twin.num_published == 2


# Abandon.


def test_what_is_abandoned_was_never_known() -> None:
    core = Core()
    cache, _ = core.admit(range(9))
    promise = core.plan(cache, range(9), 0)
    core.fail_step(promise, admitted=[cache])
    assert core.hit_tokens(range(9)) == 0
    assert core.states() == (16, 0, 0)
    assert not core.tree.roots
    assert core.events == []  # it was never cached


def test_a_running_table_rolls_back_and_tries_again() -> None:
    core = Core()
    cache = core.serve(range(6))
    for _ in range(3):
        core.fail_step(core.plan(cache, range(13), 6))
        assert (cache.num_published, core.hit_tokens(range(13))) == (1, 4)
    core.grow(cache, range(13), 6)
    assert (cache.num_published, core.hit_tokens(range(13))) == (3, 12)


def test_those_that_leaned_on_a_failed_promise_are_released() -> None:
    core = Core()
    cache = core.serve(range(2))
    first = core.plan(cache, range(9), 2)
    leaner, num_tokens = core.admit(range(13))
    assert num_tokens == 8
    second = core.plan(leaner, range(13), 8)
    core.fail_step(first, second, admitted=[leaner])
    assert core.hit_tokens(range(13)) == 0
    assert core.num_active == 3
    core.grow(cache, range(9), 2)
    assert core.hit_tokens(range(13)) == 8


def test_abandon_with_a_duplicate_takes_back_only_its_own() -> None:
    core = Core()
    early, _ = core.admit(range(13))
    core.drop(core.serve(range(5)))
    promise = core.plan(early, range(13), 0)  # promises nothing: its first block is known
    core.fail_step(promise)
    assert core.hit_tokens(range(13)) == 4
    core.grow(early, range(13), 0)
    assert core.hit_tokens(range(13)) == 12


def test_abandon_twins_of_one_step() -> None:
    core = Core()
    (one, _), (other, _) = core.admit(range(9)), core.admit(range(9))
    core.fail_step(core.plan(one, range(9), 0), core.plan(other, range(9), 0), admitted=[one, other])
    assert core.states() == (16, 0, 0)


def test_a_root_that_left_with_a_failed_step_comes_back() -> None:
    core = Core()
    cache, _ = core.admit(range(3))
    core.finish_step(core.plan(cache, range(3), 0))
    core.fail_step(core.plan(cache, range(5), 3))
    assert not core.tree.roots
    core.drop(core.serve([50, 51, 52, 53]))  # another root of the same namespace
    core.grow(cache, range(5), 3)
    assert core.hit_tokens(range(5)) == 4


# Copies of a step that failed.


def test_a_copy_that_a_failed_step_did_not_make_is_made_by_the_next() -> None:
    """The table that was written has its new block already: uncopied, its first tokens would be anyone's bytes."""
    core = Core()
    cache = core.serve(range(6))
    twin = core.fork(cache)
    promise = core.plan(cache, range(7), 6)
    copies = [CopyOp(twin.only_table.block_ids[1], cache.only_table.block_ids[1], 2)]
    assert core.moves.pending_copies == copies
    core.fail_step(promise)
    assert core.moves.pending_copies == copies
    assert core.grow(cache, range(7), 6) == copies
    assert core.moves.pending_copies == core.moves.copies_in_flight == []


def test_a_copy_that_a_failed_step_left_goes_with_its_table() -> None:
    core = Core()
    cache = core.serve(range(6))
    twin = core.fork(cache)
    core.fail_step(core.plan(cache, range(7), 6))
    core.drop(cache)
    assert core.moves.pending_copies == []
    assert core.num_active == 2
    core.drop(twin)
    assert core.num_active == 0


def test_a_copy_for_a_table_that_the_failed_step_admitted_is_dropped() -> None:
    core = Core()
    core.drop(core.serve(range(8)))
    cache, start = core.admit(range(7))
    assert start == 6
    core.fail_step(core.plan(cache, range(7), start), admitted=[cache])
    assert core.moves.pending_copies == []
    assert core.states() == (14, 2, 0)


def test_a_copy_for_a_table_that_was_released_before_is_dropped_too() -> None:
    core = Core()
    core.drop(core.serve(range(8)))
    cache, start = core.admit(range(7))
    core.plan(cache, range(7), start)
    copies = core.moves.take_copies()
    core.drop(cache)
    core.moves.copies_failed(copies)
    audit(core)
    assert core.moves.pending_copies == core.moves.copies_in_flight == []
    assert core.states() == (14, 2, 0)


def test_a_fork_of_a_table_that_waits_for_a_copy_copies_from_where_the_bytes_are() -> None:
    core = Core()
    cache = core.serve(range(6))
    twin = core.fork(cache)
    core.fail_step(core.plan(cache, range(7), 6))
    third = core.fork(cache)
    waiting = cache.only_table.block_ids[1]
    core.plan(third, [*range(6), 99], 6)
    assert core.moves.pending_copies == [
        CopyOp(twin.only_table.block_ids[1], waiting, 2),
        CopyOp(twin.only_table.block_ids[1], third.only_table.block_ids[1], 2),
    ]


# Release.


def test_published_blocks_stay_and_private_ones_are_free() -> None:
    core = Core()
    core.drop(core.serve(range(11)))
    assert core.states() == (14, 2, 0)


def test_a_released_table_is_empty() -> None:
    core = Core()
    cache = core.serve(range(11))
    core.drop(cache)
    assert (cache.only_table.block_ids, cache.capacity, cache.num_published, cache.tail) == ([], 0, 0, None)
    with pytest.raises(KeyError):
        core.release(cache)


def test_a_table_released_while_its_step_is_planned_leaves_no_copy_behind() -> None:
    """Memory was too short for the rest of it: nobody may wait for a step that perhaps never comes."""
    core = Core(4)
    core.drop(core.serve(range(8)))
    for _ in range(5):
        cache, start = core.admit([0, 1, 2, 3, 4, 99, *range(60, 70)])
        assert start == 5
        assert len(core.moves.pending_copies) == 1
        assert not core.extend(cache, start, 24)
        core.drop(cache)
        assert core.moves.pending_copies == []
        assert core.states() == (2, 2, 0)


# Transfers.


def test_a_block_that_a_transfer_reads_is_not_evicted() -> None:
    core = Core(4)
    core.drop(core.serve(range(8)))
    cache, _ = core.admit([0, 1, 2, 3, 4, 5, 99])
    copies = core.moves.take_copies()
    core.drop(cache)  # cancelled while the step runs: nothing of it is in the plan but the copy
    src, dst = (core.pool.blocks[i] for i in (copies[0].src, copies[0].dst))
    assert (src.state, dst.state) == (BlockState.CACHED, BlockState.ACTIVE)
    assert core.blocks.reclaim(4) == 0  # and so nothing before it goes
    other, _ = core.admit(range(50, 60))
    assert not core.extend(other, 0, 8)  # one block is free, and it is given back
    audit(core)
    assert core.pool.num_free == 1
    assert core.extend(other, 0, 4)
    assert not core.extend(other, 4, 8)
    audit(core)
    assert dst.block_id not in other.only_table.block_ids
    core.moves.copies_done(copies)
    audit(core)
    assert dst.state == BlockState.FREE
    assert core.extend(other, 4, 12)
    audit(core)


def test_copies_are_handed_over_once() -> None:
    core = Core()
    core.drop(core.serve(range(8)))
    core.admit(range(7))
    copies = core.moves.take_copies()
    assert core.moves.take_copies() == []
    assert core.moves.copies_in_flight == copies
    core.moves.copies_done(copies)
    with pytest.raises(ValueError, match="not in list"):
        core.moves.copies_done(copies)


def test_a_reset_leaves_a_source_alone_until_its_copy_is_made() -> None:
    core = Core(4)
    core.drop(core.serve(range(8)))
    core.admit(range(7))
    (copy,) = core.moves.pending_copies
    assert core.forgetting.reset() == 1
    audit(core)
    src = core.pool.blocks[copy.src]
    assert (src.state, src.node) == (BlockState.ACTIVE, None)
    core.moves.copies_done(core.moves.take_copies())
    audit(core)
    assert src.state == BlockState.FREE


# Reset.


def test_reset_forgets_everything_and_frees_what_is_cached() -> None:
    core = Core()
    core.drop(core.serve(range(12)))
    core.drop(core.serve([0, 1, 2, 3, 99, 99, 99, 99]))
    assert core.forgetting.reset() == 4
    audit(core)
    assert core.states() == (16, 0, 0)
    assert core.hit_tokens(range(12)) == 0
    assert core.events.pop(0) == CacheReset()
    assert sorted(event.depth for event in core.events) == [0, 1, 1, 2]
    assert {event.cause for event in core.events} == {"reset"}
    assert core.forgetting.reset() == 0


def test_what_runs_during_a_reset_goes_on_but_is_never_published() -> None:
    core = Core()
    cache = core.serve(range(6))
    core.forgetting.reset()
    audit(core)
    assert core.plan(cache, range(13), 6) is None
    twin = core.fork(cache)
    assert core.plan(twin, range(17), 13) is None
    core.finish_step()
    core.drop(cache)
    core.drop(twin)
    assert core.states() == (16, 0, 0)


@pytest.mark.parametrize("outcome", ["commit", "abandon"])
def test_reset_while_promises_are_open(outcome: str) -> None:
    core = Core()
    cache, _ = core.admit(range(9))
    first = core.plan(cache, range(9), 0)
    leaner, start = core.admit(range(13))
    second = core.plan(leaner, range(13), start)
    assert core.forgetting.reset() == 0
    audit(core)
    if outcome == "commit":
        core.finish_step(first, second)
        core.drop(cache)
        core.drop(leaner)
    else:
        core.fail_step(first, second, admitted=[cache, leaner])
    assert core.hit_tokens(range(13)) == 0
    assert core.states() == (16, 0, 0)
    core.drop(core.serve(range(9)))  # the next one is published as ever
    assert core.hit_tokens(range(9)) == 8


def test_promises_made_after_a_reset_in_the_same_step_stand() -> None:
    core = Core()
    cache, _ = core.admit(range(9))
    first = core.plan(cache, range(9), 0)
    core.forgetting.reset()
    other, start = core.admit(range(9))
    assert start == 0
    second = core.plan(other, range(9), 0)
    core.finish_step(first, second)
    assert core.hit_tokens(range(9)) == 8
    assert not set(cache.only_table.block_ids) & set(other.only_table.block_ids)


# Caching off, and namespaces.


def test_with_caching_off_nothing_is_ever_matched() -> None:
    core = Core(enable_prefix_caching=False)
    cache = core.serve(range(12))
    assert cache.tail is None
    assert core.hit_tokens(range(12)) == 0
    twin = core.fork(cache)  # forks still share, and copy on write
    assert core.grow(twin, range(14), 12) == []
    third = core.fork(twin)
    assert len(core.grow(third, range(15), 14)) == 1
    for one in (cache, twin, third):
        core.drop(one)
    assert core.states() == (16, 0, 0)
    assert core.forgetting.reset() == 0
    assert core.events == [CacheReset()]


def test_namespaces_do_not_share_and_come_and_go_alone() -> None:
    core = Core(policy=make_policy("lru"))
    one = core.serve(range(9))
    other = core.serve(range(9), b"other")
    assert not set(one.only_table.block_ids) & set(other.only_table.block_ids)
    core.drop(one)
    core.drop(other)
    core.blocks.reclaim(2)
    assert [core.hit_tokens(range(9)), core.hit_tokens(range(9), b"other")] == [0, 8]
    assert list(core.tree.roots) == [b"other"]


# The room.


def test_the_core_imports_only_the_standard_library() -> None:
    """In a fresh interpreter: no torch, no numpy, nothing that is not Python's or ours."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import pagefold.kv\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    source = Path(pagefold.kv.__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
    )
    imported = set(run.stdout.split())
    assert "pagefold" in imported
    assert not {"torch", "numpy"} & imported
    assert imported - {"pagefold"} <= set(sys.stdlib_module_names)


def test_the_face_of_the_room_is_what_it_exports() -> None:
    for name in pagefold.kv.__all__:
        assert hasattr(pagefold.kv, name)
    assert len(set(pagefold.kv.__all__)) == len(pagefold.kv.__all__)


# Two steps in flight.


def test_a_table_promises_behind_its_promise_and_each_is_committed_alone() -> None:
    core = Core()
    cache, _ = core.admit(range(17))
    first = core.plan(cache, range(9), 0)
    second = core.plan(cache, range(17), 9)
    assert first is not None
    assert second is not None
    nodes = [core.pool.blocks[block_id].node for block_id in cache.only_table.block_ids[:4]]
    core.finish_step(first)
    assert [node.committed for node in nodes if node is not None] == [True, True, False, False]
    core.finish_step(second)
    assert all(node.committed for node in nodes if node is not None)


def test_two_promises_are_taken_back_newest_first() -> None:
    core = Core()
    cache, _ = core.admit(range(17))
    promises = core.plan(cache, range(9), 0), core.plan(cache, range(17), 9)
    with pytest.raises(AssertionError, match="newest promise"):
        core.publishing.abandon(promises[0])  # type: ignore[arg-type]
    core.fail_step(*promises)
    assert (cache.num_published, cache.promise, core.hit_tokens(range(17))) == (0, None, 0)


def test_a_third_promise_is_our_bug() -> None:
    core = Core()
    cache, _ = core.admit(range(17))
    core.plan(cache, range(5), 0)
    core.plan(cache, range(9), 5)
    with pytest.raises(AssertionError, match="two promises"):
        core.plan(cache, range(17), 9)


def test_a_promise_commits_oldest_first() -> None:
    core = Core()
    cache, _ = core.admit(range(17))
    core.plan(cache, range(9), 0)
    second = core.plan(cache, range(17), 9)
    assert second is not None
    with pytest.raises(AssertionError, match="oldest promise"):
        core.publishing.commit(second)


def test_a_table_that_is_read_keeps_its_blocks_until_it_joins() -> None:
    """Both have written the same; the second's own blocks are read by a step in flight."""
    core = Core()
    (one, _), (other, _) = core.admit(range(9)), core.admit(range(9))
    first, second = core.plan(one, range(9), 0), core.plan(other, range(9), 0)
    assert second is not None
    core.finish_step(first)
    own = list(other.only_table.block_ids)
    core.publishing.commit(second, joins=False)
    audit(core)
    assert other.only_table.block_ids == own
    assert second.is_behind
    core.publishing.join(second)
    audit(core)
    assert other.only_table.block_ids[:2] == one.only_table.block_ids[:2]
    assert not second.is_behind
