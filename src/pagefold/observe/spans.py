"""Spans: requests as OpenTelemetry's traces. The one file that knows its library, which is an extra.

Names of attributes are OpenTelemetry's for generative AI (``gen_ai.usage.input_tokens``), beside those that vLLM gives
(``gen_ai.usage.prompt_tokens``, ``gen_ai.latency.time_in_queue``), so that what reads vLLM's traces reads these.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from pagefold.errors import ConfigError

try:
    from opentelemetry import trace as otel
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    _missing: ImportError | None = error
else:
    _missing = None

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

    from pagefold.observe.request_trace import RequestTrace

__all__ = ["Spans", "open_spans"]

_log = logging.getLogger(__name__)

_EXPORT_S = 5
"""A batch that is not taken in this time is lost."""

_CLOSE_S = 2.0
"""So long the end of the server waits for the last batch."""

_DEFAULT_PATH = "/v1/traces"
_NS = 1_000_000_000


def open_spans(endpoint: str, model_name: str, version: str) -> Spans:
    """Return where requests go as spans.

    OpenTelemetry's environment variables hold: ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``,
    ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_...`` and the like.

    Args:
        endpoint: a URL of a collector; one without a path gets the usual one.
        model_name: what clients call the model.
        version: of the server.

    Raises:
        ConfigError: the library is not installed.
    """
    if _missing is not None:
        msg = f"otlp_traces_endpoint is set, and OpenTelemetry is not installed ({_missing.name} is missing)."
        raise ConfigError(msg, remedy='pip install "pagefold[otel]", or leave it out.')
    return Spans(_whole(endpoint), model_name, version)


def _whole(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=_DEFAULT_PATH)) if parts.path in ("", "/") else endpoint


class Spans:
    """Writes requests as spans, which a thread of the library's delivers in batches; what it cannot, it drops.

    Args:
        endpoint: of a collector.
        model_name: what clients call the model.
        version: of the server.
    """

    def __init__(self, endpoint: str, model_name: str, version: str) -> None:
        self._model_name = model_name
        own = Resource({SERVICE_NAME: "pagefold", SERVICE_VERSION: version})
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._provider = TracerProvider(
            resource=Resource.get_empty().merge(own).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pagefold", version)
        self._parents = TraceContextTextMapPropagator()

    def write(self, trace: RequestTrace) -> None:
        """Write a request: one span, and in it one for each of its queue, prefill and decode."""
        offset_s = time.time() - time.monotonic()
        began = _ns(offset_s + trace.arrival_s)
        headers = {} if trace.http is None else dict(trace.http.headers)
        parent = self._parents.extract(headers)
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=otel.SpanKind.SERVER,
            attributes=self._attributes(trace),
            start_time=began,
        )
        for event in trace.events:
            span.add_event(event.name, dict(event.attributes), _ns(offset_s + event.at_s))
        if "error" in trace.finish_reasons or "timeout" in trace.finish_reasons:
            span.set_status(otel.StatusCode.ERROR, ", ".join(sorted(set(trace.finish_reasons))))
        self._write_phases(trace, otel.set_span_in_context(span, parent), offset_s)
        span.end(_ns(offset_s + trace.arrival_s + trace.e2e_s))

    def close(self) -> None:
        """Deliver what was written, for a short while at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="pagefold-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():  # which it may stay: it ends with the process
            _log.warning("the last traces were not delivered in %g s, and are lost", _CLOSE_S)

    def _write_phases(self, trace: RequestTrace, inside: Context, offset_s: float) -> None:
        at_s = offset_s + trace.arrival_s
        for name, seconds in (("queue", trace.queue_s), ("prefill", trace.prefill_s), ("decode", trace.decode_s)):
            if seconds is None:
                return
            phase = self._tracer.start_span(name, context=inside, start_time=_ns(at_s))
            at_s += seconds
            phase.end(_ns(at_s))

    def _attributes(self, trace: RequestTrace) -> dict[str, AttributeValue]:
        told: dict[str, AttributeValue] = {
            "gen_ai.system": "pagefold",
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": trace.request_id,
            "gen_ai.request.n": len(trace.sample_ids),
            "gen_ai.request.max_tokens": trace.num_allowed_tokens,
            "gen_ai.response.finish_reasons": tuple(trace.finish_reasons),
            "gen_ai.usage.num_sequences": len(trace.sample_ids),
            "gen_ai.usage.prompt_tokens": trace.num_prompt_tokens,
            "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": trace.num_output_tokens,
            "gen_ai.usage.output_tokens": trace.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": trace.num_cached_tokens,
            "gen_ai.latency.time_in_queue": trace.queue_s,
            "gen_ai.latency.e2e": trace.e2e_s,
            "pagefold.num_requests_ahead": trace.num_ahead,
            "pagefold.num_preemptions": trace.num_preemptions,
            "pagefold.num_recomputed_tokens": trace.num_recomputed_tokens,
        }
        if trace.http is not None:
            told["gen_ai.response.id"] = trace.http.response_id
            told["http.request.header.x-request-id"] = trace.http.request_id
        if trace.ttft_s is not None:
            told["gen_ai.latency.time_to_first_token"] = trace.ttft_s
        if trace.prefill_s is not None and trace.decode_s is not None:
            told["gen_ai.latency.time_in_model_prefill"] = trace.prefill_s
            told["gen_ai.latency.time_in_model_decode"] = trace.decode_s
            told["gen_ai.latency.time_in_model_inference"] = trace.prefill_s + trace.decode_s
        if trace.num_dropped_events:
            told["pagefold.num_dropped_events"] = trace.num_dropped_events
        for tier, num_tokens in trace.cached_by_tier.items():
            told[f"pagefold.cached_tokens.{tier}"] = num_tokens
        for cause, num_tokens in trace.missed.items():
            told[f"pagefold.missed_tokens.{cause}"] = num_tokens
        return told


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
