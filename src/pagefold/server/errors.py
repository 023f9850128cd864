"""Errors as OpenAI writes them, ``{"error": {"message", "type", "param", "code"}}``: one table from type to form."""

from __future__ import annotations

import asyncio
import logging
import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from pagefold.errors import (
    AdapterError,
    AdapterNotFoundError,
    EngineStoppedError,
    InvalidRequestError,
    LoadShedError,
    ModelNotFoundError,
    PagefoldError,
    PinQuotaError,
    QueueFullError,
    RateLimitError,
    RequestTimeoutError,
    StepFailedError,
    TierError,
)
from pagefold.observe.logs import current_request_id
from pagefold.server.disconnect import CLIENT_CLOSED_REQUEST, ClientGoneError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI, Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = [
    "ContextLengthError",
    "ExplainOffError",
    "ExplanationNotFoundError",
    "NoCurveError",
    "PreviousResponseError",
    "ResponseNotFoundError",
    "SessionNotFoundError",
    "Shown",
    "UnknownModelError",
    "add_error_handlers",
    "error_body",
    "error_response",
    "error_status",
]

_log = logging.getLogger(__name__)

_NUM_SHOWN_CHARACTERS = 60
_NUM_PATH_CHARACTERS = 200


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than ``max_model_len``."""


class UnknownModelError(ModelNotFoundError):
    """A request names a model that this server does not have."""

    param = "model"


class ResponseNotFoundError(PagefoldError):
    """There is no such stored response for who asks."""


class ExplanationNotFoundError(PagefoldError):
    """No request of that id is remembered for who asks."""


class ExplainOffError(PagefoldError):
    """This server does not remember why."""


class SessionNotFoundError(PagefoldError):
    """There is no such session of who asks, or it has ended."""


class NoCurveError(PagefoldError):
    """There is nothing of which a curve could be made."""


class PreviousResponseError(InvalidRequestError):
    """A request goes on from a response that is not stored for who asks."""


class Shown(str):
    """A value that a client sent, as an error shows it: cut short, so that it can be recognized."""

    __slots__ = ()

    @classmethod
    def of(cls, value: object) -> Shown:
        """Return how ``value`` is shown; what is shown already stays so."""
        if isinstance(value, Shown):
            return value
        shown = reprlib.repr(value)
        return cls(shown if len(shown) <= _NUM_SHOWN_CHARACTERS else shown[: _NUM_SHOWN_CHARACTERS - 3] + "...")


class _Form(NamedTuple):
    status: int
    type: str
    code: str | None


_FORMS: dict[type[Exception], _Form] = {
    ContextLengthError: _Form(400, "invalid_request_error", "context_length_exceeded"),
    PreviousResponseError: _Form(400, "invalid_request_error", "previous_response_not_found"),
    InvalidRequestError: _Form(400, "invalid_request_error", None),
    AdapterNotFoundError: _Form(404, "invalid_request_error", "adapter_not_found"),
    AdapterError: _Form(400, "invalid_request_error", "adapter_refused"),
    UnknownModelError: _Form(404, "invalid_request_error", "model_not_found"),
    ResponseNotFoundError: _Form(404, "invalid_request_error", "response_not_found"),
    ExplainOffError: _Form(404, "invalid_request_error", "explain_off"),
    ExplanationNotFoundError: _Form(404, "invalid_request_error", "request_not_found"),
    SessionNotFoundError: _Form(404, "invalid_request_error", "session_not_found"),
    NoCurveError: _Form(404, "invalid_request_error", "no_curve"),
    EngineStoppedError: _Form(503, "service_unavailable_error", "engine_unavailable"),
    PinQuotaError: _Form(409, "invalid_request_error", "pin_quota_exceeded"),
    LoadShedError: _Form(429, "rate_limit_error", "ttft_target"),
    QueueFullError: _Form(429, "rate_limit_error", "queue_full"),
    RateLimitError: _Form(429, "rate_limit_error", "rate_limit_exceeded"),
    RequestTimeoutError: _Form(504, "timeout_error", "request_timeout"),
    TierError: _Form(502, "service_unavailable_error", "tier_failed"),
    StepFailedError: _Form(500, "server_error", "step_failed"),
    Exception: _Form(500, "server_error", "internal_error"),
}
"""An error's form is that of its nearest ancestor."""

_HTTP_CODES = {
    401: "invalid_api_key",
    403: "no_admin_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "too_many_bodies",
    431: "head_too_large",
    503: "too_many_connections",
}

_KINDS = {429: "rate_limit_error", 503: "service_unavailable_error"}

_INTERNAL = "The server met an error of its own; its log tells more"


