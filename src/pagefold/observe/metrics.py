"""Metrics: a subscriber of events that Prometheus reads. Names, labels and buckets are vLLM's where vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from pagefold.events import (
    BlockEvicted,
    FirstToken,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
    StepAbandoned,
    StepApplied,
    ignore,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from pagefold.engine.client import EngineStatus
    from pagefold.events import Event

__all__ = ["Metrics"]

_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)

_FINISHED_REASONS = ("stop", "length", "abort", "error", "timeout")
_EVICTION_CAUSES = ("allocation", "reset", "not_admitted")
_TOKEN_SOURCES = ("local_compute", "local_cache_hit")

_GAUGES: dict[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("num_running", "Requests that a step computes tokens for."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests that wait for a place, preempted ones included."),
    "vllm:kv_cache_usage_perc": ("kv_cache_usage", "Share of KV blocks held by requests; 1 is all of them."),
    "pagefold:num_blocks": ("num_blocks", "KV blocks."),
    "pagefold:num_free_blocks": ("num_free_blocks", "KV blocks that hold nothing."),
    "pagefold:num_cached_blocks": ("num_cached_blocks", "KV blocks that no request holds and a later one can use."),
}
"""Gauge to (field of ``EngineStatus``, help)."""


class Metrics:
    """Counts what happens and serves it as Prometheus' text.

    ``emit`` is called on the engine's thread while ``render`` runs on another.

    Args:
        model_name: label ``model_name`` of every series, beside ``engine="0"``.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._status: Callable[[], EngineStatus] | None = None

        self._prefix_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of admitted prompts, found or computed.")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens that need not be computed.")
        self._recomputed_tokens = self._counter(
            "vllm:prompt_tokens_recomputed", "Tokens computed again after a preemption."
        )
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens sampled.")
        self._preemptions = self._counter("vllm:num_preemptions", "Times that a running request gave its blocks back.")
        self._steps_failed = self._counter("pagefold:steps_failed", "Steps whose results were lost and taken back.")
        self._by_source = self._counters(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source", _TOKEN_SOURCES
        )
        self._finished = self._counters(
            "vllm:request_success", "Requests that ended, by why.", "finished_reason", _FINISHED_REASONS
        )
        self._evicted = self._counters(
            "pagefold:blocks_evicted", "Cached blocks dropped, by why.", "cause", _EVICTION_CAUSES
        )
        self._ttft_s = Histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            tuple(self._labels),
            registry=self.registry,
            buckets=_TTFT_BUCKETS_S,
        ).labels(**self._labels)
        self.registry.register(self)

        self._on: dict[type, Callable[[Any], None]] = {
            BlockEvicted: self._on_block_evicted,
            FirstToken: self._on_first_token,
            PrefixLookup: self._on_prefix_lookup,
            RequestFinished: self._on_request_finished,
            RequestPreempted: self._on_request_preempted,
            StepAbandoned: self._on_step_abandoned,
            StepApplied: self._on_step_applied,
        }

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Ask ``status`` for the gauges whenever somebody reads; before, there are none."""
        self._status = status

    def emit(self, event: Event) -> None:
        """Count an event, if it is one of those that are counted."""
        self._on.get(type(event), ignore)(event)

    def render(self) -> bytes:
        """Return all series as Prometheus' text."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; ``prometheus_client`` calls it at each reading."""
        if self._status is None:
            return
        status = self._status()
        for name, (field, what) in _GAUGES.items():
            family = GaugeMetricFamily(name, what, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), getattr(status, field))
            yield family

    def _on_block_evicted(self, event: BlockEvicted) -> None:
        self._evicted[event.cause].inc()

    def _on_first_token(self, event: FirstToken) -> None:
        self._ttft_s.observe(event.ttft_s)

    def _on_prefix_lookup(self, event: PrefixLookup) -> None:
        if event.after_preemption:  # its own blocks, found again, are no saving
            return
        self._prefix_queries.inc(event.num_tokens)
        self._prefix_hits.inc(event.num_hit_tokens)
        self._prompt_tokens.inc(event.num_tokens)
        self._cached_tokens.inc(event.num_hit_tokens)
        self._by_source["local_cache_hit"].inc(event.num_hit_tokens)

    def _on_request_finished(self, event: RequestFinished) -> None:
        self._finished[event.finish_reason].inc()

    def _on_request_preempted(self, _event: RequestPreempted) -> None:
        self._preemptions.inc()

    def _on_step_abandoned(self, _event: StepAbandoned) -> None:
        self._steps_failed.inc()

    def _on_step_applied(self, event: StepApplied) -> None:
        self._generation_tokens.inc(event.num_output_tokens)
        if event.num_prompt_tokens:
            self._by_source["local_compute"].inc(event.num_prompt_tokens - event.num_recomputed_tokens)
            self._recomputed_tokens.inc(event.num_recomputed_tokens)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, tuple(self._labels), registry=self.registry).labels(**self._labels)

    def _counters(self, name: str, what: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        """Make a series for each value, so that a reader sees zeros and not gaps."""
        counter = Counter(name, what, (*self._labels, label), registry=self.registry)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}
