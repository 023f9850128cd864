"""What clients send to ``/v1/chat/completions``: messages, and tools that the model may call."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, StrictBool, StrictInt, model_validator

from pagefold.errors import InvalidRequestError
from pagefold.sampling import MAX_LOGPROBS
from pagefold.server.ignored import Body
from pagefold.server.retention import PromptCacheRetention  # noqa: TC001 - pydantic reads it
from pagefold.server.schemas import MAX_PARTS, GenerationRequest, Text, few_parts
from pagefold.server.template_fields import TemplateVariables  # noqa: TC001 - pydantic reads it
from pagefold.server.tools.asked import AskedTools
from pagefold.server.tools.schemas import Tool, ToolCall, ToolChoice, WhichTool
from pagefold.server.unsupported import IN_CHAT, IN_CHAT_MESSAGES, refuse_unsupported
from pagefold.tokenizer import ChatOptions

__all__ = ["ChatMessage", "ChatRequest", "Templated", "TextPart", "check_one_prompt"]

_MAX_TOOLS = 128


def _as_parts(value: object) -> list[object]:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    msg = "it must be a text or a list of text parts"
    raise ValueError(msg)


_NOT_TEXT = frozenset(
    {
        *("image_url", "image", "image_pil", "image_embeds", "input_image"),
        *("input_audio", "audio_url", "audio", "audio_embeds"),
        *("video_url", "video", "file", "input_file"),
    }
)
"""Kinds of parts that OpenAI and vLLM have."""


def _role(value: object) -> object:
    if value == "function":
        msg = "it is OpenAI's older form of a tool's answer: send role tool, with the tool_call_id"
        raise ValueError(msg)
    return value


def _kind(value: object) -> object:
    if isinstance(value, str) and value in _NOT_TEXT:
        msg = "this model takes text only, no images, audio, video or files"
        raise ValueError(msg)
    return value


class TextPart(Body):
    """A piece of a message; other kinds than text are not supported. A refusal is a text that the assistant said."""

    type: Annotated[Literal["text", "refusal"], BeforeValidator(_kind)]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict) and fields.get("type") == "refusal":
            return {"text" if name == "refusal" else name: value for name, value in fields.items() if name != "text"}
        return fields


class ChatMessage(Body):
    """One message of a chat.

    Attributes:
        role: ``developer`` is OpenAI's newer name of ``system``.
        content: a text, or text parts, which are joined by newlines as vLLM does. The assistant's may be left out
            where it called tools, refused, or was cut off while it thought.
        refusal: what the assistant said instead of ``content``.
        reasoning_content: what the assistant thought. Templates decide what of it the model sees again.
        reasoning: vLLM's newer name of the same.
        name: of who speaks, for templates that show it.
        tool_calls: what the assistant called.
        tool_call_id: which of the calls a tool's message answers.
    """

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)]
    content: Annotated[
        list[TextPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
    ] = []  # noqa: RUF012 - as above
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    tool_call_id: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict):
            refuse_unsupported(fields, IN_CHAT_MESSAGES)
        return fields

    @model_validator(mode="after")
    def _check_whole(self) -> ChatMessage:
        for field in ("tool_calls", "refusal", "reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                msg = f"only the assistant's messages may have {field}"
                raise ValueError(msg)
        if any(part.type == "refusal" for part in self.content) and self.role != "assistant":
            msg = "only the assistant's messages may have parts that are a refusal"
            raise ValueError(msg)
        if self.role == "tool" and self.tool_call_id is None:
            msg = "its tool_call_id is missing, which names the call that it answers"
            raise ValueError(msg)
        if not (self.tool_calls or self.thought or self.refusal or "content" in self.model_fields_set):
            msg = "its content is missing"
            raise ValueError(msg)
        return self

    @property
    def thought(self) -> str | None:
        """What the assistant thought, under whichever name."""
        return self.reasoning_content or self.reasoning

    @property
    def num_characters(self) -> int:
        """How many characters its texts have, but for calls."""
        beside = (self.refusal, self.thought, self.name)
        return sum(len(part.text) for part in self.content) + sum(len(text) for text in beside if text is not None)

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates want it."""
        role = "system" if self.role == "developer" else self.role
        content = "\n".join(part.text for part in self.content) or self.refusal or ""
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def check_one_prompt(prompt: object, messages: object) -> None:
    """See that a body has a prompt or the messages of a chat, and not both.

    Raises:
        InvalidRequestError: it has neither, or both.
    """
    if (prompt is None) == (messages is None):
        msg = "Neither prompt nor messages is there, or both are."
        raise InvalidRequestError(msg, param="prompt", remedy="Send one of them.")


