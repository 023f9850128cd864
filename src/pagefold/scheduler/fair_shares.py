"""FairShares: the policy by which tenants share a server by their weights, however many requests each sends.

It is start-time fair queueing (Goyal, Vin and Cheng 1996, section 2; with several at once, SFQ(D) of Jin, Chase and
Kaur 2004) over what the virtual token counter of Sheng et al. (OSDI 2024, section 4) counts: a prompt's tokens, and
each output token as two. A request's *start tag* is fixed when it comes, and the smallest goes first::

    start = max(virtual time, finish tag of its tenant)        finish = start + cost / weight

So a tenant's burst stands behind its own earlier requests, one request split into many costs as much as before, and who
was idle has earned nothing. Within a tenant requests go in order of arrival; their ``priority`` counts for nothing.

*Virtual time* is how far the tenant has come that has been served most: the finish tag of the last of its requests that
was let in, less what of it still runs. It never goes back. Who comes anew is put just before it, and so before all that
this tenant has running.

What an output will cost is not known when a request comes. It is taken to be as long as it may be, or as the tenant's
outputs are on average, if that is less; when it has ended, the tenant's finish tag is moved by the difference, but not
below virtual time. Tags of requests that wait stay.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from pagefold.request import OrderKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.request import Request

__all__ = ["OUTPUT_WEIGHT", "FairShares", "TenantShare"]

OUTPUT_WEIGHT = 2
"""What an output token costs, in tokens of a prompt: as in the paper's experiments."""

_AHEAD = 1.0
"""Who comes anew is put so many tokens before virtual time: rounding must not put it behind those that run."""

_NUM_REMEMBERED = 32
"""A tenant's mean is over about so many of its last outputs."""


class TenantShare:
    """What one tenant has of the server, and how far it has come.

    Attributes:
        weight: its share beside the others' weights.
        num_seats: sequences that have blocks.
        num_tokens: what these are expected to hold at their ends.
        num_served: what it was served, in tokens: prompts that were computed, and outputs twice.
        num_waiting: its requests that have not been let in yet, each sample counted.
        num_made_way: how often its requests were preempted for other tenants' shares.
        finish: its finish tag.
    """

    __slots__ = (
        "dispatched",
        "finish",
        "last_start",
        "mean_output",
        "num_made_way",
        "num_outputs",
        "num_seats",
        "num_served",
        "num_tokens",
        "num_waiting",
        "outstanding",
        "weight",
    )

    def __init__(self) -> None:
        self.weight = 1.0
        self.num_seats = 0
        self.num_tokens = 0.0
        self.num_served = self.num_waiting = self.num_made_way = 0
        self.finish = self.last_start = self.dispatched = -inf
        self.outstanding = 0.0  # the cost of those let in that have not ended
        self.mean_output = 0.0
        self.num_outputs = 0

    @property
    def reached(self) -> float:
        """How far its requests have come in virtual time: those let in, less what of them has not ended."""
        return self.dispatched - self.outstanding / self.weight

    def expected_output(self, most: int) -> float:
        """Return how long an output is expected to be that has at most so many tokens."""
        return min(float(most), self.mean_output) if self.num_outputs else float(most)

    def learn(self, num_output_tokens: int) -> None:
        """Note how long an output was."""
        self.num_outputs = min(self.num_outputs + 1, _NUM_REMEMBERED)
        self.mean_output += (num_output_tokens - self.mean_output) / self.num_outputs


_NEW = TenantShare()


