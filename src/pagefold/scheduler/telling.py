"""Events of the scheduler that are put together from several parts: who came, what those who were let in had found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import PrefixLookup, RequestAdded

if TYPE_CHECKING:
    from pagefold.events import Emit
    from pagefold.request import Request
    from pagefold.scheduler.step_in_flight import StepInFlight

__all__ = ["tell_added", "tell_lookups"]


def tell_added(emit: Emit, request: Request) -> None:
    """Tell that a request was queued, with those that will fork from it."""
    samples = (request, *request.forks)
    warm_up = request.warm_up
    emit(
        RequestAdded(
            tuple(sample.request_id for sample in samples),
            tuple(sample.token_ids for sample in samples),
            request.num_prompt_tokens,
            request.stop.max_total_tokens,
            request.namespace,
            request.arrival_s,
            request.deadline_s,
            request.priority,
            has_prompt_logprobs=request.sampling.prompt_logprobs is not None,
            returns_in_s=request.returns_in_s,
            pin=(warm_up.ttl_s, warm_up.retention_priority) if warm_up is not None and warm_up.pin else None,
            message_ends=request.message_ends,
            has_stop_strings=bool(request.sampling.stop),
            has_beams=request.beams is not None,
            tenant=request.tenant,
            weight=request.weight,
            quota=request.quota,
            session=request.session,
            hint_pins=request.hint_pins,
        )
    )


def tell_lookups(emit: Emit, step: StepInFlight, *, has_tiers: bool) -> None:
    """Tell what those that a step admitted had found: when it ran, since a step that fails is no lookup.

    To be told before it is told what the step has written: so whoever listens knows what was there to be found.

    Args:
        emit: where events go.
        step: the step that ran.
        has_tiers: whether what the device lacked was looked up behind it.
    """
    for row in range(len(step.requests) - step.num_admitted, len(step.requests)):
        request = step.requests[row]
        after_preemption = request.num_preemptions > 0
        num_loaded = sum(request.num_loaded_tokens.values())
        num_hit = step.plan.starts[row]
        emit(
            PrefixLookup(
                request.request_id,
                request.num_tokens,
                num_hit,
                after_preemption,
                num_loaded,
                has_tiers,
                request.num_lost_tokens,
                request.num_declined_tokens,
                step.now,
                None if request.cache is None else request.cache.tail,
                dict(request.num_loaded_tokens),
            )
        )
