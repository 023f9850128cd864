"""Examples of several cache groups that a slow model, written from the documents alone, had found wrong."""

from array import array

import pytest

from pagefold.kv.audit import audit
from pagefold.kv.core import KVCore
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.pins import PinLimits


def packed(tokens):
    return array("i", tokens).tobytes()


def begin(core, tokens, end, max_tokens=None):
    cache, start = core.acquire(core.match(b"", packed(tokens), len(tokens) - 1 if max_tokens is None else max_tokens))
    assert core.extend(cache, start, end)
    return cache, core.publishing.promise(cache, packed(tokens), end)


def test_trim_behind_a_step_in_flight_that_fails_keeps_the_last_published_block():
    core = KVCore(6, block_size=2, rules=(KeepRule(2),))
    tokens = list(range(8))
    cache, first = begin(core, tokens, 3)
    assert core.extend(cache, 3, 6)
    ahead = core.publishing.promise(cache, packed(tokens), 6)
    core.publishing.commit(first)
    core.trim(cache, 3)  # as Scheduler.apply does
    core.publishing.abandon(ahead)
    audit(core)
    assert core.blocks.make_free(3)  # would evict the tail
    assert cache.tail.attached
    audit(core)


def test_promised_blocks_stay_though_the_step_behind_has_promised_them():
    core = KVCore(8, block_size=2, rules=(KeepRule(2), KEEP_ALL))
    tokens = list(range(8))
    cache, _ = core.acquire(core.match(b"", packed(tokens), 7))
    assert core.extend(cache, 0, 4)  # a step that promises nothing: its tokens are not known
    assert core.extend(cache, 4, 6)
    ahead = core.publishing.promise(cache, packed(tokens), 6)
    core.trim(cache, 4)
    core.blocks.make_free(8 - 5)
    core.publishing.abandon(ahead)
    audit(core)


def test_a_root_that_left_between_two_promises():
    core = KVCore(3, block_size=1, rules=(KeepRule(1),))
    tokens = [7, 8, 9]
    other, promise = begin(core, tokens[:1], 1)
    core.publishing.commit(promise)
    core.release(other)
    cache, first = begin(core, tokens, 1, max_tokens=0)  # behind: that block is published
    assert core.extend(cache, 1, 3)  # evicts it, and the root goes
    ahead = core.publishing.promise(cache, packed(tokens), 3)
    core.publishing.abandon(ahead)
    core.publishing.abandon(first)
    audit(core)


def test_two_pins_that_keep_one_block_are_given_up():
    core = KVCore(8, block_size=4, rules=(KeepRule(8),), pin_limits=PinLimits(max_share=1.0))
    tokens = list(range(18))
    one, promise = begin(core, tokens, 8)
    core.publishing.commit(promise)
    core.pins.add("a", one.tail, 0.0)  # keeps blocks 0 and 1
    core.release(one)
    two, promise = begin(core, tokens, 12, max_tokens=8)
    core.publishing.commit(promise)
    core.pins.add("b", two.tail, 0.0)  # keeps blocks 1 and 2
    assert core.extend(two, 12, 17)
    core.publishing.commit(core.publishing.promise(two, packed(tokens), 17))
    core.trim(two, 17)  # holds 2, which b keeps, and 3 and 4
    hit = core.match(b"", packed(tokens), 4)
    spared = core.rules.blocks_of(hit)
    assert len(spared) == 1
    alone = [
        block for block in core.pool.blocks if block.num_pin_refs and not block.num_table_refs and block not in spared
    ]
    assert len(alone) == 1
    assert core.pins.give_up(0.0, spared), "pins alone keep a block, and no pin keeps it"


def test_the_path_of_a_sequence_that_is_preempted_inside_a_block_is_found_again():
    core = KVCore(8, block_size=4, rules=(KeepRule(6),))
    tokens = list(range(12))
    cache, promise = begin(core, tokens, 11)
    core.publishing.commit(promise)
    core.trim(cache, 11)  # 11 sees from 6 on; whoever goes on behind the 8 that are published, from 3 on
    core.blocks.make_free(6)  # somebody needs a block, and then this one goes
    core.release(cache)
    assert len(core.match(b"", packed(tokens), 11).nodes) == 2


