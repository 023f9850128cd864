"""ConnectorPlanner: which blocks the host's memory holds for vLLM, what a step copies, and what slow tiers are asked.

It decides only, in the process of vLLM's scheduler: no tensors, no I/O, no clock. Host blocks are the
blocks of a :class:`~pagefold.kv.KVCore`, so the tree of prefixes, the eviction policy and the audits are those of
Pagefold's own engine. A block's key there is vLLM's hash of it, which covers its tokens, all tokens before it, its
adapter, its pictures and its salt.

The life of a block here::

    plan_step   a host block is taken for it, and promised: nobody finds it yet
    apply       the worker has written it: it is found from now on. Or not: then it never was
    lookup      a request finds the blocks of its path that are written, in a row from the first on
    begin_load  they are held, and copied before the step computes; let go of when the worker has reported

What slow tiers hold is brought into host blocks while a request waits, and then is as all that the host holds. So a
step never waits for a disk, and vLLM is never promised what is not in memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from pagefold.integrations.vllm.connector_orders import FetchOrder, LookOrder, StepOrders
from pagefold.kv import TOKEN_BYTES, Arbiter, FetchOp, KVCore, LinkModel, LoadOp, RequestFacts, StoreOp, WriteOp
from pagefold.kv.block import BlockId
from pagefold.kv.names import name_of, names_behind, root_digest
from pagefold.kv.policies import make_policy
from pagefold.kv.transfers import Fetched, Found, MissCause, Written

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.integrations.vllm.connector_orders import StepReport, WorkerFacts
    from pagefold.kv import BlockName, PrefixHit, Promise, SequenceCache
    from pagefold.kv.block import Node
    from pagefold.kv.transfers import Outcome

__all__ = ["KEY_BYTES", "ConnectorCounts", "ConnectorPlanner", "Progress", "path_of"]

KEY_BYTES = 32
"""Of a block's key here: as many as a digest has."""

_KEY_TOKENS = KEY_BYTES // TOKEN_BYTES
"""What the core takes a key for: so many packed tokens."""

_DISK, _REMOTE = "disk", "remote"

_WRITING_SHARE = 4
"""At most one host block in so many is being written to slow tiers."""
_ARRIVING_SHARE = 2
"""At most one host block in so many is on its way in, or held by a request that waits."""
_MOST_UNWRITTEN = 1 << 14
"""Paths that wait to be written to slow tiers; of more, the oldest are left out."""
_LEAST_PATIENCE_S = 0.1
"""How long a request waits though nothing arrives, at least: a report comes once a step of vLLM's."""
_LOOK_PATIENCE_S = 2.0
"""How long a request waits to be told what a remote tier has."""
_COMPUTE_S_PER_TOKEN = 1e-3
"""What prefilling is thought to take before the first step was measured."""


def path_of(hashes: Sequence[bytes], num_blocks: int, hashes_per_block: int = 1, before: bytes = b"") -> bytes:
    """Return the keys of the first blocks of a request, one behind the other.

    Args:
        hashes: vLLM's, each of which covers all tokens before it.
        num_blocks: how many blocks.
        hashes_per_block: vLLM may hash parts of a block: the last one's covers the block.
        before: the keys of the first of them, if they are known.
    """
    known = len(before) // KEY_BYTES
    if known >= num_blocks:
        return before[: num_blocks * KEY_BYTES]
    keys = (bytes(hashes[(index + 1) * hashes_per_block - 1]) for index in range(known, num_blocks))
    return before + b"".join(
        key if len(key) == KEY_BYTES else blake2b(key, digest_size=KEY_BYTES).digest() for key in keys
    )


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


@dataclass
class ConnectorCounts:
    """What has happened since the start, in blocks where nothing else is said.

    Attributes:
        num_loaded: restored from the host's memory into vLLM's.
        num_stored: copied from vLLM's into the host's memory.
        num_damaged: whose bytes had changed in the host's memory: computed anew.
        num_unroomed: not stored for want of room.
        num_fetched, num_lost: brought from slow tiers, and asked for in vain.
        num_written: that at least one slow tier keeps.
        num_unwritten: left out, since slow tiers did not keep up.
    """

    num_loaded: int = 0
    num_stored: int = 0
    num_damaged: int = 0
    num_unroomed: int = 0
    num_fetched: int = 0
    num_lost: int = 0
    num_written: int = 0
    num_unwritten: int = 0


