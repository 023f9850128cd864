"""Misses: why tokens of a prompt were computed though there is a cache. Every such token has exactly one cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Cause", "Difference", "Eviction", "Miss"]


class Cause(Enum):
    """Why tokens were computed."""

    NEVER_SEEN = "never_seen"
    DIFFERS = "differs"
    OTHER_NAMESPACE = "other_namespace"
    PARTIAL_BLOCK = "partial_block"
    LAST_TOKEN = "last_token"  # noqa: S105 - a token of a prompt
    COMPUTING = "computing"
    EVICTED = "evicted"
    PIN_EXPIRED = "pin_expired"
    SUPERSEDED = "superseded"
    SESSION = "session"
    WINDOW_GONE = "window_gone"
    RESET = "reset"
    DISTRUSTED = "distrusted"
    NOT_IN_TIERS = "not_in_tiers"
    TIER_FAILED = "tier_failed"
    TIER_LATE = "tier_late"
    TIER_FULL = "tier_full"
    SOONER_COMPUTED = "sooner_computed"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PREEMPTED = "preempted"
    NOT_KEPT = "not_kept"
    CACHING_OFF = "caching_off"

    @property
    def is_avoidable(self) -> bool:
        """Whether something could be done about it."""
        return self in _REMEDIES

    @property
    def told(self) -> str:
        """What it means, as the end of the sentence *they were computed, since* ..."""
        return _TOLD[self]

    @property
    def remedy(self) -> str:
        """What would help; empty where nothing would, or need."""
        return _REMEDIES.get(self, "")


_TOLD = {
    Cause.NEVER_SEEN: "nothing that was computed before goes on so",
    Cause.DIFFERS: "what was computed before goes on otherwise",
    Cause.OTHER_NAMESPACE: "the same tokens were computed under other terms, and those are not shared",
    Cause.PARTIAL_BLOCK: "the same tokens were computed before in a block that was not filled with the same",
    Cause.LAST_TOKEN: "the last token is always computed, for the next one to be known",
    Cause.COMPUTING: "another request was just computing the same",
    Cause.EVICTED: "they were cached, and others needed the memory",
    Cause.PIN_EXPIRED: "they were pinned, the pin expired, and then others needed the memory",
    Cause.SUPERSEDED: "their session had edited them away, or had ended, and others needed the memory",
    Cause.SESSION: "their session was expected back later than others, and those needed the memory",
    Cause.WINDOW_GONE: "they are cached, but not what layers with a window need behind them",
    Cause.RESET: "the cache was reset",
    Cause.DISTRUSTED: "they were dropped: the model computed no numbers for a request that shared them",
    Cause.NOT_IN_TIERS: "they were evicted from the device, and no tier behind it has them any more",
    Cause.TIER_FAILED: "a tier behind the device had them, and could not bring them as they had been",
    Cause.TIER_LATE: "a tier behind the device took longer to bring them than computing takes",
    Cause.TIER_FULL: "there was no room in the host's memory to bring them into",
    Cause.SOONER_COMPUTED: "computing them was expected to be sooner than bringing them from a tier",
    Cause.PROMPT_LOGPROBS: "logprobs of the prompt were asked for, and those are not cached",
    Cause.PREEMPTED: "the request had to give its memory to another, and computed them again",
    Cause.CACHING_OFF: "prefix caching is switched off",
    Cause.NOT_KEPT: "they had been computed and were not kept: by a request that streams, or before a reset",
}

_REMEDIES = {
    Cause.DIFFERS: "Put what changes from request to request behind what stays: times, ids, names, retrieved text.",
    Cause.OTHER_NAMESPACE: "Send the same cache_salt, and the same kv_quality, where sharing is wanted.",
    Cause.COMPUTING: "Send the first request of a burst alone, or warm the prefix.",
    Cause.EVICTED: "Give the cache more memory, or a tier behind the device, or pin what must stay.",
    Cause.PIN_EXPIRED: "Pin for longer.",
    Cause.SUPERSEDED: "Give branches that go on side by side a session each, and end it when it is done.",
    Cause.SESSION: "Say returns_in_s, so that the pause is known; or give the cache more memory.",
    Cause.WINDOW_GONE: "Give the cache more memory: windows of the past are the first to go.",
    Cause.NOT_IN_TIERS: "Give the tiers more room.",
    Cause.TIER_FAILED: "Look at the disk or the store, and at pagefold:tier_blocks_missed.",
    Cause.TIER_LATE: "Use a faster disk, link or store.",
    Cause.TIER_FULL: "Give the host's arena more memory.",
    Cause.PROMPT_LOGPROBS: "Ask for them only where they are read.",
    Cause.CACHING_OFF: "Start the server without --no-enable-prefix-caching.",
    Cause.PREEMPTED: "Give the cache more memory, or let fewer run at once (--max-num-seqs).",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt goes on otherwise than the nearest one before it.

    Attributes:
        request_id: of the other.
        token: the first that differs.
        own, other: the tokens around that place, of both, packed; what comes before the place is equal.
        num_before: how many of each come before it.
    """

    request_id: str
    token: int
    own: bytes
    other: bytes
    num_before: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """How what was cached had to go.

    Attributes:
        ago_s: how long before it was sought.
        policy: that chose it; empty where its place alone did.
        score: what the policy went by.
        request_id: for whom; empty where that is not remembered, or is not for this reader.
    """

    ago_s: float
    policy: str = ""
    score: float | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Miss:
    """Tokens of a prompt in a row that were computed, and their cause.

    Attributes:
        start, end: positions.
        cause: why.
        difference: where they differ, of ``DIFFERS``.
        eviction: of what had been cached.
        fields: in which a namespace differs, of ``OTHER_NAMESPACE``.
        detail: what else is known, such as what a tier found.
    """

    start: int
    end: int
    cause: Cause
    difference: Difference | None = None
    eviction: Eviction | None = None
    fields: tuple[str, ...] = field(default=())
    detail: str = ""

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return self.end - self.start
