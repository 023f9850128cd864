"""Framing: where requests and their bodies begin and end on a connection, as h11 finds it, with bounds."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import h11

__all__ = ["MAX_HEAD_BYTES", "Framing"]

MAX_HEAD_BYTES = 16 * 2**10
_MAX_CHUNKS = 1024
_MIN_CHUNK_BYTES = 32


class Framing(h11.Connection):
    """h11's side of a connection. It bounds heads, and refuses bodies that come in crumbs."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._num_chunks = 0
        self._num_chunk_bytes = 0

    def next_event(self) -> Any:  # noqa: ANN401 - h11's own
        """See :class:`h11.Connection`.

        Raises:
            RemoteProtocolError: what came is no HTTP, or a head that came at once is too large, or a body comes in
                crumbs, each of which costs some microseconds.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            if _head_bytes(event) > MAX_HEAD_BYTES:  # h11 looks only at heads that are not there whole
                msg = "the head is too large"
                raise h11.RemoteProtocolError(msg, error_status_hint=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            self._num_chunks = self._num_chunk_bytes = 0
            return _of_one_length(event)
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_chunk_bytes += len(event.data)
            if self._num_chunks > _MAX_CHUNKS + self._num_chunk_bytes // _MIN_CHUNK_BYTES:
                msg = f"the body comes in more than {_MAX_CHUNKS} chunks of less than {_MIN_CHUNK_BYTES} bytes"
                raise h11.RemoteProtocolError(msg)
        return event


def _head_bytes(request: h11.Request) -> int:
    """Return how many bytes the head of a request has, without what HTTP puts between."""
    return len(request.method) + len(request.target) + sum(len(name) + len(value) for name, value in request.headers)


def _of_one_length(request: h11.Request) -> h11.Request:
    """Return a request with both a length and chunks without its length, and as the last of its connection.

    Whoever passed it on may have believed in the length, and then what follows is somebody else's (RFC 9112, 6.3).
    """
    names = {name for name, _ in request.headers}
    if not {b"content-length", b"transfer-encoding"} <= names:
        return request
    headers = [header for header in request.headers if header[0] not in (b"content-length", b"connection")]
    headers.append((b"connection", b"close"))
    return h11.Request(method=request.method, target=request.target, headers=headers, http_version=request.http_version)
