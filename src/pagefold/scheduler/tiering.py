"""Tiering: what the engine tells and asks of slow tiers. Its thread alone calls it.

A request that arrives is held back if slow tiers have what it would have to compute and bringing that is sooner
(``fetching.py``, ``kv/arbiter.py``). It is let go when all has come, or when waiting on does not pay any more; then it
finds in the host arena what has come, and computes the rest.

For a conversation that is expected to go on (``returning.py``) blocks are brought likewise, before anybody waits.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from pagefold.errors import TierError
from pagefold.events import Emit, TierRead, TierWritten, ignore
from pagefold.kv.missing import NOTHING_MISSING
from pagefold.kv.transfers import Fetched, Found, MissCause, StoreError, Written
from pagefold.kv.tree import TOKEN_BYTES
from pagefold.request import RequestStatus
from pagefold.scheduler.fetching import Fetching, Wanted
from pagefold.scheduler.returning import Returning
from pagefold.steps import DamagedBlocksError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pagefold.events import TierMissCause
    from pagefold.kv import HostOps, SlowTiers
    from pagefold.kv.missing import Missing
    from pagefold.kv.transfers import TierUse, Transfers
    from pagefold.request import Request
    from pagefold.scheduler.scheduler import Scheduler

__all__ = ["NO_TIERING", "Tiering"]

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


class Tiering:
    """Has blocks brought for requests and conversations, and written before they are lost.

    Args:
        scheduler: its core has slow tiers.
        slow: the slow tiers.
        transfer: carries out what is decided.
        arena: the host's blocks.
        move: carries out stores outside a step.
        emit: where events go.
        clock: seconds, monotonic.

    Attributes:
        is_on: whether there are slow tiers.
    """

    is_on = True

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
        self._transfer = transfer
        self._scheduler = scheduler
        self._slow = slow
        self._arena = arena
        self._move = move
        self._emit = emit
        self._clock = clock
        self._fetching = Fetching(scheduler, slow, transfer, emit)
        self._returning = Returning()
        self._ahead: set[str] = set()  # of those at the head of the queue, who was looked at there

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, when the transfer has done something."""
        self._transfer.notify = wake

    def begin(self, request: Request, now: float) -> None:
        """Hold a queued request back, if slow tiers have what it lacks, or may have."""
        self._ahead.add(request.request_id)
        missing = self._missing(request.namespace, request.packed(), request.max_hit_tokens, request.mask)
        self._fetching.seek(Wanted(request, missing), now)

    def expect(self, request: Request, now: float) -> None:
        """A request has ended. If it said when it will go on, bring by then what slow tiers alone have of it.

        That begins as long before as computing it would take, since no load that takes longer is ever waited for.
        """
        if request.returns_in_s is not None:
            num_blocks = request.num_tokens // self._scheduler.core.block_size
            due_s = now + max(0.0, request.returns_in_s - self._slow.arbiter.compute_s(num_blocks))
            self._returning.add(due_s, request.namespace, request.packed(), request.mask)

    def wait(self, timeout_s: float) -> None:
        """Return when the transfer has done something, and take note of it; or after ``timeout_s``."""
        for outcome in self._transfer.collect(timeout_s):
            self._note(outcome, self._clock())

    def poll(self, now: float) -> None:
        """Take note of what the transfer has done, let go whoever need not wait, and write what is due."""
        for outcome in self._transfer.collect():
            self._note(outcome, now)
        self._slow.fetches.late(now)
        self._fetching.let_go()  # first, since others wait for the room
        self._look_ahead(now)
        for expected in self._returning.take(now, _NUM_AHEAD):
            num_tokens = len(expected.packed) // TOKEN_BYTES
            missing = self._missing(expected.namespace, expected.packed, num_tokens, expected.mask)
            at_most = self._slow.fetches.max_waited // _SHARE_EXPECTED
            self._fetching.seek(Wanted(None, missing.up_to(at_most)), now)
        self._fetching.advance(now)
        self._transfer.write(self._slow.writes.take())

    def computed(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Take note of what a step of ``num_rows`` sequences took, if it was mostly prefilling."""
        self._slow.arbiter.learn_compute(num_tokens, num_rows, seconds)

    @property
    def expected_bytes(self) -> int:
        """What is remembered of conversations that are expected to go on: at most ``MAX_EXPECTED_BYTES``."""
        return self._returning.num_bytes

    def uses(self) -> Mapping[str, TierUse]:
        """Return what slow tiers have, by name, of those that know it at once. Plain reads, so any thread may."""
        return self._transfer.uses()

    def next_due_s(self) -> float:
        """Return when :meth:`poll` has something to do though nothing has come; inf for never."""
        return min(self._slow.fetches.next_late_s(), self._returning.next_due_s(), self._fetching.next_late_s())

    def store_pending(self) -> None:
        """No step will run soon: make the stores that wait for one."""
        self._store()
        self._transfer.write(self._slow.writes.take())

    def distrust(self, digests: set[bytes]) -> None:
        """Have the slow tiers forget these paths, as soon as they come to it."""
        self._transfer.forget(list(digests))

    def forget(self, namespaces: Collection[bytes]) -> None:
        """Nobody will go on with what is in these namespaces: bring nothing of it before it is asked for."""
        self._returning.forget(namespaces)

    def begin_reset(self) -> None:
        """The core is being reset: bring nothing until :meth:`finish_reset`."""
        self._fetching.is_stopped = True
        self._returning.clear()

    def finish_reset(self) -> None:
        """Have the slow tiers forget everything. Blocks; any thread may call it.

        Raises:
            TierError: one could not.
        """
        try:
            self._transfer.clear()
        except StoreError as error:
            msg = f"Device and host have forgotten everything, but not all other tiers: {error}."
            raise TierError(msg, remedy="Try again, or clear that tier by its own means.") from None
        finally:
            self._fetching.is_stopped = False

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
            self._transfer.write(writes)
            if slow.is_quiet and not nodes and not writes:
                break
            for outcome in self._transfer.collect(0.0 if slow.is_quiet else min(left_s(), _LOOK_UP_S)):
                self._note(outcome, self._clock())
        self._transfer.close(left_s())

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
        served = set(self._fetching.served())
        ahead = list(islice(self._scheduler.waiting, _NUM_AHEAD))
        self._ahead &= {request.request_id for request in ahead}.union(self._scheduler.fetching)
        for request in ahead:
            request_id = request.request_id
            if request.status is RequestStatus.WAITING and request_id not in self._ahead and request_id not in served:
                self.begin(request, now)

    def _missing(self, namespace: bytes, packed: bytes, max_tokens: int, mask: int) -> Missing:
        """Return what neither device nor host has, if it may be brought."""
        core = self._scheduler.core
        if self._fetching.is_stopped or not core.publishes:
            return NOTHING_MISSING
        return core.missing(namespace, packed, max_tokens, mask=mask)

    def _note(self, outcome: Fetched | Found | Written, now: float) -> None:
        """Take note of one thing that the transfer has done."""
        if isinstance(outcome, Found):
            self._fetching.found(outcome, now)
        elif isinstance(outcome, Written):
            self._slow.writes.written(outcome.ops, outcome.num_kept)
            block_bytes = self._slow.arbiter.block_bytes
            num_bytes = {tier: num_kept * block_bytes for tier, num_kept in outcome.kept.items()}
            self._emit(TierWritten(len(outcome.ops), outcome.num_kept, num_bytes, outcome.seconds))
        else:
            self._note_fetched(outcome, now)

    def _note_fetched(self, fetched: Fetched, now: float) -> None:
        """Take note of what has come, and tell what it took."""
        arbiter = self._slow.arbiter
        self._fetching.arrived(fetched)
        missed: list[tuple[bytes, TierMissCause]] = []
        rejected: list[bytes] = []
        for op, found in zip(fetched.ops, fetched.found, strict=True):
            is_good = not isinstance(found, MissCause)
            if isinstance(found, MissCause):
                cause: TierMissCause = found.value
                missed.append((op.name.digest, cause))
            else:
                self._arena.arrived(op.host_id, found)
            note = fetched.notes.get(op.host_id, b"")
            if not self._slow.fetches.arrived(op.host_id, now, is_good=is_good, note=note) and is_good:
                rejected.append(op.name.digest)  # else it would come again
        if rejected:
            missed += [(digest, MissCause.OTHER_BLOCK.value) for digest in rejected]
            self._transfer.forget(rejected)
        causes = dict(Counter(cause for _, cause in missed))
        num_found = len(fetched.ops) - len(missed)
        if num_found == len(fetched.ops):
            arbiter.links[fetched.tier].learn(num_found * arbiter.block_bytes, fetched.seconds)
        num_bytes = num_found * arbiter.block_bytes
        self._emit(TierRead(fetched.tier, num_found, num_bytes, fetched.seconds, causes, tuple(missed)))


class _NoTiering(Tiering):
    """No slow tiers: nobody waits for them, nothing is written, and nothing is due."""

    is_on = False

    def __init__(self) -> None:
        pass

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Nothing wakes anybody."""

    def begin(self, request: Request, now: float) -> None:
        """Nobody is held back."""

    def expect(self, request: Request, now: float) -> None:
        """Nothing is brought before it is asked for."""

    def wait(self, timeout_s: float) -> None:
        """Nothing comes."""

    def poll(self, now: float) -> None:
        """Nothing has happened."""

    def computed(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Nothing is weighed."""

    @property
    def expected_bytes(self) -> int:
        """Nothing is remembered."""
        return 0

    def uses(self) -> Mapping[str, TierUse]:
        """No tier has anything."""
        return {}

    def next_due_s(self) -> float:
        """Nothing is ever due."""
        return float("inf")

    def store_pending(self) -> None:
        """Stores wait for a step."""

    def distrust(self, digests: set[bytes]) -> None:
        """Nobody else has these paths."""

    def forget(self, namespaces: Collection[bytes]) -> None:
        """Nothing is expected."""

    def begin_reset(self) -> None:
        """Nothing is being brought."""

    def finish_reset(self) -> None:
        """Nobody else has anything."""

    def close(self, left_s: Callable[[], float]) -> None:
        """Nothing is open."""


NO_TIERING: Tiering = _NoTiering()
"""No slow tiers; it never changes, so all engines without some share it."""
