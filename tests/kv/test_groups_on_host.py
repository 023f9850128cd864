"""Examples of several cache groups beside a host tier: what is stored, loaded, given to nodes, and let go of."""

from array import array

import pytest

from pagefold.events import BlocksRegained, ignore
from pagefold.kv.arbiter import Arbiter
from pagefold.kv.audit import audit
from pagefold.kv.core import KVCore
from pagefold.kv.host_tier import HostTier
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.missing import NOTHING_MISSING
from pagefold.kv.names import in_group, names_behind, root_digest
from pagefold.kv.policies import make_policy
from pagefold.kv.slow_tiers import SlowTiers

SIZE = 4
TOKENS = list(range(13))
OTHERS = list(range(100, 113))
ORDERS = pytest.mark.parametrize(("full", "window"), [(0, 1), (1, 0)], ids=["full first", "a window first"])


def packed(tokens):
    return array("i", tokens).tobytes()


def core_of(window, num_blocks=12, emit=ignore):
    rules = [KEEP_ALL, KEEP_ALL]
    rules[window] = KeepRule(6)
    return KVCore(num_blocks, block_size=SIZE, rules=rules, host=HostTier(60), emit=emit)


def acquire(core, tokens):
    return core.acquire(core.match(b"", packed(tokens), len(tokens) - 1))[0]


def run(core, cache, tokens):
    """A step that computes all but the last of ``tokens``."""
    end = len(tokens) - 1
    assert core.extend(cache, cache.capacity, end)
    promise = core.publishing.promise(cache, packed(tokens), end)
    core.moves.host_done(core.moves.take_host_ops())
    if promise is not None:
        core.publishing.commit(promise)
    core.trim(cache, end)


def serve(core, tokens):
    cache = acquire(core, tokens)
    run(core, cache, tokens)
    core.release(cache)


def store_all(core):
    """Evict all that is cached, into the host's arena."""
    core.blocks.reclaim(99)
    core.moves.host_done(core.moves.take_host_ops())


def take_windows(core):
    """Let every block that can go alone leave the device for the host."""
    for block in core.blocks.windows.all():
        core.host.keep_evicted(block.node, block)
        core.blocks._evict_alone(block)
    core.moves.host_done(core.moves.take_host_ops())


def without_windows(window, emit=ignore):
    """Return a core that has the path of ``TOKENS`` on the device, and its last windows on the host."""
    core = core_of(window, emit=emit)
    serve(core, TOKENS)
    take_windows(core)
    nodes = core.tree.match(b"", packed(TOKENS), 12).nodes
    assert [node.blocks[window] for node in nodes] == [None] * 3
    audit(core)
    return core, nodes


@ORDERS
def test_who_is_released_before_its_step_leaves_nobody_lacking(full, window):
    core = core_of(window)
    serve(core, OTHERS)
    store_all(core)
    serve(core, TOKENS)
    take_windows(core)
    core.release(acquire(core, TOKENS))  # there was no room for what it would compute
    audit(core)
    other = acquire(core, OTHERS)  # gets the blocks that the first was to be loaded into
    core.moves.host_done(core.moves.take_host_ops())
    audit(core)
    lacking = core.tree.match(b"", packed(TOKENS), 12).nodes[-1]
    assert lacking.blocks[window] is None
    assert set(other.tables[full].block_ids)


@ORDERS
def test_a_step_that_fails_leaves_nobody_lacking(full, window):
    core, nodes = without_windows(window)
    cache = acquire(core, TOKENS)
    assert core.moves.lacking
    core.moves.host_failed(core.moves.take_host_ops())
    core.release(cache)
    audit(core)
    assert not core.moves.lacking
    assert nodes[-1].blocks[window] is None


