"""Namespaces that nobody runs in any more are forgotten on device and host, and nothing else is."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pagefold.kv.audit import audit
from pagefold.kv.core import KVCore
from pagefold.kv.host_tier import HostTier
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.names import root_digest

SIZE = 4
NAMESPACES = (b"", b"a", b"a/salt", b"b")


def _packed(tokens):
    return array("i", tokens).tobytes()


def _serve(core, namespace, tokens):
    cache, _ = core.acquire(core.match(namespace, _packed(tokens), len(tokens) - 1))
    end = len(tokens) - 1
    assert core.extend(cache, cache.capacity, end)
    promise = core.publishing.promise(cache, _packed(tokens), end)
    core.moves.host_done(core.moves.take_host_ops())
    if promise is not None:
        core.publishing.commit(promise)
    core.trim(cache, end)
    core.release(cache)


def _num_cached(core):
    """How many blocks device and host have, by namespace."""
    on_device = dict.fromkeys(NAMESPACES, 0)
    for node in core.tree.nodes():
        on_device[node.root.key] += len([block for block in node.blocks if block is not None])
    digests = [one.name.namespace for one in core.host.blocks.found()]
    return {key: (on_device[key], digests.count(root_digest(key))) for key in NAMESPACES}


@given(
    st.lists(st.tuples(st.sampled_from(NAMESPACES), st.integers(0, 2), st.integers(5, 30)), max_size=12),
    st.sets(st.sampled_from(NAMESPACES)),
    st.booleans(),
    st.booleans(),
)
def test_what_is_forgotten_is_all_of_some_namespaces(served, gone, has_host, has_windows):
    rules = [KEEP_ALL, KeepRule(6)] if has_windows else [KEEP_ALL]
    host = {"host": HostTier(20)} if has_host else {}
    core = KVCore(24, block_size=SIZE, rules=rules, **host)
    for namespace, text, length in served:
        _serve(core, namespace, [100 * text + at for at in range(length)])
    before, num_free = _num_cached(core), core.pool.num_free
    assert core.forgetting.those_cached(NAMESPACES) == {key for key, nums in before.items() if any(nums)}
    num_freed = core.forgetting.forget(gone)
    audit(core)
    assert _num_cached(core) == {key: (0, 0) if key in gone else nums for key, nums in before.items()}
    assert core.pool.num_free == num_free + num_freed == num_free + sum(before[key][0] for key in gone)
    for namespace, text, length in served:
        _serve(core, namespace, [100 * text + at for at in range(length)])
    audit(core)


def test_pins_of_a_forgotten_namespace_are_dropped():
    core = KVCore(24, block_size=SIZE)
    for namespace in (b"a", b"b"):
        _serve(core, namespace, list(range(13)))
        tail = core.match(namespace, _packed(range(13)), 12).nodes[-1]
        assert core.pins.add(namespace.decode(), tail, 0.0, ttl_s=None, priority=1.0) is not None
    assert core.forgetting.forget({b"a"}) == 3
    audit(core)
    assert [pin.pin_id for pin in core.pins] == ["b"]
    assert core.pins.num_blocks == 3
