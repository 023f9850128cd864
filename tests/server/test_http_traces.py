"""Traces of requests, as a real receiver of OpenTelemetry's protocol gets them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from local_server import PATIENCE_S, LocalServer, ProcessServer, free_port, until
from otlp_receiver import Receiver, attributes

from pagefold.config import ServerConfig
from pagefold.errors import ConfigError
from pagefold.observe.spans import open_spans
from pagefold.observe.traces import Traces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"
PROMPT = list(range(700, 750))
GREEDY = {"temperature": 0, "ignore_eos": True}


class Traced:
    """A server, and who gets its traces."""

    def __init__(self, folder: Path, **settings) -> None:
        self.receiver = Receiver()
        self.traces = Traces(open_spans(self.receiver.url, "tiny", "1"))
        self.server = LocalServer(folder, traces=self.traces, **settings)

    def ask(self, prompt, headers=None, **fields):
        body = {"prompt": prompt, **GREEDY, **fields}
        return self.server.http.post("/v1/completions", json=body, headers=headers or {})

    def delivered(self):
        """All traces, once the server has ended."""
        until(lambda: not len(self.traces), "requests to end")
        self.server.close()
        self.traces._writer.shutdown()
        # Closing waits for a short while only, which a busy machine may need for the export alone.
        assert self.traces._sink._provider.force_flush(PATIENCE_S * 1000)
        self.close()
        return self.receiver

    def close(self) -> None:
        self.server.close()
        self.traces.close()
        self.receiver.close()


@pytest.fixture
def traced(tiny_chat_model) -> Iterator[Traced]:
    house = Traced(tiny_chat_model, kv_cache_memory_bytes=2**22, max_num_seqs=16, door={"admin_api_key": "admin"})
    yield house
    house.close()


def test_a_request_is_a_span_with_its_phases(traced):
    before = time.time_ns()
    first = traced.ask(PROMPT, max_tokens=4).json()
    second = traced.ask(PROMPT, {"traceparent": PARENT, "X-Request-Id": "mine"}, max_tokens=4).json()
    after = time.time_ns()
    receiver = traced.delivered()
    assert receiver.resources[0]["service.name"] == "pagefold"
    roots = {attributes(span)["gen_ai.response.id"]: span for span in receiver.roots()}
    assert set(roots) == {first["id"], second["id"]}
    span = roots[second["id"]]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert not roots[first["id"]].parent_span_id
    told = attributes(span)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert told["http.request.header.x-request-id"] == "mine"
    assert told["gen_ai.request.id"] == f"{second['id']}-0"
    assert told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.usage.input_tokens"] == told["gen_ai.usage.prompt_tokens"] == 50
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.usage.completion_tokens"] == 4
    assert told["gen_ai.usage.cache_read.input_tokens"] == cached
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes(roots[first["id"]])["pagefold.missed_tokens.never_seen"] == 50
    missed = {name: num for name, num in told.items() if name.startswith("pagefold.missed_tokens.")}
    assert sum(missed.values()) == 50 - cached
    assert told["gen_ai.latency.e2e"] >= told["gen_ai.latency.time_to_first_token"] > 0
    phases = receiver.inside(span)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert before <= span.start_time_unix_nano == phases[0].start_time_unix_nano
    for phase, following in pairwise(phases):
        assert phase.end_time_unix_nano == following.start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= span.end_time_unix_nano + 1000
    assert span.end_time_unix_nano <= after
    told_s = (phases[-1].end_time_unix_nano - phases[-1].start_time_unix_nano) / 1e9
    assert told_s == pytest.approx(told["gen_ai.latency.time_in_model_decode"], abs=1e-5)


def test_no_text_and_no_token_is_told(traced):
    traced.server.complete("a very secret prompt", max_tokens=3, **GREEDY)
    receiver = traced.delivered()
    assert receiver.spans
    for span in receiver.spans:
        assert "secret" not in str(span)


def test_who_is_not_sampled_by_his_caller_is_not_traced(traced):
    traced.ask(PROMPT, {"traceparent": UNSAMPLED}, max_tokens=1)
    traced.ask(PROMPT, {"traceparent": "00-nonsense"}, max_tokens=1)
    (span,) = traced.delivered().roots()
    assert not span.parent_span_id
    assert span.trace_id.hex() != TRACE_ID


def test_all_samples_are_one_span_and_all_prompts_one_trace(traced):
    traced.ask([PROMPT, PROMPT[::-1]], {"traceparent": PARENT}, max_tokens=5, n=2, temperature=1)
    roots = traced.delivered().roots()
    assert sorted(attributes(span)["gen_ai.request.id"][-2:] for span in roots) == ["-0", "-1"]
    for span in roots:
        assert span.trace_id.hex() == TRACE_ID
        assert attributes(span)["gen_ai.request.n"] == 2
        assert attributes(span)["gen_ai.usage.output_tokens"] == 10
        assert attributes(span)["gen_ai.response.finish_reasons"] == ["length"] * 2


def test_beams_are_one_span(traced):
    answer = traced.ask(PROMPT, max_tokens=5, n=2, use_beam_search=True)
    assert len(answer.json()["choices"]) == 2, answer.text
    (span,) = traced.delivered().roots()
    assert attributes(span)["gen_ai.response.id"] == answer.json()["id"]


def test_warming_up_and_refusals_have_no_trace(traced):
    key = {"Authorization": "Bearer admin"}
    traced.server.http.post("/v1/cache/warm", json={"prompt": PROMPT}, headers=key).raise_for_status()
    assert traced.ask(PROMPT, max_tokens=-1).status_code == 400
    traced.ask(PROMPT, max_tokens=1)
    (span,) = traced.delivered().roots()
    assert attributes(span)["gen_ai.usage.cache_read.input_tokens"] > 0


def test_a_client_that_vanishes_leaves_a_whole_trace(traced):
    """Here the HTTP request ends first, and the engine's later; its thread writes no spans."""
    writers = []
    sink = traced.traces._sink
    write = sink.write
    sink.write = lambda trace: (writers.append(threading.current_thread().name), write(trace))
    traced.server.runner.close_gate()
    with traced.server.post_raw("/v1/completions", {"prompt": PROMPT, "max_tokens": 50, "stream": True, **GREEDY}):
        traced.server.runner.wait_in_step()
    until(lambda: all(trace.http for trace in traced.traces._live.values()), "the server to see that he is gone")
    traced.server.runner.allow()
    (span,) = traced.delivered().roots()
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["abort"]
    assert writers == ["pagefold-spans_0"]


