"""Breaker: whether a store that failed is asked again. It decides; it knows no thread and no clock."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Breaker", "Change"]


class Change(NamedTuple):
    """A store went out, or came back.

    Attributes:
        is_out: whether it was left out, rather than let in again.
        why: in words; what failed.
        lasted_s: how long it had been in, or out.
    """

    is_out: bool
    why: str
    lasted_s: float


class Breaker:
    """The state of one store: in until a call fails, then out until one that asks whether it answers does not.

    A store that fails soon after it came back is left out for longer each time; one that had been in for longer than it
    was out before begins anew.

    Args:
        now: seconds, of any clock; so are all ``now``.
        first_wait_s, most_wait_s: how long it is left out before it is asked, at first and at most.

    Attributes:
        is_out: whether it is left out.
        since: when that began.
        wait_s: how long until it is asked next, while it is out.
        num_failures: calls that failed, since the start.
        last_error: in words; empty if none did.
    """

    def __init__(self, now: float, *, first_wait_s: float = 1.0, most_wait_s: float = 60.0) -> None:
        self._first_wait_s = self.wait_s = first_wait_s
        self._most_wait_s = most_wait_s
        self.is_out = False
        self.since = now
        self.num_failures = 0
        self.last_error = ""
        self._has_been_out = False

    def failed(self, now: float, why: str) -> Change | None:
        """A call failed. Return the change that this is, if it is one."""
        self.num_failures += 1
        self.last_error = why
        if self.is_out:
            return None
        if self._has_been_out:
            was_short = now - self.since <= self.wait_s
            self.wait_s = min(2 * self.wait_s, self._most_wait_s) if was_short else self._first_wait_s
        self._has_been_out = True
        return self._turn(now, why)

    def asked_in_vain(self, why: str) -> None:
        """Note that the store was asked while out, and does not answer yet."""
        self.num_failures += 1
        self.last_error = why
        self.wait_s = min(2 * self.wait_s, self._most_wait_s)

    def answered(self, now: float) -> Change | None:
        """Note that the store answers. Return the change that this is, if it is one."""
        return self._turn(now, self.last_error) if self.is_out else None

    def _turn(self, now: float, why: str) -> Change:
        change = Change(not self.is_out, why, now - self.since)
        self.is_out = not self.is_out
        self.since = now
        return change
