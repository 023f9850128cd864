"""Request: one sequence on its way through, its status with the moves that are legal, and what was asked of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias

from pagefold.errors import InvalidRequestError
from pagefold.typecheck import wrong_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import BlockTable

__all__ = ["ANYBODY", "LEGAL_MOVES", "Caller", "FinishReason", "Request", "RequestStatus", "SamplingParams", "StopRule"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "timeout"]

_MAX_TEMPERATURE = 2.0
_GREEDY_BELOW = 1e-5
_MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Names, defaults and meaning are vLLM's.

    Attributes:
        temperature: 0 is greedy; at most 2.
        top_p: keep the most likely tokens whose probabilities add up to this much, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        max_tokens: how many tokens to generate at most; None for as many as ``max_model_len`` leaves.
        stop: texts that end the output; they are not part of it. One text, several, or None.
        stop_token_ids: token ids that end the output; or None.
        ignore_eos: go on after the model's end-of-sequence token.
        seed: of this request's random draws. A request with a seed draws the same numbers in every batch.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is None or isinstance(value, list):
                object.__setattr__(self, name, tuple(value or ()))
        wrong = wrong_type(self)
        if wrong is not None:
            raise _out_of_range(wrong.field, repr(wrong.value), wrong.allowed)
        self._check_ranges()

    def _check_ranges(self) -> None:
        if not 0.0 <= self.temperature <= _MAX_TEMPERATURE:
            raise _out_of_range("temperature", self.temperature, "between 0 (greedy) and 2")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        if self.top_k < -1:
            raise _out_of_range("top_k", self.top_k, "a positive number, or 0 or -1 to keep all tokens")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, "at least 1")
        if len(self.stop) > _MAX_STOP_STRINGS:
            raise _out_of_range("stop", f"{len(self.stop)} strings", f"at most {_MAX_STOP_STRINGS} strings")
        if any(not text for text in self.stop):
            raise _out_of_range("stop", "an empty string", "texts of at least one character")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken: so near to 0 (vLLM's bound) scaled logits would overflow."""
        return self.temperature < _GREEDY_BELOW


def _out_of_range(param: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is {value}.", param=param, remedy=f"It must be {allowed}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and on what terms.

    Attributes:
        tenant: whose blocks a request may share.
        cache_salt: only requests of the tenant with the same salt share blocks.
        priority: the smaller, the sooner it is served, with a scheduling policy that looks at it.
    """

    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


ANYBODY = Caller()


class RequestStatus(Enum):
    """Where a request is in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}
"""RUNNING -> WAITING is a failed first step: the request had not computed anything yet."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a sequence ends, in tokens: what the scheduler can tell without text.

    Attributes:
        token_ids: any of these ends it, with ``stop``.
        max_total_tokens: prompt and output together; reaching it ends it with ``length``.
    """

    token_ids: frozenset[int]
    max_total_tokens: int


class Request:
    """One sequence: its tokens, how far its KV is computed, and what it waits for.

    Attributes:
        request_id: the caller's name for it.
        token_ids: the prompt, then what was sampled.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: [0, num_computed_tokens) has KV; [num_computed_tokens, len(token_ids)) is to be computed.
        num_cached_tokens: how much of the prompt was a prefix hit at the first admission; -1 before.
        max_computed_tokens: the most that was ever computed: what is computed again below it is recomputation.
        namespace: :meth:`Namespace.key` of its blocks.
        table: its blocks while it runs.
        arrival_s: when it came, on the caller's clock.
        deadline_s: when it is ended with ``timeout`` if it has not finished, on the same clock; None for never.
        priority: how urgent it is: the smaller, the more. It counts only with a policy that looks at it.
        order: the scheduling policy's key of it.
    """

    __slots__ = (
        "arrival_s",
        "deadline_s",
        "finish_reason",
        "index",
        "is_aborted",
        "max_computed_tokens",
        "namespace",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_failed_steps",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "priority",
        "request_id",
        "sampling",
        "seed",
        "status",
        "stop",
        "table",
        "token_ids",
    )

    def __init__(  # noqa: PLR0913 - a record; all but three are named at the call
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopRule,
        namespace: bytes = b"",
        seed: int = 0,
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling = sampling
        self.stop = stop
        self.namespace = namespace
        self.seed = seed
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        self.priority = priority
        self.index = -1  # place in the order of arrival; set by the scheduler
        self.order = (0.0, -1)  # likewise
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.max_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.num_failed_steps = 0
        self.is_aborted = False
        self.finish_reason: FinishReason | None = None
        self.table: BlockTable | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def packed(self) -> bytes:
        """Return the tokens as the prefix tree wants them, 4 bytes each."""
        return self.token_ids.tobytes()

    def to(self, status: RequestStatus) -> None:
        """Move to ``status``; an illegal move is our bug."""
        assert status in LEGAL_MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
