"""ExpectedGrowth: lets a request in when its expected end fits beside the expected ends of those that run.

Each request has an expected end, in tokens. From these follow two bounds of what all will ever hold together, and a
request is let in if either fits:

- *All at their ends.* What is held now, and all that anybody is to take yet. Blocks that several share count once. It
  supposes that nobody leaves before the last has got where it ends, which is much too much where outputs are long.
- *As each ends.* What is held at the step in which each ends, by those that are still there, who have grown as much as
  there are steps between: the most of that (Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA
  Guarantees", section 3, future required memory). Blocks that are shared now count for each that has them, since who
  leaves does not free them.

Nothing of that changes while all grow as expected. So it is kept as sums, which change when somebody comes, goes, or
takes a block; and no step asks all that run. Ends are kept by the step in which they come, in lots of a block's tokens:
whoever takes a block is in the right lot again, however fast it got on. Who gets beyond its expected end has a new one.

A share of the pool stays free beside all that (``Relief.watermark_blocks``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.scheduler.forecast import LONGEST, Forecast, OutputForecasts
from pagefold.scheduler.growth import NOBODY_GONE, Gone, PromptOnly

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.events import Emit
    from pagefold.kv import Block, KVCore
    from pagefold.request import Request
    from pagefold.scheduler.forecast import Forecaster
    from pagefold.scheduler.growth import AdmissionRule
    from pagefold.scheduler.needs import Needs

__all__ = ["ADMISSION_RULES", "ExpectedGrowth"]


class _Expected:
    """What is expected of one that runs.

    Attributes:
        end: how many tokens it will have.
        num_left: blocks that it takes yet.
        lot: in which lot of steps it ends.
        num_blocks: that it has at its end.
    """

    __slots__ = ("end", "lot", "num_blocks", "num_left")

    def __init__(self) -> None:
        self.end = self.num_left = self.lot = self.num_blocks = 0


class _Lot:
    """Those that end in the same lot of steps: how many, and the blocks that they have then."""

    __slots__ = ("num_blocks", "num_seqs")

    def __init__(self) -> None:
        self.num_seqs = self.num_blocks = 0


class ExpectedGrowth:
    """Sums up expected ends.

    Args:
        core: the KV core.
        needs: how many blocks requests take.
        forecaster: says how long outputs are.
        name: of the rule.
        leaves: whether it counts on those that end first; else all are thought to be at their ends at once.

    Attributes:
        num_promised: blocks that those that run are expected to take yet.
    """

    def __init__(self, core: KVCore, needs: Needs, forecaster: Forecaster, name: str, *, leaves: bool) -> None:
        self.name = name
        self.num_promised = 0
        self._core = core
        self._needs = needs
        self._forecaster = forecaster
        self._leaves = leaves
        self._watermark_blocks = needs.watermark_blocks
        self._growth_a_lot = 0 if core.trims else core.num_groups  # of a window there is none, or some; a bound is 0
        self._forecasts: dict[Request, Forecast] = {}  # of all that have been next, once
        self._running: dict[Request, _Expected] = {}
        self._lots: dict[int, _Lot] = {}

    def ended(self, request: Request) -> None:
        """See :class:`AdmissionRule`."""
        self._forecasts.pop(request, None)
        self._forecaster.ended(request)

    def note(self, request: Request, step_id: int) -> None:
        """See :class:`AdmissionRule`."""
        expected = self._running.get(request)
        if expected is None:
            expected = self._running[request] = _Expected()
            expected.end = request.num_prompt_tokens + self._forecast_of(request).likely_tokens
        if request.num_tokens > expected.end or not expected.num_blocks:
            self._take_out(expected)
            if request.num_tokens > expected.end:
                expected.end = self._renewed(request)
            expected.num_blocks = self._needs.at(request, expected.end) + self._of_forks(request, expected.end)
            self._put_in(expected, self._lot_of(request, expected.end, step_id))
        elif (lot := self._lot_of(request, expected.end, step_id)) != expected.lot:
            self._take_out(expected)
            self._put_in(expected, lot)
        num_left = self._needs.left(request, expected.end)
        if request.forks:
            num_left += self._of_forks(request, expected.end)
        self.num_promised += num_left - expected.num_left
        expected.num_left = num_left

    def forget(self, request: Request) -> None:
        """See :class:`AdmissionRule`."""
        expected = self._running.pop(request, None)
        if expected is not None:
            self.num_promised -= expected.num_left
            self._take_out(expected)

    def has_room(
        self,
        request: Request,
        found: list[Block],
        step_id: int,
        *,
        beside: Request | None = None,
        gone: Gone = NOBODY_GONE,
    ) -> bool:
        """See :class:`AdmissionRule`."""
        going = [self._running[one] for one in gone.requests if one in self._running]
        if len(self._running) == len(going):
            return True
        core = self._core
        needed = self._watermark_blocks + self._at_end(request)
        if beside is not None:
            needed += self._at_end(beside)
        num_shared = sum(1 for block in found if block.num_table_refs)
        num_promised = self.num_promised - sum(expected.num_left for expected in going)
        num_available = core.num_available_to(request.tenant) + core.pool.num_pinned
        if needed + num_promised - num_shared <= num_available + gone.num_blocks:
            return True
        if not self._leaves:
            return False
        for expected in going:
            self._take_out(expected)
        most = self._most_at_once(needed, request, step_id)
        for expected in going:
            self._put_in(expected, expected.lot)
        return most <= core.pool.num_blocks - core.quotas.num_withheld_from(request.tenant)

    # Inside.

    def _forecast_of(self, request: Request) -> Forecast:
        """Return the forecast of a request; of one that is next for the first time, by what is known now."""
        forecast = self._forecasts.get(request)
        if forecast is None:
            forecast = self._forecasts[request] = self._forecaster.forecast(request)
        return forecast

    def _end_of(self, request: Request) -> int:
        """Return with how many tokens a request that waits is thought to end."""
        most = request.stop.max_total_tokens
        forecast = request.num_prompt_tokens + self._forecast_of(request).most_tokens
        return min(most, max(forecast, request.num_tokens + 1))

    def _at_end(self, request: Request) -> int:
        """Return how many blocks a request that waits is expected to have at its end, its samples included."""
        end = self._end_of(request)
        return self._needs.at(request, end) + self._of_forks(request, end)

    def _of_forks(self, request: Request, end: int) -> int:
        """Return how many blocks those take who will fork from a request: a copy of its last one, and their own."""
        if not request.forks:
            return 0
        num_own = self._needs.at(request, end) - self._needs.at(request, request.num_prompt_tokens)
        return len(request.forks) * (num_own + self._core.num_groups)

    def _renewed(self, request: Request) -> int:
        """Return the new end of a request that has passed the one that was expected."""
        num_tokens = self._forecaster.renewed(request)
        old = self._forecast_of(request)
        self._forecasts[request] = old._replace(likely_tokens=num_tokens, most_tokens=max(num_tokens, old.most_tokens))
        return max(request.num_tokens, request.num_prompt_tokens + num_tokens)

    def _most_at_once(self, needed: int, request: Request, step_id: int) -> int:
        """Return the most blocks that are held at once, if a request is let in now.

        Args:
            needed: blocks that are held for it at its end.
            request: that waits.
            step_id: number of the step that would let it in.

        Those who go on behind somebody's end have at least so many blocks less then than at their own as lie wholly
        between. Who should have ended already is about to.
        """
        lots, a_lot = self._lots, self._growth_a_lot
        now, last = step_id // self._core.block_size, self._lot_of(request, self._end_of(request), step_id)
        most = held = num_growing = num_ending = 0
        at = last
        for end in sorted({*lots, last}, reverse=True):
            then = max(end, now)
            if then != at:
                held -= a_lot * (num_growing * (at - then) - num_ending)
                at, num_ending = then, 0
            if end in lots:
                held += lots[end].num_blocks
                num_growing += lots[end].num_seqs
                num_ending += lots[end].num_seqs
            if then <= last:
                most = max(most, held + needed - a_lot * request.num_seqs * max(0, last - then - 1))
        return most

    def _lot_of(self, request: Request, end: int, step_id: int) -> int:
        """Return in which lot of steps a request ends, a token a step from this one on."""
        return (step_id + end - request.num_tokens) // self._core.block_size

    def _put_in(self, expected: _Expected, number: int) -> None:
        expected.lot = number
        lot = self._lots.get(number)
        if lot is None:
            lot = self._lots[number] = _Lot()
        lot.num_seqs += 1
        lot.num_blocks += expected.num_blocks

    def _take_out(self, expected: _Expected) -> None:
        if not expected.num_blocks:
            return
        lot = self._lots[expected.lot]
        lot.num_seqs -= 1
        lot.num_blocks -= expected.num_blocks
        if not lot.num_seqs:
            del self._lots[expected.lot]


ADMISSION_RULES: dict[str, Callable[[KVCore, Needs, Emit], AdmissionRule]] = {
    "predicted": lambda core, needs, emit: ExpectedGrowth(core, needs, OutputForecasts(emit), "predicted", leaves=True),
    "prompt": lambda _core, _needs, _emit: PromptOnly(),
    "max_tokens": lambda core, needs, _emit: ExpectedGrowth(core, needs, LONGEST, "max_tokens", leaves=False),
}
"""Every rule by its name in ``--admission``; called with the core, the needs of requests, and where events go."""
