"""What clients send to ``/v1/completions``: a text or tokens, or many of either."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field, PlainValidator, StrictBool, StrictInt

from pagefold.sampling import MAX_LOGPROBS
from pagefold.server.schemas import MAX_TOKEN_ID, GenerationRequest, OneText, stated, whole_text
from pagefold.server.unsupported import IN_COMPLETIONS

__all__ = ["CompletionRequest", "OnePrompt", "checked_ids", "checked_text"]

_MAX_PROMPTS = 2048
_DEFAULT_COMPLETION_TOKENS = 16

OneIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1)]
_Texts: TypeAlias = Annotated[list[OneText], Field(min_length=1, max_length=_MAX_PROMPTS)]
_ManyIds: TypeAlias = Annotated[list[OneIds], Field(min_length=1, max_length=_MAX_PROMPTS)]
_Prompt: TypeAlias = OneText | _Texts | OneIds | _ManyIds
_Prompts: TypeAlias = list[str] | list[list[int]]


def _as_prompts(value: object) -> _Prompts:
    """Check the four forms by hand: what a union reports about a wrong value helps nobody."""
    if isinstance(value, str):
        return [checked_text(value)]
    if isinstance(value, list) and value and len(value) <= _MAX_PROMPTS:
        if isinstance(value[0], str):
            return [checked_text(text) for text in value]
        if isinstance(value[0], list):
            return [checked_ids(token_ids) for token_ids in value]
    if isinstance(value, list) and (not value or type(value[0]) is int):
        return [checked_ids(value)]
    if isinstance(value, list) and len(value) > _MAX_PROMPTS:
        msg = f"at most {_MAX_PROMPTS} prompts go into one request"
        raise ValueError(msg)
    msg = "it must be a text, a list of token ids, or a list of texts or of lists of token ids"
    raise ValueError(msg)


def _as_prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return checked_text(value)
    if isinstance(value, list):
        return checked_ids(value)
    msg = "it must be a text or a list of token ids"
    raise ValueError(msg)


def checked_text(text: object) -> str:
    """Check a prompt that is, or should be, a text."""
    if not isinstance(text, str):
        msg = f"it holds texts and a {type(text).__name__}; all prompts must be of one kind"
        raise ValueError(msg)  # noqa: TRY004 - as above
    return whole_text(text)


def checked_ids(token_ids: object) -> list[int]:
    """Check a prompt of token ids."""
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        msg = "a list of token ids must hold ints and nothing else"
        raise ValueError(msg)
    return token_ids


OnePrompt: TypeAlias = Annotated[
    str | list[int] | None, PlainValidator(_as_prompt, json_schema_input_type=OneText | OneIds)
]
"""A text or token ids; None where a chat is there instead."""


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``.

    Attributes:
        prompts: the field ``prompt``: a text or token ids, or a list of either. Each gets a choice of its own.
        echo: whether each choice begins with its prompt; with ``logprobs``, these tell the prompt's tokens too.
        logprobs: how many alternatives to each token are told.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_COMPLETIONS
    default_max_tokens: ClassVar[int | None] = _DEFAULT_COMPLETION_TOKENS
    has_many_prompts: ClassVar[bool] = True

    prompts: Annotated[_Prompts, PlainValidator(_as_prompts, json_schema_input_type=_Prompt), Field(alias="prompt")]
    echo: StrictBool = False
    logprobs: Annotated[StrictInt | None, stated(minimum=0, maximum=MAX_LOGPROBS)] = None
    max_tokens: Annotated[StrictInt | None, Field(ge=0)] = None
    max_completion_tokens: Annotated[StrictInt | None, Field(ge=0)] = None

    def num_logprobs(self) -> int | None:
        """See :class:`GenerationRequest`."""
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """See :class:`GenerationRequest`."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    def num_told_of_prompts(self) -> dict[str, int]:
        """See :class:`GenerationRequest`."""
        told = super().num_told_of_prompts()
        told["echo"] = int(self.echo)
        told["logprobs"] = 1 + self.logprobs if self.echo and self.logprobs is not None else 0
        return told
