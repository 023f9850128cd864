"""MakingWay: who gives a seat, or memory, for a tenant that has less than its share.

Start tags say who goes first, and that is enough where requests are short. Where a burst holds all seats or blocks,
who comes next would wait until it has been served. So the head of the queue is let in at the cost of the tenant that
has most beside its weight, as long as that one has no less than the head's tenant then (max-min fairness):

- The last of that tenant's requests, in order, goes. It waits behind the head, and if its tag is less that becomes the
  head's; it comes back when its turn has come and there is room.
- What a tenant has, by its weight, becomes more equal each time. So nobody takes back what he gave, unless others came
  or left; and each request makes way twice at most, and is then spared.
- Nobody goes in vain: all that the head lacks must be found, room for the growth of those that stay included. Drafts of
  theirs are no growth, and take no block in that step.
- Who has no more blocks than its floor (``kv/quotas.py``) makes no way for memory, and nobody does for a request that
  waits for room below its own tenant's cap: the first behind it is the head then. What is given is the head's: whom it
  has passed is passed in all of the step, though one of its tenant's made way and left it room.

A step has one more thing to share, its tokens. Running requests have theirs first, and a few long prompts would take
all of them. So who is behind the head of the queue in order leaves it what it needs, if it can be let in at all.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from pagefold.scheduler.growth import Gone
from pagefold.scheduler.victims import loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.kv import KVCore, PrefixHit
    from pagefold.request import Request
    from pagefold.scheduler.fair_shares import FairShares, TenantShare
    from pagefold.scheduler.limits import SchedulerLimits
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.relief import Relief
    from pagefold.scheduler.step_in_flight import StepInFlight

__all__ = ["MOST_WAYS_MADE", "NO_MAKING_WAY", "AnyMakingWay", "MakingWay"]

_ORDER = attrgetter("order")

MOST_WAYS_MADE = 2
"""So often one request is preempted for others' shares."""


class AnyMakingWay(Protocol):
    """Who makes way in a step that is about to be planned."""

    def make(self, step: StepInFlight) -> None:
        """Preempt those who make way for the head of the queue, and have tokens of ``step`` left for it."""

    def reserve(self, step: StepInFlight) -> None:
        """Have tokens of ``step`` left for the head of the queue, if it can be let in as all is."""

    def is_due(self) -> bool:
        """Whether somebody is to make way: not while a step is in flight."""


class _NoMakingWay:
    """Nobody has a share."""

    def make(self, step: StepInFlight) -> None:
        """See :class:`AnyMakingWay`."""

    def reserve(self, step: StepInFlight) -> None:
        """See :class:`AnyMakingWay`."""

    def is_due(self) -> bool:
        """See :class:`AnyMakingWay`."""
        return False


NO_MAKING_WAY = _NoMakingWay()


