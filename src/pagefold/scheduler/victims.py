"""Victims: who of those that run gives its blocks to another one.

Only who comes behind the beneficiary in order, and has no row of the step being planned yet: so the first in order
always gets on, and a plan never has a row of somebody who was preempted for it. Among these goes, by the first of these
that tells them apart,

1. the least urgent, as the policy says (:meth:`SchedulingPolicy.level`): nobody gives way to somebody less urgent;
2. who was preempted least often: who has come back is not sent away again while others never were;
3. who loses least for each block that is freed (``kv/losses.py``), in whole blocks: how far the last one is filled
   would only choose those that have few blocks, and so more of them;
4. the last in order.

Where tenants have quotas, these are only such as give what the beneficiary can have: at its cap its own tenant's, and
nobody's who has no more than its floor (``kv/quotas.py``).

Where nobody is behind it, the beneficiary goes itself. So it does where those behind it were preempted as often as
anybody may be (``MOST_PREEMPTIONS``), unless the same holds of it, it is more urgent than they, or the step has no row
yet.

That recomputing what was preempted costs less than keeping a copy of it in the host's memory where requests are short,
and that the last to come should go first, is vLLM's (Kwon et al., 2023, section 4.5); whom it costs least is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KVCore
    from pagefold.kv.losses import Loss
    from pagefold.request import Request
    from pagefold.scheduler.policy import SchedulingPolicy
    from pagefold.scheduler.queues import Queues

__all__ = ["MOST_PREEMPTIONS", "Victims", "loss_of"]

MOST_PREEMPTIONS = 2
"""Who was preempted so often is a victim again only where nobody else of its level can be."""


class Victims:
    """Chooses victims. One choice looks at everybody who runs, once.

    Args:
        core: says what they would lose.
        queues: who has blocks.
        policy: how urgent each is.
    """

    def __init__(self, core: KVCore, queues: Queues, policy: SchedulingPolicy) -> None:
        self._core = core
        self._queues = queues
        self._policy = policy

    def choose(self, beneficiary: Request, num_planned: int, num_new: int) -> Request:
        """Return who gives its blocks back, the first seat of beams for all of them; perhaps the beneficiary itself.

        Args:
            beneficiary: who needs a block, and runs.
            num_planned: how many of ``running`` have a row of the step being planned; it is behind those.
            num_new: how many blocks it lacks.
        """
        own = beneficiary.leader
        behind = [one for one in self._queues.running[num_planned:] if one is not own and one.leader is one]
        behind += [one for one in self._queues.set_aside if one.order > own.order and one.leader is one]
        if self._core.quotas.is_on:
            behind = [one for one in behind if self._core.quotas.helps(own.tenant, one.tenant, num_new)]
        if not behind:
            return own
        rank = min(map(self._rank, behind))
        level, num_preemptions = -rank[0], rank[1]
        is_spared = num_preemptions >= MOST_PREEMPTIONS > own.num_preemptions
        if is_spared and num_planned and self._policy.level(own) >= level:
            return own
        return min((one for one in behind if self._rank(one) == rank), key=self._loss)

    def _rank(self, request: Request) -> tuple[int, int]:
        """Return what is looked at before what is lost; the least goes first."""
        return -self._policy.level(request), request.num_preemptions

    def _loss(self, request: Request) -> tuple[float, list[float]]:
        """Return the blocks lost for each block freed, and behind it the order, the last first."""
        seats = [request] if request.beams is None or not request.beams.has_begun else request.beams.seats
        loss = loss_of(self._core, seats)
        return loss.in_blocks(self._core.block_size), [-part for part in request.order]


def loss_of(core: KVCore, seats: Sequence[Request]) -> Loss:
    """Return what preempting ``seats``, all of them at once, would come to; who has no cache yet loses nothing."""
    caches = [(seat.cache, seat.num_computed_tokens) for seat in seats if seat.cache is not None]
    return core.losses.of([cache for cache, _ in caches], [num_tokens for _, num_tokens in caches])
