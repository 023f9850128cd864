"""What clients send to ``POST /v1/explain``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import PlainValidator, model_validator

from pagefold.errors import InvalidRequestError
from pagefold.server.chat_schemas import ChatRequest, Templated
from pagefold.server.completion_schemas import CompletionRequest, OneIds, checked_ids, checked_text
from pagefold.server.schemas import CachedRequest, OneText

__all__ = ["ExplainRequest"]


def _as_prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return checked_text(value)
    if isinstance(value, list):
        return checked_ids(value)
    msg = "it must be a text or a list of token ids"
    raise ValueError(msg)


class ExplainRequest(Templated, CachedRequest):
    """``POST /v1/explain``: the body of a chat or of a completion with one prompt, before it is sent.

    Fields that say nothing of what the cache finds, such as ``temperature``, are ignored.

    Attributes:
        prompt: a text, or token ids; instead of ``messages``.
    """

    known: ClassVar[frozenset[str]] = frozenset({*ChatRequest.model_fields, *CompletionRequest.model_fields})

    prompt: Annotated[str | list[int] | None, PlainValidator(_as_prompt, json_schema_input_type=OneText | OneIds)] = (
        None
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> ExplainRequest:
        if (self.prompt is None) == (self.messages is None):
            msg = "Neither prompt nor messages is there, or both are."
            raise InvalidRequestError(msg, param="prompt", remedy="Send one of them.")
        return self
