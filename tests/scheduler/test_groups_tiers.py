"""Slow tiers behind several cache groups, in virtual time: what comes back is right, and is worth what it takes.

The machine is that of ``test_streaming_tiers.py``, where nothing streams. What is written lies in a pool, which says
late or much too late what it has, and most of it on a disk too, which says it at once; blocks are lost, those of the
arena are damaged, and the arena is full. Now and then all that is near is forgotten, as by a restart.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from scheduler.test_streaming import NAMESPACE, SIZE, STREAMS, operate, request_of
from scheduler.test_streaming_tiers import TieredMachine
from until_seen import IN_FULL, until_seen

from pagefold.events import TierRead
from pagefold.kv import KEEP_ALL, KeepRule, LinkModel
from pagefold.kv.names import in_group, names_behind, root_digest
from pagefold.kv.transfers import Found
from pagefold.request import RequestStatus
from pagefold.sim.shadow_runner import cells_of
from pagefold.sim.tiers import DISK, SimTransfers

POOL = "remote"
GROUPS = {
    "a window first": (KeepRule(9), KEEP_ALL),
    "a window behind": (KEEP_ALL, KeepRule(6)),
    "windows around": (KeepRule(14), KEEP_ALL, KeepRule(2)),
    "chunks first": (KeepRule(8, is_chunked=True), KEEP_ALL),
    "sinks behind": (KEEP_ALL, KeepRule(6, num_sinks=3)),
    "two that keep all": (KEEP_ALL, KEEP_ALL),
}


class DiskAndPool(SimTransfers):
    """What is kept lies in the pool, and on the disk if its digest says so."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tiers = [DISK, POOL]
        self.answers = Random(7)

    def count(self, tier, names):
        there = [name.digest in self._kept and (tier == POOL or name.digest[1] % 8 > 0) for name in names]
        return next((at for at, is_there in enumerate(there) if not is_there), len(there))

    def look(self, tier, names, ticket):
        answer = Found(tier, ticket, self.count(tier, names))
        self._begin("look", self.answers.choice((0.0, 0.0, 0.0, 2.0)), None, answer)


class GroupsMachine(TieredMachine):
    """See above. Slab and arena have as many blocks for each group as is said."""

    def __init__(self, rules, num_places=6, num_held=40, max_num_seqs=3, max_tokens=24, **how):
        how = {"transfers": DiskAndPool, **how}
        num_groups = len(rules)
        super().__init__(num_places * num_groups, num_held * num_groups, max_num_seqs, max_tokens, rules=rules, **how)
        self.core.slow.arbiter.links[POOL] = LinkModel(0.005, 1e9)
        self.tiering._emit = self.events.append


