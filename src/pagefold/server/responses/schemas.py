"""What clients send to ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, FailFast, Field, StrictBool, StrictFloat, StrictInt, model_validator

from pagefold.sampling import SamplingParams
from pagefold.server.ignored import Body
from pagefold.server.responses.functions import Choice, Function, FunctionChoice
from pagefold.server.responses.items import Item
from pagefold.server.responses.text_config import TextConfig
from pagefold.server.retention import PromptCacheRetention  # noqa: TC001 - pydantic reads it
from pagefold.server.schemas import MAX_PARTS, Text, TieredRequest, few_parts, stated
from pagefold.server.tools.asked import AskedTools
from pagefold.server.tools.schemas import WhichTool
from pagefold.server.unsupported import IN_RESPONSES, refuse_unsupported

__all__ = ["ResponseRequest"]

_MAX_METADATA = 16
_MAX_METADATA_NAME = 64
_MAX_METADATA_VALUE = 512
"""OpenAI's own bounds. They are kept, and told again in each of a stream's whole responses."""
_MAX_USER = 512
_MAX_TOOLS = 128
_MAX_INCLUDED = 16

_AUTO = Choice(WhichTool("auto"), "auto")


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else few_parts(value)


def _has_it(included: object) -> object:
    if included == "message.output_text.logprobs":
        msg = "logprobs are told by /v1/chat/completions and /v1/completions"
        raise ValueError(msg)
    return included


_Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_PARTS)]


class PromptCacheOptions(Body):
    """What is asked of the cache.

    Attributes:
        comparison_response_id: an earlier response, whose prompt this one should share.
    """

    known: ClassVar[frozenset[str]] = frozenset({"mode", "ttl"})  # all prompts are cached, for as long as there is room

    comparison_response_id: Text | None = None


class ResponseRequest(TieredRequest):
    """``POST /v1/responses``; :class:`~pagefold.sampling.SamplingParams` says what the fields of sampling mean.

    Attributes:
        input: a text, which is the user's message, or items: messages, calls, and what calls brought.
        instructions: a system message before them; those of a previous response do not count.
        previous_response_id: a stored response that this one goes on from.
        store: whether this one is stored, so that another can go on from it.
        include: what else is told: of what nothing here has.
        max_output_tokens: without, an answer may be as long as fits.
        text: what the answer must look like.
        tools: functions that the model may call.
        tool_choice: whether it must, and what.
        parallel_tool_calls: whether one answer may have several calls.
        max_tool_calls: of tools that the server itself calls, of which there are none.
        stream: whether the answer comes in events, as it is made.
        prompt_cache_options: asks what differs from an earlier response, and why tokens of the prompt were computed.
        prompt_cache_retention: ``24h`` asks that the prompt stays cached for a day; ``in_memory`` for nothing more.
        metadata: told back.
        user: told back.
    """

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = IN_RESPONSES
    known: ClassVar[frozenset[str]] = frozenset(
        {
            "prompt_cache_key",  # prompts find what they share by themselves
            "safety_identifier",
            "stream_options",  # nothing is obfuscated
            "truncation",  # refused, but for what is done anyway
        }
    )

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_PARTS),
        FailFast(),
        BeforeValidator(_as_items, json_schema_input_type=str | _Items),
    ]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: StrictBool | None = None
    include: Annotated[list[Annotated[Text, BeforeValidator(_has_it)]], Field(max_length=_MAX_INCLUDED)] = []  # noqa: RUF012 - pydantic copies it
    max_output_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    text: TextConfig = Field(default_factory=TextConfig)
    tools: Annotated[list[Function], Field(max_length=_MAX_TOOLS), FailFast()] = []  # noqa: RUF012 - as above
    tool_choice: FunctionChoice = Field(default_factory=lambda: _AUTO)
    parallel_tool_calls: StrictBool = True
    max_tool_calls: Annotated[StrictInt | None, Field(ge=1)] = None
    temperature: Annotated[StrictFloat, stated(minimum=0, maximum=2)] = 1.0
    top_p: Annotated[StrictFloat, stated(exclusiveMinimum=0, maximum=1)] = 1.0
    stream: StrictBool = False
    prompt_cache_options: PromptCacheOptions = Field(default_factory=PromptCacheOptions)
    prompt_cache_retention: PromptCacheRetention | None = None
    metadata: Annotated[
        dict[
            Annotated[Text, Field(max_length=_MAX_METADATA_NAME)],
            Annotated[Text, Field(max_length=_MAX_METADATA_VALUE)],
        ],
        Field(max_length=_MAX_METADATA),
    ] = {}  # noqa: RUF012 - as above
    user: Annotated[Text | None, Field(max_length=_MAX_USER)] = None
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

    def asked_tools(self) -> AskedTools:
        """Return what it says of tools."""
        tools = [function.as_tool() for function in self.tools]
        return AskedTools(tools, self.tool_choice.which, self.parallel_tool_calls)

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
