"""The connector's decisions beside a worker that can be read, and a slow look at every answer.

Held all the time: the core's ``audit`` passes; what a lookup promises is in the host's memory, block for block, and a
slow search finds no more; no host block is written that anything else reads or writes; what slow tiers are given is
what its name says; nothing that was computed behind a damaged block is ever kept. Steps are reported late, two of them
in flight; requests are aborted, preempted and come back; tiers lose blocks and are slow, and the cache is reset, at any
point of that.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from random import Random

import pytest

from pagefold.integrations.vllm import connector_tiering
from pagefold.integrations.vllm.connector_directory import KEY_BYTES, path_of
from pagefold.integrations.vllm.connector_orders import Link, StepReport, WorkerFacts
from pagefold.integrations.vllm.connector_planner import ConnectorPlanner, Progress
from pagefold.kv import DEFAULT_POLICY
from pagefold.kv.audit import audit
from pagefold.kv.names import names_behind, root_digest
from pagefold.kv.transfers import Fetched, Found, MissCause, Written

LAYOUT = b"layout"
BLOCK_BYTES, BLOCK_SIZE = 1000, 16
GARBAGE = b"garbage"
NUM_STORIES = 6


def facts(num_host_blocks: int, tiers: tuple[str, ...] = (), on_disk: tuple[bytes, ...] = ()) -> WorkerFacts:
    links = [Link(tier, 1e-6, 1e12) for tier in tiers]
    return WorkerFacts(num_host_blocks, BLOCK_BYTES, LAYOUT, links, on_disk, 8)


def key(text: str) -> bytes:
    return text.encode().rjust(KEY_BYTES, b".")


def path_named(text: str) -> bytes:
    """A path of a block a letter; a block's key says all letters up to its own."""
    return b"".join(key(text[: end + 1]) for end in range(len(text)))


def digests_of(path: bytes) -> list[bytes]:
    root = root_digest(LAYOUT)
    return [name.digest for name in names_behind(root, root, path, KEY_BYTES)]


def stored(num_host_blocks: int, text: str, **more) -> ConnectorPlanner:
    """A planner whose host holds a path."""
    planner = ConnectorPlanner(facts(num_host_blocks, **more), BLOCK_SIZE, "lru")
    orders = planner.plan_step([Progress("first", path_named(text), list(range(len(text))))])
    planner.apply(StepReport(orders.step), 0.0)
    planner.finish("first")
    return planner


def test_a_block_is_found_when_it_is_written_and_not_before() -> None:
    planner = ConnectorPlanner(facts(8), BLOCK_SIZE, "lru")
    path = path_named("abc")
    orders = planner.plan_step([Progress("one", path, [7, 8, 9])])
    assert [(op.block_id, op.host_id) for op in orders.stores] == [(7, 0), (8, 1), (9, 2)]
    assert planner.lookup("two", path, 0, 0.0) == 0
    planner.apply(StepReport(orders.step), 0.0)
    assert planner.lookup("two", path, 0, 0.0) == 3
    assert planner.lookup("three", path, 2, 0.0) == 1
    assert planner.lookup("four", path_named("abx"), 0, 0.0) == 2


def test_only_what_the_host_lacks_is_stored() -> None:
    planner = stored(8, "ab")
    orders = planner.plan_step([Progress("one", path_named("abcd"), [4, 5, 6, 7])])
    assert [op.block_id for op in orders.stores] == [6, 7]
    assert planner.plan_step([Progress("one", path_named("abcd"), [4, 5, 6, 7])]).is_empty


def test_paths_that_wait_for_a_slow_tier_are_bounded_by_their_bytes(monkeypatch) -> None:
    monkeypatch.setattr(connector_tiering, "_MOST_UNWRITTEN_BYTES", 5 * KEY_BYTES)
    planner = ConnectorPlanner(facts(8, tiers=("disk",)), BLOCK_SIZE, "lru")
    for text in ("abc", "xyz"):
        orders = planner.plan_step([Progress(text, path_named(text), [0, 1, 2])])
        planner.tiering.stored(path_named(text), 0)
        planner.apply(StepReport(orders.step), 0.0)
    assert planner.counts.num_unwritten >= 3
    assert planner.tiering._unwritten_bytes <= 5 * KEY_BYTES
    assert planner.tiering._unwritten_bytes == sum(len(path) for path, _ in planner.tiering._unwritten)


