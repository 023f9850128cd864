"""Eviction: the victim is the one that the policy's rule names, against a sorted list; tails go before heads."""

from __future__ import annotations

from array import array
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.errors import ConfigError
from pagefold.events import BlockEvicted
from pagefold.kv import DEFAULT_POLICY, POLICIES, KeyPolicy, KVCore, audit, make_policy
from pagefold.kv.block import Block, BlockId, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.events import Event
    from pagefold.kv import EvictionPolicy, RequestFacts, SequenceCache

NS = b"n"
POLICY_NAMES = list(POLICIES)
KEYS: dict[str, Callable[[Node], tuple[float, ...]]] = {
    "lru": lambda node: (node.last_used, -node.depth),
    "fifo": lambda node: (node.created_at, -node.depth),
}


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Cache:
    """A KVCore of blocks of one token, and what it evicted, in order."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy | None = None) -> None:
        self.evicted: list[BlockEvicted] = []
        self.core = KVCore(num_blocks, block_size=1, policy=policy, emit=self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, BlockEvicted):
            self.evicted.append(event)

    def use(self, tokens: Sequence[int]) -> None:
        """Serve a request from beginning to end."""
        self.core.release(self.admit(tokens))

    def admit(self, tokens: Sequence[int]) -> SequenceCache:
        cache, start = self.core.acquire(self.core.match(NS, pack(tokens), len(tokens)))
        assert self.core.extend(cache, start, len(tokens))
        promise = self.core.publishing.promise(cache, pack(tokens), len(tokens))
        if promise is not None:
            self.core.publishing.commit(promise)
        audit(self.core)
        return cache

    def knows(self, tokens: Sequence[int]) -> int:
        return len(self.core.match(NS, pack(tokens), len(tokens)).nodes)


def node(last_used: int = 0, num_hits: int = 0, created_at: int = 0) -> Node:
    made = Node(b"", Node(b"", None, (), 0), (Block(BlockId(0)),), created_at)
    made.last_used = last_used
    made.num_hits = num_hits
    return made


# The adapter.


def test_names() -> None:
    with pytest.raises(ConfigError, match=r"no eviction policy 'belady'. It must be one of lru, lfu, fifo, slru"):
        make_policy("belady")
    assert type(make_policy("default")) is type(make_policy(DEFAULT_POLICY))
    assert make_policy("lru") is not make_policy("lru")


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_policy_without_candidates_has_no_victim(name: str) -> None:
    policy = make_policy(name)
    assert policy.victim() is None
    one = node()
    policy.on_insert(one)
    policy.on_idle(one)
    assert policy.victim() is one
    assert policy.victim() is one  # asking changes nothing
    policy.on_busy(one)
    assert policy.victim() is None


def test_ties_go_by_who_became_evictable_first() -> None:
    policy = KeyPolicy(lambda _node: (0,))
    nodes = [node() for _ in range(3)]
    for one in nodes:
        policy.on_idle(one)
    policy.on_busy(nodes[0])
    policy.on_idle(nodes[0])
    order = []
    while (victim := policy.victim()) is not None:
        order.append(victim)
        policy.on_busy(victim)
    assert order == [nodes[1], nodes[2], nodes[0]]


@given(
    name=st.sampled_from(list(KEYS)),
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9), st.integers(0, 3)), max_size=200),
)
def test_the_victim_is_the_smallest_key(name: str, steps: list[tuple[int, int, int]]) -> None:
    """Against a list that is sorted every time; keys change only while a node is busy, as the core does it."""
    policy = make_policy(name)
    nodes = [node(created_at=index) for index in range(8)]
    idle: dict[Node, int] = {}
    for ticket, (which, last_used, num_hits) in enumerate(steps):
        one = nodes[which]
        if one in idle:
            policy.on_busy(one)
            del idle[one]
        else:
            one.last_used, one.num_hits = last_used, num_hits
            policy.on_idle(one)
            idle[one] = ticket
        expected = min(idle, key=lambda n: (KEYS[name](n), idle[n]), default=None)
        assert policy.victim() is expected
        assert set(policy.candidates()) == set(idle)


def test_the_heap_does_not_grow_with_what_went() -> None:
    policy = KeyPolicy(KEYS["lru"])
    nodes = [node(last_used=index) for index in range(10)]
    for one in nodes:
        policy.on_idle(one)
    for index in range(10_000):
        one = nodes[index % 10]
        policy.on_busy(one)
        one.last_used = 100 + index
        policy.on_idle(one)
    assert len(policy._idle._heap) <= 2 * 10 + 65
    assert policy.victim() is nodes[0]


# In the core.


def test_lru_evicts_what_was_used_longest_ago() -> None:
    cache = Cache(3, make_policy("lru"))
    for text in ([1], [2], [3], [1]):
        cache.use(text)
    cache.use([4])
    assert [cache.knows([token]) for token in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_lru_counts_from_the_end_of_a_use() -> None:
    """What a long request held until now was used until now, whenever it was admitted."""
    cache = Cache(3, make_policy("lru"))
    for text in ([1], [2], [3]):
        cache.use(text)
    long, short = cache.admit([1]), cache.admit([2])
    cache.core.release(short)
    cache.core.release(long)
    cache.use([4])
    cache.use([5])
    assert [cache.knows([token]) for token in (1, 2, 3)] == [1, 0, 0]


def test_lfu_evicts_what_was_hit_least() -> None:
    cache = Cache(3, make_policy("lfu"))
    for text in ([1], [1], [1], [2], [2], [3]):
        cache.use(text)
    cache.use([4])
    assert [cache.knows([token]) for token in (1, 2, 3, 4)] == [1, 1, 0, 1]


def test_fifo_evicts_what_came_first() -> None:
    cache = Cache(3, make_policy("fifo"))
    for text in ([1], [2], [3], [1], [1]):
        cache.use(text)
    cache.use([4])
    assert [cache.knows([token]) for token in (1, 2, 3, 4)] == [0, 1, 1, 1]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_tails_go_before_heads(name: str) -> None:
    cache = Cache(8, make_policy(name))
    cache.use(range(8))
    assert cache.core.blocks.reclaim(8) == 8
    assert [event.depth for event in cache.evicted] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert {event.cause for event in cache.evicted} == {"allocation"}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_what_a_sequence_holds_stays_with_all_before_it(name: str) -> None:
    cache = Cache(8, make_policy(name))
    cache.use([0, 1, 2, 3])
    held = cache.admit([0, 1, 9])
    assert cache.core.blocks.reclaim(8) == 2  # 2 and 3 go; 0, 1, 9 stay
    assert cache.knows([0, 1, 2, 3]) == 2
    assert cache.knows([0, 1, 9]) == 3
    cache.core.release(held)
    assert cache.core.blocks.reclaim(8) == 3


def test_reclaim_says_how_many_went() -> None:
    cache = Cache(4)
    assert cache.core.blocks.reclaim(2) == 0
    cache.use(range(4))
    assert cache.core.blocks.reclaim(0) == 0
    assert cache.core.blocks.reclaim(3) == 3
    assert cache.core.blocks.reclaim(3) == 1


class Recorder:
    """A policy of its own kind: evicts what came last, and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[int, ...]]] = []
        self.idle: list[Node] = []

    def on_insert(self, node: Node) -> None:
        self.told.append(("insert", (node.depth,)))

    def on_hit(self, path: list[Node]) -> None:
        self.told.append(("hit", tuple(node.depth for node in path)))

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        self.told.append(("release", (tail.depth,)))

    def on_evict(self, node: Node) -> None:
        self.told.append(("evict", (node.depth,)))

    def on_idle(self, node: Node) -> None:
        self.idle.append(node)

    def on_busy(self, node: Node) -> None:
        self.idle.remove(node)

    def victim(self) -> Node | None:
        return self.idle[-1] if self.idle else None

    def score(self, node: Node) -> float:
        return 0.0

    def candidates(self) -> object:
        return iter(self.idle)