@ORDERS
def test_what_nodes_regain_from_the_host_is_told_once_a_step(full, window):
    told = []
    core, nodes = without_windows(window, told.append)
    cache = acquire(core, TOKENS)
    core.moves.host_done(core.moves.take_host_ops())
    (event,) = [event for event in told if isinstance(event, BlocksRegained)]
    assert event.nodes == tuple(nodes[1:])  # the window of 6 does not reach the first
    assert [node.blocks[window] is None for node in nodes] == [True, False, False]
    core.release(cache)
    told.clear()
    serve(core, OTHERS)
    serve(core, TOKENS)
    assert not any(isinstance(event, BlocksRegained) for event in told), "nothing was lacking"


@ORDERS
def test_what_nodes_regain_of_who_computed_it_once_more_is_told_once_a_path(full, window):
    told = []
    core = core_of(window, 20, told.append)
    caches = [acquire(core, TOKENS) for _ in range(2)]
    for cache in caches:
        assert core.extend(cache, 0, 12)
    first, second = (core.publishing.promise(cache, packed(TOKENS), 12) for cache in caches)
    core.publishing.commit(first)
    core.release(caches[0])
    nodes = core.tree.match(b"", packed(TOKENS), 12).nodes
    for block in core.blocks.windows.all():
        core.blocks._evict_alone(block)
    assert [node.blocks[window] for node in nodes] == [None] * 3
    core.publishing.commit(second)
    (event,) = [event for event in told if isinstance(event, BlocksRegained)]
    assert event.nodes == tuple(nodes)
    audit(core)


@ORDERS
def test_a_node_gets_what_was_loaded_though_a_fork_holds_it_too(full, window):
    core, nodes = without_windows(window)
    cache = acquire(core, TOKENS)
    ops = core.moves.take_host_ops()
    twin = core.fork(cache)
    core.moves.host_done(ops)
    audit(core)
    assert [node.blocks[window] is not None for node in nodes] == [False, True, True]
    core.release(cache)
    core.release(twin)
    audit(core)
    assert len(core.match(b"", packed(TOKENS), 12).nodes) == 3


@ORDERS
def test_what_was_loaded_for_who_has_gone_meanwhile_is_free(full, window):
    core, nodes = without_windows(window)
    cache = acquire(core, TOKENS)
    ops = core.moves.take_host_ops()
    core.release(cache)
    core.moves.host_done(ops)
    audit(core)
    assert [node.blocks[window] for node in nodes] == [None] * 3
    assert core.pool.num_free == core.pool.num_blocks - 3


@ORDERS
def test_a_block_that_goes_alone_is_kept_on_the_host(full, window):
    core = core_of(window)
    cache = acquire(core, TOKENS)
    assert core.extend(cache, 0, 12)
    core.publishing.commit(core.publishing.promise(cache, packed(TOKENS), 12))
    core.release(cache)  # with its first window: nothing is stale
    acquire(core, TOKENS)  # no leaf can go, and of the first place it needs no window
    (alone,) = core.blocks.windows.all()
    node = alone.node
    assert (node.depth, core.blocks.windows.is_spare(alone)) == (0, False)
    assert core.blocks.reclaim(1) == 1
    assert [store.block_id for store in core.host.pending.stores] == [alone.block_id]
    assert node.blocks[window] is None
    audit(core)


@ORDERS
def test_what_was_left_behind_stale_is_not_stored(full, window):
    core = core_of(window)
    serve(core, TOKENS)
    first = core.tree.match(b"", packed(TOKENS), 12).nodes[0]
    assert core.blocks.windows.is_spare(first.blocks[window])
    assert core.moves.store(first) == 1
    assert [store.block_id for store in core.host.pending.stores] == [first.blocks[full].block_id]
    audit(core)


@ORDERS
def test_a_hit_that_is_stale_pins_nothing_that_is_not_loaded(full, window):
    core, _ = without_windows(window)
    hit = core.match(b"", packed(TOKENS), 12)
    assert hit.held
    serve(core, TOKENS)  # loads the windows: the nodes have them again
    cache, num_tokens = core.acquire(hit)
    assert num_tokens == 12
    assert not core.host.pending.loads
    audit(core)
    core.release(cache)


