"""Quotas in the core, beside a brute-force twin: who may have which block, and that nothing else is refused."""

from __future__ import annotations

from array import array
from collections import Counter
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest

from pagefold.events import BlockEvicted
from pagefold.kv import POLICIES, BlockState, KVCore, KVQuota, PinLimits, Quotas, audit, make_policy
from pagefold.kv.expectations import ExpectedPath

if TYPE_CHECKING:
    from pagefold.events import Event
    from pagefold.kv import SequenceCache

SIZE, NUM_BLOCKS = 4, 24
QUOTAS = {"a": KVQuota(6), "b": KVQuota(4, 10), "c": KVQuota(0, 5), "rest": None}


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Twin:
    """A core whose blocks are counted one by one before each operation."""

    def __init__(self, policy: str = "lru", quotas: dict[str, KVQuota | None] = QUOTAS) -> None:
        self.quotas = Quotas()
        for tenant, quota in quotas.items():
            self.quotas.arrived(tenant, quota)
        self.given = quotas
        make = partial(make_policy, policy)
        self.core = KVCore(
            NUM_BLOCKS,
            block_size=SIZE,
            policy=self.quotas.policy(make(), make),
            quotas=self.quotas,
            pin_limits=PinLimits(0.5),
            emit=self._on_event,
        )
        self.asker = ""
        self.held: list[tuple[str, SequenceCache]] = []
        self.seen: Counter[str] = Counter()

    def counts(self, tenant: str) -> tuple[int, int, int]:
        """How many blocks a tenant has, how many are cached, and how many of those no pin keeps."""
        told = self.quotas.of(tenant)
        own = [block for block in self.core.pool.blocks if block.state != BlockState.FREE and block.tenant is told]
        cached = [block for block in own if block.state == BlockState.CACHED]
        return len(own), len(cached), sum(not block.num_pin_refs for block in cached)

    def num_available(self, tenant: str) -> int:
        """How many blocks a tenant can get: from free ones, its own, and what others have above their floors."""
        num_available = self.core.pool.num_free
        for other, quota in self.given.items():
            num_blocks, _, num_idle = self.counts(other)
            floor = quota.floor_blocks if quota else 0
            num_available += num_idle if other == tenant else min(num_idle, max(0, num_blocks - floor))
        quota = self.given[tenant]
        if quota is not None and quota.cap_blocks is not None:
            num_blocks, _, num_idle = self.counts(tenant)
            num_available = min(num_available, quota.cap_blocks - num_blocks + num_idle)
        return num_available

    def serve(self, tenant: str, tokens: list[int]) -> SequenceCache | None:
        """Begin a request, and compute it; None where memory is short. What the twin says of that must be so."""
        namespace, packed = tenant.encode(), pack(tokens)
        hit = self.core.match(namespace, packed, len(tokens) - 1)
        hit = hit._replace(partial=None, num_partial_tokens=0)
        cache, start = self.core.acquire(hit, tenant=tenant)
        self.asker = tenant
        num_new = -(-len(tokens) // SIZE) - len(cache.only_table.block_ids)
        can = self.num_available(tenant)
        is_there = self.core.extend(cache, start, len(tokens))
        assert is_there == (num_new <= can), f"{tenant} lacks {num_new} of {can} blocks"
        self.seen["short" if not is_there else "there"] += 1
        if not is_there:
            self.core.release(cache)
            return None
        promise = self.core.publishing.promise(cache, packed, len(tokens))
        if promise is not None:
            self.core.publishing.commit(promise)
        self.held.append((tenant, cache))
        return cache

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, BlockEvicted) or event.cause != "allocation":
            return
        tenant = event.node.root.key.decode()
        quota = self.given[tenant]
        if tenant != self.asker:
            self.seen["of another"] += 1
            assert self.counts(tenant)[0] >= (quota.floor_blocks if quota else 0), f"below the floor of {tenant}"
        asks = self.given[self.asker]
        if asks is not None and asks.cap_blocks is not None and self.counts(self.asker)[0] >= asks.cap_blocks - 1:
            self.seen["at its cap"] += 1


