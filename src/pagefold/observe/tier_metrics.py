"""TierMetrics: what moves between the device and the tiers behind it, how fast, and whether waiting for it paid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from pagefold.events import FetchEnded, FetchOutcome, HostTransfer, TierMissCause, TierRead, TierWritten

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.observe.series import SeriesMaker

__all__ = ["TIERS", "TierMetrics"]

TIERS = ("disk", "remote")
"""The slow tiers."""


class TierMetrics:
    """Counts what tiers do. Whoever calls it holds a lock.

    Args:
        series: makes what it counts in.

    Attributes:
        on: of each kind of event that is counted, what counts it.
    """

    def __init__(self, series: SeriesMaker) -> None:
        self.on: dict[type, Callable[[Any], None]] = {
            FetchEnded: self._on_fetch_ended,
            HostTransfer: self._on_host_transfer,
            TierRead: self._on_tier_read,
            TierWritten: self._on_tier_written,
        }
        self._host_blocks = series.counters(
            "pagefold:host_blocks",
            "Blocks that went to the host's memory when they were evicted (stored), came back from there (loaded), or "
            "did not come back as they had been, and were computed anew (damaged).",
            "move",
            ("stored", "loaded", "damaged"),
        )
        self._tier_bytes = series.counters(
            "vllm:kv_offload_tiering_read_bytes",
            "Bytes of blocks that came from slow tiers, and were right.",
            "tier",
            TIERS,
        )
        self._tier_s = series.counters(
            "vllm:kv_offload_tiering_read_time", "Seconds that this took, checks included.", "tier", TIERS
        )
        self._tier_written_bytes = series.counters(
            "vllm:kv_offload_tiering_write_bytes",
            "Bytes of blocks that slow tiers were given and keep, those that they had already included.",
            "tier",
            TIERS,
        )
        self._tier_write_s = series.counters(
            "vllm:kv_offload_tiering_write_time", "Seconds that this took.", "tier", TIERS
        )
        self._fetches = series.counters(
            "pagefold:fetches",
            "What became of what slow tiers might have had for a request, once it does not wait for it.",
            "outcome",
            get_args(FetchOutcome),
        )
        self._fetch_tokens = series.counters(
            "pagefold:fetch_tokens",
            "Tokens that device and host lacked then. Of outcome slow, computing was expected to be sooner.",
            "outcome",
            get_args(FetchOutcome),
        )
        self._fetch_waited_s = series.counter(
            "pagefold:fetch_waited_seconds", "How long requests waited for slow tiers."
        )
        self._fetch_expected_s = series.counter(
            "pagefold:fetch_expected_seconds",
            "How long those that had something brought were expected to wait for it, when that was decided.",
        )
        self._fetch_regret_s = series.counter(
            "pagefold:fetch_regret_seconds",
            "By how much waiting took longer than computing what came would have, by what prefills took lately; "
            "requests that lost by waiting.",
        )
        self._fetch_gain_s = series.counter(
            "pagefold:fetch_gain_seconds", "By how much waiting was sooner; requests that won."
        )
        self._tier_misses = series.counters(
            "pagefold:tier_blocks_missed",
            "Blocks that were asked for from slow tiers and did not come, by cause; they were computed.",
            "cause",
            get_args(TierMissCause),
        )
        self._tier_writes = series.counters(
            "pagefold:tier_blocks_written",
            "Blocks that were given to slow tiers: kept by one at least, or by none.",
            "outcome",
            ("kept", "not_kept"),
        )

    def _on_host_transfer(self, event: HostTransfer) -> None:
        self._host_blocks["stored"].inc(event.num_stored_blocks)
        self._host_blocks["loaded"].inc(event.num_loaded_blocks)
        self._host_blocks["damaged"].inc(len(event.damaged_ids))

    def _on_tier_read(self, event: TierRead) -> None:
        self._tier_bytes[event.tier].inc(event.num_bytes)
        self._tier_s[event.tier].inc(event.seconds)
        for cause, num_blocks in event.num_missed.items():
            self._tier_misses[cause].inc(num_blocks)

    def _on_tier_written(self, event: TierWritten) -> None:
        for tier, seconds in event.seconds.items():
            self._tier_written_bytes[tier].inc(event.num_bytes[tier])
            self._tier_write_s[tier].inc(seconds)
        self._tier_writes["kept"].inc(event.num_kept)
        self._tier_writes["not_kept"].inc(event.num_blocks - event.num_kept)

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        self._fetches[event.outcome].inc()
        self._fetch_tokens[event.outcome].inc(event.num_tokens)
        self._fetch_waited_s.inc(event.waited_s)
        if event.expected_s is not None:
            self._fetch_expected_s.inc(event.expected_s)
        self._fetch_gain_s.inc(max(0.0, event.saved_s - event.waited_s))
        self._fetch_regret_s.inc(max(0.0, event.waited_s - event.saved_s))
