"""Reservation: what must be free before somebody comes back who was preempted, so that it is not sent away again.

A request that waits for the first time is let in when its tokens fit. One that was preempted comes back when, beside
that, there is room for a while: for as many steps of everybody who runs, and of itself, as it had output tokens when it
went (a block's worth at least), times how often it was preempted; no more than it may sample yet. One that was
preempted more than ``MOST_PREEMPTIONS`` times comes back when nobody before it in order has blocks: then nobody can
take its own, since victims come behind their beneficiaries. So first come first served, with no slow tiers and no
failed steps, a request is preempted ``MOST_PREEMPTIONS + 1`` times at most.

Nobody is shut out by that for good. A reservation holds only as long as somebody before it in order has blocks: whoever
comes first in order, or alone, is let in as ever. Meanwhile it holds back only those behind it in order, as all do that
wait; at most for as many steps as those before it in order have tokens to compute yet, since these all get on in each
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.scheduler.victims import MOST_PREEMPTIONS

if TYPE_CHECKING:
    from pagefold.request import Request
    from pagefold.scheduler.queues import Queues

__all__ = ["Reservation"]


class Reservation:
    """Says for how long there must be room.

    Args:
        queues: who has blocks.
        block_size: tokens a block.
    """

    def __init__(self, queues: Queues, block_size: int) -> None:
        self._queues = queues
        self._block_size = block_size

    def num_steps(self, request: Request) -> int | None:
        """Return for how many steps there must be room beside ``request``'s tokens; None where it must wait."""
        if not request.num_preemptions:
            return 0
        if all(request.order < other.order for other in self._queues.with_blocks):
            return 0
        if request.num_preemptions > MOST_PREEMPTIONS:
            return None
        num_steps = request.num_preemptions * max(request.num_output_tokens, self._block_size)
        return min(num_steps, max(0, request.stop.max_total_tokens - request.num_tokens))
