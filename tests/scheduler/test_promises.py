"""What the documents promise of failing steps and of logits that are no numbers, judged from outside.

Nothing here knows how the scheduler looks for culprits, or how the core drops what is corrupted. It knows who makes
steps fail, what each request gets that runs alone, and which steps ran with whom.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from random import Random

import pytest
from content_device import DAMAGED, NAN, ContentDevice, DeviceError, Faults, entries, output_of
from until_seen import IN_FULL

from pagefold.kv import NO_HOST, POLICIES, HostTier, KVCore, audit, make_policy
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.scheduler.policy import FirstComeFirstServed, PriorityWithAging
from pagefold.scheduler.suspicion import MAX_FAILED_ALONE, MAX_FAILED_IN_A_ROW, MAX_FAILED_IN_COMPANY
from pagefold.steps import DamagedBlocksError

MAX_LEN = 30


class World:
    """A scheduler on a device that fails by rule.

    Attributes:
        culprits: requests that make every step fail.
        pairs: that fail only together.
        corrupted: requests whose logits are never numbers.
        steps: who was in each step, and whether it ran; None for one that was nobody's fault.
        ended: why each request ended.
        misses_some: whether somebody tainted left before anybody could know.
    """

    def __init__(self, seed: int, *, mishaps: float = 0.0, glitches: float = 0.0, damages: float = 0.0):
        self.random = random = Random(seed)
        self.mishaps, self.glitches, self.damages = mishaps, glitches, damages
        self.size = random.choice([1, 2, 4, 8])
        self.seats = random.choice([2, 3, 5, 8, 16])
        self.budget = max(self.seats, random.choice([4, 8, 16, 64]))
        self.vocab_size = random.choice([2, 3, 5, 40])
        need = -(-MAX_LEN // self.size) + 2
        self.is_ample = random.random() < 0.3
        num_blocks = 2 * need * self.seats if self.is_ample else random.choice([need, need + 3, 2 * need, 4 * need])
        host = HostTier(random.choice([3, 10, 60])) if random.random() < 0.35 else NO_HOST
        policy = make_policy(random.choice(list(POLICIES)))
        self.core = KVCore(num_blocks, block_size=self.size, policy=policy, host=host)
        limits = SchedulerLimits(self.seats, self.budget)
        order = random.choice([FirstComeFirstServed(), PriorityWithAging(10.0)])
        self.scheduler = Scheduler(self.core, limits, policy=order)
        self.looks_ahead = random.random() < 0.5
        self.device = ContentDevice(random, num_blocks, self.size, self.vocab_size)
        self.flights: deque = deque()
        self.requests: list[Request] = []
        self.culprits: set[str] = set()
        self.pairs: list[tuple[str, str]] = []
        self.corrupted: set[str] = set()
        self.num_dead = 0
        self.was_dead = False
        self.steps: list[tuple[frozenset[Request], bool | None]] = []
        self.ended: dict[Request, str] = {}
        self.missed: Counter[Request] = Counter()
        self.misses_some = False
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.prefixes = [self._tokens(random.randrange(1, MAX_LEN)) for _ in range(4)]

    def _tokens(self, num: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(num)]

    @property
    def living(self) -> list[Request]:
        return [request for request in self.requests if request not in self.ended]

    def add(self) -> str:
        random = self.random
        num_prompt, name = random.randrange(1, MAX_LEN - 1), f"r{len(self.requests)}"
        base = random.choice(self.prefixes)
        prompt = (base[: random.randrange(len(base) + 1)] + self._tokens(MAX_LEN))[:num_prompt]
        num_new = 0 if random.random() < 0.1 else random.randrange(1, MAX_LEN - num_prompt + 1)
        num_samples = random.randrange(1, min(4, self.seats) + 1) if num_new and random.random() < 0.2 else 1
        stops = frozenset([random.randrange(self.vocab_size)] if random.random() < 0.3 else [])
        samples = [
            Request(
                f"{name}.{index}",
                prompt,
                SamplingParams(),
                stop=StopRule(stops, num_prompt + num_new),
                seed=len(self.requests) + index,
                arrival_s=self.now,
                deadline_s=self.now + 30 * random.random() if random.random() < 0.1 else None,
                priority=random.randrange(3),
                parent_id=name,
                sample_index=index,
            )
            for index in range(num_samples)
        ]
        self.requests += samples
        first, *first.forks = samples
        self.scheduler.add(first)
        return name

    def cancel(self) -> None:
        if self.living:
            request = self.scheduler.finish(self.random.choice(self.living).request_id, "abort")
            for sample in () if request is None else (request, *request.forks):
                self.end(sample, "abort")

    def step(self) -> None:
        """One turn of the loop: plan and launch what can be, land what is in flight."""
        self.now += self.random.choice([0.01, 0.1, 1.0])
        if self.flights and self.looks_ahead and len(self.flights) < 2 and self.random.random() < 0.8:
            self.launch(self.scheduler.schedule_ahead(self.now))
        if self.flights:
            self.land()
            return
        plan = self.scheduler.schedule(self.now)
        for request in self.scheduler.timed_out:
            for sample in (request, *request.forks):
                self.end(sample, "timeout")
        self.launch(plan)
        if self.flights and not self.looks_ahead:
            self.land()

    def launch(self, plan) -> None:
        if plan is None or not plan.num_rows:
            return
        requests = list(self.scheduler.in_step)
        assert len(set(requests)) == len(requests) == plan.num_rows <= self.seats
        assert sum(plan.num_tokens) == len(plan.token_ids) <= self.budget
        late, is_lost = None, False
        if self.flights:
            before, _, result = self.flights[-1]
            is_lost = isinstance(result, Exception)
            late = [0] * len(before.sampling_rows) if is_lost else result.token_ids
        try:
            result = self.device.run(plan, requests, late, self.faults(requests, is_lost))
        except (DeviceError, DamagedBlocksError) as error:
            result = error
        self.flights.append((plan, requests, result))

    def faults(self, requests: list[Request], is_lost: bool) -> Faults:
        random, names = self.random, {request.parent_id for request in requests}
        self.num_dead -= 1
        fails = self.num_dead >= 0 or not names.isdisjoint(self.culprits) or random.random() < self.mishaps
        fails = fails or any(names.issuperset(pair) for pair in self.pairs)
        corrupted = {q for q in requests if q.parent_id in self.corrupted or random.random() < self.glitches}
        stage = random.randrange(4) if fails else None
        return Faults(stage, frozenset(corrupted), random.random() < self.damages, is_lost)

    def land(self) -> None:
        _, requests, result = self.flights.popleft()
        who = frozenset(requests)
        has_run = None if isinstance(result, DamagedBlocksError) else not isinstance(result, Exception)
        self.steps.append((who, has_run))
        self.counts[f"{has_run}"] += 1
        if has_run:
            self.apply(requests, result)
        else:
            self.flights.clear()  # the one behind it is taken back
            damaged = result.host_ids if has_run is None else frozenset()
            for request in self.scheduler.abandon("it failed", damaged):
                if request.error and request not in self.ended:
                    assert has_run is False, "blamed for a damaged block"
                    self.judge(request)
                for sample in (request, *request.forks):
                    self.end(sample, "error" if request.error else sample.finish_reason or "abort")
        for request in self.scheduler.running:
            self.missed[request] = 0 if request in who else self.missed[request] + 1
            if self.is_ample:
                assert self.missed[request] <= 4 * self.seats, f"{request} runs, and has had no row for that long"

    def apply(self, requests: list[Request], result) -> None:
        found = [requests[row] for row in result.corrupted]
        caches = {
            q: (list(q.cache.only_table.block_ids), q.packed()) for q in found if not (q in self.ended or q.is_aborted)
        }
        sound = [q.cache.only_table.block_ids for q in requests if q not in found]
        own = {block_id for block_ids in sound for block_id in block_ids}.difference(
            *(block_ids for block_ids, _ in caches.values())
        )
        ended = self.scheduler.apply(result)
        assert set(self.scheduler.corrupted) == set(caches)
        for request in caches:
            self.counts["corrupted"] += 1
            for sample in (request, *request.forks):
                self.end(sample, "corrupted")
        self.check_dropped(caches.values(), own)
        for request in ended:
            if request.finish_reason is not None:
                self.end(request, request.finish_reason)

    def end(self, request: Request, reason: str) -> None:
        if request in self.ended:
            return
        self.ended[request] = reason
        if reason != "corrupted" and request in self.device.tainted:
            self.misses_some = True
        if reason in {"stop", "length"}:
            assert request.output_token_ids == self.expected(request), request
            stops = request.stop.token_ids
            assert (reason == "stop") == (bool(request.output_token_ids) and request.output_token_ids[-1] in stops)

    def expected(self, request: Request) -> list[int]:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        num_new = request.stop.max_total_tokens - len(prompt)
        return output_of(prompt, request.seed, num_new, request.stop.token_ids, self.vocab_size)

    def judge(self, request: Request) -> None:
        """Is what is said of ``request``, which ends because of failed steps, true of the steps that were?"""
        steps = [(who, has_run) for who, has_run in self.steps if has_run is not None]
        if "in a row" in request.error:
            self.counts["device"] += 1
            assert len(steps) >= MAX_FAILED_IN_A_ROW
            assert not any(has_run for _, has_run in steps[-MAX_FAILED_IN_A_ROW:])
            return
        its = [(who, has_run) for who, has_run in steps if request in who]
        if "alone" in request.error:
            self.counts["alone"] += 1
            assert all(step == ({request}, False) for step in its[-MAX_FAILED_ALONE:])
            assert len(its) >= MAX_FAILED_ALONE
        else:
            self.counts["company"] += 1
            assert sum(len(who) > 1 and not has_run for who, has_run in its) >= MAX_FAILED_IN_COMPANY
            assert ({request}, True) in its
        if not (self.mishaps or self.was_dead):
            name = request.parent_id
            assert name in self.culprits or any(name in pair for pair in self.pairs), f"{request} is no culprit"

    def check_dropped(self, caches, own: set[int]) -> None:
        """Nothing that they had or began with is found by anybody.

        Who is sound and has computed the same in that step, into blocks of his ``own``, may publish these.
        """
        nodes, published = list(self.core.tree.roots.values()), set()
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            published.update(block.block_id for block in node.blocks)
        for block_ids, packed in caches:
            hit = self.core.match(b"", packed, len(packed) // 4)
            found = [node.blocks[0].block_id for node in hit.nodes]
            assert own.issuperset(found)
            held = [entry for block_id in found for entry in self.device.blocks[block_id]]
            assert held == entries(array("i", packed).tolist())[: len(held)]
            assert not hit.held
            assert published.isdisjoint(block_ids)
            for block_id in block_ids:
                source, held = self.device.copied_from.get(block_id, (-1, []))
                is_as_it_was = NAN in held and self.device.blocks[source][: len(held)] == held
                assert not (is_as_it_was and source in published), f"a copy of block {source}, which can be found"

    def check_cached(self) -> None:
        """Whatever can still be found holds what it should."""
        for request in self.requests:
            tokens = request.token_ids[: request.num_prompt_tokens].tolist() + self.expected(request)
            hit = self.core.match(b"", array("i", tokens).tobytes(), len(tokens))
            found = [self.device.blocks[node.blocks[0].block_id] for node in hit.nodes]
            for held in (self.device.arena[block.host_id] for block in hit.held):
                if held == [DAMAGED]:
                    break
                found.append(held)
            entries_found = [entry for block in found for entry in block]
            if NAN in entries_found:
                assert self.misses_some
                return
            assert entries_found == entries(tokens)[: len(entries_found)]

    def run(self, num_operations: int, bad: dict[str, float]) -> int:
        """Random operations until all have ended; return how many. ``bad`` is how many requests are of which kind."""
        random, num = self.random, 0
        for _ in range(num_operations):
            draw = random.random()
            if draw < 0.25 and len(self.living) < 60:
                name, kind = self.add(), random.random()
                if kind < bad.get("culprit", 0.0):
                    self.culprits.add(name)
                elif kind > 1 - bad.get("pair", 0.0):
                    self.pairs.append((name, random.choice(self.requests).parent_id))
                elif 0.4 < kind < 0.4 + bad.get("corrupted", 0.0):
                    self.corrupted.add(name)
            elif draw < 0.3:
                self.cancel()
            elif draw < 0.305 and not self.flights:
                self.core.forgetting.reset()
            elif draw < 0.305 + bad.get("dead", 0.0):
                self.num_dead, self.was_dead = random.randrange(1, 30), True
            else:
                self.step()
            audit(self.core)
        self.pairs = [pair for pair in self.pairs if pair[0] != pair[1]]
        work = sum(request.stop.max_total_tokens + 1 for request in self.living)
        bound = 200 + 4 * work + 60 * (1 + len(self.culprits) + 2 * len(self.pairs))
        while self.scheduler.has_work or self.flights:
            self.step()
            audit(self.core)
            num += 1
            assert num < bound, f"{self.living} wait for ever"
        assert not self.living
        assert self.core.num_active == 0
        self.check_cached()
        return num_operations + num


KINDS = {
    "culprits": ({}, {"culprit": 0.1, "pair": 0.1}),
    "many culprits": ({}, {"culprit": 0.5}),
    "mishaps": ({"mishaps": 0.2, "damages": 0.05}, {"culprit": 0.05, "dead": 0.002}),
    "no numbers": ({"glitches": 0.005}, {"corrupted": 0.08}),
    "all of it": ({"glitches": 0.005, "mishaps": 0.1, "damages": 0.05}, {"culprit": 0.05, "corrupted": 0.08}),
}


def run_worlds(kind: str, num_operations: int, first_seed: int) -> Counter[str]:
    faults, bad = KINDS[kind]
    counts: Counter[str] = Counter()
    seed, num = first_seed, 0
    while num < num_operations:
        world = World(seed, **faults)
        try:
            num += world.run(world.random.randrange(20, 300), bad)
        except AssertionError as error:
            error.add_note(f"World({seed}, **{faults}), {bad}")
            raise
        counts += world.counts
        seed += 1
    return counts


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("kind", KINDS)
@IN_FULL
def test_promises_are_kept(kind, in_full):
    run_worlds(kind, 1_500 if in_full else 500, first_seed=0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_promises_are_kept_for_long(kind):
    counts = run_worlds(kind, 12_000, first_seed=10_000)
    expected = {"culprits": "alone", "many culprits": "device", "mishaps": "device"}.get(kind, "corrupted")
    assert counts[expected]
