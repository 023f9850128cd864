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
    """Add what ``request``, whose row is the plan's last, asks for beyond a token; the same for each of its samples."""
    row = plan.num_rows - 1
    start = plan.starts[row]
    end = start + plan.num_tokens[row]
    sampling = request.sampling
    if end == request.num_tokens:
        num_places = len(plan.sampling_rows)
        banned = request.stop.token_ids if request.num_output_tokens < sampling.min_tokens else _NOTHING
        for place, sample in enumerate((request, *request.forks), num_places - request.num_seqs):
            if sample.matcher is not None:
                plan.masked.append(place)
                plan.masks.append(sample.matcher.mask(banned))
            if sampling.has_penalties or sampling.logit_bias or (banned and sample.matcher is None):
                plan.adjusted.append(place)
                plan.histories.append(request.token_ids if sampling.has_penalties else _NO_HISTORY)
                plan.banned.append(banned if sample.matcher is None else _NOTHING)
            if (sampling.logprobs is not None or sampling.ranks_samples) and not request.has_no_output:
                plan.logprob_rows.append(place)
    if sampling.prompt_logprobs is not None:
        first = len(request.prompt_logprobs) + 1
        last = min(end, request.num_prompt_tokens - 1)
        if first <= last:  # a position tells the token after it
            assert start < first, "a prefix hit covers a position whose logits are asked for"
            part = PromptPart(row, first - 1 - start, request.token_ids[first : last + 1], sampling.prompt_logprobs)
            plan.prompt_parts.append(part)


def apply_extras(plan: StepPlan, result: StepResult, requests: list[Request], samples: list[Request]) -> None:
    """Append the logprobs of a step that ran.

    Args:
        plan: of the step.
        result: what it said.
        requests: of the plan's rows.
        samples: of its sampling rows.
    """
    for place, logprobs in zip(plan.logprob_rows, result.logprobs, strict=True):
        request = samples[place]
        request.logprobs.append(logprobs)
        request.cumulative_logprob += logprobs.logprob
    for part, found in zip(plan.prompt_parts, result.prompt_logprobs, strict=True):
        requests[part.row].prompt_logprobs.extend(found)