def test_what_needs_no_more_doing_about_a_request_is_known_without_its_path() -> None:
    planner = ConnectorPlanner(facts(8), BLOCK_SIZE, "lru")
    assert planner.num_kept("one") == 0
    orders = planner.plan_step([Progress("one", path_named("ab"), [0, 1])])
    assert planner.num_kept("one") == 2
    planner.apply(StepReport(orders.step, stored=False), 0.0)
    assert planner.num_kept("one") == 0


def test_what_was_not_stored_is_taken_back_with_what_leans_on_it() -> None:
    planner = ConnectorPlanner(facts(8), BLOCK_SIZE, "lru")
    first = planner.plan_step([Progress("one", path_named("ab"), [0, 1])])
    second = planner.plan_step([Progress("one", path_named("abcd"), [0, 1, 2, 3])])
    assert [op.block_id for op in second.stores] == [2, 3]
    planner.apply(StepReport(first.step, stored=False), 0.0)
    planner.apply(StepReport(second.step, stored=False), 0.0)
    assert planner.core.pool.num_free == 8
    again = planner.plan_step([Progress("one", path_named("abcd"), [0, 1, 2, 3])])
    assert len(again.stores) == 4


def test_a_damaged_block_is_forgotten_and_the_step_acknowledged() -> None:
    planner = stored(8, "abc")
    path = path_named("abc")
    assert planner.lookup("one", path, 0, 0.0) == 3
    planner.begin_load("one", path, [4, 5, 6], 0, 3)
    orders = planner.plan_step([])
    assert [(op.host_id, op.block_id) for op in orders.loads] == [(0, 4), (1, 5), (2, 6)]
    assert planner.plan_step([Progress("one", path_named("abcd"), [4, 5, 6, 7])]).acknowledged == -1
    planner.apply(StepReport(orders.step, frozenset({1}), stored=False), 0.0)
    assert planner.lookup("two", path, 0, 0.0) == 0
    assert planner.counts.num_damaged == 1
    after = planner.plan_step([Progress("one", path_named("abcd"), [4, 5, 6, 7])])
    assert after.acknowledged == orders.step
    assert len(after.stores) == 4


def test_a_full_host_makes_room_by_its_policy() -> None:
    planner = stored(4, "abcd")
    orders = planner.plan_step([Progress("one", path_named("xy"), [4, 5])])
    planner.apply(StepReport(orders.step), 0.0)
    assert planner.lookup("two", path_named("xy"), 0, 0.0) == 2
    assert planner.lookup("three", path_named("abcd"), 0, 0.0) == 2  # tails leave first


def test_what_is_being_restored_stays() -> None:
    planner = stored(4, "abcd")
    planner.lookup("one", path_named("abcd"), 0, 0.0)
    planner.begin_load("one", path_named("abcd"), [0, 1, 2, 3], 0, 4)
    orders = planner.plan_step([Progress("two", path_named("xy"), [8, 9])])
    assert len(orders.loads) == 4
    assert not orders.stores
    planner.apply(StepReport(orders.step), 0.0)
    assert len(planner.plan_step([Progress("two", path_named("xy"), [8, 9])]).stores) == 2


def test_what_the_disk_has_comes_while_the_request_waits() -> None:
    path = path_named("abc")
    planner = ConnectorPlanner(facts(8, ("disk",), tuple(digests_of(path)[:2])), BLOCK_SIZE, "lru")
    assert planner.lookup("one", path, 0, 0.0) is None
    orders = planner.plan_step([])
    (fetch,) = orders.fetches
    assert [op.name.digest for op in fetch.ops] == digests_of(path)[:2]
    assert planner.lookup("one", path, 0, 0.001) is None
    planner.apply(StepReport(orders.step, outcomes=[Fetched("disk", fetch.ops, [b"sum", b"sum"], 1e-6, {})]), 0.001)
    assert planner.lookup("one", path, 0, 0.002) == 2
    planner.begin_load("one", path, [4, 5, 6], 0, 2)
    assert planner.sources("one") == (2, "disk")
    assert len(planner.plan_step([]).loads) == 2


