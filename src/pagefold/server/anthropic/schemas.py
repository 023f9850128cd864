"""What clients send to ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, StrictBool, StrictFloat, StrictInt, model_validator

from pagefold.errors import InvalidRequestError
from pagefold.sampling import SamplingParams
from pagefold.server.anthropic.blocks import MessageParam, Texts, breakpoints_of, chat_of
from pagefold.server.anthropic.cache_control import Breakpoint, CacheControl, check_breakpoints
from pagefold.server.anthropic.tools import Choice, MessageTool, ToolUseChoice
from pagefold.server.chat_prompt import ChatCut
from pagefold.server.ignored import Body
from pagefold.server.schemas import MAX_PARTS, CachedRequest, Text, few_parts
from pagefold.server.structured_fields import Structured
from pagefold.server.tools.asked import AskedTools
from pagefold.server.tools.schemas import WhichTool
from pagefold.server.unsupported import IN_MESSAGES, refuse_unsupported
from pagefold.structured.params import StructuredOutputsParams
from pagefold.tokenizer import ChatOptions

if TYPE_CHECKING:
    from pagefold.server.chat_schemas import ChatMessage

__all__ = ["CountRequest", "MessageRequest"]

_MAX_TOOLS = 128
_MAX_STOPS = 16

_AUTO = Choice(WhichTool("auto"), is_parallel=True)


class OutputFormat(Body):
    """The form of an answer.

    Attributes:
        schema_: the field ``schema``: a JSON schema of it.
    """

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """What the answer must look like.

    Attributes:
        format: JSON of a schema.
        effort: accepted, and told to no model.
    """

    format: OutputFormat | None = None
    effort: Text | None = None


class ThinkingConfig(Body):
    """Whether the model thinks, and tells it.

    Attributes:
        type: ``enabled``, ``disabled``, or ``adaptive`` for as the model likes.
    """

    known: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class Diagnostics(Body):
    """What is asked of the cache.

    Attributes:
        previous_message_id: an earlier message, whose prompt this one should share; None for the first of a chat.
    """

    previous_message_id: Text | None = None


class CountRequest(CachedRequest):
    """``POST /v1/messages/count_tokens``: a prompt.

    Attributes:
        messages: the chat; where the last message is the assistant's, the answer goes on with it.
        system: a text or texts before it.
        tools: what the model may call.
        tool_choice: whether it must, and what.
        thinking: whether the model thinks before its answer, and its thoughts are told.
        output_config: what the answer must look like.
        cache_control: a breakpoint of the cache at the end of the prompt.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_MESSAGES
    known: ClassVar[frozenset[str]] = frozenset(
        {
            "context_management",  # refused, but for what means nothing
            "inference_geo",
            "metadata",
            "service_tier",
        }
    )

    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_PARTS), FailFast(), BeforeValidator(few_parts)
    ]
    system: Texts = []  # noqa: RUF012 - pydantic copies it
    tools: Annotated[list[MessageTool], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    tool_choice: ToolUseChoice = Field(default_factory=lambda: _AUTO)
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, fields: Any) -> Any:  # noqa: ANN401 - whatever the JSON was
        if isinstance(fields, dict):
            refuse_unsupported(fields, cls.unsupported)
        return fields

    @property
    def _kind_of_thinking(self) -> str | None:
        return None if self.thinking is None else self.thinking.type

    @property
    def _is_continued(self) -> bool:
        """Whether the answer goes on with a message of the assistant's."""
        return self.messages[-1].role == "assistant"

    def chat(self) -> list[ChatMessage]:
        """Return the chat that is asked.

        Raises:
            InvalidRequestError: the last message is the assistant's, and nothing that can be gone on with.
        """
        chat = chat_of(self.system, self.messages)
        if self._is_continued and (chat[-1].tool_calls or not any(part.text.strip() for part in chat[-1].content)):
            msg = "The last message is the assistant's, and holds calls, or no text to go on with."
            raise InvalidRequestError(msg, param="messages", remedy="End with a message of the user's, or with a text.")
        return chat

    def chat_options(self) -> ChatOptions:
        """Return how the chat is put into text: templates of thinking models know ``enable_thinking``."""
        kind = self._kind_of_thinking
        variables = {} if kind in (None, "adaptive") else {"enable_thinking": kind == "enabled"}
        return ChatOptions(
            variables=variables,
            add_generation_prompt=not self._is_continued,
            continue_final_message=self._is_continued,
        )

    def tells_thinking(self, *, can_be_told: bool) -> bool:
        """Return whether thoughts are told; where nobody asks for them they are left out.

        Raises:
            InvalidRequestError: they must be, and cannot be told from the answer.
        """
        kind = self._kind_of_thinking
        if kind == "enabled" and not can_be_told:
            msg = "thinking is enabled, and this server does not know how its model marks its thoughts."
            remedy = 'Leave it out, send {"type": "adaptive"}, or start the server with --reasoning-parser.'
            raise InvalidRequestError(msg, param="thinking", remedy=remedy)
        return kind in ("enabled", "adaptive")

    def cache_lifetime(self) -> str:
        """Return the lifetime of the last breakpoint of the cache; 5m where there is none.

        Raises:
            InvalidRequestError: there are too many, or they are out of order.
        """
        return check_breakpoints(
            [
                *(tool.cache_control for tool in self.tools),
                *(text.cache_control for text in self.system),
                *(control for message in self.messages for control in message.controls()),
                self.cache_control,
            ]
        )

    def breakpoints(self) -> list[Breakpoint]:
        """Return the breakpoints within the prompt; ``cache_control`` of the request itself is at its end."""
        of_tools = [
            Breakpoint(tool.cache_control.ttl_s, ChatCut((), num_tools))
            for num_tools, tool in enumerate(self.tools, 1)
            if tool.cache_control is not None
        ]
        return [*of_tools, *breakpoints_of(self.system, self.messages)]

    def asked_tools(self) -> AskedTools:
        """Return what it says of tools."""
        return AskedTools([tool.as_tool() for tool in self.tools], self.tool_choice.which, self.tool_choice.is_parallel)

    def structured(self) -> Structured | None:
        """Return what the output must look like, if that is said."""
        form = self.output_config.format
        if form is None:
            return None
        return Structured(StructuredOutputsParams(json=form.schema_, lenient=True), "output_config")


class MessageRequest(CountRequest):
    """``POST /v1/messages``; :class:`~pagefold.sampling.SamplingParams` says what the fields of sampling mean.

    Attributes:
        max_tokens: how long the answer may be; it may be less long where the context ends before.
        stop_sequences: texts that end the answer.
        stream: whether the answer comes in events, as it is made.
        diagnostics: asks what differs from an earlier message, and why tokens of the prompt were computed.
    """

    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stop_sequences: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=_MAX_STOPS), FailFast()] = []  # noqa: RUF012 - as above
    temperature: Annotated[StrictFloat, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[StrictFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=0, le=2**63 - 1)] = 0
    stream: StrictBool = False
    diagnostics: Diagnostics | None = None
    # ours
    seed: Annotated[StrictInt | None, Field(ge=1 - 2**63, le=2**63 - 1)] = None
    ignore_eos: StrictBool = False

    def sampling(self, num_left: int) -> SamplingParams:
        """Return how to sample, where the context leaves ``num_left`` tokens to the answer."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=min(self.max_tokens, max(1, num_left)),
            stop=tuple(self.stop_sequences),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )
