"""Tiering: requests that wait for blocks of slow tiers, and what is written to those. The engine's thread calls it.

A request that arrives is held back if slow tiers have what it would have to compute and bringing that is sooner
(``kv/arbiter.py``). It is let go when all has come, or when waiting on does not pay any more; then it finds in the host
arena what has come, and computes the rest.

For a conversation that is expected to go on (``returning.py``) blocks are brought likewise, before anybody waits.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from pagefold.errors import TierError
from pagefold.events import Emit, TierRead, TierWritten, ignore
from pagefold.kv.transfers import Fetched, Found, MissCause, StoreError, Written
from pagefold.kv.tree import TOKEN_BYTES
from pagefold.request import RequestStatus
from pagefold.scheduler.returning import Returning
from pagefold.steps import DamagedBlocksError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.events import TierMissCause
    from pagefold.kv import BlockName, Fetch, HostOps, SlowTiers, Verdict
    from pagefold.kv.transfers import Transfers
    from pagefold.request import Request
    from pagefold.scheduler.scheduler import Scheduler

__all__ = ["Tiering"]

_FAST = "disk"
"""The tier that says at once what it has: its index is in memory."""

_LOOK_SHARE = 0.05
"""A request waits for a tier to say what it has for at most this share of the time that computing would take."""

_ROOM_SHARE = 0.5
"""A request waits for room in the arena for at most this share of the time that computing would take."""

_SHARE_EXPECTED = 2
"""What is brought before it is asked for takes at most one in so many of the host blocks that arrivals may take."""

_NUM_AHEAD = 4
"""How many waiting requests are looked at again, since what device and host had when they came may have gone; and how
many expected ones are looked at in one poll."""

_LOOK_UP_S = 0.2
"""How long a close waits at most before it asks again how long it may take."""


class Arena(Protocol):
    """What is told that a transfer has written a host block."""

    def arrived(self, host_id: int, checksum: bytes) -> None:
        """The block's bytes had this checksum."""


class _Waiting:
    """A request that is held back: first until it is known what tiers have, then until there is room, then for that.

    Or a conversation that is expected: then there is no request.
    """

    __slots__ = ("fetch", "found", "is_over", "late_s", "names", "request", "verdict")

    def __init__(self, request: Request | None, names: list[BlockName]) -> None:
        self.request = request
        self.names = names
        self.found: list[str] = []  # of the first names the tiers that have them
        self.late_s = 0.0  # when it does not wait for answers, or for room, any more
        self.verdict: Verdict | None = None
        self.fetch: Fetch | None = None
        self.is_over = False  # the request does not wait any more; what has come is kept until it is admitted

    @property
    def waits(self) -> bool:
        """Whether blocks are waited for."""
        return not self.is_over and (self.request is None or self.request.status is RequestStatus.FETCHING)


