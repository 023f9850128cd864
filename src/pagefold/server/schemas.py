"""What clients send: OpenAI's request forms, with vLLM's additions.

Types are strict: ``"5"`` and ``true`` are no numbers. null is the same as leaving a field out. Unknown fields are
ignored, but for those of ``unsupported``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from pagefold.errors import InvalidRequestError
from pagefold.request import MAX_LOGPROBS, Caller, SamplingParams
from pagefold.server.unsupported import IN_CHAT, IN_COMPLETIONS, refuse_unsupported

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "StreamOptions",
    "TextPart",
    "TokenizeRequest",
]

_MAX_PROMPTS = 2048
_MAX_INT64 = 2**63 - 1
_MAX_PRIORITY = 2**31
_MAX_TOKEN_ID = 2**31 - 1
_MAX_ID_DIGITS = 18

_DEFAULT_COMPLETION_TOKENS = 16

_Prompt: TypeAlias = str | list[str] | list[int] | list[list[int]]
_Prompts: TypeAlias = list[str] | list[list[int]]


def _no_nulls(fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
    return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields


def _as_list(value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    msg = "it must be a text or a list of texts"
    raise ValueError(msg)


def _as_parts(value: object) -> list[object]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    msg = "it must be a text or a list of text parts"
    raise ValueError(msg)


def _whole_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = "it holds half of a surrogate pair, which is no text"
        raise ValueError(msg) from None
    return text


_Text: TypeAlias = Annotated[StrictStr, AfterValidator(_whole_text)]


def _as_prompts(value: object) -> _Prompts:
    """Check the four forms by hand: what a union reports about a wrong value helps nobody."""
    if isinstance(value, str):
        return [_checked_text(value)]
    if isinstance(value, list) and value and len(value) <= _MAX_PROMPTS:
        if isinstance(value[0], str):
            return [_checked_text(text) for text in value]
        if isinstance(value[0], list):
            return [_checked_ids(token_ids) for token_ids in value]
    if isinstance(value, list) and (not value or type(value[0]) is int):
        return [_checked_ids(value)]
    if isinstance(value, list) and len(value) > _MAX_PROMPTS:
        msg = f"at most {_MAX_PROMPTS} prompts go into one request"
        raise ValueError(msg)
    msg = "it must be a text, a list of token ids, or a list of texts or of lists of token ids"
    raise ValueError(msg)


def _checked_text(text: object) -> str:
    if not isinstance(text, str):
        msg = f"it holds texts and a {type(text).__name__}; all prompts must be of one kind"
        raise ValueError(msg)  # noqa: TRY004 - as above
    return _whole_text(text)


def _checked_ids(token_ids: object) -> list[int]:
    if not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
        msg = "a list of token ids must hold ints and nothing else"
        raise ValueError(msg)
    return token_ids


def _as_bias(value: object) -> dict[int, float]:
    """Check by hand: keys are token ids written as texts, since JSON has no other keys."""
    if not isinstance(value, dict):
        msg = "it must be an object of token ids and numbers"
        raise ValueError(msg)  # noqa: TRY004 - as above
    for token_id, bias in value.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= _MAX_ID_DIGITS):
            msg = "its keys must be token ids"
            raise ValueError(msg)
        if type(bias) not in (int, float):
            msg = "its values must be numbers"
            raise ValueError(msg)
    return {int(token_id): bias for token_id, bias in value.items()}


class StreamOptions(BaseModel):
    """How to stream.

    Attributes:
        include_usage: whether a last chunk tells the token counts.
    """

    include_usage: StrictBool = False

    _drop_nulls = model_validator(mode="before")(_no_nulls)


class GenerationRequest(BaseModel):
    """What completions and chats have in common; :class:`~pagefold.request.SamplingParams` says what the fields mean.

    Attributes:
        model: may be left out: there is one.
        stream: whether the answer comes in events, as it is made.
        stream_options: how, if it does.
        stop: one text or several.
        max_completion_tokens: OpenAI's newer name of ``max_tokens``; it counts when both are there.
        user: accepted and ignored.
        cache_salt: requests share cached prefixes only with those that bring the same salt.
        priority: the smaller, the sooner it is served; only where the server schedules by priority.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    default_max_tokens: ClassVar[int | None] = None

    model_config = ConfigDict(protected_namespaces=())

    model: _Text | None = None
    n: StrictInt = 1
    best_of: StrictInt | None = None
    max_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    temperature: StrictFloat = 1.0
    top_p: StrictFloat = 1.0
    top_k: Annotated[StrictInt, Field(le=_MAX_INT64)] = 0
    min_p: StrictFloat = 0.0
    presence_penalty: StrictFloat = 0.0
    frequency_penalty: StrictFloat = 0.0
    repetition_penalty: StrictFloat = 1.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_as_bias, json_schema_input_type=dict[str, float])] = {}
    min_tokens: StrictInt = 0
    seed: Annotated[StrictInt | None, Field(ge=-_MAX_INT64, le=_MAX_INT64)] = None
    stop: Annotated[list[_Text], FailFast(), BeforeValidator(_as_list)] = []
    stop_token_ids: Annotated[list[StrictInt], FailFast()] = []
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: _Text | None = None
    cache_salt: Annotated[_Text | None, Field(min_length=1)] = None
    priority: Annotated[StrictInt, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)] = 0

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict):
            refuse_unsupported(fields, cls.unsupported)
            if fields.get("stream_options") is not None and fields.get("stream") is not True:
                msg = "stream_options is there, but stream is not true."
                raise InvalidRequestError(msg, param="stream_options", remedy="Leave it out, or stream.")
        return _no_nulls(fields)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """Return how to sample.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        max_tokens = self.max_completion_tokens or self.max_tokens or self.default_max_tokens
        how = SamplingParams(
            n=self.n,
            best_of=self.best_of,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            logprobs=self.num_logprobs(),
        )
        if how.ranks_samples and self.stream:
            msg = (
                f"best_of is {self.best_of} and n is {self.n}: which are the best is known at the end, not in a stream."
            )
            raise InvalidRequestError(msg, param="best_of", remedy="Leave it out, or do not stream.")
        return how

    def caller(self) -> Caller:
        """Return who asks, and on what terms."""
        return Caller(cache_salt=self.cache_salt or "", priority=self.priority)

    def num_logprobs(self) -> int | None:
        """Return of how many alternatives to each token logprobs are asked for; None for none, not even the token's."""
        return None


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``.

    Attributes:
        prompts: the field ``prompt``: a text or token ids, or a list of either. Each gets a choice of its own.
        logprobs: how many alternatives to each token are told.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_COMPLETIONS
    default_max_tokens: ClassVar[int | None] = _DEFAULT_COMPLETION_TOKENS

    prompts: Annotated[_Prompts, PlainValidator(_as_prompts, json_schema_input_type=_Prompt), Field(alias="prompt")]
    logprobs: StrictInt | None = None

    def num_logprobs(self) -> int | None:
        """See :class:`GenerationRequest`."""
        return self.logprobs


