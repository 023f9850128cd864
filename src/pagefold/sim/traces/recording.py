"""Recordings of the server, as ``pagefold serve --record-trace`` writes them: what came from outside, and each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagefold.errors import TraceError
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.tenant_blocks import KVQuota  # noqa: TC001 - of a dataclass
from pagefold.request import HintPin, Request, SessionRef, StopRule
from pagefold.scheduler.guardrails import NO_CAP
from pagefold.sim.traces.request import GREEDY_TO_LENGTH, Trace, TraceRequest
from pagefold.sim.traces.tokens import name_blocks

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

__all__ = [
    "Recorded",
    "RecordedAdd",
    "RecordedCut",
    "RecordedRequest",
    "RecordedReset",
    "RecordedSessionEnd",
    "RecordedSettings",
    "RecordedStep",
    "RecordedUnpin",
    "Recording",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSettings:
    """What the server was started with, by the names of ``EngineConfig``; and the blocks of pool and host tier.

    ``seals_blocks`` says whether its codec seals blocks when they are full: then each sequence has a residual.
    ``has_quotas`` says whether tenants may have quotas, which their requests tell.
    ``rules`` say what each cache group keeps. Recordings that say nothing of admission are of servers that let requests
    in by their prompts.
    """

    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    eviction_policy: str
    scheduling_policy: str
    priority_aging_s: float
    max_pinned_share: float
    pin_half_life_s: float
    allow_streaming: bool = False
    seals_blocks: bool = False
    rules: tuple[KeepRule, ...] = (KEEP_ALL,)
    admission: str = "prompt"
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_token_threshold: int = 0
    has_quotas: bool = False


@dataclass(frozen=True, slots=True)
class RecordedAdd:
    """A request came.

    Attributes:
        number: of its first sample; the others follow.
        num_samples: how many outputs it has.
        num_prompt_tokens: of the prompt.
        most_tokens: prompt and output together, at most.
        namespace: of its blocks: a number.
        arrival_s, deadline_s, priority: as in ``Request``.
        has_prompt_logprobs: whether all of the prompt is computed, whatever the cache holds.
        returns_in_s: in so many seconds from its end a request that goes on from it was expected; None for unknown.
        session: the session that it belongs to; None for none.
        pin: (seconds until it expires, priority) of the pin that it makes; None for no pin.
        hint_pins: beginnings of its prompt that are pinned if there is room for it.
        message_ends: positions behind the messages of its prompt; empty where nothing is known of messages.
        has_stop_strings: whether a text may end it.
        has_beams: whether its samples are beams of a search; what becomes of them step by step is not recorded.
        tenant: whose it is: a number.
        weight: of the tenant.
        quota: likewise; None for none.
    """

    number: int
    num_samples: int
    num_prompt_tokens: int
    most_tokens: int
    namespace: int
    arrival_s: float
    deadline_s: float | None = None
    priority: int = 0
    has_prompt_logprobs: bool = False
    returns_in_s: float | None = None
    session: SessionRef | None = None
    pin: tuple[float | None, float] | None = None
    message_ends: tuple[int, ...] = ()
    hint_pins: tuple[HintPin, ...] = ()
    has_stop_strings: bool = False
    has_beams: bool = False
    tenant: int = 0
    weight: float = 1.0
    quota: KVQuota | None = None


class RecordedCut(NamedTuple):
    """A sample was ended from outside; ``is_in_step`` if a step with it was in flight: the next one recorded."""

    number: int
    is_in_step: bool


class RecordedUnpin(NamedTuple):
    """A pin of a request was taken away, or expired.

    Attributes:
        number: of the request.
        num_tokens: of the beginning of its prompt that a hint pinned; 0 for a pin that is no hint.
    """

    number: int
    num_tokens: int = 0


class RecordedSessionEnd(NamedTuple):
    """A session was ended by its client."""

    session: SessionRef


class RecordedReset(NamedTuple):
    """The cache was reset."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step.

    Attributes:
        step_id: the step's number.
        now_s: the time that it was planned for.
        num_rows: sequences that took part; with 0 nothing ran.
        num_computed, num_read: tokens that it computed, and tokens of KV that it read.
        took_s: seconds.
        has_failed: whether the step was taken back.
        hits: (number, tokens that were found) of each sample that it admitted.
        evicted: ids of the blocks that were evicted since the step before, in order.
        damaged: host blocks that it failed of.
        corrupted: samples of which the model computed no numbers.
        drafts: (number, how many it had, how many of them were right) of each sample with drafts; -1 where something in
            its row was no number.
        prefill_cap_tokens: how many tokens of prompts it might compute, by the server's guardrails.
    """

    step_id: int
    now_s: float
    num_rows: int
    num_computed: int = 0
    num_read: int = 0
    took_s: float = 0.0
    has_failed: bool = False
    hits: tuple[tuple[int, int], ...] = ()
    evicted: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    corrupted: tuple[int, ...] = ()
    drafts: tuple[tuple[int, int, int], ...] = ()
    prefill_cap_tokens: int = NO_CAP


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One sample of a recording, for a simulation with other settings.

    Attributes:
        number: of the sample; also the seed of its draws.
        arrival_s: seconds after the first one came.
        namespace: of its blocks: a number.
        num_prompt_tokens: how many of ``tokens`` are the prompt.
        tokens: hashes of prompt and output.
        returns_in_s, session: as in :class:`RecordedAdd`.
    """

    number: int
    arrival_s: float
    namespace: int
    num_prompt_tokens: int
    tokens: array[int]
    returns_in_s: float | None = None
    session: SessionRef | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output together; one without an output still has a step."""
        return max(self.num_prompt_tokens + 1, len(self.tokens))

    def request(self) -> Request:
        """Return a fresh request with its prompt; what it samples, :meth:`Recording.sampled` tells."""
        return Request(
            f"r{self.number}",
            self.tokens[: self.num_prompt_tokens],
            GREEDY_TO_LENGTH,
            stop=StopRule(frozenset(), self.num_tokens),
            namespace=str(self.namespace).encode(),
            seed=self.number,
            arrival_s=self.arrival_s,
            returns_in_s=self.returns_in_s,
            session=self.session,
        )


Recorded: TypeAlias = RecordedAdd | RecordedCut | RecordedUnpin | RecordedSessionEnd | RecordedReset | RecordedStep


@dataclass(slots=True)
class Recording:
    """All of a recording.

    Attributes:
        name: of the file.
        settings: what the server was started with.
        happened: in order.
        tokens: of each sample, by its number: hashes of prompt and output, each of all tokens up to it; of one that had
            not ended when the server was killed, of its prompt.
        ended: why each sample ended; ``failed`` if its steps did, empty if it had not ended.
        is_whole: the server ended it, rather than being killed.
    """

    name: str
    settings: RecordedSettings
    happened: list[Recorded] = field(default_factory=list)
    tokens: dict[int, array[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    is_whole: bool = False
    _prompts: dict[int, int] = field(default_factory=dict)

    def adds(self) -> Iterator[RecordedAdd]:
        """Yield the requests."""
        return (each for each in self.happened if isinstance(each, RecordedAdd))

    def requests(self) -> list[RecordedRequest]:
        """Return every sample, in order of arrival."""
        began_s = min((add.arrival_s for add in self.adds()), default=0.0)
        return [
            RecordedRequest(
                number,
                add.arrival_s - began_s,
                add.namespace,
                add.num_prompt_tokens,
                self.tokens[number],
                add.returns_in_s,
                add.session,
            )
            for add in self.adds()
            for number in range(add.number, add.number + add.num_samples)
        ]

    def sampled(self, number: int, draw: int) -> int:
        """Return the token that a sample got after ``draw`` others; 0 where it got none."""
        tokens, place = self.tokens[number], self._num_prompt(number) + draw
        return tokens[place] if place < len(tokens) else 0

    def _num_prompt(self, number: int) -> int:
        if not self._prompts:
            for add in self.adds():
                for each in range(add.number, add.number + add.num_samples):
                    self._prompts[each] = add.num_prompt_tokens
        return self._prompts[number]

    def trace(self, max_requests: int | None = None) -> Trace:
        """Return its requests as a trace: every sample one, with an id a block."""
        size = self.settings.block_size
        known: dict[tuple[int, bytes], int] = {}
        made: list[TraceRequest] = []
        began_s = min((add.arrival_s for add in self.adds()), default=0.0)
        for add in self.adds():
            for number in range(add.number, add.number + add.num_samples):
                tokens = self.tokens[number]
                packed = tokens[: add.num_prompt_tokens].tobytes()
                stride = size * tokens.itemsize
                ids = name_blocks(packed, stride, known, root=-1 - add.namespace)
                num_output = max(1, len(tokens) - add.num_prompt_tokens)
                made.append(TraceRequest(add.arrival_s - began_s, add.num_prompt_tokens, num_output, tuple(ids), size))
        if not made:
            msg = f"The recording {self.name} holds no requests."
            raise TraceError(msg, remedy="Record a server that somebody asks something.")
        return Trace(self.name, tuple(made[:max_requests]))