class Tiering:
    """Holds requests back while blocks are brought for them.

    Args:
        scheduler: its core has slow tiers.
        slow: the slow tiers.
        transfer: carries out what is decided.
        arena: the host's blocks.
        move: carries out stores outside a step.
        emit: where events go.
        clock: seconds, monotonic.
    """

    def __init__(  # noqa: PLR0913 - the parts that it holds together
        self,
        scheduler: Scheduler,
        slow: SlowTiers,
        transfer: Transfers,
        arena: Arena,
        move: Callable[[HostOps], None],
        *,
        emit: Emit = ignore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transfer = transfer
        self._scheduler = scheduler
        self._slow = slow
        self._arena = arena
        self._move = move
        self._emit = emit
        self._clock = clock
        self._is_resetting = False
        self._waiting: dict[int, _Waiting] = {}  # by ticket: asked for, held back, or let go and not admitted yet
        self._num_tickets = 0
        self._returning = Returning()
        self._ahead: set[str] = set()  # of those at the head of the queue, who was looked at there
        self._queued_bytes: dict[str, int] = {}

    def begin(self, request: Request, now: float) -> None:
        """Hold a queued request back, if slow tiers have what it lacks, or may have."""
        self._ahead.add(request.request_id)
        self._seek(_Waiting(request, self._missing(request.namespace, request.packed(), request.max_hit_tokens)), now)

    def expect(self, request: Request, now: float) -> None:
        """A request has ended. If it said when it will go on, bring by then what slow tiers alone have of it.

        That begins as long before as computing it would take, since no load that takes longer is ever waited for.
        """
        if request.returns_in_s is not None:
            num_blocks = request.num_tokens // self._scheduler.core.block_size
            due_s = now + max(0.0, request.returns_in_s - self._slow.arbiter.compute_s(num_blocks))
            self._returning.add(due_s, request.namespace, request.packed())

    def wait(self, timeout_s: float) -> None:
        """Return when the transfer has done something, and take note of it; or after ``timeout_s``."""
        for outcome in self.transfer.collect(timeout_s):
            self._note(outcome, self._clock())

    def poll(self, now: float) -> None:
        """Take note of what the transfer has done, let go whoever need not wait, and write what is due."""
        for outcome in self.transfer.collect():
            self._note(outcome, now)
        self._slow.fetches.late(now)
        self._let_go()
        self._look_ahead(now)
        for expected in self._returning.take(now, _NUM_AHEAD):
            names = self._missing(expected.namespace, expected.packed, len(expected.packed) // TOKEN_BYTES)
            self._seek(_Waiting(None, names[: self._slow.fetches.max_waited // _SHARE_EXPECTED]), now)
        for ticket, waiting in list(self._waiting.items()):
            if waiting.waits:
                self._advance(ticket, waiting, now)
        self.transfer.write(self._slow.writes.take())

    def computed(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Take note of what a step of ``num_rows`` sequences took, if it was mostly prefilling."""
        self._slow.arbiter.learn_compute(num_tokens, num_rows, seconds)

    @property
    def expected_bytes(self) -> int:
        """What is remembered of conversations that are expected to go on: at most ``MAX_EXPECTED_BYTES``."""
        return self._returning.num_bytes

    def next_due_s(self) -> float:
        """Return when :meth:`poll` has something to do though nothing has come; inf for never."""
        looking = (waiting.late_s for waiting in self._waiting.values() if waiting.fetch is None)
        return min(self._slow.fetches.next_late_s(), self._returning.next_due_s(), min(looking, default=float("inf")))

    def store_pending(self) -> None:
        """No step will run soon: make the stores that wait for one."""
        self._store()
        self.transfer.write(self._slow.writes.take())

    def distrust(self, digests: set[bytes]) -> None:
        """Have the slow tiers forget these paths, as soon as they come to it."""
        self.transfer.forget(list(digests))

    def begin_reset(self) -> None:
        """The core is being reset: bring nothing until :meth:`finish_reset`."""
        self._is_resetting = True
        self._returning.clear()

    def finish_reset(self) -> None:
        """Have the slow tiers forget everything. Blocks; any thread may call it.

        Raises:
            TierError: one could not.
        """
        try:
            self.transfer.clear()
        except StoreError as error:
            msg = f"Device and host have forgotten everything, but not all other tiers: {error}."
            raise TierError(msg, remedy="Try again, or clear that tier by its own means.") from None
        finally:
            self._is_resetting = False

    def close(self, left_s: Callable[[], float]) -> None:
        """Write what is cached and unsaved as far as time goes, and close the tiers.

        Args:
            left_s: how many seconds are left; it may change its mind.
        """
        core, slow = self._scheduler.core, self._slow
        slow.fetches.give_up()
        nodes = deque(core.tree.nodes())  # heads before tails: what is left out cuts off least
        while left_s() > 0:
            core.moves.store_cached(nodes, slow.writes.num_spare)
            self._store()
            writes = slow.writes.take(is_flush=True)
            self.transfer.write(writes)
            if slow.is_quiet and not nodes and not writes:
                break
            for outcome in self.transfer.collect(0.0 if slow.is_quiet else min(left_s(), _LOOK_UP_S)):
                self._note(outcome, self._clock())
        self.transfer.close(left_s())

    # Inside.

    def _store(self) -> None:
        """Make the stores that wait for a step."""
        core = self._scheduler.core
        ops = core.moves.take_host_ops()
        if not ops.stores:
            return
        try:
            self._move(ops)
        except DamagedBlocksError as damage:
            core.moves.host_failed(ops, damage.host_ids)
        else:
            core.moves.host_done(ops)

    def _look_ahead(self, now: float) -> None:
        """Look again at those who will be admitted next and for whom nothing is kept, once each.

        Whoever has something kept must not wait for room again: it may be the one that takes it.
        """
        served = {waiting.request.request_id for waiting in self._waiting.values() if waiting.request is not None}
        ahead = list(islice(self._scheduler.waiting, _NUM_AHEAD))
        self._ahead &= {request.request_id for request in ahead}.union(self._scheduler.fetching)
        for request in ahead:
            request_id = request.request_id
            if request.status is RequestStatus.WAITING and request_id not in self._ahead and request_id not in served:
                self.begin(request, now)

    def _missing(self, namespace: bytes, packed: bytes, max_tokens: int) -> list[BlockName]:
        """Return the names of what neither device nor host has, if it may be brought."""
        core = self._scheduler.core
        return [] if self._is_resetting or not core.publishes else core.missing(namespace, packed, max_tokens)

    def _seek(self, waiting: _Waiting, now: float) -> None:
        """Bring what tiers have of what is missing, if that pays; or ask them first what they have."""
        arbiter, names, found = self._slow.arbiter, waiting.names, waiting.found
        for tier in self.transfer.tiers:
            rest = names[len(found) :]
            if not rest or not arbiter.pays(tier):
                continue
            if tier == _FAST:
                found += [tier] * self.transfer.count(tier, rest)
            elif arbiter.links[tier].latency_s < _LOOK_SHARE * arbiter.compute_s(len(rest)):
                self._look(waiting, tier, now)
                return
        if self._decide(waiting, now):
            self._hold(waiting)

    def _look(self, waiting: _Waiting, tier: str, now: float) -> None:
        rest = waiting.names[len(waiting.found) :]
        waiting.late_s = now + _LOOK_SHARE * self._slow.arbiter.compute_s(len(rest))
        self._hold(waiting)
        self.transfer.look(tier, rest, self._num_tickets)

    def _hold(self, waiting: _Waiting) -> None:
        self._num_tickets += 1
        self._waiting[self._num_tickets] = waiting
        if waiting.request is not None:
            self._scheduler.hold(waiting.request)

    def _decide(self, waiting: _Waiting, now: float) -> bool:
        """Let a request wait for what is known to be found, if that pays; whether it does."""
        arbiter = self._slow.arbiter
        del waiting.found[self._slow.fetches.max_waited :]
        if not waiting.found or self._is_resetting:
            return False
        waiting.verdict = verdict = arbiter.weigh(waiting.found, self._queued_bytes)
        if not verdict.num_blocks:
            return False
        waiting.late_s = now + _ROOM_SHARE * verdict.compute_s
        self._fetch(waiting, now)
        return True

    def _fetch(self, waiting: _Waiting, now: float) -> None:
        """Begin to bring what was decided, if there is room for it."""
        verdict = waiting.verdict
        assert verdict is not None, "it was not decided"
        found = list(zip(waiting.found, waiting.names, strict=False))[: verdict.num_blocks]
        waiting.fetch = fetch = self._slow.fetches.begin(found, verdict.patience_s, now)
        if fetch is not None:
            for tier, ops in fetch.ops.items():
                num_bytes = len(ops) * self._slow.arbiter.block_bytes
                self._queued_bytes[tier] = self._queued_bytes.get(tier, 0) + num_bytes
            self.transfer.fetch(fetch)

    def _note(self, outcome: Fetched | Found | Written, now: float) -> None:
        if isinstance(outcome, Found):
            waiting = self._waiting.get(outcome.ticket)
            if waiting is not None and waiting.verdict is None:
                waiting.found += [outcome.tier] * outcome.num_blocks
                waiting.late_s = now
        elif isinstance(outcome, Written):
            self._slow.writes.written(outcome.ops, outcome.num_kept)
            self._emit(TierWritten(len(outcome.ops), outcome.num_kept))
        else:
            self._note_fetched(outcome, now)

    def _note_fetched(self, fetched: Fetched, now: float) -> None:
        arbiter = self._slow.arbiter
        self._queued_bytes[fetched.tier] -= len(fetched.ops) * arbiter.block_bytes
        causes: dict[TierMissCause, int] = {}
        for op, found in zip(fetched.ops, fetched.found, strict=True):
            is_good = not isinstance(found, MissCause)
            if isinstance(found, MissCause):
                cause: TierMissCause = found.value
                causes[cause] = causes.get(cause, 0) + 1
            else:
                self._arena.arrived(op.host_id, found)
            self._slow.fetches.arrived(op.host_id, now, is_good=is_good)
        num_found = len(fetched.ops) - sum(causes.values())
        if num_found == len(fetched.ops):
            arbiter.links[fetched.tier].learn(num_found * arbiter.block_bytes, fetched.seconds)
        self._emit(TierRead(fetched.tier, num_found, num_found * arbiter.block_bytes, fetched.seconds, causes))

    def _let_go(self) -> None:
        """Keep nothing for requests that were admitted, or have ended: first, since others wait for the room."""
        for ticket, waiting in list(self._waiting.items()):
            request = waiting.request
            if request is not None and request.status not in (RequestStatus.FETCHING, RequestStatus.WAITING):
                self._end(ticket, waiting)

    def _end(self, ticket: int, waiting: _Waiting) -> None:
        del self._waiting[ticket]
        if waiting.fetch is not None:
            self._slow.fetches.end(waiting.fetch)

    def _advance(self, ticket: int, waiting: _Waiting, now: float) -> None:
        """Let a request go on that need not wait any more."""
        if waiting.verdict is None:  # a tier is asked what it has
            is_waiting = now < waiting.late_s or self._decide(waiting, now)
        elif waiting.fetch is None:  # there was no room
            self._fetch(waiting, now)
            is_waiting = waiting.fetch is not None or now < waiting.late_s
        else:
            is_waiting = not waiting.fetch.is_over
        if is_waiting:
            return
        waiting.is_over = True
        if waiting.request is not None:
            self._scheduler.ready(waiting.request)
        if waiting.fetch is None:
            del self._waiting[ticket]
        elif waiting.request is None:
            self._end(ticket, waiting)
        else:
            self._slow.arbiter.account(waiting.fetch.num_arrived, now - waiting.fetch.begun_s)
