"""ChatPrompt: a chat in the model's template, ready to be answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagefold.server.reasoning.thinking import NO_THINKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.server.chat_schemas import ChatMessage
    from pagefold.server.fingerprint import Fingerprint
    from pagefold.server.reasoning.thinking import Thinking

__all__ = ["ChatCut", "ChatPrompt"]


class ChatCut(NamedTuple):
    """A place in a chat.

    Attributes:
        messages: before it; the last of them may be the beginning of one.
        num_tools: how many tools are before it, which come before all messages; None for all.
    """

    messages: Sequence[ChatMessage]
    num_tools: int | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat comes to.

    Attributes:
        token_ids: of its text.
        thinking: how thinking stands where the answer begins.
        fingerprint: of its parts; None where it is no chat.
        cut_tokens: of each place that was asked for, how many tokens are certainly before it; 0 for unknown.
    """

    token_ids: list[int]
    thinking: Thinking = NO_THINKING
    fingerprint: Fingerprint | None = None
    cut_tokens: tuple[int, ...] = ()
