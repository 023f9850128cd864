"""Eviction policies against slow obvious twins: the same requests, the same victims in the same order.

A twin keeps what a textbook would keep, in lists, remembers all that was evicted by its tokens, and finds its victim by
looking at all blocks.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import TYPE_CHECKING
from zlib import crc32

import pytest

from pagefold.events import BlockEvicted, EvictionPolicySwitched
from pagefold.kv import AUTO, DEFAULT_POLICY, POLICIES, KVCore, RequestFacts, audit, make_policy
from pagefold.kv.ordered import OrderedNodes
from pagefold.kv.policies.ages import AGE_STARTS, NUM_AGES, RANGE_LENGTHS, age_range
from pagefold.kv.policies.auto import Auto
from pagefold.kv.policies.ghost_cache import GhostCache, upwards
from pagefold.kv.policies.ghosts import Ghosts
from pagefold.kv.policies.learned import Learned, _num_reused
from pagefold.kv.policies.lru import Lru
from pagefold.kv.policies.recency import RecencyShadow
from pagefold.kv.policies.reuse_model import NUM_LEVELS, Kind, ReuseModel, _worth
from pagefold.kv.policies.s3_fifo import S3Fifo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagefold.events import Event
    from pagefold.kv import EvictionPolicy, SequenceCache
    from pagefold.kv.block import Node

NS = b"n"


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def cached(core: KVCore, tokens: bytes, num_tokens: int) -> SequenceCache:
    """Look up a prompt, compute what was not found, and publish it; return what holds it."""
    cache, start = core.acquire(core.match(NS, tokens, num_tokens))
    assert core.extend(cache, start, num_tokens)
    promise = core.publishing.promise(cache, tokens, num_tokens)
    if promise is not None:
        core.publishing.commit(promise)
    return cache


def path_of(node: Node) -> tuple[bytes, ...]:
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return tuple(reversed(keys))


class Slow:
    """What all twins have: every node that is there, which are idle, and when each became so."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.idle: dict[Node, int] = {}
        self.ticket = 0

    def on_insert(self, node: Node) -> None:
        self.nodes.append(node)

    def on_hit(self, path: list[Node]) -> None:
        pass

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        pass

    def on_evict(self, node: Node) -> None:
        self.nodes.remove(node)

    def on_idle(self, node: Node) -> None:
        self.ticket += 1
        self.idle[node] = self.ticket

    def on_busy(self, node: Node) -> None:
        del self.idle[node]

    def candidates(self) -> Iterator[Node]:
        return iter(self.idle)

    def victim(self) -> Node | None:
        return min(self.idle, key=self.key, default=None)

    def score(self, node: Node) -> float:
        return 0.0  # it is told, and decides nothing

    def key(self, node: Node) -> tuple[float, ...]:
        raise NotImplementedError


class SlowLru(Slow):
    def key(self, node: Node) -> tuple[float, ...]:
        return (node.last_used, -node.depth)


class SlowFifo(Slow):
    def key(self, node: Node) -> tuple[float, ...]:
        return (node.created_at, -node.depth)


