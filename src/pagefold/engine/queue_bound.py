"""QueueBound: how many requests may be here at once."""

from __future__ import annotations

import time
from collections import deque

from pagefold.errors import QueueFullError

__all__ = ["QueueBound"]

_NUM_ENDS = 32
_MAX_RETRY_AFTER_S = 60


class QueueBound:
    """Counts requests that come and go, and refuses one too many.

    Args:
        max_requests: how many may be here, each sample counted; None for any number.

    Attributes:
        num_requests: how many are here, each sample counted.
    """

    def __init__(self, max_requests: int | None) -> None:
        self._max_requests = max_requests
        self.num_requests = 0
        self._ends_s: deque[float] = deque(maxlen=_NUM_ENDS)  # when the last requests ended

    def enter(self, num_samples: int) -> None:
        """Count a request of so many samples in.

        Raises:
            QueueFullError: there is no room for it.
        """
        if self._max_requests is not None and self.num_requests + num_samples > self._max_requests:
            retry_after_s = self._seconds_an_end()
            msg = "The queue is full."  # how full all is, and of what, is no tenant's business
            raise QueueFullError(msg, retry_after_s=retry_after_s, remedy=f"Try again in {retry_after_s} s.")
        self.num_requests += num_samples

    def turn_away(self, num_samples: int) -> None:
        """Take back that a request of so many samples came in: it is refused for another reason."""
        self.num_requests -= num_samples

    def leave(self, num_samples: int) -> None:
        """Count a request of so many samples out."""
        self.num_requests -= num_samples
        self._ends_s.append(time.monotonic())

    def _seconds_an_end(self) -> int:
        """Estimate when the next request ends, from the last ones."""
        if len(self._ends_s) < 2:  # noqa: PLR2004 - a span has two ends
            return 1
        seconds = (time.monotonic() - self._ends_s[0]) / (len(self._ends_s) - 1)
        return min(max(1, round(seconds)), _MAX_RETRY_AFTER_S)
