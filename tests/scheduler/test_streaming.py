"""Requests larger than the device: what the scheduler does with them, by hand and under random operations.

The machine holds after every operation that ``audit`` passes, that each row reads exactly its own history through its
table, hot and cold, that what is free means nothing, and that every output is what its request generates alone.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pagefold.events import RequestPreempted, RequestStreamed
from pagefold.kv import KEEP_ALL, NO_SLOW_TIERS, HostTier, KVCore, Namespace, audit, make_policy
from pagefold.kv.names import digest_of
from pagefold.request import Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim.shadow_runner import VOCAB_SIZE, ShadowRunner, alone, cells_of
from pagefold.steps import DamagedBlocksError

SIZE = 4
NAMESPACE = Namespace(model="m").key()
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
MAX_INT = 2**16
STREAMS = [Random(seed).choices(range(VOCAB_SIZE), k=300) for seed in range(3)]


def request_of(name, tokens, num_outputs=3):
    return Request(
        name, tokens, GREEDY, stop=StopRule(frozenset(), len(tokens) + num_outputs), namespace=NAMESPACE, seed=0
    )


class Machine:
    """Operations, each legal at any time; one that makes no sense at the moment does nothing.

    With ``rules`` of several groups nothing streams.
    """

    def __init__(
        self, num_blocks=6, num_held=40, max_num_seqs=3, max_tokens=24, slow=NO_SLOW_TIERS, *, rules=(KEEP_ALL,)
    ):
        self.events = []
        self.core = KVCore(
            num_blocks,
            block_size=SIZE,
            rules=rules,
            policy=make_policy("lru"),
            host=HostTier(num_held) if not slow.is_on else slow.host,
            slow=slow,
            allow_streaming=len(rules) == 1,
            emit=self.events.append,
        )
        limits = SchedulerLimits(max_num_seqs, max_tokens)
        self.scheduler = Scheduler(self.core, limits, emit=self.events.append)
        self.runner = ShadowRunner(self.scheduler)
        streaming = self.core.streaming
        self.most_tokens = (streaming.max_blocks if streaming.is_on else num_blocks // len(rules)) * SIZE
        self.plan = None
        self.corrupt = 0  # bits of rows whose logits will be no numbers
        self.requests = {}
        self.now = 0.0

    def add(self, which, length, num_new):
        if len(self.scheduler.waiting) > 4:
            return
        num_new = 1 + num_new % 9
        length = 1 + length % (min(290, self.most_tokens) - num_new - 1)
        if which % 3 == 0:
            length = 1 + length % (SIZE * self.core.pool.num_blocks)
        request = request_of(f"r{len(self.requests)}", STREAMS[which % 3][:length], num_new)
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def schedule(self):
        if self.plan is not None:
            return
        had_work = self.scheduler.has_work
        plan = self.scheduler.schedule(self.now)
        assert bool(plan.num_rows) == had_work, "nothing to run though there is work"
        assert len(plan.token_ids) <= self.scheduler.limits.max_num_batched_tokens
        self._poison(plan)
        self.plan = plan if plan.num_rows else None

    def apply(self):
        plan = self.plan
        if plan is None:
            return
        self.plan = None
        try:
            result = self.runner.run(plan)
        except DamagedBlocksError as error:
            self.scheduler.abandon("damaged", error.host_ids)
            return
        rows = zip(self.scheduler.in_step, plan.starts, plan.num_tokens, strict=True)
        for row, (request, start, num_tokens) in enumerate(rows):
            expected = cells_of(NAMESPACE, request.token_ids[: start + num_tokens])
            assert self.runner.read_row(plan, row) == expected, f"{request} reads what is not its own"
        rows, self.corrupt = [row for row in range(plan.num_rows) if self.corrupt >> row & 1], 0
        corrupted = [self.scheduler.in_step[row] for row in rows]
        bad, good = set(), set()
        for request in self.scheduler.in_step:
            (bad if request in corrupted else good).update(request.cache.all_block_ids())
        self.scheduler.apply(replace(result, corrupted=rows))
        self.forget(self.scheduler.distrusted)
        for request in corrupted:
            assert request.finish_reason is not None
            hit = self.core.match(NAMESPACE, request.packed(), request.num_tokens)
            found = {block.block_id for node in hit.nodes for block in node.all_blocks if block is not None}
            assert found <= good - bad, "only who computed the same himself has published it"
            assert not hit.held
            if not found:
                self.check_forgotten(request)
        self._check_outputs()

    def corrupt_next(self, which):
        self.corrupt = which

    def forget(self, digests):
        """What slower tiers are told."""

    def check_forgotten(self, request):
        """What slower tiers have of a request whose logits were no numbers."""

    def fail(self, how_far):
        if self.plan is None:
            return
        if how_far % 2:  # what was to be stored is there or not
            self.runner.die(self.plan, how_far % (self.plan.num_rows + 1))
            for store in self.plan.host_ops.stores:
                self.runner.poison_host(store.host_id)
        self.plan = None
        self.scheduler.abandon("it died")
        self._check_outputs()

    def finish(self, which):
        present = [*self.scheduler.running, *self.scheduler.waiting, *self.scheduler.fetching.values()]
        if present:
            self.scheduler.finish(present[which % len(present)].request_id, "abort")

    def damage(self, which):
        held = [one for one in self.core.host.blocks.all() if not one.num_pins]
        if held and self.plan is None:
            self.runner.damage(held[which % len(held)].host_id)

    def reset(self):
        self.core.forgetting.reset()

    def drain(self):
        num_steps = 0
        while self.plan is not None or self.scheduler.has_requests:
            self.schedule()
            self.check()
            self.apply()
            self.check()
            num_steps += 1
            assert num_steps < 20_000, "somebody starves"
        assert not self.core.num_active
        assert not self.core.streaming.num_cold_blocks

    def check(self):
        audit(self.core)
        assert len(self.core.pool.blocks) == self.core.pool.num_blocks

    def _poison(self, plan):
        stores = [*plan.host_ops.stores, *self.core.host.pending.stores]
        stored = {store.block_id for store in stores}
        for block_id in set(self.core.pool.free_ids) - stored:
            self.runner.poison(block_id)
        for host_id in self.core.host.blocks.free_ids():
            self.runner.poison_host(host_id)

    def _check_outputs(self):
        for request in self.requests.values():
            output = list(request.output_token_ids)
            expected = alone(request)
            assert output == expected[: len(output)], f"{request} generates what it does not generate alone"
            assert request.status is not RequestStatus.FINISHED or request.cache is None


OPERATIONS = (
    ("add", 3, 12),
    ("schedule", 0, 40),
    ("apply", 0, 40),
    ("fail", 1, 3),
    ("finish", 1, 2),
    ("damage", 1, 4),
    ("corrupt_next", 1, 1),
)


def random_setup(rng):
    return rng.choice((2, 3, 6, 12)), rng.choice((3, 20, 60)), rng.choice((1, 3)), rng.choice((3, 24, 200))


def random_operations(seed, num_operations):
    rng = Random(seed)
    return operate(Machine(*random_setup(rng)), rng, num_operations)


def operate(machine, rng, num_operations):
    for name, num_arguments, _ in rng.choices(OPERATIONS, [weight for *_, weight in OPERATIONS], k=num_operations):
        getattr(machine, name)(*(rng.randrange(MAX_INT) for _ in range(num_arguments)))
        machine.check()
        if rng.random() < 0.005:
            machine.reset()
            machine.check()
    machine.drain()
    return machine


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(16))
def test_random_operations(seed):
    random_operations(seed, 300)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_random_operations():
    for seed in range(1000, 1160):
        random_operations(seed, 1000)


@pytest.mark.long
def test_what_is_worth_testing_happens():
    """A control: the machine reaches the corners that it exists for."""
    events = [event for seed in range(100, 110) for event in random_operations(seed, 300).events]
    streamed = [event for event in events if isinstance(event, RequestStreamed)]
    assert len(streamed) > 20
    assert any(event.num_cold_blocks for event in streamed), "nothing was found again"
    assert any(isinstance(event, RequestPreempted) for event in events)


ints = st.integers(0, MAX_INT - 1)


class StreamingMachine(RuleBasedStateMachine):
    """The same machine, driven by hypothesis, which shrinks what it finds."""

    @initialize(sizes=st.sampled_from([(2, 3, 1, 3), (3, 12, 2, 8), (6, 20, 3, 24)]))
    def start(self, sizes):
        self.machine = Machine(*sizes)

    @rule(which=ints, length=ints, num_new=ints)
    def add(self, which, length, num_new):
        self.machine.add(which, length, num_new)

    @rule()
    def step(self):
        self.machine.schedule()
        self.machine.check()
        self.machine.apply()

    @rule()
    def schedule(self):
        self.machine.schedule()

    @rule(how_far=ints)
    def fail(self, how_far):
        self.machine.fail(how_far)

    @rule(which=ints)
    def finish(self, which):
        self.machine.finish(which)

    @rule(which=ints)
    def damage(self, which):
        self.machine.damage(which)

    @rule()
    def reset(self):
        self.machine.reset()

    @invariant()
    def everything_holds(self):
        if hasattr(self, "machine"):
            self.machine.check()

    def teardown(self):
        if hasattr(self, "machine"):
            self.machine.drain()


def test_hypothesis_finds_nothing():
    run_state_machine_as_test(
        StreamingMachine,
        settings=settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


# By hand.


def run(machine, name, tokens, num_outputs=3):
    request = request_of(name, tokens, num_outputs)
    machine.requests[name] = request
    machine.scheduler.add(request)
    machine.drain()
    return request


def test_what_fits_does_not_stream():
    machine = Machine(num_blocks=6)
    run(machine, "r", STREAMS[0][: 6 * SIZE - 3])
    assert not [event for event in machine.events if isinstance(event, RequestStreamed)]


def test_one_that_outgrows_the_device_streams_from_there():
    machine = Machine(num_blocks=6)
    request = run(machine, "r", STREAMS[0][: 6 * SIZE - 3], num_outputs=30)
    (streamed,) = [event for event in machine.events if isinstance(event, RequestStreamed)]
    assert streamed.num_tokens == 6 * SIZE + 1
    assert streamed.num_cold_blocks == 6  # what it had computed is not lost
    assert list(request.output_token_ids) == alone(request)


def test_a_later_one_goes_on_from_what_an_earlier_one_left_in_the_host():
    machine = Machine(num_blocks=6)
    run(machine, "r", STREAMS[0][:100])
    again = run(machine, "again", STREAMS[0][:120])
    assert again.num_cached_tokens == 100
    assert again.num_loaded_tokens == {"host": 100}


def test_the_device_holds_half_of_itself_of_one_that_streams():
    machine = Machine(num_blocks=8)
    machine.scheduler.add(request_of("long", STREAMS[0][:150]))
    machine.scheduler.add(request_of("short", STREAMS[1][:5], 20))
    most_active = 0
    for _ in range(3):
        machine.schedule()
        most_active = max(most_active, machine.core.num_active)
        machine.apply()
    assert machine.scheduler.get("short") is not None
    assert most_active <= 4 + 1 + 2
    machine.drain()


def test_a_reset_holds_for_what_streams():
    machine = Machine(num_blocks=6)
    request = request_of("long", STREAMS[0][:150])
    machine.requests["long"] = request
    machine.scheduler.add(request)
    for _ in range(3):
        machine.schedule()
        machine.apply()
    machine.reset()
    machine.drain()
    assert run(machine, "after", STREAMS[0][:12]).num_cached_tokens == 0
    assert run(machine, "longer", STREAMS[0][:150]).num_cached_tokens <= 12


def test_two_stream_at_once_if_the_host_holds_them():
    machine = Machine(num_blocks=12, num_held=100)
    for index in range(2):
        request = request_of(f"r{index}", STREAMS[index][:120], 20)
        machine.requests[request.request_id] = request
        machine.scheduler.add(request)
    most = 0
    while machine.scheduler.has_work:
        machine.schedule()
        most = max(most, sum(one.cache.streams for one in machine.scheduler.running))
        machine.apply()
    assert most == 2


def test_what_was_stored_before_is_checked_and_what_is_stored_now_is_not():
    """A table that streams takes over what the device has: of two blocks the host holds one."""
    core = KVCore(6, block_size=SIZE, policy=make_policy("lru"), host=HostTier(40), allow_streaming=True)
    packed = array("i", range(2 * SIZE)).tobytes()
    cache, _ = core.acquire(core.match(NAMESPACE, packed, 2 * SIZE))
    assert core.extend(cache, 0, 2 * SIZE)
    core.publishing.commit(core.publishing.promise(cache, packed, 2 * SIZE))
    core.release(cache)
    first, second = core.tree.nodes()
    assert core.moves.store(first)
    core.moves.host_done(core.moves.take_host_ops())
    held = core.host.blocks.get(digest_of(first))
    cache, start = core.begin_streaming(core.match(NAMESPACE, packed, 2 * SIZE))
    assert start == 2 * SIZE
    ops = core.moves.take_host_ops()
    assert list(ops.checks) == [held.host_id]
    assert [store.block_id for store in ops.stores] == [second.blocks[0].block_id]
    core.moves.host_done(ops)
    core.release(cache)
    audit(core)
