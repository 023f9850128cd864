"""What clients send to ``POST /v1/explain``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from pagefold.server.chat_schemas import ChatRequest, Templated, check_one_prompt
from pagefold.server.completion_schemas import CompletionRequest, OnePrompt
from pagefold.server.schemas import CachedRequest

__all__ = ["ExplainRequest"]


class ExplainRequest(Templated, CachedRequest):
    """``POST /v1/explain``: the body of a chat or of a completion with one prompt, before it is sent.

    Fields that say nothing of what the cache finds, such as ``temperature``, are ignored.

    Attributes:
        prompt: a text, or token ids; instead of ``messages``.
    """

    known: ClassVar[frozenset[str]] = frozenset({*ChatRequest.model_fields, *CompletionRequest.model_fields})

    prompt: OnePrompt = None

    @model_validator(mode="after")
    def _one_of_both(self) -> ExplainRequest:
        check_one_prompt(self.prompt, self.messages)
        return self