class MakingWay:
    """Finds who makes way, once a step at most, and not again before anything was let in or has left.

    Args:
        core: the KV core.
        queues: who waits, and who runs.
        shares: what tenants have.
        relief: knows what is missing, and preempts.
        limits: of a step.

    Attributes:
        num_looked_at: how many running requests it has looked at so far, one by one.
    """

    def __init__(
        self, core: KVCore, queues: Queues, shares: FairShares, relief: Relief, limits: SchedulerLimits
    ) -> None:
        self._core = core
        self._queues = queues
        self._shares = shares
        self._relief = relief
        self._max_num_seqs = limits.max_num_seqs
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._prefills = limits.prefills
        self._no_way: tuple[Request, int] | None = None  # nobody could go for this head, as things were then
        self._no_room: tuple[Request, int] | None = None  # likewise, there was no memory for it
        self._step_id = 0  # of the last step that it was asked about
        self.num_looked_at = 0

    def make(self, step: StepInFlight) -> None:
        """See :class:`AnyMakingWay`."""
        self._step_id = step.plan.step_id
        victims = self._victims()
        head, passed = self._first_and_passed() if victims else (None, set())
        if head is not None:
            step.capped |= passed
            step.has_made_way = True
            for victim in victims:
                self._shares.made_way(victim, head)
                self._queues.take_out(victim)
                self._relief.preempt(victim, head, "share")
        self.reserve(step)

    def reserve(self, step: StepInFlight) -> None:
        """See :class:`AnyMakingWay`."""
        first, running = self._first(), self._queues.running
        if first is None or not running or first.order > running[-1].order:
            return
        head = _Head(first, self._core)
        if self._num_seats_lacking(head) > 0 or self._lacks_memory(head) or not self._has_place(head):
            return
        step.num_reserved = head.num_to_compute
        step.reserved_for = head.request.order

    def is_due(self) -> bool:
        """See :class:`AnyMakingWay`."""
        return bool(self._victims())

    def _victims(self) -> list[Request]:
        """Return who makes way for the head of the queue; nobody where all that it lacks cannot be found so."""
        first = self._first()
        if first is None or not self._queues.running:
            return []
        head, now = _Head(first, self._core), self._shares.num_changes
        if self._no_way == (head.request, now) or not self._has_place(head):
            return []
        if self._num_seats_lacking(head) <= 0 and not self._lacks_memory(head):
            return []  # it waits for something else, which may change
        victims = self._find(head)
        if not victims and not any(one.cache is not None and one.cache.may_share_tail for one in self._queues.running):
            self._no_way = head.request, now  # what those share may be copied: they take less when they have written
        return victims

    def _first(self) -> Request | None:
        """Return the first of the queue that does not wait for room below its tenant's cap; None where all do."""
        return self._first_and_passed()[0]

    def _first_and_passed(self) -> tuple[Request | None, set[str]]:
        """Return the first that does not wait for room below its tenant's cap, and whose requests it has passed."""
        waiting, passed = self._queues.waiting, set[str]()
        if not self._core.quotas.is_on:
            return (waiting[0] if waiting else None), passed
        for request in waiting:
            if request.tenant not in passed:
                if not self._relief.is_at_cap(request):
                    return request, passed
                passed.add(request.tenant)
        return None, passed

    def _has_place(self, head: _Head) -> bool:
        """Whether the head of the queue may begin beside the prompts that are partly computed now."""
        if not self._prefills.is_on:
            return True
        partial = [one for one in self._queues.with_blocks if one.num_computed_tokens + 1 < one.num_tokens]
        return self._prefills.lets_begin(head.num_to_compute, self._max_num_batched_tokens, partial)

    def _num_seats_lacking(self, head: _Head) -> int:
        """Return how many seats fewer are free than the head of the queue needs; 0 or less where it lacks none."""
        return head.request.num_seqs - (self._max_num_seqs - self._shares.num_seats)

    def _find(self, head: _Head) -> list[Request]:
        """Return who gives the seats and the memory that are missing, until nothing is."""
        victims: list[Request] = []
        num_seats = self._num_seats_lacking(head)
        has_seats = self._take(
            head.request, victims, _SEATS, lambda: sum(len(_seats(victim)) for victim in victims) >= num_seats
        )
        if has_seats and self._take(head.request, victims, _MEMORY, lambda: self._has_room_without(victims, head)):
            return victims
        return []

    def _take(self, head: Request, victims: list[Request], kind: _Kind, is_enough: Callable[[], bool]) -> bool:
        """Add to ``victims`` until they are enough; False if nobody more may go."""
        shares = self._shares
        own = shares.tenants[head.tenant]
        asks = sum(kind.of(shares, sample) for sample in (head, *head.forks))
        will_have = (kind.had(own) + asks) / own.weight
        left = {name: kind.had(tenant) for name, tenant in shares.tenants.items() if tenant.num_seats}
        left.pop(head.tenant, None)
        if kind is _MEMORY:  # what they would give is withheld
            left = {name: had for name, had in left.items() if self._core.quotas.helps(head.tenant, name, 0)}
        for gone in victims:
            if gone.tenant in left:
                left[gone.tenant] -= self._gives(gone, kind)
        while not is_enough():
            victim: Request | None = None
            while victim is None:
                most = max(left, key=lambda name: left[name] / shares.tenants[name].weight, default=None)
                if most is None or left[most] / shares.tenants[most].weight <= will_have:
                    return False
                victim = self._last_of(most, victims)
                if victim is None:
                    del left[most]
            left[victim.tenant] -= self._gives(victim, kind)
            if left[victim.tenant] / shares.tenants[victim.tenant].weight < will_have:
                return False
            victims.append(victim)
        return True

    def _last_of(self, tenant: str, victims: list[Request]) -> Request | None:
        """Return the last of a tenant's running requests that may go yet; the first of all in order never does."""
        running = self._queues.running
        first = min(running, key=_ORDER).leader  # who was let in last is at the end, whatever its order
        for request in reversed(running):
            self.num_looked_at += 1
            if request.tenant != tenant:
                continue
            leader = request.leader
            if leader is not first and leader not in victims and self._shares.num_made_way(leader) < MOST_WAYS_MADE:
                return leader
        return None

    def _gives(self, victim: Request, kind: _Kind) -> float:
        return sum(kind.of(self._shares, seat) for seat in _seats(victim))

    def _has_room_without(self, victims: list[Request], head: _Head) -> bool:
        """Whether there is memory for the head of the queue if ``victims`` go: growth of those that stay included."""
        seats = [seat for victim in victims for seat in _seats(victim)]
        gone = Gone(seats, sum(self._num_freed(victim) for victim in victims))
        return self._relief.has_room_without(gone, head.request, head.hit, self._step_id)

    def _num_freed(self, victim: Request) -> int:
        """Return how many blocks nobody else has, of those that ``victim`` has."""
        return loss_of(self._core, _seats(victim)).num_blocks

    def _lacks_memory(self, head: _Head) -> bool:
        """Whether there is no memory for the head of the queue, as far as that is known at little cost."""
        now = self._shares.num_changes
        if self._no_room != (head.request, now):
            if self._has_room_without([], head):
                return False
            self._no_room = head.request, now
        return True


