"""Deadline: until when a call may take."""

from __future__ import annotations

import time

__all__ = ["Deadline"]


class Deadline:
    """A moment, so many seconds from now. What takes several waits gives each the seconds that are left.

    Args:
        timeout_s: from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left: more than none.

        Raises:
            TimeoutError: none are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(self.told())
        return left

    def told(self) -> str:
        """Return what to say when it has passed."""
        return f"no answer within {self.timeout_s:g} s"