def test_a_tier_that_stalls_is_waited_for_no_longer_than_computing_takes() -> None:
    path = path_named("abc")
    planner = ConnectorPlanner(facts(8, ("disk",), tuple(digests_of(path))), BLOCK_SIZE, "lru")
    assert planner.lookup("one", path, 0, 0.0) is None
    orders = planner.plan_step([])
    assert planner.lookup("one", path, 0, 0.5) is None  # the worker computes a step yet
    planner.apply(StepReport(orders.step), 0.5)
    assert planner.lookup("one", path, 0, 0.59) is None
    assert planner.lookup("one", path, 0, 1.0) == 0
    assert planner.plan_step([]).dropped == [orders.fetches[0].ticket]
    assert planner.core.pool.num_free == 5  # the tier may write there yet
    ops = orders.fetches[0].ops
    planner.apply(StepReport(-1, outcomes=[Fetched("disk", ops, [b"s", MissCause.LATE, MissCause.LATE], 1.0, {})]), 1.0)
    assert planner.core.pool.num_free == 7
    assert planner.lookup("two", path_named("a"), 0, 1.0) == 1


def test_a_remote_tier_is_asked_first() -> None:
    path = path_named("abc")
    planner = ConnectorPlanner(facts(8, ("remote",)), BLOCK_SIZE, "lru")
    assert planner.lookup("one", path, 0, 0.0) is None
    (look,) = planner.plan_step([]).looks
    planner.apply(StepReport(-1, outcomes=[Found("remote", look.ticket, 2)]), 0.0)
    assert planner.lookup("one", path, 0, 0.0) is None
    (fetch,) = planner.plan_step([]).fetches
    assert len(fetch.ops) == 2
    planner.lookup("two", path_named("xyz"), 0, 0.0)
    (look,) = planner.plan_step([]).looks
    planner.apply(StepReport(-1, outcomes=[Found("remote", look.ticket, 0)]), 0.0)
    assert planner.lookup("two", path_named("xyz"), 0, 0.0) == 0


def test_what_is_stored_is_written_behind_and_known_to_be_there() -> None:
    planner = stored(8, "ab", tiers=("disk",))
    orders = planner.plan_step([])
    assert [op.name.digest for op in orders.writes] == digests_of(path_named("ab"))
    planner.apply(StepReport(orders.step), 0.0)
    outcome = Written(orders.writes, 2, {"disk": 2}, {"disk": 0.1})
    planner.apply(StepReport(-1, outcomes=[outcome]), 0.0)
    assert planner.counts.num_written == 2
    for at in range(4):  # push it out of the host
        orders = planner.plan_step([Progress(f"{at}", path_named(f"{at}x"), [2, 3])])
        planner.apply(StepReport(orders.step), 0.0)
        planner.finish(f"{at}")
    assert planner.lookup("back", path_named("ab"), 0, 0.0) is None
    assert len(planner.plan_step([]).fetches[0].ops) == 2


def test_a_reset_forgets_all_and_who_lived_through_it_stores_nothing() -> None:
    planner = stored(8, "ab", tiers=("disk",))
    path = path_named("abc")
    running = planner.plan_step([Progress("old", path, [0, 1, 2])])
    planner.reset()
    planner.apply(StepReport(running.step), 0.0)
    assert planner.lookup("new", path, 0, 0.0) == 0
    orders = planner.plan_step([Progress("old", path, [0, 1, 2])])
    assert orders.clears
    assert not orders.stores
    planner.finish("old")
    assert len(planner.plan_step([Progress("new", path, [0, 1, 2])]).stores) == 3


def test_orders_and_reports_travel_between_processes() -> None:
    planner = stored(8, "ab", tiers=("disk",))
    orders = planner.plan_step([Progress("one", path_named("abc"), [0, 1, 2])])
    assert pickle.loads(pickle.dumps(orders)) == orders
    report = StepReport(3, frozenset({1}), stored=False, num_bytes={"load": 5})
    assert pickle.loads(pickle.dumps(report)) == report


