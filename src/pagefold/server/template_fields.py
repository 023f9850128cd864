"""Request fields that a chat template reads: variables of its own, such as ``enable_thinking``.

A template is a program, and what a client hands it is its input: it is bounded, so that no template can be made to
work for long, and names that are the server's to set are refused.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator

from pagefold.errors import InvalidRequestError

__all__ = ["TemplateVariables"]

_FIELD = "chat_template_kwargs"
_MAX_VARIABLES = 32
_MAX_CHARACTERS = 8 * 1024
_MAX_NUMBER = 10_000_000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def _as_variables(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        msg = "it must be an object"
        raise ValueError(msg)  # noqa: TRY004 - pydantic wants ValueErrors
    _check(len(value) <= _MAX_VARIABLES, f"has {len(value)} variables", f"Send at most {_MAX_VARIABLES}.")
    for name in value:
        is_name = _NAME.fullmatch(name) is not None
        _check(is_name, f"has {ascii(name)[:80]}, which is no name", "Names are letters, digits and underscores.")
    text = _as_text(value)
    _check(text is not None, "cannot be read", "Send plain JSON: finite numbers, whole characters, little nesting.")
    num_characters = len(text or "")
    _check(num_characters <= _MAX_CHARACTERS, f"has {num_characters} characters", f"Send at most {_MAX_CHARACTERS}.")
    are_small = all(abs(number) <= _MAX_NUMBER for number in _numbers(value))
    _check(are_small, "has a number that is too large", f"Numbers go up to {_MAX_NUMBER}.")
    return value


def _as_text(value: dict[str, Any]) -> str | None:
    """Return it as JSON; None if it cannot be written so."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError):  # half of a surrogate pair is a ValueError too
        return None
    return text


def _numbers(value: Any) -> list[float]:  # noqa: ANN401 - of JSON
    """Return all numbers in a JSON value, however deep."""
    found: list[float] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, (int, float)):
            found.append(one)
    return found


def _check(is_right: bool, what: str, remedy: str) -> None:  # noqa: FBT001 - the result of the check
    if not is_right:
        msg = f"{_FIELD} {what}."
        raise InvalidRequestError(msg, param=_FIELD, remedy=remedy)


TemplateVariables: TypeAlias = Annotated[
    dict[str, Any], PlainValidator(_as_variables, json_schema_input_type=dict[str, Any])
]
