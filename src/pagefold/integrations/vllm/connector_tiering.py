"""ConnectorTiering: what slow tiers are asked for and given, for requests of vLLM that wait meanwhile.

It decides only. Whether to bring blocks or to compute them is the :class:`~pagefold.kv.Arbiter`'s to say.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagefold.integrations.vllm.connector_directory import KEY_BYTES, host_id_of, written_part
from pagefold.integrations.vllm.connector_orders import FetchOrder, LookOrder
from pagefold.kv import Arbiter, FetchOp, LinkModel, RequestFacts, WriteOp
from pagefold.kv.names import name_of
from pagefold.kv.transfers import Fetched, Found, MissCause, Written

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.integrations.vllm.connector_directory import HostDirectory, Promised
    from pagefold.integrations.vllm.connector_orders import WorkerFacts
    from pagefold.kv import SequenceCache
    from pagefold.kv.block import Node
    from pagefold.kv.transfers import Outcome

__all__ = ["ConnectorCounts", "ConnectorRequest", "ConnectorTiering", "Fetching"]

_DISK, _REMOTE = "disk", "remote"

_WRITING_SHARE = 4
"""At most one host block in so many is being written to slow tiers."""
_ARRIVING_SHARE = 2
"""At most one host block in so many is on its way in."""
_MOST_UNWRITTEN_BYTES = 1 << 26
"""Of the keys of paths that wait to be written to slow tiers; of more, the oldest paths are left out."""
_LEAST_PATIENCE_S = 0.1
"""How long a request waits though nothing arrives, at least: a report comes once a step of vLLM's."""
_LOOK_PATIENCE_S = 2.0
"""How long a request waits to be told what a remote tier has."""
_COMPUTE_S_PER_TOKEN = 1e-3
"""What prefilling is thought to take before the first step was measured."""


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


class Fetching:
    """Blocks of one path that come from a slow tier, for a request that waits.

    Attributes:
        ticket: of the order.
        tier: where they come from.
        promised: their host blocks.
        op_at: by host block, which of them comes there.
        arrived: which of them are here.
        left: host blocks of which nothing has been heard.
        begun_s: when it began.
        last_s: when something last arrived.
        patience_s: how long the request waits for nothing.
        is_begun: whether the worker has it: steps that others compute are nobody's delay.
        is_waited: whether the request still waits.
        num_here: how many are here in a row, once it is over; None before.
    """

    def __init__(self, ticket: int, tier: str, promised: Promised, now: float, patience_s: float) -> None:
        self.ticket, self.tier, self.promised = ticket, tier, promised
        self.op_at = {host_id: index for index, host_id in enumerate(promised.host_ids)}
        self.arrived: set[int] = set()
        self.left = set(self.op_at)
        self.begun_s = self.last_s = now
        self.patience_s = patience_s
        self.is_begun = False
        self.is_waited = True
        self.num_here: int | None = None


class ConnectorRequest:
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
        self.fetch: Fetching | None = None
        self.look = -1
        self.look_until_s = 0.0
        self.was_asked = False
        self.num_found = -1
        self.num_fetched: tuple[int, str] = (0, "")


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


class TierOrders(NamedTuple):
    """What slow tiers are asked in a step; see :class:`StepOrders`."""

    looks: list[LookOrder]
    fetches: list[FetchOrder]
    dropped: list[int]
    clears: bool