def test_a_leaf_is_offered_when_who_leaned_is_released_last():
    core = KVCore(12, block_size=2, rules=(KeepRule(2, is_chunked=True), KEEP_ALL))
    tokens = list(range(9))
    cache, promise = begin(core, tokens, 2)
    core.publishing.commit(promise)
    assert core.extend(cache, 2, 4)
    promise = core.publishing.promise(cache, packed(tokens), 4)
    leans, start = core.acquire(core.match(b"", packed(tokens), 8))
    assert start == 4
    core.publishing.abandon(promise)
    core.release(cache)
    core.release(leans)
    audit(core)
    assert core.blocks.make_free(12)


def test_a_part_of_a_block_is_found_where_the_best_has_lost_its_window():
    core = KVCore(12, block_size=4, rules=(KEEP_ALL, KeepRule(2)))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    short, promise = begin(core, [1, 2, 9, 9], 4)
    core.publishing.commit(promise)
    core.release(short)
    cache, promise = begin(core, tokens, 9, max_tokens=0)
    core.publishing.commit(promise)
    core.trim(cache, 9)
    for _ in range(20):  # its first block's window goes
        if core.blocks.windows.all() and core.blocks.windows._stale:
            core.blocks.reclaim(1)
    hit = core.match(b"", packed([1, 2, 3, 4, 0]), 4)
    assert (len(hit.nodes), hit.num_partial_tokens) == (0, 2)


@pytest.mark.parametrize(
    "rules", [(KEEP_ALL, KeepRule(6)), (KeepRule(6), KEEP_ALL)], ids=["full first", "a window first"]
)
def test_all_that_is_released_was_used_just_now(rules):
    core = KVCore(40, block_size=4, rules=rules)
    tokens = list(range(30))
    cache, promise = begin(core, tokens, 28)
    core.publishing.commit(promise)
    core.trim(cache, 28)
    core.now_s = 100.0
    core.release(cache)
    nodes = core.match(b"", packed(tokens), 29).nodes
    assert [node.used_s for node in nodes] == [100.0] * 7
    assert {node.last_used for node in nodes} == {core.blocks.tick}


@pytest.mark.parametrize(
    "rules", [(KEEP_ALL, KeepRule(2)), (KeepRule(2), KEEP_ALL)], ids=["full first", "a window first"]
)
def test_a_pin_and_a_hit_have_of_a_window_what_is_needed_behind_them(rules):
    core = KVCore(40, block_size=4, rules=rules)
    tokens = list(range(13))
    cache, promise = begin(core, tokens, 12)
    core.publishing.commit(promise)  # not trimmed: every node has its window
    core.release(cache)
    hit = core.match(b"", packed(tokens), 12)
    assert len(core.rules.blocks_of(hit)) == core.pins.num_new_blocks(hit.nodes, 3) == 3 + 1
    assert core.pins.add("a", hit.nodes[-1], 0.0).num_blocks == 3 + 1
    audit(core)


def test_a_node_is_not_given_what_a_fork_holds_off_the_tree():
    core = KVCore(20, block_size=4, rules=(KEEP_ALL, KeepRule(2)))
    tokens = list(range(12))
    one, first = begin(core, tokens, 9, max_tokens=0)
    two, second = begin(core, tokens, 5, max_tokens=0)
    core.publishing.commit(second)  # what is published there is not written yet: it cannot be joined
    assert two.num_published == 0
    core.fork(two)
    core.publishing.commit(first)
    core.trim(one, 9)
    core.release(one)
    assert core.blocks.reclaim(1) == 1  # the window of the first node, left behind
    assert core.extend(two, 5, 8)
    core.publishing.commit(core.publishing.promise(two, packed(tokens), 8))
    audit(core)
    assert two.num_published == 0


