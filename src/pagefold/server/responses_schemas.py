"""What clients send to ``/v1/responses``: the part of OpenAI's form that needs no memory on the server and no tools."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, StrictBool, StrictFloat, StrictInt, model_validator

from pagefold.request import SamplingParams
from pagefold.server.ignored import Body
from pagefold.server.schemas import MAX_PARTS, CachedRequest, Text, few_parts, stated
from pagefold.server.unsupported import IN_RESPONSES, refuse_unsupported

__all__ = ["InputMessage", "InputText", "ResponseRequest"]

_MAX_METADATA = 16


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else few_parts(value)


def _as_parts(value: object) -> object:
    if isinstance(value, (str, list)):
        return [{"type": "input_text", "text": value}] if isinstance(value, str) else value
    msg = "it must be a text or a list of text parts"
    raise ValueError(msg)


class InputText(Body):
    """A piece of a message; those of an earlier answer may be sent back as they came."""

    known: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text"]
    text: Text


class InputMessage(Body):
    """One message; items of other types are not supported."""

    known: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[InputText], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[InputText])
    ]

    def for_template(self) -> dict[str, str]:
        """Return it as chat templates want it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


_Items = Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_PARTS)]


class ResponseRequest(CachedRequest):
    """``POST /v1/responses``; :class:`~pagefold.request.SamplingParams` says what the fields of sampling mean.

    Attributes:
        input: a text, which is the user's message, or messages.
        instructions: a system message before them.
        max_output_tokens: without, an answer may be as long as fits.
        stream: whether the answer comes in events, as it is made.
        metadata: told back.
        user: accepted and ignored.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_RESPONSES
    known: ClassVar[frozenset[str]] = frozenset({"parallel_tool_calls"})  # means nothing without tools

    input: Annotated[
        list[InputMessage],
        Field(min_length=1, max_length=MAX_PARTS),
        FailFast(),
        BeforeValidator(_as_items, json_schema_input_type=str | _Items),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    temperature: Annotated[StrictFloat, stated(minimum=0, maximum=2)] = 1.0
    top_p: Annotated[StrictFloat, stated(exclusiveMinimum=0, maximum=1)] = 1.0
    stream: StrictBool = False
    metadata: Annotated[dict[Text, Text], Field(max_length=_MAX_METADATA)] = {}  # noqa: RUF012 - pydantic copies it
    user: Text | None = None
    # vLLM's
    top_k: Annotated[StrictInt, Field(le=2**63 - 1), stated(minimum=-1)] = 0
    seed: Annotated[StrictInt | None, Field(ge=1 - 2**63, le=2**63 - 1)] = None
    ignore_eos: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict):
            refuse_unsupported(fields, cls.unsupported)
        return fields

    def messages(self) -> list[InputMessage]:
        """Return the chat that the input is."""
        if self.instructions is None:
            return self.input
        system = InputMessage(role="system", content=[InputText(type="input_text", text=self.instructions)])
        return [system, *self.input]

    def sampling(self) -> SamplingParams:
        """Return how to sample.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_output_tokens,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )
