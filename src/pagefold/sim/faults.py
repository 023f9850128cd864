"""Seeded faults: random runs in which steps fail, are lost or late, requests are cancelled, memory shrinks, bits turn.

A run is data: a small machine, and what happens to it. After each step ``kv.audit`` looks at every invariant, and each
sampled token is compared with what follows from its request alone; at the end all that still waits must finish, and no
block be lost. ``fault_hunt.py`` draws such runs, and shrinks those that fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from pagefold.kv import NO_HOST, HostTier, KVCore, PinLimits, SequenceCache, audit, make_policy
from pagefold.kv.tree import PrefixHit
from pagefold.request import Request, StopRule, WarmUp
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits
from pagefold.sim.shadow_runner import ShadowRunner, expected_token
from pagefold.sim.traces.request import GREEDY_TO_LENGTH
from pagefold.steps import DamagedBlocksError, StepResult

if TYPE_CHECKING:
    from pagefold.steps import StepPlan

__all__ = [
    "Ask",
    "Cancel",
    "Damage",
    "Fault",
    "FaultyRun",
    "ResetCache",
    "RunError",
    "Shrink",
    "Step",
    "run_faulty",
]

Fault: TypeAlias = Literal["none", "fails", "lost", "late"]
"""What becomes of a step: it runs; it dies half-way; it runs, and its result is lost; it runs, and takes very long."""

_LATE_S = 10.0
_MAX_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Ask:
    """A request comes.

    Attributes:
        number: the request's name.
        prompt: its tokens.
        num_output: tokens that it wants.
        num_samples: outputs of its prompt.
        namespace: whose blocks it may share.
        deadline_s: seconds until it is ended if it has not finished; None for never.
        priority: how urgent it is: the smaller, the more.
        pin_s: for how long it pins its prompt when it has finished; None for no pin.
    """

    number: int
    prompt: tuple[int, ...]
    num_output: int = 1
    num_samples: int = 1
    namespace: int = 0
    deadline_s: float | None = None
    priority: int = 0
    pin_s: float | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A step, what becomes of it, and which request is cancelled while it runs (None for no one)."""

    fault: Fault = "none"
    cancelled: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request is cancelled between steps."""

    number: int


@dataclass(frozen=True, slots=True)
class Shrink:
    """From now on so many blocks are not to be had: others need the memory. As many as can be had are taken."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bits turn in a block of the host arena, if there is one of that number."""

    host_id: int


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Every prefix is forgotten."""


Action: TypeAlias = Ask | Step | Cancel | Shrink | Damage | ResetCache


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyRun:
    """A small machine and what happens to it.

    Attributes:
        num_blocks, block_size: of its pool.
        num_host_blocks: of its host tier; 0 for none.
        max_num_seqs, max_num_batched_tokens: of a step.
        eviction_policy, scheduling_policy: names of the two policies.
        admission: when a request that waits is let in.
        actions: what happens, in order.
    """

    num_blocks: int
    block_size: int = 4
    num_host_blocks: int = 0
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    eviction_policy: str = "default"
    scheduling_policy: str = "fcfs"
    admission: str = "predicted"
    actions: tuple[Action, ...] = ()


class RunError(AssertionError):
    """Something that must always hold did not: a bug of ours."""


def run_faulty(run: FaultyRun) -> int:
    """Do a run and end it: what still waits is let finish. Return how many steps it took.

    Raises:
        RunError, AuditError: something that must always hold did not.
        Exception: whatever else a bug raises.
    """
    machine = _Machine(run)
    for action in run.actions:
        machine.do(action)
    machine.end()
    return machine.num_steps


class _Machine:
    def __init__(self, run: FaultyRun) -> None:
        self.num_steps = 0
        self._now_s = 0.0
        self._run = run
        self._core = KVCore(
            run.num_blocks,
            block_size=run.block_size,
            policy=make_policy(run.eviction_policy, run.num_blocks),
            pin_limits=PinLimits(0.5, 5.0),
            host=HostTier(run.num_host_blocks) if run.num_host_blocks else NO_HOST,
        )
        limits = SchedulerLimits(run.max_num_seqs, run.max_num_batched_tokens)
        policy = SCHEDULING_POLICIES[run.scheduling_policy](60.0)
        self._scheduler = Scheduler(self._core, limits, policy=policy, admission=run.admission)
        self._runner = ShadowRunner(self._scheduler)
        self._asked: list[Request] = []
        self._ballast: SequenceCache | None = None

    def do(self, action: Action) -> None:
        match action:
            case Ask():
                self._ask(action)
            case Step():
                self._step(action)
            case Cancel():
                self._scheduler.finish(_name(action.number), "abort")
            case Shrink():
                self._shrink(action.num_blocks)
            case Damage():
                if action.host_id < self._run.num_host_blocks:
                    self._runner.damage(action.host_id)
            case ResetCache():
                self._core.forgetting.reset()
        audit(self._core)

    def end(self) -> None:
        """Let all that waits finish, with all the memory and no more faults."""
        self._shrink(0)
        while self._scheduler.has_work:
            before = self.num_steps
            self.do(Step())
            _check(self.num_steps > before or not self._scheduler.has_work, "requests wait for ever")
            _check(self.num_steps < _MAX_STEPS, "requests run for ever")
        for request in self._asked:
            _check(request.finish_reason is not None, f"{request} never ended")
        pool = self._core.pool
        _check(pool.num_free + pool.num_cached == pool.num_blocks, "blocks were lost")
        self._core.forgetting.reset()
        audit(self._core)
        _check(pool.num_free == pool.num_blocks, "blocks stay cached after a reset")

    def _ask(self, ask: Ask) -> None:
        longest = self._run.num_blocks * self._run.block_size
        fits = len(ask.prompt) + ask.num_output <= longest and 1 <= ask.num_samples <= self._run.max_num_seqs
        if not ask.prompt or not fits or self._scheduler.get(_name(ask.number)) or self._is_pinned(ask.number):
            return
        pin = None if ask.pin_s is None else WarmUp(pin=True, ttl_s=ask.pin_s)
        samples = [
            Request(
                _name(ask.number) if index == 0 else f"{_name(ask.number)}/{index}",
                ask.prompt,
                GREEDY_TO_LENGTH,
                stop=StopRule(frozenset(), len(ask.prompt) + ask.num_output),
                namespace=bytes([ask.namespace]),
                seed=7 * ask.number + index,
                arrival_s=self._now_s,
                deadline_s=None if ask.deadline_s is None else self._now_s + ask.deadline_s,
                priority=ask.priority,
                parent_id=_name(ask.number),
                sample_index=index,
                warm_up=pin,
            )
            for index in range(ask.num_samples)
        ]
        if any(self._scheduler.get(sample.request_id) for sample in samples):
            return
        self._asked += samples
        first, *first.forks = samples
        self._scheduler.add(first)

    def _is_pinned(self, number: int) -> bool:
        return self._core.pins.get(_name(number)) is not None

    def _step(self, step: Step) -> None:
        self._now_s += 1.0
        plan = self._scheduler.schedule(self._now_s)
        if not plan.num_rows:
            audit(self._core)
            return
        self.num_steps += 1
        audit(self._core)
        damaged: frozenset[int] = frozenset()
        result = StepResult([])
        if step.fault == "fails":
            self._runner.die(plan, (plan.num_rows + 1) // 2)
        else:
            try:
                result = self._runner.run(plan)
            except DamagedBlocksError as damage:
                damaged = damage.host_ids
        if step.fault == "late":
            self._now_s += _LATE_S
        if step.cancelled is not None:
            self._scheduler.finish(_name(step.cancelled), "abort")
        if step.fault in ("fails", "lost") or damaged:
            self._scheduler.abandon(step.fault, damaged)
            return
        expected = self._expected(plan)
        for got, wanted, request_id in zip(result.token_ids, *expected, strict=True):
            _check(got == wanted, f"{request_id} was sampled {got}, and alone it is {wanted}")
        self._scheduler.apply(result)

    def _expected(self, plan: StepPlan) -> tuple[list[int], list[str]]:
        """Return for each sample of the plan what follows from its tokens alone, and whose it is."""
        tokens: list[int] = []
        names: list[str] = []
        for row, seed in zip(plan.sampling_rows, plan.seeds, strict=True):
            request = self._scheduler.in_step[row]
            tokens.append(expected_token(request.namespace, request.token_ids, seed))
            names.append(request.request_id)
        return tokens, names

    def _shrink(self, num_blocks: int) -> None:
        """Hold so many blocks for no sequence, or all that can be had."""
        if self._ballast is not None:
            self._core.release(self._ballast)
            self._ballast = None
        num_blocks = min(num_blocks, self._core.num_available)
        if num_blocks:
            cache, _ = self._core.acquire(PrefixHit(b"", [], None, 0))
            if self._core.extend(cache, 0, num_blocks * self._core.block_size):
                self._ballast = cache
            else:
                self._core.release(cache)


def _check(holds: bool, what: str) -> None:  # noqa: FBT001 - the one thing it is about
    if not holds:
        raise RunError(what)


def _name(number: int) -> str:
    return f"r{number}"
