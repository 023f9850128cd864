"""What the server answers, in OpenAI's forms and vLLM's: for the API's description of itself, and nothing else."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from pagefold.events import PinCause  # noqa: TC001 - pydantic reads it

__all__ = [
    "STREAMED",
    "AdviceList",
    "AnthropicMessage",
    "BlocksTaken",
    "CacheLayoutTold",
    "ChatCompletion",
    "Completion",
    "CountedTokens",
    "DeletedResponse",
    "Detokenized",
    "Explanation",
    "ExplanationList",
    "Foretold",
    "Model",
    "Models",
    "OpenAIResponse",
    "Pins",
    "Quotas",
    "Tokenized",
    "Unpinned",
    "Warmed",
    "WhatIf",
]

_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}

STREAMED: dict[str, Any] = {"text/event-stream": {"schema": _EVENT}}
"""The schema of an answer in pieces, with ``stream``: events whose data are JSON, or ``[DONE]``."""


class _CachedTokens(BaseModel):
    cached_tokens: int = Field(ge=0)
    cached_tokens_by_tier: dict[str, int] | None = None


class _ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class _Reasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[_ReasoningText]


class _OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class _CompletionTokensDetails(BaseModel):
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(ge=1)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    prompt_tokens_details: _CachedTokens
    completion_tokens_details: _CompletionTokensDetails | None = None
    kv_kept_share: float | None = Field(default=None, ge=0, le=1)


class _Choice(BaseModel):
    index: int = Field(ge=0)
    finish_reason: str
    logprobs: dict[str, Any] | None


class _CompletionChoice(_Choice):
    text: str


class Completion(BaseModel):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[_CompletionChoice] = Field(min_length=1)
    usage: _Usage


class _CalledFunction(BaseModel):
    name: str
    arguments: str


class _ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _ChatAnswer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[_ToolCall] = Field(default=[], min_length=1)
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class _ChatChoice(_Choice):
    message: _ChatAnswer


class ChatCompletion(BaseModel):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[_ChatChoice] = Field(min_length=1)
    usage: _Usage


class _OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class _OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[_OutputText]


class _FunctionCall(BaseModel):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class _InputTokensDetails(_CachedTokens):
    cache_write_tokens: int = Field(ge=0)


class _ResponseUsage(BaseModel):
    input_tokens: int = Field(ge=1)
    input_tokens_details: _InputTokensDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: _OutputTokensDetails
    total_tokens: int = Field(ge=1)


class OpenAIResponse(BaseModel):
    """The answer of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    model: str
    output: list[_Reasoning | _OutputMessage | _FunctionCall]
    usage: _ResponseUsage
    store: bool


class DeletedResponse(BaseModel):
    """The answer of ``DELETE /v1/responses/{response_id}``."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class _TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class _ToolUseBlock(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class _CacheCreation(BaseModel):
    ephemeral_5m_input_tokens: int = Field(ge=0)
    ephemeral_1h_input_tokens: int = Field(ge=0)


class _MessageUsage(BaseModel):
    input_tokens: int = Field(ge=0)
    cache_creation_input_tokens: int = Field(ge=0)
    cache_read_input_tokens: int = Field(ge=0)
    cache_creation: _CacheCreation
    output_tokens: int = Field(ge=0)


class AnthropicMessage(BaseModel):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[_ThinkingBlock | _TextBlock | _ToolUseBlock] = Field(min_length=1)
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: _MessageUsage


class CountedTokens(BaseModel):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int = Field(ge=1)


class Tokenized(BaseModel):
    """The answer of ``/tokenize``."""

    count: int = Field(ge=0)
    max_model_len: int = Field(ge=2)
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The answer of ``/detokenize``."""

    prompt: str


class Model(BaseModel):
    """A model, as ``/v1/models`` has it; an adapter has a ``root``, its folder, and a ``parent``, its model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(ge=2)
    root: str | None = None
    parent: str | None = None


class Models(BaseModel):
    """The answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[Model]


class _Pin(BaseModel):
    id: str
    object: Literal["cache.pin"]
    tenant: str
    cache_salt: str
    num_tokens: int = Field(ge=1)
    num_blocks: int = Field(ge=1)
    retention_priority: float = Field(ge=0, le=100)
    age_s: float = Field(ge=0)
    ttl_left_s: float | None
    is_hint: bool


class _GonePin(BaseModel):
    id: str
    num_blocks: int = Field(ge=0)
    cause: PinCause


class Warmed(BaseModel):
    """The answer of ``/v1/cache/warm``. ``cause`` is there if the pin has gone already."""

    id: str
    object: Literal["cache.warm"]
    num_prompt_tokens: int = Field(ge=1)
    num_kept_tokens: int = Field(ge=1)
    num_cached_tokens: int = Field(ge=0)
    pin: _Pin | None
    cause: PinCause | None


class CacheLayoutTold(BaseModel):
    """The answer of ``GET /v1/cache/layout``."""

    object: Literal["cache.layout"]
    label: str
    model: str
    layout: str
    dtype: str
    block_size: int = Field(ge=1)
    block_bytes: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    tiers: list[str]
    max_body_bytes: int = Field(ge=1)