def random_operations(seed: int, policy: str, num_operations: int = 250) -> Counter[str]:  # noqa: C901 - one each
    rng, twin = Random(seed), Twin(policy)
    core, paths = twin.core, []
    for number in range(num_operations):
        what = rng.random()
        if what < 0.5:
            tenant = rng.choice(list(QUOTAS))
            most = 5 if tenant == "c" else 8
            num_tokens = rng.randrange(2, most * SIZE)
            tokens = [rng.randrange(2)] * rng.randrange(num_tokens)  # a few prefixes, and tails of their own
            cache = twin.serve(tenant, tokens + [number + 2] * (num_tokens - len(tokens)))
            if cache is not None and cache.num_published and rng.random() < 0.2:
                pinned = core.pins.add(f"p{number}", cache.tail, 0.0, priority=rng.random())
                twin.seen["pinned"] += pinned is not None
            if cache is not None and cache.num_published and rng.random() < 0.2:
                owner = object()
                core.blocks.expectations.claim(cache.tail, 0, owner)
                paths.append((ExpectedPath(owner), cache.tail))
                core.blocks.expectations.put(*paths[-1])
                core.blocks.expectations.expect_at(paths[-1][0], rng.random())
        elif what < 0.9 and twin.held:
            _, cache = twin.held.pop(rng.randrange(len(twin.held)))
            core.release(cache)
        elif what < 0.94 and len(core.pins):
            core.pins.remove(rng.choice([pin.pin_id for pin in core.pins]))
        elif what < 0.98 and paths:
            path, tail = paths.pop(rng.randrange(len(paths)))
            if tail.attached:
                core.blocks.expectations.supersede(tail, path.owner, 0)
            core.blocks.expectations.drop(path)
        elif what > 0.99:
            core.forgetting.reset()
        audit(core)
    for _, cache in twin.held:
        core.release(cache)
    core.forgetting.reset()
    audit(core)
    assert core.pool.num_free == NUM_BLOCKS
    assert all(not tenant.num_blocks for tenant in twin.quotas)
    return twin.seen


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "auto"] + ["auto"])
def test_whoever_asks_gets_what_quotas_allow_and_nothing_else(policy: str) -> None:
    seen = random_operations(1, policy) + random_operations(2, policy)
    assert min(seen[what] for what in ("short", "there", "of another", "at its cap", "pinned")) > 0, seen


def test_a_tenant_below_its_floor_keeps_what_it_has_while_others_take_all_else() -> None:
    twin = Twin(quotas={"a": KVQuota(4), "b": None})
    for tenant, first in (("a", 0), ("a", 100)):
        twin.core.release(twin.serve(tenant, list(range(first, first + 4 * SIZE))))
    for number in range(20):
        twin.core.release(twin.serve("b", [1000 + number] * (5 * SIZE)))
    assert twin.counts("a")[0] == 4, "all above its floor goes, and no more"
    assert twin.counts("b")[0] == NUM_BLOCKS - 4
    assert twin.serve("b", [5] * (NUM_BLOCKS * SIZE)) is None
    assert twin.serve("b", [5] * ((NUM_BLOCKS - 4) * SIZE)) is not None
    assert twin.counts("a")[0] == 4


def test_a_tenant_evicts_its_own_below_its_floor_where_nothing_else_can_go() -> None:
    twin = Twin(quotas={"a": KVQuota(NUM_BLOCKS - 2), "b": None})
    twin.core.release(twin.serve("a", list(range((NUM_BLOCKS - 2) * SIZE))))
    twin.serve("b", [1] * (2 * SIZE))
    assert twin.serve("a", [7] * (3 * SIZE)) is not None
    assert twin.counts("a")[0] == NUM_BLOCKS - 2


def test_a_tenant_at_its_cap_evicts_its_own_though_blocks_are_free() -> None:
    twin = Twin(quotas={"c": KVQuota(0, 5)})
    for number in range(9):
        twin.core.release(twin.serve("c", [number] * (2 * SIZE)))
        assert twin.counts("c")[0] <= 5
    assert twin.core.pool.num_free == NUM_BLOCKS - 5
    assert twin.serve("c", [3] * (6 * SIZE)) is None, "more than it may have"


def test_of_several_tenants_the_leaf_goes_that_was_used_least_recently() -> None:
    evicted = []
    twin = Twin(quotas={"a": KVQuota(1), "b": None})
    for tenant, first in (("b", 0), ("a", 10), ("b", 20), ("a", 30)):
        twin.core.release(twin.serve(tenant, [first] * (6 * SIZE)))
    twin.core.blocks._emit = evicted.append
    twin.serve("b", [77] * (15 * SIZE))
    assert "".join(event.node.root.key.decode() for event in evicted) == "bbbbbbaaaaaabbb"


def test_those_without_a_quota_are_served_as_without_quotas() -> None:
    """A house in which the only quota is of somebody who never comes evicts as one without any."""
    evicted: list[list[int]] = []
    for quotas in (Quotas(), None):
        gone: list[int] = []
        make = partial(make_policy, "learned")
        parts = {} if quotas is None else {"quotas": quotas, "policy": quotas.policy(make(), make)}
        core = KVCore(
            12,
            block_size=SIZE,
            emit=lambda event, gone=gone: gone.append(event.block_id) if isinstance(event, BlockEvicted) else None,
            **({"policy": make()} | parts),
        )
        rng = Random(3)
        for number in range(200):
            tokens = [rng.randrange(3)] * rng.randrange(1, 20) + [number + 9] * 4
            cache, start = core.acquire(core.match(b"n", pack(tokens), len(tokens) - 1), tenant="t")
            assert core.extend(cache, start, len(tokens))
            promise = core.publishing.promise(cache, pack(tokens), len(tokens))
            if promise is not None:
                core.publishing.commit(promise)
            core.moves.copies_done(core.moves.take_copies())
            core.release(cache)
        evicted.append(gone)
    assert evicted[0] == evicted[1]
    assert len(evicted[0]) > 100
