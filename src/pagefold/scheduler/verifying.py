"""Verifying: which drafts of a step count: those that the request samples where they stand, up to the first other one.

What a row samples behind its drafts is drawn as it would be without them: from the same logits, with the same seed and
draw number, after the same penalties and masks. So who drafts gets the tokens that it would have got, and drafts only
say how many of them one step finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.events import DraftsVerified, Emit
from pagefold.scheduler.committing import publish

if TYPE_CHECKING:
    from collections.abc import Collection

    from pagefold.kv import KVCore
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.steps import StepResult

__all__ = ["Verified", "settle", "verify"]


class Verified(NamedTuple):
    """What of a step's drafts counts.

    Attributes:
        num_uncounted: by row, how many of its tokens do not count: its last ones, or all of a spoiled one.
        dropped: which of the plan's ``sampling_rows`` sample what nobody gets.
        spoiled: rows of which nothing counts, since something in them is no number.
    """

    num_uncounted: dict[int, int]
    dropped: set[int]
    spoiled: set[int]


_NOTHING = Verified({}, set(), set())


def verify(step: StepInFlight, result: StepResult) -> Verified:
    """Return what of a step's drafts counts.

    Nothing counts of a row that is corrupted: perhaps only a draft is, and what it reaches in its chunk. Its request
    computes the same again, without drafts from then on; unless it is to end anyway.
    """
    plan = step.plan
    if not plan.drafted:
        return _NOTHING
    verified = Verified({}, set(), set())
    for row, place, first, num_drafts in plan.drafted:
        request = step.requests[row]
        if row in result.corrupted and not request.is_aborted:
            request.may_draft = False
            verified.spoiled.add(row)
            verified.num_uncounted[row] = num_drafts + 1
            verified.dropped.update(range(place, place + num_drafts + 1))
            continue
        num_accepted = 0
        while num_accepted < num_drafts and (
            plan.token_ids[first + num_accepted] == result.token_ids[place + num_accepted]
        ):
            num_accepted += 1
        verified.num_uncounted[row] = num_drafts - num_accepted
        verified.dropped.update(range(place + num_accepted + 1, place + num_drafts + 1))
    return verified


def settle(core: KVCore, step: StepInFlight, spoiled: Collection[int], emit: Emit) -> None:
    """Publish the blocks that accepted drafts have filled, and give back those that rejected ones had begun.

    The tokens of the step have been appended: what is published are the request's own tokens, and never a draft that
    was rejected. Who has ended by one of them has no tokens behind it, whatever was accepted there. Where a stop string
    may have ended the text among them, which is found out later, only what lies before them is published.
    """
    plan = step.plan
    counts: list[tuple[str, int, int | None]] = []
    for row, _, _, num_drafts in plan.drafted:
        request = step.requests[row]
        if row in spoiled:
            counts.append((request.request_id, num_drafts, None))
            assert request.cache is not None
            core.shrink(request.cache, request.num_computed_tokens + 1)
            continue
        if request.finish_reason is not None:
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        num_accepted = max(0, request.num_tokens - plan.starts[row] - 2)  # of those that it got, one was no draft
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        request.cut(request.num_output_tokens)  # logprobs behind its end
        counts.append((request.request_id, num_drafts, num_accepted))
        if request.cache is not None:
            if not request.is_aborted:
                end = plan.starts[row] + 1 if request.sampling.stop else request.num_computed_tokens
                publish(core, [(request, min(end, request.num_computed_tokens))], None)
            if request.finish_reason is None:  # who has ended gives all back; windows were trimmed behind its end
                core.shrink(request.cache, request.num_computed_tokens + 1)
    emit(DraftsVerified(tuple(counts)))
