"""OverlappedEngine: the same loop turned round, so that the host works while a card computes.

::

    plain                                   overlapped
    plan = scheduler.schedule(now)          plan = scheduler.schedule_ahead(now)   behind the step in flight
    result = runner.run(plan)               ahead = runner.launch(plan)
    scheduler.apply(result)                 scheduler.apply(before.wait())         of the step in flight
    deltas of the result                    deltas of that step, while the card computes the one ahead

So when a step ends, the next one is queued on the card already, and everything is behind the card: planning, queueing,
``apply``, texts, and what comes between two calls of :meth:`OverlappedEngine.step`: delivery, new requests, their
prompts. Where the next step depends on the tokens of the one in flight (see :meth:`Scheduler.schedule_ahead`), that one
lands first: then ``apply``, ``schedule`` and queueing are not hidden for once, and all else is the same. So it is as
long as anybody runs who may get drafts, which follow those tokens.

A request that ends by a token is found out when its next token is being computed already; that token is dropped, as of
one that is cancelled during a step. So every request gets the tokens of the plain loop.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from pagefold.engine.engine import Engine
from pagefold.scheduler.times import tell_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.outputs import OutputDelta
    from pagefold.request import FinishReason, Request
    from pagefold.steps import LaunchingRunner, StepPlan, StepResult

__all__ = ["OverlappedEngine"]


class _Launched(NamedTuple):
    """A step that was launched: its plan, when, and what waits for its result, or raises why it could not be."""

    plan: StepPlan
    begun_s: float
    wait: Callable[[], StepResult]
    is_launched: bool = True


class OverlappedEngine(Engine):
    """An engine whose runner is a :class:`~pagefold.steps.LaunchingRunner`. Without slow tiers.

    Between two calls of :meth:`step` one step is in flight: what must find none (:meth:`begin_reset`) lands it first.

    Attributes:
        num_launched: steps that were launched.
        num_ahead: how many of these while the step before was in flight.
    """

    def __init__(self, **parts: Any) -> None:  # noqa: ANN401 - those of Engine
        super().__init__(**parts)
        assert not self.tiering.is_on, "what slow tiers bring is noted between steps"
        self._looks_ahead = True
        self.num_launched = self.num_ahead = 0
        self._launched: deque[_Launched] = deque()  # two at most, and one between steps
        self._landed_s = 0.0  # when the last step did
        self._landed: list[tuple[Request, FinishReason | None]] = []  # got a token that nobody was told of
        self._failed: list[
            tuple[list[Request], Exception | None]
        ] = []  # ended by failed steps, which nobody was told either

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return super().has_work or bool(self._launched or self._landed or self._failed)

    def decide_in_order(self) -> None:
        """Launch no step before the last one's tokens are known; see :meth:`Engine.decide_in_order`."""
        self._looks_ahead = False

    def abort(self, request_id: str) -> bool:
        """End a request whose caller has gone; see :meth:`Engine.abort`."""
        # What has landed and was not told is not told to who comes by this name next.
        self._landed = [(request, reason) for request, reason in self._landed if request.parent_id != request_id]
        self._failed = [
            ([request for request in ended if request.parent_id != request_id], error) for ended, error in self._failed
        ]
        return super().abort(request_id)

    def begin_reset(self) -> tuple[int, Callable[[], None]]:
        """Forget every cached prefix; see :meth:`Engine.begin_reset`."""
        self._land_all()
        return super().begin_reset()

    def step(self) -> list[OutputDelta]:
        """Launch the next step, land the one before, and return what that one added, request by request."""
        if self._launched and self._looks_ahead and not self.drafting.drafts_for_any:
            plan = self.scheduler.schedule_ahead(self._clock())
            if plan is not None:
                self._launch(plan)
                self.num_ahead += 1
        self._land()
        if self._launched and not self._launched[0].is_launched:
            self._land()
        if not self._launched:
            self.drafting.prepare()
        now = self._clock()
        timed_out: list[Request] = []
        if not self._launched:
            plan = self.scheduler.schedule(now)
            timed_out = self.scheduler.timed_out
            if plan.num_rows:
                self._launch(plan)
                if not self._launched[0].is_launched:
                    self._land()
        return self._deltas(timed_out, now)

    def _check_names(self, sample_ids: list[str]) -> None:
        """Land first what has a row too many of a request that had such a name and has ended."""
        if any(name not in self._outputs.texts and self.scheduler.get(name) is not None for name in sample_ids):
            self._land_all()
        super()._check_names(sample_ids)

    def _deltas(self, timed_out: list[Request], now: float) -> list[OutputDelta]:
        """Tell what has happened since the last time: tokens first, then who ended without one."""
        landed, self._landed = self._landed, []
        failed, self._failed = self._failed, []
        deltas: list[OutputDelta] = []
        for request, reason in landed:
            if request.request_id in self._outputs.texts:
                deltas += self._outputs.deltas(request, reason, now)
        for ended, error in failed:
            deltas += super()._all_failed(ended, error)
        deltas += [self._timed_out(request, now) for request in timed_out if request.request_id in self._outputs.texts]
        return deltas

    def _launch(self, plan: StepPlan) -> None:
        """Launch a step. One that cannot be launched fails when it lands, in its turn."""
        self.num_launched += 1
        now = self._clock()
        try:
            launched = _Launched(plan, now, cast("LaunchingRunner", self.runner).launch(plan))
        except Exception as error:  # noqa: BLE001 - as in the plain loop
            launched = _Launched(plan, now, partial(_raise, error), is_launched=False)
        except BaseException as interrupt:
            self._take_back_all(interrupt)
            raise
        self._launched.append(launched)

    def _land_all(self) -> None:
        while self._launched:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest step in flight, if there is one, and apply or abandon it."""
        if not self._launched:
            return
        launched = self._launched[0]
        try:
            result = launched.wait()
        except Exception as error:  # noqa: BLE001 - as in the plain loop
            self._launched.popleft()
            self._drain()  # what was planned on its tokens is taken back with it
            self._abandon(launched.plan, error)
            return
        except BaseException as interrupt:
            self._take_back_all(interrupt)
            raise
        self._launched.popleft()
        now = self._clock()
        requests = self.scheduler.apply(result, now)
        self._learn(launched, now)
        tell_tokens(self._emit, requests, now, self.scheduler.core.block_size)
        self._landed += [(request, request.finish_reason) for request in requests]
        if self.scheduler.corrupted:
            self._all_failed(self._corrupted(), None)

    def _learn(self, launched: _Launched, now: float) -> None:
        """Tell the arbiter what a step took, since it was launched or the one before had ended."""
        begun_s, self._landed_s = max(launched.begun_s, self._landed_s), now
        arbiter, plan = self.scheduler.core.arbiter, launched.plan
        if not plan.host_ops.loads:
            arbiter.learn_compute(len(plan.token_ids), plan.num_rows, now - begun_s)

    def _all_failed(self, ended: list[Request], error: Exception | None) -> list[OutputDelta]:
        """Keep them until all have been told of the tokens that they got before.

        Not those who have been told their end: somebody else may come by their names before the others are told.
        """
        self._failed.append(([request for request in ended if request.request_id in self._outputs.texts], error))
        return []

    def _take_back_all(self, interrupt: BaseException) -> None:
        """Whoever catches an interrupt finds no step in flight."""
        try:
            self._drain()
        finally:  # somebody may interrupt that too
            self._launched.clear()
            self.scheduler.abandon(type(interrupt).__name__, is_blamed=False)

    def _drain(self) -> None:
        """Let the steps in flight end, whatever comes of them: what they write must not be given to others before."""
        while self._launched:
            with contextlib.suppress(Exception):
                self._launched.popleft().wait()


def _raise(error: Exception) -> NoReturn:
    raise error
