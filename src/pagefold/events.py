"""What happened, typed. The core calls ``emit``; metrics, explain, KV events and recorders subscribe from outside.

Nothing in ``kv`` or ``scheduler`` asks whether anybody listens: with no subscriber ``emit`` is :func:`ignore`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from pagefold.kv.block import Node

__all__ = [
    "BlockEvicted",
    "BlocksPublished",
    "BlocksRegained",
    "BlocksReused",
    "CacheConfigured",
    "CacheReset",
    "ChunksPacked",
    "DraftsVerified",
    "Emit",
    "Event",
    "EvictionCause",
    "EvictionPolicySwitched",
    "EvictionRule",
    "FetchEnded",
    "FetchOutcome",
    "FirstToken",
    "HostTransfer",
    "NextTokens",
    "OutputFinished",
    "OutputForecastChecked",
    "PathForgotten",
    "PathSuperseded",
    "PathsDistrusted",
    "PinCause",
    "PinDropped",
    "PreemptionCause",
    "PrefixLookup",
    "PrefixMissed",
    "PromptFinished",
    "RefusalReason",
    "RequestAdded",
    "RequestCorrupted",
    "RequestCut",
    "RequestFinished",
    "RequestPreempted",
    "RequestRefused",
    "RequestStreamed",
    "SessionClosed",
    "StepAbandoned",
    "StepApplied",
    "StepPlanned",
    "SupersedeCause",
    "TierMissCause",
    "TierRead",
    "TierWritten",
    "WaitCause",
    "fan_out",
    "ignore",
    "length_class",
]

EvictionCause: TypeAlias = Literal["allocation", "reset", "corrupted"]

EvictionRule: TypeAlias = Literal[
    "policy", "stale", "cut", "landmark", "firm_landmark", "idle", "packed", "superseded", "session"
]
"""By which rule of ``kv/block_cache.py`` a block was next: the eviction policy named it, its session did, or its place
alone did."""


SupersedeCause: TypeAlias = Literal["edited", "ended"]


@dataclass(frozen=True, slots=True)
class BlockEvicted:
    """A cached block left the prefix tree.

    Attributes:
        block_id: the block that became free.
        depth: how many blocks lie above it in its prefix.
        cause: ``allocation`` when another sequence needed the memory, ``reset`` when the cache was cleared,
            ``corrupted`` when a request of which the model computed no numbers had to do with it.
        lifetime_s: seconds since it was published.
        idle_s: seconds since it was last used (published, found, or let go).
        node: of the tree, which published it. What is asked of it is its path's name (``kv/names.py``), and while it is
            told of only; None where nobody was told which.
        rule: why it was the next one to go, where memory was needed.
        score: what the policy went by: of all nodes that could go, the one with the least goes. None where another
            rule or a mere order decided.
        asked_by: the request that needed the memory; empty where none did.
    """

    block_id: int
    depth: int
    cause: EvictionCause
    lifetime_s: float = 0.0
    idle_s: float = 0.0
    node: Node | None = None
    rule: EvictionRule = "policy"
    score: float | None = None
    asked_by: str = ""


@dataclass(frozen=True, slots=True)
class PathForgotten:
    """A node has left the tree of which no block was cached any more: it had only led to others.

    Attributes:
        node: as of :class:`BlockEvicted`.
        asked_by: the request that needed memory then.
    """

    node: Node
    asked_by: str


@dataclass(frozen=True, slots=True)
class BlocksPublished:
    """What a sequence has computed is written, and others find it from now on.

    Attributes:
        owner: the request that computed it.
        nodes: of the tree, in the order of their path. As of :class:`BlockEvicted`.
    """

    owner: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class BlocksRegained:
    """Nodes that had lost blocks have them again: from the host, or of who computed them once more.

    One event a step, or a path that was joined, and none where nothing was regained.

    Attributes:
        nodes: of the tree, one for each block. As of :class:`BlockEvicted`.
    """

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class PathsDistrusted:
    """Paths are forgotten since what they hold may be corrupted, whether or not anybody holds their blocks.

    Attributes:
        nodes: of the tree, parents first. As of :class:`BlockEvicted`.
    """

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class BlocksReused:
    """A request that was let in found blocks in the prefix tree. One event, however many there were.

    Attributes:
        gaps: seconds since a block was last used (published, found, or let go), to how many were that long ago. Blocks
            of one prefix were mostly used together, so there are few entries.
    """

    gaps: dict[float, int]


@dataclass(frozen=True, slots=True)
class CacheConfigured:
    """An engine is there, with its cache.

    Attributes:
        settings: of the cache, by vLLM's names where it has them, as they are told.
        num_blocks: of the device.
        block_size: tokens a block.
        eviction_policy: its name.
        publishes: whether anything is ever cached.
        num_host_blocks, num_disk_blocks: that tiers behind the device have room for; 0 where there is none.
        blocks_per_place: blocks that a place of a path takes: one of each cache group that keeps all.
        bytes_per_block: of memory.
    """

    settings: dict[str, str]
    num_blocks: int = 0
    block_size: int = 0
    eviction_policy: str = ""
    publishes: bool = True
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    blocks_per_place: int = 1
    bytes_per_block: int = 0


@dataclass(frozen=True, slots=True)
class EvictionPolicySwitched:
    """Another eviction policy is followed from now on: ``auto`` has found that it would have found more.

    Attributes:
        policy: its name.
        before: whose turn it was; empty at the start.
        found_share, found_share_before: share of the blocks used lately that each would have found, 0 to 1.
    """

    policy: str
    before: str
    found_share: float
    found_share_before: float


@dataclass(frozen=True, slots=True)
class HostTransfer:
    """A step moved blocks between the device and the host's memory.

    Attributes:
        num_stored_blocks: that were evicted and are kept.
        num_loaded_blocks: that came back, as they had been.
        damaged_ids: host blocks that were not as they had been; what they held is computed anew.
    """

    num_stored_blocks: int
    num_loaded_blocks: int
    damaged_ids: tuple[int, ...] = ()


TierMissCause: TypeAlias = Literal[
    "absent",
    "damaged",
    "other_version",
    "other_layout",
    "other_namespace",
    "other_block",
    "io_error",
    "late",
]
"""Why a block did not come from a slow tier. ``late``: nobody waited for it any more."""


@dataclass(frozen=True, slots=True)
class TierRead:
    """Blocks were asked for from a slow tier, and have come into the host's memory, or not.

    Attributes:
        tier: the slow tier.
        num_blocks, num_bytes: that came, and were right.
        seconds: how long it took, as if the tier had done nothing else meanwhile.
        num_missed: how many did not come, by cause.
        missed: of each of those its name's digest (``kv/names.py``), and the cause.
    """

    tier: str
    num_blocks: int
    num_bytes: int
    seconds: float
    num_missed: dict[TierMissCause, int]
    missed: tuple[tuple[bytes, TierMissCause], ...] = ()


@dataclass(frozen=True, slots=True)
class TierWritten:
    """Blocks of the host's memory were given to the slow tiers.

    Attributes:
        num_blocks: how many blocks were given.
        num_kept: how many of them at least one tier keeps.
        num_bytes: of each tier that took some, bytes of the blocks that it keeps, those that it had already included.
        seconds: of each of those, how long that took.
    """

    num_blocks: int
    num_kept: int
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Every prefix is forgotten, by request."""