class SlowLfu(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[tuple[bytes, ...], int] = {}

    def on_insert(self, node: Node) -> None:
        super().on_insert(node)
        self.uses[path_of(node)] = self.uses.get(path_of(node), 0) + 1

    def on_hit(self, path: list[Node]) -> None:
        for node in path:
            self.uses[path_of(node)] += 1

    def key(self, node: Node) -> tuple[float, ...]:
        return (self.uses[path_of(node)], node.last_used, -node.depth)


class SlowCostAware(SlowLfu):
    clock = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.worth: dict[Node, float] = {}

    def on_insert(self, node: Node) -> None:
        super().on_insert(node)
        self.rate(node)

    def on_hit(self, path: list[Node]) -> None:
        super().on_hit(path)
        for node in path:
            self.rate(node)

    def rate(self, node: Node) -> None:
        num_tokens_before = node.depth * len(node.key) // 4
        self.worth[node] = self.clock + self.uses[path_of(node)] * (1 + num_tokens_before / 8192)

    def on_evict(self, node: Node) -> None:
        super().on_evict(node)
        self.clock = max(self.clock, self.worth[node])

    def key(self, node: Node) -> tuple[float, ...]:
        return (self.worth[node], node.last_used, -node.depth)


class SlowWeighted(Slow):
    """Computes what each block is worth by now, each time."""

    half_life = 512

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.worths: dict[Node, list[tuple[float, int]]] = {}  # node -> (worth, when), of each user

    def on_insert(self, node: Node) -> None:
        super().on_insert(node)
        self.worths[node] = [(1.0, self.now)]

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        self.now += 1
        worth = facts.weight * 2.0**-facts.priority * (4.0**facts.progress if facts.progress < 1 else 1.0)
        node = tail
        while node.parent is not None:
            self.worths[node].append((worth, self.now))
            node = node.parent

    def key(self, node: Node) -> tuple[float, ...]:
        worth = max(worth * 2 ** ((when - self.now) / self.half_life) for worth, when in self.worths[node])
        return (round(worth, 12), -node.depth)


class SlowSlru(Slow):
    """Two lists, the least recent first."""

    def __init__(self) -> None:
        super().__init__()
        self.protected: list[Node] = []
        self.fell: dict[Node, int] = {}

    def on_hit(self, path: list[Node]) -> None:
        for node in reversed(path):
            if node in self.protected:
                self.protected.remove(node)
            self.protected.append(node)
            self.fell.pop(node, None)
        while len(self.protected) > int(0.8 * len(self.nodes)):
            node = self.protected.pop(0)
            self.fell[node] = max(each.last_used for each in self.nodes)
            if node in self.idle:  # ties go by who came first to where it is
                self.on_busy(node)
                self.on_idle(node)

    def on_evict(self, node: Node) -> None:
        super().on_evict(node)
        if node in self.protected:
            self.protected.remove(node)

    def key(self, node: Node) -> tuple[float, ...]:
        return (node in self.protected, max(node.last_used, self.fell.get(node, 0)), -node.depth)


class SlowTwoQueues(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.new: list[Node] = []
        self.gone: list[tuple[bytes, ...]] = []

    def on_insert(self, node: Node) -> None:
        super().on_insert(node)
        if path_of(node) in self.gone:
            self.gone.remove(path_of(node))
        else:
            self.new.append(node)

    def on_evict(self, node: Node) -> None:
        super().on_evict(node)
        if node in self.new:
            self.new.remove(node)
            self.gone.append(path_of(node))

    def victim(self) -> Node | None:
        new = [node for node in self.idle if node in self.new]
        old = [node for node in self.idle if node not in self.new]
        first_new = min(new, key=lambda node: (node.created_at, -node.depth), default=None)
        first_old = min(old, key=lambda node: (node.last_used, -node.depth), default=None)
        if len(self.new) > 0.25 * len(self.nodes):
            return first_new or first_old
        return first_old or first_new


class SlowS3Fifo(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.small: list[Node] = []
        self.main: list[Node] = []
        self.uses: dict[Node, int] = {}
        self.gone: list[tuple[bytes, ...]] = []

    def on_insert(self, node: Node) -> None:
        super().on_insert(node)
        self.uses[node] = 0
        if path_of(node) in self.gone:
            self.gone.remove(path_of(node))
            self.main.append(node)
        else:
            self.small.append(node)

    def on_hit(self, path: list[Node]) -> None:
        for node in path:
            self.uses[node] = min(3, self.uses[node] + 1)

    def on_evict(self, node: Node) -> None:
        super().on_evict(node)
        if node in self.main:
            self.main.remove(node)
            return
        self.small.remove(node)
        self.gone.append(path_of(node))
        del self.gone[: max(0, len(self.gone) - int(0.9 * len(self.nodes)))]

    def victim(self) -> Node | None:
        while self.idle:
            small = [node for node in self.small if node in self.idle]
            main = [node for node in self.main if node in self.idle]
            if (len(self.small) > 0.1 * len(self.nodes) and small) or not main:
                node = small[0]
                if self.uses[node] <= 1:
                    return node
                self.small.remove(node)
                self.uses[node] = 0
            else:
                node = main[0]
                if self.uses[node] == 0:
                    return node
                self.main.remove(node)
                self.uses[node] -= 1
            self.main.append(node)
        return None


class SlowLearned(Learned):
    """The same learning, but every rank is looked up for every idle node, each time."""

    def victim(self) -> Node | None:
        ranks = self._idle._ranks
        class_of = self._idle._class_of  # which a lesson may still be about to change

        def key(node: Node) -> tuple[float, ...]:
            use = self._seen[node].use
            used_at = self.added_at[node] if use is None else use.tick
            rank = ranks[class_of[node]][age_range(self._now - used_at)]
            return (rank, class_of[node], age_range(self._now - used_at), used_at, -node.depth)

        return min(self._idle, key=key, default=None)

    def on_idle(self, node: Node) -> None:
        super().on_idle(node)
        self.added_at = getattr(self, "added_at", {})
        self.added_at[node] = self._now


TWINS: dict[str, type[Slow | SlowLearned]] = {
    "lru": SlowLru,
    "fifo": SlowFifo,
    "lfu": SlowLfu,
    "cost-aware": SlowCostAware,
    "weighted": SlowWeighted,
    "slru": SlowSlru,
    "2q": SlowTwoQueues,
    "s3-fifo": SlowS3Fifo,
    "learned": SlowLearned,
}


class Server:
    """A core with some requests running at once, and what it evicted."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int = 48) -> None:
        self.evicted: list[BlockEvicted] = []
        self.core = KVCore(num_blocks, block_size=2, policy=policy, emit=self.evicted.append)

    def serve(self, seed: int, num_requests: int) -> list[tuple[int, int]]:
        """Serve chats that go on or do not; return the blocks that were evicted, each with its depth."""
        rng = Random(seed)
        chats: list[list[int]] = []
        running = []
        for request in range(num_requests):
            if chats and rng.random() < 0.5:
                text = rng.choice(chats[-12:])
            else:
                text = [rng.randrange(3)] * 4
                chats.append(text)
            text += [100 + request] * rng.randint(1, 6)
            del text[24:]
            packed = pack(text)
            hit = self.core.match(NS, packed, len(text) - 1)
            cache, start = self.core.acquire(hit)
            if self.core.extend(cache, start, len(text)):
                promise = self.core.publishing.promise(cache, packed, len(text))
                if promise is not None:
                    self.core.publishing.commit(promise)
            self.core.moves.copies_done(self.core.moves.take_copies())
            cache.facts = RequestFacts(rng.choice((1.0, 1.0, 0.5)), rng.randint(-2, 2), rng.choice((1.0, 2.0)))
            running.append(cache)
            if len(running) > 2:
                self.core.release(running.pop(rng.randrange(3)))
            if request % 8 == 0:
                audit(self.core)
        return [(event.block_id, event.depth) for event in self.evicted if isinstance(event, BlockEvicted)]


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("seed", range(3))
def test_victims_are_those_of_a_slow_twin(name: str, seed: int) -> None:
    fast, slow = Server(make_policy(name)), Server(TWINS[name]())
    evicted = fast.serve(seed, 400)
    assert len(evicted) > 300
    assert evicted == slow.serve(seed, 400)


def test_every_policy_of_known_definition_has_a_twin() -> None:
    assert set(POLICIES) - set(TWINS) == {AUTO}  # its ghost caches have one, below
    assert DEFAULT_POLICY in POLICIES


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_requests_have_the_same_victims(name: str) -> None:
    assert Server(make_policy(name)).serve(7, 300) == Server(make_policy(name)).serve(7, 300)


@pytest.mark.parametrize("name", POLICIES)
def test_a_reset_and_failed_steps_leave_a_policy_in_order(name: str) -> None:
    server = Server(make_policy(name))
    core = server.core
    for round_ in range(3):
        server.serve(round_, 40)
        for cache in list(core.caches)[:1]:
            core.release(cache)
        cache, start = core.acquire(core.match(NS, pack([7] * 8), 7))
        assert core.extend(cache, start, 8)
        promise = core.publishing.promise(cache, pack([7] * 8), 8)
        leaning, _ = core.acquire(core.match(NS, pack([7] * 8), 8))  # in the same step
        if promise is not None:
            core.publishing.abandon(promise)
        core.release(leaning)
        core.release(cache)
        audit(core)
        core.forgetting.reset()
        audit(core)
        for cache in list(core.caches):
            core.release(cache)
        audit(core)


# What a decision costs.


class Counting(OrderedNodes):
    """Counts what is done to heaps."""

    num_operations = 0

    def add(self, node: Node, key: tuple[float, ...]) -> None:
        Counting.num_operations += 1
        super().add(node, key)

    def first(self) -> Node | None:
        Counting.num_operations += 1
        return super().first()


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", POLICIES)
def test_operations_an_eviction_do_not_grow_with_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation on a heap is O(log n); a decision makes few of them, whatever the size."""
    for module in ("eviction", "policies.two_queues", "policies.s3_fifo", "policies.aging"):
        monkeypatch.setattr(f"pagefold.kv.{module}.OrderedNodes", Counting)
    per_eviction = []
    for num_blocks in (256, 4096):
        core = KVCore(num_blocks, block_size=1, policy=make_policy(name))
        for prompt in range(num_blocks // 8):
            for _ in range(1 + prompt % 3 % 2):
                tokens = pack(range(prompt * 8, prompt * 8 + 8))
                core.release(cached(core, tokens, 8))
        Counting.num_operations = 0
        num_evicted = core.blocks.reclaim(num_blocks // 2)
        per_eviction.append(Counting.num_operations / num_evicted)
    assert max(per_eviction) < 12 * (5 if name == AUTO else 1)
    assert per_eviction[1] < 2 * per_eviction[0] + 1


# The parts of the learned one.


def test_ages_are_cut_into_ranges_that_grow() -> None:
    for age in (0, 1, 2, 7, 8, 100, 40_000, 10**7):
        index = age_range(age)
        assert AGE_STARTS[index] <= age
        assert index == NUM_AGES - 1 or age < AGE_STARTS[index + 1]
    assert sum(RANGE_LENGTHS[:-1]) == AGE_STARTS[-1]


def test_worth_is_the_best_ratio_of_hits_to_time_over_all_ends() -> None:
    """Against walking through all ages one by one."""
    rng = Random(0)
    base = [rng.random() * 0.2 for _ in range(NUM_AGES)]
    worth = _worth(base, 1.5)
    hazards = [min(0.9, 1.5 * hazard) for hazard in base]
    for start in range(0, NUM_AGES, 7):
        ratios = []
        alive, hits, time = 1.0, 0.0, 0.0
        for age in range(start, NUM_AGES):
            length = RANGE_LENGTHS[age] / (2 if age == start else 1)  # one has been in its range for half of it
            hit = alive * hazards[age]
            time += length * (alive + alive - hit) / 2
            hits, alive = hits + hit, alive - hit
            ratios.append(hits / time)
        assert worth[start] == pytest.approx(max(ratios))


def test_shared_blocks_and_long_conversations_are_worth_more_once_they_were_seen_to_return() -> None:
    model = ReuseModel()
    returning = Kind(0, 3, 11, False, False, 2, 0)
    passing = Kind(0, 1, 14, False, True, 1, 0)
    for _ in range(200):
        model.hit(returning, age_range(100), 10)
        model.lose(passing, age_range(5000), 10)
    assert sum(model.fit({}, 10.0)) > 0
    ranks = model.ranks()
    assert 0 <= model.class_of(passing) < model.class_of(returning) < 2 * NUM_LEVELS
    assert all(ranks[model.class_of(returning)][age] > ranks[model.class_of(passing)][age] for age in range(NUM_AGES))


def test_hints_that_contradict_each_other_are_taken_by_majority() -> None:
    class Hinted:
        def __init__(self, hint: bool | None) -> None:
            self.reuse_hint = hint

    def reused(*hints: bool | None) -> int | None:
        return _num_reused([Hinted(hint) for hint in hints])

    assert reused(None, None) is None
    assert reused(True, True, False, False) == 2
    assert reused(True, False, True, True, False) == 4
    assert reused(False, True, False, False) == 0
    assert reused(False, False) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_shadow_of_lru_counts_what_was_used_since(seed: int) -> None:
    rng = Random(seed)
    shadow = RecencyShadow(window=16)
    last: dict[int, int] = {}
    for tick in range(1, 200):
        for block in rng.sample(range(30), 3):
            if block in last:
                if tick - last[block] < 16:  # older times count as one
                    newer = sum(1 for each, at in last.items() if at > last[block])
                    assert shadow.num_newer(last[block]) == newer
                shadow.take(last[block])
                del last[block]
            shadow.add(tick, 1)
            last[block] = tick


def serve_one(core: KVCore, tokens: Sequence[int], facts: RequestFacts | None = None) -> None:
    cache, start = core.acquire(core.match(NS, pack(tokens), len(tokens)))
    assert core.extend(cache, start, len(tokens))
    promise = core.publishing.promise(cache, pack(tokens), len(tokens))
    if promise is not None:
        core.publishing.commit(promise)
    if facts is not None:
        cache.facts = facts
    core.release(cache)


@pytest.mark.long
def test_no_use_waits_long_for_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of work, not seconds: with 10,000 blocks idle, what one use does has a bound that 1,000 reach too."""
    most = {}
    for num_blocks in (1_000, 10_000):
        counts = []
        monkeypatch.setattr("pagefold.kv.policies.aging.OrderedNodes", Counting)
        core = KVCore(num_blocks, block_size=1, policy=Learned())
        for prompt in range(num_blocks + 2_000):  # the last 2,000 evict one each
            before = Counting.num_operations
            serve_one(core, [prompt % (3 * num_blocks)])
            counts.append(Counting.num_operations - before)
        most[num_blocks] = max(counts)
    assert most[10_000] < 1.5 * most[1_000] + 64


@pytest.mark.long
def test_looking_at_all_uses_is_cut_into_pieces() -> None:
    policy = Learned()
    core = KVCore(30_000, block_size=1, policy=policy)
    for prompt in range(20_000):
        serve_one(core, [prompt])
    policy._learning = None
    pieces = list(policy._lesson())
    assert sum(pieces) > 20_000
    assert max(pieces) < 4_000  # of about a microsecond


def test_samples_and_second_tries_of_a_prompt_are_no_turns() -> None:
    """The kinds of use are those that one sample alone would have left; only how many blocks there are differs."""
    once, often = Learned(), Learned()
    for policy, num_samples in ((once, 1), (often, 4)):
        core = KVCore(400, block_size=1, policy=policy)
        for chat in range(12):
            said: list[int] = []
            for turn in range(3):
                said += [100 * chat + turn] * 3
                for sample in range(num_samples):
                    answer = [1_000_000 + 10 * chat + turn, sample]
                    serve_one(core, said + answer, RequestFacts(is_repeat=sample > 0))
                said += [1_000_000 + 10 * chat + turn, 0]
    hits_once, hits_often = (
        {kind: sum(counts.hits) for kind, counts in policy._model._counts.items() if sum(counts.hits)}
        for policy in (once, often)
    )
    assert once._now == often._now
    assert {kind.turns for kind in hits_once} == {kind.turns for kind in hits_often}
    assert sum(hits_often.values()) == pytest.approx(sum(hits_once.values()), rel=0.02)
    assert often.accuracy().num_hit_blocks == once.accuracy().num_hit_blocks


def test_ghosts_forget_the_oldest() -> None:
    ghosts: Ghosts[int] = Ghosts(0.5, least=4)
    for name in range(10):
        ghosts.remember(name, name, num_nodes=12)
    assert len(ghosts) == 6
    assert ghosts.recall(3) is None
    assert ghosts.recall(9) == 9
    assert ghosts.recall(9) is None


def test_learned_says_how_good_it_is_and_falls_back_to_lru() -> None:
    policy = Learned()
    Server(policy).serve(0, 600)
    accuracy = policy.accuracy()
    assert accuracy.num_evicted_blocks >= accuracy.num_regretted_blocks > 0
    assert 0 < accuracy.evicted_rightly < 1
    assert accuracy.num_hit_blocks > 0
    policy._is_base = False
    policy._lately, policy._base_lately = 10.0, 100.0  # LRU found much more
    policy._judge()
    assert policy.accuracy().is_falling_back
    idle = list(policy.candidates())
    victim = policy.victim()
    assert victim is not None
    oldest = min(policy._seen[node].use.tick for node in idle)
    age = policy._now - policy._seen[victim].use.tick
    assert age_range(age) == age_range(policy._now - oldest)
    policy._judge()  # it tries again
    assert not policy.accuracy().is_falling_back


def test_a_ghost_cache_keeps_what_a_cache_would_keep() -> None:
    """A core of as many blocks, one request after another, and the names of what it holds."""
    rng = Random(3)
    ghost = GhostCache(Lru())
    core = KVCore(40, block_size=1, policy=make_policy("lru"))
    for _ in range(300):
        text = [rng.randrange(3), rng.randrange(4), *([rng.randrange(6)] * rng.randint(1, 6))]
        hit = core.match(NS, pack(text), len(text))
        cache, start = core.acquire(hit)
        assert core.extend(cache, start, len(text))
        promise = core.publishing.promise(cache, pack(text), len(text))
        if promise is not None:
            core.publishing.commit(promise)
        path = []
        node = cache.tail
        while node.parent is not None:
            path.append(node)
            node = node.parent
        assert ghost.use(path[::-1], path[0].key, RequestFacts(), 20) == len(hit.nodes)
        core.release(cache)
        core.blocks.reclaim(core.pool.num_cached - 20)


class Worst(Lru):
    """Most recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self._key = lambda node: (-node.last_used, -node.depth)


WORST_AND_LRU: dict[str, Callable[[float], EvictionPolicy]] = {"worst": lambda _: Worst(), "lru": lambda _: Lru()}


def test_auto_follows_the_better_one_and_says_so() -> None:
    told: list[Event] = []
    policy = Auto(WORST_AND_LRU, emit=told.append)
    assert policy.leader == "worst"
    assert told == [EvictionPolicySwitched("worst", "", 0.0, 0.0)]
    Server(policy).serve(1, 400)
    assert policy.leader == "lru"
    (_, switched) = told
    assert isinstance(switched, EvictionPolicySwitched)
    assert (switched.policy, switched.before) == ("lru", "worst")
    assert 0 <= switched.found_share_before < switched.found_share <= 1


class SlowAuto:
    """Auto, with each ghost cache a list of all that was used, played again from the beginning at every use."""

    def __init__(self, rate: float) -> None:
        self.rate, self.bound = rate, rate * 2**32
        self.uses: list[tuple[list[bytes], int, bool]] = []

    def use(self, paths: list[bytes], room: int, *, is_repeat: bool) -> None:
        """Use a path, each block named by its namespace and all tokens up to its end; ``paths[0]`` is the namespace."""
        chosen = [path for path in paths[1:] if crc32(path[len(paths[0]) :]) < self.bound]
        self.uses.append((chosen, max(room, len(chosen)), is_repeat))

    def found(self, key: Callable[[dict[str, int]], tuple[int, ...]]) -> float:
        """Return what a cache would have found whose victim is the leaf with the smallest key."""
        blocks: dict[bytes, dict[str, int]] = {}
        parents: dict[bytes, bytes] = {}
        total, num_uses = 0.0, 0
        for tick, (path, room, is_repeat) in enumerate(self.uses):
            num_found = 0
            while num_found < len(path) and path[num_found] in blocks:
                num_found += 1
            for depth, name in enumerate(path):
                if depth >= num_found:
                    blocks[name] = {}
                    parents[name] = path[depth - 1] if depth else b""
                blocks[name]["used"] = tick
                blocks[name]["depth"] = depth
            total += 0 if is_repeat else num_found
            num_uses += not is_repeat
            if num_uses % 256 == 0 and not is_repeat:
                total *= 0.8
            while path and len(blocks) > room:
                inner = {parents[name] for name in blocks}
                leaves = [name for name in blocks if name not in inner]
                victim = min(leaves, key=lambda name: key(blocks[name]))
                del blocks[victim]
        return total


@pytest.mark.parametrize("num_blocks", [0, 2500, 8000], ids=["all", "0.4 of all", "0.13 of all"])
def test_what_ghosts_of_a_sample_find_is_what_slow_ones_find(num_blocks: int) -> None:
    """LRU's and its contrary's, over paths that share beginnings; sampled by their checksums."""
    rng = Random(num_blocks)
    policy = Auto(WORST_AND_LRU, num_blocks)
    slow = SlowAuto(min(1.0, 1024 / max(1, num_blocks)))
    core = KVCore(400, block_size=2, policy=policy)
    has_evicted = False
    for turn in range(700):
        text = [rng.randrange(3), 1, *(rng.randrange(4) for _ in range(2 * rng.randint(1, 12)))]
        del text[len(text) // 2 * 2 :]
        packed = pack(text)
        hit = core.match(NS, packed, len(text))
        cache, start = core.acquire(hit._replace(partial=None, num_partial_tokens=0))
        assert core.extend(cache, start, len(text))
        promise = core.publishing.promise(cache, packed, len(text))
        if promise is not None:
            core.publishing.commit(promise)
        cache.facts = RequestFacts(is_repeat=turn % 7 == 3)
        path = [*upwards(cache.tail)][::-1]
        names = [path[0].parent.key]  # type: ignore[union-attr]
        for node in path:
            names.append(names[-1] + node.key)
        is_repeat = cache.facts.is_repeat
        num_there = sum(1 for _ in core.tree.nodes())
        core.release(cache)
        room = round(max(151 if has_evicted else 0, num_there) * slow.rate) if has_evicted else 10**6
        slow.use(names, room, is_repeat=is_repeat)
        has_evicted |= core.blocks.reclaim(core.pool.num_cached - 150) > 0
    worst, lru = policy._candidates
    assert lru.found > 0
    assert lru.found == pytest.approx(slow.found(lambda block: (block["used"], -block["depth"])))
    assert worst.found == pytest.approx(slow.found(lambda block: (-block["used"], -block["depth"])))


@pytest.mark.parametrize(
    ("leader", "other", "follows"),
    [(0, 4, False), (0, 40, True), (100, 128, False), (100, 140, True), (10**6, 1.01e6, False), (10**6, 1.03e6, True)],
)
def test_auto_follows_another_that_is_better_by_more_than_chance(leader: float, other: float, follows: bool) -> None:
    """By two deviations of a difference of counts, and by 2 % where that is more."""
    told: list[Event] = []
    policy = Auto({"lru": lambda _: Lru(), "again": lambda _: Lru()}, emit=told.append)
    server = Server(policy)
    server.serve(3, 20)
    for candidate, found in zip(policy._candidates, (leader, other), strict=True):
        candidate.found = found
    policy._asked = 2e6
    server.core.release(next(iter(server.core.caches)))
    assert (policy.leader == "again") is follows
    assert len(told) == 1 + follows


def test_repeats_are_no_uses() -> None:
    """Of eight samples of one prompt one is counted, and counts fade by requests."""
    policy = Auto(WORST_AND_LRU)
    core = KVCore(64, block_size=2, policy=policy)
    for turn in range(2):
        tokens = pack([1, 2, 3, 4])
        cache = cached(core, tokens, 4)
        samples = [core.fork(cache) for _ in range(7)]
        core.release(cache)
        for sample in samples:
            assert sample is not None
            sample.facts = RequestFacts(is_repeat=True)
            core.release(sample)
        assert policy._num_uses == turn + 1
        assert [each.found for each in policy._candidates] == [2.0 * turn] * 2
        ghosts = [node for each in policy._candidates for node in each.ghost._nodes.values()]
        assert {node.num_hits for node in ghosts} == {turn}


@pytest.mark.parametrize("drop", ["reset", "failed step"])
def test_what_was_dropped_makes_no_ghost_small(drop: str) -> None:
    """Until a block has to go for memory, ghosts drop nothing either."""
    policy = Auto(WORST_AND_LRU)
    server = Server(policy)
    core = server.core
    if drop == "reset":
        server.serve(1, 200)
        for cache in list(core.caches):
            core.release(cache)
        core.forgetting.reset()
        assert not policy._places
    else:
        cache, start = core.acquire(core.match(NS, pack([7] * 8), 7))
        assert core.extend(cache, start, 8)
        promise = core.publishing.promise(cache, pack([7] * 8), 8)
        assert promise is not None
        core.publishing.abandon(promise)
        core.release(cache)
    before = [len(each.ghost) for each in policy._candidates]
    for prompt in range(4):
        tokens = pack([50 + prompt] * 6)
        cache = cached(core, tokens, 6)
        assert cache.num_published, "it is new"
        core.release(cache)
    new = len(policy._places)
    assert new > 8
    assert [len(each.ghost) - num for each, num in zip(policy._candidates, before, strict=True)] == [new, new]


def test_a_policy_that_takes_over_has_put_off_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3-FIFO moves blocks when it is asked for a victim: it is asked in its turn, also while another is followed."""
    policy = Auto({"lru": lambda _: Lru(), "s3-fifo": lambda _: S3Fifo()})
    core = KVCore(128, block_size=1, policy=policy)
    for prompt in [*range(40)] * 4:
        tokens = pack([prompt, 1])
        core.release(cached(core, tokens, 2))
    core.blocks.reclaim(8)
    assert policy.leader == "lru"
    s3_fifo = policy._candidates[1].real
    assert isinstance(s3_fifo, S3Fifo)
    moved = []
    turn = s3_fifo._next_turn
    monkeypatch.setattr(s3_fifo, "_next_turn", lambda: moved.append(1) or turn())
    s3_fifo.victim()
    assert len(moved) < 8


def test_auto_looks_at_few_blocks_of_a_large_cache() -> None:
    policy = make_policy(AUTO, 100_000)
    assert isinstance(policy, Auto)
    core = KVCore(4000, block_size=1, policy=policy)
    for prompt in range(60):
        tokens = pack(range(prompt * 64, prompt * 64 + 64))
        core.release(cached(core, tokens, 64))
    sizes = {len(each.ghost) for each in policy._candidates}
    assert len(sizes) == 1
    assert 10 < sizes.pop() < 90  # 39 of 3,840 are expected
    audit(core)
