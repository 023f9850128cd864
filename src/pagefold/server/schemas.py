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

from pagefold.config import MAX_PRIORITY, Account
from pagefold.errors import InvalidRequestError
from pagefold.request import MAX_LOGPROBS, MAX_RETURNS_IN_S, Caller, SamplingParams
from pagefold.server.ignored import Body
from pagefold.server.structured_fields import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    Structured,
    StructuredOutputs,
    the_one_of,
)
from pagefold.server.tools.schemas import Tool, ToolCall, ToolChoice  # noqa: TC001 - pydantic reads them
from pagefold.server.unsupported import IN_CHAT, IN_COMPLETIONS, refuse_unsupported

__all__ = [
    "MAX_PARTS",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "OneIds",
    "OneText",
    "RequestBody",
    "StreamOptions",
    "Text",
    "TextPart",
    "TokenizeRequest",
    "checked_ids",
    "checked_text",
    "few_parts",
    "stated",
]

_MAX_PROMPTS = 2048
_MAX_TOOLS = 128
_MAX_STOP_IDS = 4096
MAX_PARTS = 10_000
"""Messages of a request, and parts of all of them: each is an object to check while everybody else waits."""

_MAX_INT64 = 2**63 - 1
_MAX_TOKEN_ID = 2**31 - 1
_MAX_ID_DIGITS = 18

_DEFAULT_COMPLETION_TOKENS = 16

OneText: TypeAlias = Annotated[str, Field(min_length=1)]
OneIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]], Field(min_length=1)]
_Texts: TypeAlias = Annotated[list[OneText], Field(min_length=1, max_length=_MAX_PROMPTS)]
_ManyIds: TypeAlias = Annotated[list[OneIds], Field(min_length=1, max_length=_MAX_PROMPTS)]
_Prompt: TypeAlias = OneText | _Texts | OneIds | _ManyIds
_Stop: TypeAlias = OneText | Annotated[list[OneText], Field(max_length=16)]
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


def checked_text(text: object) -> str:
    """Check a prompt that is, or should be, a text."""
    if not isinstance(text, str):
        msg = f"it holds texts and a {type(text).__name__}; all prompts must be of one kind"
        raise ValueError(msg)  # noqa: TRY004 - as above
    return _whole_text(text)


def checked_ids(token_ids: object) -> list[int]:
    """Check a prompt of token ids."""
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


class CachedRequest(RequestBody):
    """What every body has whose prompt is cached for others of the same caller.

    Attributes:
        cache_salt: requests share cached prefixes only with those that bring the same salt.
        priority: the smaller, the sooner it is served; only where the server schedules by priority. That of the key's
            customer class, else 0, if it is not there.
        returns_in_s: so many seconds after its end the client expects to go on from it. Its blocks are worth keeping,
            and what only slow tiers have of them by then is brought before.
    """

    cache_salt: Annotated[Text | None, Field(min_length=1)] = None
    priority: Annotated[StrictInt | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    returns_in_s: Annotated[StrictFloat | None, stated(minimum=0, maximum=MAX_RETURNS_IN_S)] = None

    def caller(self, account: Account) -> Caller:
        """Return who asks, and on what terms: the tenant is the account's, whatever the body says."""
        priority = account.priority if self.priority is None else self.priority
        return Caller(
            tenant=account.tenant,
            cache_salt=self.cache_salt or "",
            priority=priority,
            returns_in_s=self.returns_in_s,
        )


class GenerationRequest(CachedRequest):
    """What completions and chats have in common; :class:`~pagefold.request.SamplingParams` says what the fields mean.

    Attributes:
        stream: whether the answer comes in events, as it is made.
        stream_options: how, if it does.
        stop: one text or several.
        max_completion_tokens: OpenAI's newer name of ``max_tokens``; it counts when both are there.
        user: accepted and ignored.
        response_format: what the output must look like: text, any JSON object, or JSON of a schema.
        structured_outputs: the same in vLLM's form: ``json``, ``regex``, ``choice``, ``grammar`` or ``json_object``.
        guided_json: vLLM's older form of ``structured_outputs.json``.
        guided_regex: of its ``regex``.
        guided_choice: of its ``choice``.
        guided_grammar: of its ``grammar``.
    """

    default_max_tokens: ClassVar[int | None] = None

    n: Annotated[StrictInt, stated(minimum=1)] = 1
    best_of: Annotated[StrictInt | None, stated(minimum=1)] = None
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
    stop_token_ids: Annotated[
        list[Annotated[StrictInt, stated(minimum=0)]], Field(max_length=_MAX_STOP_IDS), FailFast()
    ] = []  # noqa: RUF012 - as above
    ignore_eos: StrictBool = False
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None

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

    def sampling(self, structured: Structured | None = None) -> SamplingParams:
        """Return how to sample, and what the output must look like.

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
            structured_outputs=None if structured is None else structured.params,
        )
        if how.ranks_samples and self.stream:
            msg = (
                f"best_of is {self.best_of} and n is {self.n}: which are the best is known at the end, not in a stream."
            )
            raise InvalidRequestError(msg, param="best_of", remedy="Leave it out, or do not stream.")
        return how

    def structured(self) -> Structured | None:
        """Return what the output must look like, if that is said.

        Raises:
            InvalidRequestError: two fields say it.
        """
        return the_one_of(
            {
                "response_format": self.response_format,
                "structured_outputs": self.structured_outputs,
                "guided_json": self.guided_json,
                "guided_regex": self.guided_regex,
                "guided_choice": self.guided_choice,
                "guided_grammar": self.guided_grammar,
            }
        )

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
        content: a text, or text parts, which are joined by newlines as vLLM does. The assistant's may be left out
            where it called tools.
        tool_calls: what the assistant called.
        tool_call_id: which of the calls a tool's message answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
    ] = []  # noqa: RUF012 - as above
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _check_whole(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            msg = "only the assistant's messages may have tool_calls"
            raise ValueError(msg)
        if self.role == "tool" and self.tool_call_id is None:
            msg = "its tool_call_id is missing, which names the call that it answers"
            raise ValueError(msg)
        if not self.tool_calls and "content" not in self.model_fields_set:
            msg = "its content is missing"
            raise ValueError(msg)
        return self

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates want it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "\n".join(part.text for part in self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``. Without ``max_tokens`` an answer may be as long as fits.

    Attributes:
        messages: the chat.
        logprobs: whether each token's logprob is told.
        top_logprobs: with it, those of so many most likely tokens.
        tools: what the model may call.
        tool_choice: whether it must, and what; ``auto`` where there are tools.
        parallel_tool_calls: whether one answer may have several calls.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_CHAT

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_PARTS), FailFast(), BeforeValidator(few_parts)
    ]
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool = True

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
