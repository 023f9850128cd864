"""Request: one sequence on its way through, and its status with the moves that are legal."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias

from pagefold.request.order_key import OrderKey
from pagefold.request.times import RequestTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.beams.group import BeamGroup
    from pagefold.kv import KVQuota, SequenceCache
    from pagefold.request.caller import WarmUp
    from pagefold.request.hint_pin import HintPin
    from pagefold.request.session import SessionRef
    from pagefold.sampling import SamplingParams
    from pagefold.speculation.params import SpeculativeParams
    from pagefold.steps import TokenLogprobs
    from pagefold.structured.matcher import TokenMatcher

__all__ = ["LEGAL_MOVES", "FinishReason", "PromptUse", "Request", "RequestStatus", "StopRule"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "timeout"]


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
        sample_index: which of its prompt's samples this is.
        forks: those that will fork from it: they neither wait nor run yet. Empty once they have.
        token_ids: the prompt, then what was sampled.
        is_plain: of its sampling parameters; here because every step asks.
        drafts: what may follow ``token_ids``, as somebody guesses: computed with the next step that has room for them,
            and forgotten when that is planned.
        speculation: who drafts for it, and how much; None for nobody.
        predicted: tokens that its caller expects in the output: for who drafts.
        num_draft_tokens: how many drafts steps have computed for it.
        num_accepted_tokens: how many of those were what it sampled.
        beams: of whose beams it holds one; None for a sample.
        may_draft: whether drafts are used at all: not since a step with some found no numbers for it.
        logprobs: of its output tokens, if asked for.
        logprob_sums: of each output token, its logprob and those before it together.
        prompt_logprobs: of its prompt's tokens from the second on, as far as known, if asked for.
        matcher: of its output, if that must look like something. It has accepted the output tokens, whether or not
            their KV is computed, so that preemption and failed steps do not concern it.
        num_prompt_tokens: how many of them are the prompt.
        message_ends: positions behind the messages of its prompt, ascending, the last of which is at most the prompt's.
        num_computed_tokens: [0, num_computed_tokens) has KV; [num_computed_tokens, len(token_ids)) is to be computed.
        num_cached_tokens: how much of the prompt was a prefix hit at the first admission; -1 before.
        num_loaded_tokens: how much of that did not come from the device, by tier.
        num_lost_tokens: how much behind its hit is cached, and computed once more for want of a window: at the last
            admission.
        max_computed_tokens: the most that was ever computed: what is computed again below it is recomputation.
        num_declined_tokens: how much behind its hit the host held, and computing was expected to be sooner: likewise.
        num_overtaken: how many were let in before it that came behind it, since it lacked a place.
        namespace: :meth:`Namespace.key` of its blocks.
        tenant: whose it is: a name, of which the scheduler knows nothing else.
        weight: the share of that tenant beside others' weights, where tenants have shares; positive.
        quota: of that tenant, of the device's blocks; None for none.
        cache: its blocks while it runs.
        times: when it came, on the caller's clock, and what followed.
        deadline_s: when it is ended with ``timeout`` if it has not finished, on the same clock; None for never.
        priority: how urgent it is: the smaller, the more. It counts only with a policy that looks at it.
        order: the scheduling policy's key of it.
        warm_up: if it only warms the cache: its latencies are nobody's.
        returns_in_s: in so many seconds from its end a request that goes on from it is expected; None for unknown.
        session: the session that it belongs to; None for none.
        hint_pins: beginnings of its prompt that are pinned at its end if there is room for it.
        error: why it ends with ``error``, where that is not its grammar's.
        adapter: the slot of the adapter that it is computed with; 0 for none.
        mask: by which of the model's masks it keeps older tokens, where those are packed; ``NO_MASK`` for all of them.
        kept_share: what share of its older chunks its last cache had kept, where those are packed; else None.
        prompt_use: of its prompt, shared by all samples of it.
    """

    __slots__ = (
        "adapter",
        "beams",
        "cache",
        "deadline_s",
        "drafts",
        "error",
        "finish_reason",
        "forks",
        "hint_pins",
        "index",
        "is_aborted",
        "is_plain",
        "kept_share",
        "logprob_sums",
        "logprobs",
        "mask",
        "matcher",
        "max_computed_tokens",
        "may_draft",
        "message_ends",
        "namespace",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_declined_tokens",
        "num_draft_tokens",
        "num_loaded_tokens",
        "num_lost_tokens",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "parent_id",
        "predicted",
        "priority",
        "prompt_logprobs",
        "prompt_use",
        "quota",
        "request_id",
        "returns_in_s",
        "sample_index",
        "sampling",
        "seed",
        "session",
        "speculation",
        "status",
        "stop",
        "tenant",
        "times",
        "token_ids",
        "warm_up",
        "weight",
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
        message_ends: Sequence[int] = (),
        speculation: SpeculativeParams | None = None,
        predicted: Sequence[int] = (),
        mask: int = 0,
        adapter: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        quota: KVQuota | None = None,
        session: SessionRef | None = None,
        hint_pins: Sequence[HintPin] = (),
    ) -> None:
        self.request_id = request_id
        self.parent_id = request_id if parent_id is None else parent_id
        self.sample_index = sample_index
        self.forks: list[Request] = []
        self.beams: BeamGroup[Request] | None = None
        self.token_ids = array("i", prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.message_ends = message_ends or (self.num_prompt_tokens,)
        self.sampling = sampling
        self.is_plain = sampling.is_plain
        self.speculation = speculation
        self.mask = mask
        self.adapter = adapter
        self.predicted = predicted
        self.drafts: Sequence[int] = ()
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.may_draft = True
        self.logprobs: list[TokenLogprobs] = []
        self.logprob_sums: list[float] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.stop = stop
        self.matcher = matcher
        self.namespace = namespace
        self.tenant = tenant
        self.weight = weight
        self.quota = quota
        self.seed = seed
        self.times = RequestTimes(arrival_s)
        self.deadline_s = deadline_s
        self.priority = priority
        self.warm_up = warm_up
        self.returns_in_s = returns_in_s
        self.session = session
        self.hint_pins = hint_pins
        self.prompt_use = PromptUse()
        self.index = -1  # place in the order of arrival; set by the scheduler
        self.order = OrderKey.of(0.0, -1)  # likewise
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.max_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_loaded_tokens: dict[str, int] = {}
        self.kept_share: float | None = None
        self.num_lost_tokens = self.num_declined_tokens = 0
        self.num_preemptions = 0
        self.num_overtaken = 0
        self.is_aborted = False
        self.finish_reason: FinishReason | None = None
        self.error = ""
        self.cache: SequenceCache | None = None

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
    def leader(self) -> Request:
        """Who stands for it where it is tried, blamed or preempted: itself; of beams, the first."""
        return self if self.beams is None else self.beams.seats[0]

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def has_no_output(self) -> bool:
        """Whether only its prompt is computed: what its row samples is nobody's."""
        return self.stop.max_total_tokens <= self.num_prompt_tokens

    @property
    def has_whole_output(self) -> bool:
        """Whether it has ended by itself: by a token, by its text, or since its grammar found no way on."""
        return self.finish_reason == "stop" or (self.finish_reason == "error" and not self.error)

    @property
    def has_answer(self) -> bool:
        """Whether its client has got what was asked for: an output that is whole, or as long as it may be."""
        return self.finish_reason == "length" or self.has_whole_output

    @property
    def max_hit_tokens(self) -> int:
        """How many of its tokens may be found instead of computed: all but the last, unless logprobs are missing."""
        num_known = len(self.prompt_logprobs)  # of tokens 1 to num_known: the next is told by position num_known
        if self.sampling.prompt_logprobs is None or num_known == self.num_prompt_tokens - 1:
            return len(self.token_ids) - 1
        return num_known

    def cut(self, num_output_tokens: int) -> None:
        """Drop all output behind the first so many tokens: its text has ended before the tokens of a step."""
        num_dropped = max(0, self.num_output_tokens - num_output_tokens)
        del self.token_ids[self.num_prompt_tokens + num_output_tokens :]
        del self.logprobs[num_output_tokens:]
        del self.logprob_sums[num_output_tokens:]
        if num_dropped:  # all of one step, the last of which was no draft
            self.num_accepted_tokens -= num_dropped - 1

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Note the logprobs of the next output token."""
        self.logprob_sums.append((self.logprob_sums[-1] if self.logprob_sums else 0.0) + logprobs.logprob)
        self.logprobs.append(logprobs)

    def packed(self) -> bytes:
        """Return the tokens as the prefix tree wants them, 4 bytes each."""
        return self.token_ids.tobytes()

    def to(self, status: RequestStatus) -> None:
        """Move to ``status``; an illegal move is our bug."""
        assert status in LEGAL_MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
