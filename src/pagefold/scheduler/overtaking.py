"""Overtaking: who may be let in before a long prompt that waits for a place among long ones, and how often that may be.

Stated bound: a request is overtaken by at most ``MAX_OVERTAKEN`` others so, whatever these are and whenever they come.
When it has been, nobody passes it. Only the first ``MAX_LOOKED_AT`` of the queue overtake, in their order; and none
takes the memory that the first of the queue is going to get.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.request import Request

__all__ = ["MAX_LOOKED_AT", "MAX_OVERTAKEN", "beside", "has_passed"]

MAX_OVERTAKEN = 32
"""By so many at most is a request overtaken while it waits for a place among long prompts."""

MAX_LOOKED_AT = 32
"""So many of the queue are looked at, from its head on."""


def beside(request: Request, waiting: Sequence[Request]) -> Iterator[Request]:
    """Yield who may go before ``request``, which has no place, in the order of the queue.

    None comes behind somebody whom nobody may pass.
    """
    for other in islice(waiting, MAX_LOOKED_AT):
        if other is not request:
            yield other
        if other.num_overtaken >= MAX_OVERTAKEN:
            return


def has_passed(request: Request, waiting: Sequence[Request]) -> None:
    """Note that ``request``, which waits no more, has overtaken those of the queue that come before it."""
    for other in waiting:
        if other.order > request.order:
            return
        other.num_overtaken += 1