@ORDERS
def test_a_place_that_is_loaded_counts_once(full, window):
    core = core_of(window)
    serve(core, TOKENS)
    store_all(core)
    cache = acquire(core, TOKENS)
    assert len(core.host.pending.loads) == 3 + 2
    assert cache.num_loaded_tokens == {"host": 12}
    audit(core)


@ORDERS
def test_what_is_distrusted_is_told_of_every_group(full, window):
    core, _ = without_windows(window)
    cache = acquire(core, TOKENS)
    root = root_digest(b"")
    names = names_behind(root, root, packed(TOKENS), 4 * SIZE)
    digests = core.forgetting.distrust(cache, b"", packed(TOKENS))
    assert digests == {in_group(name.digest, group) for name in names for group in (0, 1)}


@ORDERS
def test_the_host_is_asked_of_what_lies_behind_the_device_and_of_the_windows_there(full, window, monkeypatch):
    core = core_of(window, num_blocks=200)
    tokens = list(range(60 * SIZE + 1))
    serve(core, tokens)
    take_windows(core)
    get, asked = core.host.blocks.get, []
    monkeypatch.setattr(core.host.blocks, "get", lambda digest: asked.append(digest) or get(digest))
    hit = core.match(b"", packed([*tokens, 7, 7, 7, 7]), len(tokens) + 3)
    assert (len(hit.nodes), len(hit.held)) == (60, 2)
    assert len(asked) < 10


SLIDES = KeepRule(6)
LONG = list(range(41))
ALONE = pytest.mark.parametrize(
    ("rules", "places"),
    [
        ((SLIDES,), {8, 9}),
        ((SLIDES, KeepRule(2)), {8, 9}),
        ((KeepRule(6, num_sinks=1),), {0, 8, 9}),
        ((KeepRule(2, num_sinks=SIZE + 1), SLIDES), {0, 1, 8, 9}),
        ((KeepRule(8, is_chunked=True),), {9}),
    ],
    ids=["a window", "windows", "a sink", "sinks", "chunks"],
)


def core_of_windows(rules, num_blocks=60):
    return KVCore(num_blocks, block_size=SIZE, rules=rules, host=HostTier(200))


def on_host(rules):
    """Return a core without a group that keeps all, which has what is needed behind ``LONG`` on the host alone."""
    core = core_of_windows(rules)
    serve(core, LONG)
    while core.blocks.windows.stale_block() is not None:
        core.blocks.reclaim(1)
    store_all(core)
    assert core.pool.num_free == core.pool.num_blocks
    return core


@ALONE
def test_where_no_group_keeps_all_windows_and_sinks_come_back_alone(rules, places):
    core = on_host(rules)
    hit = core.match(b"", packed([*LONG, 7, 8, 9]), 43)
    assert (hit.nodes, hit.num_behind) == ([], 10)
    assert sorted(at for rule in rules for at in rule.places(10, SIZE)) == sorted(
        LONG.index(int.from_bytes(held.name.key[:4], "little")) // SIZE for held in hit.held
    )
    cache, num_tokens = core.acquire(hit)
    assert (num_tokens, cache.num_begun, cache.num_published) == (40, 10, 0)
    assert {at for table in cache.tables for at in range(10) if table.at(at) is not None} == places
    audit(core)
    run(core, cache, [*LONG, 7, 8, 9])
    assert cache.num_published == 10
    audit(core)
    core.release(cache)
    audit(core)
    assert len(core.match(b"", packed([*LONG, 7, 8, 9]), 43).nodes) == 10
    assert core.blocks.make_free(core.pool.num_blocks)
    audit(core)
    assert not core.tree.roots, "nodes without blocks go with the last that they lead to"


def test_a_part_of_the_window_leads_nowhere_and_one_further_ahead_is_found():
    core = core_of_windows((SLIDES,))
    for tokens in (LONG[:25], LONG):
        serve(core, tokens)
        store_all(core)
    root = root_digest(b"")
    names = names_behind(root, root, packed(LONG), 4 * SIZE)
    core.host.blocks.forget(core.host.blocks.get(names[8].digest))
    hit = core.match(b"", packed(LONG), 40)
    assert hit.num_blocks == 6
    assert [held.name.digest for held in hit.held] == [names[4].digest, names[5].digest]


