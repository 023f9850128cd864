"""The real scheduler and cache under open load on a virtual clock, for ``benchmarks/load.py``.

What a step takes is said by :class:`~pagefold.sim.LinearStepCost`. The runner computes nothing, and samples a stop
token where the output ends: only it knows how long an output is.
"""

from __future__ import annotations

import inspect
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from load_traffic import MAX_TOKENS, Outcome, Sent

from pagefold.events import Event, RequestPreempted, StepApplied
from pagefold.kv import KVCore, audit
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import LinearStepCost, NullRunner, VirtualClock, hashed_token

__all__ = ["Machine", "Run", "has_admission", "has_guardrails", "run"]

STOP = 2**30
"""No hash is so large."""
HORIZON_S = 36_000.0
"""Whoever has not ended so long after the last arrival never will."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What serves.

    Attributes:
        num_blocks: of the KV pool, of 16 tokens each.
        max_num_seqs: sequences at once.
        max_num_batched_tokens: of a step.
        admission: by which rule requests are let in.
        guardrails: fields of the guardrails' settings; empty for none.
        cost: what a step takes.
    """

    num_blocks: int = 1_500
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    admission: str = "prompt"
    guardrails: dict[str, Any] = field(default_factory=dict)
    cost: LinearStepCost = field(default_factory=LinearStepCost)


@dataclass
class Run:
    """How it went.

    Attributes:
        outcomes: of all requests, in order of arrival.
        seconds: until the last one ended.
        num_tokens: computed in all steps.
        num_recomputed: of them, once more.
        num_leaked: blocks that are neither free nor cached when nobody is there.
        num_checked, num_within: outputs that were predicted, and those that were within what was stated.
    """

    outcomes: list[Outcome]
    seconds: float = 0.0
    num_tokens: int = 0
    num_recomputed: int = 0
    num_leaked: int = 0
    num_checked: int = 0
    num_within: int = 0

    @property
    def share_preempted(self) -> float:
        """Of all requests."""
        return sum(outcome.num_preemptions > 0 for outcome in self.outcomes) / max(1, len(self.outcomes))


def has_admission(name: str) -> bool:
    """Whether this checkout lets requests in by a rule of that name."""
    return name == "prompt" or "admission" in inspect.signature(Scheduler).parameters


def has_guardrails() -> bool:
    """Whether this checkout sheds load."""
    return "guardrails" in inspect.signature(Scheduler).parameters


def run(sent: list[Sent], machine: Machine) -> Run:
    """Serve ``sent``, and return what became of it; the blocks are audited at the end."""
    return _Server(sent, machine).run()


class _Server:
    """One run.

    Args:
        sent: what comes.
        machine: what serves.
    """

    def __init__(self, sent: list[Sent], machine: Machine) -> None:
        self._machine = machine
        self._clock = VirtualClock()
        self._result = Run([Outcome(one) for one in sent])
        self._by_id = {f"r{number}": outcome for number, outcome in enumerate(self._result.outcomes)}
        self._coming = deque(enumerate(sent))
        self._last_s: dict[str, float] = {}
        lengths = [one.output_tokens for one in sent]
        self._runner = NullRunner(lambda seed, draw: STOP if draw + 1 == lengths[seed] else hashed_token(seed, draw))
        settings: dict[str, Any] = {"admission": machine.admission} if has_admission("") else {}
        limits = SchedulerLimits(machine.max_num_seqs, machine.max_num_batched_tokens)
        if machine.guardrails:
            settings["guardrails"] = _guardrails(machine)
        core = KVCore(machine.num_blocks, emit=self._emit)
        self._scheduler = Scheduler(core, limits, emit=self._emit, **settings)

    def run(self) -> Run:
        """Serve until nobody is left."""
        clock, scheduler = self._clock, self._scheduler
        end_s = (self._coming[-1][1].at_s if self._coming else 0.0) + HORIZON_S
        while (self._coming or scheduler.has_work) and clock() < end_s:
            if not scheduler.has_work:
                clock.advance_to(self._coming[0][1].at_s)
            while self._coming and self._coming[0][1].at_s <= clock():
                self._take(_request(*self._coming.popleft()))
            if scheduler.has_work:
                self._step()
        self._result.seconds = clock()
        audit(scheduler.core)
        self._result.num_leaked = scheduler.core.num_active
        return self._result

    def _take(self, request: Request) -> None:
        """Queue a request, unless the guardrails refuse it."""
        if self._machine.guardrails and self._scheduler.judge(request) is not None:
            self._by_id[request.request_id].is_shed = True
        else:
            self._scheduler.add(request)

    def _step(self) -> None:
        plan = self._scheduler.schedule(self._clock())
        assert plan.num_rows, "the first in order always gets on"
        sampled = self._runner.run(plan)
        self._clock.advance(self._machine.cost(plan))
        now_s = self._clock()
        landed = (sampled, now_s) if self._machine.guardrails else (sampled,)
        for request in self._scheduler.apply(*landed):
            outcome = self._by_id[request.request_id]
            before = self._last_s.get(request.request_id)
            self._last_s[request.request_id] = now_s
            if before is None:
                outcome.ttft_s = now_s - outcome.sent.at_s
            else:
                outcome.gaps_s.append(now_s - before)
            if request.finish_reason is not None:
                outcome.end_s = now_s

    def _emit(self, event: Event) -> None:
        match event:
            case RequestPreempted():
                self._by_id[event.request_id].num_preemptions += 1
            case StepApplied():
                self._result.num_tokens += event.num_tokens
                self._result.num_recomputed += event.num_recomputed_tokens
            case _ if type(event).__name__ == "OutputForecastChecked":
                self._result.num_checked += 1
                self._result.num_within += event.is_within  # type: ignore[union-attr]
            case _:
                pass


def _guardrails(machine: Machine) -> Any:  # noqa: ANN401 - of a checkout that has them
    """Return the guardrails of these targets."""
    from pagefold.scheduler.guardrails import Guardrails, Rates, Targets

    given = machine.guardrails
    seconds = {
        f"{kind}_s": given[f"target_{kind}_ms"] / 1e3 for kind in ("ttft", "itl") if f"target_{kind}_ms" in given
    }
    num_tokens = machine.max_num_batched_tokens
    at_start = Rates.measured_at_start(num_tokens, machine.cost.step_s + num_tokens * machine.cost.token_s)
    return Guardrails.of(Targets(**seconds), max_num_batched_tokens=num_tokens, block_size=16, rates=at_start)


def _request(number: int, one: Sent) -> Request:
    first = number * MAX_TOKENS % STOP
    prompt = array("i", ((first + at) % STOP for at in range(one.prompt_tokens)))
    stop = StopRule(frozenset({STOP}), one.prompt_tokens + one.max_tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=None)
    return Request(f"r{number}", prompt, sampling, stop=stop, seed=number, arrival_s=one.at_s)
