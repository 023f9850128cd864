"""What clients send to ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field, StrictBool, StrictInt, model_validator

from pagefold.server.chat_schemas import Templated, check_one_prompt
from pagefold.server.schemas import MAX_TOKEN_ID, RequestBody, Text

__all__ = ["DetokenizeRequest", "TokenizeRequest"]

_MAX_TOKENS = 2**21
"""Token ids that are looked at, at most: more than any context has."""


class TokenizeRequest(Templated, RequestBody):
    """``POST /tokenize``: a prompt, or the messages of a chat.

    Attributes:
        model: may be left out: there is one.
        prompt: a text.
        messages: a chat, which is put into the model's template, as its other fields say; instead of ``prompt``.
        add_special_tokens: whether the tokens that the model expects at the start of a prompt are added. If it is not
            there: yes for a prompt, no for a chat, whose template brings its own.
        return_token_strs: whether the text of each token is told too.
    """

    prompt: Text | None = None
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        check_one_prompt(self.prompt, self.messages)
        return self


class DetokenizeRequest(RequestBody):
    """``POST /detokenize``.

    Attributes:
        tokens: token ids, no more than the context has.
    """

    tokens: Annotated[
        list[Annotated[StrictInt, Field(ge=0, le=MAX_TOKEN_ID)]], Field(max_length=_MAX_TOKENS), FailFast()
    ]