class ConnectorTiering:
    """Decides about slow tiers for one engine of vLLM.

    Args:
        facts: of the workers.
        block_size: tokens of vLLM's blocks.
        directory: of the host blocks.

    Attributes:
        is_on: whether there are any.
        arbiter: weighs bringing blocks from slow tiers against computing them.
        counts: what has happened, what the host alone does included.
    """

    def __init__(self, facts: WorkerFacts, block_size: int, directory: HostDirectory) -> None:
        self.arbiter = Arbiter(facts.block_bytes, block_size, compute_s_per_token=_COMPUTE_S_PER_TOKEN)
        for link in facts.links:
            self.arbiter.links[link.tier] = LinkModel(link.latency_s, link.bytes_per_s)
        self.is_on = bool(facts.links)
        self.counts = ConnectorCounts()
        self._directory = directory
        self._tiers = [link.tier for link in facts.links]
        self._num_host_blocks = facts.num_host_blocks
        self._most_on_disk = facts.most_on_disk
        self._on_disk: OrderedDict[bytes, None] = OrderedDict.fromkeys(facts.on_disk)
        self._fetches: dict[int, Fetching] = {}
        self._fetch_at: dict[int, Fetching] = {}  # by host block
        self._looking: dict[int, ConnectorRequest] = {}  # by ticket
        self._unwritten: deque[tuple[bytes, int]] = deque()  # path, blocks before
        self._unwritten_bytes = 0
        self._writes: dict[int, _Write] = {}  # by host block
        self._next = TierOrders([], [], [], clears=False)
        self._ticket = 0
        self._generation = 0

    def is_coming(self, node: Node) -> bool:
        """Whether a node's block is on its way in, and may not come."""
        return not node.committed and host_id_of(node) in self._fetch_at

    def take_orders(self) -> TierOrders:
        """Return what is asked in the step that is planned."""
        orders, self._next = self._next, TierOrders([], [], [], clears=False)
        return orders

    def begun(self, tickets: Iterable[int], now: float) -> None:
        """A worker has begun to bring these."""
        for ticket in tickets:
            fetch = self._fetches.get(ticket)
            if fetch is not None:
                fetch.is_begun = True
                fetch.last_s = now

    def stored(self, path: bytes, num_before: int) -> None:
        """Blocks of a path have come to the host, behind so many: slow tiers are given them as soon as they can be."""
        if self.is_on:
            self._unwritten.append((path, num_before))
            self._unwritten_bytes += len(path)
            while self._unwritten_bytes > _MOST_UNWRITTEN_BYTES:
                left_out, before = self._unwritten.popleft()
                self._unwritten_bytes -= len(left_out)
                self.counts.num_unwritten += len(left_out) // KEY_BYTES - before

    def reset(self) -> None:
        """Forget all that slow tiers have, and have them forget it."""
        self._on_disk.clear()
        self._unwritten.clear()
        self._unwritten_bytes = 0
        self._generation += 1
        self._next = self._next._replace(clears=self.is_on)

    def let_go(self, request: ConnectorRequest) -> None:
        """A request does not wait any more, nor does it hold what was brought for it."""
        fetch, request.fetch = request.fetch, None
        if fetch is None:
            return
        fetch.is_waited = False
        if fetch.num_here is None:
            self._next.dropped.append(fetch.ticket)
        else:
            self._directory.core.release(fetch.promised.cache)

    def finish(self, request: ConnectorRequest) -> None:
        """A request has ended."""
        self.let_go(request)
        self._looking.pop(request.look, None)

    def waits(  # noqa: PLR0911 - all that is known of the one who asks
        self, request: ConnectorRequest, path: bytes, nodes: list[Node], num_local: int, now: float
    ) -> bool:
        """Whether a request waits for what slow tiers have of its path."""
        fetch = request.fetch
        if fetch is not None:
            if fetch.num_here is None and fetch.is_begun and now - fetch.last_s > fetch.patience_s:
                self.arbiter.num_late += 1
                self.let_go(request)
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
        names = self._directory.names_behind(path, nodes)
        num_on_disk = next((at for at, name in enumerate(names) if name.digest not in self._on_disk), len(names))
        if num_on_disk:
            return self._begin_fetch(request, path, nodes, _DISK, num_on_disk, now)
        if _REMOTE in self._tiers and self.arbiter.pays(_REMOTE):
            request.look = self._new_ticket()
            request.num_found = -1
            request.look_until_s = now + _LOOK_PATIENCE_S
            self._looking[request.look] = request
            self._next.looks.append(LookOrder(request.look, _REMOTE, names))
            return True
        return False

    def _begin_fetch(  # noqa: PLR0913, PLR0917 - as above
        self, request: ConnectorRequest, path: bytes, nodes: list[Node], tier: str, num: int, now: float
    ) -> bool:
        """Have blocks brought behind ``nodes``, as many as is sooner than to compute them; whether there are any."""
        hit = self._directory.match(path)
        if len(hit.nodes) > len(nodes):
            return False  # somebody stores or brings the next ones already
        queued = {tier: sum(len(fetch.left) for fetch in self._fetches.values()) * self.arbiter.block_bytes}
        num = min(num, self._num_host_blocks // _ARRIVING_SHARE - sum(len(one.op_at) for one in self._fetches.values()))
        verdict = self.arbiter.weigh([tier] * max(0, num), queued, lambda num_blocks: num_blocks)
        if not verdict.num_blocks:
            return False
        promised = self._directory.promise(hit, path, verdict.num_blocks)
        if promised is None:
            return False
        patience_s = max(verdict.patience_s, _LEAST_PATIENCE_S)
        fetch = request.fetch = Fetching(self._new_ticket(), tier, promised, now, patience_s)
        self._fetches[fetch.ticket] = fetch
        self._fetch_at.update(dict.fromkeys(fetch.op_at, fetch))
        names = self._directory.names_behind(promised.path, nodes)
        ops = [FetchOp(host_id, name) for host_id, name in zip(fetch.op_at, names, strict=True)]
        self._next.fetches.append(FetchOrder(fetch.ticket, tier, ops))
        return True

    def note(self, outcome: Outcome, now: float) -> None:
        """Take note of what a slow tier has done."""
        if isinstance(outcome, Fetched):
            self._note_fetched(outcome, now)
        elif isinstance(outcome, Found):
            request = self._looking.pop(outcome.ticket, None)
            if request is not None and request.look == outcome.ticket:
                request.num_found = outcome.num_blocks
        else:
            self._note_written(outcome)

    def _note_fetched(self, outcome: Fetched, now: float) -> None:
        num_bytes = sum(not isinstance(found, MissCause) for found in outcome.found) * self.arbiter.block_bytes
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

    def _end_fetch(self, fetch: Fetching, now: float) -> None:
        """Let what has arrived in a row be found, and give the other host blocks back."""
        del self._fetches[fetch.ticket]
        num_here = next((at for at in range(len(fetch.op_at)) if at not in fetch.arrived), len(fetch.op_at))
        self.counts.num_fetched += num_here
        self.counts.num_lost += len(fetch.op_at) - num_here
        self._directory.keep_first(fetch.promised, num_here)
        fetch.num_here = num_here
        if fetch.is_waited:
            self.arbiter.account(num_here, now - fetch.begun_s)
        else:
            self._directory.core.release(fetch.promised.cache)

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
                if len(self._on_disk) > max(1, self._most_on_disk):
                    self._on_disk.popitem(last=False)
            if not write.left:
                write.cache.facts = RequestFacts(is_repeat=True)
                self._directory.core.release(write.cache)

    def plan_writes(self) -> list[WriteOp]:
        """Give slow tiers what was stored, as long as they keep up."""
        ops: list[WriteOp] = []
        most = max(1, self._num_host_blocks // _WRITING_SHARE)
        while self._unwritten and len(self._writes) < most:
            path, num_before = self._unwritten.popleft()
            self._unwritten_bytes -= len(path)
            hit = self._directory.match(path)
            hit = hit._replace(nodes=written_part(hit))
            fresh = [node for node in hit.nodes[num_before:] if name_of(node).digest not in self._on_disk]
            fresh = [node for node in fresh if host_id_of(node) not in self._writes]
            self.counts.num_unwritten += len(path) // KEY_BYTES - len(hit.nodes)
            if fresh:
                cache, _ = self._directory.core.acquire(hit)
                write = _Write(cache, {host_id_of(node) for node in fresh}, self._generation)
                self._writes.update(dict.fromkeys(write.left, write))
                ops += [WriteOp(host_id_of(node), name_of(node)) for node in fresh]
        return ops

    def _new_ticket(self) -> int:
        self._ticket += 1
        return self._ticket
