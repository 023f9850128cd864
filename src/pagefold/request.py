"""Request: one sequence on its way through, its status with the moves that are legal, and what was asked of it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from pagefold.errors import InvalidRequestError
from pagefold.structured.params import StructuredOutputsParams  # noqa: TC001 - wrong_type reads it
from pagefold.typecheck import wrong_type

if TYPE_CHECKING:
    from pagefold.kv import BlockTable
    from pagefold.steps import TokenLogprobs

__all__ = [
    "ANYBODY",
    "DEFAULT_RETENTION_PRIORITY",
    "LEGAL_MOVES",
    "MAX_LOGPROBS",
    "MAX_RETURNS_IN_S",
    "MAX_SAMPLES",
    "Caller",
    "FinishReason",
    "Request",
    "RequestStatus",
    "RequestTimes",
    "SamplingParams",
    "StopRule",
    "TokenMatcher",
    "WarmUp",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "timeout"]

_MAX_TEMPERATURE = 2.0
_GREEDY_BELOW = 1e-5
_MAX_STOP_STRINGS = 16
_MAX_PENALTY = 2.0
_MAX_BIAS = 100.0
_MAX_RETENTION_PRIORITY = 100.0

DEFAULT_RETENTION_PRIORITY = 35.0
"""As in TensorRT-LLM."""

MAX_LOGPROBS = 20
"""How many alternatives a token's logprobs may tell, as in vLLM and in OpenAI's chats."""

MAX_RETURNS_IN_S = 86_400
MAX_SAMPLES = 128
"""How many outputs one prompt may have, as in OpenAI's chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Names, defaults and meaning are vLLM's.

    Attributes:
        n: how many outputs the prompt gets, 1 to 128. Each is sampled on its own; the prompt is computed once. A greedy
            request has one, as in vLLM: more would be the same.
        best_of: so many are sampled, at least ``n``, and the ``n`` with the highest logprob per token are returned, the
            best first. OpenAI's measure: the sum, which vLLM took, prefers short outputs. None samples ``n``.
        temperature: 0 is greedy; at most 2.
        top_p: keep the most likely tokens whose probabilities add up to this much, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: keep the tokens that are at least this share as likely as the most likely one, in [0, 1].
        presence_penalty: taken from the logit of every token that the output holds; in [-2, 2].
        frequency_penalty: taken from a token's logit for each time that the output holds it; in [-2, 2].
        repetition_penalty: the logit of every token that prompt or output holds is divided by this if it is positive,
            else multiplied; above 0.
        logit_bias: added to the logits of these token ids; in [-100, 100].
        max_tokens: how many tokens to generate at most; None for as many as ``max_model_len`` leaves.
        min_tokens: how many tokens come before any that ends the output, and before a stop string may.
        stop: texts that end the output; they are not part of it. One text, several, or None.
        stop_token_ids: token ids that end the output; or None.
        ignore_eos: go on after the model's end-of-sequence token.
        seed: of this request's random draws. A request with a seed draws the same tokens in every batch, but where two
            are equal within rounding. Sample ``i`` draws what a request with ``seed + i`` would draw, as in vLLM.
        logprobs: return each output token's logprob, and those of so many most likely tokens, 0 to 20. They are of
            the model's own distribution: without bias, penalties, temperature and cuts. None returns none.
        prompt_logprobs: the same of the prompt's tokens, which are all computed then: what the prefix cache holds of
            them is not used.
        structured_outputs: what the output must look like; None for free text.
        shown_special_tokens: special tokens whose text is part of the output's all the same, such as marks of thinking.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    shown_special_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is None or isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value or ()))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias) or None)
        wrong = wrong_type(self)
        if wrong is not None:
            raise _out_of_range(wrong.field, repr(wrong.value), wrong.allowed)
        self._check_distribution()
        self._check_samples()
        self._check_length()
        for param in ("logprobs", "prompt_logprobs"):
            number = getattr(self, param)
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                raise _out_of_range(param, number, f"between 0 and {MAX_LOGPROBS}, or None for none")

    def _check_distribution(self) -> None:
        if not 0.0 <= self.temperature <= _MAX_TEMPERATURE:
            raise _out_of_range("temperature", self.temperature, "between 0 (greedy) and 2")
        if not 0.0 < self.top_p <= 1.0:
            raise _out_of_range("top_p", self.top_p, "above 0 and at most 1")
        if self.top_k < -1:
            raise _out_of_range("top_k", self.top_k, "a positive number, or 0 or -1 to keep all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            raise _out_of_range("min_p", self.min_p, "between 0 and 1")
        for param in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, param)
            if not -_MAX_PENALTY <= penalty <= _MAX_PENALTY:
                raise _out_of_range(param, penalty, "between -2 and 2")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise _out_of_range("repetition_penalty", self.repetition_penalty, "above 0, and finite")
        for token_id, bias in (self.logit_bias or {}).items():
            if not -_MAX_BIAS <= bias <= _MAX_BIAS:
                raise _out_of_range("logit_bias", f"{bias} for token {token_id}", "between -100 and 100")

    def _check_samples(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise _out_of_range("n", self.n, f"between 1 and {MAX_SAMPLES}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_SAMPLES:
            raise _out_of_range("best_of", self.best_of, f"at least n ({self.n}) and at most {MAX_SAMPLES}")
        if self.is_greedy and self.num_samples > 1:
            param = "n" if self.n > 1 else "best_of"
            msg = f"{param} is {self.num_samples}, but with temperature {self.temperature:g} all outputs are the same."
            raise InvalidRequestError(msg, param=param, remedy="Leave it out, or give a higher temperature.")

    def _check_length(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _out_of_range("max_tokens", self.max_tokens, "at least 1")
        if self.min_tokens < 0:
            raise _out_of_range("min_tokens", self.min_tokens, "at least 0")
        if len(self.stop) > _MAX_STOP_STRINGS:
            raise _out_of_range("stop", f"{len(self.stop)} strings", f"at most {_MAX_STOP_STRINGS} strings")
        if any(not text for text in self.stop):
            raise _out_of_range("stop", "an empty string", "texts of at least one character")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken: so near to 0 (vLLM's bound) scaled logits would overflow."""
        return self.temperature < _GREEDY_BELOW

    @property
    def num_samples(self) -> int:
        """How many outputs are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks_samples(self) -> bool:
        """Whether more outputs are generated than returned: which, their logprobs say."""
        return self.num_samples > self.n

    @property
    def has_penalties(self) -> bool:
        """Whether the next token depends on which tokens came before, besides through the model."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked but to draw from the model's distribution, tempered and cut."""
        return (
            not (self.has_penalties or self.logit_bias or self.min_tokens or self.ranks_samples)
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.structured_outputs is None
        )


def _out_of_range(param: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} is {value}.", param=param, remedy=f"It must be {allowed}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What makes a request a warm-up: it is there for the blocks of its prompt, and nobody waits for its output.

    Attributes:
        pin: whether those blocks are pinned once they are computed.
        ttl_s: seconds until the pin expires; None for never.
        retention_priority: of the pin, 0 to 100. It halves with age; the least is given up first when a request needs
            memory. Name and range are TensorRT-LLM's.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    pin: bool = False
    ttl_s: float | None = None
    retention_priority: float = DEFAULT_RETENTION_PRIORITY

    def __post_init__(self) -> None:
        wrong = wrong_type(self)
        if wrong is not None:
            raise _out_of_range(wrong.field, repr(wrong.value), wrong.allowed)
        if self.ttl_s is not None and not 0.0 < self.ttl_s < float("inf"):
            raise _out_of_range("ttl_s", self.ttl_s, "a positive number of seconds; without it a pin does not expire")
        if not 0.0 <= self.retention_priority <= _MAX_RETENTION_PRIORITY:
            raise _out_of_range("retention_priority", self.retention_priority, "between 0 and 100")
        if self.ttl_s is not None and not self.pin:
            msg = f"ttl_s is {self.ttl_s}, but pin is not true."
            raise InvalidRequestError(msg, param="ttl_s", remedy="Leave it out, or send pin: true.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and on what terms.

    Attributes:
        tenant: whose blocks a request may share.
        cache_salt: only requests of the tenant with the same salt share blocks.
        priority: the smaller, the sooner it is served, with a scheduling policy that looks at it.
        warm_up: of a request that only warms the cache; None for all others.
        returns_in_s: in so many seconds from its end the conversation is expected to go on; None for nobody knows.
    """

    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    warm_up: WarmUp | None = None
    returns_in_s: float | None = None

    def __post_init__(self) -> None:
        if self.returns_in_s is not None and not 0.0 <= self.returns_in_s <= MAX_RETURNS_IN_S:
            raise _out_of_range("returns_in_s", self.returns_in_s, f"between 0 and {MAX_RETURNS_IN_S} seconds, a day")


ANYBODY = Caller()


class RequestStatus(Enum):
    """Where a request is in the scheduler."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FETCHING, RequestStatus.FINISHED}),
    RequestStatus.FETCHING: frozenset({RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.WAITING, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}
"""RUNNING -> WAITING is a failed first step: the request had not computed anything yet. FETCHING is waiting for blocks
that slow tiers bring: others are admitted meanwhile."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a sequence ends, in tokens: what the scheduler can tell without text.

    Attributes:
        token_ids: any of these ends it, with ``stop``.
        max_total_tokens: prompt and output together; reaching it ends it with ``length``.
    """

    token_ids: frozenset[int]
    max_total_tokens: int


@dataclass(slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of the engine's clock; None for what has not happened.

    Attributes:
        arrival_s: it came.
        scheduled_s: a step was first planned with it. What comes after, a preemption or a failed step, changes nothing.
        first_token_s, last_token_s: it got its first token, and the last one so far.
    """

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def queue_s(self) -> float | None:
        """Seconds that it waited until it was first scheduled."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds until its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """Seconds from its first schedule to its first token."""
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """Seconds from its first token to the last one so far."""
        if self.last_token_s is None or self.first_token_s is None:
            return None
        return self.last_token_s - self.first_token_s


class TokenMatcher(Protocol):
    """Which tokens may come next in one output. It belongs to one request, and only that one's tokens advance it.

    Attributes:
        is_complete: nothing can follow any more.
        error: why it cannot go on, though the output is not complete.
    """

    is_complete: bool
    error: str | None

    def mask(self, banned: Collection[int] = ()) -> bytes:
        """Return which tokens may come next: bit ``t % 8`` of byte ``t // 8`` is token ``t``. At least one may.

        ``banned`` ones may only if nothing else may.
        """

    def accept(self, token_id: int) -> None:
        """Advance by a token of the mask; after that ask ``is_complete`` and ``error`` before the next mask."""


class PromptUse:
    """Whether the eviction policy was told that somebody asked this prompt.

    One for all samples, and for as long as any of them lives: blocks are let go of at each sample's end, at each
    preemption and each failed admission, and yet the prompt came once.
    """

    __slots__ = ("is_told",)

    def __init__(self) -> None:
        self.is_told = False


class Request:
    """One sequence: its tokens, how far its KV is computed, and what it waits for.

    Several samples of one prompt are a request each. The first of them computes the prompt and carries the others, its
    ``forks``; when the prompt is computed they fork from it, and from then on they have nothing to do with each other.

    Attributes:
        request_id: its name in the scheduler.
        parent_id: the caller's name for all samples of the prompt together.
        sample_index: which of them this is.
        forks: those that will fork from it: they neither wait nor run yet. Empty once they have.
        token_ids: the prompt, then what was sampled.
        is_plain: of its sampling parameters; here because every step asks.
        logprobs: of its output tokens, if asked for.
        cumulative_logprob: their sum.
        prompt_logprobs: of its prompt's tokens from the second on, as far as known, if asked for.
        matcher: of its output, if that must look like something. It has accepted the output tokens, whether or not
            their KV is computed, so that preemption and failed steps do not concern it.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: [0, num_computed_tokens) has KV; [num_computed_tokens, len(token_ids)) is to be computed.
        num_cached_tokens: how much of the prompt was a prefix hit at the first admission; -1 before.
        num_loaded_tokens: how much of that did not come from the device, by tier.
        max_computed_tokens: the most that was ever computed: what is computed again below it is recomputation.
        namespace: :meth:`Namespace.key` of its blocks.
        table: its blocks while it runs.
        times: when it came, on the caller's clock, and what followed.
        deadline_s: when it is ended with ``timeout`` if it has not finished, on the same clock; None for never.
        priority: how urgent it is: the smaller, the more. It counts only with a policy that looks at it.
        order: the scheduling policy's key of it.
        warm_up: if it only warms the cache: its latencies are nobody's.
        returns_in_s: in so many seconds from its end a request that goes on from it is expected; None for unknown.
        prompt_use: of its prompt, shared by all samples of it.
    """

    __slots__ = (
        "cumulative_logprob",
        "deadline_s",
        "finish_reason",
        "forks",
        "index",
        "is_aborted",
        "is_plain",
        "logprobs",
        "matcher",
        "max_computed_tokens",
        "namespace",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_failed_steps",
        "num_loaded_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "parent_id",
        "priority",
        "prompt_logprobs",
        "prompt_use",
        "request_id",
        "returns_in_s",
        "sample_index",
        "sampling",
        "seed",
        "status",
        "stop",
        "table",
        "times",
        "token_ids",
        "warm_up",
    )

    def __init__(  # noqa: PLR0913 - a record; all but three are named at the call
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stop: StopRule,
        matcher: TokenMatcher | None = None,
        namespace: bytes = b"",
        seed: int = 0,
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
        priority: int = 0,
        parent_id: str | None = None,
        sample_index: int = 0,
        warm_up: WarmUp | None = None,
        returns_in_s: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.parent_id = request_id if parent_id is None else parent_id
        self.sample_index = sample_index
        self.forks: list[Request] = []
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling = sampling
        self.is_plain = sampling.is_plain
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stop = stop
        self.matcher = matcher
        self.namespace = namespace
        self.seed = seed
        self.times = RequestTimes(arrival_s)
        self.deadline_s = deadline_s
        self.priority = priority
        self.warm_up = warm_up
        self.returns_in_s = returns_in_s
        self.prompt_use = PromptUse()
        self.index = -1  # place in the order of arrival; set by the scheduler
        self.order = (0.0, -1)  # likewise
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.max_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_loaded_tokens: dict[str, int] = {}
        self.num_preemptions = 0
        self.num_failed_steps = 0
        self.is_aborted = False
        self.finish_reason: FinishReason | None = None
        self.table: BlockTable | None = None

    @property
    def arrival_s(self) -> float:
        """When it came."""
        return self.times.arrival_s

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """How many sequences it is, or will be: itself and those that will fork from it."""
        return 1 + len(self.forks)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def max_hit_tokens(self) -> int:
        """How many of its tokens may be found instead of computed: all but the last, unless logprobs are missing."""
        num_known = len(self.prompt_logprobs)  # of tokens 1 to num_known: the next is told by position num_known
        if self.sampling.prompt_logprobs is None or num_known == self.num_prompt_tokens - 1:
            return len(self.token_ids) - 1
        return num_known

    def packed(self) -> bytes:
        """Return the tokens as the prefix tree wants them, 4 bytes each."""
        return self.token_ids.tobytes()

    def to(self, status: RequestStatus) -> None:
        """Move to ``status``; an illegal move is our bug."""
        assert status in LEGAL_MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
