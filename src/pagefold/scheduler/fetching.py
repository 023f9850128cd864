"""Fetching: what is brought from slow tiers, and who waits for it: a request, or nobody yet.

A *wanted* path is brought in three stages, each of which may be skipped. First it is not known what tiers have of it;
then there is no room in the arena; then its blocks are on their way. In each it is waited for as long as that pays.
Where blocks of packed chunks have come, what they say is missing beside them is brought in the same stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import FetchEnded
from pagefold.kv.missing import NOTHING_MISSING
from pagefold.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.events import Emit, FetchOutcome
    from pagefold.kv import Fetch, SlowTiers, Verdict
    from pagefold.kv.missing import Has, Missing
    from pagefold.kv.names import BlockName
    from pagefold.kv.transfers import Fetched, Found, Transfers
    from pagefold.request import Request
    from pagefold.scheduler.scheduler import Scheduler

__all__ = ["Fetching", "Wanted"]

_FAST = "disk"
"""The tier that says at once what it has: its index is in memory."""

_LOOK_SHARE = 0.05
"""A request waits for a tier to say what it has for at most this share of the time that computing would take."""

_PAST = float("-inf")

_ROOM_SHARE = 0.5
"""A request waits for room in the arena for at most this share of the time that computing would take."""


class Wanted:
    """A path that device and host lack, as it is brought.

    Args:
        request: who is held back for it; None where a conversation is only expected to go on.
        missing: of the path; while it needs windows, it is not known yet where.

    Attributes:
        ticket: what tiers answer under; None until its request is held back.
        found: of the first names the tiers that have them.
        late_s: when answers of tiers, or room in the arena, are not waited for any more.
        verdict: how much of it is worth bringing; None until it is known what tiers have.
        fetch: its blocks on their way; None until there is room for them.
        first: what had to come before it was known what else is missing; it is kept. None while nothing is known so.
        is_over: the request does not wait any more; what has come is kept until the request is admitted.
        is_answered: a tier that was asked what it has of it has answered, or none was asked.
        held_s: since when its request is held back.
        why_not: why what tiers may have is not brought, as far as that was decided.
    """

    __slots__ = (
        "fetch",
        "first",
        "found",
        "held_s",
        "is_answered",
        "is_over",
        "late_s",
        "missing",
        "request",
        "ticket",
        "verdict",
        "why_not",
    )

    def __init__(self, request: Request | None, missing: Missing) -> None:
        self.request = request
        self.missing = missing
        self.ticket: int | None = None
        self.found: list[str] = []
        self.late_s = 0.0
        self.verdict: Verdict | None = None
        self.fetch: Fetch | None = None
        self.first: Fetch | None = None
        self.is_over = False
        self.is_answered = True
        self.held_s = 0.0
        self.why_not: FetchOutcome = "absent"

    @property
    def is_waited_for(self) -> bool:
        """Whether its blocks are waited for."""
        return not self.is_over and (self.request is None or self.request.status is RequestStatus.FETCHING)

    @property
    def left(self) -> list[BlockName]:
        """The names of the blocks that no tier is known to have."""
        return self.missing.names[len(self.found) :]

    @property
    def is_useless(self) -> bool:
        """Whether what was found is of no use."""
        return not self.found or not self.missing.gain(len(self.found))

    @property
    def outcome(self) -> FetchOutcome:
        """What has become of it, once its request does not wait for it."""
        if self.fetch is None:
            if not self.is_answered:
                return "late"
            return "no_room" if self.verdict is not None and self.verdict.num_blocks else self.why_not
        if self.fetch.is_late:
            return "late"
        return "brought" if self.fetch.num_arrived == len(self.fetch.blocks) else "broken"

    def seek_windows(self, has: Has) -> None:
        """Seek what groups need that keep the last tokens only, now that it is known how far tiers have the path.

        Args:
            has: whether a tier that answers at once has a block.
        """
        self.missing = self.missing.with_windows(len(self.found), has)
        del self.found[self.missing.num_led :]

    def seek_rest(self) -> bool:
        """Seek what could not be named before the blocks of its fetch had come; False if there is nothing."""
        fetch = self.fetch
        assert fetch is not None, "nothing has come"
        rest = self.missing.rest() if fetch.num_arrived == len(self.missing.names) else NOTHING_MISSING
        if not rest.names:
            return False
        fetch.num_later = 0  # it is known now
        self.missing, self.first = rest, fetch
        self.found, self.verdict, self.fetch = [], None, None
        return True


class Fetching:
    """Holds requests back while blocks are brought for them.

    Args:
        scheduler: has the requests.
        slow: the slow tiers.
        transfer: carries out what is decided.
        emit: where events go.

    Attributes:
        is_stopped: nothing is brought now, since everything is being forgotten.
    """

    def __init__(self, scheduler: Scheduler, slow: SlowTiers, transfer: Transfers, emit: Emit) -> None:
        self.is_stopped = False
        self._emit = emit
        self._scheduler = scheduler
        self._slow = slow
        self._transfer = transfer
        self._wanted: dict[
            int, Wanted
        ] = {}  # by ticket: asked for, on its way, or kept for one who is not admitted yet
        self._num_tickets = 0
        self._queued_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        """How many paths are wanted."""
        return len(self._wanted)

    def served(self) -> Iterable[str]:
        """Return the ids of the requests for which something is brought, or kept."""
        return [wanted.request.request_id for wanted in self._wanted.values() if wanted.request is not None]

    def seek(self, wanted: Wanted, now: float) -> None:
        """Bring what tiers have of what is missing, if that pays; or ask them first what they have."""
        arbiter, found = self._slow.arbiter, wanted.found
        for tier in self._transfer.tiers:
            rest = wanted.left
            if not rest:
                continue
            if not arbiter.pays(tier):
                wanted.why_not = "slow"
                continue
            if tier == _FAST:
                found += [tier] * self._transfer.count(tier, rest)
            elif arbiter.links[tier].latency_s < self._look_s(wanted):
                self._look(wanted, tier, now)
                return
        if wanted.missing.needs_windows:
            wanted.seek_windows(self._has)
            self.seek(wanted, now)
        elif self._decide(wanted, now):
            self._hold(wanted, now)
        elif wanted.ticket is None:  # else it is told when its request does not wait any more
            self._tell(wanted, now)

    def found(self, answer: Found, now: float) -> None:
        """A tier has said what it has."""
        wanted = self._wanted.get(answer.ticket)
        if wanted is not None and wanted.verdict is None:
            wanted.is_answered = True
            wanted.found += [answer.tier] * answer.num_blocks
            wanted.late_s = now

    def arrived(self, fetched: Fetched) -> None:
        """What a tier was asked for has come, or not."""
        self._queued_bytes[fetched.tier] -= len(fetched.ops) * self._slow.arbiter.block_bytes

    def let_go(self) -> None:
        """Keep nothing for requests that were admitted, or have ended."""
        for wanted in list(self._wanted.values()):
            request = wanted.request
            if request is not None and request.status not in (RequestStatus.FETCHING, RequestStatus.WAITING):
                self._end(wanted)

    def advance(self, now: float) -> None:
        """Let the requests go on that need not wait any more."""
        for wanted in list(self._wanted.values()):
            if wanted.is_waited_for:
                self._advance(wanted, now)

    def next_late_s(self) -> float:
        """Return when an answer of a tier, or room, is not waited for any more; inf for never.

        That is long past for whom all has come since anybody looked, perhaps before it was asked for.
        """
        due = (
            wanted.late_s if wanted.fetch is None else _PAST
            for wanted in self._wanted.values()
            if wanted.fetch is None or (wanted.fetch.is_over and wanted.is_waited_for)
        )
        return min(due, default=float("inf"))

    def _look(self, wanted: Wanted, tier: str, now: float) -> None:
        """Ask a tier what it has."""
        wanted.late_s = now + self._look_s(wanted)
        if wanted.ticket is not None:  # a late answer to the question before is not taken for this one's
            del self._wanted[wanted.ticket]
            self._number(wanted)
        self._hold(wanted, now)
        wanted.is_answered = False
        assert wanted.ticket is not None, "it was just held"
        self._transfer.look(tier, wanted.left, wanted.ticket)

    def _look_s(self, wanted: Wanted) -> float:
        """Return how long a tier's answer about what is left is waited for."""
        return _LOOK_SHARE * self._slow.arbiter.compute_s(wanted.missing.at_stake(len(wanted.left)))

    def _has(self, name: BlockName) -> bool:
        """Whether a tier that answers at once has a block."""
        return _FAST in self._transfer.tiers and self._transfer.count(_FAST, [name]) > 0

    def _hold(self, wanted: Wanted, now: float) -> None:
        """Give it a ticket, and hold its request back; nothing, if that was done."""
        if wanted.ticket is not None:
            return
        self._number(wanted)
        wanted.held_s = now
        if wanted.request is not None:
            self._scheduler.hold(wanted.request)

    def _number(self, wanted: Wanted) -> None:
        """Give it a ticket that nothing else had."""
        self._num_tickets += 1
        wanted.ticket = self._num_tickets
        self._wanted[wanted.ticket] = wanted

    def _decide(self, wanted: Wanted, now: float) -> bool:
        """Bring what is known to be found, if that pays; whether it does."""
        arbiter = self._slow.arbiter
        del wanted.found[self._slow.fetches.max_waited :]
        if wanted.is_useless or self.is_stopped:
            return False
        num_more = wanted.missing.num_more  # of the same tier, as far as anybody knows
        if len(wanted.found) + num_more > self._slow.fetches.max_waited:
            wanted.why_not = "no_room"
            return False
        tiers = wanted.found + wanted.found[-1:] * num_more
        gain = wanted.missing.gain
        verdict = arbiter.weigh(
            tiers, self._queued_bytes, lambda num: gain(num - num_more), is_first=wanted.first is None
        )
        wanted.verdict = verdict = verdict._replace(num_blocks=max(0, verdict.num_blocks - num_more))
        if not verdict.num_blocks:
            wanted.why_not = "slow"
            return False
        wanted.late_s = now + _ROOM_SHARE * verdict.compute_s
        self._fetch(wanted, now)
        return True

    def _go_on(self, wanted: Wanted, now: float) -> bool:
        """A tier has said what it has, or is late: ask what is to be asked yet, or decide; whether it is waited for."""
        if not wanted.missing.needs_windows:
            return self._decide(wanted, now)
        wanted.seek_windows(self._has)
        self.seek(wanted, now)
        return now < wanted.late_s

    def _fetch(self, wanted: Wanted, now: float) -> None:
        """Begin to bring what was decided, if there is room for it."""
        verdict = wanted.verdict
        assert verdict is not None, "it was not decided"
        found = list(zip(wanted.found, wanted.missing.names, strict=False))[: verdict.num_blocks]
        wanted.fetch = fetch = self._slow.fetches.begin(found, verdict.patience_s, now, wanted.missing)
        if fetch is not None:
            for tier, ops in fetch.ops.items():
                num_bytes = len(ops) * self._slow.arbiter.block_bytes
                self._queued_bytes[tier] = self._queued_bytes.get(tier, 0) + num_bytes
            self._transfer.fetch(fetch)

    def _end(self, wanted: Wanted) -> None:
        """Keep nothing of it any more."""
        assert wanted.ticket is not None, "it was never held"
        del self._wanted[wanted.ticket]
        for fetch in (wanted.first, wanted.fetch):
            if fetch is not None:
                self._slow.fetches.end(fetch)

    def _advance(self, wanted: Wanted, now: float) -> None:
        """Go on to the next stage; where that is the last one, or waiting does not pay, let the request go on."""
        if wanted.verdict is None:  # a tier is asked what it has
            is_waiting = now < wanted.late_s or self._go_on(wanted, now)
        elif wanted.fetch is None:  # there was no room
            self._fetch(wanted, now)
            is_waiting = wanted.fetch is not None or now < wanted.late_s
        else:
            is_waiting = not wanted.fetch.is_over or self._bring_rest(wanted, now)
        if is_waiting:
            return
        wanted.is_over = True
        if wanted.request is not None:
            self._scheduler.ready(wanted.request)
        mixed = wanted.missing.mixed() if wanted.fetch is not None else []
        if mixed:  # else it would come again, and be of no use again
            self._slow.fetches.reject(mixed)
            self._transfer.forget(mixed)
        has_all = wanted.fetch is not None and not wanted.missing.rest().names and not mixed
        num_places = wanted.missing.gain(wanted.fetch.num_arrived) if wanted.fetch is not None and has_all else 0
        self._tell(wanted, now, num_places)
        begun = wanted.first or wanted.fetch
        if begun is not None and wanted.request is not None:
            self._slow.arbiter.account(num_places, now - begun.begun_s)
        if wanted.fetch is None or wanted.request is None:
            self._end(wanted)

    def _tell(self, wanted: Wanted, now: float, num_saved_places: int = 0) -> None:
        """Tell what has become of what a request lacked, if that was anything.

        Args:
            wanted: what it lacked.
            now: the time.
            num_saved_places: places of its path that it need not compute, since their blocks have come.
        """
        request, missing = wanted.request, wanted.missing
        num_places = missing.at_stake(len(missing.names))
        if request is None or not num_places:
            return
        num_tokens = num_places * self._scheduler.core.block_size
        waited_s = 0.0 if wanted.ticket is None else now - wanted.held_s
        verdict = wanted.verdict
        expected_s = verdict.load_s if verdict is not None and verdict.num_blocks else None
        saved_s = self._slow.arbiter.compute_s(num_saved_places)
        self._emit(FetchEnded(request.request_id, wanted.outcome, num_tokens, waited_s, expected_s, saved_s))

    def _bring_rest(self, wanted: Wanted, now: float) -> bool:
        """Blocks have come: bring what they say is missing beside them, if that pays; whether it is waited for."""
        if not wanted.seek_rest():
            return False
        wanted.late_s = now
        self.seek(wanted, now)
        return wanted.fetch is not None or now < wanted.late_s