def test_a_policy_is_told_of_everything() -> None:
    policy = Recorder()
    cache = Cache(4, policy)
    cache.use([1, 2])
    cache.use([1, 2, 3])
    cache.core.blocks.reclaim(1)
    cache.core.forgetting.reset()
    assert policy.told == [
        ("insert", (0,)),
        ("insert", (1,)),
        ("release", (1,)),
        ("hit", (0, 1)),
        ("insert", (2,)),
        ("release", (2,)),
        ("evict", (2,)),
        ("evict", (1,)),
        ("evict", (0,)),
    ]
    assert not policy.idle


def test_a_policy_is_told_when_a_promise_is_abandoned() -> None:
    policy = Recorder()
    core = KVCore(4, block_size=1, policy=policy)
    cache, _ = core.acquire(core.match(NS, pack([1, 2]), 1))
    assert core.extend(cache, 0, 2)
    promise = core.publishing.promise(cache, pack([1, 2]), 2)
    assert promise is not None
    core.publishing.abandon(promise)
    assert policy.told == [("insert", (0,)), ("insert", (1,)), ("evict", (1,)), ("evict", (0,))]


class SlowList:
    """Requests of whole texts, of which one that nobody uses may lose its last token; found by looking at all."""

    def __init__(self, key: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        self.key = key
        self.known: set[tuple[int, ...]] = set()

    def victim(self) -> tuple[int, ...]:
        leaves = [
            text for text in self.known if not any(len(o) > len(text) and o[: len(text)] == text for o in self.known)
        ]
        return min(leaves, key=self.key)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("name", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("seed", range(5))
def test_evictions_are_those_of_a_slow_twin(name: str, seed: int) -> None:
    """One request after another, as a trace replays: the cache knows exactly what the twin knows."""
    rng = Random(seed)
    cache = Cache(12, make_policy(name))
    used: dict[tuple[int, ...], int] = {}
    uses: dict[tuple[int, ...], int] = {}
    born: dict[tuple[int, ...], int] = {}
    keys: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        "lru": lambda text: (used[text], -len(text)),
        "lfu": lambda text: (uses[text], used[text], -len(text)),
        "fifo": lambda text: (born[text], -len(text)),
    }
    twin = SlowList(keys[name])
    for now in range(400):
        text = tuple(rng.choices((0, 1), (3, 1), k=rng.randint(1, 6)))
        prefixes = [text[: end + 1] for end in range(len(text))]
        held = [prefix for prefix in prefixes if prefix in twin.known]
        twin.known.difference_update(held)  # what the request holds cannot go, nor what lies before it
        for prefix in held:
            uses[prefix] += 1
        for prefix in prefixes[len(held) :]:
            if len(twin.known) + len(prefixes[: prefixes.index(prefix)]) >= 12:
                twin.known.remove(twin.victim())
            uses[prefix] = uses.get(prefix, 0) + 1  # counts outlive eviction
            born[prefix] = now
        for prefix in prefixes:
            used[prefix] = now
        twin.known.update(prefixes)
        cache.use(text)
        audit(cache.core)
        for prefix in twin.known:
            assert cache.knows(prefix) == len(prefix)
        assert cache.core.pool.num_cached == len(twin.known)