PinCause: TypeAlias = Literal["expired", "memory", "removed", "renewed", "reset", "corrupted", "quota", "superseded"]
"""Why a pin is no more: its time was up, a request needed the memory, it was asked for, another pin took its place, or
the cache was reset, or its blocks are not trusted any more; ``quota`` for one that never came to be, or yielded to
another; ``superseded`` for one of what a session's client has edited away, or of a session that has ended."""


@dataclass(frozen=True, slots=True)
class PinDropped:
    """A pin is no more; its blocks are cached as any others are. Or it never came to be.

    Attributes:
        tail: the last node of what it kept; None for one that never came to be. As of :class:`BlockEvicted`.
    """

    pin_id: str
    num_blocks: int
    cause: PinCause
    tail: Node | None = None


@dataclass(frozen=True, slots=True)
class RequestAdded:
    """A request was queued, with those that will fork from it: all that decides how it goes, but the model.

    Attributes:
        sample_ids: of it and of its forks, in order.
        token_ids: of each of them: the prompt, and then what is sampled. They grow; nobody who is told may change them.
        num_prompt_tokens: of the prompt, which they all have.
        max_total_tokens: prompt and output together, at most.
        namespace: of its blocks.
        arrival_s, deadline_s, priority: as in ``Request``.
        has_prompt_logprobs: whether all of the prompt is computed, though the cache may hold some of it.
        returns_in_s: in so many seconds from its end a request that goes on from it is expected; None for unknown.
        session: digests of its tenant, its session, and the parent of that (empty for none); None for no session.
        pin: if it only warms the cache and pins what it computed: (seconds until the pin expires, priority).
        message_ends: positions behind the messages of its prompt.
        hint_pins: (tokens, seconds) of beginnings of its prompt that are pinned if there is room for it.
        has_stop_strings: whether a text may end it.
        has_beams: whether these are beams of a search, whose tokens are known at the end.
        tenant, weight: as in ``Request``.
        quota: (floor, cap) of its tenant, in blocks of the device; the cap is None for none. None for no quota.
    """

    sample_ids: tuple[str, ...]
    token_ids: tuple[array[int], ...]
    num_prompt_tokens: int
    max_total_tokens: int
    namespace: bytes
    arrival_s: float
    deadline_s: float | None
    priority: int
    has_prompt_logprobs: bool
    returns_in_s: float | None
    pin: tuple[float | None, float] | None
    message_ends: Sequence[int] = ()
    hint_pins: Sequence[tuple[int, float]] = ()
    has_stop_strings: bool = False
    has_beams: bool = False
    tenant: str = ""
    weight: float = 1.0
    session: tuple[bytes, bytes, bytes] | None = None
    quota: tuple[int, int | None] | None = None


