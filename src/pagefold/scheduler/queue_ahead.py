"""QueueAhead: what a request that comes now would find before it, in the policy's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv import num_blocks_for
from pagefold.request import OrderKey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv import KVCore
    from pagefold.request import Request
    from pagefold.scheduler.queues import Queues

__all__ = ["LAST_OF_ALL", "Ahead", "QueueAhead"]

LAST_OF_ALL = OrderKey.of(float("inf"), 0)
"""A key behind all others."""


class Ahead(NamedTuple):
    """What is before a request.

    Attributes:
        num_tokens: prompt tokens that are computed before its own, those of running requests that are left included.
        num_to_leave: how many sequences must leave before there is a seat and memory for it.
        is_idle: whether no request is here at all.
    """

    num_tokens: int
    num_to_leave: float
    is_idle: bool


class QueueAhead:
    """Looks at queues and memory when somebody asks. That takes a look at each request that is here.

    Args:
        queues: who runs, and who waits.
        core: the KV core.
        max_num_seqs: sequences running at once.

    Attributes:
        is_contended: whether somebody was not let in by the last step for want of a seat or of memory. Then each that
            waits takes the place of one that leaves, whatever there seems to be.
    """

    def __init__(self, queues: Queues, core: KVCore, max_num_seqs: int) -> None:
        self._queues = queues
        self._core = core
        self._max_num_seqs = max_num_seqs
        self.is_contended = False

    def of(self, order: OrderKey = LAST_OF_ALL, num_tokens: int = 0, num_seqs: int = 1) -> Ahead:
        """Return what is before a request that is not here yet.

        Everybody who runs has a seat and memory, whatever the order; of those that wait only those count whose key is
        smaller.

        Args:
            order: its key.
            num_tokens: of its prompt.
            num_seqs: how many sequences it becomes.
        """
        queues = self._queues
        running = queues.with_blocks
        waiting = [*_before(order, queues.waiting), *_before(order, queues.fetching.values())]
        num_waiting_tokens = sum(len(request.token_ids) for request in waiting)
        num_left = sum(_num_left(request) for request in _before(order, running))
        num_running = sum(request.num_seqs for request in running)
        num_to_begin = num_seqs + sum(request.num_seqs for request in waiting)
        num_to_leave = float(max(0, num_running + num_to_begin - self._max_num_seqs))
        if self.is_contended:
            num_to_leave = max(num_to_leave, float(num_to_begin))
        if running:
            core = self._core
            needed = num_blocks_for(num_left + num_waiting_tokens + num_tokens, core.block_size) * core.num_groups
            missing = needed - core.num_available_to("")
            if missing > 0:
                num_to_leave = max(num_to_leave, missing / max(1.0, core.num_active / num_running))
        return Ahead(num_left + num_waiting_tokens, num_to_leave, is_idle=not queues)


def _before(order: OrderKey, requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.order < order]


def _num_left(request: Request) -> int:
    """Return how many tokens are left to compute of who runs; the one that each decodes is no prompt's."""
    num_left = len(request.token_ids) - request.num_computed_tokens
    return num_left if num_left > 1 else 0
