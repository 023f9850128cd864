"""Caller: who asks, and on what terms; a warm-up is such a term."""

from __future__ import annotations

from dataclasses import dataclass

from pagefold.errors import InvalidRequestError
from pagefold.request.hint_pin import HintPin  # noqa: TC001 - of a dataclass
from pagefold.request.session import MAX_SESSION_ID, NO_SESSION_ID, SessionRef, session_ref
from pagefold.sampling import out_of_range
from pagefold.speculation.params import SpeculativeParams  # noqa: TC001 - of a dataclass
from pagefold.typecheck import wrong_type

__all__ = [
    "ANYBODY",
    "DEFAULT_RETENTION_PRIORITY",
    "MAX_RETURNS_IN_S",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "Caller",
    "WarmUp",
]

_MAX_RETENTION_PRIORITY = 100.0

DEFAULT_RETENTION_PRIORITY = 35.0
"""The retention priority of a pin that says none, as in TensorRT-LLM."""

MAX_RETURNS_IN_S = 86_400

MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3
"""A tenant's weight lies between these."""


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
            raise out_of_range(wrong.field, repr(wrong.value), wrong.allowed)
        if self.ttl_s is not None and not 0.0 < self.ttl_s < float("inf"):
            raise out_of_range("ttl_s", self.ttl_s, "a positive number of seconds; without it a pin does not expire")
        if not 0.0 <= self.retention_priority <= _MAX_RETENTION_PRIORITY:
            raise out_of_range("retention_priority", self.retention_priority, "between 0 and 100")
        if self.ttl_s is not None and not self.pin:
            msg = f"ttl_s is {self.ttl_s}, but pin is not true."
            raise InvalidRequestError(msg, param="ttl_s", remedy="Leave it out, or send pin: true.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and on what terms.

    Attributes:
        tenant: whose blocks a request may share.
        weight: the tenant's share beside others' weights, where tenants have shares; positive.
        cache_salt: only requests of the tenant with the same salt share blocks.
        priority: the smaller, the sooner it is served, with a scheduling policy that looks at it.
        warm_up: of a request that only warms the cache; None for all others.
        returns_in_s: in so many seconds from its end the conversation is expected to go on; None for nobody knows.
        session_id: the tenant's name for the row of requests that this one goes on with; empty for none.
        parent_session_id: of the session whose agent has called this one's; empty for none.
        hint_pins: beginnings of its prompt that are pinned if there is room for it.
        tier_offset: added to ``priority``, but only with such a policy.
        speculation: who drafts for the request; None for who drafts for all.
        predicted: tokens that are expected in the output, for who drafts.
        kv_keep: which share of older tokens is kept, of those that the engine offers; None for its default.
        kv_quality: the same by the name of a kind of blocks; empty for the default.
        adapter: the name of the adapter that the request is computed with; empty for none.
    """

    tenant: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    priority: int = 0
    warm_up: WarmUp | None = None
    returns_in_s: float | None = None
    session_id: str = ""
    parent_session_id: str = ""
    hint_pins: tuple[HintPin, ...] = ()
    tier_offset: int = 0
    speculation: SpeculativeParams | None = None
    predicted: tuple[int, ...] = ()
    kv_keep: float | None = None
    kv_quality: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.returns_in_s is not None and not 0.0 <= self.returns_in_s <= MAX_RETURNS_IN_S:
            raise out_of_range("returns_in_s", self.returns_in_s, f"between 0 and {MAX_RETURNS_IN_S} seconds, a day")
        for field in ("session_id", "parent_session_id"):
            num_characters = len(getattr(self, field))
            if num_characters > MAX_SESSION_ID:
                raise out_of_range(field, f"{num_characters} characters long", f"at most {MAX_SESSION_ID}")
            if NO_SESSION_ID.search(getattr(self, field)):
                msg = f"{field} holds control characters, or is a dot or two, so no URL could name the session."
                raise InvalidRequestError(msg, param=field, remedy="Name it otherwise, such as by a UUID.")
        for num_tokens, ttl_s in self.hint_pins:
            if num_tokens < 1 or not 0.0 < ttl_s < float("inf"):
                said = f"{num_tokens} tokens for {ttl_s} seconds"
                raise out_of_range("hint_pins", said, "at least one token, and a positive number of seconds")
        if self.parent_session_id and self.parent_session_id == self.session_id:
            msg = "parent_session_id is the session itself."
            raise InvalidRequestError(msg, param="parent_session_id", remedy="Name the session that called this one.")
        if self.parent_session_id and not self.session_id:
            msg = "There is a parent_session_id, and no session_id."
            raise InvalidRequestError(msg, param="parent_session_id", remedy="Send a session_id too, or leave it out.")

    @property
    def session(self) -> SessionRef | None:
        """Its session, as the scheduler knows it; None for none."""
        if not self.session_id:
            return None
        return session_ref(self.tenant, self.session_id, self.parent_session_id)


ANYBODY = Caller()
