"""Beams under random operations, beside samples and a slab that can be read.

Searches and samples come, are cancelled and preempted; steps fail, of nobody or of a culprit; what a row computes is no
number; the cache is reset; steps are planned behind one in flight. A continuation's logprob depends on all cells that
its row reads, so a beam that goes on on blocks that are not its own finds something else. Held after every operation:

* ``audit`` passes; all beams of a search are in a step, or none is; they are as long as each other;
* each row reads exactly its own history;
* what a search finds is what it finds alone, whoever ran beside it and however often it began again;
* nobody ends by ``error`` but culprits and those whose numbers are none, and these with all their beams;
* at the end nothing is held, and all that was ever asked has ended.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest

from pagefold.beams import BeamGroup, BeamSearch
from pagefold.events import RequestPreempted
from pagefold.kv import KEEP_ALL, NO_HOST, NO_RESIDUALS, BlockTable, HostTier, KeepRule, KVCore, Residuals, audit
from pagefold.request import Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim.shadow_runner import VOCAB_SIZE, ShadowRunner, alone, cells_of
from pagefold.steps import TokenLogprobs

BLOCK_SIZE = 4
WORDS = 9
"""Tokens that beams choose among."""
PLAIN = SamplingParams(temperature=0.0, max_tokens=None)


@dataclass(frozen=True)
class Setup:
    """A pool, and what is behind it."""

    num_blocks: int = 24
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 12
    rules: tuple[KeepRule, ...] = (KEEP_ALL,)
    seals: bool = False
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True


SETUPS = {
    "plain": Setup(),
    "cache off": Setup(enable_prefix_caching=False),
    "tight": Setup(num_blocks=14, max_num_seqs=8, max_num_batched_tokens=16),
    "host tier": Setup(num_host_blocks=10, num_blocks=18),
    "sealed": Setup(seals=True, num_blocks=18),
    "windows": Setup(rules=(KEEP_ALL, KeepRule(6)), num_blocks=44),
    "windows first, sealed": Setup(rules=(KeepRule(5), KEEP_ALL), num_blocks=44, seals=True),
}


def tops_of(cells, num_tops):
    """Return the likeliest tokens behind cells, by nothing but their values."""
    found = [(token_id, -0.05 - (hash((tuple(cells), token_id)) % 999_983) / 300_000) for token_id in range(WORDS)]
    return tuple(sorted(found, key=lambda each: -each[1])[:num_tops])


def search_alone(search, namespace, prompt):
    """Return the outputs that a search finds with no scheduler, no cache and nobody else."""
    beams = [list(prompt)]
    while moves := search.take([tops_of(cells_of(namespace, beam), search.num_tops) for beam in beams]):
        beams = [[*beams[move.parent], move.token_id] for move in moves]
    return [[move.token_id for move in found.moves] for found in search.best()]


class Machine:
    """Operations, each legal at any time; one that makes no sense at the moment does nothing."""

    def __init__(self, setup, seed):
        self.setup = setup
        self.rng = Random(seed)
        self.seen = Counter()
        self.core = KVCore(
            setup.num_blocks,
            block_size=BLOCK_SIZE,
            rules=setup.rules,
            host=HostTier(setup.num_host_blocks) if setup.num_host_blocks else NO_HOST,
            enable_prefix_caching=setup.enable_prefix_caching,
            residuals=Residuals(setup.max_num_seqs, BLOCK_SIZE) if setup.seals else NO_RESIDUALS,
        )
        limits = SchedulerLimits(setup.max_num_seqs, setup.max_num_batched_tokens)
        admission = ("prompt", "predicted", "max_tokens")[seed % 3]
        self.scheduler = Scheduler(self.core, limits, admission=admission, emit=self._on_event)
        self.runner = ShadowRunner(self.scheduler)
        self.flights = []
        self.requests = {}
        self.expected = {}
        self.culprits = set()
        self.num_added = 0
        self.now = 0.0

    def _on_event(self, event):
        if isinstance(event, RequestPreempted):
            self.seen["preempted"] += 1
            self.seen["preempted beams"] += self.requests[event.request_id].beams is not None

    # Operations.

    def add(self):
        if len(self.scheduler.waiting) > 4:
            return
        rng = self.rng
        stream = Random(rng.randrange(3)).choices(range(VOCAB_SIZE), k=20)
        prompt = stream[: rng.randrange(1, 18)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3))]
        name, num_new = f"r{self.num_added}", rng.randrange(1, 14)
        self.num_added += 1
        is_search = rng.random() < 0.6
        width = rng.randrange(1, 5) if is_search else rng.randrange(1, 3)
        stops = frozenset(rng.sample(range(WORDS if is_search else VOCAB_SIZE), rng.randrange(3)))
        stop = StopRule(stops, len(prompt) + num_new)
        if self._most_blocks(len(prompt), num_new, width) > self.setup.num_blocks:
            return
        how = replace(PLAIN, use_beam_search=True, n=width) if is_search else PLAIN
        namespace = bytes([rng.randrange(2)])
        deadline_s = self.now + 12 if rng.random() < 0.15 else None
        seats = [
            Request(
                name if not index else f"{name}/{index}",
                prompt,
                how,
                stop=stop,
                namespace=namespace,
                seed=index,
                arrival_s=float(self.num_added),
                deadline_s=deadline_s,
                parent_id=name,
                sample_index=index,
            )
            for index in range(width)
        ]
        if is_search:
            settings = {
                "length_penalty": rng.choice([0.0, 1.0, 2.0]),
                "early_stopping": rng.choice([True, False, "never"]),
                "min_tokens": rng.choice([0, 0, 3]),
            }
            group = BeamGroup(seats, BeamSearch(width, stops, num_new, **settings))
            for seat in seats:
                seat.beams = group
            found = search_alone(BeamSearch(width, stops, num_new, **settings), namespace, prompt)
            self.expected |= {seat.request_id: output for seat, output in zip(seats, found, strict=True)}
        else:
            self.expected |= {seat.request_id: alone(seat) for seat in seats}
        if rng.random() < 0.04:
            self.culprits.add(name)
        self.requests |= {seat.request_id: seat for seat in seats}
        first, *first.forks = seats
        self.scheduler.add(first)

    def _most_blocks(self, num_prompt, num_new, width):
        """Return what as many beams hold at most: more than there is, the engine refuses."""
        whole = self.core.num_blocks_for(num_prompt + num_new, self.setup.max_num_batched_tokens)
        return width * whole - (width - 1) * (num_prompt // BLOCK_SIZE)

    def schedule(self):
        if self.flights:
            return
        plan = self.scheduler.schedule(self.now)
        if plan.num_rows:
            self._take_off(plan)

    def look_ahead(self):
        if len(self.flights) != 1:
            return
        plan = self.scheduler.schedule_ahead(self.now)
        if plan is not None:
            assert not any(request.beams is not None and request.beams.has_begun for request in self.scheduler.in_step)
            self._take_off(plan)
            self.seen["ahead"] += 1
            self.seen["ahead: the last of a prompt"] += any(one.forks for one in self.flights[-1][3])

    def _take_off(self, plan):
        requests = list(self.scheduler.in_step)
        tables = [  # of a row that begins, the runner asks whose it is
            [BlockTable(table.block_ids, table.num_trimmed) for table in each] if start else each
            for start, each in zip(plan.starts, plan.tables, strict=True)
        ]
        step = self.scheduler._flight.newest
        self.flights.append((plan, replace(plan, tables=tables), requests, list(step.samples)))
        for group in {request.beams for request in requests if request.beams is not None}:
            if group.has_begun:
                assert all(seat in requests for seat in group.seats), "a beam is left behind"
                assert len({seat.num_tokens for seat in group.seats}) == 1

    def apply(self):
        if not self.flights:
            return
        plan, launched, requests, _ = self.flights[0]
        names = {request.parent_id for request in requests}
        if names & self.culprits or self.rng.random() < 0.04:
            self.fail()
            return
        result = self.runner.run(launched)
        for row, (request, start, num) in enumerate(zip(requests, plan.starts, plan.num_tokens, strict=True)):
            if not request.is_aborted:
                cells = cells_of(request.namespace, request.token_ids[: start + num])
                assert self.runner.read_row(plan, row) == cells, f"{request} reads what is not its own"
        logprobs = []
        for place, num_top in zip(plan.logprob_rows, plan.logprob_tops, strict=True):
            top = tops_of(self.runner.read_row(plan, plan.sampling_rows[place]), num_top)
            logprobs.append(TokenLogprobs(top[0][1], 1, top))
        corrupted = []
        if self.rng.random() < 0.01:
            corrupted = sorted(self.rng.sample(range(plan.num_rows), self.rng.randrange(1, 1 + min(2, plan.num_rows))))
        self.flights.pop(0)
        before = {request for request in self.scheduler.running if request.beams is not None}
        got = self.scheduler.apply(replace(result, logprobs=logprobs, corrupted=corrupted))
        for row in corrupted:
            request = requests[row]
            together = request.beams.seats if request.beams is not None else [request]
            assert all(one.finish_reason is not None for one in together)
            self.seen["corrupted beams"] += request.beams is not None and len(together) > 1
        self.seen["forked"] += len({one for one in self.scheduler.running if one.beams is not None} - before)
        assert len(set(got)) == len(got)
        for request in got:
            if request.finish_reason in {"stop", "length"} and request.beams is not None:
                self._check_output(request)
                assert request.logprobs[-1].top == (), "no alternatives were asked for"
                self.seen["found"] += 1
                self.seen["found, stopped"] += request.finish_reason == "stop"
                self.seen["found, preempted"] += request.beams.seats[0].num_preemptions > 0
        self._forget_ended()

    def fail(self):
        if not self.flights:
            return
        plan, _, requests, _ = self.flights[0]
        if self.rng.random() < 0.7:
            self.runner.move(plan)
            self.runner.copy(plan)
            self.runner.spoil(plan, self.rng.randrange(plan.num_rows + 1))
            for behind, *_ in self.flights[1:]:
                self.runner.move(behind)
                self.runner.copy(behind)
                self.runner.spoil(behind, behind.num_rows)
        self.seen["failed with beams"] += any(one.beams is not None and one.beams.has_begun for one in requests)
        self.flights = []
        self.scheduler.abandon("it died")
        self._forget_ended()

    def cancel(self):
        """A client goes away: all of its request ends."""
        parents = sorted({request.parent_id for request in self.requests.values()})
        if not parents:
            return
        parent = self.rng.choice(parents)
        for name in [name for name, request in self.requests.items() if request.parent_id == parent]:
            self.scheduler.finish(name, "abort")
        self.seen["cancelled"] += 1
        self._forget_ended()

    def reset(self):
        self.core.forgetting.reset()

    def pass_time(self):
        self.now += self.rng.randrange(5)

    def drain(self):
        self.culprits.clear()
        for _ in range(6000):
            if not (self.flights or self.scheduler.has_work):
                break
            self.schedule()
            self.check()
            self.apply()
            self.check()
        assert not self.scheduler.has_requests, "somebody starves"
        assert not self.requests
        assert self.core.num_active == 0
        self.core.forgetting.reset()
        assert self.core.pool.num_free == self.core.pool.num_blocks

    # Checks.

    def check(self):
        audit(self.core)
        assert self.core.caches == {request.cache for request in self.scheduler.running}
        for request in self.scheduler.running:
            if request.beams is not None and request.beams.has_begun:
                assert {seat.status for seat in request.beams.seats} == {RequestStatus.RUNNING}
        for block_id in self.core.pool.free_ids:
            self.runner.poison(block_id)
        for host_id in self.core.host.blocks.free_ids():
            self.runner.poison_host(host_id)

    def _check_output(self, request):
        assert request.output_token_ids == self.expected[request.request_id], request

    def _forget_ended(self):
        for name, request in list(self.requests.items()):
            if request.status is not RequestStatus.FINISHED:
                continue
            del self.requests[name]
            if request.finish_reason in {"stop", "length"}:
                self._check_output(request)
            self.seen[f"ended: {request.finish_reason}"] += request.beams is not None


OPERATIONS = [Machine.add] * 5 + [Machine.schedule] * 10 + [Machine.apply] * 10 + [Machine.look_ahead] * 4
OPERATIONS += [Machine.cancel, Machine.fail, Machine.pass_time, Machine.reset]


def random_operations(name, seed, num_operations):
    machine = Machine(SETUPS[name], seed)
    for _ in range(num_operations):
        machine.rng.choice(OPERATIONS)(machine)
        machine.check()
    machine.drain()
    return machine.seen


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", SETUPS)
def test_random_operations(name):
    for seed in range(4):
        random_operations(name, seed, 300)


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
def test_many_random_operations_with_beams(name):
    for seed in range(1000, 1020):
        random_operations(name, seed, 1000)


@pytest.mark.long
def test_what_is_worth_testing_happens():
    """A control: the machine reaches the corners that it exists for."""
    seen = Counter()
    for name in SETUPS:
        for seed in range(100, 104):
            seen += random_operations(name, seed, 300)
    wanted = {
        "preempted beams",
        "forked",
        "found",
        "found, stopped",
        "found, preempted",
        "failed with beams",
        "cancelled",
    }
    wanted |= {
        "corrupted beams",
        "ahead",
        "ahead: the last of a prompt",
        "ended: abort",
        "ended: error",
        "ended: length",
        "ended: timeout",
    }
    assert wanted <= seen.keys(), wanted - seen.keys()
