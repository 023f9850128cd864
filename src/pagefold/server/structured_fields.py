"""Request fields that say what an output must look like: OpenAI's ``response_format``, and vLLM's, new and old.

Checked by hand: what a union of forms reports about a wrong value helps nobody.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import PlainValidator

from pagefold.errors import InvalidRequestError
from pagefold.structured.params import FIELD, StructuredOutputsParams

__all__ = [
    "GuidedChoice",
    "GuidedGrammar",
    "GuidedJson",
    "GuidedRegex",
    "ResponseFormat",
    "Structured",
    "StructuredOutputs",
    "the_one_of",
]


class Structured(NamedTuple):
    """What an output must look like, and which field of the request says so.

    Attributes:
        params: the former.
        field: the latter.
        is_calls: whether it is that it calls tools.
    """

    params: StructuredOutputsParams
    field: str
    is_calls: bool = False

    @property
    def allows_space(self) -> bool:
        """Whether white space before an answer changes nothing of it: before JSON, and before calls."""
        return self.is_calls or self.params.is_json


def the_one_of(asked: dict[str, StructuredOutputsParams | None]) -> Structured | None:
    """Return the one of several fields that is there, if any.

    Raises:
        InvalidRequestError: two are.
    """
    there = [Structured(params, name) for name, params in asked.items() if params is not None]
    if len(there) > 1:
        names = " and ".join(structured.field for structured in there)
        msg = f"{names} are both there, and each says what the output must look like."
        raise InvalidRequestError(msg, param=there[1].field, remedy="Send one of them.")
    return there[0] if there else None


def _as_response_format(value: object) -> StructuredOutputsParams | None:
    form = value.get("type") if isinstance(value, dict) else None
    if form == "text":
        return None
    if form == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form != "json_schema":
        msg = "it must be an object whose type is text, json_object or json_schema"
        raise ValueError(msg)
    assert isinstance(value, dict)
    asked = value.get("json_schema")
    if not isinstance(asked, dict) or not isinstance(schema := asked.get("schema"), dict):
        msg = "its json_schema must have a schema that is an object"
        raise ValueError(msg)  # noqa: TRY004 - pydantic wants ValueErrors
    strict = asked.get("strict")
    if strict not in (True, False, None):
        msg = "its json_schema.strict must be true or false"
        raise ValueError(msg)
    return StructuredOutputsParams(json=schema, lenient=strict is not True)


_SUPPORTED = tuple(name for name in StructuredOutputsParams.__dataclass_fields__ if name not in ("beginning", "calls"))


def _as_structured_outputs(value: object) -> StructuredOutputsParams:
    if not isinstance(value, dict):
        msg = "it must be an object"
        raise ValueError(msg)  # noqa: TRY004 - as above
    fields = {name: field for name, field in value.items() if field is not None and field is not False}
    unknown = sorted(set(fields) - set(_SUPPORTED))
    if unknown:
        msg = f"{FIELD}.{unknown[0]} is not supported."
        raise InvalidRequestError(msg, param=FIELD, remedy=f"It has {', '.join(_SUPPORTED)}.")
    return StructuredOutputsParams(**fields)


def _guided(kind: str) -> PlainValidator:
    field = f"guided_{kind}"

    def as_params(value: Any) -> StructuredOutputsParams:  # noqa: ANN401 - whatever the JSON was
        try:
            return StructuredOutputsParams(**{kind: value})
        except InvalidRequestError as error:
            message = error.message.replace(f"{FIELD}.{kind}", field)
            raise InvalidRequestError(message, param=field, remedy=error.remedy) from None

    return PlainValidator(as_params, json_schema_input_type=_GUIDED_TYPES[kind])


_GUIDED_TYPES: dict[str, Any] = {
    "json": dict[str, Any] | str | None,
    "regex": str | None,
    "choice": list[str] | None,
    "grammar": str | None,
}

_Params: TypeAlias = StructuredOutputsParams | None
_Object: TypeAlias = dict[str, Any] | None

ResponseFormat: TypeAlias = Annotated[_Params, PlainValidator(_as_response_format, json_schema_input_type=_Object)]
StructuredOutputs: TypeAlias = Annotated[
    _Params, PlainValidator(_as_structured_outputs, json_schema_input_type=_Object)
]
GuidedJson: TypeAlias = Annotated[_Params, _guided("json")]
GuidedRegex: TypeAlias = Annotated[_Params, _guided("regex")]
GuidedChoice: TypeAlias = Annotated[_Params, _guided("choice")]
GuidedGrammar: TypeAlias = Annotated[_Params, _guided("grammar")]
