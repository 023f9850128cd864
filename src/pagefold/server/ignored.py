"""Ignored fields: what a body holds and this server does not know is left alone, and a response header names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator

from pagefold.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["IGNORED_HEADER", "Body", "TellIgnored", "note_ignored"]

IGNORED_HEADER = "x-pagefold-ignored"

_MAX_FIELDS = 256
_MAX_NAMES = 16
_MAX_NAME_CHARACTERS = 64
_KEY = "pagefold_ignored"  # in the request's state, between route and middleware


class Body(BaseModel):
    """An object that a client sends: it may hold more than is known, but no thousands of fields. A null is no field.

    Attributes:
        unsupported: fields that are known, but not taken with a value that means something; see ``unsupported.py``.
        known: fields that are known and rightly change nothing.
    """

    known: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Say of every field that may be left out that it may be null too."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
                schema["properties"][name] = {**about, "anyOf": [field, {"type": "null"}]}
        return schema

    @model_validator(mode="before")
    @classmethod
    def _plain_fields(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        """Drop nulls; and refuse a million fields, which would hold up the event loop for seconds."""
        if not isinstance(fields, dict):
            return fields
        if len(fields) > _MAX_FIELDS:
            msg = f"An object of the request has {len(fields)} fields."
            raise InvalidRequestError(msg, remedy=f"Send at most {_MAX_FIELDS}.")
        return {name: value for name, value in fields.items() if value is not None}


class TellIgnored:
    """ASGI middleware: adds the header to the responses of requests that :func:`note_ignored` has seen."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and _KEY in scope.get("state", {}):
                header = (IGNORED_HEADER.encode(), scope["state"][_KEY].encode("ascii"))
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, telling)


def note_ignored(body: Body, request: Request) -> None:
    """Have the response to ``request`` name what is ignored of its ``body``, if anything."""
    names: dict[str, None] = {}  # in the order of the body
    for name in _ignored(body, ""):
        names[name] = None
        if len(names) > _MAX_NAMES:
            break
    if names:
        setattr(request.state, _KEY, ", ".join("..." if at == _MAX_NAMES else name for at, name in enumerate(names)))


def _ignored(body: Body, path: str) -> Iterator[str]:
    """Yield the paths of fields that are not known; all items of a list have one path."""
    for name in body.model_extra or ():
        if name not in body.unsupported and name not in body.known:
            yield path + _in_ascii(name)
    for name in body.model_fields_set:
        value = body.__dict__.get(name)
        if isinstance(value, Body):
            yield from _ignored(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for item in value:
                yield from _ignored(item, f"{path}{name}.*.")


def _in_ascii(name: str) -> str:
    """Return a name that cannot end a header, nor pass for two names or for none."""
    shown = quote(name[:_MAX_NAME_CHARACTERS], safe="") or '""'
    return shown if len(shown) <= _MAX_NAME_CHARACTERS else shown[: _MAX_NAME_CHARACTERS - 3] + "..."
