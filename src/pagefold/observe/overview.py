"""Overview: a subscriber of events that remembers what a dashboard shows.

That is who has the blocks, what was found and what was not, what was evicted, the last requests and where their time
went, and which prefixes were found most.

It listens behind the ledger, which says why tokens were computed. All of it is bounded. Events come on the engine's
thread, where little is done; whoever reads does so on another.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.events import (
    BlockEvicted,
    BlocksPublished,
    CacheConfigured,
    CacheReset,
    EvictionPolicySwitched,
    OutputFinished,
    PathForgotten,
    PathsDistrusted,
    PrefixLookup,
    RequestPreempted,
    StepApplied,
    TierRead,
    TierWritten,
)
from pagefold.observe.hot_prefixes import HotPrefixes
from pagefold.observe.subscriber import Subscriber
from pagefold.observe.timeline import BlockUse, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.status import EngineStatus
    from pagefold.observe.hot_prefixes import HotPrefix
    from pagefold.observe.ledger import Ledger
    from pagefold.observe.misses import Cause, Miss
    from pagefold.observe.request_record import RequestRecord

__all__ = ["EndedRequest", "Overview", "Seen"]

_log = logging.getLogger(__name__)

_MOST_REQUESTS = 20
_MOST_PREFIXES = 10
_SAMPLE_S = 1.0
_SERIES = ("lookups", "misses", "evictions", "tokens", "read", "read_bytes", "written", "unread", "preemptions")


class EndedRequest(NamedTuple):
    """A request that has ended, and where its time went.

    Attributes:
        request_id: the engine's name for it.
        tenant: whose it was.
        ended_s: when it ended.
        queue_s, fetch_s, prefill_s, decode_s: how long it waited for its turn, for slow tiers, was computed up to its
            first token, and behind that. They add up to all of its time, but for what it waited at its end.
        num_prompt_tokens, num_device_tokens, num_tier_tokens, num_output_tokens: of its prompt; of those that were
            found on the device, and in tiers behind it; of its output.
        worst: why most of what was computed of its prompt was; None if all was found.
        num_worst_tokens: how many tokens that were.
        finish_reason: why it ended.
    """

    request_id: str
    tenant: str
    ended_s: float
    queue_s: float
    fetch_s: float
    prefill_s: float
    decode_s: float
    num_prompt_tokens: int
    num_device_tokens: int
    num_tier_tokens: int
    num_output_tokens: int
    worst: Cause | None
    num_worst_tokens: int
    finish_reason: str


class Seen(NamedTuple):
    """What an overview has seen, all at one moment.

    Attributes:
        now_s: the moment.
        status: what the engine does.
        block_size: tokens a block; 0 before there is a cache.
        policy: the eviction policy's name, and whom it follows, if it does.
        uses: who had the blocks, of each piece of the timeline; None where it is not known.
        series: what was counted in each piece, by series and label.
        output_tokens_per_s, prompt_tokens_per_s: lately; of prompts those that were computed.
        requests: the last ones that ended, the last first.
        prefixes: those that saved most.
        is_whole: whether nothing has failed: else it ends where that was.
    """

    now_s: float
    status: EngineStatus
    block_size: int
    policy: str
    uses: list[BlockUse | None]
    series: dict[str, dict[str, list[float]]]
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    requests: list[EndedRequest]
    prefixes: list[HotPrefix]
    is_whole: bool


class Overview(Subscriber):
    """Remembers what a dashboard shows.

    Args:
        ledger: says why; it is told each event before.
        clock: seconds, the engine's.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        on: dict[type, Callable[[Any], None]] = {
            BlockEvicted: self._on_block_evicted,
            BlocksPublished: self._on_blocks_published,
            CacheConfigured: self._on_cache_configured,
            CacheReset: self._on_cache_reset,
            EvictionPolicySwitched: self._on_policy_switched,
            OutputFinished: self._on_output_finished,
            PathForgotten: self._on_path_forgotten,
            PathsDistrusted: self._on_paths_distrusted,
            PrefixLookup: self._on_prefix_lookup,
            RequestPreempted: self._on_request_preempted,
            StepApplied: self._on_step_applied,
            TierRead: self._on_tier_read,
            TierWritten: self._on_tier_written,
        }
        super().__init__(on, _log, "the overview has failed at %s: the dashboard ends here")
        self._ledger = ledger
        self._clock = clock
        self._status: Callable[[], EngineStatus] | None = None
        self._timeline = Timeline(clock)
        self._prefixes = HotPrefixes()
        self._requests: deque[EndedRequest] = deque(maxlen=_MOST_REQUESTS)
        self._sampled_s = -_SAMPLE_S
        self._block_size = 0
        self._policy = ""
        self._follows = ""

    @property
    def explains(self) -> bool:
        """Whether causes are remembered."""
        return self._ledger.is_on

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Ask ``status`` who has the blocks. It is called on the engine's thread too."""
        self._status = status

    def see(self) -> Seen | None:
        """Return what is known now; None before anybody can be asked what the engine does."""
        if self._status is None:
            return None
        status = self._status()
        with self._lock:
            self._sample(status)
            timeline = self._timeline
            return Seen(
                now_s=self._clock(),
                status=status,
                block_size=self._block_size,
                policy=f"{self._policy} ({self._follows})" if self._follows else self._policy,
                uses=timeline.uses(),
                series={name: timeline.series(name) for name in _SERIES},
                output_tokens_per_s=timeline.rate("tokens", "output"),
                prompt_tokens_per_s=timeline.rate("tokens", "prompt"),
                requests=list(reversed(self._requests)),
                prefixes=self._prefixes.hottest(_MOST_PREFIXES),
                is_whole=not self.has_failed and not self._ledger.has_failed,
            )

    # What happens.

    def _on_block_evicted(self, event: BlockEvicted) -> None:
        self._timeline.count("evictions", event.rule if event.cause == "allocation" else event.cause)
        if event.node is not None and not event.node.attached:
            self._prefixes.gone(event.node)

    def _on_blocks_published(self, event: BlocksPublished) -> None:
        for node in event.nodes:
            self._prefixes.back(node)

    def _on_cache_configured(self, event: CacheConfigured) -> None:
        self._block_size, self._policy, self._follows = event.block_size, event.eviction_policy, ""

    def _on_cache_reset(self, event: CacheReset) -> None:  # noqa: ARG002 - it tells nothing but that
        self._prefixes.clear()

    def _on_policy_switched(self, event: EvictionPolicySwitched) -> None:
        self._follows = event.policy

    def _on_path_forgotten(self, event: PathForgotten) -> None:
        self._prefixes.gone(event.node)

    def _on_paths_distrusted(self, event: PathsDistrusted) -> None:
        for node in event.nodes:
            self._prefixes.gone(node)

    def _on_prefix_lookup(self, event: PrefixLookup) -> None:
        if event.after_preemption:  # its own blocks, found again, are no saving
            return
        count = self._timeline.count
        count("lookups", "device", event.num_hit_tokens - event.num_loaded_tokens)
        count("lookups", "tiers", event.num_loaded_tokens)
        count("lookups", "computed", event.num_tokens - event.num_hit_tokens)
        record = self._record(event.request_id)
        for miss in () if record is None else _misses(record):
            count("misses", miss.cause.value, miss.num_tokens)
        if event.tail is not None and self._block_size and event.num_hit_tokens >= self._block_size:
            self._prefixes.find(event.tail, event.num_hit_tokens // self._block_size, self._clock())

    def _on_output_finished(self, event: OutputFinished) -> None:
        record = self._record(event.request_id)
        if record is None or event.is_warm_up:
            return
        by_cause: dict[Cause, int] = {}
        for miss in (*_misses(record), *record.recomputed):
            by_cause[miss.cause] = by_cause.get(miss.cause, 0) + miss.num_tokens
        worst = max(by_cause, key=lambda cause: by_cause[cause], default=None)
        fetch_s = min(record.fetch_s, event.queue_s)
        self._requests.append(
            EndedRequest(
                request_id=event.request_id,
                tenant=record.tenant,
                ended_s=self._clock(),
                queue_s=event.queue_s - fetch_s,
                fetch_s=fetch_s,
                prefill_s=event.prefill_s or 0.0,
                decode_s=event.decode_s or 0.0,
                num_prompt_tokens=event.num_prompt_tokens,
                num_device_tokens=record.num_hit_tokens - record.num_loaded_tokens,
                num_tier_tokens=record.num_loaded_tokens,
                num_output_tokens=event.num_output_tokens,
                worst=worst,
                num_worst_tokens=0 if worst is None else by_cause[worst],
                finish_reason=event.finish_reason,
            )
        )

    def _on_request_preempted(self, _event: RequestPreempted) -> None:
        self._timeline.count("preemptions", "all")

    def _on_step_applied(self, event: StepApplied) -> None:
        self._timeline.count("tokens", "prompt", event.num_prompt_tokens)
        self._timeline.count("tokens", "output", event.num_output_tokens)
        is_last = not event.num_running and not event.num_waiting  # nothing changes until somebody comes
        if self._status is not None and (is_last or self._clock() - self._sampled_s >= _SAMPLE_S):
            self._sample(self._status())

    def _on_tier_read(self, event: TierRead) -> None:
        self._timeline.count("read", event.tier, event.num_blocks)
        self._timeline.count("read_bytes", event.tier, event.num_bytes)
        self._timeline.count("unread", event.tier, sum(event.num_missed.values()))

    def _on_tier_written(self, event: TierWritten) -> None:
        self._timeline.count("written", "kept", event.num_kept)

    # Inside.

    def _record(self, request_id: str) -> RequestRecord | None:
        return next(iter(self._ledger.records(request_id)), None)

    def _sample(self, status: EngineStatus) -> None:
        if not status.num_blocks:  # the engine is not there yet
            return
        self._sampled_s = self._clock()
        num_held = status.num_blocks - status.num_free_blocks - status.num_cached_blocks
        num_pinned = status.num_idle_pinned_blocks
        use = BlockUse(
            max(0, num_held),
            num_pinned,
            max(0, status.num_cached_blocks - num_pinned),
            status.num_held_host_blocks,
            {tier: one.num_held for tier, one in status.tier_uses.items()},
        )
        self._timeline.sample(use)


def _misses(record: RequestRecord) -> tuple[Miss, ...]:
    """Return why tokens of a request's prompt were computed, where all tenants' prompts count: it is for the admin."""
    return (record.misses if record.admins_misses is None else record.admins_misses) or ()