def test_the_host_is_asked_once_of_each_place_at_most(monkeypatch):
    core = core_of_windows((KeepRule(100), KeepRule(60)), num_blocks=300)
    tokens = list(range(80 * SIZE + 1))
    cache = acquire(core, tokens)
    assert core.extend(cache, 0, 80 * SIZE)
    core.publishing.commit(core.publishing.promise(cache, packed(tokens), 80 * SIZE))
    core.release(cache)  # with all of its windows, which it has not left behind
    core.blocks.reclaim(999)
    core.moves.host_done(core.moves.take_host_ops())
    assert core.host.blocks.num_held == 160
    root = root_digest(b"")
    for name in names_behind(root, root, packed(tokens), 4 * SIZE)[::7]:  # nowhere is there a window as a whole
        for group in (0, 1):
            held = core.host.blocks.get(in_group(name.digest, group))
            if held is not None:
                core.host.blocks.forget(held)
    get, asked = core.host.blocks.get, []
    monkeypatch.setattr(core.host.blocks, "get", lambda digest: asked.append(digest) or get(digest))
    assert core.match(b"", packed(tokens), len(tokens) - 1).num_blocks == 0
    assert len(asked) == len(set(asked)) <= 2 * 80


def test_who_leans_on_nothing_of_a_path_is_published_when_all_of_it_is_there():
    """Its windows come from the host, behind blocks that somebody else is computing once more."""
    core = on_host((SLIDES,))
    other = core.acquire(core.match(b"", packed(LONG), 0))[0]
    assert core.extend(other, 0, 4)
    core.publishing.commit(core.publishing.promise(other, packed(LONG), 4))
    assert core.extend(other, 4, 8)
    promise = core.publishing.promise(other, packed(LONG), 8)
    cache = acquire(core, [*LONG, 7, 8, 9])
    assert (cache.num_begun, cache.num_published) == (10, 0)
    run(core, cache, [*LONG, 7, 8, 9])
    assert cache.num_published == 0, "the second block of its path is not written yet"
    audit(core)
    core.publishing.commit(promise)
    core.release(other)
    core.blocks.reclaim(99)
    audit(core)
    goes_on = [*LONG, 7, 8, 9, *range(200, 206)]
    run(core, cache, goes_on)
    assert cache.num_published == 12
    audit(core)


def test_a_leaf_that_leads_to_somebody_elses_block_is_none_any_more():
    core = on_host((SLIDES,))
    serve(core, LONG[:5])  # the first block, a leaf that nobody holds
    cache = acquire(core, [*LONG, 7, 8, 9])
    assert cache.num_published == 0
    run(core, cache, [*LONG, 7, 8, 9])
    assert cache.num_published == 10
    audit(core)


def test_what_a_fork_holds_too_is_not_published_nor_what_leads_there():
    core = on_host((SLIDES,))
    cache = acquire(core, [*LONG, 7, 8, 9])
    twin = core.fork(cache)
    promise = core.publishing.promise(cache, packed([*LONG, 7, 8, 9]), 43)
    assert cache.num_published == 0
    audit(core)
    core.publishing.commit(promise)
    core.moves.host_done(core.moves.take_host_ops())
    core.release(cache)
    core.release(twin)
    audit(core)
    assert core.pool.num_free == core.pool.num_blocks


def test_where_no_group_keeps_all_what_is_distrusted_takes_its_namespace_along():
    """What lies between windows is nowhere, so nobody knows what goes on from what."""
    core = on_host((SLIDES,))
    other = core.acquire(core.match(b"other", packed(LONG), 40))[0]
    run(core, other, LONG)
    core.release(other)
    store_all(core)
    cache = core.acquire(core.match(b"", packed(LONG), 0))[0]
    core.forgetting.distrust(cache, b"", packed(LONG[:8]))
    assert core.match(b"", packed([*LONG, 7]), 41).num_blocks == 0
    assert core.match(b"other", packed([*LONG, 7]), 41).num_blocks == 10