class Templated(Body):
    """What a body says of how the model's chat template is asked for its messages.

    Attributes:
        messages: the chat; None where there is another prompt.
        tools: what the model hears of.
        chat_template_kwargs: variables that the template reads, such as ``enable_thinking``.
        add_generation_prompt: whether the assistant's answer is begun behind the messages, as the template begins it.
        continue_final_message: the answer goes on with the last message, which is the assistant's and stays open.
    """

    messages: Annotated[
        list[ChatMessage] | None, Field(min_length=1, max_length=MAX_PARTS), FailFast(), BeforeValidator(few_parts)
    ] = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    chat_template_kwargs: TemplateVariables = {}  # noqa: RUF012 - as above
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            msg = "continue_final_message and add_generation_prompt are both true: an answer goes on or begins."
            raise InvalidRequestError(msg, param="continue_final_message", remedy="Send one of them.")
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or last.tool_calls:
            msg = "continue_final_message is true, but the last message is not what the assistant said."
            raise InvalidRequestError(msg, param="continue_final_message", remedy="Let the last message be one.")
        return self

    def chat_options(self) -> ChatOptions:
        """Return how the template is asked for the chat's text."""
        return ChatOptions(
            variables=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class Prediction(Body):
    """What an answer is expected to say, mostly: OpenAI's predicted outputs, from which drafts are made.

    Attributes:
        type: ``content``.
        content: a text, or text parts, one behind the other.
    """

    type: Literal["content"]
    content: Annotated[
        list[TextPart], FailFast(), BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart])
    ]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(part.text for part in self.content)


class ChatRequest(Templated, GenerationRequest):
    """``POST /v1/chat/completions``. Without ``max_tokens`` an answer may be as long as fits.

    Attributes:
        messages: the chat.
        logprobs: whether each token's logprob is told.
        top_logprobs: with it, those of so many most likely tokens.
        tool_choice: whether it must, and what; ``auto`` where there are tools.
        parallel_tool_calls: whether one answer may have several calls.
        include_reasoning: whether the answer tells what the model thought.
        prediction: what the answer is expected to say.
        prompt_cache_retention: ``24h`` asks that the prompt stays cached for a day; ``in_memory`` for nothing more.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_CHAT

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_PARTS), FailFast(), BeforeValidator(few_parts)
    ]
    logprobs: StrictBool = False
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tool_choice: ToolChoice = WhichTool("auto")
    parallel_tool_calls: StrictBool = True
    include_reasoning: StrictBool = True
    prediction: Prediction | None = None
    prompt_cache_retention: PromptCacheRetention | None = None

    def asked_tools(self) -> AskedTools:
        """Return what it says of tools."""
        return AskedTools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def num_logprobs(self) -> int | None:
        """See :class:`GenerationRequest`.

        Raises:
            InvalidRequestError: alternatives are asked for, but not logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            msg = f"top_logprobs is {self.top_logprobs}, but logprobs is not true."
            raise InvalidRequestError(msg, param="top_logprobs", remedy="Leave it out, or send logprobs: true.")
        return self.top_logprobs if self.logprobs else None
