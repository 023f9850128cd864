"""ChatPrompt: a chat in the model's template, ready to be answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.server.reasoning.thinking import NO_THINKING

if TYPE_CHECKING:
    from pagefold.server.fingerprint import Fingerprint
    from pagefold.server.reasoning.thinking import Thinking

__all__ = ["ChatPrompt"]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat comes to.

    Attributes:
        token_ids: of its text.
        thinking: how thinking stands where the answer begins.
        fingerprint: of its parts; None where it is no chat.
    """

    token_ids: list[int]
    thinking: Thinking = NO_THINKING
    fingerprint: Fingerprint | None = None
