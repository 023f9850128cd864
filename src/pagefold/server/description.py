"""The API's description of itself: FastAPI's OpenAPI document, with our errors, keys and headers in it.

FastAPI knows routes and bodies. What a route may answer besides follows from what kind of route it is: it is said here
once, and no route repeats it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.server.anthropic.errors import is_anthropic
from pagefold.server.ignored import IGNORED_HEADER
from pagefold.server.keys import OPEN_PATHS, is_for_admin

if TYPE_CHECKING:
    from fastapi import FastAPI

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
    403: "The route is for the admin, and the server has no admin key.",
    404: "There is no such model, no such pin, or no such response.",
    408: "The body stopped coming.",
    409: "More would be pinned than may be.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "Too many requests are here.",
    500: "The server failed.",
    503: "The server is loading, draining, or has failed.",
    504: "The request's time was up.",
}

_OF_BODIES = (400, 404, 408, 413, 415, 500, 503)
_OF_GENERATION = (429, 504)

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
    """Have ``app`` describe itself so; call it when all routes are there."""
    document = app.openapi()  # FastAPI keeps it, and hands the same one out from now on
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _describe_operation(path, method, operation, has_keys=bool(config.api_keys or config.accounts))
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
    }


def _describe_operation(path: str, method: str, operation: dict[str, Any], *, has_keys: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's; a body that does not fit is a 400
    form = "AnthropicError" if is_anthropic(path) else "Error"
    for status in _statuses(path, method, operation, has_keys=has_keys):
        responses[str(status)] = {
            "description": _WORDS[status],
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}},
        }
    if "429" in responses:
        responses["429"]["headers"] = {"Retry-After": _RETRY_AFTER}
    if "requestBody" in operation:
        responses["200"].setdefault("headers", {})[IGNORED_HEADER] = _IGNORED
    if is_for_admin(path):
        operation["security"] = [{"admin_key": []}]
    elif has_keys and path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]


def _statuses(path: str, method: str, operation: dict[str, Any], *, has_keys: bool) -> set[int]:
    statuses: set[int] = set()
    if "requestBody" in operation:
        statuses.update(_OF_BODIES)
        if path.startswith("/v1/"):
            statuses.update(_OF_GENERATION)
    if is_for_admin(path):
        statuses.update((401, 403, 500, 503))
    elif has_keys and path not in OPEN_PATHS:
        statuses.add(401)
    if path == "/v1/cache/warm":
        statuses.add(409)
    if "{pin_id}" in path or "{response_id}" in path:
        statuses.add(404)
    if method == "get" and "{response_id}" in path:
        statuses.add(400)
    if path in ("/health", "/ready"):
        statuses.add(503)
    if method == "get" and path.startswith("/v1/models"):
        statuses.update((404, 503) if "{" in path else (503,))
    return statuses
