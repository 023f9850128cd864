"""Suspicion: who may be planned after a step has failed, until it is known whose fault that was.

A step fails with everybody in it, and mostly one of them is the cause. So who was in it is suspected, and is planned
apart from the others, in ever smaller lots:

* First those that ran before, without those that the step had admitted; then these; then halves of whichever lot
  fails. A lot that runs is *clear*, and from then on runs beside every lot that is tried.
* Who is left by itself is planned alone. A failure counts against a request only if it was alone; with
  ``MAX_FAILED_ALONE`` of them in a row it ends.
* Who runs alone has the clear ones planned by themselves next, and then is planned with them. That failing, each has
  run without the other: it fails only in company. That counts too, and with ``MAX_FAILED_IN_COMPANY`` it ends.
* The clear ones failing by themselves, they are suspected in their turn.
* With ``MAX_FAILED_IN_A_ROW`` failed steps and none that ran between, the device is at fault, and all end. So that it
  is not blamed for what many requests do, from half of that on the clear ones are planned by themselves, and where
  there are none, one request of each lot in turn.

Bounds. One culprit among ``n`` costs at most ``ceil(log2(n)) + 4`` steps that fail: 11 of 128, and nobody else ends. A
search knows only those who were in the step that failed: who waits is not admitted before it is over, and no step is
planned behind another one. Each step of it settles a lot, halves one, or counts against somebody, and each lot is
tried in its turn, so nobody waits for longer than there are lots. Who is tried and cannot be planned, for want of
memory, is suspected no more: it waits like all others, and is newly admitted when it comes again.

Beams of one prompt are one here: the first of them stands for all.

While nothing has failed there is nothing here: :attr:`Suspicion.is_on` is False, and nobody asks more.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum, auto
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pagefold.request import Request

__all__ = ["MAX_FAILED_ALONE", "MAX_FAILED_IN_A_ROW", "MAX_FAILED_IN_COMPANY", "Suspicion"]

MAX_FAILED_ALONE = 3
"""A request ends when so many steps in a row fail with it alone in them. Two may have been a mishap."""

MAX_FAILED_IN_COMPANY = 3
"""A request ends when so many steps fail with it and the clear ones, and each of both runs without the other."""

MAX_FAILED_IN_A_ROW = 16
"""The device is at fault when so many steps fail and none runs between."""

_DOUBT_DEVICE = MAX_FAILED_IN_A_ROW // 2

_ALONE = f"{MAX_FAILED_ALONE} steps failed with this request alone in them"
_IN_COMPANY = f"{MAX_FAILED_IN_COMPANY} steps failed with this request and others, and none without either"
_DEVICE = f"{MAX_FAILED_IN_A_ROW} steps in a row failed, whoever was in them"


class _Trial(Enum):
    """Who is planned in a step of the search."""

    LOT = auto()
    """The first lot, with the clear ones; alone, if it is one request."""
    CLEAR = auto()
    """The clear ones."""
    JOINING = auto()
    """Somebody who ran alone, with the clear ones."""


class Suspicion:
    """Who is suspected, and who is to be planned next.

    Attributes:
        is_on: whether a culprit is looked for.
        num_failed_in_a_row: how many steps have failed since one ran.
    """

    __slots__ = (
        "_again",
        "_clear",
        "_failed_alone",
        "_failed_in_company",
        "_is_clear_sure",
        "_joining",
        "_lots",
        "_trial",
        "is_on",
        "num_failed_in_a_row",
    )

    def __init__(self) -> None:
        self.is_on = False
        self.num_failed_in_a_row = 0
        self._lots: deque[list[Request]] = deque()  # the first is tried next
        self._again: deque[list[Request]] = deque()  # against whom something counts: tried when no lot is left
        self._clear: list[Request] = []  # who runs and is in no lot, as of the last choice
        self._joining: list[Request] = []  # one who ran alone, until that has been tried with the clear ones
        self._is_clear_sure = False  # these have run since
        self._trial: _Trial | None = None  # of the step that is planned
        self._failed_alone: Counter[Request] = Counter()
        self._failed_in_company: Counter[Request] = Counter()

    @property
    def num_counted(self) -> int:
        """The most that counts against anybody."""
        return max([*self._failed_alone.values(), *self._failed_in_company.values()], default=0)

    def choose(self, running: Sequence[Request], waiting: Collection[Request]) -> set[Request] | None:
        """Return who alone may be planned in the next step; None where the search is over.

        If the step has not ended when it is called again, nobody who was chosen could be planned.

        Args:
            running: all that run.
            waiting: all that could be admitted.
        """
        self._forget_gone(running, waiting)
        if self._joining and not self._clear:
            self._clear, self._joining = self._joining, []
        if self._again and not self._lots:
            self._lots.append(self._again.popleft())
        if not self._lots and not self._joining:
            self._end()
            return None
        self._trial = self._next_trial()
        if self._trial is _Trial.CLEAR:
            return set(self._clear)
        suspects = self._joining or self._lots[0]
        return {*suspects} if len(suspects) == 1 and not self._joining else {*self._clear, *suspects}

    def ran(self, requests: Collection[Request]) -> None:
        """The step ran with these."""
        self.num_failed_in_a_row = 0
        if not self.is_on:
            return
        trial, self._trial = self._trial, None
        if trial is _Trial.CLEAR:
            self._is_clear_sure = True
        elif trial is _Trial.JOINING:
            del self._failed_in_company[self._joining.pop()]
        elif trial is _Trial.LOT:
            lot = self._lots.popleft()
            if len(requests) == 1:
                del self._failed_alone[lot[0]]
                self._joining = [one for one in lot if one in requests]
                self._is_clear_sure = False

    def failed(self, requests: Sequence[Request], admitted: Collection[Request]) -> dict[Request, str]:
        """The step failed with these, of whom it had admitted some. Return who ends by it, each with the reason."""
        trial, self._trial = self._trial, None
        joining, self._joining = self._joining, []
        lot = self._lots.popleft() if trial is _Trial.LOT else []
        self.num_failed_in_a_row += 1
        is_first, self.is_on = not self.is_on, True
        if self.num_failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            return self._blame_device((requests, joining, lot))
        if len(requests) == 1:
            return self._count(requests[0], self._failed_alone, MAX_FAILED_ALONE, _ALONE)
        if is_first:
            self._begin(requests, admitted)
        elif trial is _Trial.JOINING and joining[0] in requests:
            return self._count(joining[0], self._failed_in_company, MAX_FAILED_IN_COMPANY, _IN_COMPANY)
        else:  # of a lot nobody of whom was in the step, or none: the clear ones alone
            self._halve([one for one in lot if one in requests] or requests)
        return {}

    def spoiled(self) -> None:
        """The step was taken back, and that is nobody's fault: it comes again."""
        self._trial = None

    # Inside.

    def _begin(self, requests: Sequence[Request], admitted: Collection[Request]) -> None:
        before = [one for one in requests if one not in admitted]
        if admitted and before:
            self._halve([one for one in requests if one in admitted])
            self._lots.appendleft(before)
        else:
            self._halve(requests)

    def _halve(self, requests: Sequence[Request]) -> None:
        """Put two halves before all lots."""
        middle = (len(requests) + 1) // 2
        self._lots.extendleft(list(half) for half in (requests[middle:], requests[:middle]) if half)

    def _count(self, request: Request, counts: Counter[Request], most: int, why: str) -> dict[Request, str]:
        """Count a failed step against a request, which ends by it or is tried again when all others were."""
        counts[request] += 1
        if counts[request] >= most:
            return {request: why}
        self._again.append([request])
        return {}

    def _blame_device(self, others: Iterable[Iterable[Request]]) -> dict[Request, str]:
        everybody = [*chain(self._clear, *self._lots, *self._again, *others)]
        self._end()
        self.num_failed_in_a_row = 0
        return dict.fromkeys(everybody, _DEVICE)

    def _end(self) -> None:
        self.is_on = False
        self._lots.clear()
        self._again.clear()
        self._clear = []
        self._failed_alone.clear()
        self._failed_in_company.clear()

    def _forget_gone(self, running: Sequence[Request], waiting: Collection[Request]) -> None:
        """Forget who is not here any more, and who was chosen last and could not be planned."""
        trial, self._trial = self._trial, None
        if trial is _Trial.LOT:
            self._lots.popleft()
        elif trial is _Trial.JOINING:
            self._joining = []
        here = {*running, *waiting}
        self._lots, self._again = (
            deque(left for lot in lots if (left := [one for one in lot if one in here]))
            for lots in (self._lots, self._again)
        )
        self._joining = [one for one in self._joining if one in here]
        suspects = {*chain(self._joining, *self._lots, *self._again)}
        self._clear = [one for one in running if one not in suspects]

    def _next_trial(self) -> _Trial:
        if self._joining:
            return _Trial.JOINING if self._is_clear_sure else _Trial.CLEAR
        if self.num_failed_in_a_row >= _DOUBT_DEVICE:
            if self._clear:
                return _Trial.CLEAR
            first = self._lots[0]
            if len(first) > 1:
                self._lots[0] = first[:1]
                self._lots.append(first[1:])
        return _Trial.LOT