class FairShares:
    """Orders requests by their start tags, and knows what each tenant has.

    Attributes:
        tenants: what each has, by name. One that was here once stays: a key file names them all.
        num_changes: how often anything was let in or left: as long as it stays, so does who has how much.
    """

    name = "fair"
    heeds_priority = False

    def __init__(self) -> None:
        self.tenants: dict[str, TenantShare] = {}
        self.num_changes = 0
        self._virtual = 0.0
        self._costs: dict[Request, float] = {}  # of all that have not ended
        self._begun: set[Request] = set()  # of these, those that were let in, ever
        self._held: dict[Request, float] = {}  # of those that have a seat: the tokens expected
        self._num_made_way: dict[Request, int] = {}

    @property
    def shares(self) -> FairShares:
        """What tenants have."""
        return self

    @property
    def num_seats(self) -> int:
        """How many sequences have blocks, or will when their prompt is computed."""
        return len(self._held)

    def key(self, request: Request) -> OrderKey:
        """Return the start tag of a request that has just arrived."""
        tenant = self.tenants.get(request.tenant, _NEW)
        return OrderKey.of(max(self._virtual - _AHEAD, tenant.finish, tenant.last_start), request.index)

    def arrived(self, request: Request) -> None:
        """``request`` will wait, with those that will fork from it: its tenant's next one comes behind it."""
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            tenant = self.tenants[request.tenant] = TenantShare()
        tenant.weight = request.weight
        start = request.order.tag
        output = tenant.expected_output(request.stop.max_total_tokens - request.num_prompt_tokens)
        cost = request.num_prompt_tokens + OUTPUT_WEIGHT * output * request.num_seqs
        tenant.last_start = start
        tenant.finish = start + cost / tenant.weight
        tenant.num_waiting += request.num_seqs
        self._costs[request] = request.num_prompt_tokens + OUTPUT_WEIGHT * output
        self._costs.update(dict.fromkeys(request.forks, OUTPUT_WEIGHT * output))

    def level(self, request: Request) -> int:  # noqa: ARG002 - nobody is more urgent
        """See :class:`~pagefold.scheduler.policy.SchedulingPolicy`."""
        return 0

    def choose(self, waiting: Sequence[Request], now: float, num_cached: Callable[[Request], int]) -> Request:  # noqa: ARG002
        """See :class:`~pagefold.scheduler.policy.SchedulingPolicy`."""
        return waiting[0]

    def admitted(self, request: Request) -> None:
        """``request`` was let in, for the first time or again, with those that will fork from it."""
        tenant = self.tenants[request.tenant]
        samples = (request, *request.forks)
        if request not in self._begun:
            cost = sum(self._costs[sample] for sample in samples)
            self._begun.update(samples)
            tenant.num_waiting -= len(samples)
            tenant.outstanding += cost
            tenant.dispatched = max(tenant.dispatched, request.order.tag + cost / tenant.weight)
            self._advance(tenant)
        for sample in samples:
            held = self._costs[sample]
            self._held[sample] = held
            tenant.num_tokens += held
        tenant.num_seats += len(samples)
        self.num_changes += 1

    def left(self, request: Request) -> None:
        """``request`` has no blocks any more, nor a seat, if it had one."""
        held = self._held.pop(request, None)
        if held is not None:
            tenant = self.tenants[request.tenant]
            tenant.num_seats -= 1
            tenant.num_tokens = tenant.num_tokens - held if tenant.num_seats else 0.0
            self.num_changes += 1

    def ended(self, request: Request) -> None:
        """``request`` has ended: its tenant pays for what it was really served."""
        cost = self._costs.pop(request, None)
        if cost is None:
            return
        tenant = self.tenants[request.tenant]
        served = _served(request)
        tenant.num_served += served
        difference = (served - cost) / tenant.weight
        if request in self._begun:
            self._begun.discard(request)
            tenant.outstanding = tenant.outstanding - cost if tenant.outstanding > cost else 0.0
            tenant.dispatched += difference
            self._advance(tenant)
        else:
            tenant.num_waiting -= 1
        tenant.finish = max(tenant.finish + difference, min(tenant.finish, self._virtual))
        if request.has_answer:
            tenant.learn(request.num_output_tokens)
        self._num_made_way.pop(request, None)
        self.num_changes += 1

    def made_way(self, request: Request, head: Request) -> None:
        """``request`` is about to be preempted for ``head``, which is first of those that wait, and waits behind it."""
        for sample in (request, *request.forks) if request.beams is None else request.beams.seats:
            sample.order = max(sample.order, head.order.behind(sample.index))
        self._num_made_way[request] = self.num_made_way(request) + 1
        tenant = self.tenants[request.tenant]
        tenant.num_made_way += 1
        tenant.last_start = max(tenant.last_start, request.order.tag)  # who comes yet goes behind it

    def num_made_way(self, request: Request) -> int:
        """Return how often ``request`` has made way."""
        return self._num_made_way.get(request, 0)

    def held(self, request: Request) -> float:
        """Return the cost of a request that has not ended: what it counts as of memory, too."""
        return self._costs[request]

    def _advance(self, tenant: TenantShare) -> None:
        self._virtual = max(self._virtual, tenant.reached)


def _served(request: Request) -> int:
    """Return what a request was served, in tokens; of a prompt, what was computed for it once."""
    num_output = OUTPUT_WEIGHT * request.num_output_tokens
    if request.sample_index:
        return num_output
    num_computed = max(request.num_computed_tokens, request.max_computed_tokens)
    return max(0, min(num_computed, request.num_prompt_tokens) - max(0, request.num_cached_tokens)) + num_output
