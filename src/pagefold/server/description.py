"""The API's description of itself: FastAPI's OpenAPI document, with our errors, keys and headers in it.

FastAPI knows routes and bodies. What a route may answer besides follows from what kind of route it is: it is said here
once, and no route repeats it.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.routing import Route

from pagefold.server.anthropic.errors import is_anthropic
from pagefold.server.ignored import IGNORED_HEADER
from pagefold.server.keys import TRAFFIC_PATHS, Locks, is_for_admin

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

    from pagefold.config import ServerConfig

__all__ = ["describe"]

_ERROR = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""OpenAI's form of an error; see ``errors.py``."""

_ANTHROPIC_ERROR = {
    "title": "AnthropicError",
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string", "minLength": 1}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
"""Anthropic's; see ``anthropic/errors.py``."""

_WORDS = {
    400: "The request cannot be served as it was sent.",
    401: "A key is missing, or not known.",
    403: "The route asks for the admin's key or that of the metrics, and the server has none.",
    404: "There is no such model, pin, response, session or request, or no curve.",
    408: "The body stopped coming, or took too long.",
    409: "More would be pinned than may be.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "Too many requests are here, or too many large bodies, a target would not be kept, or a rate is used up.",
    500: "The server failed.",
    502: "A slow tier could not be used.",
    503: "The server is loading, draining, or has failed.",
    504: "The request's time was up.",
}

_OF_BODIES = (400, 404, 408, 413, 415, 429, 500, 503)
_OF_GENERATION = (504,)

_IGNORED = {
    "description": "Fields of the body that are not known here and changed nothing.",
    "schema": {"type": "string", "maxLength": 2048},
}
_RETRY_AFTER = {
    "description": "Seconds after which it is worth trying again.",
    "required": True,
    "schema": {"type": "integer", "minimum": 1},
}


def describe(app: FastAPI, config: ServerConfig) -> None:
    """Have ``app`` describe itself so, when it is first asked; call it when all routes are there.

    Most of a second goes into it. So a start does without, and whoever asks waits for it beside the event loop.
    """
    of_fastapi = app.openapi
    lock = Lock()

    def openapi() -> dict[str, Any]:
        with lock:
            if app.openapi_schema is None:
                _complete(of_fastapi(), config)
            return of_fastapi()

    def read_openapi(_: Request) -> JSONResponse:
        return JSONResponse(openapi())

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI has it done
    # In front of FastAPI's own route, which would do it on the event loop.
    app.router.routes.insert(0, Route("/openapi.json", read_openapi, include_in_schema=False))


def _complete(document: dict[str, Any], config: ServerConfig) -> None:
    locks = Locks.of(config)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _describe_operation(path, method, operation, locks)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for of_fastapi in ("HTTPValidationError", "ValidationError"):
        schemas.pop(of_fastapi, None)
    schemas["Error"] = _ERROR
    schemas["AnthropicError"] = _ANTHROPIC_ERROR
    components["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "Any of --api-key and --api-key-file, or the admin's. As the header x-api-key too.",
        },
        "admin_key": {"type": "http", "scheme": "bearer", "description": "That of --admin-api-key."},
        "metrics_key": {"type": "http", "scheme": "bearer", "description": "That of --metrics-key, or the admin's."},
    }


def _describe_operation(path: str, method: str, operation: dict[str, Any], locks: Locks) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's; a body that does not fit is a 400
    form = "AnthropicError" if is_anthropic(path) else "Error"
    for status in _statuses(path, method, operation, locks):
        responses[str(status)] = {
            "description": _WORDS[status],
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}},
        }
    if "429" in responses:
        responses["429"]["headers"] = {"Retry-After": _RETRY_AFTER}
    if "requestBody" in operation:
        responses["200"].setdefault("headers", {})[IGNORED_HEADER] = _IGNORED
    if locks.at(path) is not None:
        operation["security"] = [{_security_of(path): []}]


def _security_of(path: str) -> str:
    if path in TRAFFIC_PATHS:
        return "metrics_key"
    return "admin_key" if is_for_admin(path) else "key"


_OF_ONE: dict[tuple[str, str], tuple[int, ...]] = {
    ("post", "/v1/cache/warm"): (409,),
    ("get", "/v1/cache/layout"): (400,),
    ("post", "/v1/cache/import"): (400, 408, 413, 429, 502),
    ("delete", "/v1/cache/pins/{pin_id}"): (404,),
    ("get", "/v1/cache/whatif"): (404,),
    ("get", "/v1/responses/{response_id}"): (400, 404),
    ("delete", "/v1/responses/{response_id}"): (404,),
    ("delete", "/v1/sessions/{session_id}"): (404, 500, 503),
    ("get", "/v1/advice"): (404,),
    ("post", "/v1/explain"): (404,),
    ("get", "/v1/explain"): (400, 404),
    ("get", "/v1/explain/{request_id}"): (404,),
    ("get", "/health"): (503,),
    ("get", "/ping"): (503,),
    ("post", "/ping"): (503,),
    ("get", "/ready"): (503,),
    ("get", "/v1/models"): (503,),
    ("get", "/v1/models/{model_id}"): (404, 503),
}
"""Statuses of single routes, by method and path."""


def _statuses(path: str, method: str, operation: dict[str, Any], locks: Locks) -> set[int]:
    statuses: set[int] = set()
    if "requestBody" in operation:
        statuses.update(_OF_BODIES)
        if path.startswith("/v1/"):
            statuses.update(_OF_GENERATION)
    lock = locks.at(path)
    if lock is not None:
        statuses.add(401)
        if is_for_admin(path) or path in TRAFFIC_PATHS:
            statuses.add(403)
    if is_for_admin(path):
        statuses.update((500, 503))
    return statuses.union(_OF_ONE.get((method, path), ()))