class _Head:
    """The head of the queue, in one look: what of it is cached is looked up when somebody asks, and once."""

    __slots__ = ("_core", "_hit", "request")

    def __init__(self, request: Request, core: KVCore) -> None:
        self.request = request
        self._core = core
        self._hit: PrefixHit | None = None

    @property
    def hit(self) -> PrefixHit:
        """What of it is cached."""
        if self._hit is None:
            request = self.request
            self._hit = self._core.match(request.namespace, request.packed(), request.max_hit_tokens, mask=request.mask)
        return self._hit

    @property
    def num_to_compute(self) -> int:
        """How many of its tokens are not."""
        hit = self.hit
        return self.request.num_tokens - hit.num_blocks * self._core.block_size - hit.num_partial_tokens


class _Kind(Protocol):
    """Something that tenants have shares of."""

    def had(self, tenant: TenantShare, /) -> float:
        """Return how much of it a tenant has."""

    def of(self, shares: FairShares, request: Request, /) -> float:
        """Return how much of it one sequence takes."""


class _Seats:
    """Seats."""

    @staticmethod
    def had(tenant: TenantShare, /) -> float:
        """See :class:`_Kind`."""
        return tenant.num_seats

    @staticmethod
    def of(_shares: FairShares, _request: Request, /) -> float:
        """See :class:`_Kind`."""
        return 1.0


class _Memory:
    """Memory, in tokens as they are expected."""

    @staticmethod
    def had(tenant: TenantShare, /) -> float:
        """See :class:`_Kind`."""
        return tenant.num_tokens

    @staticmethod
    def of(shares: FairShares, request: Request, /) -> float:
        """See :class:`_Kind`."""
        return shares.held(request)


_SEATS, _MEMORY = _Seats(), _Memory()


def _seats(request: Request) -> list[Request]:
    """Return the sequences that go with ``request``: itself, those that will fork from it, and other beams."""
    return request.beams.seats if request.beams is not None else [request, *request.forks]