def test_what_may_be_corrupted_is_not_sought_in_slow_tiers_that_cannot_be_told():
    host = HostTier(60, notes_unsaved=True)
    slow = SlowTiers(host, "write_back", Arbiter(1, SIZE, compute_s_per_token=1.0))
    core = KVCore(60, block_size=SIZE, rules=(SLIDES,), host=host, slow=slow)
    cache = acquire(core, LONG)
    assert core.missing(b"", packed(LONG), 40).needs_windows
    core.forgetting.distrust(cache, b"", packed(LONG[:8]))
    assert core.missing(b"", packed(LONG), 40) is NOTHING_MISSING
    assert core.missing(b"other", packed(LONG), 40).needs_windows
    core.forgetting.reset()
    assert core.missing(b"", packed(LONG), 40).needs_windows


def test_where_no_group_keeps_all_it_is_asked_where_the_last_window_is():
    core = core_of_windows((KeepRule(6, num_sinks=1), KeepRule(2)))
    root = root_digest(b"")
    names = names_behind(root, root, packed(LONG), 4 * SIZE)
    known = {in_group(names[at].digest, group) for at, group in ((0, 0), (3, 0), (4, 0), (4, 1), (8, 0), (9, 0))}
    missing = core.missing(b"", packed(LONG), 40)
    assert not missing.names
    there = missing.with_windows(0, lambda name: name.digest in known)
    assert {name.digest for name in there.names} == known - {names[8].digest, names[9].digest}
    assert (there.gain(4), there.gain(3), there.is_whole_or_nothing) == (5, 0, True)
    whole = missing.with_windows(0)
    assert [(name.group, name.path) for name in whole.names] == [
        *((0, names[at].digest) for at in (0, 8, 9)),
        (1, names[9].digest),
    ]
    assert missing.up_to(8) is missing
    assert missing.up_to(7) is NOTHING_MISSING, "some window and the sinks may take more"


@ORDERS
def test_all_of_a_window_is_missing_or_nothing(full, window):
    core = core_of(window)
    missing = core.missing(b"", packed(TOKENS), 12)
    assert [name.group for name in missing.names] == [full] * 3
    assert [name.group for name in missing.with_windows(3).names] == [full] * 3 + [window] * 2
    assert [name.group for name in missing.with_windows(1).names] == [full, window]
    assert missing.up_to(5) is missing
    assert missing.up_to(4) is NOTHING_MISSING


def test_what_went_to_make_room_for_windows_that_found_none_is_not_gone_on_from():
    """A path of which the device has a block that nobody needs, and the host the rest; memory is short for the rest."""
    core = KVCore(3, block_size=1, rules=(KeepRule(3),), host=HostTier(20), policy=make_policy("lru"))

    def write(cache, token_ids, start):
        assert core.extend(cache, start, start + 1)
        promise = core.publishing.promise(cache, packed(token_ids), start + 1)
        moved, copies = core.moves.take_host_ops(), core.moves.take_copies()
        core.moves.copies_done(copies)
        core.moves.host_done(moved)
        core.publishing.commit(promise)
        core.trim(cache, start + 1)

    first, _ = core.acquire(core.match(b"", packed([1] * 6), 5))
    write(first, [1] * 6, 0)
    second, num_found = core.acquire(core.match(b"", packed([1] * 6), 5))
    assert num_found == 1
    write(second, [1] * 6, 1)
    write(second, [1] * 6, 2)
    core.release(second)
    other, _ = core.acquire(core.match(b"", packed([0] * 6), 5))
    write(other, [0] * 6, 0)
    write(other, [0] * 6, 1)
    core.release(first)
    hit = core.match(b"", packed([1, 1, 1, 7]), 3)
    assert (len(hit.nodes), len(hit.held)) == (1, 2)
    cache, num_found = core.acquire(hit)  # two blocks are wanted; one is free, or was the path's first
    assert num_found == 0
    audit(core)
    core.release(cache)
    core.release(other)
    audit(core)