def test_reports_of_workers_count_together() -> None:
    one = StepReport(3, frozenset(), num_bytes={"load": 5}, busy_s={"load": 0.5})
    other = StepReport(3, frozenset({1}), stored=False, num_bytes={"load": 5}, busy_s={"load": 0.75})
    both = one.with_other(other)
    assert (both.step, both.damaged, both.stored) == (3, {1}, False)
    assert both.num_bytes == {"load": 10}
    assert both.busy_s == {"load": 0.75}


def test_keys_cover_whole_blocks_of_hashes_of_any_length() -> None:
    hashes = [bytes([at]) * 32 for at in range(6)]
    assert path_of(hashes, 3, 2) == hashes[1] + hashes[3] + hashes[5]
    assert path_of(hashes, 3, 1, before=hashes[0]) == b"".join(hashes[:3])
    short = [b"a" * 16, b"b" * 16]
    assert len(path_of(short, 2)) == 2 * KEY_BYTES
    assert path_of(short, 1) != path_of(short[1:], 1)


class Request:
    def __init__(self, name: str, text: str, num_local: int, first_block: int) -> None:
        self.name, self.text, self.num_local = name, text, num_local
        self.path = path_named(text)
        self.block_ids = list(range(first_block, first_block + len(text)))
        self.num_computed = 0
        self.is_running = False