class _Fetch:
    """Blocks of one path that come from a slow tier, for a request that waits.

    Attributes:
        ticket: of the order.
        tier: where they come from.
        cache: holds the path before them, and their host blocks.
        promise: of them.
        path: keys up to the last of them.
        num_before: blocks of the path before them.
        op_at: by host block, which of them comes there.
        arrived: which of them are here.
        left: host blocks of which nothing has been heard.
        begun_s, last_s, patience_s: when it began, when something last arrived, how long the request waits for nothing.
        is_begun: whether the worker has it: steps that others compute are nobody's delay.
        is_waited: whether the request still waits.
        num_here: how many are here in a row, once it is over; None before.
    """

    def __init__(self, ticket: int, tier: str, cache: SequenceCache, promise: Promise, path: bytes) -> None:
        self.ticket, self.tier, self.cache, self.promise, self.path = ticket, tier, cache, promise, path
        self.num_before = promise.first
        host_ids = cache.tables[0].block_ids[self.num_before :]
        self.op_at: dict[int, int] = {host_id: index for index, host_id in enumerate(host_ids)}
        self.arrived: set[int] = set()
        self.left = set(host_ids)
        self.begun_s = self.last_s = self.patience_s = 0.0
        self.is_begun = False
        self.is_waited = True
        self.num_here: int | None = None


class _Request:
    """What is known of a request of vLLM's.

    Attributes:
        cursor: so many of its first blocks need not be looked at again.
        is_told: whether the policy was told of its use.
        num_local: blocks that vLLM had itself when it looked for more.
        may_store: whether what it has may be stored: not after a reset that it lived through.
        fetch: what is brought for it, or was and is held.
        look: the ticket of what a remote tier was asked for it; -1 for none.
        look_until_s: when it waits for the answer no longer.
        was_asked: whether slow tiers were asked since it was admitted last.
        num_found: blocks that the remote tier has said to have; -1 before.
        num_fetched: blocks of its load that came from a slow tier, and which.
    """

    def __init__(self) -> None:
        self.cursor = self.num_local = 0
        self.is_told = False
        self.may_store = True
        self.fetch: _Fetch | None = None
        self.look = -1
        self.look_until_s = 0.0
        self.was_asked = False
        self.num_found = -1
        self.num_fetched: tuple[int, str] = (0, "")


class _Store(NamedTuple):
    """Blocks of one path that a step stores."""

    request_id: str
    cache: SequenceCache
    promise: Promise
    path: bytes


class _Load(NamedTuple):
    """Blocks of one path that a step restores."""

    request_id: str
    cache: SequenceCache
    path: bytes
    ops: Sequence[LoadOp]


class _Write(NamedTuple):
    """Blocks of one path that slow tiers are given.

    Attributes:
        cache: holds them.
        left: host blocks of which nothing has been heard.
        generation: resets until then.
    """

    cache: SequenceCache
    left: set[int]
    generation: int


@dataclass
class _Flight:
    """What a step does that has not been reported."""

    loads: list[_Load] = field(default_factory=list)
    stores: list[_Store] = field(default_factory=list)
    fetches: list[_Fetch] = field(default_factory=list)


