"""OverlappedEngine: the same loop turned round, so that a card computes while the host does what can wait.

::

    plain                                   overlapped
    plan = scheduler.schedule(now)          result = flight()            of the step before
    result = runner.run(plan)               scheduler.apply(result)
    scheduler.apply(result)                 plan = scheduler.schedule(now)
    deltas of the result                    flight = runner.launch(plan)
                                            deltas of the result, while the card computes

What comes between two calls of :meth:`OverlappedEngine.step` is behind the card too: delivery, new requests, their
prompts. What is not: ``apply``, ``schedule`` and queueing. A request that ends by a stop string is found out when its
next token is being computed; that token is dropped, as of one that is cancelled during a step. So every request gets
the tokens of the plain loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pagefold.engine.engine import Engine
from pagefold.times import tell_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.outputs import OutputDelta
    from pagefold.request import FinishReason, Request
    from pagefold.steps import LaunchingRunner, StepPlan, StepResult

__all__ = ["OverlappedEngine"]


class _Flight(NamedTuple):
    """A step that was launched: its plan, and what waits for its result."""

    plan: StepPlan
    wait: Callable[[], StepResult]


class OverlappedEngine(Engine):
    """An engine whose runner is a :class:`~pagefold.steps.LaunchingRunner`. Without slow tiers.

    Between two steps one is in flight, so what must find none (:meth:`begin_reset`) lands it first.
    """

    def __init__(self, **parts: Any) -> None:  # noqa: ANN401 - those of Engine
        super().__init__(**parts)
        assert self.tiering is None, "what slow tiers bring is noted between steps"
        self._flight: _Flight | None = None
        self._landed: list[tuple[Request, FinishReason | None]] = []  # got a token that nobody was told of
        self._failed: list[OutputDelta] = []  # nor of these

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return super().has_work or self._flight is not None or bool(self._landed or self._failed)

    def begin_reset(self) -> tuple[int, Callable[[], None]]:
        """Forget every cached prefix; see :meth:`Engine.begin_reset`."""
        self._land()
        return super().begin_reset()

    def step(self) -> list[OutputDelta]:
        """Land the step before, launch the next one, and return what the former added, request by request."""
        self._land()
        landed, self._landed = self._landed, []
        deltas, self._failed = self._failed, []
        now = self._clock()
        plan = self.scheduler.schedule(now)
        timed_out = self.scheduler.timed_out
        if plan.num_rows:
            self._launch(plan)
        for request, reason in landed:
            if request.request_id in self._texts:
                deltas.append(self._delta(request, reason, now))
        deltas += [self._timed_out(request, now) for request in timed_out if request.request_id in self._texts]
        return deltas

    def _launch(self, plan: StepPlan) -> None:
        try:
            self._flight = _Flight(plan, cast("LaunchingRunner", self.runner).launch(plan))
        except Exception as error:  # noqa: BLE001 - as in the plain loop
            self._failed += self._abandon(plan, error)
        except BaseException as interrupt:
            self.scheduler.abandon(type(interrupt).__name__)
            raise

    def _land(self) -> None:
        """Wait for the step in flight, if there is one, and apply or abandon it."""
        if self._flight is None:
            return
        (plan, wait), self._flight = self._flight, None
        try:
            result = wait()
        except Exception as error:  # noqa: BLE001 - as in the plain loop
            self._failed += self._abandon(plan, error)
            return
        except BaseException as interrupt:
            self.scheduler.abandon(type(interrupt).__name__)
            raise
        requests = self.scheduler.apply(result)
        tell_tokens(self._emit, requests, self._clock(), self.scheduler.core.block_size)
        self._landed += [(request, request.finish_reason) for request in requests]
