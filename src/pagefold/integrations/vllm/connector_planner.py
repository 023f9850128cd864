"""ConnectorPlanner: which blocks the host's memory holds for vLLM, what a step copies, and what slow tiers are asked.

It decides only, in the process of vLLM's scheduler: no tensors, no I/O, no clock. Host blocks are the blocks of a
:class:`~pagefold.kv.KVCore` (``connector_directory.py``), so the tree of prefixes, the eviction policy and the audits
are those of Pagefold's own engine; slow tiers are ``connector_tiering.py``'s.

The life of a block here::

    plan_step   a host block is taken for it, and promised: nobody finds it yet
    apply       the worker has written it: it is found from now on. Or not: then it never was
    lookup      a request finds the blocks of its path that are written, in a row from the first on
    begin_load  they are held, and copied before the step computes; let go of when the worker has reported

What slow tiers hold is brought into host blocks while a request waits, and then is as all that the host holds. So a
step never waits for a disk, and vLLM is never promised what is not in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pagefold.integrations.vllm.connector_directory import KEY_BYTES, HostDirectory, written_part
from pagefold.integrations.vllm.connector_orders import StepOrders
from pagefold.integrations.vllm.connector_tiering import ConnectorRequest, ConnectorTiering
from pagefold.kv import LoadOp, RequestFacts, StoreOp
from pagefold.kv.block import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.integrations.vllm.connector_directory import Promised
    from pagefold.integrations.vllm.connector_orders import StepReport, WorkerFacts
    from pagefold.kv import SequenceCache

__all__ = ["ConnectorPlanner", "Progress"]


class Progress(NamedTuple):
    """How far a request will be when the step has run.

    Attributes:
        request_id: vLLM's.
        path: keys of its whole blocks that will be computed.
        block_ids: vLLM's blocks of them.
    """

    request_id: str
    path: bytes
    block_ids: Sequence[int]

    @property
    def num_blocks(self) -> int:
        """How many whole blocks will be computed."""
        return len(self.path) // KEY_BYTES


class _Store(NamedTuple):
    """Blocks of one path that a step stores."""

    request_id: str
    promised: Promised


class _Load(NamedTuple):
    """Blocks of one path that a step restores."""

    request_id: str
    cache: SequenceCache
    path: bytes
    ops: Sequence[LoadOp]


@dataclass
class _Flight:
    """What a step does that has not been reported."""

    loads: list[_Load] = field(default_factory=list)
    stores: list[_Store] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)


class ConnectorPlanner:
    """Decides for one engine of vLLM.

    Args:
        facts: of the workers.
        block_size: tokens of vLLM's blocks.
        policy: who makes room first, by name.

    Attributes:
        core: which host block holds what.
        tiering: decides about slow tiers.
        counts: what has happened.
    """

    def __init__(self, facts: WorkerFacts, block_size: int, policy: str) -> None:
        self._directory = HostDirectory(facts.num_host_blocks, policy, facts.layout)
        self.core = self._directory.core
        self.tiering = ConnectorTiering(facts, block_size, self._directory)
        self.counts = self.tiering.counts
        self._requests: dict[str, ConnectorRequest] = {}
        self._flights: dict[int, _Flight] = {}
        self._next = _Flight()
        self._step = 0
        self._acknowledged = -1

    # What there is.

    @property
    def num_held(self) -> int:
        """How many blocks the host's memory holds or is about to."""
        return self.core.pool.num_blocks - self.core.pool.num_free

    @property
    def num_waiting(self) -> int:
        """How many requests wait for slow tiers."""
        return sum(request.fetch is not None and request.fetch.num_here is None for request in self._requests.values())

    # What vLLM's scheduler asks.

    def lookup(self, request_id: str, path: bytes, num_local: int, now: float) -> int | None:
        """Return how many blocks behind the first ``num_local`` can be restored; None to be asked again next step.

        Args:
            request_id: vLLM's.
            path: keys of the blocks that may be restored: not all of a prompt, whose last token is computed.
            num_local: blocks that vLLM has itself.
            now: seconds, monotonic.
        """
        request = self._requests.setdefault(request_id, ConnectorRequest())
        request.cursor = 0
        request.may_store = True
        request.num_local = num_local
        num_path = len(path) // KEY_BYTES
        if num_local >= num_path:
            return 0
        nodes = self._directory.written(path)
        if self.tiering.is_on and len(nodes) < num_path:
            if self.tiering.waits(request, path, nodes, num_local, now):
                return None
            nodes = self._directory.written(path)
        return max(0, len(nodes) - num_local)

    def begin_load(
        self, request_id: str, path: bytes, block_ids: Sequence[int], num_local: int, num_loaded: int
    ) -> None:
        """Let the next step restore blocks that :meth:`lookup` found.

        Args:
            request_id: vLLM's.
            path: as it was looked up.
            block_ids: vLLM's blocks of the request, from its first on.
            num_local: blocks that vLLM has itself.
            num_loaded: how many behind them are restored; 0 if vLLM has chosen not to.
        """
        request = self._requests.setdefault(request_id, ConnectorRequest())
        end = num_local + num_loaded
        if num_loaded:
            path = path[: end * KEY_BYTES]
            hit = self._directory.match(path)
            assert len(written_part(hit)) >= end, "vLLM restores what was not promised"
            cache, _ = self.core.acquire(hit, owner=request_id)
            host_ids = cache.tables[0].block_ids
            ops = [LoadOp(host_ids[index], _vllm(block_ids[index])) for index in range(num_local, end)]
            self._next.loads.append(_Load(request_id, cache, path, ops))
            fetch = request.fetch
            if fetch is not None and fetch.num_here is not None:
                request.num_fetched = min(num_loaded, max(0, end - fetch.promised.num_before)), fetch.tier
        request.was_asked = False
        self.tiering.let_go(request)

    def num_local(self, request_id: str) -> int:
        """Return the blocks that vLLM had of a request when :meth:`lookup` was asked last."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.num_local

    def num_kept(self, request_id: str) -> int:
        """Return how many first blocks of a request :meth:`plan_step` has no more to do about, for now."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.cursor

    def sources(self, request_id: str) -> tuple[int, str]:
        """Return how many blocks of a request's load came from a slow tier, and which: so many of the last ones."""
        request = self._requests.get(request_id)
        return (0, "") if request is None else request.num_fetched

    def plan_step(self, progress: Iterable[Progress], num_tokens: int = 0, num_requests: int = 0) -> StepOrders:
        """Return what the worker does about the step that vLLM has planned.

        Args:
            progress: of the requests that the step computes.
            num_tokens: that the step computes.
            num_requests: that it computes them of.
        """
        flight, self._next = self._next, _Flight()
        stores: list[StoreOp] = []
        for one in progress:
            stores += self._plan_store(one, flight)
        writes = self.tiering.plan_writes()
        asked = self.tiering.take_orders()
        flight.tickets = [order.ticket for order in asked.fetches]
        orders = StepOrders(
            self._step,
            [op for load in flight.loads for op in load.ops],
            stores,
            asked.looks,
            asked.fetches,
            asked.dropped,
            writes,
            asked.clears,
            self._acknowledged,
            num_tokens,
            num_requests,
        )
        if not orders.is_empty:
            self._flights[self._step] = flight
            self._step += 1
        return orders

    def apply(self, report: StepReport, now: float) -> None:
        """Take note of what the worker has done.

        Args:
            report: the worker's, in the order of the steps.
            now: seconds, monotonic.
        """
        if report.seconds > 0:
            self.tiering.arbiter.learn_compute(report.num_tokens, report.num_requests, report.seconds)
        flight = self._flights.pop(report.step, None)
        if flight is not None:
            if report.failed:
                self._acknowledged = max(self._acknowledged, report.step)
                for request in self._requests.values():
                    request.cursor = 0
            if report.failed or not report.stored:
                self._abandon_stores(flight)
            else:
                self._commit_stores(flight)
            for load in flight.loads:
                self._end_load(load, report)
            self.tiering.begun(flight.tickets, now)
        for outcome in report.outcomes:
            self.tiering.note(outcome, now)

    def finish(self, request_id: str) -> None:
        """Forget a request: it has ended, or was aborted."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.tiering.finish(request)

    def reset(self) -> None:
        """Forget every block, those of slow tiers too; what runs now is never stored."""
        self.core.forgetting.reset()
        self.tiering.reset()
        for request in self._requests.values():
            request.cursor = 0
            request.may_store = False
            self.tiering.let_go(request)

    # Stores.

    def _plan_store(self, one: Progress, flight: _Flight) -> list[StoreOp]:
        """Take host blocks for the blocks of a request that the host does not hold, as far as there is room."""
        request = self._requests.setdefault(one.request_id, ConnectorRequest())
        if one.num_blocks <= request.cursor or not request.may_store:
            return []
        hit = self._directory.match(one.path)
        if any(self.tiering.is_coming(node) for node in reversed(hit.nodes)):
            return []  # what comes from a tier may not come: nothing is promised behind it
        num_missing = one.num_blocks - len(hit.nodes)
        if not num_missing:
            request.cursor = one.num_blocks
            if not request.is_told:
                self._release(one.request_id, self.core.acquire(hit, owner=one.request_id)[0])
            return []
        promised = self._directory.promise(hit, one.path, num_missing, owner=one.request_id)
        if promised is None:
            return []
        host_ids, start = promised.host_ids, promised.num_before
        self.counts.num_unroomed += num_missing - len(host_ids)
        request.cursor = start + len(host_ids)
        flight.stores.append(_Store(one.request_id, promised))
        return [StoreOp(_vllm(one.block_ids[at]), host_id) for at, host_id in enumerate(host_ids, start)]

    def _commit_stores(self, flight: _Flight) -> None:
        for request_id, promised in flight.stores:
            self.core.publishing.commit(promised.promise)
            self.counts.num_stored += len(promised.host_ids)
            if promised.cache.tail is not None:
                self.tiering.stored(promised.path, promised.num_before)
            self._release(request_id, promised.cache)

    def _abandon_stores(self, flight: _Flight) -> None:
        """Take back what a step did not store, and what later ones were to: that may lean on it.

        A worker does not store what was planned before a failed step was known of.
        """
        later = [self._next, *reversed(self._flights.values()), flight]
        for other in later:
            while other.stores:
                request_id, promised = other.stores.pop()
                self.core.publishing.abandon(promised.promise)
                self._release(request_id, promised.cache)
        for request in self._requests.values():
            request.cursor = 0

    # Loads.

    def _end_load(self, load: _Load, report: StepReport) -> None:
        damaged = [op for op in load.ops if op.host_id in report.damaged]
        self.counts.num_loaded += len(load.ops) - len(damaged)
        self.counts.num_damaged += len(damaged)
        if damaged:
            self.core.forgetting.distrust(load.cache, self._directory.namespace, load.path)
        self._release(load.request_id, load.cache)

    # Inside.

    def _release(self, request_id: str, cache: SequenceCache) -> None:
        """Let go of a cache; the policy is told once that the request has used its path."""
        request = self._requests.get(request_id)
        cache.facts = RequestFacts(is_repeat=request is None or request.is_told)
        if request is not None:
            request.is_told = True
        self.core.release(cache)


def _vllm(block_id: int) -> BlockId:
    """Return a block id of vLLM's as the type that moves have."""
    return BlockId(block_id)
