"""``prompt_cache_retention``: OpenAI's word for how long a prompt should stay cached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator

from pagefold.request import HintPin

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PromptCacheRetention", "hints_of"]

_DAY_S = 86_400.0


def _is_retention(value: object) -> object:
    if value not in ("in_memory", "in-memory", "24h"):  # OpenAI's clients have written both
        msg = 'it must be "in_memory" or "24h"'
        raise ValueError(msg)
    return value


PromptCacheRetention: TypeAlias = Annotated[Literal["in_memory", "in-memory", "24h"], BeforeValidator(_is_retention)]


def hints_of(retention: str | None, prompt_token_ids: Sequence[int]) -> tuple[HintPin, ...]:
    """Return what is to be pinned for a retention: of ``24h`` the whole prompt, for a day; else nothing."""
    return (HintPin(len(prompt_token_ids), _DAY_S),) if retention == "24h" and prompt_token_ids else ()
