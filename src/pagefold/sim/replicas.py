"""Replicas: many simulated servers behind a router, each with a scheduler and a cache of its own, in one virtual time.

The router is the one that a deployment has (``routing/``). What it knows of a replica's cache it is told by the events
of that cache, a while after they have happened; first tokens and ends it is told when they happen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.events import BlockEvicted, BlocksPublished, FirstToken, fan_out
from pagefold.index import PrefixIndex
from pagefold.kv import KVCore, make_policy
from pagefold.kv.names import digest_of, path_digest, root_digest
from pagefold.kv.tree import TOKEN_BYTES
from pagefold.routing import ROUTING_POLICIES, Prompt, Router
from pagefold.scheduler.times import tell_tokens
from pagefold.sim.arrivals import Arrivals
from pagefold.sim.clock import VirtualClock
from pagefold.sim.null_runner import NullRunner
from pagefold.sim.replay import check_fit, scheduler_of, simulate
from pagefold.sim.report import Tally, percentile
from pagefold.sim.step_cost import LinearStepCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagefold.events import Event
    from pagefold.index.prefix_index import Holdings as IndexHoldings
    from pagefold.request import Request
    from pagefold.sim.arrivals import AnyRequest
    from pagefold.sim.replay import SimConfig
    from pagefold.sim.report import Report
    from pagefold.sim.step_cost import RooflineStepCost, StepCost
    from pagefold.steps import Runner

__all__ = ["MAX_REPLICAS", "Fleet", "FleetReport", "block_digests", "simulate_replicas", "simulate_together"]

MAX_REPLICAS = 10_000
_MEDIUM = "GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas that are alike, and how requests are routed to them.

    Attributes:
        num_replicas: how many.
        replica: memory and limits of each.
        routing: the name of a routing policy.
        event_delay_s: seconds from the end of a step until the router is told what it did to a cache.

    Raises:
        ConfigError: a value is out of range, or there is no such policy.
    """

    num_replicas: int
    replica: SimConfig
    routing: str = "prefix"
    event_delay_s: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            msg = f"num_replicas is {self.num_replicas}."
            raise ConfigError(msg, remedy=f"It must be at least 1 and at most {MAX_REPLICAS:,}.")
        if self.routing not in ROUTING_POLICIES:
            msg = f"There is no routing policy {self.routing!r}."
            raise ConfigError(msg, remedy=f"There are {', '.join(ROUTING_POLICIES)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """What a workload met on several replicas.

    Attributes:
        routing: the routing policy.
        replicas: of each replica, what happened there.
        ttft_p50_s, ttft_p95_s: virtual seconds from arrival to first token, of all requests, nearest rank.
        num_choices: how many requests were routed for which reason.
    """

    routing: str
    replicas: tuple[Report, ...]
    ttft_p50_s: float
    ttft_p95_s: float
    num_choices: dict[str, int]

    @property
    def num_requests(self) -> int:
        """Requests that finished."""
        return sum(each.num_requests for each in self.replicas)

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that were found where their requests went."""
        return sum(each.num_hit_tokens for each in self.replicas)

    @property
    def hit_share(self) -> float:
        """Share of all prompt tokens that were found, 0 to 1."""
        asked = sum(each.num_asked_tokens for each in self.replicas)
        return self.num_hit_tokens / asked if asked else 0.0

    @property
    def busiest_share(self) -> float:
        """Prompt tokens that the busiest replica computed, over the mean of all; 1 where all are alike."""
        computed = [each.num_computed_tokens for each in self.replicas]
        return max(computed) * len(computed) / sum(computed) if any(computed) else 1.0

    @property
    def duration_s(self) -> float:
        """Virtual seconds until the last token of all."""
        return max(each.duration_s for each in self.replicas)

    def figures(self) -> dict[str, object]:
        """Return all figures by name, for JSON."""
        return {
            "routing": self.routing,
            "num_replicas": len(self.replicas),
            "num_requests": self.num_requests,
            "num_hit_tokens": self.num_hit_tokens,
            "token_hit_ratio": self.hit_share,
            "ttft_p50_s": self.ttft_p50_s,
            "ttft_p95_s": self.ttft_p95_s,
            "busiest_share": self.busiest_share,
            "duration_s": self.duration_s,
            "num_preemptions": sum(each.num_preemptions for each in self.replicas),
            "num_choices": self.num_choices,
            "replicas": [
                {"num_requests": each.num_requests, "token_hit_ratio": each.hit_share} for each in self.replicas
            ],
        }


def simulate_replicas(
    requests: Iterable[AnyRequest],
    fleet: Fleet,
    *,
    step_cost: StepCost | None = None,
    runner: Runner | None = None,
    progress: Callable[[int], None] | None = None,
) -> FleetReport:
    """Send ``requests`` to a fleet whose caches are empty, and run them to their ends.

    Args:
        requests: with their arrival times; requests with tokens are used up.
        fleet: the replicas, and the routing.
        step_cost: virtual seconds that a plan takes on a replica; :class:`LinearStepCost` by default.
        runner: samples; :class:`NullRunner` by default.
        progress: told how many requests have ended, when some have.

    Raises:
        BudgetTooSmallError: a request can never fit into a replica.
    """
    run = _Run(Arrivals(requests), fleet, step_cost or LinearStepCost(), runner or NullRunner(), progress)
    return run.to_the_end()


def simulate_together(
    requests: Iterable[AnyRequest],
    fleet: Fleet,
    *,
    step_cost: LinearStepCost | RooflineStepCost | None = None,
    runner: Runner | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Run ``requests`` on one server that has the memory and the speed of a whole fleet: what routing could reach.

    Args:
        requests: as of :func:`simulate_replicas`, as are the others.
        fleet: the replicas.
        step_cost: of one replica.
        runner: samples.
        progress: told how many requests have ended.

    Raises:
        BudgetTooSmallError: a request can never fit.
    """
    times, each, cost = fleet.num_replicas, fleet.replica, step_cost or LinearStepCost()
    whole = replace(
        each,
        num_blocks=each.num_blocks * times,
        max_num_seqs=each.max_num_seqs * times,
        max_num_batched_tokens=each.max_num_batched_tokens * times,
    )
    fast = replace(cost, token_s=cost.token_s / times, context_token_s=cost.context_token_s / times)
    return simulate(requests, whole, step_cost=fast, runner=runner, progress=progress)


class _Change(NamedTuple):
    """What has become of a path; an event of the index."""

    digest: bytes
    is_held: bool

    def tell(self, holdings: IndexHoldings) -> None:
        """Tell it to what the index has of the replica."""
        (holdings.stored if self.is_held else holdings.removed)([self.digest], _MEDIUM, 0)


class _Batch(NamedTuple):
    """What a step has done to a cache."""

    ts: float
    events: list[_Change]


class _Watcher:
    """Notes what a replica's step has done that the router is to be told.

    Attributes:
        changes: of the cache, in order.
        started: names of requests that got their first token.
    """

    def __init__(self) -> None:
        self.changes: list[_Change] = []
        self.started: list[str] = []

    def __call__(self, event: Event) -> None:
        """Note an event, if it tells anything."""
        match event:
            case BlocksPublished():
                self.changes += [_Change(digest_of(node), is_held=True) for node in event.nodes]
            case BlockEvicted() if event.node is not None:
                self.changes.append(_Change(digest_of(event.node), is_held=False))
            case FirstToken():
                self.started.append(event.request_id)
            case _:
                pass


class _Replica:
    """A server: its scheduler with its core, how far it is in time, and what came of it."""

    def __init__(self, name: str, config: SimConfig) -> None:
        self.name = name
        self.clock = VirtualClock()
        self.tally = Tally()
        self.watcher = _Watcher()
        self._emit = emit = fan_out(self.tally, self.watcher)
        core = KVCore(
            config.num_blocks,
            block_size=config.block_size,
            policy=make_policy(config.eviction_policy, config.num_blocks, emit),
            enable_prefix_caching=config.enable_prefix_caching,
            emit=emit,
        )
        self.scheduler = scheduler_of(core, config, emit)

    def step(self, runner: Runner, step_cost: StepCost) -> dict[str, int]:
        """Run one step, and let its time pass. Return who ended with it, and their output tokens."""
        plan = self.scheduler.schedule(self.clock())
        assert plan.num_rows, "the oldest request always gets on"
        result = runner.run(plan)
        self.clock.advance(step_cost(plan))
        now = self.clock()
        got_tokens = self.scheduler.apply(result, now)
        tell_tokens(self._emit, got_tokens, now, self.scheduler.core.block_size)
        self.tally.look(self.scheduler, now)
        return {one.request_id: one.num_output_tokens for one in got_tokens if one.finish_reason is not None}


class _Run:
    """A workload on its way through a fleet.

    What happens next is what comes first in time: the router is told something, a request comes, or a replica begins a
    step. Of one moment it is in this order, so that a request knows all that is told by then, and a step all requests.
    """

    def __init__(
        self,
        coming: Arrivals,
        fleet: Fleet,
        step_cost: StepCost,
        runner: Runner,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._coming = coming
        self._fleet = fleet
        self._step_cost = step_cost
        self._runner = runner
        self._progress = progress
        self._num_ended = 0
        self._held = PrefixIndex()
        self._block_size = fleet.replica.block_size
        policy = ROUTING_POLICIES[fleet.routing]()
        self._sees_prefixes = policy.sees_prefixes
        cache_tokens = fleet.replica.num_blocks * self._block_size
        self._router = Router(policy, self._held, block_size=self._block_size, cache_tokens=cache_tokens)
        self._replicas = {name: _Replica(name, fleet.replica) for name in _names(fleet.num_replicas)}
        for name in self._replicas:
            self._router.add(name)
            self._held.begin(name)
        self._notes: list[tuple[float, int, Callable[[], object]]] = []
        self._orders = count()
        self._steps: list[tuple[float, str]] = []  # of each replica that has work, when it begins its next step
        self._busy: set[str] = set()

    def to_the_end(self) -> FleetReport:
        """Run all requests, and return what they met."""
        check_fit(self._coming.most_tokens, next(iter(self._replicas.values())).scheduler)
        while self._coming or self._steps or self._notes:
            note_s = self._notes[0][0] if self._notes else math.inf
            step_s = self._steps[0][0] if self._steps else math.inf
            if note_s <= min(step_s, self._coming.next_s):
                heappop(self._notes)[2]()
            elif self._coming.next_s <= step_s:
                now = self._coming.next_s
                for request in self._coming.take(now):
                    self._send(request, now)
            else:
                self._step(self._replicas[heappop(self._steps)[1]])
        ttfts_s = sorted(ttft_s for each in self._replicas.values() for ttft_s in each.tally.ttfts_s)
        return FleetReport(
            routing=self._fleet.routing,
            replicas=tuple(each.tally.report() for each in self._replicas.values()),
            ttft_p50_s=percentile(ttfts_s, 50),
            ttft_p95_s=percentile(ttfts_s, 95),
            num_choices=dict(self._router.num_choices),
        )

    def _send(self, request: Request, now: float) -> None:
        hashes = block_digests(request, self._block_size) if self._sees_prefixes else ()
        choice = self._router.route(request.request_id, Prompt(hashes, request.num_prompt_tokens), now)
        replica = self._replicas[choice.replica]
        replica.clock.advance_to(now)
        replica.scheduler.add(request)
        if replica.name not in self._busy:
            self._busy.add(replica.name)
            heappush(self._steps, (replica.clock(), replica.name))

    def _step(self, replica: _Replica) -> None:
        ended = replica.step(self._runner, self._step_cost)
        now = replica.clock()
        self._tell_later(now, replica, ended)
        for over in self._coming.ended(ended, now):
            for each in self._replicas.values():
                each.scheduler.end_session(over)
        if replica.scheduler.has_work:
            heappush(self._steps, (now, replica.name))
        else:
            self._busy.discard(replica.name)
        if ended and self._progress is not None:
            self._num_ended += len(ended)
            self._progress(self._num_ended)

    def _tell_later(self, now: float, replica: _Replica, ended: dict[str, int]) -> None:
        """Have the router told of a step that ends at ``now``: it is planned and run here before others get there."""
        watcher, router = replica.watcher, self._router
        started, watcher.started = watcher.started, []
        changes, watcher.changes = watcher.changes, []
        if started or ended:

            def tell() -> None:
                for request_id in started:
                    router.started(request_id)
                for request_id, num_output_tokens in ended.items():
                    router.ended(request_id, now, num_output_tokens)

            heappush(self._notes, (now, next(self._orders), tell))
        if changes and self._sees_prefixes:
            batch = _Batch(now, changes)
            tell_changes: Callable[[], object] = partial(self._held.apply, replica.name, batch)
            heappush(self._notes, (now + self._fleet.event_delay_s, next(self._orders), tell_changes))


def block_digests(request: Request, block_size: int) -> list[bytes]:
    """Return what names the whole blocks of a prompt (``kv/names.py``), each with all that is before it."""
    packed = request.token_ids[: request.num_prompt_tokens].tobytes()
    digest, stride = root_digest(request.namespace), block_size * TOKEN_BYTES
    digests: list[bytes] = []
    for end in range(stride, len(packed) + 1, stride):
        digest = path_digest(digest, packed[end - stride : end])
        digests.append(digest)
    return digests


def _names(num_replicas: int) -> list[str]:
    width = len(str(num_replicas - 1))
    return [f"replica-{index:0{width}}" for index in range(num_replicas)]
