"""StructuredOutputsParams: what an output must look like, in vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagefold.errors import InvalidRequestError
from pagefold.structured.free_beginning import FreeBeginning  # noqa: TC001 - pydantic reads it

__all__ = ["FIELD", "StructuredOutputsParams"]

FIELD = "structured_outputs"
"""The request field that errors name, unless the client used another."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StructuredOutputsParams:
    r"""What an output must look like: exactly one of the first five.

    Attributes:
        json: a JSON schema, as an object or as its text. The output is one JSON value that it allows.
        regex: the whole output matches it. Rust's syntax, which has no look-around and no back references; ``\d`` and
            ``\w`` are ASCII, as in JSON schemas.
        choice: the output is one of these texts.
        grammar: a context-free grammar, in Lark's syntax or in GBNF; its start rule is ``start`` or ``root``.
        json_object: True for any JSON object.
        disable_any_whitespace: no whitespace between the parts of JSON. Otherwise a little is allowed, but not without
            end: small models like to write nothing else.
        whitespace_pattern: a regex of the whitespace that is allowed between the parts of JSON.
        lenient: ignore what a JSON schema says beyond what can be enforced, instead of refusing it.
        beginning: what may come before all this, such as a model's thinking. A server sets it, by what it knows of its
            model.
        calls: a grammar in Lark's syntax of what an output may be instead of JSON: calls of tools. A server sets it.

    Raises:
        InvalidRequestError: none of the five is there, or several, or one is not of its type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    lenient: bool = False
    beginning: FreeBeginning | None = None
    calls: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            msg = f"{FIELD} has {' and '.join(given) or 'nothing that an output must look like'}."
            raise InvalidRequestError(msg, param=FIELD, remedy=f"Give exactly one of {', '.join(_KINDS)}.")
        self._check("json", isinstance(self.json, (str, Mapping, type(None))), "a JSON schema, as an object or a text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            self._check(name, isinstance(getattr(self, name), (str, type(None))), "a text")
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            are_texts = is_list and len(self.choice) > 0 and all(isinstance(text, str) for text in self.choice)
            self._check("choice", are_texts, "a list of at least one text")
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("json_object", "disable_any_whitespace", "lenient"):
            self._check(name, getattr(self, name) in (True, False, None), "True or False")

    @property
    def is_json(self) -> bool:
        """Whether an output is JSON."""
        return self.json is not None or self.json_object is not None

    def _check(self, name: str, is_right: bool, allowed: str) -> None:  # noqa: FBT001 - the result of the check
        if not is_right:
            msg = f"{FIELD}.{name} is a {type(getattr(self, name)).__name__}."
            raise InvalidRequestError(msg, param=FIELD, remedy=f"It must be {allowed}.")