class ConnectorPlanner:
    """Decides for one engine of vLLM.

    Args:
        facts: of the workers.
        block_size: tokens of vLLM's blocks.
        policy: who makes room first, by name.

    Attributes:
        core: which host block holds what.
        arbiter: weighs bringing blocks from slow tiers against computing them.
        counts: what has happened.
    """

    def __init__(self, facts: WorkerFacts, block_size: int, policy: str) -> None:
        self.core = KVCore(
            facts.num_host_blocks, block_size=_KEY_TOKENS, policy=make_policy(policy, facts.num_host_blocks)
        )
        self.arbiter = Arbiter(facts.block_bytes, block_size, compute_s_per_token=_COMPUTE_S_PER_TOKEN)
        for link in facts.links:
            self.arbiter.links[link.tier] = LinkModel(link.latency_s, link.bytes_per_s)
        self.counts = ConnectorCounts()
        self._facts = facts
        self._tiers = [link.tier for link in facts.links]
        self._namespace = facts.layout
        self._root = root_digest(facts.layout)
        self._on_disk: OrderedDict[bytes, None] = OrderedDict.fromkeys(facts.on_disk)
        self._requests: dict[str, _Request] = {}
        self._flights: dict[int, _Flight] = {}
        self._next = _Flight()
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_at: dict[int, _Fetch] = {}  # by host block
        self._orders: list[FetchOrder] = []
        self._looks: list[LookOrder] = []
        self._looking: dict[int, str] = {}  # ticket -> request
        self._dropped: list[int] = []
        self._unwritten: deque[tuple[bytes, int]] = deque(maxlen=_MOST_UNWRITTEN)  # path, blocks before
        self._writes: dict[int, _Write] = {}  # by host block
        self._step = self._ticket = 0
        self._acknowledged = -1
        self._generation = 0
        self._clears = False

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
        request = self._requests.setdefault(request_id, _Request())
        request.cursor = 0
        request.may_store = True
        request.num_local = num_local
        num_path = len(path) // KEY_BYTES
        if num_local >= num_path:
            return 0
        nodes = self._written(path)
        if self._tiers and len(nodes) < num_path and self._waits(request_id, request, path, nodes, num_local, now):
            return None
        return max(0, len(self._written(path)) - num_local)

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
        request = self._requests.setdefault(request_id, _Request())
        end = num_local + num_loaded
        if num_loaded:
            path = path[: end * KEY_BYTES]
            hit = self._match(path)
            assert len(self._written_of(hit)) >= end, "vLLM restores what was not promised"
            cache, _ = self.core.acquire(hit, owner=request_id)
            host_ids = cache.tables[0].block_ids
            ops = [LoadOp(host_ids[index], _vllm(block_ids[index])) for index in range(num_local, end)]
            self._next.loads.append(_Load(request_id, cache, path, ops))
            fetch = request.fetch
            if fetch is not None and fetch.num_here is not None:
                request.num_fetched = min(num_loaded, max(0, end - fetch.num_before)), fetch.tier
        request.was_asked = False
        self._let_go(request)

    def num_local(self, request_id: str) -> int:
        """Return the blocks that vLLM had of a request when :meth:`lookup` was asked last."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.num_local

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
        writes = self._plan_writes()
        orders = StepOrders(
            self._step,
            [op for load in flight.loads for op in load.ops],
            stores,
            self._looks,
            self._orders,
            self._dropped,
            writes,
            self._clears,
            self._acknowledged,
            num_tokens,
            num_requests,
        )
        self._looks, self._orders, self._dropped, self._clears = [], [], [], False
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
            self.arbiter.learn_compute(report.num_tokens, report.num_requests, report.seconds)
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
            for fetch in flight.fetches:
                fetch.is_begun = True
                fetch.last_s = now
        for outcome in report.outcomes:
            self._note(outcome, now)

    def finish(self, request_id: str) -> None:
        """Forget a request: it has ended, or was aborted."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._let_go(request)
            self._looking.pop(request.look, None)

    def reset(self) -> None:
        """Forget every block, those of slow tiers too; what runs now is never stored."""
        self.core.forgetting.reset()
        self._on_disk.clear()
        self._unwritten.clear()
        self._generation += 1
        self._clears = bool(self._tiers)
        for request in self._requests.values():
            request.cursor = 0
            request.may_store = False
            self._let_go(request)

    # Stores.

    def _plan_store(self, one: Progress, flight: _Flight) -> list[StoreOp]:
        """Take host blocks for the blocks of a request that the host does not hold, as far as there is room."""
        request = self._requests.setdefault(one.request_id, _Request())
        if one.num_blocks <= request.cursor or not request.may_store:
            return []
        hit = self._match(one.path)
        num_known = len(hit.nodes)
        if any(self._is_coming(node) for node in reversed(hit.nodes)):
            return []  # what comes from a tier may not come: nothing is promised behind it
        num_missing = one.num_blocks - num_known
        if not num_missing:
            request.cursor = one.num_blocks
            if request.is_told:
                return []
        elif not self.core.num_available:
            return []
        cache, _ = self.core.acquire(hit, owner=one.request_id)
        num_new = min(num_missing, self.core.num_available)
        while num_new and not self.core.extend(cache, num_known * _KEY_TOKENS, (num_known + num_new) * _KEY_TOKENS):
            num_new //= 2
        path = one.path[: (num_known + num_new) * KEY_BYTES]
        promise = self.core.publishing.promise(cache, path, (num_known + num_new) * _KEY_TOKENS) if num_new else None
        if promise is None:
            self._release(one.request_id, cache)
            return []
        self.counts.num_unroomed += num_missing - num_new
        request.cursor = num_known + num_new
        flight.stores.append(_Store(one.request_id, cache, promise, path))
        host_ids = cache.tables[0].block_ids
        return [
            StoreOp(_vllm(one.block_ids[index]), host_ids[index]) for index in range(num_known, num_known + num_new)
        ]

    def _commit_stores(self, flight: _Flight) -> None:
        for store in flight.stores:
            num_before = store.promise.first
            self.core.publishing.commit(store.promise)
            self.counts.num_stored += store.promise.num_blocks - num_before
            if self._tiers and store.cache.tail is not None:
                if len(self._unwritten) == _MOST_UNWRITTEN:
                    self.counts.num_unwritten += 1
                self._unwritten.append((store.path, num_before))
            self._release(store.request_id, store.cache)

    def _abandon_stores(self, flight: _Flight) -> None:
        """Take back what a step did not store, and what later ones were to: that may lean on it.

        A worker does not store what was planned before a failed step was known of.
        """
        later = [self._next, *reversed(self._flights.values()), flight]
        for other in later:
            while other.stores:
                store = other.stores.pop()
                self.core.publishing.abandon(store.promise)
                self._release(store.request_id, store.cache)
        for request in self._requests.values():
            request.cursor = 0

    # Loads.

    def _end_load(self, load: _Load, report: StepReport) -> None:
        damaged = [op for op in load.ops if op.host_id in report.damaged]
        self.counts.num_loaded += len(load.ops) - len(damaged)
        self.counts.num_damaged += len(damaged)
        if damaged:
            self.core.forgetting.distrust(load.cache, self._namespace, load.path)
        self._release(load.request_id, load.cache)

    # Slow tiers.

    def _waits(  # noqa: PLR0911, PLR0913, PLR0917 - all that is known of the one who asks
        self, request_id: str, request: _Request, path: bytes, nodes: list[Node], num_local: int, now: float
    ) -> bool:
        """Whether a request waits for what slow tiers have of its path."""
        fetch = request.fetch
        if fetch is not None:
            if fetch.num_here is None and fetch.is_begun and now - fetch.last_s > fetch.patience_s:
                self.arbiter.num_late += 1
                self._let_go(request)
                return False
            return fetch.num_here is None
        if request.look >= 0:
            if request.num_found < 0:
                if now < request.look_until_s:
                    return True
                self._looking.pop(request.look, None)
            request.look = -1
            return request.num_found > 0 and self._begin_fetch(request, path, nodes, _REMOTE, request.num_found, now)
        if request.was_asked or len(nodes) < num_local:
            return False
        request.was_asked = True
        names = self._names_behind(path, nodes)
        num_on_disk = next((at for at, name in enumerate(names) if name.digest not in self._on_disk), len(names))
        if num_on_disk:
            return self._begin_fetch(request, path, nodes, _DISK, num_on_disk, now)
        if _REMOTE in self._tiers and self.arbiter.pays(_REMOTE):
            request.look = self._new_ticket()
            request.num_found = -1
            request.look_until_s = now + _LOOK_PATIENCE_S
            self._looking[request.look] = request_id
            self._looks.append(LookOrder(request.look, _REMOTE, names))
            return True
        return False

    def _begin_fetch(  # noqa: PLR0913, PLR0917 - as above
        self, request: _Request, path: bytes, nodes: list[Node], tier: str, num: int, now: float
    ) -> bool:
        """Have blocks brought behind ``nodes``, as many as is sooner than to compute them; whether there are any."""
        hit = self._match(path)
        if len(hit.nodes) > len(nodes):
            return False  # somebody stores or brings the next ones already
        queued = {tier: sum(len(fetch.left) for fetch in self._fetches.values()) * self._facts.block_bytes}
        num = min(
            num, self._facts.num_host_blocks // _ARRIVING_SHARE - sum(len(one.op_at) for one in self._fetches.values())
        )
        verdict = self.arbiter.weigh([tier] * max(0, num), queued, lambda num_blocks: num_blocks)
        num = min(verdict.num_blocks, self.core.num_available)
        if not num:
            return False
        num_before = len(nodes)
        cache, _ = self.core.acquire(hit)
        while num and not self.core.extend(cache, num_before * _KEY_TOKENS, (num_before + num) * _KEY_TOKENS):
            num //= 2
        path = path[: (num_before + num) * KEY_BYTES]
        promise = self.core.publishing.promise(cache, path, (num_before + num) * _KEY_TOKENS) if num else None
        if promise is None:
            self.core.release(cache)
            return False
        fetch = request.fetch = _Fetch(self._new_ticket(), tier, cache, promise, path)
        fetch.begun_s = fetch.last_s = now
        fetch.patience_s = max(verdict.patience_s, _LEAST_PATIENCE_S)
        self._next.fetches.append(fetch)
        self._fetches[fetch.ticket] = fetch
        self._fetch_at.update(dict.fromkeys(fetch.op_at, fetch))
        names = self._names_behind(path, nodes)
        ops = [FetchOp(host_id, name) for host_id, name in zip(fetch.op_at, names, strict=True)]
        self._orders.append(FetchOrder(fetch.ticket, tier, ops))
        return True

    def _note(self, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, Fetched):
            self._note_fetched(outcome, now)
        elif isinstance(outcome, Found):
            request = self._requests.get(self._looking.pop(outcome.ticket, ""))
            if request is not None and request.look == outcome.ticket:
                request.num_found = outcome.num_blocks
        else:
            self._note_written(outcome)

    def _note_fetched(self, outcome: Fetched, now: float) -> None:
        num_bytes = sum(not isinstance(found, MissCause) for found in outcome.found) * self._facts.block_bytes
        self.arbiter.links[outcome.tier].learn(num_bytes, outcome.seconds)
        for op, found in zip(outcome.ops, outcome.found, strict=True):
            fetch = self._fetch_at.pop(op.host_id)
            fetch.left.discard(op.host_id)
            if isinstance(found, MissCause):
                if outcome.tier == _DISK:
                    self._on_disk.pop(op.name.digest, None)
            else:
                fetch.last_s = now
                fetch.arrived.add(fetch.op_at[op.host_id])
                if outcome.tier == _DISK and op.name.digest in self._on_disk:
                    self._on_disk.move_to_end(op.name.digest)
            if not fetch.left:
                self._end_fetch(fetch, now)

    def _end_fetch(self, fetch: _Fetch, now: float) -> None:
        """Let what has arrived in a row be found, and give the other host blocks back."""
        del self._fetches[fetch.ticket]
        num_here = next((at for at in range(len(fetch.op_at)) if at not in fetch.arrived), len(fetch.op_at))
        self.counts.num_fetched += num_here
        self.counts.num_lost += len(fetch.op_at) - num_here
        cache, publishing = fetch.cache, self.core.publishing
        publishing.abandon(fetch.promise)
        if num_here and cache.tail is not None:
            again = publishing.promise(cache, fetch.path, (fetch.num_before + num_here) * _KEY_TOKENS)
            if again is not None:
                publishing.commit(again)
        self.core.shrink(cache, (fetch.num_before + num_here) * _KEY_TOKENS)
        fetch.num_here = num_here
        if fetch.is_waited:
            self.arbiter.account(num_here, now - fetch.begun_s)
        else:
            self.core.release(cache)

    def _note_written(self, outcome: Written) -> None:
        is_on_disk = outcome.kept.get(_DISK, 0) > 0
        self.counts.num_written += outcome.num_kept
        self.counts.num_unwritten += len(outcome.ops) - outcome.num_kept
        for op in outcome.ops:
            write = self._writes.pop(op.host_id)
            write.left.discard(op.host_id)
            if is_on_disk and write.generation == self._generation:
                self._on_disk[op.name.digest] = None
                self._on_disk.move_to_end(op.name.digest)
                if len(self._on_disk) > max(1, self._facts.most_on_disk):
                    self._on_disk.popitem(last=False)
            if not write.left:
                self._release("", write.cache)

    def _plan_writes(self) -> list[WriteOp]:
        """Give slow tiers what was stored, as long as they keep up."""
        ops: list[WriteOp] = []
        most = max(1, self._facts.num_host_blocks // _WRITING_SHARE)
        while self._unwritten and len(self._writes) < most:
            path, num_before = self._unwritten.popleft()
            hit = self._match(path)
            hit = hit._replace(nodes=self._written_of(hit))
            fresh = [node for node in hit.nodes[num_before:] if name_of(node).digest not in self._on_disk]
            fresh = [node for node in fresh if _host_id(node) not in self._writes]
            self.counts.num_unwritten += len(path) // KEY_BYTES - len(hit.nodes)
            if fresh:
                cache, _ = self.core.acquire(hit)
                write = _Write(cache, {_host_id(node) for node in fresh}, self._generation)
                self._writes.update(dict.fromkeys(write.left, write))
                ops += [WriteOp(_host_id(node), name_of(node)) for node in fresh]
        return ops

    # Inside.

    def _match(self, path: bytes) -> PrefixHit:
        """Return what the core has of a path, whole blocks alone; the last ones are perhaps not written yet."""
        hit = self.core.match(self._namespace, path, len(path) // TOKEN_BYTES)
        return hit._replace(partial=None, num_partial_tokens=0)

    def _written_of(self, hit: PrefixHit) -> list[Node]:
        nodes = hit.nodes
        return nodes[: next((at for at, node in enumerate(nodes) if not node.committed), len(nodes))]

    def _written(self, path: bytes) -> list[Node]:
        return self._written_of(self._match(path))

    def _is_coming(self, node: Node) -> bool:
        return not node.committed and _host_id(node) in self._fetch_at

    def _names_behind(self, path: bytes, nodes: list[Node]) -> list[BlockName]:
        parent = name_of(nodes[-1]).digest if nodes else self._root
        return names_behind(self._root, parent, path[len(nodes) * KEY_BYTES :], KEY_BYTES)

    def _let_go(self, request: _Request) -> None:
        """A request does not wait any more, nor does it hold what was brought for it."""
        fetch, request.fetch = request.fetch, None
        if fetch is None:
            return
        fetch.is_waited = False
        if fetch.num_here is None:
            self._dropped.append(fetch.ticket)
        else:
            self.core.release(fetch.cache)

    def _release(self, request_id: str, cache: SequenceCache) -> None:
        """Let go of a cache; the policy is told once that the request has used its path."""
        request = self._requests.get(request_id)
        cache.facts = RequestFacts(is_repeat=request is None or request.is_told)
        if request is not None:
            request.is_told = True
        self.core.release(cache)

    def _new_ticket(self) -> int:
        self._ticket += 1
        return self._ticket


def _host_id(node: Node) -> int:
    """Return the host block that holds a node's block."""
    block = node.blocks[0]
    assert block is not None, "all of a path is kept"
    return block.block_id


def _vllm(block_id: int) -> BlockId:
    """Return a block id of vLLM's as the type that moves have."""
    return BlockId(block_id)
