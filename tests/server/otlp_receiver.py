"""A receiver of OpenTelemetry's traces over HTTP, in this process; it decodes what comes."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """Keeps the spans that come; those of a path that it was not given are refused."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    receiver._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            self.resources.append(attributes(of_resource.resource))
            for scope in of_resource.scope_spans:
                self.spans += scope.spans

    def roots(self) -> list[Span]:
        """The spans of requests."""
        return [span for span in self.spans if span.name == "llm_request"]

    def inside(self, root: Span) -> list[Span]:
        """The spans in one, the first first."""
        found = [span for span in self.spans if span.parent_span_id == root.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(of: Any) -> dict[str, Any]:
    """What is told of a span, an event or a resource."""
    return {one.key: _plain(one.value) for one in of.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
