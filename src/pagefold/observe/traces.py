"""Traces: a subscriber of events that notes what happens to each request, until it and its HTTP request have ended.

Then the request is written as spans (``spans.py``). On the engine's thread no more is done than to note numbers.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from pagefold.events import (
    FetchEnded,
    FirstToken,
    OutputFinished,
    PrefixLookup,
    PrefixMissed,
    RequestAdded,
    RequestCorrupted,
    RequestPreempted,
)
from pagefold.observe.request_trace import RequestTrace, TraceEvent
from pagefold.observe.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.observe.request_trace import HttpEnd, TraceValue

__all__ = ["SpanSink", "Traces"]

_log = logging.getLogger(__name__)

_MOST_EVENTS = 64
"""Of one request. A request that is preempted more often says no more by it."""

_MOST_WAITING = 4096
"""Requests that have ended and whose HTTP request has not; those that ended first are given up."""

_MOST_EARLY = 256
"""Ends of HTTP requests whose requests have not come yet. Some never come; others do within a step."""


class SpanSink(Protocol):
    """Where requests go that have ended."""

    def write(self, trace: RequestTrace) -> None:
        """Write a request, and return soon."""

    def close(self) -> None:
        """Deliver what was written, for a short while at most."""


class Traces(Subscriber):
    """Notes what happens to requests. What warms the cache has no trace.

    Events come on the engine's thread, ends of HTTP requests on another.

    Args:
        sink: where requests go when both they and their HTTP requests have ended.
        clock: seconds, the engine's.
    """

    def __init__(self, sink: SpanSink, clock: Callable[[], float] = time.monotonic) -> None:
        on: dict[type, Callable[[Any], None]] = {
            FetchEnded: self._on_fetch_ended,
            FirstToken: self._on_first_token,
            OutputFinished: self._on_output_finished,
            PrefixLookup: self._on_prefix_lookup,
            PrefixMissed: self._on_prefix_missed,
            RequestAdded: self._on_request_added,
            RequestCorrupted: self._on_request_corrupted,
            RequestPreempted: self._on_request_preempted,
        }
        super().__init__(on, _log, "traces have failed at %s: later requests have none")
        self._sink = sink
        self._clock = clock
        self._live: dict[str, RequestTrace] = {}  # by the ids of all samples
        self._waiting: OrderedDict[str, RequestTrace] = OrderedDict()  # those that have ended
        self._writer = ThreadPoolExecutor(1, "pagefold-spans")  # its thread starts when it is needed
        self._is_closed = False
        self._num_handed = 0  # to it, that are not written yet
        self._early: OrderedDict[str, HttpEnd] = OrderedDict()  # of requests that have not come, by their ids

    def end_http(self, request_ids: Sequence[str], end: HttpEnd) -> None:
        """An HTTP request has ended that had these requests: write those that have ended too, and the others then.

        A client may be gone before the engine's thread has told that the request has come.
        """
        with self._lock:
            popped = [self._waiting.pop(request_id, None) for request_id in request_ids]
            ended = [trace for trace in popped if trace is not None]
            known = {sample_id for trace in ended for sample_id in trace.sample_ids}
            for request_id in request_ids:
                live = self._live.get(request_id)
                if live is not None:
                    live.http = end
                elif request_id not in known:
                    self._early[request_id] = end
            while len(self._early) > _MOST_EARLY:
                self._early.popitem(last=False)
        for trace in ended:
            trace.http = end
            self._write(trace)

    def close(self) -> None:
        """Deliver what was written. What ends later has no trace."""
        with self._lock:
            self._is_closed = True
        self._writer.shutdown()
        self._sink.close()

    def __len__(self) -> int:
        """How many requests are noted that are not written yet."""
        with self._lock:
            return len({id(trace) for trace in self._live.values()}) + len(self._waiting) + self._num_handed

    def _write(self, trace: RequestTrace) -> None:
        try:
            self._sink.write(trace)
        except Exception:  # noqa: BLE001 - as above
            self.has_failed = True
            _log.exception("traces have failed: later requests have none", extra={"request_id": trace.request_id})

    def _write_handed(self, trace: RequestTrace) -> None:
        self._write(trace)
        with self._lock:
            self._num_handed -= 1

    def _tell(self, trace: RequestTrace, name: str, **attributes: TraceValue) -> None:
        if len(trace.events) < _MOST_EVENTS:
            trace.events.append(TraceEvent(name, self._clock(), attributes))
        else:
            trace.num_dropped_events += 1

    def _forget(self, trace: RequestTrace) -> None:
        for request_id in trace.sample_ids:
            self._live.pop(request_id, None)

    def _on_request_added(self, event: RequestAdded) -> None:
        trace = RequestTrace(event.sample_ids, event.num_prompt_tokens, event.arrival_s)
        for request_id in event.sample_ids:
            self._live[request_id] = trace
            trace.http = self._early.pop(request_id, trace.http)

    def _on_prefix_lookup(self, event: PrefixLookup) -> None:
        trace = self._live.get(event.request_id)
        if trace is None:
            return
        if event.after_preemption:
            self._tell(trace, "resumed", num_tokens=event.num_tokens, num_found_tokens=event.num_hit_tokens)
        else:
            trace.cached_by_tier = event.loaded_by_tier

    def _on_prefix_missed(self, event: PrefixMissed) -> None:
        trace = self._live.get(event.request_id)
        if trace is None:
            return
        num_again = event.num_tokens.get("preempted")
        if num_again is None:
            trace.missed = event.num_tokens
        else:
            trace.num_recomputed_tokens += num_again

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        trace = self._live.get(event.request_id)
        if trace is not None:
            self._tell(trace, "fetch", outcome=event.outcome, num_tokens=event.num_tokens, waited_s=event.waited_s)

    def _on_request_preempted(self, event: RequestPreempted) -> None:
        trace = self._live.get(event.request_id)
        if trace is not None:
            self._tell(
                trace, "preempted", num_computed_tokens=event.num_computed_tokens, for_request=event.cause_request_id
            )

    def _on_request_corrupted(self, event: RequestCorrupted) -> None:
        trace = self._live.get(event.request_id)
        if trace is not None:
            self._tell(trace, "corrupted")

    def _on_first_token(self, event: FirstToken) -> None:
        trace = self._live.get(event.request_id)
        if trace is not None:
            trace.ttft_s = event.ttft_s
            trace.num_cached_tokens = event.num_cached_tokens
            trace.num_ahead = event.num_ahead

    def _on_output_finished(self, event: OutputFinished) -> None:
        trace = self._live.get(event.request_id)
        if trace is None:
            return
        if event.is_warm_up:  # nobody waited for it
            self._forget(trace)
            return
        trace.finish_reasons.append(event.finish_reason)
        trace.num_output_tokens += event.num_output_tokens
        trace.num_preemptions += event.num_preemptions
        trace.e2e_s = max(trace.e2e_s, event.e2e_s)
        if event.request_id == trace.request_id:
            trace.queue_s, trace.prefill_s, trace.decode_s = event.queue_s, event.prefill_s, event.decode_s
            trace.num_allowed_tokens = event.num_allowed_tokens
        if len(trace.finish_reasons) == len(trace.sample_ids):
            self._end(trace)

    def _end(self, trace: RequestTrace) -> None:
        """All samples of a request have ended."""
        self._forget(trace)
        if self._is_closed:
            return
        if trace.http is not None:  # making spans takes a third of a millisecond, which the engine's thread has not
            if self._num_handed < _MOST_WAITING:
                self._num_handed += 1
                self._writer.submit(self._write_handed, trace)
            return
        self._waiting[trace.request_id] = trace
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem(last=False)
