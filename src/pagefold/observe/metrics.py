"""Metrics: a subscriber of events that Prometheus reads. Names, labels and buckets are vLLM's where vLLM has them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest

from pagefold.events import (
    BlockEvicted,
    BlocksReused,
    CacheConfigured,
    ChunksPacked,
    DraftsVerified,
    EvictionCause,
    EvictionPolicySwitched,
    FirstToken,
    NextTokens,
    OutputFinished,
    OutputForecastChecked,
    PathSuperseded,
    PinCause,
    PinDropped,
    PreemptionCause,
    PrefixLookup,
    PrefixMissed,
    PromptFinished,
    RefusalReason,
    RequestCorrupted,
    RequestPreempted,
    RequestRefused,
    RequestStreamed,
    SessionClosed,
    StepAbandoned,
    StepApplied,
    StepPlanned,
    SupersedeCause,
    WaitCause,
)
from pagefold.kv import AUTO, POLICIES
from pagefold.observe.gauges import Gauges
from pagefold.observe.misses import Cause
from pagefold.observe.series import SeriesMaker
from pagefold.observe.tier_metrics import TIERS, TierMetrics
from pagefold.request import FinishReason
from pagefold.speculation.params import MAX_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client.metrics_core import Metric

    from pagefold.engine.status import EngineStatus
    from pagefold.events import Event
    from pagefold.memory.cache_size import CacheSize

__all__ = ["Metrics"]

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_REQUEST_TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)
_RESIDENCY_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0),
)

_TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_HIT_TIERS = ("device", "host", *TIERS)

_LENGTHS = ("512", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1m", "+Inf")
"""Names of classes of lengths, each by the most that it has (:func:`pagefold.events.length_class`)."""

_QUEUE_DEPTHS = ((0, "0"), (2, "1-2"), (8, "3-8"), (32, "9-32"), (float("inf"), "33+"))
"""The most of each class of queue depths, and its name."""


class Metrics:
    """Counts what happens and serves it as Prometheus' text.

    A reading falls between two events, never within one: the tokens of prompts are always the sum of their sources.
    Nothing is kept for single requests, and no label takes a value that clients choose, so it never grows.

    ``emit`` is called on the engine's thread while ``render`` runs on another.

    Args:
        model_name: label ``model_name`` of every series, beside ``engine="0"``.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._lock = threading.Lock()
        self._series = SeriesMaker(self.registry, self._labels)
        self._gauges = Gauges(self._labels)
        self._make_counters()
        self._make_histograms()
        self.registry.register(self._gauges)
        ProcessCollector(registry=self.registry)
        self._on: dict[type, Callable[[Any], None]] = {
            BlockEvicted: self._on_block_evicted,
            BlocksReused: self._on_blocks_reused,
            CacheConfigured: self._on_cache_configured,
            ChunksPacked: self._on_chunks_packed,
            DraftsVerified: self._on_drafts_verified,
            EvictionPolicySwitched: self._on_policy_switched,
            FirstToken: self._on_first_token,
            NextTokens: self._on_next_tokens,
            OutputFinished: self._on_output_finished,
            OutputForecastChecked: self._on_forecast_checked,
            PathSuperseded: self._on_path_superseded,
            PinDropped: self._on_pin_dropped,
            PrefixLookup: self._on_prefix_lookup,
            PrefixMissed: self._on_prefix_missed,
            PromptFinished: self._on_prompt_finished,
            RequestCorrupted: self._on_request_corrupted,
            RequestPreempted: self._on_request_preempted,
            RequestRefused: self._on_request_refused,
            RequestStreamed: self._on_request_streamed,
            SessionClosed: self._on_session_closed,
            StepAbandoned: self._on_step_abandoned,
            StepApplied: self._on_step_applied,
            StepPlanned: self._on_step_planned,
            **TierMetrics(self._series).on,
        }

    def watch(self, status: Callable[[], EngineStatus]) -> None:
        """Ask ``status`` for the gauges whenever somebody reads; before, there are none."""
        self._gauges.status = status

    def watch_cache(self, size: Callable[[], CacheSize]) -> None:
        """Ask ``size`` for the gauges of a cache that is not the engine's."""
        self._gauges.caches.append(size)

    def emit(self, event: Event) -> None:
        """Count an event, if it is one of those that are counted."""
        count = self._on.get(type(event))
        if count is not None:
            with self._lock:
                count(event)

    def count_response(self, route: str, status: int) -> None:
        """Count an HTTP response.

        Args:
            route: as the app declares it, such as ``/v1/models/{model_id}``; never what a client sent.
            status: of HTTP.
        """
        with self._lock:
            self._responses.labels(**self._labels, route=route, status=str(status)).inc()

    def read(self) -> list[Metric]:
        """Return all series as they are at this moment."""
        with self._lock:
            return list(self.registry.collect())

    def render(self) -> bytes:
        """Return all series as Prometheus' text."""
        return generate_latest(_Reading(self.read()))

    # What there is.

    def _make_counters(self) -> None:
        self._prefix_queries = self._series.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache, once a request: when it is let in."
        )
        self._prefix_hits = self._series.counter(
            "vllm:prefix_cache_hits",
            "Those of them that were found on the device. What a preempted request finds again of its own is no hit.",
        )
        self._prefix_lost = self._series.counter(
            "pagefold:prefix_cache_lost_windows_tokens",
            "Those of them that are cached in layers that keep all, and were computed once more: of a layer that keeps "
            "the last tokens only, the window is gone that whoever goes on there needs.",
        )
        self._hits_by_tier = self._series.counters(
            "pagefold:prefix_cache_hit_tokens",
            "Prompt tokens that were found at a request's first lookup, by where they were.",
            "tier",
            _HIT_TIERS,
        )
        self._missed = self._series.counters(
            "pagefold:prefix_cache_missed_tokens",
            "Tokens that were not found at a lookup and are computed, by cause: as /v1/explain tells it, to the tenant "
            "alone. Those of cause preempted had been computed before; all others are those of first lookups.",
            "cause",
            [cause.value for cause in Cause],
        )
        self._declined = self._series.counter(
            "pagefold:host_declined_tokens",
            "Tokens that the host's memory held at a request's first lookup, and that were computed since that was "
            "expected to be sooner.",
        )
        self._external_queries = self._series.counter(
            "vllm:external_prefix_cache_queries",
            "Prompt tokens that the device did not have and that were looked up in tiers behind it; 0 without tiers.",
        )
        self._external_hits = self._series.counter(
            "vllm:external_prefix_cache_hits", "Those of them that were loaded from there: the host, a disk, a remote."
        )
        self._prompt_tokens = self._series.counter(
            "vllm:prompt_tokens", "Tokens of prompts, counted when their request gets its first token."
        )
        self._by_source = self._series.counters(
            "vllm:prompt_tokens_by_source",
            "The same tokens by where their KV came from: computed, found on the device, loaded from a tier behind it.",
            "source",
            _TOKEN_SOURCES,
        )
        self._cached_tokens = self._series.counter(
            "vllm:prompt_tokens_cached", "Those of them that need not be computed."
        )
        self._cached_by_source = self._series.counters(
            "vllm:prompt_tokens_cached_by_source",
            "The cached ones by where their KV was: on the device, or in a tier behind it.",
            "source",
            _TOKEN_SOURCES[1:],
        )
        self._copied_tokens = self._series.counter(
            "pagefold:prompt_tokens_copied",
            "Those of the cached ones that lay in a block of which only a part could be used: the block was copied.",
        )
        self._generation_tokens = self._series.counter("vllm:generation_tokens", "Tokens sampled.")
        self._packed_chunks = self._series.counter(
            "pagefold:packed_chunks", "Chunks of tokens of which a share was kept."
        )
        self._granted_blocks = self._series.counter(
            "pagefold:packed_blocks_granted", "Blocks that those chunks filled whole."
        )
        self._kept_blocks = self._series.counter(
            "pagefold:packed_blocks_kept", "Blocks that what was kept of them fills."
        )
        self._drafts = self._series.counter("vllm:spec_decode_num_drafts", "Rows of steps that had drafts.")
        self._draft_tokens = self._series.counter("vllm:spec_decode_num_draft_tokens", "Drafts that were computed.")
        self._accepted_tokens = self._series.counter(
            "vllm:spec_decode_num_accepted_tokens", "Those of them that were what their requests sampled."
        )
        self._accepted_by_position = self._series.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "The same by their position in the row's drafts, from 0.",
            "position",
            [str(position) for position in range(MAX_DRAFTS)],
        )
        self._recomputed_tokens = self._series.counter(
            "pagefold:tokens_recomputed",
            "Tokens computed again after a preemption. (vLLM's prompt_tokens_recomputed is another thing: the last "
            "token of a prompt that was found whole.)",
        )
        self._streamed = self._series.counter(
            "pagefold:requests_streamed", "Times that a request was admitted which is larger than the KV budget."
        )
        self._forecasts = self._series.counters(
            "pagefold:output_forecasts",
            "Outputs that have ended for which an interval had been stated that should hold 8 in 10, by whether it did "
            "(within). Before a tenant's first outputs there is none.",
            "within",
            ("true", "false"),
        )
        self._preemptions = self._series.counter(
            "vllm:num_preemptions", "Times that a running request gave its blocks back."
        )
        self._preemptions_by_cause = self._series.counters(
            "pagefold:preemptions_by_cause",
            "The same by why: for one that ran and needed blocks (memory), or for one that waited, whose tenant had "
            "less than its share.",
            "cause",
            get_args(PreemptionCause),
        )
        self._held_steps = self._series.counters(
            "pagefold:steps_with_waiting",
            "Steps behind which somebody waited, by what who is next waits for, and with it all behind: seats, memory, "
            "growth, prefills, tokens or apart, as /v1/explain tells it; kv_cap where all wait for their "
            "tenants' caps.",
            "cause",
            get_args(WaitCause),
        )
        self._superseded = self._series.counters(
            "pagefold:blocks_superseded",
            "Cached blocks that lost their value: a session edited them away (edited), or it had ended (ended). One "
            "that somebody uses again has it again.",
            "cause",
            get_args(SupersedeCause),
        )
        self._sessions_ended = self._series.counter(
            "pagefold:sessions_ended", "Agents' sessions that clients ended, those of their sub-agents included."
        )
        self._corrupted = self._series.counter(
            "vllm:corrupted_requests",
            "Sequences that ended because what the model computed for them was NaN or infinite; what they had was "
            "dropped from the cache.",
        )
        self._finished = self._series.counters(
            "vllm:request_success",
            "Requests that ended, by why, as their clients were told.",
            "finished_reason",
            get_args(FinishReason),
        )
        self._evicted = self._series.counters(
            "pagefold:blocks_evicted", "Cached blocks dropped, by why.", "cause", get_args(EvictionCause)
        )
        self._switches = self._series.counters(
            "pagefold:eviction_policy_switches",
            "How often auto has begun to follow another eviction policy, by which.",
            "policy",
            [policy for policy in POLICIES if policy != AUTO],
        )
        self._pins_dropped = self._series.counters(
            "pagefold:pins_dropped",
            "Pins that ended, by why; quota counts those that never came to be, and hints that yielded.",
            "cause",
            get_args(PinCause),
        )
        self._steps_failed = self._series.counter(
            "pagefold:steps_failed", "Steps whose results were lost and taken back."
        )
        self._refused = self._series.counters(
            "pagefold:requests_refused",
            "Requests that could have been served and were not taken, by why: ttft_target where the first token would "
            "have come later than --target-ttft-ms allows, token_rate where a tenant had used up its tokens_per_s, "
            "queue_full where more were here than --max-queued-requests lets wait.",
            "reason",
            get_args(RefusalReason),
        )
        self._responses = Counter(
            "pagefold:http_responses",
            "HTTP responses by the labels route, as the API's description has it, and status: 429 is a full "
            "queue, a target that would not be kept, a token rate that is used up, or too many large bodies. "
            "Paths that are no route, and requests that are refused before it is looked up, are of route other.",
            (*self._labels, "route", "status"),
            registry=self.registry,
        )

    def _make_histograms(self) -> None:
        self._ttft_s = self._series.histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival at the engine to its first token.", _TTFT_S
        )
        self._ttft_by_depth_s = self._series.histograms(
            "pagefold:time_to_first_token_by_queue_depth_seconds",
            "The same by how many requests waited already when the request came.",
            _TTFT_S,
            "queue_depth",
            [name for _, name in _QUEUE_DEPTHS],
        )
        self._inter_token_s = self._series.histogram(
            "vllm:inter_token_latency_seconds",
            "From each token of a request to the next, preemptions and failed steps between them included.",
            _INTER_TOKEN_S,
        )
        self._inter_token_by_length_s = self._series.histograms(
            "pagefold:inter_token_latency_by_position_seconds",
            "The same by the token's position in its sequence, the prompt included: each label is the last position of "
            "its class, and the class before ends where it begins.",
            _INTER_TOKEN_S,
            "position",
            _LENGTHS,
        )
        self._time_per_output_token_s = self._series.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean of a request's inter-token latencies; requests of two tokens and more.",
            _INTER_TOKEN_S,
        )
        self._e2e_s = self._series.histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival at the engine to its end.", _REQUEST_S
        )
        self._queue_s = self._series.histogram(
            "vllm:request_queue_time_seconds",
            "From a request's arrival until it is first scheduled; its whole life if it never is. "
            "A preempted request's second wait is no part of it.",
            _REQUEST_S,
        )
        self._prefill_s = self._series.histogram(
            "vllm:request_prefill_time_seconds",
            "From a request's first schedule to its first token; requests that got one.",
            _REQUEST_S,
        )
        self._decode_s = self._series.histogram(
            "vllm:request_decode_time_seconds",
            "From a request's first token to its last; requests that got one.",
            _REQUEST_S,
        )
        self._inference_s = self._series.histogram(
            "vllm:request_inference_time_seconds", "Prefill and decode time together.", _REQUEST_S
        )
        self._request_prompt_tokens = self._series.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of each request that ended.", _REQUEST_TOKENS
        )
        self._request_generation_tokens = self._series.histogram(
            "vllm:request_generation_tokens", "Output tokens of each request that ended.", _REQUEST_TOKENS
        )
        self._request_choices = self._series.histogram(
            "vllm:request_params_n", "Choices that each request asked for: n.", _CHOICES
        )
        self._request_longest_tokens = self._series.histogram(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest sample of each request, once all have ended.",
            _REQUEST_TOKENS,
        )
        self._request_allowed_tokens = self._series.histogram(
            "vllm:request_params_max_tokens",
            "Output tokens that each sample that ended might have had: max_tokens, or what the context leaves.",
            _REQUEST_TOKENS,
        )
        self._request_preemptions = self._series.histogram(
            "vllm:request_num_preemptions", "Times that each sample that ended gave its blocks back.", _PREEMPTIONS
        )
        self._block_lifetime_s = self._series.histogram(
            "vllm:kv_block_lifetime_seconds",
            "From when a block was published to when another sequence got its memory. Of all blocks, not of a sample.",
            _RESIDENCY_S,
        )
        self._block_idle_s = self._series.histogram(
            "vllm:kv_block_idle_before_evict_seconds",
            "From when a block was last used (published, found, or let go) to when another sequence got its memory.",
            _RESIDENCY_S,
        )
        self._block_gap_s = self._series.histogram(
            "vllm:kv_block_reuse_gap_seconds",
            "From when a block was last used (published, found, or let go) to when a request found it, for every find.",
            _RESIDENCY_S,
        )
        self._prefill_computed_tokens = self._series.histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens of each request that were computed and not found; requests that got a token.",
            _REQUEST_TOKENS,
        )
        self._step_tokens = self._series.histogram(
            "vllm:iteration_tokens_total", "Tokens that each step computed, of prompts and outputs.", _STEP_TOKENS
        )

    # What happens.

    def _on_block_evicted(self, event: BlockEvicted) -> None:
        self._evicted[event.cause].inc()
        if event.cause == "allocation":  # only then was memory short
            self._block_lifetime_s.observe(event.lifetime_s)
            self._block_idle_s.observe(event.idle_s)

    def _on_blocks_reused(self, event: BlocksReused) -> None:
        for gap_s, num in event.gaps.items():
            self._block_gap_s.observe(gap_s, num)

    def _on_cache_configured(self, event: CacheConfigured) -> None:
        self._gauges.settings = event.settings

    def _on_policy_switched(self, event: EvictionPolicySwitched) -> None:
        if event.before:
            self._switches[event.policy].inc()

    def _on_prefix_lookup(self, event: PrefixLookup) -> None:
        if event.after_preemption:  # its own blocks, found again, are no saving
            return
        self._prefix_queries.inc(event.num_tokens)
        num_on_device = event.num_hit_tokens - event.num_loaded_tokens
        self._prefix_hits.inc(num_on_device)
        self._prefix_lost.inc(event.num_lost_tokens)
        self._declined.inc(event.num_declined_tokens)
        self._hits_by_tier["device"].inc(num_on_device)
        for tier, num_tokens in event.loaded_by_tier.items():
            self._hits_by_tier[tier].inc(num_tokens)
        if event.has_tiers:
            self._external_queries.inc(event.num_tokens - num_on_device)
            self._external_hits.inc(event.num_loaded_tokens)

    def _on_prefix_missed(self, event: PrefixMissed) -> None:
        for cause, num_tokens in event.num_tokens.items():
            self._missed[cause].inc(num_tokens)

    def _on_chunks_packed(self, event: ChunksPacked) -> None:
        self._packed_chunks.inc(event.num_chunks)
        self._granted_blocks.inc(event.num_granted_blocks)
        self._kept_blocks.inc(event.num_kept_blocks)

    def _on_drafts_verified(self, event: DraftsVerified) -> None:
        for _, num_drafts, num_accepted in event.counts:
            self._drafts.inc()
            self._draft_tokens.inc(num_drafts)
            self._accepted_tokens.inc(num_accepted or 0)
            for position in range(num_accepted or 0):
                self._accepted_by_position[str(position)].inc()

    def _on_first_token(self, event: FirstToken) -> None:
        if not event.is_warm_up:
            self._ttft_s.observe(event.ttft_s)
            depth = next(name for most, name in _QUEUE_DEPTHS if event.num_ahead <= most)
            self._ttft_by_depth_s[depth].observe(event.ttft_s)
        self._prompt_tokens.inc(event.num_prompt_tokens)
        self._by_source["local_compute"].inc(event.num_prompt_tokens - event.num_cached_tokens)
        self._by_source["local_cache_hit"].inc(event.num_cached_tokens - event.num_loaded_tokens)
        self._by_source["external_kv_transfer"].inc(event.num_loaded_tokens)
        self._cached_by_source["local_cache_hit"].inc(event.num_cached_tokens - event.num_loaded_tokens)
        self._cached_by_source["external_kv_transfer"].inc(event.num_loaded_tokens)
        self._cached_tokens.inc(event.num_cached_tokens)
        self._copied_tokens.inc(event.num_copied_tokens)

    def _on_next_tokens(self, event: NextTokens) -> None:
        for gap_s, num in event.gaps.items():
            self._inter_token_s.observe(gap_s, num)
        for length, gaps in event.by_length.items():
            histogram = self._inter_token_by_length_s[_LENGTHS[min(length, len(_LENGTHS) - 1)]]
            for gap_s, num in gaps.items():
                histogram.observe(gap_s, num)

    def _on_output_finished(self, event: OutputFinished) -> None:
        if event.is_warm_up:  # its tokens count as others do, but it is no client's request
            return
        self._finished[event.finish_reason].inc()
        self._e2e_s.observe(event.e2e_s)
        self._queue_s.observe(event.queue_s)
        self._request_prompt_tokens.observe(event.num_prompt_tokens)
        self._request_generation_tokens.observe(event.num_output_tokens)
        self._request_allowed_tokens.observe(event.num_allowed_tokens)
        self._request_preemptions.observe(event.num_preemptions)
        if event.prefill_s is None or event.decode_s is None:
            return
        self._prefill_s.observe(event.prefill_s)
        self._decode_s.observe(event.decode_s)
        self._inference_s.observe(event.prefill_s + event.decode_s)
        self._prefill_computed_tokens.observe(event.num_prompt_tokens - event.num_cached_tokens)
        if event.num_output_tokens > 1:
            self._time_per_output_token_s.observe(event.decode_s / (event.num_output_tokens - 1))

    def _on_prompt_finished(self, event: PromptFinished) -> None:
        self._request_choices.observe(event.num_choices)
        self._request_longest_tokens.observe(event.num_longest_tokens)

    def _on_path_superseded(self, event: PathSuperseded) -> None:
        self._superseded[event.cause].inc(event.num_blocks)

    def _on_session_closed(self, event: SessionClosed) -> None:
        self._sessions_ended.inc(event.num_sessions)

    def _on_step_planned(self, event: StepPlanned) -> None:
        if event.waits_for is not None:
            self._held_steps[event.waits_for].inc()

    def _on_pin_dropped(self, event: PinDropped) -> None:
        self._pins_dropped[event.cause].inc()

    def _on_forecast_checked(self, event: OutputForecastChecked) -> None:
        self._forecasts["true" if event.is_within else "false"].inc()

    def _on_request_streamed(self, _event: RequestStreamed) -> None:
        self._streamed.inc()

    def _on_request_corrupted(self, _event: RequestCorrupted) -> None:
        self._corrupted.inc()

    def _on_request_preempted(self, event: RequestPreempted) -> None:
        self._preemptions.inc()
        self._preemptions_by_cause[event.cause].inc()

    def _on_request_refused(self, event: RequestRefused) -> None:
        self._refused[event.reason].inc()

    def _on_step_abandoned(self, _event: StepAbandoned) -> None:
        self._steps_failed.inc()

    def _on_step_applied(self, event: StepApplied) -> None:
        self._step_tokens.observe(event.num_tokens)
        self._generation_tokens.inc(event.num_output_tokens)
        if event.num_recomputed_tokens:
            self._recomputed_tokens.inc(event.num_recomputed_tokens)


class _Reading:
    """Series that have been read, as ``prometheus_client`` wants to be given them."""

    def __init__(self, series: list[Metric]) -> None:
        self._series = series

    def collect(self) -> list[Metric]:
        return self._series
