"""The answer of ``/v1/dashboard``: for the API's description of itself, and nothing else."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

__all__ = ["Dashboard"]


class _Engine(BaseModel):
    is_healthy: bool
    running: int
    waiting_for_capacity: int
    waiting_for_tiers: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    preemptions: int


class _Tier(BaseModel):
    name: str
    num_blocks: int | None = Field(description="How many it has room for; null where that is not known.")
    now: dict[str, int]
    series: dict[str, list[int | None]]
    is_fast: bool | None = Field(description="Of slow tiers: whether loading is thought to be sooner than computing.")


class _Lookups(BaseModel):
    device: list[int]
    tiers: list[int]
    computed: list[int]


class _Cause(BaseModel):
    cause: str
    tokens: int
    told: str
    remedy: str | None


class _Eviction(BaseModel):
    rule: str
    told: str
    blocks: int
    series: list[int]


class _Request(BaseModel):
    id: str
    tenant: str
    ago_s: float
    queue_s: float
    fetch_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    device_tokens: int
    tier_tokens: int
    output_tokens: int
    cause: str | None
    cause_tokens: int
    finish_reason: str


class _Prefix(BaseModel):
    name: str
    tenant: str
    blocks: int
    tokens: int
    finds: int
    ago_s: float
    is_cached: bool


class Dashboard(BaseModel):
    """What the last ten minutes did to the cache; series are counts in pieces of ``piece_s``, the newest last."""

    object: Literal["dashboard"]
    version: str
    model: str
    policy: str
    block_size: int
    piece_s: float
    num_pieces: int
    is_whole: bool
    engine: _Engine
    tiers: list[_Tier]
    lookups: _Lookups
    output_tokens: list[int]
    misses: list[_Cause]
    evictions: list[_Eviction]
    explains: bool = Field(description="Whether requests are remembered; without, there are none here.")
    requests: list[_Request]
    prefixes: list[_Prefix]
    more: dict[str, str | None] = Field(description="Where to ask for what a dashboard shows beside.")