def random_operations(seed, name, num_operations):
    rng = Random(f"{seed} {name}")
    machine = GroupsMachine(
        GROUPS[name],
        rng.choice((6, 9, 12)),
        rng.choice((6, 12, 30)),
        rng.choice((1, 3)),
        rng.choice((3, 24, 200)),
        policy=rng.choice(("write_back", "write_through", "write_through")),
        compute_s=rng.choice((1e-2, 1.0, 1.0)),
        fault_rate=rng.choice((0.02, 0.1)),
    )
    for _ in range(4):
        operate(machine, rng, num_operations // 4)
        machine.core.forgetting.reset()
    reads = [event for event in machine.events if isinstance(event, TierRead)]
    seen = Counter({cause: num for event in reads for cause, num in event.num_missed.items()})
    for event in reads:
        seen[event.tier] += event.num_blocks
    arbiter = machine.core.slow.arbiter
    seen.update(late=arbiter.num_late, refused=arbiter.num_refused, loaded=arbiter.num_loaded)
    for request in machine.requests.values():
        seen.update({f"gone on from {tier}": num for tier, num in request.num_loaded_tokens.items()})
    return seen


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", GROUPS)
@IN_FULL
def test_random_operations(name, in_full):
    seen = Counter()
    asked = {DISK, "loaded", "gone on from host", f"gone on from {DISK}"}
    for seed in until_seen(range(6), seen, asked, in_full=in_full):
        seen += random_operations(seed, name, 250)
    missing = asked - seen.keys()
    assert not missing, f"never seen: {missing} in {seen}"


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", GROUPS)
def test_many_random_operations(name):
    seen = Counter()
    for seed in range(1000, 1100):
        seen += random_operations(seed, name, 500)
    missing = {DISK, POOL, "damaged", "absent", "late", "loaded", f"gone on from {POOL}"} - seen.keys()
    assert not missing, f"never seen: {missing} in {seen}"


# By hand.


def kept_of(machine, tokens):
    """Have the slow tiers keep all of a path, of every group."""
    root, cells = root_digest(NAMESPACE), cells_of(NAMESPACE, tokens)
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    for index, name in enumerate(names_behind(root, root, packed, SIZE * 4)):
        for group in range(len(machine.core.rules)):
            digest = in_group(name.digest, group)
            machine.transfers._kept[digest] = None
            behind = group - machine.runner.whole_group
            machine.on_disk[digest] = [cell + behind for cell in cells[index * SIZE : (index + 1) * SIZE]]


def begun(machine, tokens):
    request = request_of("r", tokens)
    machine.requests["r"] = request
    machine.scheduler.add(request)
    machine.tiering.begin(request, machine.clock())
    return request


@pytest.mark.parametrize(("faster", "waits"), [(1, False), (8, True)])
def test_nobody_waits_for_windows_longer_than_computing_takes(faster, waits):
    """32 places, of which 7 groups need 224 blocks: computing takes 1.28 s, and a disk 3.2 or 0.4 s."""
    rules = (*[KeepRule(33 * SIZE)] * 6, KEEP_ALL)
    machine = GroupsMachine(rules, 40, 200, compute_s=0.01, transfers=SimTransfers)
    arbiter = machine.core.slow.arbiter
    arbiter.links = {DISK: LinkModel(0.0, faster * 70 * arbiter.block_bytes)}
    tokens = STREAMS[0][: 32 * SIZE + 1]
    kept_of(machine, tokens)
    ended = []
    machine.tiering._fetching._emit = ended.append
    request = begun(machine, tokens)
    assert (request.status is RequestStatus.FETCHING) == waits
    assert (arbiter.num_loaded, arbiter.num_refused) == ((1, 0) if waits else (0, 1))
    machine.drain()
    assert (request.num_cached_tokens == 32 * SIZE) == waits
    assert arbiter.regret_s == 0
    assert (arbiter.gain_s > 0) == waits
    (told,) = ended
    assert told.outcome == ("brought" if waits else "slow")
    assert told.saved_s - told.waited_s == pytest.approx(arbiter.gain_s)
    assert (told.expected_s is not None) == waits
    assert told.saved_s == pytest.approx(1.28 if waits else 0, rel=0.5)


@pytest.mark.parametrize("name", ["a window first", "a window behind"])
def test_a_path_with_windows_that_passes_half_the_arena_is_computed_at_once(name):
    """And of a plain model as much of it comes as may wait."""
    tokens = STREAMS[0][: 10 * SIZE + 1]
    machine = GroupsMachine(GROUPS[name], 20, 10, transfers=SimTransfers)
    kept_of(machine, tokens)
    assert begun(machine, tokens).status is RequestStatus.WAITING
    assert machine.core.slow.arbiter.num_loaded == 0
    machine.drain()
    plain = GroupsMachine((KEEP_ALL,), 20, 10, transfers=SimTransfers)
    kept_of(plain, tokens)
    request = begun(plain, tokens)
    assert request.status is RequestStatus.FETCHING
    plain.drain()
    assert request.num_cached_tokens == 5 * SIZE


@pytest.mark.parametrize("name", ["a window first", "a window behind"])
def test_of_what_is_corrupted_windows_leave_the_disk_too(name):
    machine = GroupsMachine(GROUPS[name], 20, 40, transfers=SimTransfers)
    tokens = STREAMS[0][: 10 * SIZE + 1]
    kept_of(machine, tokens)
    num_kept = len(machine.transfers._kept)
    assert num_kept == 20
    begun(machine, tokens)
    while machine.plan is None:
        machine.schedule()
    machine.corrupt_next(1)
    machine.apply()
    assert not machine.transfers._kept
    machine.drain()