@pytest.mark.parametrize("num_sinks", [1, 4, 5])
@pytest.mark.parametrize("publishes", [True, False])
def test_sinks_move_apart_when_what_lies_behind_them_is_given_back(num_sinks, publishes):
    core = KVCore(40, block_size=4, rules=(KeepRule(6, num_sinks=num_sinks),), enable_prefix_caching=publishes)
    cache, _ = core.acquire(core.match(b"", packed([0]), 0))
    num_sink_blocks = -(-num_sinks // 4)
    tokens, firsts, held, bounds = list(range(40)), [], [], []
    for end in range(2, 40, 2):
        bounds.append(cache.only_table.num_held + core.num_blocks_for(38, 2, cache))
        assert core.extend(cache, end - 2, end)
        held.append(cache.only_table.num_held)
        promise = core.publishing.promise(cache, packed(tokens), end)
        if promise is not None:
            core.publishing.commit(promise)
        core.trim(cache, end)
        audit(core)
        table = cache.only_table
        firsts.append(table.first_ids(num_sink_blocks)[0])
        assert bool(table.sink_ids) == bool(table.num_trimmed)
        most = core.rules[0].num_blocks_for(end, 2, 4)
        assert table.num_held <= most
        for later in (end, end + 2, end + 20):  # it takes what it lacks, and nothing that it has given back
            lacking = -(-later // 4) - table.end
            least = core.rules[0].num_blocks_for(later, 2, 4) - table.num_held
            assert core.num_blocks_for(later, 2, cache) == min(least, lacking)
        kept = {at for at in range(table.end) if table.at(at) is not None}
        seen = {at // 4 for at in range(end) if at < num_sinks or at > end - 6}
        assert seen <= kept
    assert all(max(held[step:]) <= bound for step, bound in enumerate(bounds)), "it takes no more than was expected"
    assert set(firsts) == {firsts[0]}, "the first block never moves"
    assert core.pool.blocks[firsts[0]].num_table_refs == 1
    num_active = core.num_active
    twin = core.fork(cache)
    assert list(twin.all_block_ids()) == list(cache.all_block_ids())
    audit(core)
    assert core.extend(twin, 38, 44)
    assert twin.only_table.sink_ids == cache.only_table.sink_ids, "sinks are never written again"
    core.moves.copies_done(core.moves.take_copies())
    audit(core)
    core.release(twin)
    assert core.num_active == num_active
    core.release(cache)
    audit(core)
    assert core.num_active == 0


def test_a_fork_inside_the_first_block_writes_its_own_sinks():
    core = KVCore(40, block_size=4, rules=(KeepRule(6, num_sinks=3),))
    cache, _ = core.acquire(core.match(b"", packed([0]), 0))
    assert core.extend(cache, 0, 2)
    twin = core.fork(cache)
    assert core.extend(twin, 2, 3)
    assert core.extend(cache, 2, 3)
    assert twin.only_table.block_ids != cache.only_table.block_ids
    core.moves.copies_done(core.moves.take_copies())
    for one in (cache, twin):
        assert core.extend(one, 3, 30)
        core.trim(one, 30)
    audit(core)


def test_a_pin_keeps_the_sinks_of_its_path():
    core = KVCore(40, block_size=4, rules=(KeepRule(6, num_sinks=5), KeepRule(2)))
    tokens = list(range(42))
    cache, promise = begin(core, tokens, 41)
    core.publishing.commit(promise)
    core.trim(cache, 41)
    core.release(cache)
    hit = core.match(b"", packed(tokens), 41)
    assert hit.num_blocks == 10
    needed = [(0, 0), (1, 0), (8, 0), (9, 0), (9, 1)]
    assert core.pins.num_new_blocks(hit.nodes, 10) == len(needed)
    pin = core.pins.add("a", hit.nodes[-1], 0.0)
    assert sorted((block.node.depth, block.group) for block in pin.blocks) == needed
    assert core.pins.num_new_blocks(hit.nodes, 10) == 0
    assert sorted((block.node.depth, block.group) for block in core.rules.blocks_of(hit)) == needed
    core.blocks.reclaim(99)
    audit(core)
    assert core.pool.num_cached == len(needed)
    assert core.match(b"", packed(tokens), 41).num_blocks == 10


def test_who_has_been_joined_gives_its_sinks_back_for_those_of_others():
    core = KVCore(60, block_size=4, rules=(KeepRule(6, num_sinks=1),))
    tokens = list(range(30))
    one, first = begin(core, tokens, 29, max_tokens=0)
    two, second = begin(core, tokens, 29, max_tokens=0)
    core.publishing.commit(first)
    core.publishing.commit(second)
    core.trim(one, 29)
    core.trim(two, 29)
    audit(core)
    assert one.only_table.sink_ids == two.only_table.sink_ids
