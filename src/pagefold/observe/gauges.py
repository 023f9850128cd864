"""Gauges: what an engine is doing at the moment when somebody reads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from pagefold.engine.adapters import AdapterStatus
    from pagefold.engine.status import EngineStatus
    from pagefold.memory.cache_size import CacheSize

__all__ = ["Gauges"]

_GAUGES: dict[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("num_running", "Requests that a step computes tokens for."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests that wait for a place, preempted ones included."),
    "vllm:kv_cache_usage_perc": (
        "kv_cache_usage",
        "Share of KV blocks held by requests, 0 to 1. Cached blocks that nobody holds do not count: they can go.",
    ),
    "pagefold:num_blocks": ("num_blocks", "KV blocks."),
    "pagefold:num_free_blocks": ("num_free_blocks", "KV blocks that hold nothing."),
    "pagefold:num_cached_blocks": (
        "num_cached_blocks",
        "KV blocks that no request holds and a later one can use. When nothing runs, free and cached are all.",
    ),
    "pagefold:num_pinned_blocks": (
        "num_pinned_blocks",
        "KV blocks that pins keep cached, each counted once, whether or not a request holds them too.",
    ),
    "pagefold:num_running_sessions": ("num_running_sessions", "Agents' sessions that have a request."),
    "pagefold:num_paused_sessions": (
        "num_paused_sessions",
        "Agents' sessions that have no request and have not ended: their tools run, or they were given up.",
    ),
    "pagefold:num_superseded_blocks": (
        "num_superseded_blocks",
        "Cached places of paths that sessions have edited away, or that have ended: they are evicted first.",
    ),
    "pagefold:num_unsaved_blocks": (
        "num_unsaved_blocks",
        "Blocks of the host's memory that no slow tier was given yet. It grows to all of them while a tier hangs.",
    ),
    "pagefold:num_promised_blocks": (
        "num_promised_blocks",
        "KV blocks that running requests are expected to take yet, as --admission has it; 0 with prompt.",
    ),
    "pagefold:num_wasted_slots": (
        "num_wasted_slots",
        "Slots in blocks of running requests that hold no token: what rounding to whole blocks costs.",
    ),
    "pagefold:kv_waste_perc": ("kv_waste", "Share of the slots in blocks held by requests that hold no token, 0 to 1."),
}
"""Gauge to (field of ``EngineStatus``, help)."""


def _of_adapters(adapters: AdapterStatus) -> dict[str, str]:
    return {
        "running_lora_adapters": ",".join(adapters.running),
        "waiting_lora_adapters": ",".join(adapters.waiting),
        "max_lora": str(adapters.most),
    }


class Gauges:
    """A collector of ``prometheus_client``: looks when it is asked.

    Args:
        labels: of every series.

    Attributes:
        status: what is asked; None for nobody yet, and then there are no gauges.
        caches: beside those that it tells of.
        settings: of the cache, by vLLM's names; none before it is there.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self.status: Callable[[], EngineStatus] | None = None
        self.caches: list[Callable[[], CacheSize]] = []
        self.settings: Mapping[str, str] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; ``prometheus_client`` calls it at each reading."""
        if self.status is None:
            return
        status = self.status()
        caches = [*status.caches, *(size() for size in self.caches)]
        for name, (field, what) in _GAUGES.items():
            yield self._family(name, what, [({}, getattr(status, field))])
        yield self._family(
            "vllm:num_requests_waiting_by_reason",
            "Those that wait: for a place or for memory (capacity), or for blocks that slow tiers bring (deferred).",
            [({"reason": "capacity"}, status.num_for_capacity), ({"reason": "deferred"}, status.num_deferred)],
        )
        yield self._family(
            "vllm:cache_config_info",
            "What the cache is, in labels: block_size, cache_dtype, num_gpu_blocks (of the device) and the like.",
            [(self.settings, 1)] if self.settings else [],
        )
        yield self._family(
            "pagefold:tier_fast",
            "1 where a slow tier is thought to bring a block sooner than it is computed, 0 where what it holds is "
            "computed until it is tried again.",
            [({"tier": tier}, is_fast) for tier, is_fast in status.tiers_fast.items()],
        )
        yield self._family(
            "pagefold:num_pinned_blocks_by_kind",
            "KV blocks that pins keep cached, by the label kind, as requests ask for it in kv_quality, and codec, that "
            "encodes them, or none.",
            [({"kind": one.name, "codec": one.codec or "none"}, one.num_pinned) for one in status.kinds],
        )
        yield self._family(
            "pagefold:num_packed_blocks",
            "KV blocks that hold what was kept of older chunks, in use or cached, by the same labels.",
            [({"kind": one.name, "codec": one.codec or "none"}, one.num_packed) for one in status.kinds],
        )
        adapters = status.adapters
        yield self._family(
            "vllm:lora_requests_info",
            "When requests with LoRA adapters were looked at, in seconds since 1970, by labels as vLLM has them: "
            "running_lora_adapters and waiting_lora_adapters, names with commas, and max_lora; none without "
            "--enable-lora.",
            [] if adapters is None else [(_of_adapters(adapters), time.time())],
        )
        yield self._family(
            "pagefold:lora_adapters",
            "LoRA adapters, by the label state: loaded, or leaving (unloaded, while requests have it yet); none "
            "without --enable-lora.",
            []
            if adapters is None
            else [({"state": "loaded"}, len(adapters.loaded)), ({"state": "leaving"}, adapters.num_leaving)],
        )
        yield self._family(
            "pagefold:lora_bytes",
            "What the weights of LoRA adapters take; none without --enable-lora.",
            [] if adapters is None else [({}, adapters.num_bytes)],
        )
        pacing, shedding = status.guardrails
        yield self._family(
            "pagefold:prefill_cap_tokens",
            "Prompt tokens that a step may compute beside those that decode, as --target-itl-ms has it now; none "
            "without that.",
            [] if pacing is None else [({}, pacing.prefill_cap_tokens)],
        )
        yield self._family(
            "pagefold:drafts_allowed",
            "1 where requests may get drafts, 0 where they go without since tokens came too slowly for "
            "--target-itl-ms; none without that.",
            [] if pacing is None else [({}, pacing.allows_drafts)],
        )
        yield self._family(
            "pagefold:shedding",
            "1 while requests are refused that would get their first token too late for --target-ttft-ms, else 0; "
            "none without that.",
            [] if shedding is None else [({}, shedding.is_on)],
        )
        yield self._family(
            "pagefold:expected_ttft_seconds",
            "When a short prompt behind all others is expected to get its first token: how long it waits until it is "
            "let in, by what was measured; none without --target-ttft-ms.",
            [] if shedding is None else [({}, shedding.expected_s)],
        )
        yield self._family(
            "pagefold:cache_bytes",
            "What the label's cache takes at most with what it keeps now. Blocks of KV are no part of any.",
            [({"cache": one.name}, one.num_bytes) for one in caches],
        )
        yield self._family(
            "pagefold:cache_max_bytes",
            "What the label's cache may take.",
            [({"cache": one.name}, one.max_bytes) for one in caches],
        )

    def _family(self, name: str, what: str, series: Sequence[tuple[Mapping[str, str], float]]) -> Metric:
        family = GaugeMetricFamily(name, what, labels=(*self._labels, *(series[0][0] if series else ())))
        for own, value in series:
            family.add_metric((*self._labels.values(), *own.values()), value)
        return family
