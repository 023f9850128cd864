"""What the admin sends to warm the cache."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictFloat,
    model_validator,
)

from pagefold.request import DEFAULT_RETENTION_PRIORITY, WarmUp
from pagefold.server.chat_schemas import ChatMessage, check_one_prompt
from pagefold.server.completion_schemas import OnePrompt  # noqa: TC001 - pydantic reads it
from pagefold.server.schemas import (
    MAX_KIND_CHARACTERS,
    MAX_PARTS,
    MAX_SALT_CHARACTERS,
    RequestBody,
    Text,
    few_parts,
    stated,
)

__all__ = ["WarmRequest"]


class WarmRequest(RequestBody):
    """``POST /v1/cache/warm``: a prompt to be cached before anybody sends it. Unknown fields are refused.

    Attributes:
        prompt: a text, or token ids.
        messages: the beginning of a chat; instead of ``prompt``.
        tenant: the tenant whose requests find it; without it those whom no key file names.
        cache_salt: for requests that bring this one.
        kv_keep: for requests of which so large a share of older tokens is kept; without it the default is warmed.
        kv_quality: the same by name.
        pin: whether it is kept from being evicted.
        ttl_s: seconds until the pin ends by itself; never if it is not there.
        retention_priority: of the pin, 0 to 100. It halves every ``--pin-half-life``; when memory is short the least
            goes first, and of equals the oldest. TensorRT-LLM's name and range; not a request's ``priority``.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    prompt: OnePrompt = None
    messages: Annotated[
        list[ChatMessage] | None, Field(min_length=1, max_length=MAX_PARTS), FailFast(), BeforeValidator(few_parts)
    ] = None
    tenant: Text | None = None
    cache_salt: Annotated[Text | None, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] = None
    kv_keep: Annotated[StrictFloat | None, stated(exclusiveMinimum=0, maximum=1)] = None
    kv_quality: Annotated[Text | None, Field(min_length=1, max_length=MAX_KIND_CHARACTERS)] = None
    pin: StrictBool = False
    ttl_s: Annotated[StrictFloat | None, stated(exclusiveMinimum=0)] = None
    retention_priority: Annotated[StrictFloat, stated(minimum=0, maximum=100)] = DEFAULT_RETENTION_PRIORITY

    @model_validator(mode="after")
    def _check(self) -> WarmRequest:
        check_one_prompt(self.prompt, self.messages)
        self.warm_up()
        return self

    def warm_up(self) -> WarmUp:
        """Return the terms of the warm-up.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        return WarmUp(pin=self.pin, ttl_s=self.ttl_s, retention_priority=self.retention_priority)
