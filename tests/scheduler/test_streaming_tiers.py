"""Requests larger than the device beside a slow tier, in virtual time: nobody starves, and nothing wrong is read.

The machine is that of ``test_streaming.py`` with a disk behind the host: what is written there is what the arena held,
and what comes back is that.
"""

from __future__ import annotations

from random import Random

import pytest
from scheduler.test_streaming import NAMESPACE, SIZE, STREAMS, Machine, operate, random_setup, request_of

from pagefold.kv import KEEP_ALL, Arbiter, HostTier, LinkModel, SlowTiers
from pagefold.kv.names import in_group, names_behind, root_digest
from pagefold.request import RequestStatus
from pagefold.scheduler import Tiering
from pagefold.sim.clock import VirtualClock
from pagefold.sim.shadow_runner import cells_of
from pagefold.sim.tiers import DISK, SimTransfers, TierModel
from pagefold.steps import StepPlan


class TieredMachine(Machine):
    """See above. Computing takes ``compute_s`` a token, so that loading always wins or never."""

    def __init__(self, num_blocks=6, num_held=40, max_num_seqs=3, max_tokens=24, *, policy="write_back", **how):
        arbiter = Arbiter(1000 * SIZE, SIZE, compute_s_per_token=how.get("compute_s", 1.0))
        arbiter.links[DISK] = LinkModel(0.02, 2e9)
        slow = SlowTiers(HostTier(num_held, notes_unsaved=True), policy, arbiter)
        super().__init__(num_blocks, num_held, max_num_seqs, max_tokens, slow, rules=how.get("rules", (KEEP_ALL,)))
        self.clock = VirtualClock()
        model = TierModel(
            host_tokens=1000,
            disk_tokens=4000,
            token_bytes=1000,
            disk_latency_s=0.02,
            fault_rate=how.get("fault_rate", 0.0),
        )
        self.transfers = how.get("transfers", SimTransfers)(model, SIZE, self.clock)
        self.on_disk = {}
        write = self.transfers.write

        def keep(ops):
            for op in ops:
                self.on_disk[op.name.digest] = self.runner.stored(op.host_id)
            write(ops)

        self.transfers.write = keep
        self.tiering = Tiering(self.scheduler, slow, self.transfers, self, self.move, clock=self.clock)

    def arrived(self, host_id, _checksum):
        """As an arena: what the disk has brought is there."""
        self.runner.store(host_id, self.on_disk[self.core.host.blocks.at(host_id).name.digest])

    def move(self, ops):
        plan = StepPlan(0)
        plan.host_ops = ops
        self.runner.move(plan)

    def add(self, which, length, num_new):
        num_before = len(self.requests)
        if len(self.scheduler.fetching) < 5:
            super().add(which, length, num_new)
        if len(self.requests) > num_before:
            request = self.requests[f"r{num_before}"]
            request.returns_in_s = (None, 0.0, 0.05, 1.0)[which % 4]
            self.tiering.begin(request, self.clock())

    def apply(self):
        running = list(self.scheduler.running)
        super().apply()
        for request in running:
            if request.finish_reason == "length":
                self.tiering.expect(request, self.clock())

    def schedule(self):
        if self.plan is not None:
            return
        self.clock.advance(0.01)
        if not self.scheduler.has_work:
            self.tiering.store_pending()
            due_s = min(self.tiering.next_due_s(), self.transfers.next_due_s)
            if due_s < float("inf"):
                self.clock.advance_to(due_s)
        self.tiering.poll(self.clock())
        plan = self.scheduler.schedule(self.clock())
        self._poison(plan)
        self.plan = plan if plan.num_rows else None

    def forget(self, digests):
        if digests:
            self.tiering.distrust(digests)
        assert digests.isdisjoint(self.transfers._kept)

    def check_forgotten(self, request):
        root, groups = root_digest(NAMESPACE), range(len(self.core.rules))
        names = names_behind(root, root, request.packed(), SIZE * 4)
        assert self.transfers._kept.keys().isdisjoint(
            in_group(name.digest, group) for name in names for group in groups
        )

    def reset(self):
        self.core.forgetting.reset()
        self.tiering.begin_reset()
        self.tiering.finish_reset()


def random_operations(seed, num_operations):
    rng = Random(seed)
    machine = TieredMachine(
        *random_setup(rng),
        policy=rng.choice(("write_back", "write_through", "write_through_selective")),
        compute_s=rng.choice((1e-4, 1e-2, 1.0)),
        fault_rate=rng.choice((0, 0.2)),
    )
    operate(machine, rng, num_operations)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("seed", range(24))
def test_random_operations(seed):
    random_operations(seed, 250)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_random_operations():
    for seed in range(1000, 1250):
        random_operations(seed, 500)


def test_who_needs_all_memory_gets_on_after_a_reset():
    """What the first was to write through is forgotten, and its block does not wait for a step to be stored in."""
    machine = TieredMachine(num_blocks=2, max_num_seqs=1, policy="write_through")
    for name, prompt, num_outputs in (("first", STREAMS[0][:4], 1), ("second", STREAMS[1][:6], 2)):
        request = machine.requests[name] = request_of(name, prompt, num_outputs)
        machine.scheduler.add(request)
    machine.schedule()
    machine.apply()
    assert machine.core.host.pending.stores
    machine.reset()
    machine.drain()


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_what_is_kept_for_who_waits_gives_way_to_who_runs(max_num_seqs):
    """The first needs most of the arena, where blocks are brought meanwhile for the second."""
    machine = TieredMachine(num_blocks=6, num_held=40, max_num_seqs=max_num_seqs)
    root = root_digest(NAMESPACE)
    tokens = STREAMS[1][:80]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    cells = cells_of(NAMESPACE, tokens)
    for index, name in enumerate(names_behind(root, root, packed, SIZE * 4)):
        machine.transfers._kept[name.digest] = None
        machine.on_disk[name.digest] = cells[index * SIZE : (index + 1) * SIZE]
    for name, prompt in (("first", STREAMS[0][:150]), ("second", STREAMS[1][:90])):
        request = request_of(name, prompt)
        machine.requests[name] = request
        machine.scheduler.add(request)
        machine.tiering.begin(request, machine.clock())
    machine.drain()
    assert all(request.status is RequestStatus.FINISHED for request in machine.requests.values())
