"""What happened, typed. The core calls ``emit``; metrics, explain, KV events and recorders subscribe from outside.

Nothing in ``kv`` or ``scheduler`` asks whether anybody listens: with no subscriber ``emit`` is :func:`ignore`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "BlockEvicted",
    "Emit",
    "Event",
    "FirstToken",
    "PrefixLookup",
    "RequestFinished",
    "RequestPreempted",
    "StepAbandoned",
    "StepApplied",
    "fan_out",
    "ignore",
]


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """A cached block left the prefix tree.

    Attributes:
        block_id: the block that became free.
        depth: how many blocks lie above it in its prefix.
        cause: ``allocation`` when another sequence needed the memory, ``reset`` when the cache was cleared,
            ``not_admitted`` when the eviction policy refused to keep it.
    """

    block_id: int
    depth: int
    cause: Literal["allocation", "reset", "not_admitted"]


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """A request was admitted and its prefix looked up.

    ``after_preemption`` keeps lookups of requests that come back apart from first ones, so that a hit rate never counts
    a preempted request's own blocks as a saving.
    """

    request_id: str
    num_tokens: int
    num_hit_tokens: int
    after_preemption: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A running request gave its blocks back and waits again.

    Attributes:
        num_computed_tokens: how many of its tokens had KV. What the tree still holds at its return is not recomputed.
        usage_before, usage_after: share of blocks held by sequences, 0 to 1.
        cause_request_id: the request that needed the memory.
    """

    request_id: str
    num_computed_tokens: int
    usage_before: float
    usage_after: float
    cause_request_id: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request left the scheduler, for whatever reason.

    Each sample of a prompt is a request with an event of its own; the prompt is that of ``sample_index`` 0 only.

    Attributes:
        num_prompt_tokens: of its prompt, whoever computed it.
        sample_index: which sample of its prompt it was.
    """

    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request got its first token, ``ttft_s`` seconds after it came. Several samples of one prompt are told once."""

    request_id: str
    ttft_s: float


@dataclass(frozen=True, slots=True)
class StepApplied:
    """A step ran and its results are in.

    Attributes:
        num_prompt_tokens: tokens computed that a request had before this step sampled anything for it.
        num_output_tokens: tokens sampled.
        num_recomputed_tokens: the part of ``num_prompt_tokens`` that had been computed before a preemption.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class StepAbandoned:
    """A step failed: what it had promised was taken back."""

    step_id: int
    num_requests: int
    error: str


Event: TypeAlias = (
    BlockEvicted | PrefixLookup | RequestPreempted | RequestFinished | FirstToken | StepApplied | StepAbandoned
)
Emit: TypeAlias = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Subscribe to nothing."""


def fan_out(*subscribers: Emit) -> Emit:
    """Return one ``emit`` that calls each subscriber in turn."""

    def emit(event: Event) -> None:
        for subscriber in subscribers:
            subscriber(event)

    return emit
