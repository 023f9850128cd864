"""What is fetched of a path: examples with one cache group and with several."""

from __future__ import annotations

from array import array

import pytest

from pagefold.kv import Arbiter, HostTier, KVCore, LinkModel, SlowTiers
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.names import in_group, names_behind, root_digest
from pagefold.kv.transfers import Fetched, Found
from pagefold.request import Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.scheduler.tiering import Tiering

SIZE = 2
TOKENS = list(range(41))


def packed(tokens):
    return array("i", tokens).tobytes()


class Remote:
    """Slow tiers that have some blocks, and answer when they are told to."""

    notify = staticmethod(lambda: None)

    def __init__(self, tiers, kept):
        self.tiers, self.kept = tiers, kept
        self.asked, self.outcomes, self.fetched = [], [], []

    def count(self, tier, names):
        return next((at for at, one in enumerate(names) if one.digest not in self.kept[tier]), len(names))

    def look(self, tier, names, ticket):
        self.asked.append((tier, list(names), ticket))

    def answer(self, at):
        tier, names, ticket = self.asked[at]
        self.outcomes.append(Found(tier, ticket, self.count(tier, names)))

    def fetch(self, fetch):
        self.fetched.append(fetch)
        for tier, ops in fetch.ops.items():
            self.outcomes.append(Fetched(tier, ops, [b"sum"] * len(ops), 0.1))

    def write(self, ops):
        assert not ops

    def collect(self, timeout_s=0.0):
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def arrived(self, host_id, checksum):
        pass


def tiered(tiers, latency_s, rules, kept, num_host=100):
    """Return a core, its scheduler, the tiers, and who asks them."""
    host = HostTier(num_host, notes_unsaved=True)
    arbiter = Arbiter(1, SIZE, compute_s_per_token=1.0)
    for tier in tiers:
        arbiter.links[tier] = LinkModel(latency_s, 100.0)
    slow = SlowTiers(host, "write_back", arbiter)
    core = KVCore(200, block_size=SIZE, rules=rules, host=host, slow=slow)
    scheduler = Scheduler(core, SchedulerLimits(4, 100))
    remote = Remote(tiers, kept)
    return core, scheduler, remote, Tiering(scheduler, slow, remote, remote, lambda ops: None, clock=lambda: 0.0)


def paths(rules, num_tokens=40):
    """Return the digests of all blocks of all groups, by place."""
    root = root_digest(b"")
    names = names_behind(root, root, packed(TOKENS[:num_tokens]), 4 * SIZE)
    return [[in_group(one.digest, group) for group in range(len(rules))] for one in names]


def a_request(tokens=TOKENS):
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    return Request("r", tokens, sampling, stop=StopRule(frozenset(), 42), namespace=b"", seed=0, arrival_s=0.0)


def test_windows_are_asked_for_where_the_path_was_worth_asking_for():
    rules = (KEEP_ALL, KeepRule(SIZE))
    kept = {digest for place in paths(rules) for digest in place}
    core, scheduler, remote, tiering = tiered(["remote"], 0.5, rules, {"remote": kept})
    request = a_request()
    scheduler.add(request)
    tiering.begin(request, 0.0)
    assert len(remote.asked) == 1  # 20 blocks, 40 seconds of computing: it is asked
    remote.answer(0)
    tiering.poll(0.1)
    assert len(remote.asked) == 2, "and not whether it has the one block more that these take"
    remote.answer(1)
    tiering.poll(0.2)
    tiering.poll(0.3)
    assert core.match(b"", request.packed(), 40).num_blocks == 20


def test_a_late_answer_about_the_path_is_not_taken_for_one_about_windows():
    rules = (KEEP_ALL, KeepRule(6))
    all_of = paths(rules)
    disk = {digest for place in all_of[:10] for digest in place[:1]}
    remote_has = {place[0] for place in all_of}  # the whole path, and no window
    _, scheduler, remote, tiering = tiered(["disk", "remote"], 1e-6, rules, {"disk": disk, "remote": remote_has})
    request = a_request()
    scheduler.add(request)
    tiering.begin(request, 0.0)
    assert [len(names) for _, names, _ in remote.asked] == [10]  # the other half of the path
    tiering.poll(3.0)  # late: so windows are sought for what the disk has
    assert [len(names) for _, names, _ in remote.asked] == [10, 3]
    remote.answer(0)
    tiering.poll(3.1)
    assert not remote.fetched, "windows are fetched that nobody has said to have"


