"""Samples of one prompt: they are sampled from one row when it is computed, and then each goes its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.request import RequestStatus

if TYPE_CHECKING:
    from pagefold.kv import KVCore
    from pagefold.request import Request
    from pagefold.scheduler.growth import AdmissionRule
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.step_in_flight import StepInFlight

__all__ = ["begin_fork", "fork_samples", "plan_samples"]


def plan_samples(step: StepInFlight, request: Request) -> None:
    """Sample the row of ``request``, which was planned last, once more for each that will fork from it.

    Beams are not sampled: what is told of one row says what all begin with.
    """
    if request.beams is not None:
        return
    plan = step.plan
    for fork in request.forks:
        plan.sampling_rows.append(plan.sampling_rows[-1])
        plan.sampling.append(fork.sampling)
        plan.seeds.append(fork.seed)
        plan.draws.append(0)
        step.samples.append(fork)
    step.forking.append(request)


def fork_samples(step: StepInFlight, core: KVCore, queues: Queues, rule: AdmissionRule) -> None:
    """Let the other samples of each prompt that the step has completed run on its blocks."""
    for request in step.forking:
        if request.is_aborted:
            continue
        assert request.cache is not None
        for fork in request.forks:
            begin_fork(fork, request, queues)
            fork.cache = core.fork(request.cache, owner=fork.request_id)
        at = queues.running.index(request) + 1
        queues.running[at:at] = request.forks
        samples, request.forks = (request, *request.forks), []
        rule.forget(request)  # it was all of them
        for sample in samples:
            rule.note(sample, step.plan.step_id)


def begin_fork(fork: Request, request: Request, queues: Queues) -> None:
    """Let ``fork`` run, as yet without blocks, from where ``request`` is, which has computed its prompt."""
    fork.to(RequestStatus.RUNNING)
    fork.num_computed_tokens = request.num_computed_tokens
    fork.num_cached_tokens = request.num_cached_tokens
    fork.num_loaded_tokens = request.num_loaded_tokens
    fork.prompt_use = request.prompt_use
    fork.prompt_logprobs = request.prompt_logprobs
    fork.times.scheduled_s = request.times.scheduled_s
    queues.enter(fork)