class SmallVLLM:
    """Requests of a small vLLM, a worker that carries out orders at once and reports late, and tiers that take time."""

    def __init__(self, rng, policy):
        self.rng = rng
        num_host_blocks = rng.randint(3, 9)
        tiers = rng.choice([(), ("disk",), ("disk",), ("remote",), ("disk", "remote")])
        self.seen = Counter()
        self.planner = ConnectorPlanner(facts(num_host_blocks, tiers), BLOCK_SIZE, policy)
        self.tiers = tiers
        self.contents: dict[int, bytes] = {}
        self.sums: dict[int, bytes] = {}
        self.kv: dict[int, bytes] = {}
        self.requests: dict[str, Request] = {}
        self.kept: dict[str, dict[bytes, bytes]] = {tier: {} for tier in tiers}
        self.reports: deque = deque()
        self.fetching: list = []
        self.writing: list = []
        self.outcomes: list = []
        self.last_failed = -1
        self.now = 0.0
        self.num_requests = 0

    def arrive(self):
        text = "".join(self.rng.choices("abc", [3, 1, 1], k=self.rng.randint(1, 5)))
        num_local = self.rng.choice([0, 0, 0, 1, 3])
        self.num_requests += 1
        name = f"r{self.num_requests}"
        self.requests[name] = Request(name, text, min(num_local, len(text)), 10 * self.num_requests)

    def admit(self):
        takes = self.rng.random() < 0.8
        waiting = [one for one in self.requests.values() if not one.is_running]
        if not waiting:
            return
        one = self.rng.choice(waiting)
        found = self.planner.lookup(one.name, one.path, one.num_local, self.now)
        if found is None:
            assert self.tiers
            return
        nodes = {node.digest or id(node): node for node in self.planner.core.tree.nodes()}
        written = {self._path_to(node): node.blocks[0].block_id for node in nodes.values() if self._is_written(node)}
        slow = 0
        while slow < len(one.text) and one.path[: (slow + 1) * KEY_BYTES] in written:
            slow += 1
        assert found == max(0, slow - one.num_local) or one.num_local >= len(one.text)
        if not takes:
            return
        for at in range(one.num_local):
            self.kv[one.block_ids[at]] = key(one.text[: at + 1])
        self.planner.begin_load(one.name, one.path, one.block_ids, one.num_local, found)
        one.num_computed = one.num_local + found
        one.is_running = True

    def _path_to(self, node):
        keys = []
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return b"".join(reversed(keys))

    def _is_written(self, node):
        while node.parent is not None:
            if not node.committed:
                return False
            node = node.parent
        return True

    def step(self):
        if len(self.reports) >= 2:
            return
        running = [one for one in self.requests.values() if one.is_running]
        progress, computes = [], []
        for one in running:
            num = self.rng.choice([0, 1, 2, 3])
            before = one.num_computed
            one.num_computed = min(len(one.text), before + num)
            progress.append(Progress(one.name, one.path[: one.num_computed * KEY_BYTES], one.block_ids))
            computes.append((one, before, one.num_computed))
        orders = self.planner.plan_step(progress, sum(end - start for _, start, end in computes), len(computes))
        orders = pickle.loads(pickle.dumps(orders))
        targets = [op.host_id for op in orders.stores] + [op.host_id for f in orders.fetches for op in f.ops]
        assert len(targets) == len(set(targets)), "a host block is written twice"
        busy = {op.host_id for ops, _ in self.fetching for op in ops} | {op.host_id for op in self.writing}
        busy |= {op.host_id for op in orders.loads}
        assert not busy & set(targets), "a host block is written that is in use"
        assert not {op.host_id for op in orders.writes} & {op.host_id for op in self.writing}
        self.seen["dropped"] += len(orders.dropped)
        self._carry_out(orders, computes)

    def _carry_out(self, orders, computes):
        damaged = self._load(orders, computes)
        is_stored = not orders.stores or self.last_failed <= orders.acknowledged
        if is_stored:
            for op in orders.stores:
                assert self.kv[op.block_id] != GARBAGE, "what was computed from a damaged block is stored"
                self.contents[op.host_id] = self.sums[op.host_id] = self.kv[op.block_id]
        self._begin_transfers(orders)
        if not orders.is_empty:
            loaded = [op.block_id for op in orders.loads if op.host_id in damaged]
            self.reports.append((StepReport(orders.step, frozenset(damaged), stored=is_stored), loaded))

    def _load(self, orders, computes):
        """Load, compute, and return which host blocks were damaged."""
        damaged = set()
        for op in orders.loads:
            assert self.contents[op.host_id] is not None
            if self.contents[op.host_id] != self.sums[op.host_id]:
                damaged.add(op.host_id)
                self.kv[op.block_id] = GARBAGE
            else:
                self.kv[op.block_id] = self.contents[op.host_id]
        if damaged:
            self.last_failed = orders.step
        owners = {block_id: one for one in self.requests.values() for block_id in one.block_ids}
        for op in orders.loads:
            one = owners.get(op.block_id)
            if one is not None and op.host_id not in damaged:
                at = one.block_ids.index(op.block_id)
                assert self.kv[op.block_id] == key(one.text[: at + 1]), "not the block that was promised"
        for one, start, end in computes:
            for at in range(start, end):
                behind = [self.kv.get(block_id, GARBAGE) for block_id in one.block_ids[:at]]
                self.kv[one.block_ids[at]] = GARBAGE if GARBAGE in behind else key(one.text[: at + 1])
        return damaged

    def _begin_transfers(self, orders):
        if orders.clears:
            for kept in self.kept.values():
                kept.clear()
            self.writing = [op._replace(note=b"lost") for op in self.writing]
        for look in orders.looks:
            kept = self.kept[look.tier]
            num = next((at for at, name in enumerate(look.names) if name.digest not in kept), len(look.names))
            self.outcomes.append(Found(look.tier, look.ticket, num))
        for fetch in orders.fetches:
            self.fetching.append((list(fetch.ops), fetch.tier))
            for op in fetch.ops:
                self.contents[op.host_id] = None
        self.writing += orders.writes

    def report(self):
        if not self.reports:
            return
        report, failed_blocks = self.reports.popleft()
        outcomes, self.outcomes = self.outcomes, []
        for one in self.requests.values():  # vLLM's scheduler first
            bad = [at for at, block_id in enumerate(one.block_ids) if block_id in failed_blocks]
            if bad and one.is_running:
                one.num_computed = min(one.num_computed, bad[0])
        self.planner.apply(report._replace(outcomes=outcomes), self.now)

    def tell(self):
        if self.outcomes:
            outcomes, self.outcomes = self.outcomes, []
            self.planner.apply(StepReport(-1, outcomes=outcomes), self.now)

    def bring(self):
        if not self.fetching:
            return
        num = self.rng.randint(1, 6)
        loses = {at for at in range(6) if self.rng.random() < 0.15}
        ops, tier = self.fetching[0]
        batch, rest = ops[:num], ops[num:]
        found = []
        for at, op in enumerate(batch):
            content = self.kept[tier].get(op.name.digest)
            if content is None or at in loses:
                found.append(MissCause.ABSENT)
                continue
            self.contents[op.host_id] = self.sums[op.host_id] = content
            found.append(b"sum")
        self.outcomes.append(Fetched(tier, batch, found, 1e-6, {}))
        if rest:
            self.fetching[0] = (rest, tier)
        else:
            self.fetching.pop(0)

    def write(self):
        num, loses = self.rng.randint(1, 6), self.rng.random() < 0.2
        batch, self.writing = self.writing[:num], self.writing[num:]
        if not batch:
            return
        for op in batch:
            if self.contents[op.host_id] == self.sums[op.host_id]:
                assert self.contents[op.host_id] == op.name.key, "a tier is given something else"
        kept = {}
        for tier in self.tiers:
            kept[tier] = 0 if loses else len(batch)
            if not loses:
                self.kept[tier].update({op.name.digest: op.name.key for op in batch if op.note != b"lost"})
        self.outcomes.append(Written(batch, max(kept.values()), kept, {}))

    def wait(self):
        self.now += self.rng.choice([0.0001, 0.001, 0.2])

    def end(self):
        if self.requests:
            name = self.rng.choice(sorted(self.requests))
            del self.requests[name]
            self.planner.finish(name)

    def preempt(self):
        running = [name for name, one in self.requests.items() if one.is_running]
        if running and not self.reports:
            one = self.requests[self.rng.choice(sorted(running))]
            one.is_running, one.num_computed, one.num_local = False, 0, 0
            self.num_requests += 1
            one.block_ids = list(range(10 * self.num_requests, 10 * self.num_requests + len(one.text)))

    def damage(self):
        there = sorted(host_id for host_id, content in self.contents.items() if content is not None)
        if there:
            self.contents[self.rng.choice(there)] = b"turned"

    def reset(self):
        self.planner.reset()
        for name in [name for name, one in self.requests.items() if not one.is_running]:
            del self.requests[name]
            self.planner.finish(name)

    def all_is_sound(self):
        core = self.planner.core
        audit(core)
        coming = {op.host_id for ops, _ in self.fetching for op in ops}
        for node in core.tree.nodes():
            host_id = node.blocks[0].block_id
            if node.committed and self._is_written(node):
                assert host_id not in coming
                assert self.sums[host_id] == node.key, "what is found is not what is there"


