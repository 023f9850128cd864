"""StepInFlight: a plan, and what the scheduler must know to apply it, to take it back, or to plan the next behind it.

A step is planned behind one in flight by *foresight*: for that moment the requests are as the step in flight will leave
them, and the same code plans as at any other time. Positions, blocks and caches are known so, and who ends because it
is long enough. What is not known are the tokens: a placeholder stands for each, the plan says of which of its tokens
that is so (``late``), and the runner takes those from where the step before leaves them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pagefold.request import OrderKey
from pagefold.scheduler.guardrails.landed_step import NO_CAP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.events import WaitCause
    from pagefold.kv import Promise, SequenceCache
    from pagefold.request import Request
    from pagefold.steps import StepPlan

__all__ = ["StepInFlight"]

_PLACEHOLDER = 0


class StepInFlight:
    """A step that was planned and has not been applied or abandoned.

    Args:
        plan: filled as it is planned.
        now: when it was planned.
        late: those whose last token the step before samples, each with its place among the tokens sampled there; None
            where the step is not planned behind another one.

    Attributes:
        is_ahead: whether it is planned behind another one.
        requests: of the plan's rows.
        samples: of its sampling rows.
        forking: those whose other samples begin with this step.
        promises: of blocks that it fills with tokens that are known.
        filling: those of ``late`` that fill a block; it can be published when all its tokens are known, after the step.
        joins: promises of the step before that are behind: their caches may join others' blocks when this step, which
            reads theirs, is over.
        num_leaving: of those that the step before was planned for, so many have nothing left to compute behind it.
        num_admitted: the last so many of ``requests`` were admitted in this step.
        partial: those of ``requests`` that have tokens behind it whose KV is not computed: of prompts, mostly.
        num_prefill_tokens, num_recomputed_tokens: of prompts, and of what had been computed before.
        num_prefill_rows: rows that compute those.
        prefill_cap_tokens: how many of them it was allowed to compute.
        num_reserved: tokens that are left for the head of the queue by those that run and are behind it in order.
        reserved_for: its order.
        has_made_way: whether somebody made way for the head of the queue: no drafts take the memory that it left.
        waits_for: what those wait for whom it has not let in; None where nobody does.
        capped: tenants of whom somebody waits only since they have as many blocks as their caps allow.
    """

    __slots__ = (
        "capped",
        "filling",
        "forking",
        "has_made_way",
        "is_ahead",
        "joins",
        "late",
        "now",
        "num_admitted",
        "num_leaving",
        "num_prefill_rows",
        "num_prefill_tokens",
        "num_recomputed_tokens",
        "num_reserved",
        "partial",
        "plan",
        "prefill_cap_tokens",
        "promises",
        "requests",
        "reserved_for",
        "samples",
        "waits_for",
    )

    def __init__(self, plan: StepPlan, now: float, late: dict[Request, int] | None = None) -> None:
        self.plan = plan
        self.now = now
        self.is_ahead = late is not None
        self.late: dict[Request, int] = late or {}
        self.requests: list[Request] = []
        self.samples: list[Request] = []
        self.forking: list[Request] = []
        self.partial: list[Request] = []
        self.promises: list[Promise] = []
        self.filling: list[Request] = []
        self.joins: list[Promise] = []
        self.num_leaving = 0
        self.num_admitted = 0
        self.num_prefill_tokens = 0
        self.num_prefill_rows = 0
        self.prefill_cap_tokens = NO_CAP
        self.num_recomputed_tokens = 0
        self.num_reserved = 0
        self.reserved_for = OrderKey.of(0.0, -1)
        self.has_made_way = False
        self.waits_for: WaitCause | None = None
        self.capped: set[str] = set()

    @property
    def admitted(self) -> list[Request]:
        """Requests that were admitted in this step."""
        return self.requests[len(self.requests) - self.num_admitted :]

    @property
    def hides_too_much(self) -> bool:
        """Whether the next step cannot be planned before this one's tokens are known.

        Samples that fork, masks and penalties depend on them, and so does how many tokens drafts bring. Logprobs are
        made of logits, which the next step overwrites. And what waits to join others' blocks must get a moment when
        nobody reads its own, and so must what packs chunks: only then is it known how many of its blocks stay.
        """
        plan = self.plan
        if self.forking or plan.drafted or plan.masked or plan.logprob_rows or plan.prompt_parts or plan.packing_rows:
            return True
        return any(plan.histories) or any(promise.is_behind for promise in self.joins)

    def places(self) -> dict[Request, int]:
        """Return who gets a token of this step, each with its place among those sampled."""
        return {request: place for place, request in enumerate(self.samples)}

    def caches(self) -> set[SequenceCache]:
        """Return the sequences' caches that it reads."""
        return {request.cache for request in self.requests if request.cache is not None}

    @contextmanager
    def foreseen(self) -> Iterator[None]:
        """Inside, the requests are as this step will leave them, with placeholders for its tokens."""
        rows = list(zip(self.requests, self.plan.num_tokens, strict=True))
        for request, num_tokens in rows:
            request.num_computed_tokens += num_tokens
        for request in self.samples:
            request.token_ids.append(_PLACEHOLDER)
        try:
            yield
        finally:
            for request in self.samples:
                request.token_ids.pop()
            for request, num_tokens in rows:
                request.num_computed_tokens -= num_tokens

    def note_late(self) -> None:
        """Say in the plan which of its tokens are placeholders."""
        if not self.late:
            return
        plan, at = self.plan, 0
        for request, num_tokens in zip(self.requests, plan.num_tokens, strict=True):
            at += num_tokens
            place = self.late.get(request)
            if place is not None:
                plan.late.append(at - 1)
                plan.late_from.append(place)
