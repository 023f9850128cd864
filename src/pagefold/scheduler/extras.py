"""Extras: what a step carries for requests that ask for more than a draw from the model's distribution."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagefold.steps import PromptPart, StepPlan, StepResult

if TYPE_CHECKING:
    from pagefold.request import Request

__all__ = ["apply_extras", "plan_extras"]

_NO_HISTORY = array("i")
_NOTHING: frozenset[int] = frozenset()


def plan_extras(plan: StepPlan, request: Request) -> None:
    """Add what ``request``, whose row is the plan's last, asks for beyond a token."""
    row = plan.num_rows - 1
    start = plan.starts[row]
    end = start + plan.num_tokens[row]
    sampling = request.sampling
    if end == request.num_tokens:
        place = len(plan.sampling_rows) - 1
        banned = request.stop.token_ids if request.num_output_tokens < sampling.min_tokens else _NOTHING
        if request.matcher is not None:
            plan.masked.append(place)
            plan.masks.append(request.matcher.mask(banned))
            banned = _NOTHING
        if sampling.has_penalties or sampling.logit_bias or banned:
            plan.adjusted.append(place)
            plan.histories.append(request.token_ids if sampling.has_penalties else _NO_HISTORY)
            plan.banned.append(banned)
        if sampling.logprobs is not None:
            plan.logprob_rows.append(place)
    if sampling.prompt_logprobs is not None:
        first = len(request.prompt_logprobs) + 1
        last = min(end, request.num_prompt_tokens - 1)
        if first <= last:  # a position tells the token after it
            assert start < first, "a prefix hit covers a position whose logits are asked for"
            part = PromptPart(row, first - 1 - start, request.token_ids[first : last + 1], sampling.prompt_logprobs)
            plan.prompt_parts.append(part)


def apply_extras(plan: StepPlan, result: StepResult, requests: list[Request]) -> None:
    """Append the logprobs of a step that ran; ``requests`` are those of the plan's rows."""
    for place, logprobs in zip(plan.logprob_rows, result.logprobs, strict=True):
        requests[plan.sampling_rows[place]].logprobs.append(logprobs)
    for part, found in zip(plan.prompt_parts, result.prompt_logprobs, strict=True):
        requests[part.row].prompt_logprobs.extend(found)