def run(seed, policy, num_acts=500):
    """Let things happen at random, and return what has happened."""
    vllm = SmallVLLM(Random(seed), policy)
    acts = {
        vllm.arrive: 6,
        vllm.admit: 8,
        vllm.step: 8,
        vllm.report: 8,
        vllm.tell: 3,
        vllm.bring: 6,
        vllm.write: 8,
        vllm.wait: 1,
        vllm.end: 4,
        vllm.preempt: 1,
        vllm.damage: 0.5,
        vllm.reset: 0.1,
    }
    for at, act in enumerate(vllm.rng.choices(list(acts), list(acts.values()), k=num_acts)):
        act()
        if not at % 4:
            vllm.all_is_sound()
    for name in list(vllm.requests):
        vllm.planner.finish(name)
    for _ in range(100):
        while vllm.reports or vllm.fetching or vllm.writing or vllm.outcomes:
            for act in (vllm.report, vllm.tell, vllm.bring, vllm.write):
                act()
        orders = vllm.planner.plan_step([])  # loads that vLLM had not planned yet, and writes
        if orders.is_empty:
            break
        vllm._carry_out(orders, [])
    vllm.all_is_sound()
    assert vllm.last_failed <= orders.acknowledged, "nothing would be stored any more"
    assert not vllm.planner.core.caches, "a host block is held for nobody"
    return vllm.seen + Counter(vars(vllm.planner.counts))


@pytest.mark.parametrize("policy", ["lru", DEFAULT_POLICY, "s3-fifo"])
def test_the_connector_decides_rightly_whatever_happens(policy) -> None:
    seen = Counter()
    for seed in range(NUM_STORIES):
        seen += run(f"{policy}{seed}", policy)
    for what in ("num_loaded", "num_stored", "num_damaged", "num_fetched", "num_lost", "num_written", "dropped"):
        assert seen[what], f"{what}: never seen"