RefusalReason: TypeAlias = Literal["ttft_target", "token_rate", "queue_full"]
"""Why a request was refused though it could be served: it would wait longer than the target of the first token, its
tenant has used up its token rate, or as many are here as may wait."""


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A request was not queued, though it could have been served. Those that come with it are none more.

    Attributes:
        expected_s: what was expected of it, in seconds; None where nothing was.
        threshold_s: what that must not pass; likewise.
    """

    request_id: str
    reason: RefusalReason
    expected_s: float | None = None
    threshold_s: float | None = None


@dataclass(frozen=True, slots=True)
class PathSuperseded:
    """Blocks have lost their value: their session has edited them away, or has ended. They are evicted first.

    Attributes:
        num_blocks: how many.
        cause: ``edited`` when a prompt no longer contained them, ``ended`` when their session had, or its parent's.
        nodes: that hold them, the last first. As of :class:`BlockEvicted`.
    """

    num_blocks: int
    cause: SupersedeCause
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A session was ended by its client, and those of its sub-agents with it.

    Attributes:
        tenant, session: digests of whose it was, and of its name.
        num_sessions: how many ended.
        num_blocks: blocks that lost their value by it.
        num_running: requests of theirs that go on.
    """

    tenant: bytes
    session: bytes
    num_sessions: int
    num_blocks: int
    num_running: int


@dataclass(frozen=True, slots=True)
class RequestCut:
    """A request was ended from outside, or because it is late; ``RequestFinished`` follows when its blocks are free.

    Attributes:
        is_in_step: a step with it is in flight, which goes on.
    """

    request_id: str
    reason: str
    is_in_step: bool


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """A request was admitted, its prefix looked up, and the step that admitted it ran. A step that fails tells none.

    ``after_preemption`` keeps lookups of requests that come back apart from first ones, so that a hit rate never counts
    a preempted request's own blocks as a saving. Every request has at most one first lookup.

    Attributes:
        num_tokens: how many tokens the request has.
        num_hit_tokens: the part of them that was found.
        after_preemption: whether it had been admitted before.
        num_loaded_tokens: the part of ``num_hit_tokens`` that came from tiers behind the device.
        has_tiers: whether there are any: what the device lacked was looked up there.
        num_lost_tokens: how many tokens behind them are cached, and computed once more: where layers keep the last
            tokens only, a window is gone that whoever goes on there needs.
        num_declined_tokens: how many behind them the host held, and computing was expected to be sooner.
        planned_s: the time for which the step was planned: then it was looked up.
        tail: of the tree, the last node of what it has published or found; None where it publishes nothing. As of
            :class:`BlockEvicted`.
        loaded_by_tier: ``num_loaded_tokens``, by the tier that they came from.
    """

    request_id: str
    num_tokens: int
    num_hit_tokens: int
    after_preemption: bool
    num_loaded_tokens: int = 0
    has_tiers: bool = False
    num_lost_tokens: int = 0
    num_declined_tokens: int = 0
    planned_s: float = 0.0
    tail: Node | None = field(default=None, compare=False)
    loaded_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMissed:
    """It is known why tokens of a request that was let in are computed though there is a cache.

    It is told by the ledger (``observe/ledger.py``), which makes causes of the other events; not by the core.

    Attributes:
        num_tokens: of each cause (:class:`pagefold.observe.misses.Cause`, by its value), how many. At a request's first
            lookup they are all that were not found; at its return after a preemption, those that are computed again.
    """

    request_id: str
    num_tokens: dict[str, int]