class BlocksTaken(BaseModel):
    """The answer of ``/v1/cache/import``: how many blocks each tier has now."""

    object: Literal["cache.import"]
    num_blocks: int = Field(ge=1)
    num_kept: dict[str, int]


class Pins(BaseModel):
    """The answer of ``GET /v1/cache/pins``."""

    object: Literal["list"]
    data: list[_Pin]
    dropped: list[_GonePin]
    num_blocks: int = Field(ge=0)
    max_blocks: int = Field(ge=0)


class _Quota(BaseModel):
    object: Literal["cache.quota"]
    tenant: str
    num_blocks: int = Field(ge=0)
    num_cached: int = Field(ge=0)
    floor_blocks: int = Field(ge=0)
    cap_blocks: int | None


class Quotas(BaseModel):
    """The answer of ``GET /v1/cache/quotas``."""

    object: Literal["list"]
    data: list[_Quota]


class Unpinned(BaseModel):
    """The answer of ``DELETE /v1/cache/pins/{pin_id}``."""

    id: str
    object: Literal["cache.pin"]
    deleted: Literal[True]


class DeletedSession(BaseModel):
    """The answer of ``DELETE /v1/sessions/{session_id}``.

    Attributes:
        num_sessions: how many ended: itself, and those of its sub-agents.
        num_blocks: blocks that lost their value by it.
        num_running: requests of theirs that go on; what they have loses its value when they end.
    """

    id: str
    object: Literal["session"]
    deleted: Literal[True]
    num_sessions: int = Field(ge=1)
    num_blocks: int = Field(ge=0)
    num_running: int = Field(ge=0)


class _ToldDifference(BaseModel):
    token: int = Field(ge=0)
    nearest: str
    text_before: str | None
    own_text: str | None
    nearest_text: str | None


class _ToldEviction(BaseModel):
    ago_s: float | None
    policy: str | None
    score: float | None
    for_: str | None = Field(alias="for")


class _ToldMiss(BaseModel):
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    tokens: int = Field(ge=1)
    cause: str
    told: str
    remedy: str | None
    fields: list[str]
    detail: str | None
    difference: _ToldDifference | None
    eviction: _ToldEviction | None


class _ToldWait(BaseModel):
    cause: str
    told: str
    ms: float


class _ToldPreemption(BaseModel):
    tokens: int
    cause: str
    told: str
    for_: str | None = Field(alias="for")


class _ExplainedRequest(BaseModel):
    id: str
    prompt_tokens: int
    cached_tokens: int
    cached_tokens_from_tiers: int
    computed_tokens: int
    output_tokens: int
    finish_reason: str | None
    was_let_in: bool
    queue_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    misses: list[_ToldMiss]
    waits: list[_ToldWait]
    preemptions: list[_ToldPreemption]
    recomputed: list[_ToldMiss]


class _Refused(BaseModel):
    status: int
    message: str


class _Reach(BaseModel):
    complete_for_s: float | None


class _ListedExplanation(BaseModel):
    object: Literal["explanation"]
    id: str
    refused: _Refused | None
    requests: list[_ExplainedRequest]


class Explanation(_ListedExplanation):
    """Why, of one response."""

    reach: _Reach


class Foretold(BaseModel):
    """What a request would find."""

    object: Literal["explanation.foretold"]
    prompt_tokens: int
    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]
    computed_tokens: int
    prefill_s: float | None
    misses: list[_ToldMiss]


class ExplanationList(BaseModel):
    """Why, of several."""

    object: Literal["list"]
    data: list[_ListedExplanation]
    reach: _Reach


class _Advice(BaseModel):
    cause: str
    tenant: str | None
    section: str | None
    told: str
    remedy: str
    tokens: int = Field(ge=1)
    num_requests: int = Field(ge=1)
    tokens_per_request: int
    share_of_prompt_time: float = Field(ge=0)
    token: int | None
    request: str | None
    nearest: str | None
    own_text: str | None
    nearest_text: str | None


class AdviceList(BaseModel):
    """What costs most, the worst first."""

    object: Literal["list"]
    data: list[_Advice]
    num_requests: int
    computed_tokens: int
    since_s: float | None


class _Point(BaseModel):
    num_blocks: int
    bytes: int
    hit_ratio: float


class _PolicyCurve(BaseModel):
    policy: str
    is_used: bool
    points: list[_Point]


class _TierShare(BaseModel):
    tier: Literal["device", "host", "disk"]
    num_blocks: int
    hit_ratio_at_least: float
    hit_ratio_up_to_it: float = Field(description="At most: if no two tiers have the same blocks.")


class _TenantCurve(BaseModel):
    tenant: str
    points: list[_Point]


class WhatIf(BaseModel):
    """What the cache would find with another size, or another policy."""

    object: Literal["cache.whatif"]
    block_size: int
    num_blocks: int
    blocks_per_place: int = Field(description="Blocks of the pool that each block told of here stands for.")
    num_accesses: int
    num_tokens: int
    sampled_share: float
    since_s: float
    policies: list[_PolicyCurve]
    tiers: list[_TierShare]
    tenants: list[_TenantCurve]
    told: str
