"""Ending: when a request has all the tokens that it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from pagefold.request import FinishReason, Request
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.steps import StepResult

__all__ = ["is_over", "take_tokens"]


def is_over(request: Request) -> bool:
    """Whether nothing is left to compute for a request, though it runs. Of no output, that is so behind its prompt."""
    if request.num_tokens < request.stop.max_total_tokens:
        return request.is_aborted
    is_computed = request.num_computed_tokens >= request.num_prompt_tokens or not request.has_no_output
    return is_computed or request.is_aborted


def take_tokens(step: StepInFlight, result: StepResult, dropped: Collection[int]) -> list[Request]:
    """Give those their tokens whose rows have run, and those a finish reason that end by one.

    Args:
        step: that ran.
        result: what it sampled.
        dropped: which of its sampling rows nobody gets.

    Beams get theirs otherwise (``beams.py``). Returns who got each token, in order; or asked for none, and is computed.
    """
    took: list[Request] = []
    for place, (request, token_id) in enumerate(zip(step.samples, result.token_ids, strict=True)):
        if request.finish_reason is None and not request.is_aborted and place not in dropped and request.beams is None:
            took.append(request)
            request.finish_reason = _take(request, token_id)
    return took


def _take(request: Request, token_id: int) -> FinishReason | None:
    """Append a sampled token, unless none was asked for; return why ``request`` ends by it, if it does.

    Its matcher advances by the token.
    """
    token_ids, stop = request.token_ids, request.stop
    token_ids.append(token_id)
    is_long = len(token_ids) >= stop.max_total_tokens
    if is_long and request.has_no_output:
        token_ids.pop()
        return "length"
    if token_id in stop.token_ids:
        return "stop"
    matcher = request.matcher
    if matcher is not None:
        matcher.accept(token_id)
        if matcher.is_complete:
            return "stop"
        if matcher.error is not None:
            return "error"
    return "length" if is_long else None