def is_tag(part: object) -> bool:
    """Whether a part of an error's place only says which of several forms a value has: such tags look ``<so>``."""
    return isinstance(part, str) and part.startswith("<")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every failure in OpenAI's form, those of the framework included."""
    app.add_middleware(_LastResort)
    app.add_exception_handler(PagefoldError, _on_error)
    app.add_exception_handler(ClientGoneError, _on_gone)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


class _LastResort:
    """ASGI middleware: a 500 for what nobody foresaw.

    Starlette's own place for this raises the error again, and uvicorn then closes a connection whose client has got its
    answer and may have sent the next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # uvicorn ends at a signal what still reads its body
            if has_started or scope["type"] != "http":
                raise
            error = EngineStoppedError("The server is shutting down.", remedy="Try another replica, or again later.")
            await JSONResponse(error_body(error), _form(error).status)(scope, receive, send)
        except Exception as error:
            if has_started or scope["type"] != "http":
                raise
            await JSONResponse(error_body(error), _form(error).status)(scope, receive, send)


def error_body(error: Exception) -> dict[str, Any]:
    """Return ``error`` in OpenAI's form. What is no user's business is told to the log only."""
    form = _form(error)
    if isinstance(error, PagefoldError):
        message = str(error)
    else:
        request_id = current_request_id.get()
        message = f"{_INTERNAL}." if request_id is None else f"{_INTERNAL}, of request {request_id}."
        _log.error("a request failed", exc_info=error)
    return _body(message, form.type, getattr(error, "param", None), form.code)


def error_status(error: Exception) -> int:
    """Return the status that ``error`` is answered with."""
    return _form(error).status


def error_response(
    status: int, message: str, *, headers: Mapping[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    """Return an HTTP error that is none of our types, such as an unknown route; ``code`` if it is not its status's."""
    kind = _KINDS.get(status) or ("server_error" if status >= 500 else "invalid_request_error")  # noqa: PLR2004 - HTTP's
    return JSONResponse(_body(message, kind, None, code or _HTTP_CODES.get(status)), status, headers)


def _form(error: Exception) -> _Form:
    return next(_FORMS[ancestor] for ancestor in type(error).__mro__ if ancestor in _FORMS)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    message, param = _text(message), None if param is None else _text(param)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _text(text: str) -> str:
    """Return what can be sent: JSON may name half of a surrogate pair, and an error may repeat it."""
    return text.encode(errors="backslashreplace").decode()


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, LoadShedError):  # for the log
        told = {"refused_for": error.reason, "expected_ttft_s": error.expected_s, "most_ttft_s": error.threshold_s}
        request.scope.setdefault("state", {})["refusal"] = told
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, QueueFullError | RateLimitError) else None
    return JSONResponse(error_body(error), _form(error).status, headers)


async def _on_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:  # noqa: PLR2004
        message = f"There is no {_path(request)}. /docs lists what there is."
    elif error.status_code == 405:  # noqa: PLR2004
        message = f"{_path(request)} does not take {request.method}."
    elif error.status_code == 400:  # noqa: PLR2004 - FastAPI's, for a body that cannot be decoded or nests too deep
        message = "The body could not be read as JSON: it must be UTF-8, and not nested without end."
    return error_response(error.status_code, message, headers=error.headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body" and not is_tag(part)]
    if first["type"] == "json_invalid":
        at = first["loc"][-1]
        return _invalid(f"The body is not valid JSON: {first['ctx']['error']} at character {at}.", None)
    if not path:
        return _invalid_body(request, first)
    param = ".".join(path)
    if first["type"] == "missing":
        return _invalid(f"{param} is missing.", param)
    what = "it must be an object" if first["type"] == "model_type" else first["msg"].removeprefix("Value error, ")
    return _invalid(f"{param} is {Shown.of(first['input'])}: {what[:1].lower()}{what[1:]}.", param)


def _invalid_body(request: Request, first: dict[str, Any]) -> JSONResponse:
    """The body as a whole is wrong: absent, of another kind, or JSON that is no object."""
    if first["type"] == "missing":
        return _invalid("The body is empty; it must be a JSON object.", None)
    if isinstance(first["input"], bytes):
        kind = request.headers.get("content-type", "no Content-Type")
        return error_response(415, f"The body came as {kind}. Send JSON, with Content-Type: application/json.")
    if first["type"] == "string_unicode":
        return _invalid("The name of a field holds half of a surrogate pair, which is no text.", None)
    return _invalid(f"The body is {Shown.of(first['input'])}; it must be a JSON object.", None)


def _invalid(message: str, param: str | None) -> JSONResponse:
    form = _FORMS[InvalidRequestError]
    return JSONResponse(_body(message, form.type, param, form.code), form.status)


def _path(request: Request) -> str:
    """Return the path that was asked for; of a long one the beginning."""
    path = request.url.path
    return path if len(path) <= _NUM_PATH_CHARACTERS else path[:_NUM_PATH_CHARACTERS] + "..."
