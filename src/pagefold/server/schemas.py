"""What clients send: OpenAI's request forms, with vLLM's additions.

Types are strict: ``"5"`` and ``true`` are no numbers. null is the same as leaving a field out. Unknown fields are
ignored and told (``ignored.py`` does both), but for those of ``unsupported``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
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
from pagefold.server.ignored import Body
from pagefold.server.unsupported import IN_CHAT, IN_COMPLETIONS, refuse_unsupported

__all__ = [
    "MAX_PARTS",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "RequestBody",
    "StreamOptions",
    "Text",
    "TextPart",
    "TokenizeRequest",
    "few_parts",
    "stated",
]

_MAX_PROMPTS = 2048
MAX_PARTS = 10_000
"""Messages of a request, and parts of all of them: each is an object to check while everybody else waits."""

_MAX_INT64 = 2**63 - 1
_MAX_PRIORITY = 2**31
_MAX_TOKEN_ID = 2**31 - 1
_MAX_ID_DIGITS = 18

_DEFAULT_COMPLETION_TOKENS = 16

_OneText: TypeAlias = Annotated[str, Field(min_length=1)]
_OneIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]], Field(min_length=1)]
_Texts: TypeAlias = Annotated[list[_OneText], Field(min_length=1, max_length=_MAX_PROMPTS)]
_ManyIds: TypeAlias = Annotated[list[_OneIds], Field(min_length=1, max_length=_MAX_PROMPTS)]
_Prompt: TypeAlias = _OneText | _Texts | _OneIds | _ManyIds
_Stop: TypeAlias = _OneText | Annotated[list[_OneText], Field(max_length=16)]
_Bias: TypeAlias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,18}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"additionalProperties": False}),
]
_Prompts: TypeAlias = list[str] | list[list[int]]


def stated(**bounds: float) -> Any:  # noqa: ANN401 - as Field
    """Return bounds for the API's description of itself; ``SamplingParams`` holds them, in better words."""
    return Field(json_schema_extra=dict(bounds))


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


def few_parts(messages: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
    """Check how many parts messages have together, before any is looked at."""
    contents = (
        [message.get("content") for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_PARTS:
        msg = f"at most {MAX_PARTS} parts go into one request"
        raise ValueError(msg)
    return messages


def _whole_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = "it holds half of a surrogate pair, which is no text"
        raise ValueError(msg) from None
    return text


Text: TypeAlias = Annotated[StrictStr, AfterValidator(_whole_text)]


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


class StreamOptions(Body):
    """How to stream.

    Attributes:
        include_usage: whether a last chunk tells the token counts.
    """

    include_usage: StrictBool = False


class RequestBody(Body):
    """What every body has.

    Attributes:
        model: may be left out: there is one.
    """

    model: Text | None = None


class GenerationRequest(RequestBody):
    """What completions and chats have in common; :class:`~pagefold.request.SamplingParams` says what the fields mean.

    Attributes:
        stream: whether the answer comes in events, as it is made.
        stream_options: how, if it does.
        stop: one text or several.
        max_completion_tokens: OpenAI's newer name of ``max_tokens``; it counts when both are there.
        user: accepted and ignored.
        cache_salt: requests share cached prefixes only with those that bring the same salt.
        priority: the smaller, the sooner it is served; only where the server schedules by priority.
    """

    default_max_tokens: ClassVar[int | None] = None

    max_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    temperature: Annotated[StrictFloat, stated(minimum=0, maximum=2)] = 1.0
    top_p: Annotated[StrictFloat, stated(exclusiveMinimum=0, maximum=1)] = 1.0
    top_k: Annotated[StrictInt, Field(le=_MAX_INT64), stated(minimum=-1)] = 0
    min_p: Annotated[StrictFloat, stated(minimum=0, maximum=1)] = 0.0
    presence_penalty: Annotated[StrictFloat, stated(minimum=-2, maximum=2)] = 0.0
    frequency_penalty: Annotated[StrictFloat, stated(minimum=-2, maximum=2)] = 0.0
    repetition_penalty: Annotated[StrictFloat, stated(exclusiveMinimum=0)] = 1.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_as_bias, json_schema_input_type=_Bias)] = {}  # noqa: RUF012 - pydantic copies defaults
    min_tokens: Annotated[StrictInt, stated(minimum=0)] = 0
    seed: Annotated[StrictInt | None, Field(ge=-_MAX_INT64, le=_MAX_INT64)] = None
    stop: Annotated[list[Text], FailFast(), BeforeValidator(_as_list, json_schema_input_type=_Stop)] = []  # noqa: RUF012 - as above
    stop_token_ids: Annotated[list[Annotated[StrictInt, stated(minimum=0)]], FailFast()] = []  # noqa: RUF012 - as above
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    cache_salt: Annotated[Text | None, Field(min_length=1)] = None
    priority: Annotated[StrictInt, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)] = 0

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict):
            refuse_unsupported(fields, cls.unsupported)
            if fields.get("stream_options") is not None and fields.get("stream") is not True:
                msg = "stream_options is there, but stream is not true."
                raise InvalidRequestError(msg, param="stream_options", remedy="Leave it out, or stream.")
        return fields

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
        return SamplingParams(
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
    logprobs: Annotated[StrictInt | None, stated(minimum=0, maximum=MAX_LOGPROBS)] = None

    def num_logprobs(self) -> int | None:
        """See :class:`GenerationRequest`."""
        return self.logprobs


class TextPart(Body):
    """A piece of a message; other kinds than text are not supported."""

    type: Literal["text"]
    text: Text


class ChatMessage(Body):
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

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_PARTS), FailFast(), BeforeValidator(few_parts)
    ]
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


class TokenizeRequest(RequestBody):
    """``POST /tokenize``: a prompt, or the messages of a chat.

    Attributes:
        model: may be left out: there is one.
        prompt: a text.
        messages: a chat, which is put into the model's template; instead of ``prompt``.
        return_token_strs: whether the text of each token is told too.
    """

    prompt: Text | None = None
    messages: Annotated[
        list[ChatMessage] | None,
        Field(min_length=1, max_length=MAX_PARTS),
        FailFast(),
        BeforeValidator(few_parts),
    ] = None
    return_token_strs: StrictBool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            msg = "Neither prompt nor messages is there, or both are."
            raise InvalidRequestError(msg, param="prompt", remedy="Send one of them.")
        return self


class DetokenizeRequest(RequestBody):
    """``POST /detokenize``.

    Attributes:
        tokens: token ids.
    """

    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, le=_MAX_TOKEN_ID)]], FailFast()]
