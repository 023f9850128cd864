"""RequestTrace: what happened to one request and when, for the trace that is made of it when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["HttpEnd", "RequestTrace", "TraceEvent", "TraceValue"]

TraceValue: TypeAlias = str | int | float


class TraceEvent(NamedTuple):
    """Something that happened to a request at one moment.

    Attributes:
        name: of what happened.
        at_s: when, on the engine's clock.
        attributes: what else is known of it.
    """

    name: str
    at_s: float
    attributes: Mapping[str, TraceValue]


class HttpEnd(NamedTuple):
    """How the HTTP request ended that a request was part of.

    Attributes:
        request_id: of the HTTP request, as it stands in the log.
        response_id: of the response, as its client has it.
        headers: of W3C's Trace Context that came with it, by their names: ``traceparent`` and ``tracestate``.
    """

    request_id: str
    response_id: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class RequestTrace:
    """One prompt, with all its samples.

    Attributes:
        sample_ids: the engine's names for its samples; the first is its own.
        num_prompt_tokens: of its prompt.
        arrival_s: when it came, on the engine's clock.
        num_cached_tokens: of its prompt, that need not be computed.
        cached_by_tier: those of them that came from tiers behind the device, by tier.
        missed: the others, by cause.
        num_recomputed_tokens: that were computed again after preemptions.
        num_ahead: how many requests waited already when it came.
        ttft_s: from its arrival to its first token; None if it got none.
        queue_s, prefill_s, decode_s, e2e_s: of its first sample: see :class:`~pagefold.events.OutputFinished`.
        num_allowed_tokens: how many each output might have had.
        num_output_tokens: of all its samples.
        num_preemptions: of all its samples.
        finish_reasons: of each sample that has ended, in the order of their ends.
        events: what happened to it, in order; no more than are kept of one.
        num_dropped_events: that were not kept.
        http: how its HTTP request ended; None while that has not.
    """

    sample_ids: tuple[str, ...]
    num_prompt_tokens: int
    arrival_s: float
    num_cached_tokens: int = 0
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    missed: Mapping[str, int] = field(default_factory=dict)
    num_recomputed_tokens: int = 0
    num_ahead: int = 0
    ttft_s: float | None = None
    queue_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    e2e_s: float = 0.0
    num_allowed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)
    num_dropped_events: int = 0
    http: HttpEnd | None = None

    @property
    def request_id(self) -> str:
        """The engine's name for it."""
        return self.sample_ids[0]
