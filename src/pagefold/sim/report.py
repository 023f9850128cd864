"""What a replay saw: a subscriber that counts events and looks at the pool, and the report that it adds up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pagefold.events import (
    BlockEvicted,
    Event,
    FirstToken,
    HostTransfer,
    NextTokens,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
    StepApplied,
    TierRead,
    TierWritten,
)
from pagefold.sim.windows import Window, Windows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.scheduler import Scheduler

__all__ = ["PoolSample", "Report", "Tally", "percentile"]

_MAX_SAMPLES = 1024


class PoolSample(NamedTuple):
    """Where all blocks were after a step: in sequences, only cached, or free.

    Attributes:
        time_s: virtual time.
        num_active, num_cached, num_free: blocks; they add up to the pool.
    """

    time_s: float
    num_active: int
    num_cached: int
    num_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a workload cost. Means over time are over steps: what held after each of them, each step counting once.

    Attributes:
        num_requests: requests that finished.
        num_steps: steps that ran.
        duration_s: virtual seconds from the first arrival's clock to the last token.
        num_asked_tokens: prompt tokens of all requests.
        num_computed_tokens: prompt tokens computed, and whatever was computed again after a preemption.
        num_recomputed_tokens: the part of ``num_computed_tokens`` that had been computed before a preemption.
        num_output_tokens: tokens sampled.
        num_hit_tokens: prompt tokens found in the cache when their requests were first admitted.
        num_evictions: cached blocks that went, by cause.
        num_preemptions: how often a running request gave its blocks back.
        num_host_stored, num_host_loaded: blocks that went to the host's memory, and that came back from there.
        num_disk_written, num_disk_read, num_disk_missed: blocks that the disk was given, that came from it, and that
            were asked for and did not come, or not right.
        mean_use, peak_use: share of all blocks that sequences held, 0 to 1.
        waste: share of the token positions in running requests' blocks that hold no token, 0 to 1.
        mean_resident_tokens: tokens that a running request had in its blocks.
        ttft_p50_s, ttft_p95_s: virtual seconds from arrival to first token, nearest rank.
        itl_p50_s, itl_p95_s: virtual seconds from a request's token to its next (inter-token latency), nearest rank, to
            the microsecond.
        mean_waiting, peak_waiting: requests that waited.
        mean_running: requests that ran.
        samples: the pool over time, evenly thinned out.
        windows: what happened over time, in windows of equally many steps.
        num_blocks: of the pool.
    """

    num_requests: int
    num_steps: int
    duration_s: float
    num_asked_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_output_tokens: int
    num_hit_tokens: int
    num_evictions: dict[str, int]
    num_preemptions: int
    num_host_stored: int
    num_host_loaded: int
    num_disk_written: int
    num_disk_read: int
    num_disk_missed: int
    mean_use: float
    peak_use: float
    waste: float
    mean_resident_tokens: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    mean_waiting: float
    peak_waiting: int
    mean_running: float
    samples: tuple[PoolSample, ...] = field(repr=False)
    windows: tuple[Window, ...] = field(repr=False)
    num_blocks: int

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that were prefix hits, 0 to 1."""
        return _ratio(self.num_hit_tokens, self.num_asked_tokens)

    def figures(self) -> dict[str, object]:
        """Return all figures by name, without samples and windows: what ``--json`` prints."""
        figures: dict[str, object] = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in {"samples", "windows"}
        }
        figures["hit_share"] = self.hit_share
        return figures


class Tally:
    """Counts events, as a subscriber of core and scheduler, and looks at the pool after each step.

    Events of failed steps are counted as they come; a replay has none.

    Args:
        progress: told how many requests have ended, after each step in which some have.
    """

    def __init__(self, progress: Callable[[int], None] | None = None) -> None:
        self._progress = progress
        self._num_told = 0
        self._num_requests = 0
        self._num_steps = 0
        self._num_asked = 0
        self._num_hit = 0
        self._num_computed = 0
        self._num_recomputed = 0
        self._num_output = 0
        self._evictions: Counter[str] = Counter()
        self._num_preemptions = 0
        self._num_stored = self._num_loaded = 0
        self._num_written = self._num_read = self._num_missed = 0
        self._ttfts_s: list[float] = []
        self._gaps_us: Counter[int] = Counter()
        self._windows = Windows()
        self._waiting = 0
        self._peak_waiting = 0
        self._num_looks = 0
        self._active_blocks = 0
        self._peak_blocks = 0
        self._num_blocks = 0
        self._held_positions = 0
        self._wasted_positions = 0
        self._resident_tokens = 0
        self._resident_requests = 0
        self._samples: list[PoolSample] = []
        self._looks_per_sample = 1
        self._last_s = 0.0

    def __call__(self, event: Event) -> None:  # noqa: C901 - one case an event
        """Count ``event``."""
        self._windows.count(event)
        match event:
            case StepApplied():
                self._num_steps += 1
                self._num_computed += event.num_prompt_tokens
                self._num_recomputed += event.num_recomputed_tokens
                self._num_output += event.num_output_tokens
            case BlockEvicted():
                self._evictions[event.cause] += 1
            case PrefixLookup():
                if not event.after_preemption:
                    self._num_asked += event.num_tokens
                    self._num_hit += event.num_hit_tokens
            case HostTransfer() | TierRead() | TierWritten():
                self._count_moves(event)
            case RequestPreempted():
                self._num_preemptions += 1
            case FirstToken():
                self._ttfts_s.append(event.ttft_s)
            case NextTokens():
                for gap_s, count in event.gaps.items():
                    self._gaps_us[round(gap_s * 1e6)] += count
            case RequestFinished():
                self._num_requests += 1
            case _:
                pass

    def look(self, scheduler: Scheduler, now_s: float) -> None:
        """Record where all blocks are; call it after each step."""
        core = scheduler.core
        num_active = core.num_active
        self._num_blocks = core.pool.num_blocks
        self._active_blocks += num_active
        self._peak_blocks = max(self._peak_blocks, num_active)
        self._held_positions += num_active * core.block_size
        self._wasted_positions += scheduler.num_wasted_slots
        self._resident_tokens += sum(request.num_computed_tokens for request in scheduler.running)
        self._resident_requests += len(scheduler.running)
        self._waiting += len(scheduler.waiting)
        self._peak_waiting = max(self._peak_waiting, len(scheduler.waiting))
        self._windows.end_step(now_s, scheduler)
        if self._progress is not None and self._num_requests > self._num_told:
            self._num_told = self._num_requests
            self._progress(self._num_requests)
        if self._num_looks % self._looks_per_sample == 0:
            self._samples.append(PoolSample(now_s, num_active, core.pool.num_cached, core.pool.num_free))
            if len(self._samples) == _MAX_SAMPLES:
                del self._samples[1::2]
                self._looks_per_sample *= 2
        self._num_looks += 1
        self._last_s = now_s

    @property
    def ttfts_s(self) -> list[float]:
        """Seconds from arrival to first token, of all requests that have got one."""
        return self._ttfts_s

    def report(self) -> Report:
        """Return what it all comes to."""
        ttfts_s = sorted(self._ttfts_s)
        return Report(
            num_requests=self._num_requests,
            num_steps=self._num_steps,
            duration_s=self._last_s,
            num_asked_tokens=self._num_asked,
            num_computed_tokens=self._num_computed,
            num_recomputed_tokens=self._num_recomputed,
            num_output_tokens=self._num_output,
            num_hit_tokens=self._num_hit,
            num_evictions=dict(sorted(self._evictions.items())),
            num_preemptions=self._num_preemptions,
            num_host_stored=self._num_stored,
            num_host_loaded=self._num_loaded,
            num_disk_written=self._num_written,
            num_disk_read=self._num_read,
            num_disk_missed=self._num_missed,
            mean_use=_ratio(self._active_blocks, self._num_looks * self._num_blocks),
            peak_use=_ratio(self._peak_blocks, self._num_blocks),
            waste=_ratio(self._wasted_positions, self._held_positions),
            mean_resident_tokens=_ratio(self._resident_tokens, self._resident_requests),
            ttft_p50_s=percentile(ttfts_s, 50),
            ttft_p95_s=percentile(ttfts_s, 95),
            itl_p50_s=_weighted_percentile(self._gaps_us, 50) / 1e6,
            itl_p95_s=_weighted_percentile(self._gaps_us, 95) / 1e6,
            mean_waiting=_ratio(self._waiting, self._num_looks),
            peak_waiting=self._peak_waiting,
            mean_running=_ratio(self._resident_requests, self._num_looks),
            windows=self._windows.all(),
            num_blocks=self._num_blocks,
            samples=tuple(self._samples),
        )

    def _count_moves(self, event: HostTransfer | TierRead | TierWritten) -> None:
        match event:
            case HostTransfer():
                self._num_stored += event.num_stored_blocks
                self._num_loaded += event.num_loaded_blocks
            case TierRead():
                self._num_read += event.num_blocks
                self._num_missed += sum(event.num_missed.values())
            case TierWritten():
                self._num_written += event.num_kept


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def percentile(ascending: list[float], percent: int) -> float:
    """Return the nearest-rank percentile; 0 of nothing."""
    return ascending[max(0, -(-len(ascending) * percent // 100) - 1)] if ascending else 0.0


def _weighted_percentile(counts: Counter[int], percent: int) -> int:
    """Return the nearest-rank percentile of values that came so often each; 0 of nothing."""
    left = -(-counts.total() * percent // 100)
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return 0