def test_a_part_of_a_place_is_not_waited_for():
    rules = (KEEP_ALL, KEEP_ALL, KeepRule(6))
    first = paths(rules)[0]
    _, scheduler, remote, tiering = tiered(["disk"], 1e-6, rules, {"disk": {first[0], first[2]}})
    request = a_request()
    scheduler.add(request)
    tiering.begin(request, 0.0)
    assert not remote.fetched
    assert request.status is RequestStatus.WAITING


def test_what_three_groups_hold_of_a_token_is_computed_once():
    rules = (KEEP_ALL, KEEP_ALL, KEEP_ALL)
    kept = {digest for place in paths(rules) for digest in place}
    core, scheduler, remote, tiering = tiered(["disk"], 1e-6, rules, {"disk": kept})
    core.slow.arbiter.links["disk"].bytes_per_s = 1.0  # a block a second: a place in 3, and it is computed in 2
    request = a_request()
    scheduler.add(request)
    tiering.begin(request, 0.0)
    assert not remote.fetched, "loading takes 60 seconds, and computing 40"


def test_what_three_groups_hold_of_a_token_is_restored_only_if_that_is_sooner():
    rules = (KEEP_ALL, KEEP_ALL, KEEP_ALL)
    arbiter = Arbiter(1, SIZE, compute_s_per_token=1.0)
    arbiter.links["host"] = LinkModel(1e-6, 1.0)
    core = KVCore(60, block_size=SIZE, rules=rules, host=HostTier(60), arbiter=arbiter)
    cache, _ = core.acquire(core.match(b"", packed(TOKENS), 40))
    core.extend(cache, 0, 40)
    core.publishing.commit(core.publishing.promise(cache, packed(TOKENS), 40))
    core.release(cache)
    core.blocks.make_free(60)
    hit = core.match(b"", packed(TOKENS), 40)
    assert len(hit.held) == 60
    assert not core.worth(hit).held, "loading takes 60 seconds, and computing 40"


def test_a_window_is_worth_the_path_that_it_opens():
    rules = (KEEP_ALL, KeepRule(SIZE))
    all_of = paths(rules)
    core, scheduler, remote, tiering = tiered(["disk"], 3.0, rules, {"disk": {all_of[-1][1]}})
    cache, _ = core.acquire(core.match(b"", packed(TOKENS), 40))
    core.extend(cache, 0, 40)
    core.publishing.commit(core.publishing.promise(cache, packed(TOKENS), 40))
    core.trim(cache, 40)
    other, _ = core.acquire(core.match(b"", packed(TOKENS), 40))  # the window is left behind
    core.release(cache)
    core.extend(other, 40, 44)
    core.publishing.commit(core.publishing.promise(other, packed([*TOKENS, 90, 91, 92]), 44))
    core.trim(other, 44)
    core.blocks.reclaim(1)
    while core.match(b"", packed(TOKENS), 40).num_blocks:
        assert core.blocks.make_free(core.pool.num_free + 1)
    request = a_request()
    scheduler.add(request)
    tiering.begin(request, 0.0)
    assert remote.fetched, "one block that comes in 3 seconds saves 40 seconds of computing"


def keep_on_host(core, tokens):
    """Compute ``tokens``, and evict all."""
    num = len(tokens)
    cache, _ = core.acquire(core.match(b"", packed(tokens), 0))
    core.extend(cache, 0, num)
    core.publishing.commit(core.publishing.promise(cache, packed(tokens), num))
    core.release(cache)
    core.blocks.make_free(core.pool.num_blocks)
    core.moves.host_done(core.moves.take_host_ops())


@pytest.mark.parametrize("rules", [(KEEP_ALL,), (KEEP_ALL, KeepRule(SIZE))])
def test_what_is_fetched_of_a_path_does_not_push_the_rest_of_it_out_of_the_arena(rules):
    all_of = paths(rules)
    num_host = 8 * len(rules)
    core, scheduler, remote, tiering = tiered(
        ["disk"], 1e-6, rules, {"disk": {one for place in all_of[4:8] for one in place}}, num_host
    )
    keep_on_host(core, TOKENS[:8])
    keep_on_host(core, list(range(100, 108)))
    core.host.blocks.unsaved.clear()
    request = a_request(TOKENS[:17])
    assert core.match(b"", request.packed(), 16).num_blocks == 4
    scheduler.add(request)
    tiering.begin(request, 0.0)
    assert remote.fetched
    tiering.poll(0.1)
    tiering.poll(0.2)
    assert core.match(b"", request.packed(), 16).num_blocks == 8, "all that it lacked has come"
