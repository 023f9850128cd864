"""SpeculativeConfig: the request field that says who drafts for it, in vLLM's words."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator

from pagefold.speculation.params import SpeculativeParams

__all__ = ["SpeculativeConfig"]


def _as_params(value: object) -> SpeculativeParams:
    if not isinstance(value, dict):
        msg = "it must be an object"
        raise ValueError(msg)  # noqa: TRY004 - pydantic wants ValueErrors
    return SpeculativeParams.of({name: field for name, field in value.items() if field is not None})


SpeculativeConfig: TypeAlias = Annotated[
    SpeculativeParams | None, PlainValidator(_as_params, json_schema_input_type=dict[str, Any] | None)
]