FetchOutcome: TypeAlias = Literal["brought", "absent", "slow", "no_room", "late", "broken"]
"""What became of what slow tiers might have had for a request: it came; none has it; computing was expected to be
sooner; there was no room in the host's memory; a tier took longer than computing would have; a part did not come."""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A request does not wait for slow tiers any more, or never did.

    Attributes:
        outcome: why.
        num_tokens: that device and host lacked, as far as that could be named.
        waited_s: how long it waited.
        expected_s: how long bringing what it chose was expected to take, when that was decided; None where nothing was.
        saved_s: how long computing what came, and is of use, would have taken, by what prefills took lately.
    """

    request_id: str
    outcome: FetchOutcome
    num_tokens: int
    waited_s: float
    expected_s: float | None = None
    saved_s: float = 0.0


PreemptionCause: TypeAlias = Literal["memory", "share"]
"""Why a running request was preempted: one that runs needed blocks, or one that waits had less than its tenant's share
of seats or blocks."""


@dataclass(frozen=True, slots=True)
class RequestPreempted:
    """A running request gave its blocks back and waits again.

    Attributes:
        num_computed_tokens: how many of its tokens had KV. What the tree still holds at its return is not recomputed.
        usage_before, usage_after: share of blocks held by sequences, 0 to 1.
        cause_request_id: the request that needed what it had.
        cause: why it had to go: see :data:`PreemptionCause`.
    """

    request_id: str
    num_computed_tokens: int
    usage_before: float
    usage_after: float
    cause_request_id: str
    cause: PreemptionCause = "memory"


@dataclass(frozen=True, slots=True)
class RequestStreamed:
    """A request was admitted that is larger than the device: what does not fit is read in the host's memory.

    Attributes:
        num_tokens: how many tokens the request has.
        num_cold_blocks: how many blocks in the host's memory were found already.
    """

    request_id: str
    num_tokens: int
    num_cold_blocks: int


@dataclass(frozen=True, slots=True)
class RequestCorrupted:
    """What the model computed for a request was NaN or infinite. It ends, and what it has is dropped."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request left the scheduler, for whatever reason. What its caller is told is :class:`OutputFinished`.

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
    """A request got its first token: all of its prompt is computed or found. Its samples are told once.

    Attributes:
        ttft_s: seconds since it came.
        num_prompt_tokens: of its prompt.
        num_cached_tokens: the part of them that was found when it was first admitted, instead of computed.
        num_copied_tokens: the part of ``num_cached_tokens`` that lay in a block of which only a part could be used.
        num_loaded_tokens: the part of ``num_cached_tokens`` that was not on the device but in a tier behind it.
        is_warm_up: whether it only warms the cache: nobody waited for its token.
        num_ahead: how many requests waited already when it came.
    """

    request_id: str
    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_copied_tokens: int
    num_loaded_tokens: int = 0
    is_warm_up: bool = False
    num_ahead: int = 0


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Requests got a token that was not their first. One event a step, however many there were.

    Attributes:
        gaps: seconds since a request's token before, to how many requests waited so long. Those that got theirs from
            one step share an entry, so there are few.
        by_length: the same for each length of requests, prompt and output with this token: 0 for up to 512 tokens, and
            one more for each doubling (:func:`length_class`).
    """

    gaps: dict[float, int]
    by_length: dict[int, dict[float, int]] = field(default_factory=dict)


def length_class(num_tokens: int) -> int:
    """Return how often 512 tokens must be doubled to be as many as these: 0 for 1 to 512, 1 to 1,024, 2 to 2,048."""
    return (max(0, num_tokens - 1) >> 9).bit_length()


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """A request ended, and how its caller is told. Each one that was ever queued ends once.

    Attributes:
        finish_reason: as the caller gets it: ``stop`` also where the last token that was allowed completed a stop
            string.
        e2e_s: seconds from its arrival to its end.
        queue_s: seconds from its arrival until it was first scheduled, or to its end if it never was.
        prefill_s: seconds from then to its first token; None if it got none.
        decode_s: seconds from its first token to its last; None if it got none.
        is_warm_up: whether it only warms the cache: nobody waited for its end.
        num_allowed_tokens: how many it might have had.
        num_preemptions: how often it gave its blocks back.
    """

    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    e2e_s: float
    queue_s: float
    prefill_s: float | None
    decode_s: float | None
    is_warm_up: bool = False
    num_allowed_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class PromptFinished:
    """All samples of a request have ended; each has been told as :class:`OutputFinished`. A warm-up tells none.

    Attributes:
        num_choices: how many choices were asked for: ``n``.
        num_longest_tokens: output tokens of the longest of its samples.
    """

    request_id: str
    num_choices: int
    num_longest_tokens: int


@dataclass(frozen=True, slots=True)
class OutputForecastChecked:
    """A request has ended for which, when it was next to be let in, an interval was stated that should hold 8 of 10.

    Attributes:
        least_tokens, most_tokens: the interval.
        num_output_tokens: what the output was.
    """

    request_id: str
    least_tokens: int
    most_tokens: int
    num_output_tokens: int

    @property
    def is_within(self) -> bool:
        """Whether the interval held it."""
        return self.least_tokens <= self.num_output_tokens <= self.most_tokens


WaitCause: TypeAlias = Literal["seats", "memory", "growth", "prefills", "tokens", "apart", "kv_cap"]
"""What who is next waits for, and with it all behind: one of the places (``max_num_seqs``), blocks, blocks that are
promised to the growth of those that run, a place among prompts that are partly computed, tokens of a step's budget,
that those run apart whom a failed step left under suspicion, or room below its tenant's cap, for which its tenant's
others alone wait with it."""


@dataclass(frozen=True, slots=True)
class StepPlanned:
    """A step is about to run; without rows there is nothing to do, and none runs.

    Attributes:
        now_s: the time that it was planned for.
        num_rows: sequences that take part.
        num_tokens: tokens that it computes.
        num_read: tokens of KV that it reads: those before, and those that it computes.
        drafts: of each request that has drafts in it, its id and how many.
        waits_for: what those wait for whom it has not let in; None where nobody does.
        prefill_cap_tokens: how many tokens of prompts it might compute, by the guardrails; None for any number.
        capped: tenants of whom somebody waits for room below the cap, and has been passed.
    """

    step_id: int
    now_s: float
    num_rows: int
    num_tokens: int
    num_read: int
    drafts: tuple[tuple[str, int], ...] = ()
    waits_for: WaitCause | None = None
    prefill_cap_tokens: int | None = None
    capped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StepApplied:
    """A step ran and its results are in.

    Attributes:
        num_prompt_tokens: tokens computed that a request had before this step sampled anything for it.
        num_output_tokens: tokens sampled.
        num_recomputed_tokens: the part of ``num_prompt_tokens`` that had been computed before a preemption.
        num_tokens: all tokens computed.
    """

    step_id: int
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_recomputed_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ChunksPacked:
    """A step ran that packed chunks of tokens: what was kept of them lies in blocks of its own.

    Attributes:
        num_chunks: of all sequences.
        num_granted_blocks: what they fill if all is kept.
        num_kept_blocks: what they fill.
    """

    num_chunks: int
    num_granted_blocks: int
    num_kept_blocks: int


@dataclass(frozen=True, slots=True)
class DraftsVerified:
    """A step ran that had drafts.

    Attributes:
        counts: of each request that had some, its id, how many it had, and how many of them were what it sampled; None
            where nothing counts, since something in the row was no number.
    """

    counts: tuple[tuple[str, int, int | None], ...]


@dataclass(frozen=True, slots=True)
class StepAbandoned:
    """A step failed: what it had promised was taken back."""

    step_id: int
    num_requests: int
    error: str


Event: TypeAlias = (
    BlockEvicted
    | BlocksPublished
    | BlocksRegained
    | BlocksReused
    | CacheConfigured
    | EvictionPolicySwitched
    | HostTransfer
    | PathForgotten
    | PathSuperseded
    | PathsDistrusted
    | TierRead
    | TierWritten
    | CacheReset
    | PinDropped
    | RequestAdded
    | RequestCorrupted
    | RequestCut
    | StepPlanned
    | SessionClosed
    | PrefixLookup
    | PrefixMissed
    | RequestPreempted
    | RequestRefused
    | RequestStreamed
    | RequestFinished
    | FirstToken
    | NextTokens
    | OutputFinished
    | OutputForecastChecked
    | PromptFinished
    | StepApplied
    | ChunksPacked
    | DraftsVerified
    | FetchEnded
    | StepAbandoned
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
