"""Examples of several cache groups beside a host tier: what is stored, loaded, given to nodes, and let go of."""

from array import array

import pytest

from pagefold.kv.audit import audit
from pagefold.kv.core import KVCore
from pagefold.kv.host_tier import HostTier
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.missing import NOTHING_MISSING
from pagefold.kv.names import in_group, names_behind, root_digest

SIZE = 4
TOKENS = list(range(13))
OTHERS = list(range(100, 113))
ORDERS = pytest.mark.parametrize(("full", "window"), [(0, 1), (1, 0)], ids=["full first", "a window first"])


def packed(tokens):
    return array("i", tokens).tobytes()


def core_of(window, num_blocks=12):
    rules = [KEEP_ALL, KEEP_ALL]
    rules[window] = KeepRule(6)
    return KVCore(num_blocks, block_size=SIZE, rules=rules, host=HostTier(60))


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


def without_windows(window):
    """Return a core that has the path of ``TOKENS`` on the device, and its last windows on the host."""
    core = core_of(window)
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


@ORDERS
def test_all_of_a_window_is_missing_or_nothing(full, window):
    core = core_of(window)
    missing = core.missing(b"", packed(TOKENS), 12)
    assert [name.group for name in missing.names] == [full] * 3
    assert [name.group for name in missing.with_windows(3).names] == [full] * 3 + [window] * 2
    assert [name.group for name in missing.with_windows(1).names] == [full, window]
    assert missing.up_to(5) is missing
    assert missing.up_to(4) is NOTHING_MISSING
