"""Windows: what happened over time, in so few pieces that it can be drawn. Pieces are merged as time goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.events import BlockEvicted, FirstToken, NextTokens, PrefixLookup, RequestPreempted

if TYPE_CHECKING:
    from pagefold.events import Event
    from pagefold.scheduler import Scheduler

__all__ = ["Window", "Windows"]

_MAX_WINDOWS = 128


@dataclass(slots=True)
class Window:
    """Some steps that follow each other, and what happened in them.

    Attributes:
        end_s: virtual time at the end of the last one.
        num_steps: how many steps.
        num_asked_tokens, num_hit_tokens: prompt tokens of requests that were admitted first, and those found.
        num_first_tokens: requests that got their first token.
        ttft_s: seconds that they waited for it, all together.
        num_gaps: tokens that were not first ones.
        gap_s: seconds since the token before each, all together.
        num_waiting: requests that waited after each step, added up.
        num_running: likewise those that ran.
        num_active_blocks: likewise blocks that sequences held.
        num_evictions, num_preemptions: how many blocks were evicted, and requests preempted.
    """

    end_s: float = 0.0
    num_steps: int = 0
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_first_tokens: int = 0
    ttft_s: float = 0.0
    num_gaps: int = 0
    gap_s: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    num_active_blocks: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0

    def merge(self, later: Window) -> None:
        """Take in the window that comes next."""
        self.end_s = later.end_s
        for name in self.__dataclass_fields__:
            if name != "end_s":
                setattr(self, name, getattr(self, name) + getattr(later, name))

    def figures(self, num_blocks: int) -> dict[str, float | None]:
        """Return what is drawn: means over the window; None where there was nothing to take a mean of.

        Args:
            num_blocks: of the pool.
        """
        steps = max(1, self.num_steps)
        return {
            "end_s": self.end_s,
            "hit_ratio": _mean(self.num_hit_tokens, self.num_asked_tokens),
            "ttft_s": _mean(self.ttft_s, self.num_first_tokens),
            "inter_token_s": _mean(self.gap_s, self.num_gaps),
            "num_waiting": self.num_waiting / steps,
            "num_running": self.num_running / steps,
            "use": self.num_active_blocks / steps / num_blocks,
            "num_evictions": self.num_evictions,
            "num_preemptions": self.num_preemptions,
        }


class Windows:
    """Collects windows of equally many steps; when there are too many, each two become one.

    Attributes:
        now: the window that is not complete yet.
    """

    def __init__(self) -> None:
        self.now = Window()
        self._done: list[Window] = []
        self._num_steps = 1  # of a window

    def count(self, event: Event) -> None:
        """Count what is counted by events."""
        window = self.now
        match event:
            case BlockEvicted():
                window.num_evictions += 1
            case PrefixLookup() if not event.after_preemption:
                window.num_asked_tokens += event.num_tokens
                window.num_hit_tokens += event.num_hit_tokens
            case RequestPreempted():
                window.num_preemptions += 1
            case FirstToken():
                window.num_first_tokens += 1
                window.ttft_s += event.ttft_s
            case NextTokens():
                window.num_gaps += sum(event.gaps.values())
                window.gap_s += sum(gap_s * count for gap_s, count in event.gaps.items())
            case _:
                pass

    def end_step(self, now_s: float, scheduler: Scheduler) -> None:
        """A step is over: look at what waits, runs and is held, too."""
        window = self.now
        window.num_waiting += len(scheduler.waiting)
        window.num_running += len(scheduler.running)
        window.num_active_blocks += scheduler.core.num_active
        window.end_s = now_s
        window.num_steps += 1
        if window.num_steps < self._num_steps:
            return
        self._done.append(window)
        self.now = Window()
        if len(self._done) == 2 * _MAX_WINDOWS:
            for earlier, later in zip(self._done[::2], self._done[1::2], strict=True):
                earlier.merge(later)
            del self._done[1::2]
            self._num_steps *= 2

    def all(self) -> tuple[Window, ...]:
        """Return all windows, in order; the last may be shorter."""
        return (*self._done, self.now) if self.now.num_steps else tuple(self._done)


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
