"""TextConfig: the field ``text`` of a Responses' request: what the answer must look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import Field, PlainValidator

from pagefold.server.ignored import Body
from pagefold.server.structured_fields import Structured
from pagefold.server.tellable import tellable
from pagefold.structured.params import StructuredOutputsParams

__all__ = ["TextConfig"]

_TOLD = ("name", "description", "schema", "strict")


class _Format(NamedTuple):
    """What the answer must look like, None for any text; and the same as responses repeat it."""

    params: StructuredOutputsParams | None
    told: dict[str, Any]


def _as_format(value: object) -> _Format:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return _Format(None, {"type": "text"})
    if kind == "json_object":
        return _Format(StructuredOutputsParams(json_object=True), {"type": "json_object"})
    if kind != "json_schema":
        msg = "it must be an object whose type is text, json_object or json_schema"
        raise ValueError(msg)
    assert isinstance(value, dict)
    if not isinstance(schema := value.get("schema"), dict):
        msg = "it must have a schema that is an object"
        raise ValueError(msg)  # noqa: TRY004 - pydantic wants ValueErrors
    strict = value.get("strict")
    if strict not in (True, False, None):
        msg = "its strict must be true or false"
        raise ValueError(msg)
    told = {name: value[name] for name in _TOLD if isinstance(value.get(name), (str, dict, bool))}
    params = StructuredOutputsParams(json=schema, lenient=strict is not True)
    return _Format(params, {"type": "json_schema", **tellable(told)})


_AnyFormat: TypeAlias = Annotated[_Format, PlainValidator(_as_format, json_schema_input_type=dict[str, Any])]


class TextConfig(Body):
    """What the answer must look like.

    Attributes:
        format: any text, any JSON object, or JSON of a schema.
        verbosity: accepted, and told to no model.
    """

    format: _AnyFormat = Field(default_factory=lambda: _Format(None, {"type": "text"}))
    verbosity: Literal["low", "medium", "high"] | None = None

    def structured(self) -> Structured | None:
        """Return what the output must look like, if that is said."""
        return None if self.format.params is None else Structured(self.format.params, "text")

    def told(self) -> dict[str, Any]:
        """Return the config as responses repeat it."""
        verbosity = {} if self.verbosity is None else {"verbosity": self.verbosity}
        return {"format": self.format.told, **verbosity}