def test_a_client_that_vanishes_before_the_engine_has_his_request_leaves_a_trace(traced):
    """The engine is in a step meanwhile: it hears of the request only afterwards."""
    traced.server.runner.close_gate()
    body = {"prompt": PROMPT, "max_tokens": 50, "stream": True, **GREEDY}
    with traced.server.post_raw("/v1/completions", body):
        traced.server.runner.wait_in_step()
        with traced.server.post_raw("/v1/completions", body):
            until(lambda: traced.server.client._queue.num_requests == 2, "his request to be handed over")
        until(lambda: traced.traces._early, "the server to see that he is gone")
    traced.server.runner.allow()
    until(lambda: not traced.traces._early, "the engine to hear of it")
    roots = traced.delivered().roots()
    assert [attributes(span)["gen_ai.response.finish_reasons"] for span in roots] == [["abort"], ["abort"]]
    assert all("gen_ai.response.id" in attributes(span) for span in roots)


def test_what_ends_after_the_traces_are_closed_is_no_failure(traced):
    """A second signal ends a server while its engine is still in a step."""
    traced.server.runner.close_gate()
    with traced.server.post_raw("/v1/completions", {"prompt": PROMPT, "max_tokens": 50, "stream": True, **GREEDY}):
        traced.server.runner.wait_in_step()
    until(lambda: all(trace.http for trace in traced.traces._live.values()), "the server to see that he is gone")
    traced.traces.close()
    traced.server.runner.allow()
    until(lambda: not len(traced.traces), "the request to end")
    assert not traced.traces.has_failed
    assert traced.receiver.roots() == []


def test_preemptions_are_events(tiny_chat_model):
    house = Traced(
        tiny_chat_model, kv_cache_memory_bytes=16 * 2**13, max_model_len=192, max_num_seqs=4, admission="prompt"
    )
    with contextlib.closing(house):
        house.ask([[index] * 60 for index in range(4)], max_tokens=60)
        assert house.server.metric("vllm:num_preemptions_total") > 0
        receiver = house.delivered()
    roots = receiver.roots()
    assert len(roots) == 4
    events = [event for span in roots for event in span.events]
    preempted = [attributes(event) for event in events if event.name == "preempted"]
    assert len(preempted) == sum(attributes(span)["pagefold.num_preemptions"] for span in roots)
    assert all(one["num_computed_tokens"] > 0 for one in preempted)
    assert sum(event.name == "resumed" for event in events) == len(preempted)
    for span in roots:
        for event in span.events:
            assert span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("answers", [False, True], ids=["refused", "never answered"])
def test_an_endpoint_that_is_down_holds_nobody_up(tiny_chat_model, answers):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1] if answers else free_port()
        traces = Traces(open_spans(f"http://127.0.0.1:{port}/v1/traces", "tiny", "1"))
        server = LocalServer(tiny_chat_model, traces=traces, kv_cache_memory_bytes=2**22)
        for _ in range(3):
            assert server.complete(PROMPT, max_tokens=2, **GREEDY)["usage"]["completion_tokens"] == 2
        until(lambda: not len(traces), "requests to end")
        server.close()
        traces.close()  # a test that hangs here fails by its timeout


@pytest.mark.long
def test_a_server_of_its_own_delivers_its_last_traces(tiny_chat_model):
    with contextlib.closing(Receiver()) as receiver:
        server = ProcessServer(str(tiny_chat_model), "--otlp-traces-endpoint", receiver.url)
        try:
            server.complete(PROMPT, max_tokens=2, **GREEDY)
            server.process.terminate()
            assert server.process.wait(60) == 0, server.output()
        finally:
            server.close()
        assert len(receiver.roots()) == 1


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        ServerConfig(otlp_traces_endpoint=endpoint)


def test_without_the_library_the_error_says_what_to_install():
    code = """
import sys
sys.modules["opentelemetry"] = None
from pagefold.errors import ConfigError
from pagefold.observe.spans import open_spans
try:
    open_spans("http://localhost:4318", "m", "1")
except ConfigError as error:
    assert "pagefold[otel]" in error.remedy, error
    assert "OpenTelemetry is not installed" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_flag_nobody_loads_the_library():
    code = "import sys, pagefold.observe.traces, pagefold.server.app; assert 'opentelemetry.sdk' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