class TextPart(BaseModel):
    """A piece of a message; other kinds than text are not supported."""

    type: Literal["text"]
    text: _Text


class ChatMessage(BaseModel):
    """One message of a chat.

    Attributes:
        role: ``developer`` is OpenAI's newer name of ``system``.
        content: a text, or text parts, which are joined by newlines as vLLM does.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
    ]

    def for_template(self) -> dict[str, str]:
        """Return it as chat templates want it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "\n".join(part.text for part in self.content)}


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``. Without ``max_tokens`` an answer may be as long as fits.

    Attributes:
        messages: the chat.
        logprobs: whether each token's logprob is told.
        top_logprobs: with it, those of so many most likely tokens.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_CHAT

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] = 0

    def num_logprobs(self) -> int | None:
        """See :class:`GenerationRequest`.

        Raises:
            InvalidRequestError: alternatives are asked for, but not logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            msg = f"top_logprobs is {self.top_logprobs}, but logprobs is not true."
            raise InvalidRequestError(msg, param="top_logprobs", remedy="Leave it out, or send logprobs: true.")
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(BaseModel):
    """``POST /tokenize``: a prompt, or the messages of a chat.

    Attributes:
        model: may be left out: there is one.
        prompt: a text.
        messages: a chat, which is put into the model's template; instead of ``prompt``.
        return_token_strs: whether the text of each token is told too.
    """

    model: _Text | None = None
    prompt: _Text | None = None
    messages: Annotated[list[ChatMessage] | None, Field(min_length=1)] = None
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            msg = "Neither prompt nor messages is there, or both are."
            raise InvalidRequestError(msg, param="prompt", remedy="Send one of them.")
        return self


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``.

    Attributes:
        model: may be left out: there is one.
        tokens: token ids.
    """

    model: _Text | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, le=_MAX_TOKEN_ID)]], FailFast()]
