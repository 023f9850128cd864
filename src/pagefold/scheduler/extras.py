"""Extras: what a step carries for requests that ask for more than a draw from the model's distribution."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from pagefold.steps import PromptPart, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pagefold.request import Request
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.structured.matcher import TokenMatcher

__all__ = ["apply_extras", "plan_extras"]

_NO_HISTORY = array("i")
_NOTHING: frozenset[int] = frozenset()


class _Sampled(NamedTuple):
    """One of a plan's ``sampling_rows`` of a request.

    Attributes:
        at: which.
        sample: whose token is sampled there.
        drafts: what comes before it that is no token of the request yet.
        matcher: of the output with those, if that must look like something.
    """

    at: int
    sample: Request
    drafts: array[int]
    matcher: TokenMatcher | None


def plan_extras(plan: StepPlan, request: Request) -> None:
    """Add what ``request``, whose row is the plan's last, asks for beyond a token; the same for each of its samples."""
    row = plan.num_rows - 1
    start = plan.starts[row]
    end = start + plan.num_tokens[row]
    sampling = request.sampling
    for one in _sampled(plan, row, request) if end >= request.num_tokens else ():
        at, sample, drafts, matcher = one
        num_before = sample.num_output_tokens + len(drafts)
        banned = request.stop.token_ids if num_before < sampling.min_tokens and request.beams is None else _NOTHING
        if matcher is not None:
            plan.masked.append(at)
            plan.masks.append(matcher.mask(banned))
        if sampling.has_penalties or sampling.logit_bias or (banned and matcher is None):
            plan.adjusted.append(at)
            history = sample.token_ids + drafts if drafts else sample.token_ids
            plan.histories.append(history if sampling.has_penalties else _NO_HISTORY)
            plan.banned.append(banned if matcher is None else _NOTHING)
        num_top = _num_top(request)
        if num_top is not None and not request.has_no_output:
            plan.logprob_rows.append(at)
            plan.logprob_tops.append(num_top)
    if sampling.prompt_logprobs is not None:
        first = len(request.prompt_logprobs) + 1
        last = min(end, request.num_prompt_tokens - 1)
        if first <= last:  # a position tells the token after it
            assert start < first, "a prefix hit covers a position whose logits are asked for"
            part = PromptPart(row, first - 1 - start, request.token_ids[first : last + 1], sampling.prompt_logprobs)
            plan.prompt_parts.append(part)


def apply_extras(plan: StepPlan, result: StepResult, step: StepInFlight, dropped: Collection[int]) -> None:
    """Append the logprobs of a step that ran.

    Args:
        plan: of the step.
        result: what it said.
        step: knows whose they are.
        dropped: which of its sampling rows count for nobody.
    """
    for place, logprobs in zip(plan.logprob_rows, result.logprobs, strict=True):
        if place in dropped or step.samples[place].beams is not None:
            continue
        step.samples[place].add_logprobs(logprobs)
    for part, found in zip(plan.prompt_parts, result.prompt_logprobs, strict=True):
        step.requests[part.row].prompt_logprobs.extend(found)


def _num_top(request: Request) -> int | None:
    """Return how many of the likeliest tokens are told of each that is sampled; None where not even its logprob is."""
    if request.beams is not None:
        return request.beams.search.num_tops
    sampling = request.sampling
    return 0 if sampling.logprobs is None and sampling.ranks_samples else sampling.logprobs


def _sampled(plan: StepPlan, row: int, request: Request) -> Iterator[_Sampled]:
    """Yield what the last row samples: each of its samples, or what follows each of its drafts.

    Behind a draft that may not come nothing counts: there is any mask.
    """
    num_places = len(plan.sampling_rows)
    if not plan.drafted or plan.drafted[-1].row != row:
        samples = (request,) if request.beams is not None else (request, *request.forks)
        for at, sample in enumerate(samples, num_places - len(samples)):
            yield _Sampled(at, sample, _NO_HISTORY, sample.matcher)
        return
    _, first, at, num_drafts = plan.drafted[-1]
    drafts = plan.token_ids[at : at + num_drafts]
    matcher, last = request.matcher, request.matcher
    for num_before in range(num_drafts + 1):
        if num_before and matcher is not None:
            last = matcher
            matcher = _advanced(matcher, drafts[num_before - 1])
        yield _Sampled(first + num_before, request, drafts[:num_before], matcher or last)


def _advanced(matcher: TokenMatcher, token_id: int) -> TokenMatcher | None:
    """Return a copy of ``matcher`` behind one more token; None where that may not come, or nothing may follow it."""
    mask = matcher.mask()
    if not mask[token_id >> 3] >> (token_id & 7) & 1:
        return None
    behind = matcher.copy()
    behind.accept(token_id)
    return None if behind.is_complete or behind.error is not None else behind
