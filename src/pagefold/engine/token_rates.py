"""TokenRates: how many tokens a second each tenant may use, as token buckets at the door."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pagefold.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["NO_RATES", "AnyRates", "TokenRate", "TokenRates"]


_MAX_RETRY_AFTER_S = 3600
"""Who has to wait for longer comes again and is told again."""


@dataclass(frozen=True, slots=True)
class TokenRate:
    """How much a tenant may use.

    Attributes:
        tokens_per_s: tokens a second, of prompts and outputs together; positive.
        burst_tokens: tokens at once, behind a pause; positive.
    """

    tokens_per_s: float
    burst_tokens: float


class AnyRates(Protocol):
    """Who may use how many tokens."""

    def enter(self, tenant: str, num_prompt_tokens: int) -> None:
        """Charge a tenant for the prompts of a request.

        Raises:
            RateLimitError: it has used up what it may; nothing is charged.
        """

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Charge a tenant for tokens that were made, or give it back as many as ``num_tokens`` is below 0."""


class _NoRates:
    """Everybody may use any number."""

    def enter(self, tenant: str, num_prompt_tokens: int) -> None:
        """See :class:`AnyRates`."""

    def spend(self, tenant: str, num_tokens: int) -> None:
        """See :class:`AnyRates`."""


NO_RATES = _NoRates()


class _Bucket:
    """What one tenant may use: it fills at its rate up to its burst, and may be below 0 when outputs were long.

    A clock that goes back adds nothing, and one that jumps ahead fills it at most.
    """

    __slots__ = ("_at_s", "level", "rate")

    def __init__(self, rate: TokenRate, now: float) -> None:
        self.rate = rate
        self.level = rate.burst_tokens
        self._at_s = now

    def fill(self, now: float) -> None:
        """Add what has come since it was last filled."""
        came = max(0.0, now - self._at_s) * self.rate.tokens_per_s
        self.level = min(self.rate.burst_tokens, self.level + came)
        self._at_s = now


class TokenRates:
    """A token bucket for each tenant that has a rate. Any thread may ask.

    A request is let in if the bucket has the tokens of its prompts; one of more than the burst, if the bucket is full.
    They are charged then, and output tokens when they are made, whoever reads them when: an output goes on though the
    bucket is below 0, and the next request waits.

    Args:
        rates: by tenant; others may use any number.
        clock: seconds.
    """

    def __init__(self, rates: Mapping[str, TokenRate], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets = {tenant: _Bucket(rate, clock()) for tenant, rate in rates.items()}
        self._lock = threading.Lock()

    def enter(self, tenant: str, num_prompt_tokens: int) -> None:
        """See :class:`AnyRates`."""
        bucket = self._buckets.get(tenant)
        if bucket is None:
            return
        with self._lock:
            bucket.fill(self._clock())
            rate = bucket.rate
            missing = min(num_prompt_tokens, rate.burst_tokens) - bucket.level
            if missing <= 0:
                bucket.level -= num_prompt_tokens
                return
            left = max(0, math.floor(bucket.level))
        retry_after_s = max(1, math.ceil(min(missing / rate.tokens_per_s, _MAX_RETRY_AFTER_S)))
        remedy = f"Try again in {retry_after_s} s."
        if num_prompt_tokens > rate.burst_tokens:
            remedy = f"So many need a full bucket: send nothing else until then. {remedy}"
        msg = (
            f"The request's prompts have {num_prompt_tokens} tokens, and {left} are left of the "
            f"{rate.tokens_per_s:g} a second that this key's tenant may use (at most {rate.burst_tokens:g} at once)."
        )
        raise RateLimitError(msg, retry_after_s=retry_after_s, remedy=remedy)

    def spend(self, tenant: str, num_tokens: int) -> None:
        """See :class:`AnyRates`."""
        bucket = self._buckets.get(tenant)
        if bucket is not None:
            with self._lock:
                bucket.fill(self._clock())
                bucket.level -= num_tokens
